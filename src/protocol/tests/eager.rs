//! Short messages.

use super::fixture::{LIMITS, Memory, World, lend, receive_op, send_op, source};
use super::sim::Weather;
use crate::protocol::matching::EACH;
use crate::protocol::packet::Packet;
use crate::protocol::{Cause, Direction, FI_ETRUNC, Limits, ReceiveOp, SendOp};
use crate::sys::reserve::tests::without_memory;

#[test]
fn an_unexpected_message_waits_for_its_receive() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 100), Memory::zeroed(200));
    let op = SendOp { tagged: true, tag: 7, data: Some(9), ..send_op(peer, &mut from, 1) };
    world.send(0, &op).unwrap();
    let sent = world.sends(0);
    assert!(matches!(sent[..], [Ok(c)] if c.context == 1 && c.direction == Direction::Send));
    world.settle();
    assert_eq!(world.node(1).engine.core.matching.bytes, 100 + EACH);
    world
        .receive(1, &ReceiveOp { tagged: true, tag: 7, ignore: 0, ..receive_op(&mut to, 2) })
        .unwrap();
    let c = world.received(1);
    assert_eq!((c.context, c.len, c.tag, c.data, c.source), (2, 100, 7, Some(9), source(0)));
    assert_eq!(to.0[..100], from.0);
    assert_eq!(to.0[100..], [0; 100]);
    assert_eq!(world.node(1).engine.counts().unexpected, 1);
    world.assert_empty();
}

#[test]
fn an_expected_message_goes_straight_to_its_buffer() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 90), Memory::zeroed(90));
    let op = ReceiveOp { segments: lend(&mut to.0, &[10, 10, 50]), ..receive_op(&mut to, 2) };
    world.receive(1, &op).unwrap();
    let op = SendOp { payload: lend(&mut from.0, &[1, 60]), ..send_op(peer, &mut from, 1) };
    world.send(0, &op).unwrap();
    world.progress(1);
    assert_eq!(world.received(1).len, 90);
    assert_eq!(to.0, from.0);
    assert_eq!(world.sends(0).len(), 1);
    assert_eq!(world.node(1).engine.counts().unexpected, 0);
    world.assert_empty();
}

#[test]
fn a_message_longer_than_its_buffer_is_cut_and_reported() {
    for early in [false, true] {
        let mut world = World::pair();
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, 100), Memory::zeroed(60));
        if early {
            world.receive(1, &receive_op(&mut to, 2)).unwrap();
        }
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        world.settle();
        if !early {
            world.receive(1, &receive_op(&mut to, 2)).unwrap();
        }
        let f = world.receive_failed(1);
        assert_eq!((f.error, f.cause, f.overflow), (FI_ETRUNC, Cause::Truncated, 40));
        assert_eq!(f.completion.len, 60);
        assert_eq!(to.0, from.0[..60]);
        assert!(world.sends(0)[0].is_ok());
        world.assert_empty();
    }
}

#[test]
fn an_empty_message_is_a_message() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::zeroed(0), Memory::zeroed(0));
    world.send(0, &SendOp { data: Some(3), ..send_op(peer, &mut from, 1) }).unwrap();
    world.settle();
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    let c = world.received(1);
    assert_eq!((c.len, c.data), (0, Some(3)));
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}

#[test]
fn a_message_to_oneself_arrives() {
    for len in [10, 5000] {
        let mut world = World::new(1, super::sim::Weather::fair(), super::fixture::LIMITS);
        let me = world.peer(0, 0);
        let (mut from, mut to) = (Memory::pattern(3, len), Memory::zeroed(len));
        world.send(0, &send_op(me, &mut from, 1)).unwrap();
        world.settle();
        world.receive(0, &receive_op(&mut to, 2)).unwrap();
        world.settle();
        assert_eq!(world.received(0).source, source(0));
        assert_eq!(to.0, from.0);
        assert!(matches!(world.sends(0)[..], [Ok(_)]));
        world.assert_empty();
    }
}

#[test]
fn an_injected_buffer_is_free_at_once() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 100), Memory::zeroed(100));
    let wanted = from.0.clone();
    world.send(0, &SendOp { inject: true, ..send_op(peer, &mut from, 1) }).unwrap();
    from.0.fill(0);
    assert!(matches!(world.sends(0)[..], [Ok(_)]));
    world.settle();
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    assert_eq!(world.received(1).len, 100);
    assert_eq!(to.0, wanted);
    world.assert_empty();
}

