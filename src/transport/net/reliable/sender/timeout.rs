//! When something is sent again because no answer has come: twice as late each time.

use super::super::timers::NEVER;

/// The longest time between two attempts, nanoseconds.
const RETRY_MAX_NS: u64 = 1_000_000_000;
/// Timeouts in a row after which all that is under way counts as lost, and after which we ask
/// whether the connection still exists. A peer that shares its core with others is silent for some
/// of them without having lost anything.
pub(super) const SILENCE: u8 = 7;
const SUSPICION: u8 = 5;

/// See the module.
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

    pub(crate) fn is_armed(&self) -> bool {
        self.at != NEVER
    }

    /// It is time to ask whether the connection still exists.
    pub(crate) fn is_suspicious(&self) -> bool {
        self.attempts >= SUSPICION
    }

    /// `ns`, twice as long for each timeout in a row.
    pub(crate) fn doubled(&self, ns: u64) -> u64 {
        (ns << self.attempts.min(10)).min(RETRY_MAX_NS)
    }

    /// It has come.
    pub(crate) fn on_timeout(&mut self) {
        self.attempts = self.attempts.saturating_add(1);
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
        assert!(!timeout.is_armed());
        let mut waits = Vec::new();
        for _ in 0..8 {
            timeout.at = timeout.doubled(20_000_000);
            waits.push(timeout.at / 20_000_000);
            timeout.on_timeout();
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 50, 50]);
        assert!(timeout.is_suspicious() && timeout.attempts > SILENCE);
        timeout.attempts = 0;
        assert_eq!((timeout.doubled(5), timeout.attempts), (5, 0));
        timeout.reset();
        assert!(!timeout.is_armed());
    }
}
