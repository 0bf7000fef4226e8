//! Copies of what operations write, where the application may use its buffer again before the bytes have left
//! (FI_INJECT). They are parts of one piece of memory: a device that is to read it has to know one piece, and not
//! each anew.

use crate::memory::declared::{self, Declaration};
use crate::memory::{OwnedBuffer, SegmentList};

/// Bytes of a place: as many as may be injected.
const PLACE: usize = 16 * 1024;
const PLACES: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Copies {
    // Ended in this order. Made at first need.
    memory: Option<(Declaration, OwnedBuffer)>,
    free: Vec<usize>,
}

impl Copies {
    /// Copies `from` to a place, until [`Self::leave`]. `None`: it is empty or too long, or there is none.
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
        from.copy_to(0, &copy, 0, from.len());
        Some((place, copy))
    }

    /// Nobody reads it any more.
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
