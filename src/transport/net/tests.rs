//! Endpoints on this host, over the loopback interface: what happens while an application computes and does not poll.

use super::*;
use crate::memory::OwnedBuffer;
use crate::sys::event::wait_readable;
use crate::sys::reserve::tests::without_memory;
use crate::transport::Source;
use crate::transport::address::LocalHost;
use crate::transport::net::bulk::no_way::NoWay;
use crate::transport::net::shared::ABSENT_NS;
use crate::transport::net::verbs::config::RdmaPolicy;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

/// One endpoint, and the events it has received.
struct End {
    net: Net,
    peers: PeerTable,
    got: Got,
}

#[derive(Default)]
struct Got {
    peers: usize,
    /// First header byte and payload length of each message.
    messages: Vec<(u8, usize)>,
    departures: Vec<Departure>,
    /// Up to where a peer had acknowledged when it departed.
    upto: Vec<Mark>,
    /// The streams that it has lost.
    lost: Vec<StreamEnd>,
    /// It waits for its peers.
    waits: bool,
}

impl Handler for Got {
    fn on_peer(&mut self, _: PeerId, _: &Address) {
        self.peers += 1;
    }
    fn on_message(&mut self, _: PeerId, header: &[u8], payload: &[u8]) {
        self.messages.push((header[0], payload.len()));
    }
    fn on_acknowledged(&mut self, _: PeerId, upto: Mark) {
        self.upto.push(upto);
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        self.departures.push(departure);
    }
    fn on_stream_lost(&mut self, _: PeerId, end: StreamEnd) {
        self.lost.push(end);
    }
    fn is_owed(&self, _: PeerId) -> bool {
        self.waits
    }
}

impl End {
    /// Neither endpoint recognises this host: the peer counts as remote.
    fn open() -> Self {
        Self::open_at(0)
    }

    fn open_at(port: u16) -> Self {
        Self::open_with(port, 120)
    }

    fn open_with(port: u16, peer_timeout_s: u64) -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], port));
        let link = UdpLink::open(&any, None).unwrap();
        let me = Address(SocketAddr::new(any.ip(), link.local_addr().unwrap().port()));
        let settings = NetSettings {
            key: JobKey::from_bytes([7; 16]),
            key_source: Source::AuthKey,
            peer_timeout_s,
            buffer_bytes: 64 << 20,
            streams: 4,
            rdma: RdmaSettings { policy: RdmaPolicy::Off, ..RdmaSettings::default() },
        };
        let peers = PeerTable::new(LocalHost::default());
        let net = Net::with(me, link, PeerTable::new(LocalHost::default()), settings).unwrap();
        Self { net, peers, got: Got::default() }
    }

    fn meet(&mut self, other: &Self) -> PeerId {
        let peer = self.peers.intern(&other.net.me).unwrap();
        self.net.begin(peer, &other.net.me).unwrap();
        peer
    }

    fn poll(&mut self) {
        self.net.turn(&mut self.peers, &mut self.got);
    }

    fn send(&mut self, peer: PeerId, mark: u8, len: usize) -> bool {
        match self.net.send(peer, Mode::Bulk, &[mark], len, |_, to| to.fill(mark)) {
            Ok(()) => true,
            Err(SendError::Again) => false,
            Err(other) => panic!("{other:?}"),
        }
    }

    fn counts(&self) -> reliable::Counts {
        *self.net.core.enter().unwrap().machine.counts()
    }

    fn background_turns(&self) -> u64 {
        self.net.core.enter().unwrap().background_turns
    }
}

