//! Streams between endpoints on this host, over the loopback interface.

use super::super::udp::UdpLink;
use super::super::{Net, NetSettings};
use super::member::NONE_COMES_BACK;
use super::wire::{GREETING_TAG_AT, Greeting, HEADER_TAG_AT, Header, KEPT};
use super::*;
use crate::memory::OwnedBuffer;
use crate::sys::process::LEFT;
use crate::sys::reserve::tests::without_memory;
use crate::transport::JobKey;
use crate::transport::Source;
use crate::transport::address::LocalHost;
use crate::transport::net::bulk::no_way::NoWay;
use crate::transport::net::verbs::config::{RdmaPolicy, RdmaSettings};
use crate::transport::peers::PeerTable;
use crate::transport::{Departure, Handler, Messages, Mode, Streaming, Transport};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

#[derive(Debug, PartialEq, Eq)]
enum Event {
    /// First byte of the header, and the payload.
    Message(u8, Vec<u8>),
    /// First byte of the header, length of the payload, and the bytes at its destination.
    Placed(u8, usize, Vec<u8>),
    Lost(StreamEnd),
}
use Event::{Lost, Message, Placed};

#[derive(Default)]
struct Got {
    /// The destination of payload from a stream has this many bytes.
    room: Option<usize>,
    place: Option<OwnedBuffer>,
    events: Vec<Event>,
}

impl Handler for Got {
    fn on_peer(&mut self, _: PeerId, _: &Address) {}
    fn on_message(&mut self, _: PeerId, header: &[u8], payload: &[u8]) {
        self.events.push(Message(header[0], payload.to_vec()));
    }
    fn place(&mut self, _: PeerId, _: &[u8], len: usize) -> Option<SegmentList> {
        let zeros = vec![0; self.room?.min(len)];
        Some(self.place.insert(OwnedBuffer::from(zeros)).segments())
    }
    fn on_placed(&mut self, _: PeerId, header: &[u8], len: usize) {
        let buffer = self.place.take().unwrap();
        let place = buffer.segments();
        let mut bytes = vec![0; place.len()];
        place.copy_out(0, &mut bytes);
        drop(buffer);
        self.events.push(Placed(header[0], len, bytes));
    }
    fn on_stream_lost(&mut self, _: PeerId, end: StreamEnd) {
        self.events.push(Lost(end));
    }
    fn on_departure(&mut self, _: PeerId, _: Departure) {}
    fn is_owed(&self, _: PeerId) -> bool {
        false
    }
}

struct End {
    net: Net,
    peers: PeerTable,
    got: Got,
}

impl End {
    fn open(streams: usize) -> Self {
        // A TCP connection of another test, or what is left of one, may have the port of the datagrams.
        let mut end = Self::open_once(streams);
        while streams > 0 && !end.streams().listens() {
            end = Self::open_once(streams);
        }
        end
    }

    fn open_once(streams: usize) -> Self {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let link = UdpLink::open(&any, None).unwrap();
        let me = Address(SocketAddr::new(any.ip(), link.local_addr().unwrap().port()));
        let settings = NetSettings {
            key: JobKey::from_bytes([7; 16]),
            key_source: Source::AuthKey,
            peer_timeout_s: 120,
            buffer_bytes: 64 << 20,
            streams,
            rdma: RdmaSettings { policy: RdmaPolicy::Off, ..RdmaSettings::default() },
        };
        let table = || PeerTable::new(LocalHost::default());
        let net = Net::with(me, link, table(), settings).unwrap();
        Self { net, peers: table(), got: Got::default() }
    }

    fn poll(&mut self) {
        self.net.turn(&mut self.peers, &mut self.got);
    }

    fn meet(&mut self, other: &mut Self) -> PeerId {
        let peer = self.peers.intern(&other.net.me).unwrap();
        self.net.begin(peer, &other.net.me).unwrap();
        assert!(within(5, || {
            self.poll();
            other.poll();
            let theirs = other.peers.find(&self.net.me);
            self.inner(|machine, _| machine.takes_streams(PeerId(1)).is_some())
                || theirs.is_some() && self.net.is_connected(peer)
        }));
        self.say(peer, 0);
        assert!(within(5, || {
            self.poll();
            other.poll();
            !other.got.events.is_empty()
        }));
        other.got.events.clear();
        peer
    }

    /// Sends a message as a datagram.
    fn say(&mut self, peer: PeerId, mark: u8) {
        self.net.send(peer, Mode::Short, &[mark], 0, |_, _| ()).unwrap();
    }

