//! Receiving a packet: whether it is genuine, and what it says.

use super::super::interface::Sink;
use super::super::packet::{
    ACK_REQUEST, HEADER_LEN, HEADER_ONLY, Header, Kind, PRESSURE, TAG_AT, widen,
};
use super::super::receiver::{Arrival, Fault};
use super::super::sender::Sender;
use super::super::shared::Shared;
use super::{Connection, End};
use crate::transport::Departure;
use crate::transport::job_key::same;
use crate::transport::net::link::Condition;

impl Connection {
    /// Whether the tag of a packet shows that the peer made it for this connection.
    #[inline]
    pub(crate) fn is_genuine(
        &self,
        shared: &Shared,
        header: &Header,
        bytes: &[u8],
        condition: Condition,
    ) -> bool {
        if header.flags & HEADER_ONLY != 0 && !condition.sound {
            return false;
        }
        let Some((remote, signed)) =
            self.handshake.remote.as_ref().zip(bytes.first_chunk::<TAG_AT>())
        else {
            return false;
        };
        let body = bytes.get(HEADER_LEN..).unwrap_or(&[]);
        let tag = Header::tag(&remote.key, &shared.hash, 1 - remote.direction, signed, body);
        same(tag, header.tag)
    }

    /// The fast path: header and payload of the message of a genuine packet that is the next in order, has exactly one
    /// message and asks for nothing. The message counts as delivered; the acknowledgement is valid and is processed
    /// later. `None`: nothing was done.
    #[inline]
    pub(crate) fn take_plain<'a>(
        &mut self,
        shared: &mut Shared,
        packet: &Arrival<'a>,
    ) -> Option<(&'a [u8], &'a [u8])> {
        let Sender { window, peer_pressure, .. } = &self.sender;
        let plain = (packet.header.flags & PRESSURE != 0) == *peer_pressure
            && self.handshake.is_established()
            && widen(packet.header.ack, window.base) <= window.unsent;
        if !plain {
            return None;
        }
        let message = self.receiver.take_plain(shared, packet)?;
        self.heard(shared.patience, packet.at);
        Some(message)
    }

    /// Processes a genuine packet; `Some`: the connection ends.
    pub(crate) fn on_packet(
        &mut self,
        shared: &mut Shared,
        packet: &Arrival<'_>,
        sink: &mut impl Sink,
    ) -> Option<End> {
        let (header, now) = (&packet.header, packet.at);
        self.heard(shared.patience, now);
        let (words, frames) = packet.body.split_at_checked(usize::from(header.sack_words) * 8)?;
        let mut sound = self.sender.on_acknowledgement(shared, header, words, now, now);
        match header.kind {
            _ if !sound => {}
            Kind::Ack if header.flags & ACK_REQUEST != 0 => self.sender.timeout.hurry(now),
            Kind::Ack => {}
            Kind::Close => {
                let expected = self.receiver.order.expected;
                return Some(if widen(header.psn, expected) > expected {
                    End::failed(libc::ECONNRESET)
                } else {
                    End::Departed(Departure::Closed)
                });
            }
            Kind::Data => {
                let mut give =
                    |head: &[u8], payload: &[u8]| sink.on_message(self.peer, head, payload);
                match self.receiver.on_data(shared, packet, frames, &mut give) {
                    Ok(()) => {}
                    Err(Fault::Malformed) => sound = false,
                    // Earlier frames of the packet are delivered: it cannot come again.
                    Err(Fault::NoMemory) => return Some(End::failed(libc::ENOMEM)),
                }
            }
        }
        shared.counts.malformed += u64::from(!sound);
        (!sound).then_some(End::failed(libc::EPROTO))
    }
}
