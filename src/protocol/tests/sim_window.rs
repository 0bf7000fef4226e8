//! Devices of the simulated network: remote buffers and advertised regions. Writes to them arrive in their own time, in
//! no order with messages. All keys are void when the connection ends, which each side learns later.

use super::rng::Rng;
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::protocol::schemes::put::OF_A_MESSAGE;
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::loopback::Loopback;
use crate::transport::{
    Chunk, Exposed, Exposure, Reach, Reached, SendError, Spot, Ticket, Windows,
};
use std::collections::{HashMap, VecDeque};

/// Marks the numbers of messages that are advertised for reading, among those of regions.
const OFFER: u64 = 1 << 62;

/// Parameters that do not change during a run.
#[derive(Clone, Debug)]
pub(super) struct Glazing {
    /// Longest remote buffer (0: there are no devices), and shortest message that uses them, bytes.
    pub(super) max: usize,
    pub(super) min: usize,
    /// Remote buffers that one side advertises to the other at a time.
    pub(super) count: usize,
    /// Drawn from for each new link.
    pub(super) begin: Vec<Windows>,
    /// How often `Later` becomes something else, percent.
    pub(super) changes: u64,
    /// How often a connection ends, in 1000, and how often no other one follows, percent.
    pub(super) breaks: u64,
    pub(super) ends: u64,
    /// How often the registration of memory is refused, percent.
    pub(super) lend_refusals: u64,
    pub(super) write_refusals: u64,
    /// How often a write has to wait, percent.
    pub(super) waits: u64,
    /// How often a message is advertised for reading, percent.
    pub(super) offers: u64,
    /// Regions can be advertised.
    pub(super) exposes: bool,
    /// Length of a part of a region, bytes.
    pub(super) expose_max: usize,
    /// How often a region is invalidated because its memory changes, in 1000.
    pub(super) conceals: u64,
}

impl Glazing {
    pub(super) fn none() -> Self {
        Self {
            max: 0,
            min: 0,
            count: 64,
            begin: vec![Windows::Ready],
            changes: 0,
            breaks: 0,
            ends: 0,
            lend_refusals: 0,
            write_refusals: 0,
            waits: 0,
            offers: 0,
            exposes: false,
            expose_max: usize::MAX,
            conceals: 0,
        }
    }

    /// Whether direct accesses of one side to the other's memory use their device connection.
    pub(super) fn reaches(&self) -> bool {
        self.exposes || self.offers > 0
    }
}

/// An advertised remote buffer.
#[derive(Debug)]
pub(super) struct Held {
    slot: u32,
    connection: u32,
    pub(super) token: u64,
    pub(super) part: SegmentList,
}

impl Held {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.part.len()];
        self.part.copy_out(0, &mut bytes);
        bytes
    }
}

#[derive(Debug)]
enum Event {
    Written {
        slot: u32,
        bytes: Vec<u8>,
        chunk: Chunk,
        /// The writer's device knows that the write will be reported.
        taken: bool,
    },
    Wrote {
        chunk: Chunk,
    },
    Lost {
        now: u32,
    },
    Reached {
        token: u64,
    },
}

/// A direct access that one side has posted.
#[derive(Debug)]
struct Posted {
    how: Reach,
    spot: Spot,
    local: SegmentList,
}

impl Posted {
    /// Moves the first `len` bytes.
    fn carry_out(&self, len: usize) {
        let range = Range { len: len as u64, ..self.spot.range };
        let (near, far) = (self.local.slice(0, len), Loopback::list(&[range]).unwrap());
        let (from, to) = if self.how.reads { (far, near) } else { (near, far) };
        assert_eq!(Loopback::copy(&from, &to), len);
    }
}

/// The state of one side of a link.
#[derive(Debug, Default)]
struct End {
    /// The connection as this side knows it.
    known: u32,
    held: Vec<Held>,
    /// The last of them that was written.
    written: u32,
    /// Events that have not been reported to it.
    events: VecDeque<Event>,
    /// Regions that the other side may access, and their keys.
    exposed: HashMap<(u64, u32), u32>,
    /// Accesses to the other side's memory that it has posted.
    posted: VecDeque<Posted>,
    /// Writes that the other device has acknowledged and that are not in memory yet.
    unplaced: VecDeque<(Range, Vec<u8>)>,
}

