//! One-sided operations that the initiator carries out alone (PROTOCOL.md §4.18): a target tells
//! where its regions are, and the initiator moves bytes itself while what it was told is valid.
//! Whatever is not plain goes the other way, where the target decides.

use super::packet::{Prefix, RmaPacket};
use super::{MAX_RANGES, Op, RemoteRanges, Rma, State};
use crate::memory::MAX_SEGMENTS;
use crate::memory::keys::Right;
use crate::protocol::Host;
use crate::protocol::engine::{Core, Engine};
use crate::protocol::index_list::Key;
use crate::protocol::packet::Ranges;
use crate::sys::cma::Range;
use crate::transport::{Iface, PeerId, SendError, slice_ranges};
use std::collections::{HashMap, HashSet};

/// Regions that a peer is told of.
const TOLD_MAX: usize = 1024;
/// Regions that wait to be told.
const OFFERS_MAX: usize = 64;
/// Bytes of one operation that are moved in one turn.
const TURN: usize = 4 << 20;

/// A region of a target.
#[derive(Debug)]
struct Region {
    /// What we call its first byte.
    base: u64,
    len: u64,
    reads: bool,
    writes: bool,
    ranges: Ranges,
}

/// What one target has told us, all of it at one time.
#[derive(Debug, Default)]
pub(super) struct Granted {
    epoch: u32,
    regions: HashMap<u64, Region>,
}

impl Granted {
    /// Where `len` bytes of a region are, from `addr` on.
    fn find(&self, key: u64, addr: u64, len: u64) -> Option<(&Region, u64)> {
        let region = self.regions.get(&key)?;
        let offset = addr.checked_sub(region.base).filter(|offset| *offset <= region.len)?;
        (len <= region.len - offset).then_some((region, offset))
    }

    /// Whether all of `remote` can be reached for this.
    fn cover(&self, remote: &RemoteRanges, right: Right) -> bool {
        remote.as_slice().iter().filter(|range| range.len > 0).all(|range| {
            let found = self.find(range.key, range.addr, range.len);
            found.is_some_and(|(region, _)| match right {
                Right::Read => region.reads,
                Right::Write => region.writes,
                _ => false,
            })
        })
    }

    /// At most `len` bytes from `offset` of `remote` on, of one range: how many, and where they are.
    fn piece(&self, remote: &RemoteRanges, offset: usize, len: usize) -> Option<(usize, Ranges)> {
        let mut skip = offset as u64;
        for range in remote.as_slice() {
            if skip >= range.len {
                skip -= range.len;
                continue;
            }
            let len = (range.len - skip).min(len as u64);
            let (region, at) = self.find(range.key, range.addr.wrapping_add(skip), len)?;
            let mut out = [Range::default(); MAX_SEGMENTS];
            let count = slice_ranges(region.ranges.as_slice(), at, len, &mut out);
            return Some((len as usize, Ranges::new((out, count))));
        }
        None
    }
}

/// What we have told our peers: regions, by their ids.
#[derive(Debug, Default)]
pub(super) struct Told {
    regions: HashMap<PeerId, HashSet<u64>>,
    /// Keys that peers may be told of.
    pub(super) offers: Vec<(PeerId, u64)>,
}

impl Told {
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.regions.remove(&peer);
        self.offers.retain(|(to, _)| *to != peer);
    }

    fn knows(&self, peer: PeerId, region: u64) -> bool {
        self.regions.get(&peer).is_some_and(|told| told.contains(&region))
    }

    /// `peer` has used these regions, and may want to do so alone.
    pub(super) fn offer(&mut self, peer: PeerId, remote: &RemoteRanges, ids: &[u64; MAX_RANGES]) {
        for (range, id) in remote.as_slice().iter().zip(ids).filter(|(range, _)| range.len > 0) {
            let offer = (peer, range.key);
            let full = self.offers.len() >= OFFERS_MAX;
            if !full && !self.knows(peer, *id) && !self.offers.contains(&offer) {
                self.offers.push(offer);
            }
        }
    }
}

/// How far an operation has come.
pub(super) enum Moved {
    /// All of it.
    Whole,
    /// The rest in another turn.
    Part,
    /// It has to go the other way.
    Nothing,
}

impl Rma {
    /// Nothing to `peer` has left that is not answered.
    pub(super) fn is_drained(&mut self, peer: PeerId) -> bool {
        let channel = self.channel(peer);
        [channel.writes, channel.pulls, channel.reads, channel.fetches] == [0; 4]
    }
}

