//! The bulk path over the kernel's rv module. Its connections are between nodes, and all processes of the job there
//! write through them. So ASK, READY and GO between two endpoints (PROTOCOL.md §7.15) agree on no queue pair, but on
//! numbers: the upper bits of a write's immediate name the process it is for, and the lower bits the remote buffer
//! (window).
//!
//! The module keeps registrations and their keys valid after their end. So a buffer that no peer may write any more is
//! evicted before its loss is reported. That invalidates everything on the same pages; other peers' buffers in the same
//! registration are lost with it.
//!
//! Nothing signals events: a sleeping thread is woken by a timer while something is due.

pub(crate) mod config;
mod node;
mod open;
#[cfg(test)]
mod tests;

pub(super) use open::{check, open};

use super::agreement::message::{Control, End, Message, Way};
use super::agreement::{Agreement, Connection, Phase, Side};
use super::bulk::key::{Key, Use};
use super::bulk::lent::{Lent, Window};
use super::bulk::{Bulk, BulkCounts, BulkSink, STALE, UNREGISTERED, What};
use super::network::Network;
use crate::memory::{OwnedBuffer, SegmentList};
use crate::sys::event::Timer;
use crate::sys::rv::{
    Event, Failure, INDEX_BITS, Module, RECONNECT_S, Region, Remedy, Ring, There,
};
use crate::sys::{Errno, clock, process};
use crate::telemetry::log;
use crate::transport::{
    Access, PeerId, Prepared, Purpose, Put, Registered, Registration, Remote, RemoteKey, SendError,
};
use node::Nodes;
use std::collections::{HashMap, HashSet};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Longest remote buffer, if the module registers as much at once, and shortest message that is worth one, bytes.
const WINDOW_MAX: usize = 1 << 20;
const WINDOW_MIN: usize = 32 * 1024;
/// Most remote buffers advertised at a time; most writes in flight to one peer, and to all. The event ring has room for
/// more.
const WINDOWS: usize = 1024;
const PEER_WRITES: u32 = 32;
const WRITES: usize = 512;
/// Bits of an immediate below the number of the process.
const SLOT_BITS: u32 = 32 - INDEX_BITS;
/// How long a write may be refused temporarily, nanoseconds: the module itself gives up before.
const REFUSED_NS: u64 = (RECONNECT_S as u64 + 10) * 1_000_000_000;
/// How soon the timer first wakes a sleeper, and how late at most, nanoseconds.
const NAP_NS: u64 = 100_000;
const NAP_MAX_NS: u64 = 2_000_000;
/// Most events of one `poll`.
const BATCH: usize = 128;

/// This side's end of a connection to one endpoint.
#[derive(Debug)]
pub(super) struct Link {
    /// The endpoint's node, once it is known.
    node: Option<There>,
    /// Remote buffers advertised to the peer, and writes to it in flight.
    lent: u32,
    writes: u32,
    /// Since when writes have been refused temporarily, nanoseconds.
    refused: Option<u64>,
}

/// A write in flight.
#[derive(Debug)]
struct Write {
    peer: PeerId,
    id: u32,
    /// Who wants to hear of its end.
    token: Option<u64>,
    /// A copy of payload that was not contiguous.
    copy: Option<OwnedBuffer>,
}

/// The open module, as long as it works.
#[derive(Debug)]
struct Attached {
    module: Arc<Module>,
    ring: Ring,
}

/// The port that the module was attached to.
struct Port {
    network: Network,
    /// Packet size that it carries, bytes.
    mtu: u16,
    /// Tells whether the endpoint is there; `away`: it was not when last asked.
    is_home: Box<dyn Fn() -> bool + Send>,
    away: bool,
}

/// The timer that wakes a sleeper, because nothing signals the module's events.
#[derive(Debug)]
struct Nap {
    timer: Timer,
    /// How soon it wakes next, nanoseconds.
    ns: u64,
    /// When it wakes, nanoseconds; `None`: it is not armed.
    until: Option<u64>,
}

