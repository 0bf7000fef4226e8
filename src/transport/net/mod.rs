//! Peers on other hosts: the reliable state machine over a link that carries datagrams.

pub(crate) mod agreement;
mod background;
pub(crate) mod bulk;
pub(crate) mod config;
mod core;
mod ending;
pub(crate) mod link;
pub(crate) mod neighbours;
pub(crate) mod network;
pub(crate) mod reliable;
pub(crate) mod rv;
mod shared;
pub(crate) mod stream;
pub(crate) mod udp;
pub(crate) mod verbs;

use self::background::Background;
use self::core::{Core, Event};
use super::peers::PeerTable;
use super::{
    Access, Address, BCOPY_LEAST, Caps, Contact, Departure, ELSEWHERE, Handler, Head, LaneCaps,
    LaneId, Lanes, LookedAt, MAX_HEADER, Mark, Messages, Mode, OneSided, Opening, Pack,
    PacketCounts, PeerCounts, PeerId, Prepared, Purpose, Put, Registered, Remote, RemoteKey,
    SendError, Sharing, Source, StreamEnd, Streaming, Transport,
};
use crate::config::Config;
use crate::memory::{Segment, SegmentList};
use crate::sys::biased::{Held, Owner, visited};
use crate::sys::cuda::Cuda;
use crate::sys::late_set::LateSet;
use crate::sys::net::{Nic, interfaces};
use crate::sys::process::Home;
use crate::sys::sock_diag::{PortHolder, udp_port_holders};
use crate::sys::{Errno, clock, process, spare};
use crate::telemetry::log;
use crate::transport::JobKey;
use agreement::message::{Message, Way};
use bulk::{Bulk, BulkSink, What};
use link::Link;
use neighbours::{Neighbours, Standing};
use reliable::{Reliable, Settings, Sink};
use shared::Shared;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use stream::{StreamSink, Streams};
use udp::UdpLink;
use verbs::HybridLink;
use verbs::config::{RdmaSettings, ReadPolicy};

/// Longest payload of one message that is split over packets at once, bytes.
const BCOPY_MAX: usize = reliable::MESSAGE_MAX;
const _: () = assert!(BCOPY_MAX >= BCOPY_LEAST);
/// Unsolicited bytes of a long message, which are sent before the receiver answers: about what is in flight until then.
const PUSH_MAX: usize = 256 * 1024;
/// Shortest message that goes by stream, bytes. Below it the system calls for a stream cost more than the packets.
const STREAM_MIN: usize = 32 * 1024;
/// The lane for bulk: the device's, or that of the kernel's rv module.
const LANE: LaneId = LaneId::of(bulk::key::KINDS);
/// A short RDMA Write and its completion, nanoseconds, and the rate of a port of 100 Gb/s, bytes per microsecond.
const LANE_NS: u32 = 3_000;
const LANE_RATE: u32 = 12_000;
/// Shortest direct RMA read and write that are left to the device, bytes: a datagram does a shorter write sooner.
const READ_MIN: usize = 1;
const WRITE_MIN: usize = 2048;
/// Bytes of a region whose key is advertised at a time: registering them takes some milliseconds.
const REGISTER_MAX: usize = 32 << 20;
/// Bytes of the header of a fragment (PROTOCOL.md §3).
const FRAGMENT_HEADER: usize = 24;
/// A PUT into a remote buffer, or a read of at least `LONG_READ` bytes, that takes longer than this has held up packets
/// to send, nanoseconds.
const LONG_NS: u64 = 100_000;
const LONG_READ: usize = 16 * 1024;
/// Polls without traffic after which the socket is polled only now and then.
const COOLING: u32 = 4096;
/// Before that, while messages arrive by other paths, one in this many polls checks the socket.
const BUSY_SHARE: u32 = 8;
/// While messages arrive through the device, only one turn in this time makes full progress, nanoseconds. Nothing else
/// is urgent then, and full progress costs several times as much as a fast poll of the device.
const WHOLE_NS: u64 = 100_000;
/// How long the processor's counter is measured to learn its frequency, nanoseconds.
const MEASURE_NS: u64 = 20_000;
/// Most messages that one poll hands out of those that arrived before.
const BATCH: usize = 256;
/// Bytes that a packet of the largest size takes in the socket's buffer beside its own: the kernel also counts its
/// structures.
const PACKET_COST: usize = 1024;

/// The settings of an endpoint's network transport.
#[derive(Debug)]
pub(crate) struct NetSettings {
    pub(crate) key: JobKey,
    /// The source of the key.
    pub(crate) key_source: Source,
    /// FI_UDRV_PEER_TIMEOUT, seconds.
    pub(crate) peer_timeout_s: u64,
    /// FI_UDRV_NET_BUFFER, bytes.
    pub(crate) buffer_bytes: usize,
    /// FI_UDRV_STREAMS.
    pub(crate) streams: usize,
    /// The devices beside the socket.
    pub(crate) rdma: RdmaSettings,
}

impl NetSettings {
    /// Those of the state machine. `window`: packets that the link's buffer holds.
    fn of_machine(
        &self,
        me: Address,
        (datagram_max, direct_max): (usize, usize),
        window: usize,
        features: u32,
    ) -> Settings {
        let mut seed = [0; 16];
        let (low, high) = seed.split_at_mut(8);
        low.copy_from_slice(&process::random_u64().to_le_bytes());
        high.copy_from_slice(&process::random_u64().to_le_bytes());
        Settings {
            life: process::random_u64() | 1,
            address: me,
            key: self.key,
            key_source: self.key_source,
            datagram_max,
            direct_max,
            peer_timeout_ns: self.peer_timeout_s.saturating_mul(1_000_000_000),
            buffer_bytes: self.buffer_bytes,
            receive_window: u32::try_from(window).unwrap_or(u32::MAX),
            features,
            first_psn: 0,
            seed,
        }
    }
}

/// Maps the state machine's peer numbers to the endpoint's, and back.
#[derive(Debug, Default)]
struct Numbers {
    /// By the endpoint's number: the state machine's number, plus one.
    inner: Vec<u32>,
    /// By the state machine's number: the endpoint's number, plus one.
    outer: Vec<u32>,
}

impl Numbers {
    fn join(&mut self, outer: PeerId, inner: PeerId) {
        for (list, from, to) in [(&mut self.inner, outer, inner), (&mut self.outer, inner, outer)] {
            if list.len() <= from.index() {
                list.resize(from.index() + 1, 0);
            }
            if let Some(slot) = list.get_mut(from.index()) {
                *slot = to.0 + 1;
            }
        }
    }

    #[inline]
    fn inner(&self, peer: PeerId) -> Option<PeerId> {
        self.inner.get(peer.index())?.checked_sub(1).map(PeerId)
    }

    #[inline]
    fn outer(&self, peer: PeerId) -> Option<PeerId> {
        self.outer.get(peer.index())?.checked_sub(1).map(PeerId)
    }
}

