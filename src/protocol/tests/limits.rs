//! Back-pressure and fences: which operations wait, which are refused, and that nothing is lost by it.

use super::fixture::{LIMITS, Memory, World, receive_op, rma_op, send_op};
use super::sim::{Reach, Weather};
use crate::memory::keys::Right;
use crate::protocol::matching::EACH;
use crate::protocol::packet::Packet;
use crate::protocol::rma::QUEUE_MAX;
use crate::protocol::send::COPY_MEAN;
use crate::protocol::{Direction, Limits, OpError, PeekAction, ReceiveOp, RmaOp, SendOp};
use crate::transport::{Departure, PeerId};

#[test]
fn a_full_queue_refuses_and_loses_nothing() {
    let mut world = World::new(2, Weather { queue_len: 3, ..Weather::fair() }, LIMITS);
    let peer = world.peer(0, 1);
    world.progress(1);
    let mut sent = 0;
    let mut to = Memory::zeroed(1);
    for received in 0..40u8 {
        loop {
            let mut from = Memory(vec![sent]);
            let delivery = sent % 3 == 0;
            match world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 0) }) {
                Ok(()) => sent += 1,
                Err(e) => break assert_eq!(e, OpError::Again),
            }
        }
        world.settle();
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.received(1);
        assert_eq!(to.0, [received]);
    }
    let mut none = Memory::zeroed(0);
    let op = receive_op(&mut none, 2);
    loop {
        world.peek(1, &op, PeekAction::Discard);
        if world.receives(1)[0].is_err() {
            break;
        }
    }
    world.settle();
    assert_eq!(world.sends(0).len(), usize::from(sent));
    world.assert_empty();
}

#[test]
fn pending_sends_are_bounded() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let mut from: Vec<_> = (0..LIMITS.tx_max + 1).map(|i| Memory::pattern(i, 1000)).collect();
    let (last, rest) = from.split_last_mut().unwrap();
    for (i, memory) in rest.iter_mut().enumerate() {
        assert_eq!(world.node(0).engine.room_for_sends(), LIMITS.tx_max - i);
        world.send(0, &send_op(peer, memory, i as u64)).unwrap();
    }
    for refine in [(false, false), (true, false), (false, true)] {
        let (delivery, fence) = refine;
        let op = SendOp { delivery, fence, ..send_op(peer, last, 99) };
        assert_eq!(world.send(0, &op), Err(OpError::Again));
    }
    let mut short = Memory::pattern(0, 10);
    world.send(0, &send_op(peer, &mut short, 50)).unwrap();
    let mut to = Memory::zeroed(1000);
    for i in 0..LIMITS.tx_max {
        world.settle();
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.settle();
        world.received(1);
        assert!(to.0 == super::rng::payload(i, 1000));
    }
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    assert_eq!(world.received(1).len, 10);
    assert_eq!(world.sends(0).len(), LIMITS.tx_max + 1);
    world.assert_empty();
}

#[test]
fn copies_of_pending_sends_are_bounded() {
    const LEN: usize = COPY_MEAN + 1;
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    // One injected send may always be copied, however long.
    let lens: Vec<usize> = [LIMITS.tx_max * COPY_MEAN + 1].into_iter().chain([LEN; 7]).collect();
    let mut from: Vec<_> = lens.iter().map(|len| Memory::pattern(1, *len)).collect();
    let mut send = |world: &mut World, i: usize, inject: bool| {
        world.send(0, &SendOp { inject, ..send_op(peer, &mut from[i], i as u64) })
    };
    send(&mut world, 0, true).unwrap();
    assert_eq!(send(&mut world, 1, true), Err(OpError::Again));
    send(&mut world, 1, false).unwrap();
    let mut to = Memory::zeroed(lens[0]);
    let mut receive = |world: &mut World, len: usize| {
        world.settle();
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.settle();
        assert_eq!(world.received(1).len, len);
    };
    receive(&mut world, lens[0]);
    for i in 1..7 {
        send(&mut world, i, true).unwrap();
    }
    assert_eq!(world.node(0).engine.core.sends.copied, 6 * LEN);
    for _ in 0..7 {
        receive(&mut world, LEN);
    }
    assert_eq!((world.sends(0).len(), world.node(0).engine.core.sends.copied), (8, 0));
    world.assert_empty();
}

