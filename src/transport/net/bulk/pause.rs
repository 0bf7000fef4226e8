//! Attempts that came to nothing, and how long nobody tries again.

/// After the first failure, and at most, nanoseconds.
pub(crate) const PAUSE_NS: u64 = 100_000_000;
pub(crate) const PAUSE_MAX_NS: u64 = 30_000_000_000;

/// Failures in a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Failures {
    pub(crate) count: u32,
    /// Nobody tries before, nanoseconds.
    pub(crate) until: u64,
}

impl Failures {
    /// One more: each pause is twice as long as the last.
    pub(crate) fn again(&mut self, now: u64) {
        let pause = (PAUSE_NS << self.count.min(10)).min(PAUSE_MAX_NS);
        self.count += 1;
        self.until = now.saturating_add(pause);
    }
}
