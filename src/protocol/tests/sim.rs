//! A simulated network: bounded queues between the endpoints of one process, with all faults drawn from one seed.
//!
//! A *slot* is an address that one endpoint after another may have. A *link* joins two slots and ends once. Messages
//! that were sent over it before are delivered before its end is reported.

use super::rng::{Rng, payload};
use super::sim_share::{Shares, Teamwork};
use super::sim_stream::{Flow, Step, Way};
use super::sim_window::{self, Glazing, Held, Panes, RAILS};
use crate::memory::keys::Right;
use crate::memory::{MAX_SEGMENTS, Segment, SegmentList};
use crate::protocol::collective::CollectivePacket;
use crate::protocol::packet::{Envelope, Packet};
use crate::protocol::rma::RmaPacket;
use crate::protocol::{Completion, Failure};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::loopback::Loopback;
use crate::transport::{
    Access, Address, Assisted, Caps, Departure, Handler, Head, Iface, LaneCaps, LaneId, Lanes,
    MAX_HEADER, Messages, Mode, OneSided, PeerId, Prepared, Purpose, Put, Registered, Registration,
    Remote, RemoteKey, SendError, Share, Sharing, StreamEnd, Streaming, Taken,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

pub(super) type Slot = usize;

pub(super) fn address(slot: Slot) -> Address {
    Address(SocketAddr::from((Ipv4Addr::LOCALHOST, 1 + slot as u16)))
}

/// How one-sided access works on one side of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reach {
    Off,
    /// Not yet.
    Later,
    On,
    /// Moves less than requested.
    Short,
    /// Is often busy.
    Shy,
    /// Moves less than requested `after` times, then fails.
    Fails {
        after: u32,
        errno: i32,
    },
}

/// Parameters that do not change during a run.
#[derive(Clone, Debug)]
pub(super) struct Weather {
    /// Messages in flight in one direction of a link, at most.
    pub(super) queue_len: usize,
    pub(super) short_max: usize,
    pub(super) bcopy_max: usize,
    /// Unsolicited bytes of a long message, at most.
    pub(super) push_max: usize,
    /// Sent messages arrive even if the sender ends, and the transport says so.
    pub(super) outlives: bool,
    /// Most bytes of a stream frame; 0: there are no streams. How often a stream breaks, in 1000.
    pub(super) stream_max: usize,
    pub(super) stream_breaks: u64,
    pub(super) windows: Glazing,
    pub(super) teamwork: Teamwork,
    /// A packet wakes a refused sender when there is room again.
    pub(super) announces_room: bool,
    /// There are no descriptors for messages.
    pub(super) short: bool,
    /// How often a message is refused without a reason, percent.
    pub(super) again_percent: u64,
    /// Messages that one poll delivers, at most.
    pub(super) batch: usize,
    /// Peers may describe memory that does not exist.
    pub(super) lies: bool,
    /// Drawn from for each side of each new link.
    pub(super) get: Vec<Reach>,
    pub(super) put: Vec<Reach>,
    /// Whether peers announce that they support atomic operations.
    pub(super) atomics: Option<bool>,
    /// Slots without collective operations, and whether they have announced that.
    pub(super) lonely: Vec<(Slot, Option<bool>)>,
}

impl Weather {
    /// A network without faults.
    pub(super) fn fair() -> Self {
        Self {
            queue_len: 64,
            short_max: 128,
            bcopy_max: 1024,
            push_max: 0,
            outlives: false,
            stream_max: 0,
            stream_breaks: 0,
            windows: Glazing::none(),
            teamwork: Teamwork::none(),
            announces_room: false,
            short: false,
            again_percent: 0,
            batch: 64,
            lies: false,
            get: vec![Reach::On],
            put: vec![Reach::On],
            atomics: Some(true),
            lonely: Vec::new(),
        }
    }

    fn collectives(&self, slot: Slot) -> Option<bool> {
        let known = self.lonely.iter().find(|(lonely, _)| *lonely == slot);
        known.map_or(Some(true), |(_, said)| *said)
    }
}

/// All events, in order.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    /// A message of [`Net::expect`] was sent: its bytes, or (rendezvous) its announcement.
    Sent {
        message: usize,
        link: usize,
        rendezvous: bool,
        pressed: bool,
    },
    /// The message can never be sent.
    Refused {
        message: usize,
        errno: i32,
    },
    Arrived {
        message: usize,
        rendezvous: bool,
    },
    /// The peer made contact.
    Met {
        peer: Slot,
    },
    Departed {
        peer: Slot,
        departure: Departure,
    },
    Completed(Completion),
    Failed(Failure),
    /// A peer has accessed memory of the endpoint.
    Accessed {
        right: Right,
        len: usize,
        data: Option<u64>,
        source: u64,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) at: Slot,
    pub(super) what: What,
}

pub(super) type Log = Rc<RefCell<Vec<Entry>>>;

/// The next message that must be sent to a peer.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) message: usize,
    pub(super) envelope: Envelope,
    /// See [`payload`].
    pub(super) at: usize,
    pub(super) len: usize,
}

#[derive(Debug)]
enum Item {
    Hello,
    Message {
        header: Vec<u8>,
        payload: Vec<u8>,
        message: Option<usize>,
    },
    /// The sender's streams up to this number broke.
    StreamBroken(u32),
    Departed(Departure),
}

#[derive(Debug)]
struct Link {
    ends: [Slot; 2],
    broken: bool,
    /// `queues[i]` is read by `ends[i]`. A link to oneself uses only the second.
    queues: [VecDeque<Item>; 2],
    /// Indexed like the queues.
    flows: [Flow; 2],
    /// By device.
    panes: Vec<Panes>,
    /// Split copies of the messages in each queue.
    shares: [Shares; 2],
    get: [Reach; 2],
    put: [Reach; 2],
    /// The epoch that `ends[i]` has to name to access the other end's regions.
    epochs: [u32; 2],
}

impl Link {
    /// Index of the queue that `slot` reads, and of its access to the other end.
    fn reads(&self, slot: Slot) -> usize {
        usize::from(self.ends[1] == slot)
    }

