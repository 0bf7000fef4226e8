//! Random numbers from a seed (xorshift64*).

pub(crate) struct Random(u64);

impl Random {
    /// Different streams of one seed differ.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut random =
            Self((seed ^ stream.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number that is not above `most`.
    pub(crate) fn up_to(&mut self, most: u64) -> u64 {
        (self.next() >> 11) % most.saturating_add(1)
    }
}
