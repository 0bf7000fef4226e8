//! Headers as bytes: written field by field from the front, and read in the same way. All integers are little-endian.

/// An encoded header, or the beginning of one, of at most `MAX` bytes.
pub(crate) struct Encoded<const MAX: usize> {
    bytes: [u8; MAX],
    len: usize,
}

impl<const MAX: usize> Encoded<MAX> {
    pub(super) const EMPTY: Self = Self { bytes: [0; MAX], len: 0 };

    /// A header with four bytes and a word in front of all fields.
    #[inline]
    pub(super) fn new(four: [u8; 4], word: u32) -> Self {
        let mut encoded = Self::EMPTY;
        encoded.put(four);
        encoded.put(word.to_le_bytes());
        encoded
    }

    #[inline]
    pub(super) fn put<const N: usize>(&mut self, from: [u8; N]) {
        self.put_slice(&from);
    }

    #[inline]
    pub(super) fn put_slice(&mut self, from: &[u8]) {
        if let Some(to) = self.bytes.get_mut(self.len..self.len + from.len()) {
            to.copy_from_slice(from);
            self.len += from.len();
        }
    }

    #[inline]
    pub(super) fn put_u64(&mut self, value: u64) {
        self.put(value.to_le_bytes());
    }

    #[inline]
    pub(super) fn with<const N: usize>(mut self, fields: [u64; N]) -> Self {
        for field in fields {
            self.put_u64(field);
        }
        self
    }

    /// The encoded bytes.
    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}

/// Reads fields from the front of a header. `None`: the rest is shorter.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    #[inline]
    pub(super) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    #[inline]
    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    pub(super) fn slice(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }
}
