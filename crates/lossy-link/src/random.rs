//! Random numbers that are repeatable by a seed.

/// A SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014). Good enough for the fate of frames; not for keys.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// The generator of one `stream` under `seed`: streams of one seed are independent.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self { state: seed };
        random.state = random.next() ^ stream.wrapping_mul(0xd6e8_feb8_6659_fd93);
        random.next();
        random
    }

    /// 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`; 0 for a bound of 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// True with probability `p`. One number is drawn, whatever `p` is.
    pub(crate) fn chance(&mut self, p: f64) -> bool {
        // 53 bits, the precision of a double: the fraction is below 1, so p = 0 is never and p = 1 is always true.
        ((self.next() >> 11) as f64) < p * (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_itself_and_streams_differ() {
        let draw = |seed, stream| {
            let mut random = Random::new(seed, stream);
            (0..8).map(|_| random.next()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn chances_are_what_they_say() {
        let mut random = Random::new(7, 0);
        for p in [0.0, 0.01, 0.5, 1.0] {
            let hits = (0..100_000).filter(|_| random.chance(p)).count() as f64;
            assert!((hits / 100_000.0 - p).abs() < 0.005, "{p}: {hits}");
        }
        assert!((0..1000).all(|_| random.below(3) < 3));
        assert_eq!(random.below(0), 0);
    }
}
