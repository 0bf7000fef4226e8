//! Departures of a peer, in every state that an operation can be in.

use super::fixture::{LIMITS, Memory, Node, World, receive_op, send_op, source};
use super::sim::{Reach, Weather};
use crate::protocol::packet::Packet;
use crate::protocol::{ANY_SOURCE, Cause, Limits, OpError, PeekAction, ReceiveOp, SendOp};
use crate::sys::Errno;
use crate::transport::Departure;

const DIED: Departure = Departure::Failed(Errno(libc::EHOSTDOWN));

/// Each kind of departure, with the error that must be reported.
const WAYS: [(Departure, i32, Cause); 3] = [
    (Departure::Closed, libc::ECONNRESET, Cause::PeerClosed),
    (DIED, libc::EHOSTUNREACH, Cause::PeerDied),
    (Departure::Failed(Errno(libc::EPROTO)), libc::EPROTO, Cause::LinkBroke),
];

fn unreachable_memory() -> World {
    let weather = Weather { get: vec![Reach::Off], put: vec![Reach::Off], ..Weather::fair() };
    World::new(2, weather, LIMITS)
}

/// 1 leaves while 0 has sends in all states. The number of progress passes before that decides how far they are.
fn receiver_leaves(turns: usize, refine: impl Fn(SendOp) -> SendOp, len: usize) {
    for (how, error, cause) in WAYS {
        let mut world = unreachable_memory();
        let peer = world.peer(0, 1);
        let (mut from, mut behind) = (Memory::pattern(0, len), Memory::pattern(1, 10));
        let mut to = Memory::zeroed(len);
        if turns > 0 {
            world.receive(1, &receive_op(&mut to, 2)).unwrap();
        }
        world.send(0, &refine(send_op(peer, &mut from, 1))).unwrap();
        world.send(0, &SendOp { fence: true, ..send_op(peer, &mut behind, 2) }).unwrap();
        for _ in 0..turns {
            world.progress(1);
            world.progress(0);
        }
        assert!(world.sends(0).is_empty());
        world.leave(1, how);
        world.settle();
        let reports = world.sends(0);
        let [Err(a), Err(b)] = reports[..] else { panic!("{reports:?}") };
        assert_eq!((a.completion.context, b.completion.context), (1, 2));
        if turns == 0 || how != Departure::Closed {
            assert!([cause, Cause::PeerUnreachable].contains(&a.cause), "{a:?}");
        }
        if a.cause == cause {
            assert_eq!((a.error, b.error, b.cause), (error, error, cause));
        }
        world.receives(1);
        world.assert_empty();
        let again = send_op(peer, &mut behind, 3);
        assert_eq!(world.send(0, &again), Err(OpError::Error(libc::ECONNREFUSED)));
    }
}

#[test]
fn sends_awaiting_an_answer_fail_with_those_behind_them() {
    receiver_leaves(0, |op| op, 5000);
    receiver_leaves(0, |op| SendOp { delivery: true, ..op }, 100);
}

#[test]
fn sends_that_stream_fail_with_those_behind_them() {
    // One progress pass sends 32 fragments of 1024 bytes.
    receiver_leaves(2, |op| op, 150_000);
}

#[test]
fn an_injected_send_that_pends_is_forgotten_without_a_second_report() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let mut from = Memory::pattern(0, 1000);
    world.send(0, &SendOp { inject: true, ..send_op(peer, &mut from, 1) }).unwrap();
    assert!(matches!(world.sends(0)[..], [Ok(_)]));
    world.leave(1, DIED);
    world.settle();
    world.assert_empty();
}

#[test]
fn rendezvous_receives_fail() {
    for (how, error, cause) in WAYS {
        let mut world = unreachable_memory();
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, 100_000), Memory::zeroed(100_000));
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        world.progress(1);
        world.progress(0);
        world.progress(1);
        assert_eq!(world.node(1).engine.core.arrivals.active.len(), 1);
        world.leave(0, how);
        world.settle();
        let f = world.receive_failed(1);
        assert_eq!((f.error, f.cause, f.completion.source), (error, cause, source(0)));
        assert!(f.completion.len < 100_000);
        world.assert_empty();
    }
}

#[test]
fn a_pull_from_a_sender_that_is_gone_fails_once() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 100_000), Memory::zeroed(100_000));
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.progress(1);
    assert_eq!(world.node(1).engine.core.arrivals.pulls.len(), 1);
    world.node(1).host.room = false; // its departure is not read yet
    world.leave(0, DIED);
    world.progress(1);
    let f = world.receive_failed(1);
    assert_eq!((f.error, f.cause), (libc::ESRCH, Cause::SenderUnreadable));
    world.node(1).host.room = true;
    world.settle();
    world.assert_empty();
}

