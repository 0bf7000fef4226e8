//! Sending, in order: short messages eagerly, long ones by rendezvous. FI_EAGAIN if there is no room: no hidden queue.

use super::flow::Flow;
use super::index_list::Key;
use super::message::{Announcement, Outbound, Payload, sent};
use super::packet::{EagerHeader, Envelope, PieceHeader, Ranges};
use super::peers::PeerState;
use super::schemes::{eager, push};
use super::select::{self, Announce, Carrier};
use super::sends::{Deferred, Pending, Sender, What};
use super::state::{Core, Engine};
use super::traffic::Carried;
use super::{Cause, Host, OpError, Report};
use crate::memory::{Buffers, Segment, SegmentList};
use crate::sys::numbers::NumberSet;
use crate::telemetry::trace::Kind;
use crate::transport::{Iface, Mode, PeerId, Purpose, SendError};

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

impl<I: Iface> Engine<I> {
    /// Whether a send of device memory is announced, and read from there later: by its receiver, by some lane, or part by part.
    /// Otherwise it is sent from a copy.
    pub(crate) fn reads_later(&mut self, peer: PeerId, memory: &SegmentList) -> bool {
        let (iface, limits, len) = (&mut self.iface, &self.core.limits, memory.len());
        !select::is_eager(iface, limits, peer, len) && select::leaves_on_device(iface, peer, memory)
    }

