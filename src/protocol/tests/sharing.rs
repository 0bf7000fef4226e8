//! Split copies: which end copies which chunks, and how the message ends if one end is late, cannot copy, or departs.

use super::fixture::{LIMITS, Memory, World, lend, receive_op, send_op};
use super::oracle::HARD_ERROR;
use super::sim::{Reach, Weather};
use super::sim_share::Teamwork;
use crate::protocol::packet::Packet;
use crate::protocol::{Cause, FI_ETRUNC, Limits, ReceiveOp, SendOp};
use crate::sys::Errno;
use crate::transport::Departure;

const LEN: usize = 20_000;
const UNIT: u32 = 500;

fn teamwork() -> Teamwork {
    Teamwork { min: 1000, unit: UNIT, ..Teamwork::none() }
}

fn world(get: Reach, put: Reach, teamwork: Teamwork) -> World {
    let weather = Weather { get: vec![get], put: vec![put], teamwork, ..Weather::fair() };
    World::new(2, weather, Limits { bulk_chunk: 1000, ..LIMITS })
}

/// A message of [`LEN`] bytes that has just found its receive.
struct Begun {
    world: World,
    from: Memory,
    to: Memory,
}

impl Begun {
    fn new(mut world: World, room: usize) -> Self {
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(room));
        let receive =
            ReceiveOp { segments: lend(&mut to.0, &[room / 3]), ..receive_op(&mut to, 2) };
        world.receive(1, &receive).unwrap();
        let payload = lend(&mut from.0, &[1, 1, LEN / 2]);
        world.send(0, &SendOp { payload, ..send_op(peer, &mut from, 1) }).unwrap();
        world.progress(1);
        Self { world, from, to }
    }

    fn fair() -> Self {
        Self::new(world(Reach::On, Reach::On, teamwork()), LEN)
    }

    /// Runs until the message has arrived. Returns how much each end has copied: receiver, sender.
    fn finish(mut self) -> (u64, u64) {
        self.world.settle();
        assert_eq!(self.world.received(1).len, LEN);
        assert!(self.to.0 == self.from.0);
        assert_eq!(self.world.sends(0).len(), 1);
        self.world.assert_empty();
        assert_eq!(self.world.dropped(0) + self.world.dropped(1), 0);
        moved(&mut self.world)
    }
}

fn moved(world: &mut World) -> (u64, u64) {
    (world.node(1).engine.counts().pulled_bytes, world.node(0).engine.counts().assisted_bytes)
}

/// The packets that ask the sender for a split copy.
fn asked(world: &World) -> usize {
    world.on_wire(1, 0).iter().filter(|p| matches!(p, Packet::Cooperate { .. })).count()
}

#[test]
fn both_ends_copy() {
    for (get, put) in
        [(Reach::On, Reach::On), (Reach::Short, Reach::Short), (Reach::Shy, Reach::On)]
    {
        let begun = Begun::new(world(get, put, teamwork()), LEN);
        assert_eq!(asked(&begun.world), 1);
        let (pulled, assisted) = begun.finish();
        assert_eq!(pulled + assisted, LEN as u64);
        assert!(pulled >= LEN as u64 / 8 && assisted >= LEN as u64 / 8, "{pulled} {assisted}");
    }
}

#[test]
fn a_sender_without_a_turn_costs_nothing() {
    let mut begun = Begun::fair();
    for _ in 0..100 {
        begun.world.progress(1);
    }
    assert_eq!(begun.world.received(1).len, LEN);
    assert!(begun.to.0 == begun.from.0);
    begun.world.settle();
    assert_eq!(moved(&mut begun.world), (LEN as u64, 0));
    assert_eq!(begun.world.sends(0).len(), 1);
    begun.world.assert_empty();
}

