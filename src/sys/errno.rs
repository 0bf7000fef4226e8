//! System error numbers as values.

use std::fmt;

/// An `errno` value (positive).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) i32);

/// The result of every wrapper in `sys`.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// The error of the last failed system call of this thread.
    pub(crate) fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// A resource is exhausted that may become available again.
    pub(crate) fn is_shortage(self) -> bool {
        matches!(
            self.0,
            libc::ENOMEM | libc::ENOSPC | libc::EFBIG | libc::EMFILE | libc::ENFILE | libc::ENOBUFS
        )
    }

    /// True for the two spellings of "not now".
    pub(crate) fn is_would_block(self) -> bool {
        self.0 == libc::EAGAIN || self.0 == libc::EWOULDBLOCK
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Turns the `-1` convention of libc into a `Result`.
pub(crate) fn check(rc: libc::c_int) -> Result<libc::c_int> {
    if rc < 0 { Err(Errno::last()) } else { Ok(rc) }
}

/// Turns the `-1` convention of libc's size-returning calls into a `Result`.
pub(crate) fn check_len(rc: isize) -> Result<usize> {
    usize::try_from(rc).map_err(|_| Errno::last())
}
