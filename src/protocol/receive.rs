//! Receiving: messages match receives in posting order, and receives match unexpected messages in arrival order.

use super::arrivals::Active;
use super::index_list::Key;
use super::kept::Kept;
use super::limits::SAMPLED;
use super::matching::{Body, EACH, Matching, Outcome, Unexpected};
use super::message::Announcement;
use super::packet::Envelope;
use super::receives::{Filled, PartEnd, Posted, ReceiveOp, Receives, Target};
use super::schemes::push::Place;
use super::spaces::Space;
use super::state::{Core, Engine};
use super::{ANY_SOURCE, Cause, Completion, Direction, FI_ETRUNC, Failure, Host, OpError, Report};
use crate::memory::{Buffers, SegmentList};
use crate::sys::numbers::NumberMap;
use crate::telemetry::trace::Kind;
use crate::transport::{Address, Iface, PeerId};

/// The limit for unexpected messages is not lowered below this, bytes: something else may have taken the memory, and
/// below it nearly each message would change the pressure.
const KEPT_LEAST: usize = 64 << 10;

/// What to do with a message that a peek finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PeekAction {
    /// Leave it.
    Look,
    /// Set it aside for a receive with the same context (FI_CLAIM).
    Claim,
    /// Discard it (FI_DISCARD).
    Discard,
}

