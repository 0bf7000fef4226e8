//! Every operation on every type, against values that were computed in another way, and concurrent changes of one
//! element by several threads.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const INTEGERS: [Datatype; 10] = [
    Datatype::Int8,
    Datatype::Uint8,
    Datatype::Int16,
    Datatype::Uint16,
    Datatype::Int32,
    Datatype::Uint32,
    Datatype::Int64,
    Datatype::Uint64,
    Datatype::Int128,
    Datatype::Uint128,
];

#[allow(unsafe_code)]
fn list(bytes: &mut [u8]) -> SegmentList {
    // SAFETY: the bytes outlive the list in each test.
    unsafe { SegmentList::contiguous(bytes.as_mut_ptr(), bytes.len()) }
}

/// The new value of one element, and the old value that the operation returns.
fn one(op: Op, datatype: Datatype, old: &[u8], new: &[u8], compare: &[u8]) -> (Vec<u8>, Vec<u8>) {
    #[repr(align(32))]
    struct Aligned([u8; 32]);
    let size = datatype.size();
    let mut memory = Aligned([0; 32]);
    memory.0[..size].copy_from_slice(old);
    let mut before = vec![0; size];
    Operation { op, datatype }.apply(&list(&mut memory.0[..size]), new, compare, &mut before);
    (memory.0[..size].to_vec(), before)
}

fn is_signed(datatype: Datatype) -> bool {
    let signed =
        [Datatype::Int8, Datatype::Int16, Datatype::Int32, Datatype::Int64, Datatype::Int128];
    signed.contains(&datatype)
}

/// The reference for integers of any width, on numbers below 2^bits.
fn expected(op: Op, datatype: Datatype, old: u128, new: u128, compare: u128) -> u128 {
    let bits = 8 * datatype.size() as u32;
    let mask = u128::MAX >> (128 - bits);
    // Maps the order of signed numbers to that of unsigned ones.
    let rank = |v: u128| if is_signed(datatype) { v ^ (1 << (bits - 1)) } else { v };
    let swap = |holds: bool| if holds { new } else { old };
    let (o, n, c) = (rank(old), rank(new), rank(compare));
    let truth = u128::from;
    match op {
        Op::Min => swap(n < o),
        Op::Max => swap(n > o),
        Op::Sum => old.wrapping_add(new) & mask,
        Op::Prod => old.wrapping_mul(new) & mask,
        Op::Lor => truth(old | new != 0),
        Op::Land => truth(old != 0 && new != 0),
        Op::Bor => old | new,
        Op::Band => old & new,
        Op::Lxor => truth((old == 0) ^ (new == 0)),
        Op::Bxor => old ^ new,
        Op::Read => old,
        Op::Write => new,
        Op::Cswap => swap(c == o),
        Op::CswapNe => swap(c != o),
        Op::CswapLe => swap(c <= o),
        Op::CswapLt => swap(c < o),
        Op::CswapGe => swap(c >= o),
        Op::CswapGt => swap(c > o),
        Op::Mswap => (old & (mask ^ compare)) | (new & compare),
    }
}

#[test]
fn integers_are_as_in_c() {
    for datatype in INTEGERS {
        let size = datatype.size();
        let mask = u128::MAX >> (128 - 8 * size);
        let top = 1 << (8 * size - 1);
        let values =
            [0, 1, 2, 3, 0x55, 7, mask, mask - 1, top, top - 1, top + 1, top / 3, mask / 3];
        for &op in Op::ALL {
            for old in values {
                for new in values {
                    for compare in [old, new, 0, mask, top, 0x0f] {
                        let bytes = |v: u128| v.to_le_bytes()[..size].to_vec();
                        let wanted = expected(op, datatype, old, new, compare);
                        let (after, before) =
                            one(op, datatype, &bytes(old), &bytes(new), &bytes(compare));
                        let what = format!("{op:?} {datatype:?} {old:#x} {new:#x} {compare:#x}");
                        assert_eq!(after, bytes(wanted), "{what}");
                        assert_eq!(before, bytes(old), "{what}");
                    }
                }
            }
        }
    }
}

