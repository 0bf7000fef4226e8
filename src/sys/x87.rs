//! Arithmetic on C's `long double` of x86-64, for which Rust has no type. The bytes are those in
//! memory: ten significant ones and six of padding.

use std::arch::asm;
use std::cmp::Ordering;

type Bytes = [u8; 16];

macro_rules! operation {
    ($(#[$doc:meta])* $name:ident, $instruction:literal) => {
        $(#[$doc])*
        pub(crate) fn $name(a: Bytes, b: Bytes) -> Bytes {
            let mut result = a;
            // SAFETY: reads ten bytes each of `a` and `b`, writes as many to `result`, and leaves the
            // register stack as empty as it was.
            unsafe {
                asm!(
                    "fld tbyte ptr [{a}]",
                    "fld tbyte ptr [{b}]",
                    $instruction,
                    "fstp tbyte ptr [{result}]",
                    a = in(reg) &raw const a,
                    b = in(reg) &raw const b,
                    result = in(reg) &raw mut result,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                    options(nostack),
                );
            }
            result
        }
    };
}

operation!(
    /// `a + b`; the padding is that of `a`.
    sum,
    "faddp st(1), st"
);
operation!(
    /// `a - b`, likewise.
    difference,
    "fsubp st(1), st"
);
operation!(
    /// `a * b`, likewise.
    product,
    "fmulp st(1), st"
);

/// How `a` compares to `b`; `None` if one of them is not a number.
pub(crate) fn compare(a: &Bytes, b: &Bytes) -> Option<Ordering> {
    let (unordered, below, equal): (u8, u8, u8);
    // SAFETY: reads ten bytes each of `a` and `b`, and leaves the register stack as empty as it was.
    unsafe {
        asm!(
            "fld tbyte ptr [{b}]",
            "fld tbyte ptr [{a}]",
            "fucomip st, st(1)",
            "setp {unordered}",
            "setb {below}",
            "sete {equal}",
            "fstp st(0)",
            a = in(reg) a,
            b = in(reg) b,
            unordered = out(reg_byte) unordered,
            below = out(reg_byte) below,
            equal = out(reg_byte) equal,
            out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
            out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
            options(nostack, readonly),
        );
    }
    match (unordered, below, equal) {
        (1, ..) => None,
        (_, 1, _) => Some(Ordering::Less),
        (_, _, 1) => Some(Ordering::Equal),
        _ => Some(Ordering::Greater),
    }
}
