//! Two ends of a link, for tests.

use super::Shm;
use crate::sys::late_set::LateSet;
use crate::sys::net;
use crate::transport::address::LocalHost;
use crate::transport::peers::PeerTable;
use crate::transport::shm::config::CmaPolicy;
use crate::transport::{Address, Contact, Departure, Handler, PeerId, SendError, Transport};
use std::net::SocketAddr;
use std::sync::Arc;

/// A handler that ignores everything.
pub(super) struct Deaf;

impl Handler for Deaf {
    fn on_peer(&mut self, _: PeerId, _: &Address) {}
    fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {}
    fn on_departure(&mut self, _: PeerId, _: Departure) {}
    fn is_owed(&self, _: PeerId) -> bool {
        false
    }
}

#[derive(PartialEq, Eq, Debug)]
pub(super) enum Heard {
    /// A message of so many bytes.
    Message(usize),
    Left(Departure),
}

#[derive(Default)]
pub(super) struct Ears(pub(super) Vec<Heard>);

impl Handler for Ears {
    fn on_peer(&mut self, _: PeerId, _: &Address) {}
    fn on_message(&mut self, _: PeerId, _: &[u8], payload: &[u8]) {
        self.0.push(Heard::Message(payload.len()));
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        self.0.push(Heard::Left(departure));
    }
    fn is_owed(&self, _: PeerId) -> bool {
        false
    }
}

/// What `end` receives in a few turns.
pub(super) fn hears(end: &mut End) -> Vec<Heard> {
    let mut ears = Ears::default();
    for _ in 0..10 {
        end.turn(&mut ears);
    }
    ears.0
}

pub(super) struct End {
    pub(super) shm: Shm,
    pub(super) peers: PeerTable,
    pub(super) me: Address,
    /// Reserves the port.
    _socket: std::net::UdpSocket,
}

pub(super) fn end(cma: CmaPolicy) -> End {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let (socket, port) = net::reserve_port(&any).unwrap();
    let me = Address(SocketAddr::from(([127, 0, 0, 1], port)));
    open(me, cma, socket, true)
}

fn open(me: Address, cma: CmaPolicy, socket: std::net::UdpSocket, bell: bool) -> End {
    let epoll = Arc::new(LateSet::new().unwrap());
    let bell = bell.then(|| Shm::doorbell(&epoll).unwrap());
    let shm = Shm::with(me, LocalHost::detect(), cma, bell, epoll).unwrap();
    End { shm, peers: PeerTable::new(LocalHost::detect()), me, _socket: socket }
}

impl End {
    /// Closes the endpoint, and opens its next incarnation at the same address.
    pub(super) fn next_life(self) -> Self {
        let Self { shm, me, _socket, .. } = self;
        let cma = shm.settings.cma;
        drop(shm);
        open(me, cma, _socket, true)
    }

    /// Closes the endpoint, and opens one at the same address that could make no doorbell.
    pub(super) fn without_bell(self) -> Self {
        let Self { shm, me, _socket, .. } = self;
        drop(shm);
        open(me, CmaPolicy::Off, _socket, false)
    }

    /// Makes the link to `other`. Links to this end that wait are not accepted before.
    pub(super) fn connect(&mut self, other: &Self) -> PeerId {
        let peer = self.peers.intern(&other.me).unwrap();
        let begun = std::time::Instant::now();
        while matches!(self.shm.link(peer, &other.me), Ok(Contact::Later) | Err(SendError::Again)) {
            assert!(begun.elapsed().as_secs() < 20);
        }
        assert!(self.shm.is_connected(peer));
        peer
    }

    /// One turn that looks at everything.
    pub(super) fn turn(&mut self, handler: &mut impl Handler) {
        self.shm.poll(handler);
        self.shm.watches.checked_at = 0;
        self.shm.poll_sockets(&mut self.peers, handler);
    }
}

/// Two ends of a link on a machine with so many processors, and each one's number of the other.
pub(super) fn linked(processors: usize, cma: CmaPolicy, push: Option<usize>) -> [(End, PeerId); 2] {
    let (mut a, mut b) = (end(cma), end(cma));
    for one in [&mut a, &mut b] {
        one.shm.crowd.processors = processors;
        (one.shm.settings.push_max, one.shm.settings.share_min) = (push, push);
    }
    let names = [a.connect(&b), b.connect(&a)];
    for _ in 0..1000 {
        a.turn(&mut Deaf);
        b.turn(&mut Deaf);
        if a.shm.inbound_of(names[0]).is_some() && b.shm.inbound_of(names[1]).is_some() {
            return [(a, names[0]), (b, names[1])];
        }
    }
    panic!("no link");
}
