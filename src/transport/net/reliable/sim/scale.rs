//! Many peers: they connect without a storm, need little memory each, and cost no time while idle.
//! `UDRV_TEST_NODES=10000` sets the number of nodes, `UDRV_TEST_PEERS=100` the number of peers that each one draws.

use super::super::{Reliable, Settings, Sink};
use super::app::Flow;
use super::network::{Slot, address, slot_of};
use super::node::Habits;
use super::number;
use super::oracle::Sizes;
use super::outcome::Outcome;
use super::rng::Rng;
use super::scenario::plain;
use super::weather::Weather;
use super::world::World;
use crate::transport::JobKey;
use crate::transport::Source;
use crate::transport::net::link::{Condition, Link, LinkSink};
use crate::transport::net::neighbours::Standing;
use crate::transport::{Address, Departure, PeerId};
use std::io::IoSlice;
use std::time::Instant;

/// Nodes of `cargo test`, peers that each of them draws, and nodes where each connects to all others.
const NODES: u64 = 200;
const PEERS: u64 = 8;
const ALL: u64 = 60;
const MS: u64 = 1_000_000;
/// Most memory of an idle peer, bytes.
const PEER_BYTES: usize = 1024;

fn nodes() -> Slot {
    number("UDRV_TEST_NODES").unwrap_or(NODES) as Slot
}

/// Sockets with the system's defaults, at a switch with 1 MiB for each port.
fn weather() -> Weather {
    Weather { port_bytes: 1 << 20, socket_bytes: 208 << 10, ..Weather::fair() }
}

/// Runs a world in which all nodes begin within a millisecond. Slot 0 receives a million packets a second, the others
/// are not limited.
fn meet(nodes: Slot, to: impl Fn(&mut Rng, Slot) -> Vec<Slot>, messages: u32) -> Outcome {
    let mut rng = Rng::new(5);
    let mut world = World::new(6, nodes as usize, weather());
    let habits = Habits { turn_ns: 5_000, peer_timeout_ns: 120_000 * MS, ..plain() };
    for slot in 0..nodes {
        let flows = to(&mut rng, slot)
            .into_iter()
            .map(|to| Flow::new(to, Sizes::UpTo(1000), messages).begins(rng.below(MS)))
            .collect();
        let turn_ns = if slot == 0 { 64_000 } else { habits.turn_ns };
        world.start(slot, Habits { turn_ns, ..habits.clone() }, flows);
    }
    world.run()
}

fn report(what: &str, outcome: &Outcome, connections: u64) {
    let Outcome { fates, counts, .. } = outcome;
    eprintln!(
        "{what}, {} nodes, {connections} connections: {:.2} handshake packets for each, all there after {:.1} ms, {} packets, {} sent again, {} dropped, longest queues: {} KiB in a socket, {} KiB at a switch's port; {} MiB in this process",
        outcome.slots,
        counts.hellos_sent as f64 / connections as f64,
        outcome.delivered_at as f64 / 1e6,
        fates.sent,
        counts.retransmitted,
        fates.port_full + fates.socket_full,
        outcome.socket_peak >> 10,
        outcome.port_peak >> 10,
        resident() >> 20
    );
}

#[test]
fn everybody_meets_some_at_once() {
    let nodes = nodes();
    let peers = number("UDRV_TEST_PEERS").unwrap_or(PEERS);
    let draw = |rng: &mut Rng, me| (0..peers).map(|_| other(rng, me, nodes.into())).collect();
    let outcome = meet(nodes, draw, 3);
    let connections = outcome.counts.connected / 2;
    report(&format!("{peers} random peers each"), &outcome, connections);
    assert!(outcome.counts.hellos_sent <= 3 * connections, "{outcome:?}");
    assert!(outcome.delivered_at < 100 * MS, "{outcome:?}");
}

#[test]
fn everybody_meets_one_at_once() {
    let outcome = meet(nodes(), |_, me| if me == 0 { Vec::new() } else { vec![0] }, 3);
    let connections = u64::from(nodes()) - 1;
    report("all to one", &outcome, connections);
    assert_eq!(outcome.messages, 3 * connections);
    assert!(outcome.counts.hellos_sent <= 8 * connections, "{outcome:?}");
    assert!(outcome.delivered_at < 2000 * MS, "{outcome:?}");
}

#[test]
fn everybody_meets_everybody_at_once() {
    let nodes = number("UDRV_TEST_NODES").unwrap_or(ALL) as Slot;
    let outcome = meet(nodes, |_, me| (0..nodes).filter(|to| *to != me).collect(), 1);
    let connections = u64::from(nodes) * u64::from(nodes - 1) / 2;
    report("all to all", &outcome, connections);
    assert_eq!(outcome.messages, 2 * connections);
    assert_eq!(outcome.counts.connected, 2 * connections, "one for each pair");
    assert!(outcome.counts.hellos_sent <= 8 * connections, "{outcome:?}");
}

/// A node other than `me`, all equally likely.
fn other(rng: &mut Rng, me: Slot, nodes: u64) -> Slot {
    let to = rng.below(nodes - 1) as Slot;
    if to >= me { to + 1 } else { to }
}

/// The packets of an endpoint, and their receivers.
#[derive(Default)]
struct Wire(Vec<(Slot, Vec<u8>)>);

impl Link for Wire {
    fn datagram_max(&self) -> usize {
        1472
    }

    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize {
        self.0.extend(packets.iter().map(|p| (slot_of(to), p.to_vec())));
        packets.len()
    }

    fn receive(&mut self, _: &mut impl LinkSink) -> usize {
        0
    }
}

/// A layer above that counts messages.
#[derive(Default)]
struct Count(u64);

impl Sink for Count {
    fn peer_of(&mut self, address: &Address) -> Option<PeerId> {
        Some(PeerId(slot_of(address)))
    }

