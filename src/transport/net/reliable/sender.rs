//! The sending half of a connection: which packets may leave, and how acknowledgements are processed.

mod loss;
mod timeout;
mod window;

use super::congestion::{Congestion, WINDOW_MAX};
use super::lateness::{Host, Lateness};
use super::packet::{DELAY_UNIT_NS, HAS_ECHO, Header, PRESSURE, widen};
use super::receiver::ACK_EVERY;
use super::shared::Shared;
use super::timers::NEVER;
use crate::sys::packets::Buffer;
use loss::Loss;
use std::ops::Range;
use timeout::Timeout;
pub(super) use timeout::{SILENCE, SUSPICION};
pub(super) use window::Stage;
use window::{News, Window};

/// The sending half of one connection.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) window: Window,
    pub(super) loss: Loss,
    pub(super) timeout: Timeout,
    congestion: Congestion,
    pub(super) host: Host,
    /// The first packet beyond the peer's credit.
    credit_end: u64,
    /// The transmission after the last one that asked for an answer.
    asked: u64,
    /// The next packet asks for an answer: the application waits for it.
    pub(super) asks: bool,
    /// The peer is short of memory for payload.
    pub(super) peer_pressure: bool,
    marks_seen: u32,
    /// Messages taken from the layer above.
    pub(super) sent: u64,
}

impl Sender {
    /// `first` is the number of the first packet; the peer is on `host`.
    pub(super) fn new(first: u64, host: Host) -> Self {
        Self {
            window: Window::new(first),
            loss: Loss::new(first + 1),
            timeout: Timeout::new(),
            congestion: Congestion::new(),
            host,
            credit_end: first,
            asked: first + 1,
            asks: false,
            peer_pressure: false,
            marks_seen: 0,
            sent: 0,
        }
    }

    /// The other side has room for `packets`.
    pub(super) fn grant(&mut self, packets: u16) {
        self.credit_end = self.window.base + u64::from(packets.max(1));
    }

    /// Smoothed round trip, nanoseconds; 0: not measured.
    pub(super) fn round_trip_ns(&self) -> u64 {
        self.congestion.round_trip_ns()
    }

    /// Packets that may be in flight.
    pub(super) fn limit(&self) -> u64 {
        let credit = self.credit_end.saturating_sub(self.window.base);
        u64::from(self.congestion.window()).min(credit)
    }

    /// Whether window, credit, losses and the peer's memory allow the next packet to leave at once.
    pub(super) fn is_clear(&self) -> bool {
        self.window.unsent < self.credit_end
            && self.window.in_flight < self.congestion.window()
            && self.window.lost.is_empty()
            && !self.peer_pressure
    }

    /// Whether a new packet would be the next one to leave.
    pub(super) fn is_next(&self) -> bool {
        self.window.waiting() == 0 && self.window.has_room_for(1)
    }

    /// Whether a data packet may leave now.
    pub(super) fn may_send(&self) -> bool {
        if self.timeout.extra > 0 && !self.window.lost.is_empty() {
            return true;
        }
        let next = self.window.waiting() > 0 && self.window.unsent < self.credit_end;
        self.window.in_flight < self.congestion.window() && (!self.window.lost.is_empty() || next)
    }

    /// The next packets to send, at most `budget`, all but the last of one length: lost ones first. They count as sent
    /// from here on. Also returns whether they are sent for the first time.
    pub(super) fn choose(&mut self, budget: usize) -> (Range<u64>, bool) {
        self.window.forget_arrived();
        let (from, fresh) = self.window.next();
        let (mut next, mut longest) = (from, None);
        while ((next - from) as usize) < budget && self.may_send() {
            let most = longest.unwrap_or(usize::MAX);
            let Some(len) = self.window.take_next(next, fresh, most) else { break };
            if !fresh {
                self.timeout.extra = self.timeout.extra.saturating_sub(1);
            }
            next += 1;
            longest = longest.or(Some(len));
            if Some(len) < longest {
                break;
            }
        }
        (from..next, fresh)
    }

    /// Whether the last of the next `count` transmissions, which are already chosen, asks for an answer.
    pub(super) fn wants_answer(&self, count: usize) -> bool {
        // Packets that wait for the window need an answer soon. Where the window is large, and nothing was lost
        // recently, the periodic acknowledgements suffice.
        let starved = !self.may_send() && self.window.waiting() > 0;
        let first = self.window.transmission;
        let (last, every) = (first + (count as u64).saturating_sub(1), u64::from(ACK_EVERY));
        let enough =
            self.limit() >= 2 * every && self.loss.is_clean(first) && last < self.asked + every;
        self.timeout.attempts > 0 || starved && !enough || self.asks
    }

