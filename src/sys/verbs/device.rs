//! Devices, and the facts that they report.

use super::context::Context;
use super::events::DeviceEvent;
use super::fork;
use super::library::{Verbs, class, verbs};
use super::owned::{Owned, check};
use crate::sys::errno::{Errno, Result};
use crate::sys::net::PciAddress;
use crate::sys::process;
use rdma_core_sys::{
    IBV_NODE_CA, IBV_NODE_RNIC, IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP, ibv_device, ibv_device_attr,
    ibv_pd,
};
use std::ffi::CStr;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;

/// The devices of this host.
pub(crate) struct DeviceList {
    verbs: &'static Verbs,
    list: *mut *mut ibv_device,
    len: usize,
}

/// A device of the list; its context may outlive the list.
#[derive(Clone, Copy)]
pub(crate) struct Device<'a> {
    list: &'a DeviceList,
    raw: *mut ibv_device,
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Pd {
    raw: Owned<ibv_pd>,
    pub(super) context: Arc<Context>,
}

/// The vendor id of soft-RoCE devices, which no manufacturer has (the kernel's RXE_VENDOR_ID).
const SOFT_ROCE: &str = "0xffffff";

/// The facts that a device reports.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct DeviceFacts {
    pub(crate) firmware: Option<String>,
    /// PCI identifiers, as sysfs writes them: `0x15b3`.
    pub(crate) vendor_id: Option<String>,
    pub(crate) device_id: Option<String>,
    pub(crate) version: u32,
    pub(crate) ports: u8,
    /// Most work requests of a queue, and most entries of a completion queue.
    pub(crate) max_requests: u32,
    pub(crate) max_completions: u32,
    /// From sysfs; `None` for a device without hardware, such as rdma_rxe's.
    pub(crate) pci: Option<PciAddress>,
    pub(crate) numa_node: Option<u32>,
    pub(crate) driver: Option<String>,
}

impl DeviceList {
    /// Lists the devices. Errors: ENOSYS without libibverbs or kernel support, ENOMEM, EPERM.
    pub(crate) fn new() -> Result<Self> {
        let verbs = verbs()?;
        fork::prepare(verbs);
        let mut len = 0;
        // SAFETY: fills a live local.
        let list = unsafe { (verbs.get_device_list)(&mut len) };
        if list.is_null() {
            return Err(Errno::last());
        }
        Ok(Self { verbs, list, len: usize::try_from(len).unwrap_or(0) })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Device<'_>> {
        // SAFETY: the library says that the list has so many entries.
        (0..self.len).map(|i| Device { list: self, raw: unsafe { *self.list.add(i) } })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list is the library's and no longer used; open devices stay valid.
        unsafe { (self.verbs.free_device_list)(self.list) };
    }
}