impl Nap {
    /// Errors: EMFILE, ENFILE, ENOMEM.
    fn new() -> Result<Self, Errno> {
        Ok(Self { timer: Timer::new()?, ns: NAP_NS, until: None })
    }

    fn begin(&mut self, now: u64) {
        self.timer.arm(now + self.ns);
        self.until = Some(now + self.ns);
        self.ns = (self.ns * 2).min(NAP_MAX_NS);
    }

    /// Disarms the timer once it has woken its sleeper: the thread that polls before need not be that one.
    fn end(&mut self) {
        if self.until.is_some_and(|until| until <= clock::now_ns()) {
            self.until = None;
            self.timer.disarm();
        }
    }
}

/// The bulk path over the rv module.
pub(super) struct Rv {
    attached: Option<Attached>,
    /// Why the module cannot be used any more.
    broken: Option<String>,
    port: Port,
    nodes: Nodes,
    peers: Agreement<Link>,
    lent: Lent<Region>,
    writes: HashMap<u64, Write>,
    /// Copies that writes of lost connections were to read. The kernel's queue pairs outlive the connection, and peers
    /// that have not heard of its end count what they write: so each copy stays until its event comes. If that was lost,
    /// it stays as long as the endpoint.
    unread: HashMap<u64, OwnedBuffer>,
    next_write: u64,
    /// A request was refused temporarily.
    blocked: bool,
    nap: Nap,
    counts: BulkCounts,
}

impl std::fmt::Debug for Rv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the rv module: {:?}", self.counts())
    }
}

impl Rv {
    /// A bulk path over `module`, whose port takes packets of `mtu` bytes; `home` tells whether the endpoint is there.
    /// Errors: EMFILE, ENFILE, ENOMEM.
    fn new(
        (module, ring): (Arc<Module>, Ring),
        network: Network,
        mtu: u16,
        home: Box<dyn Fn() -> bool + Send>,
    ) -> Result<Self, Errno> {
        Ok(Self {
            attached: Some(Attached { module, ring }),
            broken: None,
            port: Port { network, mtu, is_home: home, away: false },
            nodes: Nodes::default(),
            peers: Agreement::new(Way::Rv, process::random_u64() as u32),
            lent: Lent::new(WINDOWS),
            writes: HashMap::new(),
            unread: HashMap::new(),
            next_write: 0,
            blocked: false,
            nap: Nap::new()?,
            counts: BulkCounts::default(),
        })
    }

    /// The description of this end for a peer.
    fn end_here(&self, module: &Module) -> End {
        let here = module.here();
        let Port { mtu, network, .. } = self.port;
        let number = module.index();
        End { number, psn: 0, mtu, network, lid: here.lid, gid: here.gid, serves: 0 }
    }

    /// The node of a peer's end. Errors: it cannot be reached from here.
    fn node_of(&self, module: &Module, end: &End) -> Result<There, Errno> {
        let here = module.here();
        // The module has no way to other subnets.
        let same = end.network.across(end.lid, &here.gid, &end.gid) == (end.network, end.lid);
        let reachable = self.port.network.reaches(&here.gid, end.network, &end.gid)
            && same
            && end.gid != here.gid
            && end.number >> INDEX_BITS == 0;
        let lid = if end.network == Network::Roce { 0 } else { end.lid };
        let pkey = match self.port.network {
            Network::InfiniBand { pkey, .. } => pkey,
            Network::Roce => 0xffff,
        };
        let there = There { gid: end.gid, lid, mtu: end.mtu.min(self.port.mtu), pkey };
        if reachable { Ok(there) } else { Err(Errno(libc::EHOSTUNREACH)) }
    }

    /// Ends all connections to a node; with `lent_only`, only those with remote buffers.
    fn lose_node(&mut self, node: &There, lent_only: bool, now: u64, sink: &mut dyn BulkSink) {
        let theirs = |known: &Connection<Link>| {
            known.link.node.as_ref() == Some(node) && (!lent_only || known.link.lent > 0)
        };
        for peer in self.peers.peers(theirs) {
            self.lose(peer, now, &mut |peer| sink.on_lost(peer));
        }
    }

