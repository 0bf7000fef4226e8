//! Memory of ours that short reads of peers' regions land in, to be copied from there: to look up where the
//! application's buffer is registered costs more than to copy so little, and to register it far more. An
//! application that reads a little here and there never has its memory locked for that.

use crate::memory::{OwnedBuffer, SegmentList};

/// Longest read that lands here, bytes, and how many there may be at the same time.
pub(super) const SHORT: usize = 4096;
const PLACES: usize = 64;

/// See the module.
pub(super) struct Landing {
    memory: OwnedBuffer,
    /// By place, where it goes; `None`: nothing lands there.
    to: Vec<Option<SegmentList>>,
    free: Vec<usize>,
}

impl Default for Landing {
    fn default() -> Self {
        Self {
            memory: OwnedBuffer::zeroed(PLACES * SHORT),
            to: vec![None; PLACES],
            free: (0..PLACES).rev().collect(),
        }
    }
}

impl Landing {
    /// All of it.
    pub(super) fn memory(&self) -> SegmentList {
        self.memory.segments()
    }

    /// A place for a read that goes to `to`, and its memory. `None`: it is too long, or there is no place.
    pub(super) fn take(&mut self, to: &SegmentList) -> Option<(usize, SegmentList)> {
        if to.len() > SHORT {
            return None;
        }
        let place = self.free.pop()?;
        *self.to.get_mut(place)? = Some(*to);
        Some((place, self.memory().slice(place * SHORT, to.len())))
    }

    /// What was read has landed: it goes where it was meant to go.
    pub(super) fn land(&mut self, place: usize) {
        if let Some(to) = self.leave(place) {
            self.memory().slice(place * SHORT, to.len()).copy_to(0, &to, 0, to.len());
        }
    }

    /// Places in use.
    #[cfg(test)]
    pub(super) fn in_use(&self) -> usize {
        PLACES - self.free.len()
    }

    /// Nothing lands there any more: the queue pair has ended, or the read has not begun.
    pub(super) fn leave(&mut self, place: usize) -> Option<SegmentList> {
        let to = self.to.get_mut(place)?.take()?;
        self.free.push(place);
        Some(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lands_goes_where_it_was_meant_to_go() {
        let mut landing = Landing::default();
        let bytes = |buffer: &OwnedBuffer| {
            let mut bytes = vec![0; buffer.segments().len()];
            buffer.segments().copy_out(0, &mut bytes);
            bytes
        };
        assert!(landing.take(&OwnedBuffer::zeroed(SHORT + 1).segments()).is_none(), "too long");
        let sinks: Vec<_> = (0..PLACES).map(|_| OwnedBuffer::zeroed(5)).collect();
        let taken: Vec<_> =
            sinks.iter().map(|sink| landing.take(&sink.segments()).unwrap()).collect();
        assert!(landing.take(&sinks[0].segments()).is_none(), "all are in use");
        for (n, (_, memory)) in taken.iter().enumerate() {
            assert_eq!(memory.copy_in(0, &[n as u8; 5]), 5);
        }
        for (n, (place, _)) in taken.iter().enumerate() {
            if n % 2 == 0 {
                landing.land(*place);
                landing.land(*place);
            } else {
                assert!(landing.leave(*place).is_some() && landing.leave(*place).is_none());
            }
            let want = if n % 2 == 0 { n as u8 } else { 0 };
            assert_eq!(bytes(&sinks[n]), [want; 5]);
        }
        assert_eq!(landing.in_use(), 0);
    }
}
