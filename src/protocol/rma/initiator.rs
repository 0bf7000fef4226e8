//! The initiator's side: the endpoint that reads and writes a peer's memory.

use super::alone::{Moved, write_min};
use super::keys::Granted;
use super::operands::Operands;
use super::packet::{HEADER_MAX, Prefix, REMOTE_LEN, RmaPacket};
use super::ranges::{RemoteRanges, RmaOp};
use super::state::{Answer, BATCH, COPY_MAX, Channel, FLUSH_AFTER, Op, QUEUE_MAX, Rma, State};
use crate::memory::keys::Right;
use crate::memory::{bounce, mover};
use crate::protocol::flow::Source;
use crate::protocol::index_list::Key;
use crate::protocol::message::Payload;
use crate::protocol::packet::Ranges;
use crate::protocol::send::COPY_MEAN;
use crate::protocol::sends::What;
use crate::protocol::staging::Staging;
use crate::protocol::state::{Core, Engine};
use crate::protocol::{Cause, Completion, Direction, Failure, Host, OpError};
use crate::transport::{Iface, Mode, PeerId, SendError, piece_of};

impl Op {
    #[inline(always)]
    pub(super) fn new(op: &RmaOp, state: State, operands: Option<Key>) -> Self {
        Self {
            peer: op.peer,
            right: op.right,
            local: Payload::Lent(op.local),
            staging: None,
            unreadable: false,
            remote: op.remote,
            data: op.data,
            context: op.context,
            report: op.report,
            reachable: false,
            state,
            delivered: op.delivered,
            begun: 0,
            barred: false,
            operands,
            copy: None,
        }
    }

    /// Where its bytes from `at` on are read. `None`: they are being copied from a device. Failures: those of the driver.
    fn source(&mut self, at: usize) -> Result<Option<Source>, mover::Failure> {
        let segments = self.local.segments();
        match &mut self.staging {
            Some(staging) => staging.source(&segments, at),
            None => Ok(Some(segments.into())),
        }
    }

    fn completion(&self) -> Completion {
        let direction = match self.right {
            Right::Read => Direction::Read,
            Right::Write => Direction::Write,
            Right::Update => Direction::Update,
            Right::Exchange | Right::Fetch => Direction::Fetch,
        };
        Completion::new(direction, self.context, self.report)
    }
}

/// A device has failed when its memory was read.
const UNREADABLE: (i32, Cause) = (libc::EIO, Cause::SenderUnreadable);

/// How an operation is carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// In one packet, which has the bytes of a write.
    Whole,
    /// The request names the initiator's buffer, and the target moves the bytes or says that it cannot.
    Described,
    /// The bytes of a write follow in packets.
    Packets,
    /// Direct RMA: this endpoint moves the bytes, and sends no request.
    Alone,
}

impl Way {
    /// Whether an operation may begin in this way, given the operations in progress, which must come first.
    fn is_open(self, channel: &Channel, right: Right) -> bool {
        match self {
            // The transport keeps direct operations in order.
            Self::Alone => channel.is_drained(),
            Self::Whole | Self::Described | Self::Packets => {
                channel.admits(right, self == Self::Described)
            }
        }
    }
}

impl<I: Iface> Engine<I> {
    /// Starts a one-sided operation. `Again`: no room in the ring, in the completion queue or for another pending
    /// operation.
    #[inline]
    pub(crate) fn access(&mut self, op: &RmaOp, host: &mut impl Host) -> Result<(), OpError> {
        self.core.stirred = true;
        self.begin(op, None, host)
    }

