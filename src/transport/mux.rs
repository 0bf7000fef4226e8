//! The interface of an endpoint: chooses the transport of each peer by its address, and is the one
//! [`Iface`] that the protocol layer drives.

mod moving;

use super::address::LocalHost;
use super::loopback::Loopback;
use super::net::udp::UdpLink;
use super::net::{LookedAt, Net, NetSettings};
use super::peers::PeerTable;
use super::shm::{Contact, Shm, reaching};
use super::{
    Address, Assisted, Caps, Chunk, Departure, Exposed, Handler, Head, Iface, Mark, PeerId, Reach,
    Reached, SendError, Share, Spot, StreamEnd, Taken, Ticket, Windows,
};
use crate::config::CmaPolicy;
use crate::memory::{MAX_SEGMENTS, Segment, SegmentList};
use crate::sys::cancel::Shield;
use crate::sys::cma::Range;
use crate::sys::net::PortHolder;
use crate::sys::{Errno, clock, net, process, spare, unix, user};
use crate::telemetry::log;
use moving::Moving;
use std::cell::RefCell;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::RawFd;

/// Free ports tried before giving up.
const PORT_TRIES: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    /// Known by address only.
    None,
    Loopback,
    Shm,
    Net,
    /// What was sent through shared memory was refused, and is on its way by another transport: nothing may overtake it.
    Moving,
}

/// How long a full backlog keeps a message from the network, nanoseconds.
const BLOCKED_NS: u64 = 100_000_000;

/// Shortest messages that go other ways than the rest, and longest ones that do, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bounds {
    /// FI_UDRV_PUSH_MAX, where it is set.
    pub(crate) push: Option<usize>,
    /// FI_UDRV_SHARE_MIN, where it is set.
    pub(crate) share: Option<usize>,
    /// FI_UDRV_BULK_MIN
    pub(crate) bulk: usize,
}

/// What an endpoint's transports are made with.
#[derive(Debug)]
pub(crate) struct MuxSettings {
    pub(crate) cma: CmaPolicy,
    /// FI_UDRV_SHM: peers of this node are reached through shared memory.
    pub(crate) shm: bool,
    pub(crate) bounds: Bounds,
    /// Of the job key that somebody has given, 0 without one: peers of this node have the same.
    pub(crate) mark: u64,
    /// FI_UDRV_MTU, bytes.
    pub(crate) mtu: Option<usize>,
    /// `None`: FI_UDRV_NET=0, the node only.
    pub(crate) net: Option<NetSettings>,
}

/// Who holds our port for as long as the endpoint lives.
#[derive(Debug)]
enum Port {
    Idle(#[allow(dead_code)] UdpSocket),
    Linked(Box<Net>),
}

/// All transports of one endpoint.
#[derive(Debug)]
pub(crate) struct Mux {
    peers: PeerTable,
    routes: Vec<Route>,
    me: Address,
    my_id: PeerId,
    loopback: Loopback,
    shm: Shm,
    /// Peers of this node are reached through shared memory.
    prefers_shm: bool,
    port: Port,
    /// A peer was reached over the network.
    networked: bool,
    pace: Pace,
    /// What was said last of a peer that cannot be reached: who tries again is not told again.
    complained: Option<(PeerId, Errno)>,
    moving: Vec<Moving>,
    /// There was a peer with which one direction goes through shared memory and the other over the network.
    mixed: bool,
    /// Peers of this node whose backlog is full, and since when.
    blocked: Vec<(PeerId, u64)>,
}

/// Polls between two looks at the clock.
const CLOCK_POLLS: u32 = 16;
/// So many polls without a message from this node, and it is still.
const STILL_POLLS: u32 = 64;
/// As many that look at a device only take as long.
const DEVICE_POLLS: u32 = 4 * STILL_POLLS;
/// What waits for threads of the kernel gives way to them after so many.
const THREADS_POLLS: u32 = 8;

/// What is looked at now and then: each takes a system call, which is longer than many messages.
#[derive(Clone, Copy)]
enum Look {
    /// The sockets of the node: who comes and who goes.
    Sockets,
    /// The network, while nothing has come from there for a while.
    Net,
}

impl Look {
    /// Time between two looks, nanoseconds. `networked`: there is traffic with other nodes.
    fn every_ns(self, still: bool, networked: bool) -> u64 {
        match (self, still && !networked, networked) {
            (Self::Sockets, true, _) => 20_000,
            (Self::Sockets, false, false) => 200_000,
            (Self::Sockets, false, true) => 1_000_000,
            (Self::Net, true, _) => 10_000,
            (Self::Net, false, _) => 100_000,
        }
    }
}

/// How often it is looked.
#[derive(Debug, Default)]
struct Pace {
    polls: u32,
    /// Polls without a message since the last one.
    empty: u32,
    /// What the last one looked at; if at a device only, as those before and after it do, there is no time to look around.
    looked_at: LookedAt,
    /// It is time to.
    wants: bool,
    /// When each look is due, nanoseconds.
    due: [u64; 2],
}

impl Pace {
    /// A poll brought so many messages. True: nothing has come for a while.
    #[inline]
    fn count(&mut self, messages: usize) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.empty = if messages > 0 { 0 } else { self.empty.saturating_add(1) };
        self.empty >= STILL_POLLS
    }

