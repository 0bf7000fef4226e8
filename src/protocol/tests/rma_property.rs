//! Random one-sided operations of several endpoints over a random network, checked against a model of the memory.
//!
//! Each endpoint has one region for each endpoint. The model has every byte as it must be once all operations are done.
//! So a write after a write, and a read after a write, are checked wherever they overlap. Atomic operations are among
//! them; their results are tested elsewhere. `UDRV_TEST_CASES`, `UDRV_TEST_SEED`, `UDRV_TEST_TRACE`: as in
//! [`property`].
//!
//! [`property`]: super::property

use super::fixture::{Node, lend, source};
use super::rng::{LEN_MAX, Rng, payload};
use super::sim::{Log, Net, Reach, SharedNet, Slot, Weather, What, address};
use super::sim_window::Glazing;
use crate::memory::SegmentList;
use crate::memory::atomic::{Datatype, Form, MAX_BYTES, Op, Operation};
use crate::memory::keys::{Region, Right};
use crate::protocol::rma::COPY_MAX;
use crate::protocol::send::COPY_MEAN;
use crate::protocol::{
    AtomicOp, Cause, Direction, Limits, OpError, RemoteRange, RemoteRanges, RmaOp, right_of,
};
use crate::sys::Errno;
use crate::transport::{Departure, Prepared};

const CASES: u64 = 1000;
const REGION_LEN: usize = 30_000;

/// Memory of `at` for operations of `from`.
struct Zone {
    at: Slot,
    from: Slot,
    key: u64,
    base: u64,
    memory: Box<[u8]>,
    model: Vec<u8>,
    /// The contents of the memory are not known: an operation failed.
    vague: bool,
}

struct Pending {
    from: Slot,
    to: Slot,
    right: Right,
    ranges: Vec<(usize, usize)>,
    key: u64,
    memory: Vec<u8>,
    /// Operands of an atomic operation.
    operands: [Vec<u8>; 2],
    data: Option<u64>,
    /// The values that a read, or an atomic operation, must find.
    expected: Option<Vec<u8>>,
    /// The error that it must fail with.
    error: Option<i32>,
    /// It may fail, because an endpoint left or closed a region.
    may_fail: bool,
    fence: bool,
    accessed: bool,
    done: bool,
}

impl Pending {
    fn len(&self) -> usize {
        self.ranges.iter().map(|(_, len)| len).sum()
    }
}

struct Run {
    net: SharedNet,
    log: Log,
    nodes: Vec<Option<Node>>,
    limits: Limits,
    rng: Rng,
    zones: Vec<Zone>,
    /// Closed regions, with the contents that they had then.
    closed: Vec<(Box<[u8]>, Vec<u8>)>,
    ops: Vec<Pending>,
    next_key: u64,
    troubles: bool,
    /// A link has ended since everything was settled last.
    turmoil: bool,
    fences: u64,
    /// Peers announce late that they support atomic operations.
    hesitant: bool,
    /// Initiators may use direct RMA, which the target does not see.
    alone: bool,
    trace: bool,
}

/// A random atomic operation that exists, and its form.
fn any_operation(rng: &mut Rng) -> (Operation, Form) {
    loop {
        let operation = Operation { op: rng.pick(Op::ALL), datatype: rng.pick(Datatype::ALL) };
        let form = rng.pick(&[Form::Base, Form::Fetch, Form::Compare]);
        if operation.is_offered(form) {
            return (operation, form);
        }
    }
}

