//! Two endpoints on a bench, step by step. All random tests are in `sim`.

use super::handshake::{HALF_OPEN_FREE, HINTS_MAX};
use super::packet::{Dump, HEADER_LEN, HEADER_TAGS, Hello, HelloKind};
use super::*;
use crate::sys::reserve::tests::without_memory;
use crate::telemetry::log::captured;
use crate::transport::Departure;
use crate::transport::JobKey;
use crate::transport::Source;
use crate::transport::net::neighbours::Standing;
use std::cell::RefCell;
use std::io::IoSlice;

const MS: u64 = 1_000_000;

/// The packets that an endpoint has sent.
#[derive(Default)]
struct Wire {
    packets: Vec<Vec<u8>>,
    /// The addresses of all packets so far.
    places: Vec<usize>,
    /// It delivers no damaged packets.
    sound: bool,
    /// Packets that it takes at a time, if limited.
    most: Option<usize>,
    /// It has no room for packets to this address.
    refuses: Option<Address>,
    /// It has room for one attempt of five, by chance: the state of that. 0: for all.
    chance: u64,
    /// Data packets of at most this length go over another path, which has room, bytes; 0: there is none.
    direct: usize,
    /// Data packets that did not.
    indirect: usize,
    /// It says that it took none of the packets of a batch, although they left.
    denies: bool,
    /// How often it was given packets.
    asked: usize,
}

impl Link for Wire {
    fn datagram_max(&self) -> usize {
        1472
    }

    fn is_full(&self) -> bool {
        self.refuses.is_none() && self.chance == 0
    }

    fn direct(&mut self, _: &Address) -> usize {
        self.direct
    }

    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize {
        self.asked += 1;
        let is_hello = packets[0].get(..4) == Some(&MAGIC);
        if is_hello || packets[0].len() > self.direct {
            if self.refuses == Some(*to) || !self.has_luck() {
                return 0;
            }
            self.indirect += if is_hello { 0 } else { packets.len() };
        }
        let taken = packets.len().min(self.most.unwrap_or(usize::MAX));
        self.packets.extend(packets.iter().take(taken).map(|p| p.to_vec()));
        self.places.extend(packets.iter().take(taken).map(|p| p.as_ptr().addr()));
        if self.denies { 0 } else { taken }
    }

    fn is_sound(&mut self, _: &Address, _: usize) -> bool {
        self.sound
    }

    fn receive(&mut self, _: &mut impl crate::transport::net::link::LinkSink) -> usize {
        0
    }
}

impl Wire {
    fn has_luck(&mut self) -> bool {
        self.chance = self.chance.wrapping_mul(6_364_136_223_846_793_005);
        self.chance == 0 || (self.chance >> 33) % 5 == 0
    }
}

/// The events that an endpoint has received.
#[derive(Default)]
struct Heard {
    events: Vec<String>,
    messages: Vec<(Vec<u8>, Vec<u8>)>,
    /// Nobody is there to say so at first.
    owed: Option<bool>,
    standing: Standing,
}

impl Sink for Heard {
    fn peer_of(&mut self, _: &Address) -> Option<PeerId> {
        Some(PeerId(0))
    }
    fn find(&self, _: &Address) -> Option<PeerId> {
        Some(PeerId(0))
    }
    fn forget(&mut self, _: PeerId) {}

    fn standing(&self, _: &Address) -> Standing {
        self.standing
    }

    fn on_connected(&mut self, _: PeerId, _: &Address) {
        self.events.push("connected".to_owned());
    }
    fn on_message(&mut self, _: PeerId, header: &[u8], payload: &[u8]) {
        self.messages.push((header.to_vec(), payload.to_vec()));
    }
    fn on_departure(&mut self, _: PeerId, departure: Departure) {
        self.events.push(format!("{departure:?}"));
    }
    fn is_owed(&self, _: PeerId) -> Option<bool> {
        self.owed
    }
}

struct End2 {
    machine: Reliable,
    wire: Wire,
    heard: Heard,
    address: Address,
}

fn settings(port: u16, key: u8, life: u64) -> Settings {
    Settings {
        life,
        address: Address::from_text(&format!("10.0.{}.{}:{port}", port >> 8, port & 255)).unwrap(),
        key: JobKey::from_bytes([key; 16]),
        key_source: Source::AuthKey,
        datagram_max: 1472,
        direct_max: 0,
        peer_timeout_ns: 10_000 * MS,
        buffer_bytes: 1 << 20,
        receive_window: 64,
        features: 0,
        first_psn: u32::MAX - 5,
        seed: [life as u8; 16],
    }
}

fn end(port: u16, key: u8, life: u64) -> End2 {
    let settings = settings(port, key, life);
    let address = settings.address;
    End2 {
        machine: Reliable::new(settings, 1),
        wire: Wire::default(),
        heard: Heard::default(),
        address,
    }
}

/// Two ends and a clock.
struct Bench {
    a: End2,
    b: End2,
    now: u64,
}

impl Bench {
    fn new() -> Self {
        Self { a: end(1, 7, 101), b: end(2, 7, 103), now: MS }
    }

    /// Delivers sent packets that `keep` accepts, in one direction and then in the other.
    fn exchange(&mut self, keep: impl Fn(&[u8]) -> bool) {
        self.now += 10_000;
        for (from, to) in [(&mut self.a, &mut self.b)] {
            from.machine.poll_transmit(self.now, &mut from.wire);
            let condition = Condition { congested: false, sound: from.wire.sound };
            for packet in from.wire.packets.drain(..).filter(|p| keep(p)) {
                let heard = &mut to.heard;
                to.machine.on_datagram(self.now, &from.address, &packet, condition, heard);
            }
            to.machine.poll_transmit(self.now, &mut to.wire);
            let condition = Condition { congested: false, sound: to.wire.sound };
            for packet in to.wire.packets.drain(..).filter(|p| keep(p)) {
                let heard = &mut from.heard;
                from.machine.on_datagram(self.now, &to.address, &packet, condition, heard);
            }
        }
    }

    fn wait(&mut self, ns: u64) {
        self.now += ns;
        for end in [&mut self.a, &mut self.b] {
            end.machine.on_timeout(self.now, &mut end.heard);
        }
    }

    fn send(&mut self, text: &[u8], len: usize) -> Result<(), SendError> {
        let (to, now) = (self.b.address, self.now);
        self.a.machine.connect(PeerId(0), &to, now)?;
        let pack = |at: usize, out: &mut [u8]| {
            for (i, byte) in out.iter_mut().enumerate() {
                *byte = (at + i) as u8;
            }
        };
        self.a.machine.send(PeerId(0), text, len, pack, now)
    }
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| i as u8).collect()
}

#[test]
fn messages_arrive_after_a_handshake() {
    let mut bench = Bench::new();
    for len in [0, 1, 1000, 5000, MESSAGE_MAX] {
        bench.send(b"head", len).unwrap();
        for _ in 0..20 {
            bench.exchange(|_| true);
        }
        assert_eq!(bench.b.heard.messages.pop(), Some((b"head".to_vec(), payload(len))));
        bench.wait(MS / 2);
        bench.exchange(|_| true);
        bench.exchange(|_| true);
        assert_eq!(bench.a.machine.unacknowledged(), 0, "{len}");
        assert_eq!(bench.a.machine.memory() + bench.b.machine.memory(), 0);
    }
    assert_eq!(bench.a.heard.events, ["connected"]);
    assert_eq!(bench.b.heard.events, ["connected"]);
    assert_eq!(bench.a.machine.counts().retransmitted, 0);
}

/// Packs the message with this number.
fn numbered(number: u32) -> impl Fn(usize, &mut [u8]) + Copy {
    move |at, to| {
        for (i, byte) in to.iter_mut().enumerate() {
            *byte = (number as usize + at + i) as u8;
        }
    }
}

impl Bench {
    /// Two endpoints that are connected.
    fn connected() -> Self {
        let mut bench = Self::new();
        bench.send(b"first", 0).unwrap();
        for _ in 0..4 {
            bench.exchange(|_| true);
        }
        bench.b.heard.messages.clear();
        bench
    }

    /// The same, and the path is known to carry the link's longest datagram.
    fn probed() -> Self {
        let mut bench = Self::connected();
        bench.know_path();
        bench
    }

    /// The connection of `a`.
    fn connection(&mut self) -> &mut Connection {
        self.a.machine.table.iter_mut().next().unwrap()
    }

    /// Makes the path known to carry the link's longest datagram.
    fn know_path(&mut self) {
        for c in self.a.machine.table.iter_mut() {
            c.path.know(self.a.wire.datagram_max());
        }
    }

    /// Sends a message, over the fast path if possible, `ns` after the one before. Returns how many packets left.
    fn push(&mut self, ns: u64, number: u32, len: usize) -> usize {
        self.now += ns;
        let (before, header) = (self.a.wire.packets.len(), number.to_le_bytes());
        let Self { a: End2 { machine, wire, .. }, now, .. } = self;
        let pack = numbered(number);
        if !machine.send_at_once(PeerId(0), &header, len, pack, || *now, wire) {
            machine.send(PeerId(0), &header, len, pack, *now).unwrap();
            machine.poll_transmit(*now, wire);
        }
        self.a.wire.packets.len() - before
    }

    /// The application of `a` polls; `b` receives the packets and answers in time. Returns how many packets had left
    /// since the last poll.
    fn poll(&mut self) -> usize {
        self.a.machine.on_poll();
        self.a.machine.poll_transmit(self.now, &mut self.a.wire);
        let packets = self.a.wire.packets.len();
        self.exchange(|_| true);
        self.wait(MS);
        self.exchange(|_| true);
        packets
    }

    /// Checks that exactly the messages from number 0 on, of `len` bytes, have arrived.
    fn assert_heard(&self, messages: u32, len: usize) {
        let heard = &self.b.heard.messages;
        assert_eq!(heard.len(), messages as usize);
        for (n, (header, payload)) in (0u32..).zip(heard) {
            let mut expected = vec![0; len];
            numbered(n)(0, &mut expected);
            assert_eq!((&header[..], payload), (&n.to_le_bytes()[..], &expected));
        }
    }
}

