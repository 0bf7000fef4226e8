//! Connections of which it is not known yet whose they are.

use super::member::Member;
use super::wire::{GREETING_LEN, Greeting};
use super::{PATIENCE_MS, STRANGER};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::event::Epoll;
use crate::sys::tcp::{self, Received};
use crate::telemetry::log;
use crate::transport::net::neighbours::{Neighbours, Standing};
use std::os::fd::AsFd;
use std::sync::Arc;

/// At most so many wait to be known.
const STRANGERS_MAX: usize = 64;
/// Connections accepted in one turn.
const ACCEPTS: usize = 16;
/// How long one may stay unknown, nanoseconds.
const WAIT_NS: u64 = 5_000_000_000;

/// One of them.
#[derive(Debug)]
struct Stranger {
    member: Member,
    number: u32,
    since: u64,
    bytes: [u8; GREETING_LEN],
    filled: usize,
}

/// All of them, oldest first.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    list: Vec<Stranger>,
    next: u32,
}

impl Strangers {
    /// Takes those that have connected, some of them. Errors: EMFILE, ENFILE, ENOMEM; what a filter of system calls says.
    pub(super) fn accept(
        &mut self,
        listener: &Member,
        epoll: &Arc<Epoll>,
        neighbours: &Neighbours,
        now: u64,
    ) -> Result<(), Errno> {
        for _ in 0..ACCEPTS {
            let fd = match tcp::accept(listener.fd(), PATIENCE_MS) {
                // Another user of this host takes nobody's place. One that has closed already has no user; what it
                // says of itself tells.
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
                    log::limited!(cause: errno.0, "cannot accept a TCP stream: {errno}");
                    return Err(errno);
                }
            };
            if self.list.len() >= STRANGERS_MAX {
                self.list.remove(0);
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

    /// Reads what number `number` says of itself; one that says nonsense is dropped. Gives it out
    /// once it has said all.
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

    /// Nobody is here.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Drops those that have not said who they are.
    pub(super) fn expire(&mut self, now: u64) {
        self.list.retain(|stranger| now.saturating_sub(stranger.since) < WAIT_NS);
    }
}