    /// Whether it is time to look around.
    #[inline]
    fn is_time(&mut self, looked_at: LookedAt) -> bool {
        self.looked_at = looked_at;
        self.wants |= self.polls % CLOCK_POLLS == 0;
        self.wants && looked_at == LookedAt::Everything
    }

    /// Now and then of those that nothing has come for.
    #[inline]
    fn is_long(&self) -> bool {
        let every = match self.looked_at {
            LookedAt::Everything => STILL_POLLS,
            LookedAt::Device => DEVICE_POLLS,
            LookedAt::Threads => THREADS_POLLS,
        };
        self.polls % every == 0 && self.empty >= STILL_POLLS
    }

    /// `networked`: there is traffic with other nodes.
    fn is_due(&mut self, look: Look, now: u64, networked: bool) -> bool {
        let [sockets, net] = &mut self.due;
        let due = match look {
            Look::Sockets => sockets,
            Look::Net => net,
        };
        let is_due = now >= *due;
        if is_due {
            *due = now + look.every_ns(self.empty >= STILL_POLLS, networked);
        }
        is_due
    }
}

impl Mux {
    /// Opens all transports under `bind`; port 0 takes a free one. Errors: EADDRINUSE,
    /// EADDRNOTAVAIL, EMFILE, ENFILE, ENOMEM; what a filter of system calls says.
    pub(crate) fn open(bind: Address, settings: MuxSettings) -> Result<Self, Errno> {
        if settings.net.is_none() && settings.shm {
            // Peers would count as sent what lies before a closed door.
            unix::may_accept()?;
        }
        let host = LocalHost::detect();
        let mut last = Errno(libc::EADDRINUSE);
        for _ in 0..PORT_TRIES {
            let (port, number) = match settings.net {
                Some(_) => {
                    let link = UdpLink::open(&bind.0, settings.mtu)?;
                    let number = link.port();
                    (Err(link), number)
                }
                None => {
                    let (socket, number) = net::reserve_port(&bind.0)?;
                    (Ok(socket), number)
                }
            };
            let mut me = bind;
            me.0.set_port(number);
            let me = named(me, &host);
            match Shm::open(me, settings.cma, settings.shm) {
                Ok(mut shm) => {
                    shm.set_bounds(settings.bounds.push, settings.bounds.share);
                    shm.set_mark(settings.mark);
                    let prefers_shm = settings.shm;
                    let port = match (port, settings.net) {
                        (Err(link), Some(net)) => {
                            let peers = PeerTable::new(host.clone());
                            let mut net = Net::open(me, link, peers, net)?;
                            net.set_bulk_min(settings.bounds.bulk);
                            Port::Linked(Box::new(net))
                        }
                        (Ok(socket), _) => Port::Idle(socket),
                        (Err(_), None) => return Err(Errno(libc::EINVAL)),
                    };
                    return Self::assemble(me, host, shm, port, prefers_shm);
                }
                Err(e) if e.0 == libc::EADDRINUSE && bind.port() == 0 => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    fn assemble(
        me: Address,
        host: LocalHost,
        shm: Shm,
        port: Port,
        prefers_shm: bool,
    ) -> Result<Self, Errno> {
        let mut peers = PeerTable::new(host);
        let my_id = peers.intern(&me).ok_or(Errno(libc::ENOMEM))?;
        if let Port::Linked(net) = &port {
            net.watch(shm.epoll(), super::shm::TOKEN_ELSEWHERE)?;
        }
        if prefers_shm && !shm.takes_links() && matches!(port, Port::Idle(_)) {
            return Err(Errno(libc::EADDRINUSE));
        }
        let names = match (prefers_shm && shm.takes_links(), &port) {
            (true, Port::Linked(_)) => "loopback, shared memory, UDP",
            (true, Port::Idle(_)) => "loopback, shared memory",
            (false, Port::Linked(_)) => "loopback, UDP",
            (false, Port::Idle(_)) => "loopback",
        };
        log::info(format_args!("endpoint {me} opened: {names}"));
        let routes = vec![Route::Loopback];
        let loopback = Loopback::default();
        Ok(Self {
            peers,
            routes,
            me,
            my_id,
            loopback,
            shm,
            prefers_shm,
            port,
            networked: false,
            pace: Pace::default(),
            complained: None,
            moving: Vec::new(),
            mixed: false,
            blocked: Vec::new(),
        })
    }

    /// The endpoint's address.
    pub(crate) fn address(&self) -> Address {
        self.me
    }

    fn net(&self) -> Option<&Net> {
        if let Port::Linked(net) = &self.port { Some(net) } else { None }
    }

    fn net_mut(&mut self) -> Option<&mut Net> {
        if let Port::Linked(net) = &mut self.port { Some(net) } else { None }
    }

    /// Packets that other hosts have not acknowledged, and messages that are on their way from one transport to another.
    pub(crate) fn unacknowledged(&self) -> usize {
        self.net().map_or(0, Net::unacknowledged) + self.moving()
    }

    fn route(&self, peer: PeerId) -> Route {
        self.routes.get(peer.index()).copied().unwrap_or(Route::None)
    }

    /// The link to `peer`, made if this is the first message or the last link has ended.
    #[inline]
    fn ensure(&mut self, peer: PeerId) -> Result<Route, SendError> {
        match self.route(peer) {
            Route::Shm if !self.shm.is_connected(peer) => self.make_link(peer),
            Route::Net if !self.net().is_some_and(|net| net.is_connected(peer)) => {
                self.make_link(peer)
            }
            Route::None => self.make_link(peer),
            Route::Moving => Err(SendError::Again),
            route => Ok(route),
        }
    }

    #[cold]
    fn make_link(&mut self, peer: PeerId) -> Result<Route, SendError> {
        let _shield = Shield::raise();
        let unknown = SendError::Unreachable(Errno(libc::EADDRNOTAVAIL));
        let address = self.peers.address(peer).ok_or(unknown)?;
        let made = self.choose_link(peer, &address);
        match made {
            Ok(route) => {
                self.complained = None;
                set_route(&mut self.routes, peer, route);
            }
            Err(SendError::Unreachable(errno)) if self.complained == Some((peer, errno)) => {}
            Err(SendError::Unreachable(errno)) => {
                self.complained = Some((peer, errno));
                log::limited!(cause: errno.0, "cannot reach {address}: {errno}");
            }
            Err(SendError::Again) => {}
        }
        made
    }

    fn choose_link(&mut self, peer: PeerId, address: &Address) -> Result<Route, SendError> {
        if self.owns(address) && self.is_near(peer, address)? {
            // The receiver cannot tell whose the link of a process is that has ended; and what is sent to one that refuses
            // is lost.
            let waits = user::is_ambiguous() || self.shm.has_refused(peer);
            return if waits { self.wait_for_link(peer) } else { Ok(Route::Shm) };
        }
        let at = self.on_network(address);
        let Some(net) = self.net_mut() else {
            log::limited!(
                "{address} is not on this node, or not to be reached through shared memory, and FI_UDRV_NET=0"
            );
            return Err(SendError::Unreachable(Errno(libc::EHOSTUNREACH)));
        };
        net.connect(peer, &at)?;
        self.networked = true;
        Ok(Route::Net)
    }

    /// Where the network finds `address`. Within a node the port alone counts, but a UDP socket is bound to one
    /// address.
    fn on_network(&self, address: &Address) -> Address {
        let mut at = *address;
        if let (true, Ok(all)) = (self.owns(address), port_holders(address.port())) {
            let me = process::effective_uid();
            let ours = all.iter().filter(|one| one.uid == me).map(|one| one.ip);
            let finds = |ip: IpAddr| ip.is_unspecified() || ip == at.0.ip();
            if !ours.clone().any(finds) {
                let mut alike = ours.filter(|ip| ip.is_ipv4() == at.0.is_ipv4());
                if let Some(ip) = alike.next() {
                    at.0.set_ip(ip);
                }
            }
        }
        at
    }

    /// `address` is of this node.
    fn owns(&self, address: &Address) -> bool {
        self.peers.host().owns(address.0.ip())
    }

    /// `address` is of this node. True: there is a shared-memory link to it now; false: it is to be reached over the
    /// network. Errors: ECONNREFUSED when nobody is there, EPERM when it is another user's, that of a refusal, and Again.
    fn is_near(&mut self, peer: PeerId, address: &Address) -> Result<bool, SendError> {
        let contact = if self.prefers_shm && self.shm.takes_links() {
            self.shm.connect(peer, address)
        } else {
            Shm::look_for(address)
        };
        let refused = match contact {
            Ok(Contact::Linked) => {
                self.blocked.retain(|(blocked, _)| *blocked != peer);
                return Ok(true);
            }
            Ok(Contact::Aloof) => return Ok(false),
            Ok(Contact::Refused(errno)) => return Err(SendError::Unreachable(errno)),
            Ok(Contact::Nobody) => Errno(libc::ECONNREFUSED),
            Ok(Contact::Stranger(uid)) => {
                log::limited!(
                    "{address} belongs to user {uid}, not to {}: refused",
                    process::effective_uid()
                );
                Errno(libc::EPERM)
            }
            Err(SendError::Again) => return self.is_blocked(peer, address),
            Err(SendError::Unreachable(errno)) if self.net().is_some() => {
                log::limited!(
                    cause: errno.0,
                    "no shared-memory link to {address} ({errno}): its messages go over the network"
                );
                return Ok(false);
            }
            Err(e) => return Err(e),
        };
        // An endpoint whose names others have taken is known by its port alone.
        let me = process::effective_uid();
        let is_ours =
            port_holders(address.port()).is_ok_and(|all| all.iter().any(|one| one.uid == me));
        if is_ours && self.net().is_some() {
            Ok(false)
        } else {
            Err(SendError::Unreachable(refused))
        }
    }

    /// So many wait for `peer` that there is no room for us. False: it takes too long, the network is not as full.
    #[cold]
    fn is_blocked(&mut self, peer: PeerId, address: &Address) -> Result<bool, SendError> {
        let now = clock::now_ns();
        let Some((_, since)) = self.blocked.iter().find(|(blocked, _)| *blocked == peer) else {
            self.blocked.push((peer, now));
            return Err(SendError::Again);
        };
        if now.saturating_sub(*since) < BLOCKED_NS || self.net().is_none() {
            return Err(SendError::Again);
        }
        self.blocked.retain(|(blocked, _)| *blocked != peer);
        log::limited!("{address} does not take links in time: its messages go over the network");
        Ok(false)
    }

    #[inline]
    fn send(
        &mut self,
        peer: PeerId,
        kind: Slot,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        match self.ensure(peer)? {
            Route::Loopback => {
                self.shm.rouse();
                self.loopback.send(header, len, pack)
            }
            Route::Net => match &mut self.port {
                Port::Linked(net) => net.send(peer, header, len, pack, kind == Slot::Fragment),
                Port::Idle(_) => Err(SendError::Unreachable(Errno(libc::EHOSTUNREACH))),
            },
            Route::Shm | Route::None | Route::Moving => {
                self.shm.send(peer, kind == Slot::Short, header, len, pack)
            }
        }
    }

    /// Looks at what costs system calls, if it is time.
    #[inline(never)]
    fn look_around(&mut self, handler: &mut impl Handler) -> usize {
        let _shield = Shield::raise();
        self.pace.wants = false;
        let now = clock::now_ns();
        let mut n = 0;
        let networked = self.net().is_some_and(Net::has_traffic);
        if self.pace.is_due(Look::Sockets, now, networked) || self.shm.is_urgent() {
            n += self.poll_shm_sockets(handler);
        }
        if self.pace.is_due(Look::Net, now, networked) {
            n += self.poll_net(handler).0;
        }
        n
    }

    /// Who of this node comes and goes.
    fn poll_shm_sockets(&mut self, handler: &mut impl Handler) -> usize {
        // What a peer has sent over the network comes before its departure, of which its sockets tell.
        let mut n = if self.mixed { self.poll_net(handler).0 } else { 0 };
        n += self.shm.poll_sockets(&mut self.peers, handler);
        self.move_messages(handler);
        n
    }

    /// How much has come, and what this looked at. A shield is up.
    #[inline(never)]
    fn poll_net(&mut self, handler: &mut impl Handler) -> (usize, LookedAt) {
        let Port::Linked(net) = &mut self.port else { return (0, LookedAt::Everything) };
        let Self { routes, networked, mixed, shm, .. } = self;
        let shm = RefCell::new(shm);
        let mut handler = Beside { handler, shm: &shm, departed: Vec::new() };
        let n = net.turn(&mut self.peers, &mut handler, &mut |peer| {
            // What we send keeps its way: one direction may go through shared memory and the other not.
            let keeps =
                shm.borrow().is_connected(peer) || routes.get(peer.index()) == Some(&Route::Moving);
            if keeps {
                *mixed = true;
            } else {
                set_route(routes, peer, Route::Net);
            }
            *networked = true;
        });
        let looked_at = net.looked_at();
        for peer in handler.departed {
            self.forget_moving(peer);
        }
        (n, looked_at)
    }

    /// From now on peers ring the doorbell when we sleep.
    pub(crate) fn enable_waiting(&mut self) {
        self.shm.enable_waiting();
    }

    /// Prepares for sleep on [`Mux::wait_fd`]; `false` means there is work already.
    pub(crate) fn sleep(&mut self) -> bool {
        if !self.loopback.is_idle() || !self.moving.is_empty() || !self.shm.sleep() {
            return false;
        }
        if self.net_mut().is_none_or(Net::sleep) {
            return true;
        }
        self.shm.awake();
        false
    }

    /// Ends the state that `sleep` began.
    pub(crate) fn awake(&mut self) {
        self.shm.awake();
        if let Some(net) = self.net_mut() {
            net.awake();
        }
    }

    /// The next poll looks at everything that something may have come to.
    pub(crate) fn hasten(&mut self) {
        (self.pace.wants, self.pace.due) = (true, [0; 2]);
        if let Some(net) = self.net_mut() {
            net.hasten();
        }
    }

    /// Becomes readable when a message arrives while asleep, and when a link changes.
    pub(crate) fn wait_fd(&self) -> RawFd {
        self.shm.epoll().raw()
    }

    /// Whether who polls one of this process's `endpoints` had better let somebody else have the
    /// processor: nothing has come for a while, and there are more processes, or threads that poll, than
    /// processors, or there may be, and what is waited for takes longer than asking.
    #[inline]
    pub(crate) fn gives_way(&self, endpoints: usize) -> bool {
        self.pace.is_long() && (self.networked || self.shm.is_crowded(endpoints))
    }
}

/// Hears what the network tells, of peers that may send through shared memory too.
struct Beside<'a, 'b, H> {
    handler: &'a mut H,
    shm: &'a RefCell<&'b mut Shm>,
    departed: Vec<PeerId>,
}

impl<H: Handler> Handler for Beside<'_, '_, H> {
    fn on_peer(&mut self, peer: PeerId, address: &Address) {
        self.handler.on_peer(peer, address);
    }

    #[inline]
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        self.handler.on_message(peer, header, payload);
    }

    #[inline]
    fn wants_pause(&mut self) -> bool {
        self.handler.wants_pause()
    }

    fn place(&mut self, peer: PeerId, header: &[u8], len: usize) -> Option<SegmentList> {
        self.handler.place(peer, header, len)
    }

    fn on_placed(&mut self, peer: PeerId, header: &[u8], len: usize) {
        self.handler.on_placed(peer, header, len);
    }

    fn on_stream_lost(&mut self, peer: PeerId, end: StreamEnd) {
        self.handler.on_stream_lost(peer, end);
    }

    fn on_filled(&mut self, peer: PeerId, token: u64) {
        self.handler.on_filled(peer, token);
    }

    fn on_written(&mut self, peer: PeerId, chunk: Chunk) {
        self.handler.on_written(peer, chunk);
    }

    fn on_windows_lost(&mut self, peer: PeerId) {
        self.handler.on_windows_lost(peer);
    }

    fn on_reached(&mut self, peer: PeerId, token: u64) {
        self.handler.on_reached(peer, token);
    }

    fn on_concealed(&mut self, region: u64) {
        self.handler.on_concealed(region);
    }

    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        self.handler.on_acknowledged(peer, upto);
    }

    fn on_departure(&mut self, peer: PeerId, departure: Departure) {
        // What it has sent through shared memory comes before.
        self.shm.borrow_mut().drain(peer, self.handler);
        self.departed.push(peer);
        self.handler.on_departure(peer, departure);
    }

    fn is_owed(&self, peer: PeerId) -> bool {
        self.handler.is_owed(peer)
    }
}

/// How a message is carried.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
    Short,
    Bulk,
    Fragment,
}

