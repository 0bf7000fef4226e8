//! Registered memory of this library that a device reads and writes.

use super::device::Pd;
use super::owned::Owned;
use crate::sys::errno::Result;
use crate::sys::pages::Pages;
use crate::sys::simd;
use rdma_core_sys::{IBV_ACCESS_LOCAL_WRITE, ibv_mr};
use std::ptr::NonNull;
use std::sync::Arc;

/// Slots of one size, registered with a device and used for nothing else. The contents of a slot belong to the
/// device from the moment it is posted until its completion.
#[derive(Debug)]
pub(super) struct Slots {
    mr: Owned<ibv_mr>,
    memory: Pages,
    slot: usize,
    _pd: Arc<Pd>,
}

impl Slots {
    /// `count` slots of `len` bytes. Errors: ENOMEM, also if RLIMIT_MEMLOCK is exhausted; the
    /// driver's.
    pub(super) fn new(pd: &Arc<Pd>, count: usize, len: usize) -> Result<Self> {
        // Each slot has cache lines of its own.
        let slot = len.next_multiple_of(64);
        let memory = Pages::anonymous(count * slot)?;
        let verbs = pd.context.verbs;
        let access = IBV_ACCESS_LOCAL_WRITE as i32;
        let base = memory.base().as_ptr().cast();
        // SAFETY: a live domain and mapping; the region is deregistered before both, by the order of the
        // members.
        let mr = unsafe {
            Owned::new((verbs.reg_mr)(pd.as_ptr(), base, memory.len(), access), verbs.dereg_mr)
        }?;
        Ok(Self { mr, memory, slot, _pd: pd.clone() })
    }

    /// The local key of the memory.
    #[inline]
    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: a live region; the member does not change.
        unsafe { (*self.mr.as_ptr()).lkey }
    }

    /// The address of slot `index`.
    #[inline]
    pub(super) fn address(&self, index: usize) -> Option<NonNull<u8>> {
        let at = index.checked_mul(self.slot)?;
        // SAFETY: a whole slot follows within the mapping.
        (at + self.slot <= self.memory.len()).then(|| unsafe { self.memory.base().add(at) })
    }

    /// The first `len` bytes of a slot that is not posted.
    #[inline]
    pub(super) fn bytes(&self, index: usize, len: usize) -> Option<&[u8]> {
        let at = self.address(index).filter(|_| len <= self.slot)?;
        // SAFETY: within the slot; the device does not write: the caller has its completion.
        Some(unsafe { std::slice::from_raw_parts(at.as_ptr(), len) })
    }

    /// Fills the beginning of a slot that is not posted.
    #[inline]
    pub(super) fn fill(&mut self, index: usize, from: &[u8]) -> Option<NonNull<u8>> {
        let slot = self.address(index).filter(|_| from.len() <= self.slot)?;
        // SAFETY: within the slot, which no device uses now; `from` is other memory.
        unsafe { simd::copy(from.as_ptr(), slot.as_ptr(), from.len()) };
        Some(slot)
    }
}
