//! Receiving: matching in posting order, unexpected messages in arrival order.

use super::cooperate::Sharing;
use super::engine::{Core, Engine, lookup_source};
use super::index_list::Key;
use super::packet::{Envelope, Packet, Ranges};
use super::pushed::{Announcement, Place};
use super::windows::Lending;
use super::{ANY_SOURCE, Cause, Completion, Direction, FI_ETRUNC, Failure, Host, OpError};
use crate::memory::SegmentList;
use crate::transport::{Iface, PeerId};

/// A receive as the endpoint asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceiveOp {
    /// Where to.
    pub(crate) segments: SegmentList,
    /// Tagged or plain messages.
    pub(crate) tagged: bool,
    /// Tag wanted, and the bits of it that do not matter (all of them for plain messages).
    pub(crate) tag: u64,
    pub(crate) ignore: u64,
    /// Sender wanted, or [`ANY_SOURCE`].
    pub(crate) source: u64,
    /// The application's context.
    pub(crate) context: u64,
    /// Whether a completion entry is wanted.
    pub(crate) report: bool,
    /// `Some(n)`: take messages until less than `n` bytes are free.
    pub(crate) multi_min: Option<usize>,
}

/// What to do with a message that a peek finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PeekAction {
    /// Leave it.
    Look,
    /// Set it aside for a receive with the same context.
    Claim,
    /// Throw it away.
    Discard,
}

/// A posted receive.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) source: u64,
    tag: u64,
    ignore: u64,
    target: Target,
}

/// Where a matched message goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) segments: SegmentList,
    pub(super) context: u64,
    pub(super) report: bool,
    /// Part of this multi-receive buffer.
    pub(super) multi: Option<Key>,
}

/// A buffer that takes several messages.
#[derive(Debug)]
pub(super) struct MultiBuffer {
    segments: SegmentList,
    used: usize,
    min_free: usize,
    /// Messages being placed.
    in_flight: usize,
    /// No further message is matched.
    retired: bool,
    /// Cancelled while messages were being placed.
    cancelled: bool,
}

/// A message that came before its receive.
#[derive(Debug)]
pub(super) struct Unexpected {
    pub(super) peer: PeerId,
    pub(super) envelope: Envelope,
    pub(super) body: Body,
}

/// Its bytes, or where they are.
#[derive(Debug)]
pub(super) enum Body {
    Eager {
        bytes: Box<[u8]>,
        ack: Option<u64>,
    },
    Rts {
        rts: Announcement,
        /// The first bytes, if the sender pushes.
        bytes: Vec<u8>,
    },
    /// The sender went away before the bytes came.
    Lost {
        len: u64,
        error: i32,
    },
}

impl Unexpected {
    fn len(&self) -> usize {
        match &self.body {
            Body::Eager { bytes, .. } => bytes.len(),
            Body::Rts { rts, .. } => rts.len as usize,
            Body::Lost { len, .. } => *len as usize,
        }
    }
}

/// How a matched receive ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    /// Bytes placed.
    pub(super) len: usize,
    /// Bytes that did not fit.
    pub(super) overflow: usize,
    /// What went wrong otherwise: a positive error number and its cause.
    pub(super) error: Option<(i32, Cause)>,
}

impl Outcome {
    pub(super) fn failed(len: usize, error: i32, cause: Cause) -> Self {
        Self { len, overflow: 0, error: Some((error, cause)) }
    }
}

/// A matched rendezvous message on its way.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) peer: PeerId,
    pub(super) envelope: Envelope,
    pub(super) target: Target,
    pub(super) tx: u64,
    /// Length of the message.
    pub(super) len: u64,
    /// Bytes that fit, to be moved.
    pub(super) want: usize,
    /// Bytes moved.
    pub(super) received: usize,
    /// The sender's buffer.
    pub(super) ranges: Ranges,
    /// The sender moves the bytes: a CTS was sent, or it pushes.
    pub(super) cleared: bool,
    /// A CTS was sent for a message that is pushed.
    pub(super) asked: bool,
    /// Its stream broke or windows did not work, and the rest comes as fragments.
    pub(super) resumed: bool,
    /// Its next bytes are being written to its buffer by a stream: nobody else may, and it may not
    /// end.
    pub(super) placing: bool,
    /// What of it is lent to the sender.
    pub(super) lending: Lending,
    /// What of it both ends copy.
    pub(super) sharing: Option<Sharing>,
}

