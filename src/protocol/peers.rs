//! What the engine knows of its peers.

use super::rma::QUEUE_MAX;
use super::{Cause, Host, UNKNOWN_SOURCE};
use crate::sys::numbers::NumberMap;
use crate::transport::{Address, PeerId};

/// Passes without a fragment from a sender that has sent some, after which it is taken to send none.
const PATIENCE: u64 = 64;

/// The peer is one of [`Peers::dead`].
const DEAD: u32 = 1 << 31;
/// The host is told of each message.
const TRACED: u32 = 1 << 30;

/// The engine's record of a peer.
#[derive(Debug)]
pub(super) struct PeerState {
    address: Option<Address>,
    pub(super) source: u64,
    /// Epoch of the address book at which `source` was looked up.
    epoch: u64,
    /// Pending sends of which this endpoint has sent something.
    pub(super) outstanding: u32,
    /// Why no fast path is taken: [`DEAD`], [`TRACED`], and in the other bits the number of pending sends that wait for
    /// earlier ones.
    bars: u32,
    /// The last pass in which a chunk of a split copy came from this peer; 0: none has come.
    fed: u64,
}

impl PeerState {
    const NEW: Self = Self {
        address: None,
        source: UNKNOWN_SOURCE,
        epoch: u64::MAX,
        outstanding: 0,
        bars: 0,
        fed: 0,
    };

    /// No earlier send to the peer waits, the peer is not known to be dead, and the host is not told of each message.
    #[inline(always)]
    pub(super) fn is_ready(&self) -> bool {
        self.bars == 0
    }

    /// Pending sends that wait for earlier ones.
    pub(super) fn deferred(&self) -> u32 {
        self.bars & !(DEAD | TRACED)
    }

    /// The peer's index in the address book as it is now, which is not kept.
    pub(super) fn source_now(&self, host: &impl Host) -> u64 {
        if self.epoch == host.book_epoch() {
            return self.source;
        }
        self.address.map_or(UNKNOWN_SOURCE, |address| host.source_of(&address))
    }

    #[cold]
    fn look_up(&mut self, host: &impl Host) {
        self.epoch = host.book_epoch();
        self.source = self.address.map_or(UNKNOWN_SOURCE, |a| host.source_of(&a));
    }
}

/// Peers that died and have not been heard of since. A server that runs for months may have many.
#[derive(Debug, Default)]
struct Dead {
    /// The error and cause of operations on them.
    errors: NumberMap<PeerId, (i32, Cause)>,
    /// By index in the address book at `epoch`; beside them there may be peers that have changed since.
    by_source: NumberMap<u64, PeerId>,
    epoch: u64,
    /// Those that are not in `by_source` yet.
    new: Vec<PeerId>,
}

impl Dead {
    /// Begins anew where the address book has changed.
    fn follow(&mut self, epoch: u64) {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.by_source.clear();
            self.new = self.errors.keys().copied().collect();
        }
    }

    fn insert(&mut self, peer: PeerId, error: (i32, Cause)) {
        self.errors.insert(peer, error);
        self.on_change(peer);
    }

    /// `peer` has died, or has another address.
    fn on_change(&mut self, peer: PeerId) {
        self.new.push(peer);
        if self.new.len() > 2 * self.errors.len() {
            // Nobody has asked for long.
            self.new = self.errors.keys().copied().collect();
        }
    }

    fn remove(&mut self, peer: PeerId) {
        self.errors.remove(&peer);
        if self.errors.is_empty() {
            *self = Self::default();
        }
    }
}

/// All peers of an endpoint.
#[derive(Debug)]
pub(super) struct Peers {
    list: Vec<PeerState>,
    dead: Dead,
    /// One more than the number of passes in which a receive waited for bytes.
    turn: u64,
    /// The bars of a new peer.
    bars: u32,
}

impl Peers {
    pub(super) fn new(traced: bool) -> Self {
        let bars = if traced { TRACED } else { 0 };
        Self { list: Vec::new(), dead: Dead::default(), turn: 1, bars }
    }

    /// The record of `peer`, if there is one.
    #[inline(always)]
    pub(super) fn get(&self, peer: PeerId) -> Option<&PeerState> {
        self.list.get(peer.index())
    }

