//! Lines for people, on the standard error stream or in a file. A line must not end the application, nor keep it
//! waiting: the stream may be a pipe whose reader is gone (SIGPIPE) or stands still, and the file may have reached its
//! largest size (SIGXFSZ).

use super::errno::{Errno, Result, check, check_len};
use std::fs::{self, File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;

/// Longest line, bytes: a pipe takes it as a whole or not at all (PIPE_BUF of Linux, pipe(7)).
pub(crate) const LINE_MAX: usize = 4096;

/// How long a line waits for room, ms.
const WAIT_MS: libc::c_int = 20;

/// How often a signal may interrupt that wait.
const SIGNALS_MAX: usize = 8;

/// An open file, apart from its descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stream {
    device: libc::dev_t,
    inode: libc::ino_t,
    kind: libc::mode_t,
}

impl Stream {
    /// `None`: `fd` is closed.
    fn of(fd: BorrowedFd<'_>) -> Option<Self> {
        let mut stat = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: fills a local structure, which is read only if it was filled.
        let stat = unsafe {
            check(libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr())).ok()?;
            stat.assume_init()
        };
        let kind = stat.st_mode & libc::S_IFMT;
        Some(Self { device: stat.st_dev, inode: stat.st_ino, kind })
    }
}

/// The standard error stream when the log was opened first.
static STDERR: OnceLock<Option<Stream>> = OnceLock::new();

fn stderr() -> BorrowedFd<'static> {
    // SAFETY: the descriptor is used during calls only; it may be closed, which the system reports.
    unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }
}

/// Descriptor 2 is the standard error stream now, if it is open. An application may close it later, and then it can
/// become any file of the application's or of the provider's.
pub(crate) fn remember_stderr() {
    STDERR.get_or_init(|| Stream::of(stderr()));
}

/// Writes a line of at most [`LINE_MAX`] bytes to the standard error stream. It is lost where the stream takes none, and
/// where descriptor 2 is not the one that was remembered.
pub(crate) fn to_stderr(line: &[u8]) {
    if let Some(known) = STDERR.get().copied().flatten() {
        let _ = put(stderr(), known, line);
    }
}

/// Writes a line to `fd` if that is `known`. The file description is shared with other processes, so it stays in its
/// blocking mode, and what is free after poll(2) another one may fill. A socket has a flag for each call, and a pipe or a
/// terminal is opened anew. Where the system refuses that (a pipe of another user, or no /proc), the line may wait for
/// the reader if another process writes at the same moment. Errors: EBADF: another file; EAGAIN: no room soon.
fn put(fd: BorrowedFd<'_>, known: Stream, line: &[u8]) -> Result<()> {
    if Stream::of(fd) != Some(known) {
        return Err(Errno(libc::EBADF));
    }
    match known.kind {
        libc::S_IFREG => write(fd, line),
        libc::S_IFSOCK => at_once_or_soon(fd, || send(fd, line)),
        _ => match anew(fd) {
            Ok(own) => at_once_or_soon(own.as_fd(), || write(own.as_fd(), line)),
            Err(_) => takes(fd).and_then(|()| write(fd, line)),
        },
    }
}

/// The file of `fd` in non-blocking mode.
fn anew(fd: BorrowedFd<'_>) -> Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(OpenOptions::new().write(true).custom_flags(flags).open(path)?)
}

fn at_once_or_soon(fd: BorrowedFd<'_>, put: impl Fn() -> Result<()>) -> Result<()> {
    match put() {
        Err(errno) if errno.is_would_block() => takes(fd).and_then(|()| put()),
        done => done,
    }
}

/// Appends a line to the file at `path`, which is made for its user alone. A symbolic link is not followed: in a folder
/// of all users another one may have made it. Errors: those of open(2) and write(2).
pub(crate) fn append(path: &Path, line: &[u8]) -> Result<()> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_NOFOLLOW;
    let mut options = OpenOptions::new();
    let file = options.append(true).create(true).mode(0o600).custom_flags(flags).open(path)?;
    write(file.as_fd(), line)
}

/// Errors: EAGAIN where `fd` cannot take a line soon.
fn takes(fd: BorrowedFd<'_>) -> Result<()> {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // A signal ends the call: each may begin the wait once more, up to a bound.
    for _ in 0..SIGNALS_MAX {
        // SAFETY: one valid entry.
        match check(unsafe { libc::poll(&mut entry, 1, WAIT_MS) }) {
            Err(Errno(libc::EINTR)) => (),
            Err(errno) => return Err(errno),
            Ok(_) if entry.revents == libc::POLLOUT => return Ok(()),
            Ok(_) => break,
        }
    }
    Err(Errno(libc::EAGAIN))
}

