//! The router decides which transport carries messages to a peer. It is the one [`Iface`] that the protocol layer
//! drives. It names no transport; [`list`] does.

mod blocked;
mod figures;
mod list;
mod moving;
mod pace;
mod routes;

use super::interface::*;
use super::peers::PeerTable;
use super::{
    Address, Assisted, JobKey, LaneId, LocalHost, PeerId, RemoteKey, Share, Source, Taken, settling,
};
use crate::config::Config;
use crate::memory::{MAX_SEGMENTS, Segment, SegmentList};
use crate::sys::cancel::Shield;
use crate::sys::cma::Range;
use crate::sys::late_set::LateSet;
use crate::sys::udp::UdpPort;
use crate::sys::{Errno, clock, process};
use crate::telemetry::log;
use blocked::Blocked;
use list::{Lane, Lanes, each_lane, each_lane_mut, on_lane, on_lane_mut, without_lane};
pub(crate) use list::{addresses_of, device_at, with_device};
use pace::Pace;
pub(crate) use routes::Router;
use routes::{NO_WAY, Reported, Route, set_route};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Free ports tried before giving up.
const PORT_TRIES: usize = 64;
/// How much longer the transports wait for their turns where processes outnumber processors and nothing is expected.
const SELDOM: u64 = 8;

impl Router {
    /// Opens all transports under `bind`; port 0 takes a free one. Errors: EADDRINUSE, EADDRNOTAVAIL, EMFILE, ENFILE,
    /// ENOMEM, and those of a system-call filter.
    pub(crate) fn open(
        bind: Address,
        config: &Config,
        key: (JobKey, Source),
    ) -> Result<Self, Errno> {
        let host = LocalHost::detect();
        let mut last = Errno(libc::EADDRINUSE);
        let range = config.net.ports.filter(|_| bind.port() == 0);
        // The processes of a node begin at different ports.
        let first = process::pid() as usize;
        for n in 0..range.map_or(PORT_TRIES, |range| range.count()) {
            let mut at = bind;
            if let Some(range) = range {
                at.0.set_port(range.port(first + n));
            }
            match Self::open_at(at, config, key, &host) {
                Err(e) if e.0 == libc::EADDRINUSE && bind.port() == 0 => last = e,
                other => return other,
            }
        }
        if let Some(range) = range {
            log::limited!(
                "no port of FI_UDRV_PORTS={range} is free at {bind}: each endpoint of this node takes one; widen the range"
            );
        }
        Err(last)
    }

    fn open_at(
        bind: Address,
        config: &Config,
        (key, key_source): (JobKey, Source),
        host: &LocalHost,
    ) -> Result<Self, Errno> {
        let port = UdpPort::bind(&bind.0)?;
        let mut me = bind;
        me.0.set_port(port.local_addr()?.port());
        let me = named(me, host);
        let epoll = Arc::new(LateSet::new()?);
        let mut peers = PeerTable::new(host.clone());
        let my_id = peers.intern(&me).ok_or(Errno(libc::ENOMEM))?;
        let mut opening =
            Opening { me, my_id, host, config, key, key_source, epoll: &epoll, port: Some(port) };
        let lanes = Lanes::open(&mut opening)?;
        let port = opening.port;
        let mut names = String::new();
        each_lane!(lanes, (lane, t) => if t.is_open() {
            if !names.is_empty() {
                names.push_str(", ");
            }
            names.push_str(name_of(t));
        });
        log::info(format_args!("endpoint {me} opened: {names}"));
        Ok(Self {
            peers,
            routes: Vec::new(),
            me,
            lanes,
            _port: port,
            epoll,
            pace: Pace::default(),
            complained: None,
            moving: Vec::new(),
            mixed: false,
            reported: Reported::default(),
            blocked: Vec::new(),
        })
    }

    /// The endpoint's address.
    pub(crate) fn address(&self) -> Address {
        self.me
    }

    /// Messages that peers may not have yet: those being moved from one transport to another, and those that the
    /// transports count.
    pub(crate) fn unacknowledged(&self) -> usize {
        let mut n = self.moving();
        each_lane!(self.lanes, (lane, t) => n += t.unacknowledged());
        n
    }

    /// The transport to `peer`. Makes contact for the first message, or after the last contact has ended.
    #[inline]
    fn ensure(&mut self, peer: PeerId) -> Result<Lane, SendError> {
        match self.route(peer) {
            Route::By(lane) if on_lane!(self.lanes, lane, t => t.is_connected(peer), false) => {
                Ok(lane)
            }
            Route::Moving => Err(SendError::Again),
            Route::By(_) | Route::None => self.make_contact(peer),
        }
    }

    /// An access at bare addresses is announced over a way to the peer, which is made if there is none. `NO_WAY`: it
    /// cannot be made, and the bytes have to be sent.
    fn ensure_for(&mut self, peer: PeerId, key: &RemoteKey) -> Result<(), SendError> {
        if *key != RemoteKey::ADDRESSES {
            return Ok(());
        }
        let known = self.lane(peer);
        match self.ensure(peer) {
            Ok(lane) if known.is_none_or(|known| known == lane) => Ok(()),
            Err(SendError::Again) => Err(SendError::Again),
            Ok(_) | Err(SendError::Unreachable(_)) => Err(NO_WAY),
        }
    }

