//! Accepted connections that have not sent their greeting yet.

use super::member::{Member, STRANGER};
use super::wire::{GREETING_LEN, Greeting};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::event::wait_readable;
use crate::sys::late_set::LateSet;
use crate::sys::process::descriptors_are_scarce;
use crate::sys::spare::{self, Spare};
use crate::sys::tcp::{self, Received};
use crate::telemetry::log;
use crate::transport::net::neighbours::{Neighbours, Standing};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Most connections that may wait for their greeting.
const STRANGERS_MAX: usize = 64;
/// Connections accepted in one turn.
const ACCEPTS: usize = 16;
/// How long one may wait, nanoseconds.
const WAIT_NS: u64 = 5_000_000_000;

/// An accepted connection without a greeting.
#[derive(Debug)]
struct Stranger {
    member: Member,
    number: u32,
    since: u64,
    bytes: [u8; GREETING_LEN],
    filled: usize,
}

impl Stranger {
    /// Bytes wait that were not read yet.
    fn has_more(&self) -> bool {
        wait_readable(self.member.fd(), 0).unwrap_or(false)
    }
}

/// All such connections, oldest first.
#[derive(Debug)]
pub(super) struct Strangers {
    list: Vec<Stranger>,
    next: u32,
    spare: Spare,
    /// As if there were no descriptors left.
    #[cfg(test)]
    pub(super) full: bool,
}

#[cold]
fn tell_refused(errno: Errno) {
    log::limited!(
        cause: errno.0,
        "cannot accept a TCP stream: {errno}; long messages come as datagrams, which is slower. Half of the descriptors of a process are left to the application (ulimit -n)"
    );
}

impl Strangers {
    pub(super) fn new() -> Self {
        let (list, next, spare) = (Vec::new(), 0, Spare::new());
        Self {
            list,
            next,
            spare,
            #[cfg(test)]
            full: const { false },
        }
    }

    fn next_at(&self, listener: &Member) -> Result<Option<(OwnedFd, SocketAddr)>, Errno> {
        #[cfg(test)]
        if self.full {
            return Err(Errno(libc::EMFILE));
        }
        tcp::accept(listener.fd())
    }

    /// Without a descriptor, connections are closed at once, by means of the spare ones: the system has completed them
    /// already, and would acknowledge frames that nobody reads.
    #[cold]
    fn refuse_all(&self, listener: &Member) {
        self.spare.refill();
        spare::lend(|| {
            for _ in 0..tcp::BACKLOG {
                if !matches!(tcp::accept(listener.fd()), Ok(Some(_))) {
                    break;
                }
            }
        });
    }

    /// Accepts some connections. Errors: EMFILE, ENFILE: all that waited were refused; ENOMEM; the error of a system-call
    /// filter.
    pub(super) fn accept(
        &mut self,
        listener: &Member,
        epoll: &Arc<LateSet>,
        neighbours: &Neighbours,
        now: u64,
    ) -> Result<(), Errno> {
        for _ in 0..ACCEPTS {
            let fd = match self.next_at(listener) {
                // Another user of this host is refused at once. A socket that was closed meanwhile has no user; its
                // greeting identifies it.
                Ok(Some((fd, _))) if descriptors_are_scarce(&fd) => {
                    // The others are left to the application. Closed at once, before the peer sends on it.
                    tell_refused(Errno(libc::EMFILE));
                    continue;
                }
                Ok(Some((fd, from))) => match tcp::local_addr(fd.as_fd()) {
                    Ok(here)
                        if !matches!(neighbours.caller(&from, &here), Standing::Stranger(_)) =>
                    {
                        fd
                    }
                    _ => continue,
                },
                Ok(None) => return Ok(()),
                Err(errno) => {
                    tell_refused(errno);
                    if matches!(errno.0, libc::EMFILE | libc::ENFILE) {
                        self.refuse_all(listener);
                    }
                    return Err(errno);
                }
            };
            if self.list.len() >= STRANGERS_MAX {
                let silent = self.list.iter().position(|stranger| !stranger.has_more());
                self.list.remove(silent.unwrap_or(0));
            }
            let number = self.next;
            self.next = self.next.wrapping_add(1);
            if let Ok(member) = Member::new(fd, epoll, STRANGER | u64::from(number)) {
                let (bytes, filled) = ([0; GREETING_LEN], 0);
                self.list.push(Stranger { member, number, since: now, bytes, filled });
            }
        }
        Ok(())
    }

    /// Reads the greeting of connection `number`; an invalid one is dropped. Returns the connection once the greeting
    /// is complete.
    pub(super) fn greet(&mut self, number: u32) -> Option<(Member, Greeting)> {
        let at = self.list.iter().position(|stranger| stranger.number == number)?;
        let stranger = self.list.get_mut(at)?;
        let room = stranger.bytes.get_mut(stranger.filled..)?;
        match SegmentList::EMPTY.fill_from(stranger.member.fd(), room) {
            Ok(Received::Bytes(n)) => stranger.filled += n,
            Ok(Received::Nothing) => return None,
            Ok(Received::End) | Err(_) => {
                self.list.remove(at);
                return None;
            }
        }
        if stranger.filled < GREETING_LEN {
            return None;
        }
        let Stranger { member, bytes, .. } = self.list.remove(at);
        Greeting::decode(&bytes).map(|greeting| (member, greeting))
    }

    /// There are none.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Drops connections whose greeting did not come in time.
    pub(super) fn expire(&mut self, now: u64) {
        self.list.retain(|one| now.saturating_sub(one.since) < WAIT_NS || one.has_more());
    }
}
