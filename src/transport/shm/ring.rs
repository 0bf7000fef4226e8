//! The two ends of a segment: [`Producer`] and [`Consumer`], one of each per segment.
//!
//! # Safety
//!
//! Both ends address the segment through its base pointer, or that of its second mapping. Offsets are computed from a checked
//! [`Geometry`], so they stay inside the mapping. A slot and its bulk bytes belong to the producer
//! until it stores the slot's sequence word (release) and to the consumer from the matching load
//! (acquire) until it stores the progress counter (release). The peer is a process of the same user
//! (proven by the kernel); lengths it writes are still checked before use, each read once.
#![allow(unsafe_code)]

mod growth;
mod laps;
mod places;

use super::budget::Budget;
use super::layout::{
    BROKEN, CLOSED, CLOSING, CONSUMED, FLAG_BROKEN, FLAG_CLOSED, FLAG_PARKED, FLAG_PRESSURE,
    FLAG_SLEEPING, FLAG_WAITS, FLAGS, Geometry, HINTED, MOVABLE_MAX, MOVED, ROOMS, SLOT,
    SLOT_HEADER, SLOT_ROOM, SLOTS, SLOTS_STEP,
};
use super::storage::{Near, Storage, Word};
use crate::memory::Segment;
use crate::sys::shared_memory::SharedMemory;
use crate::sys::simd::{fetch, fetch_to_write};
use crate::telemetry::log;
use crate::transport::{Head, MAX_HEADER};
use growth::Growth;
use laps::Laps;
pub(super) use places::{Area, Handed};
use places::{Place, Places};
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

const INLINE: u8 = 0;
const BULK: u8 = 1;
/// Payload in a recycled payload buffer of the segment that the message came through.
const PLACED: u8 = 2;
/// Payload in a recycled payload buffer of the other direction's segment.
const RETURNED: u8 = 3;
/// A bit beside the kind: the next message is in slot 0.
const RESTART: u8 = 128;

fn word<M: Storage>(memory: &M, offset: usize) -> &M::Word {
    debug_assert!(offset + 4 <= memory.len() && offset % 4 == 0);
    // SAFETY: inside the mapping and aligned; the word is only ever accessed atomically.
    unsafe { memory.word(memory.base().as_ptr().add(offset)) }
}

/// Writes all words of `head`.
///
/// # Safety
/// There is room for them, on a multiple of eight.
#[inline(always)]
unsafe fn put_head(room: *mut u8, head: &Head) {
    // One by one, as they were made: a wider load would wait for their stores (store forwarding).
    for (i, word) in head.words.into_iter().enumerate() {
        // SAFETY: the caller guarantees the room.
        unsafe { room.cast::<u64>().add(i).write_volatile(word) };
    }
}

/// No room in the ring now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Full;

/// The room chosen for a payload beside its slot.
struct Spot {
    start: *mut u8,
    kind: u8,
    /// The offset field of the slot.
    offset: u32,
    /// The count of the slot: messages with payload beside their slots that we have received, modulo 2^16.
    seen: u16,
    /// The value of `bulk_tail` after this payload.
    end: u32,
}

/// The consumer's state, as seen after publishing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wake {
    /// The consumer is polling.
    NotNeeded,
    /// The consumer sleeps: ring its doorbell.
    Needed,
    /// The consumer does not look at this ring: set its bit in the consumer's words.
    Hint,
}

/// The sending end.
#[derive(Debug)]
pub(super) struct Producer<M = Arc<SharedMemory>> {
    memory: Near<M>,
    geometry: Geometry,
    /// The receiver has accepted the link.
    settled: bool,
    /// Its bulk space grows with what it carries.
    growth: Option<Growth>,
    /// Recycled payload buffers may be used: the receiver has accepted the link, and ours are reserved.
    recycles: bool,
    /// Longest payload, bytes.
    payload_max: usize,
    /// Slots published so far.
    tail: u32,
    /// Last value of the progress counter that was read, and the value of `tail` at which there is no slot left.
    consumed: u32,
    slots_end: u32,
    /// Where the next slot is, and where the laps through the slots begin anew.
    laps: Laps,
    /// Bytes at the beginning of the bulk space that are used, a power of two; and how many are to be used
    /// once all of it is free.
    lap: u32,
    next_lap: u32,
    /// Bulk bytes allocated so far (free-running).
    bulk_tail: u32,
    /// Bulk bytes known to be free again (free-running).
    bulk_head: u32,
    /// `bulk_tail` after each slot, to know what a consumed slot frees. Empty before there is bulk space.
    bulk_after: Box<[u32]>,
    /// Messages with payload beside their slots, modulo 2^16: sent, and known to have been received from the peer.
    sent: u16,
    seen: u16,
    /// Set once there are links in both directions.
    places: Option<Places<M>>,
}

impl<M: Storage> Producer<M> {
    /// Slots published so far, modulo 2^32.
    pub(super) fn published(&self) -> u32 {
        self.tail
    }

    /// The sending end of a new, zeroed segment, whose messages may have to go another way.
    pub(super) fn new(memory: M, geometry: Geometry) -> Self {
        debug_assert!(memory.len() >= geometry.len());
        let payload_max = geometry.payload_max().min(MOVABLE_MAX);
        let bulk_after = vec![0; geometry.slots as usize].into_boxed_slice();
        Self {
            memory: Near::new(memory),
            geometry,
            settled: false,
            growth: None,
            recycles: false,
            payload_max,
            tail: 0,
            consumed: 0,
            slots_end: geometry.slots,
            laps: Laps::new(geometry.slots),
            lap: geometry.bulk,
            next_lap: geometry.bulk,
            bulk_tail: 0,
            bulk_head: 0,
            bulk_after,
            sent: 0,
            seen: 0,
            places: None,
        }
    }

    /// Begins with little of the bulk space, of which nothing is reserved yet, and takes more from `budget` as the link
    /// carries more.
    pub(super) fn frugal(memory: M, geometry: Geometry, budget: Arc<Budget>) -> Self {
        let mut producer = Self::new(memory, geometry);
        if geometry.bulk > ROOMS[0] {
            producer.growth = Some(Growth::new(budget));
            producer.bulk_after = Box::default();
            producer.lap = ROOMS[0];
            producer.slots_end = SLOTS_STEP - 1; // see Growth::slots_after
            producer.measure();
        }
        producer
    }

    /// The receiver has accepted the link. Before that no payload may lie in a recycled buffer: if the link is refused,
    /// its messages are read by a process that has this segment alone.
    pub(super) fn settle(&mut self) {
        self.settled = true;
        self.measure();
    }

    /// Notes what may be used after a change.
    fn measure(&mut self) {
        let whole = self.sizes().payload_max();
        self.payload_max = if self.settled { whole } else { whole.min(MOVABLE_MAX) };
        let grown = self.growth.as_ref().is_none_or(|growth| growth.places);
        self.recycles = self.settled && grown;
    }

    /// Longest payload of one message now, bytes.
    pub(super) fn payload_max(&self) -> usize {
        self.payload_max
    }

    /// The peer sends to us through the segment of `theirs` and supports recycled payload buffers: the
    /// buffers of our segment, `ours`, may be used.
    pub(super) fn share_places(&mut self, ours: Area<M>, theirs: Area<M>) {
        self.places = Some(Places::new(ours, theirs));
    }

    /// A message from the peer was received. False: it hands over a payload buffer that we own already.
    #[inline]
    pub(super) fn receive(&mut self, handed: &Handed) -> bool {
        let answers = handed.seen == self.sent;
        self.seen = handed.count;
        let Some(places) = &mut self.places else { return handed.place.is_none() };
        if !answers {
            places.rest();
        }
        handed.place.is_none_or(|place| places.give(place, handed.len))
    }

    /// Limits the use of the bulk space to its first `bytes`, a power of two, but not below what the longest
    /// payload needs.
    pub(super) fn set_lap(&mut self, bytes: u32) {
        debug_assert!(bytes.is_power_of_two());
        let least = 2 * self.geometry.payload_max() as u32;
        self.next_lap = bytes.clamp(least, self.geometry.bulk);
    }