/// Who has a UDP port of this node. Errors: the kernel does not tell.
fn port_holders(port: u16) -> Result<Vec<PortHolder>, Errno> {
    let holders = || net::udp_port_holders(port);
    match holders() {
        Err(e) if e.is_shortage() => spare::lend(holders),
        other => other,
    }
}

fn set_route(routes: &mut Vec<Route>, peer: PeerId, route: Route) {
    if routes.len() <= peer.index() {
        routes.resize(peer.index() + 1, Route::None);
    }
    if let Some(slot) = routes.get_mut(peer.index()) {
        *slot = route;
    }
}

/// A wildcard address has no use for a peer: give it the name of the preferred interface.
fn named(address: Address, host: &LocalHost) -> Address {
    let mut address = address;
    if address.0.ip().is_unspecified() {
        if let Some(interface) = host.preferred(None, Some(address.0.is_ipv6())) {
            address.0.set_ip(interface.ip);
        }
    }
    address
}

impl Iface for Mux {
    fn connect(&mut self, address: &Address) -> Result<PeerId, SendError> {
        let peer = self.peers.intern(address).ok_or(SendError::Again)?;
        self.ensure(peer)?;
        Ok(peer)
    }

    fn address_of(&self, peer: PeerId) -> Option<Address> {
        self.peers.address(peer)
    }

