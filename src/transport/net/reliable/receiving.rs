//! The receiving half of a connection: order, duplicates, acknowledgements, and messages made of
//! several packets.

use super::congestion::WINDOW_MAX;
use super::connection::{Connection, Phase};
use super::packet::{
    ACK_REQUEST, FRAME_LEN, Frame, HEADER_LEN, HEADER_ONLY, Header, Kind, PRESSURE, SACK_WORDS,
    TAG_AT,
};
use super::sending::widen;
use super::{DATAGRAM_LEAST, End, MESSAGE_MAX, Shared, Sink};
use crate::sys::Errno;
use crate::sys::packets::Buffer;
use crate::transport::net::link::Condition;
use crate::transport::{Departure, MAX_HEADER};
use std::collections::VecDeque;

/// Packets that are acknowledged together.
pub(super) const ACK_EVERY: u16 = 16;
/// Bytes of buffers that the longest message takes, in the shortest packets.
const SENDING: usize = MESSAGE_MAX.div_ceil(DATAGRAM_LEAST - HEADER_LEN - FRAME_LEN) * 2048;
/// How long an acknowledgement waits for something to travel with, nanoseconds.
pub(super) const ACK_DELAY_NS: u64 = 200_000;

/// Packets that came before those in front of them.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// From the one after the expected packet on.
    packets: VecDeque<Option<Buffer>>,
    held: usize,
    /// A bit for each packet of `packets`.
    sack: [u64; SACK_WORDS],
}

impl Early {
    /// Writes the words of selective acknowledgement to `to`, as many as matter; returns how many.
    pub(super) fn write_sack(&self, to: &mut [u8]) -> usize {
        let mut count = 0;
        for (i, (word, to)) in self.sack.iter().zip(to.chunks_exact_mut(8)).enumerate() {
            to.copy_from_slice(&word.to_le_bytes());
            if *word != 0 {
                count = i + 1;
            }
        }
        count
    }

    /// Keeps the packet that comes `at` after the first missing one. False: it was there.
    fn keep(&mut self, at: usize, packet: Buffer) -> Result<(), Buffer> {
        if self.packets.len() <= at {
            self.packets.resize_with(at + 1, || None);
        }
        match self.packets.get_mut(at) {
            Some(slot @ None) => *slot = Some(packet),
            _ => return Err(packet),
        }
        if let Some(word) = self.sack.get_mut(at / 64) {
            *word |= 1 << (at % 64);
        }
        self.held += 1;
        Ok(())
    }

    fn has(&self, at: usize) -> bool {
        self.packets.get(at).is_some_and(Option::is_some)
    }

    /// The expected packet has arrived: gives out the next one if it is here.
    fn advance(&mut self) -> Option<Buffer> {
        let mut carry = 0;
        for word in self.sack.iter_mut().rev() {
            let low = *word & 1;
            *word = *word >> 1 | carry << 63;
            carry = low;
        }
        let next = self.packets.pop_front().flatten();
        self.held -= usize::from(next.is_some());
        next
    }

    pub(super) fn release(self, shared: &mut Shared) {
        for packet in self.packets.into_iter().flatten() {
            shared.buffers.give(packet);
        }
    }
}

/// A message of which the beginning has arrived.
#[derive(Debug)]
pub(super) struct Assembly {
    header: [u8; MAX_HEADER],
    header_len: usize,
    payload: Vec<u8>,
    total: usize,
}

impl Default for Assembly {
    fn default() -> Self {
        Self { header: [0; MAX_HEADER], header_len: 0, payload: Vec::new(), total: 0 }
    }
}

/// The frames make no sense.
struct Malformed;

impl Connection {
    /// Whether the tag of a packet shows that the other side made it, for this connection.
    #[inline]
    pub(super) fn is_genuine(
        &self,
        shared: &Shared,
        header: &Header,
        bytes: &[u8],
        condition: Condition,
    ) -> bool {
        if header.flags & HEADER_ONLY != 0 && !condition.sound {
            return false;
        }
        let (Some(key), Some(signed)) = (&self.key, bytes.first_chunk::<TAG_AT>()) else {
            return false;
        };
        let body = bytes.get(HEADER_LEN..).unwrap_or(&[]);
        let tag = key.packet_tag(&shared.hash, 1 - self.direction, signed, body);
        super::tag::same(tag, header.tag)
    }

