//! The format of a stream (PROTOCOL.md §7.12): a greeting, then frames, each a header of fixed length and its payload.

#![forbid(unsafe_code)]

/// First bytes of a greeting.
const MAGIC: [u8; 4] = *b"UDST";
/// The version of this format.
const VERSION: u16 = 1;

/// Length of a greeting, bytes, and offset of its tag, which covers all before it.
pub(super) const GREETING_LEN: usize = 24;
pub(super) const GREETING_TAG_AT: usize = 16;
/// Length of a frame's header, bytes, and offset of its tag, which covers all before it.
pub(super) const HEADER_LEN: usize = 64;
pub(super) const HEADER_TAG_AT: usize = 56;
/// Longest message header in a frame, bytes.
pub(super) const MESSAGE_HEADER_MAX: usize = 32;
/// Bytes of its longest frame that a stream keeps room for once the frame is gone.
pub(super) const KEPT: usize = 64 * 1024;
/// Longest payload of a frame, bytes.
pub(crate) const PAYLOAD_MAX: usize = 512 * 1024;

/// The first bytes of a stream: names the connection it belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Greeting {
    /// The receiver's number of the connection that the stream belongs to.
    pub(super) dest: u32,
    /// Streams of one endpoint have rising numbers.
    pub(super) number: u32,
    pub(super) tag: u64,
}

/// The header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    /// Bytes of payload.
    pub(super) len: usize,
    /// Messages that left as datagrams before this frame; it is ordered after them.
    pub(super) after: u64,
    /// Number of the frame in its stream, from 0.
    pub(super) sequence: u64,
    message: [u8; MESSAGE_HEADER_MAX],
    message_len: usize,
    pub(super) tag: u64,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Concatenates `parts`.
fn fill<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
    let mut bytes = [0; N];
    for (to, from) in bytes.iter_mut().zip(parts.iter().flat_map(|part| part.iter())) {
        *to = *from;
    }
    bytes
}

impl Greeting {
    pub(super) fn encode(&self) -> [u8; GREETING_LEN] {
        fill(&[
            &MAGIC,
            &VERSION.to_le_bytes(),
            &[0; 2],
            &self.dest.to_le_bytes(),
            &self.number.to_le_bytes(),
            &self.tag.to_le_bytes(),
        ])
    }

    /// The bytes that its tag covers.
    pub(super) fn signed(&self) -> [u8; GREETING_TAG_AT] {
        fill(&[&self.encode()])
    }

    /// `None` if no udrv of this version sends these bytes.
    pub(super) fn decode(bytes: &[u8; GREETING_LEN]) -> Option<Self> {
        let known = bytes.starts_with(&MAGIC) && bytes.get(4..6)? == VERSION.to_le_bytes();
        let (dest, number, tag) =
            (u32_at(bytes, 8)?, u32_at(bytes, 12)?, u64_at(bytes, GREETING_TAG_AT)?);
        known.then_some(Self { dest, number, tag })
    }
}

impl Header {
    /// `None` if `message` or the payload is too long for a frame.
    pub(super) fn new(message: &[u8], len: usize, after: u64, sequence: u64) -> Option<Self> {
        if message.len() > MESSAGE_HEADER_MAX || len > PAYLOAD_MAX {
            return None;
        }
        let message_len = message.len();
        Some(Self { len, after, sequence, message: fill(&[message]), message_len, tag: 0 })
    }

    /// The message's header.
    pub(super) fn message(&self) -> &[u8] {
        self.message.get(..self.message_len).unwrap_or(&[])
    }

    pub(super) fn encode(&self) -> [u8; HEADER_LEN] {
        fill(&[
            &(self.len as u32).to_le_bytes(),
            &[self.message_len as u8, 0, 0, 0],
            &self.after.to_le_bytes(),
            &self.sequence.to_le_bytes(),
            &self.message,
            &self.tag.to_le_bytes(),
        ])
    }

    /// `None` if no udrv of this version sends these bytes.
    pub(super) fn decode(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let len = u32_at(bytes, 0)? as usize;
        let message_len = usize::from(*bytes.get(4)?);
        let message = bytes.get(24..24 + MESSAGE_HEADER_MAX)?.try_into().ok()?;
        let (after, sequence) = (u64_at(bytes, 8)?, u64_at(bytes, 16)?);
        let tag = u64_at(bytes, HEADER_TAG_AT)?;
        let possible = len <= PAYLOAD_MAX && message_len <= MESSAGE_HEADER_MAX;
        possible.then_some(Self { len, after, sequence, message, message_len, tag })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_and_greetings_survive_the_wire(
            message in prop::collection::vec(any::<u8>(), 0..=MESSAGE_HEADER_MAX),
            len in 0..=PAYLOAD_MAX,
            numbers in any::<(u64, u64, u64, u32, u32)>(),
        ) {
            let (after, sequence, tag, dest, number) = numbers;
            let header = Header { tag, ..Header::new(&message, len, after, sequence).unwrap() };
            prop_assert_eq!(Header::decode(&header.encode()), Some(header));
            prop_assert_eq!(header.message(), &message[..]);
            let greeting = Greeting { dest, number, tag };
            prop_assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
        }

        #[test]
        fn any_bytes_are_harmless(bytes in any::<[u8; HEADER_LEN]>(), other in any::<[u8; 24]>()) {
            if let Some(header) = Header::decode(&bytes) {
                prop_assert!(header.len <= PAYLOAD_MAX);
                prop_assert!(header.message().len() <= MESSAGE_HEADER_MAX);
            }
            let _ = Greeting::decode(&other);
        }
    }

    #[test]
    fn what_is_too_long_is_no_frame() {
        assert_eq!(Header::new(&[0; MESSAGE_HEADER_MAX + 1], 1, 0, 0), None);
        assert_eq!(Header::new(&[], PAYLOAD_MAX + 1, 0, 0), None);
    }
}
