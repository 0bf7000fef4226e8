//! One-sided operations by messages (PROTOCOL.md §4.15): an *initiator* reads or writes memory of a *target*, whose
//! engine moves the bytes.
//!
//! An initiator sends its operations to one target in order. The target carries out each write before it handles any
//! later packet, so that writes and reads see earlier writes. Atomic operations use the same order (§4.16), and are
//! carried out when they arrive.

mod alone;
mod atomic;
mod copies;
mod initiator;
mod packet;
mod target;

use super::Report;
use super::engine::{Core, Engine};
use super::index_list::{IndexList, Key};
use super::message::Payload;
use crate::memory::SegmentList;
use crate::memory::keys::Right;
use crate::sys::numbers::NumberMap;
use crate::transport::{Exposure, Iface, PeerId, Spot};
pub(crate) use atomic::{AtomicOp, right_of};
use atomic::{Operands, Results};
pub(crate) use packet::RmaPacket;
use std::collections::VecDeque;
use target::Inbound;

/// Most ranges of a target's memory in one operation: `rma_iov_limit`.
pub(crate) const MAX_RANGES: usize = 4;

/// Writes to one target that may be without an answer.
const WRITE_WINDOW: u32 = 256;
/// Writes that the target fetches and that may be without an answer.
const PULL_WINDOW: u32 = 64;
/// Reads from one target that may be without an answer.
const READ_WINDOW: u32 = 64;
/// Fetching atomic operations to one target that may be without an answer.
const FETCH_WINDOW: u32 = 64;
/// Operations to one target that may wait to be sent.
const QUEUE_MAX: usize = 1024;
/// Longest injected write that is copied to wait in that queue, bytes.
pub(super) const COPY_MAX: usize = 1024;
/// Packets of one operation that are sent in one progress pass.
const BATCH: usize = 64;
/// Packets after which the transport is flushed, so that the target works while the rest is sent.
const FLUSH_AFTER: usize = 16;

/// A range of a target's memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct RemoteRange {
    pub(crate) key: u64,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

/// The ranges of a target's memory that an operation accesses, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RemoteRanges {
    list: [RemoteRange; MAX_RANGES],
    count: usize,
    total: u64,
}

impl RemoteRanges {
    pub(crate) const NONE: Self =
        Self { list: [RemoteRange { key: 0, addr: 0, len: 0 }; MAX_RANGES], count: 0, total: 0 };

    /// Adds a range. `None`: there are too many, or the sum of the lengths overflows.
    pub(crate) fn push(&mut self, range: RemoteRange) -> Option<()> {
        *self.list.get_mut(self.count)? = range;
        self.total = self.total.checked_add(range.len)?;
        self.count += 1;
        Some(())
    }

    pub(crate) fn as_slice(&self) -> &[RemoteRange] {
        self.list.get(..self.count).unwrap_or(&[])
    }

    /// The length of all ranges, bytes.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}

/// A one-sided operation, as requested by the endpoint. `local` is as long as `remote`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmaOp {
    pub(crate) peer: PeerId,
    /// The kind of access to the target's memory.
    pub(crate) right: Right,
    pub(crate) local: SegmentList,
    pub(crate) remote: RemoteRanges,
    /// Remote completion data of a write.
    pub(crate) data: Option<u64>,
    /// The application's context.
    pub(crate) context: u64,
    /// Where the completion is reported.
    pub(crate) report: Report,
    /// The application may reuse the buffer of a write when the call returns.
    pub(crate) inject: bool,
    /// A write completes only when its bytes are in the target's memory (FI_DELIVERY_COMPLETE).
    pub(crate) delivered: bool,
    /// Start only when all earlier operations to this peer have completed.
    pub(crate) fence: bool,
}

/// An access of a peer to this endpoint's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteAccess<'a> {
    pub(crate) right: Right,
    /// The ids of the regions that were accessed.
    pub(crate) regions: &'a [u64],
    pub(crate) len: usize,
    /// Remote completion data.
    pub(crate) data: Option<u64>,
    /// The initiator's index in the address book.
    pub(crate) source: u64,
}

