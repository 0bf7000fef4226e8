//! What the kernel tells about the device behind an interface (netdevice(7), ethtool).

use crate::sys::errno::check;
use std::fmt;
use std::mem::offset_of;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// A network device, in the terms of libfabric's `fi_nic`. `None` stands for unknown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Nic {
    /// Name of the interface, such as `eth0`.
    pub(crate) name: String,
    /// Name of the driver, such as `mlx5_core`.
    pub(crate) driver: Option<String>,
    /// Version of the device's firmware.
    pub(crate) firmware: Option<String>,
    pub(crate) pci: Option<PciAddress>,
    /// PCI identifiers, as sysfs writes them: `0x15b3`.
    pub(crate) vendor_id: Option<String>,
    pub(crate) device_id: Option<String>,
    /// Ethernet address; `None` for the loopback interface and other networks.
    pub(crate) mac: Option<[u8; 6]>,
    /// Longest IP packet, bytes.
    pub(crate) mtu: Option<u32>,
    /// Bits a second.
    pub(crate) speed_bps: Option<u64>,
    /// True if the interface is up and has a carrier.
    pub(crate) running: Option<bool>,
    /// Facts of an RDMA device, whose name is not an interface's.
    pub(crate) rdma: Option<RdmaFacts>,
}

/// Additional facts about an RDMA device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RdmaFacts {
    /// Version of the hardware.
    pub(crate) version: u32,
    /// The port's GID, as text.
    pub(crate) address: String,
    /// `InfiniBand` or `Ethernet`.
    pub(crate) network: &'static str,
}

/// A device's location on the PCI bus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PciAddress {
    pub(crate) domain: u16,
    pub(crate) bus: u8,
    pub(crate) device: u8,
    pub(crate) function: u8,
}

impl PciAddress {
    /// Parses `0000:3b:00.1`.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let mut parts = text.split([':', '.']);
        let mut part = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits)?;
            u16::from_str_radix(part, 16).ok()
        };
        let (domain, bus, device, function) = (part(4)?, part(2)?, part(2)?, part(1)?);
        let (bus, device, function) = (bus as u8, device as u8, function as u8);
        parts.next().is_none().then_some(Self { domain, bus, device, function })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl Nic {
    /// The device behind the interface `name`.
    pub(crate) fn of(name: &str) -> Self {
        let queries = Queries::new();
        let info = queries.as_ref().and_then(|q| q.driver_info(name));
        let (driver, firmware, bus) = info.unwrap_or_default();
        // A device that is part of another, such as virtio's, has no PCI location: use its parent's.
        let link = std::fs::canonicalize(format!("/sys/class/net/{name}/device")).ok();
        let pci = PciAddress::from_text(&bus).or_else(|| {
            let parts = link.as_deref()?.iter().rev();
            parts.filter_map(|part| PciAddress::from_text(part.to_str()?)).next()
        });
        let identifier = |what: &str| {
            let pci = pci?;
            let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/{what}"));
            Some(text.ok()?.trim().to_owned())
        };
        let some = |text: String| Some(text).filter(|text| !text.is_empty() && text != "N/A");
        Self {
            name: name.to_owned(),
            vendor_id: identifier("vendor"),
            device_id: identifier("device"),
            driver: some(driver),
            firmware: some(firmware),
            pci,
            mac: queries.as_ref().and_then(|q| q.mac(name)),
            mtu: queries.as_ref().and_then(|q| q.mtu(name)),
            speed_bps: queries.as_ref().and_then(|q| q.speed_bps(name)),
            running: queries.as_ref().and_then(|q| q.running(name)),
            rdma: None,
        }
    }
}

/// Queries about interfaces of this process's network namespace. sysfs may belong to another one.
#[derive(Debug)]
pub(super) struct Queries(UdpSocket);

