//! Messages in device memory that are sent in packets, or through remote buffers on a lane that takes memory of the host only: the
//! copy of one part runs while another one is sent.

use super::fixture::{LIMITS, Memory, World, lend, receive_op, rma_op, send_op};
use super::sim::{Reach, Weather};
use super::sim_window::Glazing;
use crate::memory::keys::Right::Write;
use crate::memory::mover::tests as mover;
use crate::protocol::packet::Packet;
use crate::protocol::{Direction, Limits, ReceiveOp, RmaOp, SendOp};
use crate::sys::Errno;
use crate::transport::{Departure, Prepared};

const LEN: usize = 50_000;

/// No memory of the other side can be read or written.
fn apart(push_max: usize) -> Weather {
    Weather { get: vec![Reach::Off], put: vec![Reach::Off], push_max, ..Weather::fair() }
}

/// Two endpoints; the first one has sent a message from device memory, which the other one has not asked for yet.
fn sent(from: &mut Memory, weather: Weather, limits: Limits) -> World {
    let mut world = World::new(2, weather, limits);
    let peer = world.peer(0, 1);
    let plain = send_op(peer, from, 1);
    let payload = lend(&mut from.0, &[LEN / 3, LEN / 2]).as_device(5);
    world.send(0, &SendOp { payload, ..plain }).unwrap();
    world
}

/// Both endpoints make progress until the first one has sent everything, in parts that it has copied while earlier ones were sent.
/// Returns how many bytes those were. `first`: before each turn.
fn sent_beside_copies(world: &mut World, first: impl Fn(&mut World)) -> u64 {
    let (mut before, mut overlaps) = (0, 0);
    for _ in 0..10_000 {
        first(world);
        world.progress(0);
        let counts = world.node(0).engine.counts();
        let moved = counts.fragment_bytes + counts.stream_bytes;
        overlaps += usize::from(moved > before && mover::under_way() > 0);
        before = moved;
        world.progress(1);
    }
    assert!(overlaps > 10, "bytes were sent while others were copied {overlaps} times");
    assert_eq!(mover::buffers(), (0, 4), "as many buffers as four parts need");
    before
}

#[test]
fn parts_are_copied_while_earlier_ones_are_sent() {
    for weather in [apart(0), apart(1 << 20), Weather { stream_max: 300, ..apart(1 << 20) }] {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let mut world = sent(&mut from, weather, LIMITS);
        assert_eq!(mover::buffers(), (0, 0), "nothing is copied before it is asked for");
        let [Packet::Rts { pushed: 0, .. }] = world.on_wire(0, 1)[..] else {
            panic!("{:?}", world.on_wire(0, 1))
        };
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        assert_eq!(sent_beside_copies(&mut world, |_| ()), LEN as u64);
        assert!(to.0 == from.0);
        world.settle();
        world.received(1);
        assert!(matches!(world.sends(0)[..], [Ok(_)]));
        world.assert_empty();
        mover::forget_buffers();
    }
}

#[test]
fn an_endpoint_asks_for_the_end_of_a_copy() {
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    let mut world = sent(&mut from, apart(0), LIMITS);
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.progress(1);
    while world.node(0).engine.counts().fragment_bytes == 0 {
        world.progress(0);
        assert!(world.node(0).engine.is_busy(), "no event tells of it");
    }
    world.settle();
    world.received(1);
    world.sends(0);
    world.assert_empty();
}

#[test]
fn copies_end_with_their_message() {
    for turns in 0..12 {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let mut world = sent(&mut from, apart(0), LIMITS);
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        for _ in 0..turns {
            world.progress(1);
            world.progress(0);
        }
        if turns % 2 == 0 {
            world.leave(1, Departure::Failed(Errno(libc::EHOSTDOWN)));
            world.settle();
            assert!(matches!(world.sends(0)[..], [Err(_)]));
        }
        drop(world);
        assert_eq!((mover::under_way(), mover::buffers().0), (0, 0));
    }
}

/// Two endpoints; a message for device memory of the second one is on its way.
fn posted(from: &mut Memory, to: &mut Memory, weather: Weather) -> World {
    let mut world = World::new(2, weather, LIMITS);
    let peer = world.peer(0, 1);
    let to_len = to.0.len();
    let segments = lend(&mut to.0, &[to_len / 3, to_len / 2]).as_device(5);
    world.receive(1, &ReceiveOp { segments, ..receive_op(to, 2) }).unwrap();
    world.send(0, &send_op(peer, from, 1)).unwrap();
    world
}

