//! What stands where in a ring, and how its marks are read (PROTOCOL.md §7.17).
//!
//! A packet ends where a page ends, and its mark begins the next page. A device copies page by page: of what is
//! written at once, a mark is never there before its packet. Whether a mark itself is there as a whole, its second
//! word says. Packets go from the end of the ring to its beginning: what is longer than a page reaches down into those
//! of the next numbers, which are left out, and wherever a packet may begin, whoever waits for it looks at one place.

use crate::sys::verbs::MARK;

/// Bytes of a page, and pages that packets begin in.
const PAGE: usize = 4096;
pub(super) const SLOTS: u32 = 64;
/// Pages of the longest packet.
const PAGES_MAX: u32 = 8;
/// Packets that are written at once, at most.
pub(super) const BURST: usize = 8;
/// Bytes of a ring. Below the last place a long packet that begins there has the rest of its pages, and the state comes
/// before all.
pub(super) const RING: usize = (SLOTS + PAGES_MAX) as usize * PAGE;
/// Longest packet of one page, bytes, and longest one.
pub(in crate::transport::net::verbs) const PACKET_MAX: usize = PAGE - MARK;
pub(in crate::transport::net::verbs) const LONG_MAX: usize = PAGES_MAX as usize * PAGE - MARK;
/// Where the peer says what it has taken: its state.
pub(super) const STATE_AT: usize = 0;

/// A mark, as it is in memory.
pub(super) type Words = [u64; 2];

/// What stands behind a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mark {
    /// The packet's number; the first one is 1.
    pub(super) number: u32,
    /// Its bytes.
    pub(super) len: u16,
    /// The low half of the number of the last packet that its sender has taken from its own ring.
    pub(super) taken: u16,
}

/// What an end says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct State {
    /// Number of the last packet that it has taken.
    pub(super) taken: u32,
    /// It does not look at its ring.
    pub(super) sleeps: bool,
}

