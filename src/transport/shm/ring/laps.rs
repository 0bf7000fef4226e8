//! The laps of the sending end through its slots. They end early while the receiver keeps up: a link that carries little at
//! a time uses few pages and cache lines.
//!
//! The receiver has consumed the lap before when a lap ends early. So at most two laps have messages in flight.

use super::super::layout::SLOTS_STEP;

/// Slots of the shortest lap: a page, or half of the slots.
fn shortest(slots: u32) -> u32 {
    SLOTS_STEP.min(slots / 2).max(1)
}

/// How many consumed slots a receiver may keep to itself while there is no message: of the shortest lap an eighth may be
/// unread when it ends ([`Laps::ends`]).
pub(super) fn late(slots: u32) -> u32 {
    (shortest(slots) / 8).max(1)
}

/// The laps of a sending end.
#[derive(Debug)]
pub(super) struct Laps {
    /// Index of the next slot.
    pub(super) at: u32,
    /// Index of the slot behind which the lap may end.
    end: u32,
    /// Index of the next slot that [`super::Producer::end_lap`] looks at: `end`, or that of message 2^32 - 2.
    pub(super) last: u32,
    /// Messages published before this lap, modulo 2^32.
    began: u32,
    /// Slots of the lap before.
    before: u32,
    /// One more than the highest index that was ever used.
    used: u32,
    /// No lap ends early before so many messages: their slots were promised.
    pub(super) promised: u32,
    /// The receiver follows laps that end early.
    pub(super) allowed: bool,
}

impl Laps {
    pub(super) fn new(slots: u32) -> Self {
        let end = shortest(slots) - 1;
        Self {
            at: 0,
            end,
            last: end,
            began: 0,
            before: slots,
            used: 0,
            promised: 0,
            allowed: false,
        }
    }

    /// As after so many messages, in memory that was never used.
    #[cfg(test)]
    pub(super) fn after(tail: u32, slots: u32) -> Self {
        let mut laps = Self { began: tail, promised: tail, allowed: true, ..Self::new(slots) };
        laps.look_out(tail);
        laps
    }

    /// Most messages that may be in flight. While the lap before is not consumed, its slots become free one by one; then
    /// all are.
    #[inline]
    pub(super) fn slots(&self, consumed: u32, slots: u32) -> u32 {
        if (consumed.wrapping_sub(self.began) as i32) < 0 { self.before } else { slots }
    }

    /// Whether the lap ends with the slot of message `tail`, the next one: the receiver has consumed most of the lap.
    pub(super) fn ends(&self, tail: u32, consumed: u32) -> bool {
        self.allowed
            && self.at == self.end
            && !self.is_promised(tail)
            && tail.wrapping_sub(consumed) <= (self.end + 1) / 8
    }

    fn is_promised(&self, tail: u32) -> bool {
        self.promised.wrapping_sub(tail) as i32 > 0
    }

    /// Message `tail` is in slot 0. The lap that ends had `lap` slots.
    pub(super) fn begin(&mut self, lap: u32, tail: u32, slots: u32) {
        self.used = self.used.max(lap);
        (self.at, self.end) = (0, shortest(slots) - 1);
        self.look_out(tail);
        (self.before, self.began) = (lap, tail);
        if !self.is_promised(tail) {
            // Otherwise it would lie ahead again after 2^31 messages.
            self.promised = tail;
        }
    }

    /// The lap goes on behind the slot of message `tail`. Returns the slots before its next possible end of which the receiver
    /// might take what they have for a message: those that were used before, but not in the last lap, and at the last number of
    /// all one that was never used, and has 0.
    pub(super) fn go_on(&mut self, tail: u32, slots: u32) -> std::ops::Range<u32> {
        let next = self.at + 1;
        self.at = next;
        let zero =
            if tail.wrapping_add(2) == 0 && next >= self.used { next..next + 1 } else { 0..0 };
        if next <= self.end {
            self.look_out(tail.wrapping_add(1));
            return zero;
        }
        self.used = self.used.max(next);
        self.end = (2 * next).min(slots) - 1;
        self.look_out(tail.wrapping_add(1));
        let stale = next.max(self.before)..(self.end + 1).min(self.used);
        if stale.is_empty() { zero } else { stale }
    }

    /// Message `tail` is in the next slot: finds the slot to be looked at.
    fn look_out(&mut self, tail: u32) {
        self.last = (u32::MAX - 1).wrapping_sub(tail).saturating_add(self.at).min(self.end);
    }
}
