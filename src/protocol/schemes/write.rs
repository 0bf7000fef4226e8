//! Write: the receiver's CTS says where its buffer is, and the sender writes the message there (PROTOCOL.md §4.5).
//! PUT_DONE tells the receiver, for which this is [`fragments`](super::fragments) until then.

use crate::protocol::flow::{Flow, Onward};
use crate::protocol::limits::Counts;
use crate::protocol::message::Outbound;
use crate::protocol::packet::{Packet, Ranges};
use crate::sys::Errno;
use crate::transport::{Iface, SendError};

/// The sender's side.
#[derive(Debug)]
pub(in crate::protocol) struct Sender {
    rx: u64,
    offset: usize,
    end: usize,
    /// The receiver's buffer.
    ranges: Ranges,
}

impl Sender {
    pub(in crate::protocol) fn new(rx: u64, end: usize, ranges: Ranges) -> Self {
        Self { rx, offset: 0, end, ranges }
    }

    /// Writes at most `most` bytes.
    pub(in crate::protocol) fn step(
        &mut self,
        iface: &mut impl Iface,
        message: &Outbound,
        most: usize,
        counts: &mut Counts,
    ) -> Onward {
        let (rx, peer, chunk) = (self.rx, message.peer, (self.end - self.offset).min(most));
        let local = message.payload.segments().slice(self.offset, chunk);
        let put = if iface.caps(peer).put {
            self.ranges.put(iface, peer, &local, self.offset)
        } else {
            Err(SendError::Unreachable(Errno(libc::EPERM)))
        };
        match put {
            Ok(moved) => {
                counts.pushed_bytes += moved as u64;
                self.offset = (self.offset + moved).min(self.end);
                match self.offset < self.end {
                    true => Onward::Moved,
                    false => Onward::Sent(Some(Packet::PutDone { rx })),
                }
            }
            Err(SendError::Again) => Onward::Again,
            // This process cannot read its own buffer either.
            Err(SendError::Unreachable(errno))
                if errno.0 == libc::EFAULT
                    && !message.payload.segments().is_accessible(0, self.end, false) =>
            {
                Onward::Sent(Some(Packet::Fault { rx }))
            }
            // The receiver counts the bytes of fragments only: start from offset 0.
            Err(SendError::Unreachable(_)) => {
                Onward::Fragments { rx, flow: Flow { offset: 0, end: self.end, carrier: None } }
            }
        }
    }
}
