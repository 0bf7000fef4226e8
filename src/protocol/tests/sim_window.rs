//! Devices of the simulated network: remote buffers and advertised regions. Writes to them arrive in their own time, in
//! no order with messages. All keys are void when the connection ends, which each side learns later. Two sides may have
//! two devices each, with a connection of each pair: two lanes.

use super::rng::Rng;
use crate::memory::SegmentList;
use crate::protocol::schemes::put::GET_OF_A_MESSAGE;
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::loopback::Loopback;
use crate::transport::{
    Access, LaneId, Prepared, Purpose, Put, Registered, Registration, Remote, RemoteKey, SendError,
};
use std::collections::{BTreeMap, VecDeque};

/// The lanes of the devices, the better one first.
pub(super) const RAILS: [LaneId; 2] = [LaneId::of(&[2]), LaneId::of(&[3])];

/// A key of the first devices: number of the connection and of the memory, and its address.
pub(super) fn key(connection: u32, slot: u32, addr: u64) -> RemoteKey {
    key_of(RAILS[0], (connection, slot), addr)
}

/// As [`key`], of other devices.
pub(super) fn key_of(rail: LaneId, (connection, slot): (u32, u32), addr: u64) -> RemoteKey {
    RemoteKey::new(rail.kind()).with(u64::from(slot) << 32 | u64::from(connection)).with(addr)
}

/// Number of the connection, and of the memory.
fn numbers(key: &RemoteKey) -> (u32, u32) {
    let word = key.word(0).unwrap();
    assert!(RAILS.iter().any(|rail| rail.made(key)));
    (word as u32, (word >> 32) as u32)
}

/// Parameters that do not change during a run.
#[derive(Clone, Debug)]
pub(super) struct Glazing {
    /// Devices of each side: one or two.
    pub(super) rails: usize,
    /// Longest remote buffer (0: there are no devices), and shortest message that uses them, bytes.
    pub(super) max: usize,
    pub(super) min: usize,
    /// Remote buffers that one side advertises to the other at a time.
    pub(super) count: usize,
    /// Drawn from for each new link.
    pub(super) begin: Vec<Prepared>,
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
    /// A writer is told of the end of a write only if it asks for that.
    pub(super) silent: bool,
    /// How often a message is advertised for reading, percent.
    pub(super) offers: u64,
    /// A receiver reads all of an advertised message, and the devices take memory that the processor cannot touch.
    pub(super) reads: bool,
    /// Regions can be advertised.
    pub(super) exposes: bool,
    /// They always can, and with flush reads.
    pub(super) steady: bool,
    /// A flush is complete when the call returns.
    pub(super) quick_flush: bool,
    /// Length of a part of a region, bytes.
    pub(super) expose_max: usize,
    /// How often a region is invalidated because its memory changes, in 1000.
    pub(super) conceals: u64,
}

