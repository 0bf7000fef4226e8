//! The order of arrivals: which packet is expected next, and the packets that came before it.

use super::super::packet::{SACK_WORDS, widen};
use crate::sys::packets::Buffer;
use std::collections::VecDeque;

/// The position of a packet relative to the expected one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// It has arrived before.
    Old,
    Next,
    /// So many packets are between it and the expected one.
    Ahead(usize),
}

/// The order of arrivals of one connection.
#[derive(Debug)]
pub(crate) struct Order {
    /// All packets before it have arrived.
    pub(crate) expected: u64,
    early: Option<Box<Early>>,
}

/// Packets that came before their predecessors.
#[derive(Debug, Default)]
struct Early {
    /// Starts with the packet after the expected one.
    packets: VecDeque<Option<Buffer>>,
    held: usize,
    /// A bit for each packet of `packets`.
    sack: [u64; SACK_WORDS],
}

impl Order {
    /// The first expected packet is `first`.
    pub(super) fn new(first: u64) -> Self {
        Self { expected: first, early: None }
    }

    /// No packet has come early.
    pub(crate) fn is_whole(&self) -> bool {
        self.early.is_none()
    }

    pub(super) fn place_of(&self, psn: u32) -> Place {
        let psn = widen(psn, self.expected);
        match psn.checked_sub(self.expected) {
            None => Place::Old,
            Some(0) => Place::Next,
            Some(_) if self.has(psn) => Place::Old,
            Some(ahead) => Place::Ahead(ahead as usize - 1),
        }
    }

    fn has(&self, psn: u64) -> bool {
        let at = (psn - self.expected - 1) as usize;
        self.early.as_ref().is_some_and(|e| e.packets.get(at).is_some_and(Option::is_some))
    }

    /// Keeps a packet whose place is [`Place::Ahead`].
    pub(super) fn keep(&mut self, at: usize, packet: Buffer) {
        let early = self.early.get_or_insert_default();
        if early.packets.len() <= at {
            early.packets.resize_with(at + 1, || None);
        }
        if let Some(slot) = early.packets.get_mut(at) {
            *slot = Some(packet);
        }
        if let Some(word) = early.sack.get_mut(at / 64) {
            *word |= 1 << (at % 64);
        }
        early.held += 1;
    }

    /// The expected packet has arrived: returns the next one if it is here.
    pub(super) fn advance(&mut self) -> Option<Buffer> {
        self.expected += 1;
        let early = self.early.as_mut()?;
        let mut carry = 0;
        for word in early.sack.iter_mut().rev() {
            let low = *word & 1;
            *word = *word >> 1 | carry << 63;
            carry = low;
        }
        let next = early.packets.pop_front().flatten();
        early.held -= usize::from(next.is_some());
        if early.held == 0 {
            self.early = None;
        }
        next
    }

    /// Writes the words of selective acknowledgement, up to the last that is not zero, to `to`; returns their number.
    pub(crate) fn write_sack(&self, to: &mut [u8]) -> usize {
        let Some(early) = &self.early else { return 0 };
        let mut count = 0;
        for (i, (word, to)) in early.sack.iter().zip(to.chunks_exact_mut(8)).enumerate() {
            to.copy_from_slice(&word.to_le_bytes());
            if *word != 0 {
                count = i + 1;
            }
        }
        count
    }

    /// The packets that came early.
    pub(super) fn into_early(self) -> impl Iterator<Item = Buffer> {
        self.early.into_iter().flat_map(|early| early.packets).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_packets_wait_for_their_turn() {
        let packet = |byte| {
            let mut packet = Buffer::new(1);
            packet.hold(&[byte]);
            packet
        };
        let next = |order: &mut Order| order.advance().map(|packet| packet.to_vec());
        let mut order = Order::new(5);
        let mut words = [0; SACK_WORDS * 8];
        assert_eq!((order.place_of(4), order.place_of(5)), (Place::Old, Place::Next));
        for at in [0, 1, 3, 70] {
            let psn = 6 + at as u32;
            assert_eq!(order.place_of(psn), Place::Ahead(at));
            order.keep(at, packet(at as u8));
            assert_eq!(order.place_of(psn), Place::Old);
        }
        assert_eq!(order.write_sack(&mut words), 2);
        assert_eq!(words[..9], [0b1011, 0, 0, 0, 0, 0, 0, 0, 1 << 6]);
        assert_eq!(next(&mut order), Some(vec![0]));
        assert_eq!(next(&mut order), Some(vec![1]));
        assert_eq!(next(&mut order), None);
        assert_eq!((order.expected, order.is_whole()), (8, false));
        assert_eq!(order.write_sack(&mut words), 2);
        assert_eq!(words[..9], [1, 0, 0, 0, 0, 0, 0, 0, 1 << 3]);
        assert_eq!(next(&mut order), Some(vec![3]));
        for _ in 0..66 {
            assert_eq!(next(&mut order), None);
        }
        assert_eq!(next(&mut order), Some(vec![70]));
        assert_eq!((order.is_whole(), order.write_sack(&mut words)), (true, 0));
    }
}
