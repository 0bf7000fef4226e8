//! A biased lock: its owner enters all the time, and a visitor rarely. The owner only notes that it is inside, without
//! an atomic read-modify-write operation and without a barrier. A visitor makes the memory barrier for both
//! ([`order::heavy`]). While visitors are around, the owner takes a mutex.
//!
//! [`Biased`] is the lock; the lock of a domain is built on it (`ofi::lock`), with several threads as owner where the
//! application does not serialise. Its visitors either do without ([`Biased::visit`]) or wait for the owner to leave
//! ([`Biased::enter_visiting`]). [`Owner`] and [`Visitor`] are the two sides of a value under such a lock.
//!
//! The word that tells the owner of visitors also carries alarms ([`super::alarm`]), so that an owner that nobody alarms
//! pays nothing for them.

use super::order::{self, AtomicBool, AtomicU8, Mutex, MutexGuard};
use super::process::Home;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, TryLockError};

/// Several threads enter as the owner, or visitors cannot know whether the owner is inside.
const NEEDED: u8 = 1;
/// A visitor has the mutex, or comes again soon.
const VISITED: u8 = 2;
/// The owner has to answer an alarm before it goes on.
const ALARMED: u8 = 4;

/// The lock.
#[derive(Debug)]
pub(crate) struct Biased {
    /// Why the owner has to take the mutex (`NEEDED`, `VISITED`, `ALARMED`); 0 if it need not.
    reasons: AtomicU8,
    /// The owner is inside, or about to find out whether it may be. Means nothing with `NEEDED`.
    inside: AtomicBool,
    mutex: Mutex<()>,
    /// Visitors come several times, and then [`leave`](Self::leave).
    stays: bool,
    /// The owner's answer to an alarm.
    answer: fn(),
    home: Home,
}

/// The lock is held until this is dropped.
pub(crate) struct Entry<'a> {
    lock: &'a Biased,
    /// The owner holds it.
    owns: bool,
    mutex: ManuallyDrop<Option<MutexGuard<'a, ()>>>,
}

impl Drop for Entry<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.owns {
            self.lock.inside.store(false, Ordering::Release);
        }
        // SAFETY: the field is not used after this.
        if let Some(mutex) = unsafe { ManuallyDrop::take(&mut self.mutex) } {
            self.lock.unlock(mutex, self.owns);
        }
    }
}

impl Biased {
    /// `needed`: several threads enter as the owner.
    pub(crate) fn new(needed: bool) -> Self {
        Self {
            reasons: AtomicU8::new(if needed { NEEDED } else { 0 }),
            inside: AtomicBool::new(false),
            mutex: Mutex::new(()),
            stays: false,
            answer: || (),
            home: Home::here(),
        }
    }

    /// The same, whose owner answers alarms.
    pub(crate) fn answering(self, answer: fn()) -> Self {
        Self { answer, ..self }
    }

    /// Before the owner enters the next time, it answers. From any thread; allocates nothing, and does not wait.
    pub(super) fn alarm(&self) {
        self.reasons.fetch_or(ALARMED, Ordering::AcqRel);
    }

    /// A lock with one visitor, which makes a barrier only for the first of several visits.
    fn of_one_visitor() -> Self {
        Self { stays: true, ..Self::new(!order::heavy()) }
    }

    /// From now on several threads enter as the owner. Called from any thread that is outside.
    pub(crate) fn need(&self) {
        // An owner that is inside without the mutex leaves first.
        let _entry = self.enter_visiting();
        self.reasons.fetch_or(NEEDED, Ordering::Release);
    }

