//! Direct RMA (PROTOCOL.md §4.18): the target advertises parts of its regions, and the initiator moves the bytes
//! itself, or has its device move them, while these keys are valid. All other operations go by messages, where the
//! target detects errors.

use super::keys::{OFTEN, Part, Retracted, TOLD_MAX, ToldPart, ToldTo};
use super::packet::RmaPacket;
use super::ranges::{RemoteRange, RemoteRanges};
use super::state::{Channel, Op, State};
use crate::memory::SegmentList;
use crate::memory::keys::{self, Right};
use crate::protocol::Host;
use crate::protocol::index_list::Key;
use crate::protocol::limits::Limits;
use crate::protocol::schemes::put::PUT_OF_A_MESSAGE;
use crate::protocol::state::{Core, Engine};
use crate::transport::{
    Access, Iface, LaneCaps, LaneId, Mode, PeerId, Purpose, Put, Registered, Registration, Remote,
    RemoteKey, SendError,
};

/// Writes from `alone_min` bytes on are worth direct RMA on all transports, from this fraction of it on only on some.
const WRITE_SHARE: usize = 8;
/// Bytes of one operation that are moved in one progress pass.
const TURN: usize = 4 << 20;
/// The token of a flush read. No list of operations has so many entries that one could have this token, and no access
/// for a message has it.
const FLUSH: u64 = PUT_OF_A_MESSAGE - 1;

/// Progress of an operation.
pub(super) enum Moved {
    /// Complete.
    Whole,
    /// The device is moving all that is left.
    Begun,
    /// The rest is moved in another progress pass.
    Part,
    /// It has to go by messages.
    Nothing,
}

/// The result of an attempt to move a part of an operation.
enum Step {
    /// So many bytes are moved, or being moved. 0: it has to go by messages.
    Moved(usize),
    /// Its key is one of another lane than that of the accesses before it, which are not in memory yet. Lanes have no
    /// common order: those have to be flushed first.
    OtherLane,
}

/// Shortest write that is counted for [`OFTEN`], bytes.
pub(super) fn write_min(limits: &Limits) -> u64 {
    (limits.alone_min / WRITE_SHARE) as u64
}

impl Channel {
    /// Counts an operation that is sent as a message. `write_min`: the result of [`write_min`].
    pub(super) fn on_request(&mut self, right: Right, len: u64, write_min: u64) {
        if right == Right::Write && len >= write_min {
            self.short_writes = self.short_writes.saturating_add(1);
        }
    }

    /// Whether a short write may be direct. It does not wait for the answers to earlier messages, except after so many
    /// writes by message that it might wait forever. With `delivered`, a message costs less than a flush read. But
    /// behind a direct operation in progress a write is direct too: a message would have to wait for its end.
    fn admits_write(&self, delivered: bool) -> bool {
        let begins = !delivered && (self.is_drained() || self.short_writes >= OFTEN);
        begins || !self.reaching.is_empty()
    }

    /// No direct operation is in progress, and all direct writes are in the target's memory.
    #[inline]
    pub(super) fn is_flushed(&self) -> bool {
        self.reaching.is_empty() && self.unflushed.is_none() && !self.flushing
    }

    /// Moves, or begins to move, at most `most` bytes of an operation.
    fn move_part<I: Iface>(
        &mut self,
        iface: &mut I,
        (key, op): (Key, &mut Op),
        offset: usize,
        most: usize,
    ) -> Result<Step, SendError> {
        let (reads, token, stays) = (op.right == Right::Read, key.to_wire(), op.copy.is_some());
        let piece = self.granted.piece(&op.remote, offset, most).filter(|_| !self.unsure);
        let Some((at, len)) = piece else {
            op.barred = true;
            return Ok(Step::Moved(0));
        };
        if self.kind != at.key.kind() && !self.is_flushed() {
            return Ok(Step::OtherLane);
        }
        let part = op.local.segments().slice(offset, len);
        let how = Put { notify: false, delivered: op.delivered, stays, reports: false, token };
        let moved = match reads {
            true => iface.get(op.peer, &part, &at, token),
            false => iface.put(op.peer, &part, &at, how),
        };
        match moved {
            Ok(Access::Moved(moved)) => Ok(Step::Moved(moved)),
            Ok(Access::Begun | Access::Unsure | Access::Silent) => {
                self.note_begun(&at, len, reads || op.delivered);
                if op.begun == 0 {
                    self.short_writes = 0;
                    self.reaching.push_back(key);
                }
                op.begun += 1;
                Ok(Step::Moved(len))
            }
            Err(SendError::Again) => Err(SendError::Again),
            // The key may be another region's now, or void, or the buffer is not fit for direct access. The target
            // detects errors, or carries the operation out.
            Err(SendError::Unreachable(errno)) => {
                if errno.0 != libc::EFAULT {
                    self.granted.forget(&at.key);
                }
                op.barred = true;
                Ok(Step::Moved(0))
            }
        }
    }

