//! Endpoints on nodes with simulated modules. A seed determines which endpoints connect, when messages arrive, and
//! which operations fail.

use super::*;
use crate::sys::rv::double::{Fabric, gid};
use crate::transport::net::agreement::pause::{PAUSE_MAX_NS, PAUSE_NS};
use crate::transport::net::bulk::no_way::NoWay;
use crate::transport::net::bulk::ways::Ways;
use crate::transport::net::reliable::sim::rng::Rng;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

/// Fills a remote buffer.
const FILL: What = fill(false);
/// The token of a write of which the end is asked for.
const DONE: u64 = 77;

const fn fill(reports: bool) -> What {
    What::Put(Put { notify: true, delivered: false, stays: false, reports, token: DONE })
}

const POST: u8 = 0xfb;
const REG: u8 = 0xf3;

/// A message from one endpoint to another.
enum Said {
    Control(Control),
    /// A remote buffer, and the byte to fill it with.
    Window(RemoteKey, usize, u8),
}

struct Node {
    bulk: Box<dyn Bulk>,
    /// Remote buffers by token: the peer, the memory, and the expected contents.
    lent: HashMap<u64, (PeerId, OwnedBuffer, u8)>,
    /// Memory of lost buffers and its contents at that time: no peer may write it any more.
    retired: Vec<(OwnedBuffer, Vec<u8>)>,
    /// Memory that writes read from.
    sources: Vec<OwnedBuffer>,
    to_write: Vec<VecDeque<(RemoteKey, usize, u8)>>,
    filled: u64,
    lost: u64,
    /// Writes whose end was reported.
    done: u64,
}

/// A remote buffer of `node` for `peer`.
fn register(
    node: &mut Node,
    peer: PeerId,
    part: &SegmentList,
    token: u64,
) -> Result<RemoteKey, SendError> {
    match node.bulk.register(peer, part, Purpose::Receive { token }, false, 1) {
        Registered::Yes(registered) => Ok(registered.key),
        Registered::Later => Err(SendError::Again),
        Registered::No => Err(STALE),
        Registered::Never => Err(UNREGISTERED),
    }
}

struct Told<'a> {
    lent: &'a mut HashMap<u64, (PeerId, OwnedBuffer, u8)>,
    retired: &'a mut Vec<(OwnedBuffer, Vec<u8>)>,
    filled: &'a mut u64,
    lost: &'a mut u64,
    done: &'a mut u64,
}

fn bytes(buffer: &OwnedBuffer) -> Vec<u8> {
    let list = buffer.segments();
    let mut bytes = vec![0; list.len()];
    list.copy_out(0, &mut bytes);
    bytes
}

impl BulkSink for Told<'_> {
    fn on_notify(&mut self, peer: PeerId, token: u64) {
        let (to, buffer, byte) = self.lent.remove(&token).expect("a window is filled once");
        assert_eq!(to, peer);
        assert!(bytes(&buffer).iter().all(|b| *b == byte), "it holds what was sent");
        *self.filled += 1;
    }
    fn on_lost(&mut self, peer: PeerId) {
        let theirs: Vec<u64> =
            self.lent.iter().filter(|(_, (to, ..))| *to == peer).map(|(token, _)| *token).collect();
        for token in theirs {
            let (_, buffer, _) = self.lent.remove(&token).unwrap();
            let now = bytes(&buffer);
            self.retired.push((buffer, now));
        }
        *self.lost += 1;
    }
    fn on_done(&mut self, _: PeerId, token: u64) {
        assert_eq!(token, DONE, "no other end of a write is asked for");
        *self.done += 1;
    }
    fn on_key_void(&mut self, _: PeerId, _: &RemoteKey) {
        unreachable!("nor does it register regions");
    }
}

/// `per_node` endpoints on each of `nodes` nodes; endpoint `e` is on node `e % nodes`.
struct World {
    fabric: Fabric,
    per: usize,
    ends: Vec<Node>,
    said: HashMap<(usize, usize), VecDeque<Said>>,
    now: u64,
    token: u64,
}

fn rv(fabric: &Fabric, node: usize) -> Rv {
    Rv::new(fabric.attach(node), Network::Roce, 4096, Box::new(|| true)).unwrap()
}

impl World {
    fn new(nodes: usize, per_node: usize) -> Self {
        Self::with(nodes, per_node, |fabric, node| Box::new(rv(fabric, node)))
    }

