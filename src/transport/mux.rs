//! The interface of an endpoint: chooses the transport of each peer by its address, and is the one
//! [`Iface`] that the protocol layer drives.

use super::address::LocalHost;
use super::loopback::Loopback;
use super::peers::PeerTable;
use super::shm::Shm;
use super::{Address, Caps, Handler, Iface, PeerId, SendError};
use crate::config::CmaPolicy;
use crate::memory::SegmentList;
use crate::sys::cma::Range;
use crate::sys::{Errno, net};
use crate::telemetry::log;
use std::net::UdpSocket;
use std::os::fd::RawFd;

/// Free ports tried before giving up.
const PORT_TRIES: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    /// Known by address only.
    None,
    Loopback,
    Shm,
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
    /// Holds our port for as long as the endpoint lives.
    _port: UdpSocket,
}

impl Mux {
    /// Opens all transports under `bind`; port 0 takes a free one. Errors: EADDRINUSE,
    /// EADDRNOTAVAIL, EMFILE, ENFILE, ENOMEM.
    pub(crate) fn open(bind: Address, cma: CmaPolicy) -> Result<Self, Errno> {
        let mut last = Errno(libc::EADDRINUSE);
        for _ in 0..PORT_TRIES {
            let (socket, port) = net::reserve_port(&bind.0)?;
            let mut me = bind;
            me.0.set_port(port);
            match Shm::open(me, cma) {
                Ok(shm) => return Ok(Self::assemble(me, shm, socket)),
                Err(e) if e.0 == libc::EADDRINUSE && bind.port() == 0 => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    fn assemble(me: Address, shm: Shm, port: UdpSocket) -> Self {
        let host = LocalHost::detect();
        let me = named(me, &host);
        let mut peers = PeerTable::new(host);
        let my_id = peers.intern(&me);
        log::info(format_args!("endpoint {me} opened: loopback and shared memory"));
        Self {
            peers,
            routes: vec![Route::Loopback],
            me,
            my_id,
            loopback: Loopback::default(),
            shm,
            _port: port,
        }
    }

    /// The endpoint's address.
    pub(crate) fn address(&self) -> Address {
        self.me
    }

    fn route(&self, peer: PeerId) -> Route {
        self.routes.get(peer.index()).copied().unwrap_or(Route::None)
    }

    fn set_route(&mut self, peer: PeerId, route: Route) {
        if self.routes.len() <= peer.index() {
            self.routes.resize(peer.index() + 1, Route::None);
        }
        if let Some(slot) = self.routes.get_mut(peer.index()) {
            *slot = route;
        }
    }

    /// The link to `peer`, made if this is the first message or the last link has ended.
    fn ensure(&mut self, peer: PeerId) -> Result<Route, SendError> {
        match self.route(peer) {
            Route::Shm if !self.shm.is_connected(peer) => {}
            Route::None => {}
            route => return Ok(route),
        }
        let address =
            self.peers.address(peer).ok_or(SendError::Unreachable(Errno(libc::EADDRNOTAVAIL)))?;
        if !self.peers.host().owns(address.0.ip()) {
            log::warn(format_args!(
                "{address} is not an address of this node, and this version of udrv has no network transport"
            ));
            return Err(SendError::Unreachable(Errno(libc::EHOSTUNREACH)));
        }
        if let Err(e) = self.shm.connect(peer, &address) {
            if let SendError::Unreachable(errno) = e {
                log::warn(format_args!("cannot reach {address}: {errno}"));
            }
            return Err(e);
        }
        self.set_route(peer, Route::Shm);
        Ok(Route::Shm)
    }

    #[inline]
    fn send(
        &mut self,
        peer: PeerId,
        short: bool,
        header: &[u8],
        len: usize,
        pack: impl FnOnce(&mut [u8]),
    ) -> Result<(), SendError> {
        match self.ensure(peer)? {
            Route::Loopback => self.loopback.send(header, len, pack),
            Route::Shm | Route::None => self.shm.send(peer, short, header, len, pack),
        }
    }

    /// From now on peers ring the doorbell when we sleep.
    pub(crate) fn enable_waiting(&mut self) {
        self.shm.enable_waiting();
    }

    /// Prepares for sleep on [`Mux::wait_fd`]; `false` means there is work already.
    pub(crate) fn sleep(&mut self) -> bool {
        self.loopback.is_idle() && self.shm.sleep()
    }

    /// Ends the state that `sleep` began.
    pub(crate) fn awake(&mut self) {
        self.shm.awake();
    }

    /// Becomes readable when a message arrives while asleep, and when a link changes.
    pub(crate) fn wait_fd(&self) -> RawFd {
        self.shm.epoll().raw()
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
        let peer = self.peers.intern(address);
        self.ensure(peer)?;
        Ok(peer)
    }

    fn address_of(&self, peer: PeerId) -> Option<Address> {
        self.peers.address(peer)
    }

    #[inline]
    fn caps(&self, peer: PeerId) -> Caps {
        match self.route(peer) {
            Route::Loopback => Loopback::CAPS,
            Route::Shm | Route::None => self.shm.caps(peer),
        }
    }

    #[inline]
    fn am_short(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnOnce(&mut [u8]),
    ) -> Result<(), SendError> {
        self.send(peer, true, header, len, pack)
    }

    #[inline]
    fn am_bcopy(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnOnce(&mut [u8]),
    ) -> Result<(), SendError> {
        self.send(peer, false, header, len, pack)
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
            Route::Shm | Route::None => self.shm.get(peer, local, remote),
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
            Route::Shm | Route::None => self.shm.put(peer, local, remote),
        }
    }

    #[inline]
    fn under_pressure(&self, peer: PeerId) -> bool {
        match self.route(peer) {
            Route::Shm => self.shm.under_pressure(peer),
            Route::Loopback => self.loopback.pressure,
            Route::None => false,
        }
    }

    fn set_pressure(&mut self, on: bool) {
        self.loopback.pressure = on;
        self.shm.set_pressure(on);
    }

    #[inline]
    fn poll(&mut self, handler: &mut impl Handler) -> usize {
        let n = self.loopback.poll(self.my_id, handler);
        n + self.shm.poll(&mut self.peers, handler)
    }
}
