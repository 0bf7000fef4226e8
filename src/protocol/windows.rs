//! Long messages whose bytes the sender writes straight to where they belong (PROTOCOL.md §4.12).
//! The receiver owns the pace: it lends its buffer piece by piece, and what cannot be lent or
//! written comes as fragments.

use super::Host;
use super::engine::{Core, Engine};
use super::index_list::{IndexList, Key};
use super::packet::Packet;
use super::receive::Active;
use super::rendezvous::Step;
use super::send::{Carrier, TxState};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::{
    Caps, Chunk, Iface, PeerId, Reach, Reached, SendError, Spot, Ticket, Windows,
};

/// Windows of one message that are lent at a time: one is written while others are on their way.
const AHEAD: usize = 4;
/// Windows of one message that may wait for their bytes. More than any receiver of ours lends.
const QUEUE_MAX: u8 = 64;
/// After its windows were lost so often a message goes on as fragments.
const LOSSES_MAX: u8 = 3;

/// Of what both sides move, a part is of whole pages, and of at most so many bytes: where processors move them, others wait
/// until one is done with a part, and the kernel has threads of its own go on with what takes longer than 2 ms.
const PAGE: usize = 4096;
const SHARE_MAX: usize = 128 * 1024;
/// In one turn no further part is read after so many bytes.
const READ_BATCH: usize = 512 * 1024;
/// Set in tokens of reads of messages, to tell them from those of one-sided operations.
pub(super) const OF_A_MESSAGE: u64 = 1 << 31;

/// A part of a receive that its sender may write, or that we read from what the sender offers.
#[derive(Debug)]
pub(super) struct Lent {
    pub(super) peer: PeerId,
    pub(super) message: Key,
    pub(super) offset: usize,
    len: usize,
    ticket: Ticket,
    /// We read it.
    reads: Reads,
    /// It is here, and bytes before it are missing.
    pub(super) filled: bool,
    /// Its writer sees that.
    seen: bool,
}

/// Whether a part of a receive is one that we read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reads {
    No,
    /// Among those that are to be read.
    Due,
    /// The device is at it.
    Begun,
}

/// What of a receive is lent.
#[derive(Debug, Default)]
pub(super) struct Lending {
    /// The sender was told of a window.
    pub(super) begun: bool,
    /// No further window is lent.
    over: bool,
    /// Windows that are lent, written ones before which bytes are missing included.
    pub(super) out: usize,
    /// Where the next one begins.
    next: usize,
    /// Bytes that the sender has written, and knows to be here.
    pub(super) seen: usize,
    /// How often they were lost.
    losses: u8,
    /// The sender has nothing of it any more.
    pub(super) gone: bool,
    /// The sender writes nothing from here on, and those windows are to be taken back.
    declined: Option<usize>,
    /// What is here from there on does not count: it has to come in another way.
    void: Option<usize>,
    /// The next part is one for us to read.
    reads: bool,
}

/// A window of a peer that bytes of ours are to be written into.
#[derive(Debug)]
pub(super) struct Due {
    pub(super) tx: Key,
    offset: usize,
    len: usize,
    ticket: Ticket,
}

