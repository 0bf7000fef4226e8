//! One long message that two processes copy together. A *cell* in shared memory says what of it nobody
//! has taken yet (PROTOCOL.md §2.9): the receiver takes from its front, the sender from its back, so that
//! a buffer that is used again and again stays in the same caches.
//!
//! The receiver of the message owns the cell. A part that the sender has taken is the sender's until
//! it says that it is done or has failed; nobody else touches it, and the receive does not end before.
//! A taker who comes too late finds another generation in the cell, or nothing left.

use crate::sys::order::Word;
use std::sync::atomic::{AtomicU64, Ordering};

/// A message that is shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Share {
    /// Which cell, and which use of it.
    pub(crate) cell: u32,
    pub(crate) generation: u32,
    /// Bytes that parts are counted in.
    pub(crate) unit: u32,
    /// Bytes of the message.
    pub(crate) len: u64,
}

/// What an end gets to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taken {
    /// To copy, or to send, these bytes.
    Part { offset: usize, len: usize },
    /// To wait: the sender still copies, or nothing can leave.
    Wait,
    /// Nobody copies any more. The share has ended.
    Over,
}

/// What became of an offer to help.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Assisted {
    /// So many bytes were written.
    Moved(usize),
    /// Nothing is left to do, or it does not work.
    Over,
}

/// Units `first..first + count` of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    first: u32,
    count: u32,
}

/// A part is this fraction of what is left, so that both finish at the same time (measured: fewer calls
/// than with a quarter, 7 % at 512 KiB), ...
const FRACTION: u32 = 2;
/// ... at least so many units, ...
const PART_MIN: u32 = 4;
/// ... and at most so many.
const PART_MAX: u32 = 32;
/// Bytes that the sender takes at once, unless a unit has more. Of a long message, whose units are long, this is less than
/// [`PART_MAX`] units: the receiver waits for what a sender has in hand that has no processor.
const HAND_MAX: u32 = 2 << 20;

/// Most units of a message.
const UNITS_MAX: u32 = 0xffff;

impl Share {
    /// `None`: no message is as long as that, in these units.
    pub(crate) fn units(&self) -> Option<u32> {
        let units = self.len.checked_add(u64::from(self.unit).checked_sub(1)?)?;
        u32::try_from(units / u64::from(self.unit)).ok().filter(|units| *units <= UNITS_MAX)
    }

    /// Offset and length of a part, bytes.
    pub(crate) fn span(&self, part: Part) -> (usize, usize) {
        let at = |units: u64| (units * u64::from(self.unit)).min(self.len);
        let first = u64::from(part.first);
        let (from, to) = (at(first), at(first + u64::from(part.count)));
        (from as usize, (to - from) as usize)
    }
}

/// The words that both processes see. The first is {generation, what is left}, changed by exchange
/// only; the second {units done, first unit of a part that failed + 1}, written by the sender, who
/// copies nothing more of a message of which a part has failed.
///
/// Order: taking a part (acquire) comes after the cell was made ready (release of `left`). What the sender has copied
/// (release of `status`) is there when the receiver counts it (acquire), and only then is the cell used again.
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

/// Who takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Receiver,
    Sender,
}

/// What is left: units `first..end`.
fn pack(first: u32, end: u32) -> u32 {
    end << 16 | first
}

fn unpack(left: u32) -> (u32, u32) {
    (left & UNITS_MAX, left >> 16)
}

/// The next part for one end, of `most` units, and the word that takes it.
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

    /// Whether there is something that nobody has taken.
    fn has_more(self, generation: u32) -> bool {
        next_part(self.left.load(Ordering::Acquire), generation, End::Receiver, 1).is_some()
    }

    /// The sender takes a part of at most `most` units, to send it as messages: offset and length. It does
    /// not say that it is done with it; the receiver counts what comes.
    pub(crate) fn begin_assist(self, share: &Share, most: u32) -> Option<(usize, usize)> {
        let (_, failed) = split(self.status.load(Ordering::Relaxed));
        if failed != 0 || share.units().is_none() || most == 0 {
            return None;
        }
        Some(share.span(self.take(share.generation, End::Sender, most)?))
    }

    /// The sender copies one part by `copy(offset, len)`, which says how many bytes it has moved.
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
        // Ours alone from here on, until the status says what became of the part.
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

/// A share as its receiver counts.
#[derive(Clone, Copy, Debug)]
struct Use {
    generation: u32,
    units: u32,
    /// Units that the receiver has taken, that came as messages, or that nobody shall take.
    mine: u32,
    stopped: bool,
}

/// Cells of one link, kept by the receiver of its messages.
#[derive(Debug, Default)]
pub(crate) struct CellTable {
    uses: [Option<Use>; Self::LEN],
    generation: u32,
}

impl CellTable {
    /// Messages of one link that may be shared at a time.
    pub(crate) const LEN: usize = 16;

    /// Begins to share a message of `len` bytes in a free cell; `cell` tells where each is.
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

    /// Units that the sender has taken came as messages.
    pub(crate) fn arrived(&mut self, share: &Share, units: u32) {
        if let Some(used) = self.find(share) {
            used.mine = used.mine.saturating_add(units);
        }
    }

    /// What the receiver does next, who takes `most` units. After `Over` the cell serves other messages.
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

    /// Nobody takes any more of it; the message is given up.
    pub(crate) fn stop<W: Word>(&mut self, share: &Share, cell: Cell<'_, W>) {
        if let Some(used) = self.find(share) {
            used.stop(cell);
        }
    }

    /// Stops all that is shared. Returns whether the sender still copies something of it.
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