/// The extended format of a number, composed bit by bit.
fn extended(value: f64) -> [u8; 16] {
    let bits = value.to_bits();
    let sign = (bits >> 63) as u16;
    let (exponent, fraction) = ((bits >> 52 & 0x7ff) as u16, bits << 12 >> 12);
    let (exponent, mantissa) = match exponent {
        0 if fraction == 0 => (0, 0),
        0x7ff => (0x7fff, 1 << 63 | fraction << 11),
        _ => (exponent + (16383 - 1023), 1 << 63 | fraction << 11),
    };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mantissa.to_le_bytes());
    bytes[8..10].copy_from_slice(&(sign << 15 | exponent).to_le_bytes());
    bytes
}

/// A value of a type, from parts that all formats represent exactly.
fn real(datatype: Datatype, re: f64, im: f64) -> Vec<u8> {
    let parts = |of: fn(f64) -> Vec<u8>| [of(re), of(im)].concat();
    let float = |v: f64| (v as f32).to_ne_bytes().to_vec();
    let double = |v: f64| v.to_ne_bytes().to_vec();
    let long = |v: f64| extended(v).to_vec();
    match datatype {
        Datatype::Float => float(re),
        Datatype::Double => double(re),
        Datatype::LongDouble => long(re),
        Datatype::FloatComplex => parts(float),
        Datatype::DoubleComplex => parts(double),
        Datatype::LongDoubleComplex => parts(long),
        _ => panic!("{datatype:?} is no such type"),
    }
}

fn reals() -> Vec<Datatype> {
    let all = [Datatype::Float, Datatype::Double, Datatype::LongDouble];
    all.into_iter().filter(|datatype| datatype.exists()).collect()
}

#[test]
fn reals_are_as_in_c() {
    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;
    // Operation, old, new, compare, after.
    let cases = [
        (Op::Min, 3.0, -2.0, 0.0, -2.0),
        (Op::Min, -2.0, 3.0, 0.0, -2.0),
        (Op::Min, 3.0, NAN, 0.0, 3.0),
        (Op::Min, -INF, -1.0, 0.0, -INF),
        (Op::Max, 3.0, -2.0, 0.0, 3.0),
        (Op::Max, -2.0, 3.5, 0.0, 3.5),
        (Op::Max, 1.0, NAN, 0.0, 1.0),
        (Op::Sum, 1.5, 2.25, 0.0, 3.75),
        (Op::Sum, 1.5, -1.5, 0.0, 0.0),
        (Op::Sum, 1.0, INF, 0.0, INF),
        (Op::Prod, 1.5, -4.0, 0.0, -6.0),
        (Op::Prod, 0.0, -4.0, 0.0, -0.0),
        (Op::Lor, 0.0, -0.0, 0.0, 0.0),
        (Op::Lor, 0.0, 0.25, 0.0, 1.0),
        (Op::Lor, NAN, 0.0, 0.0, 1.0),
        (Op::Land, 2.0, -3.0, 0.0, 1.0),
        (Op::Land, 2.0, 0.0, 0.0, 0.0),
        (Op::Lxor, 2.0, 3.0, 0.0, 0.0),
        (Op::Lxor, 0.0, 3.0, 0.0, 1.0),
        (Op::Lxor, 3.0, 0.0, 0.0, 1.0),
        (Op::Read, 3.0, 9.0, 0.0, 3.0),
        (Op::Write, 3.0, 9.0, 0.0, 9.0),
        (Op::Cswap, 3.0, 9.0, 3.0, 9.0),
        (Op::Cswap, 3.0, 9.0, 4.0, 3.0),
        (Op::Cswap, -0.0, 9.0, 0.0, 9.0),
        (Op::Cswap, 5.0, 9.0, NAN, 5.0),
        (Op::CswapNe, 3.0, 9.0, 3.0, 3.0),
        (Op::CswapNe, 3.0, 9.0, 4.0, 9.0),
        (Op::CswapNe, 3.0, 9.0, NAN, 9.0),
        (Op::CswapLe, 3.0, 9.0, 3.0, 9.0),
        (Op::CswapLe, 3.0, 9.0, 2.0, 9.0),
        (Op::CswapLe, 3.0, 9.0, 4.0, 3.0),
        (Op::CswapLt, 3.0, 9.0, 3.0, 3.0),
        (Op::CswapLt, 3.0, 9.0, -3.0, 9.0),
        (Op::CswapGe, 3.0, 9.0, 3.0, 9.0),
        (Op::CswapGe, 3.0, 9.0, 2.0, 3.0),
        (Op::CswapGe, 3.0, 9.0, NAN, 3.0),
        (Op::CswapGt, 3.0, 9.0, 3.0, 3.0),
        (Op::CswapGt, 3.0, 9.0, INF, 9.0),
    ];
    for datatype in reals() {
        let bytes = |v: f64| real(datatype, v, 0.0);
        for (op, old, new, compare, wanted) in cases {
            let (after, before) = one(op, datatype, &bytes(old), &bytes(new), &bytes(compare));
            let what = format!("{op:?} {datatype:?} {old} {new} {compare}");
            assert_eq!(after, bytes(wanted), "{what}");
            assert_eq!(before, bytes(old), "{what}");
        }
    }
}

