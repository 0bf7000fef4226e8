//! An endpoint sleeps only when nothing is left that it could do: [`World::progress`] and [`World::settle`] check that.
//! Here something is left when a turn ends, and no event would tell of it.

use super::alone::{BOTH, KEY, LEN, distant, introduce};
use super::fixture::{LIMITS, Memory, World, receive_op, rma_op, send_op};
use super::sim::{Reach, Weather};
use super::sim_window::Glazing;
use super::windows::{self, Begun, glazing};
use crate::memory::SegmentList;
use crate::memory::keys::Right::{Read, Write};
use crate::protocol::packet::Packet;
use crate::protocol::{Collective, CollectiveOp, Direction, Limits, ReceiveOp, Report, SendOp};
use crate::transport::PeerId;

/// More than one turn sends.
const LONG: usize = 200_000;

/// A network with room for all, that tells a refused sender when there is room (`announces`) or does not.
fn weather(announces: bool) -> Weather {
    let off = vec![Reach::Off];
    Weather {
        queue_len: 1000,
        announces_room: announces,
        get: off.clone(),
        put: off,
        ..Weather::fair()
    }
}

/// The packets that `at` sends to `to` until it may sleep, while nothing arrives.
fn sent_before_rest(world: &mut World, at: usize, to: usize) -> usize {
    while world.node(at).engine.is_busy() {
        world.progress(at);
    }
    world.node(at).check_rest();
    world.net.borrow().queued(at, to)
}

#[test]
fn a_write_in_many_packets_goes_on_in_each_turn() {
    for announces in [false, true] {
        let mut world = World::new(2, weather(announces), LIMITS);
        let (mut region, mut from) = (Memory::zeroed(LONG), Memory::pattern(1, LONG));
        world.register(1, 7, &mut region, &[Write]);
        let peer = world.peer(0, 1);
        world.access(0, &rma_op(peer, Write, &mut from, 7, 1)).unwrap();
        assert!(sent_before_rest(&mut world, 0, 1) > LONG / world.net.borrow().weather.bcopy_max);
        world.settle();
        assert!(region.0 == from.0);
        assert_eq!((world.reports(0, Direction::Write).len(), world.accesses(1).len()), (1, 1));
        world.assert_empty();
    }
}

#[test]
fn a_read_in_many_packets_goes_on_in_each_turn() {
    for announces in [false, true] {
        let mut world = World::new(2, weather(announces), LIMITS);
        let (mut region, mut to) = (Memory::pattern(1, LONG), Memory::zeroed(LONG));
        world.register(1, 7, &mut region, &[Read]);
        let peer = world.peer(0, 1);
        world.access(0, &rma_op(peer, Read, &mut to, 7, 1)).unwrap();
        world.progress(0);
        world.progress(1); // the request
        assert!(sent_before_rest(&mut world, 1, 0) > LONG / world.net.borrow().weather.bcopy_max);
        world.settle();
        assert!(region.0 == to.0);
        assert_eq!((world.reports(0, Direction::Read).len(), world.accesses(1).len()), (1, 1));
        world.assert_empty();
    }
}

#[test]
fn unsolicited_bytes_follow_a_message_that_waited_for_a_fence() {
    for (stream_max, announces) in [(0, false), (0, true), (500, true)] {
        let weather = Weather { push_max: LONG, stream_max, ..weather(announces) };
        let mut world = World::new(2, weather, LIMITS);
        let peer = world.peer(0, 1);
        let (mut first, mut second) = (Memory::pattern(1, 8), Memory::pattern(2, LONG));
        let (mut a, mut b) = (Memory::zeroed(8), Memory::zeroed(LONG));
        world.receive(1, &receive_op(&mut a, 1)).unwrap();
        world.receive(1, &receive_op(&mut b, 2)).unwrap();
        world.send(0, &SendOp { delivery: true, ..send_op(peer, &mut first, 3) }).unwrap();
        world.send(0, &SendOp { fence: true, ..send_op(peer, &mut second, 4) }).unwrap();
        world.progress(1);
        world.progress(0); // the answer to the first one
        sent_before_rest(&mut world, 0, 1);
        // A stream pauses at random.
        (0..10).for_each(|_| world.settle());
        assert!(b.0 == second.0);
        assert_eq!((world.sends(0).len(), world.receives(1).len()), (2, 2));
        world.assert_empty();
    }
}

