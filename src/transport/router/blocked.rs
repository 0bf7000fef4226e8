//! How long messages to a new peer wait for the transport that is to carry them, before the next transport is tried.

use crate::sys::clock::Waited;
use crate::transport::PeerId;

/// Longest wait for a transport that has no room for the peer, nanoseconds. A longer pause between two attempts counts as
/// the last value.
const FULL_NS: u64 = 100_000_000;
/// The same for one that cannot ask the peer yet ([`Contact::Later`](crate::transport::Contact)): where many processes
/// meet, all wait for each other.
const LATER_NS: u64 = 5_000_000_000;
const PAUSE_NS: u64 = 10_000_000;

/// A peer for which messages wait.
#[derive(Debug)]
pub(super) struct Blocked {
    pub(super) peer: PeerId,
    wait: Waited,
    full_ns: u64,
    later_ns: u64,
}

impl Blocked {
    pub(super) fn new(peer: PeerId) -> Self {
        Self { peer, wait: Waited::from_now(PAUSE_NS), full_ns: 0, later_ns: 0 }
    }

    /// The transport has answered once more, that it cannot ask yet if `later`. False: this has lasted too long.
    pub(super) fn goes_on(&mut self, later: bool) -> bool {
        let before = self.full_ns + self.later_ns;
        let waited = if later { &mut self.later_ns } else { &mut self.full_ns };
        *waited += self.wait.look().saturating_sub(before);
        self.full_ns < FULL_NS && self.later_ns < LATER_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer whose transport has had no room, or could not ask, for so long.
    fn after(full_ms: u64, later_ms: u64) -> Blocked {
        let mut blocked = Blocked::new(PeerId(1));
        for (later, ms) in [(false, full_ms), (true, later_ms)] {
            let before = blocked.full_ns + blocked.later_ns;
            blocked.wait = Waited::after(before + ms * 1_000_000, PAUSE_NS);
            blocked.goes_on(later);
        }
        blocked
    }

    #[test]
    fn each_reason_has_its_time() {
        for later in [false, true] {
            assert!(after(50, 4000).goes_on(later));
            assert!(after(0, 4900).goes_on(later));
            assert!(!after(100, 0).goes_on(later) && !after(0, 5000).goes_on(later));
        }
    }
}
