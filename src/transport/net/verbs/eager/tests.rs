//! Channels of several endpoints over a simulated network of queue pairs, from a seed: who wants one when, what is sent,
//! in which pieces it arrives, what fails and who sleeps is drawn.

use super::ring::RING;
use super::*;
use crate::sys::verbs::MARK;
use crate::transport::net::reliable::sim::rng::Rng;
use crate::transport::net::verbs::introduction::{Network, Place};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// A piece of a write: where it goes, and whether it is the last one of a packet.
type Piece = (usize, Vec<u8>, bool);

/// What the network knows of a queue pair.
#[derive(Debug, Default)]
struct Wire {
    node: usize,
    to: Option<u32>,
    /// What is under way, in order; and after which packets a completion is reported.
    pieces: VecDeque<Piece>,
    posted: u64,
    done: u64,
    signals: VecDeque<u64>,
    failed: bool,
}

#[derive(Debug, Default)]
struct Fabric {
    wires: HashMap<u32, Wire>,
    events: Vec<VecDeque<(u32, bool)>>,
    next: u32,
    /// Pieces are torn apart, and those of a page come in any order.
    tears: bool,
    /// Queue pairs that a node may have.
    room: usize,
}

type Shared = Arc<Mutex<Fabric>>;

#[derive(Debug)]
struct FakeQp {
    fabric: Shared,
    number: u32,
    ring: Vec<u8>,
    posted: u64,
    complete: u64,
    signals: VecDeque<u64>,
}

const SENDS: u64 = 12;

impl Qp for FakeQp {
    fn number(&self) -> u32 {
        self.number
    }
    fn end(&self, psn: u32) -> End {
        let place =
            Place { network: Network::Roce, mtu: 4096, number: self.number, lid: 0, gid: [1; 16] };
        End { place, psn, ring: Ring { addr: u64::from(self.number) << 32, rkey: self.number } }
    }
    fn connect(&mut self, to: &End, _: u32) -> Result<(), Errno> {
        let mut fabric = self.fabric.lock().unwrap();
        fabric.wires.get_mut(&self.number).unwrap().to = Some(to.place.number);
        Ok(())
    }
    fn mark(&self, at: usize) -> Option<Words> {
        let bytes = self.ring.get(at..at + MARK)?;
        Some([0, 8].map(|i| u64::from_le_bytes(bytes[i..i + 8].try_into().unwrap())))
    }
    fn bytes(&self, at: usize, len: usize) -> Option<&[u8]> {
        self.ring.get(at..at.checked_add(len)?)
    }
    fn room(&self) -> usize {
        (SENDS - (self.posted - self.complete)) as usize
    }
    fn write<'a>(
        &mut self,
        to: Ring,
        writes: impl Iterator<Item = EagerWrite<'a>>,
        told: bool,
    ) -> Result<usize, Errno> {
        let room = self.room();
        let mut fabric = self.fabric.lock().unwrap();
        let wire = fabric.wires.get_mut(&self.number).unwrap();
        if wire.failed {
            return Err(Errno(libc::EIO));
        }
        assert_eq!((wire.to, to.addr), (Some(to.rkey), u64::from(to.rkey) << 32));
        let mut n = 0;
        for write in writes.take(room) {
            let bytes = [write.packet, &write.mark[..]].concat();
            assert!(write.at + bytes.len() <= RING);
            wire.pieces.push_back((write.at, bytes, true));
            n += 1;
            wire.posted += 1;
            if wire.posted % 4 == 0 {
                wire.signals.push_back(wire.posted);
                self.signals.push_back(wire.posted);
            }
        }
        if told && wire.signals.back() != Some(&wire.posted) {
            wire.signals.push_back(wire.posted);
            self.signals.push_back(wire.posted);
        }
        self.posted = wire.posted;
        Ok(n)
    }
    fn progress(&self) -> (u64, u64) {
        (self.posted, self.complete)
    }
    fn on_complete(&mut self) {
        self.complete = self.signals.pop_front().unwrap();
    }
}

impl Drop for FakeQp {
    fn drop(&mut self) {
        self.fabric.lock().unwrap().wires.remove(&self.number);
    }
}

struct FakeDevice {
    fabric: Shared,
    node: usize,
}

