//! What the layer above gives the machine, and what it is told.

use super::tag::JobKey;
use crate::transport::net::job_key::Source;
use crate::transport::net::neighbours::Standing;
use crate::transport::{Address, Departure, Mark, PeerId};

/// What an endpoint is, and its limits.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Random and odd: this life of the endpoint.
    pub(crate) life: u64,
    /// The endpoint's address.
    pub(crate) address: Address,
    pub(crate) key: JobKey,
    /// What it was made of.
    pub(crate) key_source: Source,
    /// Largest datagram that our link carries, bytes.
    pub(crate) datagram_max: usize,
    /// A peer that is silent for so long while something is owed is dead, nanoseconds.
    pub(crate) peer_timeout_ns: u64,
    /// Most bytes of packets kept, to be sent again or until those before them arrive.
    pub(crate) buffer_bytes: usize,
    /// What we offer in handshakes: [`STREAMS`](super::packet::STREAMS) and those beside it.
    pub(crate) features: u32,
    /// Packets that all peers together may have under way to us.
    pub(crate) receive_window: u32,
    /// First packet sequence number of a connection.
    pub(crate) first_psn: u32,
    /// Seed of nonces and jitter.
    pub(crate) seed: [u8; 16],
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) data_sent: u64,
    pub(crate) retransmitted: u64,
    pub(crate) acks_sent: u64,
    pub(crate) hellos_sent: u64,
    pub(crate) data_received: u64,
    pub(crate) duplicates: u64,
    /// Packets that came before those in front of them, and were kept.
    pub(crate) early: u64,
    /// Packets in order or early that there was no memory or no room for.
    pub(crate) no_room: u64,
    pub(crate) timeouts: u64,
    /// Packets whose tag is wrong: of another job, forged, damaged, or of an earlier connection.
    pub(crate) forged: u64,
    /// Packets for a connection that does not exist.
    pub(crate) stray: u64,
    /// Packets that are no packets.
    pub(crate) malformed: u64,
    /// Handshakes from addresses of this host that are not this user's.
    pub(crate) strangers: u64,
    /// Handshakes of a version that is not understood here.
    pub(crate) versions: u64,
    pub(crate) connected: u64,
    pub(crate) departed: u64,
}

/// The layer above.
pub(crate) trait Sink {
    /// Numbers the peer at `address`; `None`: there is no room for another one.
    fn peer_of(&mut self, address: &Address) -> Option<PeerId>;
    /// Its number, if it has one.
    fn find(&self, address: &Address) -> Option<PeerId>;
    /// The peer has not proven that it is there, and nobody was told of it: its number may be another one's.
    fn forget(&mut self, peer: PeerId);
    /// Who the peer at `address` is, as far as this host knows: asked when a connection is made, before anything that a
    /// packet says is believed.
    fn standing(&self, address: &Address) -> Standing;
    /// A peer has proven that it is there; before its first message.
    fn on_connected(&mut self, peer: PeerId, address: &Address);
    /// A message. The slices are valid during the call only.
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]);
    /// The peer, which is about to depart, has acknowledged everything before `upto`.
    fn on_acknowledged(&mut self, _peer: PeerId, _upto: Mark) {}
    /// A peer is gone; what arrived in order was reported before.
    fn on_departure(&mut self, peer: PeerId, departure: Departure);
    /// Whether the layer above waits for something from `peer`.
    fn is_owed(&self, peer: PeerId) -> bool;
}
