//! The exit of the process: messages that the application believes sent are sent first.
//!
//! A message between nodes completes when it is in packets, which this process keeps until the peer has acknowledged
//! them. An application that has read its completion may exit without closing anything, as over TCP, where the kernel
//! goes on sending. So an orderly exit waits, for a bounded time, until everything is acknowledged. The background
//! thread does the work: it can run between calls of the application's threads, and touches no memory of the
//! application, some of which is gone by then.

use super::shared::Shared;
use crate::sys::per_process::PerProcess;
use crate::sys::{at_exit, clock};
use std::sync::{Arc, TryLockError};
use std::time::Duration;

/// Longest wait for acknowledgements, nanoseconds: a peer may be gone, or stopped.
const PATIENCE_NS: u64 = 2_000_000_000;
/// Time between two checks.
const LOOK: Duration = Duration::from_micros(100);

/// Endpoints that are open.
static ENDPOINTS: PerProcess<Vec<Arc<Shared>>> = PerProcess::new();

/// The endpoint is open: the exit waits for its packets.
pub(super) fn enter(endpoint: &Arc<Shared>) {
    at_exit::call(flush);
    ENDPOINTS.lock().push(endpoint.clone());
}

/// The endpoint is closed, and its task has ended.
pub(super) fn leave(endpoint: &Arc<Shared>) {
    ENDPOINTS.lock().retain(|other| !Arc::ptr_eq(other, endpoint));
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

/// The open endpoints. Another thread may hold the lock, and exit(3) may have stopped just that thread.
fn open_endpoints(until: u64) -> Option<Vec<Arc<Shared>>> {
    let known = ENDPOINTS.known()?; // a forked child may have none
    loop {
        let endpoints = match known.try_lock() {
            Ok(endpoints) => endpoints,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if clock::now_ns() < until => {
                std::thread::sleep(LOOK);
                continue;
            }
            Err(TryLockError::WouldBlock) => return None,
        };
        return Some(endpoints.clone());
    }
}
