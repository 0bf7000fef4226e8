//! What an endpoint keeps of one-sided operations.

use super::copies::Copies;
use super::keys::{Granted, Told};
use super::operands::{FETCH_WINDOW, Operands, Results};
use super::ranges::RemoteRanges;
use super::requests::Inbound;
use crate::memory::keys::{Denied, Right};
use crate::protocol::index_list::{IndexList, Key};
use crate::protocol::message::Payload;
use crate::protocol::staging::Staging;
use crate::protocol::{Cause, Report};
use crate::sys::numbers::NumberMap;
use crate::transport::{PeerId, Remote};
use std::collections::VecDeque;

/// Writes to one target that may be without an answer.
pub(super) const WRITE_WINDOW: u32 = 256;

/// Writes that the target fetches and that may be without an answer.
pub(super) const PULL_WINDOW: u32 = 64;

/// Reads from one target that may be without an answer.
pub(in crate::protocol) const READ_WINDOW: u32 = 64;

/// Operations to one target that may wait to be sent, and operations of any kind on one peer behind a fence: each pass
/// looks at them.
pub(in crate::protocol) const QUEUE_MAX: usize = 1024;

/// Longest injected write that is copied to wait in that queue, bytes.
pub(in crate::protocol) const COPY_MAX: usize = 1024;

/// Packets of one operation that are sent in one progress pass.
pub(super) const BATCH: usize = 64;

/// Packets after which the transport is flushed, so that the target works while the rest is sent.
pub(super) const FLUSH_AFTER: usize = 16;

/// The state of a pending operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
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
    /// A read that failed here: what is left after the first `received` bytes is dropped as it comes, and then this error
    /// is reported. Until then the target counts the read, and so does its window here.
    Failing { received: usize, error: (i32, Cause) },
}

/// A pending operation.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) peer: PeerId,
    pub(super) right: Right,
    pub(super) local: Payload,
    /// The bytes of a long write from a device's memory, which are sent in packets.
    pub(super) staging: Option<Box<Staging>>,
    /// Bytes of that could not be read when others were sent.
    pub(super) unreadable: bool,
    pub(super) remote: RemoteRanges,
    pub(super) data: Option<u64>,
    pub(super) context: u64,
    pub(super) report: Report,
    /// The request told the target where the buffer of a read is.
    pub(super) reachable: bool,
    pub(super) state: State,
    pub(super) delivered: bool,
    /// Segments that the device is moving.
    pub(super) begun: u32,
    /// Direct access failed: the operation goes by messages once `begun` is 0.
    pub(super) barred: bool,
    /// The additional fields of an atomic operation.
    pub(super) operands: Option<Key>,
    /// The slot of the copied data, if it has one.
    pub(super) copy: Option<usize>,
}

/// The operations to one target.
#[derive(Debug, Default)]
pub(super) struct Channel {
    /// Operations that have not been sent as a whole, in order.
    pub(super) queue: VecDeque<Key>,
    /// Operations without an answer: writes and non-fetching atomics, those writes among them that the target fetches,
    /// reads, and fetching atomics.
    pub(super) writes: u32,
    pub(super) pulls: u32,
    pub(super) reads: u32,
    pub(super) fetches: u32,
    /// The first of the queue could be sent if there were room.
    pub(super) starved: bool,
    /// The target has not announced yet whether it supports atomic operations.
    pub(super) asks: bool,
    /// The first of the queue is direct, and this endpoint has to move more of it.
    pub(super) moving: bool,
    /// The cache of the target's remote keys.
    pub(super) granted: Granted,
    /// Direct operations that the device is moving segments of, in order.
    pub(super) reaching: VecDeque<Key>,
    /// `unflushed`: where the device has written last, if no flush read has begun since. `flushing`: one is in
    /// progress.
    pub(super) unflushed: Option<Remote>,
    pub(super) flushing: bool,
    /// The kind of the transport's key of the last of them, which names their lane.
    pub(super) kind: u8,
    /// That lane was lost, or a fence behind a message was passed, and the target has not answered a later operation yet:
    /// direct writes, or messages, may still be on their way.
    pub(super) unsure: bool,
    /// [`Counts::unanswered`] when the last packet was sent that the target answers, or is part of what it answers.
    ///
    /// [`Counts::unanswered`]: crate::protocol::limits::Counts::unanswered
    pub(super) asked_at: u64,
    /// Writes of a certain length that were sent as messages since the last direct operation.
    pub(super) short_writes: u32,
}

