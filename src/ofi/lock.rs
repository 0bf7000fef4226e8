//! One lock per domain, biased towards the application ([`Biased`]). All shared state of a domain's objects is reached
//! through it, so there is only one order of locks.
//!
//! Under FI_THREAD_DOMAIN the application serialises the calls that transfer data or read completions, and for those the
//! lock is next to free ([`DomainLock::lock`]). Other threads visit:
//!
//! 1. A control call may come from any thread ("always considered thread safe", fi_domain.3, threading).
//!    [`DomainLock::control`] waits until no data call is in progress; it makes the memory barrier for both sides, by
//!    membarrier(2).
//! 2. A blocking call that also progresses other domains takes their locks by [`DomainLock::visit`], which makes the same
//!    barrier, and leaves a domain out if its lock is not free.
//!
//! State that is read often and changed rarely is in [`ReadMostly`], which changes only for the [`Hold`] itself.

use crate::memory::cache;
use crate::sys::biased::{Biased, Entry};
use crate::sys::{alarm, order};
use libfabric_sys::FI_EBUSY;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::ops::Deref;
#[cfg(any(debug_assertions, test))]
use std::sync::atomic::Ordering;
#[cfg(debug_assertions)]
use std::sync::atomic::{AtomicBool, AtomicPtr};

/// The lock of a domain.
#[derive(Debug)]
pub(crate) struct DomainLock {
    lock: Biased,
    /// Debug builds assert that it has one holder at a time.
    #[cfg(debug_assertions)]
    held: AtomicBool,
}

/// Proof that the caller holds the domain's lock, borrowed from a [`Hold`]. It takes no register and no memory,
/// except in debug builds, where it records which domain's lock is held.
pub(crate) struct Guard<'a> {
    #[cfg(debug_assertions)]
    lock: *const DomainLock,
    _of: PhantomData<(&'a DomainLock, *const ())>,
}

/// Holds the lock until it is dropped.
pub(crate) struct Hold<'a> {
    _entry: Entry<'a>,
    #[cfg(debug_assertions)]
    guard: Guard<'a>,
    #[cfg(not(debug_assertions))]
    _not_send: PhantomData<*const ()>,
}

impl<'a> Hold<'a> {
    #[inline(always)]
    fn new(lock: &'a DomainLock, entry: Entry<'a>) -> Self {
        #[cfg(not(debug_assertions))]
        let _ = lock;
        #[cfg(debug_assertions)]
        assert!(!lock.held.swap(true, Ordering::Relaxed), "another thread is inside");
        Self {
            _entry: entry,
            #[cfg(debug_assertions)]
            guard: Guard { lock, _of: PhantomData },
            #[cfg(not(debug_assertions))]
            _not_send: PhantomData,
        }
    }
}

#[cfg(debug_assertions)]
impl Drop for Hold<'_> {
    fn drop(&mut self) {
        // SAFETY: the hold has borrowed the lock.
        unsafe { &*self.guard.lock }.held.store(false, Ordering::Relaxed);
    }
}

impl<'a> Deref for Hold<'a> {
    type Target = Guard<'a>;

    #[inline(always)]
    fn deref(&self) -> &Guard<'a> {
        #[cfg(debug_assertions)]
        return &self.guard;
        #[cfg(not(debug_assertions))]
        &Guard { _of: PhantomData }
    }
}

impl DomainLock {
    /// `needed == false`: the application promises to serialise data calls (FI_THREAD_DOMAIN).
    pub(crate) fn new(needed: bool) -> Self {
        // Without the barrier no control call knows whether the application is inside.
        let lock = Biased::new(needed || !order::heavy()).answering(cache::settle);
        Self {
            lock,
            #[cfg(debug_assertions)]
            held: AtomicBool::new(false),
        }
    }

    /// From now on, data calls first end what devices still reach of memory that the application has replaced: the call
    /// may tell a peer of it.
    ///
    /// # Safety
    /// The lock stays where it is until [`Self::leave`].
    pub(crate) unsafe fn join(&self) {
        // SAFETY: as the caller vouches.
        unsafe { alarm::join(&self.lock) };
    }

    /// The inverse of [`Self::join`].
    pub(crate) fn leave(&self) {
        alarm::leave(&self.lock);
    }

    /// Whether this process opened the domain: false in a forked child.
    pub(crate) fn is_here(&self) -> bool {
        self.lock.is_here()
    }

