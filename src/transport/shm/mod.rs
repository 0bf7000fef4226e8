//! Messages between processes of one node: one ring per direction in shared memory, and
//! cross-memory attach for bulk.
//!
//! A sender makes a segment, connects to the receiver's unix socket and passes the segment along; it may write
//! messages at once, before the receiver has accepted. The kernel proves which process is at the other end (same
//! kernel by the socket, same user by its credentials). Once the receiver has answered, the connection closes, and a
//! link has no descriptor: an endpoint has one doorbell for all its peers, and `watching` says how the end of a peer is
//! noticed. No file system holds a name of a segment.

mod attach;
mod budget;
pub(crate) mod config;
mod copy_rate;
mod crowd;
mod departure;
mod door;
#[cfg(test)]
mod fixture;
mod greeting;
mod handshake;
mod hello;
mod hints;
mod in_flight;
mod inbound;
mod layout;
mod names;
mod outbound;
mod reaching;
mod refusals;
mod refused;
mod refusing;
mod rejected;
mod ring;
mod sharing;
mod state;
mod storage;
mod tokens;
mod unsettled;
mod watching;
mod whole;
mod words;

pub(crate) use state::Shm;
use state::{Due, SETTLES_NS, Settings, Waiting, stranger};
use tokens::{
    TOKEN_BELL, TOKEN_GREETING, TOKEN_INBOUND, TOKEN_LISTENER, TOKEN_OUTBOUND, TOKEN_PROCESS,
};

use super::peers::PeerTable;
use super::{
    Address, Caps, Contact, Departure, ELSEWHERE, Handler, Head, LocalHost, Messages, Mode,
    Opening, PeerCounts, PeerId, Returned, SendError, Streaming, Transport,
};
use crate::memory::Segment;
use crate::sys::bell::{Bell, BellAddress, Ring};
use crate::sys::gate::Gate;
use crate::sys::late_set::{LateSet, LateTimer};
use crate::sys::order::fence;
use crate::sys::process::Home;
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{Errno, clock, process, unix, user};
use crate::telemetry::log;
use config::{CmaPolicy, ShmConfig};
use crowd::Crowd;
use door::Door;
use inbound::{Inbound, Links};
use layout::{FRUGAL, MOVABLE_MAX, SLOT_ROOM};
use names::{Found, Kind, Names};
use outbound::Outbounds;
use refusals::Refusals;
use ring::Popped;
use std::sync::Arc;
use unsettled::Reaching;
use watching::{LIVENESS_NS, Watches};

/// Time to the next look at what waits at the door while a thread sleeps, nanoseconds.
const DOOR_NS: u64 = 10_000_000;

/// Messages taken from one ring before the next ring is polled.
const BATCH: usize = 16;
/// Parked links whose slots are fetched before they are looked at.
const AHEAD: usize = 3;
/// Connections accepted at a time, descriptors that are handled at a time, and how often that is repeated in one turn
/// while more are ready.
const ACCEPTS: usize = 64;
const READY: usize = 32;
const ROUNDS: usize = 8;

impl Shm {
    /// Opens the interface under the port of `me`. Without a `doorbell` it takes no links, and its name says so. Errors:
    /// EADDRINUSE when another endpoint of this user has the port; EMFILE, ENFILE, ENOMEM.
    fn with(
        me: Address,
        host: LocalHost,
        cma: CmaPolicy,
        bell: Option<Arc<Bell>>,
        epoll: Arc<LateSet>,
    ) -> Result<Self, Errno> {
        let open = bell.is_some();
        let timer = open.then(|| LateTimer::of(epoll.clone(), ELSEWHERE));
        let names = Names::take(me.port(), if open { Kind::Open } else { Kind::Aloof })?;
        let door = Door::new(names, open, &epoll)?;
        let nonce = process::random_u64() | 1;
        if cma != CmaPolicy::Off && process::yama_ptrace_scope() == Some(1) {
            process::allow_attach_by_same_user();
        }
        if open {
            // What the first links would have to find out, while their peers wait.
            let _ = (user::is_ambiguous(), SharedMemory::may_come_in_parts());
        }
        Ok(Self {
            me,
            host,
            nonce,
            settings: Settings::new(cma, ShmConfig::default().memory),
            door,
            epoll,
            bell,
            reaching: Reaching { gate: Gate::new(nonce)?, unsettled: Vec::new() },
            crowd: Crowd::new(),
            outbound: Vec::new(),
            inbound: Links::default(),
            returned: Vec::new(),
            refusals: Refusals::default(),
            watches: Watches::new(timer),
            due: Due::default(),
            pressure: false,
            waiting: Waiting::default(),
            owner: Home::here(),
        })
    }

