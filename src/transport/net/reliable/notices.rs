//! Messages of streams and of the bulk path about themselves, which nobody would send again: they wait where a peer's
//! connection has no room for them, and hold up no other peer's.

use crate::transport::PeerId;
use std::collections::{BTreeMap, VecDeque};

/// Most of them that should wait, in all and for one peer.
const WAITING_MAX: usize = 4096;
const PEER_WAITING_MAX: usize = 64;

/// Those for one peer, in order.
#[derive(Debug)]
struct Queue {
    peer: PeerId,
    headers: VecDeque<Box<[u8]>>,
}

/// The messages that wait, by the number of the connection, which they end with.
#[derive(Debug, Default)]
pub(super) struct Notices {
    waiting: BTreeMap<u32, Queue>,
    count: usize,
}

impl Notices {
    /// Some wait for the connection with number `id`.
    #[inline]
    pub(super) fn wait_for(&self, id: u32) -> bool {
        self.count > 0 && self.waiting.contains_key(&id)
    }

    /// So many wait for the connection with number `id` that there should be no further ones.
    pub(super) fn are_many_for(&self, id: u32) -> bool {
        self.waiting.get(&id).is_some_and(|queue| queue.headers.len() >= PEER_WAITING_MAX)
    }

    /// This one waits for the connection with number `id`, of `peer`.
    pub(super) fn push(&mut self, id: u32, peer: PeerId, header: &[u8]) {
        let queue = self.waiting.entry(id).or_insert(Queue { peer, headers: VecDeque::new() });
        queue.headers.push_back(header.into());
        self.count += 1;
    }

    /// Removes those of connections that `of` accepts by number, and that `takes`, which is false where there is no room.
    pub(super) fn retry(
        &mut self,
        of: impl Fn(u32) -> bool,
        mut takes: impl FnMut(PeerId, &[u8]) -> bool,
    ) {
        let Self { waiting, count } = self;
        waiting.retain(|id, Queue { peer, headers }| {
            if !of(*id) {
                return true;
            }
            let full = headers.iter().position(|header| !takes(*peer, header));
            let sent = full.unwrap_or(headers.len());
            headers.drain(..sent);
            *count -= sent;
            !headers.is_empty()
        });
    }

    /// The connection with number `id` has ended.
    pub(super) fn forget(&mut self, id: u32) {
        self.count -= self.waiting.remove(&id).map_or(0, |queue| queue.headers.len());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// So many wait that there should be no further ones.
    pub(super) fn is_full(&self) -> bool {
        self.count >= WAITING_MAX
    }
}