fn weather(rng: &mut Rng) -> Weather {
    let refusal = Reach::Fails { after: 2, errno: libc::EPERM };
    let fault = Reach::Fails { after: 1, errno: libc::EFAULT };
    let all = [Reach::Off, Reach::Later, Reach::On, Reach::Short, Reach::Shy, refusal, fault];
    let pick = |rng: &mut Rng| vec![rng.pick(&all)];
    let device = rng.percent(40);
    let weather = Weather {
        queue_len: rng.pick(&[1, 2, 8, 64, 200]),
        short_max: rng.pick(&[104, 128, 200]),
        bcopy_max: rng.pick(&[500, 2000, 9000]),
        announces_room: device && rng.pick(&[false, true]),
        again_percent: rng.pick(&[0, 0, 5, 30]),
        batch: rng.pick(&[1, 4, 32]),
        get: pick(rng),
        put: pick(rng),
        ..Weather::fair()
    };
    if !device {
        return weather;
    }
    // On another node: its device moves bytes, and there is no other access.
    let windows = Glazing {
        count: rng.pick(&[1, 3, 64]),
        begin: vec![Prepared::Ready, Prepared::Later],
        changes: 20,
        breaks: rng.pick(&[0, 0, 5, 30]),
        ends: 20,
        write_refusals: rng.pick(&[0, 0, 10]),
        waits: rng.pick(&[0, 20]),
        exposes: true,
        steady: false,
        expose_max: rng.pick(&[REGION_LEN, 7000]),
        conceals: rng.pick(&[0, 5]),
        rails: rng.pick(&[1, 1, 2]),
        reads: rng.pick(&[false, false, true]),
        ..Glazing::none()
    };
    Weather { get: vec![Reach::Off], put: vec![Reach::Off], windows, ..weather }
}

impl Run {
    fn new(mut rng: Rng) -> Self {
        let weather = weather(&mut rng);
        let limits = Limits {
            eager_max: rng.pick(&[0, 64, weather.bcopy_max]),
            tx_max: rng.pick(&[1, 4, 1000]),
            rx_max: 8,
            past_caches_min: usize::MAX,
            unexpected_max: 1 << 20,
            bulk_chunk: rng.pick(&[3000, 1 << 20]),
            alone_min: rng.pick(&[usize::MAX, 0, 100, 2000]),
            contexts: 1,
            shares_receives: false,
            traced: rng.pick(&[false, false, true]),
        };
        let slots = 2 + rng.below(2);
        let trace = std::env::var_os("UDRV_TEST_TRACE").is_some();
        if trace {
            eprintln!("{slots} endpoints, {weather:?}, {limits:?}");
        }
        let (net, log) = Net::new(rng.next(), slots, weather);
        let (troubles, fences) = (rng.percent(40), rng.pick(&[0, 0, 10]));
        let hesitant = rng.percent(20);
        let mut run = Self {
            net,
            log,
            nodes: (0..slots).map(|_| None).collect(),
            limits,
            rng,
            zones: Vec::new(),
            closed: Vec::new(),
            ops: Vec::new(),
            next_key: 1,
            troubles,
            turmoil: false,
            fences,
            hesitant,
            alone: limits.alone_min != usize::MAX,
            trace,
        };
        for slot in 0..slots {
            run.start(slot);
        }
        run
    }

    fn start(&mut self, slot: Slot) {
        let mut node = Node::new(&self.net, &self.log, slot, self.limits);
        for peer in 0..self.nodes.len() {
            node.host.learn(peer);
        }
        self.nodes[slot] = Some(node);
        for from in 0..self.nodes.len() {
            self.open(slot, from);
        }
    }

    /// Opens a new region of `at` for `from`.
    fn open(&mut self, at: Slot, from: Slot) {
        let mut memory = vec![0; REGION_LEN].into_boxed_slice();
        let mut cuts: Vec<_> = (0..self.rng.below(4)).map(|_| self.rng.below(REGION_LEN)).collect();
        cuts.sort_unstable();
        let key = self.next_key;
        self.next_key += 1;
        let base = self.rng.pick(&[0, 0x7f00_0000_0000]);
        let region = Region {
            memory: lend(&mut memory, &cuts).as_device(self.rng.kinds()),
            base,
            remote_read: true,
            remote_write: true,
        };
        self.nodes[at].as_mut().unwrap().host.regions.insert(key, region).unwrap();
        let model = vec![0; REGION_LEN];
        let vague = self.turmoil;
        self.zones.push(Zone { at, from, key, base, memory, model, vague });
    }

    /// Closes the regions that `which` selects: no peer may access them any more.
    fn close(&mut self, which: impl Fn(&Zone) -> bool) {
        for i in (0..self.zones.len()).rev() {
            if !which(&self.zones[i]) {
                continue;
            }
            let Zone { at, key, memory, .. } = self.zones.swap_remove(i);
            if let Some(node) = &mut self.nodes[at] {
                let (id, _) = node.host.regions.whole(key).unwrap();
                node.host.regions.remove(key);
                node.engine.revoke(id);
            }
            for op in self.ops.iter_mut().filter(|op| op.key == key) {
                op.may_fail = true;
            }
            let copy = memory.to_vec();
            self.closed.push((memory, copy));
        }
    }