    /// As [`Self::access`]; `operands` are the additional fields of an atomic operation.
    pub(super) fn begin(
        &mut self,
        op: &RmaOp,
        operands: Option<&Operands>,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        let core = &mut self.core;
        if !host.has_room_for_sends(op.report) || core.rma.pending() >= core.limits.tx_max {
            return Err(OpError::Again);
        }
        let shut = op.fence && !self.passes_fence(op.peer);
        if shut || self.core.peers.of(op.peer).is_some_and(|peer| peer.deferred() > 0) {
            return self.defer_access(op, operands);
        }
        if operands.is_some() && self.iface.caps(op.peer).atomics.is_none() {
            return self.defer_access(op, operands);
        }
        let device = op.local.is_on_device();
        let alone = op.data.is_none()
            && self.is_granted(op.peer, op.right, &op.remote, (op.delivered, device));
        let way = self.way(op.peer, op.right, &op.remote, (alone, device));
        if way != Way::Alone {
            self.flush_alone(op.peer);
        }
        let channel = self.core.rma.channel(op.peer);
        let waits = !channel.queue.is_empty() || !way.is_open(channel, op.right);
        if waits {
            return self.queue_access(op, operands);
        }
        if way == Way::Alone {
            return self.start_alone(op, operands, host);
        }
        let key = self.core.rma.insert(op, State::Queued, operands);
        let copies = device && op.right == Right::Write;
        if way != Way::Whole || copies {
            self.keep_injected(key, op)?;
        }
        if copies && !op.inject {
            // Copied when it is sent, once.
            self.core.enqueue_access(key);
            self.pump_first(op.peer, host);
            return Ok(());
        }
        if let Err(error) = self.send_request(key, way) {
            self.core.rma.discard(key);
            return Err(error.into());
        }
        self.core.peers.mark_alive(op.peer);
        self.core.peers.count_outstanding(op.peer, 1);
        if way == Way::Packets {
            self.core.rma.channel(op.peer).queue.push_front(key);
            self.pump(op.peer, host);
            if !self.core.rma.channel(op.peer).queue.is_empty() {
                self.core.rma.pumping.push_back(op.peer);
            }
        }
        Ok(())
    }

    /// Queues an operation behind the earlier ones.
    fn queue_access(&mut self, op: &RmaOp, operands: Option<&Operands>) -> Result<(), OpError> {
        let copies = op.inject && op.local.len() > COPY_MAX;
        if self.core.rma.channel(op.peer).queue.len() >= QUEUE_MAX || copies {
            return Err(OpError::Again);
        }
        let key = self.core.rma.insert(op, State::Queued, operands);
        self.keep_injected(key, op)?;
        self.core.enqueue_access(key);
        Ok(())
    }

    /// Starts a direct operation that has none before it. Whether it may be direct was checked just now.
    fn start_alone(
        &mut self,
        op: &RmaOp,
        operands: Option<&Operands>,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        let key = self.core.rma.insert(op, State::Moving { offset: 0 }, operands);
        self.keep_injected(key, op)?;
        if self.begin_alone(op.peer, key, host) {
            return Ok(());
        }
        self.core.enqueue_access(key);
        // It goes by messages after all, and the first one is sent now, as for other operations.
        if self.core.rma.ops.get(key).is_some_and(|op| op.state == State::Queued) {
            self.pump_first(op.peer, host);
        }
        Ok(())
    }

    /// As [`Self::pump`], just after the first operation has come into the peer's queue.
    fn pump_first(&mut self, peer: PeerId, host: &mut impl Host) {
        self.pump(peer, host);
        let channel = self.core.rma.channel(peer);
        let (empty, sent) = (channel.queue.is_empty(), !channel.is_drained());
        if empty {
            self.core.rma.pumping.pop_back(); // `peer` is the last entry
        }
        if sent {
            self.core.peers.mark_alive(peer);
        }
    }

    /// Copies the bytes of a write that are in device memory, before it goes by messages: all of them, or, where they go in many
    /// packets, the first ones. Whether they are there. `None`: the device failed, or there is no memory.
    fn bring_to_host(&mut self, key: Key, way: Way) -> Option<bool> {
        let Rma { ops, copied, .. } = &mut self.core.rma;
        let Some(op) = ops.get_mut(key).filter(|op| op.right == Right::Write) else {
            return Some(true);
        };
        let segments = op.local.segments();
        if way == Way::Packets && segments.is_on_device() && segments.len() > bounce::LEN {
            op.staging.get_or_insert_with(|| Box::new(Staging::new(0, segments.len())));
            return op.source(0).ok().map(|source| source.is_some());
        }
        op.staging = None;
        op.local.bring_to_host(copied).then_some(true)
    }

    /// Copies the buffers of an injected operation that is not sent yet, or discards it. `Again`: the copies of pending
    /// operations are as long as they may be.
    fn keep_injected(&mut self, key: Key, op: &RmaOp) -> Result<(), OpError> {
        if !op.inject {
            return Ok(());
        }
        let most = self.core.limits.tx_max.saturating_mul(COPY_MEAN);
        let kept = self.core.rma.keep(key, most);
        if kept.is_err() {
            self.core.rma.discard(key);
        }
        kept
    }

