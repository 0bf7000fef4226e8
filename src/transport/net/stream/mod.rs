//! TCP connections beside the datagrams, for the bytes of long messages: with any network card the kernel splits,
//! checks and places them directly between the applications' buffers. At most one to each peer, made for the first long
//! message to it, and few in all.
//!
//! A stream carries frames: a message header, and a payload that the receiver reads to its destination. A frame is
//! ordered after the messages sent as datagrams before it. Streams are optional: where there is none, or it breaks,
//! everything goes as datagrams, and bytes that a stream had not delivered are requested again (PROTOCOL.md §4.11).
//! They are one-way: the sender of long messages makes one.

#![forbid(unsafe_code)]

mod incoming;
mod member;
mod outgoing;
mod sink;
mod strangers;
/// Whether something between the nodes may have refused or dropped a connection.
fn is_blocked(errno: Errno) -> bool {
    let blocked =
        [libc::ETIMEDOUT, libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ENETUNREACH, libc::EACCES];
    blocked.contains(&errno.0)
}

#[cfg(test)]
mod tests;
mod wire;

use super::agreement::pause::Failures;
use super::neighbours::{Neighbours, Standing};
use super::reliable::Reliable;
use crate::memory::SegmentList;
use crate::sys::late_set::LateSet;
use crate::sys::{Errno, process, tcp};
use crate::telemetry::log;
use crate::transport::{Address, PeerId, SendError, StreamEnd};
use incoming::{Incoming, Turn};
use member::{FROM_PEER, LISTENER, Member, TO_PEER};
use outgoing::{CHECK_MS, Outgoing};
pub(super) use sink::StreamSink;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use strangers::Strangers;
use wire::Greeting;
pub(crate) use wire::PAYLOAD_MAX;

/// A stream that was not used for this long may be closed to make room for another, nanoseconds.
const IDLE_NS: u64 = 100_000_000;
/// So much later another may be, nanoseconds: of more peers than there are streams, each would close the stream that
/// another one needs next, and use its own but once.
const CLOSE_NS: u64 = 10_000_000;
/// A stream that has lived this long resets the failure count, nanoseconds.
const LONG_NS: u64 = 10_000_000_000;
/// Incoming streams accepted for each outgoing one allowed: more peers may have long messages for this endpoint than it
/// has for others.
const INCOMING: usize = 4;
/// Pause after a failure, nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;
/// Polls without a frame after which streams are polled only now and then, and the time between such polls,
/// nanoseconds.
const HOT: u32 = 2048;
const LOOK_NS: u64 = 50_000;
/// The same while there are no streams: a new one can wait, its messages go as datagrams meanwhile; and while one stream
/// has a frame in each poll.
const IDLE_LOOK_NS: u64 = 1_000_000;
/// Time between two checks whether the systems of peers acknowledge data, nanoseconds.
const CHECK_NS: u64 = CHECK_MS as u64 * 1_000_000;
/// One in this many polls asks which streams are ready; the others try the last one.
const ASK_EVERY: u32 = 8;

/// Counts of events since the endpoint was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct StreamCounts {
    pub(crate) made: u64,
    pub(crate) taken: u64,
    pub(crate) refused: u64,
    pub(crate) broken: u64,
    pub(crate) frames_sent: u64,
    pub(crate) frames_received: u64,
}

/// The numbers of a peer's streams to this endpoint: accepted, and over.
#[derive(Debug, Default)]
struct Seen {
    /// Connection and number of the last one that was accepted.
    last: (u32, u32),
    /// The number up to which the peer has said that they are over.
    over: Option<u32>,
}

impl Seen {
    fn refuses(&self, connection: u32, number: u32) -> bool {
        let (id, last) = self.last;
        id == connection && number <= last || self.over.is_some_and(|over| number <= over)
    }
}

