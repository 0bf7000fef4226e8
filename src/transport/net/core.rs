//! The part of the network transport that the application's threads and the background thread share: the state machine,
//! its link, and messages that arrived while the application did not poll.

use super::link::{Condition, Link, LinkSink};
use super::neighbours::{Neighbours, Standing};
use super::reliable::packet::{Header, Kind};
use super::reliable::{Reliable, Sink};
use super::verbs::HybridLink;
use crate::sys::Errno;
use crate::transport::peers::PeerTable;
use crate::transport::{Address, Departure, MAX_HEADER, Mark, PeerId};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Bytes of messages that wait for the application. Beyond that, packets with data are dropped, and their senders keep
/// them.
const INBOX_MAX: usize = 16 << 20;
/// Bytes that an event counts beside its payload.
const EVENT_COST: usize = 256;

/// An event that happened while the application did not poll. Peers have the state machine's numbers.
#[derive(Debug)]
pub(super) enum Event {
    Connected(PeerId, Address),
    Message { peer: PeerId, header: [u8; MAX_HEADER], header_len: u8, payload: Box<[u8]> },
    Acknowledged(PeerId, Mark),
    Departure(PeerId, Departure),
}

impl Event {
    fn peer(&self) -> PeerId {
        let (Self::Connected(peer, _)
        | Self::Message { peer, .. }
        | Self::Acknowledged(peer, _)
        | Self::Departure(peer, _)) = self;
        *peer
    }

    /// What it counts in the inbox.
    #[inline]
    fn bytes(&self) -> usize {
        match self {
            Self::Message { payload, .. } => payload.len() + EVENT_COST,
            Self::Connected(..) | Self::Acknowledged(..) | Self::Departure(..) => 0,
        }
    }
}

/// The shared part of an endpoint's network transport.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) machine: Reliable,
    pub(super) link: HybridLink,
    /// The state machine's peer numbers: it meets some peers before the application does.
    pub(super) peers: PeerTable,
    pub(super) neighbours: Arc<Neighbours>,
    inbox: VecDeque<Event>,
    inbox_bytes: usize,
    /// The peers whose departures wait in the inbox, in the same order.
    departing: VecDeque<PeerId>,
    /// Numbers of connections that had packets with data dropped because the inbox was full.
    turned_away: BTreeSet<u32>,
    /// Turns of the background thread.
    pub(super) background_turns: u64,
}

/// Keeps events for the application's next poll.
struct Keep<'a> {
    peers: &'a mut PeerTable,
    neighbours: &'a Neighbours,
    inbox: &'a mut VecDeque<Event>,
    bytes: &'a mut usize,
    departing: &'a mut VecDeque<PeerId>,
}

impl Sink for Keep<'_> {
    fn peer_of(&mut self, address: &Address) -> Option<PeerId> {
        self.peers.intern(address)
    }

    fn find(&self, address: &Address) -> Option<PeerId> {
        self.peers.find(address)
    }

    fn forget(&mut self, peer: PeerId) {
        self.peers.release(peer);
    }

    fn standing(&self, address: &Address) -> Standing {
        self.neighbours.peer(address)
    }

    fn on_connected(&mut self, peer: PeerId, address: &Address) {
        self.inbox.push_back(Event::Connected(peer, *address));
    }

    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        let mut copy = [0; MAX_HEADER];
        for (to, from) in copy.iter_mut().zip(header) {
            *to = *from;
        }
        *self.bytes += payload.len() + EVENT_COST;
        self.inbox.push_back(Event::Message {
            peer,
            header: copy,
            header_len: header.len().min(MAX_HEADER) as u8,
            payload: payload.into(),
        });
    }

    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        self.inbox.push_back(Event::Acknowledged(peer, upto));
    }

    fn on_departure(&mut self, peer: PeerId, departure: Departure) {
        self.inbox.push_back(Event::Departure(peer, departure));
        self.departing.push_back(peer);
    }

    fn is_owed(&self, _: PeerId) -> Option<bool> {
        None
    }
}