    /// The link took the first `taken` packets of `batch`; the last of the batch `asks` for an answer. The others are
    /// as they were before.
    pub(super) fn on_taken(
        &mut self,
        batch: Range<u64>,
        taken: usize,
        fresh: bool,
        asks: bool,
        now: u64,
    ) {
        let all = taken as u64 == batch.end - batch.start;
        self.window.note_taken(batch, taken, fresh);
        if !fresh && !all && !self.may_send() {
            // It may leave although the window is full, and has not.
            self.timeout.extra = 1;
        }
        if asks && all {
            (self.asked, self.asks) = (self.window.transmission, false);
        }
        if taken > 0 {
            self.expect_answer(now);
        }
    }

    /// `bytes` is a packet that the link did not take, and the only one that waits.
    #[cold]
    pub(super) fn on_single_refused(&mut self, bytes: Buffer) {
        self.window.push(bytes);
        self.window.offered = self.window.next_psn();
    }

    /// `bytes` is a packet that left as the next transmission, and `asks` for an answer.
    pub(super) fn on_single(&mut self, bytes: Buffer, asks: bool, now: u64) {
        self.window.push_sent(bytes, now);
        if asks {
            self.asked = self.window.transmission;
        }
        self.expect_answer(now);
    }

    fn expect_answer(&mut self, now: u64) {
        if self.timeout.at == NEVER {
            self.restart(now);
        }
    }

    /// Restarts the retransmission timeout.
    pub(super) fn restart(&mut self, now: u64) {
        self.timeout.start(now, self.timeout.doubled(self.congestion.timeout_ns()));
    }

    /// The retransmission timeout has expired: sends those packets again that were passed by one that has arrived, or else
    /// the first one; after several timeouts all packets, gradually.
    pub(super) fn send_again(&mut self) {
        self.timeout.withheld = false;
        if self.timeout.attempts == SILENCE {
            self.congestion.on_silence();
            self.window.lose_all();
        } else if !self.find_overdue() {
            self.window.lose_first();
        }
        self.timeout.extra = u8::from(!self.window.lost.is_empty());
    }

    /// Processes the acknowledgement in a packet that came at `came`. `words`: the selective acknowledgement. False: it
    /// names packets that were never sent.
    pub(super) fn on_acknowledgement(
        &mut self,
        shared: &mut Shared,
        header: &Header,
        words: &[u8],
        came: u64,
        now: u64,
    ) -> bool {
        let before = self.window.base;
        let ack = widen(header.ack, before);
        if ack < before {
            return true; // older than one that was already processed
        }
        if ack > self.window.unsent && !self.window.have_left(ack) {
            return false;
        }
        if ack == before && words.is_empty() && self.says_the_same(header) {
            return true;
        }
        let full = self.window.in_flight + 1 >= self.congestion.window();
        let echo = (header.flags & HAS_ECHO != 0).then(|| widen(header.echo, self.loss.echoed));
        let echo = echo.filter(|echo| *echo < self.window.transmission);
        let news = self.window.acknowledge(&mut shared.buffers, ack, words, echo);
        shared.unacknowledged -= (self.window.base - before) as usize;
        if news.asked_at.is_some() {
            self.congestion.on_early();
        }
        if news.delayed > 0 {
            self.congestion.on_late(news.delayed);
        }
        if news.late > 0 {
            self.loss.on_late();
        }
        self.take_credit(header, ack, echo);
        if news.arrived > 0 {
            self.take_time(header, &news, came, &mut shared.lateness);
        }
        let marked = self.take_marks(header);
        if news.arrived > 0 {
            self.loss.on_arrived(news.arrived);
            self.timeout.attempts = 0;
            self.timeout.extra = 0;
            self.congestion.on_acknowledged(news.arrived, marked, full);
        }
        if let Some(echo) = echo {
            self.loss.on_echo(echo);
            self.find_lost();
            self.congestion.on_echo(echo, self.window.transmission);
        }
        if news.arrived > 0 || self.window.in_flight == 0 {
            if self.window.in_flight > 0 || !self.window.lost.is_empty() {
                self.restart(now);
            } else {
                self.timeout.at = NEVER;
            }
        }
        true
    }

    /// Whether an acknowledgement that names no newly arrived packet also says nothing else that is new: so in all
    /// packets of a burst but the first.
    fn says_the_same(&self, header: &Header) -> bool {
        header.flags & HAS_ECHO != 0
            && header.echo.wrapping_add(1) == self.loss.echoed as u32
            && header.marks == self.marks_seen
            && (header.flags & PRESSURE != 0) == self.peer_pressure
            && self.credit_end == self.window.base + u64::from(header.credit.max(1))
            && (self.window.in_flight > 0 || self.timeout.at == NEVER)
    }