    /// The device has begun to access `len` bytes; `flushed`: this completes after all earlier writes of the device, and
    /// its own.
    fn note_begun(&mut self, at: &Remote, len: usize, flushed: bool) {
        let last = Remote { offset: at.offset + (len as u64).saturating_sub(1), ..*at };
        (self.unflushed, self.kind) = ((!flushed).then_some(last), at.key.kind());
    }

    /// All messages that were sent have their answer.
    pub(super) fn is_drained(&self) -> bool {
        [self.writes, self.pulls, self.reads, self.fetches] == [0; 4]
    }
}

impl<I: Iface> Engine<I> {
    /// Whether such an operation may be direct. One that the target must be notified of may not. `device`: the local memory is
    /// a device's, which not every lane takes.
    #[inline]
    pub(super) fn is_granted(
        &self,
        peer: PeerId,
        right: Right,
        remote: &RemoteRanges,
        (delivered, device): (bool, bool),
    ) -> bool {
        let Some(channel) = self.core.rma.channels.get(peer.index()) else { return false };
        let (reads, len) = (right == Right::Read, remote.total());
        let long = len >= self.core.limits.alone_min as u64;
        let admitted = match reads {
            _ if long => true,
            true => channel.is_drained(),
            false => channel.admits_write(delivered),
        };
        if !admitted || channel.granted.parts.is_empty() || channel.unsure {
            return false;
        }
        // The lane of the first bytes says what is worth it.
        let first = remote.as_slice().iter().find(|range| range.len > 0);
        let part = first.and_then(|range| channel.granted.find(range.key, range.addr));
        let key = part.map(|(part, _)| part.registered.key);
        let min = key.and_then(|key| self.iface.direct_min(peer, &key, reads));
        let (Some(key), Some(min)) = (key, min) else { return false };
        if device && !self.iface.lanes(peer).take_device(&key) {
            return false;
        }
        let min = if reads || channel.reaching.is_empty() { min } else { 1 };
        (long || len >= min as u64) && channel.granted.cover(remote, right)
    }

    /// Begins a flush read if direct writes to `peer` may not be in its memory yet: before a message or a fenced
    /// operation.
    ///
    /// A device acknowledges an RDMA Write when it has the packets; nothing guarantees that they are in memory.
    /// Messages take other queue pairs, or UDP. An RDMA Read is carried out after all earlier writes of its queue pair
    /// (InfiniBand 1.7, 10.8.3.3), also by devices that place packets out of order (mlx5dv_create_qp(3)). Its read of
    /// memory does not pass writes of the device on the bus (PCI Express 5.0, 2.4.1). One byte is enough.
    #[inline]
    pub(in crate::protocol) fn flush_alone(&mut self, peer: PeerId) {
        let channel = self.core.rma.channels.get(peer.index());
        // A second one waits for the first: one flag and one token stand for both.
        let channel = channel.filter(|channel| !channel.flushing);
        if let Some(at) = channel.and_then(|channel| channel.unflushed) {
            self.begin_flush(peer, &at);
        }
    }

    #[cold]
    fn begin_flush(&mut self, peer: PeerId, at: &Remote) {
        // If it does not begin, the next pass tries again, or the connection has ended and nothing is left to flush.
        let Ok(flush) = self.iface.flush_puts(peer, at, FLUSH) else { return };
        let channel = self.core.rma.channel(peer);
        channel.unflushed = None;
        if flush == Access::Begun {
            channel.flushing = true;
            self.core.peers.count_outstanding(peer, 1);
            self.iface.flush();
        }
    }

    /// Whether everything before a fence has completed, and all direct writes are in the target's memory. Then an operation
    /// passes the fence. Messages before it need not have arrived: many have no answer. If there may be any since the last
    /// packet that was answered, no operation is direct until the peer has answered one that was sent behind the fence
    /// (PROTOCOL.md §4.18).
    pub(in crate::protocol) fn passes_fence(&mut self, peer: PeerId) -> bool {
        self.flush_alone(peer);
        let outstanding = self.core.peers.of(peer).is_some_and(|peer| peer.outstanding > 0);
        let Some(channel) = self.core.rma.channels.get_mut(peer.index()) else {
            return !outstanding;
        };
        let open = channel.unflushed.is_none() && !outstanding;
        // Where nothing is outstanding, all that was asked has its answer.
        channel.unsure |= open && channel.asked_at != self.core.counts.unanswered();
        open
    }

