//! How much shared memory the links of an endpoint may have beyond what a new link has.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that may still be taken. The links of one endpoint share it.
#[derive(Debug)]
pub(super) struct Budget(AtomicUsize);

impl Budget {
    pub(super) fn new(bytes: usize) -> Self {
        Self(AtomicUsize::new(bytes))
    }

    /// False: so much is not left.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let rest = |left: usize| left.checked_sub(bytes);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }

    pub(super) fn give(&self, bytes: usize) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}