    /// Waits until there is a stream to `other`, or returns false.
    fn has_stream(&mut self, peer: PeerId, other: &mut Self, seconds: u64) -> bool {
        within(seconds, || {
            self.poll();
            other.poll();
            self.net.has_stream(peer)
        })
    }

    fn frame(&mut self, peer: PeerId, mark: u8, bytes: &[u8]) -> bool {
        let payload = OwnedBuffer::from(bytes.to_vec());
        match self.net.send_by_stream(peer, &[mark, 1, 2], &payload.segments()) {
            Ok(()) => true,
            Err(SendError::Again) => false,
            Err(e) => panic!("{e:?}"),
        }
    }

    fn streams(&mut self) -> &mut Streams {
        self.net.streams.as_mut().unwrap()
    }

    fn inner<T>(&mut self, ask: impl FnOnce(&Reliable, &mut Streams) -> T) -> T {
        let core = self.net.core.enter().unwrap();
        ask(&core.machine, self.net.streams.as_mut().unwrap())
    }

    /// Polls until `count` events have come.
    fn hears(&mut self, count: usize) -> Vec<Event> {
        let _ = within(5, || {
            self.poll();
            self.got.events.len() >= count
        });
        std::mem::take(&mut self.got.events)
    }
}

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

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

/// Two endpoints with a stream from the first to the second.
fn pair() -> (End, End, PeerId) {
    let (mut a, mut b) = (End::open(4), End::open(4));
    let to_b = a.meet(&mut b);
    assert!(a.has_stream(to_b, &mut b, 5));
    (a, b, to_b)
}

#[test]
fn payload_goes_to_its_place_in_order_with_messages() {
    let (mut a, mut b, to_b) = pair();
    b.got.room = Some(usize::MAX);
    for len in [1, 64, 65, 1500, 70_000, PAYLOAD_MAX] {
        a.say(to_b, 7);
        assert!(a.frame(to_b, 8, &pattern(len)));
        assert_eq!(b.hears(2), [Message(7, vec![]), Placed(8, len, pattern(len))]);
    }
    // Several at once, with a destination and without, and with one that is too short.
    for room in [Some(usize::MAX), None, Some(1000), Some(0)] {
        b.got.room = room;
        a.say(to_b, 1);
        for mark in 2..6 {
            assert!(a.frame(to_b, mark, &pattern(3000)));
        }
        let heard = b.hears(5);
        assert_eq!(heard[0], Message(1, vec![]));
        for (mark, event) in (2..).zip(&heard[1..]) {
            match room {
                None => assert_eq!(*event, Message(mark, pattern(3000))),
                Some(room) => {
                    assert_eq!(*event, Placed(mark, 3000, pattern(3000.min(room))));
                }
            }
        }
    }
    let (a, b) = (a.streams().counts(), b.streams().counts());
    assert_eq!((a.made, b.taken, a.frames_sent, b.frames_received), (1, 1, 22, 22));
}

#[test]
fn a_stream_does_not_keep_the_room_of_its_longest_frame() {
    let (mut a, mut b, to_b) = pair();
    let mut sent = 0;
    while a.frame(to_b, 1, &pattern(PAYLOAD_MAX)) {
        sent += 1;
    }
    let kept = |end: &mut End| -> usize {
        let streams = end.streams();
        let incoming = streams.incoming.iter().flatten().map(Incoming::kept);
        incoming.chain(streams.outgoing.values().map(Outgoing::kept)).sum()
    };
    assert!(kept(&mut a) > 0, "the kernel did not take all");
    assert!(within(20, || {
        a.poll();
        b.poll();
        b.got.events.len() == sent
    }));
    assert!(within(20, || {
        a.poll();
        kept(&mut a) <= KEPT
    }));
    assert!(kept(&mut b) <= KEPT, "{}", kept(&mut b));
}

#[test]
fn a_frame_waits_for_the_messages_before_it() {
    // After this time without a poll the thread sends the message: an attempt that took longer shows nothing.
    let absent = Duration::from_millis(10);
    for _ in 0..200 {
        let (mut a, mut b, to_b) = pair();
        b.got.room = Some(usize::MAX);
        let begun = Instant::now();
        a.poll();
        // The message does not leave yet, but the frame does.
        a.net.send(to_b, Mode::Fragment, &[1], 0, |_, _| ()).unwrap();
        assert!(a.frame(to_b, 2, &pattern(500)));
        std::thread::sleep(Duration::from_millis(5));
        for _ in 0..100 {
            b.poll();
        }
        if begun.elapsed() < absent {
            assert_eq!(b.got.events, []);
            a.poll();
            assert_eq!(b.hears(2), [Message(1, vec![]), Placed(2, 500, pattern(500))]);
            return;
        }
    }
    panic!("this machine is too busy");
}

