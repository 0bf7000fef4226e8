//! Long messages: which side moves the bytes, and what happens when a method turns out not to work.

use super::fixture::{LIMITS, Memory, World, lend, receive_op, send_op, source};
use super::oracle::HARD_ERROR;
use super::sim::{Reach, Weather};
use crate::protocol::packet::{Packet, Ranges};
use crate::protocol::{Cause, FI_ETRUNC, Limits, PeekAction, ReceiveOp, SendOp};
use crate::sys::Errno;
use crate::sys::reserve::tests::without_memory;
use crate::transport::Departure;

const LEN: usize = 20_000;

/// A copy from or to memory that other processes cannot access.
const FAULTS: Reach = Reach::Fails { after: 1, errno: libc::EFAULT };

fn world(get: Reach, put: Reach) -> World {
    World::new(2, Weather { get: vec![get], put: vec![put], ..Weather::fair() }, LIMITS)
}

/// Sends a message of [`LEN`] bytes to a receive of `room` bytes. Returns the bytes that were read by the receiver,
/// written by the sender, and sent as fragments.
fn exchange(mut world: World, room: usize, early: bool) -> (u64, u64, u64) {
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(room));
    let receive = ReceiveOp { segments: lend(&mut to.0, &[room / 3]), ..receive_op(&mut to, 2) };
    if early {
        world.receive(1, &receive).unwrap();
    }
    let payload = lend(&mut from.0, &[1, 1, LEN / 2]);
    let op = SendOp { payload, data: Some(4), ..send_op(peer, &mut from, 1) };
    world.send(0, &op).unwrap();
    world.settle();
    if !early {
        assert!(world.sends(0).is_empty());
        world.receive(1, &receive).unwrap();
        world.settle();
    }
    let moved = room.min(LEN);
    let completion = if room < LEN {
        let f = world.receive_failed(1);
        assert_eq!((f.error, f.cause), (FI_ETRUNC, Cause::Truncated));
        assert_eq!(f.overflow, LEN - room);
        f.completion
    } else {
        world.received(1)
    };
    assert_eq!((completion.len, completion.data), (moved, Some(4)));
    assert_eq!((completion.context, completion.source), (2, source(0)));
    assert!(to.0[..moved] == from.0[..moved]);
    assert!(matches!(world.sends(0)[..], [Ok(c)] if c.context == 1));
    world.assert_empty();
    assert_eq!(world.dropped(0) + world.dropped(1), 0);
    let (sender, receiver) = (world.node(0).engine.counts(), world.node(1).engine.counts());
    assert_eq!((sender.rendezvous_sent, sender.eager_sent), (1, 0));
    (receiver.pulled_bytes, sender.pushed_bytes, sender.fragment_bytes)
}

#[test]
fn the_receiver_pulls_where_it_can() {
    for early in [true, false] {
        for get in [Reach::On, Reach::Short, Reach::Shy] {
            let moved = exchange(world(get, Reach::On), LEN + 7, early);
            assert_eq!(moved, (LEN as u64, 0, 0));
        }
    }
}

#[test]
fn the_sender_pushes_where_the_receiver_cannot_pull() {
    for early in [true, false] {
        for put in [Reach::On, Reach::Short, Reach::Shy] {
            let moved = exchange(world(Reach::Off, put), LEN, early);
            assert_eq!(moved, (0, LEN as u64, 0));
        }
    }
}

#[test]
fn fragments_go_where_nobody_can_reach() {
    for early in [true, false] {
        let moved = exchange(world(Reach::Off, Reach::Off), LEN, early);
        assert_eq!(moved, (0, 0, LEN as u64));
    }
}

#[test]
fn fragments_pass_a_narrow_link() {
    let weather = Weather {
        queue_len: 1,
        batch: 1,
        again_percent: 30,
        get: vec![Reach::Off],
        put: vec![Reach::Off],
        ..Weather::fair()
    };
    let mut world = World::new(2, weather, LIMITS);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    let op = send_op(peer, &mut from, 1);
    while world.send(0, &op).is_err() {
        world.progress(1);
    }
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.settle();
    assert!(matches!(world.sends(0)[..], [Ok(_)]));
    world.received(1);
    assert!(to.0 == from.0);
    world.assert_empty();
}