    fn defer_access(&mut self, op: &RmaOp, operands: Option<&Operands>) -> Result<(), OpError> {
        if !self.core.peers.may_defer(op.peer) {
            return Err(OpError::Again);
        }
        let key = self.core.rma.insert(op, State::Deferred, operands);
        self.keep_injected(key, op)?;
        self.core.defer_behind(op.peer, op.fence, What::Access(key));
        Ok(())
    }

    /// `alone`: direct RMA is allowed. `device`: the local memory is a device's, which the target cannot access; bytes of a
    /// write are copied from there before.
    fn way(
        &self,
        peer: PeerId,
        right: Right,
        remote: &RemoteRanges,
        (alone, device): (bool, bool),
    ) -> Way {
        if right.is_atomic() {
            return Way::Whole;
        }
        if alone {
            return Way::Alone;
        }
        let caps = self.iface.caps(peer);
        let len = usize::try_from(remote.total()).unwrap_or(usize::MAX);
        let whole = len.saturating_add(remote.as_slice().len() * REMOTE_LEN);
        let short = whole <= caps.short_max.saturating_sub(HEADER_MAX);
        if whole <= caps.bcopy_max && (len <= self.core.limits.eager_max || short) {
            Way::Whole
        } else if caps.one_sided && !(device && right == Right::Read) {
            Way::Described
        } else if right == Right::Read {
            Way::Whole
        } else {
            Way::Packets
        }
    }

    /// Sends the request to the target. After `Ok` the operation is in its next state.
    fn send_request(&mut self, key: Key, way: Way) -> Result<(), SendError> {
        let Some(op) = self.core.rma.ops.get_mut(key) else { return Ok(()) };
        if let Some(operands) = op.operands {
            return self.send_atomic(key, operands);
        }
        let (peer, right, tx) = (op.peer, op.right, key.to_wire());
        let Ok(Some(source)) = op.source(0) else { return Err(SendError::Again) };
        let segments = op.local.segments();
        let local = match way {
            Way::Described => Ranges::new(segments.ranges()),
            _ => Ranges::NONE,
        };
        let prefix = Prefix::new(&op.remote, &local);
        let ranges = op.remote.as_slice().len() as u8;
        let locals = local.as_slice().len() as u8;
        let caps = self.iface.caps(peer);
        let (packet, len) = match right {
            Right::Read => (RmaPacket::Read { tx, ranges, sinks: locals }, 0),
            _ => {
                let more = (way != Way::Whole).then_some(segments.len() as u64);
                let len = match way {
                    Way::Whole => segments.len(),
                    Way::Described | Way::Alone => 0,
                    Way::Packets => {
                        // The header is longer than that of other fragments, and has to fit too.
                        let taken = prefix.len() + HEADER_MAX;
                        let piece = piece_of(segments.len(), caps.fragment_max);
                        source.bytes.len().min(piece.saturating_sub(taken))
                    }
                };
                (RmaPacket::Write { tx, data: op.data, more, ranges, sources: locals }, len)
            }
        };
        let header = packet.encode();
        let header = header.as_slice();
        let pack = |at: usize, to: &mut [u8]| prefix.pack(&source.bytes, at, to);
        let whole = prefix.len() + len;
        if header.len() + whole <= caps.short_max {
            self.iface.send(peer, Mode::Short, header, whole, pack)?;
        } else if way == Way::Packets {
            self.iface.send(peer, Mode::Fragment, header, whole, pack)?;
        } else {
            self.iface.send(peer, Mode::Bulk, header, whole, pack)?;
        }
        op.reachable = way == Way::Described;
        op.state = match (right, way) {
            (Right::Write, Way::Described) => State::Pulled,
            (Right::Write, Way::Packets) => State::Sending { offset: len },
            _ => State::Sent { received: 0 },
        };
        let len = op.remote.total();
        let write_min = write_min(&self.core.limits);
        let channel = self.core.rma.channel(peer);
        channel.on_request(right, len, write_min);
        channel.count(right, way == Way::Described && right == Right::Write, 1);
        self.core.note_asked(peer);
        Ok(())
    }

