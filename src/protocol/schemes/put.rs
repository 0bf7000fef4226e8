//! PUT and GET rendezvous by a device (PROTOCOL.md §4.12). The receiver advertises its buffer (WINDOW) as remote
//! buffers, a few at a time, and the sender writes them. If the sender has advertised the message, the receiver reads
//! every second chunk itself. Bytes that can be neither advertised nor written come as fragments.
//!
//! Device memory that the lane does not take goes through bounce buffers, at either side. The receiver advertises some, and
//! copies each to the device when it is full, while others are written. The sender copies the bytes of the next remote
//! buffers while it writes one.

use crate::memory::bounce::{self, Gathered, Part};
use crate::memory::{Buffers as _, MAX_SEGMENTS, SegmentList};
use crate::protocol::Cause;
use crate::protocol::index_list::{IndexList, Key};
use crate::protocol::limits::Counts;
use crate::protocol::message::{Inbound, Next, Outbound};
use crate::protocol::outbox::Outbox;
use crate::protocol::packet::Packet;
use crate::protocol::select::{self, Buffers};
use crate::sys::Errno;
use crate::transport::{
    Access, Iface, LaneCaps, LaneId, PeerId, Prepared, Purpose, Put, Registered, Remote, RemoteKey,
    SendError,
};
use std::collections::VecDeque;

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
/// Most bytes of one copy between memory of the host and of a device: a device may take the processor's time for that.
const STEP: usize = 1 << 20;
/// In one progress pass no further chunk is read after this many bytes.
pub(in crate::protocol) const READ_BATCH: usize = 512 * 1024;
/// Device memory cannot be copied, or not to one remote buffer.
const UNREADABLE: SendError = SendError::Unreachable(Errno(libc::EIO));
/// The remote key of a message is void.
const STALE: SendError = SendError::Unreachable(Errno(libc::ESTALE));
/// Set in the tokens of gets, and of puts, for messages, to tell them from those of direct RMA.
pub(in crate::protocol) const GET_OF_A_MESSAGE: u64 = 1 << 31;
pub(in crate::protocol) const PUT_OF_A_MESSAGE: u64 = 1 << 30;

/// A chunk of a receive: advertised to the sender as a remote buffer, or read by this endpoint.
#[derive(Debug)]
pub(in crate::protocol) struct Lent {
    pub(in crate::protocol) peer: PeerId,
    pub(in crate::protocol) message: Key,
    pub(in crate::protocol) offset: usize,
    len: usize,
    lane: LaneId,
    mover: Mover,
    /// Its bytes are here, and bytes before it are missing.
    pub(in crate::protocol) filled: bool,
    /// They come to this buffer first.
    bounce: Option<Gathered>,
}

/// Which side moves a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mover {
    /// The sender writes it. `seen`: it gets a sender-side delivery completion.
    Sender { remote: RemoteKey, seen: bool },
    /// This endpoint reads it; queued in [`Chunks::due`].
    Due,
    /// The device is reading it.
    Device,
}

impl Lent {
    /// Whether this endpoint reads it, and the sender does not write it.
    #[cfg(test)]
    pub(in crate::protocol) fn is_ours(&self) -> bool {
        !matches!(self.mover, Mover::Sender { .. })
    }
}

/// The chunks of all receives.
#[derive(Debug, Default)]
pub(in crate::protocol) struct Chunks {
    /// The key is the token that the transport returns.
    pub(in crate::protocol) list: IndexList<Lent>,
    /// Those that this endpoint has to read.
    pub(in crate::protocol) due: VecDeque<Key>,
}

/// The receiver's side before the first remote buffer: what the RTS said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::protocol) struct Announced {
    /// The remote key to read the message by, if the sender advertises it.
    pub(in crate::protocol) offer: Option<RemoteKey>,
    /// Sender-side delivery completion: a FIN may be late.
    pub(in crate::protocol) sees: bool,
}

