//! The network: what happens to a datagram between its sender and the receiver's switch port.
//!
//! A datagram passes the sender's interface (a rate, and a queue that blocks when it is full), a
//! path (loss, delay, damage, partitions), and the switch's port to the receiver (a rate, a queue
//! that drops when it is full or marks when it is long); then it lies in the receiver's socket
//! buffer, which drops too.

use super::clock::{Clock, Event};
use super::rng::{Chance, Rng};
use super::weather::{Cut, Path, Weather};
use crate::transport::Address;
use crate::transport::net::link::{Condition, Link, LinkSink};
use crate::transport::net::reliable::packet::{Dump, HEADER_ONLY, MAGIC};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// An address in the network, which one endpoint after another may use.
pub(super) type Slot = u32;

/// Bytes on the wire beside those of a datagram: UDP, IPv4, and Ethernet with preamble and gap.
const WIRE_OVERHEAD: u64 = 66;
/// Most datagrams that an eavesdropper keeps for replays.
const CAPTURE: usize = 512;
const PORT: u16 = 7471;
/// Number of slots up to which the network keeps state for each pair.
const SMALL: usize = 64;

pub(super) fn address(slot: Slot) -> Address {
    let [_, a, b, c] = slot.to_be_bytes();
    Address(SocketAddr::from((Ipv4Addr::new(10, a, b, c), PORT)))
}

/// The slot with this address.
pub(super) fn slot_of(address: &Address) -> Slot {
    let IpAddr::V4(ip) = address.0.ip() else { panic!("{address} is nobody's") };
    let [_, a, b, c] = ip.octets();
    u32::from_be_bytes([0, a, b, c])
}

/// Counts of datagrams by their fate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fates {
    pub(super) sent: u64,
    /// Lost by chance, in bursts, or in partitions.
    pub(super) lost: u64,
    pub(super) cut: u64,
    /// Dropped by full ports and sockets.
    pub(super) port_full: u64,
    pub(super) socket_full: u64,
    /// Sent to slots without an endpoint.
    pub(super) nobody: u64,
    pub(super) damaged: u64,
    pub(super) too_long: u64,
    pub(super) duplicated: u64,
    /// Overtaken by a datagram that was sent later.
    pub(super) reordered: u64,
    pub(super) marked: u64,
    pub(super) forged: u64,
    pub(super) received: u64,
}

impl Fates {
    pub(super) fn sum(&self, other: &Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            lost: self.lost + other.lost,
            cut: self.cut + other.cut,
            port_full: self.port_full + other.port_full,
            socket_full: self.socket_full + other.socket_full,
            nobody: self.nobody + other.nobody,
            damaged: self.damaged + other.damaged,
            too_long: self.too_long + other.too_long,
            duplicated: self.duplicated + other.duplicated,
            reordered: self.reordered + other.reordered,
            marked: self.marked + other.marked,
            forged: self.forged + other.forged,
            received: self.received + other.received,
        }
    }

    /// Datagrams that did not arrive, or not unchanged.
    pub(super) fn gone(&self) -> u64 {
        self.lost
            + self.cut
            + self.port_full
            + self.socket_full
            + self.nobody
            + self.damaged
            + self.too_long
    }
}

#[derive(Debug, Default)]
pub(super) struct Datagram {
    pub(super) from: Slot,
    pub(super) to: Slot,
    pub(super) condition: Condition,
    pub(super) bytes: Vec<u8>,
}

impl Datagram {
    pub(super) fn wire_len(&self) -> u64 {
        self.bytes.len() as u64 + WIRE_OVERHEAD
    }
}

#[derive(Debug)]
pub(super) struct Network {
    pub(super) clock: Clock,
    pub(super) rng: Rng,
    /// Draws which device paths are suspect.
    ways: Rng,
    pub(super) weather: Weather,
    pub(super) cuts: Vec<Cut>,
    pub(super) fates: Fates,
    pub(super) trace: bool,
    slots: usize,
    datagrams: Vec<Datagram>,
    free: Vec<u32>,
    /// When each interface will have sent what it has taken, picoseconds.
    busy: Vec<u64>,
    /// Whether a slot's long datagrams are fragmented.
    pub(super) in_parts: Vec<bool>,
    /// Index into `weather.others` plus one, by sender and receiver; empty if all are alike.
    paths: Vec<u16>,
    /// When the burst of losses of each path ends, nanoseconds; empty if there are none.
    bursts: Vec<u64>,
    /// When the latest datagram of each path arrives, nanoseconds; empty in large networks.
    latest: Vec<u64>,
    /// Captured datagrams; the eavesdropper can use each from this time on.
    captured: VecDeque<(u64, Slot, Vec<u8>)>,
    pub(super) capture: bool,
}

