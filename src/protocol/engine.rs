//! The endpoint's protocol state and its progress function.

use super::Host;
use super::collective::CollectivePacket;
use super::index_list::Key;
use super::limits::Counts;
use super::message::Announcement;
use super::packet::{EagerHeader, Packet, PieceHeader};
use super::rma::RmaPacket;
use super::schemes::put::{self, GET_OF_A_MESSAGE, PUT_OF_A_MESSAGE};
use super::sends::Pending;
use super::state::{Core, Engine};
use crate::memory::SegmentList;
use crate::transport::{
    Address, Departure, Figures, Handler, Iface, LaneId, Mark, PeerId, RemoteKey, StreamEnd,
};

/// A turn polls once more for each so many operations that wait, but not more often than this: it tries all of them.
const EACH_POLL: usize = 64;
const POLLS_MAX: usize = 128;

/// Handles what the interface delivers during one poll.
struct Delivery<'a, H> {
    core: &'a mut Core,
    host: &'a mut H,
    /// A send has ended for which the receiver's answer was needed.
    answered: bool,
}

impl<H: Host> Handler for Delivery<'_, H> {
    fn on_peer(&mut self, peer: PeerId, address: &Address) {
        self.core.stirred = true;
        self.core.end_departures(self.host);
        self.core.peers.meet(peer, address);
        self.core.peers.mark_alive(peer);
        self.host.met(peer, address);
        self.host.heard(address);
    }

    #[inline]
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        if let Some(envelope) = EagerHeader::decode_head(header) {
            // A message that `try_fill` refuses is decoded again: to keep the envelope would slow down all others.
            if !self.core.try_fill(peer, envelope, payload, self.host) {
                self.on_any(peer, header, payload);
            }
        } else if let Some((tx, offset)) = PieceHeader::decode_pushed(header) {
            self.core.stirred = true;
            self.core.on_pushed(peer, tx, offset, payload, self.host);
        } else {
            self.on_any(peer, header, payload);
        }
    }

    /// An application that waited for a message's delivery may receive the reply to it next, and the reply may have
    /// arrived already. Taken before that receive is posted, it would be copied twice.
    #[inline]
    fn wants_pause(&mut self) -> bool {
        std::mem::take(&mut self.answered)
    }

    fn place(&mut self, peer: PeerId, header: &[u8], len: usize) -> Option<SegmentList> {
        let (key, offset) = self.core.arrivals.by_stream(peer, header)?;
        self.core.arrivals.place_streamed(peer, key, offset, len)
    }

    fn on_placed(&mut self, peer: PeerId, header: &[u8], len: usize) {
        self.core.stirred = true;
        if let Some((key, _)) = self.core.arrivals.by_stream(peer, header) {
            if self.core.arrivals.on_streamed(key, len) {
                self.core.finish_active(key, self.host);
            }
        }
    }

    fn on_stream_lost(&mut self, peer: PeerId, end: StreamEnd) {
        self.core.stirred = true;
        match end {
            StreamEnd::Outgoing => self.core.sends.park_streamed(peer),
            // The missing bytes of each message are requested, now or when its receive is found.
            StreamEnd::Incoming => {
                let Core { arrivals, outbox, counts, matching, .. } = &mut *self.core;
                arrivals.resume_streamed(peer, outbox, counts);
                matching.change_messages_of(|of| of == peer, |message| message.body.end_push());
            }
        }
    }

    fn on_notify(&mut self, peer: PeerId, token: u64) {
        self.core.stirred = true;
        self.core.on_part(peer, token, false, self.host);
    }

    fn on_lane_lost(&mut self, peer: PeerId, lane: LaneId) {
        self.core.stirred = true;
        let Core { arrivals, outbox, counts, .. } = &mut *self.core;
        arrivals.lose_windows((peer, lane), outbox, counts);
        for key in self.core.sends.forget_writes(peer, Some(lane)) {
            self.core.on_released(peer, key, self.host);
        }
        self.core.lose_reaches(peer, lane);
    }

    fn on_done(&mut self, peer: PeerId, token: u64) {
        self.core.stirred = true;
        match (token & GET_OF_A_MESSAGE, token & PUT_OF_A_MESSAGE) {
            (0, 0) => self.core.on_access_done(peer, token, self.host),
            (0, _) => {
                let Core { sends, counts, .. } = &mut *self.core;
                let token = token & !PUT_OF_A_MESSAGE;
                if let Some(key) = sends.on_written(peer, token, counts, self.host) {
                    self.core.on_released(peer, key, self.host);
                }
            }
            _ => self.core.on_part(peer, token & !GET_OF_A_MESSAGE, true, self.host),
        }
    }

    fn on_key_void(&mut self, peer: PeerId, key: &RemoteKey) {
        self.core.stirred = true;
        self.core.on_key_void(peer, key);
    }

    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        self.core.stirred = true;
        self.core.on_acknowledged(peer, upto, self.host);
    }

    fn on_departure(&mut self, peer: PeerId, departure: Departure) {
        self.core.stirred = true;
        self.core.on_departure(peer, departure, self.host);
    }

    fn is_owed(&self, peer: PeerId) -> bool {
        self.core.is_owed(peer, self.host)
    }

    fn oldest_send(&self) -> Option<(u64, PeerId)> {
        self.core.oldest_send()
    }

    fn on_turns(&mut self, figures: &Figures) {
        self.core.stirred = true;
        self.core.show(figures, self.host);
    }
}

