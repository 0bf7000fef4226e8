//! A device fails while it copies: every operation ends on both sides, with an error wherever bytes are wrong.

use super::fixture::{LIMITS, Memory, Node, World, lend, receive_op, rma_op, send_op};
use super::sim::{Reach, Weather};
use super::sim_window::Glazing;
use crate::memory::keys::Right::{Read, Write};
use crate::memory::mover::tests as mover;
use crate::protocol::sends::Sender;
use crate::protocol::{Cause, Direction, Limits, ReceiveOp, RmaOp, SendOp};

const KEY: u64 = 42;
/// The first eager, the others announced: in fewer packets than one, and in several.
const LENS: [usize; 3] = [200, 1500, 20_000];

fn weathers() -> [Weather; 3] {
    let fair = Weather::fair();
    // Fragments that the receiver asks for; unsolicited data; a stream.
    [
        Weather { push_max: 0, ..fair.clone() },
        Weather { push_max: 1 << 20, ..fair.clone() },
        Weather { push_max: 1 << 20, stream_max: 5000, ..fair },
    ]
}

/// Lets the copies of a story fail, each once, until it has none left. `story`: copies that fail make it return true.
fn each_copy_fails(mut story: impl FnMut(&mut World, usize) -> bool) {
    for weather in weathers() {
        for len in LENS {
            let mut failures = 0;
            for nth in 0.. {
                assert!(nth < 200, "the story has no end");
                mover::fail(nth);
                let mut world = World::new(2, weather.clone(), LIMITS);
                let failed = story(&mut world, len);
                if mover::still_fails() {
                    assert!(!failed, "nothing has failed");
                    break;
                }
                failures += usize::from(failed);
                world.assert_empty();
            }
            // A stream breaks, and the bytes come once more.
            let recovers = weather.stream_max > 0 && len > LIMITS.eager_max;
            assert!(failures > 0 || recovers, "{len} bytes: no failure was reported");
        }
    }
}

