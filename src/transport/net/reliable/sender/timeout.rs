//! The retransmission timeout, with exponential back-off.

use super::super::timers::NEVER;

/// The longest time between two attempts, nanoseconds.
const RETRY_MAX_NS: u64 = 1_000_000_000;
/// Timeouts in a row after which all packets in flight count as lost, and after which this side asks whether the
/// connection still exists. A peer that shares its core with other processes may be silent for some of them without
/// having lost anything.
pub(super) const SILENCE: u8 = 7;
pub(crate) const SUSPICION: u8 = 5;

/// The retransmission timeout of one connection.
#[derive(Debug)]
pub(crate) struct Timeout {
    pub(crate) at: u64,
    /// Timeouts in a row.
    pub(crate) attempts: u8,
    /// Packets that may leave although the window is full.
    pub(crate) extra: u8,
}

impl Timeout {
    pub(super) fn new() -> Self {
        Self { at: NEVER, attempts: 0, extra: 0 }
    }

    /// `ns`, doubled for each timeout in a row.
    pub(crate) fn doubled(&self, ns: u64) -> u64 {
        (ns << self.attempts.min(10)).min(RETRY_MAX_NS)
    }

    /// Nothing waits for an answer.
    pub(crate) fn reset(&mut self) {
        self.attempts = 0;
        self.at = NEVER;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_one_in_a_row_comes_twice_as_late() {
        let mut timeout = Timeout::new();
        assert!(timeout.at == NEVER);
        let mut waits = Vec::new();
        for _ in 0..8 {
            timeout.at = timeout.doubled(20_000_000);
            waits.push(timeout.at / 20_000_000);
            timeout.attempts += 1;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 50, 50]);
        assert!(timeout.attempts > SILENCE);
        timeout.attempts = 0;
        assert_eq!((timeout.doubled(5), timeout.attempts), (5, 0));
        timeout.reset();
        assert!(timeout.at == NEVER);
    }
}
