//! ICMP messages about a path. They have no key and may be forged, so each is a reason to ask the peer, and ends
//! nothing by itself.

use super::Reliable;
use super::connection::End;
use super::interface::Sink;
use super::packet::{Hello, HelloKind};
use crate::transport::Address;

/// How long INITs are refused until a peer that was there counts as gone, nanoseconds.
const REFUSED_NS: u64 = 200_000_000;
/// The same for a peer that was never there, nanoseconds: it may be started a little later.
const ABSENT_NS: u64 = 1_400_000_000;

impl Reliable {
    /// An ICMP message says that the port at `to` is closed; it quotes the datagram that begins with `quote`.
    ///
    /// It may be forged, so it is only a reason to ask. It counts if it quotes an INIT of this endpoint, whose nonce
    /// only those that saw the INIT can know, and if that happens again after [`REFUSED_NS`] without an answer in
    /// between (PROTOCOL.md §7.10).
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

    /// The path to `to` carries datagrams of at most `carried` bytes. The message that says so may be forged, so it is
    /// believed only down to the length that every network carries. Returns true if queued packets are longer.
    pub(crate) fn on_too_long(&mut self, to: &Address, carried: usize, sink: &impl Sink) -> bool {
        let Some(place) = sink.find(to).and_then(|peer| self.table.place_of(peer)) else {
            return false;
        };
        let long = self.table.at(place).is_some_and(|c| c.carry_at_most(carried));
        self.settle(place);
        long
    }

    /// The interface carries datagrams of at most `carried` bytes now, to any peer.
    pub(crate) fn on_narrowed(&mut self, carried: usize) {
        let most = &mut self.shared.settings.datagram_max;
        *most = (*most).min(carried);
        for place in self.table.places() {
            if let Some(c) = self.table.at(place) {
                c.carry_at_most(carried);
                self.settle(place);
            }
        }
    }
}
