//! Values that each process has for itself.
//!
//! A forked child inherits the statics of its parent as they were. A lock among them may be held, by a thread that the
//! child does not have: nothing would ever release it there. And what the lock protects belongs to the parent. So a child
//! begins with a fresh value, and leaves the parent's alone.

use super::process::Home;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value of each process, for a static.
#[derive(Debug)]
pub(crate) struct PerProcess<T>(AtomicPtr<Value<T>>);

/// Never freed.
struct Value<T> {
    home: Home,
    mutex: Mutex<T>,
    /// The parent's. It stays reachable, so that it does not count as leaked.
    _before: *mut Self,
}

impl<T: Default + Send> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// The value of this process, if it has used it before.
    pub(crate) fn known(&self) -> Option<&Mutex<T>> {
        here(self.0.load(Ordering::Acquire)).map(|value| &value.mutex)
    }

    /// Locks the value of this process.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let mut found = self.0.load(Ordering::Acquire);
        loop {
            if let Some(value) = here(found) {
                return value.mutex.lock().unwrap_or_else(PoisonError::into_inner);
            }
            let value = Value { home: Home::here(), mutex: Mutex::default(), _before: found };
            let new = Box::into_raw(Box::new(value));
            match self.0.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => found = new,
                Err(other) => {
                    // SAFETY: made above, and no other thread has it.
                    drop(unsafe { Box::from_raw(new) });
                    found = other;
                }
            }
        }
    }
}

/// The value, if it is one of this process.
fn here<'a, T>(value: *mut Value<T>) -> Option<&'a Value<T>> {
    // SAFETY: null, or a value, which is never freed.
    unsafe { value.as_ref() }.filter(|value| value.home.is_here())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Runs `work` in a forked child, which does nothing that a fork with threads forbids. Returns its result.
    pub(crate) fn in_child(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs `work` alone and ends without running code of the parent.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: an integer argument. A child that hangs ends, and does not outlive the test for long.
                unsafe { libc::alarm(20) };
                // A panic must not unwind into the child's copy of the test harness.
                let work = std::panic::AssertUnwindSafe(work);
                let status = i32::from(!std::panic::catch_unwind(work).unwrap_or(false));
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(status) }
            }
            child => {
                assert!(child > 0);
                let mut status = 0;
                // SAFETY: a child of this process, and a live local.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                if status != 0 {
                    eprintln!("the child ended with {status:#x}");
                }
                status == 0
            }
        }
    }

    #[test]
    fn a_forked_child_has_a_value_of_its_own() {
        static NUMBERS: PerProcess<Vec<u32>> = PerProcess::new();
        assert!(NUMBERS.known().is_none());
        let mut held = NUMBERS.lock();
        held.push(7);
        assert!(in_child(|| {
            let fresh = NUMBERS.known().is_none() && NUMBERS.lock().is_empty();
            NUMBERS.lock().push(8);
            fresh && *NUMBERS.lock() == [8]
        }));
        drop(held);
        assert_eq!(*NUMBERS.lock(), [7]);
    }

    #[test]
    fn threads_of_a_process_share_one_value() {
        static COUNT: PerProcess<u32> = PerProcess::new();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..100).for_each(|_| *COUNT.lock() += 1));
            }
        });
        assert_eq!(*COUNT.lock(), 800);
    }
}