#[test]
fn truncation_moves_only_what_fits() {
    for room in [0, 1, 5000, LEN - 1] {
        for early in [true, false] {
            let n = room as u64;
            assert_eq!(exchange(world(Reach::On, Reach::On), room, early), (n, 0, 0));
            assert_eq!(exchange(world(Reach::Off, Reach::On), room, early), (0, n, 0));
            assert_eq!(exchange(world(Reach::Off, Reach::Off), room, early), (0, 0, n));
        }
    }
}

/// How the receiver takes a message that has arrived completely, in one call.
#[derive(Clone, Copy, Debug)]
enum Taken {
    Received,
    Claimed,
    Discarded,
    DiscardedUnseen,
}

#[test]
fn a_receive_of_a_message_that_is_here_has_answered_when_the_call_returns() {
    use Taken::{Claimed, Discarded, DiscardedUnseen, Received};
    for (len, delivery) in [(LEN, false), (10, true)] {
        for taken in [Received, Claimed, Discarded, DiscardedUnseen] {
            let weather = Weather { push_max: 2 * LEN, ..Weather::fair() };
            let mut world = World::new(2, weather, LIMITS);
            let peer = world.peer(0, 1);
            let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
            world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 1) }).unwrap();
            world.settle();
            assert!(world.sends(0).is_empty(), "nobody has taken it yet");
            let op = receive_op(&mut to, 2);
            match taken {
                Received => world.receive(1, &op).unwrap(),
                Claimed | Discarded => {
                    world.peek(1, &op, PeekAction::Claim);
                    world.claimed(1, &op, matches!(taken, Discarded));
                }
                DiscardedUnseen => world.peek(1, &op, PeekAction::Discard),
            }
            // The receiver makes no progress from here on.
            for _ in 0..10 {
                world.progress(0);
            }
            assert!(matches!(world.sends(0)[..], [Ok(_)]), "{len} bytes, {taken:?}");
        }
    }
}

#[test]
fn an_access_moves_all_ranges_and_stops_where_one_fails() {
    for (reach, all) in [(Reach::On, true), (FAULTS, false)] {
        let mut world = world(reach, reach);
        let peer = world.peer(0, 1);
        let (mut far, mut near) = (Memory::pattern(1, 300), Memory::zeroed(250));
        let ranges = Ranges::new(lend(&mut far.0, &[100, 200]).ranges());
        let local = near.list();
        let iface = world.node(0).engine.iface_mut();
        let read = ranges.get(iface, peer, &local, 50).unwrap();
        assert!(near.0[..read] == far.0[50..50 + read]);
        near.0.fill(7);
        let written = ranges.put(iface, peer, &local, 50).unwrap();
        assert!(far.0[50..50 + written] == [7; 250][..written]);
        assert!(if all { read == 250 && written == 250 } else { read <= 50 && written <= 50 });
    }
}

#[test]
fn a_refusal_midway_falls_back_to_the_next_way() {
    for errno in [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::EOPNOTSUPP] {
        let refuses = Reach::Fails { after: 2, errno };
        let (_, pushed, _) = exchange(world(refuses, Reach::On), LEN, true);
        assert_eq!(pushed, LEN as u64);
        let (_, pushed, fragments) = exchange(world(refuses, refuses), LEN, true);
        assert!(pushed < LEN as u64);
        assert_eq!(fragments, LEN as u64);
    }
}

#[test]
fn a_sender_that_cannot_be_read_fails_both_sides() {
    let mut world = world(Reach::Fails { after: 1, errno: HARD_ERROR }, Reach::On);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    let f = world.receive_failed(1);
    assert_eq!((f.error, f.cause), (HARD_ERROR, Cause::SenderUnreadable));
    let f = world.send_failed(0);
    assert_eq!((f.error, f.cause), (HARD_ERROR, Cause::ReceiverRefused));
    world.assert_empty();
}