    /// The module cannot be used any more.
    #[cold]
    fn give_up(&mut self, why: &str, now: u64, sink: &mut dyn BulkSink) {
        log::limited!(
            "the rv module makes no connections any more ({why}): long messages go without it"
        );
        self.log_statistics();
        // Closing it invalidates keys that could not be evicted.
        self.attached = None;
        self.lose_all(now, &mut |peer| sink.on_lost(peer));
        self.forget_writes();
        self.nodes = Nodes::default();
    }

    /// No write is waited for any more.
    fn forget_writes(&mut self) {
        let copies = self.writes.drain().filter_map(|(wr_id, write)| Some((wr_id, write.copy?)));
        self.unread.extend(copies);
    }

    /// Prepares the node of `end`. Errors: the reason, as text.
    fn prepare_node(&mut self, end: &End) -> Result<(There, End), String> {
        let attached = self.attached.as_ref().ok_or("it has gone")?;
        let module = attached.module.clone();
        let there = self.node_of(&module, end).map_err(|errno| errno.to_string())?;
        let node = self.nodes.prepare(&module, &there).map_err(|why| self.judge(why))?;
        Ok((node, self.end_here(&module)))
    }

    /// The failure as text; if it is the module's, the module will be closed.
    fn judge(&mut self, failure: Failure) -> String {
        if failure.remedy() == Remedy::Module {
            self.broken = Some(failure.to_string());
        }
        failure.to_string()
    }

    fn on_event(&mut self, event: Event, now: u64, sink: &mut dyn BulkSink) {
        match event {
            Event::Written { wr_id, status, .. } => {
                let Some(Write { peer, id, token, .. }) = self.writes.remove(&wr_id) else {
                    self.unread.remove(&wr_id);
                    return;
                };
                let Some(known) = self.peers.get_mut(peer).filter(|known| known.id == id) else {
                    return; // of a connection that has ended
                };
                known.link.writes = known.link.writes.saturating_sub(1);
                if status == 0 {
                    self.peers.note_success(peer);
                    return token.into_iter().for_each(|token| sink.on_done(peer, token));
                }
                log::limited!(
                    cause: status,
                    "a write through the rv module failed (work completion status {status}): its messages are sent again"
                );
                self.lose(peer, now, &mut |peer| sink.on_lost(peer));
            }
            Event::Filled { conn, immediate, len, status } => {
                self.on_filled(conn, immediate, len, status, now, sink);
            }
            Event::Unknown(_) => self.counts.wrong += 1,
        }
    }

    fn on_filled(
        &mut self,
        conn: u64,
        immediate: u32,
        len: u32,
        status: u8,
        now: u64,
        sink: &mut dyn BulkSink,
    ) {
        let index = self.attached.as_ref().map(|attached| attached.module.index());
        let slot = immediate & ((1 << SLOT_BITS) - 1);
        let ours = index == Some(immediate >> SLOT_BITS) && status == 0;
        let Some(Window { peer, token, len: wanted, .. }) = self.lent.get(slot).filter(|_| ours)
        else {
            self.counts.wrong += 1; // the writer cannot be identified
            return;
        };
        let (peer, token, wanted) = (*peer, *token, *wanted);
        let node = self.peers.get(peer).and_then(|known| known.link.node);
        if wanted != len as usize || !node.is_some_and(|node| self.nodes.is(&node, conn)) {
            self.counts.wrong += 1;
            log::limited!(
                "{len} bytes were written to a window of {wanted}, or by another node: the connection ends"
            );
            return self.lose(peer, now, &mut |peer| sink.on_lost(peer));
        }
        drop(self.lent.remove(peer, slot));
        if let Some(known) = self.peers.get_mut(peer) {
            known.link.lent = known.link.lent.saturating_sub(1);
        }
        self.counts.filled += 1;
        self.counts.filled_bytes += u64::from(len);
        self.peers.note_success(peer);
        sink.on_notify(peer, token);
    }

