//! Small messages share packets while many are sent between two polls (as Nagle's algorithm has it, RFC 896): the first
//! ones leave by themselves, those after them wait for more, until there is enough or the application polls. An
//! application that sends many and then does not poll loses more by that than it gains; [`Backoff`] finds that out.

/// Messages to a peer that leave by themselves after a poll: those after them share packets, until the next
/// poll.
const ALONE: u32 = 2;
/// Messages further apart than this, beside the time that the link takes, do not come in a burst, nanoseconds.
const BURST_GAP_NS: u64 = 20_000;
/// What was held back for longer than this has waited too long, nanoseconds.
const LATE_NS: u64 = 200_000;

/// One connection's part of it.
#[derive(Debug, Default)]
pub(crate) struct Coalescer {
    /// The last packet takes more messages until it leaves.
    pub(super) open: bool,
    /// It is held back for that, not because it may not leave.
    pub(super) held: bool,
    /// Messages by the fast path since the poll of this number; when the last one came.
    burst: u32,
    burst_poll: u64,
    last_at: u64,
}

/// The endpoint's part of it.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// Polls so far.
    polls: u64,
    /// Messages that are not held back, and of how many the last time was.
    apart: u32,
    penalty: u32,
}

impl Coalescer {
    /// Whether a message that comes `now` is held back: it is one of many, between which the application does not poll.
    pub(super) fn holds(&mut self, backoff: &mut Backoff, now: u64) -> bool {
        let dense = now.saturating_sub(self.last_at) < BURST_GAP_NS;
        self.last_at = now;
        if self.burst_poll != backoff.polls {
            self.burst_poll = backoff.polls;
            self.burst = 0;
        }
        self.burst = self.burst.saturating_add(1);
        dense && self.burst > ALONE && backoff.may()
    }

    /// Packets of a message have left: what the link took for that is no pause of the application.
    pub(crate) fn on_left(&mut self, clock: impl Fn() -> u64) {
        if self.burst >= ALONE {
            self.last_at = clock();
        }
    }

    /// What is held back leaves, if anything is.
    pub(super) fn release(&mut self, backoff: &mut Backoff, now: u64) {
        if std::mem::take(&mut self.held) {
            backoff.on_release(now.saturating_sub(self.last_at));
        }
    }
}

impl Backoff {
    /// Most and least messages that leave by themselves after some were held back too long.
    const PENALTY: (u32, u32) = (64, 65536);

    /// The application polls.
    pub(crate) fn on_poll(&mut self) {
        self.polls = self.polls.wrapping_add(1);
    }

    /// What was held back for `ns` leaves.
    fn on_release(&mut self, ns: u64) {
        let (least, most) = Self::PENALTY;
        if ns > LATE_NS {
            self.penalty = self.penalty.saturating_mul(2).clamp(least, most);
            self.apart = self.penalty;
        } else {
            self.penalty /= 2;
        }
    }

    fn may(&mut self) -> bool {
        let may = self.apart == 0;
        self.apart -= u32::from(!may);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_held_back_until_the_next_poll() {
        let (mut coalescer, mut backoff) = (Coalescer::default(), Backoff::default());
        let mut held = |now, backoff: &mut Backoff| coalescer.holds(backoff, now);
        let burst: Vec<bool> = (1..5).map(|n| held(100 * n, &mut backoff)).collect();
        assert_eq!(burst, [false, false, true, true]);
        backoff.on_poll();
        assert!(!held(500, &mut backoff) && !held(600, &mut backoff));
        assert!(held(700, &mut backoff) && !held(701 + BURST_GAP_NS, &mut backoff));
    }

    #[test]
    fn who_does_not_poll_is_not_held_back_for_a_while() {
        let (mut coalescer, mut backoff) = (Coalescer::default(), Backoff::default());
        let held = |c: &mut Coalescer, backoff: &mut Backoff, n: u64| {
            (0..n).filter(|now| c.holds(backoff, *now)).count() as u64
        };
        assert_eq!(held(&mut coalescer, &mut backoff, 10), 8);
        coalescer.held = true;
        coalescer.release(&mut backoff, 10 + LATE_NS);
        assert_eq!(held(&mut coalescer, &mut backoff, 100), 100 - u64::from(Backoff::PENALTY.0));
        coalescer.release(&mut backoff, 10 + 2 * LATE_NS);
        assert_eq!(held(&mut coalescer, &mut backoff, 9), 9, "nothing was held back");
    }
}
