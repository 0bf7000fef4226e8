//! When arrivals are acknowledged: with the next packet that goes there anyway, otherwise after a short delay.

use super::super::timers::NEVER;

/// Arrived packets after which an acknowledgement is sent at once.
pub(crate) const ACK_EVERY: u16 = 16;
/// How long an acknowledgement waits for a packet to travel with, nanoseconds.
const ACK_DELAY_NS: u64 = 200_000;

/// The acknowledgement that one connection owes.
#[derive(Debug)]
pub(crate) struct Acknowledgement {
    /// Packets since the last acknowledgement.
    pub(crate) owed: u16,
    /// It is sent as soon as possible.
    pub(crate) now: bool,
    /// When it is sent at the latest, nanoseconds.
    pub(crate) at: u64,
    /// That deadline was postponed once.
    put_off: bool,
    /// It asks the peer to send again what found no room.
    pub(crate) asks: bool,
}

impl Default for Acknowledgement {
    fn default() -> Self {
        Self { owed: 0, now: false, at: NEVER, put_off: false, asks: false }
    }
}

impl Acknowledgement {
    /// Makes sure that arrivals are acknowledged within the delay.
    pub(super) fn wait(&mut self, now: u64) {
        self.at = self.at.min(now + ACK_DELAY_NS);
    }

    /// Whether `more` packets would make an immediate acknowledgement due.
    pub(super) fn is_full(&self, more: u16) -> bool {
        self.owed.saturating_add(more) >= ACK_EVERY
    }

    /// Its deadline may have passed. An endpoint that wrote with a device until `back_at` will soon send something that
    /// acknowledges as well. A packet that arrived only at `arrived_at` may end a long message, which is answered next.
    pub(super) fn on_deadline(&mut self, now: u64, back_at: u64, arrived_at: u64) {
        if self.at > now {
            return;
        }
        let later = back_at.max(arrived_at) + ACK_DELAY_NS;
        self.put_off = later > now && !self.put_off;
        self.now |= !self.put_off;
        self.at = if self.put_off { later } else { NEVER };
    }

    /// The next one is sent as soon as possible, and asks the peer to send again what found no room.
    pub(crate) fn ask(&mut self) {
        (self.now, self.asks) = (true, true);
    }

    /// A packet has acknowledged `all` that arrived, or only what is in order.
    pub(crate) fn on_sent(&mut self, all: bool) {
        let asks = self.asks;
        *self = Self { now: self.now && !all || asks, asks, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_put_off_once_for_something_that_may_carry_it() {
        let mut ack = Acknowledgement::default();
        ack.owed += 1;
        ack.wait(1000);
        let due = 1000 + ACK_DELAY_NS;
        assert_eq!((ack.at, ack.now, ack.owed > 0), (due, false, true));
        ack.on_deadline(due, 0, 5000);
        assert_eq!((ack.at, ack.now), (5000 + ACK_DELAY_NS, false));
        ack.on_deadline(5000 + ACK_DELAY_NS, due, 5000);
        assert_eq!((ack.at, ack.now), (NEVER, true));
        ack.on_sent(false);
        assert!(ack.now && ack.owed == 0, "what came early is not told yet");
        ack.on_sent(true);
        assert!(!ack.now);
        ack.ask();
        ack.on_sent(true);
        assert!(ack.now, "a packet with data does not ask");
        ack.asks = false;
        ack.on_sent(true);
        assert!(!ack.now);
    }

    #[test]
    fn enough_packets_are_acknowledged_at_once() {
        let mut ack = Acknowledgement::default();
        (1..ACK_EVERY).for_each(|_| ack.owed += 1);
        assert!(!ack.is_full(0) && ack.is_full(1));
    }
}
