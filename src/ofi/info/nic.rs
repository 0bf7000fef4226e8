//! `struct fid_nic`: the device behind the interface of an info (fi_nic(3)).
//!
//! libfabric closes it through this provider's table, but copies it in two ways: by FI_DUP, and, in its
//! layering providers, member by member with malloc(3), the table's address included. So every member is
//! a block of its own that free(3) accepts.

use super::parts::Parts;
use crate::ofi::guard::entry;
use crate::ofi::table::{Operations, Table};
use crate::sys::net::{Nic, PciAddress, RdmaFacts};
use libfabric_sys::{
    FI_BUS_PCI, FI_BUS_UNKNOWN, FI_CLASS_NIC, FI_DUP, FI_EINVAL, FI_ENOMEM, FI_ENOSYS,
    FI_LINK_DOWN, FI_LINK_UNKNOWN, FI_LINK_UP, fi_bus_attr, fi_bus_attr__bindgen_ty_1,
    fi_device_attr, fi_link_attr, fi_ops, fi_pci_attr, fid, fid_nic,
};
use std::ffi::{c_char, c_int, c_void};
use std::fmt::Write;
use std::ptr::null_mut;

static OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    control: Some(control),
    tostr: Some(tostr),
    ..fi_ops::STUBS
});

/// The device of `interface`, such as `eth0`. `None` for an interface without hardware (loopback, tunnels) or
/// without a carrier: MPICH refuses an info whose link is down, even if the node can be reached.
pub(super) fn behind(interface: &str) -> Option<Nic> {
    // The interface name of a labelled address includes the label: eth0:1 (getifaddrs(3)).
    let nic = Nic::of(interface.split(':').next().unwrap_or(interface));
    let is_device = nic.mac.is_some() || nic.pci.is_some();
    (is_device && nic.running != Some(false)).then_some(nic)
}

/// The C structure, or `None` without memory. `parts` owns it and all its members.
pub(super) fn write(parts: &mut Parts, nic: &Nic) -> Option<*mut fid_nic> {
    let device = fi_device_attr {
        name: parts.text(&nic.name)?,
        device_id: optional(parts, nic.device_id.as_deref())?,
        device_version: optional(parts, nic.rdma.as_ref().map(version).as_deref())?,
        vendor_id: optional(parts, nic.vendor_id.as_deref())?,
        driver: optional(parts, nic.driver.as_deref())?,
        firmware: optional(parts, nic.firmware.as_deref())?,
    };
    // Never FI_BUS_PCI for an interface, though its PCI address is known: MPICH up to 5.0 ends the process in
    // MPI_Init when its hwloc does not know that address, as in builds without PCI (mpir_hwtopo.c, "io_device").
    // The address would serve to choose among several infos, but there is only one. An RDMA device reports its
    // address, as in other providers.
    let place = nic.pci.filter(|_| nic.rdma.is_some());
    let pci = place.map_or(
        fi_pci_attr { domain_id: 0, bus_id: 0, device_id: 0, function_id: 0 },
        |PciAddress { domain, bus, device, function }| fi_pci_attr {
            domain_id: domain,
            bus_id: bus,
            device_id: device,
            function_id: function,
        },
    );
    let bus = fi_bus_attr {
        bus_type: if place.is_some() { FI_BUS_PCI } else { FI_BUS_UNKNOWN },
        attr: fi_bus_attr__bindgen_ty_1 { pci },
    };
    let mac = nic.mac.map(|mac| mac.map(|byte| format!("{byte:02x}")).join(":"));
    let rdma = nic.rdma.as_ref();
    let address = rdma.map(|rdma| rdma.address.as_str()).or(mac.as_deref());
    let ethernet = mac.as_ref().map(|_| "Ethernet");
    let network = rdma.map(|rdma| rdma.network).or(ethernet);
    let link = fi_link_attr {
        address: optional(parts, address)?,
        mtu: nic.mtu.unwrap_or(0) as usize,
        speed: usize::try_from(nic.speed_bps.unwrap_or(0)).unwrap_or(usize::MAX),
        state: match nic.running {
            Some(true) => FI_LINK_UP,
            Some(false) => FI_LINK_DOWN,
            None => FI_LINK_UNKNOWN,
        },
        network_type: optional(parts, network)?,
    };
    let nic = fid_nic {
        fid: fid { fclass: FI_CLASS_NIC, context: null_mut(), ops: OPS.as_mut_ptr() },
        device_attr: parts.structure(device)?,
        bus_attr: parts.structure(bus)?,
        link_attr: parts.structure(link)?,
        prov_attr: null_mut(),
    };
    parts.structure(nic)
}

fn version(rdma: &RdmaFacts) -> String {
    format!("{:#x}", rdma.version)
}

/// A copy of the text, or a null pointer for none; `None` when there is no memory.
fn optional(parts: &mut Parts, text: Option<&str>) -> Option<*mut c_char> {
    match text {
        Some(text) => parts.text(text),
        None => Some(null_mut()),
    }
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(nic)", || {
        if fid.is_null() {
            return -FI_EINVAL;
        }
        // SAFETY: a fid_nic with this table, or a copy of one (see the module): every member is null or
        // from malloc, and the caller has given it up.
        unsafe {
            let nic = *fid.cast::<fid_nic>();
            if let Some(device) = nic.device_attr.as_ref() {
                for text in [
                    device.name,
                    device.device_id,
                    device.device_version,
                    device.vendor_id,
                    device.driver,
                    device.firmware,
                ] {
                    libc::free(text.cast());
                }
            }
            if let Some(link) = nic.link_attr.as_ref() {
                libc::free(link.address.cast());
                libc::free(link.network_type.cast());
            }
            libc::free(nic.device_attr.cast());
            libc::free(nic.bus_attr.cast());
            libc::free(nic.link_attr.cast());
            libc::free(fid.cast());
        }
        0
    })
}

unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(nic)", || {
        if command != FI_DUP {
            return -FI_ENOSYS;
        }
        if fid.is_null() || arg.is_null() {
            return -FI_EINVAL;
        }
        let mut parts = Parts::default();
        // SAFETY: a fid_nic as in `close`; the argument of FI_DUP points to the pointer to fill.
        unsafe {
            let Some(copy) = copy(&mut parts, &*fid.cast::<fid_nic>()) else { return -FI_ENOMEM };
            arg.cast::<*mut fid_nic>().write(copy);
        }
        parts.give();
        0
    })
}

/// # Safety
/// The members of `nic` are null or valid, as those of `write` are.
unsafe fn copy(parts: &mut Parts, nic: &fid_nic) -> Option<*mut fid_nic> {
    let mut new = *nic;
    // SAFETY: the caller vouches.
    unsafe {
        if let Some(device) = nic.device_attr.as_ref() {
            let mut device = *device;
            for text in [
                &mut device.name,
                &mut device.device_id,
                &mut device.device_version,
                &mut device.vendor_id,
                &mut device.driver,
                &mut device.firmware,
            ] {
                *text = optional(parts, text_of(*text).as_deref())?;
            }
            new.device_attr = parts.structure(device)?;
        }
        if let Some(bus) = nic.bus_attr.as_ref() {
            new.bus_attr = parts.structure(*bus)?;
        }
        if let Some(link) = nic.link_attr.as_ref() {
            let mut link = *link;
            for text in [&mut link.address, &mut link.network_type] {
                *text = optional(parts, text_of(*text).as_deref())?;
            }
            new.link_attr = parts.structure(link)?;
        }
    }
    parts.structure(new)
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text_of(text: *const c_char) -> Option<String> {
    // SAFETY: the caller vouches.
    unsafe { super::hints::text(text) }
}

/// Appends to the text in `buf`, in the format that fi_tostr(3) has for the members of an info.
unsafe extern "C" fn tostr(fid: *const fid, buf: *mut c_char, len: usize) -> c_int {
    entry("fi_tostr(nic)", || {
        if fid.is_null() || buf.is_null() || len == 0 {
            return -FI_EINVAL;
        }
        // SAFETY: a fid_nic as in `close`; `buf` has `len` bytes, and begins with a C string or is full.
        unsafe {
            let used = libc::strnlen(buf, len);
            // One byte is for the final NUL.
            let Some(room) = (len - used).checked_sub(1) else { return 0 };
            let text = describe(&*fid.cast::<fid_nic>());
            let n = room.min(text.len());
            buf.add(used).cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), n);
            *buf.add(used + n) = 0;
        }
        0
    })
}

/// # Safety
/// As [`copy`].
unsafe fn describe(nic: &fid_nic) -> String {
    // The text with which glibc prints a null pointer.
    let text = |text: *const c_char| {
        // SAFETY: the caller vouches.
        unsafe { text_of(text) }.unwrap_or_else(|| "(null)".to_owned())
    };
    let mut out = "    nic:\n".to_owned();
    // Writing to a String cannot fail.
    // SAFETY: the caller vouches.
    if let Some(device) = unsafe { nic.device_attr.as_ref() } {
        out.push_str("        fi_device_attr:\n");
        for (name, value) in [
            ("name", device.name),
            ("device_id", device.device_id),
            ("device_version", device.device_version),
            ("vendor_id", device.vendor_id),
            ("driver", device.driver),
            ("firmware", device.firmware),
        ] {
            let _ = writeln!(out, "            {name}: {}", text(value));
        }
    }
    // SAFETY: the caller vouches.
    if let Some(bus) = unsafe { nic.bus_attr.as_ref() } {
        // SAFETY: plain numbers, of FI_BUS_PCI, the only kind of bus with attributes.
        let fi_pci_attr { domain_id, bus_id, device_id, function_id } = unsafe { bus.attr.pci };
        out.push_str("        fi_bus_attr:\n            bus_type: ");
        match bus.bus_type {
            FI_BUS_PCI => {
                let _ = writeln!(
                    out,
                    "FI_BUS_PCI\n            fi_pci_attr:\n                domain_id: {domain_id}\n                bus_id: {bus_id}\n                device_id: {device_id}\n                function_id: {function_id}"
                );
            }
            _ => out.push_str("FI_BUS_UNKNOWN\n"),
        }
    }
    // SAFETY: the caller vouches.
    if let Some(link) = unsafe { nic.link_attr.as_ref() } {
        let state = match link.state {
            FI_LINK_UP => "FI_LINK_UP",
            FI_LINK_DOWN => "FI_LINK_DOWN",
            _ => "FI_LINK_UNKNOWN",
        };
        let (address, kind) = (text(link.address), text(link.network_type));
        let (mtu, speed) = (link.mtu, link.speed);
        let _ = write!(
            out,
            "        fi_link_attr:\n            address: {address}\n            mtu: {mtu}\n            speed: {speed}\n            state: {state}\n            network_type: {kind}\n"
        );
    }
    out
}