/// Calls `step` until it returns true; false after `seconds`.
fn within(seconds: u64, mut step: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + crate::patience::seconds(seconds);
    while Instant::now() < end {
        if step() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn turns_are_brief_for_a_while_by_the_counter_and_only_with_a_device() {
    // The counter has three ticks per nanosecond.
    let (whole, start) = (WHOLE_NS, 1_000_000);
    let mut rhythm = Rhythm { hot: 1, ..Rhythm::default() };
    assert!(!rhythm.begin(|| unreachable!()), "nothing is known of the counter");
    rhythm.begin_whole(start, 3 * start, true);
    rhythm.begin_whole(start + MEASURE_NS, 3 * (start + MEASURE_NS), true);
    let at = start + MEASURE_NS;
    assert!(rhythm.begin(|| 3 * (at + whole) - 1) && rhythm.brief);
    assert!(!rhythm.begin(|| 3 * (at + whole)) && !rhythm.brief);
    assert!(!rhythm.begin(|| 3 * at - 1), "another processor's is behind");
    // However fast it seems, the span is limited.
    rhythm.begin_whole(at + MEASURE_NS, u64::MAX / 2, true);
    assert!(!rhythm.begin(|| u64::MAX / 2 + 8 * whole));
    rhythm.begin_whole(at + 2 * MEASURE_NS, 0, false);
    assert!(!rhythm.begin(|| unreachable!()));
}

#[test]
fn an_application_that_never_polls_is_met() {
    let (mut a, mut b) = (End::open(), End::open());
    let to_b = a.meet(&b);
    assert!(a.send(to_b, 1, 100));
    // An acknowledgement proves that the peer is alive and of this job.
    assert!(within(2, || {
        a.poll();
        a.net.unacknowledged() == 0
    }));
    assert_eq!((a.got.peers, b.got.peers, b.got.messages.len()), (1, 0, 0));
    b.poll();
    assert_eq!((b.got.peers, b.got.messages.as_slice()), (1, [(1, 100)].as_slice()));
    drop(a);
    assert!(within(2, || {
        b.poll();
        b.got.departures == [Departure::Closed]
    }));
}

#[test]
fn a_new_peer_without_a_number_is_not_acknowledged_and_ignored() {
    for absent in [false, true] {
        let (mut a, mut b) = (End::open(), End::open());
        // The index of the next number needs a large piece of memory.
        for port in 1..=12_288 {
            b.peers.intern(&Address(SocketAddr::from(([203, 0, 113, 9], port)))).unwrap();
        }
        let to_b = a.meet(&b);
        assert!(a.send(to_b, 1, 100));
        let acknowledged = |a: &mut End| {
            a.poll();
            a.net.unacknowledged() == 0
        };
        // The thread of `b` meets the peer, or the application itself.
        assert!(!absent || within(20, || acknowledged(&mut a)));
        without_memory(100_000, || {
            assert!(b.peers.intern(&a.net.me).is_none());
            for _ in 0..1000 {
                a.poll();
                b.poll();
            }
        });
        assert!(b.got.messages.is_empty());
        assert!(within(20, || {
            a.poll();
            b.poll();
            !a.got.departures.is_empty() || !b.got.messages.is_empty()
        }));
        // It can be met later.
        a.net.begin(to_b, &b.net.me).unwrap();
        assert!(a.send(to_b, 2, 100));
        assert!(within(20, || {
            b.poll();
            acknowledged(&mut a) && b.got.messages.last() == Some(&(2, 100))
        }));
    }
}

#[test]
fn an_application_that_is_back_has_the_machine_to_itself_again() {
    if !process::barrier_for_all() {
        // A kernel before Linux 4.14, or a sandbox: the mutex is always taken.
        return eprintln!("skipped: no membarrier(2) for all threads");
    }
    let mut end = End::open();
    for _ in 0..3 {
        assert!(within(2, || end.background_turns() > 0 && !end.net.core.is_alone()));
        // Nothing arrives, and nothing is due: a poll must tell the thread.
        assert!(within(2, || {
            end.poll();
            end.net.core.is_alone()
        }));
    }
}

/// An emulated device does all of a write while it is posted: the background thread would only disturb.
#[test]
fn a_long_write_is_no_absence() {
    let (mut a, b) = (End::open(), End::open());
    let to_b = a.meet(&b);
    a.net.bulk = Some(NoWay::taking(2));
    let memory = OwnedBuffer::zeroed(16);
    let at = Remote { key: RemoteKey::default(), offset: 0 };
    let put = Put { notify: true, delivered: false, stays: false, reports: false, token: 1 };
    for _ in 0..2 {
        let before = clock::now_ns();
        assert!(a.net.put(to_b, &memory.segments(), &at, put).is_err());
        let over = before + 2_000_000;
        assert!(a.net.shared.present_until() >= over + ABSENT_NS, "as when it was over");
        let before = clock::now_ns();
        assert!(a.net.get(to_b, &memory.segments(), &at, 1).is_err());
        assert!(a.net.shared.present_until() >= before + ABSENT_NS, "as when it began");
    }
}

/// `a` sends the first message to `b`, which acknowledges it.
#[track_caller]
fn acquaint(a: &mut End, b: &mut End) -> PeerId {
    let there = a.meet(b);
    assert!(a.send(there, 1, 100));
    assert!(within(20, || {
        a.poll();
        b.poll();
        b.got.messages.len() == 1 && a.net.unacknowledged() == 0
    }));
    there
}

#[test]
fn nothing_is_sent_to_a_new_incarnation_before_the_departure_of_the_old_one_is_told() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = acquaint(&mut a, &mut b);
    // The background thread of `a` hears that `b` closes, and is met by the next endpoint at its port.
    let port = b.net.me.port();
    drop(b);
    let mut b = End::open_at(port);
    b.meet(&a);
    assert!(within(20, || {
        b.poll();
        b.got.peers == 1
    }));
    let header = [2];
    assert!(!a.send(there, 2, 100), "it belongs to the connection that has ended");
    assert!(!a.net.leave_at_once(there, &header, 100, |_, to| to.fill(2)));
    assert_eq!(a.net.send_late(there, &header), Err(SendError::Again));
    let payload = OwnedBuffer::zeroed(16);
    let by_stream = a.net.send_by_stream(there, &header, &payload.segments());
    assert_eq!(by_stream, Err(SendError::Again));
    let at = Address(SocketAddr::from(([127, 0, 0, 1], port)));
    assert_eq!(a.net.begin(there, &at), Err(SendError::Again));
    a.poll();
    assert_eq!(a.got.departures, [Departure::Closed]);
    a.net.begin(there, &at).unwrap();
    assert!(a.send(there, 3, 100));
    assert!(within(20, || {
        a.poll();
        b.poll();
        !b.got.messages.is_empty()
    }));
    assert_eq!((b.got.messages.as_slice(), a.got.departures.len()), ([(3, 100)].as_slice(), 1));
}

#[test]
fn a_dead_peer_is_noticed_by_an_application_that_polls_with_pauses() {
    let (mut a, mut b) = (End::open_with(0, 2), End::open());
    acquaint(&mut a, &mut b);
    // Neither `b` nor its thread answers from now on.
    let dead = b.net.core.enter().unwrap();
    a.got.waits = true;
    assert!(within(20, || {
        std::thread::sleep(Duration::from_millis(30));
        a.poll();
        !a.got.departures.is_empty()
    }));
    drop(dead);
    assert_eq!(a.got.departures, [Departure::Failed(Errno(libc::ETIMEDOUT))]);
}

#[test]
fn a_peer_without_room_holds_up_what_is_said_to_no_other_and_no_sleep() {
    let (mut a, mut b, mut c) = (End::open(), End::open(), End::open());
    let (to_b, to_c) = (a.meet(&b), a.meet(&c));
    assert!(a.send(to_b, 1, 100) && a.send(to_c, 1, 100));
    assert!(within(20, || {
        a.poll();
        b.poll();
        c.poll();
        b.got.messages.len() == 1 && c.got.messages.len() == 1 && a.net.unacknowledged() == 0
    }));
    let silent = c.net.core.enter().unwrap();
    let mut sent = 1;
    for len in [1000, 0] {
        while a.send(to_c, 2, len) {
            sent += 1;
            a.poll();
            assert!(sent < 10_000);
        }
    }
    let sleeps = |a: &mut End| {
        a.poll();
        let sleeps = a.net.sleep();
        a.net.awake();
        sleeps
    };

    // Neither peer has a stream: both are told that theirs broke.
    let nothing = SegmentList::EMPTY;
    for peer in [to_c, to_b] {
        assert_eq!(a.net.send_by_stream(peer, &[1], &nothing), Err(SendError::Again));
    }
    assert!(within(20, || {
        a.poll();
        b.poll();
        b.got.lost == [StreamEnd::Incoming]
    }));
    assert!(within(20, || sleeps(&mut a)));

    // The same for messages of the bulk path, however many wait: an OVER that waits there would be overtaken.
    let over = |connection| Message::Over { connection, broken: false }.encode(Way::Rc);
    let inner = |peer| a.net.numbers.inner(peer).unwrap();
    let (inner_b, inner_c) = (inner(to_b), inner(to_c));
    let all = (0..5000).map(|number| (inner_c, over(number))).chain([(inner_b, over(0))]);
    let before = b.counts().data_received;
    a.net.bulk = Some(NoWay::saying(all));
    assert!(within(20, || {
        a.poll();
        b.poll();
        b.counts().data_received > before
    }));
    assert!(within(20, || sleeps(&mut a)));

    // But a peer that asks, and takes no answers, gets none.
    for (peer, answers) in [(inner_c, 0), (inner_b, 1)] {
        let refuse = (peer, Message::Refuse(7).encode(Way::Rc));
        let mut core = a.net.core.enter().unwrap();
        let machine = &mut core.machine;
        assert_eq!(say(NoWay::saying([refuse]).as_mut(), machine, clock::now_ns()), answers);
    }

    drop(silent);
    assert!(within(20, || {
        a.poll();
        c.poll();
        c.got.lost == [StreamEnd::Incoming] && a.net.unacknowledged() == 0
    }));
    assert_eq!((c.got.messages.len(), b.got.messages.len()), (sent, 1));
    assert_eq!(a.got.lost, [StreamEnd::Outgoing; 2]);
}

#[test]
fn what_the_bulk_path_says_is_said_before_the_engine_goes_on() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = acquaint(&mut a, &mut b);
    let to = a.net.numbers.inner(there).unwrap();
    let over = |connection| Message::Over { connection, broken: true }.encode(Way::Rc);
    let all = (0..2 * BATCH as u32).map(|number| (to, over(number)));
    a.net.bulk = Some(NoWay::saying(all));
    a.poll();
    assert!(!a.net.bulk.as_ref().unwrap().has_work(), "each ends a connection");
}