    fn writes(&self, slot: Slot) -> usize {
        usize::from(self.ends[0] == slot)
    }
}

#[derive(Debug, Default)]
struct Place {
    alive: bool,
    pressure: bool,
    /// Something will wake the endpoint soon, after a refusal without a reason.
    nudged: bool,
    /// By peer, oldest first. All but the last have ended.
    links: BTreeMap<Slot, VecDeque<usize>>,
}

#[derive(Debug)]
pub(super) struct Net {
    pub(super) weather: Weather,
    rng: Rng,
    places: Vec<Place>,
    links: Vec<Link>,
    log: Log,
    expected: HashMap<(Slot, Slot), VecDeque<Expected>>,
    /// A message was refused with `Again`.
    pub(super) said_again: bool,
    /// How often that was because the queue was full.
    pub(super) refused: usize,
}

pub(super) type SharedNet = Rc<RefCell<Net>>;

impl Net {
    pub(super) fn new(seed: u64, slots: usize, weather: Weather) -> (SharedNet, Log) {
        let log = Log::default();
        let net = Self {
            weather,
            rng: Rng::new(seed),
            places: (0..slots).map(|_| Place::default()).collect(),
            links: Vec::new(),
            log: Rc::clone(&log),
            expected: HashMap::new(),
            said_again: false,
            refused: 0,
        };
        (Rc::new(RefCell::new(net)), log)
    }

    fn note(&self, at: Slot, what: What) {
        self.log.borrow_mut().push(Entry { at, what });
    }

    /// Records that `message` is the next one to be sent from `from` to `to`, after those before.
    pub(super) fn expect(&mut self, from: Slot, to: Slot, expected: Expected) {
        self.expected.entry((from, to)).or_default().push_back(expected);
    }

    /// Messages from `from` to `to` that have not been sent yet.
    pub(super) fn unsent(&self, from: Slot, to: Slot) -> usize {
        self.expected.get(&(from, to)).map_or(0, VecDeque::len)
    }

    /// Forgets `message`, whose call failed.
    pub(super) fn forget(&mut self, from: Slot, to: Slot, message: usize) {
        if let Some(list) = self.expected.get_mut(&(from, to)) {
            list.retain(|e| e.message != message);
        }
    }

    pub(super) fn start(net: &SharedNet, slot: Slot) -> SimIface {
        let mut inner = net.borrow_mut();
        assert!(!inner.places[slot].alive);
        inner.places[slot] = Place { alive: true, ..Place::default() };
        SimIface { net: Rc::clone(net), me: slot, peers: Vec::new() }
    }

    pub(super) fn is_alive(&self, slot: Slot) -> bool {
        self.places[slot].alive
    }

    pub(super) fn is_pressed(&self, slot: Slot) -> bool {
        self.places[slot].pressure
    }

    fn has_broken(&self, me: Slot, peer: Slot) -> bool {
        self.current(me, peer).is_some_and(|link| self.links[link].broken)
    }

    pub(super) fn is_broken(&self, link: usize) -> bool {
        self.links[link].broken
    }

    /// The endpoint at `slot` departs.
    pub(super) fn leave(&mut self, slot: Slot, departure: Departure) {
        let place = std::mem::take(&mut self.places[slot]);
        for (peer, links) in place.links {
            for link in links {
                let side = self.links[link].reads(slot);
                self.links[link].panes.iter_mut().for_each(|panes| panes.forget(side));
                self.links[link].shares[side].forget();
                if !self.links[link].broken && peer != slot {
                    self.end(link, peer, departure);
                }
            }
        }
        self.expected.retain(|(from, _), _| *from != slot);
    }

    /// The link between two endpoints that stay breaks.
    pub(super) fn break_link(&mut self, a: Slot, b: Slot, departure: Departure) {
        let Some(link) = self.current(a, b).filter(|_| a != b) else { return };
        if !self.links[link].broken {
            self.end(link, a, departure);
            self.end(link, b, departure);
        }
    }

    /// `link` ends, as `reader` will learn.
    fn end(&mut self, link: usize, reader: Slot, departure: Departure) {
        let Self { links, rng, weather, .. } = self;
        let link = &mut links[link];
        link.broken = true;
        link.panes.iter_mut().for_each(Panes::close);
        let side = link.reads(reader);
        link.flows[side] = Flow::default();
        if departure == Departure::Closed {
            link.shares[side].land();
        }
        link.shares[side].die(rng);
        let queue = &mut link.queues[side];
        // The first packet is part of making the link: it is never lost.
        if departure != Departure::Closed && !weather.outlives {
            let keep = (1 + rng.below(queue.len() + 1)).max(queue.len() / 2);
            queue.truncate(keep);
        }
        queue.push_back(Item::Departed(departure));
    }

    fn current(&self, me: Slot, peer: Slot) -> Option<usize> {
        self.places[me].links.get(&peer).and_then(VecDeque::front).copied()
    }

    fn ensure(&mut self, me: Slot, peer: Slot) -> Result<usize, SendError> {
        if let Some(link) = self.current(me, peer) {
            return Ok(link);
        }
        if !self.places[peer].alive {
            return Err(SendError::Unreachable(Errno(libc::ECONNREFUSED)));
        }
        let id = self.links.len();
        let Self { rng, weather, .. } = self;
        let mut draw = |from: &[Reach]| [rng.pick(from), rng.pick(from)];
        let mut link = Link {
            ends: [me, peer],
            broken: false,
            queues: Default::default(),
            flows: Default::default(),
            get: draw(&weather.get),
            put: draw(&weather.put),
            shares: Default::default(),
            epochs: [0; 2],
            panes: RAILS
                .into_iter()
                .take(weather.windows.rails)
                .map(|rail| Panes::new(rail, 1000 * id as u32, &weather.windows, rng))
                .collect(),
        };
        self.places[me].links.entry(peer).or_default().push_back(id);
        if me != peer {
            link.queues[1].push_back(Item::Hello);
            self.places[peer].links.entry(me).or_default().push_back(id);
        }
        self.links.push(link);
        Ok(id)
    }

