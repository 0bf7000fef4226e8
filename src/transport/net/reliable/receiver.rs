//! The receiving half of a connection: order, duplicates, acknowledgements, and reassembly of messages.

mod acknowledgement;
mod order;
mod reassembly;

use super::congestion::WINDOW_MAX;
use super::packet::{
    ACK_REQUEST, DATAGRAM_LEAST, FRAME_LEN, Frame, HEADER_LEN, Header, Kind, MESSAGE_MAX, widen,
};
use super::shared::Shared;
pub(super) use acknowledgement::{ACK_EVERY, Acknowledgement};
use order::{Order, Place};
pub(super) use reassembly::{Assembly, Fault, Reassembly};

/// Bytes of buffers that sending the longest message in the shortest packets takes.
const SENDING: usize = MESSAGE_MAX.div_ceil(DATAGRAM_LEAST - HEADER_LEN - FRAME_LEN) * 2048;

/// A received packet within a connection.
pub(super) struct Arrival<'a> {
    pub(super) header: Header,
    pub(super) body: &'a [u8],
    /// It has a congestion mark.
    pub(super) congested: bool,
    /// When it arrived, nanoseconds.
    pub(super) at: u64,
}

/// The receiving half of one connection.
#[derive(Debug)]
pub(super) struct Receiver {
    pub(super) order: Order,
    pub(super) reassembly: Reassembly,
    pub(super) acknowledgement: Acknowledgement,
    /// The highest transmission that has arrived here plus one, and when it arrived.
    pub(super) arrived: u64,
    pub(super) arrived_at: u64,
    /// Packets that arrived with a congestion mark.
    pub(super) marks: u32,
    /// The epoch in which the peer last sent data (`Shared::count_sender`).
    epoch: u64,
}

impl Receiver {
    /// `first` is the number of the peer's first packet.
    pub(super) fn new(first: u64) -> Self {
        Self {
            order: Order::new(first),
            reassembly: Reassembly::default(),
            acknowledgement: Acknowledgement::default(),
            arrived: first + 1,
            arrived_at: 0,
            marks: 0,
            epoch: 0,
        }
    }

    /// Takes the frames of a genuine packet with data, and delivers the messages that are complete and in order.
    pub(super) fn on_data(
        &mut self,
        shared: &mut Shared,
        packet: &Arrival<'_>,
        frames: &[u8],
        on_message: &mut impl FnMut(&[u8], &[u8]),
    ) -> Result<(), Fault> {
        self.note_arrival(shared, packet);
        match self.order.place_of(packet.header.psn) {
            Place::Next => self.take_in_order(shared, frames, on_message)?,
            Place::Old => {
                shared.counts.duplicates += 1;
                self.acknowledgement.now = true;
            }
            Place::Ahead(at) => {
                self.keep_early(shared, at, frames);
                self.acknowledgement.now = true;
            }
        }
        let asks = packet.header.flags & ACK_REQUEST != 0;
        if asks || !self.order.is_whole() || self.acknowledgement.is_full(0) {
            self.acknowledgement.now = true;
        } else {
            self.acknowledgement.wait(packet.at);
        }
        Ok(())
    }

    /// A packet with data has arrived.
    fn note_arrival(&mut self, shared: &mut Shared, packet: &Arrival<'_>) {
        shared.counts.data_received += 1;
        shared.count_sender(packet.at, &mut self.epoch);
        let transmission = widen(packet.header.transmission, self.arrived);
        if transmission >= self.arrived {
            self.arrived = transmission + 1;
            self.arrived_at = packet.at;
        }
        self.marks = self.marks.wrapping_add(u32::from(packet.congested));
        self.acknowledgement.owed = self.acknowledgement.owed.saturating_add(1);
    }

    /// The fast path: header and payload of the message of a genuine packet that is the next in order, has exactly one
    /// message and asks for nothing. The message counts as delivered. `None`: nothing was done.
    #[inline]
    pub(super) fn take_plain<'a>(
        &mut self,
        shared: &mut Shared,
        packet: &Arrival<'a>,
    ) -> Option<(&'a [u8], &'a [u8])> {
        let header = &packet.header;
        let plain = header.kind == Kind::Data
            && header.psn == self.order.expected as u32
            && header.flags & ACK_REQUEST == 0
            && header.sack_words == 0
            && self.order.is_whole()
            && self.reassembly.is_idle()
            && !self.acknowledgement.is_full(1);
        if !plain {
            return None;
        }
        let Some((Frame::Whole { header: head, payload }, [])) = Frame::decode(packet.body) else {
            return None;
        };
        self.note_arrival(shared, packet);
        self.order.advance();
        self.reassembly.delivered += 1;
        self.acknowledgement.wait(packet.at);
        Some((head, payload))
    }

    fn take_in_order(
        &mut self,
        shared: &mut Shared,
        frames: &[u8],
        on_message: &mut impl FnMut(&[u8], &[u8]),
    ) -> Result<(), Fault> {
        self.reassembly.take(frames, &mut shared.spare, on_message)?;
        while let Some(next) = self.order.advance() {
            let result = self.reassembly.take(&next, &mut shared.spare, on_message);
            shared.buffers.give(next);
            result?;
        }
        Ok(())
    }

    fn keep_early(&mut self, shared: &mut Shared, at: usize, frames: &[u8]) {
        // Early packets may not take the memory that sending needs: the peer that has to fill the gap may be gone.
        let spare = (shared.settings.buffer_bytes / 4).max(SENDING) + frames.len();
        let room = at + 1 < WINDOW_MAX as usize && shared.buffers.has_room(spare);
        let Some(mut packet) = room.then(|| shared.buffers.take(frames.len())).flatten() else {
            shared.counts.no_room += 1;
            return;
        };
        packet.hold(frames);
        self.order.keep(at, packet);
        shared.counts.early += 1;
    }

    /// A deadline may have passed; `back_at`: until when the endpoint could not send, nanoseconds.
    pub(super) fn on_deadline(&mut self, now: u64, back_at: u64) {
        self.acknowledgement.on_deadline(now, back_at, self.arrived_at);
    }

    /// Returns all buffers.
    pub(super) fn release(self, shared: &mut Shared) {
        self.order.into_early().for_each(|packet| shared.buffers.give(packet));
    }
}
