//! Split copy (PROTOCOL.md §4.13): both ends copy a long message. In each of its progress passes the sender takes
//! chunks and sends or writes them; the receiver places what arrives and reads the other chunks. A sender that makes no
//! progress costs nothing.

use crate::memory::MAX_SEGMENTS;
use crate::protocol::index_list::Key;
use crate::protocol::limits::{Counts, Limits};
use crate::protocol::message::{Inbound, Next, Outbound};
use crate::protocol::packet::{Packet, PieceHeader, Ranges};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::{Assisted, Iface, Mode, SendError, Share, Taken, slice_ranges};

/// The receiver's side of a split copy: all bytes of the receive from `base` on.
#[derive(Debug)]
pub(in crate::protocol) struct Receiver {
    /// The message in the sender's memory.
    ranges: Ranges,
    share: Share,
    base: usize,
    /// The chunks in progress here: their first byte and the one after the last.
    hand: (usize, usize),
    /// Copying failed here: the receive only waits until the sender has finished its chunks.
    failure: Option<Errno>,
    /// Chunks that came as messages and are not counted in the work descriptor yet.
    came: u32,
    /// The receive's buffer was checked before the first of them was copied to it.
    checked: bool,
    /// The next take is a trial: only [`TRIAL`] chunks, to see whether the sender takes the others.
    trial: bool,
}

/// Chunks of a trial.
const TRIAL: u32 = 4;
/// Most chunks that are sent in one progress pass.
const PIECES: u32 = 4;

/// The sender's side of a split copy.
#[derive(Debug)]
pub(in crate::protocol) struct Sender {
    base: usize,
    share: Share,
    /// The receiver's buffer from `base` on.
    ranges: Ranges,
    /// How it copies. A split copy that began in one way continues in it.
    way: Option<Way>,
    /// The chunks in progress, taken and not sent yet: their first byte and the one after the last.
    hand: (usize, usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// As messages.
    Send,
    /// Into the receiver's memory.
    Write,
}

impl Receiver {
    /// Begins a split copy of the missing bytes of a receive, if that is worth it, and tells the sender.
    pub(in crate::protocol) fn begin(
        iface: &mut impl Iface,
        message: &Inbound,
        ranges: &Ranges,
    ) -> Option<Self> {
        let (peer, base) = (message.peer, message.received);
        let share = iface.share(peer, message.want - base)?;
        let packet = Packet::Cooperate {
            tx: message.tx,
            offset: base as u64,
            share,
            ranges: Ranges::new(message.rest().ranges()),
        };
        // Sent before anything is copied. A sender that cannot be told does not take part.
        let told = iface.send(peer, Mode::Short, packet.encode().as_slice(), 0, |_, _| ());
        if told.is_err() {
            iface.stop_sharing(peer, &share);
            iface.take(peer, &share, 0);
            return None;
        }
        let (ranges, hand, failure) = (*ranges, (0, 0), None);
        Some(Self { ranges, share, base, hand, failure, came: 0, checked: false, trial: true })
    }

    /// Copies chunks, at most `most` bytes. `fed`: the sender's chunks come as messages.
    pub(in crate::protocol) fn step(
        &mut self,
        iface: &mut impl Iface,
        message: &mut Inbound,
        (most, fed): (usize, bool),
        counts: &mut Counts,
    ) -> Next {
        let mut budget = most;
        loop {
            let copied = budget < most;
            if self.hand.0 == self.hand.1 {
                match self.take(iface, message, copied || fed) {
                    Taken::Part { offset, len } => {
                        let from = self.base.saturating_add(offset).min(message.want);
                        self.hand = (from, from.saturating_add(len).min(message.want));
                    }
                    // More chunks may have arrived meanwhile.
                    Taken::Wait if copied => return Next::Moved,
                    Taken::Wait => return Next::Again,
                    Taken::Over => return self.end(message),
                }
                continue;
            }
            if budget == 0 {
                return Next::Moved;
            }
            let (from, to) = self.hand;
            let len = (to - from).min(budget);
            match message.read(iface, &self.ranges, from, len) {
                Ok(moved) => {
                    let moved = moved.min(len);
                    self.hand.0 += moved;
                    budget -= moved;
                    counts.pulled_bytes += moved as u64;
                }
                Err(SendError::Again) => return Next::Again,
                Err(SendError::Unreachable(errno)) => {
                    self.failure = Some(errno);
                    self.hand = (0, 0);
                    iface.stop_sharing(message.peer, &self.share);
                }
            }
        }
    }

