//! What the kernel module nvidia-peermem does: it gives memory of a device to RDMA devices by its address, and takes it from them when
//! it is freed. The double of libibverbs asks for it here.

use crate::abi::{api, put};
use crate::model::with;
use crate::sys;
use std::ffi::c_int;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Some memory was given.
static GIVEN: AtomicBool = AtomicBool::new(false);

api! {
    // A new descriptor of the pages that have the bytes, and where in them they begin. Failures: 1 for memory that is not a device's,
    // or a pool's, or of more than one allocation.
    fn fake_cuda_peer_memory(addr: usize, len: usize, fd: *mut c_int, offset: *mut u64) {
        let (pages, skip) = with(|model| model.peer_memory(addr, len))?;
        GIVEN.store(true, Ordering::Release);
        put(offset, skip as u64)?;
        put(fd, pages.into_raw_fd())
    }
}

/// Memory is freed.
pub(crate) fn end(addr: usize, len: usize) {
    if GIVEN.load(Ordering::Acquire) {
        sys::revoke(addr, len);
    }
}