    /// Whether [`Self::change_lap`] may change anything now.
    fn lap_is_due(&self) -> bool {
        self.lap > self.next_lap
            || self
                .growth
                .as_ref()
                .is_none_or(|growth| growth.room > self.lap || growth.is_due(self.bulk_tail))
    }

    /// Offsets are computed modulo the lap: its length may only change while all of it is free. It grows with what the
    /// link carries.
    #[cold]
    fn change_lap(&mut self) {
        self.refresh();
        if self.bulk_head != self.bulk_tail {
            return;
        }
        if let Some(growth) = &mut self.growth {
            if growth.is_due(self.bulk_tail) {
                let next = self.geometry.more_than(growth.room).min(self.next_lap);
                // Two that answer each other use the payload buffers alone, and need no more bulk space.
                let first = growth.room == ROOMS[0]
                    && self.places.is_some()
                    && growth.has_plenty(self.geometry);
                if !first || !growth.reserve_places(&self.memory, self.geometry) {
                    growth.grow(&self.memory, self.geometry, next, false);
                }
                growth.since = self.bulk_tail;
            }
        }
        self.use_room();
    }

    /// Uses all room that there is and that the lap may have.
    fn use_room(&mut self) {
        let mut room = self.geometry.bulk;
        if let Some(growth) = &mut self.growth {
            room = growth.room;
            if room >= self.next_lap {
                growth.reserve_places(&self.memory, self.geometry);
            }
        }
        if room > 0 {
            self.lap = self.next_lap.min(room);
            if self.bulk_after.is_empty() {
                self.bulk_after = vec![self.bulk_tail; self.geometry.slots as usize].into();
            }
        }
        self.measure();
    }

    /// Room for payloads of `bytes` in all, if the bulk space is free now. `must`: whatever other links have.
    #[cold]
    pub(super) fn grow_for(&mut self, bytes: usize, must: bool) {
        self.refresh();
        let Some(growth) = &self.growth else { return };
        let mut room = growth.room;
        while (room as usize) < bytes && room < self.next_lap {
            room = self.geometry.more_than(room);
        }
        // With enough room the link grows with what it carries: see change_lap.
        if room > growth.room || room > self.lap {
            self.grow_to(room.min(self.next_lap), must);
        }
    }

    /// The next larger room, where the present one is full of messages that the receiver has not consumed: it may not
    /// poll for a while, or not know the sender yet. False: there is none now.
    #[cold]
    fn grow_in_use(&mut self) -> bool {
        let before = self.lap;
        let room = self.growth.as_ref().map_or(0, |growth| growth.room);
        let next = room.max(self.geometry.more_than(before)).min(self.next_lap);
        next > before && self.grow_to(next, false) && self.lap > before
    }

    /// Room of `bytes`, and a lap as long as the room. False: not while these messages are in flight.
    fn grow_to(&mut self, bytes: u32, must: bool) -> bool {
        let may = self.may_lap(bytes);
        let Some(growth) = self.growth.as_mut().filter(|_| may) else { return false };
        growth.grow(&self.memory, self.geometry, bytes, must);
        growth.since = self.bulk_tail;
        self.use_room();
        true
    }

    /// Whether a lap of `bytes`, a power of two, leaves all payloads in flight at their offsets: there are none, or all
    /// lie in one lap that begins where a longer one does.
    fn may_lap(&self, bytes: u32) -> bool {
        let lap = self.bulk_head & !(self.lap - 1);
        self.bulk_head == self.bulk_tail
            || bytes >= self.lap
                && self.bulk_tail.wrapping_sub(lap) <= self.lap
                && lap & (bytes - 1) == 0
    }

    /// Nothing is reserved yet, or the system has no memory for it.
    fn has_no_room(&self) -> bool {
        self.growth.as_ref().is_some_and(|growth| growth.room == 0)
    }

    /// The bulk space may become larger.
    pub(super) fn may_grow(&self) -> bool {
        self.lap < self.next_lap
    }

