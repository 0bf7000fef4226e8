//! Loss detection: a packet counts as lost once packets that were sent sufficiently later have arrived.
//!
//! Networks reorder packets, and the distance adapts to that: each packet that arrives after it was declared lost
//! doubles it, and many arrivals without such an event halve it again.

/// Later transmissions that must arrive before a packet counts as lost: initially, and at most.
const REORDERING_MIN: u64 = 3;
const REORDERING_MAX: u64 = 128;
/// Packets without such an event after which the distance is halved.
const IN_ORDER: u32 = 8192;
/// Transmissions without a loss after which the path counts as lossless.
const CLEAN: u64 = 8192;

/// The loss detection of one connection.
#[derive(Debug)]
pub(crate) struct Loss {
    /// The highest transmission that the peer has received, plus one.
    pub(super) echoed: u64,
    /// How many later transmissions must arrive before a packet counts as lost.
    reordering: u64,
    /// Packets that have arrived since one was last declared lost too early.
    in_order: u32,
    /// The transmission from which on the path counts as lossless.
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

    /// The highest transmission that has arrived; those before it were passed.
    pub(crate) fn arrived(&self) -> u64 {
        self.echoed.saturating_sub(1)
    }

    /// `transmission` has arrived.
    pub(super) fn on_echo(&mut self, transmission: u64) {
        self.echoed = self.echoed.max(transmission + 1);
    }

    /// A packet was lost; `next` is the next transmission.
    pub(super) fn on_lost(&mut self, next: u64) {
        self.clean_from = next + CLEAN;
    }

    /// A packet that was declared lost has arrived.
    pub(crate) fn on_late(&mut self) {
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

    /// Nothing was lost recently before `transmission`.
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
