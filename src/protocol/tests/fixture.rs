//! The endpoints of a test: an engine, its reports, and the memory that it may use.

use super::sim::{Entry, Log, Net, SharedNet, SimIface, Slot, Weather, What, address};
use crate::memory::SegmentList;
use crate::memory::keys::{Denied, Granted, Region, RegionTable, Right};
use crate::protocol::packet::Packet;
use crate::protocol::{
    ANY_SOURCE, Completion, Direction, Engine, Failure, Host, Limits, OpError, PeekAction,
    ReceiveOp, Receives, RemoteAccess, RemoteRange, RemoteRanges, Report as Reported, RmaOp,
    SendOp, UNKNOWN_SOURCE,
};
use crate::sys::cma::Range;
use crate::transport::loopback::Loopback;
use crate::transport::{Address, PeerId};
use std::cell::Cell;
use std::collections::HashMap;

/// The index of the endpoint at `slot` in the address book.
pub(super) fn source(slot: Slot) -> u64 {
    100 + slot as u64
}

/// `bytes` as a gather list, cut at `cuts`, which ascend. The caller keeps `bytes` where it is.
pub(super) fn lend(bytes: &mut [u8], cuts: &[usize]) -> SegmentList {
    let base = bytes.as_mut_ptr().expose_provenance();
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain(std::iter::once(bytes.len()));
    let ranges: Vec<Range> = starts
        .zip(ends)
        .map(|(from, to)| Range { addr: (base + from) as u64, len: (to - from) as u64 })
        .collect();
    Loopback::list(&ranges).unwrap()
}

/// The host of an engine.
#[derive(Debug)]
pub(super) struct TestHost {
    slot: Slot,
    log: Log,
    pub(super) room: bool,
    /// Nothing arrives.
    pub(super) deaf: bool,
    pub(super) regions: RegionTable,
    /// Groups that were joined, or failed to join.
    pub(super) joined: Vec<(u64, Result<(), i32>)>,
    book: HashMap<Address, u64>,
    epoch: u64,
    removals: u64,
    /// 0: it has no clock.
    pub(super) now_ns: u64,
    /// How often it was asked for a shared queue of receives.
    pub(super) looks: Cell<usize>,
    /// How often it was asked whether the book has changed.
    pub(super) asked: Cell<usize>,
}

impl TestHost {
    pub(super) fn new(slot: Slot, log: Log) -> Self {
        Self {
            slot,
            log,
            room: true,
            deaf: false,
            regions: RegionTable::default(),
            joined: Vec::new(),
            book: HashMap::new(),
            epoch: 0,
            removals: 0,
            now_ns: 0,
            looks: Cell::new(0),
            asked: Cell::new(0),
        }
    }

    /// Enters `slot` into the address book.
    pub(super) fn learn(&mut self, slot: Slot) {
        self.learn_as(slot, source(slot));
    }

    pub(super) fn learn_as(&mut self, slot: Slot, source: u64) {
        self.epoch += 1;
        let old = self.book.insert(address(slot), source);
        self.removals += u64::from(old.is_some_and(|old| old != source));
    }

    pub(super) fn source_of_slot(&self, slot: Slot) -> u64 {
        self.source_of(&address(slot))
    }

    fn note(&self, what: What) {
        self.log.borrow_mut().push(Entry { at: self.slot, what });
    }
}

impl Host for TestHost {
    fn complete(&mut self, completion: &Completion) {
        self.note(What::Completed(*completion));
    }

    fn fail(&mut self, failure: &Failure) {
        self.note(What::Failed(*failure));
    }

    fn source_of(&self, address: &Address) -> u64 {
        self.book.get(address).copied().unwrap_or(UNKNOWN_SOURCE)
    }

    fn book_epoch(&self) -> u64 {
        self.asked.set(self.asked.get() + 1);
        self.epoch
    }

    fn book_removals(&self) -> u64 {
        self.removals
    }

    fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn see_shared_receives(&self) -> Option<&Receives> {
        self.looks.set(self.looks.get() + 1);
        None
    }

    fn takes_arrivals(&self) -> bool {
        self.room && !self.deaf
    }

    fn has_room_for_sends(&self, _report: Reported) -> bool {
        self.room
    }

    fn region(&self, range: &RemoteRange, right: Right) -> Result<Granted, Denied> {
        self.regions.find(range.key, range.addr, range.len, right)
    }

    fn offer(&self, key: u64) -> Option<(u64, Region)> {
        self.regions.whole(key)
    }

    fn joined(&mut self, group: u64, outcome: Result<(), i32>) {
        self.joined.push((group, outcome));
    }

