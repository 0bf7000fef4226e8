//! A second, simpler implementation of the matching rules: posting and arrival order over plain vectors. It sees what
//! the network delivers and checks every report against it.

use super::fixture::source;
use super::rng::{Bytes, payload};
use super::sim::{Entry, Net, Slot, What};
use crate::protocol::packet::Envelope;
use crate::protocol::{
    ANY_SOURCE, Cause, Completion, Direction, FI_ETRUNC, Failure, PeekAction, UNKNOWN_SOURCE,
};
use crate::transport::Departure;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The contents of receive buffers before their operation, and of all buffers after it.
pub(super) const FRESH: u8 = 0xa5;
pub(super) const SPENT: u8 = 0x5a;

/// A read of the sender's memory that fails with this error is not tried in another way.
pub(super) const HARD_ERROR: i32 = libc::EIO;

const SEND: u64 = 1 << 32;

/// Where a message is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Queued,
    Sent,
    Arrived,
    /// In the receive buffer, or discarded on purpose.
    Consumed,
    /// The receive failed with this error, and reports it.
    Refused(i32),
}

/// The state of a message's send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sending {
    /// Its call has not returned.
    Offered,
    Pending,
    /// It must fail before the current call returns.
    Doomed(i32, Cause),
    Done,
    /// It was not started, or its endpoint is closed.
    Void,
}

#[derive(Debug)]
pub(super) struct Message {
    pub(super) from: Slot,
    pub(super) to: Slot,
    pub(super) envelope: Envelope,
    /// See [`payload`].
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) report: bool,
    pub(super) inject: bool,
    pub(super) delivery: bool,
    pub(super) fence: bool,
    pub(super) memory: Bytes,
    pub(super) sending: Sending,
    stage: Stage,
    rendezvous: bool,
    link: usize,
    /// Complete because all of it was sent or written.
    left: bool,
    /// Some of it was sent over a link that had broken; how much is unknown.
    adrift: bool,
}

impl Message {
    pub(super) fn new(from: Slot, to: Slot, envelope: Envelope, at: usize, len: usize) -> Self {
        Self {
            from,
            to,
            envelope,
            at,
            len,
            report: true,
            inject: false,
            delivery: false,
            fence: false,
            memory: Bytes(payload(at, len).to_vec()),
            sending: Sending::Offered,
            stage: Stage::Queued,
            rendezvous: false,
            link: 0,
            left: false,
            adrift: false,
        }
    }
}

/// A receive, as posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posting {
    pub(super) context: u64,
    pub(super) tagged: bool,
    pub(super) tag: u64,
    pub(super) ignore: u64,
    pub(super) source: u64,
    pub(super) report: bool,
    pub(super) multi_min: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    message: usize,
    lost: Option<i32>,
    /// `lost` holds, unless all of the message was sent before.
    perhaps: bool,
}

#[derive(Debug)]
struct Buffer {
    used: usize,
    min_free: usize,
    in_flight: usize,
    retired: bool,
    cancelled: bool,
    /// How it ends once all messages for it are complete, if no peer can send more.
    hopeless: Option<(i32, Cause)>,
}

/// How an operation must end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    /// With the first `want` bytes of its message.
    Placed,
    /// With the length of a message.
    Told,
    Failed(i32, Cause),
    /// Its sender has closed: it fails so, or its bytes are here, and are copied to a device.
    Lands(i32, Cause),
    /// As `Placed`, or by the departure of the sender.
    Either(i32),
}

/// A receive that must be reported.
#[derive(Clone, Debug)]
struct Expect {
    posting: Posting,
    message: Option<usize>,
    offset: usize,
    want: usize,
    addr: Option<u64>,
    ending: Ending,
    /// It must be reported before the current call returns.
    now: bool,
    /// `None`: the multi-receive buffer decides.
    released: Option<bool>,
}