    #[cold]
    fn make_contact(&mut self, peer: PeerId) -> Result<Lane, SendError> {
        let _shield = Shield::raise();
        let unknown = SendError::Unreachable(Errno(libc::EADDRNOTAVAIL));
        let address = self.peers.address(peer).ok_or(unknown)?;
        match self.choose(peer, &address) {
            Ok((lane, contact)) => {
                each_lane_mut!(self.lanes, (lane, t) => t.meet(peer, &address));
                if contact == Contact::Settling {
                    return Err(self.wait_for_link(peer, lane));
                }
                self.complained = None;
                set_route(&mut self.routes, peer, Route::By(lane));
                Ok(lane)
            }
            Err(e @ SendError::Unreachable(errno)) => {
                if self.complained != Some((peer, errno)) {
                    self.complained = Some((peer, errno));
                    log::limited!(cause: errno.0, "cannot reach {address}: {errno}");
                }
                Err(e)
            }
            Err(SendError::Again) => Err(SendError::Again),
        }
    }

    /// The first transport that makes contact with `peer`, and its answer.
    fn choose(&mut self, peer: PeerId, address: &Address) -> Result<(Lane, Contact), SendError> {
        let (mut missing, mut failed) = (None, None);
        for lane in Lane::ALL {
            let asked = on_lane_mut!(
                self.lanes, *lane,
                t => t.connect(peer, address, missing.is_some()),
                Ok(Contact::Elsewhere)
            );
            match asked {
                Ok(contact @ (Contact::Linked | Contact::Settling)) => {
                    self.blocked.retain(|blocked| blocked.peer != peer);
                    return Ok((*lane, contact));
                }
                Ok(Contact::Elsewhere) => {}
                Ok(Contact::Missing(errno)) => missing = missing.or(Some(errno)),
                Ok(Contact::Refused(errno)) => return Err(SendError::Unreachable(errno)),
                Ok(Contact::Later) | Err(SendError::Again) => {
                    if self.is_blocked(peer, *lane, asked.is_ok()) {
                        return Err(SendError::Again);
                    }
                    let way = on_lane!(self.lanes, *lane, t => name_of(t), "");
                    log::limited!(
                        "no link to {address} by {way} for long: its messages go another way"
                    );
                }
                Err(SendError::Unreachable(errno)) => {
                    failed = Some(errno);
                    let way = on_lane!(self.lanes, *lane, t => name_of(t), "");
                    log::limited!(cause: errno.0, "{address} is not reached by {way}: {errno}");
                }
            }
        }
        if (missing, failed) == (None, None) {
            log::limited!(
                "no transport of this endpoint reaches {address}: FI_UDRV_NET=0 leaves peers of this node only, and FI_UDRV_SHM=0 none of them"
            );
        }
        Err(SendError::Unreachable(failed.or(missing).unwrap_or(Errno(libc::EHOSTUNREACH))))
    }

    /// A transport has no room for `peer` now, or cannot ask it yet. False: this has lasted too long, and later transports
    /// can be tried.
    #[cold]
    fn is_blocked(&mut self, peer: PeerId, lane: Lane, later: bool) -> bool {
        let Some(blocked) = self.blocked.iter_mut().find(|blocked| blocked.peer == peer) else {
            self.blocked.push(Blocked::new(peer));
            return true;
        };
        if blocked.goes_on(later) || !self.has_other(lane) {
            return true;
        }
        self.blocked.retain(|blocked| blocked.peer != peer);
        false
    }

    /// A later transport in the list is open and may reach the same peers.
    fn has_other(&self, lane: Lane) -> bool {
        let mut others = false;
        each_lane!(self.lanes, (other, t) => others |= other as usize > lane as usize && t.is_open() && carries(t));
        others
    }

    /// Whether a transport has traffic, and how many times longer than usual the transports wait for their turns.
    fn traffic(&self) -> (bool, u64) {
        let (mut busy, mut outnumbered) = (false, false);
        each_lane!(self.lanes, (lane, t) => {
            busy |= t.has_traffic();
            outnumbered |= t.is_outnumbered();
        });
        // Most of the time is that of other processes then.
        (busy, if outnumbered && !busy { SELDOM } else { 1 })
    }

    /// Runs the turns of the transports that are due.
    #[inline(never)]
    fn look_around(&mut self, handler: &mut impl Handler) -> usize {
        let _shield = Shield::raise();
        self.pace.begin();
        let (now, still) = (clock::now_ns(), self.pace.is_still());
        self.count_gap(now);
        let (busy, seldom) = self.traffic();
        let mut n = 0;
        for lane in Lane::ALL {
            let (every, urgent) = on_lane!(
                self.lanes, *lane,
                t => (every_ns(t, still, busy).saturating_mul(seldom), t.is_urgent()),
                continue
            );
            if self.pace.is_due(*lane as usize, now, every) || urgent {
                // A peer's messages by later transports are delivered before its departure by this one. Its messages by
                // earlier ones are drained with its departure.
                if self.mixed {
                    for later in Lane::ALL.iter().rev().take_while(|later| *later != lane) {
                        n += self.turn(*later, handler).0;
                    }
                }
                n += self.turn(*lane, handler).0;
                self.move_messages(handler);
            }
        }
        if now >= self.reported.due {
            self.report(now, handler);
        }
        n
    }