    /// No flush to the peer is in progress or due.
    #[cfg(test)]
    pub(in crate::protocol) fn is_flushed(&self, peer: PeerId) -> bool {
        self.core.rma.channels.get(peer.index()).is_none_or(Channel::is_flushed)
    }

    /// Moves bytes of the operation, which is the first of its channel.
    pub(super) fn move_alone(&mut self, key: Key, from: usize) -> Result<Moved, SendError> {
        let Some(op) = self.core.rma.ops.get_mut(key) else { return Ok(Moved::Whole) };
        let Some(channel) = self.core.rma.channels.get_mut(op.peer.index()) else {
            return Ok(Moved::Nothing);
        };
        let (len, mut offset) = (op.local.len(), from);
        while !op.barred && offset < len {
            op.state = State::Moving { offset };
            if offset - from >= TURN {
                return Ok(Moved::Part);
            }
            let most = (len - offset).min(self.core.limits.bulk_chunk);
            match channel.move_part(&mut self.iface, (key, op), offset, most)? {
                Step::Moved(moved) => {
                    offset += moved;
                    self.core.counts.reached_bytes += moved as u64;
                }
                Step::OtherLane => {
                    let peer = op.peer;
                    self.flush_alone(peer);
                    // A flush may be complete at once, and nothing arrives then.
                    let flushed = self.core.rma.channel(peer).is_flushed();
                    return if flushed { Ok(Moved::Part) } else { Err(SendError::Again) };
                }
            }
        }
        match (op.barred, op.begun) {
            (false, 0) => Ok(Moved::Whole),
            (false, _) => {
                op.state = State::Begun;
                Ok(Moved::Begun)
            }
            (true, 0) => {
                op.state = State::Queued;
                Ok(Moved::Nothing)
            }
            // The device still uses the buffer for what it has begun.
            (true, _) => Err(SendError::Again),
        }
    }

    /// Invalidates keys at peers, and advertises regions, except those whose accesses a counter here counts.
    pub(super) fn grant(&mut self, host: &impl Host) -> usize {
        let mut n = self.retract();
        for (peer, range) in std::mem::take(&mut self.core.rma.told.offers) {
            let Some((id, region)) = host.offer(range.key) else { continue };
            match self.grant_parts(peer, range, id, &region) {
                Ok(granted) => n += granted,
                Err(SendError::Again) => self.core.rma.told.offers.push((peer, range)),
                Err(SendError::Unreachable(_)) => {}
            }
        }
        n
    }

    /// Advertises to `peer` the parts of a region that a range lies in. `Again`: not all of them yet.
    fn grant_parts(
        &mut self,
        peer: PeerId,
        range: RemoteRange,
        id: u64,
        region: &keys::Region,
    ) -> Result<usize, SendError> {
        let (len, on_device) = (region.memory.len() as u64, region.memory.is_on_device());
        let Some(first) = range.addr.checked_sub(region.base).filter(|at| *at < len) else {
            return Ok(0);
        };
        let last = first.saturating_add(range.len.saturating_sub(1)).min(len - 1);
        let told = self.core.rma.told.regions.get(&peer);
        let kind = told.and_then(|told| told.kind_of(id));
        for lane in self.iface.lanes(peer).by_cost(range.len as usize, on_device) {
            let least = self.core.limits.alone_min.min(lane.direct_min());
            let other = kind.is_some_and(|kind| !lane.lane.has(kind));
            if other || lane.register_max == 0 || range.len < least as u64 {
                continue;
            }
            let what = (range.key, id, region);
            if let Some(granted) = self.grant_on(&lane, peer, what, (first, last))? {
                return Ok(granted);
            }
        }
        Ok(0)
    }

