//! Bytes of a long message on their way in packets: as fragments among the messages, or as frames of the stream beside
//! them (PROTOCOL.md §4.11).

use super::limits::Counts;
use super::packet::{Packet, PieceHeader};
use super::select::{self, Carrier};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::transport::{Iface, Mode, PeerId, SendError, piece_of};

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

    /// Whether packets are all that it needs: it has bytes left, and the next ones go as fragments.
    pub(super) fn needs_packets(&self) -> bool {
        self.carrier == Some(Carrier::Fragments) && !self.is_over()
    }

    pub(super) fn is_by_stream(&self) -> bool {
        self.carrier == Some(Carrier::Stream)
    }

    /// Sends a batch of what the source has while there is room, each packet with the header of its offset. `unsolicited`: it
    /// stops while the receiver is short of memory. Returns whether all is sent.
    pub(super) fn send<I: Iface>(
        &mut self,
        iface: &mut I,
        (peer, source): (PeerId, &Source),
        unsolicited: bool,
        header: impl Fn(u64) -> PieceHeader,
        counts: &mut Counts,
    ) -> Result<bool, SendError> {
        let caps = iface.caps(peer);
        let carrier = *self
            .carrier
            .get_or_insert_with(|| select::carrier(iface, &caps, peer, self.end - self.offset));
        let (most, batch) = match carrier {
            Carrier::Stream => (caps.stream_max, STREAM_BATCH),
            Carrier::Fragments => (piece_of(source.message, caps.fragment_max), FRAGMENT_BATCH),
        };
        let end = self.end.min(source.from + source.bytes.len());
        for i in 0..batch {
            if self.offset >= end {
                break;
            }
            if i == FLUSH_AFTER {
                iface.flush();
            }
            if unsolicited && iface.under_pressure(peer) {
                return Err(SendError::Again);
            }
            let (at, here) = (self.offset, self.offset - source.from);
            let len = (end - at).min(most);
            let header = header(at as u64);
            if carrier == Carrier::Stream {
                let part = source.bytes.slice(here, len);
                if iface.send_by_stream(peer, header.as_slice(), &part).is_err() {
                    // A broken stream is reported by `on_stream_lost`.
                    return if i > 0 { Ok(false) } else { Err(SendError::Again) };
                }
                counts.stream_bytes += len as u64;
            } else {
                iface.send(peer, Mode::Fragment, header.as_slice(), len, |from, to| {
                    source.bytes.copy_out(here + from, to);
                })?;
                counts.fragment_bytes += len as u64;
            }
            self.offset = at + len;
        }
        Ok(self.is_over())
    }
}

/// Where the bytes of a message are read that are sent in packets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// Memory of the host.
    pub(super) bytes: SegmentList,
    /// Their offset in the message.
    pub(super) from: usize,
    /// Length of the message, bytes.
    pub(super) message: usize,
}

impl From<SegmentList> for Source {
    /// All of a message.
    fn from(bytes: SegmentList) -> Self {
        Self { bytes, from: 0, message: bytes.len() }
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
    /// The message cannot be read; a FIN is due when the receiver knows that.
    Unreadable { rx: u64 },
    /// These bytes have to go as fragments.
    Fragments { rx: u64, flow: Flow },
}