    /// A refusal without a reason. If the network announces room, it does so soon.
    fn hesitate(&mut self, me: Slot) -> SendError {
        self.places[me].nudged = true;
        self.again()
    }

    fn again(&mut self) -> SendError {
        self.said_again = true;
        SendError::Again
    }

    fn admit(&mut self, me: Slot, peer: Slot) -> Result<usize, SendError> {
        let id = self.ensure(me, peer)?;
        let link = &self.links[id];
        if link.broken {
            // Until its end is reported, a broken link takes messages and loses them, or refuses them.
            let vanishes = self.rng.percent(50);
            return if vanishes { Ok(id) } else { Err(SendError::Unreachable(Errno(libc::EPIPE))) };
        }
        if self.weather.short {
            return Err(SendError::Unreachable(Errno(libc::EMFILE)));
        }
        let full = link.queues[link.writes(me)].len() >= self.weather.queue_len;
        if full {
            self.refused += 1;
            return Err(self.again());
        }
        if self.rng.percent(self.weather.again_percent) {
            return Err(self.hesitate(me));
        }
        Ok(id)
    }

    fn transmit(
        &mut self,
        me: Slot,
        peer: Slot,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        assert!(header.len() <= MAX_HEADER);
        let packet = Packet::decode(header);
        let other =
            RmaPacket::decode(header).is_some() || CollectivePacket::decode(header).is_some();
        assert!(packet.is_some() || other, "{me} sends {header:?}");
        let admitted = self.admit(me, peer);
        let mut bytes = vec![0; len];
        if admitted.is_ok() {
            pack(0, &mut bytes);
        }
        let message = match admitted {
            Err(SendError::Again) => None,
            _ => packet
                .and_then(|p| self.take_expected(me, peer, &p, admitted.is_ok().then_some(&bytes))),
        };
        match (admitted, message) {
            (Ok(link), Some(message)) => {
                let rendezvous = matches!(packet, Some(Packet::Rts { .. }));
                let pressed = self.places[peer].pressure && !self.links[link].broken;
                self.note(me, What::Sent { message, link, rendezvous, pressed });
            }
            (Err(SendError::Unreachable(errno)), Some(message)) => {
                self.note(me, What::Refused { message, errno: errno.0 });
            }
            _ => {}
        }
        let link = &mut self.links[admitted?];
        if !link.broken {
            let queue = link.writes(me);
            let item = Item::Message { header: header.to_vec(), payload: bytes, message };
            link.queues[queue].push_back(item);
            link.flows[queue].sent += 1;
        }
        Ok(())
    }

    /// Checks that messages are sent in the order of their sends, unchanged.
    fn take_expected(
        &mut self,
        me: Slot,
        peer: Slot,
        packet: &Packet,
        bytes: Option<&Vec<u8>>,
    ) -> Option<usize> {
        let (sent, len) = match packet {
            Packet::Eager { envelope, .. } => (envelope, bytes.map(Vec::len)),
            Packet::Rts { envelope, len, .. } => (envelope, Some(*len as usize)),
            _ => return None,
        };
        let expected = self.expected.get_mut(&(me, peer))?.pop_front();
        let expected =
            expected.unwrap_or_else(|| panic!("{me} sends {packet:?} unasked to {peer}"));
        let Expected { message, envelope, at, .. } = expected;
        assert_eq!(*sent, envelope, "message {message} is out of order or changed");
        assert!(len.is_none_or(|len| len == expected.len), "message {message}: length");
        if let (Packet::Eager { .. }, Some(bytes)) = (packet, bytes) {
            assert!(bytes == payload(at, expected.len), "message {message}: bytes");
        }
        Some(message)
    }

    /// The packets on their way from `from` to `to`.
    pub(super) fn on_wire(&self, from: Slot, to: Slot) -> Vec<Packet> {
        let Some(link) = self.current(to, from).map(|link| &self.links[link]) else {
            return Vec::new();
        };
        link.queues[link.reads(to)]
            .iter()
            .filter_map(|item| match item {
                Item::Message { header, .. } => Packet::decode(header),
                _ => None,
            })
            .collect()
    }

    /// How many packets and reports are on their way from `from` to `to`.
    pub(super) fn queued(&self, from: Slot, to: Slot) -> usize {
        self.current(to, from).map_or(0, |link| {
            let link = &self.links[link];
            link.queues[link.reads(to)].len()
        })
    }

    /// Puts raw bytes on the link between two endpoints that have one.
    pub(super) fn forge(&mut self, from: Slot, to: Slot, header: &[u8], payload: &[u8]) {
        let link = self.current(to, from).map(|link| &mut self.links[link]).unwrap();
        let queue = link.reads(to);
        link.queues[queue].push_back(Item::Message {
            header: header.to_vec(),
            payload: payload.to_vec(),
            message: None,
        });
    }

    /// Whether nothing is on its way to an endpoint that exists.
    pub(super) fn is_idle(&self) -> bool {
        self.places.iter().enumerate().all(|(slot, place)| {
            place.links.values().flatten().all(|link| {
                let link = &self.links[*link];
                let side = link.reads(slot);
                link.queues[side].is_empty()
                    && link.flows[side].is_idle()
                    && link.panes.iter().all(|panes| panes.is_idle(side))
                    && link.shares[side].is_idle()
            })
        })
    }

    /// Whether a device has something to do, or to report.
    pub(super) fn has_begun(&self) -> bool {
        let mut panes = self.links.iter().filter(|link| !link.broken).flat_map(|link| &link.panes);
        self.weather.windows.reaches()
            && panes.any(|panes| [0, 1].iter().any(|side| !panes.is_idle(*side)))
    }

