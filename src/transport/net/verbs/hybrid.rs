//! Both links of an endpoint: UDP, which reaches every peer, and a UD queue pair for the peers whose path over it is
//! validated (PROTOCOL.md §7.13). The state machine above sees one link.

use super::aside::Leaving;
use super::config::RdmaPolicy;
use super::found::Found;
use super::handles::HandleId;
use super::introduction::{
    Call, CallKind, INTRODUCED_LEN, Place, is_greeting, read_news, read_trailer, with_trailer,
};
use super::link::UdLink;
use super::opening::Opening;
use super::recovery::Recovery;
use super::silence::Silence;
use super::spread::Spread;
use super::ways::{Opened, Ways};
use super::{Made, RdmaSettings, Spot, rc};
use crate::sys::event::{Epoll, Watched, duplicate};
use crate::sys::packets::Pool;
use crate::sys::verbs::{OpenDevice, UdCounts};
use crate::sys::{Errno, clock, process};
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::JobKey;
use crate::transport::net::bulk::Bulk;
use crate::transport::net::link::{Condition, Link, LinkSink};
use crate::transport::net::reliable::packet::{HEADER_ONLY, MAGIC};
use crate::transport::net::udp::{LinkCounts, UdpLink};
use std::collections::HashMap;
use std::io::IoSlice;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// First byte of a packet that ends a connection (PROTOCOL.md §7.3). It goes over UDP: the queue pair may end before it
/// has sent it.
const CLOSE: u8 = 3;

/// How long after an arrival the socket is polled in each turn, and the time between polls later on, nanoseconds:
/// polling the socket takes a system call, polling the device does not.
const SOCKET_HOT_NS: u64 = 500_000;
const SOCKET_LOOK_NS: u64 = 1_000_000;

/// How long a peer with a device may leave path challenges unanswered while UDP hears it: until the log says so, and
/// until it is given up under FI_UDRV_RDMA=require, nanoseconds.
const SILENT_NS: u64 = 1_000_000_000;
const SILENT_REQUIRED_NS: u64 = 4_000_000_000;

/// Counts of the device's part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct RdmaCounts {
    pub(crate) datagrams: UdCounts,
    /// Path challenges sent, and path responses sent.
    pub(crate) calls: u64,
    pub(crate) answers: u64,
    /// Paths that were validated, and that became suspect afterwards.
    pub(crate) proven: u64,
    pub(crate) doubted: u64,
    /// Peers that did not answer through their device while UDP heard them.
    pub(crate) silent: u64,
    /// Address handles that exist.
    pub(crate) handles: usize,
    /// Queue pairs that replaced a broken one, and address updates sent because of that.
    pub(crate) made: u64,
    pub(crate) news: u64,
}

impl RdmaCounts {
    fn add(&mut self, other: &Self) {
        self.datagrams = self.datagrams.plus(other.datagrams);
        self.handles += other.handles;
        let Self { calls, answers, proven, doubted, silent, made, news, .. } = self;
        for (sum, more) in [
            (calls, other.calls),
            (answers, other.answers),
            (proven, other.proven),
            (doubted, other.doubted),
            (silent, other.silent),
            (made, other.made),
            (news, other.news),
        ] {
            *sum += more;
        }
    }
}

/// How queue pairs of this endpoint are made.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) settings: RdmaSettings,
    pub(super) spread: Spread,
    pub(super) key: JobKey,
    pub(super) me: Address,
}

/// The port in use.
#[derive(Debug)]
pub(super) struct PortInUse {
    /// Its device; kept while there is no queue pair, because the device reports when a port is up again.
    pub(super) device: Option<OpenDevice>,
    /// The same for the bulk path, and how often that changed.
    pub(super) spot: Spot,
    pub(super) moves: u64,
    /// It is in use, but has no UD queue pairs: only connections go through it.
    pub(super) connects_only: bool,
    /// Becomes readable when any of the device's descriptors does.
    pub(super) watch: Epoll,
}

/// Maintenance that is under way.
#[derive(Debug)]
pub(super) struct Upkeep {
    pub(super) recovery: Recovery,
    /// When `tend` must be called, nanoseconds.
    pub(super) tend_at: u64,
    /// Peers that have not answered are to be judged, when what has arrived in this turn is received.
    pub(super) judge: bool,
    /// The next peer to send an address update to.
    pub(super) untold: Option<usize>,
    /// Why the queue pair could not be replaced, as it is logged.
    pub(super) why: String,
    /// Threads of earlier queue pairs.
    pub(super) leaving: Leaving,
    /// There is no bell for events of the device that other endpoints have taken: when one is tried again, nanoseconds.
    pub(super) deaf: Option<u64>,
}

