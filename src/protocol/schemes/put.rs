//! PUT and GET rendezvous by a device (PROTOCOL.md §4.12). The receiver advertises its buffer (WINDOW) as remote
//! buffers, a few at a time, and the sender writes them. If the sender has advertised the message, the receiver reads
//! every second chunk itself. Bytes that can be neither advertised nor written come as fragments.

use crate::memory::SegmentList;
use crate::protocol::Host;
use crate::protocol::engine::{Core, Engine};
use crate::protocol::index_list::{IndexList, Key};
use crate::protocol::packet::Packet;
use crate::protocol::receive::Active;
use crate::protocol::schemes::fragments::Step;
use crate::protocol::send::{Carrier, TxState};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::{
    Caps, Chunk, Iface, PeerId, Reach, Reached, SendError, Spot, Ticket, Windows,
};

/// Chunks of one message that are outstanding at a time: one is written while advertisements of others travel.
const AHEAD: usize = 4;
/// Remote buffers of one message that a sender queues. More than any receiver of this version advertises.
const QUEUE_MAX: u8 = 64;
/// A message whose remote buffers were lost this often continues as fragments.
const LOSSES_MAX: u8 = 3;

/// If both sides move a message, its chunks are whole pages, of at most SHARE_MAX bytes. If processors emulate the
/// device, other work waits for each chunk, and the kernel gives work of over 2 ms to its own threads.
const PAGE: usize = 4096;
const SHARE_MAX: usize = 128 * 1024;
/// In one progress pass no further chunk is read after this many bytes.
const READ_BATCH: usize = 512 * 1024;
/// Set in the tokens of reads for messages, to tell them from those of direct RMA.
pub(in crate::protocol) const OF_A_MESSAGE: u64 = 1 << 31;

/// A chunk of a receive: advertised to the sender as a remote buffer, or read by this endpoint.
#[derive(Debug)]
pub(in crate::protocol) struct Lent {
    pub(in crate::protocol) peer: PeerId,
    pub(in crate::protocol) message: Key,
    pub(in crate::protocol) offset: usize,
    len: usize,
    ticket: Ticket,
    /// Whether this endpoint reads the chunk.
    reads: Reads,
    /// Its bytes are here, and bytes before it are missing.
    pub(in crate::protocol) filled: bool,
    /// The sender gets sender-side delivery completions for it.
    seen: bool,
}

/// Whether this endpoint reads a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reads {
    No,
    /// Queued in `Core::reads`.
    Due,
    /// The device is reading it.
    Begun,
}

/// The chunks of a receive.
#[derive(Debug, Default)]
pub(in crate::protocol) struct Lending {
    /// A remote buffer was advertised to the sender.
    pub(in crate::protocol) begun: bool,
    /// No further chunk begins.
    over: bool,
    /// Outstanding chunks, including complete ones that have gaps before them.
    pub(in crate::protocol) out: usize,
    /// Offset of the next chunk.
    next: usize,
    /// Bytes that the sender has written and knows to be delivered.
    pub(in crate::protocol) seen: usize,
    /// How often the remote buffers were lost with their connection.
    losses: u8,
    /// The sender has completed the message, and has none of its bytes any more (GONE).
    pub(in crate::protocol) gone: bool,
    /// The sender writes no bytes from this offset on (NACK): its chunks are to be invalidated.
    declined: Option<usize>,
    /// Bytes from this offset on do not count: they have to come in another way.
    void: Option<usize>,
    /// The next chunk is for this endpoint to read.
    reads: bool,
}

/// A remote buffer that bytes of this endpoint have to be written into.
#[derive(Debug)]
pub(in crate::protocol) struct Due {
    pub(in crate::protocol) tx: Key,
    offset: usize,
    len: usize,
    ticket: Ticket,
}

impl<I: Iface> Engine<I> {
    /// Advertises remote buffers of a receive. `None`: its bytes have to come in another way, and none was advertised.
    pub(in crate::protocol) fn lend_windows(&mut self, key: Key, caps: &Caps) -> Option<Step> {
        self.take_back_declined(key);
        let Some(active) = self.core.active.get_mut(key) else { return Some(Step::Done) };
        let (peer, lending) = (active.peer, &mut active.lending);
        if caps.window_max == 0 || active.want < caps.window_min {
            lending.over = true;
        }
        let mut again = false;
        if !lending.over {
            match self.iface.windows(peer) {
                Windows::No => lending.over = true,
                Windows::Later => again = true,
                Windows::Ready => match self.lend_ahead(key, caps.window_max) {
                    Ok(()) => {}
                    Err(SendError::Again) => again = true,
                    Err(SendError::Unreachable(_)) => {
                        self.core.active.get_mut(key)?.lending.over = true;
                    }
                },
            }
        }
        let lending = &self.core.active.get(key)?.lending;
        if lending.out > 0 {
            return Some(Step::Done); // until the chunks are complete
        }
        if lending.over && !lending.begun {
            return None;
        }
        if lending.over {
            self.core.resume(key);
        }
        Some(if again { Step::Again } else { Step::Done })
    }

