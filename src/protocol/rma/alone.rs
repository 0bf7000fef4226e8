//! Direct RMA (PROTOCOL.md §4.18): the target advertises parts of its regions, and the initiator moves the bytes
//! itself, or has its device move them, while these keys are valid. All other operations go by messages, where the
//! target detects errors.

use super::packet::{Prefix, RmaPacket};
use super::{Channel, RemoteRange, RemoteRanges, State};
use crate::memory::keys::{self, Right};
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::protocol::engine::{Core, Engine};
use crate::protocol::index_list::Key;
use crate::protocol::packet::Ranges;
use crate::protocol::schemes::put::OF_A_MESSAGE;
use crate::protocol::{Host, Limits};
use crate::sys::cma::Range;
use crate::sys::numbers::NumberMap;
use crate::transport::{Exposed, Exposure, Iface, Mode, PeerId, Reach, Reached, SendError, Spot};
use std::collections::BTreeMap;

/// Parts of regions that are advertised to a peer, at most.
const TOLD_MAX: usize = 1024;
/// Ranges that wait to be advertised, at most.
const OFFERS_MAX: usize = 64;
/// A target advertises after this many short reads and writes of a peer: not every peer is worth a connection.
const OFTEN: u32 = 16;
/// Writes from `alone_min` bytes on are worth direct RMA on all transports, from this fraction of it on only on some.
const WRITE_SHARE: usize = 8;
/// Bytes of one operation that are moved in one progress pass.
const TURN: usize = 4 << 20;
/// The token of a flush read. No list of operations has so many entries that one could have this token, and no read of
/// a message has it.
const FLUSH: u64 = OF_A_MESSAGE - 1;

/// A part of a region of a target.
#[derive(Debug)]
struct Part {
    key: u64,
    /// The remote address of its first byte, as operations name it.
    base: u64,
    len: u64,
    reads: bool,
    writes: bool,
    echoes: bool,
    ranges: Ranges,
    /// The transport's remote key of each range.
    keys: Option<[u32; MAX_SEGMENTS]>,
}

/// The cache of one target's remote keys, all of one epoch.
#[derive(Debug, Default)]
pub(super) struct Granted {
    epoch: u32,
    /// Sorted by key and base.
    parts: Vec<Part>,
}

impl Granted {
    fn clear(&mut self) {
        self.parts.clear();
    }

    /// The index behind all parts that begin at or before `addr` of `key`.
    fn behind(&self, key: u64, addr: u64) -> usize {
        self.parts.partition_point(|part| (part.key, part.base) <= (key, addr))
    }

    /// The part of a region that contains `addr`, and the offset in it.
    fn find(&self, key: u64, addr: u64) -> Option<(&Part, u64)> {
        let part = self.parts.get(self.behind(key, addr).checked_sub(1)?)?;
        let at = addr.checked_sub(part.base).filter(|_| part.key == key)?;
        (at < part.len).then_some((part, at))
    }

    /// Whether `remote` lies within advertised parts that allow this access. A write needs parts with flush reads: see
    /// [`Engine::flush_alone`].
    fn cover(&self, remote: &RemoteRanges, right: Right) -> bool {
        let allows = |part: &Part| match right {
            Right::Read => part.reads,
            Right::Write => part.writes && part.echoes,
            _ => false,
        };
        remote.as_slice().iter().all(|range| {
            let mut done = 0;
            while done < range.len {
                match self.find(range.key, range.addr.wrapping_add(done)) {
                    Some((part, at)) if allows(part) => done += part.len - at,
                    _ => return false,
                }
            }
            true
        })
    }

    /// The first range of the target's memory at `offset` of `remote`: at most `len` bytes.
    fn piece(&self, remote: &RemoteRanges, offset: usize, len: usize) -> Option<Spot> {
        let mut skip = offset as u64;
        for range in remote.as_slice() {
            if skip >= range.len {
                skip -= range.len;
                continue;
            }
            let len = (range.len - skip).min(len as u64);
            let (part, mut at) = self.find(range.key, range.addr.wrapping_add(skip))?;
            for (range, key) in part.ranges.as_slice().iter().zip(part.keys.unwrap_or_default()) {
                if at < range.len {
                    let (addr, len) = (range.addr.wrapping_add(at), len.min(range.len - at));
                    return Some(Spot { epoch: self.epoch, key, range: Range { addr, len } });
                }
                at -= range.len;
            }
            return None;
        }
        None
    }