#[derive(Debug, Default)]
pub(super) struct Side {
    pub(super) eager_max: usize,
    pub(super) known: BTreeSet<Slot>,
    posted: [Vec<Posting>; 2],
    unexpected: [Vec<Waiting>; 2],
    claimed: BTreeMap<u64, (Posting, Waiting)>,
    /// Peers that died and have not been heard of since.
    dead: Vec<(Slot, i32, Cause)>,
    buffers: HashMap<u64, Buffer>,
    expects: Vec<Expect>,
    memory: HashMap<u64, Vec<u8>>,
    /// Receives, by context, of which some of the memory is a device's.
    pub(super) on_device: BTreeSet<u64>,
    spent: Vec<Vec<u8>>,
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    pub(super) messages: Vec<Message>,
    pub(super) sides: Vec<Side>,
    /// Eager messages that were sent by the current call.
    due: Vec<usize>,
    pub(super) reports: usize,
}

fn is_all(bytes: &[u8], value: u8) -> bool {
    let same = [value; 4096];
    bytes.chunks(same.len()).all(|chunk| chunk == &same[..chunk.len()])
}

impl Side {
    pub(super) fn source_of(&self, slot: Slot) -> u64 {
        if self.known.contains(&slot) { source(slot) } else { UNKNOWN_SOURCE }
    }

    fn accepts(&self, posting: &Posting, message: &Message) -> bool {
        (posting.tag ^ message.envelope.tag) & !posting.ignore == 0
            && (posting.source == ANY_SOURCE || self.source_of(message.from) == posting.source)
    }

    pub(super) fn posted_len(&self) -> usize {
        self.posted.iter().map(Vec::len).sum()
    }

    pub(super) fn waiting_len(&self) -> usize {
        self.unexpected.iter().map(Vec::len).sum::<usize>() + self.claimed.len()
    }

    pub(super) fn posted(&self) -> Vec<u64> {
        self.posted.iter().flatten().map(|p| p.context).collect()
    }

    pub(super) fn claimed(&self) -> Vec<Posting> {
        self.claimed.values().map(|(posting, _)| *posting).collect()
    }

    pub(super) fn unexpected(&self) -> [usize; 2] {
        [self.unexpected[0].len(), self.unexpected[1].len()]
    }

    fn find(&self, messages: &[Message], posting: &Posting) -> Option<usize> {
        self.unexpected[usize::from(posting.tagged)]
            .iter()
            .position(|w| self.accepts(posting, &messages[w.message]))
    }

    /// A new buffer of `len` bytes for the operation with `context`.
    pub(super) fn lend(&mut self, context: u64, len: usize) -> &mut Vec<u8> {
        self.memory.insert(context, vec![FRESH; len]);
        self.memory.get_mut(&context).unwrap()
    }

    /// Removes the buffer of an operation that was not started.
    pub(super) fn unlend(&mut self, context: u64) {
        self.memory.remove(&context);
    }

    /// Matches the message to the receive, or to the next part of the multi-receive buffer.
    fn bind(&mut self, messages: &[Message], waiting: Waiting, posting: &Posting) {
        let Waiting { message, lost, perhaps } = waiting;
        let Message { len, rendezvous, .. } = messages[message];
        let memory = &self.memory[&posting.context];
        let buffer = posting.multi_min.and_then(|_| self.buffers.get_mut(&posting.context));
        let (mut offset, mut want) = (0, len.min(memory.len()));
        if let Some(buffer) = buffer {
            offset = buffer.used;
            want = len.min(memory.len() - offset);
            buffer.used += want;
            buffer.in_flight += 1;
            buffer.retired = memory.len() - buffer.used < buffer.min_free;
        }
        self.expects.push(Expect {
            posting: *posting,
            message: Some(message),
            offset,
            want,
            addr: Some((memory.as_ptr() as usize + offset) as u64),
            ending: match lost {
                None => Ending::Placed,
                Some(error) if perhaps => Ending::Either(error),
                Some(error) => Ending::Failed(error, Cause::SenderLost),
            },
            now: lost.is_some() || !rendezvous,
            released: None,
        });
    }

    fn expect_failure(&mut self, posting: Posting, error: i32, cause: Cause) {
        let released = posting.multi_min.is_some() && cause != Cause::NoMessage;
        self.expects.push(Expect {
            posting,
            message: None,
            offset: 0,
            want: 0,
            addr: None,
            ending: Ending::Failed(error, cause),
            now: true,
            released: Some(released),
        });
    }

