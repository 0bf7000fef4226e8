//! Random numbers, and the bytes of messages.

use crate::random;
use std::sync::LazyLock;

/// As [`random::Rng`], for numbers that are lengths and indices.
#[derive(Clone, Debug)]
pub(super) struct Rng(random::Rng);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(random::Rng::new(seed))
    }

    #[cfg(fuzzing)]
    pub(super) fn scripted(input: &[u8]) -> Self {
        Self(random::Rng::scripted(input))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// A number below `n`, which is not 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0.index(n)
    }

    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.0.percent(percent)
    }

    /// Which segments of a list are device memory, a bit each: often none.
    pub(super) fn kinds(&mut self) -> u8 {
        if self.percent(30) { self.below(16) as u8 } else { 0 }
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        self.0.pick(from)
    }
}

/// Longest message of the tests, bytes.
pub(super) const LEN_MAX: usize = 200_000;

static POOL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut rng = Rng::new(7);
    (0..2 * LEN_MAX / 8).flat_map(|_| rng.next().to_le_bytes()).collect()
});

/// Random bytes that all payloads are cut from: `len` of them from `at`, which is at most [`LEN_MAX`].
pub(super) fn payload(at: usize, len: usize) -> &'static [u8] {
    &POOL[at..at + len]
}

/// A buffer that prints as its length.
pub(super) struct Bytes(pub(super) Vec<u8>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} B", self.0.len())
    }
}