/// The network transport of one endpoint.
#[derive(Debug)]
pub(crate) struct Net {
    core: Owner<Core>,
    shared: Arc<Shared>,
    background: Option<Background>,
    numbers: Numbers,
    /// `None`: FI_UDRV_STREAMS=0.
    streams: Option<Streams>,
    /// `None`: there is no device, or it may not use the application's memory.
    bulk: Option<Box<dyn Bulk>>,
    /// One-sided operations were queued: the bulk path must be flushed.
    reached: bool,
    /// Shortest message that is worth a stream or a PUT rendezvous; `None`: as measured.
    bulk_min: Option<usize>,
    /// Receivers may read a part of a message (GET rendezvous): FI_UDRV_RDMA_READ is not off.
    offers: bool,
    /// This host's addresses, once they were looked up.
    here: Option<Vec<IpAddr>>,
    /// The last move of each port of the device that the bulk path knows of.
    moves: Vec<u64>,
    me: Address,
    armed: bool,
    /// This endpoint had contact with a peer.
    used: bool,
    rhythm: Rhythm,
    owner: Home,
}

/// The polling budget: how often the socket, the device and the bulk path are polled.
#[derive(Debug, Default)]
struct Rhythm {
    /// Polls left that check the network each time.
    hot: u32,
    /// The bulk path may have work at any poll; otherwise only full progress asks it.
    bulk_hot: bool,
    /// The last turn was a fast poll.
    brief: bool,
    /// The device is emulated by kernel threads.
    threads: bool,
    /// When full progress was last made, in ticks of the processor's counter, and the ticks until the next time; 0: not
    /// measured yet, or full progress is due in the next turn.
    whole_at: u64,
    span: u64,
    /// Counter, and clock in nanoseconds, at the beginning of that measurement.
    measured: (u64, u64),
}

impl Rhythm {
    /// A turn begins. True: a fast poll suffices.
    #[inline]
    fn begin(&mut self, ticks: impl FnOnce() -> u64) -> bool {
        let passed = || ticks().wrapping_sub(self.whole_at);
        self.brief = self.hot > 0 && self.span > 0 && passed() < self.span;
        self.brief
    }

    /// The turn makes full progress; `now` is in nanoseconds. Without a `device` every turn does.
    #[inline]
    fn begin_whole(&mut self, now: u64, ticks: u64, device: bool) {
        self.brief = false;
        if !device {
            self.span = 0;
            return;
        }
        self.whole_at = ticks;
        let (ticks_then, then) = self.measured;
        let (passed, ns) = (ticks.wrapping_sub(ticks_then), now.saturating_sub(then));
        if ns >= MEASURE_NS {
            self.measured = (ticks, now);
            // No processor has a faster counter.
            self.span = (passed.saturating_mul(WHOLE_NS) / ns).min(8 * WHOLE_NS);
        }
    }

    /// A message has arrived or was sent, and `core` knows all about it.
    #[inline]
    fn on_traffic(&mut self, shared: &Shared, core: &Core) {
        self.hot = COOLING;
        shared.note_traffic(core);
    }
}

/// The endpoint as the reliable state machine sees it.
struct Upwards<'a, H> {
    /// The state machine's peers.
    inner: &'a mut PeerTable,
    neighbours: &'a Neighbours,
    /// The endpoint's peers.
    outer: &'a mut PeerTable,
    numbers: &'a mut Numbers,
    streams: &'a mut Option<Streams>,
    bulk: &'a mut Option<Box<dyn Bulk>>,
    /// Streams or the bulk path have received something.
    beside: &'a mut bool,
    now: u64,
    used: &'a mut bool,
    handler: &'a mut H,
}

impl<H: Handler> Upwards<'_, H> {
    /// Passes on what was kept.
    fn on_event(&mut self, event: Event) {
        match event {
            Event::Connected(peer, address) => self.on_connected(peer, &address),
            Event::Message { peer, header, header_len, payload } => {
                let header = header.get(..usize::from(header_len)).unwrap_or(&[]);
                self.on_message(peer, header, &payload);
            }
            Event::Acknowledged(peer, upto) => self.on_acknowledged(peer, upto),
            Event::Departure(peer, departure) => self.on_departure(peer, departure),
        }
    }
}

impl<H: Handler> Sink for Upwards<'_, H> {
    fn peer_of(&mut self, address: &Address) -> Option<PeerId> {
        self.inner.intern(address)
    }

    fn find(&self, address: &Address) -> Option<PeerId> {
        self.inner.find(address)
    }

    fn forget(&mut self, inner: PeerId) {
        self.inner.release(inner);
    }

    fn standing(&self, address: &Address) -> Standing {
        self.neighbours.peer(address)
    }

    fn has_room(&mut self, address: &Address) -> bool {
        self.outer.intern(address).is_some()
    }

    fn on_connected(&mut self, inner: PeerId, address: &Address) {
        let Some(peer) = self.outer.intern(address) else { return };
        self.numbers.join(peer, inner);
        *self.used = true;
        self.handler.on_peer(peer, address);
    }

    #[inline]
    fn on_message(&mut self, inner: PeerId, header: &[u8], payload: &[u8]) {
        if let Some(way) = Way::byte_of(header) {
            return self.on_control(inner, way, header);
        }
        // The connection ends in the turn.
        *self.beside |= !await_writes(self.bulk, inner);
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_message(peer, header, payload);
        }
    }

    fn on_acknowledged(&mut self, inner: PeerId, upto: Mark) {
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_acknowledged(peer, upto);
        }
    }

    fn on_departure(&mut self, inner: PeerId, departure: Departure) {
        *self.beside = true;
        if let Some(streams) = self.streams {
            streams.forget(inner);
        }
        if let Some(bulk) = self.bulk {
            let mut above = Above { numbers: self.numbers, handler: self.handler };
            bulk.forget(inner, self.now, &mut above);
        }
        let Some(peer) = self.numbers.outer(inner) else { return };
        if let (Departure::Failed(errno), Some(address)) = (departure, self.outer.address(peer)) {
            log::limited!(cause: errno.0, "{address} is gone: {errno}{}", why_gone(errno));
        }
        self.handler.on_departure(peer, departure);
    }

    fn is_owed(&self, inner: PeerId) -> Option<bool> {
        Some(self.numbers.outer(inner).is_some_and(|peer| self.handler.is_owed(peer)))
    }
}

/// What the peer's device has written to memory of GPUs is there when this returns, before a message that the peer has sent
/// behind it (PROTOCOL.md §7.16, rule 2). False: nobody knows, and their connection ends.
#[inline]
fn await_writes(bulk: &mut Option<Box<dyn Bulk>>, inner: PeerId) -> bool {
    match bulk {
        Some(bulk) if Cuda::get().is_some() => bulk.await_writes(inner),
        _ => true,
    }
}