fn received(envelope: &Envelope, target: &Target, source: u64, len: usize) -> Completion {
    Completion {
        direction: Direction::Receive,
        tagged: envelope.tagged,
        context: target.context,
        report: target.report,
        len,
        buffer: target.segments.first_addr(),
        data: envelope.data,
        tag: envelope.tag,
        source,
        buffer_released: false,
    }
}

impl<I: Iface> Engine<I> {
    /// Posts a receive, or serves it from the messages that are here already.
    #[inline]
    pub(crate) fn receive(&mut self, op: &ReceiveOp, host: &mut impl Host) -> Result<(), OpError> {
        self.core.receive(op, host)
    }

    /// Looks for a message that matches `op`; reports it, or fails with ENOMSG.
    /// Errors: EINVAL for a claim whose context has a message set aside already.
    pub(crate) fn peek(
        &mut self,
        op: &ReceiveOp,
        action: PeekAction,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        if action == PeekAction::Claim && self.core.claimed.contains_key(&op.context) {
            return Err(OpError::Error(libc::EINVAL));
        }
        self.core.peek(op, action, host);
        Ok(())
    }

    /// Receives (or discards) the message that an earlier peek set aside for `op.context`.
    pub(crate) fn receive_claimed(
        &mut self,
        op: &ReceiveOp,
        discard: bool,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        let Some(message) = self.core.claimed.remove(&op.context) else {
            return Err(OpError::Error(libc::EINVAL));
        };
        if discard {
            self.core.discard(message, op, host);
        } else {
            let target = op.target();
            self.core.serve(message, target, host);
        }
        Ok(())
    }

    /// Takes back the oldest posted receive with `context`. False: there is none.
    pub(crate) fn cancel(&mut self, context: u64, host: &mut impl Host) -> bool {
        self.core.cancel(context, host)
    }
}

impl ReceiveOp {
    fn target(&self) -> Target {
        Target { segments: self.segments, context: self.context, report: self.report, multi: None }
    }
}

impl Core {
    #[inline]
    fn receive(&mut self, op: &ReceiveOp, host: &mut impl Host) -> Result<(), OpError> {
        if self.posted.len() >= self.limits.rx_max {
            return Err(OpError::Again);
        }
        if op.multi_min.is_none() {
            if self.unexpected.of(op.tagged).is_empty() {
                self.post_or_fail(op, op.target(), host);
                return Ok(());
            }
            return match self.find_unexpected(op, host) {
                Some(key) => {
                    if let Some(message) = self.unexpected.of(op.tagged).remove(key) {
                        self.serve(message, op.target(), host);
                    }
                    Ok(())
                }
                None => {
                    self.post_or_fail(op, op.target(), host);
                    Ok(())
                }
            };
        }
        self.post_multi(op, host);
        Ok(())
    }

    /// How a receive ends that only a dead peer could serve.
    fn hopeless(&mut self, op: &ReceiveOp, host: &impl Host) -> Option<(i32, Cause)> {
        let Self { dead, peers, .. } = self;
        dead.iter()
            .find(|(peer, ..)| lookup_source(peers, *peer, host) == op.source)
            .map(|(_, error, cause)| (*error, *cause))
    }

    /// Posts a receive that no message here matches, or fails it if none can come.
    #[inline]
    fn post_or_fail(&mut self, op: &ReceiveOp, target: Target, host: &mut impl Host) {
        if !self.dead.is_empty() && op.source != ANY_SOURCE {
            if let Some((error, cause)) = self.hopeless(op, host) {
                let envelope = Envelope { tagged: op.tagged, tag: op.tag, data: None };
                let posted = Posted { source: op.source, tag: op.tag, ignore: op.ignore, target };
                self.fail_posted(&posted, &envelope, error, cause, host);
                return;
            }
        }
        self.post(op, target);
    }

    #[inline]
    fn post(&mut self, op: &ReceiveOp, target: Target) {
        let posted = Posted { source: op.source, tag: op.tag, ignore: op.ignore, target };
        self.posted.of(op.tagged).push_back(posted);
    }