#[test]
fn a_message_that_finds_no_memory_is_refused_as_a_whole() {
    for len in [1, 1000, 1400, 5000, 30_000] {
        let mut bench = Bench::connected();
        let send = |bench: &mut Bench| {
            let pack = |_: usize, to: &mut [u8]| to.fill(7);
            bench.a.machine.send(PeerId(0), b"head", len, pack, bench.now)
        };
        // What the free lists have is used up; then there is nothing.
        let mut sent = 0;
        let refused = without_memory(100, || {
            loop {
                match send(&mut bench) {
                    Ok(()) => sent += 1,
                    Err(e) => return e,
                }
                assert!(sent < 100);
            }
        });
        assert_eq!(refused, SendError::Again, "{len}");
        send(&mut bench).unwrap();
        for _ in 0..50 {
            bench.exchange(|_| true);
        }
        let whole = (b"head".to_vec(), vec![7; len]);
        assert!(bench.b.heard.messages.iter().all(|message| *message == whole), "{len}");
        assert_eq!(bench.b.heard.messages.len(), sent + 1, "{len}");
    }
}

#[test]
fn nothing_overtakes_a_notice_that_waits_for_room() {
    for at_once in [false, true] {
        let mut bench = Bench::connected();
        while bench.send(b"long", 5000).is_ok() {}
        let mut notices = 0;
        while bench.a.machine.notices.is_empty() {
            bench.a.machine.notify(PeerId(0), b"notice", bench.now);
            notices += 1;
        }
        assert_eq!(
            bench.send(b"later", 0),
            Err(SendError::Again),
            "there is no room for the notice"
        );
        // The acknowledgements come, and nobody retries the notice.
        for _ in 0..50 {
            bench.exchange(|_| true);
        }
        assert!(!bench.a.machine.notices.is_empty());
        let Bench { a: End2 { machine, wire, .. }, now, .. } = &mut bench;
        let left =
            at_once && machine.send_at_once(PeerId(0), b"later", 0, |_, _| (), || *now, wire);
        assert!(!left, "the general case knows about notices");
        bench.send(b"later", 0).unwrap();
        bench.exchange(|_| true);
        let heard: Vec<_> = bench.b.heard.messages.iter().map(|(header, _)| &header[..]).collect();
        let (last, before) = heard.split_last().unwrap();
        assert_eq!((*last, before[before.len() - notices]), (&b"later"[..], &b"notice"[..]));
    }
}

#[test]
fn a_peer_is_gone_when_its_last_connection_has_ended() {
    for again in [false, true] {
        let mut bench = Bench::connected();
        assert_eq!(bench.a.machine.take_gone(), None);
        bench.b.machine.close(bench.now, &mut bench.b.wire);
        for packet in std::mem::take(&mut bench.b.wire.packets) {
            let (from, condition) = (bench.b.address, Condition { congested: false, sound: false });
            let End2 { machine, heard, .. } = &mut bench.a;
            machine.on_datagram(bench.now, &from, &packet, condition, heard);
        }
        assert_eq!(bench.a.heard.events.last().unwrap(), "Closed");
        if again {
            bench.send(b"next", 0).unwrap();
        }
        let gone = bench.a.machine.take_gone();
        assert_eq!(gone, (!again).then_some(bench.b.address));
        assert_eq!(bench.a.machine.take_gone(), None);
    }
}

#[test]
fn messages_of_a_burst_share_packets() {
    let mut bench = Bench::probed();
    let left: usize = (0..870).map(|n| bench.push(500, n, 8)).sum();
    // 1432 bytes of frames of 16. The window is of 16 packets.
    assert_eq!(left, 2 + 4 + 4, "the first two, and a quarter of the window at a time");
    assert_eq!(bench.poll(), 2 + (868usize).div_ceil(89));
    bench.assert_heard(870, 8);
    assert_eq!(bench.a.machine.unacknowledged(), 0);
    assert_eq!(bench.a.machine.memory(), 0);
}

#[test]
fn what_nobody_waits_for_leaves_with_others_or_with_the_next_poll() {
    let mut bench = Bench::connected();
    let late = |bench: &mut Bench, text: &[u8]| {
        bench.a.machine.send_with_others(PeerId(0), text, bench.now).unwrap();
        assert!(bench.a.wire.packets.is_empty());
    };
    late(&mut bench, b"one");
    late(&mut bench, b"two");
    assert_eq!(bench.push(MS, 0, 100), 1, "all three in one packet");
    assert_eq!(bench.poll(), 1);
    late(&mut bench, b"three");
    assert_eq!(bench.poll(), 1);
    let heard: Vec<_> = bench.b.heard.messages.iter().map(|(header, _)| &header[..]).collect();
    assert_eq!(heard, [&b"one"[..], b"two", &[0; 4], b"three"]);
    assert_eq!(bench.a.machine.unacknowledged(), 0);
}

#[test]
fn a_receiver_that_was_held_up_has_time_to_answer_before_it_acknowledges() {
    for held_up in [false, true] {
        let mut bench = Bench::connected();
        bench.poll();
        let before = bench.b.machine.counts().acks_sent;
        bench.push(500, 0, 100);
        bench.exchange(|_| true);
        bench.now += 500_000; // longer than an acknowledgement waits
        if held_up {
            bench.b.machine.on_return(bench.now);
        }
        let acks = |bench: &mut Bench, ns: u64| {
            bench.wait(ns);
            bench.b.machine.poll_transmit(bench.now, &mut bench.b.wire);
            bench.b.machine.counts().acks_sent - before
        };
        assert_eq!(acks(&mut bench, 1000), u64::from(!held_up));
        if held_up {
            bench.b.machine.on_return(bench.now);
        }
        assert_eq!(acks(&mut bench, 300_000), 1, "put off once");
    }
}

#[test]
fn short_messages_are_not_divided() {
    let mut bench = Bench::probed();
    let left: usize = (0..10).map(|n| bench.push(500, n, 300)).sum();
    assert_eq!(left, 2);
    assert_eq!(bench.poll(), 2 + 2, "four of 308 bytes each");
    bench.assert_heard(10, 300);
}

#[test]
fn a_sender_of_many_short_messages_finds_out_how_long_packets_may_be() {
    for (count, probes) in [(5, 0), (6, 1)] {
        let mut bench = Bench::connected();
        let before = bench.a.machine.counts().hellos_sent;
        // The first two leave at once, and then three share a packet of 1200 bytes.
        (0..count).for_each(|n| _ = bench.push(500, n, 300));
        for _ in 0..3 {
            bench.exchange(|_| true);
        }
        assert_eq!(bench.a.machine.counts().hellos_sent - before, probes, "{count}");
        let room = bench.a.machine.packet_room(PeerId(0), 0);
        let room = room + HEADER_LEN + packet::FRAME_LEN;
        assert_eq!(room, if probes > 0 { bench.a.wire.datagram_max() } else { 1200 });
        bench.assert_heard(count, 300);
    }
}

#[test]
fn a_message_after_a_pause_takes_the_waiting_ones_along() {
    let mut bench = Bench::probed();
    assert_eq!((0..10).map(|n| bench.push(500, n, 300)).sum::<usize>(), 2);
    assert_eq!(bench.push(30_000, 10, 300), 3);
    assert_eq!(bench.poll(), 5);
    bench.assert_heard(11, 300);
}

#[test]
fn long_messages_of_a_burst_run_on_from_one_packet_into_the_next() {
    let first_sent = |bench: &Bench| {
        let counts = bench.a.machine.counts();
        counts.data_sent - counts.retransmitted
    };
    for (len, count) in [(700, 40), (3000, 12), (16384, 5)] {
        let mut bench = Bench::connected();
        // This makes packets as long as the path allows.
        bench.send(b"long", 4000).unwrap();
        for _ in 0..20 {
            bench.exchange(|_| true);
            bench.wait(MS);
        }
        bench.b.heard.messages.clear();
        bench.a.machine.on_poll();
        let room = bench.a.machine.packet_room(PeerId(0), 0) + packet::FRAME_LEN;
        let alone = (len + 12usize).div_ceil(room);
        let sent = first_sent(&bench);
        for n in 0..count {
            bench.push(500, n, len);
        }
        for _ in 0..10 {
            bench.poll();
        }
        let packets = (first_sent(&bench) - sent) as usize;
        // Less than a fragment and its header is left empty.
        let together = ((count as usize - 2) * (len + 12 + 8)).div_ceil(room - 256);
        assert!(packets <= 2 * alone + together, "{len}: {packets} {together} {room}");
        assert!(packets < count as usize * alone, "{len}: {packets}");
        bench.assert_heard(count, len);
        assert_eq!(bench.a.machine.unacknowledged(), 0);
        assert_eq!(bench.a.machine.memory() + bench.b.machine.memory(), 0);
    }
}

#[test]
fn what_the_link_does_not_take_of_a_burst_leaves_later() {
    let mut bench = Bench::connected();
    let mut packets = 0;
    for n in 0..40 {
        bench.a.wire.most = Some(n as usize % 3);
        packets += bench.push(500, n, 2000);
    }
    assert!(packets < 20, "{packets}");
    bench.a.wire.most = None;
    for _ in 0..10 {
        bench.poll();
    }
    bench.assert_heard(40, 2000);
    assert_eq!(bench.a.machine.memory() + bench.b.machine.memory(), 0);
}

/// The kernel has no entry left in its table of neighbours: ENOBUFS for one address.
#[test]
fn a_peer_to_which_nothing_leaves_holds_up_no_other() {
    let mut bench = Bench::connected();
    let nobody = settings(3, 7, 1).address;
    bench.a.wire.refuses = Some(nobody);
    bench.a.machine.connect(PeerId(1), &nobody, bench.now).unwrap();
    bench.a.machine.replies.push_back((nobody, [0; HELLO_LEN]));
    for n in 0..4 {
        assert_eq!(bench.push(MS, n, 8), 1);
        bench.exchange(|_| true);
    }
    bench.assert_heard(4, 8);
    assert!(!bench.a.machine.has_unsent(), "it rests");
    // A thread that sleeps wakes for it now and then, and tries once.
    let Bench { a, now, .. } = &mut bench;
    let (asked, end, mut turns) = (a.wire.asked, *now + 1000 * MS, 0);
    while let Some(at) = a.machine.next_timeout().filter(|at| *at < end) {
        *now = at;
        a.machine.on_timeout(*now, &mut a.heard);
        a.machine.poll_transmit(*now, &mut a.wire);
        turns += 1;
    }
    let asked = a.wire.asked - asked;
    assert!((20..40).contains(&asked) && turns < 50, "{asked} {turns}");
    // There is room for it later.
    a.wire.refuses = None;
    a.wire.packets.clear();
    *now += 300 * MS;
    a.machine.on_timeout(*now, &mut a.heard);
    a.machine.poll_transmit(*now, &mut a.wire);
    assert!(a.wire.packets.iter().any(|packet| Hello::decode(packet).is_some()));
    assert!(!a.machine.has_unsent());
}