#[test]
fn what_the_system_does_not_take_at_once_leaves_later() {
    let (mut a, mut b, to_b) = pair();
    let mut taken = 0;
    while a.frame(to_b, taken, &pattern(PAYLOAD_MAX)) {
        taken += 1;
        assert!(taken < 200, "there is a bound");
    }
    assert!(taken > 0);
    let mut heard = 0;
    assert!(within(10, || {
        a.poll();
        b.poll();
        for event in std::mem::take(&mut b.got.events) {
            assert_eq!(event, Message(heard, pattern(PAYLOAD_MAX)));
            heard += 1;
        }
        heard == taken
    }));
}

#[test]
fn a_busy_stream_does_not_keep_the_others_waiting() {
    let (mut a, mut b, to_b) = pair();
    let mut c = End::open(4);
    let c_to_b = c.meet(&mut b);
    assert!(c.has_stream(c_to_b, &mut b, 5));
    assert!(within(5, || {
        b.poll();
        b.streams().counts().taken == 2
    }));
    assert!(a.frame(to_b, 1, &pattern(10)));
    assert_eq!(b.hears(1), [Message(1, pattern(10))]);
    assert!(c.frame(c_to_b, 2, &pattern(10)));
    // Each poll of `b` finds a frame of `a`.
    assert!(within(5, || {
        a.frame(to_b, 1, &pattern(10));
        b.poll();
        b.got.events.contains(&Message(2, pattern(10)))
    }));
}

#[test]
fn both_ends_hear_of_a_loss() {
    let (mut a, mut b, to_b) = pair();
    while a.frame(to_b, 1, &pattern(PAYLOAD_MAX)) {}
    // The stream breaks in the middle of a frame.
    a.streams().outgoing.clear();
    assert!(within(10, || {
        b.poll();
        b.got.events.last() == Some(&Lost(StreamEnd::Incoming))
    }));
    b.got.events.clear();
    assert!(!a.frame(to_b, 2, &pattern(10)));
    assert_eq!(a.hears(1), [Lost(StreamEnd::Outgoing)]);
    assert_eq!(b.hears(1), [Lost(StreamEnd::Incoming)]);
    // A new stream is made.
    assert!(a.has_stream(to_b, &mut b, 5));
    assert!(a.frame(to_b, 3, &pattern(10)));
    assert_eq!(b.hears(1), [Message(3, pattern(10))]);
}

#[test]
fn a_frame_that_finds_no_memory_ends_the_stream_and_nothing_else() {
    let (mut a, mut b, to_b) = pair();
    assert!(a.frame(to_b, 1, &pattern(PAYLOAD_MAX)));
    without_memory(PAYLOAD_MAX, || {
        assert_eq!(b.hears(1), [Lost(StreamEnd::Incoming)]);
    });
    assert_eq!(a.hears(1), [Lost(StreamEnd::Outgoing)]);
    assert!(a.net.is_connected(to_b));
}

#[test]
fn the_reader_gives_up_and_the_writer_hears_of_it() {
    let (mut a, mut b, to_b) = pair();
    assert!(a.frame(to_b, 1, &pattern(10)));
    assert_eq!(b.hears(1).len(), 1);
    b.streams().incoming.clear();
    assert_eq!(a.hears(1), [Lost(StreamEnd::Outgoing)]);
    assert_eq!(b.hears(1), [Lost(StreamEnd::Incoming)], "it is told all the same");
}

#[test]
fn without_descriptors_the_sender_hears_that_its_frames_are_not_read() {
    let (mut a, mut b) = (End::open(4), End::open(4));
    let to_b = a.meet(&mut b);
    b.streams().strangers.full = true;
    // `a` does not know whether the other side has accepted the stream.
    assert!(within(5, || {
        a.poll();
        a.net.has_stream(to_b)
    }));
    assert!(a.frame(to_b, 1, &pattern(100)));
    assert!(within(5, || {
        b.poll();
        a.poll();
        !a.got.events.is_empty() && !b.got.events.is_empty()
    }));
    assert_eq!(a.got.events, [Lost(StreamEnd::Outgoing)]);
    assert_eq!(b.got.events, [Lost(StreamEnd::Incoming)]);
    // It tries again by itself.
    assert!(b.streams().next_timeout(0).is_some());
    b.streams().strangers.full = false;
    assert!(within(5, || {
        b.poll();
        b.streams().next_timeout(0).is_none()
    }));
    b.got.events.clear();
    assert!(a.has_stream(to_b, &mut b, 5));
    assert!(a.frame(to_b, 2, &pattern(100)));
    assert_eq!(b.hears(1), [Message(2, pattern(100))]);
}

