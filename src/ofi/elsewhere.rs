//! What a thread inside a blocking call does for endpoints that it does not wait for: under
//! FI_PROGRESS_MANUAL nobody else may ever progress them, and what it waits for may depend on them.

use super::blocking::SLICE_MS;
use super::domain::Domain;
use super::endpoint::{self, Endpoint};
use super::lock::Guard;
use crate::sys::clock::now_ns;
use crate::sys::process;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// How long a call has to have waited until it looks elsewhere, milliseconds.
const FIRST_MS: i32 = 8;
/// Turns of an endpoint that has work and does not get to it.
const TURNS_MAX: usize = 64;

/// A domain of this process, as others find it.
#[derive(Debug)]
struct Entry {
    domain: *const Domain,
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
pub(super) fn enter(domain: &Arc<Domain>) {
    let (domain, owner) = (Arc::as_ptr(domain), process::pid());
    entries().push(Arc::new(Entry { domain, owner, open: Mutex::new(true) }));
}

/// The domain is about to go away. Waits for whoever looks at it now.
pub(super) fn leave(domain: *const Domain) {
    let mut entries = entries();
    let owner = process::pid();
    let is_it = |entry: &Arc<Entry>| entry.domain == domain && entry.owner == owner;
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
        if endpoint::enabled() > 1 { self.pause_ms } else { SLICE_MS }
    }

    /// Progresses all endpoints of the process, if it is time to. `mine`: the domain of the caller, of which it does
    /// not hold the lock.
    pub(super) fn look(&mut self, mine: Option<&Domain>) {
        if endpoint::enabled() <= 1 {
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
fn progress_all(mine: Option<&Domain>) -> usize {
    let mut moved = mine.map_or(0, |domain| progress_domain(domain, &domain.lock.lock()));
    let known = entries().clone();
    for entry in known {
        if entry.owner != process::pid() || mine.is_some_and(|mine| entry.domain == mine) {
            continue;
        }
        let open = match entry.open.try_lock() {
            Ok(open) => open,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => continue, // another thread is here
        };
        if *open {
            // SAFETY: see `Entry`.
            let domain = unsafe { &*entry.domain };
            // Some have a thread of ours for this.
            if let Some(guard) = domain.lock.visit().filter(|_| domain.thread().is_none()) {
                moved += progress_domain(domain, &guard);
            }
        }
    }
    moved
}

fn progress_domain(domain: &Domain, guard: &Guard<'_>) -> usize {
    // SAFETY: the guard is of this domain; the copy ends the borrow.
    let endpoints = unsafe { domain.state(guard) }.endpoints.clone();
    let mut moved = 0;
    for endpoint in endpoints {
        // SAFETY: endpoints leave the domain's list under the lock before they go away.
        moved += progress_endpoint(unsafe { &*endpoint }, guard);
    }
    moved
}

/// Not every turn looks everywhere: until something moved, or there is nothing to.
fn progress_endpoint(endpoint: &Endpoint, guard: &Guard<'_>) -> usize {
    (0..TURNS_MAX)
        .take_while(|turn| *turn == 0 || endpoint.has_work(guard))
        .map(|_| endpoint.progress_quietly(guard))
        .find(|moved| *moved > 0)
        .unwrap_or(0)
}
