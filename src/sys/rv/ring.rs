//! The event ring: the module writes at its tail, this process reads at its head, in memory that both map.
//!
//! An entry is **65 bytes** long and unaligned in modules of ABI 1.0 to 1.6: the structure is packed, but its members
//! are not, so compilers insert a byte before they lay them out, and all are misaligned. The module's own comments
//! say 64. In a later ABI, the length that the module wants mapped tells which it is.

use super::abi::{EVENTS_MAX, MINOR};
use crate::sys::errno::{Errno, Result};
use crate::sys::pages::Pages;
use crate::sys::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bytes of the header: head, tail, events that found no room.
pub(super) const HEADER: usize = 64;
pub(super) const HEAD_AT: usize = 0;
pub(super) const TAIL_AT: usize = 4;
pub(super) const OVERFLOWS_AT: usize = 8;

/// The layout of the entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    /// Bytes from one entry to the next.
    pub(super) stride: usize,
    immediate: usize,
    wr_id: usize,
    conn: usize,
    len: usize,
}

/// The layout that compilers generate, and the one in the module's comments.
pub(crate) const PACKED_65: Layout =
    Layout { stride: 65, immediate: 4, wr_id: 9, conn: 17, len: 25 };
pub(crate) const PLAIN_64: Layout =
    Layout { stride: 64, immediate: 4, wr_id: 8, conn: 16, len: 24 };

/// Events of a ring: a number for which the two layouts need mappings of different lengths, see [`map`].
pub(crate) const EVENTS: u32 = 1983;

/// An event of the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// A write of this process has ended, with an `ib_wc_status`; 0: success.
    Written { wr_id: u64, conn: u64, status: u8 },
    /// A peer behind connection `conn` has written `len` bytes, and sent `immediate`.
    Filled { conn: u64, immediate: u32, len: u32, status: u8 },
    /// An event of an unknown kind.
    Unknown(u8),
}

/// Bytes of a ring with `events` entries of this layout, in whole pages.
pub(super) fn mapped_len(events: u32, layout: Layout) -> usize {
    (HEADER + events as usize * layout.stride).next_multiple_of(process::page_size())
}

/// Maps a ring of a module of ABI 1.`minor`. For an unknown ABI it probes the layout: it first asks for the
/// shorter mapping, which a module with the longer entries refuses (EINVAL), with a line in the kernel's log. If
/// pages are so large that both layouts need the same length, it assumes the longer entries.
pub(super) fn map<T>(
    minor: u16,
    events: u32,
    mut map: impl FnMut(usize) -> Result<T>,
) -> Result<(T, Layout)> {
    let (plain, packed) = (mapped_len(events, PLAIN_64), mapped_len(events, PACKED_65));
    if minor > MINOR && plain < packed {
        match map(plain) {
            Ok(mapping) => return Ok((mapping, PLAIN_64)),
            Err(Errno(libc::EINVAL)) => (),
            Err(errno) => return Err(errno),
        }
    }
    Ok((map(packed)?, PACKED_65))
}

/// The reader's end of a ring.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: Arc<Pages>,
    layout: Layout,
    events: u32,
    /// The next entry to read. The copy in the ring is only for the module: a process that overwrites it
    /// misleads only the module.
    head: u32,
    overflows: u64,
}

impl Ring {
    /// Errors: EINVAL, where the memory is too short for `events`.
    pub(super) fn new(memory: Arc<Pages>, events: u32, layout: Layout) -> Result<Self> {
        let enough = memory.len() >= HEADER + events as usize * layout.stride;
        if !enough || !(2..=EVENTS_MAX).contains(&events) {
            return Err(Errno(libc::EINVAL));
        }
        Ok(Self { memory, layout, events, head: 0, overflows: 0 })
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// The oldest unread event. Errors: EIO if the module's tail is impossible.
    pub(crate) fn pop(&mut self) -> Result<Option<Event>> {
        // The module publishes an entry by moving the tail behind it, after it has polled the device's completion of
        // the write with immediate: the written data is in memory before that.
        let tail = self.word(TAIL_AT).load(Ordering::Acquire);
        if tail == self.head {
            return Ok(None);
        }
        if tail >= self.events {
            return Err(Errno(libc::EIO));
        }
        let event = decode(&self.entry(self.head), self.layout);
        self.head = if self.head + 1 == self.events { 0 } else { self.head + 1 };
        // The module may reuse the entry once it sees this.
        self.word(HEAD_AT).store(self.head, Ordering::Release);
        Ok(Some(event))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.word(TAIL_AT).load(Ordering::Acquire) == self.head
    }

    /// Events lost since the last call because the ring was full.
    pub(crate) fn overflows(&mut self) -> u64 {
        // SAFETY: within the header, aligned, and valid for any bits.
        let count = unsafe {
            let at = self.memory.base().add(OVERFLOWS_AT).cast::<AtomicU64>();
            at.as_ref().load(Ordering::Relaxed)
        };
        let new = count.wrapping_sub(self.overflows);
        self.overflows = count;
        new
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: within the header (`HEAD_AT` and `TAIL_AT`), aligned, and valid for any bits; the
        // module changes it atomically.
        unsafe { self.memory.base().add(at).cast::<AtomicU32>().as_ref() }
    }

    fn entry(&self, index: u32) -> [u8; 65] {
        let mut bytes = [0; 65];
        let at = HEADER + index as usize * self.layout.stride;
        // SAFETY: `new` has checked that all entries are within the mapping. Between the module's move of the tail
        // and ours of the head, the module does not touch this entry; if it does, the values may be wrong and are
        // checked, but the address is never wrong.
        unsafe {
            let from = self.memory.base().add(at).as_ptr();
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), self.layout.stride);
        }
        bytes
    }
}

