//! What stands where in a ring, and how its marks are read (PROTOCOL.md §7.17).
//!
//! A packet ends where a page ends, and its mark begins the next page. A device copies page by page: of what is
//! written at once, a mark is never there before its packet. Whether a mark itself is there as a whole, its second
//! word says. So packets that fill their pages, one after the other, are one write; and a short one behind them, which would
//! leave a gap before the end of its page, begins where the last mark ends, with a mark in front that vouches for all of it.

use crate::sys::verbs::MARK;

/// Bytes of a page, and packets that a ring has room for.
const PAGE: usize = 4096;
pub(super) const SLOTS: u32 = 16;
/// Longest burst that is written into a ring, packets: what is longer is a stream, of which datagrams carry more.
pub(super) const BURST: u32 = SLOTS / 2;
/// Bytes of a ring.
pub(super) const RING: usize = (SLOTS as usize + 1) * PAGE;
/// Longest packet, bytes.
pub(in crate::transport::net::verbs) const PACKET_MAX: usize = PAGE - MARK;
/// Longest packet behind its mark, bytes: whoever takes it reads it twice.
pub(super) const TAIL_MAX: usize = 512;
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

/// The second word of a mark with this first one.
#[inline]
fn check(word: u64) -> u64 {
    let mixed = (word ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed ^ mixed >> 32
}

/// A mark with this first word, of which the second one vouches for `sum`.
#[inline]
fn wire(word: u64, sum: u64) -> [u8; MARK] {
    let mut bytes = [0; MARK];
    let (first, second) = bytes.split_at_mut(8);
    first.copy_from_slice(&word.to_le_bytes());
    second.copy_from_slice(&check(sum).to_le_bytes());
    bytes
}

impl Mark {
    #[inline]
    fn word(self) -> u64 {
        u64::from(self.number) | u64::from(self.len) << 32 | u64::from(self.taken) << 48
    }

    /// What a first word says, if that is of packet `number`.
    #[inline]
    fn of_word(word: u64, number: u32) -> Option<Self> {
        let mark = Self { number, len: (word >> 32) as u16, taken: (word >> 48) as u16 };
        (word as u32 == number).then_some(mark)
    }

    #[inline]
    pub(super) fn encode(self) -> [u8; MARK] {
        wire(self.word(), self.word())
    }

    /// That of packet `number`; `None`: it is not there.
    #[inline]
    pub(super) fn decode([word, second]: Words, number: u32) -> Option<Self> {
        Self::of_word(word, number).filter(|_| second == check(word))
    }
}

/// Mixes one more word into `sum`.
#[inline]
fn stir(sum: u64, word: u64) -> u64 {
    let mixed = (sum ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed ^ mixed >> 29
}

/// The mark in front of a short packet: `key` is the channel's.
pub(super) fn front(mark: Mark, packet: &[u8], key: u32) -> [u8; MARK] {
    let mut sum = stir(u64::from(key), mark.word());
    for part in packet.chunks(8) {
        let mut padded = [0; 8];
        padded.iter_mut().zip(part).for_each(|(to, from)| *to = *from);
        sum = stir(sum, u64::from_le_bytes(padded));
    }
    wire(mark.word(), sum)
}

/// What stands in front of packet `number`, if it and the packet are there; `read` reads two words.
#[inline]
pub(super) fn read_front(
    number: u32,
    key: u32,
    read: impl Fn(usize) -> Option<Words>,
) -> Option<Mark> {
    let at = front_of(number);
    let [word, second] = read(at)?;
    let mark = Mark::of_word(word, number)?;
    let len = usize::from(mark.len);
    if len > TAIL_MAX {
        return None;
    }
    let mut sum = stir(u64::from(key), word);
    for n in (0..len).step_by(16) {
        let words = read(at + MARK + n)?;
        for (word, from) in words.into_iter().zip([n, n + 8]) {
            match len.saturating_sub(from) {
                0 => {}
                left @ 1..8 => sum = stir(sum, word & !(u64::MAX << (8 * left))),
                _ => sum = stir(sum, word),
            }
        }
    }
    (second == check(sum)).then_some(mark)
}

impl State {
    #[inline]
    pub(super) fn encode(self) -> [u8; MARK] {
        let word = u64::from(self.taken) | u64::from(self.sleeps) << 32 | 1 << 63;
        wire(word, word)
    }

    /// `None`: nothing was said, or it is just being written.
    #[inline]
    pub(super) fn decode([word, second]: Words) -> Option<Self> {
        if word >> 63 == 0 || second != check(word) {
            return None;
        }
        Some(Self { taken: word as u32, sleeps: word >> 32 & 1 != 0 })
    }
}

/// Where a mark in front of packet `number` begins, behind that of the packet before.
#[inline]
pub(super) fn front_of(number: u32) -> usize {
    end_of(number) - PACKET_MAX
}

/// Packets from `number` on until the end of the ring.
#[inline]
fn left(number: u32) -> u32 {
    SLOTS - number.wrapping_sub(1) % SLOTS
}

/// Packet `number` is the first one of a ring.
#[inline]
pub(super) fn begins(number: u32) -> bool {
    left(number) == SLOTS
}

/// The first packet behind `number` that begins a ring.
#[inline]
pub(super) fn next_beginning(number: u32) -> u32 {
    number.wrapping_add(left(number))
}

/// Numbers that are left out before `packets` packets from `number` on, so that the end of the ring does not
/// divide them. Whoever waits for the first of those looks where the ring begins as well.
#[inline]
pub(super) fn skipped(number: u32, packets: u32) -> u32 {
    let left = left(number);
    if left < packets && packets <= BURST { left } else { 0 }
}

/// Whether [`skipped`] may leave out `number`.
#[inline]
pub(super) fn may_be_skipped(number: u32) -> bool {
    left(number) < BURST
}

/// Where packet `number` ends in the ring, and its mark begins.
#[inline]
pub(super) fn end_of(number: u32) -> usize {
    (number.wrapping_sub(1) % SLOTS) as usize * PAGE + PAGE
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

    #[test]
    fn a_burst_is_not_divided_by_the_end_of_a_ring() {
        for number in (1..=3 * SLOTS).chain([u32::MAX - 3, u32::MAX, 0]) {
            let first = next_beginning(number);
            assert!(begins(first) && (1..=SLOTS).contains(&first.wrapping_sub(number)));
            for packets in 1..=SLOTS {
                let skipped = skipped(number, packets);
                let from = number.wrapping_add(skipped);
                let divided = (1..packets).any(|n| begins(from.wrapping_add(n)));
                assert!(packets > BURST || !divided, "{packets} from {number}");
                assert!(
                    skipped + packets <= SLOTS,
                    "all are free when the peer has taken the rest"
                );
                if skipped > 0 {
                    assert!(from == first && may_be_skipped(number), "{packets} from {number}");
                }
            }
        }
        assert!(!may_be_skipped(1) && !may_be_skipped(SLOTS - BURST + 1));
    }

    proptest! {
        #[test]
        fn what_is_half_there_is_not_there(old: [u32; 2], new: [u32; 2], torn in 0u16..=u16::MAX) {
            let mark = |[number, rest]: [u32; 2]| {
                Mark { number, len: rest as u16, taken: (rest >> 16) as u16 }
            };
            let (old, new) = (mark(old), mark(new));
            prop_assert_eq!(Mark::decode(words(new.encode()), new.number), Some(new));
            prop_assert_eq!(Mark::decode(words(new.encode()), new.number ^ 1), None);
            prop_assert_eq!(Mark::decode([0; 2], new.number), None);
            let mut mixed = old.encode();
            for (at, (to, from)) in mixed.iter_mut().zip(new.encode()).enumerate() {
                if torn >> at & 1 != 0 { *to = from; }
            }
            let seen = Mark::decode(words(mixed), new.number);
            prop_assert!(seen.is_none_or(|seen| seen == new || seen == old));
        }

        #[test]
        fn a_packet_behind_its_mark_is_there_as_a_whole_or_not(
            number: u32,
            key: u32,
            packet in proptest::collection::vec(any::<u8>(), 1..=TAIL_MAX),
            changed in 0usize..TAIL_MAX,
            behind: u8,
        ) {
            let mark = Mark { number, len: packet.len() as u16, taken: 7 };
            let mut ring = vec![behind; RING];
            let at = front_of(number);
            let bytes = [&front(mark, &packet, key)[..], &packet].concat();
            ring[at..at + bytes.len()].copy_from_slice(&bytes);
            let read = |ring: &[u8], number, key| read_front(number, key, |at| {
                Some(words(ring[at..at + MARK].try_into().unwrap()))
            });
            prop_assert_eq!(read(&ring, number, key), Some(mark));
            prop_assert_eq!(read(&ring, number ^ 1 << 20, key), None);
            prop_assert_eq!(read(&ring, number, !key), None);
            ring[at + MARK + changed % packet.len()] ^= 0x40;
            prop_assert_eq!(read(&ring, number, key), None);
        }

        #[test]
        fn states_come_back(taken: u32, sleeps: bool, flipped in 0usize..128) {
            let state = State { taken, sleeps };
            let mut bytes = state.encode();
            prop_assert_eq!(State::decode(words(bytes)), Some(state));
            bytes[flipped / 8] ^= 1 << (flipped % 8);
            prop_assert_eq!(State::decode(words(bytes)), None);
        }
    }

    #[test]
    fn of_an_empty_ring_nothing_is_read() {
        assert_eq!(State::decode([0; 2]), None);
        assert_eq!(Mark::decode([0; 2], 1), None);
    }
}
