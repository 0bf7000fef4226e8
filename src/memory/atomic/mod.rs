//! Atomic operations on elements of application memory: which ones exist, and how they are carried out.
//!
//! An element is changed as a whole, even if others change it at the same time: another endpoint or domain of this
//! process, or the application's own atomic instructions, for elements of 1 to 8 bytes at multiples of their size
//! ([`cell`]). There is no global lock.

mod arithmetic;
mod cell;
#[cfg(target_arch = "x86_64")]
mod long_double;
mod op;
#[cfg(test)]
mod tests;

use super::SegmentList;
use arithmetic::{Complex, Element};
#[cfg(target_arch = "x86_64")]
use long_double::LongDouble;
use op::Kind;
pub(crate) use op::{Datatype, Form, Op};

/// Most bytes of target memory in one operation. Its packet, with two operands of that size, fits into one message of
/// every transport.
pub(crate) const MAX_BYTES: usize = 4096;

/// An operation on elements of a type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Operation {
    pub(crate) op: Op,
    pub(crate) datatype: Datatype,
}

/// Expands to `$body` with `$type` as the type of `$datatype`, or to nothing for a type that this machine lacks.
macro_rules! with_type {
    ($datatype:expr, $type:ident => $body:expr) => {
        with_type!($datatype, $type, $body,
            Int8 i8, Uint8 u8, Int16 i16, Uint16 u16, Int32 i32, Uint32 u32, Int64 i64, Uint64 u64,
            Float f32, Double f64, FloatComplex Complex<f32>, DoubleComplex Complex<f64>,
            Int128 i128, Uint128 u128)
    };
    ($datatype:expr, $type:ident, $body:expr, $($name:ident $element:ty),*) => {
        match $datatype {
            $(Datatype::$name => { type $type = $element; $body })*
            #[cfg(target_arch = "x86_64")]
            Datatype::LongDouble => { type $type = LongDouble; $body }
            #[cfg(target_arch = "x86_64")]
            Datatype::LongDoubleComplex => { type $type = Complex<LongDouble>; $body }
            #[cfg(not(target_arch = "x86_64"))]
            Datatype::LongDouble | Datatype::LongDoubleComplex => {}
        }
    };
}

impl Operation {
    /// The operation with these numbers, in libfabric and on the wire. `None`: a number is unknown.
    pub(crate) fn from_numbers(op: u32, datatype: u32) -> Option<Self> {
        Some(Self { op: Op::from_number(op)?, datatype: Datatype::from_number(datatype)? })
    }

    /// Whether the operation exists in this form. Only such operations may be applied ([`Operation::apply`]).
    pub(crate) fn is_offered(self, form: Form) -> bool {
        let called_so = match self.op {
            Op::Read => form == Form::Fetch,
            op if op.compares() => form == Form::Compare,
            _ => form != Form::Compare,
        };
        let kind = self.datatype.kind();
        let has_sense = match self.op {
            Op::Bor | Op::Band | Op::Bxor | Op::Mswap => kind == Kind::Integer,
            Op::Min | Op::Max => kind != Kind::Complex,
            Op::CswapLe | Op::CswapLt | Op::CswapGe | Op::CswapGt => kind != Kind::Complex,
            _ => true,
        };
        called_so && has_sense && self.datatype.exists()
    }

    /// Number of operands for each element.
    pub(crate) fn operands(self) -> usize {
        match self.op {
            Op::Read => 0,
            op if op.compares() => 2,
            _ => 1,
        }
    }

    /// Carries out the operation on each element of `memory`, which is a whole number of elements. `operand` and
    /// `compare` have one value for each element if the operation has these operands. `old`, unless it is empty, gets
    /// the old values.
    pub(crate) fn apply(
        self,
        memory: &SegmentList,
        operand: &[u8],
        compare: &[u8],
        old: &mut [u8],
    ) {
        with_type!(self.datatype, T => each::<T>(self.op, memory, operand, compare, old));
    }

    /// An operation that a collective may reduce with (fi_collective(3)): it combines two values into one of the same
    /// type.
    pub(crate) fn of_reduction(op: u32, datatype: u32) -> Option<Self> {
        Self::from_numbers(op, datatype)
            .filter(|operation| operation.op as u8 <= Op::Bxor as u8)
            .filter(|operation| operation.is_offered(Form::Base))
    }

    /// `to[i] = to[i] op from[i]`, for each whole element that both have.
    pub(crate) fn combine(self, to: &mut [u8], from: &[u8]) {
        with_type!(self.datatype, T => fold::<T>(self.op, to, from));
    }
}

fn fold<T: Element>(op: Op, to: &mut [u8], from: &[u8]) {
    for (to, from) in to.chunks_exact_mut(T::SIZE).zip(from.chunks_exact(T::SIZE)) {
        if let Some(new) = T::update(op, T::read(to), T::read(from), T::ZERO) {
            new.write(to);
        }
    }
}

fn each<T: Element>(op: Op, memory: &SegmentList, operand: &[u8], compare: &[u8], old: &mut [u8]) {
    let mut operands = operand.chunks_exact(T::SIZE);
    let mut compares = compare.chunks_exact(T::SIZE);
    let mut olds = old.chunks_exact_mut(T::SIZE);
    for at in (0..memory.len()).step_by(T::SIZE) {
        let new = operands.next().map_or(T::ZERO, T::read);
        let compare = compares.next().map_or(T::ZERO, T::read);
        let before = cell::change(memory, at, |old: T| T::update(op, old, new, compare));
        if let Some(to) = olds.next() {
            before.write(to);
        }
    }
}
