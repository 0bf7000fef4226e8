//! `fi_av_insert`, `fi_av_insertsvc`, `fi_av_insertsym`.

use super::AvFid;
use super::format::{read_address, stride};
use crate::ofi::domain::DomainKey;
use crate::ofi::guard::entry;
use crate::ofi::lock::Guard;
use crate::sys::net;
use crate::telemetry::log;
use crate::transport::Address;
use libfabric_sys::{
    FI_ADDR_NOTAVAIL, FI_AUTH_KEY, FI_EADDRNOTAVAIL, FI_EINVAL, FI_ENOEQ, FI_SYNC_ERR, fi_addr_t,
    fid_av,
};
use std::ffi::{CStr, c_char, c_int, c_void};

/// What became of one address of an insertion.
struct Insertion<'a> {
    av: &'a AvFid,
    fi_addr: *mut fi_addr_t,
    /// FI_SYNC_ERR: one error number per address.
    errors: *mut c_int,
    context: *mut c_void,
    /// FI_AUTH_KEY: `fi_addr` has a key for each address.
    keyed: bool,
    inserted: usize,
    at: usize,
    /// Events to come when the lock is free: number of the address, and its error.
    failed: Vec<(u64, i32)>,
}

impl Insertion<'_> {
    /// Takes the next address, or its error. The guard is of the vector's domain.
    ///
    /// # Safety
    /// The arrays of the application have room for it.
    unsafe fn add(&mut self, guard: &Guard<'_>, address: Result<Address, i32>) {
        // SAFETY: the guard is of the domain of this vector; one short step.
        let state = unsafe { self.av.shared.state.get(guard) };
        // SAFETY: the caller vouches; not null where keys are given.
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

    /// The result of the call: a count, or 0 with the count in an event.
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

fn begin(
    av: &AvFid,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> Result<Insertion<'_>, i32> {
    if av.asynchronous && av.eq.is_none() {
        return Err(FI_ENOEQ);
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
    entry("fi_av_insert", || {
        // SAFETY: a vector of ours; `addr` and `fi_addr` are arrays of `count` elements.
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
            let guard = av.shared.domain.lock.lock();
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

fn resolve_one(node: &str, service: &str) -> Result<Address, i32> {
    net::resolve(Some(node), Some(service), false)
        .ok()
        .and_then(|list| list.into_iter().next())
        .map(Address)
        .ok_or(FI_EADDRNOTAVAIL)
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
    entry("fi_av_insertsvc", || {
        // SAFETY: a vector of ours; C strings; `fi_addr` has one element.
        unsafe {
            let av = &*av.cast::<AvFid>();
            let (Some(node), Some(service)) = (text(node), text(service)) else {
                return -FI_EINVAL;
            };
            let mut insertion = match begin(av, fi_addr, flags, context) {
                Ok(insertion) => insertion,
                Err(error) => return -error,
            };
            let address = resolve_one(node, service);
            insertion.add(&av.shared.domain.lock.lock(), address);
            insertion.finish()
        }
    })
}

/// The `by`-th name after `first`: its trailing number counts up (`node07` → `node08`).
fn increment(first: &str, by: usize) -> Option<String> {
    let digits = first.bytes().rev().take_while(u8::is_ascii_digit).count();
    if by == 0 {
        return Some(first.to_owned());
    }
    let (stem, number) = first.split_at(first.len() - digits);
    let value = number.parse::<usize>().ok()?.checked_add(by)?;
    Some(format!("{stem}{value:0digits$}"))
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
    entry("fi_av_insertsym", || {
        // SAFETY: a vector of ours; C strings; `fi_addr` has node_count x service_count elements.
        unsafe {
            let av = &*av.cast::<AvFid>();
            let (Some(node), Some(service)) = (text(node), text(service)) else {
                return -FI_EINVAL;
            };
            let mut insertion = match begin(av, fi_addr, flags, context) {
                Ok(insertion) => insertion,
                Err(error) => return -error,
            };
            for n in 0..node_count {
                for s in 0..service_count {
                    let address = match (increment(node, n), increment(service, s)) {
                        (Some(node), Some(service)) => resolve_one(&node, &service),
                        _ => Err(FI_EINVAL),
                    };
                    // Not while names are looked up, which may take long.
                    insertion.add(&av.shared.domain.lock.lock(), address);
                }
            }
            insertion.finish()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_count_up() {
        assert_eq!(increment("node09", 1).as_deref(), Some("node10"));
        assert_eq!(increment("10.0.0.1", 2).as_deref(), Some("10.0.0.3"));
        assert_eq!(increment("7471", 0).as_deref(), Some("7471"));
        assert_eq!(increment("node", 1), None);
    }
}
