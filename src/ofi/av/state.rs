//! The entries of an address vector, and the index from an address to its entry.

#![forbid(unsafe_code)]

use super::named::{Board, Progress};
use crate::transport::Address;
use crate::transport::address::LocalHost;
use crate::transport::address_index::AddressIndex;
use crate::transport::packed_address::PackedAddress;
use libfabric_sys::{FI_ADDR_NOTAVAIL, FI_EACCES, FI_EINVAL, FI_ENOMEM, fi_addr_t};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// The addresses, under the domain's lock. An entry costs 24 bytes here and 5 to 11 in the index.
#[derive(Debug)]
pub(crate) struct AvState {
    host: LocalHost,
    entries: Vec<Option<PackedAddress>>,
    /// Entries without an address; of a vector that another process fills, none. The lowest is used first (fi_av.3,
    /// FI_AV_TABLE).
    vacant: BinaryHeap<Reverse<u32>>,
    /// Finds one entry of each address.
    index: AddressIndex,
    /// Entries whose address has another entry in the index, each behind its hash.
    duplicates: BTreeSet<(u64, u32)>,
    epoch: u64,
    removals: u64,
    /// Highest bits of an `fi_addr` that name a receive context (fi_rx_addr).
    rx_bits: u8,
    /// The part that only a named vector has.
    named: Option<Box<Named>>,
}

/// The part of a named vector that it shares with other processes.
#[derive(Debug)]
struct Named {
    board: Board,
    /// `Some`: another process fills the vector, and this process has read so much of it.
    read: Option<Progress>,
}

/// Messages name a receive context in one byte, so at most 8 bits.
pub(super) const RX_BITS_MAX: u8 = 8;

const _: () = assert!(size_of::<Option<PackedAddress>>() == 24);

fn address_of(entries: &[Option<PackedAddress>], entry: u32) -> Option<&PackedAddress> {
    entries.get(entry as usize)?.as_ref()
}

fn hash_of(entries: &[Option<PackedAddress>], entry: u32) -> u64 {
    address_of(entries, entry).map_or(0, PackedAddress::hash)
}

impl AvState {
    /// Reserves memory for about `count` addresses.
    pub(super) fn new(host: LocalHost, count: usize) -> Self {
        let mut state = Self {
            host,
            entries: Vec::new(),
            vacant: BinaryHeap::new(),
            index: AddressIndex::default(),
            duplicates: BTreeSet::new(),
            epoch: 1,
            removals: 0,
            rx_bits: 0,
            named: None,
        };
        // Untouched memory costs nothing. A failure, as for an absurd count, is no error here.
        let _ = state.entries.try_reserve_exact(count.min(1 << 20));
        state
    }

    /// Sets how many of the highest bits of an `fi_addr` name a receive context: at most [`RX_BITS_MAX`].
    pub(super) fn with_rx_bits(self, rx_bits: u8) -> Self {
        Self { rx_bits: rx_bits.min(RX_BITS_MAX), ..self }
    }

    /// The entry and the receive context that an `fi_addr` names.
    pub(crate) fn split(&self, fi_addr: fi_addr_t) -> (fi_addr_t, u8) {
        match self.rx_bits {
            0 => (fi_addr, 0),
            bits => (fi_addr << bits >> bits, (fi_addr >> (64 - bits)) as u8),
        }
    }

    /// Announces that `count` addresses follow, so that the vector grows once.
    pub(super) fn expect(&mut self, count: usize) {
        let entries = self.entries.len().saturating_add(count);
        if entries > self.entries.capacity() {
            // At least by an eighth, so that the cost of growing does not add up. A failure is no error yet:
            // addresses may be vacant or invalid.
            let more = count.max(self.entries.len() / 8).max(64);
            let _ = self.entries.try_reserve_exact(more);
        }
        if count > 1 {
            let entries_now = &self.entries;
            self.index.reserve(entries, |entry| hash_of(entries_now, entry));
        }
    }