    fn expect_told(&mut self, posting: &Posting, message: usize) {
        self.expects.push(Expect {
            posting: *posting,
            message: Some(message),
            offset: 0,
            want: 0,
            addr: Some(0),
            ending: Ending::Told,
            now: true,
            released: Some(false),
        });
    }

    pub(super) fn receive(&mut self, messages: &[Message], posting: &Posting) {
        let space = usize::from(posting.tagged);
        if let Some(min_free) = posting.multi_min {
            let (used, in_flight) = (0, 0);
            let (retired, cancelled, hopeless) = (false, false, None);
            let buffer = Buffer { used, min_free, in_flight, retired, cancelled, hopeless };
            self.buffers.insert(posting.context, buffer);
        }
        while let Some(at) = self.find(messages, posting) {
            let waiting = self.unexpected[space].remove(at);
            self.bind(messages, waiting, posting);
            if self.buffers.get(&posting.context).is_none_or(|b| b.retired) {
                return;
            }
        }
        let dead = self.dead.iter().copied().find(|(slot, ..)| {
            posting.source != ANY_SOURCE && self.source_of(*slot) == posting.source
        });
        match dead {
            Some((_, error, cause)) => self.fail(*posting, error, cause),
            None => self.posted[space].push(*posting),
        }
    }

    /// No message can come for this receive any more. A buffer in which messages are still arriving is released with the last of them.
    fn fail(&mut self, posting: Posting, error: i32, cause: Cause) {
        if self.expects.iter().any(|e| e.posting.context == posting.context && !e.now) {
            if let Some(buffer) = self.buffers.get_mut(&posting.context) {
                buffer.retired = true;
                buffer.hopeless = Some((error, cause));
            }
        } else {
            self.buffers.remove(&posting.context);
            self.expect_failure(posting, error, cause);
        }
    }

    pub(super) fn peek(&mut self, messages: &mut [Message], posting: &Posting, action: PeekAction) {
        let Some(at) = self.find(messages, posting) else {
            self.expect_failure(*posting, libc::ENOMSG, Cause::NoMessage);
            return;
        };
        let list = &mut self.unexpected[usize::from(posting.tagged)];
        let waiting = list[at];
        if action != PeekAction::Look {
            list.remove(at);
        }
        match action {
            PeekAction::Look => {}
            PeekAction::Claim => {
                self.claimed.insert(posting.context, (*posting, waiting));
            }
            PeekAction::Discard => messages[waiting.message].stage = Stage::Consumed,
        }
        self.expect_told(posting, waiting.message);
    }

    pub(super) fn receive_claimed(
        &mut self,
        messages: &mut [Message],
        posting: &Posting,
        discard: bool,
    ) {
        let (_, waiting) = self.claimed.remove(&posting.context).unwrap();
        if discard {
            messages[waiting.message].stage = Stage::Consumed;
            self.expect_told(posting, waiting.message);
        } else {
            self.bind(messages, waiting, posting);
        }
    }

    /// Cancels a receive. Returns whether there was one.
    pub(super) fn cancel(&mut self, context: u64) -> bool {
        for space in [1, 0] {
            let Some(at) = self.posted[space].iter().position(|p| p.context == context) else {
                continue;
            };
            let posting = self.posted[space].remove(at);
            match self.buffers.get_mut(&context).filter(|b| b.in_flight > 0) {
                Some(buffer) => {
                    buffer.retired = true;
                    buffer.cancelled = true;
                }
                None => {
                    self.buffers.remove(&context);
                    self.expect_failure(posting, libc::ECANCELED, Cause::Cancelled);
                }
            }
            return true;
        }
        false
    }

    fn arrive(&mut self, messages: &[Message], message: usize) {
        let space = usize::from(messages[message].envelope.tagged);
        let waiting = Waiting { message, lost: None, perhaps: false };
        let found = self.posted[space].iter().position(|p| self.accepts(p, &messages[message]));
        let Some(at) = found else {
            self.unexpected[space].push(waiting);
            return;
        };
        let posting = self.posted[space][at];
        self.bind(messages, waiting, &posting);
        if self.buffers.get(&posting.context).is_none_or(|b| b.retired) {
            self.posted[space].remove(at);
        }
    }

