//! Packets that no udrv sends, or not in this state: they are counted, and change nothing.

use super::fixture::{LIMITS, Memory, World, receive_op, send_op};
use super::rng::Rng;
use super::sim::{Reach, Weather};
use crate::protocol::index_list::Key;
use crate::protocol::packet::{Envelope, Packet, Ranges};
use crate::protocol::{Cause, SendOp};
use crate::transport::{RemoteKey, Share};

const SHARE: Share = Share { cell: 0, generation: 1, unit: 1, len: 9 };
const PLAIN: Envelope = Envelope { tagged: false, tag: 0, data: None, rx: 0 };

fn three(get: Reach, put: Reach) -> World {
    let weather = Weather { get: vec![get], put: vec![put], lies: true, ..Weather::fair() };
    let mut world = World::new(3, weather, LIMITS);
    world.peer(2, 0);
    world.peer(2, 1);
    world.settle();
    world
}

/// Forges `packets` from `from` to `to`, all of which must be dropped.
#[track_caller]
fn assert_dropped(world: &mut World, from: usize, to: usize, packets: &[Packet]) {
    let before = world.dropped(to);
    for packet in packets {
        world.forge(from, to, packet, &[1, 2, 3]);
    }
    world.settle();
    assert_eq!(world.dropped(to) - before, packets.len() as u64);
    assert!(world.sends(to).is_empty() && world.receives(to).is_empty());
}

#[test]
fn malformed_headers_are_counted() {
    let mut world = three(Reach::On, Reach::On);
    let good = Packet::Rts {
        envelope: PLAIN,
        tx: 1,
        len: 2,
        pushed: 0,
        leaves: false,
        sees: false,
        offer: None,
        ranges: Ranges::default(),
    };
    let good = good.encode();
    let mut headers: Vec<Vec<u8>> = vec![vec![], vec![0; 8], vec![99; 40]];
    headers.extend((0..good.as_slice().len()).map(|n| good.as_slice()[..n].to_vec()));
    let mut ranges = good.as_slice().to_vec();
    ranges[2] = 5;
    headers.push(ranges);
    for header in &headers {
        world.net.borrow_mut().forge(2, 1, header, &[7; 9]);
    }
    world.settle();
    assert_eq!(world.dropped(1), headers.len() as u64);
    world.assert_empty();
}

#[test]
fn stray_packets_change_nothing() {
    let mut world = three(Reach::On, Reach::On);
    for id in [0, 1, 1 << 32, u64::MAX] {
        let ranges = Ranges::default();
        assert_dropped(
            &mut world,
            2,
            1,
            &[
                Packet::Fin { tx: id, status: 0 },
                Packet::Fin { tx: id, status: 5 },
                Packet::Cts { tx: id, rx: 0, len: 9, faulted: false, ranges },
                Packet::Fragment { rx: id, offset: 0 },
                Packet::PutDone { rx: id },
                Packet::Window { tx: id, rx: 0, offset: 0, len: 9, remote: RemoteKey::default() },
                Packet::Decline { rx: id, offset: 0 },
                Packet::Cooperate { tx: id, offset: 0, share: SHARE, ranges },
            ],
        );
    }
    world.assert_empty();
}

#[test]
fn only_the_receiver_can_answer_a_send() {
    let mut world = three(Reach::Off, Reach::Off);
    let peer = world.peer(0, 1);
    let (mut from, mut behind) = (Memory::pattern(0, 5000), Memory::pattern(1, 10));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.send(0, &SendOp { fence: true, ..send_op(peer, &mut behind, 2) }).unwrap();
    let keys: Vec<Key> = world.node(0).engine.core.sends.pending.keys_where(|_| true);
    let [tx, deferred] = [keys[0].to_wire(), keys[1].to_wire()];
    let ranges = Ranges::default();
    assert_dropped(
        &mut world,
        2,
        0,
        &[
            Packet::Fin { tx, status: 0 },
            Packet::Cts { tx, rx: 0, len: 5000, faulted: false, ranges },
        ],
    );
    // Nor may the receiver itself answer a message that was not sent, or one with the number of another incarnation.
    let older = tx | 1 << 32;
    assert_dropped(
        &mut world,
        1,
        0,
        &[
            Packet::Fin { tx: deferred, status: 0 },
            Packet::Cts { tx: deferred, rx: 0, len: 10, faulted: false, ranges },
            Packet::Fin { tx: older, status: 0 },
            Packet::Cts { tx: older, rx: 0, len: 5000, faulted: false, ranges },
        ],
    );
    let mut to = Memory::zeroed(5000);
    world.receive(1, &receive_op(&mut to, 3)).unwrap();
    world.settle();
    assert_eq!(world.received(1).len, 5000);
    assert!(to.0 == from.0);
    world.receive(1, &receive_op(&mut to, 3)).unwrap();
    world.received(1);
    assert_eq!(world.sends(0).len(), 2);
    world.assert_empty();
}