/// What the number does not say: why a peer was given up.
fn why_gone(errno: Errno) -> &'static str {
    match errno.0 {
        libc::ETIMEDOUT => {
            ". It was silent for FI_UDRV_PEER_TIMEOUT seconds: its node is down, its process is stopped, or a firewall or a route keeps its packets from this node"
        }
        libc::EHOSTDOWN => ". Its process has ended, or was restarted",
        libc::ECONNREFUSED => ". No process listens at this address",
        libc::EMSGSIZE => {
            ". It answers, but for FI_UDRV_PEER_TIMEOUT seconds the path has dropped packets of the length that it carried before, and their fragments: FI_UDRV_MTU limits the length"
        }
        libc::EKEYREJECTED => {
            ". It has another job key: give all processes the same FI_UDRV_JOB_KEY or ~/.config/udrv/key"
        }
        _ => "",
    }
}

impl<H: Handler> Upwards<'_, H> {
    /// A message of the peer about a stream, or a connection of its bulk path.
    #[cold]
    fn on_control(&mut self, inner: PeerId, way: u8, message: &[u8]) {
        *self.beside = true;
        let mut above = Above { numbers: self.numbers, handler: self.handler };
        if way == Way::Stream as u8 {
            let over = Message::decode(message, Way::Stream);
            if let (Some(Message::Over { connection, .. }), Some(streams)) =
                (over, &mut self.streams)
            {
                streams.on_broken(inner, connection, &mut above);
            }
        } else if let Some(bulk) = self.bulk {
            bulk.on_control(inner, message, self.now, &mut above);
        }
    }
}

/// The endpoint as streams and the bulk path see it.
struct Above<'a, H> {
    numbers: &'a Numbers,
    handler: &'a mut H,
}

impl<H: Handler> StreamSink for Above<'_, H> {
    fn place(&mut self, inner: PeerId, header: &[u8], len: usize) -> Option<SegmentList> {
        self.handler.place(self.numbers.outer(inner)?, header, len)
    }

    fn on_placed(&mut self, inner: PeerId, header: &[u8], len: usize) {
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_placed(peer, header, len);
        }
    }

    fn on_message(&mut self, inner: PeerId, header: &[u8], payload: &[u8]) {
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_message(peer, header, payload);
        }
    }

    fn on_lost(&mut self, inner: PeerId, end: StreamEnd) {
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_stream_lost(peer, end);
        }
    }
}

/// The endpoint as streams see it while there is a bulk path.
struct BesideBulk<'a, 'b, H> {
    bulk: &'a mut Option<Box<dyn Bulk>>,
    above: &'a mut Above<'b, H>,
}

impl<H: Handler> StreamSink for BesideBulk<'_, '_, H> {
    fn place(&mut self, inner: PeerId, header: &[u8], len: usize) -> Option<SegmentList> {
        self.above.place(inner, header, len)
    }

    fn on_placed(&mut self, inner: PeerId, header: &[u8], len: usize) {
        await_writes(self.bulk, inner);
        self.above.on_placed(inner, header, len);
    }

    fn on_message(&mut self, inner: PeerId, header: &[u8], payload: &[u8]) {
        await_writes(self.bulk, inner);
        self.above.on_message(inner, header, payload);
    }

    fn on_lost(&mut self, inner: PeerId, end: StreamEnd) {
        StreamSink::on_lost(self.above, inner, end);
    }
}

impl<H: Handler> BulkSink for Above<'_, H> {
    fn on_notify(&mut self, inner: PeerId, token: u64) {
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_notify(peer, token);
        }
    }

    fn on_done(&mut self, inner: PeerId, token: u64) {
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_done(peer, token);
        }
    }

    fn on_lost(&mut self, inner: PeerId) {
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_lane_lost(peer, LANE);
        }
    }

    fn on_key_void(&mut self, inner: PeerId, key: &RemoteKey) {
        if let Some(peer) = self.numbers.outer(inner) {
            self.handler.on_key_void(peer, key);
        }
    }
}

/// A forked child wants a lock that a thread of its parent held.
const ORPHANED: SendError = SendError::Unreachable(Errno(libc::EOWNERDEAD));

/// The layers below an endpoint: its datagrams and its bulk path.
struct Below {
    link: Box<HybridLink>,
    bulk: Option<Box<dyn Bulk>>,
}

impl Net {
    /// The transport of the endpoint `me` over `link`, and over a device where there is one. `peers` knows this host
    /// and no other peer yet. Errors: EMFILE, ENFILE, ENOMEM, EAGAIN (no thread), ENODEV (no device, but one is
    /// required).
    #[inline(never)]
    fn with(
        me: Address,
        link: UdpLink,
        peers: PeerTable,
        settings: NetSettings,
    ) -> Result<Self, Errno> {
        let below = Self::beside_a_device(me, link, &settings)?;
        Self::over(me, below, peers, settings)
    }

    /// A function of its own, like the next one: threads of applications have small stacks, and the objects that each
    /// of the two builds take a large part of one.
    #[inline(never)]
    fn beside_a_device(me: Address, link: UdpLink, settings: &NetSettings) -> Result<Below, Errno> {
        let (rdma, bulk) = verbs::open(&settings.rdma, &me, &settings.key)?.unzip();
        Ok(Below { link: Box::new(HybridLink::new(link, rdma)), bulk: bulk.flatten() })
    }

    #[inline(never)]
    fn over(
        me: Address,
        below: Below,
        peers: PeerTable,
        settings: NetSettings,
    ) -> Result<Self, Errno> {
        let Below { link, bulk } = below;
        let mut link = *link;
        let moves = link.moves().collect();
        let datagram_max = link.datagram_max();
        let bound = link.local_addr().unwrap_or(me.0);
        let keyed = settings.key_source.is_given();
        let neighbours = Arc::new(Neighbours::new(&Address(bound), peers.host().clone(), keyed));
        let streams = match settings.streams {
            0 => None,
            limit => Some(Streams::open(bound, limit, neighbours.clone())?),
        };
        let listens = streams.as_ref().is_some_and(Streams::listens);
        let window = link.receive_window(datagram_max + PACKET_COST);
        let features = reliable::packet::ATOMICS
            | reliable::packet::HEADER_TAGS
            | reliable::packet::COLLECTIVES
            | if listens { reliable::packet::STREAMS } else { 0 }
            | if bulk.is_some() { reliable::packet::WINDOWS } else { 0 };
        let lengths = (datagram_max, link.direct_max());
        let of_machine = settings.of_machine(me, lengths, window, features);
        let packet_max = of_machine.packet_max();
        let mut machine = Reliable::new(of_machine, clock::now_ns());
        if let Some(pool) = link.pool(packet_max) {
            machine.lend(pool);
        }
        let links = link.watched()?;
        let (core, visitor) = visited(Core::new(machine, link, peers, neighbours));
        let shared = Arc::new(Shared::new());
        shared.present(clock::now_ns());
        let background =
            Background::start(&shared, visitor, links).inspect_err(without_thread).ok();
        let numbers = Numbers::default();
        let owner = Home::here();
        Ok(Self {
            core,
            shared,
            background,
            numbers,
            streams,
            bulk,
            reached: false,
            bulk_min: None,
            offers: settings.rdma.read != ReadPolicy::Off,
            here: None,
            moves,
            me,
            armed: false,
            used: false,
            rhythm: Rhythm::default(),
            owner,
        })
    }