    /// Checks connections between nodes that are being made, or may have been lost and made again.
    fn look_at_nodes(&mut self, now: u64, sink: &mut dyn BulkSink) {
        let Some(Attached { module, .. }) = &self.attached else { return };
        let module = module.clone();
        let lent = self.peers.iter().filter(|(_, known)| known.link.lent > 0);
        let nodes: HashSet<There> = lent.filter_map(|(_, known)| known.link.node).collect();
        for (node, news) in self.nodes.look(&module, &nodes, now) {
            match news {
                node::News::Up => {
                    let waits = |known: &Connection<Link>| {
                        known.link.node == Some(node) && known.phase == Phase::Joining
                    };
                    let peers = self.peers.peers(waits);
                    peers.into_iter().for_each(|peer| self.begin(peer, now));
                }
                // The completions of earlier writes may have been lost.
                node::News::Again => {
                    log::info(format_args!("the rv module has made a connection again"));
                    self.lose_node(&node, true, now, sink);
                }
                node::News::Dead(failure) => {
                    let why = self.judge(failure);
                    self.tell(why);
                    self.lose_node(&node, false, now, sink);
                }
            }
        }
    }

    /// Registers memory that a peer writes (`remote`), or that a write reads.
    fn register_range(&mut self, addr: u64, len: u64, remote: bool) -> Option<Region> {
        let module = self.attached.as_ref()?.module.clone();
        let mut result = module.register(addr, len, remote);
        if result.as_ref().is_err_and(|failure| failure.remedy() == Remedy::Evict)
            && module.evict_amount(len).is_ok()
        {
            result = module.register(addr, len, remote);
        }
        result.map_err(|failure| self.judge(failure)).ok()
    }

    fn refuse(&mut self, peer: PeerId, now: u64) -> SendError {
        self.blocked = true;
        if let Some(known) = self.peers.get_mut(peer) {
            let since = *known.link.refused.get_or_insert(now);
            if now.saturating_sub(since) > REFUSED_NS {
                self.peers.doom(peer);
            }
        }
        SendError::Again
    }

    fn log_statistics(&self) {
        if let Some(text) = self.statistics() {
            log::info(format_args!("the rv module: {text}"));
        }
    }

    /// The module's statistics.
    fn statistics(&self) -> Option<String> {
        let Attached { module, .. } = self.attached.as_ref()?;
        let cache = module.cache_statistics().ok()?;
        let events = module.event_statistics().ok()?;
        let nodes = self.nodes.statistics(module);
        Some(format!("{cache:?}; {events:?}; {nodes}"))
    }
}

impl Side for Rv {
    type Link = Link;
    type Why = String;

    fn agreement(&mut self) -> &mut Agreement<Link> {
        &mut self.peers
    }

    fn has_place(&mut self, _: u64) -> bool {
        self.attached.is_some()
    }

    fn prepare(&mut self, _: PeerId, to: Option<&End>, _: u64) -> Result<(Link, End), String> {
        let (node, own) = match to {
            Some(end) => self.prepare_node(end).map(|(node, own)| (Some(node), own))?,
            None => (None, self.end_here(&self.attached.as_ref().ok_or("it has gone")?.module)),
        };
        Ok((Link { node, lent: 0, writes: 0, refused: None }, own))
    }

    /// Connects the nodes, if they are not yet.
    fn join(&mut self, peer: PeerId, to: Option<&End>, now: u64) -> Result<bool, String> {
        let node = match to {
            Some(end) => Some(self.prepare_node(end)?.0),
            None => self.peers.get(peer).and_then(|known| known.link.node),
        };
        let (Some(node), Some(Attached { module, .. })) = (node, &self.attached) else {
            return Err("it has gone".to_owned());
        };
        let module = module.clone();
        let up = self.nodes.connect(&module, &node, now).map_err(|failure| self.judge(failure))?;
        if let Some(known) = self.peers.get_mut(peer) {
            known.link.node = Some(node);
        }
        Ok(up)
    }

