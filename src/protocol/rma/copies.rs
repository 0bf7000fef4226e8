//! Copies of the data of injected writes (FI_INJECT) that have not been sent when the call returns. They are slots of
//! one allocation, so that a device that reads them needs one registration, and not one for each copy.

use crate::memory::declared::{self, Declaration};
use crate::memory::{OwnedBuffer, SegmentList};

/// Length of a slot, bytes: the longest injected write.
const PLACE: usize = 16 * 1024;
const PLACES: usize = 64;

/// A pool of such slots: see the module.
#[derive(Debug, Default)]
pub(super) struct Copies {
    // The fields are dropped in this order. Allocated on first use.
    memory: Option<(Declaration, OwnedBuffer)>,
    free: Vec<usize>,
}

impl Copies {
    /// Copies `from` to a slot, until [`Self::leave`]. `None`: it is empty or too long, no slot is free, or the
    /// device that has it failed.
    pub(super) fn take(&mut self, from: &SegmentList) -> Option<(usize, SegmentList)> {
        if !(1..=PLACE).contains(&from.len()) {
            return None;
        }
        let (_, memory) = self.memory.get_or_insert_with(|| {
            let memory = OwnedBuffer::zeroed(PLACES * PLACE);
            self.free = (0..PLACES).rev().collect();
            let list = memory.segments();
            (declared::declare(list.first_addr() as usize, list.len()), memory)
        });
        let place = self.free.pop()?;
        let copy = memory.segments().slice(place * PLACE, from.len());
        if from.copy_to(0, &copy, 0, from.len()) < from.len() {
            self.free.push(place);
            return None;
        }
        Some((place, copy))
    }

    /// Frees a slot that is read no more.
    pub(super) fn leave(&mut self, place: usize) {
        self.free.push(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_what_was_there_until_it_is_left() {
        let mut copies = Copies::default();
        for len in [0, PLACE + 1] {
            assert!(copies.take(&OwnedBuffer::zeroed(len).segments()).is_none(), "{len}");
        }
        let source = OwnedBuffer::zeroed(PLACE);
        let taken: Vec<_> = (0..PLACES)
            .map(|n| {
                source.segments().copy_in(0, &[n as u8; PLACE]);
                copies.take(&source.segments().slice(n, PLACE - n)).unwrap()
            })
            .collect();
        assert!(copies.take(&source.segments()).is_none(), "all are in use");
        for (n, (_, copy)) in taken.iter().enumerate() {
            let mut bytes = vec![0; copy.len()];
            copy.copy_out(0, &mut bytes);
            assert_eq!(bytes, vec![n as u8; PLACE - n]);
            let whole = declared::around(copy.first_addr() as usize, copy.len());
            assert!(whole.is_some_and(|(from, to)| to - from == PLACES * PLACE));
        }
        copies.leave(taken[5].0);
        assert_eq!(copies.take(&source.segments()).unwrap().0, taken[5].0);
    }
}