    /// Adds the descriptors that signal work to `epoll`.
    pub(crate) fn watch(&self, epoll: &Arc<LateSet>, token: u64) -> Result<(), Errno> {
        let core = self.core.enter().ok_or(Errno(libc::EOWNERDEAD))?;
        for fd in core.link.fds() {
            epoll.add_lasting(fd, token)?;
        }
        if let Some(streams) = &self.streams {
            streams.watch(epoll, token)?;
        }
        if let Some(bulk) = &self.bulk {
            epoll.add_lasting(bulk.fd(), token)?;
        }
        self.shared.join(epoll, token);
        Ok(())
    }

    /// Starts a connection to `peer`, unless there is one. Errors: EPERM for another user's process on this host;
    /// `Again` before the application was told that the last connection has ended.
    fn begin(&mut self, peer: PeerId, address: &Address) -> Result<(), SendError> {
        let mut core = self.core.enter().ok_or(ORPHANED)?;
        if matches!(core.neighbours.peer(address), Standing::Stranger(_) | Standing::Unknown) {
            return Err(SendError::Unreachable(Errno(libc::EPERM)));
        }
        if core.link.is_given_up(address) {
            return Err(SendError::Unreachable(Errno(libc::ENODEV)));
        }
        let inner = core.peers.intern(address).ok_or(SendError::Again)?;
        if core.is_departing(inner) {
            return Err(SendError::Again);
        }
        self.numbers.join(peer, inner);
        self.used = true;
        core.machine.connect(inner, address, clock::now_ns())?;
        self.shared.note_traffic(&core);
        Ok(())
    }

    /// The address at which the network reaches `address` of this host. Shared memory compares only the port, but a UDP
    /// socket is bound to one address. `None`: this user has no such port. Errors: the kernel does not tell.
    fn find_here(address: &Address) -> Result<Option<Address>, Errno> {
        let all = port_holders(address.port())?;
        let me = process::effective_uid();
        let ours = || all.iter().filter(|one| one.uid == me).map(|one| one.ip);
        let finds = |ip: IpAddr| ip.is_unspecified() || ip == address.0.ip();
        let mut at = *address;
        if !ours().any(finds) {
            let Some(ip) = ours().find(|ip| ip.is_ipv4() == at.0.is_ipv4()) else {
                return Ok(None);
            };
            at.0.set_ip(ip);
        }
        Ok(Some(at))
    }

    /// See [`Messages::send`].
    fn send_packed(
        &mut self,
        peer: PeerId,
        mode: Mode,
        header: &[u8],
        len: usize,
        pack: &mut Pack<'_>,
    ) -> Result<(), SendError> {
        debug_assert!(header.len() <= MAX_HEADER);
        match mode {
            Mode::Late => return self.send_late(peer, header),
            Mode::Announcement if self.leave_at_once(peer, header, 0, |_, _| ()) => return Ok(()),
            Mode::Announcement | Mode::Short | Mode::Bulk | Mode::Fragment => {}
        }
        let later = mode == Mode::Fragment;
        let (inner, mut core) = reach(&self.numbers, &self.core, peer)?;
        let Core { machine, link, .. } = &mut *core;
        // A message longer than a datagram can be sent at once.
        let long = !later && len > machine.packet_room(inner, header.len());
        if long && machine.send_at_once(inner, header, len, &mut *pack, clock::now_ns, link) {
            self.rhythm.on_traffic(&self.shared, &core);
            return Ok(());
        }
        let now = clock::now_ns();
        machine.send(inner, header, len, pack, now)?;
        if !later {
            machine.poll_transmit(now, link);
        }
        self.rhythm.on_traffic(&self.shared, &core);
        Ok(())
    }

    fn send_late(&mut self, peer: PeerId, header: &[u8]) -> Result<(), SendError> {
        let (inner, mut core) = reach(&self.numbers, &self.core, peer)?;
        core.machine.send_with_others(inner, header, clock::now_ns())?;
        self.rhythm.on_traffic(&self.shared, &core);
        Ok(())
    }