    /// Called now and then: a link that has carried no payload beside its slots for a while gives its room back.
    pub(super) fn rest(&mut self) {
        let sent = u32::from(self.sent);
        // The first room is kept, and to look at a link that has no more would reserve slots.
        if !self.growth.as_mut().is_some_and(|it| it.room > ROOMS[0] && it.is_idle(sent)) {
            return;
        }
        self.refresh();
        if self.consumed == self.tail && self.bulk_head == self.bulk_tail {
            if let Some(growth) = &mut self.growth {
                growth.shrink(&self.memory, self.geometry);
            }
            self.use_room();
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The sizes to which the link may grow now.
    pub(super) fn prospects(&self) -> Geometry {
        let grows = self.growth.as_ref().is_none_or(|growth| growth.may_have(self.geometry.bulk));
        if grows { self.geometry } else { self.sizes() }
    }

    /// The sizes that may be used now.
    pub(super) fn sizes(&self) -> Geometry {
        self.geometry.with_bulk(self.lap)
    }

    pub(super) fn memory(&self) -> &M {
        self.memory.memory()
    }

    fn flags(&self) -> u32 {
        word(&self.memory, FLAGS).load(Ordering::Relaxed)
    }

    /// The consumer is short of memory for payload.
    pub(super) fn under_pressure(&self) -> bool {
        self.flags() & FLAG_PRESSURE != 0
    }

    /// The receiver follows laps that end early.
    pub(super) fn allow_restarts(&mut self) {
        self.laps.allowed = true;
    }

    #[inline]
    fn refresh(&mut self) {
        self.look(1);
    }

    /// Reads how much was consumed.
    #[inline]
    fn consumed_now(&mut self) {
        let consumed = word(&self.memory, CONSUMED).load(Ordering::Acquire);
        if consumed != self.consumed {
            self.consumed = consumed;
            let last = consumed.wrapping_sub(1) & (self.geometry.slots - 1);
            if let Some(after) = self.bulk_after.get(last as usize) {
                self.bulk_head = *after;
            }
        }
    }

    /// Reads how much was consumed, and notes what room there is. `wanted`: so many slots are to be reserved, if they are
    /// free.
    fn look(&mut self, wanted: u32) {
        self.consumed_now();
        let mut left = self.free_slots();
        if let Some(growth) = &mut self.growth {
            // Behind the last slot of a lap nothing need be reserved.
            let ends = wanted == 1 && self.laps.ends(self.tail, self.consumed);
            left = left.min(match ends {
                true => 1,
                false => growth.slots_after(self.laps.at, wanted, &self.memory, self.geometry),
            });
        }
        self.slots_end = self.tail.wrapping_add(left);
    }

    /// Slots that are free, as far as is known. A counter beyond `tail` means a corrupt peer: none.
    fn free_slots(&self) -> u32 {
        let used = self.tail.wrapping_sub(self.consumed);
        self.laps.slots(self.consumed, self.geometry.slots).saturating_sub(used)
    }

    /// The slot to be published is the last one of a lap, or one behind which a lap may end. Returns the bit for its kind.
    #[cold]
    #[inline(never)]
    fn end_lap(&mut self) -> u8 {
        let (lap, slots) = (self.laps.at + 1, self.geometry.slots);
        if lap == slots {
            self.laps.begin(lap, self.tail.wrapping_add(1), slots);
            return 0;
        }
        self.consumed_now();
        if self.laps.ends(self.tail, self.consumed) {
            self.laps.begin(lap, self.tail.wrapping_add(1), slots);
            self.slots_end = self.tail.wrapping_add(self.free_slots());
            return RESTART;
        }
        for index in self.laps.go_on(self.tail, slots) {
            // An old sequence number must not be taken for that of the next message.
            // SAFETY: `index < slots`, so the slot lies inside the segment; all messages in it were consumed.
            unsafe {
                let slot = self.memory.base().as_ptr().add(SLOTS + index as usize * SLOT);
                self.memory.word(slot).store(self.tail, Ordering::Relaxed);
            }
        }
        0
    }

    #[inline(always)]
    fn has_slot(&self) -> bool {
        self.tail != self.slots_end
    }

    /// How many payloads of `len` bytes can be pushed now, at most `most`.
    pub(super) fn room_for(&mut self, len: u32, most: u32) -> u32 {
        debug_assert!(most > 1, "a single slot may be there only because a lap ends with it");
        if len as usize > self.payload_max || self.has_no_room() {
            return 0;
        }
        let len = ((len + 63) & !63).max(64) + self.geometry.apart(len as usize);
        let room = |ring: &Self| {
            let slots = ring.slots_end.wrapping_sub(ring.tail);
            let used = ring.bulk_tail.wrapping_sub(ring.bulk_head);
            let bulk = ring.lap.min(ring.next_lap).saturating_sub(used);
            // A payload that does not fit at the end of a lap skips the rest of the lap: reserve one.
            slots.min((bulk / len).saturating_sub(1))
        };
        if room(self) < most {
            self.look(most);
        }
        let room = room(self).min(most);
        self.laps.promised = self.tail.wrapping_add(room);
        room
    }

    /// Whether more than half of the bulk space is waiting for the consumer.
    pub(super) fn is_half_full(&mut self) -> bool {
        let is = |ring: &Self| ring.bulk_tail.wrapping_sub(ring.bulk_head) > ring.lap / 2;
        is(self) && {
            self.refresh();
            is(self)
        }
    }

    /// Contiguous bulk space for `len` bytes: (offset, value of `bulk_tail` after it).
    #[inline(always)]
    fn find_bulk(&self, len: u32) -> Option<(u32, u32)> {
        let mask = self.lap - 1;
        let apart = self.geometry.apart(len as usize);
        let len = (len + 63) & !63;
        let mut start = self.bulk_tail;
        if (start & mask) + len > self.lap {
            start = start.wrapping_add(mask).wrapping_add(1) & !mask; // skip the rest of this lap
        }
        let end = start.wrapping_add(len);
        // The gap ends with the lap; its bytes may still be in use.
        let free = apart.min(end.wrapping_neg() & mask);
        let fits = end.wrapping_sub(self.bulk_head) <= self.lap;
        fits.then_some((start & mask, end.wrapping_add(free)))
    }

    /// Writes and publishes one message whose payload fits beside its header.
    #[inline]
    pub(super) fn push_short(
        &mut self,
        header: &[u8],
        len: usize,
        pack: impl FnOnce(&mut [u8]),
    ) -> Result<Wake, Full> {
        debug_assert!(header.len() + len <= SLOT_ROOM);
        if header.len() + len > SLOT_ROOM {
            return Err(Full);
        }
        if !self.has_slot() {
            self.refresh();
            if !self.has_slot() {
                return Err(Full);
            }
        }
        let slot = self.slot();
        // SAFETY: the producer owns the slot until it is published; header and payload fit in it (checked above).
        unsafe {
            let room = slot.add(SLOT_HEADER);
            std::ptr::copy_nonoverlapping(header.as_ptr(), room, header.len());
            pack(std::slice::from_raw_parts_mut(room.add(header.len()), len));
        }
        Ok(self.publish(slot, header.len(), len, (0, 0), INLINE))
    }

    /// Writes and publishes one message whose payload goes through the bulk space.
    #[inline]
    pub(super) fn push_bulk(
        &mut self,
        header: &[u8],
        len: usize,
        pack: impl FnOnce(&mut [u8]),
    ) -> Result<Wake, Full> {
        if header.len() > SLOT_ROOM {
            debug_assert!(false, "header too large for a slot");
            return Err(Full);
        }
        let spot = self.find_spot(len)?;
        let slot = self.slot();
        // SAFETY: the producer owns the slot and the spot until they are published; both lie inside their
        // segments by their geometries.
        unsafe {
            pack(std::slice::from_raw_parts_mut(spot.start, len));
            std::ptr::copy_nonoverlapping(header.as_ptr(), slot.add(SLOT_HEADER), header.len());
        }
        self.bulk_tail = spot.end;
        Ok(self.publish(slot, header.len(), len, (spot.offset, spot.seen), spot.kind))
    }

    /// A slot, and room for `len` bytes of payload.
    #[inline(always)]
    fn find_spot(&mut self, len: usize) -> Result<Spot, Full> {
        if !self.has_slot() {
            self.refresh();
            if !self.has_slot() {
                return Err(Full);
            }
        }
        if self.lap != self.next_lap && self.lap_is_due() {
            self.change_lap();
        }
        if len > self.payload_max {
            debug_assert!(len <= self.geometry.payload_max(), "message too large for its ring");
            self.grow_for(4 * len, true);
        }
        if len > self.payload_max || self.has_no_room() {
            return Err(Full);
        }
        // Check for room before anything is counted.
        let room = match self.find_bulk(len as u32) {
            Some(room) => room,
            None => {
                self.refresh();
                loop {
                    match self.find_bulk(len as u32) {
                        Some(room) => break room,
                        None if self.grow_in_use() => {}
                        None => return Err(Full),
                    }
                }
            }
        };
        let base = self.memory.whole().ok_or(Full)?.as_ptr();
        let seen = self.seen;
        self.sent = self.sent.wrapping_add(1);
        if let (Some(places), true) = (&mut self.places, self.recycles) {
            if let Some(place) = places.take(len) {
                let (area, kind) =
                    if place.ours { (&places.ours, PLACED) } else { (&places.theirs, RETURNED) };
                let start = area.start(place.index).ok_or(Full)?;
                area.memory().written(start, len);
                let (offset, end) = (area.name(place.index), self.bulk_tail);
                return Ok(Spot { start, kind, offset, seen, end });
            }
        }
        let (offset, end) = room;
        // SAFETY: the offset lies inside the segment by its geometry.
        let start = unsafe { base.add(self.geometry.bulk_at() + offset as usize) };
        self.memory.written(start, len);
        Ok(Spot { start, kind: BULK, offset, seen, end })
    }

    /// The fast path: pushes a payload of one segment. `None`: the consumer is short of memory, the ring is
    /// full, or the message is too long.
    #[inline]
    pub(super) fn push_at_once(&mut self, head: &Head, payload: Segment) -> Option<Wake> {
        const { assert!(size_of::<[u64; Head::WORDS]>() <= SLOT_ROOM) };
        fetch_to_write(self.slot());
        if self.under_pressure() {
            return None;
        }
        self.push(head, payload)
    }

    /// Like [`Self::push_at_once`], but regardless of the consumer's memory.
    #[inline(always)]
    pub(super) fn push(&mut self, head: &Head, payload: Segment) -> Option<Wake> {
        if head.len + payload.len() > SLOT_ROOM {
            return self.push_long(head, payload);
        }
        if !self.has_slot() {
            self.refresh();
            if !self.has_slot() {
                return None;
            }
        }
        let slot = self.slot();
        // SAFETY: the producer owns the slot until it is published. All words of a head fit in it, and so does
        // the payload behind those that count (checked above).
        unsafe {
            let room = slot.add(SLOT_HEADER);
            put_head(room, head);
            payload.copy_out(std::slice::from_raw_parts_mut(room.add(head.len), payload.len()));
        }
        Some(self.publish(slot, head.len, payload.len(), (0, 0), INLINE))
    }

    /// [`Self::push`] for a payload that does not fit beside its header.
    #[inline(never)]
    fn push_long(&mut self, head: &Head, payload: Segment) -> Option<Wake> {
        if payload.len() > self.geometry.payload_max() {
            return None;
        }
        let spot = self.find_spot(payload.len()).ok()?;
        let slot = self.slot();
        // SAFETY: the producer owns the slot and the spot until they are published, and a head fits in a slot.
        unsafe {
            put_head(slot.add(SLOT_HEADER), head);
            payload.copy_out(std::slice::from_raw_parts_mut(spot.start, payload.len()));
        }
        self.bulk_tail = spot.end;
        Some(self.publish(slot, head.len, payload.len(), (spot.offset, spot.seen), spot.kind))
    }

    #[inline]
    fn slot(&self) -> *mut u8 {
        // SAFETY: `at < slots`, so the slot lies inside the segment.
        unsafe { self.memory.base().as_ptr().add(SLOTS + self.laps.at as usize * SLOT) }
    }

    #[inline]
    fn publish(
        &mut self,
        slot: *mut u8,
        header: usize,
        len: usize,
        (offset, seen): (u32, u16),
        kind: u8,
    ) -> Wake {
        if let Some(after) =
            self.bulk_after.get_mut((self.tail & (self.geometry.slots - 1)) as usize)
        {
            *after = self.bulk_tail;
        }
        let mut kind = kind;
        if self.laps.at == self.laps.last {
            kind |= self.end_lap();
        } else {
            self.laps.at += 1;
        }
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the producer owns the slot until the last store. The slot is 128-byte aligned, and both ends
        // access the sequence word atomically.
        unsafe {
            slot.add(4).cast::<u32>().write(len as u32);
            slot.add(8).cast::<u32>().write(offset);
            let [low, high] = seen.to_ne_bytes();
            let rest = u32::from_ne_bytes([header as u8, kind, low, high]);
            slot.add(12).cast::<u32>().write(rest);
            self.memory.written(slot, SLOT);
            self.memory.word(slot).store(self.tail, Ordering::Release);
        }
        // A sender that is interrupted before the store reads the flags anew after it: `SETTLES_NS` need not cover that.
        compiler_fence(Ordering::SeqCst);
        let flags = word(&self.memory, FLAGS);
        match flags.load(Ordering::Relaxed) & (FLAG_WAITS | FLAG_PARKED) {
            0 => return Wake::NotNeeded,
            FLAG_WAITS => {}
            _ => return Wake::Hint,
        }
        // Pairs with the fence in `Consumer::sleep`: either we see SLEEPING or the consumer sees the slot.
        M::fence();
        if flags.load(Ordering::Relaxed) & FLAG_SLEEPING == 0 {
            return Wake::NotNeeded;
        }
        let before = flags.fetch_and(!FLAG_SLEEPING, Ordering::AcqRel);
        if before & FLAG_SLEEPING != 0 { Wake::Needed } else { Wake::NotNeeded }
    }

    /// Tells the consumer that this end sets its bit when the link is parked.
    pub(super) fn set_hinted(&self) {
        word(&self.memory, HINTED).store(1, Ordering::Release);
    }

    /// Tells the consumer that no more messages follow, by an orderly close.
    pub(super) fn close(&self) {
        word(&self.memory, CLOSING).store(CLOSED, Ordering::Release);
    }

    /// The endpoint lives on, but sends no more through this ring.
    pub(super) fn abandon(&self) {
        word(&self.memory, CLOSING).store(BROKEN, Ordering::Release);
    }

    /// The receiver has refused the link: the messages in the ring are taken back, to go another way.
    pub(super) fn take_back(&self) {
        word(&self.memory, MOVED).store(1, Ordering::Release);
    }

    /// The consumer closed in order.
    pub(super) fn consumer_closed(&self) -> bool {
        word(&self.memory, FLAGS).load(Ordering::Acquire) & FLAG_CLOSED != 0
    }

    /// The consumer has taken the link down, but has not closed.
    pub(super) fn consumer_broke(&self) -> bool {
        word(&self.memory, FLAGS).load(Ordering::Acquire) & FLAG_BROKEN != 0
    }
}

/// The result of a look at the ring.
pub(super) enum Popped {
    /// Nothing new.
    Empty,
    /// One message was delivered.
    Message,
    /// One message was delivered, and the producer of the other direction has to be told this.
    Handed(Handed),
    /// The peer wrote impossible lengths.
    Malformed,
}

/// The head of a slot, as the producer wrote it: not checked.
#[derive(Clone, Copy)]
struct SlotHead {
    len: usize,
    offset: usize,
    header_len: usize,
    kind: u8,
    /// The next message is in slot 0.
    restart: bool,
    seen: u16,
}

impl SlotHead {
    /// Each field is read once.
    ///
    /// # Safety
    /// `slot` is that of a segment, and its producer has published it.
    #[inline(always)]
    unsafe fn read(slot: *mut u8) -> Self {
        // SAFETY: the caller vouches.
        unsafe {
            let ((kind, restart), (header_len, len)) = (Self::kind(slot), Self::lengths(slot));
            let offset = slot.add(8).cast::<u32>().read_volatile() as usize;
            let seen = slot.add(14).cast::<u16>().read_volatile();
            Self { len, offset, header_len, kind, restart, seen }
        }
    }

    /// What kind of message the slot has, and whether the next one is in slot 0.
    ///
    /// # Safety
    /// As for `read`.
    #[inline(always)]
    unsafe fn kind(slot: *mut u8) -> (u8, bool) {
        // SAFETY: the caller vouches.
        let kind = unsafe { slot.add(13).read_volatile() };
        (kind & !RESTART, kind & RESTART != 0)
    }

    /// Lengths of header and payload.
    ///
    /// # Safety
    /// As for `read`.
    #[inline(always)]
    unsafe fn lengths(slot: *mut u8) -> (usize, usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let len = slot.add(4).cast::<u32>().read_volatile() as usize;
            (slot.add(12).read_volatile() as usize, len)
        }
    }
}

/// The receiving end.
#[derive(Debug)]
pub(super) struct Consumer<M = Arc<SharedMemory>> {
    memory: Near<M>,
    geometry: Geometry,
    /// Slots consumed so far, and the index of the next one.
    head: u32,
    at: u32,
    /// Value of the progress counter that the producer can see, and how far it may stay behind while there is no message.
    published: u32,
    late: u32,
    /// Messages with payload beside their slots so far, modulo 2^16.
    received: u16,
    /// The payload buffers of this segment and of the other direction's, once there are both.
    places: Option<[Area<M>; 2]>,
}

impl<M: Storage> Consumer<M> {
    pub(super) fn new(memory: M, geometry: Geometry) -> Self {
        debug_assert!(memory.len() >= geometry.len());
        let late = laps::late(geometry.slots);
        let memory = Near::new(memory);
        Self { memory, geometry, head: 0, at: 0, published: 0, late, received: 0, places: None }
    }

