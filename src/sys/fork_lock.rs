//! Locks that a forked child may find held: by a thread of its parent, which will never release them there.

use super::clock;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// Longest wait for a lock, nanoseconds.
const PATIENCE_NS: u64 = 1_000_000_000;

/// Waits for a lock. `None`: it is not released for a second, as in a child of a process that forked while another thread
/// held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    let until = clock::now_ns() + PATIENCE_NS;
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if clock::now_ns() < until => {
                std::thread::sleep(Duration::from_micros(100));
            }
            Err(TryLockError::WouldBlock) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_nobody_releases_is_given_up() {
        let mutex = Mutex::new(7);
        let held = mutex.lock().unwrap();
        assert!(lock(&mutex).is_none());
        drop(held);
        assert_eq!(lock(&mutex).map(|guard| *guard), Some(7));
    }
}
