//! The send window: the packets of one direction, which are kept until the peer has acknowledged them.

use super::super::buffers::Buffers;
use super::super::congestion::WINDOW_MAX;
use crate::sys::packets::Buffer;
use std::collections::VecDeque;
use std::ops::Range;

/// The state of a packet in the window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Stage {
    #[default]
    Unsent,
    InFlight,
    /// The peer has it, but not all packets before it.
    Arrived,
    /// To be sent again.
    Lost,
}

/// A packet that is kept until it and all before it have arrived.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    /// Room for the header, then frames.
    pub(crate) bytes: Buffer,
    pub(crate) transmission: u64,
    pub(crate) sent_at: u64,
    /// When the transmission before the last one was sent, nanoseconds.
    before_at: u64,
    pub(crate) stage: Stage,
    /// It was declared lost because of a timeout, not because later packets have arrived.
    pub(super) overdue: bool,
    /// Congestion control counts it as lost.
    counted: bool,
}

impl Outgoing {
    /// It is to be sent again: see the fields.
    fn lose(&mut self, overdue: bool, counted: bool) {
        (self.stage, self.overdue, self.counted) = (Stage::Lost, overdue, counted);
    }

    /// This transmission of it is in flight.
    fn is_under_way(&self, transmission: u64) -> bool {
        self.stage == Stage::InFlight && self.transmission == transmission
    }

    /// It was sent again after a timeout although it had arrived: see [`Self::was_delayed`].
    pub(super) fn was_early(&self, echo: Option<u64>) -> bool {
        self.overdue && echo.is_some_and(|echo| self.transmission > echo)
    }

    /// It was counted as lost, and has arrived after all. If its last transmission is after `echo`, the highest one that
    /// can have arrived, then an earlier one has arrived and the retransmission was unnecessary.
    fn was_delayed(&self, echo: Option<u64>) -> bool {
        let again = echo.is_some_and(|echo| self.transmission > echo);
        self.counted && (self.stage == Stage::Lost || self.stage == Stage::InFlight && again)
    }
}

/// The send window of one connection.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// Packets from `base` on.
    pub(crate) packets: VecDeque<Outgoing>,
    pub(crate) base: u64,
    /// The first packet that was never sent.
    pub(crate) unsent: u64,
    /// The first packet that was never given to the link. Of the packets before it that the link did not take some may
    /// have left: the kernel may split a batch (IPsec), and fail behind the first of its packets.
    pub(super) offered: u64,
    pub(crate) in_flight: u32,
    /// Number of the next transmission.
    pub(crate) transmission: u64,
    /// Transmissions and their packets, oldest first, until a later one has arrived.
    transmissions: VecDeque<(u64, u64)>,
    /// Packets to send again.
    pub(crate) lost: VecDeque<u64>,
}

/// The new information in an acknowledgement.
#[derive(Default)]
pub(super) struct News {
    /// Packets that have arrived.
    pub(super) arrived: u32,
    /// Of those, packets that were counted as lost: see [`Outgoing::was_delayed`].
    pub(super) delayed: u32,
    /// Of those, packets that were declared lost because later ones had arrived: they were reordered.
    pub(super) late: u32,
    /// One was sent again too early: when it had been sent before, nanoseconds.
    pub(super) asked_at: Option<u64>,
    /// When the transmission that the peer answers left, nanoseconds.
    pub(super) sent_at: Option<u64>,
}

impl News {
    /// `packet` has arrived. Returns 1 if it was in flight, 0 if it was declared lost.
    fn count(&mut self, packet: &Outgoing, echo: Option<u64>) -> u32 {
        let under_way = packet.stage == Stage::InFlight;
        self.arrived += 1;
        if packet.was_delayed(echo) {
            self.delayed += 1;
            self.late += u32::from(!packet.overdue);
        }
        if under_way && Some(packet.transmission) == echo {
            self.sent_at = Some(packet.sent_at);
        }
        u32::from(under_way)
    }
}

impl Window {
    /// `first` is the number of the first packet.
    pub(super) fn new(first: u64) -> Self {
        Self { base: first, unsent: first, transmission: first + 1, ..Self::default() }
    }