/// Injected writes and atomic operations behind a fence that stays shut: those that find no slot of the pool own their copies.
#[test]
fn copies_of_deferred_operations_are_bounded() {
    const LEN: usize = 16 << 10;
    const KEY: u64 = 7;
    let limits = Limits { tx_max: 128, ..LIMITS };
    let mut world = World::new(2, Weather::fair(), limits);
    let (mut region, mut from) = (Memory::zeroed(LEN), Memory::pattern(1, LEN));
    let (mut message, mut to) = (Memory::pattern(2, 10), Memory::zeroed(10));
    world.register(1, KEY, &mut region, &[Right::Write]);
    let peer = world.peer(0, 1);
    world.send(0, &SendOp { delivery: true, ..send_op(peer, &mut message, 1) }).unwrap();
    let op = rma_op(peer, Right::Write, &mut from, KEY, 2);
    let op = RmaOp { inject: true, fence: true, ..op };
    let mut taken = 0;
    while world.access(0, &op).is_ok() {
        taken += 1;
    }
    assert_eq!(taken, 64 + limits.tx_max * COPY_MEAN / LEN);
    assert_eq!(world.access(0, &op), Err(OpError::Again));
    // It needs no copy.
    world.access(0, &RmaOp { inject: false, ..op }).unwrap();
    world.receive(1, &receive_op(&mut to, 3)).unwrap();
    world.settle();
    let ended = world.reports(0, Direction::Write);
    assert!(ended.len() == taken + 1 && ended.iter().all(Result::is_ok));
    assert!(region.0 == from.0);
    assert_eq!((world.received(1).len, world.sends(0).len()), (10, 1));
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn operations_behind_a_fence_are_bounded_for_each_peer() {
    const KEY: u64 = 7;
    let limits = Limits { tx_max: 2 * QUEUE_MAX, ..LIMITS };
    let mut world = World::new(2, Weather::fair(), limits);
    let (mut region, mut from) = (Memory::zeroed(8), Memory::pattern(1, 8));
    let (mut message, mut to) = (Memory::pattern(2, 10), Memory::zeroed(10));
    world.register(1, KEY, &mut region, &[Right::Write]);
    let peer = world.peer(0, 1);
    let send = send_op(peer, &mut message, 1);
    world.send(0, &SendOp { delivery: true, ..send }).unwrap();
    let write = RmaOp { fence: true, ..rma_op(peer, Right::Write, &mut from, KEY, 2) };
    (0..QUEUE_MAX).for_each(|_| world.access(0, &write).unwrap());
    assert_eq!(world.access(0, &write), Err(OpError::Again));
    assert_eq!(world.send(0, &send), Err(OpError::Again));
    world.receive(1, &receive_op(&mut to, 3)).unwrap();
    world.settle();
    assert_eq!(world.reports(0, Direction::Write).len(), QUEUE_MAX);
    assert_eq!((world.received(1).len, world.sends(0).len()), (10, 1));
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn posted_receives_are_bounded() {
    let mut world = World::pair();
    let mut to = Memory::zeroed(10);
    for i in 0..LIMITS.rx_max {
        assert_eq!(world.node(1).engine.room_for_receives(0), LIMITS.rx_max - i);
        let op = ReceiveOp { tagged: i % 2 == 0, ..receive_op(&mut to, i as u64) };
        world.receive(1, &op).unwrap();
    }
    let op = receive_op(&mut to, 99);
    assert_eq!(world.receive(1, &op), Err(OpError::Again));
    assert_eq!(world.receive(1, &ReceiveOp { multi_min: Some(1), ..op }), Err(OpError::Again));
    assert!(world.cancel(1, 0));
    world.receive(1, &op).unwrap();
    assert!(world.cancel(1, 99));
    for i in 1..LIMITS.rx_max {
        assert!(world.cancel(1, i as u64));
    }
    assert_eq!(world.receives(1).len(), LIMITS.rx_max + 1);
    world.assert_empty();
}

#[test]
fn full_completion_queues_stop_sends_and_arrivals() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 10), Memory::zeroed(10));
    world.node(0).host.room = false;
    let op = send_op(peer, &mut from, 1);
    assert_eq!(world.send(0, &op), Err(OpError::Again));
    world.node(0).host.room = true;
    world.send(0, &op).unwrap();
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.node(1).host.room = false;
    world.settle();
    assert!(world.receives(1).is_empty());
    world.node(1).host.room = true;
    world.settle();
    world.received(1);
    world.sends(0);
    world.assert_empty();
}

