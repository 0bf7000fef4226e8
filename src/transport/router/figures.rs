//! What the transports of an endpoint have done, for the page of the process (`telemetry::page`).

use super::list::{Lane, each_lane, on_lane};
use super::routes::{Route, Router};
use crate::telemetry::page::EVERY_NS;
use crate::transport::interface::{Figures, Handler, Iface, PacketCounts, PeerFigures, Transport};
use crate::transport::{Address, PeerId};

/// Most peers of one report: its cost has a bound, however many peers there are.
const PEERS: usize = 8;
/// Shorter times between two looks at the clock are those of polls that find messages, nanoseconds.
const GAP_NS: u64 = 16_000;

impl Router {
    /// Reports what was done until now, with the next few peers.
    #[cold]
    #[inline(never)]
    pub(super) fn report(&mut self, now: u64, handler: &mut impl Handler) {
        self.reported.due = now.saturating_add(EVERY_NS);
        let peers = (0..self.routes.len().min(PEERS)).filter_map(|_| self.next_peer()).collect();
        let figures = Figures { peers, ..self.all_figures(now, handler.oldest_send()) };
        handler.on_turns(&figures);
    }

    /// All counts of the transports.
    pub(super) fn all_figures(&mut self, now: u64, oldest: Option<(u64, PeerId)>) -> Figures {
        let (mut packets, mut cache) = (PacketCounts::default(), (0, 0));
        each_lane!(self.lanes, (lane, t) => {
            let more = t.packet_counts();
            packets.sent += more.sent;
            packets.received += more.received;
            packets.retransmitted += more.retransmitted;
            packets.timeouts += more.timeouts;
            packets.duplicates += more.duplicates;
            packets.no_room += more.no_room;
            packets.forged += more.forged;
            packets.stray += more.stray;
            packets.connected += more.connected;
            let (hits, misses) = t.cache_counts();
            cache = (cache.0 + hits, cache.1 + misses);
        });
        let oldest = self.waits_for(now, oldest);
        let ((polls, empty_polls), sleeps) = (self.pace.polls(), self.reported.sleeps);
        let gaps = self.reported.gaps;
        Figures { polls, empty_polls, sleeps, packets, cache, gaps, now, oldest, peers: Vec::new() }
    }

    /// The clock says `now`. The application may have done something else since it said so last.
    #[inline]
    pub(super) fn count_gap(&mut self, now: u64) {
        let since = std::mem::replace(&mut self.reported.looked_at, now);
        let gap = now.saturating_sub(since);
        if gap >= GAP_NS && since > 0 {
            self.reported.gaps.count(gap);
        }
    }

    /// The peer of the oldest pending send, and since when that was seen to be the oldest.
    fn waits_for(&mut self, now: u64, oldest: Option<(u64, PeerId)>) -> Option<(Address, u64)> {
        let known =
            self.reported.oldest.filter(|(send, _)| oldest.is_some_and(|(n, _)| n == *send));
        self.reported.oldest = known.or_else(|| oldest.map(|(send, _)| (send, now)));
        Some((self.peers.address(oldest?.1)?, self.reported.oldest?.1))
    }

    /// The peer behind the one that was reported last.
    fn next_peer(&mut self) -> Option<PeerFigures> {
        self.reported.peer = (self.reported.peer + 1) % self.routes.len().max(1);
        let peer = PeerId(u32::try_from(self.reported.peer).ok()?);
        let address = self.peers.address(peer)?;
        let Route::By(by) = self.route(peer) else {
            return Some(PeerFigures { peer, address, by: None });
        };
        let counts = on_lane!(self.lanes, by, t => t.peer_counts(peer), return None);
        let (transport, reason) = (self.way(peer), self.reason(peer, &address, by));
        Some(PeerFigures { peer, address, by: Some((transport, reason, counts)) })
    }

    /// Why messages to the peer take no better way.
    fn reason(&self, peer: PeerId, address: &Address, by: Lane) -> &'static str {
        let mut reason = "";
        each_lane!(self.lanes, (lane, t) => {
            if (lane as usize) <= by as usize && reason.is_empty() {
                reason = t.shortfall(peer, address, lane as usize == by as usize);
            }
        });
        reason
    }
}
