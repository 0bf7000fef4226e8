//! Receive contexts: the matching spaces that a message names.

use super::fixture::{LIMITS, Memory, World, receive_op, send_op};
use super::sim::Weather;
use crate::protocol::{Cause, Limits, ReceiveOp, Report, SendOp};
use crate::transport::PeerId;

fn on(rx: u8, op: ReceiveOp) -> ReceiveOp {
    ReceiveOp { report: Report::new(true, rx), ..op }
}

/// Worlds in which peers can read each other's memory, and in which messages are sent unsolicited.
fn worlds() -> impl Iterator<Item = World> {
    let limits = Limits { contexts: 3, ..LIMITS };
    [0, 1000].into_iter().map(move |push_max| {
        let weather = Weather { push_max, ..Weather::fair() };
        World::new(2, weather, limits)
    })
}

#[test]
fn a_message_matches_in_the_context_that_it_names() {
    for mut world in worlds() {
        let peer = world.peer(0, 1);
        for (len, early) in [(10, true), (10, false), (5000, true), (5000, false)] {
            for tagged in [true, false] {
                let mut from = Memory::pattern(len, len);
                let mut to = [0, 1, 2].map(|_| Memory::zeroed(len));
                let post = |world: &mut World, to: &mut [Memory]| {
                    for (rx, memory) in to.iter_mut().enumerate() {
                        let op = receive_op(memory, rx as u64);
                        let op = ReceiveOp { tagged, ..on(rx as u8, op) };
                        world.receive(1, &op).unwrap();
                    }
                };
                if early {
                    post(&mut world, &mut to);
                }
                let op = SendOp { rx: 1, tagged, tag: 7, ..send_op(peer, &mut from, 9) };
                world.send(0, &op).unwrap();
                world.settle();
                if !early {
                    post(&mut world, &mut to);
                    world.settle();
                }
                let done = world.received(1);
                assert_eq!((done.context, done.report.context(), done.len), (1, 1, len));
                assert_eq!(to[1].0, from.0);
                assert_eq!(world.sends(0).len(), 1);
                let node = world.node(1);
                for rx in [0, 2] {
                    assert!(!node.engine.cancel(1, u64::from(rx), &mut node.host));
                    assert!(node.engine.cancel(rx, u64::from(rx), &mut node.host));
                }
                assert_eq!(world.receives(1).len(), 2);
                world.assert_empty();
            }
        }
    }
}

#[test]
fn a_context_that_is_not_there_is_refused() {
    for mut world in worlds() {
        let peer = world.peer(0, 1);
        let mut to = Memory::zeroed(5000);
        world.receive(1, &receive_op(&mut to, 1)).unwrap();
        for rx in [3, 64, 255] {
            for (len, delivery) in [(10, true), (5000, false)] {
                let mut from = Memory::pattern(1, len);
                let op = SendOp { rx, delivery, ..send_op(peer, &mut from, 9) };
                world.send(0, &op).unwrap();
                world.settle();
                let [Err(failure)] = world.sends(0)[..] else { panic!("{rx} {len}") };
                assert_eq!(
                    (failure.error, failure.cause),
                    (libc::ECONNREFUSED, Cause::ReceiverRefused)
                );
            }
        }
        assert!(world.receives(1).is_empty());
        assert!(world.cancel(1, 1));
        world.receive_failed(1);
        world.assert_empty();
    }
}

#[test]
fn contexts_are_bounded_each_for_itself_and_close_alone() {
    let mut world = World::new(2, Weather::fair(), Limits { contexts: 2, ..LIMITS });
    let mut to = Memory::zeroed(10);
    for rx in [0, 1] {
        for i in 0..LIMITS.rx_max {
            world.receive(1, &on(rx, receive_op(&mut to, i as u64))).unwrap();
        }
        assert!(world.receive(1, &on(rx, receive_op(&mut to, 0))).is_err());
        assert_eq!(world.node(1).engine.room_for_receives(rx), 0);
    }
    assert!(world.node(1).engine.close_receives(1));
    assert_eq!(world.node(1).engine.room_for_receives(1), LIMITS.rx_max);
    assert_eq!(world.node(1).engine.room_for_receives(0), 0);
    assert!(world.receives(1).is_empty());
    for i in 0..LIMITS.rx_max {
        assert!(world.cancel(1, i as u64));
        world.receive_failed(1);
    }
    world.assert_empty();
}