#[test]
fn only_the_sender_can_fill_a_receive_and_only_in_order() {
    let mut world = three(Reach::Off, Reach::Off);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 5000), Memory::zeroed(5000));
    world.receive(1, &receive_op(&mut to, 3)).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.progress(1);
    let rx = world.node(1).engine.core.arrivals.active.keys_where(|_| true)[0].to_wire();
    let before = world.dropped(1);
    for packet in [Packet::Fragment { rx, offset: 0 }, Packet::PutDone { rx }] {
        world.forge(2, 1, &packet, &[9; 10]);
    }
    for (offset, len) in [(1, 10), (4999, 10), (u64::MAX, 10), (0, 5001)] {
        world.forge(0, 1, &Packet::Fragment { rx, offset }, &vec![9; len]);
    }
    // The buffer was not described to the sender.
    world.forge(0, 1, &Packet::PutDone { rx }, &[]);
    world.settle();
    assert_eq!(world.dropped(1) - before, 7);
    assert_eq!(world.received(1).len, 5000);
    assert!(to.0 == from.0);
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}

#[test]
fn nobody_fills_a_receive_that_pulls() {
    let mut world = three(Reach::Shy, Reach::On);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 50_000), Memory::zeroed(50_000));
    world.receive(1, &receive_op(&mut to, 3)).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    while world.node(1).engine.core.arrivals.active.is_empty() {
        world.progress(1);
    }
    let active = &world.node(1).engine.core.arrivals.active;
    let (key, at) =
        active.iter().map(|(key, active)| (key, active.message.received as u64)).next().unwrap();
    let rx = key.to_wire();
    world.forge(0, 1, &Packet::PutDone { rx }, &[]);
    world.forge(0, 1, &Packet::Fragment { rx, offset: at }, &[9; 10]);
    world.settle();
    assert_eq!(world.dropped(1), 2);
    assert_eq!(world.received(1).len, 50_000);
    assert!(to.0 == from.0);
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}

#[test]
fn a_description_of_memory_that_is_not_there_fails_the_receive() {
    for (count, len) in [(0, 5000), (1, 5000), (1, u64::MAX)] {
        let mut world = three(Reach::On, Reach::On);
        let (mut some, mut to) = (Memory::pattern(0, 100), Memory::zeroed(5000));
        let ranges = some.list().ranges();
        let ranges = Ranges::new((ranges.0, count));
        world.receive(1, &receive_op(&mut to, 3)).unwrap();
        world.forge(
            2,
            1,
            &Packet::Rts {
                envelope: PLAIN,
                tx: 77,
                len,
                pushed: 0,
                leaves: false,
                sees: false,
                offer: None,
                ranges,
            },
            &[],
        );
        world.settle();
        // Without ranges, or with ranges that cannot be read, the sender gets a CTS, and never sends.
        assert_eq!(world.node(1).engine.core.arrivals.active.len(), 1);
        if count > 0 {
            let active = &world.node(1).engine.core.arrivals.active;
            let rx = active.iter().map(|(key, _)| key.to_wire()).next().unwrap();
            world.forge(2, 1, &Packet::Fault { rx }, &[]);
            world.settle();
            let f = world.receive_failed(1);
            assert_eq!((f.error, f.cause), (libc::EFAULT, Cause::SenderUnreadable));
            assert_eq!(world.node(1).engine.core.arrivals.active.len(), 0);
        }
        world.leave(2, crate::transport::Departure::Closed);
        world.settle();
        if count == 0 {
            assert_eq!(world.receive_failed(1).cause, Cause::PeerClosed);
        }
        world.assert_empty();
    }
}