impl Upkeep {
    fn new(recovery: Recovery) -> Self {
        let (why, leaving) = (String::new(), Leaving::default());
        Self { recovery, tend_at: 0, judge: false, untold: None, why, leaving, deaf: None }
    }
}

/// How often the socket is polled.
#[derive(Debug, Default)]
struct SocketPace {
    /// The time of this turn, nanoseconds.
    now: u64,
    /// Until when every turn polls the socket, and when it is polled next, nanoseconds.
    hot: u64,
    due: u64,
}

impl SocketPace {
    /// True if the socket is to be polled now.
    #[inline]
    fn is_due(&mut self) -> bool {
        let due = self.now < self.hot || self.now >= self.due;
        if due {
            self.due = self.now + SOCKET_LOOK_NS;
        }
        due
    }

    /// The socket has received something.
    fn on_arrival(&mut self) {
        self.hot = self.now + SOCKET_HOT_NS;
    }
}

/// The device's part of a link.
#[derive(Debug)]
pub(crate) struct Rdma {
    /// `None`: it broke, and is not replaced yet; or the device has none.
    pub(super) link: Option<UdLink>,
    /// A pool in which packets of full size are made; `None`: there is no memory for it.
    pub(super) pool: Option<Arc<Pool>>,
    /// The queue-pair address; after the queue pair broke, the last one as [`Place::gone`].
    pub(super) place: Place,
    pub(super) ways: Ways<HandleId>,
    pub(super) silence: Silence,
    /// Peers to give up, because a device is required and theirs does not answer.
    pub(super) unreached: Vec<Address>,
    /// Those that were given up, and where their queue pairs are: no new connection is made before one answers.
    pub(super) given_up: HashMap<Address, Place>,
    /// The next port, for peers that do not answer at this one.
    pub(super) next: Option<Box<Self>>,
    pub(super) opening: Opening,
    /// Where there are several ports: peers that have answered at this one, for the bulk path.
    pub(super) found: Found,
    /// The number of the port, from 0 on.
    pub(super) rail: usize,
    /// The sender of the last datagram.
    pub(super) source: (u32, Address),
    /// Path challenges that arrived and are not answered yet.
    pub(super) called: Vec<Call>,
    pub(super) own: Own,
    pub(super) port: PortInUse,
    pub(super) upkeep: Upkeep,
    pace: SocketPace,
    /// Without `proven`, `doubted` and `handles`; the datagrams are those of earlier queue pairs.
    pub(super) counts: RdmaCounts,
}

/// UDP and a UD queue pair as one link.
#[derive(Debug)]
pub(crate) struct HybridLink {
    udp: UdpLink,
    rdma: Option<Box<Rdma>>,
}

impl HybridLink {
    pub(crate) fn new(udp: UdpLink, rdma: Option<Box<Rdma>>) -> Self {
        Self { udp, rdma }
    }

    /// Datagrams for which there is room until the next `receive`, where one costs `cost` bytes in a socket's buffer.
    pub(crate) fn receive_window(&self, cost: usize) -> usize {
        let udp = self.udp.receive_buffer() / cost;
        let device = self.rdma.as_ref().and_then(|rdma| rdma.link.as_ref());
        device.map_or(udp, |link| udp.min(link.receive_room()))
    }

    /// Longest packet that goes through the device, bytes; 0: there is none.
    pub(crate) fn direct_max(&self) -> usize {
        let link = self.rdma.as_ref().and_then(|rdma| rdma.link.as_ref());
        link.map_or(0, UdLink::datagram_max)
    }

    /// A pool for packets that the device sends without a copy, of at most `longest` bytes; `None`: there is no device,
    /// or no memory for it.
    pub(crate) fn pool(&mut self, longest: usize) -> Option<Arc<Pool>> {
        let of_device = self.direct_max();
        let each = if of_device > 0 { of_device } else { longest };
        let rdma = self.rdma.as_mut()?;
        let pool = Pool::new(each).ok()?;
        if let Some(link) = &mut rdma.link {
            link.lend(pool.clone());
        }
        rdma.pool = Some(pool.clone());
        Some(pool)
    }