/// Outgoing streams that were closed to make room.
#[derive(Debug, Default)]
struct Left {
    /// Peers that have none since. They are told only if another stream is wanted, which would not be ordered behind the
    /// last one.
    peers: HashSet<PeerId>,
    /// No other stream is closed before this time, nanoseconds.
    until: u64,
}

/// The streams of one endpoint.
#[derive(Debug)]
pub(super) struct Streams {
    listener: Option<Member>,
    epoll: Arc<LateSet>,
    me: SocketAddr,
    neighbours: Arc<Neighbours>,
    /// Most outgoing streams.
    limit: usize,
    outgoing: HashMap<PeerId, Outgoing>,
    incoming: Vec<Option<Incoming>>,
    strangers: Strangers,
    number: u32,
    seen: HashMap<PeerId, Seen>,
    failures: HashMap<PeerId, Failures>,
    left: Left,
    /// Outgoing streams that broke or were closed and of which the peer must be told.
    broken: VecDeque<(PeerId, u32)>,
    /// Some incoming streams wait for messages that come as datagrams.
    waits: bool,
    /// The stream that was last read from.
    latest: usize,
    hot: u32,
    looked_at: u64,
    checked_at: u64,
    /// No stream is accepted before this time, because there was no descriptor left, nanoseconds.
    deaf_until: u64,
    counts: StreamCounts,
}

impl Streams {
    /// At most `limit` outgoing streams for the endpoint whose datagrams arrive at `bound`. Errors: EMFILE, ENFILE,
    /// ENOMEM.
    pub(super) fn open(
        bound: SocketAddr,
        limit: usize,
        neighbours: Arc<Neighbours>,
    ) -> Result<Self, Errno> {
        let epoll = Arc::new(LateSet::new()?);
        // Peers find it at the port that they know. If another process has that TCP port, they send datagrams.
        let listener = tcp::listen(&bound).and_then(|fd| Member::lasting(fd, &epoll, LISTENER));
        if let Err(errno) = &listener {
            log::info(format_args!("no streams come to {bound}: {errno}"));
        }
        let listener = listener.ok();
        Ok(Self {
            listener,
            epoll,
            me: bound,
            neighbours,
            limit,
            outgoing: HashMap::new(),
            incoming: Vec::new(),
            strangers: Strangers::new(),
            number: 0,
            seen: HashMap::new(),
            failures: HashMap::new(),
            left: Left::default(),
            broken: VecDeque::new(),
            waits: false,
            latest: 0,
            hot: 0,
            looked_at: 0,
            checked_at: 0,
            deaf_until: 0,
            counts: StreamCounts::default(),
        })
    }

    /// Whether peers can make streams to this endpoint.
    pub(super) fn listens(&self) -> bool {
        self.listener.is_some()
    }

    /// Makes `set` ready, under `token`, when `poll` has something to do. Errors: those of [`LateSet::nest`].
    pub(super) fn watch(&self, set: &Arc<LateSet>, token: u64) -> Result<(), Errno> {
        self.epoll.nest(set, token)
    }

    /// Counts of events since the endpoint was opened.
    pub(super) fn counts(&self) -> StreamCounts {
        self.counts
    }

    /// A frame is expected: the next polls check each time.
    pub(super) fn attend(&mut self) {
        if self.incoming.iter().any(Option::is_some) {
            self.hot = HOT;
        } else {
            self.looked_at = 0;
        }
    }

    /// Whether `send` to `peer` works now. If a stream has to be made first, that begins.
    pub(super) fn is_ready(
        &mut self,
        machine: &Reliable,
        peer: PeerId,
        address: &Address,
        now: u64,
    ) -> bool {
        let Some(stream) = self.outgoing.get_mut(&peer) else {
            self.connect(machine, peer, address, now);
            return false;
        };
        if machine.owner_of(stream.id) != Some(peer) {
            self.outgoing.remove(&peer); // of a connection that has ended
            return false;
        }
        if stream.known {
            return true;
        }
        let flushed = if stream.greeted { Ok(true) } else { stream.flush() };
        let known = flushed.and_then(|ready| {
            // Only the greeting has left, which reveals nothing: another user may have taken the port of a peer that
            // has ended.
            match ready && self.neighbours.listener(&stream.to) != Standing::Admitted {
                true => Err(Errno(libc::EPERM)),
                false => Ok(ready),
            }
        });
        match known {
            Ok(ready) => {
                stream.known = ready;
                self.counts.made += u64::from(ready);
                ready
            }
            Err(errno) => {
                self.outgoing.remove(&peer);
                self.fail(peer, address, errno, now);
                false
            }
        }
    }

