//! When to open the next port, for peers that do not answer at the present one: the decisions, without device and clock.

use crate::transport::Address;
use crate::transport::net::agreement::pause::Failures;
use std::collections::HashSet;

/// The attempts to open the next port.
#[derive(Debug, Default)]
pub(super) struct Opening {
    pub(super) tried: Failures,
    /// There was no other port at the last look.
    pub(super) alone: bool,
    /// Peers that have had time to change ports themselves.
    pub(super) yielded: HashSet<Address>,
    /// Peers that wait until the next port opens.
    pub(super) stranded: Vec<Address>,
}

impl Opening {
    /// `peer` does not answer at the present port, and the next one does not open: it is tried there when that does.
    pub(super) fn strand(&mut self, peer: &Address) {
        if !self.alone && !self.stranded.contains(peer) {
            self.stranded.push(*peer);
        }
    }

    /// `peer` is gone.
    pub(super) fn forget(&mut self, peer: &Address) {
        self.yielded.remove(peer);
        self.stranded.retain(|other| other != peer);
    }

    /// When to try again to open the next port, nanoseconds; `None`: no peer waits for it.
    pub(super) fn due_at(&self) -> Option<u64> {
        (!self.stranded.is_empty()).then_some(self.tried.until)
    }
}