#[test]
fn a_second_answer_to_one_send_does_no_harm() {
    let mut world = three(Reach::Off, Reach::Off);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 100_000), Memory::zeroed(100_000));
    world.receive(1, &receive_op(&mut to, 3)).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.progress(1);
    let answer = world.on_wire(1, 0);
    let [cts @ Packet::Cts { tx, .. }] = answer[..] else { panic!("{answer:?}") };
    world.forge(1, 0, &cts, &[]);
    world.settle();
    assert_eq!(world.dropped(0), 1);
    world.received(1);
    assert!(to.0 == from.0);
    assert_eq!(world.sends(0).len(), 1);
    // A message that needs no FIN may get one.
    world.forge(1, 0, &Packet::Fin { tx, status: 0 }, &[]);
    world.settle();
    assert_eq!(world.dropped(0), 1);
    world.forge(1, 0, &Packet::Fin { tx: tx + 1, status: 0 }, &[]);
    world.settle();
    assert_eq!(world.dropped(0), 2);
    world.assert_empty();
}

/// A packet as the sender at slot 2 might send it, with fields that mean something now and then.
fn plausible(rng: &mut Rng) -> Packet {
    let (a, b) = (rng.below(4) as u64, rng.pick(&[0, 1, 100, 300, u64::MAX]));
    let ranges = Ranges::default();
    match rng.below(10) {
        0 => Packet::Eager { envelope: PLAIN, ack: Some(a) },
        1 => Packet::Rts {
            envelope: PLAIN,
            tx: a,
            len: b,
            pushed: 0,
            leaves: false,
            sees: false,
            offer: None,
            ranges,
        },
        2 => Packet::Cts { tx: a, rx: b, len: b, faulted: false, ranges },
        3 => Packet::Fragment { rx: a, offset: b },
        4 => Packet::PutDone { rx: a },
        5 => Packet::Resume { tx: a, rx: b, from: b, len: b },
        6 => Packet::Window { tx: a, rx: b, offset: b, len: a, remote: RemoteKey::default() },
        7 => Packet::Decline { rx: a, offset: b },
        8 => {
            let share = Share { len: b, unit: a as u32, ..SHARE };
            Packet::Cooperate { tx: a, offset: b, share, ranges }
        }
        _ => Packet::Fin { tx: a, status: b as u32 },
    }
}

/// An endpoint sends to a peer, and has receives posted, while the peer sends it the headers that `header` makes. Once
/// the peer has left, nothing is left of it.
fn attack(rng: &mut Rng, mut header: impl FnMut(&mut Rng) -> Vec<u8>) {
    let mut world = three(Reach::Off, Reach::Off);
    let peer = world.peer(0, 2);
    let mut from = Memory::pattern(0, 5000);
    let mut to: Vec<_> = (0..8).map(|_| Memory::zeroed(300)).collect();
    for memory in &mut to {
        world.receive(0, &receive_op(memory, 1)).unwrap();
    }
    world.send(0, &send_op(peer, &mut from, 9)).unwrap();
    for _ in 0..40 {
        let header = header(rng);
        let len = rng.below(400);
        world.net.borrow_mut().forge(2, 0, &header, &vec![0; len]);
        for at in [0, 2] {
            world.progress(at);
        }
    }
    world.leave(2, crate::transport::Departure::Closed);
    world.settle();
    let reports = world.sends(0);
    assert_eq!(reports.len(), 1, "{reports:?}");
    world.receives(0);
    let core = &world.node(0).engine.core;
    assert!(
        core.sends.pending.is_empty() && core.arrivals.active.is_empty() && core.outbox.is_empty()
    );
}

#[test]
fn random_packets_never_stop_the_engine() {
    for seed in 0..200 {
        attack(&mut Rng::new(seed), |rng| plausible(rng).encode().as_slice().to_vec());
    }
}

#[cfg(fuzzing)]
#[test]
fn fuzz_packets() {
    crate::fuzzing::run(|input| {
        attack(&mut Rng::scripted(input), |rng| match rng.percent(50) {
            true => plausible(rng).encode().as_slice().to_vec(),
            false => (0..rng.below(80)).map(|_| rng.below(256) as u8).collect(),
        });
    });
}
