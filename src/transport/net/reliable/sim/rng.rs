//! The chance of an event, and the bytes of messages.

use super::super::MESSAGE_MAX;
pub(in crate::transport::net) use crate::random::Rng;
pub(super) use crate::random::mix;
use std::sync::LazyLock;

impl Rng {
    #[inline]
    pub(super) fn happens(&mut self, chance: Chance) -> bool {
        chance.0 != 0 && (self.next() >> 32) < chance.0
    }
}

/// The probability of an event, in units of 2^-32.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) const NEVER: Self = Self(0);

    /// A probability of `percent` percent.
    pub(super) fn percent(percent: f64) -> Self {
        Self((percent / 100.0 * 2f64.powi(32)) as u64)
    }

    pub(super) fn as_percent(self) -> f64 {
        self.0 as f64 / 2f64.powi(32) * 100.0
    }
}

impl std::fmt::Debug for Chance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} %", self.as_percent())
    }
}

static POOL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut rng = Rng::new(7);
    (0..2 * MESSAGE_MAX / 8).flat_map(|_| rng.next().to_le_bytes()).collect()
});

/// Random bytes that all messages are cut from: `len` of them from `at`, neither above
/// [`MESSAGE_MAX`].
pub(super) fn bytes(at: usize, len: usize) -> &'static [u8] {
    &POOL[at..at + len]
}