#[test]
fn an_announced_message_is_lost_and_fails_the_receive_that_asks_for_it() {
    for (how, error, _) in WAYS {
        for claim in [false, true] {
            let mut world = World::pair();
            let peer = world.peer(0, 1);
            let (mut from, mut to) = (Memory::pattern(0, 5000), Memory::zeroed(5000));
            world.send(0, &SendOp { data: Some(6), ..send_op(peer, &mut from, 1) }).unwrap();
            world.settle();
            let op = receive_op(&mut to, 2);
            if claim {
                world.peek(1, &op, PeekAction::Claim);
                world.received(1);
            }
            world.leave(0, how);
            world.settle();
            if claim {
                world.claimed(1, &op, false);
            } else {
                world.peek(1, &op, PeekAction::Look);
                assert_eq!(world.received(1).len, 5000);
                world.receive(1, &op).unwrap();
            }
            let f = world.receive_failed(1);
            assert_eq!((f.error, f.cause), (error, Cause::SenderLost));
            assert_eq!((f.completion.len, f.completion.data), (0, Some(6)));
            assert_eq!(f.completion.source, source(0));
            world.assert_empty();
        }
    }
}

#[test]
fn a_lost_message_can_be_discarded() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut from, mut none) = (Memory::pattern(0, 5000), Memory::zeroed(0));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    world.leave(0, DIED);
    world.settle();
    world.peek(1, &receive_op(&mut none, 2), PeekAction::Discard);
    assert_eq!(world.received(1).len, 5000);
    world.assert_empty();
}

#[test]
fn eager_messages_of_a_peer_that_closed_are_all_received() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    for i in 0..10 {
        let mut from = Memory(vec![i]);
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    }
    world.leave(0, Departure::Closed);
    world.settle();
    let mut to = Memory::zeroed(1);
    for i in 0..10 {
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.received(1);
        assert_eq!(to.0, [i]);
    }
    world.sends(0);
    world.assert_empty();
}

#[test]
fn directed_receives_fail_when_their_source_dies_and_stay_when_it_closes() {
    for (how, error, cause) in WAYS {
        let mut world = World::new(3, Weather::fair(), LIMITS);
        world.peer(0, 1);
        world.peer(2, 1);
        world.settle();
        let mut to: Vec<_> = (0..4).map(|_| Memory::zeroed(10)).collect();
        let [a, b, c, d] = &mut to[..] else { unreachable!() };
        let from_0 = |op: ReceiveOp| ReceiveOp { source: source(0), ..op };
        world.receive(1, &from_0(receive_op(a, 1))).unwrap();
        let multi = ReceiveOp { tagged: true, multi_min: Some(1), ..receive_op(b, 2) };
        world.receive(1, &from_0(multi)).unwrap();
        world.receive(1, &ReceiveOp { source: source(2), ..receive_op(c, 3) }).unwrap();
        world.receive(1, &receive_op(d, 4)).unwrap();
        world.leave(0, how);
        world.settle();
        let mut failed = world.receives(1);
        failed.sort_by_key(|r| r.unwrap_err().completion.context);
        if how == Departure::Closed {
            assert!(failed.is_empty());
            assert!(world.cancel(1, 1) && world.cancel(1, 2));
            world.receives(1);
        } else {
            let seen: Vec<_> = failed
                .iter()
                .map(|r| r.unwrap_err())
                .map(|f| (f.completion.context, f.error, f.cause, f.completion.buffer_released))
                .collect();
            assert_eq!(seen, [(1, error, cause, false), (2, error, cause, true)]);
        }
        assert!(world.cancel(1, 3) && world.cancel(1, 4));
        world.receives(1);
        world.assert_empty();
    }
}

#[test]
fn answers_to_a_peer_that_is_gone_are_dropped() {
    let weather = Weather { queue_len: 1, get: vec![Reach::Off], ..Weather::fair() };
    let mut world = World::new(2, weather, LIMITS);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 100), Memory::zeroed(5000));
    // The only slot of the link back is taken, so that the FIN waits.
    let back = world.peer(1, 0);
    world.progress(0);
    world.progress(1);
    let mut blocker = Memory::pattern(0, 1);
    world.send(1, &send_op(back, &mut blocker, 8)).unwrap();
    world.send(0, &SendOp { delivery: true, ..send_op(peer, &mut from, 1) }).unwrap();
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.progress(1);
    assert_eq!(world.node(1).engine.core.outbox.len(), 1);
    world.received(1);
    world.sends(1);
    world.leave(0, DIED);
    world.start(0);
    // The new incarnation numbers its sends as the old one did.
    let peer = world.peer(0, 1);
    world.progress(1);
    let op = SendOp { delivery: true, tagged: true, ..send_op(peer, &mut from, 3) };
    world.send(0, &op).unwrap();
    world.settle();
    assert!(world.sends(0).is_empty(), "nobody has received it");
    world.receive(1, &ReceiveOp { tagged: true, ..receive_op(&mut to, 4) }).unwrap();
    world.received(1);
    world.settle();
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}

