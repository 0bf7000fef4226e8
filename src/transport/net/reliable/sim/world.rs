//! The whole simulation: nodes, network, and events. [`World::run`] goes on until every message has arrived or its loss
//! was reported, and checks that nothing else happens.

use super::app::{Flow, Report};
use super::clock::Event;
use super::network::{Network, Slot, slot_of};
use super::node::{Habits, Node};
use super::oracle::{Oracle, UNDER_WAY_NS};
use super::outcome::Outcome;
use super::rng::Rng;
use super::weather::{Cut, Weather};
use crate::transport::Departure;

/// Time between two checks of everything, nanoseconds.
const INSPECT_NS: u64 = 5_000_000;
/// Time beyond the peers' timeout within which an endpoint must report a lost peer, or deliver, nanoseconds.
const SLACK_NS: u64 = 6_000_000_000;
/// The same where most attempts fail.
const FRAGILE_NS: u64 = 100_000_000_000;
/// How long an endpoint that closes waits until its messages have arrived, nanoseconds.
const LINGER_NS: u64 = 10_000_000_000;

/// An event at a slot.
#[derive(Clone, Debug)]
pub(super) enum Act {
    Start {
        slot: Slot,
        habits: Habits,
        flows: Vec<Flow>,
    },
    /// The process dies; with `refuses`, its system sends ICMP errors to its peers.
    Crash {
        slot: Slot,
        refuses: bool,
    },
    /// It closes its endpoint once its messages have arrived; `abrupt`: without waiting.
    Close {
        slot: Slot,
        abrupt: bool,
    },
    /// It takes no turns until then; `stopped`: neither does its background thread.
    Pause {
        slot: Slot,
        until: u64,
        stopped: bool,
    },
    Pressure {
        slot: Slot,
        on: bool,
    },
    /// An outsider sends `count` datagrams, now and every `every_ns`, until then.
    Attack {
        count: u32,
        every_ns: u64,
        until: u64,
    },
}

/// A time in which a slot took no turns.
#[derive(Clone, Copy, Debug)]
struct Pause {
    slot: Slot,
    start: u64,
    end: u64,
    stopped: bool,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) network: Network,
    pub(super) oracle: Oracle,
    pub(super) nodes: Vec<Option<Box<Node>>>,
    /// Whether the system of an empty slot refuses what arrives.
    refuses: Vec<bool>,
    rng: Rng,
    acts: Vec<Act>,
    /// From here on every slot can reach every other, and there are no further events.
    pub(super) horizon: u64,
    /// Losses are so heavy that live peers may be declared dead.
    pub(super) fragile: bool,
    closing: Vec<(Slot, u32, u64)>,
    pauses: Vec<Pause>,
    pub(super) reports: Vec<Report>,
    outcome: Outcome,
    progress: (u64, u64),
    timeout_ns: u64,
}

impl World {
    pub(super) fn new(seed: u64, slots: usize, weather: Weather) -> Self {
        let mut rng = Rng::new(seed);
        Self {
            network: Network::new(rng.next(), slots, weather),
            oracle: Oracle::new(rng.next()),
            nodes: (0..slots).map(|_| None).collect(),
            refuses: vec![false; slots],
            rng,
            acts: Vec::new(),
            horizon: 0,
            fragile: false,
            closing: Vec::new(),
            pauses: Vec::new(),
            reports: Vec::new(),
            outcome: Outcome::default(),
            progress: (0, 0),
            timeout_ns: 0,
        }
    }

    /// `act` happens at `at`.
    pub(super) fn plan(&mut self, at: u64, act: Act) {
        if let Act::Start { habits, .. } = &act {
            self.timeout_ns = self.timeout_ns.max(habits.peer_timeout_ns);
        }
        let end = match &act {
            Act::Pause { until, .. } | Act::Attack { until, .. } => *until,
            _ => at,
        };
        self.disturb(end);
        self.network.clock.at(at, Event::Act(self.acts.len() as u32));
        self.acts.push(act);
    }

    fn disturb(&mut self, until: u64) {
        self.horizon = self.horizon.max(until);
        self.oracle.calm_from = self.horizon;
    }

    pub(super) fn cut(&mut self, cut: Cut) {
        self.disturb(cut.end);
        self.network.cuts.push(cut);
    }

    pub(super) fn start(&mut self, slot: Slot, habits: Habits, flows: Vec<Flow>) {
        self.timeout_ns = self.timeout_ns.max(habits.peer_timeout_ns);
        self.end(slot, false, false);
        let now = self.network.clock.now;
        let first = flows.iter().map(|f| f.next_at).min();
        let mut node = Node::new(slot, habits, flows, &mut self.rng, &mut self.oracle, now);
        if let Some(first) = first {
            node.plan(&mut self.network, first);
        }
        self.network.in_parts[slot as usize] = false;
        self.nodes[slot as usize] = Some(Box::new(node));
    }

