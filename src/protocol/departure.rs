//! The departure of a peer: every operation that is pending on it ends with an error.

use super::arrivals::Active;
use super::matching::{Departed, Outcome, Unexpected};
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
        self.matching.departed.peers.insert(peer, error.0);
        self.arrivals.pushed.forget(peer);
        let source = self.peers.source(peer, host);
        if departure != Departure::Closed {
            self.peers.mark_dead(peer, error);
        }
        match source {
            super::UNKNOWN_SOURCE => {}
            _ if self.limits.shares_receives => host.lost(source),
            _ if departure == Departure::Closed => {}
            _ => {
                self.matching.departed.sources.insert(source, error);
            }
        }
    }

    /// The poll in which peers may have departed is over, or a peer comes back in it.
    #[inline]
    pub(super) fn end_departures(&mut self, host: &mut impl Host) {
        if !self.matching.departed.peers.is_empty() {
            self.end_matching(host);
        }
    }

    #[cold]
    fn end_matching(&mut self, host: &mut impl Host) {
        let Departed { peers, sources } = std::mem::take(&mut self.matching.departed);
        let mut dropped = 0;
        let lose = |message: &mut Unexpected| {
            let error = peers.get(&message.peer).copied();
            dropped += error.map_or(0, |error| message.lose_sender(error));
        };
        self.matching.change_messages_of(|peer| peers.contains_key(&peer), lose);
        self.matching.bytes -= dropped;
        if !sources.is_empty() {
            self.fail_directed(&sources, host);
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
