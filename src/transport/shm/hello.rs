//! The handshake of a shared-memory link, PROTOCOL.md §2: a connect request (`Hello`) with the sender's segment,
//! answered by a connect reply (`Welcome`), or by a reject with a reason.

use super::layout::Geometry;
use crate::sys::Errno;
use crate::sys::bell::BellAddress;
use crate::transport::address::{self, Address};
use std::fmt;

/// Version of the segment layout and of the packets inside it.
pub(super) const VERSION: u16 = 1;
/// First bytes of every handshake message.
const MAGIC: [u8; 4] = *b"UDRV";
const KIND_HELLO: u16 = 1;
const KIND_REJECT: u16 = 2;
const KIND_WELCOME: u16 = 3;
/// Bytes of every handshake message; zero-padded.
pub(super) const LEN: usize = 96;

/// The connect request: the first message of a link, from the side that will send over it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Hello {
    /// Layout version the sender speaks.
    pub(super) version: u16,
    /// The sender's endpoint address.
    pub(super) source: Address,
    /// Identifies this incarnation of the sender's endpoint.
    pub(super) nonce: u64,
    /// Sizes of the segment that travels beside this message.
    pub(super) geometry: Geometry,
    /// Address, in the sender's memory, of two words for probing cross-memory attach. The first
    /// holds `nonce`; a peer may write `nonce` over the second.
    pub(super) probe_addr: u64,
    /// Optional features of the sender.
    pub(super) features: u32,
    /// Identifies the segment in messages whose payload lies in one of its payload buffers: 24 random bits.
    pub(super) identity: u32,
    /// Fingerprint of the job key; 0 if none was given.
    pub(super) mark: u64,
    /// The sender's doorbell.
    pub(super) bell: BellAddress,
    /// The rank of the sender's process in its job, and one more; 0: none.
    pub(super) rank: u32,
}

/// The sender takes part in split copies of its messages when asked (PROTOCOL.md §4.13).
pub(super) const ASSISTS: u32 = 1;

/// The sender can use direct RMA (PROTOCOL.md §4.18).
pub(super) const REACHES: u32 = 8;

/// The sender supports recycled payload buffers (PROTOCOL.md §2.5).
pub(super) const PLACES: u32 = 16;

/// The receiver carries out atomic operations (PROTOCOL.md §4.16).
pub(super) const ATOMICS: u32 = 2;

/// The receiver takes part in collective operations (PROTOCOL.md §4.17).
pub(super) const COLLECTIVES: u32 = 4;

/// The receiver follows laps through the slots that end early (PROTOCOL.md §2.5).
pub(super) const LAPS: u32 = 64;

/// The connection has to stay open: the side that says so does not see the other's process id.
pub(super) const STAYS: u32 = 32;

/// Why a link was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RejectReason {
    /// Versions differ; `detail` is the receiver's.
    Version,
    /// The sender belongs to another user.
    User,
    /// The handshake message is malformed.
    Malformed,
    /// The receiver lacks memory or descriptors; `detail` is its errno.
    Resources,
    /// The job keys differ.
    Key,
}

/// The answer to a connect request that is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Reject {
    pub(super) reason: RejectReason,
    pub(super) detail: u32,
}

impl Reject {
    /// The error of operations to a peer that sent this reject.
    pub(super) fn errno(&self) -> Errno {
        Errno(match self.reason {
            RejectReason::Key => libc::EKEYREJECTED,
            RejectReason::User => libc::EPERM,
            RejectReason::Version => libc::EPROTONOSUPPORT,
            RejectReason::Resources if (1..4096).contains(&self.detail) => self.detail as i32,
            RejectReason::Malformed | RejectReason::Resources => libc::ECONNREFUSED,
        })
    }
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reason, detail } = self;
        match reason {
            RejectReason::Version => write!(f, "versions of udrv differ, the other side's is {detail}"),
            RejectReason::User => write!(f, "it is of another user, {detail}"),
            RejectReason::Malformed => f.write_str("its connect request makes no sense"),
            RejectReason::Resources => {
                write!(f, "no memory or descriptors: {}", Errno(*detail as i32))
            }
            RejectReason::Key => {
                f.write_str("it has another job key (FI_UDRV_JOB_KEY, the key file, auth_key; fi_udrv(7), Job keys)")
            }
        }
    }
}

/// The connect reply: the answer to a connect request that is accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Welcome {
    /// Identifies this incarnation of the receiver's endpoint.
    pub(super) nonce: u64,
    /// Optional features of the receiver.
    pub(super) features: u32,
    /// Of the receiver's words, if their file travels beside this message: their offset in it, and the number of the
    /// link's bit.
    pub(super) hint: (u32, u32),
    /// The rank of the receiver's process, as in the connect request.
    pub(super) rank: u32,
}

struct Writer {
    bytes: [u8; LEN],
    at: usize,
}

impl Writer {
    fn new(kind: u16) -> Self {
        let mut writer = Self { bytes: [0; LEN], at: 0 };
        writer.put(&MAGIC).put(&kind.to_le_bytes());
        writer
    }

