//! An endpoint: the state machine under test, its socket, and its turns.

use super::super::connection::Connection;
use super::super::{Counts, Reliable, Settings};
use super::app::{App, Flow, Upper};
use super::clock::Event;
use super::network::{Network, SimLink, Slot, address, slot_of};
use super::oracle::Oracle;
use super::rng::Rng;
use crate::transport::JobKey;
use crate::transport::Source;
use std::collections::VecDeque;

/// Most datagrams that are received in one turn.
const TAKES: usize = 64;
/// Most packets that one turn may send: `BURST` and a few for each connection, and replies.
const BURST_MAX: usize = 72;
const REPLIES_MAX: usize = 64;

/// The properties of an endpoint.
#[derive(Clone, Debug)]
pub(super) struct Habits {
    pub(super) datagram_max: usize,
    /// It has paths that deliver no damaged packets.
    pub(super) sound: bool,
    /// The features it offers in handshakes.
    pub(super) features: u32,
    pub(super) peer_timeout_ns: u64,
    pub(super) buffer_bytes: usize,
    pub(super) receive_window: u32,
    /// The same at all endpoints.
    pub(super) first_psn: u32,
    /// Its job.
    pub(super) job: u8,
    /// A thread keeps its connections while the application does not poll.
    pub(super) background: bool,
    /// Time between two turns, nanoseconds.
    pub(super) turn_ns: u64,
    /// It waits for every peer that it has ever met.
    pub(super) waits: bool,
}

/// An endpoint.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) slot: Slot,
    pub(super) machine: Reliable,
    pub(super) app: App,
    pub(super) habits: Habits,
    /// The nonce of this incarnation.
    pub(super) life: u64,
    /// Datagrams at the switch's port and when they will have passed it, and in the socket.
    port: VecDeque<(u64, u32)>,
    port_bytes: u64,
    port_busy_ps: u64,
    socket: VecDeque<u32>,
    socket_bytes: u64,
    /// The turn that is planned.
    turn_at: u64,
    last_turn: u64,
    pub(super) paused_until: u64,
    /// Nothing of it runs in a pause.
    pub(super) stopped: bool,
    /// Turns in a row after which the state machine wanted another one at once.
    spins: u32,
    pub(super) turns: u64,
    pub(super) memory_peak: usize,
    pub(super) socket_peak: u64,
    pub(super) port_peak: u64,
}

impl Node {
    pub(super) fn new(
        slot: Slot,
        habits: Habits,
        flows: Vec<Flow>,
        rng: &mut Rng,
        oracle: &mut Oracle,
        now: u64,
    ) -> Self {
        let life = rng.next() | 1;
        let seed = u128::from(rng.next()) << 64 | u128::from(rng.next());
        let settings = Settings {
            life,
            address: address(slot),
            key: JobKey::from_bytes([habits.job; 16]),
            key_source: Source::AuthKey,
            datagram_max: habits.datagram_max,
            direct_max: 0,
            peer_timeout_ns: habits.peer_timeout_ns,
            buffer_bytes: habits.buffer_bytes,
            receive_window: habits.receive_window,
            features: habits.features,
            first_psn: habits.first_psn,
            seed: seed.to_le_bytes(),
        };
        let number = oracle.born(slot, habits.job);
        let app = App::new(slot, number, flows, habits.waits, now);
        Self {
            slot,
            machine: Reliable::new(settings, now),
            app,
            habits,
            life,
            port: VecDeque::new(),
            port_bytes: 0,
            port_busy_ps: 0,
            socket: VecDeque::new(),
            socket_bytes: 0,
            turn_at: u64::MAX,
            last_turn: 0,
            paused_until: 0,
            stopped: false,
            spins: 0,
            turns: 0,
            memory_peak: 0,
            socket_peak: 0,
            port_peak: 0,
        }
    }

    pub(super) fn counts(&self) -> &Counts {
        self.machine.counts()
    }