    fn next_item(&mut self, me: Slot) -> Option<(Slot, Item)> {
        let Self { places, links, rng, .. } = self;
        let ready: Vec<(Slot, usize)> = places[me]
            .links
            .iter()
            .filter_map(|(peer, list)| Some((*peer, *list.front()?)))
            .filter(|(_, link)| {
                let link = &links[*link];
                let side = link.reads(me);
                // The peer's writes are reported before its departure.
                match link.queues[side].front() {
                    Some(Item::Departed(_)) => {
                        link.panes.iter().all(|panes| panes.is_settled(side))
                    }
                    front => front.is_some(),
                }
            })
            .collect();
        if ready.is_empty() {
            return None;
        }
        let (peer, link) = rng.pick(&ready);
        let link = &mut links[link];
        let side = link.reads(me);
        if rng.percent(10) {
            for reach in [&mut link.get[side], &mut link.put[side]] {
                if *reach == Reach::Later {
                    *reach = Reach::On;
                }
            }
        }
        let item = link.queues[side].pop_front()?;
        if let Item::Message { .. } | Item::StreamBroken(_) = item {
            link.flows[side].delivered += 1;
        }
        if let Item::Departed(departure) = item {
            link.panes.iter_mut().for_each(|panes| panes.forget(side));
            link.shares[side].forget();
            if let Some(list) = places[me].links.get_mut(&peer) {
                list.pop_front();
            }
            self.expected.remove(&(me, peer));
            self.note(me, What::Departed { peer, departure });
        }
        Some((peer, item))
    }

    /// The stream from `me` to `peer`, if their link stands.
    fn flow(&mut self, me: Slot, peer: Slot) -> Option<&mut Flow> {
        let link = self.current(me, peer).filter(|link| me != peer && !self.links[*link].broken)?;
        let link = &mut self.links[link];
        let side = link.writes(me);
        Some(&mut link.flows[side])
    }

    /// One step of one of the streams at `me`.
    fn stream_step(&mut self, me: Slot) -> Option<(Slot, Step)> {
        let breaks = self.weather.stream_breaks;
        let peers: Vec<Slot> = self.places[me].links.keys().copied().collect();
        for peer in peers.into_iter().filter(|peer| *peer != me) {
            let mut rng = self.rng.clone();
            if let Some(number) = self.flow(me, peer).and_then(Flow::take_broken) {
                let link = self.current(me, peer)?;
                let side = self.links[link].writes(me);
                self.links[link].queues[side].push_back(Item::StreamBroken(number));
                self.links[link].flows[side].sent += 1;
                return Some((peer, Step::Lost(StreamEnd::Outgoing)));
            }
            let Some(link) = self.current(me, peer) else { continue };
            let side = self.links[link].reads(me);
            let step = self.links[link].flows[side].step(&mut rng, breaks);
            self.rng = rng;
            if let Some(step) = step {
                return Some((peer, step));
            }
        }
        None
    }

    /// The state of the devices of one kind of keys on the link between two endpoints, the end of it that `me` is, and the
    /// parameters and random numbers that it depends on.
    fn panes(
        &mut self,
        (me, peer): (Slot, Slot),
        kind: u8,
    ) -> Option<(&mut Panes, usize, &Glazing, &mut Rng)> {
        let glazed = self.weather.windows.max > 0 || self.weather.windows.exposes;
        let link = self.current(me, peer).filter(|_| me != peer && glazed)?;
        let Self { links, weather, rng, .. } = self;
        let link = &mut links[link];
        let side = link.reads(me);
        let panes = link.panes.iter_mut().find(|panes| panes.rail.has(kind))?;
        Some((panes, side, &weather.windows, rng))
    }

    /// The buffers that `me` advertises.
    pub(super) fn held(&self, me: Slot) -> impl Iterator<Item = &Held> {
        let links = self.places[me].links.values().flatten().map(|link| &self.links[*link]);
        links.flat_map(move |link| {
            link.panes.iter().flat_map(move |panes| panes.held(link.reads(me)))
        })
    }

    /// The connection between `a` and `b`, as `a` believes.
    pub(super) fn connection(&self, a: Slot, b: Slot) -> u32 {
        self.connection_of((a, b), RAILS[0])
    }

    /// The same for the devices of a lane.
    pub(super) fn connection_of(&self, (a, b): (Slot, Slot), rail: LaneId) -> u32 {
        let link = &self.links[self.current(a, b).unwrap()];
        let panes = link.panes.iter().find(|panes| panes.rail == rail).unwrap();
        panes.known(link.reads(a))
    }

    /// The lanes that `me` advertises regions to `peer` on.
    pub(super) fn advertised(&self, me: Slot, peer: Slot) -> Vec<LaneId> {
        let link = &self.links[self.current(me, peer).unwrap()];
        let panes = link.panes.iter().filter(|panes| panes.advertises(link.reads(me)));
        panes.map(|panes| panes.rail).collect()
    }

    /// Whether `me` has memory under a key that it made for `peer`.
    pub(super) fn is_registered(&self, me: Slot, peer: Slot, key: &RemoteKey) -> bool {
        let link = &self.links[self.current(me, peer).unwrap()];
        let panes = link.panes.iter().find(|panes| panes.rail.made(key));
        panes.is_some_and(|panes| panes.is_registered(link.reads(me), key))
    }

    /// The reads of messages that `me` has begun: tokens, and their destinations.
    pub(super) fn reading(&self, me: Slot) -> impl Iterator<Item = (u64, &SegmentList)> {
        let links = self.places[me].links.values().flatten().map(|link| &self.links[*link]);
        links.flat_map(move |link| {
            link.panes.iter().flat_map(move |panes| panes.reading(link.reads(me)))
        })
    }

    /// Ends the connection of the first devices between `a` and `b`.
    pub(super) fn lose_windows(&mut self, a: Slot, b: Slot, state: Prepared) {
        self.lose_rail((a, b), RAILS[0], state);
    }

    /// Ends the connection of the devices of a lane.
    pub(super) fn lose_rail(&mut self, ends: (Slot, Slot), rail: LaneId, state: Prepared) {
        let (panes, _, _, rng) = self.panes(ends, rail.kind()).unwrap();
        panes.lose(state, rng);
    }

    pub(super) fn set_windows(&mut self, a: Slot, b: Slot, state: Prepared) {
        self.set_rail((a, b), RAILS[0], state);
    }

    pub(super) fn set_rail(&mut self, ends: (Slot, Slot), rail: LaneId, state: Prepared) {
        self.panes(ends, rail.kind()).unwrap().0.state = state;
    }

