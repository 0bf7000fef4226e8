//! The bulk path: windows of application memory that a peer writes into, on connections that are
//! made at first need. A way to do it is one implementation of [`Bulk`].
//!
//! What two sides of a way have to tell each other goes as messages of the machine, in order with all others:
//! whoever lends a window says so after the connection that it is lent by was agreed on.

pub(crate) mod lent;
pub(crate) mod message;
#[cfg(test)]
pub(crate) mod no_way;
pub(crate) mod pause;
pub(crate) mod ways;

use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::transport::{Chunk, Exposed, PeerId, Reach, SendError, Spot, Ticket, Windows};
use std::fmt;
use std::os::fd::BorrowedFd;

/// First byte of a message from one bulk path to another; PROTOCOL.md §7.14.
pub(crate) const BULK_CONTROL: u8 = 0xf2;
/// Bytes of one.
pub(crate) const CONTROL_LEN: usize = 44;

/// A message from one bulk path to another.
pub(crate) type Control = [u8; CONTROL_LEN];

/// What a bulk path reports to. Peers have the machine's numbers.
pub(crate) trait BulkSink {
    /// See [`crate::transport::Handler::on_filled`].
    fn on_filled(&mut self, peer: PeerId, token: u64);
    /// See [`crate::transport::Handler::on_written`].
    fn on_written(&mut self, peer: PeerId, chunk: Chunk) {
        let _ = (peer, chunk);
    }
    /// See [`crate::transport::Handler::on_windows_lost`].
    fn on_lost(&mut self, peer: PeerId);
    /// See [`crate::transport::Handler::on_reached`].
    fn on_reached(&mut self, peer: PeerId, token: u64);
    /// See [`crate::transport::Handler::on_concealed`].
    fn on_concealed(&mut self, region: u64);
}

/// What a bulk path has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct BulkCounts {
    /// Connections that exist, and that were made.
    pub(crate) connections: usize,
    pub(crate) made: u64,
    /// Connections that others had to give way to, that a side refused, and that broke.
    pub(crate) evicted: u64,
    pub(crate) refused: u64,
    pub(crate) broken: u64,
    /// Windows that were lent, and came back filled.
    pub(crate) lent: u64,
    pub(crate) filled: u64,
    pub(crate) filled_bytes: u64,
    /// Windows of others that we wrote.
    pub(crate) written: u64,
    pub(crate) written_bytes: u64,
    /// Pieces of regions of others that we wrote and read, and parts of regions of ours that others may.
    pub(crate) reached: u64,
    pub(crate) reached_bytes: u64,
    pub(crate) exposed: u64,
    /// Memory that could not be registered.
    pub(crate) unregistered: u64,
    /// Offers of connections that had ended, and immediates that named no window.
    pub(crate) stale: u64,
    pub(crate) wrong: u64,
}

impl std::ops::AddAssign for BulkCounts {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.made += other.made;
        self.evicted += other.evicted;
        self.refused += other.refused;
        self.broken += other.broken;
        self.lent += other.lent;
        self.filled += other.filled;
        self.filled_bytes += other.filled_bytes;
        self.written += other.written;
        self.written_bytes += other.written_bytes;
        self.reached += other.reached;
        self.reached_bytes += other.reached_bytes;
        self.exposed += other.exposed;
        self.unregistered += other.unregistered;
        self.stale += other.stale;
        self.wrong += other.wrong;
    }
}

/// A way to write into a peer's memory. One endpoint's, driven under its lock.
pub(crate) trait Bulk: fmt::Debug + Send {
    /// Bytes of a window at most, and of a message that is worth one at least.
    fn sizes(&self) -> (usize, usize);

    /// See [`crate::transport::Lending::windows`]. A peer that has no bulk path, or no way to, is not asked for.
    fn windows(&mut self, peer: PeerId, now: u64) -> Windows;

    /// See [`crate::transport::Lending::lend`].
    fn lend(
        &mut self,
        peer: PeerId,
        part: &SegmentList,
        token: u64,
        now: u64,
    ) -> Result<Ticket, SendError>;