/// The second word of a mark with this first one, of channel `key`: what was written into a ring by another channel, or is
/// a copy of its memory, is no mark.
#[inline]
fn check(word: u64, key: u32) -> u64 {
    let key = u64::from(key) << 32 | u64::from(key);
    let mixed = (word ^ key ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed ^ mixed >> 32
}

/// A mark with this first word.
#[inline]
fn wire(word: u64, key: u32) -> [u8; MARK] {
    let mut bytes = [0; MARK];
    let (first, second) = bytes.split_at_mut(8);
    first.copy_from_slice(&word.to_le_bytes());
    second.copy_from_slice(&check(word, key).to_le_bytes());
    bytes
}

impl Mark {
    #[inline]
    pub(super) fn encode(self, key: u32) -> [u8; MARK] {
        let word = u64::from(self.number) | u64::from(self.len) << 32 | u64::from(self.taken) << 48;
        wire(word, key)
    }

    /// That of packet `number`; `None`: it is not there.
    #[inline]
    pub(super) fn decode([word, second]: Words, number: u32, key: u32) -> Option<Self> {
        if word as u32 != number || second != check(word, key) {
            return None;
        }
        Some(Self { number, len: (word >> 32) as u16, taken: (word >> 48) as u16 })
    }

    /// The number of the last page that the packet is in.
    #[inline]
    pub(super) fn last(self) -> u32 {
        self.number.wrapping_add(pages(usize::from(self.len)) - 1)
    }
}

impl State {
    #[inline]
    pub(super) fn encode(self, key: u32) -> [u8; MARK] {
        wire(u64::from(self.taken) | u64::from(self.sleeps) << 32 | 1 << 63, key)
    }

    /// `None`: nothing was said, or it is just being written.
    #[inline]
    pub(super) fn decode([word, second]: Words, key: u32) -> Option<Self> {
        if word >> 63 == 0 || second != check(word, key) {
            return None;
        }
        Some(Self { taken: word as u32, sleeps: word >> 32 & 1 != 0 })
    }
}

/// Pages, and so numbers, that a packet of `len` bytes takes.
#[inline]
pub(super) fn pages(len: usize) -> u32 {
    ((len + MARK).div_ceil(PAGE)) as u32
}

/// Where packet `number` ends in the ring, and its mark begins.
#[inline]
pub(super) fn end_of(number: u32) -> usize {
    let below = number.wrapping_sub(1) % SLOTS;
    (SLOTS + PAGES_MAX - 1 - below) as usize * PAGE
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(bytes: [u8; MARK]) -> Words {
        [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()))
    }

    #[test]
    fn packets_and_marks_do_not_meet() {
        let mut used = vec![false; RING];
        used[STATE_AT..STATE_AT + MARK].fill(true);
        for number in 1..=SLOTS {
            let end = end_of(number);
            assert_eq!(end % PAGE, 0);
            let place = &mut used[end - PACKET_MAX..end + MARK];
            assert!(place.iter().all(|used| !used));
            place.fill(true);
        }
        assert_eq!(end_of(1), end_of(SLOTS + 1));
        assert_eq!(end_of(0), end_of(SLOTS), "numbers start again without a gap");
    }

    /// Whatever lengths follow one another, no packet lies on one that may still be there, nor on the state.
    #[test]
    fn long_packets_do_not_meet_either() {
        let lens =
            [1, PACKET_MAX, PACKET_MAX + 1, 3 * PAGE, 4 * PAGE + 100, LONG_MAX - 1, LONG_MAX];
        assert_eq!(lens.map(pages), [1, 1, 2, 4, 5, 8, 8]);
        for step in 1..lens.len() {
            // Pages that are taken, by the number of the packet that has them.
            let mut there: std::collections::VecDeque<(Mark, std::ops::Range<usize>)> =
                std::collections::VecDeque::new();
            let mut number = u32::MAX - 100;
            for n in 0..2000 {
                let len = lens[n * step % lens.len()];
                let mark = Mark { number, len: len as u16, taken: 0 };
                let next = mark.last().wrapping_add(1);
                // No more than are free.
                while there.front().is_some_and(|(m, _)| next.wrapping_sub(m.number) > SLOTS) {
                    there.pop_front();
                }
                let place = end_of(number) - len..end_of(number) + MARK;
                assert!(place.start >= STATE_AT + MARK && place.end <= RING);
                for (other, taken) in &there {
                    let apart = place.end <= taken.start || taken.end <= place.start;
                    assert!(apart, "{mark:?} lies on {other:?}");
                }
                there.push_back((mark, place));
                number = next;
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_half_there_is_not_there(
            old: [u32; 2],
            new: [u32; 2],
            torn in 0u16..=u16::MAX,
            key: u32,
        ) {
            let mark = |[number, rest]: [u32; 2]| {
                Mark { number, len: rest as u16, taken: (rest >> 16) as u16 }
            };
            let (old, new) = (mark(old), mark(new));
            prop_assert_eq!(Mark::decode(words(new.encode(key)), new.number, key), Some(new));
            prop_assert_eq!(Mark::decode(words(new.encode(key)), new.number ^ 1, key), None);
            prop_assert_eq!(Mark::decode(words(new.encode(key)), new.number, !key), None);
            prop_assert_eq!(Mark::decode([0; 2], new.number, key), None);
            let mut mixed = old.encode(key);
            for (at, (to, from)) in mixed.iter_mut().zip(new.encode(key)).enumerate() {
                if torn >> at & 1 != 0 { *to = from; }
            }
            let seen = Mark::decode(words(mixed), new.number, key);
            prop_assert!(seen.is_none_or(|seen| seen == new || seen == old));
        }

        #[test]
        fn states_come_back(taken: u32, sleeps: bool, key: u32, flipped in 0usize..128) {
            let state = State { taken, sleeps };
            let mut bytes = state.encode(key);
            prop_assert_eq!(State::decode(words(bytes), key), Some(state));
            bytes[flipped / 8] ^= 1 << (flipped % 8);
            prop_assert_eq!(State::decode(words(bytes), key), None);
        }
    }

    #[test]
    fn of_an_empty_ring_nothing_is_read() {
        assert_eq!(State::decode([0; 2], 0), None);
        assert_eq!(Mark::decode([0; 2], 1, 0), None);
    }
}