    /// One event of the device connections of `me`.
    fn window_step(&mut self, me: Slot) -> Option<(Slot, LaneId, sim_window::Step)> {
        let peers: Vec<Slot> = self.places[me].links.keys().copied().collect();
        peers.into_iter().find_map(|peer| {
            RAILS.into_iter().find_map(|rail| {
                let (panes, side, glazing, rng) = self.panes((me, peer), rail.kind())?;
                Some((peer, rail, panes.step(side, glazing, rng)?))
            })
        })
    }

    /// The split copies between `me` and `peer`, which sends the messages.
    fn shares(&mut self, me: Slot, peer: Slot) -> Option<(&mut Shares, &Teamwork, &mut Rng)> {
        let link = self.current(me, peer).filter(|_| me != peer)?;
        let Self { links, weather, rng, .. } = self;
        let link = &mut links[link];
        let side = link.reads(me);
        Some((&mut link.shares[side], &weather.teamwork, rng))
    }

    /// How many bytes a one-sided access of `len` bytes by `me` may move.
    fn reach(&mut self, me: Slot, peer: Slot, get: bool, len: usize) -> Result<usize, SendError> {
        assert!(len > 0, "a one-sided access moves something");
        let Some(link) = self.current(me, peer).filter(|link| !self.links[*link].broken) else {
            return Err(SendError::Unreachable(Errno(libc::ESRCH)));
        };
        let side = self.links[link].reads(me);
        let link = &mut self.links[link];
        let reach = if get { &mut link.get[side] } else { &mut link.put[side] };
        let part = 1 + self.rng.below(len);
        match reach {
            Reach::Off | Reach::Later => panic!("access although it does not work"),
            Reach::On => Ok(len),
            Reach::Short => Ok(part),
            Reach::Shy if self.rng.percent(50) => Err(SendError::Again),
            Reach::Shy => Ok(len),
            Reach::Fails { after: 0, errno } => Err(SendError::Unreachable(Errno(*errno))),
            Reach::Fails { after, .. } => {
                *after -= 1;
                Ok(part)
            }
        }
    }
}

/// One endpoint's end of the network.
#[derive(Debug)]
pub(super) struct SimIface {
    net: SharedNet,
    me: Slot,
    peers: Vec<Slot>,
}

impl SimIface {
    /// Whether something will wake the endpoint soon.
    pub(super) fn take_nudge(&mut self) -> bool {
        std::mem::take(&mut self.net.borrow_mut().places[self.me].nudged)
    }

    fn intern(&mut self, slot: Slot) -> PeerId {
        let at = self.peers.iter().position(|s| *s == slot).unwrap_or_else(|| {
            self.peers.push(slot);
            self.peers.len() - 1
        });
        PeerId(at as u32)
    }

    fn slot(&self, peer: PeerId) -> Slot {
        self.peers[peer.index()]
    }

    /// The epoch of the keys that `peer` has of the regions of this endpoint, where it accesses them itself.
    fn epoch_of(&self, peer: Slot) -> Option<u32> {
        let net = self.net.borrow();
        let link = &net.links[net.current(peer, self.me).filter(|_| peer != self.me)?];
        (!net.weather.windows.reaches()).then(|| link.epochs[link.reads(peer)])
    }

    /// Fails if the peer has no memory where it says, as the kernel would find.
    fn check_described(&self, remote: usize, local: usize) -> Result<(), SendError> {
        let lies = self.net.borrow().weather.lies;
        assert!(lies || remote == local, "access of {remote} B for {local} B");
        if remote == 0 { Err(SendError::Unreachable(Errno(libc::EFAULT))) } else { Ok(()) }
    }

    fn caps_now(&self, peer: PeerId) -> Caps {
        let net = self.net.borrow();
        let Weather { short_max, bcopy_max, .. } = net.weather;
        let works = |reach: Reach| !matches!(reach, Reach::Off | Reach::Later);
        let (get, put) = net.current(self.me, self.slot(peer)).map_or((false, false), |link| {
            let link = &net.links[link];
            let side = link.reads(self.me);
            (works(link.get[side]), works(link.put[side]))
        });
        let one_sided = net.current(self.me, self.slot(peer)).is_none_or(|link| {
            let link = &net.links[link];
            link.get.iter().chain(&link.put).any(|reach| !matches!(reach, Reach::Off))
        });
        let fragment_max = bcopy_max;
        let push_max = net.weather.push_max;
        let announces_room = net.weather.announces_room && self.slot(peer) != self.me;
        let stream_max = net.weather.stream_max;
        Caps {
            short_max,
            bcopy_max,
            fragment_max,
            push_max,
            stream_max,
            stream_min: 300,
            get,
            put,
            itself: false,
            one_sided,
            atomics: net.weather.atomics,
            collectives: net.weather.collectives(self.slot(peer)),
            announces_room,
            outlives: net.weather.outlives,
        }
    }
}

impl SimIface {
    /// Runs a few events of the device connections. Returns how many.
    fn run_windows(&mut self, handler: &mut impl Handler) -> usize {
        let steps = self.net.borrow_mut().rng.below(4);
        for n in 0..steps {
            let step = self.net.borrow_mut().window_step(self.me);
            let Some((slot, rail, step)) = step else { return n };
            let peer = self.intern(slot);
            match step {
                sim_window::Step::Notify(token) => handler.on_notify(peer, token),
                sim_window::Step::Lost => handler.on_lane_lost(peer, rail),
                sim_window::Step::Done(token) => handler.on_done(peer, token),
                sim_window::Step::Void(key) => handler.on_key_void(peer, &key),
            }
        }
        steps
    }