    pub(super) fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.machine.table.iter()
    }

    /// A datagram reaches the switch's port to this node.
    pub(super) fn arrive(&mut self, network: &mut Network, id: u32) {
        let now = network.clock.now;
        self.pass_port(network, now);
        let weather = &network.weather;
        let len = network.datagram(id).wire_len();
        if self.port_bytes + len > weather.port_bytes {
            network.fates.port_full += 1;
            network.free(id);
            return;
        }
        let marks = self.port_bytes > weather.mark_bytes;
        self.port_bytes += len;
        self.port_peak = self.port_peak.max(self.port_bytes);
        self.port_busy_ps = self.port_busy_ps.max(now * 1000) + len * weather.byte_ps;
        let passes = self.port_busy_ps / 1000;
        if marks {
            network.mark(id);
        }
        self.port.push_back((passes, id));
        self.plan(network, passes);
    }

    /// Moves datagrams that have passed the port into the socket.
    fn pass_port(&mut self, network: &mut Network, now: u64) {
        while let Some((passes, id)) = self.port.front().copied() {
            if passes > now {
                break;
            }
            self.port.pop_front();
            let len = network.datagram(id).wire_len();
            self.port_bytes -= len;
            if self.socket_bytes + len > network.weather.socket_bytes {
                network.fates.socket_full += 1;
                network.free(id);
                continue;
            }
            self.socket_bytes += len;
            self.socket_peak = self.socket_peak.max(self.socket_bytes);
            self.socket.push_back(id);
        }
    }

    /// Plans a turn at `at`, or as soon after that as the node takes turns.
    pub(super) fn plan(&mut self, network: &mut Network, at: u64) {
        let rests = if self.stopped { self.paused_until } else { 0 };
        let at = at.max(self.last_turn + self.habits.turn_ns).max(rests);
        if at < self.turn_at {
            self.turn_at = at;
            network.clock.at(at, Event::Turn(self.slot));
        }
    }

    /// A planned turn: receives, handles timers, runs the application, and sends.
    pub(super) fn turn(&mut self, network: &mut Network, oracle: &mut Oracle) {
        let now = network.clock.now;
        if now != self.turn_at {
            return;
        }
        self.turn_at = u64::MAX;
        let away = now < self.paused_until;
        if away && self.stopped {
            self.plan(network, now);
            return;
        }
        self.last_turn = now;
        self.turns += 1;
        self.pass_port(network, now);
        let trace = network.trace;
        let mut upper = Upper { app: &mut self.app, oracle, now, trace };
        for _ in 0..TAKES {
            let Some(id) = self.socket.pop_front() else { break };
            let datagram = network.datagram(id);
            self.socket_bytes -= datagram.wire_len();
            let from = address(datagram.from);
            let Self { machine, .. } = self;
            machine.on_datagram(now, &from, &datagram.bytes, datagram.condition, &mut upper);
            network.fates.received += 1;
            network.free(id);
        }
        if self.machine.next_timeout().is_some_and(|at| at <= now) {
            self.machine.on_timeout(now, &mut upper);
        }
        let mut link = SimLink {
            slot: self.slot,
            datagram_max: self.habits.datagram_max,
            sound: self.habits.sound,
            network,
            taken: 0,
            refused: false,
        };
        if !away {
            self.app.offer(&mut self.machine, oracle, now, &mut link);
        }
        link.taken = 0;
        let burst = self.machine.connections() * BURST_MAX + REPLIES_MAX;
        let left = self.machine.poll_transmit(now, &mut link);
        let (taken, refused) = (link.taken, link.refused);
        assert_eq!(left, taken, "{}: poll_transmit miscounts", self.slot);
        assert!(taken <= burst, "{} sent {taken} packets in one turn", self.slot);
        self.check(now);
        self.plan_next(network, now, refused);
    }

    fn plan_next(&mut self, network: &mut Network, now: u64, refused: bool) {
        let mut next = self.machine.next_timeout().unwrap_or(u64::MAX);
        if refused {
            next = next.min(network.interface_opens(self.slot).max(now + 1));
        } else if self.machine.has_ready() || !self.socket.is_empty() {
            next = next.min(now + 1);
        }
        if let Some((passes, _)) = self.port.front() {
            next = next.min(*passes);
        }
        if now < self.paused_until {
            next = next.min(self.paused_until);
        }
        for flow in &self.app.flows {
            if !flow.is_done() && flow.next_at > now {
                next = next.min(flow.next_at);
            }
        }
        if next != u64::MAX {
            self.plan(network, next.max(now + 1));
        }
    }

    /// Checks what must hold after every turn.
    fn check(&mut self, now: u64) {
        let memory = self.machine.memory();
        self.memory_peak = self.memory_peak.max(memory);
        let most = self.habits.buffer_bytes;
        assert!(memory <= most, "{} keeps {memory} B of {most}", self.slot);
        let spins = self.machine.next_timeout().is_some_and(|at| at <= now);
        self.spins = if spins { self.spins + 1 } else { 0 };
        assert!(self.spins < 2, "{}: its next timeout stays in the past", self.slot);
    }

    /// The system reports that the port of `of` is closed, and quotes the beginning of the datagram.
    pub(super) fn refused(
        &mut self,
        network: &mut Network,
        oracle: &mut Oracle,
        of: Slot,
        quote: &[u8],
    ) {
        let now = network.clock.now;
        let trace = network.trace;
        let mut upper = Upper { app: &mut self.app, oracle, now, trace };
        self.machine.on_refused(now, &address(of), quote, &mut upper);
        self.plan(network, now);
    }

    /// Sends CLOSE to all peers.
    pub(super) fn close(&mut self, network: &mut Network) {
        let now = network.clock.now;
        let Habits { datagram_max, sound, .. } = self.habits;
        let slot = self.slot;
        let mut link = SimLink { slot, datagram_max, sound, network, taken: 0, refused: false };
        self.machine.close(now, &mut link);
    }

    /// Ends this incarnation: the contents of its queues are lost.
    pub(super) fn bury(self, network: &mut Network) {
        for id in self.socket.into_iter().chain(self.port.into_iter().map(|(_, id)| id)) {
            network.free(id);
        }
    }

    /// It has sent all its messages, and all were acknowledged.
    pub(super) fn is_settled(&self) -> bool {
        self.app.flows.iter().all(Flow::is_done) && self.machine.unacknowledged() == 0
    }

    /// Why it is not settled.
    pub(super) fn describe(&self) -> String {
        let flows = self.app.flows.iter().filter(|f| !f.is_done()).count();
        let connections: String = self
            .connections()
            .map(|c| {
                let (to, nonces) =
                    (slot_of(&c.address), (c.handshake.nonce as u16, c.handshake.echo as u16));
                format!(
                    "\n  {to} {:?} {nonces:x?} {} under way",
                    c.handshake.phase,
                    c.sender.window.packets.len()
                )
            })
            .collect();
        format!(
            "{}: {flows} flows, {} packets under way, {} B kept, next timeout {:?}, {:?}{connections}",
            self.slot,
            self.machine.unacknowledged(),
            self.machine.memory(),
            self.machine.next_timeout(),
            self.machine.counts()
        )
    }
}