    pub(super) fn memory(&self) -> &M {
        self.memory.memory()
    }

    /// Payloads may lie in the recycled buffers of this segment, or of the segment that we send through.
    pub(super) fn share_places(&mut self, this: Area<M>, other: Area<M>) {
        self.places = Some([this, other]);
    }

    fn slot(&self) -> *mut u8 {
        // SAFETY: `at < slots`, so the slot lies inside the segment.
        unsafe { self.memory.base().as_ptr().add(SLOTS + self.at as usize * SLOT) }
    }

    /// True when a message waits.
    #[inline]
    pub(super) fn has_message(&self) -> bool {
        self.is_next(self.slot(), self.head.wrapping_add(1))
    }

    #[inline]
    fn is_next(&self, slot: *mut u8, next: u32) -> bool {
        // SAFETY: the sequence word of a slot inside the segment, accessed atomically by both ends.
        unsafe { self.memory.word(slot) }.load(Ordering::Acquire) == next
    }

    /// Delivers the next message, if any, to `deliver(header, payload)`.
    #[inline]
    pub(super) fn pop(&mut self, deliver: impl FnOnce(&[u8], &[u8])) -> Popped {
        // Read before the sequence word, so that it is not read again after it.
        let (slot, next, quarter) =
            (self.slot(), self.head.wrapping_add(1), self.geometry.slots / 4);
        if !self.is_next(slot, next) {
            self.announce_some();
            return Popped::Empty;
        }
        self.memory.read(slot, SLOT);
        // SAFETY: the acquire load above made the producer's writes visible.
        let (kind, restart) = unsafe { SlotHead::kind(slot) };
        if kind != INLINE {
            return self.pop_beside(slot, deliver);
        }
        // SAFETY: as above.
        let (header_len, len) = unsafe { SlotHead::lengths(slot) };
        if header_len > MAX_HEADER || header_len + len > SLOT_ROOM {
            return Popped::Malformed;
        }
        // SAFETY: both ranges lie inside the slot (checked). The producer does not touch it until the progress counter
        // passes it.
        let (header, payload) = unsafe {
            let room = slot.add(SLOT_HEADER);
            let payload = room.add(header_len);
            (std::slice::from_raw_parts(room, header_len), std::slice::from_raw_parts(payload, len))
        };
        deliver(header, payload);
        self.pass(restart);
        // Behind the end of a lap the sender has the room of a longer one.
        if restart || next.wrapping_sub(self.published) >= quarter {
            self.publish();
        }
        Popped::Message
    }

