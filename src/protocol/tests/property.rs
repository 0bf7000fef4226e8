//! Random operations of several endpoints over a random network, checked against the oracle.
//!
//! `UDRV_TEST_CASES=n` runs more cases. `UDRV_TEST_SEED=s` begins at another seed (with `UDRV_TEST_CASES=1` it repeats
//! one case). `UDRV_TEST_TRACE=1` prints each step.

use super::fixture::{Node, lend};
use super::oracle::{HARD_ERROR, Message, Oracle, Posting, Sending, Side};
use super::rng::{LEN_MAX, Rng};
use super::sim::{Entry, Expected, Log, Net, Reach, SharedNet, Slot, Weather, What, address};
use super::sim_share::Teamwork;
use super::sim_window::Glazing;
use crate::protocol::arrivals::{Active, Receiver};
use crate::protocol::index_list::Key;
use crate::protocol::packet::Envelope;
use crate::protocol::send::COPY_MEAN;
use crate::protocol::sends::Sender;
use crate::protocol::{
    ANY_SOURCE, Direction, Limits, OpError, PeekAction, ReceiveOp, Report, SendOp,
};
use crate::sys::Errno;
use crate::transport::{Departure, Prepared};

const CASES: u64 = 4000;

/// What happens in a case: each case has another mixture.
#[derive(Clone, Copy, Debug)]
struct Habits {
    departures: bool,
    tagged: u64,
    directed: u64,
    long: u64,
    inject: u64,
    delivery: u64,
    fence: u64,
    multi: u64,
    peeks: u64,
    cancels: u64,
    full_queues: bool,
    strangers: bool,
}

impl Habits {
    fn draw(rng: &mut Rng) -> Self {
        let mut often = |from: &[u64]| rng.pick(from);
        Self {
            tagged: often(&[0, 50, 100]),
            directed: often(&[0, 30, 80]),
            long: often(&[0, 10, 40]),
            inject: often(&[0, 20, 50]),
            delivery: often(&[0, 20, 60]),
            fence: often(&[0, 0, 20]),
            multi: often(&[0, 10, 40]),
            peeks: often(&[0, 5, 20]),
            cancels: often(&[0, 3, 10]),
            departures: rng.percent(40),
            full_queues: rng.percent(30),
            strangers: rng.percent(30),
        }
    }
}

fn weather(rng: &mut Rng) -> Weather {
    let refusal = Reach::Fails { after: 2, errno: libc::EPERM };
    let hard = Reach::Fails { after: 1, errno: HARD_ERROR };
    // EFAULT although the memory exists, as its owner finds out.
    let fault = Reach::Fails { after: 1, errno: libc::EFAULT };
    let all = [Reach::Off, Reach::Later, Reach::On, Reach::Short, Reach::Shy, refusal, fault, hard];
    let one = rng.pick(&all);
    let put = all[..7].to_vec();
    let push_max = rng.pick(&[0, 0, 600, 5000, 1 << 20]);
    // Messages are sent unsolicited over a network, or within a node, where shorter ones go through rings.
    let node = push_max == 0 || push_max < 1 << 20 && rng.pick(&[false, true]);
    let (get, put) = match node {
        true => (
            rng.pick(&[&all[..1], &all[2..3], &[one], &all]).to_vec(),
            rng.pick(&[&all[..1], &all[2..3], &put]).to_vec(),
        ),
        _ => (vec![Reach::Off], vec![Reach::Off]),
    };
    let stream_max = if node { 0 } else { rng.pick(&[0, 500, 5000, 1 << 20]) };
    Weather {
        queue_len: rng.pick(&[1, 2, 8, 64]),
        short_max: rng.pick(&[104, 128, 200]),
        bcopy_max: rng.pick(&[500, 2000, 9000]),
        announces_room: !node && rng.pick(&[false, true]),
        short: false,
        again_percent: rng.pick(&[0, 0, 5, 30]),
        batch: rng.pick(&[1, 4, 32]),
        lies: false,
        stream_max,
        stream_breaks: rng.pick(&[0, 5, 100]),
        windows: glazing(rng, node),
        teamwork: teamwork(rng),
        push_max,
        // Streams can break, so they do not outlive their sender.
        outlives: stream_max == 0 && rng.pick(&[false, true]),
        get,
        put,
        atomics: Some(true),
        lonely: Vec::new(),
    }
}

