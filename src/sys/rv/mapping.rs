//! A mapping that the module, or in tests its double, writes.

use crate::sys::errno::{Errno, Result};
use crate::sys::process::Home;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// Pages shared with the process or kernel behind a descriptor; unmapped on drop. Forked children do not inherit
/// them: a child's copy would keep the module's file open.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    home: Home,
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
        let base = NonNull::new(base.cast()).ok_or(Errno(libc::ENOMEM))?;
        Ok(Self { base, len, home: Home::here() })
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
        // In a forked child another mapping may be there.
        if self.home.is_here() {
            // SAFETY: the mapping made by `new`, to which nothing refers any more.
            unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_unmaps_nothing() {
        let len = crate::sys::process::page_size();
        let mapping = Mapping::new(None, len, false).unwrap();
        // SAFETY: the child makes only system calls, and exits without returning.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let at = mapping.base().as_ptr().cast::<libc::c_void>();
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: the child has no mapping there.
            let own = unsafe { libc::mmap(at, len, libc::PROT_READ, flags, -1, 0) };
            drop(mapping);
            let stays = own == at && crate::sys::presence::may_read(at.addr());
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!stays)) };
        }
        let mut status = -1;
        // SAFETY: the child made above, and a live local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
