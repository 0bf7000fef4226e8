//! Places for payloads that change hands: who has read one may write the next payload the other way there.
//!
//! A line that a core has just read it gets for writing sooner than one that it has written and the other
//! core has read since: a ring for each direction has only the latter, unless it is so large that its lines have left
//! both caches when their turn comes again (PERFORMANCE.md). A place passes between the two ends with the
//! messages that lie in it. At first the end that made its segment has it; it is lost to nobody, because
//! the message that hands it over is received, or the link ends.

use super::super::layout::{Geometry, PLACE_ROOM};
use super::super::storage::Storage;
use std::collections::VecDeque;

/// One of the places of two segments, those of both directions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) struct Place {
    /// In the segment that we have made.
    pub(super) ours: bool,
    pub(super) index: u8,
}

/// What a message with payload beside its slot tells of the way back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) struct Handed {
    /// Where it lay, if that is handed over.
    pub(super) place: Option<Place>,
    /// Its bytes.
    pub(super) len: u32,
    /// How many such messages its sender had received, and we have by now, modulo 2^16.
    pub(super) seen: u16,
    pub(super) count: u16,
}

/// The places of one segment.
#[derive(Clone, Debug)]
pub(in super::super) struct Area<M> {
    memory: M,
    geometry: Geometry,
    /// Names the segment, in messages whose payload lies here: 24 bits.
    identity: u32,
}

impl<M: Storage> Area<M> {
    pub(in super::super) fn new(memory: M, geometry: Geometry, identity: u32) -> Self {
        debug_assert!(memory.len() >= geometry.len());
        Self { memory, geometry, identity }
    }

    pub(super) fn memory(&self) -> &M {
        &self.memory
    }

    /// What a slot says of a payload in place `index`.
    #[inline]
    pub(super) fn name(&self, index: u8) -> u32 {
        self.identity << 8 | u32::from(index)
    }

    /// The place that a slot means by `name`, if a payload of `len` bytes can lie there.
    #[inline]
    pub(super) fn find(&self, name: u32, len: usize) -> Option<(u8, *mut u8)> {
        let index = name as u8;
        let fits = name >> 8 == self.identity && len <= PLACE_ROOM;
        Some((index, self.start(index).filter(|_| fits)?))
    }

    /// First byte of place `index`.
    #[inline]
    pub(super) fn start(&self, index: u8) -> Option<*mut u8> {
        let offset = self.geometry.place(index)?;
        // SAFETY: the place lies inside the segment by its geometry.
        Some(unsafe { self.memory.base().as_ptr().add(offset) })
    }
}

/// A place that we have.
#[derive(Clone, Copy, Debug)]
struct Free {
    place: Place,
    /// So many bytes of it we have read since we have written there, or nobody has ever used it.
    read: u32,
    /// The clock when it became ours.
    since: u32,
}

/// How many of the places that became ours last are looked at.
const LOOKS: usize = 4;
/// Bytes after which a place is in no cache any more.
const COLD: u32 = 2 << 20;
/// Payloads that go through the ring after one that was sent before all of ours had come: where both ends send at
/// once, what the other one has just written is no sooner to be had than lines that are in neither cache.
const REST: u32 = 128;

/// The places that a producer has, of the segments of both directions.
#[derive(Debug)]
pub(super) struct Places<M> {
    pub(super) ours: Area<M>,
    pub(super) theirs: Area<M>,
    /// Those that we have, the one that became ours last at the end.
    free: VecDeque<Free>,
    /// The same as bits, of theirs and of ours.
    bits: [u64; 2],
    /// Payloads that shall go through the ring.
    rest: u32,
    /// Bytes of payloads sent so far.
    clock: u32,
}

impl<M: Storage> Places<M> {
    /// All of `ours`, and none of `theirs`.
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

    /// A payload of `len` bytes is to be sent: a place for it. Not one that the other end has read further than
    /// we have since, unless that is long ago.
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

    /// The other end has sent before all of ours had come.
    pub(super) fn rest(&mut self) {
        self.rest = REST;
    }

    /// A payload of `len` bytes has come in `place`. False: the other end did not have it.
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

    /// Those that we have.
    #[cfg(test)]
    pub(super) fn had(&self) -> impl Iterator<Item = Place> {
        self.free.iter().map(|free| free.place)
    }
}
