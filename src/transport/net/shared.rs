//! How the application's threads and the background thread share an endpoint's connections.
//!
//! While the application polls, the background thread only checks now and then that it still does. Once it stops, the thread takes
//! over and sleeps until something arrives, a deadline passes, or the application is back. In that time the
//! application's calls pay for a mutex.

use super::core::Core;
use crate::sys::biased::Visitor;
use crate::sys::hub::{Rest, Ticket};
use crate::sys::late_set::{LateSet, LateTimer};
use crate::sys::process::Home;
use crate::sys::{Errno, clock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The application counts as absent when it has not polled for this long, nanoseconds.
pub(super) const ABSENT_NS: u64 = 10_000_000;
/// Time between two checks of an application that polls: the first one, the increasing one while there is traffic, and
/// the one without any; nanoseconds. Each check takes a processor away from its present thread.
pub(super) const LOOK_NS: u64 = 10_000_000;
const LOOK_BUSY_NS: u64 = 40_000_000;
const LOOK_MAX_NS: u64 = 1_000_000_000;
/// The same while the process exits.
const LOOK_LAST_NS: u64 = 1_000_000;

/// State that the application's threads and the background thread share.
#[derive(Debug)]
pub(super) struct Shared {
    /// When the application begins to count as absent, nanoseconds.
    present_until: AtomicU64,
    /// There was traffic since the thread's last check.
    traffic: AtomicBool,
    /// The thread sleeps longer than `LOOK_NS`.
    dozes: AtomicBool,
    /// The thread has taken over, and sleeps until something arrives or is due.
    rules: AtomicBool,
    /// The application sleeps on descriptors: the timer wakes it.
    armed: AtomicBool,
    /// Empty until the endpoint's set is known.
    timer: OnceLock<LateTimer>,
    /// The task; `None` before it is started and after it has ended, or if there is none.
    task: Mutex<Option<Ticket>>,
    stop: AtomicBool,
    /// The process exits: everything must be acknowledged first.
    ends: AtomicBool,
    /// Everything is acknowledged.
    flushed: AtomicBool,
    owner: Home,
}

impl Shared {
    pub(super) fn new() -> Self {
        Self {
            present_until: AtomicU64::new(0),
            traffic: AtomicBool::new(false),
            dozes: AtomicBool::new(false),
            rules: AtomicBool::new(false),
            armed: AtomicBool::new(false),
            timer: OnceLock::new(),
            task: Mutex::new(None),
            stop: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            flushed: AtomicBool::new(false),
            owner: Home::here(),
        }
    }

    /// The application polls at `now`.
    #[inline]
    pub(super) fn present(&self, now: u64) {
        self.present_until.store(now + ABSENT_NS, Ordering::Relaxed);
        if self.rules.load(Ordering::Relaxed) {
            self.rules.store(false, Ordering::Relaxed);
            self.wake();
        }
    }

    /// When the application begins to count as absent, nanoseconds.
    #[cfg(test)]
    pub(super) fn present_until(&self) -> u64 {
        self.present_until.load(Ordering::Relaxed)
    }

    /// A message was sent or has arrived.
    #[inline]
    pub(super) fn note_traffic(&self) {
        if !self.traffic.load(Ordering::Relaxed) {
            self.traffic.store(true, Ordering::Relaxed);
        }
        if self.dozes.load(Ordering::Relaxed) {
            self.dozes.store(false, Ordering::Relaxed);
            self.wake();
        }
    }

    /// The set on which the application's threads sleep, and the token there of what wakes them.
    pub(super) fn join(&self, set: &Arc<LateSet>, token: u64) {
        let _ = self.timer.set(LateTimer::of(set.clone(), token)); // as before, if it is called twice
    }

    /// The application is about to sleep on its descriptors, until `wake_at` if nothing arrives. Errors: those of
    /// [`LateTimer::arm`].
    pub(super) fn arm(&self, wake_at: Option<u64>) -> Result<(), Errno> {
        if let Some(timer) = self.timer.get() {
            // Without a time too: the background task wakes by it.
            timer.arm(wake_at.unwrap_or(u64::MAX))?;
        }
        self.armed.store(true, Ordering::Relaxed);
        // It keeps its connections itself, as long as its longest sleep takes.
        self.present_until.store(clock::now_ns() + LOOK_MAX_NS, Ordering::Relaxed);
        Ok(())
    }

    /// Wakes a thread that sleeps on the descriptors.
    pub(super) fn rouse(&self) {
        // Long ago: now. The timer was armed before, and so it exists.
        let _ = self.timer.get().map(|timer| timer.arm(1));
    }

    /// The application is awake.
    pub(super) fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
        self.timer.get().iter().for_each(|timer| timer.disarm());
    }

    /// The process exits: the thread gets everything acknowledged, whether the application polls or not.
    pub(super) fn flush(&self) {
        self.ends.store(true, Ordering::Release);
        // This thread may be in the middle of a wake-up, if a signal handler exits.
        if let Ok(task) = self.task.try_lock() {
            task.iter().for_each(Ticket::try_wake);
        }
    }

    /// Everything was acknowledged after `flush`, or the thread has stopped and cannot do so.
    pub(super) fn is_flushed(&self) -> bool {
        self.flushed.load(Ordering::Acquire) || self.stop.load(Ordering::Acquire)
    }

    /// The process that opened the endpoint.
    pub(super) fn owner(&self) -> Home {
        self.owner
    }

    /// The task runs.
    pub(super) fn start(&self, task: Ticket) {
        *self.task() = Some(task);
    }

    /// Ends the task: it has no turn after this has returned.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        if self.owner.is_here() {
            let task = self.task().take();
            drop(task);
        }
    }

    #[cold]
    fn wake(&self) {
        // In a forked child a thread of the parent may hold the lock for ever.
        if self.owner.is_here() {
            self.task().iter().for_each(Ticket::wake);
        }
    }

    fn task(&self) -> MutexGuard<'_, Option<Ticket>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn of the task. `look`: the time between two checks of an application that polls.
    pub(super) fn turn(&self, core: &mut Visitor<Core>, look: &mut u64) -> Rest {
        let asleep = |until| Rest { until: Some(until), watches: false };
        let now = clock::now_ns();
        let present_until = self.present_until.load(Ordering::Relaxed);
        let ends = self.ends.load(Ordering::Acquire);
        if now < present_until && !ends {
            let traffic = self.traffic.swap(false, Ordering::Relaxed);
            *look = (*look).min(if traffic { LOOK_BUSY_NS } else { LOOK_MAX_NS });
            self.dozes.store(*look > LOOK_BUSY_NS, Ordering::Relaxed);
            core.leave();
            let until = now + (*look).max(present_until - now);
            *look *= 2;
            return asleep(until);
        }
        *look = LOOK_NS;
        let Some(mut core) = core.visit() else {
            return asleep(now + if ends { LOOK_LAST_NS } else { LOOK_NS }); // the application polls
        };
        core.turn_in_background(now);
        if ends {
            self.flushed.store(core.is_flushed(now), Ordering::Release);
        }
        if core.has_events() && self.armed.load(Ordering::Relaxed) {
            self.rouse();
        }
        let until = core.next_timeout();
        if !core.link.sleep() {
            return asleep(now);
        }
        self.rules.store(true, Ordering::Relaxed);
        Rest { until, watches: true }
    }
}