#[test]
fn complex_numbers_are_as_in_c() {
    type Pair = (f64, f64);
    let cases: [(Op, Pair, Pair, Pair, Pair); 14] = [
        (Op::Sum, (1.0, 2.0), (0.5, -4.0), (0.0, 0.0), (1.5, -2.0)),
        (Op::Prod, (1.0, 2.0), (3.0, -1.0), (0.0, 0.0), (5.0, 5.0)),
        (Op::Prod, (0.0, 1.0), (0.0, 1.0), (0.0, 0.0), (-1.0, 0.0)),
        (Op::Lor, (0.0, 0.0), (0.0, 2.0), (0.0, 0.0), (1.0, 0.0)),
        (Op::Lor, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
        (Op::Land, (0.0, 3.0), (2.0, 0.0), (0.0, 0.0), (1.0, 0.0)),
        (Op::Land, (0.0, 3.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
        (Op::Lxor, (0.0, 3.0), (0.0, 0.0), (0.0, 0.0), (1.0, 0.0)),
        (Op::Lxor, (0.0, 3.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
        (Op::Write, (0.0, 3.0), (1.0, 2.0), (0.0, 0.0), (1.0, 2.0)),
        (Op::Read, (0.0, 3.0), (1.0, 2.0), (0.0, 0.0), (0.0, 3.0)),
        (Op::Cswap, (1.0, 3.0), (8.0, 9.0), (1.0, 3.0), (8.0, 9.0)),
        (Op::Cswap, (1.0, 3.0), (8.0, 9.0), (1.0, 4.0), (1.0, 3.0)),
        (Op::CswapNe, (1.0, 3.0), (8.0, 9.0), (0.0, 3.0), (8.0, 9.0)),
    ];
    let all = [Datatype::FloatComplex, Datatype::DoubleComplex, Datatype::LongDoubleComplex];
    for datatype in all.into_iter().filter(|datatype| datatype.exists()) {
        let bytes = |(re, im): Pair| real(datatype, re, im);
        for (op, old, new, compare, wanted) in cases {
            let (after, before) = one(op, datatype, &bytes(old), &bytes(new), &bytes(compare));
            assert_eq!(after, bytes(wanted), "{op:?} {datatype:?} {old:?} {new:?} {compare:?}");
            assert_eq!(before, bytes(old));
        }
    }
}

/// More digits than a double has.
#[cfg(target_arch = "x86_64")]
#[test]
fn long_doubles_have_64_bits() {
    let tiny = extended(2f64.powi(-63));
    let (after, _) = one(Op::Sum, Datatype::LongDouble, &extended(1.0), &tiny, &[]);
    let mut wanted = extended(1.0);
    wanted[0] = 1;
    assert_eq!(after, wanted);
    // The padding behind the value does not change.
    let mut old = extended(2.0);
    old[12] = 0x77;
    let (after, _) = one(Op::Prod, Datatype::LongDouble, &old, &extended(4.0), &[]);
    assert_eq!((&after[..10], after[12]), (&extended(8.0)[..10], 0x77));
}

#[test]
fn what_is_offered_makes_sense() {
    let offered = |form, op, datatype| Operation { op, datatype }.is_offered(form);
    let count = |form| {
        let all = Op::ALL.iter().flat_map(|op| Datatype::ALL.iter().map(move |d| (*op, *d)));
        all.filter(|(op, datatype)| offered(form, *op, *datatype)).count()
    };
    if cfg!(target_arch = "x86_64") {
        // 10 integer types with 11 operations, 3 real types with 8, 3 complex types with 6.
        assert_eq!(count(Form::Base), 110 + 24 + 18);
        assert_eq!(count(Form::Fetch), 120 + 27 + 21);
        assert_eq!(count(Form::Compare), 70 + 18 + 6);
    }
    assert!(!offered(Form::Base, Op::Read, Datatype::Int8));
    assert!(!offered(Form::Base, Op::Bxor, Datatype::Float));
    assert!(!offered(Form::Fetch, Op::Min, Datatype::DoubleComplex));
    assert!(!offered(Form::Compare, Op::Mswap, Datatype::Double));
    assert!(!offered(Form::Fetch, Op::Cswap, Datatype::Int8));
    assert_eq!(Op::from_number(19), None);
    assert_eq!(Datatype::from_number(16), None);
    for (number, op) in Op::ALL.iter().copied().enumerate() {
        assert_eq!((op as usize, Op::from_number(number as u32)), (number, Some(op)));
    }
    for (number, datatype) in Datatype::ALL.iter().copied().enumerate() {
        assert_eq!(datatype as usize, number);
        assert_eq!(MAX_BYTES % datatype.size(), 0);
    }
}

#[test]
fn elements_may_lie_anywhere() {
    for datatype in INTEGERS {
        let size = datatype.size();
        for offset in 0..9 {
            for cut in [0, 1, size / 2, size, size + 1, 3 * size] {
                let mut memory = vec![1; offset + 3 * size + 1];
                let (head, tail) = memory[offset..offset + 3 * size].split_at_mut(cut);
                let parts = [
                    (head.as_mut_ptr().cast_const(), head.len()),
                    (tail.as_mut_ptr().cast_const(), tail.len()),
                ];
                #[allow(unsafe_code)]
                // SAFETY: the memory outlives the list.
                let place = unsafe { SegmentList::gather(&parts).unwrap() };
                let new: Vec<u8> = (0..3 * size as u8).collect();
                let mut old = vec![0; 3 * size];
                Operation { op: Op::Bor, datatype }.apply(&place, &new, &[], &mut old);
                assert!(old.iter().all(|byte| *byte == 1));
                let wanted: Vec<u8> = new.iter().map(|byte| byte | 1).collect();
                assert_eq!(memory[offset..offset + 3 * size], wanted);
                assert!(memory[..offset].iter().chain(memory.last()).all(|byte| *byte == 1));
            }
        }
    }
}

/// No change is lost between threads, with or without an atomic instruction for the type.
#[test]
fn threads_count_together() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 20_000;
    for (datatype, offset) in [
        (Datatype::Uint8, 3),
        (Datatype::Uint32, 4),
        (Datatype::Uint64, 8),
        (Datatype::Uint64, 4),
        (Datatype::Uint128, 16),
        (Datatype::Uint128, 8),
        (Datatype::Int128, 3),
        (Datatype::Double, 8),
        (Datatype::DoubleComplex, 8),
    ] {
        let size = datatype.size();
        let mut memory = vec![0u128; 4];
        let bytes = memory.as_mut_ptr().cast::<u8>();
        #[allow(unsafe_code)]
        // SAFETY: within the vector, which outlives the list.
        let place = unsafe { SegmentList::contiguous(bytes.add(offset), size) };
        let one = match datatype {
            Datatype::Double => 1f64.to_ne_bytes().to_vec(),
            Datatype::DoubleComplex => [1f64.to_ne_bytes(), 1f64.to_ne_bytes()].concat(),
            _ => 1u128.to_le_bytes()[..size].to_vec(),
        };
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        Operation { op: Op::Sum, datatype }.apply(&place, &one, &[], &mut []);
                    }
                });
            }
        });
        let mut found = vec![0; size];
        place.copy_out(0, &mut found);
        let total = THREADS * ROUNDS;
        let wanted = match datatype {
            Datatype::Double => (total as f64).to_ne_bytes().to_vec(),
            Datatype::DoubleComplex => [(total as f64).to_ne_bytes(); 2].concat(),
            _ => u128::from(total).to_le_bytes()[..size].to_vec(),
        };
        assert_eq!(found, wanted, "{datatype:?} at {offset}");
    }
}

