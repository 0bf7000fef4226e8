//! The bulk path of several endpoints over a simulated network of queue pairs. A seed determines which endpoints may
//! connect, what fails when, and in which order messages and events come.

use super::link::{Kept, Local, PLENTY, TOGETHER, TOGETHER_LEN};
use super::*;
use crate::memory::OwnedBuffer;
use crate::sys::cuda::Flush;
use crate::sys::event::Doorbell;
use crate::transport::loopback::Loopback;
use crate::transport::net::agreement::pause::PAUSE_MAX_NS;
use crate::transport::net::network::Network;
use crate::transport::net::reliable::sim::rng::Rng;
use crate::transport::{Put, STAGED_MAX};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The network's state of a queue pair.
#[derive(Debug, Default)]
struct Wire {
    node: usize,
    /// The queue pair that it is connected to.
    to: Option<u32>,
    /// Requests that are not complete, and how often requests were posted.
    requests: VecDeque<Request>,
    posts: u32,
    failed: bool,
}

#[derive(Debug)]
enum Request {
    Write(SegmentList, Key),
    Reach { local: SegmentList, addr: u64, key: u32, reads: bool },
}

#[derive(Debug, Default)]
struct Fabric {
    pairs: HashMap<u32, Wire>,
    /// By remote key: the owner, and the registered memory.
    regions: HashMap<u32, (usize, SegmentList)>,
    events: Vec<VecDeque<Event>>,
    next: u32,
    /// Requests for which a queue pair has room.
    depth: usize,
    /// Queue pairs of one device.
    most: usize,
    /// Registrations fail.
    refuses: bool,
    /// The devices of these nodes fail.
    dead: Vec<usize>,
    /// By key, memory open to direct RMA, and whether its mapping is unchanged.
    exposed: HashMap<u32, bool>,
    changes: u64,
    /// Why no memory can be opened to direct RMA.
    unwatched: Option<i32>,
    /// GET rendezvous is on.
    offers: bool,
    /// A request has one segment.
    few: bool,
    /// Devices have to ask the network for ports, and it has not answered yet.
    unknown: bool,
    /// How often a thread has begun to find out, and has.
    finding: (usize, usize),
    /// The network carries a write for as long as its target exists: just before that ends, all of them arrive.
    prompt: bool,
    /// How often it was asked whether a region has to be flushed.
    looked_at: usize,
}

impl Fabric {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The oldest write on queue pair `number` arrives.
    fn deliver(&mut self, number: u32) {
        let Some(wire) = self.pairs.get_mut(&number) else { return };
        let Some(to) = wire.to.filter(|_| !wire.failed) else { return };
        let Some(request) = wire.requests.pop_front() else { return };
        let node = wire.node;
        let alive = self.pairs.get(&to).filter(|far| far.to == Some(number) && !far.failed);
        let Some(far) = alive.map(|far| far.node) else {
            return self.fail(number, 12);
        };
        let (from, buffer) = match request {
            Request::Write(from, buffer) => (from, buffer),
            Request::Reach { local, addr, key, reads } => {
                // A key need not be valid.
                let known = self.regions.get(&key).filter(|_| self.exposed.contains_key(&key));
                let Some((_, region)) = known.filter(|(owner, _)| *owner == far) else {
                    return self.fail(number, 10);
                };
                let at = (addr - region.first_addr()) as usize;
                if reads {
                    assert_eq!(
                        region.slice(at, local.len()).copy_to(0, &local, 0, local.len()),
                        local.len()
                    );
                } else {
                    assert_eq!(local.copy_to(0, region, at, local.len()), local.len());
                }
                return self.events[node].push_back(Event::Written { qp: number });
            }
        };
        // The queue pair exists, so the region must too, or memory with another owner would be written.
        let (owner, region) =
            self.regions.get(&buffer.key).expect("a window that is not lent is written");
        assert_eq!(*owner, far, "a key is of one protection domain");
        let offset = (buffer.addr - region.first_addr()) as usize;
        assert_eq!(from.copy_to(0, region, offset, from.len()), from.len());
        let len = from.len() as u32;
        self.events[far].push_back(Event::Filled { qp: to, immediate: buffer.slot, len });
        self.events[node].push_back(Event::Written { qp: number });
    }

    /// Queue pair `number` takes no writes from here on.
    fn close(&mut self, number: u32) {
        let to_it = |(_, wire): &(&u32, &Wire)| wire.to == Some(number);
        let writers = self.pairs.iter().filter(to_it);
        let writers: Vec<_> = writers.map(|(from, wire)| (*from, wire.requests.len())).collect();
        for (from, count) in writers {
            for _ in 0..if self.prompt { count } else { 0 } {
                self.deliver(from);
            }
        }
    }

    fn fail(&mut self, number: u32, status: u32) {
        let Some(wire) = self.pairs.get_mut(&number).filter(|wire| !wire.failed) else { return };
        wire.failed = true;
        self.events[wire.node].push_back(Event::Failed { qp: number, status });
    }
}

type Shared = Arc<Mutex<Fabric>>;

/// The token of puts that fill remote buffers.
const FILLING: u64 = u64::MAX;
const FILL: Put =
    Put { notify: true, delivered: false, stays: false, reports: false, token: FILLING };

#[derive(Debug)]
struct FakeRegion {
    fabric: Shared,
    key: u32,
}

impl Region for FakeRegion {
    fn lkey(&self) -> u32 {
        self.key
    }
    fn rkey(&self) -> u32 {
        self.key
    }
    fn flush(&self) -> Option<Flush> {
        self.fabric.lock().unwrap().looked_at += 1;
        None
    }
}

impl Drop for FakeRegion {
    fn drop(&mut self) {
        let mut fabric = self.fabric.lock().unwrap();
        fabric.regions.remove(&self.key);
        fabric.exposed.remove(&self.key);
    }
}

#[derive(Debug)]
struct FakeQp {
    fabric: Shared,
    number: u32,
    kept: VecDeque<Kept<FakeRegion>>,
    /// Not posted yet.
    waiting: VecDeque<Request>,
}

impl FakeQp {
    fn add(&mut self, request: Request, kept: Kept<FakeRegion>) -> Result<(), Errno> {
        assert!(self.room() > 0);
        self.waiting.push_back(request);
        self.kept.push_back(kept);
        Ok(())
    }
}