    /// In a forked child: a thread of the parent was inside during the fork. It will never leave, and it may have left
    /// the domain half changed: nothing of the domain may be used, closed or freed in this process.
    pub(crate) fn is_lost(&self) -> bool {
        self.lock.is_lost()
    }

    /// Whether an object of the domain may be closed; else what `fi_close` returns: -FI_EBUSY, or 0 if it is lost.
    pub(crate) fn may_close(&self, is_used: impl FnOnce(&Guard<'_>) -> bool) -> Result<(), c_int> {
        if self.is_lost() {
            return Err(0);
        }
        // Under the lock, because the progress thread borrows objects at times.
        if is_used(&self.control()) { Err(-FI_EBUSY) } else { Ok(()) }
    }

    /// From now on the mutex is taken, because another thread joins: the progress thread, or a thread that reads the
    /// event queue of a joining group. For control calls, before that thread may enter.
    pub(crate) fn need(&self) {
        self.lock.need();
    }

    /// Takes the lock for a data call: one that starts or cancels transfers, or reads, waits for or changes a completion
    /// queue or a counter. Under FI_THREAD_DOMAIN the application serialises those.
    #[inline(always)]
    pub(crate) fn lock(&self) -> Hold<'_> {
        Hold::new(self, self.lock.enter())
    }

    /// Takes the lock for a control call, which any thread may make at any time.
    pub(crate) fn control(&self) -> Hold<'_> {
        Hold::new(self, self.lock.enter_visiting())
    }

    /// Takes the lock if it is free, from a thread that the application need not have serialised.
    pub(crate) fn visit(&self) -> Option<Hold<'_>> {
        self.lock.visit().map(|entry| Hold::new(self, entry))
    }
}

/// State that only the holder of the domain's lock may access.
#[derive(Debug, Default)]
pub(crate) struct Locked<T> {
    /// The lock whose guard accessed the state first: all later guards must be of the same lock.
    #[cfg(debug_assertions)]
    lock: AtomicPtr<DomainLock>,
    value: UnsafeCell<T>,
}

// SAFETY: access needs a `Guard`, which only the holder of the domain's lock has. Under FI_THREAD_DOMAIN the holder is
// the one thread that the application lets in with a data call, or a visitor while that thread is outside.
unsafe impl<T> Sync for Locked<T> {}
// SAFETY: the value moves between threads only under the lock.
unsafe impl<T> Send for Locked<T> {}

impl<T> Locked<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self {
            #[cfg(debug_assertions)]
            lock: AtomicPtr::new(std::ptr::null_mut()),
            value: UnsafeCell::new(value),
        }
    }

    /// The state.
    ///
    /// # Safety
    /// `guard` belongs to the domain that owns this state, and no other reference obtained here is used while
    /// the result is alive: a caller keeps the result for one short step, and in it calls nothing that reaches
    /// the same cell.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn get<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut T {
        self.check(guard);
        // SAFETY: the caller guarantees that this is the only reference.
        unsafe { &mut *self.value.get() }
    }

    /// Debug builds assert that `guard` belongs to the domain that owns this state.
    #[inline(always)]
    fn check(&self, guard: &Guard<'_>) {
        #[cfg(debug_assertions)]
        {
            let (none, lock) = (std::ptr::null_mut(), guard.lock.cast_mut());
            let owner =
                self.lock.compare_exchange(none, lock, Ordering::Relaxed, Ordering::Relaxed);
            assert!(owner.is_ok() || owner == Err(lock), "the guard of another domain");
        }
        let _ = guard;
    }
}

/// State of which several parts are read at once, and which changes rarely. To change it takes a mutable borrow of
/// the [`Hold`], so that no reference that was read under the hold is still alive then.
#[derive(Debug, Default)]
pub(crate) struct ReadMostly<T>(Locked<T>);

