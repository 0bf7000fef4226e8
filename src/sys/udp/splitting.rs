//! Whether the kernel is to split messages into datagrams (UDP_SEGMENT).
//!
//! A device may be unable to split, or may have lost the checksum offload that splitting needs. That shows as an error of
//! a message that is to be split, and the same datagrams leave one by one. But a kernel before 6.1.53 also refuses what
//! finds no place in the table of neighbours with such an error, and the next moment there may be one. So splitting is
//! tried again, after twice as many batches each time in a row that it fails.

/// Batches that are sent without being split by the kernel after it has refused to split one: at first, and at most.
const PLAIN: (u32, u32) = (16, 16_384);

/// Whether the kernel is to split messages into datagrams: see the module.
#[derive(Debug)]
pub(super) struct Splitting {
    able: bool,
    /// Batches that are still sent without, and how many will be after the next failure.
    plain: u32,
    next: u32,
}

impl Splitting {
    /// `able`: this kernel has the option.
    pub(super) fn new(able: bool) -> Self {
        Self { able, plain: 0, next: PLAIN.0 }
    }

    /// Whether the next batch is split.
    pub(super) fn is_on(&self) -> bool {
        self.able && self.plain == 0
    }

    /// The same, for a batch that is sent now.
    pub(super) fn for_batch(&mut self) -> bool {
        let on = self.is_on();
        self.plain = self.plain.saturating_sub(1);
        on
    }

    pub(super) fn on_split(&mut self) {
        self.next = PLAIN.0;
    }

    #[cold]
    pub(super) fn on_refused(&mut self) {
        self.plain = self.next;
        self.next = (2 * self.next).min(PLAIN.1);
    }
}
