//! The groups of an endpoint: what each keeps, and the steps of its operations.

use super::packet::CollectivePacket;
use super::plan::{How, Plan, Step, What};
use crate::memory::SegmentList;
use crate::memory::atomic::Operation;
use crate::protocol::{Cause, Completion, Direction, Report};
use crate::transport::PeerId;
use std::collections::{HashMap, VecDeque};

/// Bytes kept of operations that this member has not begun, at most (PROTOCOL.md §4.17 rule 6).
const HELD_MAX: usize = if cfg!(test) { 1 << 20 } else { 1 << 30 };
/// Failure notices kept for groups that this member has not joined, at most.
const NEWS_MAX: usize = 1024;
/// In GONE: the sender itself, which does not know its number in the group.
const SENDER: u32 = u32::MAX;
/// Between the names of groups of the same members, and its inverse modulo 2^64.
const NAME_STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const NAME_STEP_INVERSE: u64 = 0xf1de_83e1_9937_733d;
const _: () = assert!(NAME_STEP.wrapping_mul(NAME_STEP_INVERSE) == 1);

#[derive(Debug)]
pub(super) struct Running {
    pub(super) what: What,
    pub(super) sequence: u32,
    pub(super) plan: Plan,
    pub(super) work: Vec<u8>,
    pub(super) output: SegmentList,
    pub(super) reduction: Option<Operation>,
    pub(super) context: u64,
    pub(super) report: Report,
}

#[derive(Debug)]
pub(super) struct Member {
    /// `None`: this endpoint.
    pub(super) peer: Option<PeerId>,
    /// Something was sent to the member, so that its departure is noticed.
    pub(super) contacted: bool,
    /// The member has departed or failed: an error number.
    pub(super) gone: Option<i32>,
}

#[derive(Debug)]
pub(super) struct Group {
    /// The group's name, the same at all members.
    pub(super) name: u64,
    pub(super) me: usize,
    pub(super) members: Vec<Member>,
    pub(super) sequence: u32,
    pub(super) running: VecDeque<Running>,
    /// An operation has failed with this error, and all later ones fail too.
    pub(super) broken: Option<i32>,
}

/// An incoming message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) what: u8,
    pub(super) sequence: u32,
    pub(super) total: usize,
    pub(super) bytes: Vec<u8>,
    /// Bytes that arrived before the operation was begun.
    early: usize,
    /// There was no memory for all of it.
    pub(super) lost: bool,
}

/// An outgoing message.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) peer: PeerId,
    pub(super) packet: CollectivePacket,
    pub(super) bytes: Vec<u8>,
    pub(super) sent: usize,
}

/// All groups of an endpoint.
#[derive(Debug, Default)]
pub(in crate::protocol) struct Collectives {
    pub(super) groups: HashMap<u64, Group>,
    pub(super) next: u64,
    /// How often groups of the same members were joined, by their name.
    pub(super) joins: HashMap<u64, u64>,
    /// Messages that have arrived, by group and sender.
    pub(super) arrived: HashMap<(u64, PeerId), VecDeque<Message>>,
    /// The `early` bytes of all of them.
    held: usize,
    /// Failure notices of groups that this endpoint has not joined: group, member, error.
    pub(super) news: VecDeque<(u64, usize, i32)>,
    pub(super) outbox: VecDeque<Outgoing>,
    /// Peers that were sent a message and have not announced yet whether they support collective operations.
    pub(super) strangers: Vec<PeerId>,
    /// A step of some operation may be possible.
    pub(super) ready: bool,
}

/// Why an operation failed: the error number and the cause.
pub(super) type End = (i32, Cause);

impl Group {
    pub(super) fn peer(&self, member: usize) -> Option<PeerId> {
        self.members.get(member).and_then(|member| member.peer)
    }

    pub(super) fn gone(&self, member: usize) -> Option<i32> {
        self.members.get(member).and_then(|member| member.gone)
    }

    pub(super) fn leave(&mut self, member: usize, error: i32) {
        if let Some(member) = self.members.get_mut(member) {
            member.gone.get_or_insert(error);
        }
    }
}

impl Collectives {
    #[inline]
    pub(in crate::protocol) fn work(&self) -> usize {
        usize::from(self.ready) | self.outbox.len() | self.strangers.len()
    }

    pub(in crate::protocol) fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether this endpoint must be polled although nothing arrives. `silent`: the peer does not notify of room.
    pub(in crate::protocol) fn is_busy(&self, silent: impl Fn(PeerId) -> bool) -> bool {
        self.ready
            || !self.strangers.is_empty()
            || self.outbox.iter().any(|message| silent(message.peer))
    }

    /// Number of groups.
    pub(in crate::protocol) fn len(&self) -> usize {
        self.groups.len()
    }

    /// The peers of which groups need a message to continue.
    pub(in crate::protocol) fn awaited(&self) -> impl Iterator<Item = PeerId> {
        self.groups.values().filter_map(|group| {
            match group.running.front().and_then(|op| op.plan.steps.front())? {
                Step::Receive { from, .. } => group.peer(*from),
                _ => None,
            }
        })
    }