/// The receiver's side, once a remote buffer was advertised.
#[derive(Debug)]
pub(in crate::protocol) struct Receiver {
    /// The lane of all outstanding chunks.
    lane: LaneId,
    /// As in [`Announced`], as long as it is valid and of the same lane.
    pub(in crate::protocol) offer: Option<RemoteKey>,
    /// Outstanding chunks, including complete ones that have gaps before them.
    out: usize,
    /// Offset of the next chunk.
    next: usize,
    /// The next chunk is for this endpoint to read.
    reads: bool,
    /// Sender-side delivery completion: bytes that the sender has written and knows to be delivered. `None`: it waits
    /// for the FIN.
    seen: Option<usize>,
    /// How often the remote buffers were lost with their connection.
    losses: u8,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Further chunks begin.
    Open,
    /// No further chunk begins.
    /// * Bytes from `void` on do not count: they have to come in another way.
    /// * The sender writes no bytes from `nack` on (NACK).
    Over { void: usize, nack: usize },
    /// The sender has completed the message, and has none of its bytes any more (GONE).
    Gone,
}

/// The sender's side, once the receiver has advertised a remote buffer.
#[derive(Debug)]
pub(in crate::protocol) enum Sender {
    /// `queued` remote buffers have still to be written. `seen`: with sender-side delivery completion, the number of
    /// bytes from the start of the message that are known to be delivered.
    Writing { rx: u64, queued: u8, seen: Option<usize> },
    /// A NACK was sent: no bytes are written from `from` on, and the receiver has to request them in another way.
    Declined { rx: u64, from: usize },
    /// All of it was written and the send is complete; a FIN will follow some time. `told`: the receiver asked for more
    /// and was answered that there is none (GONE).
    Over { told: bool },
}

/// A remote buffer that bytes of this endpoint have to be written into.
#[derive(Debug)]
pub(in crate::protocol) struct Due {
    pub(in crate::protocol) tx: Key,
    offset: usize,
    len: usize,
    remote: RemoteKey,
    /// Its bytes go through bounce buffers. `None`: nobody has asked yet.
    staged: Option<bool>,
    /// Copies of the first of them.
    parts: Vec<Part>,
}

/// Bytes of a message that the device is writing.
#[derive(Debug)]
pub(in crate::protocol) struct Wrote {
    pub(in crate::protocol) peer: PeerId,
    pub(in crate::protocol) tx: Key,
    offset: usize,
    len: usize,
    /// The kind of the remote key, which names the lane.
    pub(in crate::protocol) kind: u8,
    /// Its end is a sender-side delivery completion.
    pub(in crate::protocol) confirms: bool,
    /// The copies of its bytes that the device reads, if they were copied.
    pub(in crate::protocol) parts: Vec<Part>,
}

impl Receiver {
    /// Advertises the first remote buffers of a receive. Errors: as `Lending::lend`, and no buffer is advertised.
    pub(in crate::protocol) fn begin(
        iface: &mut impl Iface,
        chunks: &mut Chunks,
        outbox: &mut Outbox,
        (key, message): (Key, &Inbound),
        (announced, by): (Announced, &LaneCaps),
    ) -> Result<Self, SendError> {
        let (Announced { offer, sees }, lane) = (announced, by.lane);
        let (next, seen, phase) = (message.received, sees.then_some(0), Phase::Open);
        let mut begun = Self { lane, offer, out: 0, next, reads: false, seen, losses: 0, phase };
        match begun.advertise(iface, chunks, outbox, (key, message), by) {
            Err(error) if begun.out == 0 => return Err(error),
            Err(SendError::Unreachable(_)) => begun.close(usize::MAX),
            Ok(()) | Err(SendError::Again) => {}
        }
        Ok(begun)
    }

    /// The only lane for further chunks now, if chunks are outstanding: all are lost with one lane, or none.
    pub(in crate::protocol) fn bound_to(&self) -> Option<LaneId> {
        (self.out > 0).then_some(self.lane)
    }

