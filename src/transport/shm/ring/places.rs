//! Recycled payload buffers (*places*): the reader of one may write its next payload there, in the other direction.
//!
//! A core gets write access to a line that it has just read sooner than to one that it wrote and the other core has
//! read since. A ring for each direction has only lines of the latter kind, unless it is so large that they have left
//! both caches before their next use (bench/notes/node.md). A payload buffer changes its owner with each message whose
//! payload it holds. Its first owner is the end that made its segment. No buffer is ever lost: the message that hands
//! it over is received, or the link ends.

use super::super::layout::{Geometry, PLACE_ROOM};
use super::super::storage::Storage;
use std::collections::VecDeque;

/// A payload buffer of one of the two segments, one for each direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// It is in the segment that we made.
    pub(super) ours: bool,
    pub(super) index: u8,
}

/// What a message with payload beside its slot says about the other direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Handed {
    /// The payload buffer that the message hands over, if any.
    pub(super) place: Option<Place>,
    /// Bytes of the payload.
    pub(super) len: u32,
    /// How many such messages the sender had received, and how many we have by now, modulo 2^16.
    pub(super) seen: u16,
    pub(super) count: u16,
}

/// The payload buffers of one segment.
#[derive(Clone, Debug)]
pub(crate) struct Area<M> {
    memory: M,
    geometry: Geometry,
    /// Identifies the segment in messages whose payload lies here: 24 bits.
    identity: u32,
}

impl<M: Storage> Area<M> {
    pub(crate) fn new(memory: M, geometry: Geometry, identity: u32) -> Self {
        debug_assert!(memory.len() >= geometry.len());
        Self { memory, geometry, identity }
    }

    pub(super) fn memory(&self) -> &M {
        &self.memory
    }

    /// The offset field of a slot whose payload lies in buffer `index`.
    #[inline]
    pub(super) fn name(&self, index: u8) -> u32 {
        self.identity << 8 | u32::from(index)
    }

    /// The payload buffer that a slot means by `name`, if it exists and `len` bytes fit.
    #[inline]
    pub(super) fn find(&self, name: u32, len: usize) -> Option<(u8, *mut u8)> {
        let index = self.index(name, len)?;
        Some((index, self.start(index)?))
    }

    /// Its index alone.
    #[inline]
    pub(super) fn index(&self, name: u32, len: usize) -> Option<u8> {
        let index = name as u8;
        let fits = name >> 8 == self.identity && len <= PLACE_ROOM;
        (fits && self.geometry.place(index).is_some()).then_some(index)
    }

    /// First byte of payload buffer `index`. `None`: there is no such buffer, or the segment is not mapped as a whole.
    #[inline]
    pub(super) fn start(&self, index: u8) -> Option<*mut u8> {
        let offset = self.geometry.place(index)?;
        // SAFETY: the buffer lies inside the segment by its geometry.
        Some(unsafe { self.memory.whole()?.as_ptr().add(offset) })
    }
}

/// A payload buffer that we own.
#[derive(Clone, Copy, Debug)]
struct Free {
    place: Place,
    /// Bytes of it that we have read since we last wrote there; all of it if it was never used.
    read: u32,
    /// The value of `clock` when we became its owner.
    since: u32,
}

/// How many of the most recently received buffers are considered.
const LOOKS: usize = 4;
/// After so many bytes of payload a buffer is in no cache any more.
const COLD: u32 = 2 << 20;
/// Payloads that go through the ring after the peer sent one before it had received all from this end. If both ends
/// send at once, lines that the peer has just written are no cheaper than lines that are in neither cache.
const REST: u32 = 128;

/// The payload buffers that a producer owns, of the segments of both directions.
#[derive(Debug)]
pub(super) struct Places<M> {
    pub(super) ours: Area<M>,
    pub(super) theirs: Area<M>,
    /// The buffers that we own, the most recently received one at the end.
    free: VecDeque<Free>,
    /// The same as bits: those of `theirs`, then those of `ours`.
    bits: [u64; 2],
    /// Payloads that still have to go through the ring.
    rest: u32,
    /// Bytes of payloads sent so far.
    clock: u32,
}

impl<M: Storage> Places<M> {
    /// We own all of `ours`, and none of `theirs`.
    pub(super) fn new(ours: Area<M>, theirs: Area<M>) -> Self {
        let all = usize::from(ours.geometry.places) + usize::from(theirs.geometry.places);
        let fresh =
            |index| Free { place: Place { ours: true, index }, read: PLACE_ROOM as u32, since: 0 };
        let mut free = VecDeque::with_capacity(all);
        free.extend((0..ours.geometry.places).rev().map(fresh));
        let had = u64::MAX.checked_shr(64 - u32::from(ours.geometry.places)).unwrap_or(0);
        Self { ours, theirs, free, bits: [0, had], rest: 0, clock: 0 }
    }

    #[inline]
    fn bit(&mut self, place: Place) -> (&mut u64, u64) {
        let [theirs, ours] = &mut self.bits;
        (if place.ours { ours } else { theirs }, 1 << (place.index & 63))
    }

    /// A payload buffer for a payload of `len` bytes. Not one of which the peer has read more than we have since,
    /// unless that was long ago.
    #[inline]
    pub(super) fn take(&mut self, len: usize) -> Option<Place> {
        self.clock = self.clock.wrapping_add(len as u32);
        if self.rest > 0 {
            self.rest -= 1;
            return None;
        }
        if len > PLACE_ROOM {
            return None;
        }
        let len = len as u32;
        let mut recent = self.free.iter().rev().take(LOOKS);
        let free = match recent.position(|free| free.read >= len) {
            Some(0) => self.free.pop_back()?,
            Some(at) => self.free.remove(self.free.len() - 1 - at)?,
            None => {
                let oldest = self.free.front()?;
                if self.clock.wrapping_sub(oldest.since) < COLD {
                    return None;
                }
                self.free.pop_front()?
            }
        };
        let (bits, bit) = self.bit(free.place);
        *bits &= !bit;
        Some(free.place)
    }

    /// The peer has sent before it had received all of our messages.
    pub(super) fn rest(&mut self) {
        self.rest = REST;
    }

    /// A payload of `len` bytes was received in `place`. False: the peer did not own it.
    #[inline]
    pub(super) fn give(&mut self, place: Place, len: u32) -> bool {
        let (bits, bit) = self.bit(place);
        if *bits & bit != 0 {
            return false;
        }
        *bits |= bit;
        self.free.push_back(Free { place, read: len, since: self.clock });
        true
    }

    /// The buffers that we own.
    #[cfg(test)]
    pub(super) fn had(&self) -> impl Iterator<Item = Place> {
        self.free.iter().map(|free| free.place)
    }
}