    fn post_multi(&mut self, op: &ReceiveOp, host: &mut impl Host) {
        let multi = self.buffers.push_back(MultiBuffer {
            segments: op.segments,
            used: 0,
            min_free: op.multi_min.unwrap_or(0).max(1),
            in_flight: 0,
            retired: false,
            cancelled: false,
        });
        let target = Target { multi: Some(multi), ..op.target() };
        while let Some(key) = self.find_unexpected(op, host) {
            let Some(message) = self.unexpected.of(op.tagged).remove(key) else { break };
            let place = self.reserve(target, message.len());
            self.serve_into(message, place, host);
            if self.buffers.get(multi).is_none_or(|buffer| buffer.retired) {
                return;
            }
        }
        self.post_or_fail(op, target, host);
    }

    /// The part of a multi-receive buffer that the next message gets; other targets as they are.
    #[inline]
    fn reserve(&mut self, target: Target, len: usize) -> Target {
        let Some(buffer) = target.multi.and_then(|multi| self.buffers.get_mut(multi)) else {
            return target;
        };
        let segments = buffer.segments.slice(buffer.used, len);
        buffer.used += segments.len();
        buffer.in_flight += 1;
        buffer.retired = buffer.segments.len() - buffer.used < buffer.min_free;
        Target { segments, ..target }
    }

    fn find_unexpected(&mut self, op: &ReceiveOp, host: &impl Host) -> Option<Key> {
        let Self { unexpected, peers, .. } = self;
        unexpected
            .of(op.tagged)
            .iter()
            .find(|(_, m)| {
                (m.envelope.tag ^ op.tag) & !op.ignore == 0
                    && (op.source == ANY_SOURCE || lookup_source(peers, m.peer, host) == op.source)
            })
            .map(|(key, _)| key)
    }

    /// Takes the first posted receive that matches out of the list (or reserves its part).
    #[inline]
    fn take_match(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        len: usize,
        host: &impl Host,
    ) -> Option<Target> {
        let Self { posted, peers, .. } = self;
        let list = posted.of(envelope.tagged);
        let (key, multi) = list
            .iter()
            .find(|(_, p)| {
                (p.tag ^ envelope.tag) & !p.ignore == 0
                    && (p.source == ANY_SOURCE || lookup_source(peers, peer, host) == p.source)
            })
            .map(|(key, p)| (key, p.target.multi))?;
        let Some(multi) = multi else {
            return list.remove(key).map(|posted| posted.target);
        };
        let target = list.get(key)?.target;
        let part = self.reserve(target, len);
        if self.buffers.get(multi).is_none_or(|buffer| buffer.retired) {
            self.posted.of(envelope.tagged).remove(key);
        }
        Some(part)
    }

    #[inline]
    pub(super) fn on_eager(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        ack: Option<u64>,
        payload: &[u8],
        host: &mut impl Host,
    ) {
        match self.take_match(peer, envelope, payload.len(), host) {
            Some(target) => self.place(peer, envelope, ack, payload, &target, host),
            None => {
                self.counts.unexpected += 1;
                self.unexpected_bytes += payload.len();
                let body = Body::Eager { bytes: payload.into(), ack };
                self.unexpected.of(envelope.tagged).push_back(Unexpected {
                    peer,
                    envelope: *envelope,
                    body,
                });
            }
        }
    }

    /// Copies a whole message to its target and completes it.
    #[inline]
    fn place(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        ack: Option<u64>,
        payload: &[u8],
        target: &Target,
        host: &mut impl Host,
    ) {
        let len = target.segments.copy_in(0, payload);
        if let Some(tx) = ack {
            self.outbox.push_back((peer, Packet::Fin { tx, status: 0 }));
        }
        let outcome = Outcome { len, overflow: payload.len() - len, error: None };
        self.finish_receive(peer, envelope, target, outcome, host);
    }

    pub(super) fn on_rts(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        rts: Announcement,
        payload: &[u8],
        host: &mut impl Host,
    ) {
        let bytes = payload.get(..payload.len().min(rts.pushed as usize)).unwrap_or(&[]);
        match self.take_match(peer, envelope, rts.len as usize, host) {
            Some(target) => {
                self.activate(peer, *envelope, rts, target, bytes, host);
            }
            None => {
                self.counts.unexpected += 1;
                self.unexpected_bytes += bytes.len();
                let body = Body::Rts { rts, bytes: bytes.to_vec() };
                let unexpected = Unexpected { peer, envelope: *envelope, body };
                let key = self.unexpected.of(envelope.tagged).push_back(unexpected);
                if (bytes.len() as u64) < rts.pushed {
                    self.pushed.insert(peer, rts.tx, Place::Unexpected(envelope.tagged, key));
                }
            }
        }
    }

