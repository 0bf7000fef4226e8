//! GET rendezvous: messages that their senders advertise for reading, so that both sides move them.

use super::fixture::{Memory, World, lend, receive_op, send_op};
use super::sim_window;
use super::sim_window::Glazing;
use super::windows::{Begun, LEN, WINDOW, glazing, world};
use crate::protocol::arrivals::Receiver;
use crate::protocol::packet::{Envelope, Packet, Ranges};
use crate::protocol::schemes::put::GET_OF_A_MESSAGE;
use crate::protocol::{ReceiveOp, SendOp};
use crate::transport::{Departure, PeerId, Prepared};

fn offering() -> Glazing {
    Glazing { offers: 100, ..glazing() }
}

/// Bytes that endpoint 0 wrote into remote buffers and sent as fragments, and that endpoint 1 read.
fn moved(world: &mut World) -> (u64, u64, u64) {
    let (sender, receiver) = (world.node(0).engine.counts(), world.node(1).engine.counts());
    (sender.window_bytes, sender.fragment_bytes, receiver.read_bytes)
}

/// The chunks that endpoint 1 is reading: tokens, and offsets in its buffer.
fn reading(begun: &Begun) -> Vec<(u64, u64)> {
    let first = begun.to.0.as_ptr().expose_provenance() as u64;
    let net = begun.world.net.borrow();
    net.reading(1).map(|(token, part)| (token, part.first_addr() - first)).collect()
}

/// The number that endpoint 1 has given to the message.
fn rx(begun: &mut Begun) -> u64 {
    begun.world.node(1).engine.core.arrivals.active.keys_where(|_| true)[0].to_wire()
}

#[test]
fn both_sides_move_a_message_that_is_offered() {
    let mut begun = Begun::new(offering());
    let lent: Vec<u64> = begun
        .world
        .on_wire(1, 0)
        .iter()
        .filter_map(|packet| match packet {
            Packet::Window { offset, .. } => Some(*offset),
            _ => None,
        })
        .collect();
    let window = WINDOW as u64;
    assert_eq!(lent, [0, 2 * window]);
    let starts: Vec<u64> = reading(&begun).iter().map(|(_, at)| *at).collect();
    assert_eq!(starts, [window, 3 * window]);
    // The sender waits for the FIN, though all that it writes is written.
    while begun.received() < 4 * WINDOW {
        begun.world.progress(0);
        begun.world.progress(1);
        assert_eq!(begun.world.sends(0).len(), 0);
    }
    let (windows, fragments, read) = moved(&mut begun.finish());
    assert_eq!((windows + read, fragments), (LEN as u64, 0));
    assert!(windows.abs_diff(read) <= window, "{windows} {read}");
}

#[test]
fn a_message_of_two_windows_is_halved() {
    let len = 12_001;
    let mut world = world(Glazing { max: 1 << 20, ..offering() }, 2);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.settle();
    assert_eq!(world.received(1).len, len);
    assert!(to.0 == from.0);
    assert_eq!(moved(&mut world), (8192, 0, len as u64 - 8192), "in whole pages");
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
    assert!(world.node(0).engine.core.sends.withdrawn.is_empty());
}

#[test]
fn an_offer_ends_with_its_message() {
    let mut world = world(offering(), 2);
    let peer = world.peer(0, 1);
    for delivery in [false, true] {
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 1) }).unwrap();
        let offer = world
            .node(0)
            .engine
            .core
            .sends
            .pending
            .iter()
            .find_map(|(_, tx)| tx.message.offer)
            .unwrap();
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.settle();
        assert_eq!((world.sends(0).len(), world.receives(1).len()), (1, 1));
        assert!(!world.net.borrow().is_registered(0, 1, &offer));
    }
}

#[test]
fn a_message_that_cannot_be_read_comes_as_fragments() {
    let begun = Begun::new(offering());
    begun.world.net.borrow_mut().weather.windows.write_refusals = 100;
    let (windows, fragments, read) = moved(&mut begun.finish());
    assert_eq!((windows, read), (0, 2 * WINDOW as u64), "these had begun");
    assert_eq!(fragments, LEN as u64);

    let mut begun = Begun::new(offering());
    while begun.received() == 0 {
        begun.world.progress(0);
        begun.world.progress(1);
    }
    // The remote key is void, without a notice.
    let connection = begun.world.net.borrow().connection(1, 0);
    for key in begun.world.node(1).engine.core.arrivals.active.keys_where(|_| true) {
        let active = begun.world.node(1).engine.core.arrivals.active.get_mut(key).unwrap();
        let Receiver::Put(put) = &mut active.scheme else { panic!("{active:?}") };
        put.offer = Some(sim_window::key(connection, 0, u64::MAX));
    }
    let (windows, fragments, read) = moved(&mut begun.finish());
    assert!(fragments > 0 && windows + read + fragments >= LEN as u64);
}

#[test]
fn after_a_loss_windows_do_all() {
    for state in [Prepared::Ready, Prepared::Later] {
        let begun = Begun::new(offering());
        begun.world.net.borrow_mut().lose_windows(0, 1, state);
        begun.world.net.borrow_mut().set_windows(0, 1, Prepared::Ready);
        let mut world = begun.finish();
        let (windows, fragments, read) = moved(&mut world);
        assert_eq!(read, 2 * WINDOW as u64, "what had begun, and counts no more");
        assert!(windows + read >= LEN as u64 && fragments == 0);
    }
}

