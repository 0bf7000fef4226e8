//! Memory that this library maps for itself, beside the allocator's.

use super::errno::{Errno, Result};
use super::process::Home;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// Maps `len` bytes, to be read and written, at an address of the kernel's choice: of a file at an offset, or of what the
/// `flags` of mmap(2) say. Errors: those of mmap(2).
pub(super) fn map(
    len: usize,
    flags: libc::c_int,
    file: Option<(BorrowedFd<'_>, libc::off_t)>,
) -> Result<NonNull<u8>> {
    let (fd, offset) = file.map_or((-1, 0), |(fd, offset)| (fd.as_raw_fd(), offset));
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, at an address that nothing else has.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, offset) };
    // mmap(2): failure is MAP_FAILED, which is not NULL.
    if base == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    NonNull::new(base.cast()).ok_or(Errno(libc::ENOMEM))
}

/// Pages for a device, or shared with the module behind a descriptor; unmapped on drop. Forked children do not inherit
/// them: a device would not see what a parent writes to a copy, and a child's copy keeps the module's file open.
#[derive(Debug)]
pub(super) struct Pages {
    base: NonNull<u8>,
    len: usize,
    home: Home,
}

// SAFETY: plain memory; its owner decides which thread accesses it.
unsafe impl Send for Pages {}
// SAFETY: plain memory; its owner decides which thread accesses it.
unsafe impl Sync for Pages {}

impl Pages {
    /// `len` bytes, all zeroes. Error: ENOMEM.
    pub(super) fn anonymous(len: usize) -> Result<Self> {
        Self::new(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)
    }

    /// `len` bytes of `fd`, from its beginning. A module with GPU support recognises a ring by `locked`, which counts
    /// against RLIMIT_MEMLOCK. Errors: EINVAL (too short, or already mapped), EAGAIN (RLIMIT_MEMLOCK), ENOMEM.
    pub(super) fn of(fd: BorrowedFd<'_>, len: usize, locked: bool) -> Result<Self> {
        let locked = if locked { libc::MAP_LOCKED | libc::MAP_POPULATE } else { 0 };
        Self::new(len, libc::MAP_SHARED | locked, Some((fd, 0)))
    }

    fn new(
        len: usize,
        flags: libc::c_int,
        file: Option<(BorrowedFd<'_>, libc::off_t)>,
    ) -> Result<Self> {
        let base = map(len, flags, file)?;
        // SAFETY: the mapping made above. If the kernel refuses, children inherit it, as by default.
        unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTFORK) };
        Ok(Self { base, len, home: Home::here() })
    }

    /// Replaces anonymous pages by new ones, which are zero. Errors: ENOMEM.
    pub(super) fn renew(&self) -> Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let (at, access) = (self.base.as_ptr().cast(), libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the mapping made by `new`, to which no reference exists.
        let base = unsafe { libc::mmap(at, self.len, access, flags, -1, 0) };
        if base == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
    }

    /// The first byte.
    #[inline]
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pages {
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
        let pages = Pages::anonymous(len).unwrap();
        // SAFETY: the child makes only system calls, and exits without returning.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let at = pages.base().as_ptr().cast::<libc::c_void>();
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: the child has no mapping there.
            let own = unsafe { libc::mmap(at, len, libc::PROT_READ, flags, -1, 0) };
            drop(pages);
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
