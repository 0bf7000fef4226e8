//! Authentication of datagrams: only a process of the job can make, change or repeat one. Where a device's network
//! protects the payload, the tag covers the header and the length ([`HEADER_ONLY`](super::packet::HEADER_ONLY)). Why a
//! UD queue pair may leave the payload out is explained at [`crate::transport::net::link::Link::is_sound`].
//!
//! A tag is SipHash-2-4 under a key that only the job has. SipHash moves 2 GB/s, too little for payload. Payload of
//! more than a few words is condensed first by a faster hash ([`BlockHash`]), which is as strong as long as its results
//! stay secret; SipHash hides them.
//!
//! Measured on one core of a 2026 Xeon, SSE2 only, header of 40 bytes: 29 ns without payload, 41 ns with 64 bytes, 135
//! ns with 1472, 640 ns with 8972; 14 GB/s for long ones.

#![forbid(unsafe_code)]

mod block_hash;
mod siphash;

pub(crate) use block_hash::BlockHash;
use siphash::SipHash;
use std::fmt;

impl BlockHash {
    /// The hash that all processes with this job key share.
    pub(crate) fn new(key: &JobKey) -> Self {
        Self::of_words(|n| u128::from_le_bytes(key.derive([Purpose::BlockHash as u64, n])))
    }
}

/// 128 bits that only the processes of a job share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct JobKey([u8; 16]);

/// The purpose of a derived value. It is the first word of the function's input, so a value made for one purpose never
/// serves another.
#[derive(Clone, Copy)]
enum Purpose {
    Handshake = 1,
    Session = 2,
    BlockHash = 3,
    RvModule = 4,
    Mark = 5,
}

/// The public key that job keys are derived with.
const PUBLIC: [u8; 16] = *b"udrv job key 1  ";

impl JobKey {
    /// A key of these bits.
    pub(crate) const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The key that `secret`, of any length, makes. `kind` separates secrets that come from different places.
    ///
    /// SipHash does not prevent finding two secrets with one key. That does no harm: a user that can choose the secret
    /// has the key anyway. What counts is that no wrong secret happens to make the key: its 128 bits ensure that, and
    /// they never leave the process.
    pub(crate) fn from_secret(kind: u64, secret: &[u8]) -> Self {
        let mut state = SipHash::new_128(&PUBLIC);
        state.word(kind);
        state.word(secret.len() as u64);
        Self(state.finish_128_with(secret))
    }

    /// Tag of a handshake packet.
    pub(crate) fn tag(&self, bytes: &[u8]) -> u64 {
        let mut state = SipHash::new(&self.0);
        state.word(Purpose::Handshake as u64);
        state.finish_with(bytes)
    }

    /// The key of one connection, the same on both sides. Each side is identified by its endpoint's incarnation and its
    /// nonce of this connection.
    pub(crate) fn session(&self, mine: (u64, u64), theirs: (u64, u64)) -> SessionKey {
        let (first, second) = if mine <= theirs { (mine, theirs) } else { (theirs, mine) };
        let words = [Purpose::Session as u64, first.0, first.1, second.0, second.1];
        SessionKey(self.derive(words))
    }

    /// The job's identifier for the kernel's rv module, which shows it to other nodes' modules. It reveals nothing of
    /// the key.
    pub(crate) fn for_rv(&self) -> [u8; 16] {
        self.derive([Purpose::RvModule as u64])
    }

    /// Tells keys of one user's processes on one node apart. Not 0, and reveals nothing of the key.
    pub(crate) fn mark(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.derive([Purpose::Mark as u64]);
        u64::from_le_bytes([a, b, c, d, e, f, g, h]).max(1)
    }

    fn derive(&self, words: impl IntoIterator<Item = u64>) -> [u8; 16] {
        let mut state = SipHash::new_128(&self.0);
        for word in words {
            state.word(word);
        }
        state.finish_128_with(&[])
    }
}

impl fmt::Debug for JobKey {
    /// Does not print the key: a log must not reveal it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey")
    }
}

/// The key of one connection: [`JobKey::session`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionKey([u8; 16]);

/// Payload up to this many bytes goes through SipHash itself, which is faster then.
const DIRECT_MAX: usize = 32;

/// Usual length of the signed part of a header, bytes.
const USUAL: usize = 32;

impl SessionKey {
    /// Tag of a packet: over its header and payload, their lengths, and `direction`. The direction is 0 for packets
    /// from the side whose (incarnation, connection nonce) is smaller, else 1, so that a packet sent back to its sender
    /// fails. `blocks` is of the same job key.
    pub(crate) fn tag(
        &self,
        blocks: &BlockHash,
        direction: u8,
        header: &[u8],
        payload: &[u8],
    ) -> u64 {
        let mut state = self.begin(direction, header, payload.len());
        if payload.len() <= DIRECT_MAX {
            state.padded(payload);
        } else {
            blocks.digest(payload, |word| state.word(word));
        }
        state.finish()
    }

    /// Tag of a packet over its header and the length of its payload, which the network protects.
    #[inline]
    pub(super) fn tag_without(&self, direction: u8, header: &[u8], payload: usize) -> u64 {
        self.begin(direction, header, payload).finish()
    }

