//! Split copies in the simulated network: the work descriptors are those of shared memory, but chunks that a sender has
//! taken arrive in their own time, in part, or never.

use super::rng::Rng;
use crate::memory::SegmentList;
use crate::transport::share::{Assisted, Cell, CellTable, Share, Taken};
use std::sync::atomic::{AtomicU64, Ordering};

/// Parameters that do not change during a run.
#[derive(Clone, Debug)]
pub(super) struct Teamwork {
    /// Shortest message that is split (0: none is), and the length of a chunk, bytes.
    pub(super) min: usize,
    pub(super) unit: u32,
    /// How often a chunk does not arrive at once, and how often a late one then arrives, percent.
    pub(super) late: u64,
    pub(super) arrives: u64,
    /// How often a chunk cannot be written, percent.
    pub(super) failures: u64,
}

impl Teamwork {
    pub(super) fn none() -> Self {
        Self { min: 0, unit: 100, late: 0, arrives: 100, failures: 0 }
    }
}

/// The chunks that a sender has in progress.
#[derive(Debug)]
struct Landing {
    bytes: Vec<(Vec<u8>, SegmentList)>,
    /// The descriptor whose second word the sender will write, and the value.
    cell: usize,
    status: u64,
}

/// The split copies of one side of a link, as receiver.
#[derive(Debug, Default)]
pub(super) struct Shares {
    table: CellTable,
    words: [[AtomicU64; 2]; CellTable::LEN],
    /// The sender's own view of the second word: descriptor, generation, value.
    said: (u32, u32, AtomicU64),
    landing: Option<Landing>,
}

fn cell(words: &[[AtomicU64; 2]], at: usize) -> Option<Cell<'_>> {
    let [left, status] = words.get(at)?;
    Some(Cell { left, status })
}

impl Shares {
    pub(super) fn is_idle(&self) -> bool {
        self.landing.is_none()
    }

    pub(super) fn begin(&mut self, len: usize, unit: u32) -> Option<Share> {
        let Self { table, words, .. } = self;
        table.begin(len, unit, |at| cell(words, at))
    }

    pub(super) fn take(&mut self, share: &Share, most: u32) -> Taken {
        let Self { table, words, .. } = self;
        table.take(share, cell(words, share.cell as usize).unwrap(), most)
    }

    pub(super) fn arrived(&mut self, share: &Share, units: u32) {
        self.table.arrived(share, units);
    }

    /// The sender takes chunks, to send them.
    pub(super) fn begin_assist(&mut self, share: &Share, most: u32) -> Taken {
        let said = (self.said.0, self.said.1) == (share.cell, share.generation);
        let none = AtomicU64::new(0);
        let status = if said { &self.said.2 } else { &none };
        let Some(real) = cell(&self.words, share.cell as usize) else { return Taken::Over };
        match (Cell { left: real.left, status }).begin_assist(share, most) {
            Some((offset, len)) => Taken::Part { offset, len },
            None => Taken::Over,
        }
    }

    pub(super) fn stop(&mut self, share: &Share) {
        let Self { table, words, .. } = self;
        table.stop(share, cell(words, share.cell as usize).unwrap());
    }

    /// The sender takes chunks; `copy` returns the bytes that it writes.
    pub(super) fn assist(
        &mut self,
        share: &Share,
        teamwork: &Teamwork,
        rng: &mut Rng,
        mut copy: impl FnMut(usize, usize) -> Option<(Vec<u8>, SegmentList)>,
    ) -> Assisted {
        self.land();
        let Some(real) = cell(&self.words, share.cell as usize) else { return Assisted::Over };
        if (self.said.0, self.said.1) != (share.cell, share.generation) {
            self.said = (share.cell, share.generation, AtomicU64::new(0));
        }
        let mut bytes = Vec::new();
        let before = self.said.2.load(Ordering::Relaxed);
        let told = Cell { left: real.left, status: &self.said.2 };
        let assisted = told.assist(share, |offset, len| {
            let written = copy(offset, len)?;
            let len = written.0.len();
            bytes.push(written);
            (!rng.percent(teamwork.failures)).then_some(len)
        });
        let status = self.said.2.load(Ordering::Relaxed);
        if status != before {
            self.landing = Some(Landing { bytes, cell: share.cell as usize, status });
            if !rng.percent(teamwork.late) {
                self.land();
            }
        }
        assisted
    }

    /// The chunks in progress arrive, and the sender says so.
    pub(super) fn land(&mut self) {
        let Some(Landing { bytes, cell, status }) = self.landing.take() else { return };
        for (bytes, to) in bytes {
            assert_eq!(to.copy_in(0, &bytes), bytes.len());
        }
        self.words[cell][1].store(status, Ordering::Release);
    }

    /// The sender dies: its chunks in progress arrive in part, and it says nothing.
    pub(super) fn die(&mut self, rng: &mut Rng) {
        let Some(Landing { bytes, .. }) = self.landing.take() else { return };
        for (bytes, to) in bytes {
            to.copy_in(0, &bytes[..rng.below(bytes.len() + 1)]);
        }
    }

    /// The memory that the chunks would arrive in is gone.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}