    /// With the link end the peer's remote buffers, and connections whose buffers are in the same registrations.
    fn release(&mut self, peer: PeerId, _: Link) {
        let mut gone = HashSet::from([peer]);
        // Keys of the registrations that contain remote buffers of the ended connections.
        let mut keys = HashSet::new();
        loop {
            let of_gone = self.lent.windows().filter(|window| gone.contains(&window.peer));
            keys.extend(of_gone.map(|window| window.lease.rkey()));
            let shared = self.lent.windows().filter(|window| keys.contains(&window.lease.rkey()));
            let more: Vec<PeerId> =
                shared.map(|window| window.peer).filter(|peer| !gone.contains(peer)).collect();
            if more.is_empty() {
                break;
            }
            gone.extend(more);
        }
        let mut ranges = Vec::new();
        for other in gone {
            for window in self.lent.remove_all(other) {
                ranges.push(window.lease.range());
            }
            self.peers.end_too(other);
        }
        // All are deregistered by now, so that none still holds a key.
        for (addr, len) in ranges {
            let Some(Attached { module, .. }) = &self.attached else { break };
            if let Err(failure) = module.evict(addr, len) {
                // Closing the module invalidates all keys.
                self.attached = None;
                self.broken = Some(failure.to_string());
            }
        }
    }

    #[cold]
    fn tell(&mut self, why: String) {
        let refused = &mut self.peers.counts.refused;
        *refused += 1;
        if refused.is_power_of_two() {
            log::info(format_args!(
                "no connection through the rv module ({why}): long messages go without it ({refused} such so far)"
            ));
        }
    }

    fn tell_first(&mut self, _: PeerId) {
        log::info(format_args!(
            "the first connection through the rv module is made: long messages go by RDMA Write of the kernel"
        ));
    }
}

impl Bulk for Rv {
    fn sizes(&self) -> (usize, usize) {
        // Registrations are of whole pages.
        let module = self.attached.as_ref().and_then(|a| a.module.registration_max());
        let page = process::page_size();
        let most = module.map_or(WINDOW_MAX, |max| max.saturating_sub(page).max(page));
        (WINDOW_MAX.min(most), WINDOW_MIN)
    }

    fn lane(&mut self, peer: PeerId, now: u64) -> Prepared {
        if self.port.away { Prepared::No } else { self.contact(peer, now) }
    }

    fn lends(&mut self, peer: PeerId, now: u64) -> Prepared {
        let theirs = self.peers.ready(peer).map(|known| known.link.lent);
        let room = theirs.map_or(Prepared::No, |theirs| self.lent.room(theirs, now));
        self.blocked |= room == Prepared::Later;
        room
    }

    fn is_ready(&self, peer: PeerId) -> bool {
        !self.port.away && self.peers.ready(peer).is_some()
    }

