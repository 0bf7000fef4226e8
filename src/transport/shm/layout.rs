//! Layout of the shared segment: one per direction and pair of endpoints, made by the sender.
//!
//! ```text
//! 0      CONSUMED   u32: slots the receiver has finished with     (receiver writes)
//! 128    FLAGS      u32: requests of the receiver                 (receiver sets, sender clears SLEEPING)
//! 256    CLOSING    u32: 1 when the sender has closed in order, 2 when it has taken the link down   (sender writes)
//! 260    MOVED      u32: 1 when the sender of a refused link sends its messages another way   (sender writes)
//! 264    HINTED     u32: 1 when the sender knows its bit in the receiver's words   (sender writes)
//! 512    CELLS      16 x 64 bytes: work descriptors of split copies   (both write)
//! 1536   REACHING   u64: odd during a direct access by the sender (sender writes)
//! 1600   EPOCH      u64: of the keys that the sender knows        (receiver writes)
//! 1664   BELL       2 x u64: the receiver's doorbell              (receiver writes)
//! 4096   slots      `slots` x 128 bytes
//!        bulk       `bulk` bytes, used as a ring by payloads that do not fit in a slot
//!        places     `places` x 17408 bytes: payload buffers, in which the reader may write its next payload
//! ```
//!
//! A slot is published by its sequence word, which is in the same cache line as the header and the first payload
//! bytes: a small message moves one line between caches. Slots are consumed in order, so bulk space is freed in order
//! too.

use crate::sys::bell::BellAddress;
use crate::sys::order::fence;
use crate::sys::shared_memory::SharedMemory;
use crate::transport::BCOPY_LEAST;
use std::sync::atomic::Ordering;

/// Offset of the receiver's progress counter.
pub(super) const CONSUMED: usize = 0;
/// Offset of the receiver's flags.
pub(super) const FLAGS: usize = 128;
/// Offset of the word that says that the sender has closed in order.
pub(super) const CLOSING: usize = 256;
/// Offset of the word that says that the sender of a refused link has taken its messages back.
pub(super) const MOVED: usize = 260;
/// Offset of the word that says that the sender sets a bit when its link is parked (`hints`).
pub(super) const HINTED: usize = 264;
/// Offset of the first work descriptor.
pub(super) const CELLS: usize = 512;
/// Bytes of a work descriptor: one cache line.
pub(super) const CELL: usize = 64;
/// Offset of the word that is odd during a direct access of the sender to the receiver's memory.
pub(super) const REACHING: usize = 1536;
/// Offset of the epoch of the keys that the sender knows.
pub(super) const EPOCH: usize = 1600;
/// Offset of the receiver's doorbell: two words.
const BELL: usize = 1664;
/// Offset of the first slot.
pub(super) const SLOTS: usize = 4096;
/// Bytes of one slot: two cache lines, fetched together by the adjacent-line prefetcher.
pub(super) const SLOT: usize = 128;
/// Bytes of the slot's own header: sequence, payload length, bulk offset, header length, kind.
pub(super) const SLOT_HEADER: usize = 16;
/// Bytes of a slot for the active-message header and an inline payload.
pub(super) const SLOT_ROOM: usize = SLOT - SLOT_HEADER;

/// The receiver may sleep at times: a sender has to publish, then fence, then check SLEEPING.
pub(super) const FLAG_WAITS: u32 = 1;
/// The receiver sleeps: the sender has to clear this flag and ring the doorbell.
pub(super) const FLAG_SLEEPING: u32 = 2;
/// The receiver is short of memory to buffer unexpected payload.
pub(super) const FLAG_PRESSURE: u32 = 4;
/// The receiver has closed in order; with [`FLAG_BROKEN`] it has taken the link down, but has not closed.
pub(super) const FLAG_CLOSED: u32 = 8;
pub(super) const FLAG_BROKEN: u32 = 16;
/// The receiver does not look at this ring: a sender has to publish, and then to set its bit in the receiver's words.
pub(super) const FLAG_PARKED: u32 = 32;

/// Values of CLOSING: the sender has closed in order, or has taken the link down but has not closed.
pub(super) const CLOSED: u32 = 1;
pub(super) const BROKEN: u32 = 2;

/// Tells the sender of a segment which doorbell to ring. Before the receiver first sets SLEEPING.
pub(super) fn set_receivers_bell(memory: &SharedMemory, bell: BellAddress) {
    let [name, secret] = bell.to_words();
    // The name last: without it there is no bell.
    for (at, word) in [(BELL + 8, secret), (BELL, name)] {
        if let Some(place) = memory.atomic(at) {
            place.store(word, Ordering::Release);
        }
    }
    // A sender that closes before it sees the doorbell has stored CLOSING before.
    fence();
}

/// The receiver's doorbell; `None`: it has not accepted the link.
pub(super) fn receivers_bell(memory: &SharedMemory) -> Option<BellAddress> {
    let word = |at| memory.atomic(at).map(|place| place.load(Ordering::Acquire));
    BellAddress::from_words([word(BELL)?, word(BELL + 8)?])
}

