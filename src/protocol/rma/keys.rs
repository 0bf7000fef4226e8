//! Keys of regions for direct RMA: those that targets have told this endpoint, and those that it has told its peers.

use super::ranges::{RemoteRange, RemoteRanges};
use crate::memory::keys::Right;
use crate::sys::numbers::{NumberMap, NumberSet};
use crate::transport::{Iface, LaneId, PeerId, Registration, Remote, RemoteKey};
use std::collections::BTreeMap;

/// Parts of regions that are advertised to a peer, at most.
pub(super) const TOLD_MAX: usize = 1024;

/// Ranges that wait to be advertised, at most.
pub(super) const OFFERS_MAX: usize = 64;

/// A target advertises after this many short reads and writes of a peer: not every peer is worth a connection.
pub(super) const OFTEN: u32 = 16;

/// A part of a region of a target: one range under one key.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) key: u64,
    /// The remote address of its first byte, as operations name it.
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) registered: Registration,
    /// How many were added to the cache before it: [`Granted::insert`] sets this.
    pub(super) nth: u64,
}

impl Part {
    /// Whether it has bytes of these `len` of region `key` from `base` on.
    pub(super) fn overlaps(&self, key: u64, base: u64, len: u64) -> bool {
        self.key == key && self.base < base.saturating_add(len) && base < self.base + self.len
    }
}

/// The cache of one target's remote keys.
#[derive(Debug, Default)]
pub(super) struct Granted {
    /// Sorted by key and base.
    pub(super) parts: Vec<Part>,
    /// Parts added so far.
    added: u64,
}

impl Granted {
    /// The index behind all parts that begin at or before `addr` of `key`.
    pub(super) fn behind(&self, key: u64, addr: u64) -> usize {
        self.parts.partition_point(|part| (part.key, part.base) <= (key, addr))
    }

    /// The part of a region that contains `addr`, and the offset in it.
    pub(super) fn find(&self, key: u64, addr: u64) -> Option<(&Part, u64)> {
        let part = self.parts.get(self.behind(key, addr).checked_sub(1)?)?;
        let at = addr.checked_sub(part.base).filter(|_| part.key == key)?;
        (at < part.len).then_some((part, at))
    }

    /// Whether `remote` lies within advertised parts that allow this access. A write needs parts with flush reads: see
    /// [`Engine::flush_alone`].
    pub(super) fn cover(&self, remote: &RemoteRanges, right: Right) -> bool {
        let allows = |part: &Part| match right {
            Right::Read => part.registered.reads,
            Right::Write => part.registered.writes && part.registered.confirms,
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

    /// Where `offset` of `remote` is, and for how many bytes: at most `len`.
    pub(super) fn piece(
        &self,
        remote: &RemoteRanges,
        offset: usize,
        len: usize,
    ) -> Option<(Remote, usize)> {
        let mut skip = offset as u64;
        for range in remote.as_slice() {
            if skip >= range.len {
                skip -= range.len;
                continue;
            }
            let (part, at) = self.find(range.key, range.addr.wrapping_add(skip))?;
            let len = (range.len - skip).min(part.len - at).min(len as u64);
            return Some((Remote { key: part.registered.key, offset: at }, len as usize));
        }
        None
    }

    /// Adds a part, and removes those that it overlaps. `None`: it has no bytes, or more than there can be.
    ///
    /// A target remembers as many parts as this cache holds, so one of a full cache is void. It is the oldest: a
    /// target that sends no RETRACT voids all parts at once, and advertises them anew.
    pub(super) fn insert(&mut self, part: Part) -> Option<()> {
        let Part { key, base, len, .. } = part;
        base.checked_add(len).filter(|_| len > 0)?;
        self.parts.retain(|other| !other.overlaps(key, base, len));
        if self.parts.len() >= TOLD_MAX {
            self.forget_oldest();
        }
        let at = self.behind(key, base);
        self.parts.insert(at, Part { nth: self.added, ..part });
        self.added += 1;
        Some(())
    }

    #[cold]
    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.parts.iter().map(|part| part.nth).min() {
            self.parts.retain(|part| part.nth != oldest);
        }
    }

    /// Removes the parts under a transport's key.
    pub(super) fn forget(&mut self, key: &RemoteKey) {
        self.parts.retain(|part| part.registered.key != *key);
    }

    /// Removes the parts whose keys were made on this lane.
    pub(super) fn forget_lane(&mut self, lane: LaneId) {
        self.parts.retain(|part| !lane.made(&part.registered.key));
    }

    /// Removes the parts with any of these bytes. Returns whether `key` was the transport's key of one of them.
    pub(super) fn remove(
        &mut self,
        (region, base, len): (u64, u64, u64),
        key: Option<RemoteKey>,
    ) -> bool {
        let mut had = false;
        self.parts.retain(|part| {
            let ends = part.overlaps(region, base, len);
            had |= ends && Some(part.registered.key) == key;
            !ends
        });
        had
    }

    /// A byte of any part that allows flush reads and has a key of this kind.
    pub(super) fn any_byte(&self, kind: u8) -> Option<Remote> {
        let fits = |part: &&Part| part.registered.confirms && part.registered.key.kind() == kind;
        let part = self.parts.iter().find(fits)?;
        Some(Remote { key: part.registered.key, offset: 0 })
    }
}

/// A part of a region that is advertised to a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ToldPart {
    /// The region's key, and where the part is, as GRANT says.
    pub(super) key: u64,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) registered: Registration,
    /// GRANT was sent.
    pub(super) sent: bool,
}

