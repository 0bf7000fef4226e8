//! Transports move bytes between endpoints. Each transport is one folder, or file, beside this one, and implements
//! [`Transport`]; the [`router`] chooses one for each peer.
//!
//! The design follows UCX's UCT: a transport offers messages and one-sided access and states its limits and thresholds
//! ([`Caps`], [`LaneCaps`]); the protocol layer chooses. Messages are reliable and in order per peer. A transport without room for
//! a message returns [`SendError::Again`]; it never queues the message internally.

pub(crate) mod address;
pub(crate) mod address_index;
pub(crate) mod cuda_ipc;
pub(crate) mod interface;
pub(crate) mod job_key;
mod lane;
pub(crate) mod loopback;
pub(crate) mod net;
pub(crate) mod packed_address;
pub(crate) mod peers;
mod remote_key;
pub(crate) mod router;
mod settling;
pub(crate) mod share;
pub(crate) mod shm;

use crate::sys::cma::Range;
pub(crate) use address::{Address, LocalHost};
pub(crate) use interface::*;
pub(crate) use job_key::{JobKey, Source};
pub(crate) use lane::{LaneCaps, LaneId, Lanes};
pub(crate) use remote_key::RemoteKey;
pub(crate) use share::{Assisted, Share, Taken};

/// A peer endpoint, numbered at first contact by the interface that talks to it.
#[derive(Clone, Copy, Eq, Hash, Debug, PartialOrd, Ord)]
#[cfg_attr(not(test), derive(PartialEq))]
#[cfg_attr(test, expect(clippy::derived_hash_with_manual_eq))]
pub(crate) struct PeerId(pub(crate) u32);

impl PeerId {
    /// The index of this peer in tables by peer.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Tests count how often this thread compares peers, addresses, and keys of lists.
#[cfg(test)]
impl PartialEq for PeerId {
    fn eq(&self, other: &Self) -> bool {
        count_comparison();
        self.0 == other.0
    }
}

#[cfg(test)]
pub(crate) fn count_comparison() {
    COMPARISONS.set(COMPARISONS.get() + 1);
}

#[cfg(test)]
thread_local! {
    static COMPARISONS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// How many comparisons of peers, of addresses of address vectors, and of keys of lists it takes.
#[cfg(test)]
pub(crate) fn comparisons_of(what: impl FnOnce()) -> usize {
    let before = COMPARISONS.get();
    what();
    COMPARISONS.get() - before
}

/// Longest active-message header, bytes. Every transport takes headers up to this length.
pub(crate) const MAX_HEADER: usize = 104;

/// Fragment length of messages of at most [`PIECES`], bytes.
const PIECE: usize = 16 * 1024;
const PIECES: usize = 32 * PIECE;

/// Payload length that every transport accepts in one bcopy message to any peer, bytes.
pub(crate) const BCOPY_LEAST: usize = 9000;

/// Fragment length for a message of `len` bytes, at most `most`, bytes: short enough that both ends copy at the same
/// time, long enough that the fixed cost of a fragment is negligible.
#[inline]
pub(crate) fn piece_of(len: usize, most: usize) -> usize {
    let eighth = 1 << (len / 8).max(1).ilog2();
    (if len > PIECES { eighth } else { PIECE }).min(most)
}

/// Skips `offset` bytes of `ranges` and keeps the next `len`. Returns how many entries of `out` were filled.
pub(crate) fn slice_ranges(ranges: &[Range], offset: u64, len: u64, out: &mut [Range]) -> usize {
    let (mut skip, mut want, mut n) = (offset, len, 0);
    for range in ranges {
        if want == 0 {
            break;
        }
        if skip >= range.len {
            skip -= range.len;
            continue;
        }
        let take = (range.len - skip).min(want);
        let Some(slot) = out.get_mut(n) else { break };
        *slot = Range { addr: range.addr.wrapping_add(skip), len: take };
        n += 1;
        want -= take;
        skip = 0;
    }
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_an_eighth_within_bounds() {
        const K: usize = 1024;
        let of = |len| piece_of(len, 64 * K);
        assert_eq!([0, 1, 16 * K, 512 * K].map(of), [16 * K; 4]);
        assert_eq!([512 * K + 1, K * K, usize::MAX].map(of), [64 * K; 3]);
        assert_eq!([0, 512 * K, usize::MAX].map(|len| piece_of(len, 1300)), [1300; 3]);
    }

    #[test]
    fn slices_of_ranges() {
        let ranges = [Range { addr: 100, len: 10 }, Range { addr: 500, len: 5 }];
        let mut out = [Range::default(); 4];
        assert_eq!(slice_ranges(&ranges, 8, 4, &mut out), 2);
        assert_eq!(out[..2], [Range { addr: 108, len: 2 }, Range { addr: 500, len: 2 }]);
        assert_eq!(slice_ranges(&ranges, 15, 4, &mut out), 0);
    }
}
