//! Direct RMA, without any progress of the target, one behaviour per test: by attach, and by a device.

use super::fixture::{LIMITS, Memory, Report, World, lend, receive_op, remote, rma_op, send_op};
use super::sim::{Reach, Weather};
use super::sim_window::{Glazing, RAILS};
use crate::memory::bounce;
use crate::memory::keys::Right;
use crate::memory::keys::Right::{Read, Write};
use crate::memory::mover::tests as mover;
use crate::protocol::{Direction, Limits, ReceiveOp, RmaOp, SendOp};
use crate::transport::{Departure, Prepared};

pub(super) const KEY: u64 = 42;
pub(super) const BOTH: [Right; 2] = [Read, Write];
pub(super) const LEN: usize = 3000;

fn world(get: Reach, put: Reach) -> World {
    let weather = Weather { get: vec![get], put: vec![put], ..Weather::fair() };
    World::new(2, weather, Limits { alone_min: 1000, ..LIMITS })
}

pub(super) fn ended(world: &mut World) -> Vec<Report> {
    let mut all = world.reports(0, Direction::Write);
    all.extend(world.reports(0, Direction::Read));
    all
}

/// Endpoint 0 writes and reads region `KEY` of 1 once, so that 1 advertises it.
fn acquaint(world: &mut World) {
    let (mut from, mut back) = (Memory::pattern(5, LEN), Memory::zeroed(LEN));
    let peer = world.peer(0, 1);
    world.access(0, &rma_op(peer, Write, &mut from, KEY, 1)).unwrap();
    world.settle();
    world.access(0, &rma_op(peer, Read, &mut back, KEY, 2)).unwrap();
    world.settle();
    assert!(back.0 == from.0);
    assert!(ended(world).iter().all(Result::is_ok));
    world.accesses(1);
}

#[test]
fn a_target_that_was_asked_once_has_nothing_more_to_do() {
    for reach in [Reach::On, Reach::Short] {
        let mut world = world(reach, reach);
        let mut region = Memory::zeroed(2 * LEN);
        world.register(1, KEY, &mut region, &BOTH);
        acquaint(&mut world);
        let peer = world.peer(0, 1);
        for seed in 0..3 {
            let (mut from, mut back) = (Memory::pattern(seed, LEN), Memory::zeroed(LEN));
            let place = remote(KEY, 1000, LEN);
            let op = RmaOp { remote: place, ..rma_op(peer, Write, &mut from, KEY, 3) };
            world.access(0, &op).unwrap();
            let op = RmaOp { remote: place, ..rma_op(peer, Read, &mut back, KEY, 4) };
            world.access(0, &op).unwrap();
            assert_eq!(ended(&mut world).len(), 2, "they are done when the calls return");
            assert!(region.0[1000..1000 + LEN] == from.0 && back.0 == from.0);
            assert!(!world.node(0).engine.is_busy());
        }
        world.settle();
        assert_eq!(world.accesses(1), []);
        world.assert_empty();
    }
}

/// Not direct: operations that notify the target, short ones, and those that the target's region does not allow.
#[test]
fn everything_else_is_left_to_the_target() {
    let mut world = world(Reach::On, Reach::On);
    let (mut region, mut other) = (Memory::zeroed(LEN), Memory::zeroed(LEN));
    world.register(1, KEY, &mut region, &BOTH);
    world.register(1, KEY + 1, &mut other, &[Read]);
    acquaint(&mut world);
    let peer = world.peer(0, 1);
    let mut local = Memory::pattern(7, LEN);
    world.access(0, &rma_op(peer, Read, &mut local, KEY + 1, 1)).unwrap();
    world.settle();
    assert!(ended(&mut world)[0].is_ok());
    world.accesses(1);

    let op = RmaOp { data: Some(9), ..rma_op(peer, Write, &mut local, KEY, 2) };
    world.access(0, &op).unwrap();
    world.settle();
    assert_eq!(world.accesses(1), [(Write, LEN, Some(9))]);
    let mut short = Memory::pattern(7, 999);
    world.access(0, &rma_op(peer, Write, &mut short, KEY, 3)).unwrap();
    world.settle();
    assert_eq!(world.accesses(1), [(Write, 999, None)]);
    assert!(ended(&mut world).iter().all(Result::is_ok));

    for (key, addr, error) in
        [(KEY + 1, 0, libc::EACCES), (KEY, 1, libc::EACCES), (KEY + 2, 0, libc::EKEYREJECTED)]
    {
        let op =
            RmaOp { remote: remote(key, addr, LEN), ..rma_op(peer, Write, &mut local, KEY, 4) };
        world.access(0, &op).unwrap();
        world.settle();
        assert_eq!(ended(&mut world)[0].unwrap_err().error, error);
    }
    assert_eq!(world.accesses(1), []);
    assert!(other.0.iter().all(|byte| *byte == 0));
    world.assert_empty();
}

