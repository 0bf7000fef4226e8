//! Peers that may be in the middle of a copy from or to this endpoint's memory.

use super::words::Words;
use crate::sys::gate::Gate;
use crate::sys::process;
use crate::sys::shared_memory::SharedMemory;
use std::sync::Arc;

/// Direct access of peers to our memory.
#[derive(Debug)]
pub(super) struct Reaching {
    /// Holds `nonce` for peers to read, and a word that peers may write: used by probes of cross-memory attach and at
    /// the beginning of each copy.
    pub(super) gate: Gate,
    /// Peers that were in the middle of a copy when their keys were invalidated.
    pub(super) unsettled: Vec<Unsettled>,
}

/// A peer that was in the middle of a copy.
#[derive(Debug)]
pub(super) struct Unsettled {
    pub(super) memory: Arc<SharedMemory>,
    /// The value of REACHING then.
    pub(super) seen: u64,
    pub(super) pid: i32,
}

impl Unsettled {
    /// The peer still copies, or may. `open`: a process that is not within a copy may still begin one.
    pub(super) fn is_busy(&self, open: bool) -> bool {
        let copies = Words::of(&self.memory).is_some_and(|words| !words.has_ended(self.seen));
        copies && process::is_running(self.pid) && (open || process::may_copy(self.pid))
    }
}