    /// Notes an event between two endpoints that ends operations.
    fn disturb(&mut self, a: Slot, b: Slot) {
        self.turmoil = true;
        let between = |from, to| (from, to) == (a, b) || (from, to) == (b, a);
        for zone in self.zones.iter_mut().filter(|zone| between(zone.from, zone.at)) {
            zone.vague = true;
        }
        for op in self.ops.iter_mut().filter(|op| between(op.from, op.to)) {
            op.may_fail = true;
        }
    }

    fn leave(&mut self, slot: Slot, how: Departure) {
        if self.trace {
            eprintln!("{slot} leaves: {how:?}");
        }
        self.nodes[slot] = None;
        self.net.borrow_mut().leave(slot, how);
        self.close(|zone| zone.at == slot);
        for other in 0..self.nodes.len() {
            self.disturb(slot, other);
        }
        for op in self.ops.iter_mut().filter(|op| op.from == slot) {
            op.done = true;
        }
    }

    fn overlaps_a_read(&self, from: Slot, to: Slot, ranges: &[(usize, usize)]) -> bool {
        let meet = |a: &(usize, usize), b: &(usize, usize)| a.0 < b.0 + b.1 && b.0 < a.0 + a.1;
        let reads = self.ops.iter().filter(|op| !op.done && op.right == Right::Read);
        reads
            .filter(|op| (op.from, op.to) == (from, to))
            .any(|op| op.ranges.iter().any(|a| ranges.iter().any(|b| meet(a, b))))
    }