#[test]
fn descriptors_are_left_to_the_application() {
    let (mut a, mut b) = (End::open(4), End::open(4));
    let to_b = a.meet(&mut b);
    // The first one that is made is already beyond the half.
    LEFT.set(Some(100));
    assert!(!a.net.has_stream(to_b));
    assert!(a.streams().outgoing.is_empty() && a.streams().failures.len() == 1);
    a.streams().failures.clear();
    LEFT.set(None);
    assert!(!a.net.has_stream(to_b), "it connects");
    assert_eq!(a.streams().outgoing.len(), 1);
    // The same for one that comes.
    LEFT.set(Some(100));
    let mut gone = || {
        a.poll();
        b.poll();
        a.streams().outgoing.is_empty()
    };
    assert!(within(5, &mut gone));
    assert_eq!((b.streams().counts().taken, b.streams().incoming.len()), (0, 0));
    assert_eq!(b.streams().deaf_until, 0, "the next one is refused at once, too");
    LEFT.set(None);
}

#[test]
fn an_idle_stream_gives_way_where_descriptors_are_scarce() {
    let (mut a, b, to_b) = pair();
    let mut c = End::open(4);
    let to_c = a.meet(&mut c);
    let inner = a.net.numbers.inner(to_c).unwrap();
    let later = crate::sys::clock::now_ns() + 2 * IDLE_NS;
    LEFT.set(Some(0));
    let at = c.net.me;
    a.inner(|machine, streams| streams.is_ready(machine, inner, &at, later));
    LEFT.set(None);
    let peers: Vec<PeerId> = a.streams().outgoing.keys().copied().collect();
    assert_eq!(peers, [inner]);
    drop((b, to_b));
}

#[test]
fn a_stream_that_does_not_come_back_to_the_set_is_looked_at_all_the_same() {
    let (mut a, mut b, to_b) = pair();
    assert!(a.frame(to_b, 1, &pattern(10)));
    assert_eq!(b.hears(1), [Message(1, pattern(10))]);
    // Its next frame waited for a message, which is there now.
    let streams = b.streams();
    let stream = streams.incoming[0].as_mut().unwrap();
    stream.member.watch(false);
    (stream.waits, streams.waits, streams.hot) = (true, true, 0);
    streams.wake();
    NONE_COMES_BACK.set(true);
    b.poll();
    NONE_COMES_BACK.set(false);
    (b.streams().hot, b.streams().latest) = (0, 9);
    assert!(b.streams().next_timeout(u64::MAX).is_some(), "no descriptor wakes a sleeper");
    assert!(a.frame(to_b, 2, &pattern(10)));
    assert_eq!(b.hears(1), [Message(2, pattern(10))]);
}

#[test]
fn a_listener_that_does_not_come_back_to_the_set_tries_again() {
    let (mut a, mut b) = (End::open(4), End::open(4));
    let to_b = a.meet(&mut b);
    b.streams().strangers.full = true;
    b.streams().accept(0);
    b.streams().strangers.full = false;
    NONE_COMES_BACK.set(true);
    b.streams().deaf_until = 1;
    b.streams().wake();
    b.poll();
    NONE_COMES_BACK.set(false);
    assert!(b.streams().next_timeout(0).is_some(), "it waits a moment");
    assert!(a.has_stream(to_b, &mut b, 10));
    assert!(a.frame(to_b, 1, &pattern(100)));
    assert_eq!(b.hears(1), [Message(1, pattern(100))]);
}

