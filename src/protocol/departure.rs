//! The departure of a peer: every operation that is pending on it ends with an error.

use super::arrivals::Active;
use super::engine::Core;
use super::matching::Outcome;
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
        self.outbox.forget(peer);
        self.sends.end_all(peer, (error, cause), &mut self.peers, host);
        self.fail_rendezvous_receives(peer, error, cause, host);
        self.end_rma(peer, error, cause, host);
        self.end_collectives(peer, error, departure != Departure::Closed);
        let matching = &mut self.matching;
        let mut dropped = 0;
        matching.change_messages_of(peer, |message| dropped += message.lose_sender(error));
        matching.bytes -= dropped;
        self.arrivals.pushed.forget(peer);
        if departure != Departure::Closed {
            let source = self.peers.source(peer, host);
            if source != super::UNKNOWN_SOURCE {
                self.fail_directed(source, error, cause, host);
            }
            self.peers.mark_dead(peer, error, cause);
        }
    }

    fn fail_rendezvous_receives(
        &mut self,
        peer: PeerId,
        error: i32,
        cause: Cause,
        host: &mut impl Host,
    ) {
        self.arrivals.chunks.forget(peer);
        for key in self.arrivals.active.keys_where(|active| active.message.peer == peer) {
            self.arrivals.pulls.retain(|k| *k != key);
            let Some(Active { message, .. }) = self.arrivals.active.remove(key) else { continue };
            let outcome = Outcome::failed(message.received, error, cause);
            self.end_active(&message, outcome, host);
        }
    }
}
