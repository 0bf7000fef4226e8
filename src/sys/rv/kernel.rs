//! The boundary to the module: two system calls on its descriptor. Tests replace it by a double.

use super::abi::{PATH, argument_len};
use crate::sys::errno::{Errno, Result, check};
use crate::sys::pages::Pages;
use std::fmt::Debug;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// A descriptor of the module.
pub(super) trait Kernel: Debug + Send + Sync {
    /// ioctl(2) with an argument of exactly the length encoded in `request`. Returns the call's result.
    /// Errors: the module's.
    fn ioctl(&self, request: u32, argument: &mut [u8]) -> Result<i32>;

    /// mmap(2) of the event ring.
    fn map(&self, len: usize, locked: bool) -> Result<Arc<Pages>>;

    /// Replaces the pages of anonymous `memory` by new ones, of which the module hears from the kernel. Errors: ENOMEM.
    fn renew(&self, memory: &Pages) -> Result<()> {
        memory.renew()
    }
}

/// The real module.
#[derive(Debug)]
pub(super) struct Device(OwnedFd);

impl Device {
    /// A descriptor with a number above `other`. Errors: ENOENT, ENODEV, ENXIO (no module), EACCES, EPERM, EMFILE, ENFILE, ENOMEM.
    pub(super) fn open_above(other: RawFd) -> Result<Self> {
        // SAFETY: a C string; returns a new descriptor or -1.
        let fd = check(unsafe { libc::open(PATH.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
        // SAFETY: `fd` is new and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if fd.as_raw_fd() > other {
            return Ok(Self(fd));
        }
        // SAFETY: a live descriptor; returns a new one or -1.
        let higher =
            check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, other + 1) })?;
        // SAFETY: `higher` is new and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(higher) }))
    }
}

impl Kernel for Device {
    fn ioctl(&self, request: u32, argument: &mut [u8]) -> Result<i32> {
        if argument.len() != argument_len(request) {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the module reads and writes as many bytes as the request encodes. The caller is responsible
        // for what the module does with addresses in the argument.
        check(unsafe {
            libc::ioctl(self.0.as_raw_fd(), request as libc::Ioctl, argument.as_mut_ptr())
        })
    }

    fn map(&self, len: usize, locked: bool) -> Result<Arc<Pages>> {
        Pages::of(self.0.as_fd(), len, locked).map(Arc::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_length_reaches_nobody() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let device = Device(null.into());
        let request = super::super::abi::CONN_CONNECTED;
        assert_eq!(device.ioctl(request, &mut [0; 7]), Err(Errno(libc::EINVAL)));
        assert_eq!(device.ioctl(request, &mut [0; 8]), Err(Errno(libc::ENOTTY)), "it was asked");
        assert!(device.map(4096, false).is_err());
    }
}
