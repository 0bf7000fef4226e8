//! Bounce buffers: this endpoint's memory, registered once, through which short direct RMA requests go. Finding the
//! registration of an application's buffer costs more than copying so few bytes, and making one far more. An
//! application that writes and reads only a few bytes now and then never has its memory locked for that.

use crate::memory::{OwnedBuffer, SegmentList};
use crate::transport::STAGED_MAX;

/// Number of bounce buffers.
const PLACES: usize = 64;

/// The use of a bounce buffer.
#[derive(Clone, Copy, Debug)]
enum Use {
    Free,
    /// A write reads from it.
    Leaves,
    /// A read arrives in it, and is copied to these segments.
    Lands(SegmentList),
}

/// The bounce buffers of an endpoint. `R` is their registration.
pub(super) struct Staging<R> {
    // Fields are dropped in this order.
    lease: Option<R>,
    memory: OwnedBuffer,
    places: Vec<Use>,
    free: Vec<usize>,
}

impl<R> Default for Staging<R> {
    fn default() -> Self {
        Self {
            lease: None,
            // The last byte belongs to no slot.
            memory: OwnedBuffer::zeroed(PLACES * STAGED_MAX + 1),
            places: vec![Use::Free; PLACES],
            free: (0..PLACES).rev().collect(),
        }
    }
}

impl<R> Staging<R> {
    /// The registration, which is made if it does not exist.
    pub(super) fn lease(&mut self, register: impl FnOnce(&SegmentList) -> Option<R>) -> Option<&R> {
        if self.lease.is_none() {
            self.lease = register(&self.memory.segments());
        }
        self.lease.as_ref()
    }

    /// The memory is no longer registered.
    pub(super) fn forget_lease(&mut self) {
        self.lease = None;
    }

    /// A byte that any flush read may overwrite.
    pub(super) fn byte(&self) -> SegmentList {
        self.memory.segments().slice(PLACES * STAGED_MAX, 1)
    }

    fn of(&self, place: usize, len: usize) -> SegmentList {
        self.memory.segments().slice(place * STAGED_MAX, len)
    }

    /// A bounce buffer for a request that `reads` to `local`, or that writes the bytes of `local`, which are copied
    /// now. `None`: it is too long, or no buffer is free.
    #[inline]
    pub(super) fn take(
        &mut self,
        local: &SegmentList,
        reads: bool,
    ) -> Option<(usize, SegmentList)> {
        if local.len() > STAGED_MAX {
            return None;
        }
        let place = self.free.pop()?;
        let memory = self.of(place, local.len());
        *self.places.get_mut(place)? = if reads {
            Use::Lands(*local)
        } else {
            local.copy_to(0, &memory, 0, local.len());
            Use::Leaves
        };
        Some((place, memory))
    }

    /// The request is complete: copies the bytes of a read to their destination.
    #[inline]
    pub(super) fn finish(&mut self, place: usize) {
        if let Some(to) = self.leave(place) {
            self.of(place, to.len()).copy_to(0, &to, 0, to.len());
        }
    }

    /// Bounce buffers in use.
    #[cfg(test)]
    pub(super) fn in_use(&self) -> usize {
        PLACES - self.free.len()
    }

    /// Frees a bounce buffer that no request uses any more: the queue pair has ended, or the request was not begun.
    /// Returns the destination of its read.
    pub(super) fn leave(&mut self, place: usize) -> Option<SegmentList> {
        let used = self.places.get_mut(place)?;
        let to = match std::mem::replace(used, Use::Free) {
            Use::Free => return None,
            Use::Leaves => None,
            Use::Lands(to) => Some(to),
        };
        self.free.push(place);
        to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(list: &SegmentList) -> Vec<u8> {
        let mut bytes = vec![0; list.len()];
        list.copy_out(0, &mut bytes);
        bytes
    }

    #[test]
    fn what_lands_goes_where_it_was_meant_to_go() {
        let mut staging = Staging::<()>::default();
        let long = OwnedBuffer::zeroed(STAGED_MAX + 1);
        assert!(staging.take(&long.segments(), true).is_none(), "too long");
        let sinks: Vec<_> = (0..PLACES).map(|_| OwnedBuffer::zeroed(5)).collect();
        let taken: Vec<_> =
            sinks.iter().map(|sink| staging.take(&sink.segments(), true).unwrap()).collect();
        assert!(staging.take(&sinks[0].segments(), true).is_none(), "all are in use");
        for (n, (_, memory)) in taken.iter().enumerate() {
            assert_eq!(memory.copy_in(0, &[n as u8; 5]), 5);
        }
        for (n, (place, _)) in taken.iter().enumerate() {
            if n % 2 == 0 {
                staging.finish(*place);
                staging.finish(*place);
            } else {
                assert!(staging.leave(*place).is_some() && staging.leave(*place).is_none());
            }
            let want = if n % 2 == 0 { n as u8 } else { 0 };
            assert_eq!(bytes(&sinks[n].segments()), [want; 5]);
        }
        assert_eq!(staging.in_use(), 0);
    }

    #[test]
    fn what_leaves_is_what_was_there_at_the_call() {
        let mut staging = Staging::<()>::default();
        let source = OwnedBuffer::from(vec![7; STAGED_MAX]);
        let taken: Vec<_> =
            (0..PLACES).map(|_| staging.take(&source.segments(), false).unwrap()).collect();
        assert!(staging.take(&source.segments(), false).is_none(), "all are in use");
        source.segments().copy_in(0, &[8; STAGED_MAX]);
        staging.byte().copy_in(0, &[9]);
        for (place, memory) in &taken {
            assert_eq!(bytes(memory), [7; STAGED_MAX]);
            staging.finish(*place);
            assert!(staging.leave(*place).is_none(), "it is free");
        }
        assert_eq!((staging.in_use(), bytes(&source.segments())), (0, vec![8; STAGED_MAX]));
    }
}
