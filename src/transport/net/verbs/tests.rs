//! Endpoints on one device. Without a device nothing is tested, unless UDRV_TEST_RDMA=1 requires one; UDRV_TEST_RDMA_IP
//! names an address of its interface.

mod exposing;
mod windows;

use super::*;
use crate::sys::net::interfaces;
use crate::transport::address::LocalHost;
use crate::transport::net::LANE;
use crate::transport::net::link::Link;
use crate::transport::net::reliable::packet::HEADER_ONLY;
use crate::transport::net::udp::UdpLink;
use crate::transport::net::verbs::config::NicName;
use crate::transport::net::{Net, NetSettings};
use crate::transport::peers::PeerTable;
use crate::transport::{
    Departure, Handler, LaneId, Messages, Mode, OneSided, PeerId, RemoteKey, SendError, Transport,
};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

#[derive(Default)]
struct Got {
    messages: Vec<Vec<u8>>,
    departures: Vec<Departure>,
    /// Tokens of remote buffers that were filled, and how often buffers were lost.
    filled: Vec<u64>,
    lost: usize,
    /// Tokens of completed accesses, and keys that the device invalidated.
    done: Vec<u64>,
    void: Vec<RemoteKey>,
}

impl Handler for Got {
    fn on_peer(&mut self, _: PeerId, _: &Address) {}
    fn on_message(&mut self, _: PeerId, header: &[u8], payload: &[u8]) {
        self.messages.push([header, payload].concat());
    }
    fn on_notify(&mut self, _: PeerId, token: u64) {
        self.filled.push(token);
    }
    fn on_lane_lost(&mut self, _: PeerId, _: LaneId) {
        self.lost += 1;
    }
    fn on_done(&mut self, _: PeerId, token: u64) {
        self.done.push(token);
    }
    fn on_key_void(&mut self, _: PeerId, key: &RemoteKey) {
        self.void.push(*key);
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        self.departures.push(departure);
    }
    fn is_owed(&self, _: PeerId) -> bool {
        false
    }
}

struct End {
    net: Net,
    me: Address,
    peers: PeerTable,
    got: Got,
}

fn settings(policy: RdmaPolicy) -> RdmaSettings {
    RdmaSettings { policy, ..RdmaSettings::default() }
}

/// An address of a device.
fn address() -> Option<IpAddr> {
    let ips = interfaces().into_iter().filter(|i| !i.loopback).map(|i| i.ip);
    let found = ips
        .into_iter()
        .find(|ip| matches!(device_at(&settings(RdmaPolicy::Auto), *ip), Ok(Some(_))));
    let wanted = std::env::var_os("UDRV_TEST_RDMA").is_some();
    assert!(found.is_some() || !wanted, "no RDMA device works");
    if found.is_none() {
        eprintln!("skipped: no RDMA device");
    }
    found
}

impl End {
    fn open(ip: IpAddr, policy: RdmaPolicy) -> Self {
        Self::open_with(ip, settings(policy))
    }

    fn open_with(ip: IpAddr, rdma: RdmaSettings) -> Self {
        Self::open_mtu(ip, rdma, None)
    }

    fn open_mtu(ip: IpAddr, rdma: RdmaSettings, mtu: Option<usize>) -> Self {
        let link = UdpLink::open(&SocketAddr::new(ip, 0), mtu).unwrap();
        let me = Address(SocketAddr::new(ip, link.local_addr().unwrap().port()));
        let settings = NetSettings {
            key: JobKey::from_bytes([7; 16]),
            key_source: crate::transport::job_key::Source::AuthKey,
            peer_timeout_s: 20,
            buffer_bytes: 64 << 20,
            streams: 0,
            rdma,
        };
        let peers = || PeerTable::new(LocalHost::default());
        let net = Net::with(me, link, peers(), settings).unwrap();
        Self { net, me, peers: peers(), got: Got::default() }
    }

    fn meet(&mut self, other: &Self) -> PeerId {
        let peer = self.peers.intern(&other.me).unwrap();
        self.net.begin(peer, &other.me).unwrap();
        peer
    }

    fn poll(&mut self) {
        self.net.turn(&mut self.peers, &mut self.got);
    }

