//! The common part of completion queues and counters: the endpoints that feed them, and the threads that wait
//! for them. Only the holder of the domain's lock may access it.

use super::lock::{Guard, Locked};
use super::progress::{By, Progress};
use super::wait::{WaitKind, Waiter};
use std::ptr::addr_eq;
use std::sync::Arc;

/// The endpoints of a queue or counter, and its wait object.
#[derive(Debug)]
pub(crate) struct Source {
    /// Enabled endpoints bound to it. Each removes itself before it is freed.
    endpoints: Vec<*const dyn Progress>,
    /// `None`: FI_WAIT_NONE.
    pub(crate) waiter: Option<Arc<Waiter>>,
    /// Number of blocking calls that sleep now.
    sleepers: u32,
    /// The application sleeps on the descriptor (after fi_trywait).
    fd_armed: bool,
    /// `fi_cq_signal` was called.
    pub(crate) signaled: bool,
    /// The condition is to be signalled once the lock is free.
    cond_pending: bool,
}

impl Source {
    pub(crate) fn new(waiter: Option<Arc<Waiter>>) -> Self {
        Self {
            endpoints: Vec::new(),
            waiter,
            sleepers: 0,
            fd_armed: false,
            signaled: false,
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
    }

    /// True while the next event has to wake a waiter.
    fn is_armed(&self) -> bool {
        self.fd_armed || self.sleepers > 0
    }

    /// Reports a new event: wakes the waiters.
    #[inline]
    pub(crate) fn notify(&mut self) {
        let Some(waiter) = &self.waiter else { return };
        if self.is_armed() {
            waiter.ring();
        }
        if waiter.kind() == WaitKind::MutexCond {
            self.cond_pending = true;
        }
    }

    /// The waiter whose condition is to be signalled, once.
    pub(crate) fn take_condition(&mut self) -> Option<Arc<Waiter>> {
        if !std::mem::take(&mut self.cond_pending) {
            return None;
        }
        self.waiter.clone()
    }

    /// Prepares to sleep: false if an endpoint has work.
    fn arm(&mut self, guard: &Guard<'_>) -> bool {
        let first = !self.is_armed();
        if first {
            if let Some(waiter) = &self.waiter {
                waiter.silence();
            }
            for (i, endpoint) in self.endpoints.iter().enumerate() {
                // SAFETY: an endpoint removes itself from here before it is freed.
                if !unsafe { &**endpoint }.arm(guard) {
                    for armed in self.endpoints.iter().take(i) {
                        // SAFETY: an endpoint removes itself from here before it is freed.
                        unsafe { &**armed }.disarm(guard);
                    }
                    return false;
                }
            }
            return true;
        }
        // SAFETY: an endpoint removes itself from here before it is freed.
        self.endpoints.iter().all(|endpoint| unsafe { &**endpoint }.rearm(guard))
    }

    fn disarm(&mut self, guard: &Guard<'_>) {
        if self.is_armed() {
            return;
        }
        for endpoint in &self.endpoints {
            // SAFETY: an endpoint removes itself from here before it is freed.
            unsafe { &**endpoint }.disarm(guard);
        }
        if let Some(waiter) = &self.waiter {
            waiter.silence();
        }
    }

    /// A blocking call is about to sleep.
    pub(crate) fn begin_sleep(&mut self, guard: &Guard<'_>) -> bool {
        let ready = self.arm(guard);
        if ready {
            self.sleepers += 1;
        }
        ready
    }

    /// That call woke up.
    pub(crate) fn end_sleep(&mut self, guard: &Guard<'_>) {
        self.sleepers = self.sleepers.saturating_sub(1);
        self.disarm(guard);
    }

    /// The application is about to sleep on the descriptor.
    pub(crate) fn arm_fd(&mut self, guard: &Guard<'_>) -> bool {
        let ready = self.arm(guard);
        self.fd_armed |= ready;
        ready
    }

    /// The application reads again.
    #[inline]
    pub(crate) fn disarm_fd(&mut self, guard: &Guard<'_>) {
        if self.fd_armed {
            self.fd_armed = false;
            self.disarm(guard);
        }
    }
}