#[test]
fn strangers_forgers_and_repeaters_are_refused() {
    let (mut a, mut b, to_b) = pair();
    let at = b.net.me.0;
    let greet = |end: &mut End, number: u32, wrong: u64| {
        end.inner(|machine, _| {
            let (id, dest) = machine.takes_streams(PeerId(0)).unwrap();
            let mut greeting = Greeting { dest, number, tag: 0 };
            let signed = greeting.encode();
            let tag = machine.sign(id, true, &signed[..GREETING_TAG_AT]).unwrap();
            greeting.tag = tag ^ wrong;
            greeting.encode().to_vec()
        })
    };
    let (repeated, forged, fresh) = (greet(&mut a, 1, 0), greet(&mut a, 9, 1), greet(&mut a, 9, 0));
    let silent = TcpStream::connect(at).unwrap();
    for greeting in [b"GET / HTTP/1.1\r\n\r\n......".to_vec(), repeated, forged] {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(&greeting).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        assert!(within(5, || {
            b.poll();
            let closed = stream.read(&mut [0]);
            let waits = closed.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
            !waits && b.streams().incoming.len() == 1
        }));
    }
    assert_eq!((b.streams().counts().refused, b.streams().counts().taken), (2, 1));
    // The genuine stream is not affected.
    assert!(a.frame(to_b, 1, &pattern(99)));
    assert_eq!(b.hears(1), [Message(1, pattern(99))]);
    // After a genuine greeting comes an invalid frame: wrong tag, wrong order, random bytes.
    for (n, nonsense) in [0u8, 1, 2].into_iter().enumerate() {
        let mut stream = TcpStream::connect(at).unwrap();
        let greeting = if n == 0 { fresh.clone() } else { greet(&mut a, 10 + n as u32, 0) };
        stream.write_all(&greeting).unwrap();
        let header = a.inner(|machine, _| {
            let (id, _) = machine.takes_streams(PeerId(0)).unwrap();
            let mut header = Header::new(&[1], 10, 0, u64::from(nonsense == 1)).unwrap();
            let signed = header.encode();
            header.tag = machine.sign(id, true, &signed[..HEADER_TAG_AT]).unwrap();
            header.tag ^= u64::from(nonsense == 0);
            header.encode()
        });
        let bytes = if nonsense == 2 { [0xff; 64] } else { header };
        stream.write_all(&bytes).unwrap();
        stream.write_all(&pattern(10)).unwrap();
        assert_eq!(b.hears(1), [Lost(StreamEnd::Incoming)]);
    }
    drop(silent);
}

#[test]
fn a_stream_that_is_over_before_it_is_accepted_is_refused() {
    let (mut a, mut b, to_b) = pair();
    // The first one is accepted.
    assert!(a.frame(to_b, 1, &pattern(99)));
    assert_eq!(b.hears(1), [Message(1, pattern(99))]);
    let at = b.net.me.0;
    let greet = |end: &mut End, number: u32| {
        end.inner(|machine, _| {
            let (id, dest) = machine.takes_streams(PeerId(0)).unwrap();
            let mut greeting = Greeting { dest, number, tag: 0 };
            let signed = greeting.encode();
            greeting.tag = machine.sign(id, true, &signed[..GREETING_TAG_AT]).unwrap();
            greeting.encode()
        })
    };
    // As if this stream waited to be accepted while OVER comes.
    let waiting = greet(&mut a, 9);
    a.streams().broken.push_back((PeerId(0), 9));
    assert!(within(5, || {
        a.poll();
        b.poll();
        b.got.events == [Lost(StreamEnd::Incoming)]
    }));
    let counts = |b: &mut End| (b.streams().counts().taken, b.streams().counts().refused);
    for (greeting, expected) in [(waiting, (1, 1)), (greet(&mut a, 10), (2, 1))] {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(&greeting).unwrap();
        assert!(within(5, || {
            b.poll();
            counts(&mut b) == expected
        }));
    }
}

#[test]
fn an_old_stream_gives_way_to_a_new_one() {
    let (mut a, mut b, mut c) = (End::open(1), End::open(1), End::open(1));
    let (to_b, to_c) = (a.meet(&mut b), a.meet(&mut c));
    assert!(a.has_stream(to_b, &mut b, 5));
    assert!(!a.has_stream(to_c, &mut c, 0), "it was used just now");
    std::thread::sleep(Duration::from_millis(150));
    assert!(a.has_stream(to_c, &mut c, 5));
    assert_eq!(a.streams().outgoing.len(), 1);
    // A user of the old stream is told that it is gone.
    assert!(!a.frame(to_b, 1, &pattern(10)));
    assert_eq!(a.hears(1), [Lost(StreamEnd::Outgoing)]);
    assert!(a.frame(to_c, 1, &pattern(10)));
    assert_eq!(c.hears(1), [Message(1, pattern(10))]);
}

