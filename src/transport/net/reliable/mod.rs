//! Reliable, ordered messages over datagrams: one machine per endpoint, without socket and clock.
//!
//! Time is an argument. What arrives goes into [`Reliable::on_datagram`], what is to leave comes
//! out of [`Reliable::poll_transmit`], and [`Reliable::next_timeout`] says when
//! [`Reliable::on_timeout`] wants to be called. The wire format and the rules are PROTOCOL.md §7.
//!
//! The work per packet does not depend on the number of peers, and an idle peer costs nothing but
//! its memory and a look every few seconds.
#![forbid(unsafe_code)]

mod buffers;
mod congestion;
mod connection;
mod handshake;
pub(crate) mod packet;
mod path;
mod receiving;
mod sending;
#[cfg(test)]
pub(super) mod sim;
pub(crate) mod tag;
mod timers;

use super::job_key::Source;
use super::link::{Condition, Link};
use super::neighbours::Standing;
use crate::sys::Errno;
use crate::sys::packets::Pool;
use crate::telemetry::log;
use crate::transport::{Address, Departure, Mark, PeerId, SendError};
use buffers::Buffers;
use connection::{Connection, Phase};
use packet::{HEADER_LEN, HELLO_LEN, Header, Hello, HelloKind, MAGIC};
use receiving::Assembly;
use sending::{Holding, Pushed};
use std::collections::VecDeque;
use std::sync::Arc;
use tag::{BlockHash, JobKey};
use timers::{NEVER, Timers};

/// Longest payload of a message, bytes.
pub(crate) const MESSAGE_MAX: usize = 64 * 1024;
/// Datagrams that any network carries, bytes: used until more has been found to pass (path.rs).
const DATAGRAM_START: usize = 1200;
/// What everybody takes, whatever it says, if need be as IP fragments: devices with datagrams of 1024
/// bytes take less than others begin with. With much less the longest message would be more packets than
/// there may be buffers for.
const DATAGRAM_LEAST: usize = 1024;
/// Turns of this much at most count as time in which a peer was silent, nanoseconds: while nobody
/// polled we could not hear it.
const TURN_MAX_NS: u64 = 1_000_000_000;
/// Who sends later than this after a message has come is in no hurry, nanoseconds.
const PROMPT_NS: u64 = 100_000;
/// So many INITs of ours that were refused, the last of them so long after the first, nanoseconds, and no answer in between:
/// nobody is there any more. More would take seconds: systems send six such messages at once, and then one a second
/// (net.ipv4.icmp_ratelimit, icmp(7)).
const REFUSALS: u8 = 2;
const REFUSED_NS: u64 = 200_000_000;
/// The same of a peer that was never there yet: one that is started a little later is met.
const ABSENT_NS: u64 = 1_400_000_000;
/// Mark of a peer that has been there, beside its place: places have fewer bits.
const MET: u32 = 1 << 31;
/// Span in which peers that send count as sending at once, as a power of two of nanoseconds.
const EPOCH_SHIFT: u32 = 23;
/// Bits of a connection's number that are its place; the others are its generation.
const PLACE_BITS: u32 = 20;
/// Connections whose other side has not proven yet that it is there; and so many of them that INITs of unknown peers are kept
/// at once. Beyond, they have to come from where they say: nothing is kept of those that do not (PROTOCOL.md §7.2).
const HALF_OPEN_MAX: usize = 4096;
const HALF_OPEN_FREE: usize = 64;
/// For how long such a proof is good, once or twice, as a power of two of nanoseconds.
const COOKIE_SHIFT: u32 = 33;
/// Sort of secret that cookies are made with, for [`JobKey::from_secret`].
const COOKIE_SECRET: u64 = 5;
/// Answers to strangers that wait to be sent.
const REPLIES_MAX: usize = 64;
/// Senders of handshakes that are told that their job key is another one, at most so many in this time, nanoseconds.
const HINTS_MAX: u32 = 64;
const HINTS_NS: u64 = 1_000_000_000;

