//! The additional fields of atomic operations, and their results.

use crate::memory::SegmentList;
use crate::memory::atomic::Operation;
use crate::protocol::index_list::{IndexList, Key};
use crate::protocol::message::Payload;
use crate::transport::PeerId;

/// Fetching atomic operations to one target that may be without an answer.
pub(super) const FETCH_WINDOW: u32 = 64;
/// Results up to this length need no allocation, bytes: two elements of the longest real type.
pub(super) const FEW: usize = 32;

/// Buffers of longer results that are kept for reuse.
pub(super) const SPARE_MAX: usize = 16;

/// The fields that a pending atomic operation has in addition to those of every one-sided operation.
#[derive(Debug)]
pub(super) struct Operands {
    pub(super) operation: Operation,
    pub(super) compare: Payload,
    pub(super) result: SegmentList,
}

impl Operands {
    pub(super) fn is_owned(&self) -> bool {
        self.compare.is_owned()
    }
}

/// The old values that an operation has fetched, until they are sent to the initiator.
#[derive(Debug)]
pub(super) enum Kept {
    Few([u8; FEW], usize),
    Many(Vec<u8>),
}

/// All results that are waiting to be sent.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) list: IndexList<(PeerId, Kept)>,
    pub(super) spare: Vec<Vec<u8>>,
}

impl Results {
    /// Whether one more result may wait for `peer`.
    pub(super) fn has_room(&self, peer: PeerId) -> bool {
        let window = FETCH_WINDOW as usize;
        self.list.len() < window
            || self.list.iter().filter(|(_, (to, _))| *to == peer).count() < window
    }

    /// A zeroed result of `len` bytes. `None`: there is no memory.
    pub(super) fn of_length(&mut self, len: usize) -> Option<Kept> {
        if len <= FEW {
            return Some(Kept::Few([0; FEW], len));
        }
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.try_reserve(len).ok()?;
        buffer.resize(len, 0);
        Some(Kept::Many(buffer))
    }

    pub(super) fn add(&mut self, peer: PeerId, kept: Kept) -> Key {
        self.list.push_back((peer, kept))
    }

    pub(super) fn remove(&mut self, key: Key) {
        if let Some((_, Kept::Many(mut buffer))) = self.list.remove(key) {
            if self.spare.len() < SPARE_MAX {
                buffer.clear();
                self.spare.push(buffer);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

impl Kept {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Few(bytes, len) => bytes.get(..*len).unwrap_or(&[]),
            Self::Many(bytes) => bytes,
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Few(bytes, len) => bytes.get_mut(..*len).unwrap_or(&mut []),
            Self::Many(bytes) => bytes,
        }
    }
}