    fn depart(
        &mut self,
        messages: &[Message],
        peer: Slot,
        (error, cause): (i32, Cause),
        died: bool,
        push_max: usize,
    ) {
        for expect in self.expects.iter_mut().filter(|e| !e.now) {
            if expect.message.is_some_and(|m| messages[m].from == peer) {
                let lands = self.on_device.contains(&expect.posting.context);
                expect.now = !lands;
                expect.ending = match lands {
                    true => Ending::Lands(error, cause),
                    false => Ending::Failed(error, cause),
                };
            }
        }
        let claimed = self.claimed.values_mut().map(|(_, waiting)| waiting);
        for waiting in self.unexpected.iter_mut().flatten().chain(claimed) {
            let message = &messages[waiting.message];
            let sure = message.left && !message.adrift;
            if message.from == peer && message.rendezvous && !sure {
                waiting.perhaps |= waiting.lost.is_none() && message.len <= push_max;
                waiting.lost = waiting.lost.or(Some(error));
            }
        }
        let source = self.source_of(peer);
        if died {
            self.dead.retain(|(dead, ..)| *dead != peer);
            self.dead.push((peer, error, cause));
        }
        if died && source != UNKNOWN_SOURCE {
            for space in [1, 0] {
                let (failed, kept) =
                    self.posted[space].iter().copied().partition(|p| p.source == source);
                self.posted[space] = kept;
                let failed: Vec<Posting> = failed;
                for posting in failed {
                    self.fail(posting, error, cause);
                }
            }
        }
    }

    /// Payload bytes that wait for a receive.
    pub(super) fn unexpected_bytes(&self, messages: &[Message]) -> usize {
        let claimed = self.claimed.values().map(|(_, waiting)| waiting);
        self.unexpected
            .iter()
            .flatten()
            .chain(claimed)
            .map(|w| &messages[w.message])
            .filter(|m| !m.rendezvous)
            .map(|m| m.len)
            .sum()
    }

    /// Whether this report ends that operation.
    fn is_end_of(
        &self,
        expect: &Expect,
        c: &Completion,
        failure: Option<&Failure>,
        messages: &[Message],
        net: &Net,
    ) -> bool {
        let is = |ending| {
            let expect = Expect { ending, ..expect.clone() };
            self.is_end_of(&expect, c, failure, messages, net)
        };
        match expect.ending {
            Ending::Either(error) => {
                return is(Ending::Placed) || is(Ending::Failed(error, Cause::SenderLost));
            }
            Ending::Lands(error, cause) => {
                return is(Ending::Placed) || is(Ending::Failed(error, cause));
            }
            _ => {}
        }
        let message = expect.message.map(|m| &messages[m]);
        let cancelled = expect.ending == Ending::Failed(libc::ECANCELED, Cause::Cancelled);
        let tag = message.map_or(expect.posting.tag, |m| m.envelope.tag);
        let identity = c.context == expect.posting.context
            && c.tagged == expect.posting.tagged
            && c.report.entry() == expect.posting.report
            && (c.tag == tag || cancelled)
            && c.data == message.and_then(|m| m.envelope.data)
            && expect.addr.is_none_or(|addr| addr == c.buffer);
        let source_is = |m: &Message| c.source == self.source_of(m.from);
        identity
            && message.is_none_or(source_is)
            && match (expect.ending, failure) {
                (Ending::Placed, None) => {
                    c.len == expect.want && message.is_some_and(|m| m.len == expect.want)
                }
                (Ending::Placed, Some(f)) if f.error == FI_ETRUNC => {
                    f.cause == Cause::Truncated
                        && c.len == expect.want
                        && f.overflow > 0
                        && message.is_some_and(|m| m.len == expect.want + f.overflow)
                }
                (Ending::Placed, Some(f)) => {
                    let broken = message.is_some_and(|m| net.is_broken(m.link));
                    let known = match f.cause {
                        Cause::SenderUnreadable => broken || f.error == HARD_ERROR,
                        Cause::PeerUnreachable => broken,
                        _ => false,
                    };
                    known && !expect.now && f.overflow == 0 && c.len <= expect.want
                }
                (Ending::Told, None) => message.is_some_and(|m| m.len == c.len),
                (Ending::Failed(error, cause), Some(f)) => {
                    (f.error, f.cause, f.overflow) == (error, cause, 0) && c.len <= expect.want
                }
                _ => false,
            }
    }