fn teamwork(rng: &mut Rng) -> Teamwork {
    Teamwork {
        min: rng.pick(&[0, 200, 2000]),
        unit: rng.pick(&[1, 90, 700]),
        late: rng.pick(&[0, 30, 90]),
        arrives: rng.pick(&[10, 60]),
        failures: rng.pick(&[0, 3, 30]),
    }
}

fn glazing(rng: &mut Rng, node: bool) -> Glazing {
    use Prepared::{Later, No, Ready};
    Glazing {
        max: if node { 0 } else { rng.pick(&[0, 700, 700, 5000, 1 << 20]) },
        min: rng.pick(&[1, 300, 3000]),
        count: rng.pick(&[1, 3, 64]),
        begin: rng.pick(&[&[Ready][..], &[Later], &[No, Later, Ready, Ready]]).to_vec(),
        changes: rng.pick(&[5, 50]),
        breaks: rng.pick(&[0, 0, 5, 50, 200]),
        ends: rng.pick(&[0, 30]),
        lend_refusals: rng.pick(&[0, 0, 5, 50]),
        write_refusals: rng.pick(&[0, 0, 3, 30]),
        waits: rng.pick(&[0, 0, 60, 90]),
        offers: rng.pick(&[0, 0, 50, 100]),
        reads: rng.pick(&[false, false, true]),
        rails: rng.pick(&[1, 1, 2]),
        ..Glazing::none()
    }
}

fn limits(rng: &mut Rng, weather: &Weather) -> Limits {
    Limits {
        eager_max: rng.pick(&[0, 64, weather.bcopy_max / 2, weather.bcopy_max]),
        tx_max: rng.pick(&[1, 3, 16]),
        rx_max: rng.pick(&[1, 4, 32]),
        past_caches_min: 2 * weather.bcopy_max,
        unexpected_max: rng.pick(&[0, 1000, 1 << 20]),
        bulk_chunk: rng.pick(&[3000, 20_000, 1 << 20]),
        alone_min: usize::MAX,
        contexts: 1,
        shares_receives: false,
        traced: rng.pick(&[false, false, true]),
    }
}

struct Run {
    net: SharedNet,
    log: Log,
    nodes: Vec<Option<Node>>,
    limits: Limits,
    oracle: Oracle,
    rng: Rng,
    habits: Habits,
    next_context: u64,
    trace: bool,
}

macro_rules! trace {
    ($run:expr, $($arg:tt)*) => {
        if $run.trace {
            eprintln!($($arg)*);
        }
    };
}

impl Run {
    fn new(mut rng: Rng) -> Self {
        let habits = Habits::draw(&mut rng);
        let weather = weather(&mut rng);
        let limits = limits(&mut rng, &weather);
        let slots = 2 + rng.below(3);
        let trace = std::env::var_os("UDRV_TEST_TRACE").is_some();
        if trace {
            eprintln!("{slots} endpoints, {habits:?}, {weather:?}, {limits:?}");
        }
        let (net, log) = Net::new(rng.next(), slots, weather);
        let mut run = Self {
            net,
            log,
            nodes: (0..slots).map(|_| None).collect(),
            limits,
            oracle: Oracle::default(),
            rng,
            habits,
            next_context: 1,
            trace,
        };
        run.oracle.sides.resize_with(slots, Side::default);
        for slot in 0..slots {
            run.start(slot);
        }
        run
    }

    fn start(&mut self, slot: Slot) {
        trace!(self, "{slot} starts");
        let mut node = Node::new(&self.net, &self.log, slot, self.limits);
        let side = &mut self.oracle.sides[slot];
        side.eager_max = self.limits.eager_max;
        for peer in 0..self.nodes.len() {
            if !self.habits.strangers || self.rng.percent(60) {
                node.host.learn(peer);
                side.known.insert(peer);
            }
        }
        self.nodes[slot] = Some(node);
    }

    fn leave(&mut self, slot: Slot, departure: Departure) {
        trace!(self, "{slot} leaves: {departure:?}");
        self.nodes[slot] = None;
        self.net.borrow_mut().leave(slot, departure);
        self.oracle.forget(slot);
    }

    fn node(&mut self, slot: Slot) -> &mut Node {
        self.nodes[slot].as_mut().unwrap()
    }