#[test]
fn a_region_that_is_closed_is_not_touched_any_more() {
    let mut world = world(Reach::On, Reach::On);
    let (mut region, mut next) = (Memory::zeroed(LEN), Memory::zeroed(LEN));
    world.register(1, KEY, &mut region, &BOTH);
    acquaint(&mut world);
    let peer = world.peer(0, 1);
    let mut local = Memory::pattern(8, LEN);
    for replaced in [false, true] {
        let node = world.node(1);
        if let Some((id, _)) = node.host.regions.whole(KEY) {
            node.host.regions.remove(KEY);
            node.engine.revoke(id);
        }
        if replaced {
            world.register(1, KEY, &mut next, &BOTH);
        }
        world.access(0, &rma_op(peer, Write, &mut local, KEY, 5)).unwrap();
        assert!(ended(&mut world).is_empty(), "the target has to say");
        world.settle();
        assert_eq!(ended(&mut world)[0].is_ok(), replaced);
        assert_eq!(region.0, Memory::pattern(5, LEN).0);
    }
    assert_eq!(next.0, local.0);
    // The new region has been advertised by now.
    world.accesses(1);
    world.access(0, &rma_op(peer, Write, &mut local, KEY, 6)).unwrap();
    assert_eq!(ended(&mut world).len(), 1);
    world.settle();
    world.assert_empty();
}

#[test]
fn one_sided_operations_are_carried_out_in_order() {
    let mut world = world(Reach::On, Reach::On);
    let mut region = Memory::zeroed(LEN);
    world.register(1, KEY, &mut region, &BOTH);
    acquaint(&mut world);
    let peer = world.peer(0, 1);
    let (mut small, mut long, mut last) =
        (Memory::pattern(1, 10), Memory::pattern(2, LEN), Memory::pattern(3, 10));
    let mut back = Memory::zeroed(LEN);
    world.access(0, &rma_op(peer, Write, &mut small, KEY, 1)).unwrap();
    world.access(0, &rma_op(peer, Write, &mut long, KEY, 2)).unwrap();
    world.access(0, &rma_op(peer, Write, &mut last, KEY, 3)).unwrap();
    world.access(0, &rma_op(peer, Read, &mut back, KEY, 4)).unwrap();
    for _ in 0..5 {
        world.progress(0);
    }
    assert!(ended(&mut world).is_empty(), "the target has not looked yet");
    world.settle();
    let ended = ended(&mut world);
    assert!(ended.len() == 4 && ended.iter().all(Result::is_ok));
    assert!(region.0[..10] == last.0 && region.0[10..] == long.0[10..]);
    assert!(back.0 == region.0);
    assert_eq!(world.accesses(1), [(Write, 10, None); 2]);
    world.assert_empty();
}

/// Longer than one progress pass moves. Nothing arrives meanwhile, so the initiator has to continue by itself.
#[test]
fn a_very_long_one_takes_several_turns() {
    const LONG: usize = 9 << 20;
    let mut world = world(Reach::On, Reach::On);
    let mut region = Memory::zeroed(LONG);
    world.register(1, KEY, &mut region, &BOTH);
    acquaint(&mut world);
    let peer = world.peer(0, 1);
    let mut from = Memory(vec![0x77; LONG]);
    world.access(0, &rma_op(peer, Write, &mut from, KEY, 1)).unwrap();
    let mut turns = 0;
    while ended(&mut world).is_empty() {
        assert!(world.node(0).engine.is_busy());
        world.progress(0);
        turns += 1;
    }
    assert_eq!(turns, 2);
    assert!(region.0 == from.0);
    world.settle();
    world.assert_empty();
}

#[test]
fn without_attach_for_one_direction_the_other_one_works() {
    let mut world = world(Reach::On, Reach::Off);
    let mut region = Memory::zeroed(LEN);
    world.register(1, KEY, &mut region, &BOTH);
    acquaint(&mut world);
    let peer = world.peer(0, 1);
    let mut local = Memory::pattern(8, LEN);
    world.access(0, &rma_op(peer, Write, &mut local, KEY, 1)).unwrap();
    assert!(ended(&mut world).is_empty());
    world.settle();
    assert!(ended(&mut world)[0].is_ok() && region.0 == local.0);
    world.access(0, &rma_op(peer, Read, &mut local, KEY, 2)).unwrap();
    assert_eq!(ended(&mut world).len(), 1);
    world.accesses(1);
    world.settle();
    assert_eq!(world.accesses(1), []);
    world.assert_empty();
}