    #[inline]
    fn leave_at_once(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> bool {
        let Ok((inner, mut core)) = reach(&self.numbers, &self.core, peer) else { return false };
        let Core { machine, link, .. } = &mut *core;
        if !machine.send_at_once(inner, header, len, pack, clock::now_ns, link) {
            return false;
        }
        self.rhythm.on_traffic(&self.shared, &core);
        true
    }

    /// Requests begun at `began`, nanoseconds, were given to the device, which may have carried them out meanwhile.
    fn on_posted(&mut self, began: u64) {
        let now = clock::now_ns();
        if now.saturating_sub(began) > LONG_NS {
            // An application that moves bytes for long is not absent.
            self.shared.present(now);
            if let Some(mut core) = self.core.enter() {
                core.machine.on_return(now);
            }
        }
    }

    /// Whether the bulk path has something to do.
    #[inline]
    fn bulk_has_work(&mut self) -> bool {
        if self.rhythm.bulk_hot {
            self.rhythm.bulk_hot = self.bulk.as_ref().is_some_and(|bulk| bulk.has_work());
        }
        self.rhythm.bulk_hot
    }

    /// The bulk path's part of a turn. `None`: it has nothing to do.
    fn bulk_turn(&mut self, handler: &mut impl Handler) -> Option<usize> {
        let Self { core, bulk, numbers, rhythm, shared, .. } = self;
        let mut core = core.enter()?;
        let bulk = bulk.as_mut()?;
        let n =
            poll_bulk(bulk.as_mut(), &mut core, clock::now_ns(), &mut Above { numbers, handler });
        if n > 0 {
            rhythm.on_traffic(shared, &core);
        }
        rhythm.hot = COOLING;
        Some(n)
    }

    /// A fast poll: takes messages from the device only; the rest waits for full progress. `None`: that is due now.
    #[inline]
    fn brief_turn(&mut self, outer: &mut PeerTable, handler: &mut impl Handler) -> Option<usize> {
        let Self { core, shared, numbers, streams, bulk, rhythm, used, .. } = self;
        let mut core = core.enter()?;
        if !core.is_calm() {
            return None;
        }
        core.machine.on_poll();
        if !core.link.has_arrived() {
            // There is time for work that was less urgent than the last message.
            let more = core.machine.has_put_off() && core.machine.catch_up(clock::now_ns());
            return if more { None } else { Some(0) };
        }
        let now = clock::now_ns();
        shared.present(now);
        let beside = &mut rhythm.bulk_hot;
        let n = core.take_arrived(now, |inner, neighbours| Upwards {
            inner,
            neighbours,
            outer,
            numbers,
            streams,
            bulk,
            beside,
            now,
            used,
            handler,
        });
        rhythm.on_traffic(shared, &core);
        Some(n)
    }

    #[inline(never)]
    fn whole_turn(&mut self, outer: &mut PeerTable, handler: &mut impl Handler) -> usize {
        let Some(mut core) = self.core.enter() else { return 0 };
        core.machine.on_poll();
        let now = clock::now_ns();
        self.rhythm.begin_whole(now, clock::ticks(), core.link.has_device());
        self.rhythm.threads = core.link.is_threads();
        self.shared.present(now);
        let (numbers, used) = (&mut self.numbers, &mut self.used);
        let (mut n, mut beside) = (0, false);
        // New messages come after the ones that were kept.
        while let Some(event) = if n < BATCH { core.take_known(outer, now) } else { None } {
            let Core { peers: inner, neighbours, .. } = &mut *core;
            let mut sink = Upwards {
                inner,
                neighbours,
                outer,
                numbers,
                streams: &mut self.streams,
                bulk: &mut self.bulk,
                beside: &mut beside,
                now,
                used,
                handler,
            };
            sink.on_event(event);
            n += 1;
        }
        if core.has_events() {
            let _ = self.bulk.as_mut().map(|bulk| say(bulk.as_mut(), &mut core.machine, now));
            return n;
        }
        let (streams, bulk) = (&mut self.streams, &mut self.bulk);
        n += core.turn(now, |inner, neighbours| Upwards {
            inner,
            neighbours,
            outer,
            numbers,
            streams,
            bulk,
            beside: &mut beside,
            now,
            used,
            handler,
        });
        let Self { streams, bulk, moves, rhythm, .. } = self;
        n += beside_turn(
            streams,
            bulk,
            moves,
            rhythm,
            &mut core,
            now,
            &mut Above { numbers, handler },
        );
        if n > 0 {
            self.rhythm.on_traffic(&self.shared, &core);
        }
        n
    }

    /// A turn of whatever is due.
    #[inline]
    fn one_turn(&mut self, outer: &mut PeerTable, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        if self.rhythm.begin(clock::ticks) && !self.streams.as_ref().is_some_and(Streams::is_hot) {
            let bulk_hot = self.bulk_has_work();
            match (self.brief_turn(outer, handler), bulk_hot) {
                (Some(taken), true) => {
                    if let Some(more) = self.bulk_turn(handler) {
                        return taken + more;
                    }
                    n = taken;
                }
                // Replies of streams and the bulk path to what they received are sent first.
                (Some(taken), false) if self.rhythm.bulk_hot => n = taken,
                (Some(taken), false) => return taken,
                (None, _) => {}
            }
        }
        n + self.whole_turn(outer, handler)
    }

    /// While another thread sleeps on the descriptors, a turn was taken, which may have taken what was to wake that one, or a
    /// request was given to the device.
    #[cold]
    fn rearm(&mut self) {
        let Some(mut core) = self.core.enter() else { return };
        let rests = !core.has_events()
            && core.link.rearm()
            && self.bulk.as_mut().is_none_or(|bulk| bulk.rearm());
        if rests {
            self.shared.note_traffic(&core);
        } else {
            self.shared.rouse();
        }
    }
}

/// What a message to `peer` needs: its number in the state machine, and the part that has it. Errors: ENOTCONN; `Again`
/// before the application was told that the connection has ended which it knows.
#[inline]
fn reach<'a>(
    numbers: &Numbers,
    core: &'a Owner<Core>,
    peer: PeerId,
) -> Result<(PeerId, Held<'a, Core>), SendError> {
    let unknown = SendError::Unreachable(Errno(libc::ENOTCONN));
    let inner = numbers.inner(peer).ok_or(unknown)?;
    let core = core.enter().ok_or(ORPHANED)?;
    if core.is_departing(inner) { Err(SendError::Again) } else { Ok((inner, core)) }
}

/// Whether this peer of the state machine may be connected to through a device.
fn may_connect(core: &mut Core, inner: PeerId) -> bool {
    let Some(address) = core.peers.address(inner) else { return false };
    core.machine.takes_windows(inner) && core.link.may_connect(&address)
}

/// The sockets that hold a UDP port on this node. Errors: the kernel does not tell.
fn port_holders(port: u16) -> Result<Vec<PortHolder>, Errno> {
    let holders = || udp_port_holders(port);
    match holders() {
        Err(e) if e.is_shortage() => spare::lend(holders),
        other => other,
    }
}

impl Messages for Net {
    fn caps(&self, peer: PeerId) -> Caps {
        let inner = self.numbers.inner(peer);
        let (short_max, features) = match (inner, self.core.enter()) {
            (Some(inner), Some(core)) => {
                (core.machine.packet_room(inner, 0), core.machine.features_of(inner))
            }
            _ => (0, None),
        };
        Caps {
            short_max,
            bcopy_max: BCOPY_MAX,
            fragment_max: short_max.saturating_sub(FRAGMENT_HEADER),
            push_max: PUSH_MAX,
            stream_max: if self.streams.is_some() { stream::PAYLOAD_MAX } else { 0 },
            stream_min: self.bulk_min.unwrap_or(STREAM_MIN),
            atomics: features.map(|all| all & reliable::packet::ATOMICS != 0),
            collectives: features.map(|all| all & reliable::packet::COLLECTIVES != 0),
            announces_room: true,
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
        self.send_packed(peer, mode, header, len, &mut pack)
    }

    #[inline]
    fn send_at_once(&mut self, peer: PeerId, head: &Head, payload: Segment) -> bool {
        let mut header = [0; Head::WORDS * 8];
        for (to, word) in header.chunks_exact_mut(8).zip(head.words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let header = header.get(..head.len).unwrap_or(&[]);
        let pack = |at: usize, to: &mut [u8]| payload.part(at, to.len()).copy_out(to);
        self.leave_at_once(peer, header, payload.len(), pack)
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.reached) {
            self.bulk.iter_mut().for_each(|bulk| bulk.flush());
        }
        let Some(mut core) = self.core.enter() else { return };
        if core.machine.has_ready() {
            let Core { machine, link, .. } = &mut *core;
            machine.poll_transmit(clock::now_ns(), link);
            self.shared.note_traffic(&core);
        }
    }

    fn track(&mut self, peer: PeerId) -> bool {
        let Some(inner) = self.numbers.inner(peer) else { return false };
        if let Some(mut core) = self.core.enter() {
            core.machine.ask_soon(inner);
        }
        true
    }

    fn tracked(&self, peer: PeerId) -> Option<Mark> {
        self.core.enter()?.machine.last_sent(self.numbers.inner(peer)?)
    }

    fn acknowledged(&mut self, peer: PeerId) -> Option<Mark> {
        let inner = self.numbers.inner(peer)?;
        self.core.enter()?.machine.acknowledged(inner, clock::now_ns)
    }

    fn under_pressure(&self, peer: PeerId) -> bool {
        let Some(inner) = self.numbers.inner(peer) else { return false };
        self.core.enter().is_some_and(|core| core.machine.under_pressure(inner))
    }

    fn set_pressure(&mut self, on: bool) {
        if let Some(mut core) = self.core.enter() {
            core.machine.set_pressure(on);
        }
    }
}

impl Net {
    /// Whether the peer of this address is on this host.
    fn is_near(&mut self, address: &Address) -> bool {
        let list = || interfaces().into_iter().map(|interface| interface.ip).collect();
        self.here.get_or_insert_with(list).contains(&address.0.ip())
    }