#[test]
fn an_endpoint_that_is_started_later_is_met() {
    let (mut a, gone) = (End::open(), End::open());
    let to = gone.net.me;
    drop(gone);
    let peer = a.peers.intern(&to).unwrap();
    a.net.begin(peer, &to).unwrap();
    assert!(a.send(peer, 4, 100));
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(1) {
        a.poll();
        assert_eq!(a.got.departures, [], "it is waited for");
    }
    let mut b = End::open_at(to.port());
    assert!(within(4, || {
        a.poll();
        b.poll();
        b.got.messages == [(4, 100)]
    }));
    println!("met {:?} after the first try", since.elapsed());
    assert_eq!((a.got.departures.len(), b.got.departures.len()), (0, 0));
}

#[test]
fn a_message_leaves_although_its_sender_polls_no_more() {
    let (mut a, mut b) = (End::open(), End::open());
    let to_b = a.meet(&b);
    assert!(a.send(to_b, 9, 5000));
    assert!(within(2, || {
        b.poll();
        b.got.messages == [(9, 5000)]
    }));
}

/// Waits until the background thread has taken over from an application that computes, and sleeps for at least `ms`.
#[track_caller]
fn await_rest(end: &End, ms: u64) {
    let rests = |until: u64| until > clock::now_ns() + ms * 1_000_000;
    assert!(within(20, || end.net.shared.rests_until().is_some_and(rests)));
}