    /// Number of the next packet that is added.
    pub(crate) fn next_psn(&self) -> u64 {
        self.base + self.packets.len() as u64
    }

    /// Packets that were never sent.
    pub(crate) fn waiting(&self) -> usize {
        (self.next_psn() - self.unsent) as usize
    }

    /// There is room for `packets` more.
    pub(crate) fn has_room_for(&self, packets: usize) -> bool {
        self.packets.len() + packets <= WINDOW_MAX as usize
    }

    /// Extends the last packet by `more` bytes, and returns these.
    pub(crate) fn extend_last(&mut self, more: usize) -> Option<&mut [u8]> {
        let bytes = &mut self.packets.back_mut()?.bytes;
        let at = bytes.len();
        bytes.resize(at + more);
        bytes.get_mut(at..)
    }

    /// Adds a packet that is not yet sent.
    pub(crate) fn push(&mut self, bytes: Buffer) {
        self.packets.push_back(Outgoing { bytes, ..Outgoing::default() });
    }

    /// Adds a packet that has already left as the next transmission; no other packet waits.
    pub(super) fn push_sent(&mut self, bytes: Buffer, now: u64) {
        let (transmission, stage) = (self.transmission, Stage::InFlight);
        let (sent_at, before_at) = (now, now);
        let packet =
            Outgoing { bytes, transmission, sent_at, before_at, stage, ..Outgoing::default() };
        self.packets.push_back(packet);
        self.transmissions.push_back((transmission, self.unsent));
        self.unsent += 1;
        self.in_flight += 1;
        self.transmission += 1;
    }

    fn packet(&mut self, psn: u64) -> Option<&mut Outgoing> {
        self.packets.get_mut(usize::try_from(psn.checked_sub(self.base)?).ok()?)
    }

    /// Length of packet `psn`, bytes; 0 if it is not in the window.
    pub(crate) fn len_of(&mut self, psn: u64) -> usize {
        self.packet(psn).map_or(0, |packet| packet.bytes.len())
    }

    /// Removes packets that have arrived from the list of lost ones.
    pub(super) fn forget_arrived(&mut self) {
        while let Some(psn) = self.lost.front().copied() {
            if self.packet(psn).is_some_and(|packet| packet.stage == Stage::Lost) {
                break;
            }
            self.lost.pop_front();
        }
    }

    /// The packet to send next, and whether it is sent for the first time.
    pub(super) fn next(&self) -> (u64, bool) {
        self.lost.front().map_or((self.unsent, true), |psn| (*psn, false))
    }

    /// Marks packet `psn` as sent if it is the next one and has at most `len_max` bytes; returns its length.
    pub(super) fn take_next(&mut self, psn: u64, fresh: bool, len_max: usize) -> Option<usize> {
        if self.next() != (psn, fresh) {
            return None;
        }
        let wanted = if fresh { Stage::Unsent } else { Stage::Lost };
        let packet = self.packet(psn).filter(|packet| packet.stage == wanted)?;
        let len = packet.bytes.len();
        if len > len_max {
            return None;
        }
        packet.stage = Stage::InFlight;
        if fresh {
            self.unsent += 1;
        } else {
            self.lost.pop_front();
        }
        self.in_flight += 1;
        Some(len)
    }

    /// The packets of `batch`, each with a new transmission number.
    pub(crate) fn transmit(
        &mut self,
        batch: Range<u64>,
        now: u64,
    ) -> impl Iterator<Item = (u64, &mut Outgoing)> {
        let Self { packets, transmissions, transmission, base, .. } = self;
        let skipped = (batch.start - *base) as usize;
        let packets = batch.zip(packets.iter_mut().skip(skipped));
        (*transmission..).zip(packets).map(move |(transmission, (psn, packet))| {
            packet.before_at = packet.sent_at;
            (packet.transmission, packet.sent_at) = (transmission, now);
            transmissions.push_back((transmission, psn));
            (psn, packet)
        })
    }

