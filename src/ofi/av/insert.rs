//! `fi_av_insert`, `fi_av_insertsvc`, `fi_av_insertsym`.

use super::format::{read_address, stride};
use super::vector::AvFid;
use crate::ofi::guard::making_entry;
use crate::ofi::keys::DomainKey;
use crate::ofi::lock::Guard;
use crate::sys::net;
use crate::telemetry::log;
use crate::transport::Address;
use libfabric_sys::{
    FI_ADDR_NOTAVAIL, FI_AUTH_KEY, FI_EADDRNOTAVAIL, FI_EBADFLAGS, FI_EINVAL, FI_ENOEQ, FI_MORE,
    FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_SYNC_ERR, fi_addr_t, fid_av,
};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The progress of one call that inserts addresses.
struct Insertion<'a> {
    av: &'a AvFid,
    fi_addr: *mut fi_addr_t,
    /// FI_SYNC_ERR: receives one error number per address.
    errors: *mut c_int,
    context: *mut c_void,
    /// FI_AUTH_KEY: `fi_addr` holds the handle of a key for each address.
    keyed: bool,
    inserted: usize,
    at: usize,
    /// Events to write when the lock is free: the index of the address, and its error.
    failed: Vec<(u64, i32)>,
}

impl Insertion<'_> {
    /// Inserts the next address, or records its error. The guard belongs to the vector's domain.
    ///
    /// # Safety
    /// The application's arrays have an element for it.
    unsafe fn add(&mut self, guard: &Guard<'_>, address: Result<Address, i32>) {
        // SAFETY: the guard belongs to the domain of this vector; one short step.
        let state = unsafe { self.av.shared.state.get(guard) };
        // SAFETY: the caller vouches; `fi_addr` is not null where keys are given.
        let keyless =
            self.keyed && !self.av.shared.is_key(unsafe { *self.fi_addr.add(self.at) }, guard);
        let result = address
            .and_then(|address| if keyless { Err(FI_EINVAL) } else { state.insert(&address) });
        self.inserted += usize::from(result.is_ok());
        // SAFETY: the caller vouches for the arrays.
        unsafe {
            if !self.fi_addr.is_null() {
                *self.fi_addr.add(self.at) = *result.as_ref().unwrap_or(&FI_ADDR_NOTAVAIL);
            }
            if !self.errors.is_null() {
                *self.errors.add(self.at) = result.err().unwrap_or(0);
            } else if let (Err(error), true) = (result, self.av.asynchronous) {
                self.failed.push((self.at as u64, error));
            }
        }
        self.at += 1;
    }

    /// The result of the call: a count, or 0 with the count in an event if the vector is asynchronous.
    fn finish(self) -> c_int {
        match (&self.av.eq, self.av.asynchronous) {
            (Some(eq), true) => {
                let fid = (&raw const self.av.fid.fid).cast_mut();
                for (at, error) in self.failed {
                    eq.push_error(fid, self.context, at, error);
                }
                eq.push_av_complete(fid, self.context, self.inserted as u64);
                0
            }
            _ => c_int::try_from(self.inserted).unwrap_or(c_int::MAX),
        }
    }
}

/// Errors: ENOEQ; EBADFLAGS for flags that are not offered, such as FI_AV_USER_ID; EINVAL for flags that do not go
/// with the vector.
fn begin(
    av: &AvFid,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> Result<Insertion<'_>, i32> {
    if av.asynchronous && av.eq.is_none() {
        return Err(FI_ENOEQ);
    }
    if flags & !(FI_MORE | FI_SYNC_ERR | FI_AUTH_KEY) != 0 {
        log::warn(format_args!(
            "fi_av_insert refused: flags {flags:#x}, offered FI_MORE, FI_SYNC_ERR and FI_AUTH_KEY"
        ));
        return Err(FI_EBADFLAGS);
    }
    let keyed = flags & FI_AUTH_KEY != 0;
    if keyed != matches!(av.shared.domain.key, DomainKey::InVectors) {
        log::warn(format_args!(
            "fi_av_insert refused: FI_AUTH_KEY goes with a domain that has FI_AV_AUTH_KEY, and only with it"
        ));
        return Err(FI_EINVAL);
    }
    if keyed && fi_addr.is_null() {
        return Err(FI_EINVAL);
    }
    let synchronous_errors = flags & FI_SYNC_ERR != 0;
    if synchronous_errors && av.asynchronous {
        return Err(FI_EINVAL);
    }
    let errors = if synchronous_errors { context.cast() } else { std::ptr::null_mut() };
    Ok(Insertion { av, fi_addr, errors, context, keyed, inserted: 0, at: 0, failed: Vec::new() })
}

