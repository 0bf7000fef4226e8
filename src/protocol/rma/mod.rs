//! One-sided operations by active messages (PROTOCOL.md §4.15): an *initiator* reads or writes
//! memory of a *target*, whose engine moves the bytes.
//!
//! An initiator's operations to one target leave in their order. The target carries out each write
//! before it looks at what was sent later, so that writes and reads see earlier writes. Atomic
//! operations go the same way (§4.16), and are carried out when they come.

mod alone;
mod atomic;
mod copies;
mod initiator;
mod packet;
mod target;

use super::engine::{Core, Engine};
use super::index_list::{IndexList, Key};
use super::send::Payload;
use super::{OpError, Report};
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

/// Writes to one target that may wait for their answer.
const WRITE_WINDOW: u32 = 256;
/// The same for those that the target fetches.
const PULL_WINDOW: u32 = 64;
/// Reads from one target that may wait.
const READ_WINDOW: u32 = 64;
/// Atomic operations that give something back, likewise.
const FETCH_WINDOW: u32 = 64;
/// Operations to one target that may wait until others have left.
const QUEUE_MAX: usize = 1024;
/// Longest injected write that is copied to wait there, bytes.
pub(super) const COPY_MAX: usize = 1024;
/// Packets of one operation sent in one turn of work.
const BATCH: usize = 64;
/// Packets after which the first ones leave, so that both sides work at the same time.
const FLUSH_AFTER: usize = 16;

/// A part of a target's memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct RemoteRange {
    pub(crate) key: u64,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

/// What of a target's memory an operation is about, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RemoteRanges {
    list: [RemoteRange; MAX_RANGES],
    count: usize,
    total: u64,
}

impl RemoteRanges {
    pub(crate) const NONE: Self =
        Self { list: [RemoteRange { key: 0, addr: 0, len: 0 }; MAX_RANGES], count: 0, total: 0 };

    /// Adds one; `None` if there are too many, or the sum of the lengths overflows.
    pub(crate) fn push(&mut self, range: RemoteRange) -> Option<()> {
        *self.list.get_mut(self.count)? = range;
        self.total = self.total.checked_add(range.len)?;
        self.count += 1;
        Some(())
    }

    pub(crate) fn as_slice(&self) -> &[RemoteRange] {
        self.list.get(..self.count).unwrap_or(&[])
    }

    /// Bytes in all of them.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}

/// A one-sided operation as the endpoint asks for it. `local` is as long as `remote`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmaOp {
    pub(crate) peer: PeerId,
    /// What is done to the target's memory.
    pub(crate) right: Right,
    pub(crate) local: SegmentList,
    pub(crate) remote: RemoteRanges,
    /// Remote completion data, of a write.
    pub(crate) data: Option<u64>,
    /// The application's context.
    pub(crate) context: u64,
    /// Where its end is reported.
    pub(crate) report: Report,
    /// The buffer is the application's again when the call returns (writes).
    pub(crate) inject: bool,
    /// A write is complete when its bytes are in the target's memory.
    pub(crate) delivered: bool,
    /// Start only when all earlier operations to this peer have completed.
    pub(crate) fence: bool,
}

/// What a peer has done to our memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteAccess<'a> {
    pub(crate) right: Right,
    /// Regions that it was done to.
    pub(crate) regions: &'a [u64],
    pub(crate) len: usize,
    /// Remote completion data.
    pub(crate) data: Option<u64>,
    /// Who it was, in the address book's numbers.
    pub(crate) source: u64,
}

/// Where an operation stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Behind a fence; it is among the deferred sends.
    Deferred,
    /// In its channel's queue; nothing was sent.
    Queued,
    /// A write of which the bytes before `offset` have left.
    Sending { offset: usize },
    /// What we carry out alone, of which the bytes before `offset` are moved, or under way.
    Moving { offset: usize },
    /// The same, of which no more has to be begun: it is in no queue.
    Begun,
    /// A write that the target was told of, and fetches.
    Pulled,
    /// A write that has left, or a read that was asked for and of which `received` bytes are here.
    Sent { received: usize },
}

/// An operation that is not complete.
#[derive(Debug)]
struct Op {
    peer: PeerId,
    right: Right,
    local: Payload,
    remote: RemoteRanges,
    data: Option<u64>,
    context: u64,
    report: Report,
    /// The target was told where a read's buffer is.
    reachable: bool,
    state: State,
    delivered: bool,
    /// Pieces that the transport moves.
    begun: u32,
    /// It has to go the other way, once none of them is under way.
    barred: bool,
    /// What else an atomic operation has.
    operands: Option<Key>,
    /// The place of what it writes, if that is a copy.
    copy: Option<usize>,
}

