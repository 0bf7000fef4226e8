//! The memory regions that peers may access: their keys, and the rights that each grants.
//!
//! A region is looked up again for every chunk that is moved, under the lock that closing it takes too. So no peer
//! accesses it once it is closed.

use super::SegmentList;
use crate::sys::numbers::NumberMap;
use crate::sys::process;

/// The kind of access that a peer requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Right {
    Read,
    Write,
    /// An atomic operation that changes the memory.
    Update,
    /// An atomic operation that changes the memory and fetches the old values.
    Exchange,
    /// An atomic operation that only fetches the values.
    Fetch,
}

impl Right {
    /// Whether the region must grant the right to read.
    pub(crate) fn reads(self) -> bool {
        matches!(self, Self::Read | Self::Exchange | Self::Fetch)
    }

    /// Whether the region must grant the right to write.
    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Update | Self::Exchange)
    }

    pub(crate) fn is_atomic(self) -> bool {
        matches!(self, Self::Update | Self::Exchange | Self::Fetch)
    }
}

/// Why an access is denied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Denied {
    /// No region has the key, or its region was closed.
    Key,
    /// The access goes beyond the region, or the region does not grant this right.
    Access,
    /// The region's device has failed.
    Device,
}

/// One memory region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    /// Borrowed from the application until the region is removed.
    pub(crate) memory: SegmentList,
    /// The remote address of its first byte: 0, or its virtual address.
    pub(crate) base: u64,
    pub(crate) remote_read: bool,
    pub(crate) remote_write: bool,
}

/// A part of a region that a peer may access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) memory: SegmentList,
    /// The id of the region, which is never reused.
    pub(crate) id: u64,
    /// There may be no memory at some of the addresses: [`SegmentList::has_holes`].
    pub(crate) holes: bool,
}

/// All memory regions of a domain.
#[derive(Debug, Default)]
pub(crate) struct RegionTable {
    /// By key: chosen by the application or by this provider.
    regions: NumberMap<u64, (u64, Region)>,
    last_id: u64,
}

/// FI_KEY_NOTAVAIL.
const KEY_NOTAVAIL: u64 = u64::MAX;

impl RegionTable {
    /// A key that no region of this table has: 64 random bits from the kernel. A peer cannot guess it, and the key of a
    /// closed region is given again with probability 2^-64 only.
    pub(crate) fn new_key(&self) -> u64 {
        self.first_free(process::random_u64)
    }

    /// The first value of `draw` that may be a key.
    fn first_free(&self, mut draw: impl FnMut() -> u64) -> u64 {
        loop {
            let key = draw();
            // Key 0 leaves the choice to the provider, and KEY_NOTAVAIL means "no key" (fi_mr(3)).
            if key != 0 && key != KEY_NOTAVAIL && !self.regions.contains_key(&key) {
                return key;
            }
        }
    }

    /// A new id for a region that peers cannot access, and that is not in this table.
    pub(crate) fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Adds a region and returns its id. `None`: the key is in use.
    pub(crate) fn insert(&mut self, key: u64, region: Region) -> Option<u64> {
        if self.regions.contains_key(&key) {
            return None;
        }
        let id = self.new_id();
        self.regions.insert(key, (id, region));
        Some(id)
    }

    /// Removes a region: from now on no peer can access it.
    pub(crate) fn remove(&mut self, key: u64) {
        self.regions.remove(&key);
    }