    /// Whether this process made the lock: false in a forked child.
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }

    /// In a forked child: a thread of the parent held the lock during the fork, and will never release it here.
    pub(crate) fn is_lost(&self) -> bool {
        (self.is_inside() || matches!(self.mutex.try_lock(), Err(TryLockError::WouldBlock)))
            && !self.is_here()
    }

    /// The owner is inside, unless there are several.
    #[inline]
    fn is_inside(&self) -> bool {
        self.inside.load(Ordering::Relaxed)
    }

    /// The owner enters; waits for visitors and other owners. A panic of an earlier holder does not stop later ones: it
    /// was reported when it happened.
    #[inline(always)]
    pub(crate) fn enter(&self) -> Entry<'_> {
        self.inside.store(true, Ordering::Relaxed);
        // The processor may load `reasons` before others see this store; a visitor's barrier orders the two.
        order::light();
        // If this reads 0, the changes of the last visitor are visible (`leave`).
        let needs = self.reasons.load(Ordering::Acquire) != 0;
        let mutex = ManuallyDrop::new(needs.then(|| self.enter_by_mutex()));
        Entry { lock: self, owns: true, mutex }
    }

    #[cold]
    #[inline(never)]
    fn enter_by_mutex(&self) -> MutexGuard<'_, ()> {
        self.inside.store(false, Ordering::Release);
        let mutex = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        self.inside.store(true, Ordering::Relaxed);
        self.answer_alarm();
        mutex
    }

    /// For the holder of the mutex.
    fn answer_alarm(&self) {
        if self.reasons.load(Ordering::Relaxed) & ALARMED != 0 {
            // An alarm that comes during the answer gets another one.
            self.reasons.fetch_and(!ALARMED, Ordering::AcqRel);
            (self.answer)();
        }
    }

    #[cold]
    #[inline(never)]
    fn unlock(&self, mutex: MutexGuard<'_, ()>, owns: bool) {
        if !owns && !self.stays {
            self.leave();
        }
        drop(mutex);
    }

    /// Enters from a thread that the owner knows nothing of. `None`: the lock is held.
    pub(crate) fn visit(&self) -> Option<Entry<'_>> {
        let mutex = match self.mutex.try_lock() {
            Ok(mutex) => mutex,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let entry = Entry { lock: self, owns: false, mutex: ManuallyDrop::new(Some(mutex)) };
        let before = self.reasons.fetch_or(VISITED, Ordering::AcqRel);
        if before & NEEDED != 0 {
            return Some(entry);
        }
        // The barrier interrupts all threads of the process. Without it nobody can tell whether the owner is inside.
        if before & VISITED == 0 && !order::heavy() {
            self.reasons.fetch_and(!VISITED, Ordering::Release);
            return None;
        }
        // If the owner is not inside, its changes are visible (`Entry::drop`).
        (!self.inside.load(Ordering::Acquire)).then_some(entry)
    }

    /// Enters from any thread, and waits for the owner and for other visitors.
    #[inline(never)]
    pub(crate) fn enter_visiting(&self) -> Entry<'_> {
        let mutex = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = Entry { lock: self, owns: false, mutex: ManuallyDrop::new(Some(mutex)) };
        if self.reasons.fetch_or(VISITED, Ordering::AcqRel) & NEEDED == 0 {
            order::heavy_or_pause();
            // An owner that enters from now on waits for the mutex, so this ends with the call that the owner is in.
            let mut looks = 0;
            while self.inside.load(Ordering::Acquire) {
                order::wait_a_little(looks);
                looks += 1;
            }
        }
        // What it does inside may send, as what the owner does.
        self.answer_alarm();
        entry
    }

    /// No visitor comes for a while: the owner needs no mutex. For a visitor that is inside, or is the only one.
    fn leave(&self) {
        if self.reasons.load(Ordering::Relaxed) & VISITED != 0 {
            self.reasons.fetch_and(!VISITED, Ordering::Release);
        }
    }
}

#[derive(Debug)]
struct Inner<T> {
    lock: Biased,
    value: UnsafeCell<T>,
}

// SAFETY: only the holder of the lock accesses the value.
unsafe impl<T: Send> Sync for Inner<T> {}

/// The owner's side of a value: enters all the time, from one thread at a time.
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
    value: &'a UnsafeCell<T>,
    _entry: Entry<'a>,
    _not_send: PhantomData<*const ()>,
}