    /// Runs a turn of one transport; returns how many events it had and what it polled. The caller holds a [`Shield`].
    #[inline(never)]
    fn turn(&mut self, lane: Lane, handler: &mut impl Handler) -> (usize, LookedAt) {
        let mut departed = Vec::new();
        let Self { peers, routes, lanes, mixed, .. } = self;
        let (n, looked_at) = without_lane!(lanes, lane, t => {
            let two_way = is_two_way(t);
            let mut beside =
                Beside { handler, lanes, routes, mixed, lane, two_way, departed: &mut departed };
            (t.turn(peers, &mut beside), t.looked_at())
        }, (0, LookedAt::Everything));
        for peer in departed {
            self.forget_moving(peer);
        }
        (n, looked_at)
    }

    /// From now on peers ring the doorbell when this endpoint sleeps.
    pub(crate) fn enable_waiting(&mut self) {
        each_lane_mut!(self.lanes, (lane, t) => t.enable_waiting());
    }

    /// Prepares for sleep on [`Router::wait_fd`]; `false` means there is work already.
    pub(crate) fn sleep(&mut self) -> bool {
        // Where there is work, transports that sleep already go on: somebody else may have put them to sleep.
        let mut idle = self.moving.is_empty();
        each_lane_mut!(self.lanes, (lane, t) => idle = idle && t.sleep());
        self.reported.sleeps += u64::from(idle);
        self.reported.looked_at = 0;
        idle
    }

    /// Ends the state that `sleep` began.
    pub(crate) fn awake(&mut self) {
        each_lane_mut!(self.lanes, (lane, t) => t.awake());
    }

    /// Wakes the threads that sleep on [`Router::wait_fd`] since [`Router::sleep`].
    pub(crate) fn rouse(&mut self) {
        each_lane_mut!(self.lanes, (lane, t) => t.rouse());
    }

    /// Makes the next poll look at everything that may have an event.
    pub(crate) fn hasten(&mut self) {
        self.pace.hasten();
        each_lane_mut!(self.lanes, (lane, t) => t.hasten());
    }

    /// Becomes readable when a message arrives while asleep, and when a link changes. Errors: those of [`LateSet::fd`].
    pub(crate) fn wait_fd(&self) -> Result<RawFd, Errno> {
        self.epoll.fd().map(|fd| fd.as_raw_fd())
    }

    /// Whether a thread that polls one of this process's `endpoints` should yield the processor. True when nothing has
    /// arrived for a while, waiting costs more than polling, and there are, or may be, more processes or polling
    /// threads than processors; and in a wait that has taken long, as the application may have threads that do not poll.
    #[inline]
    pub(crate) fn gives_way(&self, endpoints: usize) -> bool {
        if !self.pace.is_long() {
            return false;
        }
        let mut crowded = self.pace.is_endless();
        each_lane!(self.lanes, (lane, t) => crowded |= t.is_crowded(endpoints));
        crowded
    }

    /// The transport for bare addresses of the peer's process, if that is what the key says.
    fn lane_of_addresses(&self, peer: PeerId, key: &RemoteKey) -> Option<Lane> {
        self.lane(peer).filter(|_| *key == RemoteKey::ADDRESSES)
    }

    /// The transport by which messages of `peer` arrive.
    fn heard_by(&self, peer: PeerId) -> Option<Lane> {
        let mut by = None;
        each_lane!(self.lanes, (lane, t) => by = by.or_else(|| t.hears(peer).then_some(lane)));
        by
    }

    /// Messages from `peer` arrive by another transport than messages to it take.
    fn is_mixed(&self, peer: PeerId) -> bool {
        let lane = self.lane(peer);
        let mut mixed = false;
        each_lane!(self.lanes, (other, t) => mixed |= Some(other) != lane && t.hears(peer));
        mixed
    }
}

fn name_of<T: Transport>(_: &T) -> &'static str {
    T::NAME
}

fn carries<T: Transport>(_: &T) -> bool {
    T::CARRIES
}

fn is_two_way<T: Transport>(_: &T) -> bool {
    T::TWO_WAY
}

fn every_ns<T: Transport>(_: &T, still: bool, busy: bool) -> u64 {
    T::every_ns(still, busy)
}

/// The handler for a turn of one transport, where other transports may also receive from the same peers.
struct Beside<'a, H> {
    handler: &'a mut H,
    lanes: &'a mut Lanes,
    routes: &'a mut Vec<Route>,
    mixed: &'a mut bool,
    lane: Lane,
    two_way: bool,
    departed: &'a mut Vec<PeerId>,
}

