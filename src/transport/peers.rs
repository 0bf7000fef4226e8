//! The peers that an endpoint has met, numbered. An address that is only known to the address
//! vector costs nothing here.

use super::PeerId;
use super::address::{Address, LocalHost};
use super::address_index::AddressIndex;
use super::packed_address::PackedAddress;

/// Numbers peers by address: about 32 bytes each.
#[derive(Debug)]
pub(crate) struct PeerTable {
    host: LocalHost,
    index: AddressIndex,
    addresses: Vec<PackedAddress>,
}

impl PeerTable {
    pub(crate) fn new(host: LocalHost) -> Self {
        Self { host, index: AddressIndex::default(), addresses: Vec::new() }
    }

    /// The number of the peer at `address`, new at first contact; `None` when there is no memory, or
    /// after 2^30 peers.
    pub(crate) fn intern(&mut self, address: &Address) -> Option<PeerId> {
        let packed = PackedAddress::new(&self.host, address);
        if let Some(known) = self.number(&packed) {
            return Some(known);
        }
        let Self { index, addresses, .. } = self;
        let next = u32::try_from(addresses.len()).ok()?;
        let hash_of = |n: u32| addresses.get(n as usize).map_or(0, PackedAddress::hash);
        if !index.reserve(addresses.len() + 1, hash_of) {
            return None;
        }
        index.insert(packed.hash(), next);
        addresses.push(packed);
        Some(PeerId(next))
    }

    fn number(&self, packed: &PackedAddress) -> Option<PeerId> {
        let same = |n: u32| self.addresses.get(n as usize) == Some(packed);
        self.index.find(packed.hash(), same).map(PeerId)
    }

    /// The number of the peer at `address`, if it was met.
    pub(crate) fn find(&self, address: &Address) -> Option<PeerId> {
        self.number(&PackedAddress::new(&self.host, address))
    }

    /// The address of a peer, as first met.
    pub(crate) fn address(&self, peer: PeerId) -> Option<Address> {
        self.addresses.get(peer.index()).map(PackedAddress::address)
    }

    /// Which addresses belong to this host.
    pub(crate) fn host(&self) -> &LocalHost {
        &self.host
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_per_peer() {
        let mut table = PeerTable::new(LocalHost::detect());
        let a = Address::from_text("127.0.0.1:5").unwrap();
        let alias = Address::from_text("127.0.0.9:5").unwrap();
        let b = Address::from_text("127.0.0.1:6").unwrap();
        assert_eq!(table.intern(&a), Some(PeerId(0)));
        assert_eq!(table.intern(&b), Some(PeerId(1)));
        assert_eq!(table.intern(&alias), Some(PeerId(0)));
        assert_eq!(table.address(PeerId(1)), Some(b));
        assert_eq!(table.address(PeerId(2)), None);
    }
}