    #[cold]
    fn connect(&mut self, machine: &Reliable, peer: PeerId, address: &Address, now: u64) {
        let Some((id, remote_id)) = machine.takes_streams(peer) else { return };
        let pauses = self.failures.get(&peer).is_some_and(|failures| failures.pause(now));
        if pauses || self.is_missed(peer) {
            return;
        }
        // A message that the last stream carried must not continue on this one.
        if self.left.peers.contains(&peer) {
            return self.miss(peer);
        }
        let full = self.outgoing.len() >= self.limit;
        if full && !self.make_room(now) {
            return;
        }
        let number = self.number.wrapping_add(1);
        let mut greeting = Greeting { dest: remote_id, number, tag: 0 };
        let Some(tag) = machine.sign(id, true, &greeting.signed()) else { return };
        greeting.tag = tag;
        let mut waits = false;
        let made = tcp::connect(&self.me, &address.0).and_then(|fd| {
            // The others are left to the application.
            let mut fd = fd;
            if !full && process::descriptors_are_scarce(&fd) {
                // One was closed for another peer just now, which says nothing of this one.
                waits = now < self.left.until;
                if !self.make_room(now) {
                    return Err(Errno(libc::EMFILE));
                }
                // To the number that has become free: the next stream gets the lowest one, and is judged by it.
                fd = fd.try_clone().unwrap_or(fd);
            }
            Member::new(fd, &self.epoll, TO_PEER | u64::from(peer.0))
        });
        match made {
            Ok(member) => {
                self.number = number;
                self.outgoing.insert(peer, Outgoing::new(member, address.0, id, &greeting, now));
            }
            Err(_) if waits => {}
            Err(errno) => self.fail(peer, address, errno, now),
        }
    }

    #[cold]
    fn fail(&mut self, peer: PeerId, address: &Address, errno: Errno, now: u64) {
        // A peer that ends refuses one connection.
        let from = if errno.0 == libc::ECONNREFUSED { 2 } else { 1 };
        let failures = self.count_failure(peer, now);
        if failures == from && is_blocked(errno) {
            log::limited!(
                node: errno.0,
                "TCP to {address} does not pass ({errno}): long messages go as datagrams, which is slower. Let the firewalls between the nodes pass TCP to this port (FI_UDRV_PORTS limits it to a range); FI_UDRV_STREAMS=0 says that this is wanted"
            );
        } else if failures == 1 {
            log::info(format_args!("no stream to {address}: {errno}; datagrams instead"));
        }
    }

    /// A stream to `peer` failed; returns the number of failures in a row.
    fn count_failure(&mut self, peer: PeerId, now: u64) -> u32 {
        let failures = self.failures.entry(peer).or_default();
        failures.again(now, RETRY_NS);
        failures.count
    }

    /// Closes the least recently used stream, if nothing of it is in flight.
    fn make_room(&mut self, now: u64) -> bool {
        if now < self.left.until {
            return false;
        }
        self.left.until = now + CLOSE_NS;
        let resting = self.outgoing.iter().filter(|(_, stream)| stream.used_at + IDLE_NS < now);
        let mut oldest: Vec<_> = resting.map(|(peer, stream)| (stream.used_at, *peer)).collect();
        oldest.sort_unstable();
        let is_idle =
            |(_, peer): &(u64, PeerId)| self.outgoing.get(peer).is_some_and(Outgoing::is_idle);
        let Some((_, peer)) = oldest.into_iter().find(is_idle) else { return false };
        self.left.peers.insert(peer);
        self.outgoing.remove(&peer).is_some()
    }