    /// Advertises more remote buffers. `by`: whether remote buffers work now, and on which lane.
    pub(in crate::protocol) fn step(
        &mut self,
        iface: &mut impl Iface,
        chunks: &mut Chunks,
        outbox: &mut Outbox,
        (key, message): (Key, &Inbound),
        by: Buffers,
    ) -> Next {
        self.take_back(iface, chunks, key);
        let mut again = false;
        match (self.phase, by) {
            // A device that is reading goes on, and its completion leads here again.
            (Phase::Gone, _) if self.out > 0 => return Next::Waits,
            (Phase::Gone, _) => return Next::Failed(libc::EIO, Cause::LinkBroke),
            (Phase::Over { .. }, _) => {}
            (Phase::Open, Buffers::No) => self.close(usize::MAX),
            (Phase::Open, Buffers::Later) => again = true,
            (Phase::Open, Buffers::On(lane)) => {
                match self.advertise(iface, chunks, outbox, (key, message), &lane) {
                    Ok(()) => {}
                    Err(SendError::Again) => again = true,
                    Err(SendError::Unreachable(_)) => self.close(usize::MAX),
                }
            }
        }
        match self.phase {
            _ if self.out > 0 => Next::Waits, // until the chunks are complete
            Phase::Open if again => Next::Again,
            Phase::Open => Next::Waits,
            _ => Next::Resume,
        }
    }

    /// Begins chunks until [`AHEAD`] are outstanding.
    fn advertise(
        &mut self,
        iface: &mut impl Iface,
        chunks: &mut Chunks,
        outbox: &mut Outbox,
        (key, message): (Key, &Inbound),
        by: &LaneCaps,
    ) -> Result<(), SendError> {
        let (peer, lane, segments) = (message.peer, by.lane, &message.target.segments);
        self.lane = lane;
        let staged = segments.is_on_device() && !by.device && !by.reads;
        // The sender's remote key is void when the connection that it was made for ends.
        let current = |key: &RemoteKey| lane.made(key) && iface.is_current(peer, key);
        self.offer = self.offer.filter(|key| !staged && current(key));
        let most = self.chunk_max(message, by, staged);
        while self.out < AHEAD && self.next < message.want {
            let offset = self.next;
            let room = most.min(message.want - offset);
            let memory = self.memory(iface, peer, segments, (offset, room), staged)?;
            let Some((part, bounce)) = memory else { return Ok(()) };
            let len = part.len();
            if len == 0 {
                return Err(SendError::Unreachable(Errno(libc::EINVAL)));
            }
            let (mover, filled) = (Mover::Due, false);
            let chunk = Lent { peer, message: key, offset, len, lane, mover, filled, bounce };
            let token = chunks.list.push_back(chunk);
            if (self.reads || by.reads) && self.offer.is_some() {
                chunks.due.push_back(token);
                self.reads = false;
            } else {
                let purpose = Purpose::Receive { token: token.to_wire() };
                let made = match iface.register(peer, lane, &part, purpose) {
                    Registered::Yes(made) => made,
                    other => {
                        chunks.list.remove(token);
                        return Err(match other {
                            Registered::Later => SendError::Again,
                            _ => SendError::Unreachable(Errno(libc::EFAULT)),
                        });
                    }
                };
                let remote = made.key;
                if let Some(lent) = chunks.list.get_mut(token) {
                    lent.mover = Mover::Sender { remote, seen: made.confirms };
                }
                self.reads = true;
                let (tx, rx, offset, len) = (message.tx, key.to_wire(), offset as u64, len as u64);
                outbox.reply(peer, Packet::Window { tx, rx, offset, len, remote });
            }
            self.out += 1;
            self.next += len;
        }
        Ok(())
    }

    /// The memory of a chunk of at most `room` bytes: a bounce buffer for device memory if it is `staged`. `None`: there is none
    /// before others of the message come back.
    fn memory(
        &self,
        iface: &mut impl Iface,
        peer: PeerId,
        segments: &SegmentList,
        (offset, room): (usize, usize),
        staged: bool,
    ) -> Result<Option<(SegmentList, Option<Gathered>)>, SendError> {
        if !staged {
            return Ok(Some((segments.piece(offset, room), None)));
        }
        let part = segments.of_one_site(offset, room);
        if part.site().is_none() {
            return Ok(Some((part, None)));
        }
        match iface.lends(peer, self.lane) {
            Prepared::Ready => {}
            Prepared::Later => return Err(SendError::Again),
            Prepared::No => return Err(SendError::Unreachable(Errno(libc::EFAULT))),
        }
        match Gathered::begin(segments, (offset, part.len()), self.out > 0) {
            Ok(Some(bounce)) => Ok(Some((bounce.bytes(), Some(bounce)))),
            Ok(None) if self.out > 0 => Ok(None),
            _ => Err(UNREADABLE),
        }
    }

