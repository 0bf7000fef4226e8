//! Replies to peers that wait for room in the transport.

use super::packet::Packet;
use crate::sys::Errno;
use crate::sys::numbers::NumberSet;
use crate::transport::{Iface, Mode, PeerId, SendError};
use std::collections::VecDeque;

type Replies = VecDeque<(PeerId, Packet)>;

/// Replies to peers: at most one per pending request, and one for each buffer that is advertised.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// In the order in which they are to be sent to each peer.
    pub(super) urgent: Replies,
    /// Those that are not urgent: they are not flushed, and may share a packet with others.
    late: Replies,
}

impl Outbox {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.urgent.len() | self.late.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    pub(super) fn reply(&mut self, peer: PeerId, packet: Packet) {
        self.urgent.push_back((peer, packet));
    }

    /// FIN: 0, or an error number.
    #[inline]
    pub(super) fn finish(&mut self, peer: PeerId, tx: u64, status: i32) {
        self.reply(peer, Packet::Fin { tx, status: status.unsigned_abs() });
    }

    /// A FIN without error that its receiver does not wait for.
    pub(super) fn finish_late(&mut self, peer: PeerId, tx: u64) {
        self.late.push_back((peer, Packet::Fin { tx, status: 0 }));
    }

    /// The peer has departed.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.urgent.retain(|(to, _)| *to != peer);
        self.late.retain(|(to, _)| *to != peer);
    }

    /// The receivers of all replies.
    pub(super) fn receivers(&self) -> impl Iterator<Item = PeerId> {
        self.urgent.iter().chain(&self.late).map(|(peer, _)| *peer)
    }

    /// Sends the urgent replies that there is room for. `failed` gets those that can never be sent.
    pub(super) fn send(&mut self, iface: &mut impl Iface, failed: &mut Vec<Failed>) -> usize {
        let n = send_all(&mut self.urgent, iface, failed);
        if n > 0 {
            iface.flush();
        }
        n
    }

    /// As [`Self::send`], for the other replies.
    pub(super) fn send_late(&mut self, iface: &mut impl Iface, failed: &mut Vec<Failed>) -> usize {
        send_all(&mut self.late, iface, failed)
    }
}

/// A reply that can never be sent, and the system's error.
pub(super) type Failed = (PeerId, Packet, Errno);

/// Sends replies in order for each peer. They may be coalesced with others until the next `flush`.
fn send_all(replies: &mut Replies, iface: &mut impl Iface, failed: &mut Vec<Failed>) -> usize {
    let mut n = 0;
    let mut full: NumberSet<PeerId> = NumberSet::default();
    for _ in 0..replies.len() {
        let Some((peer, packet)) = replies.pop_front() else { break };
        let sent = match full.contains(&peer) {
            true => Err(SendError::Again),
            false => iface.send(peer, Mode::Late, packet.encode().as_slice(), 0, |_, _| ()),
        };
        match sent.map_err(SendError::lasting) {
            Ok(()) => n += 1,
            // The peer needs this reply. Later there will be resources for it, or the peer departs.
            Err(None) => {
                full.insert(peer);
                replies.push_back((peer, packet));
            }
            Err(Some(errno)) => {
                n += 1;
                failed.push((peer, packet, errno));
            }
        }
    }
    n
}