    /// The id of each region.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u64> {
        self.regions.values().map(|(id, _)| *id)
    }

    /// The id and the description of a region.
    pub(crate) fn whole(&self, key: u64) -> Option<(u64, Region)> {
        self.regions.get(&key).copied()
    }

    /// The memory of `len` bytes at `addr` of the region `key`. An access of no bytes needs no key, and has no memory.
    pub(crate) fn find(
        &self,
        key: u64,
        addr: u64,
        len: u64,
        right: Right,
    ) -> Result<Granted, Denied> {
        if len == 0 {
            return Ok(Granted { memory: SegmentList::EMPTY, id: 0, holes: false });
        }
        let (id, region) = self.regions.get(&key).ok_or(Denied::Key)?;
        let granted =
            (region.remote_read || !right.reads()) && (region.remote_write || !right.writes());
        let all = region.memory.len() as u64;
        let offset = addr.checked_sub(region.base).filter(|offset| *offset <= all);
        let offset =
            offset.filter(|offset| granted && len <= all - *offset).ok_or(Denied::Access)?;
        let memory = region.memory.slice(offset as usize, len as usize);
        Ok(Granted { memory, id: *id, holes: region.memory.has_holes() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(
        parts: &[(usize, usize)],
        base: u64,
        remote_read: bool,
        remote_write: bool,
    ) -> Region {
        let parts: Vec<_> =
            parts.iter().map(|(at, len)| (std::ptr::without_provenance(*at), *len)).collect();
        #[allow(unsafe_code)]
        // SAFETY: nothing is copied.
        let memory = unsafe { SegmentList::gather(&parts).unwrap() };
        Region { memory, base, remote_read, remote_write }
    }

    #[test]
    fn a_key_has_one_region_and_a_region_one_id() {
        let mut table = RegionTable::default();
        let all = region(&[(4096, 10)], 0, true, true);
        let first = table.insert(7, all).unwrap();
        assert_eq!(table.insert(7, all), None);
        assert_eq!(table.find(7, 0, 10, Right::Read).unwrap().id, first);
        table.remove(7);
        assert_eq!(table.find(7, 0, 10, Right::Read).unwrap_err(), Denied::Key);
        assert_ne!(table.insert(7, all).unwrap(), first);
        assert_eq!(table.find(8, 0, 1, Right::Read).unwrap_err(), Denied::Key);
        assert!(table.find(8, 0, 0, Right::Read).is_ok(), "no bytes need no key");
    }

    #[test]
    fn chosen_keys_avoid_those_in_use_and_those_that_mean_something_else() {
        let mut table = RegionTable::default();
        table.insert(7, region(&[(4096, 1)], 0, true, true)).unwrap();
        let mut drawn = [0, u64::MAX, 7, 7, 9, 11].into_iter();
        assert_eq!(table.first_free(|| drawn.next().unwrap()), 9);
        assert_eq!(drawn.next(), Some(11));
    }

    #[test]
    fn chosen_keys_are_not_to_be_guessed() {
        const KEYS: u32 = 2000;
        let table = RegionTable::default();
        let keys: std::collections::HashSet<u64> = (0..KEYS).map(|_| table.new_key()).collect();
        assert_eq!(keys.len(), KEYS as usize);
        for bit in 0..64 {
            let set = keys.iter().filter(|key| *key >> bit & 1 == 1).count();
            // The standard deviation of such a count is 22: one of 200 does not occur.
            assert!((800..1200).contains(&set), "bit {bit} is set in {set} of {KEYS}");
        }
    }

    #[test]
    fn rights_are_those_granted() {
        for (read, write) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut table = RegionTable::default();
            table.insert(1, region(&[(4096, 8)], 4096, read, write)).unwrap();
            assert_eq!(table.find(1, 4096, 8, Right::Read).is_ok(), read);
            assert_eq!(table.find(1, 4096, 8, Right::Write).is_ok(), write);
            assert_eq!(table.find(1, 4096, 8, Right::Fetch).is_ok(), read);
            assert_eq!(table.find(1, 4096, 8, Right::Update).is_ok(), write);
            assert_eq!(table.find(1, 4096, 8, Right::Exchange).is_ok(), read && write);
        }
    }

    proptest! {
        #[test]
        fn what_is_granted_lies_within(
            base in prop_oneof![Just(0), Just(4096), any::<u64>()],
            addr in prop_oneof![0..64u64, any::<u64>()],
            from_base in any::<bool>(),
            len in prop_oneof![0..64u64, any::<u64>()],
        ) {
            let mut table = RegionTable::default();
            table.insert(1, region(&[(4096, 10), (9000, 20)], base, true, true)).unwrap();
            let addr = if from_base { base.wrapping_add(addr) } else { addr };
            let offset = u128::from(addr) as i128 - u128::from(base) as i128;
            let fits = offset >= 0 && offset + u128::from(len) as i128 <= 30;
            match table.find(1, addr, len, Right::Write) {
                Ok(granted) => {
                    prop_assert!(fits || len == 0);
                    prop_assert_eq!(granted.memory.len() as u64, len);
                    let (ranges, n) = granted.memory.ranges();
                    for range in &ranges[..n] {
                        let end = range.addr + range.len;
                        prop_assert!(range.addr >= 4096 && end <= 4106 || range.addr >= 9000 && end <= 9020);
                    }
                }
                Err(denied) => prop_assert!(!fits && denied == Denied::Access),
            }
        }
    }
}
