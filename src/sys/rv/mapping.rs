//! A mapping that the module, or in tests its double, writes.

use crate::sys::errno::{Errno, Result};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// Pages shared with the process or kernel behind a descriptor; unmapped on drop. Forked children do not inherit
/// them: a child's copy would keep the module's file open.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; its users decide how it is accessed.
unsafe impl Send for Mapping {}
// SAFETY: plain memory; its users decide how it is accessed.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd`, from its beginning; `None`: anonymous memory. A module with GPU support
    /// recognises a ring by `locked`, which counts against RLIMIT_MEMLOCK. Errors: EINVAL (too short, or
    /// already mapped), EAGAIN (RLIMIT_MEMLOCK), ENOMEM.
    pub(super) fn new(fd: Option<BorrowedFd<'_>>, len: usize, locked: bool) -> Result<Self> {
        let mut flags = libc::MAP_SHARED;
        flags |= if locked { libc::MAP_LOCKED | libc::MAP_POPULATE } else { 0 };
        flags |= if fd.is_none() { libc::MAP_ANONYMOUS } else { 0 };
        let fd = fd.map_or(-1, |fd| fd.as_raw_fd());
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, 0) };
        // mmap(2): failure is MAP_FAILED, which is not NULL.
        if base == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        // SAFETY: a mapping made here. If the kernel refuses, children inherit it, as by default.
        unsafe { libc::madvise(base, len, libc::MADV_DONTFORK) };
        NonNull::new(base.cast()).map(|base| Self { base, len }).ok_or(Errno(libc::ENOMEM))
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `new`, to which nothing refers any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