fn decode(entry: &[u8; 65], layout: Layout) -> Event {
    let number = |at: usize, len: usize| {
        let bytes = entry.get(at..at + len).unwrap_or(&[]);
        bytes.iter().rev().fold(0, |value: u64, byte| value << 8 | u64::from(*byte))
    };
    let [kind, status, ..] = *entry;
    let (conn, immediate, len) =
        (number(layout.conn, 8), number(layout.immediate, 4) as u32, number(layout.len, 4) as u32);
    match kind {
        0 => Event::Written { wr_id: number(layout.wr_id, 8), conn, status },
        1 => Event::Filled { conn, immediate, len, status },
        other => Event::Unknown(other),
    }
}

/// The module's end of a ring, for the double.
#[cfg(test)]
pub(super) mod writer {
    use super::*;

    fn encode(event: &Event, layout: Layout) -> Vec<u8> {
        let mut bytes = vec![0xee; layout.stride];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        match *event {
            Event::Written { wr_id, conn, status } => {
                put(0, &[0, status, 0, 0]);
                put(layout.wr_id, &wr_id.to_le_bytes());
                put(layout.conn, &conn.to_le_bytes());
            }
            Event::Filled { conn, immediate, len, status } => {
                put(0, &[1, status, 0, 0]);
                put(layout.immediate, &immediate.to_le_bytes());
                put(layout.conn, &conn.to_le_bytes());
                put(layout.len, &len.to_le_bytes());
            }
            Event::Unknown(kind) => put(0, &[kind]),
        }
        bytes
    }

