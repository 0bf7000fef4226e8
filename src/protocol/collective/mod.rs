//! Collective operations by active messages (PROTOCOL.md §4.17).
//!
//! Each operation of a group follows a [`plan`] step by step, on a work buffer of its own. The operations of a group
//! run one after the other. No operation ends before all members have begun it, so a member is at most one operation
//! ahead of another, and only so much of its data is kept.
//!
//! No member waits for a member that has departed or failed. The others are told, fail the operations that still need
//! it, and tell the others in turn.

mod groups;
mod packet;
mod plan;

use super::state::{Core, Engine};
use super::{Cause, Failure, Host, OpError, Report};
use crate::memory::SegmentList;
use crate::memory::atomic::Operation;
use crate::sys::numbers::NumberSet;
use crate::transport::{Iface, Mode, PeerId, SendError};
pub(super) use groups::Collectives;
use groups::{End, Group, Member, Outgoing, Running, completion};
pub(crate) use packet::CollectivePacket;
use plan::Plan;
pub(crate) use plan::What;
use std::collections::VecDeque;

/// Operations of a group that may wait, at most.
const RUNNING_MAX: usize = 64;
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

impl Core {
    pub(super) fn on_collective(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        let packet = CollectivePacket::decode(header);
        let taken = match packet {
            Some(packet @ CollectivePacket::Part { .. }) => {
                self.collectives.on_part(peer, packet, payload)
            }
            Some(CollectivePacket::Gone { group, member, error }) => {
                let error = i32::try_from(error).unwrap_or(libc::EPROTO);
                self.collectives.on_gone(group, member, (peer, error));
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
        let (me, name) = (group.me, group.name);
        for op in std::mem::take(&mut group.running) {
            match op.what {
                What::Join => host.joined(id, Err(error)),
                _ => host.fail(&Failure::new(completion(&op), (error, cause))),
            }
        }
        self.collectives.forget_messages(|group, _| group == name);
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
                        let result = op.work.get(op.plan.output.clone()).unwrap_or(&[]);
                        let copied = op.output.copy_in(0, result);
                        let error = (libc::EIO, Cause::BufferUnwritable);
                        match op.what {
                            What::Join => host.joined(id, Ok(())),
                            _ if copied < result.len().min(op.output.len()) => {
                                host.fail(&Failure::new(completion(&op), error));
                            }
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
    /// Whether messages to members of groups wait for room.
    pub(crate) fn has_unsent_for_groups(&self) -> bool {
        self.core.collectives.has_unsent()
    }

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
        self.core.stirred = true;
        let all = &mut self.core.collectives;
        let name = all.next_name(name);
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
        self.core.stirred = true;
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
        self.core.stirred = true;
        let invalid = OpError::Error(libc::EINVAL);
        if !host.has_room_for_sends(op.report) {
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
            // A list that is shorter leaves zeros; a device that fails, fewer bytes than the list has.
            if op.input.copy_out(0, to) < to.len().min(op.input.len()) {
                return Err(OpError::Error(libc::EIO));
            }
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
        if host.takes_arrivals() {
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
        let mut starved: NumberSet<PeerId> = NumberSet::default();
        let mut kept = VecDeque::new();
        while let Some(mut message) = self.core.collectives.outbox.pop_front() {
            if n >= BATCH {
                self.core.collectives.outbox.push_front(message);
                break;
            }
            if starved.contains(&message.peer) {
                kept.push_back(message);
                continue;
            }
            match self.send_message(&mut message, &mut n) {
                Ok(()) => {}
                Err(SendError::Again) => {
                    starved.insert(message.peer);
                    kept.push_back(message);
                }
                Err(SendError::Unreachable(errno)) => {
                    kept.retain(|other: &Outgoing| other.peer != message.peer);
                    self.core.end_collectives(message.peer, errno.0, true);
                }
            }
        }
        let outbox = &mut self.core.collectives.outbox;
        kept.into_iter().rev().for_each(|message| outbox.push_front(message));
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