impl<H: Host> Delivery<'_, H> {
    /// Everything but unsolicited fragments and the eager messages of the fast path.
    #[inline(never)]
    fn on_any(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        self.core.stirred = true;
        match Packet::decode(header) {
            Some(Packet::Eager { envelope, ack }) => {
                self.core.on_eager(peer, &envelope, ack, payload, self.host);
            }
            Some(Packet::Rts { envelope, tx, len, pushed, leaves, sees, offer, ranges }) => {
                let (pushed, broken) = (pushed.min(len), false);
                let rts = Announcement { tx, len, pushed, leaves, sees, broken, offer, ranges };
                self.core.on_rts(peer, &envelope, rts, payload, self.host);
            }
            Some(Packet::Pushed { tx, offset }) => {
                self.core.on_pushed(peer, tx, offset, payload, self.host);
            }
            Some(Packet::Cts { tx, rx, len, faulted, ranges }) => {
                self.core.on_cts(peer, (tx, rx), (len, faulted), ranges, self.host);
            }
            Some(Packet::Resume { tx, rx, from, len }) => {
                self.core.on_resume(peer, (tx, rx), (from, len), self.host);
            }
            Some(Packet::Fragment { rx, offset }) => {
                self.core.on_fragment(peer, rx, offset, payload, self.host);
            }
            Some(Packet::PutDone { rx }) => self.core.on_put_done(peer, rx, self.host),
            Some(Packet::Fin { tx, status }) => {
                self.answered = self.core.on_fin(peer, tx, status, self.host);
                self.core.paused |= self.answered;
            }
            Some(Packet::Window { tx, rx, offset, len, remote }) => {
                self.core.note_answer(peer, tx, self.host);
                let Core { sends, outbox, counts, .. } = &mut *self.core;
                sends.on_window(peer, (tx, rx), (offset, len), remote, (outbox, counts));
            }
            Some(Packet::Cooperate { tx, offset, share, ranges }) => {
                self.core.note_answer(peer, tx, self.host);
                let taken = self.core.sends.on_cooperate(peer, tx, offset, share, ranges);
                self.core.counts.dropped += u64::from(!taken);
            }
            Some(Packet::Decline { rx, offset }) => {
                let taken = self.core.arrivals.on_decline(peer, Key::from_wire(rx), offset);
                self.core.counts.dropped += u64::from(!taken);
            }
            Some(Packet::Gone { rx }) => self.core.on_gone(peer, rx, self.host),
            Some(Packet::Fault { rx }) => self.core.on_fault(peer, rx, self.host),
            None if RmaPacket::is_one(header) => {
                self.core.on_rma(peer, header, payload, self.host);
            }
            None if CollectivePacket::is_one(header) => {
                self.core.on_collective(peer, header, payload);
            }
            None => self.core.counts.dropped += 1,
        }
    }
}

impl<I: Iface> Engine<I> {
    /// The interface, for waiting.
    pub(crate) fn iface_mut(&mut self) -> &mut I {
        &mut self.iface
    }

    /// The interface.
    pub(crate) fn iface(&self) -> &I {
        &self.iface
    }

    /// Unexpected messages that are held now.
    pub(crate) fn unexpected(&self) -> usize {
        self.core.matching.unexpected.len()
    }

