//! A peer that several transports reach departs once, and the next process at its address is another peer.

use super::*;

/// What a router has told.
#[derive(PartialEq, Eq, Debug)]
enum Told {
    Met,
    Message(u8),
    Left(Departure),
}
use Told::{Left, Message, Met};

#[derive(Debug, Default)]
struct Story(Vec<Told>);

impl Handler for Story {
    fn on_peer(&mut self, _: PeerId, _: &Address) {
        self.0.push(Met);
    }
    fn on_message(&mut self, _: PeerId, _: &[u8], payload: &[u8]) {
        self.0.push(Message(payload[0]));
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        self.0.push(Left(departure));
    }
    fn is_owed(&self, _: PeerId) -> bool {
        true
    }
}

impl Story {
    fn has(&self, told: &Told) -> bool {
        self.0.contains(told)
    }

    fn departures(&self) -> Vec<Departure> {
        let left = |told: &Told| if let Left(departure) = told { Some(*departure) } else { None };
        self.0.iter().filter_map(left).collect()
    }
}

const BROKE: Departure = Departure::Failed(Errno(libc::ECONNRESET));

/// The next process at the address of `router`, which has ended in order.
fn next(router: Router, net: bool) -> Router {
    let port = router.me.port();
    drop(router);
    open(port, net, (JobKey::from_bytes([0; 16]), Source::Nothing)).unwrap()
}

/// Tries to send a message of one byte.
fn send(from: &mut Router, to: &Address, byte: u8) -> bool {
    let sent = from
        .connect(to)
        .and_then(|peer| from.send(peer, Mode::Short, b"header", 1, |_, to| to.fill(byte)));
    assert!(matches!(sent, Ok(()) | Err(SendError::Again)), "{sent:?}");
    sent.is_ok()
}

/// Repeats `step` until it has come to its end.
fn until(mut step: impl FnMut() -> bool) {
    let begun = clock::now_ns();
    while !step() {
        assert!(clock::now_ns() - begun < 60_000_000_000);
    }
}

/// `a` has a link to `b`, which has none back.
fn linked() -> (Router, Router) {
    let (mut a, mut b) = (at_port(true), at_port(true));
    let you = b.me;
    let mut heard = Story::default();
    until(|| {
        send(&mut a, &you, 1);
        a.poll(&mut Story::default());
        b.poll(&mut heard);
        heard.has(&Message(1))
    });
    (a, b)
}

/// `b` has a link to `a`, which has none back, and neither has a network.
fn linked_back() -> (Router, Router) {
    let (mut a, mut b) = (at_port(false), at_port(false));
    let me = a.me;
    let mut told = Story::default();
    until(|| {
        send(&mut b, &me, 1);
        a.poll(&mut told);
        b.poll(&mut Story::default());
        told.has(&Message(1))
    });
    (a, b)
}

/// `a` reaches `b` by shared memory, and `b` reaches `a` over the network.
fn mixed() -> (Router, Router) {
    let [mut a, mut b] = [(); 2].map(|()| with_key(true, 0, Source::Nothing));
    let (me, you) = (a.me, b.me);
    a.lanes.shm.as_mut().unwrap().refuse_all(true);
    let (mut at_a, mut at_b) = (Story::default(), Story::default());
    until(|| {
        let (to, from) = (a.peers.find(&you), b.peers.find(&me));
        send(&mut a, &you, 1);
        send(&mut b, &me, 2);
        a.poll(&mut at_a);
        b.poll(&mut at_b);
        to.is_some_and(|to| a.route(to) == Route::By(Lane::shm))
            && from.is_some_and(|from| b.route(from) == Route::By(Lane::net))
            && at_a.has(&Message(2))
            && at_b.has(&Message(1))
    });
    (a, b)
}

