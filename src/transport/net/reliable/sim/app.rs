//! The application of an endpoint: what it sends, and the events it receives.

use super::super::{Reliable, Sink};
use super::network::{Slot, address, slot_of};
use super::oracle::{Life, Oracle, Sizes};
use crate::transport::net::link::Link;
use crate::transport::net::neighbours::Standing;
use crate::transport::{Address, Departure, PeerId, SendError};
use std::collections::HashMap;

/// Most messages that it tries to send in one turn.
const SENDS: usize = 64;

/// The messages that the application sends to one peer.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    pub(super) to: Slot,
    pub(super) sizes: Sizes,
    pub(super) remaining: u32,
    /// Messages that it may send before it receives one: `u32::MAX` if it need not wait.
    pub(super) credit: u32,
    /// Messages in a row, and the time until the next ones, nanoseconds.
    pub(super) burst: u32,
    pub(super) idle_ns: u64,
    /// The next ones are not sent before this time.
    pub(super) next_at: u64,
    /// How many times it starts again after the peer was lost.
    pub(super) retries: u32,
    left: u32,
    credit_left: u32,
}

impl Flow {
    pub(super) fn new(to: Slot, sizes: Sizes, messages: u32) -> Self {
        Self {
            to,
            sizes,
            remaining: messages,
            credit: u32::MAX,
            burst: u32::MAX,
            idle_ns: 0,
            next_at: 0,
            retries: 3,
            left: u32::MAX,
            credit_left: u32::MAX,
        }
    }

    /// It answers each message, and may send `credit` messages first.
    pub(super) fn ping_pong(mut self, credit: u32) -> Self {
        (self.credit, self.credit_left) = (credit, credit);
        self
    }

    pub(super) fn bursts(mut self, burst: u32, idle_ns: u64) -> Self {
        (self.burst, self.left, self.idle_ns) = (burst, burst, idle_ns);
        self
    }

    pub(super) fn begins(mut self, at: u64) -> Self {
        self.next_at = at;
        self
    }

    fn is_due(&self, now: u64) -> bool {
        self.remaining > 0 && self.credit_left > 0 && self.next_at <= now
    }

    pub(super) fn is_done(&self) -> bool {
        self.remaining == 0 || self.credit_left == 0
    }
}

/// A peer as the application knows it.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) slot: Slot,
    /// Since when it has been connected, or this side has tried; nanoseconds.
    pub(super) since: Option<u64>,
    connected: bool,
    outbound: Option<u32>,
    inbound: Option<u32>,
    flow: Option<usize>,
}

/// A report that a peer is gone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report {
    pub(super) at: u64,
    pub(super) by: Slot,
    pub(super) of: Slot,
    pub(super) departure: Departure,
    /// Since when the peer had been there.
    pub(super) since: u64,
    /// When the incarnation that reports it began.
    pub(super) born: u64,
    /// The end of an incarnation explains it.
    pub(super) ended: bool,
}

/// The application.
#[derive(Debug)]
pub(super) struct App {
    slot: Slot,
    pub(super) life: u32,
    born: u64,
    pub(super) peers: Vec<Peer>,
    by_slot: HashMap<Slot, PeerId, std::hash::BuildHasherDefault<std::hash::DefaultHasher>>,
    pub(super) flows: Vec<Flow>,
    waits: bool,
    /// Departures that were not checked yet.
    pub(super) reports: Vec<Report>,
    pub(super) departures: u64,
}

impl App {
    pub(super) fn new(slot: Slot, life: u32, flows: Vec<Flow>, waits: bool, now: u64) -> Self {
        Self {
            slot,
            life,
            born: now,
            peers: Vec::new(),
            by_slot: HashMap::default(),
            flows,
            waits,
            reports: Vec::new(),
            departures: 0,
        }
    }

    fn peer(&mut self, slot: Slot) -> PeerId {
        let Self { peers, by_slot, flows, .. } = self;
        *by_slot.entry(slot).or_insert_with(|| {
            let flow = flows.iter().position(|f| f.to == slot);
            let (since, outbound, inbound) = (None, None, None);
            let connected = false;
            peers.push(Peer { slot, since, connected, outbound, inbound, flow });
            PeerId(peers.len() as u32 - 1)
        })
    }

