//! Atomic operations (PROTOCOL.md §4.16), both sides. Each is one packet, and the target carries it out when the packet
//! arrives.

use super::operands::Operands;
use super::packet::{Prefix, REMOTE_LEN, RmaPacket};
use super::ranges::{MAX_RANGES, RemoteRanges, RmaOp};
use super::requests::{Place, Request};
use super::state::{Answer, Op, Rma, State, status_of};
use crate::memory::atomic::{Form, MAX_BYTES, Operation};
use crate::memory::keys::{Denied, Right};
use crate::memory::{OwnedBuffer, SegmentList, mover};
use crate::protocol::index_list::Key;
use crate::protocol::message::Payload;
use crate::protocol::packet::Ranges;
use crate::protocol::state::{Core, Engine};
use crate::protocol::{Cause, Host, OpError, Report};
use crate::transport::{BCOPY_LEAST, Iface, Mode, PeerId, SendError};

// An operation of the largest size, with two operands and all ranges, has to fit into one packet.
const _: () = assert!(2 * MAX_BYTES + MAX_RANGES * REMOTE_LEN <= BCOPY_LEAST);

/// An atomic operation, as requested by the endpoint, which has checked that the operation exists in this form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AtomicOp {
    pub(crate) peer: PeerId,
    pub(crate) operation: Operation,
    pub(crate) form: Form,
    /// As long as `remote`, or empty if the operation has no operand.
    pub(crate) operand: SegmentList,
    /// As long as `remote` if the form compares, else empty.
    pub(crate) compare: SegmentList,
    /// As long as `remote` if the form fetches, else empty.
    pub(crate) result: SegmentList,
    /// Whole elements in each range, at most [`MAX_BYTES`] in all, and not empty.
    pub(crate) remote: RemoteRanges,
    /// Remote completion data.
    pub(crate) data: Option<u64>,
    pub(crate) context: u64,
    pub(crate) report: Report,
    /// The application may reuse `operand` and `compare` when the call returns.
    pub(crate) inject: bool,
    /// Start only when all earlier operations to this peer have completed.
    pub(crate) fence: bool,
}

/// The access that the operation needs to the target's memory.
pub(crate) fn right_of(operation: Operation, form: Form) -> Right {
    match form {
        Form::Base => Right::Update,
        Form::Fetch if operation.operands() == 0 => Right::Fetch,
        Form::Fetch | Form::Compare => Right::Exchange,
    }
}

impl Rma {
    /// Adds a pending operation in this state.
    #[inline]
    pub(super) fn insert(&mut self, op: &RmaOp, state: State, operands: Option<&Operands>) -> Key {
        let operands = operands.map(|other| {
            let Operands { operation, result, .. } = *other;
            let compare = Payload::Lent(other.compare.segments());
            self.operands.push_back(Operands { operation, compare, result })
        });
        self.ops.push_back(Op::new(op, state, operands))
    }

    /// Copies the buffers of a pending operation: the application may reuse them. With `Again` or an error the operation has
    /// to be discarded. `most`: bytes of all copies that such operations may own together, unless it is one alone.
    pub(super) fn keep(&mut self, key: Key, most: usize) -> Result<(), OpError> {
        let Self { ops, operands, copies, copied, .. } = self;
        let Some(op) = ops.get_mut(key) else { return Ok(()) };
        match copies.take(&op.local.segments()) {
            Some((place, copy)) => (op.copy, op.local) = (Some(place), Payload::Lent(copy)),
            None => op.local.own(copied, most)?,
        }
        match op.operands.and_then(|key| operands.get_mut(key)) {
            Some(other) => other.compare.own(copied, most),
            None => Ok(()),
        }
    }

    /// Removes a pending operation.
    #[inline]
    pub(super) fn discard(&mut self, key: Key) {
        let Some(op) = self.ops.get(key) else { return };
        self.copied -= op.local.owned_len();
        if let Some(other) = op.operands.and_then(|key| self.operands.remove(key)) {
            self.copied -= other.compare.owned_len();
        }
        if let Some(place) = op.copy {
            self.copies.leave(place);
        }
        self.ops.discard(key);
    }
}