/// The keys that are advertised to one peer.
#[derive(Debug, Default)]
pub(super) struct ToldTo {
    /// Short reads and writes that the peer has sent as messages.
    pub(super) short: u32,
    /// By region id, offset and kind of the lane; `None`: a part that cannot be advertised on this lane.
    pub(super) parts: BTreeMap<(u64, u64, u8), Option<ToldPart>>,
}

impl ToldTo {
    /// The kind of the lane that a region is advertised on. It is one lane, so that a byte has one key.
    pub(super) fn kind_of(&self, region: u64) -> Option<u8> {
        let parts = self.parts.range((region, 0, 0)..=(region, u64::MAX, u8::MAX));
        parts.into_iter().find(|(_, part)| part.is_some()).map(|((.., kind), _)| *kind)
    }

    /// Takes out the parts of a region.
    pub(super) fn take(&mut self, region: u64) -> Vec<ToldPart> {
        let parts = self.parts.range((region, 0, 0)..=(region, u64::MAX, u8::MAX));
        let names: Vec<_> = parts.map(|(name, _)| *name).collect();
        names.iter().filter_map(|name| self.parts.remove(name)?).collect()
    }

    /// The transport has voided all keys of this kind.
    pub(super) fn forget(&mut self, kind: u8) {
        self.parts.retain(|_, part| part.is_none_or(|part| part.registered.key.kind() != kind));
    }
}

/// The bytes of a region whose keys are to be invalidated at a peer (RETRACT).
#[derive(Clone, Copy, Debug)]
pub(super) struct Retracted {
    pub(super) peer: PeerId,
    pub(super) key: u64,
    pub(super) base: u64,
    pub(super) len: u64,
    /// The kind of the transport's key.
    kind: u8,
}

impl Retracted {
    pub(super) fn peer(&self) -> PeerId {
        self.peer
    }

    pub(super) fn of(peer: PeerId, part: &ToldPart) -> Self {
        let ToldPart { key, base, len, .. } = *part;
        Self { peer, key, base, len, kind: part.registered.key.kind() }
    }
}

/// The keys that are advertised to all peers.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) regions: NumberMap<PeerId, ToldTo>,
    /// By region id: the peers that may have parts of it in `regions`.
    holders: NumberMap<u64, NumberSet<PeerId>>,
    /// Ranges that may be worth advertising.
    pub(super) offers: Vec<(PeerId, RemoteRange)>,
    pub(super) retracted: Vec<Retracted>,
}

impl Told {
    /// Notes a part of a region (its id, offset and lane) that is advertised to `peer`, or cannot be.
    pub(super) fn add(&mut self, peer: PeerId, name: (u64, u64, u8), part: Option<ToldPart>) {
        self.regions.entry(peer).or_default().parts.insert(name, part);
        self.holders.entry(name.0).or_default().insert(peer);
    }

    pub(super) fn forget(&mut self, peer: PeerId) {
        let told = self.regions.remove(&peer).unwrap_or_default();
        for (region, ..) in told.parts.keys() {
            if let Some(holders) = self.holders.get_mut(region) {
                holders.remove(&peer);
            }
        }
        self.offers.retain(|(to, _)| *to != peer);
        self.retracted.retain(|retracted| retracted.peer != peer);
    }

    /// A lane to `peer` was lost, and its keys are void.
    pub(super) fn forget_lane(&mut self, peer: PeerId, lane: LaneId) {
        if let Some(told) = self.regions.get_mut(&peer) {
            told.short = 0;
            told.parts.retain(|(.., kind), _| !lane.has(*kind));
        }
        self.offers.retain(|(to, _)| *to != peer);
        self.retracted.retain(|retracted| retracted.peer != peer || !lane.has(retracted.kind));
    }

    /// The region ends: invalidates its keys. Peers that do not find that out by themselves are told.
    pub(super) fn end(&mut self, region: u64, iface: &mut impl Iface) {
        for peer in self.holders.remove(&region).unwrap_or_default() {
            let Some(told) = self.regions.get_mut(&peer) else { continue };
            let mut void = None;
            for part in told.take(region) {
                let key = &part.registered.key;
                if void == Some(key.kind()) {
                    continue;
                }
                if iface.invalidate(peer, key) {
                    void = Some(key.kind());
                    told.forget(key.kind());
                } else if part.sent {
                    self.retracted.push(Retracted::of(peer, &part));
                }
            }
        }
    }

