//! The operations and the types of elements, numbered as in libfabric and on the wire.

/// An operation on an element. The numbers are those of fi_atomic(3) and of PROTOCOL.md §4.16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Op {
    Min,
    Max,
    Sum,
    Prod,
    Lor,
    Land,
    Bor,
    Band,
    Lxor,
    Bxor,
    Read,
    Write,
    Cswap,
    CswapNe,
    CswapLe,
    CswapLt,
    CswapGe,
    CswapGt,
    Mswap,
}

impl Op {
    pub(crate) const ALL: [Self; 19] = [
        Self::Min,
        Self::Max,
        Self::Sum,
        Self::Prod,
        Self::Lor,
        Self::Land,
        Self::Bor,
        Self::Band,
        Self::Lxor,
        Self::Bxor,
        Self::Read,
        Self::Write,
        Self::Cswap,
        Self::CswapNe,
        Self::CswapLe,
        Self::CswapLt,
        Self::CswapGe,
        Self::CswapGt,
        Self::Mswap,
    ];

    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// Whether the operation compares, and so has two operands.
    pub(super) fn compares(self) -> bool {
        self as u8 >= Self::Cswap as u8
    }
}

/// The type of an element, numbered in the same way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Datatype {
    Int8,
    Uint8,
    Int16,
    Uint16,
    Int32,
    Uint32,
    Int64,
    Uint64,
    Float,
    Double,
    FloatComplex,
    DoubleComplex,
    LongDouble,
    LongDoubleComplex,
    Int128,
    Uint128,
}

/// The kind of arithmetic that a type has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Integer,
    Real,
    Complex,
}

impl Datatype {
    pub(crate) const ALL: [Self; 16] = [
        Self::Int8,
        Self::Uint8,
        Self::Int16,
        Self::Uint16,
        Self::Int32,
        Self::Uint32,
        Self::Int64,
        Self::Uint64,
        Self::Float,
        Self::Double,
        Self::FloatComplex,
        Self::DoubleComplex,
        Self::LongDouble,
        Self::LongDoubleComplex,
        Self::Int128,
        Self::Uint128,
    ];

    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

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