/// The state of a pending operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Behind a fence, in the list of deferred sends.
    Deferred,
    /// In its channel's queue; nothing was sent.
    Queued,
    /// A write of which the bytes before `offset` were sent.
    Sending { offset: usize },
    /// A direct operation of which the bytes before `offset` were moved or are being moved.
    Moving { offset: usize },
    /// A direct operation of which the device moves all that is left: it is in no queue.
    Begun,
    /// A write whose request was sent and whose bytes the target fetches.
    Pulled,
    /// A write that was sent, or a read whose request was sent and of which `received` bytes are here.
    Sent { received: usize },
}

/// A pending operation.
#[derive(Debug)]
struct Op {
    peer: PeerId,
    right: Right,
    local: Payload,
    remote: RemoteRanges,
    data: Option<u64>,
    context: u64,
    report: Report,
    /// The request told the target where the buffer of a read is.
    reachable: bool,
    state: State,
    delivered: bool,
    /// Segments that the device is moving.
    begun: u32,
    /// Direct access failed: the operation goes by messages once `begun` is 0.
    barred: bool,
    /// The additional fields of an atomic operation.
    operands: Option<Key>,
    /// The slot of the copied data, if it has one.
    copy: Option<usize>,
}

/// The operations to one target.
#[derive(Debug, Default)]
struct Channel {
    /// Operations that have not been sent as a whole, in order.
    queue: VecDeque<Key>,
    /// Operations without an answer: writes and non-fetching atomics, those writes among them that the target fetches,
    /// reads, and fetching atomics.
    writes: u32,
    pulls: u32,
    reads: u32,
    fetches: u32,
    /// The first of the queue could be sent if there were room.
    starved: bool,
    /// The target has not announced yet whether it supports atomic operations.
    asks: bool,
    /// The first of the queue is direct, and this endpoint has to move more of it.
    moving: bool,
    /// The cache of the target's remote keys.
    granted: alone::Granted,
    /// Direct operations that the device is moving segments of, in order.
    reaching: VecDeque<Key>,
    /// `unflushed`: where the device has written last, if no flush read has begun since. `flushing`: one is in
    /// progress.
    unflushed: Option<Spot>,
    flushing: bool,
    /// Writes of a certain length that were sent as messages since the last direct operation.
    short_writes: u32,
}

impl Channel {
    /// Whether an operation by message may be sent now. A target fetches a write in its own time: no other operation
    /// may be sent until it has.
    fn admits(&self, right: Right, pulled: bool) -> bool {
        // Direct operations take another path: a message must not overtake them.
        if !self.is_flushed() {
            return false;
        }
        match (right, pulled) {
            (Right::Write, true) => self.pulls < PULL_WINDOW,
            (Right::Write | Right::Update, _) => self.pulls == 0 && self.writes < WRITE_WINDOW,
            (Right::Read, _) => self.pulls == 0 && self.reads < READ_WINDOW,
            // A target carries out an atomic at once, but an earlier read later.
            (Right::Exchange | Right::Fetch, _) => {
                self.pulls == 0 && self.reads == 0 && self.fetches < FETCH_WINDOW
            }
        }
    }

    /// Adds `by` to the counts for an operation of this kind.
    fn count(&mut self, right: Right, pulled: bool, by: i32) {
        let add = |count: &mut u32| *count = count.saturating_add_signed(by);
        match right {
            Right::Read => add(&mut self.reads),
            Right::Write | Right::Update => add(&mut self.writes),
            Right::Exchange | Right::Fetch => add(&mut self.fetches),
        }
        if pulled {
            add(&mut self.pulls);
        }
    }
}

/// A reply from target to initiator, or [`Answer::Fault`] back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    /// The operation is done: 0, or an error number.
    Done(u32),
    /// The initiator has to send the bytes of a write. `faulted`: the copy from its memory failed with EFAULT.
    Push { faulted: bool },
    /// From the initiator: it cannot read its own memory.
    Fault,
    /// The old values of an atomic operation, an entry of [`Results`].
    Result(Key),
}

