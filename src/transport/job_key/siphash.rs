//! SipHash-2-4: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, and its 128-bit variant of 2014.

/// The state of SipHash-2-4, fed a word at a time.
pub(crate) struct SipHash {
    v: [u64; 4],
    length: usize,
}

impl SipHash {
    /// With a result of 64 bits.
    pub(crate) fn new(key: &[u8; 16]) -> Self {
        let bits = u128::from_le_bytes(*key);
        let (k0, k1) = (bits as u64, (bits >> 64) as u64);
        Self {
            v: [
                k0 ^ 0x736f_6d65_7073_6575,
                k1 ^ 0x646f_7261_6e64_6f6d,
                k0 ^ 0x6c79_6765_6e65_7261,
                k1 ^ 0x7465_6462_7974_6573,
            ],
            length: 0,
        }
    }

    /// With a result of 128 bits.
    pub(crate) fn new_128(key: &[u8; 16]) -> Self {
        let mut state = Self::new(key);
        state.v[1] ^= 0xee;
        state
    }

    #[inline(always)]
    fn round(&mut self) {
        let [mut a, mut b, mut c, mut d] = self.v;
        a = a.wrapping_add(b);
        c = c.wrapping_add(d);
        b = b.rotate_left(13) ^ a;
        d = d.rotate_left(16) ^ c;
        a = a.rotate_left(32);
        c = c.wrapping_add(b);
        a = a.wrapping_add(d);
        b = b.rotate_left(17) ^ c;
        d = d.rotate_left(21) ^ a;
        c = c.rotate_left(32);
        self.v = [a, b, c, d];
    }

    #[inline(always)]
    fn absorb(&mut self, word: u64) {
        self.v[3] ^= word;
        self.round();
        self.round();
        self.v[0] ^= word;
    }

    /// Adds eight bytes.
    #[inline(always)]
    pub(crate) fn word(&mut self, word: u64) {
        self.length = self.length.wrapping_add(8);
        self.absorb(word);
    }

    /// Adds `bytes`, padded with zeros to a whole word.
    #[inline]
    pub(crate) fn padded(&mut self, bytes: &[u8]) {
        let chunks = bytes.chunks_exact(8);
        let rest = chunks.remainder();
        for chunk in chunks {
            self.word(chunk.try_into().map_or(0, u64::from_le_bytes));
        }
        if !rest.is_empty() {
            self.word(partial(rest));
        }
    }

    /// Adds `N` bytes, which are whole words.
    #[inline(always)]
    pub(crate) fn words<const N: usize>(&mut self, bytes: &[u8; N]) {
        const { assert!(N % 8 == 0) };
        for chunk in bytes.chunks_exact(8) {
            self.word(chunk.try_into().map_or(0, u64::from_le_bytes));
        }
    }

    /// The result.
    #[inline(always)]
    pub(crate) fn finish(mut self) -> u64 {
        let length = self.length as u64;
        self.absorb(length << 56);
        self.v[2] ^= 0xff;
        self.squeeze()
    }

    /// Adds the last `bytes`, and the end of the message.
    fn last(&mut self, bytes: &[u8]) {
        let (whole, rest) = bytes.split_at(bytes.len() / 8 * 8);
        self.padded(whole);
        let length = self.length.wrapping_add(rest.len()) as u64;
        self.absorb(partial(rest) | length << 56);
    }

    /// The result, after `bytes` more.
    pub(crate) fn finish_with(mut self, bytes: &[u8]) -> u64 {
        self.last(bytes);
        self.v[2] ^= 0xff;
        self.squeeze()
    }

    /// The result of 128 bits, after `bytes` more.
    pub(crate) fn finish_128_with(mut self, bytes: &[u8]) -> [u8; 16] {
        self.last(bytes);
        self.v[2] ^= 0xee;
        let low = self.squeeze();
        self.v[1] ^= 0xdd;
        let high = self.squeeze();
        (u128::from(low) | u128::from(high) << 64).to_le_bytes()
    }

    #[inline(always)]
    fn squeeze(&mut self) -> u64 {
        for _ in 0..4 {
            self.round();
        }
        self.v.iter().fold(0, |sum, v| sum ^ v)
    }
}

/// Fewer than eight bytes as the low bytes of a word.
#[inline(always)]
pub(crate) fn partial(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The function's plain form, for its authors' vectors: key 00..0f, message 00..(n-1).
    fn vector(n: usize) -> (u64, [u8; 16]) {
        let key: [u8; 16] = std::array::from_fn(|i| i as u8);
        let message: Vec<u8> = (0..n).map(|i| i as u8).collect();
        let wide = SipHash::new_128(&key).finish_128_with(&message);
        (SipHash::new(&key).finish_with(&message), wide)
    }

    #[test]
    fn siphash_gives_its_authors_values() {
        assert_eq!(vector(0).0, 0x726f_db47_dd0e_0e31);
        assert_eq!(vector(1).0, 0x74f8_39c5_93dc_67fd);
        assert_eq!(vector(8).0, 0x93f5_f579_9a93_2462);
        assert_eq!(vector(15).0, 0xa129_ca61_49be_45e5);
        let wide = |n| u128::from_be_bytes(vector(n).1);
        assert_eq!(wide(0), 0xa381_7f04_ba25_a8e6_6df6_7214_c755_0293);
        assert_eq!(wide(1), 0xda87_c1d8_6b99_af44_3476_5911_9b22_fc45);
    }
}
