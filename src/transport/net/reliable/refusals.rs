//! A connection whose packets the link does not take.
//!
//! A link that is full refuses every peer, for a moment. The kernel may also refuse one destination alone, and for long:
//! sendto(2) fails with ENOBUFS for an address for which there is no room in the table of neighbours (arp(7),
//! gc_thresh3). The other peers must not wait for that one, and the log should say so.

/// A connection that is refused for so long is reported, nanoseconds, each time.
const REPORT_NS: u64 = 100_000_000;
/// After so long without a refusal the watch of a connection begins anew, nanoseconds.
const FORGET_NS: u64 = 1_000_000_000;

/// One of the connections that are refused.
#[derive(Clone, Copy, Debug)]
struct Refused {
    id: u32,
    /// Since when nothing has left, or when that was last reported, nanoseconds.
    since: u64,
    /// The last refusal, nanoseconds.
    last: u64,
}

/// Watches one connection at a time.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    watched: Option<Refused>,
}

impl Refusals {
    /// Packets of connection `id` have left.
    #[inline]
    pub(super) fn on_sent(&mut self, id: u32) {
        if self.watched.is_some_and(|refused| refused.id == id) {
            self.watched = None;
        }
    }

    /// None has left although it has some. Returns for how long that must be reported, nanoseconds.
    #[cold]
    pub(super) fn on_refused(&mut self, id: u32, now: u64) -> Option<u64> {
        let new = Refused { id, since: now, last: now };
        let refused = self.watched.get_or_insert(new);
        if now.saturating_sub(refused.last) >= FORGET_NS {
            *refused = new;
        }
        if refused.id != id {
            return None;
        }
        refused.last = now;
        let ns = now.saturating_sub(refused.since);
        if ns < REPORT_NS {
            return None;
        }
        refused.since = now;
        Some(ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_reported_once_nothing_has_left_for_long() {
        let mut refusals = Refusals::default();
        let reports = |refusals: &mut Refusals, id, from: u64, to: u64| {
            (from..to).filter(|ms| refusals.on_refused(id, ms * 1_000_000).is_some()).count()
        };
        assert_eq!(reports(&mut refusals, 1, 0, 100), 0);
        refusals.on_sent(2);
        assert_eq!(reports(&mut refusals, 1, 100, 301), 3);
        refusals.on_sent(1);
        assert_eq!(reports(&mut refusals, 1, 301, 400), 0);
        // One at a time, as long as that one is refused.
        assert_eq!(reports(&mut refusals, 2, 400, 1399), 0);
        assert_eq!(reports(&mut refusals, 2, 1399, 1500), 1);
        // Two refusals a long time apart are no standstill.
        assert_eq!(reports(&mut refusals, 2, 9999, 10_000), 0);
    }
}
