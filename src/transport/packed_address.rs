//! An address in 24 bytes, for address vectors of a million entries.

#![forbid(unsafe_code)]

use crate::transport::Address;
use crate::transport::address::{CanonicalAddress, LocalHost};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// An address, and whether it belongs to this host. Two addresses of this host with the same port name
/// the same endpoint and compare equal, as in [`CanonicalAddress`]. The IPv6 flow label is not part of
/// the address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedAddress {
    /// IPv4 is stored as IPv4-mapped IPv6.
    ip: [u8; 16],
    scope: u32,
    port: u16,
    v4: bool,
    local: bool,
}

const _: () = assert!(size_of::<PackedAddress>() == 24);

impl PackedAddress {
    pub(crate) fn new(host: &LocalHost, address: &Address) -> Self {
        let local = matches!(host.canonical(address), CanonicalAddress::Local(_));
        let (ip, scope, v4) = match address.0 {
            SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0, true),
            SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id(), false),
        };
        Self { ip: ip.octets(), scope, port: address.port(), v4, local }
    }

    pub(crate) fn address(&self) -> Address {
        let ip = Ipv6Addr::from(self.ip);
        Address(match ip.to_ipv4_mapped() {
            Some(v4) if self.v4 => SocketAddr::new(IpAddr::V4(v4), self.port),
            _ => SocketAddr::V6(SocketAddrV6::new(ip, self.port, 0, self.scope)),
        })
    }

    /// Equal for equal addresses, and spread over all 64 bits: products of 64-bit words, folded.
    pub(crate) fn hash(&self) -> u64 {
        const SEEDS: [u64; 3] =
            [0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0x8cb9_2ba7_2f3d_8dd7];
        let fold = |a: u64, b: u64| {
            let product = u128::from(a) * u128::from(b);
            product as u64 ^ (product >> 64) as u64
        };
        let port = u64::from(self.port);
        if self.local {
            return fold(SEEDS[0] ^ port, SEEDS[1]);
        }
        let ip = u128::from_le_bytes(self.ip);
        let ip = fold(SEEDS[0] ^ ip as u64, SEEDS[1] ^ (ip >> 64) as u64);
        fold(
            SEEDS[2] ^ port ^ u64::from(self.v4) << 16 ^ u64::from(self.scope) << 32,
            SEEDS[1] ^ ip,
        )
    }
}

impl PartialEq for PackedAddress {
    fn eq(&self, other: &Self) -> bool {
        #[cfg(test)]
        super::count_comparison();
        self.port == other.port
            && self.local == other.local
            && (self.local
                || (self.ip == other.ip && self.v4 == other.v4 && self.scope == other.scope))
    }
}

impl Eq for PackedAddress {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn packed(text: &str) -> PackedAddress {
        PackedAddress::new(&LocalHost::detect(), &Address::from_text(text).unwrap())
    }

    #[test]
    fn an_address_comes_out_as_it_went_in() {
        for text in [
            "10.0.0.1:7471",
            "127.0.0.1:1",
            "[::ffff:10.0.0.1]:7471",
            "[fe80::1%3]:9",
            "[::1]:65535",
        ] {
            let address = Address::from_text(text).unwrap();
            assert_eq!(packed(text).address(), address);
        }
        let labelled = SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::LOCALHOST, 5, 7, 0));
        let labelled = PackedAddress::new(&LocalHost::detect(), &Address(labelled));
        assert_eq!(labelled.address(), Address::from_text("[::1]:5").unwrap());
    }

    #[test]
    fn equality_is_that_of_canonical_addresses() {
        let host = LocalHost::detect();
        let texts = [
            "127.0.0.1:5",
            "127.0.0.2:5",
            "[::1]:5",
            "127.0.0.1:6",
            "203.0.113.7:5",
            "203.0.113.8:5",
            "203.0.113.7:6",
            "[::ffff:203.0.113.7]:5",
            "[2001:db8::1]:5",
            "[2001:db8::1%1]:5",
            "[2001:db8::1%2]:5",
        ];
        for a in texts {
            for b in texts {
                let canonical = |text| host.canonical(&Address::from_text(text).unwrap());
                assert_eq!(packed(a) == packed(b), canonical(a) == canonical(b), "{a} {b}");
                if packed(a) == packed(b) {
                    assert_eq!(packed(a).hash(), packed(b).hash());
                }
            }
        }
    }

    #[test]
    fn neighbours_have_different_hashes_in_both_halves() {
        let (mut low, mut high) = (HashSet::new(), HashSet::new());
        for node in 0..1024 {
            for port in 0..64 {
                let hash =
                    packed(&format!("10.0.{}.{}:{}", node / 256, node % 256, 1024 + port)).hash();
                low.insert(hash as u32);
                high.insert((hash >> 32) as u32);
            }
        }
        // Of 65536 random 32-bit words, about half a pair collides.
        assert!(low.len() > 65530 && high.len() > 65530, "{} {}", low.len(), high.len());
    }
}