    /// The incarnation at `slot` ends.
    fn end(&mut self, slot: Slot, closed: bool, refuses: bool) {
        self.refuses[slot as usize] = refuses;
        let Some(mut node) = self.nodes[slot as usize].take() else { return };
        let life = &mut self.oracle.lives[node.app.life as usize];
        (life.ended, life.closed) = (self.network.clock.now, closed);
        if closed {
            node.close(&mut self.network);
        }
        self.outcome.tally(&node);
        node.bury(&mut self.network);
    }

    /// Runs until everything is settled.
    pub(super) fn run(&mut self) -> Outcome {
        self.network.clock.at(INSPECT_NS, Event::Inspect);
        while let Some(event) = self.network.clock.next() {
            if event == Event::Inspect {
                if self.inspect() {
                    break;
                }
                self.network.clock.at(self.network.clock.now + INSPECT_NS, Event::Inspect);
            } else {
                self.handle(event);
            }
        }
        self.finish()
    }

    /// Runs until the time `until`.
    pub(super) fn run_until(&mut self, until: u64) {
        self.network.clock.at(until, Event::Inspect);
        while let Some(event) = self.network.clock.next() {
            if event == Event::Inspect {
                break;
            }
            self.handle(event);
        }
    }

    #[inline]
    fn handle(&mut self, event: Event) {
        let Self { network, oracle, nodes, .. } = self;
        match event {
            Event::Arrive(id) => {
                let to = network.datagram(id).to as usize;
                match &mut nodes[to] {
                    Some(node) => node.arrive(network, id),
                    None => self.vanish(id),
                }
            }
            Event::Turn(slot) => {
                let Some(node) = &mut nodes[slot as usize] else { return };
                node.turn(network, oracle);
                if !node.app.reports.is_empty() {
                    self.judge(slot);
                }
            }
            Event::Refused { at, life, of, id } => {
                let quote = network.datagram(id).bytes.clone();
                network.free(id);
                let node = nodes[at as usize].as_mut().filter(|n| n.app.life == life);
                if let Some(node) = node {
                    node.refused(network, oracle, of, &quote);
                    self.judge(at);
                }
            }
            Event::Act(at) => self.act(at),
            Event::Inspect => {}
        }
    }

    /// A datagram arrives where there is no endpoint.
    fn vanish(&mut self, id: u32) {
        let network = &mut self.network;
        let datagram = network.datagram(id);
        let (from, to) = (datagram.from, datagram.to);
        network.fates.nobody += 1;
        let sender = self.nodes.get(from as usize).and_then(Option::as_ref);
        if let Some(sender) = sender.filter(|_| self.refuses[to as usize]) {
            let life = sender.app.life;
            if !network.loses(to, from) {
                let at = network.clock.now + network.draw_delay(to, from);
                return network.clock.at(at, Event::Refused { at: from, life, of: to, id });
            }
        }
        network.free(id);
    }

    fn act(&mut self, at: u32) {
        let now = self.network.clock.now;
        let act = self.acts[at as usize].clone();
        if self.network.trace {
            eprintln!("{:>12} {act:?}", now as f64 / 1000.0);
        }
        match act {
            Act::Start { slot, habits, flows } => self.start(slot, habits, flows),
            Act::Crash { slot, refuses } => self.end(slot, false, refuses),
            Act::Close { slot, abrupt } => {
                let Some(node) = &mut self.nodes[slot as usize] else { return };
                if abrupt {
                    self.end(slot, true, true);
                    return;
                }
                node.app.flows.iter_mut().for_each(|flow| flow.remaining = 0);
                let life = node.app.life;
                self.closing.push((slot, life, now + LINGER_NS));
                self.disturb(now + INSPECT_NS);
            }
            Act::Pause { slot, until, stopped } => {
                if let Some(node) = &mut self.nodes[slot as usize] {
                    let stopped = stopped || !node.habits.background;
                    node.paused_until = until;
                    node.stopped = stopped;
                    self.pauses.push(Pause { slot, start: now, end: until, stopped });
                    node.plan(&mut self.network, until);
                }
            }
            Act::Pressure { slot, on } => {
                if let Some(node) = &mut self.nodes[slot as usize] {
                    node.machine.set_pressure(on);
                }
            }
            Act::Attack { count, every_ns, until } => {
                for _ in 0..count {
                    super::attack::strike(&mut self.network, &mut self.rng, &self.nodes);
                }
                if now + every_ns < until {
                    self.network.clock.at(now + every_ns, Event::Act(at));
                }
            }
        }
    }

    /// Checks the reports of a node.
    fn judge(&mut self, slot: Slot) {
        let Some(node) = &mut self.nodes[slot as usize] else { return };
        let job = node.habits.job;
        for mut report in std::mem::take(&mut node.app.reports) {
            // An incarnation may have ended before this one heard of it: its packets were still in flight.
            let Report { by, of, born, .. } = report;
            let earlier = |r: &&Report| r.ended && (r.by, r.of, r.born) == (by, of, born);
            let earlier = self.reports.iter().filter(earlier).count();
            report.ended = self.oracle.ends(of, born) > earlier;
            assert!(self.is_justified(&report, job), "{report:?}, for no reason");
            self.reports.push(report);
        }
    }

