//! The cost of each peer that an endpoint has talked to, in all layers: the engine, the transports, the network state
//! machine, and a real UDP socket. `UDRV_TEST_NODES` is the number of peers.

use super::fixture::{LIMITS, Memory, TestHost, receive_op, send_op};
use super::sim::Log;
use crate::config::Config;
use crate::protocol::packet::{Envelope, Packet};
use crate::protocol::{Engine, Limits};
use crate::sys::clock;
use crate::transport::JobKey;
use crate::transport::Source;
use crate::transport::net::link::{Condition, Link, LinkSink};
use crate::transport::net::neighbours::Standing;
use crate::transport::net::reliable::{Reliable, Settings, Sink};
use crate::transport::net::verbs::config::RdmaPolicy;
use crate::transport::router::Router;
use crate::transport::shm::config::{CmaPolicy, ShmConfig};
use crate::transport::{Address, Departure, PeerId};
use std::io::IoSlice;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

/// Peers in `cargo test`, and peers that the endpoint meets before anything is measured.
const PEERS: usize = 8000;
const BEFORE: usize = 2000;
/// The most that an idle peer may cost, bytes.
const PEER_BYTES: usize = 1024;
/// Messages in each direction, the last of which needs several packets.
const MESSAGES: usize = 10;
const LONG: usize = 20_000;
/// By then an idle connection has freed what it does not need.
const REST: Duration = Duration::from_millis(1500);
const KEY: [u8; 16] = [5; 16];

/// An endpoint, with everything below its libfabric objects.
struct Hub {
    engine: Engine<Router>,
    host: TestHost,
    log: Log,
    memory: Memory,
    address: Address,
}

/// A peer that vanishes without notice after it has talked.
struct Peer {
    machine: Reliable,
    wire: Wire,
    got: Got,
    address: Address,
}

struct Wire {
    socket: UdpSocket,
    hub: SocketAddr,
}

#[derive(Default)]
struct Got {
    messages: usize,
    /// Missing bytes of a long message, and the message's number.
    rest: usize,
    announced: u64,
    finished: Option<u64>,
}

impl Link for Wire {
    fn datagram_max(&self) -> usize {
        1472
    }

    fn send(&mut self, _: &Address, packets: &[IoSlice<'_>]) -> usize {
        for packet in packets {
            self.socket.send_to(packet, self.hub).unwrap();
        }
        packets.len()
    }

    fn receive(&mut self, _: &mut impl LinkSink) -> usize {
        0
    }
}

impl Sink for Got {
    fn peer_of(&mut self, _: &Address) -> Option<PeerId> {
        Some(PeerId(0))
    }

    fn find(&self, _: &Address) -> Option<PeerId> {
        Some(PeerId(0))
    }

    fn forget(&mut self, _: PeerId) {}

    fn standing(&self, _: &Address) -> Standing {
        Standing::Admitted
    }

    fn on_connected(&mut self, _: PeerId, _: &Address) {}