pub(super) unsafe extern "C" fn insert(
    av: *mut fid_av,
    addr: *const c_void,
    count: usize,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_av_insert", || {
        // SAFETY: an address vector of this provider; `addr` and `fi_addr` are arrays of `count` elements.
        unsafe {
            let av = &*av.cast::<AvFid>();
            if addr.is_null() && count > 0 {
                return -FI_EINVAL;
            }
            let mut insertion = match begin(av, fi_addr, flags, context) {
                Ok(insertion) => insertion,
                Err(error) => return -error,
            };
            let format = av.shared.domain.addr_format;
            let guard = av.shared.domain.lock.control();
            av.shared.state.get(&guard).expect(count);
            for i in 0..count {
                let at = addr.cast::<u8>().add(i * stride(format));
                let address =
                    read_address(format, at).filter(|address| address.port() != 0).ok_or(FI_EINVAL);
                insertion.add(&guard, address);
            }
            drop(guard);
            insertion.finish()
        }
    })
}

/// An address as text, such as `fi_sockaddr_in://127.0.0.1:5`.
fn is_text(node: &str) -> bool {
    node.contains("://")
}

/// The first address of a host that a vector of this format holds; where it holds both kinds, an IPv4 address if there is one.
fn resolve_one(node: &str, service: &str, format: u32) -> Result<Address, i32> {
    let found = net::resolve(Some(node), Some(service), false).map_err(|_| FI_EADDRNOTAVAIL)?;
    let fits = |address: &SocketAddr| format != FI_SOCKADDR_IN || address.is_ipv4();
    let first = found.into_iter().filter(fits).min_by_key(|address| match format {
        FI_SOCKADDR_IN6 => address.is_ipv4(),
        _ => address.is_ipv6(),
    });
    first.map(Address).ok_or(FI_EADDRNOTAVAIL)
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller vouches.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

pub(super) unsafe extern "C" fn insert_service(
    av: *mut fid_av,
    node: *const c_char,
    service: *const c_char,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_av_insertsvc", || {
        // SAFETY: an address vector of this provider; C strings; `fi_addr` has one element.
        unsafe {
            let av = &*av.cast::<AvFid>();
            // fi_av.3: with an address as text "the service parameter must be NULL".
            let node = text(node).filter(|node| is_text(node) == service.is_null());
            let Some(node) = node else { return -FI_EINVAL };
            let mut insertion = match begin(av, fi_addr, flags, context) {
                Ok(insertion) => insertion,
                Err(error) => return -error,
            };
            let address = if service.is_null() {
                Address::from_text(node).filter(|address| address.port() != 0).ok_or(FI_EINVAL)
            } else {
                let service = text(service).ok_or(FI_EINVAL);
                let format = av.shared.domain.addr_format;
                let address = service.and_then(|service| resolve_one(node, service, format));
                address.and_then(|it| if it.port() != 0 { Ok(it) } else { Err(FI_EINVAL) })
            };
            insertion.add(&av.shared.domain.lock.control(), address);
            insertion.finish()
        }
    })
}

/// Most addresses of one call of `fi_av_insertsym`: the capacity limit of a named vector.
const SYMMETRIC_MAX: usize = 1 << 24;
/// Most nodes of one call of `fi_av_insertsym`: each takes a name lookup.
const NODES_MAX: usize = 1 << 20;
/// After this many unknown names in a row the names behind them count as unknown too: a lookup that fails
/// may take seconds.
const UNKNOWN_MAX: usize = 8;

/// The `by`-th name after `first`. An address counts up as a number, a name by its trailing number
/// (`node07` → `node08`).
fn increment(first: &str, by: usize) -> Option<String> {
    if let Some((ip, scope)) = first.split_once('%') {
        return Some(format!("{}%{scope}", increment(ip, by)?));
    }
    let next = match first.parse() {
        Ok(IpAddr::V4(ip)) => {
            Ipv4Addr::from(u32::from(ip).checked_add(u32::try_from(by).ok()?)?).to_string()
        }
        Ok(IpAddr::V6(ip)) => Ipv6Addr::from(u128::from(ip).checked_add(by as u128)?).to_string(),
        Err(_) if by == 0 => first.to_owned(),
        Err(_) => {
            let digits = first.bytes().rev().take_while(u8::is_ascii_digit).count();
            let (stem, number) = first.split_at(first.len() - digits);
            let value = number.parse::<usize>().ok()?.checked_add(by)?;
            format!("{stem}{value:0digits$}")
        }
    };
    Some(next)
}

/// The addresses of consecutive nodes, as `resolve` finds them. Errors: EINVAL for a name without a number
/// to count up, EADDRNOTAVAIL for a name that is unknown.
struct Nodes<'a, R> {
    first: &'a str,
    service: &'a str,
    resolve: R,
    /// Number of unknown names in a row.
    unknown: usize,
}