/// How many bytes of the message have come.
fn come(world: &mut World) -> usize {
    let active = &world.node(1).engine.core.arrivals.active;
    active.iter().map(|(_, active)| active.message.received).next().unwrap_or(0)
}

#[test]
fn parts_are_copied_to_a_device_while_the_next_ones_come() {
    for weather in [apart(0), apart(1 << 20), Weather { stream_max: 300, ..apart(1 << 20) }] {
        let weather = Weather { batch: 4, ..weather };
        mover::forget_buffers();
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let mut world = posted(&mut from, &mut to, weather);
        let (mut before, mut overlaps, mut ended) = (0, 0, false);
        for _ in 0..10_000 {
            world.progress(0);
            let under_way = mover::under_way();
            world.progress(1);
            let now = come(&mut world);
            overlaps += usize::from(now > before && under_way > 0);
            before = now;
            if now > 0 && mover::under_way() > 0 {
                assert!(world.node(1).engine.is_busy(), "no event tells of the end of a copy");
            }
            if let [report] = world.receives(1)[..] {
                report.unwrap();
                assert_eq!(mover::buffers().0, 0, "it is reported when all copies have ended");
                assert!(to.0 == from.0);
                ended = true;
            }
        }
        assert!(ended && overlaps > 10, "bytes came while others were copied {overlaps} times");
        let (_, most) = mover::buffers();
        assert!((2..LEN / 1000 / 2).contains(&most), "{most} buffers");
        world.settle();
        world.sends(0);
        world.assert_empty();
    }
}

/// Nothing more is taken while a device is late, and all goes on when it is not.
#[test]
fn a_late_device_holds_its_endpoint_back() {
    let weather = Weather { batch: 1, ..apart(1 << 20) };
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    let mut world = posted(&mut from, &mut to, weather);
    mover::be_late(true);
    for _ in 0..1000 {
        world.progress(0);
        world.progress(1);
    }
    let (now, _) = mover::buffers();
    assert!((8..12).contains(&now), "{now} buffers");
    assert!(come(&mut world) < LEN / 2);
    mover::be_late(false);
    world.settle();
    world.received(1);
    world.sends(0);
    assert!(to.0 == from.0);
    world.assert_empty();
}

#[test]
fn copies_to_a_device_end_with_their_message() {
    for turns in 0..16 {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let mut world = posted(&mut from, &mut to, apart(0));
        for _ in 0..turns {
            world.progress(1);
            world.progress(0);
        }
        if turns % 2 == 0 {
            world.leave(0, Departure::Failed(Errno(libc::EHOSTDOWN)));
            world.settle();
            assert_eq!(world.receives(1).len(), 1);
            assert!(!world.node(1).engine.is_busy());
        }
        drop(world);
        assert_eq!((mover::under_way(), mover::buffers().0), (0, 0));
    }
}

/// Its sender needs no answer, gets none, and has left when the last bytes are copied.
#[test]
fn a_message_that_is_here_arrives_although_its_sender_has_left() {
    let weather = Weather { outlives: true, queue_len: 1000, batch: 1000, ..apart(1 << 20) };
    let killed = Departure::Failed(Errno(libc::EHOSTDOWN));
    for (room, departure) in [
        (LEN, Departure::Closed),
        (LEN - 1500, Departure::Closed),
        (LEN, killed),
        (LEN - 1500, killed),
    ] {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(room));
        let mut world = posted(&mut from, &mut to, weather.clone());
        mover::be_late(true);
        while come(&mut world) < room {
            // The arrived bytes wait for the device, and would hold the endpoint back.
            world.node(1).engine.core.arrivals.full = false;
            world.progress(0);
            world.progress(1);
        }
        assert!(matches!(world.sends(0)[..], [Ok(_)]));
        assert!(world.node(1).engine.is_landing());
        world.leave(0, departure);
        world.node(1).engine.core.arrivals.full = false;
        world.progress(1);
        assert!(world.receives(1).is_empty());
        mover::be_late(false);
        world.settle();
        assert!(matches!(world.receives(1)[..], [report] if report.is_ok() == (room == LEN)));
        assert!(to.0[..] == from.0[..room]);
        assert_eq!(world.node(1).engine.counts().dropped, 0, "an answer to a peer that has left");
        world.assert_empty();
    }
}