    /// Adds a part, and removes those that it overlaps. `None`: there are too many.
    fn insert(&mut self, part: Part) -> Option<()> {
        let Part { key, base, len, .. } = part;
        let end = base.checked_add(len).filter(|_| len > 0)?;
        self.parts.retain(|other| {
            other.key != key || other.base >= end || other.base + other.len <= base
        });
        if self.parts.len() >= TOLD_MAX {
            return None;
        }
        let at = self.behind(key, base);
        self.parts.insert(at, part);
        Some(())
    }

    fn remove(&mut self, key: u64) {
        self.parts.retain(|part| part.key != key);
    }

    /// Whether a part of `key` has the transport key of `spot`.
    fn names(&self, key: u64, spot: &Spot) -> bool {
        let mut keys =
            self.parts.iter().filter(|part| part.key == key).filter_map(|part| part.keys);
        spot.epoch == self.epoch && keys.any(|keys| keys.contains(&spot.key))
    }

    /// A byte of any part that allows flush reads.
    fn any_byte(&self) -> Option<Spot> {
        self.parts.iter().filter(|part| part.echoes).find_map(|part| {
            let (keys, range) = (part.keys?, part.ranges.as_slice().first()?);
            let range = Range { addr: range.addr, len: 1 };
            Some(Spot { epoch: self.epoch, key: *keys.first()?, range })
        })
    }
}

/// The keys that are advertised to one peer.
#[derive(Debug, Default)]
struct ToldTo {
    epoch: Option<u32>,
    /// Short reads and writes that the peer has sent as messages.
    short: u32,
    /// By region id and part number: the region's key, or `None` for a part that cannot be advertised.
    parts: BTreeMap<(u64, u32), Option<u64>>,
}

/// The keys that are advertised to all peers.
#[derive(Debug, Default)]
pub(super) struct Told {
    regions: NumberMap<PeerId, ToldTo>,
    /// Ranges that may be worth advertising.
    pub(super) offers: Vec<(PeerId, RemoteRange)>,
    /// Keys of regions that have to be invalidated at the peer (RETRACT).
    pub(super) retracted: Vec<(PeerId, u64)>,
}

impl Told {
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.regions.remove(&peer);
        self.offers.retain(|(to, _)| *to != peer);
        self.retracted.retain(|(to, _)| *to != peer);
    }

    /// Invalidates this region at each peer that it was advertised to.
    fn retract(&mut self, region: u64) {
        for (peer, told) in &mut self.regions {
            let mut known = None;
            told.parts.retain(|(other, _), key| {
                if *other == region {
                    known = known.or(*key);
                }
                *other != region
            });
            self.retracted.extend(known.map(|key| (*peer, key)));
        }
    }

    /// Counts a short operation of `peer`. Returns true at every [`OFTEN`]th.
    pub(super) fn asks_often(&mut self, peer: PeerId) -> bool {
        let short = &mut self.regions.entry(peer).or_default().short;
        *short = short.wrapping_add(1);
        *short % OFTEN == 0
    }

    /// Notes ranges that `peer` has accessed, to advertise them to it.
    pub(super) fn offer(&mut self, peer: PeerId, remote: &RemoteRanges) {
        for range in remote.as_slice().iter().filter(|range| range.len > 0) {
            let offer = (peer, *range);
            if self.offers.len() < OFFERS_MAX && !self.offers.contains(&offer) {
                self.offers.push(offer);
            }
        }
    }
}

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

    /// The device has begun to read or write `spot`. A read is carried out after all earlier writes of the device.
    fn note_begun(&mut self, spot: &Spot, how: Reach) {
        let addr = spot.range.addr.wrapping_add(spot.range.len.saturating_sub(1));
        let last = Spot { range: Range { addr, len: 1 }, ..*spot };
        self.unflushed = (!how.reads && !how.delivered).then_some(last);
    }

    /// All messages that were sent have their answer.
    pub(super) fn is_drained(&self) -> bool {
        [self.writes, self.pulls, self.reads, self.fetches] == [0; 4]
    }
}