impl Queries {
    /// `None` if no descriptor is left, or there is no IP.
    pub(super) fn new() -> Option<Self> {
        let bound = UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::1]:0"));
        bound.ok().map(Self)
    }

    /// Longest IP packet, bytes.
    pub(super) fn mtu(&self, name: &str) -> Option<u32> {
        let reply = self.ask(name, libc::SIOCGIFMTU)?;
        // SAFETY: SIOCGIFMTU fills this member.
        u32::try_from(unsafe { reply.ifr_ifru.ifru_mtu }).ok()
    }

    fn running(&self, name: &str) -> Option<bool> {
        let reply = self.ask(name, libc::SIOCGIFFLAGS)?;
        // SAFETY: SIOCGIFFLAGS fills this member.
        let flags = libc::c_int::from(unsafe { reply.ifr_ifru.ifru_flags });
        let wanted = libc::IFF_UP | libc::IFF_RUNNING;
        Some(flags & wanted == wanted)
    }

    fn mac(&self, name: &str) -> Option<[u8; 6]> {
        let reply = self.ask(name, libc::SIOCGIFHWADDR)?;
        // SAFETY: SIOCGIFHWADDR fills this member.
        let address = unsafe { reply.ifr_ifru.ifru_hwaddr };
        let ethernet = address.sa_family == libc::ARPHRD_ETHER;
        let [a, b, c, d, e, f, ..] = address.sa_data.map(|byte| byte as u8);
        ethernet.then_some([a, b, c, d, e, f])
    }

    /// Driver, firmware version and bus location, empty if unknown.
    fn driver_info(&self, name: &str) -> Option<(String, String, String)> {
        const GDRVINFO: u32 = 3;
        const TEXT: usize = 32;
        /// The beginning of ethtool_drvinfo, padded to its length.
        #[repr(C)]
        struct DriverInfo {
            command: u32,
            driver: [u8; TEXT],
            version: [u8; TEXT],
            firmware: [u8; TEXT],
            bus: [u8; TEXT],
            rest: [u8; 64],
        }
        let none = [0; TEXT];
        let mut info = DriverInfo {
            command: GDRVINFO,
            driver: none,
            version: none,
            firmware: none,
            bus: none,
            rest: [0; 64],
        };
        // SAFETY: `DriverInfo` is as long as the kernel's.
        unsafe { self.ethtool(name, &mut info) }?;
        let text = |bytes: [u8; TEXT]| {
            let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(text).into_owned()
        };
        Some((text(info.driver), text(info.firmware), text(info.bus)))
    }

    fn speed_bps(&self, name: &str) -> Option<u64> {
        const GLINKSETTINGS: u32 = 0x4c;
        /// ethtool_link_settings with room for all link modes that a kernel can report.
        #[repr(C)]
        struct LinkSettings {
            command: u32,
            speed_mbps: u32,
            five: [u8; 7],
            mode_words: i8,
            four: [u8; 4],
            seven: [u32; 7],
            modes: [u32; 3 * 127],
        }
        const _: () = assert!(offset_of!(LinkSettings, modes) == 48);
        let mut settings = LinkSettings {
            command: GLINKSETTINGS,
            speed_mbps: 0,
            five: [0; 7],
            mode_words: 0,
            four: [0; 4],
            seven: [0; 7],
            modes: [0; 3 * 127],
        };
        // SAFETY: `LinkSettings` has room for as many modes as the command can ask for.
        unsafe { self.ethtool(name, &mut settings) }?;
        // The first answer only tells, as a negative number, how many words the modes take.
        settings.command = GLINKSETTINGS;
        settings.mode_words = settings.mode_words.checked_neg().filter(|words| *words > 0)?;
        // SAFETY: `LinkSettings` has room for as many modes as the command can ask for.
        unsafe { self.ethtool(name, &mut settings) }?;
        let mbps = settings.speed_mbps;
        // SPEED_UNKNOWN is -1; a driver that never set the speed says 0.
        let known = mbps != u32::MAX && mbps != 0;
        known.then(|| u64::from(mbps) * 1_000_000)
    }

    /// One ioctl of those that fill a part of an ifreq.
    fn ask(&self, name: &str, request: libc::c_ulong) -> Option<libc::ifreq> {
        // SAFETY: the requests used here fill the ifreq itself.
        unsafe { self.request(name, request, std::ptr::null_mut()) }
    }

    /// One ethtool request, which fills `data`.
    ///
    /// # Safety
    /// `T` begins with the command and has room for all that the command fills.
    unsafe fn ethtool<T>(&self, name: &str, data: &mut T) -> Option<()> {
        let data = (&raw mut *data).cast();
        // SAFETY: the caller guarantees the layout of `T`.
        unsafe { self.request(name, libc::SIOCETHTOOL, data) }.map(|_| ())
    }

    /// # Safety
    /// `data` is what `request` expects.
    unsafe fn request(
        &self,
        name: &str,
        request: libc::c_ulong,
        data: *mut libc::c_char,
    ) -> Option<libc::ifreq> {
        // SAFETY: all zeroes is a valid ifreq.
        let mut asked: libc::ifreq = unsafe { std::mem::zeroed() };
        // The last byte stays 0.
        if name.len() >= asked.ifr_name.len() {
            return None;
        }
        for (to, from) in asked.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        asked.ifr_ifru.ifru_data = data;
        // SAFETY: `asked` is an ifreq; the caller vouches for `data`.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, &raw mut asked) }).ok()?;
        Some(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::net::interfaces;

    #[test]
    fn every_interface_tells_something() {
        for interface in interfaces() {
            let nic = Nic::of(&interface.name);
            assert_eq!(nic.mtu, Some(interface.mtu));
            assert!(nic.running.is_some());
            assert_ne!(nic.mac, Some([0; 6]));
            if interface.loopback {
                assert_eq!((nic.mac, nic.pci, nic.speed_bps), (None, None, None));
            }
        }
    }

    #[test]
    fn names_that_nothing_has() {
        for name in ["", "no-such-0", "a-name-that-is-far-too-long", "../../etc", "a\0b"] {
            let nic = Nic::of(name);
            assert_eq!((nic.mtu, nic.mac, nic.driver, nic.pci), (None, None, None, None));
        }
    }

    #[test]
    fn pci_addresses() {
        let address = PciAddress { domain: 0, bus: 0x3b, device: 0x1f, function: 1 };
        assert_eq!(PciAddress::from_text("0000:3b:1f.1"), Some(address));
        for text in ["", "virtio0", "3b:1f.1", "0000:3b:1f.1.2", "000:3b:1f.1", "0000:3g:00.0"] {
            assert_eq!(PciAddress::from_text(text), None, "{text}");
        }
    }
}
