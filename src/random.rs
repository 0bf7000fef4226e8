//! Random numbers of the tests: reproducible from one seed, or drawn from the input of a fuzzer.

/// SplitMix64 (Steele, Lea and Flood, 2014), behind a script that is used up first.
#[derive(Clone, Debug)]
pub(crate) struct Rng {
    state: u64,
    /// The unread bytes of a fuzzer's input, last byte first.
    script: Vec<u8>,
}

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed, script: Vec::new() }
    }

    /// Numbers from `input`, and the same ones for all inputs once it is used up.
    #[cfg(fuzzing)]
    pub(crate) fn scripted(input: &[u8]) -> Self {
        Self { state: 0, script: input.iter().rev().copied().collect() }
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        if !self.script.is_empty() {
            return self.scripted_bytes(8);
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// The next `count` bytes of the script, the first one highest; zeros follow its end.
    #[cold]
    fn scripted_bytes(&mut self, count: u32) -> u64 {
        (0..count).fold(0, |word, _| word << 8 | u64::from(self.script.pop().unwrap_or(0)))
    }

    /// A number below `n`, which is not 0. It takes no more bytes of a script than `n` has, so that a changed byte
    /// changes one decision.
    #[inline]
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        if !self.script.is_empty() {
            let count = (u64::BITS - (n - 1).leading_zeros()).div_ceil(8);
            return self.scripted_bytes(count) % n;
        }
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    pub(crate) fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// A number from `from` to `to`, both included.
    pub(crate) fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True with a probability of `percent`.
    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())].clone()
    }
}

/// The finalizer of SplitMix64: a hash of one word.
#[inline]
pub(crate) fn mix(word: u64) -> u64 {
    let z = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