/// What an endpoint is, and its limits.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Random and odd: this life of the endpoint.
    pub(crate) life: u64,
    /// The endpoint's address.
    pub(crate) address: Address,
    pub(crate) key: JobKey,
    /// What it was made of.
    pub(crate) key_source: Source,
    /// Largest datagram that our link carries, bytes.
    pub(crate) datagram_max: usize,
    /// A peer that is silent for so long while something is owed is dead, nanoseconds.
    pub(crate) peer_timeout_ns: u64,
    /// Most bytes of packets kept, to be sent again or until those before them arrive.
    pub(crate) buffer_bytes: usize,
    /// What we offer in handshakes: [`packet::STREAMS`] and those beside it.
    pub(crate) features: u32,
    /// Packets that all peers together may have under way to us.
    pub(crate) receive_window: u32,
    /// First packet sequence number of a connection.
    pub(crate) first_psn: u32,
    /// Seed of nonces and jitter.
    pub(crate) seed: [u8; 16],
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) data_sent: u64,
    pub(crate) retransmitted: u64,
    pub(crate) acks_sent: u64,
    pub(crate) hellos_sent: u64,
    pub(crate) data_received: u64,
    pub(crate) duplicates: u64,
    /// Packets that came before those in front of them, and were kept.
    pub(crate) early: u64,
    /// Packets in order or early that there was no memory or no room for.
    pub(crate) no_room: u64,
    pub(crate) timeouts: u64,
    /// Packets whose tag is wrong: of another job, forged, damaged, or of an earlier connection.
    pub(crate) forged: u64,
    /// Packets for a connection that does not exist.
    pub(crate) stray: u64,
    /// Packets that are no packets.
    pub(crate) malformed: u64,
    /// Handshakes from addresses of this host that are not this user's.
    pub(crate) strangers: u64,
    /// Handshakes of a version that is not understood here.
    pub(crate) versions: u64,
    pub(crate) connected: u64,
    pub(crate) departed: u64,
}

/// The layer above.
pub(crate) trait Sink {
    /// Numbers the peer at `address`; `None`: there is no room for another one.
    fn peer_of(&mut self, address: &Address) -> Option<PeerId>;
    /// Its number, if it has one.
    fn find(&self, address: &Address) -> Option<PeerId>;
    /// The peer has not proven that it is there, and nobody was told of it: its number may be another one's.
    fn forget(&mut self, peer: PeerId);
    /// Who the peer at `address` is, as far as this host knows: asked when a connection is made, before anything that a
    /// packet says is believed.
    fn standing(&self, address: &Address) -> Standing;
    /// A peer has proven that it is there; before its first message.
    fn on_connected(&mut self, peer: PeerId, address: &Address);
    /// A message. The slices are valid during the call only.
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]);
    /// The peer, which is about to depart, has acknowledged everything before `upto`.
    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        let _ = (peer, upto);
    }
    /// A peer is gone; what arrived in order was reported before.
    fn on_departure(&mut self, peer: PeerId, departure: Departure);
    /// Whether the layer above waits for something from `peer`.
    fn is_owed(&self, peer: PeerId) -> bool;
}

/// What all connections share.
#[derive(Debug)]
struct Shared {
    settings: Settings,
    hash: BlockHash,
    /// What cookies are made with.
    cookies: JobKey,
    buffers: Buffers,
    counts: Counts,
    /// Drawn so far.
    draws: u64,
    pressure: bool,
    /// Packets that are not acknowledged.
    unacknowledged: usize,
    /// Connections whose other side has not proven yet that it is there.
    half_open: usize,
    /// Time that counts as silence of a peer.
    patience: u64,
    /// Until when nothing could be said, nanoseconds.
    back_at: u64,
    /// Peers that sent data in this epoch, and in the one before.
    epoch: u64,
    senders: u32,
    senders_before: u32,
    holding: Holding,
    /// What the last message of several packets was put together in, for the next one.
    spare: Option<Box<Assembly>>,
}

impl Shared {
    /// A random number.
    fn random(&mut self) -> u64 {
        self.draws += 1;
        JobKey::from_bytes(self.settings.seed).tag(&self.draws.to_le_bytes())
    }

    /// `ns`, and up to a quarter more.
    fn jittered(&mut self, ns: u64) -> u64 {
        ns + self.random() % (ns / 4 + 1)
    }

    /// Packets that one peer may have under way to us: a fair share.
    #[inline]
    fn credit(&self) -> u16 {
        let senders = self.senders.max(self.senders_before).max(1);
        (self.settings.receive_window / senders).clamp(4, congestion::WINDOW_MAX) as u16
    }