impl<T> ReadMostly<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Locked::new(value))
    }

    /// The state, to read. The guard belongs to the domain that owns it.
    #[inline]
    pub(crate) fn read<'g>(&'g self, guard: &'g Guard<'_>) -> &'g T {
        self.0.check(guard);
        // SAFETY: a mutable reference, which only `write` gives, would have borrowed the hold exclusively.
        unsafe { &*self.0.value.get() }
    }

    /// The state, to change. The hold belongs to the domain that owns it.
    pub(crate) fn write<'g>(&'g self, hold: &'g mut Hold<'_>) -> &'g mut T {
        self.0.check(hold);
        // SAFETY: every other reference to the state has borrowed the hold, and its borrow has ended.
        unsafe { &mut *self.0.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::Deadline;
    use std::sync::atomic::AtomicBool;

    /// Adds one, so slowly that another addition meanwhile is lost.
    fn add(count: &Locked<u64>, guard: &Guard<'_>) {
        // SAFETY: exclusive if the lock works, which is what the test checks.
        let before = *unsafe { count.get(guard) };
        std::hint::black_box(&before);
        std::hint::spin_loop();
        // SAFETY: exclusive if the lock works, which is what the test checks.
        *unsafe { count.get(guard) } = before + 1;
    }

    #[test]
    fn visitors_and_the_application_are_never_inside_together() {
        let (lock, count) = (DomainLock::new(false), Locked::new(0));
        let deadline = Deadline::after_ms(1000);
        let ended = AtomicBool::new(false);
        let (inside, visits): (u64, u64) = std::thread::scope(|scope| {
            let visitors: [_; 2] = std::array::from_fn(|_| {
                scope.spawn(|| {
                    let mut visits = 0;
                    while !ended.load(Ordering::Relaxed) {
                        if let Some(guard) = lock.visit() {
                            add(&count, &guard);
                            visits += 1;
                        }
                    }
                    visits
                })
            });
            let mut inside = 0;
            while !deadline.expired() {
                for _ in 0..100 {
                    add(&count, &lock.lock());
                    inside += 1;
                }
            }
            ended.store(true, Ordering::Relaxed);
            (inside, visitors.into_iter().map(|visitor| visitor.join().unwrap()).sum())
        });
        assert!(inside > 1000 && visits > 100, "{inside} {visits}");
        let guard = lock.lock();
        // SAFETY: the visitors have been joined, and this thread holds the lock.
        assert_eq!(*unsafe { count.get(&guard) }, inside + visits);
    }

    /// What `is_lost` says in a forked child, while this thread is outside or inside.
    fn lost_in_a_child(lock: &DomainLock) -> bool {
        // SAFETY: the child only reads the lock, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends this process.
            unsafe { libc::_exit(i32::from(lock.is_lost())) };
        }
        let mut status = -1;
        // SAFETY: the child that was just made, and a live local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(!lock.is_lost(), "it is ours");
        libc::WEXITSTATUS(status) != 0
    }

    #[test]
    fn a_lock_held_during_a_fork_is_lost_to_the_child() {
        for needed in [false, true] {
            let lock = DomainLock::new(needed);
            assert!(!lost_in_a_child(&lock));
            let inside = lock.lock();
            assert!(lost_in_a_child(&lock), "{needed}");
            drop(inside);
            assert!(!lost_in_a_child(&lock));
        }
    }

    #[test]
    fn a_control_call_waits_for_the_application_and_for_other_control_calls() {
        let (lock, count) = (DomainLock::new(false), Locked::new(0));
        let (deadline, end) = (Deadline::after_ms(500), Deadline::after_ms(30_000));
        let ended = AtomicBool::new(false);
        let (inside, calls): (u64, u64) = std::thread::scope(|scope| {
            let controllers: [_; 2] = std::array::from_fn(|_| {
                scope.spawn(|| {
                    let mut calls = 0;
                    while !ended.load(Ordering::Relaxed) && !end.expired() {
                        add(&count, &lock.control());
                        calls += 1;
                    }
                    calls
                })
            });
            let mut inside = 0;
            while !deadline.expired() || inside < 1000 {
                add(&count, &lock.lock());
                inside += 1;
            }
            // From now on several threads are owners.
            lock.need();
            add(&count, &lock.lock());
            ended.store(true, Ordering::Relaxed);
            (inside + 1, controllers.into_iter().map(|thread| thread.join().unwrap()).sum())
        });
        assert!(calls > 10, "{calls}");
        let guard = lock.lock();
        // SAFETY: the other threads have been joined, and this thread holds the lock.
        assert_eq!(*unsafe { count.get(&guard) }, inside + calls);
    }

    #[test]
    fn nobody_visits_while_the_application_is_inside() {
        let lock = DomainLock::new(false);
        let inside = lock.lock();
        assert!(lock.visit().is_none());
        drop(inside);
        let visit = lock.visit();
        assert!(visit.is_some() && lock.visit().is_none());
        drop(visit);
        drop(lock.lock());
        assert!(lock.visit().is_some());
    }
}