fn write(fd: BorrowedFd<'_>, line: &[u8]) -> Result<()> {
    let _quiet = Quiet::begin();
    // SAFETY: a live slice.
    check_len(unsafe { libc::write(fd.as_raw_fd(), line.as_ptr().cast(), line.len()) }).map(drop)
}

fn send(socket: BorrowedFd<'_>, line: &[u8]) -> Result<()> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: a live slice.
    let n = unsafe { libc::send(socket.as_raw_fd(), line.as_ptr().cast(), line.len(), flags) };
    check_len(n).map(drop)
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

/// The name of this host up to its first dot; empty where the system has none.
pub(crate) fn host() -> String {
    let mut bytes = [0_u8; 256];
    // SAFETY: a live buffer of that length.
    let rc = unsafe { libc::gethostname(bytes.as_mut_ptr().cast(), bytes.len()) };
    let name = if rc == 0 { bytes.split(|b| matches!(b, 0 | b'.')).next() } else { None };
    String::from_utf8_lossy(name.unwrap_or_default()).into_owned()
}

/// The process that started this one, and what tells its pid namespace from others (0: not known).
pub(crate) fn parent() -> (i32, u64) {
    let namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
    // SAFETY: always succeeds.
    (unsafe { libc::getppid() }, namespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::FromRawFd;
    use std::os::unix::net::UnixStream;

    /// Both ends of a pipe (std::io::pipe came with Rust 1.87).
    fn pipe() -> (fs::File, fs::File) {
        let mut ends = [0; 2];
        // SAFETY: there is room for two descriptors.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: the system has just opened both, and nothing else owns them.
        ends.map(|fd| unsafe { fs::File::from_raw_fd(fd) }).into()
    }

    #[test]
    fn a_reader_that_is_gone_ends_nobody() {
        let (reader, writer) = pipe();
        let known = Stream::of(writer.as_fd()).unwrap();
        assert_eq!(put(writer.as_fd(), known, b"one line\n"), Ok(()));
        drop(reader);
        assert_eq!(takes(writer.as_fd()), Err(Errno(libc::EAGAIN)));
        assert!(put(writer.as_fd(), known, b"lost\n").is_err());
        // SIGPIPE would end this process, unless the test's runtime ignores it: here it does not.
        // SAFETY: changes how this process takes a signal that no other test raises.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        assert_eq!(write(writer.as_fd(), b"another\n"), Err(Errno(libc::EPIPE)));
        // SAFETY: as the runtime had it.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }

    /// Lines of [`LINE_MAX`] bytes from four writers at once, until none is taken.
    fn fill(fd: BorrowedFd<'_>) -> usize {
        let known = Stream::of(fd).unwrap();
        let one = || (0..100_000).take_while(|_| put(fd, known, &[b'x'; LINE_MAX]).is_ok()).count();
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4).map(|_| scope.spawn(one)).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).sum()
        })
    }

    #[test]
    fn a_reader_that_stands_still_keeps_nobody_waiting() {
        // Both are in blocking mode.
        let (mut reader, writer) = pipe();
        let lines = fill(writer.as_fd());
        drop(writer);
        assert_eq!(reader.read_to_end(&mut Vec::new()).unwrap(), lines * LINE_MAX);
        let (mut reader, writer) = UnixStream::pair().unwrap();
        let lines = fill(writer.as_fd());
        drop(writer);
        assert!(lines > 0 && reader.read_to_end(&mut Vec::new()).unwrap() >= lines);
    }

    #[test]
    fn a_descriptor_that_became_another_file_gets_nothing() {
        let (mut reader, writer) = pipe();
        let (_other, known) = pipe();
        let known = Stream::of(known.as_fd()).unwrap();
        assert_eq!(put(writer.as_fd(), known, b"one line\n"), Err(Errno(libc::EBADF)));
        drop(writer);
        assert_eq!(reader.read_to_end(&mut Vec::new()).unwrap(), 0);
        // SAFETY: no process has so many descriptors: the system reports that it is closed.
        let closed = unsafe { BorrowedFd::borrow_raw(libc::c_int::MAX) };
        assert_eq!(Stream::of(closed), None);
    }

    #[test]
    fn a_file_has_the_lines_in_order_and_is_the_users_own() {
        let path = std::env::temp_dir().join(format!("udrv-output-{}", std::process::id()));
        append(&path, b"one\n").unwrap();
        append(&path, b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let link = path.with_extension("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(append(&link, b"three\n"), Err(Errno(libc::ELOOP)));
        fs::remove_file(&link).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(append(&path.join("below"), b"three\n"), Err(Errno(libc::ENOENT)));
    }
}
