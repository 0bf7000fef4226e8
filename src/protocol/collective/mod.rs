//! Collective operations by active messages (PROTOCOL.md §4.17).
//!
//! Each operation of a group follows a [`plan`] step by step, on a work buffer of its own. The operations of a group
//! run one after the other. No operation ends before all members have begun it, so a member is at most one operation
//! ahead of another, and only so much of its data is kept.
//!
//! No member waits for a member that has departed or failed. The others are told, fail the operations that still need
//! it, and tell the others in turn.

mod packet;
mod plan;

use super::engine::{Core, Engine};
use super::{Cause, Completion, Direction, Failure, Host, OpError, Report, UNKNOWN_SOURCE};
use crate::memory::SegmentList;
use crate::memory::atomic::Operation;
use crate::transport::{Iface, Mode, PeerId, SendError};
pub(crate) use packet::CollectivePacket;
pub(crate) use plan::What;
use plan::{How, Plan, Step};
use std::collections::{HashMap, VecDeque};

/// Operations of a group that may wait, at most.
const RUNNING_MAX: usize = 64;
/// Bytes kept of operations that this member has not begun, at most.
const HELD_MAX: usize = 1 << 30;
/// Failure notices kept for groups that this member has not joined, at most.
const NEWS_MAX: usize = 1024;
/// Packets that are sent in one progress pass.
const BATCH: usize = 64;
/// Bytes that the members compare when they join (PROTOCOL.md §4.17, rule 1).
const PROOF_LEN: usize = 8;

/// A collective operation, as requested by the endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectiveOp {
    /// The id that [`Engine::join`] returned.
    pub(crate) group: u64,
    pub(crate) what: What,
    /// Length of one member's block, bytes.
    pub(crate) block: usize,
    /// How operands are combined, in reductions.
    pub(crate) reduction: Option<Operation>,
    /// Input buffer, as long as [`Engine::collective_needs`] says.
    pub(crate) input: SegmentList,
    pub(crate) output: SegmentList,
    /// The application's context.
    pub(crate) context: u64,
    /// Where the completion is reported, and whether by an entry.
    pub(crate) report: Report,
}

#[derive(Debug)]
struct Running {
    what: What,
    sequence: u32,
    plan: Plan,
    work: Vec<u8>,
    output: SegmentList,
    reduction: Option<Operation>,
    context: u64,
    report: Report,
}

#[derive(Debug)]
struct Member {
    /// `None`: this endpoint.
    peer: Option<PeerId>,
    /// Something was sent to the member, so that its departure is noticed.
    contacted: bool,
    /// The member has departed or failed: an error number.
    gone: Option<i32>,
}

#[derive(Debug)]
struct Group {
    /// The group's name, the same at all members.
    name: u64,
    me: usize,
    members: Vec<Member>,
    sequence: u32,
    running: VecDeque<Running>,
    /// An operation has failed with this error, and all later ones fail too.
    broken: Option<i32>,
}

/// An incoming message.
#[derive(Debug)]
struct Message {
    what: u8,
    sequence: u32,
    total: usize,
    bytes: Vec<u8>,
    /// There was no memory for all of it.
    lost: bool,
}

/// An outgoing message.
#[derive(Debug)]
struct Outgoing {
    peer: PeerId,
    packet: CollectivePacket,
    bytes: Vec<u8>,
    sent: usize,
}

/// All groups of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Collectives {
    groups: HashMap<u64, Group>,
    next: u64,
    /// How often groups of the same members were joined, by their name.
    joins: HashMap<u64, u64>,
    /// Messages that have arrived, by group and sender.
    arrived: HashMap<(u64, PeerId), VecDeque<Message>>,
    held: usize,
    /// Failure notices of groups that this endpoint has not joined: group, member, error.
    news: VecDeque<(u64, usize, i32)>,
    outbox: VecDeque<Outgoing>,
    /// Peers that were sent a message and have not announced yet whether they support collective operations.
    strangers: Vec<PeerId>,
    /// A step of some operation may be possible.
    ready: bool,
}

/// Why an operation failed: the error number and the cause.
type End = (i32, Cause);

impl Group {
    fn peer(&self, member: usize) -> Option<PeerId> {
        self.members.get(member).and_then(|member| member.peer)
    }

    fn gone(&self, member: usize) -> Option<i32> {
        self.members.get(member).and_then(|member| member.gone)
    }

    fn leave(&mut self, member: usize, error: i32) {
        if let Some(member) = self.members.get_mut(member) {
            member.gone.get_or_insert(error);
        }
    }
}