impl Network {
    pub(super) fn new(seed: u64, slots: usize, weather: Weather) -> Self {
        let mut paths = Vec::new();
        if !weather.others.is_empty() {
            paths.resize(slots * slots, 0);
            for (i, (from, to, _)) in weather.others.iter().enumerate() {
                paths[*from as usize * slots + *to as usize] = i as u16 + 1;
            }
        }
        let any_burst = std::iter::once(&weather.path)
            .chain(weather.others.iter().map(|(_, _, path)| path))
            .any(|path| path.burst.begins != Chance::NEVER);
        Self {
            clock: Clock::default(),
            rng: Rng::new(seed),
            ways: Rng::new(!seed),
            cuts: Vec::new(),
            fates: Fates::default(),
            trace: std::env::var_os("UDRV_TEST_TRACE").is_some(),
            slots,
            datagrams: Vec::new(),
            free: Vec::new(),
            busy: vec![0; slots],
            in_parts: vec![false; slots],
            paths,
            bursts: if any_burst { vec![0; slots * slots] } else { Vec::new() },
            latest: vec![0; if slots <= SMALL { slots * slots } else { 0 }],
            captured: VecDeque::new(),
            capture: false,
            weather,
        }
    }

    /// Whether a partition or chance loses a datagram between two slots now.
    pub(super) fn loses(&mut self, from: Slot, to: Slot) -> bool {
        let now = self.clock.now;
        if self.is_cut(from, to) {
            self.fates.cut += 1;
            return true;
        }
        let at = from as usize * self.slots + to as usize;
        let Self { weather, paths, bursts, rng, .. } = self;
        let path = path_at(weather, paths, at);
        let mut lost = rng.happens(path.loss);
        if let Some(burst) = bursts.get_mut(at) {
            if *burst <= now && rng.happens(path.burst.begins) {
                *burst = now + 1 + rng.below(path.burst.length_ns);
            }
            lost |= *burst > now && rng.happens(path.burst.loss);
        }
        self.fates.lost += u64::from(lost);
        lost
    }

    pub(super) fn is_cut(&self, from: Slot, to: Slot) -> bool {
        let now = self.clock.now;
        self.cuts.iter().any(|cut| {
            (cut.start..cut.end).contains(&now)
                && cut.from >> from & 1 == 1
                && cut.to >> to & 1 == 1
        })
    }

    /// How long a datagram is in flight, apart from its transmission time, nanoseconds.
    pub(super) fn draw_delay(&mut self, from: Slot, to: Slot) -> u64 {
        let at = from as usize * self.slots + to as usize;
        let Self { weather, paths, rng, .. } = self;
        let path = path_at(weather, paths, at);
        let mut delay = path.delay_ns;
        if path.jitter_ns > 0 {
            delay += rng.below(path.jitter_ns);
        }
        if rng.happens(path.reorder) {
            delay += rng.below(path.reorder_ns + 1);
        }
        delay
    }

    /// When the interface of `slot` can take more, nanoseconds.
    pub(super) fn interface_opens(&self, slot: Slot) -> u64 {
        let half = self.weather.interface_bytes / 2 * self.weather.byte_ps;
        self.busy[slot as usize].saturating_sub(half) / 1000
    }

    /// Sends one datagram. False: the interface cannot take more now.
    fn transmit(&mut self, from: Slot, to: Slot, bytes: &[u8]) -> bool {
        let sound = !bytes.starts_with(&MAGIC) && bytes[1] & HEADER_ONLY != 0;
        let now = self.clock.now;
        let Self { weather, busy, rng, .. } = self;
        let busy = &mut busy[from as usize];
        let waiting_ps = busy.saturating_sub(now * 1000);
        if waiting_ps > weather.interface_bytes.saturating_mul(weather.byte_ps)
            || rng.happens(weather.again)
        {
            return false;
        }
        let wire_ps = (bytes.len() as u64 + WIRE_OVERHEAD) * weather.byte_ps;
        *busy = (*busy).max(now * 1000) + wire_ps;
        let leaves = *busy / 1000;
        self.fates.sent += 1;
        if self.capture && (bytes.starts_with(&MAGIC) || self.rng.percent(3)) {
            self.captured.push_back((leaves, to, bytes.to_vec()));
            if self.captured.len() > CAPTURE {
                let at = self.rng.index(CAPTURE);
                self.captured.swap_remove_back(at);
            }
        }
        let lost = self.loses(from, to);
        if self.trace {
            let fate = if lost { "LOST " } else { "" };
            eprintln!("{:>12} {from} > {to} {fate}{}", now as f64 / 1000.0, Dump(bytes));
        }
        if lost {
            return true;
        }
        let at = from as usize * self.slots + to as usize;
        let path = path_at(&self.weather, &self.paths, at);
        let (duplicate, damage) = (path.duplicate, path.damage);
        if bytes.len() > path.carries && (path.uncut || !self.in_parts[from as usize]) {
            self.fates.too_long += 1;
            return true;
        }
        let copies = 1 + u64::from(self.rng.happens(duplicate));
        self.fates.duplicated += copies - 1;
        for _ in 0..copies {
            let damaged = self.rng.happens(damage);
            let delay = self.draw_delay(from, to);
            self.fates.damaged += u64::from(damaged);
            if damaged && sound {
                continue;
            }
            let id = self.store(from, to, bytes, sound);
            if damaged {
                let Self { rng, datagrams, .. } = self;
                spoil(rng, &mut datagrams[id as usize].bytes);
            }
            let arrives = leaves + delay;
            if let Some(latest) = self.latest.get_mut(at) {
                self.fates.reordered += u64::from(arrives < *latest);
                *latest = arrives.max(*latest);
            }
            self.clock.at(arrives, Event::Arrive(id));
        }
        true
    }

