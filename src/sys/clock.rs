//! Monotonic time.

/// Nanoseconds of `CLOCK_MONOTONIC`; about 22 ns a call through the vDSO.
pub(crate) fn now_ns() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid timespec; CLOCK_MONOTONIC exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    (ts.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(ts.tv_nsec as u64)
}

/// A counter of the processor that counts at a constant rate, of which `now_ns` is made: to be read where that
/// would take too long, at every poll. What is counted by another processor may be a little less or more.
#[inline]
pub(crate) fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and Linux lets everybody use it who has not asked for the
    // contrary (PR_SET_TSC).
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: Linux lets everybody read the virtual counter, as its vDSO does.
        unsafe {
            core::arch::asm!(
                "mrs {}, cntvct_el0",
                out(reg) ticks,
                options(nomem, nostack, preserves_flags)
            );
        }
        ticks
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    now_ns()
}

/// An absolute end of waiting, made from the millisecond timeouts of libfabric.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<u64>);

impl Deadline {
    /// `timeout_ms < 0` never expires.
    pub(crate) fn after_ms(timeout_ms: i32) -> Self {
        Self(
            u64::try_from(timeout_ms)
                .ok()
                .map(|ms| now_ns().saturating_add(ms.saturating_mul(1_000_000))),
        )
    }

    /// Milliseconds left, rounded up, as `poll(2)` wants them: -1 for ever, 0 when expired.
    pub(crate) fn poll_ms(self) -> i32 {
        match self.0 {
            None => -1,
            Some(end) => {
                let left = end.saturating_sub(now_ns());
                i32::try_from(left.div_ceil(1_000_000)).unwrap_or(i32::MAX)
            }
        }
    }

    /// True once the time is over.
    pub(crate) fn expired(self) -> bool {
        self.0.is_some_and(|end| now_ns() >= end)
    }
}