    /// Like the module: an event that finds the ring full is counted and dropped.
    pub(in crate::sys::rv) fn push(
        memory: &Pages,
        events: u32,
        layout: Layout,
        event: &Event,
    ) -> bool {
        // SAFETY: the header is within the mapping, its words are atomic, and entries behind the tail belong
        // to the writer, of which there is one at a time.
        unsafe {
            let word = |at: usize| memory.base().add(at).cast::<AtomicU32>().as_ref();
            let tail = word(TAIL_AT).load(Ordering::Relaxed);
            let next = if tail + 1 == events { 0 } else { tail + 1 };
            if next == word(HEAD_AT).load(Ordering::Acquire) {
                let count = memory.base().add(OVERFLOWS_AT).cast::<AtomicU64>();
                count.as_ref().fetch_add(1, Ordering::Relaxed);
                return false;
            }
            let bytes = encode(event, layout);
            let at = memory.base().add(HEADER + tail as usize * layout.stride).as_ptr();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
            word(TAIL_AT).store(next, Ordering::Release);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ring(events: u32, layout: Layout) -> (Ring, Arc<Pages>) {
        let memory = Arc::new(Pages::anonymous(mapped_len(events, layout)).unwrap());
        (Ring::new(memory.clone(), events, layout).unwrap(), memory)
    }

    #[test]
    fn an_entry_of_65_bytes_as_compilers_lay_it_out() {
        let mut entry = [0; 65];
        entry[..8].copy_from_slice(&[1, 5, 0, 0, 0x44, 0x33, 0x22, 0x80]);
        entry[17..25].copy_from_slice(&0xffff_8881_0000_1234u64.to_le_bytes());
        entry[25..29].copy_from_slice(&1_048_576u32.to_le_bytes());
        let filled = Event::Filled {
            conn: 0xffff_8881_0000_1234,
            immediate: 0x8022_3344,
            len: 1 << 20,
            status: 5,
        };
        assert_eq!(decode(&entry, PACKED_65), filled);
        entry[..2].copy_from_slice(&[0, 12]);
        entry[9..17].copy_from_slice(&0x0102_0304_0506_0708u64.to_le_bytes());
        let written = Event::Written {
            wr_id: 0x0102_0304_0506_0708,
            conn: 0xffff_8881_0000_1234,
            status: 12,
        };
        assert_eq!(decode(&entry, PACKED_65), written);
        entry[0] = 7;
        assert_eq!(decode(&entry, PACKED_65), Event::Unknown(7));
    }

    #[test]
    fn the_layout_shows_by_the_length_that_is_taken() {
        for layout in [PLAIN_64, PACKED_65] {
            let wanted = HEADER + EVENTS as usize * layout.stride;
            let mut asked = 0;
            let found = map(MINOR + 1, EVENTS, |len| {
                asked += 1;
                if len < wanted { Err(Errno(libc::EINVAL)) } else { Ok(len) }
            });
            assert_eq!(found, Ok((mapped_len(EVENTS, layout), layout)));
            assert_eq!(asked, if layout == PLAIN_64 { 1 } else { 2 });
        }
        let mut asked = Vec::new();
        let found = map(MINOR, EVENTS, |len| {
            asked.push(len);
            Ok(())
        });
        assert_eq!(found, Ok(((), PACKED_65)), "known");
        assert_eq!(asked, [mapped_len(EVENTS, PACKED_65)], "nothing is tried");
        let refused: Result<((), Layout)> = map(MINOR, EVENTS, |_| Err(Errno(libc::EAGAIN)));
        assert_eq!(refused, Err(Errno(libc::EAGAIN)), "not asked again");
        // With pages of 64 KiB both lengths are equal, and the real layout is assumed.
        assert_eq!(mapped_len(EVENTS, PACKED_65), 32 * 4096);
        assert_eq!(mapped_len(EVENTS, PLAIN_64), 31 * 4096);
    }

    #[test]
    fn a_full_ring_drops_and_says_so() {
        let (mut ring, memory) = ring(4, PACKED_65);
        let event = |n| Event::Written { wr_id: n, conn: 1, status: 0 };
        for n in 0..5 {
            assert_eq!(writer::push(&memory, 4, PACKED_65, &event(n)), n < 3, "it holds three");
        }
        assert_eq!((ring.overflows(), ring.overflows()), (2, 0));
        for n in 0..3 {
            assert_eq!(ring.pop(), Ok(Some(event(n))));
        }
        assert_eq!(ring.pop(), Ok(None));
        assert!(ring.is_empty());
    }

    #[test]
    fn a_tail_that_makes_no_sense_is_an_error() {
        let (mut ring, memory) = ring(4, PACKED_65);
        // SAFETY: within the mapping, which only these tests use.
        unsafe { memory.base().add(TAIL_AT).cast::<u32>().write(4) };
        assert_eq!(ring.pop(), Err(Errno(libc::EIO)));
        let short = Arc::new(Pages::anonymous(4096).unwrap());
        assert!(Ring::new(short.clone(), 100, PACKED_65).is_err());
        assert!(Ring::new(short, 1, PACKED_65).is_err());
    }

    proptest! {
        #[test]
        fn it_is_a_queue(steps in proptest::collection::vec(any::<bool>(), 0..300), events in 2u32..9, packed: bool) {
            let layout = if packed { PACKED_65 } else { PLAIN_64 };
            let (mut ring, memory) = ring(events, layout);
            let mut oracle = std::collections::VecDeque::new();
            let mut lost = 0;
            for (n, push) in steps.into_iter().enumerate() {
                if push {
                    let event = Event::Filled { conn: n as u64, immediate: !(n as u32), len: 9, status: 0 };
                    if writer::push(&memory, events, layout, &event) { oracle.push_back(event) } else { lost += 1 }
                    prop_assert!(oracle.len() < events as usize);
                } else {
                    prop_assert_eq!(ring.pop(), Ok(oracle.pop_front()));
                }
            }
            prop_assert_eq!(ring.overflows(), lost);
        }

        #[test]
        fn any_entry_is_harmless(bytes in proptest::collection::vec(any::<u8>(), 65..66)) {
            let entry: [u8; 65] = bytes.try_into().unwrap();
            for layout in [PACKED_65, PLAIN_64] {
                decode(&entry, layout);
            }
        }
    }
}