impl Glazing {
    pub(super) fn none() -> Self {
        Self {
            rails: 1,
            max: 0,
            min: 0,
            count: 64,
            begin: vec![Prepared::Ready],
            changes: 0,
            breaks: 0,
            ends: 0,
            lend_refusals: 0,
            write_refusals: 0,
            waits: 0,
            silent: false,
            offers: 0,
            reads: false,
            exposes: false,
            steady: false,
            quick_flush: false,
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
        /// The writer's token, if the end of the write is reported to it.
        token: Option<u64>,
        /// The writer's device has acknowledged the write.
        taken: bool,
        /// It knows then that the write will be reported.
        sure: bool,
    },
    Lost {
        now: u32,
    },
    Done {
        token: u64,
    },
}

/// A direct access that one side has posted.
#[derive(Debug)]
struct Posted {
    reads: bool,
    /// It completes when all that was written is in memory.
    delivered: bool,
    token: u64,
    /// The number of the memory, and where it is accessed.
    slot: u32,
    addr: u64,
    local: SegmentList,
}

impl Posted {
    /// Moves the first `len` bytes.
    fn carry_out(&self, len: usize) {
        let range = Range { addr: self.addr, len: len as u64 };
        let (near, far) = (self.local.slice(0, len), Loopback::list(&[range]).unwrap());
        let (from, to) = if self.reads { (far, near) } else { (near, far) };
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
    /// Numbers of the memory that the other side may access: whether it is a region, and its address.
    exposed: BTreeMap<u32, (bool, u64)>,
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
    pub(super) rail: LaneId,
    pub(super) state: Prepared,
    connection: u32,
    slots: u32,
    ends: [End; 2],
    /// An access was refused for no reason that an event ends.
    hesitated: bool,
}

/// An event that one side gets.
#[derive(Debug)]
pub(super) enum Step {
    Notify(u64),
    Lost,
    Done(u64),
    Void(RemoteKey),
}

impl Panes {
    pub(super) fn new(rail: LaneId, connection: u32, glazing: &Glazing, rng: &mut Rng) -> Self {
        let mut panes = Self {
            rail,
            state: rng.pick(&glazing.begin),
            connection,
            // Keys of an earlier link may be invalidated late: they must not mean anything here.
            slots: connection.wrapping_mul(64),
            ends: Default::default(),
            hesitated: false,
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
    fn sees_writes(connection: u32) -> bool {
        connection % 4 != 3
    }

    /// The other device takes the oldest write of `side` that was not acknowledged yet.
    fn take(&mut self, side: usize) {
        let is_loss = |event: &Event| matches!(event, Event::Lost { .. });
        let there = &mut self.ends[1 - side].events;
        let since = there.iter().rposition(is_loss).map_or(0, |at| at + 1);
        let next = there.range_mut(since..).find_map(|event| match event {
            Event::Written { token, taken, .. } if !*taken => Some((token, taken)),
            _ => None,
        });
        let Some((token, taken)) = next else { return };
        *taken = true;
        let token = *token;
        self.tell(side, token);
    }

    fn tell(&mut self, side: usize, token: Option<u64>) {
        let end = &mut self.ends[side];
        if end.known == self.connection {
            end.events.extend(token.map(|token| Event::Done { token }));
        }
    }

    /// The link ends: nothing is written any more.
    pub(super) fn close(&mut self) {
        self.state = Prepared::No;
        for end in &mut self.ends {
            end.events
                .retain(|event| matches!(event, Event::Written { taken: true, sure: true, .. }));
            end.posted.clear();
            end.unplaced.clear();
        }
    }

    /// `side` has learned of the end of the link.
    pub(super) fn forget(&mut self, side: usize) {
        self.ends[side] = End::default();
    }

    pub(super) fn prepare(&mut self, side: usize, glazing: &Glazing, rng: &mut Rng) -> Prepared {
        let was = self.state;
        if was == Prepared::Later && rng.percent(glazing.changes) {
            self.state = if rng.percent(25) { Prepared::No } else { Prepared::Ready };
        }
        if self.ends[side].known != self.connection {
            return rng.pick(&[Prepared::Ready, Prepared::Later]); // it has not noticed
        }
        was
    }

    /// See [`crate::transport::OneSided::register`].
    pub(super) fn register(
        &mut self,
        side: usize,
        memory: &SegmentList,
        purpose: Purpose,
        glazing: &Glazing,
        rng: &mut Rng,
    ) -> Registered {
        assert_eq!(memory.piece(0, memory.len()).len(), memory.len(), "memory of several ranges");
        assert!(glazing.reads || !memory.is_on_device(), "memory that the lane does not take");
        let confirms = !glazing.silent && Self::sees_writes(self.ends[side].known);
        match purpose {
            Purpose::Region { reads, writes, .. } if glazing.exposes => {
                let doubt = |percent: u64| if glazing.steady { 0 } else { percent };
                if self.state == Prepared::No || rng.percent(doubt(5)) {
                    return rng.pick(&[Registered::No, Registered::Never]);
                }
                if self.state == Prepared::Later || rng.percent(doubt(10)) {
                    self.hesitated = true;
                    return rng.pick(&[Registered::Later, Registered::No]);
                }
                let (key, confirms) = (self.expose(side, memory, true), !rng.percent(doubt(30)));
                Registered::Yes(Registration { key, reads, writes, confirms })
            }
            Purpose::Receive { token } => match self.lend(side, memory, token, glazing, rng) {
                Ok(key) => {
                    Registered::Yes(Registration { key, reads: false, writes: true, confirms })
                }
                Err(SendError::Again) => Registered::Later,
                Err(SendError::Unreachable(_)) => Registered::Never,
            },
            Purpose::Send if self.state == Prepared::Ready && rng.percent(glazing.offers) => {
                let key = self.expose(side, memory, false);
                Registered::Yes(Registration { key, reads: true, writes: false, confirms: false })
            }
            Purpose::Region { .. } | Purpose::Send => Registered::No,
        }
    }

    fn expose(&mut self, side: usize, memory: &SegmentList, region: bool) -> RemoteKey {
        self.slots += 1;
        self.ends[side].exposed.insert(self.slots, (region, memory.first_addr()));
        key_of(self.rail, (self.ends[side].known, self.slots), memory.first_addr())
    }

    /// See [`crate::transport::OneSided::lends`].
    pub(super) fn has_room(&self, side: usize, glazing: &Glazing) -> bool {
        self.ends[side].held.len() < glazing.count
    }

    fn lend(
        &mut self,
        side: usize,
        part: &SegmentList,
        token: u64,
        glazing: &Glazing,
        rng: &mut Rng,
    ) -> Result<RemoteKey, SendError> {
        assert!((1..=glazing.max).contains(&part.len()), "a window of {} B", part.len());
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
        Ok(key_of(self.rail, (connection, slot), part.first_addr()))
    }

    /// See [`crate::transport::OneSided::invalidate`].
    pub(super) fn invalidate(&mut self, side: usize, key: &RemoteKey) {
        let (connection, slot) = numbers(key);
        let held = self.ends[side].held.iter().position(|held| held.slot == slot);
        let region = self.ends[side].exposed.remove(&slot).map(|(region, _)| region);
        if let Some(at) = held {
            assert_eq!(self.ends[side].held.remove(at).connection, connection);
        } else if region == Some(true) {
            // When a registration has ended, no access to it is in progress.
            self.ends[1 - side].place_all();
        } else if region == Some(false) && connection == self.connection {
            let mut reads = self.ends[1 - side].posted.iter();
            assert!(!reads.any(|read| read.slot == slot), "{key} is being read");
        }
    }

    /// Whether `side` has memory under this key: a remote buffer, a message or a region.
    pub(super) fn is_registered(&self, side: usize, key: &RemoteKey) -> bool {
        let (slot, end) = (numbers(key).1, &self.ends[side]);
        end.exposed.contains_key(&slot) || end.held.iter().any(|held| held.slot == slot)
    }

    /// `side` writes into a remote buffer of the other.
    pub(super) fn write(
        &mut self,
        side: usize,
        payload: &SegmentList,
        (key, Put { reports, token, .. }): (&RemoteKey, Put),
        room: usize,
        glazing: &Glazing,
        rng: &mut Rng,
    ) -> Result<Access, SendError> {
        // Nothing is refused meanwhile: no event would tell of it.
        if self.ends[1 - side].events.len() >= room {
            return Err(SendError::Again);
        }
        if rng.percent(glazing.waits) {
            return Err(self.hesitate());
        }
        if rng.percent(glazing.write_refusals) {
            return Err(SendError::Unreachable(Errno(libc::EFAULT)));
        }
        let (connection, slot) = numbers(key);
        if connection != self.connection {
            return Ok(Access::Silent);
        }
        let unaware = self.ends[side].known != self.connection;
        if unaware && rng.percent(50) {
            return Err(self.hesitate());
        }
        let end = &mut self.ends[1 - side];
        let held = end.held.iter().find(|held| held.slot == slot);
        let held = held.unwrap_or_else(|| panic!("a write under {key}, which is void"));
        assert_eq!((held.part.len(), Some(held.part.first_addr())), (payload.len(), key.word(1)));
        assert!(end.written < slot, "{key} is written after {}", end.written);
        end.written = slot;
        let mut bytes = vec![0; payload.len()];
        payload.copy_out(0, &mut bytes);
        let sees = !glazing.silent && Self::sees_writes(connection);
        let told = !unaware && (reports || sees);
        let token = told.then_some(token);
        let sure = !glazing.silent;
        end.events.push_back(Event::Written { slot, bytes, token, taken: false, sure });
        Ok(match (told, sure) {
            (true, true) => Access::Begun,
            (true, false) => Access::Unsure,
            (false, _) => Access::Silent,
        })
    }

    fn hesitate(&mut self) -> SendError {
        self.hesitated = true;
        SendError::Again
    }

    /// Whether an access was refused, since the last call, for no reason that an event ends.
    pub(super) fn has_hesitated(&mut self) -> bool {
        std::mem::take(&mut self.hesitated)
    }

    /// The reads of the other side's messages that `side` has begun: tokens, and their destinations.
    pub(super) fn reading(&self, side: usize) -> impl Iterator<Item = (u64, &SegmentList)> {
        let end = &self.ends[side];
        let of_a_message = |posted: &&Posted| posted.token & GET_OF_A_MESSAGE != 0;
        let begun = end.posted.iter().filter(of_a_message);
        begun.map(|posted| (posted.token & !GET_OF_A_MESSAGE, &posted.local))
    }

    /// Whether `side` has memory of regions that the other may access.
    pub(super) fn advertises(&self, side: usize) -> bool {
        self.ends[side].exposed.values().any(|(region, _)| *region)
    }

    /// The connection as `side` knows it.
    pub(super) fn known(&self, side: usize) -> u32 {
        self.ends[side].known
    }

    /// See [`crate::transport::OneSided::is_current`].
    pub(super) fn is_current(&self, side: usize, key: &RemoteKey) -> bool {
        numbers(key).0 == self.ends[side].known
    }

    /// A get, a put without notice (`how`) or, without `local` bytes, a flush.
    pub(super) fn reach(
        &mut self,
        side: usize,
        at: &Remote,
        local: &SegmentList,
        (reads, how): (bool, Put),
        glazing: &Glazing,
        rng: &mut Rng,
    ) -> Result<Access, SendError> {
        let Put { delivered, token, .. } = how;
        assert!(local.len() > 0 || delivered && !reads);
        let (connection, slot) = numbers(&at.key);
        let addr = at.key.word(1).unwrap().checked_add(at.offset);
        let end = &mut self.ends[side];
        let (Some(addr), true) = (addr, connection == end.known) else {
            return Err(SendError::Unreachable(Errno(libc::ESTALE)));
        };
        // As in `write`.
        if end.posted.len() >= glazing.count {
            return Err(SendError::Again);
        }
        if rng.percent(glazing.write_refusals) {
            return Err(SendError::Unreachable(Errno(libc::EFAULT)));
        }
        if rng.percent(glazing.waits) {
            return Err(self.hesitate());
        }
        if glazing.quick_flush && local.len() == 0 {
            while !self.ends[side].posted.is_empty() && self.ends[side].known == self.connection {
                self.carry_out(side, rng);
            }
            self.ends[side].place_all();
            return Ok(Access::Moved(1));
        }
        // A side that does not know yet that the connection has ended posts in vain.
        self.ends[side].posted.push_back(Posted {
            reads,
            delivered,
            token,
            slot,
            addr,
            local: *local,
        });
        Ok(Access::Begun)
    }

    /// Carries out the oldest access that `side` has posted, or ends the connection. A write is acknowledged when the
    /// other device has taken it. It is in memory later, at the latest when a read that was posted behind it is done.
    fn carry_out(&mut self, side: usize, rng: &mut Rng) {
        if self.ends[side].known != self.connection {
            return;
        }
        let Some(posted) = self.ends[side].posted.pop_front() else { return };
        if !self.ends[1 - side].exposed.contains_key(&posted.slot) {
            self.ends[side].posted.push_front(posted);
            let next = rng.pick(&[Prepared::Later, Prepared::Ready, Prepared::No]);
            return self.lose(next, rng);
        }
        let Posted { reads, delivered, token, addr, .. } = posted;
        if reads || delivered {
            self.ends[side].place_all();
            posted.carry_out(posted.local.len());
        } else {
            let mut bytes = vec![0; posted.local.len()];
            posted.local.copy_out(0, &mut bytes);
            let range = Range { addr, len: bytes.len() as u64 };
            self.ends[side].unplaced.push_back((range, bytes));
        }
        self.ends[side].events.push_back(Event::Done { token });
    }

    /// The connection ends. `state` says what follows.
    pub(super) fn lose(&mut self, state: Prepared, rng: &mut Rng) {
        self.state = state;
        for side in 0..2 {
            self.ends[side].place_all();
            // Accesses on their way to advertised memory are carried out in part.
            let alive = self.ends[side].known == self.connection;
            let mut left = if alive { rng.below(self.ends[side].posted.len() + 1) } else { 0 };
            for posted in std::mem::take(&mut self.ends[side].posted) {
                if left == 0 || !self.ends[1 - side].exposed.contains_key(&posted.slot) {
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
            let is_taken =
                |event: &Event| matches!(event, Event::Written { taken: true, sure: true, .. });
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
        if self.state == Prepared::Ready && rng.next() % 1000 < glazing.breaks {
            let next = if rng.percent(glazing.ends) {
                Prepared::No
            } else {
                rng.pick(&[Prepared::Later, Prepared::Ready])
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
            let first = end.exposed.iter().find(|(_, (region, _))| *region);
            if let Some((slot, (_, addr))) = first.map(|(slot, region)| (*slot, *region)) {
                end.exposed.remove(&slot);
                let void = key_of(self.rail, (end.known, slot), addr);
                self.ends[1 - side].place_all();
                return Some(Step::Void(void));
            }
        }
        // No device reports out of order, and no code relies on the order.
        let both_written =
            end.events.iter().take(2).filter(|e| matches!(e, Event::Written { .. })).count() == 2;
        if both_written && glazing.breaks > 0 && rng.percent(20) {
            end.events.swap(0, 1);
        }
        match end.events.pop_front()? {
            Event::Written { slot, bytes, token: theirs, taken, .. } => {
                end.land(slot, &bytes);
                let at = end.held.iter().position(|held| held.slot == slot)?;
                let Held { token, connection, .. } = end.held.remove(at);
                if !taken && connection == self.connection {
                    self.tell(1 - side, theirs);
                }
                Some(Step::Notify(token))
            }
            Event::Done { token } => Some(Step::Done(token)),
            Event::Lost { now } => {
                end.known = now;
                // Accesses that were posted since then are lost.
                end.posted.clear();
                end.held.retain(|held| held.connection == now);
                end.exposed.clear();
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