impl Device for FakeDevice {
    type Qp = FakeQp;
    fn lend(&mut self, _: Arc<Pool>) {}
    fn channel(&mut self) -> Result<FakeQp, Errno> {
        let mut fabric = self.fabric.lock().unwrap();
        let taken = fabric.wires.values().filter(|wire| wire.node == self.node).count();
        if taken >= fabric.room {
            return Err(Errno(libc::ENOMEM));
        }
        fabric.next += 1;
        let number = fabric.next;
        fabric.wires.insert(number, Wire { node: self.node, ..Wire::default() });
        Ok(FakeQp {
            fabric: self.fabric.clone(),
            number,
            ring: vec![0; RING],
            posted: 0,
            complete: 0,
            signals: VecDeque::new(),
        })
    }
    fn reaches(&self, _: &End) -> bool {
        true
    }
    fn poll(&mut self, mut each: impl FnMut(u32, bool)) -> Result<usize, Errno> {
        let mut fabric = self.fabric.lock().unwrap();
        let events: Vec<_> = fabric.events[self.node].drain(..).collect();
        drop(fabric);
        // Of those that were dropped nothing is reported.
        events.iter().for_each(|(number, fails)| each(*number, *fails));
        Ok(events.len())
    }
}

fn chance(rng: &mut Rng, percent: u64) -> bool {
    rng.below(100) < percent
}

fn address(node: usize) -> Address {
    Address::from_text(&format!("10.0.0.{}:7", node + 1)).unwrap()
}

/// Some endpoints, and the messages under way between them.
struct World {
    fabric: Shared,
    nodes: Vec<Eager<FakeDevice>>,
    /// By node and peer, the channel that packets go by.
    open: HashMap<(usize, usize), ChannelId>,
    said: HashMap<(usize, usize), VecDeque<Control>>,
    now: u64,
    /// By node and peer: number of the next packet, and of the last one that arrived.
    next: HashMap<(usize, usize), u32>,
    got: HashMap<(usize, usize), u32>,
    arrived: u64,
    lost: u64,
}

impl World {
    fn new(count: usize, limit: usize, room: usize) -> Self {
        let fabric = Fabric { events: vec![VecDeque::new(); count], room, ..Fabric::default() };
        let fabric = Arc::new(Mutex::new(fabric));
        let node = |node| {
            let fabric = fabric.clone();
            let opener = Box::new(move || Ok(FakeDevice { fabric: fabric.clone(), node }));
            Eager::new(opener, limit, address(node))
        };
        Self {
            nodes: (0..count).map(node).collect(),
            fabric,
            open: HashMap::new(),
            said: HashMap::new(),
            now: 1,
            next: HashMap::new(),
            got: HashMap::new(),
            arrived: 0,
            lost: 0,
        }
    }

    fn number(&self, of: &Address) -> usize {
        (0..self.nodes.len()).find(|node| address(*node) == *of).unwrap()
    }

    /// Hears what node `i` has to say.
    fn hear(&mut self, i: usize) {
        while let Some((to, message)) = self.nodes[i].next_control() {
            let to = self.number(&to);
            self.said.entry((i, to)).or_default().push_back(message);
        }
        let mut news: Vec<News> = Vec::new();
        while let Some(one) = self.nodes[i].next_news() {
            news.push(one);
        }
        for one in news {
            match one {
                News::Open(peer, channel) => self.open.insert((i, self.number(&peer)), channel),
                News::Closed(peer) => self.open.remove(&(i, self.number(&peer))),
            };
        }
    }

    fn tend(&mut self, i: usize) {
        self.nodes[i].tend(self.now);
        self.hear(i);
    }

    /// The oldest message from `i` to `j` arrives.
    fn say(&mut self, i: usize, j: usize) -> bool {
        let Some(message) = self.said.get_mut(&(i, j)).and_then(VecDeque::pop_front) else {
            return false;
        };
        self.nodes[j].on_control(&address(i), &message, self.now);
        self.hear(j);
        true
    }

    /// A packet of node `i` to `j`: its number, and what follows from that.
    fn packet(number: u32, len: usize) -> Vec<u8> {
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.extend((4..len.max(4)).map(|at| (at as u32).wrapping_mul(number | 1) as u8));
        bytes
    }