    /// Most bytes of a chunk.
    fn chunk_max(&self, message: &Inbound, by: &LaneCaps, staged: bool) -> usize {
        match self.offer {
            _ if staged => by.receive_max.min(bounce::LEN),
            None if by.reads => by.receive_max.min(STEP),
            Some(_) if !by.reads => share(message.want, by.receive_max.min(SHARE_MAX)),
            Some(_) if !message.target.segments.is_on_device() => by.receive_max.min(STEP),
            _ => by.receive_max,
        }
    }

    /// Invalidates the remote buffers that the sender will not write.
    fn take_back(&mut self, iface: &mut impl Iface, chunks: &mut Chunks, key: Key) {
        let from = match self.phase {
            Phase::Open => return,
            Phase::Over { nack, .. } => nack,
            Phase::Gone => 0,
        };
        // A chunk that the device is reading ends when that read does.
        let is_read = |lent: &Lent| lent.mover == Mover::Device && !lent.filled;
        let ends = |lent: &Lent| lent.message == key && lent.offset >= from && !is_read(lent);
        for token in chunks.list.keys_where(ends) {
            let Some(lent) = chunks.list.remove(token) else { continue };
            self.out -= 1;
            if let (Mover::Sender { remote, .. }, false) = (lent.mover, lent.filled) {
                iface.invalidate(lent.peer, &remote);
            }
        }
    }

    /// A WINDOW could not be sent: invalidates its remote buffer. Returns whether none of the message is outstanding.
    pub(in crate::protocol) fn take_back_untold(
        &mut self,
        iface: &mut impl Iface,
        chunks: &mut Chunks,
        key: Key,
        remote: &RemoteKey,
    ) -> bool {
        let is_it = |lent: &Lent| {
            let its = matches!(lent.mover, Mover::Sender { remote: other, .. } if other == *remote);
            lent.message == key && its && !lent.filled
        };
        for token in chunks.list.keys_where(is_it) {
            let Some(lent) = chunks.list.remove(token) else { continue };
            iface.invalidate(lent.peer, remote);
            self.out -= 1;
            self.void_from(lent.offset, key, chunks);
        }
        self.phase != Phase::Open && self.out == 0
    }

    /// As many chunks are outstanding as may be.
    pub(in crate::protocol) fn is_busy(&self) -> bool {
        self.is_open() && self.out >= AHEAD
    }

    /// Whether further chunks begin.
    pub(in crate::protocol) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Begins no further chunk: bytes from `offset` on have to come in another way.
    fn close(&mut self, offset: usize) {
        self.phase = match self.phase {
            Phase::Open => Phase::Over { void: offset, nack: usize::MAX },
            Phase::Over { void, nack } => Phase::Over { void: void.min(offset), nack },
            Phase::Gone => Phase::Gone,
        };
    }

    /// As [`Self::close`], and drops the complete chunks from `offset` on.
    fn void_from(&mut self, offset: usize, key: Key, chunks: &mut Chunks) {
        self.close(offset);
        let voids = |lent: &Lent| lent.message == key && lent.filled && lent.offset >= offset;
        for part in chunks.list.keys_where(voids) {
            chunks.list.remove(part);
            self.out -= 1;
        }
    }

    /// NACK: the sender will write no bytes from `offset` on.
    pub(in crate::protocol) fn on_decline(&mut self, offset: usize) {
        self.close(offset);
        if let Phase::Over { nack, .. } = &mut self.phase {
            *nack = offset.min(*nack);
        }
    }

    /// GONE: the sender has completed the message as delivered, and has none of its bytes any more.
    pub(in crate::protocol) fn on_gone(&mut self) {
        self.phase = Phase::Gone;
    }

    /// A lane was lost, and with it the remote buffers of both sides. False: none of them was outstanding.
    pub(in crate::protocol) fn lose(&mut self, lane: LaneId, message: &Inbound) -> bool {
        if self.bound_to() != Some(lane) {
            return false;
        }
        self.offer = None;
        self.out = 0;
        self.next = message.received;
        self.losses += 1;
        if self.losses >= LOSSES_MAX {
            self.close(usize::MAX);
        }
        true
    }

