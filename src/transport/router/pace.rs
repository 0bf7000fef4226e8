//! How often the router polls sources that need system calls.

use super::list::COUNT;
use crate::transport::LookedAt;

/// Polls between two looks at the clock, and between two while messages arrive: other sources can wait for as long.
const CLOCK_POLLS: u32 = 16;
const BUSY_POLLS: u32 = 2 * CLOCK_POLLS;
/// After so many polls without a message the endpoint counts as still.
pub(super) const STILL_POLLS: u32 = 64;
/// The same in polls of a device only, which are shorter.
const DEVICE_POLLS: u32 = 4 * STILL_POLLS;
/// After so many polls without a message a wait has taken long, and how often its thread yields the processor then.
const ENDLESS_POLLS: u32 = 4096;
const ENDLESS_EVERY: u32 = 256;
/// When waiting for kernel threads, one in so many polls yields the processor to them.
const THREADS_POLLS: u32 = 8;

/// Schedules the turns of the transports.
#[derive(Debug, Default)]
pub(super) struct Pace {
    polls: u32,
    /// Polls since the last message.
    empty: u32,
    /// What the last poll looked at. While polls look at a device only, no transport's turn is due.
    looked_at: LookedAt,
    /// The clock should be read.
    wants: bool,
    /// When the next turn of each transport is due, nanoseconds.
    due: [u64; COUNT],
}

impl Pace {
    /// A poll delivered so many messages. True: nothing has arrived for a while.
    #[inline]
    pub(super) fn count(&mut self, messages: usize) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.empty = if messages > 0 { 0 } else { self.empty.saturating_add(1) };
        self.is_still()
    }

    /// Polls so far, modulo 2^32, and those since one delivered a message.
    pub(super) fn polls(&self) -> (u64, u64) {
        (u64::from(self.polls), u64::from(self.empty))
    }

    /// Nothing has arrived for a while.
    #[inline]
    pub(super) fn is_still(&self) -> bool {
        self.empty >= STILL_POLLS
    }

    /// Whether the router should look for turns that are due.
    #[inline]
    pub(super) fn is_time(&mut self, looked_at: LookedAt) -> bool {
        self.looked_at = looked_at;
        let between = if self.empty == 0 { BUSY_POLLS } else { CLOCK_POLLS };
        self.wants |= self.polls % between == 0;
        self.wants && looked_at == LookedAt::Everything
    }

    /// True for one in so many polls while nothing arrives: the thread may yield its processor.
    #[inline]
    pub(super) fn is_long(&self) -> bool {
        let every = match self.looked_at {
            LookedAt::Everything => STILL_POLLS,
            LookedAt::Device => DEVICE_POLLS,
            LookedAt::Threads => THREADS_POLLS,
        };
        self.polls % every == 0 && self.is_still()
    }

    /// True for one in [`ENDLESS_EVERY`] polls of a wait that has taken long: the thread should yield its processor.
    #[inline]
    pub(super) fn is_endless(&self) -> bool {
        self.polls % ENDLESS_EVERY == 0 && self.empty >= ENDLESS_POLLS
    }

    /// The router looks for turns that are due.
    pub(super) fn begin(&mut self) {
        self.wants = false;
    }

    /// Whether a transport's turn is due now. If so, the next one is due after `every_ns` nanoseconds.
    pub(super) fn is_due(&mut self, lane: usize, now: u64, every_ns: u64) -> bool {
        let Some(due) = self.due.get_mut(lane) else { return false };
        let is_due = now >= *due;
        if is_due {
            *due = now.saturating_add(every_ns);
        }
        is_due
    }

    /// The state after so many polls without a message.
    #[cfg(test)]
    pub(super) fn after(empty: u32) -> Self {
        Self { empty, ..Self::default() }
    }

    /// Makes the next poll run the turns of all transports.
    pub(super) fn hasten(&mut self) {
        (self.wants, self.due) = (true, [0; COUNT]);
    }
}
