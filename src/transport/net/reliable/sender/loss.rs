//! When a packet counts as lost: once packets that were sent so much later have arrived.
//!
//! Networks reorder. How far is learned: each packet that arrives after it counted as lost doubles the distance, and many
//! that arrive in order halve it again.

/// Later transmissions that arrive before one counts as lost, at first and at most.
const REORDERING_MIN: u64 = 3;
const REORDERING_MAX: u64 = 128;
/// Packets without such an event after which half as many are enough again.
const IN_ORDER: u32 = 8192;
/// Transmissions after the last loss from which on the path counts as one that loses nothing.
const CLEAN: u64 = 8192;

/// See the module.
#[derive(Debug)]
pub(crate) struct Loss {
    /// The highest transmission that has arrived there, plus one.
    pub(super) echoed: u64,
    /// How many later transmissions arrive before one counts as lost.
    reordering: u64,
    /// Packets that have arrived since one was last given up too early.
    in_order: u32,
    /// From which transmission on nothing was lost lately.
    clean_from: u64,
}

impl Loss {
    /// `first` is the first transmission.
    pub(super) fn new(first: u64) -> Self {
        Self { echoed: first, reordering: REORDERING_MIN, in_order: 0, clean_from: first }
    }

    /// Transmissions before this one are lost unless they have arrived.
    pub(super) fn lost_before(&self) -> u64 {
        self.echoed.saturating_sub(self.reordering)
    }

    /// `transmission` has arrived.
    pub(super) fn on_echo(&mut self, transmission: u64) {
        self.echoed = self.echoed.max(transmission + 1);
    }

    /// A packet was lost before the transmission that is the next one.
    pub(super) fn on_lost(&mut self, next: u64) {
        self.clean_from = next + CLEAN;
    }

    /// A packet that counted as lost has arrived.
    pub(super) fn on_late(&mut self) {
        self.reordering = (self.reordering * 2).min(REORDERING_MAX);
        self.in_order = 0;
    }

    /// `packets` have arrived.
    pub(super) fn on_arrived(&mut self, packets: u32) {
        self.in_order += packets;
        if self.in_order >= IN_ORDER {
            self.in_order = 0;
            self.reordering = (self.reordering / 2).max(REORDERING_MIN);
        }
    }

    /// Nothing was lost lately before `transmission`.
    pub(super) fn is_clean(&self, transmission: u64) -> bool {
        transmission >= self.clean_from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reordering_is_learned_and_forgotten() {
        let mut loss = Loss::new(1);
        loss.on_echo(10);
        loss.on_echo(8);
        assert_eq!((loss.echoed, loss.lost_before()), (11, 8));
        loss.on_late();
        assert_eq!(loss.lost_before(), 5);
        (0..10).for_each(|_| loss.on_late());
        loss.on_echo(200);
        assert_eq!(loss.lost_before(), 201 - REORDERING_MAX);
        (0..20).for_each(|_| loss.on_arrived(IN_ORDER));
        assert_eq!(loss.lost_before(), 201 - REORDERING_MIN);
        assert!(loss.is_clean(1));
        loss.on_lost(201);
        assert!(!loss.is_clean(201) && loss.is_clean(201 + CLEAN));
    }
}
