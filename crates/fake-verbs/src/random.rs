//! Random numbers from a seed (xorshift64*).

/// A generator.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Different streams of one seed differ.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mixed = (seed ^ stream.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut random = Self(mixed | 1);
        random.next();
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`; 0 if that is 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 { 0 } else { (self.next() >> 11) % limit }
    }

    /// True so many times of a million.
    pub(crate) fn happens(&mut self, per_million: u32) -> bool {
        per_million > 0 && self.below(1_000_000) < u64::from(per_million)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_again_and_another_stream_others() {
        let draw = |seed, stream| {
            let mut random = Random::new(seed, stream);
            (0..8).map(|_| random.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn what_happens_ten_times_of_a_hundred_does_about_so() {
        let mut random = Random::new(5, 0);
        let count = (0..10_000).filter(|_| random.happens(100_000)).count();
        assert!((800..1200).contains(&count), "{count}");
        assert!(!random.happens(0));
    }
}