    fn send(&mut self, peer: PeerId, mark: u8, len: usize) -> bool {
        match self.net.send(peer, Mode::Bulk, &[mark], len, |at, to| {
            for (i, byte) in to.iter_mut().enumerate() {
                *byte = ((at + i) % 251) as u8;
            }
        }) {
            Ok(()) => true,
            Err(SendError::Again) => false,
            Err(other) => panic!("{other:?}"),
        }
    }

    fn rdma(&self) -> hybrid::RdmaCounts {
        self.net.rdma_counts().unwrap_or_default()
    }
}

fn within(seconds: u64, mut step: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + crate::patience::seconds(seconds);
    while Instant::now() < end {
        if step() {
            return true;
        }
    }
    false
}

fn is_intact(message: &[u8], mark: u8, len: usize) -> bool {
    message.len() == len + 1
        && message[0] == mark
        && message[1..].iter().enumerate().all(|(i, byte)| *byte == (i % 251) as u8)
}

#[test]
fn a_fast_port_has_more_slots_to_receive() {
    let port = |speed_bps| Port {
        number: 1,
        link: LinkLayer::Ethernet,
        active: true,
        mtu: 1024,
        speed_bps,
        lid: 0,
        routed: false,
        partitions: 1,
    };
    for (gbps, slots) in [(0, 1024), (25, 1024), (100, 4096), (400, 4096)] {
        assert_eq!(working_slots(&port(gbps * 1_000_000_000)), (256, slots), "{gbps}");
    }
}

/// That the kernel has refused one peer does not say that the device's queue, which is full, is to one peer only.
#[test]
fn what_the_device_has_no_room_for_waits_for_no_single_peer() {
    let mut udp = UdpLink::open(&SocketAddr::from(([127, 0, 0, 1], 0)), None).unwrap();
    udp.take_no_buffers();
    let mut link = HybridLink::new(udp, Some(Box::new(Rdma::connecting())));
    assert!(!link.is_full());
    let to = Address(SocketAddr::from(([127, 0, 0, 1], 1)));
    let packet = [0, HEADER_ONLY, 0, 0, 0];
    assert_eq!(link.send(&to, &[IoSlice::new(&packet)]), 0, "its path is not open any more");
    assert!(link.is_full());
}

#[test]
fn messages_go_through_the_device_once_it_is_proven() {
    const COUNT: usize = 200;
    let Some(ip) = address() else { return };
    let (mut a, mut b) = (End::open(ip, RdmaPolicy::Require), End::open(ip, RdmaPolicy::Require));
    let to_b = a.meet(&b);
    let sizes = [0, 1, 100, 220, 1000, 4000, 5000, 60_000];
    let mut sent = 0;
    assert!(within(60, || {
        while sent < COUNT && a.send(to_b, sent as u8, sizes[sent % sizes.len()]) {
            sent += 1;
        }
        a.poll();
        b.poll();
        b.got.messages.len() == COUNT && a.net.unacknowledged() == 0
    }));
    for (i, message) in b.got.messages.iter().enumerate() {
        assert!(is_intact(message, i as u8, sizes[i % sizes.len()]), "message {i}");
    }
    let (from, to) = (a.rdma(), b.rdma());
    // More than once if a slow machine has made a path suspect meanwhile.
    assert!(from.proven >= 1 && to.proven >= 1, "{from:?} {to:?}");
    // All packets but those made before the path was validated.
    assert!(from.datagrams.sent as usize > COUNT, "{from:?}");
    assert!(to.datagrams.received as usize > COUNT, "{to:?}");
    assert!(from.datagrams.inline > 0 && from.datagrams.posts < from.datagrams.sent, "{from:?}");
    // The packets of messages of 4000 bytes and more.
    assert!(from.datagrams.lent > 0 && from.datagrams.lent < from.datagrams.sent, "{from:?}");
    assert_eq!((from.handles, to.handles), (1, 1));
}

#[test]
fn a_peer_without_a_device_is_reached_over_udp() {
    let Some(ip) = address() else { return };
    let (mut a, mut b) = (End::open(ip, RdmaPolicy::Require), End::open(ip, RdmaPolicy::Off));
    let (to_b, to_a) = (a.meet(&b), b.meet(&a));
    for i in 0..20 {
        assert!(within(10, || a.send(to_b, i, 3000)) && within(10, || b.send(to_a, i, 3000)));
        assert!(within(20, || {
            a.poll();
            b.poll();
            let n = usize::from(i) + 1;
            a.got.messages.len() == n && b.got.messages.len() == n
        }));
    }
    assert_eq!((a.rdma().datagrams.sent, a.rdma().proven), (0, 0));
}