    /// Sends the operations in `peer`'s queue, in order, as long as there is room.
    pub(in crate::protocol) fn pump(&mut self, peer: PeerId, host: &mut impl Host) -> usize {
        let mut n = 0;
        while n < BATCH {
            let channel = self.core.rma.channel(peer);
            (channel.starved, channel.moving) = (false, false);
            let Some(key) = self.core.rma.channel(peer).queue.front().copied() else { break };
            match self.may_send_atomic(peer, key) {
                Some(Ok(())) => {}
                Some(Err(failure)) => {
                    n += 1;
                    self.core.rma.channel(peer).queue.pop_front();
                    self.core.end_access(key, Some(failure), host);
                    continue;
                }
                None => break,
            }
            let Some(sent) = self.advance_access(peer, key, host) else { break };
            match sent {
                Ok(()) => n += 1,
                Err(SendError::Again) => {
                    self.core.rma.channel(peer).starved = true;
                    self.iface.flush(); // a segment of it may have begun
                    break;
                }
                Err(SendError::Unreachable(errno)) => {
                    n += 1;
                    self.core.rma.channel(peer).queue.pop_front();
                    self.core.end_access(key, Some((errno.0, Cause::PeerUnreachable)), host);
                    continue;
                }
            }
            let stays = self.core.rma.ops.get(key).is_some_and(|op| {
                matches!(op.state, State::Sending { .. } | State::Moving { .. } | State::Queued)
            });
            if !stays {
                self.core.rma.channel(peer).queue.pop_front();
            }
            if self.core.rma.channel(peer).moving {
                break;
            }
            if n == FLUSH_AFTER {
                self.iface.flush();
            }
        }
        if n > 0 {
            self.iface.flush();
        }
        n
    }

    /// Sends the next packet of an operation, or moves a part of it. `None`: it may not begin yet.
    fn advance_access(
        &mut self,
        peer: PeerId,
        key: Key,
        host: &mut impl Host,
    ) -> Option<Result<(), SendError>> {
        let Some(op) = self.core.rma.ops.get(key) else { return Some(Ok(())) };
        match op.state {
            State::Queued => {}
            State::Sending { offset } => return Some(self.send_more(key, offset)),
            State::Moving { offset } => return Some(self.go_alone(key, offset, host)),
            _ => return Some(Ok(())),
        }
        let right = op.right;
        let device = op.local.segments().is_on_device();
        let alone = op.data.is_none()
            && !op.barred
            && self.is_granted(peer, right, &op.remote, (op.delivered, device));
        let way = self.way(peer, right, &op.remote, (alone, device));
        if way != Way::Alone {
            self.flush_alone(peer);
        }
        if !way.is_open(self.core.rma.channel(peer), right) {
            return None;
        }
        if way == Way::Alone {
            return Some(self.go_alone(key, 0, host));
        }
        match self.bring_to_host(key, way) {
            Some(true) => Some(self.send_request(key, way)),
            Some(false) => Some(Err(SendError::Again)),
            None => {
                self.core.end_access(key, Some(UNREADABLE), host);
                Some(Ok(()))
            }
        }
    }

    /// Carries out an operation directly that has none before it. False: not all of it has begun.
    #[inline]
    fn begin_alone(&mut self, peer: PeerId, key: Key, host: &mut impl Host) -> bool {
        self.core.peers.count_outstanding(peer, 1);
        let begun = self.go_alone(key, 0, host).is_ok()
            && self.core.rma.ops.get(key).is_none_or(|op| op.state == State::Begun);
        if !begun {
            self.core.peers.count_outstanding(peer, -1); // one that waits is not counted
        }
        self.iface.flush();
        begun
    }

    /// Carries out a part of an operation directly, from `offset` on.
    fn go_alone(&mut self, key: Key, offset: usize, host: &mut impl Host) -> Result<(), SendError> {
        match self.move_alone(key, offset)? {
            Moved::Whole => self.core.end_access(key, None, host),
            // `on_access_done` completes it.
            Moved::Begun => {}
            Moved::Part => {
                if let Some(op) = self.core.rma.ops.get(key) {
                    let peer = op.peer;
                    self.core.rma.channel(peer).moving = true;
                }
            }
            Moved::Nothing => {}
        }
        Ok(())
    }