    /// Begins chunks of a receive until [`AHEAD`] are outstanding.
    fn lend_ahead(&mut self, key: Key, window_max: usize) -> Result<(), SendError> {
        let Self { iface, core } = self;
        let Some(active) = core.active.get_mut(key) else { return Ok(()) };
        let (peer, lending) = (active.peer, &mut active.lending);
        // The sender's remote key is void when the connection that it was made for ends.
        active.offer = active.offer.filter(|offer| iface.epoch(peer) == Some(offer.connection));
        let most = match active.offer {
            Some(_) => share(active.want, window_max.min(SHARE_MAX)),
            None => window_max,
        };
        while lending.out < AHEAD && lending.next < active.want {
            let offset = lending.next;
            let part = piece(&active.target.segments, offset, most.min(active.want - offset));
            let len = part.len();
            if len == 0 {
                return Err(SendError::Unreachable(Errno(libc::EINVAL)));
            }
            let reads =
                if lending.reads && active.offer.is_some() { Reads::Due } else { Reads::No };
            let (ticket, filled, seen) = (Ticket::default(), false, false);
            let lent = Lent { peer, message: key, offset, len, ticket, reads, filled, seen };
            let token = core.lent.push_back(lent);
            if reads == Reads::Due {
                core.reads.push_back(token);
                lending.reads = false;
                lending.out += 1;
                lending.next += len;
                continue;
            }
            let ticket = match iface.lend(peer, &part, token.to_wire()) {
                Ok(ticket) => ticket,
                Err(error) => {
                    core.lent.remove(token);
                    return Err(error);
                }
            };
            if let Some(lent) = core.lent.get_mut(token) {
                (lent.ticket, lent.seen) = (ticket, iface.sees_writes(&ticket));
            }
            lending.begun = true;
            lending.reads = true;
            lending.out += 1;
            lending.next += len;
            let (offset, len) = (offset as u64, len as u64);
            let window = Packet::Window { tx: active.tx, rx: key.to_wire(), offset, len, ticket };
            core.outbox.push_back((peer, window));
        }
        Ok(())
    }

    /// Invalidates the remote buffers that the sender of a message will not write.
    pub(in crate::protocol) fn take_back_declined(&mut self, key: Key) {
        let Self { iface, core } = self;
        let Some(active) = core.active.get_mut(key) else { return };
        let Some(from) = active.lending.declined.take() else { return };
        // A chunk that the device is reading ends when that read does.
        let ends = |lent: &Lent| lent.message == key && lent.offset >= from && !lent.is_read();
        for token in core.lent.keys_where(ends) {
            let Some(lent) = core.lent.remove(token) else { continue };
            active.lending.out -= 1;
            if !lent.filled && lent.reads == Reads::No {
                iface.take_back(lent.peer, &lent.ticket);
            }
        }
    }

    /// Invalidates the keys of finished sends, and begins the queued reads in order.
    pub(in crate::protocol) fn advance_reads(&mut self) -> usize {
        let Self { iface, core } = self;
        let (mut n, mut bytes) = (0, 0);
        for (peer, offer) in core.withdrawn.drain(..) {
            iface.withdraw(peer, &offer);
        }
        for _ in 0..core.reads.len() {
            if bytes >= READ_BATCH {
                break;
            }
            let Some(token) = core.reads.pop_front() else { break };
            let Some(lent) = core.lent.get_mut(token) else { continue };
            let (peer, offset, len) = (lent.peer, lent.offset, lent.len);
            let Some(active) = core.active.get(lent.message) else { continue };
            let end = active.offer.and_then(|offer| offer.addr.checked_add(offset as u64));
            let read = match (active.offer, end) {
                (Some(Ticket { connection, key, .. }), Some(addr)) => {
                    let range = Range { addr, len: len as u64 };
                    let spot = Spot { epoch: connection, key, range };
                    let token = token.to_wire() | OF_A_MESSAGE;
                    let how = Reach { reads: true, delivered: false, stays: false, token };
                    iface.reach(peer, &spot, &active.target.segments.slice(offset, len), how)
                }
                _ => Err(SendError::Unreachable(Errno(libc::ESTALE))),
            };
            match read {
                Ok(Reached::Begun) => {
                    n += 1;
                    bytes += len;
                    lent.reads = Reads::Begun;
                    core.counts.read_bytes += len as u64;
                }
                Err(SendError::Again) => core.reads.push_back(token),
                Ok(Reached::Moved(_)) | Err(SendError::Unreachable(_)) => {
                    n += 1;
                    core.give_up_read(token);
                }
            }
        }
        n
    }

