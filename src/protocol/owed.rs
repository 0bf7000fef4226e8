//! Which peers owe this endpoint something: only their silence is worth a check.

use crate::sys::numbers::NumberSet;
use crate::transport::PeerId;
use std::cell::RefCell;

/// A snapshot is used for this time for each entry of the lists that it was made of, nanoseconds: some twenty times as
/// long as it takes to make one.
const EACH_NS: u64 = 1000;

/// The peers that receives, messages under way and collective operations wait for. The interface asks about one peer at a
/// time, and each question for itself would be a walk through all of these lists.
#[derive(Debug, Default)]
pub(super) struct Owed(RefCell<Snapshot>);

#[derive(Debug, Default)]
pub(super) struct Snapshot {
    /// Another is made from this time on, nanoseconds.
    until_ns: u64,
    /// By index in the address book.
    pub(super) sources: NumberSet<u64>,
    pub(super) peers: NumberSet<PeerId>,
}

impl Owed {
    /// Whether `peer`, or `source` in the address book, is waited for. `now_ns`: 0 without a clock. `fill`: into an empty
    /// snapshot; returns how many entries the lists have. The answer may be older by [`EACH_NS`] for each of them.
    pub(super) fn has(
        &self,
        (peer, source): (PeerId, u64),
        now_ns: u64,
        fill: impl FnOnce(&mut Snapshot) -> usize,
    ) -> bool {
        let snapshot = &mut *self.0.borrow_mut();
        if now_ns == 0 || now_ns >= snapshot.until_ns {
            snapshot.sources.clear();
            snapshot.peers.clear();
            snapshot.until_ns = now_ns + EACH_NS * fill(snapshot) as u64;
        }
        snapshot.peers.contains(&peer) || snapshot.sources.contains(&source)
    }
}
