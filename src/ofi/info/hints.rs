//! The hints of `fi_getinfo` as one Rust value. An attribute structure that the application left
//! out reads as all zeroes, which fi_getinfo(3) defines as "no hint" for every member.

use crate::transport::job_key::SECRET_MAX;
use libfabric_sys::{
    FI_AV_AUTH_KEY, fi_domain_attr, fi_domain_attr_2_7, fi_ep_attr, fi_info, fi_rx_attr,
    fi_tx_attr, fi_version, fid_fabric, fid_t,
};
use std::ffi::{CStr, c_char, c_void};
use std::net::IpAddr;

/// A device, or one of its ports, that the application names as the domain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NamedDevice {
    pub(super) name: String,
    /// The IP addresses of its ports, if it has any.
    pub(super) ips: Vec<IpAddr>,
}

/// The application's hints.
#[derive(Clone, Debug)]
pub(super) struct Hints {
    pub(super) caps: u64,
    pub(super) addr_format: u32,
    pub(super) source: Option<Vec<u8>>,
    pub(super) dest: Option<Vec<u8>>,
    pub(super) handle: fid_t,
    pub(super) tx: fi_tx_attr,
    pub(super) rx: fi_rx_attr,
    pub(super) ep: fi_ep_attr,
    /// The bytes of `ep.auth_key`; `None` for a null pointer or a size that this provider does not offer.
    pub(super) ep_auth_key: Option<Vec<u8>>,
    /// The same of `domain.base.auth_key`; with FI_AV_AUTH_KEY, empty for a pointer that is not null.
    pub(super) domain_auth_key: Option<Vec<u8>>,
    /// Members younger than the caller's API version are zero.
    pub(super) domain: fi_domain_attr_2_7,
    pub(super) domain_name: Option<String>,
    /// The device of that name.
    pub(super) device: Option<NamedDevice>,
    /// An open fabric, of any provider.
    pub(super) fabric: *mut fid_fabric,
    pub(super) fabric_name: Option<String>,
    pub(super) prov_name: Option<String>,
}

impl Hints {
    /// Hints that ask for nothing.
    pub(super) fn none() -> Self {
        // SAFETY: the members are integers and pointers, for which zero is a valid value.
        let (tx, rx, ep, domain) = unsafe {
            (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed())
        };
        Self {
            caps: 0,
            addr_format: 0,
            source: None,
            dest: None,
            handle: std::ptr::null_mut(),
            tx,
            rx,
            ep,
            ep_auth_key: None,
            domain_auth_key: None,
            domain,
            domain_name: None,
            device: None,
            fabric: std::ptr::null_mut(),
            fabric_name: None,
            prov_name: None,
        }
    }

    /// Copies the caller's hints.
    ///
    /// # Safety
    /// `info` is null or points to hints as fi_getinfo(3) has them in API version `version`.
    pub(super) unsafe fn read(version: u32, info: *const fi_info) -> Self {
        let mut hints = Self::none();
        // SAFETY: the caller vouches for the structure and what it points to; members that a
        // version lacks are not read.
        unsafe {
            let Some(info) = info.as_ref() else { return hints };
            hints.caps = info.caps;
            hints.addr_format = info.addr_format;
            hints.source = bytes(info.src_addr, info.src_addrlen);
            hints.dest = bytes(info.dest_addr, info.dest_addrlen);
            hints.handle = info.handle;
            if let Some(tx) = info.tx_attr.as_ref() {
                hints.tx = *tx;
            }
            if let Some(rx) = info.rx_attr.as_ref() {
                hints.rx = *rx;
            }
            if let Some(ep) = info.ep_attr.as_ref() {
                hints.ep = *ep;
            }
            if !info.domain_attr.is_null() {
                hints.domain = read_domain(version, info.domain_attr);
                hints.domain_name = text(hints.domain.base.name);
            }
            if let Some(fabric) = info.fabric_attr.as_ref() {
                hints.fabric = fabric.fabric;
                hints.fabric_name = text(fabric.name);
                hints.prov_name = text(fabric.prov_name);
            }
        }
        if version < fi_version(1, 5) {
            // fi_endpoint(3), fi_domain(3): authorization keys are ignored before 1.5.
            hints.ep.auth_key_size = 0;
            hints.domain.base.auth_key_size = 0;
        }
        let (ep, domain) = (&mut hints.ep, &mut hints.domain.base);
        // SAFETY: the keys have `auth_key_size` bytes (fi_endpoint(3), fi_domain(3)).
        unsafe {
            hints.ep_auth_key = auth_key(ep.auth_key, ep.auth_key_size);
            hints.domain_auth_key = auth_key(domain.auth_key, domain.auth_key_size);
        }
        (ep.auth_key, domain.auth_key) = (std::ptr::null_mut(), std::ptr::null_mut());
        hints
    }
}

/// # Safety
/// `attr` points to a structure of API version `version`.
unsafe fn read_domain(version: u32, attr: *const fi_domain_attr) -> fi_domain_attr_2_7 {
    let mut domain = Hints::none().domain;
    let newest = attr.cast::<fi_domain_attr_2_7>();
    // SAFETY: the caller vouches; structures only grow at their end, by the versions below.
    unsafe {
        domain.base = *attr;
        if version >= fi_version(1, 20) {
            domain.max_ep_auth_key = (&raw const (*newest).max_ep_auth_key).read();
        }
        if version >= fi_version(2, 0) {
            domain.max_group_id = (&raw const (*newest).max_group_id).read();
        }
    }
    domain
}

/// A C string as text; `None` for a null pointer. Bytes that are not UTF-8 become replacement characters:
/// such a name matches nothing of this provider.
///
/// # Safety
/// `text` is null or a C string.
pub(super) unsafe fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller vouches.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Reads an authorization key. A size that is not offered is not taken as a number of bytes.
///
/// # Safety
/// `at` is null or points to `len` bytes if `len` is at most [`SECRET_MAX`].
unsafe fn auth_key(at: *const u8, len: usize) -> Option<Vec<u8>> {
    if len == FI_AV_AUTH_KEY {
        return (!at.is_null()).then(Vec::new);
    }
    if len == 0 || len > SECRET_MAX {
        return None;
    }
    // SAFETY: the caller vouches.
    unsafe { bytes(at.cast(), len) }
}

/// # Safety
/// `at` is null or points to `len` bytes.
unsafe fn bytes(at: *const c_void, len: usize) -> Option<Vec<u8>> {
    if at.is_null() {
        return None;
    }
    // SAFETY: the caller vouches.
    Some(unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec())
}
