//! The peers that an endpoint has met, numbered. An address that is only known to the address
//! vector costs nothing here.

use super::PeerId;
use super::address::{Address, CanonicalAddress, LocalHost};
use std::collections::HashMap;

/// Numbers peers by address.
#[derive(Debug)]
pub(crate) struct PeerTable {
    host: LocalHost,
    by_address: HashMap<CanonicalAddress, PeerId>,
    addresses: Vec<Address>,
}

impl PeerTable {
    pub(crate) fn new(host: LocalHost) -> Self {
        Self { host, by_address: HashMap::new(), addresses: Vec::new() }
    }

    /// The number of the peer at `address`, new at first contact.
    pub(crate) fn intern(&mut self, address: &Address) -> PeerId {
        let next = PeerId(u32::try_from(self.addresses.len()).unwrap_or(u32::MAX));
        let id = *self.by_address.entry(self.host.canonical(address)).or_insert(next);
        if id == next {
            self.addresses.push(*address);
        }
        id
    }

    /// The address of a peer, as first met.
    pub(crate) fn address(&self, peer: PeerId) -> Option<Address> {
        self.addresses.get(peer.index()).copied()
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
        assert_eq!(table.intern(&a), PeerId(0));
        assert_eq!(table.intern(&b), PeerId(1));
        assert_eq!(table.intern(&alias), PeerId(0));
        assert_eq!(table.address(PeerId(1)), Some(b));
        assert_eq!(table.address(PeerId(2)), None);
    }
}