/// A message acknowledged after its sender's death must not answer its successor's message.
#[test]
fn a_late_acknowledgement_does_not_reach_the_next_life_of_the_sender() {
    for claim in [false, true] {
        for discard in [false, true] {
            let mut world = World::pair();
            let peer = world.peer(0, 1);
            let (mut from, mut to) = (Memory::pattern(0, 100), Memory::zeroed(100));
            let op = SendOp { delivery: true, ..send_op(peer, &mut from, 1) };
            world.send(0, &op).unwrap();
            world.settle();
            let receive = receive_op(&mut to, 2);
            if claim {
                world.peek(1, &receive, PeekAction::Claim);
                world.received(1);
            }
            world.leave(0, DIED);
            world.start(0);
            let peer = world.peer(0, 1);
            // The new incarnation numbers its sends as the old one did.
            world.send(0, &SendOp { peer, tagged: true, context: 3, ..op }).unwrap();
            world.settle();
            match (claim, discard) {
                (true, _) => world.claimed(1, &receive, discard),
                (false, true) => world.peek(1, &receive, PeekAction::Discard),
                (false, false) => world.receive(1, &receive).unwrap(),
            }
            world.received(1);
            world.settle();
            assert!(world.sends(0).is_empty(), "nobody has received it");
            world.receive(1, &ReceiveOp { tagged: true, ..receive }).unwrap();
            world.received(1);
            world.settle();
            assert!(matches!(world.sends(0)[..], [Ok(c)] if c.context == 3));
            world.assert_empty();
        }
    }
}

#[test]
fn a_restarted_peer_is_a_new_peer_at_the_same_place() {
    for how in [Departure::Closed, DIED] {
        let mut world = World::pair();
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, 5000), Memory::zeroed(5000));
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        world.settle();
        world.leave(1, how);
        world.start(1);
        world.settle();
        world.send_failed(0);
        world.receive(1, &ReceiveOp { source: source(0), ..receive_op(&mut to, 2) }).unwrap();
        world.send(0, &send_op(peer, &mut from, 3)).unwrap();
        world.settle();
        world.received(1);
        assert!(to.0 == from.0);
        assert!(matches!(world.sends(0)[..], [Ok(c)] if c.context == 3));
        world.assert_empty();
    }
}

#[test]
fn a_broken_link_fails_both_sides_and_is_made_anew() {
    let mut world = unreachable_memory();
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 100_000), Memory::zeroed(100_000));
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.progress(1);
    world.progress(0);
    assert!(world.on_wire(0, 1).iter().all(|p| matches!(p, Packet::Fragment { .. })));
    let how = Departure::Failed(Errno(libc::EPROTO));
    world.net.borrow_mut().break_link(0, 1, how);
    world.settle();
    assert!([Cause::LinkBroke, Cause::PeerUnreachable].contains(&world.send_failed(0).cause));
    assert_eq!(world.receive_failed(1).cause, Cause::LinkBroke);
    world.assert_empty();
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    world.received(1);
    assert!(to.0 == from.0);
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}

/// Though the peer has sent nothing, and many other receives are posted.
#[test]
fn a_peer_owes_the_message_of_a_receive_from_it() {
    let mut world = World::new(3, Weather::fair(), Limits { rx_max: 1000, ..LIMITS });
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 8), Memory::zeroed(8));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    world.sends(0);
    let owes = |world: &mut World| {
        let Node { engine, host } = world.node(0);
        engine.core.is_owed(peer, host)
    };
    for n in 0..100 {
        let other = world.node(0).host.source_of_slot(2);
        world.receive(0, &ReceiveOp { source: other, ..receive_op(&mut to, n) }).unwrap();
    }
    assert!(!owes(&mut world));
    let source = world.node(0).host.source_of_slot(1);
    world.receive(0, &ReceiveOp { source, ..receive_op(&mut to, 200) }).unwrap();
    assert!(owes(&mut world));
}

/// Sends to and receives from other peers still take the fast path.
#[test]
fn a_dead_peer_slows_nobody_else() {
    let mut world = World::new(3, Weather::fair(), LIMITS);
    let (dead, alive) = (world.peer(0, 1), world.peer(0, 2));
    let mut memory = [0; 4].map(|_| Memory::pattern(0, 8));
    let [to_dead, to_alive, from_dead, from_alive] = &mut memory;
    for (peer, memory) in [(dead, &mut *to_dead), (alive, &mut *to_alive)] {
        world.send(0, &send_op(peer, memory, 1)).unwrap();
    }
    world.settle();
    world.leave(1, DIED);
    world.settle();
    world.sends(0);
    let (dead_source, alive_source) =
        (world.node(0).host.source_of_slot(1), world.node(0).host.source_of_slot(2));
    let Node { engine, host } = world.node(0);
    // The simulated transport refuses now and then.
    assert!((0..100).all(|_| !engine.try_send(&send_op(dead, to_dead, 2), host)));
    assert!((0..100).any(|_| engine.try_send(&send_op(alive, to_alive, 3), host)));
    let mut posts = |source, memory: &mut Memory| {
        let op = ReceiveOp { source, ..receive_op(memory, 4) };
        engine.try_post(&op, |engine| engine.is_hopeless(source, host))
    };
    assert!(posts(ANY_SOURCE, from_alive) && posts(alive_source, from_alive));
    assert!(!posts(dead_source, from_dead));
}