impl End {
    /// The oldest acknowledged write gets into memory.
    fn place(&mut self) -> Option<()> {
        let (range, bytes) = self.unplaced.pop_front()?;
        assert_eq!(Loopback::list(&[range]).unwrap().copy_in(0, &bytes), bytes.len());
        Some(())
    }

    fn place_all(&mut self) {
        while self.place().is_some() {}
    }
}

/// The device state of a link.
#[derive(Debug)]
pub(super) struct Panes {
    pub(super) state: Windows,
    connection: u32,
    slots: u32,
    ends: [End; 2],
}

/// An event that one side gets.
#[derive(Debug)]
pub(super) enum Step {
    Filled(u64),
    Wrote(Chunk),
    Lost,
    Reached(u64),
    Concealed(u64),
}

impl Panes {
    pub(super) fn new(connection: u32, glazing: &Glazing, rng: &mut Rng) -> Self {
        let mut panes = Self {
            state: rng.pick(&glazing.begin),
            connection,
            slots: 0,
            ends: Default::default(),
        };
        panes.ends[0].known = connection;
        panes.ends[1].known = connection;
        panes
    }

    pub(super) fn held(&self, side: usize) -> &[Held] {
        &self.ends[side].held
    }

    pub(super) fn is_idle(&self, side: usize) -> bool {
        let end = &self.ends[side];
        end.events.is_empty() && end.posted.is_empty() && end.unplaced.is_empty()
    }

    /// Whether `side` has got all of its events.
    pub(super) fn is_settled(&self, side: usize) -> bool {
        self.ends[side].events.is_empty()
    }

    /// Whether a writer gets sender-side delivery completions on this connection.
    pub(super) fn sees_writes(connection: u32) -> bool {
        connection % 4 != 3
    }

    /// The other device takes the oldest write of `side` that was not acknowledged yet.
    fn take(&mut self, side: usize) {
        let is_loss = |event: &Event| matches!(event, Event::Lost { .. });
        let there = &mut self.ends[1 - side].events;
        let since = there.iter().rposition(is_loss).map_or(0, |at| at + 1);
        let next = there.range_mut(since..).find_map(|event| match event {
            Event::Written { chunk, taken, .. } if !*taken => Some((chunk, taken)),
            _ => None,
        });
        let Some((chunk, taken)) = next else { return };
        *taken = true;
        let chunk = *chunk;
        self.tell(side, chunk);
    }

    fn tell(&mut self, side: usize, chunk: Chunk) {
        let end = &mut self.ends[side];
        if end.known == self.connection && Self::sees_writes(self.connection) {
            end.events.push_back(Event::Wrote { chunk });
        }
    }

    /// The link ends: nothing is written any more.
    pub(super) fn close(&mut self) {
        self.state = Windows::No;
        for end in &mut self.ends {
            end.events.retain(|event| matches!(event, Event::Written { taken: true, .. }));
            end.posted.clear();
            end.unplaced.clear();
        }
    }

    /// `side` has learned of the end of the link.
    pub(super) fn forget(&mut self, side: usize) {
        self.ends[side] = End::default();
    }

    pub(super) fn windows(&mut self, side: usize, glazing: &Glazing, rng: &mut Rng) -> Windows {
        let was = self.state;
        if was == Windows::Later && rng.percent(glazing.changes) {
            self.state = if rng.percent(25) { Windows::No } else { Windows::Ready };
        }
        if self.ends[side].known != self.connection {
            return rng.pick(&[Windows::Ready, Windows::Later]); // it has not noticed
        }
        was
    }