impl<'a, T> Held<'a, T> {
    #[inline]
    fn new(inner: &'a Inner<T>, entry: Entry<'a>) -> Self {
        Self { value: &inner.value, _entry: entry, _not_send: PhantomData }
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the other side cannot enter while this exists.
        unsafe { &*self.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the other side cannot enter while this exists.
        unsafe { &mut *self.value.get() }
    }
}

/// The two sides of `value`.
pub(crate) fn visited<T: Send>(value: T) -> (Owner<T>, Visitor<T>) {
    let inner = Arc::new(Inner { lock: Biased::of_one_visitor(), value: UnsafeCell::new(value) });
    (Owner { inner: inner.clone(), _not_sync: PhantomData }, Visitor(inner))
}

impl<T> Owner<T> {
    /// Access to the value. `None` if the owner is inside already, or, in a forked child, if the parent's visitor was.
    #[inline]
    pub(crate) fn enter(&self) -> Option<Held<'_, T>> {
        let lock = &self.inner.lock;
        // One thread at a time uses the owner, so only that thread writes this word.
        if lock.is_inside() || (!self.is_alone() && lock.is_lost()) {
            return None;
        }
        Some(Held::new(&self.inner, lock.enter()))
    }

    /// The owner enters without the mutex.
    #[inline]
    pub(crate) fn is_alone(&self) -> bool {
        self.inner.lock.reasons.load(Ordering::Relaxed) == 0
    }
}

impl<T> Visitor<T> {
    /// Access; `None` while the owner is inside. From the first visit until [`Visitor::leave`] the owner takes a mutex.
    pub(crate) fn visit(&mut self) -> Option<Held<'_, T>> {
        self.0.lock.visit().map(|entry| Held::new(&self.0, entry))
    }

    /// There will be no visit for a while: the owner needs no mutex.
    pub(crate) fn leave(&mut self) {
        self.0.lock.leave();
    }
}

#[cfg(all(loom, test))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::Deadline;
    use std::sync::atomic::AtomicUsize;

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
    fn an_owner_that_is_inside_is_not_visited_and_does_not_enter_twice() {
        let (owner, mut visitor) = visited(1);
        let held = owner.enter().unwrap();
        assert!(owner.enter().is_none());
        assert!(visitor.visit().is_none());
        drop(held);
        assert_eq!(visitor.visit().map(|value| *value), Some(1));
        let held = owner.enter().unwrap();
        assert!(!owner.is_alone(), "after a visit");
        visitor.leave();
        assert!(owner.enter().is_none());
        drop(held);
        assert_eq!(owner.is_alone(), order::heavy());
        assert!(owner.enter().is_some() && owner.enter().is_some());
    }

    #[test]
    fn an_alarm_is_answered_before_the_owner_is_inside() {
        static ANSWERS: AtomicUsize = AtomicUsize::new(0);
        let answers = || ANSWERS.load(Ordering::Relaxed);
        for needed in [false, true] {
            ANSWERS.store(0, Ordering::Relaxed);
            let lock = Biased::new(needed).answering(|| {
                ANSWERS.fetch_add(1, Ordering::Relaxed);
            });
            drop(lock.enter());
            assert_eq!(answers(), 0);
            lock.alarm();
            lock.alarm();
            drop(lock.visit());
            assert_eq!(answers(), 0, "it does nothing for the application");
            drop(lock.enter_visiting());
            assert_eq!(answers(), 1);
            for _ in 0..3 {
                let _entry = lock.enter();
                assert_eq!(answers(), 1);
            }
            // An alarm is no visit: the owner that is inside keeps visitors out.
            let inside = lock.enter();
            lock.alarm();
            assert!(lock.visit().is_none());
            drop(inside);
            assert!(lock.visit().is_some() || (!needed && !order::heavy()));
            drop(lock.enter());
            assert_eq!(answers(), 2);
        }
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
