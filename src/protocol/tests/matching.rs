//! Which receive each message matches.

use super::fixture::{LIMITS, Memory, World, receive_op, send_op, source};
use super::sim::Weather;
use crate::protocol::{Cause, Limits, OpError, PeekAction, ReceiveOp, SendOp, UNKNOWN_SOURCE};

fn tagged(op: ReceiveOp, tag: u64, ignore: u64) -> ReceiveOp {
    ReceiveOp { tagged: true, tag, ignore, ..op }
}

/// Sends `tags` from 0 to 1, each as a message of one byte: its index in the list.
fn send_tags(world: &mut World, tags: &[u64]) {
    let peer = world.peer(0, 1);
    for (i, tag) in tags.iter().enumerate() {
        let mut from = Memory(vec![i as u8]);
        let op = SendOp { tagged: true, tag: *tag, ..send_op(peer, &mut from, i as u64) };
        world.send(0, &op).unwrap();
    }
    world.settle();
    world.sends(0);
}

#[test]
fn posted_receives_match_in_posting_order() {
    let mut world = World::pair();
    let mut to: Vec<_> = (0..4).map(|_| Memory::zeroed(1)).collect();
    for (i, (tag, ignore)) in [(5, 0), (0, u64::MAX), (4, 1), (5, 0)].into_iter().enumerate() {
        world.receive(1, &tagged(receive_op(&mut to[i], i as u64), tag, ignore)).unwrap();
    }
    send_tags(&mut world, &[5, 4, 5, 5]);
    let order: Vec<_> = world.receives(1).iter().map(|r| r.unwrap().context).collect();
    assert_eq!(order, [0, 1, 2, 3]);
    assert!(to.iter().enumerate().all(|(i, m)| m.0 == [i as u8]));
    world.assert_empty();
}

#[test]
fn waiting_messages_match_in_arrival_order() {
    let mut world = World::pair();
    send_tags(&mut world, &[1, 2, 3, 2]);
    let mut to = Memory::zeroed(1);
    for (tag, ignore, expected) in [(2, 0, 1), (0, 3, 0), (2, 0, 3), (0, u64::MAX, 2)] {
        world.receive(1, &tagged(receive_op(&mut to, 9), tag, ignore)).unwrap();
        world.received(1);
        assert_eq!(to.0, [expected]);
    }
    world.assert_empty();
}

#[test]
fn plain_and_tagged_messages_never_meet() {
    let mut world = World::pair();
    let (mut a, mut b) = (Memory::zeroed(1), Memory::zeroed(1));
    world.receive(1, &receive_op(&mut a, 1)).unwrap();
    send_tags(&mut world, &[0]);
    assert!(world.receives(1).is_empty());
    world.receive(1, &tagged(receive_op(&mut b, 2), 0, u64::MAX)).unwrap();
    assert_eq!(world.received(1).context, 2);
    assert!(world.cancel(1, 1));
    world.receive_failed(1);
    world.assert_empty();
}

#[test]
fn a_posted_receive_follows_its_source_to_another_entry_of_the_address_book() {
    let mut world = World::new(3, Weather::fair(), LIMITS);
    let moved = source(1) + 100;
    let (mut a, mut b) = (Memory::zeroed(1), Memory::zeroed(1));
    world.receive(2, &ReceiveOp { source: source(1), ..receive_op(&mut a, 1) }).unwrap();
    world.receive(2, &ReceiveOp { source: source(0), ..receive_op(&mut b, 2) }).unwrap();
    let node = world.node(2);
    node.host.learn_as(1, moved);
    node.engine.rename_source(source(1), moved, &mut node.host);
    for from in [1, 0] {
        let peer = world.peer(from, 2);
        let mut memory = Memory(vec![from as u8]);
        world.send(from, &send_op(peer, &mut memory, 0)).unwrap();
        world.settle();
    }
    let got: Vec<_> = world.receives(2).iter().map(|r| r.unwrap()).collect();
    let got: Vec<_> = got.iter().map(|c| (c.context, c.source)).collect();
    assert_eq!(got, [(1, moved), (2, source(0))]);
    world.sends(0);
    world.sends(1);
    world.assert_empty();
}

#[test]
fn a_directed_receive_takes_only_its_source() {
    let mut world = World::new(3, Weather::fair(), LIMITS);
    let (mut a, mut b, mut c) = (Memory::zeroed(1), Memory::zeroed(1), Memory::zeroed(1));
    world.receive(2, &ReceiveOp { source: source(1), ..receive_op(&mut a, 1) }).unwrap();
    world.receive(2, &receive_op(&mut b, 2)).unwrap();
    for from in [0, 1, 0] {
        let peer = world.peer(from, 2);
        let mut memory = Memory(vec![from as u8]);
        world.send(from, &send_op(peer, &mut memory, 0)).unwrap();
        world.settle();
    }
    let got: Vec<_> = world.receives(2).iter().map(|r| r.unwrap()).collect();
    assert_eq!(
        got.iter().map(|c| (c.context, c.source)).collect::<Vec<_>>(),
        [(2, source(0)), (1, source(1))]
    );
    world.receive(2, &ReceiveOp { source: source(1), ..receive_op(&mut c, 3) }).unwrap();
    assert!(world.receives(2).is_empty());
    assert!(world.cancel(2, 3));
    world.receive_failed(2);
    world.receive(2, &ReceiveOp { source: source(0), ..receive_op(&mut c, 4) }).unwrap();
    world.received(2);
    world.sends(0);
    world.sends(1);
    world.assert_empty();
}