/// More peers than streams would close each other's streams all the time.
#[test]
fn streams_give_way_to_others_one_at_a_time() {
    let mut a = End::open(2);
    let mut others: Vec<End> = (0..4).map(|_| End::open(1)).collect();
    let peers: Vec<PeerId> = others.iter_mut().map(|other| a.meet(other)).collect();
    for (peer, other) in peers.iter().zip(&mut others).take(2) {
        assert!(a.has_stream(*peer, other, 5));
    }
    let mut later = crate::sys::clock::now_ns() + 2 * IDLE_NS;
    let mut made = |later: u64| -> Vec<bool> {
        for (peer, other) in peers.iter().zip(&others).skip(2) {
            let (inner, at) = (a.net.numbers.inner(*peer).unwrap(), other.net.me);
            a.inner(|machine, streams| streams.is_ready(machine, inner, &at, later));
        }
        let inner: Vec<_> = peers.iter().map(|peer| a.net.numbers.inner(*peer).unwrap()).collect();
        inner.iter().map(|peer| a.streams().outgoing.contains_key(peer)).collect()
    };
    assert_eq!(made(later), [false, true, true, false]);
    later += CLOSE_NS / 2;
    assert_eq!(made(later), [false, true, true, false]);
    later += CLOSE_NS / 2;
    assert_eq!(made(later), [false, false, true, true]);
}

#[test]
fn a_message_does_not_continue_on_the_next_stream_before_its_peer_is_told() {
    let (mut a, mut b, mut c) = (End::open(1), End::open(1), End::open(1));
    let (to_b, to_c) = (a.meet(&mut b), a.meet(&mut c));
    assert!(a.has_stream(to_b, &mut b, 5));
    assert!(a.frame(to_b, 1, &pattern(10)));
    assert_eq!(b.hears(1), [Message(1, pattern(10))]);
    let wants = |a: &mut End, peer: PeerId, to: &End, at: u64| {
        let (inner, address) = (a.net.numbers.inner(peer).unwrap(), to.net.me);
        a.inner(|machine, streams| streams.is_ready(machine, inner, &address, at))
    };
    // The application asks for streams, and makes no progress meanwhile.
    let later = crate::sys::clock::now_ns() + 2 * IDLE_NS;
    assert!(within(5, || wants(&mut a, to_c, &c, later)));
    assert!(!wants(&mut a, to_b, &b, later + 2 * IDLE_NS));
    assert!(!a.frame(to_b, 2, &pattern(10)));
    assert!(!wants(&mut a, to_b, &b, later + 2 * IDLE_NS));
    assert_eq!(a.streams().outgoing.len(), 1, "none is closed for one that may not be made yet");
    assert_eq!(a.hears(1), [Lost(StreamEnd::Outgoing)]);
    assert_eq!(b.hears(1), [Lost(StreamEnd::Incoming)]);
    assert!(a.has_stream(to_b, &mut b, 5));
    assert!(a.frame(to_b, 3, &pattern(10)));
    assert_eq!(b.hears(1), [Message(3, pattern(10))]);
}

/// Nothing shows that queue pairs of these devices reach each other until their connection is ready.
#[test]
fn streams_serve_while_devices_without_datagrams_are_not_connected() {
    let (mut a, b, to_b) = pair();
    {
        let mut core = a.net.core.enter().unwrap();
        core.link.add_connecting(&b.net.me);
        assert!(core.link.may_connect(&b.net.me) && !core.link.sends_direct(&b.net.me));
    }
    assert!(a.net.has_stream(to_b), "there are no connections");
    a.net.bulk = Some(NoWay::taking(0));
    assert!(a.net.has_stream(to_b), "it is refused");
    a.net.bulk = Some(NoWay::claiming());
    assert!(!a.net.has_stream(to_b));
    // A connection of a device whose path is suspect is not used.
    let (mut a, _b, to_b) = pair();
    a.net.bulk = Some(NoWay::claiming());
    assert!(a.net.has_stream(to_b));
}

#[test]
fn without_streams_there_are_none() {
    let (mut a, mut b) = (End::open(0), End::open(4));
    let to_b = a.peers.intern(&b.net.me).unwrap();
    a.net.begin(to_b, &b.net.me).unwrap();
    let _ = within(1, || {
        a.poll();
        b.poll();
        b.peers.find(&a.net.me).is_some()
    });
    a.say(to_b, 1);
    assert_eq!(b.hears(1), [Message(1, vec![])]);
    let to_a = b.peers.find(&a.net.me).unwrap();
    assert!(!a.has_stream(to_b, &mut b, 0));
    assert!(!b.has_stream(to_a, &mut a, 1));
}