    #[inline]
    fn caps(&self, peer: PeerId) -> Caps {
        match (self.route(peer), &self.port) {
            (Route::Loopback, _) => Loopback::CAPS,
            (Route::Net, Port::Linked(net)) => net.caps(peer),
            _ => self.shm.caps(peer),
        }
    }

    #[inline]
    fn am_short(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        self.send(peer, Slot::Short, header, len, pack)
    }

    #[inline]
    fn am_bcopy(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        self.send(peer, Slot::Bulk, header, len, pack)
    }

    #[inline]
    fn am_at_once(&mut self, peer: PeerId, head: &Head, payload: Segment) -> bool {
        match (self.route(peer), &mut self.port) {
            (Route::Shm, _) => self.shm.send_at_once(peer, head, payload),
            (Route::Net, Port::Linked(net)) => net.send_at_once(peer, head, payload),
            _ => false,
        }
    }

    #[inline]
    fn am_whole(
        &mut self,
        peer: PeerId,
        first: &[u8],
        payload: Segment,
        next: impl Fn(usize) -> Head,
    ) -> bool {
        self.route(peer) == Route::Shm && self.shm.send_whole(peer, first, payload, next)
    }

    fn am_fragment(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        self.send(peer, Slot::Fragment, header, len, pack)
    }