    /// See [`crate::transport::Lending::take_back`].
    fn take_back(&mut self, peer: PeerId, ticket: &Ticket);

    /// See [`crate::transport::Lending::write`].
    fn write(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        ticket: &Ticket,
        chunk: Chunk,
        now: u64,
    ) -> Result<(), SendError>;

    /// See [`crate::transport::Lending::offer`]. `near`: the peer is on this host.
    fn offer(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        near: bool,
        now: u64,
    ) -> Option<Ticket> {
        let _ = (peer, payload, near, now);
        None
    }

    /// See [`crate::transport::Lending::withdraw`].
    fn withdraw(&mut self, peer: PeerId, ticket: &Ticket) {
        let _ = (peer, ticket);
    }

    /// See [`crate::transport::Lending::sees_writes`].
    fn sees_writes(&mut self, ticket: &Ticket) -> bool {
        let _ = ticket;
        false
    }

    /// See [`crate::transport::OneSided::expose`].
    fn expose(
        &mut self,
        peer: PeerId,
        region: (u64, u32),
        memory: &SegmentList,
        rights: (bool, bool),
        now: u64,
    ) -> Exposed {
        let _ = (peer, region, memory, rights, now);
        Exposed::No
    }

    /// See [`crate::transport::OneSided::epoch`].
    fn epoch(&self, peer: PeerId) -> Option<u32> {
        let _ = peer;
        None
    }

    /// See [`crate::transport::OneSided::conceal`].
    fn conceal(&mut self, region: u64) {
        let _ = region;
    }

    /// See [`crate::transport::OneSided::reach`]: what is taken has begun, or begins with `flush`.
    fn reach(
        &mut self,
        peer: PeerId,
        spot: &Spot,
        local: &SegmentList,
        how: Reach,
        now: u64,
    ) -> Result<(), SendError> {
        let _ = (peer, spot, local, how, now);
        Err(STALE)
    }

    /// What was to be reached begins now; a little of it, where much is under way, with the next `poll`.
    fn flush(&mut self) {}

    /// The other side of `peer` says something.
    fn on_control(&mut self, peer: PeerId, message: &[u8], now: u64, sink: &mut dyn BulkSink);

    /// `windows` would answer `Ready`. Nothing begins.
    fn is_ready(&self, peer: PeerId) -> bool;

    /// The connection to `peer` ends, with its windows, and the other side is told; nobody here is.
    fn leave(&mut self, peer: PeerId);

    /// Something to be said to a peer, in this order.
    fn next_control(&mut self) -> Option<(PeerId, Control)>;

    /// It could not be said now.
    fn put_back(&mut self, control: (PeerId, Control));

    /// Something is to be said, or to be looked at.
    fn has_work(&self) -> bool;

    /// Takes what has happened, a bounded number of events. Returns how many.
    fn poll(&mut self, now: u64, sink: &mut dyn BulkSink) -> usize;

    /// The device that it uses has gone elsewhere, or away, or is back: windows that do not outlive that are lost.
    fn renew(&mut self, now: u64, sink: &mut dyn BulkSink);

    /// What peers have written is heard of: their windows may end next.
    fn settle(&mut self, now: u64, sink: &mut dyn BulkSink) {
        let _ = (now, sink);
    }

    /// `peer` is gone: its windows end before this returns.
    fn forget(&mut self, peer: PeerId);

    /// The descriptor that becomes readable when something happens after `sleep`.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Prepares for sleep on the descriptor. False: there is work.
    fn sleep(&mut self) -> bool;

    fn counts(&self) -> BulkCounts;

    /// What became of the registrations, as text for the log.
    fn registrations(&self) -> Option<String>;
}

/// Memory of the application that cannot be registered.
pub(crate) const UNREGISTERED: SendError = SendError::Unreachable(Errno(libc::EFAULT));

/// A region that is not exposed on this connection, or no longer.
pub(crate) const STALE: SendError = SendError::Unreachable(Errno(libc::ESTALE));
