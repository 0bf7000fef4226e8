//! The interface to the layer above: its settings, the counts it can read, and the callbacks it implements.

use crate::transport::JobKey;
use crate::transport::Source;
use crate::transport::net::neighbours::Standing;
use crate::transport::{Address, Departure, Mark, PeerId};

/// Identity and limits of an endpoint.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Identifies this incarnation of the endpoint: random and odd.
    pub(crate) life: u64,
    /// The endpoint's address.
    pub(crate) address: Address,
    pub(crate) key: JobKey,
    /// The source of the key.
    pub(crate) key_source: Source,
    /// Largest datagram that the link carries, bytes.
    pub(crate) datagram_max: usize,
    /// Longest packet over a path of the link that is not probed ([`Link::direct`](super::super::link::Link::direct)),
    /// bytes; 0: there is none.
    pub(crate) direct_max: usize,
    /// Liveness timeout, nanoseconds: a peer that is silent for this long while it owes something counts as dead.
    pub(crate) peer_timeout_ns: u64,
    /// Most bytes of packets kept for retransmission, or until the packets before them arrive.
    pub(crate) buffer_bytes: usize,
    /// Features offered in handshakes: [`STREAMS`](super::packet::STREAMS) and those beside it.
    pub(crate) features: u32,
    /// Packets that all peers together may have in flight to this endpoint.
    pub(crate) receive_window: u32,
    /// First packet sequence number of a connection.
    pub(crate) first_psn: u32,
    /// Seed of nonces and jitter.
    pub(crate) seed: [u8; 16],
}

impl Settings {
    /// Largest packet that any path takes, bytes.
    pub(crate) fn packet_max(&self) -> usize {
        self.datagram_max.max(self.direct_max)
    }
}

/// Counts of events since the endpoint was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) data_sent: u64,
    pub(crate) retransmitted: u64,
    pub(crate) acks_sent: u64,
    pub(crate) hellos_sent: u64,
    pub(crate) data_received: u64,
    pub(crate) duplicates: u64,
    /// Packets that arrived before their predecessors, and were kept.
    pub(crate) early: u64,
    /// Packets in order or early that were dropped for lack of memory or room.
    pub(crate) no_room: u64,
    pub(crate) timeouts: u64,
    /// Packets with a wrong tag: from another job, forged, damaged, or of an earlier connection.
    pub(crate) forged: u64,
    /// Packets for a connection that does not exist.
    pub(crate) stray: u64,
    /// Datagrams that cannot be decoded.
    pub(crate) malformed: u64,
    /// Handshakes from addresses of this host that belong to another user.
    pub(crate) strangers: u64,
    /// Handshakes of a version that this endpoint does not understand.
    pub(crate) versions: u64,
    pub(crate) connected: u64,
    pub(crate) departed: u64,
}

/// The callbacks that the layer above implements.
pub(crate) trait Sink {
    /// The number of the peer at `address`, which is assigned if necessary; `None`: no number is free.
    fn peer_of(&mut self, address: &Address) -> Option<PeerId>;
    /// The number of the peer at `address`, if it has one.
    fn find(&self, address: &Address) -> Option<PeerId>;
    /// The peer never proved that it is there, and its number was never reported: the number may be reused.
    fn forget(&mut self, peer: PeerId);
    /// Which user owns `address`, as far as this host knows. Asked when a connection is made, before anything in a
    /// packet is trusted.
    fn standing(&self, address: &Address) -> Standing;
    /// The peer at `address` is about to prove that it is there. False: there is no memory for it above, and it must try
    /// again.
    fn has_room(&mut self, address: &Address) -> bool {
        let _ = address; // it takes none
        true
    }
    /// A peer has proven that it is there; called before its first message is delivered.
    fn on_connected(&mut self, peer: PeerId, address: &Address);
    /// A message has arrived. The slices are valid during the call only.
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]);
    /// The peer, which is about to depart, has acknowledged everything before `upto`.
    fn on_acknowledged(&mut self, _peer: PeerId, _upto: Mark) {}
    /// A peer is gone; everything that had arrived in order was reported before.
    fn on_departure(&mut self, peer: PeerId, departure: Departure);
    /// Whether the layer above waits for something from `peer`; `None`: it is not there to say so. It is asked again
    /// when it polls.
    fn is_owed(&self, peer: PeerId) -> Option<bool>;
}