    /// Sends one more packet of a write.
    fn send_more(&mut self, key: Key, offset: usize) -> Result<(), SendError> {
        let Some(op) = self.core.rma.ops.get_mut(key) else { return Ok(()) };
        let total = op.local.len();
        let source = if op.unreadable { Err(()) } else { op.source(offset).map_err(drop) };
        let Ok(source) = source else {
            // FAULT in place of the rest: the target reports no write, and its answer ends the operation.
            (op.staging, op.unreadable) = (None, true);
            let packet = RmaPacket::Fault { tx: key.to_wire() };
            self.iface.send(op.peer, Mode::Short, packet.encode().as_slice(), 0, |_, _| ())?;
            op.state = State::Sent { received: 0 };
            let peer = op.peer;
            self.core.note_asked(peer);
            return Ok(());
        };
        let Some(Source { bytes, from, .. }) = source else { return Err(SendError::Again) };
        let rest = total.saturating_sub(offset);
        let here = from + bytes.len() - offset;
        let len = here.min(piece_of(total, self.iface.caps(op.peer).fragment_max));
        if len > 0 {
            let packet = RmaPacket::WriteMore { tx: key.to_wire(), offset: offset as u64 };
            let pack = |at: usize, to: &mut [u8]| {
                bytes.copy_out(offset - from + at, to);
            };
            self.iface.send(op.peer, Mode::Fragment, packet.encode().as_slice(), len, pack)?;
            self.core.counts.fragment_bytes += len as u64;
        }
        op.state = if len == rest {
            op.staging = None;
            State::Sent { received: 0 }
        } else {
            State::Sending { offset: offset + len }
        };
        let peer = op.peer;
        self.core.note_asked(peer);
        Ok(())
    }
}

impl Core {
    /// The fence before the operation has opened.
    pub(in crate::protocol) fn release_access(&mut self, key: Key) {
        let Some(op) = self.rma.ops.get_mut(key) else { return };
        op.state = State::Queued;
        self.enqueue_access(key);
    }

    fn enqueue_access(&mut self, key: Key) {
        let Some(peer) = self.rma.ops.get(key).map(|op| op.peer) else { return };
        let queue = &mut self.rma.channel(peer).queue;
        let first = queue.is_empty();
        queue.push_back(key);
        if first {
            self.rma.pumping.push_back(peer);
        }
        self.peers.count_outstanding(peer, 1);
    }

    /// Ends an operation that is in no queue. `error`: the error number and the cause, or `None`.
    pub(super) fn end_access(
        &mut self,
        key: Key,
        error: Option<(i32, Cause)>,
        host: &mut impl Host,
    ) {
        let Some(op) = self.rma.ops.get(key) else { return };
        let (peer, state, right, reachable) = (op.peer, op.state, op.right, op.reachable);
        let completion = op.completion();
        self.rma.discard(key);
        if state != State::Deferred {
            self.peers.count_outstanding(peer, -1);
        }
        let alone = matches!(state, State::Moving { .. } | State::Begun);
        if !matches!(state, State::Deferred | State::Queued) && !alone {
            let pulled = right == Right::Write && reachable;
            self.rma.channel(peer).count(right, pulled, -1);
        }
        match error {
            None => host.complete(&completion),
            Some(error) => host.fail(&Failure::new(completion, error)),
        }
    }

    /// READ_DATA: bytes of a read. `None`: they are not the next ones of any read.
    pub(super) fn on_read_data(
        &mut self,
        peer: PeerId,
        tx: u64,
        (offset, faulted): (u64, bool),
        payload: &[u8],
        host: &mut impl Host,
    ) -> Option<()> {
        let key = Key::from_wire(tx);
        let op = self.rma.ops.get_mut(key)?;
        let local = op.local.segments();
        let (received, mut failed) = match op.state {
            State::Sent { received } => (received, None),
            State::Failing { received, error } => (received, Some(error)),
            _ => return None,
        };
        let fits = payload.len() <= local.len() - received && received as u64 == offset;
        if op.peer != peer || op.right != Right::Read || !fits {
            return None;
        }
        if faulted && offset == 0 && !local.is_accessible(0, local.len(), true) {
            failed = Some((libc::EFAULT, Cause::BufferUnwritable));
        }
        if failed.is_none() && local.copy_in(received, payload) < payload.len() {
            failed = Some((libc::EIO, Cause::BufferUnwritable));
        }
        let received = received + payload.len();
        op.state = match failed {
            None => State::Sent { received },
            Some(error) => State::Failing { received, error },
        };
        if received == local.len() {
            self.end_access(key, failed, host);
        }
        Some(())
    }

