//! What a thread inside a blocking call does for endpoints that it does not wait for: under
//! FI_PROGRESS_MANUAL nobody else may ever progress them, and what it waits for may depend on them.

use crate::sys::clock::now_ns;
use crate::sys::process;
use std::ptr::addr_eq;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// How long a call has to have waited until it looks elsewhere, milliseconds.
const FIRST_MS: i32 = 8;
/// Longest single sleep, milliseconds: bounds the time until a peer's death is noticed even when a
/// forked child keeps the dead peer's sockets open.
const SLICE_MS: i32 = 500;

/// Enabled endpoints of this process.
static ENABLED: AtomicUsize = AtomicUsize::new(0);

/// How many endpoints of this process are enabled.
pub(super) fn enabled() -> usize {
    ENABLED.load(Ordering::Relaxed)
}

/// One more is.
pub(super) fn count_enabled() {
    ENABLED.fetch_add(1, Ordering::Relaxed);
}

/// So many are no more.
pub(super) fn count_left(endpoints: usize) {
    ENABLED.fetch_sub(endpoints, Ordering::Relaxed);
}

/// A domain, as blocking calls of the process know it.
pub(super) trait Neighbour {
    /// Progresses its endpoints for a call that is one of the domain's own. Returns how much moved.
    fn progress_own(&self) -> usize;
    /// The same for a call that is not, from a thread that the application need not have serialised.
    fn progress_visiting(&self) -> usize;
}

/// A domain of this process, as others find it.
struct Entry {
    domain: *const dyn Neighbour,
    /// The process that opened it: in a forked child it is not the child's.
    owner: i32,
    /// The domain is there for as long as this is true, and while it is locked.
    open: Mutex<bool>,
}

// SAFETY: the pointer is used only while `open` is locked and true; a domain may be used from any thread
// under its own lock.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

static ENTRIES: Mutex<Vec<Arc<Entry>>> = Mutex::new(Vec::new());

fn entries() -> MutexGuard<'static, Vec<Arc<Entry>>> {
    ENTRIES.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// From now on calls that wait for other domains look here. Until [`leave`].
pub(super) fn enter(domain: *const dyn Neighbour) {
    let owner = process::pid();
    entries().push(Arc::new(Entry { domain, owner, open: Mutex::new(true) }));
}

/// The domain is about to go away. Waits for whoever looks at it now.
pub(super) fn leave(domain: *const dyn Neighbour) {
    let mut entries = entries();
    let owner = process::pid();
    let is_it = |entry: &Arc<Entry>| addr_eq(entry.domain, domain) && entry.owner == owner;
    let Some(at) = entries.iter().position(is_it) else { return };
    let entry = entries.swap_remove(at);
    drop(entries);
    *entry.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = false;
}

/// When a blocking call looks elsewhere next: after [`FIRST_MS`], ever less often while nothing moves
/// there, and all the time while something does.
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

    /// Progresses all endpoints of the process, if it is time to. `mine`: the domain of the caller, of which it does
    /// not hold the lock.
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

/// Returns how much moved.
fn progress_all(mine: Option<&dyn Neighbour>) -> usize {
    let mut moved = mine.map_or(0, Neighbour::progress_own);
    let known = entries().clone();
    for entry in known {
        if entry.owner != process::pid() || mine.is_some_and(|mine| addr_eq(entry.domain, mine)) {
            continue;
        }
        let open = match entry.open.try_lock() {
            Ok(open) => open,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => continue, // another thread is here
        };
        if *open {
            // SAFETY: see `Entry`.
            moved += unsafe { &*entry.domain }.progress_visiting();
        }
    }
    moved
}
