//! How fast payload comes out of a ring.
//!
//! What passes through a ring is handed from core to core twice: its lines on the way there, and their
//! ownership on the way back. That goes at 8 to 26 GB/s as a rule, and was seen at 2 (the slow mode of
//! PERFORMANCE.md; cores without a common cache, as those of two sockets, may do that), while reading
//! from the sender's memory, which hands each line over once, stayed as fast as ever. Processes wander,
//! and the cores that a machine shows need not be those it has, so the receiver measures, and tells its
//! sender (READS, PROTOCOL.md 2.7).

use super::Inbound;
use crate::telemetry::log;

/// Payload of fewer bytes is not timed: what else is done for a message would count as copying.
pub(super) const TIMED_LEAST: usize = 8 * 1024;
/// Copies that are timed for one judgement. The fastest counts, because what else delays a copy (a
/// processor taken away, a page that was never touched) seldom delays all of them.
const SAMPLES: u32 = 8;
/// Of the payloads that come as fast as usual, one in so many is timed.
const ONE_IN: u32 = 8;
/// Copies that take longer than this are slow, picoseconds a byte.
const SLOW_PS: u64 = 200;

/// Of one ring, at its receiver.
#[derive(Debug)]
pub(super) struct CopyRate {
    slow: bool,
    /// Payloads between two that are timed, and those that pass before the next one is.
    between: u32,
    pass: u32,
    /// Copies still to be timed before a judgement, and the fastest so far, picoseconds a byte.
    left: u32,
    best: u64,
}

impl Default for CopyRate {
    /// Not judged yet, soon to be.
    fn default() -> Self {
        Self { slow: false, between: 0, pass: 0, left: SAMPLES, best: u64::MAX }
    }
}

impl CopyRate {
    /// By the last judgement, if there was one.
    pub(super) fn is_slow(&self) -> bool {
        self.slow
    }

    /// Whether the payload that is about to be copied is to be timed.
    #[inline]
    pub(super) fn is_due(&mut self) -> bool {
        match self.pass.checked_sub(1) {
            Some(left) => {
                self.pass = left;
                false
            }
            None => true,
        }
    }

    /// A copy of `len` bytes took `ns` nanoseconds. True: it is judged otherwise now.
    pub(super) fn note(&mut self, len: usize, ns: u64) -> bool {
        self.best = self.best.min(ns.saturating_mul(1000) / (len as u64).max(1));
        self.left = self.left.saturating_sub(1);
        self.pass = self.between;
        if self.left > 0 {
            return false;
        }
        let (before, slow) = (self.slow, self.best > SLOW_PS);
        *self = Self { slow, between: ONE_IN - 1, pass: ONE_IN - 1, ..Self::default() };
        slow != before
    }
}

impl Inbound {
    /// A payload of `len` bytes took `ns` nanoseconds.
    #[cold]
    pub(super) fn judge(&mut self, len: usize, ns: u64) {
        // Who may not read takes what comes.
        if !self.copy_rate.note(len, ns) || !self.can_get {
            return;
        }
        let slow = self.copy_rate.is_slow();
        self.consumer.set_reads(slow);
        if slow && !self.was_slow {
            self.was_slow = true;
            log::info(format_args!(
                "what pid {} writes comes slowly: long messages are read from its memory while that is so",
                self.pid,
            ));
        }
    }

    /// Slow rings are tried again now and then: processes wander.
    pub(super) fn try_again(&mut self) {
        if self.copy_rate.is_slow() {
            self.copy_rate = CopyRate::default();
            self.consumer.set_reads(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 16 * 1024;

    /// How many payloads pass until it is judged otherwise, if `ns` of each says how long it takes.
    fn until_changed(rate: &mut CopyRate, ns: impl Fn(u32) -> u64) -> Option<u32> {
        (0..1000).find(|i| rate.is_due() && rate.note(LEN, ns(*i)))
    }

    #[test]
    fn the_first_payloads_tell() {
        let mut rate = CopyRate::default();
        assert_eq!(until_changed(&mut rate, |_| 6000), Some(SAMPLES - 1));
        assert!(rate.is_slow());
    }

    #[test]
    fn what_becomes_slow_is_noticed_later() {
        let mut rate = CopyRate::default();
        let becomes_slow = |i: u32| if i < 100 { 1000 } else { 6000 };
        let after = until_changed(&mut rate, becomes_slow).unwrap();
        assert!((100..100 + 2 * SAMPLES * ONE_IN).contains(&after), "{after}");
        let becomes_fast = |i: u32| if i < 100 { 6000 } else { 1000 };
        assert!(until_changed(&mut rate, becomes_fast).is_some());
        assert!(!rate.is_slow());
    }

    #[test]
    fn one_quick_copy_of_eight_is_enough() {
        let mut rate = CopyRate::default();
        let disturbed = |i: u32| if i % SAMPLES == 5 { 1000 } else { 1_000_000 };
        assert_eq!(
            until_changed(&mut rate, |i| if i < SAMPLES { disturbed(i) } else { 1000 }),
            None
        );
    }

    #[test]
    fn nothing_and_for_ever_are_times_too() {
        let mut rate = CopyRate::default();
        assert_eq!(until_changed(&mut rate, |_| u64::MAX), Some(SAMPLES - 1));
        let mut rate = CopyRate::default();
        assert_eq!(until_changed(&mut rate, |_| 0), None);
        assert!(!rate.note(0, 0));
    }
}