    /// An access to memory of `peer` by the bulk path.
    fn access(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        at: &Remote,
        what: What,
    ) -> Result<Access, SendError> {
        let none = SendError::Unreachable(Errno(libc::EOPNOTSUPP));
        if at.key == RemoteKey::ADDRESSES {
            return Err(none);
        }
        self.rhythm.bulk_hot = true;
        let (Some(bulk), Some(inner)) = (&mut self.bulk, self.numbers.inner(peer)) else {
            return Err(none);
        };
        let began = clock::now_ns();
        // An emulated device carries the request out meanwhile.
        self.shared.present(began);
        let begun = bulk.access(inner, local, at, what, began);
        let notifies = matches!(what, What::Put(Put { notify: true, .. }));
        self.reached |= !notifies && begun.is_ok();
        if notifies || local.len() >= LONG_READ && begun.is_ok() {
            self.on_posted(began);
        }
        // The thread that sleeps has asked the device for no event, if there was nothing to complete.
        if self.armed {
            self.rearm();
        }
        begun
    }
}

impl OneSided for Net {
    fn lanes(&self, _: PeerId) -> Lanes {
        let Some(bulk) = &self.bulk else { return Lanes::default() };
        let (receive_max, receive_min) = bulk.sizes();
        Lanes::from(LaneCaps {
            receive_max,
            receive_min: self.bulk_min.unwrap_or(receive_min),
            read_min: Some(READ_MIN),
            write_min: Some(WRITE_MIN),
            register_max: REGISTER_MAX,
            device: bulk.takes_gpus(),
            ..LaneCaps::of_host(LANE, LANE_NS, LANE_RATE)
        })
    }

    fn prepare(&mut self, peer: PeerId, _: LaneId) -> Prepared {
        self.rhythm.bulk_hot = true;
        let (Some(bulk), Some(inner)) = (&mut self.bulk, self.numbers.inner(peer)) else {
            return Prepared::No;
        };
        if !self.core.enter().is_some_and(|mut core| may_connect(&mut core, inner)) {
            return Prepared::No;
        }
        self.rhythm.hot = COOLING;
        bulk.lane(inner, clock::now_ns())
    }

    fn takes(&mut self, peer: PeerId, _: LaneId, memory: &SegmentList) -> bool {
        let (Some(bulk), Some(inner)) = (&mut self.bulk, self.numbers.inner(peer)) else {
            return false;
        };
        bulk.takes(inner, memory)
    }

    fn lends(&mut self, peer: PeerId, _: LaneId) -> Prepared {
        let (Some(bulk), Some(inner)) = (&mut self.bulk, self.numbers.inner(peer)) else {
            return Prepared::No;
        };
        self.rhythm.bulk_hot = true;
        bulk.lends(inner, clock::now_ns())
    }

    fn register(
        &mut self,
        peer: PeerId,
        _: LaneId,
        memory: &SegmentList,
        purpose: Purpose,
    ) -> Registered {
        let region = matches!(purpose, Purpose::Region { .. });
        if region && self.prepare(peer, LANE) == Prepared::No
            || purpose == Purpose::Send && !self.offers
        {
            return Registered::No;
        }
        let Some(inner) = self.numbers.inner(peer).filter(|_| self.bulk.is_some()) else {
            return Registered::No;
        };
        self.rhythm.bulk_hot |= purpose != Purpose::Send;
        let address = self.core.enter().and_then(|core| core.peers.address(inner));
        let near = purpose == Purpose::Send && address.is_some_and(|at| self.is_near(&at));
        self.bulk.as_mut().map_or(Registered::No, |bulk| {
            bulk.register(inner, memory, purpose, near, clock::now_ns())
        })
    }

    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey) -> bool {
        self.rhythm.bulk_hot = true;
        if let (Some(bulk), Some(inner)) = (&mut self.bulk, self.numbers.inner(peer)) {
            bulk.invalidate(inner, key);
        }
        false
    }

    fn is_current(&self, peer: PeerId, key: &RemoteKey) -> bool {
        let (Some(bulk), Some(inner)) = (&self.bulk, self.numbers.inner(peer)) else {
            return false;
        };
        bulk.is_current(inner, key)
    }

    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        to: &Remote,
        how: Put,
    ) -> Result<Access, SendError> {
        self.access(peer, local, to, What::Put(how))
    }

    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        from: &Remote,
        token: u64,
    ) -> Result<Access, SendError> {
        self.access(peer, local, from, What::Get(token))
    }

    fn flush_puts(&mut self, peer: PeerId, at: &Remote, token: u64) -> Result<Access, SendError> {
        self.access(peer, &SegmentList::EMPTY, at, What::Flush(token))
    }

    #[inline]
    fn direct_min(&self, _: PeerId, _: &RemoteKey, reads: bool) -> Option<usize> {
        let min = if reads { READ_MIN } else { WRITE_MIN };
        self.bulk.is_some().then_some(min)
    }
}

impl Streaming for Net {
    fn has_stream(&mut self, peer: PeerId) -> bool {
        let (Some(streams), Some(inner)) = (&mut self.streams, self.numbers.inner(peer)) else {
            return false;
        };
        let Some(mut core) = self.core.enter() else { return false };
        let Some(address) = core.peers.address(inner) else { return false };
        // A device places bytes faster than the kernel's TCP, once it is shown to reach the peer and its connection is used.
        let connected = self.bulk.as_ref().is_some_and(|bulk| bulk.is_ready(inner));
        if core.link.sends_direct(&address) || connected && core.link.may_connect(&address) {
            return false;
        }
        streams.is_ready(&core.machine, inner, &address, clock::now_ns())
    }

    fn send_by_stream(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &SegmentList,
    ) -> Result<(), SendError> {
        let Some(streams) = &mut self.streams else {
            return Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP)));
        };
        let (inner, core) = reach(&self.numbers, &self.core, peer)?;
        streams.send(&core.machine, inner, header, payload, clock::now_ns())
    }

    fn attend(&mut self) {
        if let Some(streams) = &mut self.streams {
            streams.attend();
        }
    }
}

impl Sharing for Net {}

impl Transport for Net {
    const NAME: &'static str = "network";
    const TWO_WAY: bool = true;
    const KEYS: &'static [u8] = bulk::key::KINDS;

