//! Reproducible random numbers, and the bytes of messages.

use super::super::MESSAGE_MAX;
use std::sync::LazyLock;

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub(in crate::transport::net) struct Rng(u64);

impl Rng {
    pub(in crate::transport::net) fn new(seed: u64) -> Self {
        Self(seed)
    }

    #[inline]
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `n`, which is not 0.
    #[inline]
    pub(in crate::transport::net) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    pub(super) fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// A number from `from` to `to`, both included.
    pub(super) fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    #[inline]
    pub(super) fn happens(&mut self, chance: Chance) -> bool {
        chance.0 != 0 && (self.next() >> 32) < chance.0
    }

    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(super) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())].clone()
    }
}

/// The finalizer of SplitMix64: a hash of one word.
#[inline]
pub(super) fn mix(word: u64) -> u64 {
    let z = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
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
