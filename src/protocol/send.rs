//! Sending, in order: short messages eagerly, long ones by rendezvous. FI_EAGAIN if there is no room: no hidden queue.

use super::engine::{Core, Engine};
use super::index_list::Key;
use super::packet::{EagerHeader, Envelope, Packet, PieceHeader, Ranges};
use super::peers::PeerState;
use super::{Cause, Completion, Direction, Failure, Host, OpError, Report, UNKNOWN_SOURCE};
use crate::memory::{Buffers, OwnedBuffer, Segment, SegmentList};
use crate::transport::{Caps, Iface, MAX_HEADER, Mode, PeerId, SendError, Ticket, Windows};

/// The copies of injected sends that are pending have at most this many bytes for each send that may be pending.
pub(super) const COPY_MEAN: usize = 4096;

/// A send, as requested by the endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendOp<B = SegmentList> {
    /// The receiver.
    pub(crate) peer: PeerId,
    /// The receive context at the receiver.
    pub(crate) rx: u8,
    /// The payload.
    pub(crate) payload: B,
    /// Whether the message is tagged, and its tag (0 otherwise).
    pub(crate) tagged: bool,
    pub(crate) tag: u64,
    /// Remote completion data.
    pub(crate) data: Option<u64>,
    /// The application's context.
    pub(crate) context: u64,
    /// Where the completion is reported.
    pub(crate) report: Report,
    /// The application may reuse the buffer when the call returns (FI_INJECT).
    pub(crate) inject: bool,
    /// Complete only when the message is in the receiver's buffer (FI_DELIVERY_COMPLETE).
    pub(crate) delivery: bool,
    /// Complete only when the receiver's endpoint has the message (FI_TRANSMIT_COMPLETE).
    pub(crate) transmitted: bool,
    /// Start only when all earlier sends to this peer have completed (FI_FENCE).
    pub(crate) fence: bool,
}

impl<B: Buffers> SendOp<B> {
    #[inline(always)]
    fn envelope(&self) -> Envelope {
        Envelope { tagged: self.tagged, tag: self.tag, data: self.data, rx: self.rx }
    }
}

/// The payload of a pending send.
#[derive(Debug)]
pub(super) enum Payload {
    /// In the application's buffer.
    Lent(SegmentList),
    /// In a copy that the engine owns.
    Owned(OwnedBuffer),
}

impl Payload {
    pub(super) fn segments(&self) -> SegmentList {
        match self {
            Self::Lent(list) => *list,
            Self::Owned(buffer) => buffer.segments(),
        }
    }

    /// As [`SegmentList::copy_out`].
    #[inline]
    pub(super) fn copy_out(&self, offset: usize, to: &mut [u8]) -> usize {
        match self {
            Self::Lent(list) => list.copy_out(offset, to),
            Self::Owned(buffer) => buffer.segments().copy_out(offset, to),
        }
    }
}

/// The path of a long message's bytes: all of one message take the same (PROTOCOL.md §4.11).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Carrier {
    /// Decided when the first bytes are sent.
    Undecided,
    Fragments,
    Stream,
}

/// The state of a pending send.
#[derive(Debug)]
pub(super) enum TxState {
    /// Behind a fence; nothing was sent. `access`: the entry stands for this one-sided operation.
    Deferred { fence: bool, access: Option<Key> },
    /// The receiver has to answer.
    AwaitingAnswer,
    /// Announced; the unsolicited bytes from `offset` to `pushed` are still to be sent. `asked`: the receiver's number
    /// and the length that it wants, once it has sent a CTS.
    Announced { offset: usize, asked: Option<(u64, usize)> },
    /// Released by a CTS: fragments from `offset` to `end` are to be sent.
    Streaming { rx: u64, offset: usize, end: usize },
    /// Released by a CTS: the bytes from `offset` to `end` are to be written into the receiver's ranges.
    Pushing { rx: u64, offset: usize, end: usize, ranges: Ranges },
    /// The receiver advertises remote buffers, `queued` of which have still to be written.
    Writing { rx: u64, queued: u8 },
    /// This sender sent a NACK: it writes no bytes from `from` on, and the receiver has to request them in another way.
    Declined { rx: u64, from: usize },
    /// The transport has the message, and the peer has not acknowledged it yet.
    Leaving,
    /// All of it was written and the send is complete; a FIN will follow some time. `told`: the receiver asked for more
    /// and was answered that there is none (GONE).
    Over { told: bool },
}

