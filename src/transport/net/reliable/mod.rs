//! Reliable, ordered messages over datagrams: one state machine per endpoint, which has no socket and no clock.
//!
//! Time is an argument. A received datagram goes into [`Reliable::on_datagram`], packets to send come out of
//! [`Reliable::poll_transmit`], and [`Reliable::next_timeout`] says when [`Reliable::on_timeout`] must be called.
//! PROTOCOL.md §7 defines the wire format and the rules.
//!
//! The work per packet does not depend on the number of peers. An idle peer costs its memory and one check every few
//! seconds.
#![forbid(unsafe_code)]

mod buffers;
mod congestion;
mod connection;
mod handshake;
mod hints;
mod interface;
mod lateness;
mod notices;
pub(crate) mod packet;
mod queries;
mod receiver;
mod refusals;
mod sender;
mod shared;
#[cfg(test)]
pub(super) mod sim;
mod table;
pub(crate) mod tag;
mod timers;

use super::link::{Condition, Link};
use crate::sys::Errno;
use crate::sys::packets::Pool;
use crate::telemetry::log;
use crate::transport::{Address, Departure, Mark, Pack, PeerId, SendError};
use connection::handshake::{INIT, Phase, Rival};
use connection::submit::Pushed;
use connection::transmit::Turn;
use connection::{Connection, End};
#[cfg(test)]
pub(crate) use interface::Counts;
pub(crate) use interface::{Settings, Sink};
use notices::Notices;
pub(crate) use packet::MESSAGE_MAX;
use packet::{HELLO_LEN, Header, Hello, MAGIC};
use receiver::Arrival;
use refusals::Refusals;
use shared::Shared;
use std::collections::VecDeque;
use std::sync::Arc;
use table::Table;
use timers::Timers;

/// At most this much of the time between two calls counts as silence of a peer, nanoseconds: while the application does
/// not poll, no peer can be heard.
const TURN_MAX_NS: u64 = 1_000_000_000;
/// A message sent later than this after the last arrival is not latency-bound, nanoseconds.
const PROMPT_NS: u64 = 100_000;

/// So many connections end in one call of `on_timeout`, for each of which the layer above looks at all of its operations.
const ENDS_MAX: usize = 16;

/// At most so many connections are refused alone in a poll.
const REFUSED_MAX: usize = 8;

/// The state machine of one endpoint: see the module.
#[derive(Debug)]
pub(crate) struct Reliable {
    shared: Shared,
    table: Table,
    timers: Timers,
    /// Slots of connections that have something to send, in round-robin order.
    ready: VecDeque<u32>,
    /// Replies to peers without a connection.
    replies: VecDeque<(Address, [u8; HELLO_LEN])>,
    /// How many hints were sent (limit: [`handshake::HINTS_MAX`]), and since when they are counted.
    hints: u32,
    hints_since: u64,
    last_turn: u64,
    /// The link took fewer packets than it was given.
    blocked: bool,
    refusals: Refusals,
    /// The acknowledgement in the last packet, which is read after its message was delivered.
    put_off: Option<PutOff>,
    notices: Notices,
    /// Peers whose connection has ended, for the link.
    gone: Vec<(PeerId, Address)>,
}

/// An acknowledgement that connection `id` received at `came`, nanoseconds, and has not processed yet: see
/// [`Connection::take_plain`].
#[derive(Debug)]
struct PutOff {
    id: u32,
    header: Header,
    came: u64,
}

impl Reliable {
    pub(crate) fn new(settings: Settings, now: u64) -> Self {
        Self {
            shared: Shared::new(settings),
            table: Table::default(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            replies: VecDeque::new(),
            hints: 0,
            hints_since: now,
            last_turn: now,
            blocked: false,
            refusals: Refusals::default(),
            put_off: None,
            notices: Notices::default(),
            gone: Vec::new(),
        }
    }

    /// The link can send packets that are made in `pool` without copying them.
    pub(crate) fn lend(&mut self, pool: Arc<Pool>) {
        self.shared.buffers.lend(pool);
    }

    /// Tells sending peers whether to announce long messages (rendezvous) instead of sending their payload.
    pub(crate) fn set_pressure(&mut self, on: bool) {
        self.shared.pressure = on;
    }

    /// When `on_timeout` must be called, nanoseconds. May be earlier than necessary.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        let timer = self.timers.next();
        if self.blocked || !self.ready.is_empty() {
            let soon = self.last_turn + 200_000;
            return Some(timer.map_or(soon, |at| at.min(soon)));
        }
        timer
    }

