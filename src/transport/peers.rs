//! Numbers the peers that an endpoint has met. An address that is only in the address vector takes
//! no memory here.

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
    /// Numbers that were released.
    free: Vec<u32>,
}

impl PeerTable {
    pub(crate) fn new(host: LocalHost) -> Self {
        Self { host, index: AddressIndex::default(), addresses: Vec::new(), free: Vec::new() }
    }

    /// The number of the peer at `address`, a new one at first contact; `None` if memory is short, or
    /// after 2^30 peers.
    pub(crate) fn intern(&mut self, address: &Address) -> Option<PeerId> {
        let packed = PackedAddress::new(&self.host, address);
        if let Some(known) = self.number(&packed) {
            return Some(known);
        }
        let Self { index, addresses, free, .. } = self;
        if let Some((next, place)) =
            free.last().and_then(|n| Some((*n, addresses.get_mut(*n as usize)?)))
        {
            // The index had room reserved for this many entries.
            index.insert(packed.hash(), next);
            *place = packed;
            free.pop();
            return Some(PeerId(next));
        }
        let next = u32::try_from(addresses.len()).ok()?;
        let hash_of = |n: u32| addresses.get(n as usize).map_or(0, PackedAddress::hash);
        if !index.reserve(addresses.len() + 1, hash_of) {
            return None;
        }
        index.insert(packed.hash(), next);
        addresses.push(packed);
        Some(PeerId(next))
    }

    /// Frees this number: the next new peer gets it.
    pub(crate) fn release(&mut self, peer: PeerId) {
        let Self { index, addresses, free, .. } = self;
        let Some(packed) = addresses.get(peer.index()) else { return };
        let hash_of = |n: u32| addresses.get(n as usize).map_or(0, PackedAddress::hash);
        index.remove(packed.hash(), peer.0, hash_of);
        free.push(peer.0);
    }

    fn number(&self, packed: &PackedAddress) -> Option<PeerId> {
        let same = |n: u32| self.addresses.get(n as usize) == Some(packed);
        self.index.find(packed.hash(), same).map(PeerId)
    }

    /// The number of the peer at `address`, if it was met.
    pub(crate) fn find(&self, address: &Address) -> Option<PeerId> {
        self.number(&PackedAddress::new(&self.host, address))
    }

    /// The address of a peer, as given at first contact.
    pub(crate) fn address(&self, peer: PeerId) -> Option<Address> {
        self.addresses.get(peer.index()).map(PackedAddress::address)
    }

    /// The addresses of this host.
    pub(crate) fn host(&self) -> &LocalHost {
        &self.host
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_were_given_back_are_given_again() {
        let mut table = PeerTable::new(LocalHost::default());
        let at = |port: u16| Address(std::net::SocketAddr::from(([203, 0, 113, 9], port)));
        let mut held = Vec::new();
        for port in 1..5000 {
            held.push((port, table.intern(&at(port)).unwrap()));
            if held.len() > 60 {
                let (port, peer) = held.remove(usize::from(port) * 7 % 60);
                table.release(peer);
                assert_eq!(table.find(&at(port)), None);
            }
        }
        assert!(table.addresses.len() <= 61, "{} numbers", table.addresses.len());
        for (port, peer) in held {
            assert_eq!((table.find(&at(port)), table.address(peer)), (Some(peer), Some(at(port))));
        }
    }

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
