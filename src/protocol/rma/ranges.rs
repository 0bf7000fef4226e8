//! One-sided operations, as the endpoint requests them.

use crate::memory::SegmentList;
use crate::memory::keys::Right;
use crate::protocol::Report;
use crate::transport::PeerId;

/// Most ranges of a target's memory in one operation: `rma_iov_limit`.
pub(crate) const MAX_RANGES: usize = 4;

/// A range of a target's memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct RemoteRange {
    pub(crate) key: u64,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

/// The ranges of a target's memory that an operation accesses, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RemoteRanges {
    list: [RemoteRange; MAX_RANGES],
    count: usize,
    total: u64,
}

impl RemoteRanges {
    pub(crate) const NONE: Self =
        Self { list: [RemoteRange { key: 0, addr: 0, len: 0 }; MAX_RANGES], count: 0, total: 0 };

    /// Adds a range. `None`: there are too many, or the sum of the lengths overflows.
    pub(crate) fn push(&mut self, range: RemoteRange) -> Option<()> {
        *self.list.get_mut(self.count)? = range;
        self.total = self.total.checked_add(range.len)?;
        self.count += 1;
        Some(())
    }

    pub(crate) fn as_slice(&self) -> &[RemoteRange] {
        self.list.get(..self.count).unwrap_or(&[])
    }

    /// The length of all ranges, bytes.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}

/// A one-sided operation, as requested by the endpoint. `local` is as long as `remote`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmaOp {
    pub(crate) peer: PeerId,
    /// The kind of access to the target's memory.
    pub(crate) right: Right,
    pub(crate) local: SegmentList,
    pub(crate) remote: RemoteRanges,
    /// Remote completion data of a write.
    pub(crate) data: Option<u64>,
    /// The application's context.
    pub(crate) context: u64,
    /// Where the completion is reported.
    pub(crate) report: Report,
    /// The application may reuse the buffer of a write when the call returns.
    pub(crate) inject: bool,
    /// A write completes only when its bytes are in the target's memory (FI_DELIVERY_COMPLETE).
    pub(crate) delivered: bool,
    /// Start only when all earlier operations to this peer have completed.
    pub(crate) fence: bool,
}

/// An access of a peer to this endpoint's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteAccess<'a> {
    pub(crate) right: Right,
    /// The ids of the regions that were accessed.
    pub(crate) regions: &'a [u64],
    pub(crate) len: usize,
    /// Remote completion data.
    pub(crate) data: Option<u64>,
    /// The initiator's index in the address book.
    pub(crate) source: u64,
}