impl<H: Handler> Handler for Beside<'_, H> {
    fn on_peer(&mut self, peer: PeerId, address: &Address) {
        let mut gone = None;
        each_lane!(self.lanes, (lane, t) => gone = gone.or_else(|| t.gone(peer)));
        if let Some(departure) = gone {
            // The process that another transport knows. This is the next one at its address.
            self.on_departure(peer, departure);
        }
        let route = self.routes.get(peer.index()).copied().unwrap_or(Route::None);
        // Messages to the peer keep their transport: each direction may have its own.
        let keeps = match route {
            Route::None => false,
            Route::Moving => true,
            Route::By(lane) => {
                lane != self.lane && on_lane!(self.lanes, lane, t => t.is_connected(peer), false)
            }
        };
        if keeps {
            *self.mixed = true;
        } else if self.two_way || route == Route::None {
            // If this transport has no contact yet, the first message makes it.
            set_route(self.routes, peer, Route::By(self.lane));
        }
        each_lane_mut!(self.lanes, (lane, t) => t.meet(peer, address));
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

    fn on_notify(&mut self, peer: PeerId, token: u64) {
        self.handler.on_notify(peer, token);
    }

    fn on_done(&mut self, peer: PeerId, token: u64) {
        self.handler.on_done(peer, token);
    }

    fn on_lane_lost(&mut self, peer: PeerId, lane: LaneId) {
        self.handler.on_lane_lost(peer, lane);
    }

    fn on_key_void(&mut self, peer: PeerId, key: &RemoteKey) {
        self.handler.on_key_void(peer, key);
    }

    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        self.handler.on_acknowledged(peer, upto);
    }

    fn on_departure(&mut self, peer: PeerId, departure: Departure) {
        // Messages that the peer sent by other transports are delivered first.
        each_lane_mut!(self.lanes, (lane, t) => t.drain(peer, self.handler));
        self.departed.push(peer);
        self.handler.on_departure(peer, departure);
    }

    fn is_owed(&self, peer: PeerId) -> bool {
        self.handler.is_owed(peer)
    }
}

/// Calls `settled` until no peer is still in a copy from or to memory that it was told not to access any more, and no
/// copy is left of endpoints that have closed. Its argument: to insist. False: a peer that is neither stopped nor ended
/// is still copying after two seconds.
pub(crate) fn settle(mut settled: impl FnMut(bool) -> bool) -> bool {
    settling::settle(|insists| settled(insists) && list::are_left_settled())
}

/// Peers cannot use a wildcard address: replaces it by the address of the preferred interface.
fn named(address: Address, host: &LocalHost) -> Address {
    let mut address = address;
    if address.0.ip().is_unspecified() {
        if let Some(interface) = host.preferred(None, Some(address.0.is_ipv6())) {
            address = Address(interface.address(address.port()));
        }
    }
    address
}

/// `a` with the transport `t` that carries messages to `peer`, or `b` where there is none.
macro_rules! by {
    ($self:ident, $peer:ident, $t:ident => $body:expr, $none:expr) => {
        match $self.lane($peer) {
            Some(lane) => on_lane!($self.lanes, lane, $t => $body, $none),
            None => $none,
        }
    };
}
macro_rules! by_mut {
    ($self:ident, $peer:ident, $t:ident => $body:expr, $none:expr) => {
        match $self.lane($peer) {
            Some(lane) => on_lane_mut!($self.lanes, lane, $t => $body, $none),
            None => $none,
        }
    };
}

/// `a` with the transport `t` whose remote keys have this kind, or `b` where it is not open.
macro_rules! by_kind {
    ($on:ident, $self:ident, $kind:expr, $t:ident => $body:expr, $none:expr) => {
        match Lane::of_key($kind) {
            Some(lane) => $on!($self.lanes, lane, $t => $body, $none),
            None => $none,
        }
    };
}

/// `a` with the transport `t` that made the remote key for the peer, or `b` where it is not open.
macro_rules! by_key {
    ($on:ident, $self:ident, $peer:ident, $key:expr, $t:ident => $body:expr, $none:expr) => {
        match Lane::of_key($key.kind()).or_else(|| $self.lane_of_addresses($peer, &$key)) {
            Some(lane) => $on!($self.lanes, lane, $t => $body, $none),
            None => $none,
        }
    };
}

impl Messages for Router {
    #[inline]
    fn caps(&self, peer: PeerId) -> Caps {
        by!(self, peer, t => t.caps(peer), Caps::UNKNOWN)
    }

    #[inline]
    fn send(
        &mut self,
        peer: PeerId,
        mode: Mode,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        let lane = self.ensure(peer)?;
        on_lane_mut!(self.lanes, lane, t => t.send(peer, mode, header, len, pack), Err(NO_WAY))
    }

    #[inline]
    fn send_at_once(&mut self, peer: PeerId, head: &Head, payload: Segment) -> bool {
        by_mut!(self, peer, t => t.send_at_once(peer, head, payload), false)
    }

    #[inline]
    fn send_whole(
        &mut self,
        peer: PeerId,
        first: &[u8],
        payload: Segment,
        next: impl Fn(usize) -> Head,
    ) -> bool {
        by_mut!(self, peer, t => t.send_whole(peer, first, payload, next), false)
    }

    fn flush(&mut self) {
        each_lane_mut!(self.lanes, (lane, t) => t.flush());
    }

    fn track(&mut self, peer: PeerId) -> bool {
        by_mut!(self, peer, t => t.track(peer), false)
    }

    fn tracked(&self, peer: PeerId) -> Option<Mark> {
        by!(self, peer, t => t.tracked(peer), None)
    }

    fn acknowledged(&mut self, peer: PeerId) -> Option<Mark> {
        // Includes messages that went by a transport that carries none any more.
        let mut mark = None;
        each_lane_mut!(self.lanes, (lane, t) => mark = mark.or_else(|| t.acknowledged(peer)));
        mark
    }