/// The receiver does not poll: a pass of progress asks for room once, however many long sends wait for it.
#[test]
fn many_long_sends_to_a_full_peer_are_one_attempt() {
    const SENDS: usize = 40;
    let off = vec![Reach::Off];
    let weather = Weather { get: off.clone(), put: off, ..Weather::fair() };
    let limits = Limits { tx_max: SENDS, rx_max: SENDS, ..LIMITS };
    let mut world = World::new(2, weather, limits);
    let peer = world.peer(0, 1);
    let mut from: Vec<_> = (0..SENDS).map(|i| Memory::pattern(i, 5000)).collect();
    let mut to: Vec<_> = (0..SENDS).map(|_| Memory::zeroed(5000)).collect();
    for (i, (from, to)) in from.iter_mut().zip(&mut to).enumerate() {
        world.receive(1, &receive_op(to, i as u64)).unwrap();
        world.send(0, &send_op(peer, from, i as u64)).unwrap();
    }
    world.progress(1);
    world.progress(0);
    let waiting = world.node(0).engine.core.sends.streams.len();
    assert!(waiting > 10, "{waiting}");
    for _ in 0..3 {
        world.net.borrow_mut().refused = 0;
        world.progress(0);
        assert_eq!(world.net.borrow().refused, 1, "of {waiting}");
    }
    world.settle();
    let contexts: Vec<_> = world.receives(1).iter().map(|r| r.as_ref().unwrap().context).collect();
    assert_eq!(contexts, (0..SENDS as u64).collect::<Vec<_>>(), "the first one is complete first");
    assert!(from.iter().zip(&to).all(|(from, to)| from.0 == to.0));
    assert_eq!(world.sends(0).len(), SENDS);
    world.assert_empty();
}

/// Announcements run ahead of the bytes: before those come, they take no memory, which nothing would bound.
#[test]
fn announced_messages_take_memory_for_what_has_come() {
    const LEN: usize = 300_000;
    let weather = Weather { push_max: LEN, ..Weather::fair() };
    let limits = Limits { unexpected_max: 64 << 20, ..LIMITS };
    let mut world = World::new(2, weather, limits);
    let peer = world.peer(0, 1);
    let mut from = Memory::pattern(1, LEN);
    world.send(0, &send_op(peer, &mut from, 0)).unwrap();
    let mut most = 0;
    for _ in 0..40 {
        world.progress(1);
        world.progress(0);
        let matching = &mut world.node(1).engine.core.matching;
        let (reserved, here) = (matching.reserved(), matching.beside_eager());
        assert!(reserved <= (2 * here).clamp(64 << 10, LEN), "{reserved} for {here}");
        most = most.max(here);
    }
    assert_eq!(most, LEN);
    let mut to = Memory::zeroed(LEN);
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.settle();
    world.received(1);
    assert!(to.0 == from.0);
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}

#[test]
fn pressure_switches_to_descriptions_and_back() {
    let limits = Limits { unexpected_max: 250 + 2 * EACH, ..LIMITS };
    let mut world = World::new(2, Weather::fair(), limits);
    let peer = world.peer(0, 1);
    let mut from = Memory::pattern(0, 100);
    let mut kinds = Vec::new();
    let mut kind = |world: &mut World| {
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        let rendezvous = matches!(world.on_wire(0, 1)[..], [Packet::Rts { .. }]);
        world.settle();
        kinds.push(rendezvous);
    };
    for _ in 0..5 {
        kind(&mut world); // 100, 200, 300 B and EACH: then under pressure
    }
    assert!(world.net.borrow().is_pressed(1));
    let mut to = Memory::zeroed(100);
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.settle();
    kind(&mut world); // 200 B: still more than half
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.settle();
    kind(&mut world); // 100 B
    assert_eq!(kinds, [false, false, false, true, true, true, false]);
    assert!(!world.net.borrow().is_pressed(1));
    for _ in 0..5 {
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.settle();
    }
    assert_eq!((world.receives(1).len(), world.sends(0).len()), (7, 7));
    world.assert_empty();
}