/// Where many processes fill the queue of an interface, each attempt finds no room by chance.
#[test]
fn bad_luck_keeps_no_peer_waiting_for_long() {
    let mut bench = Bench::new();
    let Bench { a, now, .. } = &mut bench;
    (a.wire.chance, a.wire.most) = (1, Some(1));
    let peers: Vec<_> = (0..100).map(|n| settings(10 + n, 7, 1).address).collect();
    for (n, address) in (0..).zip(&peers) {
        a.machine.connect(PeerId(n), address, *now).unwrap();
    }
    let (end, mut reached) = (*now + 200 * MS, std::collections::HashSet::new());
    while *now < end && reached.len() < peers.len() {
        a.machine.on_timeout(*now, &mut a.heard);
        a.machine.poll_transmit(*now, &mut a.wire);
        for packet in a.wire.packets.drain(..) {
            reached.insert(Hello::decode(&packet).unwrap().dest_port);
        }
        *now = a.machine.next_timeout().unwrap().max(*now + 1);
    }
    assert!(reached.len() > 95, "{} in a fifth of a second", reached.len());
}

/// Two ends. `a` has to acknowledge a message, and the link has refused `b` alone for long.
fn resting() -> Bench {
    let mut bench = Bench::connected();
    bench.a.wire.refuses = Some(bench.b.address);
    message_of_b(&mut bench);
    let long_rest = |bench: &mut Bench| {
        let until = bench.connection().rest.until;
        until != timers::NEVER && until > bench.now + 100 * MS
    };
    for _ in 0..2000 {
        if long_rest(&mut bench) {
            break;
        }
        bench.wait(MS);
        bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
    }
    assert!(long_rest(&mut bench) && bench.connection().receiver.acknowledgement.now);
    assert!(bench.a.wire.packets.is_empty() && !bench.a.machine.has_unsent());
    bench
}

/// `a` receives a message, and has a turn.
fn message_of_b(bench: &mut Bench) {
    let Bench { a, b, now } = bench;
    b.machine.send(PeerId(0), b"from b", 8, |_, _| (), *now).unwrap();
    b.machine.poll_transmit(*now, &mut b.wire);
    for packet in b.wire.packets.drain(..) {
        a.machine.on_datagram(*now, &b.address, &packet, Condition::default(), &mut a.heard);
    }
    a.machine.on_timeout(*now, &mut a.heard);
    a.machine.poll_transmit(*now, &mut a.wire);
}

#[test]
fn a_peer_that_is_heard_is_tried_at_once() {
    let mut bench = resting();
    bench.a.wire.refuses = None;
    message_of_b(&mut bench);
    assert_eq!(bench.a.wire.packets.len(), 1, "the acknowledgement");
}

#[test]
fn what_leaves_at_once_ends_a_rest_and_what_does_not_leaves_later() {
    let mut bench = resting();
    bench.a.wire.refuses = None;
    assert_eq!(bench.push(0, 0, 8), 1);
    bench.exchange(|_| true);
    bench.a.wire.refuses = Some(bench.b.address);
    message_of_b(&mut bench);
    while bench.connection().rest.until == timers::NEVER {
        bench.wait(MS);
        bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
    }
    let pause = bench.connection().rest.until - bench.now;
    assert!(pause <= MS, "{pause} ns: the first of a row");
    // The link is full for a moment.
    let mut bench = resting();
    (bench.a.wire.refuses, bench.a.wire.most) = (None, Some(0));
    assert_eq!(bench.push(0, 0, 8), 0);
    let wake = bench.a.machine.next_timeout().unwrap() - bench.now;
    assert!(bench.a.machine.has_unsent() || wake > MS, "nobody wakes for it in vain: {wake}");
}

/// The table of neighbours is full, which the device does not need.
#[test]
fn a_handshake_that_udp_refuses_holds_up_no_message_for_the_device() {
    let mut bench = Bench::connected();
    (bench.a.wire.direct, bench.a.wire.refuses) = (1024, Some(bench.b.address));
    bench.connection().path.both_take(1472, 1024);
    bench.connection().handshake.hellos |= INIT;
    let asked = bench.a.wire.asked;
    for n in 0..200 {
        assert_eq!(bench.push(MS, n, 8), 1, "{n}");
        bench.poll();
    }
    bench.assert_heard(200, 8);
    // The handshake packet is tried now and then.
    let (a, hellos) = (&mut bench.a, bench.b.machine.counts().hellos_sent);
    assert_eq!(a.machine.counts().retransmitted, 0);
    let tried = a.wire.asked - asked - 200;
    assert!((10..40).contains(&tried), "{tried}");
    a.wire.refuses = None;
    bench.wait(300 * MS);
    bench.exchange(|_| true);
    assert_eq!(bench.b.machine.counts().hellos_sent, hellos + 1);
    // A packet that is too long for the device waits with it.
    let mut bench = Bench::connected();
    bench.connection().path.both_take(1472, 1024);
    bench.know_path();
    bench.a.wire.refuses = Some(bench.b.address);
    assert_eq!(bench.push(0, 0, 1300), 0);
    bench.a.wire.direct = 1024;
    bench.connection().handshake.hellos |= INIT;
    bench.wait(2 * MS);
    bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
    assert!(bench.a.wire.packets.is_empty() && !bench.a.machine.has_unsent(), "it rests");
}

/// Where each message leaves at once, nothing but the message shows that its path may have opened.
#[test]
fn messages_that_leave_at_once_take_a_path_when_it_opens() {
    for (direct, len) in [(1024, 1100), (1024, 1400), (1024, 5000), (4096, 3000), (4096, 9000)] {
        let mut bench = Bench::connected();
        bench.connection().path.both_take(1472, 4096);
        bench.know_path();
        let packets = |bench: &mut Bench, number| {
            bench.a.wire.indirect = 0;
            let packets = bench.push(MS, number, len);
            bench.exchange(|_| true);
            bench.b.machine.acknowledge_all();
            bench.exchange(|_| true);
            (packets, bench.a.wire.indirect)
        };
        let (before, indirect) = packets(&mut bench, 0);
        assert_eq!(before, indirect);
        bench.a.wire.direct = direct;
        let (during, indirect) = packets(&mut bench, 1);
        let (room, front) = (direct - HEADER_LEN, 12);
        let more = (front + len).saturating_sub(room).div_ceil(room - 4);
        assert_eq!((during, indirect), (1 + more, 0), "{direct} {len}");
        bench.a.wire.direct = 0;
        assert_eq!(packets(&mut bench, 2), (before, before), "{direct} {len}");
        bench.assert_heard(3, len);
    }
}

/// IPsec splits a batch itself, and returns the error of the packet at which it stopped.
#[test]
fn packets_that_left_although_the_link_did_not_take_them_end_no_connection() {
    for (count, len) in [(1, 8), (1, 20_000), (10, 2000)] {
        let mut bench = Bench::probed();
        bench.a.wire.denies = true;
        let packets: usize = (0..count).map(|n| bench.push(500, n, len)).sum();
        assert!(packets > 0);
        bench.a.wire.denies = false;
        let left = std::mem::take(&mut bench.a.wire.packets);
        let condition = Condition { congested: false, sound: false };
        for packet in left {
            let End2 { machine, heard, .. } = &mut bench.b;
            machine.on_datagram(bench.now, &bench.a.address, &packet, condition, heard);
        }
        bench.b.machine.acknowledge_all();
        bench.b.machine.poll_transmit(bench.now, &mut bench.b.wire);
        assert!(!bench.b.wire.packets.is_empty());
        for packet in bench.b.wire.packets.drain(..) {
            let End2 { machine, heard, .. } = &mut bench.a;
            machine.on_datagram(bench.now, &bench.b.address, &packet, condition, heard);
        }
        assert_eq!(bench.a.heard.events, ["connected"]);
        for _ in 0..10 {
            bench.poll();
        }
        bench.assert_heard(count, len);
        assert_eq!(bench.a.machine.unacknowledged(), 0);
        assert_eq!(bench.a.machine.memory() + bench.b.machine.memory(), 0);
    }
}

#[test]
fn messages_wait_for_nobody_where_the_application_polls_between_them_or_takes_its_time() {
    let mut bench = Bench::connected();
    for n in 0..20 {
        assert_eq!(bench.push(500, n, 8), 1);
        bench.poll();
    }
    for n in 20..30 {
        assert_eq!(bench.push(30_000, n, 8), 1);
    }
    bench.poll();
    bench.assert_heard(30, 8);
}

#[test]
fn messages_that_waited_too_long_make_later_ones_leave_at_once() {
    let mut bench = Bench::connected();
    let mut number = 0..;
    let mut burst = |bench: &mut Bench, pushes: usize| -> usize {
        (0..pushes).map(|_| bench.push(500, number.next().unwrap(), 8)).sum()
    };
    assert_eq!(burst(&mut bench, 10), 2);
    bench.now += MS;
    bench.poll(); // or the thread that keeps the connection
    for _ in 0..4 {
        assert_eq!(burst(&mut bench, 10), 10);
        bench.poll();
    }
    for _ in 0..4 {
        burst(&mut bench, 10);
        bench.poll();
    }
    assert_eq!(burst(&mut bench, 10), 2, "it may try again");
    bench.poll();
    bench.assert_heard(100, 8);
}

