//! The payload of an eager message that came before its receive.

use std::ops::Deref;

/// Bytes that are kept beside the rest of the message: most early messages are as short.
const SHORT: usize = 32;

/// A copy of a payload.
#[derive(Debug)]
pub(super) enum Kept {
    Short(u8, [u8; SHORT]),
    Long(Box<[u8]>),
}

impl Kept {
    /// A copy of `payload`; `None`: there is no memory for it.
    #[inline]
    pub(super) fn copy_of(payload: &[u8]) -> Option<Self> {
        if payload.len() <= SHORT {
            let mut bytes = [0; SHORT];
            bytes.get_mut(..payload.len())?.copy_from_slice(payload);
            return Some(Self::Short(payload.len() as u8, bytes));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(payload.len()).ok()?;
        bytes.extend_from_slice(payload);
        Some(Self::Long(bytes.into_boxed_slice()))
    }
}

impl Deref for Kept {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Short(len, bytes) => bytes.get(..usize::from(*len)).unwrap_or(bytes),
            Self::Long(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_bytes_at_every_length() {
        let payload: Vec<u8> = (0..3 * SHORT as u8).collect();
        for len in 0..=payload.len() {
            let kept = Kept::copy_of(&payload[..len]).unwrap();
            assert_eq!(*kept, payload[..len]);
            assert_eq!(matches!(kept, Kept::Long(_)), len > SHORT);
        }
    }
}
