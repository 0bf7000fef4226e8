//! Buffers that may be device memory, of endpoints with FI_HMEM.
//!
//! Device memory enters here and in `ofi::mr`, which mark it in the [`SegmentList`]. The processor's fast paths then do not
//! apply, and no system call gets its address as memory to read or write. Calls of CUDA and of libibverbs do, and so do
//! peers that have a key to it.
//!
//! * *Copies* are started by two files only: `memory::mover`, and `memory::bounce`, which borrows its stream of copies from the
//!   mover.
//! * *Long messages* that a lane takes stay where they are (`protocol::select`). By `transport::cuda_ipc` the receiver reads the
//!   message or the sender writes it. An RDMA device that has registered the memory by dma-buf, or by its address, accesses it
//!   itself (`net::verbs::gpu`).
//! * *Long messages in packets*, if nothing but packets reaches the peer, and *long writes in packets*, are copied part by part while
//!   they are sent (`protocol::staging`, `memory::bounce`). All other sends, and writes to regions, are made from a copy in host memory.
//! * *Receives* are filled by a lane. What arrives in packets is gathered in bounce buffers and copied part by part while more
//!   arrives (`protocol::landing`). *Regions* are filled by a lane, or take fragments.
//!
//! Not run on a GPU; on doubles only.

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
