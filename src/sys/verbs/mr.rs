//! Registrations of the application's memory.

use super::device::Pd;
use super::owned::Owned;
use crate::sys::errno::{Errno, Result};
use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_mr,
};
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;

/// What a device may do with memory; each of the first three includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Permission {
    Read,
    Write,
    /// Write it for peers that know the remote key.
    RemoteWrite,
    /// Read it, or write it, or both, for peers that know the remote key; nothing else.
    Exposed {
        reads: bool,
        writes: bool,
    },
}

/// Registers memory with a protection domain.
#[derive(Clone, Debug)]
pub(crate) struct Registrar {
    pub(super) pd: Arc<Pd>,
}

/// A registration; it ends when this is dropped, in the process that made it.
#[derive(Debug)]
pub(crate) struct Registration {
    mr: Owned<ibv_mr>,
    _pd: Arc<Pd>,
}

impl Registrar {
    /// Registers `len` bytes at `addr`: the pages are pinned for the device. Registering alone moves no
    /// byte; code that gives the remote key out is responsible for the consequences. Errors: ENOMEM, also if
    /// RLIMIT_MEMLOCK is exhausted; EFAULT if there is no memory, or none with this permission; the
    /// driver's.
    pub(crate) fn register(
        &self,
        addr: usize,
        len: usize,
        permission: Permission,
    ) -> Result<Registration> {
        let access = match permission {
            Permission::Read => 0,
            Permission::Write => IBV_ACCESS_LOCAL_WRITE,
            Permission::RemoteWrite => IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
            Permission::Exposed { reads, writes } => {
                let read = if reads { IBV_ACCESS_REMOTE_READ } else { 0 };
                // Remote write access requires local write access (ibv_reg_mr.3).
                let write = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
                read | if writes { write } else { 0 }
            }
        };
        // Never IBV_ACCESS_RELAXED_ORDERING: flush reads (PROTOCOL.md §7.16, rule 2) rely on the order of a
        // device's own requests on its bus.
        if addr.checked_add(len).is_none() {
            return Err(Errno(libc::EFAULT));
        }
        let (verbs, at) = (self.pd.context.verbs, with_exposed_provenance_mut(addr));
        // SAFETY: a live domain, which the registration holds. The kernel checks the addresses.
        let mr = unsafe {
            let raw = (verbs.reg_mr)(self.pd.as_ptr(), at, len, access as i32);
            Owned::new(raw, verbs.dereg_mr)
        }?;
        Ok(Registration { mr, _pd: self.pd.clone() })
    }
}

impl Registration {
    /// The local key, for queue pairs of this process.
    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: a live region; the member does not change.
        unsafe { (*self.mr.as_ptr()).lkey }
    }

    /// The remote key, for queue pairs of peers.
    #[inline]
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: a live region; the member does not change.
        unsafe { (*self.mr.as_ptr()).rkey }
    }
}