/// A copy. `None`: no memory, which must not end the application.
fn copy_of(payload: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(payload.len()).ok()?;
    bytes.extend_from_slice(payload);
    Some(bytes)
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
    /// The address book has the peer that it had under `from` under `to`: posted receives from it follow.
    pub(crate) fn rename_source(&mut self, from: u64, to: u64, host: &mut impl Host) {
        let shared = self.core.limits.shares_receives;
        self.core.matching.receives(shared, host).rename_source(from, to);
    }

    /// Posts a receive, or serves it with an unexpected message.
    pub(crate) fn receive(&mut self, op: &ReceiveOp, host: &mut impl Host) -> Result<(), OpError> {
        self.core.stirred = true;
        let posted = self.core.receive(op, host);
        self.answer_at_once(host);
        posted
    }

    /// The fast path: a receive of one message into one segment, no unexpected message in its space, and not only a
    /// dead peer as its source. False: nothing was done, and the caller uses [`Engine::receive`].
    #[inline(always)]
    pub(crate) fn try_post<B: Buffers>(
        &mut self,
        op: &ReceiveOp<B>,
        is_hopeless: impl FnOnce(&mut Self) -> bool,
    ) -> bool {
        if op.source != ANY_SOURCE && self.core.peers.has_dead() && is_hopeless(self) {
            return false;
        }
        let core = &mut self.core;
        let space = op.space();
        let Some(segment) = op.segments.one() else { return false };
        if op.multi_min.is_some()
            || !core.matching.unexpected.of(space).is_empty()
            || core.matching.own.posted.len_of(space.rx) >= core.limits.rx_max
        {
            return false;
        }
        let end = (op.context, op.report);
        core.matching.own.post_segment((space, op.tag, op.ignore), op.source, segment, end);
        true
    }

    /// Sends the replies of a call that matched an unexpected message. The application finds the completion in its
    /// queue without a progress call, and the sender may be waiting.
    #[inline]
    fn answer_at_once(&mut self, host: &mut impl Host) {
        if !self.core.outbox.is_empty() {
            self.flush_outbox(host);
        }
    }

    /// Whether a receive from `source` could only be served by a dead peer.
    #[cold]
    pub(crate) fn is_hopeless(&mut self, source: u64, host: &impl Host) -> bool {
        self.core.peers.hopeless(source, host).is_some()
    }

    /// Looks for a message that matches `op`: reports it, or fails with ENOMSG. Errors: EINVAL for a claim if a message
    /// is already claimed for that context.
    pub(crate) fn peek(
        &mut self,
        op: &ReceiveOp,
        action: PeekAction,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        self.core.stirred = true;
        if action == PeekAction::Claim && self.has_claimed(op) {
            return Err(OpError::Error(libc::EINVAL));
        }
        self.core.peek(op, action, host);
        self.answer_at_once(host);
        Ok(())
    }

    /// Receives (or discards) the message that an earlier peek claimed for `op.context`.
    pub(crate) fn receive_claimed(
        &mut self,
        op: &ReceiveOp,
        discard: bool,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        self.core.stirred = true;
        let Some(message) = self.core.matching.claimed.remove(&op.claim()) else {
            return Err(OpError::Error(libc::EINVAL));
        };
        if discard {
            self.core.discard(message, op, host);
        } else {
            let target = op.target();
            self.core.serve(message, target, host);
        }
        self.answer_at_once(host);
        Ok(())
    }

    /// Whether an earlier peek has claimed a message for `op.context`.
    pub(crate) fn has_claimed(&self, op: &ReceiveOp) -> bool {
        self.core.matching.claimed.contains_key(&op.claim())
    }

    /// Cancels the oldest receive with `context` that is posted to receive context `rx`. False: there is none.
    pub(crate) fn cancel(&mut self, rx: u8, context: u64, host: &mut impl Host) -> bool {
        self.core.stirred = true;
        self.core.cancel(rx, context, host)
    }

    /// The arrival number of the first unexpected message that matches `op`, a receive for a shared queue.
    pub(crate) fn first_arrival(&mut self, op: &ReceiveOp, host: &impl Host) -> Option<u64> {
        let key = self.core.find_unexpected(op, host)?;
        self.core.matching.unexpected.of(op.space()).get(key).map(|message| message.arrival)
    }

    /// Gives the message that `first_arrival` found to the shared queue, which `op` was posted to. False: no receive of
    /// the queue matches the message.
    pub(crate) fn serve_first(&mut self, op: &ReceiveOp, host: &mut impl Host) -> bool {
        self.core.stirred = true;
        let Some(key) = self.core.find_unexpected(op, host) else { return false };
        let Some(message) = self.core.matching.unexpected.of(op.space()).get(key) else {
            return false;
        };
        let (peer, envelope, len) = (message.peer, message.envelope, message.len());
        let Some(target) = self.core.take_match(peer, &envelope, len, host) else { return false };
        if let Some(message) = self.core.matching.unexpected.of(op.space()).remove(key) {
            self.core.serve_into(message, target, host);
        }
        self.answer_at_once(host);
        true
    }

    /// Another endpoint of a shared queue has met the peer at this address: receives from it are not hopeless any more.
    pub(crate) fn revive(&mut self, address: &Address) {
        self.core.peers.revive(address);
    }

    /// Fails the receives that wait for `source`, if this endpoint knows that peer to be dead: for those of a shared
    /// queue, which are posted all the same.
    pub(crate) fn fail_hopeless(&mut self, source: u64, host: &mut impl Host) {
        self.core.stirred = true;
        if let Some(error) = self.core.peers.hopeless(source, host) {
            self.core.fail_directed(&NumberMap::from_iter([(source, error)]), host);
        }
    }

    /// Ends the receives whose messages are still arriving: the endpoint closes, and their buffers belong to a shared
    /// queue that stays.
    pub(crate) fn abandon_receives(&mut self, host: &mut impl Host) {
        self.core.stirred = true;
        for key in self.core.arrivals.active.keys_where(|_| true) {
            let Some(Active { message, .. }) = self.core.arrivals.remove(key) else {
                continue;
            };
            let outcome = Outcome::failed(message.received, (libc::ECANCELED, Cause::Cancelled));
            self.core.end_active(&message, outcome, host);
        }
    }

    /// Closes a receive context: removes its posted receives. False: messages are still arriving in its buffers. Until
    /// the next call of this, or [`Engine::reopen_receives`], no other message matches.
    pub(crate) fn close_receives(&mut self, rx: u8) -> bool {
        self.core.stirred = true;
        let Core { matching, arrivals, .. } = &mut self.core;
        matching.own.hold(rx);
        if arrivals.active.iter().any(|(_, active)| active.message.envelope.rx == rx) {
            return false;
        }
        for (_, posted) in matching.own.take_held(rx) {
            matching.own.withdraw(&posted.target, false);
        }
        true
    }

    /// A receive context does not close: its receives are as if no call had been made.
    pub(crate) fn reopen_receives(&mut self, rx: u8, host: &mut impl Host) {
        self.core.stirred = true;
        for (Space { tagged, .. }, posted) in self.core.matching.own.take_held(rx) {
            self.core.match_or_post(&posted.op(tagged), posted.target, host);
        }
        self.answer_at_once(host);
    }
}