    /// The address that the socket is bound to.
    pub(crate) fn local_addr(&self) -> Result<SocketAddr, Errno> {
        self.udp.local_addr()
    }

    /// How often each port's part moved to another port, or began anew; the bulk path there must follow.
    #[inline]
    pub(crate) fn moves(&self) -> impl Iterator<Item = u64> {
        self.rdma.iter().flat_map(|rdma| rdma.ports().map(|port| port.port.moves))
    }

    /// A peer that is reached at the port of this number now: connections with it are to be made there.
    #[inline]
    pub(crate) fn take_found(&mut self, now: u64) -> Option<(Address, usize)> {
        self.rdma.as_mut()?.take_found(now)
    }

    /// The connection to `peer` could not follow it at `now`: it is found again later.
    #[cold]
    pub(crate) fn found_again(&mut self, peer: &Address, now: u64) {
        if let Some(rdma) = &mut self.rdma {
            rdma.found.again(peer, now);
        }
    }

    /// The peer at `address` is not connected to any more.
    pub(crate) fn forget(&mut self, address: &Address) {
        if let Some(rdma) = &mut self.rdma {
            rdma.forget(address);
        }
    }

    /// The bulk path of the port of this number.
    pub(crate) fn bulk_at(&self, rail: usize) -> Option<Box<dyn Bulk>> {
        let port = self.rdma.as_ref()?.ports().nth(rail)?;
        rc::open(&port.port.spot, &port.own.settings).ok().flatten()
    }

    /// Packets to `to` go through the device now.
    pub(crate) fn sends_direct(&mut self, to: &Address) -> bool {
        self.rdma.as_mut().is_some_and(|rdma| rdma.longest_to(to) > 0)
    }

    /// A device is required, and that of `to` does not answer.
    pub(crate) fn is_given_up(&self, to: &Address) -> bool {
        self.rdma.as_ref().is_some_and(|rdma| rdma.ports().any(|r| r.given_up.contains_key(to)))
    }

    /// Connections to `to` are worth a try: packets go through the device, or one side's device has no packets that
    /// would show it.
    pub(crate) fn may_connect(&mut self, to: &Address) -> bool {
        self.sends_direct(to) || self.rdma.as_mut().is_some_and(|rdma| rdma.connects(to))
    }

    /// The descriptors that become readable when there is something to receive; a device's only after `sleep`.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.udp.fd()).chain(self.rdma.iter().map(|rdma| rdma.port.watch.fd()))
    }

    /// The descriptors, for a sleeping thread.
    pub(crate) fn watched(&self) -> Result<Vec<Watched>, Errno> {
        let mut all: Vec<Watched> = vec![self.udp.shared()];
        if let Some(rdma) = &self.rdma {
            all.push(Arc::new(duplicate(rdma.port.watch.fd())?));
        }
        Ok(all)
    }

    /// Prepares for sleep on the descriptors. False: something has arrived.
    #[inline]
    pub(crate) fn sleep(&mut self) -> bool {
        let Some(rdma) = &mut self.rdma else { return true };
        // After waking, both links are checked.
        rdma.pace.due = 0;
        rdma.upkeep.tend_at = 0;
        rdma.sleep()
    }

    /// The same for a thread that sleeps already: another one has received meanwhile.
    pub(crate) fn rearm(&mut self) -> bool {
        self.rdma.as_mut().is_none_or(|rdma| rdma.rearm())
    }

    /// A turn begins: maintains the device if that is due.
    #[inline]
    pub(crate) fn tend(&mut self, now: u64) {
        let Some(rdma) = &mut self.rdma else { return };
        rdma.pace.now = now;
        if rdma.upkeep.tend_at <= now {
            rdma.tend(now, &mut self.udp);
        }
    }

    /// True if there is a device.
    #[inline]
    pub(crate) fn has_device(&self) -> bool {
        self.rdma.as_ref().is_some_and(|rdma| rdma.link.is_some())
    }

    /// True if the device is emulated by kernel threads.
    #[inline]
    pub(crate) fn is_threads(&self) -> bool {
        let link = self.rdma.as_ref().and_then(|rdma| rdma.link.as_ref());
        link.is_some_and(UdLink::is_threads)
    }

    /// True if there is a device and the socket has been quiet: everything but the device can wait for the next full
    /// progress.
    #[inline]
    pub(crate) fn is_calm(&self) -> bool {
        let Some(rdma) = &self.rdma else { return false };
        let calm = rdma.pace.now >= rdma.pace.hot && rdma.link.is_some();
        calm && rdma.ports().all(|port| port.called.is_empty())
    }

    /// True if the device has received something.
    #[inline]
    pub(crate) fn has_arrived(&mut self) -> bool {
        let Some(rdma) = &mut self.rdma else { return false };
        rdma.has_arrived()
    }

    /// Receives from the device. Returns the number of datagrams.
    #[inline]
    pub(crate) fn take_arrived(&mut self, sink: &mut impl LinkSink) -> usize {
        let Some(rdma) = &mut self.rdma else { return 0 };
        rdma.receive(sink)
    }

    /// A peer that has to be given up, because a device is required and its own does not answer.
    #[inline]
    pub(crate) fn take_unreached(&mut self) -> Option<Address> {
        self.rdma.as_mut()?.take_unreached()
    }

    /// When `tend` has something to do even if nothing arrives, nanoseconds.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        self.rdma.as_ref()?.wake_at(0)
    }

    /// Counts of the socket.
    pub(crate) fn counts(&self) -> LinkCounts {
        self.udp.counts()
    }

    /// Counts of the device.
    pub(crate) fn rdma_counts(&self) -> Option<RdmaCounts> {
        let mut sum = RdmaCounts::default();
        self.rdma.as_ref()?.ports().for_each(|port| sum.add(&port.counts()));
        Some(sum)
    }

    /// Datagrams that the socket discarded on arrival.
    pub(crate) fn dropped(&self) -> u64 {
        self.udp.dropped()
    }
}