    fn is_justified(&self, report: &Report, job: u8) -> bool {
        let Report { at, by, of, departure, since, ended, .. } = *report;
        if departure == Departure::Closed && self.oracle.hostile != Some(of) {
            return ended && self.oracle.lives.iter().any(|l| l.slot == of && l.closed);
        }
        let stranger = self.nodes[of as usize].as_ref().is_none_or(|n| n.habits.job != job);
        // The first packet after a pause may be older than the pause.
        let before = |p: &&Pause| p.slot == by && (p.start..p.end + UNDER_WAY_NS).contains(&since);
        let heard = self.pauses.iter().filter(before).map(|p| p.start).min().unwrap_or(since);
        let gave_up = self.reports.iter().any(|r| r.by == of && r.of == by && r.at >= heard);
        // Partitions long enough that they may have heard nothing of each other.
        let apart = |cut: &Cut| {
            let between = |a: Slot, b: Slot| cut.from >> a & 1 == 1 && cut.to >> b & 1 == 1;
            let within = cut.end.min(at).saturating_sub(cut.start.max(since));
            if between(by, of) || between(of, by) { within } else { 0 }
        };
        let apart: u64 = self.network.cuts.iter().map(apart).sum();
        let paused = self.pauses.iter().filter(|p| (p.slot == of || p.slot == by) && p.stopped);
        let paused = paused.map(|p| p.end.min(at).saturating_sub(p.start.max(since)));
        let long = apart + paused.sum::<u64>() > self.timeout_ns / 2;
        let hostile = [Some(by), Some(of)].contains(&self.oracle.hostile);
        ended || stranger || hostile || gave_up || self.fragile || long
    }

    /// True when everything is settled.
    fn inspect(&mut self) -> bool {
        let now = self.network.clock.now;
        let mut i = 0;
        while let Some((slot, life, deadline)) = self.closing.get(i).copied() {
            let node = self.nodes[slot as usize].as_ref().filter(|n| n.app.life == life);
            if node.is_none_or(|n| n.is_settled() || now >= deadline) {
                self.closing.swap_remove(i);
                if node.is_some() {
                    self.end(slot, true, true);
                }
            } else {
                i += 1;
            }
        }
        if now < self.horizon || !self.closing.is_empty() {
            self.progress.1 = now;
            return false;
        }
        if self.nodes.iter().flatten().all(|n| n.is_settled()) && !self.waits_in_vain() {
            return true;
        }
        let moved = self.oracle.messages + self.reports.len() as u64;
        if moved != self.progress.0 {
            self.progress = (moved, now);
        }
        // An endpoint that rests between two bursts need not have noticed anything.
        let flows = self.nodes.iter().flatten().flat_map(|n| &n.app.flows);
        let rested = flows.filter(|f| !f.is_done()).map(|f| f.next_at).max();
        self.progress.1 = self.progress.1.max(rested.unwrap_or(0).min(now));
        let most = if self.fragile { FRAGILE_NS } else { self.timeout_ns + SLACK_NS };
        if now - self.progress.1 > most {
            for node in self.nodes.iter().flatten() {
                eprintln!("{}", node.describe());
            }
            panic!("nothing moves since {} ms", self.progress.1 / 1_000_000);
        }
        false
    }

    /// Whether an endpoint that waits for its peers holds a connection that its peer does not have.
    fn waits_in_vain(&self) -> bool {
        let mut waiting = self.nodes.iter().flatten().filter(|n| n.app.waits());
        waiting.any(|node| self.talks_to_nobody(node))
    }

    /// Whether `node` has a connection that its peer does not have, or no longer.
    fn talks_to_nobody(&self, node: &Node) -> bool {
        node.connections().filter(|c| c.handshake.is_established()).any(|c| {
            let there = self.nodes[slot_of(&c.address) as usize].as_ref();
            !there.is_some_and(|n| {
                let job = n.habits.job != node.habits.job;
                job || n
                    .connections()
                    .map(|o| &o.handshake)
                    .any(|o| (o.nonce, o.echo) == (c.handshake.echo, c.handshake.nonce))
            })
        })
    }

    /// Checks the state at the end.
    fn finish(&mut self) -> Outcome {
        let now = self.network.clock.now;
        for stream in &self.oracle.streams {
            let lives = self.oracle.lives[stream.from_life as usize].ended == u64::MAX;
            let trusted = ![Some(stream.from), Some(stream.to)].contains(&self.oracle.hostile);
            if lives && stream.open && trusted {
                assert_eq!(stream.delivered, stream.accepted, "{stream:?} is not complete");
            }
        }
        for node in self.nodes.iter().flatten() {
            // Early packets of a connection that the peer has given up may still wait.
            let empty = node.machine.memory() == 0;
            assert!(empty || self.talks_to_nobody(node), "{}", node.describe());
        }
        for node in self.nodes.iter().flatten() {
            self.outcome.tally(node);
        }
        Outcome {
            fates: self.network.fates,
            messages: self.oracle.messages,
            payload: self.oracle.payload,
            delivered_at: self.oracle.delivered_at,
            longest_stall: self.oracle.longest_stall,
            ended: now,
            slots: self.nodes.len() as u64,
            fragile: self.fragile,
            ..self.outcome
        }
    }
}