    /// Asserts that `work` does not change buffers that are advertised.
    fn check_lent<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let bytes = |net: &Net| net.held(self.me).map(Held::bytes).collect::<Vec<_>>();
        let before = bytes(&self.net.borrow());
        let result = work(self);
        let after = self.net.borrow().held(self.me).map(Held::bytes).collect::<Vec<_>>();
        assert!(before == after, "memory is written that is lent");
        result
    }

    /// Runs a few steps of the streams to and from this endpoint. Returns how many.
    fn run_streams(&mut self, handler: &mut impl Handler) -> usize {
        for n in 0..4 {
            let step = self.net.borrow_mut().stream_step(self.me);
            let Some((slot, step)) = step else { return n };
            let peer = self.intern(slot);
            let flow = |way: &mut dyn FnMut(&mut Way)| {
                let mut net = self.net.borrow_mut();
                if let Some(link) = net.current(self.me, slot) {
                    let side = net.links[link].reads(self.me);
                    way(&mut net.links[link].flows[side].way);
                }
            };
            match step {
                Step::Lost(end) => handler.on_stream_lost(peer, end),
                Step::Begin(header, len) => {
                    let target = handler.place(peer, &header, len);
                    flow(&mut |way| way.target = Some(target));
                }
                Step::Placed(header, bytes, target) => match target {
                    Some(target) => {
                        let kept = &bytes[..bytes.len().min(target.len())];
                        if target.copy_in(0, kept) == kept.len() {
                            handler.on_placed(peer, &header, bytes.len());
                            continue;
                        }
                        // A device that fails.
                        let mut net = self.net.borrow_mut();
                        if let Some(link) = net.current(self.me, slot) {
                            let side = net.links[link].reads(self.me);
                            net.links[link].flows[side].end_at_reader();
                        }
                        drop(net);
                        handler.on_stream_lost(peer, StreamEnd::Incoming);
                    }
                    None => handler.on_message(peer, &header, &bytes),
                },
            }
        }
        4
    }
}

impl Messages for SimIface {
    fn caps(&self, peer: PeerId) -> Caps {
        self.caps_now(peer)
    }

    fn send(
        &mut self,
        peer: PeerId,
        mode: Mode,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        let mut net = self.net.borrow_mut();
        match mode {
            Mode::Bulk | Mode::Fragment => {
                assert!(len <= net.weather.bcopy_max, "too long for a bcopy message");
            }
            Mode::Short | Mode::Late | Mode::Announcement => {
                let most = net.weather.short_max;
                assert!(header.len() + len <= most, "too long for a short message");
            }
        }
        net.transmit(self.me, self.peers[peer.index()], header, len, pack)
    }

    fn send_at_once(&mut self, peer: PeerId, head: &Head, payload: Segment) -> bool {
        let pressed = self.under_pressure(peer);
        let mut net = self.net.borrow_mut();
        let link = net.current(self.me, self.slot(peer));
        let open = link.is_some_and(|link| !net.links[link].broken);
        if !open || pressed || net.rng.percent(30) || payload.len() > net.weather.bcopy_max {
            return false;
        }
        let header: Vec<u8> = head.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let pack = |at: usize, to: &mut [u8]| {
            SegmentList::from(payload).copy_out(at, to);
        };
        let to = self.peers[peer.index()];
        net.transmit(self.me, to, &header[..head.len], payload.len(), pack).is_ok()
    }

    fn send_whole(
        &mut self,
        peer: PeerId,
        first: &[u8],
        payload: Segment,
        next: impl Fn(usize) -> Head,
    ) -> bool {
        let Caps { fragment_max, push_max, outlives, .. } = self.caps_now(peer);
        let pressed = self.under_pressure(peer);
        let mut net = self.net.borrow_mut();
        let Some(link) = net.current(self.me, self.slot(peer)) else { return false };
        let link = &net.links[link];
        let open = !link.broken && !pressed && outlives && payload.len() <= push_max;
        let room = net.weather.queue_len.saturating_sub(link.queues[link.writes(self.me)].len());
        if !open || room <= payload.len().div_ceil(fragment_max) || net.rng.percent(30) {
            return false;
        }
        let again_percent = std::mem::take(&mut net.weather.again_percent);
        let to = self.peers[peer.index()];
        net.transmit(self.me, to, first, 0, |_, _| ()).unwrap();
        for at in (0..payload.len()).step_by(fragment_max) {
            let part = payload.part(at, fragment_max);
            let head = next(at);
            let header: Vec<u8> = head.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let pack = |at: usize, to: &mut [u8]| {
                SegmentList::from(part).copy_out(at, to);
            };
            net.transmit(self.me, to, &header[..head.len], part.len(), pack).unwrap();
        }
        net.weather.again_percent = again_percent;
        true
    }

    fn under_pressure(&self, peer: PeerId) -> bool {
        let net = self.net.borrow();
        let peer = self.slot(peer);
        net.current(self.me, peer).is_some_and(|l| !net.links[l].broken) && net.is_pressed(peer)
    }

    fn set_pressure(&mut self, on: bool) {
        self.net.borrow_mut().places[self.me].pressure = on;
    }
}

/// The kind of the keys of direct copies: the epoch and the address.
const COPIED: u8 = 1;
const COPIES: LaneId = LaneId::of(&[COPIED]);

const STALE: SendError = SendError::Unreachable(Errno(libc::ESTALE));
/// What the router answers for device memory.
const NO_WAY: SendError = SendError::Unreachable(Errno(libc::EOPNOTSUPP));

impl SimIface {
    /// A get, a put (`how`) or, without `local` bytes, a flush.
    fn access(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        at: &Remote,
        (reads, how): (bool, Put),
    ) -> Result<Access, SendError> {
        let (mut net, slot) = (self.net.borrow_mut(), self.slot(peer));
        let is_of_a_rail = RAILS.iter().any(|rail| rail.made(&at.key));
        if local.is_on_device() && !(net.weather.windows.reads && is_of_a_rail) {
            return Err(NO_WAY);
        }
        if at.key == RemoteKey::ADDRESSES {
            drop(net);
            return self.copy(peer, local, at.offset, reads);
        }
        if at.key.kind() != COPIED {
            let Weather { again_percent, queue_len, .. } = net.weather;
            let broken = net.has_broken(self.me, slot);
            let panes = net.panes((self.me, slot), at.key.kind());
            let Some((panes, side, glazing, rng)) = panes.filter(|_| !broken) else {
                return if how.notify { Ok(Access::Silent) } else { Err(STALE) };
            };
            let (begun, hesitates) = if !how.notify {
                (panes.reach(side, at, local, (reads, how), glazing, rng), false)
            } else if rng.percent(again_percent) {
                (Err(SendError::Again), true)
            } else {
                (panes.write(side, local, (&at.key, how), queue_len, glazing, rng), false)
            };
            if panes.has_hesitated() || hesitates {
                net.places[self.me].nudged = true;
            }
            return begun;
        }
        let link = net.current(self.me, slot).map(|link| &net.links[link]);
        let epoch = link.map(|link| u64::from(link.epochs[link.reads(self.me)]));
        if epoch.is_none() || epoch != at.key.word(0) {
            return Err(STALE);
        }
        drop(net);
        self.copy(peer, local, at.key.word(1).unwrap() + at.offset, reads)
    }