    /// Advertises parts on one lane. `None`: it takes none of them.
    fn grant_on(
        &mut self,
        lane: &LaneCaps,
        peer: PeerId,
        (key, id, region): (u64, u64, &keys::Region),
        (first, last): (u64, u64),
    ) -> Result<Option<usize>, SendError> {
        let (mut n, mut next, mut takes) = (0, first, false);
        while next <= last {
            let (at, memory) = part_at(&region.memory, next, lane.register_max as u64);
            next = at + memory.len() as u64;
            let (name, place) = ((id, at, lane.lane.kind()), (key, region.base.wrapping_add(at)));
            let rights = (region.remote_read, region.remote_write);
            match self.register_part((peer, lane.lane), name, place, &memory, rights) {
                Registered::Yes(_) => {
                    takes = true;
                    n += self.send_grant(peer, name)?;
                }
                Registered::Later => return Err(SendError::Again),
                Registered::No => break,
                Registered::Never => {}
            }
        }
        Ok(takes.then_some(n))
    }

    /// The transport's key of a part of a region, which is registered for the peer if it is not yet.
    fn register_part(
        &mut self,
        (peer, lane): (PeerId, LaneId),
        name: (u64, u64, u8),
        (key, base): (u64, u64),
        memory: &SegmentList,
        (reads, writes): (bool, bool),
    ) -> Registered {
        let told = &mut self.core.rma.told;
        if let Some(ToldTo { parts, .. }) = told.regions.get(&peer) {
            match parts.get(&name) {
                Some(Some(part)) => return Registered::Yes(part.registered),
                Some(None) => return Registered::Never,
                None if parts.len() >= TOLD_MAX => return Registered::No,
                None => {}
            }
        }
        let purpose = Purpose::Region { id: name.0, reads, writes };
        let registered = self.iface.register(peer, lane, memory, purpose);
        match registered {
            Registered::Yes(registered) => {
                let len = memory.len() as u64;
                let part = ToldPart { key, base, len, registered, sent: false };
                told.add(peer, name, Some(part));
            }
            Registered::Never => told.add(peer, name, None),
            Registered::Later | Registered::No => {}
        }
        registered
    }

    /// Sends the GRANT of a part, unless it was sent. Returns the number of packets.
    fn send_grant(&mut self, peer: PeerId, name: (u64, u64, u8)) -> Result<usize, SendError> {
        let told = self.core.rma.told.regions.get_mut(&peer);
        let part = told.and_then(|told| told.parts.get_mut(&name)?.as_mut());
        let Some(part) = part.filter(|part| !part.sent) else { return Ok(0) };
        let ToldPart { key, base, len, registered, .. } = *part;
        let Registration { key: remote, reads, writes, confirms: flushes } = registered;
        let packet = RmaPacket::Grant { key, base, len, reads, writes, flushes };
        let bytes = remote.as_slice();
        let pack = |at: usize, to: &mut [u8]| {
            to.iter_mut().zip(bytes.get(at..).unwrap_or(&[])).for_each(|(to, byte)| *to = *byte);
        };
        self.iface.send(peer, Mode::Bulk, packet.encode().as_slice(), bytes.len(), pack)?;
        part.sent = true;
        Ok(1)
    }

    /// Sends RETRACT for keys that have ended. Returns the number of packets.
    fn retract(&mut self) -> usize {
        let mut n = 0;
        for retracted in std::mem::take(&mut self.core.rma.told.retracted) {
            let Retracted { peer, key, base, len, .. } = retracted;
            let packet = RmaPacket::Retract { key, base, len }.encode();
            let sent = self.iface.send(peer, Mode::Short, packet.as_slice(), 0, |_, _| ());
            match sent.map_err(SendError::lasting) {
                Err(None) => self.core.rma.told.retracted.push(retracted),
                _ => n += 1,
            }
        }
        n
    }

    /// See [`OneSided::is_settled`].
    pub(crate) fn is_settled(&mut self, insists: bool) -> bool {
        self.iface.is_settled(insists)
    }

    /// No peer accesses this region directly any more, once this has returned and [`Engine::is_settled`].
    pub(crate) fn revoke(&mut self, region: u64) {
        self.core.stirred = true;
        let Self { core, iface, .. } = self;
        core.rma.told.end(region, iface);
        // Before any later message of the application, if there is room.
        self.retract();
    }
}

/// The part of a region that has the byte at `offset`, and its own offset: a part has at most `most` bytes, begins at a
/// multiple of that or at the beginning of a range, and lies in one range.
fn part_at(memory: &SegmentList, offset: u64, most: u64) -> (u64, SegmentList) {
    let (begin, end) = memory.extent(offset as usize);
    let at = (begin as u64).max(offset - offset % most);
    let end = (end as u64).min((offset - offset % most).saturating_add(most));
    (at, memory.slice(at as usize, end.saturating_sub(at) as usize))
}

