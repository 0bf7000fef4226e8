//! Multi-receive buffers, which take several messages.

use super::fixture::{LIMITS, Memory, World, receive_op, send_op};
use super::sim::{Reach, Weather};
use crate::protocol::{Cause, Completion, FI_ETRUNC, ReceiveOp};
use crate::sys::Errno;
use crate::transport::Departure;

fn multi(memory: &mut Memory, context: u64, min_free: usize) -> ReceiveOp {
    ReceiveOp { multi_min: Some(min_free), ..receive_op(memory, context) }
}

fn send(world: &mut World, memory: &mut Memory) {
    let peer = world.peer(0, 1);
    world.send(0, &send_op(peer, memory, 0)).unwrap();
    world.settle();
}

fn place(c: &Completion, memory: &Memory) -> usize {
    (c.buffer - memory.0.as_ptr() as u64) as usize
}

#[test]
fn messages_are_placed_one_behind_the_other_until_less_than_the_minimum_is_free() {
    for early in [true, false] {
        let mut world = World::pair();
        let (mut a, mut b, mut c) =
            (Memory::pattern(1, 100), Memory::pattern(2, 3000), Memory::pattern(3, 150));
        let mut to = Memory::zeroed(3500);
        if early {
            world.receive(1, &multi(&mut to, 7, 300)).unwrap();
        }
        for memory in [&mut a, &mut b, &mut c] {
            send(&mut world, memory);
        }
        if !early {
            world.receive(1, &multi(&mut to, 7, 300)).unwrap();
            world.settle();
        }
        let mut got: Vec<_> = world.receives(1).iter().map(|r| r.unwrap()).collect();
        got.sort_by_key(|c| c.buffer);
        let places: Vec<_> = got.iter().map(|c| (place(c, &to), c.len)).collect();
        assert_eq!(places, [(0, 100), (100, 3000), (3100, 150)]);
        assert_eq!(got.iter().filter(|c| c.buffer_released).count(), 1);
        assert!(to.0[..100] == a.0 && to.0[100..3100] == b.0 && to.0[3100..3250] == c.0);
        assert_eq!(world.sends(0).len(), 3);
        world.assert_empty();
    }
}

#[test]
fn the_buffer_is_released_with_the_last_message_to_be_placed() {
    let weather = Weather { get: vec![Reach::Off], put: vec![Reach::Off], ..Weather::fair() };
    let mut world = World::new(2, weather, LIMITS);
    let (mut long, mut short) = (Memory::pattern(1, 3000), Memory::pattern(2, 100));
    let mut to = Memory::zeroed(3100);
    world.receive(1, &multi(&mut to, 7, 1)).unwrap();
    let peer = world.peer(0, 1);
    world.send(0, &send_op(peer, &mut long, 0)).unwrap();
    world.send(0, &send_op(peer, &mut short, 0)).unwrap();
    while world.node(1).engine.core.matching.own.posted.len() > 0 {
        world.progress(1);
    }
    let c = world.received(1);
    assert_eq!((place(&c, &to), c.len, c.buffer_released), (3000, 100, false));
    world.settle();
    let c = world.received(1);
    assert_eq!((place(&c, &to), c.len, c.buffer_released), (0, 3000, true));
    assert_eq!(world.sends(0).len(), 2);
    world.assert_empty();
}

#[test]
fn a_message_that_does_not_fit_the_rest_is_cut() {
    for len in [200, 5000] {
        let mut world = World::pair();
        let (mut a, mut b) = (Memory::pattern(1, 100), Memory::pattern(2, len));
        let mut to = Memory::zeroed(150);
        world.receive(1, &multi(&mut to, 7, 50)).unwrap();
        send(&mut world, &mut a);
        assert!(!world.received(1).buffer_released);
        send(&mut world, &mut b);
        let f = world.receive_failed(1);
        assert_eq!((f.error, f.overflow, f.completion.len), (FI_ETRUNC, len - 50, 50));
        assert!(f.completion.buffer_released);
        assert!(to.0[100..] == b.0[..50]);
        assert_eq!(world.sends(0).len(), 2);
        world.assert_empty();
    }
}