    /// A stream to `peer` is wanted, but it was closed to make room, or broke: its users and the peer must be told.
    #[cold]
    fn miss(&mut self, peer: PeerId) {
        self.left.peers.remove(&peer);
        if !self.is_missed(peer) {
            self.broken.push_back((peer, self.number));
        }
    }

    /// Whether `peer` and the users of its last stream have still to be told that it is gone.
    fn is_missed(&self, peer: PeerId) -> bool {
        self.broken.iter().any(|(other, _)| *other == peer)
    }

    /// Sends a frame; `message` has at most 32 bytes, `payload` at most [`PAYLOAD_MAX`]. `Again`: there is no room now,
    /// or the stream is gone, which the next poll reports.
    pub(super) fn send(
        &mut self,
        machine: &Reliable,
        peer: PeerId,
        message: &[u8],
        payload: &SegmentList,
        now: u64,
    ) -> Result<(), SendError> {
        let Some(stream) = self.outgoing.get_mut(&peer) else {
            self.miss(peer);
            return Err(SendError::Again);
        };
        match stream.send(machine, message, payload, now) {
            Ok(true) => {
                self.counts.frames_sent += 1;
                Ok(())
            }
            Ok(false) => {
                stream.member.watch_writable(true);
                Err(SendError::Again)
            }
            Err(errno) => {
                self.lose(peer, errno, now);
                Err(SendError::Again)
            }
        }
    }

    /// An outgoing stream broke.
    #[cold]
    fn lose(&mut self, peer: PeerId, errno: Errno, now: u64) {
        let Some(stream) = self.outgoing.remove(&peer) else { return };
        if stream.made_at + LONG_NS < now {
            self.failures.remove(&peer);
        }
        self.count_failure(peer, now);
        self.counts.broken += 1;
        if self.counts.broken.is_power_of_two() {
            log::info(format_args!(
                "a stream broke: {errno}; datagrams take over ({} so far)",
                self.counts.broken
            ));
        }
        self.broken.push_back((peer, stream.number));
    }

    /// An outgoing stream that broke, and its number, which the peer must be told.
    pub(super) fn take_broken(&mut self) -> Option<(PeerId, u32)> {
        self.broken.pop_front()
    }

    pub(super) fn has_broken(&self) -> bool {
        !self.broken.is_empty()
    }

    /// The peer says that its streams to this endpoint up to `number` broke.
    pub(super) fn on_broken(&mut self, peer: PeerId, number: u32, sink: &mut impl StreamSink) {
        // A later one has no frames yet: they come after this message. An earlier one may not even be accepted yet.
        self.drop_incoming(peer, |stream| stream.number <= number || stream.has_begun());
        let seen = self.seen.entry(peer).or_default();
        seen.over = seen.over.max(Some(number));
        sink.on_lost(peer, StreamEnd::Incoming);
    }

