//! Virtual time: what happens next.

use super::network::Slot;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What happens at a moment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Event {
    /// A datagram reaches the port of its receiver.
    Arrive(u32),
    /// A node takes a turn, if that is still what it waits for.
    Turn(Slot),
    /// The system tells a life of `at` that nobody listens at `of`.
    Refused { at: Slot, life: u32, of: Slot, id: u32 },
    /// An entry of the scenario.
    Act(u32),
    /// Everything is looked over.
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

    /// The next event; the time is now that of it.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Event> {
        let Reverse((at, _, event)) = self.heap.pop()?;
        self.now = at;
        Some(event)
    }
}
