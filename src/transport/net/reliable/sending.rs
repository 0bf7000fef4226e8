//! The sending half of a connection: packets wait here until the other side has them.

use super::congestion::WINDOW_MAX;
use super::connection::{ACCEPT, Connection, DOUBT, INIT, PROBE, Phase};
use super::packet::{
    self, ACK_REQUEST, DELAY_UNIT_NS, FIRST_FRAME_LEN, FRAME_LEN, HAS_ECHO, HEADER_LEN,
    HEADER_ONLY, HEADER_TAGS, Header, HelloKind, Kind, PRESSURE,
};
use super::receiving::ACK_EVERY;
use super::timers::NEVER;
use super::{MESSAGE_MAX, Shared};
use crate::sys::Errno;
use crate::sys::packets::Buffer;
use crate::transport::SendError;
use crate::transport::net::link::Link;
use std::io::IoSlice;
use std::ops::Range;

/// Later transmissions that arrive before one counts as lost, at first and at most.
pub(super) const REORDERING_MIN: u64 = 3;
const REORDERING_MAX: u64 = 128;
/// Packets without such an event after which half as many are enough again.
const IN_ORDER: u32 = 8192;
/// Transmissions after the last loss from which on the path counts as one that loses nothing.
const CLEAN: u64 = 8192;
/// Packets of one peer that leave in one turn.
const BURST: usize = 64;
/// Bytes that may wait for their first transmission, and packets if those are small.
const BACKLOG_BYTES: usize = 128 * 1024;
const BACKLOG_PACKETS: usize = 32;
/// Timeouts in a row after which all that is under way counts as lost, and after which we ask
/// whether the connection still exists. A peer that shares its core with others is silent for some
/// of them without having lost anything.
const SILENCE: u8 = 7;
const SUSPICION: u8 = 5;
/// Messages to a peer that leave by themselves after a poll: those after them share packets, until the next
/// poll.
const ALONE: u32 = 2;
/// Longest packet that messages share, bytes, and the part of it up to which a message is not divided.
const JOINT_MAX: usize = 4096;
const JOINT_SHARE: usize = 3;
/// Least payload of a longer one that runs on from the packet that messages share into the next, bytes.
const PIECE_MIN: usize = 256;
/// Packets, and bytes, that wait for company at most.
const HELD_PACKETS: usize = 16;
const HELD_BYTES: usize = 32 * 1024;
/// Packets that are few.
const FEW: usize = 8;
/// Messages further apart than this, beside the time that the link takes, do not come in a burst, nanoseconds.
const BURST_GAP_NS: u64 = 20_000;
/// What waits for company longer than this has waited too long, nanoseconds.
const LATE_NS: u64 = 200_000;

/// Where a packet stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Unsent,
    InFlight,
    /// The other side has it, and not all before it.
    Arrived,
    Lost,
}

/// A packet, until all up to it have arrived.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Room for the header, then frames.
    pub(super) bytes: Buffer,
    pub(super) transmission: u64,
    pub(super) sent_at: u64,
    pub(super) state: State,
    /// It counts as lost because nothing was heard, not because later ones have arrived.
    overdue: bool,
}

impl Outgoing {
    fn new(bytes: Buffer) -> Self {
        Self { bytes, transmission: 0, sent_at: 0, state: State::Unsent, overdue: false }
    }

    /// It was sent again because nothing was heard, and in vain: see `was_late`.
    fn was_early(&self, echo: Option<u64>) -> bool {
        self.overdue && echo.is_some_and(|echo| self.transmission > echo)
    }

    /// It counted as lost because later ones had arrived, and arrives now all the same: it was
    /// overtaken. What was sent again was so in vain if none of the transmissions up to `echo`,
    /// which alone can have arrived, is the last one.
    fn was_late(&self, echo: Option<u64>) -> bool {
        let again = echo.is_some_and(|echo| self.transmission > echo);
        let counted = self.state == State::Lost || self.state == State::InFlight && again;
        counted && !self.overdue
    }
}

/// What became of a message that the short road took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pushed {
    Left,
    /// The link took no more: packets wait.
    Blocked,
    /// It waits for company: it leaves when there is enough of that, or with the next poll.
    Held,
    /// Its end does, or waits for room in the window; something has left.
    Partly,
}

/// Whether messages wait for company: an application that sends many and then does not poll loses more by
/// that than it gains.
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// Polls so far.
    polls: u64,
    /// Messages that none is held back of, and of how many the last time was.
    apart: u32,
    penalty: u32,
}

impl Holding {
    /// Most and least messages that leave by themselves after some were held back too long.
    const PENALTY: (u32, u32) = (64, 65536);