#[test]
fn a_connect_request_is_repeated_although_its_sender_computes() {
    let mut a = End::open();
    await_rest(&a, 60_000);
    // Nothing comes back: no acknowledgement, and no refusal.
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    silent.set_read_timeout(Some(crate::patience::seconds(4))).unwrap();
    let at = Address(silent.local_addr().unwrap());
    let peer = a.peers.intern(&at).unwrap();
    a.net.begin(peer, &at).unwrap();
    assert!(a.send(peer, 1, 100));
    for n in 0..4 {
        assert!(silent.recv(&mut [0; 2048]).is_ok(), "{n} requests");
    }
}

#[test]
fn a_lost_message_is_repeated_although_its_sender_computes() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = acquaint(&mut a, &mut b);
    await_rest(&a, 3_500);
    // Neither `b` nor its thread answers from now on.
    let silent = b.net.core.enter().unwrap();
    let until = a.net.shared.rests_until().unwrap();
    assert!(a.send(there, 2, 100));
    assert!(within(20, || a.counts().retransmitted > 0));
    assert!(clock::now_ns() + 1_000_000_000 < until, "it need not wait for the thread's next turn");
    drop(silent);
}

#[test]
fn messages_of_an_application_that_computes_wake_no_thread_before_their_deadline() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = acquaint(&mut a, &mut b);
    await_rest(&a, 3_500);
    let rung = a.net.shared.rung.load(Ordering::Relaxed);
    for _ in 0..100 {
        assert!(a.send(there, 2, 100));
    }
    assert_eq!(a.net.shared.rung.load(Ordering::Relaxed), rung);
    // The thread sends what was held back for more.
    assert!(within(20, || {
        b.poll();
        b.got.messages.len() == 101
    }));
}

