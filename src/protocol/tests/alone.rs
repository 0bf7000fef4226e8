//! One-sided operations without a turn of the target, one behaviour a test.

use super::fixture::{LIMITS, Memory, Report, World, remote, rma_op};
use super::sim::{Reach, Weather};
use crate::memory::keys::Right;
use crate::memory::keys::Right::{Read, Write};
use crate::protocol::{Direction, Limits, RmaOp};

const KEY: u64 = 42;
const BOTH: [Right; 2] = [Read, Write];
const LEN: usize = 3000;

fn world(get: Reach, put: Reach) -> World {
    let weather = Weather { get: vec![get], put: vec![put], ..Weather::fair() };
    World::new(2, weather, Limits { alone_min: 1000, ..LIMITS })
}

fn ended(world: &mut World) -> Vec<Report> {
    let mut all = world.reports(0, Direction::Write);
    all.extend(world.reports(0, Direction::Read));
    all
}

/// Endpoint 0 writes and reads region `KEY` of 1 once, and is told of it.
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

/// What the target has to hear of, what is short, and what it may not do.
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
    // The new one it knows by now.
    world.accesses(1);
    world.access(0, &rma_op(peer, Write, &mut local, KEY, 6)).unwrap();
    assert_eq!(ended(&mut world).len(), 1);
    world.settle();
    world.assert_empty();
}

#[test]
fn what_was_sent_before_comes_before() {
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

/// More than one turn's worth; nothing arrives meanwhile, so that who waits has to go on by itself.
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
