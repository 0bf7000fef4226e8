//! WINDOW and DECLINE packets and writes that no peer may send: they are counted, and change nothing.

use super::fixture::{Memory, World, receive_op, send_op};
use super::sim_window;
use super::sim_window::RAILS;
use super::windows::{Begun, LEN, WINDOW, glazing, seen, world};
use crate::protocol::SendOp;
use crate::protocol::packet::{Packet, Ranges};
use crate::protocol::state::Core;
use crate::transport::{Departure, PeerId};

/// A remote buffer that may be written, without an address.
fn window(tx: u64, rx: u64, offset: u64, len: u64) -> Packet {
    let remote = sim_window::key(u32::MAX, 0, 0);
    Packet::Window { tx, rx, offset, len, remote }
}

/// A message that 0 has announced to 1, which has no receive for it, and the message's number. 2 has links to both.
fn announced(from: &mut Memory) -> (World, u64) {
    let mut world = world(glazing(), 3);
    let peer = world.peer(0, 1);
    world.peer(2, 0);
    world.peer(2, 1);
    world.send(0, &send_op(peer, from, 1)).unwrap();
    world.settle();
    let tx = tx_of(&mut world, 0);
    (world, tx)
}

/// The number of the `n`th pending send at 0.
fn tx_of(world: &mut World, n: usize) -> u64 {
    world.node(0).engine.core.sends.pending.keys_where(|_| true)[n].to_wire()
}

/// Forges `packets` from `from` to `to`. Returns how many of them are dropped.
fn dropped(world: &mut World, from: usize, to: usize, packets: &[Packet]) -> u64 {
    let before = world.dropped(to);
    for packet in packets {
        world.forge(from, to, packet, &[1, 2, 3]);
    }
    while !world.on_wire(from, to).is_empty() {
        world.progress(to);
    }
    world.dropped(to) - before
}

#[test]
fn only_the_receiver_lends_windows_and_only_of_the_message() {
    let mut from = Memory::pattern(0, LEN);
    let (mut world, tx) = announced(&mut from);
    let len = LEN as u64;
    let wrong = [
        window(tx, 1, 0, 0),
        window(tx, 1, len, 1),
        window(tx, 1, len - 1, 2),
        window(tx, 1, u64::MAX, 2),
        window(tx, 1, 1, u64::MAX),
        window(tx | 1 << 32, 1, 0, 1),
    ];
    assert_eq!(dropped(&mut world, 1, 0, &wrong), wrong.len() as u64);
    assert_eq!(dropped(&mut world, 2, 0, &[window(tx, 1, 0, 1)]), 1);
    let mut to = Memory::zeroed(LEN);
    world.receive(1, &receive_op(&mut to, 3)).unwrap();
    world.settle();
    assert_eq!(world.received(1).len, LEN);
    assert!(to.0 == from.0);
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}

#[test]
fn a_receiver_that_lends_without_end_is_not_obeyed() {
    let mut from = Memory::pattern(0, LEN);
    let (mut world, tx) = announced(&mut from);
    world.net.borrow_mut().weather.again_percent = 100;
    let many = vec![window(tx, 1, 0, 1); 100];
    assert_eq!(dropped(&mut world, 1, 0, &many), 36);
    assert_eq!(world.node(0).engine.core.sends.due.len(), 64);
    world.net.borrow_mut().weather.again_percent = 0;
    world.progress(0);
    assert!(world.node(0).engine.core.sends.due.is_empty());
    // All remote buffers of the message have the same receive number.
    assert_eq!(dropped(&mut world, 1, 0, &[window(tx, 2, 0, 1), window(tx, 1, 0, 1)]), 1);
    world.leave(1, Departure::Closed);
    world.settle();
    world.send_failed(0);
    world.node(0).assert_empty();
}

#[test]
fn windows_are_for_messages_that_wait_to_be_asked_for() {
    let mut world = world(glazing(), 2);
    let peer = world.peer(0, 1);
    let mut memory: Vec<_> = [10, 900, 10].map(|len| Memory::pattern(0, len)).into();
    let [short, pushed, fenced] = &mut memory[..] else { panic!() };
    world.send(0, &SendOp { delivery: true, ..send_op(peer, short, 1) }).unwrap();
    world.send(0, &send_op(peer, pushed, 2)).unwrap();
    world.send(0, &SendOp { fence: true, ..send_op(peer, fenced, 3) }).unwrap();
    for n in 0..3 {
        let tx = tx_of(&mut world, n);
        assert_eq!(dropped(&mut world, 1, 0, &[window(tx, 1, 0, 1)]), 1);
    }
    let mut to: Vec<_> = (0..3).map(|_| Memory::zeroed(1000)).collect();
    for to in &mut to {
        world.receive(1, &receive_op(to, 4)).unwrap();
    }
    world.settle();
    assert_eq!((world.sends(0).len(), world.receives(1).len()), (3, 3));
    world.assert_empty();
}

#[test]
fn a_message_sent_as_fragments_takes_no_window() {
    let mut from = Memory::pattern(0, 100_000);
    let (mut world, tx) = announced(&mut from);
    let end = 100_000;
    let resume = Packet::Resume { tx, rx: 1, from: 0, len: end };
    assert_eq!(dropped(&mut world, 1, 0, &[window(tx, 1, 0, 1), resume]), 0);
    let cts = Packet::Cts { tx, rx: 1, len: end, faulted: false, ranges: Ranges::NONE };
    assert_eq!(dropped(&mut world, 1, 0, &[window(tx, 1, 0, 1), cts]), 2);
    assert!(world.node(0).engine.counts().fragment_bytes > 0);
    world.leave(1, Departure::Closed);
    world.settle();
    world.send_failed(0);
    world.node(0).assert_empty();
}