#[test]
fn an_offer_of_another_connection_is_not_taken() {
    let mut world = world(offering(), 2);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    world.net.borrow_mut().lose_windows(0, 1, Prepared::Ready);
    world.settle();
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.settle();
    assert_eq!(world.received(1).len, LEN);
    assert!(to.0 == from.0);
    assert_eq!(moved(&mut world), (LEN as u64, 0, 0));
}

#[test]
fn a_receive_does_not_end_while_its_buffer_is_read_into() {
    // A sender that declines a message that it has advertised, and one that replies GONE: both break the rules.
    for gone in [false, true] {
        let mut begun = Begun::new(Glazing { waits: 99, ..offering() });
        begun.world.net.borrow_mut().weather.windows.waits = 0;
        begun.world.progress(1);
        begun.world.net.borrow_mut().weather.windows.waits = 100;
        assert!(!reading(&begun).is_empty());
        let rx = rx(&mut begun);
        let packet = if gone { Packet::Gone { rx } } else { Packet::Decline { rx, offset: 0 } };
        begun.world.forge(0, 1, &packet, &[]);
        let mut turns = 0;
        while !reading(&begun).is_empty() {
            begun.world.progress(1);
            turns += 1;
            let active = begun.world.node(1).engine.core.arrivals.active.iter().next();
            let open = active.is_some_and(|(_, active)| {
                matches!(active.scheme, Receiver::Announced(_) | Receiver::Put(_))
            });
            assert!(open || reading(&begun).is_empty());
            assert!(turns < 1000);
        }
        begun.world.net.borrow_mut().weather.windows.waits = 0;
        begun.world.settle();
        if gone {
            assert_eq!(begun.world.receive_failed(1).error, libc::EIO);
        }
    }
}

#[test]
fn hostile_offers_and_reports_change_nothing() {
    for (other, addr) in [(1, 0), (0, u64::MAX)] {
        let mut world = world(offering(), 2);
        world.peer(0, 1);
        let mut to = Memory::zeroed(LEN);
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.settle();
        let envelope = Envelope { tagged: false, tag: 0, data: None, rx: 0 };
        let connection = world.net.borrow().connection(0, 1) ^ other;
        let offer = Some(sim_window::key(connection, 3, addr));
        let (tx, len, ranges) = (77, LEN as u64, Ranges::NONE);
        let (pushed, leaves, sees) = (0, false, false);
        let rts = Packet::Rts { envelope, tx, len, pushed, leaves, sees, offer, ranges };
        world.forge(0, 1, &rts, &[]);
        for _ in 0..10 {
            world.progress(1);
        }
        let node = world.node(1);
        assert!(
            node.engine.counts().read_bytes == 0 && node.engine.core.arrivals.chunks.due.is_empty()
        );
        // Nor may a read complete a chunk that is advertised for writing.
        let lent = node.engine.core.arrivals.chunks.list.keys_where(|_| true);
        assert!(!lent.is_empty());
        let before = node.engine.counts().dropped;
        for token in &lent {
            assert_eq!(token.to_wire() & GET_OF_A_MESSAGE, 0);
            node.engine.core.on_part(PeerId(0), token.to_wire(), true, &mut node.host);
        }
        assert_eq!(node.engine.counts().dropped, before + lent.len() as u64);
        world.leave(0, Departure::Closed);
        world.settle();
        assert_eq!(world.receive_failed(1).completion.len, 0);
        assert!(to.0.iter().all(|byte| *byte == 0));
    }
}

/// A lane that reads advertised messages, and takes device memory: CUDA IPC. The message is in device memory; its receive is in memory of
/// the host, in one range or (`cut`) in two.
#[test]
fn a_message_that_is_advertised_from_device_memory_is_read_to_any_memory() {
    for cut in [false, true] {
        let reading = Glazing { max: usize::MAX, reads: true, ..offering() };
        let mut world = world(reading, 2);
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        let segments = lend(&mut to.0, if cut { &[LEN / 3] } else { &[] });
        world.receive(1, &ReceiveOp { segments, ..receive_op(&mut to, 2) }).unwrap();
        let plain = send_op(peer, &mut from, 1);
        world.send(0, &SendOp { payload: plain.payload.as_device(1), ..plain }).unwrap();
        world.progress(1);
        assert_eq!(world.on_wire(1, 0), [], "nothing is asked for");
        world.settle();
        assert_eq!(world.received(1).len, LEN);
        assert!(to.0 == from.0);
        assert_eq!(moved(&mut world), (0, 0, LEN as u64));
        assert_eq!(world.sends(0).len(), 1);
        world.assert_empty();
    }
}

/// The same lane: a message in memory of the host is written to device memory.
#[test]
fn a_message_to_device_memory_fills_remote_buffers() {
    let reading = Glazing { max: usize::MAX, reads: true, ..glazing() };
    let mut world = world(reading, 2);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    let segments = lend(&mut to.0, &[]).as_device(1);
    world.receive(1, &ReceiveOp { segments, ..receive_op(&mut to, 2) }).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    assert_eq!(world.received(1).len, LEN);
    assert!(to.0 == from.0);
    assert_eq!(moved(&mut world), (LEN as u64, 0, 0));
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}