/// The one-sided operations of an endpoint, from both sides.
#[derive(Debug, Default)]
pub(super) struct Rma {
    ops: IndexList<Op>,
    /// The additional fields of atomic operations.
    operands: IndexList<Operands>,
    /// Copies of the data of injected writes.
    copies: copies::Copies,
    /// Indexed by peer.
    channels: Vec<Channel>,
    /// Peers whose channel has a non-empty queue.
    pumping: VecDeque<PeerId>,
    inbound: NumberMap<PeerId, Inbound>,
    /// Peers that this endpoint has to move bytes for, as their target.
    serving: VecDeque<PeerId>,
    /// One reply for each operation that a peer waits for, at most.
    answers: VecDeque<(PeerId, u64, Answer)>,
    results: Results,
    told: alone::Told,
}

impl Rma {
    #[inline]
    fn channel(&mut self, peer: PeerId) -> &mut Channel {
        let index = peer.index();
        if self.channels.len() <= index {
            self.add_channels(index + 1);
        }
        #[allow(clippy::indexing_slicing)] // made long enough just now
        &mut self.channels[index]
    }

    #[cold]
    fn add_channels(&mut self, len: usize) {
        self.channels.resize_with(len, Channel::default);
    }

    #[inline]
    pub(super) fn work(&self) -> usize {
        self.pumping.len()
            | self.serving.len()
            | self.answers.len()
            | self.told.offers.len()
            | self.told.retracted.len()
    }

    /// Number of pending operations.
    pub(super) fn pending(&self) -> usize {
        self.ops.len()
    }

    /// Number of pending operations that were started on this transmit context.
    pub(super) fn pending_of(&self, context: u8) -> usize {
        self.ops.iter().filter(|(_, op)| op.report.context() == context).count()
    }

    /// Whether this process still holds injected data, or replies that a peer waits for.
    pub(super) fn has_unsent(&self) -> bool {
        !self.answers.is_empty()
            || self.ops.iter().any(|(_, op)| matches!(op.local, Payload::Owned(_)))
            || self.operands.iter().any(|(_, other)| other.is_owned())
    }

    /// Whether `peer` has an unfinished operation here.
    pub(super) fn awaits(&self, peer: PeerId) -> bool {
        self.inbound.contains_key(&peer)
    }

    /// Whether an operation waits for `peer` to announce that it supports atomic operations.
    pub(super) fn asks(&self, peer: PeerId) -> bool {
        self.channels.get(peer.index()).is_some_and(|c| c.asks)
    }

    /// Whether this endpoint must be polled although nothing arrives. `silent`: the peer does not notify of room.
    pub(super) fn is_busy(&self, silent: impl Fn(PeerId) -> bool) -> bool {
        let starved = |peer: PeerId| self.channels.get(peer.index()).is_some_and(|c| c.starved);
        let moving = |peer: PeerId| self.channels.get(peer.index()).is_some_and(|c| c.moving);
        self.pumping.iter().any(|peer| self.asks(*peer) || moving(*peer))
            || self.told.offers.iter().any(|(peer, _)| silent(*peer))
            || self.told.retracted.iter().any(|(peer, _)| silent(*peer))
            || self.serving.iter().any(|peer| silent(*peer))
            || self.answers.iter().any(|(peer, ..)| silent(*peer))
            || self.pumping.iter().any(|peer| starved(*peer) && silent(*peer))
    }
}

impl<I: Iface> Engine<I> {
    /// One progress pass for one-sided operations.
    pub(super) fn advance_rma(&mut self, host: &mut impl super::Host) -> usize {
        // Advertised keys come first: behind the bytes that they make unnecessary they would wait long.
        let mut n = self.grant(host);
        n += self.serve(host);
        n += self.answer();
        for _ in 0..self.core.rma.pumping.len() {
            let Some(peer) = self.core.rma.pumping.pop_front() else { break };
            n += self.pump(peer, host);
            if !self.core.rma.channel(peer).queue.is_empty() {
                self.core.rma.pumping.push_back(peer);
            }
        }
        n
    }
}

