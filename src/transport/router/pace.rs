//! How often the router looks at what takes system calls.

use super::list::COUNT;
use crate::transport::LookedAt;

/// Polls between two looks at the clock.
const CLOCK_POLLS: u32 = 16;
/// So many polls without a message from this node, and it is still.
pub(super) const STILL_POLLS: u32 = 64;
/// As many that look at a device only take as long.
const DEVICE_POLLS: u32 = 4 * STILL_POLLS;
/// What waits for threads of the kernel gives way to them after so many.
const THREADS_POLLS: u32 = 8;

/// When transports have their turns.
#[derive(Debug, Default)]
pub(super) struct Pace {
    polls: u32,
    /// Polls without a message since the last one.
    empty: u32,
    /// What the last one looked at; if at a device only, as those before and after it do, there is no time to look around.
    looked_at: LookedAt,
    /// It is time to.
    wants: bool,
    /// When the next turn of each transport is due, nanoseconds.
    due: [u64; COUNT],
}

impl Pace {
    /// A poll brought so many messages. True: nothing has come for a while.
    #[inline]
    pub(super) fn count(&mut self, messages: usize) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.empty = if messages > 0 { 0 } else { self.empty.saturating_add(1) };
        self.is_still()
    }

    /// Nothing has come for a while.
    #[inline]
    pub(super) fn is_still(&self) -> bool {
        self.empty >= STILL_POLLS
    }

    /// Whether it is time to look around.
    #[inline]
    pub(super) fn is_time(&mut self, looked_at: LookedAt) -> bool {
        self.looked_at = looked_at;
        self.wants |= self.polls % CLOCK_POLLS == 0;
        self.wants && looked_at == LookedAt::Everything
    }

    /// Now and then of those that nothing has come for.
    #[inline]
    pub(super) fn is_long(&self) -> bool {
        let every = match self.looked_at {
            LookedAt::Everything => STILL_POLLS,
            LookedAt::Device => DEVICE_POLLS,
            LookedAt::Threads => THREADS_POLLS,
        };
        self.polls % every == 0 && self.is_still()
    }

    /// The router looks around.
    pub(super) fn begin(&mut self) {
        self.wants = false;
    }

    /// Whether a transport's turn is due at this time; if so the next one is after so many nanoseconds.
    pub(super) fn is_due(&mut self, lane: usize, now: u64, every_ns: u64) -> bool {
        let Some(due) = self.due.get_mut(lane) else { return false };
        let is_due = now >= *due;
        if is_due {
            *due = now.saturating_add(every_ns);
        }
        is_due
    }

    /// After so many polls without a message.
    #[cfg(test)]
    pub(super) fn after(empty: u32) -> Self {
        Self { empty, ..Self::default() }
    }

    /// The next poll looks around, at everything.
    pub(super) fn hasten(&mut self) {
        (self.wants, self.due) = (true, [0; COUNT]);
    }
}