/// A device that takes memory of the host only, in remote buffers of so many bytes.
fn glazed(max: usize) -> Weather {
    Weather { windows: Glazing { max, min: 2000, waits: 50, ..Glazing::none() }, ..apart(0) }
}

/// Two endpoints; a message between memories of devices is on its way.
fn between_devices(from: &mut Memory, to: &mut Memory, weather: Weather) -> World {
    let mut world = World::new(2, weather, LIMITS);
    let peer = world.peer(0, 1);
    let receive = receive_op(to, 2);
    let segments = receive.segments.as_device(1);
    world.receive(1, &ReceiveOp { segments, ..receive }).unwrap();
    let plain = send_op(peer, from, 1);
    world.send(0, &SendOp { payload: plain.payload.as_device(1), ..plain }).unwrap();
    world
}

#[test]
fn parts_are_copied_while_others_are_written_to_remote_buffers() {
    for max in [700, 1000, 3500] {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        mover::forget_buffers();
        let mut world = between_devices(&mut from, &mut to, glazed(max));
        assert_eq!(mover::buffers(), (0, 0), "nothing is copied before it is asked for");
        let (mut ahead, mut behind, mut before) = (0, 0, 0);
        for _ in 0..10_000 {
            let under_way = mover::under_way();
            world.progress(0);
            // Copies at the sender that have begun while an earlier write has not ended.
            let writes = !world.node(0).engine.core.sends.wrote.is_empty();
            ahead += usize::from(writes && mover::under_way() > under_way);
            let under_way = mover::under_way();
            if under_way > 0 {
                assert!(world.node(0).engine.is_busy() || world.node(1).engine.is_busy());
            }
            world.progress(1);
            // Bytes that have come while earlier ones were copied at the receiver.
            let now = come(&mut world);
            behind +=
                usize::from(now > before && world.node(1).engine.is_landing() && under_way > 0);
            before = now;
            if let [report] = world.receives(1)[..] {
                report.unwrap();
                assert!(
                    !world.node(1).engine.is_landing(),
                    "it is reported when all copies have ended"
                );
                assert!(to.0 == from.0);
            }
        }
        let counts = world.node(0).engine.counts();
        assert_eq!((counts.window_bytes, counts.fragment_bytes), (LEN as u64, 0));
        assert!(ahead > 5 && behind > 5, "{max}: {ahead} and {behind} overlaps");
        let (now, most) = mover::buffers();
        assert!(now == 0 && (4..LEN / 1000 / 2).contains(&most), "{now} of {most} buffers");
        world.settle();
        assert!(matches!(world.sends(0)[..], [Ok(_)]));
        world.assert_empty();
    }
}

/// Its bytes come as fragments, of which each is copied by itself.
#[test]
fn a_remote_buffer_that_needs_too_many_parts_is_not_written() {
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    let mut world = World::new(2, glazed(5000), LIMITS);
    let peer = world.peer(0, 1);
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    let plain = send_op(peer, &mut from, 1);
    world.send(0, &SendOp { payload: plain.payload.as_device(1), ..plain }).unwrap();
    world.settle();
    world.received(1);
    world.sends(0);
    assert!(to.0 == from.0);
    let counts = world.node(0).engine.counts();
    assert_eq!((counts.window_bytes, counts.fragment_bytes), (0, LEN as u64));
    world.assert_empty();
}

#[test]
fn remote_buffers_of_devices_end_with_their_lane_and_their_peer() {
    for turns in 0..40 {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let mut world = between_devices(&mut from, &mut to, glazed(1000));
        for _ in 0..turns {
            world.progress(1);
            world.progress(0);
        }
        match turns % 3 {
            0 => {
                world.leave(usize::from(turns % 2 == 0), Departure::Failed(Errno(libc::EHOSTDOWN)))
            }
            1 => {
                world.net.borrow_mut().lose_windows(0, 1, Prepared::Ready);
                world.settle();
                assert_eq!(world.received(1).len, LEN);
                assert!(matches!(world.sends(0)[..], [Ok(_)]));
                assert!(to.0 == from.0);
                world.assert_empty();
            }
            _ => {}
        }
        drop(world);
        assert_eq!((mover::under_way(), mover::buffers().0), (0, 0));
    }
}

