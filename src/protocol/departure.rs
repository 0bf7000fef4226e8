//! The departure of a peer: every operation that is pending on it ends with an error.

use super::engine::Core;
use super::index_list::Key;
use super::receive::{Active, Body, Outcome, Unexpected};
use super::send::TxState;
use super::{Cause, Host};
use crate::transport::{Departure, PeerId};

impl Core {
    pub(super) fn on_departure(
        &mut self,
        peer: PeerId,
        departure: Departure,
        host: &mut impl Host,
    ) {
        let (error, cause) = match departure {
            Departure::Closed => (libc::ECONNRESET, Cause::PeerClosed),
            Departure::Failed(errno) if errno.0 == libc::EHOSTDOWN => {
                (libc::EHOSTUNREACH, Cause::PeerDied)
            }
            Departure::Failed(errno) if errno.0 == libc::ETIMEDOUT => (errno.0, Cause::PeerSilent),
            Departure::Failed(errno) if errno.0 == libc::ECONNREFUSED => {
                (errno.0, Cause::PeerUnreachable)
            }
            Departure::Failed(errno) => (errno.0, Cause::LinkBroke),
        };
        self.outbox.retain(|(to, _)| *to != peer);
        self.late.retain(|(to, _)| *to != peer);
        self.forget_leaving(peer);
        self.fail_sends(peer, error, cause, host);
        self.fail_rendezvous_receives(peer, error, cause, host);
        self.end_rma(peer, error, cause, host);
        self.end_collectives(peer, error, departure != Departure::Closed);
        self.lose_unexpected(peer, error);
        self.pushed.forget(peer);
        if departure != Departure::Closed {
            let source = self.source(peer, host);
            if source != super::UNKNOWN_SOURCE {
                self.fail_directed(source, error, cause, host);
            }
            self.mark_alive(peer);
            if let Some(state) = self.peer(peer) {
                state.dead = true;
                self.dead.push((peer, error, cause));
            }
        }
    }

    fn fail_sends(&mut self, peer: PeerId, error: i32, cause: Cause, host: &mut impl Host) {
        let Self { tx, due, assists, .. } = self;
        assists.retain(|assist| tx.get(assist.tx).is_some_and(|request| request.peer != peer));
        due.retain(|due| tx.get(due.tx).is_some_and(|request| request.peer != peer));
        let keys: Vec<Key> = self.tx.keys_where(|request| request.peer == peer);
        for key in keys {
            self.streams.retain(|k| *k != key);
            self.deferred.retain(|k| *k != key);
            let deferred = self
                .tx
                .get(key)
                .is_some_and(|request| matches!(request.state, TxState::Deferred { .. }));
            if let Some(state) = self.peer(peer) {
                let count = if deferred { &mut state.deferred } else { &mut state.outstanding };
                *count = count.saturating_sub(1);
            }
            self.finish_send(key, Some((error, cause)), host);
        }
    }

    fn fail_rendezvous_receives(
        &mut self,
        peer: PeerId,
        error: i32,
        cause: Cause,
        host: &mut impl Host,
    ) {
        for key in self.lent.keys_where(|lent| lent.peer == peer) {
            self.lent.remove(key);
        }
        for key in self.active.keys_where(|active| active.peer == peer) {
            self.pulls.retain(|k| *k != key);
            let Some(active) = self.active.remove(key) else { continue };
            let Active { envelope, target, received, .. } = active;
            let outcome = Outcome::failed(received, error, cause);
            self.finish_receive(peer, &envelope, &target, outcome, host);
        }
    }

    /// A message that was announced but not sent as a whole fails the receive that will match it.
    fn lose_unexpected(&mut self, peer: PeerId, error: i32) {
        for space in self.spaces() {
            let list = self.unexpected.of(space);
            for key in list.keys_where(|m| m.peer == peer) {
                if let Some(message) = list.get_mut(key) {
                    self.unexpected_bytes -= message.lose_sender(error);
                }
            }
        }
        for message in self.claimed.values_mut().filter(|m| m.peer == peer) {
            self.unexpected_bytes -= message.lose_sender(error);
        }
    }
}

impl Unexpected {
    /// Returns how many bytes need not be kept any more.
    fn lose_sender(&mut self, error: i32) -> usize {
        match &mut self.body {
            Body::Rts { rts, bytes } if bytes.len() as u64 == rts.len => {
                self.body = Body::Whole(std::mem::take(bytes));
            }
            Body::Rts { rts, bytes } => {
                let dropped = bytes.len();
                self.body = Body::Lost { len: rts.len, error, cause: Cause::SenderLost };
                return dropped;
            }
            // The sender no longer waits for a FIN, and its next incarnation at the same address would take the FIN for
            // one of its own messages.
            Body::Eager { ack, .. } => *ack = None,
            Body::Whole(_) | Body::Lost { .. } => {}
        }
        0
    }
}
