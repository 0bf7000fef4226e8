//! Moves messages that one transport has returned to another transport.
//!
//! These messages count as sent, so they go before anything that is sent to the peer from now on: until the last one is
//! accepted, the peer's route is [`Route::Moving`], which takes no messages. Without another transport the same one is
//! retried until the peer has room. If the peer refused for a permanent reason (a system-call filter), the messages are
//! lost, and operations to the peer fail with the error of the refusal.

use super::list::{Lane, each_lane_mut, on_lane, on_lane_mut};
use super::routes::{Moving, NO_WAY, Route, Router, set_route};
use crate::sys::{Errno, clock};
use crate::telemetry::log;
use crate::transport::{
    Contact, Departure, Handler, Message, Messages, Mode, PeerId, Returned, SendError, Transport,
};
use std::collections::VecDeque;

/// The pause between two attempts, nanoseconds: the first one, and the longest.
const RETRY_NS: (u64, u64) = (10_000_000, 1_000_000_000);

impl Moving {
    /// Sets the time of the next attempt; the pause after that one is longer.
    fn wait(&mut self) {
        self.at = clock::now_ns().saturating_add(self.pause);
        self.pause = (2 * self.pause).clamp(RETRY_NS.0, RETRY_NS.1);
    }
}

impl Router {
    /// Takes over the messages that transports have returned, and sends those that can be sent.
    pub(super) fn move_messages(&mut self, handler: &mut impl Handler) {
        let mut all = Vec::new();
        each_lane_mut!(self.lanes, (lane, t) => {
            let returned = t.returned();
            if !returned.is_empty() {
                all.extend(returned.into_iter().map(|returned| (lane, returned)));
            }
        });
        if all.is_empty() && self.moving.is_empty() {
            return;
        }
        for (from, returned) in all {
            self.take_over(from, returned);
        }
        let mut at = 0;
        while let Some(mut moving) = (at < self.moving.len()).then(|| self.moving.swap_remove(at)) {
            match self.carry(&mut moving) {
                Ok(()) => {
                    let route = moving.to.map_or(Route::None, Route::By);
                    set_route(&mut self.routes, moving.peer, route);
                }
                Err(SendError::Again) => {
                    self.moving.push(moving);
                    let last = self.moving.len() - 1;
                    self.moving.swap(at, last);
                    at += 1;
                }
                Err(SendError::Unreachable(errno)) => {
                    log::limited!(
                        cause: errno.0,
                        "process {} of this node cannot take our messages ({errno}), and there is no other way: {} messages that were sent are lost",
                        moving.pid,
                        moving.messages.len()
                    );
                    if moving.to.is_none() {
                        let (peer, from) = (moving.peer, moving.from);
                        on_lane_mut!(self.lanes, from, t => t.give_up(peer, errno), ());
                    }
                    set_route(&mut self.routes, moving.peer, Route::None);
                    // The buffers of operations that end are accessed no more, and the peer learns that its own have ended.
                    each_lane_mut!(self.lanes, (lane, t) => t.drain(moving.peer, handler));
                    handler.on_departure(moving.peer, Departure::Failed(errno));
                }
            }
        }
    }

    fn take_over(&mut self, from: Lane, returned: Returned) {
        let Returned { peer, pid, errno, mut messages } = returned;
        set_route(&mut self.routes, peer, Route::Moving);
        let then = match (errno.is_would_block(), self.has_other(from)) {
            (true, _) => None,
            (false, true) => Some("go another way"),
            (false, false) => errno.is_shortage().then_some("wait until it can"),
        };
        if let Some(then) = then {
            log::limited!(
                cause: errno.0,
                "process {pid} of this node cannot take our messages ({errno}): they {then}"
            );
        }
        let pause = match self.moving.iter().position(|moving| moving.peer == peer) {
            // The next link was refused as well; it held the first of these messages.
            Some(at) => {
                let before = self.moving.swap_remove(at);
                messages.extend(before.messages);
                before.pause
            }
            None => 0,
        };
        let (to, settles, at) = (None, false, 0);
        let mut moving = Moving { peer, pid, errno, messages, from, to, settles, at, pause };
        moving.wait();
        self.moving.push(moving);
    }

