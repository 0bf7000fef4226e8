//! Monotonic time.

/// Nanoseconds of `CLOCK_MONOTONIC`; about 22 ns a call through the vDSO.
pub(crate) fn now_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds for which this thread has had a processor (`CLOCK_THREAD_CPUTIME_ID`); a system call.
pub(crate) fn processor_ns() -> u64 {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

#[inline]
fn read(clock: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid timespec; these clocks exist on every Linux.
    unsafe { libc::clock_gettime(clock, &mut ts) };
    (ts.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(ts.tv_nsec as u64)
}

/// A processor counter with a constant rate, the one behind `now_ns`, for code that runs at every poll. The
/// counters of two processors may differ a little.
#[inline]
pub(crate) fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and Linux allows it unless the process has disabled it
    // (PR_SET_TSC).
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: Linux lets user space read the virtual counter, as its vDSO does.
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

/// How long this process has waited for others, which may be as slow as itself: a pause between two looks counts only up
/// to a limit, because the process may have been stopped, or had no processor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waited {
    looked_at: u64,
    ns: u64,
    pause_max: u64,
}

impl Waited {
    /// A wait that begins now. A pause counts as at most `pause_max` nanoseconds.
    pub(crate) fn from_now(pause_max: u64) -> Self {
        Self { looked_at: now_ns(), ns: 0, pause_max }
    }

    /// For tests: one in which so many nanoseconds were waited.
    #[cfg(test)]
    pub(crate) fn after(ns: u64, pause_max: u64) -> Self {
        Self { ns, ..Self::from_now(pause_max) }
    }

    /// Nanoseconds waited so far.
    pub(crate) fn look(&mut self) -> u64 {
        let now = now_ns();
        self.ns += now.saturating_sub(self.looked_at).min(self.pause_max);
        self.looked_at = now;
        self.ns
    }
}

/// The end of a wait in absolute time, made from libfabric's timeouts in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<u64>);

impl Deadline {
    /// A negative `timeout_ms` never expires.
    pub(crate) fn after_ms(timeout_ms: i32) -> Self {
        Self(
            u64::try_from(timeout_ms)
                .ok()
                .map(|ms| now_ns().saturating_add(ms.saturating_mul(1_000_000))),
        )
    }

    /// The time `at_ns` of the clock of `now_ns`; `None` never comes.
    pub(crate) fn at(at_ns: Option<u64>) -> Self {
        Self(at_ns)
    }

    /// Milliseconds left, rounded up, in the form poll(2) expects: -1 for ever, 0 when expired.
    pub(crate) fn poll_ms(self) -> i32 {
        match self.0 {
            None => -1,
            Some(end) => {
                let left = end.saturating_sub(now_ns());
                i32::try_from(left.div_ceil(1_000_000)).unwrap_or(i32::MAX)
            }
        }
    }

    /// True once the deadline has passed.
    pub(crate) fn expired(self) -> bool {
        self.0.is_some_and(|end| now_ns() >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_stopped_has_not_waited_meanwhile() {
        let mut wait = Waited::from_now(1_000_000);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(wait.look(), 1_000_000);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(wait.look(), 2_000_000);
        let mut patient = Waited::from_now(u64::MAX);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(patient.look() >= 20_000_000);
    }
}
