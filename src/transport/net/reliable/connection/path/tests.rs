//! Two state machines, and a path that is narrower than both believe.

use super::super::super::packet::{DATAGRAM_START, HELLO_LEN, MAGIC};
use super::super::super::{Reliable, Settings, Sink};
use super::{COMMON, PROBES, RAISE_NS};
use crate::sys::Errno;
use crate::transport::JobKey;
use crate::transport::Source;
use crate::transport::net::link::{Condition, Link, LinkSink};
use crate::transport::net::neighbours::Standing;
use crate::transport::{Address, Departure, PeerId};
use std::io::IoSlice;

const MS: u64 = 1_000_000;
const LONG: usize = 1472;
/// Longest packet of a path that needs no probe, bytes.
const DIRECT: usize = 4096;
/// Length of the messages, bytes: too long for a path of unknown length, and shorter than a packet.
const PAYLOAD: usize = 1300;

/// The packets that one side has sent, and the fragmentation it was told to allow.
#[derive(Default)]
struct Wire {
    sent: Vec<Vec<u8>>,
    cut: Vec<usize>,
    /// Longest packet of a path that needs no probe; 0: there is none.
    direct: usize,
}

impl Link for Wire {
    fn datagram_max(&self) -> usize {
        LONG
    }
    fn direct(&mut self, _: &Address) -> usize {
        self.direct
    }
    fn send(&mut self, _: &Address, packets: &[IoSlice<'_>]) -> usize {
        self.sent.extend(packets.iter().map(|p| p.to_vec()));
        packets.len()
    }
    fn allow_fragments(&mut self, _: &Address, carried: usize) {
        self.cut.push(carried);
    }
    fn receive(&mut self, _: &mut impl LinkSink) -> usize {
        0
    }
}

/// Lengths of the messages that one side has received, and the end of its connection.
#[derive(Default)]
struct Got(Vec<usize>, Option<Departure>);

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
    fn on_message(&mut self, _: PeerId, _: &[u8], payload: &[u8]) {
        self.0.push(payload.len());
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        self.1 = Some(departure);
    }
    fn is_owed(&self, _: PeerId) -> Option<bool> {
        Some(false)
    }
}

struct Side {
    machine: Reliable,
    wire: Wire,
    got: Got,
    address: Address,
}

impl Side {
    fn hear(&mut self, now: u64, from: &Address, packet: &[u8]) {
        self.machine.on_datagram(now, from, packet, Condition::default(), &mut self.got);
    }
}

fn side(port: u16) -> Side {
    let address = Address::from_text(&format!("10.0.0.1:{port}")).unwrap();
    let settings = Settings {
        life: u64::from(port) * 2 + 1,
        address,
        key: JobKey::from_bytes([7; 16]),
        key_source: Source::AuthKey,
        datagram_max: LONG,
        direct_max: DIRECT,
        peer_timeout_ns: 100_000 * MS,
        buffer_bytes: 1 << 20,
        receive_window: 64,
        features: 0,
        first_psn: 0,
        seed: [port as u8; 16],
    };
    let machine = Reliable::new(settings, MS);
    Side { machine, wire: Wire::default(), got: Got::default(), address }
}

fn is_hello(packet: &[u8]) -> bool {
    packet.starts_with(&MAGIC)
}

struct Bench {
    a: Side,
    b: Side,
    now: u64,
    /// Lengths of the padded handshake packets that `a` has sent.
    probes: Vec<usize>,
}

impl Bench {
    /// Two sides that are connected and have exchanged a short message.
    fn connected() -> Self {
        let mut bench = Self { a: side(1), b: side(2), now: MS, probes: Vec::new() };
        bench.send(10);
        bench.run(100, |_| true);
        assert_eq!((bench.b.got.0.len(), bench.a.machine.unacknowledged()), (1, 0));
        assert_eq!((bench.packet_max(), bench.probes.len()), (DATAGRAM_START, 0));
        bench
    }

    /// The same, and the path has been found to carry the full length.
    fn acquainted() -> Self {
        let mut bench = Self::connected();
        bench.send(PAYLOAD);
        bench.run(100, |_| true);
        assert_eq!((bench.packet_max(), bench.probes.as_slice()), (LONG, [LONG].as_slice()));
        bench.b.got.0.clear();
        bench
    }

    fn send(&mut self, len: usize) {
        let (to, now) = (self.b.address, self.now);
        self.a.machine.connect(PeerId(0), &to, now).unwrap();
        self.a.machine.send(PeerId(0), b"head", len, |_, _| (), now).unwrap();
    }