impl QueuePair<FakeRegion> for FakeQp {
    fn number(&self) -> u32 {
        self.number
    }
    fn connect(&mut self, to: &End, _: u32) -> Result<(), Errno> {
        self.fabric.lock().unwrap().pairs.get_mut(&self.number).unwrap().to = Some(to.number);
        Ok(())
    }
    fn room(&self) -> usize {
        self.fabric.lock().unwrap().depth - self.kept.len()
    }
    fn write(&mut self, from: Local<'_, FakeRegion>, to: &Key) -> Result<(), Errno> {
        if self.fabric.lock().unwrap().few && from.list.ranges().1 > 1 {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        self.add(Request::Write(*from.list, *to), from.kept)
    }
    fn reach(
        &mut self,
        local: Local<'_, FakeRegion>,
        (addr, key): (u64, u32),
        reads: bool,
    ) -> Result<(), Errno> {
        let request = Request::Reach { local: *local.list, addr, key, reads };
        self.add(request, local.kept)
    }
    fn waiting(&self) -> usize {
        self.waiting.len()
    }
    fn post(&mut self) -> Result<(), Errno> {
        let mut fabric = self.fabric.lock().unwrap();
        let wire = fabric.pairs.get_mut(&self.number).unwrap();
        wire.posts += u32::from(!self.waiting.is_empty());
        wire.requests.append(&mut self.waiting);
        Ok(())
    }
    fn on_written(&mut self) {
        self.kept.pop_front().unwrap();
    }
    fn stop(&mut self) {
        let mut fabric = self.fabric.lock().unwrap();
        fabric.close(self.number);
        fabric.fail(self.number, 5);
    }
}

impl Drop for FakeQp {
    fn drop(&mut self) {
        let mut fabric = self.fabric.lock().unwrap();
        fabric.close(self.number);
        fabric.pairs.remove(&self.number);
    }
}

#[derive(Debug)]
struct FakeDevice {
    fabric: Shared,
    node: usize,
    bell: Doorbell,
}

impl Device for FakeDevice {
    type Region = FakeRegion;
    type Qp = FakeQp;
    fn connection(&mut self) -> Result<FakeQp, Errno> {
        let mut fabric = self.fabric.lock().unwrap();
        if fabric.pairs.values().filter(|wire| wire.node == self.node).count() >= fabric.most {
            return Err(Errno(libc::ENOMEM));
        }
        let number = fabric.number();
        fabric.pairs.insert(number, Wire { node: self.node, ..Wire::default() });
        let (kept, waiting) = (VecDeque::new(), VecDeque::new());
        Ok(FakeQp { fabric: self.fabric.clone(), number, kept, waiting })
    }
    fn end(&self, qp: &FakeQp, psn: u32) -> End {
        End {
            number: qp.number,
            psn,
            mtu: 4096,
            network: Network::Roce,
            lid: 0,
            gid: [0; 16],
            serves: 0,
        }
    }
    fn reaches(&self, end: &End) -> bool {
        end.network == Network::Roce
    }
    fn probes(&self) -> Option<Probes> {
        let fabric = self.fabric.clone();
        let answer = move |_: &End| {
            fabric.lock().unwrap().finding.0 += 1;
            let end = Instant::now() + crate::patience::seconds(10);
            while fabric.lock().unwrap().unknown && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            fabric.lock().unwrap().finding.1 += 1;
            true
        };
        self.fabric.lock().unwrap().unknown.then(|| Probes::start(answer).unwrap())
    }
    fn register(&self, part: &SegmentList, _: bool) -> Result<FakeRegion, Errno> {
        let mut fabric = self.fabric.lock().unwrap();
        if fabric.refuses {
            return Err(Errno(libc::ENOMEM));
        }
        let key = fabric.number();
        fabric.regions.insert(key, (self.node, *part));
        Ok(FakeRegion { fabric: self.fabric.clone(), key })
    }
    fn offers(&self, near: bool) -> bool {
        self.fabric.lock().unwrap().offers && near
    }
    fn offer(&self, part: &SegmentList) -> Result<FakeRegion, Errno> {
        let region = self.register(part, false)?;
        self.fabric.lock().unwrap().exposed.insert(region.key, true);
        Ok(region)
    }
    fn expose(&self, part: &SegmentList, _: (bool, bool)) -> Result<FakeRegion, Errno> {
        if let Some(errno) = self.fabric.lock().unwrap().unwatched {
            return Err(Errno(errno));
        }
        let region = self.register(part, true)?;
        self.fabric.lock().unwrap().exposed.insert(region.key, true);
        Ok(region)
    }
    fn exposes(&self) -> usize {
        150
    }
    fn is_sound(&self, exposed: &FakeRegion) -> bool {
        self.fabric.lock().unwrap().exposed[&exposed.key]
    }
    fn changes(&self) -> u64 {
        self.fabric.lock().unwrap().changes
    }
    fn reads(&self) -> bool {
        true
    }
    fn poll(&mut self, mut each: impl FnMut(Event)) -> Result<usize, Errno> {
        let mut n = 0;
        while n < 4 {
            if self.fabric.lock().unwrap().dead.contains(&self.node) {
                return Err(Errno(libc::EIO));
            }
            let event = self.fabric.lock().unwrap().events[self.node].pop_front();
            let Some(event) = event else { break };
            each(event);
            n += 1;
        }
        Ok(n)
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }
    fn silence(&mut self) {
        self.bell.silence();
    }
    fn sleep(&mut self) -> bool {
        self.fabric.lock().unwrap().events[self.node].is_empty()
    }
    fn rearm(&mut self) -> bool {
        self.sleep()
    }
    fn registrations(&self) -> Option<String> {
        None
    }
}

/// A message from one endpoint to another.
#[derive(Debug)]
enum Said {
    Control(Control),
    /// A remote buffer, and the byte to fill it with.
    Window(RemoteKey, usize, u8),
}

struct Node {
    bulk: Rc<FakeDevice>,
    /// Remote buffers by token: the peer, the memory, and the expected contents.
    lent: HashMap<u64, (PeerId, OwnedBuffer, u8)>,
    /// Memory that writes read from: kept during the whole test.
    sources: Vec<OwnedBuffer>,
    /// Remote buffers to write, in order.
    to_write: Vec<VecDeque<(RemoteKey, usize, u8)>>,
    filled: u64,
    /// This endpoint's own writes into remote buffers that are complete.
    seen: u64,
    lost: u64,
    /// Tokens of other completed accesses, and keys that the device invalidated.
    reached: Vec<u64>,
    void: Vec<RemoteKey>,
}

struct Told<'a> {
    reached: &'a mut Vec<u64>,
    void: &'a mut Vec<RemoteKey>,
    lent: &'a mut HashMap<u64, (PeerId, OwnedBuffer, u8)>,
    filled: &'a mut u64,
    seen: &'a mut u64,
    lost: &'a mut u64,
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
        // The memory is given back: a later write would find no region.
        self.lent.retain(|_, (to, ..)| *to != peer);
        *self.lost += 1;
    }
    fn on_done(&mut self, _: PeerId, token: u64) {
        match token {
            FILLING => *self.seen += 1,
            _ => self.reached.push(token),
        }
    }
    fn on_key_void(&mut self, _: PeerId, key: &RemoteKey) {
        self.void.push(*key);
    }
}

struct World {
    fabric: Shared,
    nodes: Vec<Node>,
    /// Messages in flight, in order, by sender and receiver.
    said: HashMap<(usize, usize), VecDeque<Said>>,
    now: u64,
    token: u64,
}

impl World {
    fn new(count: usize, limit: usize) -> Self {
        let events = (0..count).map(|_| VecDeque::new()).collect();
        let fabric =
            Arc::new(Mutex::new(Fabric { events, depth: 3, most: 99, ..Fabric::default() }));
        let node = |node| {
            let fabric = fabric.clone();
            let open = move || {
                if fabric.lock().unwrap().dead.contains(&node) {
                    return Err(Errno(libc::ENODEV));
                }
                Ok(FakeDevice { fabric: fabric.clone(), node, bell: Doorbell::new()? })
            };
            Node {
                bulk: Rc::new(Box::new(open), limit, STUCK_NS).unwrap(),
                lent: HashMap::new(),
                sources: Vec::new(),
                to_write: (0..count).map(|_| VecDeque::new()).collect(),
                filled: 0,
                seen: 0,
                lost: 0,
                reached: Vec::new(),
                void: Vec::new(),
            }
        };
        let nodes = (0..count).map(node).collect();
        Self { fabric: fabric.clone(), nodes, said: HashMap::new(), now: 1, token: 0 }
    }