    fn am_late(&mut self, peer: PeerId, header: &[u8]) -> Result<(), SendError> {
        match (self.route(peer), &mut self.port) {
            (Route::Net, Port::Linked(net)) => net.send_late(peer, header),
            _ => self.am_short(peer, header, 0, |_, _| ()),
        }
    }

    fn am_announce(&mut self, peer: PeerId, header: &[u8]) -> Result<(), SendError> {
        if let (Route::Net, Port::Linked(net)) = (self.route(peer), &mut self.port) {
            if net.announce(peer, header) {
                return Ok(());
            }
        }
        self.am_short(peer, header, 0, |_, _| ())
    }

    fn has_stream(&mut self, peer: PeerId) -> bool {
        if self.route(peer) != Route::Net {
            return false;
        }
        let Some(address) = self.peers.address(peer) else { return false };
        self.net_mut().is_some_and(|net| net.has_stream(peer, &address))
    }

    fn am_stream(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &SegmentList,
    ) -> Result<(), SendError> {
        let none = SendError::Unreachable(Errno(libc::EOPNOTSUPP));
        self.net_mut().ok_or(none)?.send_by_stream(peer, header, payload)
    }

    fn windows(&mut self, peer: PeerId) -> Windows {
        // They work in both directions, or not at all.
        if self.route(peer) != Route::Net || self.shm.hears(peer) {
            return Windows::No;
        }
        let Some(address) = self.peers.address(peer) else { return Windows::No };
        self.net_mut().map_or(Windows::No, |net| net.windows(peer, &address))
    }

