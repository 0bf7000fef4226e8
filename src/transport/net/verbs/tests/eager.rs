//! Packets that are written into a peer's ring, by a device.

use super::*;
use crate::sys::event::{Epoll, wait_readable};

/// Two endpoints that take turns.
struct Turns {
    a: End,
    b: End,
    to_a: PeerId,
    to_b: PeerId,
    mark: u8,
}

impl Turns {
    fn open(ip: IpAddr, limits: [usize; 2]) -> Self {
        let open = |limit| {
            End::open_with(ip, RdmaSettings { eager_rdma: limit, ..settings(RdmaPolicy::Require) })
        };
        let (mut a, mut b) = (open(limits[0]), open(limits[1]));
        // What is compiled for tests takes its time.
        for end in [&mut a, &mut b] {
            end.net.set_near(u32::MAX);
        }
        let (to_b, to_a) = (a.meet(&b), b.meet(&a));
        Self { a, b, to_a, to_b, mark: 0 }
    }

    /// A question of `len` bytes, and then an answer; `sleeps`: between its looks `b` sleeps.
    fn exchange(&mut self, len: usize, sleeps: Option<&Epoll>) {
        self.mark = self.mark.wrapping_add(1);
        let Self { a, b, to_a, to_b, mark } = self;
        let before = [a.got.messages.len(), b.got.messages.len()];
        assert!(within(20, || a.send(*to_b, *mark, len)));
        assert!(within(20, || {
            a.poll();
            if let Some(epoll) = sleeps {
                if b.net.sleep() {
                    let _ = wait_readable(epoll.fd(), 1000);
                    b.net.awake();
                }
            }
            b.poll();
            b.got.messages.len() > before[1]
        }));
        assert!(within(20, || b.send(*to_a, *mark, len)));
        assert!(within(20, || {
            b.poll();
            a.poll();
            a.got.messages.len() > before[0]
        }));
        for (end, before) in [&*a, &*b].into_iter().zip(before) {
            assert_eq!(end.got.messages.len(), before + 1);
            assert!(is_intact(&end.got.messages[before], *mark, len), "{len} bytes");
        }
    }

    /// Exchanges until both ends write what they send.
    fn until_written(&mut self) {
        let end = Instant::now() + Duration::from_secs(30);
        while Instant::now() < end {
            let before = self.eager();
            (0..20).for_each(|_| self.exchange(100, None));
            let now = self.eager();
            if (0..2).all(|i| now[i].sent >= before[i].sent + 15) {
                return;
            }
        }
        panic!("{:?}", self.eager());
    }

    fn eager(&self) -> [super::super::eager::EagerCounts; 2] {
        [self.a.rdma().eager, self.b.rdma().eager]
    }
}

#[test]
fn questions_and_answers_are_written_into_rings() {
    let Some(ip) = address() else { return };
    let mut turns = Turns::open(ip, [4, 1]);
    turns.until_written();
    let before = turns.eager();
    let sizes = [0, 1, 60, 100, 200, 500, 3000, 4000, 4100, 4500, 9000, 16_384, 16_500, 60_000];
    for len in sizes.into_iter().cycle().take(20 * sizes.len()) {
        turns.exchange(len, None);
    }
    for (end, before) in turns.eager().into_iter().zip(before) {
        assert_eq!((end.made, end.channels, end.broken), (1, 1, 0), "{end:?}");
        // All but the longest ones, those that were in a hurry to be acknowledged, and what was sent again.
        assert!(end.sent - before.sent > 100 && end.received > 100, "{end:?}");
    }
    // Who sends many at once does so by datagrams.
    let (sent, by_ring) = (turns.a.rdma().datagrams.sent, turns.eager()[0].sent);
    let before = turns.b.got.messages.len();
    let mut n = 0;
    assert!(within(60, || {
        while n < 500 && turns.a.send(turns.to_b, n as u8, 1000) {
            n += 1;
        }
        turns.a.poll();
        turns.b.poll();
        turns.b.got.messages.len() == before + 500
    }));
    for (n, message) in turns.b.got.messages[before..].iter().enumerate() {
        assert!(is_intact(message, n as u8, 1000));
    }
    assert!(turns.eager()[0].sent - by_ring < 250, "{:?}", turns.eager());
    assert!(turns.a.rdma().datagrams.sent > sent);
}

#[test]
fn who_wants_no_rings_has_none() {
    let Some(ip) = address() else { return };
    for limits in [[0, 4], [4, 0]] {
        let mut turns = Turns::open(ip, limits);
        (0..300).for_each(|_| turns.exchange(100, None));
        for end in turns.eager() {
            assert_eq!((end.made, end.channels, end.sent, end.received), (0, 0, 0, 0));
        }
        assert!(turns.a.rdma().datagrams.sent > 100);
    }
}

#[test]
fn a_sleeper_is_woken_although_it_has_a_ring() {
    let Some(ip) = address() else { return };
    let mut turns = Turns::open(ip, [1, 1]);
    turns.until_written();
    let epoll = Epoll::new().unwrap();
    turns.b.net.watch(&epoll, 1).unwrap();
    let began = Instant::now();
    for _ in 0..40 {
        turns.exchange(100, Some(&epoll));
    }
    assert!(turns.eager()[1].sleeps >= 1, "{:?}", turns.eager());
    // Each would have taken a second if nobody had woken it.
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    turns.until_written();
}

