//! The operations and the types of elements, numbered as in libfabric and on the wire.

use crate::sys::numbered::numbered;

numbered! {
    /// An operation on an element. The numbers are those of fi_atomic(3) and of PROTOCOL.md §4.16.
    pub(crate) enum Op: u32 {
        Min = 0,
        Max = 1,
        Sum = 2,
        Prod = 3,
        Lor = 4,
        Land = 5,
        Bor = 6,
        Band = 7,
        Lxor = 8,
        Bxor = 9,
        Read = 10,
        Write = 11,
        Cswap = 12,
        CswapNe = 13,
        CswapLe = 14,
        CswapLt = 15,
        CswapGe = 16,
        CswapGt = 17,
        Mswap = 18,
    }
}

impl Op {
    /// Whether the operation compares, and so has two operands.
    pub(super) fn compares(self) -> bool {
        self as u8 >= Self::Cswap as u8
    }
}

numbered! {
    /// The type of an element, numbered in the same way.
    pub(crate) enum Datatype: u32 {
        Int8 = 0,
        Uint8 = 1,
        Int16 = 2,
        Uint16 = 3,
        Int32 = 4,
        Uint32 = 5,
        Int64 = 6,
        Uint64 = 7,
        Float = 8,
        Double = 9,
        FloatComplex = 10,
        DoubleComplex = 11,
        LongDouble = 12,
        LongDoubleComplex = 13,
        Int128 = 14,
        Uint128 = 15,
    }
}

/// The kind of arithmetic that a type has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Integer,
    Real,
    Complex,
}

impl Datatype {
    /// Length of one element, bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Int16 | Self::Uint16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float => 4,
            Self::Int64 | Self::Uint64 | Self::Double | Self::FloatComplex => 8,
            Self::DoubleComplex | Self::LongDouble | Self::Int128 | Self::Uint128 => 16,
            Self::LongDoubleComplex => 32,
        }
    }

    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Float | Self::Double | Self::LongDouble => Kind::Real,
            Self::FloatComplex | Self::DoubleComplex | Self::LongDoubleComplex => Kind::Complex,
            _ => Kind::Integer,
        }
    }

    /// Whether this machine has arithmetic for the type.
    pub(super) fn exists(self) -> bool {
        let long = matches!(self, Self::LongDouble | Self::LongDoubleComplex);
        !long || cfg!(target_arch = "x86_64")
    }
}

/// The three forms of the calls of fi_atomic(3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Form {
    /// Changes the target (fi_atomic).
    Base,
    /// Also returns the old values (fi_fetch_atomic).
    Fetch,
    /// Compares first, and returns the old values (fi_compare_atomic).
    Compare,
}