/// Two nodes with devices.
pub(super) fn distant(windows: Glazing) -> World {
    let windows = Glazing { exposes: true, ..windows };
    let weather =
        Weather { get: vec![Reach::Off], put: vec![Reach::Off], windows, ..Weather::fair() };
    World::new(2, weather, Limits { alone_min: 1000, ..LIMITS })
}

/// Repeats operations until endpoint 0 accesses region `KEY` of 1 directly: a transport may delay that.
pub(super) fn introduce(world: &mut World) {
    for _ in 0..100 {
        acquaint(world);
        let reached = |world: &mut World| world.node(0).engine.counts().reached_bytes;
        let before = reached(world);
        acquaint(world);
        if reached(world) == before + 2 * LEN as u64 {
            return;
        }
    }
    panic!("it is never told of the region");
}

#[test]
fn a_device_moves_bytes_and_the_target_has_nothing_to_do() {
    let mut world = distant(Glazing::none());
    let mut region = Memory::zeroed(2 * LEN);
    world.register(1, KEY, &mut region, &BOTH);
    introduce(&mut world);
    let peer = world.peer(0, 1);
    let (mut from, mut next, mut back) =
        (Memory::pattern(1, LEN), Memory::pattern(2, LEN), Memory::zeroed(2 * LEN));
    let place = remote(KEY, 1000, LEN);
    let reached = |world: &mut World| world.node(0).engine.counts().reached_bytes;
    let before = reached(&mut world);
    world.access(0, &RmaOp { remote: place, ..rma_op(peer, Write, &mut from, KEY, 1) }).unwrap();
    world.access(0, &rma_op(peer, Write, &mut next, KEY, 2)).unwrap();
    world.access(0, &rma_op(peer, Read, &mut back, KEY, 3)).unwrap();
    assert!(ended(&mut world).is_empty(), "the device has only begun");
    assert_eq!(reached(&mut world) - before, 4 * LEN as u64, "all of them: none waits for another");
    for _ in 0..200 {
        world.progress(0); // only endpoint 0
    }
    assert_eq!(ended(&mut world).iter().filter(|report| report.is_ok()).count(), 3);
    assert!(region.0[..LEN] == next.0 && region.0[LEN..1000 + LEN] == from.0[LEN - 1000..]);
    assert!(back.0 == region.0);
    world.settle();
    assert_eq!(world.accesses(1), []);
    world.assert_empty();
}

/// Device memory at both ends, on a lane that takes it: CUDA IPC. Without such a lane the target copies it.
#[test]
fn regions_in_device_memory_need_a_lane_that_takes_it() {
    for takes in [true, false] {
        let mut world = distant(Glazing { reads: takes, ..Glazing::none() });
        let mut region = Memory::zeroed(2 * LEN);
        world.register_list(1, KEY, lend(&mut region.0, &[]).as_device(1), &BOTH);
        if takes {
            introduce(&mut world);
        }
        let peer = world.peer(0, 1);
        let (mut from, mut back) = (Memory::pattern(1, LEN), Memory::zeroed(LEN));
        let place = remote(KEY, 1000, LEN);
        let before = world.node(0).engine.counts().reached_bytes;
        for (right, memory) in [(Write, &mut from), (Read, &mut back)] {
            let plain = rma_op(peer, right, memory, KEY, 1);
            let op = RmaOp { remote: place, local: plain.local.as_device(1), ..plain };
            world.access(0, &op).unwrap();
        }
        world.settle();
        assert_eq!(ended(&mut world).iter().filter(|report| report.is_ok()).count(), 2);
        assert!(region.0[1000..1000 + LEN] == from.0 && back.0 == from.0);
        let reached = world.node(0).engine.counts().reached_bytes - before;
        assert_eq!(reached, if takes { 2 * LEN as u64 } else { 0 });
        world.accesses(1);
        world.assert_empty();
    }
}

