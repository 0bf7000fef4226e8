//! The bulk path over RC queue pairs of the process: one to each peer with long messages, made at first need. Their
//! number is limited, and the least recently used one is closed to make room. All receive the immediates that announce
//! writes from one shared queue.
//!
//! Three messages agree on a connection (PROTOCOL.md §7.14): ASK, READY, GO. A side that sees it fail ends its queue
//! pair and tells the peer, which ends its own. Only then do remote buffers (windows) advertised over it belong to the
//! application again, so that no peer writes memory with another owner.

mod device;
mod exposed;
mod exposing;
mod link;
mod probes;
mod staging;
#[cfg(test)]
mod tests;

pub(super) use device::{connects, open};

use super::super::agreement::message::{Control, End, Message, Way};
use super::super::agreement::pause::{Failures, PAUSE_NS};
use super::super::agreement::{self, Agreement, Phase, Side};
use super::super::bulk::key::{Key, Use};
use super::super::bulk::lent::{Lent, Window};
use super::super::bulk::{Bulk, BulkCounts, BulkSink, STALE, UNREGISTERED, What};
use super::gpu;
use super::registrar::{reason, tell_refused};
use crate::memory::SegmentList;
use crate::sys::event::Epoll;
use crate::sys::numbers::NumberMap;
use crate::sys::{Errno, process};
use crate::telemetry::log;
use crate::transport::{
    Access, PeerId, Prepared, Purpose, Put, Registered, Registration, Remote, RemoteKey, SendError,
};
use exposed::Exposed;
use link::{Device, Event, Link, Posted, QueuePair, Region, conclude, register, tell_broken};
use probes::{Probes, Probing};
use staging::Staging;
use std::os::fd::BorrowedFd;

/// Longest remote buffer (window), bytes: long enough that control messages do not matter, short enough that the first
/// write is in flight while the next buffers are registered.
const WINDOW_MAX: usize = 1 << 20;
/// Shortest message that is worth a PUT rendezvous, bytes.
const WINDOW_MIN: usize = 32 * 1024;
/// Longest message whose receiver may read it (GET rendezvous), bytes: all of it is registered before anything is sent.
const OFFER_MAX: usize = 32 << 20;
/// Most remote buffers advertised at a time.
pub(super) const WINDOWS: usize = 1024;
/// A connection that was not used for this long may be closed to make room for another, nanoseconds.
const IDLE_NS: u64 = 20_000_000;
/// The same where the peer has keys to this side's memory: it may use them unseen.
const KEYS_IDLE_NS: u64 = 1_000_000_000;
/// A connection whose oldest request has not completed for this long counts as broken, nanoseconds; each of its bytes
/// adds time. A device gives up by itself, after two seconds at the earliest; but soft-RoCE of Linux 6.1 has been seen
/// to wait forever, when packets of a write and of a read behind it were lost.
const STUCK_NS: u64 = 4_000_000_000;
/// Time between two checks for that, nanoseconds.
const LOOK_NS: u64 = 500_000_000;
/// Most events of one `poll`, roughly.
const BATCH: usize = 128;
/// Most events of one `settle`: more than a completion queue has room for.
const SETTLE_MAX: usize = 1 << 16;

/// Opens a device: when the first connection is wanted, because most endpoints never send a long message, and again
/// after it failed.
type Opener<D> = Box<dyn FnMut() -> Result<D, Errno> + Send>;

/// A connection, and its link.
type Connection<Q> = agreement::Connection<Link<Q>>;