    fn accessed(&mut self, access: &RemoteAccess<'_>) {
        let RemoteAccess { right, len, data, source, .. } = *access;
        self.note(What::Accessed { right, len, data, source });
    }
}

/// An endpoint.
pub(super) struct Node {
    pub(super) engine: Engine<SimIface>,
    pub(super) host: TestHost,
}

impl Node {
    pub(super) fn new(net: &SharedNet, log: &Log, slot: Slot, limits: Limits) -> Self {
        let engine = Engine::new(Net::start(net, slot), limits);
        Self { engine, host: TestHost::new(slot, log.clone()) }
    }

    /// As a real endpoint does it: the fast path first.
    pub(super) fn send(&mut self, op: &SendOp) -> Result<(), OpError> {
        let Self { engine, host } = self;
        if engine.try_send(op, host) { Ok(()) } else { engine.send(op, host) }
    }

    /// As [`Node::send`].
    pub(super) fn receive(&mut self, op: &ReceiveOp) -> Result<(), OpError> {
        let Self { engine, host } = self;
        let posted = engine.try_post(op, |engine| engine.is_hopeless(op.source, host));
        if posted { Ok(()) } else { engine.receive(op, host) }
    }

    pub(super) fn progress(&mut self) -> usize {
        self.engine.progress(&mut self.host)
    }

    /// Asserts that nothing can be done now if the endpoint says so: it may sleep until something arrives.
    #[track_caller]
    pub(super) fn check_rest(&mut self) {
        let nudged = self.engine.iface_mut().take_nudge();
        if !nudged && !self.engine.is_busy() {
            self.host.deaf = true;
            let moved = self.progress();
            self.host.deaf = false;
            assert_eq!(moved, 0, "work is left, and nothing would wake the endpoint");
        }
    }

    /// Asserts that nothing is pending inside, and nothing was forgotten there.
    #[track_caller]
    pub(super) fn assert_empty(&self) {
        let core = &self.engine.core;
        assert!(core.sends.pending.is_empty(), "sends: {:?}", core.sends.pending);
        assert!(core.arrivals.active.is_empty(), "rendezvous receives: {:?}", core.arrivals.active);
        assert!(!core.matching.own.has_buffers(), "multi-receive buffers: {:?}", core.matching.own);
        assert!(core.outbox.is_empty(), "answers: {:?}", core.outbox);
        assert!(
            core.sends.streams.is_empty()
                && core.arrivals.pulls.is_empty()
                && core.sends.deferred.is_empty()
        );
        assert!(
            core.arrivals.chunks.list.is_empty() && core.sends.due.is_empty(),
            "{:?} {:?}",
            core.arrivals.chunks.list,
            core.sends.due
        );
        assert!(core.sends.assists.is_empty(), "{:?}", core.sends.assists);
        assert!(core.sends.wrote.is_empty(), "{:?}", core.sends.wrote);
        assert!(core.matching.claimed.is_empty(), "claimed: {:?}", core.matching.claimed);
        assert_eq!((core.matching.unexpected.len(), core.matching.bytes), (0, 0));
        assert_eq!(core.matching.own.posted.len(), 0);
        core.rma.assert_empty();
        core.collectives.assert_empty();
        for peer in core.peers.iter() {
            assert_eq!((peer.outstanding, peer.deferred()), (0, 0));
        }
        assert!(!self.engine.is_busy() && !self.engine.has_unsent());
    }
}

pub(super) const LIMITS: Limits = Limits {
    eager_max: 256,
    tx_max: 8,
    rx_max: 8,
    past_caches_min: usize::MAX,
    unexpected_max: 1 << 20,
    bulk_chunk: 4096,
    alone_min: usize::MAX,
    contexts: 1,
    shares_receives: false,
    traced: false,
};

/// Reported with an entry, on context 0.
const ENTRY: crate::protocol::Report = crate::protocol::Report::new(true, 0);

/// Endpoints that know each other, for directed tests.
pub(super) struct World {
    pub(super) net: SharedNet,
    log: Log,
    limits: Limits,
    nodes: Vec<Option<Node>>,
}

/// The buffer of an operation; must live until the operation has ended.
pub(super) struct Memory(pub(super) Vec<u8>);

impl Memory {
    /// `len` bytes of a pattern that differs by `seed`.
    pub(super) fn pattern(seed: usize, len: usize) -> Self {
        Self(super::rng::payload(seed, len).to_vec())
    }

    pub(super) fn zeroed(len: usize) -> Self {
        Self(vec![0; len])
    }

