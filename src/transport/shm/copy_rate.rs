//! Measures how fast the sender copies payload into a ring.
//!
//! Cache lines of a ring pass between two cores twice: with the data on the way to the receiver, and with their
//! ownership on the way back. The sender, which has to regain that ownership, usually copies at 20 GB/s and more, but
//! at 3 GB/s in the slow mode of PERFORMANCE.md. The receiver copies as fast as ever then, and so does a receiver that
//! reads from the sender's memory, where each line passes once. Processes migrate, and the cores that a machine shows
//! need not be physical cores, so the sender measures.
//!
//! A sender that is half a ring ahead does not measure: then the receiver is the slow end, and lines that it has just
//! read take 100 to 200 ps a byte to regain.

/// Shorter payloads are not timed: the other work for a message would count as copying. Bytes.
pub(super) const TIMED_LEAST: usize = 8 * 1024;
/// Copies timed for one verdict; the majority decides. Losing the processor disturbs few of them, and in the slow mode
/// one in four is not slow.
pub(super) const SAMPLES: u32 = 8;
/// While copies are fast, one payload in so many is timed.
const ONE_IN: u32 = 8;
/// So many payloads pass before the first one is timed: the first use of a page takes longer.
pub(super) const UNTOUCHED: u32 = 160;
/// Slower copies count as slow, picoseconds a byte. Usual are 20 to 60, in the slow mode 200 to 400.
const SLOW_PS: u64 = 150;

/// The copy rate of one ring, measured by its sender.
#[derive(Debug)]
pub(super) struct CopyRate {
    slow: bool,
    /// Payloads between two that are timed, and those that still pass before the next one is.
    between: u32,
    pass: u32,
    /// Copies still to be timed before the verdict, and how many were slow so far.
    left: u32,
    slow_ones: u32,
    /// It was logged that this ring is slow.
    pub(super) said: bool,
}

impl Default for CopyRate {
    fn default() -> Self {
        Self { slow: false, between: 0, pass: UNTOUCHED, left: SAMPLES, slow_ones: 0, said: false }
    }
}

impl CopyRate {
    /// The last verdict; false before the first one.
    pub(super) fn is_slow(&self) -> bool {
        self.slow
    }

    /// Whether to time the payload that is about to be copied.
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

    /// So many payloads were copied without a call of `is_due`.
    pub(super) fn passed(&mut self, payloads: u32) {
        self.pass = self.pass.saturating_sub(payloads);
    }

    /// Times a later payload instead of this one.
    pub(super) fn put_off(&mut self) {
        self.pass = ONE_IN - 1;
    }

    /// A copy of `len` bytes took `ns` nanoseconds. True: the ring just became slow.
    pub(super) fn note(&mut self, len: usize, ns: u64) -> bool {
        let picoseconds = ns.saturating_mul(1000) / (len as u64).max(1);
        self.slow_ones += u32::from(picoseconds > SLOW_PS);
        self.left = self.left.saturating_sub(1);
        self.pass = self.between;
        if self.left > 0 {
            return false;
        }
        let (before, slow) = (self.slow, self.slow_ones > SAMPLES / 2);
        let (between, said) = (ONE_IN - 1, self.said);
        *self = Self { slow, between, pass: between, left: SAMPLES, slow_ones: 0, said };
        slow && !before
    }

    /// Measures a slow ring again: processes migrate.
    pub(super) fn try_again(&mut self) {
        if self.slow {
            *self = Self { pass: 0, said: self.said, ..Self::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 16 * 1024;

    /// How many payloads pass until the verdict is `slow`, if payload i takes `ns(i)`.
    fn until(slow: bool, rate: &mut CopyRate, ns: impl Fn(u32) -> u64) -> Option<u32> {
        (0..2000).find(|i| {
            if rate.is_due() {
                rate.note(LEN, ns(*i));
            }
            rate.is_slow() == slow
        })
    }

    #[test]
    fn the_first_payloads_tell_once_all_memory_was_touched() {
        let mut rate = CopyRate::default();
        assert_eq!(until(true, &mut rate, |_| 6000), Some(UNTOUCHED + SAMPLES - 1));
        let mut rate = CopyRate::default();
        let touching = |i: u32| if i < UNTOUCHED { 6000 } else { 1000 };
        assert_eq!(until(true, &mut rate, touching), None);
    }

    #[test]
    fn copies_that_become_slow_are_noticed_and_tried_again() {
        let mut rate = CopyRate::default();
        let becomes_slow = |i: u32| if i < 500 { 1000 } else { 6000 };
        let after = until(true, &mut rate, becomes_slow).unwrap();
        assert!((500..500 + 2 * SAMPLES * ONE_IN).contains(&after), "{after}");
        rate.try_again();
        assert!(!rate.is_slow());
        assert_eq!(until(true, &mut rate, |_| 6000), Some(SAMPLES - 1), "soon found again");
        rate.try_again();
        assert_eq!(until(true, &mut rate, |_| 1000), None);
    }

    #[test]
    fn most_copies_count() {
        let mut rate = CopyRate::default();
        let disturbed = |i: u32| if i % 8 < 3 { 1_000_000 } else { 1000 };
        assert_eq!(until(true, &mut rate, |i| disturbed(i / ONE_IN)), None);
        let mut rate = CopyRate::default();
        assert!(until(true, &mut rate, |i| if i % 4 == 0 { 1000 } else { 4000 }).is_some());
    }

    #[test]
    fn nothing_and_for_ever_are_times_too() {
        let mut rate = CopyRate::default();
        assert!(until(true, &mut rate, |_| u64::MAX).is_some());
        let mut rate = CopyRate::default();
        assert_eq!(until(true, &mut rate, |_| 0), None);
        assert!(!rate.note(0, 0));
    }
}
