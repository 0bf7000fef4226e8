//! Back-off after failed attempts.

/// Pause after the first failure, and at most, nanoseconds.
pub(crate) const PAUSE_NS: u64 = 100_000_000;
pub(crate) const PAUSE_MAX_NS: u64 = 30_000_000_000;

/// Failures in a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Failures {
    pub(crate) count: u32,
    /// No attempt is made before this time, nanoseconds.
    pub(crate) until: u64,
}

impl Failures {
    /// One more failure: the pause is `first_ns` after the first one, and doubles.
    pub(crate) fn again(&mut self, now: u64, first_ns: u64) {
        let pause = (first_ns << self.count.min(10)).min(PAUSE_MAX_NS);
        self.count += 1;
        self.until = now.saturating_add(pause);
    }

    /// No attempt is to be made yet.
    pub(crate) fn pause(&self, now: u64) -> bool {
        now < self.until
    }
}