    pub(super) fn list(&mut self) -> SegmentList {
        lend(&mut self.0, &[])
    }
}

/// A plain send of `memory`, to be refined.
pub(super) fn send_op(peer: PeerId, memory: &mut Memory, context: u64) -> SendOp {
    SendOp {
        peer,
        rx: 0,
        payload: memory.list(),
        tagged: false,
        tag: 0,
        data: None,
        context,
        report: ENTRY,
        inject: false,
        delivery: false,
        transmitted: false,
        fence: false,
    }
}

/// A plain receive from any peer, to be refined.
pub(super) fn receive_op(memory: &mut Memory, context: u64) -> ReceiveOp {
    ReceiveOp {
        segments: memory.list(),
        tagged: false,
        tag: 0,
        ignore: u64::MAX,
        source: ANY_SOURCE,
        context,
        report: ENTRY,
        multi_min: None,
    }
}

/// One range of a target's memory.
pub(super) fn remote(key: u64, addr: u64, len: usize) -> RemoteRanges {
    let mut ranges = RemoteRanges::NONE;
    ranges.push(RemoteRange { key, addr, len: len as u64 }).unwrap();
    ranges
}

/// A one-sided operation between `memory` and the start of region `key`, to be refined.
pub(super) fn rma_op(
    peer: PeerId,
    right: Right,
    memory: &mut Memory,
    key: u64,
    context: u64,
) -> RmaOp {
    RmaOp {
        peer,
        right,
        local: memory.list(),
        remote: remote(key, 0, memory.0.len()),
        data: None,
        context,
        report: ENTRY,
        inject: false,
        delivered: false,
        fence: false,
    }
}

/// An endpoint's report of one operation.
pub(super) type Report = Result<Completion, Failure>;

impl World {
    pub(super) fn new(slots: usize, weather: Weather, limits: Limits) -> Self {
        let (net, log) = Net::new(1, slots, weather);
        let mut world = Self { net, log, limits, nodes: Vec::new() };
        for slot in 0..slots {
            world.nodes.push(None);
            world.start(slot);
        }
        world
    }

    pub(super) fn pair() -> Self {
        Self::new(2, Weather::fair(), LIMITS)
    }

    /// A new endpoint at `slot`, which knows all others.
    pub(super) fn start(&mut self, slot: Slot) {
        let mut node = Node::new(&self.net, &self.log, slot, self.limits);
        for peer in 0..16 {
            node.host.learn(peer);
        }
        self.nodes[slot] = Some(node);
    }

    /// Whether descriptors are short from now on.
    pub(super) fn short(&mut self, short: bool) {
        self.net.borrow_mut().weather.short = short;
    }

    pub(super) fn leave(&mut self, slot: Slot, departure: crate::transport::Departure) {
        self.nodes[slot] = None;
        self.net.borrow_mut().leave(slot, departure);
    }

    pub(super) fn node(&mut self, slot: Slot) -> &mut Node {
        self.nodes[slot].as_mut().unwrap()
    }

    pub(super) fn peer(&mut self, at: Slot, to: Slot) -> PeerId {
        self.node(at).engine.connect(&address(to)).unwrap()
    }

    pub(super) fn send(&mut self, at: Slot, op: &SendOp) -> Result<(), OpError> {
        self.node(at).send(op)
    }

    pub(super) fn access(&mut self, at: Slot, op: &RmaOp) -> Result<(), OpError> {
        let node = self.node(at);
        node.engine.access(op, &mut node.host)
    }

    /// Registers `memory` at `at` under `key`, with offsets from 0.
    pub(super) fn register(&mut self, at: Slot, key: u64, memory: &mut Memory, rights: &[Right]) {
        self.register_list(at, key, memory.list(), rights);
    }

    pub(super) fn register_list(
        &mut self,
        at: Slot,
        key: u64,
        memory: SegmentList,
        rights: &[Right],
    ) {
        let region = Region {
            memory,
            base: 0,
            remote_read: rights.contains(&Right::Read),
            remote_write: rights.contains(&Right::Write),
        };
        self.node(at).host.regions.insert(key, region).unwrap();
    }

    /// Accesses of peers to memory of `at` since the last call: kind, length, and data.
    pub(super) fn accesses(&mut self, at: Slot) -> Vec<(Right, usize, Option<u64>)> {
        let mut taken = Vec::new();
        self.log.borrow_mut().retain(|entry| match entry.what {
            What::Accessed { right, len, data, .. } if entry.at == at => {
                taken.push((right, len, data));
                false
            }
            _ => true,
        });
        taken
    }

