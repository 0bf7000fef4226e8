//! The lanes for bulk of a peer, with two doubles beside shared memory.

use super::list::doubles::{Double, OPEN};
use super::*;
use crate::memory::OwnedBuffer;

type First = Double<201>;
type Second = Double<202>;

/// What `Router::turn` reported of lanes.
#[derive(Default)]
struct Losses(Vec<LaneId>, Vec<Departure>);

impl Handler for Losses {
    fn on_peer(&mut self, _: PeerId, _: &Address) {}
    fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {}
    fn on_lane_lost(&mut self, _: PeerId, lane: LaneId) {
        self.0.push(lane);
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        self.1.push(departure);
    }
    fn is_owed(&self, _: PeerId) -> bool {
        true
    }
}

/// Two endpoints that have met, with two lanes for bulk besides those of the transport of messages.
fn with_lanes() -> (Router, Router, PeerId, PeerId) {
    OPEN.set(true);
    let (mut a, mut b) = (on_loopback(), on_loopback());
    OPEN.set(false);
    let (me, you) = (a.me, b.me);
    // Each sends until the other has heard it, so that there are links in both directions.
    let (mut ears, begun) = ([Ear::default(), Ear::default()], clock::now_ns());
    while ears.iter().any(|ear| ear.0.is_empty()) {
        for (one, other) in [(&mut a, you), (&mut b, me)] {
            let sent = one
                .connect(&other)
                .and_then(|peer| one.send(peer, Mode::Short, b"header", 0, |_, _| ()));
            assert!(matches!(sent, Ok(()) | Err(SendError::Again)), "{sent:?}");
        }
        b.poll(&mut ears[0]);
        a.poll(&mut ears[1]);
        assert!(clock::now_ns() - begun < 60_000_000_000);
    }
    let (to, from) = (a.peers.find(&b.me).unwrap(), b.peers.find(&a.me).unwrap());
    (a, b, to, from)
}

fn order(router: &Router, peer: PeerId, on_device: bool) -> Vec<u8> {
    router.lanes(peer).by_cost(1 << 20, on_device).map(|lane| lane.lane.kind()).collect()
}

#[test]
fn a_peer_has_the_lanes_of_all_transports() {
    let (a, b, to, from) = with_lanes();
    assert_eq!((a.way(to), a.lanes.first.as_ref().unwrap().met()), (Shm::NAME, &[to][..]));
    for (router, peer) in [(&a, to), (&b, from)] {
        assert_eq!(order(router, peer, false), [201, 202, 1], "by their cost");
        assert_eq!(order(router, peer, true), [202], "where memory is of a device");
    }
    assert_eq!(order(&a, PeerId(99), false), [], "no messages, and so no keys");
    assert!(!a.has_other(Lane::shm), "no lane for bulk takes messages");
}

#[test]
fn a_key_goes_to_its_lane_and_is_void_with_that_lane_only() {
    const PUT: Put =
        Put { notify: false, delivered: false, stays: false, reports: false, token: 0 };
    let (mut a, mut b, to, from) = with_lanes();
    let [mine, theirs] = [0; 2].map(|_| OwnedBuffer::zeroed(100));
    let purpose = Purpose::Region { id: 1, reads: true, writes: true };
    let register = |b: &mut Router| {
        [First::LANE, Second::LANE].map(|lane| {
            let key = b.register(from, lane, &theirs.segments(), purpose).key().unwrap();
            assert!(lane.made(&key));
            Remote { key, offset: 0 }
        })
    };
    let put = |a: &mut Router, at: &Remote| a.put(to, &mine.segments(), at, PUT);
    let (whole, stale) = (Ok(Access::Moved(100)), Err(SendError::Unreachable(Errno(libc::ESTALE))));
    let before = register(&mut b);
    assert_eq!(before.map(|at| put(&mut a, &at)), [whole; 2]);
    a.lanes.first.as_mut().unwrap().lost = true;
    assert_eq!(a.prepare(to, First::LANE), Prepared::No);
    assert_eq!(a.prepare(to, Second::LANE), Prepared::Ready);
    let mut losses = Losses::default();
    a.hasten();
    a.poll(&mut losses);
    assert_eq!(losses.0, [First::LANE]);
    assert_eq!(before.map(|at| put(&mut a, &at)), [stale, whole]);
    // The other side hears of it, too, and the lane is back.
    b.lanes.first.as_mut().unwrap().lost = true;
    b.hasten();
    b.poll(&mut Losses::default());
    let after = register(&mut b);
    assert_eq!(after.map(|at| put(&mut a, &at)), [whole; 2]);
}

