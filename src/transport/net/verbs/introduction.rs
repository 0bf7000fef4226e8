//! How endpoints exchange queue-pair addresses and validate paths (PROTOCOL.md §7.13). Decoding takes any bytes; its
//! results are authenticated as from the same job.

use crate::transport::Address;
use crate::transport::address::WIRE_LEN;
use crate::transport::job_key::{JobKey, same};
use crate::transport::net::network::Network;
use crate::transport::net::reliable::packet::{HELLO_LEN, Hello, HelloKind, MAGIC};

/// Length of a queue-pair address ([`Place`]), bytes.
const PLACE_LEN: usize = 32;
/// Bytes behind a handshake packet with a queue-pair address: the address and a tag.
const TRAILER_LEN: usize = PLACE_LEN + 8;
/// Length of a handshake packet with both, bytes.
pub(super) const INTRODUCED_LEN: usize = HELLO_LEN + TRAILER_LEN;
/// First bytes of a queue-pair address.
const PLACE_MAGIC: [u8; 4] = *b"RDMA";
/// Offsets in a [`Call`].
const NONCE_AT: usize = 8;
const ADDRESS_AT: usize = 16;
const PLACE_AT: usize = ADDRESS_AT + WIRE_LEN;
const TAG_AT: usize = PLACE_AT + PLACE_LEN;
/// Length of a [`Call`], bytes.
const CALL_LEN: usize = TAG_AT + 8;
/// The version of this part of the protocol.
const VERSION: u8 = 1;

/// The queue-pair address of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) network: Network,
    /// Longest datagram that it takes, bytes; 0: the device is not in use now.
    pub(super) mtu: u16,
    /// Number of the queue pair; 0: there is none.
    pub(super) number: u32,
    /// Addresses of its port: in the InfiniBand subnet, and global.
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
}

impl Place {
    /// The same, once neither datagrams nor connections go through it.
    pub(super) fn gone(self) -> Self {
        Self { number: 0, mtu: 0, ..self }
    }

    pub(super) fn is_gone(&self) -> bool {
        self.number == 0 && self.mtu == 0
    }

    /// Whether `there` can be reached from here at all.
    pub(super) fn reaches(&self, there: &Self) -> bool {
        self.obstacle(there).is_none()
    }

    /// Why it cannot, and what to do; `None`: it can.
    pub(super) fn obstacle(&self, there: &Self) -> Option<&'static str> {
        self.network.obstacle(&self.gid, there.network, &there.gid)
    }

    fn encode(&self) -> [u8; PLACE_LEN] {
        let mut bytes = [0; PLACE_LEN];
        put(&mut bytes, 0, &PLACE_MAGIC);
        let (network, pkey) = self.network.to_wire();
        put(&mut bytes, 4, &[VERSION, network]);
        put(&mut bytes, 6, &self.mtu.to_le_bytes());
        put(&mut bytes, 8, &self.number.to_le_bytes());
        put(&mut bytes, 12, &self.lid.to_le_bytes());
        put(&mut bytes, 14, &pkey);
        put(&mut bytes, 16, &self.gid);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.get(..4)? != PLACE_MAGIC || *bytes.get(4)? != VERSION {
            return None;
        }
        Some(Self {
            network: Network::from_wire(*bytes.get(5)?, bytes.get(14..16)?.try_into().ok()?)?,
            mtu: u16::from_le_bytes(bytes.get(6..8)?.try_into().ok()?),
            number: u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?) & 0x00ff_ffff,
            lid: u16::from_le_bytes(bytes.get(12..14)?.try_into().ok()?),
            gid: bytes.get(16..32)?.try_into().ok()?,
        })
    }
}

/// Whether `bytes` are a handshake packet that may be followed by a queue-pair address.
#[inline]
pub(super) fn is_greeting(bytes: &[u8]) -> bool {
    let greets = |hello: Hello| matches!(hello.kind, HelloKind::Init | HelloKind::Accept);
    bytes.len() == HELLO_LEN && Hello::decode(bytes).is_some_and(greets)
}

