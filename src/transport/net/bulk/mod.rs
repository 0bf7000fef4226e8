//! The bulk path: PUT rendezvous, in which a peer writes into remote buffers (windows) of the application's memory, and
//! other RDMA on the same connections, which are made at first need. Each kind of such a path implements [`Bulk`].
//!
//! The two sides' control messages go through the reliable state machine, in order with all others: a side sends the
//! RTR (remote key) of a buffer after it has agreed on the connection to use.

pub(crate) mod key;
pub(crate) mod lent;
#[cfg(test)]
pub(crate) mod no_way;
pub(crate) mod ways;

use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::transport::net::agreement::message::Control;
use crate::transport::net::agreement::{Agreement, Counts};
use crate::transport::{
    Access, PeerId, Prepared, Purpose, Put, Registered, Remote, RemoteKey, SendError,
};
use std::fmt;
use std::os::fd::BorrowedFd;

/// Callbacks of a bulk path. Peers have the state machine's numbers.
pub(crate) trait BulkSink {
    /// See [`crate::transport::Handler::on_notify`].
    fn on_notify(&mut self, peer: PeerId, token: u64);
    /// See [`crate::transport::Handler::on_done`].
    fn on_done(&mut self, peer: PeerId, token: u64);
    /// See [`crate::transport::Handler::on_lane_lost`].
    fn on_lost(&mut self, peer: PeerId);
    /// See [`crate::transport::Handler::on_key_void`].
    fn on_key_void(&mut self, peer: PeerId, key: &RemoteKey);
}

/// Counts of a bulk path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct BulkCounts {
    /// Connections that exist, and that were made.
    pub(crate) connections: usize,
    pub(crate) made: u64,
    /// Connections that were closed to make room, that a side refused, and that broke.
    pub(crate) evicted: u64,
    pub(crate) refused: u64,
    pub(crate) broken: u64,
    /// Remote buffers that were advertised to peers (RTR), and that peers have filled.
    pub(crate) lent: u64,
    pub(crate) filled: u64,
    pub(crate) filled_bytes: u64,
    /// Peers' remote buffers that this endpoint has written.
    pub(crate) written: u64,
    pub(crate) written_bytes: u64,
    /// Direct RMA requests to peers' regions, and parts of this endpoint's regions whose keys were advertised.
    pub(crate) reached: u64,
    pub(crate) reached_bytes: u64,
    pub(crate) exposed: u64,
    /// Memory that could not be registered.
    pub(crate) unregistered: u64,
    /// Requests for a registration that found one, and those that made one.
    pub(crate) cache_hits: u64,
    pub(crate) cache_misses: u64,
    /// RTRs of connections that had ended, and immediates that named no remote buffer.
    pub(crate) stale: u64,
    pub(crate) wrong: u64,
}

impl BulkCounts {
    /// With the counts of the path's connections.
    pub(crate) fn with<L>(self, agreement: &Agreement<L>) -> Self {
        let Counts { made, evicted, refused, broken } = agreement.counts;
        Self { connections: agreement.len(), made, evicted, refused, broken, ..self }
    }
}

impl std::ops::AddAssign for BulkCounts {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.cache_hits += other.cache_hits;
        self.cache_misses += other.cache_misses;
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

/// An access to a peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What {
    /// See [`crate::transport::OneSided::put`].
    Put(Put),
    /// See [`crate::transport::OneSided::get`], with its token.
    Get(u64),
    /// See [`crate::transport::OneSided::flush_puts`], with its token.
    Flush(u64),
}

/// A kind of RDMA path into peers' memory, for one endpoint. It is used under the endpoint's lock.
pub(crate) trait Bulk: fmt::Debug + Send {
    /// The longest remote buffer, and the shortest message that is worth one, bytes.
    fn sizes(&self) -> (usize, usize);

    /// Whether it accesses memory of GPUs.
    fn takes_gpus(&self) -> bool {
        false
    }

    /// See [`crate::transport::OneSided::takes`].
    fn takes(&mut self, peer: PeerId, memory: &SegmentList) -> bool {
        let _ = (peer, memory);
        false
    }

    /// See [`crate::transport::OneSided::lends`].
    fn lends(&mut self, peer: PeerId, now: u64) -> Prepared {
        let _ = (peer, now);
        Prepared::Ready
    }