    /// The application polls.
    #[inline]
    pub(super) fn on_poll(&mut self) {
        self.polls = self.polls.wrapping_add(1);
    }

    /// What was held back for `ns` leaves.
    fn on_end(&mut self, ns: u64) {
        let (least, most) = Self::PENALTY;
        if ns > LATE_NS {
            self.penalty = self.penalty.saturating_mul(2).clamp(least, most);
            self.apart = self.penalty;
        } else {
            self.penalty /= 2;
        }
    }

    #[inline]
    fn may(&mut self) -> bool {
        let may = self.apart == 0;
        self.apart -= u32::from(!may);
        may
    }
}

/// The 64-bit number nearest to `near` whose low half is `low`.
#[inline]
pub(super) fn widen(low: u32, near: u64) -> u64 {
    // Below 0 there is none: it is the one above then.
    let off = i64::from(low.wrapping_sub(near as u32) as i32);
    near.checked_add_signed(off).unwrap_or_else(|| u64::from(low))
}

/// Writes the frame of a message that is in one packet.
#[inline]
fn put_whole(to: &mut [u8], header: &[u8], len: usize, pack: impl FnOnce(&mut [u8])) {
    let at = packet::put_frame(to, 0, header, len, 0);
    if let Some(to) = to.get_mut(at..) {
        pack(to);
    }
}

impl Connection {
    /// See [`super::Reliable::send`].
    pub(super) fn push(
        &mut self,
        shared: &mut Shared,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
        shares: bool,
        now: u64,
    ) -> Result<(), SendError> {
        if len > MESSAGE_MAX || header.len() > usize::from(u8::MAX) {
            return Err(SendError::Unreachable(Errno(libc::EMSGSIZE)));
        }
        // What waits anyway may as well share a packet. Of a new connection nobody knows yet what is lost, and
        // several packets tell it sooner.
        let opens = self.unsent < self.next_psn() || shares;
        let opens = opens && self.phase == Phase::Established;
        self.put(shared, header, len, pack, opens, now)
    }

    /// Puts a message behind what waits: into the packet that messages share, as far as that has room, and into
    /// packets of its own, of which the last takes others if it `opens`. What has no room changes nothing.
    fn put(
        &mut self,
        shared: &mut Shared,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
        opens: bool,
        now: u64,
    ) -> Result<(), SendError> {
        if self.join(header, len, |to| pack(0, to)) {
            return Ok(());
        }
        let room = self.datagram_room().saturating_sub(HEADER_LEN);
        let whole = FRAME_LEN + header.len() + len;
        let joint = room.min(JOINT_MAX - HEADER_LEN);
        let front = FIRST_FRAME_LEN + header.len();
        // Payload of it in the packet that is there.
        let divides = whole > joint / JOINT_SHARE;
        let here = self.room_left().saturating_sub(front);
        let here = if divides && here >= PIECE_MIN { here } else { 0 };
        let packets = if here > 0 {
            (len - here).div_ceil(room - FRAME_LEN)
        } else if whole <= room {
            1
        } else {
            1 + (len - room.saturating_sub(front).min(len)).div_ceil(room - FRAME_LEN)
        };
        let waiting = (self.next_psn() - self.unsent) as usize;
        let backlog = (BACKLOG_BYTES / room.max(1)).max(BACKLOG_PACKETS);
        let largest = match packets {
            1 => HEADER_LEN + whole.max(if opens { joint } else { 0 }).min(room),
            _ => HEADER_LEN + room,
        };
        let full = waiting > 0 && waiting + packets > backlog
            || self.window.len() + packets > WINDOW_MAX as usize
            || !shared.buffers.has_room_for(packets, largest);
        if full {
            return Err(SendError::Again);
        }
        self.known = true;
        // It, or it and those before it, would fill more.
        if whole >= room || self.open {
            self.want_long(now);
        }
        if self.window.is_empty() {
            self.owe(shared, now);
            if self.phase == Phase::HalfOpen && self.retry_at == NEVER {
                self.retry_at = now + self.patience_ns(shared);
            }
        }
        self.sent += 1;
        let mut offset = here;
        if let Some(to) = (here > 0).then(|| self.extend_last(front + here)).flatten() {
            let at = packet::put_frame(to, 1, header, here, len);
            if let Some(to) = to.get_mut(at..) {
                pack(0, to);
            }
        }
        for i in 1..=packets {
            let (kind, front, header) = match (offset == 0 && i == 1, i == packets) {
                (true, true) => (0, FRAME_LEN + header.len(), header),
                (true, false) => (1, front, header),
                (false, true) => (3, FRAME_LEN, &[][..]),
                (false, false) => (2, FRAME_LEN, &[][..]),
            };
            let piece = room.saturating_sub(front).min(len - offset);
            let opens = opens && i == packets && front + piece < joint;
            let used = if opens { joint } else { front + piece };
            // There is room for all of them, as was asked above.
            let bytes = shared.buffers.take_to_send(HEADER_LEN + used).unwrap_or_default();
            self.append(shared, bytes, front + piece, |to| {
                let at = packet::put_frame(to, kind, header, piece, len);
                if let Some(to) = to.get_mut(at..) {
                    pack(offset, to);
                }
            });
            self.open = opens;
            offset += piece;
        }
        Ok(())
    }