/// A send that is pending: not complete when its call returns.
#[derive(Debug)]
pub(super) struct TxRequest {
    pub(super) peer: PeerId,
    pub(super) envelope: Envelope,
    pub(super) payload: Payload,
    pub(super) context: u64,
    pub(super) report: Report,
    /// The completion was reported already.
    pub(super) completed: bool,
    /// The completion is due when the message is in the receiver's buffer.
    pub(super) delivery: bool,
    /// The completion is due when the receiver's endpoint has the message.
    pub(super) transmitted: bool,
    /// The number of unsolicited bytes that the RTS announced.
    pub(super) pushed: usize,
    /// The RTS said that the sender needs no FIN: the send is complete when the unsolicited bytes are sent.
    pub(super) leaves: bool,
    /// `Some` if the RTS announced sender-side delivery completion: the number of bytes from the start of the message
    /// that are known to be delivered.
    pub(super) seen: Option<usize>,
    /// The remote key under which the RTS advertised the message for reading.
    pub(super) offer: Option<Ticket>,
    pub(super) carrier: Carrier,
    pub(super) state: TxState,
}

impl TxRequest {
    pub(super) fn completion(&self) -> Completion {
        sent(self.envelope, self.context, self.report)
    }

    pub(super) fn is_owned(&self) -> bool {
        matches!(self.payload, Payload::Owned(_))
    }
}

#[inline(always)]
fn sent(envelope: Envelope, context: u64, report: Report) -> Completion {
    Completion {
        direction: Direction::Send,
        tagged: envelope.tagged,
        context,
        report,
        len: 0,
        buffer: 0,
        data: None,
        tag: envelope.tag,
        source: UNKNOWN_SOURCE,
        buffer_released: false,
    }
}

pub(super) fn op_error(error: SendError) -> OpError {
    match error {
        SendError::Again => OpError::Again,
        SendError::Unreachable(errno) => OpError::Error(errno.0),
    }
}

impl<I: Iface> Engine<I> {
    /// Starts a send. `Again`: no room in the ring, in the completion queue or for another pending send. Sends that
    /// complete at once are reported before this returns.
    pub(crate) fn send(&mut self, op: &SendOp, host: &mut impl Host) -> Result<(), OpError> {
        if !host.has_room_for_sends(op.report.context()) {
            return Err(OpError::Again);
        }
        if self.try_send(op, host) { Ok(()) } else { self.send_any(op, host) }
    }

    /// The fast path: one segment that the transport takes now and that needs no entry in `tx`. False: nothing was
    /// done, and the caller uses [`Engine::send`].
    #[inline(always)]
    pub(crate) fn try_send<B: Buffers>(&mut self, op: &SendOp<B>, host: &mut impl Host) -> bool {
        let Some(payload) = op.payload.one() else { return false };
        let ready = self.core.peers.get(op.peer).is_some_and(PeerState::is_ready);
        if !ready || op.delivery || op.fence || !host.has_room_for_sends(op.report.context()) {
            return false;
        }
        if op.transmitted && self.iface.track(op.peer) {
            return false;
        }
        let envelope = op.envelope();
        if payload.len() > self.core.limits.eager_max {
            return self.try_push(op.peer, envelope, payload, (op.context, op.report), host);
        }
        if !self.iface.send_at_once(op.peer, &EagerHeader::head(&envelope), payload) {
            return false;
        }
        self.core.counts.eager_sent += 1;
        host.complete_inline(&sent(envelope, op.context, op.report));
        true
    }

