//! Split copy (PROTOCOL.md §4.13): both ends copy a long message. In each of its progress passes the sender takes
//! chunks and sends or writes them; the receiver places what arrives and reads the other chunks. A sender that makes no
//! progress costs nothing.

use crate::memory::MAX_SEGMENTS;
use crate::protocol::Host;
use crate::protocol::engine::{Core, Engine};
use crate::protocol::index_list::Key;
use crate::protocol::packet::{Packet, Ranges};
use crate::protocol::schemes::fragments::Step;
use crate::protocol::schemes::push::Place;
use crate::protocol::send::{Carrier, TxState};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::{Assisted, Iface, Mode, PeerId, SendError, Share, Taken, slice_ranges};

/// The receiver's side of a split copy: all bytes of the receive from `base` on.
#[derive(Debug)]
pub(in crate::protocol) struct Sharing {
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
/// Passes without a fragment from a sender that has sent some, after which it is taken to send none.
const PATIENCE: u64 = 64;
/// Most chunks that are sent in one progress pass.
const PIECES: u32 = 4;

/// The sender's side of a split copy.
#[derive(Debug)]
pub(in crate::protocol) struct Assist {
    pub(in crate::protocol) tx: Key,
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

impl<I: Iface> Engine<I> {
    /// Begins a split copy of the missing bytes of a receive, if that is worth it, and tells the sender.
    pub(in crate::protocol) fn begin_sharing(&mut self, key: Key) {
        let Self { iface, core } = self;
        let Some(active) = core.active.get_mut(key) else { return };
        let (peer, base) = (active.peer, active.received);
        let unfit = active.sharing.is_some() || active.lending.begun;
        if unfit || active.ranges.as_slice().is_empty() {
            return;
        }
        let Some(share) = iface.share(peer, active.want - base) else { return };
        let rest = active.target.segments.slice(base, active.want - base);
        let packet = Packet::Cooperate {
            tx: active.tx,
            offset: base as u64,
            share,
            ranges: Ranges::new(rest.ranges()),
        };
        // Sent before anything is copied. A sender that cannot be told does not take part.
        let told = iface.send(peer, Mode::Short, packet.encode().as_slice(), 0, |_, _| ());
        if told.is_err() {
            iface.stop_sharing(peer, &share);
            iface.take(peer, &share, 0);
            return;
        }
        let (failure, came, checked, trial) = (None, 0, false, true);
        active.sharing = Some(Sharing { share, base, hand: (0, 0), failure, came, checked, trial });
        core.pushed.insert(peer, active.tx, Place::Active(key));
    }

    /// Copies chunks of a split receive, at most `bulk_chunk` bytes.
    pub(in crate::protocol) fn pull_shared(&mut self, key: Key, host: &mut impl Host) -> Step {
        let mut budget = self.core.limits.bulk_chunk;
        let mut copied = false;
        let comes = self.core.active.get(key).is_some_and(|active| self.core.is_fed(active.peer));
        loop {
            let Some(active) = self.core.active.get_mut(key) else { return Step::Done };
            let (peer, want, tx) = (active.peer, active.want, active.tx);
            let Some(sharing) = &mut active.sharing else { return Step::Done };
            if sharing.hand.0 == sharing.hand.1 {
                if sharing.came > 0 {
                    self.iface.arrived(peer, &sharing.share, std::mem::take(&mut sharing.came));
                }
                // To place chunks that the sender sends costs less than to read them.
                let most = if copied || comes {
                    0
                } else if std::mem::take(&mut sharing.trial) {
                    TRIAL
                } else {
                    u32::MAX
                };
                match self.iface.take(peer, &sharing.share, most) {
                    Taken::Part { offset, len } => {
                        let from = sharing.base.saturating_add(offset).min(want);
                        sharing.hand = (from, from.saturating_add(len).min(want));
                    }
                    // More chunks may have arrived meanwhile.
                    Taken::Wait if copied => return Step::Moved,
                    Taken::Wait => return Step::Again,
                    Taken::Over => {
                        let failure = sharing.failure;
                        active.sharing = None;
                        if let Some(errno) = failure {
                            self.core.pushed.remove(peer, tx);
                            return self.pull_failed(key, errno, host);
                        }
                        active.received = want;
                        self.core.finish_active(key, host);
                        return Step::Done;
                    }
                }
                continue;
            }
            if budget == 0 {
                return Step::Moved;
            }
            let (from, to) = sharing.hand;
            let len = (to - from).min(budget);
            let local = active.target.segments.slice(from, len);
            let mut remote = [Range::default(); MAX_SEGMENTS];
            let ranges = active.ranges.as_slice();
            let count = slice_ranges(ranges, from as u64, len as u64, &mut remote);
            match self.iface.get(peer, &local, remote.get(..count).unwrap_or(&[])) {
                Ok(moved) => {
                    copied = true;
                    let moved = moved.min(len);
                    sharing.hand.0 += moved;
                    budget -= moved;
                    self.core.counts.pulled_bytes += moved as u64;
                }
                Err(SendError::Again) => return Step::Again,
                Err(SendError::Unreachable(errno)) => {
                    sharing.failure = Some(errno);
                    sharing.hand = (0, 0);
                    self.iface.stop_sharing(peer, &sharing.share);
                }
            }
        }
    }