    fn on_message(&mut self, _: PeerId, header: &[u8], payload: &[u8]) {
        match Packet::decode(header) {
            Some(Packet::Eager { .. }) => self.messages += 1,
            Some(Packet::Rts { tx, len, .. }) => {
                (self.rest, self.announced) = (len as usize - payload.len(), tx);
            }
            Some(Packet::Pushed { .. }) => {
                self.rest -= payload.len();
                if self.rest == 0 {
                    self.finished = Some(self.announced);
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        panic!("{departure:?}");
    }

    fn is_owed(&self, _: PeerId) -> Option<bool> {
        Some(false)
    }
}

impl Hub {
    fn open() -> Self {
        let bind = Address(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let shm = ShmConfig {
            on: false,
            cma: CmaPolicy::Off,
            push_max: Some(512 << 10),
            share_min: Some(1 << 20),
            ..ShmConfig::default()
        };
        let mut config = Config { shm, ..Config::default() };
        config.net.bulk_min = 1 << 20;
        config.net.rdma.policy = RdmaPolicy::Off;
        let router =
            Router::open(bind, &config, (JobKey::from_bytes(KEY), Source::AuthKey)).unwrap();
        let address = router.address();
        let limits = Limits { eager_max: 4096, tx_max: 64, rx_max: 64, ..LIMITS };
        let (engine, log) = (Engine::new(router, limits), Log::default());
        let host = TestHost::new(0, log.clone());
        Self { engine, host, log, memory: Memory::zeroed(LONG), address }
    }

    /// Talks with a peer at `socket`: a few messages in each direction, all received and acknowledged.
    fn meet(&mut self, socket: UdpSocket) {
        let mut peer = Peer::new(socket, self.address);
        for context in 0..MESSAGES {
            let receive = receive_op(&mut self.memory, context as u64);
            self.engine.receive(&receive, &mut self.host).unwrap();
            peer.send(if context + 1 < MESSAGES { 100 * context } else { 4000 });
        }
        self.until(&mut peer, |hub, _| hub.log.borrow().len() == MESSAGES);
        let to = self.engine.connect(&peer.address).unwrap();
        for context in 0..MESSAGES {
            let mut send = send_op(to, &mut self.memory, context as u64);
            if context + 1 < MESSAGES {
                send.payload = super::fixture::lend(&mut self.memory.0[..300], &[]);
            }
            self.engine.send(&send, &mut self.host).unwrap();
        }
        self.until(&mut peer, |hub, peer| {
            let idle = peer.machine.unacknowledged() == 0
                && hub.engine.iface().unacknowledged() == 0
                && !hub.engine.is_busy();
            idle && hub.log.borrow().len() == 2 * MESSAGES
        });
        assert_eq!(peer.got.messages, MESSAGES - 1);
        self.log.borrow_mut().clear();
    }

    fn until(&mut self, peer: &mut Peer, done: impl Fn(&Self, &Peer) -> bool) {
        let end = Instant::now() + crate::patience::seconds(20);
        while !done(self, peer) {
            assert!(Instant::now() < end, "it takes too long: {:?}", self.log.borrow());
            self.engine.progress(&mut self.host);
            peer.turn();
        }
    }

    fn rest(&mut self) {
        let end = Instant::now() + REST;
        while Instant::now() < end {
            self.engine.progress(&mut self.host);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Duration of a progress pass in which nothing happens, ns: the best of several.
    fn turn_ns(&mut self) -> f64 {
        let turns = 10_000;
        let mut time = || {
            let began = Instant::now();
            (0..turns).for_each(|_| assert_eq!(self.engine.progress(&mut self.host), 0));
            began.elapsed().as_nanos() as f64 / f64::from(turns)
        };
        (0..9).map(|_| time()).fold(f64::MAX, f64::min)
    }
}

impl Peer {
    fn new(socket: UdpSocket, hub: Address) -> Self {
        let address = Address(socket.local_addr().unwrap());
        let port = address.port();
        let settings = Settings {
            life: u64::from(port) * 2 + 1,
            address,
            key: JobKey::from_bytes(KEY),
            key_source: Source::AuthKey,
            datagram_max: 1472,
            direct_max: 0,
            peer_timeout_ns: 20_000_000_000,
            buffer_bytes: 1 << 20,
            receive_window: 64,
            features: 0,
            first_psn: 0,
            seed: u128::from(port).to_le_bytes(),
        };
        let now = clock::now_ns();
        let mut machine = Reliable::new(settings, now);
        machine.connect(PeerId(0), &hub, now).unwrap();
        Self { machine, wire: Wire { socket, hub: hub.0 }, got: Got::default(), address }
    }

    fn send(&mut self, len: usize) {
        let envelope = Envelope { tagged: false, tag: 0, data: None, rx: 0 };
        let header = Packet::Eager { envelope, ack: None }.encode();
        let now = clock::now_ns();
        self.machine.send(PeerId(0), header.as_slice(), len, |_, to| to.fill(3), now).unwrap();
    }

    fn turn(&mut self) {
        let now = clock::now_ns();
        let mut bytes = [0; 2048];
        let hub = Address(self.wire.hub);
        while let Ok((len, _)) = self.wire.socket.recv_from(&mut bytes) {
            self.machine.on_datagram(now, &hub, &bytes[..len], Condition::default(), &mut self.got);
        }
        self.machine.on_timeout(now, &mut self.got);
        if let Some(tx) = self.got.finished.take() {
            let header = Packet::Fin { tx, status: 0 }.encode();
            self.machine.send(PeerId(0), header.as_slice(), 0, |_, _| (), now).unwrap();
        }
        self.machine.poll_transmit(now, &mut self.wire);
    }
}

/// A socket for each free port below those that the system assigns.
fn sockets() -> impl Iterator<Item = UdpSocket> {
    let free = (2000..32_768).filter_map(|port| UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok());
    free.inspect(|socket| socket.set_nonblocking(true).unwrap())
}

/// Resident memory of this process, bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = text.split(' ').nth(1).unwrap();
    pages.parse::<usize>().unwrap() * 4096
}

/// Runs alone in its process: see below.
#[test]
#[ignore = "run by a_peer_that_was_active_is_small"]
fn a_peer_that_was_active_is_small_alone() {
    let wanted = std::env::var("UDRV_TEST_NODES").ok().and_then(|n| n.parse().ok());
    let peers = wanted.unwrap_or(PEERS);
    let mut hub = Hub::open();
    let mut sockets = sockets();
    sockets.by_ref().take(BEFORE).for_each(|socket| hub.meet(socket));
    hub.rest();
    let (before, few) = (resident(), hub.turn_ns());
    let met = sockets.take(peers).map(|socket| hub.meet(socket)).count();
    hub.rest();
    let each = resident().saturating_sub(before) / met;
    let many = hub.turn_ns();
    eprintln!(
        "{each} bytes for each of {met} peers that were active; a turn takes {many:.0} ns, and took {few:.0} ns with {BEFORE} peers"
    );
    assert!(each <= PEER_BYTES, "{each} bytes for each peer");
}

/// The memory of the process is measured, so no other test may run in it.
#[test]
fn a_peer_that_was_active_is_small() {
    crate::alone::run(concat!(module_path!(), "::a_peer_that_was_active_is_small_alone"), "true");
}
