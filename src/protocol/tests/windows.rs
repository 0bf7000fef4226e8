//! PUT rendezvous: when remote buffers are advertised, and how a message ends if they do not work.

use super::fixture::{LIMITS, Memory, World, lend, receive_op, send_op};
use super::sim::{Reach, Weather};
use super::sim_window::Glazing;
use crate::protocol::packet::Packet;
use crate::protocol::sends::Sender;
use crate::protocol::{FI_ETRUNC, PeekAction, ReceiveOp, SendOp};
use crate::transport::{Departure, Prepared};

pub(super) const LEN: usize = 6000;
pub(super) const WINDOW: usize = 700;

pub(super) fn glazing() -> Glazing {
    Glazing { max: WINDOW, min: 1000, ..Glazing::none() }
}

/// The endpoints of a network with devices.
pub(super) fn world(windows: Glazing, slots: usize) -> World {
    let weather = Weather {
        push_max: 1000,
        get: vec![Reach::Off],
        put: vec![Reach::Off],
        windows,
        ..Weather::fair()
    };
    World::new(slots, weather, LIMITS)
}

/// Bytes that endpoint 0 wrote into remote buffers and sent as fragments, messages that endpoint 1 requested the rest
/// of as fragments, and messages that 0 declined to write.
fn moved(world: &mut World) -> (u64, u64, u64, u64) {
    let (sender, receiver) = (world.node(0).engine.counts(), world.node(1).engine.counts());
    (sender.window_bytes, sender.fragment_bytes, receiver.resumed, sender.declined)
}

/// The remote buffers that endpoint 1 has just advertised to 0: offset and length.
fn offered(world: &World) -> Vec<(u64, u64)> {
    let window = |packet| match packet {
        Packet::Window { offset, len, .. } => Some((offset, len)),
        _ => None,
    };
    world.on_wire(1, 0).into_iter().filter_map(window).collect()
}

/// A message of [`LEN`] bytes of which remote buffers were just advertised.
pub(super) struct Begun {
    pub(super) world: World,
    pub(super) from: Memory,
    pub(super) to: Memory,
}

impl Begun {
    pub(super) fn new(glazing: Glazing) -> Self {
        Self::on(world(glazing, 2))
    }

    pub(super) fn on(mut world: World) -> Self {
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        world.progress(1);
        Self { world, from, to }
    }

    /// Lets 0 write `n` remote buffers, and 1 take note of them.
    fn fill(&mut self, n: usize) {
        let before = self.received();
        for _ in 0..1000 {
            if self.received() >= before + n * WINDOW {
                return;
            }
            self.world.progress(0);
            self.world.progress(1);
        }
        panic!("nothing is written");
    }

    pub(super) fn received(&mut self) -> usize {
        self.world
            .node(1)
            .engine
            .core
            .arrivals
            .active
            .iter()
            .map(|(_, active)| active.message.received)
            .sum()
    }

    fn lose(&mut self, state: Prepared) {
        let lost = |begun: &mut Self| begun.world.node(1).engine.counts().windows_lost;
        let before = lost(self);
        self.world.net.borrow_mut().lose_windows(0, 1, state);
        for _ in 0..1000 {
            if lost(self) > before {
                return;
            }
            self.world.progress(1);
        }
        panic!("nobody hears of the loss");
    }

    /// Runs until the message has arrived.
    pub(super) fn finish(mut self) -> World {
        self.world.settle();
        assert_eq!(self.world.received(1).len, LEN);
        assert!(self.to.0 == self.from.0);
        assert_eq!(self.world.sends(0).len(), 1);
        self.world.assert_empty();
        assert_eq!(self.world.dropped(0) + self.world.dropped(1), 0);
        self.world
    }
}