/// The device reads the source of a direct write itself. By message its parts are copied to the host, when they are sent, and not
/// before.
#[test]
fn a_write_from_device_memory_is_copied_when_it_goes_by_message() {
    for takes in [true, false] {
        let mut world = distant(Glazing { reads: takes, ..Glazing::none() });
        let mut region = Memory::zeroed(LEN);
        world.register_list(1, KEY, lend(&mut region.0, &[]).as_device(1), &BOTH);
        if takes {
            introduce(&mut world);
        }
        world.net.borrow_mut().weather.queue_len = 2;
        let peer = world.peer(0, 1);
        let mut from: Vec<_> = (0..6).map(|seed| Memory::pattern(seed, LEN)).collect();
        for memory in &mut from {
            let plain = rma_op(peer, Write, memory, KEY, 1);
            world.access(0, &RmaOp { local: plain.local.as_device(1), ..plain }).unwrap();
            assert_eq!(world.node(0).engine.core.rma.copied, 0);
        }
        let (now, _) = mover::buffers();
        let most = if takes { 0 } else { LEN.div_ceil(bounce::LEN) };
        assert!((most.min(1)..=most).contains(&now), "{now} buffers: the others wait");
        world.settle();
        let ended = ended(&mut world);
        assert!(ended.len() == 6 && ended.iter().all(Result::is_ok));
        assert!(region.0 == from[5].0);
        assert_eq!(world.accesses(1).len(), if takes { 0 } else { 6 });
        world.assert_empty();
    }
}

/// Operations by message wait for the device, and direct ones for messages.
#[test]
fn a_device_is_not_overtaken() {
    let mut world = distant(Glazing::none());
    let mut region = Memory::zeroed(LEN);
    world.register(1, KEY, &mut region, &BOTH);
    introduce(&mut world);
    let peer = world.peer(0, 1);
    let (mut small, mut long, mut last) =
        (Memory::pattern(1, 10), Memory::pattern(2, LEN), Memory::pattern(3, 10));
    let mut back = Memory::zeroed(10);
    world.access(0, &rma_op(peer, Write, &mut small, KEY, 1)).unwrap();
    world.access(0, &rma_op(peer, Write, &mut long, KEY, 2)).unwrap();
    world.access(0, &rma_op(peer, Write, &mut last, KEY, 3)).unwrap();
    world.access(0, &rma_op(peer, Read, &mut back, KEY, 4)).unwrap();
    world.settle();
    let ended = ended(&mut world);
    assert!(ended.len() == 4 && ended.iter().all(Result::is_ok));
    assert!(region.0[..10] == last.0 && region.0[10..] == long.0[10..] && back.0 == last.0);
    // A short write behind a long one is direct too, and need not wait for its end.
    assert_eq!(world.accesses(1), [(Write, 10, None), (Read, 10, None)]);
    world.assert_empty();
}

/// A device acknowledges a write before its bytes are in memory: what the target sees later by a message comes after a
/// flush read.
#[test]
fn a_flush_read_precedes_a_message_after_a_device_write() {
    let mut world = distant(Glazing::none());
    let (mut region, mut flag) = (Memory::zeroed(LEN), Memory::zeroed(8));
    world.register(1, KEY, &mut region, &BOTH);
    world.register(1, KEY + 1, &mut flag, &BOTH);
    introduce(&mut world);
    world.settle();
    let peer = world.peer(0, 1);
    for (seed, by_send, delivered) in (0..60).map(|n| (n, n % 2 == 0, n % 5 == 0)) {
        let (mut from, mut small) = (Memory::pattern(seed, LEN), Memory::pattern(seed, 8));
        let mut sink = Memory::zeroed(8);
        world.access(0, &RmaOp { delivered, ..rma_op(peer, Write, &mut from, KEY, 1) }).unwrap();
        while ended(&mut world).is_empty() {
            world.progress(0);
        }
        from.0.fill(0); // the buffer is the application's again
        if by_send {
            world.receive(1, &receive_op(&mut sink, 2)).unwrap();
            let op = SendOp { fence: true, ..send_op(peer, &mut small, 3) };
            world.send(0, &op).unwrap();
        } else {
            let op = RmaOp { data: Some(9), ..rma_op(peer, Write, &mut small, KEY + 1, 3) };
            world.access(0, &op).unwrap();
        }
        for rounds in 0.. {
            assert!(rounds < 1000, "it never comes");
            world.progress(0);
            world.progress(1);
            if !world.accesses(1).is_empty() || !world.receives(1).is_empty() {
                break;
            }
        }
        assert!(region.0 == Memory::pattern(seed, LEN).0, "{seed}: {by_send}, {delivered}");
        world.settle();
        assert!(ended(&mut world).len() + world.sends(0).len() == 1);
        acquaint(&mut world); // an answer: the next operation need not go by messages for the fence
    }
    world.assert_empty();
}

