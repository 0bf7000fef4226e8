//! An endpoint with many peers: what it does for one of them does not lead it through all others.

use super::fixture::{LIMITS, Memory, Node, World, receive_op, send_op, source};
use super::sim::{Reach, Weather};
use crate::protocol::index_list::Key;
use crate::protocol::packet::Packet;
use crate::protocol::schemes::eager::Tracked;
use crate::protocol::sends::What;
use crate::protocol::{Limits, ReceiveOp};
use crate::sys::Errno;
use crate::transport::{Departure, Mark, PeerId, comparisons_of};

const PEERS: usize = 200;
/// A few comparisons for each peer, and by far not one for each pair of peers.
const FEW: usize = 10 * PEERS;

/// An endpoint whose messages to all peers wait for room.
fn with_full_peers() -> (World, Vec<PeerId>) {
    let mut world = World::new(PEERS + 1, Weather::fair(), LIMITS);
    let peers = (1..=PEERS).map(|slot| world.peer(0, slot)).collect();
    world.net.borrow_mut().weather.queue_len = 0;
    (world, peers)
}

#[test]
fn an_acknowledgement_completes_the_sends_to_its_peer_alone() {
    let mut tracked = Tracked::default();
    let mark = |psn| Mark { connection: 1, psn };
    let taken = comparisons_of(|| {
        for peer in 0..PEERS as u32 {
            tracked.add(PeerId(peer), mark(1), Key::from_wire(1));
            tracked.add(PeerId(peer), mark(2), Key::from_wire(2));
        }
        // From the middle, so that others change their places.
        for peer in (0..PEERS as u32).map(|n| PeerId((n + PEERS as u32 / 2) % PEERS as u32)) {
            assert_eq!(tracked.take(peer, mark(1)), None);
            assert_eq!(tracked.take(peer, mark(2)), Some(Key::from_wire(1)));
            assert_eq!(tracked.take(peer, mark(2)), None);
            assert_eq!(tracked.take(peer, mark(3)), Some(Key::from_wire(2)));
            assert_eq!(tracked.take(peer, mark(3)), None);
        }
    });
    assert_eq!(tracked.len(), 0);
    assert!(taken < FEW, "{taken}");
}

#[test]
fn a_peer_that_departs_takes_no_other_sends_along() {
    let mut tracked = Tracked::default();
    let mark = |psn| Mark { connection: 1, psn };
    for peer in 0..4 {
        tracked.add(PeerId(peer), mark(1), Key::from_wire(peer.into()));
    }
    [1, 1, 3].into_iter().for_each(|peer| tracked.forget(PeerId(peer)));
    let mut left: Vec<_> = (0..tracked.len()).filter_map(|at| tracked.peer_at(at)).collect();
    left.sort();
    assert_eq!(left, [0, 2].map(PeerId));
    let keys = [0, 1, 2, 3].map(|peer| tracked.take(PeerId(peer), mark(2)).map(Key::to_wire));
    assert_eq!(keys, [Some(0), None, Some(2), None]);
    assert_eq!(tracked.len(), 0);
}

#[test]
fn operations_behind_the_fences_of_many_peers_wait_at_little_cost() {
    let (mut world, peers) = with_full_peers();
    let node = world.node(0);
    for peer in peers {
        node.engine.core.peers.count_outstanding(peer, 1);
        for n in 0..2 {
            node.engine.core.defer_behind(peer, true, What::Send(Key::from_wire(n)));
        }
    }
    let order = node.engine.core.sends.deferred.clone();
    let taken = comparisons_of(|| assert_eq!(node.engine.advance_deferred(&mut node.host), 0));
    assert_eq!(node.engine.core.sends.deferred, order);
    assert!(taken < FEW, "{taken}");
}

#[test]
fn replies_to_many_full_peers_wait_at_little_cost() {
    let (mut world, peers) = with_full_peers();
    let node = world.node(0);
    for (tx, peer) in (0..).zip(&peers) {
        for status in 0..2 {
            node.engine.core.outbox.reply(*peer, Packet::Fin { tx, status });
        }
    }
    let taken = comparisons_of(|| assert_eq!(node.engine.flush_outbox(&mut node.host), 0));
    assert!(node.engine.core.outbox.receivers().eq(peers.iter().flat_map(|peer| [*peer; 2])));
    assert!(taken < FEW, "{taken}");
}