/// Empty messages take memory too: so many of them set PRESSURE, and it ends with their receives or with a discard.
#[test]
fn empty_messages_press_too() {
    let mut world = World::new(2, Weather::fair(), Limits { unexpected_max: 2 * EACH, ..LIMITS });
    let peer = world.peer(0, 1);
    let mut empty = Memory::zeroed(0);
    for pressed in [false, false, true, true] {
        world.send(0, &send_op(peer, &mut empty, 1)).unwrap();
        world.settle();
        assert_eq!(world.net.borrow().is_pressed(1), pressed);
    }
    let op = receive_op(&mut empty, 2);
    world.receive(1, &op).unwrap();
    world.peek(1, &op, PeekAction::Discard);
    world.settle();
    assert!(!world.net.borrow().is_pressed(1));
    for _ in 0..2 {
        world.receive(1, &op).unwrap();
        world.settle();
    }
    assert_eq!((world.receives(1).len(), world.sends(0).len()), (4, 4));
    world.assert_empty();
}

/// A send that stays pending, then those of `ops`. Returns the buffers.
fn behind_a_pending_send(world: &mut World, peer: PeerId, ops: &[SendOp]) -> Memory {
    let mut first = Memory::pattern(0, 1000);
    world.send(0, &send_op(peer, &mut first, 0)).unwrap();
    for op in ops {
        world.send(0, op).unwrap();
    }
    first
}

#[test]
fn a_fence_holds_later_sends_until_earlier_ones_complete() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let mut from: Vec<_> = (0..5).map(|i| Memory::pattern(i, 10 + 300 * i)).collect();
    let ops: Vec<_> = from
        .iter_mut()
        .enumerate()
        .map(|(i, memory)| SendOp {
            fence: i == 0,
            delivery: i == 3,
            inject: i == 4,
            ..send_op(peer, memory, 1 + i as u64)
        })
        .collect();
    let _first = behind_a_pending_send(&mut world, peer, &ops);
    from[4].0.fill(0);
    assert!(matches!(world.sends(0)[..], [Ok(c)] if c.context == 5), "only the injected one");
    world.settle();
    assert_eq!(world.node(1).engine.core.matching.unexpected.len(), 1);
    let mut to = Memory::zeroed(2000);
    for i in 0..6 {
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.settle();
        let c = world.received(1);
        let len = if i == 0 { 1000 } else { 10 + 300 * (i - 1) };
        assert_eq!(c.len, len);
        assert!(to.0[..len] == *super::rng::payload(i.saturating_sub(1), len));
    }
    let done: Vec<_> = world.sends(0).iter().map(|r| r.unwrap().context).collect();
    assert_eq!(done, [0, 1, 2, 3, 4]);
    world.assert_empty();
}

#[test]
fn a_fence_with_nothing_before_it_is_open_and_one_peer_does_not_hold_another() {
    let mut world = World::new(3, Weather::fair(), LIMITS);
    let (peer, other) = (world.peer(0, 1), world.peer(0, 2));
    let mut from: Vec<_> = (0..3).map(|i| Memory::pattern(i, 10)).collect();
    let ops: Vec<_> = [peer, other, peer]
        .into_iter()
        .zip(&mut from)
        .map(|(peer, memory)| SendOp { fence: true, ..send_op(peer, memory, 1) })
        .collect();
    world.send(0, &ops[0]).unwrap();
    let _first = behind_a_pending_send(&mut world, peer, &ops[1..]);
    assert!(matches!(world.on_wire(0, 1)[..], [Packet::Eager { .. }, Packet::Rts { .. }]));
    assert!(matches!(world.on_wire(0, 2)[..], [Packet::Eager { .. }]));
    assert_eq!(world.sends(0).len(), 2);
}