/// A direct operation ends in a turn of its initiator, and nothing arrives then.
#[test]
fn a_fence_opens_with_the_last_direct_operation_before_it() {
    const LONG: usize = 5 << 20; // more than one turn moves
    let mut world = world(Reach::On, Reach::On);
    let (mut region, mut from) = (Memory::zeroed(LONG), Memory(vec![7; LONG]));
    let (mut small, mut sink) = (Memory::pattern(2, 8), Memory::zeroed(8));
    world.register(1, KEY, &mut region, &BOTH);
    acquaint(&mut world);
    let peer = world.peer(0, 1);
    world.access(0, &rma_op(peer, Write, &mut from, KEY, 1)).unwrap();
    world.send(0, &SendOp { fence: true, ..send_op(peer, &mut small, 2) }).unwrap();
    assert!(ended(&mut world).is_empty() && world.on_wire(0, 1).is_empty());
    while ended(&mut world).is_empty() {
        assert!(world.node(0).engine.is_busy());
        world.progress(0);
    }
    world.node(0).check_rest();
    assert_eq!(world.on_wire(0, 1).len(), 1, "the message behind the fence");
    world.receive(1, &receive_op(&mut sink, 3)).unwrap();
    world.settle();
    assert!(region.0 == from.0 && sink.0 == small.0);
    assert_eq!((world.sends(0).len(), world.receives(1).len()), (1, 1));
    world.assert_empty();
}

/// A message that was sent before a fence is not overtaken by a direct operation behind it, though the message is
/// complete, and has no answer.
#[test]
fn a_direct_operation_behind_a_fence_does_not_overtake_messages() {
    for (by_device, right, fenced_message) in
        (0..8).map(|n| (n & 1 > 0, BOTH[n >> 1 & 1], n & 4 > 0))
    {
        let mut world =
            if by_device { distant(Glazing::none()) } else { world(Reach::On, Reach::On) };
        let mut region = Memory::zeroed(LEN);
        world.register(1, KEY, &mut region, &BOTH);
        if by_device {
            introduce(&mut world)
        } else {
            acquaint(&mut world)
        }
        world.settle();
        let peer = world.peer(0, 1);
        // The message goes into bytes that the operation accesses too.
        let sink = ReceiveOp {
            segments: lend(&mut region.0[..8], &[]),
            ..receive_op(&mut Memory::zeroed(0), 1)
        };
        world.receive(1, &sink).unwrap();
        let (mut message, mut empty) = (Memory::pattern(77, 8), Memory::zeroed(0));
        world.send(0, &send_op(peer, &mut message, 2)).unwrap();
        if fenced_message {
            world.send(0, &SendOp { fence: true, ..send_op(peer, &mut empty, 3) }).unwrap();
        }
        let mut local = Memory::pattern(9, LEN);
        let op = RmaOp { fence: !fenced_message, ..rma_op(peer, right, &mut local, KEY, 4) };
        world.access(0, &op).unwrap();
        (0..200).for_each(|_| world.progress(0));
        assert!(ended(&mut world).is_empty(), "the target has not looked yet");
        if fenced_message {
            world.receive(1, &receive_op(&mut empty, 5)).unwrap();
        }
        world.settle();
        assert!(ended(&mut world)[0].is_ok());
        let seen = if right == Write { &region.0 } else { &local.0 };
        let first = if right == Write { &local.0[..8] } else { &message.0[..] };
        assert!(seen[..8] == *first, "by device: {by_device}, {right:?}, {fenced_message}");
        world.accesses(1);
        // The answer ends it.
        world.access(0, &rma_op(peer, Write, &mut local, KEY, 6)).unwrap();
        world.settle();
        assert!(ended(&mut world)[0].is_ok() && world.accesses(1).is_empty());
        assert!(world.sends(0).iter().chain(&world.receives(1)).all(Result::is_ok));
        world.assert_empty();
    }
}

/// Where no message is unanswered, the operations behind a fence are direct as well. A message that the target has answered
/// is none. Each other one makes one operation behind the next fence go by message.
#[test]
fn fences_without_unanswered_messages_leave_operations_direct() {
    for (by_device, message) in (0..6).map(|n| (n % 2 > 0, [None, Some(true), Some(false)][n / 2]))
    {
        let mut world =
            if by_device { distant(Glazing::none()) } else { world(Reach::On, Reach::On) };
        let mut region = Memory::zeroed(LEN);
        world.register(1, KEY, &mut region, &BOTH);
        introduce(&mut world);
        let peer = world.peer(0, 1);
        let before = world.node(0).engine.counts().reached_bytes;
        for seed in 0..10 {
            let (mut local, mut small) = (Memory::pattern(seed, LEN), Memory::pattern(seed, 8));
            let mut sink = Memory::zeroed(8);
            let op = rma_op(peer, BOTH[seed % 2], &mut local, KEY, 1);
            world.access(0, &op).unwrap();
            match message {
                None => world.access(0, &RmaOp { fence: true, ..op }).unwrap(),
                Some(delivery) => {
                    world.receive(1, &receive_op(&mut sink, 2)).unwrap();
                    let op = SendOp { fence: true, delivery, ..send_op(peer, &mut small, 3) };
                    world.send(0, &op).unwrap();
                }
            }
            world.settle();
            assert!(sink.0 == small.0 || message.is_none());
        }
        let reached = (world.node(0).engine.counts().reached_bytes - before) / LEN as u64;
        let expected = match message {
            None => 20,
            Some(true) => 10,
            Some(false) => 6,
        };
        assert_eq!(reached, expected, "by device: {by_device}, delivered: {message:?}");
        let all = [ended(&mut world), world.sends(0), world.receives(1)].concat();
        assert!(all.iter().all(Result::is_ok));
        world.accesses(1);
        world.assert_empty();
    }
}