    fn reported(
        &mut self,
        c: &Completion,
        failure: Option<&Failure>,
        messages: &mut [Message],
        net: &Net,
    ) {
        let ends = |(_, e): &(usize, &Expect)| self.is_end_of(e, c, failure, messages, net);
        // Empty messages at one offset of one buffer look alike: the one that is due comes first.
        let candidates = self.expects.iter().enumerate().filter(ends);
        let found = candidates.min_by_key(|(_, e)| !e.now).map(|(at, _)| at);
        let Some(at) = found else {
            let same = |e: &&Expect| e.posting.context == c.context;
            let expects: Vec<_> = self.expects.iter().filter(same).collect();
            let about: Vec<_> = expects
                .iter()
                .filter_map(|e| e.message)
                .map(|m| (m, messages[m].envelope, messages[m].len))
                .collect();
            panic!("unforeseen report {c:?} {failure:?}; expected: {expects:?} of {about:?}");
        };
        let mut expect = self.expects.remove(at);
        if let Ending::Either(error) = expect.ending {
            expect.ending = match failure.map(|f| f.cause) {
                Some(Cause::SenderLost) => Ending::Failed(error, Cause::SenderLost),
                _ => Ending::Placed,
            };
        }
        if let Ending::Lands(error, cause) = expect.ending {
            expect.ending = match failure {
                Some(f) if f.cause == cause => Ending::Failed(error, cause),
                _ => Ending::Placed,
            };
        }
        if expect.ending == Ending::Placed {
            let message = &mut messages[expect.message.unwrap()];
            message.stage = match failure.map(|f| (f.cause, f.error)) {
                None | Some((Cause::Truncated, _)) => Stage::Consumed,
                Some((Cause::SenderUnreadable, error)) => Stage::Refused(error),
                Some(_) => message.stage,
            };
        }
        self.check_bytes(&expect, failure, messages);
        let told = c.buffer_released;
        let released = expect.released.unwrap_or_else(|| self.release(&expect, told));
        assert_eq!(c.buffer_released, released, "release of {expect:?}");
    }

    /// Whether a multi-receive buffer is released with this report.
    fn release(&mut self, expect: &Expect, told: bool) -> bool {
        let context = expect.posting.context;
        let Some(buffer) = self.buffers.get_mut(&context) else { return false };
        buffer.in_flight -= 1;
        if !buffer.retired || buffer.in_flight > 0 {
            return false;
        }
        let Buffer { cancelled, hopeless, .. } = *buffer;
        self.buffers.remove(&context);
        // Unsolicited messages were complete before the receiver noticed that no more can come.
        if let Some((error, cause)) = hopeless.filter(|_| !told) {
            self.expect_failure(expect.posting, error, cause);
            return false;
        }
        if cancelled {
            self.expect_failure(expect.posting, libc::ECANCELED, Cause::Cancelled);
        } else {
            self.retire(context);
        }
        !cancelled
    }

    fn check_bytes(&mut self, expect: &Expect, failure: Option<&Failure>, messages: &[Message]) {
        let Expect { offset, want, .. } = *expect;
        let context = expect.posting.context;
        if expect.ending == Ending::Placed && failure.is_none_or(|f| f.cause == Cause::Truncated) {
            let message = &messages[expect.message.unwrap()];
            let got = &self.memory[&context][offset..offset + want];
            assert!(got == payload(message.at, want), "wrong bytes in {expect:?}");
        }
        if expect.posting.multi_min.is_some() {
            if expect.released == Some(true) {
                self.retire(context);
            }
        } else if let Some(memory) = self.memory.get(&context) {
            if expect.ending != Ending::Told {
                assert!(is_all(&memory[want..], FRESH), "bytes behind {expect:?}");
                self.retire(context);
            }
        }
    }

