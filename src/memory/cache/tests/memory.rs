//! Mapping, changing and unmapping of memory by address.

use super::PAGE;
use std::ptr::with_exposed_provenance_mut as at;

pub(super) const ANON: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// mmap for reading and writing; `addr` 0: the kernel chooses the address. `None`: it refuses.
pub(super) fn map_as(addr: usize, len: usize, flags: i32, fd: i32) -> Option<usize> {
    // SAFETY: tests pass only addresses of their own mappings, or free ones (MAP_FIXED_NOREPLACE).
    let got =
        unsafe { libc::mmap(at(addr), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
    (got != libc::MAP_FAILED).then(|| got.expose_provenance())
}

/// A mapping of its own: pages on both sides prevent merging with another test's mapping.
pub(super) fn map(len: usize) -> usize {
    let addr = map_as(0, len + 2 * PAGE, ANON, -1).expect("memory");
    protect(addr, PAGE, libc::PROT_NONE);
    protect(addr + PAGE + len, PAGE, libc::PROT_NONE);
    addr + PAGE
}

/// Maps new pages over an existing mapping of the test.
pub(super) fn map_over(addr: usize, len: usize) {
    assert_eq!(map_as(addr, len, ANON | libc::MAP_FIXED, -1), Some(addr));
}

/// Maps new pages at an address that may be free. For older kernels the address is a hint.
pub(super) fn map_free(addr: usize, len: usize) -> bool {
    match map_as(addr, len, ANON | libc::MAP_FIXED_NOREPLACE, -1) {
        Some(got) if got == addr => true,
        Some(got) => {
            unmap(got, len);
            false
        }
        None => false,
    }
}

pub(super) fn unmap(addr: usize, len: usize) {
    // SAFETY: a test's own mapping.
    assert_eq!(unsafe { libc::munmap(at(addr), len) }, 0);
}

pub(super) fn advise(addr: usize, len: usize, advice: i32) -> bool {
    // SAFETY: a test's own mapping.
    unsafe { libc::madvise(at(addr), len, advice) == 0 }
}

pub(super) fn protect(addr: usize, len: usize, protection: i32) {
    // SAFETY: a test's own mapping.
    assert_eq!(unsafe { libc::mprotect(at(addr), len, protection) }, 0);
}

pub(super) fn remap(addr: usize, len: usize, new_len: usize, flags: i32) -> Option<usize> {
    let hint = std::ptr::null::<libc::c_void>();
    // SAFETY: a test's own mapping.
    let got = unsafe { libc::mremap(at(addr), len, new_len, libc::MREMAP_MAYMOVE | flags, hint) };
    (got != libc::MAP_FAILED).then(|| got.expose_provenance())
}

/// Writes `stamp` to the first and the last word of each page.
pub(super) fn fill(addr: usize, len: usize, stamp: u64) {
    for page in (addr..addr + len).step_by(PAGE) {
        for word in [page, page + PAGE - 8] {
            // SAFETY: a test's own mapping.
            unsafe { at::<u64>(word).write_volatile(stamp) };
        }
    }
}

pub(super) fn word(addr: usize) -> u64 {
    // SAFETY: a test's own mapping.
    unsafe { at::<u64>(addr).read_volatile() }
}

pub(super) fn set_word(addr: usize, value: u64) {
    // SAFETY: a test's own mapping.
    unsafe { at::<u64>(addr).write_volatile(value) };
}

/// A memfd of `len` bytes.
pub(super) fn file(len: usize) -> std::fs::File {
    use std::os::fd::FromRawFd;
    // SAFETY: a C string literal; the result is checked.
    let fd = unsafe { libc::memfd_create(c"udrv-test".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: `fd` is new.
    let file = unsafe { std::fs::File::from_raw_fd(fd) };
    file.set_len(len as u64).unwrap();
    file
}