    /// A receive was found for an announced message, whose first `bytes` may be here.
    fn activate(
        &mut self,
        peer: PeerId,
        envelope: Envelope,
        rts: Announcement,
        target: Target,
        bytes: &[u8],
        host: &mut impl Host,
    ) {
        let Announcement { tx, len, pushed, broken, ranges } = rts;
        let want = target.segments.len().min(len as usize);
        let received =
            target.segments.copy_in(0, bytes.get(..bytes.len().min(want)).unwrap_or(&[]));
        let key = self.active.push_back(Active {
            peer,
            envelope,
            target,
            tx,
            len,
            want,
            received,
            ranges,
            cleared: pushed > 0 || broken,
            asked: false,
            resumed: false,
            placing: false,
            lending: Lending::default(),
            sharing: None,
        });
        if broken && received < want {
            self.resume(key);
        } else if pushed == 0 && !broken {
            self.pulls.push_back(key);
        } else if received == want {
            self.finish_active(key, host);
        } else {
            if (bytes.len() as u64) < pushed {
                self.pushed.insert(peer, tx, Place::Active(key));
                self.attentive = true;
            }
            if want as u64 > pushed || self.pressure {
                self.ask_for_rest(key);
            }
        }
    }

    fn serve(&mut self, message: Unexpected, target: Target, host: &mut impl Host) {
        let place = self.reserve(target, message.len());
        self.serve_into(message, place, host);
    }

    fn serve_into(&mut self, message: Unexpected, target: Target, host: &mut impl Host) {
        let Unexpected { peer, envelope, body } = message;
        match body {
            Body::Eager { bytes, ack } => {
                self.unexpected_bytes -= bytes.len();
                self.place(peer, &envelope, ack, &bytes, &target, host);
            }
            Body::Rts { rts, bytes } => {
                self.unexpected_bytes -= bytes.len();
                self.pushed.remove(peer, rts.tx);
                self.activate(peer, envelope, rts, target, &bytes, host);
                // The sender may be waiting for us to have memory again.
                if (bytes.len() as u64) < rts.pushed {
                    if let Some(Place::Active(key)) = self.pushed.find(peer, rts.tx) {
                        self.ask_for_rest(key);
                    }
                }
            }
            Body::Lost { error, .. } => {
                let outcome = Outcome::failed(0, error, Cause::SenderLost);
                self.finish_receive(peer, &envelope, &target, outcome, host);
            }
        }
    }

    /// Ends a matched receive.
    #[inline]
    pub(super) fn finish_receive(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        target: &Target,
        outcome: Outcome,
        host: &mut impl Host,
    ) {
        let Outcome { len, overflow, error } = outcome;
        let source = self.source(peer, host);
        let mut completion = received(envelope, target, source, len);
        let mut cancelled = false;
        if let Some(multi) = target.multi {
            if let Some(buffer) = self.buffers.get_mut(multi) {
                buffer.in_flight = buffer.in_flight.saturating_sub(1);
                if buffer.retired && buffer.in_flight == 0 {
                    completion.buffer_released = !buffer.cancelled;
                    cancelled = buffer.cancelled;
                    self.buffers.remove(multi);
                }
            }
        }
        match error {
            None if overflow == 0 => host.complete(&completion),
            None => host.fail(&Failure {
                completion,
                error: FI_ETRUNC,
                overflow,
                cause: Cause::Truncated,
            }),
            Some((error, cause)) => host.fail(&Failure { completion, error, overflow, cause }),
        }
        if cancelled {
            self.fail_cancelled(envelope.tagged, envelope.tag, target, host);
        }
    }

    fn fail_cancelled(&self, tagged: bool, tag: u64, target: &Target, host: &mut impl Host) {
        let envelope = Envelope { tagged, tag, data: None };
        let mut completion = received(&envelope, target, super::UNKNOWN_SOURCE, 0);
        completion.buffer_released = target.multi.is_some();
        host.fail(&Failure {
            completion,
            error: libc::ECANCELED,
            overflow: 0,
            cause: Cause::Cancelled,
        });
    }

