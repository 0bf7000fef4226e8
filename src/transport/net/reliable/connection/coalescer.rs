//! Coalescing: small messages share packets while many are sent between two polls (like Nagle's algorithm, RFC 896).
//! The first ones leave by themselves; later ones wait until there are enough, or until the application polls. That
//! costs an application that sends many messages and then does not poll more than it gains; [`Backoff`] detects that.

/// Messages to a peer after a poll that leave by themselves. Later ones share packets until the next poll.
const ALONE: u32 = 2;
/// Messages further apart than this, not counting the time the link takes, are not a burst, nanoseconds.
const BURST_GAP_NS: u64 = 20_000;
/// Messages that were held back for longer than this have waited too long, nanoseconds.
const LATE_NS: u64 = 200_000;

/// The coalescing state of one connection.
#[derive(Debug, Default)]
pub(crate) struct Coalescer {
    /// The last packet takes more messages until it is sent.
    pub(super) open: bool,
    /// That packet is held back for coalescing, not because it may not be sent.
    pub(super) held: bool,
    /// Fast-path messages since the poll with number `burst_poll`; when the last one came.
    burst: u32,
    burst_poll: u64,
    last_at: u64,
}

/// The back-off of an endpoint: for a while nothing is held back.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// Polls so far.
    polls: u64,
    /// Messages that are still exempt from coalescing, and the size of the last such exemption.
    apart: u32,
    penalty: u32,
}

impl Coalescer {
    /// Whether a message that comes `now` is held back: it is one of a burst without polls in between.
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

    /// Packets of a message have left: the time the link took for that is not a pause of the application.
    pub(crate) fn on_left(&mut self, clock: impl Fn() -> u64) {
        if self.burst >= ALONE {
            self.last_at = clock();
        }
    }

    /// Sends what is held back, if anything is.
    pub(super) fn release(&mut self, backoff: &mut Backoff, now: u64) {
        if std::mem::take(&mut self.held) {
            backoff.on_release(now.saturating_sub(self.last_at));
        }
    }
}

impl Backoff {
    /// Least and most messages that are exempt from coalescing after some were held back too long.
    const PENALTY: (u32, u32) = (64, 65536);

    /// The application polls.
    pub(crate) fn on_poll(&mut self) {
        self.polls = self.polls.wrapping_add(1);
    }

    /// Messages that were held back for `ns` leave.
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
    fn an_application_that_does_not_poll_is_not_held_back_for_a_while() {
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
