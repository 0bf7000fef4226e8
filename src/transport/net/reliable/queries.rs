//! Queries of the other parts of the net transport about connections.

use super::Reliable;
use super::connection::Connection;
use super::interface::Counts;
use super::packet::{DATAGRAM_START, FRAME_LEN, HEADER_LEN, STREAMS, TAG_AT, WINDOWS};
use crate::transport::{Mark, PeerCounts, PeerId};

impl Reliable {
    /// Counts of events since the endpoint was opened.
    pub(crate) fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Bytes of packets in memory.
    #[cfg(test)]
    pub(crate) fn memory(&self) -> usize {
        self.shared.buffers.used()
    }

    /// Packets that are not acknowledged.
    pub(crate) fn unacknowledged(&self) -> usize {
        self.shared.unacknowledged
    }

    /// Connections that exist or are being made.
    pub(crate) fn connections(&self) -> usize {
        self.table.len()
    }

    /// A connection to `peer` exists or is being made.
    pub(crate) fn is_connected(&self, peer: PeerId) -> bool {
        self.table.place_of(peer).is_some()
    }

    /// The end of the connection with `peer` will be reported: its first packet alone may be that of a process that is gone.
    pub(crate) fn is_met(&self, peer: PeerId) -> bool {
        self.table.of(peer).is_some_and(Connection::is_met)
    }

    /// `peer` is short of memory for payload.
    pub(crate) fn under_pressure(&self, peer: PeerId) -> bool {
        self.table.of(peer).is_some_and(|c| c.sender.peer_pressure)
    }

    /// Payload bytes of a message that fills one packet to `peer`, beside `header` bytes.
    pub(crate) fn packet_room(&self, peer: PeerId, header: usize) -> usize {
        let room = self.table.of(peer).map_or(DATAGRAM_START, |c| c.path.carried());
        room.saturating_sub(HEADER_LEN + FRAME_LEN + header)
    }

    /// This endpoint's and the peer's number of the connection to `peer`, if it accepts streams.
    pub(crate) fn takes_streams(&self, peer: PeerId) -> Option<(u32, u32)> {
        let c = self.table.of(peer)?;
        let remote = c
            .handshake
            .remote
            .filter(|_| c.handshake.is_established() && c.handshake.knows(STREAMS))?;
        Some((c.id, remote.id))
    }

    /// The features of `peer`, if it has introduced itself.
    pub(crate) fn features_of(&self, peer: PeerId) -> Option<u32> {
        Some(self.table.of(peer)?.handshake.remote?.features)
    }

    /// Whether `peer` is connected and takes part in PUT rendezvous, as sender and as receiver.
    pub(crate) fn takes_windows(&self, peer: PeerId) -> bool {
        self.table
            .of(peer)
            .is_some_and(|c| c.handshake.is_established() && c.handshake.knows(WINDOWS))
    }

    /// The peer that is reached by this endpoint's connection number `id`.
    pub(crate) fn owner_of(&self, id: u32) -> Option<PeerId> {
        let peer = self.table.established(id)?.peer;
        self.table.of(peer).is_some_and(|c| c.id == id).then_some(peer)
    }

    /// Messages that connection `id` took from the layer above, and delivered to it.
    pub(crate) fn sent(&self, id: u32) -> Option<u64> {
        Some(self.table.established(id)?.sender.sent)
    }

    pub(crate) fn delivered(&self, id: u32) -> Option<u64> {
        Some(self.table.established(id)?.receiver.reassembly.delivered)
    }

    /// The tag of `bytes` that this endpoint (`ours`) or the peer sends beside the datagrams of connection `id`. Their
    /// length differs from that of the signed part of a datagram, so that neither tag can be used for the other.
    pub(crate) fn sign(&self, id: u32, ours: bool, bytes: &[u8]) -> Option<u64> {
        debug_assert_ne!(bytes.len(), TAG_AT);
        let remote = self.table.established(id)?.handshake.remote?;
        let direction = if ours { remote.direction } else { 1 - remote.direction };
        Some(remote.key.tag(&self.shared.hash, direction, bytes, &[]))
    }

    /// Counts of the messages to and from `peer`.
    pub(crate) fn peer_counts(&self, peer: PeerId) -> Option<PeerCounts> {
        let c = self.table.of(peer)?;
        let rtt_ns = Some(c.sender.round_trip_ns()).filter(|rtt| *rtt > 0);
        Some(PeerCounts {
            sent: c.sender.sent,
            received: c.receiver.reassembly.delivered,
            rtt_ns: rtt_ns.unwrap_or(PeerCounts::UNKNOWN),
            unanswered: c.handshake.remote.is_none(),
        })
    }

    /// The last packet that was queued for `peer`; `None`: it has acknowledged all.
    pub(crate) fn last_sent(&self, peer: PeerId) -> Option<Mark> {
        let c = self.table.of(peer).filter(|c| !c.sender.window.packets.is_empty())?;
        Some(Mark { connection: c.id, psn: c.sender.window.next_psn().wrapping_sub(1) as u32 })
    }
}