/// What the receiver reports, and whether the bytes are right.
fn received(world: &mut World, right: bool) -> bool {
    match world.reports(1, Direction::Receive)[..] {
        [Ok(_)] => {
            assert!(right, "wrong bytes");
            false
        }
        [Err(failure)] => {
            assert_eq!((failure.error, failure.cause), (libc::EIO, Cause::BufferUnwritable));
            true
        }
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn a_receive_into_device_memory_ends() {
    for (delivery, early) in [(false, true), (true, true), (false, false), (true, false)] {
        each_copy_fails(|world, len| {
            let peer = world.peer(0, 1);
            let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
            let segments = lend(&mut to.0, &[len / 3]).as_device(3);
            let receive = ReceiveOp { segments, ..receive_op(&mut to, 2) };
            let send = SendOp { delivery, ..send_op(peer, &mut from, 1) };
            if early {
                world.receive(1, &receive).unwrap();
            }
            world.send(0, &send).unwrap();
            world.settle();
            if !early {
                world.receive(1, &receive).unwrap();
                world.settle();
            }
            let failed = received(world, to.0 == from.0);
            match world.sends(0)[..] {
                [Ok(_)] => assert!(!(failed && delivery), "it was not delivered"),
                [Err(failure)] => {
                    assert!(failed, "{failure:?}");
                    assert_eq!(failure.error, libc::EIO);
                }
                ref other => panic!("{other:?}"),
            }
            failed
        });
    }
}

/// The message goes in packets, and is copied part by part; the last one of some that begin to be copied fails too.
#[test]
fn a_send_from_device_memory_ends() {
    for weather in weathers() {
        let off = vec![Reach::Off];
        let weather = Weather { get: off.clone(), put: off, ..weather };
        for (nth, delivery) in (0..200).map(|n| (n, n % 2 == 0)) {
            let len = 20_000;
            mover::fail(nth);
            let mut world = World::new(2, weather.clone(), LIMITS);
            let peer = world.peer(0, 1);
            let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
            let plain = send_op(peer, &mut from, 1);
            let payload = plain.payload.as_device(1);
            world.receive(1, &receive_op(&mut to, 2)).unwrap();
            world.send(0, &SendOp { payload, delivery, ..plain }).unwrap();
            // More than once: a stream that nobody waits for may rest for some turns.
            for _ in 0..10 {
                world.settle();
            }
            let failed = !mover::still_fails();
            match (&world.sends(0)[..], &world.reports(1, Direction::Receive)[..]) {
                ([Ok(_)], [Ok(_)]) => assert!(!failed && to.0 == from.0),
                ([Err(sent)], [Err(received)]) => {
                    assert!(failed, "{sent:?}");
                    assert_eq!((sent.error, sent.cause), (libc::EIO, Cause::SenderUnreadable));
                    assert_eq!(received.cause, Cause::SenderUnreadable);
                }
                other => panic!("{nth}: {other:?}"),
            }
            world.assert_empty();
            assert_eq!((mover::under_way(), mover::buffers().0), (0, 0));
            if !failed {
                assert!(nth >= 40, "{nth}: two failures for each part");
                break;
            }
        }
    }
}

/// A copy fails at either side. One at the sender may be made again for a fragment.
#[test]
fn a_message_in_remote_buffers_ends() {
    let windows = Glazing { max: 3500, min: 2000, ..Glazing::none() };
    let off = vec![Reach::Off];
    let weather = Weather { get: off.clone(), put: off, windows, ..weathers()[0].clone() };
    let (mut failures, len) = (0, 20_000);
    for nth in 0.. {
        mover::fail(nth);
        let mut world = World::new(2, weather.clone(), LIMITS);
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
        let receive = receive_op(&mut to, 2);
        let segments = receive.segments.as_device(1);
        world.receive(1, &ReceiveOp { segments, ..receive }).unwrap();
        let plain = send_op(peer, &mut from, 1);
        let payload = plain.payload.as_device(1);
        world.send(0, &SendOp { payload, delivery: true, ..plain }).unwrap();
        world.settle();
        let failed = !mover::still_fails();
        let received = world.reports(1, Direction::Receive);
        match (&world.sends(0)[..], &received[..]) {
            ([Ok(_)], [Ok(_)]) => assert!(to.0 == from.0),
            ([Err(sent)], [Err(received)]) => {
                assert!(failed, "{sent:?}");
                assert_eq!((sent.error, received.error), (libc::EIO, libc::EIO));
                failures += 1;
            }
            other => panic!("{nth}: {other:?}"),
        }
        world.assert_empty();
        assert_eq!((mover::under_way(), mover::buffers().0), (0, 0));
        if !failed {
            assert!(nth >= 80, "{nth}: two failures for each part at each side");
            break;
        }
    }
    assert!(failures > 20, "{failures}");
}

/// The receiver says so, because it was told, while the device still writes other bytes of the message.
#[test]
fn a_send_that_cannot_be_read_fails_by_its_own_device_in_the_end() {
    let mut world = World::new(2, weathers()[0].clone(), LIMITS);
    let peer = world.peer(0, 1);
    let mut from = Memory::pattern(0, 20_000);
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    let Node { engine, host, .. } = world.node(0);
    let core = &mut engine.core;
    let key = core.sends.pending.keys_where(|_| true)[0];
    let send = core.sends.pending.get_mut(key).unwrap();
    send.message.unreadable = true;
    send.scheme = Sender::Finished(libc::EFAULT as u32);
    core.on_released(peer, key, host);
    let reports = world.sends(0);
    let [Err(failure)] = reports[..] else { panic!("{reports:?}") };
    assert_eq!((failure.error, failure.cause), (libc::EIO, Cause::SenderUnreadable));
}

#[test]
fn writes_to_and_reads_from_device_memory_end() {
    for (right, remote) in [(Write, true), (Write, false), (Read, true), (Read, false)] {
        each_copy_fails(|world, len| {
            let peer = world.peer(0, 1);
            let (mut region, mut local) = (Memory::pattern(1, len), Memory::pattern(2, len));
            let wanted = if right == Write { local.0.clone() } else { region.0.clone() };
            let target = lend(&mut region.0, &[]).as_device(u8::from(remote));
            world.register_list(1, KEY, target, &[Read, Write]);
            let plain = rma_op(peer, right, &mut local, KEY, 1);
            let op = RmaOp { local: plain.local.as_device(u8::from(!remote)), ..plain };
            world.access(0, &op).unwrap();
            world.settle();
            world.accesses(1);
            let direction = if right == Write { Direction::Write } else { Direction::Read };
            match world.reports(0, direction)[..] {
                [Ok(_)] => {
                    assert!(region.0 == wanted && local.0 == wanted, "wrong bytes");
                    false
                }
                [Err(failure)] => {
                    assert_eq!(failure.error, libc::EIO, "{failure:?}");
                    true
                }
                ref other => panic!("{other:?}"),
            }
        });
    }
}

/// Behind a fence the message is sent when the fence opens: its bytes are read only then.
#[test]
fn a_send_from_device_memory_behind_a_fence_ends() {
    for eager_max in [0, 1000] {
        for nth in 0..2 {
            mover::fail(nth);
            let limits = Limits { eager_max, ..LIMITS };
            let mut world = World::new(2, Weather::fair(), limits);
            let peer = world.peer(0, 1);
            let len = 1000;
            let (mut before, mut from) = (Memory::zeroed(5000), Memory::pattern(0, len));
            let (mut first, mut to) = (Memory::zeroed(5000), Memory::zeroed(len));
            let delivery = SendOp { delivery: true, ..send_op(peer, &mut before, 1) };
            world.send(0, &delivery).unwrap();
            let plain = send_op(peer, &mut from, 2);
            let fenced = SendOp { payload: plain.payload.as_device(1), fence: true, ..plain };
            world.send(0, &fenced).unwrap();
            world.receive(1, &receive_op(&mut first, 3)).unwrap();
            world.settle();
            world.received(1);
            world.receive(1, &receive_op(&mut to, 4)).unwrap();
            world.settle();
            let failed = !mover::still_fails();
            assert_eq!(failed, nth == 0, "it is read once");
            let sent = world.sends(0);
            assert!(matches!(sent[..], [Ok(_), last] if last.is_err() == failed), "{sent:?}");
            if failed {
                assert!(world.cancel(1, 4));
                world.reports(1, Direction::Receive);
            } else {
                world.received(1);
                assert!(to.0 == from.0);
            }
            world.assert_empty();
        }
    }
}
