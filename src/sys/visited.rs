//! A biased lock: a value that its owner uses all the time and a visitor rarely. The owner enters without an atomic
//! read-modify-write operation; the visitor makes the memory barrier for both.

use super::order::{self, AtomicBool, Mutex, MutexGuard};
use super::process;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, TryLockError};

#[derive(Debug)]
struct Inner<T> {
    value: UnsafeCell<T>,
    /// The owner is inside.
    inside: AtomicBool,
    /// The owner has to take the mutex: a visitor is around, or the kernel lacks the barrier that lets a visitor know
    /// whether the owner is inside.
    shares: AtomicBool,
    mutex: Mutex<()>,
    /// The kernel has that barrier.
    barrier: bool,
    /// The process that made it: a forked child has no visitor.
    process: i32,
}

// SAFETY: only a side that is inside accesses the value: the one owner, or the visitor once it knows that the owner is
// outside and needs the mutex to enter.
unsafe impl<T: Send> Sync for Inner<T> {}

/// The owner's side: enters all the time, from one thread at a time.
#[derive(Debug)]
pub(crate) struct Owner<T> {
    inner: Arc<Inner<T>>,
    _not_sync: PhantomData<Cell<()>>,
}

/// The visitor's side: enters rarely.
#[derive(Debug)]
pub(crate) struct Visitor<T>(Arc<Inner<T>>);

/// Exclusive access to the value until this is dropped.
pub(crate) struct Held<'a, T> {
    inner: &'a Inner<T>,
    /// The owner holds it.
    owns: bool,
    _mutex: Option<MutexGuard<'a, ()>>,
    _not_send: PhantomData<*const ()>,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the other side cannot enter while this exists.
        unsafe { &*self.inner.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the other side cannot enter while this exists.
        unsafe { &mut *self.inner.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.owns {
            self.inner.inside.store(false, Ordering::Release);
        }
    }
}

/// The two sides of `value`.
pub(crate) fn visited<T: Send>(value: T) -> (Owner<T>, Visitor<T>) {
    let barrier = order::heavy();
    let inner = Arc::new(Inner {
        value: UnsafeCell::new(value),
        inside: AtomicBool::new(false),
        shares: AtomicBool::new(!barrier),
        mutex: Mutex::new(()),
        barrier,
        process: process::pid(),
    });
    (Owner { inner: inner.clone(), _not_sync: PhantomData }, Visitor(inner))
}

impl<T> Owner<T> {
    /// Access to the value. `None` if the owner is inside already, or, in a forked child, if the parent's visitor was.
    #[inline]
    pub(crate) fn enter(&self) -> Option<Held<'_, T>> {
        let inner = &*self.inner;
        // One thread at a time uses the owner, so only that thread writes this word.
        if inner.inside.load(Ordering::Relaxed) {
            return None;
        }
        inner.inside.store(true, Ordering::Relaxed);
        // The processor may load `shares` before the store is visible: the visitor's barrier prevents that.
        order::light();
        // False: the visitor's writes before it left are visible (`Visitor::leave`).
        if inner.shares.load(Ordering::Acquire) {
            inner.inside.store(false, Ordering::Release);
            return self.enter_by_mutex();
        }
        Some(Held { inner, owns: true, _mutex: None, _not_send: PhantomData })
    }

    #[inline(never)]
    fn enter_by_mutex(&self) -> Option<Held<'_, T>> {
        let inner = &*self.inner;
        let mutex = match inner.mutex.try_lock() {
            Ok(mutex) => mutex,
            // A panic of an earlier holder does not stop later ones: it was reported then.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if inner.process == process::pid() => {
                inner.mutex.lock().unwrap_or_else(PoisonError::into_inner)
            }
            Err(TryLockError::WouldBlock) => return None,
        };
        inner.inside.store(true, Ordering::Relaxed);
        Some(Held { inner, owns: true, _mutex: Some(mutex), _not_send: PhantomData })
    }
}

