//! The writing end of a stream.

use super::member::Member;
use super::wire::{Greeting, HEADER_TAG_AT, Header, KEPT};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::tcp;
use crate::transport::net::reliable::Reliable;
use std::net::SocketAddr;

/// Time between two checks of a stream whose data is not acknowledged, milliseconds, and the silent ones in a row after
/// which datagrams take over.
pub(super) const CHECK_MS: u32 = 1000;
const CHECKS: u8 = 5;
/// A stream that was used within this time is checked although its process sleeps, nanoseconds.
const RECENT_NS: u64 = 2 * CHECKS as u64 * CHECK_MS as u64 * 1_000_000;

/// A stream to a peer.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) member: Member,
    /// This endpoint's number of the connection that it belongs to.
    pub(super) id: u32,
    pub(super) number: u32,
    pub(super) to: SocketAddr,
    pub(super) made_at: u64,
    /// When it was last written to, nanoseconds.
    pub(super) used_at: u64,
    /// The greeting was sent: frames may follow.
    pub(super) greeted: bool,
    /// The process that accepted it was checked not to be another user's on this host.
    pub(super) known: bool,
    /// Checks in a row that found the peer's system silent.
    silent: u8,
    sequence: u64,
    /// The bytes of the last frame that the kernel did not take, and how many of them it has taken since.
    rest: Vec<u8>,
    at: usize,
}

impl Outgoing {
    pub(super) fn new(
        member: Member,
        to: SocketAddr,
        id: u32,
        greeting: &Greeting,
        now: u64,
    ) -> Self {
        Self {
            member,
            id,
            number: greeting.number,
            to,
            made_at: now,
            used_at: now,
            greeted: false,
            known: false,
            silent: 0,
            sequence: 0,
            rest: greeting.encode().to_vec(),
            at: 0,
        }
    }

    /// Whether the kernel has taken all bytes to send.
    pub(super) fn flush(&mut self) -> Result<bool, Errno> {
        if self.at < self.rest.len() {
            let rest = self.rest.get(self.at..).unwrap_or(&[]);
            self.at += SegmentList::EMPTY.send_behind(self.member.fd(), rest)?;
        }
        if self.at < self.rest.len() {
            return Ok(false);
        }
        self.rest.clear();
        self.rest.shrink_to(KEPT);
        self.at = 0;
        self.greeted = true;
        Ok(true)
    }

    /// Writes a frame; false: there is no room now, and nothing was taken.
    pub(super) fn send(
        &mut self,
        machine: &Reliable,
        message: &[u8],
        payload: &SegmentList,
        now: u64,
    ) -> Result<bool, Errno> {
        if !self.flush()? {
            return Ok(false);
        }
        let gone = Errno(libc::ECONNRESET);
        let after = machine.sent(self.id).ok_or(gone)?;
        let header = Header::new(message, payload.len(), after, self.sequence);
        let mut header = header.ok_or(Errno(libc::EMSGSIZE))?;
        let signed = header.encode();
        let signed = signed.get(..HEADER_TAG_AT).unwrap_or(&[]);
        header.tag = machine.sign(self.id, true, signed).ok_or(gone)?;
        let head = header.encode();
        let taken = payload.send_behind(self.member.fd(), &head)?;
        if taken == 0 {
            return Ok(false);
        }
        self.sequence += 1;
        self.used_at = now;
        if taken < head.len() + payload.len() {
            self.keep(&head, payload, taken)?;
            self.member.watch_writable(true); // the rest leaves once there is room
        }
        Ok(true)
    }

    /// Copies the rest of the frame, because the caller may reuse its memory after `send`. Errors: ENOMEM.
    fn keep(&mut self, head: &[u8], payload: &SegmentList, taken: usize) -> Result<(), Errno> {
        let left = head.len() + payload.len() - taken;
        self.rest.try_reserve(left).map_err(|_| Errno(libc::ENOMEM))?;
        self.rest.extend_from_slice(head.get(taken..).unwrap_or(&[]));
        let from = taken.saturating_sub(head.len());
        let start = self.rest.len();
        self.rest.resize(start + payload.len() - from, 0);
        payload.copy_out(from, self.rest.get_mut(start..).unwrap_or_default());
        Ok(())
    }

    /// A check: whether the peer's system has been silent for too long.
    pub(super) fn is_over(&mut self) -> bool {
        self.note(tcp::is_silent(self.member.fd(), CHECK_MS))
    }

    fn note(&mut self, silent: bool) -> bool {
        self.silent = if silent { self.silent.saturating_add(1) } else { 0 };
        self.silent >= CHECKS
    }

    /// Whether data of it may be unacknowledged.
    pub(super) fn is_recent(&self, now: u64) -> bool {
        !self.rest.is_empty() || now.saturating_sub(self.used_at) < RECENT_NS
    }

    /// Bytes of memory that it has for what the kernel did not take.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.rest.capacity()
    }

    /// Nothing of it is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.greeted && self.rest.is_empty() && tcp::unacknowledged(self.member.fd()) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::late_set::LateSet;
    use crate::transport::net::stream::member::TO_PEER;
    use std::sync::Arc;

    #[test]
    fn some_silent_checks_in_a_row_end_a_stream() {
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let fd = tcp::listen(&address).unwrap();
        let member = Member::new(fd, &Arc::new(LateSet::new().unwrap()), TO_PEER).unwrap();
        let greeting = Greeting { dest: 1, number: 1, tag: 0 };
        let mut stream = Outgoing::new(member, address, 1, &greeting, 0);
        for checks in [CHECKS, 1, CHECKS] {
            let over: Vec<bool> = (0..checks).map(|_| stream.note(true)).collect();
            assert_eq!(over.iter().position(|over| *over), (checks == CHECKS).then_some(4));
            assert!(!stream.note(false));
        }
        assert!(stream.is_recent(RECENT_NS), "its greeting waits");
        stream.rest.clear();
        assert!(stream.is_recent(RECENT_NS - 1) && !stream.is_recent(RECENT_NS));
    }
}