    pub(super) fn lend(
        &mut self,
        side: usize,
        part: &SegmentList,
        token: u64,
        glazing: &Glazing,
        rng: &mut Rng,
    ) -> Result<Ticket, SendError> {
        assert!((1..=glazing.max).contains(&part.len()), "a window of {} B", part.len());
        assert_eq!(part.ranges().1, 1, "a window of several pieces");
        if rng.percent(glazing.lend_refusals) {
            return Err(SendError::Unreachable(Errno(libc::ENOMEM)));
        }
        let end = &mut self.ends[side];
        if end.held.len() >= glazing.count {
            return Err(SendError::Again);
        }
        self.slots += 1;
        let (slot, connection) = (self.slots, end.known);
        end.held.push(Held { slot, connection, token, part: *part });
        Ok(Ticket { connection, slot, addr: part.first_addr(), key: !slot })
    }

    pub(super) fn take_back(&mut self, side: usize, ticket: &Ticket) {
        let held = &mut self.ends[side].held;
        let at = held.iter().position(|held| held.slot == ticket.slot);
        let at = at.unwrap_or_else(|| panic!("{ticket:?} is taken back and not lent"));
        assert_eq!(held.remove(at).connection, ticket.connection);
    }

    /// `side` writes into a remote buffer of the other.
    pub(super) fn write(
        &mut self,
        side: usize,
        payload: &SegmentList,
        (ticket, chunk): (&Ticket, Chunk),
        room: usize,
        glazing: &Glazing,
        rng: &mut Rng,
    ) -> Result<(), SendError> {
        if rng.percent(glazing.waits) {
            return Err(SendError::Again);
        }
        if rng.percent(glazing.write_refusals) {
            return Err(SendError::Unreachable(Errno(libc::EFAULT)));
        }
        if ticket.connection != self.connection {
            return Ok(());
        }
        let unaware = self.ends[side].known != self.connection;
        let end = &mut self.ends[1 - side];
        if end.events.len() >= room || unaware && rng.percent(50) {
            return Err(SendError::Again);
        }
        let held = end.held.iter().find(|held| held.slot == ticket.slot);
        let held = held.unwrap_or_else(|| panic!("a write into {ticket:?}, which is not lent"));
        assert_eq!((held.part.len(), !held.slot), (payload.len(), ticket.key));
        assert!(end.written < ticket.slot, "{ticket:?} is written after {}", end.written);
        end.written = ticket.slot;
        let mut bytes = vec![0; payload.len()];
        payload.copy_out(0, &mut bytes);
        assert_eq!(chunk.len, payload.len() as u64);
        end.events.push_back(Event::Written { slot: ticket.slot, bytes, chunk, taken: false });
        Ok(())
    }

    /// See [`crate::transport::Lending::offer`].
    pub(super) fn offer(
        &mut self,
        side: usize,
        payload: &SegmentList,
        glazing: &Glazing,
        rng: &mut Rng,
    ) -> Option<Ticket> {
        if self.state != Windows::Ready || payload.ranges().1 != 1 || !rng.percent(glazing.offers) {
            return None;
        }
        self.slots += 1;
        let (slot, connection) = (self.slots, self.ends[side].known);
        self.ends[side].exposed.insert((OFFER | u64::from(slot), 0), slot * 8);
        Some(Ticket { connection, slot, addr: payload.first_addr(), key: slot * 8 })
    }

    pub(super) fn is_offered(&self, side: usize, ticket: &Ticket) -> bool {
        self.ends[side].exposed.contains_key(&(OFFER | u64::from(ticket.slot), 0))
    }

    /// See [`crate::transport::Lending::withdraw`].
    pub(super) fn withdraw(&mut self, side: usize, ticket: &Ticket) {
        let offer = (OFFER | u64::from(ticket.slot), 0);
        let was = self.ends[side].exposed.remove(&offer).is_some();
        if was && ticket.connection == self.connection {
            let mut reads = self.ends[1 - side].posted.iter();
            assert!(!reads.any(|read| read.spot.key == ticket.key), "{ticket:?} is being read");
        }
    }

    /// The reads of the other side's messages that `side` has begun: tokens, and their destinations.
    pub(super) fn reading(&self, side: usize) -> impl Iterator<Item = (u64, &SegmentList)> {
        let end = &self.ends[side];
        let of_a_message = |posted: &&Posted| posted.how.token & OF_A_MESSAGE != 0;
        let begun = end.posted.iter().filter(of_a_message);
        begun.map(|posted| (posted.how.token & !OF_A_MESSAGE, &posted.local))
    }