    /// DONE: the target has carried out the operations that the payload names, or refuses them.
    pub(super) fn on_done(
        &mut self,
        peer: PeerId,
        status: u32,
        payload: &[u8],
        host: &mut impl Host,
    ) -> Option<()> {
        if payload.len() % size_of::<u64>() != 0 {
            return None;
        }
        for name in payload.chunks_exact(size_of::<u64>()).filter_map(<[u8]>::first_chunk) {
            let key = Key::from_wire(u64::from_le_bytes(*name));
            // For a read, success ends it only if the target could write to the buffer: else bytes are missing.
            let ended = self.rma.ops.get(key).is_some_and(|op| {
                let complete = match (op.right, op.state) {
                    (Right::Write | Right::Update, _) => true,
                    (Right::Read, State::Sent { .. }) => {
                        op.reachable || op.local.segments().len() == 0
                    }
                    _ => false,
                };
                op.peer == peer
                    && matches!(
                        op.state,
                        State::Pulled | State::Sent { .. } | State::Failing { .. }
                    )
                    && (status != 0 || complete)
            });
            if ended {
                let unreadable = self.rma.ops.get(key).is_some_and(|op| op.unreadable);
                let failed = unreadable.then_some(UNREADABLE).or_else(|| failure_of(status));
                self.end_access(key, failed, host);
            } else {
                self.counts.dropped += 1;
            }
        }
        Some(())
    }

    /// PUSH: the target cannot fetch a write. `faulted`: its copy from this process's memory failed with EFAULT.
    pub(super) fn on_push(&mut self, peer: PeerId, tx: u64, faulted: bool) -> Option<()> {
        let key = Key::from_wire(tx);
        let op = self.rma.ops.get_mut(key)?;
        if op.peer != peer || op.state != State::Pulled {
            return None;
        }
        let local = op.local.segments();
        if faulted && !local.is_accessible(0, local.len(), false) {
            // The target's answer to FAULT ends the operation.
            self.rma.answers.push_back((peer, tx, Answer::Fault));
            return Some(());
        }
        let front = self.rma.channel(peer).queue.front().copied();
        let busy = front.and_then(|key| self.rma.ops.get(key));
        if busy.is_some_and(|op| matches!(op.state, State::Sending { .. })) {
            return None;
        }
        self.rma.ops.get_mut(key)?.state = State::Sending { offset: 0 };
        let queue = &mut self.rma.channel(peer).queue;
        let first = queue.is_empty();
        queue.push_front(key);
        if first {
            self.rma.pumping.push_back(peer);
        }
        Some(())
    }

    /// The peer has departed: all its operations, and all to it, end.
    pub(in crate::protocol) fn end_rma(
        &mut self,
        peer: PeerId,
        error: (i32, Cause),
        host: &mut impl Host,
    ) {
        self.end_flush(peer);
        let Self { rma, .. } = self;
        rma.inbound.remove(&peer);
        rma.told.forget(peer);
        rma.serving.retain(|p| *p != peer);
        rma.pumping.retain(|p| *p != peer);
        for (to, _, answer) in &rma.answers {
            if let (true, Answer::Result(key)) = (*to == peer, answer) {
                rma.results.remove(*key);
            }
        }
        rma.answers.retain(|(to, ..)| *to != peer);
        if rma.channels.len() > peer.index() {
            let channel = rma.channel(peer);
            channel.queue = std::collections::VecDeque::new();
            channel.reaching = std::collections::VecDeque::new();
            channel.granted = Granted::default();
            (channel.unflushed, channel.unsure) = (None, false);
        }
        for key in rma.ops.keys_where(|op| op.peer == peer) {
            self.end_access(key, Some(error), host);
        }
    }
}

/// The error and cause that a target's status stands for.
fn failure_of(status: u32) -> Option<(i32, Cause)> {
    let status = i32::try_from(status).unwrap_or(libc::EIO);
    match status {
        0 => None,
        libc::EKEYREJECTED => Some((status, Cause::KeyRejected)),
        libc::EACCES => Some((status, Cause::AccessDenied)),
        libc::EOPNOTSUPP => Some((status, Cause::NoAtomics)),
        _ => Some((status, Cause::TargetFailed)),
    }
}