    /// What this side copies next. `looks`: only whether the split copy is over.
    fn take(&mut self, iface: &mut impl Iface, message: &Inbound, looks: bool) -> Taken {
        if self.came > 0 {
            iface.arrived(message.peer, &self.share, std::mem::take(&mut self.came));
        }
        // To place chunks that the sender sends costs less than to read them.
        let most = if looks {
            0
        } else if std::mem::take(&mut self.trial) {
            TRIAL
        } else {
            u32::MAX
        };
        iface.take(message.peer, &self.share, most)
    }

    fn end(&self, message: &mut Inbound) -> Next {
        match self.failure {
            Some(errno) => message.unreadable(errno),
            None => {
                message.received = message.want;
                Next::Whole
            }
        }
    }

    /// A chunk has come as a message. False: it is none of this split copy.
    pub(in crate::protocol) fn place(
        &mut self,
        message: &Inbound,
        offset: u64,
        payload: &[u8],
        limits: &Limits,
    ) -> bool {
        let (unit, base) = (u64::from(self.share.unit), self.base as u64);
        let at = offset.checked_sub(base).filter(|at| *at < self.share.len && at % unit == 0);
        if at.is_none_or(|at| payload.len() as u64 != unit.min(self.share.len - at)) {
            return false;
        }
        self.came = self.came.saturating_add(1);
        self.trial = true;
        // The kernel reports an unmapped address to a copy by system call; a store here would end the process.
        let (from, len) = (offset as usize, payload.len());
        if !std::mem::replace(&mut self.checked, true)
            && !message.target.segments.is_accessible(from, len, true)
        {
            self.failure = Some(Errno(libc::EFAULT));
        }
        if self.failure.is_none() {
            message.place(from, payload, limits);
        }
        true
    }
}

impl Sender {
    /// COOPERATE: the receiver begins a split copy of a message of `len` bytes. `None`: it cannot be meant.
    pub(in crate::protocol) fn new(
        len: usize,
        offset: u64,
        share: Share,
        ranges: Ranges,
    ) -> Option<Self> {
        offset.checked_add(share.len).filter(|end| *end <= len as u64)?;
        Some(Self { base: offset as usize, share, ranges, way: None, hand: (0, 0) })
    }

    /// Copies a run of chunks. `receives`: this endpoint also copies as a receiver. Returns the number of bytes. `None`:
    /// no chunk is left.
    pub(in crate::protocol) fn step(
        &mut self,
        iface: &mut impl Iface,
        message: &Outbound,
        key: Key,
        receives: bool,
    ) -> Option<usize> {
        let caps = iface.caps(message.peer);
        let sends = caps.push_max > 0 && caps.fragment_max >= self.share.unit as usize;
        // A process that also receives has enough to do: to write is one copy, to send is two.
        let best = if sends && !receives { Way::Send } else { Way::Write };
        match *self.way.get_or_insert(best) {
            // The ring is slow now: the receiver reads faster.
            Way::Send if !sends && self.hand.0 == self.hand.1 => None,
            Way::Send => self.send(iface, message, key),
            Way::Write => self.write(iface, message),
        }
    }

    fn write(&self, iface: &mut impl Iface, message: &Outbound) -> Option<usize> {
        let segments = message.payload.segments();
        let part = |offset: usize, len: usize| {
            let mut remote = [Range::default(); MAX_SEGMENTS];
            let ranges = self.ranges.as_slice();
            let count = slice_ranges(ranges, offset as u64, len as u64, &mut remote);
            (segments.slice(self.base.saturating_add(offset), len), remote, count)
        };
        match iface.assist(message.peer, &self.share, part) {
            Assisted::Moved(bytes) => Some(bytes),
            Assisted::Over => None,
        }
    }

    fn send(&mut self, iface: &mut impl Iface, message: &Outbound, key: Key) -> Option<usize> {
        if self.hand.0 == self.hand.1 {
            match iface.begin_assist(message.peer, &self.share, PIECES) {
                Taken::Part { offset, len } => {
                    let from = self.base.saturating_add(offset);
                    self.hand = (from, from.saturating_add(len));
                }
                Taken::Wait => return Some(0),
                Taken::Over => return None,
            }
        }
        let mut sent = 0;
        while self.hand.0 < self.hand.1 {
            let (at, end) = self.hand;
            let len = (end - at).min(self.share.unit as usize);
            let header = PieceHeader::pushed(key.to_wire(), at as u64);
            let pack = |from: usize, to: &mut [u8]| {
                message.payload.copy_out(at + from, to);
            };
            // A departure of the peer is reported by `on_departure`.
            if iface.send(message.peer, Mode::Fragment, header.as_slice(), len, pack).is_err() {
                break;
            }
            sent += len;
            self.hand.0 += len;
        }
        Some(sent)
    }
}
