//! Get: the receiver reads the message from the sender's memory (PROTOCOL.md §4.4). The sender only waits for the FIN.

use crate::protocol::limits::Counts;
use crate::protocol::message::{Inbound, Next};
use crate::protocol::packet::Ranges;
use crate::transport::{Iface, SendError};

/// The receiver's side.
#[derive(Debug)]
pub(in crate::protocol) struct Receiver {
    /// The message in the sender's memory.
    pub(in crate::protocol) ranges: Ranges,
}

impl Receiver {
    /// Reads at most `most` bytes.
    pub(in crate::protocol) fn step(
        &self,
        iface: &mut impl Iface,
        message: &mut Inbound,
        most: usize,
        counts: &mut Counts,
    ) -> Next {
        let chunk = (message.want - message.received).min(most);
        match message.read(iface, &self.ranges, message.received, chunk) {
            Ok(moved) => {
                counts.pulled_bytes += moved as u64;
                message.received = (message.received + moved).min(message.want);
                if message.is_whole() { Next::Whole } else { Next::Moved }
            }
            Err(SendError::Again) => Next::Again,
            Err(SendError::Unreachable(errno)) => message.unreadable(errno),
        }
    }
}
