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
    fn a_bad_remote_address_is_an_error() {
        let mut to = [0u8; 4];
        let local = [Range { addr: to.as_mut_ptr() as u64, len: 4 }];
        let remote = [Range { addr: 8, len: 4 }];
        // SAFETY: the local range is a live local.
        assert!(unsafe { read(super::super::process::pid(), &local, &remote) }.is_err());
    }
}
