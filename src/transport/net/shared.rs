//! How the application's threads and the background thread share an endpoint's connections.
//!
//! While the application polls, the background thread only checks now and then that it still does. Once it stops, the thread takes
//! over and sleeps until something arrives, a deadline passes, or the application is back. In that time the
//! application's calls pay for a mutex. An application that computes may still send now and then: a call that brings an
//! earlier deadline sets the thread's timer, and the timer of the application's threads that sleep. Neither is woken before that deadline.

use super::core::Core;
use crate::sys::biased::Visitor;
use crate::sys::hub::{Rest, Ticket};
use crate::sys::late_set::{LateSet, LateTimer};
use crate::sys::process::Home;
use crate::sys::{Errno, clock};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The application counts as absent when it has not polled for this long, nanoseconds.
pub(super) const ABSENT_NS: u64 = 10_000_000;
/// Time between two checks of an application that polls: the first one, the increasing one while there is traffic, and
/// the one without any; nanoseconds. Each check takes a processor away from its present thread.
pub(super) const LOOK_NS: u64 = 10_000_000;
const LOOK_BUSY_NS: u64 = 40_000_000;
const LOOK_MAX_NS: u64 = 1_000_000_000;
/// The same while the application is in a call when it is to be relieved.
const LOOK_SOON_NS: u64 = 1_000_000;

/// What a call that sends or receives must tell (`Shared::tells`). There was no traffic since the thread's last check.
const QUIET: u8 = 1;
/// The thread sleeps longer than `LOOK_BUSY_NS`, and watches nothing.
const DOZES: u8 = 2;
/// The thread has taken over, and sleeps until something arrives, or until `rests_until`.
const RULES: u8 = 4;
/// A thread of the application sleeps on descriptors: the timer wakes it at `wakes_at`.
const ARMED: u8 = 8;

/// State that the application's threads and the background thread share.
#[derive(Debug)]
pub(super) struct Shared {
    /// When the application begins to count as absent, nanoseconds.
    present_until: AtomicU64,
    /// `QUIET`, `DOZES`, `RULES` and `ARMED`, so that most calls load one word; 0: they have nothing to tell.
    tells: AtomicU8,
    /// The earliest deadline that the thread (`RULES`) and the timer (`ARMED`) know of, nanoseconds; [`u64::MAX`]: none.
    /// Both are written only by the holder of the core, which sets the deadlines.
    rests_until: AtomicU64,
    wakes_at: AtomicU64,
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
    /// How often the task was woken at once.
    #[cfg(test)]
    pub(super) rung: AtomicU64,
}

impl Shared {
    pub(super) fn new() -> Self {
        Self {
            present_until: AtomicU64::new(0),
            tells: AtomicU8::new(QUIET),
            rests_until: AtomicU64::new(u64::MAX),
            wakes_at: AtomicU64::new(u64::MAX),
            timer: OnceLock::new(),
            task: Mutex::new(None),
            stop: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            flushed: AtomicBool::new(false),
            owner: Home::here(),
            #[cfg(test)]
            rung: AtomicU64::new(0),
        }
    }

    /// The application polls at `now`.
    #[inline]
    pub(super) fn present(&self, now: u64) {
        self.present_until.store(now + ABSENT_NS, Ordering::Relaxed);
        if self.tells.load(Ordering::Relaxed) & RULES != 0 {
            self.tells.fetch_and(!RULES, Ordering::Relaxed);
            self.wake();
        }
    }

    /// When the application begins to count as absent, nanoseconds.
    #[cfg(test)]
    pub(super) fn present_until(&self) -> u64 {
        self.present_until.load(Ordering::Relaxed)
    }

    /// The earliest deadline that the thread knows of, nanoseconds. `None`: it has not taken over.
    #[cfg(test)]
    pub(super) fn rests_until(&self) -> Option<u64> {
        let rules = self.tells.load(Ordering::Relaxed) & RULES != 0;
        rules.then(|| self.rests_until.load(Ordering::Relaxed))
    }

    /// The earliest deadline that the timer of a sleeping application knows of, nanoseconds.
    #[cfg(test)]
    pub(super) fn wakes_at(&self) -> u64 {
        self.wakes_at.load(Ordering::Relaxed)
    }

