//! Anonymous shared memory that a peer cannot shrink under us.

use super::errno::{Errno, Result, check};
use super::process;
use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A mapping of a sealed memfd, unmapped on drop. It has no name in any file system, so nothing is
/// left behind when its last process dies.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; its users decide which of them may access which byte when.
unsafe impl Send for SharedMemory {}
// SAFETY: through a shared reference the bytes are accessed by pointers and atomic words only.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates `len` zeroed bytes. They are reserved at once, so that touching them later cannot fail, and
    /// mapped at once (MAP_POPULATE), because page faults make the first write five times as expensive.
    /// Returns the mapping and the descriptor to pass on. Errors: ENOMEM, ENOSPC, EFBIG, EMFILE, ENFILE.
    pub(crate) fn create(len: usize) -> Result<(Self, OwnedFd)> {
        let fd = Self::reserve("udrv", len)?;
        Ok((Self::map(fd.as_fd_ref(), len, libc::MAP_POPULATE)?, fd))
    }

    /// Only reserved, and under a label by which [`find`] finds it. Errors: also EINVAL for a label
    /// of more than 200 bytes or with a NUL.
    pub(crate) fn create_labelled(label: &str, len: usize) -> Result<(Self, OwnedFd)> {
        let fd = Self::reserve(label, len)?;
        Ok((Self::map(fd.as_fd_ref(), len, 0)?, fd))
    }

    fn reserve(label: &str, len: usize) -> Result<OwnedFd> {
        // The kernel would end a process that exceeds the limit (setrlimit(2), SIGXFSZ).
        if process::file_size_limit().is_some_and(|limit| limit < len) {
            return Err(Errno(libc::EFBIG));
        }
        let label = CString::new(label).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: a C string; returns a new descriptor or -1.
        let fd = check(unsafe {
            libc::memfd_create(label.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        })?;
        // SAFETY: `fd` is new and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = libc::off_t::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: an owned descriptor.
        let rc = unsafe { libc::posix_fallocate(fd.as_raw_fd(), 0, size) };
        if rc != 0 {
            return Err(Errno(rc));
        }
        // SAFETY: an owned descriptor.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })?;
        Ok(fd)
    }

    /// Maps memory that a peer passed, all pages at once, after checking that it is a memfd of at least
    /// `len` bytes that can no longer shrink (access beyond the end of a file raises SIGBUS). Errors:
    /// EINVAL, ENOMEM.
    pub(crate) fn attach(fd: &OwnedFd, len: usize) -> Result<Self> {
        #[cfg(test)]
        if let Some(errno) = REFUSED.get() {
            return Err(errno);
        }
        // SAFETY: an owned descriptor.
        let seals = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })?;
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(Errno(libc::EINVAL));
        }
        if file_len(fd)? < len {
            return Err(Errno(libc::EINVAL));
        }
        Self::map(fd.as_fd_ref(), len, libc::MAP_POPULATE)
    }

    /// The word at `offset` of unmapped memory that a peer passed. `None`: it cannot be read.
    pub(crate) fn peek(fd: &OwnedFd, offset: usize) -> Option<u32> {
        let mut bytes = [0u8; 4];
        let at = libc::off_t::try_from(offset).ok()?;
        // SAFETY: an owned descriptor, and room for 4 bytes.
        let n = unsafe { libc::pread(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), 4, at) };
        (n == 4).then_some(u32::from_ne_bytes(bytes))
    }

    fn map(fd: BorrowedFd<'_>, len: usize, populate: libc::c_int) -> Result<Self> {
        // SAFETY: a new shared mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | populate,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        NonNull::new(base.cast()).map(|base| Self { base, len }).ok_or(Errno(libc::ENOMEM))
    }

    /// First byte; page-aligned.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The word at `offset`; all accesses to it must be atomic. `None`: it is outside the mapping or not
    /// aligned.
    pub(crate) fn atomic(&self, offset: usize) -> Option<&AtomicU64> {
        if offset % 8 != 0 || offset.checked_add(8)? > self.len {
            return None;
        }
        // SAFETY: inside the mapping and aligned, for as long as `self` lives.
        Some(unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) })
    }

    /// Bytes mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
thread_local! {
    /// For tests: as if the system refused every `attach` of this thread.
    pub(crate) static REFUSED: std::cell::Cell<Option<Errno>> = const { std::cell::Cell::new(None) };
}

/// Length of a memfd, bytes. If a filter forbids one of two calls, the other one is used.
fn file_len(fd: &OwnedFd) -> Result<usize> {
    // SAFETY: zeroed is a valid `stat` to be overwritten.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: an owned descriptor and a live local.
    let size = match check(unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) }) {
        Ok(_) => stat.st_size,
        // SAFETY: an owned descriptor; the file position is not used for reading or writing.
        Err(errno) => match unsafe { libc::lseek(fd.as_raw_fd(), 0, libc::SEEK_END) } {
            -1 => return Err(errno),
            end => end,
        },
    };
    Ok(usize::try_from(size).unwrap_or(0))
}

/// The memory with this label that a process of the same user has open. Errors: ENOENT, and those of
/// reading /proc.
pub(crate) fn find(pid: i32, label: &str) -> Result<OwnedFd> {
    let wanted = format!("/memfd:{label} (deleted)");
    let errno = |e: std::io::Error| Errno(e.raw_os_error().unwrap_or(libc::EIO));
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(errno)? {
        let path = entry.map_err(errno)?.path();
        // A descriptor that is closed meanwhile is not the one wanted.
        if std::fs::read_link(&path).is_ok_and(|target| target.as_os_str() == wanted.as_str()) {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(path);
            return file.map(OwnedFd::from).map_err(errno);
        }
    }
    Err(Errno(libc::ENOENT))
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `map` mapped; nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// `OwnedFd::as_fd` without importing the trait at each use.
trait AsFdRef {
    fn as_fd_ref(&self) -> BorrowedFd<'_>;
}

impl AsFdRef for OwnedFd {
    fn as_fd_ref(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attached_memory_is_the_same_memory() {
        let (a, fd) = SharedMemory::create(8192).unwrap();
        let b = SharedMemory::attach(&fd, 8192).unwrap();
        // SAFETY: both mappings are 8192 bytes long.
        unsafe {
            a.base().as_ptr().add(5000).write(7);
            assert_eq!(b.base().as_ptr().add(5000).read(), 7);
        }
    }

    #[test]
    fn a_shorter_file_is_refused() {
        let (_a, fd) = SharedMemory::create(4096).unwrap();
        assert_eq!(SharedMemory::attach(&fd, 8192).unwrap_err(), Errno(libc::EINVAL));
    }

    #[test]
    fn an_unsealed_file_is_refused() {
        // SAFETY: a C string literal; the result is checked.
        let fd = check(unsafe { libc::memfd_create(c"x".as_ptr(), libc::MFD_CLOEXEC) }).unwrap();
        // SAFETY: `fd` is new.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        assert!(SharedMemory::attach(&fd, 0).is_err());
    }
}