#[test]
fn an_endpoint_that_is_not_polled_acknowledges_what_is_in_its_ring() {
    let Some(ip) = address() else { return };
    let mut turns = Turns::open(ip, [1, 1]);
    for _ in 0..3 {
        turns.until_written();
        // Its background thread finds it.
        assert!(turns.a.send(turns.to_b, 1, 100));
        assert!(within(20, || {
            turns.a.poll();
            turns.a.net.unacknowledged() == 0
        }));
        let before = turns.b.got.messages.len();
        assert!(within(20, || {
            turns.b.poll();
            turns.b.got.messages.len() == before + 1
        }));
    }
}

#[test]
fn rings_end_with_the_queue_pair_and_come_back() {
    let Some(ip) = address() else { return };
    let mut turns = Turns::open(ip, [1, 1]);
    turns.until_written();
    turns.b.net.break_queue_pair();
    (0..5).for_each(|_| turns.exchange(1000, None));
    assert!(within(20, || {
        turns.exchange(1000, None);
        turns.eager().iter().all(|end| end.channels == 0)
    }));
    assert_eq!((turns.a.got.departures.len(), turns.b.got.departures.len()), (0, 0));
}

#[test]
fn a_long_message_in_a_ring_that_ends_is_not_lost() {
    let Some(ip) = address() else { return };
    for len in [4200, 16_384, 30_000] {
        let mut turns = Turns::open(ip, [1, 1]);
        turns.until_written();
        let (sent, before) = (turns.eager()[0].sent, turns.b.got.messages.len());
        assert!(turns.a.send(turns.to_b, 7, len));
        assert_eq!(turns.eager()[0].sent, sent + 1, "{len} bytes are one packet");
        // It lies in the ring that ends with this.
        turns.b.net.end_rings();
        assert!(within(20, || {
            turns.a.poll();
            turns.b.poll();
            turns.b.got.messages.len() > before
        }));
        assert!(is_intact(&turns.b.got.messages[before], 7, len), "{len} bytes");
        let pieces = turns.a.net.core.enter().unwrap().machine.counts().in_pieces;
        assert!(pieces > 0, "{len} bytes were in the ring");
        (0..5).for_each(|_| turns.exchange(len, None));
        assert_eq!((turns.a.got.departures.len(), turns.b.got.departures.len()), (0, 0));
    }
}

impl Turns {
    /// `count` messages of `len` bytes in a row, `between` each and the next, arrive.
    fn stream(&mut self, count: usize, len: usize, mut between: impl FnMut(&mut Self, usize)) {
        let before = self.b.got.messages.len();
        let mut n = 0;
        assert!(within(60, || {
            while n < count && self.a.send(self.to_b, n as u8, len) {
                n += 1;
                between(self, n);
            }
            self.a.poll();
            self.b.poll();
            self.b.got.messages.len() == before + count
        }));
        for (n, message) in self.b.got.messages[before..].iter().enumerate() {
            assert!(is_intact(message, n as u8, len), "message {n} of {len} bytes");
        }
        self.b.got.messages.clear();
        assert_eq!((self.a.got.departures.len(), self.b.got.departures.len()), (0, 0));
    }

    fn in_pieces(&self) -> u64 {
        self.a.net.core.enter().unwrap().machine.counts().in_pieces
    }
}

#[test]
fn streams_of_long_messages_are_written_into_a_ring() {
    let Some(ip) = address() else { return };
    let mut turns = Turns::open(ip, [1, 1]);
    // Nobody answers: the stream alone is worth a channel.
    for len in [5000, 16_384, 40_000] {
        // Who is not polled for 10 ms sleeps.
        assert!(within(60, || {
            let before = turns.eager()[0].sent;
            turns.stream(200, len, |turns, _| turns.b.poll());
            let written = turns.eager()[0].sent - before;
            // Up to seven of the shorter ones share a packet.
            written > 200 * len as u64 / 32_752 / 2
        }));
    }
    let ends = turns.eager();
    assert!(ends.iter().all(|end| end.made >= 1 && end.broken == 0), "{ends:?}");
}

#[test]
fn a_stream_goes_on_where_nobody_polls_and_when_its_ring_ends() {
    let Some(ip) = address() else { return };
    let mut turns = Turns::open(ip, [1, 1]);
    turns.until_written();
    // The background thread of the receiver takes what it can.
    for _ in 0..3 {
        let (mut n, end) = (0, Instant::now() + Duration::from_millis(200));
        while Instant::now() < end {
            n += usize::from(n < 100 && turns.a.send(turns.to_b, n as u8, 16_384));
            turns.a.poll();
        }
        assert!(n > 20, "{n} were taken");
        let before = turns.b.got.messages.len();
        assert!(within(60, || {
            turns.a.poll();
            turns.b.poll();
            turns.b.got.messages.len() == before + n
        }));
        for (n, message) in turns.b.got.messages.drain(before..).enumerate() {
            assert!(is_intact(&message, n as u8, 16_384), "message {n}");
        }
        turns.until_written();
    }
    // Rings end while they are full.
    for end in [20, 31, 55] {
        turns.until_written();
        turns.b.got.messages.clear();
        turns.stream(100, 16_384, |turns, n| {
            if n == end {
                turns.b.net.end_rings();
            }
        });
    }
    assert!(turns.in_pieces() > 0);
}

#[test]
fn a_peer_that_is_gone_leaves_no_ring_behind() {
    let Some(ip) = address() else { return };
    let mut turns = Turns::open(ip, [1, 1]);
    turns.until_written();
    let Turns { mut a, b, .. } = turns;
    drop(b);
    assert!(within(20, || {
        a.poll();
        a.rdma().eager.channels == 0
    }));
}