impl Channel {
    /// Whether an operation by message may be sent now. A target fetches a write in its own time: no other operation
    /// may be sent until it has.
    pub(super) fn admits(&self, right: Right, pulled: bool) -> bool {
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

    /// Adds `by` to the counts for an operation of this kind: 1 when it is sent, -1 when it has its answer.
    pub(super) fn count(&mut self, right: Right, pulled: bool, by: i32) {
        let add = |count: &mut u32| *count = count.saturating_add_signed(by);
        self.unsure &= by > 0;
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
pub(super) enum Answer {
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
pub(in crate::protocol) struct Rma {
    pub(super) ops: IndexList<Op>,
    /// The additional fields of atomic operations.
    pub(super) operands: IndexList<Operands>,
    /// Copies of the data of injected writes.
    pub(super) copies: Copies,
    /// Bytes of the copies that pending operations own, which are none of those.
    pub(in crate::protocol) copied: usize,
    /// Indexed by peer.
    pub(super) channels: Vec<Channel>,
    /// Peers whose channel has a non-empty queue.
    pub(super) pumping: VecDeque<PeerId>,
    pub(super) inbound: NumberMap<PeerId, Inbound>,
    /// Peers that this endpoint has to move bytes for, as their target.
    pub(super) serving: VecDeque<PeerId>,
    /// One reply for each operation that a peer waits for, at most.
    pub(super) answers: VecDeque<(PeerId, u64, Answer)>,
    pub(super) results: Results,
    pub(super) told: Told,
}

impl Rma {
    #[inline]
    pub(super) fn channel(&mut self, peer: PeerId) -> &mut Channel {
        let index = peer.index();
        if self.channels.len() <= index {
            self.add_channels(index + 1);
        }
        #[allow(clippy::indexing_slicing)] // made long enough just now
        &mut self.channels[index]
    }

    #[cold]
    pub(super) fn add_channels(&mut self, len: usize) {
        self.channels.resize_with(len, Channel::default);
    }

    #[inline]
    pub(in crate::protocol) fn work(&self) -> usize {
        self.pumping.len()
            | self.serving.len()
            | self.answers.len()
            | self.told.offers.len()
            | self.told.retracted.len()
    }

    /// Number of pending operations.
    pub(in crate::protocol) fn pending(&self) -> usize {
        self.ops.len()
    }

    /// Number of pending operations that were started on this transmit context.
    pub(in crate::protocol) fn pending_of(&self, context: u8) -> usize {
        self.ops.iter().filter(|(_, op)| op.report.context() == context).count()
    }

    /// Whether this process still holds injected data, or replies that a peer waits for.
    pub(in crate::protocol) fn has_unsent(&self) -> bool {
        !self.answers.is_empty()
            || self
                .ops
                .iter()
                .any(|(_, op)| op.copy.is_some() || matches!(op.local, Payload::Owned(_)))
            || self.operands.iter().any(|(_, other)| other.is_owned())
    }

    /// Whether `peer` has an unfinished operation here.
    pub(in crate::protocol) fn awaits(&self, peer: PeerId) -> bool {
        self.inbound.contains_key(&peer)
    }

    /// Whether an operation waits for `peer` to announce that it supports atomic operations.
    pub(in crate::protocol) fn asks(&self, peer: PeerId) -> bool {
        self.channels.get(peer.index()).is_some_and(|c| c.asks)
    }

    /// Whether the first operation for `peer` waits for a copy, of whose end nothing but a question tells.
    fn is_copying(&self, peer: PeerId) -> bool {
        let first = self.channels.get(peer.index()).and_then(|channel| channel.queue.front());
        let op = first.and_then(|key| self.ops.get(*key));
        let at = |op: &Op| if let State::Sending { offset } = op.state { offset } else { 0 };
        op.is_some_and(|op| op.staging.as_ref().is_some_and(|staging| staging.asks(at(op))))
    }

    /// Whether this endpoint must be polled although nothing arrives. `silent`: the peer does not notify of room.
    pub(in crate::protocol) fn is_busy(&self, silent: impl Fn(PeerId) -> bool) -> bool {
        let starved = |peer: PeerId| self.channels.get(peer.index()).is_some_and(|c| c.starved);
        self.pumping.iter().any(|peer| self.asks(*peer))
            || self.told.offers.iter().any(|(peer, _)| silent(*peer))
            || self.told.retracted.iter().any(|retracted| silent(retracted.peer()))
            || self.serving.iter().any(|peer| silent(*peer))
            || self.answers.iter().any(|(peer, ..)| silent(*peer))
            || self.pumping.iter().any(|peer| starved(*peer) && silent(*peer))
            || self.pumping.iter().any(|peer| self.is_copying(*peer))
    }
}

/// The status that tells the initiator why its request was refused.
pub(super) fn status_of(denied: Denied) -> u32 {
    match denied {
        Denied::Key => libc::EKEYREJECTED as u32,
        Denied::Access => libc::EACCES as u32,
        Denied::Device => libc::EIO as u32,
    }
}

#[cfg(test)]
impl Rma {
    /// Asserts that nothing is pending, on either side.
    #[track_caller]
    pub(in crate::protocol) fn assert_empty(&self) {
        assert!(self.ops.is_empty(), "operations: {:?}", self.ops);
        assert!(self.operands.is_empty(), "operands: {:?}", self.operands);
        assert!(self.results.is_empty(), "results: {:?}", self.results);
        assert_eq!(self.copied, 0, "copies");
        assert!(self.inbound.is_empty(), "under way for peers: {:?}", self.inbound);
        assert!(self.work() == 0, "{:?} {:?} {:?}", self.pumping, self.serving, self.answers);
        for channel in &self.channels {
            let Channel { queue, writes, pulls, reads, fetches, reaching, .. } = channel;
            assert_eq!((queue.len(), *writes, *pulls, *reads, *fetches), (0, 0, 0, 0, 0));
            assert!(reaching.is_empty(), "{reaching:?}");
        }
    }
}