    /// Delivers the message of `slot`, whose payload lies beside it.
    #[inline(never)]
    fn pop_beside(&mut self, slot: *mut u8, deliver: impl FnOnce(&[u8], &[u8])) -> Popped {
        // SAFETY: the producer has published the slot.
        let head = unsafe { SlotHead::read(slot) };
        // SAFETY: the slot's room lies behind its header.
        let room = unsafe { slot.add(SLOT_HEADER) };
        let SlotHead { len, header_len, kind, restart, seen, .. } = head;
        let mut place = None;
        let Some(payload) = self.payload(&head, &mut place) else {
            return self.refuse(&head);
        };
        if header_len > MAX_HEADER {
            return Popped::Malformed;
        }
        if kind == BULK {
            self.memory.read(payload, len);
        }
        // SAFETY: both ranges lie inside their segments (checked). The producer does not touch them until the progress
        // counter passes this slot, or, for a payload buffer, until it is handed back.
        let (header, payload) = unsafe {
            (std::slice::from_raw_parts(room, header_len), std::slice::from_raw_parts(payload, len))
        };
        deliver(header, payload);
        self.pass(restart);
        let behind = self.head.wrapping_sub(self.published);
        if kind == BULK || restart || behind >= self.geometry.slots / 4 {
            self.publish();
        }
        self.received = self.received.wrapping_add(1);
        Popped::Handed(Handed { place, len: len as u32, seen, count: self.received })
    }

    /// Goes on to the next slot.
    #[inline(always)]
    fn pass(&mut self, restart: bool) {
        self.head = self.head.wrapping_add(1);
        self.at += 1;
        if restart || self.at == self.geometry.slots {
            self.at = 0;
        }
    }

    /// Where the payload of a slot with this head is; `place`: its buffer, if it lies in one. `None`: the head points
    /// outside the segment, or that part of it cannot be mapped.
    #[inline(always)]
    fn payload(&self, head: &SlotHead, place: &mut Option<Place>) -> Option<*mut u8> {
        let SlotHead { len, offset, kind, .. } = *head;
        match kind {
            BULK if self.is_in_bulk(head) => {
                Some(self.memory.whole()?.as_ptr().wrapping_add(self.geometry.bulk_at() + offset))
            }
            PLACED | RETURNED => {
                let area = self.area(kind)?;
                let (index, start) = area.find(offset as u32, len)?;
                area.memory().read(start, len);
                *place = Some(Place { ours: kind == RETURNED, index });
                Some(start)
            }
            _ => None,
        }
    }

    #[inline(always)]
    fn is_in_bulk(&self, head: &SlotHead) -> bool {
        head.offset + head.len <= self.geometry.bulk as usize
    }

    /// The payload buffers in which a payload of this kind lies.
    #[inline(always)]
    fn area(&self, kind: u8) -> Option<&Area<M>> {
        let [this, other] = self.places.as_ref()?;
        Some(if kind == RETURNED { other } else { this })
    }

    /// The payload of the next message, with this head, is nowhere, or it was not mapped.
    #[cold]
    fn refuse(&mut self, head: &SlotHead) -> Popped {
        let SlotHead { len, offset, kind, .. } = *head;
        let exists = match kind {
            BULK => self.is_in_bulk(head),
            PLACED | RETURNED => {
                self.area(kind).is_some_and(|area| area.index(offset as u32, len).is_some())
            }
            _ => false,
        };
        if !exists {
            return Popped::Malformed;
        }
        log::limited!(
            "the system maps no more memory (vm.max_map_count, or a limit of the control group): messages of a peer of this node wait until it does"
        );
        self.announce();
        Popped::Empty
    }

    /// Tells the producer how much was consumed, if it does not know.
    #[inline]
    pub(super) fn announce(&mut self) {
        if self.published != self.head {
            self.publish();
        }
    }

    /// The same once the producer does not know of some slots: its counter is another cache line.
    #[inline]
    pub(super) fn announce_some(&mut self) {
        if self.head.wrapping_sub(self.published) >= self.late {
            self.publish();
        }
    }

    /// The next slot will be read.
    #[inline(always)]
    pub(super) fn fetch(&self) {
        fetch(self.slot());
    }

    fn publish(&mut self) {
        self.published = self.head;
        word(&self.memory, CONSUMED).store(self.head, Ordering::Release);
    }

    /// Announces that this end will sleep at times, so that the producer checks for that.
    pub(super) fn set_waits(&self) {
        word(&self.memory, FLAGS).fetch_or(FLAG_WAITS, Ordering::AcqRel);
    }

    /// Announces sleep; false (and no sleep) if a message is already there.
    pub(super) fn sleep(&self) -> bool {
        let flags = word(&self.memory, FLAGS);
        flags.fetch_or(FLAG_WAITS | FLAG_SLEEPING, Ordering::AcqRel);
        M::fence();
        !self.has_message()
    }

    /// Withdraws the announcement.
    pub(super) fn awake(&self) {
        let flags = word(&self.memory, FLAGS);
        if flags.load(Ordering::Relaxed) & FLAG_SLEEPING != 0 {
            flags.fetch_and(!FLAG_SLEEPING, Ordering::AcqRel);
        }
    }

    /// Most messages that are in the ring at a time.
    pub(super) fn slots(&self) -> u32 {
        self.geometry.slots
    }

    /// Slots consumed so far, modulo 2^32.
    pub(super) fn consumed(&self) -> u32 {
        self.head
    }

    /// The producer sets its bit when the link is parked.
    pub(super) fn is_hinted(&self) -> bool {
        word(&self.memory, HINTED).load(Ordering::Acquire) != 0
    }

    /// From now on the producer has to set its bit for each message, or no longer.
    pub(super) fn set_parked(&self, on: bool) {
        let flags = word(&self.memory, FLAGS);
        if on {
            flags.fetch_or(FLAG_PARKED, Ordering::AcqRel);
        } else {
            flags.fetch_and(!FLAG_PARKED, Ordering::AcqRel);
        }
    }

    /// Asks the producer for descriptions instead of payload, or for payload again.
    pub(super) fn set_pressure(&self, on: bool) {
        let flags = word(&self.memory, FLAGS);
        if on {
            flags.fetch_or(FLAG_PRESSURE, Ordering::AcqRel);
        } else {
            flags.fetch_and(!FLAG_PRESSURE, Ordering::AcqRel);
        }
    }

    /// Tells the producer that no more messages are read, by an orderly close.
    pub(super) fn close(&self) {
        word(&self.memory, FLAGS).fetch_or(FLAG_CLOSED, Ordering::AcqRel);
    }

    /// The endpoint lives on, but reads no more from this ring.
    pub(super) fn abandon(&self) {
        word(&self.memory, FLAGS).fetch_or(FLAG_CLOSED | FLAG_BROKEN, Ordering::AcqRel);
    }

    /// The producer closed in order.
    pub(super) fn producer_closed(&self) -> bool {
        word(&self.memory, CLOSING).load(Ordering::Acquire) != 0
    }

    /// The producer has taken the link down, but has not closed.
    pub(super) fn producer_broke(&self) -> bool {
        word(&self.memory, CLOSING).load(Ordering::Acquire) == BROKEN
    }