/// The bulk path over RC queue pairs. `D` is opened when the first connection is wanted.
struct Rc<D: Device> {
    // Queue pairs are dropped before the remote buffers that peers write through them, and before the device.
    connections: Agreement<Link<D::Qp>>,
    lent: Lent<D::Region>,
    /// Messages that peers may read (GET rendezvous).
    offered: Lent<D::Region>,
    exposed: Exposed<D>,
    /// Bounce buffers; made at first need, and kept registered.
    staging: Option<Staging<D::Region>>,
    /// Persistent registrations by address, and their bytes.
    residents: NumberMap<u64, (usize, D::Region)>,
    device: Option<D>,
    probes: Probing,
    opener: Opener<D>,
    /// How often it could not be opened, or failed, and until when it is not tried.
    trouble: Failures,
    /// Holds the device's descriptor once there is one.
    epoll: Epoll,
    /// The peers of queue pairs, by number.
    owners: NumberMap<u32, PeerId>,
    /// Most connections: FI_UDRV_RC_CONNECTIONS.
    limit: usize,
    /// See [`STUCK_NS`]; more where devices try for longer.
    stuck_ns: u64,
    /// Connections with requests that wait to be posted, and maybe others.
    waiting: Vec<PeerId>,
    /// Writes in flight on all connections, and when to check whether one is stuck, nanoseconds.
    writes: u32,
    look_at: u64,
    armed: bool,
    /// Memory for a call of `take`; empty in between.
    events: Vec<Event>,
    counts: BulkCounts,
}

impl<D: Device> std::fmt::Debug for Rc<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RC queue pairs: {:?}", self.counts())
    }
}

impl<D: Device> Rc<D> {
    /// At most `limit` connections, over the device that `opener` opens, whose requests count as stuck after `stuck_ns`,
    /// nanoseconds. Errors: EMFILE, ENFILE.
    pub(super) fn new(opener: Opener<D>, limit: usize, stuck_ns: u64) -> Result<Self, Errno> {
        Ok(Self {
            connections: Agreement::new(Way::Rc, process::random_u64() as u32),
            lent: Lent::new(WINDOWS),
            offered: Lent::new(WINDOWS),
            exposed: Exposed::default(),
            staging: None,
            residents: NumberMap::default(),
            device: None,
            probes: Probing::default(),
            opener,
            trouble: Failures::default(),
            epoll: Epoll::new()?,
            owners: NumberMap::default(),
            limit,
            stuck_ns,
            waiting: Vec::new(),
            writes: 0,
            look_at: 0,
            armed: false,
            events: Vec::new(),
            counts: BulkCounts::default(),
        })
    }

    /// The device, which is opened if necessary. Errors: why there is none.
    fn device(&mut self, now: u64) -> Result<&mut D, Errno> {
        if self.device.is_none() {
            self.open(now)?;
        }
        self.device.as_mut().ok_or(Errno(libc::ENODEV))
    }

    #[cold]
    fn open(&mut self, now: u64) -> Result<(), Errno> {
        if self.trouble.pause(now) {
            return Err(Errno(libc::ENODEV));
        }
        let opened = (self.opener)().and_then(|device| {
            self.epoll.add(device.fd(), 0)?;
            self.probes.now =
                device.probes().filter(|probes| self.epoll.add(probes.fd(), 0).is_ok());
            Ok(device)
        });
        match opened {
            Ok(device) => {
                self.device = Some(device);
                Ok(())
            }
            Err(errno) => {
                if self.trouble.count == 0 {
                    log::limited!(
                        cause: errno.0,
                        "no RC queue pairs on the RDMA device ({}): long messages go as datagrams",
                        reason(errno, process::locked_memory_limit())
                    );
                }
                self.trouble.again(now, PAUSE_NS);
                Err(errno)
            }
        }
    }

    /// Posts requests that wait; if `patient`, not those that may be batched.
    #[inline]
    fn post_waiting(&mut self, patient: bool) {
        let Self { waiting, connections, .. } = self;
        waiting.retain(|peer| {
            let Some(Connection { link, .. }) = connections.get_mut(*peer) else { return false };
            if patient && link.is_patient() {
                return true;
            }
            if let Err(errno) = link.post_all() {
                tell_broken(errno);
                connections.doom(*peer);
                return false;
            }
            link.qp.waiting() > 0
        });
    }

    /// Looks for connections that are stuck.
    #[cold]
    fn look(&mut self, now: u64) {
        self.look_at = now.saturating_add(LOOK_NS);
        let stuck_ns = self.stuck_ns;
        for peer in self.connections.peers(|c| c.link.is_stuck(stuck_ns, now)) {
            if let Some(Connection { link, .. }) = self.connections.get(peer) {
                log::limited!(
                    "queue pair {:#x} has said nothing of a request for {} s: it ends, and its messages are sent again",
                    link.qp.number(),
                    now.saturating_sub(link.first_since) / 1_000_000_000
                );
            }
            self.connections.doom(peer);
        }
    }