    /// True when `poll_transmit` has something to do.
    #[inline]
    pub(crate) fn has_ready(&self) -> bool {
        self.has_unsent() || self.has_put_off()
    }

    /// True when an acknowledgement was put off.
    #[inline]
    pub(crate) fn has_put_off(&self) -> bool {
        self.put_off.is_some()
    }

    /// True when there is something to send.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        !self.ready.is_empty() || !self.replies.is_empty()
    }

    /// Processes the acknowledgement that was put off. Returns whether there is something to send now.
    #[inline]
    pub(crate) fn catch_up(&mut self, now: u64) -> bool {
        if let Some(put_off) = self.put_off.take() {
            self.acknowledge(&put_off, now);
        }
        self.has_unsent()
    }

    #[inline(never)]
    fn acknowledge(&mut self, PutOff { id, header, came }: &PutOff, now: u64) {
        let Some((place, c)) = self.table.numbered(*id) else { return };
        // `take_plain` has checked that it acknowledges only packets that were sent.
        c.sender.on_acknowledgement(&mut self.shared, header, &[], *came, now);
        self.settle(place);
    }

    /// Logs the first, second, fourth … dropped packet of a kind.
    #[cold]
    fn tell(&self, count: u64, what: &str, from: &Address, bytes: &[u8]) {
        if count.is_power_of_two() {
            let packet = packet::Dump(bytes);
            log::debug(format_args!("dropped, {what}, from {from}: {packet} ({count} so far)"));
        }
    }

    fn turn(&mut self, now: u64) {
        let passed = now.saturating_sub(self.last_turn);
        let most = TURN_MAX_NS.min(self.shared.settings.peer_timeout_ns / 4);
        self.shared.patience += passed.min(most);
        self.shared.lateness.on_turn(passed, now);
        self.last_turn = self.last_turn.max(now);
    }

    /// Sets the timer of a connection, and queues it if it has something to send.
    fn settle(&mut self, place: u32) {
        let Some(c) = self.table.at(place) else { return };
        self.timers.set(place, c.deadline(), &mut c.timer);
        if c.is_to_queue() {
            c.queued = true;
            self.ready.push_back(place);
        }
    }

    /// Starts a connection to the peer at `address`, unless there is one.
    pub(crate) fn connect(
        &mut self,
        peer: PeerId,
        address: &Address,
        now: u64,
    ) -> Result<(), SendError> {
        if let Some(c) = self.table.place_of(peer).and_then(|place| self.table.at(place)) {
            c.known = true;
            return Ok(());
        }
        let mut c = Connection::new(&mut self.shared, peer, *address, Phase::Greeting, now);
        c.handshake.hellos |= INIT;
        let place = self.table.insert(Box::new(c), true).ok_or(SendError::Again)?;
        self.settle(place);
        Ok(())
    }

    /// Queues a message: `header`, and `len` bytes of payload that `pack` copies in fragments from the given offset.
    /// `Again` when there is no room. `poll_transmit` sends it.
    pub(crate) fn send(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
        now: u64,
    ) -> Result<(), SendError> {
        self.accept(peer, (header, len), &mut pack, false, now)
    }

    /// The same for a message without payload that may share a packet with messages queued before `poll_transmit`.
    pub(crate) fn send_with_others(
        &mut self,
        peer: PeerId,
        header: &[u8],
        now: u64,
    ) -> Result<(), SendError> {
        self.accept(peer, (header, 0), &mut |_, _| (), true, now)
    }

    /// Sends a message without payload after all notices before it, now or later; to a peer without a connection not at
    /// all.
    pub(crate) fn notify(&mut self, peer: PeerId, header: &[u8], now: u64) {
        let Some(id) = self.table.of(peer).map(|c| c.id) else { return };
        if self.notices.wait_for(id) || !self.takes(peer, header, now) {
            self.notices.push(id, peer, header);
        }
    }

    /// False: there is no room for the message now.
    fn takes(&mut self, peer: PeerId, header: &[u8], now: u64) -> bool {
        self.send(peer, header, 0, |_, _| (), now) != Err(SendError::Again)
    }

    /// Sends the notices that waited, and for which there is room now.
    pub(crate) fn notify_again(&mut self, now: u64) {
        if !self.notices.is_empty() {
            self.retry_notices(|_| true, now);
        }
    }

    /// Retries the notices of those connections by number that `of` accepts.
    #[cold]
    fn retry_notices(&mut self, of: impl Fn(u32) -> bool, now: u64) {
        let mut notices = std::mem::take(&mut self.notices);
        notices.retry(of, |peer, header| self.takes(peer, header, now));
        self.notices = notices;
    }

    /// So many notices wait that there should be no further ones.
    pub(crate) fn has_many_notices(&self) -> bool {
        self.notices.is_full()
    }

    /// So many notices wait for room on the connection to `peer` that there should be no further ones.
    pub(crate) fn is_behind(&self, peer: PeerId) -> bool {
        self.table.of(peer).is_some_and(|c| self.notices.are_many_for(c.id))
    }

    fn accept(
        &mut self,
        peer: PeerId,
        (header, len): (&[u8], usize),
        pack: &mut Pack<'_>,
        shares: bool,
        now: u64,
    ) -> Result<(), SendError> {
        self.catch_up(now);
        let unconnected = SendError::Unreachable(Errno(libc::ENOTCONN));
        let place = self.table.place_of(peer).ok_or(unconnected)?;
        let id = self.table.at(place).ok_or(unconnected)?.id;
        // Nothing overtakes a notice: the peer ends its queue pair before it handles what follows (PROTOCOL.md §7.14).
        if self.notices.wait_for(id) {
            self.retry_notices(|waiting| waiting == id, now);
            if self.notices.wait_for(id) {
                return Err(SendError::Again);
            }
        }
        let c = self.table.at(place).ok_or(unconnected)?;
        c.push(&mut self.shared, header, len, pack, shares, now)?;
        self.settle(place);
        Ok(())
    }

    /// The endpoint could not send until `now`, and the application polls again.
    pub(crate) fn on_return(&mut self, now: u64) {
        self.shared.back_at = now;
    }

    /// The application polls: the messages it sends until the next poll count as one burst.
    #[inline]
    pub(crate) fn on_poll(&mut self) {
        self.shared.backoff.on_poll();
        if !self.shared.unasked.is_empty() {
            self.ask_above();
        }
    }

    /// The layer above can say again for which peers it waits: they are looked at now.
    #[cold]
    fn ask_above(&mut self) {
        for id in std::mem::take(&mut self.shared.unasked) {
            let Some((place, c)) = self.table.numbered(id) else { continue };
            c.liveness.look_soon();
            self.settle(place);
        }
    }

    /// The fast path: sends a message that can leave now, or coalesces it if it is one of a burst. `pack` copies the
    /// `len` bytes of its payload in fragments from the given offset. False: nothing was done, and `send` knows why.
    #[inline]
    pub(crate) fn send_at_once(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
        clock: impl Fn() -> u64,
        link: &mut impl Link,
    ) -> bool {
        let now = clock();
        self.turn(now);
        if self.put_off.as_ref().is_some_and(|p| now.saturating_sub(p.came) > PROMPT_NS) {
            self.catch_up(now);
        }
        let Some(place) = self.table.place_of(peer) else { return false };
        let Some(c) = self.table.at(place) else { return false };
        if self.blocked || !self.replies.is_empty() || self.notices.wait_for(c.id) {
            return false;
        }
        let mut turn = Turn::new(&mut self.shared, link, now);
        let pushed = c.push_at_once(&mut turn, header, len, pack);
        if turn.sent > 0 || pushed == Some(Pushed::Left) {
            c.note_left();
        }
        match pushed {
            None => return false,
            Some(Pushed::Held) if c.queued => {}
            Some(Pushed::Held) => self.settle(place),
            Some(Pushed::Left) => {
                c.coalescer.on_left(clock);
                self.timers.set(place, c.deadline(), &mut c.timer);
            }
            Some(Pushed::Blocked | Pushed::Partly) => {
                c.coalescer.on_left(clock);
                self.blocked = pushed == Some(Pushed::Blocked) && link.is_full();
                self.settle(place);
                self.blocked &= self.has_unsent();
            }
        }
        true
    }

    /// Processes a datagram that came from `from`.
    pub(crate) fn on_datagram(
        &mut self,
        now: u64,
        from: &Address,
        bytes: &[u8],
        condition: Condition,
        sink: &mut impl Sink,
    ) {
        self.turn(now);
        self.catch_up(now);
        if bytes.get(..4) == Some(&MAGIC) {
            match Hello::decode(bytes) {
                Some(hello) => self.on_hello(now, from, &hello, bytes, sink),
                None => self.shared.counts.malformed += 1,
            }
            return;
        }
        let Some((header, body)) = Header::decode(bytes) else {
            self.shared.counts.malformed += 1;
            self.tell(self.shared.counts.malformed, "malformed", from, bytes);
            return;
        };
        let Some((place, c)) = self.table.numbered(header.dest) else {
            self.shared.counts.stray += 1;
            return;
        };
        if !c.is_genuine(&self.shared, &header, bytes, condition) {
            self.shared.counts.forged += 1;
            self.tell(self.shared.counts.forged, "not of this connection", from, bytes);
            return;
        }
        let packet = Arrival { header, body, congested: condition.congested, at: now };
        if let Some((head, payload)) = c.take_plain(&mut self.shared, &packet) {
            sink.on_message(c.peer, head, payload);
            self.put_off = Some(PutOff { id: c.id, header: packet.header, came: now });
            return;
        }
        if !c.handshake.is_established() && !self.establish(place, now, sink) {
            return;
        }
        let Some(c) = self.table.at(place) else { return };
        match c.on_packet(&mut self.shared, &packet, sink) {
            Some(end) => self.remove(place, end, sink),
            None => self.settle(place),
        }
    }

    /// Handles the deadlines that have passed, until [`ENDS_MAX`] connections have ended: the rest follows in the next call.
    pub(crate) fn on_timeout(&mut self, now: u64, sink: &mut impl Sink) {
        self.turn(now);
        self.catch_up(now);
        let mut ended = 0;
        while ended < ENDS_MAX {
            let Some((at, place)) = self.timers.pop(now) else { return };
            let Some(c) = self.table.at(place) else { continue };
            if !c.timer.take(at) {
                continue;
            }
            match c.on_deadline(&mut self.shared, now, sink) {
                Some(end) => {
                    ended += 1;
                    self.remove(place, end, sink);
                }
                None => self.settle(place),
            }
        }
    }

    /// Sends what may be sent now, a bounded number of packets for each peer in turn. Returns the number of packets
    /// sent.
    pub(crate) fn poll_transmit(&mut self, now: u64, link: &mut impl Link) -> usize {
        self.turn(now);
        self.catch_up(now);
        self.blocked = false;
        let mut n = 0;
        while let Some((to, bytes)) = self.replies.pop_front() {
            let sent = link.send(&to, &[std::io::IoSlice::new(&bytes)]);
            if sent == 0 && link.is_full() {
                self.replies.push_front((to, bytes));
                self.blocked = true;
                return n;
            }
            // One that is refused alone is lost: its peer asks again.
            n += sent;
        }
        let mut refused = 0;
        for _ in 0..self.ready.len() {
            let Some(place) = self.ready.pop_front() else { break };
            let Some(c) = self.table.at(place) else { continue };
            c.queued = false;
            let mut turn = Turn::new(&mut self.shared, link, now);
            let all = c.transmit(&mut turn);
            let (sent, alone) = (turn.sent, turn.refused);
            n += sent;
            if sent > 0 {
                c.note_left();
                self.refusals.on_sent(c.id);
            } else if let Some(ns) = if all { None } else { self.refusals.on_refused(c.id, now) } {
                link.note_refusals(&c.address, ns);
            }
            // A link that is full refuses every peer. One may also be refused alone: see `refusals`.
            self.blocked = !all && (sent > 0 || link.is_full());
            if alone || !all && !self.blocked {
                // A device that is full takes the rest soon.
                c.rest.refused(all || self.blocked, now);
                refused += 1;
            }
            self.timers.set(place, c.deadline(), &mut c.timer);
            if c.is_to_queue() {
                c.queued = true;
                self.ready.push_back(place);
            }
            if self.blocked || refused == REFUSED_MAX {
                break;
            }
        }
        self.blocked &= self.has_unsent();
        n
    }

    /// The peer at `to` is reached, but not as it must be: it departs with `errno`.
    #[cold]
    pub(crate) fn give_up(&mut self, to: &Address, errno: Errno, sink: &mut impl Sink) {
        if let Some(place) = sink.find(to).and_then(|peer| self.table.place_of(peer)) {
            self.remove(place, End::failed(errno.0), sink);
        }
    }

    /// `peer` has departed by another transport: its connection ends. If it lives, a CLOSE tells it.
    #[cold]
    pub(crate) fn part(
        &mut self,
        peer: PeerId,
        now: u64,
        link: &mut impl Link,
        sink: &mut impl Sink,
    ) {
        self.turn(now);
        self.catch_up(now);
        let Some(place) = self.table.place_of(peer) else { return };
        if let Some(c) = self.table.at(place) {
            c.send_close(&mut Turn::new(&mut self.shared, link, now));
        }
        self.remove(place, End::Departed(Departure::Closed), sink);
    }

    /// Ends a connection, and reports that if the layer above knows of it.
    fn remove(&mut self, place: u32, end: End, sink: &mut impl Sink) {
        let Some(c) = self.table.remove(place) else { return };
        self.shared.half_open -= usize::from(c.handshake.phase == Phase::HalfOpen);
        let (peer, rival) = (c.peer, c.handshake.rival);
        self.gone.push((peer, c.address));
        let known = c.is_met();
        let provisional = c.handshake.provisional && !known;
        let upto = c.acknowledged();
        self.notices.forget(c.id);
        c.release(&mut self.shared);
        if let Some(Rival::Incumbent(at) | Rival::Challenger(at)) = rival {
            if let Some(c) = self.table.at(at) {
                c.handshake.rival = None;
            }
        }
        if let Some(Rival::Challenger(at)) = rival {
            self.table.set_main(peer, at);
        }
        if provisional {
            sink.forget(peer);
        }
        if let (End::Departed(departure), true) = (end, known) {
            self.shared.counts.departed += 1;
            sink.on_acknowledged(peer, upto);
            sink.on_departure(peer, departure);
        }
    }

    /// A peer whose connection has ended, and that has no other one.
    #[inline]
    pub(crate) fn take_gone(&mut self) -> Option<Address> {
        loop {
            let (peer, address) = self.gone.pop()?;
            if self.table.of(peer).is_none_or(|c| c.address != address) {
                return Some(address);
            }
        }
    }

    /// The next packet to `peer` asks for an immediate acknowledgement.
    pub(crate) fn ask_soon(&mut self, peer: PeerId) {
        if let Some(c) = self.table.place_of(peer).and_then(|place| self.table.at(place)) {
            c.sender.asks = true;
        }
    }

    /// The first packet that `peer` has not acknowledged, or the next one if there is none. It looks at the clock, `now`,
    /// only for an acknowledgement that was put off: it is asked for each of many peers.
    pub(crate) fn acknowledged(&mut self, peer: PeerId, now: impl FnOnce() -> u64) -> Option<Mark> {
        if self.has_put_off() {
            self.catch_up(now());
        }
        self.table.of(peer).map(Connection::acknowledged)
    }

    /// The next `poll_transmit` acknowledges all that has arrived.
    pub(crate) fn acknowledge_all(&mut self) {
        for place in self.table.places() {
            let ack = self.table.at(place).map(|c| &mut c.receiver.acknowledgement);
            if let Some(ack) = ack.filter(|ack| ack.owed > 0) {
                ack.now = true;
                self.settle(place);
            }
        }
    }

    /// There is room again for packets of connection `id`: the peer is asked to send them now.
    #[cold]
    pub(crate) fn ask_for_data(&mut self, id: u32) {
        let Some((place, c)) = self.table.numbered(id) else { return };
        c.receiver.acknowledgement.ask();
        self.settle(place);
    }

    /// Sends a CLOSE to all peers.
    pub(crate) fn close(&mut self, now: u64, link: &mut impl Link) {
        self.turn(now);
        for c in self.table.iter_mut() {
            c.send_close(&mut Turn::new(&mut self.shared, link, now));
        }
    }
}

#[cfg(test)]
impl Reliable {
    /// The packets in flight, for a measurement.
    fn each_in_flight(&mut self, mut each: impl FnMut(&[u8])) {
        for c in self.table.iter_mut() {
            for packet in
                c.sender.window.packets.iter().filter(|p| p.stage == sender::Stage::InFlight)
            {
                each(&packet.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests;
