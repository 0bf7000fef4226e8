//! The meaning of the module's errors.

use super::abi::{MAJOR, MINOR_MIN, name_of};
use crate::sys::errno::Errno;
use std::fmt;

/// A request that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    request: u32,
    pub(crate) errno: Errno,
}

/// How to react to a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Remedy {
    /// Retry later: queues are full, or the module reconnects.
    Later,
    /// Evict registrations, then retry.
    Evict,
    /// This connection is lost; others are not affected.
    Connection,
    /// The device has gone, or belongs to another process: nothing works any more.
    Module,
    /// The request was invalid.
    Mistake,
}

impl Failure {
    pub(super) fn new(request: u32, errno: Errno) -> Self {
        Self { request, errno }
    }

    pub(crate) fn remedy(&self) -> Remedy {
        match (name_of(self.request), self.errno.0) {
            (_, libc::ENXIO | libc::ENODEV | libc::EBADF | libc::EOWNERDEAD) => Remedy::Module,
            (_, libc::EAGAIN | libc::EINTR) => Remedy::Later,
            ("POST_RDMA_WR_IMMED", libc::ENOMEM) => Remedy::Later,
            ("REG_MEM", libc::ENOMEM | libc::ENOSPC) => Remedy::Evict,
            (_, libc::EIO | libc::ETIMEDOUT) => Remedy::Connection,
            ("CONN_CREATE" | "CONN_CONNECT", _) => Remedy::Connection,
            _ => Remedy::Mistake,
        }
    }

    /// The reason for the module's error, for the log.
    fn why(&self) -> &'static str {
        match (name_of(self.request), self.errno.0) {
            (_, libc::ENXIO) => "the device has gone",
            (_, libc::EBADF | libc::EOWNERDEAD) => "it belongs to another process",
            (_, libc::EINTR) => "a signal came",
            ("CAPABILITY", libc::EINVAL | libc::ENOTTY) => "it does not say what it can",
            ("ATTACH", libc::ENODEV) => "it does not know the device",
            ("ATTACH", libc::ENOENT) => "the port has no such GID",
            ("ATTACH", libc::EBUSY) => "the job is attached with other settings",
            ("ATTACH", libc::ENOMEM) => "no memory, or as many processes of the job as may be",
            ("ATTACH", libc::EINVAL) => "it refuses the settings",
            ("REG_MEM", libc::EBUSY) => "that memory changed while it was in use",
            ("REG_MEM", libc::ENOMEM | libc::ENOSPC) => "no room for more registrations",
            ("REG_MEM", libc::EFAULT) => "there is no such memory",
            ("REG_MEM", libc::EINVAL) => "longer than may be, or not attached",
            ("DEREG_MEM", libc::EINVAL) => "it is not registered",
            ("EVICT", libc::ENOENT) => "there is nothing to evict",
            ("CONN_CREATE", libc::EBUSY) => "there is one already",
            ("CONN_CREATE", libc::EEXIST) => "other processes have it with other settings",
            ("CONN_CREATE", libc::EINVAL) => "that is this port itself, or no address of its",
            ("CONN_CREATE", libc::ENOMEM) => "no memory, or no queue pair",
            ("CONN_CONNECT", libc::EINVAL) => "the path does not fit",
            ("POST_RDMA_WR_IMMED", libc::ENOMEM) => "the queues are full",
            ("POST_RDMA_WR_IMMED", libc::EAGAIN) => "it reconnects",
            ("POST_RDMA_WR_IMMED", libc::EINVAL) => "it is not connected, or not registered",
            (_, libc::EIO) => "it has given the connection up",
            (_, libc::EPERM | libc::EACCES) => "not permitted",
            (_, libc::ENOTTY) => "it does not know the request",
            (_, libc::EFAULT) => "bad address",
            _ => "",
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = self.why();
        write!(f, "{}: ", name_of(self.request))?;
        if why.is_empty() {
            write!(f, "{}", self.errno)
        } else {
            write!(f, "{why} ({})", self.errno)
        }
    }
}