    fn with_device(config: &Config, name: &str) -> Option<Result<Config, &'static str>> {
        verbs::with_device(config, name)
    }

    fn addresses_of(name: &str) -> Vec<IpAddr> {
        verbs::addresses_of(name)
    }

    fn device_at(config: &Config, ip: IpAddr) -> Result<Option<Nic>, &'static str> {
        if !config.net.on {
            return Ok(None);
        }
        verbs::device_at(&config.net.rdma, ip).map_err(|_| "FI_UDRV_RDMA")
    }

    fn open(opening: &mut Opening<'_>) -> Result<Option<Self>, Errno> {
        let config = &opening.config.net;
        let Some(port) = (if config.on { opening.port.take() } else { None }) else {
            return Ok(None);
        };
        let link = UdpLink::over(port, config.mtu)?;
        let settings = NetSettings {
            key: opening.key,
            key_source: opening.key_source,
            peer_timeout_s: config.peer_timeout_s,
            buffer_bytes: config.buffer_bytes,
            streams: config.streams,
            rdma: config.rdma.clone(),
        };
        let peers = PeerTable::new(opening.host.clone());
        let mut net = Self::with(opening.me, link, peers, settings)?;
        net.bulk_min = Some(config.bulk_min);
        net.watch(opening.epoll, ELSEWHERE)?;
        Ok(Some(net))
    }

    fn connect(
        &mut self,
        peer: PeerId,
        address: &Address,
        missing: bool,
    ) -> Result<Contact, SendError> {
        let near = self.core.enter().ok_or(ORPHANED)?.peers.host().owns(address.0.ip());
        let at = match (near, missing) {
            (false, _) => *address,
            (true, false) => Self::find_here(address).ok().flatten().unwrap_or(*address),
            // Where another process has taken an endpoint's shared-memory names, only its port identifies it.
            (true, true) => match Self::find_here(address) {
                Ok(Some(at)) => at,
                Ok(None) | Err(_) => return Ok(Contact::Missing(Errno(libc::ECONNREFUSED))),
            },
        };
        self.begin(peer, &at).map(|()| Contact::Linked)
    }

    #[inline]
    fn is_connected(&self, peer: PeerId) -> bool {
        let Some(inner) = self.numbers.inner(peer) else { return false };
        self.core.enter().is_some_and(|core| core.machine.is_connected(inner))
    }

    fn hears(&self, peer: PeerId) -> bool {
        let Some(inner) = self.numbers.inner(peer) else { return false };
        self.core.enter().is_some_and(|core| core.machine.is_met(inner))
    }

    /// Whether there was traffic recently, so that every poll should take a turn. While the node is busy (not `still`),
    /// only some polls do, because checking a socket takes long.
    #[inline]
    fn has_its_turn(&mut self, still: bool) -> bool {
        if self.rhythm.hot == 0 {
            return false;
        }
        self.rhythm.hot -= 1;
        still || self.rhythm.hot % BUSY_SHARE == 0
    }

    #[inline]
    fn turn(&mut self, outer: &mut PeerTable, handler: &mut impl Handler) -> usize {
        let n = self.one_turn(outer, handler);
        if self.armed {
            self.rearm();
        }
        n
    }

    #[inline]
    fn looked_at(&self) -> LookedAt {
        match (self.rhythm.brief, self.rhythm.threads) {
            (false, _) => LookedAt::Everything,
            (true, false) => LookedAt::Device,
            (true, true) => LookedAt::Threads,
        }
    }

    fn every_ns(still: bool, busy: bool) -> u64 {
        if still && !busy { 10_000 } else { 100_000 }
    }

    #[inline]
    fn has_traffic(&self) -> bool {
        self.rhythm.hot > 0
    }

    fn hasten(&mut self) {
        self.rhythm.span = 0;
        self.rhythm.hot = self.rhythm.hot.max(1);
    }

    fn packet_counts(&self) -> PacketCounts {
        let Some(core) = self.core.enter() else { return PacketCounts::default() };
        let counts = core.machine.counts();
        PacketCounts {
            sent: counts.data_sent,
            received: counts.data_received,
            retransmitted: counts.retransmitted,
            timeouts: counts.timeouts,
            duplicates: counts.duplicates,
            no_room: counts.no_room,
            forged: counts.forged,
            stray: counts.stray,
            connected: core.machine.connections() as u64,
        }
    }

    fn cache_counts(&self) -> (u64, u64) {
        let counts = self.bulk.as_ref().map(|bulk| bulk.counts()).unwrap_or_default();
        (counts.cache_hits, counts.cache_misses)
    }

    fn peer_counts(&self, peer: PeerId) -> PeerCounts {
        let inner = self.numbers.inner(peer);
        let known = inner.and_then(|inner| self.core.enter()?.machine.peer_counts(inner));
        known.unwrap_or_default()
    }

    fn shortfall(&self, _: PeerId, _: &Address, _: bool) -> &'static str {
        let device = self.core.enter().is_some_and(|core| core.link.rdma_counts().is_some());
        if device { "" } else { "no RDMA device is in use" }
    }

    fn drain(&mut self, peer: PeerId, handler: &mut impl Handler) {
        let Self { core, numbers, streams, bulk, .. } = self;
        let Some(inner) = numbers.inner(peer) else { return };
        let Some(mut core) = core.enter() else { return };
        let now = clock::now_ns();
        let events = core.part(inner, now);
        await_writes(bulk, inner);
        for event in events {
            match event {
                Event::Message { header, header_len, payload, .. } => {
                    let header = header.get(..usize::from(header_len)).unwrap_or(&[]);
                    if Way::byte_of(header).is_none() {
                        handler.on_message(peer, header, &payload);
                    }
                }
                Event::Acknowledged(_, upto) => handler.on_acknowledged(peer, upto),
                Event::Connected(..) | Event::Departure(..) => {}
            }
        }
        if let Some(streams) = streams {
            streams.forget(inner);
        }
        if let Some(bulk) = bulk {
            bulk.forget(inner, now, &mut Above { numbers, handler });
        }
    }

    fn unacknowledged(&self) -> usize {
        self.core.enter().map_or(0, |core| core.machine.unacknowledged())
    }

    #[inline]
    fn is_crowded(&self, _: usize) -> bool {
        self.used
    }

    fn sleep(&mut self) -> bool {
        let Some(mut core) = self.core.enter() else { return true };
        let told = self.streams.as_ref().is_none_or(|streams| !streams.has_broken());
        self.rhythm.span = 0; // after waking, the next turn makes full progress
        if core.has_events() || !told {
            self.rhythm.hot = self.rhythm.hot.max(1);
            return false;
        }
        let now = clock::now_ns();
        if core.machine.has_ready() {
            let Core { machine, link, .. } = &mut *core;
            machine.poll_transmit(now, link);
        }
        if !core.link.sleep() || !self.bulk.as_mut().is_none_or(|bulk| bulk.sleep()) {
            self.rhythm.hot = self.rhythm.hot.max(1);
            return false;
        }
        let streams = self.streams.as_ref().and_then(|streams| streams.next_timeout(now));
        let bulk = self.bulk.as_ref().and_then(|bulk| bulk.next_timeout());
        let due = core.next_timeout().into_iter().chain(streams).chain(bulk).min();
        self.armed = self.shared.arm(due.map(|at| at.max(now + 1))).is_ok();
        self.armed
    }

    fn awake(&mut self) {
        if self.armed {
            self.armed = false;
            self.shared.disarm();
            self.rhythm.hot = self.rhythm.hot.max(1);
            if let Some(streams) = &mut self.streams {
                streams.wake();
            }
        }
    }
}

