//! The authorization key of an address vector (fi_av.3, fi_av_insert_auth_key). In a domain with
//! FI_AV_AUTH_KEY, the endpoints that are bound to the vector and all addresses in it use this key.

use super::vector::{AddressVector, AuthKey, AvFid};
use crate::ofi::guard::{code, entry};
use crate::ofi::keys::{self, DomainKey};
use crate::ofi::lock::Guard;
use crate::telemetry::log;
use crate::transport::JobKey;
use crate::transport::job_key;
use libfabric_sys::{FI_EBUSY, FI_EINVAL, FI_ENOSPC, fi_addr_t, fid_av};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The `fi_addr_t` of the key, which no address has.
const HANDLE: fi_addr_t = 1 << 62;

impl AddressVector {
    #[allow(clippy::mut_from_ref)] // see Locked::get
    fn auth_key<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut Option<AuthKey> {
        // SAFETY: guards passed here belong to the vector's domain; each caller uses the result for one
        // step that reaches no other vector.
        unsafe { self.auth_key.get(guard) }
    }

    /// The job key derived from the vector's authorization key, if it has one.
    pub(crate) fn job_key(&self, guard: &Guard<'_>) -> Option<JobKey> {
        self.auth_key(guard).as_ref().map(|key| key.job_key)
    }

    /// Whether this is the `fi_addr_t` of the vector's key.
    pub(crate) fn is_key(&self, fi_addr: fi_addr_t, guard: &Guard<'_>) -> bool {
        fi_addr == HANDLE && self.auth_key(guard).is_some()
    }

    /// Errors: ENOSPC if the vector has a different key.
    fn insert_key(&self, bytes: &[u8], guard: &Guard<'_>) -> Result<fi_addr_t, i32> {
        match self.auth_key(guard) {
            Some(key) if key.bytes == bytes => key.uses += 1,
            Some(_) => {
                log::warn(format_args!(
                    "fi_av_insert_auth_key refused: the address vector has another key, and an endpoint one"
                ));
                return Err(FI_ENOSPC);
            }
            vacant => {
                let job_key = job_key::of_auth_key(bytes);
                *vacant = Some(AuthKey { bytes: bytes.to_vec(), job_key, uses: 1 });
            }
        }
        Ok(HANDLE)
    }

    /// Errors: EINVAL for the handle of no key; EBUSY while the vector has addresses or an enabled endpoint uses it.
    pub(super) fn remove_key(&self, fi_addr: fi_addr_t, guard: &Guard<'_>) -> Result<(), i32> {
        let key = self.auth_key(guard).as_mut().filter(|_| fi_addr == HANDLE).ok_or(FI_EINVAL)?;
        if key.uses > 1 {
            key.uses -= 1;
            return Ok(());
        }
        let this = std::ptr::from_ref(self).cast();
        let bound = self.domain.endpoints(guard).any(|endpoint| endpoint.has_vector(this, guard));
        // SAFETY: the guard belongs to the domain of this vector; one short step.
        if bound || !unsafe { self.state.get(guard) }.is_empty() {
            return Err(FI_EBUSY);
        }
        *self.auth_key(guard) = None;
        Ok(())
    }
}

/// The vector behind a handle. Errors: EINVAL unless the keys of its domain are in its vectors.
///
/// # Safety
/// `av` is an open address vector of this provider.
unsafe fn keyed<'a>(av: *mut fid_av) -> Result<&'a Arc<AddressVector>, i32> {
    // SAFETY: the caller vouches.
    let av = unsafe { &(*av.cast::<AvFid>()).shared };
    match av.domain.key {
        DomainKey::InVectors => Ok(av),
        _ => {
            log::warn(format_args!(
                "authorization keys of address vectors refused: the domain has no FI_AV_AUTH_KEY"
            ));
            Err(FI_EINVAL)
        }
    }
}

/// `fi_av_insert_auth_key`. Errors: EINVAL, ENOSPC.
pub(super) unsafe extern "C" fn insert(
    av: *mut fid_av,
    auth_key: *const c_void,
    auth_key_size: usize,
    fi_addr: *mut fi_addr_t,
    flags: u64,
) -> c_int {
    entry("fi_av_insert_auth_key", || {
        // SAFETY: a vector of this provider; `auth_key` has `auth_key_size` bytes; `fi_addr` is null or one element.
        code(unsafe {
            keyed(av).and_then(|av| {
                let to = fi_addr.as_mut().filter(|_| flags == 0).ok_or(FI_EINVAL)?;
                let bytes = keys::auth_key_bytes(auth_key.cast(), auth_key_size)?;
                *to = av.insert_key(bytes, &av.domain.lock.control())?;
                Ok(())
            })
        })
    })
}

/// `fi_av_lookup_auth_key`: truncates the key to the buffer, and returns its full length. Errors: EINVAL.
pub(super) unsafe extern "C" fn lookup(
    av: *mut fid_av,
    fi_addr: fi_addr_t,
    auth_key: *mut c_void,
    auth_key_size: *mut usize,
) -> c_int {
    entry("fi_av_lookup_auth_key", || {
        // SAFETY: an address vector of this provider; `auth_key` is null or has `*auth_key_size` bytes.
        code(unsafe {
            keyed(av).and_then(|av| {
                let size = auth_key_size.as_mut().ok_or(FI_EINVAL)?;
                let guard = av.domain.lock.control();
                av.follow(&guard);
                let known = fi_addr == HANDLE || av.state.get(&guard).address(fi_addr).is_some();
                let key = av.auth_key(&guard).as_ref().filter(|_| known).ok_or(FI_EINVAL)?;
                let room = std::mem::replace(size, key.bytes.len());
                if !auth_key.is_null() {
                    let n = room.min(key.bytes.len());
                    auth_key.cast::<u8>().copy_from_nonoverlapping(key.bytes.as_ptr(), n);
                }
                Ok(())
            })
        })
    })
}
