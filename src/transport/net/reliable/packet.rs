//! The datagrams of the reliable layer (PROTOCOL.md §7). Decoding accepts any bytes and fails only with `None`; results
//! are checked for length only. A packet prints itself as a readable line.

use super::tag::{BlockHash, SessionKey};
use crate::transport::Address;
use crate::transport::JobKey;
use std::fmt;

/// First bytes of a handshake packet.
pub(crate) const MAGIC: [u8; 4] = *b"UDRV";
/// The protocol version of this endpoint.
pub(crate) const VERSION: u16 = 1;
/// The oldest version that this endpoint understands.
pub(crate) const VERSION_MIN: u16 = 1;

/// Bytes of a handshake packet.
pub(crate) const HELLO_LEN: usize = 88;
/// Offset of its tag, which covers all before it.
pub(crate) const HELLO_TAG_AT: usize = 80;
/// Bytes of the header of a packet within a connection.
pub(crate) const HEADER_LEN: usize = 40;
/// Offset of its tag, which covers all before it and all after it.
pub(crate) const TAG_AT: usize = 32;
/// Most 64-bit words of selective acknowledgement.
pub(crate) const SACK_WORDS: usize = 16;
/// Bytes in front of a frame, in a packet with data.
pub(crate) const FRAME_LEN: usize = 4;
/// The same for the first frame of a message of several frames.
pub(crate) const FIRST_FRAME_LEN: usize = 8;
/// Unit of `Header::ack_delay`, nanoseconds.
pub(crate) const DELAY_UNIT_NS: u64 = 4096;

/// Longest payload of a message, bytes.
pub(crate) const MESSAGE_MAX: usize = 64 * 1024;
/// Longest datagram that any network carries, bytes: used until a longer one passes (connection/path.rs).
pub(super) const DATAGRAM_START: usize = 1200;
/// Every endpoint takes datagrams of this length, whatever it announces, as IP fragments if necessary. It is below
/// `DATAGRAM_START` because some devices take datagrams of only 1024 bytes. With a much smaller one the longest message
/// would need more packets than there may be buffers.
pub(super) const DATAGRAM_LEAST: usize = 1024;
/// Asks for an immediate acknowledgement.
pub(crate) const ACK_REQUEST: u8 = 1;
/// The sender of this packet is short of memory for payload (PROTOCOL.md §4.7).
pub(crate) const PRESSURE: u8 = 2;
/// `echo` names a transmission.
pub(crate) const HAS_ECHO: u8 = 4;
/// The tag covers the header only: the network protects the rest (PROTOCOL.md §7.13).
pub(crate) const HEADER_ONLY: u8 = 8;

/// Types of packets within a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Frames, numbered by `psn`.
    Data = 1,
    /// Acknowledgement only; `psn` is the next packet that will be sent.
    Ack,
    /// The endpoint closes; `psn` is one after the last packet.
    Close,
}

/// The header of a packet within a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) flags: u8,
    /// 64-bit words of selective acknowledgement behind the header.
    pub(crate) sack_words: u8,
    /// The receiver's number of the connection.
    pub(crate) dest: u32,
    /// Packet sequence number.
    pub(crate) psn: u32,
    /// Number of this transmission: a packet that is sent again has another one.
    pub(crate) transmission: u32,
    /// The next PSN that is expected: all packets before it have arrived.
    pub(crate) ack: u32,
    /// The highest transmission that has arrived.
    pub(crate) echo: u32,
    /// How long ago that transmission arrived, in units of [`DELAY_UNIT_NS`].
    pub(crate) ack_delay: u16,
    /// Packets from `ack` on that the sender of this header has room for.
    pub(crate) credit: u16,
    /// Packets that have arrived with a congestion mark so far.
    pub(crate) marks: u32,
    pub(crate) tag: u64,
}

