//! Fragments: the receiver asks (CTS, or RESUME where another scheme failed), and the sender sends the bytes in packets
//! (PROTOCOL.md §4.5).

use crate::protocol::flow::{Flow, Onward};
use crate::protocol::limits::Counts;
use crate::protocol::message::Outbound;
use crate::protocol::packet::PieceHeader;
use crate::protocol::staging::Staging;
use crate::transport::{Iface, SendError};

/// The receiver's side: it has asked for fragments.
#[derive(Debug)]
pub(in crate::protocol) struct Receiver {
    asked: Asked,
    /// A stream is writing the next bytes to the buffer.
    pub(in crate::protocol) placing: bool,
}

/// How the receiver has asked for fragments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::protocol) enum Asked {
    /// By CTS: for all bytes.
    Cts,
    /// By CTS that describes the buffer: the sender may write all bytes into it instead.
    Described,
    /// By RESUME, after a stream: for the missing bytes.
    AfterStream,
    /// By RESUME, after remote buffers.
    AfterPut,
}

impl Receiver {
    pub(in crate::protocol) fn new(asked: Asked) -> Self {
        Self { asked, placing: false }
    }

    pub(in crate::protocol) fn is_resumed(&self) -> bool {
        matches!(self.asked, Asked::AfterStream | Asked::AfterPut)
    }

    /// The sender may write to the buffer.
    pub(in crate::protocol) fn is_described(&self) -> bool {
        self.asked == Asked::Described
    }

    /// Remote buffers were advertised to the sender before.
    pub(in crate::protocol) fn is_after_put(&self) -> bool {
        self.asked == Asked::AfterPut
    }
}

/// The sender's side.
#[derive(Debug)]
pub(in crate::protocol) struct Sender {
    rx: u64,
    flow: Flow,
    /// The message is in device memory.
    staging: Option<Staging>,
}

impl Sender {
    pub(in crate::protocol) fn new(rx: u64, flow: Flow, message: &Outbound) -> Self {
        let device = message.payload.segments().is_on_device();
        Self { rx, flow, staging: device.then(|| Staging::new(flow.offset, flow.end)) }
    }

    /// A copy has to be waited for, of whose end nothing but a question tells.
    pub(in crate::protocol) fn is_staged(&self) -> bool {
        self.staging.as_ref().is_some_and(|staging| staging.asks(self.flow.offset))
    }

    /// Sends fragments.
    pub(in crate::protocol) fn step(
        &mut self,
        iface: &mut impl Iface,
        message: &Outbound,
        counts: &mut Counts,
    ) -> Onward {
        let (rx, all) = (self.rx, message.payload.segments());
        if self.flow.is_over() {
            return Onward::Sent(None);
        }
        let source = match &mut self.staging {
            None => all.into(),
            Some(staging) => match staging.source(&all, self.flow.offset) {
                Ok(Some(source)) => source,
                Ok(None) => return Onward::Again,
                Err(_) => return Onward::Unreadable { rx },
            },
        };
        let header = |offset: u64| PieceHeader::fragment(rx, offset);
        match self.flow.send(iface, (message.peer, &source), false, header, counts) {
            Ok(true) => Onward::Sent(None),
            Ok(false) => Onward::Moved,
            Err(SendError::Again) => Onward::Again,
            Err(SendError::Unreachable(errno)) => Onward::Lost(errno),
        }
    }

    pub(in crate::protocol) fn is_by_stream(&self) -> bool {
        self.flow.is_by_stream()
    }

    /// As [`Flow::needs_packets`], and the message is in memory of the host.
    pub(in crate::protocol) fn needs_packets(&self) -> bool {
        self.staging.is_none() && self.flow.needs_packets()
    }
}