    fn on_event(&mut self, event: Event, now: u64, sink: &mut dyn BulkSink) {
        let (Event::Filled { qp, .. } | Event::Written { qp } | Event::Failed { qp, .. }) = event;
        let Some(peer) = self.owners.get(&qp).copied() else { return };
        match event {
            Event::Written { .. } => self.on_written(peer, now, sink),
            Event::Filled { immediate, len, .. } => {
                if let Err(why) = self.on_filled(peer, immediate, len, now, sink) {
                    self.counts.wrong += 1;
                    log::limited!("a peer has written {why}: the connection ends");
                    self.connections.doom(peer);
                }
            }
            // The requests of a connection that is being ended.
            Event::Failed { .. } if self.connections.is_doomed(peer) => {}
            Event::Failed { status, .. } => {
                log::limited!(
                    cause: status,
                    "a connection of RC queue pairs broke (work completion status {status}): its messages are sent again"
                );
                // Completions of earlier writes may still be in the queue.
                self.connections.doom(peer);
            }
        }
    }

    /// The oldest request to `peer` is complete.
    fn on_written(&mut self, peer: PeerId, now: u64, sink: &mut dyn BulkSink) {
        let Some(Connection { link, .. }) = self.connections.get_mut(peer) else { return };
        link.qp.on_written();
        let posted = link.posted.pop_front();
        (link.used, link.first_since) = (now, now);
        self.writes = self.writes.saturating_sub(1);
        self.connections.note_success(peer);
        match posted {
            Some((Posted::Access(token), _)) => sink.on_done(peer, token),
            Some((Posted::Placed(token, what), _)) => {
                // Without that nobody knows what is there: the access ends with the connection.
                if gpu::flush(what) {
                    sink.on_done(peer, token);
                } else {
                    self.connections.doom(peer);
                }
            }
            Some((Posted::Staged(token, place), _)) => {
                if let Some(staging) = &mut self.staging {
                    staging.finish(place);
                }
                sink.on_done(peer, token);
            }
            Some((Posted::Silent, _)) | None => {}
        }
    }

    /// `peer` has filled a remote buffer. Errors: it has not, and what it has written instead.
    fn on_filled(
        &mut self,
        peer: PeerId,
        immediate: u32,
        len: u32,
        now: u64,
        sink: &mut dyn BulkSink,
    ) -> Result<(), String> {
        let Some(Connection { link, .. }) = self.connections.get_mut(peer) else { return Ok(()) };
        link.used = now;
        let Some(window) = self.lent.remove(peer, immediate) else {
            return Err("to a window that it was not lent".to_owned());
        };
        link.lent = link.lent.saturating_sub(1);
        if window.len != len as usize {
            return Err(format!("{len} bytes to a window of {}", window.len));
        }
        // The completion of a write with immediate means that all of its bytes are in memory, in whatever order they
        // came (InfiniBand 1.7, 10.8; ibv_query_qp_data_in_order(3)). Each buffer has one write, and so one completion.
        self.counts.filled += 1;
        self.counts.filled_bytes += window.len as u64;
        self.connections.note_success(peer);
        if window.lease.flush().is_some_and(|what| !gpu::flush(what)) {
            self.connections.doom(peer); // the bytes come in another way
            return Ok(());
        }
        sink.on_notify(peer, window.token);
        Ok(())
    }

    /// Processes up to `most` events. Returns their number; if fewer, there are no more. Errors: the device cannot be used
    /// any more.
    fn take(&mut self, most: usize, now: u64, sink: &mut dyn BulkSink) -> Result<usize, Errno> {
        let mut events = std::mem::take(&mut self.events);
        let mut n = 0;
        let mut polled = Ok(1);
        while n < most && polled.is_ok_and(|more| more > 0) {
            let Some(device) = &mut self.device else { break };
            polled = device.poll(|event| events.push(event));
            n += polled.unwrap_or(0);
            for event in events.drain(..) {
                self.on_event(event, now, sink);
            }
        }
        self.events = events;
        polled.map(|_| n)
    }