impl Core {
    /// A packet was sent to `peer` that the target answers, or a fragment of an answered message.
    pub(in crate::protocol) fn note_asked(&mut self, peer: PeerId) {
        let unanswered = self.counts.unanswered();
        if let Some(channel) = self.rma.channels.get_mut(peer.index()) {
            channel.asked_at = unanswered;
        }
    }

    /// GRANT: a target advertises a part of a region. `None`: no udrv sends this.
    pub(super) fn on_grant(
        &mut self,
        peer: PeerId,
        (key, base, len): (u64, u64, u64),
        registered: Registration,
    ) -> Option<()> {
        self.rma.channel(peer).granted.insert(Part { key, base, len, registered, nth: 0 })
    }

    /// RETRACT: a target invalidates the keys of these bytes.
    pub(super) fn on_retract(&mut self, peer: PeerId, bytes: (u64, u64, u64)) {
        let channel = self.rma.channel(peer);
        let unflushed = channel.unflushed.map(|at| at.key);
        // The end of its registration flushes a region. For writes to others, a read of any byte is a flush read.
        if channel.granted.remove(bytes, unflushed) {
            channel.unflushed = channel.granted.any_byte(channel.kind);
        }
    }

    /// All direct writes to `peer` are in its memory, or it will never be known.
    pub(super) fn end_flush(&mut self, peer: PeerId) {
        let channel = self.rma.channels.get_mut(peer.index());
        if channel.is_some_and(|channel| std::mem::take(&mut channel.flushing)) {
            self.peers.count_outstanding(peer, -1);
        }
    }

    /// The memory under a key that was made for `peer` has been unmapped or replaced.
    pub(in crate::protocol) fn on_key_void(&mut self, peer: PeerId, key: &RemoteKey) {
        let Self { rma, .. } = self;
        let Some(told) = rma.told.regions.get_mut(&peer) else { return };
        told.parts.retain(|_, part| {
            let void = part.filter(|part| part.registered.key == *key);
            let sent = void.filter(|part| part.sent);
            rma.told.retracted.extend(sent.map(|part| Retracted::of(peer, &part)));
            void.is_none()
        });
    }

    /// The device has finished one segment of an operation.
    pub(in crate::protocol) fn on_access_done(
        &mut self,
        peer: PeerId,
        token: u64,
        host: &mut impl Host,
    ) {
        if token == FLUSH {
            return self.end_flush(peer);
        }
        let key = Key::from_wire(token);
        let Some(op) = self.rma.ops.get_mut(key).filter(|op| op.peer == peer && op.begun > 0)
        else {
            self.counts.dropped += 1;
            return;
        };
        op.begun -= 1;
        if op.begun > 0 {
            return;
        }
        let ends = op.state == State::Begun;
        let reaching = &mut self.rma.channel(peer).reaching;
        if reaching.front() == Some(&key) {
            reaching.pop_front();
        } else {
            reaching.retain(|other| *other != key);
        }
        if ends {
            self.end_access(key, None, host);
        }
    }

    /// A lane to `peer` was lost, and both sides' keys of it are void. Direct operations in progress on it may have been
    /// done or not: they are repeated as messages. What of them is still on its way could overwrite what another lane
    /// brings, so no operation is direct until the peer has answered one of these messages.
    pub(in crate::protocol) fn lose_reaches(&mut self, peer: PeerId, lane: LaneId) {
        self.rma.told.forget_lane(peer, lane);
        let Some(channel) = self.rma.channels.get_mut(peer.index()) else { return };
        channel.granted.forget_lane(lane);
        if !lane.has(channel.kind) {
            return;
        }
        // No message is without an answer where anything is not flushed, so each answer is one to a later message.
        channel.unsure |= !channel.is_flushed();
        // The peer ends its queue pair before it handles later packets: no write is on its way to its memory then.
        channel.unflushed = None;
        self.end_flush(peer);
        let Some(channel) = self.rma.channels.get_mut(peer.index()) else { return };
        let idle = channel.queue.is_empty();
        while let Some(key) = channel.reaching.pop_back() {
            let Some(op) = self.rma.ops.get_mut(key) else { continue };
            // An operation that is still moving is already the first of the queue.
            if op.state == State::Begun {
                channel.queue.push_front(key);
            }
            (op.state, op.begun, op.barred) = (State::Queued, 0, false);
        }
        if idle && !channel.queue.is_empty() {
            self.rma.pumping.push_back(peer);
        }
    }
}