impl<I: Iface> Engine<I> {
    /// Lends what may be lent of a receive. `None`: its bytes have to come in another way, and
    /// nothing of them was lent.
    pub(super) fn lend_windows(&mut self, key: Key, caps: &Caps) -> Option<Step> {
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
            return Some(Step::Done); // until they are written
        }
        if lending.over && !lending.begun {
            return None;
        }
        if lending.over {
            self.core.resume(key);
        }
        Some(if again { Step::Again } else { Step::Done })
    }

    /// Lends windows of a receive until as many are out as shall be.
    fn lend_ahead(&mut self, key: Key, window_max: usize) -> Result<(), SendError> {
        let Self { iface, core } = self;
        let Some(active) = core.active.get_mut(key) else { return Ok(()) };
        let (peer, lending) = (active.peer, &mut active.lending);
        // An offer ends with the connection that it was made by.
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

    /// Ends the windows that the sender of a message will not write.
    pub(super) fn take_back_declined(&mut self, key: Key) {
        let Self { iface, core } = self;
        let Some(active) = core.active.get_mut(key) else { return };
        let Some(from) = active.lending.declined.take() else { return };
        // What the device is about to read is ours again when it has.
        let ends = |lent: &Lent| lent.message == key && lent.offset >= from && !lent.is_read();
        for token in core.lent.keys_where(ends) {
            let Some(lent) = core.lent.remove(token) else { continue };
            active.lending.out -= 1;
            if !lent.filled && lent.reads == Reads::No {
                iface.take_back(lent.peer, &lent.ticket);
            }
        }
    }

    /// Reads the parts of messages that are ours to read, in order.
    pub(super) fn advance_reads(&mut self) -> usize {
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

    /// The sender cannot be told of a window. Returns whether nothing of the message is lent now.
    pub(super) fn take_back_untold(&mut self, peer: PeerId, key: Key, ticket: &Ticket) -> bool {
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

    /// Writes into the windows that peers have lent, in order.
    pub(super) fn advance_writes(&mut self) -> usize {
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
    /// It is for us to read, and not for the sender to write.
    #[cfg(test)]
    pub(super) fn is_ours(&self) -> bool {
        self.reads != Reads::No
    }

    /// The device is reading it.
    fn is_read(&self) -> bool {
        self.reads == Reads::Begun && !self.filled
    }
}

impl Lending {
    /// Nothing further is lent, and what is behind `offset` has to come in another way.
    fn end_at(&mut self, offset: usize) {
        self.over = true;
        self.void = Some(self.void.map_or(offset, |before| before.min(offset)));
    }

    /// The same of message `key`, and what of that is here does not count either.
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

/// How long the parts are of a message of `len` bytes that both sides move: as many for the one as for the other, none
/// longer than `most`.
fn share(len: usize, most: usize) -> usize {
    let each = len.div_ceil(2).div_ceil(most.max(1)).max(1);
    len.div_ceil(2 * each).next_multiple_of(PAGE).min(most)
}

/// The contiguous piece of at most `len` bytes at `offset`.
fn piece(segments: &SegmentList, offset: usize, len: usize) -> SegmentList {
    let (ranges, _) = segments.slice(offset, len).ranges();
    let [first, ..] = ranges;
    segments.slice(offset, first.len as usize)
}

impl Core {
    /// The sender has written a window.
    pub(super) fn on_filled(&mut self, peer: PeerId, token: u64, host: &mut impl Host) {
        self.on_part(peer, Key::from_wire(token), Reads::No, host);
    }

    /// We have read a part of a message.
    pub(super) fn on_part_read(&mut self, peer: PeerId, token: u64, host: &mut impl Host) {
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
            // Windows are written in the order they were lent in, so that others are rarely there.
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

    /// All bytes of `chunk`, which we have written, are where they belong.
    pub(super) fn on_written(&mut self, peer: PeerId, chunk: Chunk, host: &mut impl Host) {
        let request = self.tx.get_mut(Key::from_wire(chunk.tx));
        let Some(request) = request.filter(|request| request.peer == peer) else { return };
        let (Some(seen), TxState::Writing { .. }) = (&mut request.seen, &request.state) else {
            return;
        };
        // In order, and some perhaps twice.
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

    /// A part cannot be read: it comes as fragments, with all that is behind it.
    fn give_up_read(&mut self, token: Key) {
        let Some(Lent { message: key, offset, .. }) = self.lent.remove(token) else { return };
        let Some(active) = self.active.get_mut(key) else { return };
        active.offer = None;
        active.lending.out -= 1;
        active.lending.void_from(offset, key, &mut self.lent);
        self.queue_pull(key);
    }

    /// The sender has nothing of a message any more, which it believes to be here.
    pub(super) fn on_gone(&mut self, peer: PeerId, rx: u64) {
        let Some(active) = self.lending_to(peer, rx) else { return };
        active.lending.gone = true;
        active.lending.end_at(0);
        active.lending.declined = Some(0);
        self.queue_pull(Key::from_wire(rx));
    }

    /// The windows between `peer` and us are void. Those that we were lent stay queued: a write into
    /// them means nothing, and a new one may be among them already.
    pub(super) fn lose_windows(&mut self, peer: PeerId) {
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

    /// The sender will write nothing of a message from `offset` on.
    pub(super) fn on_decline(&mut self, peer: PeerId, rx: u64, offset: u64) {
        let Some(active) = self.lending_to(peer, rx) else { return };
        if active.cleared {
            return; // asked for as fragments meanwhile
        }
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let lending = &mut active.lending;
        lending.end_at(offset);
        lending.declined = Some(lending.declined.map_or(offset, |before| before.min(offset)));
        self.queue_pull(Key::from_wire(rx));
    }

    /// The receive `rx`, of which `peer` was lent a part. `None`, and counted: there is no such.
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

    /// The receiver lends a window.
    pub(super) fn on_window(
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
                // Under way when we declined, or lent anew after those before were lost.
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

    /// Nothing more of a message is written, from the window at `offset` on.
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

    /// There is nothing more of a message that is over. One answer says it, however often it is asked for.
    pub(super) fn say_gone(&mut self, peer: PeerId, key: Key, rx: u64) {
        let state = self.tx.get_mut(key).map(|request| &mut request.state);
        if let Some(TxState::Over { told: told @ false }) = state {
            *told = true;
            self.outbox.push_back((peer, Packet::Gone { rx }));
        }
    }

    /// One answer says it, however often it is said.
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