    /// See [`super::Reliable::send_at_once`]. `None`: nothing was done.
    #[inline]
    pub(super) fn push_at_once(
        &mut self,
        shared: &mut Shared,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
        now: u64,
        link: &mut impl Link,
    ) -> Option<Pushed> {
        let room = self.datagram_room().saturating_sub(HEADER_LEN);
        let whole = FRAME_LEN + header.len() + len;
        let holds = self.is_burst(&shared.holding, now) && shared.holding.may();
        if holds || self.open || self.held || whole >= room {
            if holds && self.held && self.join(header, len, |to| pack(0, to)) {
                return Some(Pushed::Held);
            }
            return self.push_more_at_once(shared, (header, len), pack, holds, now, link);
        }
        if !self.is_next() {
            return None;
        }
        let key = self.key?;
        let mut bytes = shared.buffers.take_to_send(HEADER_LEN + whole)?;
        bytes.resize(HEADER_LEN + whole);
        let mut head = self.header(shared, Kind::Data, now);
        head.transmission = self.transmission as u32;
        if self.goes_sound(link, bytes.len()) {
            head.flags |= HEADER_ONLY;
        }
        if self.attempts > 0 {
            head.flags |= ACK_REQUEST;
        }
        let (to, frames) = bytes.split_first_chunk_mut::<HEADER_LEN>()?;
        put_whole(frames, header, len, |to| pack(0, to));
        *to = head.signed(&key, &shared.hash, self.direction, frames);
        let left = link.send(&self.address, &[IoSlice::new(&bytes)]) > 0;
        bytes.note_sent();
        // The packet is on its way: all the rest does not hold it up.
        self.on_single(shared, bytes, left, now);
        Some(if left { Pushed::Left } else { Pushed::Blocked })
    }

    /// The packet that `push_at_once` has made of a message is the last one of the window: it has left, or waits.
    fn on_single(&mut self, shared: &mut Shared, bytes: Buffer, left: bool, now: u64) {
        self.known = true;
        if self.window.is_empty() {
            self.owe(shared, now);
        }
        self.sent += 1;
        shared.unacknowledged += 1;
        let (state, transmission) =
            if left { (State::InFlight, self.transmission) } else { (State::Unsent, 0) };
        let packet = Outgoing { transmission, sent_at: now, state, ..Outgoing::new(bytes) };
        self.window.push_back(packet);
        if !left {
            return;
        }
        self.transmissions.push_back((transmission, self.unsent));
        self.unsent += 1;
        self.in_flight += 1;
        self.transmission += 1;
        if self.attempts > 0 {
            self.asked = self.transmission;
        }
        shared.counts.data_sent += 1;
        self.on_departed(shared, now);
    }

    /// Packets with data have left.
    #[inline]
    fn on_departed(&mut self, shared: &mut Shared, now: u64) {
        self.acknowledged_now();
        if self.retry_at == NEVER {
            self.retry_at = now + self.patience_ns(shared);
        }
    }

    /// The same of what is longer than a packet, one of a burst, or comes after what was held back.
    #[inline(never)]
    fn push_more_at_once(
        &mut self,
        shared: &mut Shared,
        (header, len): (&[u8], usize),
        pack: impl FnMut(usize, &mut [u8]),
        holds: bool,
        now: u64,
        link: &mut impl Link,
    ) -> Option<Pushed> {
        let waits = self.unsent < self.next_psn() && !self.held;
        if waits || len > MESSAGE_MAX || header.len() > usize::from(u8::MAX) || !self.is_clear() {
            return None;
        }
        self.put(shared, header, len, pack, holds, now).ok()?;
        let waiting = (self.next_psn() - self.unsent) as usize;
        // While some wait, others are under way.
        let may =
            u64::from(self.congestion.window()).min(self.credit_end.saturating_sub(self.base));
        let most =
            (HELD_BYTES / self.datagram_room()).min(HELD_PACKETS).min(may as usize / 4).max(1);
        self.held = holds && (self.open || waiting < most);
        if self.held && waiting <= most {
            return Some(Pushed::Held);
        }
        self.open &= holds;
        let leave = waiting - usize::from(self.open);
        let all = self.send_waiting(shared, now, link, leave, &mut 0);
        Some(match all {
            false => Pushed::Blocked,
            true if self.unsent < self.next_psn() => Pushed::Partly,
            true => Pushed::Left,
        })
    }