    /// Remote buffers only: the module has no reads, and no writes without an immediate.
    fn register(
        &mut self,
        peer: PeerId,
        part: &SegmentList,
        purpose: Purpose,
        _: bool,
        now: u64,
    ) -> Registered {
        let (Purpose::Receive { token }, Some(known)) = (purpose, self.peers.ready(peer)) else {
            return Registered::No;
        };
        let (connection, lent) = (known.id, known.link.lent);
        if let Some(refusal) = self.lent.refusal(lent, now) {
            self.blocked |= refusal == Registered::Later;
            return refusal;
        }
        let Some(lease) = self.register_range(part.first_addr(), part.len() as u64, true) else {
            self.counts.unregistered += 1;
            return Registered::Never;
        };
        let Some(Attached { module, .. }) = &self.attached else { return Registered::No };
        let (index, addr, key) = (module.index(), lease.iova(), lease.rkey());
        let window = Window { peer, token, len: part.len(), lease };
        let Some(slot) = self.lent.insert(window) else { return Registered::Later };
        if let Some(known) = self.peers.get_mut(peer) {
            known.link.lent += 1;
        }
        self.counts.lent += 1;
        let (slot, holds) = (index << SLOT_BITS | slot, Use::Receive);
        let key = Key { connection, slot, addr, key, holds }.encode();
        Registered::Yes(Registration { key, reads: false, writes: true, confirms: false })
    }

    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey) {
        let (Some(key), Some(known)) = (Key::decode(key), self.peers.get_mut(peer)) else { return };
        let slot = key.slot & ((1 << SLOT_BITS) - 1);
        if known.id == key.connection && self.lent.remove(peer, slot).is_some() {
            known.link.lent = known.link.lent.saturating_sub(1);
        }
    }

    fn is_current(&self, peer: PeerId, key: &RemoteKey) -> bool {
        let number = Key::decode(key).map(|key| key.connection);
        self.peers.get(peer).is_some_and(|known| Some(known.id) == number)
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
        match what {
            What::Put(Put { notify: true, reports, token, .. }) => {
                self.write(peer, local, &key, (reports.then_some(token), now))
            }
            _ => Err(STALE),
        }
    }

    fn on_control(&mut self, peer: PeerId, message: &[u8], now: u64, sink: &mut dyn BulkSink) {
        let Some(message) = Message::decode(message, Way::Rv) else {
            self.counts.wrong += 1;
            return;
        };
        self.on_message(peer, &message, now, &mut |peer| sink.on_lost(peer));
    }

    fn leave(&mut self, peer: PeerId, _: u64, _: &mut dyn BulkSink) {
        self.retire(peer);
    }

    fn next_control(&mut self) -> Option<(PeerId, Control)> {
        self.peers.next_control()
    }

    #[inline]
    fn has_work(&self) -> bool {
        !self.writes.is_empty()
            || self.lent.len() > 0
            || self.nap.until.is_some()
            || self.blocked
            || self.nodes.are_connecting()
            || self.has_news()
    }

    fn poll(&mut self, now: u64, sink: &mut dyn BulkSink) -> usize {
        self.nap.end();
        self.blocked = false;
        self.lose_doomed(now, &mut |peer| sink.on_lost(peer));
        let mut n = 0;
        while let Some(Attached { ring, .. }) = self.attached.as_mut().filter(|_| n < BATCH) {
            if ring.overflows() > 0 {
                log::limited!("events of the rv module were lost: all messages are sent again");
                self.lose_all(now, &mut |peer| sink.on_lost(peer));
                // It is unknown whose events were lost; those that still come are ignored.
                self.forget_writes();
                continue;
            }
            match ring.pop() {
                Ok(Some(event)) => self.on_event(event, now, sink),
                Ok(None) => break,
                Err(errno) => {
                    self.broken = Some(format!("its event ring makes no sense: {errno}"));
                    break;
                }
            }
            n += 1;
        }
        self.look_at_nodes(now, sink);
        if let Some(why) = self.broken.take() {
            self.give_up(&why, now, sink);
        }
        n += self.lose_doomed(now, &mut |peer| sink.on_lost(peer));
        if n > 0 {
            self.nap.ns = NAP_NS;
        }
        n
    }

    /// The module stays with the port that it was attached to, and repairs broken connections itself. So nothing ends
    /// here; but no new connection is made while the endpoint is on another port.
    fn renew(&mut self, _: usize, _: u64, _: &mut dyn BulkSink) {
        self.port.away = !(self.port.is_home)();
    }

    fn forget(&mut self, peer: PeerId, _: u64, _: &mut dyn BulkSink) {
        self.erase(peer);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.nap.timer.fd()
    }

    fn sleep(&mut self) -> bool {
        let events = self.attached.as_ref().is_some_and(|attached| !attached.ring.is_empty());
        if events || self.has_news() {
            return false;
        }
        if self.has_work() {
            self.nap.begin(clock::now_ns());
        }
        true
    }

    fn rearm(&mut self) -> bool {
        self.nap.until.is_some() || self.sleep()
    }

    fn counts(&self) -> BulkCounts {
        self.counts.with(&self.peers)
    }

    fn registrations(&self) -> Option<String> {
        self.statistics()
    }
}