    /// Processes all events. A device that fails says so again at the next `poll`.
    fn settle(&mut self, now: u64, sink: &mut dyn BulkSink) {
        let _ = self.take(SETTLE_MAX, now, sink);
    }

    /// Stops the connections that have to end, and processes what was complete before: a peer that was told that its
    /// write has arrived is right, until its queue pair here takes no more (PROTOCOL.md §4.12, rule 8).
    fn stop_doomed(&mut self, now: u64, sink: &mut dyn BulkSink) {
        let mut stopped = 0;
        // Events may tell of further connections that have failed.
        loop {
            let doomed = self.connections.doomed(stopped);
            if doomed.is_empty() {
                return;
            }
            stopped += doomed.len();
            for peer in doomed {
                if let Some(Connection { link, .. }) = self.connections.get_mut(peer) {
                    link.qp.stop();
                }
            }
            self.settle(now, sink);
        }
    }

    /// The device cannot be used any more; it, or another one, may be opened later.
    #[cold]
    fn give_up(&mut self, errno: Errno, now: u64, sink: &mut dyn BulkSink) {
        log::limited!(
            cause: errno.0,
            "RC queue pairs fail ({errno}): long messages go as datagrams until there are others"
        );
        self.close(now, sink);
        self.trouble.again(now, PAUSE_NS);
    }

    /// Ends all connections, and then closes the device.
    fn close(&mut self, now: u64, sink: &mut dyn BulkSink) {
        for peer in self.connections.peers(|_| true) {
            self.connections.doom(peer);
        }
        self.stop_doomed(now, sink);
        self.lose_all(now, &mut |peer| sink.on_lost(peer));
        if let Some(staging) = &mut self.staging {
            staging.forget_lease();
        }
        self.residents.clear();
        if let Some(probes) = self.probes.now.take() {
            self.epoll.remove(probes.fd());
            probes.requests().for_each(|(peer, id)| self.connections.refuse(peer, id));
            self.probes.earlier.add(probes.stop());
        }
        if let Some(device) = self.device.take() {
            self.epoll.remove(device.fd());
        }
    }
}

impl<D: Device> Side for Rc<D> {
    type Link = Link<D::Qp>;
    type Why = Errno;

    fn agreement(&mut self) -> &mut Agreement<Self::Link> {
        &mut self.connections
    }

    fn has_place(&mut self, now: u64) -> bool {
        self.connections.len() < self.limit || self.make_place(now)
    }

    fn is_idle(&self, peer: PeerId, now: u64) -> bool {
        let unused = |link: &Self::Link| now.saturating_sub(link.used) >= IDLE_NS;
        // What the peer does with keys is not seen here: it may have begun since it asked.
        let unseen = |link: &Self::Link| link.lent > 0 || link.keys > 0;
        let idle = |link: &Self::Link| !unseen(link) && link.posted.is_empty() && unused(link);
        !self.connections.is_doomed(peer)
            && self.connections.get(peer).is_some_and(|c| idle(&c.link))
    }

    fn prepare(
        &mut self,
        peer: PeerId,
        to: Option<&End>,
        now: u64,
    ) -> Result<(Self::Link, End), Errno> {
        if let Some(to) = to {
            self.device(now)?;
            if !self.reaches(to, now) {
                return Err(Errno(libc::EHOSTUNREACH));
            }
            if !self.has_place(now) {
                return Err(Errno(libc::ENOSPC));
            }
        }
        let psn = process::random_u64() as u32 & 0x00ff_ffff;
        let mut qp = self.queue_pair(now)?;
        let device = self.device(now)?;
        let own = device.end(&qp, psn);
        to.map_or(Ok(()), |to| qp.connect(&device.seen(to), psn))?;
        self.owners.insert(qp.number(), peer);
        Ok((Link::new(qp, psn, now), own))
    }

    fn join(&mut self, peer: PeerId, to: Option<&End>, now: u64) -> Result<bool, Errno> {
        let reaches = to.is_none_or(|to| self.reaches(to, now));
        let Some(Connection { link, .. }) = self.connections.get_mut(peer) else { return Ok(true) };
        link.used = now;
        let Some(to) = to else { return Ok(true) };
        let device = self.device.as_ref().filter(|_| reaches).ok_or(Errno(libc::EHOSTUNREACH))?;
        link.qp.connect(&device.seen(to), link.psn).map(|()| true)
    }