    fn with<T>(
        &mut self,
        at: usize,
        f: impl FnOnce(&mut Rc<FakeDevice>, u64, &mut Told<'_>) -> T,
    ) -> T {
        let Node { bulk, lent, filled, seen, lost, reached, void, .. } = &mut self.nodes[at];
        f(bulk, self.now, &mut Told { reached, void, lent, filled, seen, lost })
    }

    fn poll(&mut self, at: usize) {
        self.with(at, |bulk, now, told| bulk.poll(now, told));
        while let Some((peer, control)) = self.nodes[at].bulk.next_control() {
            let way = (at, peer.index());
            self.said.entry(way).or_default().push_back(Said::Control(control));
        }
        for peer in 0..self.nodes.len() {
            self.write(at, peer);
        }
    }

    /// Writes to the remote buffers that `peer` has advertised to `at`.
    fn write(&mut self, at: usize, peer: usize) {
        let now = self.now;
        let node = &mut self.nodes[at];
        while let Some((key, len, byte)) = node.to_write[peer].front().copied() {
            node.sources.push(OwnedBuffer::from(vec![byte; len]));
            let from = node.sources.last().unwrap().segments();
            let (at, how) = (Remote { key, offset: 0 }, What::Put(FILL));
            match node.bulk.access(PeerId(peer as u32), &from, &at, how, now) {
                Ok(_) => drop(node.to_write[peer].pop_front()),
                Err(SendError::Again) => return,
                Err(SendError::Unreachable(_)) => return, // retried: memory may be available again
            }
        }
    }

    fn lend(&mut self, at: usize, peer: usize, len: usize) -> Result<(), SendError> {
        self.token += 1;
        let (token, byte) = (self.token, self.token as u8);
        let buffer = OwnedBuffer::from(vec![!byte; len]);
        let to = PeerId(peer as u32);
        let purpose = Purpose::Receive { token };
        let now = self.now;
        let key = match self.nodes[at].bulk.register(to, &buffer.segments(), purpose, false, now) {
            Registered::Yes(registered) => registered.key,
            Registered::Later => return Err(SendError::Again),
            Registered::No => return Err(STALE),
            Registered::Never => return Err(UNREGISTERED),
        };
        self.nodes[at].lent.insert(token, (to, buffer, byte));
        self.said.entry((at, peer)).or_default().push_back(Said::Window(key, len, byte));
        Ok(())
    }

    /// One message from `from` to `to` arrives.
    fn hear(&mut self, from: usize, to: usize) {
        let said = self.said.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        let peer = PeerId(from as u32);
        match said {
            Some(Said::Control(control)) => {
                self.with(to, |bulk, now, told| bulk.on_control(peer, &control, now, told));
            }
            Some(Said::Window(key, len, byte)) => {
                self.nodes[to].to_write[from].push_back((key, len, byte));
            }
            None => (),
        }
        self.poll(to);
    }

    /// Everything in flight arrives.
    fn settle(&mut self) {
        for _ in 0..50 {
            self.now += 1000;
            let ways: Vec<_> = self.said.keys().copied().collect();
            for (from, to) in ways {
                for _ in 0..10 {
                    self.hear(from, to);
                }
            }
            let numbers: Vec<u32> = self.fabric.lock().unwrap().pairs.keys().copied().collect();
            for number in numbers {
                for _ in 0..4 {
                    self.fabric.lock().unwrap().deliver(number);
                }
            }
            (0..self.nodes.len()).for_each(|at| self.poll(at));
        }
    }

    fn prepare(&mut self, at: usize, peer: usize) -> Prepared {
        let now = self.now;
        let answer = self.nodes[at].bulk.lane(PeerId(peer as u32), now);
        self.poll(at);
        answer
    }
}

#[test]
fn a_connection_is_made_at_first_need_and_serves_both_sides() {
    let mut world = World::new(2, 4);
    assert_eq!(world.prepare(0, 1), Prepared::Later);
    assert_eq!(world.lend(0, 1, 100), Err(STALE));
    world.settle();
    assert_eq!((world.prepare(0, 1), world.prepare(1, 0)), (Prepared::Ready, Prepared::Ready));
    for n in 0..10 {
        world.lend(0, 1, 100 + n).unwrap();
        world.lend(1, 0, 100 + n).unwrap();
    }
    world.settle();
    let counts = world.nodes[0].bulk.counts();
    assert_eq!((counts.made, counts.lent, counts.filled, counts.written), (1, 10, 10, 10));
    assert_eq!((world.nodes[0].filled, world.nodes[1].filled), (10, 10));
    assert!(!world.nodes[0].bulk.has_work());
    assert!(world.fabric.lock().unwrap().regions.is_empty(), "nothing stays registered");
}

#[test]
fn a_message_of_more_segments_than_a_request_has_ends_nothing() {
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    world.fabric.lock().unwrap().few = true;
    world.lend(0, 1, 100).unwrap();
    let said = world.said.get_mut(&(0, 1)).and_then(VecDeque::pop_front);
    let Some(Said::Window(key, ..)) = said else { panic!("no remote buffer") };
    let parts = [OwnedBuffer::from(vec![1; 50]), OwnedBuffer::from(vec![2; 50])];
    let ranges = parts.each_ref().map(|part| part.segments().ranges().0[0]);
    let from = Loopback::list(&ranges).unwrap();
    let (to, how, now) = (Remote { key, offset: 0 }, What::Put(FILL), world.now);
    let refused = world.nodes[1].bulk.access(PeerId(0), &from, &to, how, now);
    assert_eq!(refused, Err(UNREGISTERED));
    world.settle();
    assert_eq!((world.nodes[0].lost, world.prepare(1, 0)), (0, Prepared::Ready));
}

/// A world whose devices have to ask for ports, where the first node has asked the second for a connection.
fn asking() -> World {
    let mut world = World::new(2, 4);
    world.fabric.lock().unwrap().unknown = true;
    world.prepare(0, 1);
    world.settle();
    world
}

#[test]
fn a_connection_waits_until_the_port_of_the_peer_is_known() {
    let mut world = asking();
    for node in [1, 0] {
        // A thread may sleep meanwhile, and wakes when the answer comes.
        let readable = |world: &World, wait| {
            crate::sys::event::wait_any([world.nodes[node].bulk.fd()], wait).unwrap()[0]
        };
        let bulk = &mut world.nodes[node].bulk;
        assert!(bulk.has_work() && bulk.sleep() && bulk.rearm());
        assert!(!readable(&world, 0));
        assert_eq!(world.prepare(0, 1), Prepared::Later);
        world.fabric.lock().unwrap().unknown = false;
        assert!(readable(&world, -1));
        world.poll(node);
        assert!(!readable(&world, 0) && !world.nodes[node].bulk.has_work());
        world.fabric.lock().unwrap().unknown = true;
        world.settle();
    }
    assert_eq!((world.prepare(0, 1), world.prepare(1, 0)), (Prepared::Ready, Prepared::Ready));
    world.fabric.lock().unwrap().unknown = false;
}

#[test]
fn what_has_ended_or_departed_waits_for_no_port() {
    for departs in [false, true] {
        let mut world = asking();
        match departs {
            true => world.with(1, |bulk, now, told| bulk.forget(PeerId(0), now, told)),
            false => {
                world.with(0, |bulk, now, told| bulk.leave(PeerId(1), now, told));
                world.poll(0);
                world.settle();
            }
        }
        world.fabric.lock().unwrap().unknown = false;
        while world.nodes[1].bulk.has_work() {
            world.poll(1);
        }
        assert!(world.nodes[1].bulk.connections.get(PeerId(0)).is_none());
    }
}

#[test]
fn a_device_that_ends_refuses_what_waits_for_a_port() {
    let mut world = asking();
    while world.fabric.lock().unwrap().finding == (0, 0) {
        std::thread::sleep(Duration::from_millis(1));
    }
    world.with(1, |bulk, now, told| bulk.renew(0, now, told));
    assert_eq!(world.fabric.lock().unwrap().finding, (1, 0), "it does not wait for the thread");
    world.fabric.lock().unwrap().unknown = false;
    world.poll(1);
    world.settle();
    assert_eq!(world.prepare(0, 1), Prepared::No);
}

#[test]
fn the_side_that_asked_learns_that_the_peer_has_left() {
    let mut world = asking();
    world.with(1, |bulk, now, told| bulk.leave(PeerId(0), now, told));
    world.settle();
    assert!(world.nodes[0].bulk.connections.get(PeerId(1)).is_none());
    assert_eq!(world.prepare(0, 1), Prepared::Later, "it asks again");
    world.fabric.lock().unwrap().unknown = false;
}

#[test]
fn both_ask_at_once_and_one_connection_comes_of_it() {
    let mut world = World::new(2, 4);
    assert_eq!((world.prepare(0, 1), world.prepare(1, 0)), (Prepared::Later, Prepared::Later));
    world.settle();
    assert_eq!((world.prepare(0, 1), world.prepare(1, 0)), (Prepared::Ready, Prepared::Ready));
    assert_eq!(world.fabric.lock().unwrap().pairs.len(), 2);
    world.lend(1, 0, 5).unwrap();
    world.settle();
    assert_eq!(world.nodes[1].filled, 1);
}

#[test]
fn a_window_that_overtakes_go_is_written() {
    let mut world = World::new(2, 4);
    assert_eq!(world.prepare(0, 1), Prepared::Later);
    world.hear(0, 1);
    world.hear(1, 0);
    assert_eq!((world.prepare(0, 1), world.prepare(1, 0)), (Prepared::Ready, Prepared::Later));
    world.lend(0, 1, 100).unwrap();
    world.said.get_mut(&(0, 1)).unwrap().swap(0, 1);
    world.settle();
    let counts = world.nodes[1].bulk.counts();
    assert_eq!((counts.made, counts.written, counts.stale), (1, 1, 0));
    assert_eq!(world.nodes[0].filled, 1);
}

#[test]
fn a_region_that_overtakes_go_is_reached() {
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.hear(0, 1);
    world.hear(1, 0);
    let (region, purpose) =
        (OwnedBuffer::zeroed(100), Purpose::Region { id: 7, reads: true, writes: true });
    let now = world.now;
    let made = world.nodes[0].bulk.register(PeerId(1), &region.segments(), purpose, false, now);
    let at = Remote { key: made.key().unwrap(), offset: 0 };
    let source = OwnedBuffer::from(vec![5; 100]);
    access(&mut world, &at, &source.segments(), What::Put(PUT)).unwrap();
    world.settle();
    assert_eq!((world.nodes[1].bulk.counts().made, bytes(&region)), (1, vec![5; 100]));
}

#[test]
fn peers_that_write_nothing_hold_up_no_other() {
    let mut world = World::new(34, 40);
    assert!((1..34).all(|peer| world.prepare(0, peer) == Prepared::Later));
    world.settle();
    for _ in 0..32 {
        (1..33).for_each(|peer| world.lend(0, peer, 10).unwrap());
    }
    assert_eq!(world.lend(0, 33, 10), Err(SendError::Again));
    for _ in 0..10 {
        world.now += 10_000_000;
        let _ = world.lend(0, 33, 10);
    }
    assert_eq!(world.lend(0, 33, 10), Err(STALE), "its message goes as fragments");
    world.settle();
    world.lend(0, 33, 10).unwrap();
    world.settle();
    assert_eq!(world.nodes[0].filled, 32 * 32 + 1);
}

#[test]
fn the_budget_is_kept_and_the_idle_give_way() {
    let mut world = World::new(6, 2);
    for peer in 1..6 {
        world.prepare(0, peer);
        world.settle();
        world.now += IDLE_NS;
    }
    let counts = world.nodes[0].bulk.counts();
    assert_eq!((counts.connections, counts.made, counts.evicted), (2, 5, 3));
    assert_eq!((world.prepare(0, 4), world.prepare(0, 5)), (Prepared::Ready, Prepared::Ready));
    assert_eq!(world.prepare(1, 0), Prepared::Later, "the side that gave way may ask again");
    world.settle();
    assert_eq!(world.prepare(1, 0), Prepared::Ready);
    // Connections in use are kept.
    let used: Vec<usize> = (1..6)
        .filter(|peer| {
            let known = world.nodes[0].bulk.connections.get(PeerId(*peer as u32)).is_some();
            known && world.lend(0, *peer, 10).is_ok()
        })
        .collect();
    assert_eq!(used.len(), 2);
    world.now += IDLE_NS;
    let other = (1..6).find(|peer| !used.contains(peer)).unwrap();
    assert_eq!(world.prepare(0, other), Prepared::No);
}

#[test]
fn a_device_with_fewer_queue_pairs_than_allowed_serves_all_peers() {
    let mut world = World::new(6, 99);
    world.fabric.lock().unwrap().most = 2;
    for peer in 1..6 {
        assert_eq!(world.prepare(0, peer), Prepared::Later);
        world.settle();
        assert_eq!(world.prepare(0, peer), Prepared::Ready);
        world.now += IDLE_NS;
    }
    let counts = world.nodes[0].bulk.counts();
    assert_eq!((counts.connections, counts.made, counts.evicted), (2, 5, 3));
    assert_eq!(world.prepare(1, 0), Prepared::Later, "and the one that asks");
    world.settle();
    assert_eq!(world.prepare(1, 0), Prepared::Ready);
    assert_eq!(world.prepare(0, 2), Prepared::Later);
    world.settle();
    assert_eq!(world.prepare(0, 3), Prepared::No, "nobody is idle");
}

#[test]
fn a_connection_with_keys_gives_way_last() {
    let mut world = World::new(5, 2);
    let region = OwnedBuffer::zeroed(100);
    expose(&mut world, 0, 1, &region.segments());
    world.now += IDLE_NS;
    world.prepare(0, 2);
    world.settle();
    world.now += IDLE_NS;
    expose(&mut world, 0, 3, &region.segments());
    let known = |world: &World, peer| world.nodes[0].bulk.connections.get(PeerId(peer)).is_some();
    assert!(known(&world, 1) && !known(&world, 2), "1 may read and write, and nothing here tells");
    // A key that was made just now will be used.
    world.now += IDLE_NS;
    assert_eq!(world.prepare(0, 4), Prepared::No);
    world.now += KEYS_IDLE_NS;
    assert_eq!(world.prepare(0, 4), Prepared::No);
    assert!(known(&world, 1), "it is asked");
    assert_eq!(world.prepare(0, 4), Prepared::No);
    world.settle();
    assert_eq!(world.prepare(0, 4), Prepared::Later);
    assert!(!known(&world, 1) && known(&world, 3), "one is asked at a time");
}

/// What it has under way would be lost without its acknowledgement, and done a second time.
#[test]
fn a_peer_that_uses_its_keys_keeps_its_connection() {
    let mut world = World::new(3, 1);
    let (region, source) = (OwnedBuffer::zeroed(100), OwnedBuffer::from(vec![5; 100]));
    let at = expose(&mut world, 0, 1, &region.segments());
    for _ in 0..3 {
        world.now += KEYS_IDLE_NS;
        access(&mut world, &at, &source.segments(), What::Put(PUT)).unwrap();
        assert_eq!(world.prepare(0, 2), Prepared::No);
        world.settle();
        assert_eq!((world.nodes[0].lost, world.nodes[1].lost), (0, 0));
    }
    assert_eq!(world.nodes[1].reached, [1; 3]);
    // It has nothing under way any more. An answer that does not come is asked for again.
    world.now += KEYS_IDLE_NS;
    assert_eq!(world.prepare(0, 2), Prepared::No);
    world.said.clear();
    world.now += KEYS_IDLE_NS;
    assert_eq!(world.prepare(0, 2), Prepared::No);
    world.settle();
    assert_eq!((world.nodes[0].lost, world.nodes[1].lost), (1, 1));
    assert_eq!(world.nodes[1].bulk.counts().evicted, 1);
    assert_eq!(world.prepare(0, 2), Prepared::Later);
}

#[test]
fn a_side_without_room_refuses_and_is_not_asked_again_at_once() {
    let mut world = World::new(3, 1);
    world.prepare(0, 1);
    world.settle();
    world.lend(1, 0, 10).unwrap(); // in use from here on
    assert_eq!(world.prepare(2, 0), Prepared::Later);
    // The remote buffer is not written, because its RTR is not delivered.
    for _ in 0..3 {
        world.hear(2, 0);
        world.hear(0, 2);
    }
    assert_eq!(world.prepare(2, 0), Prepared::No);
    world.settle();
    world.now += PAUSE_NS + IDLE_NS;
    assert_eq!(world.prepare(2, 0), Prepared::Later);
    world.settle();
    assert_eq!(world.prepare(2, 0), Prepared::Ready);
}

#[test]
fn a_departed_peer_has_no_windows_any_more() {
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    world.lend(0, 1, 10).unwrap();
    world.hear(0, 1); // it has posted the write
    world.with(0, |bulk, now, told| bulk.forget(PeerId(1), now, told));
    world.nodes[0].lent.clear();
    world.settle();
    assert_eq!(world.nodes[1].bulk.counts().broken, 1, "it sees the queue pair gone");
    assert!(world.fabric.lock().unwrap().regions.is_empty());
}

/// The peer believes that its write was processed.
#[test]
fn what_was_taken_is_heard_of_before_its_window_ends() {
    for cause in 0..5 {
        let mut world = World::new(2, 4);
        world.prepare(0, 1);
        world.settle();
        world.lend(0, 1, 10).unwrap();
        world.hear(0, 1); // it has posted the write
        let pairs: Vec<(u32, usize)> = {
            let fabric = world.fabric.lock().unwrap();
            fabric.pairs.iter().map(|(number, wire)| (*number, wire.node)).collect()
        };
        let of = |node| pairs.iter().find(|(_, other)| *other == node).unwrap().0;
        world.fabric.lock().unwrap().deliver(of(1));
        assert_eq!(world.nodes[0].filled, 0);
        match cause {
            0 => {
                world.with(1, |bulk, now, told| bulk.leave(PeerId(0), now, told));
                world.poll(1);
                world.hear(1, 0);
            }
            1 => {
                // One of two queues may be polled before the other.
                let failed = Event::Failed { qp: of(0), status: 12 };
                world.fabric.lock().unwrap().events[0].push_front(failed);
                world.poll(0);
            }
            2 => world.with(0, |bulk, now, told| bulk.forget(PeerId(1), now, told)),
            3 => world.with(0, |bulk, now, told| bulk.renew(0, now, told)),
            _ => {
                world.nodes[0].bulk.connections.doom(PeerId(1));
                world.poll(0);
            }
        }
        assert_eq!(world.nodes[0].filled, 1, "{cause}");
        world.poll(1);
        assert_eq!(world.nodes[1].seen, 1, "{cause}: once");
        world.settle();
        assert_eq!(world.nodes[0].filled, 1, "{cause}");
    }
}

/// The same, of a write that arrives while this side ends the connection.
#[test]
fn what_arrives_until_the_end_is_heard_of() {
    for cause in 0..5 {
        let mut world = World::new(3, 4);
        for peer in [1, 2] {
            world.prepare(0, peer);
            world.settle();
            world.lend(0, peer, 10).unwrap();
            world.hear(0, peer); // it has posted the write
        }
        world.fabric.lock().unwrap().prompt = true;
        let owners: Vec<_> = world.nodes[0].bulk.owners.iter().map(|(qp, of)| (*qp, *of)).collect();
        for (qp, peer) in owners {
            match cause {
                0 => world.nodes[0].bulk.connections.doom(peer),
                1 => {
                    let wrong = Event::Filled { qp, immediate: u32::MAX, len: 1 };
                    world.fabric.lock().unwrap().events[0].push_back(wrong);
                }
                2 => world.with(0, |bulk, now, told| bulk.leave(peer, now, told)),
                3 => world.with(0, |bulk, now, told| bulk.forget(peer, now, told)),
                _ => world.with(0, |bulk, now, told| bulk.renew(0, now, told)),
            }
        }
        (0..3).for_each(|at| world.poll(at));
        let seen: u64 = world.nodes.iter().map(|node| node.seen).sum();
        assert_eq!((world.nodes[0].filled, seen), (2, 2), "{cause}");
        assert_eq!(world.nodes[0].bulk.connections.len(), 0, "{cause}");
    }
}

#[test]
fn an_event_that_is_not_wanted_any_more_wakes_once() {
    use crate::sys::event::wait_readable;
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    let Node { bulk, .. } = &mut world.nodes[0];
    bulk.device.as_ref().unwrap().bell.ring();
    assert_eq!(wait_readable(bulk.fd(), 0), Ok(true));
    assert!(bulk.sleep());
    assert_eq!(wait_readable(bulk.fd(), 0), Ok(false));
}

#[test]
fn a_device_that_forgets_a_request_loses_the_connection() {
    const LEN: usize = 1_000_000;
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    world.lend(0, 1, LEN).unwrap();
    world.hear(0, 1);
    let posted = world.now;
    // Nothing arrives, and no error is reported.
    for node in [0, 1] {
        assert!(world.nodes[node].bulk.has_work());
    }
    for (after, broken) in [(STUCK_NS, 0), (STUCK_NS + 900_000_000, 0), (STUCK_NS * 2, 1)] {
        world.now = posted + after;
        world.poll(1);
        assert_eq!(world.nodes[1].bulk.counts().broken, broken, "after {after} ns");
    }
    assert_eq!((world.nodes[1].lost, world.nodes[0].lost), (1, 0));
    world.settle();
    assert_eq!(world.nodes[0].lost, 1, "its peer is told");
    // A slow connection that progresses is kept.
    world.now += 60_000_000_000;
    world.prepare(0, 1);
    world.settle();
    for _ in 0..10 {
        world.lend(0, 1, 1000).unwrap();
        world.hear(0, 1);
    }
    let number = *world.nodes[1].bulk.owners.keys().next().unwrap();
    for _ in 0..10 {
        world.now += STUCK_NS - 1_000_000;
        world.fabric.lock().unwrap().deliver(number);
        world.poll(1);
        world.poll(0);
    }
    assert_eq!((world.nodes[0].filled, world.nodes[1].lost), (10, 1));
    // So is a connection whose request was completed long before the next check.
    world.lend(0, 1, 1000).unwrap();
    world.hear(0, 1);
    world.fabric.lock().unwrap().deliver(number);
    world.now += 100 * STUCK_NS;
    world.poll(1);
    assert_eq!(world.nodes[1].lost, 1);
}

#[test]
fn memory_that_cannot_be_registered_is_refused() {
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    world.fabric.lock().unwrap().refuses = true;
    assert_eq!(world.lend(0, 1, 10), Err(UNREGISTERED));
    world.fabric.lock().unwrap().refuses = false;
    world.lend(0, 1, 10).unwrap();
    world.fabric.lock().unwrap().refuses = true;
    world.settle();
    assert_eq!((world.nodes[0].filled, world.nodes[1].to_write[0].len()), (0, 1));
    let (key, ..) = world.nodes[1].to_write[0].pop_front().unwrap();
    world.nodes[0].bulk.invalidate(PeerId(1), &key);
    world.nodes[0].lent.clear();
    assert!(!world.nodes[0].bulk.has_work());
}

#[test]
fn a_wrong_immediate_or_length_ends_the_connection() {
    for wrong_length in [false, true] {
        let mut world = World::new(2, 4);
        world.prepare(0, 1);
        world.settle();
        world.lend(0, 1, 10).unwrap();
        let said = world.said.get_mut(&(0, 1)).unwrap();
        let Some(Said::Window(key, len, _)) = said.back_mut() else { panic!() };
        if wrong_length {
            *len = 9
        } else {
            let right = Key::decode(key).unwrap();
            *key = Key { slot: right.slot + 1, ..right }.encode();
        }
        world.settle();
        assert_eq!(world.nodes[0].bulk.counts().wrong, 1);
        assert_eq!((world.nodes[0].filled, world.nodes[0].lost, world.nodes[1].lost), (0, 1, 1));
        assert!(world.fabric.lock().unwrap().pairs.is_empty());
    }
}

#[test]
fn a_device_that_fails_is_opened_again_when_it_works() {
    for told in [false, true] {
        let mut world = World::new(2, 4);
        world.prepare(0, 1);
        world.settle();
        world.lend(0, 1, 10).unwrap();
        world.lend(1, 0, 10).unwrap();
        world.fabric.lock().unwrap().dead.push(0);
        world.settle();
        assert!(world.fabric.lock().unwrap().pairs.is_empty());
        assert!(world.nodes.iter().all(|node| node.lost == 1 && node.lent.is_empty()));
        world.now += PAUSE_NS;
        assert_eq!(world.prepare(0, 1), Prepared::No);
        assert_eq!(world.prepare(1, 0), Prepared::Later, "it does not know");
        world.settle();
        assert_eq!(world.prepare(1, 0), Prepared::No, "it was refused");
        world.fabric.lock().unwrap().dead.clear();
        assert_eq!(world.prepare(0, 1), Prepared::No, "not at once");
        if told {
            world.with(0, |bulk, now, told| bulk.renew(0, now, told));
        } else {
            world.now += PAUSE_MAX_NS;
        }
        assert_eq!(world.prepare(0, 1), Prepared::Later);
        world.settle();
        world.lend(0, 1, 10).unwrap();
        world.settle();
        assert_eq!(world.nodes[0].filled, 1);
    }
}

#[test]
fn hostile_controls_change_nothing() {
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    let end = End {
        number: 1,
        psn: 2,
        mtu: 3,
        network: Network::InfiniBand { pkey: 0xffff, routed: false },
        lid: 0,
        gid: [0; 16],
        serves: 0,
    };
    for message in [
        Message::Ready(77, end),
        Message::Go(77),
        Message::Refuse(77),
        Message::Over { connection: 77, broken: true },
    ] {
        world.with(0, |bulk, now, told| {
            bulk.on_control(PeerId(1), &message.encode(Way::Rc), now, told);
            bulk.on_control(PeerId(9), &message.encode(Way::Rc), now, told);
            bulk.on_control(PeerId(1), &message.encode(Way::Rc)[..20], now, told);
        });
    }
    assert_eq!(world.prepare(0, 1), Prepared::Ready);
    // An unknown peer that cannot be reached is refused.
    let ask = Message::Ask(5, end).encode(Way::Rc);
    world.with(0, |bulk, now, told| bulk.on_control(PeerId(9), &ask, now, told));
    let refused = world.nodes[0].bulk.next_control().unwrap();
    assert_eq!(refused, (PeerId(9), Message::Refuse(5).encode(Way::Rc)));
}

/// A random run from `seed`. Returns the remote buffers filled, and the connections that broke.
fn run(seed: u64) -> (u64, u64) {
    let mut rng = Rng::new(seed);
    let count = 2 + rng.below(3) as usize;
    let mut world = World::new(count, 1 + rng.below(3) as usize);
    world.fabric.lock().unwrap().prompt = true;
    for _ in 0..600 {
        world.now += rng.below(2_000_000);
        let at = rng.below(count as u64) as usize;
        let peer = (at + 1 + rng.below(count as u64 - 1) as usize) % count;
        match rng.below(12) {
            0 | 1 if world.prepare(at, peer) == Prepared::Ready => {
                let _ = world.lend(at, peer, 1 + rng.below(50) as usize);
            }
            2..=4 => world.hear(at, peer),
            5..=7 => {
                let pairs = world.fabric.lock().unwrap();
                let mut numbers: Vec<u32> = pairs.pairs.keys().copied().collect();
                drop(pairs);
                numbers.sort_unstable();
                if !numbers.is_empty() {
                    let number = numbers[rng.below(numbers.len() as u64) as usize];
                    let mut fabric = world.fabric.lock().unwrap();
                    if rng.below(40) == 0 { fabric.fail(number, 5) } else { fabric.deliver(number) }
                }
            }
            8..=10 => world.poll(at),
            11 if rng.below(20) == 0 => {
                let refuses = rng.below(2) == 0;
                world.fabric.lock().unwrap().refuses = refuses;
            }
            _ => (),
        }
        for node in &world.nodes {
            assert!(node.bulk.connections.len() <= node.bulk.limit);
        }
    }
    world.fabric.lock().unwrap().refuses = false;
    world.settle();
    world.settle();
    for (at, node) in world.nodes.iter().enumerate() {
        assert!(
            node.lent.is_empty(),
            "seed {seed}: node {at} waits for {} windows",
            node.lent.len()
        );
        assert_eq!(node.bulk.lent.len(), 0, "seed {seed}");
        assert!(!node.bulk.has_work(), "seed {seed}");
    }
    assert!(world.fabric.lock().unwrap().regions.is_empty(), "seed {seed}");
    let sum = |f: fn(&Node) -> u64| world.nodes.iter().map(f).sum::<u64>();
    let (filled, seen) = (sum(|node| node.filled), sum(|node| node.seen));
    assert!(seen <= filled, "seed {seed}: {seen} writes were complete, and {filled} were noted");
    (filled, sum(|node| node.bulk.connections.counts.broken))
}

#[test]
fn every_window_is_filled_or_lost_whatever_happens() {
    let seeds = std::env::var("UDRV_TEST_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let (mut filled, mut broken) = (0, 0);
    for seed in 0..seeds {
        let (f, b) = run(seed);
        filled += f;
        broken += b;
    }
    assert!(filled > seeds * 5 && broken > seeds / 4, "{filled} filled, {broken} broken");
}

/// `at` advertises the key of `memory`, as region 7, to `peer`, over a connection made for that.
fn expose(world: &mut World, at: usize, peer: usize, memory: &SegmentList) -> Remote {
    let ask = |world: &mut World| {
        let purpose = Purpose::Region { id: 7, reads: true, writes: true };
        world.with(at, |bulk, now, _| {
            bulk.register(PeerId(peer as u32), memory, purpose, false, now)
        })
    };
    // There may be a connection, by which the other side has exposed memory.
    let first = ask(world);
    if first == Registered::Later {
        world.poll(at);
        world.settle();
    }
    let Registered::Yes(registered) = ask(world) else { panic!("it is ready") };
    if let Registered::Yes(again) = first {
        world.nodes[at].bulk.invalidate(PeerId(peer as u32), &again.key);
    }
    assert_eq!(ask(world), Registered::Yes(registered), "one registration for all");
    // One of the two keys.
    world.nodes[at].bulk.invalidate(PeerId(peer as u32), &registered.key);
    Remote { key: registered.key, offset: 0 }
}

const PUT: Put = Put { notify: false, delivered: false, stays: false, reports: false, token: 1 };

/// 1 accesses memory of 0.
fn access(
    world: &mut World,
    at: &Remote,
    local: &SegmentList,
    what: What,
) -> Result<(), SendError> {
    let accessed = world.with(1, |bulk, now, _| bulk.access(PeerId(0), local, at, what, now));
    accessed.map(|access| assert_eq!(access, Access::Begun))
}

#[test]
fn an_exposed_region_is_written_and_read_and_then_is_not() {
    let mut world = World::new(2, 4);
    let (region, source, sink) =
        (OwnedBuffer::zeroed(100), OwnedBuffer::from(vec![5; 100]), OwnedBuffer::zeroed(100));
    let at = expose(&mut world, 0, 1, &region.segments());
    let delivered = What::Put(Put { delivered: true, token: 3, ..PUT });
    access(&mut world, &at, &source.segments(), What::Put(PUT)).unwrap();
    access(&mut world, &at, &sink.segments(), What::Get(2)).unwrap();
    assert_eq!(
        access(&mut world, &at, &source.segments(), delivered),
        Err(SendError::Again),
        "it takes two of the three places"
    );
    world.settle();
    assert_eq!(world.nodes[1].reached, [1, 2]);
    assert!(bytes(&region) == [5; 100] && bytes(&sink) == [5; 100]);
    access(&mut world, &at, &source.segments(), delivered).unwrap();
    world.settle();
    assert_eq!(world.nodes[1].reached, [1, 2, 3]);
    // A flush read reads a byte, and writes none.
    access(&mut world, &at, &SegmentList::EMPTY, What::Flush(4)).unwrap();
    world.settle();
    assert_eq!((&world.nodes[1].reached[..], bytes(&region)), (&[1, 2, 3, 4][..], vec![5; 100]));
    assert_eq!(world.nodes[0].filled, 0, "the target hears of nothing");

    world.nodes[0].bulk.invalidate(PeerId(1), &at.key);
    access(&mut world, &at, &source.segments(), What::Put(PUT)).unwrap();
    world.settle();
    assert_eq!((world.nodes[1].reached.len(), world.nodes[1].lost, world.nodes[0].lost), (4, 1, 1));
    assert_eq!(
        access(&mut world, &at, &source.segments(), What::Put(PUT)),
        Err(STALE),
        "its connection has ended"
    );
    assert_eq!(world.fabric.lock().unwrap().regions.len(), 1, "but what reads land in");
}

/// An operation that waits for it would wait forever.
/// Every packet asks.
#[test]
fn where_no_gpu_is_reached_no_range_is_looked_at() {
    let mut world = World::new(2, 4);
    let region = OwnedBuffer::zeroed(100);
    expose(&mut world, 0, 1, &region.segments());
    world.fabric.lock().unwrap().looked_at = 0;
    assert!(world.with(0, |bulk, _, _| bulk.await_writes(PeerId(1))));
    assert_eq!(world.fabric.lock().unwrap().looked_at, 0);
}

#[test]
fn a_flush_read_that_has_no_memory_ends_the_connection() {
    let mut world = World::new(2, 4);
    let region = OwnedBuffer::zeroed(100);
    let at = expose(&mut world, 0, 1, &region.segments());
    world.fabric.lock().unwrap().refuses = true;
    assert_eq!(access(&mut world, &at, &SegmentList::EMPTY, What::Flush(1)), Err(STALE));
    world.settle();
    assert_eq!((world.nodes[1].lost, world.nodes[0].lost), (1, 1), "both know");
    assert!(world.nodes[1].reached.is_empty());
}

#[test]
fn a_read_that_comes_to_no_end_leaves_its_buffer_alone() {
    let mut world = World::new(2, 4);
    let (region, sink) = (OwnedBuffer::from(vec![5; 100]), OwnedBuffer::zeroed(100));
    let at = expose(&mut world, 0, 1, &region.segments());
    let in_use = |world: &World| world.nodes[1].bulk.staging.as_ref().unwrap().in_use();
    for token in 1..=3 {
        access(&mut world, &at, &sink.segments(), What::Get(token)).unwrap();
    }
    assert_eq!(access(&mut world, &at, &sink.segments(), What::Get(1)), Err(SendError::Again));
    assert_eq!(in_use(&world), 3, "none for what has no room");
    world.nodes[0].bulk.invalidate(PeerId(1), &at.key);
    world.settle();
    assert_eq!((world.nodes[1].lost, in_use(&world)), (1, 0));
    assert!(world.nodes[1].reached.is_empty() && bytes(&sink) == [0; 100]);
}

#[test]
fn memory_that_stays_is_registered_once() {
    let mut world = World::new(2, 4);
    world.fabric.lock().unwrap().depth = 16;
    let region = OwnedBuffer::zeroed(100);
    let long = OwnedBuffer::from(vec![5; STAGED_MAX + 2]);
    let at = expose(&mut world, 0, 1, &region.segments());
    // The fake device does not check the target of a write before the write is delivered.
    let write = Put { stays: true, ..PUT };
    let registered = |world: &mut World, len: usize, how: Put| {
        let before = world.fabric.lock().unwrap().regions.len();
        access(world, &at, &long.segments().slice(0, len), What::Put(how)).unwrap();
        world.fabric.lock().unwrap().regions.len() - before
    };
    assert_eq!(registered(&mut world, STAGED_MAX + 1, write), 1);
    assert_eq!(registered(&mut world, STAGED_MAX + 1, write), 0);
    assert_eq!(registered(&mut world, STAGED_MAX + 1, PUT), 1);
    // A longer segment that begins at the same address replaces the shorter one.
    assert_eq!(registered(&mut world, STAGED_MAX + 2, write), 0);
    assert_eq!(registered(&mut world, STAGED_MAX + 1, write), 0);
    assert_eq!(world.nodes[1].bulk.residents.len(), 1);
    // A short segment is not copied to a bounce buffer.
    assert_eq!(registered(&mut world, STAGED_MAX, write), 0);
    assert!(world.nodes[1].bulk.staging.is_none());
    world.with(1, |bulk, now, sink| bulk.renew(0, now, sink));
    assert!(world.nodes[1].bulk.residents.is_empty(), "it ends with the device");
}

/// Requests posted on the connection from 1 to 0, and how often any were.
fn posted(world: &World) -> (usize, u32) {
    let number = world.nodes[1].bulk.connections.get(PeerId(0)).unwrap().link.qp.number;
    let fabric = world.fabric.lock().unwrap();
    (fabric.pairs[&number].requests.len(), fabric.pairs[&number].posts)
}

#[test]
fn short_requests_are_posted_together() {
    const T: usize = TOGETHER;
    let mut world = World::new(2, 4);
    world.fabric.lock().unwrap().depth = 4 * T;
    let (region, source) = (OwnedBuffer::zeroed(100), OwnedBuffer::from(vec![5; 100]));
    let at = expose(&mut world, 0, 1, &region.segments());
    let more = |world: &mut World, n: usize| {
        (0..n).all(|_| access(world, &at, &source.segments(), What::Put(PUT)).is_ok())
    };
    assert!(more(&mut world, T - 1));
    assert_eq!(posted(&world), (0, 0), "they wait");
    assert!(more(&mut world, 1));
    assert_eq!(posted(&world), (T, 1), "for so many");
    assert!(more(&mut world, 2));
    world.nodes[1].bulk.flush();
    assert_eq!(posted(&world), (T + 2, 2), "or for the end of the call");
    assert!(more(&mut world, 1));
    world.poll(1);
    assert_eq!(posted(&world), (T + 3, 3), "if nobody says so, until the next look");
    assert!(more(&mut world, 3 * T - 3) && !more(&mut world, 1), "there is room for so many");
    world.nodes[1].bulk.flush();
    // Then others are refused until there is room for several.
    let number = world.nodes[1].bulk.connections.get(PeerId(0)).unwrap().link.qp.number;
    for n in 0..T {
        assert!(!more(&mut world, 1), "{n} are complete");
        world.fabric.lock().unwrap().deliver(number);
        world.poll(1);
    }
    let before = posted(&world).1;
    assert!(more(&mut world, T) && !more(&mut world, 1));
    assert_eq!(posted(&world), (4 * T, before + 1));
    world.settle();
    assert_eq!((world.nodes[1].reached.len(), posted(&world).0), (5 * T, 0));
    assert_eq!(bytes(&region), [5; 100]);
}

/// Single requests behind many others are batched, and are posted in the next turn at the latest.
#[test]
fn behind_many_requests_few_wait_for_company() {
    let mut world = World::new(2, 4);
    world.fabric.lock().unwrap().depth = 2 * PLENTY;
    let (region, source) = (OwnedBuffer::zeroed(100), OwnedBuffer::from(vec![5; 100]));
    let at = expose(&mut world, 0, 1, &region.segments());
    let call = |world: &mut World| {
        access(world, &at, &source.segments(), What::Put(PUT)).unwrap();
        world.nodes[1].bulk.flush();
        posted(world).0
    };
    for n in 1..=PLENTY {
        assert_eq!(call(&mut world), n, "each leaves with its call");
    }
    for _ in 1..TOGETHER {
        assert_eq!(call(&mut world), PLENTY);
    }
    assert_eq!(call(&mut world), PLENTY + TOGETHER, "all of them at once");
    assert_eq!(call(&mut world), PLENTY + TOGETHER);
    world.poll(1);
    assert_eq!(posted(&world).0, PLENTY + TOGETHER + 1);
    let number = world.nodes[1].bulk.connections.get(PeerId(0)).unwrap().link.qp.number;
    for _ in 0..TOGETHER + 2 {
        world.fabric.lock().unwrap().deliver(number);
    }
    world.poll(1);
    let few = posted(&world).0;
    assert_eq!((few, call(&mut world)), (PLENTY - 1, PLENTY), "and again");
    world.settle();
    assert_eq!(world.nodes[1].reached.len(), PLENTY + TOGETHER + 2);
}

#[test]
fn what_is_long_or_ends_a_window_waits_for_nothing() {
    let mut world = World::new(2, 4);
    world.fabric.lock().unwrap().depth = 4 * TOGETHER;
    let (region, source) = (OwnedBuffer::zeroed(140), OwnedBuffer::from(vec![5; 140]));
    let at = expose(&mut world, 0, 1, &region.segments());
    let short = |world: &mut World, n: usize| {
        (0..n).for_each(|_| access(world, &at, &source.segments(), What::Put(PUT)).unwrap());
    };
    short(&mut world, 2);
    assert_eq!(posted(&world).0, 0);
    // The fake device does not check the target of a write before the write is delivered.
    let long = OwnedBuffer::zeroed(TOGETHER_LEN + 1);
    access(&mut world, &at, &long.segments(), What::Put(PUT)).unwrap();
    assert_eq!(posted(&world).0, 3, "with what was there before");
    short(&mut world, 2);
    assert_eq!(posted(&world).0, 3);
    world.lend(0, 1, 10).unwrap();
    world.hear(0, 1);
    assert_eq!(posted(&world).0, 6);
    // Requests that wait when a connection ends are never posted, and their bounce buffers are freed.
    short(&mut world, 2);
    world.with(1, |bulk, now, told| bulk.leave(PeerId(0), now, told));
    assert_eq!(world.nodes[1].bulk.staging.as_ref().unwrap().in_use(), 0);
    world.poll(1);
    assert!(world.nodes[1].reached.is_empty());
}

#[test]
fn a_region_without_room_is_tried_again_later() {
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    let region = OwnedBuffer::zeroed(100);
    let ask = |world: &mut World| {
        let (memory, purpose) =
            (region.segments(), Purpose::Region { id: 7, reads: true, writes: true });
        world.with(0, |bulk, now, _| bulk.register(PeerId(1), &memory, purpose, false, now))
    };
    world.fabric.lock().unwrap().refuses = true;
    assert_eq!(ask(&mut world), Registered::No);
    world.fabric.lock().unwrap().refuses = false;
    assert_eq!(ask(&mut world), Registered::No, "not at once");
    world.now += PAUSE_NS;
    assert!(matches!(ask(&mut world), Registered::Yes(_)));
}

#[test]
fn memory_of_a_device_takes_no_room_of_the_hosts() {
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    let (on_device, host) = (OwnedBuffer::zeroed(1000), OwnedBuffer::zeroed(100));
    let ask = |world: &mut World, id, memory: SegmentList| {
        let purpose = Purpose::Region { id, reads: true, writes: true };
        world.with(0, |bulk, now, _| bulk.register(PeerId(1), &memory, purpose, false, now))
    };
    let mut keys = Vec::new();
    // The device of these tests has room for 150 bytes.
    for (id, memory) in [(7, on_device.segments().as_device(1)), (8, host.segments())] {
        let Registered::Yes(registered) = ask(&mut world, id, memory) else { panic!("{id}") };
        keys.push(registered.key);
    }
    assert_eq!(ask(&mut world, 9, OwnedBuffer::zeroed(60).segments()), Registered::No);
    keys.iter().for_each(|key| world.nodes[0].bulk.invalidate(PeerId(1), key));
    assert!(matches!(ask(&mut world, 10, host.segments()), Registered::Yes(_)));
}

#[test]
fn memory_that_changes_is_exposed_no_more() {
    let mut world = World::new(2, 4);
    let region = OwnedBuffer::zeroed(100);
    let at = expose(&mut world, 0, 1, &region.segments());
    assert!(!world.nodes[0].bulk.has_work());
    world.fabric.lock().unwrap().changes += 1;
    assert!(world.nodes[0].bulk.has_work());
    world.poll(0);
    assert!(world.nodes[0].void.is_empty(), "it was something else");
    {
        let mut fabric = world.fabric.lock().unwrap();
        fabric.exposed.insert(Key::decode(&at.key).unwrap().key, false);
        fabric.changes += 1;
    }
    let (now, list) = (world.now, region.segments());
    let purpose = Purpose::Region { id: 7, reads: true, writes: true };
    let void = world.nodes[0].bulk.register(PeerId(1), &list, purpose, false, now);
    assert_eq!(void, Registered::No, "nobody gets a key that has ended");
    world.poll(0);
    assert_eq!(world.nodes[0].void, [at.key]);
    assert!(world.fabric.lock().unwrap().regions.is_empty());
    let long = OwnedBuffer::zeroed(151);
    let (now, list) = (world.now, long.segments());
    let never = world.nodes[0].bulk.register(PeerId(1), &list, purpose, false, now);
    assert_eq!(never, Registered::Never, "more than may be locked");
    world.fabric.lock().unwrap().unwatched = Some(libc::EOPNOTSUPP);
    let (now, list) = (world.now, region.segments());
    let again = world.nodes[0].bulk.register(PeerId(1), &list, purpose, false, now);
    assert_eq!(again, Registered::Never);
}

#[test]
fn memory_that_cannot_be_watched_for_now_is_tried_again_later() {
    let mut world = World::new(2, 4);
    world.prepare(0, 1);
    world.settle();
    let (region, other) = (OwnedBuffer::zeroed(50), OwnedBuffer::zeroed(50));
    let ask = |world: &mut World, id, memory: &OwnedBuffer| {
        let purpose = Purpose::Region { id, reads: true, writes: true };
        let memory = memory.segments();
        world.with(0, |bulk, now, _| bulk.register(PeerId(1), &memory, purpose, false, now))
    };
    let set = |world: &World, why| world.fabric.lock().unwrap().unwatched = why;
    set(&world, Some(libc::EAGAIN));
    assert_eq!(ask(&mut world, 7, &region), Registered::No);
    set(&world, None);
    assert_eq!(ask(&mut world, 7, &region), Registered::No, "not at once: to ask takes time");
    assert!(matches!(ask(&mut world, 8, &other), Registered::Yes(_)), "that is another region");
    world.now += PAUSE_NS;
    assert!(matches!(ask(&mut world, 7, &region), Registered::Yes(_)));
    // Few are remembered.
    set(&world, Some(libc::EAGAIN));
    let short = OwnedBuffer::zeroed(10);
    for id in 100..300 {
        assert_eq!(ask(&mut world, id, &short), Registered::No);
    }
    set(&world, None);
    assert_eq!(ask(&mut world, 299, &short), Registered::No);
    assert!(matches!(ask(&mut world, 100, &short), Registered::Yes(_)));
}

/// It may have begun to use them since it asked.
#[test]
fn a_peer_that_asks_and_has_keys_keeps_its_connection() {
    let mut world = World::new(3, 1);
    let (region, source) = (OwnedBuffer::zeroed(100), OwnedBuffer::from(vec![5; 100]));
    let _ = expose(&mut world, 0, 1, &region.segments());
    let at = expose(&mut world, 1, 0, &region.segments());
    world.now += KEYS_IDLE_NS;
    assert_eq!(world.prepare(0, 2), Prepared::No);
    let done = world.with(0, |bulk, now, _| {
        bulk.access(PeerId(1), &source.segments(), &at, What::Put(PUT), now)
    });
    assert_eq!(done, Ok(Access::Begun));
    world.settle();
    assert_eq!((world.nodes[0].lost, world.nodes[1].lost), (0, 0));
    assert_eq!(world.nodes[0].reached, [1]);
    assert_eq!(world.nodes[1].bulk.counts().evicted, 0);
}

/// An operation that waits for a flush read, or a target that believes its key is still known, would wait forever.
#[test]
fn both_ends_hear_of_a_connection_that_gives_way() {
    for (target, evicts) in [(0, 1), (1, 1)] {
        let mut world = World::new(3, 1);
        let (region, source) = (OwnedBuffer::zeroed(100), OwnedBuffer::from(vec![5; 100]));
        let initiator = 1 - target;
        let at = expose(&mut world, target, initiator, &region.segments());
        let peer = PeerId(target as u32);
        let put = |bulk: &mut Rc<FakeDevice>, now| {
            bulk.access(peer, &source.segments(), &at, What::Put(PUT), now)
        };
        world.with(initiator, |bulk, now, _| put(bulk, now)).unwrap();
        world.settle();
        assert_eq!(world.nodes[initiator].reached, [1]);
        world.now += KEYS_IDLE_NS;
        assert_eq!((world.nodes[0].lost, world.nodes[1].lost), (0, 0));
        // The target asks the initiator, which sees what it has under way.
        let asks = evicts == target;
        assert_eq!(world.prepare(evicts, 2), if asks { Prepared::No } else { Prepared::Later });
        assert_eq!(world.nodes[evicts].lost, u64::from(!asks));
        world.settle();
        assert_eq!((world.nodes[0].lost, world.nodes[1].lost), (1, 1));
        assert_eq!(world.with(initiator, |bulk, now, _| put(bulk, now)), Err(STALE));
        let counts = world.nodes.iter().map(|node| node.bulk.counts());
        assert_eq!(counts.map(|counts| counts.broken).sum::<u64>(), 0);
        assert_eq!(world.nodes[initiator].bulk.counts().evicted, 1);
    }
}

#[test]
fn regions_of_the_same_memory_end_one_by_one() {
    let mut world = World::new(2, 4);
    let region = OwnedBuffer::zeroed(50);
    let first = Key::decode(&expose(&mut world, 0, 1, &region.segments()).key).unwrap();
    let purpose = Purpose::Region { id: 8, reads: true, writes: true };
    let other = world
        .with(0, |bulk, now, _| bulk.register(PeerId(1), &region.segments(), purpose, false, now));
    let Registered::Yes(other) = other else { panic!("{other:?}") };
    let other = Key::decode(&other.key).unwrap();
    let exposed = |world: &World, key: u32| world.fabric.lock().unwrap().exposed.contains_key(&key);
    assert!(exposed(&world, first.key) && exposed(&world, other.key));
    world.nodes[0].bulk.invalidate(PeerId(1), &first.encode());
    assert!(!exposed(&world, first.key) && exposed(&world, other.key));
    world.nodes[0].bulk.invalidate(PeerId(1), &other.encode());
    assert!(!exposed(&world, other.key) && world.fabric.lock().unwrap().regions.is_empty());
}

#[test]
fn keys_of_a_connection_that_gave_way_are_void() {
    let mut world = World::new(3, 1);
    let region = OwnedBuffer::zeroed(10);
    let first = expose(&mut world, 0, 1, &region.segments()).key;
    assert!(world.nodes[0].bulk.is_current(PeerId(1), &first));
    world.now += KEYS_IDLE_NS;
    assert_eq!(world.prepare(0, 2), Prepared::No);
    world.settle();
    assert!(!world.nodes[0].bulk.is_current(PeerId(1), &first));
    assert!(world.fabric.lock().unwrap().regions.is_empty(), "no peer has a key");
    assert_eq!(world.prepare(0, 2), Prepared::Later);
    world.settle();
    world.now += IDLE_NS;
    let again = expose(&mut world, 0, 1, &region.segments()).key;
    let [first, again] = [first, again].map(|key| Key::decode(&key).unwrap());
    assert!(again.connection != first.connection && again.addr == first.addr);
}

/// A ready connection between 0 and 1, whose devices use GET rendezvous.
fn offering() -> World {
    let mut world = World::new(2, 4);
    world.fabric.lock().unwrap().offers = true;
    world.prepare(0, 1);
    world.settle();
    assert_eq!((world.prepare(0, 1), world.prepare(1, 0)), (Prepared::Ready, Prepared::Ready));
    world
}

/// 0 advertises `memory` to 1 (GET rendezvous).
fn offer(world: &mut World, memory: &OwnedBuffer) -> Option<RemoteKey> {
    offer_to(world, memory, true)
}

fn offer_to(world: &mut World, memory: &OwnedBuffer, near: bool) -> Option<RemoteKey> {
    let list = memory.segments();
    match world.with(0, |bulk, now, _| bulk.register(PeerId(1), &list, Purpose::Send, near, now)) {
        Registered::Yes(registered) => Some(registered.key),
        Registered::No => None,
        other => panic!("{other:?}"),
    }
}

/// 1 reads all of the memory that is advertised to it.
fn read_offer(world: &mut World, key: &RemoteKey, sink: &OwnedBuffer) -> Result<(), SendError> {
    access(world, &Remote { key: *key, offset: 0 }, &sink.segments(), What::Get(5))
}

#[test]
fn a_message_is_read_until_its_offer_is_withdrawn() {
    let mut world = offering();
    let (source, sink) = (OwnedBuffer::from(vec![8; 5000]), OwnedBuffer::zeroed(5000));
    let key = offer(&mut world, &source).unwrap();
    read_offer(&mut world, &key, &sink).unwrap();
    world.settle();
    assert_eq!(world.nodes[1].reached, [5]);
    assert!(bytes(&sink) == [8; 5000]);
    let other = offer(&mut world, &source).unwrap();
    assert_ne!(other, key);
    world.nodes[0].bulk.invalidate(PeerId(1), &key);
    // Remote keys that belong to no region are ignored.
    world.nodes[0].bulk.invalidate(PeerId(1), &key);
    let decoded = Key::decode(&other).unwrap();
    let elsewhere = Key { connection: decoded.connection ^ 1, ..decoded };
    world.nodes[0].bulk.invalidate(PeerId(1), &elsewhere.encode());
    read_offer(&mut world, &other, &sink).unwrap();
    world.settle();
    assert_eq!((world.nodes[1].reached.len(), world.nodes[1].lost), (2, 0));
    read_offer(&mut world, &key, &sink).unwrap();
    world.settle();
    assert_eq!((world.nodes[1].reached.len(), world.nodes[1].lost), (2, 1));
    // An advertised key ends with its connection; and after a loss none is advertised.
    assert!(world.fabric.lock().unwrap().regions.is_empty());
    world.now += 100 * 1_000_000_000;
    world.prepare(0, 1);
    world.settle();
    assert_eq!(world.prepare(0, 1), Prepared::Ready);
    assert_eq!(offer(&mut world, &source), None);
    assert_eq!(read_offer(&mut world, &other, &sink), Err(STALE));
}

#[test]
fn what_is_not_to_be_read_is_not_offered() {
    let memory = OwnedBuffer::zeroed(100);
    let mut world = World::new(2, 4);
    world.fabric.lock().unwrap().offers = true;
    assert_eq!(offer(&mut world, &memory), None, "there is no connection");
    let mut world = offering();
    world.fabric.lock().unwrap().offers = false;
    assert_eq!(offer(&mut world, &memory), None);
    world.fabric.lock().unwrap().offers = true;
    world.fabric.lock().unwrap().refuses = true;
    assert_eq!(offer(&mut world, &memory), None);
    world.fabric.lock().unwrap().refuses = false;
    assert_eq!(offer_to(&mut world, &memory, false), None, "it is far");
    let long = OwnedBuffer::zeroed(super::OFFER_MAX + 1);
    assert_eq!(offer(&mut world, &long), None);
    for _ in 0..WINDOWS {
        assert!(offer(&mut world, &memory).is_some());
    }
    assert_eq!(offer(&mut world, &memory), None, "there are as many as may be");
    world.with(0, |bulk, now, told| bulk.forget(PeerId(1), now, told));
    assert!(world.fabric.lock().unwrap().regions.is_empty());
}