/// Sizes of one segment, chosen by its sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Geometry {
    /// Number of slots; a power of two.
    pub(super) slots: u32,
    /// Bytes of bulk space; a power of two, at least twice the largest payload.
    pub(super) bulk: u32,
    /// Number of recycled payload buffers, at most [`PLACES_MAX`].
    pub(super) places: u8,
}

/// Longest payload of a recycled payload buffer, bytes.
pub(super) const PLACE_ROOM: usize = 16 * 1024;
/// Bytes from one payload buffer to the next, including the gap [`APART`].
const PLACE: usize = PLACE_ROOM + APART as usize;
/// Most payload buffers of a segment.
pub(super) const PLACES_MAX: u8 = 64;

/// Largest payload of one message, bytes, unless the segment allows only less.
const PAYLOAD_MAX: u32 = 128 * 1024;

/// Largest payload of one message before the receiver has accepted the link, bytes: every transport takes it.
pub(super) const MOVABLE_MAX: usize = 64 * 1024;

/// Longest fragment of a long message, bytes: beyond this the cost of a fragment does not matter.
pub(super) const PIECE_MAX: usize = 64 * 1024;

/// Bytes left free behind a payload of at most [`APART_MAX`], if the ring is large enough. The receiver's
/// processor prefetches beyond a payload, and would take lines away from the sender that is about to write
/// them (AMD Zen 4: 4 KiB take 0.29 instead of 0.41 µs).
const APART: u32 = 1024;

/// Longest payload followed by such a gap, bytes: longer ones gain nothing.
const APART_MAX: usize = 16 * 1024;

/// The sizes of a segment. Its bulk space is used up to a limit that grows with what the link carries ([`ROOMS`]), and
/// only that much is reserved.
///
/// Lines that were evicted from both cores' own caches pass between the cores three times as fast as lines that one has
/// just written and the other just read (AMD Zen 4: 26 instead of 8 GB/s). So the whole space is larger than such a
/// cache.
pub(super) const LAVISH: Geometry = Geometry { slots: 256, bulk: 2 * 1024 * 1024, places: 16 };
/// Where the system allows no more.
pub(super) const FRUGAL: Geometry = Geometry { slots: 64, bulk: 32 * 1024, places: 0 };
/// Slots that are reserved at a time: a page of them.
pub(super) const SLOTS_STEP: u32 = 4096 / SLOT as u32;
/// Bytes of bulk space of a link that has begun, and of one that carries more; the next is all of it.
pub(super) const ROOMS: [u32; 2] = [FRUGAL.bulk, 256 * 1024];

const _: () = assert!(FRUGAL.payload_max() >= BCOPY_LEAST);

impl Geometry {
    /// Bytes of the whole segment.
    pub(super) fn len(self) -> usize {
        self.places_at() + self.places as usize * PLACE
    }

    /// These sizes with so much bulk space.
    pub(super) const fn with_bulk(self, bulk: u32) -> Self {
        Self { bulk, ..self }
    }

    /// The next size of the bulk space after `bulk` bytes.
    pub(super) fn more_than(self, bulk: u32) -> u32 {
        let next = ROOMS.into_iter().find(|room| *room > bulk);
        next.unwrap_or(self.bulk).min(self.bulk)
    }

    /// Offset of the first payload buffer.
    pub(super) fn places_at(self) -> usize {
        self.bulk_at() + self.bulk as usize
    }

    /// Offset of payload buffer `index`, if there is one.
    #[inline]
    pub(super) fn place(self, index: u8) -> Option<usize> {
        (index < self.places).then(|| self.places_at() + index as usize * PLACE)
    }

    /// Offset of the bulk space.
    pub(super) fn bulk_at(self) -> usize {
        SLOTS + self.slots as usize * SLOT
    }

    /// Largest payload of one message, bytes.
    pub(super) const fn payload_max(self) -> usize {
        let half = self.bulk / 2;
        if half < PAYLOAD_MAX { half as usize } else { PAYLOAD_MAX as usize }
    }

    /// Bytes left free behind a payload of `len` bytes; a multiple of 64.
    #[inline]
    pub(super) const fn apart(self, len: usize) -> u32 {
        let share = (self.bulk / 256) & !63;
        match len {
            0..=APART_MAX if share < APART => share,
            0..=APART_MAX => APART,
            _ => 0,
        }
    }

    /// Longest fragment of a long message, bytes.
    pub(super) const fn fragment_max(self) -> usize {
        let eighth = (self.bulk / 8) as usize;
        if eighth < PIECE_MAX { eighth } else { PIECE_MAX }
    }

    /// Longest message that is worth copying through the segment even if a single copy is possible, bytes: one that
    /// fits into it.
    pub(super) const fn push_max(self) -> usize {
        if self.bulk < LAVISH.bulk { 0 } else { self.bulk as usize }
    }

    /// Whether a connect request may announce these sizes: bounds that keep all arithmetic in range.
    pub(super) fn is_sane(self) -> bool {
        self.slots.is_power_of_two()
            && (2..=1 << 16).contains(&self.slots)
            && self.bulk.is_power_of_two()
            && (4096..=1 << 28).contains(&self.bulk)
            && self.places <= PLACES_MAX
    }
}
