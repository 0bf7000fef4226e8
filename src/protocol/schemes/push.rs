//! Long messages with unsolicited data, which arrives before any CTS (PROTOCOL.md §4.10).

use crate::protocol::flow::{Flow, Onward};
use crate::protocol::index_list::Key;
use crate::protocol::limits::{Counts, Limits};
use crate::protocol::message::{Inbound, Outbound};
use crate::protocol::outbox::Outbox;
use crate::protocol::packet::{Packet, PieceHeader, Ranges};
use crate::protocol::spaces::Space;
use crate::transport::{Iface, PeerId, SendError};
use std::collections::HashMap;

/// The receiver's side.
#[derive(Debug)]
pub(in crate::protocol) struct Receiver {
    /// The number of unsolicited bytes that were announced.
    announced: u64,
    /// A CTS was sent, for the bytes behind them or because the sender may have stopped.
    asked: bool,
    /// A stream is writing the next bytes to the buffer.
    pub(in crate::protocol) placing: bool,
}

impl Receiver {
    pub(in crate::protocol) fn new(announced: u64) -> Self {
        Self { announced, asked: false, placing: false }
    }

    /// Unsolicited bytes that are the next ones of the message. `None`: they are not. Else whether it is whole.
    pub(in crate::protocol) fn take(
        &self,
        message: &mut Inbound,
        offset: u64,
        payload: &[u8],
        limits: &Limits,
    ) -> Option<bool> {
        let is_next = !self.placing && message.received as u64 == offset;
        is_next.then(|| message.append(payload, limits))
    }

    /// As [`Self::take`], without a loop, where all bytes fit into one segment. `None`: nothing was done.
    #[inline]
    pub(in crate::protocol) fn try_take(
        &self,
        message: &mut Inbound,
        offset: u64,
        payload: &[u8],
        limits: &Limits,
    ) -> Option<bool> {
        let fits = !self.placing
            && message.received as u64 == offset
            && payload.len() <= message.want - message.received
            && message.want < limits.past_caches_min;
        if !fits || !message.target.segments.copy_in_one(message.received, payload) {
            return None;
        }
        message.received += payload.len();
        Some(message.is_whole())
    }

    /// Sends a CTS for the bytes that the sender does not send unsolicited, or has stopped sending. False: it was sent
    /// already.
    pub(in crate::protocol) fn ask_for_rest(
        &mut self,
        key: Key,
        message: &Inbound,
        outbox: &mut Outbox,
    ) -> bool {
        if std::mem::replace(&mut self.asked, true) {
            return false;
        }
        let packet = Packet::Cts {
            tx: message.tx,
            rx: key.to_wire(),
            len: message.want as u64,
            faulted: false,
            ranges: Ranges::NONE,
        };
        outbox.reply(message.peer, packet);
        true
    }

    /// A CTS could not be sent. Returns whether the receive completes without it: all bytes that it wants are
    /// unsolicited, so that they arrive from the ring, or the sender's departure ends the receive.
    pub(in crate::protocol) fn needs_no_cts(&mut self, message: &Inbound) -> bool {
        let needless = self.asked && message.want as u64 <= self.announced;
        self.asked &= !needless;
        needless
    }
}

/// The sender's side.
#[derive(Debug)]
pub(in crate::protocol) struct Sender {
    /// The unsolicited bytes that are still to be sent.
    flow: Flow,
    /// The send is complete when they are sent: the RTS said that the sender needs no FIN.
    leaves: bool,
    /// The receiver's number and the length that it wants, once it has sent a CTS.
    asked: Option<(u64, usize)>,
}

impl Sender {
    pub(in crate::protocol) fn new(flow: Flow, leaves: bool) -> Self {
        Self { flow, leaves, asked: None }
    }

    /// Sends unsolicited bytes.
    pub(in crate::protocol) fn step(
        &mut self,
        iface: &mut impl Iface,
        message: &Outbound,
        key: Key,
        counts: &mut Counts,
    ) -> Onward {
        let header = |offset: u64| PieceHeader::pushed(key.to_wire(), offset);
        let source = message.payload.segments().into();
        let unsolicited = self.asked.is_none();
        match self.flow.send(iface, (message.peer, &source), unsolicited, header, counts) {
            Ok(true) => self.end(),
            Ok(false) => Onward::Moved,
            Err(SendError::Again) => Onward::Again,
            Err(SendError::Unreachable(errno)) => Onward::Lost(errno),
        }
    }