impl<I: Iface> Engine<I> {
    /// Whether such an operation may be direct. One that the target must be notified of may not.
    #[inline]
    pub(super) fn is_granted(
        &self,
        peer: PeerId,
        right: Right,
        remote: &RemoteRanges,
        delivered: bool,
    ) -> bool {
        let Some(channel) = self.core.rma.channels.get(peer.index()) else { return false };
        let (reads, len) = (right == Right::Read, remote.total());
        let long = len >= self.core.limits.alone_min as u64;
        let admitted = match reads {
            _ if long => true,
            true => channel.is_drained(),
            false => channel.admits_write(delivered),
        };
        if channel.granted.parts.is_empty() || !admitted {
            return false;
        }
        let Some(min) = self.iface.reach_min(peer, reads) else { return false };
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
        if let Some(spot) = channel.and_then(|channel| channel.unflushed) {
            self.begin_flush(peer, spot);
        }
    }

    #[cold]
    fn begin_flush(&mut self, peer: PeerId, spot: Spot) {
        let how = Reach { reads: false, delivered: true, stays: false, token: FLUSH };
        // If it does not begin, the next pass tries again, or the connection has ended and nothing is left to flush.
        if self.iface.reach(peer, &spot, &SegmentList::EMPTY, how) == Ok(Reached::Begun) {
            let channel = self.core.rma.channel(peer);
            (channel.unflushed, channel.flushing) = (None, true);
            self.core.peers.count_outstanding(peer, 1);
            self.iface.flush();
        }
    }

    /// Whether everything before a fence has completed, and all direct writes are in the target's memory.
    pub(in crate::protocol) fn is_fence_open(&mut self, peer: PeerId) -> bool {
        self.flush_alone(peer);
        let channel = self.core.rma.channels.get(peer.index());
        channel.is_none_or(|channel| channel.unflushed.is_none())
            && self.core.peers.of(peer).is_none_or(|peer| peer.outstanding == 0)
    }

