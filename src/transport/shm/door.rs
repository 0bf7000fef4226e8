//! What an endpoint keeps of connections that are not yet links: those that wait to be heard, that are to be closed, and
//! that were refused, and the attempts to make links that wait for them.

use super::hello::{Hello, Reject, RejectReason};
use super::in_flight::InFlight;
use super::names::Names;
use super::refused::{Refused, Segment};
use super::tokens::TOKEN_LISTENER;
use crate::sys::clock::Waited;
use crate::sys::close::close_elsewhere;
use crate::sys::event::wait_readable;
use crate::sys::late_set::LateSet;
use crate::sys::spare::{self, Spare};
use crate::sys::unix::{self, Credentials};
use crate::sys::{Errno, clock};
use crate::telemetry::log;
use crate::transport::PeerId;
use std::os::fd::{AsFd, OwnedFd};

/// Most connections of this user without a connect request; one more ends the oldest.
pub(super) const GREETINGS_MAX: usize = 64;
/// Time in which a connect request has to arrive, nanoseconds.
pub(super) const HELLO_NS: u64 = 5_000_000_000;
/// Time that a process which is just closing or ending gets to finish, and an answer that cannot be sent, nanoseconds. A
/// longer pause between two attempts counts as the second value.
pub(super) const CLAIM_NS: u64 = 200_000_000;
pub(super) const CLAIM_PAUSE_NS: u64 = 10_000_000;
/// Most connections of other users that wait to be closed; beyond that no connection is accepted.
pub(super) const STRANGERS_MAX: usize = 16;
/// How long a new link waits for the connections at our own listener to be accepted, nanoseconds.
/// A longer pause between two attempts counts as the second value.
pub(super) const CALLERS_NS: u64 = 50_000_000;
pub(super) const CALLERS_PAUSE_NS: u64 = 5_000_000;
/// How long an attempt to make a link is remembered, nanoseconds.
pub(super) const ATTEMPT_NS: u64 = 10_000_000_000;
/// Pauses in accepting, nanoseconds: one after a turn with connections of other users, and a backoff after errors: its
/// first value, doubled with each further error, and its last value.
pub(super) const PAUSE_NS: u64 = 1_000_000;
pub(super) const BACKOFF_NS: (u64, u64) = (10_000_000, 1_000_000_000);

/// A connection of this user that is not yet a link.
#[derive(Debug)]
pub(super) struct Greeting {
    pub(super) socket: OwnedFd,
    pub(super) credentials: Credentials,
    pub(super) since: u64,
    /// No descriptor was left for it: it cannot become a link.
    pub(super) scarce: bool,
    /// It is in the endpoint's set. If not, it is looked at from time to time.
    pub(super) watched: bool,
    /// Its connect request, until it is clear whether its address is true.
    pub(super) claim: Option<Claim>,
}

impl Greeting {
    /// Its connect request cannot be answered yet.
    pub(super) fn with(self, claim: Claim) -> Self {
        Self { claim: Some(claim), ..self }
    }
}

/// A connect request, and the segment that came with it.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) hello: Hello,
    pub(super) segment: Segment,
    wait: Waited,
    /// Its place is needed: its reply waits for no descriptor.
    pub(super) in_the_way: bool,
    /// What [`Shm::probe_attach`] found, if it was asked.
    pub(super) reach: Option<(bool, bool)>,
}

impl Claim {
    /// One that has just come.
    pub(super) fn new(hello: Hello, segment: Segment) -> Self {
        let wait = Waited::from_now(CLAIM_PAUSE_NS);
        Self { hello, segment, wait, in_the_way: false, reach: None }
    }

    /// It need not be answered yet.
    pub(super) fn is_recent(&mut self) -> bool {
        self.wait.look() < CLAIM_NS
    }
}

/// An attempt to make a link while connections waited here. They may be those of an earlier incarnation of the peer.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) peer: PeerId,
    /// The process that listened at the peer's address; `None`: that was not looked for. Not a connection to it: a process
    /// that has to wait for a processor would keep that silent for long, and the peer would turn it away.
    pub(super) pid: Option<i32>,
    pub(super) since: u64,
    pub(super) wait: Waited,
}

impl Attempt {
    /// Everything that waited then has been taken in, by `swept_at`, or that takes too long.
    pub(super) fn is_over(&mut self, swept_at: u64) -> bool {
        swept_at > self.since || self.wait.look() >= CALLERS_NS
    }

    pub(super) fn is_recent(&self) -> bool {
        clock::now_ns().saturating_sub(self.since) < ATTEMPT_NS
    }
}