    #[inline]
    fn under_pressure(&self, peer: PeerId) -> bool {
        by!(self, peer, t => t.under_pressure(peer), false)
    }

    fn set_pressure(&mut self, on: bool) {
        each_lane_mut!(self.lanes, (lane, t) => t.set_pressure(on));
    }
}

impl OneSided for Router {
    fn lanes(&self, peer: PeerId) -> super::Lanes {
        let mut list = super::Lanes::default();
        let Some(by) = self.lane(peer) else { return list };
        each_lane!(self.lanes, (lane, t) => if !carries(t) || lane == by {
            let own = t.lanes(peer);
            // A peer that does not send by a transport of messages does not access our memory by it.
            let works = own.iter().next().is_some() && !(carries(t) && self.is_mixed(peer));
            own.iter().filter(|_| works).for_each(|lane| list.push(*lane));
        });
        list
    }

    fn prepare(&mut self, peer: PeerId, lane: LaneId) -> Prepared {
        by_kind!(on_lane_mut, self, lane.kind(), t => t.prepare(peer, lane), Prepared::No)
    }

    fn takes(&mut self, peer: PeerId, lane: LaneId, memory: &SegmentList) -> bool {
        by_kind!(on_lane_mut, self, lane.kind(), t => t.takes(peer, lane, memory), false)
    }

    fn lends(&mut self, peer: PeerId, lane: LaneId) -> Prepared {
        by_kind!(on_lane_mut, self, lane.kind(), t => t.lends(peer, lane), Prepared::No)
    }

    fn register(
        &mut self,
        peer: PeerId,
        lane: LaneId,
        memory: &SegmentList,
        purpose: Purpose,
    ) -> Registered {
        by_kind!(
            on_lane_mut, self, lane.kind(),
            t => t.register(peer, lane, memory, purpose),
            Registered::No
        )
    }

    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey) -> bool {
        by_key!(on_lane_mut, self, peer, *key, t => t.invalidate(peer, key), false)
    }

    fn is_current(&self, peer: PeerId, key: &RemoteKey) -> bool {
        by_key!(on_lane, self, peer, *key, t => t.is_current(peer, key), false)
    }

    fn is_settled(&mut self, insists: bool) -> bool {
        let mut settled = true;
        each_lane_mut!(self.lanes, (lane, t) => settled &= t.is_settled(insists));
        settled
    }

    #[inline]
    fn direct_min(&self, peer: PeerId, key: &RemoteKey, reads: bool) -> Option<usize> {
        by_kind!(on_lane, self, key.kind(), t => t.direct_min(peer, key, reads), None)
    }

    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        to: &Remote,
        how: Put,
    ) -> Result<Access, SendError> {
        if local.is_on_device() && !self.lanes(peer).take_device(&to.key) {
            return Err(NO_WAY);
        }
        self.ensure_for(peer, &to.key)?;
        by_key!(on_lane_mut, self, peer, to.key, t => t.put(peer, local, to, how), Err(NO_WAY))
    }

    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        from: &Remote,
        token: u64,
    ) -> Result<Access, SendError> {
        if local.is_on_device() && !self.lanes(peer).take_device(&from.key) {
            return Err(NO_WAY);
        }
        self.ensure_for(peer, &from.key)?;
        by_key!(on_lane_mut, self, peer, from.key, t => t.get(peer, local, from, token), Err(NO_WAY))
    }

    fn flush_puts(&mut self, peer: PeerId, at: &Remote, token: u64) -> Result<Access, SendError> {
        by_key!(on_lane_mut, self, peer, at.key, t => t.flush_puts(peer, at, token), Err(NO_WAY))
    }
}

impl Streaming for Router {
    fn has_stream(&mut self, peer: PeerId) -> bool {
        by_mut!(self, peer, t => t.has_stream(peer), false)
    }

    fn send_by_stream(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &SegmentList,
    ) -> Result<(), SendError> {
        by_mut!(self, peer, t => t.send_by_stream(peer, header, payload), Err(NO_WAY))
    }

    fn attend(&mut self) {
        each_lane_mut!(self.lanes, (lane, t) => t.attend());
    }
}

impl Sharing for Router {
    fn share(&mut self, peer: PeerId, len: usize) -> Option<Share> {
        by_mut!(self, peer, t => t.share(peer, len), None)
    }

    fn share_min(&self, peer: PeerId) -> Option<usize> {
        by!(self, peer, t => t.share_min(peer), None)
    }

    fn take(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        match self.heard_by(peer) {
            Some(lane) => {
                on_lane_mut!(self.lanes, lane, t => t.take(peer, share, most), Taken::Wait)
            }
            None => Taken::Wait,
        }
    }

    fn arrived(&mut self, peer: PeerId, share: &Share, units: u32) {
        each_lane_mut!(self.lanes, (lane, t) => t.arrived(peer, share, units));
    }

    fn stop_sharing(&mut self, peer: PeerId, share: &Share) {
        each_lane_mut!(self.lanes, (lane, t) => t.stop_sharing(peer, share));
    }