#[test]
fn a_long_message_is_written_window_by_window() {
    let mut begun = Begun::new(glazing());
    let [first, second] = [0, 1].map(|n| (n * WINDOW as u64, WINDOW as u64));
    assert_eq!(offered(&begun.world)[..2], [first, second]);
    assert_eq!(offered(&begun.world).len(), 4);
    for _ in 0..100 {
        begun.world.progress(1);
        begun.world.progress(0);
        let node = begun.world.node(1);
        assert!(node.engine.core.arrivals.chunks.list.len() <= 4);
        assert!(!node.engine.is_busy(), "what is lent is heard of");
    }
    let mut world = begun.finish();
    assert_eq!(moved(&mut world), (LEN as u64, 0, 0, 0));
}

#[test]
fn a_message_that_is_too_short_for_windows_is_pushed() {
    for (len, by_window) in [(999, false), (1000, true)] {
        let mut world = world(glazing(), 2);
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, len), Memory::zeroed(len));
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        let [Packet::Rts { pushed, .. }, ..] = world.on_wire(0, 1)[..] else {
            panic!("{:?}", world.on_wire(0, 1));
        };
        assert_eq!(pushed, if by_window { 0 } else { len as u64 });
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.settle();
        world.received(1);
        assert!(to.0 == from.0);
        assert_eq!(moved(&mut world).0, if by_window { len as u64 } else { 0 });
    }
}

#[test]
fn a_window_does_not_cross_the_border_of_a_segment() {
    let mut world = world(glazing(), 2);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(LEN));
    let segments = lend(&mut to.0, &[10, 10, 1000]);
    world.receive(1, &ReceiveOp { segments, ..receive_op(&mut to, 2) }).unwrap();
    let payload = lend(&mut from.0, &[300, 900]);
    world.send(0, &SendOp { payload, ..send_op(peer, &mut from, 1) }).unwrap();
    world.progress(1);
    assert_eq!(offered(&world), [(0, 10), (10, 700), (710, 290), (1000, 700)]);
    world.settle();
    world.received(1);
    assert!(to.0 == from.0);
    assert_eq!(moved(&mut world), (LEN as u64, 0, 0, 0));
}

#[test]
fn only_the_room_of_the_receive_is_lent() {
    for (room, windows) in [(0, 0), (999, 0), (1000, 1000), (LEN - 1, LEN as u64 - 1)] {
        let mut world = world(glazing(), 2);
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, LEN), Memory::zeroed(room));
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &send_op(peer, &mut from, 1)).unwrap();
        world.settle();
        let f = world.receive_failed(1);
        assert_eq!((f.error, f.completion.len, f.overflow), (FI_ETRUNC, room, LEN - room));
        assert!(to.0[..] == from.0[..room]);
        assert_eq!(moved(&mut world).0, windows);
        assert_eq!(world.sends(0).len(), 1);
        world.assert_empty();
    }
}

#[test]
fn a_receive_waits_until_windows_are_ready_or_will_not_be() {
    for then in [Prepared::Ready, Prepared::No] {
        let begin = vec![Prepared::Later];
        let mut begun = Begun::new(Glazing { begin, ..glazing() });
        for _ in 0..10 {
            begun.world.progress(0);
            begun.world.progress(1);
        }
        assert!(begun.world.on_wire(1, 0).is_empty());
        assert!(begun.world.node(1).engine.is_busy(), "nobody says that they are ready");
        begun.world.net.borrow_mut().set_windows(0, 1, then);
        let (windows, fragments) =
            if then == Prepared::Ready { (LEN as u64, 0) } else { (0, LEN as u64) };
        assert_eq!(moved(&mut begun.finish()), (windows, fragments, 0, 0));
    }
}

#[test]
fn without_windows_nothing_waits() {
    let mut begun = Begun::new(Glazing { begin: vec![Prepared::No], ..glazing() });
    assert!(begun.received() > 0, "it is pushed");
    let (windows, _, resumed, declined) = moved(&mut begun.finish());
    assert_eq!((windows, resumed, declined), (0, 0, 0));
}

