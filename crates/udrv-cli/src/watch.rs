//! The end of another process, as a pipe or a connection tells it.
#![allow(unsafe_code)] // system calls

use std::os::fd::{AsRawFd, OwnedFd};

/// A process that waits for a message is not told that nobody is left to send it. The pipe or the connection by which
/// two processes have met stays open while both live, so its end is the end of the other one.
pub(crate) struct Watch {
    from: OwnedFd,
    idle: u32,
    ended: bool,
}

impl Watch {
    /// Empty looks for completions between two looks at the descriptor: about a millisecond.
    const EVERY: u32 = 1 << 14;

    /// `from`: the end of a pipe that is read from, or a connection.
    pub(crate) fn new(from: OwnedFd) -> Self {
        Self { from, idle: 0, ended: false }
    }

    /// Is called after a look for completions that found none. Errors: the other process had already ended at the look
    /// at the descriptor before this one, so that its last messages have had time to arrive.
    pub(crate) fn idle(&mut self) -> Result<(), String> {
        self.idle += 1;
        if self.idle < Self::EVERY {
            return Ok(());
        }
        self.idle = 0;
        if self.ended {
            return Err("the other process has ended".to_owned());
        }
        self.ended = is_at_end(&self.from);
        Ok(())
    }
}

/// Nothing can write into the other end of `from` any more.
fn is_at_end(from: &OwnedFd) -> bool {
    // Of a pipe, POLLHUP is told unasked.
    let mut asked = libc::pollfd { fd: from.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one structure, for one descriptor.
    unsafe { libc::poll(&mut asked, 1, 0) > 0 }
}

/// The kernel ends this process when the one that has started it ends, also while this one is inside a library.
pub(crate) fn end_with_the_leader() {
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    /// Looks at the descriptor until the end is told, at most three times.
    fn looks(watch: &mut Watch) -> Option<u32> {
        (1..=3).find(|_| (0..Watch::EVERY).any(|_| watch.idle().is_err()))
    }

    #[test]
    fn the_end_of_a_pipe_is_told_after_one_more_round() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut watch = Watch::new(child.stdout.take().unwrap().into());
        assert_eq!(looks(&mut watch), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(looks(&mut watch), Some(2));
    }

    #[test]
    fn the_end_of_a_connection_is_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut watch = Watch::new(listener.accept().unwrap().0.into());
        assert_eq!(looks(&mut watch), None);
        drop(one);
        assert_eq!(looks(&mut watch), Some(2));
        let (one, other) = UnixStream::pair().unwrap();
        drop(other);
        assert_eq!(looks(&mut Watch::new(one.into())), Some(2));
    }
}
