//! Which connection must be looked at when. Moving a deadline further away costs nothing: the old entry stays, and is
//! inserted again when its time has come.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No time.
pub(super) const NEVER: u64 = u64::MAX;

/// Connections ordered by deadline.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Timers {
    /// Makes sure that `id` is looked at by `at`. `entry` is the time of its present entry, or [`NEVER`].
    #[inline]
    pub(super) fn set(&mut self, id: u32, at: u64, entry: &mut u64) {
        if at < *entry {
            *entry = at;
            self.heap.push(Reverse((at, id)));
        }
    }

    /// The earliest entry.
    pub(super) fn next(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// Removes and returns the earliest entry whose time has come.
    pub(super) fn pop(&mut self, now: u64) -> Option<(u64, u32)> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_deadlines_need_no_new_entry() {
        let mut timers = Timers::default();
        let mut entry = NEVER;
        timers.set(7, 100, &mut entry);
        timers.set(7, 200, &mut entry);
        assert_eq!(timers.heap.len(), 1);
        timers.set(7, 50, &mut entry);
        assert_eq!(timers.next(), Some(50));
        assert_eq!(timers.pop(49), None);
        assert_eq!(timers.pop(50), Some((50, 7)));
        assert_eq!(timers.pop(100), Some((100, 7)));
        assert_eq!(timers.pop(1000), None);
    }
}