    /// Moves bytes of the operation, which is the first of its channel.
    pub(super) fn move_alone(&mut self, key: Key, from: usize) -> Result<Moved, SendError> {
        let Some(op) = self.core.rma.ops.get_mut(key) else { return Ok(Moved::Whole) };
        let (peer, local) = (op.peer, op.local.segments());
        let (reads, stays) = (op.right == Right::Read, op.copy.is_some());
        let how = Reach { reads, delivered: op.delivered, stays, token: key.to_wire() };
        let Some(channel) = self.core.rma.channels.get_mut(peer.index()) else {
            return Ok(Moved::Nothing);
        };
        let mut offset = from;
        while !op.barred && offset < local.len() {
            op.state = State::Moving { offset };
            if offset - from >= TURN {
                return Ok(Moved::Part);
            }
            let want = (local.len() - offset).min(self.core.limits.bulk_chunk);
            let reached = match channel.granted.piece(&op.remote, offset, want) {
                Some(spot) => {
                    let len = spot.range.len as usize;
                    let part = local.slice(offset, len);
                    let reached = self.iface.reach(peer, &spot, &part, how);
                    if reached == Ok(Reached::Begun) {
                        channel.note_begun(&spot, how);
                    }
                    reached.map(|reached| (reached, len))
                }
                None => Err(SendError::Unreachable(crate::sys::Errno(libc::ESTALE))),
            };
            let moved = match reached {
                Ok((Reached::Moved(moved), _)) => moved,
                Ok((Reached::Begun, len)) => {
                    if op.begun == 0 {
                        channel.short_writes = 0;
                        channel.reaching.push_back(key);
                    }
                    op.begun += 1;
                    len
                }
                Err(SendError::Again) => return Err(SendError::Again),
                // The key may be another region's now, or void, or the buffer is not fit for direct access. The target
                // detects errors, or carries the operation out.
                Err(SendError::Unreachable(errno)) => {
                    if errno.0 != libc::EFAULT {
                        channel.granted.clear();
                    }
                    op.barred = true;
                    break;
                }
            };
            offset += moved;
            self.core.counts.reached_bytes += moved as u64;
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
        let mut n = 0;
        for (peer, key) in std::mem::take(&mut self.core.rma.told.retracted) {
            match self.send_retract(peer, key) {
                Err(SendError::Again) => self.core.rma.told.retracted.push((peer, key)),
                Ok(()) | Err(SendError::Unreachable(_)) => n += 1,
            }
        }
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
        let caps = self.iface.caps(peer);
        let (len, most) = (region.memory.len() as u64, caps.expose_max as u64);
        let rights = (region.remote_read, region.remote_write);
        let Some(first) = range.addr.checked_sub(region.base).filter(|at| *at < len) else {
            return Ok(0);
        };
        let least = caps.reach_read_min.min(caps.reach_write_min).min(self.core.limits.alone_min);
        if most == 0 || range.len < least as u64 {
            return Ok(0);
        }
        let last = first.saturating_add(range.len - 1).min(len - 1);
        let told = self.core.rma.told.regions.entry(peer).or_default();
        if told.epoch.is_some() && told.epoch != self.iface.epoch(peer) {
            *told = ToldTo::default(); // the connection ended; all is void
        }
        let mut n = 0;
        for part in first / most..=last / most {
            let told = self.core.rma.told.regions.entry(peer).or_default();
            let name = (id, part as u32);
            if told.parts.contains_key(&name) {
                continue;
            }
            if told.parts.len() >= TOLD_MAX || part > u64::from(u32::MAX) {
                break;
            }
            let at = part * most;
            let memory = region.memory.slice(at as usize, most.min(len - at) as usize);
            match self.iface.expose(peer, name, &memory, rights) {
                Exposed::Yes(exposure) => {
                    let place = (range.key, region.base.wrapping_add(at));
                    self.send_grant(peer, place, &memory, &exposure)?;
                    let told = self.core.rma.told.regions.entry(peer).or_default();
                    told.epoch = Some(exposure.epoch);
                    told.parts.insert(name, Some(range.key));
                    n += 1;
                }
                Exposed::Later => return Err(SendError::Again),
                Exposed::No => break,
                Exposed::Never => {
                    told.parts.insert(name, None);
                }
            }
        }
        Ok(n)
    }

    fn send_grant(
        &mut self,
        peer: PeerId,
        (key, base): (u64, u64),
        memory: &SegmentList,
        exposure: &Exposure,
    ) -> Result<(), SendError> {
        let ranges = Ranges::new(memory.ranges());
        let Exposure { epoch, reads, writes, echoes, ref keys } = *exposure;
        let count = ranges.as_slice().len() as u8;
        let packet = RmaPacket::Grant { key, base, epoch, reads, writes, echoes, ranges: count };
        let prefix = Prefix::of_grant(&ranges, keys.as_ref());
        let pack = |at: usize, to: &mut [u8]| prefix.pack(&SegmentList::EMPTY, at, to);
        self.iface.send(peer, Mode::Bulk, packet.encode().as_slice(), prefix.len(), pack)
    }

    fn send_retract(&mut self, peer: PeerId, key: u64) -> Result<(), SendError> {
        self.iface.send(
            peer,
            Mode::Short,
            RmaPacket::Retract { key }.encode().as_slice(),
            0,
            |_, _| (),
        )
    }

    /// See [`OneSided::is_settled`].
    pub(crate) fn is_settled(&mut self, insists: bool) -> bool {
        self.iface.is_settled(insists)
    }

    /// No peer accesses this region directly any more, once this has returned and [`Engine::is_settled`].
    pub(crate) fn revoke(&mut self, region: u64) {
        let Self { core, iface, .. } = self;
        let told = &mut core.rma.told;
        told.regions.retain(|peer, told| {
            let mut known = told.parts.range((region, 0)..=(region, u32::MAX));
            !(known.next().is_some() && iface.revoke(*peer))
        });
        told.retract(region);
        iface.conceal(region);
        // Before any later message of the application, if there is room.
        for (peer, key) in std::mem::take(&mut self.core.rma.told.retracted) {
            if self.send_retract(peer, key) == Err(SendError::Again) {
                self.core.rma.told.retracted.push((peer, key));
            }
        }
    }
}

impl Core {
    /// GRANT: a target advertises a part of a region. `None`: no udrv sends this.
    pub(super) fn on_grant(
        &mut self,
        peer: PeerId,
        (key, base): (u64, u64),
        exposure: Exposure,
        ranges: &Ranges,
    ) -> Option<()> {
        let granted = &mut self.rma.channel(peer).granted;
        let Exposure { epoch, keys, reads, writes, echoes } = exposure;
        if granted.epoch != epoch {
            granted.clear();
            granted.epoch = epoch;
        }
        let len = ranges.as_slice().iter().map(|range| range.len).sum();
        granted.insert(Part { key, base, len, reads, writes, echoes, ranges: *ranges, keys })
    }