#[test]
fn memory_that_cannot_be_lent_is_filled_by_fragments() {
    let mut world = Begun::new(Glazing { lend_refusals: 100, ..glazing() }).finish();
    assert_eq!(moved(&mut world), (0, LEN as u64, 0, 0));
    // From the first chunk on that is refused.
    let begun = Begun::new(glazing());
    begun.world.net.borrow_mut().weather.windows.lend_refusals = 100;
    let mut world = begun.finish();
    let lent = 4 * WINDOW as u64;
    assert_eq!(moved(&mut world), (lent, LEN as u64 - lent, 1, 0));
}

#[test]
fn memory_that_cannot_be_written_from_is_sent_as_fragments() {
    let mut world = Begun::new(Glazing { write_refusals: 100, ..glazing() }).finish();
    assert_eq!(moved(&mut world), (0, LEN as u64, 1, 1));
    let mut begun = Begun::new(glazing());
    begun.fill(2);
    let before = moved(&mut begun.world).0;
    begun.world.net.borrow_mut().weather.windows.write_refusals = 100;
    let mut world = begun.finish();
    assert_eq!(moved(&mut world), (before, LEN as u64 - before, 1, 1));
}

#[test]
fn lost_windows_are_lent_anew() {
    let mut begun = Begun::new(glazing());
    begun.fill(1);
    for _ in 0..2 {
        begun.lose(Prepared::Ready);
    }
    let mut world = begun.finish();
    let (windows, fragments, resumed, declined) = moved(&mut world);
    assert!(windows >= LEN as u64);
    assert_eq!((fragments, resumed, declined), (0, 0, 0));
    assert!(world.node(1).engine.counts().windows_lost > 0);
}

#[test]
fn after_the_third_loss_the_rest_comes_as_fragments() {
    let mut begun = Begun::new(glazing());
    begun.fill(2);
    for _ in 0..3 {
        assert!(!begun.world.node(1).engine.core.arrivals.chunks.list.is_empty());
        begun.lose(Prepared::Ready);
    }
    assert!(begun.world.node(1).engine.core.arrivals.chunks.list.is_empty());
    let there = begun.received() as u64;
    let (_, fragments, resumed, _) = moved(&mut begun.finish());
    assert_eq!((fragments, resumed), (LEN as u64 - there, 1));
}

#[test]
fn when_windows_do_not_come_back_the_rest_comes_as_fragments() {
    let mut begun = Begun::new(glazing());
    begun.fill(3);
    begun.lose(Prepared::No);
    let there = begun.received() as u64;
    let (_, fragments, resumed, _) = moved(&mut begun.finish());
    assert_eq!((fragments, resumed), (LEN as u64 - there, 1));
}

#[test]
fn more_messages_than_windows_take_turns() {
    let mut world = world(Glazing { count: 3, ..glazing() }, 2);
    let peer = world.peer(0, 1);
    let mut from: Vec<_> = (0..4).map(|n| Memory::pattern(n, LEN)).collect();
    let mut to: Vec<_> = (0..4).map(|_| Memory::zeroed(LEN)).collect();
    for (from, to) in from.iter_mut().zip(&mut to) {
        world.receive(1, &receive_op(to, 2)).unwrap();
        world.send(0, &send_op(peer, from, 1)).unwrap();
    }
    world.settle();
    assert_eq!((world.sends(0).len(), world.receives(1).len()), (4, 4));
    assert!(from.iter().zip(&to).all(|(from, to)| from.0 == to.0));
    assert_eq!(moved(&mut world).0, 4 * LEN as u64);
    world.assert_empty();
}

#[test]
fn a_discarded_message_is_not_lent_anything() {
    let mut world = world(glazing(), 2);
    let peer = world.peer(0, 1);
    let (mut from, mut none) = (Memory::pattern(0, LEN), Memory::zeroed(0));
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.settle();
    world.peek(1, &receive_op(&mut none, 2), PeekAction::Discard);
    assert_eq!(world.received(1).len, LEN);
    world.settle();
    assert_eq!(world.sends(0).len(), 1);
    world.assert_empty();
}