    fn lend(&mut self, peer: PeerId, part: &SegmentList, token: u64) -> Result<Ticket, SendError> {
        let none = SendError::Unreachable(Errno(libc::EOPNOTSUPP));
        self.net_mut().ok_or(none)?.lend(peer, part, token)
    }

    fn take_back(&mut self, peer: PeerId, ticket: &Ticket) {
        if let Some(net) = self.net_mut() {
            net.take_back(peer, ticket);
        }
    }

    fn write(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        ticket: &Ticket,
        chunk: Chunk,
    ) -> Result<(), SendError> {
        let none = SendError::Unreachable(Errno(libc::EOPNOTSUPP));
        self.net_mut().ok_or(none)?.write(peer, payload, ticket, chunk)
    }

    fn offer(&mut self, peer: PeerId, payload: &SegmentList) -> Option<Ticket> {
        if self.shm.hears(peer) {
            return None;
        }
        let address = self.peers.address(peer)?;
        self.net_mut()?.offer(peer, &address, payload)
    }

    fn withdraw(&mut self, peer: PeerId, ticket: &Ticket) {
        if let Some(net) = self.net_mut() {
            net.withdraw(peer, ticket);
        }
    }

    fn sees_writes(&mut self, ticket: &Ticket) -> bool {
        self.net_mut().is_some_and(|net| net.sees_writes(ticket))
    }

    fn share(&mut self, peer: PeerId, len: usize) -> Option<Share> {
        if self.route(peer) == Route::Shm { self.shm.share(peer, len) } else { None }
    }

    fn share_min(&self, peer: PeerId) -> Option<usize> {
        if self.route(peer) == Route::Shm { self.shm.share_min(peer) } else { None }
    }

    fn way(&self, peer: PeerId) -> &'static str {
        match self.route(peer) {
            Route::Loopback => "loopback",
            Route::Shm => "shared memory",
            Route::Net => "network",
            Route::None => "not connected",
            Route::Moving => "being moved to another transport",
        }
    }

    fn take(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        self.shm.take(peer, share, most)
    }

    fn arrived(&mut self, peer: PeerId, share: &Share, units: u32) {
        self.shm.arrived(peer, share, units);
    }

    fn begin_assist(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        self.shm.begin_assist(peer, share, most)
    }

    fn stop_sharing(&mut self, peer: PeerId, share: &Share) {
        self.shm.stop_sharing(peer, share);
    }

    fn assist(
        &mut self,
        peer: PeerId,
        share: &Share,
        part: impl Fn(usize, usize) -> (SegmentList, [Range; MAX_SEGMENTS], usize),
    ) -> Assisted {
        self.shm.assist(peer, share, part)
    }

    fn expose(
        &mut self,
        peer: PeerId,
        region: (u64, u32),
        memory: &SegmentList,
        rights: (bool, bool),
    ) -> Exposed {
        match self.route(peer) {
            Route::Shm => self.shm.expose(peer, rights),
            // Who does not answer this way does not reach us this way.
            Route::Net if self.shm.hears(peer) => Exposed::No,
            Route::Net => {
                let Some(address) = self.peers.address(peer) else { return Exposed::No };
                let net = self.net_mut();
                net.map_or(Exposed::No, |net| net.expose(peer, &address, region, memory, rights))
            }
            Route::Loopback | Route::None | Route::Moving => Exposed::No,
        }
    }

    fn epoch(&self, peer: PeerId) -> Option<u32> {
        match self.route(peer) {
            Route::Shm => self.shm.epoch(peer),
            Route::Net => self.net()?.epoch(peer),
            Route::Loopback | Route::None | Route::Moving => None,
        }
    }

    fn revoke(&mut self, peer: PeerId) -> bool {
        let by_epoch = self.route(peer) != Route::Net;
        if by_epoch {
            self.shm.revoke(peer);
        }
        by_epoch
    }

    fn is_settled(&mut self, insists: bool) -> bool {
        self.shm.is_settled(insists)
    }

    fn conceal(&mut self, region: u64) {
        if let Some(net) = self.net_mut() {
            net.conceal(region);
        }
    }

    #[inline]
    fn reach_min(&self, peer: PeerId, reads: bool) -> Option<usize> {
        match (self.route(peer), &self.port) {
            (Route::Loopback, _) => None,
            (Route::Net, Port::Linked(net)) => net.reach_min(reads),
            _ => self.shm.caps(peer).reach_min(reads),
        }
    }

    fn reach(
        &mut self,
        peer: PeerId,
        spot: &Spot,
        local: &SegmentList,
        how: Reach,
    ) -> Result<Reached, SendError> {
        match (self.route(peer), &mut self.port) {
            (Route::Net, Port::Linked(net)) => net.reach(peer, spot, local, how),
            _ => self.shm.reach(peer, spot, local, how.reads),
        }
    }

    fn attend(&mut self) {
        if let Some(net) = self.net_mut() {
            net.attend();
        }
    }

    fn flush(&mut self) {
        if let Some(net) = self.net_mut() {
            net.flush();
        }
    }

    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
    ) -> Result<usize, SendError> {
        match self.route(peer) {
            Route::Loopback => {
                let from = Loopback::list(remote);
                let from = from.ok_or(SendError::Unreachable(Errno(libc::EINVAL)))?;
                Ok(Loopback::copy(&from, local))
            }
            Route::Net => Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP))),
            Route::Shm | Route::None | Route::Moving => self.shm.get(peer, local, remote),
        }
    }

    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
    ) -> Result<usize, SendError> {
        match self.route(peer) {
            Route::Loopback => {
                let to = Loopback::list(remote);
                let to = to.ok_or(SendError::Unreachable(Errno(libc::EINVAL)))?;
                Ok(Loopback::copy(local, &to))
            }
            Route::Net => Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP))),
            Route::Shm | Route::None | Route::Moving => self.shm.put(peer, local, remote),
        }
    }

    #[inline]
    fn under_pressure(&self, peer: PeerId) -> bool {
        match self.route(peer) {
            Route::Shm => self.shm.under_pressure(peer),
            Route::Loopback => self.loopback.pressure,
            Route::Net => self.net().is_some_and(|net| net.under_pressure(peer)),
            Route::None | Route::Moving => false,
        }
    }

    fn track(&mut self, peer: PeerId) -> bool {
        self.route(peer) == Route::Net && self.net_mut().is_some_and(|net| net.track(peer))
    }

    fn tracked(&self, peer: PeerId) -> Option<Mark> {
        self.net().filter(|_| self.route(peer) == Route::Net)?.tracked(peer)
    }

    fn acknowledged(&mut self, peer: PeerId) -> Option<Mark> {
        self.net_mut()?.acknowledged(peer)
    }

    fn set_pressure(&mut self, on: bool) {
        self.loopback.pressure = on;
        self.shm.set_pressure(on);
        if let Some(net) = self.net_mut() {
            net.set_pressure(on);
        }
    }

    #[inline]
    fn poll(&mut self, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        if !self.loopback.is_idle() {
            n += self.loopback.poll(self.my_id, handler);
        }
        n += self.shm.poll(handler);
        let still = self.pace.count(n);
        let mut looked_at = LookedAt::Everything;
        if let Port::Linked(net) = &mut self.port {
            if net.has_its_turn(still) {
                let _shield = Shield::raise();
                let (taken, at) = self.poll_net(handler);
                n += taken;
                looked_at = at;
            }
        }
        if self.pace.is_time(looked_at) || self.shm.is_urgent() {
            n += self.look_around(handler);
        }
        n
    }
}