#[test]
fn a_receiver_without_a_turn_is_served() {
    let mut begun = Begun::fair();
    let (before, _) = moved(&mut begun.world);
    for _ in 0..100 {
        begun.world.progress(0);
    }
    assert!(before < LEN as u64 / 2);
    assert!(begun.world.receives(1).is_empty());
    assert!(!begun.world.node(0).engine.is_busy(), "nothing is left for the sender to do");
    let (pulled, assisted) = begun.finish();
    assert_eq!(pulled + assisted, LEN as u64);
    assert!(assisted >= LEN as u64 / 2);
}

#[test]
fn a_short_message_is_not_shared() {
    let weather = Weather { teamwork: teamwork(), ..Weather::fair() };
    for (len, shared) in [(999, 0), (1000, 1)] {
        let mut world = World::new(2, weather.clone(), Limits { bulk_chunk: 100, ..LIMITS });
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        world.progress(1);
        assert_eq!(asked(&world), shared);
    }
}

#[test]
fn truncation_moves_only_what_fits() {
    for room in [0, 999, 1000, 5000, LEN - 1] {
        let mut begun = Begun::new(world(Reach::On, Reach::On, teamwork()), room);
        begun.world.settle();
        let f = begun.world.receive_failed(1);
        assert_eq!((f.error, f.completion.len, f.overflow), (FI_ETRUNC, room, LEN - room));
        assert!(begun.to.0[..] == begun.from.0[..room]);
        let (pulled, assisted) = moved(&mut begun.world);
        assert_eq!(pulled + assisted, room as u64);
        assert_eq!(begun.world.sends(0).len(), 1);
        begun.world.assert_empty();
    }
}

#[test]
fn the_receiver_copies_what_the_sender_could_not() {
    let refuses = |after| Reach::Fails { after, errno: libc::EPERM };
    for put in [refuses(0), refuses(1), refuses(2), Reach::Shy, Reach::Off] {
        let (pulled, assisted) = Begun::new(world(Reach::On, put, teamwork()), LEN).finish();
        assert_eq!(pulled + assisted, LEN as u64);
        assert!(put == Reach::Shy || pulled >= LEN as u64 / 4, "{pulled} {assisted}");
    }
    let fails = Teamwork { failures: 100, ..teamwork() };
    assert_eq!(Begun::new(world(Reach::On, Reach::On, fails), LEN).finish(), (LEN as u64, 0));
}

/// The receiver has done all that it can, and a chunk of the sender is in progress.
fn in_hand() -> Begun {
    let late = Teamwork { late: 100, arrives: 0, ..teamwork() };
    let mut begun = Begun::new(world(Reach::On, Reach::On, late), LEN);
    begun.world.progress(0);
    for _ in 0..100 {
        begun.world.progress(1);
    }
    let (pulled, assisted) = moved(&mut begun.world);
    assert_eq!(pulled + assisted, LEN as u64);
    assert!(begun.to.0 != begun.from.0);
    assert!(begun.world.receives(1).is_empty(), "it has ended, and the sender still writes");
    begun
}

#[test]
fn the_receiver_waits_for_what_the_sender_has_in_hand() {
    let begun = in_hand();
    begun.world.net.borrow_mut().weather.teamwork.arrives = 100;
    begun.finish();
}

#[test]
fn a_sender_that_goes_with_a_part_in_hand_ends_the_receive() {
    for (departure, error) in [
        (Departure::Failed(Errno(libc::EHOSTDOWN)), libc::EHOSTUNREACH),
        (Departure::Failed(Errno(libc::EPROTO)), libc::EPROTO),
    ] {
        let mut begun = in_hand();
        begun.world.leave(0, departure);
        begun.world.settle();
        assert_eq!(begun.world.receive_failed(1).error, error);
        begun.world.node(1).assert_empty();
    }
}

#[test]
fn a_receiver_that_goes_ends_the_send() {
    let mut begun = in_hand();
    begun.world.leave(1, Departure::Closed);
    begun.world.settle();
    assert_eq!(begun.world.send_failed(0).error, libc::ECONNRESET);
    begun.world.node(0).assert_empty();
}

