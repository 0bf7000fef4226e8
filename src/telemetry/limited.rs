//! Log lines whose cause another party can repeat: a peer, another user of the node, a system call that keeps
//! failing.
//!
//! The first line of a cause is written at once. Later lines of the same cause are at least 1 s, 4 s, 16 s and so on
//! apart, up to one hour. The events in between are counted, and the next line gives the count. A cause is a call site,
//! or a call site and a number (an error, a reason for a refusal), so that a flood of one does not hide another.
//!
//! ```ignore
//! log::limited!("cannot accept a shared-memory link: {errno}");
//! log::limited!(cause: errno.0, "cannot accept a shared-memory link: {errno}");
//! log::limited!(node: errno.0, "cannot attach to process {pid}: {errno}");
//! ```

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Number of causes that one call site distinguishes; numbers beyond share a cause.
pub(crate) const CAUSES: usize = 64;

const SECOND_NS: u64 = 1_000_000_000;
/// The longest time between two lines of a cause: one hour.
const LONGEST_NS: u64 = 3600 * SECOND_NS;

/// The state of one cause, for the whole process.
///
/// The three numbers are independent of each other, so no order between them is needed: threads that race for a line
/// agree on one winner by `next_ns` alone, and the count of the others is added to the next line.
#[derive(Debug, Default)]
pub(crate) struct Limited {
    /// Before this time the cause is only counted.
    next_ns: AtomicU64,
    /// Lines written so far.
    lines: AtomicU32,
    /// Events since the last line.
    held: AtomicU64,
}

impl Limited {
    pub(crate) const fn new() -> Self {
        Self { next_ns: AtomicU64::new(0), lines: AtomicU32::new(0), held: AtomicU64::new(0) }
    }

    /// Records one event at `now_ns`. `Some(n)`: its line is to be written, after `n` events without a line.
    pub(super) fn admit(&self, now_ns: u64) -> Option<u64> {
        let next = self.next_ns.load(Relaxed);
        let pause = 4_u64
            .checked_pow(self.lines.load(Relaxed))
            .map_or(LONGEST_NS, |times| SECOND_NS.saturating_mul(times).min(LONGEST_NS));
        let later = now_ns.saturating_add(pause);
        if now_ns < next || self.next_ns.compare_exchange(next, later, Relaxed, Relaxed).is_err() {
            self.held.fetch_add(1, Relaxed);
            return None;
        }
        self.lines.fetch_add(1, Relaxed);
        Some(self.held.swap(0, Relaxed))
    }
}

/// The number of events without a line, as the end of the next line.
pub(super) struct Counted(pub(super) u64);

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            1 => f.write_str(" (and once more since the last such line)"),
            times => write!(f, " (and {times} times more since the last such line)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log::{captured, limited};

    #[test]
    fn a_flood_becomes_lines_that_grow_apart_and_no_event_is_lost() {
        let cause = Limited::new();
        let mut lines = Vec::new();
        let mut counted = 0;
        // 100,000 events a second for 10 s.
        for event in 0..1_000_000_u64 {
            let now = 77 * SECOND_NS + event * 10_000;
            if let Some(held) = cause.admit(now) {
                lines.push((now / SECOND_NS - 77, held));
                counted += held + 1;
            }
        }
        assert_eq!(lines, [(0, 0), (1, 99_999), (5, 399_999)]);
        assert_eq!(counted + cause.held.load(Relaxed), 1_000_000);
    }

    #[test]
    fn a_cause_that_goes_on_has_a_line_every_hour() {
        let cause = Limited::new();
        let lines = (0..86_400).filter(|second| cause.admit(second * SECOND_NS).is_some()).count();
        // Six lines while the intervals grow to an hour, then one an hour.
        assert!((28..=31).contains(&lines), "{lines} lines in a day");
    }

    #[test]
    fn threads_that_race_write_one_line() {
        let cause = Limited::new();
        let lines: usize = std::thread::scope(|scope| {
            let one = || (0..1000).filter(|_| cause.admit(SECOND_NS).is_some()).count();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(one)).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).sum()
        });
        assert_eq!(lines, 1);
        assert_eq!(cause.held.load(Relaxed), 3999);
    }

    #[test]
    fn a_call_site_keeps_its_causes_apart() {
        captured::begin();
        for errno in [24, 24, 23, 24] {
            limited!(cause: errno, "cannot test: error {errno}");
        }
        for _ in 0..3 {
            limited!("cannot test at all");
        }
        let lines = captured::lines_with("cannot test");
        assert_eq!(lines, ["cannot test: error 24", "cannot test: error 23", "cannot test at all"]);
    }
}