/// Asks `settled` until it says that no peer is in the middle of a copy from or to memory that it was told not to reach
/// any more, nor any that endpoints which have closed had left behind. Its argument: to insist. False: one still is,
/// after two seconds, which is neither stopped nor has ended.
pub(crate) fn settle(mut settled: impl FnMut(bool) -> bool) -> bool {
    reaching::settle(|insists| settled(insists) && reaching::are_left_settled())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::shared_memory::REFUSED;

    #[test]
    fn who_waits_long_gives_way_where_somebody_may_need_it() {
        let bounds = Bounds { push: None, share: None, bulk: 0 };
        let settings =
            MuxSettings { cma: CmaPolicy::Auto, shm: true, mark: 0, mtu: None, bounds, net: None };
        let bind = Address(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
        let mut mux = Mux::open(bind, settings).unwrap();
        let mut count = |networked: bool, endpoints: usize, message_every: u32| {
            mux.networked = networked;
            (1..=10 * STILL_POLLS)
                .filter(|poll| {
                    mux.pace.count(usize::from(poll % message_every == 0));
                    mux.gives_way(endpoints)
                })
                .count()
        };
        assert_eq!(count(false, 1, u32::MAX), 0, "alone, it polls on");
        assert_eq!(count(true, 1, STILL_POLLS / 2), 0, "messages come");
        assert!((9..=10).contains(&count(true, 1, u32::MAX)));
        let processors = crate::sys::process::machine().1;
        assert_eq!(count(false, processors, u32::MAX), 0);
        assert!(
            (9..=10).contains(&count(false, processors + 1, u32::MAX)),
            "each may have a thread"
        );
        for (looked_at, times) in [(LookedAt::Device, 2..=3), (LookedAt::Threads, 79..=80)] {
            mux.pace.is_time(looked_at);
            mux.networked = true;
            let gives_way = (1..=10 * STILL_POLLS).filter(|_| {
                mux.pace.count(0);
                mux.gives_way(1)
            });
            assert!(times.contains(&gives_way.count()), "{looked_at:?}");
        }
    }

    #[derive(Default)]
    struct Ear(Vec<Vec<u8>>);

    impl Handler for Ear {
        fn on_peer(&mut self, _: PeerId, _: &Address) {}
        fn on_message(&mut self, _: PeerId, _: &[u8], payload: &[u8]) {
            self.0.push(payload.to_vec());
        }
        fn on_departure(&mut self, _: PeerId, departure: Departure) {
            panic!("{departure:?}");
        }
        fn is_owed(&self, _: PeerId) -> bool {
            false
        }
    }

    fn on_loopback() -> Mux {
        with_mark(0)
    }

    fn with_mark(mark: u64) -> Mux {
        let bounds = Bounds { push: None, share: None, bulk: 0 };
        let settings =
            MuxSettings { cma: CmaPolicy::Auto, shm: true, mark, mtu: None, bounds, net: None };
        Mux::open(Address(std::net::SocketAddr::from(([127, 0, 0, 1], 0))), settings).unwrap()
    }

    #[test]
    fn what_has_no_other_way_waits_for_room_and_keeps_its_order() {
        const COUNT: u8 = 20;
        let (mut a, mut b) = (on_loopback(), on_loopback());
        b.shm.refuse_all(true);
        let to = a.connect(&b.address()).unwrap();
        let mut ear = Ear::default();
        let mut sent = 0;
        let begun = clock::now_ns();
        while ear.0.len() < usize::from(COUNT) {
            let len = usize::from(sent) * 100;
            let pack = |_: usize, to: &mut [u8]| to.fill(sent);
            if sent < COUNT && a.am_bcopy(to, b"header", len, pack).is_ok() {
                sent += 1;
            }
            // The first ones are refused again and again.
            b.shm.refuse_all(clock::now_ns() - begun < 100_000_000);
            a.poll(&mut Ear::default());
            b.poll(&mut ear);
            assert!(clock::now_ns() - begun < 60_000_000_000, "{} have come", ear.0.len());
        }
        for (n, payload) in (0..).zip(&ear.0) {
            assert!(payload.len() == usize::from(n) * 100 && payload.iter().all(|byte| *byte == n));
        }
        assert_eq!((a.unacknowledged(), a.route(to)), (0, Route::Shm));
    }

    #[test]
    fn what_is_refused_for_good_and_has_no_other_way_ends_with_the_error() {
        let refused = Errno(libc::EPERM);
        let (mut a, mut b) = (on_loopback(), on_loopback());
        let to = a.connect(&b.address()).unwrap();
        a.am_short(to, b"header", 8, |_, _| ()).unwrap();
        REFUSED.set(Some(refused));
        let (mut left, mut failed) = (Farewells::default(), None);
        let begun = clock::now_ns();
        while failed.is_none() {
            a.poll(&mut left);
            b.poll(&mut Farewells::default());
            if let Err(SendError::Unreachable(errno)) = a.am_short(to, b"header", 8, |_, _| ()) {
                failed = Some(errno);
            }
            assert!(clock::now_ns() - begun < 60_000_000_000, "{:?}", left.0);
        }
        assert_eq!((failed, &left.0[..]), (Some(refused), &[Departure::Failed(refused)][..]));
        assert_eq!(a.unacknowledged(), 0);
        REFUSED.set(None);
    }

    #[derive(Default)]
    struct Farewells(Vec<Departure>);

    impl Handler for Farewells {
        fn on_peer(&mut self, _: PeerId, _: &Address) {}
        fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {
            panic!("nothing is taken");
        }
        fn on_departure(&mut self, _: PeerId, departure: Departure) {
            self.0.push(departure);
        }
        fn is_owed(&self, _: PeerId) -> bool {
            false
        }
    }

    #[test]
    fn no_more_is_sent_to_a_peer_with_another_key_than_one_ring_holds() {
        let rejected = Errno(libc::EKEYREJECTED);
        let (mut a, mut b) = (with_mark(1), with_mark(2));
        let to = a.peers.intern(&b.address()).unwrap();
        let (mut sent, mut failed, mut left) = (0, 0_u32, Farewells::default());
        let begun = clock::now_ns();
        // Until it has refused twice, and once more without a link in between.
        while left.0.len() < 2 || failed < 2000 {
            match a.am_short(to, b"header", 8, |_, _| ()) {
                Ok(()) => sent += 1,
                Err(SendError::Again) => {}
                Err(SendError::Unreachable(errno)) => {
                    assert_eq!(errno, rejected);
                    failed += 1;
                }
            }
            a.poll(&mut left);
            b.poll(&mut Farewells::default());
            assert!(clock::now_ns() - begun < 60_000_000_000, "{failed} {:?}", left.0);
        }
        assert!((1..=256).contains(&sent), "{sent}");
        let seconds = (clock::now_ns() - begun).div_ceil(1_000_000_000) as usize;
        assert!(
            left.0.len() <= seconds && left.0.iter().all(|d| *d == Departure::Failed(rejected))
        );
    }

    #[test]
    fn sockets_of_the_node_are_looked_at_least_often_while_there_is_traffic_with_others() {
        let looks = |empty: u32, networked: bool| {
            let mut pace = Pace { empty, ..Pace::default() };
            (0..10_000_000)
                .step_by(1000)
                .filter(|ns| pace.is_due(Look::Sockets, *ns, networked))
                .count()
        };
        let counts = [looks(STILL_POLLS, false), looks(0, false), looks(STILL_POLLS, true)];
        assert_eq!(counts, [500, 50, 10]);
    }
}
