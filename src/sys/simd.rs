//! Loops that the compiler turns into wider vector instructions than every x86-64 has, where this
//! processor has them.

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

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn nh_sums_avx2(
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
        sums.0 = sums.0.wrapping_add(product(lane, *low, *high));
        sums.1 = sums.1.wrapping_add(product(lane, *low_2, *high_2));
    }
    sums
}

/// (low half + low key) × (high half + high key), each sum modulo 2^32.
#[inline(always)]
fn product(lane: u64, low: u64, high: u64) -> u64 {
    (lane.wrapping_add(low) & 0xffff_ffff) * ((lane >> 32).wrapping_add(high) & 0xffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

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