#[cfg(test)]
impl HybridLink {
    /// Removes the device without telling any peer.
    pub(crate) fn drop_device(&mut self) {
        self.rdma = None;
    }

    /// Adds a device without datagrams, and that `peer` has one too.
    pub(crate) fn add_connecting(&mut self, peer: &Address) {
        let mut rdma = Rdma::connecting();
        rdma.learn(peer, rdma.place);
        self.rdma = Some(Box::new(rdma));
    }

    /// The device in use.
    pub(crate) fn device(&self) -> Option<OpenDevice> {
        self.rdma.as_ref()?.port.device.clone()
    }

    /// Breaks the queue pair, as a device would.
    pub(crate) fn break_queue_pair(&mut self) {
        self.rdma.as_mut().unwrap().link.as_mut().unwrap().break_queue_pair();
    }
}

impl Link for HybridLink {
    fn datagram_max(&self) -> usize {
        self.udp.datagram_max()
    }

    #[inline]
    fn direct(&mut self, to: &Address) -> usize {
        self.rdma.as_mut().map_or(0, |rdma| rdma.longest_to(to))
    }

    #[inline]
    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize {
        let (Some(rdma), Some(first)) = (&mut self.rdma, packets.first()) else {
            return self.udp.send(to, packets);
        };
        if first.get(..4) == Some(&MAGIC) {
            return match rdma.introduce(to, first) {
                Some(introduced) => self.udp.send(to, &[IoSlice::new(&introduced)]),
                None => self.udp.send(to, packets),
            };
        }
        let taken = match rdma.send(to, packets) {
            Some(taken) => taken,
            // Over UDP their tags would be invalid. The next attempt calls `is_sound` again.
            None if first.get(1).is_some_and(|flags| flags & HEADER_ONLY != 0) => 0,
            None => {
                if first.len() > self.udp.datagram_max() {
                    self.udp.fragment();
                }
                return self.udp.send(to, packets);
            }
        };
        if taken < packets.len() {
            self.udp.forget_refusals();
        }
        taken
    }

    #[inline]
    fn is_sound(&mut self, to: &Address, len: usize) -> bool {
        self.rdma.as_mut().is_some_and(|rdma| len <= rdma.longest_to(to))
    }

    fn doubt(&mut self, to: &Address) {
        if let Some(rdma) = &mut self.rdma {
            rdma.doubt(to);
        }
    }

    fn is_full(&self) -> bool {
        self.udp.is_full()
    }

    fn note_refusals(&mut self, to: &Address, ns: u64) {
        self.udp.note_refusals(to, ns);
    }

    fn allow_fragments(&mut self, to: &Address, carried: usize) {
        self.udp.allow_fragments(to, carried);
    }