    /// A copy from or to the memory of a peer.
    fn copy(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        addr: u64,
        reads: bool,
    ) -> Result<Access, SendError> {
        let may = self.net.borrow_mut().reach(self.me, self.slot(peer), reads, local.len())?;
        let far = Loopback::list(&[Range { addr, len: local.len() as u64 }]).unwrap();
        self.check_described(far.len(), local.len())?;
        Ok(Access::Moved(match reads {
            true => Loopback::copy(&far, &local.slice(0, may)),
            false => Loopback::copy(&local.slice(0, may), &far),
        }))
    }
}

impl OneSided for SimIface {
    fn lanes(&self, peer: PeerId) -> Lanes {
        let Caps { get, put, .. } = self.caps_now(peer);
        let net = self.net.borrow();
        let Glazing { rails, max, min, reads, exposes, expose_max, .. } = net.weather.windows;
        let mut lanes = Lanes::default();
        for (rail, latency_ns) in RAILS.into_iter().take(rails).zip(1..) {
            lanes.push(LaneCaps {
                receive_max: max,
                receive_min: min,
                reads,
                device: reads,
                read_min: exposes.then_some(64 * latency_ns as usize),
                write_min: exposes.then_some(128 * latency_ns as usize),
                register_max: if exposes { expose_max } else { 0 },
                ..LaneCaps::of_host(rail, latency_ns, 1000)
            });
        }
        if !exposes {
            lanes.push(LaneCaps {
                read_min: get.then_some(usize::MAX),
                write_min: put.then_some(usize::MAX),
                register_max: expose_max,
                ..LaneCaps::of_host(COPIES, 100, 1000)
            });
        }
        lanes
    }

    fn prepare(&mut self, peer: PeerId, lane: LaneId) -> Prepared {
        let (mut net, peer) = (self.net.borrow_mut(), self.peers[peer.index()]);
        let hesitates = net.weather.again_percent;
        let Some((panes, side, glazing, rng)) = net.panes((self.me, peer), lane.kind()) else {
            return Prepared::No;
        };
        let now = panes.prepare(side, glazing, rng);
        if now == Prepared::Ready && rng.percent(hesitates) { Prepared::Later } else { now }
    }

    fn lends(&mut self, peer: PeerId, lane: LaneId) -> Prepared {
        let (mut net, peer) = (self.net.borrow_mut(), self.peers[peer.index()]);
        let room = net.panes((self.me, peer), lane.kind()).map(|(panes, side, glazing, _)| {
            if panes.has_room(side, glazing) { Prepared::Ready } else { Prepared::Later }
        });
        room.unwrap_or(Prepared::No)
    }

    fn register(
        &mut self,
        peer: PeerId,
        lane: LaneId,
        memory: &SegmentList,
        purpose: Purpose,
    ) -> Registered {
        let (mut net, slot) = (self.net.borrow_mut(), self.slot(peer));
        let (again, broken) = (net.weather.again_percent, net.has_broken(self.me, slot));
        if let (Purpose::Region { reads, writes, .. }, true) = (purpose, lane == COPIES) {
            drop(net);
            let Some(epoch) = self.epoch_of(slot) else { return Registered::No };
            let key = RemoteKey::new(COPIED).with(epoch.into()).with(memory.first_addr());
            return Registered::Yes(Registration { key, reads, writes, confirms: true });
        }
        let panes = net.panes((self.me, slot), lane.kind());
        let Some((panes, side, glazing, rng)) = panes.filter(|_| !broken) else {
            return Registered::No;
        };
        if matches!(purpose, Purpose::Receive { .. }) && rng.percent(again) {
            return Registered::Later;
        }
        let registered = panes.register(side, memory, purpose, glazing, rng);
        if panes.has_hesitated() {
            net.places[self.me].nudged = true;
        }
        registered
    }

    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey) -> bool {
        let (mut net, peer) = (self.net.borrow_mut(), self.peers[peer.index()]);
        if key.kind() != COPIED {
            if let Some((panes, side, ..)) = net.panes((self.me, peer), key.kind()) {
                panes.invalidate(side, key);
            }
            return false;
        }
        let Some(link) = net.current(peer, self.me) else { return true };
        let link = &mut net.links[link];
        link.epochs[link.reads(peer)] += 1;
        true
    }

    fn is_current(&self, peer: PeerId, key: &RemoteKey) -> bool {
        let (mut net, peer) = (self.net.borrow_mut(), self.peers[peer.index()]);
        let panes = net.panes((self.me, peer), key.kind());
        panes.is_some_and(|(panes, side, ..)| panes.is_current(side, key))
    }

    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        to: &Remote,
        how: Put,
    ) -> Result<Access, SendError> {
        self.access(peer, local, to, (false, how))
    }

    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        from: &Remote,
        token: u64,
    ) -> Result<Access, SendError> {
        let how = Put { notify: false, delivered: false, stays: false, reports: false, token };
        self.access(peer, local, from, (true, how))
    }

    fn flush_puts(&mut self, peer: PeerId, at: &Remote, token: u64) -> Result<Access, SendError> {
        let how = Put { notify: false, delivered: true, stays: false, reports: false, token };
        self.access(peer, &SegmentList::EMPTY, at, (false, how))
    }
}