    /// The fast path of a long message: announced and sent unsolicited in one call.
    #[inline(never)]
    fn try_push(
        &mut self,
        peer: PeerId,
        envelope: Envelope,
        payload: Segment,
        (context, report): (u64, Report),
        host: &mut impl Host,
    ) -> bool {
        if !self.send_whole(peer, &envelope, payload, (self.core.passing, true)) {
            return false;
        }
        self.core.passing = self.core.passing.next_nameless();
        host.complete(&sent(envelope, context, report));
        true
    }

    /// Any send that the fast path does not take.
    #[inline(never)]
    fn send_any(&mut self, op: &SendOp, host: &mut impl Host) -> Result<(), OpError> {
        let shut = op.fence && !self.is_fence_open(op.peer);
        if shut || self.core.peers.of(op.peer).is_some_and(|peer| peer.deferred > 0) {
            return self.defer(op, host);
        }
        let envelope = op.envelope();
        let len = op.payload.len();
        if len > self.core.limits.eager_max || self.iface.under_pressure(op.peer) {
            return self.start_rendezvous(op, envelope, host);
        }
        if op.delivery {
            return self.send_acknowledged(op, envelope);
        }
        if op.transmitted && self.iface.track(op.peer) {
            return self.send_tracked(op, envelope, host);
        }
        send_eager(&mut self.iface, op.peer, &envelope, None, &op.payload).map_err(op_error)?;
        self.core.peers.mark_alive(op.peer);
        self.core.counts.eager_sent += 1;
        host.complete(&sent(envelope, op.context, op.report));
        Ok(())
    }

    /// Announces a message and sends all of it, if there is room for that. `leaves`: the sender needs no FIN.
    fn send_whole(
        &mut self,
        peer: PeerId,
        envelope: &Envelope,
        payload: Segment,
        (key, leaves): (Key, bool),
    ) -> bool {
        let (tx, len) = (key.to_wire(), payload.len() as u64);
        let (envelope, ranges) = (*envelope, Ranges::NONE);
        let rts = Packet::Rts {
            envelope,
            tx,
            len,
            pushed: len,
            leaves,
            sees: false,
            offer: None,
            ranges,
        };
        let next = |offset: usize| PieceHeader::pushed_head(tx, offset as u64);
        let sent = self.iface.send_whole(peer, rts.encode().as_slice(), payload, next);
        if sent {
            self.core.counts.rendezvous_sent += 1;
            self.core.counts.fragment_bytes += len;
        }
        sent
    }

    fn new_request(
        &mut self,
        op: &SendOp,
        envelope: Envelope,
        state: TxState,
    ) -> Result<Key, OpError> {
        if self.core.tx.len() >= self.core.limits.tx_max {
            return Err(OpError::Again);
        }
        let payload = if op.inject {
            let most = self.core.limits.tx_max.saturating_mul(COPY_MEAN);
            let copied = self.core.copied + op.payload.len();
            if copied > most && self.core.copied > 0 {
                return Err(OpError::Again);
            }
            let none = OpError::Error(libc::ENOMEM);
            let copy = OwnedBuffer::try_copy_of(&op.payload).ok_or(none)?;
            self.core.copied = copied;
            Payload::Owned(copy)
        } else {
            Payload::Lent(op.payload)
        };
        Ok(self.core.tx.push_back(TxRequest {
            peer: op.peer,
            envelope,
            payload,
            context: op.context,
            report: op.report,
            completed: false,
            delivery: op.delivery,
            transmitted: op.transmitted,
            pushed: 0,
            leaves: false,
            seen: None,
            offer: None,
            carrier: Carrier::Undecided,
            state,
        }))
    }

    /// Reports an injected send once its bytes are copied, unless it asked for a higher completion level.
    fn complete_injected(&mut self, key: Key, op: &SendOp, host: &mut impl Host) {
        if !op.inject || op.delivery || op.transmitted {
            return;
        }
        if let Some(request) = self.core.tx.get_mut(key) {
            request.completed = true;
            host.complete(&request.completion());
        }
    }

    fn defer(&mut self, op: &SendOp, host: &mut impl Host) -> Result<(), OpError> {
        let envelope = op.envelope();
        let state = TxState::Deferred { fence: op.fence, access: None };
        let key = self.new_request(op, envelope, state)?;
        self.core.deferred.push_back(key);
        if let Some(peer) = self.core.peers.of(op.peer) {
            peer.deferred += 1;
        }
        self.complete_injected(key, op, host);
        Ok(())
    }