/// The device of the rv module reports the end of a write that the receiver may never hear of.
#[test]
fn a_silent_device_says_only_that_copies_are_free() {
    let windows = Glazing { silent: true, ..glazed(1000).windows };
    for turns in 0..200 {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let weather = Weather { windows: windows.clone(), ..glazed(1000) };
        let mut world = between_devices(&mut from, &mut to, weather);
        for _ in 0..turns {
            world.progress(1);
            world.progress(0);
        }
        for _ in 0..50 {
            world.progress(0);
        }
        world.net.borrow_mut().lose_windows(0, 1, Prepared::Ready);
        // A rest without events need not be the end.
        (0..10).for_each(|_| world.settle());
        assert_eq!(world.received(1).len, LEN, "after {turns} turns");
        assert!(matches!(world.sends(0)[..], [Ok(_)]));
        assert!(to.0 == from.0);
        world.assert_empty();
        drop(world);
        assert_eq!((mover::under_way(), mover::buffers().0), (0, 0));
    }
}

/// The kernel's queue pairs may read them still.
#[test]
fn copies_of_writes_on_a_lost_lane_stay_until_their_message_ends() {
    let mut kept = 0;
    for turns in 0..40 {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let mut world = between_devices(&mut from, &mut to, glazed(1000));
        for _ in 0..turns {
            world.progress(1);
            world.progress(0);
        }
        world.net.borrow_mut().lose_windows(0, 1, Prepared::Ready);
        // The receiver does not know yet.
        while !world.node(0).engine.core.sends.wrote.is_empty() {
            world.progress(0);
        }
        let pending = world.node(0).engine.core.sends.pending.iter().next();
        kept += pending.map_or(0, |(_, pending)| pending.message.lent.len());
        (0..10).for_each(|_| world.settle());
        world.received(1);
        assert!(matches!(world.sends(0)[..], [Ok(_)]));
        assert!(to.0 == from.0);
        world.assert_empty();
        assert_eq!((mover::under_way(), mover::buffers().0), (0, 0));
    }
    assert!(kept > 10, "{kept} copies");
}

/// A receive for which there is no remote buffer now does not take a bounce buffer to find that out.
#[test]
fn waiting_receives_take_no_bounce_buffers() {
    const WAITING: usize = 5;
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    let windows = Glazing { count: 4, max: 1000, min: 2000, ..Glazing::none() };
    let mut world = World::new(2, Weather { windows, ..apart(0) }, LIMITS);
    let peer = world.peer(0, 1);
    for context in 0..WAITING {
        let receive = receive_op(&mut to, context as u64);
        let segments = receive.segments.as_device(1);
        world.receive(1, &ReceiveOp { segments, ..receive }).unwrap();
        let plain = send_op(peer, &mut from, context as u64);
        world.send(0, &SendOp { payload: plain.payload.as_device(1), ..plain }).unwrap();
    }
    for _ in 0..100 {
        world.progress(1);
    }
    assert_eq!(world.node(1).engine.core.arrivals.active.len(), WAITING);
    let taken = mover::taken();
    for _ in 0..100 {
        world.progress(1);
    }
    assert_eq!(mover::taken(), taken, "nothing has happened meanwhile");
    world.settle();
    assert!(world.receives(1).iter().all(Result::is_ok));
    assert!(world.sends(0).iter().all(Result::is_ok));
    assert!(to.0 == from.0);
    world.assert_empty();
}

/// A device that does not say when it has written (the rv module, if nobody asks it) has few copies of a message at a time too.
#[test]
fn copies_for_a_silent_device_are_given_back() {
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    mover::forget_buffers();
    let windows = Glazing { silent: true, ..glazed(1000).windows };
    let mut world = between_devices(&mut from, &mut to, Weather { windows, ..glazed(1000) });
    world.settle();
    world.received(1);
    assert!(matches!(world.sends(0)[..], [Ok(_)]));
    assert!(to.0 == from.0);
    let (now, most) = mover::buffers();
    assert!(now == 0 && most < LEN / 1000 / 2, "{now} of {most} buffers");
    world.assert_empty();
}