    /// Makes this the vector of `board`: this process fills it, or, if `reads`, another one does.
    pub(super) fn with_board(self, board: Board, reads: bool) -> Self {
        let read = reads.then(Progress::default);
        Self { named: Some(Box::new(Named { board, read })), ..self }
    }

    /// Whether it has a name.
    #[inline]
    pub(super) fn is_named(&self) -> bool {
        self.named.is_some()
    }

    /// Copies the changes of the vector's keeper, if that is another process. Returns which entries stood for a peer and
    /// were removed, each with the entry that stands for the peer from now on.
    pub(super) fn follow(&mut self) -> Vec<(fi_addr_t, fi_addr_t)> {
        let mut heirs = Vec::new();
        let Some(mut named) = self.named.take() else { return heirs };
        let now = named.board.progress();
        if let Some(read) = named.read.filter(|read| *read != now) {
            for entry in read.first(now)..now.entries {
                let heir = self.mirror(entry, named.board.read(entry));
                heirs.extend(heir.map(|heir| (entry as fi_addr_t, fi_addr_t::from(heir))));
            }
            named.read = Some(now);
        }
        self.named = Some(named);
        heirs
    }

    /// Gives an entry the address that it has at the keeper, or none. Returns the entry that stands for the peer from now
    /// on, if this one did.
    fn mirror(&mut self, entry: usize, address: Option<Address>) -> Option<u32> {
        let address = address.map(|address| PackedAddress::new(&self.host, &address));
        while self.entries.len() <= entry {
            self.grow().ok()?;
        }
        let entry = u32::try_from(entry).ok()?;
        let old = address_of(&self.entries, entry).copied();
        if old == address {
            return None;
        }
        let heir = if old.is_some() { self.vacate(entry).ok()? } else { None };
        if let Some(address) = address {
            self.occupy(entry, address);
        }
        heir
    }

    /// Adds an address; one that is in the vector already gets another entry. Errors: ENOMEM; EACCES in a
    /// vector that was opened for reading.
    pub(super) fn insert(&mut self, new: &Address) -> Result<fi_addr_t, i32> {
        if self.named.as_ref().is_some_and(|named| named.read.is_some()) {
            return Err(FI_EACCES);
        }
        let address = PackedAddress::new(&self.host, new);
        let entry = self.vacant.peek().map_or(self.entries.len() as u32, |Reverse(lowest)| *lowest);
        if self.named.as_ref().is_some_and(|named| !named.board.has(entry as usize)) {
            return Err(FI_ENOMEM);
        }
        if self.vacant.pop().is_none() {
            self.grow()?;
        }
        self.occupy(entry, address);
        if let Some(named) = &self.named {
            named.board.publish(entry as usize, Some(new));
        }
        Ok(fi_addr_t::from(entry))
    }

    /// Gives a vacant entry an address.
    fn occupy(&mut self, entry: u32, address: PackedAddress) {
        if let Some(slot) = self.entries.get_mut(entry as usize) {
            *slot = Some(address);
        }
        let hash = address.hash();
        if self.find(hash, &address).is_some() {
            self.duplicates.insert((hash, entry));
        } else {
            self.index.insert(hash, entry);
        }
        self.epoch += 1;
    }

    /// Appends an entry that is vacant and not among the vacant ones.
    fn grow(&mut self) -> Result<(), i32> {
        self.expect(1);
        let entry = self.entries.len();
        let entries = &self.entries;
        let room = entries.capacity() > entry
            && self.index.reserve(entry + 1, |entry| hash_of(entries, entry));
        if !room {
            return Err(FI_ENOMEM);
        }
        self.entries.push(None);
        Ok(())
    }