/// A thread that reads with an atomic instruction of its own sees either value.
#[test]
fn words_do_not_tear() {
    let cells: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
    let done = AtomicBool::new(false);
    #[allow(unsafe_code)]
    // SAFETY: the cells outlive the list, and every thread may change atomics.
    let place = unsafe { SegmentList::contiguous(cells.as_ptr().cast(), 32) };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..40_000u64 {
                let new = [(round % 256) as u8; 32];
                for datatype in [Datatype::Uint64, Datatype::Uint128, Datatype::LongDoubleComplex] {
                    Operation { op: Op::Write, datatype }.apply(&place, &new, &[], &mut []);
                }
            }
            done.store(true, Ordering::Release);
        });
        while !done.load(Ordering::Acquire) {
            for cell in &cells {
                let bytes = cell.load(Ordering::Relaxed).to_ne_bytes();
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{bytes:?}");
            }
        }
    });
}

#[test]
fn buffers_are_combined() {
    let combined = |op, datatype, mut to: Vec<u8>, from: &[u8]| {
        Operation::of_reduction(op, datatype).unwrap().combine(&mut to, from);
        to
    };
    let wanted: [i32; 10] = [-7, 5, -2, -35, 1, 1, -7 | 5, -7 & 5, 0, -7 ^ 5];
    for (op, wanted) in wanted.into_iter().enumerate() {
        let found = combined(op as u32, 4, (-7i32).to_ne_bytes().into(), &5i32.to_ne_bytes());
        assert_eq!(found, wanted.to_ne_bytes(), "operation {op}");
    }
    assert_eq!(combined(2, 1, vec![250, 1, 9], &[10, 2]), [4, 3, 9], "what only one has stays");
    let found = combined(3, 9, 1.5f64.to_ne_bytes().into(), &(-4.0f64).to_ne_bytes());
    assert_eq!(found, (-6.0f64).to_ne_bytes());
    // (1 + 2i)(3 - i) = 5 + 5i
    let pair = |re: f32, im: f32| [re.to_ne_bytes(), im.to_ne_bytes()].concat();
    assert_eq!(combined(3, 10, pair(1.0, 2.0), &pair(3.0, -1.0)), pair(5.0, 5.0));
    // Refused: bits of a float, min of complex, a read, a comparison, half a float, and unknown types.
    for (op, datatype) in [(6, 8), (0, 10), (10, 4), (12, 4), (2, 16), (2, 256), (19, 4)] {
        assert_eq!(Operation::of_reduction(op, datatype), None);
    }
}
