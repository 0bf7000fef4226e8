//! The common part of completion queues and counters: the endpoints that feed them, and the threads that wait
//! for them. Only the holder of the domain's lock may access it.

use super::lock::{Guard, Locked};
use super::progress::{By, Progress};
use super::wait::{WaitKind, Waiter};
use std::ptr::addr_eq;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The endpoints of a queue or counter, and its wait object.
#[derive(Debug)]
pub(crate) struct Source {
    /// Enabled endpoints bound to it. Each removes itself before it is freed.
    endpoints: Vec<*const dyn Progress>,
    /// Those of them that were told that a waiter sleeps.
    armed: Vec<*const dyn Progress>,
    /// `None`: FI_WAIT_NONE.
    pub(crate) waiter: Option<Arc<Waiter>>,
    /// Number of blocking calls that sleep now.
    sleepers: u32,
    /// The application sleeps on the descriptor (after fi_trywait).
    fd_armed: bool,
    /// The threads that may sleep there: they have not read since. A thread that reads wakes no other one by that, and
    /// must not take from it what wakes it.
    on_fd: Vec<usize>,
    /// The descriptor is readable because of an event.
    rings: bool,
    /// `fi_cq_signal` was called. The lock does not protect it.
    pub(crate) signaled: Arc<AtomicBool>,
    /// The condition is to be signalled once the lock is free.
    cond_pending: bool,
}

impl Source {
    pub(crate) fn new(waiter: Option<Arc<Waiter>>) -> Self {
        Self {
            endpoints: Vec::new(),
            armed: Vec::new(),
            waiter,
            sleepers: 0,
            fd_armed: false,
            on_fd: Vec::new(),
            rings: false,
            signaled: Arc::default(),
            cond_pending: false,
        }
    }

    /// Progresses the endpoints of the source that `pick` finds in `state`. The state is borrowed
    /// anew at each step, because progress writes to it.
    #[inline]
    pub(crate) fn progress<T>(
        state: &Locked<T>,
        pick: impl Fn(&mut T) -> &mut Self,
        guard: &Guard<'_>,
    ) {
        // SAFETY: the guard belongs to the domain of the state; the borrow ends with the statement.
        let at = |i: usize| pick(unsafe { state.get(guard) }).endpoints.get(i).copied();
        let mut i = 0;
        while let Some(endpoint) = at(i) {
            // SAFETY: an endpoint removes itself from the list, under this lock, before it is freed.
            unsafe { &*endpoint }.progress(By::Application, guard);
            i += 1;
        }
    }

    /// Adds an enabled endpoint, which feeds this source and wakes its waiter.
    pub(crate) fn attach(
        &mut self,
        endpoint: *const dyn Progress,
        guard: &Guard<'_>,
    ) -> Result<(), i32> {
        if self.endpoints.iter().any(|known| addr_eq(*known, endpoint)) {
            return Ok(());
        }
        if let Some(waiter) = &self.waiter {
            // SAFETY: the caller's endpoint lives, and removes itself from the list before it is freed.
            let fd = unsafe { &*endpoint }.wait_fd(guard)?;
            waiter.watch(fd, endpoint.cast::<()>().addr() as u64)?;
        }
        self.endpoints.push(endpoint);
        if self.is_armed() {
            // SAFETY: as above.
            if unsafe { &*endpoint }.arm(guard) {
                self.armed.push(endpoint);
            } else {
                self.ring();
            }
        }
        Ok(())
    }

    /// The inverse of `attach`.
    pub(crate) fn detach(&mut self, endpoint: *const dyn Progress, guard: &Guard<'_>) {
        // SAFETY: as in `attach`. A descriptor that cannot be made was not watched.
        let fd = || unsafe { &*endpoint }.wait_fd(guard).ok();
        if let Some((waiter, fd)) = self.waiter.as_ref().and_then(|waiter| Some((waiter, fd()?))) {
            waiter.unwatch(fd);
        }
        self.endpoints.retain(|known| !addr_eq(*known, endpoint));
        let before = self.armed.len();
        self.armed.retain(|known| !addr_eq(*known, endpoint));
        if self.armed.len() < before {
            // SAFETY: as in `attach`.
            unsafe { &*endpoint }.disarm(guard);
        }
    }

    /// True while the next event has to wake a waiter.
    fn is_armed(&self) -> bool {
        self.fd_armed || self.sleepers > 0
    }

    /// Reports a new event: wakes the waiters.
    #[inline(always)]
    pub(crate) fn notify(&mut self) {
        let Some(waiter) = &self.waiter else { return };
        if self.is_armed() || waiter.kind() == WaitKind::MutexCond {
            self.wake();
        }
    }