impl Core {
    fn receive(&mut self, op: &ReceiveOp, host: &mut impl Host) -> Result<(), OpError> {
        let space = op.space();
        if self.matching.own.posted.len_of(space.rx) >= self.limits.rx_max {
            return Err(OpError::Again);
        }
        if op.multi_min.is_none() && self.matching.unexpected.of(space).is_empty() {
            self.post_or_fail(op, op.target(), host);
        } else {
            let target = self.matching.own.target(op);
            self.match_or_post(op, target, host);
        }
        Ok(())
    }

    /// Posts a receive that no unexpected message matches, or fails it if no message can come.
    #[inline]
    fn post_or_fail(&mut self, op: &ReceiveOp, target: Target, host: &mut impl Host) {
        if self.peers.has_dead() && op.source != ANY_SOURCE {
            if let Some(error) = self.peers.hopeless(op.source, host) {
                self.fail_posted(&Posted::new(op, target), &op.envelope(), error, host);
                return;
            }
        }
        self.matching.own.post_at(op, target);
    }

    /// Serves a receive with an unexpected message, or a multi-receive with as many as it takes; else posts it.
    fn match_or_post(&mut self, op: &ReceiveOp, target: Target, host: &mut impl Host) {
        while let Some(key) = self.find_unexpected(op, host) {
            let Some(message) = self.matching.unexpected.of(op.space()).remove(key) else { break };
            let place = self.matching.own.reserve(target, message.len());
            self.serve_into(message, place, host);
            if target.multi.is_none_or(|multi| self.matching.own.is_retired(multi)) {
                return;
            }
        }
        self.post_or_fail(op, target, host);
    }

    fn find_unexpected(&mut self, op: &ReceiveOp, host: &impl Host) -> Option<Key> {
        self.matching.follow(host);
        let Self { matching: Matching { unexpected, .. }, peers, .. } = self;
        let name = (op.tag, op.source);
        let source = |m: &Unexpected| peers.source(m.peer, host);
        unexpected.of(op.space()).first_of(op.pattern(), name, |m| m.envelope.tag, source)
    }

    /// Takes the first posted receive that matches out of the list, or reserves space in its multi-receive buffer.
    #[inline]
    fn take_match(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        len: usize,
        host: &mut impl Host,
    ) -> Option<Target> {
        if self.limits.shares_receives {
            return self.take_shared(peer, envelope, len, host);
        }
        let source = self.peers.source(peer, host);
        self.matching.own.take(envelope.space(), envelope.tag, len, source)
    }

    fn take_shared(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        len: usize,
        host: &mut impl Host,
    ) -> Option<Target> {
        let source = self.peers.source(peer, host);
        let receives = host.shared_receives()?;
        let mut target = receives.take(envelope.space(), envelope.tag, len, source)?;
        target.report = Report::new(
            target.report.entry() || host.reports_all_receives(),
            target.report.context(),
        );
        Some(target)
    }

    /// Keeps an unexpected message.
    fn keep(&mut self, peer: PeerId, envelope: &Envelope, body: Body, host: &mut impl Host) -> Key {
        self.counts.unexpected += 1;
        let arrival = match self.limits.shares_receives {
            true => host.shared_receives().map_or(0, Receives::count_arrival),
            false => 0,
        };
        let is_timed = matches!(body, Body::Rts { .. }) || self.counts.unexpected % SAMPLED == 1;
        let since_ns = if is_timed { host.now_ns() } else { 0 };
        let message = Unexpected { peer, envelope: *envelope, body, arrival, since_ns };
        host.trace(Kind::Unexpected, peer, message.number(), message.len());
        self.matching.follow(host);
        let Self { matching, peers, .. } = self;
        let about = || (None, (envelope.tag, peers.source(peer, host)));
        matching.unexpected.of(envelope.space()).push_back(message, about)
    }

    /// Whether the receive context of a message exists.
    #[inline]
    fn has_context(&self, envelope: &Envelope) -> bool {
        usize::from(envelope.rx) < self.limits.contexts
    }

