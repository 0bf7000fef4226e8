//! Long messages that have their receive, and whose bytes are on their way.

use super::Cause;
use super::index_list::{IndexList, Key};
use super::limits::{Counts, Limits};
use super::message::{Announcement, Inbound, UNWRITABLE};
use super::outbox::Outbox;
use super::packet::{Envelope, Packet, Ranges};
use super::receives::Target;
use super::schemes::push::{Place, PushedMessages};
use super::schemes::{fragments, get, push, put, split};
use super::traffic::{Carried, LongMessages};
use crate::memory::SegmentList;
use crate::transport::{Iface, LaneId, PeerId, SendError};
use std::collections::VecDeque;

/// A receive under way.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) message: Inbound,
    pub(super) scheme: Receiver,
}

/// The receiver's side of the scheme by which a message comes.
#[derive(Debug)]
pub(super) enum Receiver {
    /// None was chosen, and the receiver cannot read the message by itself.
    Announced(put::Announced),
    Get(get::Receiver),
    Split(split::Receiver),
    Put(put::Receiver),
    Push(push::Receiver),
    Fragments(fragments::Receiver),
}

impl Receiver {
    /// Whether a stream is writing the next bytes to the buffer: other packets are dropped meanwhile, and the receive
    /// must not end. `None`: the sender sends no bytes in packets.
    pub(super) fn placing(&mut self) -> Option<&mut bool> {
        match self {
            Self::Push(push) => Some(&mut push.placing),
            Self::Fragments(fragments) => Some(&mut fragments.placing),
            _ => None,
        }
    }

    /// The sender sends the bytes in packets, and none is being placed.
    fn takes_packets(&mut self) -> bool {
        self.placing().is_some_and(|placing| !*placing)
    }

    fn is_resumed(&self) -> bool {
        matches!(self, Self::Fragments(fragments) if fragments.is_resumed())
    }
}

impl Receiver {
    /// How a message came that ends now.
    pub(super) fn carried(&self) -> Carried {
        match self {
            Self::Announced(_) | Self::Get(_) => Carried::Read,
            Self::Split(_) => Carried::Split,
            Self::Put(put) if put.offer.is_some() => Carried::Read,
            Self::Put(_) => Carried::Written,
            Self::Push(_) => Carried::Unsolicited,
            Self::Fragments(_) => Carried::Fragments,
        }
    }
}

/// All receives under way.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    pub(super) active: IndexList<Active>,
    /// Messages whose unsolicited bytes are still arriving.
    pub(super) pushed: PushedMessages,
    /// Receives for which this endpoint has something to do. Some may have ended meanwhile.
    pub(super) pulls: VecDeque<Key>,
    /// Parts of receives that their senders or this endpoint's device move.
    pub(super) chunks: put::Chunks,
    /// Bytes were announced that may come by stream.
    pub(super) attentive: bool,
    /// As [`Self::is_full`], but the receive that caused it may have ended.
    pub(super) full: bool,
    /// Long messages that were received.
    pub(super) long: LongMessages,
}

impl Arrivals {
    #[inline]
    pub(super) fn work(&self) -> usize {
        self.pulls.len() | self.chunks.due.len()
    }

