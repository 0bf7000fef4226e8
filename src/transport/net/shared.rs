//! How the application's threads and the background thread share an endpoint's connections.
//!
//! While the application polls, the background thread only checks now and then that it still does. Once it stops, the thread takes
//! over and sleeps until something arrives, a deadline passes, or the application is back. In that time the
//! application's calls pay for a mutex.

use super::core::Core;
use crate::sys::biased::Visitor;
use crate::sys::event::{Doorbell, Timer, Watched, wait_any};
use crate::sys::{Errno, clock, process};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The application counts as absent when it has not polled for this long, nanoseconds.
pub(super) const ABSENT_NS: u64 = 10_000_000;
/// Time between two checks of an application that polls: the first one, the increasing one while there is traffic, and
/// the one without any; nanoseconds. Each check takes a processor away from its present thread.
const LOOK_NS: u64 = 10_000_000;
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
    timer: Timer,
    bell: Doorbell,
    stop: AtomicBool,
    /// The process exits: everything must be acknowledged first.
    ends: AtomicBool,
    /// Everything is acknowledged.
    flushed: AtomicBool,
    owner: i32,
}

impl Shared {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self {
            present_until: AtomicU64::new(0),
            traffic: AtomicBool::new(false),
            dozes: AtomicBool::new(false),
            rules: AtomicBool::new(false),
            armed: AtomicBool::new(false),
            timer: Timer::new()?,
            bell: Doorbell::new()?,
            stop: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            flushed: AtomicBool::new(false),
            owner: process::pid(),
        })
    }

    /// The application polls at `now`.
    #[inline]
    pub(super) fn present(&self, now: u64) {
        self.present_until.store(now + ABSENT_NS, Ordering::Relaxed);
        if self.rules.load(Ordering::Relaxed) {
            self.rules.store(false, Ordering::Relaxed);
            self.bell.ring();
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
            self.bell.ring();
        }
    }

    /// Wakes threads that sleep on the endpoint's descriptors.
    pub(super) fn timer(&self) -> &Timer {
        &self.timer
    }

    /// The application is about to sleep on its descriptors, until `wake_at` if nothing arrives.
    pub(super) fn arm(&self, wake_at: Option<u64>) {
        self.armed.store(true, Ordering::Relaxed);
        match wake_at {
            Some(at) => self.timer.arm(at),
            None => self.timer.disarm(),
        }
        // It keeps its connections itself, as long as its longest sleep takes.
        self.present_until.store(clock::now_ns() + LOOK_MAX_NS, Ordering::Relaxed);
    }

    /// The application is awake.
    pub(super) fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
        self.timer.disarm();
    }

    /// The process exits: the thread gets everything acknowledged, whether the application polls or not.
    pub(super) fn flush(&self) {
        self.ends.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Everything was acknowledged after `flush`, or the thread has stopped and cannot do so.
    pub(super) fn is_flushed(&self) -> bool {
        self.flushed.load(Ordering::Acquire) || self.stop.load(Ordering::Acquire)
    }

    /// The process that opened the endpoint.
    pub(super) fn owner(&self) -> i32 {
        self.owner
    }

    /// Ends the thread soon.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// The thread: returns after `stop`.
    pub(super) fn run(&self, core: &mut Visitor<Core>, links: &[Watched]) {
        let mut look = LOOK_NS;
        while !self.stop.load(Ordering::Acquire) {
            let now = clock::now_ns();
            let present_until = self.present_until.load(Ordering::Relaxed);
            let ends = self.ends.load(Ordering::Acquire);
            if now < present_until && !ends {
                let traffic = self.traffic.swap(false, Ordering::Relaxed);
                look = look.min(if traffic { LOOK_BUSY_NS } else { LOOK_MAX_NS });
                self.dozes.store(look > LOOK_BUSY_NS, Ordering::Relaxed);
                core.leave();
                self.wait(&[], Some(now + look.max(present_until - now)));
                look *= 2;
                continue;
            }
            look = LOOK_NS;
            let Some(mut core) = core.visit() else {
                let look = if ends { LOOK_LAST_NS } else { LOOK_NS };
                self.wait(&[], Some(now + look)); // the application polls
                continue;
            };
            core.turn_in_background(now);
            if ends {
                self.flushed.store(core.is_flushed(now), Ordering::Release);
            }
            if core.has_events() && self.armed.load(Ordering::Relaxed) {
                self.timer.arm(1); // long ago: now
            }
            let next = core.next_timeout();
            let quiet = core.link.sleep();
            drop(core);
            if quiet {
                self.rules.store(true, Ordering::Relaxed);
                self.wait(links, next);
            }
        }
    }

    /// Sleeps until one of `links`, at most two, is readable, the doorbell rings, or `until` has come.
    fn wait(&self, links: &[Watched], until: Option<u64>) {
        let ms = match until {
            None => -1,
            Some(at) => {
                let left = at.saturating_sub(clock::now_ns());
                i32::try_from(left.div_ceil(1_000_000)).unwrap_or(i32::MAX)
            }
        };
        let bell = self.bell.fd();
        // A signal or a lack of memory may end the sleep early: the loop checks again.
        let _ = match links {
            [] => wait_any([bell], ms).map(|ready| ready[0]),
            [socket] => wait_any([bell, socket.as_fd()], ms).map(|ready| ready[0]),
            [socket, device, ..] => {
                wait_any([bell, socket.as_fd(), device.as_fd()], ms).map(|ready| ready[0])
            }
        }
        .map(|rang| rang && self.bell.silence());
    }
}