    /// With the link end the peer's remote buffers.
    fn release(&mut self, peer: PeerId, link: Self::Link) {
        let Link { qp, posted, .. } = link;
        self.owners.remove(&qp.number());
        self.writes = self.writes.saturating_sub(posted.len() as u32);
        drop(qp);
        // No peer writes into them any more.
        for (posted, _) in posted {
            if let (Posted::Staged(_, place), Some(staging)) = (posted, &mut self.staging) {
                staging.leave(place);
            }
        }
        drop((self.lent.remove_all(peer), self.offered.remove_all(peer)));
        self.exposed.forget(peer);
    }

    #[cold]
    fn tell(&mut self, errno: Errno) {
        let refused = &mut self.connections.counts.refused;
        *refused += 1;
        // A reached limit, or a peer that cannot be reached, is no fault of the device.
        let expected = [libc::ENOSPC, libc::EAGAIN, libc::EHOSTUNREACH, libc::ENODEV];
        if !expected.contains(&errno.0) {
            log::limited!(
                cause: errno.0,
                "an RDMA device makes no RC queue pair ({errno}): long messages go as datagrams"
            );
        } else if refused.is_power_of_two() {
            log::info(format_args!(
                "no RC queue pair ({errno}): long messages go as datagrams ({refused} such so far)"
            ));
        }
    }

    fn tell_first(&mut self, peer: PeerId) {
        let number = self.connections.get(peer).map_or(0, |c| c.link.qp.number());
        log::info(format_args!(
            "the first connection of RC queue pairs is made, number {number:#x}: long messages go by RDMA Write"
        ));
    }
}

impl<D: Device> Rc<D> {
    fn reaches(&self, to: &End, now: u64) -> bool {
        self.device.as_ref().is_some_and(|device| device.reaches(to))
            && !self.probes.now.as_ref().is_some_and(|probes| probes.refuses(to, now))
    }

    /// Whether a message waits until its sender's port is known.
    fn holds(&mut self, peer: PeerId, message: &Message, now: u64) -> bool {
        let opened = !matches!(message, Message::Ask(..)) || self.device(now).is_ok();
        opened && self.probes.now.as_mut().is_some_and(|probes| probes.hold(peer, message, now))
    }

    /// Goes on with messages whose senders' ports are known now.
    #[cold]
    fn take_settled(&mut self, now: u64, sink: &mut dyn BulkSink) {
        let Some(settled) = self.probes.now.as_mut().map(|probes| probes.settled(now)) else {
            return;
        };
        self.settle(now, sink);
        for (peer, message) in settled {
            self.on_message(peer, &message, now, &mut |peer| sink.on_lost(peer));
        }
    }

    /// Ends an idle connection, if there is one: the one that was unused for longest. A peer that has keys reads and
    /// writes unseen: what it has under way would be lost without its acknowledgement, and done a second time. So such
    /// a connection comes last, and the peer is asked to end it: there is room a round trip later.
    #[cold]
    fn make_place(&mut self, now: u64) -> bool {
        let last = |link: &Link<D::Qp>| link.used.max(link.asked);
        let idle = |(_, c): &(PeerId, &Connection<D::Qp>)| {
            let after = if c.link.keys > 0 { KEYS_IDLE_NS } else { IDLE_NS };
            let unused = c.phase == Phase::Ready && now.saturating_sub(last(&c.link)) >= after;
            c.link.lent == 0 && c.link.posted.is_empty() && (unused || c.is_stale(now))
        };
        let missed = |(_, c): &(PeerId, &Connection<D::Qp>)| (c.link.keys > 0, last(&c.link));
        let Some((peer, _)) = self.connections.iter().filter(idle).min_by_key(missed) else {
            return false;
        };
        if self.connections.get(peer).is_some_and(|c| c.link.keys == 0) {
            self.evict(peer);
            return true;
        }
        // One is enough for a while: there is an answer, or the peer uses it.
        let waits = |c: &Connection<D::Qp>| c.link.asked > 0 && now < c.link.asked + IDLE_NS;
        if !self.connections.iter().any(|(_, c)| waits(c)) {
            self.connections.ask_back(peer);
            if let Some(connection) = self.connections.get_mut(peer) {
                connection.link.asked = now;
            }
        }
        false
    }