    #[cold]
    fn wake(&mut self) {
        let Some(waiter) = &self.waiter else { return };
        if self.is_armed() {
            self.rings = true;
            waiter.ring();
        }
        if waiter.kind() == WaitKind::MutexCond && !std::mem::replace(&mut self.cond_pending, true)
        {
            waiter.signal_soon();
        }
    }

    /// The waiter whose condition is to be signalled, once.
    pub(crate) fn take_condition(&mut self) -> Option<Arc<Waiter>> {
        if !std::mem::take(&mut self.cond_pending) {
            return None;
        }
        self.waiter.clone()
    }

    fn ring(&mut self) {
        self.rings = true;
        self.waiter.iter().for_each(|waiter| waiter.ring());
    }

    fn silence(&mut self) {
        self.rings = false;
        self.waiter.iter().for_each(|waiter| waiter.silence());
    }

    /// Prepares to sleep: false if an endpoint has work.
    fn arm(&mut self, guard: &Guard<'_>) -> bool {
        if self.is_armed() {
            // SAFETY: an endpoint removes itself from here before it is freed.
            return self.armed.iter().all(|endpoint| unsafe { &**endpoint }.rearm(guard));
        }
        for endpoint in &self.endpoints {
            // SAFETY: an endpoint removes itself from here before it is freed.
            if !unsafe { &**endpoint }.arm(guard) {
                self.disarm_endpoints(guard);
                return false;
            }
            self.armed.push(*endpoint);
        }
        true
    }

    fn disarm_endpoints(&mut self, guard: &Guard<'_>) {
        for endpoint in self.armed.drain(..) {
            // SAFETY: an endpoint removes itself from here before it is freed.
            unsafe { &*endpoint }.disarm(guard);
        }
    }

    /// Ends what `arm` began, when no waiter is left that is known to sleep. Threads that may still sleep on the
    /// descriptor are woken, because nothing else will wake them.
    fn disarm(&mut self, guard: &Guard<'_>) {
        if self.is_armed() {
            return;
        }
        self.disarm_endpoints(guard);
        if self.on_fd.is_empty() {
            self.silence();
        } else if !self.rings {
            self.ring();
        }
    }

    /// A blocking call is about to sleep.
    pub(crate) fn begin_sleep(&mut self, guard: &Guard<'_>) -> bool {
        if !self.arm(guard) {
            return false;
        }
        if !self.is_armed() {
            self.silence();
        }
        self.sleepers += 1;
        // One of before may have been silenced here; a later one rings.
        if self.signaled.load(Ordering::Acquire) {
            self.end_sleep(guard);
            return false;
        }
        true
    }

    /// That call woke up.
    pub(crate) fn end_sleep(&mut self, guard: &Guard<'_>) {
        self.sleepers = self.sleepers.saturating_sub(1);
        self.disarm(guard);
    }

    /// The application is about to sleep on the descriptor; it has been told of all events.
    pub(crate) fn arm_fd(&mut self, guard: &Guard<'_>) -> bool {
        self.arm_fd_of(this_thread(), guard)
    }

    fn arm_fd_of(&mut self, thread: usize, guard: &Guard<'_>) -> bool {
        if !self.arm(guard) {
            return false;
        }
        // What it rang for has been read, maybe by a thread other than one that it was to wake.
        if self.sleepers == 0 {
            self.silence();
        }
        self.fd_armed = true;
        if !self.on_fd.contains(&thread) {
            self.on_fd.push(thread);
        }
        true
    }

    /// The application reads again.
    #[inline]
    pub(crate) fn disarm_fd(&mut self, guard: &Guard<'_>) {
        if self.fd_armed {
            self.disarm_fd_of(this_thread(), guard);
        }
    }

    /// The thread does not sleep on the descriptor. Others may; once they are woken, further events need not ring.
    #[cold]
    fn disarm_fd_of(&mut self, thread: usize, guard: &Guard<'_>) {
        self.on_fd.retain(|other| *other != thread);
        if self.on_fd.is_empty() || self.rings {
            self.fd_armed = false;
            self.disarm(guard);
        }
    }
}