    /// Refuses a message for a receive context that does not exist.
    #[cold]
    fn refuse(&mut self, peer: PeerId, tx: Option<u64>) {
        self.counts.dropped += 1;
        if let Some(tx) = tx {
            self.outbox.finish(peer, tx, libc::ECONNREFUSED);
        }
    }

    /// The fast path: a message for a posted receive that takes it in one segment. False: nothing was done.
    #[inline(always)]
    pub(super) fn try_fill(
        &mut self,
        peer: PeerId,
        envelope: Envelope,
        payload: &[u8],
        host: &mut impl Host,
    ) -> bool {
        let Envelope { tagged, tag, data, rx } = envelope;
        if self.limits.shares_receives
            || self.limits.traced
            || (rx > 0 && !self.has_context(&envelope))
        {
            return false;
        }
        let source = self.peers.source(peer, host);
        let filled = self.matching.own.fill(Space { rx, tagged }, tag, payload, source);
        let Some(Filled { buffer, context, report }) = filled else { return false };
        host.complete_inline(&Completion {
            direction: Direction::Receive,
            tagged,
            context,
            report,
            len: payload.len(),
            buffer,
            data,
            tag,
            source,
            buffer_released: false,
        });
        true
    }

    /// Any eager message that the fast path does not take.
    #[inline(never)]
    pub(super) fn on_eager(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        ack: Option<u64>,
        payload: &[u8],
        host: &mut impl Host,
    ) {
        if !self.has_context(envelope) {
            return self.refuse(peer, ack);
        }
        match self.take_match(peer, envelope, payload.len(), host) {
            Some(target) => {
                host.trace(Kind::EagerReceived, peer, 0, payload.len());
                self.place(peer, envelope, ack, payload, &target, host);
            }
            None => match Kept::copy_of(payload) {
                Some(bytes) => {
                    self.matching.bytes += payload.len() + EACH;
                    self.keep(peer, envelope, Body::Eager { bytes, ack }, host);
                }
                None => self.run_short(peer, envelope, payload.len(), ack, host),
            },
        }
    }

    /// Lowers the limit for unexpected messages: memory ran out with what is kept now.
    pub(super) fn keep_less(&mut self) {
        let most = (self.matching.bytes / 2).max(KEPT_LEAST);
        self.limits.unexpected_max = self.limits.unexpected_max.min(most);
    }

    /// There is no memory for a message: the receive that matches it fails, and its sender gets a FIN with ENOMEM if it
    /// waits for one. From now on peers are asked to hold messages back earlier.
    #[cold]
    fn run_short(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        len: usize,
        ack: Option<u64>,
        host: &mut impl Host,
    ) {
        self.keep_less();
        if let Some(tx) = ack {
            self.outbox.finish(peer, tx, libc::ENOMEM);
        }
        let error = (libc::ENOMEM, Cause::ReceiverRefused);
        self.keep(peer, envelope, Body::Lost { len: len as u64, error }, host);
    }