    /// A new queue pair. A device may have fewer than are allowed here: then an idle connection makes room.
    fn queue_pair(&mut self, now: u64) -> Result<D::Qp, Errno> {
        match self.device(now)?.connection() {
            Err(Errno(libc::EAGAIN | libc::ENOMEM)) if self.make_place(now) => {
                self.device(now)?.connection()
            }
            made => made,
        }
    }

    /// Registers a remote buffer, which one write with notice by `peer` fills.
    fn lend(&mut self, peer: PeerId, part: &SegmentList, token: u64, now: u64) -> Registered {
        let Some(connection) = self.connections.ready_mut(peer) else { return Registered::No };
        if let Some(refusal) = self.lent.refusal(connection.link.lent, now) {
            return refusal;
        }
        let Some(device) = &self.device else { return Registered::No };
        let lease = match device.register(part, true) {
            Ok(lease) => lease,
            Err(errno) => {
                self.counts.unregistered += 1;
                tell_refused(errno);
                return Registered::Never;
            }
        };
        let (key, addr, holds) = (lease.rkey(), part.first_addr(), Use::Receive);
        let window = Window { peer, token, len: part.len(), lease };
        let Some(slot) = self.lent.insert(window) else { return Registered::Later };
        connection.link.lent += 1;
        connection.link.used = now;
        self.counts.lent += 1;
        let key = Key { connection: connection.id, slot, addr, key, holds }.encode();
        // A write is complete when the other device has taken it and notifies its process. That the bytes are in memory
        // is known from that process's completion of the write with immediate, not from this one. A send that completes
        // only then (FI_DELIVERY_COMPLETE) waits for FIN, and does not ask for this.
        Registered::Yes(Registration { key, reads: false, writes: true, confirms: true })
    }

    /// Fills a remote buffer of the peer.
    fn write(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        to: &Key,
        token: u64,
        now: u64,
    ) -> Result<Access, SendError> {
        let doomed = self.connections.is_doomed(peer);
        let current = |c: &&mut Connection<D::Qp>| c.is_ready(to.connection);
        let Some(Connection { link, .. }) = self.connections.get_mut(peer).filter(current) else {
            self.counts.stale += 1;
            return Ok(Access::Silent); // the peer knows, or will be told, that it has ended
        };
        let Some(device) = self.device.as_ref().filter(|_| !doomed) else {
            return Ok(Access::Silent);
        };
        if !link.has_room(1) {
            return Err(SendError::Again);
        }
        let from = register(device, payload, false).map_err(|errno| {
            self.counts.unregistered += 1;
            tell_refused(errno);
            UNREGISTERED
        })?;
        let added = link.qp.write(from, to);
        if added == Err(Errno(libc::EOPNOTSUPP)) {
            // More segments than a request of this device has. Nothing was added.
            self.counts.unregistered += 1;
            return Err(UNREGISTERED);
        }
        let begun = if added.is_ok() { Access::Begun } else { Access::Silent };
        if begun == Access::Begun {
            link.note(Posted::Access(token), payload.len(), now);
            self.writes += 1;
            self.counts.written += 1;
            self.counts.written_bytes += payload.len() as u64;
        }
        let posted = added.and_then(|()| link.post_all());
        if !conclude(peer, link, posted, &mut self.waiting) {
            self.connections.doom(peer);
        }
        Ok(begun)
    }