#[test]
fn the_next_process_is_met_after_the_departure_that_nobody_has_reported() {
    let (mut a, b) = linked();
    let (me, you) = (a.me, b.me);
    let (mut told, mut heard) = (Story::default(), Story::default());
    let mut b = next(b, true);
    b.lanes.shm = None;
    heard.0.clear();
    // The network is looked at first.
    until(|| {
        send(&mut b, &me, 2);
        b.poll(&mut heard);
        a.turn(Lane::net, &mut told);
        told.has(&Message(2))
    });
    assert_eq!(told.0[..3], [Left(Departure::Closed), Met, Message(2)]);
    until(|| {
        a.turn(Lane::shm, &mut told);
        send(&mut a, &you, 3);
        a.poll(&mut told);
        b.poll(&mut heard);
        heard.has(&Message(3))
    });
    assert_eq!((told.departures(), heard.departures()), (vec![Departure::Closed], vec![]));
}

#[test]
fn the_last_message_is_delivered_before_the_next_process_is_met() {
    let (mut a, mut b) = linked();
    let me = a.me;
    let (mut told, mut heard) = (Story::default(), Story::default());
    until(|| send(&mut b, &me, 2));
    assert_eq!(b.route(b.peers.find(&me).unwrap()), Route::By(Lane::shm));
    let mut b = next(b, true);
    b.lanes.shm = None;
    heard.0.clear();
    until(|| {
        send(&mut b, &me, 3);
        b.poll(&mut heard);
        a.turn(Lane::net, &mut told);
        told.has(&Message(3))
    });
    assert_eq!(told.0[..5], [Met, Message(2), Left(Departure::Closed), Met, Message(3)]);
    for _ in 0..10 {
        a.turn(Lane::shm, &mut told);
        b.poll(&mut heard);
    }
    assert_eq!((told.departures(), heard.departures()), (vec![Departure::Closed], vec![]));
}

#[test]
fn a_peer_that_departs_by_the_network_departs_by_shared_memory() {
    let (mut a, mut b) = mixed();
    let (mut told, mut heard) = (Story::default(), Story::default());
    b.lanes.net = None;
    until(|| {
        a.poll(&mut told);
        b.poll(&mut heard);
        !heard.departures().is_empty()
    });
    assert_eq!((told.departures().len(), heard.departures()), (1, vec![BROKE]));
    drop(b);
    for _ in 0..10 {
        a.turn(Lane::shm, &mut told);
    }
    assert_eq!(told.departures().len(), 1);
}

#[test]
fn a_peer_that_departs_by_shared_memory_departs_by_the_network() {
    let (mut a, mut b) = mixed();
    let (mut told, mut heard) = (Story::default(), Story::default());
    b.lanes.shm = None;
    until(|| {
        a.poll(&mut told);
        b.poll(&mut heard);
        !heard.departures().is_empty()
    });
    let closed = [Departure::Closed];
    assert_eq!((&told.departures()[..], &heard.departures()[..]), (&closed[..], &closed[..]));
}

#[test]
fn what_a_peer_refused_does_not_go_to_the_next_process() {
    let (mut a, mut b) = linked_back();
    let you = b.me;
    let (mut told, mut heard) = (Story::default(), Story::default());
    b.lanes.shm.as_mut().unwrap().refuse_all(true);
    assert!(send(&mut a, &you, 2));
    until(|| {
        b.poll(&mut heard);
        // It has no room to send them once more.
        SHORT.set(Some(Errno(libc::EMFILE)));
        a.poll(&mut told);
        SHORT.set(None);
        a.moving() > 0
    });
    let mut b = next(b, false);
    until(|| {
        a.turn(Lane::shm, &mut told);
        !told.departures().is_empty()
    });
    until(|| {
        send(&mut a, &you, 3);
        a.poll(&mut told);
        b.poll(&mut heard);
        heard.has(&Message(3))
    });
    assert!(!heard.has(&Message(2)), "{heard:?}");
}

#[test]
fn a_peer_that_refuses_for_good_learns_that_its_own_operations_have_ended() {
    let (mut a, mut b) = linked_back();
    let you = b.me;
    let (mut told, mut heard) = (Story::default(), Story::default());
    REFUSED.set(Some(Errno(libc::EPERM)));
    assert!(send(&mut a, &you, 2));
    until(|| {
        a.poll(&mut told);
        b.poll(&mut heard);
        !heard.departures().is_empty()
    });
    REFUSED.set(None);
    assert!(told.has(&Left(Departure::Failed(Errno(libc::EPERM)))), "{told:?}");
    assert_eq!(heard.departures(), [BROKE]);
}