impl Collectives {
    #[inline]
    pub(super) fn work(&self) -> usize {
        usize::from(self.ready) | self.outbox.len() | self.strangers.len()
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether this endpoint must be polled although nothing arrives. `silent`: the peer does not notify of room.
    pub(super) fn is_busy(&self, silent: impl Fn(PeerId) -> bool) -> bool {
        self.ready
            || !self.strangers.is_empty()
            || self.outbox.iter().any(|message| silent(message.peer))
    }

    /// Whether a group needs a message from `peer` to continue.
    pub(super) fn awaits(&self, peer: PeerId) -> bool {
        self.groups.values().any(|group| {
            let step = group.running.front().and_then(|op| op.plan.steps.front());
            matches!(step, Some(Step::Receive { from, .. }) if group.peer(*from) == Some(peer))
        })
    }

    /// Queues a message to a member.
    fn send(&mut self, id: u64, to: usize, packet: CollectivePacket, bytes: Vec<u8>) {
        let Some(member) = self.groups.get_mut(&id).and_then(|group| group.members.get_mut(to))
        else {
            return;
        };
        let first = !std::mem::replace(&mut member.contacted, true);
        if let Some(peer) = member.peer {
            if first && !self.strangers.contains(&peer) {
                self.strangers.push(peer);
            }
            self.outbox.push_back(Outgoing { peer, packet, bytes, sent: 0 });
        }
    }

    fn on_part(
        &mut self,
        peer: PeerId,
        packet: CollectivePacket,
        payload: &[u8],
    ) -> Result<(), ()> {
        let CollectivePacket::Part { group, what, sequence, total, offset } = packet else {
            return Err(());
        };
        if self.held.saturating_add(payload.len()) > HELD_MAX {
            return Err(());
        }
        let total = usize::try_from(total).map_err(|_| ())?;
        let queue = self.arrived.entry((group, peer)).or_default();
        if offset == 0 {
            let bytes = Vec::new();
            queue.push_back(Message { what, sequence, total, bytes, lost: false });
        }
        let message = queue.back_mut().ok_or(())?;
        let fits = message.bytes.len() as u64 == offset
            && message.sequence == sequence
            && message.total - message.bytes.len() >= payload.len();
        if !fits {
            return Err(());
        }
        self.ready = true;
        message.lost |= message.bytes.try_reserve(payload.len()).is_err();
        if message.lost {
            return Err(());
        }
        message.bytes.extend_from_slice(payload);
        self.held += payload.len();
        Ok(())
    }

    fn on_gone(&mut self, group: u64, member: usize, error: i32) {
        self.ready = true;
        if let Some(group) = self.groups.values_mut().find(|known| known.name == group) {
            group.leave(member, error);
            return;
        }
        if self.news.len() >= NEWS_MAX {
            self.news.pop_front();
        }
        self.news.push_back((group, member, error));
    }

    /// The next message from `peer`, if it is complete or will never be.
    fn take_message(&mut self, group: u64, peer: PeerId) -> Option<Message> {
        let queue = self.arrived.get_mut(&(group, peer))?;
        let whole = queue
            .front()
            .is_some_and(|message| message.lost || message.bytes.len() == message.total);
        let message = if whole { queue.pop_front() } else { None }?;
        self.held -= message.bytes.len();
        if queue.is_empty() {
            self.arrived.remove(&(group, peer));
        }
        Some(message)
    }

    fn forget_messages(&mut self, of: impl Fn(u64, PeerId) -> bool) {
        let held = &mut self.held;
        self.arrived.retain(|(group, peer), queue| {
            let keep = !of(*group, *peer);
            if !keep {
                *held -= queue.iter().map(|message| message.bytes.len()).sum::<usize>();
            }
            keep
        });
    }

    /// Carries out the steps of a group's first operation that are possible now. True: the operation has ended.
    fn follow(&mut self, id: u64) -> Result<bool, End> {
        loop {
            let Some(group) = self.groups.get_mut(&id) else { return Ok(false) };
            let name = group.name;
            let Some(op) = group.running.front_mut() else { return Ok(false) };
            let (what, sequence) = (op.what.number(), op.sequence);
            let Some(step) = op.plan.steps.front().cloned() else { return Ok(true) };
            match step {
                Step::Copy { from, to } => op.work.copy_within(from, to),
                Step::Send { to, part } => {
                    let from = op.work.get(part).unwrap_or(&[]);
                    let mut bytes = Vec::new();
                    if bytes.try_reserve_exact(from.len()).is_err() {
                        return Err((libc::ENOMEM, Cause::MemberGone));
                    }
                    bytes.extend_from_slice(from);
                    if let Some(error) = group.gone(to) {
                        return Err((error, Cause::MemberGone));
                    }
                    let total = bytes.len() as u64;
                    let packet =
                        CollectivePacket::Part { group: name, what, sequence, total, offset: 0 };
                    self.send(id, to, packet, bytes);
                }
                Step::Receive { from, part, how } => {
                    let Some(peer) = group.peer(from) else { return Err(disagree()) };
                    let Some(message) = self.take_message(name, peer) else {
                        return self.wait_for(id, from);
                    };
                    if (message.what, message.sequence) != (what, sequence) {
                        return Err(disagree());
                    }
                    if message.lost {
                        return Err((libc::ENOMEM, Cause::MemberGone));
                    }
                    self.apply(id, part, how, &message.bytes)?;
                }
            }
            let group = self.groups.get_mut(&id);
            if let Some(op) = group.and_then(|group| group.running.front_mut()) {
                op.plan.steps.pop_front();
            }
        }
    }

    /// A message is missing: makes sure that the departure of its sender will be noticed.
    fn wait_for(&mut self, id: u64, from: usize) -> Result<bool, End> {
        let Some(group) = self.groups.get(&id) else { return Ok(false) };
        if let Some(error) = group.gone(from) {
            return Err((error, Cause::MemberGone));
        }
        if group.members.get(from).is_some_and(|member| !member.contacted) {
            self.send(id, from, CollectivePacket::Hello, Vec::new());
        }
        Ok(false)
    }

    fn apply(
        &mut self,
        id: u64,
        part: std::ops::Range<usize>,
        how: How,
        bytes: &[u8],
    ) -> Result<(), End> {
        let op = self.groups.get_mut(&id).and_then(|group| group.running.front_mut());
        let Some(op) = op else { return Ok(()) };
        let to = op.work.get_mut(part).filter(|to| to.len() == bytes.len()).ok_or_else(disagree)?;
        match how {
            How::Store => to.copy_from_slice(bytes),
            How::Combine => {
                if let Some(reduction) = op.reduction {
                    reduction.combine(to, bytes);
                }
            }
            How::Compare if to != bytes => return Err(disagree()),
            How::Compare => {}
        }
        Ok(())
    }

    /// Sends GONE about `member` to every other member.
    fn announce(&mut self, id: u64, member: usize, error: i32) {
        let Some(group) = self.groups.get(&id) else { return };
        let packet = CollectivePacket::Gone {
            group: group.name,
            member: member as u32,
            error: error.unsigned_abs(),
        };
        let others: Vec<usize> =
            (0..group.members.len()).filter(|to| group.gone(*to).is_none()).collect();
        for to in others.into_iter().filter(|to| *to != member) {
            self.send(id, to, packet, Vec::new());
        }
    }
}

/// The members have started different operations.
fn disagree() -> End {
    (libc::EINVAL, Cause::MembersDisagree)
}

fn completion(op: &Running) -> Completion {
    Completion {
        direction: Direction::Collective,
        tagged: false,
        context: op.context,
        report: op.report,
        len: 0,
        buffer: 0,
        data: None,
        tag: 0,
        source: UNKNOWN_SOURCE,
        buffer_released: false,
    }
}

impl Core {
    pub(super) fn on_collective(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        let packet = CollectivePacket::decode(header);
        let taken = match packet {
            Some(packet @ CollectivePacket::Part { .. }) => {
                self.collectives.on_part(peer, packet, payload)
            }
            Some(CollectivePacket::Gone { group, member, error }) => {
                let error = i32::try_from(error).unwrap_or(libc::EPROTO);
                self.collectives.on_gone(group, member as usize, error);
                Ok(())
            }
            Some(CollectivePacket::Hello) => Ok(()),
            None => Err(()),
        };
        if taken.is_err() {
            self.counts.dropped += 1;
        }
    }

