//! The result of each operation on two values, as fi_atomic(3) defines it in C. Integers wrap.

use super::op::Op;

/// The type of an element.
pub(super) trait Element: Copy {
    /// Length in memory, bytes.
    const SIZE: usize;
    const ZERO: Self;

    /// The value that these bytes have in memory.
    fn read(bytes: &[u8]) -> Self;
    /// Stores the value as its bytes in memory.
    fn write(self, to: &mut [u8]);
    /// The new value. `None`: the old one stays.
    fn update(op: Op, old: Self, new: Self, compare: Self) -> Option<Self>;
}

/// The arithmetic that all types have.
pub(super) trait Number: Element + PartialEq {
    const ONE: Self;
    fn sum(self, other: Self) -> Self;
    fn difference(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;

    fn is_set(self) -> bool {
        self != Self::ZERO
    }

    fn truth(set: bool) -> Self {
        if set { Self::ONE } else { Self::ZERO }
    }
}

fn when<T>(holds: bool, new: T) -> Option<T> {
    holds.then_some(new)
}

fn common<T: Number>(op: Op, old: T, new: T, compare: T) -> Option<T> {
    match op {
        Op::Sum => Some(old.sum(new)),
        Op::Prod => Some(old.product(new)),
        Op::Lor => Some(T::truth(old.is_set() || new.is_set())),
        Op::Land => Some(T::truth(old.is_set() && new.is_set())),
        Op::Lxor => Some(T::truth(old.is_set() != new.is_set())),
        Op::Write => Some(new),
        Op::Cswap => when(compare == old, new),
        Op::CswapNe => when(compare != old, new),
        // `is_offered` refuses operations that a type does not have.
        _ => None,
    }
}

pub(super) fn ordered<T: Number + PartialOrd>(op: Op, old: T, new: T, compare: T) -> Option<T> {
    match op {
        Op::Min => when(new < old, new),
        Op::Max => when(new > old, new),
        Op::CswapLe => when(compare <= old, new),
        Op::CswapLt => when(compare < old, new),
        Op::CswapGe => when(compare >= old, new),
        Op::CswapGt => when(compare > old, new),
        _ => common(op, old, new, compare),
    }
}

macro_rules! in_memory {
    ($type:ty) => {
        const SIZE: usize = size_of::<$type>();

        #[inline]
        fn read(bytes: &[u8]) -> Self {
            bytes.first_chunk().map_or(Self::ZERO, |bytes| Self::from_ne_bytes(*bytes))
        }

        #[inline]
        fn write(self, to: &mut [u8]) {
            if let Some(to) = to.first_chunk_mut() {
                *to = self.to_ne_bytes();
            }
        }
    };
}

macro_rules! integers {
    ($($type:ty)*) => {$(
        impl Element for $type {
            const ZERO: Self = 0;
            in_memory!($type);

            #[inline]
            fn update(op: Op, old: Self, new: Self, compare: Self) -> Option<Self> {
                match op {
                    Op::Bor => Some(old | new),
                    Op::Band => Some(old & new),
                    Op::Bxor => Some(old ^ new),
                    Op::Mswap => Some(new & compare | old & !compare),
                    _ => ordered(op, old, new, compare),
                }
            }
        }

        impl Number for $type {
            const ONE: Self = 1;

            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn difference(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }

            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }
    )*};
}

integers!(i8 u8 i16 u16 i32 u32 i64 u64 i128 u128);

macro_rules! reals {
    ($($type:ty)*) => {$(
        impl Element for $type {
            const ZERO: Self = 0.0;
            in_memory!($type);

            #[inline]
            fn update(op: Op, old: Self, new: Self, compare: Self) -> Option<Self> {
                ordered(op, old, new, compare)
            }
        }

        impl Number for $type {
            const ONE: Self = 1.0;

            fn sum(self, other: Self) -> Self {
                self + other
            }

            fn difference(self, other: Self) -> Self {
                self - other
            }

            fn product(self, other: Self) -> Self {
                self * other
            }
        }
    )*};
}

reals!(f32 f64);

/// A complex number: real part, imaginary part.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Complex<T> {
    re: T,
    im: T,
}

impl<T: Number> Element for Complex<T> {
    const SIZE: usize = 2 * T::SIZE;
    const ZERO: Self = Self { re: T::ZERO, im: T::ZERO };

    #[inline]
    fn read(bytes: &[u8]) -> Self {
        let (re, im) = bytes.split_at_checked(T::SIZE).unwrap_or_default();
        Self { re: T::read(re), im: T::read(im) }
    }

    #[inline]
    fn write(self, to: &mut [u8]) {
        if let Some((re, im)) = to.split_at_mut_checked(T::SIZE) {
            self.re.write(re);
            self.im.write(im);
        }
    }

    fn update(op: Op, old: Self, new: Self, compare: Self) -> Option<Self> {
        common(op, old, new, compare)
    }
}

impl<T: Number> Number for Complex<T> {
    const ONE: Self = Self { re: T::ONE, im: T::ZERO };

    fn sum(self, other: Self) -> Self {
        Self { re: self.re.sum(other.re), im: self.im.sum(other.im) }
    }

    fn difference(self, other: Self) -> Self {
        Self { re: self.re.difference(other.re), im: self.im.difference(other.im) }
    }

    /// By the textbook formula: infinities are not recovered as in Annex G of C.
    fn product(self, other: Self) -> Self {
        let part = |a: T, b: T| a.product(b);
        Self {
            re: part(self.re, other.re).difference(part(self.im, other.im)),
            im: part(self.re, other.im).sum(part(self.im, other.re)),
        }
    }
}