    /// The call on `at` has returned: checks its reports and the state left inside.
    fn end_call(&mut self, at: Slot) {
        let entries = std::mem::take(&mut *self.log.borrow_mut());
        for entry in entries {
            trace!(self, "    {entry:?}");
            self.check_returned(&entry);
            self.oracle.apply(&entry, &self.net.borrow());
        }
        self.oracle.end_call(at);
        let Self { nodes, oracle, .. } = self;
        let core = &mut nodes[at].as_mut().unwrap().engine.core;
        let net = self.net.borrow();
        let held = |token| net.held(at).any(|held| held.token == token);
        // A chunk that is advertised is not complete, and only its sender may write it.
        let out =
            || core.arrivals.chunks.list.iter().filter(|(_, lent)| !lent.filled && !lent.is_ours());
        assert_eq!(out().count(), net.held(at).count(), "windows of {at}");
        let put = |active: &Active| matches!(active.scheme, Receiver::Put(_));
        for (token, lent) in out() {
            let active = core.arrivals.active.get(lent.message);
            let right = active.is_some_and(|a| put(a) && a.message.received <= lent.offset);
            assert!(held(token.to_wire()) && right, "{lent:?} of {active:?}");
        }
        for (token, part) in net.reading(at) {
            let lent = core.arrivals.chunks.list.get(Key::from_wire(token));
            let active = lent.and_then(|lent| core.arrivals.active.get(lent.message));
            let right =
                active.is_some_and(|a| put(a) && part.len() <= a.message.want - a.message.received);
            assert!(right, "{lent:?} of {active:?} is read");
        }
        let side = &oracle.sides[at];
        assert_eq!(core.matching.own.posted.len(), side.posted_len());
        assert_eq!(
            core.matching.unexpected.len() + core.matching.claimed.len(),
            side.waiting_len()
        );
        let eager = core.matching.bytes - core.matching.beside_eager();
        assert_eq!(eager, side.unexpected_bytes(&oracle.messages));
        assert!(
            core.sends.pending.len() <= core.limits.tx_max
                && core.matching.own.posted.len() <= core.limits.rx_max
        );
    }

    /// Asserts that no buffer of a receive that has ended is advertised.
    fn check_returned(&self, entry: &Entry) {
        let c = match entry.what {
            What::Completed(c) => c,
            What::Failed(f) => f.completion,
            _ => return,
        };
        let (from, to) = (c.buffer, c.buffer + c.len as u64);
        if c.direction == Direction::Receive {
            for held in self.net.borrow().held(entry.at) {
                let at = held.part.first_addr();
                assert!(at >= to || at + held.part.len() as u64 <= from, "{held:?} in {c:?}");
            }
            for (token, part) in self.net.borrow().reading(entry.at) {
                let at = part.first_addr();
                assert!(at >= to || at + part.len() as u64 <= from, "{token:#x} in {c:?}");
            }
        }
    }

    fn progress(&mut self, at: Slot) -> usize {
        trace!(self, "{at} progresses");
        let moved = self.node(at).progress();
        self.node(at).check_rest();
        self.end_call(at);
        let bytes = self.node(at).engine.core.matching.bytes;
        let pressed = self.net.borrow().is_pressed(at);
        assert!(pressed || bytes <= self.limits.unexpected_max, "no pressure at {bytes}");
        assert!(!pressed || bytes > self.limits.unexpected_max / 2, "pressure at {bytes}");
        moved
    }

    fn message_len(&mut self) -> usize {
        let Limits { eager_max, bulk_chunk, .. } = self.limits;
        let Weather { short_max, bcopy_max, .. } = self.net.borrow().weather;
        if self.rng.percent(self.habits.long) {
            return match self.rng.below(8) {
                0 => self.rng.below(LEN_MAX),
                1 => (bulk_chunk + self.rng.below(3)).saturating_sub(1).min(LEN_MAX),
                _ => self.rng.below(20_000),
            };
        }
        match self.rng.below(6) {
            0 => 0,
            1 => (eager_max + self.rng.below(3)).saturating_sub(1),
            2 => short_max - self.rng.below(40),
            3 => bcopy_max + self.rng.below(2),
            4 => self.rng.below(3000),
            _ => self.rng.below(64),
        }
    }

    /// Where to cut a buffer into segments.
    fn cuts(&mut self, len: usize) -> Vec<usize> {
        if self.rng.percent(70) {
            return Vec::new();
        }
        let mut cuts: Vec<_> = (0..self.rng.below(4)).map(|_| self.rng.below(len + 1)).collect();
        cuts.sort_unstable();
        cuts
    }

    fn tag(&mut self) -> u64 {
        self.rng.pick(&[0, 1, 2, 3, 1 << 63, (1 << 63) | 1])
    }