    /// A peer has departed. `died`: the members of its groups are told, including those that have no link to it.
    pub(super) fn end_collectives(&mut self, peer: PeerId, error: i32, died: bool) {
        let all = &mut self.collectives;
        all.outbox.retain(|message| message.peer != peer);
        all.strangers.retain(|stranger| *stranger != peer);
        let mut left = Vec::new();
        for (id, group) in &mut all.groups {
            let Some(member) = group.members.iter().position(|m| m.peer == Some(peer)) else {
                continue;
            };
            group.leave(member, error);
            left.push((*id, member));
        }
        let known: Vec<u64> = all.groups.values().map(|group| group.name).collect();
        all.forget_messages(|group, from| from == peer && !known.contains(&group));
        for (id, member) in left.into_iter().filter(|_| died) {
            all.announce(id, member, error);
        }
        all.ready = true;
    }

    fn end_group(&mut self, id: u64, (error, cause): End, host: &mut impl Host) {
        let Some(group) = self.collectives.groups.get_mut(&id) else { return };
        if group.broken.is_some() {
            return;
        }
        group.broken = Some(error);
        let me = group.me;
        for op in std::mem::take(&mut group.running) {
            match op.what {
                What::Join => host.joined(id, Err(error)),
                _ => host.fail(&Failure { completion: completion(&op), error, overflow: 0, cause }),
            }
        }
        self.collectives.announce(id, me, error);
    }