    /// Queues a message to a member.
    pub(super) fn send(&mut self, id: u64, to: usize, packet: CollectivePacket, bytes: Vec<u8>) {
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

    /// The name of the group that is joined next of those with this `hash` of their members.
    pub(super) fn next_name(&mut self, hash: u64) -> u64 {
        let nth = self.joins.entry(hash).or_insert(0);
        *nth += 1;
        hash.wrapping_add((*nth - 1).wrapping_mul(NAME_STEP))
    }

    /// Whether this endpoint was in a group of that name, and is not any more: no name is used again.
    fn has_left(&self, name: u64) -> bool {
        let nth = |hash: &u64| name.wrapping_sub(*hash).wrapping_mul(NAME_STEP_INVERSE);
        self.joins.iter().any(|(hash, count)| nth(hash) < *count)
    }

    pub(super) fn on_part(
        &mut self,
        peer: PeerId,
        packet: CollectivePacket,
        payload: &[u8],
    ) -> Result<(), ()> {
        let CollectivePacket::Part { group, what, sequence, total, offset } = packet else {
            return Err(());
        };
        let total = usize::try_from(total).map_err(|_| ())?;
        let mut early = payload.len();
        let known = self.groups.values().find(|known| known.name == group);
        if known.map_or_else(|| self.has_left(group), |known| known.broken.is_some()) {
            if what == What::Join.number() && offset == 0 {
                self.refuse_join(peer, group);
            }
            return Err(());
        }
        if known
            .is_some_and(|known| known.running.front().is_some_and(|op| op.sequence == sequence))
        {
            early = 0;
        }
        let queue = self.arrived.entry((group, peer)).or_default();
        if offset == 0 {
            let bytes = Vec::new();
            queue.push_back(Message { what, sequence, total, bytes, early: 0, lost: false });
        }
        let message = queue.back_mut().ok_or(())?;
        let fits = message.bytes.len() as u64 == offset
            && message.sequence == sequence
            && message.total - message.bytes.len() >= payload.len();
        if !fits {
            return Err(());
        }
        self.ready = true;
        message.lost |= self.held.saturating_add(early) > HELD_MAX
            || message.bytes.try_reserve(payload.len()).is_err();
        if message.lost {
            return Err(());
        }
        message.bytes.extend_from_slice(payload);
        message.early += early;
        self.held += early;
        Ok(())
    }

    /// Tells a peer that the group that it joins has ended here (PROTOCOL.md §4.17 rule 4). The peer has joined groups of
    /// these members less often than this endpoint: it was started again, or a join of its own could not begin.
    fn refuse_join(&mut self, peer: PeerId, group: u64) {
        let packet =
            CollectivePacket::Gone { group, member: SENDER, error: libc::ESTALE.unsigned_abs() };
        if !self.outbox.iter().any(|known| (known.peer, known.packet) == (peer, packet)) {
            self.outbox.push_back(Outgoing { peer, packet, bytes: Vec::new(), sent: 0 });
        }
    }

    pub(super) fn on_gone(&mut self, group: u64, member: u32, (from, error): (PeerId, i32)) {
        self.ready = true;
        if let Some(group) = self.groups.values_mut().find(|known| known.name == group) {
            let sender = || group.members.iter().position(|member| member.peer == Some(from));
            let member = if member == SENDER { sender() } else { Some(member as usize) };
            if let Some(member) = member {
                group.leave(member, error);
            }
            return;
        }
        if member == SENDER || self.has_left(group) {
            return;
        }
        if self.news.len() >= NEWS_MAX {
            self.news.pop_front();
        }
        self.news.push_back((group, member as usize, error));
    }

    /// The next message from `peer`, if it is complete or will never be.
    pub(super) fn take_message(&mut self, group: u64, peer: PeerId) -> Option<Message> {
        let queue = self.arrived.get_mut(&(group, peer))?;
        let whole = queue
            .front()
            .is_some_and(|message| message.lost || message.bytes.len() == message.total);
        let message = if whole { queue.pop_front() } else { None }?;
        self.held -= message.early;
        if queue.is_empty() {
            self.arrived.remove(&(group, peer));
        }
        Some(message)
    }

    pub(super) fn forget_messages(&mut self, of: impl Fn(u64, PeerId) -> bool) {
        let held = &mut self.held;
        self.arrived.retain(|(group, peer), queue| {
            let keep = !of(*group, *peer);
            if !keep {
                *held -= queue.iter().map(|message| message.early).sum::<usize>();
            }
            keep
        });
    }

    /// Carries out the steps of a group's first operation that are possible now. True: the operation has ended.
    pub(super) fn follow(&mut self, id: u64) -> Result<bool, End> {
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
    pub(super) fn wait_for(&mut self, id: u64, from: usize) -> Result<bool, End> {
        let Some(group) = self.groups.get(&id) else { return Ok(false) };
        if let Some(error) = group.gone(from) {
            return Err((error, Cause::MemberGone));
        }
        if group.members.get(from).is_some_and(|member| !member.contacted) {
            self.send(id, from, CollectivePacket::Hello, Vec::new());
        }
        Ok(false)
    }

    pub(super) fn apply(
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
    pub(super) fn announce(&mut self, id: u64, member: usize, error: i32) {
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

pub(super) fn completion(op: &Running) -> Completion {
    Completion::new(Direction::Collective, op.context, op.report)
}

#[cfg(test)]
impl Collectives {
    /// Asserts that no operation runs and no message is kept.
    pub(in crate::protocol) fn assert_empty(&self) {
        assert!(self.outbox.is_empty(), "{:?}", self.outbox);
        assert!(self.arrived.is_empty() && self.held == 0, "{:?}", self.arrived);
        assert!(self.groups.values().all(|group| group.running.is_empty()), "{:?}", self.groups);
    }
}