    /// Packets of a message have left: what the link took for that is no pause of the application.
    #[inline]
    pub(super) fn on_left(&mut self, clock: impl Fn() -> u64) {
        if self.burst >= ALONE {
            self.pushed_at = clock();
        }
    }

    /// Whether a message that comes `now` is one of many, between which the application does not poll.
    #[inline]
    fn is_burst(&mut self, holding: &Holding, now: u64) -> bool {
        let dense = now.saturating_sub(self.pushed_at) < BURST_GAP_NS;
        self.pushed_at = now;
        if self.burst_poll != holding.polls {
            self.burst_poll = holding.polls;
            self.burst = 0;
        }
        self.burst = self.burst.saturating_add(1);
        dense && self.burst > ALONE
    }

    /// Bytes that the packet that messages share has room for.
    #[inline]
    fn room_left(&self) -> usize {
        let room = self.datagram_room().min(JOINT_MAX);
        let left = |p: &Outgoing| room.min(p.bytes.capacity()).saturating_sub(p.bytes.len());
        if self.open { self.window.back().map_or(0, left) } else { 0 }
    }

    /// The last packet gets `more` bytes: these.
    #[inline]
    fn extend_last(&mut self, more: usize) -> Option<&mut [u8]> {
        let packet = self.window.back_mut()?;
        let at = packet.bytes.len();
        packet.bytes.resize(at + more);
        packet.bytes.get_mut(at..)
    }

    /// Adds a message to the packet that messages share. False: there is none, or it has no room.
    #[inline]
    fn join(&mut self, header: &[u8], len: usize, pack: impl FnOnce(&mut [u8])) -> bool {
        let whole = FRAME_LEN + header.len() + len;
        if whole > self.room_left() {
            return false;
        }
        let Some(to) = self.extend_last(whole) else { return false };
        put_whole(to, header, len, pack);
        self.sent += 1;
        true
    }

    /// Whether a new packet would be the next one to leave, and may.
    #[inline]
    fn is_next(&self) -> bool {
        self.next_psn() == self.unsent && self.window.len() < WINDOW_MAX as usize && self.is_clear()
    }

    /// Whether the next packet may leave without a look at anything else.
    #[inline]
    fn is_clear(&self) -> bool {
        self.phase == Phase::Established
            && self.unsent < self.credit_end
            && self.in_flight < self.congestion.window()
            && self.lost.is_empty()
            && self.early.is_none()
            && self.hello == 0
            && !self.peer_pressure
            && !self.path.is_cut()
    }

    #[inline]
    fn append(
        &mut self,
        shared: &mut Shared,
        mut bytes: Buffer,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) {
        bytes.resize(HEADER_LEN + len);
        if let Some(frames) = bytes.get_mut(HEADER_LEN..) {
            fill(frames);
        }
        self.open = false;
        self.window.push_back(Outgoing::new(bytes));
        shared.unacknowledged += 1;
    }

    fn packet(&mut self, psn: u64) -> Option<&mut Outgoing> {
        self.window.get_mut(usize::try_from(psn.checked_sub(self.base)?).ok()?)
    }

    pub(super) fn next_psn(&self) -> u64 {
        self.base + self.window.len() as u64
    }

    /// Whether a data packet may leave now.
    #[inline]
    fn may_send_data(&self) -> bool {
        if self.phase != Phase::Established {
            return false;
        }
        if self.extra > 0 && !self.lost.is_empty() {
            return true;
        }
        self.in_flight < self.congestion.window()
            && (!self.lost.is_empty()
                || (self.unsent < self.next_psn() && self.unsent < self.credit_end))
    }

    /// Whether `transmit` has something to do.
    #[inline]
    pub(super) fn wants_to_send(&self) -> bool {
        self.hello != 0
            || (self.ack_now && self.phase == Phase::Established)
            || self.may_send_data()
    }