/// More has left through the device of `end` than challenges and responses.
fn sends_messages(end: &End) -> bool {
    let counts = end.rdma();
    counts.datagrams.sent > counts.calls + counts.answers
}

#[test]
fn a_way_that_ends_is_left_for_udp() {
    let Some(ip) = address() else { return };
    let (mut a, mut b) = (End::open(ip, RdmaPolicy::Require), End::open(ip, RdmaPolicy::Require));
    let to_b = a.meet(&b);
    let exchange = |a: &mut End, b: &mut End, mark: u8| {
        let before = b.got.messages.len();
        within(20, || a.send(to_b, mark, 2000))
            && within(20, || {
                a.poll();
                b.poll();
                b.got.messages.len() > before && a.net.unacknowledged() == 0
            })
    };
    assert!(exchange(&mut a, &mut b, 1));
    // Its messages are longer than the device's packets may be.
    assert!(within(30, || exchange(&mut a, &mut b, 2) && sends_messages(&a)), "{:?}", a.rdma());
    // As if a firewall now separated the devices.
    b.net.drop_device();
    let sent = a.rdma().datagrams.sent;
    for mark in 3..10 {
        assert!(exchange(&mut a, &mut b, mark), "{:?}", a.rdma());
    }
    assert!(a.rdma().doubted >= 1, "{:?}", a.rdma());
    assert!(a.rdma().datagrams.sent > sent, "it was tried first");
    assert_eq!((a.got.departures.len(), b.got.departures.len()), (0, 0));
}

#[test]
fn a_sleeper_is_woken_by_the_device() {
    use crate::sys::event::wait_readable;
    use crate::sys::late_set::LateSet;
    let Some(ip) = address() else { return };
    let (mut a, mut b) = (End::open(ip, RdmaPolicy::Require), End::open(ip, RdmaPolicy::Require));
    let to_b = a.meet(&b);
    let epoll = std::sync::Arc::new(LateSet::new().unwrap());
    b.net.watch(&epoll, 1).unwrap();
    for mark in 0..20 {
        assert!(a.send(to_b, mark, 100));
        let n = usize::from(mark) + 1;
        assert!(within(10, || {
            a.poll();
            if b.net.sleep() {
                let _ = wait_readable(epoll.fd().unwrap(), 1000);
                b.net.awake();
            }
            b.poll();
            b.got.messages.len() == n
        }));
        assert!(within(10, || {
            a.poll();
            b.poll();
            a.net.unacknowledged() == 0
        }));
    }
    assert!(b.rdma().datagrams.received > 5, "{:?}", b.rdma());
}

/// One thread's poll takes the datagram for which another one is being woken: the next one wakes that again.
#[test]
fn a_poll_by_another_thread_leaves_a_sleeper_its_wake_up() {
    use crate::sys::event::{duplicate, wait_readable};
    use std::os::fd::AsFd;
    let Some(ip) = address() else { return };
    let (mut a, mut b) = (End::open(ip, RdmaPolicy::Require), End::open(ip, RdmaPolicy::Require));
    let to_b = a.meet(&b);
    assert!(within(30, || {
        let met = b.rdma().datagrams.received > 0;
        // An acknowledgement takes a while on a device that works beside us.
        if !met {
            a.send(to_b, 0, 100);
        }
        a.poll();
        b.poll();
        met && a.net.unacknowledged() == 0
    }));
    // Otherwise it takes datagrams too.
    b.net.background = None;
    let device = duplicate(b.net.core.enter().unwrap().link.fds().nth(1).unwrap()).unwrap();
    assert!(within(10, || {
        a.poll();
        b.poll();
        b.net.sleep()
    }));
    for mark in 0..5 {
        let n = b.got.messages.len();
        assert!(a.send(to_b, mark, 100));
        assert_eq!(wait_readable(device.as_fd(), 20_000), Ok(true), "{mark}: {:?}", a.rdma());
        assert!(within(10, || {
            a.poll();
            b.poll();
            b.got.messages.len() > n && a.net.unacknowledged() == 0
        }));
    }
    b.net.awake();
}

