//! The departure of a peer: every operation that is pending on it ends with an error.

use super::arrivals::Active;
use super::matching::Outcome;
use super::state::Core;
use super::{Cause, Host};
use crate::transport::{Departure, PeerId};

impl Core {
    pub(super) fn on_departure(
        &mut self,
        peer: PeerId,
        departure: Departure,
        host: &mut impl Host,
    ) {
        let error = match departure {
            Departure::Closed => (libc::ECONNRESET, Cause::PeerClosed),
            Departure::Failed(errno) => match errno.0 {
                libc::EHOSTDOWN => (libc::EHOSTUNREACH, Cause::PeerDied),
                libc::ETIMEDOUT => (libc::ETIMEDOUT, Cause::PeerSilent),
                libc::ECONNREFUSED => (libc::ECONNREFUSED, Cause::PeerUnreachable),
                other => (other, Cause::LinkBroke),
            },
        };
        self.outbox.forget(peer);
        self.sends.end_all(peer, error, &mut self.peers, host);
        self.fail_rendezvous_receives(peer, error, host);
        self.end_rma(peer, error, host);
        self.end_collectives(peer, error.0, departure != Departure::Closed);
        let (matching, mut dropped) = (&mut self.matching, 0);
        matching.change_messages_of(peer, |message| dropped += message.lose_sender(error.0));
        matching.bytes -= dropped;
        self.arrivals.pushed.forget(peer);
        let source = self.peers.source(peer, host);
        if departure != Departure::Closed {
            self.peers.mark_dead(peer, error);
        }
        match source {
            super::UNKNOWN_SOURCE => {}
            _ if self.limits.shares_receives => host.lost(source),
            _ if departure == Departure::Closed => {}
            _ => self.fail_directed(source, error, host),
        }
    }

    fn fail_rendezvous_receives(
        &mut self,
        peer: PeerId,
        error: (i32, Cause),
        host: &mut impl Host,
    ) {
        self.arrivals.chunks.forget(peer, None);
        for key in self.arrivals.active.keys_where(|active| active.message.peer == peer) {
            let active = self.arrivals.active.get_mut(key).map(|active| &mut active.message);
            let whole = active.filter(|message| message.is_whole());
            // The message is here, and has only to be copied to a device.
            if let Some(landing) = whole.and_then(|message| message.landing.as_mut()) {
                landing.orphaned = true;
                continue;
            }
            let Some(Active { message, .. }) = self.arrivals.remove(key) else { continue };
            self.end_active(&message, Outcome::failed(message.received, error), host);
        }
    }
}
