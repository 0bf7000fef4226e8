//! Alarms: what has happened elsewhere in the process has to be dealt with before the application goes on in the provider.
//!
//! A thread that may neither wait nor allocate [`raise`]s one. The owner of each lock in the list answers when it takes the
//! lock the next time, before it does anything else ([`Biased::answering`]).

use super::biased::Biased;
use super::per_process::PerProcess;
use std::ptr::addr_eq;
use std::sync::PoisonError;

/// Locks for which there is room at first.
const LOCKS: usize = 16;

/// A lock in the list of this process.
struct Known(*const Biased);

// SAFETY: a lock may be alarmed from any thread, and exists while it is in the list.
unsafe impl Send for Known {}

/// No memory is allocated or freed under the mutex: [`raise`] is called by a thread for which an allocation may wait.
static KNOWN: PerProcess<Vec<Known>> = PerProcess::new();

/// Adds a lock to those that are alarmed.
///
/// # Safety
/// The lock exists and stays where it is until [`leave`].
pub(crate) unsafe fn join(lock: *const Biased) {
    let mut more = Vec::new();
    loop {
        let mut known = KNOWN.lock();
        if more.capacity() > known.capacity() {
            more.append(&mut known); // has room for them
            std::mem::swap(&mut more, &mut known);
        }
        if known.len() < known.capacity() {
            return known.push(Known(lock));
        }
        let room = LOCKS.max(2 * known.capacity());
        drop(known);
        more = Vec::with_capacity(room); // outside of the mutex
    }
}

/// The lock is alarmed no more.
pub(crate) fn leave(lock: *const Biased) {
    let mut known = KNOWN.lock();
    if let Some(at) = known.iter().position(|other| addr_eq(other.0, lock)) {
        known.swap_remove(at);
    }
}

/// Alarms the owners of all locks in the list.
pub(crate) fn raise() {
    let Some(known) = KNOWN.known() else { return };
    for lock in known.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        // SAFETY: locks leave the list before they end.
        unsafe { &*lock.0 }.alarm();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_owners_of_all_locks_answer_once_until_they_leave() {
        static ANSWERS: AtomicUsize = AtomicUsize::new(0);
        let answer = || _ = ANSWERS.fetch_add(1, Ordering::Relaxed);
        let locks: Vec<_> = (0..3 * LOCKS).map(|_| Biased::new(false).answering(answer)).collect();
        let enter = || locks.iter().for_each(|lock| drop(lock.enter()));
        for lock in &locks {
            // SAFETY: the locks stay in their vector until they have left.
            unsafe { join(lock) };
        }
        raise();
        enter();
        assert!(ANSWERS.load(Ordering::Relaxed) >= locks.len(), "other tests raise alarms too");
        locks.iter().for_each(|lock| leave(lock));
        enter();
        ANSWERS.store(0, Ordering::Relaxed);
        raise();
        enter();
        assert_eq!(ANSWERS.load(Ordering::Relaxed), 0);
    }
}