    #[inline]
    fn receive(&mut self, sink: &mut impl LinkSink) -> usize {
        let Some(rdma) = &mut self.rdma else { return self.udp.receive(sink) };
        let mut n = rdma.receive(sink);
        if rdma.link.is_none() || rdma.pace.is_due() {
            let arrived = self.udp.receive(&mut Introduced { rdma, sink });
            if arrived > 0 {
                rdma.pace.on_arrival();
            }
            n += arrived;
            rdma.call();
            if rdma.upkeep.judge {
                rdma.hear_silence(rdma.pace.now);
            }
        }
        n
    }
}

/// Reads queue-pair addresses from handshake packets, and passes everything on.
struct Introduced<'a, S> {
    rdma: &'a mut Rdma,
    sink: &'a mut S,
}

impl<S: LinkSink> LinkSink for Introduced<'_, S> {
    #[inline]
    fn on_datagram(&mut self, from: &Address, bytes: &[u8], condition: Condition) {
        self.rdma.on_heard(from);
        if let Some((address, place)) = read_trailer(&self.rdma.own.key, bytes) {
            let address = address.on_link_of(from);
            self.sink.on_datagram(from, bytes, condition);
            // Nothing is kept of addresses that may be made up.
            if self.sink.knows(&address) {
                self.rdma.learn(&address, place);
            }
            return;
        }
        if let Some(mut news) = read_news(&self.rdma.own.key, bytes) {
            news.address = news.address.on_link_of(from);
            return self.rdma.on_news(&news);
        }
        self.sink.on_datagram(from, bytes, condition);
    }

    fn knows(&self, address: &Address) -> bool {
        self.sink.knows(address)
    }

    fn on_refused(&mut self, to: &Address, errno: Errno, quote: &[u8]) {
        self.sink.on_refused(to, errno, quote);
    }

    fn on_too_long(&mut self, to: &Address, carried: usize) -> bool {
        self.sink.on_too_long(to, carried)
    }

    fn on_narrowed(&mut self, carried: usize) {
        self.sink.on_narrowed(carried);
    }
}

impl Rdma {
    /// Errors: EMFILE, ENFILE, ENOMEM.
    pub(super) fn new(
        made: Made,
        spot: Spot,
        settings: RdmaSettings,
        spread: Spread,
        key: JobKey,
        me: Address,
    ) -> Result<Self, Errno> {
        let mut rdma = Self::bare(made.at.place, spot, Own { settings, spread, key, me })?;
        (rdma.link, rdma.port.device) = (made.link, Some(made.at.device.clone()));
        rdma.watch_device();
        rdma.settle(Some(made.at));
        Ok(rdma)
    }

    /// At `place`, before it has a device and a queue pair. Errors: EMFILE, ENFILE, ENOMEM.
    fn bare(place: Place, spot: Spot, own: Own) -> Result<Self, Errno> {
        let nobody = Address(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        let watch = Epoll::new()?;
        let recovery = Recovery::new(clock::now_ns());
        let required = own.settings.policy == RdmaPolicy::Require;
        let silence = Silence::new(if required { SILENT_REQUIRED_NS } else { SILENT_NS });
        Ok(Self {
            place,
            link: None,
            pool: None,
            ways: Ways::default(),
            silence,
            unreached: Vec::new(),
            given_up: HashMap::new(),
            next: None,
            opening: Opening::default(),
            found: Found::default(),
            rail: 0,
            source: (u32::MAX, nobody),
            called: Vec::new(),
            own,
            port: PortInUse { device: None, spot, moves: 0, connects_only: false, watch },
            upkeep: Upkeep::new(recovery),
            pace: SocketPace::default(),
            counts: RdmaCounts::default(),
        })
    }

    /// As with a device that has no datagrams.
    #[cfg(test)]
    pub(super) fn connecting() -> Self {
        use crate::transport::net::network::Network;
        let own = Own {
            settings: RdmaSettings { policy: RdmaPolicy::Require, ..RdmaSettings::default() },
            spread: Spread::new(1, false),
            key: JobKey::from_bytes([7; 16]),
            me: Address(SocketAddr::from((Ipv4Addr::LOCALHOST, 1))),
        };
        let place = Place { network: Network::Roce, mtu: 1024, number: 0, lid: 0, gid: [1; 16] };
        let mut rdma = Self::bare(place, Spot::default(), own).unwrap();
        rdma.port.connects_only = true;
        rdma
    }

    /// This port and the further ones.
    fn ports(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |port| port.next.as_deref())
    }

