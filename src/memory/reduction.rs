//! Arithmetic of reductions: elements of one buffer combined with those of another, as fi_atomic.3
//! defines its operations and datatypes. Bytes are in the machine's order.

macro_rules! integer {
    ($op:expr, $t:ty, $a:expr, $b:expr) => {{
        let (a, b) = (<$t>::from_ne_bytes($a), <$t>::from_ne_bytes($b));
        let truth = |value: bool| <$t>::from(value);
        match $op {
            0 => a.min(b),
            1 => a.max(b),
            2 => a.wrapping_add(b),
            3 => a.wrapping_mul(b),
            4 => truth(a != 0 || b != 0),
            5 => truth(a != 0 && b != 0),
            6 => a | b,
            7 => a & b,
            8 => truth((a != 0) != (b != 0)),
            _ => a ^ b,
        }
        .to_ne_bytes()
    }};
}

macro_rules! float {
    ($op:expr, $t:ty, $a:expr, $b:expr) => {{
        let (a, b) = (<$t>::from_ne_bytes($a), <$t>::from_ne_bytes($b));
        let truth = |value: bool| if value { 1.0 } else { 0.0 };
        match $op {
            0 => {
                if b < a {
                    b
                } else {
                    a
                }
            }
            1 => {
                if b > a {
                    b
                } else {
                    a
                }
            }
            2 => a + b,
            3 => a * b,
            4 => truth(a != 0.0 || b != 0.0),
            5 => truth(a != 0.0 && b != 0.0),
            _ => truth((a != 0.0) != (b != 0.0)),
        }
        .to_ne_bytes()
    }};
}

macro_rules! complex {
    ($op:expr, $t:ty, $n:literal, $a:expr, $b:expr) => {{
        let part = |from: &[u8], at: usize| {
            let bytes = from.get(at..at + $n).and_then(|part| part.try_into().ok());
            <$t>::from_ne_bytes(bytes.unwrap_or_default())
        };
        let ((ar, ai), (br, bi)) = ((part(&$a, 0), part(&$a, $n)), (part(&$b, 0), part(&$b, $n)));
        let (r, i) = match $op {
            2 => (ar + br, ai + bi),
            _ => (ar * br - ai * bi, ar * bi + ai * br),
        };
        let mut out = $a;
        let (real, imaginary) = out.split_at_mut($n);
        real.copy_from_slice(&r.to_ne_bytes());
        imaginary.copy_from_slice(&i.to_ne_bytes());
        out
    }};
}

/// Bytes of an element of `datatype` (libfabric's number), if it is one.
pub(crate) fn size_of(datatype: u32) -> Option<usize> {
    Some(match datatype {
        0 | 1 | 18 | 19 => 1,
        2 | 3 | 16 | 17 => 2,
        4 | 5 | 8 => 4,
        6 | 7 | 9 | 10 => 8,
        11 | 12 | 14 | 15 => 16,
        13 => 32,
        _ => return None,
    })
}

/// An operation on elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reduction {
    op: u32,
    datatype: u32,
}

impl Reduction {
    /// `None` for what is not supported: FI_MIN to FI_BXOR (0 to 9) on integers of up to 64 bits,
    /// all but the bitwise ones on FI_FLOAT and FI_DOUBLE, sum and product of their complex kinds.
    pub(crate) fn from_numbers(op: u32, datatype: u32) -> Option<Self> {
        let known = match datatype {
            0..=7 => op <= 9,
            8 | 9 => op <= 9 && !matches!(op, 6 | 7 | 9),
            10 | 11 => matches!(op, 2 | 3),
            _ => false,
        };
        known.then_some(Self { op, datatype })
    }

    /// `to[i] = to[i] op from[i]`, for as many whole elements as both have.
    pub(crate) fn combine(self, to: &mut [u8], from: &[u8]) {
        match self.datatype {
            0 => each(to, from, |a, b| integer!(self.op, i8, a, b)),
            1 => each(to, from, |a, b| integer!(self.op, u8, a, b)),
            2 => each(to, from, |a, b| integer!(self.op, i16, a, b)),
            3 => each(to, from, |a, b| integer!(self.op, u16, a, b)),
            4 => each(to, from, |a, b| integer!(self.op, i32, a, b)),
            5 => each(to, from, |a, b| integer!(self.op, u32, a, b)),
            6 => each(to, from, |a, b| integer!(self.op, i64, a, b)),
            7 => each(to, from, |a, b| integer!(self.op, u64, a, b)),
            8 => each(to, from, |a, b| float!(self.op, f32, a, b)),
            9 => each(to, from, |a, b| float!(self.op, f64, a, b)),
            10 => each(to, from, |a: [u8; 8], b| complex!(self.op, f32, 4, a, b)),
            11 => each(to, from, |a: [u8; 16], b| complex!(self.op, f64, 8, a, b)),
            _ => {}
        }
    }
}

fn each<const N: usize>(to: &mut [u8], from: &[u8], f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (a, b) in to.chunks_exact_mut(N).zip(from.chunks_exact(N)) {
        if let (Ok(left), Ok(right)) = (<[u8; N]>::try_from(&*a), b.try_into()) {
            a.copy_from_slice(&f(left, right));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combined<const N: usize>(op: u32, datatype: u32, a: [u8; N], b: [u8; N]) -> [u8; N] {
        let mut to = a;
        Reduction::from_numbers(op, datatype).unwrap().combine(&mut to, &b);
        to
    }

    #[test]
    fn elements_are_combined_as_fi_atomic_says() {
        let wanted: [i32; 10] = [-7, 5, -2, -35, 1, 1, -7 | 5, -7 & 5, 0, -7 ^ 5];
        for (op, wanted) in wanted.into_iter().enumerate() {
            let found = combined(op as u32, 4, (-7i32).to_ne_bytes(), 5i32.to_ne_bytes());
            assert_eq!(i32::from_ne_bytes(found), wanted, "operation {op}");
        }
        assert_eq!(combined(2, 1, [250, 1], [10, 2]), [4, 3]);
        assert_eq!(combined(0, 0, [0xff, 2], [1, 1]), [0xff, 1]);
        let found = combined(3, 9, 1.5f64.to_ne_bytes(), (-4.0f64).to_ne_bytes());
        assert_eq!(f64::from_ne_bytes(found), -6.0);
        // (1 + 2i)(3 - i) = 5 + 5i
        let pair = |r: f32, i: f32| [r.to_ne_bytes(), i.to_ne_bytes()].concat();
        let mut to = pair(1.0, 2.0);
        Reduction::from_numbers(3, 10).unwrap().combine(&mut to, &pair(3.0, -1.0));
        assert_eq!(to, pair(5.0, 5.0));
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        for (op, datatype) in [(6, 8), (0, 10), (10, 4), (2, 12), (2, 256), (19, 4)] {
            assert_eq!(Reduction::from_numbers(op, datatype), None);
        }
        assert_eq!((size_of(7), size_of(13), size_of(256)), (Some(8), Some(32), None));
    }
}
