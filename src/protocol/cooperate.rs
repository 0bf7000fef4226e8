//! Long messages that both ends copy (PROTOCOL.md §4.13): the receiver reads, and the sender, whenever
//! it has a turn, writes another part. A sender that has none costs nothing.

use super::Host;
use super::engine::{Core, Engine};
use super::index_list::Key;
use super::packet::{Packet, Ranges};
use super::rendezvous::Step;
use super::send::{Carrier, TxState};
use crate::memory::MAX_SEGMENTS;
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::{Assisted, Iface, PeerId, SendError, Share, Taken, slice_ranges};

/// What of a receive is shared with its sender: all bytes from `base` on.
#[derive(Debug)]
pub(super) struct Sharing {
    share: Share,
    base: usize,
    /// Taken to be copied here, and not copied yet: the first byte, and the one behind the last.
    hand: (usize, usize),
    /// Copying failed here, and nothing else is done before the sender has put down what it has.
    failure: Option<Errno>,
}

/// A message of ours that its receiver shares.
#[derive(Debug)]
pub(super) struct Assist {
    pub(super) tx: Key,
    base: usize,
    share: Share,
    /// The receiver's buffer from `base` on.
    ranges: Ranges,
}

impl<I: Iface> Engine<I> {
    /// Shares what is missing of a receive, if that is worth it, and tells the sender.
    pub(super) fn begin_sharing(&mut self, key: Key) {
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
        // At once, before anything is copied. A sender that cannot be told does not help.
        let told = iface.am_short(peer, packet.encode().as_slice(), 0, |_, _| ());
        if told.is_err() {
            iface.stop_sharing(peer, &share);
            iface.take(peer, &share);
            return;
        }
        active.sharing = Some(Sharing { share, base, hand: (0, 0), failure: None });
    }

    /// Copies parts of a receive that is shared, a bounded number of bytes.
    pub(super) fn pull_shared(&mut self, key: Key, host: &mut impl Host) -> Step {
        let mut budget = self.core.limits.bulk_chunk;
        loop {
            let Some(active) = self.core.active.get_mut(key) else { return Step::Done };
            let (peer, want) = (active.peer, active.want);
            let Some(sharing) = &mut active.sharing else { return Step::Done };
            if sharing.hand.0 == sharing.hand.1 {
                match self.iface.take(peer, &sharing.share) {
                    Taken::Part { offset, len } => {
                        let from = sharing.base.saturating_add(offset).min(want);
                        sharing.hand = (from, from.saturating_add(len).min(want));
                    }
                    Taken::Wait => return Step::Again,
                    Taken::Over => {
                        let failure = sharing.failure;
                        active.sharing = None;
                        if let Some(errno) = failure {
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

    /// Copies a part of a message of ours that its receiver shares.
    pub(super) fn advance_assists(&mut self) -> usize {
        while let Some(assist) = self.core.assists.front() {
            if let Some(request) = self.core.tx.get(assist.tx) {
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
}

impl Core {
    /// The receiver shares the copying of a message.
    pub(super) fn on_cooperate(
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
        self.assists.push_back(Assist { tx: key, base: offset as usize, share, ranges });
    }
}