#[test]
fn a_deferred_send_that_finds_the_queue_full_keeps_the_endpoint_awake() {
    let weather = Weather { queue_len: 1, get: vec![Reach::Off], ..Weather::fair() };
    let mut world = World::new(2, weather, LIMITS);
    let peer = world.peer(0, 1);
    world.progress(1);
    let (mut a, mut b, mut c) =
        (Memory::pattern(0, 10), Memory::pattern(1, 20), Memory::pattern(2, 30));
    world.send(0, &SendOp { delivery: true, ..send_op(peer, &mut a, 1) }).unwrap();
    world.send(0, &SendOp { fence: true, ..send_op(peer, &mut b, 2) }).unwrap();
    world.send(0, &send_op(peer, &mut c, 3)).unwrap();
    let mut to = Memory::zeroed(30);
    world.receive(1, &receive_op(&mut to, 9)).unwrap();
    world.progress(1);
    world.progress(0); // the acknowledgement: b leaves, c finds no room
    assert_eq!(world.on_wire(0, 1).len(), 1);
    assert!(world.node(0).engine.is_busy(), "nothing would wake it");
    world.settle();
    for len in [20, 30] {
        world.receive(1, &receive_op(&mut to, 9)).unwrap();
        assert_eq!(world.receives(1).pop().unwrap().unwrap().len, len);
    }
    assert_eq!(world.sends(0).len(), 3);
    world.assert_empty();
}

#[test]
fn a_deferred_send_that_dies_with_its_peer_lets_the_endpoint_sleep() {
    let mut world = World::new(2, Weather { queue_len: 1, ..Weather::fair() }, LIMITS);
    let peer = world.peer(0, 1);
    world.progress(1);
    let mut from: Vec<_> = (0..3).map(|i| Memory::pattern(i, 10)).collect();
    for (i, memory) in from.iter_mut().enumerate() {
        let op = SendOp { delivery: i == 0, fence: i == 1, ..send_op(peer, memory, 1) };
        world.send(0, &op).unwrap();
    }
    let mut to = Memory::zeroed(30);
    world.receive(1, &receive_op(&mut to, 9)).unwrap();
    world.progress(1);
    world.progress(0); // the acknowledgement: the second leaves, the third finds no room
    assert!(world.node(0).engine.is_busy());
    world.leave(1, Departure::Closed);
    world.settle();
    let ok: Vec<_> = world.sends(0).iter().map(Result::is_ok).collect();
    assert_eq!(ok, [true, true, false]);
    world.receives(1);
    world.assert_empty();
}

/// Memory ran out while nothing was kept: what took it was something else, and peers go on as before.
#[test]
fn a_failed_allocation_leaves_room_for_messages() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    world.node(1).engine.core.keep_less();
    let (mut from, mut to) = (Memory::pattern(0, 100), Memory::zeroed(100));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    assert!(!world.net.borrow().is_pressed(1));
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    assert_eq!((world.received(1).len, world.sends(0).len()), (100, 1));
    world.assert_empty();
}

/// No event tells of the room that a message by stream has left when its turn ended.
#[test]
fn a_sender_does_not_sleep_while_its_stream_has_room() {
    const LEN: usize = 50_000;
    let (get, put) = (vec![Reach::Off], vec![Reach::Off]);
    let weather = Weather { stream_max: 500, announces_room: true, get, put, ..Weather::fair() };
    let mut world = World::new(2, weather, LIMITS);
    let peer = world.peer(0, 1);
    let mut rests = 0;
    // Whether there is a stream is drawn for each message.
    for seed in 0..10 {
        let (mut from, mut to) = (Memory::pattern(seed, LEN), Memory::zeroed(LEN));
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        for _ in 0..100 {
            world.progress(1);
            world.progress(0);
            // What it does while nothing arrives.
            for _ in 0..100 {
                rests += usize::from(!world.node(0).engine.is_busy());
                world.node(0).check_rest();
                world.progress(0);
            }
        }
        world.settle();
        world.received(1);
        assert!(world.sends(0)[0].is_ok() && to.0 == from.0);
    }
    assert!(world.node(0).engine.counts().stream_bytes > 0);
    assert!(rests > 100, "it may sleep while there is no room");
    world.assert_empty();
}