#[test]
fn a_read_that_fails_ends_nothing_that_the_sender_still_writes() {
    let hard = Reach::Fails { after: 30, errno: HARD_ERROR };
    let late = Teamwork { late: 100, arrives: 0, ..teamwork() };
    let mut begun = Begun::new(world(hard, Reach::On, late), LEN);
    begun.world.progress(0);
    for _ in 0..100 {
        begun.world.progress(1);
    }
    assert!(begun.world.receives(1).is_empty(), "it has ended, and the sender still writes");
    begun.world.net.borrow_mut().weather.teamwork.arrives = 100;
    begun.world.settle();
    let f = begun.world.receive_failed(1);
    assert_eq!((f.error, f.cause), (HARD_ERROR, Cause::SenderUnreadable));
    assert_eq!(begun.world.send_failed(0).error, HARD_ERROR);
    begun.world.assert_empty();
}

#[test]
fn a_refusal_midway_falls_back_to_the_sender() {
    let refuses = Reach::Fails { after: 1, errno: libc::EPERM };
    let mut begun = Begun::new(world(refuses, Reach::On, teamwork()), LEN);
    begun.world.settle();
    assert_eq!(begun.world.received(1).len, LEN);
    assert!(begun.to.0 == begun.from.0);
    assert_eq!(begun.world.node(0).engine.counts().pushed_bytes, LEN as u64);
}

#[test]
fn many_messages_share_few_cells() {
    const COUNT: usize = 40;
    let weather = Weather { teamwork: teamwork(), ..Weather::fair() };
    let limits = Limits { bulk_chunk: 1000, tx_max: COUNT, rx_max: COUNT, ..LIMITS };
    let mut world = World::new(2, weather, limits);
    let peer = world.peer(0, 1);
    let mut from: Vec<_> = (0..COUNT).map(|n| Memory::pattern(n, LEN)).collect();
    let mut to: Vec<_> = (0..COUNT).map(|_| Memory::zeroed(LEN)).collect();
    for (from, to) in from.iter_mut().zip(&mut to) {
        world.receive(1, &receive_op(to, 2)).unwrap();
        world.send(0, &send_op(peer, from, 1)).unwrap();
    }
    world.settle();
    assert_eq!((world.sends(0).len(), world.receives(1).len()), (COUNT, COUNT));
    assert!(from.iter().zip(&to).all(|(from, to)| from.0 == to.0));
    let (pulled, assisted) = moved(&mut world);
    assert_eq!(pulled + assisted, (COUNT * LEN) as u64);
    assert!(assisted > 0);
    world.assert_empty();
}

#[test]
fn forged_offers_of_a_split_copy_are_dropped() {
    let mut begun = Begun::fair();
    let [packet] = begun.world.on_wire(1, 0)[..] else { panic!("{:?}", begun.world.on_wire(1, 0)) };
    let Packet::Cooperate { tx, offset, share, ranges } = packet else { panic!("{packet:?}") };
    for forged in [
        packet, // twice
        Packet::Cooperate { tx: tx + (1 << 32), offset, share, ranges },
        Packet::Cooperate { tx, offset: LEN as u64, share, ranges },
        Packet::Cooperate { tx, offset: u64::MAX, share, ranges },
    ] {
        begun.world.forge(1, 0, &forged, &[]);
    }
    begun.world.settle();
    assert_eq!(begun.world.received(1).len, LEN);
    assert!(begun.to.0 == begun.from.0);
    assert_eq!(begun.world.dropped(0), 4);
    begun.world.sends(0);
    begun.world.assert_empty();
}

/// Messages longer than 1000 bytes are split, and senders send their chunks.
fn ring() -> World {
    let weather = Weather {
        get: vec![Reach::On],
        put: vec![Reach::On],
        push_max: 1000,
        teamwork: teamwork(),
        ..Weather::fair()
    };
    World::new(2, weather, Limits { bulk_chunk: 1000, ..LIMITS })
}

/// The chunks that are on their way to the receiver.
fn pieces(world: &World) -> Vec<(u64, u64)> {
    let piece = |p: &Packet| match p {
        Packet::Pushed { tx, offset } => Some((*tx, *offset)),
        _ => None,
    };
    world.on_wire(0, 1).iter().filter_map(piece).collect()
}

