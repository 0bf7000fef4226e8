//! Cross-memory attach between the buffers of two processes.
//!
//! # Safety
//!
//! The local ranges come from a [`SegmentList`]: memory that the application lent to an operation that
//! is pending. Probes use locals.
#![allow(unsafe_code)]

use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::cma::{self, Range};
use crate::transport::SendError;

/// Runs `copy` on the ranges of `local`, and tells "later" from "never".
pub(super) fn transfer(
    local: &SegmentList,
    copy: impl FnOnce(&[Range]) -> Result<usize, Errno>,
) -> Result<usize, SendError> {
    let (ranges, n) = local.ranges();
    match copy(ranges.get(..n).unwrap_or(&[])) {
        Ok(0) => Err(SendError::Unreachable(Errno(libc::EFAULT))),
        Ok(n) => Ok(n),
        Err(Errno(libc::EINTR | libc::EAGAIN)) => Err(SendError::Again),
        Err(e) => Err(SendError::Unreachable(e)),
    }
}

pub(super) fn read_ranges(pid: i32, local: &[Range], remote: &[Range]) -> Result<usize, Errno> {
    // SAFETY: `local` was lent to a receive that is pending.
    unsafe { cma::read(pid, local, remote) }
}

pub(super) fn write_ranges(pid: i32, local: &[Range], remote: &[Range]) -> Result<usize, Errno> {
    // SAFETY: `local` was lent to a send that is pending.
    unsafe { cma::write(pid, local, remote) }
}

pub(super) fn probe_read(pid: i32, remote: &[Range]) -> Option<u64> {
    let mut value = 0u64;
    let local = [Range { addr: (&raw mut value).expose_provenance() as u64, len: 8 }];
    // SAFETY: a live local of eight bytes.
    (unsafe { cma::read(pid, &local, remote) } == Ok(8)).then_some(value)
}

pub(super) fn probe_write(pid: i32, value: u64, remote: &[Range]) -> bool {
    let local = [Range { addr: (&raw const value).expose_provenance() as u64, len: 8 }];
    // SAFETY: a live local of eight bytes.
    unsafe { cma::write(pid, &local, remote) == Ok(8) }
}
