//! Cross-memory attach: one copy between the address spaces of two processes.

use super::errno::{Errno, Result, check_len};

/// Most ranges on either side of one call.
pub(crate) const MAX_RANGES: usize = 8;

/// A range of a process's memory, by number. A value of it accesses nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Range {
    /// Address in the process that owns it.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) len: u64,
}

fn to_iovecs(ranges: &[Range]) -> ([libc::iovec; MAX_RANGES], usize) {
    let mut iov = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MAX_RANGES];
    for (to, from) in iov.iter_mut().zip(ranges) {
        to.iov_base = std::ptr::with_exposed_provenance_mut(from.addr as usize);
        to.iov_len = from.len as usize;
    }
    (iov, ranges.len().min(MAX_RANGES))
}

/// Copies from `remote` ranges of process `pid` into `local` ranges; returns the bytes copied,
/// which may be fewer than asked.
///
/// # Safety
/// Every local range must be writable memory of this process that nothing else uses meanwhile.
pub(crate) unsafe fn read(pid: i32, local: &[Range], remote: &[Range]) -> Result<usize> {
    let (local, nl) = to_iovecs(local);
    let (remote, nr) = to_iovecs(remote);
    // SAFETY: the caller vouches for the local ranges; the kernel checks the remote ones.
    let n = unsafe {
        libc::process_vm_readv(pid, local.as_ptr(), nl as _, remote.as_ptr(), nr as _, 0)
    };
    check_len(n).map_err(normalise)
}

/// Copies from `local` ranges into `remote` ranges of process `pid`; returns the bytes copied.
///
/// # Safety
/// Every local range must be readable memory of this process that nothing changes meanwhile.
pub(crate) unsafe fn write(pid: i32, local: &[Range], remote: &[Range]) -> Result<usize> {
    let (local, nl) = to_iovecs(local);
    let (remote, nr) = to_iovecs(remote);
    // SAFETY: the caller vouches for the local ranges; the kernel checks the remote ones.
    let n = unsafe {
        libc::process_vm_writev(pid, local.as_ptr(), nl as _, remote.as_ptr(), nr as _, 0)
    };
    check_len(n).map_err(normalise)
}

/// Pages that one system call looks at.
const PAGES: usize = 256;

/// Whether this process can read `range`, and write it if `writes`. The kernel is asked for every page, because a load
/// from memory that is not mapped would raise a signal. It writes back the bytes that it read. True if the
/// kernel does not let a process attach to itself.
///
/// # Safety
/// With `writes`, nothing else may change the range meanwhile.
pub(crate) unsafe fn is_accessible(range: Range, writes: bool) -> bool {
    let me = super::process::pid();
    let page = super::process::page_size() as u64;
    let Some(end) = range.addr.checked_add(range.len) else { return false };
    let mut at = range.addr;
    while at < end {
        let mut bytes = [0u8; PAGES];
        let mut pages = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 }; PAGES];
        let mut n = 0;
        for slot in &mut pages {
            if at >= end {
                break;
            }
            slot.iov_base = std::ptr::with_exposed_provenance_mut(at as usize);
            at = (at / page + 1).saturating_mul(page);
            n += 1;
        }
        let kept = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: n };
        // SAFETY: the kernel checks both sides; it writes only to `bytes`, a live local.
        let read = unsafe { libc::process_vm_writev(me, pages.as_ptr(), n as _, &kept, 1, 0) };
        let mut moved = check_len(read);
        if writes && moved == Ok(n) {
            // SAFETY: the kernel checks both sides; the caller guarantees exclusive access, and the contents stay.
            let written =
                unsafe { libc::process_vm_readv(me, pages.as_ptr(), n as _, &kept, 1, 0) };
            moved = check_len(written);
        }
        match moved {
            Ok(all) if all == n => {}
            Ok(_) | Err(Errno(libc::EFAULT)) => return false,
            Err(_) => return true,
        }
    }
    true
}

fn normalise(error: Errno) -> Errno {
    if error.0 == 0 { Errno(libc::EFAULT) } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_this_process() {
        let pid = super::super::process::pid();
        let from = [1u8, 2, 3, 4];
        let mut to = [0u8; 4];
        let local = [Range { addr: to.as_mut_ptr() as u64, len: 4 }];
        let remote = [Range { addr: from.as_ptr() as u64, len: 4 }];
        // SAFETY: both ranges are live locals.
        match unsafe { read(pid, &local, &remote) } {
            Ok(n) => {
                assert_eq!(n, 4);
                assert_eq!(to, from);
            }
            // Some sandboxes forbid the call; then there is nothing to compare.
            Err(e) => assert!(e.0 == libc::EPERM || e.0 == libc::ENOSYS),
        }
    }

    #[test]
    fn what_is_not_there_is_told_without_a_signal() {
        let page = super::super::process::page_size();
        let len = 700 * page;
        let map = |prot| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            at
        };
        let at = map(libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: within the mapping that was just made.
        unsafe { at.cast::<u8>().add(300 * page + 5).write(7) };
        let range =
            |from: usize, len: usize| Range { addr: (at.addr() + from) as u64, len: len as u64 };
        // SAFETY: no other thread uses the mapping.
        let there = |from, len, writes| unsafe { is_accessible(range(from, len), writes) };
        assert!(there(5, len - 5, false) && there(5, len - 5, true) && there(len, 0, true));
        // SAFETY: the byte that was written before, in a mapping that is still there.
        assert_eq!(unsafe { at.cast::<u8>().add(300 * page + 5).read() }, 7, "it stays");
        // SAFETY: a page of the mapping.
        unsafe { libc::mprotect(at.byte_add(600 * page), page, libc::PROT_READ) };
        assert!(there(0, len, false) && !there(0, len, true) && there(601 * page, 99 * page, true));
        // SAFETY: the same page.
        unsafe { libc::mprotect(at.byte_add(600 * page), page, libc::PROT_NONE) };
        assert!(!there(0, len, false) && !there(601 * page - 1, 2, false));
        assert!(there(0, 600 * page, true));
        assert!(!there(100, usize::MAX - at.addr(), false), "to the end of all addresses");
        // SAFETY: exactly the mapping.
        unsafe { libc::munmap(at, len) };
    }

    #[test]
    fn a_bad_remote_address_is_an_error() {
        let mut to = [0u8; 4];
        let local = [Range { addr: to.as_mut_ptr() as u64, len: 4 }];
        let remote = [Range { addr: 8, len: 4 }];
        // SAFETY: the local range is a live local.
        assert!(unsafe { read(super::super::process::pid(), &local, &remote) }.is_err());
    }
}