    /// A WINDOW could not be sent: invalidates its remote buffer. Returns whether none of the message is outstanding.
    pub(in crate::protocol) fn take_back_untold(
        &mut self,
        peer: PeerId,
        key: Key,
        ticket: &Ticket,
    ) -> bool {
        let Self { iface, core } = self;
        let Some(active) = core.active.get_mut(key) else { return false };
        let is_it = |lent: &Lent| {
            let waits = lent.reads == Reads::No && !lent.filled;
            lent.message == key && lent.ticket == *ticket && waits
        };
        for token in core.lent.keys_where(is_it) {
            let Some(lent) = core.lent.remove(token) else { continue };
            iface.take_back(peer, ticket);
            active.lending.out -= 1;
            active.lending.void_from(lent.offset, key, &mut core.lent);
        }
        active.lending.over && active.lending.out == 0
    }

    /// Writes into the remote buffers that peers have advertised, in order.
    pub(in crate::protocol) fn advance_writes(&mut self) -> usize {
        let mut n = 0;
        let mut full: Vec<PeerId> = Vec::new();
        for _ in 0..self.core.due.len() {
            let Some(due) = self.core.due.pop_front() else { break };
            let Some(request) = self.core.tx.get_mut(due.tx) else { continue };
            let peer = request.peer;
            let TxState::Writing { queued, .. } = &mut request.state else { continue };
            if full.contains(&peer) {
                self.core.due.push_back(due);
                continue;
            }
            let part = request.payload.segments().slice(due.offset, due.len);
            let (offset, len) = (due.offset as u64, due.len as u64);
            let chunk = Chunk { tx: due.tx.to_wire(), offset, len };
            match self.iface.write(peer, &part, &due.ticket, chunk) {
                Ok(()) => {
                    n += 1;
                    *queued = queued.saturating_sub(1);
                    self.core.counts.window_bytes += due.len as u64;
                }
                Err(SendError::Again) => {
                    full.push(peer);
                    self.core.due.push_back(due);
                }
                Err(SendError::Unreachable(_)) => {
                    n += 1;
                    self.core.decline(due.tx, due.offset);
                }
            }
        }
        n
    }
}

impl Lent {
    /// Whether this endpoint reads it, and the sender does not write it.
    #[cfg(test)]
    pub(in crate::protocol) fn is_ours(&self) -> bool {
        self.reads != Reads::No
    }

    /// Whether the device is reading it.
    fn is_read(&self) -> bool {
        self.reads == Reads::Begun && !self.filled
    }
}

impl Lending {
    /// Begins no further chunk: bytes from `offset` on have to come in another way.
    fn end_at(&mut self, offset: usize) {
        self.over = true;
        self.void = Some(self.void.map_or(offset, |before| before.min(offset)));
    }

    /// As [`Self::end_at`], and drops the complete chunks of message `key` from `offset` on.
    fn void_from(&mut self, offset: usize, key: Key, lent: &mut IndexList<Lent>) {
        self.end_at(offset);
        for part in
            lent.keys_where(|lent| lent.message == key && lent.filled && lent.offset >= offset)
        {
            lent.remove(part);
            self.out -= 1;
        }
    }
}

/// Length of the chunks of a message of `len` bytes that both sides move: the same number for both sides, none longer
/// than `most`.
fn share(len: usize, most: usize) -> usize {
    let each = len.div_ceil(2).div_ceil(most.max(1)).max(1);
    len.div_ceil(2 * each).next_multiple_of(PAGE).min(most)
}

/// The contiguous range of at most `len` bytes at `offset`.
fn piece(segments: &SegmentList, offset: usize, len: usize) -> SegmentList {
    let (ranges, _) = segments.slice(offset, len).ranges();
    let [first, ..] = ranges;
    segments.slice(offset, first.len as usize)
}

