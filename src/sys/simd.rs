//! Loops with wider vector instructions than every x86-64 has, if this processor has them.

/// The processor fetches the cache line at `place` for reading. Any address will do.
#[inline(always)]
pub(crate) fn fetch<T>(place: *const T) {
    let _ = place; // where neither of these is known
    #[cfg(target_arch = "x86_64")]
    // SAFETY: no access: an address that is not mapped is ignored.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) place, options(nostack, readonly, preserves_flags));
    }
}

/// As [`fetch`], for writing.
#[inline(always)]
pub(crate) fn fetch_to_write<T>(place: *const T) {
    let _ = place; // where neither of these is known
    #[cfg(target_arch = "x86_64")]
    // SAFETY: no access: an address that is not mapped is ignored, and so is the instruction by processors without it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) place, options(nostack, readonly, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) place, options(nostack, readonly, preserves_flags));
    }
}

/// Lengths that a C library may copy by `rep movsb`, which on AMD's Zen 3 and 4 moves 2 GB/s instead
/// of 20 or more when source and destination have similar offsets in their pages (glibc's bug 30994).
/// For longer copies it may pay to bypass the cache, which the library decides.
#[cfg(target_arch = "x86_64")]
const MICROCODED: std::ops::Range<usize> = 2048..1 << 20;

/// Like [`std::ptr::copy_nonoverlapping`], by vector instructions at any length for which they are best.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if MICROCODED.contains(&len) && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX; the caller vouches for the ranges, which are long enough.
        return unsafe { copy_avx::<false>(from, to, len) };
    }
    // SAFETY: the caller vouches.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Like [`copy`], to memory that is not read soon: bypasses the caches if the processor can.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[inline]
pub(crate) unsafe fn copy_past_caches(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= MICROCODED.start && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX; the caller vouches for the ranges, which are long enough.
        return unsafe { copy_avx::<true>(from, to, len) };
    }
    // SAFETY: the caller vouches.
    unsafe { copy(from, to, len) }
}

/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`]; `len` is at least 256.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn copy_avx<const PAST_CACHES: bool>(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{
        __m256i, _mm_sfence, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256,
    };
    const WIDTH: usize = size_of::<__m256i>();
    const STRIDE: usize = 4 * WIDTH;
    // SAFETY: all offsets are at most `len - WIDTH`: the first and last WIDTH and STRIDE bytes are
    // inside because `len` is long enough, the others by the loop's condition.
    unsafe {
        let load = |at: usize| _mm256_loadu_si256(from.add(at).cast());
        let store = |at: usize, value| _mm256_storeu_si256(to.add(at).cast(), value);
        // The first and the last bytes separately, so that the others have aligned stores.
        let first = load(0);
        let end = len - STRIDE;
        let last = [load(end), load(end + WIDTH), load(end + 2 * WIDTH), load(end + 3 * WIDTH)];
        store(0, first);
        let mut at = WIDTH - to.addr() % WIDTH;
        while at < end {
            let part = [load(at), load(at + WIDTH), load(at + 2 * WIDTH), load(at + 3 * WIDTH)];
            for (i, value) in part.into_iter().enumerate() {
                if PAST_CACHES {
                    _mm256_stream_si256(to.add(at + i * WIDTH).cast(), value);
                } else {
                    store(at + i * WIDTH, value);
                }
            }
            at += STRIDE;
        }
        if PAST_CACHES {
            // Make the stores visible before any other thread or process is told of them.
            _mm_sfence();
        }
        for (i, value) in last.into_iter().enumerate() {
            store(end + i * WIDTH, value);
        }
    }
}

/// The two sums of products of NH (see `transport::net::reliable::tag`): for each 8-byte lane of
/// `lanes`, (low half + low key) × (high half + high key), each sum modulo 2^32; with the first and
/// with the second pair of keys. As many lanes are taken as the shortest argument has.
#[inline]
pub(crate) fn nh_sums(
    lanes: &[u8],
    low: &[u64],
    high: &[u64],
    low_2: &[u64],
    high_2: &[u64],
) -> (u64, u64) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { nh_sums_avx2(lanes, low, high, low_2, high_2) };
    }
    nh_sums_plain(lanes, low, high, low_2, high_2)
}

/// # Safety
/// The processor has AVX2. (Unsafe for Rust 1.85, where a function with features has to be.)
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn nh_sums_avx2(
    lanes: &[u8],
    low: &[u64],
    high: &[u64],
    low_2: &[u64],
    high_2: &[u64],
) -> (u64, u64) {
    nh_sums_plain(lanes, low, high, low_2, high_2)
}

#[inline(always)]
fn nh_sums_plain(
    lanes: &[u8],
    low: &[u64],
    high: &[u64],
    low_2: &[u64],
    high_2: &[u64],
) -> (u64, u64) {
    let mut sums = (0u64, 0u64);
    for ((((lane, low), high), low_2), high_2) in
        lanes.chunks_exact(8).zip(low).zip(high).zip(low_2).zip(high_2)
    {
        let lane = lane.try_into().map_or(0, u64::from_le_bytes);
        sums.0 = sums.0.wrapping_add(nh_product(lane, *low, *high));
        sums.1 = sums.1.wrapping_add(nh_product(lane, *low_2, *high_2));
    }
    sums
}

/// (low half + low key) × (high half + high key), each sum modulo 2^32.
#[inline(always)]
pub(crate) fn nh_product(lane: u64, low: u64, high: u64) -> u64 {
    (lane.wrapping_add(low) & 0xffff_ffff) * ((lane >> 32).wrapping_add(high) & 0xffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_complete_and_nothing_else() {
        let from: Vec<u8> = (0..40_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
        for len in [0, 1, 127, 2047, 2048, 2049, 2175, 2176, 2177, 4096, 5000, 16_384, 33_333] {
            for (skip, shift) in [(0, 0), (1, 0), (0, 1), (31, 64), (64, 31), (7, 9)] {
                for copy in [copy, copy_past_caches] {
                    let mut to = vec![0xaa; 40_000];
                    // SAFETY: both ranges lie inside their vectors.
                    unsafe { copy(from[skip..].as_ptr(), to[shift..].as_mut_ptr(), len) };
                    assert_eq!(to[shift..shift + len], from[skip..skip + len]);
                    let around = to[..shift].iter().chain(&to[shift + len..]);
                    assert!(around.into_iter().all(|byte| *byte == 0xaa), "{len} {skip} {shift}");
                }
            }
        }
    }

    #[test]
    fn wide_and_plain_sums_are_equal() {
        let keys: Vec<u64> = (0..200u64).map(|i| i.wrapping_mul(0x9e37_79b9) >> 3).collect();
        let bytes: Vec<u8> = (0..1024u32).map(|i| (i * 7) as u8).collect();
        for len in [0, 8, 40, 1000, 1024] {
            let (low, high, low_2, high_2) = (&keys[..], &keys[3..], &keys[5..], &keys[9..]);
            assert_eq!(
                nh_sums(&bytes[..len], low, high, low_2, high_2),
                nh_sums_plain(&bytes[..len], low, high, low_2, high_2)
            );
        }
    }
}