    /// Copies a complete message to its target and reports the receive.
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
        let failed = len < payload.len().min(target.segments.len());
        if let Some(tx) = ack {
            self.outbox.finish(peer, tx, if failed { libc::EIO } else { 0 });
        }
        let overflow = payload.len() - len;
        let outcome = match failed {
            true => Outcome::failed(len, (libc::EIO, Cause::BufferUnwritable)),
            false => Outcome { len, overflow, error: None },
        };
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
        if !self.has_context(envelope) {
            return self.refuse(peer, Some(rts.tx));
        }
        let bytes = payload.get(..payload.len().min(rts.pushed as usize)).unwrap_or(&[]);
        match self.take_match(peer, envelope, rts.len as usize, host) {
            Some(target) => {
                self.activate(peer, *envelope, rts, target, bytes, host);
            }
            None => {
                let Some(kept) = copy_of(bytes) else {
                    if !rts.leaves {
                        self.outbox.finish(peer, rts.tx, libc::ENOMEM);
                    }
                    // The receive that it is for hears of it too.
                    return self.run_short(peer, envelope, rts.len as usize, None, host);
                };
                self.matching.bytes += bytes.len();
                let body = Body::Rts { rts, bytes: kept };
                let key = self.keep(peer, envelope, body, host);
                if (bytes.len() as u64) < rts.pushed {
                    self.arrivals.pushed.insert(
                        peer,
                        rts.tx,
                        Place::Unexpected(envelope.space(), key),
                    );
                }
            }
        }
    }

    /// Begins the receive of an announced message, whose first `bytes` may be here.
    fn activate(
        &mut self,
        peer: PeerId,
        envelope: Envelope,
        rts: Announcement,
        target: Target,
        bytes: &[u8],
        host: &mut impl Host,
    ) {
        host.trace(Kind::ReceiveBegin, peer, rts.tx, rts.len as usize);
        let Self { arrivals, outbox, counts, matching, .. } = self;
        let with = (matching.presses, outbox, counts);
        if let Some(whole) = arrivals.begin((peer, envelope, target), &rts, bytes, with) {
            self.finish_active(whole, host);
        }
    }

    fn serve(&mut self, message: Unexpected, target: Target, host: &mut impl Host) {
        let place = self
            .matching
            .receives(self.limits.shares_receives, host)
            .reserve(target, message.len());
        self.serve_into(message, place, host);
    }

    fn serve_into(&mut self, message: Unexpected, target: Target, host: &mut impl Host) {
        host.trace(Kind::Matched, message.peer, message.number(), message.len());
        let Unexpected { peer, envelope, body, since_ns, .. } = message;
        if since_ns > 0 {
            self.matching.early.count(host.now_ns().saturating_sub(since_ns));
        }
        match body {
            Body::Eager { bytes, ack } => {
                self.matching.bytes -= bytes.len() + EACH;
                self.place(peer, &envelope, ack, &bytes, &target, host);
            }
            Body::Rts { rts, bytes } => {
                self.matching.bytes -= bytes.len();
                self.arrivals.pushed.remove(peer, rts.tx);
                self.activate(peer, envelope, rts, target, &bytes, host);
                // The sender may be waiting until PRESSURE is cleared. A sender that needs no FIN may have ended, with
                // the whole message in its ring; it continues by itself.
                if (bytes.len() as u64) < rts.pushed && !rts.leaves {
                    if let Some(Place::Active(key)) = self.arrivals.pushed.find(peer, rts.tx) {
                        self.arrivals.ask_for_rest(key, &mut self.outbox);
                    }
                }
            }
            Body::Whole(bytes) => {
                self.matching.bytes -= bytes.len();
                self.place(peer, &envelope, None, &bytes, &target, host);
            }
            Body::Lost { error, .. } => {
                let outcome = Outcome::failed(0, error);
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
        let source = self.peers.source(peer, host);
        let mut completion = received(envelope, target, source, len);
        let mut cancelled = false;
        if let Some(multi) = target.multi {
            let end = self.matching.receives(self.limits.shares_receives, host).end_part(multi);
            completion.buffer_released = end == PartEnd::Released;
            cancelled = end == PartEnd::Cancelled;
        }
        match error.or_else(|| (overflow > 0).then_some((FI_ETRUNC, Cause::Truncated))) {
            None => host.complete(&completion),
            Some(error) => host.fail(&Failure { overflow, ..Failure::new(completion, error) }),
        }
        if cancelled {
            self.fail_cancelled(envelope, target, host);
        }
    }

    fn fail_cancelled(&self, envelope: &Envelope, target: &Target, host: &mut impl Host) {
        let envelope = Envelope { data: None, ..*envelope };
        let mut completion = received(&envelope, target, super::UNKNOWN_SOURCE, 0);
        completion.buffer_released = target.multi.is_some();
        host.fail(&Failure::new(completion, (libc::ECANCELED, Cause::Cancelled)));
    }

    fn peek(&mut self, op: &ReceiveOp, action: PeekAction, host: &mut impl Host) {
        let Some(key) = self.find_unexpected(op, host) else {
            let completion = received(&op.envelope(), &op.target(), super::UNKNOWN_SOURCE, 0);
            host.fail(&Failure::new(completion, (libc::ENOMSG, Cause::NoMessage)));
            return;
        };
        if action == PeekAction::Discard {
            if let Some(message) = self.matching.unexpected.of(op.space()).remove(key) {
                self.discard(message, op, host);
            }
            return;
        }
        let Self { matching: Matching { unexpected, .. }, peers, .. } = self;
        if let Some(message) = unexpected.of(op.space()).get(key) {
            let source = peers.source(message.peer, host);
            let target = Target { segments: SegmentList::EMPTY, ..op.target() };
            host.complete(&received(&message.envelope, &target, source, message.len()));
        }
        if action == PeekAction::Claim {
            if let Some(message) = self.matching.unexpected.of(op.space()).remove(key) {
                if let Body::Rts { rts, .. } = &message.body {
                    self.arrivals.pushed.moved(message.peer, rts.tx, Place::Claimed(op.claim()));
                }
                self.matching.claimed.insert(op.claim(), message);
            }
        }
    }

    fn discard(&mut self, message: Unexpected, op: &ReceiveOp, host: &mut impl Host) {
        let len = message.len();
        match message.body {
            Body::Eager { bytes, ack } => {
                self.matching.bytes -= bytes.len() + EACH;
                if let Some(tx) = ack {
                    self.outbox.finish(message.peer, tx, 0);
                }
            }
            Body::Rts { rts, bytes } => {
                self.matching.bytes -= bytes.len();
                self.arrivals.pushed.remove(message.peer, rts.tx);
                if !rts.leaves || rts.pushed > bytes.len() as u64 {
                    self.outbox.finish(message.peer, rts.tx, 0);
                }
            }
            Body::Whole(bytes) => self.matching.bytes -= bytes.len(),
            Body::Lost { .. } => {}
        }
        let source = self.peers.source(message.peer, host);
        let target = Target { segments: SegmentList::EMPTY, ..op.target() };
        host.complete(&received(&message.envelope, &target, source, len));
    }

    fn cancel(&mut self, rx: u8, context: u64, host: &mut impl Host) -> bool {
        for tagged in [true, false] {
            let receives = self.matching.receives(self.limits.shares_receives, host);
            let list = receives.posted.of(Space { rx, tagged });
            let Some(key) = list.first_with(context, |p| p.target.context) else { continue };
            let Some(Posted { tag, target, .. }) = list.remove(key) else { continue };
            if receives.withdraw(&target, true) {
                let envelope = Envelope { tagged, tag, data: None, rx };
                self.fail_cancelled(&envelope, &target, host);
            }
            return true;
        }
        // Another thread may be closing the context.
        let Some((space, posted)) = self.matching.own.take_held_one(rx, context) else {
            return false;
        };
        if self.matching.own.withdraw(&posted.target, true) {
            let Space { tagged, .. } = space;
            let envelope = Envelope { tagged, tag: posted.tag, data: None, rx };
            self.fail_cancelled(&envelope, &posted.target, host);
        }
        true
    }

    /// Fails the receives that only these sources could have served.
    pub(super) fn fail_directed(
        &mut self,
        lost: &NumberMap<u64, (i32, Cause)>,
        host: &mut impl Host,
    ) {
        for Space { rx, tagged } in self.spaces() {
            let shared = self.limits.shares_receives;
            let list = self.matching.receives(shared, host).posted.of(Space { rx, tagged });
            for key in list.keys_where(|p| lost.contains_key(&p.source)) {
                let list = self.matching.receives(shared, host).posted.of(Space { rx, tagged });
                let Some(posted) = list.remove(key) else { continue };
                let Some(error) = lost.get(&posted.source) else { continue };
                let envelope = Envelope { tagged, tag: posted.tag, data: None, rx };
                self.fail_posted(&posted, &envelope, *error, host);
            }
        }
    }

    /// Fails a receive that was taken out of its list. A multi-receive buffer in which messages are still arriving is
    /// released with the last of them.
    fn fail_posted(
        &mut self,
        posted: &Posted,
        envelope: &Envelope,
        error: (i32, Cause),
        host: &mut impl Host,
    ) {
        let mut completion = received(envelope, &posted.target, posted.source, 0);
        if !self
            .matching
            .receives(self.limits.shares_receives, host)
            .withdraw(&posted.target, false)
        {
            return;
        }
        completion.buffer_released = posted.target.multi.is_some();
        host.fail(&Failure::new(completion, error));
    }
}
