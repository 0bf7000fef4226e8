//! The device of an info: written, copied, printed and closed as libfabric does it.

use super::super::nic::{behind, write};
use super::super::parts::Parts;
use super::*;
use crate::sys::net::{Nic, PciAddress, RdmaFacts, interfaces};

fn nic() -> Nic {
    Nic {
        name: "eth7".to_owned(),
        driver: Some("a_driver".to_owned()),
        firmware: None,
        pci: None,
        vendor_id: Some("0x15b3".to_owned()),
        device_id: Some("0x1017".to_owned()),
        mac: Some([2, 0, 0, 0xab, 0xcd, 0xef]),
        mtu: Some(9000),
        speed_bps: Some(25_000_000_000),
        running: Some(true),
        rdma: None,
    }
}

#[test]
fn an_rdma_device_tells_where_it_is() {
    let pci = Some(PciAddress { domain: 0, bus: 0x3b, device: 2, function: 1 });
    let address = "::ffff:10.0.0.1".to_owned();
    let rdma = Some(RdmaFacts { version: 16, address, network: "InfiniBand" });
    let nic = written(&Nic { name: "mlx5_0".to_owned(), pci, mac: None, rdma, ..nic() });
    let copy = duplicate(nic);
    for nic in [nic, copy] {
        let text = printed(nic, "", 4096);
        for line in [
            "name: mlx5_0",
            "device_version: 0x10",
            "bus_type: FI_BUS_PCI",
            "bus_id: 59",
            "function_id: 1",
            "address: ::ffff:10.0.0.1",
            "network_type: InfiniBand",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        close(nic);
    }
}

fn written(nic: &Nic) -> *mut fid_nic {
    let mut parts = Parts::default();
    let written = write(&mut parts, nic).unwrap();
    parts.give();
    written
}

/// Calls the table as libfabric does.
fn duplicate(nic: *mut fid_nic) -> *mut fid_nic {
    let mut copy: *mut fid_nic = null_mut();
    // SAFETY: a live fid_nic.
    let rc = unsafe {
        let control = (*(*nic).fid.ops).control.unwrap();
        assert_eq!(control(nic.cast(), FI_GETWAIT, null_mut()), -FI_ENOSYS);
        assert_eq!(control(nic.cast(), FI_DUP, null_mut()), -FI_EINVAL);
        control(nic.cast(), FI_DUP, (&raw mut copy).cast())
    };
    assert_eq!(rc, 0);
    copy
}

fn close(nic: *mut fid_nic) {
    // SAFETY: a live fid_nic, not used again.
    assert_eq!(unsafe { (*(*nic).fid.ops).close.unwrap()(nic.cast()) }, 0);
}

/// The text that is appended to `before` in a buffer of `len` bytes.
fn printed(nic: *mut fid_nic, before: &str, len: usize) -> String {
    // The bytes behind the buffer must not change.
    let mut buf = vec![0x55u8; len + 8];
    buf[..before.len()].copy_from_slice(before.as_bytes());
    if before.len() < len {
        buf[before.len()] = 0;
    }
    // SAFETY: a live fid_nic and a buffer of that length.
    unsafe {
        let tostr = (*(*nic).fid.ops).tostr.unwrap();
        assert_eq!(tostr(nic.cast(), buf.as_mut_ptr().cast(), len), 0);
    }
    assert_eq!(buf[len..], [0x55; 8]);
    let text = CStr::from_bytes_until_nul(&buf[..len]).map_or(&buf[..len], CStr::to_bytes);
    String::from_utf8(text.to_vec()).unwrap()
}

const TEXT: &str = "    nic:
        fi_device_attr:
            name: eth7
            device_id: 0x1017
            device_version: (null)
            vendor_id: 0x15b3
            driver: a_driver
            firmware: (null)
        fi_bus_attr:
            bus_type: FI_BUS_UNKNOWN
        fi_link_attr:
            address: 02:00:00:ab:cd:ef
            mtu: 9000
            speed: 25000000000
            state: FI_LINK_UP
            network_type: Ethernet
";

#[test]
fn a_device_is_copied_whole() {
    let first = written(&nic());
    assert_eq!(printed(first, "", 8192), TEXT);
    let second = duplicate(first);
    close(first);
    assert_eq!(printed(second, "", 8192), TEXT);
    let third = duplicate(second);
    close(second);
    assert_eq!(printed(third, "", 8192), TEXT);
    close(third);
}

#[test]
fn printing_stays_in_its_buffer() {
    let nic = written(&nic());
    assert_eq!(printed(nic, "before\n", 8192), format!("before\n{TEXT}"));
    for len in 1..64 {
        let whole = format!("abc{TEXT}");
        let want = if len <= 3 { &"abc"[..len] } else { &whole[..len - 1] };
        assert_eq!(printed(nic, &"abc"[..len.min(3)], len), want, "{len}");
    }
    close(nic);
}

#[test]
fn attributes_that_a_device_does_not_tell_are_left_open() {
    let silent = Nic {
        driver: None,
        vendor_id: None,
        device_id: None,
        mac: None,
        mtu: None,
        speed_bps: None,
        running: None,
        ..nic()
    };
    let nic = written(&silent);
    let text = printed(nic, "", 8192);
    for line in ["driver: (null)", "address: (null)", "mtu: 0", "FI_LINK_UNKNOWN"] {
        assert!(text.contains(line), "{text}");
    }
    close(nic);
}

#[test]
fn the_info_shows_the_device_of_its_interface() {
    if crate::sys::verbs::present() {
        return eprintln!("skipped: infos show an RDMA device");
    }
    for interface in interfaces() {
        let device = behind(&interface.name);
        assert!(device.is_none() || !interface.loopback);
        let mut hints = Hints::none();
        hints.domain_name = Some(interface.name.clone());
        let Ok(info) = CHints::new(hints).ask(NEW) else { continue };
        // SAFETY: a live info and, where there is one, its device.
        unsafe {
            assert_eq!((*info.0).nic.is_null(), device.is_none(), "{}", interface.name);
            let Some(nic) = (*info.0).nic.as_ref() else { continue };
            assert_eq!(nic.fid.fclass, FI_CLASS_NIC);
            assert_eq!(CStr::from_ptr((*nic.device_attr).name).to_str().unwrap(), interface.name);
            assert_eq!((*nic.link_attr).mtu, interface.mtu as usize);
            // Any other bus type ends MPICH where its hwloc does not know the address.
            assert_eq!((*nic.bus_attr).bus_type, FI_BUS_UNKNOWN);
        }
        // The device in the hints does not prevent a match.
        assert!(ask(NEW, None, None, 0, info.0).is_ok());
    }
}

#[test]
fn a_domain_may_have_the_name_of_an_rdma_device() {
    // The devices of a guest of `scripts/lab rdma`.
    let devices = std::env::var("UDRV_LAB_DEVICES").unwrap_or_default();
    for device in devices.split_whitespace() {
        for name in [device.to_owned(), format!("{device}:1")] {
            let mut hints = Hints::none();
            hints.domain_name = Some(name.clone());
            let info = CHints::new(hints).ask(NEW).unwrap();
            // SAFETY: a live info with a device.
            unsafe {
                let domain = CStr::from_ptr((*(*info.0).domain_attr).name);
                let nic = CStr::from_ptr((*(*(*info.0).nic).device_attr).name);
                assert_eq!((domain.to_str().unwrap(), nic.to_str().unwrap()), (&*name, device));
            }
            // As hints it leads to the same device.
            assert!(ask(NEW, None, None, 0, info.0).is_ok());
        }
        let mut hints = Hints::none();
        hints.domain_name = Some(format!("{device}:9"));
        assert!(CHints::new(hints).ask(NEW).is_err());
    }
}
