//! What the network says of a path without a key, by ICMP: anybody may have made it up, so it is a reason to ask, and
//! ends nothing by itself.

use super::Reliable;
use super::connection::End;
use super::interface::Sink;
use super::packet::{Hello, HelloKind};
use crate::transport::Address;

/// How long INITs of ours are refused, nanoseconds, until a peer counts as gone that was there.
const REFUSED_NS: u64 = 200_000_000;
/// The same of a peer that was never there yet: one that is started a little later is met.
const ABSENT_NS: u64 = 1_400_000_000;

impl Reliable {
    /// The network says that nobody listens at `to`, where the datagram was to go that begins with `quote`.
    ///
    /// Anybody may have made that message up, so it ends nothing: it is a reason to ask. It counts when it quotes an
    /// INIT of ours, whose nonce nobody knows who has not seen it, and when that happens again after [`REFUSED_NS`] without
    /// an answer in between (PROTOCOL.md §7.10).
    pub(crate) fn on_refused(
        &mut self,
        now: u64,
        to: &Address,
        quote: &[u8],
        sink: &mut impl Sink,
    ) {
        self.catch_up(now);
        let Some(peer) = sink.find(to) else { return };
        let absent_ns = ABSENT_NS.min(self.shared.settings.peer_timeout_ns);
        let refused_ns = if self.table.was_met(peer) { REFUSED_NS } else { absent_ns };
        let life = self.shared.settings.life;
        let Some(place) = self.table.place_of(peer) else { return };
        let Some(c) = self.table.at(place) else { return };
        let ours = Hello::decode(quote).is_some_and(|hello| {
            hello.kind == HelloKind::Init
                && (hello.life, hello.connection, hello.nonce) == (life, c.id, c.handshake.nonce)
        });
        let established = c.handshake.is_established();
        if c.liveness.on_refused(ours, refused_ns, now) {
            let errno = if established { libc::EHOSTDOWN } else { libc::ECONNREFUSED };
            self.remove(place, End::failed(errno), sink);
        } else if established {
            c.ask_whether_there(now);
            self.settle(place);
        }
    }

    /// The path to `to` carries datagrams of at most `carried` bytes. Anybody may have made up the
    /// message that says so, so it is believed down to what every network carries. Returns true if
    /// packets are longer that have to be sent.
    pub(crate) fn on_too_long(&mut self, to: &Address, carried: usize, sink: &impl Sink) -> bool {
        let Some(place) = sink.find(to).and_then(|peer| self.table.place_of(peer)) else {
            return false;
        };
        let long = self.table.at(place).is_some_and(|c| c.carry_at_most(carried));
        self.settle(place);
        long
    }
}
