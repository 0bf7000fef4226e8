//! Closes descriptors whose close another process can make slow.
//!
//! The last close of a TCP socket waits for its SO_LINGER time, and a process may set that time and pass the socket on.
//! Then closing a descriptor from SCM_RIGHTS waits, and so does closing a unix socket with such a message unread in its
//! queue. close(2) has no option against that. But the end of a thread does not wait: the kernel ignores the linger
//! time for exiting tasks (inet_release). So the descriptors are closed by the end of a thread with a descriptor table
//! of its own. A helper thread starts it, closes the process's copies meanwhile, and lets it end.

use super::per_process::PerProcess;
use super::thread::Thread;
use std::mem::take;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of stack of either thread.
const STACK: usize = 64 * 1024;
/// Most helpers at a time: if a thread cannot have its own table (seccomp), each helper may wait.
const HELPERS: usize = 2;
/// Most descriptors that wait for a helper.
const WAITING: usize = 64;

#[derive(Debug, Default)]
struct Work {
    helpers: usize,
    /// For a helper that has nothing else to close.
    waiting: Vec<OwnedFd>,
}

static WORK: PerProcess<Work> = PerProcess::new();

/// Closes `fds` without waiting. Returns them if that is not possible now: too many threads do so
/// already, or no thread can be started.
pub(crate) fn close_elsewhere(fds: Vec<OwnedFd>) -> Result<(), Vec<OwnedFd>> {
    if fds.is_empty() {
        return Ok(());
    }
    {
        let mut work = WORK.lock();
        if work.helpers >= HELPERS {
            return Err(fds);
        }
        work.helpers += 1;
    }
    // If the thread does not start, its closure is dropped here; the descriptors must not be dropped with it.
    let list = Arc::new(Mutex::new(fds));
    let theirs = list.clone();
    let started = Thread::start(c"udrv-close", STACK, move || help(take(&mut lock(&theirs))));
    if started.is_ok() {
        return Ok(());
    }
    WORK.lock().helpers -= 1;
    Err(take(&mut lock(&list)))
}

/// The same for a caller that cannot keep them: a helper that is at work closes what no other one can close now. If there
/// is none, or many wait already, the rest is closed here, however long that takes.
pub(crate) fn close_soon(fds: Vec<OwnedFd>) {
    if let Err(mut rest) = close_elsewhere(fds) {
        let mut work = WORK.lock();
        let most = if work.helpers > 0 { WAITING } else { 0 };
        let room = most.saturating_sub(work.waiting.len()).min(rest.len());
        work.waiting.extend(rest.drain(..room));
    }
}

fn help(mut fds: Vec<OwnedFd>) {
    loop {
        close_in_helper(fds);
        let mut work = WORK.lock();
        fds = take(&mut work.waiting);
        if fds.is_empty() {
            work.helpers -= 1;
            return;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The progress of the helper and the last thread, which alternate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
enum Step {
    #[default]
    Begun,
    /// The last thread has its own table, or cannot get one.
    Copied,
    /// The helper has closed the process's copies.
    Closed,
}

#[derive(Debug, Default)]
struct Steps(Mutex<Step>, Condvar);

impl Steps {
    fn take(&self, step: Step) {
        *lock(&self.0) = step;
        self.1.notify_all();
    }

    fn wait_for(&self, step: Step) {
        let mut at = lock(&self.0);
        while *at < step {
            at = self.1.wait(at).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn close_in_helper(fds: Vec<OwnedFd>) {
    let steps = Arc::new(Steps::default());
    let theirs = steps.clone();
    let last = Thread::start(c"udrv-close", STACK, move || {
        take_own_descriptors();
        theirs.take(Step::Copied);
        theirs.wait_for(Step::Closed);
    });
    if last.is_ok() {
        steps.wait_for(Step::Copied);
    }
    // If that thread has its own table these are copies; otherwise this waits as long as the close takes.
    drop(fds);
    steps.take(Step::Closed);
    if let Ok(last) = last {
        last.join();
    }
}

/// Gives the calling thread its own descriptor table, if the system allows it.
fn take_own_descriptors() {
    // SAFETY: affects only this thread's descriptors; it opens and closes none from now on.
    unsafe { libc::unshare(libc::CLONE_FILES) };
}

#[cfg(test)]
mod tests {
    use super::super::clock::now_ns;
    use super::*;
    use std::io::Write;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::time::Duration;

    /// A socket whose close waits for `seconds`, and its peer, which makes it wait.
    fn lingering(seconds: i32) -> (OwnedFd, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        client.set_nonblocking(true).unwrap();
        while client.write(&[0; 65536]).is_ok() {}
        let linger = libc::linger { l_onoff: 1, l_linger: seconds };
        // SAFETY: a live socket and a live local of that size.
        let rc = unsafe {
            libc::setsockopt(
                client.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of::<libc::linger>() as libc::socklen_t,
            )
        };
        assert_eq!(rc, 0);
        (client.into(), server)
    }

    /// One end of a unix socket with `fd` unread in its queue.
    fn holding(fd: OwnedFd) -> OwnedFd {
        use std::os::fd::AsFd;
        let mut ends = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: room for two descriptors.
        assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) }, 0);
        // SAFETY: both are new and have no other owner.
        let [ours, theirs] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        super::super::unix::send(theirs.as_fd(), b"x", &[fd.as_fd()]).unwrap();
        ours
    }

    const LINGER_S: u64 = 40;

    /// Waits until all helpers have ended, for less than the linger time.
    fn until_closed(begun: u64) {
        while WORK.lock().helpers > 0 {
            std::thread::sleep(Duration::from_millis(1));
            assert!(now_ns() - begun < LINGER_S * 500_000_000);
        }
    }

    #[test]
    fn a_socket_that_lingers_is_closed_without_waiting() {
        for queued in [false, true] {
            let (fd, _peer) = lingering(LINGER_S as i32);
            let fd = if queued { holding(fd) } else { fd };
            let begun = now_ns();
            let mut rest = Err(vec![fd]);
            while let Err(fds) = rest {
                rest = close_elsewhere(fds);
                std::thread::sleep(Duration::from_millis(1));
            }
            until_closed(begun);
        }
        // As many helpers as there may be, and none of them ends.
        WORK.lock().helpers += HELPERS;
        let (fd, _peer) = lingering(LINGER_S as i32);
        let begun = now_ns();
        close_soon(vec![fd]);
        assert!(now_ns() - begun < LINGER_S * 500_000_000, "it was closed here");
        WORK.lock().helpers -= HELPERS;
        while !WORK.lock().waiting.is_empty() {
            close_soon(vec![lingering(0).0]);
            std::thread::sleep(Duration::from_millis(1));
        }
        until_closed(begun);
    }
}