    /// See [`crate::transport::OneSided::prepare`]. Only called for peers with a bulk path that the device reaches.
    fn lane(&mut self, peer: PeerId, now: u64) -> Prepared;

    /// See [`crate::transport::OneSided::register`]. `near`: the peer is on this host.
    fn register(
        &mut self,
        peer: PeerId,
        memory: &SegmentList,
        purpose: Purpose,
        near: bool,
        now: u64,
    ) -> Registered;

    /// See [`crate::transport::OneSided::invalidate`]: no other keys become void.
    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey);

    /// See [`crate::transport::OneSided::is_current`].
    fn is_current(&self, peer: PeerId, key: &RemoteKey) -> bool;

    /// See [`crate::transport::OneSided::put`], `get` and `flush_puts`: an accepted request is posted now or by `flush`.
    /// A flush has no `local` memory.
    fn access(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        at: &Remote,
        what: What,
        now: u64,
    ) -> Result<Access, SendError>;

    /// Posts the requests that wait; where many are in flight, a few may wait until the next `poll`.
    fn flush(&mut self) {}

    /// What the peer's device has written to memory of GPUs, as far as the peer knows that it has, is there when this
    /// returns. False: nobody knows, and the connection ends.
    fn await_writes(&mut self, peer: PeerId) -> bool {
        let _ = peer;
        true
    }

    /// `peer` has sent a control message.
    fn on_control(&mut self, peer: PeerId, message: &[u8], now: u64, sink: &mut dyn BulkSink);

    /// Whether `lane` would answer `Ready`. Does not start anything.
    fn is_ready(&self, peer: PeerId) -> bool;

    /// `peer` is reached at port number `rail` of the endpoint, from 0 on: connections with it are made there, and those at
    /// other ports end. `open` gives the bulk path of a port that has none yet. False: there is none now, and nothing has
    /// changed.
    fn on_rail(
        &mut self,
        peer: PeerId,
        rail: usize,
        open: &mut dyn FnMut(usize) -> Option<Box<dyn Bulk>>,
        (now, sink): (u64, &mut dyn BulkSink),
    ) -> bool {
        let _ = (peer, rail, open, now, sink);
        true // a path with one port has no other
    }

    /// Ends the connection to `peer` with its remote buffers, and tells the peer; the layer above is told of those that
    /// were full, and not of the end.
    fn leave(&mut self, peer: PeerId, now: u64, sink: &mut dyn BulkSink);

    /// The next control message to send, and its peer; they must be sent in this order.
    fn next_control(&mut self) -> Option<(PeerId, Control)>;

    /// There are messages to send, or events to process.
    fn has_work(&self) -> bool;

    /// Gives back, now and then, what the application uses no more.
    fn tend(&mut self, now: u64) {
        let _ = now;
    }

    /// When [`Self::tend`] has something to do although nothing arrives, nanoseconds.
    fn next_timeout(&self) -> Option<u64> {
        None
    }

    /// Processes a bounded number of events. Returns their number.
    fn poll(&mut self, now: u64, sink: &mut dyn BulkSink) -> usize;

    /// The device of port number `rail` of the endpoint has moved to another port, was removed, or is back: remote buffers
    /// that do not survive that are lost.
    fn renew(&mut self, rail: usize, now: u64, sink: &mut dyn BulkSink);

    /// `peer` is gone: its remote buffers end before this returns. Those that were full are reported first.
    fn forget(&mut self, peer: PeerId, now: u64, sink: &mut dyn BulkSink);

    /// Becomes readable when an event happens after `sleep`.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Prepares for sleep on the descriptor. False: there is work.
    fn sleep(&mut self) -> bool;

    /// `sleep` for a thread that sleeps already: another one has polled meanwhile.
    fn rearm(&mut self) -> bool;

    fn counts(&self) -> BulkCounts;

    /// The state of the registrations, as text for the log.
    fn registrations(&self) -> Option<String>;
}

/// The application's memory cannot be registered.
pub(crate) const UNREGISTERED: SendError = SendError::Unreachable(Errno(libc::EFAULT));

/// The key is not one of this connection, or no longer.
pub(crate) const STALE: SendError = SendError::Unreachable(Errno(libc::ESTALE));
