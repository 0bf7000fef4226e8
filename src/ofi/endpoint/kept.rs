//! The data of operations that are started later, or more than once.

use crate::memory::{OwnedBuffer, SegmentList};
use crate::protocol::OpError;

/// The data of an operation that waits: with FI_INJECT a copy, because the application may reuse its buffer.
pub(super) enum Kept {
    Lent(SegmentList),
    Copy(OwnedBuffer),
    /// It could not be copied.
    Failed,
}

impl Kept {
    pub(super) fn of(list: SegmentList, inject: bool) -> Self {
        match inject.then(|| OwnedBuffer::try_copy_of(&list)) {
            None => Self::Lent(list),
            Some(Some(copy)) => Self::Copy(copy),
            Some(None) => Self::Failed,
        }
    }

    /// Errors: EIO.
    pub(super) fn memory(&self) -> Result<SegmentList, OpError> {
        match self {
            Self::Lent(list) => Ok(*list),
            Self::Copy(copy) => Ok(copy.segments()),
            Self::Failed => Err(OpError::Error(libc::EIO)),
        }
    }
}