#[test]
fn a_lent_buffer_takes_no_forged_data() {
    let mut begun = Begun::new(glazing());
    let world = &mut begun.world;
    let [(key, tx)] = world
        .node(1)
        .engine
        .core
        .arrivals
        .active
        .iter()
        .map(|(key, active)| (key, active.message.tx))
        .collect::<Vec<_>>()[..]
    else {
        panic!()
    };
    let rx = key.to_wire();
    let others = [
        Packet::Fragment { rx, offset: 0 },
        Packet::PutDone { rx },
        Packet::Fragment { rx, offset: LEN as u64 - 3 },
    ];
    assert_eq!(dropped(world, 0, 1, &others), 3);
    let surplus = world.node(1).engine.counts().surplus;
    assert_eq!(dropped(world, 0, 1, &[Packet::Pushed { tx, offset: 0 }]), 0);
    assert_eq!(world.node(1).engine.counts().surplus, surplus + 1);
    assert!(begun.to.0.iter().all(|byte| *byte == 0));
    let node = begun.world.node(1);
    let tokens = node.engine.core.arrivals.chunks.list.keys_where(|_| true);
    let before = node.engine.counts().dropped;
    let (unknown, stranger) = (PeerId(0), PeerId(77));
    for (peer, token) in [
        (unknown, u64::MAX),
        (unknown, tokens[0].to_wire() | 1 << 40),
        (stranger, tokens[0].to_wire()),
    ] {
        node.engine.core.on_part(peer, token, false, &mut node.host);
    }
    assert_eq!(node.engine.counts().dropped, before + 3);
    assert_eq!(begun.received(), 0);
    begun.world.settle();
    begun.world.received(1);
    assert!(begun.to.0 == begun.from.0);
}

#[test]
fn only_the_sender_declines_and_only_what_it_is_lent() {
    let mut begun = Begun::new(glazing());
    let world = &mut begun.world;
    let rx = world.node(1).engine.core.arrivals.active.keys_where(|_| true)[0].to_wire();
    let wrong = [rx | 1 << 32, u64::MAX].map(|rx| Packet::Decline { rx, offset: 0 });
    assert_eq!(dropped(world, 0, 1, &wrong), 2);
    // It lies behind the advertised chunks: the rest is requested when these are complete.
    let last = Packet::Decline { rx, offset: u64::MAX };
    assert_eq!(dropped(world, 0, 1, &[last, last]), 0);
    world.settle();
    assert_eq!(world.received(1).len, LEN);
    assert!(begun.to.0 == begun.from.0);
    assert_eq!(world.node(1).engine.counts().resumed, 1);
    assert_eq!(world.node(0).engine.counts().window_bytes, 4 * WINDOW as u64);
    assert_eq!(dropped(world, 0, 1, &[Packet::Decline { rx, offset: 0 }]), 1);
}

#[test]
fn a_sender_that_has_declined_says_so_again_of_what_is_lent_before() {
    let mut from = Memory::pattern(0, LEN);
    let (mut world, tx) = announced(&mut from);
    world.net.borrow_mut().weather.windows.write_refusals = 100;
    let declines = |world: &mut World, packets: &[Packet]| {
        assert_eq!(dropped(world, 1, 0, packets), 0);
        let said = world.on_wire(0, 1);
        while !world.on_wire(0, 1).is_empty() {
            world.progress(1);
        }
        said.iter()
            .map(|packet| match packet {
                Packet::Decline { rx: 9, offset } => *offset,
                other => panic!("{other:?}"),
            })
            .collect::<Vec<_>>()
    };
    // Remote buffers that wait are declined with one that fails: an old connection's, and new ones.
    let [first, second, third, fourth] = [0, 1, 2, 3].map(|n| window(tx, 9, n * 700, 700));
    assert_eq!(declines(&mut world, &[fourth, third]), [1400]);
    assert_eq!(declines(&mut world, &[fourth]), []);
    assert_eq!(declines(&mut world, &[second, first, second]), [0]);
    assert_eq!(world.node(0).engine.counts().declined, 1);
    world.leave(1, Departure::Closed);
    world.settle();
    world.send_failed(0);
    world.node(0).assert_empty();
}

#[test]
fn a_message_that_its_sender_has_no_more_is_not_waited_for() {
    let mut begun = seen();
    assert_eq!(begun.world.sends(0).len(), 1);
    let tx = tx_of(&mut begun.world, 0);
    let world = &mut begun.world;
    let rx = world.node(1).engine.core.arrivals.active.keys_where(|_| true)[0].to_wire();
    let again = [window(tx, rx, 0, 700), Packet::Resume { tx, rx, from: 0, len: 2800 }];
    for asked in [[again[0], again[1]], [again[1], again[0]]] {
        assert_eq!(dropped(world, 1, 0, &asked), 0);
        assert_eq!(world.on_wire(0, 1), [Packet::Gone { rx }], "it is said once");
    }
    // They are lost though the device has taken them, which no working device does.
    let peer = world.peer(1, 0);
    let Core { arrivals, outbox, counts, .. } = &mut world.node(1).engine.core;
    arrivals.lose_windows((peer, RAILS[0]), outbox, counts);
    world.settle();
    assert_eq!(world.receive_failed(1).error, libc::EIO);
    assert_eq!(dropped(world, 0, 1, &[Packet::Gone { rx }, Packet::Gone { rx: u64::MAX }]), 2);
    assert_eq!(world.node(0).engine.core.sends.pending.len(), 0);
}