#[test]
fn an_empty_message_has_a_place_too() {
    let mut world = World::pair();
    let (mut a, mut none) = (Memory::pattern(1, 100), Memory::zeroed(0));
    let mut to = Memory::zeroed(150);
    world.receive(1, &multi(&mut to, 7, 1)).unwrap();
    send(&mut world, &mut a);
    world.received(1);
    send(&mut world, &mut none);
    let c = world.received(1);
    assert_eq!((place(&c, &to), c.len), (100, 0));
}

#[test]
fn cancelling_an_idle_buffer_releases_it() {
    let mut world = World::pair();
    let (mut a, mut to) = (Memory::pattern(1, 10), Memory::zeroed(100));
    world.receive(1, &multi(&mut to, 7, 1)).unwrap();
    send(&mut world, &mut a);
    world.received(1);
    assert!(world.cancel(1, 7));
    let f = world.receive_failed(1);
    assert_eq!((f.error, f.cause), (libc::ECANCELED, Cause::Cancelled));
    assert!(f.completion.buffer_released);
    assert!(!world.cancel(1, 7));
    world.sends(0);
    world.assert_empty();
}

#[test]
fn cancelling_a_buffer_waits_for_the_message_in_flight() {
    let weather = Weather { get: vec![Reach::Off], put: vec![Reach::Off], ..Weather::fair() };
    let mut world = World::new(2, weather, LIMITS);
    let (mut long, mut other) = (Memory::pattern(1, 3000), Memory::pattern(2, 10));
    let mut to = Memory::zeroed(9000);
    world.receive(1, &multi(&mut to, 7, 1)).unwrap();
    let peer = world.peer(0, 1);
    world.send(0, &send_op(peer, &mut long, 0)).unwrap();
    while world.node(1).engine.core.arrivals.active.is_empty() {
        world.progress(1);
    }
    assert!(world.cancel(1, 7));
    assert!(world.receives(1).is_empty());
    send(&mut world, &mut other);
    let reports = world.receives(1);
    let [Ok(done), Err(f)] = reports[..] else { panic!("{reports:?}") };
    assert_eq!((done.len, done.buffer_released), (3000, false));
    assert_eq!((f.error, f.cause), (libc::ECANCELED, Cause::Cancelled));
    assert_eq!((f.completion.context, f.completion.buffer_released), (7, true));
    assert!(to.0[..3000] == long.0);
    world.receive(1, &receive_op(&mut to, 8)).unwrap();
    assert_eq!(world.received(1).len, 10);
    assert_eq!(world.sends(0).len(), 2);
    world.assert_empty();
}

#[test]
fn a_sender_that_dies_leaves_the_buffer_posted_or_releases_it() {
    for fills in [false, true] {
        let weather = Weather { get: vec![Reach::Off], put: vec![Reach::Off], ..Weather::fair() };
        let mut world = World::new(2, weather, LIMITS);
        let (mut long, mut to) = (Memory::pattern(1, 3000), Memory::zeroed(3100));
        let min_free = if fills { 200 } else { 100 };
        world.receive(1, &multi(&mut to, 7, min_free)).unwrap();
        let peer = world.peer(0, 1);
        world.send(0, &send_op(peer, &mut long, 0)).unwrap();
        while world.node(1).engine.core.arrivals.active.is_empty() {
            world.progress(1);
        }
        world.leave(0, Departure::Failed(Errno(libc::EHOSTDOWN)));
        world.settle();
        let f = world.receive_failed(1);
        assert_eq!((f.error, f.cause), (libc::EHOSTUNREACH, Cause::PeerDied));
        assert_eq!(f.completion.buffer_released, fills);
        assert_eq!(world.cancel(1, 7), !fills);
        world.receives(1);
        world.assert_empty();
    }
}