    /// Sends what it has to send, as far as it is accepted. It uses the fast path for all messages in one turn, for
    /// every other one in another, for none in a third.
    pub(super) fn offer(
        &mut self,
        machine: &mut Reliable,
        oracle: &mut Oracle,
        now: u64,
        link: &mut impl Link,
    ) {
        let mut sends = 0;
        machine.on_poll();
        let how = now / 1024 % 3;
        for at in 0..self.flows.len() {
            if !self.flows[at].is_due(now) {
                continue;
            }
            let (to, sizes) = (self.flows[at].to, self.flows[at].sizes);
            let peer = self.peer(to);
            if !machine.is_connected(peer) {
                machine.connect(peer, &address(to), now).expect("there is room");
                self.peers[peer.index()].since.get_or_insert(now);
            }
            let me = (self.slot, self.life);
            let entry = &mut self.peers[peer.index()];
            entry.since.get_or_insert(now);
            let stream = *entry.outbound.get_or_insert_with(|| oracle.open(me, to, sizes, now));
            let flow = &mut self.flows[at];
            while flow.is_due(now) && sends < SENDS {
                let message = oracle.compose(stream);
                let payload = message.payload;
                let header = &message.header[..message.header_len];
                let pack = |at: usize, to: &mut [u8]| {
                    let len = to.len();
                    to.copy_from_slice(&payload[at..at + len]);
                };
                let len = payload.len();
                let sent = (how == 0 || how == 1 && sends % 2 == 0)
                    && machine.send_at_once(peer, header, len, pack, || now, link);
                match if sent { Ok(()) } else { machine.send(peer, header, len, pack, now) } {
                    Ok(()) => {}
                    Err(SendError::Again) => break,
                    Err(other) => panic!("{}: {other:?} although it is connected", me.0),
                }
                oracle.accepted(stream, now);
                sends += 1;
                flow.remaining -= 1;
                if flow.credit_left != u32::MAX {
                    flow.credit_left -= 1;
                }
                if flow.left != u32::MAX {
                    flow.left -= 1;
                    if flow.left == 0 {
                        flow.left = flow.burst;
                        flow.next_at = now + flow.idle_ns;
                    }
                }
            }
        }
        if self.flows.len() > 1 && self.flows.len() <= 16 {
            self.flows.rotate_left(1);
            let count = self.flows.len();
            for peer in &mut self.peers {
                peer.flow = peer.flow.map(|at| (at + count - 1) % count);
            }
        }
    }

    pub(super) fn waits(&self) -> bool {
        self.waits
    }
}

/// The layer above during a turn.
pub(super) struct Upper<'a> {
    pub(super) app: &'a mut App,
    pub(super) oracle: &'a mut Oracle,
    pub(super) now: u64,
    pub(super) trace: bool,
}

impl Sink for Upper<'_> {
    fn peer_of(&mut self, address: &Address) -> Option<PeerId> {
        Some(self.app.peer(slot_of(address)))
    }

    fn find(&self, address: &Address) -> Option<PeerId> {
        self.app.by_slot.get(&slot_of(address)).copied()
    }

    fn forget(&mut self, _: PeerId) {}

    fn standing(&self, _: &Address) -> Standing {
        Standing::Admitted
    }

    fn on_connected(&mut self, peer: PeerId, at: &Address) {
        let me = self.app.slot;
        let job = self.oracle.lives[self.app.life as usize].job;
        let peer = &mut self.app.peers[peer.index()];
        assert_eq!(slot_of(at), peer.slot);
        assert!(!peer.connected, "{me}: {} connects twice", peer.slot);
        let met = |l: &Life| l.slot == peer.slot && l.job == job;
        assert!(
            self.oracle.lives.iter().any(met),
            "{me} is connected to a stranger, {}",
            peer.slot
        );
        if self.trace {
            eprintln!("{:>12} {me}: {} is there", self.now as f64 / 1000.0, peer.slot);
        }
        peer.connected = true;
        peer.since.get_or_insert(self.now);
    }

    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        let App { slot, life, peers, flows, .. } = &mut *self.app;
        let peer = &mut peers[peer.index()];
        assert!(peer.connected, "{slot}: a message from {} before it is there", peer.slot);
        let message = (header, payload);
        let reader = (*slot, *life);
        let stream = self.oracle.deliver(reader, peer.slot, peer.inbound, message, self.now);
        peer.inbound = stream;
        if let Some(flow) = peer.flow.map(|flow| &mut flows[flow]) {
            flow.credit_left = flow.credit_left.saturating_add(1);
        }
    }

    fn on_departure(&mut self, peer: PeerId, departure: Departure) {
        let App { slot, born, peers, flows, reports, departures, .. } = &mut *self.app;
        let peer = &mut peers[peer.index()];
        if self.trace {
            let now = self.now as f64 / 1000.0;
            eprintln!("{now:>12} {slot}: {} is gone, {departure:?}", peer.slot);
        }
        let Some(since) = peer.since.take() else { panic!("{slot}: {} leaves twice", peer.slot) };
        peer.connected = false;
        if let Some(inbound) = peer.inbound.take() {
            let stream = &self.oracle.streams[inbound as usize];
            let all = stream.delivered == stream.accepted;
            assert!(all || departure != Departure::Closed, "{slot}: {} closed early", peer.slot);
        }
        if let Some(outbound) = peer.outbound.take() {
            self.oracle.end(outbound);
        }
        *departures += 1;
        let (at, by, of) = (self.now, *slot, peer.slot);
        let (born, ended) = (*born, false);
        reports.push(Report { at, by, of, departure, since, born, ended });
        if let Some(flow) = peer.flow.map(|flow| &mut flows[flow]) {
            if flow.retries == 0 {
                flow.remaining = 0;
            } else {
                flow.retries -= 1;
                flow.next_at = self.now + 2_000_000;
                flow.credit_left = flow.credit;
                flow.left = flow.burst;
            }
        }
    }

    fn is_owed(&self, _: PeerId) -> Option<bool> {
        Some(self.app.waits)
    }
}