    fn access(&mut self, from: Slot) {
        if self.hesitant {
            let said = self.rng.pick(&[None, None, Some(true)]);
            self.net.borrow_mut().weather.atomics = said;
        }
        let to = self.rng.below(self.nodes.len());
        let Ok(peer) = self.nodes[from].as_mut().unwrap().engine.connect(&address(to)) else {
            return;
        };
        let Some(zone) = self.zones.iter().position(|z| (z.at, z.from) == (to, from)) else {
            return;
        };
        let atomic = self.rng.percent(40).then(|| any_operation(&mut self.rng));
        let right = match atomic {
            Some((operation, form)) => right_of(operation, form),
            None => self.rng.pick(&[Right::Read, Right::Write]),
        };
        let count = if self.rng.percent(70) { 1 } else { self.rng.below(5) };
        let bcopy_max = self.net.borrow().weather.bcopy_max;
        // Two operands, with at most four ranges before them.
        let most = MAX_BYTES.min((bcopy_max - 4 * 24) / 2) / 4;
        let (longest, unit) = match atomic {
            Some((operation, _)) => (self.rng.pick(&[40, most]), operation.datatype.size()),
            None => (self.rng.pick(&[8, 64, 600, 3000, REGION_LEN / 4]), 1),
        };
        let aligned = self.rng.percent(70);
        let ranges: Vec<(usize, usize)> = (0..count)
            .map(|_| {
                let len = self.rng.below(longest + 1) / unit * unit;
                let at = self.rng.below(REGION_LEN - len + 1);
                (if aligned { at / unit * unit } else { at }, len)
            })
            .collect();
        if atomic.is_some() && ranges.iter().all(|(_, len)| *len == 0) {
            return;
        }
        // A read may see bytes that are written after it.
        if right.writes() && self.overlaps_a_read(from, to, &ranges) {
            return;
        }
        let len: usize = ranges.iter().map(|(_, len)| len).sum();
        let Zone { key, base, .. } = self.zones[zone];
        let mut remote = RemoteRanges::NONE;
        for (at, len) in &ranges {
            let addr = base + *at as u64;
            remote.push(RemoteRange { key, addr, len: *len as u64 }).unwrap();
        }
        let mut error = None;
        if self.rng.percent(5) && len > 0 {
            let bad = self.rng.pick(&[
                (RemoteRange { key: u64::MAX, addr: 0, len: len as u64 }, libc::EKEYREJECTED),
                (RemoteRange { key, addr: base + 30_001, len: len as u64 }, libc::EACCES),
                (RemoteRange { key, addr: base.wrapping_sub(1), len: len as u64 }, libc::EACCES),
            ]);
            remote = RemoteRanges::NONE;
            remote.push(bad.0).unwrap();
            error = Some(bad.1);
        }
        let at = self.rng.below(LEN_MAX);
        let mut memory = payload(at, len).to_vec();
        let mut operands = [0, 1].map(|_| payload(self.rng.below(LEN_MAX), len).to_vec());
        let mut cuts: Vec<_> = (0..self.rng.below(4)).map(|_| self.rng.below(len + 1)).collect();
        cuts.sort_unstable();
        let inject = right != Right::Read && self.rng.percent(20);
        let op = RmaOp {
            peer,
            right,
            local: lend(&mut memory, &cuts).as_device(self.rng.kinds()),
            remote,
            data: (right != Right::Read && self.rng.percent(30)).then(|| self.rng.next()),
            context: self.ops.len() as u64,
            report: crate::protocol::Report::new(true, 0),
            inject,
            delivered: self.rng.percent(20),
            fence: self.rng.percent(self.fences),
        };
        if self.trace {
            eprintln!("{from} to {to}: {atomic:?} {op:?} {ranges:?} error {error:?}");
        }
        self.net.borrow_mut().said_again = false;
        let node = self.nodes[from].as_mut().unwrap();
        let pending = node.engine.core.rma.pending().max(node.engine.core.sends.pending.len());
        // The reports during the call name the operation.
        self.ops.push(Pending {
            from,
            to,
            right,
            key,
            memory: Vec::new(),
            operands: [Vec::new(), Vec::new()],
            data: op.data,
            expected: None,
            error,
            may_fail: self.zones[zone].vague,
            fence: op.fence,
            accessed: false,
            done: false,
            ranges: if error.is_some() { Vec::new() } else { ranges.clone() },
        });
        let result = match atomic {
            None => node.engine.access(&op, &mut node.host),
            Some((operation, form)) => {
                let used = |list: SegmentList, used| if used { list } else { SegmentList::EMPTY };
                let RmaOp { peer, remote, data, context, report, inject, fence, .. } = op;
                let [operand, compare] = &mut operands;
                let (a, b) = (self.rng.kinds(), self.rng.kinds());
                let op = AtomicOp {
                    peer,
                    operation,
                    form,
                    operand: used(lend(operand, &cuts).as_device(a), operation.operands() > 0),
                    compare: used(lend(compare, &[]).as_device(b), form == Form::Compare),
                    result: used(op.local, form != Form::Base),
                    remote,
                    data,
                    context,
                    report,
                    inject,
                    fence,
                };
                node.engine.atomic(&op, &mut node.host)
            }
        };
        if self.trace {
            eprintln!("  {result:?}");
        }
        if result.is_err() {
            let pushed = self.ops.pop();
            assert!(!pushed.unwrap().done);
        }
        match result {
            Ok(()) => {
                let pending = self.ops.last_mut().unwrap();
                let zone = &mut self.zones[zone];
                if right == Right::Write && error.is_none() {
                    let mut rest = &memory[..];
                    for (at, len) in &ranges {
                        let (now, later) = rest.split_at(*len);
                        zone.model[*at..at + len].copy_from_slice(now);
                        rest = later;
                    }
                }
                if right == Right::Read && error.is_none() && !zone.vague {
                    let parts = ranges.iter().map(|(at, len)| &zone.model[*at..at + len]);
                    pending.expected = Some(parts.collect::<Vec<_>>().concat());
                }
                if let (Some((operation, form)), None) = (atomic, error) {
                    let mut old = vec![0; len];
                    let mut done = 0;
                    for (at, len) in &ranges {
                        operation.apply(
                            &lend(&mut zone.model[*at..at + len], &[]),
                            &operands[0][done..],
                            &operands[1][done..],
                            &mut old[done..done + len],
                        );
                        done += len;
                    }
                    if form != Form::Base && !zone.vague {
                        pending.expected = Some(old);
                    }
                }
                if inject {
                    operands.iter_mut().for_each(|bytes| bytes.fill(0xee));
                    if atomic.is_none() {
                        memory.fill(0xee);
                    }
                }
                (pending.memory, pending.operands) = (memory, operands);
            }
            Err(OpError::Again) => {
                let said = self.net.borrow().said_again;
                // A message waits for the flush behind direct writes that have completed.
                let waits =
                    pending > 0 || !self.nodes[from].as_ref().unwrap().engine.is_flushed(peer);
                let copied = self.nodes[from].as_ref().unwrap().engine.core.rma.copied;
                let full = pending >= self.limits.tx_max
                    || inject && waits && memory.len() > COPY_MAX
                    || inject && copied + 2 * memory.len() > self.limits.tx_max * COPY_MEAN;
                assert!(said || full, "refused for no reason");
            }
            Err(OpError::Error(e)) => assert!([libc::EPIPE, libc::ECONNREFUSED].contains(&e)),
        }
        self.end_call();
    }

