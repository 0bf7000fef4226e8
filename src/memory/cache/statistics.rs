//! Counts of what a cache has done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A snapshot of the counts. Bytes are those of whole pages, counted once for each registration of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Statistics {
    /// Requests that found a registration.
    pub(crate) hits: u64,
    /// Requests that made a registration which other requests can find.
    pub(crate) misses: u64,
    /// Requests that made a registration for themselves alone.
    pub(crate) uncached: u64,
    /// Requests that made one because a change was in progress, which hid all entries.
    pub(crate) unsettled: u64,
    /// Requests that got no registration.
    pub(crate) refused: u64,
    /// Registrations made with the device.
    pub(crate) registrations: u64,
    /// Registrations ended with the device.
    pub(crate) deregistrations: u64,
    /// Entries that were removed because their addresses changed, or for a wider entry.
    pub(crate) invalidations: u64,
    /// Entries that were removed for room.
    pub(crate) evictions: u64,
    /// Entries that requests can find now.
    pub(crate) entries: u64,
    /// Bytes of `entries`.
    pub(crate) entry_bytes: u64,
    /// Bytes registered with the device.
    pub(crate) pinned: u64,
    /// Most bytes that were registered with the device at any time.
    pub(crate) pinned_peak: u64,
}

/// The counters that change without the lock of the index.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) uncached: AtomicU64,
    pub(super) unsettled: AtomicU64,
    pub(super) refused: AtomicU64,
    registrations: AtomicU64,
    deregistrations: AtomicU64,
    pinned: AtomicU64,
    pinned_peak: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

impl Counters {
    pub(super) fn snapshot(&self) -> Statistics {
        Statistics {
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
            uncached: self.uncached.load(Relaxed),
            unsettled: self.unsettled.load(Relaxed),
            refused: self.refused.load(Relaxed),
            registrations: self.registrations.load(Relaxed),
            deregistrations: self.deregistrations.load(Relaxed),
            pinned: self.pinned.load(Relaxed),
            pinned_peak: self.pinned_peak.load(Relaxed),
            ..Statistics::default()
        }
    }
}

/// Counts bytes as registered as long as this lives.
#[derive(Debug)]
pub(super) struct Account {
    counters: Arc<Counters>,
    bytes: u64,
}

impl Account {
    pub(super) fn open(counters: &Arc<Counters>, bytes: usize) -> Self {
        let bytes = bytes as u64;
        count(&counters.registrations);
        let pinned = counters.pinned.fetch_add(bytes, Relaxed) + bytes;
        counters.pinned_peak.fetch_max(pinned, Relaxed);
        Self { counters: counters.clone(), bytes }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        count(&self.counters.deregistrations);
        self.counters.pinned.fetch_sub(self.bytes, Relaxed);
    }
}