    /// A chunk is complete: moves the start of the missing bytes behind it, if none are missing before it.
    pub(in crate::protocol) fn on_part(
        &mut self,
        chunks: &mut Chunks,
        token: Key,
        message: &mut Inbound,
    ) {
        let Some(Lent { message: key, offset, .. }) = chunks.list.get(token) else { return };
        let (key, offset) = (*key, *offset);
        let void = match self.phase {
            Phase::Open => usize::MAX,
            Phase::Over { void, .. } => void,
            Phase::Gone => 0,
        };
        if offset >= void || message.failed.is_some() {
            chunks.list.remove(token);
            self.out -= 1;
            return;
        }
        let mut next = Some(token);
        while let Some(token) = next {
            let Some(lent) = chunks.list.get(token).filter(|lent| lent.offset == message.received)
            else {
                break;
            };
            message.received += lent.len;
            self.out -= 1;
            if let (Some(seen), Mover::Sender { seen: true, .. }) = (&mut self.seen, lent.mover) {
                *seen += lent.len;
            }
            let full = chunks.list.remove(token).and_then(|lent| lent.bounce);
            full.into_iter().for_each(|bounce| message.land(bounce));
            // Remote buffers are written in the order of their WINDOWs: complete ones behind a gap are rare.
            next = match self.out {
                0 => None,
                _ => {
                    let at = message.received;
                    let follows =
                        |lent: &Lent| lent.message == key && lent.filled && lent.offset == at;
                    chunks.list.keys_where(follows).first().copied()
                }
            };
        }
    }

    /// The sender knows already that all of the message is delivered.
    pub(in crate::protocol) fn is_seen(&self, message: &Inbound) -> bool {
        self.seen.is_some_and(|seen| seen as u64 == message.len)
    }

    /// Begins to read a chunk that this endpoint has to read. Returns its length. Errors: `Again`; `Unreachable`: it
    /// has to come in another way.
    pub(in crate::protocol) fn read(
        &mut self,
        iface: &mut impl Iface,
        chunks: &mut Chunks,
        message: &Inbound,
        token: Key,
    ) -> Result<usize, SendError> {
        let Some(lent) = chunks.list.get_mut(token) else { return Ok(0) };
        let begun = self.offer.ok_or(STALE).and_then(|key| {
            let from = Remote { key, offset: lent.offset as u64 };
            let local = message.target.segments.slice(lent.offset, lent.len);
            iface.get(message.peer, &local, &from, token.to_wire() | GET_OF_A_MESSAGE)
        });
        match begun {
            Ok(Access::Begun) => {
                lent.mover = Mover::Device;
                Ok(lent.len)
            }
            Err(SendError::Again) => {
                chunks.due.push_back(token);
                Err(SendError::Again)
            }
            Ok(Access::Moved(_) | Access::Unsure | Access::Silent)
            | Err(SendError::Unreachable(_)) => {
                self.give_up_read(chunks, token);
                Err(STALE)
            }
        }
    }

    /// A chunk cannot be read: it comes as fragments, with all bytes behind it.
    fn give_up_read(&mut self, chunks: &mut Chunks, token: Key) {
        let Some(Lent { message: key, offset, .. }) = chunks.list.remove(token) else { return };
        self.offer = None;
        self.out -= 1;
        self.void_from(offset, key, chunks);
    }
}

impl Chunks {
    /// The sender has written a chunk, or (`read`) the device has read it. `None`: it was not expected.
    pub(in crate::protocol) fn fill(
        &mut self,
        peer: PeerId,
        token: Key,
        read: bool,
    ) -> Option<Key> {
        let waits = |lent: &&mut Lent| {
            let by_it = match lent.mover {
                Mover::Sender { .. } => !read,
                Mover::Due => false,
                Mover::Device => read,
            };
            lent.peer == peer && !lent.filled && by_it
        };
        let lent = self.list.get_mut(token).filter(waits)?;
        lent.filled = true;
        Some(lent.message)
    }