    /// Contact with `peer` was just made: holds back all messages until the peer has accepted it.
    pub(super) fn wait_for_link(&mut self, peer: PeerId, lane: Lane) -> SendError {
        set_route(&mut self.routes, peer, Route::Moving);
        let (messages, from, to) = (VecDeque::new(), lane, Some(lane));
        let (pid, errno, settles) = (0, Errno(0), true);
        let moving = Moving { peer, pid, errno, messages, from, to, settles, at: 0, pause: 0 };
        self.moving.push(moving);
        SendError::Again
    }

    /// Number of messages that wait here.
    pub(super) fn moving(&self) -> usize {
        self.moving.iter().map(|moving| moving.messages.len()).sum()
    }

    /// `peer` has departed: drops the messages that were being moved to it. Its next process gets none of them.
    pub(super) fn forget_moving(&mut self, peer: PeerId) {
        if let Some(at) = self.moving.iter().position(|moving| moving.peer == peer) {
            self.moving.swap_remove(at);
            set_route(&mut self.routes, peer, Route::None);
        }
    }

    fn carry(&mut self, moving: &mut Moving) -> Result<(), SendError> {
        if clock::now_ns() < moving.at {
            return Err(SendError::Again);
        }
        let to = match moving.to {
            Some(to) => to,
            None => self.other_way(moving)?,
        };
        moving.to = Some(to);
        if moving.settles && on_lane!(self.lanes, to, t => t.is_settling(moving.peer), false) {
            return Err(SendError::Again);
        }
        while let Some(Message { header, payload }) = moving.messages.front() {
            let pack = |at: usize, to: &mut [u8]| {
                let from = payload.get(at..).unwrap_or(&[]);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            };
            let (peer, len) = (moving.peer, payload.len());
            on_lane_mut!(self.lanes, to, t => {
                let short = header.len() + len <= t.caps(peer).short_max;
                let mode = if short { Mode::Short } else { Mode::Bulk };
                t.send(peer, mode, header, len, pack)?;
            }, return Err(NO_WAY));
            moving.messages.pop_front();
        }
        Ok(())
    }

    /// The first transport that makes contact. The one that returned the messages is tried first if they only came too
    /// late, last if a resource was short, or not at all. `Again`: also where a resource is short here.
    fn other_way(&mut self, moving: &mut Moving) -> Result<Lane, SendError> {
        let unknown = SendError::Unreachable(Errno(libc::EADDRNOTAVAIL));
        let peer = moving.peer;
        let address = self.peers.address(peer).ok_or(unknown)?;
        let mut failed = SendError::Unreachable(Errno(libc::ECONNREFUSED));
        let others = Lane::ALL.iter().copied().filter(|lane| *lane != moving.from);
        let at_once = moving.errno.is_would_block().then_some(moving.from);
        let again = moving.errno.is_shortage().then_some(moving.from);
        if at_once.or(again).is_none() {
            failed = SendError::Unreachable(moving.errno);
        }
        let mut short = false;
        for lane in at_once.into_iter().chain(others).chain(again) {
            let asked = on_lane_mut!(
                self.lanes, lane,
                t => t.connect(peer, &address, false),
                continue
            );
            match asked {
                Ok(contact @ (Contact::Linked | Contact::Settling)) => {
                    moving.settles = contact == Contact::Settling;
                    return Ok(lane);
                }
                Ok(Contact::Elsewhere) => {}
                Ok(Contact::Missing(errno) | Contact::Refused(errno)) => {
                    failed = SendError::Unreachable(errno);
                }
                Ok(Contact::Later) | Err(SendError::Again) => return Err(SendError::Again),
                Err(error) => {
                    short |= error.lasting().is_none();
                    failed = error;
                }
            }
        }
        if short {
            moving.wait();
            return Err(SendError::Again);
        }
        Err(failed)
    }
}