impl Rv {
    /// Fills a remote buffer of the peer. The end is reported if there is a token for that.
    #[allow(unsafe_code)]
    fn write(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        to: &Key,
        (token, now): (Option<u64>, u64),
    ) -> Result<Access, SendError> {
        let known = self.peers.get(peer).filter(|known| known.id == to.connection);
        let (node, full) = match known.map(|known| (known.phase, &known.link)) {
            Some((Phase::Ready, Link { node: Some(node), writes, .. })) => {
                (*node, *writes >= PEER_WRITES || self.writes.len() >= WRITES)
            }
            // The peer is already connected; this side is not yet. A remote key may come before the peer's GO.
            Some((Phase::Agreed | Phase::Joining, _)) => return Err(self.refuse(peer, now)),
            _ => {
                self.counts.stale += 1;
                return Ok(Access::Silent);
            }
        };
        let Some(handle) = self.nodes.handle(&node).filter(|_| !full) else {
            return Err(self.refuse(peer, now));
        };
        let (ranges, parts) = payload.ranges();
        let copy = (parts > 1).then(|| OwnedBuffer::copy_of(payload));
        let [first, ..] = copy.as_ref().map_or(ranges, |copy| copy.segments().ranges().0);
        let range = (first.addr, payload.len() as u64);
        let Some(region) = self.register_range(range.0, range.1, false) else {
            self.counts.unregistered += 1;
            return Err(UNREGISTERED);
        };
        let Some(Attached { module, .. }) = &self.attached else {
            return Ok(Access::Silent);
        };
        let wr_id = self.next_write;
        let place = (to.addr, to.key);
        // SAFETY: the range belongs to the application, which lends it for the operation, or to a copy that is kept
        // until the event. The module pins its pages until then. If the application takes the memory back early, a read
        // still finds those pages, and its bytes are discarded.
        let posted = unsafe { module.write(handle, &region, range, place, to.slot, wr_id) };
        let Err(failure) = posted else {
            self.next_write += 1;
            let id = to.connection;
            self.writes.insert(wr_id, Write { peer, id, token, copy });
            if let Some(known) = self.peers.get_mut(peer) {
                known.link.writes += 1;
                known.link.refused = None;
            }
            self.counts.written += 1;
            self.counts.written_bytes += range.1;
            // The peer's ring may lose the event.
            return Ok(token.map_or(Access::Silent, |_| Access::Unsure));
        };
        self.on_refusal(peer, &node, failure, now)
    }

    /// A write was not posted.
    fn on_refusal(
        &mut self,
        peer: PeerId,
        node: &There,
        failure: Failure,
        now: u64,
    ) -> Result<Access, SendError> {
        match failure.remedy() {
            Remedy::Later | Remedy::Evict => return Err(self.refuse(peer, now)),
            Remedy::Connection => self.nodes.bury(node, failure),
            Remedy::Module => drop(self.judge(failure)),
            Remedy::Mistake => self.peers.doom(peer),
        }
        self.tell(failure.to_string());
        self.blocked = true;
        Ok(Access::Silent)
    }

    /// Whether there are messages to send or connections to end.
    fn has_news(&self) -> bool {
        self.peers.has_news() || self.nodes.have_dead() || self.broken.is_some()
    }
}

impl Drop for Rv {
    /// Evicts all keys: a forked child may hold a copy of the descriptor, which would keep them valid.
    fn drop(&mut self) {
        for peer in self.peers.peers(|_| true) {
            self.end(peer);
        }
    }
}
