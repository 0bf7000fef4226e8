//! A hash table from addresses to entries that stores only the entries' numbers: four bytes a slot, and at most three
//! slots of four in use.
//!
//! It uses linear probing. A number needs only as many bits as the table's size; the other bits of its slot hold bits
//! of the hash, so that nearly every entry that is compared is the right one. Removal closes the gap, so there are no
//! tombstones.

#![forbid(unsafe_code)]

/// Entry numbers, found by the hash of a key. The caller keeps and compares the keys.
#[derive(Debug, Default)]
pub(crate) struct AddressIndex {
    /// 0: empty. Otherwise the entry's number plus one in the lower bits, as many as a slot index has,
    /// and bits of the hash above them. The length is a power of two, or 0.
    slots: Vec<u32>,
}

/// Most entries of a table: beyond this no bit of a slot would be left for the hash.
const ENTRIES_MAX: usize = 1 << 30;
/// Slots of the smallest table.
const SLOTS_MIN: usize = 16;

impl AddressIndex {
    /// Makes room for entries with numbers below `entries`; `hash_of` gives the hash of an entry in the
    /// table. False if memory is short, or for more than 2^30 entries.
    pub(crate) fn reserve(&mut self, entries: usize, hash_of: impl Fn(u32) -> u64) -> bool {
        if entries <= self.slots.len() / 4 * 3 {
            return true;
        }
        if entries > ENTRIES_MAX {
            return false;
        }
        let len = (entries.div_ceil(3) * 4).next_power_of_two().max(SLOTS_MIN);
        let mut slots = Vec::new();
        if slots.try_reserve_exact(len).is_err() {
            return false;
        }
        slots.resize(len, 0);
        let mut larger = Self { slots };
        for slot in self.slots.iter().filter(|slot| **slot != 0) {
            let entry = self.entry(*slot);
            larger.insert(hash_of(entry), entry);
        }
        *self = larger;
        true
    }

    /// The entry with this hash for which `matches` is true.
    pub(crate) fn find(&self, hash: u64, matches: impl Fn(u32) -> bool) -> Option<u32> {
        self.probe(hash)
            .take_while(|(_, slot)| *slot != 0)
            .filter(|(_, slot)| (slot ^ self.slot(hash, 0)) & !self.mask() == 0)
            .map(|(_, slot)| self.entry(slot))
            .find(|entry| matches(*entry))
    }

    /// Adds an entry. It must not be in the table, and there must be room for it.
    pub(crate) fn insert(&mut self, hash: u64, entry: u32) {
        let free = self.probe(hash).find(|(_, slot)| *slot == 0);
        if let Some((at, _)) = free {
            self.set(at, self.slot(hash, entry + 1));
        }
    }

    /// Replaces entry `old` by `new`, under the same hash.
    pub(crate) fn replace(&mut self, hash: u64, old: u32, new: u32) {
        if let Some(at) = self.position(hash, old) {
            self.set(at, self.slot(hash, new + 1));
        }
    }

    /// Removes an entry. `hash_of` gives the hash of any other entry.
    pub(crate) fn remove(&mut self, hash: u64, entry: u32, hash_of: impl Fn(u32) -> u64) {
        let Some(mut gap) = self.position(hash, entry) else { return };
        let mask = self.mask() as usize;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let slot = self.slots.get(at).copied().unwrap_or(0);
            if slot == 0 {
                break; // an empty slot exists: a quarter of the table is empty
            }
            let home = hash_of(self.entry(slot)) as usize & mask;
            // The gap lies on this entry's probe sequence, so moving the entry there keeps it findable.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.set(gap, slot);
                gap = at;
            }
        }
        self.set(gap, 0);
    }

    fn set(&mut self, at: usize, slot: u32) {
        if let Some(to) = self.slots.get_mut(at) {
            *to = slot;
        }
    }

    fn position(&self, hash: u64, entry: u32) -> Option<usize> {
        let value = self.slot(hash, entry + 1);
        self.probe(hash)
            .take_while(|(_, slot)| *slot != 0)
            .find(|(_, slot)| *slot == value)
            .map(|(at, _)| at)
    }

    /// The slots in the order in which an entry of this hash is looked for.
    fn probe(&self, hash: u64) -> impl Iterator<Item = (usize, u32)> + '_ {
        let home = hash as usize & self.mask() as usize;
        let (before, after) = self.slots.split_at(home.min(self.slots.len()));
        (home..).zip(after.iter().copied()).chain((0..).zip(before.iter().copied()))
    }

    /// All bits of a slot index.
    fn mask(&self) -> u32 {
        (self.slots.len() as u32).wrapping_sub(1)
    }

    fn slot(&self, hash: u64, number: u32) -> u32 {
        ((hash >> 32) as u32 & !self.mask()) | number
    }

    fn entry(&self, slot: u32) -> u32 {
        (slot & self.mask()).wrapping_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// The hash of keys 0..64: so few values that probe sequences run into each other and across the
    /// end of the table.
    fn hash(key: u8, spread: u64) -> u64 {
        (u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15) % spread) | u64::from(key % 3) << 40
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Insert(u8),
        Remove(u8),
        Replace(u8),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            3 => (0u8..64).prop_map(Operation::Insert),
            2 => (0u8..64).prop_map(Operation::Remove),
            1 => (0u8..64).prop_map(Operation::Replace),
        ]
    }

    proptest! {
        #[test]
        fn index_is_a_map(
            operations in proptest::collection::vec(operation(), 0..400),
            spread in prop_oneof![Just(3u64), Just(20), Just(u64::MAX)],
        ) {
            let mut index = AddressIndex::default();
            let mut oracle = HashMap::new();
            let mut keys: Vec<u8> = Vec::new(); // by entry
            for operation in operations {
                match operation {
                    Operation::Insert(key) | Operation::Replace(key) => {
                        let new = keys.len() as u32;
                        prop_assert!(index.reserve(keys.len() + 1, |e| hash(keys[e as usize], spread)));
                        keys.push(key);
                        match (oracle.get(&key).copied(), &operation) {
                            (None, _) => index.insert(hash(key, spread), new),
                            (Some(old), Operation::Replace(_)) => {
                                index.replace(hash(key, spread), old, new);
                            }
                            _ => continue,
                        }
                        oracle.insert(key, new);
                    }
                    Operation::Remove(key) => {
                        if let Some(entry) = oracle.remove(&key) {
                            index.remove(hash(key, spread), entry, |e| {
                                hash(keys[e as usize], spread)
                            });
                        }
                    }
                }
                for key in 0..64u8 {
                    let found = index.find(hash(key, spread), |e| keys[e as usize] == key);
                    prop_assert_eq!(found, oracle.get(&key).copied());
                }
            }
        }
    }

    #[test]
    fn a_table_has_room_for_three_quarters() {
        let mut index = AddressIndex::default();
        assert_eq!(index.find(7, |_| true), None);
        for entries in 0..1000 {
            assert!(index.reserve(entries, u64::from));
            assert!(entries <= index.slots.len() / 4 * 3);
            assert!(index.slots.len() <= (entries * 8 / 3).max(SLOTS_MIN));
        }
        assert!(!index.reserve(ENTRIES_MAX + 1, u64::from));
    }
}
