//! When to replace a queue pair that broke: the decisions, without device and clock.
//!
//! The first attempt comes soon, because usually only one queue pair broke and the device works. After repeated
//! failures the pauses become longer. An event of the device (a port is up) triggers an attempt at once, but at most
//! one a second.

/// Pause before the first attempt, and at most, nanoseconds.
const FIRST_NS: u64 = 100_000_000;
const LAST_NS: u64 = 30_000_000_000;
/// Least time between two attempts, whatever events come, nanoseconds.
const HINT_NS: u64 = 1_000_000_000;
/// A queue pair that has worked for this long resets the pause, nanoseconds.
const CALM_NS: u64 = 60_000_000_000;

/// The back-off of one queue pair's replacement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Recovery {
    /// When it was last made, or an attempt failed.
    tried_at: u64,
    /// Pause before the next attempt.
    pause_ns: u64,
    /// When it is to be replaced; `None`: it works.
    due_at: Option<u64>,
}

impl Recovery {
    /// A queue pair that works since `now`, nanoseconds.
    pub(super) fn new(now: u64) -> Self {
        Self { tried_at: now, pause_ns: FIRST_NS, due_at: None }
    }

    /// It broke.
    pub(super) fn broke(&mut self, now: u64) {
        if now.saturating_sub(self.tried_at) >= CALM_NS {
            self.pause_ns = FIRST_NS;
        }
        self.wait(now);
    }

    /// An attempt failed.
    pub(super) fn failed(&mut self, now: u64) {
        self.tried_at = now;
        self.wait(now);
    }

    fn wait(&mut self, now: u64) {
        self.due_at = Some(now.saturating_add(self.pause_ns));
        self.pause_ns = (self.pause_ns * 2).min(LAST_NS);
    }

    /// An attempt succeeded.
    pub(super) fn made(&mut self, now: u64) {
        (self.tried_at, self.due_at) = (now, None);
    }

    /// An event of the device makes an attempt promising.
    pub(super) fn hint(&mut self, now: u64) {
        let soon = now.max(self.tried_at.saturating_add(HINT_NS));
        self.due_at = self.due_at.map(|at| at.min(soon));
    }

    /// When the next attempt is due; `None`: it works.
    #[inline]
    pub(super) fn due_at(&self) -> Option<u64> {
        self.due_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// The times of the first `count` attempts, if all fail.
    fn attempts(recovery: &mut Recovery, count: usize) -> Vec<u64> {
        let attempt = |_| {
            let at = recovery.due_at()?;
            recovery.failed(at);
            Some(at)
        };
        (0..count).filter_map(attempt).collect()
    }

    #[test]
    fn attempts_in_vain_become_rare() {
        let start = 7 * SECOND;
        let mut recovery = Recovery::new(0);
        assert_eq!(recovery.due_at(), None);
        recovery.broke(start);
        let at = attempts(&mut recovery, 30);
        assert_eq!(at[0], start + FIRST_NS);
        let pauses: Vec<u64> = at.windows(2).map(|two| two[1] - two[0]).collect();
        assert!(pauses.windows(2).all(|two| two[1] == (two[0] * 2).min(LAST_NS)), "{pauses:?}");
        assert_eq!(pauses[28], LAST_NS);
    }

    #[test]
    fn what_breaks_at_once_is_made_less_and_less_often() {
        let mut recovery = Recovery::new(0);
        let mut now = 0;
        let mut made = 0;
        while now < 600 * SECOND {
            recovery.broke(now);
            now = recovery.due_at().unwrap();
            recovery.made(now);
            made += 1;
        }
        assert!(made < 30, "{made}");
        // After a quiet time the pause is short again.
        now += CALM_NS;
        recovery.broke(now);
        assert_eq!(recovery.due_at(), Some(now + FIRST_NS));
    }

    #[test]
    fn the_device_is_heard_once_a_second() {
        let mut recovery = Recovery::new(0);
        recovery.hint(SECOND);
        assert_eq!(recovery.due_at(), None, "it works");
        recovery.broke(100 * SECOND);
        attempts(&mut recovery, 20);
        let tried_at = recovery.tried_at;
        recovery.hint(tried_at + SECOND / 2);
        assert_eq!(recovery.due_at(), Some(tried_at + SECOND));
        recovery.failed(tried_at + SECOND);
        recovery.hint(tried_at + 5 * SECOND);
        assert_eq!(recovery.due_at(), Some(tried_at + 5 * SECOND), "at once");
        recovery.hint(tried_at + 6 * SECOND);
        assert_eq!(recovery.due_at(), Some(tried_at + 5 * SECOND), "and not later");
    }
}