impl Device<'_> {
    /// Its name, such as `mlx5_0`.
    pub(crate) fn name(&self) -> String {
        // SAFETY: a device of a live list; the name is a C string.
        unsafe { CStr::from_ptr((&raw const (*self.raw).name).cast()) }
            .to_string_lossy()
            .into_owned()
    }

    /// Its directory in sysfs, such as `/sys/class/infiniband_verbs/uverbs0`.
    fn node(&self) -> Option<PathBuf> {
        // SAFETY: a device of a live list; the path is a C string.
        let path = unsafe { CStr::from_ptr((&raw const (*self.raw).dev_path).cast()) };
        let path = PathBuf::from(path.to_str().ok()?);
        path.exists().then_some(path)
    }

    /// The speed of its fastest active port as sysfs shows it, Mbit/s; `None`: it shows none. Error: no port is active. Opening a
    /// device takes the kernel some milliseconds, and other processes of the node want to do that at the same time.
    pub(crate) fn listed_mbps(&self) -> std::result::Result<Option<u64>, &'static str> {
        let ports = std::fs::read_dir(class().join(self.name()).join("ports"));
        let (mut states, mut active, mut fastest) = (0, 0, None);
        for port in ports.into_iter().flatten().flatten() {
            let file = |what| std::fs::read_to_string(port.path().join(what)).ok();
            let Some(state) = file("state") else { continue };
            states += 1;
            if state.contains("ACTIVE") {
                active += 1;
                fastest = fastest.max(file("rate").as_deref().and_then(mbps));
            }
        }
        if states > 0 && active == 0 { Err("has no active port") } else { Ok(fastest) }
    }

    /// Whether it is an InfiniBand or RoCE adapter. Error: what it is instead.
    pub(crate) fn is_adapter(&self) -> std::result::Result<(), &'static str> {
        // SAFETY: a device of a live list.
        let (node, transport) = unsafe { ((*self.raw).node_type, (*self.raw).transport_type) };
        match (node, transport) {
            (IBV_NODE_CA, IBV_TRANSPORT_IB) => Ok(()),
            (IBV_NODE_RNIC, _) | (_, IBV_TRANSPORT_IWARP) => {
                Err("speaks iWARP, which has no datagrams (devlink switches an E810 to RoCE)")
            }
            _ => Err("has queue pairs of its own kind only, as EFA and usNIC do"),
        }
    }

    /// Opens it, unless this process has it open already. Errors: EACCES, EPERM, EMFILE, ENODEV, ENOMEM …
    pub(crate) fn open(&self) -> Result<OpenDevice> {
        let verbs = self.list.verbs;
        let context = Context::of(verbs, (self.name(), self.node()), || {
            // SAFETY: a device of a live list; the context is closed after everything made from it, which holds it.
            let raw = unsafe { Owned::new((verbs.open_device)(self.raw), verbs.close_device) }?;
            // Reading asynchronous events must not block.
            // SAFETY: a live context; the member does not change.
            set_nonblocking(unsafe { (*raw.as_ptr()).async_fd })?;
            Ok(raw)
        })?;
        Ok(OpenDevice { context })
    }
}

/// An open device. Clones are one user of it, which hears of its events.
#[derive(Clone, Debug)]
pub(crate) struct OpenDevice {
    pub(super) context: Arc<Context>,
}

impl OpenDevice {
    pub(crate) fn name(&self) -> &str {
        self.context.name()
    }

    /// Both are users of one open device.
    #[cfg(test)]
    pub(crate) fn shares(&self, other: &Self) -> bool {
        self.context.as_ptr() == other.context.as_ptr()
    }