    /// Takes a genuine packet; `Some`: the connection ends.
    pub(super) fn on_packet(
        &mut self,
        shared: &mut Shared,
        header: &Header,
        body: &[u8],
        congested: bool,
        now: u64,
        sink: &mut impl Sink,
    ) -> Option<End> {
        let (words, frames) = body.split_at_checked(usize::from(header.sack_words) * 8)?;
        if !self.on_acknowledgement(shared, header, words, now, now) {
            shared.counts.malformed += 1;
            return Some(broken());
        }
        match header.kind {
            Kind::Ack => None,
            Kind::Close => {
                let end = widen(header.psn, self.expected);
                let departure = if end > self.expected {
                    Departure::Failed(Errno(libc::ECONNRESET))
                } else {
                    Departure::Closed
                };
                Some(End::Departed(departure))
            }
            Kind::Data => self.on_data(shared, header, frames, congested, now, sink),
        }
    }

    fn on_data(
        &mut self,
        shared: &mut Shared,
        header: &Header,
        frames: &[u8],
        congested: bool,
        now: u64,
        sink: &mut impl Sink,
    ) -> Option<End> {
        self.note_arrival(shared, header, congested, now);
        let psn = widen(header.psn, self.expected);
        if psn == self.expected {
            if self.take_in_order(shared, frames, sink).is_err() {
                shared.counts.malformed += 1;
                return Some(broken());
            }
        } else if psn < self.expected {
            shared.counts.duplicates += 1;
            self.ack_now = true;
        } else {
            self.keep_early(shared, (psn - self.expected - 1) as usize, frames);
            self.ack_now = true;
        }
        if self.early.is_some() || self.unacked >= ACK_EVERY || header.flags & ACK_REQUEST != 0 {
            self.ack_now = true;
        } else {
            self.ack_at = self.ack_at.min(now + ACK_DELAY_NS);
        }
        None
    }

    /// A packet with data is here.
    #[inline]
    fn note_arrival(&mut self, shared: &mut Shared, header: &Header, congested: bool, now: u64) {
        shared.counts.data_received += 1;
        shared.count_sender(now, &mut self.epoch);
        let transmission = widen(header.transmission, self.arrived);
        if transmission >= self.arrived {
            self.arrived = transmission + 1;
            self.arrived_at = now;
        }
        self.marks = self.marks.wrapping_add(u32::from(congested));
        self.unacked = self.unacked.saturating_add(1);
    }

