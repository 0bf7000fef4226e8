//! Messages from the layer above: split over packets, coalesced into one, or sent at once.

use super::super::packet::{
    self, DATAGRAM_LEAST, FIRST_FRAME_LEN, FRAME_LEN, HEADER_LEN, MESSAGE_MAX,
};
use super::super::shared::Shared;
use super::super::timers::NEVER;
use super::Connection;
use super::handshake::Phase;
use super::transmit::Turn;
use crate::sys::Errno;
use crate::transport::net::link::Link;
use crate::transport::{Pack, SendError};

/// Bytes that may wait for their first transmission; if packets are small, so many packets.
const BACKLOG_BYTES: usize = 128 * 1024;
const BACKLOG_PACKETS: usize = 32;
/// Longest packet that messages share, bytes. A message of up to 1/`JOINT_SHARE` of it is not split.
const JOINT_MAX: usize = 4096;
const JOINT_SHARE: usize = 3;
/// Least payload of a message's fragment in a shared packet, if the message continues in the next one, bytes.
const PIECE_MIN: usize = 256;
/// Most packets, and bytes, that are held back.
const HELD_PACKETS: usize = 16;
const HELD_BYTES: usize = 32 * 1024;

/// What happened to a message that the fast path took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pushed {
    Left,
    /// The link took no more: packets are queued.
    Blocked,
    /// It is held back: it leaves when there are enough, or with the next poll.
    Held,
    /// A part has left; the rest is held back, or waits for room in the window.
    Partly,
}

/// How a message is split over packets, bytes.
struct Division {
    /// Frame bytes that fit in a packet.
    room: usize,
    /// Frame bytes that fit in a packet that messages share.
    joint: usize,
    /// Payload that goes into the open packet.
    here: usize,
    /// Number of packets of its own.
    packets: usize,
}

/// Writes a frame: see [`packet::put_frame`].
fn put_frame(
    to: &mut [u8],
    kind: u8,
    header: &[u8],
    (len, total): (usize, usize),
    pack: impl FnOnce(&mut [u8]),
) {
    let at = packet::put_frame(to, kind, header, len, total);
    if let Some(to) = to.get_mut(at..) {
        pack(to);
    }
}

impl Connection {
    /// See [`super::super::Reliable::send`].
    pub(crate) fn push(
        &mut self,
        shared: &mut Shared,
        header: &[u8],
        len: usize,
        pack: &mut Pack<'_>,
        shares: bool,
        now: u64,
    ) -> Result<(), SendError> {
        if len > MESSAGE_MAX || header.len() > usize::from(u8::MAX) {
            return Err(SendError::Unreachable(Errno(libc::EMSGSIZE)));
        }
        // Messages that wait anyway may share a packet. On a new connection packet loss is still unknown, and separate
        // packets reveal it sooner.
        let opens = self.sender.window.waiting() > 0 || shares;
        let opens = opens && self.handshake.is_established();
        self.put(shared, header, len, pack, opens, now)
    }

    /// Queues a message: into the open packet as far as it has room, and into packets of its own. The last of those
    /// takes further messages if the message `opens` it. If there is no room nothing changes.
    fn put(
        &mut self,
        shared: &mut Shared,
        header: &[u8],
        len: usize,
        pack: &mut Pack<'_>,
        opens: bool,
        now: u64,
    ) -> Result<(), SendError> {
        if self.join(header, len, |to| pack(0, to)) {
            return Ok(());
        }
        let division = self.divide(header.len(), len);
        let Division { room, joint, here, packets } = division;
        let whole = FRAME_LEN + header.len() + len;
        let Some(largest) = self.make_room_for(shared, &division, whole, opens) else {
            return Err(SendError::Again);
        };
        // The message, alone or with those before it, would fill a longer packet.
        if FRAME_LEN + header.len() + len >= room || self.coalescer.open {
            let (established, base) = (self.handshake.is_established(), self.sender.window.base);
            self.path.want_long(established, base, now, &mut self.handshake.hellos);
        }
        self.note_message(shared, now);
        let front = FIRST_FRAME_LEN + header.len();
        let more = (here > 0).then(|| self.sender.window.extend_last(front + here)).flatten();
        if let Some(to) = more {
            put_frame(to, 1, header, (here, len), |to| pack(0, to));
        }
        let mut offset = here;
        for i in 1..=packets {
            let (kind, front, header) = match (offset == 0 && i == 1, i == packets) {
                (true, true) => (0, FRAME_LEN + header.len(), header),
                (true, false) => (1, front, header),
                (false, true) => (3, FRAME_LEN, &[][..]),
                (false, false) => (2, FRAME_LEN, &[][..]),
            };
            let piece = room.saturating_sub(front).min(len - offset);
            self.coalescer.open = opens && i == packets && front + piece < joint;
            let used = if self.coalescer.open { joint } else { front + piece };
            // `make_room_for` has prepared a buffer for each packet; the last packet may be of a smaller class.
            let taken = shared.buffers.take_to_send(HEADER_LEN + used);
            let mut bytes = taken.or_else(|| shared.buffers.take(largest)).unwrap_or_default();
            bytes.resize(HEADER_LEN + front + piece);
            if let Some(to) = bytes.get_mut(HEADER_LEN..) {
                put_frame(to, kind, header, (piece, len), |to| pack(offset, to));
            }
            self.sender.window.push(bytes);
            shared.unacknowledged += 1;
            offset += piece;
        }
        Ok(())
    }