/// The handshake packet with the queue-pair address behind it; `None` if there is no room, because it is a padded path
/// probe.
pub(super) fn with_trailer(
    key: &JobKey,
    hello: &[u8],
    place: &Place,
) -> Option<[u8; INTRODUCED_LEN]> {
    let hello: &[u8; HELLO_LEN] = hello.try_into().ok()?;
    let mut bytes = [0; INTRODUCED_LEN];
    put(&mut bytes, 0, hello);
    put(&mut bytes, HELLO_LEN, &place.encode());
    sign(key, &mut bytes, HELLO_LEN + PLACE_LEN);
    Some(bytes)
}

/// The sender of the handshake packet `bytes`, and its queue-pair address.
#[inline]
pub(super) fn read_trailer(key: &JobKey, bytes: &[u8]) -> Option<(Address, Place)> {
    if bytes.get(..4)? != MAGIC {
        return None;
    }
    let place = Place::decode(bytes.get(HELLO_LEN..)?)?;
    if !is_signed(key, bytes, HELLO_LEN + PLACE_LEN) {
        return None;
    }
    Some((Hello::decode(bytes)?.address, place))
}

/// The kinds of [`Call`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallKind {
    /// A path challenge, sent through the queue pairs.
    Ping,
    /// The path response to one.
    Pong,
    /// An address update, sent over UDP: the sender's queue pair was replaced, or is gone.
    News,
}

/// A packet that validates a path, or updates a queue-pair address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Call {
    pub(super) kind: CallKind,
    /// The challenge's random number, which the response repeats.
    pub(super) nonce: u64,
    /// The sender's address.
    pub(super) address: Address,
    pub(super) place: Place,
}

/// The address update in `bytes` from the socket, if they are one.
#[inline]
pub(super) fn read_news(key: &JobKey, bytes: &[u8]) -> Option<Call> {
    if bytes.len() != CALL_LEN {
        return None;
    }
    Call::decode(key, bytes).filter(|call| call.kind == CallKind::News)
}

impl Call {
    pub(super) fn encode(&self, key: &JobKey) -> [u8; CALL_LEN] {
        let mut bytes = [0; CALL_LEN];
        put(&mut bytes, 0, &MAGIC);
        let kind = match self.kind {
            CallKind::Ping => 32,
            CallKind::Pong => 33,
            CallKind::News => 34,
        };
        put(&mut bytes, 4, &[kind]);
        put(&mut bytes, NONCE_AT, &self.nonce.to_le_bytes());
        put(&mut bytes, ADDRESS_AT, &self.address.to_wire());
        put(&mut bytes, PLACE_AT, &self.place.encode());
        sign(key, &mut bytes, TAG_AT);
        bytes
    }

    /// The same with zeroes behind it, up to `longest` bytes: a path that carries it carries all packets.
    pub(super) fn padded(&self, key: &JobKey, longest: usize) -> Vec<u8> {
        let mut bytes = self.encode(key).to_vec();
        bytes.resize(longest.max(CALL_LEN), 0);
        bytes
    }

    /// Ignores what is behind it.
    pub(super) fn decode(key: &JobKey, bytes: &[u8]) -> Option<Self> {
        if bytes.get(..4)? != MAGIC || !is_signed(key, bytes, TAG_AT) {
            return None;
        }
        Some(Self {
            kind: match *bytes.get(4)? {
                32 => CallKind::Ping,
                33 => CallKind::Pong,
                34 => CallKind::News,
                _ => return None,
            },
            nonce: u64::from_le_bytes(bytes.get(NONCE_AT..ADDRESS_AT)?.try_into().ok()?),
            address: Address::from_wire(bytes.get(ADDRESS_AT..PLACE_AT)?)?,
            place: Place::decode(bytes.get(PLACE_AT..TAG_AT)?)?,
        })
    }
}

/// Copies `from` to `at`; the arrays here are long enough.
fn put(bytes: &mut [u8], at: usize, from: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at + from.len()) {
        to.copy_from_slice(from);
    }
}

/// Appends the tag over the first `at` bytes. Tags of handshake packets cover another length, so neither can pass for
/// the other.
fn sign(key: &JobKey, bytes: &mut [u8], at: usize) {
    let tag = key.tag(bytes.get(..at).unwrap_or(&[]));
    put(bytes, at, &tag.to_le_bytes());
}