    /// On an emulated device, the sender's processor does all the work of writing to a peer on the same host. With GET
    /// rendezvous the peer reads a part of the message, and both share the work. Not after a loss: soft-RoCE of Linux
    /// 6.1 then never completes reads behind writes (`STUCK_NS`).
    fn offer(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        near: bool,
        now: u64,
    ) -> Option<Registration> {
        let broke = self.connections.counts.broken > 0;
        let connection = self.connections.ready_mut(peer)?;
        let device = self.device.as_ref().filter(|device| device.offers(near))?;
        if broke || payload.len() > OFFER_MAX || self.offered.is_full() {
            return None;
        }
        let lease = device.offer(payload).ok()?;
        let (key, addr, len) = (lease.rkey(), payload.first_addr(), payload.len());
        let slot = self.offered.insert(Window { peer, token: 0, len, lease })?;
        connection.link.used = now;
        connection.link.keys += 1;
        let key = Key { connection: connection.id, slot, addr, key, holds: Use::Send }.encode();
        Some(Registration { key, reads: true, writes: false, confirms: false })
    }
}

impl<D: Device> Bulk for Rc<D> {
    fn sizes(&self) -> (usize, usize) {
        (WINDOW_MAX, WINDOW_MIN)
    }

    fn takes_gpus(&self) -> bool {
        self.device.as_ref().map_or_else(D::may_take_gpus, D::takes_gpus)
    }

    fn takes(&mut self, _: PeerId, memory: &SegmentList) -> bool {
        self.device.as_ref().is_some_and(|device| register(device, memory, true).is_ok())
    }

    fn lends(&mut self, peer: PeerId, now: u64) -> Prepared {
        let theirs = self.connections.ready(peer).map(|connection| connection.link.lent);
        theirs.map_or(Prepared::No, |theirs| self.lent.room(theirs, now))
    }

    fn lane(&mut self, peer: PeerId, now: u64) -> Prepared {
        self.contact(peer, now)
    }

