//! Peers that have refused a link for a lasting reason: another job key, user or version, or a connect request that is
//! malformed to them (PROTOCOL.md §2.12).
//!
//! A sender writes into its segment before it has an answer, and messages there count as sent. The receiver never reads
//! them, so they are lost. That is logged, and must not happen again with each send. So for a second after a refusal no
//! link is made, and operations fail with its error. Afterwards a new link is tried, which takes messages only once the
//! peer has accepted it.

use crate::sys::{Errno, clock};
use crate::transport::PeerId;

/// Time from a refusal to the next attempt, nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;

#[derive(Debug)]
pub(super) struct Refusal {
    peer: PeerId,
    errno: Errno,
    /// No attempt before this time, nanoseconds.
    pub(super) until: u64,
}

/// The peers that refused their last link.
#[derive(Debug, Default)]
pub(super) struct Refusals(pub(super) Vec<Refusal>);

impl Refusals {
    /// `peer` has just refused a link.
    pub(super) fn add(&mut self, peer: PeerId, errno: Errno) {
        self.forget(peer);
        let until = clock::now_ns().saturating_add(PAUSE_NS);
        self.0.push(Refusal { peer, errno, until });
    }

    /// `peer` accepts links, or makes one itself.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.0.retain(|refusal| refusal.peer != peer);
    }

    pub(super) fn of(&self, peer: PeerId) -> Option<&Refusal> {
        self.0.iter().find(|refusal| refusal.peer == peer)
    }

    /// The error of a refusal that is so recent that no link is tried.
    pub(super) fn holds(&self, peer: PeerId) -> Option<Errno> {
        self.of(peer).filter(|refusal| clock::now_ns() < refusal.until).map(|refusal| refusal.errno)
    }
}