fn is_signed(key: &JobKey, bytes: &[u8], at: usize) -> bool {
    let tag = bytes.get(at..at + 8).and_then(|tag| tag.try_into().ok()).map(u64::from_le_bytes);
    let Some((signed, tag)) = bytes.get(..at).zip(tag) else { return false };
    same(key.tag(signed), tag)
}

/// The Q_Key of a job: the device drops packets with another one.
pub(super) fn qkey(key: &JobKey) -> u32 {
    // The high bit marks keys that only the system may use.
    (key.tag(b"udrv Q_Key") as u32 & 0x7fff_ffff).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: JobKey = JobKey::from_bytes([3; 16]);
    const OTHER: JobKey = JobKey::from_bytes([4; 16]);

    fn place() -> Place {
        Place { network: Network::Roce, mtu: 4096, number: 0x12_3456, lid: 9, gid: [7; 16] }
    }

    fn hello() -> [u8; HELLO_LEN] {
        Hello {
            kind: HelloKind::Init,
            established: false,
            version: 1,
            version_min: 1,
            datagram_max: 1472,
            features: 0,
            connection: 3,
            answered: 0,
            credit: 5,
            life: 6,
            nonce: 7,
            echo: 8,
            address: Address::from_text("10.0.0.1:7471").unwrap(),
            dest: 9,
            dest_port: 10,
            rank: 0,
            tag: 11,
        }
        .encode()
    }

    #[test]
    fn a_trailer_is_read_by_its_job_only() {
        let bytes = with_trailer(&KEY, &hello(), &place()).unwrap();
        let address = Address::from_text("10.0.0.1:7471").unwrap();
        assert_eq!(read_trailer(&KEY, &bytes), Some((address, place())));
        assert_eq!(read_trailer(&OTHER, &bytes), None);
        assert_eq!(Hello::decode(&bytes), Hello::decode(&hello()), "others read it as it was");
        assert_eq!(read_trailer(&KEY, &hello()), None);
        assert_eq!(with_trailer(&KEY, &[0; 1200], &place()), None);
        assert!(is_greeting(&hello()) && !is_greeting(&[1; HELLO_LEN]));
        assert!(!is_greeting(&[&hello()[..], &[0; 1400]].concat()), "of the path");
    }

    #[test]
    fn a_call_is_read_by_its_job_only() {
        for kind in [CallKind::Ping, CallKind::Pong, CallKind::News] {
            let address = Address::from_text("[fe80::1%3]:9").unwrap();
            let call = Call { kind, nonce: 77, address, place: place() };
            let bytes = call.encode(&KEY);
            assert_eq!(Call::decode(&KEY, &bytes), Some(call));
            for longest in [0, 256, 4096] {
                let padded = call.padded(&KEY, longest);
                assert_eq!(padded.len(), longest.max(bytes.len()));
                assert_eq!(Call::decode(&KEY, &padded), Some(call));
            }
            assert_eq!(Call::decode(&OTHER, &bytes), None);
            assert_eq!(read_trailer(&KEY, &bytes), None);
            assert!(Hello::decode(&bytes).is_none(), "and is no handshake packet");
        }
    }

    #[test]
    fn the_queue_keys_of_jobs_differ() {
        assert_ne!(qkey(&KEY), qkey(&OTHER));
        assert_eq!((qkey(&KEY) >> 31, qkey(&OTHER) >> 31), (0, 0));
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_noticed(at in 0usize..CALL_LEN, bit in 0u8..8, nonce in any::<u64>()) {
            let address = Address::from_text("10.0.0.1:7471").unwrap();
            let kind = CallKind::Ping;
            let mut call = Call { kind, nonce, address, place: place() }.encode(&KEY);
            call[at] ^= 1 << bit;
            prop_assert_eq!(Call::decode(&KEY, &call), None);
        }

        #[test]
        fn any_bytes_are_harmless(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = bytes;
            for magic in [false, true] {
                if magic && bytes.len() > 4 {
                    bytes[..4].copy_from_slice(&MAGIC);
                }
                prop_assert_eq!(Call::decode(&KEY, &bytes), None);
                prop_assert_eq!(read_trailer(&KEY, &bytes), None);
                is_greeting(&bytes);
                Place::decode(&bytes);
            }
        }
    }
}
