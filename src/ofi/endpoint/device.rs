//! Buffers that may be device memory, of endpoints with FI_HMEM.

use super::state::{Endpoint, EndpointFid};
use super::transfer::segment;
use crate::memory::SegmentList;
use crate::ofi::domain::Hmem;
use libfabric_sys::FI_HMEM;
use std::ffi::c_void;

impl EndpointFid {
    /// Whether a buffer without a descriptor may be device memory. With FI_MR_HMEM it is not (fi_mr(3)).
    #[inline(always)]
    pub(super) fn detects(&self) -> bool {
        self.shared.domain.hmem == Hmem::Detects
    }
}

impl Endpoint {
    /// The list, in which device memory is marked if the endpoint may have any. Errors: EINVAL, EIO, ENOSPC.
    pub(super) fn located(&self, list: SegmentList) -> Result<SegmentList, i32> {
        if self.caps & FI_HMEM == 0 { Ok(list) } else { find(Ok(list)) }
    }
}

/// The list, in which device memory is marked. Errors: those of the list; EINVAL, EIO, ENOSPC.
pub(super) fn find(list: Result<SegmentList, i32>) -> Result<SegmentList, i32> {
    list?.located().map_err(|errno| errno.0)
}

/// One buffer, which is looked up. Errors: those of [`find`].
///
/// # Safety
/// As [`segment`].
#[inline(never)]
pub(super) unsafe fn one(buf: *const c_void, len: usize) -> Result<SegmentList, i32> {
    // SAFETY: the caller vouches.
    find(unsafe { segment(buf, len) }.map(SegmentList::from))
}