/// The accepting side of an endpoint.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) names: Names,
    /// The endpoint's names say that it takes links.
    pub(super) open: bool,
    pub(super) greetings: Vec<Option<Greeting>>,
    /// Connections were accepted whose connect requests are not looked at yet.
    pub(super) gathered: bool,
    /// Connections to be closed.
    pub(super) strangers: Vec<OwnedFd>,
    pub(super) spare: Spare,
    /// Refused links whose senders have to take their messages back.
    pub(super) refused: Vec<Refused>,
    /// The listener is not watched until this time, nanoseconds; 0: it is watched.
    pub(super) paused_until: u64,
    pub(super) backoff: u64,
    /// Links to be made once the connections that wait here are taken in.
    pub(super) attempts: Vec<Attempt>,
    /// Connect requests, and connect replies.
    pub(super) requests: InFlight,
    pub(super) answers: InFlight,
    /// Descriptors beyond the last one that was made for a link, if they are scarce.
    pub(super) left: Option<usize>,
    /// More connections may wait than were accepted at a time.
    pub(super) more: bool,
    /// The beginning of the last turn that took in everything that waited, nanoseconds.
    pub(super) swept_at: u64,
    /// As if there were no descriptors left.
    #[cfg(test)]
    pub(super) full: bool,
}

impl Door {
    pub(super) fn new(names: Names, open: bool, epoll: &LateSet) -> Result<Self, Errno> {
        if let Some(listener) = &names.listener {
            epoll.add_lasting(listener.as_fd(), TOKEN_LISTENER)?;
        }
        Ok(Self {
            open: open && names.listener.is_some(),
            names,
            greetings: Vec::new(),
            gathered: false,
            strangers: Vec::new(),
            spare: Spare::new(),
            refused: Vec::new(),
            paused_until: 0,
            backoff: 0,
            attempts: Vec::new(),
            requests: InFlight::default(),
            answers: InFlight::default(),
            left: None,
            more: false,
            swept_at: 0,
            #[cfg(test)]
            full: false,
        })
    }