/// fi_close refuses while a message is arriving, and the context keeps what is posted to it: a receive for any message, a
/// buffer for several, and receives that no message came for.
#[test]
fn a_context_that_does_not_close_keeps_its_receives() {
    let weather = Weather { push_max: 1000, ..Weather::fair() };
    let mut world = World::new(2, weather, Limits { contexts: 3, ..LIMITS });
    let peer = world.peer(0, 1);
    let mut from = [5000, 10, 20, 30, 40].map(|len| Memory::pattern(len, len));
    let mut to = [5000, 10, 100, 40].map(Memory::zeroed);
    let at = to[2].0.as_ptr().expose_provenance() as u64;
    for (context, memory) in to.iter_mut().enumerate() {
        let op = on(1, receive_op(memory, context as u64));
        let op = ReceiveOp { multi_min: (context == 2).then_some(51), ..op };
        world.receive(1, &op).unwrap();
    }
    let mut send = |world: &mut World, number: usize| {
        let op = send_op(peer, &mut from[number], number as u64);
        world.send(0, &SendOp { rx: 1, ..op }).unwrap();
        world.progress(1);
    };
    send(&mut world, 0);
    assert!(!world.node(1).engine.close_receives(1));
    // Messages that come while it closes are not for it, or the closing would never end.
    (1..4).for_each(|number| send(&mut world, number));
    world.settle();
    assert_eq!(world.received(1).context, 0);
    assert!(world.receives(1).is_empty());
    let node = world.node(1);
    node.engine.reopen_receives(1, &mut node.host);
    world.settle();
    let received: Vec<_> = world.receives(1).into_iter().map(Result::unwrap).collect();
    let told: Vec<_> = received.iter().map(|c| (c.context, c.len, c.buffer_released)).collect();
    assert_eq!(told, [(1, 10, false), (2, 20, false), (2, 30, true)]);
    assert_eq!((received[1].buffer, received[2].buffer), (at, at + 20));
    send(&mut world, 4);
    world.settle();
    assert_eq!(world.received(1).context, 3);
    assert_eq!(to[2].0[..50], [&from[2].0[..], &from[3].0[..]].concat());
    assert!(to[0].0 == from[0].0 && to[1].0 == from[1].0 && to[3].0 == from[4].0);
    assert_eq!(world.sends(0).len(), 5);
    world.assert_empty();
}

/// A receive context that does not close yet, as the first message for it is arriving: the world, the receiver, and the
/// buffers of two messages and of two receives that are posted to it.
fn closing() -> (World, PeerId, [Memory; 2], [Memory; 2]) {
    let weather = Weather { push_max: 1000, ..Weather::fair() };
    let mut world = World::new(2, weather, Limits { contexts: 2, ..LIMITS });
    let peer = world.peer(0, 1);
    let mut from = [5000, 10].map(|len| Memory::pattern(len, len));
    let mut to = [5000, 10].map(Memory::zeroed);
    for (context, memory) in to.iter_mut().enumerate() {
        world.receive(1, &on(1, receive_op(memory, context as u64))).unwrap();
    }
    world.send(0, &SendOp { rx: 1, ..send_op(peer, &mut from[0], 8) }).unwrap();
    world.progress(1);
    assert!(!world.node(1).engine.close_receives(1));
    (world, peer, from, to)
}

/// Another thread cancels a receive while fi_close waits: it is not posted again.
#[test]
fn a_receive_of_a_closing_context_is_cancelled() {
    let (mut world, peer, mut from, to) = closing();
    let node = world.node(1);
    assert!(node.engine.cancel(1, 1, &mut node.host));
    assert!(!node.engine.cancel(1, 1, &mut node.host));
    node.engine.reopen_receives(1, &mut node.host);
    assert_eq!(world.receive_failed(1).completion.context, 1);
    world.send(0, &SendOp { rx: 1, ..send_op(peer, &mut from[1], 9) }).unwrap();
    world.settle();
    assert_eq!(world.received(1).context, 0);
    assert!(to[1].0 == [0; 10] && to[0].0 == from[0].0);
}

/// Messages that keep coming do not keep a context from closing.
#[test]
fn a_context_closes_while_messages_come() {
    let (mut world, peer, mut from, mut to) = closing();
    world.send(0, &SendOp { rx: 1, ..send_op(peer, &mut from[1], 9) }).unwrap();
    world.settle();
    assert_eq!(world.received(1).context, 0);
    assert!(to[0].0 == from[0].0);
    assert!(world.node(1).engine.close_receives(1) && world.receives(1).is_empty());
    // The message waits for the next one to open the context.
    world.receive(1, &on(1, receive_op(&mut to[1], 1))).unwrap();
    world.settle();
    assert_eq!(world.received(1).context, 1);
    assert!(to[1].0 == from[1].0);
    assert_eq!(world.sends(0).len(), 2);
    world.assert_empty();
}