    fn counts(&self) -> RdmaCounts {
        let earlier = self.counts.datagrams;
        RdmaCounts {
            datagrams: self.link.as_ref().map_or(earlier, |link| earlier.plus(link.counts())),
            proven: self.ways.proven,
            doubted: self.ways.doubted,
            handles: self.link.as_ref().map_or(0, UdLink::handles),
            ..self.counts
        }
    }

    /// A turn at `now` begins.
    pub(super) fn set_now(&mut self, now: u64) {
        self.pace.now = now;
    }

    fn sleep(&mut self) -> bool {
        let watch = &self.port.watch;
        self.link.as_mut().is_none_or(|link| link.sleep(watch))
            && self.next.as_mut().is_none_or(|next| next.sleep())
    }

    fn rearm(&mut self) -> bool {
        let watch = &self.port.watch;
        self.link.as_mut().is_none_or(|link| link.rearm(watch))
            && self.next.as_mut().is_none_or(|next| next.rearm())
    }

    #[inline]
    fn has_arrived(&mut self) -> bool {
        self.link.as_mut().is_some_and(UdLink::has_arrived)
            || self.next.as_mut().is_some_and(|next| next.has_arrived())
    }

    fn take_unreached(&mut self) -> Option<Address> {
        self.unreached.pop().or_else(|| self.next.as_mut()?.take_unreached())
    }

    #[inline]
    fn on_heard(&mut self, from: &Address) {
        self.silence.on_heard(from, self.pace.now);
        if let Some(next) = &mut self.next {
            next.set_now(self.pace.now);
            next.on_heard(from);
        }
    }

    /// See [`Link::doubt`].
    #[cold]
    fn doubt(&mut self, to: &Address) {
        if let Some(next) = &mut self.next {
            next.doubt(to);
        }
        if let (Some(link), Some(place)) = (&mut self.link, self.ways.place(to)) {
            link.renew(&place);
        }
        let doubted = self.ways.doubt(to, process::random_u64());
        self.expect(to);
        if doubted && self.ways.doubted.is_power_of_two() {
            log::limited!(
                "{to} does not answer through the RDMA device: data goes over UDP, which is slower, until it does ({} such so far). Check the link of both devices (ibv_devinfo) and the network between them",
                self.ways.doubted
            );
        }
    }

    /// The handshake packet `hello` with this endpoint's queue-pair address behind it, if there is room for that.
    #[cold]
    fn introduce(&mut self, to: &Address, hello: &[u8]) -> Option<[u8; INTRODUCED_LEN]> {
        self.call();
        let uses_port = self.link.is_some() || self.port.connects_only;
        if !uses_port || !is_greeting(hello) {
            return None;
        }
        let place = self.home_for(to);
        with_trailer(&self.own.key, hello, &place)
    }

    /// The peer at `address` says that its queue pair is at `place`.
    #[cold]
    pub(super) fn learn(&mut self, address: &Address, place: Place) {
        if let Some(next) = self.next.as_mut().filter(|next| next.ways.position(address).is_some())
        {
            next.learn(address, place);
        }
        // A connection with it may begin anew.
        if self.rail > 0 && self.ways.open(address).is_some() {
            self.note_found(address);
        }
        self.ways.learn(address, place, process::random_u64());
        if self.given_up.get(address) == Some(&place) {
            self.unreached.push(*address);
            return;
        }
        self.given_up.remove(address);
        self.expect(address);
    }

    /// The peer at `address` has to answer path challenges, if both devices have datagrams and its path is not open.
    fn expect(&mut self, address: &Address) {
        let asked = self.link.is_some()
            && self.longest_to(address) == 0
            && self.ways.place(address).is_some_and(|place| place.number != 0);
        match asked {
            true => self.silence.expect(address, self.pace.now),
            false => self.silence.forget(address),
        }
    }

    /// Whether the devices of both sides connect, and one has no datagrams that would show it. Their agreement does.
    #[cold]
    pub(super) fn connects(&mut self, to: &Address) -> bool {
        let here = self.place;
        let Some(there) = self.ways.place(to) else { return false };
        let one = self.port.connects_only || self.link.is_some() && there.number == 0;
        one && !there.is_gone() && here.reaches(&there)
    }

