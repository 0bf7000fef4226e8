//! Virtual time and its events.

use super::network::Slot;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// An event at a moment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Event {
    /// A datagram reaches the port of its receiver.
    Arrive(u32),
    /// A node takes a turn, if it still waits for that.
    Turn(Slot),
    /// The system reports to an incarnation of `at` that the port of `of` is closed.
    Refused { at: Slot, life: u32, of: Slot, id: u32 },
    /// An entry of the scenario.
    Act(u32),
    /// Everything is checked.
    Inspect,
}

/// The events to come. Those of one moment happen in the order in which they were planned.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// Nanoseconds.
    pub(super) now: u64,
    planned: u64,
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
}

impl Clock {
    #[inline]
    pub(super) fn at(&mut self, at: u64, event: Event) {
        self.planned += 1;
        self.heap.push(Reverse((at.max(self.now), self.planned, event)));
    }

    /// The next event; advances the time to it.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Event> {
        let Reverse((at, _, event)) = self.heap.pop()?;
        self.now = at;
        Some(event)
    }
}