    /// Counts a short operation of `len` bytes of `peer`. Returns true at every [`OFTEN`]th, or at the next one that has
    /// `least` bytes. `least` is asked for then only, because that costs; `None`: no short operation is long enough.
    pub(super) fn asks_often(
        &mut self,
        peer: PeerId,
        len: u64,
        least: impl FnOnce() -> Option<u64>,
    ) -> bool {
        let short = &mut self.regions.entry(peer).or_default().short;
        *short = short.saturating_add(1);
        if *short < OFTEN {
            return false;
        }
        let least = least();
        if least.is_none_or(|least| len >= least) {
            *short = 0;
        }
        least.is_some_and(|least| len >= least)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn part(key: u64, base: u64, len: u64) -> Part {
        let (remote, reads) = (RemoteKey::new(1).with(key).with(base), true);
        let registered = Registration { key: remote, reads, writes: true, confirms: true };
        Part { key, base, len, registered, nth: 0 }
    }

    #[test]
    fn at_most_told_max_keys_of_a_target_are_kept() {
        let mut granted = Granted::default();
        for key in 0..3 * TOLD_MAX as u64 {
            assert!(
                granted.insert(part(key, 0, 0)).is_none()
                    && granted.insert(part(key, 9, u64::MAX)).is_none()
            );
            assert!(granted.insert(part(key, 0, 10)).is_some());
            assert_eq!(granted.parts.len(), TOLD_MAX.min(key as usize + 1));
        }
        // A part that replaces another does not add to their number.
        let last = 3 * TOLD_MAX as u64 - 1;
        assert!(granted.insert(part(last, 3, 10)).is_some());
        assert_eq!(granted.parts.len(), TOLD_MAX);
        assert_eq!(granted.find(last, 2).map(|_| ()), None);
        assert_eq!(granted.find(last, 12).map(|(_, at)| at), Some(9));
        assert!(granted.remove((last, 0, 100), Some(part(last, 3, 10).registered.key)));
        assert_eq!(granted.parts.len(), TOLD_MAX - 1);
    }

    #[test]
    fn the_oldest_part_makes_room_for_another() {
        let mut granted = Granted::default();
        let most = TOLD_MAX as u64;
        // Descending keys: the order of the parts is not that of their age.
        for key in (0..most).rev() {
            granted.insert(part(key, 0, 10)).unwrap();
        }
        // The target has advertised this one again.
        granted.insert(part(most - 1, 0, 10)).unwrap();
        for key in [most, most + 1] {
            assert!(granted.insert(part(key, 0, 10)).is_some(), "direct RMA goes on");
        }
        let known = |key| granted.find(key, 0).is_some();
        assert_eq!([most + 1, most, most - 1].map(known), [true; 3]);
        assert_eq!([most - 2, most - 3, most - 4].map(known), [false, false, true]);
    }

    #[test]
    fn every_16th_short_operation_asks_for_a_key() {
        let (mut told, asked) = (Told::default(), std::cell::Cell::new(0));
        let mut count = |len, least: Option<u64>| {
            let ask = || {
                asked.set(asked.get() + 1);
                least
            };
            (0..3 * OFTEN).filter(|_| told.asks_often(PeerId(0), len, ask)).count()
        };
        assert_eq!((count(64, Some(64)), asked.take()), (3, 3));
        assert_eq!((count(64, None), asked.take()), (0, 3), "no lane is for short ones");
        assert_eq!(count(8, Some(64)), 0);
        assert_eq!(count(64, Some(64)), 3, "the first that is long enough is not missed");
    }

    #[test]
    fn the_parts_of_a_region_are_taken_from_the_peers_that_have_them() {
        let mut told = Told::default();
        let Part { registered, .. } = part(0, 0, 1);
        let new = |key| ToldPart { key, base: 0, len: 1, registered, sent: true };
        for peer in 0..100 {
            told.add(PeerId(peer), (1000 + u64::from(peer), 0, 1), Some(new(7)));
        }
        for (peer, at) in [(3, 0), (3, 5), (5, 0), (7, 0)] {
            told.add(PeerId(peer), (1, at, 1), Some(new(at)));
        }
        told.add(PeerId(9), (1, 0, 1), None);
        told.forget(PeerId(5));
        let mut holders: Vec<_> = told.holders[&1].iter().copied().collect();
        holders.sort();
        assert_eq!(holders, [3, 7, 9].map(PeerId));
        assert!(told.holders[&1005].is_empty());
        let of_3 = told.regions.get_mut(&PeerId(3)).unwrap();
        assert_eq!(of_3.take(1).iter().map(|part| part.key).collect::<Vec<_>>(), [0, 5]);
        assert_eq!((of_3.take(1).len(), of_3.parts.len()), (0, 1));
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