    /// The peers whose memory is to be read.
    pub(in crate::protocol) fn readers(&self) -> impl Iterator<Item = PeerId> {
        self.due.iter().filter_map(|token| self.list.get(*token)).map(|lent| lent.peer)
    }

    /// The peer (`None`), or a lane to it, is gone. Returns how many chunks of it there were.
    pub(in crate::protocol) fn forget(&mut self, peer: PeerId, lane: Option<LaneId>) -> u64 {
        let gone = |lent: &Lent| lent.peer == peer && lane.is_none_or(|lane| lent.lane == lane);
        let keys = self.list.keys_where(gone);
        for token in &keys {
            self.list.remove(*token);
        }
        keys.len() as u64
    }
}

impl Due {
    /// Begins to copy the bytes to memory of the host, if they go through that. `ahead`: earlier bytes are not written yet, and what
    /// fails now is tried again. Errors: `Unreachable`.
    pub(in crate::protocol) fn copy(
        &mut self,
        iface: &mut impl Iface,
        message: &Outbound,
        ahead: bool,
    ) -> Result<(), SendError> {
        let memory = message.payload.segments();
        let ask = || select::is_staged(iface, message.peer, &memory, &self.remote);
        if !*self.staged.get_or_insert_with(ask) {
            return Ok(());
        }
        let mut copied: usize = self.parts.iter().map(Part::len).sum();
        while copied < self.len {
            if self.parts.len() == MAX_SEGMENTS {
                return Err(UNREADABLE);
            }
            let rest = (self.offset + copied, self.len - copied);
            match Part::begin(&memory, rest, ahead) {
                Ok(Some(part)) => {
                    copied += part.len();
                    self.parts.push(part);
                }
                Ok(None) => break,
                Err(_) => return Err(UNREADABLE),
            }
        }
        Ok(())
    }

    /// The bytes to write. Errors: `Again` if they are not copied yet; `Unreachable`.
    fn source(&mut self, message: &Outbound) -> Result<SegmentList, SendError> {
        if self.parts.is_empty() {
            return Ok(message.payload.segments().slice(self.offset, self.len));
        }
        let mut list = SegmentList::EMPTY;
        for (at, part) in self.parts.iter_mut().enumerate() {
            let bytes = part.bytes().map_err(|_| UNREADABLE)?.ok_or(SendError::Again)?;
            bytes.one().and_then(|bytes| list.set(at, bytes)).ok_or(UNREADABLE)?;
        }
        Ok(list)
    }

    /// Its bytes are being copied: nothing but a question tells when they are there.
    pub(in crate::protocol) fn is_under_way(&self) -> bool {
        self.parts.iter().any(Part::is_under_way)
    }
}

impl Sender {
    /// WINDOW: the receiver advertises a remote buffer. `None`: it is dropped, or it gets this reply. Else the write that
    /// is due.
    pub(in crate::protocol) fn on_window(
        &mut self,
        (peer, tx, rx): (PeerId, Key, u64),
        (offset, len): (usize, usize),
        remote: RemoteKey,
        (outbox, counts): (&mut Outbox, &mut Counts),
    ) -> Option<Due> {
        match self {
            Self::Writing { rx: known, queued, .. } if *known == rx && *queued < QUEUE_MAX => {
                *queued += 1;
                let parts = Vec::new();
                return Some(Due { tx, offset, len, remote, staged: None, parts });
            }
            Self::Writing { .. } => counts.dropped += 1,
            Self::Over { .. } => self.say_gone(peer, rx, outbox),
            Self::Declined { rx: known, .. } if *known != rx => counts.dropped += 1,
            // It was sent before the NACK arrived, or again after the earlier ones were lost.
            Self::Declined { from, .. } => {
                if offset < *from {
                    *from = offset;
                    say_declined(peer, rx, offset, outbox);
                }
            }
        }
        None
    }