/// Which of the peers owe a message, asked one after the other, and how many walks through all receives that took.
fn debtors(node: &mut Node, peers: &[PeerId]) -> (Vec<PeerId>, usize) {
    node.host.looks.set(0);
    let owes = |peer: &&PeerId| node.engine.core.is_owed(**peer, &node.host);
    let debtors = peers.iter().filter(owes).copied().collect();
    (debtors, node.host.looks.get())
}

#[test]
fn questions_about_many_peers_are_answered_by_one_walk_through_the_receives() {
    const POSTED: usize = 1000;
    let limits = Limits { rx_max: 2 * POSTED, ..LIMITS };
    let mut world = World::new(PEERS + 1, Weather::fair(), limits);
    let peers: Vec<PeerId> = (1..=PEERS).map(|slot| world.peer(0, slot)).collect();
    let node = world.node(0);
    (1..=PEERS).for_each(|slot| node.host.learn(slot));
    node.host.now_ns = 1;
    let mut memory = Memory::zeroed(8);
    let mut post = |node: &mut Node, slot: usize, context: usize| {
        let source = node.host.source_of_slot(slot);
        let op = ReceiveOp { source, ..receive_op(&mut memory, context as u64) };
        node.receive(&op).unwrap();
    };
    for context in 0..POSTED {
        post(node, 1 + context % (PEERS / 2), context);
    }
    let mut owing = peers[..PEERS / 2].to_vec();
    assert_eq!(debtors(node, &peers), (owing.clone(), 1));
    // A receive is seen a moment later: here at most a millisecond.
    post(node, PEERS, POSTED);
    node.host.now_ns += 500_000;
    assert_eq!(debtors(node, &peers), (owing.clone(), 0));
    node.host.now_ns += 500_000;
    owing.extend(peers.last());
    assert_eq!(debtors(node, &peers), (owing, 1));
}

/// An endpoint to which one peer has announced many messages, all of which it is about to read.
fn with_pulls(count: usize) -> (World, PeerId, [Memory; 2]) {
    let limits = Limits { tx_max: count, rx_max: count, ..LIMITS };
    let weather = Weather { get: vec![Reach::On], queue_len: 2 * count, ..Weather::fair() };
    let mut world = World::new(2, weather, limits);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 1000), Memory::zeroed(1000));
    (0..count).for_each(|n| world.send(0, &send_op(peer, &mut from, n as u64)).unwrap());
    world.settle();
    (0..count).for_each(|n| world.receive(1, &receive_op(&mut to, n as u64)).unwrap());
    assert_eq!(world.node(1).engine.core.arrivals.pulls.len(), count);
    let sender = world.peer(1, 0);
    (world, sender, [from, to])
}

#[test]
fn a_departure_with_many_receives_is_one_walk_through_them() {
    let (mut world, sender, _memory) = with_pulls(PEERS);
    let Node { engine, host } = world.node(1);
    let gone = Departure::Failed(Errno(libc::EHOSTDOWN));
    let taken = comparisons_of(|| engine.core.on_departure(sender, gone, host));
    assert!(taken < FEW, "{taken}");
    world.leave(0, gone);
    world.settle();
    assert_eq!(world.receives(1).len(), PEERS);
    world.assert_empty();
}