    fn send(&mut self, i: usize, j: usize, lens: &[usize]) -> Option<usize> {
        let next = *self.next.entry((i, j)).or_insert(1);
        let packets: Vec<Vec<u8>> =
            lens.iter().zip(next..).map(|(len, number)| Self::packet(number, *len)).collect();
        let slices: Vec<IoSlice<'_>> = packets.iter().map(|bytes| IoSlice::new(bytes)).collect();
        self.post(i, j, &slices)
    }

    /// The same of packets that are somewhere.
    fn post(&mut self, i: usize, j: usize, packets: &[IoSlice<'_>]) -> Option<usize> {
        let channel = *self.open.get(&(i, j))?;
        let sent = self.nodes[i].send(channel, packets, self.now);
        *self.next.entry((i, j)).or_insert(1) += sent.unwrap_or(0) as u32;
        self.hear(i);
        sent
    }

    fn takes(&mut self, i: usize, j: usize, len: usize) -> Takes {
        let Some(channel) = self.open.get(&(i, j)) else { return Takes::Never };
        self.nodes[i].takes(*channel, len)
    }

    /// As many packets of `len` bytes as there is room for. Returns how many.
    fn fill(&mut self, i: usize, j: usize, len: usize) -> usize {
        let mut sent = 0;
        while let Takes::Some(n) = self.takes(i, j, len) {
            assert_eq!(self.send(i, j, &vec![len; n]), Some(n), "it does as it says");
            sent += n;
            let number = self.nodes[i].channels[0].as_ref().unwrap().qp.number;
            while self.deliver(number, &mut Rng::new(1)) {}
            self.tend(i);
        }
        sent
    }

    /// The oldest piece on its way from the queue pair arrives. False: there was none.
    fn deliver(&mut self, number: u32, rng: &mut Rng) -> bool {
        let mut fabric = self.fabric.lock().unwrap();
        let tears = fabric.tears;
        let Some(wire) = fabric.wires.get_mut(&number).filter(|wire| !wire.failed) else {
            return false;
        };
        let Some((at, bytes, last)) = wire.pieces.pop_front() else { return false };
        // A page is a page: what lies on two of them comes one after the other, what on one in any order.
        let edge = (at / 4096 + 1) * 4096 - at;
        let cut = if bytes.len() > edge { edge } else { bytes.len() / 2 };
        if tears && bytes.len() > edge || tears && cut > 0 && chance(rng, 30) {
            let (first, second) = bytes.split_at(cut);
            let mut parts = [(at, first.to_vec()), (at + cut, second.to_vec())];
            if bytes.len() <= edge && chance(rng, 50) {
                parts.reverse();
            }
            let [first, second] = parts;
            wire.pieces.push_front((second.0, second.1, last));
            wire.pieces.push_front((first.0, first.1, false));
            return true;
        }
        let (node, to) = (wire.node, wire.to);
        wire.done += u64::from(last);
        let mut events = 0;
        while wire.signals.front().is_some_and(|upto| *upto <= wire.done) {
            wire.signals.pop_front();
            events += 1;
        }
        let far = to.and_then(|to| fabric.wires.get(&to).map(|far| (to, far.node, far.to)));
        let Some((to, far, _)) = far.filter(|(.., back)| *back == Some(number)) else {
            fabric.wires.get_mut(&number).unwrap().failed = true;
            fabric.events[node].push_back((number, true));
            return true;
        };
        (0..events).for_each(|_| fabric.events[node].push_back((number, false)));
        drop(fabric);
        let channels = self.nodes[far].channels.iter_mut().flatten();
        let qp = channels.map(|c| &mut c.qp).find(|qp| qp.number == to).unwrap();
        qp.ring[at..at + bytes.len()].copy_from_slice(&bytes);
        true
    }

    fn receive(&mut self, i: usize) -> usize {
        let mut all: Vec<(Address, Vec<u8>)> = Vec::new();
        let before = self.nodes[i].has_arrived();
        let n = self.nodes[i].receive(|from, bytes| all.push((*from, bytes.to_vec())));
        assert_eq!((before, n), (n > 0, all.len()));
        for (from, bytes) in all {
            let from = self.number(&from);
            let number = u32::from_le_bytes(bytes[..4].try_into().unwrap());
            assert!(bytes == Self::packet(number, bytes.len()), "packet {number} is whole");
            let last = self.got.insert((from, i), number).unwrap_or(0);
            assert!(number > last && number < self.next[&(from, i)], "{number} after {last}");
            self.lost += u64::from(number - last - 1);
            self.arrived += 1;
        }
        self.hear(i);
        n
    }

    /// All that can happen by itself does.
    fn settle(&mut self, rng: &mut Rng) {
        for _ in 0..10_000 {
            let mut busy = false;
            for i in 0..self.nodes.len() {
                self.tend(i);
                busy |= self.receive(i) > 0;
                for j in 0..self.nodes.len() {
                    busy |= self.say(i, j);
                }
            }
            let numbers: Vec<u32> = self.fabric.lock().unwrap().wires.keys().copied().collect();
            for number in numbers {
                busy |= self.deliver(number, rng);
            }
            if !busy {
                return;
            }
        }
        panic!("it never ends");
    }

    fn wish(&mut self, i: usize, j: usize) {
        self.nodes[i].wish(&address(j));
        self.tend(i);
    }

    fn counts(&self, i: usize) -> EagerCounts {
        self.nodes[i].counts()
    }
}

/// Two that have a channel.
fn pair(rng: &mut Rng) -> World {
    let mut world = World::new(2, 2, 2);
    world.wish(0, 1);
    world.settle(rng);
    assert!(world.open.contains_key(&(0, 1)) && world.open.contains_key(&(1, 0)));
    world
}

#[test]
fn packets_of_all_lengths_arrive_in_pieces_and_whole() {
    for tears in [false, true] {
        let mut rng = Rng::new(u64::from(tears));
        let mut world = pair(&mut rng);
        world.fabric.lock().unwrap().tears = tears;
        let mut sent = 0;
        for round in 0..400 {
            let full = round % 5;
            let last = [4, 5, 11, 12, 63, 512, 513, 2000, PACKET_MAX][round % 9];
            let lens: Vec<usize> = std::iter::repeat_n(PACKET_MAX, full).chain([last]).collect();
            assert_eq!(world.send(0, 1, &lens), Some(lens.len()));
            let long = [PACKET_MAX + 1, 5000, 4 * 4096, 16_500, LONG_MAX - 1, LONG_MAX][round % 6];
            assert!(matches!(world.takes(0, 1, long), Takes::Some(1..)));
            assert_eq!(world.send(0, 1, &[long]), Some(1));
            sent += lens.len() as u64 + 1;
            world.settle(&mut rng);
        }
        assert_eq!((world.arrived, world.lost), (sent, 0));
        let counts = world.counts(0);
        assert_eq!((counts.sent, counts.detours, counts.broken), (sent, 0, 0));
        assert_eq!(world.counts(1).received, sent);
        assert_eq!(world.takes(0, 1, LONG_MAX + 1), Takes::Never);
        assert_eq!(world.send(0, 1, &[LONG_MAX + 1]), None, "too long");
    }
}

#[test]
fn both_may_ask_at_once() {
    let mut rng = Rng::new(1);
    let mut world = World::new(2, 1, 2);
    world.wish(0, 1);
    world.wish(1, 0);
    world.settle(&mut rng);
    assert_eq!(world.fabric.lock().unwrap().wires.len(), 2, "one channel");
    for (i, j) in [(0, 1), (1, 0)] {
        assert_eq!(world.counts(i).made, 1);
        assert_eq!(world.send(i, j, &[100]), Some(1));
    }
    world.settle(&mut rng);
    assert_eq!((world.arrived, world.lost), (2, 0));
}

#[test]
fn who_has_no_room_refuses_and_who_is_idle_gives_way() {
    let mut rng = Rng::new(1);
    let mut world = World::new(3, 1, 1);
    world.wish(0, 1);
    world.settle(&mut rng);
    world.wish(2, 1);
    world.settle(&mut rng);
    assert_eq!((world.counts(1).refused, world.counts(2).channels), (1, 0));
    assert_eq!(world.send(0, 1, &[10]), Some(1));
    world.now += IDLE_NS + 2;
    world.wish(2, 1);
    world.settle(&mut rng);
    assert_eq!((world.send(0, 1, &[10]), world.send(2, 1, &[10])), (None, Some(1)));
    // The device has no more.
    world.fabric.lock().unwrap().room = 0;
    world.wish(0, 1);
    world.settle(&mut rng);
    assert_eq!((world.counts(0).refused, world.counts(0).channels), (1, 0));
    // What was never answered ends.
    world.fabric.lock().unwrap().room = 1;
    world.wish(0, 1);
    world.said.clear();
    assert_eq!(world.counts(0).channels, 1);
    world.now += PATIENCE_NS + 1;
    world.tend(0);
    assert_eq!(world.counts(0).channels, 0);
}

#[test]
fn without_room_packets_go_another_way() {
    let mut rng = Rng::new(1);
    let mut world = pair(&mut rng);
    let mut sent = 0;
    while let Some(n) = world.send(0, 1, &[50; BURST]) {
        sent += n;
        let number = world.nodes[0].channels[0].as_ref().unwrap().qp.number;
        while world.deliver(number, &mut rng) {}
        world.tend(0);
    }
    assert_eq!(sent, SLOTS as usize, "as many as the ring has places for");
    world.settle(&mut rng);
    assert_eq!(world.send(0, 1, &[50; BURST]), Some(BURST), "there is room again");
    assert_eq!(world.send(0, 1, &[50; BURST + 1]), None, "a stream");
    world.settle(&mut rng);
    assert_eq!((world.arrived, world.lost), (u64::from(SLOTS) + BURST as u64, 0));
    assert_eq!(world.counts(0).detours, 2 * BURST as u64 + 1);
    // A long packet takes the places of several.
    let long = LONG_MAX - 4096;
    let free = |world: &World| world.nodes[0].channels[0].as_ref().unwrap().free() as usize;
    let places = free(&world);
    assert_eq!(world.send(0, 1, &[50]), Some(1));
    assert_eq!(world.fill(0, 1, long), (places - 1) / 7);
    assert_eq!(world.takes(0, 1, long), Takes::Later);
    let left = free(&world);
    assert_eq!(world.takes(0, 1, 50), Takes::Some(left), "for short ones");
    assert_eq!(world.send(0, 1, &vec![50; left]), Some(left));
    assert_eq!((world.takes(0, 1, 50), world.send(0, 1, &[50])), (Takes::Later, None));
    world.settle(&mut rng);
    assert!(matches!(world.takes(0, 1, LONG_MAX), Takes::Some(5..)));
    assert_eq!(world.lost, 0);
}

#[test]
fn what_was_written_is_kept_until_the_device_has_read_it() {
    let mut rng = Rng::new(1);
    let mut world = World::new(3, 2, 2);
    let pool = Pool::new(LONG_MAX).unwrap();
    world.nodes[0].lend(pool.clone());
    for peer in [1, 2] {
        world.wish(0, peer);
        world.settle(&mut rng);
    }
    // The last one of a stream may be short.
    let mut lens = [300, LONG_MAX].into_iter().cycle();
    let mut written = |world: &mut World, peer: usize| {
        let mut buffer = pool.cut().unwrap();
        let number = *world.next.entry((0, peer)).or_insert(1);
        buffer.hold(&World::packet(number, lens.next().unwrap()));
        assert_eq!(world.post(0, peer, &[IoSlice::new(&buffer)]), Some(1));
        buffer.note_sent();
        buffer
    };
    let (first, second) = (written(&mut world, 1), written(&mut world, 2));
    world.settle(&mut rng);
    assert!(!first.is_read() && !second.is_read(), "nothing reports that it is");
    // Until that is asked for: nothing else was written for a while.
    world.now += UNSURE_NS + 1;
    world.tend(0);
    assert!(!first.is_read() && !second.is_read());
    world.settle(&mut rng);
    assert!(first.is_read() && second.is_read());
    // Or with the fourth of them.
    let all: Vec<_> = (0..4).map(|_| written(&mut world, 2)).collect();
    assert!(all.iter().all(|buffer| !buffer.is_read()));
    world.settle(&mut rng);
    let read = all.iter().filter(|buffer| buffer.is_read()).count();
    assert!((2..=4).contains(&read), "{read}");
    // Nobody reads for a queue pair that is gone.
    let (last, other) = (written(&mut world, 1), written(&mut world, 2));
    world.nodes[0].close(&address(1), false);
    world.tend(0);
    assert!(!last.is_read(), "it was posted after one that may be read still");
    world.nodes[0].clear();
    assert!(last.is_read() && other.is_read());
}

#[test]
fn who_sleeps_is_not_written_to_until_it_is_awake() {
    let mut rng = Rng::new(1);
    let mut world = pair(&mut rng);
    assert!(!world.nodes[1].sleep(world.now), "the peer does not know");
    assert!(!world.nodes[1].sleep(world.now), "still not");
    assert_eq!(world.send(0, 1, &[50]), Some(1), "nor does it");
    world.settle(&mut rng);
    assert!(world.nodes[1].sleep(world.now));
    assert_eq!(world.takes(0, 1, 50), Takes::Never);
    assert_eq!(world.send(0, 1, &[50]), None);
    assert_eq!(world.nodes[1].look_at(world.now), Some(world.now + LAST_LOOKS_NS[0]));
    let after = world.now + LAST_LOOKS_NS[2];
    assert_eq!(world.nodes[1].look_at(after), None);
    // It may write all the same; when it does that often it is awake.
    for _ in 0..AWAKE {
        assert_eq!(world.send(1, 0, &[50]), Some(1));
        world.settle(&mut rng);
    }
    assert_eq!(world.send(0, 1, &[50]), Some(1));
    world.settle(&mut rng);
    assert_eq!((world.lost, world.counts(1).sleeps), (0, 1));
    // Also when it sends datagrams.
    world.nodes[1].sleep(world.now);
    world.settle(&mut rng);
    assert_eq!(world.takes(0, 1, 50), Takes::Never);
    world.nodes[1].note_sent(AWAKE as usize - 1);
    world.settle(&mut rng);
    assert_eq!(world.takes(0, 1, 50), Takes::Never);
    world.nodes[1].note_sent(1);
    world.settle(&mut rng);
    assert!(matches!(world.takes(0, 1, 50), Takes::Some(_)));
    // Nobody waits for a peer for ever.
    assert!(!world.nodes[1].sleep(world.now));
    assert!(!world.nodes[1].sleep(world.now + TELLING_NS));
    assert!(world.nodes[1].sleep(world.now + TELLING_NS + 1));
}

#[test]
fn what_fails_is_left_on_both_sides() {
    let mut rng = Rng::new(1);
    let mut world = pair(&mut rng);
    let number = world.nodes[0].channels[0].as_ref().unwrap().qp.number;
    {
        let mut fabric = world.fabric.lock().unwrap();
        fabric.wires.get_mut(&number).unwrap().failed = true;
        fabric.events[0].push_back((number, true));
    }
    world.settle(&mut rng);
    assert_eq!((world.send(0, 1, &[9]), world.send(1, 0, &[9])), (None, None));
    assert_eq!(
        (world.counts(0).broken, world.counts(0).channels, world.counts(1).channels),
        (1, 0, 0)
    );
    // And may be made anew.
    world.wish(1, 0);
    world.settle(&mut rng);
    assert_eq!((world.send(0, 1, &[9]), world.send(1, 0, &[9])), (Some(1), Some(1)));
    world.nodes[1].clear();
    world.hear(1);
    world.settle(&mut rng);
    assert_eq!((world.counts(0).channels, world.counts(1).channels), (0, 0));
}

#[test]
fn nonsense_is_ignored() {
    let mut rng = Rng::new(1);
    let mut world = pair(&mut rng);
    for message in [&[][..], &[EAGER_CONTROL], &[EAGER_CONTROL; EAGER_LEN]] {
        world.nodes[0].on_control(&address(1), message, world.now);
    }
    // A state that says more than was sent, and a packet that is longer than any.
    let channel = world.nodes[0].channels[0].as_mut().unwrap();
    let key = channel.id;
    let state = State { taken: 77, sleeps: false }.encode(key);
    channel.qp.ring[STATE_AT..STATE_AT + MARK].copy_from_slice(&state);
    let mark = Mark { number: 1, len: u16::MAX, taken: 99 }.encode(key);
    let end = ring::end_of(1);
    channel.qp.ring[end..end + MARK].copy_from_slice(&mark);
    assert_eq!(world.nodes[0].receive(|_, _| panic!("it is none")), 1);
    assert_eq!(world.send(0, 1, &[20; 3]), Some(3));
    world.tend(0);
    let channel = world.nodes[0].channels[0].as_ref().unwrap();
    assert_eq!((channel.sent, channel.acknowledged), (3, 0));
}

#[test]
fn whatever_happens_nothing_wrong_arrives() {
    let runs = if cfg!(debug_assertions) { 60 } else { 400 };
    let (mut arrived, mut made, mut broken, mut sleeps) = (0, 0, 0, 0);
    for seed in 0..runs {
        let mut rng = Rng::new(seed);
        let count = 2 + rng.below(3) as usize;
        let mut world = World::new(count, 1 + rng.below(3) as usize, 1 + rng.below(4) as usize);
        world.fabric.lock().unwrap().tears = chance(&mut rng, 70);
        let (troubles, sleepy) = (chance(&mut rng, 50), chance(&mut rng, 50));
        for _ in 0..1500 {
            world.now += rng.below(1_000_000);
            let (i, j) = (rng.below(count as u64) as usize, rng.below(count as u64) as usize);
            match rng.below(100) {
                0..4 if i != j => world.wish(i, j),
                4..14 => world.tend(i),
                14..30 => drop(world.say(i, j)),
                30..35 => {
                    let len = PACKET_MAX + rng.below((LONG_MAX - PACKET_MAX) as u64) as usize;
                    if let Takes::Some(n) = world.takes(i, j, len) {
                        let sent = world.send(i, j, &vec![len; n]);
                        let broken = !world.open.contains_key(&(i, j));
                        assert!(sent == Some(n) || broken, "it does as it says");
                    }
                }
                35..50 => {
                    let full = rng.below(4) as usize;
                    let last = 4 + rng.below(PACKET_MAX as u64 - 3) as usize;
                    let last = if chance(&mut rng, 60) { last % 600 } else { last };
                    let lens: Vec<usize> =
                        std::iter::repeat_n(PACKET_MAX, full).chain([last]).collect();
                    world.send(i, j, &lens);
                }
                50..65 => drop(world.receive(i)),
                65 if sleepy => drop(world.nodes[i].sleep(world.now)),
                67 if troubles => {
                    world.nodes[i].close(&address(j), chance(&mut rng, 80));
                    world.hear(i);
                }
                68 if troubles && chance(&mut rng, 20) => {
                    world.nodes[i].clear();
                    world.hear(i);
                }
                _ => {
                    let mut numbers: Vec<u32> =
                        world.fabric.lock().unwrap().wires.keys().copied().collect();
                    numbers.sort_unstable();
                    if !numbers.is_empty() {
                        let number = numbers[rng.below(numbers.len() as u64) as usize];
                        for _ in 0..rng.below(6) {
                            world.deliver(number, &mut rng);
                        }
                        if troubles && chance(&mut rng, 1) {
                            let mut fabric = world.fabric.lock().unwrap();
                            let wire = fabric.wires.get_mut(&number).unwrap();
                            wire.failed = true;
                            let node = wire.node;
                            fabric.events[node].push_back((number, true));
                        }
                    }
                }
            }
            for node in &world.nodes {
                assert!(node.counts().channels <= node.limit);
            }
        }
        world.settle(&mut rng);
        let (mut sent, mut received) = (0, 0);
        for i in 0..count {
            let counts = world.counts(i);
            sent += counts.sent;
            received += counts.received;
            made += counts.made;
            broken += counts.broken;
            sleeps += counts.sleeps;
        }
        assert_eq!(received, world.arrived);
        assert!(received <= sent);
        if broken == 0 && !troubles && world.nodes.iter().all(|n| n.counts().made <= 1) {
            assert_eq!((world.lost, sent - received), (0, 0), "seed {seed}");
        }
        arrived += world.arrived;
    }
    assert!(
        arrived > 2000 && made > 50 && broken > 5 && sleeps > 50,
        "{arrived} {made} {broken} {sleeps}"
    );
}