/// What we have under way to one target.
#[derive(Debug, Default)]
struct Channel {
    /// Operations that have still to leave, in order.
    queue: VecDeque<Key>,
    /// Those that have left and wait: writes and updates, writes among them that the target fetches,
    /// reads, and atomic operations that give something back.
    writes: u32,
    pulls: u32,
    reads: u32,
    fetches: u32,
    /// The first of the queue could leave if there were room.
    starved: bool,
    /// The target has not said yet whether it knows atomic operations.
    asks: bool,
    /// We are about to move more of the first of the queue ourselves.
    moving: bool,
    /// What we may reach alone.
    granted: alone::Granted,
    /// Operations of which pieces are under way alone, in order.
    reaching: VecDeque<Key>,
    /// Where our device has written last, if nobody has asked since whether that is in the target's memory; and whether
    /// that question is under way.
    unflushed: Option<Spot>,
    flushing: bool,
    /// Writes of some length that have left as messages since one went alone.
    short_writes: u32,
}

impl Channel {
    /// Whether an operation that the target hears of may leave now. What a target fetches takes its time: nothing else
    /// may overtake it meanwhile.
    fn admits(&self, right: Right, pulled: bool) -> bool {
        // It goes another way, and must not come before them.
        if !self.is_flushed() {
            return false;
        }
        match (right, pulled) {
            (Right::Write, true) => self.pulls < PULL_WINDOW,
            (Right::Write | Right::Update, _) => self.pulls == 0 && self.writes < WRITE_WINDOW,
            (Right::Read, _) => self.pulls == 0 && self.reads < READ_WINDOW,
            // The target answers at once, and reads when it gets to it.
            (Right::Exchange | Right::Fetch, _) => {
                self.pulls == 0 && self.reads == 0 && self.fetches < FETCH_WINDOW
            }
        }
    }

    /// Counts one of a kind more or less.
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

/// What a target says to an initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    /// It is done: 0, or an error number.
    Done(u32),
    /// Send the bytes, if they are there: a read of them `faulted`.
    Push { faulted: bool },
    /// From the initiator: they are not there.
    Fault,
    /// What was there before: of [`Results`].
    Result(Key),
}

/// The one-sided operations of an endpoint, from both sides.
#[derive(Debug, Default)]
pub(super) struct Rma {
    ops: IndexList<Op>,
    /// Of those that are atomic.
    operands: IndexList<Operands>,
    /// Of what they write.
    copies: copies::Copies,
    /// By peer.
    channels: Vec<Channel>,
    /// Peers whose channel has a queue.
    pumping: VecDeque<PeerId>,
    inbound: NumberMap<PeerId, Inbound>,
    /// Peers for whom there is something to move.
    serving: VecDeque<PeerId>,
    /// One per operation that a peer waits for.
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

    /// Operations that have not completed.
    pub(super) fn pending(&self) -> usize {
        self.ops.len()
    }

    /// Those that were started on this transmit context.
    pub(super) fn pending_of(&self, context: u8) -> usize {
        self.ops.iter().filter(|(_, op)| op.report.context() == context).count()
    }

    /// What the application believes written, or a peer waits for, has not left.
    pub(super) fn has_unsent(&self) -> bool {
        !self.answers.is_empty()
            || self.ops.iter().any(|(_, op)| matches!(op.local, Payload::Owned(_)))
            || self.operands.iter().any(|(_, other)| other.is_owned())
    }

    /// Whether `peer` has begun something that it has to go on with.
    pub(super) fn awaits(&self, peer: PeerId) -> bool {
        self.inbound.contains_key(&peer)
    }

    /// Whether something waits for `peer` to say that it knows atomic operations.
    pub(super) fn asks(&self, peer: PeerId) -> bool {
        self.channels.get(peer.index()).is_some_and(|c| c.asks)
    }

    /// Whether something could move although nothing arrives. `silent`: the peer does not say when
    /// it has room again.
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
    /// Moves what can be moved.
    pub(super) fn advance_rma(&mut self, host: &mut impl super::Host) -> usize {
        // First, because it would wait long behind the bytes that it makes needless.
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
    /// A message of a one-sided operation.
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

/// What goes wrong with a request, as its answer says it.
fn status_of(denied: crate::memory::keys::Denied) -> u32 {
    use crate::memory::keys::Denied;
    match denied {
        Denied::Key => libc::EKEYREJECTED as u32,
        Denied::Access => libc::EACCES as u32,
    }
}

/// The error of an operation that was not taken.
pub(super) fn refusal(error: crate::transport::SendError) -> OpError {
    super::send::op_error(error)
}

#[cfg(test)]
impl Rma {
    /// Nothing pends, on either side.
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