    /// The application may reuse the buffer, and does.
    fn retire(&mut self, context: u64) {
        if let Some(mut memory) = self.memory.remove(&context) {
            memory.fill(SPENT);
            self.spent.push(memory);
        }
    }
}

impl Oracle {
    /// The context of the next message's send.
    pub(super) fn next_send(&self) -> u64 {
        SEND + self.messages.len() as u64
    }

    pub(super) fn apply(&mut self, entry: &Entry, net: &Net) {
        let at = entry.at;
        match entry.what {
            What::Accessed { .. } => panic!("there are no one-sided operations here"),
            What::Sent { message, link, rendezvous, pressed } => {
                self.sent(message, link, rendezvous, pressed);
            }
            What::Refused { message, errno } => {
                let message = &mut self.messages[message];
                if message.sending == Sending::Pending {
                    message.sending = Sending::Doomed(errno, Cause::PeerUnreachable);
                }
            }
            What::Arrived { message, rendezvous } => {
                assert_eq!(self.messages[message].stage, Stage::Sent);
                assert_eq!(self.messages[message].rendezvous, rendezvous);
                self.messages[message].stage = Stage::Arrived;
                self.sides[at].arrive(&self.messages, message);
            }
            What::Met { peer } => self.sides[at].dead.retain(|(dead, ..)| *dead != peer),
            What::Departed { peer, departure } => {
                self.departed(at, peer, departure, net.weather.push_max)
            }
            What::Completed(c) => self.reported(at, &c, None, net),
            What::Failed(f) => self.reported(at, &f.completion, Some(&f), net),
        }
    }

    fn sent(&mut self, index: usize, link: usize, rendezvous: bool, pressed: bool) {
        let (earlier, rest) = self.messages.split_at_mut(index);
        let message = &mut rest[0];
        let eager_max = self.sides[message.from].eager_max;
        assert_eq!(rendezvous, message.len > eager_max || pressed, "the way of {message:?}");
        if message.fence {
            let open = earlier.iter().find(|m| {
                (m.from, m.to) == (message.from, message.to)
                    && matches!(m.sending, Sending::Pending | Sending::Doomed(..))
            });
            assert!(open.is_none(), "message {index} passed its fence: {open:?}");
        }
        self.sides[message.from].dead.retain(|(dead, ..)| *dead != message.to);
        message.stage = Stage::Sent;
        message.rendezvous = rendezvous;
        message.link = link;
        if !rendezvous && !message.delivery {
            self.due.push(index);
        }
    }

    fn departed(&mut self, at: Slot, peer: Slot, departure: Departure, push_max: usize) {
        let (error, cause) = match departure {
            Departure::Closed => (libc::ECONNRESET, Cause::PeerClosed),
            Departure::Failed(e) if e.0 == libc::EHOSTDOWN => (libc::EHOSTUNREACH, Cause::PeerDied),
            Departure::Failed(e) => (e.0, Cause::LinkBroke),
        };
        for message in self.messages.iter_mut().filter(|m| (m.from, m.to) == (at, peer)) {
            if message.sending == Sending::Pending {
                message.sending = Sending::Doomed(error, cause);
            }
        }
        let died = departure != Departure::Closed;
        self.sides[at].depart(&self.messages, peer, (error, cause), died, push_max);
    }