/// Passes received datagrams to the state machine.
struct Inwards<'a, S> {
    machine: &'a mut Reliable,
    now: u64,
    sink: S,
    /// There is no room for packets with data: the connections that are turned away.
    full: Option<&'a mut BTreeSet<u32>>,
}

impl<S: Sink> LinkSink for Inwards<'_, S> {
    #[inline]
    fn on_datagram(&mut self, from: &Address, bytes: &[u8], condition: Condition) {
        // Acknowledgements need no room, and without them everything would be retransmitted.
        if let Some(turned_away) = &mut self.full {
            if let Some((Header { kind: Kind::Data, dest, .. }, _)) = Header::decode(bytes) {
                // Packets with made-up numbers are not remembered.
                turned_away.extend(self.machine.owner_of(dest).map(|_| dest));
                return;
            }
        }
        self.machine.on_datagram(self.now, from, bytes, condition, &mut self.sink);
    }

    fn knows(&self, address: &Address) -> bool {
        self.sink.find(address).is_some_and(|peer| self.machine.is_connected(peer))
    }

    fn on_refused(&mut self, to: &Address, errno: Errno, quote: &[u8]) {
        // A temporary network failure is no reason to give a peer up; a closed port is.
        if errno.0 == libc::ECONNREFUSED {
            self.machine.on_refused(self.now, to, quote, &mut self.sink);
        }
    }

    fn on_too_long(&mut self, to: &Address, carried: usize) -> bool {
        self.machine.on_too_long(to, carried, &self.sink)
    }

    fn on_narrowed(&mut self, carried: usize) {
        self.machine.on_narrowed(carried);
    }
}

impl Core {
    pub(super) fn new(
        machine: Reliable,
        link: HybridLink,
        peers: PeerTable,
        neighbours: Arc<Neighbours>,
    ) -> Self {
        let (inbox, departing) = (VecDeque::new(), VecDeque::new());
        Self {
            machine,
            link,
            peers,
            neighbours,
            inbox,
            inbox_bytes: 0,
            departing,
            turned_away: BTreeSet::new(),
            background_turns: 0,
        }
    }

    /// The oldest event that happened while the application did not poll.
    #[inline]
    pub(super) fn take_event(&mut self) -> Option<Event> {
        let event = self.inbox.pop_front()?;
        self.inbox_bytes = self.inbox_bytes.saturating_sub(event.bytes());
        if matches!(event, Event::Departure(..)) {
            self.departing.pop_front();
        }
        Some(event)
    }

    /// The same. A peer that has connected and for which `outer` has no memory is told that it is not heard.
    #[inline]
    pub(super) fn take_known(&mut self, outer: &mut PeerTable, now: u64) -> Option<Event> {
        loop {
            match self.take_event()? {
                Event::Connected(peer, address) if outer.intern(&address).is_none() => {
                    self.part(peer, now);
                }
                event => return Some(event),
            }
        }
    }

    /// The application does not know yet that its connection with `peer` has ended: what it sends to the peer now
    /// belongs to that one, and must not go into the next.
    #[inline]
    pub(super) fn is_departing(&self, peer: PeerId) -> bool {
        !self.departing.is_empty() && self.departing.contains(&peer)
    }

    /// `peer` has departed by another transport: its connection ends, unless it has ended already, and this is its next
    /// one. Returns the events of the one that has ended.
    #[cold]
    pub(super) fn part(&mut self, peer: PeerId, now: u64) -> Vec<Event> {
        self.turn_in_background(now);
        if !self.is_departing(peer) {
            let Self { peers, neighbours, inbox, inbox_bytes: bytes, departing, .. } = self;
            let mut keep = Keep { peers, neighbours, inbox, bytes, departing };
            self.machine.part(peer, now, &mut self.link, &mut keep);
        }
        let (mut taken, mut kept) = (Vec::new(), VecDeque::new());
        let mut ended = false;
        while let Some(event) = self.inbox.pop_front() {
            if event.peer() != peer || ended {
                kept.push_back(event);
            } else {
                ended = matches!(event, Event::Departure(..));
                self.inbox_bytes = self.inbox_bytes.saturating_sub(event.bytes());
                taken.push(event);
            }
        }
        let departures = kept.iter().filter(|event| matches!(event, Event::Departure(..)));
        self.departing = departures.map(Event::peer).collect();
        self.inbox = kept;
        taken
    }