    /// A datagram that no endpoint has sent, or not now: goes directly to the port of `to`.
    pub(super) fn inject(&mut self, from: Slot, to: Slot, bytes: &[u8]) {
        self.fates.forged += 1;
        if self.trace {
            eprintln!("{:>12} ? > {to} {}", self.clock.now as f64 / 1000.0, Dump(bytes));
        }
        let id = self.store(from, to, bytes, false);
        self.clock.at(self.clock.now, Event::Arrive(id));
    }

    /// The captured datagrams and their receivers.
    pub(super) fn heard(&self) -> impl Iterator<Item = (Slot, &[u8])> {
        self.captured.iter().map(|(_, to, bytes)| (*to, bytes.as_slice()))
    }

    /// One of the captured datagrams, and its receiver.
    pub(super) fn captured(&mut self) -> Option<(Slot, Vec<u8>)> {
        if self.captured.is_empty() {
            return None;
        }
        let at = self.rng.index(self.captured.len());
        let (from, to, bytes) = self.captured.get(at)?;
        (*from <= self.clock.now).then(|| (*to, bytes.clone()))
    }

    fn store(&mut self, from: Slot, to: Slot, bytes: &[u8], sound: bool) -> u32 {
        let id = self.free.pop().unwrap_or_else(|| {
            self.datagrams.push(Datagram::default());
            self.datagrams.len() as u32 - 1
        });
        let datagram = &mut self.datagrams[id as usize];
        (datagram.from, datagram.to) = (from, to);
        datagram.condition = Condition { congested: false, sound };
        datagram.bytes.clear();
        datagram.bytes.extend_from_slice(bytes);
        id
    }

    pub(super) fn datagram(&self, id: u32) -> &Datagram {
        &self.datagrams[id as usize]
    }

    pub(super) fn mark(&mut self, id: u32) {
        self.fates.marked += 1;
        self.datagrams[id as usize].condition.congested = true;
    }

    /// Frees a datagram that was delivered or dropped.
    pub(super) fn free(&mut self, id: u32) {
        self.free.push(id);
    }
}

fn path_at<'a>(weather: &'a Weather, paths: &[u16], at: usize) -> &'a Path {
    match paths.get(at).copied() {
        None | Some(0) => &weather.path,
        Some(i) => &weather.others[usize::from(i) - 1].2,
    }
}

/// Flips bits, truncates the datagram, or extends it.
pub(super) fn spoil(rng: &mut Rng, bytes: &mut Vec<u8>) {
    match rng.below(8) {
        0 => bytes.truncate(rng.clone().index(bytes.len() + 1)),
        1 => {
            let more = 1 + rng.index(64);
            bytes.extend((0..more).map(|_| rng.next() as u8));
        }
        _ => {}
    }
    for _ in 0..1 + rng.below(4) {
        if bytes.is_empty() {
            bytes.push(0);
        }
        let at = rng.index(bytes.len());
        bytes[at] ^= 1 << rng.below(8);
    }
}

/// One endpoint's interface.
pub(super) struct SimLink<'a> {
    pub(super) network: &'a mut Network,
    pub(super) slot: Slot,
    pub(super) datagram_max: usize,
    /// It has a path that delivers no damaged packets.
    pub(super) sound: bool,
    /// Packets that it took, and whether it refused some.
    pub(super) taken: usize,
    pub(super) refused: bool,
}

impl Link for SimLink<'_> {
    fn datagram_max(&self) -> usize {
        self.datagram_max
    }

    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize {
        let slot = slot_of(to);
        assert_eq!(to.port(), PORT, "sent to a port that nobody has");
        let first = packets.first().map_or(0, |p| p.len());
        for (i, packet) in packets.iter().enumerate() {
            let even =
                if i + 1 < packets.len() { packet.len() == first } else { packet.len() <= first };
            assert!(
                even && !packet.is_empty(),
                "packet {i} of {} has {} B",
                packets.len(),
                packet.len()
            );
            assert!(packet.len() <= self.datagram_max, "a datagram of {} B", packet.len());
            if !self.network.transmit(self.slot, slot, packet) {
                self.refused = true;
                return i;
            }
            self.taken += 1;
        }
        packets.len()
    }

    fn is_sound(&mut self, _: &Address, _: usize) -> bool {
        // Now and then a path is suspect.
        self.sound && self.network.ways.percent(90)
    }

    fn allow_fragments(&mut self, _: &Address, _: usize) {
        self.network.in_parts[self.slot as usize] = true;
    }

    fn receive(&mut self, _: &mut impl LinkSink) -> usize {
        unreachable!("the simulation hands datagrams over itself")
    }
}