impl Streaming for SimIface {
    fn has_stream(&mut self, peer: PeerId) -> bool {
        let mut net = self.net.borrow_mut();
        let later = net.rng.percent(20);
        let flow = net.flow(self.me, self.peers[peer.index()]);
        !later && flow.is_some_and(Flow::open)
    }

    fn send_by_stream(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &SegmentList,
    ) -> Result<(), SendError> {
        let mut net = self.net.borrow_mut();
        assert!(payload.len() <= net.weather.stream_max, "too long for a stream");
        let full = net.weather.queue_len;
        let again = net.weather.again_percent;
        if net.rng.percent(again) {
            return Err(net.hesitate(self.me));
        }
        let mut bytes = vec![0; payload.len()];
        payload.copy_out(0, &mut bytes);
        let taken = net
            .flow(self.me, self.peers[peer.index()])
            .is_none_or(|flow| flow.send(header, bytes, full));
        if taken { Ok(()) } else { Err(net.again()) }
    }
}

impl Sharing for SimIface {
    fn share(&mut self, peer: PeerId, len: usize) -> Option<Share> {
        let works = self.caps_now(peer).get;
        let (mut net, peer) = (self.net.borrow_mut(), self.peers[peer.index()]);
        let (again, broken) = (net.weather.again_percent, net.has_broken(self.me, peer));
        let (shares, teamwork, rng) = net.shares(self.me, peer)?;
        let wanted = works && !broken && teamwork.min > 0 && len >= teamwork.min;
        if !wanted || rng.percent(again) {
            return None;
        }
        shares.begin(len, teamwork.unit)
    }

    fn take(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        let (mut net, peer) = (self.net.borrow_mut(), self.peers[peer.index()]);
        let (shares, teamwork, rng) = net.shares(self.me, peer).unwrap();
        if rng.percent(teamwork.arrives) {
            shares.land();
        }
        shares.take(share, most)
    }

    fn arrived(&mut self, peer: PeerId, share: &Share, units: u32) {
        let (mut net, peer) = (self.net.borrow_mut(), self.peers[peer.index()]);
        net.shares(self.me, peer).unwrap().0.arrived(share, units);
    }

    fn begin_assist(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        let slot = self.slot(peer);
        let mut net = self.net.borrow_mut();
        if net.has_broken(self.me, slot) {
            return Taken::Over;
        }
        let again = net.weather.again_percent;
        let Some((shares, _, rng)) = net.shares(slot, self.me) else { return Taken::Over };
        // There may be less room than needed: chunks in progress then continue later.
        match rng.percent(again) {
            true => Taken::Wait,
            false => shares.begin_assist(share, most),
        }
    }

    fn stop_sharing(&mut self, peer: PeerId, share: &Share) {
        let (mut net, peer) = (self.net.borrow_mut(), self.peers[peer.index()]);
        net.shares(self.me, peer).unwrap().0.stop(share);
    }

    fn assist(
        &mut self,
        peer: PeerId,
        share: &Share,
        part: impl Fn(usize, usize) -> (SegmentList, [Range; MAX_SEGMENTS], usize),
    ) -> Assisted {
        let (works, slot) = (self.caps_now(peer).put, self.slot(peer));
        if !works || self.net.borrow().has_broken(self.me, slot) {
            return Assisted::Over;
        }
        let mut net = self.net.borrow_mut();
        let reach = net.reach(self.me, slot, false, 1500);
        let lies = net.weather.lies;
        let Some((shares, teamwork, rng)) = net.shares(slot, self.me) else {
            return Assisted::Over;
        };
        shares.assist(share, teamwork, rng, |offset, len| {
            let may = reach.ok()?.min(len);
            let (local, remote, count) = part(offset, len);
            let to = Loopback::list(&remote[..count]).unwrap();
            assert!(lies || (local.len(), to.len()) == (len, len), "a part of another length");
            if local.len() < may || to.len() < may {
                return None;
            }
            let mut bytes = vec![0; may];
            local.copy_out(0, &mut bytes);
            Some((bytes, to.slice(0, may)))
        })
    }
}

impl Iface for SimIface {
    fn connect(&mut self, address: &Address) -> Result<PeerId, SendError> {
        let slot = usize::from(address.port()) - 1;
        let peer = self.intern(slot);
        let mut net = self.net.borrow_mut();
        let doubt = net.weather.again_percent / 4;
        if net.rng.percent(doubt) {
            return Err(net.again());
        }
        net.ensure(self.me, slot).map(|_| peer)
    }

    fn address_of(&self, peer: PeerId) -> Option<Address> {
        self.peers.get(peer.index()).map(|slot| address(*slot))
    }

    fn poll(&mut self, handler: &mut impl Handler) -> usize {
        let batch = {
            let mut net = self.net.borrow_mut();
            let batch = net.weather.batch;
            1 + net.rng.below(batch)
        };
        let steps = self.run_windows(handler);
        let steps = steps + self.check_lent(|iface| iface.run_streams(handler));
        for n in 0..batch {
            let next = self.net.borrow_mut().next_item(self.me);
            let Some((slot, item)) = next else { return n + steps };
            let peer = self.intern(slot);
            match item {
                Item::Hello => {
                    self.net.borrow().note(self.me, What::Met { peer: slot });
                    handler.on_peer(peer, &address(slot));
                }
                Item::StreamBroken(number) => {
                    let mut net = self.net.borrow_mut();
                    if let Some(link) = net.current(self.me, slot) {
                        let side = net.links[link].reads(self.me);
                        net.links[link].flows[side].drop_until(number);
                    }
                    drop(net);
                    handler.on_stream_lost(peer, StreamEnd::Incoming);
                }
                Item::Departed(departure) => handler.on_departure(peer, departure),
                Item::Message { header, payload, message } => {
                    if let Some(message) = message {
                        let rendezvous =
                            matches!(Packet::decode(&header), Some(Packet::Rts { .. }));
                        self.net.borrow().note(self.me, What::Arrived { message, rendezvous });
                    }
                    self.check_lent(|_| handler.on_message(peer, &header, &payload));
                    if handler.wants_pause() {
                        return n + 1 + steps;
                    }
                }
            }
        }
        batch + steps
    }
}