#[test]
fn what_has_to_wait_shares_packets() {
    let mut bench = Bench::connected();
    // As many packets as allowed are in flight.
    let mut sent = 0u32;
    while {
        let pack = numbered(sent);
        bench.a.machine.send(PeerId(0), &sent.to_le_bytes(), 8, pack, bench.now).unwrap();
        sent += 1;
        bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire) > 0
    } {}
    let waiting = bench.a.machine.unacknowledged();
    for _ in 0..500 {
        let pack = numbered(sent);
        bench.a.machine.send(PeerId(0), &sent.to_le_bytes(), 8, pack, bench.now).unwrap();
        sent += 1;
    }
    let now = bench.a.machine.unacknowledged();
    assert!(now <= waiting + 500 / 72 + 1, "{waiting} packets before, {now} now");
    for _ in 0..4 {
        bench.exchange(|_| true);
    }
    bench.assert_heard(sent, 8);
}

#[test]
fn what_is_lost_is_sent_again() {
    let mut bench = Bench::new();
    bench.send(b"0", 0).unwrap();
    for i in 0..2000 {
        let drop = std::cell::Cell::new(i);
        bench.exchange(|_| {
            drop.set(drop.get() + 1);
            drop.get() % 3 != 0
        });
        if i % 4 == 0 {
            let _ = bench.send(b"x", i * 7);
        }
        bench.wait(MS);
    }
    for _ in 0..200 {
        bench.wait(MS);
        bench.exchange(|_| true);
    }
    assert_eq!(bench.a.machine.unacknowledged(), 0);
    assert!(bench.b.heard.messages.len() > 100);
    assert!(bench.b.heard.messages.iter().all(|(_, p)| *p == payload(p.len())));
    assert_eq!(bench.b.heard.events, ["connected"]);
}

#[test]
fn a_packet_that_arrives_after_it_was_declared_lost_leaves_no_timeout_behind() {
    let mut bench = Bench::connected();
    for _ in 0..50 {
        bench.poll();
    }
    (0..5).for_each(|_| bench.send(b"head", 1000).unwrap());
    let Bench { a, b, now } = &mut bench;
    a.machine.poll_transmit(*now, &mut a.wire);
    let mut packets = std::mem::take(&mut a.wire.packets);
    packets.retain(|packet| Hello::decode(packet).is_none());
    assert_eq!(packets.len(), 5);
    packets.rotate_left(1);
    // The answers before and after the first packet arrive together.
    for (n, packet) in packets.iter().enumerate() {
        b.machine.on_datagram(*now, &a.address, packet, Condition::default(), &mut b.heard);
        if n >= 3 {
            b.machine.acknowledge_all();
            b.machine.poll_transmit(*now, &mut b.wire);
        }
    }
    let answers = std::mem::take(&mut b.wire.packets);
    assert_eq!(answers.len(), 2);
    for answer in answers {
        a.machine.on_datagram(*now, &b.address, &answer, Condition::default(), &mut a.heard);
    }
    assert_eq!(a.machine.unacknowledged(), 0);
    a.machine.poll_transmit(*now, &mut a.wire);
    let (before, end) = (a.machine.counts().timeouts, *now + 10_000 * MS);
    let mut deadlines = 0;
    while let Some(at) = a.machine.next_timeout().filter(|at| *at < end) {
        a.machine.on_timeout(at, &mut a.heard);
        a.machine.poll_transmit(at, &mut a.wire);
        deadlines += 1;
    }
    assert_eq!(a.machine.counts().timeouts, before);
    assert!(deadlines < 50, "{deadlines}");
}

#[test]
fn a_peer_without_room_is_not_flooded_and_says_when_it_has_some() {
    let mut bench = Bench::connected();
    for _ in 0..50 {
        bench.poll();
    }
    let data = std::cell::Cell::new(0);
    let lets = |packet: &[u8]| {
        let handshake = Hello::decode(packet).is_some();
        data.set(data.get() + u32::from(!handshake));
        handshake
    };
    bench.send(b"late", 100).unwrap();
    let pass = |bench: &mut Bench, ms: u32| {
        data.set(0);
        for _ in 0..ms {
            bench.wait(MS);
            bench.exchange(lets);
        }
        data.get()
    };
    pass(&mut bench, 1000);
    // Both directions count: the peer acknowledges handshakes.
    let sent = pass(&mut bench, 9_000);
    assert!((5..40).contains(&sent), "{sent}");
    assert_eq!(bench.b.heard.messages, []);
    let id = bench.b.machine.table.of(PeerId(0)).unwrap().id;
    bench.b.machine.ask_for_data(id);
    for _ in 0..2 {
        bench.exchange(|_| true);
        bench.wait(0);
    }
    bench.exchange(|_| true);
    assert_eq!(bench.b.heard.messages.len(), 1, "it waits for no back-off");
}

#[test]
fn a_packet_that_a_device_may_still_read_stays_as_it_is() {
    let mut bench = Bench::connected();
    let pool = Pool::new(1472).unwrap();
    bench.a.machine.lend(pool.clone());
    // The device takes packets, and has sent none of them yet.
    pool.set_posted(1);
    bench.a.wire.places.clear();
    bench.send(b"head", 1000).unwrap();
    let Bench { a, now, .. } = &mut bench;
    for _ in 0..200 {
        a.machine.poll_transmit(*now, &mut a.wire);
        *now += MS;
        a.machine.on_timeout(*now, &mut a.heard);
    }
    let [first, repeats @ ..] = &a.wire.places[..] else { panic!("nothing was sent") };
    assert!(!repeats.is_empty() && !repeats.contains(first));
    bench.exchange(|_| true);
    assert_eq!(bench.b.heard.messages, [(b"head".to_vec(), payload(1000))]);
}

#[test]
fn a_late_answer_is_waited_for() {
    let mut bench = Bench::connected();
    for _ in 0..50 {
        bench.poll();
    }
    let before = bench.a.machine.counts().retransmitted;
    for n in 0..100 {
        bench.push(MS, n, 100);
        let Bench { a, b, now } = &mut bench;
        let condition = Condition { congested: false, sound: false };
        // b receives it, and does something else before it answers.
        for packet in a.wire.packets.drain(..) {
            b.machine.on_datagram(*now, &a.address, &packet, condition, &mut b.heard);
        }
        for _ in 0..16 {
            *now += MS / 4;
            a.machine.on_timeout(*now, &mut a.heard);
            a.machine.poll_transmit(*now, &mut a.wire);
        }
        b.machine.on_timeout(*now, &mut b.heard);
        b.machine.poll_transmit(*now, &mut b.wire);
        for packet in b.wire.packets.drain(..) {
            a.machine.on_datagram(*now, &b.address, &packet, condition, &mut a.heard);
        }
        bench.exchange(|_| true);
        assert_eq!(bench.a.machine.unacknowledged(), 0);
    }
    bench.assert_heard(100, 100);
    let again = bench.a.machine.counts().retransmitted - before;
    assert!((1..=2).contains(&again), "{again}");
}

/// The peer is on `host`; 10.0.0.1 is this one.
fn connected_with_peer_of(host: &str) -> Bench {
    let address = Address::from_text(&format!("{host}:2")).unwrap();
    let mut bench = Bench::new();
    let settings = Settings { address, ..settings(2, 7, 103) };
    (bench.b.machine, bench.b.address) = (Reliable::new(settings, 1), address);
    bench.send(b"0", 0).unwrap();
    for _ in 0..50 {
        bench.poll();
    }
    bench
}

#[test]
fn a_process_of_this_host_has_its_turn_before_packets_go_again() {
    for (host, last_ms) in [("10.0.0.1", 100), ("10.0.0.2", 10)] {
        let mut bench = connected_with_peer_of(host);
        bench.exchange(|_| true);
        let before = bench.a.machine.counts().retransmitted;
        bench.send(b"head", 1000).unwrap();
        let Bench { a, now, .. } = &mut bench;
        let mut again = None;
        for ms in 0..=2 * last_ms {
            a.machine.poll_transmit(*now, &mut a.wire);
            if a.machine.counts().retransmitted > before {
                again = again.or(Some(ms));
            }
            *now += MS;
            a.machine.on_timeout(*now, &mut a.heard);
        }
        let late = again.is_some_and(|ms| ms >= 100);
        assert!(again.is_some() && late == (host == "10.0.0.1"), "{host}: {again:?} ms");
    }
}

#[test]
fn packets_that_later_ones_have_passed_wait_for_no_turn_of_the_peer() {
    let mut bench = connected_with_peer_of("10.0.0.1");
    bench.b.heard.messages.clear();
    // The network reorders more packets than are in flight.
    for c in bench.a.machine.table.iter_mut() {
        (0..10).for_each(|_| c.sender.loss.on_late());
    }
    (0..8).for_each(|_| bench.send(b"head", 1000).unwrap());
    let count = std::cell::Cell::new(0);
    bench.exchange(|packet| {
        let data = packet.len() > 1000 && Hello::decode(packet).is_none();
        count.set(count.get() + u32::from(data));
        !data || ![1, 3, 4].contains(&count.get())
    });
    assert_eq!(bench.b.heard.messages.len(), 0);
    for _ in 0..20 {
        bench.wait(MS);
        bench.exchange(|_| true);
    }
    assert_eq!(bench.b.heard.messages.len(), 8, "within 20 ms");
    let counts = bench.a.machine.counts();
    assert_eq!((counts.timeouts, counts.retransmitted), (1, 3));
}