    /// A message was sent or has arrived, and `core` has the deadlines that it brought.
    #[inline]
    pub(super) fn note_traffic(&self, core: &Core) {
        let tells = self.tells.load(Ordering::Relaxed);
        if tells != 0 {
            self.tell(tells, core);
        }
    }

    #[cold]
    #[inline(never)]
    fn tell(&self, tells: u8, core: &Core) {
        if tells & (QUIET | DOZES) != 0 {
            self.tells.fetch_and(!(QUIET | DOZES), Ordering::Relaxed);
        }
        let due = core.next_timeout().unwrap_or(u64::MAX);
        if tells & ARMED != 0 && due < self.wakes_at.load(Ordering::Relaxed) {
            self.wakes_at.store(due, Ordering::Relaxed);
            let _ = self.timer.get().map(|timer| timer.arm(due)); // it was armed before, and so it exists
        }
        let early = tells & RULES != 0 && due < self.rests_until.load(Ordering::Relaxed);
        if early {
            self.rests_until.store(due, Ordering::Relaxed); // until then it need not be told of later ones
        }
        if tells & DOZES != 0 {
            self.wake();
        } else if early && self.owner.is_here() {
            // Not at once: the application is in the core now, and what it holds back for more messages is not due yet.
            self.task().iter().for_each(|task| task.wake_at(due));
        }
    }

    /// The set on which the application's threads sleep, and the token there of what wakes them.
    pub(super) fn join(&self, set: &Arc<LateSet>, token: u64) {
        let _ = self.timer.set(LateTimer::of(set.clone(), token)); // as before, if it is called twice
    }

    /// The application, which holds the core, is about to sleep on its descriptors, until `wake_at` if nothing arrives.
    /// Errors: those of [`LateTimer::arm`].
    pub(super) fn arm(&self, wake_at: Option<u64>) -> Result<(), Errno> {
        let wake_at = wake_at.unwrap_or(u64::MAX);
        if let Some(timer) = self.timer.get() {
            // Without a time too: the background task wakes by it.
            timer.arm(wake_at)?;
        }
        self.wakes_at.store(wake_at, Ordering::Relaxed);
        self.tells.fetch_or(ARMED, Ordering::Relaxed);
        // It keeps its connections itself, as long as its longest sleep takes.
        self.present_until.store(clock::now_ns() + LOOK_MAX_NS, Ordering::Relaxed);
        Ok(())
    }

    /// Wakes a thread that sleeps on the descriptors. For the holder of the core.
    pub(super) fn rouse(&self) {
        self.wakes_at.store(0, Ordering::Relaxed); // no deadline moves the timer now
        // Long ago: now. The timer was armed before, and so it exists.
        let _ = self.timer.get().map(|timer| timer.arm(1));
    }

    /// The application is awake.
    pub(super) fn disarm(&self) {
        self.tells.fetch_and(!ARMED, Ordering::Relaxed);
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
            #[cfg(test)]
            self.rung.fetch_add(1, Ordering::Relaxed);
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
        self.tells.fetch_and(!(DOZES | RULES), Ordering::Relaxed);
        if now < present_until && !ends {
            let quiet = self.tells.fetch_or(QUIET, Ordering::Relaxed) & QUIET != 0;
            *look = (*look).min(if quiet { LOOK_MAX_NS } else { LOOK_BUSY_NS });
            if *look > LOOK_BUSY_NS {
                self.tells.fetch_or(DOZES, Ordering::Relaxed);
            }
            core.leave();
            // No longer while it sleeps: it may wake, send, and compute.
            let until = now + *look;
            *look *= 2;
            return asleep(until);
        }
        *look = LOOK_NS;
        let Some(mut core) = core.visit() else {
            // The application begins to poll, or is in the call that woke the thread.
            return asleep(now + LOOK_SOON_NS);
        };
        core.turn_in_background(now);
        if ends {
            self.flushed.store(core.is_flushed(now), Ordering::Release);
        }
        if core.has_events() && self.tells.load(Ordering::Relaxed) & ARMED != 0 {
            self.rouse();
        }
        let until = core.next_timeout();
        if !core.link.sleep() {
            return asleep(now);
        }
        self.rests_until.store(until.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.tells.fetch_or(RULES, Ordering::Relaxed);
        Rest { until, watches: true }
    }
}
