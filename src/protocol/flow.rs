//! Bytes of a long message on their way in packets: as fragments among the messages, or as frames of the stream beside
//! them (PROTOCOL.md §4.11).

use super::limits::Counts;
use super::message::Outbound;
use super::packet::{Packet, PieceHeader};
use super::select::{self, Carrier};
use crate::sys::Errno;
use crate::transport::{Iface, Mode, SendError, piece_of};

/// Fragments of one message that are sent in one progress pass.
const FRAGMENT_BATCH: usize = 64;
/// Stream frames of one message that are sent in one progress pass.
const STREAM_BATCH: usize = 4;
/// Fragments after which the transport is flushed, so that the receiver works while the rest is sent.
const FLUSH_AFTER: usize = 16;

/// The bytes from `offset` to `end`, which are to be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Flow {
    pub(super) offset: usize,
    pub(super) end: usize,
    /// `None`: decided when the first bytes are sent.
    pub(super) carrier: Option<Carrier>,
}

impl Flow {
    /// The bytes from `offset` to `end` as fragments.
    pub(super) fn fragments(offset: usize, end: usize) -> Self {
        Self { offset, end, carrier: Some(Carrier::Fragments) }
    }

    pub(super) fn is_over(&self) -> bool {
        self.offset >= self.end
    }

    pub(super) fn is_by_stream(&self) -> bool {
        self.carrier == Some(Carrier::Stream)
    }

    /// Sends a batch while there is room, each packet with the header of its offset. `unsolicited`: it stops while the
    /// receiver is short of memory. Returns whether all is sent.
    pub(super) fn send<I: Iface>(
        &mut self,
        iface: &mut I,
        message: &Outbound,
        unsolicited: bool,
        header: impl Fn(u64) -> PieceHeader,
        counts: &mut Counts,
    ) -> Result<bool, SendError> {
        let peer = message.peer;
        let caps = iface.caps(peer);
        let carrier = *self
            .carrier
            .get_or_insert_with(|| select::carrier(iface, &caps, peer, self.end - self.offset));
        let (most, batch) = match carrier {
            Carrier::Stream => (caps.stream_max, STREAM_BATCH),
            Carrier::Fragments => {
                (piece_of(message.payload.len(), caps.fragment_max), FRAGMENT_BATCH)
            }
        };
        for i in 0..batch {
            if self.is_over() {
                break;
            }
            if i == FLUSH_AFTER {
                iface.flush();
            }
            if unsolicited && iface.under_pressure(peer) {
                return Err(SendError::Again);
            }
            let at = self.offset;
            let len = (self.end - at).min(most);
            let header = header(at as u64);
            if carrier == Carrier::Stream {
                let part = message.payload.segments().slice(at, len);
                if iface.send_by_stream(peer, header.as_slice(), &part).is_err() {
                    // A broken stream is reported by `on_stream_lost`.
                    return if i > 0 { Ok(false) } else { Err(SendError::Again) };
                }
                counts.stream_bytes += len as u64;
            } else {
                iface.send(peer, Mode::Fragment, header.as_slice(), len, |from, to| {
                    message.payload.copy_out(at + from, to);
                })?;
                counts.fragment_bytes += len as u64;
            }
            self.offset = at + len;
        }
        Ok(self.is_over())
    }
}

/// What a step of a send leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Onward {
    /// Nothing moved; more to do later.
    Again,
    /// Something moved; more to do.
    Moved,
    /// Nothing to do until the receiver answers.
    Waits,
    /// As [`Self::Waits`], and the receiver gets this packet.
    Reply(Packet),
    /// All bytes are sent, and a FIN is due. The receiver gets this packet, if any.
    Sent(Option<Packet>),
    /// All bytes are sent, and no FIN is due.
    Complete,
    /// The peer cannot be reached: the system's error.
    Lost(Errno),
    /// These bytes have to go as fragments.
    Fragments { rx: u64, flow: Flow },
}