#[test]
fn an_injected_long_message_is_kept_until_it_is_taken() {
    // The message is too long for eager here, as under pressure.
    let limits = Limits { eager_max: 16, ..LIMITS };
    let mut world = World::new(2, Weather::fair(), limits);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 100), Memory::zeroed(100));
    world.send(0, &SendOp { inject: true, ..send_op(peer, &mut from, 1) }).unwrap();
    assert!(matches!(world.sends(0)[..], [Ok(_)]));
    from.0.fill(0);
    world.settle();
    assert!(world.node(0).engine.has_unsent());
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.settle();
    world.received(1);
    assert_eq!(to.0, super::rng::payload(0, 100));
    assert!(!world.node(0).engine.has_unsent());
    world.assert_empty();
}

#[test]
fn the_threshold_is_exact() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut at, mut above) =
        (Memory::pattern(0, LIMITS.eager_max), Memory::pattern(0, LIMITS.eager_max + 1));
    world.send(0, &send_op(peer, &mut at, 1)).unwrap();
    world.send(0, &send_op(peer, &mut above, 2)).unwrap();
    assert!(matches!(world.on_wire(0, 1)[..], [Packet::Eager { .. }, Packet::Rts { .. }]));
}

#[test]
fn a_discarded_description_completes_its_send() {
    let mut world = World::pair();
    let peer = world.peer(0, 1);
    let (mut from, mut none) = (Memory::pattern(0, LEN), Memory::zeroed(0));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    world.peek(1, &receive_op(&mut none, 2), PeekAction::Discard);
    assert_eq!(world.received(1).len, LEN);
    world.settle();
    assert!(matches!(world.sends(0)[..], [Ok(_)]));
    world.assert_empty();
}

/// A world in which sent messages arrive even if their sender ends, and long ones are sent unsolicited as a whole.
fn lasting_world() -> World {
    World::new(2, Weather { push_max: 2 * LEN, outlives: true, ..Weather::fair() }, LIMITS)
}

/// Memory runs out at once, or for later fragments. The receive ends with the error, and so does a sender that waits for
/// a FIN.
#[test]
fn a_message_that_finds_no_memory_ends_as_an_error() {
    const MEBIBYTE: usize = 1 << 20;
    for (len, at_once) in [(LEN, true), (3 * MEBIBYTE, false)] {
        for delivery in [false, true] {
            let weather =
                Weather { push_max: 2 * len, outlives: true, batch: 1, ..Weather::fair() };
            let limits = Limits { unexpected_max: 2 * len, ..LIMITS };
            let mut world = World::new(2, weather, limits);
            let peer = world.peer(0, 1);
            let (mut from, mut to) = (Memory::zeroed(len), Memory::zeroed(len));
            world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 1) }).unwrap();
            if !at_once {
                world.progress(1);
            }
            without_memory(len.min(MEBIBYTE + 1), || world.settle());
            assert_eq!(world.node(1).engine.core.matching.bytes, 0);
            match world.sends(0)[..] {
                [Ok(_)] if !delivery => {}
                [Err(failure)] if delivery => assert_eq!(failure.error, libc::ENOMEM),
                ref other => panic!("{delivery}: {other:?}"),
            }
            world.receive(1, &receive_op(&mut to, 2)).unwrap();
            world.settle();
            assert_eq!(world.receive_failed(1).error, libc::ENOMEM);
            world.assert_empty();
        }
    }
}

#[test]
fn an_unsolicited_message_completes_at_once_except_with_delivery_complete() {
    for delivery in [false, true] {
        let mut world = lasting_world();
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 1) }).unwrap();
        world.settle();
        let left = !delivery;
        assert_eq!(world.sends(0).len(), usize::from(left));
        if left {
            from.0.fill(0);
        }
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.settle();
        assert_eq!(world.received(1).len, LEN);
        assert_eq!(to.0, super::rng::payload(0, LEN));
        assert_eq!(world.sends(0).len(), usize::from(!left));
        assert_eq!((world.dropped(0), world.dropped(1)), (0, 0));
        world.assert_empty();
    }
}

#[test]
fn a_message_longer_than_its_unsolicited_part_waits_for_its_receiver() {
    let (get, put) = (vec![Reach::Off], vec![Reach::Off]);
    let weather = Weather { push_max: LEN - 1, outlives: true, get, put, ..Weather::fair() };
    let mut world = World::new(2, weather, LIMITS);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    assert!(world.sends(0).is_empty());
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.settle();
    assert_eq!((world.received(1).len, world.sends(0).len()), (LEN, 1));
    world.assert_empty();
}