    fn send(&mut self, at: Slot) {
        let to = self.rng.below(self.nodes.len());
        let Ok(peer) = self.node(at).engine.connect(&address(to)) else {
            let net = self.net.borrow();
            assert!(net.said_again || !net.is_alive(to));
            return;
        };
        let tagged = self.rng.percent(self.habits.tagged);
        let tag = if tagged { self.tag() } else { 0 };
        let data = self.rng.percent(30).then(|| self.rng.next());
        let envelope = Envelope { tagged, tag, data, rx: 0 };
        let (len, from) = (self.message_len(), self.rng.below(LEN_MAX));
        let context = self.oracle.next_send();
        let mut message = Message::new(at, to, envelope, from, len);
        message.report = self.rng.percent(80);
        message.inject = self.rng.percent(self.habits.inject);
        message.delivery = self.rng.percent(self.habits.delivery);
        message.fence = self.rng.percent(self.habits.fence);
        let cuts = self.cuts(len);
        let payload = lend(&mut message.memory.0, &cuts).as_device(self.rng.kinds());
        let Message { report, inject, delivery, fence, .. } = message;
        let op = SendOp {
            peer,
            rx: 0,
            payload,
            tagged,
            tag,
            data,
            context,
            report: Report::new(report, 0),
            inject,
            delivery,
            transmitted: false,
            fence,
        };
        let index = self.oracle.messages.len();
        trace!(self, "{at} sends message {index} to {to}: {len} B {op:?}");
        self.oracle.messages.push(message);
        let waiting = {
            let mut net = self.net.borrow_mut();
            let waiting = net.unsent(at, to);
            net.expect(at, to, Expected { message: index, envelope, at: from, len });
            net.said_again = false;
            waiting
        };
        let room = self.node(at).host.room;
        let core = &self.node(at).engine.core;
        let (pending, copied) = (core.sends.pending.len(), core.sends.copied);
        let result = self.node(at).send(&op);
        trace!(self, "  {result:?}");
        let message = &mut self.oracle.messages[index];
        if result.is_ok() {
            message.sending = Sending::Pending;
            if inject {
                message.memory.0.fill(0);
            }
        } else {
            message.sending = Sending::Void;
            self.net.borrow_mut().forget(at, to, index);
        }
        match result {
            Ok(()) => {
                let unsent = self.net.borrow().unsent(at, to);
                assert!(fence || waiting > 0 || unsent == 0, "held back for no reason");
            }
            Err(OpError::Again) => {
                let Limits { tx_max, .. } = self.limits;
                let full =
                    pending >= tx_max || inject && copied > 0 && copied + len > tx_max * COPY_MEAN;
                assert!(!room || full || self.net.borrow().said_again, "refused for no reason");
            }
            Err(OpError::Error(e)) => assert!([libc::EPIPE, libc::ECONNREFUSED].contains(&e)),
        }
        self.end_call(at);
        let done = self.oracle.messages[index].sending != Sending::Pending;
        assert!(done || !inject || delivery, "an injected send pends");
    }

    fn posting(&mut self, at: Slot, peek: bool) -> Posting {
        let tagged = self.rng.percent(self.habits.tagged);
        let mut ignore = if tagged { self.rng.pick(&[0, 0, 1, 3, u64::MAX]) } else { u64::MAX };
        if self.rng.percent(30) {
            ignore = u64::MAX;
        }
        let tag = if tagged { self.tag() } else { 0 };
        let peer = self.rng.below(self.nodes.len());
        let known = self.node(at).host.source_of_slot(peer);
        let source = if self.rng.percent(self.habits.directed) { known } else { ANY_SOURCE };
        let multi = !peek && self.rng.percent(self.habits.multi);
        let multi_min = multi.then(|| self.rng.pick(&[1, 64, 1000]));
        let report = self.rng.percent(80);
        self.next_context += 1;
        Posting { context: self.next_context, tagged, tag, ignore, source, report, multi_min }
    }

    /// The operation for `posting`, with a new buffer of `len` bytes.
    fn operation(&mut self, at: Slot, posting: &Posting, len: usize) -> ReceiveOp {
        let cuts = if posting.multi_min.is_some() { Vec::new() } else { self.cuts(len) };
        let device = self.rng.kinds();
        if device != 0 {
            self.oracle.sides[at].on_device.insert(posting.context);
        }
        let memory = self.oracle.sides[at].lend(posting.context, len);
        let Posting { context, tagged, tag, ignore, source, report, multi_min } = *posting;
        let segments = lend(memory, &cuts).as_device(device);
        let report = Report::new(report, 0);
        ReceiveOp { segments, tagged, tag, ignore, source, context, report, multi_min }
    }

