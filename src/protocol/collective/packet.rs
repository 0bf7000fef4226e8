//! Headers of collective operations: PROTOCOL.md §4.17. All integers are little-endian.

const PART: u8 = 40;
const HELLO: u8 = 41;
const GONE: u8 = 42;
/// Length of a header, bytes.
pub(super) const HEADER_LEN: usize = 32;

/// One header. `group` is the group's name, the same at all members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CollectivePacket {
    /// The payload is the fragment at `offset` of a message of `total` bytes, for operation number `sequence` of the
    /// group, whose kind is `what`.
    Part { group: u64, what: u8, sequence: u32, total: u64, offset: u64 },
    /// The sender waits for the receiver, and has to notice its departure.
    Hello,
    /// This member of the group has departed or failed: an error number.
    Gone { group: u64, member: u32, error: u32 },
}

impl CollectivePacket {
    /// Whether a header is one of a collective operation.
    #[inline]
    pub(crate) fn is_one(header: &[u8]) -> bool {
        header.first().is_some_and(|kind| (PART..=GONE).contains(kind))
    }

    /// Encodes the header.
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let (kind, what, word, fields) = match *self {
            Self::Part { group, what, sequence, total, offset } => {
                (PART, what, sequence, [group, total, offset])
            }
            Self::Hello => (HELLO, 0, 0, [0; 3]),
            Self::Gone { group, member, error } => (GONE, 0, member, [group, u64::from(error), 0]),
        };
        let mut bytes = [0; HEADER_LEN];
        let head = [kind, what, 0, 0].into_iter().chain(word.to_le_bytes());
        let all = head.chain(fields.into_iter().flat_map(u64::to_le_bytes));
        for (to, from) in bytes.iter_mut().zip(all) {
            *to = from;
        }
        bytes
    }

    /// Decodes a header. `None`: bytes that no udrv of this version sends.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let ([kind, what, ..], rest) = bytes.split_first_chunk::<4>()?;
        let (word, rest) = rest.split_first_chunk::<4>()?;
        let word = u32::from_le_bytes(*word);
        let (group, rest) = rest.split_first_chunk::<8>()?;
        let (second, rest) = rest.split_first_chunk::<8>()?;
        let (third, _) = rest.split_first_chunk::<8>()?;
        let [group, second, third] = [group, second, third].map(|field| u64::from_le_bytes(*field));
        Some(match *kind {
            PART => Self::Part { group, what: *what, sequence: word, total: second, offset: third },
            HELLO => Self::Hello,
            GONE => Self::Gone { group, member: word, error: u32::try_from(second).ok()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packets_survive_the_wire(a in any::<(u64, u8, u32, u64, u64)>(), error in any::<u32>()) {
            let (group, what, sequence, total, offset) = a;
            let packets = [
                CollectivePacket::Part { group, what, sequence, total, offset },
                CollectivePacket::Hello,
                CollectivePacket::Gone { group, member: sequence, error },
            ];
            for packet in packets {
                let wire = packet.encode();
                prop_assert!(CollectivePacket::is_one(&wire));
                prop_assert_eq!(CollectivePacket::decode(&wire), Some(packet));
                prop_assert_eq!(CollectivePacket::decode(&wire[..31]), None);
            }
        }

        #[test]
        fn any_bytes_are_harmless(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = CollectivePacket::decode(&bytes);
        }
    }
}