#[cfg(test)]
impl<T> Owner<T> {
    /// The owner enters without the mutex.
    pub(crate) fn is_alone(&self) -> bool {
        !self.inner.shares.load(Ordering::Relaxed)
    }
}

impl<T> Visitor<T> {
    /// Access; `None` while the owner is inside. From the first visit until [`Visitor::leave`] the owner takes a mutex.
    pub(crate) fn visit(&mut self) -> Option<Held<'_, T>> {
        let inner = &*self.0;
        let mutex = match inner.mutex.try_lock() {
            Ok(mutex) => mutex,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if !inner.shares.load(Ordering::Relaxed) {
            inner.shares.store(true, Ordering::Release);
            // Only at the first visit, because it interrupts all threads of the process.
            if !order::heavy() {
                inner.shares.store(false, Ordering::Release);
                return None;
            }
        }
        // False: the owner's writes before it left are visible (`Held::drop`).
        if inner.inside.load(Ordering::Acquire) {
            return None;
        }
        Some(Held { inner, owns: false, _mutex: Some(mutex), _not_send: PhantomData })
    }

    /// There will be no visit for a while: the owner needs no mutex.
    pub(crate) fn leave(&mut self) {
        if self.0.barrier && self.0.shares.load(Ordering::Relaxed) {
            self.0.shares.store(false, Ordering::Release);
        }
    }
}

#[cfg(all(loom, test))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::Deadline;

    /// Adds one, slowly, so that a concurrent addition would be lost.
    fn add(mut count: Held<'_, u64>) {
        let before = *count;
        std::hint::black_box(&before);
        std::hint::spin_loop();
        *count = before + 1;
    }

    #[test]
    fn owner_and_visitor_exclude_each_other() {
        let (owner, mut visitor) = visited(0u64);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut visits = 0u64;
            while !stopped.load(Ordering::Relaxed) {
                for _ in 0..3 {
                    if let Some(count) = visitor.visit() {
                        add(count);
                        visits += 1;
                    }
                }
                visitor.leave();
            }
            visits
        });
        let deadline = Deadline::after_ms(1000);
        let mut entries = 0;
        while !deadline.expired() {
            for _ in 0..100 {
                add(owner.enter().unwrap());
                entries += 1;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let visits = thread.join().unwrap();
        assert!(visits > 100 && entries > 100, "{visits} visits, {entries} entries");
        assert_eq!(*owner.enter().unwrap(), visits + entries);
    }

    #[test]
    fn who_is_inside_is_not_visited_and_does_not_enter_twice() {
        let (owner, mut visitor) = visited(1);
        let held = owner.enter().unwrap();
        assert!(!owner.inner.barrier || owner.enter().is_none());
        assert!(visitor.visit().is_none());
        drop(held);
        assert_eq!(visitor.visit().map(|value| *value), Some(1));
        let held = owner.enter().unwrap();
        assert!(!owner.is_alone(), "after a visit");
        visitor.leave();
        assert!(owner.enter().is_none());
        drop(held);
        assert_eq!(owner.is_alone(), owner.inner.barrier);
        assert!(owner.enter().is_some() && owner.enter().is_some());
    }

    #[test]
    #[ignore = "a measurement"]
    fn costs() {
        const TIMES: u64 = 10_000_000;
        let (owner, _visitor) = visited(0u64);
        let mutex = Mutex::new(0u64);
        let each = |mut enter: Box<dyn FnMut()>| {
            let start = std::time::Instant::now();
            (0..TIMES).for_each(|_| enter());
            start.elapsed().as_secs_f64() * 1e9 / TIMES as f64
        };
        let entered = each(Box::new(move || *owner.enter().unwrap() += 1));
        let locked = each(Box::new(move || *mutex.try_lock().unwrap() += 1));
        println!("{entered:.1} ns to enter and leave, {locked:.1} by a mutex");
    }
}