#[test]
fn all_lanes_to_a_peer_end_when_its_messages_are_lost() {
    let refused = Errno(libc::EPERM);
    OPEN.set(true);
    let (mut a, mut b) = (on_loopback(), on_loopback());
    OPEN.set(false);
    let to = a.connect(&b.address()).unwrap();
    a.send(to, Mode::Short, b"header", 8, |_, _| ()).unwrap();
    assert_eq!(a.lanes.second.as_ref().unwrap().met(), [to]);
    REFUSED.set(Some(refused));
    let (mut losses, begun) = (Losses::default(), clock::now_ns());
    while losses.1.is_empty() {
        a.poll(&mut losses);
        b.poll(&mut Losses::default());
        assert!(clock::now_ns() - begun < 60_000_000_000);
    }
    REFUSED.set(None);
    assert_eq!(losses.1, [Departure::Failed(refused)]);
    let met = [a.lanes.first.as_ref().unwrap().met(), a.lanes.second.as_ref().unwrap().met()];
    assert_eq!(met, [&[][..]; 2], "their peer has no access to this memory any more");
}

#[test]
fn all_lanes_to_a_peer_end_when_it_departs() {
    let (mut a, b, to, _) = with_lanes();
    drop(b);
    let (mut losses, begun) = (Losses::default(), clock::now_ns());
    while losses.1.is_empty() {
        a.poll(&mut losses);
        assert!(clock::now_ns() - begun < 60_000_000_000);
    }
    assert_eq!((losses.0, losses.1), (vec![], vec![Departure::Closed]));
    assert_eq!((order(&a, to, false), a.lanes.second.as_ref().unwrap().met()), (vec![], &[][..]));
}

/// Where the payload of a stream goes.
struct Place {
    buffer: OwnedBuffer,
    begun: bool,
    done: bool,
    departures: Vec<Departure>,
}

impl Handler for Place {
    fn on_peer(&mut self, _: PeerId, _: &Address) {}
    fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {}
    fn place(&mut self, _: PeerId, _: &[u8], _: usize) -> Option<SegmentList> {
        self.begun = true;
        Some(self.buffer.segments())
    }
    fn on_placed(&mut self, _: PeerId, _: &[u8], _: usize) {
        (self.begun, self.done) = (false, true);
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        self.departures.push(departure);
    }
    fn is_owed(&self, _: PeerId) -> bool {
        true
    }
}

#[test]
fn a_peer_that_has_departed_by_shared_memory_writes_nothing_by_stream() {
    const LEN: usize = 512 * 1024;
    let [mut a, mut b] = [(); 2].map(|()| at_port(true));
    b.lanes.shm.as_mut().unwrap().refuse_all(true);
    let (to, me) = (a.connect(&b.address()).unwrap(), a.me);
    let mut from = None;
    let buffer = OwnedBuffer::zeroed(LEN);
    let mut place = Place { buffer, begun: false, done: false, departures: Vec::new() };
    let (mut ear, begun) = (Losses::default(), clock::now_ns());
    let is_late = || clock::now_ns() - begun > 60_000_000_000;
    while !(from.is_some() && a.route(to) == Route::By(Lane::net) && a.has_stream(to)) {
        let sent = a.send(to, Mode::Short, b"header", 0, |_, _| ());
        assert!(matches!(sent, Ok(()) | Err(SendError::Again)), "{sent:?}");
        // It goes on by shared memory.
        let peer = b.connect(&me).ok();
        let sent = peer.map(|peer| b.send(peer, Mode::Short, b"header", 0, |_, _| ()));
        from = peer.filter(|peer| sent == Some(Ok(())) && b.way(*peer) == Shm::NAME);
        a.poll(&mut ear);
        b.poll(&mut place);
        assert!(!is_late(), "{} {sent:?} {:?}", a.way(to), peer.map(|peer| b.way(peer)));
    }
    let bytes = OwnedBuffer::from(vec![7; LEN]);
    while !place.begun {
        let _ = a.send_by_stream(to, b"frame", &bytes.segments());
        a.poll(&mut ear);
        b.poll(&mut place);
        assert!(!is_late());
    }
    assert!(place.departures.is_empty());
    a.lanes.shm = None;
    while place.departures.is_empty() {
        b.poll(&mut place);
        assert!(!is_late());
    }
    place.buffer = OwnedBuffer::zeroed(LEN);
    (place.begun, place.done) = (false, false);
    for _ in 0..20_000 {
        a.poll(&mut ear);
        b.poll(&mut place);
    }
    assert!(!place.begun && !place.done, "its stream has ended");
    assert_eq!(place.departures.len(), 1);
}