    /// The short road: header and payload of the message of a genuine packet that is the next one, has no other and
    /// asks for nothing. It counts as delivered; what the packet acknowledges has been sent, and waits. `None`: nothing
    /// was done.
    #[inline]
    pub(super) fn take_plain<'a>(
        &mut self,
        shared: &mut Shared,
        header: &Header,
        body: &'a [u8],
        congested: bool,
        now: u64,
    ) -> Option<(&'a [u8], &'a [u8])> {
        let plain = header.kind == Kind::Data
            && header.psn == self.expected as u32
            && header.flags & ACK_REQUEST == 0
            && header.sack_words == 0
            && (header.flags & PRESSURE != 0) == self.peer_pressure
            && self.phase == Phase::Established
            && self.early.is_none()
            && self.assembly.is_none()
            && self.unacked + 1 < ACK_EVERY
            && widen(header.ack, self.base) <= self.unsent;
        if !plain {
            return None;
        }
        let Some((Frame::Whole { header: head, payload }, [])) = Frame::decode(body) else {
            return None;
        };
        self.note_arrival(shared, header, congested, now);
        self.expected += 1;
        self.delivered += 1;
        self.ack_at = self.ack_at.min(now + ACK_DELAY_NS);
        Some((head, payload))
    }

    fn take_in_order(
        &mut self,
        shared: &mut Shared,
        frames: &[u8],
        sink: &mut impl Sink,
    ) -> Result<(), Malformed> {
        self.deliver(shared, frames, sink)?;
        self.expected += 1;
        while let Some(next) = self.early.as_mut().and_then(|early| early.advance()) {
            let result = self.deliver(shared, &next, sink);
            shared.buffers.give(next);
            result?;
            self.expected += 1;
        }
        if self.early.as_ref().is_some_and(|early| early.held == 0) {
            self.early = None;
        }
        Ok(())
    }

    fn keep_early(&mut self, shared: &mut Shared, at: usize, frames: &[u8]) {
        if at + 1 >= WINDOW_MAX as usize {
            shared.counts.no_room += 1;
            return;
        }
        if self.early.as_ref().is_some_and(|early| early.has(at)) {
            shared.counts.duplicates += 1;
            return;
        }
        // What waits here may not take the memory that sending needs: the peer that it waits for may be gone.
        let spare = (shared.settings.buffer_bytes / 4).max(SENDING) + frames.len();
        let spare = shared.buffers.has_room(spare);
        let Some(mut packet) = spare.then(|| shared.buffers.take(frames.len())).flatten() else {
            shared.counts.no_room += 1;
            return;
        };
        packet.hold(frames);
        let early = self.early.get_or_insert_default();
        match early.keep(at, packet) {
            Ok(()) => shared.counts.early += 1,
            Err(packet) => shared.buffers.give(packet),
        }
    }

    fn deliver(
        &mut self,
        shared: &mut Shared,
        mut frames: &[u8],
        sink: &mut impl Sink,
    ) -> Result<(), Malformed> {
        while !frames.is_empty() {
            let (frame, rest) = Frame::decode(frames).ok_or(Malformed)?;
            frames = rest;
            match frame {
                Frame::Whole { header, payload } => {
                    if self.assembly.is_some() {
                        return Err(Malformed);
                    }
                    self.delivered += 1;
                    sink.on_message(self.peer, header, payload);
                }
                Frame::First { total, header, payload } => {
                    self.begin(shared, total, header, payload)?;
                }
                Frame::More { payload } => self.assemble(payload)?,
                Frame::Last { payload } => {
                    self.assemble(payload)?;
                    let assembly = self.assembly.take().ok_or(Malformed)?;
                    if assembly.payload.len() != assembly.total {
                        return Err(Malformed);
                    }
                    let header = assembly.header.get(..assembly.header_len).unwrap_or(&[]);
                    self.delivered += 1;
                    sink.on_message(self.peer, header, &assembly.payload);
                    shared.spare = Some(assembly);
                }
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        shared: &mut Shared,
        total: usize,
        header: &[u8],
        payload: &[u8],
    ) -> Result<(), Malformed> {
        if self.assembly.is_some() || total > MESSAGE_MAX || payload.len() > total {
            return Err(Malformed);
        }
        let mut assembly = shared.spare.take().unwrap_or_default();
        assembly.header.get_mut(..header.len()).ok_or(Malformed)?.copy_from_slice(header);
        assembly.header_len = header.len();
        assembly.total = total;
        assembly.payload.clear();
        assembly.payload.reserve(total);
        assembly.payload.extend_from_slice(payload);
        self.assembly = Some(assembly);
        Ok(())
    }

    fn assemble(&mut self, payload: &[u8]) -> Result<(), Malformed> {
        let assembly = self.assembly.as_mut().ok_or(Malformed)?;
        if assembly.payload.len() + payload.len() > assembly.total {
            return Err(Malformed);
        }
        assembly.payload.extend_from_slice(payload);
        Ok(())
    }
}

fn broken() -> End {
    End::Departed(Departure::Failed(Errno(libc::EPROTO)))
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
        let next = |early: &mut Early| early.advance().map(|packet| packet.to_vec());
        let mut early = Early::default();
        let mut words = [0; SACK_WORDS * 8];
        for at in [0, 1, 3, 70] {
            assert!(early.keep(at, packet(at as u8)).is_ok());
            assert!(early.keep(at, packet(9)).is_err());
        }
        assert_eq!(early.write_sack(&mut words), 2);
        assert_eq!(words[..9], [0b1011, 0, 0, 0, 0, 0, 0, 0, 1 << 6]);
        assert_eq!(next(&mut early), Some(vec![0]));
        assert_eq!(next(&mut early), Some(vec![1]));
        assert_eq!(next(&mut early), None);
        assert_eq!(early.write_sack(&mut words), 2);
        assert_eq!(words[..9], [1, 0, 0, 0, 0, 0, 0, 0, 1 << 3]);
        assert_eq!(next(&mut early), Some(vec![3]));
        for _ in 0..66 {
            assert_eq!(next(&mut early), None);
        }
        assert_eq!(next(&mut early), Some(vec![70]));
        assert_eq!((early.held, early.write_sack(&mut words)), (0, 0));
    }
}
