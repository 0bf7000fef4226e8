//! What an RC port and its queue pairs share.

use super::cq::CqObject;
use super::device::Pd;
use super::marks::Marks;
use super::srq::Srq;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Most segments of one write, if the device supports them: as many as an operation has.
pub(super) const SEGMENTS: u32 = 4;
/// The `wr_id` of sends; receives have 0.
pub(super) const WRITE: u64 = 1;

/// Settings of a port and its queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RcSettings {
    pub(crate) port: u8,
    /// The index of its partition.
    pub(crate) pkey_index: u16,
    /// The index of the port's GID that routed packets are sent from.
    pub(crate) gid: u8,
    /// All packets of the port have a global routing header.
    pub(crate) routed: bool,
    /// Longest packet of the port, bytes.
    pub(crate) mtu: usize,
    pub(crate) marks: Marks,
    /// Retransmission timeout, 4.096 µs × 2^this, 1 to 31.
    pub(crate) timeout: u8,
    /// Most connections at a time. The port may support fewer.
    pub(crate) connections: usize,
    /// Receives for writes of peers: for all connections, or for each queue pair if not `shared`. The port
    /// may have fewer, or a few more.
    pub(crate) receives: u32,
    /// Most requests under way on each queue pair. The port may support fewer.
    pub(crate) sends: u32,
    /// Most reads that its device processes at a time: those we issue, and those of the peer. The port may support
    /// fewer; zero: reads do not work.
    pub(crate) reads: u8,
    pub(crate) serves: u8,
    /// Receives are shared if the device supports that.
    pub(crate) shared: bool,
}

/// Objects that the queue pairs keep alive.
#[derive(Debug)]
pub(super) struct Queues {
    // Destroyed in this order.
    pub(super) srq: Option<Srq>,
    pub(super) cq: Arc<CqObject>,
    pub(super) pd: Arc<Pd>,
    /// A queue pair was destroyed, and the driver may have dropped receives with it.
    pub(super) ended: AtomicBool,
}