    fn receive(&mut self, at: Slot) {
        let posting = self.posting(at, false);
        let len = match posting.multi_min {
            Some(_) => 1 + self.message_len() * 3,
            None if self.rng.percent(20) => self.message_len(),
            None => 30_000 + self.message_len(),
        };
        self.post(at, &posting, len);
    }

    fn post(&mut self, at: Slot, posting: &Posting, len: usize) {
        let op = self.operation(at, posting, len);
        trace!(self, "{at} receives {len} B {posting:?}");
        let full = self.oracle.sides[at].posted_len() >= self.limits.rx_max;
        let result = self.node(at).receive(&op);
        assert_eq!(result, if full { Err(OpError::Again) } else { Ok(()) });
        let Oracle { sides, messages, .. } = &mut self.oracle;
        if full {
            sides[at].unlend(posting.context);
        } else {
            sides[at].receive(messages, posting);
        }
        self.end_call(at);
    }

    fn peek(&mut self, at: Slot) {
        let posting = self.posting(at, true);
        let op = self.operation(at, &posting, 0);
        let action = self.rng.pick(&[PeekAction::Look, PeekAction::Claim, PeekAction::Discard]);
        trace!(self, "{at} peeks {action:?} {posting:?}");
        let node = self.nodes[at].as_mut().unwrap();
        node.engine.peek(&op, action, &mut node.host).unwrap();
        let Oracle { sides, messages, .. } = &mut self.oracle;
        sides[at].unlend(posting.context);
        sides[at].peek(messages, &posting, action);
        self.end_call(at);
    }

    fn receive_claimed(&mut self, at: Slot) {
        let claimed = self.oracle.sides[at].claimed();
        if claimed.is_empty() {
            return;
        }
        let posting = self.rng.pick(&claimed);
        let discard = self.rng.percent(30);
        let len = if discard { 0 } else { self.rng.pick(&[10, 40_000, LEN_MAX]) };
        let op = self.operation(at, &posting, len);
        trace!(self, "{at} takes the claimed message of {posting:?}, discard {discard}");
        let node = self.nodes[at].as_mut().unwrap();
        node.engine.receive_claimed(&op, discard, &mut node.host).unwrap();
        let Oracle { sides, messages, .. } = &mut self.oracle;
        if discard {
            sides[at].unlend(posting.context);
        }
        sides[at].receive_claimed(messages, &posting, discard);
        self.end_call(at);
    }

    fn cancel(&mut self, at: Slot, context: u64) {
        trace!(self, "{at} cancels {context}");
        let node = self.nodes[at].as_mut().unwrap();
        let found = node.engine.cancel(0, context, &mut node.host);
        assert_eq!(found, self.oracle.sides[at].cancel(context));
        self.end_call(at);
    }

    fn trouble(&mut self) {
        let slot = self.rng.below(self.nodes.len());
        let other = self.rng.below(self.nodes.len());
        let died = Departure::Failed(Errno(libc::EHOSTDOWN));
        let broke = Departure::Failed(Errno(libc::EPROTO));
        if self.nodes[slot].is_none() {
            self.start(slot);
        } else if self.rng.percent(40) {
            trace!(self, "the link of {slot} and {other} breaks");
            let how = self.rng.pick(&[Departure::Closed, broke]);
            self.net.borrow_mut().break_link(slot, other, how);
        } else {
            let how = self.rng.pick(&[Departure::Closed, died, broke]);
            self.leave(slot, how);
            if self.rng.percent(50) {
                self.start(slot);
            }
        }
    }

    fn step(&mut self) {
        if self.habits.departures && self.rng.percent(3) {
            self.trouble();
        }
        let at = self.rng.below(self.nodes.len());
        if self.nodes[at].is_none() {
            return;
        }
        if self.habits.full_queues && self.rng.percent(10) {
            let room = self.rng.percent(50);
            self.node(at).host.room = room;
        }
        if self.habits.strangers && self.rng.percent(2) {
            let peer = self.rng.below(self.nodes.len());
            self.node(at).host.learn(peer);
            self.oracle.sides[at].known.insert(peer);
        }
        if self.rng.percent(self.habits.cancels) {
            let context = 1 + self.rng.below(self.next_context as usize) as u64;
            let posted = self.oracle.sides[at].posted();
            let random = posted.is_empty() || self.rng.percent(30);
            let context = if random { context } else { self.rng.pick(&posted) };
            self.cancel(at, context);
        }
        if self.rng.percent(self.habits.peeks) {
            self.peek(at);
            if self.rng.percent(70) {
                self.receive_claimed(at);
            }
        }
        match self.rng.below(10) {
            0..=3 => drop(self.progress(at)),
            4..=6 => self.send(at),
            _ => self.receive(at),
        }
    }