    /// No more bytes should be taken from the network now: those that are here wait for a device.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.full && !self.pulls.is_empty()
    }

    /// Begins a receive, whose first `bytes` may be here. `None`: more will come. Else the key of a receive that is
    /// whole, or has failed.
    pub(super) fn begin(
        &mut self,
        (peer, envelope, target): (PeerId, Envelope, Target),
        rts: &Announcement,
        bytes: &[u8],
        (presses, outbox, counts): (bool, &mut Outbox, &mut Counts),
    ) -> Option<Key> {
        let Announcement { tx, len, pushed, leaves, sees, broken, offer, ranges } = *rts;
        let want = target.segments.len().min(len as usize);
        let bytes_here = bytes.get(..bytes.len().min(want)).unwrap_or(&[]);
        let received = target.segments.copy_in(0, bytes_here);
        let failed = (received < bytes_here.len()).then_some(UNWRITABLE);
        let pushes = pushed > 0 || broken;
        let scheme = if pushes {
            Receiver::Push(push::Receiver::new(pushed))
        } else if ranges.as_slice().is_empty() || target.segments.is_on_device() {
            Receiver::Announced(put::Announced { offer, sees })
        } else {
            Receiver::Get(get::Receiver { ranges })
        };
        let message = Inbound {
            peer,
            envelope,
            target,
            tx,
            len,
            want,
            received,
            leaves,
            queued: !pushes,
            landing: None,
            failed,
        };
        let key = self.active.push_back(Active { message, scheme });
        if !pushes {
            self.pulls.push_back(key);
        } else if received == want || failed.is_some() {
            return Some(key);
        } else if broken {
            self.resume(key, fragments::Asked::AfterStream, outbox, counts);
        } else {
            if (bytes.len() as u64) < pushed {
                self.pushed.insert(peer, tx, Place::Active(key));
                self.attentive = true;
            }
            if want as u64 > pushed || presses {
                self.ask_for_rest(key, outbox);
            }
        }
        None
    }

    /// Removes a receive that ends.
    pub(super) fn remove(&mut self, key: Key) -> Option<Active> {
        let mut active = self.active.remove(key)?;
        // Of a sender that has left nothing is listed; its next incarnation may use the number.
        if !active.message.is_orphaned() {
            self.pushed.remove(active.message.peer, active.message.tx);
        }
        // The receive is reported after this, when no copy writes to its buffer.
        if let Some(landing) = &mut active.message.landing {
            landing.end();
        }
        Some(active)
    }

    pub(super) fn queue_pull(&mut self, key: Key) {
        let Some(active) = self.active.get_mut(key) else { return };
        if !std::mem::replace(&mut active.message.queued, true) {
            self.pulls.push_back(key);
        }
    }

    /// The next receive for which this endpoint has something to do.
    pub(super) fn next_pull(&mut self) -> Option<Key> {
        let key = self.pulls.pop_front()?;
        if let Some(active) = self.active.get_mut(key) {
            active.message.queued = false;
        }
        Some(key)
    }

    /// Sends a CTS for all bytes. `one_sided`: the sender may be able to write to the buffer. `faulted`: it has to check
    /// whether it can read its own buffer.
    pub(super) fn clear_to_send(
        &mut self,
        key: Key,
        one_sided: bool,
        faulted: bool,
        outbox: &mut Outbox,
    ) {
        let Some(Active { message, scheme }) = self.active.get_mut(key) else { return };
        self.pushed.remove(message.peer, message.tx); // the chunks of a split copy
        let (asked, ranges) = match one_sided {
            true => (fragments::Asked::Described, Ranges::new(message.target.segments.ranges())),
            false => (fragments::Asked::Cts, Ranges::NONE),
        };
        *scheme = Receiver::Fragments(fragments::Receiver::new(asked));
        message.received = 0;
        self.attentive = true;
        let packet = Packet::Cts {
            tx: message.tx,
            rx: key.to_wire(),
            len: message.want as u64,
            faulted,
            ranges,
        };
        outbox.reply(message.peer, packet);
    }

    /// Asks for the rest of a message as fragments, unless it was asked for in this way.
    pub(super) fn resume(
        &mut self,
        key: Key,
        asked: fragments::Asked,
        outbox: &mut Outbox,
        counts: &mut Counts,
    ) {
        let Some(Active { message, scheme }) = self.active.get_mut(key) else { return };
        if scheme.is_resumed() {
            return;
        }
        *scheme = Receiver::Fragments(fragments::Receiver::new(asked));
        let (from, len) = (message.received as u64, message.want as u64);
        counts.resumed += 1;
        outbox.reply(message.peer, Packet::Resume { tx: message.tx, rx: key.to_wire(), from, len });
    }

    /// Sends a CTS for the unsolicited bytes that the sender may have stopped to send, and those behind them.
    pub(super) fn ask_for_rest(&mut self, key: Key, outbox: &mut Outbox) {
        if let Some(Active { message, scheme: Receiver::Push(push) }) = self.active.get_mut(key) {
            self.attentive |= push.ask_for_rest(key, message, outbox);
        }
    }

    /// PRESSURE is set, and senders stop sending unsolicited bytes: requests those of messages that have their receive.
    pub(super) fn ask_for_pushed(&mut self, outbox: &mut Outbox) {
        for key in self.active.keys_where(|active| matches!(active.scheme, Receiver::Push(_))) {
            let pushes =
                self.active.get(key).map(|active| (active.message.peer, active.message.tx));
            if let Some((peer, tx)) = pushes {
                if self.pushed.find(peer, tx) == Some(Place::Active(key)) {
                    self.ask_for_rest(key, outbox);
                }
            }
        }
    }

    /// Unsolicited bytes, or chunks of a split copy, for a message that has its receive. `None`: they are dropped. Else
    /// whether the message is whole.
    pub(super) fn place_pushed(
        &mut self,
        key: Key,
        offset: u64,
        payload: &[u8],
        limits: &Limits,
    ) -> Option<bool> {
        let Active { message, scheme } = self.active.get_mut(key)?;
        match scheme {
            Receiver::Push(push) => {
                let taken = push.take(message, offset, payload, limits);
                if message.landing.is_some() && taken == Some(false) {
                    if message.is_whole() {
                        self.pushed.remove(message.peer, message.tx);
                    }
                    self.follow_landing(key);
                }
                taken
            }
            Receiver::Split(split) => {
                split.place(message, offset, payload, limits).then_some(false)
            }
            _ => None,
        }
    }

    /// A fragment. `None`: it is dropped. Else whether the message is whole.
    pub(super) fn on_fragment(
        &mut self,
        peer: PeerId,
        key: Key,
        offset: u64,
        payload: &[u8],
        limits: &Limits,
    ) -> Option<bool> {
        let Active { message, scheme } = self.active.get_mut(key)?;
        let received = message.received as u64;
        // After a RESUME fragments may repeat bytes that are here (PROTOCOL.md §4.11).
        let known = usize::try_from(received.saturating_sub(offset)).unwrap_or(usize::MAX);
        let payload = payload.get(known..).unwrap_or(&[]);
        let good = message.peer == peer
            && scheme.takes_packets()
            && offset <= received
            && (known == 0 || scheme.is_resumed())
            && message.received + payload.len() <= message.want;
        let taken = good.then(|| message.append(payload, limits));
        if message.landing.is_some() && taken == Some(false) {
            self.follow_landing(key);
        }
        taken
    }

    /// Follows the copies of a receive to device memory, if some have not ended.
    #[cold]
    fn follow_landing(&mut self, key: Key) {
        let landing = self.active.get(key).and_then(|active| active.message.landing.as_deref());
        let Some(landing) = landing.filter(|landing| landing.is_under_way()) else { return };
        self.full |= landing.is_full();
        self.queue_pull(key);
    }

    /// FAULT: the sender cannot read its memory. Returns whether the receive ends now: not while a stream, which the FAULT has
    /// overtaken, writes to its buffer. `None`: it is dropped.
    pub(super) fn on_fault(&mut self, peer: PeerId, key: Key) -> Option<bool> {
        let active = self.active.get_mut(key).filter(|active| active.message.peer == peer)?;
        let places = *active.scheme.placing()?;
        active.message.failed = Some((libc::EFAULT, Cause::SenderUnreadable));
        Some(!places)
    }

    /// PUT_DONE: the sender has written all bytes of a receive whose buffer was described to it. False: it is dropped.
    pub(super) fn on_put_done(&mut self, peer: PeerId, key: Key) -> bool {
        let Some(Active { message, scheme }) = self.active.get_mut(key) else { return false };
        let described = matches!(scheme, Receiver::Fragments(f) if f.is_described());
        let good =
            message.peer == peer && described && scheme.takes_packets() && message.received == 0;
        if good {
            message.received = message.want;
        }
        good
    }

    /// The receive that the payload behind `header` of a stream is for, if it has been matched, and the payload's offset
    /// in the message.
    pub(super) fn by_stream(&mut self, peer: PeerId, header: &[u8]) -> Option<(Key, u64)> {
        match Packet::decode(header)? {
            Packet::Pushed { tx, offset } => match self.pushed.find(peer, tx)? {
                Place::Active(key) => Some((key, offset)),
                _ => None,
            },
            Packet::Fragment { rx, offset } => Some((Key::from_wire(rx), offset)),
            _ => None,
        }
    }

    /// Where the next `len` bytes of a message belong, which a stream will write. `None`: the bytes at `offset` are not
    /// the next ones, or belong to device memory.
    pub(super) fn place_streamed(
        &mut self,
        peer: PeerId,
        key: Key,
        offset: u64,
        len: usize,
    ) -> Option<SegmentList> {
        let Active { message, scheme } = self.active.get_mut(key)?;
        let here = message.received as u64 == offset && !message.target.segments.is_on_device();
        if message.peer != peer || !here || scheme.is_resumed() {
            return None;
        }
        let placing = scheme.placing().filter(|placing| !**placing)?;
        *placing = true;
        let room = len.min(message.want - message.received);
        Some(message.target.segments.slice(message.received, room))
    }

    /// The stream has written `len` bytes to where [`Self::place_streamed`] said. Returns whether the message is whole,
    /// or has failed.
    pub(super) fn on_streamed(&mut self, key: Key, len: usize) -> bool {
        let Some(Active { message, scheme }) = self.active.get_mut(key) else { return false };
        if let Some(placing) = scheme.placing() {
            *placing = false;
        }
        message.received += len.min(message.want - message.received);
        message.is_whole() || message.failed.is_some()
    }

    /// The stream from `peer` broke: the missing bytes of each message are requested.
    pub(super) fn resume_streamed(
        &mut self,
        peer: PeerId,
        outbox: &mut Outbox,
        counts: &mut Counts,
    ) {
        let sent = |active: &Active| {
            let by_packets = matches!(active.scheme, Receiver::Push(_) | Receiver::Fragments(_));
            active.message.peer == peer && by_packets && !active.message.is_whole()
        };
        for key in self.active.keys_where(sent) {
            self.resume(key, fragments::Asked::AfterStream, outbox, counts);
        }
        self.pushed.forget(peer);
    }

    /// The connection to `peer` ended, and with it the remote buffers of both sides.
    pub(super) fn lose_windows(
        &mut self,
        (peer, lane): (PeerId, LaneId),
        outbox: &mut Outbox,
        counts: &mut Counts,
    ) {
        counts.windows_lost += self.chunks.forget(peer, Some(lane));
        outbox.urgent.retain(|(to, packet)| {
            let void = matches!(packet, Packet::Window { remote, .. } if lane.made(remote));
            *to != peer || !void
        });
        for key in self.active.keys_where(|active| active.message.peer == peer) {
            if let Some(Active { message, scheme: Receiver::Put(put) }) = self.active.get_mut(key) {
                if put.lose(lane, message) {
                    self.queue_pull(key);
                }
            }
        }
    }

    /// A chunk of a receive is complete: the sender has written it, or (`read`) the device has read it. `None`: no such
    /// chunk was expected. Else the receive, and whether it is whole.
    pub(super) fn on_part(&mut self, peer: PeerId, token: Key, read: bool) -> Option<(Key, bool)> {
        let key = self.chunks.fill(peer, token, read)?;
        let Some(Active { message, scheme: Receiver::Put(put) }) = self.active.get_mut(key) else {
            return Some((key, false));
        };
        put.on_part(&mut self.chunks, token, message);
        let is_whole = message.is_whole() && message.landed().is_ok();
        self.follow_landing(key);
        Some((key, is_whole))
    }

    /// NACK: the sender will write no bytes of a message from `offset` on. False: it is dropped.
    pub(super) fn on_decline(&mut self, peer: PeerId, key: Key, offset: u64) -> bool {
        let active = self.active.get_mut(key).filter(|active| active.message.peer == peer);
        match active.map(|active| &mut active.scheme) {
            Some(Receiver::Put(put)) => {
                put.on_decline(usize::try_from(offset).unwrap_or(usize::MAX));
                self.queue_pull(key);
                true
            }
            // Requested as fragments meanwhile.
            Some(Receiver::Fragments(fragments)) => fragments.is_after_put(),
            _ => false,
        }
    }

    /// Begins the reads of chunks that are due, a bounded number of bytes.
    pub(super) fn begin_reads(&mut self, iface: &mut impl Iface, counts: &mut Counts) -> usize {
        let (mut n, mut bytes) = (0, 0);
        for _ in 0..self.chunks.due.len() {
            if bytes >= put::READ_BATCH {
                break;
            }
            let Some(token) = self.chunks.due.pop_front() else { break };
            let Some(key) = self.chunks.list.get(token).map(|lent| lent.message) else { continue };
            let Some(Active { message, scheme: Receiver::Put(put) }) = self.active.get_mut(key)
            else {
                continue;
            };
            match put.read(iface, &mut self.chunks, message, token) {
                Ok(len) => {
                    n += 1;
                    bytes += len;
                    counts.read_bytes += len as u64;
                }
                Err(SendError::Again) => {}
                Err(SendError::Unreachable(_)) => {
                    n += 1;
                    self.queue_pull(key);
                }
            }
        }
        n
    }
}
