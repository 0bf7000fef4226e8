//! When a connection that the link has refused alone is tried again.
//!
//! The peer's packets may be refused for seconds, where the table of neighbours is full, and each attempt costs a system
//! call: so the pauses grow. They may also be refused by bad luck, where the interface has a short queue that many
//! processes fill. So a pause is no longer than a part of the time for which nothing has left: whatever the reason was, the
//! pauses add at most that part to it.

use super::super::timers::NEVER;

/// The pause is this part of the time for which the link has refused everything, and at least and at most so many
/// nanoseconds.
const PART: u64 = 4;
const LEAST_NS: u64 = 1_000_000;
const MOST_NS: u64 = 256_000_000;

/// About a millisecond.
const STEP_NS: u64 = 1 << 20;
const SINCE_NEVER: u32 = u32::MAX;

/// The pauses of one connection. There are many, so it is small.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rest {
    /// Until when nothing is tried, nanoseconds; [`NEVER`]: there is no pause.
    pub(crate) until: u64,
    /// Since when the link has refused everything, in steps of [`STEP_NS`], modulo 2^32 - 1; `SINCE_NEVER`: it has not.
    since: u32,
    /// Only handshake packets were refused: see [`Self::spares_data`].
    hellos: bool,
}

impl Rest {
    pub(super) fn new() -> Self {
        Self { until: NEVER, since: SINCE_NEVER, hellos: false }
    }

    /// There is a pause.
    pub(super) fn is_on(&self) -> bool {
        self.until != NEVER
    }

    /// Data may go by another path than UDP meanwhile.
    pub(super) fn spares_data(&self) -> bool {
        self.hellos
    }

    /// The link has taken nothing, and takes packets to others; `hellos`: it has taken no handshake packet, but what data
    /// there was.
    #[cold]
    pub(crate) fn refused(&mut self, hellos: bool, now: u64) {
        self.hellos = hellos;
        let step = (now / STEP_NS % u64::from(SINCE_NEVER)) as u32;
        if self.since == SINCE_NEVER {
            self.since = step;
        }
        let refused_ns = u64::from(step.wrapping_sub(self.since)) * STEP_NS;
        self.until = now + (refused_ns / PART).clamp(LEAST_NS, MOST_NS);
    }

    /// The link has taken something, or there is nothing more to send.
    #[inline]
    pub(super) fn end(&mut self) {
        *self = Self::new();
    }

    /// The peer was heard: the pause ends now.
    #[inline]
    pub(crate) fn hurry(&mut self, now: u64) {
        if self.is_on() {
            self.until = now;
        }
    }

    /// Ends the pause if it is over. True: it has ended.
    pub(super) fn ends(&mut self, now: u64) -> bool {
        let ends = self.until <= now;
        if ends {
            self.until = NEVER;
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_time_for_which_nothing_has_left() {
        let (mut rest, mut now, mut pauses) = (Rest::new(), 5_000_000, Vec::new());
        let began = now;
        while now < began + 4_000_000_000 {
            rest.refused(false, now);
            let pause = rest.until - now;
            let most = (now - began + STEP_NS) / PART;
            assert!(pause == LEAST_NS || pause == MOST_NS || pause <= most);
            pauses.push(pause);
            now = rest.until;
            assert!(!rest.ends(now - 1) && rest.is_on() && rest.ends(now) && !rest.is_on());
        }
        assert!(pauses.is_sorted() && (30..50).contains(&pauses.len()), "{}", pauses.len());
        assert_eq!((pauses.first(), pauses.last()), (Some(&LEAST_NS), Some(&MOST_NS)));
        rest.hurry(now);
        assert!(!rest.is_on(), "there is none");
        rest.refused(true, now);
        assert_eq!(rest.until - now, MOST_NS, "nothing has left");
        rest.hurry(now);
        assert!(rest.ends(now));
        rest.end();
        rest.refused(false, now);
        assert_eq!(rest.until - now, LEAST_NS);
    }
}