/// The streams' part of a turn, once all messages are delivered to the endpoint.
#[inline]
fn streams_turn(
    streams: &mut Streams,
    machine: &mut Reliable,
    now: u64,
    above: &mut impl StreamSink,
) -> usize {
    let mut n = streams.poll(now, machine, above);
    for _ in 0..BATCH {
        if machine.has_many_notices() {
            break;
        }
        let Some((peer, number)) = streams.take_broken() else { break };
        above.on_lost(peer, StreamEnd::Outgoing);
        n += 1;
        let over = Message::Over { connection: number, broken: true };
        machine.notify(peer, &over.encode(Way::Stream), now);
    }
    n
}

/// A turn of the streams and of the bulk path. Returns the number of events.
fn beside_turn(
    streams: &mut Option<Streams>,
    bulk: &mut Option<Box<dyn Bulk>>,
    moves: &mut Vec<u64>,
    rhythm: &mut Rhythm,
    core: &mut Core,
    now: u64,
    above: &mut Above<'_, impl Handler>,
) -> usize {
    let mut n = 0;
    core.machine.notify_again(now);
    if let Some(streams) = streams {
        let sink = &mut BesideBulk { bulk, above };
        n += streams_turn(streams, &mut core.machine, now, sink);
    }
    follow(bulk, core, now, above);
    let Some(bulk) = bulk else { return n };
    renew(bulk.as_mut(), core, moves, now, above);
    bulk.tend(now);
    if bulk.has_work() {
        (rhythm.hot, rhythm.bulk_hot) = (COOLING, true);
        n += poll_bulk(bulk.as_mut(), core, now, above);
    }
    n
}

/// Connections of the bulk path follow peers that are reached at another port now.
fn follow(bulk: &mut Option<Box<dyn Bulk>>, core: &mut Core, now: u64, sink: &mut dyn BulkSink) {
    while let Some((address, rail)) = core.link.take_found(now) {
        let (Some(bulk), Some(inner)) = (&mut *bulk, core.peers.find(&address)) else { continue };
        if !bulk.on_rail(inner, rail, &mut |rail| core.link.bulk_at(rail), (now, sink)) {
            log::limited!(
                "no RC queue pairs at the port that reaches {address}: its long messages go as datagrams until there are (ulimit -n)"
            );
            core.link.found_again(&address, now);
        }
    }
}

/// The bulk path begins anew at ports that do.
fn renew(
    bulk: &mut dyn Bulk,
    core: &Core,
    moves: &mut Vec<u64>,
    now: u64,
    sink: &mut dyn BulkSink,
) {
    for (rail, at) in core.link.moves().enumerate() {
        moves.resize(moves.len().max(rail + 1), 0);
        if moves.get_mut(rail).is_some_and(|known| std::mem::replace(known, at) != at) {
            bulk.renew(rail, now, sink);
        }
    }
}

/// Lets the bulk path progress, and sends its messages. Returns the number of events.
fn poll_bulk(bulk: &mut dyn Bulk, core: &mut Core, now: u64, sink: &mut dyn BulkSink) -> usize {
    let n = bulk.poll(now, sink);
    let Core { machine, link, .. } = core;
    if say(bulk, machine, now) > 0 {
        machine.poll_transmit(now, link);
    }
    n
}

/// Sends the bulk path's messages, all of them: what the engine sends afterwards may rely on a connection that they begin
/// or end. Returns their number.
fn say(bulk: &mut dyn Bulk, machine: &mut Reliable, now: u64) -> usize {
    let mut n = 0;
    while let Some((peer, message)) = bulk.next_control() {
        // A peer that asks, and takes no answers, gets no further ones. It asks again.
        if Message::is_answer(&message) && machine.is_behind(peer) {
            continue;
        }
        machine.notify(peer, &message, now);
        n += 1;
    }
    n
}

#[cfg(test)]
impl Net {
    /// The counts of its device.
    fn rdma_counts(&self) -> Option<verbs::RdmaCounts> {
        self.core.enter()?.link.rdma_counts()
    }

    /// The counts of its bulk path.
    fn bulk_counts(&self) -> bulk::BulkCounts {
        self.bulk.as_ref().map(|bulk| bulk.counts()).unwrap_or_default()
    }

    /// Breaks its queue pair.
    fn break_queue_pair(&mut self) {
        if let Some(mut core) = self.core.enter() {
            core.link.break_queue_pair();
        }
    }

    /// Removes its device without telling any peer.
    fn drop_device(&mut self) {
        if let Some(mut core) = self.core.enter() {
            core.link.drop_device();
        }
    }
}

/// Without the thread, peers are only answered later while the application does not poll.
fn without_thread(error: &Errno) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        log::warn(format_args!(
            "no thread for the network: {error}; peers are answered only while the application polls, which has to be often{}",
            remedy(*error)
        ));
    }
}

/// The limit that keeps the thread from being started.
fn remedy(error: Errno) -> &'static str {
    match error.0 {
        libc::EAGAIN => " (ulimit -u, or the limit of processes of the container)",
        libc::EMFILE => " (ulimit -n)",
        libc::ENFILE => " (sysctl fs.file-max)",
        _ => "",
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // Ends the thread. A forked child only forgets it: the child must not send in its parent's name.
        self.background = None;
        if !self.owner.is_here() {
            return;
        }
        let Some(mut core) = self.core.enter() else { return };
        let Core { machine, link, background_turns, .. } = &mut *core;
        machine.close(clock::now_ns(), link);
        let counts = machine.counts();
        if counts.connected > 0 || counts.forged > 0 {
            log::info(format_args!(
                "{} on the network: {} connections now, {counts:?}; {:?}, {} dropped on arrival; {:?}; {background_turns} turns in the background",
                self.me,
                machine.connections(),
                link.counts(),
                link.dropped(),
                self.streams.as_ref().map(Streams::counts).unwrap_or_default(),
            ));
            if let Some(rdma) = link.rdma_counts() {
                log::info(format_args!("{} through the device: {rdma:?}", self.me));
            }
            if let Some(bulk) = &self.bulk {
                log::info(format_args!("{} by RDMA Write: {:?}", self.me, bulk.counts()));
                if let Some(registrations) = bulk.registrations() {
                    log::info(format_args!("{} registered memory: {registrations}", self.me));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