#[test]
fn a_lost_message_is_repeated_soon_although_its_sender_slept_and_then_computes() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = acquaint(&mut a, &mut b);
    let set = Arc::new(LateSet::new().unwrap());
    a.net.watch(&set, 1).unwrap();
    await_rest(&a, 3_500);
    a.poll();
    assert!(a.net.sleep());
    std::thread::sleep(Duration::from_millis(60));
    a.net.awake();
    a.poll();
    let silent = b.net.core.enter().unwrap();
    let sent = Instant::now();
    assert!(a.send(there, 2, 100));
    assert!(within(20, || a.counts().retransmitted > 0));
    assert!(sent.elapsed() < crate::patience::seconds(1) / 2, "{:?}", sent.elapsed());
    drop(silent);
}

/// A thread of `a` sleeps on this set, for at least 3.5 s if nothing happens.
fn put_to_sleep(a: &mut End, b: &mut End) -> Arc<LateSet> {
    let set = Arc::new(LateSet::new().unwrap());
    a.net.watch(&set, 1).unwrap();
    assert!(within(20, || {
        a.net.awake();
        a.poll();
        b.poll();
        a.net.sleep() && a.net.shared.wakes_at() > clock::now_ns() + 3_500_000_000
    }));
    set
}

#[test]
fn a_thread_that_sleeps_wakes_for_what_another_one_has_sent() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = acquaint(&mut a, &mut b);
    a.net.background = None;
    let set = put_to_sleep(&mut a, &mut b);
    let silent = b.net.core.enter().unwrap();
    let until = a.net.shared.wakes_at();
    assert!(a.send(there, 2, 100));
    let woken = wait_readable(set.fd().unwrap(), 20_000);
    assert!(woken == Ok(true) && clock::now_ns() + 1_000_000_000 < until);
    drop(silent);
}

/// Of a device, as of the bulk path that only says so: it has completed the request before the sleeper watches it.
#[test]
fn a_thread_that_sleeps_wakes_for_a_request_that_another_one_has_posted() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = acquaint(&mut a, &mut b);
    a.net.background = None;
    a.net.bulk = Some(NoWay::beginning());
    let set = put_to_sleep(&mut a, &mut b);
    assert_eq!(wait_readable(set.fd().unwrap(), 0), Ok(false));
    let (memory, how) = (
        OwnedBuffer::zeroed(16),
        Put { notify: false, delivered: false, stays: false, reports: false, token: 1 },
    );
    let at = Remote { key: RemoteKey::default(), offset: 0 };
    assert_eq!(a.net.put(there, &memory.segments(), &at, how), Ok(Access::Begun));
    assert_eq!(wait_readable(set.fd().unwrap(), 1000), Ok(true));
}

#[test]
fn what_waited_is_delivered_once_and_in_order() {
    const LEN: usize = 60_000;
    /// More than an endpoint keeps for its application.
    const COUNT: usize = (24 << 20) / LEN;
    let (mut a, mut b) = (End::open(), End::open());
    let to_b = a.meet(&b);
    let mut sent = 0;
    // Until the peer accepts no more.
    let mut since = Instant::now();
    within(20, || {
        while sent < COUNT && a.send(to_b, sent as u8, LEN) {
            sent += 1;
            since = Instant::now();
        }
        a.poll();
        since.elapsed() > Duration::from_secs(1)
    });
    let kept = b.net.core.enter().unwrap().has_events();
    assert!(kept && sent * LEN > 8 << 20, "{sent} messages were taken");
    assert!(sent < COUNT || a.net.unacknowledged() > 0, "there is a bound");
    assert_eq!((a.got.departures.len(), b.got.messages.len()), (0, 0));
    assert!(within(20, || {
        while sent < COUNT && a.send(to_b, sent as u8, LEN) {
            sent += 1;
        }
        a.poll();
        b.poll();
        b.got.messages.len() == COUNT
    }));
    assert!(b.got.messages.iter().enumerate().all(|(i, m)| *m == (i as u8, LEN)));
    assert_eq!((a.got.departures.len(), b.got.departures.len()), (0, 0));
}

#[test]
fn an_endpoint_that_holds_enough_still_hears_acknowledgements() {
    let (mut a, mut b) = (End::open(), End::open());
    let (to_b, to_a) = (a.meet(&b), b.meet(&a));
    // `b` holds as much as it may, and goes away for good.
    let mut since = Instant::now();
    within(20, || {
        if a.send(to_b, 1, 60_000) {
            since = Instant::now();
        }
        a.poll();
        since.elapsed() > Duration::from_millis(500)
    });
    assert!(b.send(to_a, 2, 10));
    let before = b.counts().retransmitted;
    assert!(within(5, || {
        a.poll();
        b.net.unacknowledged() == 0
    }));
    assert_eq!(a.got.messages, [(2, 10)]);
    assert!(b.counts().retransmitted - before < 20);
}

