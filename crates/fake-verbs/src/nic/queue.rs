//! Completion queues, their channels, and queues of receives.

use super::regions::{Segment, sum_of};
use crate::sys::Count;
use crate::verify::violation;
use rdma_core_sys::{ibv_wc_opcode, ibv_wc_status};
use std::collections::VecDeque;

/// A completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    /// The request's `wr_id`.
    pub(crate) id: u64,
    pub(crate) status: ibv_wc_status,
    pub(crate) opcode: ibv_wc_opcode,
    pub(crate) len: u32,
    pub(crate) immediate: Option<u32>,
    pub(crate) pair: u32,
    pub(crate) source: u32,
    pub(crate) source_lid: u16,
    /// A global routing header precedes the data.
    pub(crate) routed: bool,
    pub(crate) of: Of,
}

/// The queue whose place a completion frees when it is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Of {
    /// All requests up to this number of the queue pair.
    Send(u64),
    Receive,
    Shared(u32),
}

/// A channel of completion events.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(super) count: Count,
    /// The queues that have become ready: objects of the program.
    pub(super) ready: VecDeque<u64>,
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Queue {
    /// The program's object.
    pub(super) object: u64,
    pub(super) channel: Option<u32>,
    pub(super) capacity: usize,
    pub(super) entries: VecDeque<Entry>,
    pub(super) armed: bool,
    /// Its events that the program has taken and not acknowledged.
    pub(super) events_taken: u32,
    /// The entry between the start and the end of a poll of its own operations.
    pub(super) current: Option<Entry>,
}

impl Queue {
    /// Adds it. True: the queue was armed.
    pub(super) fn add(&mut self, entry: Entry) -> bool {
        if self.entries.len() >= self.capacity {
            let capacity = self.capacity;
            violation(&format!("a completion queue of {capacity} entries is overrun: {entry:?}"));
        }
        self.entries.push_back(entry);
        std::mem::take(&mut self.armed)
    }
}

/// A posted receive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) segments: Vec<Segment>,
}

/// Receives of a queue pair, or shared ones.
#[derive(Debug, Default)]
pub(crate) struct Receives {
    depth: usize,
    /// With the checksum of their memory.
    posted: VecDeque<(Receive, u64)>,
    /// Posted ones, and those whose completion has not been taken.
    taken_up: usize,
}

impl Receives {
    pub(super) fn new(depth: u32) -> Self {
        Self { depth: depth as usize, ..Self::default() }
    }

    /// False: it is full.
    pub(super) fn post(&mut self, receive: Receive) -> bool {
        let room = self.taken_up < self.depth;
        if room {
            self.taken_up += 1;
            let sum = sum_of(&receive.segments, "a receive that is posted");
            self.posted.push_back((receive, sum));
        }
        room
    }

    /// The oldest one, whose memory nobody has touched.
    pub(super) fn take(&mut self) -> Option<Receive> {
        let (receive, sum) = self.posted.pop_front()?;
        if sum_of(&receive.segments, "a receive at its transfer") != sum {
            violation(&format!("a posted receive buffer was written: {receive:?}"));
        }
        Some(receive)
    }

    /// A completion of one was taken, or dropped.
    pub(super) fn free(&mut self) {
        self.taken_up = self.taken_up.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_when_its_completion_was_taken() {
        let mut receives = Receives::new(2);
        let receive = |id| Receive { id, segments: Vec::new() };
        assert!(receives.post(receive(1)) && receives.post(receive(2)));
        assert!(!receives.post(receive(3)));
        assert_eq!(receives.take(), Some(receive(1)));
        assert!(!receives.post(receive(3)), "its completion is still there");
        receives.free();
        assert!(receives.post(receive(3)));
        assert_eq!(receives.take(), Some(receive(2)));
    }
}
