//! Two machines and a path that is narrower than both believe.

use super::super::packet::{HELLO_LEN, MAGIC};
use super::super::tag::JobKey;
use super::super::{DATAGRAM_START, Reliable, Settings, Sink};
use crate::transport::net::link::{Link, LinkSink};
use crate::transport::{Address, Departure, PeerId};
use std::io::IoSlice;

const MS: u64 = 1_000_000;
const LONG: usize = 1472;
/// Bytes of the messages: more than what every network carries, and less than a packet.
const PAYLOAD: usize = 1300;

/// What one side has sent, and what it was told about the path.
#[derive(Default)]
struct Wire {
    sent: Vec<Vec<u8>>,
    cut: Vec<usize>,
}

impl Link for Wire {
    fn datagram_max(&self) -> usize {
        LONG
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

/// Lengths of the messages that one side has got.
#[derive(Default)]
struct Got(Vec<usize>);

impl Sink for Got {
    fn peer_of(&mut self, _: &Address) -> Option<PeerId> {
        Some(PeerId(0))
    }
    fn find(&self, _: &Address) -> Option<PeerId> {
        Some(PeerId(0))
    }
    fn on_connected(&mut self, _: PeerId, _: &Address) {}
    fn on_message(&mut self, _: PeerId, _: &[u8], payload: &[u8]) {
        self.0.push(payload.len());
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        panic!("{departure:?}");
    }
    fn is_owed(&self, _: PeerId) -> bool {
        false
    }
}

struct Side {
    machine: Reliable,
    wire: Wire,
    got: Got,
    address: Address,
}

fn side(port: u16) -> Side {
    let address = Address::from_text(&format!("10.0.0.1:{port}")).unwrap();
    let settings = Settings {
        life: u64::from(port) * 2 + 1,
        address,
        key: JobKey::from_bytes([7; 16]),
        datagram_max: LONG,
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
}

impl Bench {
    /// Two sides that know each other and have exchanged a short message.
    fn connected() -> Self {
        let mut bench = Self { a: side(1), b: side(2), now: MS };
        bench.send(10);
        bench.run(100, |_| true);
        assert_eq!((bench.b.got.0.len(), bench.a.machine.unacknowledged()), (1, 0));
        bench
    }

    fn send(&mut self, len: usize) {
        let (to, now) = (self.b.address, self.now);
        self.a.machine.connect(PeerId(0), &to, now).unwrap();
        self.a.machine.send(PeerId(0), b"head", len, |_, _| (), now).unwrap();
    }

    /// Lets `ms` pass; of what `a` sends only what `keep` lets through arrives.
    fn run(&mut self, ms: u64, keep: impl Fn(&[u8]) -> bool) {
        for _ in 0..ms {
            self.now += MS;
            for end in [&mut self.a, &mut self.b] {
                end.machine.on_timeout(self.now, &mut end.got);
                end.machine.poll_transmit(self.now, &mut end.wire);
            }
            for packet in self.a.wire.sent.drain(..).filter(|packet| keep(packet)) {
                let from = self.a.address;
                self.b.machine.on_datagram(self.now, &from, &packet, false, &mut self.b.got);
            }
            for packet in self.b.wire.sent.drain(..) {
                let from = self.b.address;
                self.a.machine.on_datagram(self.now, &from, &packet, false, &mut self.a.got);
            }
        }
    }

    fn packet_max(&self) -> usize {
        self.a.machine.of(PeerId(0)).unwrap().datagram_room()
    }
}

#[test]
fn a_path_that_drops_what_is_long_is_found() {
    let mut bench = Bench::connected();
    bench.send(PAYLOAD);
    bench.run(3000, |packet| packet.len() <= DATAGRAM_START);
    assert_eq!(bench.a.wire.cut, [DATAGRAM_START]);
    assert_eq!(bench.packet_max(), DATAGRAM_START);
    // What is new passes, once what was made before does so in parts.
    bench.send(PAYLOAD);
    bench.run(1000, |_| true);
    assert_eq!(bench.b.got.0, [10, PAYLOAD, PAYLOAD]);
    bench.send(5 * PAYLOAD);
    bench.run(1000, |packet| packet.len() <= DATAGRAM_START);
    assert_eq!(bench.b.got.0.len(), 4);
    assert_eq!(bench.a.wire.cut.len(), 1, "told once");
}

#[test]
fn a_peer_without_memory_is_no_narrow_path() {
    let mut bench = Bench::connected();
    bench.send(PAYLOAD);
    bench.run(10_000, is_hello);
    assert_eq!(bench.a.wire.cut, []);
    assert_eq!(bench.packet_max(), LONG);
    bench.run(2000, |_| true);
    assert_eq!(bench.b.got.0, [10, PAYLOAD]);
}

#[test]
fn a_network_that_is_down_is_no_narrow_path() {
    let mut bench = Bench::connected();
    bench.send(PAYLOAD);
    for _ in 0..5 {
        bench.run(4000, |_| false);
        // Only questions pass for a moment, whatever their length.
        bench.run(20, is_hello);
    }
    assert_eq!(bench.a.wire.cut, []);
    bench.run(2000, |_| true);
    assert_eq!(bench.b.got.0, [10, PAYLOAD]);
}

#[test]
fn short_packets_that_are_lost_say_nothing() {
    let mut bench = Bench::connected();
    bench.send(100);
    bench.run(10_000, |packet| is_hello(packet) && packet.len() == HELLO_LEN);
    assert_eq!((bench.a.wire.cut.len(), bench.packet_max()), (0, LONG));
}

#[test]
fn what_a_router_says_is_believed_within_bounds() {
    let mut bench = Bench::connected();
    let b = bench.b.address;
    for (carried, max) in [(9000, LONG), (1372, 1372), (1400, 1372), (100, 1200), (0, 1200)] {
        bench.a.machine.on_too_long(&b, carried, &bench.a.got);
        assert_eq!(bench.packet_max(), max);
    }
}