    /// A connection delivers data: counts it once an epoch.
    #[inline]
    fn count_sender(&mut self, now: u64, seen: &mut u64) {
        let epoch = now >> EPOCH_SHIFT;
        if epoch != self.epoch {
            self.senders_before = if epoch == self.epoch + 1 { self.senders } else { 0 };
            self.senders = 0;
            self.epoch = epoch;
        }
        if *seen != epoch {
            *seen = epoch;
            self.senders += 1;
        }
    }
}

/// A place for a connection.
#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    connection: Option<Box<Connection>>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Reliable {
    shared: Shared,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Place of each peer's connection, plus one, and [`MET`].
    by_peer: Vec<u32>,
    timers: Timers,
    /// Places of connections that have something to send, in turn.
    ready: VecDeque<u32>,
    /// Answers to peers without a connection.
    replies: VecDeque<(Address, [u8; HELLO_LEN])>,
    /// [`HINTS_MAX`]: how many were told, and since when.
    hints: u32,
    hints_since: u64,
    last_turn: u64,
    /// The link took less than it was offered.
    blocked: bool,
    /// What the last packet says of ours, while its message was more urgent.
    put_off: Option<PutOff>,
}

/// What a packet of connection `id` acknowledges, which came at `came`, nanoseconds: see
/// [`Connection::take_plain`].
#[derive(Debug)]
struct PutOff {
    id: u32,
    header: Header,
    came: u64,
}

/// Why a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// With this report.
    Departed(Departure),
    /// Nobody knew of it.
    Silent,
}