/// A path holds single packets for longer than the timeout, and loses none.
#[test]
fn packets_that_were_only_late_do_not_shrink_the_window() {
    let mut bench = connected_with_peer_of("10.0.0.2");
    // The network reorders more packets than are in flight.
    for c in bench.a.machine.table.iter_mut() {
        (0..10).for_each(|_| c.sender.loss.on_late());
    }
    let limit =
        |bench: &mut Bench| bench.a.machine.table.iter_mut().map(|c| c.sender.limit()).sum();
    let before: u64 = limit(&mut bench);
    for _ in 0..10 {
        (0..8).for_each(|_| bench.send(b"head", 1000).unwrap());
        let held = RefCell::new(Vec::new());
        let count = std::cell::Cell::new(0);
        bench.exchange(|packet| {
            let data = packet.len() > 1000 && Hello::decode(packet).is_none();
            count.set(count.get() + u32::from(data));
            let late = data && [1, 3, 4].contains(&count.get());
            held.borrow_mut().extend(late.then(|| packet.to_vec()));
            !late
        });
        assert_eq!(held.borrow().len(), 3);
        let timeouts = bench.a.machine.counts().timeouts;
        while bench.a.machine.counts().timeouts == timeouts {
            bench.wait(MS);
        }
        for packet in held.take() {
            let End2 { machine, heard, .. } = &mut bench.b;
            machine.on_datagram(bench.now, &bench.a.address, &packet, Condition::default(), heard);
        }
        // The repetitions are under way when the answer comes.
        let Bench { a, b, now } = &mut bench;
        a.machine.poll_transmit(*now, &mut a.wire);
        b.machine.acknowledge_all();
        b.machine.poll_transmit(*now, &mut b.wire);
        for answer in std::mem::take(&mut b.wire.packets) {
            a.machine.on_datagram(*now, &b.address, &answer, Condition::default(), &mut a.heard);
        }
        assert_eq!(a.machine.unacknowledged(), 0);
        for _ in 0..20 {
            bench.exchange(|_| true);
            bench.wait(MS);
        }
    }
    assert!(limit(&mut bench) >= before, "{} {before}", limit(&mut bench));
}

#[test]
fn strangers_are_not_heard() {
    let mut bench = Bench::new();
    bench.a = end(1, 8, 101);
    bench.send(b"x", 10).unwrap();
    for _ in 0..20 {
        bench.exchange(|_| true);
        bench.wait(50 * MS);
    }
    assert!(bench.b.heard.events.is_empty() && bench.b.heard.messages.is_empty());
    assert!(bench.b.machine.counts().forged > 3);
    assert_eq!(bench.b.machine.connections(), 0);
}

#[test]
fn a_silent_peer_is_dead_in_time() {
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    bench.exchange(|_| true);
    bench.exchange(|_| true);
    assert_eq!(bench.a.heard.events, ["connected"]);
    bench.send(b"y", 10).unwrap();
    let began = bench.now;
    while bench.a.heard.events.len() < 2 && bench.now < began + 20_000 * MS {
        bench.exchange(|_| false);
        bench.wait(100 * MS);
    }
    let silent = (bench.now - began) / MS;
    assert!((9_000..12_000).contains(&silent), "{silent} ms");
    assert_eq!(bench.a.heard.events[1], "Failed(Errno(110))");
    assert_eq!((bench.a.machine.memory(), bench.a.machine.connections()), (0, 0));
    // It asked now and then, without a storm.
    assert!(bench.a.machine.counts().retransmitted < 30);
}

/// The kernel keeps what is sent to a host that does not answer ARP, in the buffer that all peers share.
#[test]
fn a_host_that_is_down_gets_one_short_packet_in_a_second() {
    for (met, answered) in [(true, false), (true, true), (false, false)] {
        let mut bench = if met { Bench::probed() } else { Bench::new() };
        if answered {
            // It had no room, and has answered an INIT.
            let (now, sender) = (bench.now, &mut bench.connection().sender);
            sender.timeout.on_answer(sender.window.base, now);
        }
        (0..20).for_each(|_| _ = bench.send(b"x", 1400));
        bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
        let pass = |bench: &mut Bench, ms: u64| {
            bench.a.wire.packets.clear();
            for _ in 0..ms {
                bench.wait(MS);
                bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
            }
            bench.a.wire.packets.iter().map(|p| Hello::decode(p).is_some()).collect::<Vec<_>>()
        };
        pass(&mut bench, 2_500);
        if answered {
            // INITs leave apart from the timeout too, and one of those is the first that the peer answers.
            bench.connection().sender.timeout.at += 400 * MS;
        }
        let sent = pass(&mut bench, 6_000);
        let inits = sent.iter().all(|is_init| *is_init);
        assert!((4..=8).contains(&sent.len()) && inits, "{met}: {sent:?}");
        // It is back: its first answer ends the wait.
        let (mut ms, mut answered_ms, hellos) = (0, None, bench.b.machine.counts().hellos_sent);
        while bench.b.heard.messages.len() < 20 && ms < 2_000 {
            bench.exchange(|_| true);
            bench.wait(MS);
            ms += 1;
            if bench.b.machine.counts().hellos_sent > hellos {
                answered_ms.get_or_insert(ms);
            }
        }
        let waited = ms - answered_ms.unwrap();
        assert!(waited < 100 && ms < 1_300, "{met} {answered}: {waited} ms of {ms}");
    }
}

#[test]
fn an_application_that_cannot_be_asked_still_waits_for_its_peer() {
    // What the application says when it polls, which is between looks that cannot ask it.
    for (owed, asks, dies) in [(true, true, true), (false, false, false)] {
        let mut bench = Bench::connected();
        bench.poll();
        assert_eq!(bench.a.machine.unacknowledged(), 0);
        let began = bench.now;
        let mut asked = 0;
        let mut look = |bench: &mut Bench, owed| {
            bench.a.heard.owed = owed;
            bench.wait(50 * MS);
            bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
            asked += bench.a.wire.packets.drain(..).filter(|p| Hello::decode(p).is_some()).count();
        };
        while bench.now < began + 9_000 * MS {
            for _ in 0..11 {
                look(&mut bench, None);
            }
            bench.a.machine.on_poll();
            look(&mut bench, Some(owed));
        }
        assert_eq!(bench.a.heard.events, ["connected"]);
        while bench.now < began + 15_000 * MS {
            look(&mut bench, None);
        }
        assert_eq!(bench.a.heard.events, ["connected"], "what it owed may have come");
        bench.a.machine.on_poll();
        look(&mut bench, Some(owed));
        assert_eq!(
            bench.a.heard.events.get(1).map(String::as_str),
            dies.then_some("Failed(Errno(110))")
        );
        assert_eq!(asked > 10, asks, "{asked}");
        assert!(asked < 60, "{asked}");
    }
}

#[test]
fn the_next_life_is_a_new_peer() {
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    bench.exchange(|_| true);
    bench.exchange(|_| true);
    // b comes back, and a notices by its own sending.
    bench.b = end(2, 7, 105);
    bench.send(b"y", 10).unwrap();
    for _ in 0..100 {
        bench.exchange(|_| true);
        bench.wait(20 * MS);
    }
    assert_eq!(bench.a.heard.events, ["connected", "Failed(Errno(112))"]);
    assert!(bench.b.heard.messages.is_empty());
    // a comes back, and b notices when it is asked for a connection.
    bench.send(b"z", 10).unwrap();
    for _ in 0..3 {
        bench.exchange(|_| true);
    }
    assert_eq!(bench.b.heard.messages.len(), 1);
    bench.a = end(1, 7, 107);
    bench.send(b"again", 0).unwrap();
    for _ in 0..3 {
        bench.exchange(|_| true);
    }
    assert_eq!(bench.b.heard.events, ["connected", "Failed(Errno(112))", "connected"]);
    assert_eq!(bench.b.heard.messages[1].0, b"again");
}

#[test]
fn an_old_handshake_harms_nobody() {
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
    let init = bench.a.wire.packets[0].clone();
    bench.exchange(|_| true);
    bench.a = end(1, 7, 107);
    bench.send(b"y", 10).unwrap();
    for _ in 0..4 {
        bench.exchange(|_| true);
    }
    let events = bench.b.heard.events.len();
    for _ in 0..100 {
        taken(&mut bench, &init, false);
        bench.wait(200 * MS);
        bench.exchange(|_| true);
    }
    bench.send(b"still there", 10).unwrap();
    for _ in 0..4 {
        bench.exchange(|_| true);
        bench.wait(20 * MS);
    }
    assert_eq!(bench.b.heard.events.len(), events);
    assert_eq!(bench.b.heard.messages.last().unwrap().0, b"still there");
    assert_eq!(bench.b.machine.connections(), 2 - 1);
}

#[test]
fn what_an_earlier_life_answered_to_the_first_question_harms_nobody() {
    let mut bench = Bench::new();
    bench.send(b"first", 0).unwrap();
    let answers = RefCell::new(Vec::new());
    bench.exchange(|packet| {
        let accept = Hello::decode(packet).is_some_and(|h| h.kind == HelloKind::Accept);
        answers.borrow_mut().extend(accept.then(|| packet.to_vec()));
        !accept
    });
    bench.b = end(2, 7, 107);
    for _ in 0..10 {
        bench.wait(20 * MS);
        bench.exchange(|_| true);
    }
    assert_eq!(bench.b.heard.messages.pop(), Some((b"first".to_vec(), Vec::new())));
    let [old] = answers.take().try_into().unwrap();
    for i in 0..10 {
        let End2 { machine, heard, .. } = &mut bench.a;
        machine.on_datagram(bench.now, &bench.b.address, &old, Condition::default(), heard);
        bench.exchange(|_| true);
        bench.send(&[i], 0).unwrap();
        bench.exchange(|_| true);
        assert_eq!(bench.b.heard.messages.pop(), Some((vec![i], Vec::new())));
    }
    assert_eq!(bench.a.heard.events, ["connected"]);
    assert_eq!(bench.b.heard.events, ["connected"]);
}

#[test]
fn goodbye_is_heard() {
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    bench.exchange(|_| true);
    bench.exchange(|_| true);
    bench.a.machine.close(bench.now, &mut bench.a.wire);
    assert!(Dump(bench.a.wire.packets.last().unwrap()).to_string().starts_with("Close"));
    bench.exchange(|_| true);
    assert_eq!(bench.b.heard.events, ["connected", "Closed"]);
}

#[test]
fn a_peer_that_lives_is_told_that_it_has_departed() {
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    bench.exchange(|_| true);
    bench.exchange(|_| true);
    let End2 { machine, wire, heard, .. } = &mut bench.a;
    machine.part(PeerId(0), bench.now, wire, heard);
    bench.exchange(|_| true);
    for end in [&bench.a, &bench.b] {
        assert_eq!(end.heard.events, ["connected", "Closed"]);
        assert_eq!(end.machine.connections(), 0);
    }
}