    /// All unsolicited bytes are sent, or their stream broke.
    fn end(&self) -> Onward {
        match self.asked {
            Some((rx, end)) if end > self.flow.end => {
                let flow = Flow { offset: self.flow.end, end, carrier: self.flow.carrier };
                Onward::Fragments { rx, flow }
            }
            // All of it is in the ring: the buffer is the application's again.
            _ if self.leaves => Onward::Complete,
            _ => Onward::Waits,
        }
    }

    /// CTS: the receiver wants the first `end` bytes. `None`: it has asked before.
    pub(in crate::protocol) fn on_cts(&mut self, rx: u64, end: usize) -> Option<Onward> {
        if self.asked.is_some() {
            return None;
        }
        self.asked = Some((rx, end));
        // Before all unsolicited bytes are sent, the next step goes on.
        Some(if self.flow.is_over() { self.end() } else { Onward::Waits })
    }

    /// The stream broke: the receiver's RESUME says what is missing. False: the bytes go in another way.
    pub(in crate::protocol) fn park(&mut self) -> bool {
        let parks = self.flow.is_by_stream();
        if parks {
            self.flow = Flow::fragments(self.flow.end, self.flow.end);
        }
        parks
    }

    pub(in crate::protocol) fn is_by_stream(&self) -> bool {
        self.flow.is_by_stream()
    }

    /// As [`Flow::needs_packets`].
    pub(in crate::protocol) fn needs_packets(&self) -> bool {
        self.flow.needs_packets()
    }

    /// The receiver has not asked for the bytes: they stop while it is short of memory.
    pub(in crate::protocol) fn is_unsolicited(&self) -> bool {
        self.asked.is_none()
    }
}

/// Where the unsolicited bytes of a message go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::protocol) enum Place {
    /// To the buffer of its receive.
    Active(Key),
    /// To an unexpected message.
    Unexpected(Space, Key),
    /// To a message that a peek has claimed: its receive context, and the application's context.
    Claimed((u8, u64)),
}

/// Messages whose unsolicited bytes are still arriving, by peer and number.
#[derive(Debug, Default)]
pub(in crate::protocol) struct PushedMessages {
    /// The message of the last look-up: usually the only one, and the next bytes are for it too.
    last: Option<((PeerId, u64), Place)>,
    /// All other messages.
    places: HashMap<(PeerId, u64), Place>,
}

impl PushedMessages {
    pub(in crate::protocol) fn insert(&mut self, peer: PeerId, tx: u64, place: Place) {
        self.remove(peer, tx);
        if let Some((key, other)) = self.last.replace(((peer, tx), place)) {
            self.places.insert(key, other);
        }
    }

    pub(in crate::protocol) fn remove(&mut self, peer: PeerId, tx: u64) {
        if self.last.is_some_and(|(key, _)| key == (peer, tx)) {
            self.last = None;
        } else if !self.places.is_empty() {
            self.places.remove(&(peer, tx));
        }
    }

    /// Changes the place of a message, if bytes of it are still to come.
    pub(in crate::protocol) fn moved(&mut self, peer: PeerId, tx: u64, place: Place) {
        if self.find(peer, tx).is_some() {
            self.last = Some(((peer, tx), place));
        }
    }

    pub(in crate::protocol) fn find(&mut self, peer: PeerId, tx: u64) -> Option<Place> {
        if let Some((_, place)) = self.last.filter(|(key, _)| *key == (peer, tx)) {
            return Some(place);
        }
        let place = self.places.remove(&(peer, tx))?;
        if let Some((key, other)) = self.last.replace(((peer, tx), place)) {
            self.places.insert(key, other);
        }
        Some(place)
    }

    /// The receive of a message, if the last look-up was for it and found one.
    #[inline]
    pub(in crate::protocol) fn last_active(&self, peer: PeerId, tx: u64) -> Option<Key> {
        match self.last {
            Some((message, Place::Active(key))) if message == (peer, tx) => Some(key),
            _ => None,
        }
    }

    /// Forgets the messages of a peer that has departed.
    pub(in crate::protocol) fn forget(&mut self, peer: PeerId) {
        self.places.retain(|(from, _), _| *from != peer);
        self.last = self.last.filter(|((from, _), _)| *from != peer);
    }
}