#[test]
fn delivery_completes_after_the_receive() {
    for inject in [false, true] {
        let mut world = World::pair();
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, 100), Memory::zeroed(100));
        let op = SendOp { delivery: true, inject, ..send_op(peer, &mut from, 1) };
        world.send(0, &op).unwrap();
        from.0.fill(0);
        world.settle();
        assert!(world.sends(0).is_empty());
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        assert_eq!(world.received(1).len, 100);
        assert!(world.sends(0).is_empty());
        world.settle();
        assert!(matches!(world.sends(0)[..], [Ok(c)] if c.context == 1));
        assert_eq!(to.0, super::rng::payload(0, 100));
        world.assert_empty();
    }
}

/// Otherwise the receive would take the next message, or wait for ever.
#[test]
fn a_short_message_that_finds_no_memory_ends_its_receive() {
    const LEN: usize = 20_000;
    for delivery in [false, true] {
        let weather = Weather { bcopy_max: 2 * LEN, ..Weather::fair() };
        let mut world = World::new(2, weather, Limits { eager_max: LEN, ..LIMITS });
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 1) }).unwrap();
        without_memory(LEN, || world.progress(1));
        world.settle();
        match world.sends(0)[..] {
            [Ok(_)] if !delivery => {}
            [Err(failure)] if delivery => assert_eq!(failure.error, libc::ENOMEM),
            ref other => panic!("{delivery}: {other:?}"),
        }
        world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 2) }).unwrap();
        world.settle();
        world.receive(1, &receive_op(&mut to, 3)).unwrap();
        assert_eq!(world.receive_failed(1).error, libc::ENOMEM);
        world.receive(1, &receive_op(&mut to, 4)).unwrap();
        world.settle();
        assert_eq!(world.received(1).len, LEN);
        assert!(matches!(world.sends(0)[..], [Ok(c)] if c.context == 2));
        world.assert_empty();
    }
}

#[test]
fn the_answer_to_what_was_delivered_waits_for_its_receive() {
    for len in [100, 5000, 100, 5000] {
        let mut world = World::pair();
        let (there, back) = (world.peer(0, 1), world.peer(1, 0));
        let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
        let (mut answer, mut got) = (Memory::pattern(1, 100), Memory::zeroed(100));
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &SendOp { delivery: true, ..send_op(there, &mut from, 1) }).unwrap();
        let delivered = (0..1000).any(|_| {
            world.node(1).progress();
            let all = to.0 == from.0;
            if !all {
                world.node(0).progress();
            }
            all
        });
        assert!(delivered);
        assert_eq!(world.received(1).len, len);
        // The FIN and the reply are both there before the sender polls again.
        world.send(1, &send_op(back, &mut answer, 3)).unwrap();
        let seen = (0..1000).any(|_| {
            world.node(0).progress();
            !world.sends(0).is_empty()
        });
        assert!(seen);
        world.receive(0, &receive_op(&mut got, 4)).unwrap();
        world.settle();
        assert_eq!(got.0, answer.0);
        assert_eq!(world.node(0).engine.counts().unexpected, 0, "{len}");
        assert_eq!(world.sends(1).len(), 1);
        assert_eq!(world.received(0).len, 100);
        world.assert_empty();
    }
}

#[test]
fn a_sender_outside_the_address_book_is_unknown() {
    let mut world = World::pair();
    let log = super::sim::Log::default();
    world.node(1).host = super::fixture::TestHost::new(1, log.clone());
    let peer = world.peer(0, 1);
    let mut from = Memory::pattern(0, 10);
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    let mut to = Memory::zeroed(10);
    world.receive(1, &ReceiveOp { source: source(0), ..receive_op(&mut to, 2) }).unwrap();
    assert!(log.borrow().is_empty());
    let node = world.node(1);
    node.host.learn(0);
    let mut other = Memory::zeroed(10);
    let op = ReceiveOp { source: source(0), ..receive_op(&mut other, 3) };
    world.receive(1, &op).unwrap();
    let entries = format!("{:?}", log.borrow());
    assert!(entries.contains("context: 3") && entries.contains("source: 100"), "{entries}");
    assert!(world.cancel(1, 2));
}

#[test]
fn messages_go_short_when_they_fit_and_bcopy_when_not() {
    // The simulated interface checks the bounds. This test uses both sides of each.
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    for len in [0, 119, 120, 121, 256] {
        let mut from = Memory::pattern(0, len);
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    }
    let wire = world.on_wire(0, 1);
    assert_eq!(wire.len(), 5);
    assert!(wire.iter().all(|p| matches!(p, Packet::Eager { ack: None, .. })));
}
