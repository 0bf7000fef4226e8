//! Which connection must be looked at when. Moving a deadline further away costs nothing: the old entry stays, and is
//! inserted again when its time has come.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No time.
pub(super) const NEVER: u64 = u64::MAX;

/// What one connection knows of its entries in the heap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// The time of the one that counts, or [`NEVER`].
    at: u64,
    /// The time of a later one, or [`NEVER`]. Without it, each short deadline would leave another copy of the long one
    /// behind.
    far: u64,
}

impl Default for Entry {
    fn default() -> Self {
        Self { at: NEVER, far: NEVER }
    }
}

impl Entry {
    /// The earlier time `at` counts now. False: the heap has an entry that is early enough.
    fn put(&mut self, at: u64) -> bool {
        if self.far <= at {
            *self = Self { at: self.far, far: NEVER };
            return false;
        }
        let far = if self.far == NEVER { self.at } else { self.far };
        *self = Self { at, far };
        true
    }

    /// An entry for `at` has come out of the heap. False: it is of an earlier connection in this slot, or one for
    /// another time counts.
    pub(super) fn take(&mut self, at: u64) -> bool {
        let counts = self.at == at;
        if counts {
            self.at = NEVER;
        } else if self.far == at {
            self.far = NEVER;
        }
        counts
    }
}

/// Connections ordered by deadline.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Timers {
    /// Makes sure that `id`, which has `entry`, is looked at by `at`.
    #[inline]
    pub(super) fn set(&mut self, id: u32, at: u64, entry: &mut Entry) {
        if at < entry.at && entry.put(at) {
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
        let mut entry = Entry::default();
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

    #[test]
    fn short_deadlines_leave_no_copies_of_a_long_one_behind() {
        const LONG: u64 = 5_000_000_000;
        let long = |now: u64| (now / LONG + 1) * LONG;
        let mut timers = Timers::default();
        let mut entry = Entry::default();
        let (mut now, mut most, mut late) = (0, 0, 0);
        for round in 0..10_000u64 {
            // An acknowledgement is due, now and then a retransmission, and at last the peer is looked at.
            let middle = if round % 4 == 0 { now + 3_000_000 } else { NEVER };
            for at in [middle.min(long(now)), now + 200_000, long(now)] {
                timers.set(7, at, &mut entry);
            }
            now += 1_000_000;
            while let Some((at, id)) = timers.pop(now) {
                assert_eq!(id, 7);
                if entry.take(at) {
                    late += u64::from(at + 1_000_000 < now);
                    let middle = if middle > now { middle } else { NEVER };
                    timers.set(7, middle.min(long(now)), &mut entry);
                }
            }
            most = most.max(timers.heap.len());
        }
        assert!(most <= 8, "{most} entries for one connection");
        assert_eq!(late, 0);
        assert!(timers.next().is_some_and(|at| at <= long(now)));
    }
}