impl Core {
    /// The sender has written a remote buffer.
    pub(in crate::protocol) fn on_filled(
        &mut self,
        peer: PeerId,
        token: u64,
        host: &mut impl Host,
    ) {
        self.on_part(peer, Key::from_wire(token), Reads::No, host);
    }

    /// The device has read a chunk of a message.
    pub(in crate::protocol) fn on_part_read(
        &mut self,
        peer: PeerId,
        token: u64,
        host: &mut impl Host,
    ) {
        self.on_part(peer, Key::from_wire(token), Reads::Begun, host);
    }

    fn on_part(&mut self, peer: PeerId, token: Key, reads: Reads, host: &mut impl Host) {
        let waits = |lent: &&mut Lent| lent.peer == peer && !lent.filled && lent.reads == reads;
        let Some(lent) = self.lent.get_mut(token).filter(waits) else {
            self.counts.dropped += 1;
            return;
        };
        lent.filled = true;
        let (key, offset) = (lent.message, lent.offset);
        let Some(active) = self.active.get_mut(key) else { return };
        if active.lending.void.is_some_and(|void| offset >= void) {
            self.lent.remove(token);
            active.lending.out -= 1;
            return self.queue_pull(key);
        }
        let mut next = Some(token);
        while let Some(lent) = next.and_then(|token| self.lent.get(token)) {
            if lent.offset != active.received {
                break;
            }
            active.received += lent.len;
            active.lending.out -= 1;
            active.lending.seen += if lent.seen { lent.len } else { 0 };
            next.and_then(|token| self.lent.remove(token));
            // Remote buffers are written in the order of their WINDOWs: complete ones behind a gap are rare.
            next = match active.lending.out {
                0 => None,
                _ => {
                    let at = active.received;
                    let follows =
                        |lent: &Lent| lent.message == key && lent.filled && lent.offset == at;
                    self.lent.keys_where(follows).first().copied()
                }
            };
        }
        if active.received == active.want {
            self.finish_active(key, host);
        } else {
            self.queue_pull(key);
        }
    }

    /// The bytes of `chunk`, which this endpoint has written, are delivered.
    pub(in crate::protocol) fn on_written(
        &mut self,
        peer: PeerId,
        chunk: Chunk,
        host: &mut impl Host,
    ) {
        let request = self.tx.get_mut(Key::from_wire(chunk.tx));
        let Some(request) = request.filter(|request| request.peer == peer) else { return };
        let (Some(seen), TxState::Writing { .. }) = (&mut request.seen, &request.state) else {
            return;
        };
        // The reports come in order; one may be repeated.
        if chunk.offset as usize <= *seen {
            *seen = (*seen).max((chunk.offset + chunk.len) as usize);
        }
        if *seen < request.payload.segments().len() {
            return;
        }
        request.state = TxState::Over { told: false };
        if !std::mem::replace(&mut request.completed, true) {
            host.complete(&request.completion());
        }
    }

    /// A chunk cannot be read: it comes as fragments, with all bytes behind it.
    fn give_up_read(&mut self, token: Key) {
        let Some(Lent { message: key, offset, .. }) = self.lent.remove(token) else { return };
        let Some(active) = self.active.get_mut(key) else { return };
        active.offer = None;
        active.lending.out -= 1;
        active.lending.void_from(offset, key, &mut self.lent);
        self.queue_pull(key);
    }

    /// GONE: the sender has completed the message as delivered, and has none of its bytes any more.
    pub(in crate::protocol) fn on_gone(&mut self, peer: PeerId, rx: u64) {
        let Some(active) = self.lending_to(peer, rx) else { return };
        active.lending.gone = true;
        active.lending.end_at(0);
        active.lending.declined = Some(0);
        self.queue_pull(Key::from_wire(rx));
    }

    /// The connection to `peer` ended, and with it the remote buffers of both sides. Those of the peer stay in `due`: a
    /// write to them has no effect, and a new one may be among them already.
    pub(in crate::protocol) fn lose_windows(&mut self, peer: PeerId) {
        for token in self.lent.keys_where(|lent| lent.peer == peer) {
            self.lent.remove(token);
            self.counts.windows_lost += 1;
        }
        let void = |(to, packet): &(PeerId, Packet)| {
            *to == peer && matches!(packet, Packet::Window { .. })
        };
        self.outbox.retain(|answer| !void(answer));
        for key in self.active.keys_where(|active| active.peer == peer && active.lending.out > 0) {
            let Some(active) = self.active.get_mut(key) else { continue };
            active.offer = None;
            let lending = &mut active.lending;
            lending.out = 0;
            lending.next = active.received;
            lending.losses += 1;
            lending.over |= lending.losses >= LOSSES_MAX;
            self.queue_pull(key);
        }
    }

