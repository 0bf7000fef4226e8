//! What two endpoints say to each other to make a channel and to end it (PROTOCOL.md §7.17). Decoding takes any
//! bytes; the machine below has proven whose they are.

use super::super::introduction::{PLACE_LEN, Place};
use super::Ring;

/// First byte of such a message.
pub(crate) const EAGER_CONTROL: u8 = 0xf4;
/// Bytes of one.
pub(crate) const EAGER_LEN: usize = 64;
/// What stands where in a ring: of another layout nobody hears.
const LAYOUT: u8 = 3;
/// Where the parts stand.
const ID_AT: usize = 4;
const PSN_AT: usize = 8;
const PLACE_AT: usize = 12;
const RING_AT: usize = PLACE_AT + PLACE_LEN;

/// A message as it is sent.
pub(crate) type Control = [u8; EAGER_LEN];

/// One end of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::transport::net::verbs) struct End {
    /// Where its queue pair is.
    pub(super) place: Place,
    /// Number of its first packet; 24 bits.
    pub(super) psn: u32,
    pub(super) ring: Ring,
}

/// One message. Each names the channel that it is about, by the number that the one who asked has chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Message {
    /// Let us make a channel; this is my end.
    Ask(u32, End),
    /// Agreed; this is mine, and I look at its ring.
    Ready(u32, End),
    /// So do I.
    Go(u32),
    /// Not now, or no more.
    Over(u32),
}

fn put(bytes: &mut [u8], at: usize, part: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at + part.len()) {
        to.copy_from_slice(part);
    }
}

impl Message {
    pub(super) fn encode(&self) -> Control {
        let (kind, id, end) = match self {
            Self::Ask(id, end) => (1, id, Some(end)),
            Self::Ready(id, end) => (2, id, Some(end)),
            Self::Go(id) => (3, id, None),
            Self::Over(id) => (4, id, None),
        };
        let mut bytes = [0; EAGER_LEN];
        put(&mut bytes, 0, &[EAGER_CONTROL, kind, LAYOUT]);
        put(&mut bytes, ID_AT, &id.to_le_bytes());
        if let Some(end) = end {
            put(&mut bytes, PSN_AT, &end.psn.to_le_bytes());
            put(&mut bytes, PLACE_AT, &end.place.encode());
            put(&mut bytes, RING_AT, &end.ring.addr.to_le_bytes());
            put(&mut bytes, RING_AT + 8, &end.ring.rkey.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &Control = bytes.try_into().ok()?;
        let [EAGER_CONTROL, kind, LAYOUT, 0, rest @ ..] = bytes else { return None };
        let id = u32::from_le_bytes(*rest.first_chunk()?);
        Some(match kind {
            1 => Self::Ask(id, End::decode(bytes)?),
            2 => Self::Ready(id, End::decode(bytes)?),
            3 => Self::Go(id),
            4 => Self::Over(id),
            _ => return None,
        })
    }
}

impl End {
    fn decode(bytes: &Control) -> Option<Self> {
        let u32_at = |at| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        Some(Self {
            place: Place::decode(bytes.get(PLACE_AT..)?)?,
            psn: u32_at(PSN_AT)? & 0x00ff_ffff,
            ring: Ring {
                addr: u64::from_le_bytes(*bytes.get(RING_AT..)?.first_chunk()?),
                rkey: u32_at(RING_AT + 8)?,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::introduction::Network;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let place = Place { network: Network::Roce, mtu: 4096, number: 17, lid: 3, gid: [9; 16] };
        let end =
            End { place, psn: 0x12_3456, ring: Ring { addr: u64::MAX - 7, rkey: 0x8000_0001 } };
        let all = [Message::Ask(1, end), Message::Ready(2, end), Message::Go(3), Message::Over(4)];
        for message in all {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        let mut wrong = Message::Go(1).encode();
        wrong[1] = 5;
        assert_eq!(Message::decode(&wrong), None);
        assert_eq!(Message::decode(&Message::Go(1).encode()[1..]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_harmless(
            kind in 0u8..6,
            bytes in proptest::collection::vec(any::<u8>(), EAGER_LEN - 2),
        ) {
            let _ = Message::decode(&bytes);
            let _ = Message::decode(&[&[EAGER_CONTROL, kind][..], &bytes].concat());
        }
    }
}