    fn find(&self, address: &Address) -> Option<PeerId> {
        Some(PeerId(slot_of(address)))
    }

    fn forget(&mut self, _: PeerId) {}

    fn standing(&self, _: &Address) -> Standing {
        Standing::Admitted
    }

    fn on_connected(&mut self, _: PeerId, _: &Address) {}

    fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {
        self.0 += 1;
    }

    fn on_departure(&mut self, peer: PeerId, departure: Departure) {
        panic!("{peer:?} {departure:?}");
    }

    fn is_owed(&self, _: PeerId) -> Option<bool> {
        Some(false)
    }
}

fn machine(slot: Slot, now: u64) -> Reliable {
    let settings = Settings {
        life: u64::from(slot) * 2 + 1,
        address: address(slot),
        key: JobKey::from_bytes([3; 16]),
        key_source: Source::AuthKey,
        datagram_max: 1472,
        direct_max: 0,
        peer_timeout_ns: 120_000 * MS,
        buffer_bytes: 64 << 20,
        receive_window: 512,
        features: 0,
        first_psn: 1,
        seed: u128::from(slot).to_le_bytes(),
    };
    Reliable::new(settings, now)
}

/// An endpoint that is connected to `peers` others, and has exchanged some messages with each.
fn hub(peers: Slot) -> (Reliable, u64) {
    let mut now = MS;
    let mut hub = machine(0, now);
    for slot in 1..=peers {
        introduce(&mut hub, slot, &mut now);
    }
    (hub, now)
}

fn introduce(hub: &mut Reliable, slot: Slot, now: &mut u64) {
    let (mut here, mut there) = (Count::default(), Count::default());
    let mut peer = machine(slot, *now);
    peer.connect(PeerId(0), &address(0), *now).unwrap();
    for i in 0..20 {
        peer.send(PeerId(0), &[1; 40], 500 + i, |_, to| to.fill(1), *now).unwrap();
    }
    let mut asked = false;
    while there.0 < 20 || hub.unacknowledged() + peer.unacknowledged() > 0 {
        *now += 20_000;
        if here.0 > 0 && !asked {
            for _ in 0..20 {
                hub.send(PeerId(slot), &[1; 40], 300, |_, to| to.fill(2), *now).unwrap();
            }
            asked = true;
        }
        let mut wire = Wire::default();
        for (machine, sink) in [(&mut *hub, &mut here), (&mut peer, &mut there)] {
            if machine.next_timeout().is_some_and(|at| at <= *now) {
                machine.on_timeout(*now, sink);
            }
            machine.poll_transmit(*now, &mut wire);
        }
        for (to, bytes) in wire.0 {
            match to {
                0 => hub.on_datagram(*now, &address(slot), &bytes, Condition::default(), &mut here),
                _ => peer.on_datagram(*now, &address(0), &bytes, Condition::default(), &mut there),
            }
        }
    }
}

/// Lets time pass in which there is nothing to send.
fn rest(hub: &mut Reliable, now: &mut u64, ns: u64) {
    let end = *now + ns;
    let mut count = Count::default();
    while let Some(at) = hub.next_timeout().filter(|at| *at < end) {
        *now = at.max(*now);
        hub.on_timeout(*now, &mut count);
        hub.poll_transmit(*now, &mut Wire::default());
    }
    *now = end;
}

/// Resident memory of this process, bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = text.split(' ').nth(1).unwrap();
    pages.parse::<usize>().unwrap() * 4096
}

/// Runs alone in its process: see below.
#[test]
#[ignore = "run by an_idle_peer_is_small"]
fn an_idle_peer_is_small_alone() {
    let peers = nodes().max(4000);
    let (mut hub, mut now) = hub(1000);
    rest(&mut hub, &mut now, 20_000 * MS);
    let before = resident();
    for slot in 1001..=1000 + peers {
        introduce(&mut hub, slot, &mut now);
    }
    rest(&mut hub, &mut now, 20_000 * MS);
    let each = (resident() - before) / peers as usize;
    assert_eq!(hub.connections(), 1000 + peers as usize);
    assert!(each <= PEER_BYTES, "{each} bytes for each idle peer");
    eprintln!("{each} bytes for each of {peers} idle peers");
}

/// The memory of the whole process is measured, so nothing else may run in it.
#[test]
fn an_idle_peer_is_small() {
    crate::alone::run(concat!(module_path!(), "::an_idle_peer_is_small_alone"), "true");
}

/// Nanoseconds of a turn in which nothing is due.
fn turn_ns(hub: &mut Reliable, now: &mut u64) -> f64 {
    let (mut count, mut wire) = (Count::default(), Wire::default());
    let turns = 20_000;
    let began = Instant::now();
    for _ in 0..turns {
        *now += 100;
        if std::hint::black_box(hub.next_timeout()).is_some_and(|at| at <= *now) {
            hub.on_timeout(*now, &mut count);
        }
        hub.poll_transmit(*now, &mut wire);
    }
    began.elapsed().as_nanos() as f64 / f64::from(turns)
}

#[test]
fn idle_peers_cost_no_time() {
    let mut best = [f64::MAX; 2];
    let mut hubs = [10, nodes().max(2000)].map(hub);
    for (hub, now) in &mut hubs {
        rest(hub, now, 20_000 * MS);
    }
    for _ in 0..5 {
        for ((hub, now), best) in hubs.iter_mut().zip(&mut best) {
            *best = best.min(turn_ns(hub, now));
        }
    }
    eprintln!("a turn with 10 idle peers takes {:.0} ns, with many {:.0} ns", best[0], best[1]);
    assert!(best[1] < 4.0 * best[0] + 200.0, "{best:?} ns");
}
