//! A mirror of shared memory: a second mapping of the same pages, which shows that the pages were taken away. The kernel
//! reports that by no event: a process that has the file open may shorten it, or punch a hole (fallocate(2)), and one
//! that maps it may do so too (MADV_REMOVE).
//!
//! When a file loses pages, the kernel removes them from all mappings of the file. A later access puts a new page into
//! the mapping that is accessed, and into no other one. A mirror cannot be accessed (PROT_NONE; mlockall(2) passes it by
//! too). So an address of a mirror that has a page has had this page since the mirror was made. proc_pid_pagemap(5)
//! tells which addresses have one.

use super::cancel::Shield;
use super::errno::{Errno, Result, check};
use super::process::{Home, page_size};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::Arc;

/// Since Linux 5.14.
const MADV_POPULATE_READ: libc::c_int = 22;
/// The bit of an entry of the page map that says that the address has a page.
const PRESENT: u64 = 1 << 63;

/// The page map of this process.
#[derive(Clone, Debug)]
pub(crate) struct PageMap(Arc<File>);

impl PageMap {
    /// Opens /proc/self/pagemap. Errors: EACCES and others if /proc cannot be read.
    pub(crate) fn open() -> Result<Self> {
        Ok(Self(Arc::new(File::open("/proc/self/pagemap")?)))
    }

    /// Whether each page of `len` bytes at `addr` is there. Reads eight bytes for each page.
    fn has_all(&self, addr: usize, len: usize) -> bool {
        let _shield = Shield::raise();
        let page = page_size();
        let (mut at, end) = (addr / page * 8, (addr + len).div_ceil(page) * 8);
        let mut entries = [0u8; 4096];
        while at < end {
            let some = entries.len().min(end - at);
            let Some(part) = entries.get_mut(..some) else { return false };
            if self.0.read_exact_at(part, at as u64).is_err() {
                return false;
            }
            let is_there = |entry: &[u8]| {
                entry.try_into().is_ok_and(|entry| u64::from_ne_bytes(entry) & PRESENT != 0)
            };
            if !part.chunks_exact(8).all(is_there) {
                return false;
            }
            at += some;
        }
        true
    }
}

/// A mirror of a range of shared memory.
#[derive(Debug)]
pub(crate) struct Mirror {
    /// The beginning of the range.
    of: usize,
    base: NonNull<u8>,
    len: usize,
    pages: PageMap,
    home: Home,
}

// SAFETY: no code accesses the memory; the mapping belongs to the process.
unsafe impl Send for Mirror {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mirror {}

impl Mirror {
    /// Mirrors `len` bytes at `addr`, whole pages of one mapping. A mapping that a userfaultfd watches has a mirror that
    /// is watched, and the calling thread waits until that event has been read. Errors: EINVAL (private memory, huge
    /// pages of hugetlbfs, a kernel before 5.14), EFAULT (no such mapping, or beyond the end of the file), ENOMEM.
    pub(crate) fn of(addr: usize, len: usize, pages: &PageMap) -> Result<Self> {
        let from = with_exposed_provenance_mut::<libc::c_void>(addr);
        // SAFETY: with an old size of 0 the call changes no mapping: it adds one, where no other is.
        let base = unsafe { libc::mremap(from, 0, len, libc::MREMAP_MAYMOVE) };
        if base == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let base = NonNull::new(base.cast()).ok_or(Errno(libc::ENOMEM))?;
        let mirror = Self { of: addr, base, len, pages: pages.clone(), home: Home::here() };
        let at = base.as_ptr().cast();
        // A forked child does not need it, and a core has the memory once.
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP, MADV_POPULATE_READ] {
            // SAFETY: the mapping made above; these change none of its bytes.
            check(unsafe { libc::madvise(at, len, advice) })?;
        }
        // SAFETY: the mapping made above, which no code accesses.
        check(unsafe { libc::mprotect(at, len, libc::PROT_NONE) })?;
        Ok(mirror)
    }

    /// The addresses of the mirror itself.
    pub(crate) fn range(&self) -> (usize, usize) {
        let base = self.base.as_ptr().addr();
        (base, base + self.len)
    }

    /// Whether `len` bytes at `addr` still have the pages that they had when the mirror was made. May say no although
    /// they have. Costs a system call for each 2 MiB.
    pub(crate) fn shows(&self, addr: usize, len: usize) -> bool {
        let within = addr >= self.of && addr + len <= self.of + self.len;
        within && self.pages.has_all(self.base.as_ptr().addr() + (addr - self.of), len)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        if self.home.is_here() {
            // SAFETY: the mapping made for this value.
            unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pages;
    use super::*;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    const LEN: usize = 1 << 20;

    fn touch(at: usize) {
        // SAFETY: the test's own mapping.
        unsafe { with_exposed_provenance_mut::<u8>(at).write_volatile(1) };
    }

    #[test]
    fn a_mirror_shows_that_pages_were_taken_away_though_others_came() {
        // SAFETY: a C string literal.
        let fd = unsafe { libc::memfd_create(c"udrv-test".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: the descriptor is new.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(LEN as u64).unwrap();
        let base = pages::map(LEN, libc::MAP_SHARED, Some((file.as_fd(), 0))).unwrap();
        let (at, page) = (base.as_ptr().expose_provenance(), page_size());
        touch(at);
        let map = PageMap::open().unwrap();
        let mirror = Mirror::of(at, LEN, &map).unwrap();
        assert!(mirror.shows(at, LEN) && mirror.shows(at + page, 1));
        assert!(!mirror.shows(at + page, LEN), "it ends before");
        file.set_len(3 * LEN as u64 / 4).unwrap();
        file.set_len(LEN as u64).unwrap();
        (at..at + LEN).step_by(page).for_each(touch);
        assert!(!mirror.shows(at, LEN) && !mirror.shows(at + LEN - 1, 1));
        assert!(mirror.shows(at, 3 * LEN / 4));
        // SAFETY: the mapping of this test.
        unsafe { libc::madvise(base.as_ptr().cast(), page, libc::MADV_REMOVE) };
        touch(at);
        assert!(!mirror.shows(at, 1) && mirror.shows(at + page, page));
        // SAFETY: the process has no other mapping that this test would lock for long.
        if unsafe { libc::mlock(with_exposed_provenance_mut(mirror.range().0), LEN) } == 0 {
            assert!(!mirror.shows(at, 1), "what is locked is not accessed");
        }
        // SAFETY: the mapping of this test.
        unsafe { libc::munmap(base.as_ptr().cast(), LEN) };
        assert_eq!(Mirror::of(at, LEN, &map).err(), Some(Errno(libc::EFAULT)));
    }

    #[test]
    fn private_memory_and_what_is_beyond_the_end_have_no_mirror() {
        let map = PageMap::open().unwrap();
        let private = pages::Pages::anonymous(page_size()).unwrap();
        let at = private.base().as_ptr().expose_provenance();
        assert_eq!(Mirror::of(at, page_size(), &map).err(), Some(Errno(libc::EINVAL)));
        // SAFETY: a C string literal.
        let fd = unsafe { libc::memfd_create(c"udrv-test".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: the descriptor is new.
        let empty = unsafe { OwnedFd::from_raw_fd(fd) };
        let base = pages::map(LEN, libc::MAP_SHARED, Some((empty.as_fd(), 0))).unwrap();
        let at = base.as_ptr().expose_provenance();
        assert!(Mirror::of(at, LEN, &map).is_err());
        // SAFETY: the mapping of this test.
        unsafe { libc::munmap(base.as_ptr().cast(), LEN) };
    }
}