/// An answer to an operation that was sent between the fragments of a message says nothing of the later ones.
#[test]
fn the_rest_of_a_message_is_not_overtaken_behind_a_fence() {
    const LONG: usize = 40_000;
    let weather = Weather { push_max: 2 * LONG, outlives: true, queue_len: 4, ..Weather::fair() };
    let limits = Limits { alone_min: 1000, ..LIMITS };
    let mut world = World::new(2, weather, limits);
    let mut region = Memory::zeroed(LONG);
    world.register(1, KEY, &mut region, &BOTH);
    acquaint(&mut world);
    let peer = world.peer(0, 1);
    let sink =
        ReceiveOp { segments: lend(&mut region.0, &[]), ..receive_op(&mut Memory::zeroed(0), 1) };
    world.receive(1, &sink).unwrap();
    let (mut message, mut short) = (Memory::pattern(77, LONG), Memory::zeroed(8));
    world.send(0, &send_op(peer, &mut message, 2)).unwrap();
    // The target takes the first fragments, and the next packet is the read's.
    world.progress(1);
    world.access(0, &rma_op(peer, Read, &mut short, KEY, 3)).unwrap();
    assert!(world.sends(0).is_empty(), "fragments are left");
    while ended(&mut world).is_empty() {
        world.progress(0);
        world.progress(1);
    }
    assert!(world.sends(0).is_empty(), "fragments are left");
    while world.sends(0).is_empty() {
        world.progress(1);
        world.progress(0);
    }
    let mut local = Memory::pattern(9, LONG);
    world.access(0, &RmaOp { fence: true, ..rma_op(peer, Write, &mut local, KEY, 4) }).unwrap();
    (0..200).for_each(|_| world.progress(0));
    world.settle();
    assert!(ended(&mut world)[0].is_ok() && world.received(1).len == LONG);
    assert!(region.0 == local.0);
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn accesses_lost_with_a_connection_are_repeated() {
    for next in [Prepared::Ready, Prepared::Later, Prepared::No] {
        let mut world = distant(Glazing { changes: 5, ..Glazing::none() });
        let mut region = Memory::zeroed(LEN);
        world.register(1, KEY, &mut region, &BOTH);
        introduce(&mut world);
        let peer = world.peer(0, 1);
        let (mut a, mut b, mut back) =
            (Memory::pattern(1, LEN), Memory::pattern(2, LEN), Memory::zeroed(LEN));
        world.access(0, &rma_op(peer, Write, &mut a, KEY, 1)).unwrap();
        world.access(0, &rma_op(peer, Write, &mut b, KEY, 2)).unwrap();
        world.access(0, &rma_op(peer, Read, &mut back, KEY, 3)).unwrap();
        world.net.borrow_mut().lose_windows(0, 1, next);
        world.settle();
        let ended = ended(&mut world);
        assert!(ended.len() == 3 && ended.iter().all(Result::is_ok), "{ended:?}");
        assert!(region.0 == b.0 && back.0 == b.0);
        assert_eq!(world.accesses(1).len(), 3, "the target has done it");
        world.assert_empty();
    }
}

#[test]
fn a_region_that_ends_takes_the_device_s_way_along() {
    let mut world = distant(Glazing::none());
    let (mut region, mut next) = (Memory::zeroed(LEN), Memory::zeroed(LEN));
    world.register(1, KEY, &mut region, &BOTH);
    introduce(&mut world);
    let peer = world.peer(0, 1);
    let mut local = Memory::pattern(8, LEN);
    let node = world.node(1);
    let (id, _) = node.host.regions.whole(KEY).unwrap();
    node.host.regions.remove(KEY);
    node.engine.revoke(id);
    // Another region takes its key; the initiator may have been told by then, or not.
    world.register(1, KEY, &mut next, &BOTH);
    world.access(0, &rma_op(peer, Write, &mut local, KEY, 5)).unwrap();
    world.settle();
    assert!(ended(&mut world)[0].is_ok());
    assert!(region.0 == Memory::pattern(5, LEN).0 && next.0 == local.0);
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn a_departed_peer_takes_its_device_along() {
    for how in [Departure::Closed, Departure::Failed(crate::sys::Errno(libc::EHOSTDOWN))] {
        let mut world = distant(Glazing { waits: 50, ..Glazing::none() });
        let mut region = Memory::zeroed(LEN);
        world.register(1, KEY, &mut region, &BOTH);
        introduce(&mut world);
        let peer = world.peer(0, 1);
        let (mut a, mut b) = (Memory::pattern(1, LEN), Memory::pattern(2, LEN));
        world.access(0, &rma_op(peer, Write, &mut a, KEY, 1)).unwrap();
        world.access(0, &rma_op(peer, Read, &mut b, KEY, 2)).unwrap();
        world.leave(1, how);
        world.settle();
        let ended = ended(&mut world);
        assert!(ended.len() == 2 && ended.iter().all(Result::is_err), "{ended:?}");
    }
}

#[test]
fn a_buffer_that_a_device_refuses_costs_the_others_nothing() {
    let mut world = distant(Glazing::none());
    let mut region = Memory::zeroed(LEN);
    world.register(1, KEY, &mut region, &BOTH);
    introduce(&mut world);
    let peer = world.peer(0, 1);
    let (mut a, mut b) = (Memory::pattern(1, LEN), Memory::pattern(2, LEN));
    world.net.borrow_mut().weather.windows.write_refusals = 100;
    world.access(0, &rma_op(peer, Write, &mut a, KEY, 1)).unwrap();
    // It was sent by the call, whether or not its initiator polls.
    (0..100).for_each(|_| world.progress(1));
    assert_eq!(world.accesses(1), [(Write, LEN, None)], "the target has done it");
    world.settle();
    assert!(ended(&mut world)[0].is_ok() && region.0 == a.0);
    assert_eq!(world.accesses(1), []);
    world.net.borrow_mut().weather.windows.write_refusals = 0;
    world.access(0, &rma_op(peer, Write, &mut b, KEY, 2)).unwrap();
    world.settle();
    assert!(ended(&mut world)[0].is_ok() && region.0 == b.0);
    assert_eq!(world.accesses(1), []);
    world.assert_empty();
}

/// A target advertises to a peer that writes often. Short writes are direct while none is in progress as a message, but
/// are not sent as messages forever because one always is.
#[test]
fn a_device_does_writes_that_are_not_long_too() {
    let mut world = distant(Glazing { steady: true, ..Glazing::none() });
    let mut region = Memory::zeroed(LEN);
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    let mut seed = 0;
    let mut write = |world: &mut World, len: usize, waits: bool| {
        seed += 1;
        let mut from = Memory::pattern(seed, len);
        let op = RmaOp { inject: true, ..rma_op(peer, Write, &mut from, KEY, 1) };
        while world.access(0, &op).is_err() {
            world.progress(0);
            world.progress(1);
        }
        if waits {
            world.settle();
            assert!(region.0[..len] == from.0);
        }
    };
    let served = |world: &mut World| world.accesses(1).len();
    // Too short for the target to advertise, or to be direct.
    (0..40).for_each(|_| write(&mut world, 100, true));
    assert_eq!(served(&mut world), 40);
    (0..40).for_each(|_| write(&mut world, 200, true));
    let asked = served(&mut world);
    assert!((16..40).contains(&asked), "not for a few, and not for ever: {asked}");
    (0..10).for_each(|_| write(&mut world, 200, true));
    assert_eq!(served(&mut world), 0, "the target has nothing to do");
    write(&mut world, 100, true);
    assert_eq!(served(&mut world), 1);

    // A message is in progress whenever a write begins.
    write(&mut world, 100, false);
    (0..40).for_each(|_| write(&mut world, 200, false));
    world.settle();
    let asked = served(&mut world);
    assert!((2..=1 + 16).contains(&asked), "as long as that takes, or a few: {asked}");
    assert!(ended(&mut world).iter().all(Result::is_ok));
    assert!(region.0[..200] == Memory::pattern(seed, 200).0);
    world.assert_empty();
}

/// A target advertises to a peer that often reads a little.
#[test]
fn a_device_does_short_reads_too() {
    let mut world = distant(Glazing::none());
    let mut region = Memory::pattern(3, LEN);
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    let mut back = Memory::zeroed(100);
    let mut read_one = |world: &mut World, at: usize| {
        back.0.fill(0);
        let place = remote(KEY, at as u64, 100);
        world.access(0, &RmaOp { remote: place, ..rma_op(peer, Read, &mut back, KEY, 1) }).unwrap();
        world.settle();
        assert!(ended(world)[0].is_ok() && back.0 == region.0[at..at + 100]);
        world.accesses(1).len()
    };
    let asked: usize = (0..40).map(|n| read_one(&mut world, n)).sum();
    assert!((16..40).contains(&asked), "not for a few, and not for ever: {asked}");
    assert_eq!(read_one(&mut world, 7), 0, "the target has nothing to do");

    // The same holds for many reads at once, but not before all messages have their answer.
    let mut sinks: Vec<_> = (0..8).map(|_| Memory::zeroed(100)).collect();
    let mut many = |world: &mut World| {
        for sink in &mut sinks {
            sink.0.fill(0);
            while world.access(0, &rma_op(peer, Read, sink, KEY, 2)).is_err() {
                world.progress(0);
                world.progress(1);
            }
        }
        world.settle();
        assert!(ended(world).iter().all(Result::is_ok));
        assert!(sinks.iter().all(|sink| sink.0 == region.0[..100]));
        world.accesses(1).len()
    };
    assert_eq!(many(&mut world), 0);
    let (mut from, mut other) = (Memory::pattern(5, 10), Memory::zeroed(10));
    world.register(1, KEY + 1, &mut other, &BOTH);
    world.access(0, &rma_op(peer, Write, &mut from, KEY + 1, 3)).unwrap();
    assert!(many(&mut world) > 1);
    assert_eq!(many(&mut world), 0);
    world.assert_empty();
}

/// The peer has a lane to region `KEY` and another one to `KEY + 1`. Writes to both take effect in their order: those of the
/// first are flushed before one of the second begins.
#[test]
fn a_write_by_another_lane_does_not_overtake() {
    for seed in 0..20 {
        let mut world = distant(Glazing { rails: 2, steady: true, ..Glazing::none() });
        let (mut region, mut flag) = (Memory::zeroed(LEN), Memory::zeroed(LEN));
        world.register(1, KEY, &mut region, &BOTH);
        introduce(&mut world);
        world.net.borrow_mut().set_rail((0, 1), RAILS[0], Prepared::No);
        world.register(1, KEY + 1, &mut flag, &BOTH);
        let peer = world.peer(0, 1);
        let mut last = Memory::pattern(seed, LEN);
        let reached = |world: &mut World| world.node(0).engine.counts().reached_bytes;
        let other = |world: &mut World, last: &mut Memory| {
            let before = reached(world);
            world.access(0, &rma_op(peer, Write, last, KEY + 1, 2)).unwrap();
            world.settle();
            assert!(ended(world).iter().all(Result::is_ok));
            reached(world) > before
        };
        assert!((0..100).any(|_| other(&mut world, &mut last)), "it is never told of the region");
        flag.0.fill(0);
        let mut first = Memory::pattern(seed + 1, LEN);
        world.access(0, &rma_op(peer, Write, &mut first, KEY, 1)).unwrap();
        world.access(0, &rma_op(peer, Write, &mut last, KEY + 1, 2)).unwrap();
        for rounds in 0.. {
            assert!(rounds < 1000, "it never comes");
            if flag.0.iter().any(|byte| *byte != 0) {
                break;
            }
            world.progress(0);
        }
        assert!(region.0 == first.0, "{seed}");
        world.settle();
        assert!(ended(&mut world).len() == 2 && flag.0 == last.0);
        world.accesses(1);
        world.assert_empty();
    }
}

#[test]
fn a_region_is_accessed_by_the_next_lane_when_its_lane_is_lost() {
    let mut world = distant(Glazing { rails: 2, steady: true, ..Glazing::none() });
    let mut region = Memory::zeroed(LEN);
    world.register(1, KEY, &mut region, &BOTH);
    introduce(&mut world);
    let peer = world.peer(0, 1);
    for next in [Prepared::No, Prepared::Ready] {
        let mut from = Memory::pattern(3, LEN);
        world.access(0, &rma_op(peer, Write, &mut from, KEY, 1)).unwrap();
        world.net.borrow_mut().lose_rail((0, 1), RAILS[0], next);
        world.settle();
        assert!(ended(&mut world).iter().all(Result::is_ok) && region.0 == from.0);
        world.accesses(1);
        introduce(&mut world);
        world.settle();
        world.accesses(1);
    }
    world.assert_empty();
}