#[test]
fn a_sender_sends_its_parts() {
    let mut begun = Begun::new(ring(), LEN);
    begun.world.progress(0);
    let first = pieces(&begun.world);
    assert_eq!(first.len(), 4, "a part of four units, from the back: {first:?}");
    assert!(first.iter().all(|(_, offset)| *offset >= (LEN - 4 * UNIT as usize) as u64));
    // While chunks come, the receiver reads none but those that it has begun.
    let (pulled, assisted) = begun.finish();
    assert_eq!((pulled, pulled + assisted), (4 * u64::from(UNIT), LEN as u64));
}

#[test]
fn a_sender_that_sends_no_more_is_read() {
    let mut begun = Begun::new(ring(), LEN);
    for _ in 0..2 {
        begun.world.progress(0);
    }
    for _ in 0..200 {
        begun.world.progress(1);
    }
    assert_eq!(begun.world.received(1).len, LEN);
    assert!(begun.to.0 == begun.from.0);
    let (pulled, assisted) = moved(&mut begun.world);
    assert_eq!((pulled + assisted, assisted), (LEN as u64, 8 * u64::from(UNIT)));
    begun.world.settle();
    assert_eq!(begun.world.sends(0).len(), 1);
    begun.world.assert_empty();
}

#[test]
fn a_sender_that_also_receives_is_left_alone() {
    let mut begun = Begun::new(ring(), LEN);
    let peer = begun.world.peer(1, 0);
    let (mut from, mut to) = (Memory::pattern(1, LEN), Memory::zeroed(LEN));
    begun.world.receive(0, &receive_op(&mut to, 2)).unwrap();
    begun.world.send(1, &send_op(peer, &mut from, 1)).unwrap();
    begun.world.progress(0);
    assert_eq!(pieces(&begun.world), []);
    begun.world.settle();
    assert!(begun.to.0 == begun.from.0 && to.0 == from.0);
    assert_eq!((begun.world.receives(0).len(), begun.world.receives(1).len()), (1, 1));
    assert_eq!((begun.world.sends(0).len(), begun.world.sends(1).len()), (1, 1));
    begun.world.assert_empty();
}

#[test]
fn pieces_that_cannot_be_are_dropped() {
    let mut begun = Begun::new(ring(), LEN);
    begun.world.progress(0);
    let (tx, offset) = pieces(&begun.world)[0];
    let (unit, end) = (u64::from(UNIT), LEN as u64);
    let forged = [(offset + 1, UNIT), (offset, UNIT - 1), (offset, UNIT + 1), (end, UNIT)];
    for (offset, len) in forged.into_iter().chain([(u64::MAX, UNIT), (end - unit + 1, UNIT)]) {
        let payload = vec![0xee; len as usize];
        begun.world.forge(0, 1, &Packet::Pushed { tx, offset }, &payload);
    }
    begun.world.settle();
    assert_eq!(begun.world.received(1).len, LEN);
    assert!(begun.to.0 == begun.from.0);
    assert_eq!(begun.world.dropped(1), 6);
    begun.world.sends(0);
    begun.world.assert_empty();
}

#[test]
fn a_read_that_fails_while_pieces_come_ends_after_them() {
    for errno in [HARD_ERROR, libc::EPERM] {
        let world = ring();
        world.net.borrow_mut().weather.get = vec![Reach::Fails { after: 2, errno }];
        let begun = &mut Begun::new(world, LEN);
        begun.world.progress(0);
        begun.world.settle();
        if errno == HARD_ERROR {
            assert_eq!(begun.world.receive_failed(1).error, HARD_ERROR);
            assert_eq!(begun.world.send_failed(0).error, HARD_ERROR);
        } else {
            assert_eq!(begun.world.received(1).len, LEN);
            assert!(begun.to.0 == begun.from.0);
            begun.world.sends(0);
        }
        begun.world.assert_empty();
    }
}