/// Why the module is not used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// There is no /dev/rv.
    Absent,
    /// It could not be opened, or access is denied.
    Closed(Errno),
    TooOld {
        major: u16,
        minor: u16,
    },
    TooNew {
        major: u16,
        minor: u16,
    },
    /// It cannot evict registrations.
    CannotEvict,
    /// It has no registrations for queue pairs of the process.
    NoUserRegistrations,
    /// It keeps a registration although other memory is at its addresses by then.
    Stale {
        minor: u16,
    },
    /// The device knows registered memory by other addresses than the process.
    Elsewhere,
    /// A step of the set-up failed.
    Failed(Failure),
    /// The event ring could not be mapped.
    NoRing(Errno),
    /// There was no page to try it with.
    NoMemory(Errno),
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => write!(f, "there is no /dev/rv"),
            Self::Closed(errno) => write!(f, "/dev/rv cannot be opened: {errno}"),
            Self::TooOld { major, minor } => {
                write!(f, "its ABI {major}.{minor} is older than {MAJOR}.{MINOR_MIN}")
            }
            Self::TooNew { major, minor } => {
                write!(f, "its ABI {major}.{minor} is newer than {MAJOR}")
            }
            Self::CannotEvict => write!(f, "it cannot evict registrations"),
            Self::NoUserRegistrations => {
                write!(f, "it registers for itself only (its parameter enable_user_mr is 0)")
            }
            Self::Stale { minor } => write!(
                f,
                "its ABI 1.{minor} keeps registrations of memory that is replaced while they are in use, which 1.6 does not"
            ),
            Self::Elsewhere => write!(f, "its registrations are at other addresses"),
            Self::Failed(failure) => write!(f, "{failure}"),
            Self::NoRing(Errno(libc::EAGAIN)) => {
                write!(f, "its event ring is more than the process may lock (RLIMIT_MEMLOCK)")
            }
            Self::NoMemory(errno) => write!(f, "it could not be tried: {errno}"),
            Self::NoRing(errno) => write!(f, "its event ring cannot be mapped: {errno}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::abi;
    use super::*;

    #[test]
    fn every_error_has_a_remedy_and_a_name() {
        use Remedy::{Connection, Evict, Later, Mistake, Module};
        let all = [
            (abi::POST_WRITE, libc::EAGAIN, Later, "it reconnects"),
            (abi::POST_WRITE, libc::ENOMEM, Later, "queues are full"),
            (abi::POST_WRITE, libc::EIO, Connection, "given the connection up"),
            (abi::POST_WRITE, libc::EINVAL, Mistake, "not connected"),
            (abi::POST_WRITE, libc::EFAULT, Mistake, "bad address"),
            (abi::POST_WRITE, libc::ENXIO, Module, "the device has gone"),
            (abi::POST_WRITE, libc::ENODEV, Module, ""),
            (abi::POST_WRITE, libc::EINTR, Later, "a signal"),
            (abi::REG_MEM, libc::ENOMEM, Evict, "no room"),
            (abi::REG_MEM, libc::ENOSPC, Evict, "no room"),
            (abi::REG_MEM, libc::EFAULT, Mistake, "no such memory"),
            (abi::REG_MEM_UP_TO_4, libc::EINVAL, Mistake, "longer than may be"),
            (abi::DEREG_MEM, libc::EINVAL, Mistake, "not registered"),
            (abi::EVICT, libc::ENOENT, Mistake, "nothing to evict"),
            (abi::CONN_CREATE, libc::EBUSY, Connection, "one already"),
            (abi::CONN_CREATE, libc::EEXIST, Connection, "other settings"),
            (abi::CONN_CREATE, libc::EINVAL, Connection, "this port itself"),
            (abi::CONN_CREATE, libc::ENOMEM, Connection, "no queue pair"),
            (abi::CONN_CONNECT, libc::EINVAL, Connection, "does not fit"),
            (abi::CONN_CONNECTED, libc::EIO, Connection, "given the connection up"),
            (abi::CONN_CONNECTED, libc::ETIMEDOUT, Connection, ""),
            (abi::ATTACH, libc::ENOENT, Mistake, "no such GID"),
            (abi::ATTACH_UP_TO_5, libc::EBUSY, Mistake, "other settings"),
            (abi::ATTACH, libc::ENOMEM, Mistake, "as many processes"),
            (abi::ATTACH, libc::EPERM, Mistake, "not permitted"),
            (abi::CAPABILITY, libc::ENOTTY, Mistake, "does not say"),
            (abi::CACHE_STATS, libc::ENOTTY, Mistake, "does not know the request"),
            (abi::CONN_COUNT, libc::EBADF, Module, "another process"),
        ];
        for (request, errno, remedy, why) in all {
            let failure = Failure::new(request, Errno(errno));
            assert_eq!(failure.remedy(), remedy, "{failure}");
            let text = failure.to_string();
            assert!(text.contains(why) && text.starts_with(name_of(request)), "{text}");
        }
        let unknown = Failure::new(0x1b01, Errno(libc::ELOOP)).to_string();
        assert!(unknown.starts_with("an unknown request: Too many"), "{unknown}");
    }

    #[test]
    fn refusals_say_what_is_missing() {
        let attach = Failure::new(abi::ATTACH, Errno(libc::ENODEV));
        for (refusal, text) in [
            (Refusal::Absent, "no /dev/rv"),
            (Refusal::Closed(Errno(libc::EACCES)), "ermission"),
            (Refusal::TooOld { major: 1, minor: 2 }, "ABI 1.2 is older than 1.3"),
            (Refusal::TooNew { major: 2, minor: 0 }, "ABI 2.0 is newer than 1"),
            (Refusal::CannotEvict, "evict"),
            (attach.into(), "ATTACH: it does not know the device"),
            (Refusal::NoRing(Errno(libc::EAGAIN)), "RLIMIT_MEMLOCK"),
            (Refusal::NoRing(Errno(libc::ENOMEM)), "cannot be mapped"),
        ] {
            assert!(refusal.to_string().contains(text), "{refusal}");
        }
    }
}
