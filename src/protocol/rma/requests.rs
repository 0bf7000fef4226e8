//! What peers ask of this endpoint as their target, and the memory that they mean.

use super::ranges::{MAX_RANGES, RemoteRange, RemoteRanges};
use crate::memory::keys::{Denied, Granted, Right};
use crate::protocol::Host;
use crate::protocol::packet::Ranges;
use crate::transport::PeerId;
use std::collections::VecDeque;

/// A request of an initiator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) peer: PeerId,
    pub(super) tx: u64,
    pub(super) data: Option<u64>,
    /// Ranges of this endpoint's memory.
    pub(super) ranges: RemoteRanges,
    /// Ranges of the initiator's memory; none if this endpoint cannot access it.
    pub(super) local: Ranges,
}

/// The local memory of a request, with the ids that its regions had when the request came.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) ranges: RemoteRanges,
    pub(super) regions: [u64; MAX_RANGES],
    pub(super) right: Right,
    /// There may be no memory at some of the addresses.
    pub(super) holes: bool,
}

/// A write whose bytes do not all come with its request.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) request: Request,
    pub(super) place: Place,
    pub(super) done: u64,
    /// This endpoint fetches the bytes. Else the initiator sends them.
    pub(super) pulls: bool,
    /// The write was refused: its bytes are dropped, and this status is the answer once all have come.
    pub(super) refused: Option<u32>,
}

/// A read in progress.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) request: Request,
    pub(super) place: Place,
    pub(super) done: u64,
    /// This endpoint writes the bytes into the initiator's buffer. Else it sends them.
    pub(super) puts: bool,
    /// Writing them failed with EFAULT.
    pub(super) faulted: bool,
}

/// The unfinished operations of one initiator.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    /// Only the first write is in progress. Those behind it are all to be fetched.
    pub(super) writes: VecDeque<Write>,
    pub(super) reads: VecDeque<Read>,
    /// The peer is in `Rma::serving`.
    pub(super) served: bool,
}

impl Inbound {
    pub(super) fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.reads.is_empty()
    }

    /// Whether a write is unfinished.
    pub(super) fn has_writes(&self) -> bool {
        !self.writes.is_empty()
    }

    /// Whether this endpoint has bytes to move.
    pub(super) fn has_work(&self) -> bool {
        !self.reads.is_empty() || self.writes.front().is_some_and(|write| write.pulls)
    }
}

impl Place {
    /// Checks that a peer has the right to all of `ranges`.
    pub(super) fn find(
        ranges: &RemoteRanges,
        right: Right,
        host: &impl Host,
    ) -> Result<Self, Denied> {
        let (mut regions, mut holes) = ([0; MAX_RANGES], false);
        for (id, range) in regions.iter_mut().zip(ranges.as_slice()) {
            let granted = host.region(range, right)?;
            (*id, holes) = (granted.id, holes | granted.holes);
        }
        Ok(Self { ranges: *ranges, regions, right, holes })
    }

    /// Before the processor accesses `len` bytes at `offset`, or those up to the end. Denied: there is no memory.
    pub(super) fn check(&self, offset: u64, len: usize, host: &impl Host) -> Result<(), Denied> {
        let end = self.ranges.total().min(offset.saturating_add(len as u64));
        let good = !self.holes || self.is_accessible(offset, end, host);
        if good { Ok(()) } else { Err(Denied::Access) }
    }

    /// The memory at `offset`: one range of at most `len` bytes.
    pub(super) fn piece(
        &self,
        offset: u64,
        len: usize,
        host: &impl Host,
    ) -> Result<Granted, Denied> {
        let mut skip = offset;
        for (range, id) in self.ranges.as_slice().iter().zip(self.regions) {
            if skip >= range.len {
                skip -= range.len;
                continue;
            }
            let part = RemoteRange {
                key: range.key,
                addr: range.addr.wrapping_add(skip),
                len: (range.len - skip).min(len as u64),
            };
            // Another region may have the key by now.
            return host
                .region(&part, self.right)
                .and_then(|granted| if granted.id == id { Ok(granted) } else { Err(Denied::Key) });
        }
        Err(Denied::Access)
    }

    /// The same. `touches`: the processor is to access the memory.
    pub(super) fn piece_for(
        &self,
        touches: bool,
        (offset, len): (u64, usize),
        host: &impl Host,
    ) -> Result<Granted, Denied> {
        if touches {
            self.check(offset, len, host)?;
        }
        self.piece(offset, len, host)
    }

    /// Whether this process can access its own memory from `offset` to `end`.
    pub(super) fn is_accessible(&self, offset: u64, end: u64, host: &impl Host) -> bool {
        let mut at = offset;
        while at < end {
            let most = usize::try_from(end - at).unwrap_or(usize::MAX);
            let Ok(piece) = self.piece(at, most, host) else { return true }; // refused later
            let memory = &piece.memory;
            if memory.len() == 0 || !memory.is_accessible(0, memory.len(), self.right.writes()) {
                return false;
            }
            at += memory.len() as u64;
        }
        true
    }

    /// Copies `bytes` to `offset`.
    pub(super) fn fill(&self, offset: u64, bytes: &[u8], host: &impl Host) -> Result<(), Denied> {
        self.check(offset, bytes.len(), host)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let at = offset + (bytes.len() - rest.len()) as u64;
            let piece = self.piece(at, rest.len(), host)?;
            let n = piece.memory.copy_in(0, rest);
            if n < piece.memory.len() {
                return Err(Denied::Device);
            }
            rest = rest.get(n.max(1)..).unwrap_or(&[]);
        }
        Ok(())
    }

    /// The ids of the regions, each once, and their number.
    pub(super) fn distinct(&self) -> ([u64; MAX_RANGES], usize) {
        let (mut out, mut n) = ([0; MAX_RANGES], 0);
        for (id, range) in self.regions.iter().zip(self.ranges.as_slice()) {
            let known = out.get(..n).is_some_and(|seen| seen.contains(id));
            if let (false, Some(slot)) = (known || range.len == 0, out.get_mut(n)) {
                *slot = *id;
                n += 1;
            }
        }
        (out, n)
    }
}
