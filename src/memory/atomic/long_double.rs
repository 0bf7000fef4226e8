//! C's long double on x86-64. On other machines it has other formats.

use super::arithmetic::{Element, Number, ordered};
use super::op::Op;
use crate::sys::x87;
use std::cmp::Ordering;

/// The x87's double extended format: ten bytes, and six of padding.
#[derive(Clone, Copy)]
pub(super) struct LongDouble([u8; 16]);

impl Element for LongDouble {
    const SIZE: usize = 16;
    const ZERO: Self = Self([0; 16]);

    #[inline]
    fn read(bytes: &[u8]) -> Self {
        bytes.first_chunk().map_or(Self::ZERO, |bytes| Self(*bytes))
    }

    #[inline]
    fn write(self, to: &mut [u8]) {
        if let Some(to) = to.first_chunk_mut() {
            *to = self.0;
        }
    }

    fn update(op: Op, old: Self, new: Self, compare: Self) -> Option<Self> {
        ordered(op, old, new, compare)
    }
}

impl Number for LongDouble {
    const ONE: Self = Self([0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f, 0, 0, 0, 0, 0, 0]);

    fn sum(self, other: Self) -> Self {
        Self(x87::sum(self.0, other.0))
    }

    fn difference(self, other: Self) -> Self {
        Self(x87::difference(self.0, other.0))
    }

    fn product(self, other: Self) -> Self {
        Self(x87::product(self.0, other.0))
    }
}

impl PartialEq for LongDouble {
    fn eq(&self, other: &Self) -> bool {
        self.partial_cmp(other) == Some(Ordering::Equal)
    }
}

impl PartialOrd for LongDouble {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        x87::compare(&self.0, &other.0)
    }
}
