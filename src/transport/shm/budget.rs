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

    /// Takes what is left, at most `bytes`, and returns how much that was.
    pub(super) fn take_some(&self, bytes: usize) -> usize {
        let rest = |left: usize| Some(left.saturating_sub(bytes));
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).unwrap_or(0).min(bytes)
    }

    /// Whether so much is left.
    pub(super) fn has(&self, bytes: usize) -> bool {
        self.0.load(Ordering::Relaxed) >= bytes
    }

    pub(super) fn give(&self, bytes: usize) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}