    /// The record of `peer`, created if it is new.
    pub(super) fn of(&mut self, peer: PeerId) -> Option<&mut PeerState> {
        if self.list.len() <= peer.index() {
            let bars = self.bars;
            self.list.resize_with(peer.index() + 1, || PeerState { bars, ..PeerState::NEW });
        }
        self.list.get_mut(peer.index())
    }

    /// The index of `peer` in the address book.
    #[inline]
    pub(super) fn source(&mut self, peer: PeerId, host: &impl Host) -> u64 {
        let Some(state) = self.list.get_mut(peer.index()) else { return UNKNOWN_SOURCE };
        if state.epoch != host.book_epoch() {
            state.look_up(host);
        }
        state.source
    }

    pub(super) fn meet(&mut self, peer: PeerId, address: &Address) {
        if let Some(state) = self.of(peer) {
            state.address = Some(*address);
            state.epoch = u64::MAX;
            if state.bars & DEAD != 0 {
                self.dead.on_change(peer);
            }
        }
    }

    /// The peer, or its next incarnation, is alive.
    #[inline]
    pub(super) fn mark_alive(&mut self, peer: PeerId) {
        if let Some(state) = self.list.get_mut(peer.index()).filter(|s| s.bars & DEAD != 0) {
            state.bars &= !DEAD;
            self.dead.remove(peer);
        }
    }

    /// The peer at this address is alive, as another endpoint has found out.
    pub(super) fn revive(&mut self, address: &Address) {
        let is_there = |peer: PeerId| self.get(peer).is_some_and(|s| s.address == Some(*address));
        let found = self.dead.errors.keys().copied().find(|peer| is_there(*peer));
        found.into_iter().for_each(|peer| self.mark_alive(peer));
    }

    /// The peer died: operations on it fail with this error and cause.
    pub(super) fn mark_dead(&mut self, peer: PeerId, error: (i32, Cause)) {
        self.mark_alive(peer);
        if let Some(state) = self.of(peer) {
            state.bars |= DEAD;
            self.dead.insert(peer, error);
        }
    }

    /// Whether the peer died and has not been heard of since.
    pub(super) fn is_dead(&self, peer: PeerId) -> bool {
        self.get(peer).is_some_and(|state| state.bars & DEAD != 0)
    }

    /// Whether some peer did.
    #[inline(always)]
    pub(super) fn has_dead(&self) -> bool {
        !self.dead.errors.is_empty()
    }

    /// The error and cause of a receive from `source` if that is a dead peer.
    #[inline(never)]
    pub(super) fn hopeless(&mut self, source: u64, host: &impl Host) -> Option<(i32, Cause)> {
        self.dead.follow(host.book_epoch());
        while let Some(peer) = self.dead.new.pop() {
            let source = self.source(peer, host);
            if source != UNKNOWN_SOURCE {
                self.dead.by_source.insert(source, peer);
            }
        }
        let peer = *self.dead.by_source.get(&source)?;
        let error = *self.dead.errors.get(&peer)?;
        (self.source(peer, host) == source).then_some(error)
    }

    pub(super) fn count_outstanding(&mut self, peer: PeerId, by: i32) {
        if let Some(state) = self.of(peer) {
            state.outstanding = state.outstanding.saturating_add_signed(by);
        }
    }

    /// Whether one more operation on the peer may wait for earlier ones.
    pub(super) fn may_defer(&self, peer: PeerId) -> bool {
        self.get(peer).is_none_or(|state| (state.deferred() as usize) < QUEUE_MAX)
    }

    pub(super) fn count_deferred(&mut self, peer: PeerId, by: i32) {
        if let Some(state) = self.of(peer) {
            let waiting = state.deferred().saturating_add_signed(by).min(TRACED - 1);
            state.bars = state.bars & (DEAD | TRACED) | waiting;
        }
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &PeerState> {
        self.list.iter()
    }

    /// A pass begins in which receives wait for bytes.
    pub(super) fn begin_turn(&mut self) {
        self.turn += 1;
    }

    /// A chunk of a split copy has come from `peer`.
    pub(super) fn note_fed(&mut self, peer: PeerId) {
        let turn = self.turn;
        if let Some(state) = self.of(peer) {
            state.fed = turn;
        }
    }

    /// Whether chunks of split copies have come from `peer` lately.
    pub(super) fn is_fed(&self, peer: PeerId) -> bool {
        self.get(peer).is_some_and(|state| state.fed > 0 && self.turn - state.fed < PATIENCE)
    }
}