    /// Writes into a remote buffer. `Unreachable`: it cannot be written.
    pub(in crate::protocol) fn write(
        &mut self,
        iface: &mut impl Iface,
        message: &mut Outbound,
        due: &mut Due,
        (wrote, counts): (&mut IndexList<Wrote>, &mut Counts),
    ) -> Result<(), SendError> {
        let Self::Writing { queued, .. } = self else { return Ok(()) };
        due.copy(iface, message, false)?;
        let peer = message.peer;
        let part = due.source(message)?;
        let Due { tx, offset, len, remote, .. } = *due;
        let (kind, parts) = (remote.kind(), Vec::new());
        let key = wrote.push_back(Wrote { peer, tx, offset, len, kind, confirms: true, parts });
        let token = key.to_wire() | PUT_OF_A_MESSAGE;
        // Its copies are given back as soon as they are read.
        let reports = !due.parts.is_empty();
        let how = Put { notify: true, delivered: false, stays: false, reports, token };
        let begun = iface.put(peer, &part, &Remote { key: remote, offset: 0 }, how);
        let told = matches!(begun, Ok(Access::Begun | Access::Unsure));
        match wrote.get_mut(key).filter(|_| told) {
            Some(wrote) => {
                wrote.confirms = begun != Ok(Access::Unsure);
                wrote.parts = std::mem::take(&mut due.parts);
            }
            None => _ = wrote.remove(key),
        }
        begun?;
        // Of those that are left, nothing tells when they are read.
        message.lent.append(&mut due.parts);
        *queued = queued.saturating_sub(1);
        counts.window_bytes += len as u64;
        Ok(())
    }

    /// Sends a NACK: no bytes of the message are written from that of `due` on, nor from an earlier queued buffer on.
    pub(in crate::protocol) fn decline<'a>(
        &mut self,
        peer: PeerId,
        due: &Due,
        queued: impl Iterator<Item = &'a Due>,
        outbox: &mut Outbox,
    ) {
        let Self::Writing { rx, .. } = *self else { return };
        let same = queued.filter(|other| other.tx == due.tx);
        let from = same.map(|other| other.offset).fold(due.offset, usize::min);
        *self = Self::Declined { rx, from };
        say_declined(peer, rx, from, outbox);
    }

    /// Bytes are delivered. Returns whether all `len` of the message are.
    pub(in crate::protocol) fn on_written(&mut self, wrote: &Wrote, len: usize) -> bool {
        let Self::Writing { seen: Some(seen), .. } = self else { return false };
        // The reports come in order; one may be repeated.
        if wrote.offset <= *seen {
            *seen = (*seen).max(wrote.offset + wrote.len);
        }
        let whole = *seen >= len;
        if whole {
            *self = Self::Over { told: false };
        }
        whole
    }

    /// Replies GONE: the message is complete and has no more bytes. One reply serves any number of requests.
    pub(in crate::protocol) fn say_gone(&mut self, peer: PeerId, rx: u64, outbox: &mut Outbox) {
        if let Self::Over { told: told @ false } = self {
            *told = true;
            outbox.reply(peer, Packet::Gone { rx });
        }
    }

    /// The receiver asks for the missing bytes: a NACK that waits would answer WINDOWs that are void now, and the
    /// fragments would overtake it.
    pub(in crate::protocol) fn end(&self, peer: PeerId, outbox: &mut Outbox) {
        if let Self::Declined { rx, .. } = self {
            outbox.urgent.retain(|(to, packet)| {
                let declines = matches!(packet, Packet::Decline { rx: other, .. } if other == rx);
                *to != peer || !declines
            });
        }
    }
}

/// Queues a NACK. A queued one for the same receive is changed instead.
fn say_declined(peer: PeerId, rx: u64, from: usize, outbox: &mut Outbox) {
    let from = from as u64;
    for (to, packet) in &mut outbox.urgent {
        if let Packet::Decline { rx: other, offset } = packet {
            if *to == peer && *other == rx {
                *offset = from.min(*offset);
                return;
            }
        }
    }
    outbox.reply(peer, Packet::Decline { rx, offset: from });
}

/// Length of the chunks of a message of `len` bytes that both sides move: the same number for both sides, none longer
/// than `most`.
fn share(len: usize, most: usize) -> usize {
    let each = len.div_ceil(2).div_ceil(most.max(1)).max(1);
    len.div_ceil(2 * each).next_multiple_of(PAGE).min(most)
}