    /// Longest packet that goes to `to` through the device, bytes; 0: none does.
    #[inline]
    fn longest_to(&mut self, to: &Address) -> usize {
        match (&self.link, self.ways.open(to)) {
            (Some(link), Some(way)) => link.longest_to(way.place),
            _ => self.next.as_mut().map_or(0, |next| next.longest_to(to)),
        }
    }

    /// Sends `packets` if the path is open and carries them; `None`: they must go over UDP.
    #[inline]
    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> Option<usize> {
        let first = packets.first()?;
        if first.first() == Some(&CLOSE) {
            return None;
        }
        if self.link.is_none() {
            return self.next.as_mut()?.send(to, packets);
        }
        let Some(way) = self.ways.open(to) else {
            if let Some(taken) = self.next.as_mut().and_then(|next| next.send(to, packets)) {
                return Some(taken);
            }
            self.ways.detour(to, self.pace.now);
            self.call();
            return None;
        };
        let link = self.link.as_mut()?;
        if first.len() > link.longest_to(way.place) {
            return None;
        }
        match link.send(way.place, way.handle, packets) {
            Ok(taken) => Some(taken),
            Err(Errno(libc::EAGAIN)) => None, // its handle is being made
            Err(errno) => {
                log::limited!(
                    cause: errno.0,
                    "the RDMA device does not send to {to} ({errno}): data goes over UDP, which is slower"
                );
                self.ways.close(to, process::random_u64());
                self.upkeep.tend_at = 0; // it may be broken
                None
            }
        }
    }

    /// Receives from the device.
    #[inline]
    fn receive(&mut self, sink: &mut impl LinkSink) -> usize {
        let further = self.next.as_mut().map_or(0, |next| next.receive(sink));
        let Self { link, ways, own, source, called, .. } = self;
        let Some(link) = link else { return further };
        let n = link.receive(|arrival| {
            if arrival.bytes.get(..4) == Some(&MAGIC) {
                called.extend(Call::decode(&own.key, arrival.bytes));
                return;
            }
            if source.0 != arrival.source {
                let known = ways.by_number(arrival.source).copied();
                let nobody = Address(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
                *source = (arrival.source, known.unwrap_or(nobody));
            }
            let condition = Condition { congested: arrival.congested, sound: true };
            sink.on_datagram(&source.1, arrival.bytes, condition);
        });
        if link.broken().is_some() {
            self.upkeep.tend_at = 0;
        }
        if !self.called.is_empty() {
            self.on_calls();
        }
        self.call();
        n + further
    }

    #[cold]
    fn on_calls(&mut self) {
        for mut call in std::mem::take(&mut self.called) {
            call.address = call.address.on_link_of(&self.own.me);
            if call.address == self.own.me || call.kind == CallKind::News {
                continue;
            }
            if call.kind == CallKind::Pong {
                let opened = self.ways.answered(&call.address, &call.place, call.nonce);
                if opened.is_some() {
                    self.silence.forget(&call.address);
                    self.given_up.remove(&call.address);
                    self.note_found(&call.address);
                }
                self.source.0 = u32::MAX;
                if opened == Some(Opened::First) {
                    log::info(format_args!(
                        "{} is reached through the device, queue pair {:#x}",
                        call.address, call.place.number
                    ));
                }
                continue;
            }
            self.learn(&call.address, call.place);
            let (address, place) = (self.own.me, self.place);
            let answer = Call { kind: CallKind::Pong, nonce: call.nonce, address, place };
            self.counts.answers += 1;
            self.try_send(&call.place, &answer);
        }
    }

    /// Sends the path challenges that are due.
    #[inline]
    pub(super) fn call(&mut self) {
        if let Some(link) = &mut self.link {
            link.take_handles();
        }
        while let Some(ask) = self.ways.next_ask() {
            if self.link.is_none() {
                continue;
            }
            let (address, place) = (self.own.me, self.place);
            let call = Call { kind: CallKind::Ping, nonce: ask.nonce, address, place };
            self.counts.calls += 1;
            self.try_send(&ask.to, &call);
        }
    }

    /// A challenge or response that cannot be sent counts as lost.
    fn try_send(&mut self, to: &Place, call: &Call) {
        let Some(link) = &mut self.link else { return };
        let bytes = call.padded(&self.own.key, link.longest_to(to));
        if let Err(errno) = link.send_call(to, &bytes) {
            if self.counts.calls.is_power_of_two() {
                log::info(format_args!("no way through the device to {to:?}: {errno}"));
            }
        }
    }
}