    /// Sends what may leave, a bounded amount, and counts the packets in `n`. False: the link took
    /// no more.
    pub(super) fn transmit(
        &mut self,
        shared: &mut Shared,
        now: u64,
        link: &mut impl Link,
        n: &mut usize,
    ) -> bool {
        if self.path.take_cut() {
            link.allow_fragments(&self.address, self.datagram_room());
        }
        if !self.send_hellos(shared, now, link, n) {
            return false;
        }
        if self.phase != Phase::Established {
            return true;
        }
        // What came early is told first: packets with data cannot tell it.
        if self.ack_now && self.early.is_some() {
            if !self.send_control(shared, Kind::Ack, now, link) {
                return false;
            }
            *n += 1;
        }
        if std::mem::take(&mut self.held) {
            shared.holding.on_end(now.saturating_sub(self.pushed_at));
        }
        if !self.send_waiting(shared, now, link, BURST, n) {
            self.open = false;
            return false;
        }
        self.open &= self.unsent < self.next_psn();
        if self.ack_now {
            if !self.send_control(shared, Kind::Ack, now, link) {
                return false;
            }
            *n += 1;
        }
        true
    }

    /// Sends what may leave of what waits, at most `budget` packets, and counts them in `n`. False: the link took
    /// no more.
    fn send_waiting(
        &mut self,
        shared: &mut Shared,
        now: u64,
        link: &mut impl Link,
        mut budget: usize,
        n: &mut usize,
    ) -> bool {
        while budget > 0 && self.may_send_data() {
            self.forget_arrived();
            let (batch, fresh) = self.choose(budget.min(BURST));
            let count = (batch.end - batch.start) as usize;
            let taken = match count {
                0 => break,
                1 => self.send_batch::<1>(shared, now, link, batch, fresh),
                2..=FEW => self.send_batch::<FEW>(shared, now, link, batch, fresh),
                _ => self.send_batch::<BURST>(shared, now, link, batch, fresh),
            };
            *n += taken;
            if taken < count {
                return false;
            }
            budget -= count;
        }
        true
    }

    fn send_hellos(
        &mut self,
        shared: &mut Shared,
        now: u64,
        link: &mut impl Link,
        n: &mut usize,
    ) -> bool {
        if self.hello & DOUBT != 0 {
            self.hello &= !DOUBT;
            link.doubt(&self.address);
        }
        for bit in [ACCEPT, INIT, PROBE] {
            if self.hello & bit == 0 {
                continue;
            }
            let kind = if bit == ACCEPT { HelloKind::Accept } else { HelloKind::Init };
            let bytes = self.hello(shared, kind).signed(&shared.settings.key);
            let padded = self.padded(bit, &bytes);
            let packet = padded.as_deref().unwrap_or(&bytes);
            if link.send(&self.address, &[IoSlice::new(packet)]) == 0 {
                return false;
            }
            shared.counts.hellos_sent += 1;
            *n += 1;
            self.hello &= !bit;
            if bit == ACCEPT {
                self.answers = 0;
            }
            if self.phase == Phase::Greeting && self.retry_at == NEVER {
                self.retry_at = now + self.patience_ns(shared);
            }
        }
        true
    }

    /// The next packets to send, all but the last of one length: lost ones first. They are marked
    /// as sent already. Also whether they were never sent before.
    fn choose(&mut self, budget: usize) -> (Range<u64>, bool) {
        let again = self.lost.front().copied();
        let from = again.unwrap_or(self.unsent);
        let wanted = if again.is_some() { State::Lost } else { State::Unsent };
        let (mut next, mut len) = (from, None);
        while ((next - from) as usize) < budget && self.may_send_data() {
            if again.is_some() && self.lost.front() != Some(&next) {
                break;
            }
            let Some(packet) = self.packet(next).filter(|packet| packet.state == wanted) else {
                break;
            };
            let bytes = packet.bytes.len();
            if len.is_some_and(|len| bytes > len) {
                break;
            }
            packet.state = State::InFlight;
            if again.is_some() {
                self.lost.pop_front();
                self.extra = self.extra.saturating_sub(1);
            } else {
                self.unsent += 1;
            }
            self.in_flight += 1;
            next += 1;
            len = len.or(Some(bytes));
            if Some(bytes) < len {
                break;
            }
        }
        (from..next, again.is_none())
    }

    /// What was lost and has arrived since is not sent again.
    #[inline]
    fn forget_arrived(&mut self) {
        while let Some(psn) = self.lost.front().copied() {
            if self.packet(psn).is_some_and(|packet| packet.state == State::Lost) {
                break;
            }
            self.lost.pop_front();
        }
    }

