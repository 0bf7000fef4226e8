//! The retransmission timeout, with exponential back-off.

use super::super::timers::NEVER;

/// The longest time between two attempts, nanoseconds.
const RETRY_MAX_NS: u64 = 1_000_000_000;
/// Timeouts in a row after which all packets in flight count as lost, and after which this side asks whether the
/// connection still exists. A peer that shares its core with other processes may be silent for some of them without
/// having lost anything.
pub(crate) const SILENCE: u8 = 7;
pub(crate) const SUSPICION: u8 = 5;

/// The retransmission timeout of one connection.
#[derive(Debug)]
pub(crate) struct Timeout {
    pub(crate) at: u64,
    /// Since when an answer is expected, nanoseconds; `NEVER`: it need not be waited for.
    since: u64,
    /// Timeouts in a row.
    pub(crate) attempts: u8,
    /// Packets that may leave although the window is full.
    pub(crate) extra: u8,
    /// The first unacknowledged packet when the peer last answered a handshake; `NEVER`: it has not.
    answered: u64,
    /// It has expired, and nothing was sent again: the peer did not answer for long.
    pub(crate) withheld: bool,
}

impl Timeout {
    pub(super) fn new() -> Self {
        Self { at: NEVER, since: NEVER, attempts: 0, extra: 0, answered: NEVER, withheld: false }
    }

    /// `ns`, doubled for each timeout in a row.
    pub(crate) fn doubled(&self, ns: u64) -> u64 {
        (ns << self.attempts.min(10)).min(RETRY_MAX_NS)
    }

    /// An answer is expected from `now` on, for `ns`.
    pub(crate) fn start(&mut self, now: u64, ns: u64) {
        (self.since, self.at) = (now, now + ns);
    }

    /// The peer is there: packets that wait for its answer need not wait longer.
    pub(crate) fn end(&mut self, now: u64) {
        (self.since, self.at, self.attempts) = (NEVER, now, 0);
    }

    /// The peer has answered a handshake; `base` is the first unacknowledged packet. If that was so the last time, the
    /// peer drops packets for lack of room, and the back-off goes on.
    pub(crate) fn on_answer(&mut self, base: u64, now: u64) {
        if std::mem::replace(&mut self.answered, base) != base {
            self.end(now);
        }
    }

    /// The peer was heard: what was not sent again because of its silence is sent now.
    #[inline]
    pub(crate) fn on_heard(&mut self, now: u64) {
        if std::mem::take(&mut self.withheld) {
            self.end(now);
        }
    }

    /// The peer has room again.
    pub(crate) fn hurry(&mut self, now: u64) {
        if self.attempts > 0 {
            self.end(now);
        }
    }

    /// It has expired. True: the peer may answer as late as `late_ns`, and it is waited for until then.
    pub(crate) fn waits(&mut self, late_ns: u64, now: u64) -> bool {
        let until = self.since.saturating_add(late_ns);
        let waits = self.since != NEVER && now < until;
        if waits {
            self.at = until;
        }
        waits
    }

    /// How long an answer has been expected, nanoseconds.
    pub(crate) fn waited(&self, now: u64) -> u64 {
        now.saturating_sub(self.since)
    }

    /// Nothing waits for an answer.
    pub(crate) fn reset(&mut self) {
        (self.since, self.at, self.attempts) = (NEVER, NEVER, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_peer_is_waited_for_once() {
        let mut timeout = Timeout::new();
        timeout.start(100, 20);
        assert!(!timeout.waits(20, 120));
        assert!(timeout.waits(50, 120) && timeout.at == 150);
        assert_eq!(timeout.waited(140), 40);
        assert!(!timeout.waits(50, 150));
        timeout.start(200, 20);
        timeout.end(205);
        assert!(!timeout.waits(500, 205) && !timeout.waits(0, 205));
        assert_eq!(timeout.waited(300), 0);
    }

    #[test]
    fn a_peer_that_answers_and_takes_nothing_ends_the_back_off_once() {
        let mut timeout = Timeout::new();
        timeout.start(100, 20);
        for (base, ends) in [(7, true), (7, false), (7, false), (8, true), (8, false)] {
            timeout.attempts = 5;
            timeout.on_answer(base, 105);
            assert_eq!(timeout.attempts == 0, ends, "{base}");
        }
    }

    #[test]
    fn each_one_in_a_row_comes_twice_as_late() {
        let mut timeout = Timeout::new();
        assert!(timeout.at == NEVER);
        let mut waits = Vec::new();
        for _ in 0..8 {
            timeout.at = timeout.doubled(20_000_000);
            waits.push(timeout.at / 20_000_000);
            timeout.attempts += 1;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 50, 50]);
        assert!(timeout.attempts > SILENCE);
        timeout.attempts = 0;
        assert_eq!((timeout.doubled(5), timeout.attempts), (5, 0));
        timeout.reset();
        assert!(timeout.at == NEVER);
    }
}