/// A number that no other thread of this process has now.
pub(super) fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| (&raw const *place).addr())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::ofi::lock::DomainLock;
    use crate::protocol::{Failure, Report};
    use crate::sys::event::Doorbell;
    use std::cell::Cell;
    use std::os::fd::{AsRawFd, RawFd};

    /// An endpoint that counts the waiters that it was told of.
    pub(in crate::ofi) struct Fed {
        bell: Doorbell,
        has_work: Cell<bool>,
        pub(in crate::ofi) has_room: Cell<bool>,
        armed: Cell<i32>,
    }

    impl Fed {
        pub(in crate::ofi) fn new() -> Self {
            Self {
                bell: Doorbell::new().unwrap(),
                has_work: Cell::new(false),
                has_room: Cell::new(true),
                armed: Cell::new(0),
            }
        }
    }

    impl Progress for Fed {
        fn progress(&self, _: By, _: &Guard<'_>) -> usize {
            0
        }
        fn take_polled(&self, _: &Guard<'_>) -> bool {
            false
        }
        fn arm(&self, guard: &Guard<'_>) -> bool {
            let ready = self.rearm(guard);
            self.armed.set(self.armed.get() + i32::from(ready));
            ready
        }
        fn rearm(&self, _: &Guard<'_>) -> bool {
            !self.has_work.get()
        }
        fn disarm(&self, _: &Guard<'_>) {
            self.armed.set(self.armed.get() - 1);
        }
        fn rouse(&self, _: &Guard<'_>) {}
        fn hand_to_thread(&self, _: &Guard<'_>) -> bool {
            true
        }
        fn wait_fd(&self, _: &Guard<'_>) -> Result<RawFd, i32> {
            Ok(self.bell.fd().as_raw_fd())
        }
        fn revoke(&self, _: u64, _: &Guard<'_>) {}
        fn is_settled(&self, _: bool, _: &Guard<'_>) -> bool {
            true
        }
        fn has_vector(&self, _: *const (), _: &Guard<'_>) -> bool {
            false
        }
        fn rename_source(&self, _: u64, _: u64, _: &Guard<'_>) {}
        fn has_room(&self, _: Report, _: bool, _: &Guard<'_>) -> bool {
            self.has_room.get()
        }
        fn fail(&self, _: &Failure, _: &Guard<'_>) {}
    }

    fn source() -> Source {
        Source::new(Some(Arc::new(Waiter::new(WaitKind::Fd).unwrap())))
    }

    fn is_readable(source: &Source) -> bool {
        source.waiter.as_ref().unwrap().block(0).unwrap()
    }

    /// Two threads.
    const ONE: usize = 1;
    const OTHER: usize = 2;

    #[test]
    fn an_endpoint_that_comes_while_a_thread_sleeps_is_told_and_forgotten_once() {
        let (lock, mut source, first, idle, busy) =
            (DomainLock::new(true), source(), Fed::new(), Fed::new(), Fed::new());
        busy.has_work.set(true);
        let guard = lock.lock();
        source.attach(&raw const first, &guard).unwrap();
        assert!(source.arm_fd(&guard) && !is_readable(&source));
        source.attach(&raw const idle, &guard).unwrap();
        assert_eq!(idle.armed.get(), 1);
        assert!(!is_readable(&source));
        source.attach(&raw const busy, &guard).unwrap();
        assert!(is_readable(&source), "it has work");
        source.detach(&raw const idle, &guard);
        assert_eq!(idle.armed.get(), 0);
        source.disarm_fd(&guard);
        assert_eq!([first.armed.get(), idle.armed.get(), busy.armed.get()], [0; 3]);
        assert!(!is_readable(&source));
    }

    #[test]
    fn a_read_by_one_thread_leaves_the_sleep_of_another() {
        let (lock, mut source, fed) = (DomainLock::new(true), source(), Fed::new());
        source.attach(&raw const fed, &lock.lock()).unwrap();
        let guard = lock.lock();
        assert!(source.arm_fd_of(OTHER, &guard));
        source.disarm_fd_of(ONE, &guard);
        assert_eq!(fed.armed.get(), 1, "it is still to be woken");
        source.notify();
        assert!(is_readable(&source));
        // The event is read: the other thread has been woken for it, and needs no doorbell.
        source.disarm_fd_of(ONE, &guard);
        assert_eq!(fed.armed.get(), 0);
        assert!(is_readable(&source), "it may not have run yet");
        // This thread sleeps too, and is told the time.
        assert!(source.arm_fd_of(ONE, &guard) && !is_readable(&source));
        source.disarm_fd_of(ONE, &guard);
        assert_eq!(fed.armed.get(), 1, "the other one may sleep");
        source.disarm_fd_of(OTHER, &guard);
        assert_eq!(fed.armed.get(), 0);
        assert!(!is_readable(&source));
    }

    #[test]
    fn a_blocking_call_that_ends_wakes_those_that_sleep_on_the_descriptor() {
        let (lock, mut source, fed) = (DomainLock::new(true), source(), Fed::new());
        source.attach(&raw const fed, &lock.lock()).unwrap();
        let guard = lock.lock();
        assert!(source.arm_fd_of(OTHER, &guard));
        source.notify();
        source.disarm_fd_of(ONE, &guard);
        // The bell rang for the other thread; this one's sleep silences it and stands in.
        assert!(source.begin_sleep(&guard) && !is_readable(&source));
        source.end_sleep(&guard);
        assert_eq!(fed.armed.get(), 0);
        assert!(is_readable(&source));
    }
}