    /// Something here needs a later look even if no descriptor becomes ready.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        !matches!(self.paused_until, 0 | u64::MAX)
            || !self.strangers.is_empty()
            || !self.refused.is_empty()
            || self.greetings.iter().any(Option::is_some)
    }

    /// A connection waits to be taken in.
    pub(super) fn has_callers(&self) -> bool {
        self.greetings.iter().any(Option::is_some) || self.is_called()
    }

    /// A connection waits to be accepted.
    pub(super) fn is_called(&self) -> bool {
        let waits = |listener: &OwnedFd| wait_readable(listener.as_fd(), 0).unwrap_or(false);
        self.names.listener.as_ref().is_some_and(waits)
    }

    /// Whether the link to `peer` has to wait for a turn that takes in what waits here, before the peer is looked for:
    /// mostly nothing waits any more once it is found. False after a bounded time: peers cannot keep us from making links.
    pub(super) fn holds_back(&mut self, peer: PeerId) -> bool {
        self.attempts.retain(Attempt::is_recent);
        if let Some(one) = self.attempts.iter_mut().find(|one| one.peer == peer) {
            return !one.is_over(self.swept_at);
        }
        let waits = self.has_callers();
        if waits {
            self.wait_for(peer, None, Waited::from_now(CALLERS_PAUSE_NS));
        }
        waits
    }

    /// `peer` was just found in process `pid`: whether its link has to wait until what waits here is taken in.
    pub(super) fn hold_back(&mut self, peer: PeerId, pid: i32) -> bool {
        let at = self.attempts.iter().position(|one| one.peer == peer);
        let mut before = at.map(|at| self.attempts.swap_remove(at));
        let same = before.as_ref().is_some_and(|one| one.pid == Some(pid));
        if same && before.as_mut().is_some_and(|one| one.is_over(self.swept_at))
            || !self.has_callers()
        {
            return false;
        }
        // The time in which it was not yet looked for counts.
        let before = before.filter(|one| one.pid.is_none()).map(|one| one.wait);
        let wait = before.unwrap_or_else(|| Waited::from_now(CALLERS_PAUSE_NS));
        self.wait_for(peer, Some(pid), wait);
        true
    }

    fn wait_for(&mut self, peer: PeerId, pid: Option<i32>, wait: Waited) {
        self.attempts.push(Attempt { peer, pid, since: clock::now_ns(), wait });
    }

    /// A turn that began at `begun` has handled all that was ready.
    pub(super) fn has_swept(&mut self, begun: u64) {
        let claimed = |greeting: &Greeting| greeting.claim.is_some() || !greeting.watched;
        if !self.attempts.is_empty()
            && !self.is_called()
            && !self.greetings.iter().flatten().any(claimed)
        {
            self.swept_at = begun;
        }
    }

    /// Stops accepting for so many nanoseconds.
    pub(super) fn pause(&mut self, epoll: &LateSet, ns: u64) {
        if let (Some(listener), 0) = (&self.names.listener, self.paused_until) {
            epoll.remove(listener.as_fd());
        }
        self.paused_until = clock::now_ns().saturating_add(ns).max(1);
    }

    pub(super) fn resume(&mut self, epoll: &LateSet, now: u64) {
        if self.paused_until == 0 || now < self.paused_until {
            return;
        }
        let Some(listener) = &self.names.listener else { return };
        match epoll.add_lasting(listener.as_fd(), TOKEN_LISTENER) {
            Ok(()) => self.paused_until = 0,
            Err(_) => self.paused_until = now.saturating_add(BACKOFF_NS.1),
        }
    }

    /// The next waiting connection, and whether it used a spare descriptor.
    pub(super) fn next(&mut self) -> Result<Option<(OwnedFd, bool)>, Errno> {
        let Some(listener) = self.names.listener.as_ref().map(AsFd::as_fd) else { return Ok(None) };
        match unix::accept(listener) {
            #[cfg(test)]
            Ok(socket) => Ok(socket.map(|socket| (socket, self.full))),
            #[cfg(not(test))]
            Ok(socket) => Ok(socket.map(|socket| (socket, false))),
            Err(Errno(libc::EMFILE | libc::ENFILE)) => {
                let socket = spare::lend(|| unix::accept(listener))?;
                Ok(socket.map(|socket| (socket, true)))
            }
            Err(e) => Err(e),
        }
    }

    #[cfg(test)]
    pub(super) fn turn_all_away(&mut self) {
        while let Ok(Some((socket, _))) = self.next() {
            refuse(&socket, &LATE);
        }
    }

    /// Accepting failed. After a permanent error the endpoint stops accepting: from then on it is reached over
    /// the network.
    pub(super) fn on_error(&mut self, call: &str, errno: Errno, port: u16, epoll: &LateSet) {
        let passes = errno.is_shortage();
        let then = if passes { "they wait" } else { "they are to come over the network" };
        log::limited!(
            cause: errno.0,
            "cannot accept links of peers of this node ({call}: {errno}): {then}"
        );
        if passes {
            self.backoff = (2 * self.backoff).clamp(BACKOFF_NS.0, BACKOFF_NS.1);
            self.pause(epoll, self.backoff);
        } else {
            self.pause(epoll, u64::MAX);
            self.open = false;
            self.names.withdraw(port);
        }
    }

    /// Closes the connections that are to be closed, as far as possible without blocking.
    pub(super) fn close_strangers(&mut self) {
        if let Err(rest) = close_elsewhere(std::mem::take(&mut self.strangers)) {
            self.strangers = rest;
        }
    }

    /// A connection from slot `at` waits on, there or, if another has taken that slot meanwhile, in another one.
    pub(super) fn put_back(&mut self, at: usize, greeting: Greeting) {
        let free = self.greetings.get(at).is_some_and(Option::is_none);
        let first_free = || self.greetings.iter().position(Option::is_none);
        let at = if free { Some(at) } else { first_free() };
        match at.and_then(|at| self.greetings.get_mut(at)) {
            Some(slot) => *slot = Some(greeting),
            // All have come meanwhile: none of them is dropped for it.
            None => self.greetings.push(Some(greeting)),
        }
    }

    pub(super) fn room(&mut self) -> usize {
        if let Some(at) = self.greetings.iter().position(Option::is_none) {
            return at;
        }
        if self.greetings.len() < GREETINGS_MAX {
            self.greetings.push(None);
            return self.greetings.len() - 1;
        }
        let since = |slot: &Option<Greeting>| {
            slot.as_ref().map(|greeting| (greeting.claim.is_some(), greeting.since))
        };
        let oldest = self.greetings.iter().enumerate().min_by_key(|(_, slot)| since(slot));
        oldest.map_or(0, |(at, _)| at)
    }
}

pub(super) const LATE: Reject =
    Reject { reason: RejectReason::Resources, detail: libc::EAGAIN.unsigned_abs() };
pub(super) const MALFORMED: Reject = Reject { reason: RejectReason::Malformed, detail: 0 };

pub(super) fn resources(errno: Errno) -> Reject {
    Reject { reason: RejectReason::Resources, detail: errno.0.unsigned_abs() }
}

pub(super) fn refuse(socket: &OwnedFd, reject: &Reject) {
    // A peer that is gone needs no answer.
    let _ = unix::send(socket.as_fd(), &reject.encode(), &[]);
}