/// A handshake packet: makes or tests a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) kind: HelloKind,
    /// In an INIT: its sender has established the connection. In an ACCEPT: a copy from the INIT that it answers.
    pub(crate) established: bool,
    /// The version of its sender, and the oldest that it understands.
    pub(crate) version: u16,
    pub(crate) version_min: u16,
    /// Largest datagram that its sender takes, bytes.
    pub(crate) datagram_max: u16,
    /// Features of its sender ([`STREAMS`] and those beside it); in a refusal the reason.
    pub(crate) features: u32,
    /// Its sender's number of the connection.
    pub(crate) connection: u32,
    /// In an ACCEPT the length of the longest INIT that it answers, bytes.
    pub(crate) answered: u16,
    /// Packets that may be sent before the first acknowledgement.
    pub(crate) credit: u16,
    /// Random, odd, one for each incarnation of an endpoint.
    pub(crate) life: u64,
    /// Random, one for each connection.
    pub(crate) nonce: u64,
    /// The peer's nonce, 0 if its sender does not know it.
    pub(crate) echo: u64,
    pub(crate) address: Address,
    /// The receiver's number of the connection, 0 if its sender does not know it.
    pub(crate) dest: u32,
    /// The receiver's port.
    pub(crate) dest_port: u16,
    /// The rank of its sender's process in its job, and one more; 0: none, or one that does not fit.
    pub(crate) rank: u16,
    pub(crate) tag: u64,
}

/// Types of handshake packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HelloKind {
    /// Asks for a connection, or whether it still exists.
    Init = 0x10,
    /// Accepts a connection.
    Accept,
    /// Refuses it: `features` says why.
    Refuse,
    /// Will accept if the INIT comes again with `nonce` as its echo: too many connections are half-open.
    Retry,
}

/// Feature: accepts TCP connections for long messages at the endpoint's port (PROTOCOL.md §7.12).
pub(crate) const STREAMS: u32 = 1;
/// Feature: has a bulk path, and takes the messages that make its connections (PROTOCOL.md §7.14).
pub(crate) const WINDOWS: u32 = 2;
/// Feature: carries out atomic operations (§4.16).
pub(crate) const ATOMICS: u32 = 4;
/// Feature: takes part in collective operations (§4.17).
pub(crate) const COLLECTIVES: u32 = 8;
/// Feature: takes packets with [`HEADER_ONLY`], where the network protects the rest (§7.13).
pub(crate) const HEADER_TAGS: u32 = 16;

/// Reason of a refusal: another version.
pub(crate) const REFUSED_VERSION: u32 = 1;
/// Reason of a refusal: another job key. Such a refusal has no tag that its receiver could check.
pub(crate) const REFUSED_KEY: u32 = 2;

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Copies `from` to `at`; the arrays here are long enough.
fn put(bytes: &mut [u8], at: usize, from: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at + from.len()) {
        to.copy_from_slice(from);
    }
}

impl Header {
    /// The header, and everything behind it.
    #[inline]
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = bytes.split_at_checked(HEADER_LEN)?;
        let kind = match *head.first()? {
            1 => Kind::Data,
            2 => Kind::Ack,
            3 => Kind::Close,
            _ => return None,
        };
        let sack_words = *head.get(2)?;
        if usize::from(sack_words) > SACK_WORDS || rest.len() < usize::from(sack_words) * 8 {
            return None;
        }
        let header = Self {
            kind,
            flags: *head.get(1)?,
            sack_words,
            dest: u32::from_le_bytes(array(head, 4)?),
            psn: u32::from_le_bytes(array(head, 8)?),
            transmission: u32::from_le_bytes(array(head, 12)?),
            ack: u32::from_le_bytes(array(head, 16)?),
            echo: u32::from_le_bytes(array(head, 20)?),
            ack_delay: u16::from_le_bytes(array(head, 24)?),
            credit: u16::from_le_bytes(array(head, 26)?),
            marks: u32::from_le_bytes(array(head, 28)?),
            tag: u64::from_le_bytes(array(head, TAG_AT)?),
        };
        Some((header, rest))
    }

    /// The tag of a packet with the header `signed` and the contents `body`. If the network protects the contents
    /// ([`HEADER_ONLY`]), the tag is over the header and their length. The header contains that flag, so such a tag is
    /// never valid for the other kind.
    #[inline]
    pub(super) fn tag(
        key: &SessionKey,
        blocks: &BlockHash,
        direction: u8,
        signed: &[u8; TAG_AT],
        body: &[u8],
    ) -> u64 {
        let [_, flags, ..] = *signed;
        if flags & HEADER_ONLY == 0 {
            return key.tag(blocks, direction, signed, body);
        }
        key.tag_without(direction, signed, body.len())
    }

    /// The encoded header, with the tag of a packet that has `body` behind it.
    #[inline]
    pub(crate) fn signed(
        &self,
        key: &SessionKey,
        blocks: &BlockHash,
        direction: u8,
        body: &[u8],
    ) -> [u8; HEADER_LEN] {
        let mut bytes = self.encode();
        if let Some((signed, tag)) = bytes.split_first_chunk_mut::<TAG_AT>() {
            let value = Self::tag(key, blocks, direction, signed, body);
            tag.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// The encoded header, with the tag as it is.
    #[inline]
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let mut b = [0; HEADER_LEN];
        put(&mut b, 0, &[self.kind as u8, self.flags, self.sack_words, 0]);
        put(&mut b, 4, &self.dest.to_le_bytes());
        put(&mut b, 8, &self.psn.to_le_bytes());
        put(&mut b, 12, &self.transmission.to_le_bytes());
        put(&mut b, 16, &self.ack.to_le_bytes());
        put(&mut b, 20, &self.echo.to_le_bytes());
        put(&mut b, 24, &self.ack_delay.to_le_bytes());
        put(&mut b, 26, &self.credit.to_le_bytes());
        put(&mut b, 28, &self.marks.to_le_bytes());
        put(&mut b, TAG_AT, &self.tag.to_le_bytes());
        b
    }
}