    fn assist(
        &mut self,
        peer: PeerId,
        share: &Share,
        part: impl Fn(usize, usize) -> (SegmentList, [Range; MAX_SEGMENTS], usize),
    ) -> Assisted {
        by_mut!(self, peer, t => t.assist(peer, share, part), Assisted::Over)
    }

    fn begin_assist(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        by_mut!(self, peer, t => t.begin_assist(peer, share, most), Taken::Over)
    }
}

impl Iface for Router {
    fn connect(&mut self, address: &Address) -> Result<PeerId, SendError> {
        let peer = self.peers.intern(address).ok_or(SendError::Again)?;
        self.ensure(peer)?;
        Ok(peer)
    }

    fn address_of(&self, peer: PeerId) -> Option<Address> {
        self.peers.address(peer)
    }

    fn heard(&self, address: &Address) -> Option<PeerId> {
        self.peers.find(address).filter(|peer| self.heard_by(*peer).is_some())
    }

    fn way(&self, peer: PeerId) -> &'static str {
        match self.route(peer) {
            Route::By(lane) => on_lane!(self.lanes, lane, t => name_of(t), ""),
            Route::None => "not connected",
            Route::Moving => "being moved to another transport",
        }
    }

    fn figures(&mut self, oldest: Option<(u64, PeerId)>) -> Figures {
        self.all_figures(clock::now_ns(), oldest)
    }

    #[inline]
    fn poll(&mut self, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        each_lane_mut!(self.lanes, (lane, t) => n += t.poll(handler));
        let still = self.pace.count(n);
        let (mut turns, mut urgent) = (0, false);
        each_lane_mut!(self.lanes, (lane, t) => {
            turns |= u32::from(t.has_its_turn(still)) << lane as u32;
            urgent |= t.is_urgent();
        });
        let mut looked_at = LookedAt::Everything;
        if turns != 0 {
            let _shield = Shield::raise();
            for lane in Lane::ALL.iter().filter(|lane| turns & (1 << **lane as u32) != 0) {
                let (taken, at) = self.turn(*lane, handler);
                n += taken;
                looked_at = at;
            }
        }
        if self.pace.is_time(looked_at) || urgent {
            n += self.look_around(handler);
        }
        n
    }
}

#[cfg(test)]
mod tests {
    mod departures;
    mod lanes;

    use super::pace::STILL_POLLS;
    use super::*;
    use crate::sys::event::wait_readable;
    use crate::sys::net::Interface;
    use crate::sys::shared_memory::{REFUSED, SHORT};
    use crate::transport::shm::Shm;

    #[test]
    fn a_wildcard_address_is_named_with_the_scope_of_its_interface() {
        let linked =
            Interface { scope: 3, ..Interface::plain("eth0", "fe80::1".parse().unwrap(), 1500) };
        let v4 = Interface::plain("eth0", "10.0.0.1".parse().unwrap(), 1500);
        let host = LocalHost::of(vec![linked, v4]);
        for (bound, name) in [
            ("[::]:7", "[fe80::1%3]:7"),
            ("0.0.0.0:7", "10.0.0.1:7"),
            ("[fe80::2%4]:7", "[fe80::2%4]:7"),
        ] {
            let address = |text| Address::from_text(text).unwrap();
            assert_eq!(named(address(bound), &host), address(name));
        }
    }

