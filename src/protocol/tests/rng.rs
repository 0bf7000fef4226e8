//! Random numbers, reproducible from one seed.

use std::sync::LazyLock;

/// SplitMix64.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// True with a probability of `percent`.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
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