    /// Returns the entry that stands for the peer from now on, if the removed one did and there is another.
    /// Errors: EINVAL for an `fi_addr` without an address; EACCES in a vector that was opened for reading; ENOMEM.
    pub(super) fn remove(&mut self, fi_addr: fi_addr_t) -> Result<Option<fi_addr_t>, i32> {
        let entry = u32::try_from(fi_addr).map_err(|_| FI_EINVAL)?;
        if self.named.as_ref().is_some_and(|named| named.read.is_some()) {
            return Err(FI_EACCES);
        }
        self.vacant.try_reserve(1).map_err(|_| FI_ENOMEM)?;
        let heir = self.vacate(entry)?;
        self.vacant.push(Reverse(entry));
        if let Some(named) = &self.named {
            named.board.publish(entry as usize, None);
        }
        Ok(heir.map(fi_addr_t::from))
    }

    /// Takes the address of an entry out.
    fn vacate(&mut self, entry: u32) -> Result<Option<u32>, i32> {
        let address = *address_of(&self.entries, entry).ok_or(FI_EINVAL)?;
        let hash = address.hash();
        let mut heir = None;
        if self.find(hash, &address) == Some(entry) {
            heir = self.other_entry(hash, &address);
            let entries = &self.entries;
            match heir {
                Some(heir) => {
                    self.index.replace(hash, entry, heir);
                    self.duplicates.remove(&(hash, heir));
                }
                None => self.index.remove(hash, entry, |entry| hash_of(entries, entry)),
            }
        } else {
            self.duplicates.remove(&(hash, entry));
        }
        if let Some(slot) = self.entries.get_mut(entry as usize) {
            *slot = None;
        }
        self.epoch += 1;
        self.removals += 1;
        Ok(heir)
    }

    /// The lowest entry of an address that is not in the index.
    fn other_entry(&self, hash: u64, address: &PackedAddress) -> Option<u32> {
        let mut same = self.duplicates.range((hash, 0)..=(hash, u32::MAX)).map(|(_, entry)| *entry);
        same.find(|entry| address_of(&self.entries, *entry) == Some(address))
    }

    fn find(&self, hash: u64, address: &PackedAddress) -> Option<u32> {
        self.index.find(hash, |entry| address_of(&self.entries, entry) == Some(address))
    }