impl<I: Iface> Engine<I> {
    /// Starts an atomic operation. Errors: as [`Engine::access`], and EOPNOTSUPP if the peer's version has no atomic
    /// operations.
    #[inline]
    pub(crate) fn atomic(&mut self, op: &AtomicOp, host: &mut impl Host) -> Result<(), OpError> {
        self.core.stirred = true;
        if self.iface.caps(op.peer).atomics == Some(false) {
            return Err(OpError::Error(libc::EOPNOTSUPP));
        }
        let AtomicOp { peer, remote, data, context, report, inject, fence, .. } = *op;
        let right = right_of(op.operation, op.form);
        let local = op.operand;
        let delivered = true;
        let access =
            RmaOp { peer, right, local, remote, data, context, report, inject, delivered, fence };
        let operands = Operands {
            operation: op.operation,
            compare: Payload::Lent(op.compare),
            result: op.result,
        };
        self.begin(&access, Some(&operands), host)
    }

    /// Whether an operation may be sent now. `None`: it is atomic, and the target has not announced yet that it
    /// supports atomic operations. It then waits as behind a fence, so that nothing overtakes it.
    pub(in crate::protocol) fn may_send_atomic(
        &mut self,
        peer: PeerId,
        key: Key,
    ) -> Option<Result<(), (i32, Cause)>> {
        self.core.rma.channel(peer).asks = false;
        if self.core.rma.ops.get(key).is_none_or(|op| op.operands.is_none()) {
            return Some(Ok(()));
        }
        match self.iface.caps(peer).atomics {
            Some(true) => Some(Ok(())),
            Some(false) => Some(Err((libc::EOPNOTSUPP, Cause::NoAtomics))),
            None => {
                // The target announces it as soon as there is a link.
                let address = self.iface.address_of(peer);
                let linked = address.map(|address| self.iface.connect(&address));
                if let Some(Err(SendError::Unreachable(errno))) = linked {
                    return Some(Err((errno.0, Cause::PeerUnreachable)));
                }
                self.core.rma.channel(peer).asks = true;
                None
            }
        }
    }

    /// Sends an atomic operation in one packet.
    pub(super) fn send_atomic(&mut self, key: Key, operands: Key) -> Result<(), SendError> {
        let rma = &mut self.core.rma;
        let (Some(op), Some(other)) = (rma.ops.get_mut(key), rma.operands.get(operands)) else {
            return Ok(());
        };
        let (operand, compare) = (op.local.segments(), other.compare.segments());
        let prefix = Prefix::new(&op.remote, &Ranges::NONE);
        let packet = RmaPacket::Atomic {
            tx: key.to_wire(),
            data: op.data,
            fetches: op.right.reads(),
            ranges: op.remote.as_slice().len() as u8,
            op: other.operation.op as u8,
            datatype: other.operation.datatype as u8,
        };
        let border = prefix.len() + operand.len();
        let pack = |at: usize, to: &mut [u8]| {
            let (front, back) = to.split_at_mut(border.saturating_sub(at).min(to.len()));
            if !front.is_empty() {
                prefix.pack(&operand, at, front);
            }
            if !back.is_empty() {
                compare.copy_out((at + front.len()).saturating_sub(border), back);
            }
        };
        let header = packet.encode();
        let (header, len) = (header.as_slice(), border + compare.len());
        let caps = self.iface.caps(op.peer);
        if header.len() + len <= caps.short_max {
            self.iface.send(op.peer, Mode::Short, header, len, pack)?;
        } else {
            self.iface.send(op.peer, Mode::Bulk, header, len, pack)?;
        }
        op.state = State::Sent { received: 0 };
        let (peer, right) = (op.peer, op.right);
        self.core.rma.channel(peer).count(right, false, 1);
        self.core.note_asked(peer);
        Ok(())
    }

    /// Sends a result to the initiator.
    pub(super) fn send_result(&mut self, peer: PeerId, tx: u64, key: Key) -> Result<(), SendError> {
        let Some((_, kept)) = self.core.rma.results.list.get(key) else { return Ok(()) };
        let bytes = kept.bytes();
        let pack = |at: usize, to: &mut [u8]| {
            if let Some(from) = bytes.get(at..at + to.len()) {
                to.copy_from_slice(from);
            }
        };
        let header = RmaPacket::Result { tx }.encode();
        let header = header.as_slice();
        if header.len() + bytes.len() <= self.iface.caps(peer).short_max {
            self.iface.send(peer, Mode::Short, header, bytes.len(), pack)
        } else {
            self.iface.send(peer, Mode::Bulk, header, bytes.len(), pack)
        }
    }
}