impl<R: Fn(&str, &str) -> Result<Address, i32>> Nodes<'_, R> {
    fn address(&mut self, by: usize) -> Result<Address, i32> {
        if self.unknown >= UNKNOWN_MAX {
            return Err(FI_EADDRNOTAVAIL);
        }
        let node = increment(self.first, by).ok_or(FI_EINVAL)?;
        let found = (self.resolve)(&node, self.service);
        self.unknown = if found.is_ok() { 0 } else { self.unknown + 1 };
        if self.unknown == UNKNOWN_MAX {
            log::warn(format_args!(
                "fi_av_insertsym: {UNKNOWN_MAX} names up to {node} are not known; those behind are not looked up"
            ));
        }
        found
    }
}

/// The address of the same node with the `by`-th port after this one. Errors: EINVAL beyond port 65535.
fn port_after(address: Address, by: usize) -> Result<Address, i32> {
    let port = usize::from(address.port()).checked_add(by).and_then(|n| u16::try_from(n).ok());
    let mut address = address; // a link-local one keeps its scope
    address.0.set_port(port.ok_or(FI_EINVAL)?);
    Ok(address)
}

pub(super) unsafe extern "C" fn insert_symmetric(
    av: *mut fid_av,
    node: *const c_char,
    node_count: usize,
    service: *const c_char,
    service_count: usize,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_av_insertsym", || {
        // SAFETY: an address vector of this provider; C strings; `fi_addr` has node_count x service_count elements.
        unsafe {
            let av = &*av.cast::<AvFid>();
            let (Some(node), Some(service)) = (text(node), text(service)) else {
                return -FI_EINVAL;
            };
            if node_count > NODES_MAX
                || node_count.checked_mul(service_count).is_none_or(|all| all > SYMMETRIC_MAX)
            {
                log::warn(format_args!(
                    "fi_av_insertsym refused: {node_count} nodes with {service_count} services each, offered {NODES_MAX} nodes and {SYMMETRIC_MAX} addresses"
                ));
                return -FI_EINVAL;
            }
            let mut insertion = match begin(av, fi_addr, flags, context) {
                Ok(insertion) => insertion,
                Err(error) => return -error,
            };
            if service_count == 0 {
                return insertion.finish();
            }
            let format = av.shared.domain.addr_format;
            let resolve = |node: &str, service: &str| resolve_one(node, service, format);
            let mut nodes = Nodes { first: node, service, resolve, unknown: 0 };
            for n in 0..node_count {
                // Without the lock: a name lookup may take long.
                let address = nodes.address(n);
                let guard = av.shared.domain.lock.control();
                for s in 0..service_count {
                    insertion.add(&guard, address.and_then(|address| port_after(address, s)));
                }
            }
            insertion.finish()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn names_count_up() {
        assert_eq!(increment("node09", 1).as_deref(), Some("node10"));
        assert_eq!(increment("10.0.0.1", 2).as_deref(), Some("10.0.0.3"));
        assert_eq!(increment("10.0.0.255", 1).as_deref(), Some("10.0.1.0"));
        assert_eq!(increment("255.255.255.255", 1), None);
        assert_eq!(increment("10.0.0.1", usize::MAX), None);
        assert_eq!(increment("fe80::f", 1).as_deref(), Some("fe80::10"));
        assert_eq!(increment("fe80::9%eth0", 1).as_deref(), Some("fe80::a%eth0"));
        assert_eq!(increment("node", 0).as_deref(), Some("node"));
        assert_eq!(increment("node", 1), None);
        assert_eq!(increment("node1", usize::MAX), None);
    }

    #[test]
    fn ports_count_up_to_the_last() {
        let address = Address("10.0.0.1:65534".parse().unwrap());
        assert_eq!(port_after(address, 1), Ok(Address("10.0.0.1:65535".parse().unwrap())));
        assert_eq!(port_after(address, 2), Err(FI_EINVAL));
        assert_eq!(port_after(address, usize::MAX), Err(FI_EINVAL));
        let linked = |port: u16| Address(format!("[fe80::1%3]:{port}").parse().unwrap());
        assert_eq!(port_after(linked(7), 2), Ok(linked(9)));
    }

    #[test]
    fn each_node_is_looked_up_once_and_no_more_than_so_many_in_vain() {
        let asked = Cell::new(0);
        let resolve = |node: &str, _: &str| {
            asked.set(asked.get() + 1);
            if node == "n3" {
                resolve_one("10.0.0.3", "1", FI_SOCKADDR_IN)
            } else {
                Err(FI_EADDRNOTAVAIL)
            }
        };
        let mut nodes = Nodes { first: "n0", service: "1", resolve, unknown: 0 };
        let found = (0..NODES_MAX).filter(|n| nodes.address(*n).is_ok()).count();
        assert_eq!((found, asked.get()), (1, 4 + UNKNOWN_MAX));
    }
}