    /// The link took the first `taken` packets of `batch`. The transmission numbers of the others are reused: a gap
    /// would count as reordered packets.
    pub(super) fn note_taken(&mut self, batch: Range<u64>, taken: usize, fresh: bool) {
        self.transmission += taken as u64;
        if batch.start + (taken as u64) < batch.end {
            self.offered = self.offered.max(batch.end);
        }
        let at = (batch.start - self.base) as usize;
        for packet in self.packets.iter_mut().skip(at).take(taken) {
            packet.bytes.note_sent();
        }
        for psn in (batch.start + taken as u64..batch.end).rev() {
            self.take_back(psn, fresh);
        }
    }

    /// Undoes the transmission of a packet that the link did not take.
    fn take_back(&mut self, psn: u64, fresh: bool) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.transmissions.pop_back();
        if let Some(packet) = self.packet(psn) {
            packet.stage = if fresh { Stage::Unsent } else { Stage::Lost };
            packet.transmission = if fresh { 0 } else { packet.transmission };
        }
        if fresh {
            self.unsent = psn;
        } else {
            self.lost.push_front(psn);
        }
    }

    /// After a timeout: the first packet is to be sent again.
    pub(super) fn lose_first(&mut self) {
        let Some(first) = self.packets.front_mut().filter(|p| p.stage == Stage::InFlight) else {
            return;
        };
        first.lose(true, false);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.lost.push_front(self.base);
    }

    /// The same for all packets that were sent.
    pub(super) fn lose_all(&mut self) {
        self.lost.clear();
        for (psn, packet) in (self.base..).zip(&mut self.packets) {
            if matches!(packet.stage, Stage::InFlight | Stage::Lost) {
                packet.lose(true, false);
                self.lost.push_back(psn);
            }
        }
        self.in_flight = 0;
    }

    /// A packet is in flight whose transmission is older than `arrived`, which has arrived.
    pub(crate) fn has_passed(&self, arrived: u64) -> bool {
        let older =
            self.transmissions.iter().take_while(|(transmission, _)| *transmission < arrived);
        older.into_iter().any(|(transmission, psn)| {
            let at = psn.checked_sub(self.base).and_then(|at| usize::try_from(at).ok());
            let packet = at.and_then(|at| self.packets.get(at));
            packet.is_some_and(|p| p.is_under_way(*transmission))
        })
    }

    /// The peer has all packets before `ack`. False: one of them was never given to the link.
    pub(super) fn have_left(&mut self, ack: u64) -> bool {
        let known = ack <= self.unsent.max(self.offered);
        if known {
            // Their numbers are used, too.
            self.transmission += ack.saturating_sub(self.unsent);
            self.unsent = self.unsent.max(ack);
        }
        known
    }

    /// The oldest transmission with unknown fate is lost if it is older than `before`, and is then forgotten; `overdue`:
    /// because of a timeout. Returns whether its packet must be sent again, which the caller has congestion control count;
    /// `None`: the transmission is not older.
    pub(super) fn lose_oldest(&mut self, before: u64, overdue: bool) -> Option<bool> {
        let (transmission, psn) = *self.transmissions.front().filter(|(t, _)| *t < before)?;
        self.transmissions.pop_front();
        let under_way = |p: &&mut Outgoing| p.is_under_way(transmission);
        let Some(packet) = self.packet(psn).filter(under_way) else { return Some(false) };
        packet.lose(overdue, true);
        self.in_flight -= 1;
        self.lost.push_back(psn);
        Some(true)
    }

    /// All packets before `ack` have arrived, and those that `words`, the selective acknowledgement, names. `echo`: the
    /// highest transmission that has arrived.
    pub(super) fn acknowledge(
        &mut self,
        buffers: &mut Buffers,
        ack: u64,
        words: &[u8],
        echo: Option<u64>,
    ) -> News {
        let mut news = News::default();
        while self.base < ack {
            let Some(packet) = self.packets.pop_front() else { break };
            self.base += 1;
            if packet.stage != Stage::Arrived {
                self.in_flight -= news.count(&packet, echo);
                if packet.was_early(echo) {
                    news.asked_at = Some(packet.before_at);
                }
            }
            buffers.give(packet.bytes);
        }
        for (w, word) in words.chunks_exact(8).enumerate() {
            let mut bits = word.try_into().map_or(0, u64::from_le_bytes);
            while bits != 0 {
                let at = 1 + w * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let Some(packet) = self.packets.get_mut(at) else { break };
                if matches!(packet.stage, Stage::InFlight | Stage::Lost) {
                    self.in_flight -= news.count(packet, echo);
                    packet.stage = Stage::Arrived;
                    buffers.give(std::mem::take(&mut packet.bytes));
                }
            }
        }
        news
    }

    /// Returns memory left from a busier time; all packets have arrived.
    pub(crate) fn trim(&mut self) {
        self.packets.shrink_to_fit();
        self.transmissions.retain(|(_, psn)| *psn >= self.base);
        self.transmissions.shrink_to_fit();
        self.lost.clear();
        self.lost.shrink_to_fit();
    }

    /// Returns all buffers, and the number of packets that had them.
    pub(crate) fn release(self, buffers: &mut Buffers) -> usize {
        let count = self.packets.len();
        self.packets.into_iter().for_each(|packet| buffers.give(packet.bytes));
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window with `sent` packets in flight, and one that waits.
    fn window(sent: u64) -> Window {
        let mut window = Window::new(10);
        (0..=sent).for_each(|_| window.push(Buffer::new(1)));
        leave(&mut window, sent, sent);
        window
    }

    /// Sends the next `count` packets, of which the link takes `taken`.
    fn leave(window: &mut Window, count: u64, taken: u64) {
        let (first, fresh) = window.next();
        for psn in first..first + count {
            assert_eq!(window.take_next(psn, fresh, 1), Some(0));
        }
        let batch = first..first + count;
        assert_eq!(window.transmit(batch.clone(), 5).count() as u64, count);
        window.note_taken(batch, taken as usize, fresh);
    }

    fn acknowledge(window: &mut Window, ack: u64, word: u64, echo: u64) -> News {
        window.acknowledge(&mut Buffers::new(4096, 1 << 20), ack, &word.to_le_bytes(), Some(echo))
    }

    #[test]
    fn packets_stay_until_all_before_them_have_arrived() {
        let mut window = window(4);
        assert_eq!(
            (window.base, window.unsent, window.waiting(), window.in_flight),
            (10, 14, 1, 4)
        );
        let news = acknowledge(&mut window, 11, 0b10, 14);
        assert_eq!((news.arrived, news.late, news.sent_at), (2, 0, Some(5)));
        assert_eq!((window.base, window.packets.len(), window.in_flight), (11, 4, 2));
        assert_eq!(acknowledge(&mut window, 14, 0, 14).arrived, 2);
        assert_eq!((window.packets.len(), window.in_flight), (1, 0));
    }

    #[test]
    fn what_was_overtaken_is_lost_and_may_be_late() {
        let mut window = window(4);
        acknowledge(&mut window, 10, 0b100, 14);
        assert!(window.has_passed(13) && !window.has_passed(11));
        assert_eq!(window.lose_oldest(12, false), Some(true));
        assert!(!window.has_passed(12) && window.has_passed(13));
        assert_eq!(
            (window.lose_oldest(12, false), window.next(), window.in_flight),
            (None, (10, false), 2)
        );
        let news = acknowledge(&mut window, 11, 0, 14);
        assert_eq!((news.arrived, news.delayed, news.late), (1, 1, 1));
        window.forget_arrived();
        assert_eq!(window.next(), (14, true));
    }

    #[test]
    fn what_the_link_does_not_take_is_as_it_was() {
        let mut window = window(0);
        (0..3).for_each(|_| window.push(Buffer::new(1)));
        leave(&mut window, 4, 1);
        assert_eq!((window.unsent, window.in_flight, window.transmission), (11, 1, 12));
        window.lose_first();
        leave(&mut window, 1, 0);
        assert_eq!((window.next(), window.in_flight), ((10, false), 0));
        leave(&mut window, 1, 1);
        leave(&mut window, 3, 3);
        window.lose_all();
        assert_eq!((window.lost.len(), window.in_flight, window.waiting()), (4, 0, 0));
        assert!(
            acknowledge(&mut window, 11, 0, 11).asked_at.is_some(),
            "the first transmission had arrived"
        );
    }
}