impl Core {
    /// A packet of a one-sided operation has come.
    pub(super) fn on_rma(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &[u8],
        host: &mut impl super::Host,
    ) {
        let taken = match RmaPacket::decode(header) {
            Some(RmaPacket::Write { tx, data, more, ranges, sources }) => {
                match packet::Prefix::read(payload, ranges, sources) {
                    Some((to, from, bytes)) => {
                        let write = target::Request { peer, tx, data, ranges: to, local: from };
                        self.on_write(&write, more, bytes, host)
                    }
                    None => None,
                }
            }
            Some(RmaPacket::WriteMore { tx, offset }) => {
                self.on_write_more(peer, tx, offset, payload, host)
            }
            Some(RmaPacket::Read { tx, ranges, sinks }) => {
                match packet::Prefix::read(payload, ranges, sinks) {
                    Some((from, to, [])) => {
                        let read =
                            target::Request { peer, tx, data: None, ranges: from, local: to };
                        self.on_read(&read, host)
                    }
                    _ => None,
                }
            }
            Some(RmaPacket::ReadData { tx, offset, faulted }) => {
                self.on_read_data(peer, tx, (offset, faulted), payload, host)
            }
            Some(RmaPacket::Done { status }) => self.on_done(peer, status, payload, host),
            Some(RmaPacket::Push { tx, faulted }) => self.on_push(peer, tx, faulted),
            Some(RmaPacket::Fault { tx }) => self.on_fault_of_write(peer, tx, host),
            Some(RmaPacket::Atomic { tx, data, fetches, ranges, op, datatype }) => {
                match packet::Prefix::read(payload, ranges, 0) {
                    Some((to, local, bytes)) => {
                        let request = target::Request { peer, tx, data, ranges: to, local };
                        self.on_atomic(&request, fetches, (op, datatype), bytes, host)
                    }
                    None => None,
                }
            }
            Some(RmaPacket::Result { tx }) => self.on_result(peer, tx, payload, host),
            Some(RmaPacket::Grant { key, base, epoch, reads, writes, echoes, ranges }) => {
                match packet::Prefix::read(payload, 0, ranges) {
                    Some((_, ranges, rest)) => {
                        packet::Prefix::read_keys(rest, &ranges).and_then(|keys| {
                            let exposure = Exposure { epoch, keys, reads, writes, echoes };
                            self.on_grant(peer, (key, base), exposure, &ranges)
                        })
                    }
                    _ => None,
                }
            }
            Some(RmaPacket::Retract { key }) => {
                self.on_retract(peer, key);
                Some(())
            }
            None => None,
        };
        if taken.is_none() {
            self.counts.dropped += 1;
        }
    }
}

/// The status that tells the initiator why its request was refused.
fn status_of(denied: crate::memory::keys::Denied) -> u32 {
    use crate::memory::keys::Denied;
    match denied {
        Denied::Key => libc::EKEYREJECTED as u32,
        Denied::Access => libc::EACCES as u32,
    }
}

#[cfg(test)]
impl Rma {
    /// Asserts that nothing is pending, on either side.
    #[track_caller]
    pub(super) fn assert_empty(&self) {
        assert!(self.ops.is_empty(), "operations: {:?}", self.ops);
        assert!(self.operands.is_empty(), "operands: {:?}", self.operands);
        assert!(self.results.is_empty(), "results: {:?}", self.results);
        assert!(self.inbound.is_empty(), "under way for peers: {:?}", self.inbound);
        assert!(self.work() == 0, "{:?} {:?} {:?}", self.pumping, self.serving, self.answers);
        for channel in &self.channels {
            let Channel { queue, writes, pulls, reads, fetches, reaching, .. } = channel;
            assert_eq!((queue.len(), *writes, *pulls, *reads, *fetches), (0, 0, 0, 0, 0));
            assert!(reaching.is_empty(), "{reaching:?}");
        }
    }
}