impl Hello {
    /// `None` for anything but a handshake packet. A packet of another version is decoded as far as all versions agree:
    /// magic, kind, versions, sender's connection, nonce and address.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.get(..4)? != MAGIC || bytes.len() < HELLO_LEN {
            return None;
        }
        let kind = match *bytes.get(4)? {
            0x10 => HelloKind::Init,
            0x11 => HelloKind::Accept,
            0x12 => HelloKind::Refuse,
            0x13 => HelloKind::Retry,
            _ => return None,
        };
        Some(Self {
            kind,
            established: *bytes.get(5)? & 1 != 0,
            version: u16::from_le_bytes(array(bytes, 6)?),
            version_min: u16::from_le_bytes(array(bytes, 8)?),
            datagram_max: u16::from_le_bytes(array(bytes, 10)?),
            features: u32::from_le_bytes(array(bytes, 12)?),
            connection: u32::from_le_bytes(array(bytes, 16)?),
            answered: u16::from_le_bytes(array(bytes, 20)?),
            credit: u16::from_le_bytes(array(bytes, 22)?),
            life: u64::from_le_bytes(array(bytes, 24)?),
            nonce: u64::from_le_bytes(array(bytes, 32)?),
            echo: u64::from_le_bytes(array(bytes, 40)?),
            address: Address::from_wire(bytes.get(48..72)?)?,
            dest: u32::from_le_bytes(array(bytes, 72)?),
            dest_port: u16::from_le_bytes(array(bytes, 76)?),
            rank: u16::from_le_bytes(array(bytes, 78)?),
            tag: u64::from_le_bytes(array(bytes, HELLO_TAG_AT)?),
        })
    }

    /// The encoded packet, with its tag.
    pub(super) fn signed(&self, key: &JobKey) -> [u8; HELLO_LEN] {
        let mut bytes = self.encode();
        let (body, tag) = bytes.split_at_mut(HELLO_TAG_AT);
        tag.copy_from_slice(&key.tag(body).to_le_bytes());
        bytes
    }

    /// The encoded packet, with the tag as it is.
    pub(crate) fn encode(&self) -> [u8; HELLO_LEN] {
        let mut b = [0; HELLO_LEN];
        put(&mut b, 0, &MAGIC);
        put(&mut b, 4, &[self.kind as u8, u8::from(self.established)]);
        put(&mut b, 6, &self.version.to_le_bytes());
        put(&mut b, 8, &self.version_min.to_le_bytes());
        put(&mut b, 10, &self.datagram_max.to_le_bytes());
        put(&mut b, 12, &self.features.to_le_bytes());
        put(&mut b, 16, &self.connection.to_le_bytes());
        put(&mut b, 20, &self.answered.to_le_bytes());
        put(&mut b, 22, &self.credit.to_le_bytes());
        put(&mut b, 24, &self.life.to_le_bytes());
        put(&mut b, 32, &self.nonce.to_le_bytes());
        put(&mut b, 40, &self.echo.to_le_bytes());
        put(&mut b, 48, &self.address.to_wire());
        put(&mut b, 72, &self.dest.to_le_bytes());
        put(&mut b, 76, &self.dest_port.to_le_bytes());
        put(&mut b, 78, &self.rank.to_le_bytes());
        put(&mut b, HELLO_TAG_AT, &self.tag.to_le_bytes());
        b
    }
}