    /// RETRACT: a target invalidates the key of a region.
    pub(super) fn on_retract(&mut self, peer: PeerId, key: u64) {
        let channel = self.rma.channel(peer);
        let ended = channel.unflushed.is_some_and(|spot| channel.granted.names(key, &spot));
        channel.granted.remove(key);
        // The end of its registration flushes a region. For writes to others, a read of any byte is a flush read.
        if ended {
            channel.unflushed = channel.granted.any_byte();
        }
    }

    /// All direct writes to `peer` are in its memory, or it will never be known.
    pub(super) fn end_flush(&mut self, peer: PeerId) {
        let channel = self.rma.channels.get_mut(peer.index());
        if channel.is_some_and(|channel| std::mem::take(&mut channel.flushing)) {
            self.peers.count_outstanding(peer, -1);
        }
    }

    /// The memory of a region of this endpoint has been unmapped or replaced: its keys are void.
    pub(in crate::protocol) fn on_concealed(&mut self, region: u64) {
        self.rma.told.retract(region);
    }

    /// The device has finished one segment of an operation.
    pub(in crate::protocol) fn on_reached(
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

    /// The connection to `peer` ended, and both sides' keys are void. Direct operations in progress may have been done
    /// or not: they are repeated as messages.
    pub(in crate::protocol) fn lose_reaches(&mut self, peer: PeerId) {
        self.rma.told.forget(peer);
        // The peer ends its queue pair before it handles later packets: no write is on its way to its memory then.
        self.end_flush(peer);
        let Some(channel) = self.rma.channels.get_mut(peer.index()) else { return };
        channel.unflushed = None;
        channel.granted.clear();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn part(key: u64, base: u64, len: u64) -> Part {
        let ranges = Ranges::NONE;
        Part { key, base, len, reads: true, writes: true, echoes: true, ranges, keys: None }
    }

    #[test]
    fn what_a_target_tells_is_bounded() {
        let mut granted = Granted::default();
        for key in 0..3 * TOLD_MAX as u64 {
            assert!(
                granted.insert(part(key, 0, 0)).is_none()
                    && granted.insert(part(key, 9, u64::MAX)).is_none()
            );
            assert_eq!(granted.insert(part(key, 0, 10)).is_some(), key < TOLD_MAX as u64);
        }
        assert_eq!(granted.parts.len(), TOLD_MAX);
        // A part that replaces another does not add to their number.
        assert!(
            granted.insert(part(5, 3, 10)).is_some() && granted.insert(part(5, 20, 10)).is_none()
        );
        assert_eq!(granted.find(5, 2).map(|_| ()), None);
        assert_eq!(granted.find(5, 12).map(|(_, at)| at), Some(9));
        granted.remove(5);
        assert_eq!(granted.parts.len(), TOLD_MAX - 1);
    }

    #[test]
    fn a_part_takes_the_place_of_those_that_it_overlaps() {
        let mut granted = Granted::default();
        for base in [0, 20, 40, 60] {
            granted.insert(part(7, base, 10)).unwrap();
            granted.insert(part(8, base, 10)).unwrap();
        }
        granted.insert(part(7, 29, 12)).unwrap();
        let bases: Vec<_> =
            granted.parts.iter().filter(|part| part.key == 7).map(|part| part.base).collect();
        assert_eq!(bases, [0, 29, 60]);
        assert_eq!(granted.parts.len(), 7);
        let place = |addr| granted.find(7, addr).map(|(_, at)| at);
        assert_eq!(
            [9, 10, 28, 29, 40, 41].map(place),
            [Some(9), None, None, Some(0), Some(11), None]
        );
    }
}