impl Core {
    /// ATOMIC: a peer's atomic operation. `None`: no udrv sends this.
    pub(super) fn on_atomic(
        &mut self,
        request: &Request,
        fetches: bool,
        (op, datatype): (u8, u8),
        bytes: &[u8],
        host: &mut impl Host,
    ) -> Option<()> {
        let total = usize::try_from(request.ranges.total()).ok()?;
        let busy = self.rma.inbound.get(&request.peer).is_some_and(|i| i.has_writes());
        // An initiator sends no atomic operation before its writes that come in several packets have ended.
        if busy || total == 0 || total > MAX_BYTES {
            return None;
        }
        let known = Operation::from_numbers(op.into(), datatype.into());
        let form = |operation: Operation| match (operation.operands(), fetches) {
            (2, _) => Form::Compare,
            (_, true) => Form::Fetch,
            (_, false) => Form::Base,
        };
        let known = known.filter(|operation| operation.is_offered(form(*operation)));
        let status = match known {
            Some(operation) => {
                let size = operation.datatype.size() as u64;
                let whole = request.ranges.as_slice().iter().all(|range| range.len % size == 0);
                if !whole || bytes.len() != total * operation.operands() {
                    return None;
                }
                if fetches && !self.rma.results.has_room(request.peer) {
                    return None;
                }
                let right = right_of(operation, form(operation));
                let found = Place::find(&request.ranges, right, host);
                match found.and_then(|place| place.check(0, total, host).map(|()| place)) {
                    Ok(place) => {
                        return self.apply(request, fetches, operation, &place, bytes, host);
                    }
                    Err(denied) => status_of(denied),
                }
            }
            None => libc::EOPNOTSUPP as u32,
        };
        self.answer_with(request, Answer::Done(status));
        Some(())
    }

    /// Carries out an atomic operation.
    fn apply(
        &mut self,
        request: &Request,
        fetches: bool,
        operation: Operation,
        place: &Place,
        bytes: &[u8],
        host: &mut impl Host,
    ) -> Option<()> {
        let total = place.ranges.total() as usize;
        let Some(mut kept) = self.rma.results.of_length(if fetches { total } else { 0 }) else {
            self.answer_with(request, Answer::Done(libc::ENOMEM as u32));
            return Some(());
        };
        let (operand, compare) = match operation.operands() {
            0 => (bytes, bytes),
            _ => bytes.split_at_checked(total)?,
        };
        let mut done = 0;
        while done < total {
            // No region is closed between the check and this.
            let memory = place.piece(done as u64, total - done, host).ok()?.memory;
            let old = kept.bytes_mut().get_mut(done..).unwrap_or(&mut []);
            let operand = operand.get(done..).unwrap_or(&[]);
            let compare = compare.get(done..).unwrap_or(&[]);
            let apply = |memory: &SegmentList| operation.apply(memory, operand, compare, old);
            if !on_host(&memory, apply) {
                self.answer_with(request, Answer::Done(status_of(Denied::Device)));
                return Some(());
            }
            done += memory.len().max(1);
        }
        let answer = if fetches {
            Answer::Result(self.rma.results.add(request.peer, kept))
        } else {
            Answer::Done(0)
        };
        self.answer_with(request, answer);
        self.accessed(request, place, host);
        Some(())
    }

    /// The old values of an atomic operation that this endpoint started.
    pub(super) fn on_result(
        &mut self,
        peer: PeerId,
        tx: u64,
        payload: &[u8],
        host: &mut impl Host,
    ) -> Option<()> {
        let key = Key::from_wire(tx);
        let op = self.rma.ops.get(key)?;
        let result = self.rma.operands.get(op.operands?)?.result;
        let waits = op.peer == peer && op.right.reads() && matches!(op.state, State::Sent { .. });
        if !waits || payload.len() != result.len() {
            return None;
        }
        let failed = result.copy_in(0, payload) < payload.len();
        let error = failed.then_some((libc::EIO, Cause::BufferUnwritable));
        self.end_access(key, error, host);
        Some(())
    }
}

/// Calls `change` with the memory, or with a copy of device memory that is then written back, if it was changed: kernels
/// may write there too. False: the device failed.
fn on_host(memory: &SegmentList, change: impl FnOnce(&SegmentList)) -> bool {
    if !memory.is_on_device() {
        change(memory);
        return true;
    }
    let _held = mover::exclusive();
    let Some(copy) = OwnedBuffer::try_copy_of(memory) else { return false };
    let copy = copy.segments();
    let Some(before) = OwnedBuffer::try_copy_of(&copy) else { return false };
    change(&copy);
    before.is_same_as(&copy) || copy.copy_to(0, memory, 0, copy.len()) == copy.len()
}