    /// A doorbell that wakes threads that sleep in `epoll`. Errors: those of [`Bell::new`]; ENOMEM, ENOSPC.
    fn doorbell(epoll: &LateSet) -> Result<Arc<Bell>, Errno> {
        let bell = Bell::new()?;
        epoll.add_lasting(bell.fd(), TOKEN_BELL)?;
        Ok(Arc::new(bell))
    }

    /// Finds which endpoint has the port of `address` on this node. Errors: Again, and those of creating a socket.
    fn look_for(address: &Address) -> Result<Contact, SendError> {
        match names::find(address.port()) {
            Ok(Found::Open(..) | Found::Aloof(_)) => Ok(Contact::Elsewhere),
            Ok(Found::Stranger(uid)) => Ok(stranger(address, uid)),
            Ok(Found::Nobody) => Ok(Contact::Missing(Errno(libc::ECONNREFUSED))),
            // The backlog is full: an endpoint listens there.
            Err(e) if e.is_would_block() => Ok(Contact::Elsewhere),
            Err(e) => Err(SendError::Unreachable(e)),
        }
    }

    /// For tests: refuse all links, as for want of descriptors, or accept them again.
    #[cfg(test)]
    pub(crate) fn refuse_all(&mut self, on: bool) {
        self.door.full = on;
    }

    /// For tests: the connections that wait come too late.
    #[cfg(test)]
    pub(crate) fn turn_callers_away(&mut self) {
        self.door.turn_all_away();
    }