    /// Runs all endpoints until nothing can move.
    fn settle(&mut self) {
        self.net.borrow_mut().weather.again_percent = 0;
        let mut quiet = 0;
        for _ in 0..200_000 {
            let mut moved = 0;
            for at in 0..self.nodes.len() {
                if let Some(node) = &mut self.nodes[at] {
                    node.host.room = true;
                    moved += self.progress(at);
                }
            }
            let busy = self.nodes.iter().flatten().any(|node| {
                // Unsolicited bytes may have to wait for memory of the receiver.
                let core = &node.engine.core;
                let waits = |key| match core.sends.pending.get(key).map(|tx| &tx.scheme) {
                    Some(Sender::Push(push)) => push.is_unsolicited(),
                    _ => false,
                };
                !(core.outbox.is_empty()
                    && core.arrivals.pulls.is_empty()
                    && core.sends.due.is_empty()
                    && core.arrivals.chunks.due.is_empty()
                    && core.sends.assists.is_empty()
                    && core.sends.streams.iter().all(|key| waits(*key)))
            });
            let calm = moved == 0 && !busy && self.net.borrow().is_idle();
            quiet = if calm { quiet + 1 } else { 0 };
            if quiet == 3 {
                self.oracle.check_at_rest();
                return;
            }
        }
        panic!("the endpoints never rest");
    }

    /// Receives all waiting messages, until there are none.
    fn finish(&mut self) {
        self.settle();
        for _ in 0..1000 {
            let mut waiting = 0;
            for at in 0..self.nodes.len() {
                if self.nodes[at].is_none() {
                    continue;
                }
                for context in self.oracle.sides[at].posted() {
                    self.cancel(at, context);
                }
                waiting += self.oracle.sides[at].waiting_len();
                self.receive_claimed(at);
                for tagged in [true, false] {
                    for _ in 0..self.oracle.sides[at].unexpected()[usize::from(tagged)] {
                        let posting = self.posting(at, true);
                        let all =
                            Posting { tagged, ignore: u64::MAX, source: ANY_SOURCE, ..posting };
                        let len = self.rng.pick(&[0, 5000, LEN_MAX]);
                        self.post(at, &all, len);
                    }
                }
            }
            self.settle();
            if waiting == 0 {
                return self.check_empty();
            }
        }
        panic!("messages without end");
    }

    fn check_empty(&self) {
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            self.oracle.check_spent(at);
            node.assert_empty();
            let dropped = node.engine.counts().dropped;
            // Bytes that are sent again after a stream broke may be there already.
            let breaks = self.net.borrow().weather.stream_breaks > 0;
            assert!(dropped == 0 || self.habits.departures || breaks, "{dropped} packets dropped");
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
    for _ in 0..20 + run.rng.below(200) {
        run.step();
    }
    run.finish();
    run
}

#[cfg(fuzzing)]
#[test]
fn fuzz_operations() {
    crate::fuzzing::run(|input| drop(random_run(Rng::scripted(input))));
}

#[test]
fn random_operations_agree_with_the_oracle() {
    let first = number("UDRV_TEST_SEED").unwrap_or(0);
    let cases = number("UDRV_TEST_CASES").unwrap_or(CASES);
    let (mut messages, mut reports) = (0, 0);
    let mut windows = [0; 4];
    let mut assisted = 0;
    for seed in first..first + cases {
        let _guard = Guard(seed);
        let run = random_run(Rng::new(seed));
        messages += run.oracle.messages.len();
        reports += run.oracle.reports;
        for counts in run.nodes.iter().flatten().map(|node| node.engine.counts()) {
            assisted += counts.assisted_bytes;
            let now =
                [counts.window_bytes, counts.windows_lost, counts.declined, counts.read_bytes];
            windows.iter_mut().zip(now).for_each(|(sum, n)| *sum += n);
        }
    }
    eprintln!("{cases} cases, {messages} sends, {reports} reports");
    eprintln!("{assisted} bytes written by senders of messages that were shared");
    assert!(cases < CASES || assisted > 0, "nothing was shared");
    eprintln!("windows: {windows:?} bytes, lost, declined, bytes read");
    assert!(cases < CASES || windows.iter().all(|n| *n > 0), "no windows: {windows:?}");
}
