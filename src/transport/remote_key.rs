//! Remote keys: what a peer has to know to access memory of this endpoint. A key travels in packets. Only the transport
//! that made it knows what its bytes mean; its first byte says which transport that is.

use std::fmt;

/// A remote key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct RemoteKey {
    /// Zero beyond `len`.
    bytes: [u8; Self::MAX],
    len: u8,
}

impl RemoteKey {
    /// Longest key, bytes.
    pub(crate) const MAX: usize = 32;

    /// All memory of the peer's process, where the transport that carries messages to it accesses that by itself. Offsets
    /// are addresses. This key does not travel.
    pub(crate) const ADDRESSES: Self = Self::new(0);

    /// A key of this kind ([`Transport::KEYS`](super::Transport::KEYS)), to which words are added.
    pub(crate) const fn new(kind: u8) -> Self {
        let mut bytes = [0; Self::MAX];
        bytes[0] = kind;
        Self { bytes, len: 1 }
    }

    /// The key with one more word. A key has room for three.
    pub(crate) fn with(mut self, word: u64) -> Self {
        let at = usize::from(self.len);
        if let Some(to) = self.bytes.get_mut(at..at + size_of::<u64>()) {
            to.copy_from_slice(&word.to_le_bytes());
            self.len += size_of::<u64>() as u8;
        }
        self
    }

    /// Its kind.
    #[inline]
    pub(crate) fn kind(&self) -> u8 {
        let [kind, ..] = self.bytes;
        kind
    }

    /// The `n`th word; `None`: the key has none such.
    #[inline]
    pub(crate) fn word(&self, n: usize) -> Option<u64> {
        let bytes = self.as_slice().get(1 + n * size_of::<u64>()..)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    }

    /// Its bytes, for packets.
    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or(&[])
    }

    /// A key from a packet. `None`: there are no bytes, or too many, or its kind is that of keys that do not travel.
    pub(crate) fn from_slice(from: &[u8]) -> Option<Self> {
        from.first().filter(|kind| **kind != Self::ADDRESSES.kind())?;
        let mut bytes = [0; Self::MAX];
        bytes.get_mut(..from.len())?.copy_from_slice(from);
        Some(Self { bytes, len: from.len() as u8 })
    }
}

impl fmt::Display for RemoteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key {:02x?}", self.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_travels_as_its_bytes() {
        let mut key = RemoteKey::new(7);
        for word in [1, u64::MAX, 0x0123_4567_89ab_cdef] {
            key = key.with(word);
            assert_eq!(RemoteKey::from_slice(key.as_slice()), Some(key));
        }
        assert_eq!((key.kind(), key.as_slice().len()), (7, 25));
        assert_eq!(
            [0, 1, 2].map(|n| key.word(n)),
            [Some(1), Some(u64::MAX), Some(0x0123_4567_89ab_cdef)]
        );
        assert_eq!((key.word(3), key.with(9)), (None, key), "there is no room for a fourth");
    }

    #[test]
    fn any_bytes_are_harmless() {
        let bytes = [9; RemoteKey::MAX + 1];
        assert_eq!(RemoteKey::from_slice(&[]), None);
        assert_eq!(RemoteKey::from_slice(RemoteKey::ADDRESSES.as_slice()), None);
        assert_eq!(RemoteKey::from_slice(&bytes), None);
        for len in 1..=RemoteKey::MAX {
            let key = RemoteKey::from_slice(&bytes[..len]).unwrap();
            assert_eq!((key.as_slice(), key.word(3)), (&bytes[..len], None));
            assert_eq!(key.word(0).is_some(), len > 8);
        }
    }
}