    /// Handles descriptors that are ready; returns their number, at most [`READY`], and that of events.
    fn handle_ready(
        &mut self,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> (usize, usize) {
        self.door.more = false;
        let mut tokens = [0; READY];
        let ready = self.epoll.ready(&mut tokens);
        let mut n = 0;
        for &token in tokens.iter().take(ready) {
            let id = token as u32;
            match token & !0xffff_ffff {
                TOKEN_GREETING => n += self.greet(id as usize, peers, handler),
                TOKEN_OUTBOUND => n += self.on_outbound_ready(PeerId(id), peers, handler),
                TOKEN_INBOUND => n += self.on_inbound_ready(PeerId(id), handler),
                TOKEN_PROCESS => n += self.on_process_ready(id as i32, peers, handler),
                _ if token == TOKEN_LISTENER => n += self.accept(ACCEPTS, peers, handler),
                _ if token == TOKEN_BELL => n += self.on_bell(peers, handler),
                _ => {}
            }
        }
        (ready, n)
    }

    /// Accepts links, reads answers, detects departed peers. A few system calls.
    #[cold]
    fn poll_sockets(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize {
        self.due.urgent = false;
        let mut n = 0;
        for peer in std::mem::take(&mut self.due.broken) {
            log::limited!(
                "{}: malformed message in its ring",
                peers.address(peer).unwrap_or(self.me)
            );
            self.depart(peer, Some(Errno(libc::EPROTO)), handler);
            n += 1;
        }
        for peer in std::mem::take(&mut self.due.stale) {
            self.depart(peer, None, handler);
            n += 1;
        }
        for pid in std::mem::take(&mut self.due.ended) {
            n += self.on_process_ready(pid, peers, handler);
        }
        self.bell.iter().for_each(|bell| bell.ring_missed());
        let begun = clock::now_ns();
        for _ in 0..ROUNDS {
            let (ready, events) = self.handle_ready(peers, handler);
            n += events;
            if ready < READY && !self.door.more {
                self.door.has_swept(begun);
                break;
            }
        }
        if self.door.is_waiting() {
            n += self.look_after_door(peers, handler);
        }
        let now = clock::now_ns();
        self.inbound.check(now);
        if self.watches.want_descriptors(now) {
            self.open_watches();
        }
        if now.saturating_sub(self.watches.checked_at) > self.watches.every_ns() {
            self.watches.checked_at = now;
            n += self.check_liveness(peers, handler);
            self.door.requests.forget();
            self.inbound.iter_mut().for_each(|link| link.consumer.announce());
            for link in self.outbound.iter_mut().flatten() {
                link.copy_rate.try_again();
                link.producer.rest();
            }
        }
        n
    }
}

impl Shm {
    /// Looks at the rings of the parked links whose bits are set.
    #[cold]
    fn poll_parked(&mut self, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        let numbers = self.inbound.take_raised();
        self.inbound.fetch(numbers.iter().take(AHEAD));
        for (i, &number) in numbers.iter().enumerate() {
            self.inbound.fetch(numbers.get(i + AHEAD).into_iter());
            let Some(link) = self.inbound.parked(number) else { continue };
            let taken = link.take_batch::<true>(&mut self.outbound, &mut self.due, handler);
            n += taken;
            // One that cannot be mapped now, too.
            if link.consumer.has_message() {
                self.inbound.set_again(number);
            } else {
                link.consumer.announce_some();
            }
            if taken > 0 {
                self.inbound.found(number, self.waiting.sleeping);
            }
        }
        self.inbound.reuse(numbers);
        n
    }
}

impl Inbound {
    /// Delivers messages from the ring, at most [`BATCH`]. `PARKED`: of a parked link. The compiler makes a function of its
    /// own for these, and lets the direct ones be part of the poll.
    #[inline(always)]
    fn take_batch<const PARKED: bool>(
        &mut self,
        outbound: &mut Outbounds,
        due: &mut Due,
        handler: &mut impl Handler,
    ) -> usize {
        let mut taken = 0;
        while taken < BATCH {
            let peer = self.peer;
            match self.consumer.pop(|header, payload| handler.on_message(peer, header, payload)) {
                Popped::Message => {
                    taken += 1;
                    if handler.wants_pause() {
                        break;
                    }
                }
                Popped::Handed(handed) => {
                    taken += 1;
                    let out = outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
                    if out.is_some_and(|out| !out.producer.receive(&handed)) {
                        due.end(peer);
                        break;
                    }
                }
                Popped::Empty => break,
                Popped::Malformed => {
                    due.end(peer);
                    break;
                }
            }
        }
        taken
    }
}

impl Messages for Shm {
    fn caps(&self, peer: PeerId) -> Caps {
        let whole = self.out(peer).map_or(FRUGAL, |link| link.producer.prospects());
        let sizes = self.out(peer).map_or(FRUGAL, |link| link.producer.sizes());
        let (get, put) = self.inbound_of(peer).map_or((false, false), Inbound::reach);
        let features = self.out(peer).and_then(|link| link.features);
        Caps {
            short_max: SLOT_ROOM,
            bcopy_max: self.out(peer).map_or(MOVABLE_MAX, |link| link.producer.payload_max()),
            fragment_max: sizes.fragment_max(),
            push_max: whole.push_max().min(self.push_max(peer, get)),
            get,
            put,
            // A peer whose pid is not visible lives in another pid namespace: we could not tell its end, or that it is
            // stopped, from a copy in progress.
            one_sided: self.out(peer).is_none_or(|link| link.pid > 0),
            atomics: features.map(|all| all & hello::ATOMICS != 0),
            collectives: features.map(|all| all & hello::COLLECTIVES != 0),
            outlives: true,
            ..Caps::UNKNOWN
        }
    }

    #[inline]
    fn send(
        &mut self,
        peer: PeerId,
        mode: Mode,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let Some(link) = link else {
            return Err(SendError::Unreachable(Errno(libc::ENOTCONN)));
        };
        // What fits beside its header needs no bulk space: a long message can be announced while all of that is in use.
        let beside = mode == Mode::Fragment && header.len() + len <= SLOT_ROOM;
        let pushed = if beside || !matches!(mode, Mode::Bulk | Mode::Fragment) {
            link.producer.push_short(header, len, |to| pack(0, to))
        } else {
            link.timed(len, |link| link.producer.push_bulk(header, len, |to| pack(0, to)))
        };
        link.tell(pushed.map_err(|ring::Full| SendError::Again)?);
        Ok(())
    }

    #[inline]
    fn send_at_once(&mut self, peer: PeerId, head: &Head, payload: Segment) -> bool {
        let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let Some(link) = link else { return false };
        let Some(pushed) = link.producer.push_at_once(head, payload) else { return false };
        link.tell(pushed);
        true
    }

    fn send_whole(
        &mut self,
        peer: PeerId,
        first: &[u8],
        payload: Segment,
        next: impl Fn(usize) -> Head,
    ) -> bool {
        self.push_whole(peer, first, payload, next)
    }

    fn under_pressure(&self, peer: PeerId) -> bool {
        self.out(peer).is_some_and(|link| link.producer.under_pressure())
    }

    fn set_pressure(&mut self, on: bool) {
        if self.pressure != on {
            self.pressure = on;
            for link in self.inbound.iter() {
                link.consumer.set_pressure(on);
            }
        }
    }
}

impl Streaming for Shm {}

impl Transport for Shm {
    const NAME: &'static str = "shared memory";
    const KEYS: &'static [u8] = reaching::KEYS;

    fn open(opening: &mut Opening<'_>) -> Result<Option<Self>, Errno> {
        let (config, net) = (&opening.config.shm, opening.config.net.on);
        if config.on && !net {
            // Otherwise peers would count messages as sent that a process unable to accept never reads.
            unix::may_accept()?;
        }
        let bell = match config.on.then(|| Self::doorbell(opening.epoll)) {
            Some(Err(e)) if !net => return Err(e),
            bell => bell.and_then(|bell| bell.inspect_err(without_doorbell).ok()),
        };
        let (me, host) = (opening.me, opening.host.clone());
        let mut shm = Self::with(me, host, config.cma, bell, opening.epoll.clone())?;
        if config.on && !net && !shm.door.open {
            return Err(Errno(libc::EADDRINUSE));
        }
        let mark = if opening.key_source.is_given() { opening.key.mark() } else { 0 };
        let (push_max, share_min) = (config.push_max, config.share_min);
        let settings = Settings::new(config.cma, config.memory);
        shm.settings = Settings { mark, push_max, share_min, ..settings };
        Ok(Some(shm))
    }

    fn is_open(&self) -> bool {
        self.door.open
    }

    fn connect(&mut self, peer: PeerId, address: &Address, _: bool) -> Result<Contact, SendError> {
        if !self.host.owns(address.0.ip()) {
            return Ok(Contact::Elsewhere);
        }
        let contact = match self.door.open {
            true => self.link(peer, address),
            false => Self::look_for(address),
        };
        // The receiver cannot verify the link of a process that has ended if user ids are ambiguous, and messages to a
        // peer that refuses are lost: so wait for its answer.
        match contact {
            Ok(Contact::Linked) if user::is_ambiguous() || self.has_refused(peer) => {
                Ok(Contact::Settling)
            }
            contact => contact,
        }
    }

    fn peer_counts(&self, peer: PeerId) -> PeerCounts {
        let sent = self.out(peer).map(|link| u64::from(link.producer.published()));
        let received = self.inbound_of(peer).map(|link| u64::from(link.consumer.consumed()));
        PeerCounts {
            sent: sent.unwrap_or(0),
            received: received.unwrap_or(0),
            unanswered: self.is_settling(peer),
            ..PeerCounts::default()
        }
    }

    fn shortfall(&self, _: PeerId, address: &Address, carries: bool) -> &'static str {
        match (carries || !self.host.owns(address.0.ip()), self.door.open) {
            (true, _) => "",
            (false, true) => "the peer is on this host, and could not be reached by shared memory",
            (false, false) => "the peer is on this host, but this process has no shared memory",
        }
    }

    #[inline]
    fn is_connected(&self, peer: PeerId) -> bool {
        self.out(peer).is_some()
    }

    fn is_settling(&self, peer: PeerId) -> bool {
        self.out(peer).is_some_and(|link| link.nonce.is_none())
    }

    fn hears(&self, peer: PeerId) -> bool {
        self.inbound_of(peer).is_some()
    }

    #[inline]
    fn poll(&mut self, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        if self.inbound.direct().len() > 1 {
            self.inbound.direct().iter().for_each(|link| link.consumer.fetch());
        }
        for link in self.inbound.direct() {
            n += link.take_batch::<false>(&mut self.outbound, &mut self.due, handler);
        }
        if self.inbound.is_raised() {
            n += self.poll_parked(handler);
        }
        n
    }

    fn turn(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize {
        self.poll_sockets(peers, handler)
    }

    fn every_ns(still: bool, busy: bool) -> u64 {
        match (still, busy) {
            (_, true) => 1_000_000,
            (true, false) => 20_000,
            (false, false) => 200_000,
        }
    }

    #[inline]
    fn is_urgent(&self) -> bool {
        self.due.urgent
    }

    fn drain(&mut self, peer: PeerId, handler: &mut impl Handler) {
        self.take_down(peer, None, handler);
    }

    fn gone(&self, peer: PeerId) -> Option<Departure> {
        self.end_of(peer)
    }

    fn are_left_settled() -> bool {
        reaching::are_left_settled()
    }

    fn returned(&mut self) -> Vec<Returned> {
        std::mem::take(&mut self.returned)
    }

    fn give_up(&mut self, peer: PeerId, errno: Errno) {
        self.refusals.add(peer, errno);
    }

    #[inline]
    fn is_crowded(&self, endpoints: usize) -> bool {
        self.crowd.is_there(endpoints)
    }

    fn is_outnumbered(&self) -> bool {
        self.crowd.is_there(1)
    }

    fn enable_waiting(&mut self) {
        if !self.waiting.asked {
            self.waiting.asked = true;
            for link in self.inbound.iter() {
                link.consumer.set_waits();
                self.waiting.settles_at = clock::now_ns().saturating_add(SETTLES_NS);
            }
        }
    }

    fn sleep(&mut self) -> bool {
        self.enable_waiting();
        if self.waiting.settles_at != 0 {
            while clock::now_ns() < self.waiting.settles_at {
                process::yield_now();
            }
            self.waiting.settles_at = 0;
        }
        let another = std::mem::replace(&mut self.waiting.sleeping, true);
        let links = !self.inbound.is_empty() || self.outbound.iter().any(Option::is_some);
        let within = match (self.door.is_waiting(), links) {
            (true, _) => Some(DOOR_NS),
            (false, true) if self.inbound.are_parked() => {
                // A sender that dies, or is stopped, between taking our announcement back and ringing leaves the messages
                // of all others unannounced.
                Some(self.watches.every_ns().min(LIVENESS_NS))
            }
            (false, true) => Some(self.watches.every_ns()),
            (false, false) => None,
        };
        self.open_watches();
        if self.inbound.sleep() && self.watches.wake_within(within) {
            return true;
        }
        if !another {
            self.awake();
        }
        false
    }

    fn awake(&mut self) {
        if self.waiting.sleeping {
            self.waiting.sleeping = false;
            self.inbound.awake();
            // A socket may have woken us.
            self.due.urgent = true;
        }
    }
}

impl Shm {
    /// Rings the doorbell of each peer that has not closed: all links have ended.
    fn ring_all(&self) {
        let Some(bell) = &self.bell else { return };
        // As in `Outbound::wake`.
        fence();
        let ours = self.outbound.iter().flatten().filter(|link| !link.producer.consumer_closed());
        let ours = ours.filter_map(|link| layout::receivers_bell(link.producer.memory()));
        let theirs = self.inbound.iter().filter(|link| !link.consumer.producer_closed());
        let mut bells: Vec<BellAddress> = ours.chain(theirs.map(|link| link.theirs)).collect();
        bells.sort_unstable();
        bells.dedup();
        bells.into_iter().for_each(|other| bell.ring(other, Ring::End));
    }
}

fn without_doorbell(errno: &Errno) {
    log::limited!(
        cause: errno.0,
        "cannot make a doorbell ({errno}): peers on this node are reached over the network"
    );
}

impl Drop for Shm {
    fn drop(&mut self) {
        if self.is_owner() {
            self.read_last_answers();
            for link in self.outbound.iter().flatten() {
                link.producer.close();
            }
            // The application owns the memory of pending receives and sends again after this.
            self.reaching.gate.close();
            for link in self.inbound.iter_mut() {
                link.consumer.close();
                link.end_sharing();
                self.reaching.unsettled.extend(link.end_reaching());
            }
            self.ring_all();
            self.settle();
            self.leave_unsettled();
        }
    }
}