    /// Starts a send. `Again`: no room in the ring, in the completion queue or for another pending send. Sends that
    /// complete at once are reported before this returns.
    pub(crate) fn send(&mut self, op: &SendOp, host: &mut impl Host) -> Result<(), OpError> {
        if !host.has_room_for_sends(op.report) {
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
        if !ready || op.delivery || op.fence || !host.has_room_for_sends(op.report) {
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
        self.core.stirred = true;
        if !self.send_whole(peer, &envelope, payload, (self.core.sends.passing, true)) {
            return false;
        }
        let sends = &mut self.core.sends;
        sends.passing = sends.passing.next_nameless();
        sends.long.count(peer, Carried::Unsolicited, payload.len());
        host.complete(&sent(envelope, context, report));
        true
    }

    /// Any send that the fast path does not take.
    #[inline(never)]
    fn send_any(&mut self, op: &SendOp, host: &mut impl Host) -> Result<(), OpError> {
        self.core.stirred = true;
        let shut = op.fence && !self.passes_fence(op.peer);
        if shut || self.core.peers.of(op.peer).is_some_and(|peer| peer.deferred() > 0) {
            return self.defer(op, host);
        }
        if !select::is_eager(&self.iface, &self.core.limits, op.peer, op.payload.len()) {
            return self.start_rendezvous(op, host);
        }
        let tracked = !op.delivery && op.transmitted && self.iface.track(op.peer);
        if op.delivery || tracked {
            return self.send_answered(op, tracked, host);
        }
        let envelope = op.envelope();
        eager::send(&mut self.iface, op.peer, &envelope, None, &op.payload)?;
        self.core.count_eager(op.peer, op.payload.len(), host);
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
        let rts = Announcement {
            tx,
            len,
            pushed: len,
            leaves,
            sees: false,
            broken: false,
            offer: None,
            ranges: Ranges::NONE,
        };
        let next = |offset: usize| PieceHeader::pushed_head(tx, offset as u64);
        let sent = self.iface.send_whole(peer, rts.encode(*envelope).as_slice(), payload, next);
        if sent {
            self.core.counts.rendezvous_sent += 1;
            self.core.counts.fragment_bytes += len;
        }
        sent
    }

    fn new_request(&mut self, op: &SendOp, scheme: Sender) -> Result<Key, OpError> {
        let Core { sends, limits, .. } = &mut self.core;
        if sends.pending.len() >= limits.tx_max {
            return Err(OpError::Again);
        }
        let mut payload = Payload::Lent(op.payload);
        if op.inject {
            payload.own(&mut sends.copied, limits.tx_max.saturating_mul(COPY_MEAN))?;
        }
        let message = Outbound {
            peer: op.peer,
            envelope: op.envelope(),
            payload,
            context: op.context,
            report: op.report,
            completed: false,
            unreadable: false,
            offer: None,
            lent: Vec::new(),
            announced_ns: 0,
        };
        Ok(sends.pending.push_back(Pending { message, scheme }))
    }

    /// Reports an injected send once its bytes are copied, unless it asked for a higher completion level.
    fn complete_injected(&mut self, key: Key, op: &SendOp, host: &mut impl Host) {
        if !op.inject || op.delivery || op.transmitted {
            return;
        }
        if let Some(Pending { message, .. }) = self.core.sends.pending.get_mut(key) {
            message.completed = true;
            host.complete(&message.completion());
        }
    }

    fn defer(&mut self, op: &SendOp, host: &mut impl Host) -> Result<(), OpError> {
        if !self.core.peers.may_defer(op.peer) {
            return Err(OpError::Again);
        }
        let SendOp { delivery, transmitted, .. } = *op;
        let key = self.new_request(op, Sender::Deferred { delivery, transmitted })?;
        self.core.defer_behind(op.peer, op.fence, What::Send(key));
        self.complete_injected(key, op, host);
        Ok(())
    }

    /// Sends an eager message that is complete when the receiver answers or, if `tracked`, when the peer's endpoint has
    /// it.
    fn send_answered(
        &mut self,
        op: &SendOp,
        tracked: bool,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        // Its bytes are sent now: the entry does not refer to the application's buffer.
        let without_bytes = SendOp { inject: false, payload: SegmentList::EMPTY, ..*op };
        let key = self.new_request(&without_bytes, Sender::Sent(None))?;
        let ack = (!tracked).then_some(key.to_wire());
        let envelope = op.envelope();
        if let Err(e) = eager::send(&mut self.iface, op.peer, &envelope, ack, &op.payload) {
            self.core.sends.pending.remove(key);
            return Err(e.into());
        }
        self.core.count_eager(op.peer, op.payload.len(), host);
        self.core.peers.count_outstanding(op.peer, 1);
        if tracked {
            self.await_arrival(op.peer, key, host);
        } else {
            self.core.note_asked(op.peer);
        }
        Ok(())
    }

    fn start_rendezvous(&mut self, op: &SendOp, host: &mut impl Host) -> Result<(), OpError> {
        let key = self.new_request(op, Sender::Sent(None))?;
        // Without delivery complete, the fast path has tried this already.
        let one = op.payload.one().filter(|_| op.delivery);
        let envelope = op.envelope();
        let whole = one.is_some_and(|one| self.send_whole(op.peer, &envelope, one, (key, false)));
        if whole {
            // As a whole, and a CTS may still come.
            let flow = Flow::fragments(op.payload.len(), op.payload.len());
            if let Some(pending) = self.core.sends.pending.get_mut(key) {
                pending.scheme = Sender::Push(push::Sender::new(flow, false));
            }
        } else if !self.make_readable(key, false) {
            self.core.sends.remove(key);
            return Err(OpError::Error(libc::EIO));
        } else if let Err(e) = self.announce(key, op.delivery) {
            self.core.sends.remove(key);
            return Err(e.into());
        }
        self.core.sends.await_answer(key, host);
        self.core.peers.mark_alive(op.peer);
        self.core.peers.count_outstanding(op.peer, 1);
        self.complete_injected(key, op, host);
        if !whole && self.core.sends.pushes(key) {
            self.begin_push(key, host);
        }
        Ok(())
    }

    /// Copies device memory of a message that is about to be sent, unless it is read later. False: the device failed, or there is no memory.
    fn make_readable(&mut self, key: Key, eager: bool) -> bool {
        let Self { iface, core } = self;
        let Some(Pending { message, .. }) = core.sends.pending.get_mut(key) else { return true };
        let memory = message.payload.segments();
        if !memory.is_on_device() {
            return true;
        }
        let stays = !eager && select::leaves_on_device(iface, message.peer, &memory);
        stays || message.payload.bring_to_host(&mut core.sends.copied)
    }

    /// Announces a message (RTS). If it is sent unsolicited, its first bytes go with the announcement.
    fn announce(&mut self, key: Key, delivery: bool) -> Result<(), SendError> {
        let Self { iface, core } = self;
        let Some(Pending { message, scheme }) = core.sends.pending.get_mut(key) else {
            return Ok(());
        };
        let (peer, segments) = (message.peer, message.payload.segments());
        let caps = iface.caps(peer);
        let mut rts = Announcement {
            tx: key.to_wire(),
            len: segments.len() as u64,
            pushed: 0,
            leaves: false,
            sees: false,
            broken: false,
            offer: None,
            ranges: Ranges::NONE,
        };
        let (mut mode, mut now) = (Mode::Short, 0);
        match select::announce(iface, &caps, peer, (segments.len(), &segments)) {
            Announce::Push { bytes, carrier } => {
                let streams = carrier == Carrier::Stream;
                rts.pushed = bytes as u64;
                rts.leaves = bytes == segments.len() && caps.outlives && !streams && !delivery;
                mode = Mode::Fragment;
                // Bytes for the stream are not worth a packet of their own.
                let header = rts.encode(message.envelope).as_slice().len();
                now = if streams { 0 } else { bytes.min(caps.short_max.saturating_sub(header)) };
                let flow = Flow { offset: now, end: bytes, carrier: Some(carrier) };
                *scheme = Sender::Push(push::Sender::new(flow, rts.leaves));
            }
            Announce::RemoteBuffers(lane) => {
                let whole = segments.piece(0, segments.len()).len() == segments.len();
                if let (Some(lane), None, true) = (lane, message.offer, whole) {
                    message.offer = iface.register(peer, lane, &segments, Purpose::Send).key();
                }
                rts.offer = message.offer;
                // If the receiver reads the message, only its FIN tells the sender of delivery.
                rts.sees = rts.offer.is_none() && !delivery;
                mode = Mode::Announcement;
                *scheme = Sender::Announced { sees: rts.sees };
            }
            how @ (Announce::Ranges | Announce::Bare) => {
                if how == Announce::Ranges {
                    rts.ranges = Ranges::new(segments.ranges());
                }
                *scheme = Sender::Announced { sees: false };
            }
        }
        let pack = |at: usize, to: &mut [u8]| {
            segments.copy_out(at, to);
        };
        iface.send(peer, mode, rts.encode(message.envelope).as_slice(), now, pack)?;
        core.counts.rendezvous_sent += 1;
        Ok(())
    }

    /// Starts sends whose fence has opened, in order for each peer.
    pub(super) fn advance_deferred(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        let mut blocked: NumberSet<PeerId> = NumberSet::default();
        self.core.sends.deferred_starved = false;
        for _ in 0..self.core.sends.deferred.len() {
            let Some(deferred) = self.core.sends.deferred.pop_front() else { break };
            let Deferred { peer, fence, what } = deferred;
            let shut = blocked.contains(&peer) || (fence && !self.passes_fence(peer));
            let started = match what {
                _ if shut => None,
                What::Access(access) => self.start_access(peer, access, host),
                What::Send(key) => self.start_deferred(key, host),
            };
            match started {
                Some(moved) => {
                    n += 1 + moved;
                    self.core.peers.count_deferred(peer, -1);
                }
                None => {
                    blocked.insert(peer);
                    self.core.sends.deferred.push_back(deferred);
                }
            }
        }
        n
    }

    /// Starts a one-sided operation. `None`: it has to wait. Else how many operations were sent.
    fn start_access(&mut self, peer: PeerId, access: Key, host: &mut impl Host) -> Option<usize> {
        // The pump ends an operation that the target does not know.
        let _ = self.may_send_atomic(peer, access)?;
        self.core.release_access(access);
        // Before the operations that were deferred behind it.
        Some(self.pump(peer, host))
    }

    /// Starts a send. `None`: it has to wait.
    fn start_deferred(&mut self, key: Key, host: &mut impl Host) -> Option<usize> {
        let pending = self.core.sends.pending.get(key);
        let Some(Pending { message, scheme: Sender::Deferred { delivery, transmitted } }) = pending
        else {
            return Some(0);
        };
        let (peer, envelope, len) = (message.peer, message.envelope, message.payload.len());
        let (delivery, transmitted) = (*delivery, *transmitted);
        let eager = select::is_eager(&self.iface, &self.core.limits, peer, len);
        if !self.make_readable(key, eager) {
            let error = (libc::EIO, Cause::SenderUnreadable);
            self.core.sends.finish(key, Some(error), host);
            return Some(0);
        }
        let segments = self.core.sends.pending.get(key)?.message.payload.segments();
        let tracked = eager && !delivery && transmitted && self.iface.track(peer);
        let ack = delivery.then_some(key.to_wire());
        let sent = match eager {
            true => eager::send(&mut self.iface, peer, &envelope, ack, &segments),
            false => self.announce(key, delivery),
        };
        match sent {
            Ok(()) if eager => self.core.count_eager(peer, len, host),
            Ok(()) => {
                self.core.sends.await_answer(key, host);
                self.core.peers.mark_alive(peer);
            }
            Err(SendError::Again) => {
                if let Some(pending) = self.core.sends.pending.get_mut(key) {
                    pending.scheme = Sender::Deferred { delivery, transmitted };
                }
                self.core.sends.deferred_starved = true;
                return None;
            }
            Err(SendError::Unreachable(errno)) => {
                let error = Some((errno.0, Cause::PeerUnreachable));
                self.core.sends.finish(key, error, host);
                return Some(0);
            }
        }
        if eager && !delivery && !tracked {
            self.core.sends.finish(key, None, host);
            return Some(0);
        }
        self.core.peers.count_outstanding(peer, 1);
        if tracked {
            self.await_arrival(peer, key, host);
        } else if eager {
            self.core.note_asked(peer);
            if let Some(pending) = self.core.sends.pending.get_mut(key) {
                pending.scheme = Sender::Sent(None);
            }
        } else if self.core.sends.pushes(key) {
            self.core.sends.streams.push_back(key);
        }
        Some(0)
    }
}

impl Core {
    /// An eager message has gone to the peer, by another path than the fast one.
    fn count_eager(&mut self, peer: PeerId, len: usize, host: &impl Host) {
        host.trace(Kind::EagerSent, peer, 0, len);
        self.peers.mark_alive(peer);
        self.counts.eager_sent += 1;
    }

    /// Queues an operation behind the earlier ones on its peer.
    pub(super) fn defer_behind(&mut self, peer: PeerId, fence: bool, what: What) {
        self.sends.deferred.push_back(Deferred { peer, fence, what });
        self.peers.count_deferred(peer, 1);
    }
}