/// A peer that sees the pressure does not send the rest until it is asked.
#[test]
fn a_receiver_short_of_memory_asks_for_the_rest_at_once() {
    let limits = Limits { unexpected_max: 1000, ..LIMITS };
    let mut world = World::new(2, Weather { push_max: LONG, ..weather(true) }, limits);
    let peer = world.peer(0, 1);
    let mut from = [LONG, 5000].map(|len| Memory::pattern(1, len));
    let mut to = [LONG, 5000].map(Memory::zeroed);
    let wanted = [0, 1].map(|i| ReceiveOp { tagged: i == 1, ..receive_op(&mut to[i], 1) });
    world.receive(1, &wanted[0]).unwrap();
    for (i, memory) in from.iter_mut().enumerate() {
        world.send(0, &SendOp { tagged: i == 1, ..send_op(peer, memory, 2) }).unwrap();
    }
    while !world.net.borrow().is_pressed(1) {
        world.progress(1);
    }
    assert!(matches!(world.on_wire(1, 0)[..], [Packet::Cts { .. }]));
    world.settle();
    world.receive(1, &wanted[1]).unwrap();
    world.settle();
    assert!(to[0].0 == from[0].0 && to[1].0 == from[1].0);
    assert_eq!((world.sends(0).len(), world.receives(1).len()), (2, 2));
    world.assert_empty();
}

/// The network of these tests refuses no write while a device has no room for it, and says only then what the device cannot do.
#[test]
fn a_device_without_room_is_waited_for() {
    let world = windows::world(glazing(), 2);
    world.net.borrow_mut().weather.announces_room = true;
    let mut begun = Begun::on(world);
    let set = |begun: &mut Begun, room, refusals| {
        let mut net = begun.world.net.borrow_mut();
        net.weather.queue_len = room;
        net.weather.windows.write_refusals = refusals;
    };
    set(&mut begun, 1, 0);
    begun.world.progress(0);
    assert!(begun.world.node(0).engine.core.sends.due.len() > 1, "some are to be written");
    set(&mut begun, 1, 100);
    begun.world.progress(0);
    set(&mut begun, 1000, 0);
    assert_eq!(begun.finish().node(0).engine.counts().declined, 0);
}

/// The same for direct RMA.
#[test]
fn a_device_without_room_for_direct_operations_is_waited_for() {
    let mut world = distant(Glazing { count: 1, ..Glazing::none() });
    world.net.borrow_mut().weather.announces_room = true;
    let mut region = Memory::zeroed(LEN);
    world.register(1, KEY, &mut region, &BOTH);
    introduce(&mut world);
    let peer = world.peer(0, 1);
    let reached = |world: &mut World| world.node(0).engine.counts().reached_bytes;
    let before = reached(&mut world);
    let mut from = [1, 2].map(|seed| Memory::pattern(seed, LEN));
    for memory in &mut from {
        world.access(0, &rma_op(peer, Write, memory, KEY, 1)).unwrap();
        world.net.borrow_mut().weather.windows.write_refusals = 100;
    }
    world.node(0).check_rest();
    world.net.borrow_mut().weather.windows.write_refusals = 0;
    world.settle();
    assert_eq!(reached(&mut world) - before, 2 * LEN as u64);
    assert_eq!(world.reports(0, Direction::Write).len(), 2);
    assert!(region.0 == from[1].0);
    world.assert_empty();
}

#[test]
fn the_messages_of_a_collective_operation_go_on_in_each_turn() {
    let mut world = World::new(3, weather(true), LIMITS);
    let ids = [0, 1, 2].map(|me| {
        let peers: Vec<PeerId> = (0..3).map(|to| world.peer(me, to)).collect();
        let node = world.node(me);
        node.engine.join(&peers, me, 77, 1, false, &mut node.host).unwrap()
    });
    world.settle();
    let mut from = Memory::pattern(1, LONG);
    for (me, group) in ids.into_iter().enumerate() {
        let node = world.node(me);
        assert_eq!(std::mem::take(&mut node.host.joined), [(group, Ok(()))]);
        let op = CollectiveOp {
            group,
            what: Collective::Scatter { root: 0 },
            block: LONG / 3,
            reduction: None,
            input: from.list(),
            output: SegmentList::EMPTY,
            context: 1,
            report: Report::new(true, 0),
        };
        node.engine.collective(&op, &mut node.host).unwrap();
    }
    world.settle();
    for me in 0..3 {
        assert_eq!(world.reports(me, Direction::Collective).len(), 1);
    }
    world.assert_empty();
}
