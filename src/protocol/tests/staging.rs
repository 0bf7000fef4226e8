//! Messages in device memory that are sent in packets: the copy of one part runs while another one is sent.

use super::fixture::{LIMITS, Memory, World, lend, receive_op, send_op};
use super::sim::{Reach, Weather};
use crate::memory::mover::tests as mover;
use crate::protocol::packet::Packet;
use crate::protocol::{Limits, SendOp};
use crate::sys::Errno;
use crate::transport::Departure;

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
        let (mut before, mut overlaps) = (0, 0);
        for _ in 0..10_000 {
            world.progress(0);
            let counts = world.node(0).engine.counts();
            let moved = counts.fragment_bytes + counts.stream_bytes;
            overlaps += usize::from(moved > before && mover::under_way() > 0);
            before = moved;
            world.progress(1);
        }
        assert_eq!(before, LEN as u64);
        assert!(overlaps > 10, "bytes were sent while others were copied {overlaps} times");
        assert_eq!(mover::buffers(), (0, 4), "as many buffers as four parts need");
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