    /// Lets `ms` pass; of the packets of `a` only those arrive that `keep` accepts.
    fn run(&mut self, ms: u64, keep: impl Fn(&[u8]) -> bool) {
        for _ in 0..ms {
            self.now += MS;
            for end in [&mut self.a, &mut self.b] {
                end.machine.on_timeout(self.now, &mut end.got);
                end.machine.poll_transmit(self.now, &mut end.wire);
            }
            let sent: Vec<Vec<u8>> = self.a.wire.sent.drain(..).collect();
            let probes = sent.iter().filter(|p| is_hello(p) && p.len() > HELLO_LEN);
            self.probes.extend(probes.map(Vec::len));
            for packet in sent.into_iter().filter(|packet| keep(packet)) {
                self.b.hear(self.now, &self.a.address, &packet);
            }
            for packet in self.b.wire.sent.drain(..) {
                self.a.hear(self.now, &self.b.address, &packet);
            }
        }
    }

    fn packet_max(&self) -> usize {
        self.a.machine.table.of(PeerId(0)).unwrap().path.carried()
    }
}

#[test]
fn a_path_that_carries_all_is_found_in_a_round_trip() {
    let mut bench = Bench::connected();
    bench.send(5 * PAYLOAD);
    bench.run(3, |_| true);
    assert_eq!((bench.packet_max(), bench.probes.as_slice()), (LONG, [LONG].as_slice()));
    // The other direction is a different path.
    assert_eq!(bench.b.machine.table.of(PeerId(0)).unwrap().path.carried(), DATAGRAM_START);
}

#[test]
fn packets_have_the_length_of_a_path_that_needs_no_probe_while_it_is_open() {
    let mut bench = Bench::connected();
    for (open, longest) in
        [(DIRECT, DIRECT), (1024, 1024), (9000, DIRECT), (100, LONG), (0, LONG), (DIRECT, DIRECT)]
    {
        bench.a.wire.direct = open;
        bench.send(10);
        bench.run(10, |_| true);
        let most = std::cell::Cell::new(0);
        let keep = |packet: &[u8]| {
            most.set(most.get().max(packet.len()));
            true
        };
        bench.send(5 * DIRECT);
        bench.run(10, keep);
        bench.send(5 * DIRECT);
        bench.run(10, keep);
        assert_eq!((bench.packet_max(), most.get()), (longest, longest), "{open} bytes");
    }
    assert_eq!(bench.probes, [LONG], "not while the other path is open");
    // A packet made for one path goes over another as it is.
    bench.b.got.0.clear();
    bench.send(DIRECT / 2);
    bench.a.wire.direct = 0;
    bench.run(10, |_| true);
    assert_eq!(bench.b.got.0, [DIRECT / 2]);
}

#[test]
fn a_path_that_never_carries_what_is_long_delays_nothing() {
    for narrow in [DATAGRAM_START, usize::from(COMMON)] {
        let mut bench = Bench::connected();
        bench.send(5 * PAYLOAD);
        bench.run(10, |packet| packet.len() <= narrow);
        assert_eq!(bench.b.got.0, [10, 5 * PAYLOAD]);
        bench.run(1000, |packet| packet.len() <= narrow);
        assert_eq!(bench.packet_max(), narrow);
        assert_eq!(bench.a.wire.cut, []);
        assert!(bench.a.machine.counts().retransmitted <= 1, "but for steps of a millisecond");
        let asked = bench.probes.len();
        let common = if narrow == DATAGRAM_START { usize::from(PROBES) } else { 1 };
        assert_eq!(asked, usize::from(PROBES) + common);
        // It is probed rarely, and only if a message wants it.
        bench.run(RAISE_NS / MS, |packet| packet.len() <= narrow);
        assert_eq!(bench.probes.len(), asked);
        bench.send(5 * PAYLOAD);
        bench.run(10, |_| true);
        assert_eq!((bench.packet_max(), bench.probes.len()), (LONG, asked + 1));
    }
}

#[test]
fn a_probe_that_is_lost_is_sent_again() {
    let mut bench = Bench::connected();
    bench.send(PAYLOAD);
    bench.run(15, |packet| packet.len() <= DATAGRAM_START);
    bench.run(15, |_| true);
    assert_eq!((bench.packet_max(), bench.probes.len()), (LONG, 2));
}

#[test]
fn a_silent_peer_is_no_narrow_path() {
    let mut bench = Bench::connected();
    bench.send(PAYLOAD);
    bench.run(20_000, |_| false);
    assert_eq!(bench.probes.len(), 1);
    bench.run(1000, |_| true);
    bench.send(PAYLOAD);
    bench.run(1000, |_| true);
    assert_eq!((bench.packet_max(), bench.b.got.0.len()), (LONG, 3));
}