    /// Sends these packets, at most `N`, none of which was sent before if they are `fresh`; what the link does not take is
    /// as it was before.
    #[inline]
    fn send_batch<const N: usize>(
        &mut self,
        shared: &mut Shared,
        now: u64,
        link: &mut impl Link,
        batch: Range<u64>,
        fresh: bool,
    ) -> usize {
        let Some(key) = self.key else { return 0 };
        let count = (batch.end - batch.start) as usize;
        let mut header = self.header(shared, Kind::Data, now);
        let starved = !self.may_send_data() && self.unsent < self.next_psn();
        // The first one is the longest.
        let longest = self.packet(batch.start).map_or(0, |packet| packet.bytes.len());
        if self.goes_sound(link, longest) {
            header.flags |= HEADER_ONLY;
        }
        let first = self.transmission;
        // What waits needs an answer soon. Where much may be under way, and nothing was lost lately, those
        // that come unasked do.
        let last = first + (count as u64).saturating_sub(1);
        let every = u64::from(ACK_EVERY);
        let may =
            u64::from(self.congestion.window()).min(self.credit_end.saturating_sub(self.base));
        let enough = may >= 2 * every && first >= self.clean_from && last < self.asked + every;
        let asks = self.attempts > 0 || starved && !enough || self.asks;
        let (at, direction) = ((batch.start - self.base) as usize, self.direction);
        let mut slices = [IoSlice::new(&[]); N];
        let Self { window, transmissions, address, .. } = self;
        let packets = batch.clone().zip(window.iter_mut().skip(at));
        for (i, ((psn, packet), slot)) in packets.zip(&mut slices).enumerate() {
            let transmission = first + i as u64;
            header.psn = psn as u32;
            header.transmission = transmission as u32;
            if asks && i + 1 == count {
                header.flags |= ACK_REQUEST;
            }
            (packet.transmission, packet.sent_at) = (transmission, now);
            transmissions.push_back((transmission, psn));
            let bytes = &mut packet.bytes[..];
            let Some((head, frames)) = bytes.split_first_chunk_mut::<HEADER_LEN>() else {
                continue;
            };
            *head = header.signed(&key, &shared.hash, direction, frames);
            *slot = IoSlice::new(bytes);
        }
        let offered = slices.get(..count).unwrap_or(&[]);
        let taken = link.send(address, offered).min(count);
        for packet in window.iter_mut().skip(at).take(taken) {
            packet.bytes.note_sent();
        }
        // The others were no transmissions: in the gap they would count as arrived later.
        self.transmission = first + taken as u64;
        if asks && taken == count {
            (self.asked, self.asks) = (self.transmission, false);
        }
        shared.counts.data_sent += taken as u64;
        shared.counts.retransmitted += if fresh { 0 } else { taken as u64 };
        for psn in (batch.start + taken as u64..batch.end).rev() {
            self.take_back(psn, fresh);
        }
        if taken > 0 {
            self.on_departed(shared, now);
        }
        taken
    }

