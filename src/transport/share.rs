//! The split copy: the receiver and the sender of a long message copy it together. A work descriptor (a *cell*) in
//! shared memory says which chunks are not yet taken (PROTOCOL.md §2.9). The receiver takes chunks from the front, the
//! sender from the back, so that a buffer that is used again and again stays in the same caches.
//!
//! The receiver of the message owns the work descriptor. A run of chunks that the sender has taken belongs to the
//! sender until it reports success or failure: the receiver does not touch it, and its receive does not complete
//! before. A sender that comes too late finds another generation in the descriptor, or no chunk left.

use crate::sys::order::Word;
use std::sync::atomic::{AtomicU64, Ordering};

/// One split copy: a message that both ends copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Share {
    /// Index of the work descriptor, and which use of it this is.
    pub(crate) cell: u32,
    pub(crate) generation: u32,
    /// Bytes of a chunk.
    pub(crate) unit: u32,
    /// Bytes of the message.
    pub(crate) len: u64,
}

/// What the receiver or the sender does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taken {
    /// Copy, or send, these bytes.
    Part { offset: usize, len: usize },
    /// Wait: the sender is still copying, or no packet can be sent now.
    Wait,
    /// Neither end copies any more. The split copy has ended.
    Over,
}

/// The result of the sender's attempt to help.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Assisted {
    /// So many bytes were written.
    Moved(usize),
    /// No chunk is left, or the copy failed.
    Over,
}

/// A run of chunks: `first..first + count` of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    first: u32,
    count: u32,
}

/// A run is this fraction of the chunks that are left, so that both ends finish at the same time (measured:
/// fewer calls than with a quarter, 7 % at 512 KiB).
const FRACTION: u32 = 2;
/// Fewest chunks of a run, unless fewer are left.
const PART_MIN: u32 = 4;
/// Most chunks of a run.
const PART_MAX: u32 = 32;
/// Most bytes that the sender takes at once, unless one chunk is longer. For a long message, whose chunks are long,
/// this is less than [`PART_MAX`] chunks: the receiver has to wait for the run of a sender that lost its processor.
const HAND_MAX: u32 = 2 << 20;

/// Most chunks of a message.
const UNITS_MAX: u32 = 0xffff;

impl Share {
    /// Chunks of the message; `None`: the message is too long for chunks of this length.
    pub(crate) fn units(&self) -> Option<u32> {
        let units = self.len.checked_add(u64::from(self.unit).checked_sub(1)?)?;
        u32::try_from(units / u64::from(self.unit)).ok().filter(|units| *units <= UNITS_MAX)
    }

    /// Offset and length of a run of chunks, bytes.
    pub(crate) fn span(&self, part: Part) -> (usize, usize) {
        let at = |units: u64| (units * u64::from(self.unit)).min(self.len);
        let first = u64::from(part.first);
        let (from, to) = (at(first), at(first + u64::from(part.count)));
        (from as usize, (to - from) as usize)
    }
}

/// A work descriptor: the words that both processes see. `left` is {generation, chunks left} and changes by exchange
/// only. `status` is {chunks done, first chunk of a failed run + 1}. The sender writes it, and stops copying after a
/// failure.
///
/// Ordering: taking a run (acquire) follows the set-up of the descriptor (release of `left`). What the sender copied
/// (release of `status`) is visible when the receiver counts it (acquire); only then is the descriptor reused.
#[derive(Debug)]
pub(crate) struct Cell<'a, W = AtomicU64> {
    pub(crate) left: &'a W,
    pub(crate) status: &'a W,
}

impl<W> Clone for Cell<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Cell<'_, W> {}

fn join(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn split(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// The end that takes a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Receiver,
    Sender,
}

/// Packs the chunks that are left, `first..end`.
fn pack(first: u32, end: u32) -> u32 {
    end << 16 | first
}

fn unpack(left: u32) -> (u32, u32) {
    (left & UNITS_MAX, left >> 16)
}

/// The next run for one end, of at most `most` chunks, and the new word that takes it.
fn next_part(word: u64, generation: u32, who: End, most: u32) -> Option<(Part, u64)> {
    let (now, left) = split(word);
    let (first, end) = unpack(left);
    let left = end.checked_sub(first).filter(|left| now == generation && *left > 0)?;
    let count = (left / FRACTION).clamp(PART_MIN, PART_MAX).min(left).min(most);
    let (part, rest) = match who {
        End::Receiver => (Part { first, count }, pack(first + count, end)),
        End::Sender => (Part { first: end - count, count }, pack(first, end - count)),
    };
    Some((part, join(generation, rest)))
}

impl<W: Word> Cell<'_, W> {
    fn take(self, generation: u32, who: End, most: u32) -> Option<Part> {
        let mut word = self.left.load(Ordering::Acquire);
        loop {
            let (part, next) = next_part(word, generation, who, most)?;
            let exchange =
                self.left.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire);
            match exchange {
                Ok(_) => return Some(part),
                Err(now) => word = now,
            }
        }
    }

    /// Whether any chunk is not yet taken.
    fn has_more(self, generation: u32) -> bool {
        next_part(self.left.load(Ordering::Acquire), generation, End::Receiver, 1).is_some()
    }

    /// The sender takes a run of at most `most` chunks to send as messages; returns its offset and length. It does
    /// not report them as done: the receiver counts the chunks that arrive.
    pub(crate) fn begin_assist(self, share: &Share, most: u32) -> Option<(usize, usize)> {
        let (_, failed) = split(self.status.load(Ordering::Relaxed));
        if failed != 0 || share.units().is_none() || most == 0 {
            return None;
        }
        Some(share.span(self.take(share.generation, End::Sender, most)?))
    }

    /// The sender copies one run with `copy(offset, len)`, which returns how many bytes it moved.
    pub(crate) fn assist(
        self,
        share: &Share,
        mut copy: impl FnMut(usize, usize) -> Option<usize>,
    ) -> Assisted {
        let (_, failed) = split(self.status.load(Ordering::Relaxed));
        if failed != 0 || share.units().is_none() {
            return Assisted::Over;
        }
        let most = HAND_MAX.checked_div(share.unit).unwrap_or(1).clamp(1, PART_MAX);
        let Some(part) = self.take(share.generation, End::Sender, most) else {
            return Assisted::Over;
        };
        // Only the sender writes `status` from here on, until it reports the result of this run.
        let (done, _) = split(self.status.load(Ordering::Relaxed));
        let (mut offset, mut left) = share.span(part);
        let len = left;
        while left > 0 {
            match copy(offset, left) {
                Some(moved) if moved > 0 => {
                    offset += moved.min(left);
                    left -= moved.min(left);
                }
                _ => {
                    self.status.store(join(done, part.first + 1), Ordering::Release);
                    return Assisted::Over;
                }
            }
        }
        self.status.store(join(done.wrapping_add(part.count), 0), Ordering::Release);
        Assisted::Moved(len)
    }
}