    fn follow_all(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        if !std::mem::take(&mut self.collectives.ready) {
            return n;
        }
        let ids: Vec<u64> = self.collectives.groups.keys().copied().collect();
        for id in ids {
            loop {
                match self.collectives.follow(id) {
                    Ok(false) => break,
                    Ok(true) => {
                        let group = self.collectives.groups.get_mut(&id);
                        let Some(op) = group.and_then(|group| group.running.pop_front()) else {
                            break;
                        };
                        n += 1;
                        op.output.copy_in(0, op.work.get(op.plan.output.clone()).unwrap_or(&[]));
                        match op.what {
                            What::Join => host.joined(id, Ok(())),
                            _ => host.complete(&completion(&op)),
                        }
                    }
                    Err(end) => {
                        n += 1;
                        self.end_group(id, end, host);
                        break;
                    }
                }
            }
        }
        n
    }
}

impl<I: Iface> Engine<I> {
    /// The id that [`Engine::join`] will return next.
    pub(crate) fn name_of_next_group(&self) -> u64 {
        self.core.collectives.next
    }

    /// Joins the group of `members`, where this endpoint has index `me`. `name` is a hash of the set and `order` a hash
    /// of its order, the same at all members. Returns the group's id. The host is told when all members have joined, or
    /// at once if this endpoint is `alone`.
    pub(crate) fn join(
        &mut self,
        members: &[PeerId],
        me: usize,
        name: u64,
        order: u64,
        alone: bool,
        host: &mut impl Host,
    ) -> Result<u64, OpError> {
        let all = &mut self.core.collectives;
        let nth = all.joins.entry(name).or_insert(0);
        let name = name.wrapping_add(nth.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        *nth += 1;
        let id = all.next;
        all.next += 1;
        let member = |(i, peer): (usize, &PeerId)| Member {
            peer: (i != me).then_some(*peer),
            contacted: i == me,
            gone: None,
        };
        let mut group = Group {
            name,
            me,
            members: members.iter().enumerate().map(member).collect(),
            sequence: 0,
            running: VecDeque::new(),
            broken: None,
        };
        all.news.retain(|(of, member, error)| {
            if *of == name {
                group.leave(*member, *error);
            }
            *of != name
        });
        all.groups.insert(id, group);
        if alone {
            host.joined(id, Ok(()));
            return Ok(id);
        }
        let Some(plan) = plan::plan(What::Join, me, members.len(), PROOF_LEN) else {
            return Err(OpError::Error(libc::EINVAL));
        };
        let work = order.to_le_bytes().to_vec();
        self.begin_collective(
            id,
            What::Join,
            plan,
            work,
            None,
            SegmentList::EMPTY,
            (0, Report::default()),
        );
        Ok(id)
    }

    /// Leaves a group. Its unfinished operations are cancelled.
    pub(crate) fn leave_group(&mut self, id: u64, host: &mut impl Host) {
        let Some(group) = self.core.collectives.groups.get(&id) else { return };
        let name = group.name;
        if !group.running.is_empty() {
            self.core.end_group(id, (libc::ECANCELED, Cause::Cancelled), host);
        }
        let all = &mut self.core.collectives;
        all.groups.remove(&id);
        all.forget_messages(|group, _| group == name);
    }

    /// The input and output lengths of an operation, bytes. `None`: the group or the root does not exist, or a length
    /// would overflow.
    pub(crate) fn collective_needs(
        &self,
        id: u64,
        what: What,
        block: usize,
    ) -> Option<(usize, usize)> {
        let group = self.core.collectives.groups.get(&id)?;
        let plan = plan::plan(what, group.me, group.members.len(), block)?;
        Some((plan.input.len(), plan.output.len()))
    }

    /// Starts an operation. `Again`: too many operations of the group wait.
    pub(crate) fn collective(
        &mut self,
        op: &CollectiveOp,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        let invalid = OpError::Error(libc::EINVAL);
        if !host.has_room() {
            return Err(OpError::Again);
        }
        let group = self.core.collectives.groups.get(&op.group).ok_or(invalid)?;
        if let Some(error) = group.broken {
            return Err(OpError::Error(error));
        }
        if group.running.len() >= RUNNING_MAX {
            return Err(OpError::Again);
        }
        let plan = plan::plan(op.what, group.me, group.members.len(), op.block).ok_or(invalid)?;
        let mut work = Vec::new();
        work.try_reserve_exact(plan.len).map_err(|_| OpError::Error(libc::ENOMEM))?;
        work.resize(plan.len, 0);
        if let Some(to) = work.get_mut(plan.input.clone()) {
            op.input.copy_out(0, to);
        }
        let account = (op.context, op.report);
        self.begin_collective(op.group, op.what, plan, work, op.reduction, op.output, account);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn begin_collective(
        &mut self,
        id: u64,
        what: What,
        plan: Plan,
        work: Vec<u8>,
        reduction: Option<Operation>,
        output: SegmentList,
        (context, report): (u64, Report),
    ) {
        let all = &mut self.core.collectives;
        let Some(group) = all.groups.get_mut(&id) else { return };
        let sequence = group.sequence;
        group.sequence = sequence.wrapping_add(1);
        group.running.push_back(Running {
            what,
            sequence,
            plan,
            work,
            output,
            reduction,
            context,
            report,
        });
        all.ready = true;
    }

    /// One progress pass for all groups.
    pub(super) fn advance_collectives(&mut self, host: &mut impl Host) -> usize {
        let mut n = self.know_members();
        if host.has_room() {
            n += self.core.follow_all(host);
        }
        n += self.flush_collectives();
        n
    }

    /// Ends the groups of members whose version has no collective operations, and that will never answer.
    fn know_members(&mut self) -> usize {
        let mut n = 0;
        for peer in std::mem::take(&mut self.core.collectives.strangers) {
            match self.iface.caps(peer).collectives {
                Some(true) => {}
                Some(false) => {
                    n += 1;
                    self.core.end_collectives(peer, libc::EOPNOTSUPP, true);
                }
                None => self.core.collectives.strangers.push(peer),
            }
        }
        n
    }

    fn flush_collectives(&mut self) -> usize {
        let mut n = 0;
        // The messages to one member stay in order.
        let mut starved: Vec<PeerId> = Vec::new();
        let mut kept = VecDeque::new();
        while let Some(mut message) = self.core.collectives.outbox.pop_front() {
            if n >= BATCH || starved.contains(&message.peer) {
                kept.push_back(message);
                continue;
            }
            match self.send_message(&mut message, &mut n) {
                Ok(()) => {}
                Err(SendError::Again) => {
                    starved.push(message.peer);
                    kept.push_back(message);
                }
                Err(SendError::Unreachable(errno)) => {
                    kept.retain(|other: &Outgoing| other.peer != message.peer);
                    self.core.end_collectives(message.peer, errno.0, true);
                }
            }
        }
        self.core.collectives.outbox.extend(kept);
        n
    }

    fn send_message(&mut self, message: &mut Outgoing, n: &mut usize) -> Result<(), SendError> {
        let caps = self.iface.caps(message.peer);
        let most = caps.bcopy_max.max(1);
        loop {
            let rest = message.bytes.get(message.sent..).unwrap_or(&[]);
            let part = rest.get(..most).unwrap_or(rest);
            let packet = match message.packet {
                CollectivePacket::Part { group, what, sequence, total, .. } => {
                    let offset = message.sent as u64;
                    CollectivePacket::Part { group, what, sequence, total, offset }
                }
                other => other,
            };
            let header = packet.encode();
            let pack = |at: usize, to: &mut [u8]| {
                let end = (at + to.len()).min(part.len());
                if let (Some(from), Some(to)) = (part.get(at..end), to.get_mut(..end - at)) {
                    to.copy_from_slice(from);
                }
            };
            if header.len() + part.len() <= caps.short_max {
                self.iface.send(message.peer, Mode::Short, &header, part.len(), pack)?;
            } else {
                self.iface.send(message.peer, Mode::Bulk, &header, part.len(), pack)?;
            }
            self.core.peers.mark_alive(message.peer);
            message.sent += part.len();
            *n += 1;
            if message.sent >= message.bytes.len() {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
impl Collectives {
    /// Asserts that no operation runs and no message is kept.
    pub(super) fn assert_empty(&self) {
        assert!(self.outbox.is_empty(), "{:?}", self.outbox);
        assert!(self.arrived.is_empty() && self.held == 0, "{:?}", self.arrived);
        assert!(self.groups.values().all(|group| group.running.is_empty()), "{:?}", self.groups);
    }
}
