//! The processes with which there are links, and how their end becomes known: by a descriptor for each while they are
//! few, otherwise by checks, first of those for which an operation waits. A process in another pid namespace is not
//! visible here: its connection stays open, and hangs up.

use crate::sys::clock;
use crate::sys::event::{Epoll, Timer, wait_readable};
use crate::sys::watched::{self, Identity};
use crate::transport::ELSEWHERE;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Time between two checks that the endpoints and processes of all links exist, and between two trials of slow rings,
/// nanoseconds.
pub(super) const LIVENESS_NS: u64 = 500_000_000;
/// Processes checked at a time although no operation waits for their peers.
const CHECKS: usize = 16;

#[derive(Debug)]
struct Watch {
    process: Identity,
    /// Without a descriptor, the process is checked periodically.
    fd: Option<Arc<OwnedFd>>,
}

/// One [`Watch`] for each visible process with which there are links.
#[derive(Debug, Default)]
pub(super) struct Watches {
    list: Vec<Watch>,
    /// The next one to be checked although no operation waits for its peer.
    next: usize,
    /// Wakes a sleeping thread for checks.
    timer: Option<Timer>,
    /// The time of the last checks, nanoseconds.
    pub(super) checked_at: u64,
}

impl Watches {
    fn of(&self, pid: i32) -> Option<&Watch> {
        self.list.iter().find(|watch| watch.process.pid == pid)
    }

    /// The descriptor of process `pid` says that it has ended.
    pub(super) fn reports(&self, pid: i32) -> bool {
        let fd = self.of(pid).and_then(|watch| watch.fd.as_ref());
        fd.is_some_and(|fd| wait_readable(fd.as_fd(), 0).unwrap_or(false))
    }

    /// Whether process `pid`, which is watched, has ended.
    pub(super) fn has_ended(&self, pid: i32) -> bool {
        self.of(pid).is_some_and(|watch| !watch.process.is_running())
    }

    /// The processes without a descriptor for which an operation waits, and a few others in turn.
    pub(super) fn next_to_check(&mut self, owed: impl Fn(i32) -> bool) -> Vec<i32> {
        let (from, to) = (self.next, self.next + CHECKS);
        let unwatched = self.list.iter().enumerate().filter(|(_, watch)| watch.fd.is_none());
        let pids = unwatched
            .filter(|(at, watch)| (from..to).contains(at) || owed(watch.process.pid))
            .map(|(_, watch)| watch.process.pid)
            .collect();
        self.next = if to < self.list.len() { to } else { 0 };
        pids
    }

    /// Watches process `pid`, unless it is already watched, or is not visible here. Its end makes `token` ready in
    /// `epoll`, while the processes are few.
    pub(super) fn add(&mut self, pid: i32, token: u64, epoll: &Epoll) {
        if pid <= 0 || self.of(pid).is_some() {
            return;
        }
        let few = self.list.len() < watched::watches_max();
        let fd = if few { watched::watch(pid) } else { None };
        let fd = fd.filter(|fd| epoll.add(fd.as_fd(), token).is_ok());
        if !few {
            for fd in self.list.iter_mut().filter_map(|watch| watch.fd.take()) {
                epoll.remove(fd.as_fd());
            }
        }
        self.list.push(Watch { process: Identity::of(pid), fd });
    }

    /// Stops watching process `pid`.
    pub(super) fn remove(&mut self, pid: i32, epoll: &Epoll) {
        if let Some(at) = self.list.iter().position(|watch| watch.process.pid == pid) {
            if let Some(fd) = self.list.swap_remove(at).fd {
                epoll.remove(fd.as_fd());
            }
        }
    }

    /// A thread is about to sleep in `epoll`: the end of a process without a descriptor wakes nobody.
    pub(super) fn wake_for_checks(&mut self, epoll: &Epoll) {
        if self.list.iter().all(|watch| watch.fd.is_some()) {
            return;
        }
        if self.timer.is_none() {
            let added = |timer: &Timer| epoll.add(timer.fd(), ELSEWHERE).is_ok();
            self.timer = Timer::new().ok().filter(added);
        }
        if let Some(timer) = &self.timer {
            timer.arm(clock::now_ns().saturating_add(LIVENESS_NS));
        }
    }

    /// No thread sleeps any more.
    pub(super) fn awake(&self) {
        if let Some(timer) = &self.timer {
            timer.disarm();
        }
    }
}
