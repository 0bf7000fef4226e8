//! Payload condensed to two words per block by NH (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: fast and secure
//! message authentication", 1999): the sum of the products of neighbouring 32-bit words, each with a key word added.
//!
//! NH needs a secret key and hidden results. One sum keeps its value under a change of the block with a probability of
//! 2^-32 at most, so there are two, with different keys.

use crate::sys::simd::{nh_product, nh_sums};
use crate::transport::job_key::partial;
use std::fmt;

/// Bytes that NH condenses to two words.
const BLOCK: usize = 1024;
/// 64-bit lanes of a block.
const LANES: usize = BLOCK / 8;
/// Lanes by which the second sum's key is shifted: UMAC's "Toeplitz" construction gets two keys from one.
const SHIFT: usize = 2;

/// The key of the fast payload hash, derived from the job key: one for all connections of an endpoint, 2 KiB.
pub(crate) struct BlockHash {
    /// Added to the low half of each lane. Each 32-bit key word has 64 bits of its own, so that it needs no shuffle to
    /// meet its data.
    low: [u64; LANES + SHIFT],
    /// Added to the high half of each lane.
    high: [u64; LANES + SHIFT],
}

impl BlockHash {
    /// The hash whose key words are `words` of 0, 1, 2 and so on.
    pub(super) fn of_words(words: impl Fn(u64) -> u128) -> Self {
        let mut hash = Self { low: [0; LANES + SHIFT], high: [0; LANES + SHIFT] };
        for (n, (low, high)) in (0u64..).zip(hash.low.iter_mut().zip(&mut hash.high)) {
            let bits = words(n);
            *low = u64::from(bits as u32);
            *high = u64::from((bits >> 32) as u32);
        }
        hash
    }

    /// Condenses `payload` to two words for each block.
    #[inline]
    pub(super) fn digest(&self, payload: &[u8], mut word: impl FnMut(u64)) {
        for block in payload.chunks(BLOCK) {
            let (whole, rest) = block.split_at(block.len() / 8 * 8);
            let mut sums = self.sums(whole);
            if !rest.is_empty() {
                let more = self.products(whole.len() / 8, partial(rest));
                sums = (sums.0.wrapping_add(more.0), sums.1.wrapping_add(more.1));
            }
            word(sums.0);
            word(sums.1);
        }
    }

    /// The two NH sums of the whole lanes that a block begins with.
    #[inline]
    fn sums(&self, lanes: &[u8]) -> (u64, u64) {
        let low_2 = self.low.get(SHIFT..).unwrap_or_default();
        let high_2 = self.high.get(SHIFT..).unwrap_or_default();
        nh_sums(lanes, &self.low, &self.high, low_2, high_2)
    }

    /// The contribution of lane `at` of a block to the two sums.
    #[inline]
    fn products(&self, at: usize, lane: u64) -> (u64, u64) {
        let key = |at: usize| {
            let (low, high) = (self.low.get(at), self.high.get(at));
            (low.copied().unwrap_or_default(), high.copied().unwrap_or_default())
        };
        let ((low, high), (low_2, high_2)) = (key(at), key(at + SHIFT));
        (nh_product(lane, low, high), nh_product(lane, low_2, high_2))
    }
}

impl fmt::Debug for BlockHash {
    /// Does not print the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockHash")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::JobKey;
    use proptest::prelude::*;

    const KEY: JobKey = JobKey::from_bytes([0x42; 16]);

    #[test]
    fn the_key_stream_has_no_equal_words() {
        let blocks = BlockHash::new(&KEY);
        let words: std::collections::HashSet<u64> =
            blocks.low.iter().chain(&blocks.high).copied().collect();
        assert_eq!(words.len(), 2 * (LANES + SHIFT));
        assert!(words.iter().all(|word| *word <= u64::from(u32::MAX)));
    }

    /// The sums by the definition of NH, a pair of words at a time.
    fn by_definition(blocks: &BlockHash, block: &[u8], skip: usize) -> u64 {
        let mut padded = block.to_vec();
        padded.resize(block.len().next_multiple_of(8), 0);
        (skip..).zip(padded.chunks(8)).fold(0u64, |sum, (i, lane)| {
            let word = |at: usize| u32::from_le_bytes(lane[at..at + 4].try_into().unwrap());
            let low = word(0).wrapping_add(blocks.low[i] as u32);
            let high = word(4).wrapping_add(blocks.high[i] as u32);
            sum.wrapping_add(u64::from(low) * u64::from(high))
        })
    }

    proptest! {
        #[test]
        fn the_digest_is_nh(payload in proptest::collection::vec(any::<u8>(), 0..3000)) {
            let blocks = BlockHash::new(&KEY);
            let mut digest = Vec::new();
            blocks.digest(&payload, |word| digest.push(word));
            let expected: Vec<u64> = payload
                .chunks(BLOCK)
                .flat_map(|block| [0, SHIFT].map(|skip| by_definition(&blocks, block, skip)))
                .collect();
            prop_assert_eq!(digest, expected);
        }
    }
}