    fn register(
        &mut self,
        peer: PeerId,
        memory: &SegmentList,
        purpose: Purpose,
        near: bool,
        now: u64,
    ) -> Registered {
        match purpose {
            Purpose::Region { id, reads, writes } => {
                self.expose(peer, (id, memory), (reads, writes), now)
            }
            Purpose::Receive { token } => self.lend(peer, memory, token, now),
            Purpose::Send => match self.offer(peer, memory, near, now) {
                Some(registered) => Registered::Yes(registered),
                None => Registered::No,
            },
        }
    }

    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey) {
        let Some(Key { connection, slot, addr, key, holds }) = Key::decode(key) else { return };
        let Some(known) = self.connections.get_mut(peer).filter(|c| c.id == connection) else {
            return;
        };
        let link = &mut known.link;
        match holds {
            Use::Region => {
                link.keys = link.keys.saturating_sub(1);
                if !self.exposed.remove(peer, addr, key) {
                    self.connections.doom(peer);
                }
            }
            Use::Receive => {
                let taken = self.lent.remove(peer, slot).is_some();
                link.lent = link.lent.saturating_sub(u32::from(taken));
            }
            Use::Send => {
                let taken = self.offered.remove(peer, slot).is_some();
                link.keys = link.keys.saturating_sub(u32::from(taken));
            }
        }
    }

    fn is_current(&self, peer: PeerId, key: &RemoteKey) -> bool {
        let number = Key::decode(key).map(|key| key.connection);
        self.connections.ready(peer).is_some_and(|c| Some(c.id) == number)
    }

    fn access(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        at: &Remote,
        what: What,
        now: u64,
    ) -> Result<Access, SendError> {
        let key = Key::decode(&at.key).ok_or(STALE)?;
        if self.connections.is(peer, key.connection, Phase::Agreed) {
            self.begin(peer, now); // a key of the connection implies GO, and came first
        }
        let to = Key { addr: key.addr.checked_add(at.offset).ok_or(STALE)?, ..key };
        match what {
            What::Put(how) if how.notify => return self.write(peer, local, &to, how.token, now),
            What::Put(how) => self.reach(peer, local, &to, (false, how), now),
            What::Get(token) => {
                let how =
                    Put { notify: false, delivered: false, stays: false, reports: false, token };
                self.reach(peer, local, &to, (true, how), now)
            }
            What::Flush(token) => self.flush_alone(peer, &to, token, now),
        }
        .map(|()| Access::Begun)
    }

    fn flush(&mut self) {
        self.post_waiting(true);
    }

    fn await_writes(&mut self, peer: PeerId) -> bool {
        let there = self.exposed.flush(peer);
        if !there {
            self.connections.doom(peer);
        }
        there
    }

    fn on_control(&mut self, peer: PeerId, message: &[u8], now: u64, sink: &mut dyn BulkSink) {
        let Some(message) = Message::decode(message, Way::Rc) else {
            self.counts.wrong += 1;
            return;
        };
        self.settle(now, sink);
        if !self.holds(peer, &message, now) {
            self.on_message(peer, &message, now, &mut |peer| sink.on_lost(peer));
        }
    }

    fn is_ready(&self, peer: PeerId) -> bool {
        self.connections.ready(peer).is_some()
    }

    fn leave(&mut self, peer: PeerId, now: u64, sink: &mut dyn BulkSink) {
        if self.connections.get(peer).is_some() {
            self.connections.doom(peer);
            self.stop_doomed(now, sink);
            self.retire(peer);
        }
        // The peer may ask again at once.
        if let Some(asked) = self.probes.now.as_mut().and_then(|probes| probes.forget(peer)) {
            self.connections.turn_away(peer, asked);
        }
    }

    fn next_control(&mut self) -> Option<(PeerId, Control)> {
        self.connections.next_control()
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.writes > 0
            || self.lent.len() > 0
            || self.connections.has_news()
            || self.armed
            || self.probes.now.as_ref().is_some_and(Probes::is_asking)
            || self.device.as_ref().is_some_and(|device| self.exposed.has_changed(device))
    }

    fn tend(&mut self, now: u64) {
        if let Some(device) = &self.device {
            device.tend(now);
        }
    }

    fn next_timeout(&self) -> Option<u64> {
        self.device.as_ref()?.next_timeout()
    }

    fn poll(&mut self, now: u64, sink: &mut dyn BulkSink) -> usize {
        self.armed = false;
        if self.probes.now.as_ref().is_some_and(Probes::is_asking) {
            self.take_settled(now, sink);
        }
        if !self.waiting.is_empty() {
            self.post_waiting(false); // requests for which there was no room
        }
        if let Some(device) = &self.device {
            let connections = &self.connections;
            self.exposed.check(device, |peer| connections.get(peer).map(|c| c.id), sink);
        }
        let n = match self.take(BATCH, now, sink) {
            Ok(n) => n,
            Err(errno) => {
                self.give_up(errno, now, sink);
                1
            }
        };
        // Completions are processed first: only then is it certain which requests are stuck, and which are lost.
        if n < BATCH {
            if now >= self.look_at {
                self.look(now);
            }
            self.stop_doomed(now, sink);
            self.lose_doomed(now, &mut |peer| sink.on_lost(peer));
        }
        n
    }

    fn renew(&mut self, _: usize, now: u64, sink: &mut dyn BulkSink) {
        self.close(now, sink);
        self.connections.forget_failures();
        self.trouble = Failures::default();
    }

    fn forget(&mut self, peer: PeerId, now: u64, sink: &mut dyn BulkSink) {
        if self.connections.get(peer).is_some() {
            self.connections.doom(peer);
            self.stop_doomed(now, sink);
        }
        self.erase(peer);
        self.probes.now.as_mut().and_then(|probes| probes.forget(peer));
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.fd()
    }

    fn sleep(&mut self) -> bool {
        if self.connections.has_news() {
            return false;
        }
        self.probes.now.iter().for_each(Probes::silence);
        let Some(device) = &mut self.device else { return true };
        if self.writes == 0 && self.lent.len() == 0 {
            device.silence();
            return true;
        }
        self.armed = true;
        device.sleep()
    }

    fn rearm(&mut self) -> bool {
        let idle = self.writes == 0 && self.lent.len() == 0;
        !self.connections.has_news()
            && (idle || self.device.as_mut().is_none_or(|device| device.rearm()))
    }

    fn counts(&self) -> BulkCounts {
        let device = self.device.as_ref();
        let (cache_hits, cache_misses) = device.map_or((0, 0), Device::cache_counts);
        let counts = self.counts.with(&self.connections);
        BulkCounts { exposed: self.exposed.made, cache_hits, cache_misses, ..counts }
    }

    fn registrations(&self) -> Option<String> {
        self.device.as_ref()?.registrations()
    }
}