    /// An entry for a send whose bytes are sent now: it does not refer to the application's buffer.
    pub(super) fn request_without_bytes(&mut self, op: &SendOp, envelope: Envelope) -> Option<Key> {
        let plain = SendOp { inject: false, ..*op };
        let key = self.new_request(&plain, envelope, TxState::AwaitingAnswer).ok()?;
        if let Some(request) = self.core.tx.get_mut(key) {
            request.payload = Payload::Lent(SegmentList::EMPTY);
        }
        Some(key)
    }

    fn send_acknowledged(&mut self, op: &SendOp, envelope: Envelope) -> Result<(), OpError> {
        let key = self.request_without_bytes(op, envelope).ok_or(OpError::Again)?;
        let ack = Some(key.to_wire());
        if let Err(e) = send_eager(&mut self.iface, op.peer, &envelope, ack, &op.payload) {
            self.core.tx.remove(key);
            return Err(op_error(e));
        }
        self.core.peers.mark_alive(op.peer);
        self.core.counts.eager_sent += 1;
        self.core.peers.count_outstanding(op.peer, 1);
        Ok(())
    }

    fn start_rendezvous(
        &mut self,
        op: &SendOp,
        envelope: Envelope,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        let key = self.new_request(op, envelope, TxState::AwaitingAnswer)?;
        // Without delivery complete, the fast path has tried this already.
        let one = op.payload.one().filter(|_| op.delivery);
        let whole = one.is_some_and(|one| self.send_whole(op.peer, &envelope, one, (key, false)));
        if whole {
            if let Some(request) = self.core.tx.get_mut(key) {
                (request.pushed, request.carrier) = (op.payload.len(), Carrier::Fragments);
            }
        } else if let Err(e) = self.send_rts(key) {
            self.core.remove_send(key);
            return Err(op_error(e));
        }
        self.core.peers.mark_alive(op.peer);
        self.core.peers.count_outstanding(op.peer, 1);
        self.complete_injected(key, op, host);
        if !whole && self.core.tx.get(key).is_some_and(|request| request.pushed > 0) {
            self.begin_push(key, host);
        }
        Ok(())
    }

    /// Announces a message. If the message is sent unsolicited, its first bytes go with the announcement.
    fn send_rts(&mut self, key: Key) -> Result<(), SendError> {
        let Some(request) = self.core.tx.get_mut(key) else { return Ok(()) };
        let segments = request.payload.segments();
        let peer = request.peer;
        let caps = self.iface.caps(peer);
        // A message for remote buffers sends no bytes before the receiver has advertised them.
        let windows = caps.window_max > 0
            && segments.len() >= caps.window_min
            && self.iface.windows(peer) != Windows::No;
        let streams = !windows && streams(&mut self.iface, &caps, peer, segments.len());
        request.carrier = if streams { Carrier::Stream } else { Carrier::Fragments };
        // Where the receiver may read the message instead, a message is sent unsolicited as a whole or not at all.
        let pushes = caps.push_max > 0 && !(caps.one_sided && segments.len() > caps.push_max);
        if pushes && !windows && !self.iface.under_pressure(peer) {
            let pushed = segments.len().min(caps.push_max);
            let leaves = pushed == segments.len() && caps.outlives && !streams && !request.delivery;
            let packet = Packet::Rts {
                envelope: request.envelope,
                tx: key.to_wire(),
                len: segments.len() as u64,
                pushed: pushed as u64,
                leaves,
                sees: false,
                offer: None,
                ranges: Ranges::NONE,
            };
            let header = packet.encode();
            let header = header.as_slice();
            // Bytes for the stream are not worth a packet of their own.
            let room = if streams { 0 } else { caps.short_max.saturating_sub(header.len()) };
            let len = pushed.min(room);
            let pack = |at: usize, to: &mut [u8]| {
                segments.copy_out(at, to);
            };
            self.iface.send(peer, Mode::Fragment, header, len, pack)?;
            request.pushed = pushed;
            request.leaves = leaves;
            request.state = TxState::Announced { offset: len, asked: None };
            self.core.counts.rendezvous_sent += 1;
            return Ok(());
        }
        request.carrier = Carrier::Undecided;
        if windows && request.offer.is_none() {
            request.offer = self.iface.offer(peer, &segments);
        }
        // If the receiver reads the message, only its FIN tells the sender of delivery.
        let sees = windows && request.offer.is_none() && !request.delivery;
        request.seen = sees.then_some(0);
        let packet = Packet::Rts {
            envelope: request.envelope,
            tx: key.to_wire(),
            len: segments.len() as u64,
            pushed: 0,
            leaves: false,
            sees,
            offer: request.offer,
            ranges: if caps.one_sided && !windows {
                Ranges::new(segments.ranges())
            } else {
                Ranges::NONE
            },
        };
        let header = packet.encode();
        if windows {
            self.iface.send(peer, Mode::Announcement, header.as_slice(), 0, |_, _| ())?;
        } else {
            self.iface.send(peer, Mode::Short, header.as_slice(), 0, |_, _| ())?;
        }
        self.core.counts.rendezvous_sent += 1;
        Ok(())
    }