#[test]
fn a_peer_with_another_key_is_told_and_goes_on_until_its_time() {
    let mut bench = Bench::new();
    bench.b = end(2, 8, 103);
    bench.send(b"x", 10).unwrap();
    bench.exchange(|_| true);
    let told = |bench: &Bench| bench.a.machine.table.of(PeerId(0)).unwrap().handshake.key_refused;
    assert!(told(&bench));
    let begin = bench.now;
    while bench.a.heard.events.is_empty() && bench.now < begin + 20_000 * MS {
        bench.wait(10 * MS);
        bench.exchange(|_| true);
    }
    assert_eq!(bench.a.heard.events, ["Failed(Errno(129))"], "EKEYREJECTED");
    assert!(bench.now - begin > 9_900 * MS, "not before FI_UDRV_PEER_TIMEOUT");
    assert_eq!(bench.b.heard.events, [] as [&str; 0]);

    // A sender that has not seen the INIT cannot forge the answer; and an established connection is not affected.
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
    let init = Hello::decode(&bench.a.wire.packets.remove(0)).unwrap();
    let b = end(2, 8, 103);
    let refusal = b.machine.refusal(&init, packet::REFUSED_KEY);
    for wrong in
        [Hello { echo: init.nonce ^ 1, ..refusal }, Hello { dest: init.connection ^ 1, ..refusal }]
    {
        let heard = &mut bench.a.heard;
        bench.a.machine.on_datagram(
            bench.now,
            &b.address,
            &wrong.encode(),
            Condition::default(),
            heard,
        );
        assert!(!told(&bench));
    }
    bench.a.machine.on_datagram(
        bench.now,
        &b.address,
        &refusal.encode(),
        Condition::default(),
        &mut bench.a.heard,
    );
    assert!(told(&bench));
    for _ in 0..100 {
        bench.wait(10 * MS);
        bench.exchange(|_| true);
    }
    assert_eq!(bench.b.heard.messages.len(), 1, "it was only told");
}

#[test]
fn those_with_another_key_are_told_now_and_then() {
    captured::begin();
    let mut bench = Bench::new();
    bench.b = end(2, 8, 103);
    bench.send(b"x", 10).unwrap();
    bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
    let init = bench.a.wire.packets.remove(0);
    let mut answers = 0;
    for _ in 0..1000 {
        bench.now += MS / 10;
        let heard = &mut bench.b.heard;
        bench.b.machine.on_datagram(
            bench.now,
            &bench.a.address,
            &init,
            Condition::default(),
            heard,
        );
        bench.b.machine.poll_transmit(bench.now, &mut bench.b.wire);
        answers += bench.b.wire.packets.len();
        assert!(bench.b.wire.packets.drain(..).all(|packet| packet.len() <= init.len()));
    }
    assert_eq!(answers, HINTS_MAX as usize);
    // Lines of this test and its neighbours, after 0, 1, 5, 21 and 85 s.
    assert!(captured::lines_with("a handshake from").len() <= 5);
}

/// How long it takes until a learns that b is gone, ms: each packet of a is refused. An attacker that has not seen the
/// packets forges refusals as well, every `forged_ms`.
fn refused_for(bench: &mut Bench, forged_ms: u64, answers: bool) -> Option<u64> {
    let (since, to) = (bench.now, bench.b.address);
    bench.a.heard.events.clear();
    while bench.now < since + 8000 * MS {
        bench.wait(MS);
        bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
        for packet in std::mem::take(&mut bench.a.wire.packets) {
            let Bench { a, b, now } = bench;
            if answers {
                let condition = Condition::default();
                b.machine.on_datagram(*now, &a.address, &packet, condition, &mut b.heard);
            } else {
                a.machine.on_refused(*now, &to, &packet, &mut a.heard);
            }
        }
        bench.b.machine.poll_transmit(bench.now, &mut bench.b.wire);
        for packet in std::mem::take(&mut bench.b.wire.packets) {
            let Bench { a, b, now } = bench;
            let condition = Condition::default();
            a.machine.on_datagram(*now, &b.address, &packet, condition, &mut a.heard);
        }
        if forged_ms > 0 && (bench.now - since) / MS % forged_ms == 0 {
            let a = &mut bench.a;
            for quote in [&[0; 40][..], &[]] {
                a.machine.on_refused(bench.now, &to, quote, &mut a.heard);
            }
        }
        if !bench.a.heard.events.is_empty() {
            return Some((bench.now - since) / MS);
        }
    }
    None
}

#[test]
fn refusals_are_enough_whenever_the_last_init_left() {
    for seed in 0..40 {
        let mut bench = Bench { a: end(1, 7, 101 + seed), ..Bench::new() };
        bench.send(b"x", 10).unwrap();
        let after = refused_for(&mut bench, 0, false).unwrap();
        assert_eq!(bench.a.heard.events, ["Failed(Errno(111))"]);
        assert!((1400..2000).contains(&after), "seed {seed}: after {after} ms");
    }
}

#[test]
fn nobody_there_is_noticed_by_refusals() {
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    // It may be started a little later.
    let after = refused_for(&mut bench, 0, false).unwrap();
    assert_eq!(bench.a.heard.events, ["Failed(Errno(111))"]);
    assert!((1400..2000).contains(&after), "after {after} ms");
    // The peer has started: its end is noticed as usual.
    bench.send(b"x", 10).unwrap();
    bench.exchange(|_| true);
    bench.exchange(|_| true);
    bench.send(b"x", 10).unwrap();
    let after = refused_for(&mut bench, 0, false).unwrap();
    assert_eq!(bench.a.heard.events, ["Failed(Errno(112))"]);
    assert!((200..300).contains(&after), "after {after} ms");
    bench.send(b"x", 10).unwrap();
    let after = refused_for(&mut bench, 0, false).unwrap();
    assert_eq!(bench.a.heard.events, ["Failed(Errno(111))"]);
    assert!((200..500).contains(&after), "still gone after {after} ms");
}

#[test]
fn a_refusal_that_somebody_made_up_ends_nothing() {
    // Before there is a connection, and after.
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    let to = bench.b.address;
    for _ in 0..100 {
        bench.wait(100 * MS);
        bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
        bench.a.wire.packets.clear();
        bench.a.machine.on_refused(bench.now, &to, &[0; 40], &mut bench.a.heard);
        if bench.a.heard.events.is_empty() {
            continue;
        }
        assert_eq!(bench.a.heard.events, ["Failed(Errno(110))"], "only silence ends it");
    }
    let mut bench = Bench::new();
    bench.send(b"x", 10).unwrap();
    bench.exchange(|_| true);
    bench.exchange(|_| true);
    // Nothing is owed and nothing is sent, except the INITs that the attacker causes, which are answered and are few.
    let before = bench.a.machine.counts().hellos_sent;
    assert_eq!(refused_for(&mut bench, 3, true), None);
    let asked = bench.a.machine.counts().hellos_sent - before;
    assert!((20..=120).contains(&asked), "asked {asked} times in 8 s");
    // A refusal that quotes another INIT than the present one is forged, too.
    bench.send(b"y", 10).unwrap();
    bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
    bench.a.wire.packets.clear();
    let c = bench.a.machine.table.of(PeerId(0)).unwrap();
    let init = c.hello(&bench.a.machine.shared, HelloKind::Init);
    for forged in [Hello { nonce: init.nonce ^ 1, ..init }, Hello { life: init.life ^ 2, ..init }] {
        for _ in 0..40 {
            bench.now += 10 * MS;
            let heard = &mut bench.a.heard;
            bench.a.machine.on_refused(bench.now, &to, &forged.encode(), heard);
        }
        assert_eq!(bench.a.heard.events, [] as [&str; 0]);
    }
    for _ in 0..40 {
        bench.now += 10 * MS;
        bench.a.machine.on_refused(bench.now, &to, &init.encode(), &mut bench.a.heard);
    }
    assert_eq!(bench.a.heard.events, ["Failed(Errno(112))"], "that one counts");
}

/// A layer above that numbers its peers like the real one.
struct Guests {
    peers: crate::transport::peers::PeerTable,
    connected: Vec<PeerId>,
    departed: Vec<PeerId>,
}

impl Guests {
    fn new() -> Self {
        let peers = crate::transport::peers::PeerTable::new(Default::default());
        Self { peers, connected: Vec::new(), departed: Vec::new() }
    }
}

impl Sink for Guests {
    fn peer_of(&mut self, address: &Address) -> Option<PeerId> {
        self.peers.intern(address)
    }
    fn find(&self, address: &Address) -> Option<PeerId> {
        self.peers.find(address)
    }
    fn forget(&mut self, peer: PeerId) {
        self.peers.release(peer);
    }
    fn standing(&self, _: &Address) -> Standing {
        Standing::Admitted
    }
    fn on_connected(&mut self, peer: PeerId, _: &Address) {
        self.connected.push(peer);
    }
    fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {}
    fn on_departure(&mut self, peer: PeerId, _: Departure) {
        self.departed.push(peer);
    }
    fn is_owed(&self, _: PeerId) -> Option<bool> {
        Some(false)
    }
}

#[test]
fn many_peers_that_end_together_end_a_few_in_each_call() {
    const PEERS: usize = 5 * ENDS_MAX;
    let End2 { mut machine, mut wire, .. } = end(1, 7, 101);
    let (mut guests, mut now) = (Guests::new(), MS);
    for n in 0..PEERS {
        let to = Address::from_text(&format!("10.0.2.1:{}", 1000 + n)).unwrap();
        let peer = guests.peers.intern(&to).unwrap();
        machine.connect(peer, &to, now).unwrap();
        machine.send(peer, b"x", 0, |_, _| (), now).unwrap();
    }
    let mut calls = 0;
    while guests.departed.len() < PEERS {
        // In the last second all of them are given up.
        now += if machine.next_timeout().is_some_and(|at| at > now) { 900 * MS } else { 0 };
        assert!(now < 60_000 * MS);
        machine.poll_transmit(now, &mut wire);
        wire.packets.clear();
        let before = guests.departed.len();
        machine.on_timeout(now, &mut guests);
        let ended = guests.departed.len() - before;
        assert!(ended <= ENDS_MAX, "{ended}");
        calls += usize::from(ended > 0);
    }
    assert!(calls >= PEERS / ENDS_MAX && machine.table.iter().next().is_none());
}

