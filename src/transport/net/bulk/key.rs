//! The remote keys of the bulk paths (PROTOCOL.md §7.14).

use crate::transport::RemoteKey;
use crate::transport::net::agreement::message::Way;

/// Their kinds: of RC queue pairs, and of the kernel's rv module.
pub(crate) const KINDS: &[u8] = &[kind_of(Way::Rc), kind_of(Way::Rv)];

const fn kind_of(way: Way) -> u8 {
    way as u8 + 1
}

/// What the memory under a key is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    Region = 0,
    Receive = 1,
    Send = 2,
}

/// A remote key. It is valid only as long as the connection that it was made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) connection: u32,
    /// The number of a remote buffer, or of an advertised message. The first comes back as the immediate of the write.
    pub(crate) slot: u32,
    /// The address of the memory, as the device knows it, and the device's key.
    pub(crate) addr: u64,
    pub(crate) key: u32,
    pub(crate) holds: Use,
}

impl Key {
    pub(crate) fn encode(&self) -> RemoteKey {
        let Self { connection, slot, addr, key, holds } = *self;
        RemoteKey::new(kind_of(Way::of_connection(connection)))
            .with(u64::from(slot) << 32 | u64::from(connection))
            .with(addr)
            .with((holds as u64) << 32 | u64::from(key))
    }

    /// `None`: bytes that no udrv of this version sends.
    pub(crate) fn decode(from: &RemoteKey) -> Option<Self> {
        let [first, addr, last] = [from.word(0)?, from.word(1)?, from.word(2)?];
        let holds = match last >> 32 {
            0 => Use::Region,
            1 => Use::Receive,
            2 => Use::Send,
            _ => return None,
        };
        let connection = first as u32;
        let key = Self { connection, slot: (first >> 32) as u32, addr, key: last as u32, holds };
        (from.kind() == kind_of(Way::of_connection(connection))).then_some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_it_was_made() {
        for (connection, holds) in
            [(7, Use::Region), (u32::MAX >> 1, Use::Receive), (1 << 31, Use::Send)]
        {
            let key = Key { connection, slot: u32::MAX, addr: u64::MAX - 1, key: u32::MAX, holds };
            let encoded = key.encode();
            assert!(KINDS.contains(&encoded.kind()));
            assert_eq!(Key::decode(&encoded), Some(key));
            let bytes = encoded.as_slice();
            assert_eq!(Key::decode(&RemoteKey::from_slice(&bytes[..24]).unwrap()), None, "cut off");
            let other = [&[bytes[0] ^ 1], &bytes[1..]].concat();
            assert_eq!(Key::decode(&RemoteKey::from_slice(&other).unwrap()), None, "another kind");
        }
    }
}