    /// Takes the peer's credit, unless a later packet has already brought a newer one.
    fn take_credit(&mut self, header: &Header, ack: u64, echo: Option<u64>) {
        self.credit_end = self.credit_end.max(ack).min(ack + u64::from(WINDOW_MAX));
        if echo.is_none_or(|echo| echo + 1 >= self.loss.echoed) {
            self.grant(header.credit);
            self.peer_pressure = header.flags & PRESSURE != 0;
        }
    }

    /// Measures the round trip of the packet that is answered.
    fn take_time(&mut self, header: &Header, news: &News, came: u64, lateness: &mut Lateness) {
        // A delay that does not fit in its field cannot be used.
        if header.ack_delay == u16::MAX {
            return;
        }
        let delay = u64::from(header.ack_delay) * DELAY_UNIT_NS;
        self.congestion.on_answer(delay);
        // Neither can one longer than the round trip: it is that of another packet.
        let since = |sent_at: u64| came.saturating_sub(sent_at).saturating_sub(delay);
        if let Some(sample @ 1..) = news.sent_at.map(since) {
            self.congestion.on_round_trip(sample, came);
        }
        if let Some(late) = news.sent_at.or(news.asked_at).map(since) {
            lateness.note(self.host, late, came);
        }
    }

    /// The number of packets with a congestion mark that are newly reported.
    fn take_marks(&mut self, header: &Header) -> u32 {
        let marked = header.marks.wrapping_sub(self.marks_seen);
        let marked = if marked <= u32::from(u16::MAX) { marked } else { 0 };
        self.marks_seen = self.marks_seen.wrapping_add(marked);
        marked
    }

    /// Declares packets lost that were sent well before a packet that has arrived.
    fn find_lost(&mut self) {
        while let Some(lost) = self.window.lose_oldest(self.loss.lost_before(), false) {
            if lost {
                self.loss.on_lost(self.window.transmission);
                self.congestion.on_lost();
            }
        }
    }

    /// Declares all packets lost that were passed by one that has arrived: that was a timeout ago. Where fewer packets are in
    /// flight than may be reordered, no other sign of them comes. Returns whether there were any.
    fn find_overdue(&mut self) -> bool {
        let mut any = false;
        while let Some(lost) = self.window.lose_oldest(self.loss.arrived(), true) {
            if lost {
                any = true;
                self.loss.on_lost(self.window.transmission);
                self.congestion.on_lost();
            }
        }
        any
    }

    /// Length of the first unacknowledged packet, if it was sent.
    pub(super) fn first_sent(&self) -> Option<usize> {
        let first = self.window.packets.front()?;
        matches!(first.stage, Stage::InFlight | Stage::Lost).then_some(first.bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Address;

    fn sender(packets: usize, credit: u16) -> Sender {
        let at = Address(([127, 0, 0, 1], 1).into());
        let mut sender = Sender::new(1, Host::of(&at));
        (0..packets).for_each(|_| sender.window.push(Buffer::new(1)));
        sender.grant(credit);
        sender
    }

    #[test]
    fn no_more_leaves_than_the_other_side_has_room_for() {
        let mut sender = sender(10, 4);
        assert_eq!((sender.limit(), sender.is_clear(), sender.is_next()), (4, true, false));
        assert_eq!(sender.choose(64), (1..5, true));
        assert!(!sender.may_send() && !sender.is_clear());
        assert!(sender.wants_answer(4), "packets wait for it");
    }

    #[test]
    fn after_a_timeout_one_packet_leaves_although_the_window_is_full() {
        let mut sender = sender(4, 4);
        let (batch, fresh) = sender.choose(64);
        assert_eq!(sender.window.transmit(batch.clone(), 0).count(), 4);
        sender.on_taken(batch, 4, fresh, false, 0);
        assert!(sender.timeout.at != NEVER && !sender.may_send());
        sender.timeout.attempts += 1;
        sender.send_again();
        assert_eq!(sender.choose(64), (1..2, false));
        assert!(!sender.may_send());
    }

    #[test]
    fn that_packet_leaves_later_if_the_link_does_not_take_it() {
        let mut sender = sender(64, 64);
        let (batch, fresh) = sender.choose(64);
        let count = sender.window.transmit(batch.clone(), 0).count();
        sender.on_taken(batch, count, fresh, false, 0);
        sender.congestion.on_silence();
        sender.timeout.attempts += 1;
        sender.send_again();
        assert!(sender.window.in_flight > sender.congestion.window());
        for taken in [0, 0, 1] {
            assert!(sender.may_send());
            assert_eq!(sender.choose(64), (1..2, false));
            assert_eq!(sender.window.transmit(1..2, 5).count(), 1);
            sender.on_taken(1..2, taken, false, false, 5);
        }
        assert!(!sender.may_send() && sender.timeout.extra == 0);
    }
}
