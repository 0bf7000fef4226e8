//! The end of the process: what the application believes sent is sent before.
//!
//! A message between nodes is complete when it is in packets, which this process keeps until the peer's endpoint has
//! acknowledged them. An application that has read its completion may end without closing anything, as it may over
//! TCP, where the kernel goes on sending. So an orderly end waits, for a bounded time, until everything is acknowledged. The background
//! threads do the work: they know how to come between the application's threads, and touch no memory of the application's, some of which is
//! gone at that point.

use super::background::Shared;
use crate::sys::{at_exit, clock, process};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

/// Longest wait for acknowledgements, nanoseconds: a peer may be gone, or stopped.
const PATIENCE_NS: u64 = 2_000_000_000;
/// Between two looks.
const LOOK: Duration = Duration::from_micros(100);

/// Endpoints that are open.
static ENDPOINTS: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());

/// The endpoint is open: its packets count.
pub(super) fn enter(endpoint: &Arc<Shared>) {
    at_exit::call(flush);
    ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner).push(endpoint.clone());
}

/// It is closed, and its thread has ended.
pub(super) fn leave(endpoint: &Arc<Shared>) {
    let mut endpoints = ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner);
    endpoints.retain(|other| !Arc::ptr_eq(other, endpoint));
}

/// Waits until all packets of this process are acknowledged.
fn flush() {
    let until = clock::now_ns() + PATIENCE_NS;
    let Some(endpoints) = open_endpoints(until) else { return };
    endpoints.iter().for_each(|endpoint| endpoint.flush());
    while endpoints.iter().any(|endpoint| !endpoint.is_flushed()) && clock::now_ns() < until {
        std::thread::sleep(LOOK);
    }
}

/// Another thread may be opening or closing one, and it may be the one that was stopped at that by exit(3).
fn open_endpoints(until: u64) -> Option<Vec<Arc<Shared>>> {
    let me = process::pid();
    loop {
        let endpoints = match ENDPOINTS.try_lock() {
            Ok(endpoints) => endpoints,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if clock::now_ns() < until => {
                std::thread::sleep(LOOK);
                continue;
            }
            Err(TryLockError::WouldBlock) => return None,
        };
        return Some(endpoints.iter().filter(|endpoint| endpoint.owner() == me).cloned().collect());
    }
}
