//! How late the processes of other hosts answer. More processes than processors answer when it is their turn: tens of
//! milliseconds after a packet has arrived, while the network takes microseconds. Each connection sees little of
//! that, so all connections with one host share what they have seen. A packet that such a process may still answer
//! is not sent again.

use crate::transport::Address;
use std::net::IpAddr;

/// Answers sooner than this say nothing: retransmission timeouts cover them; nanoseconds.
const PROMPT_NS: u64 = 8_000_000;
/// What is waited for at most, nanoseconds: after a loss it costs that time.
const LATE_MAX_NS: u64 = 500_000_000;
/// The latest answer counts for one to two of these epochs; a power of two of nanoseconds.
const EPOCH_SHIFT: u32 = 29;
/// Hosts whose addresses collide share a place.
const PLACES: usize = 256;

/// The place of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Host(u8);

impl Host {
    pub(super) fn of(address: &Address) -> Self {
        let mix = |bytes: &[u8]| bytes.iter().fold(0_u8, |h, byte| h.rotate_left(3) ^ byte);
        Self(match address.0.ip() {
            IpAddr::V4(ip) => mix(&ip.octets()),
            IpAddr::V6(ip) => mix(&ip.octets()),
        })
    }
}

/// The latest answers of one host in this epoch and in the one before, nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Latest {
    epoch: u64,
    now_ns: u64,
    before_ns: u64,
}

impl Latest {
    /// As it is in the epoch of `now`.
    fn at(self, now: u64) -> Self {
        let epoch = now >> EPOCH_SHIFT;
        match epoch.saturating_sub(self.epoch) {
            0 => self,
            1 => Self { epoch, now_ns: 0, before_ns: self.now_ns },
            _ => Self { epoch, ..Self::default() },
        }
    }
}

/// What an endpoint knows of all hosts.
#[derive(Debug)]
pub(super) struct Lateness {
    places: Box<[Latest; PLACES]>,
    /// The last long time in which this process did not look, and when it ended, nanoseconds.
    pause_ns: u64,
    back_at: u64,
}

impl Default for Lateness {
    fn default() -> Self {
        Self { places: Box::new([Latest::default(); PLACES]), pause_ns: 0, back_at: 0 }
    }
}

impl Lateness {
    /// This process looks again, `pause_ns` after it did before.
    #[inline]
    pub(super) fn on_turn(&mut self, pause_ns: u64, now: u64) {
        if pause_ns > PROMPT_NS {
            (self.pause_ns, self.back_at) = (pause_ns, now);
        }
    }

    /// A process of `host` has answered `late_ns` after a packet left, as far as this process knows: the answer may have
    /// come while it did not look.
    pub(super) fn note(&mut self, host: Host, late_ns: u64, now: u64) {
        let own = if now.saturating_sub(self.back_at) <= PROMPT_NS { self.pause_ns } else { 0 };
        if late_ns.saturating_sub(own) <= PROMPT_NS {
            return;
        }
        if let Some(place) = self.places.get_mut(usize::from(host.0)) {
            *place = place.at(now);
            place.now_ns = place.now_ns.max(late_ns);
        }
    }

    /// How long a process of `host` may take to answer now, nanoseconds; 0: not longer than the network.
    pub(super) fn of(&self, host: Host, now: u64) -> u64 {
        let latest = self.places.get(usize::from(host.0)).map_or(0, |place| {
            let Latest { now_ns, before_ns, .. } = place.at(now);
            now_ns.max(before_ns)
        });
        (latest + latest / 4).min(LATE_MAX_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(n: u8) -> Host {
        Host::of(&Address(([10, 0, 0, n], 4000).into()))
    }

    #[test]
    fn the_latest_answer_counts_for_a_while() {
        let (mut lateness, epoch) = (Lateness::default(), 1 << EPOCH_SHIFT);
        let now = 10 * epoch;
        assert_eq!(lateness.of(host(1), now), 0);
        lateness.note(host(1), PROMPT_NS, now);
        assert_eq!(lateness.of(host(1), now), 0, "no later than any");
        lateness.note(host(1), 40_000_000, now);
        lateness.note(host(1), 20_000_000, now + 1);
        assert_eq!(lateness.of(host(1), now + 2), 50_000_000);
        assert_eq!(lateness.of(host(2), now + 2), 0, "another host");
        lateness.note(host(1), 12_000_000, now + epoch);
        assert_eq!(lateness.of(host(1), now + epoch), 50_000_000);
        assert_eq!(lateness.of(host(1), now + 2 * epoch), 15_000_000);
        assert_eq!(lateness.of(host(1), now + 4 * epoch), 0);
        lateness.note(host(1), 1 << 40, now + 4 * epoch);
        assert_eq!(lateness.of(host(1), now + 4 * epoch), LATE_MAX_NS);
    }

    #[test]
    fn an_answer_that_waited_for_this_process_was_not_late() {
        let mut lateness = Lateness::default();
        lateness.on_turn(40_000_000, 100_000_000);
        lateness.note(host(1), 41_000_000, 100_000_000);
        assert_eq!(lateness.of(host(1), 100_000_000), 0);
        lateness.note(host(1), 80_000_000, 100_000_000);
        assert_eq!(lateness.of(host(1), 100_000_000), 100_000_000);
        lateness.note(host(2), 40_000_000, 200_000_000);
        assert_eq!(lateness.of(host(2), 200_000_000), 50_000_000, "long after the pause");
    }

    #[test]
    fn neighbours_have_places_of_their_own() {
        let hosts: Vec<_> = (0..=255).map(|n| host(n).0).collect();
        assert!((1..256).all(|n| !hosts[..n].contains(&hosts[n])));
    }
}