#[test]
fn interfaces_of_one_link_may_have_other_numbers_on_the_other_host() {
    let at = |text: &str| Address::from_text(text).unwrap();
    let make = |port, life, address| {
        let settings = Settings { address, ..settings(port, 7, life) };
        (Reliable::new(settings, 1), Guests::new(), Wire::default())
    };
    // How each host names both.
    let (a_at_a, b_at_a) = (at("[fe80::a%2]:1"), at("[fe80::b%2]:2"));
    let (a_at_b, b_at_b) = (at("[fe80::a%7]:1"), at("[fe80::b%7]:2"));
    let (mut a, mut guests_a, mut wire_a) = make(1, 101, a_at_a);
    let (mut b, mut guests_b, mut wire_b) = make(2, 103, b_at_b);
    let peer = guests_a.peers.intern(&b_at_a).unwrap();
    a.connect(peer, &b_at_a, MS).unwrap();
    for now in [2 * MS, 3 * MS] {
        a.poll_transmit(now, &mut wire_a);
        for packet in wire_a.packets.drain(..) {
            b.on_datagram(now, &a_at_b, &packet, Condition::default(), &mut guests_b);
        }
        b.poll_transmit(now, &mut wire_b);
        for packet in wire_b.packets.drain(..) {
            a.on_datagram(now, &b_at_a, &packet, Condition::default(), &mut guests_a);
        }
    }
    assert_eq!((guests_a.connected, guests_a.departed), (vec![peer], vec![]));
    assert_eq!(guests_b.connected.len(), 1);
    assert_eq!(guests_b.peers.address(guests_b.connected[0]), Some(a_at_b), "where replies go");
}

#[test]
fn a_peer_that_is_back_in_a_crowd_is_recognized_soon() {
    let mut bench = Bench::connected();
    bench.poll();
    let Bench { a, b, now } = &mut bench;
    // Of `a`'s connection anybody may have recorded everything.
    let c = a.machine.table.iter().next().unwrap();
    let init = c.hello(&a.machine.shared, HelloKind::Init);
    let retry = Hello {
        kind: HelloKind::Retry,
        nonce: 77,
        echo: init.nonce,
        life: 103,
        address: b.address,
        dest: init.connection,
        dest_port: a.address.port(),
        ..init
    };
    let retry = retry.signed(&a.machine.shared.settings.key);
    for _ in 0..3 {
        a.machine.on_datagram(*now, &b.address, &retry, Condition::default(), &mut a.heard);
    }
    bench.exchange(|packet| {
        Hello::decode(packet)
            .is_some_and(|hello| hello.echo == 77 || hello.kind == HelloKind::Accept)
    });
    bench.send(b"still there", 0).unwrap();
    bench.exchange(|_| true);
    bench.exchange(|_| true);
    assert_eq!(bench.b.heard.messages.pop().unwrap().0, b"still there");
    assert_eq!((bench.a.heard.events.len(), bench.b.heard.events.len()), (1, 1));

    // The next incarnation of `b` has many visitors.
    let crowd = |n: u64| Hello {
        address: Address::from_text(&format!("10.0.1.1:{}", 1000 + n)).unwrap(),
        life: 2 * n + 1001,
        nonce: n + 7,
        dest: 0,
        echo: 0,
        ..init
    };
    bench.b = end(2, 7, 105);
    let mut guests = Guests::new();
    for n in 0..=HALF_OPEN_FREE as u64 {
        let packet = crowd(n).signed(&bench.b.machine.shared.settings.key);
        let from = crowd(n).address;
        let machine = &mut bench.b.machine;
        machine.on_datagram(bench.now, &from, &packet, Condition::default(), &mut guests);
    }
    bench.send(b"who is there", 0).unwrap();
    let began = bench.now;
    while bench.a.heard.events.len() == 1 && bench.now < began + 9_000 * MS {
        bench.now += 10 * MS;
        let Bench { a, b, now } = &mut bench;
        a.machine.on_timeout(*now, &mut a.heard);
        a.machine.poll_transmit(*now, &mut a.wire);
        for packet in a.wire.packets.drain(..) {
            b.machine.on_datagram(*now, &a.address, &packet, Condition::default(), &mut guests);
        }
        b.machine.poll_transmit(*now, &mut b.wire);
        for packet in b.wire.packets.drain(..) {
            a.machine.on_datagram(*now, &b.address, &packet, Condition::default(), &mut a.heard);
        }
    }
    let took = (bench.now - began) / MS;
    assert_eq!(bench.a.heard.events, ["connected", "Failed(Errno(112))"], "{took} ms");
    assert!(took < 2_000 && guests.departed.is_empty(), "{took} ms");
}

#[test]
fn false_addresses_cost_nothing_and_keep_nobody_out() {
    const INITS: u32 = 20_000;
    let mut guests = Guests::new();
    let mut a = end(1, 7, 101);
    let mut b = end(2, 7, 103);
    let mut now = MS;
    // The real peer's INIT, of which the attackers know all that can be known.
    a.machine.connect(PeerId(0), &b.address, now).unwrap();
    a.machine.poll_transmit(now, &mut a.wire);
    let real = a.wire.packets.remove(0);
    let init = Hello::decode(&real).unwrap();
    let flood = |b: &mut End2, guests: &mut Guests, now: &mut u64, each: &dyn Fn(u32) -> Hello| {
        for n in 0..INITS {
            *now += 10_000;
            let made_up = each(n);
            let packet = made_up.signed(&b.machine.shared.settings.key);
            let from = Address::from_text("10.0.0.9:9").unwrap();
            b.machine.on_datagram(*now, &from, &packet, Condition::default(), guests);
            b.machine.poll_transmit(*now, &mut b.wire);
            assert!(b.wire.packets.drain(..).all(|answer| answer.len() <= packet.len()));
        }
    };
    let at = |n: u32| {
        Address(std::net::SocketAddr::from((
            std::net::Ipv4Addr::from(0xcb00_7100 + n % 200),
            1000 + (n / 200) as u16,
        )))
    };
    let made_up = |n: u32| Hello {
        address: at(n),
        life: u64::from(n) * 2 + 1001,
        nonce: u64::from(n) + 7,
        ..init
    };
    flood(&mut b, &mut guests, &mut now, &made_up);
    assert!(b.machine.connections() <= HALF_OPEN_FREE);
    assert!(guests.peers.find(&at(INITS - 1)).is_none(), "nothing is kept of it");
    // Forged echoes do not help.
    flood(&mut b, &mut guests, &mut now, &|n| Hello { echo: u64::from(n) + 1, ..made_up(n) });
    assert!(b.machine.connections() <= HALF_OPEN_FREE);

    // The real peer gets in meanwhile.
    let mut waiting = vec![real];
    for _ in 0..4 {
        now += MS;
        for packet in waiting.drain(..) {
            b.machine.on_datagram(now, &a.address, &packet, Condition::default(), &mut guests);
        }
        b.machine.poll_transmit(now, &mut b.wire);
        for packet in b.wire.packets.drain(..) {
            a.machine.on_datagram(now, &b.address, &packet, Condition::default(), &mut a.heard);
        }
        a.machine.poll_transmit(now, &mut a.wire);
        waiting.append(&mut a.wire.packets);
    }
    assert_eq!(a.heard.events, ["connected"]);
    assert_eq!((guests.connected.len(), guests.departed.len()), (1, 0));

    // Peers that never confirmed are forgotten, and their numbers are reused.
    for _ in 0..20 {
        now += 1000 * MS;
        b.machine.on_timeout(now, &mut guests);
    }
    assert_eq!(b.machine.connections(), 1);
    for n in 0..HALF_OPEN_FREE as u32 {
        assert!(guests.peers.intern(&at(30_000 + n)).unwrap().index() <= HALF_OPEN_FREE);
    }
}

#[test]
fn packets_have_what_both_sides_take() {
    // RoCE and InfiniBand of 4096 and 1024 bytes, in both directions, and the least that IP allows, which is
    // fragmented.
    for (ours, theirs) in [(4096, 1024), (1024, 4096), (4096, 548), (1472, 4096)] {
        let mut bench = Bench::new();
        for (end, port, max) in [(&mut bench.a, 1, ours), (&mut bench.b, 2, theirs)] {
            let life = 101 + 2 * u64::from(port);
            let settings = Settings { datagram_max: max, ..settings(port, 7, life) };
            end.machine = Reliable::new(settings, 1);
        }
        bench.send(b"meet", 1).unwrap();
        bench.exchange(|_| true);
        let longest = std::cell::Cell::new(0);
        for _ in 0..20 {
            bench.send(b"x", 20_000).unwrap();
            for _ in 0..10 {
                bench.exchange(|packet| {
                    let data = packet.first() == Some(&1);
                    longest.set(longest.get().max(if data { packet.len() } else { 0 }));
                    true
                });
            }
        }
        assert_eq!(bench.b.heard.messages.len(), 21);
        assert_eq!(longest.get(), ours.min(theirs.max(1024)), "{ours} {theirs}");
    }
}

/// The packet that a has in flight after a message of 100 bytes, over a kind of wires, between endpoints with these
/// features; and the bench.
fn under_way(sound: bool, features: [u32; 2]) -> (Bench, Vec<u8>) {
    let mut bench = Bench::new();
    let ends = [(&mut bench.a, 1, 101), (&mut bench.b, 2, 103)];
    for ((end, port, life), features) in ends.into_iter().zip(features) {
        let settings = Settings { features, ..settings(port, 7, life) };
        end.machine = Reliable::new(settings, 1);
        end.wire.sound = sound;
    }
    bench.send(b"first", 0).unwrap();
    for _ in 0..5 {
        bench.exchange(|_| true);
    }
    assert_eq!(bench.b.heard.messages.len(), 1);
    bench.send(b"second", 100).unwrap();
    bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
    let packet = bench.a.wire.packets.pop().unwrap();
    (bench, packet)
}

/// How many messages are delivered when this packet arrives.
fn taken(bench: &mut Bench, packet: &[u8], sound: bool) -> usize {
    let (before, from) = (bench.b.heard.messages.len(), bench.a.address);
    let condition = Condition { congested: false, sound };
    bench.b.machine.on_datagram(bench.now, &from, packet, condition, &mut bench.b.heard);
    bench.b.heard.messages.len() - before
}

