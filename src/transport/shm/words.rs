//! The two words of a link by which its ends agree whether the sender may copy from or to the receiver's memory. Each
//! side writes one, passes a full fence and reads the other's. A sender without a key reads CLOSED, a flag of the ring, in
//! place of EPOCH; the receiver sets it before [`Words::void`].

use super::layout::{EPOCH, REACHING};
use crate::sys::order::{self, Word};
use crate::sys::shared_memory::SharedMemory;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) struct Words<'a, W = AtomicU64> {
    epoch: &'a W,
    reaching: &'a W,
}

impl<'a> Words<'a> {
    pub(super) fn of(memory: &'a SharedMemory) -> Option<Self> {
        Some(Self { epoch: memory.atomic(EPOCH)?, reaching: memory.atomic(REACHING)? })
    }
}

impl<W: Word> Words<'_, W> {
    /// The sender copies from now until [`Self::end`].
    pub(super) fn begin(&self) {
        self.reaching.fetch_add(1, Ordering::Relaxed);
        order::fence();
    }

    /// After [`Self::begin`]: whether the keys of `epoch` are valid until [`Self::end`].
    pub(super) fn is_valid(&self, epoch: u32) -> bool {
        self.epoch.load(Ordering::Acquire) as u32 == epoch
    }

    /// Ends the copy. A receiver that sees this also sees the data.
    pub(super) fn end(&self) {
        self.reaching.fetch_add(1, Ordering::Release);
    }

    /// Invalidates the sender's keys. Some: the sender is copying, see [`Self::has_ended`].
    pub(super) fn void(&self) -> Option<u64> {
        self.epoch.fetch_add(1, Ordering::Release);
        order::fence();
        Some(self.reaching.load(Ordering::Acquire)).filter(|seen| seen % 2 == 1)
    }

    /// The copy that [`Self::void`] saw has ended. The next one of the sender knows the new epoch.
    pub(super) fn has_ended(&self, seen: u64) -> bool {
        self.reaching.load(Ordering::Acquire) != seen
    }
}

#[cfg(all(loom, test))]
mod model;
