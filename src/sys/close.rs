//! Closing what a stranger can make slow.
//!
//! The last close of a TCP socket waits for as long as SO_LINGER says, and whoever sets that may pass the socket on:
//! closing what came with SCM_RIGHTS waits, and so does closing a unix socket in whose queue it lies unread. close(2)
//! cannot be told not to wait. But a thread that ends does not wait: the kernel leaves the linger time out for tasks that
//! are exiting (inet_release). So the descriptors are closed by the end of a thread that has a table of descriptors of
//! its own: a helper thread starts it, closes the copies of the process meanwhile, and lets it end.

use super::thread::Thread;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of stack of either thread.
const STACK: usize = 64 * 1024;
/// At most so many helpers at once: where a thread may not have a table of its own (seccomp), each may wait.
const HELPERS: usize = 2;

static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Closes `fds` without waiting for it. Gives them back if that is not possible now: too many threads do
/// so already, or there are no threads.
pub(crate) fn close_elsewhere(fds: Vec<OwnedFd>) -> Result<(), Vec<OwnedFd>> {
    if fds.is_empty() {
        return Ok(());
    }
    if RUNNING.fetch_add(1, Ordering::AcqRel) >= HELPERS {
        RUNNING.fetch_sub(1, Ordering::AcqRel);
        return Err(fds);
    }
    // A closure that could not be started is dropped here, and must not have the descriptors.
    let list = Arc::new(Mutex::new(fds));
    let theirs = list.clone();
    let started = Thread::start(c"udrv-close", STACK, move || {
        close_in_helper(std::mem::take(&mut *lock(&theirs)));
        RUNNING.fetch_sub(1, Ordering::AcqRel);
    });
    if started.is_ok() {
        return Ok(());
    }
    RUNNING.fetch_sub(1, Ordering::AcqRel);
    Err(std::mem::take(&mut *lock(&list)))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How far the helper and the last thread are, each in its turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
enum Step {
    #[default]
    Begun,
    /// The last thread has its own table, or cannot have one.
    Copied,
    /// The helper has closed the descriptors of the process.
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
    // These are copies if that thread has a table of its own; else this waits as long as it has to.
    drop(fds);
    steps.take(Step::Closed);
    if let Ok(last) = last {
        last.join();
    }
}

/// Gives the calling thread a table of descriptors of its own, if the system lets it.
fn take_own_descriptors() {
    // SAFETY: affects descriptors of this thread only, which opens and closes none from now on.
    unsafe { libc::unshare(libc::CLONE_FILES) };
}

#[cfg(test)]
mod tests {
    use super::super::clock::now_ns;
    use super::*;
    use std::io::Write;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::time::Duration;

    /// A socket whose close waits for `seconds`, and what keeps it waiting.
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

    /// An end of a unix socket in whose queue `fd` lies unread.
    fn holding(fd: OwnedFd) -> OwnedFd {
        use std::os::fd::AsFd;
        let mut ends = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: room for two descriptors.
        assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) }, 0);
        // SAFETY: both are new and owned by nobody else.
        let [ours, theirs] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        super::super::unix::send(theirs.as_fd(), b"x", &[fd.as_fd()]).unwrap();
        ours
    }

    #[test]
    fn what_lingers_is_closed_without_waiting() {
        const LINGER_S: u64 = 40;
        for queued in [false, true] {
            let (fd, _peer) = lingering(LINGER_S as i32);
            let fd = if queued { holding(fd) } else { fd };
            let begun = now_ns();
            let mut rest = Err(vec![fd]);
            while let Err(fds) = rest {
                rest = close_elsewhere(fds);
                std::thread::sleep(Duration::from_millis(1));
            }
            while RUNNING.load(Ordering::Acquire) > 0 {
                std::thread::sleep(Duration::from_millis(1));
                assert!(now_ns() - begun < LINGER_S * 500_000_000, "queued: {queued}");
            }
        }
    }
}
