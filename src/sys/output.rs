//! Lines for people, on the standard error stream or in a file. A line must not end the application, nor keep it
//! waiting: the stream may be a pipe whose reader is gone (SIGPIPE) or stands still, and the file may have reached its
//! largest size (SIGXFSZ).

use super::errno::{Errno, Result, check, check_len};
use std::fs::OpenOptions;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Longest line that a pipe takes as a whole, bytes (PIPE_BUF of Linux).
pub(crate) const LINE_MAX: usize = 4096;

/// How long a line waits for a full pipe, ms.
const WAIT_MS: libc::c_int = 20;

/// Writes a line of at most [`LINE_MAX`] bytes to the standard error stream. It is lost where the stream takes none.
pub(crate) fn to_stderr(line: &[u8]) {
    // SAFETY: the descriptor is used during this call only; it may be closed, which the system reports.
    let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
    let _ = takes(stderr).and_then(|()| write(stderr, line));
}

/// Appends a line to the file at `path`, which is made for its user alone. Errors: those of open(2) and write(2).
pub(crate) fn append(path: &Path, line: &[u8]) -> Result<()> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let mut options = OpenOptions::new();
    let file = options.append(true).create(true).mode(0o600).custom_flags(flags).open(path)?;
    write(file.as_fd(), line)
}

/// Errors: EAGAIN where `fd` cannot take a line soon.
fn takes(fd: BorrowedFd<'_>) -> Result<()> {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: one valid entry.
    check(unsafe { libc::poll(&mut entry, 1, WAIT_MS) })?;
    if entry.revents == libc::POLLOUT { Ok(()) } else { Err(Errno(libc::EAGAIN)) }
}

fn write(fd: BorrowedFd<'_>, line: &[u8]) -> Result<()> {
    let _quiet = Quiet::begin();
    // SAFETY: a live slice.
    check_len(unsafe { libc::write(fd.as_raw_fd(), line.as_ptr().cast(), line.len()) }).map(drop)
}

/// While this lives, this thread gets neither SIGPIPE nor SIGXFSZ for what it writes.
struct Quiet {
    both: libc::sigset_t,
    before: libc::sigset_t,
    /// One was pending already, for the application.
    pending: bool,
}

impl Quiet {
    fn begin() -> Self {
        let mut both = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        let mut pending = MaybeUninit::uninit();
        // SAFETY: fills local sets, and changes this thread's mask only.
        unsafe {
            libc::sigemptyset(before.as_mut_ptr());
            libc::sigemptyset(pending.as_mut_ptr());
            libc::sigemptyset(both.as_mut_ptr());
            libc::sigaddset(both.as_mut_ptr(), libc::SIGPIPE);
            libc::sigaddset(both.as_mut_ptr(), libc::SIGXFSZ);
            libc::pthread_sigmask(libc::SIG_BLOCK, both.as_ptr(), before.as_mut_ptr());
            libc::sigpending(pending.as_mut_ptr());
            let is_pending = |signal| libc::sigismember(pending.as_ptr(), signal) == 1;
            let pending = is_pending(libc::SIGPIPE) || is_pending(libc::SIGXFSZ);
            Self { both: both.assume_init(), before: before.assume_init(), pending }
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: sets and a time that live; takes a signal of this thread that `write` has raised.
        unsafe {
            if !self.pending {
                libc::sigtimedwait(&self.both, std::ptr::null_mut(), &at_once);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
        }
    }
}

/// The name of this host up to its first dot; empty where the system does not tell.
pub(crate) fn host() -> String {
    let mut bytes = [0_u8; 256];
    // SAFETY: a live buffer of that length.
    let rc = unsafe { libc::gethostname(bytes.as_mut_ptr().cast(), bytes.len()) };
    let name = if rc == 0 { bytes.split(|b| matches!(b, 0 | b'.')).next() } else { None };
    String::from_utf8_lossy(name.unwrap_or_default()).into_owned()
}

/// The process that started this one.
pub(crate) fn parent() -> i32 {
    // SAFETY: always succeeds.
    unsafe { libc::getppid() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_reader_that_is_gone_ends_nobody() {
        let (reader, writer) = std::io::pipe().unwrap();
        assert_eq!(takes(writer.as_fd()), Ok(()));
        assert_eq!(write(writer.as_fd(), b"one line\n"), Ok(()));
        drop(reader);
        assert_eq!(takes(writer.as_fd()), Err(Errno(libc::EAGAIN)));
        // SIGPIPE would end this process, unless the test's runtime ignores it: here it does not.
        // SAFETY: changes how this process takes a signal that no other test raises.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        assert_eq!(write(writer.as_fd(), b"another\n"), Err(Errno(libc::EPIPE)));
        // SAFETY: as the runtime had it.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }

    #[test]
    fn a_reader_that_stands_still_keeps_nobody_waiting() {
        let (mut reader, writer) = UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        while write(writer.as_fd(), &[b'x'; LINE_MAX]).is_ok() {}
        assert_eq!(takes(writer.as_fd()), Err(Errno(libc::EAGAIN)));
        drop(writer);
        assert!(reader.read_to_end(&mut Vec::new()).unwrap() > LINE_MAX);
    }

    #[test]
    fn a_file_has_the_lines_in_order_and_is_the_users_own() {
        use std::os::unix::fs::MetadataExt;
        let path = std::env::temp_dir().join(format!("udrv-output-{}", std::process::id()));
        append(&path, b"one\n").unwrap();
        append(&path, b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(append(&path.join("below"), b"three\n"), Err(Errno(libc::ENOENT)));
    }
}