#[test]
fn a_look_leaves_the_message() {
    let mut world = World::pair();
    send_tags(&mut world, &[1, 2]);
    let mut none = Memory::zeroed(0);
    for _ in 0..2 {
        world.peek(1, &tagged(receive_op(&mut none, 5), 2, 0), PeekAction::Look);
        let c = world.received(1);
        assert_eq!((c.context, c.len, c.tag, c.source), (5, 1, 2, source(0)));
    }
    for tag in [1, 2] {
        world.peek(1, &tagged(receive_op(&mut none, 5), tag, 0), PeekAction::Discard);
        assert_eq!(world.received(1).tag, tag);
    }
    world.assert_empty();
}

#[test]
fn a_peek_that_finds_nothing_says_so() {
    let mut world = World::pair();
    send_tags(&mut world, &[1]);
    let mut none = Memory::zeroed(0);
    for action in [PeekAction::Look, PeekAction::Claim, PeekAction::Discard] {
        world.peek(1, &tagged(receive_op(&mut none, 5), 2, 0), action);
        let f = world.receive_failed(1);
        assert_eq!((f.error, f.cause), (libc::ENOMSG, Cause::NoMessage));
        assert_eq!((f.completion.context, f.completion.source), (5, UNKNOWN_SOURCE));
    }
    let op = receive_op(&mut none, 5);
    let node = world.node(1);
    let claimed = node.engine.receive_claimed(&op, false, &mut node.host);
    assert_eq!(claimed, Err(OpError::Error(libc::EINVAL)));
}

#[test]
fn a_claimed_message_belongs_to_its_context() {
    for (len, discard) in [(100, false), (5000, false), (100, true), (5000, true)] {
        let mut world = World::pair();
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
        let op = SendOp { delivery: true, ..send_op(peer, &mut from, 1) };
        world.send(0, &op).unwrap();
        world.settle();
        let op = receive_op(&mut to, 5);
        world.peek(1, &op, PeekAction::Claim);
        assert_eq!(world.received(1).len, len);
        world.peek(1, &op, PeekAction::Look);
        assert_eq!(world.receive_failed(1).error, libc::ENOMSG);
        world.settle();
        assert!(world.sends(0).is_empty());
        world.claimed(1, &op, discard);
        world.settle();
        assert_eq!(world.received(1).len, len);
        assert_eq!(to.0 == from.0, !discard);
        assert!(matches!(world.sends(0)[..], [Ok(_)]));
        world.assert_empty();
    }
}

#[test]
fn cancel_ends_the_oldest_receive_of_a_context_and_only_posted_ones() {
    let mut world = World::pair();
    let (mut a, mut b) = (Memory::zeroed(1), Memory::zeroed(1));
    world.receive(1, &tagged(receive_op(&mut a, 5), 1, 0)).unwrap();
    world.receive(1, &tagged(receive_op(&mut b, 5), 2, 0)).unwrap();
    assert!(!world.cancel(1, 6));
    assert!(world.cancel(1, 5));
    let f = world.receive_failed(1);
    assert_eq!((f.error, f.cause, f.completion.tag), (libc::ECANCELED, Cause::Cancelled, 1));
    send_tags(&mut world, &[2]);
    assert_eq!(world.received(1).context, 5);
    assert!(!world.cancel(1, 5));
    world.assert_empty();
}

/// Messages of a peer from which nobody receives, and one insertion before each receive.
#[test]
fn an_insertion_into_the_address_book_does_not_lead_through_all_messages() {
    const MANY: usize = 300;
    let limits = Limits { rx_max: MANY, ..LIMITS };
    let mut world = World::new(3, Weather { queue_len: 2 * MANY, ..Weather::fair() }, limits);
    let mut memory = Memory::zeroed(1);
    for from in [0, 1] {
        let peer = world.peer(from, 2);
        for n in 0..MANY {
            world.send(from, &send_op(peer, &mut memory, n as u64)).unwrap();
        }
        world.settle();
    }
    let node = world.node(2);
    node.host.asked.set(0);
    for n in 0..MANY {
        node.host.learn(1000 + n);
        node.receive(&ReceiveOp { source: source(1), ..receive_op(&mut memory, 0) }).unwrap();
    }
    let asked = node.host.asked.get();
    assert_eq!(node.engine.unexpected(), MANY);
    assert!(asked < 20 * MANY, "{asked}");
    // The messages that are left come from another entry of the book from now on.
    node.host.learn_as(0, 77);
    for _ in 0..2 {
        node.receive(&ReceiveOp { source: 77, ..receive_op(&mut memory, 0) }).unwrap();
    }
    assert_eq!(node.engine.unexpected(), MANY - 2);
}

#[test]
fn a_message_of_a_stranger_has_a_source_once_the_stranger_is_in_the_address_book() {
    const STRANGER: usize = 40;
    let mut world = World::new(STRANGER + 1, Weather::fair(), Limits { rx_max: 20, ..LIMITS });
    let mut memory = Memory::zeroed(1);
    for from in [1, STRANGER] {
        let peer = world.peer(from, 0);
        for n in 0..8 {
            world.send(from, &send_op(peer, &mut memory, n)).unwrap();
        }
        world.settle();
    }
    let directed = |slot| move |op| ReceiveOp { source: source(slot), ..op };
    let node = world.node(0);
    // The index is made now.
    node.receive(&directed(2)(receive_op(&mut memory, 0))).unwrap();
    node.host.learn(STRANGER);
    for left in (8..16).rev() {
        node.receive(&directed(STRANGER)(receive_op(&mut memory, 0))).unwrap();
        assert_eq!(node.engine.unexpected(), left);
    }
}