/// The 64-bit number nearest to `near` with the low half `low`. Packets carry only the low half.
#[inline]
pub(super) fn widen(low: u32, near: u64) -> u64 {
    // If it would be negative, the next one above is meant.
    let off = i64::from(low.wrapping_sub(near as u32) as i32);
    near.checked_add_signed(off).unwrap_or_else(|| u64::from(low))
}

/// A fragment of a message, in a packet with data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Frame<'a> {
    /// A message.
    Whole { header: &'a [u8], payload: &'a [u8] },
    /// The beginning of a message with `total` bytes of payload.
    First { total: usize, header: &'a [u8], payload: &'a [u8] },
    /// The next fragment of it.
    More { payload: &'a [u8] },
    /// The last fragment of it.
    Last { payload: &'a [u8] },
}

impl<'a> Frame<'a> {
    /// The first frame of `bytes`, and what follows it.
    #[inline]
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let header_len = usize::from(*bytes.first()?);
        let kind = *bytes.get(1)?;
        let len = usize::from(u16::from_le_bytes(array(bytes, 2)?));
        let at = if kind == 1 { FIRST_FRAME_LEN } else { FRAME_LEN };
        let header = bytes.get(at..at + header_len)?;
        let payload = bytes.get(at + header_len..at + header_len + len)?;
        let rest = bytes.get(at + header_len + len..)?;
        let frame = match kind {
            0 => Self::Whole { header, payload },
            1 => Self::First {
                total: u32::from_le_bytes(array(bytes, 4)?) as usize,
                header,
                payload,
            },
            2 if header_len == 0 => Self::More { payload },
            3 if header_len == 0 => Self::Last { payload },
            _ => return None,
        };
        Some((frame, rest))
    }
}