    /// The connection to `peer` has ended, and its streams with it.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.outgoing.remove(&peer);
        self.seen.remove(&peer);
        self.failures.remove(&peer);
        self.left.peers.remove(&peer);
        self.broken.retain(|(p, _)| *p != peer);
        self.drop_incoming(peer, |_| true);
    }

    fn drop_incoming(&mut self, peer: PeerId, which: impl Fn(&Incoming) -> bool) {
        for slot in &mut self.incoming {
            if slot.as_ref().is_some_and(|stream| stream.peer == peer && which(stream)) {
                *slot = None;
            }
        }
    }

    /// Makes the next `poll` check all streams.
    pub(super) fn wake(&mut self) {
        self.looked_at = 0;
    }

    /// When `poll` has something to do even if no descriptor is ready.
    pub(super) fn next_timeout(&self, now: u64) -> Option<u64> {
        let recent = self.outgoing.values().any(|stream| stream.is_recent(now));
        let check = recent.then_some(self.checked_at + CHECK_NS);
        // No descriptor tells of a stream that is not back in the set.
        let lone = |stream: &Incoming| !stream.waits && !stream.member.is_present();
        let look = self.waits && self.incoming.iter().flatten().any(lone);
        let look = look.then_some(self.looked_at + RETRY_NS);
        check.into_iter().chain(look).chain(Some(self.deaf_until).filter(|at| *at != 0)).min()
    }

    /// There was a frame recently.
    #[inline]
    pub(super) fn is_hot(&self) -> bool {
        self.hot > 0
    }

    /// Reads frames in order with the messages that the state machine has delivered, all of which the layer above must
    /// have received. Returns the number of frames.
    #[inline]
    pub(super) fn poll(
        &mut self,
        now: u64,
        machine: &Reliable,
        sink: &mut impl StreamSink,
    ) -> usize {
        let none =
            self.outgoing.is_empty() && self.incoming.is_empty() && self.strangers.is_empty();
        let every = if none { IDLE_LOOK_NS } else { LOOK_NS };
        let due = now.saturating_sub(self.looked_at) >= every;
        if self.hot == 0 && !due {
            return 0;
        }
        let mut n = 0;
        if self.hot > 0 {
            self.hot -= 1;
            n += self.read(self.latest, machine, sink);
            // A stream that always has a frame leaves the others waiting no longer than this.
            let overdue = now.saturating_sub(self.looked_at) >= IDLE_LOOK_NS;
            if overdue || n == 0 && self.hot % ASK_EVERY == 0 {
                n += self.look(now, machine, sink);
            }
        } else {
            n += self.look(now, machine, sink);
        }
        if n > 0 {
            self.hot = HOT;
            self.counts.frames_received += n as u64;
        }
        n
    }

    fn look(&mut self, now: u64, machine: &Reliable, sink: &mut impl StreamSink) -> usize {
        self.looked_at = now;
        let mut tokens = [0; 16];
        let ready = self.epoll.ready(&mut tokens);
        let mut n = 0;
        for token in tokens.iter().take(ready) {
            let index = *token & u64::from(u32::MAX);
            match token - index {
                LISTENER => self.accept(now),
                TO_PEER => self.on_outgoing(PeerId(index as u32), now),
                FROM_PEER => n += self.read(index as usize, machine, sink),
                _ => self.meet(index as u32, machine),
            }
        }
        self.strangers.expire(now);
        self.check(now);
        if self.deaf_until != 0 && now >= self.deaf_until {
            self.deaf_until = 0;
            self.accept(now);
        }
        // The epoll set does not report streams that wait, or that found no memory when they came back to it. Each one
        // for which that still holds sets this again.
        let waiting = if std::mem::take(&mut self.waits) { self.incoming.len() } else { 0 };
        for slot in 0..waiting {
            let stream = self.incoming.get(slot).and_then(Option::as_ref);
            if stream.is_some_and(|stream| stream.waits || !stream.member.is_present()) {
                n += self.read(slot, machine, sink);
            }
        }
        n
    }

    /// Gives up outgoing streams whose data is not acknowledged.
    fn check(&mut self, now: u64) {
        if now.saturating_sub(self.checked_at) < CHECK_NS {
            return;
        }
        self.checked_at = now;
        let all = self.outgoing.iter_mut();
        let over = all.filter_map(|(peer, stream)| stream.is_over().then_some(*peer));
        for peer in over.collect::<Vec<_>>() {
            self.on_error(peer, Errno(libc::ETIMEDOUT), now);
        }
    }

    /// Accepts connections. Without a free descriptor those that come later wait for a moment, and cause no wakeups. If
    /// accepting never works, the listener closes, so that peers are refused and send datagrams.
    fn accept(&mut self, now: u64) {
        let Some(listener) = &mut self.listener else { return };
        let accepted = self.strangers.accept(listener, &self.epoll, &self.neighbours, now);
        let watched = listener.watch(accepted.is_ok());
        match accepted {
            Ok(()) if watched => {}
            Ok(()) => self.deaf_until = now + RETRY_NS,
            Err(errno) if errno.is_shortage() || tcp::passes(errno) => {
                self.deaf_until = now + RETRY_NS;
            }
            Err(_) => self.listener = None,
        }
    }

    /// An outgoing stream is writable, or the peer has closed it.
    fn on_outgoing(&mut self, peer: PeerId, now: u64) {
        let Some(stream) = self.outgoing.get_mut(&peer) else { return };
        // The peer never sends anything on it: being readable means its end.
        let mut nothing = [0; 1];
        let end = SegmentList::EMPTY.fill_from(stream.member.fd(), &mut nothing);
        let flushed = match end {
            Ok(tcp::Received::Nothing) => stream.flush(),
            Ok(_) => Err(Errno(libc::EPIPE)),
            Err(errno) => Err(errno),
        };
        match flushed {
            Ok(true) => stream.member.watch_writable(false),
            Ok(false) => {}
            Err(errno) => self.on_error(peer, errno, now),
        }
    }

    #[cold]
    fn on_error(&mut self, peer: PeerId, errno: Errno, now: u64) {
        match self.outgoing.get(&peer).filter(|stream| !stream.greeted).map(|one| Address(one.to)) {
            Some(to) => {
                self.outgoing.remove(&peer);
                self.fail(peer, &to, errno, now);
            }
            None => self.lose(peer, errno, now),
        }
    }

    fn read(&mut self, slot: usize, machine: &Reliable, sink: &mut impl StreamSink) -> usize {
        let Some(place) = self.incoming.get_mut(slot) else { return 0 };
        let Some(stream) = place else { return 0 };
        let (turn, peer) = (stream.read(machine, sink), stream.peer);
        // A stream that may not be read yet must not cause wakeups.
        self.waits |= stream.waits | !stream.member.watch(!stream.waits);
        match turn {
            Turn::Goes(n) => {
                if n > 0 {
                    self.latest = slot;
                }
                n
            }
            Turn::Closed => {
                *place = None;
                0
            }
            Turn::Lost(errno) => {
                // The messages it carried may now arrive by another path: no stream may write to their buffers any
                // more.
                self.drop_incoming(peer, |_| true);
                self.counts.broken += 1;
                log::info(format_args!("a stream to us broke: {errno}; datagrams take over"));
                sink.on_lost(peer, StreamEnd::Incoming);
                1
            }
        }
    }

    /// A new connection has sent its greeting.
    fn meet(&mut self, number: u32, machine: &Reliable) {
        let Some((mut member, greeting)) = self.strangers.greet(number) else { return };
        let tag = machine.sign(greeting.dest, false, &greeting.signed());
        let genuine = tag.is_some_and(|tag| crate::transport::job_key::same(tag, greeting.tag));
        let Some(peer) = machine.owner_of(greeting.dest).filter(|_| genuine) else {
            self.counts.refused += 1;
            return;
        };
        let (connection, number) = (greeting.dest, greeting.number);
        // A replayed greeting is refused, and that of a stream that is over.
        if self.seen.get(&peer).is_some_and(|seen| seen.refuses(connection, number)) {
            self.counts.refused += 1;
            return;
        }
        let free = self.incoming.iter().position(Option::is_none);
        if free.is_none() && self.incoming.len() >= self.limit * INCOMING {
            self.counts.refused += 1;
            return;
        }
        let slot = free.unwrap_or(self.incoming.len());
        member.rename(FROM_PEER | slot as u64);
        if free.is_none() {
            self.incoming.push(None);
        }
        if let Some(place) = self.incoming.get_mut(slot) {
            *place = Some(Incoming::new(member, peer, connection, number));
            self.seen.entry(peer).or_default().last = (connection, number);
            self.counts.taken += 1;
            self.latest = slot;
            self.hot = HOT;
        }
    }
}