    /// Starts sends whose fence has opened, in order for each peer.
    pub(super) fn advance_deferred(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        let mut blocked: Vec<PeerId> = Vec::new();
        self.core.deferred_starved = false;
        for _ in 0..self.core.deferred.len() {
            let Some(key) = self.core.deferred.pop_front() else { break };
            let Some(request) = self.core.tx.get(key) else { continue };
            let peer = request.peer;
            let TxState::Deferred { fence, access } = request.state else { continue };
            let mut waits = blocked.contains(&peer)
                || (fence && !self.is_fence_open(peer))
                || access.is_some_and(|access| self.may_send_atomic(peer, access).is_none());
            if let Some(access) = access.filter(|_| !waits) {
                self.core.tx.remove(key);
                self.core.release_access(access);
                // Before the operations that were deferred behind it.
                n += self.pump(peer, host);
            } else if !waits && self.start_deferred(key, host) == Err(SendError::Again) {
                self.core.deferred_starved = true;
                waits = true;
            }
            if waits {
                blocked.push(peer);
                self.core.deferred.push_back(key);
                continue;
            }
            if let Some(state) = self.core.peers.of(peer) {
                state.deferred = state.deferred.saturating_sub(1);
            }
            n += 1;
        }
        n
    }

    fn start_deferred(&mut self, key: Key, host: &mut impl Host) -> Result<(), SendError> {
        let Some(request) = self.core.tx.get(key) else { return Ok(()) };
        let (peer, envelope, delivery) = (request.peer, request.envelope, request.delivery);
        let segments = request.payload.segments();
        let eager =
            segments.len() <= self.core.limits.eager_max && !self.iface.under_pressure(peer);
        let ack = delivery.then_some(key.to_wire());
        let tracked = eager && !delivery && request.transmitted && self.iface.track(peer);
        let sent = if eager {
            send_eager(&mut self.iface, peer, &envelope, ack, &segments)
        } else {
            self.send_rts(key)
        };
        if sent.is_ok() {
            self.core.peers.mark_alive(peer);
        }
        match sent {
            Ok(()) if tracked => {
                self.core.peers.count_outstanding(peer, 1);
                self.await_arrival(peer, key, host);
            }
            Ok(()) if eager && !delivery => self.core.finish_send(key, None, host),
            Ok(()) => {
                self.core.peers.count_outstanding(peer, 1);
                match self.core.tx.get_mut(key) {
                    Some(request) if request.pushed > 0 => self.core.streams.push_back(key),
                    Some(request) => request.state = TxState::AwaitingAnswer,
                    None => {}
                }
            }
            Err(SendError::Again) => return Err(SendError::Again),
            Err(SendError::Unreachable(errno)) => {
                self.core.finish_send(key, Some((errno.0, Cause::PeerUnreachable)), host);
            }
        }
        Ok(())
    }
}