#[test]
fn a_message_received_whole_outlives_its_sender() {
    use Taken::{Claimed, Discarded, DiscardedUnseen, Received};
    let died = Departure::Failed(Errno(libc::EHOSTDOWN));
    for how in [Departure::Closed, died, Departure::Failed(Errno(libc::EPROTO))] {
        for taken in [Received, Claimed, Discarded, DiscardedUnseen] {
            let mut world = lasting_world();
            let peer = world.peer(0, 1);
            let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
            world.send(0, &send_op(peer, &mut from, 1)).unwrap();
            assert!(matches!(world.sends(0)[..], [Ok(_)]), "it leaves within the call");
            let op = receive_op(&mut to, 2);
            if matches!(taken, Claimed | Discarded) {
                world.settle();
                world.peek(1, &op, PeekAction::Claim);
                assert_eq!(world.received(1).len, LEN);
            }
            world.leave(0, how);
            world.settle();
            // Its next incarnation has sent nothing that could be answered.
            world.start(0);
            world.peer(0, 1);
            match taken {
                Received => world.receive(1, &op).unwrap(),
                Claimed | Discarded => world.claimed(1, &op, matches!(taken, Discarded)),
                DiscardedUnseen => world.peek(1, &op, PeekAction::Discard),
            }
            world.settle();
            assert_eq!(world.received(1).len, LEN, "{how:?}, {taken:?}");
            let placed = matches!(taken, Received | Claimed);
            assert_eq!(to.0 == super::rng::payload(0, LEN), placed, "{how:?}, {taken:?}");
            assert_eq!(world.dropped(0), 0);
            world.assert_empty();
        }
    }
}

#[test]
fn memory_that_only_its_owner_reaches_goes_by_the_ring() {
    for (get, put) in [(FAULTS, Reach::On), (FAULTS, FAULTS), (FAULTS, Reach::Off)] {
        for (room, early) in [(LEN, true), (LEN, false), (LEN / 2, true)] {
            let (pulled, pushed, fragments) = exchange(world(get, put), room, early);
            assert!(pulled > 0, "it was tried");
            assert_eq!(pushed >= room as u64, put == Reach::On, "{put:?}");
            assert_eq!(fragments >= room as u64, put != Reach::On, "{put:?}");
        }
    }
}

/// The receive is posted when a part of the message has been read and the sender has gone. A request for the rest
/// reaches no process, but the rest is in the ring.
#[test]
fn a_message_that_is_read_in_several_turns_outlives_its_sender() {
    let died = Departure::Failed(Errno(libc::EHOSTDOWN));
    let all = [false, true];
    for (turns, how) in (1..8).flat_map(|n| [(n, Departure::Closed), (n, died)]) {
        for (delivery, claimed) in all.into_iter().flat_map(|d| [(d, false), (d, true)]) {
            for unexpected_max in [LIMITS.unexpected_max, LEN / 3] {
                let weather =
                    Weather { push_max: 2 * LEN, outlives: true, batch: 1, ..Weather::fair() };
                let mut world = World::new(2, weather, Limits { unexpected_max, ..LIMITS });
                let peer = world.peer(0, 1);
                let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
                world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 1) }).unwrap();
                assert_eq!(world.sends(0).len(), usize::from(!delivery));
                let op = receive_op(&mut to, 2);
                for _ in 0..turns {
                    world.progress(1);
                }
                let claimed = claimed && turns > 1;
                if claimed {
                    world.peek(1, &op, PeekAction::Claim);
                    assert_eq!(world.received(1).len, LEN);
                }
                world.leave(0, how);
                match claimed {
                    true => world.claimed(1, &op, false),
                    false => world.receive(1, &op).unwrap(),
                }
                world.settle();
                let what = format!("{turns} turns, {how:?}, {delivery}, {unexpected_max}");
                let reports = world.receives(1);
                assert!(matches!(reports[..], [Ok(_)]), "{what}: {reports:?}");
                assert!(to.0 == super::rng::payload(0, LEN), "{what}");
                world.assert_empty();
            }
        }
    }
}