    /// See [`crate::transport::OneSided::expose`].
    pub(super) fn expose(
        &mut self,
        side: usize,
        region: (u64, u32),
        memory: &SegmentList,
        (reads, writes): (bool, bool),
        rng: &mut Rng,
    ) -> Exposed {
        let end = &mut self.ends[side];
        if self.state == Windows::No || rng.percent(5) {
            return rng.pick(&[Exposed::No, Exposed::Never]);
        }
        if self.state == Windows::Later || rng.percent(10) {
            return if rng.percent(50) { Exposed::Later } else { Exposed::No };
        }
        self.slots += 1;
        let first = *end.exposed.entry(region).or_insert(self.slots * 8);
        let (_, count) = memory.ranges();
        let mut keys = [0; MAX_SEGMENTS];
        for (n, key) in keys.iter_mut().enumerate().take(count) {
            *key = first + n as u32;
        }
        let keys = Some(keys);
        Exposed::Yes(Exposure { epoch: end.known, keys, reads, writes, echoes: rng.percent(70) })
    }

    /// See [`crate::transport::OneSided::epoch`].
    pub(super) fn epoch(&self, side: usize) -> u32 {
        self.ends[side].known
    }

    /// See [`crate::transport::OneSided::conceal`].
    pub(super) fn conceal(&mut self, side: usize, region: u64) {
        // When a registration has ended, no access to it is in progress.
        self.ends[1 - side].place_all();
        self.ends[side].exposed.retain(|(other, _), _| *other != region);
    }

    /// See [`crate::transport::OneSided::reach`].
    pub(super) fn reach(
        &mut self,
        side: usize,
        spot: &Spot,
        local: &SegmentList,
        how: Reach,
        glazing: &Glazing,
        rng: &mut Rng,
    ) -> Result<Reached, SendError> {
        assert!(local.len() as u64 == spot.range.len || local.len() == 0 && how.delivered);
        let end = &mut self.ends[side];
        if spot.epoch != end.known {
            return Err(SendError::Unreachable(Errno(libc::ESTALE)));
        }
        if rng.percent(glazing.write_refusals) {
            return Err(SendError::Unreachable(Errno(libc::EFAULT)));
        }
        if end.posted.len() >= glazing.count || rng.percent(glazing.waits) {
            return Err(SendError::Again);
        }
        // A side that does not know yet that the connection has ended posts in vain.
        end.posted.push_back(Posted { how, spot: *spot, local: *local });
        Ok(Reached::Begun)
    }

    /// Carries out the oldest access that `side` has posted, or ends the connection. A write is acknowledged when the
    /// other device has taken it. It is in memory later, at the latest when a read that was posted behind it is done.
    fn carry_out(&mut self, side: usize, rng: &mut Rng) {
        if self.ends[side].known != self.connection {
            return;
        }
        let Some(posted) = self.ends[side].posted.pop_front() else { return };
        let region = posted.spot.key / 8;
        if !self.ends[1 - side].exposed.values().any(|key| key / 8 == region) {
            self.ends[side].posted.push_front(posted);
            let next = rng.pick(&[Windows::Later, Windows::Ready, Windows::No]);
            return self.lose(next, rng);
        }
        let Reach { reads, delivered, token, .. } = posted.how;
        if reads || delivered {
            self.ends[side].place_all();
            posted.carry_out(posted.local.len());
        } else {
            let mut bytes = vec![0; posted.local.len()];
            posted.local.copy_out(0, &mut bytes);
            self.ends[side].unplaced.push_back((posted.spot.range, bytes));
        }
        self.ends[side].events.push_back(Event::Reached { token });
    }