/// Whether `len` bytes to `peer` go by stream.
pub(super) fn streams<I: Iface>(iface: &mut I, caps: &Caps, peer: PeerId, len: usize) -> bool {
    caps.stream_max > 0 && len >= caps.stream_min && iface.has_stream(peer)
}

/// Sends one eager message: in a slot if it fits there beside its header, else through the bulk space.
#[inline]
pub(super) fn send_eager<I: Iface>(
    iface: &mut I,
    peer: PeerId,
    envelope: &Envelope,
    ack: Option<u64>,
    payload: &SegmentList,
) -> Result<(), SendError> {
    let header = EagerHeader::new(envelope, ack);
    let header = header.as_slice();
    debug_assert!(header.len() <= MAX_HEADER);
    let len = payload.len();
    let pack = |at: usize, to: &mut [u8]| {
        payload.copy_out(at, to);
    };
    if header.len() + len <= iface.caps(peer).short_max {
        iface.send(peer, Mode::Short, header, len, pack)
    } else {
        iface.send(peer, Mode::Bulk, header, len, pack)
    }
}

impl Core {
    /// Queues a one-sided operation among the deferred sends. False: there is no room.
    pub(super) fn defer_behind(&mut self, peer: PeerId, fence: bool, access: Key) -> bool {
        if self.tx.len() >= self.limits.tx_max {
            return false;
        }
        let key = self.tx.push_back(TxRequest {
            peer,
            envelope: Envelope { tagged: false, tag: 0, data: None, rx: 0 },
            payload: Payload::Lent(SegmentList::EMPTY),
            context: 0,
            report: Report::default(),
            // The one-sided operation reports its own completion.
            completed: true,
            delivery: false,
            transmitted: false,
            pushed: 0,
            leaves: false,
            seen: None,
            offer: None,
            carrier: Carrier::Undecided,
            state: TxState::Deferred { fence, access: Some(access) },
        });
        self.deferred.push_back(key);
        if let Some(peer) = self.peers.of(peer) {
            peer.deferred += 1;
        }
        true
    }

    fn remove_send(&mut self, key: Key) -> Option<TxRequest> {
        let request = self.tx.remove(key)?;
        self.withdrawn.extend(request.offer.map(|offer| (request.peer, offer)));
        if let Payload::Owned(bytes) = &request.payload {
            self.copied -= bytes.segments().len();
        }
        Some(request)
    }

    /// Ends a pending send. `error`: the error number and the cause, or `None` for success. The caller keeps the
    /// per-peer counts.
    pub(super) fn finish_send(
        &mut self,
        key: Key,
        error: Option<(i32, Cause)>,
        host: &mut impl Host,
    ) {
        let Some(request) = self.remove_send(key) else { return };
        if request.completed {
            return;
        }
        let completion = request.completion();
        match error {
            None => host.complete(&completion),
            Some((error, cause)) => host.fail(&Failure { completion, error, overflow: 0, cause }),
        }
    }

    /// Whether `key` named a message of this endpoint that needs no FIN any more.
    pub(super) fn has_left(&self, key: Key) -> bool {
        key.is_nameless_before(self.passing) || self.tx.is_gone(key)
    }

    /// FIN: the receiver has finished with a message. Returns whether a pending send ended.
    pub(super) fn on_fin(
        &mut self,
        peer: PeerId,
        tx: u64,
        status: u32,
        host: &mut impl Host,
    ) -> bool {
        let key = Key::from_wire(tx);
        let valid = self.tx.get(key).is_some_and(|request| {
            request.peer == peer
                && !matches!(request.state, TxState::Deferred { .. } | TxState::Leaving)
        });
        if !valid {
            // A send that needed no FIN may have completed before the receiver's FIN.
            self.counts.dropped += u64::from(!self.has_left(key));
            return false;
        }
        self.peers.count_outstanding(peer, -1);
        self.streams.retain(|k| *k != key);
        self.assists.retain(|assist| assist.tx != key);
        let error = (status != 0).then_some((status as i32, Cause::ReceiverRefused));
        self.finish_send(key, error, host);
        true
    }
}
