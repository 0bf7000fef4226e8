//! One lock per domain. Everything that a domain's objects share is reached through it, so there is
//! one order of locks; under FI_THREAD_DOMAIN the application serialises and the lock is free.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// The lock of a domain.
#[derive(Debug)]
pub(crate) struct DomainLock {
    needed: AtomicBool,
    mutex: Mutex<()>,
}

/// Proof that the domain is ours until this is dropped.
pub(crate) struct Guard<'a> {
    _mutex: Option<MutexGuard<'a, ()>>,
    _not_send: PhantomData<*const ()>,
}

impl DomainLock {
    /// `needed == false`: the application promises to serialise (FI_THREAD_DOMAIN).
    pub(crate) fn new(needed: bool) -> Self {
        Self { needed: AtomicBool::new(needed), mutex: Mutex::new(()) }
    }

    /// From now on the lock is taken: a thread of ours joins. Called while the application
    /// serialises, before that thread starts.
    pub(crate) fn need(&self) {
        self.needed.store(true, Ordering::Release);
    }

    /// Takes the lock. A panic of an earlier holder does not stop later ones: it was reported then.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_> {
        let mutex = self.needed.load(Ordering::Acquire).then(|| match self.mutex.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        });
        Guard { _mutex: mutex, _not_send: PhantomData }
    }
}

/// State that belongs to whoever holds the domain's lock.
#[derive(Debug)]
pub(crate) struct Locked<T>(UnsafeCell<T>);

// SAFETY: access needs a `Guard`, which only the holder of the domain's lock has (or, under
// FI_THREAD_DOMAIN, the one thread that the application lets in).
unsafe impl<T> Sync for Locked<T> {}
// SAFETY: what is inside moves between threads only under the lock.
unsafe impl<T> Send for Locked<T> {}

impl<T> Locked<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// The state.
    ///
    /// # Safety
    /// `guard` is of the domain that owns this state, and no other reference obtained here is alive
    /// while the result is used: callers keep it for one short step and call nothing meanwhile that
    /// reaches the same cell.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn get<'g>(&'g self, _guard: &'g Guard<'_>) -> &'g mut T {
        // SAFETY: passed on to the caller.
        unsafe { &mut *self.0.get() }
    }
}
