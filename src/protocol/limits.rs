//! What an endpoint is bounded by, and what it counts.

use crate::telemetry::histogram::Histogram;

/// Bounds and thresholds of one endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Longest message sent eagerly, bytes. Longer messages go by rendezvous.
    pub(crate) eager_max: usize,
    /// Sends that may be pending (rendezvous, delivery-complete, fenced) before FI_EAGAIN.
    pub(crate) tx_max: usize,
    /// Receives that may be posted before FI_EAGAIN.
    pub(crate) rx_max: usize,
    /// Shortest message whose fragments are stored with non-temporal stores (past the caches), bytes.
    pub(crate) past_caches_min: usize,
    /// Payload bytes of unexpected messages that are kept before peers are asked to hold theirs back.
    pub(crate) unexpected_max: usize,
    /// Bytes of one message that are moved in one progress pass.
    pub(crate) bulk_chunk: usize,
    /// Shortest one-sided operation that the initiator carries out by direct RMA, bytes.
    pub(crate) alone_min: usize,
    /// Number of receive contexts.
    pub(crate) contexts: usize,
    /// Receives are posted to a queue of the host that several endpoints share.
    pub(crate) shares_receives: bool,
    /// The host is told what happens to each message, and no fast path is taken.
    pub(crate) traced: bool,
}

/// What an endpoint has done, and what it waits for now.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Standing {
    pub(crate) counts: Counts,
    /// Payload bytes of unexpected messages.
    pub(crate) held: usize,
    /// Receives in the endpoint's own queue, and sends that are not complete.
    pub(crate) receives: usize,
    pub(crate) sends: usize,
    /// The source of the receive that was posted last, if that names one.
    pub(crate) awaited: Option<u64>,
    /// How long announced messages waited for the first answer of their receivers.
    pub(crate) late_receivers: Histogram,
    /// How long messages waited for their receives: those that were announced, and one in [`SAMPLED`] of the others.
    pub(crate) early_senders: Histogram,
}

/// Of eager messages without a receive one in so many is timed.
pub(crate) const SAMPLED: u64 = 16;

/// Event counts since the endpoint was enabled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) eager_sent: u64,
    pub(crate) rendezvous_sent: u64,
    pub(crate) unexpected: u64,
    pub(crate) pulled_bytes: u64,
    pub(crate) pushed_bytes: u64,
    /// Bytes that this endpoint sent or wrote as the sender of split copies.
    pub(crate) assisted_bytes: u64,
    /// Bytes that this endpoint moved to and from regions of its peers by direct RMA.
    pub(crate) reached_bytes: u64,
    pub(crate) fragment_bytes: u64,
    pub(crate) stream_bytes: u64,
    /// Messages whose stream or remote buffers failed, and that continued as fragments.
    pub(crate) resumed: u64,
    /// Bytes that this endpoint wrote into remote buffers (PUT rendezvous).
    pub(crate) window_bytes: u64,
    /// Buffers that this endpoint had advertised when the connection ended.
    pub(crate) windows_lost: u64,
    /// Bytes that this endpoint read from messages that their senders had advertised (GET rendezvous).
    pub(crate) read_bytes: u64,
    /// Messages that this endpoint could not write into the buffers that the receiver had advertised.
    pub(crate) declined: u64,
    pub(crate) dropped: u64,
    /// Unsolicited packets that the receive had no room for, or whose message was discarded.
    pub(crate) surplus: u64,
}

impl Counts {
    /// Grows with everything that this endpoint sends to any peer and that has no answer.
    pub(super) fn unanswered(&self) -> u64 {
        self.eager_sent.wrapping_add(self.rendezvous_sent).wrapping_add(self.fragment_bytes)
    }
}