    /// The connection ends. `state` says what follows.
    pub(super) fn lose(&mut self, state: Windows, rng: &mut Rng) {
        self.state = state;
        for side in 0..2 {
            self.ends[side].place_all();
            // Accesses on their way to advertised memory are carried out in part.
            let alive = self.ends[side].known == self.connection;
            let mut left = if alive { rng.below(self.ends[side].posted.len() + 1) } else { 0 };
            for posted in std::mem::take(&mut self.ends[side].posted) {
                let region = posted.spot.key / 8;
                let exposed = self.ends[1 - side].exposed.values().any(|key| key / 8 == region);
                if left == 0 || !exposed {
                    break;
                }
                left -= 1;
                let len = posted.local.len();
                posted.carry_out(if left == 0 { rng.below(len + 1) } else { len });
            }
        }
        self.connection += 1;
        for end in &mut self.ends {
            end.posted.clear();
            // Some of the writes on their way are reported, and some arrive without a report.
            let is_loss = |event: &Event| matches!(event, Event::Lost { .. });
            let first = end.events.iter().rposition(is_loss).map_or(0, |at| at + 1);
            // A write that its writer's device knows to be taken is reported.
            let is_taken = |event: &Event| matches!(event, Event::Written { taken: true, .. });
            let taken = end.events.iter().rposition(is_taken).map_or(0, |at| at + 1);
            let keep = (first + rng.below(end.events.len() - first + 1)).max(taken);
            for event in end.events.drain(keep..).collect::<Vec<_>>() {
                if let Event::Written { slot, bytes, .. } = event {
                    if rng.percent(50) {
                        end.land(slot, &bytes[..rng.below(bytes.len() + 1)]);
                    }
                }
            }
            end.events.push_back(Event::Lost { now: self.connection });
        }
    }

    /// The next event of `side`.
    pub(super) fn step(&mut self, side: usize, glazing: &Glazing, rng: &mut Rng) -> Option<Step> {
        if self.state == Windows::Ready && rng.next() % 1000 < glazing.breaks {
            let next = if rng.percent(glazing.ends) {
                Windows::No
            } else {
                rng.pick(&[Windows::Later, Windows::Ready])
            };
            self.lose(next, rng);
        }
        if rng.percent(40) {
            self.carry_out(side, rng);
        }
        if rng.percent(10) {
            self.ends[side].place();
        }
        let waits = |event: &Event| matches!(event, Event::Written { taken: false, .. });
        let known = self.ends[side].known == self.connection;
        if known && self.ends[1 - side].events.iter().any(waits) && rng.percent(30) {
            self.take(side);
        }
        let end = &mut self.ends[side];
        if rng.next() % 1000 < glazing.conceals {
            if let Some(part) = end.exposed.keys().min().copied() {
                end.exposed.remove(&part);
                self.ends[1 - side].place_all();
                return Some(Step::Concealed(part.0));
            }
        }
        // No device reports out of order, and no code relies on the order.
        let both_written =
            end.events.iter().take(2).filter(|e| matches!(e, Event::Written { .. })).count() == 2;
        if both_written && glazing.breaks > 0 && rng.percent(20) {
            end.events.swap(0, 1);
        }
        match end.events.pop_front()? {
            Event::Written { slot, bytes, chunk, taken } => {
                end.land(slot, &bytes);
                let at = end.held.iter().position(|held| held.slot == slot)?;
                let Held { token, connection, .. } = end.held.remove(at);
                if !taken && connection == self.connection {
                    self.tell(1 - side, chunk);
                }
                Some(Step::Filled(token))
            }
            Event::Wrote { chunk } => Some(Step::Wrote(chunk)),
            Event::Reached { token } => Some(Step::Reached(token)),
            Event::Lost { now } => {
                end.known = now;
                // Accesses that were posted since then are lost.
                end.posted.clear();
                end.held.retain(|held| held.connection == now);
                end.exposed.retain(|(region, _), _| region & OFFER == 0);
                Some(Step::Lost)
            }
        }
    }
}

impl End {
    /// Stores bytes in memory.
    fn land(&self, slot: u32, bytes: &[u8]) {
        let held = self.held.iter().find(|held| held.slot == slot);
        let held = held.unwrap_or_else(|| panic!("memory is written that is not lent any more"));
        held.part.copy_in(0, bytes);
    }
}
