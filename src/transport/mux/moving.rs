//! Messages of a refused shared-memory link on their way to the peer by another transport.
//!
//! They count as sent, so they go before anything that is sent to the peer from now on: until the last of them is taken,
//! its route is [`Route::Moving`], which takes no messages. The other way is the network. Where there is none
//! (FI_UDRV_NET=0) it is another shared-memory link, tried again and again until the peer has room for it. A peer that
//! refused for a reason that does not pass (a filter of system calls) gets none: the messages are lost, and operations
//! to it end with the error of the refusal.

use super::{Mux, Port, Route, set_route};
use crate::sys::{Errno, clock};
use crate::telemetry::log;
use crate::transport::shm::{Contact, Message, Returned, fits_a_slot};
use crate::transport::{Departure, Handler, PeerId, SendError};
use std::collections::VecDeque;

/// Between two attempts, nanoseconds: the first pause, and the longest.
const RETRY_NS: (u64, u64) = (10_000_000, 1_000_000_000);

/// What is on its way to one peer.
#[derive(Debug)]
pub(super) struct Moving {
    peer: PeerId,
    /// Of the link that was refused: its process, and why.
    pid: i32,
    errno: Errno,
    messages: VecDeque<Message>,
    /// `None`: not chosen yet.
    to: Option<Route>,
    /// The link that was made has to be taken first.
    settles: bool,
    /// No attempt before; and the next pause, nanoseconds.
    at: u64,
    pause: u64,
}

impl Mux {
    /// Takes over what shared memory has given back, and sends what can be sent.
    pub(super) fn move_messages(&mut self, handler: &mut impl Handler) {
        for returned in self.shm.returned() {
            self.take_over(returned);
        }
        let mut at = 0;
        while let Some(mut moving) = (at < self.moving.len()).then(|| self.moving.swap_remove(at)) {
            match self.carry(&mut moving) {
                Ok(()) => {
                    set_route(&mut self.routes, moving.peer, moving.to.unwrap_or(Route::None))
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
                        "process {} of this node cannot take our shared-memory link ({errno}), and there is no other way: {} messages that were sent are lost",
                        moving.pid,
                        moving.messages.len()
                    );
                    self.shm.give_up(moving.peer, errno);
                    set_route(&mut self.routes, moving.peer, Route::None);
                    handler.on_departure(moving.peer, Departure::Failed(errno));
                }
            }
        }
    }

    fn take_over(&mut self, returned: Returned) {
        let Returned { peer, pid, errno, mut messages } = returned;
        set_route(&mut self.routes, peer, Route::Moving);
        let then = match self.net() {
            Some(_) => Some("go over the network"),
            None => errno.is_shortage().then_some("wait until it can"),
        };
        if let Some(then) = then {
            log::limited!(
                cause: errno.0,
                "process {pid} of this node cannot take our shared-memory link ({errno}): its messages {then}"
            );
        }
        let pause = match self.moving.iter().position(|moving| moving.peer == peer) {
            // The next link was refused as well, with the first of them in it.
            Some(at) => {
                let before = self.moving.swap_remove(at);
                messages.extend(before.messages);
                before.pause
            }
            None => 0,
        };
        let at = clock::now_ns().saturating_add(pause);
        let pause = (2 * pause).clamp(RETRY_NS.0, RETRY_NS.1);
        let (to, settles) = (None, false);
        self.moving.push(Moving { peer, pid, errno, messages, to, settles, at, pause });
    }

    /// Nothing is sent through the link to `peer`, which was just made, before the peer has taken it.
    pub(super) fn wait_for_link(&mut self, peer: PeerId) -> Result<Route, SendError> {
        set_route(&mut self.routes, peer, Route::Moving);
        let (messages, to) = (VecDeque::new(), Some(Route::Shm));
        let (pid, errno) = (0, Errno(0));
        self.moving.push(Moving { peer, pid, errno, messages, to, settles: true, at: 0, pause: 0 });
        Err(SendError::Again)
    }

    /// Messages that wait here.
    pub(super) fn moving(&self) -> usize {
        self.moving.iter().map(|moving| moving.messages.len()).sum()
    }

    /// `peer` is gone, and what was on its way to it with it.
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
        if moving.settles && self.shm.is_settling(moving.peer) {
            return Err(SendError::Again);
        }
        while let Some(Message { header, payload }) = moving.messages.front() {
            let pack = |at: usize, to: &mut [u8]| {
                let from = payload.get(at..).unwrap_or(&[]);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            };
            let (peer, len) = (moving.peer, payload.len());
            match (to, &mut self.port) {
                (Route::Net, Port::Linked(net)) => net.send(peer, header, len, pack, false)?,
                _ => self.shm.send(peer, fits_a_slot(header.len() + len), header, len, pack)?,
            }
            moving.messages.pop_front();
        }
        Ok(())
    }

    fn other_way(&mut self, moving: &Moving) -> Result<Route, SendError> {
        let Moving { peer, errno, .. } = *moving;
        let unknown = SendError::Unreachable(Errno(libc::EADDRNOTAVAIL));
        let address = self.peers.address(peer).ok_or(unknown)?;
        let at = self.on_network(&address);
        if let Port::Linked(net) = &mut self.port {
            net.connect(peer, &at)?;
            self.networked = true;
            return Ok(Route::Net);
        }
        if !errno.is_shortage() {
            return Err(SendError::Unreachable(errno));
        }
        match self.shm.connect(peer, &address)? {
            Contact::Linked => Ok(Route::Shm),
            Contact::Refused(errno) => Err(SendError::Unreachable(errno)),
            _ => Err(SendError::Unreachable(Errno(libc::ECONNREFUSED))),
        }
    }
}