/// The receiver's count of one split copy.
#[derive(Clone, Copy, Debug)]
struct Use {
    generation: u32,
    units: u32,
    /// Chunks that the receiver took, that arrived as messages, or that were withdrawn.
    mine: u32,
    stopped: bool,
}

/// The work descriptors of one link, kept by the receiver of its messages.
#[derive(Debug, Default)]
pub(crate) struct CellTable {
    uses: [Option<Use>; Self::LEN],
    generation: u32,
}

impl CellTable {
    /// Most split copies of one link at a time.
    pub(crate) const LEN: usize = 16;

    /// Begins the split copy of a message of `len` bytes in a free descriptor; `cell` returns descriptor number i.
    pub(crate) fn begin<'a, W: Word + 'a>(
        &mut self,
        len: usize,
        unit: u32,
        cell: impl Fn(usize) -> Option<Cell<'a, W>>,
    ) -> Option<Share> {
        let least = u32::try_from(len.div_ceil(UNITS_MAX as usize)).ok()?;
        let unit = if least > unit { least.checked_next_power_of_two()? } else { unit };
        let at = self.uses.iter().position(Option::is_none)?;
        let words = cell(at)?;
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let share = Share { cell: at as u32, generation, unit, len: len as u64 };
        let units = share.units()?;
        words.status.store(0, Ordering::Relaxed);
        words.left.store(join(generation, pack(0, units)), Ordering::Release);
        *self.uses.get_mut(at)? = Some(Use { generation, units, mine: 0, stopped: false });
        Some(share)
    }

    fn find(&mut self, share: &Share) -> Option<&mut Use> {
        let slot = self.uses.get_mut(share.cell as usize)?.as_mut();
        slot.filter(|used| used.generation == share.generation)
    }

    /// So many chunks that the sender had taken arrived as messages.
    pub(crate) fn arrived(&mut self, share: &Share, units: u32) {
        if let Some(used) = self.find(share) {
            used.mine = used.mine.saturating_add(units);
        }
    }

    /// What the receiver does next; it takes at most `most` chunks. After `Over` the descriptor is free.
    pub(crate) fn take<W: Word>(&mut self, share: &Share, cell: Cell<'_, W>, most: u32) -> Taken {
        let Some(used) = self.find(share) else { return Taken::Wait };
        let span = |part| {
            let (offset, len) = share.span(part);
            Taken::Part { offset, len }
        };
        if most == 0 && cell.has_more(used.generation) {
            return Taken::Wait;
        }
        if let Some(part) = cell.take(used.generation, End::Receiver, most) {
            used.mine = used.mine.saturating_add(part.count);
            return span(part);
        }
        let (done, failed) = split(cell.status.load(Ordering::Acquire));
        let helped = used.units.saturating_sub(used.mine);
        if done < helped && failed == 0 {
            return Taken::Wait;
        }
        if done < helped && !used.stopped {
            let (first, count) = (failed - 1, helped - done);
            used.mine = used.mine.saturating_add(count);
            return span(Part { first, count });
        }
        if let Some(slot) = self.uses.get_mut(share.cell as usize) {
            *slot = None;
        }
        Taken::Over
    }

    /// Withdraws all chunks that are not taken: the message is given up.
    pub(crate) fn stop<W: Word>(&mut self, share: &Share, cell: Cell<'_, W>) {
        if let Some(used) = self.find(share) {
            used.stop(cell);
        }
    }

    /// Stops all split copies. Returns whether the sender is still copying a run of one of them.
    pub(crate) fn stop_all<'a, W: Word + 'a>(
        &mut self,
        cell: impl Fn(usize) -> Option<Cell<'a, W>>,
    ) -> bool {
        let mut busy = false;
        for (at, slot) in self.uses.iter_mut().enumerate() {
            let (Some(used), Some(cell)) = (slot, cell(at)) else { continue };
            used.stop(cell);
            let (done, failed) = split(cell.status.load(Ordering::Acquire));
            busy |= failed == 0 && done < used.units.saturating_sub(used.mine);
        }
        busy
    }
}

impl Use {
    fn stop<W: Word>(&mut self, cell: Cell<'_, W>) {
        self.stopped = true;
        let (_, left) = split(cell.left.swap(join(self.generation, 0), Ordering::AcqRel));
        let (first, end) = unpack(left);
        self.mine = self.mine.saturating_add(end.saturating_sub(first));
    }
}

#[cfg(all(loom, test))]
mod model;
#[cfg(test)]
mod tests;