    fn peek(&mut self, op: &ReceiveOp, action: PeekAction, host: &mut impl Host) {
        let Some(key) = self.find_unexpected(op, host) else {
            let envelope = Envelope { tagged: op.tagged, tag: op.tag, data: None };
            let completion = received(&envelope, &op.target(), super::UNKNOWN_SOURCE, 0);
            host.fail(&Failure {
                completion,
                error: libc::ENOMSG,
                overflow: 0,
                cause: Cause::NoMessage,
            });
            return;
        };
        if action == PeekAction::Discard {
            if let Some(message) = self.unexpected.of(op.tagged).remove(key) {
                self.discard(message, op, host);
            }
            return;
        }
        let Self { unexpected, peers, .. } = self;
        if let Some(message) = unexpected.of(op.tagged).get(key) {
            let source = lookup_source(peers, message.peer, host);
            let target = Target { segments: SegmentList::EMPTY, ..op.target() };
            host.complete(&received(&message.envelope, &target, source, message.len()));
        }
        if action == PeekAction::Claim {
            if let Some(message) = self.unexpected.of(op.tagged).remove(key) {
                if let Body::Rts { rts, .. } = &message.body {
                    self.pushed.moved(message.peer, rts.tx, Place::Claimed(op.context));
                }
                self.claimed.insert(op.context, message);
            }
        }
    }

    fn discard(&mut self, message: Unexpected, op: &ReceiveOp, host: &mut impl Host) {
        let len = message.len();
        match message.body {
            Body::Eager { bytes, ack } => {
                self.unexpected_bytes -= bytes.len();
                if let Some(tx) = ack {
                    self.outbox.push_back((message.peer, Packet::Fin { tx, status: 0 }));
                }
            }
            Body::Rts { rts, bytes } => {
                self.unexpected_bytes -= bytes.len();
                self.pushed.remove(message.peer, rts.tx);
                self.outbox.push_back((message.peer, Packet::Fin { tx: rts.tx, status: 0 }));
            }
            Body::Lost { .. } => {}
        }
        let source = self.source(message.peer, host);
        let target = Target { segments: SegmentList::EMPTY, ..op.target() };
        host.complete(&received(&message.envelope, &target, source, len));
    }

    fn cancel(&mut self, context: u64, host: &mut impl Host) -> bool {
        for tagged in [true, false] {
            let found = self.posted.of(tagged).iter().find(|(_, p)| p.target.context == context);
            let Some(key) = found.map(|(key, _)| key) else { continue };
            let Some(posted) = self.posted.of(tagged).remove(key) else { continue };
            self.end_posted(tagged, &posted, host);
            return true;
        }
        false
    }

    /// Ends a posted receive that was taken out of its list, as cancelled.
    fn end_posted(&mut self, tagged: bool, posted: &Posted, host: &mut impl Host) {
        if let Some(multi) = posted.target.multi {
            if let Some(buffer) = self.buffers.get_mut(multi) {
                if buffer.in_flight > 0 {
                    buffer.retired = true;
                    buffer.cancelled = true;
                    return;
                }
            }
            self.buffers.remove(multi);
        }
        self.fail_cancelled(tagged, posted.tag, &posted.target, host);
    }

    /// Fails the receives that only `source` could have served.
    pub(super) fn fail_directed(
        &mut self,
        source: u64,
        error: i32,
        cause: Cause,
        host: &mut impl Host,
    ) {
        for tagged in [true, false] {
            for key in self.posted.of(tagged).keys_where(|p| p.source == source) {
                let Some(posted) = self.posted.of(tagged).remove(key) else { continue };
                let envelope = Envelope { tagged, tag: posted.tag, data: None };
                self.fail_posted(&posted, &envelope, error, cause, host);
            }
        }
    }

    /// Fails a receive that is in no list; a buffer with messages on their way goes back with the
    /// last of them.
    fn fail_posted(
        &mut self,
        posted: &Posted,
        envelope: &Envelope,
        error: i32,
        cause: Cause,
        host: &mut impl Host,
    ) {
        let mut completion = received(envelope, &posted.target, posted.source, 0);
        if let Some(multi) = posted.target.multi {
            if let Some(buffer) = self.buffers.get_mut(multi) {
                buffer.retired = true;
                if buffer.in_flight > 0 {
                    return;
                }
            }
            self.buffers.remove(multi);
            completion.buffer_released = true;
        }
        host.fail(&Failure { completion, error, overflow: 0, cause });
    }
}