    /// NACK: the sender will write no bytes of a message from `offset` on.
    pub(in crate::protocol) fn on_decline(&mut self, peer: PeerId, rx: u64, offset: u64) {
        let Some(active) = self.lending_to(peer, rx) else { return };
        if active.cleared {
            return; // requested as fragments meanwhile
        }
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let lending = &mut active.lending;
        lending.end_at(offset);
        lending.declined = Some(lending.declined.map_or(offset, |before| before.min(offset)));
        self.queue_pull(Key::from_wire(rx));
    }

    /// The receive `rx`, if it has advertised a remote buffer to `peer`. Else `None`, counted as dropped.
    fn lending_to(&mut self, peer: PeerId, rx: u64) -> Option<&mut Active> {
        let active = self.active.get_mut(Key::from_wire(rx));
        let active = active.filter(|active| active.peer == peer && active.lending.begun);
        self.counts.dropped += u64::from(active.is_none());
        active
    }

    fn queue_pull(&mut self, key: Key) {
        if !self.pulls.contains(&key) {
            self.pulls.push_back(key);
        }
    }

    /// WINDOW: the receiver advertises a remote buffer.
    pub(in crate::protocol) fn on_window(
        &mut self,
        peer: PeerId,
        tx: u64,
        rx: u64,
        offset: u64,
        len: u64,
        ticket: Ticket,
    ) {
        let key = Key::from_wire(tx);
        let Some(request) = self.tx.get_mut(key).filter(|request| request.peer == peer) else {
            self.counts.dropped += 1;
            return;
        };
        let total = request.payload.segments().len() as u64;
        let inside = len > 0 && offset.checked_add(len).is_some_and(|end| end <= total);
        let (offset, len) = (offset as usize, len as usize);
        let queued = match &mut request.state {
            _ if !inside => None,
            TxState::Over { .. } => {
                self.say_gone(peer, key, rx);
                return;
            }
            TxState::AwaitingAnswer if request.carrier == Carrier::Undecided => Some(0),
            TxState::Writing { rx: known, queued } if *known == rx => Some(*queued),
            TxState::Declined { rx: known, from } if *known == rx => {
                // It was sent before the NACK arrived, or again after the earlier ones were lost.
                if offset < *from {
                    *from = offset;
                    self.say_declined(peer, rx, offset);
                }
                return;
            }
            _ => None,
        };
        let Some(queued) = queued.filter(|queued| *queued < QUEUE_MAX) else {
            self.counts.dropped += 1;
            return;
        };
        request.state = TxState::Writing { rx, queued: queued + 1 };
        self.due.push_back(Due { tx: key, offset, len, ticket });
    }

    /// Sends a NACK: no bytes of the message are written from `offset` on, nor from an earlier queued buffer on.
    fn decline(&mut self, tx: Key, offset: usize) {
        let same = self.due.iter().filter(|due| due.tx == tx);
        let from = same.map(|due| due.offset).fold(offset, usize::min);
        let Some(request) = self.tx.get_mut(tx) else { return };
        let TxState::Writing { rx, .. } = request.state else { return };
        request.state = TxState::Declined { rx, from };
        let peer = request.peer;
        self.counts.declined += 1;
        self.say_declined(peer, rx, from);
    }

    /// Replies GONE: the message is complete and has no more bytes. One reply serves any number of requests.
    pub(in crate::protocol) fn say_gone(&mut self, peer: PeerId, key: Key, rx: u64) {
        let state = self.tx.get_mut(key).map(|request| &mut request.state);
        if let Some(TxState::Over { told: told @ false }) = state {
            *told = true;
            self.outbox.push_back((peer, Packet::Gone { rx }));
        }
    }

    /// Queues a NACK. A queued one for the same receive is changed instead.
    fn say_declined(&mut self, peer: PeerId, rx: u64, from: usize) {
        let from = from as u64;
        for (to, packet) in &mut self.outbox {
            if let Packet::Decline { rx: other, offset } = packet {
                if *to == peer && *other == rx {
                    *offset = from.min(*offset);
                    return;
                }
            }
        }
        self.outbox.push_back((peer, Packet::Decline { rx, offset: from }));
    }
}