impl<I: Iface> Engine<I> {
    /// Whether we can carry out such an operation ourselves. What the target has to hear of it cannot.
    #[inline]
    pub(super) fn is_granted(
        &self,
        peer: PeerId,
        right: Right,
        remote: &RemoteRanges,
        data: Option<u64>,
    ) -> bool {
        let long = remote.total() >= self.core.limits.alone_min as u64;
        let granted = self.core.rma.channels.get(peer.index()).map(|channel| &channel.granted);
        long && data.is_none() && granted.is_some_and(|granted| granted.cover(remote, right)) && {
            let caps = self.iface.caps(peer);
            if right == Right::Read { caps.get } else { caps.put }
        }
    }

    /// Moves bytes of the operation, which is the first of its channel.
    pub(super) fn move_alone(&mut self, key: Key, from: usize) -> Result<Moved, SendError> {
        let Some(Op { peer, right, local, remote, state, .. }) = self.core.rma.ops.get_mut(key)
        else {
            return Ok(Moved::Whole);
        };
        let (peer, reads, local) = (*peer, *right == Right::Read, local.segments());
        let Some(channel) = self.core.rma.channels.get_mut(peer.index()) else {
            return Ok(Moved::Nothing);
        };
        let (granted, mut offset) = (&mut channel.granted, from);
        while offset < local.len() {
            *state = State::Moving { offset };
            if offset - from >= TURN {
                return Ok(Moved::Part);
            }
            let want = (local.len() - offset).min(self.core.limits.bulk_chunk);
            let piece = granted.piece(remote, offset, want);
            let moved = match piece {
                Some((len, ranges)) => {
                    let part = local.slice(offset, len);
                    self.iface.reach(peer, granted.epoch, reads, &part, ranges.as_slice())
                }
                None => Err(SendError::Unreachable(crate::sys::Errno(libc::ESTALE))),
            };
            match moved {
                Ok(moved) => {
                    offset += moved;
                    self.core.counts.reached_bytes += moved as u64;
                }
                Err(SendError::Again) => return Err(SendError::Again),
                // Another region may have the key, or none: the target says what is wrong.
                Err(SendError::Unreachable(_)) => {
                    granted.regions.clear();
                    *state = State::Queued;
                    return Ok(Moved::Nothing);
                }
            }
        }
        Ok(Moved::Whole)
    }

    /// Tells peers of regions, unless somebody here wants to hear of what is done to them.
    pub(super) fn grant(&mut self, host: &impl Host) -> usize {
        let mut n = 0;
        for (peer, key) in std::mem::take(&mut self.core.rma.told.offers) {
            let Some((id, region)) = host.offer(key) else { continue };
            let told = self.core.rma.told.regions.entry(peer).or_default();
            if told.contains(&id) || told.len() >= TOLD_MAX {
                continue;
            }
            let Some(epoch) = self.iface.epoch(peer) else { continue };
            let ranges = Ranges::new(region.memory.ranges());
            let packet = RmaPacket::Grant {
                key,
                base: region.base,
                epoch,
                reads: region.remote_read,
                writes: region.remote_write,
                ranges: ranges.as_slice().len() as u8,
            };
            let (header, prefix) = (packet.encode(), Prefix::new(&RemoteRanges::NONE, &ranges));
            let none = crate::memory::SegmentList::EMPTY;
            let pack = |at: usize, to: &mut [u8]| prefix.pack(&none, at, to);
            match self.iface.am_short(peer, header.as_slice(), prefix.len(), pack) {
                Ok(()) => {
                    told.insert(id);
                    n += 1;
                }
                Err(SendError::Again) => self.core.rma.told.offers.push((peer, key)),
                Err(SendError::Unreachable(_)) => {}
            }
        }
        n
    }

    /// Nobody reaches this region by itself any more, once this returns.
    pub(crate) fn revoke(&mut self, region: u64) {
        let Self { core, iface, .. } = self;
        core.rma.told.regions.retain(|peer, told| {
            let known = told.contains(&region);
            if known {
                iface.revoke(*peer);
            }
            !known
        });
    }
}

impl Core {
    /// A target tells where a region is. `None`: nobody sends this.
    pub(super) fn on_grant(
        &mut self,
        peer: PeerId,
        (key, base): (u64, u64),
        epoch: u32,
        (reads, writes): (bool, bool),
        ranges: &Ranges,
    ) -> Option<()> {
        let granted = &mut self.rma.channel(peer).granted;
        if granted.epoch != epoch {
            granted.regions.clear();
            granted.epoch = epoch;
        }
        let len = ranges.as_slice().iter().map(|range| range.len).sum();
        if granted.regions.len() >= TOLD_MAX && !granted.regions.contains_key(&key) {
            return None;
        }
        granted.regions.insert(key, Region { base, len, reads, writes, ranges: *ranges });
        Some(())
    }
}