    /// Copies chunks of a message that its receiver has split.
    pub(in crate::protocol) fn advance_assists(&mut self) -> usize {
        while let Some(assist) = self.core.assists.front_mut() {
            if let Some(request) = self.core.tx.get(assist.tx) {
                let caps = self.iface.caps(request.peer);
                let sends = caps.push_max > 0 && caps.fragment_max >= assist.share.unit as usize;
                // A process that also receives has enough to do: to write is one copy, to send is two.
                let best = if sends && self.core.pulls.is_empty() { Way::Send } else { Way::Write };
                let way = *assist.way.get_or_insert(best);
                if way == Way::Send {
                    // The ring is slow now: the receiver reads faster.
                    let goes_on = sends || assist.hand.0 < assist.hand.1;
                    match goes_on.then(|| self.send_pieces()).flatten() {
                        Some(sent) => return usize::from(sent > 0),
                        None => {
                            self.core.assists.pop_front();
                            continue;
                        }
                    }
                }
                let segments = request.payload.segments();
                let part = |offset: usize, len: usize| {
                    let mut remote = [Range::default(); MAX_SEGMENTS];
                    let ranges = assist.ranges.as_slice();
                    let count = slice_ranges(ranges, offset as u64, len as u64, &mut remote);
                    (segments.slice(assist.base.saturating_add(offset), len), remote, count)
                };
                match self.iface.assist(request.peer, &assist.share, part) {
                    Assisted::Moved(bytes) => {
                        self.core.counts.assisted_bytes += bytes as u64;
                        return 1;
                    }
                    Assisted::Over => {}
                }
            }
            self.core.assists.pop_front();
        }
        0
    }

    /// Sends chunks of the first split message. Returns the number of bytes. `None`: no chunk of it is left.
    fn send_pieces(&mut self) -> Option<usize> {
        let Self { iface, core } = self;
        let assist = core.assists.front_mut()?;
        let request = core.tx.get(assist.tx)?;
        let peer = request.peer;
        if assist.hand.0 == assist.hand.1 {
            match iface.begin_assist(peer, &assist.share, PIECES) {
                Taken::Part { offset, len } => {
                    let from = assist.base.saturating_add(offset);
                    assist.hand = (from, from.saturating_add(len));
                }
                Taken::Wait => return Some(0),
                Taken::Over => return None,
            }
        }
        let segments = request.payload.segments();
        let mut sent = 0;
        while assist.hand.0 < assist.hand.1 {
            let (at, end) = assist.hand;
            let len = (end - at).min(assist.share.unit as usize);
            let packet = Packet::Pushed { tx: assist.tx.to_wire(), offset: at as u64 };
            let pushed =
                iface.send(peer, Mode::Fragment, packet.encode().as_slice(), len, |from, to| {
                    segments.copy_out(at + from, to);
                });
            match pushed {
                Ok(()) => {
                    sent += len;
                    assist.hand.0 += len;
                    core.counts.assisted_bytes += len as u64;
                }
                // A departure of the peer is reported by `on_departure`.
                Err(_) => break,
            }
        }
        Some(sent)
    }
}

impl Core {
    /// A chunk of a split receive has come as a message.
    pub(in crate::protocol) fn place_piece(&mut self, key: Key, offset: u64, payload: &[u8]) {
        let Some(active) = self.active.get_mut(key) else { return };
        let Some(sharing) = &mut active.sharing else { return };
        let (unit, base) = (u64::from(sharing.share.unit), sharing.base as u64);
        let at = offset.checked_sub(base).filter(|at| *at < sharing.share.len && at % unit == 0);
        if at.is_none_or(|at| payload.len() as u64 != unit.min(sharing.share.len - at)) {
            self.counts.dropped += 1;
            return;
        }
        sharing.came = sharing.came.saturating_add(1);
        sharing.trial = true;
        // The kernel reports an unmapped address to a copy by system call; a store here would end the process.
        let (from, len) = (offset as usize, payload.len());
        if !std::mem::replace(&mut sharing.checked, true)
            && !active.target.segments.is_accessible(from, len, true)
        {
            sharing.failure = Some(Errno(libc::EFAULT));
        }
        if sharing.failure.is_none() {
            active.place(from, payload, &self.limits);
        }
        let (peer, turn) = (active.peer, self.turn);
        if let Some(state) = self.peer(peer) {
            state.fed = turn;
        }
    }

    /// Whether fragments of long messages have come from `peer` lately.
    pub(in crate::protocol) fn is_fed(&self, peer: PeerId) -> bool {
        let state = self.peers.get(peer.index());
        state.is_some_and(|state| state.fed > 0 && self.turn - state.fed < PATIENCE)
    }

    /// COOPERATE: the receiver begins a split copy of a message.
    pub(in crate::protocol) fn on_cooperate(
        &mut self,
        peer: PeerId,
        tx: u64,
        offset: u64,
        share: Share,
        ranges: Ranges,
    ) {
        let key = Key::from_wire(tx);
        let request = self.tx.get(key).filter(|request| {
            let total = request.payload.segments().len() as u64;
            request.peer == peer
                && matches!(request.state, TxState::AwaitingAnswer)
                && request.carrier == Carrier::Undecided
                && offset.checked_add(share.len).is_some_and(|end| end <= total)
        });
        if request.is_none() || self.assists.iter().any(|assist| assist.tx == key) {
            self.counts.dropped += 1;
            return;
        }
        self.assists.push_back(Assist {
            tx: key,
            base: offset as usize,
            share,
            ranges,
            way: None,
            hand: (0, 0),
        });
    }
}