    fn progress(&mut self, at: Slot) -> usize {
        let node = self.nodes[at].as_mut().unwrap();
        let moved = node.progress();
        node.check_rest();
        self.end_call();
        moved
    }

    fn end_call(&mut self) {
        let entries = std::mem::take(&mut *self.log.borrow_mut());
        for entry in entries {
            if self.trace {
                eprintln!("    {entry:?}");
            }
            match entry.what {
                What::Completed(c) => self.ended(entry.at, c.direction, c.context, None),
                What::Failed(f) => {
                    let c = f.completion;
                    self.ended(entry.at, c.direction, c.context, Some((f.error, f.cause)));
                }
                What::Accessed { right, len, data, source } => {
                    self.accessed(entry.at, right, len, data, source);
                }
                _ => {}
            }
        }
    }

    fn ended(&mut self, at: Slot, how: Direction, context: u64, error: Option<(i32, Cause)>) {
        let (from, to) = (self.ops[context as usize].from, self.ops[context as usize].to);
        // The target's report of an operation that failed may have passed for another one like it.
        let unsure = self.ops.iter().any(|op| op.may_fail && (op.from, op.to) == (from, to));
        let op = &mut self.ops[context as usize];
        assert!(op.from == at && !op.done, "operation {context} ends twice");
        let wanted = match op.right {
            Right::Read => Direction::Read,
            Right::Write => Direction::Write,
            Right::Update => Direction::Update,
            Right::Exchange | Right::Fetch => Direction::Fetch,
        };
        assert_eq!(how, wanted);
        op.done = true;
        match (error, op.error) {
            (None, None) => {
                let alone = op.data.is_none() && !op.right.is_atomic() && self.alone;
                let seen = op.accessed || unsure || alone;
                assert!(seen, "operation {context}: the target did not see it");
                if let Some(expected) = op.expected.as_ref().filter(|_| !op.may_fail) {
                    assert!(op.memory == *expected, "operation {context} read something else");
                }
            }
            (Some((found, _)), Some(wanted)) if found == wanted => {}
            (Some((found, _)), _) => {
                assert!(op.may_fail, "operation {context} fails with {found}");
                let zones = self.zones.iter_mut();
                zones.filter(|z| (z.at, z.from) == (to, from)).for_each(|zone| zone.vague = true);
            }
            (None, Some(_)) => panic!("operation {context} succeeds"),
        }
    }

    fn accessed(&mut self, at: Slot, right: Right, len: usize, data: Option<u64>, by: u64) {
        let ours = |op: &Pending| source(op.from) == by && op.to == at && op.error.is_none();
        let waits = |op: &Pending| ours(op) && op.right == right && !op.accessed && !op.done;
        let same = |op: &Pending| op.len() == len && op.data == data;
        // All but reads are reported in the order in which they were started.
        let strict = |op: &Pending| right != Right::Read && !op.may_fail;
        let found = loop {
            let next = |op: &Pending| waits(op) && (same(op) || strict(op));
            let Some(found) = self.ops.iter().position(next) else {
                return assert!(self.ops.iter().any(|op| ours(op) && op.may_fail));
            };
            let op = &self.ops[found];
            if same(op) {
                break found;
            }
            // Its report may have passed for that of one like it that failed.
            let like = |other: &Pending| {
                ours(other)
                    && other.right == right
                    && other.may_fail
                    && other.accessed
                    && (other.len(), other.data) == (op.len(), op.data)
            };
            let taken = self.ops[..found].iter().position(like);
            let taken = taken.unwrap_or_else(|| panic!("operation {found} is overtaken"));
            (self.ops[taken].accessed, self.ops[found].accessed) = (false, true);
        };
        self.ops[found].accessed = true;
        let Pending { fence, may_fail, .. } = self.ops[found];
        if fence && !may_fail {
            let before = self.ops[..found].iter().find(|op| ours(op) && !op.done && !op.may_fail);
            assert!(before.is_none(), "operation {found} does not wait");
        }
    }