    fn with(nodes: usize, per_node: usize, bulk: impl Fn(&Fabric, usize) -> Box<dyn Bulk>) -> Self {
        let fabric = Fabric::new(nodes);
        let count = nodes * per_node;
        let end = |e| Node {
            bulk: bulk(&fabric, e % nodes),
            lent: HashMap::new(),
            retired: Vec::new(),
            sources: Vec::new(),
            to_write: (0..count).map(|_| VecDeque::new()).collect(),
            filled: 0,
            lost: 0,
            done: 0,
        };
        let ends = (0..count).map(end).collect();
        Self { fabric: fabric.clone(), per: nodes, ends, said: HashMap::new(), now: 1, token: 0 }
    }

    fn on<T>(&mut self, at: usize, f: impl FnOnce(&mut dyn Bulk, u64, &mut Told<'_>) -> T) -> T {
        let Node { bulk, lent, retired, filled, lost, done, .. } = &mut self.ends[at];
        f(bulk.as_mut(), self.now, &mut Told { lent, retired, filled, lost, done })
    }

    fn poll(&mut self, at: usize) {
        self.on(at, |bulk, now, told| bulk.poll(now, told));
        while let Some((peer, control)) = self.ends[at].bulk.next_control() {
            let way = (at, peer.index());
            self.said.entry(way).or_default().push_back(Said::Control(control));
        }
        for peer in 0..self.ends.len() {
            self.write(at, peer);
        }
    }

    fn write(&mut self, at: usize, peer: usize) {
        let now = self.now;
        let end = &mut self.ends[at];
        while let Some((key, len, byte)) = end.to_write[peer].front().copied() {
            end.sources.push(OwnedBuffer::from(vec![byte; len]));
            let from = end.sources.last().unwrap().segments();
            let at = Remote { key, offset: 0 };
            match end.bulk.access(PeerId(peer as u32), &from, &at, FILL, now) {
                Ok(access) => {
                    assert_eq!(access, Access::Silent);
                    end.to_write[peer].pop_front();
                }
                Err(_) => {
                    end.sources.pop();
                    return; // retried: queues become empty, and memory may be available again
                }
            }
        }
    }

    fn lend(&mut self, at: usize, peer: usize, len: usize) -> Result<(), SendError> {
        self.token += 1;
        let (token, byte) = (self.token, self.token as u8);
        let buffer = OwnedBuffer::from(vec![!byte; len]);
        let to = PeerId(peer as u32);
        let key = register(&mut self.ends[at], to, &buffer.segments(), token)?;
        self.ends[at].lent.insert(token, (to, buffer, byte));
        self.said.entry((at, peer)).or_default().push_back(Said::Window(key, len, byte));
        Ok(())
    }

    /// One message from `from` to `to` arrives.
    fn hear(&mut self, from: usize, to: usize) {
        let said = self.said.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        let peer = PeerId(from as u32);
        match said {
            Some(Said::Control(control)) => {
                self.on(to, |bulk, now, told| bulk.on_control(peer, &control, now, told));
            }
            Some(Said::Window(key, len, byte)) => {
                self.ends[to].to_write[from].push_back((key, len, byte));
            }
            None => (),
        }
        self.poll(to);
    }

    fn settle(&mut self) {
        for _ in 0..40 {
            self.now += 10_000_000;
            let ways: Vec<_> = self.said.keys().copied().collect();
            for (from, to) in ways {
                for _ in 0..10 {
                    self.hear(from, to);
                }
            }
            for (a, b) in self.fabric.links() {
                while self.fabric.deliver(a, b, false) {}
                self.fabric.heal(a, b);
            }
            (0..self.ends.len()).for_each(|at| self.poll(at));
        }
    }

    fn prepare(&mut self, at: usize, peer: usize) -> Prepared {
        let now = self.now;
        let answer = self.ends[at].bulk.lane(PeerId(peer as u32), now);
        self.poll(at);
        answer
    }

    /// Connects both endpoints, so that they may advertise buffers.
    fn join(&mut self, a: usize, b: usize) {
        assert_eq!(self.prepare(a, b), Prepared::Later);
        self.settle();
        assert_eq!((self.prepare(a, b), self.prepare(b, a)), (Prepared::Ready, Prepared::Ready));
    }

    /// Checks that nothing is owed, kept or registered, and that only advertised memory was written.
    fn assert_clean(&self, what: &str) {
        for (at, end) in self.ends.iter().enumerate() {
            assert!(end.lent.is_empty(), "{what}: {at} waits for {} windows", end.lent.len());
            assert!(!end.bulk.has_work(), "{what}: {at} has work");
            for (buffer, before) in &end.retired {
                assert!(bytes(buffer) == *before, "{what}: written after it was lost");
            }
        }
        assert_eq!(self.fabric.state().in_use(), 0, "{what}");
    }
}

#[test]
fn processes_of_two_nodes_share_their_queue_pairs() {
    let mut world = World::new(2, 4);
    for a in [0, 2, 4, 6] {
        for b in [1, 3, 5, 7] {
            world.prepare(a, b);
        }
    }
    world.settle();
    for round in 0..20 {
        for a in [0, 2, 4, 6] {
            for b in [1, 3, 5, 7] {
                world.lend(a, b, 100 + round).unwrap();
                world.lend(b, a, 5000 + round).unwrap();
            }
        }
        world.settle();
    }
    for end in &world.ends {
        let counts = end.bulk.counts();
        assert_eq!((end.filled, counts.filled, counts.written, counts.broken), (80, 80, 80, 0));
        assert_eq!((counts.connections, counts.made), (4, 4));
    }
    let state = world.fabric.state();
    assert_eq!((state.queue_pairs(0) / 4, state.queue_pairs(1) / 4), (1, 1), "one connection");
    assert_eq!(state.strays, 0, "each would be a line in the kernel's log");
    drop(state);
    world.assert_clean("shared");
    let text = world.ends[0].bulk.registrations().unwrap();
    assert!(text.contains("4 queue pairs to 1 nodes"), "{text}");
}

#[test]
fn a_remote_key_may_come_before_the_last_message_of_the_agreement() {
    let mut world = World::new(2, 2);
    world.join(0, 1); // and so the nodes are connected
    assert_eq!(world.prepare(2, 3), Prepared::Later);
    world.hear(2, 3);
    world.hear(3, 2);
    for _ in 0..10 {
        world.now += 10_000_000;
        for (a, b) in world.fabric.links() {
            while world.fabric.deliver(a, b, false) {}
        }
        world.poll(2);
    }
    assert_eq!(world.prepare(2, 3), Prepared::Ready);
    world.lend(2, 3, 100).unwrap();
    let said = world.said.get_mut(&(2, 3)).unwrap();
    assert_eq!(said.len(), 2, "GO, and the key");
    said.swap(0, 1);
    world.hear(2, 3);
    world.settle();
    assert_eq!(world.ends[2].filled, 1);
    world.assert_clean("overtaken");
}

#[test]
fn nobody_waits_in_a_call_for_a_connection() {
    let mut world = World::new(2, 1);
    world.fabric.state().slow = 6;
    assert_eq!(world.prepare(0, 1), Prepared::Later);
    for _ in 0..3 {
        world.hear(0, 1);
        world.hear(1, 0);
    }
    for _ in 0..3 {
        world.poll(0);
        world.poll(1);
    }
    assert_eq!(world.prepare(0, 1), Prepared::Later, "the module is not asked more often");
    assert!(world.ends[0].bulk.has_work(), "it is looked after");
    world.settle();
    assert_eq!(world.prepare(0, 1), Prepared::Ready);
}

#[test]
fn a_peer_without_a_module_says_so_and_the_next_way_is_taken() {
    let mut world = World::with(2, 1, |fabric, node| {
        if node == 0 {
            Ways::of(Some(Box::new(rv(fabric, 0))), None).unwrap().unwrap()
        } else {
            NoWay::taking(0)
        }
    });
    assert_eq!(world.prepare(0, 1), Prepared::Later);
    let Some(Said::Control(ask)) = world.said.get_mut(&(0, 1)).unwrap().pop_front() else {
        panic!()
    };
    // The answer of an endpoint with other bulk paths.
    let mut other = Ways::of(None, Some(NoWay::taking(0))).unwrap().unwrap();
    let mut told = Told {
        lent: &mut HashMap::new(),
        retired: &mut Vec::new(),
        filled: &mut 0,
        lost: &mut 0,
        done: &mut 0,
    };
    other.on_control(PeerId(0), &ask, 1, &mut told);
    let (_, refusal) = other.next_control().unwrap();
    world.on(0, |bulk, now, told| bulk.on_control(PeerId(1), &refusal, now, told));
    assert_eq!(world.prepare(0, 1), Prepared::No);
    world.now += PAUSE_NS;
    assert_eq!(world.prepare(0, 1), Prepared::Later, "it may have one later");
}

#[test]
fn a_port_that_is_down_for_a_while_costs_no_connection() {
    let home = Arc::new(AtomicBool::new(true));
    let mut world = World::with(2, 1, |fabric, node| {
        let home = home.clone();
        let at_home = Box::new(move || home.load(Ordering::Relaxed));
        Box::new(Rv::new(fabric.attach(node), Network::Roce, 4096, at_home).unwrap())
    });
    let goes = |world: &mut World, to: bool| {
        home.store(to, Ordering::Relaxed);
        (0..2).for_each(|at| world.on(at, |bulk, now, told| bulk.renew(0, now, told)));
    };
    world.join(0, 1);
    world.lend(0, 1, 9000).unwrap();
    goes(&mut world, false);
    assert_eq!(world.prepare(0, 1), Prepared::No, "nothing begins");
    assert!(!world.ends[0].bulk.is_ready(PeerId(1)));
    world.settle();
    assert_eq!((world.ends[0].filled, world.ends[0].lost), (1, 0), "what was under way arrives");
    goes(&mut world, true);
    assert_eq!(world.prepare(0, 1), Prepared::Ready);
    world.lend(0, 1, 9000).unwrap();
    world.settle();
    assert_eq!((world.ends[0].filled, world.ends[0].bulk.counts().made), (2, 1), "the same one");
    world.assert_clean("home again");
}

#[test]
fn a_storm_of_refusals_delays_and_loses_nothing() {
    let mut world = World::new(2, 1);
    world.join(0, 1);
    for (errno, times) in [(libc::EAGAIN, 500), (libc::ENOMEM, 100), (libc::EINTR, 3)] {
        world.fabric.fail(1, POST, errno, times);
        for _ in 0..5 {
            world.lend(0, 1, 3000).unwrap();
        }
        for _ in 0..30 {
            world.settle();
        }
    }
    assert_eq!((world.ends[0].filled, world.ends[0].lost, world.ends[1].lost), (15, 0, 0));
    world.assert_clean("storm");
}

#[test]
fn a_connection_that_is_made_again_voids_what_was_lent() {
    let mut world = World::new(2, 2);
    world.join(0, 1);
    world.join(2, 3);
    world.lend(0, 1, 4000).unwrap();
    world.hear(0, 1); // it is posted
    // The bytes have arrived, and the event that reports them is lost with the queue pair.
    assert!(world.fabric.deliver(0, 1, true));
    world.fabric.heal(0, 1);
    world.settle();
    assert_eq!((world.ends[0].filled, world.ends[0].lost, world.ends[1].lost), (0, 1, 1));
    assert_eq!((world.ends[2].lost, world.ends[3].lost), (0, 0), "they had lent nothing");
    world.now += PAUSE_NS;
    world.prepare(0, 1);
    world.settle();
    world.lend(0, 1, 4000).unwrap();
    world.settle();
    assert_eq!(world.ends[0].filled, 1);
    world.assert_clean("again");
}

#[test]
fn a_connection_that_died_is_told_to_all_and_not_tried_at_once() {
    let mut world = World::new(3, 1);
    world.join(0, 1);
    world.join(0, 2);
    world.lend(0, 1, 4000).unwrap();
    world.lend(1, 0, 4000).unwrap();
    world.lend(0, 2, 4000).unwrap();
    world.fabric.cut(0, 1, true);
    world.settle();
    assert_eq!((world.ends[0].lost, world.ends[1].lost, world.ends[2].lost), (1, 1, 0));
    assert_eq!(world.ends[0].filled, 1, "the other node goes on");
    assert_ne!(world.prepare(0, 1), Prepared::Ready);
    assert_eq!(world.prepare(0, 2), Prepared::Ready);
    world.now += PAUSE_MAX_NS;
    world.prepare(0, 1);
    world.settle();
    assert_ne!(world.prepare(0, 1), Prepared::Ready, "the module makes no other");
    world.settle();
    world.assert_clean("dead");
}

#[test]
fn lost_events_and_a_lost_device_lose_no_window() {
    for device in [false, true] {
        let mut world = World::new(2, 1);
        world.join(0, 1);
        for _ in 0..4 {
            world.lend(0, 1, 4000).unwrap();
        }
        world.hear(0, 1);
        world.hear(0, 1);
        if device {
            world.fabric.remove(0)
        } else {
            world.fabric.overflow(0, 2)
        }
        world.settle();
        assert_eq!((world.ends[0].lost, world.ends[1].lost), (1, 1), "{device}");
        world.now += PAUSE_MAX_NS;
        let again = world.prepare(0, 1);
        assert_eq!(again, if device { Prepared::No } else { Prepared::Later });
        if !device {
            world.settle();
            world.lend(0, 1, 70).unwrap();
            world.settle();
        }
        world.assert_clean("events");
    }
}

#[test]
fn registrations_give_way_and_are_refused_in_the_end() {
    let mut world = World::new(2, 1);
    world.join(0, 1);
    world.fabric.set_registrations_max(0, 3);
    for n in 0..20 {
        world.lend(0, 1, 5000 + n).unwrap();
        world.settle();
    }
    assert_eq!(world.ends[0].filled, 20);
    world.fabric.fail(0, REG, libc::EFAULT, 1);
    assert_eq!(world.lend(0, 1, 10), Err(UNREGISTERED));
    world.fabric.set_registrations_max(0, 0);
    assert_eq!(world.lend(0, 1, 1 << 16), Err(UNREGISTERED));
    assert_eq!(world.ends[0].bulk.counts().unregistered, 2);
    world.assert_clean("registrations");
}

#[test]
fn windows_on_one_page_end_together() {
    let mut world = World::new(3, 1);
    world.join(0, 1);
    world.join(0, 2);
    // The second buffer is on the pages of the first, so that the module registers both as one.
    let memory = OwnedBuffer::from(vec![0; 40_000]);
    let all = memory.segments();
    let first = register(&mut world.ends[0], PeerId(1), &all, 7).unwrap();
    let second = register(&mut world.ends[0], PeerId(2), &all.slice(8192, 100), 8).unwrap();
    let [first, second] = [first, second].map(|key| Key::decode(&key).unwrap().key);
    assert_eq!(first, second);
    world.on(0, |bulk, now, told| bulk.forget(PeerId(1), now, told));
    assert_eq!(world.fabric.state().in_use(), 0, "neither can be written");
    world.settle();
    assert_eq!((world.ends[0].lost, world.ends[2].lost), (1, 1), "and the other peer knows");
}

#[test]
fn bytes_that_do_not_lie_together_are_copied() {
    let mut world = World::new(2, 1);
    world.join(0, 1);
    let to = OwnedBuffer::from(vec![0u8; 30]);
    let key = register(&mut world.ends[0], PeerId(1), &to.segments(), 1).unwrap();
    world.ends[0].lent.insert(1, (PeerId(1), to, 9));
    let parts = [vec![9u8; 10], vec![9u8; 20]];
    let ranges: Vec<_> = parts.iter().map(|part| (part.as_ptr(), part.len())).collect();
    #[allow(unsafe_code)]
    // SAFETY: the parts outlive the test's write.
    let payload = unsafe { SegmentList::gather(&ranges) }.unwrap();
    let at = Remote { key, offset: 0 };
    world.ends[1].bulk.access(PeerId(0), &payload, &at, FILL, 1).unwrap();
    world.settle();
    assert_eq!(world.ends[0].filled, 1);
    world.assert_clean("copied");
}

/// The peer does not know yet that events were lost, and counts what is written.
#[test]
fn a_copy_stays_until_the_kernel_has_read_it_although_events_were_lost() {
    let mut world = World::new(2, 1);
    world.join(0, 1);
    let mut lend = |token: u64| {
        let to = OwnedBuffer::from(vec![0u8; 9000]);
        let key = register(&mut world.ends[0], PeerId(1), &to.segments(), token).unwrap();
        world.ends[0].lent.insert(token, (PeerId(1), to, 9));
        Remote { key, offset: 0 }
    };
    let (first, second) = (lend(1), lend(2));
    let whole = OwnedBuffer::from(vec![9u8; 9000]);
    let parts = [vec![9u8; 4000], vec![9u8; 5000]];
    let ranges: Vec<_> = parts.iter().map(|part| (part.as_ptr(), part.len())).collect();
    #[allow(unsafe_code)]
    // SAFETY: the parts outlive the test's write.
    let apart = unsafe { SegmentList::gather(&ranges) }.unwrap();
    for (payload, at) in [(whole.segments(), first), (apart, second)] {
        world.ends[1].bulk.access(PeerId(0), &payload, &at, FILL, 1).unwrap();
    }
    world.fabric.overflow(1, 1);
    assert!(world.fabric.deliver(0, 1, false), "its event is lost");
    world.poll(1);
    assert_eq!(world.ends[1].lost, 1);
    let others: Vec<Vec<u8>> = (0..64).map(|_| vec![7; 9000]).collect();
    assert!(world.fabric.deliver(0, 1, false));
    world.poll(0);
    assert_eq!(world.ends[0].filled, 2, "with the right bytes");
    drop(others);
    world.settle();
    world.assert_clean("a copy");
}

#[test]
fn the_end_of_a_write_is_reported_to_those_that_ask() {
    for asks in [false, true] {
        let mut world = World::new(2, 1);
        world.join(0, 1);
        let (to, payload) = (OwnedBuffer::from(vec![0u8; 30]), OwnedBuffer::from(vec![9u8; 30]));
        let key = register(&mut world.ends[0], PeerId(1), &to.segments(), 1).unwrap();
        world.ends[0].lent.insert(1, (PeerId(1), to, 9));
        let (from, at) = (payload.segments(), Remote { key, offset: 0 });
        let begun = world.ends[1].bulk.access(PeerId(0), &from, &at, fill(asks), 1).unwrap();
        assert_eq!(begun, if asks { Access::Unsure } else { Access::Silent });
        assert_eq!(world.ends[1].done, 0);
        world.settle();
        assert_eq!((world.ends[0].filled, world.ends[1].done), (1, u64::from(asks)));
        let void = Key { connection: Way::Rv.numbered(77), ..Key::decode(&key).unwrap() }.encode();
        let at = Remote { key: void, offset: 0 };
        let begun = world.ends[1].bulk.access(PeerId(0), &from, &at, fill(asks), 1).unwrap();
        assert_eq!(begun, Access::Silent, "nothing has begun");
    }
}

#[test]
fn hostile_controls_change_nothing() {
    let mut world = World::new(2, 1);
    world.join(0, 1);
    let id = Way::Rv.numbered(77);
    let end = End {
        number: 1 << 9,
        psn: 0,
        mtu: 0,
        network: Network::Roce,
        lid: 0,
        gid: gid(1),
        serves: 0,
    };
    for message in [
        Message::Ready(id, end),
        Message::Go(id),
        Message::Refuse(id),
        Message::Over { connection: id, broken: true },
    ] {
        for peer in [1, 9] {
            world.on(0, |bulk, now, told| {
                bulk.on_control(PeerId(peer), &message.encode(Way::Rv), now, told);
                bulk.on_control(PeerId(peer), &message.encode(Way::Rc), now, told);
                bulk.on_control(PeerId(peer), &message.encode(Way::Rv)[..20], now, told);
            });
        }
    }
    assert_eq!(world.prepare(0, 1), Prepared::Ready);
    // An index out of range, this node itself, and another network cannot be reached.
    let wrong = [
        end,
        End { number: 0, gid: gid(0), ..end },
        End { number: 0, network: Network::InfiniBand { pkey: 0xffff, routed: false }, ..end },
    ];
    for end in wrong {
        let ask = Message::Ask(id, end).encode(Way::Rv);
        world.on(0, |bulk, now, told| bulk.on_control(PeerId(9), &ask, now, told));
        let refused = world.ends[0].bulk.next_control().unwrap();
        assert_eq!(refused, (PeerId(9), Message::Refuse(id).encode(Way::Rv)));
    }
}

#[test]
fn a_path_within_a_partition_has_its_key() {
    let fabric = Fabric::new(2);
    let network = Network::InfiniBand { pkey: 0x8012, routed: false };
    let (module, ring) = fabric.attach(0);
    let rv = Rv::new((module.clone(), ring), network, 4096, Box::new(|| true)).unwrap();
    let limited = Network::InfiniBand { pkey: 0x12, routed: false };
    let (there, other) = (fabric.attach(1).0, module.here().clone());
    let end =
        End { number: 0, psn: 0, mtu: 4096, network: limited, lid: 7, gid: gid(1), serves: 0 };
    let node = rv.node_of(&module, &end).unwrap();
    let connection = module.create(&node).unwrap();
    there.create(&There { gid: other.gid, ..node }).unwrap();
    module.connect(connection.handle, &node).unwrap();
    assert_eq!(fabric.state().partitions, [0x8012]);
}

#[test]
fn a_sleeper_is_woken_by_the_clock_while_something_is_due() {
    use crate::sys::event::wait_readable;
    let mut world = World::new(2, 1);
    assert!(world.ends[0].bulk.sleep());
    assert_eq!(wait_readable(world.ends[0].bulk.fd(), 0), Ok(false), "nothing is due");
    world.join(0, 1);
    world.lend(0, 1, 100).unwrap();
    for _ in 0..3 {
        assert!(world.ends[0].bulk.sleep());
        assert_eq!(wait_readable(world.ends[0].bulk.fd(), 5000), Ok(true));
        world.poll(0);
    }
    // Another thread polls meanwhile: before the time is over, or afterwards.
    for pause_ms in [0, 10] {
        assert!(world.ends[0].bulk.sleep());
        std::thread::sleep(std::time::Duration::from_millis(pause_ms));
        world.poll(0);
        assert!(world.ends[0].bulk.rearm());
        assert_eq!(wait_readable(world.ends[0].bulk.fd(), 20_000), Ok(true));
    }
    world.hear(0, 1);
    assert!(world.fabric.deliver(0, 1, false));
    assert!(!world.ends[0].bulk.sleep(), "an event is there");
    world.settle();
    world.assert_clean("sleep");
}

/// A random run from `seed`. Returns the remote buffers filled, and the reported losses.
fn run(seed: u64) -> (u64, u64) {
    let mut rng = Rng::new(seed);
    let nodes = 2 + rng.below(2) as usize;
    let mut world = World::new(nodes, 1 + rng.below(2) as usize);
    let count = world.ends.len();
    for _ in 0..500 {
        world.now += rng.below(3_000_000);
        let at = rng.below(count as u64) as usize;
        let peer = (at + 1 + rng.below(count as u64 - 1) as usize) % count;
        let links = world.fabric.links();
        let link = (!links.is_empty()).then(|| links[rng.below(links.len() as u64) as usize]);
        match (rng.below(16), link) {
            (0..3, _) if world.prepare(at, peer) == Prepared::Ready => {
                let _ = world.lend(at, peer, 1 + rng.below(9000) as usize);
            }
            (3..6, _) => world.hear(at, peer),
            (6..9, Some((a, b))) => drop(world.fabric.deliver(a, b, rng.below(60) == 0)),
            (9..12, _) => world.poll(at),
            (12, Some((a, b))) if rng.below(8) == 0 => world.fabric.cut(a, b, rng.below(20) == 0),
            (13, Some((a, b))) => world.fabric.heal(a, b),
            (14, _) if rng.below(4) == 0 => {
                let errnos = [
                    libc::EAGAIN,
                    libc::ENOMEM,
                    libc::EINVAL,
                    libc::EIO,
                    libc::EFAULT,
                    libc::EINTR,
                ];
                let errno = errnos[rng.below(6) as usize];
                let request = if rng.below(2) == 0 { POST } else { REG };
                world.fabric.fail(at % world.per, request, errno, 1 + rng.below(4) as usize);
            }
            (15, _) if rng.below(60) == 0 => world.fabric.overflow(at % world.per, 1),
            (15, _) if rng.below(100) == 0 => world.fabric.remove(at % world.per),
            _ => (),
        }
    }
    world.settle();
    world.now += PAUSE_MAX_NS;
    world.settle();
    world.assert_clean(&format!("seed {seed}"));
    let sum = |f: fn(&Node) -> u64| world.ends.iter().map(f).sum();
    (sum(|end| end.filled), sum(|end| end.lost))
}

#[test]
fn every_window_is_filled_or_lost_whatever_happens() {
    let seeds = std::env::var("UDRV_TEST_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let (mut filled, mut lost) = (0, 0);
    for seed in 0..seeds {
        let (f, l) = run(seed);
        filled += f;
        lost += l;
    }
    assert!(filled > seeds * 3 && lost > seeds / 2, "{filled} filled, {lost} lost");
}