    /// Whether the vector has no address.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.iter().all(Option::is_none)
    }

    /// One more than the highest `fi_addr` in use.
    pub(crate) fn entries(&self) -> usize {
        self.entries.len()
    }

    /// The address of `fi_addr`.
    #[inline]
    pub(crate) fn address(&self, fi_addr: fi_addr_t) -> Option<Address> {
        Some(address_of(&self.entries, u32::try_from(fi_addr).ok()?)?.address())
    }

    /// The first `fi_addr` of an address, or FI_ADDR_NOTAVAIL.
    pub(crate) fn fi_addr(&self, address: &Address) -> fi_addr_t {
        let address = PackedAddress::new(&self.host, address);
        self.find(address.hash(), &address).map_or(FI_ADDR_NOTAVAIL, fi_addr_t::from)
    }

    /// The `fi_addr` that stands for the same peer in completions and in matching.
    pub(crate) fn representative(&self, fi_addr: fi_addr_t) -> Option<fi_addr_t> {
        let entry = u32::try_from(self.split(fi_addr).0).ok()?;
        let address = address_of(&self.entries, entry)?;
        if self.duplicates.is_empty() {
            return Some(fi_addr_t::from(entry));
        }
        self.find(address.hash(), address).map(fi_addr_t::from)
    }

    /// Changes with every insertion and removal.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Changes with every removal.
    #[inline]
    pub(crate) fn removals(&self) -> u64 {
        self.removals
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::address::CanonicalAddress;
    use crate::transport::comparisons_of;
    use proptest::prelude::*;

    fn state() -> AvState {
        AvState::new(LocalHost::detect(), 0)
    }

    fn address(text: &str) -> Address {
        Address::from_text(text).unwrap()
    }

    #[test]
    fn indices_count_up_and_the_lowest_is_used_again() {
        let mut av = state();
        assert_eq!(av.insert(&address("127.0.0.1:1")), Ok(0));
        assert_eq!(av.insert(&address("127.0.0.1:2")), Ok(1));
        assert_eq!(av.remove(0), Ok(None));
        assert_eq!(av.remove(0), Err(FI_EINVAL));
        assert_eq!(av.remove(77), Err(FI_EINVAL));
        assert_eq!(av.remove(u64::MAX), Err(FI_EINVAL));
        assert_eq!(av.insert(&address("127.0.0.1:3")), Ok(0));
        assert_eq!(av.address(0), Some(address("127.0.0.1:3")));
        assert_eq!(av.address(1 << 32), None);
        assert_eq!((av.remove(0), av.remove(1)), (Ok(None), Ok(None)));
        for entry in 0..3 {
            assert_eq!(av.insert(&address("127.0.0.1:4")), Ok(entry));
        }
    }

    #[test]
    fn an_address_inserted_twice_has_one_representative() {
        let mut av = state();
        let a = address("127.0.0.1:1");
        assert_eq!((av.insert(&a), av.insert(&a)), (Ok(0), Ok(1)));
        assert_eq!(av.representative(1), Some(0));
        assert_eq!(av.remove(0), Ok(Some(1)));
        assert_eq!(av.fi_addr(&a), 1);
        assert!(av.duplicates.is_empty());
        assert_eq!(av.remove(1), Ok(None));
        assert_eq!(av.fi_addr(&a), FI_ADDR_NOTAVAIL);
    }

    #[test]
    fn a_duplicate_does_not_make_each_removal_a_search() {
        for last in [500, 1000] {
            let mut av = state();
            for port in (1..=1000).chain([last]) {
                av.insert(&address(&format!("203.0.113.1:{port}"))).unwrap();
            }
            let taken = comparisons_of(|| {
                for entry in 0..=1000 {
                    let heir = (entry + 1 == last).then_some(1000);
                    assert_eq!(av.remove(entry), Ok(heir));
                }
            });
            assert!(av.is_empty() && av.duplicates.is_empty());
            assert!(taken < 10_000, "{taken}");
        }
    }

    #[test]
    fn an_address_may_name_a_receive_context() {
        let mut av = AvState::new(LocalHost::detect(), 0).with_rx_bits(3);
        let a = address("127.0.0.1:1");
        assert_eq!(av.insert(&a), Ok(0));
        assert_eq!(av.insert(&address("127.0.0.1:2")), Ok(1));
        assert_eq!(av.split(1), (1, 0));
        assert_eq!(av.split(7 << 61 | 1), (1, 7));
        assert_eq!(av.representative(5 << 61), Some(0));
        assert_eq!(state().split(u64::MAX), (u64::MAX, 0));
    }

    #[test]
    fn a_reader_follows_the_keeper() {
        let name = format!("follow-{}", crate::sys::process::random_u64());
        let mut keeper = state().with_board(Board::create(&name, 0).unwrap(), false);
        let mut reader = state().with_board(Board::open(&name).unwrap(), true);
        let (a, b) = (address("127.0.0.1:1"), address("127.0.0.1:2"));
        assert_eq!(reader.insert(&a), Err(FI_EACCES));
        assert_eq!(
            (keeper.insert(&a), keeper.insert(&b), keeper.insert(&a)),
            (Ok(0), Ok(1), Ok(2))
        );
        assert_eq!(reader.follow(), []);
        assert_eq!((reader.address(0), reader.address(1)), (Some(a), Some(b)));
        assert_eq!(reader.remove(0), Err(FI_EACCES));
        let removals = reader.removals();
        assert_eq!((reader.representative(2), reader.fi_addr(&b)), (Some(0), 1));
        keeper.remove(0).unwrap();
        assert_eq!(reader.follow(), [(0, 2)]);
        assert_ne!(reader.removals(), removals);
        assert_eq!((reader.address(0), reader.representative(2)), (None, Some(2)));
        assert_eq!(keeper.insert(&b), Ok(0));
        assert_eq!(reader.follow(), []);
        assert_eq!((reader.address(0), reader.representative(0)), (Some(b), Some(1)));
        drop(keeper);
        assert_eq!(reader.address(1), Some(b));
    }

    #[test]
    fn an_expectation_that_is_not_met_harms_nobody() {
        let mut av = AvState::new(LocalHost::detect(), usize::MAX);
        av.expect(usize::MAX);
        assert_eq!(av.insert(&address("10.0.0.1:1")), Ok(0));
    }

    /// The same as `AvState`, implemented in the simplest way.
    #[derive(Default)]
    struct Oracle {
        entries: Vec<Option<Address>>,
        /// The representative of each address.
        first: Vec<(CanonicalAddress, usize)>,
    }

    impl Oracle {
        fn insert(&mut self, host: &LocalHost, address: Address) -> usize {
            let vacant = self.entries.iter().position(Option::is_none);
            let entry = vacant.unwrap_or(self.entries.len());
            self.entries.resize(self.entries.len().max(entry + 1), None);
            self.entries[entry] = Some(address);
            if self.find(host, &address).is_none() {
                self.first.push((host.canonical(&address), entry));
            }
            entry
        }

        fn find(&self, host: &LocalHost, address: &Address) -> Option<usize> {
            self.first.iter().find(|(a, _)| *a == host.canonical(address)).map(|(_, entry)| *entry)
        }

        fn remove(&mut self, host: &LocalHost, entry: usize) -> bool {
            let Some(address) = self.entries.get_mut(entry).and_then(Option::take) else {
                return false;
            };
            if self.find(host, &address) == Some(entry) {
                let canonical = host.canonical(&address);
                self.first.retain(|(a, _)| *a != canonical);
                let same = |a: &Option<Address>| a.is_some_and(|a| host.canonical(&a) == canonical);
                if let Some(other) = self.entries.iter().position(same) {
                    self.first.push((canonical, other));
                }
            }
            true
        }
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Insert(usize),
        Remove(usize),
    }

    /// One of a few addresses, so that duplicates and churn are the rule.
    fn candidate(n: usize) -> Address {
        match n % 4 {
            0 => address(&format!("127.0.0.{}:{}", n % 3 + 1, n % 7 + 1)),
            1 => address(&format!("[::1]:{}", n % 7 + 1)),
            2 => address(&format!("203.0.113.{}:5", n % 11)),
            _ => address(&format!("[2001:db8::{}]:5", n % 11)),
        }
    }

    proptest! {
        #[test]
        fn state_is_the_oracle(
            operations in proptest::collection::vec(
                prop_oneof![
                    3 => (0usize..100).prop_map(Operation::Insert),
                    2 => (0usize..40).prop_map(Operation::Remove),
                ],
                0..120,
            ),
        ) {
            let host = LocalHost::detect();
            let (mut av, mut oracle) = (state(), Oracle::default());
            for operation in operations {
                match operation {
                    Operation::Insert(n) => {
                        let expected = oracle.insert(&host, candidate(n)) as fi_addr_t;
                        prop_assert_eq!(av.insert(&candidate(n)), Ok(expected));
                    }
                    Operation::Remove(entry) => {
                        let removed = av.remove(entry as fi_addr_t).is_ok();
                        prop_assert_eq!(removed, oracle.remove(&host, entry));
                    }
                }
                for (entry, expected) in oracle.entries.iter().enumerate() {
                    let representative = expected.and_then(|a| oracle.find(&host, &a));
                    prop_assert_eq!(av.address(entry as fi_addr_t), *expected);
                    prop_assert_eq!(
                        av.representative(entry as fi_addr_t),
                        representative.map(|entry| entry as fi_addr_t)
                    );
                }
            }
            for n in 0..100 {
                let expected = oracle.find(&host, &candidate(n));
                let expected = expected.map_or(FI_ADDR_NOTAVAIL, |entry| entry as fi_addr_t);
                prop_assert_eq!(av.fi_addr(&candidate(n)), expected);
            }
        }
    }
}