/// One thread sleeps, and another one asks for the first address handle: when it is made, that wakes the sleeper.
#[test]
fn a_handle_that_is_asked_for_meanwhile_wakes_a_sleeper() {
    use crate::sys::event::{duplicate, wait_readable};
    use std::os::fd::AsFd;
    let Some(ip) = address() else { return };
    let (mut a, mut b) = (End::open(ip, RdmaPolicy::Require), End::open(ip, RdmaPolicy::Require));
    (a.net.background, b.net.background) = (None, None);
    let device = duplicate(b.net.core.enter().unwrap().link.fds().nth(1).unwrap()).unwrap();
    assert!(within(10, || b.net.core.enter().unwrap().link.sleep()));
    a.meet(&b);
    assert!(within(10, || {
        a.poll();
        b.poll();
        b.rdma().calls > 0
    }));
    if b.rdma().handles > 0 {
        return; // InfiniBand asks nobody
    }
    let rests = b.net.core.enter().unwrap().link.rearm();
    assert!(!rests || wait_readable(device.as_fd(), 20_000) == Ok(true), "{:?}", b.rdma());
}

mod failures;

/// `cargo test --release --lib verbs::tests::costs_of_datagrams -- --ignored --nocapture`: the cost of long messages
/// where UDP carries less than the device, and all packets have UDP's length.
#[test]
#[ignore = "a measurement"]
fn costs_of_datagrams() {
    let Some(ip) = address() else { return };
    for round in 0..5 {
        for mtu in [1500, 9000] {
            let open = || End::open_mtu(ip, settings(RdmaPolicy::Require), Some(mtu));
            let (mut a, mut b) = (open(), open());
            let to_b = a.meet(&b);
            let mut transfer = |len: usize, count: usize| {
                let (mut sent, before) = (0, b.got.messages.len());
                let start = Instant::now();
                assert!(within(60, || {
                    if sent < count && a.send(to_b, 1, len) {
                        sent += 1;
                    }
                    a.poll();
                    b.poll();
                    b.got.messages.len() - before == count
                }));
                (len * count) as f64 / start.elapsed().as_secs_f64() / 1e6
            };
            transfer(60_000, 50);
            let (short, long) = (transfer(16_384, 600), transfer(65_000, 150));
            let packets = a.rdma().datagrams.sent;
            println!(
                "{round}: MTU {mtu}: 16 KiB {short:.1} MB/s, 64 KiB {long:.1} MB/s, {packets} packets"
            );
        }
    }
}

#[test]
fn a_port_with_another_address_is_not_the_same() {
    let Some(ip) = address() else { return };
    let me = Address(SocketAddr::new(ip, 0));
    let slots = |_: &_| (TRIED_SLOTS, TRIED_SLOTS);
    let all = settings(RdmaPolicy::Auto);
    let found = first_that_works(&all, &me, Spread::new(0, false), 1, slots).unwrap();
    let mut at = found.unwrap().at;
    assert_eq!(at.fits(), Ok(()));
    // Another subnet.
    at.place.gid[0] ^= 1;
    assert!(at.fits().is_err());
}

#[test]
fn what_is_not_there_is_not_offered() {
    let loopback = "127.0.0.1".parse().unwrap();
    assert_eq!(device_at(&settings(RdmaPolicy::Off), loopback), Ok(None));
    assert_eq!(device_at(&settings(RdmaPolicy::Auto), loopback), Ok(None));
    assert_eq!(device_at(&settings(RdmaPolicy::Require), loopback), Err(Errno(libc::ENODEV)));
    let nics = NicName::list("no_such_0").unwrap();
    let named = RdmaSettings { nics, ..settings(RdmaPolicy::Require) };
    assert_eq!(device_at(&named, loopback), Err(Errno(libc::ENODEV)));
}

#[test]
fn a_named_device_is_missed_where_other_nodes_are_reached() {
    let at = |address: &str| Address(address.parse().unwrap());
    let named = RdmaSettings {
        nics: vec![NicName { device: "mlx5_0".to_owned(), port: None }],
        ..settings(RdmaPolicy::Auto)
    };
    assert_eq!(missed(&named, &at("192.0.2.7:1")).as_deref(), Some("mlx5_0"));
    for loopback in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
        assert_eq!(missed(&named, &at(loopback)), None, "{loopback}");
    }
    let off = RdmaSettings { policy: RdmaPolicy::Off, ..named };
    assert_eq!(missed(&off, &at("192.0.2.7:1")), None);
    assert_eq!(missed(&settings(RdmaPolicy::Auto), &at("192.0.2.7:1")), None);
}