impl Reliable {
    pub(crate) fn new(settings: Settings, now: u64) -> Self {
        let hash = BlockHash::new(&settings.key);
        let cookies = JobKey::from_secret(COOKIE_SECRET, &settings.seed);
        let buffers = Buffers::new(settings.datagram_max, settings.buffer_bytes);
        Self {
            shared: Shared {
                settings,
                hash,
                cookies,
                buffers,
                counts: Counts::default(),
                draws: 0,
                pressure: false,
                unacknowledged: 0,
                half_open: 0,
                patience: 0,
                back_at: 0,
                epoch: 0,
                senders: 0,
                senders_before: 0,
                holding: Holding::default(),
                spare: None,
            },
            slots: Vec::new(),
            free: Vec::new(),
            by_peer: Vec::new(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            replies: VecDeque::new(),
            hints: 0,
            hints_since: now,
            last_turn: now,
            blocked: false,
            put_off: None,
        }
    }

    /// The link sends packets that are made in `pool` from there as they are.
    pub(crate) fn lend(&mut self, pool: Arc<Pool>) {
        self.shared.buffers.lend(pool);
    }

    /// What has happened so far.
    pub(crate) fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Bytes of packets kept.
    #[cfg(test)]
    pub(crate) fn memory(&self) -> usize {
        self.shared.buffers.used()
    }

    /// Packets that are not acknowledged.
    pub(crate) fn unacknowledged(&self) -> usize {
        self.shared.unacknowledged
    }

    /// Connections that exist or are being made.
    pub(crate) fn connections(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn place_of(&self, peer: PeerId) -> Option<u32> {
        (self.by_peer.get(peer.index())? & !MET).checked_sub(1)
    }

    /// It was connected to, now or earlier.
    fn was_met(&self, peer: PeerId) -> bool {
        self.by_peer.get(peer.index()).is_some_and(|entry| entry & MET != 0)
    }

    fn note_met(&mut self, peer: PeerId) {
        if let Some(entry) = self.by_peer.get_mut(peer.index()) {
            *entry |= MET;
        }
    }

    fn at(&mut self, place: u32) -> Option<&mut Connection> {
        self.slots.get_mut(place as usize)?.connection.as_deref_mut()
    }

    fn of(&self, peer: PeerId) -> Option<&Connection> {
        self.slots.get(self.place_of(peer)? as usize)?.connection.as_deref()
    }

    /// A connection to `peer` exists or is being made.
    pub(crate) fn is_connected(&self, peer: PeerId) -> bool {
        self.place_of(peer).is_some()
    }

    /// `peer` is short of memory for payload.
    pub(crate) fn under_pressure(&self, peer: PeerId) -> bool {
        self.of(peer).is_some_and(|c| c.peer_pressure)
    }

    /// Payload bytes of a message that fills one packet to `peer`, beside `header` bytes.
    pub(crate) fn packet_room(&self, peer: PeerId, header: usize) -> usize {
        let room = self.of(peer).map_or(DATAGRAM_START, Connection::datagram_room);
        room.saturating_sub(HEADER_LEN + packet::FRAME_LEN + header)
    }

    /// The connection with our number `id`, once both sides have proven that they are there.
    fn by_id(&self, id: u32) -> Option<&Connection> {
        let slot = self.slots.get((id & ((1 << PLACE_BITS) - 1)) as usize)?;
        slot.connection.as_deref().filter(|c| c.id == id && c.phase == Phase::Established)
    }

    /// Our and the other side's number of the connection to `peer`, if it takes streams.
    pub(crate) fn takes_streams(&self, peer: PeerId) -> Option<(u32, u32)> {
        let c =
            self.of(peer).filter(|c| c.knows(packet::STREAMS) && c.phase == Phase::Established)?;
        Some((c.id, c.remote_id))
    }

    /// What `peer` knows beyond the first version, if it has introduced itself.
    pub(crate) fn features_of(&self, peer: PeerId) -> Option<u32> {
        self.of(peer)?.features
    }

    /// Whether `peer` is there and may lend windows, and be lent some.
    pub(crate) fn takes_windows(&self, peer: PeerId) -> bool {
        self.of(peer).is_some_and(|c| c.knows(packet::WINDOWS) && c.phase == Phase::Established)
    }

    /// Whom our connection number `id` is the one to.
    pub(crate) fn owner_of(&self, id: u32) -> Option<PeerId> {
        let peer = self.by_id(id)?.peer;
        self.of(peer).is_some_and(|c| c.id == id).then_some(peer)
    }

    /// Messages that were taken from, and given to, the layer above on connection `id`.
    pub(crate) fn sent(&self, id: u32) -> Option<u64> {
        Some(self.by_id(id)?.sent)
    }

    pub(crate) fn delivered(&self, id: u32) -> Option<u64> {
        Some(self.by_id(id)?.delivered)
    }

    /// The tag of `bytes` that we, or the other side, send beside the datagrams of connection `id`.
    /// They are never as long as what is signed of a datagram.
    pub(crate) fn sign(&self, id: u32, ours: bool, bytes: &[u8]) -> Option<u64> {
        debug_assert_ne!(bytes.len(), packet::TAG_AT);
        let c = self.by_id(id)?;
        let direction = if ours { c.direction } else { 1 - c.direction };
        Some(c.key.as_ref()?.tag(&self.shared.hash, direction, bytes, &[]))
    }

    /// Tells peers that send whether they should describe long messages rather than send them.
    pub(crate) fn set_pressure(&mut self, on: bool) {
        self.shared.pressure = on;
    }

    /// When `on_timeout` wants to be called, nanoseconds. May be earlier than necessary.
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

    /// True when there is something to catch up with.
    #[inline]
    pub(crate) fn has_put_off(&self) -> bool {
        self.put_off.is_some()
    }

    /// True when there is something to send.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        !self.ready.is_empty() || !self.replies.is_empty()
    }

    /// Does what was put off. Returns whether there is something to send now.
    #[inline]
    pub(crate) fn catch_up(&mut self, now: u64) -> bool {
        if let Some(put_off) = self.put_off.take() {
            self.acknowledge(&put_off, now);
        }
        self.has_unsent()
    }

    #[inline(never)]
    fn acknowledge(&mut self, PutOff { id, header, came }: &PutOff, now: u64) {
        let place = id & ((1 << PLACE_BITS) - 1);
        let slot = self.slots.get_mut(place as usize);
        let c = slot.and_then(|s| s.connection.as_deref_mut()).filter(|c| c.id == *id);
        let Some(c) = c else { return };
        // That it names nothing else than what was sent was looked at when it came.
        c.on_acknowledgement(&mut self.shared, header, &[], *came, now);
        self.settle(place);
    }

    /// A line for the first, the second, the fourth … packet of a kind that was dropped.
    #[cold]
    fn tell(&self, count: u64, what: &str, from: &Address, bytes: &[u8]) {
        if count.is_power_of_two() {
            let packet = packet::Dump(bytes);
            log::info(format_args!("dropped, {what}, from {from}: {packet} ({count} so far)"));
        }
    }

    fn turn(&mut self, now: u64) {
        let passed = now.saturating_sub(self.last_turn);
        self.shared.patience += passed.min(TURN_MAX_NS);
        self.last_turn = self.last_turn.max(now);
    }

    /// Enters a new connection under `peer`, and perhaps as the one that `peer` is reached by.
    fn insert(&mut self, connection: Connection, main: bool) -> Option<u32> {
        let place = match self.free.pop() {
            Some(place) => place,
            None if self.slots.len() < 1 << PLACE_BITS => {
                self.slots.push(Slot::default());
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        let slot = self.slots.get_mut(place as usize)?;
        slot.generation = slot.generation.wrapping_add(1);
        let peer = connection.peer;
        let mut connection = Box::new(connection);
        connection.id = place | slot.generation << PLACE_BITS;
        slot.connection = Some(connection);
        if main {
            self.set_main(peer, place);
        }
        Some(place)
    }

    fn set_main(&mut self, peer: PeerId, place: u32) {
        if self.by_peer.len() <= peer.index() {
            self.by_peer.resize(peer.index() + 1, 0);
        }
        if let Some(entry) = self.by_peer.get_mut(peer.index()) {
            *entry = (place + 1) | (*entry & MET);
        }
    }

    /// Puts a connection where its deadline and its wish to send belong.
    fn settle(&mut self, place: u32) {
        let Some(slot) = self.slots.get_mut(place as usize) else { return };
        let Some(c) = slot.connection.as_deref_mut() else { return };
        self.timers.set(place, c.deadline(), &mut c.timer_at);
        if !c.queued && c.wants_to_send() {
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
        if let Some(c) = self.place_of(peer).and_then(|place| self.at(place)) {
            c.known = true;
            return Ok(());
        }
        let nonce = self.shared.random();
        let connection = Connection::new(&self.shared, peer, *address, nonce, Phase::Greeting, now);
        let place = self.insert(connection, true).ok_or(SendError::Again)?;
        if let Some(c) = self.at(place) {
            c.greet();
        }
        self.settle(place);
        Ok(())
    }

    /// Takes a message: `header`, and `len` bytes of payload that `pack` copies piece by piece from
    /// the given offset. `Again` when there is no room. It leaves with `poll_transmit`.
    pub(crate) fn send(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
        now: u64,
    ) -> Result<(), SendError> {
        self.accept(peer, (header, len), pack, false, now)
    }

    /// The same of one without payload that shares its packet with what is sent before that leaves.
    pub(crate) fn send_with_others(
        &mut self,
        peer: PeerId,
        header: &[u8],
        now: u64,
    ) -> Result<(), SendError> {
        self.accept(peer, (header, 0), |_, _| (), true, now)
    }

    fn accept(
        &mut self,
        peer: PeerId,
        (header, len): (&[u8], usize),
        pack: impl FnMut(usize, &mut [u8]),
        shares: bool,
        now: u64,
    ) -> Result<(), SendError> {
        self.catch_up(now);
        let unconnected = SendError::Unreachable(Errno(libc::ENOTCONN));
        let place = self.place_of(peer).ok_or(unconnected)?;
        let c = self.slots.get_mut(place as usize).and_then(|s| s.connection.as_deref_mut());
        c.ok_or(unconnected)?.push(&mut self.shared, header, len, pack, shares, now)?;
        self.settle(place);
        Ok(())
    }

    /// Nothing could be said for a while until `now`, and the application polls.
    pub(crate) fn on_return(&mut self, now: u64) {
        self.shared.back_at = now;
    }

    /// The application polls: what it sends before it does so again is one burst.
    #[inline]
    pub(crate) fn on_poll(&mut self) {
        self.shared.holding.on_poll();
    }

    /// The short road: takes a message that can leave now, and sends it, or has it wait for company if it is one
    /// of a burst. `pack` copies the `len` bytes of its payload piece by piece from the given offset. False: nothing was
    /// done, and `send` knows why.
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
        let Some(place) = self.place_of(peer) else { return false };
        let slot = self.slots.get_mut(place as usize);
        let Some(c) = slot.and_then(|slot| slot.connection.as_deref_mut()) else { return false };
        if self.blocked || !self.replies.is_empty() {
            return false;
        }
        let pushed = c.push_at_once(&mut self.shared, header, len, pack, now, link);
        match pushed {
            None => return false,
            Some(Pushed::Held) => {
                if !c.queued {
                    self.settle(place);
                }
            }
            Some(Pushed::Left) => {
                c.on_left(clock);
                self.timers.set(place, c.deadline(), &mut c.timer_at);
            }
            Some(Pushed::Blocked | Pushed::Partly) => {
                c.on_left(clock);
                self.blocked = pushed == Some(Pushed::Blocked);
                self.settle(place);
            }
        }
        true
    }

    /// Takes a datagram that came from `from`.
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
        let place = header.dest & ((1 << PLACE_BITS) - 1);
        let slot = self.slots.get_mut(place as usize);
        let c = slot.and_then(|s| s.connection.as_deref_mut()).filter(|c| c.id == header.dest);
        let Some(c) = c else {
            self.shared.counts.stray += 1;
            return;
        };
        if !c.is_genuine(&self.shared, &header, bytes, condition) {
            self.shared.counts.forged += 1;
            self.tell(self.shared.counts.forged, "not of this connection", from, bytes);
            return;
        }
        let congested = condition.congested;
        if let Some((head, payload)) = c.take_plain(&mut self.shared, &header, body, congested, now)
        {
            c.heard(&self.shared);
            sink.on_message(c.peer, head, payload);
            self.put_off = Some(PutOff { id: header.dest, header, came: now });
            return;
        }
        if c.phase != Phase::Established && !self.establish(place, now, sink) {
            return;
        }
        let slot = self.slots.get_mut(place as usize);
        let Some(c) = slot.and_then(|s| s.connection.as_deref_mut()) else { return };
        c.heard(&self.shared);
        let end = c.on_packet(&mut self.shared, &header, body, congested, now, sink);
        match end {
            Some(end) => self.remove(place, end, sink),
            None => self.settle(place),
        }
    }

    /// The network says that nobody listens at `to`, where the datagram was to go that begins with `quote`.
    ///
    /// Anybody may have made that message up, so it ends nothing: it is a reason to ask. It counts when it quotes an
    /// INIT of ours, whose nonce nobody knows who has not seen it, and when that happens again after [`REFUSED_NS`] without
    /// an answer in between (PROTOCOL.md §7.10).
    pub(crate) fn on_refused(
        &mut self,
        now: u64,
        to: &Address,
        quote: &[u8],
        sink: &mut impl Sink,
    ) {
        self.catch_up(now);
        let Some(peer) = sink.find(to) else { return };
        let absent_ns = ABSENT_NS.min(self.shared.settings.peer_timeout_ns);
        let refused_ns = if self.was_met(peer) { REFUSED_NS } else { absent_ns };
        let life = self.shared.settings.life;
        let Some(place) = self.place_of(peer) else { return };
        let Some(c) = self.at(place) else { return };
        let ours = Hello::decode(quote).is_some_and(|hello| {
            hello.kind == HelloKind::Init
                && (hello.life, hello.connection, hello.nonce) == (life, c.id, c.nonce)
        });
        if ours && c.refusals == 0 {
            c.refused_at = now;
        }
        c.refusals = c.refusals.saturating_add(u8::from(ours));
        if c.refusals >= REFUSALS && now.saturating_sub(c.refused_at) >= refused_ns {
            let errno =
                if c.phase == Phase::Established { libc::EHOSTDOWN } else { libc::ECONNREFUSED };
            self.remove(place, End::Departed(Departure::Failed(Errno(errno))), sink);
            return;
        }
        if c.phase == Phase::Established {
            c.ask_whether_there(now);
            self.settle(place);
        }
    }

    /// The path to `to` carries datagrams of at most `carried` bytes. Anybody may have made up the
    /// message that says so, so it is believed down to what every network carries. Returns true if
    /// packets are longer that have to be sent.
    pub(crate) fn on_too_long(&mut self, to: &Address, carried: usize, sink: &impl Sink) -> bool {
        let Some(place) = sink.find(to).and_then(|peer| self.place_of(peer)) else { return false };
        let long = self.at(place).is_some_and(|c| c.carry_at_most(carried));
        self.settle(place);
        long
    }

    /// Does what time asks for.
    pub(crate) fn on_timeout(&mut self, now: u64, sink: &mut impl Sink) {
        self.turn(now);
        self.catch_up(now);
        while let Some((at, place)) = self.timers.pop(now) {
            let slot = self.slots.get_mut(place as usize);
            let Some(c) = slot.and_then(|s| s.connection.as_deref_mut()) else { continue };
            if c.timer_at != at {
                continue; // of an earlier connection here, or overtaken
            }
            c.timer_at = NEVER;
            let end = c.on_deadline(&mut self.shared, now, sink);
            match end {
                Some(end) => self.remove(place, end, sink),
                None => self.settle(place),
            }
        }
    }

    /// Sends what may be sent now, a bounded amount for each peer in turn. Returns how many
    /// packets left.
    pub(crate) fn poll_transmit(&mut self, now: u64, link: &mut impl Link) -> usize {
        self.turn(now);
        self.catch_up(now);
        self.blocked = false;
        let mut n = 0;
        while let Some((to, bytes)) = self.replies.pop_front() {
            if link.send(&to, &[std::io::IoSlice::new(&bytes)]) == 0 {
                self.replies.push_front((to, bytes));
                self.blocked = true;
                return n;
            }
            n += 1;
        }
        for _ in 0..self.ready.len() {
            let Some(place) = self.ready.pop_front() else { break };
            let slot = self.slots.get_mut(place as usize);
            let Some(c) = slot.and_then(|s| s.connection.as_deref_mut()) else { continue };
            c.queued = false;
            let before = n;
            self.blocked = !c.transmit(&mut self.shared, now, link, &mut n);
            self.timers.set(place, c.deadline(), &mut c.timer_at);
            if c.wants_to_send() {
                c.queued = true;
                if self.blocked && n == before {
                    self.ready.push_front(place);
                } else {
                    self.ready.push_back(place);
                }
            }
            if self.blocked {
                break;
            }
        }
        n
    }

    /// Ends a connection.
    fn remove(&mut self, place: u32, end: End, sink: &mut impl Sink) {
        let Some(slot) = self.slots.get_mut(place as usize) else { return };
        let Some(c) = slot.connection.take() else { return };
        self.free.push(place);
        self.shared.half_open -= usize::from(c.phase == Phase::HalfOpen);
        let (peer, challenger, incumbent) = (c.peer, c.challenger, c.incumbent);
        let known = c.known || c.phase == Phase::Established;
        let provisional = c.provisional && !known;
        let upto = c.acknowledged();
        c.release(&mut self.shared);
        if let Some(incumbent) = incumbent.and_then(|place| self.at(place)) {
            incumbent.challenger = None;
        }
        if self.place_of(peer) == Some(place) {
            if let Some(entry) = self.by_peer.get_mut(peer.index()) {
                *entry &= MET;
            }
        }
        if let Some(challenger) = challenger {
            if let Some(c) = self.at(challenger) {
                c.incumbent = None;
            }
            self.set_main(peer, challenger);
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

    /// What is sent next to `peer` asks for an answer at once.
    pub(crate) fn ask_soon(&mut self, peer: PeerId) {
        if let Some(c) = self.place_of(peer).and_then(|place| self.at(place)) {
            c.asks = true;
        }
    }

    /// The last packet that was taken for `peer`; `None`: it has acknowledged all.
    pub(crate) fn last_sent(&self, peer: PeerId) -> Option<Mark> {
        let c = self.of(peer).filter(|c| !c.window.is_empty())?;
        Some(Mark { connection: c.id, psn: c.next_psn().wrapping_sub(1) as u32 })
    }

    /// The first packet that `peer` has not acknowledged, or the next one.
    pub(crate) fn acknowledged(&mut self, peer: PeerId, now: u64) -> Option<Mark> {
        self.catch_up(now);
        self.of(peer).map(Connection::acknowledged)
    }

    /// What has arrived is acknowledged with the next `poll_transmit`.
    pub(crate) fn acknowledge_all(&mut self) {
        for place in 0..self.slots.len() as u32 {
            if let Some(c) = self.at(place).filter(|c| c.unacked > 0) {
                c.ack_now = true;
                self.settle(place);
            }
        }
    }

    /// Says goodbye to all peers.
    pub(crate) fn close(&mut self, now: u64, link: &mut impl Link) {
        self.turn(now);
        for slot in &mut self.slots {
            if let Some(c) = slot.connection.as_deref_mut() {
                c.send_close(&mut self.shared, now, link);
            }
        }
    }
}

#[cfg(test)]
impl Reliable {
    /// The packets that are under way, for a measurement.
    fn each_in_flight(&mut self, mut each: impl FnMut(&[u8])) {
        for c in self.slots.iter_mut().filter_map(|slot| slot.connection.as_deref_mut()) {
            for packet in c.window.iter().filter(|p| p.state == sending::State::InFlight) {
                each(&packet.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests;