    /// Event counts so far.
    pub(crate) fn counts(&self) -> Counts {
        self.core.counts
    }

    /// Shows what the endpoint has done, as it does now and then while it polls.
    pub(crate) fn show(&mut self, host: &mut impl Host) {
        let figures = self.iface.figures(self.core.oldest_send());
        self.core.show(&figures, host);
    }

    /// The peer at `address`; makes contact if this is the first call for it.
    pub(crate) fn connect(&mut self, address: &Address) -> Result<PeerId, super::OpError> {
        let peer = self.iface.connect(address)?;
        if let Some(known) = self.iface.address_of(peer) {
            self.core.peers.meet(peer, &known);
        }
        Ok(peer)
    }

    /// Whether messages of the peer at this address arrive.
    pub(crate) fn hears(&self, address: &Address) -> bool {
        self.iface.heard(address).is_some_and(|peer| !self.core.peers.is_dead(peer))
    }

    /// One progress pass: receives what has arrived and moves what can be moved. Returns the number of events.
    #[inline]
    pub(crate) fn progress(&mut self, host: &mut impl Host) -> usize {
        // Nothing but `self` and `host` lives on from one round to the next: nearly all calls are over after one.
        loop {
            let mut n = 0;
            if host.takes_arrivals() && !self.is_full() {
                n = self.iface.poll(&mut Delivery { core: &mut self.core, host, answered: false });
            }
            if !(self.core.stirred | self.core.waits) {
                debug_assert!(!self.core.has_work(), "work that nobody told of");
                return n;
            }
            if let Some(n) = self.work(n, host) {
                return n;
            }
        }
    }

    /// Tries what waits. Returns the number of events since this was done last; `None`: more is to be taken in before.
    #[inline(never)]
    fn work(&mut self, taken: usize, host: &mut impl Host) -> Option<usize> {
        self.core.taken += taken;
        self.core.end_departures(host);
        if taken > 0 && self.core.takes_more() {
            return None;
        }
        self.core.polls = 0;
        let taken = std::mem::take(&mut self.core.taken);
        if std::mem::take(&mut self.core.arrivals.attentive) {
            self.iface.attend();
        }
        let n = if self.core.has_work() { self.advance(host) } else { 0 };
        self.core.waits = self.core.has_work() || self.core.arrivals.attentive;
        // A move may leave room, or open the way for another operation.
        self.core.stirred = self.core.waits && n > 0;
        Some(taken + n)
    }

    /// Whether this process still holds messages that the application believes sent, or replies that a peer waits for.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.core.outbox.is_empty()
            || self.core.sends.pending.iter().any(|(_, send)| send.message.payload.is_owned())
            || self.core.rma.has_unsent()
            || self.core.collectives.has_unsent()
    }

    /// Whether it takes nothing from the network now, because copies to a device have not ended.
    pub(crate) fn is_full(&self) -> bool {
        self.core.arrivals.is_full()
    }

    /// Whether messages that have arrived are being copied to a device.
    pub(crate) fn is_landing(&self) -> bool {
        self.core.arrivals.active.iter().any(|(_, active)| active.message.is_landing())
    }

    #[cold]
    fn advance(&mut self, host: &mut impl Host) -> usize {
        // Before the outbox: it may ask peers for the rest of their messages.
        self.update_pressure();
        let mut n = self.advance_pulls(host);
        n += self.advance_streams(host);
        n += self.advance_writes();
        // Receives come first: their senders help with those.
        if n == 0 {
            n += self.advance_assists();
        }
        n += self.advance_leaving(host);
        n += self.flush_outbox(host) + self.flush_late(host);
        // After the outbox: the senders' chunks are advertised before this endpoint begins to read its own.
        self.withdraw_offers();
        n += self.core.arrivals.begin_reads(&mut self.iface, &mut self.core.counts);
        if self.core.rma.work() > 0 {
            n += self.advance_rma(host);
        }
        // After the remote accesses: the last of them opens a fence.
        n += self.advance_deferred(host);
        if self.core.collectives.work() > 0 {
            n += self.advance_collectives(host);
        }
        n
    }

    fn update_pressure(&mut self) {
        let Core { limits, matching, arrivals, outbox, .. } = &mut self.core;
        let most = limits.unexpected_max;
        let on = matching.bytes > if matching.presses { most / 2 } else { most };
        if on != matching.presses {
            matching.presses = on;
            self.iface.set_pressure(on);
            if on {
                arrivals.ask_for_pushed(outbox);
            }
        }
    }
}