#[test]
fn completed_unsolicited_sends_take_no_room() {
    let mut world = lasting_world();
    let peer = world.peer(0, 1);
    let many = 3 * LIMITS.tx_max;
    let mut from: Vec<Memory> = (0..many).map(|i| Memory::pattern(i, LEN)).collect();
    let mut to: Vec<Memory> = from.iter().map(|_| Memory::zeroed(LEN)).collect();
    for (i, from) in from.iter_mut().enumerate() {
        // By the general path, and by the fast path.
        let fence = i % 2 == 0;
        world.send(0, &SendOp { fence, ..send_op(peer, from, i as u64) }).unwrap();
        world.settle();
    }
    assert_eq!(world.sends(0).len(), many);
    assert_eq!(world.node(0).engine.room_for_sends(), LIMITS.tx_max);
    for to in &mut to {
        world.receive(1, &receive_op(to, 0)).unwrap();
    }
    assert!(world.on_wire(1, 0).is_empty(), "nobody waits for an answer");
    world.settle();
    assert_eq!(world.receives(1).len(), many);
    for (i, to) in to.iter().enumerate() {
        assert!(to.0 == super::rng::payload(i, LEN), "message {i}");
    }
    world.assert_empty();
}

#[test]
fn a_late_request_for_the_rest_changes_nothing() {
    // By the general path, and by the fast path.
    for fence in [true, false] {
        let mut world = lasting_world();
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &SendOp { fence, ..send_op(peer, &mut from, 1) }).unwrap();
        let tx = world.on_wire(0, 1).iter().find_map(|packet| match packet {
            Packet::Rts { tx, leaves: true, .. } => Some(*tx),
            _ => None,
        });
        let late = Packet::Cts {
            tx: tx.unwrap(),
            rx: 7,
            len: LEN as u64,
            faulted: false,
            ranges: Ranges::NONE,
        };
        world.forge(1, 0, &late, &[]);
        let never = Packet::Cts {
            tx: tx.unwrap() + 1,
            rx: 7,
            len: LEN as u64,
            faulted: false,
            ranges: Ranges::NONE,
        };
        world.forge(1, 0, &never, &[]);
        world.settle();
        assert_eq!((world.received(1).len, world.sends(0).len()), (LEN, 1));
        assert_eq!(
            (world.dropped(0), world.dropped(1)),
            (1, 0),
            "the one of a message that never was"
        );
        world.assert_empty();
    }
}

#[test]
fn pushed_messages_of_several_senders_do_not_mix() {
    let weather = Weather { push_max: 2 * LEN, outlives: true, queue_len: 2, ..Weather::fair() };
    let mut world = World::new(4, weather, LIMITS);
    let mut from: Vec<Memory> = (0..6).map(|i| Memory::pattern(i, LEN + i)).collect();
    let mut to: Vec<Memory> = (0..6).map(|i| Memory::zeroed(LEN + i)).collect();
    // Two messages each, one of which has its receive already.
    for (i, memory) in from.iter_mut().enumerate() {
        let peer = world.peer(i % 3, 3);
        if i < 3 {
            let op = receive_op(&mut to[i], i as u64);
            world.receive(3, &ReceiveOp { tagged: true, tag: i as u64, ignore: 0, ..op }).unwrap();
        }
        let op = SendOp { tagged: true, tag: i as u64, ..send_op(peer, memory, i as u64) };
        world.send(i % 3, &op).unwrap();
        world.progress(3);
    }
    world.settle();
    for i in (3..6).rev() {
        let op = receive_op(&mut to[i], i as u64);
        world.receive(3, &ReceiveOp { tagged: true, tag: i as u64, ignore: 0, ..op }).unwrap();
    }
    world.settle();
    assert_eq!(world.receives(3).len(), 6);
    for (i, to) in to.iter().enumerate() {
        assert!(to.0 == super::rng::payload(i, LEN + i), "message {i}");
    }
    assert_eq!((0..3).map(|at| world.sends(at).len()).sum::<usize>(), 6);
    world.assert_empty();
}