    /// When a turn has something to do even if nothing arrives.
    pub(super) fn next_timeout(&self) -> Option<u64> {
        let (machine, link) = (self.machine.next_timeout(), self.link.next_timeout());
        machine.into_iter().chain(link).min()
    }

    pub(super) fn has_events(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// True if a turn would find only expired timers, and arrivals from the device.
    #[inline]
    pub(super) fn is_calm(&self) -> bool {
        self.inbox.is_empty() && !self.machine.has_unsent() && self.link.is_calm()
    }

    /// Takes arrivals from the device, and sends the replies. Returns the number of arrivals.
    #[inline]
    pub(super) fn take_arrived<'a, S: Sink>(
        &'a mut self,
        now: u64,
        sink: impl FnOnce(&'a mut PeerTable, &'a Neighbours) -> S,
    ) -> usize {
        let Self { machine, link, peers, neighbours, .. } = self;
        let mut inwards = Inwards { machine, now, sink: sink(peers, neighbours), full: None };
        let n = link.take_arrived(&mut inwards);
        if machine.has_unsent() {
            machine.poll_transmit(now, link);
        }
        n
    }

    /// Acknowledges all arrivals, and returns whether all sent packets are acknowledged.
    pub(super) fn is_flushed(&mut self, now: u64) -> bool {
        let Self { machine, link, .. } = self;
        machine.acknowledge_all();
        machine.poll_transmit(now, link);
        machine.unacknowledged() == 0
    }

    /// Receives, handles deadlines, and sends. `sink` makes the state machine's sink from the table of peers. Returns
    /// the number of arrivals.
    #[inline]
    pub(super) fn turn<'a, S: Sink>(
        &'a mut self,
        now: u64,
        sink: impl FnOnce(&'a mut PeerTable, &'a Neighbours) -> S,
    ) -> usize {
        let Self { machine, link, peers, neighbours, turned_away, .. } = self;
        while let Some(id) = turned_away.pop_first() {
            machine.ask_for_data(id);
        }
        turn(machine, link, now, sink(peers, neighbours), None)
    }

    /// The same on behalf of an application that does not poll: arrivals are kept.
    pub(super) fn turn_in_background(&mut self, now: u64) -> usize {
        let Self { machine, link, peers, neighbours, inbox, inbox_bytes: bytes, departing, .. } =
            self;
        self.background_turns += 1;
        let full = (*bytes >= INBOX_MAX).then_some(&mut self.turned_away);
        turn(machine, link, now, Keep { peers, neighbours, inbox, bytes, departing }, full)
    }
}

#[inline]
fn turn(
    machine: &mut Reliable,
    link: &mut HybridLink,
    now: u64,
    sink: impl Sink,
    full: Option<&mut BTreeSet<u32>>,
) -> usize {
    link.tend(now);
    let mut inwards = Inwards { machine, now, sink, full };
    let n = link.receive(&mut inwards);
    while let Some(peer) = link.take_unreached() {
        inwards.machine.give_up(&peer, Errno(libc::ENODEV), &mut inwards.sink);
    }
    let Inwards { machine, mut sink, .. } = inwards;
    if machine.next_timeout().is_some_and(|at| at <= now) {
        machine.on_timeout(now, &mut sink);
    }
    if machine.has_ready() {
        machine.poll_transmit(now, link);
    }
    while let Some(address) = machine.take_gone() {
        link.forget(&address);
    }
    n
}