impl Core {
    fn show(&self, figures: &Figures, host: &mut impl Host) {
        let traffic: Vec<_> = figures.peers.iter().map(|p| self.traffic(p.peer)).collect();
        host.show(&self.standing(), figures, &traffic);
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.waiting() > 0
            || self.matching.presses
            || self.matching.bytes > self.limits.unexpected_max
    }

    /// Whether more is taken in before all that waits is tried: most of it waits for something that arrives.
    fn takes_more(&mut self) -> bool {
        self.polls += 1;
        !std::mem::take(&mut self.paused)
            && self.polls <= (self.waiting() / EACH_POLL).min(POLLS_MAX)
            && self.matching.bytes <= self.limits.unexpected_max
    }

    /// About how many operations wait: at least as many as in the longest list.
    #[inline]
    fn waiting(&self) -> usize {
        self.tasks() | self.sends.leaving.len()
    }

    /// Not 0: there is something that a turn would try.
    #[inline]
    fn tasks(&self) -> usize {
        // One comparison instead of many.
        self.outbox.len()
            | self.sends.work()
            | self.arrivals.work()
            | self.rma.work()
            | self.collectives.work()
    }

    /// Whether an operation waits for `peer`, or has a moment ago: see [`Owed`](super::owed::Owed).
    pub(super) fn is_owed(&self, peer: PeerId, host: &impl Host) -> bool {
        let Some(state) = self.peers.get(peer) else { return false };
        let who = (peer, state.source_now(host));
        state.outstanding > 0
            || state.deferred() > 0
            || self.rma.awaits(peer)
            || self.owed.has(who, host.now_ns(), |snapshot| {
                let receives = host.see_shared_receives().unwrap_or(&self.matching.own);
                snapshot.sources.extend(receives.sources());
                let active = &self.arrivals.active;
                snapshot.peers.extend(active.iter().map(|(_, active)| active.message.peer));
                snapshot.peers.extend(self.collectives.awaited());
                receives.len() + active.len() + self.collectives.len()
            })
    }
}

impl<I: Iface> Engine<I> {
    /// Whether this endpoint must be polled although nothing arrives.
    pub(crate) fn is_busy(&self) -> bool {
        let core = &self.core;
        let silent = |peer: PeerId| !self.iface.caps(peer).announces_room;
        let receiver = |key: &Key| core.sends.receiver(*key);
        core.stirred && core.tasks() > 0
            || !core.arrivals.pulls.is_empty()
            || !core.sends.assists.is_empty()
            || core.outbox.receivers().any(silent)
            || core.sends.streams.iter().filter_map(receiver).any(silent)
            || core.sends.streams.iter().any(|key| core.sends.is_staged(*key))
            || core.sends.due.iter().filter_map(|due| receiver(&due.tx)).any(silent)
            || core.sends.due.iter().any(put::Due::is_under_way)
            || core.arrivals.chunks.readers().any(silent)
            || core.sends.deferred.iter().any(|deferred| core.rma.asks(deferred.peer))
            || core.sends.deferred_starved
                && core.sends.deferred.iter().any(|deferred| silent(deferred.peer))
            || core.rma.is_busy(silent)
            || core.collectives.is_busy(silent)
    }
}

impl<I> Engine<I> {
    /// How many more sends may be pending.
    pub(crate) fn room_for_sends(&self) -> usize {
        let pending = self.core.sends.pending.len() + self.core.rma.pending();
        self.core.limits.tx_max.saturating_sub(pending)
    }

    /// Operations of a transmit context that have not been reported yet.
    pub(crate) fn pending_of(&self, context: u8) -> usize {
        let sends = self.core.sends.pending.iter().filter(|(_, Pending { message, .. })| {
            !message.completed && message.report.context() == context
        });
        sends.count() + self.core.rma.pending_of(context)
    }

    /// How many more receives may be posted to a receive context of the endpoint's own queue.
    pub(crate) fn room_for_receives(&self, context: u8) -> usize {
        self.core.limits.rx_max.saturating_sub(self.core.matching.own.posted.len_of(context))
    }
}