/// Writes the part of a frame before its payload into `to`: frame bytes and `header`. Returns its length, bytes.
/// `kind`: 0 whole, 1 first (with `total`), 2 more, 3 last.
#[inline]
pub(crate) fn put_frame(to: &mut [u8], kind: u8, header: &[u8], len: usize, total: usize) -> usize {
    put(to, 0, &[header.len() as u8, kind]);
    put(to, 2, &(len as u16).to_le_bytes());
    let mut at = FRAME_LEN;
    if kind == 1 {
        put(to, 4, &(total as u32).to_le_bytes());
        at = FIRST_FRAME_LEN;
    }
    put(to, at, header);
    at + header.len()
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, dest, psn, transmission, ack, credit, .. } = self;
        write!(f, "{kind:?} to {dest:#x}: psn {psn} (transmission {transmission}), ack {ack}")?;
        if self.flags & HAS_ECHO != 0 {
            let us = u64::from(self.ack_delay) * DELAY_UNIT_NS / 1000;
            write!(f, " of transmission {} after {us} us", self.echo)?;
        }
        write!(f, ", credit {credit}, {} sack words, {} marks", self.sack_words, self.marks)?;
        for (bit, name) in
            [(ACK_REQUEST, "ACK_REQUEST"), (PRESSURE, "PRESSURE"), (HEADER_ONLY, "HEADER_ONLY")]
        {
            if self.flags & bit != 0 {
                write!(f, ", {name}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, version, version_min, address, life, nonce, echo, .. } = self;
        write!(
            f,
            "{kind:?} from {address}: version {version} (from {version_min} on), connection {:#x} to {:#x}, life {life:016x}, nonce {nonce:016x}, echo {echo:016x}, datagrams of {} bytes, credit {}",
            self.connection, self.dest, self.datagram_max, self.credit
        )
    }
}

/// Prints any datagram as a line, for the log and for readers of a packet capture.
pub(crate) struct Dump<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Dump<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(hello) = Hello::decode(self.0) {
            return hello.fmt(f);
        }
        let Some((header, rest)) = Header::decode(self.0) else {
            return write!(f, "{} bytes that are no packet", self.0.len());
        };
        header.fmt(f)?;
        let mut frames = rest.get(usize::from(header.sack_words) * 8..).unwrap_or(&[]);
        while let Some((frame, next)) = Frame::decode(frames) {
            match frame {
                Frame::Whole { header, payload } => {
                    write!(f, "; message {}+{}", header.len(), payload.len())?;
                }
                Frame::First { total, header, payload } => {
                    write!(f, "; first {}+{} of {total}", header.len(), payload.len())?;
                }
                Frame::More { payload } => write!(f, "; more {}", payload.len())?,
                Frame::Last { payload } => write!(f, "; last {}", payload.len())?,
            }
            frames = next;
        }
        if !frames.is_empty() {
            write!(f, "; {} bytes that are no frame", frames.len())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            kind: Kind::Data,
            flags: HAS_ECHO | ACK_REQUEST,
            sack_words: 0,
            dest: 0x0102_0304,
            psn: 5,
            transmission: 6,
            ack: 7,
            echo: 8,
            ack_delay: 9,
            credit: 10,
            marks: 11,
            tag: 12,
        }
    }

    fn hello() -> Hello {
        Hello {
            kind: HelloKind::Accept,
            established: true,
            version: 1,
            version_min: 1,
            datagram_max: 1472,
            features: 0,
            connection: 3,
            answered: 4,
            credit: 5,
            life: 6,
            nonce: 7,
            echo: 8,
            address: Address::from_text("10.0.0.1:7471").unwrap(),
            dest: 9,
            dest_port: 10,
            rank: 12,
            tag: 11,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        assert_eq!(Header::decode(&header().encode()), Some((header(), &[][..])));
        assert_eq!(Hello::decode(&hello().encode()), Some(hello()));
        assert_eq!(Header::decode(&hello().encode()), None);
        assert_eq!(Hello::decode(&header().encode()), None);
        let mut bytes = [0; 64];
        let at = put_frame(&mut bytes, 1, b"head", 3, 1000);
        bytes[at..at + 3].copy_from_slice(b"abc");
        let first = Frame::First { total: 1000, header: b"head", payload: b"abc" };
        assert_eq!(Frame::decode(&bytes[..at + 3]), Some((first, &[][..])));
        assert_eq!(Frame::decode(&bytes[..at + 2]), None);
    }

    #[test]
    fn numbers_are_widened_to_the_nearest() {
        assert_eq!(widen(5, 3), 5);
        assert_eq!(widen(1, 0xffff_ffff), 0x1_0000_0001);
        assert_eq!(widen(0xffff_fff0, 0x1_0000_0003), 0xffff_fff0);
        assert_eq!(widen(7, 0x5_0000_0007), 0x5_0000_0007);
        assert_eq!(widen(u32::MAX, 3), u64::from(u32::MAX));
    }

    #[test]
    fn packets_print_themselves() {
        let mut bytes = header().encode().to_vec();
        bytes.resize(100, 0);
        let at = put_frame(&mut bytes[HEADER_LEN..], 0, b"head", 3, 0);
        bytes.truncate(HEADER_LEN + at + 3);
        assert_eq!(
            Dump(&bytes).to_string(),
            "Data to 0x1020304: psn 5 (transmission 6), ack 7 of transmission 8 after 36 us, credit 10, 0 sack words, 11 marks, ACK_REQUEST; message 4+3"
        );
        assert!(
            Dump(&hello().encode())
                .to_string()
                .starts_with("Accept from fi_sockaddr_in://10.0.0.1:7471: version 1")
        );
        assert_eq!(Dump(&[1, 2, 3]).to_string(), "3 bytes that are no packet");
    }

    proptest! {
        #[test]
        fn any_bytes_are_harmless(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Dump(&bytes).to_string();
            let mut kind = bytes.clone();
            if let Some(first) = kind.first_mut() { *first = *first % 3 + 1; }
            let _ = Dump(&kind).to_string();
        }
    }
}
