//! Buffers that may be device memory, of endpoints with FI_HMEM.

use super::state::{Endpoint, EndpointFid};
use super::transfer::segment;
use crate::memory::SegmentList;
use crate::ofi::domain::Hmem;
use libfabric_sys::FI_HMEM;
use std::ffi::c_void;

impl EndpointFid {
    /// Whether a buffer without a descriptor may be device memory.
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

/// One buffer with its descriptor. `None`: the processor may touch it. With FI_MR_HMEM all device memory has a
/// descriptor (fi_mr(3)), so that host memory costs one comparison.
///
/// # Safety
/// As [`segment`].
#[inline(always)]
pub(super) unsafe fn one(
    desc: *mut c_void,
    detects: bool,
    buf: *const c_void,
    len: usize,
) -> Option<Result<SegmentList, i32>> {
    if desc.is_null() && !detects {
        return None;
    }
    // SAFETY: the caller vouches.
    unsafe { asked(buf, len) }
}

/// # Safety
/// As [`segment`].
#[inline(never)]
unsafe fn asked(buf: *const c_void, len: usize) -> Option<Result<SegmentList, i32>> {
    // SAFETY: the caller vouches.
    let list = find(unsafe { segment(buf, len) }.map(SegmentList::from));
    list.as_ref().map_or(true, SegmentList::is_on_device).then_some(list)
}