    /// The producer has taken back what it had written.
    pub(super) fn has_moved(&self) -> bool {
        word(&self.memory, MOVED).load(Ordering::Acquire) != 0
    }
}

#[cfg(all(loom, test))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn pair(geometry: Geometry) -> (Producer, Consumer) {
        let (memory, fd) = SharedMemory::create(geometry.len(), geometry.len()).unwrap();
        let other = SharedMemory::attach(&fd, geometry.len()).unwrap();
        let mut producer = Producer::new(Arc::new(memory), geometry);
        producer.settle();
        producer.allow_restarts();
        (producer, Consumer::new(Arc::new(other), geometry))
    }

    fn fill(seed: u8) -> impl FnOnce(&mut [u8]) {
        move |to| to.iter_mut().enumerate().for_each(|(i, b)| *b = seed.wrapping_add(i as u8))
    }

    /// As if so many messages had passed.
    fn begin_at(tx: &mut Producer, rx: &mut Consumer, number: u32) {
        (tx.tail, tx.consumed) = (number, number);
        tx.slots_end = number.wrapping_add(tx.geometry.slots);
        tx.laps = Laps::after(number, tx.geometry.slots);
        (rx.head, rx.published) = (number, number);
        word(&rx.memory, CONSUMED).store(number, Ordering::Release);
    }

    #[test]
    fn room_is_seen_when_the_count_of_messages_is_zero_again() {
        let (mut tx, mut rx) = pair(Geometry { slots: 8, bulk: 16 * 1024, places: 0 });
        begin_at(&mut tx, &mut rx, u32::MAX - 9);
        for _ in 0..8 {
            tx.push_short(b"h", 8, fill(0)).unwrap();
            assert!(matches!(rx.pop(|_, _| ()), Popped::Message));
        }
        // The bulk space is full behind the message of the highest number.
        for _ in 0..2 {
            tx.push_bulk(b"h", 8000, fill(0)).unwrap();
        }
        assert_eq!(tx.tail, 0);
        assert!(tx.push_bulk(b"h", 8000, fill(0)).is_err());
        for _ in 0..2 {
            assert!(matches!(rx.pop(|_, _| ()), Popped::Handed(_)));
        }
        rx.announce();
        tx.push_bulk(b"h", 8000, fill(0)).unwrap();
    }

    #[test]
    fn the_old_contents_of_a_slot_are_no_message() {
        let (mut tx, mut rx) = pair(Geometry { slots: 64, bulk: 4096, places: 0 });
        let pass = |tx: &mut Producer, rx: &mut Consumer, count: u32| {
            (0..count).for_each(|_| assert!(tx.push_short(b"h", 8, fill(0)).is_ok()));
            (0..count).for_each(|_| assert!(matches!(rx.pop(|_, _| ()), Popped::Message)));
            assert!(matches!(rx.pop(|_, _| ()), Popped::Empty));
            rx.announce();
        };
        // All slots have the numbers of the first messages. After 2^32 of them, in short laps, they are due again.
        pass(&mut tx, &mut rx, 64);
        let before = 32_u32.wrapping_neg();
        begin_at(&mut tx, &mut rx, before);
        (tx.laps.at, rx.at) = (0, 0);
        tx.laps.begin(64, before, 64);
        (0..32).for_each(|_| pass(&mut tx, &mut rx, 1));
        assert_eq!((tx.tail, tx.laps.at), (0, 0), "a short lap has ended");
        pass(&mut tx, &mut rx, 40);
        assert_eq!(tx.laps.at, 40, "a long one has begun");
        pass(&mut tx, &mut rx, 10);
    }

    #[test]
    fn a_slot_that_was_never_used_has_no_message() {
        // The number of the message behind these is 0, modulo 2^32, as that in a slot of a new segment.
        for count in [3, 32, 35, 62, 63] {
            let (mut tx, mut rx) = pair(Geometry { slots: 64, bulk: 4096, places: 0 });
            begin_at(&mut tx, &mut rx, u32::MAX - count);
            for _ in 0..2 {
                (0..count).for_each(|_| assert!(tx.push_short(b"h", 8, fill(0)).is_ok()));
                (0..count).for_each(|_| assert!(matches!(rx.pop(|_, _| ()), Popped::Message)));
                assert!(matches!(rx.pop(|_, _| ()), Popped::Empty), "{count}");
                rx.announce();
            }
        }
    }

    #[test]
    fn slots_that_were_promised_are_there() {
        let (mut tx, mut rx) = pair(Geometry { slots: 64, bulk: 4096, places: 0 });
        for done in 0..500_u32 {
            let promised = tx.room_for(0, 40);
            assert!(promised > 0, "{done}");
            for _ in 0..promised {
                assert!(tx.push_short(b"h", 8, fill(0)).is_ok());
            }
            for _ in 0..promised {
                assert!(matches!(rx.pop(|_, _| ()), Popped::Message));
            }
            rx.announce();
            (0..done % 7).for_each(|_| {
                assert!(tx.push_short(b"h", 8, fill(0)).is_ok());
                assert!(matches!(rx.pop(|_, _| ()), Popped::Message));
            });
            rx.announce();
        }
    }

    proptest! {
        /// Random pushes and pops agree with a queue, at every lap and fill level, and where the counters wrap.
        #[test]
        fn ring_is_a_queue(
            ops in prop::collection::vec((any::<bool>(), 0usize..=8192, 0usize..=104), 1..400),
            bulk in prop::sample::select(vec![16 * 1024, 512 * 1024]),
            begin in prop::sample::select(vec![0, u32::MAX - 9])
        ) {
            let geometry = Geometry { slots: 8, bulk, places: 0 };
            let (mut tx, mut rx) = pair(geometry);
            begin_at(&mut tx, &mut rx, begin);
            let mut oracle: VecDeque<(Vec<u8>, Vec<u8>)> = VecDeque::new();
            for (i, (push, len, header_len)) in ops.into_iter().enumerate() {
                if push {
                    let header = vec![i as u8; header_len];
                    let short = header_len + len <= SLOT_ROOM;
                    let done = if short {
                        tx.push_short(&header, len, fill(i as u8))
                    } else {
                        tx.push_bulk(&header, len, fill(i as u8))
                    };
                    if done.is_ok() {
                        let mut payload = vec![0; len];
                        fill(i as u8)(&mut payload);
                        oracle.push_back((header, payload));
                    } else {
                        prop_assert!(!oracle.is_empty(), "an empty ring has room");
                    }
                } else {
                    let mut got = None;
                    let popped = rx.pop(|h, p| got = Some((h.to_vec(), p.to_vec())));
                    prop_assert!(!matches!(popped, Popped::Malformed));
                    prop_assert_eq!(got, oracle.pop_front());
                }
            }
            while let Some(want) = oracle.pop_front() {
                let mut got = None;
                rx.pop(|h, p| got = Some((h.to_vec(), p.to_vec())));
                prop_assert_eq!(got, Some(want));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50))]

        /// A lap of another length begins when all is free, loses nothing, and is respected.
        #[test]
        fn a_lap_may_become_shorter_and_longer(
            ops in prop::collection::vec((0u8..100, 1usize..128 * 1024), 1..600)
        ) {
            const SHORT: u32 = 256 * 1024;
            let (mut tx, mut rx) = pair(Geometry { slots: 64, bulk: 2 * 1024 * 1024, places: 0 });
            let base = rx.memory.base().as_ptr().addr() + tx.geometry.bulk_at();
            let mut sent = VecDeque::new();
            for (i, (what, len)) in ops.into_iter().enumerate() {
                match what {
                    0..3 => tx.set_lap(SHORT),
                    3..6 => tx.set_lap(1 << 30),
                    6..55 => {
                        let done = tx.push_bulk(&[i as u8], len, |to| {
                            to[0] = i as u8;
                            to[len - 1] = i as u8;
                        });
                        if done.is_ok() {
                            sent.push_back((i as u8, len, tx.lap));
                        } else {
                            prop_assert!(!sent.is_empty(), "an empty ring has room");
                        }
                    }
                    _ => {
                        let mut got = None;
                        rx.pop(|_, payload| {
                            let end = payload.as_ptr_range().end.addr() - base;
                            got = Some((payload[0], payload[payload.len() - 1], payload.len(), end));
                        });
                        prop_assert_eq!(got.is_some(), !sent.is_empty());
                        if let (Some((first, last, len, end)), Some(want)) = (got, sent.pop_front()) {
                            prop_assert_eq!((first, last, len), (want.0, want.0, want.1));
                            prop_assert!(end <= want.2 as usize);
                        }
                    }
                }
                prop_assert!(tx.lap == SHORT || tx.lap == tx.geometry.bulk);
            }
        }
    }

    proptest! {
        /// The gap behind a payload is free, up to the end of the lap or to the previous contents; and as many
        /// payloads fit as `room_for` promises.
        #[test]
        fn payloads_are_kept_apart(lens in prop::collection::vec(1usize..20_000, 1..40)) {
            let geometry = Geometry { slots: 64, bulk: 256 * 1024, places: 0 };
            let (mut tx, mut rx) = pair(geometry);
            let mut end = None;
            for len in lens {
                let promised = tx.room_for(len as u32, 3);
                prop_assert!(promised >= 3);
                for _ in 0..promised {
                    prop_assert!(tx.push_bulk(b"", len, |_| ()).is_ok());
                }
                for _ in 0..promised {
                    let mut at = 0;
                    rx.pop(|_, payload| at = payload.as_ptr().addr());
                    let at = at - rx.memory.base().as_ptr().addr() - geometry.bulk_at();
                    if let Some((end, apart)) = end {
                        prop_assert!(at == 0 || at == end + apart as usize, "{at} after {end}");
                    }
                    end = Some((at + len.next_multiple_of(64), geometry.apart(len)));
                }
            }
        }
    }

    /// Two ends with links in both directions.
    fn both_ways(places: [u8; 2]) -> [(Producer, Consumer); 2] {
        let [(a_to_b, b_from_a), (b_to_a, a_from_b)] =
            places.map(|places| pair(Geometry { slots: 8, bulk: 64 * 1024, places }));
        let [mut a, mut b] = [(a_to_b, a_from_b), (b_to_a, b_from_a)];
        share_places((&mut a.0, &mut a.1), 1);
        share_places((&mut b.0, &mut b.1), 2);
        [a, b]
    }

    /// For end 1 or 2, whose segment has that identity.
    fn share_places((tx, rx): (&mut Producer, &mut Consumer), end: u32) {
        let ours = Area::new(tx.memory().clone(), tx.geometry, end);
        let theirs = Area::new(rx.memory().clone(), rx.geometry, 3 - end);
        tx.share_places(ours.clone(), theirs.clone());
        rx.share_places(theirs, ours);
    }

    proptest! {
        /// Whatever is sent which way and when: payloads arrive whole and in order, each payload buffer belongs to
        /// one end or to a message, and both ends agree.
        #[test]
        fn places_change_hands_and_none_is_lost(
            places in (0u8..4, 4u8..9),
            ops in prop::collection::vec((0usize..2, any::<bool>(), 100usize..20_000), 1..400)
        ) {
            let mut ends = both_ways([places.0, places.1]);
            let mut under_way: [VecDeque<Vec<u8>>; 2] = Default::default();
            for (i, (end, push, len)) in ops.into_iter().enumerate() {
                let header = [i as u8; 24];
                let sent = if push {
                    let mut payload = vec![0; len];
                    fill(i as u8)(&mut payload);
                    let pushed = ends[end].0.push_bulk(&header, len, fill(i as u8));
                    if pushed.is_ok() {
                        under_way[end].push_back(payload);
                    }
                    pushed.is_ok()
                } else {
                    false
                };
                if !sent {
                    let (tx, rx) = &mut ends[1 - end];
                    let mut got = None;
                    match rx.pop(|_, payload| got = Some(payload.to_vec())) {
                        Popped::Handed(handed) => prop_assert!(tx.receive(&handed)),
                        popped => prop_assert!(!matches!(popped, Popped::Malformed)),
                    }
                    prop_assert_eq!(got, under_way[end].pop_front());
                }
            }
            for end in 0..2 {
                let (tx, rx) = &mut ends[1 - end];
                while let Some(payload) = under_way[end].pop_front() {
                    let mut got = None;
                    if let Popped::Handed(handed) = rx.pop(|_, payload| got = Some(payload.to_vec())) {
                        prop_assert!(tx.receive(&handed));
                    }
                    prop_assert_eq!(got, Some(payload));
                }
            }
            let mut had = Vec::new();
            for (end, (tx, _)) in ends.iter_mut().enumerate() {
                let places = tx.places.as_ref().unwrap();
                had.extend(places.had().map(|place| (place.ours == (end == 0), place.index)));
            }
            had.sort_unstable();
            let all: Vec<_> = (0..places.1).map(|i| (false, i)).chain((0..places.0).map(|i| (true, i))).collect();
            prop_assert_eq!(had, all);
        }
    }

    /// Receives a message at the end that has `tx`. True: its payload was in a recycled buffer.
    fn is_placed(rx: &mut Consumer, tx: &mut Producer) -> bool {
        let Popped::Handed(handed) = rx.pop(|_, _| ()) else { panic!("nothing beside a slot") };
        assert!(tx.receive(&handed));
        handed.place.is_some()
    }

    #[test]
    fn the_reader_of_a_payload_buffer_writes_there_next() {
        let [(mut a, mut from_b), (mut b, mut from_a)] = both_ways([2, 3]);
        let at = |rx: &mut Consumer, tx: &mut Producer| {
            let mut at = 0;
            let Popped::Handed(handed) = rx.pop(|_, payload| at = payload.as_ptr().addr()) else {
                panic!("not in a place")
            };
            assert!(tx.receive(&handed));
            at
        };
        let first = a.places.as_ref().unwrap().ours.start(0).unwrap().addr();
        let there = from_a.memory.base().addr().get().wrapping_sub(a.memory.base().addr().get());
        for _ in 0..10 {
            a.push_bulk(b"h", 16 * 1024, fill(1)).unwrap();
            assert_eq!(at(&mut from_a, &mut b), first.wrapping_add(there));
            b.push_bulk(b"h", 16 * 1024, fill(1)).unwrap();
            assert_eq!(at(&mut from_b, &mut a), first);
        }
        // Payloads without a recycled buffer go through the ring: too long, or no buffer left.
        a.push_bulk(b"h", 16 * 1024 + 1, fill(1)).unwrap();
        assert!(!is_placed(&mut from_a, &mut b));
        for placed in [true, true, false] {
            a.push_bulk(b"h", 200, fill(1)).unwrap();
            assert_eq!(is_placed(&mut from_a, &mut b), placed);
        }
    }

    #[test]
    fn a_place_is_written_no_further_than_it_was_read() {
        let [(mut a, mut from_b), (mut b, mut from_a)] = both_ways([1, 1]);
        let pass = |tx: &mut Producer, rx: &mut Consumer, back: &mut Producer, len| {
            tx.push_bulk(b"h", len, fill(1)).unwrap();
            is_placed(rx, back)
        };
        assert!(pass(&mut a, &mut from_a, &mut b, 5000));
        assert!(pass(&mut b, &mut from_b, &mut a, 1000), "the one that came");
        assert!(pass(&mut b, &mut from_b, &mut a, 16 * 1024), "a fresh one");
        assert!(pass(&mut a, &mut from_a, &mut b, 16 * 1024), "that one");
        assert!(!pass(&mut a, &mut from_a, &mut b, 1001));
        let sent = (0..).find(|_| pass(&mut a, &mut from_a, &mut b, 10_000));
        assert!((150..220).contains(&sent.unwrap()), "it has left the caches: {sent:?}");
    }

    #[test]
    fn where_both_ends_send_at_once_places_rest() {
        let [(mut a, mut from_b), (mut b, mut from_a)] = both_ways([4, 4]);
        let mut round = |at_once: bool| {
            let mut placed = 0;
            let mut take =
                |rx: &mut Consumer, tx: &mut Producer| placed += i32::from(is_placed(rx, tx));
            a.push_bulk(b"h", 1000, fill(1)).unwrap();
            if !at_once {
                take(&mut from_a, &mut b);
            }
            b.push_bulk(b"h", 1000, fill(1)).unwrap();
            if at_once {
                take(&mut from_a, &mut b);
            }
            take(&mut from_b, &mut a);
            placed
        };
        assert_eq!((0..10).map(|_| round(false)).sum::<i32>(), 20);
        assert!((0..100).map(|_| round(true)).sum::<i32>() <= 2, "those of the first round");
        let after: Vec<i32> = (0..300).map(|_| round(false)).collect();
        assert_eq!((after[0], after[299]), (0, 2));
    }

    #[test]
    fn places_that_cannot_be_are_malformed() {
        for (kind, name) in [
            (PLACED, 1 << 8 | 2), // there are two buffers
            (PLACED, 2 << 8),     // of the other segment
            (RETURNED, 2 << 8 | 3),
            (RETURNED, 1 << 8),
            (RETURNED + 1, 1 << 8),
        ] {
            let [(mut a, _), (_, mut from_a)] = both_ways([2, 3]);
            a.push_bulk(b"h", 1000, fill(1)).unwrap();
            // SAFETY: inside the segment; plays the part of a broken peer.
            unsafe {
                let slot = a.memory.base().as_ptr().add(SLOTS);
                slot.add(8).cast::<u32>().write(name);
                slot.add(13).write(kind);
            }
            assert!(
                matches!(from_a.pop(|_, _| panic!("delivered")), Popped::Malformed),
                "{kind} {name:x}"
            );
        }
        // A payload longer than a buffer; and a buffer that is handed over twice.
        let [(mut a, _), (mut b, mut from_a)] = both_ways([2, 3]);
        a.push_bulk(b"h", 1000, fill(1)).unwrap();
        let Popped::Handed(handed) = from_a.pop(|_, _| ()) else { panic!("not in a place") };
        assert!(b.receive(&handed));
        assert!(!b.receive(&handed));
        a.push_bulk(b"h", 1000, fill(1)).unwrap();
        // SAFETY: inside the segment; plays the part of a broken peer.
        unsafe {
            a.memory.base().as_ptr().add(SLOTS + SLOT + 4).cast::<u32>().write(16 * 1024 + 1)
        };
        assert!(matches!(from_a.pop(|_, _| panic!("delivered")), Popped::Malformed));
        // With one direction only, neither end uses recycled buffers.
        let (mut tx, mut rx) = pair(Geometry { slots: 8, bulk: 4096, places: 2 });
        tx.push_bulk(b"h", 200, fill(1)).unwrap();
        assert!(matches!(rx.pop(|_, _| ()), Popped::Handed(Handed { place: None, .. })));
    }

    #[test]
    fn messages_sent_before_there_were_both_directions_do_no_harm() {
        let geometry = Geometry { slots: 8, bulk: 64 * 1024, places: 2 };
        let (mut a, mut from_a) = pair(geometry);
        for _ in 0..3 {
            a.push_bulk(b"h", 200, fill(1)).unwrap();
            assert!(matches!(from_a.pop(|_, _| ()), Popped::Handed(_)));
        }
        let (mut b, mut from_b) = pair(geometry);
        share_places((&mut a, &mut from_b), 1);
        share_places((&mut b, &mut from_a), 2);
        let mut placed = 0;
        for _ in 0..300 {
            b.push_bulk(b"h", 200, fill(1)).unwrap();
            placed += i32::from(is_placed(&mut from_b, &mut a));
            a.push_bulk(b"h", 200, fill(1)).unwrap();
            placed += i32::from(is_placed(&mut from_a, &mut b));
        }
        assert!((300..600).contains(&placed), "{placed}");
    }

    #[test]
    fn only_what_gains_by_it_is_kept_apart() {
        let (small, large) = (
            Geometry { slots: 64, bulk: 4096, places: 0 },
            Geometry { slots: 64, bulk: 1 << 21, places: 0 },
        );
        assert_eq!([small.apart(0), small.apart(200)], [0, 0]);
        assert_eq!(
            [large.apart(1), large.apart(16 * 1024), large.apart(16 * 1024 + 1)],
            [1024, 1024, 0]
        );
    }

    #[test]
    fn a_full_ring_says_so_and_recovers() {
        let (mut tx, mut rx) = pair(Geometry { slots: 4, bulk: 4096, places: 0 });
        for _ in 0..4 {
            assert_eq!(tx.push_short(b"h", 1, fill(1)), Ok(Wake::NotNeeded));
        }
        assert_eq!(tx.push_short(b"h", 1, fill(1)), Err(Full));
        assert!(matches!(rx.pop(|_, _| ()), Popped::Message));
        assert_eq!(tx.push_short(b"h", 1, fill(1)), Ok(Wake::NotNeeded));
    }

    #[test]
    fn a_sleeper_is_woken_once() {
        let (mut tx, rx) = pair(Geometry { slots: 4, bulk: 4096, places: 0 });
        assert!(rx.sleep());
        assert_eq!(tx.push_short(b"h", 0, fill(1)), Ok(Wake::Needed));
        assert_eq!(tx.push_short(b"h", 0, fill(1)), Ok(Wake::NotNeeded));
        assert!(!rx.sleep());
    }

    #[test]
    fn lengths_that_cannot_be_are_malformed() {
        let (mut tx, mut rx) = pair(Geometry { slots: 4, bulk: 4096, places: 0 });
        tx.push_short(b"h", 1, fill(1)).unwrap();
        // SAFETY: inside the segment; plays the part of a broken peer.
        unsafe { tx.memory.base().as_ptr().add(SLOTS + 4).cast::<u32>().write(100_000) };
        assert!(matches!(rx.pop(|_, _| panic!("delivered")), Popped::Malformed));
    }

    #[test]
    fn pressure_and_closing_are_seen_by_the_other_end() {
        let (tx, rx) = pair(Geometry { slots: 4, bulk: 4096, places: 0 });
        assert!(!tx.under_pressure());
        rx.set_pressure(true);
        assert!(tx.under_pressure());
        rx.set_pressure(false);
        assert!(!tx.under_pressure());
        assert!(!rx.producer_closed());
        tx.close();
        assert!(rx.producer_closed());
        assert!(!tx.consumer_closed());
        rx.close();
        assert!(tx.consumer_closed());
        assert!(!rx.producer_broke() && !tx.consumer_broke());
    }

    #[test]
    fn an_end_that_lives_on_does_not_count_as_closed_in_order() {
        let (tx, rx) = pair(Geometry { slots: 4, bulk: 4096, places: 0 });
        tx.abandon();
        assert!(rx.producer_closed() && rx.producer_broke());
        rx.abandon();
        assert!(tx.consumer_closed() && tx.consumer_broke());
    }

    #[test]
    fn two_threads_hand_over_every_message() {
        const N: u32 = 100_000;
        let (mut tx, mut rx) = pair(Geometry { slots: 16, bulk: 8192, places: 0 });
        std::thread::scope(|s| {
            s.spawn(move || {
                for i in 0..N {
                    let len = (i % 300) as usize;
                    loop {
                        let header = i.to_le_bytes();
                        let done = if len <= 100 {
                            tx.push_short(&header, len, fill(i as u8))
                        } else {
                            tx.push_bulk(&header, len, fill(i as u8))
                        };
                        if done.is_ok() {
                            break;
                        }
                        std::thread::yield_now();
                    }
                }
            });
            let mut next = 0u32;
            while next < N {
                let popped = rx.pop(|header, payload| {
                    assert_eq!(header, next.to_le_bytes());
                    assert_eq!(payload.len(), (next % 300) as usize);
                    let mut want = vec![0; payload.len()];
                    fill(next as u8)(&mut want);
                    assert_eq!(payload, want);
                });
                match popped {
                    Popped::Message | Popped::Handed(_) => next += 1,
                    Popped::Empty => std::thread::yield_now(),
                    Popped::Malformed => panic!("malformed"),
                }
            }
        });
    }
}
