//! Locks in a process that may have been forked while another thread had them: there nobody would release them, so
//! nothing waits for them long.

use crate::sys::process;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// How often a lock is tried. Its holders need it for a few system calls.
const TRIES: usize = 1000;

/// `None`: the lock is not released soon, or never.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for _ in 0..TRIES {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => process::yield_now(),
        }
    }
    None
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