#[test]
fn silence_wakes_nobody() {
    let (mut a, mut b) = (End::open(), End::open());
    let idle = End::open();
    let to_b = a.meet(&b);
    assert!(a.send(to_b, 1, 100));
    assert!(within(2, || {
        a.poll();
        b.poll();
        a.net.unacknowledged() == 0 && b.got.messages.len() == 1
    }));
    // Once the threads have taken over and sent what was left to send.
    std::thread::sleep(Duration::from_millis(1500));
    let turns = || [&a, &b, &idle].map(End::background_turns);
    let before = turns();
    std::thread::sleep(Duration::from_secs(2));
    let after = turns();
    // A connection is checked every 5 s.
    assert!(after[0] - before[0] <= 2 && after[1] - before[1] <= 2, "{before:?} {after:?}");
    assert_eq!(after[2], before[2]);
    assert!(after[2] <= 2, "{after:?}");
}

#[test]
fn a_sender_learns_of_the_arrival_even_from_a_peer_that_departs() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = a.meet(&b);
    let send = |a: &mut End, mark: u8| {
        assert!(a.net.track(there) && a.send(there, mark, 100));
        a.net.tracked(there).expect("nobody has polled since")
    };
    let first = send(&mut a, 1);
    assert!(a.net.acknowledged(there).is_none_or(|upto| !first.is_before(upto)));
    assert!(within(20, || {
        a.poll();
        b.poll();
        a.net.acknowledged(there).is_some_and(|upto| first.is_before(upto))
    }));
    assert_eq!((a.net.tracked(there), b.got.messages.len()), (None, 1));
    // b receives the second message and closes, and a learns both at once.
    let second = send(&mut a, 2);
    assert!(within(20, || {
        b.poll();
        b.got.messages.len() == 2
    }));
    drop(b);
    assert!(within(20, || {
        a.poll();
        !a.got.departures.is_empty()
    }));
    assert_eq!(a.got.departures, [Departure::Closed]);
    assert!(second.is_before(a.got.upto[0]) && first.is_before(a.got.upto[0]));
    let other = Mark { connection: second.connection + 1, ..second };
    assert!(!other.is_before(a.got.upto[0]), "each connection has its own sequence");
}

#[test]
fn a_process_that_ends_has_its_packets_acknowledged_without_a_poll() {
    let (mut a, mut b) = (End::open(), End::open());
    let there = a.meet(&b);
    for i in 0..20 {
        assert!(a.send(there, i, 1000));
    }
    // They are not even connected. The peer does not poll either: its thread answers for it.
    a.net.shared.flush();
    assert!(within(20, || a.net.shared.is_flushed()));
    assert_eq!(a.net.unacknowledged(), 0);
    assert!(within(20, || {
        b.poll();
        b.got.messages.len() == 20
    }));
}

#[test]
fn the_remedy_for_a_missing_thread_is_the_limit_that_is_exhausted() {
    assert!(remedy(Errno(libc::EAGAIN)).contains("ulimit -u"));
    assert!(remedy(Errno(libc::EMFILE)).contains("ulimit -n"));
    assert_eq!(remedy(Errno(libc::EPERM)), "", "a sandbox");
}

/// `cargo test --release --lib net::tests::costs -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn costs() {
    const COUNT: usize = 200;
    let status = |what: &str| {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find(|line| line.starts_with(what)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
    };
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = (fds(), status("Threads:"), status("VmRSS:"));
    let start = Instant::now();
    let ends: Vec<End> = (0..COUNT).map(|_| End::open()).collect();
    let opening = start.elapsed();
    std::thread::sleep(Duration::from_millis(200));
    let after = (fds(), status("Threads:"), status("VmRSS:"));
    let start = Instant::now();
    drop(ends);
    let per = |all: usize| all as f64 / COUNT as f64;
    println!(
        "one endpoint: {:?} to open, {:?} to close, {} descriptors, {} threads, {:.1} KiB resident",
        opening / COUNT as u32,
        start.elapsed() / COUNT as u32,
        per(after.0 - before.0),
        per(after.1 - before.1),
        per(after.2.saturating_sub(before.2))
    );
}