#[test]
fn a_peer_that_goes_has_no_windows() {
    for departure in [Departure::Closed, Departure::Failed(crate::sys::Errno(libc::EHOSTDOWN))] {
        for leaver in [0, 1] {
            let mut begun = Begun::new(glazing());
            begun.fill(1);
            let Begun { mut world, .. } = begun;
            world.leave(leaver, departure);
            world.settle();
            if leaver == 0 {
                assert!(world.receive_failed(1).completion.len >= WINDOW);
                world.node(1).assert_empty();
            } else {
                world.send_failed(0);
                world.node(0).assert_empty();
            }
        }
    }
}

/// A message of four remote buffers. Endpoint 0 has written them and knows them to be taken, before 1 has polled.
pub(super) fn seen() -> Begun {
    let mut world = world(glazing(), 2);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 4 * WINDOW), Memory::zeroed(4 * WINDOW));
    world.receive(1, &receive_op(&mut to, 2)).unwrap();
    world.send(0, &send_op(peer, &mut from, 1)).unwrap();
    world.progress(1);
    for _ in 0..1000 {
        world.progress(0);
    }
    Begun { world, from, to }
}

#[test]
fn a_send_is_complete_when_its_windows_are_written() {
    let mut begun = seen();
    assert_eq!(begun.world.sends(0).len(), 1, "nobody answered");
    assert_eq!(begun.received(), 0);
    // Its buffer is the application's again, and its number is kept for the FIN.
    begun.from.0.fill(9);
    assert_eq!(begun.world.node(0).engine.core.sends.pending.len(), 1);
    begun.world.settle();
    assert_eq!(begun.world.received(1).len, 4 * WINDOW);
    assert!(begun.to.0 == Memory::pattern(0, 4 * WINDOW).0);
    begun.world.assert_empty();
    assert_eq!(begun.world.sends(0).len(), 0, "once");
}

/// It may send a part of a write again until then.
#[test]
fn a_send_is_not_complete_before_its_device_has_reported_the_writes() {
    let mut world = world(glazing(), 2);
    let peer = world.peer(0, 1);
    let (mut from, mut to) = (Memory::pattern(0, 4 * WINDOW), Memory::zeroed(4 * WINDOW));
    let mut finished = 0;
    for n in 0..50 {
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &SendOp { delivery: true, ..send_op(peer, &mut from, n) }).unwrap();
        let mut sent = 0;
        for _ in 0..1000 {
            world.progress(1);
            world.progress(0);
            sent += world.sends(0).len();
            let sends = &world.node(0).engine.core.sends;
            finished += sends
                .pending
                .iter()
                .filter(|(_, p)| matches!(p.scheme, Sender::Finished(_)))
                .count();
            assert!(sent == 0 || sends.wrote.is_empty(), "message {n}");
        }
        assert_eq!((sent, world.receives(1).len()), (1, 1));
    }
    assert!(finished > 0, "a FIN came first");
    world.assert_empty();
}

#[test]
fn a_message_written_before_its_sender_departs_is_received() {
    let mut begun = seen();
    assert_eq!(begun.world.sends(0).len(), 1);
    begun.world.leave(0, Departure::Closed);
    begun.world.settle();
    assert_eq!(begun.world.received(1).len, 4 * WINDOW);
    assert!(begun.to.0 == begun.from.0);
}

#[test]
fn a_sender_that_wants_delivery_or_sends_too_much_waits_for_the_answer() {
    for (room, delivery) in [(4 * WINDOW, true), (4 * WINDOW - 1, false)] {
        let mut world = world(glazing(), 2);
        let peer = world.peer(0, 1);
        let (mut from, mut to) = (Memory::pattern(0, 4 * WINDOW), Memory::zeroed(room));
        world.receive(1, &receive_op(&mut to, 2)).unwrap();
        world.send(0, &SendOp { delivery, ..send_op(peer, &mut from, 1) }).unwrap();
        world.progress(1);
        for _ in 0..1000 {
            world.progress(0);
        }
        assert_eq!(world.sends(0).len(), 0, "{room} {delivery}");
        world.settle();
        assert_eq!(world.sends(0).len(), 1, "{room} {delivery}");
        assert_eq!(world.receives(1).len(), 1);
        world.assert_empty();
    }
}