    fn put(&mut self, from: &[u8]) -> &mut Self {
        for (to, b) in self.bytes.iter_mut().skip(self.at).zip(from) {
            *to = *b;
        }
        self.at += from.len();
        self
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; LEN] {
        let mut w = Writer::new(KIND_HELLO);
        w.put(&self.version.to_le_bytes())
            .put(&self.nonce.to_le_bytes())
            .put(&self.probe_addr.to_le_bytes())
            .put(&self.geometry.slots.to_le_bytes())
            .put(&self.geometry.bulk.to_le_bytes())
            .put(&self.source.to_wire())
            .put(&self.features.to_le_bytes())
            .put(&(u32::from(self.geometry.places) | self.identity << 8).to_le_bytes())
            .put(&self.mark.to_le_bytes());
        for word in self.bell.to_words() {
            w.put(&word.to_le_bytes());
        }
        w.put(&self.rank.to_le_bytes());
        w.bytes
    }

    /// Reads only the version, from a request of any version, so that a newer one is refused with reason `Version`.
    pub(super) fn version(bytes: &[u8]) -> Option<u16> {
        let mut r = Reader(bytes);
        (r.take::<4>()? == MAGIC && r.u16()? == KIND_HELLO).then(|| r.u16())?
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let version = Self::version(bytes)?;
        let mut r = Reader(bytes.get(8..)?);
        let nonce = r.u64()?;
        let probe_addr = r.u64()?;
        let (slots, bulk) = (r.u32()?, r.u32()?);
        let source = Address::from_wire(&r.take::<{ address::WIRE_LEN }>()?)?;
        let features = r.u32()?;
        let places = r.u32()?;
        let (identity, places) = (places >> 8, places as u8);
        let geometry = Geometry { slots, bulk, places };
        let mark = r.u64()?;
        let bell = BellAddress::from_words([r.u64()?, r.u64()?])?;
        let rank = r.u32()?;
        (geometry.is_sane() && source.port() != 0).then_some(Self {
            version,
            source,
            nonce,
            geometry,
            probe_addr,
            features,
            identity,
            mark,
            bell,
            rank,
        })
    }
}

impl Welcome {
    pub(super) fn encode(self) -> [u8; LEN] {
        let mut w = Writer::new(KIND_WELCOME);
        w.put(&VERSION.to_le_bytes())
            .put(&self.nonce.to_le_bytes())
            .put(&self.features.to_le_bytes())
            .put(&self.hint.0.to_le_bytes())
            .put(&self.hint.1.to_le_bytes())
            .put(&self.rank.to_le_bytes());
        w.bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        if r.take::<4>()? != MAGIC || r.u16()? != KIND_WELCOME {
            return None;
        }
        let _version = r.u16()?;
        let (nonce, features, hint) = (r.u64()?, r.u32()?, (r.u32()?, r.u32()?));
        Some(Self { nonce, features, hint, rank: r.u32()? })
    }
}

impl Reject {
    pub(super) fn encode(self) -> [u8; LEN] {
        let code: u16 = match self.reason {
            RejectReason::Version => 1,
            RejectReason::User => 2,
            RejectReason::Malformed => 3,
            RejectReason::Resources => 4,
            RejectReason::Key => 5,
        };
        let mut w = Writer::new(KIND_REJECT);
        w.put(&code.to_le_bytes()).put(&self.detail.to_le_bytes());
        w.bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        if r.take::<4>()? != MAGIC || r.u16()? != KIND_REJECT {
            return None;
        }
        let reason = match r.u16()? {
            1 => RejectReason::Version,
            2 => RejectReason::User,
            4 => RejectReason::Resources,
            5 => RejectReason::Key,
            _ => RejectReason::Malformed,
        };
        Some(Self { reason, detail: r.u32()? })
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::LAVISH;
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello {
            version: VERSION,
            source: Address::from_text("10.1.2.3:4567").unwrap(),
            nonce: 0x1122_3344_5566_7788,
            geometry: LAVISH,
            probe_addr: 0x7fff_0000_1000,
            features: ASSISTS,
            identity: 0x00ab_cdef,
            mark: 0x99aa_bbcc_ddee_ff00,
            bell: BellAddress::from_words([0x31_3030_3030, 0x0123_4567_89ab_cdef]).unwrap(),
            rank: 4,
        }
    }

    #[test]
    fn messages_survive_their_bytes() {
        assert_eq!(Hello::decode(&hello().encode()), Some(hello()));
        for reason in [
            RejectReason::Version,
            RejectReason::User,
            RejectReason::Malformed,
            RejectReason::Resources,
            RejectReason::Key,
        ] {
            let reject = Reject { reason, detail: 7 };
            assert_eq!(Reject::decode(&reject.encode()), Some(reject));
            assert_eq!(Hello::decode(&reject.encode()), None);
        }
        assert_eq!(Reject::decode(&hello().encode()), None);
        let welcome = Welcome { nonce: 9, features: 2, hint: (4096, 77), rank: 5 };
        assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
        assert_eq!(Welcome::decode(&hello().encode()), None);
    }

    #[test]
    fn insane_sizes_are_refused() {
        let mut bad = hello();
        bad.geometry.slots = 3;
        assert_eq!(Hello::decode(&bad.encode()), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_harmless(bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            let _ = Hello::decode(&bytes);
            let _ = Reject::decode(&bytes);
            let _ = Welcome::decode(&bytes);
            let mut prefixed = b"UDRV\x01\x00\x01\x00".to_vec();
            prefixed.extend(bytes);
            let _ = Hello::decode(&prefixed);
        }
    }
}