    fn reported(&mut self, at: Slot, c: &Completion, failure: Option<&Failure>, net: &Net) {
        self.reports += 1;
        if c.direction == Direction::Receive {
            self.sides[at].reported(c, failure, &mut self.messages, net);
            return;
        }
        let index = (c.context - SEND) as usize;
        let message = &mut self.messages[index];
        assert_eq!(
            (message.from, c.tagged, c.tag, c.report.entry(), c.len, c.data, c.buffer_released),
            (at, message.envelope.tagged, message.envelope.tag, message.report, 0, None, false)
        );
        let injected = message.inject && !message.delivery;
        let whole = message.rendezvous && message.len <= net.weather.push_max;
        // It was written, and the receiver will be notified.
        let seen = net.weather.windows.max > 0 && message.stage == Stage::Arrived;
        let seen = seen && message.rendezvous && !message.delivery;
        let may_leave = net.weather.outlives && whole && !message.delivery || seen;
        let pends = message.sending == Sending::Pending && !injected;
        let left = may_leave && pends && failure.is_none();
        let fits = match (message.sending, failure.map(|f| (f.error, f.cause))) {
            (Sending::Doomed(error, cause), Some(report)) if report == (error, cause) => true,
            // Its FIN was here before the departure, and its device had not reported the writes.
            (Sending::Doomed(..), report) if net.weather.windows.max > 0 && message.rendezvous => {
                match (message.stage, report) {
                    (Stage::Consumed, None) => true,
                    (Stage::Refused(e), Some((error, Cause::ReceiverRefused))) => error == e,
                    _ => false,
                }
            }
            (Sending::Pending, None) => {
                let waits = message.rendezvous || message.delivery;
                injected
                    || if waits && !left {
                        message.stage == Stage::Consumed
                    } else {
                        message.stage != Stage::Queued
                    }
            }
            (Sending::Pending, Some((error, Cause::ReceiverRefused))) => {
                message.stage == Stage::Refused(error)
            }
            (Sending::Pending, Some((error, Cause::PeerUnreachable))) => {
                error == libc::EPIPE && net.is_broken(message.link)
            }
            _ => false,
        };
        assert!(fits, "unforeseen report {c:?} {failure:?} of message {index}: {message:?}");
        message.sending = Sending::Done;
        message.left = left;
        message.adrift = left && net.is_broken(message.link);
        message.memory.0.fill(SPENT);
    }

    /// The current call, on the endpoint at `at`, returns.
    pub(super) fn end_call(&mut self, at: Slot) {
        for index in self.due.drain(..) {
            let message = &self.messages[index];
            let done = matches!(message.sending, Sending::Done | Sending::Void);
            assert!(done, "message {index} left but is not complete: {message:?}");
        }
        for (index, message) in self.messages.iter().enumerate().filter(|(_, m)| m.from == at) {
            let doomed = matches!(message.sending, Sending::Doomed(..));
            assert!(!doomed, "message {index} should have failed: {message:?}");
        }
        let late = self.sides[at].expects.iter().find(|e| e.now);
        assert!(late.is_none(), "not reported: {late:?}");
    }

    /// Forgets the endpoint at `at`, with everything that was pending there.
    pub(super) fn forget(&mut self, at: Slot) {
        for message in self.messages.iter_mut().filter(|m| m.from == at) {
            if message.sending != Sending::Done {
                message.sending = Sending::Void;
            }
        }
        self.check_spent(at);
        self.sides[at] = Side { spent: Vec::new(), ..Side::default() };
    }

    /// Asserts that no buffer changed after its operation had ended.
    pub(super) fn check_spent(&self, at: Slot) {
        assert!(self.sides[at].spent.iter().all(|m| is_all(m, SPENT)), "a late write at {at}");
    }

    /// Asserts that every pending send waits for a receive, or behind one that does.
    pub(super) fn check_at_rest(&self) {
        for (slot, side) in self.sides.iter().enumerate() {
            assert!(side.expects.is_empty(), "{slot} never reported {:?}", side.expects);
        }
        for (index, message) in self.messages.iter().enumerate() {
            if message.sending != Sending::Pending {
                continue;
            }
            let side = &self.sides[message.to];
            let waits = |w: &Waiting| w.message == index;
            let fenced = || {
                self.messages[..index].iter().any(|m| {
                    (m.from, m.to) == (message.from, message.to)
                        && m.stage != Stage::Queued
                        && (m.sending == Sending::Pending || m.inject || m.left)
                })
            };
            let legitimate = match message.stage {
                Stage::Arrived => {
                    side.unexpected.iter().flatten().any(waits)
                        || side.claimed.values().any(|(_, w)| waits(w))
                }
                Stage::Queued => fenced(),
                _ => false,
            };
            assert!(legitimate, "message {index} pends for no reason: {message:?}");
        }
    }
}
