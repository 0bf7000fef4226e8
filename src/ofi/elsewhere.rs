//! Cross-endpoint progress. A thread inside a blocking call also progresses endpoints that it does not wait
//! for: under FI_PROGRESS_MANUAL no other thread might progress them, and the awaited event may depend on them.

use crate::sys::clock::now_ns;
use crate::sys::per_process::PerProcess;
use std::ptr::addr_eq;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

/// Time that a blocking call has to wait before its first cross-endpoint progress, milliseconds.
const FIRST_MS: i32 = 8;
/// Longest single sleep, milliseconds. It bounds the time until a transport that nothing wakes checks whether its
/// peers are there.
const SLICE_MS: i32 = 500;

/// Number of enabled endpoints of this process.
static ENABLED: AtomicUsize = AtomicUsize::new(0);

/// Number of enabled endpoints of this process.
pub(super) fn enabled() -> usize {
    ENABLED.load(Ordering::Relaxed)
}

/// Counts an endpoint that was enabled.
pub(super) fn count_enabled() {
    ENABLED.fetch_add(1, Ordering::Relaxed);
}

/// Subtracts endpoints that are enabled no longer.
pub(super) fn count_left(endpoints: usize) {
    ENABLED.fetch_sub(endpoints, Ordering::Relaxed);
}

/// A domain, as blocking calls anywhere in the process see it.
pub(super) trait Neighbour {
    /// Progresses its endpoints for a blocking call on one of the domain's own objects. Returns how much moved.
    fn progress_own(&self) -> usize;
    /// The same for a visitor: a thread that waits elsewhere, and that the application need not have serialised.
    fn progress_visiting(&self) -> usize;
}

/// A domain in the list of this process.
struct Entry {
    domain: *const dyn Neighbour,
    /// The domain exists while this is true, and as long as the mutex is held after that was read.
    open: Mutex<bool>,
}

// SAFETY: the pointer is used only while `open` is locked and true; a domain may be used from any thread
// under its own lock.
unsafe impl Send for Entry {}
// SAFETY: shared references use the pointer under the same condition.
unsafe impl Sync for Entry {}

static ENTRIES: PerProcess<Vec<Arc<Entry>>> = PerProcess::new();

/// Adds the domain to the list that blocking calls progress. Until [`leave`].
pub(super) fn enter(domain: *const dyn Neighbour) {
    ENTRIES.lock().push(Arc::new(Entry { domain, open: Mutex::new(true) }));
}

/// Removes a domain that is about to be freed. Waits for a thread that progresses it now.
pub(super) fn leave(domain: *const dyn Neighbour) {
    let mut entries = ENTRIES.lock();
    let is_it = |entry: &Arc<Entry>| addr_eq(entry.domain, domain);
    let Some(at) = entries.iter().position(is_it) else { return };
    let entry = entries.swap_remove(at);
    drop(entries);
    *entry.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = false;
}

/// When a blocking call next makes cross-endpoint progress: first after [`FIRST_MS`], then less and less
/// often while nothing moves there, and continuously while something does.
#[derive(Debug)]
pub(super) struct Elsewhere {
    at_ns: u64,
    pause_ms: i32,
}

impl Elsewhere {
    pub(super) fn after(begun_ns: u64) -> Self {
        Self { at_ns: Self::later(begun_ns, FIRST_MS), pause_ms: FIRST_MS }
    }

    fn later(now: u64, ms: i32) -> u64 {
        now.saturating_add(u64::from(ms.unsigned_abs()) * 1_000_000)
    }

    /// How long the call may sleep, milliseconds.
    pub(super) fn slice_ms(&self) -> i32 {
        if enabled() > 1 { self.pause_ms } else { SLICE_MS }
    }

    /// Progresses all endpoints of the process, if it is time to. `mine`: the domain of the caller, which must
    /// not hold its lock.
    pub(super) fn look(&mut self, mine: Option<&dyn Neighbour>) {
        if enabled() <= 1 {
            return;
        }
        let now = now_ns();
        if now < self.at_ns {
            return;
        }
        self.pause_ms = match progress_all(mine) {
            0 => (2 * self.pause_ms).clamp(1, SLICE_MS),
            _ => 0,
        };
        self.at_ns = Self::later(now, self.pause_ms);
    }
}

/// Progresses every domain in the list. Returns how much moved.
fn progress_all(mine: Option<&dyn Neighbour>) -> usize {
    let mut moved = mine.map_or(0, Neighbour::progress_own);
    let known = ENTRIES.lock().clone();
    for entry in known {
        if mine.is_some_and(|mine| addr_eq(entry.domain, mine)) {
            continue;
        }
        let open = match entry.open.try_lock() {
            Ok(open) => open,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => continue, // another thread progresses it
        };
        if *open {
            // SAFETY: `open` is locked and true, so the domain exists (see `Entry`).
            moved += unsafe { &*entry.domain }.progress_visiting();
        }
    }
    moved
}