    fn trouble(&mut self) {
        let slot = self.rng.below(self.nodes.len());
        let other = self.rng.below(self.nodes.len());
        let how = self.rng.pick(&[
            Departure::Closed,
            Departure::Failed(Errno(libc::EHOSTDOWN)),
            Departure::Failed(Errno(libc::EPROTO)),
        ]);
        match self.rng.below(4) {
            _ if self.nodes[slot].is_none() => self.start(slot),
            0 => {
                self.leave(slot, how);
                if self.rng.percent(50) {
                    self.start(slot);
                }
            }
            1 => {
                self.net.borrow_mut().break_link(slot, other, how);
                self.disturb(slot, other);
            }
            _ => {
                if self.trace {
                    eprintln!("{slot} closes its region for {other}");
                }
                self.close(|zone| (zone.at, zone.from) == (slot, other));
                self.open(slot, other);
            }
        }
    }

    fn step(&mut self) {
        if self.troubles && self.rng.percent(2) {
            self.trouble();
        }
        let at = self.rng.below(self.nodes.len());
        if self.nodes[at].is_none() {
            return;
        }
        if self.rng.percent(50) {
            self.access(at);
        } else {
            self.progress(at);
        }
    }

    /// Runs all endpoints until nothing moves. Then the memory must be as in the model.
    fn settle(&mut self) {
        let weather = self.net.borrow().weather.again_percent;
        self.net.borrow_mut().weather.again_percent = 0;
        self.net.borrow_mut().weather.atomics = Some(true);
        let mut quiet = 0;
        for round in 0.. {
            assert!(round < 200_000, "the endpoints never rest");
            let mut moved = 0;
            for at in 0..self.nodes.len() {
                if self.nodes[at].is_some() {
                    moved += self.progress(at);
                }
            }
            let busy = self.nodes.iter().flatten().any(|node| node.engine.core.rma.work() > 0);
            let calm = moved == 0 && !busy && self.net.borrow().is_idle();
            quiet = if calm { quiet + 1 } else { 0 };
            if quiet == 3 {
                break;
            }
        }
        self.net.borrow_mut().weather.again_percent = weather;
        self.turmoil = false;
        for (i, op) in self.ops.iter().enumerate() {
            assert!(op.done, "operation {i} never ends");
        }
        for zone in &mut self.zones {
            if zone.vague {
                zone.model.copy_from_slice(&zone.memory);
                zone.vague = false;
            }
            assert!(zone.model[..] == zone.memory[..], "{} for {}", zone.at, zone.from);
        }
        for (memory, copy) in &self.closed {
            assert!(memory[..] == copy[..], "a closed region was written to");
        }
        for node in self.nodes.iter().flatten() {
            node.assert_empty();
            assert!(node.engine.counts().dropped == 0 || self.troubles);
        }
    }
}

/// Prints the seed of a case that fails.
struct Guard(u64);

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("repeat with UDRV_TEST_CASES=1 UDRV_TEST_SEED={}", self.0);
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn random_run(rng: Rng) -> Run {
    let mut run = Run::new(rng);
    for _ in 0..1 + run.rng.below(3) {
        for _ in 0..20 + run.rng.below(150) {
            run.step();
        }
        run.settle();
    }
    run
}

#[cfg(fuzzing)]
#[test]
fn fuzz_accesses() {
    crate::fuzzing::run(|input| drop(random_run(Rng::scripted(input))));
}

#[test]
fn random_accesses_agree_with_the_model() {
    let first = number("UDRV_TEST_SEED").unwrap_or(0);
    let cases = number("UDRV_TEST_CASES").unwrap_or(CASES);
    let (mut ops, mut alone) = (0, 0);
    for seed in first..first + cases {
        let _guard = Guard(seed);
        let run = random_run(Rng::new(seed));
        ops += run.ops.len();
        let counts = run.nodes.iter().flatten().map(|node| node.engine.counts().reached_bytes);
        alone += counts.sum::<u64>();
    }
    eprintln!("{cases} cases, {ops} operations, {alone} bytes moved without the target");
    assert!(alone > 0 || cases < CASES);
}