#[test]
fn where_the_network_guards_payload_the_tag_covers_the_header() {
    use packet::HEADER_ONLY;
    const BOTH: [u32; 2] = [HEADER_TAGS; 2];
    let (mut bench, packet) = under_way(true, BOTH);
    assert_eq!(packet[1] & HEADER_ONLY, HEADER_ONLY);
    // On other paths nothing protects its payload. Its header is protected like any other.
    assert_eq!(taken(&mut bench, &packet, false), 0);
    for at in 0..HEADER_LEN {
        let mut other = packet.clone();
        other[at] ^= 1;
        assert_eq!(taken(&mut bench, &other, true), 0, "byte {at}");
    }
    assert_eq!(taken(&mut bench, &packet[..packet.len() - 1], true), 0, "a shorter one");
    assert_eq!(taken(&mut bench, &[&packet[..], &[0]].concat(), true), 0, "a longer one");
    assert_eq!(taken(&mut bench, &packet, true), 1);
    assert_eq!(bench.b.heard.messages[1], (b"second".to_vec(), payload(100)));
    assert_eq!(bench.b.heard.events, ["connected"]);

    // A tag over everything is valid on every path.
    let (mut bench, packet) = under_way(false, BOTH);
    assert_eq!(packet[1] & HEADER_ONLY, 0);
    let mut other = packet.clone();
    other[1] |= HEADER_ONLY;
    assert_eq!(taken(&mut bench, &other, true), 0);
    *other.last_mut().unwrap() ^= 1;
    other[1] = packet[1];
    assert_eq!(taken(&mut bench, &other, true), 0);
    assert_eq!(taken(&mut bench, &packet, true), 1);
}

#[test]
fn a_peer_without_tags_of_the_header_gets_none() {
    let (mut bench, packet) = under_way(true, [HEADER_TAGS, 0]);
    assert_eq!(packet[1] & packet::HEADER_ONLY, 0);
    assert_eq!(taken(&mut bench, &packet, true), 1);
}

/// The cost of the state machine itself: `cargo test --release costs -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn costs() {
    for len in [8, 1400, 8900] {
        let mut bench = Bench::new();
        for (end, port, life) in [(&mut bench.a, 1, 101), (&mut bench.b, 2, 103)] {
            let mut settings = settings(port, 7, life);
            settings.datagram_max = 8972;
            settings.receive_window = 1024;
            end.machine = Reliable::new(settings, 1);
        }
        bench.send(b"0", 0).unwrap();
        bench.exchange(|_| true);
        bench.exchange(|_| true);
        let data = vec![7u8; len];
        let (mut pushed, mut push, mut transmit, mut receive, mut acks) = (0u32, 0, 0, 0, 0);
        let time = crate::sys::clock::now_ns;
        let mut packets: Vec<Vec<u8>> = Vec::new();
        for _ in 0..3000 {
            bench.now += 10_000;
            let now = bench.now;
            let t0 = time();
            for _ in 0..64 {
                let pack = |at: usize, to: &mut [u8]| to.copy_from_slice(&data[at..at + to.len()]);
                if bench.a.machine.send(PeerId(0), &[1; 24], len, pack, now).is_err() {
                    break;
                }
                pushed += 1;
            }
            let t1 = time();
            let mut null = Null(|_: &[u8]| ());
            bench.a.machine.poll_transmit(now, &mut null);
            let t2 = time();
            // Collects the same packets again, for their bytes.
            packets.clear();
            bench.a.machine.each_in_flight(|p| packets.push(p.to_vec()));
            bench.b.heard.messages.clear();
            let from = bench.a.address;
            let t3 = time();
            for packet in &packets {
                bench.b.machine.on_datagram(
                    now,
                    &from,
                    packet,
                    Condition::default(),
                    &mut Deaf(|| ()),
                );
            }
            let t4 = time();
            bench.b.machine.poll_transmit(now, &mut bench.b.wire);
            let from = bench.b.address;
            let t5 = time();
            for packet in bench.b.wire.packets.drain(..) {
                bench.a.machine.on_datagram(
                    now,
                    &from,
                    &packet,
                    Condition::default(),
                    &mut Deaf(|| ()),
                );
            }
            let t6 = time();
            push += t1 - t0;
            transmit += t2 - t1;
            receive += t4 - t3;
            acks += t6 - t5;
        }
        let each = |ns: u64| ns / u64::from(pushed);
        println!(
            "{len} bytes, {pushed} packets: push {} ns, transmit {} ns, receive {} ns, acknowledge {} ns",
            each(push),
            each(transmit),
            each(receive),
            each(acks)
        );
    }
}

/// A message of `a` was answered by another one, which `a` has received.
fn answered() -> Bench {
    let mut bench = Bench::connected();
    bench.poll();
    assert_eq!(bench.push(MS, 0, 10), 1);
    let Bench { a, b, now } = &mut bench;
    for packet in a.wire.packets.drain(..) {
        b.machine.on_datagram(*now, &a.address, &packet, Condition::default(), &mut b.heard);
    }
    b.machine.on_poll();
    b.machine.send(PeerId(0), b"back", 0, |_, _| (), *now).unwrap();
    b.machine.poll_transmit(*now, &mut b.wire);
    for packet in b.wire.packets.drain(..) {
        a.machine.on_datagram(*now, &b.address, &packet, Condition::default(), &mut a.heard);
    }
    bench
}

#[test]
fn a_message_is_handed_over_before_what_its_packet_acknowledges() {
    let mut prompt = answered();
    let a = &prompt.a;
    assert_eq!(a.heard.messages, [(b"back".to_vec(), Vec::new())]);
    assert_eq!(a.machine.unacknowledged(), 1);
    assert!(a.machine.has_put_off() && !a.machine.has_unsent());
    // Its reply does not wait for that either, unless it is late anyway.
    let put_off = |bench: &Bench| (bench.a.machine.unacknowledged(), bench.a.machine.has_put_off());
    assert_eq!((prompt.push(1000, 1, 10), put_off(&prompt)), (1, (2, true)));
    let mut late = answered();
    assert_eq!((late.push(500 * MS, 1, 10), put_off(&late)), (1, (1, false)));
    for bench in [&mut prompt, &mut late] {
        bench.wait(0);
        bench.a.machine.poll_transmit(bench.now, &mut bench.a.wire);
        let counts = bench.a.machine.counts();
        assert_eq!((counts.timeouts, counts.retransmitted), (0, 0));
        assert_eq!(bench.a.wire.packets.len(), 1, "and nobody counts as silent");
        assert_eq!(put_off(bench), (1, false));
    }
}

#[test]
fn the_clock_is_read_for_an_acknowledgement_that_was_put_off_alone() {
    let mut bench = answered();
    let (machine, now) = (&mut bench.a.machine, bench.now);
    let mut read = 0;
    let marks = [0; 100].map(|_| {
        let clock = || {
            read += 1;
            now
        };
        machine.acknowledged(PeerId(0), clock)
    });
    assert_eq!((read, machine.has_put_off(), machine.unacknowledged()), (1, false, 0));
    assert!(marks[0].is_some() && marks.iter().all(|mark| *mark == marks[0]));
}

/// The work that a message waits for: `cargo test --release waits -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn waits() {
    const ROUNDS: u64 = 200_000;
    let time = crate::sys::clock::now_ns;
    let mut bench = Bench::new();
    for _ in 0..3 {
        bench.send(b"0", 0).unwrap();
        bench.exchange(|_| true);
    }
    let Bench { a, b, .. } = &mut bench;
    let (mut until_link, mut until_message, mut all) = (0, 0, 0);
    let mut packets = Vec::new();
    for _ in 0..ROUNDS {
        for turn in [true, false] {
            let (from, to) = if turn { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
            let pack = |_: usize, to: &mut [u8]| to.fill(7);
            let (mut left, mut handed_over) = (0, 0);
            let mut link = Null(|bytes: &[u8]| {
                left = time();
                packets.push(bytes.to_vec());
            });
            from.machine.on_poll();
            let t0 = time();
            if !from.machine.send_at_once(PeerId(0), &[1; 24], 64, pack, || t0, &mut link) {
                // Handshakes go first.
                from.machine.send(PeerId(0), &[1; 24], 64, pack, t0).unwrap();
                from.machine.poll_transmit(t0, &mut link);
            }
            let t1 = time();
            from.machine.poll_transmit(t1, &mut link);
            let t2 = time();
            let mut sink = Deaf(|| handed_over = time());
            for packet in packets.drain(..) {
                to.machine.on_datagram(t2, &from.address, &packet, Condition::default(), &mut sink);
            }
            let t3 = time();
            until_link += left - t0;
            until_message += handed_over - t2;
            all += t3 - t0;
        }
    }
    let each = |ns: u64| ns / (2 * ROUNDS);
    println!(
        "64 bytes and back: {} ns until the link has the packet, {} until its message is handed over, {} in all",
        each(until_link),
        each(until_message),
        each(all)
    );
}

/// Takes every packet, and shows it to a closure.
struct Null<F>(F);

impl<F: FnMut(&[u8])> Link for Null<F> {
    fn datagram_max(&self) -> usize {
        1472
    }
    fn send(&mut self, _: &Address, packets: &[IoSlice<'_>]) -> usize {
        packets.iter().for_each(|packet| (self.0)(packet));
        packets.len()
    }
    fn receive(&mut self, _: &mut impl crate::transport::net::link::LinkSink) -> usize {
        0
    }
}

/// Calls a closure for each message.
struct Deaf<F>(F);

impl<F: FnMut()> Sink for Deaf<F> {
    fn peer_of(&mut self, _: &Address) -> Option<PeerId> {
        Some(PeerId(0))
    }
    fn find(&self, _: &Address) -> Option<PeerId> {
        Some(PeerId(0))
    }
    fn forget(&mut self, _: PeerId) {}

    fn standing(&self, _: &Address) -> Standing {
        Standing::Admitted
    }
    fn on_connected(&mut self, _: PeerId, _: &Address) {}
    fn on_message(&mut self, _: PeerId, header: &[u8], payload: &[u8]) {
        std::hint::black_box((header, payload));
        (self.0)();
    }
    fn on_departure(&mut self, _: PeerId, _: Departure) {}
    fn is_owed(&self, _: PeerId) -> Option<bool> {
        Some(false)
    }
}