    /// How to split a message for which the open packet has no room.
    fn divide(&self, header: usize, len: usize) -> Division {
        let room = self.path.carried().saturating_sub(HEADER_LEN);
        let joint = room.min(JOINT_MAX - HEADER_LEN);
        let (front, whole) = (FIRST_FRAME_LEN + header, FRAME_LEN + header + len);
        let here = self.room_left().saturating_sub(front);
        let here = if whole > joint / JOINT_SHARE && here >= PIECE_MIN { here } else { 0 };
        let packets = if here > 0 {
            (len - here).div_ceil(room - FRAME_LEN)
        } else if whole <= room {
            1
        } else {
            1 + (len - room.saturating_sub(front).min(len)).div_ceil(room - FRAME_LEN)
        };
        Division { room, joint, here, packets }
    }

    /// Prepares buffers for a message of `whole` bytes, with its frame. Returns the length of its longest packet, bytes.
    /// `None`: the message may not be queued, or there is no memory for it.
    fn make_room_for(
        &self,
        shared: &mut Shared,
        division: &Division,
        whole: usize,
        opens: bool,
    ) -> Option<usize> {
        let Division { room, joint, packets, .. } = *division;
        let largest = match packets {
            1 => HEADER_LEN + whole.max(if opens { joint } else { 0 }).min(room),
            _ => HEADER_LEN + room,
        };
        let waiting = self.sender.window.waiting();
        let backlog = (BACKLOG_BYTES / room.max(1)).max(BACKLOG_PACKETS);
        let may = (waiting == 0 || waiting + packets <= backlog)
            && self.sender.window.has_room_for(packets)
            && shared.buffers.prepare(packets, largest);
        may.then_some(largest)
    }

    /// A message was accepted.
    fn note_message(&mut self, shared: &mut Shared, now: u64) {
        self.known = true;
        self.sender.sent += 1;
        if self.sender.window.packets.is_empty() {
            self.liveness.owe(shared.patience, now);
            if self.handshake.phase == Phase::HalfOpen && self.sender.timeout.at == NEVER {
                self.wait_for_greeting(shared, now);
            }
        }
    }

    /// See [`super::super::Reliable::send_at_once`]. `None`: nothing was done.
    #[inline]
    pub(crate) fn push_at_once(
        &mut self,
        turn: &mut Turn<'_, impl Link>,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
    ) -> Option<Pushed> {
        let whole = FRAME_LEN + header.len() + len;
        // A shorter packet goes over any path. Where messages leave at once nothing else looks.
        if HEADER_LEN + whole > DATAGRAM_LEAST {
            self.path.go_direct(turn.link.direct(&self.address));
        }
        let room = self.path.carried().saturating_sub(HEADER_LEN);
        let holds = self.coalescer.holds(&mut turn.shared.backoff, turn.now);
        if holds || self.coalescer.open || self.coalescer.held || whole >= room {
            if holds && self.coalescer.held && self.join(header, len, |to| pack(0, to)) {
                return Some(Pushed::Held);
            }
            return self.push_more_at_once(turn, (header, len), &mut pack, holds);
        }
        if !self.sender.is_next() || !self.is_clear() {
            return None;
        }
        let mut bytes = turn.shared.buffers.take_to_send(HEADER_LEN + whole)?;
        bytes.resize(HEADER_LEN + whole);
        put_frame(bytes.get_mut(HEADER_LEN..)?, 0, header, (len, 0), |to| pack(0, to));
        let left = self.send_single(turn, &mut bytes)?;
        // The packet has left: the bookkeeping does not delay it.
        self.note_message(turn.shared, turn.now);
        turn.shared.unacknowledged += 1;
        if !left {
            self.sender.on_single_refused(bytes);
            return Some(Pushed::Blocked);
        }
        self.note_single(turn, bytes);
        Some(Pushed::Left)
    }

    /// The same for a message that is longer than a packet, is one of a burst, or follows messages that were held back.
    #[inline(never)]
    fn push_more_at_once(
        &mut self,
        turn: &mut Turn<'_, impl Link>,
        (header, len): (&[u8], usize),
        pack: &mut Pack<'_>,
        holds: bool,
    ) -> Option<Pushed> {
        let waits = self.sender.window.waiting() > 0 && !self.coalescer.held;
        if waits || len > MESSAGE_MAX || header.len() > usize::from(u8::MAX) || !self.is_clear() {
            return None;
        }
        self.put(turn.shared, header, len, pack, holds, turn.now).ok()?;
        let waiting = self.sender.window.waiting();
        // While some are held back, others are in flight.
        let packets = (HELD_BYTES / self.path.carried()).min(HELD_PACKETS);
        let most = packets.min(self.sender.limit() as usize / 4).max(1);
        self.coalescer.held = holds && (self.coalescer.open || waiting < most);
        if self.coalescer.held && waiting <= most {
            return Some(Pushed::Held);
        }
        self.coalescer.open &= holds;
        let leave = waiting - usize::from(self.coalescer.open);
        Some(match self.send_waiting(turn, leave) {
            false => Pushed::Blocked,
            true if self.sender.window.waiting() > 0 => Pushed::Partly,
            true => Pushed::Left,
        })
    }

    /// Bytes that still fit in the open packet.
    fn room_left(&self) -> usize {
        let Some(last) = self.sender.window.packets.back().filter(|_| self.coalescer.open) else {
            return 0;
        };
        let room = self.path.carried().min(JOINT_MAX).min(last.bytes.capacity());
        room.saturating_sub(last.bytes.len())
    }

    /// Adds a message to the open packet. False: there is none, or it has no room.
    fn join(&mut self, header: &[u8], len: usize, pack: impl FnOnce(&mut [u8])) -> bool {
        let whole = FRAME_LEN + header.len() + len;
        if whole > self.room_left() {
            return false;
        }
        let Some(to) = self.sender.window.extend_last(whole) else { return false };
        put_frame(to, 0, header, (len, 0), pack);
        self.sender.sent += 1;
        true
    }
}