#[test]
fn departures_of_many_peers_are_one_walk_through_messages_and_receives() {
    let limits = Limits { rx_max: PEERS, ..LIMITS };
    let weather = Weather { get: vec![Reach::On], batch: 10 * PEERS, ..Weather::fair() };
    let mut world = World::new(PEERS + 1, weather, limits);
    let (mut from, mut to) = (Memory::pattern(0, 1000), Memory::zeroed(1000));
    for slot in 1..=PEERS {
        let peer = world.peer(slot, 0);
        world.send(slot, &send_op(peer, &mut from, 1)).unwrap();
    }
    world.settle();
    assert_eq!(world.node(0).engine.unexpected(), PEERS);
    for slot in 1..=PEERS {
        world.node(0).host.learn(slot);
        let other = ReceiveOp { tagged: true, source: source(slot), ..receive_op(&mut to, 1) };
        world.receive(0, &other).unwrap();
    }
    for slot in 1..=PEERS {
        world.leave(slot, Departure::Failed(Errno(libc::EHOSTDOWN)));
    }
    let mut ended = 0;
    let taken = comparisons_of(|| {
        while ended < PEERS {
            world.node(0).progress();
            ended += world.receives(0).len();
        }
    });
    assert!(taken < FEW, "{taken}");
    (0..PEERS).for_each(|_| world.receive(0, &receive_op(&mut to, 2)).unwrap());
    let lost = world.receives(0);
    assert!(lost.len() == PEERS && lost.iter().all(Result::is_err));
    world.assert_empty();
}

#[test]
fn a_receive_is_queued_once_without_a_search() {
    let (mut world, _, _memory) = with_pulls(PEERS);
    let arrivals = &mut world.node(1).engine.core.arrivals;
    let keys = arrivals.active.keys_where(|_| true);
    let taken = comparisons_of(|| {
        keys.iter().for_each(|key| arrivals.queue_pull(*key));
        assert_eq!(arrivals.pulls.len(), PEERS);
        let first = arrivals.next_pull().unwrap();
        (0..2).for_each(|_| arrivals.queue_pull(first));
        assert_eq!((arrivals.pulls.len(), arrivals.pulls.back()), (PEERS, Some(&first)));
    });
    assert!(taken < FEW, "{taken}");
    world.settle();
    assert_eq!((world.receives(1).len(), world.sends(0).len()), (PEERS, PEERS));
    world.assert_empty();
}

#[test]
fn the_more_operations_wait_the_more_arrives_before_all_of_them_are_tried() {
    const BATCH: usize = 2;
    let (mut world, peers) = with_full_peers();
    let mut net = world.net.borrow_mut();
    (net.weather.queue_len, net.weather.batch) = (64, BATCH);
    drop(net);
    let mut memory = Memory::zeroed(8);
    for slot in 1..=PEERS {
        let peer = world.peer(slot, 0);
        world.send(slot, &send_op(peer, &mut memory, 1)).unwrap();
    }
    world.net.borrow_mut().weather.queue_len = 0;
    let node = world.node(0);
    for (tx, peer) in (0..).zip(&peers) {
        node.engine.core.outbox.reply(*peer, Packet::Fin { tx, status: 0 });
    }
    node.engine.core.stirred = true;
    let mut passes = 0;
    while node.engine.unexpected() < PEERS {
        node.progress();
        passes += 1;
    }
    assert_eq!(node.engine.core.outbox.urgent.len(), PEERS);
    // A poll brings one event or two, and each peer has said hello too.
    assert!(passes <= 2 * PEERS / (1 + PEERS / 64) + 1, "{passes}");
}

#[test]
fn an_answer_to_one_of_many_sends_is_no_walk_through_them() {
    let limits = Limits { tx_max: PEERS, ..LIMITS };
    let weather = Weather { push_max: 512, queue_len: 2 * PEERS, ..Weather::fair() };
    let mut world = World::new(2, weather, limits);
    let peer = world.peer(0, 1);
    let mut from = Memory::pattern(0, 1000);
    (0..PEERS).for_each(|n| world.send(0, &send_op(peer, &mut from, n as u64)).unwrap());
    let Node { engine, host } = world.node(0);
    let keys = engine.core.sends.pending.keys_where(|_| true);
    engine.core.sends.streams.extend(&keys);
    let taken = comparisons_of(|| {
        let fin = |key: &Key| engine.core.on_fin(peer, key.to_wire(), 0, host);
        assert!(keys.iter().all(fin));
    });
    assert!(taken < FEW, "{taken}");
    engine.core.stirred = true;
    engine.progress(host);
    assert!(engine.core.sends.streams.is_empty());
    assert_eq!(world.sends(0).len(), PEERS);
}