    /// A packet that the link did not take.
    fn take_back(&mut self, psn: u64, fresh: bool) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.transmissions.pop_back();
        if let Some(packet) = self.packet(psn) {
            packet.state = if fresh { State::Unsent } else { State::Lost };
            packet.transmission = if fresh { 0 } else { packet.transmission };
        }
        if fresh {
            self.unsent = psn;
        } else {
            self.lost.push_front(psn);
        }
    }

    /// Whether the network guards what a packet of `len` bytes carries, and the other side knows of that.
    #[inline]
    fn goes_sound(&self, link: &mut impl Link, len: usize) -> bool {
        self.knows(HEADER_TAGS) && link.is_sound(&self.address, len)
    }

    /// What every packet says about the other direction.
    fn header(&self, shared: &Shared, kind: Kind, now: u64) -> Header {
        let mut flags = if shared.pressure { PRESSURE } else { 0 };
        // What came early is told by acknowledgements only: an echo without it would say that it
        // is lost.
        if self.arrived_at != 0 && (kind != Kind::Data || self.early.is_none()) {
            flags |= HAS_ECHO;
        }
        let delay = now.saturating_sub(self.arrived_at) / DELAY_UNIT_NS;
        Header {
            kind,
            flags,
            sack_words: 0,
            dest: self.remote_id,
            psn: self.unsent as u32,
            transmission: 0,
            ack: self.expected as u32,
            echo: self.arrived.wrapping_sub(1) as u32,
            ack_delay: u16::try_from(delay).unwrap_or(u16::MAX),
            credit: shared.credit(),
            marks: self.marks,
            tag: 0,
        }
    }

    /// What arrived has been acknowledged by what was just sent.
    fn acknowledged_now(&mut self) {
        self.unacked = 0;
        self.ack_at = NEVER;
        self.ack_waits = false;
        // Data packets have no room for the list of what came early.
        self.ack_now = self.ack_now && self.early.is_some();
    }

    /// Sends a packet without data.
    fn send_control(
        &mut self,
        shared: &mut Shared,
        kind: Kind,
        now: u64,
        link: &mut impl Link,
    ) -> bool {
        let Some(key) = self.key else { return true };
        let mut header = self.header(shared, kind, now);
        if kind == Kind::Close {
            header.psn = self.next_psn() as u32;
        }
        let mut bytes = [0; HEADER_LEN + packet::SACK_WORDS * 8];
        let (head, words) = bytes.split_at_mut(HEADER_LEN);
        let count = self.early.as_ref().map_or(0, |early| early.write_sack(words));
        header.sack_words = count as u8;
        let words = words.get(..count * 8).unwrap_or(&[]);
        let len = HEADER_LEN + count * 8;
        // A packet that ends a connection goes over UDP.
        if kind != Kind::Close && self.goes_sound(link, len) {
            header.flags |= HEADER_ONLY;
        }
        head.copy_from_slice(&header.signed(&key, &shared.hash, self.direction, words));
        let packet = bytes.get(..len).unwrap_or(&[]);
        if link.send(&self.address, &[IoSlice::new(packet)]) == 0 {
            return false;
        }
        shared.counts.acks_sent += 1;
        self.unacked = 0;
        self.ack_at = NEVER;
        self.ack_waits = false;
        self.ack_now = false;
        true
    }

    /// Says goodbye.
    pub(super) fn send_close(&mut self, shared: &mut Shared, now: u64, link: &mut impl Link) {
        if self.phase == Phase::Established {
            self.send_control(shared, Kind::Close, now, link);
        }
    }

    /// Nothing was heard in time: sends the first packet again; after several times, all of them,
    /// little by little.
    pub(super) fn send_again(&mut self) {
        if self.attempts >= SUSPICION {
            self.hello |= INIT | DOUBT;
        }
        if self.attempts == SILENCE {
            self.congestion.on_silence();
            self.lost.clear();
            for (i, packet) in self.window.iter_mut().enumerate() {
                if matches!(packet.state, State::InFlight | State::Lost) {
                    packet.state = State::Lost;
                    packet.overdue = true;
                    self.lost.push_back(self.base + i as u64);
                }
            }
            self.in_flight = 0;
        } else if let Some(first) = self.window.front_mut() {
            if first.state == State::InFlight {
                first.state = State::Lost;
                first.overdue = true;
                self.in_flight = self.in_flight.saturating_sub(1);
                self.lost.push_front(self.base);
            }
        }
        self.extra = u8::from(!self.lost.is_empty());
        if self.window.is_empty() {
            self.attempts = 0;
        }
    }

    /// Reads what a packet that came at `came` says about what we have sent. `words`: the selective
    /// acknowledgement. False: it names packets that were never sent.
    pub(super) fn on_acknowledgement(
        &mut self,
        shared: &mut Shared,
        header: &Header,
        words: &[u8],
        came: u64,
        now: u64,
    ) -> bool {
        let ack = widen(header.ack, self.base);
        if ack < self.base {
            return true; // overtaken by a later one
        }
        if ack > self.unsent {
            return false;
        }
        if ack == self.base && words.is_empty() && self.says_the_same(header) {
            return true;
        }
        let full = self.in_flight + 1 >= self.congestion.window();
        let echo = (header.flags & HAS_ECHO != 0).then(|| widen(header.echo, self.echoed));
        let echo = echo.filter(|echo| *echo < self.transmission);
        let mut arrived = 0;
        let mut late = 0;
        let mut sample = None;
        let mut early = false;
        while self.base < ack {
            let Some(packet) = self.window.pop_front() else { break };
            self.base += 1;
            shared.unacknowledged -= 1;
            if packet.state != State::Arrived {
                arrived += 1;
                late += u32::from(packet.was_late(echo));
                early |= packet.was_early(echo);
                self.in_flight -= u32::from(packet.state == State::InFlight);
            }
            if Some(packet.transmission) == echo && packet.state == State::InFlight {
                sample = Some(packet.sent_at);
            }
            shared.buffers.give(packet.bytes);
        }
        arrived += self.on_selective(shared, words, echo, &mut sample, &mut late);
        if early {
            self.congestion.on_early();
        }
        if late > 0 {
            self.reordering = (self.reordering * 2).min(REORDERING_MAX);
            self.in_order = 0;
            self.congestion.on_late(late);
        }
        self.credit_end = self.credit_end.max(ack).min(ack + u64::from(WINDOW_MAX));
        if echo.is_none_or(|echo| echo + 1 >= self.echoed) {
            self.credit_end = ack + u64::from(header.credit.max(1));
            self.peer_pressure = header.flags & PRESSURE != 0;
        }
        // A delay that has no room in its field is none to calculate with.
        if arrived > 0 && header.ack_delay != u16::MAX {
            let delay = u64::from(header.ack_delay) * DELAY_UNIT_NS;
            self.congestion.on_answer(delay);
            // Nor is one that is longer than the whole: some other packet's.
            let whole = sample.map_or(0, |sent_at| came.saturating_sub(sent_at));
            if whole > delay {
                self.congestion.on_round_trip(whole - delay, came);
            }
        }
        let marked = header.marks.wrapping_sub(self.marks_seen);
        let marked = if marked <= u32::from(u16::MAX) { marked } else { 0 };
        self.marks_seen = self.marks_seen.wrapping_add(marked);
        if arrived > 0 {
            self.in_order += arrived;
            if self.in_order >= IN_ORDER {
                self.in_order = 0;
                self.reordering = (self.reordering / 2).max(REORDERING_MIN);
            }
            self.attempts = 0;
            self.extra = 0;
            self.congestion.on_acknowledged(arrived, marked, full);
        }
        if let Some(echo) = echo {
            self.echoed = self.echoed.max(echo + 1);
            self.find_lost();
            self.congestion.on_echo(echo, self.transmission);
        }
        if arrived > 0 || self.in_flight == 0 {
            let waits = self.in_flight > 0 || !self.lost.is_empty();
            self.retry_at = if waits { now + self.patience_ns(shared) } else { NEVER };
        }
        true
    }

    /// Whether a packet that acknowledges what is known to have arrived says nothing else that is new: those behind the
    /// first one of a burst do not.
    #[inline]
    fn says_the_same(&self, header: &Header) -> bool {
        header.flags & HAS_ECHO != 0
            && header.echo.wrapping_add(1) == self.echoed as u32
            && header.marks == self.marks_seen
            && (header.flags & PRESSURE != 0) == self.peer_pressure
            && self.credit_end == self.base + u64::from(header.credit.max(1))
            && (self.in_flight > 0 || self.retry_at == NEVER)
    }

    /// Marks what came early. Returns how many packets are new.
    fn on_selective(
        &mut self,
        shared: &mut Shared,
        words: &[u8],
        echo: Option<u64>,
        sample: &mut Option<u64>,
        late: &mut u32,
    ) -> u32 {
        let mut new = 0;
        for (w, word) in words.chunks_exact(8).enumerate() {
            let mut bits = word.try_into().map_or(0, u64::from_le_bytes);
            while bits != 0 {
                let at = 1 + w * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let Some(packet) = self.window.get_mut(at) else { break };
                *late += u32::from(packet.was_late(echo));
                match packet.state {
                    State::InFlight => {
                        self.in_flight -= 1;
                        if Some(packet.transmission) == echo {
                            *sample = Some(packet.sent_at);
                        }
                    }
                    State::Lost => {}
                    State::Unsent | State::Arrived => continue,
                }
                packet.state = State::Arrived;
                shared.buffers.give(std::mem::take(&mut packet.bytes));
                new += 1;
            }
        }
        new
    }

    /// What was sent well before something that has arrived, and has not arrived, is lost.
    fn find_lost(&mut self) {
        while let Some((transmission, psn)) = self.transmissions.front().copied() {
            if transmission + self.reordering >= self.echoed {
                break;
            }
            self.transmissions.pop_front();
            let Some(packet) = self.packet(psn) else { continue };
            if packet.state == State::InFlight && packet.transmission == transmission {
                packet.state = State::Lost;
                packet.overdue = false;
                self.in_flight -= 1;
                self.lost.push_back(psn);
                self.clean_from = self.transmission + CLEAN;
                self.congestion.on_lost();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::widen;

    #[test]
    fn numbers_are_widened_to_the_nearest() {
        assert_eq!(widen(5, 3), 5);
        assert_eq!(widen(1, 0xffff_ffff), 0x1_0000_0001);
        assert_eq!(widen(0xffff_fff0, 0x1_0000_0003), 0xffff_fff0);
        assert_eq!(widen(7, 0x5_0000_0007), 0x5_0000_0007);
        assert_eq!(widen(u32::MAX, 3), u64::from(u32::MAX));
    }
}
