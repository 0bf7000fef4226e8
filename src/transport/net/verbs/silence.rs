//! Which peers do not answer through the device although they have one: the decisions, without device and clock.
//!
//! A wrong partition, rails that are not joined, or a filtered UDP port 4791 look alike from here: path challenges are
//! lost, UDP carries everything, and the application is slow. So a peer that is alive over UDP, but answers no challenge
//! over its device, is reported once. A peer that is silent over UDP as well may be stopped, or gone, which is for the
//! connection to find out (PROTOCOL.md §7.10).

use crate::transport::Address;
use std::collections::HashMap;

/// The pause before the first repetition of a challenge, nanoseconds; each further one is twice as long.
const REPEAT_NS: u64 = 100_000_000;

/// Steps that are late by more than this fraction of the limit are excused; and the fraction that remains then.
const LATE: u64 = 16;
const LAST: u64 = 4;

/// A peer whose path is not validated.
#[derive(Debug)]
struct Awaited {
    since: u64,
    /// When it was last heard over UDP, nanoseconds.
    heard: u64,
    /// Challenges repeated.
    repeats: u32,
    /// It has got more time to answer.
    excused: bool,
}

impl Awaited {
    fn repeat_at(&self) -> u64 {
        self.since.saturating_add(REPEAT_NS << self.repeats.min(16))
    }

    fn due_at(&self, limit: u64) -> u64 {
        self.repeat_at().min(self.since + limit)
    }

    /// Nobody looked for a while after a step was due, because the application computed: that time does not count. Where
    /// the limit has passed, the peer is challenged once more, and has its last quarter to answer.
    fn excuse(&mut self, limit: u64, now: u64) {
        let late = now.saturating_sub(self.due_at(limit));
        if late <= limit / LATE {
            return;
        }
        self.since += late;
        self.heard += if self.heard > 0 { late } else { 0 };
        if now.saturating_sub(self.since) >= limit && !self.excused {
            (self.excused, self.repeats) = (true, 0);
            self.since = now.saturating_sub(limit - limit / LAST);
        }
    }
}

/// The next step with a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Its path is to be challenged again.
    Challenge(Address),
    /// It does not answer over its device.
    Report(Address),
}

/// The peers that are expected to answer.
#[derive(Debug)]
pub(super) struct Silence {
    awaited: HashMap<Address, Awaited>,
    /// For how long a peer may be silent, nanoseconds.
    limit: u64,
}

impl Silence {
    /// `limit`: for how long a peer may be silent, nanoseconds.
    pub(super) fn new(limit: u64) -> Self {
        Self { awaited: HashMap::new(), limit }
    }

    /// The path to `peer` was challenged.
    pub(super) fn expect(&mut self, peer: &Address, now: u64) {
        self.awaited.entry(*peer).or_insert(Awaited {
            since: now,
            heard: 0,
            repeats: 0,
            excused: false,
        });
    }

    /// The path to `peer` is validated, or `peer` has no device now.
    pub(super) fn forget(&mut self, peer: &Address) {
        self.awaited.remove(peer);
    }

    /// All paths begin anew.
    pub(super) fn clear(&mut self) {
        self.awaited.clear();
    }

    /// `peer` was heard over UDP.
    #[inline]
    pub(super) fn on_heard(&mut self, peer: &Address, now: u64) {
        if let Some(one) = self.awaited.get_mut(peer) {
            one.heard = now;
        }
    }

    /// The steps that are due.
    pub(super) fn steps(&mut self, now: u64) -> Vec<Step> {
        let (limit, mut steps) = (self.limit, Vec::new());
        self.awaited.retain(|peer, one| {
            one.excuse(limit, now);
            if now.saturating_sub(one.since) < limit {
                if one.repeat_at() <= now {
                    while one.repeat_at() <= now && one.repeats < 16 {
                        one.repeats += 1;
                    }
                    steps.push(Step::Challenge(*peer));
                }
                return true;
            }
            // Heard early only: it may be stopped. What the connection does about that begins this anew.
            steps.extend((one.heard > one.since + limit / 2).then_some(Step::Report(*peer)));
            false
        });
        steps
    }

    /// When a step will be due, nanoseconds.
    pub(super) fn due_at(&self) -> Option<u64> {
        self.awaited.values().map(|one| one.due_at(self.limit)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const LIMIT: u64 = 1000 * MS;

    fn peer(port: u16) -> Address {
        Address::from_text(&format!("10.0.0.1:{port}")).unwrap()
    }

    /// The steps of the first `span`, with the times of their calls, milliseconds; `heard` says when UDP hears the peer.
    fn steps(silence: &mut Silence, span: u64, heard: impl Fn(u64) -> bool) -> Vec<(u64, Step)> {
        let mut all = Vec::new();
        for ms in 0..span {
            if heard(ms) {
                silence.on_heard(&peer(1), ms * MS);
            }
            all.extend(silence.steps(ms * MS).into_iter().map(|step| (ms, step)));
        }
        all
    }

    #[test]
    fn a_peer_that_only_udp_hears_is_challenged_and_then_reported_once() {
        let mut silence = Silence::new(LIMIT);
        silence.expect(&peer(1), 0);
        silence.expect(&peer(1), 0);
        assert_eq!(silence.due_at(), Some(100 * MS));
        let all = steps(&mut silence, 5000, |_| true);
        let at = |ms| (ms, Step::Challenge(peer(1)));
        assert_eq!(all, [at(100), at(200), at(400), at(800), (1000, Step::Report(peer(1)))]);
        assert_eq!(silence.due_at(), None);
    }

    #[test]
    fn the_absence_of_this_process_is_no_silence_of_a_peer() {
        let mut silence = Silence::new(LIMIT);
        silence.expect(&peer(1), 0);
        let challenge = vec![Step::Challenge(peer(1))];
        for ms in [100, 200, 400, 800] {
            assert_eq!(silence.steps(ms * MS), challenge);
        }
        silence.on_heard(&peer(1), 9000 * MS);
        assert_eq!(silence.steps(9000 * MS), challenge, "it was away when the limit passed");
        assert_eq!(silence.steps(9050 * MS), challenge);
        assert_eq!((silence.steps(9249 * MS), silence.due_at()), (vec![], Some(9250 * MS)));
        silence.on_heard(&peer(1), 9249 * MS);
        assert_eq!(silence.steps(20_000 * MS), [Step::Report(peer(1))], "but that ends");
        silence.expect(&peer(1), 30_000 * MS);
        assert_eq!(silence.steps(39_000 * MS), challenge);
        assert_eq!(silence.due_at(), Some(39_100 * MS), "of the limit nothing has passed");
    }

    #[test]
    fn a_peer_that_is_silent_everywhere_is_not_reported() {
        let mut silence = Silence::new(LIMIT);
        silence.expect(&peer(1), 0);
        let all = steps(&mut silence, 5000, |ms| ms < 500);
        assert!(all.iter().all(|(_, step)| matches!(step, Step::Challenge(_))), "{all:?}");
        assert_eq!(silence.due_at(), None, "it costs nothing any more");
    }

    #[test]
    fn a_peer_that_answers_is_not_reported() {
        let mut silence = Silence::new(LIMIT);
        for port in [1, 2] {
            silence.expect(&peer(port), 0);
        }
        silence.forget(&peer(1));
        silence.on_heard(&peer(2), 900 * MS);
        assert_eq!(
            steps(&mut silence, 3000, |_| true).last(),
            Some(&(1000, Step::Report(peer(2))))
        );
        silence.expect(&peer(1), 0);
        silence.clear();
        assert_eq!(silence.due_at(), None);
    }
}