    #[test]
    fn a_peer_of_another_node_is_no_reason_to_look_seldom() {
        let mut config = Config::default();
        config.shm.on = false;
        let key = || (JobKey::from_bytes([0; 16]), Source::Nothing);
        let at = Address(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
        let mut ends = [(); 2].map(|()| Router::open(at, &config, key()).unwrap());
        let peer = {
            let there = ends[1].address();
            ends[0].peers.intern(&there).unwrap()
        };
        let begun = clock::now_ns();
        let sends = |end: &mut Router| end.send(peer, Mode::Short, b"header", 8, |_, _| ()).is_ok();
        while !sends(&mut ends[0]) || !ends[0].traffic().0 {
            ends.iter_mut().for_each(|end| _ = end.poll(&mut Ear::default()));
            assert!(clock::now_ns() - begun < 60_000_000_000);
        }
        while ends[0].traffic().0 {
            ends.iter_mut().for_each(|end| _ = end.poll(&mut Ear::default()));
            assert!(clock::now_ns() - begun < 60_000_000_000);
        }
        let mut crowded = false;
        each_lane!(ends[0].lanes, (lane, t) => crowded |= t.is_crowded(1));
        assert!(crowded, "a thread that waits for the network gives way to others");
        assert_eq!(ends[0].traffic(), (false, 1), "but looks as often as ever");
    }

    #[test]
    fn a_long_wait_gives_way_where_a_processor_may_be_needed() {
        let mut router = on_loopback();
        let mut count = |networked: bool, endpoints: usize, message_every: u32| {
            (1..=10 * STILL_POLLS)
                .filter(|poll| {
                    router.pace.count(usize::from(poll % message_every == 0));
                    if networked { router.pace.is_long() } else { router.gives_way(endpoints) }
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
            router.pace.is_time(looked_at);
            let gives_way = (1..=10 * STILL_POLLS).filter(|_| {
                router.pace.count(0);
                router.pace.is_long()
            });
            assert!(times.contains(&gives_way.count()), "{looked_at:?}");
        }
    }

    #[test]
    fn a_wait_without_end_gives_way_to_whatever_threads_there_are() {
        let mut router = on_loopback();
        let mut gives_way = |polls: u32, messages: usize| {
            let times = (0..polls).filter(|_| {
                router.pace.count(messages);
                router.gives_way(1)
            });
            times.count()
        };
        assert_eq!(gives_way(4095, 0), 0);
        assert_eq!(gives_way(2560, 0), 10);
        assert_eq!(gives_way(2560, 1), 0, "messages come");
    }

    #[test]
    fn a_remote_key_names_one_transport() {
        let mut kinds = Lane::keys();
        kinds.sort_unstable();
        assert!(kinds.windows(2).all(|two| two[0] != two[1]), "{kinds:?}");
        for (kind, lane) in
            [(0, None), (1, Some(Lane::shm)), (2, Some(Lane::net)), (3, Some(Lane::net))]
        {
            assert_eq!(Lane::of_key(kind), lane);
        }
        assert_eq!(Lane::of_key(u8::MAX), None);
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

    fn on_loopback() -> Router {
        with_key(false, 0, Source::Nothing)
    }

    fn with_key(net: bool, key: u8, source: Source) -> Router {
        open(0, net, (JobKey::from_bytes([key; 16]), source)).unwrap()
    }

    fn open(port: u16, net: bool, key: (JobKey, Source)) -> Result<Router, Errno> {
        let mut config = Config::default();
        config.net.on = net;
        Router::open(Address(std::net::SocketAddr::from(([127, 0, 0, 1], port))), &config, key)
    }

    /// At a port that the system assigns only on request: nobody takes it between the ends of two processes there, and
    /// nobody has it for TCP, without which there are no streams to it.
    fn at_port(net: bool) -> Router {
        loop {
            let port = 1024 + process::random_u64() as u16 % 31_000;
            if std::net::TcpListener::bind(("127.0.0.1", port)).is_err() {
                continue;
            }
            match open(port, net, (JobKey::from_bytes([0; 16]), Source::Nothing)) {
                Err(Errno(libc::EADDRINUSE)) => {}
                router => return router.unwrap(),
            }
        }
    }

    #[test]
    fn what_has_no_other_way_waits_for_room_and_keeps_its_order() {
        const COUNT: u8 = 20;
        let (mut a, mut b) = (on_loopback(), on_loopback());
        b.lanes.shm.as_mut().unwrap().refuse_all(true);
        let to = a.connect(&b.address()).unwrap();
        let mut ear = Ear::default();
        let mut sent = 0;
        let begun = clock::now_ns();
        while ear.0.len() < usize::from(COUNT) {
            let len = usize::from(sent) * 100;
            let pack = |_: usize, to: &mut [u8]| to.fill(sent);
            if sent < COUNT && a.send(to, Mode::Bulk, b"header", len, pack).is_ok() {
                sent += 1;
            }
            // The first links are refused again and again.
            b.lanes.shm.as_mut().unwrap().refuse_all(clock::now_ns() - begun < 100_000_000);
            a.poll(&mut Ear::default());
            b.poll(&mut ear);
            assert!(clock::now_ns() - begun < 60_000_000_000, "{} have come", ear.0.len());
        }
        for (n, payload) in (0..).zip(&ear.0) {
            assert!(payload.len() == usize::from(n) * 100 && payload.iter().all(|byte| *byte == n));
        }
        assert_eq!((a.unacknowledged(), a.route(to)), (0, Route::By(Lane::shm)));
    }

    #[test]
    fn a_shortage_here_does_not_lose_what_a_peer_has_refused() {
        let (mut a, mut b) = (on_loopback(), on_loopback());
        b.lanes.shm.as_mut().unwrap().refuse_all(true);
        let to = a.connect(&b.address()).unwrap();
        a.send(to, Mode::Short, b"header", 8, |_, to| to.fill(7)).unwrap();
        let (mut ear, begun) = (Ear::default(), clock::now_ns());
        while ear.0.is_empty() {
            let early = clock::now_ns() - begun < 100_000_000;
            b.lanes.shm.as_mut().unwrap().refuse_all(early);
            SHORT.set(early.then_some(Errno(libc::EMFILE)));
            a.poll(&mut Ear::default());
            SHORT.set(None);
            b.poll(&mut ear);
            assert!(clock::now_ns() - begun < 60_000_000_000);
        }
        assert_eq!(ear.0, [[7; 8]]);
    }

    #[test]
    fn what_came_too_late_is_sent_again_by_the_same_transport() {
        let [mut a, mut b] = [(); 2].map(|()| with_key(true, 0, Source::Nothing));
        let to = a.connect(&b.address()).unwrap();
        a.send(to, Mode::Short, b"header", 8, |_, to| to.fill(7)).unwrap();
        b.lanes.shm.as_mut().unwrap().turn_callers_away();
        let mut ear = Ear::default();
        let begun = clock::now_ns();
        while ear.0.is_empty() {
            a.poll(&mut Ear::default());
            b.poll(&mut ear);
            assert!(clock::now_ns() - begun < 60_000_000_000);
        }
        assert_eq!(ear.0, [[7; 8]]);
        assert_eq!(a.route(to), Route::By(Lane::shm), "there is the network too");
    }

    #[test]
    fn the_bytes_are_asked_for_where_no_way_announces_a_copy() {
        let [mut a, mut b] = [(); 2].map(|()| with_key(true, 0, Source::Nothing));
        let (to, mut ear) = (a.connect(&b.address()).unwrap(), Ear::default());
        a.send(to, Mode::Short, b"header", 8, |_, to| to.fill(7)).unwrap();
        let begun = clock::now_ns();
        while ear.0.is_empty() {
            a.poll(&mut Ear::default());
            b.poll(&mut ear);
            assert!(clock::now_ns() - begun < 60_000_000_000);
        }
        let from = b.peers.find(&a.me).unwrap();
        let buffer = crate::memory::OwnedBuffer::zeroed(100);
        let at = Remote { key: RemoteKey::ADDRESSES, offset: buffer.segments().first_addr() };
        SHORT.set(Some(Errno(libc::EMFILE)));
        let got = loop {
            match b.get(from, &buffer.segments(), &at, 0) {
                Err(SendError::Again) => assert!(clock::now_ns() - begun < 60_000_000_000),
                other => break other,
            }
            a.poll(&mut Ear::default());
            b.poll(&mut Ear::default());
        };
        SHORT.set(None);
        assert_eq!((got, b.route(from)), (Err(NO_WAY), Route::By(Lane::net)));
    }

    #[test]
    fn what_is_refused_for_good_and_has_no_other_way_ends_with_the_error() {
        let refused = Errno(libc::EPERM);
        let (mut a, mut b) = (on_loopback(), on_loopback());
        let to = a.connect(&b.address()).unwrap();
        a.send(to, Mode::Short, b"header", 8, |_, _| ()).unwrap();
        REFUSED.set(Some(refused));
        let (mut left, mut failed) = (Farewells::default(), None);
        let begun = clock::now_ns();
        while failed.is_none() {
            a.poll(&mut left);
            b.poll(&mut Farewells::default());
            if let Err(SendError::Unreachable(errno)) =
                a.send(to, Mode::Short, b"header", 8, |_, _| ())
            {
                failed = Some(errno);
            }
            assert!(clock::now_ns() - begun < 60_000_000_000, "{:?}", left.0);
        }
        assert_eq!((failed, &left.0[..]), (Some(refused), &[Departure::Failed(refused)][..]));
        assert_eq!(a.unacknowledged(), 0);
        REFUSED.set(None);
    }

    #[test]
    fn a_thread_that_finds_work_does_not_wake_one_that_sleeps() {
        let (mut a, mut b) = (on_loopback(), on_loopback());
        let to = b.connect(&a.address()).unwrap();
        b.send(to, Mode::Short, b"header", 0, |_, _| ()).unwrap();
        let mut ear = Ear::default();
        let begun = clock::now_ns();
        while ear.0.is_empty() {
            a.poll(&mut ear);
            b.poll(&mut Ear::default());
            assert!(clock::now_ns() - begun < 60_000_000_000);
        }
        assert!(a.sleep(), "nothing is to be done");
        // Another thread sends to its own endpoint, and looks before it sleeps too.
        let me = a.connect(&a.address()).unwrap();
        a.send(me, Mode::Short, b"header", 0, |_, _| ()).unwrap();
        assert!(!a.sleep());
        a.poll(&mut Ear::default());
        b.send(to, Mode::Short, b"header", 0, |_, _| ()).unwrap();
        assert!(
            wait_readable(a.epoll.fd().unwrap(), 10_000).unwrap(),
            "the first one hears of a message"
        );
        a.awake();
    }

    #[test]
    fn a_peer_that_was_only_heard_has_the_caps_of_its_transport() {
        let (mut a, mut b) = (on_loopback(), on_loopback());
        let to = a.connect(&b.address()).unwrap();
        a.send(to, Mode::Short, b"header", 0, |_, _| ()).unwrap();
        let mut ear = Ear::default();
        let begun = clock::now_ns();
        while ear.0.is_empty() {
            a.poll(&mut Ear::default());
            b.poll(&mut ear);
            assert!(clock::now_ns() - begun < 60_000_000_000);
        }
        let from = b.peers.find(&a.address()).unwrap();
        assert_eq!(b.route(from), Route::By(Lane::shm));
        assert!(b.caps(from).one_sided, "{:?}", b.caps(from));
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
        let (mut a, mut b) =
            (with_key(false, 1, Source::Variable), with_key(false, 2, Source::Variable));
        let to = a.peers.intern(&b.address()).unwrap();
        let (mut sent, mut failed, mut left) = (0, 0_u32, Farewells::default());
        let begun = clock::now_ns();
        // Until the peer has refused twice, and once more without a link in between.
        while left.0.len() < 2 || failed < 2000 {
            match a.send(to, Mode::Short, b"header", 8, |_, _| ()) {
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
            let mut pace = Pace::after(empty);
            (0..10_000_000)
                .step_by(1000)
                .filter(|ns| {
                    pace.is_due(Lane::shm as usize, *ns, Shm::every_ns(pace.is_still(), networked))
                })
                .count()
        };
        let counts = [looks(STILL_POLLS, false), looks(0, false), looks(STILL_POLLS, true)];
        assert_eq!(counts, [500, 50, 10]);
    }
}
