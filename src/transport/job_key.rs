//! The job key: 128 bits that make the processes of a job known to each other, and what is derived from them.

#![forbid(unsafe_code)]

mod siphash;
mod source;

pub(crate) use siphash::{SipHash, partial};
pub(crate) use source::{SECRET_MAX, Source, of_auth_key, of_environment};
use std::fmt;

/// 128 bits that only the processes of a job share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct JobKey([u8; 16]);

/// The purpose of a derived value. It is the first word of the function's input, so a value made for one purpose never
/// serves another.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
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

    /// A value for the purpose that `words` begin with.
    pub(crate) fn derive(&self, words: impl IntoIterator<Item = u64>) -> [u8; 16] {
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

/// True if two tags are equal. Comparing one word takes the same time wherever they differ.
pub(crate) fn same(a: u64, b: u64) -> bool {
    std::hint::black_box(a ^ b) == 0
}
