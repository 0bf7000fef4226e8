//! Maps whose keys are numbers chosen by this provider or a driver.

#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map by peer, queue pair, or an address or key of this process. Never use it for numbers that a peer chooses: it
/// could choose them so that all collide.
pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// A set of such numbers.
pub(crate) type NumberSet<K> = HashSet<K, BuildHasherDefault<NumberHasher>>;

/// Hashes one number in a few instructions.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct NumberHasher(u64);

/// 2^64 divided by the golden ratio: it spreads neighbouring numbers widely.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for NumberHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(SPREAD);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_follow_each_other_are_far_apart() {
        let hash = |n: u32| {
            let mut hasher = NumberHasher::default();
            hasher.write_u32(n);
            hasher.finish()
        };
        // The upper bits tell entries apart, and the lower bits place them.
        for step in [1, 2, 3, 256, 65_536] {
            let all = |part: fn(u64) -> u64| -> HashSet<u64> {
                (0..128).map(|n| part(hash(n * step))).collect()
            };
            assert!(all(|hash| hash >> 57).len() > 64, "{step}");
        }
        assert_eq!((0..1024).map(|n| hash(n) % 1024).collect::<HashSet<_>>().len(), 1024);
        let mut map = NumberMap::default();
        (0..1000).for_each(|n| assert!(map.insert(n * 7, n).is_none()));
        assert!((0..1000).all(|n| map.get(&(n * 7)) == Some(&n)));
    }
}