    /// The descriptor that is readable while the device has events that no user has taken.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        self.context.events()
    }

    /// The descriptor that is readable while this user has events that another one has taken. Errors: EMFILE, ENFILE,
    /// ENOMEM.
    pub(crate) fn bell(&self) -> Result<BorrowedFd<'_>> {
        self.context.bell()
    }

    /// The next event for this user. Makes a system call. Errors: the device is gone (EIO).
    pub(crate) fn take_event(&self) -> Result<Option<DeviceEvent>> {
        self.context.take_event()
    }

    /// True while the system shows the device. If its driver cannot take a removed device away from processes, the
    /// removal waits until they have closed it; the only sign of that is that its node disappears.
    pub(crate) fn is_there(&self) -> bool {
        self.context.is_there()
    }

    /// Queries its facts. Errors: the driver's.
    pub(crate) fn facts(&self) -> Result<DeviceFacts> {
        // SAFETY: all zeroes is a valid ibv_device_attr; the call fills it.
        let attr = unsafe {
            let mut attr: ibv_device_attr = std::mem::zeroed();
            check((self.context.verbs.query_device)(self.context.as_ptr(), &mut attr))?;
            attr
        };
        // SAFETY: fw_ver is a C string.
        let firmware = unsafe { CStr::from_ptr(attr.fw_ver.as_ptr()) }.to_string_lossy();
        let number = |id: u32| (id != 0).then(|| format!("0x{id:04x}"));
        let place = class().join(self.name()).join("device");
        let file = |what: &str| std::fs::read_to_string(place.join(what)).ok();
        let device = std::fs::canonicalize(&place).ok();
        let last = |path: PathBuf| Some(path.file_name()?.to_string_lossy().into_owned());
        Ok(DeviceFacts {
            firmware: Some(firmware.into_owned()).filter(|text| !text.trim().is_empty()),
            vendor_id: number(attr.vendor_id),
            device_id: number(attr.vendor_part_id),
            version: attr.hw_ver,
            ports: attr.phys_port_cnt,
            max_requests: u32::try_from(attr.max_qp_wr).unwrap_or(0),
            max_completions: u32::try_from(attr.max_cqe).unwrap_or(0),
            pci: device.and_then(last).and_then(|name| PciAddress::from_text(&name)),
            // -1 if the system has no NUMA nodes
            numa_node: file("numa_node").and_then(|text| text.trim().parse().ok()),
            driver: std::fs::canonicalize(place.join("driver")).ok().and_then(last),
        })
    }

    /// The traffic class that the administrator gave all RoCE connections of a port (`cma_roce_tos`, or the driver's
    /// file `tc`), if any.
    pub(crate) fn traffic_class(&self, port: u8) -> Option<u8> {
        let file = class().join(self.name()).join(format!("tc/{port}/traffic_class"));
        traffic_class(&std::fs::read_to_string(file).ok()?)
    }

    /// Whether kernel threads do the work of the hardware: soft-RoCE (rdma_rxe), over any Ethernet, in kernels where it
    /// has threads. In Linux 6.1 the posting thread itself does the work, in 6.12 kernel threads do.
    pub(crate) fn is_threads(&self) -> bool {
        self.is_soft() && process::kernel_is_at_least(6, 12)
    }

    /// Whether it is soft-RoCE (rdma_rxe).
    pub(crate) fn is_soft(&self) -> bool {
        let vendor = self.facts().ok().and_then(|facts| facts.vendor_id);
        vendor.as_deref() == Some(SOFT_ROCE)
    }
}

impl Pd {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let verbs = context.verbs;
        // SAFETY: a live context; the domain is deallocated after everything made from it, which
        // holds it.
        let raw = unsafe { Owned::new((verbs.alloc_pd)(context.as_ptr()), verbs.dealloc_pd) }?;
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }

    #[inline]
    pub(super) fn as_ptr(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

/// The class in a file of mlx5: `Global tclass=106`, and lines for single peers.
fn traffic_class(text: &str) -> Option<u8> {
    let number = text.lines().find_map(|line| line.trim().strip_prefix("Global tclass="))?;
    number.trim().parse().ok()
}

/// The speed in a file such as `2.5 Gb/sec (1X SDR)`, Mbit/s.
fn mbps(text: &str) -> Option<u64> {
    let gbps = text.split_whitespace().next()?;
    // The kernel writes one digit behind the point, if any.
    let (whole, tenths) = gbps.split_once('.').unwrap_or((gbps, "0"));
    let tenths: u64 = tenths.parse().ok().filter(|tenths| *tenths < 10)?;
    let mbps = whole.parse::<u64>().ok()?.checked_mul(1000)? + tenths * 100;
    (mbps > 0).then_some(mbps)
}

/// Makes `fd` non-blocking.
pub(super) fn set_nonblocking(fd: RawFd) -> Result<()> {
    // SAFETY: flags of a descriptor that the caller has open.
    unsafe {
        let flags = crate::sys::errno::check(libc::fcntl(fd, libc::F_GETFL))?;
        crate::sys::errno::check(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_of_a_port_is_read() {
        assert_eq!(mbps("2.5 Gb/sec (1X SDR)\n"), Some(2500));
        assert_eq!(mbps("400 Gb/sec (4X NDR)\n"), Some(400_000));
        assert_eq!(["", "0 Gb/sec", "none", "2.x Gb/sec"].map(mbps), [None; 4]);
    }

    #[test]
    fn the_global_traffic_class_is_read() {
        assert_eq!(traffic_class("Global tclass=106\n"), Some(106));
        assert_eq!(traffic_class("tclass=26\nmatch:\nGlobal tclass=7\n"), Some(7));
        assert_eq!(["", "0", "Global tclass=300"].map(traffic_class), [None; 3]);
    }
}