    pub(super) fn receive(&mut self, at: Slot, op: &ReceiveOp) -> Result<(), OpError> {
        self.node(at).receive(op)
    }

    pub(super) fn peek(&mut self, at: Slot, op: &ReceiveOp, action: PeekAction) {
        let node = self.node(at);
        node.engine.peek(op, action, &mut node.host).unwrap();
    }

    pub(super) fn cancel(&mut self, at: Slot, context: u64) -> bool {
        let node = self.node(at);
        node.engine.cancel(0, context, &mut node.host)
    }

    pub(super) fn claimed(&mut self, at: Slot, op: &ReceiveOp, discard: bool) {
        let node = self.node(at);
        node.engine.receive_claimed(op, discard, &mut node.host).unwrap();
    }

    pub(super) fn progress(&mut self, at: Slot) {
        self.node(at).progress();
        self.node(at).check_rest();
    }

    /// Runs all endpoints until nothing moves.
    pub(super) fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..10_000 {
            let turn = |node: &mut Node| {
                let moved = node.progress();
                node.check_rest();
                moved
            };
            let moved: usize = self.nodes.iter_mut().flatten().map(turn).sum();
            let core = |node: &Node| {
                !node.engine.core.outbox.is_empty()
                    || !node.engine.core.arrivals.pulls.is_empty()
                    || !node.engine.core.sends.streams.is_empty()
                    || !node.engine.core.sends.due.is_empty()
                    || node.engine.core.rma.work() > 0
                    || node.engine.core.collectives.work() > 0
            };
            let busy = self.nodes.iter().flatten().any(core) || self.net.borrow().has_begun();
            quiet = if moved == 0 && !busy { quiet + 1 } else { 0 };
            if quiet == 3 {
                return;
            }
        }
        panic!("the endpoints never rest");
    }

    /// Reports of `at` on operations in `direction` since the last call, in order.
    pub(super) fn reports(&mut self, at: Slot, direction: Direction) -> Vec<Report> {
        let mut taken = Vec::new();
        self.log.borrow_mut().retain(|entry| {
            let report = match entry.what {
                What::Completed(completion) => Ok(completion),
                What::Failed(failure) => Err(failure),
                _ => return true,
            };
            let found = report.map_or_else(|f| f.completion.direction, |c| c.direction);
            let wanted = entry.at == at && found == direction;
            if wanted {
                taken.push(report);
            }
            !wanted
        });
        taken
    }

    pub(super) fn sends(&mut self, at: Slot) -> Vec<Report> {
        self.reports(at, Direction::Send)
    }

    pub(super) fn receives(&mut self, at: Slot) -> Vec<Report> {
        self.reports(at, Direction::Receive)
    }

    /// The one receive that completed at `at`.
    #[track_caller]
    pub(super) fn received(&mut self, at: Slot) -> Completion {
        match self.receives(at)[..] {
            [Ok(completion)] => completion,
            ref other => panic!("{other:?}"),
        }
    }

    /// The one receive that failed at `at`.
    #[track_caller]
    pub(super) fn receive_failed(&mut self, at: Slot) -> Failure {
        match self.receives(at)[..] {
            [Err(failure)] => failure,
            ref other => panic!("{other:?}"),
        }
    }

    /// The one send that failed at `at`.
    #[track_caller]
    pub(super) fn send_failed(&mut self, at: Slot) -> Failure {
        match self.sends(at)[..] {
            [Err(failure)] => failure,
            ref other => panic!("{other:?}"),
        }
    }

    /// Asserts that no endpoint has anything left to do or to send.
    #[track_caller]
    pub(super) fn assert_empty(&mut self) {
        for node in self.nodes.iter().flatten() {
            node.assert_empty();
        }
        let log = self.log.borrow();
        let said = |e: &&Entry| {
            matches!(e.what, What::Completed(_) | What::Failed(_) | What::Accessed { .. })
        };
        let reports: Vec<_> = log.iter().filter(said).collect();
        assert!(reports.is_empty(), "{reports:?}");
    }

    pub(super) fn on_wire(&self, from: Slot, to: Slot) -> Vec<Packet> {
        self.net.borrow().on_wire(from, to)
    }

    pub(super) fn forge(&self, from: Slot, to: Slot, packet: &Packet, payload: &[u8]) {
        self.net.borrow_mut().forge(from, to, packet.encode().as_slice(), payload);
    }

    pub(super) fn dropped(&mut self, at: Slot) -> u64 {
        self.node(at).engine.counts().dropped
    }
}