/// Two endpoints; the first one writes device memory to a region of the other one's.
fn written(from: &mut Memory, to: &mut Memory) -> World {
    let mut world = World::new(2, apart(0), LIMITS);
    let peer = world.peer(0, 1);
    world.register(1, 7, to, &[Write]);
    let plain = rma_op(peer, Write, from, 7, 1);
    let local = lend(&mut from.0, &[LEN / 3, LEN / 2]).as_device(5);
    world.access(0, &RmaOp { local, data: Some(3), ..plain }).unwrap();
    world
}

#[test]
fn parts_of_a_write_are_copied_while_earlier_ones_are_sent() {
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    mover::forget_buffers();
    let mut world = written(&mut from, &mut to);
    sent_beside_copies(&mut world, |world| {
        if mover::under_way() > 0 {
            assert!(world.node(0).engine.is_busy(), "no event tells of the end of a copy");
        }
    });
    assert!(matches!(world.reports(0, Direction::Write)[..], [Ok(_)]));
    assert!(to.0 == from.0);
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn a_write_of_which_a_copy_fails_ends_with_an_error() {
    for nth in 0.. {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        to.0.fill(0xee);
        mover::fail(nth);
        let mut world = written(&mut from, &mut to);
        world.settle();
        let failed = !mover::still_fails();
        let ended = world.reports(0, Direction::Write);
        let seen = world.accesses(1).len();
        match ended[..] {
            [Ok(_)] => assert!(!failed && to.0 == from.0),
            [Err(failure)] => assert!(failed && failure.error == libc::EIO, "{failure:?}"),
            ref other => panic!("{other:?}"),
        }
        assert_eq!(seen, usize::from(!failed), "the target's report when copy {nth} fails");
        let here = to.0.iter().zip(&from.0).take_while(|(to, from)| to == from).count();
        assert!(to.0[here..].iter().all(|byte| *byte == 0xee), "bytes behind those that came");
        // The next write goes as ever.
        let peer = world.peer(0, 1);
        world.access(0, &rma_op(peer, Write, &mut from, 7, 2)).unwrap();
        world.settle();
        assert!(matches!(world.reports(0, Direction::Write)[..], [Ok(_)]));
        assert!(world.accesses(1).len() == 1 && to.0 == from.0);
        world.assert_empty();
        if !failed {
            assert!(nth > 50, "each part is copied");
            break;
        }
    }
}

#[test]
fn copies_of_a_write_end_with_it() {
    for turns in 0..12 {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let mut world = written(&mut from, &mut to);
        for _ in 0..turns {
            world.progress(1);
            world.progress(0);
        }
        world.leave(1, Departure::Failed(Errno(libc::EHOSTDOWN)));
        world.settle();
        assert!(matches!(world.reports(0, Direction::Write)[..], [Err(_)]));
        drop(world);
        assert_eq!((mover::under_way(), mover::buffers().0), (0, 0));
    }
}

/// A message between lists of short ranges, of devices and of the host.
#[test]
fn many_ranges_go_through_few_bounce_buffers() {
    let cuts = [[400, LEN / 3, LEN / 2], [LEN / 2, LEN / 2 + 10, LEN / 2 + 1210]];
    for (which, other) in [(15, 15), (15, 9), (5, 10), (8, 1), (15, 0), (0, 15)] {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        mover::forget_buffers();
        let mut world = World::new(2, glazed(1000), LIMITS);
        let peer = world.peer(0, 1);
        let segments = lend(&mut to.0, &cuts[1]).as_device(other);
        world.receive(1, &ReceiveOp { segments, ..receive_op(&mut to, 2) }).unwrap();
        let payload = lend(&mut from.0, &cuts[0]).as_device(which);
        world.send(0, &SendOp { payload, ..send_op(peer, &mut from, 1) }).unwrap();
        world.settle();
        world.received(1);
        assert!(matches!(world.sends(0)[..], [Ok(_)]));
        assert!(to.0 == from.0, "{which} {other}");
        let counts = world.node(0).engine.counts();
        let by_buffers = (counts.window_bytes, counts.fragment_bytes);
        assert_eq!(by_buffers, (LEN as u64, 0), "{which} {other}");
        let (now, most) = mover::buffers();
        assert!(now == 0 && most < LEN / 1000 / 2, "{now} of {most} buffers");
        world.assert_empty();
    }
}