    /// The common beginning of all tags: the direction, the lengths and the header.
    #[inline(always)]
    fn begin(&self, direction: u8, header: &[u8], payload: usize) -> SipHash {
        let mut state = SipHash::new(&self.0);
        // Headers are shorter than 16 MiB, payloads than 4 GiB.
        let lengths = (header.len() as u64) << 8 | (payload as u64) << 32;
        state.word(u64::from(direction) | lengths);
        match header.first_chunk::<USUAL>() {
            // Nearly always, and then without a loop.
            Some(words) if header.len() == USUAL => state.words(words),
            _ => state.padded(header),
        }
        state
    }
}

impl fmt::Debug for SessionKey {
    /// Without the bits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKey")
    }
}

/// True if two tags are equal. Comparing one word takes the same time wherever they differ.
pub(crate) fn same(a: u64, b: u64) -> bool {
    std::hint::black_box(a ^ b) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: JobKey = JobKey([0x42; 16]);
    const CLIENT: (u64, u64) = (7, 1);
    const SERVER: (u64, u64) = (5, 9);

    /// A session's tag on packets of one connection from its client.
    fn tag(header: &[u8], payload: &[u8]) -> u64 {
        KEY.session(CLIENT, SERVER).tag(&BlockHash::new(&KEY), 1, header, payload)
    }

    #[test]
    fn both_sides_have_the_same_key_and_directions_differ() {
        assert_eq!(KEY.session(CLIENT, SERVER), KEY.session(SERVER, CLIENT));
        let (key, blocks) = (KEY.session(CLIENT, SERVER), BlockHash::new(&KEY));
        assert_ne!(key.tag(&blocks, 0, b"header", b""), key.tag(&blocks, 1, b"header", b""));
    }

    #[test]
    fn every_nonce_and_the_job_key_matter() {
        let key = KEY.session(CLIENT, SERVER);
        assert_ne!(key, KEY.session((CLIENT.0 + 1, CLIENT.1), SERVER));
        assert_ne!(key, KEY.session((CLIENT.0, CLIENT.1 + 1), SERVER));
        assert_ne!(key, KEY.session(CLIENT, (SERVER.0 + 1, SERVER.1)));
        assert_ne!(key, KEY.session(CLIENT, (SERVER.0, SERVER.1 + 1)));
        let other = JobKey([0x43; 16]);
        assert_ne!(key, other.session(CLIENT, SERVER));
        assert_ne!(KEY.tag(b"hello"), other.tag(b"hello"));
        let payload = [1; 100];
        let (mine, strange) = (BlockHash::new(&KEY), BlockHash::new(&other));
        assert_ne!(key.tag(&mine, 0, b"", &payload), key.tag(&strange, 0, b"", &payload));
    }

    #[test]
    fn moved_bytes_are_changed_bytes() {
        // Blocks and lanes in another order, bytes moved from header to payload, zeros at the end.
        let mut payload: Vec<u8> = (0..4096u32).map(|i| (i / 4 + i / 1024) as u8).collect();
        let before = tag(b"12345678", &payload);
        payload.rotate_left(1024);
        assert_ne!(tag(b"12345678", &payload), before);
        payload.rotate_left(8);
        assert_ne!(tag(b"12345678", &payload), before);
        assert_ne!(tag(b"12345678abcdefgh", b""), tag(b"12345678", b"abcdefgh"));
        let (short, long) = (vec![0; 1500], vec![0; 1501]);
        assert_ne!(tag(b"", &short), tag(b"", &long));
    }

    #[test]
    fn a_key_prints_nothing_of_itself() {
        assert_eq!(format!("{KEY:?} {:?}", KEY.session(CLIENT, SERVER)), "JobKey SessionKey");
    }

    proptest! {
        #[test]
        fn any_flipped_bit_changes_the_tag(
            header in proptest::collection::vec(any::<u8>(), 1..80),
            payload in proptest::collection::vec(any::<u8>(), 1..2600),
            at in any::<proptest::sample::Index>(),
            bit in 0u8..8,
        ) {
            let before = tag(&header, &payload);
            let (mut h, mut p) = (header.clone(), payload.clone());
            h[at.index(header.len())] ^= 1 << bit;
            p[at.index(payload.len())] ^= 1 << bit;
            prop_assert_ne!(tag(&h, &payload), before);
            prop_assert_ne!(tag(&header, &p), before);
            prop_assert_ne!(tag(&header, &payload[..at.index(payload.len())]), before);
        }

        #[test]
        fn any_flipped_bit_of_a_handshake_changes_its_tag(
            bytes in proptest::collection::vec(any::<u8>(), 1..120),
            at in any::<proptest::sample::Index>(),
            bit in 0u8..8,
        ) {
            let mut other = bytes.clone();
            other[at.index(bytes.len())] ^= 1 << bit;
            prop_assert_ne!(KEY.tag(&other), KEY.tag(&bytes));
            prop_assert_ne!(KEY.tag(&bytes[..at.index(bytes.len())]), KEY.tag(&bytes));
        }
    }
}