#[test]
fn a_router_that_tells_spares_the_search() {
    let mut bench = Bench::connected();
    bench.send(PAYLOAD);
    bench.run(3, |packet| packet.len() <= 1400);
    let b = bench.b.address;
    assert!(!bench.a.machine.on_too_long(&b, 1400, &bench.a.got), "no packet is that long");
    bench.run(3, |packet| packet.len() <= 1400);
    assert_eq!((bench.packet_max(), bench.probes.as_slice()), (1400, [LONG, 1400].as_slice()));
}

#[test]
fn an_interface_that_carries_less_limits_all_connections() {
    let mut bench = Bench::acquainted();
    bench.a.machine.on_narrowed(1372);
    assert_eq!(bench.packet_max(), 1372);
    // The next ones too.
    for side in [&mut bench.a, &mut bench.b] {
        side.machine.part(PeerId(0), bench.now, &mut side.wire, &mut side.got);
    }
    bench.probes.clear();
    bench.send(5 * PAYLOAD);
    bench.run(100, |_| true);
    assert_eq!((bench.packet_max(), bench.probes.as_slice()), (1372, [1372].as_slice()));
}

#[test]
fn a_path_that_drops_what_is_long_is_found() {
    let mut bench = Bench::acquainted();
    bench.send(PAYLOAD);
    bench.run(3000, |packet| packet.len() <= DATAGRAM_START);
    assert_eq!(bench.a.wire.cut, [DATAGRAM_START]);
    assert_eq!(bench.packet_max(), DATAGRAM_START);
    // New packets pass, once the earlier ones pass as fragments.
    bench.send(PAYLOAD);
    bench.run(1000, |_| true);
    assert_eq!(bench.b.got.0, [PAYLOAD, PAYLOAD]);
    bench.send(5 * PAYLOAD);
    bench.run(1000, |packet| packet.len() <= DATAGRAM_START);
    assert_eq!(bench.b.got.0.len(), 3);
    assert_eq!(bench.a.wire.cut.len(), 1, "told once");
}

#[test]
fn a_path_that_drops_fragments_too_ends_the_connection_in_time() {
    let mut bench = Bench::acquainted();
    bench.send(PAYLOAD);
    let narrow = |packet: &[u8]| packet.len() <= DATAGRAM_START;
    bench.run(100_000, narrow);
    assert_eq!((bench.a.wire.cut.len(), bench.a.got.1), (1, None));
    bench.run(20_000, narrow);
    assert_eq!(bench.a.got.1, Some(Departure::Failed(Errno(libc::EMSGSIZE))));
}

#[test]
fn a_peer_without_memory_behind_a_path_that_is_cut_is_waited_for() {
    let mut bench = Bench::acquainted();
    bench.send(PAYLOAD);
    bench.run(3000, |packet| packet.len() <= DATAGRAM_START);
    assert_eq!(bench.a.wire.cut.len(), 1);
    bench.run(200_000, is_hello);
    assert_eq!(bench.a.got.1, None);
    bench.run(2000, |_| true);
    assert_eq!(bench.b.got.0, [PAYLOAD]);
}

#[test]
fn a_peer_without_memory_is_no_narrow_path() {
    let mut bench = Bench::acquainted();
    bench.send(PAYLOAD);
    bench.run(10_000, is_hello);
    assert_eq!(bench.a.wire.cut, []);
    assert_eq!(bench.packet_max(), LONG);
    bench.run(2000, |_| true);
    assert_eq!(bench.b.got.0, [PAYLOAD]);
}

#[test]
fn a_network_that_is_down_is_no_narrow_path() {
    let mut bench = Bench::acquainted();
    bench.send(PAYLOAD);
    for _ in 0..5 {
        bench.run(4000, |_| false);
        // Only handshakes pass for a moment, whatever their length.
        bench.run(20, is_hello);
    }
    assert_eq!(bench.a.wire.cut, []);
    bench.run(2000, |_| true);
    assert_eq!(bench.b.got.0, [PAYLOAD]);
}

#[test]
fn short_packets_that_are_lost_say_nothing() {
    let mut bench = Bench::acquainted();
    bench.send(100);
    bench.run(10_000, |packet| is_hello(packet) && packet.len() == HELLO_LEN);
    assert_eq!((bench.a.wire.cut.len(), bench.packet_max()), (0, LONG));
}

#[test]
fn what_a_router_says_is_believed_within_bounds() {
    let mut bench = Bench::acquainted();
    let b = bench.b.address;
    bench.send(PAYLOAD);
    for (carried, max, long) in [
        (9000, LONG, false),
        (1372, 1372, false),
        (1400, 1372, false),
        (100, 1200, true),
        (0, 1200, true),
    ] {
        assert_eq!(bench.a.machine.on_too_long(&b, carried, &bench.a.got), long);
        assert_eq!(bench.packet_max(), max);
    }
}
