//! The message protocol: matching, eager and rendezvous messages, completion levels, back-pressure.
//!
//! State machines over the capabilities of a transport. They make no system call, read no clock, and know no raw
//! pointer and no `fi_*` type: the endpoint above translates, and the [`Iface`](crate::transport::Iface) below moves
//! bytes. PROTOCOL.md §3 defines the packets.
//!
//! Imports point downwards: packets and records (`message`, `flow`, `select`), the schemes, the parts that hold their states
//! (`sends`, `arrivals`, `matching` over `queue`), `state` with all parts, the files that drive them (`send` and `transmit`,
//! `receive` and `rendezvous`, `rma`, `collective`), and `engine`.
#![forbid(unsafe_code)]

mod arrivals;
mod collective;
mod departure;
mod engine;
mod flow;
mod index_list;
mod kept;
mod landing;
mod limits;
mod matching;
mod message;
mod outbox;
mod owed;
mod packet;
mod peers;
mod queue;
mod receive;
mod receives;
mod rendezvous;
mod rma;
mod schemes;
mod select;
mod send;
mod sends;
mod spaces;
mod staging;
mod state;
#[cfg(test)]
mod tests;
mod thresholds;
mod traffic;
mod transmit;
mod wire;

pub(crate) use collective::{CollectiveOp, What as Collective};
pub(crate) use limits::{Limits, Standing};
pub(crate) use receive::PeekAction;
pub(crate) use receives::{ReceiveOp, Receives};
pub(crate) use rma::{
    AtomicOp, MAX_RANGES, RemoteAccess, RemoteRange, RemoteRanges, RmaOp, right_of,
};
pub(crate) use send::SendOp;
pub(crate) use state::Engine;
pub(crate) use thresholds::Threshold;
#[cfg(test)]
pub(crate) use traffic::Tally;
pub(crate) use traffic::Traffic;

use crate::memory::keys::{Denied, Granted, Region, Right};
use crate::sys::numbered::numbered;
use crate::telemetry::trace::Kind;
use crate::transport::{Address, Figures, PeerId, SendError};

/// A receive from any peer.
pub(crate) const ANY_SOURCE: u64 = u64::MAX;

/// The source of a message whose sender is not in the address book.
pub(crate) const UNKNOWN_SOURCE: u64 = u64::MAX;

/// Which operation a completion belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// A send.
    Send,
    /// A receive.
    Receive,
    /// A one-sided read of a peer's memory (RMA read).
    Read,
    /// A one-sided write to a peer's memory (RMA write).
    Write,
    /// An atomic operation that returns no old values.
    Update,
    /// An atomic operation that fetches the old values.
    Fetch,
    /// A collective operation.
    Collective,
}

/// Where the completion of an operation is reported: one word, so that it travels in a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Report(u16);

impl Report {
    const ENTRY: u16 = 1 << 8;
    const LOOK: u16 = 1 << 9;

    #[inline]
    pub(crate) const fn new(entry: bool, context: u8) -> Self {
        Self((entry as u16) << 8 | context as u16)
    }

    /// The same for a call that only looks for a message (FI_PEEK): its result is an entry in any case, and no counter
    /// counts it (fi_tagged.3).
    #[inline]
    pub(crate) const fn of_look(self) -> Self {
        Self(self.0 | Self::ENTRY | Self::LOOK)
    }

    /// The application wants a completion entry.
    #[inline]
    pub(crate) const fn entry(self) -> bool {
        self.0 & Self::ENTRY != 0
    }

    /// Counters count the operation.
    #[inline]
    pub(crate) const fn counts(self) -> bool {
        self.0 & Self::LOOK == 0
    }

    /// The transmit or receive context that the operation was started on. An ordinary endpoint has only number 0.
    #[inline]
    pub(crate) const fn context(self) -> u8 {
        self.0 as u8
    }
}

/// One finished operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Completion {
    /// The kind of the operation.
    pub(crate) direction: Direction,
    /// Tagged or plain message.
    pub(crate) tagged: bool,
    /// The application's context.
    pub(crate) context: u64,
    /// The context that it is reported to, and whether a completion entry is wanted.
    pub(crate) report: Report,
    /// Bytes received; 0 for sends.
    pub(crate) len: usize,
    /// Address of the bytes, for receives into a multi-receive buffer.
    pub(crate) buffer: u64,
    /// Remote completion data.
    pub(crate) data: Option<u64>,
    /// The message's tag.
    pub(crate) tag: u64,
    /// The sender's index in the address book (`fi_addr_t`), or [`UNKNOWN_SOURCE`].
    pub(crate) source: u64,
    /// This completion releases a multi-receive buffer (FI_MULTI_RECV).
    pub(crate) buffer_released: bool,
}

impl Completion {
    /// The completion of an operation that says no more than this.
    #[inline(always)]
    pub(crate) const fn new(direction: Direction, context: u64, report: Report) -> Self {
        Self {
            direction,
            tagged: false,
            context,
            report,
            len: 0,
            buffer: 0,
            data: None,
            tag: 0,
            source: UNKNOWN_SOURCE,
            buffer_released: false,
        }
    }
}

/// One operation that ended in an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    /// The operation, as far as it is known.
    pub(crate) completion: Completion,
    /// A positive error number of libfabric (equal to errno below 256).
    pub(crate) error: i32,
    /// Bytes that did not fit (truncation).
    pub(crate) overflow: usize,
    /// The cause, for `fi_cq_strerror`.
    pub(crate) cause: Cause,
}

impl Failure {
    fn new(completion: Completion, (error, cause): (i32, Cause)) -> Self {
        Self { completion, error, overflow: 0, cause }
    }
}

numbered! {
    /// The cause of a failure: the provider's own error numbers (`prov_errno`).
    pub(crate) enum Cause: i32 {
        Truncated = 1,
        Cancelled = 2,
        NoMessage = 3,
        PeerDied = 4,
        PeerClosed = 5,
        LinkBroke = 6,
        PeerUnreachable = 7,
        SenderLost = 8,
        SenderUnreadable = 9,
        ReceiverRefused = 10,
        PeerSilent = 11,
        KeyRejected = 12,
        AccessDenied = 13,
        TargetFailed = 14,
        NoAtomics = 15,
        BufferUnwritable = 16,
        NotStarted = 20,
        MemberGone = 21,
        MembersDisagree = 22,
    }
}

impl Cause {
    /// The message of this cause: one sentence.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Truncated => "the message is longer than the receive buffer",
            Self::Cancelled => "the operation was cancelled",
            Self::NoMessage => "no matching message has arrived",
            Self::PeerDied => "the peer's process ended",
            Self::PeerClosed => "the peer closed its endpoint",
            Self::LinkBroke => "the connection to the peer broke",
            Self::PeerUnreachable => "the peer cannot be reached",
            Self::SenderLost => "the sender went away before the message was complete",
            Self::SenderUnreadable => "the sender's buffer cannot be read",
            Self::BufferUnwritable => "the buffer cannot be written",
            Self::ReceiverRefused => "the receiver could not take the message",
            Self::PeerSilent => "the peer gave no sign of life for FI_UDRV_PEER_TIMEOUT seconds",
            Self::KeyRejected => "the target has no memory region with this key",
            Self::AccessDenied => {
                "the target's memory region does not reach so far, does not allow this, or has no memory there"
            }
            Self::TargetFailed => "the target could not reach the initiator's buffer",
            Self::NoAtomics => "the target's version of udrv does not know this atomic operation",
            Self::NotStarted => "the counter came so far, but the operation could not be started",
            Self::MemberGone => "a member of the collective group went away or failed",
            Self::MembersDisagree => "the members of the group do not mean the same operation",
        }
    }
}

/// Why an operation was not started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpError {
    /// No room now: the application reads completions, then tries again.
    Again,
    /// A permanent error: a positive error number.
    Error(i32),
}

impl From<SendError> for OpError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Again => Self::Again,
            SendError::Unreachable(errno) => Self::Error(errno.0),
        }
    }
}

/// The services that the protocol needs from the endpoint above it.
pub(crate) trait Host {
    /// An operation finished.
    fn complete(&mut self, completion: &Completion);
    /// As `complete`, always inlined into the caller: for the fast paths.
    #[inline(always)]
    fn complete_inline(&mut self, completion: &Completion) {
        self.complete(completion);
    }
    /// An operation failed.
    fn fail(&mut self, failure: &Failure);
    /// The index of `address` in the address book, or [`UNKNOWN_SOURCE`].
    fn source_of(&self, address: &Address) -> u64;
    /// Changes whenever `source_of` may answer differently.
    fn book_epoch(&self) -> u64;
    /// Changes with each removal from the address book.
    fn book_removals(&self) -> u64;
    /// False while more completions wait to be read than the queues were made for: nothing that arrives is taken in.
    fn takes_arrivals(&self) -> bool;
    /// False while the queue of this transmit context has no room for what is to be reported: the operation does not
    /// start then. One that writes no entry needs room only for an error. Other queues do not matter, because the
    /// application may read this one alone before it tries again.
    fn has_room_for_sends(&self, report: Report) -> bool;
    /// The local memory behind `range`, if peers have the right `right` to it.
    fn region(&self, range: &RemoteRange, right: Right) -> Result<Granted, Denied>;
    /// The id of the region with this key, and the region with the rights that peers may use by direct RMA, of which
    /// this process is not notified. `None`: there is no such region, or it has no such rights.
    fn offer(&self, key: u64) -> Option<(u64, Region)>;
    /// The receive queue that this endpoint shares with others (`fi_srx_context`), if any.
    fn shared_receives(&mut self) -> Option<&mut Receives> {
        None
    }
    /// As `shared_receives`, for reading.
    fn see_shared_receives(&self) -> Option<&Receives> {
        None
    }
    /// Whether a receive that asks for no entry gets one all the same. For receives of a shared queue, which belong to
    /// no endpoint until a message matches them.
    fn reports_all_receives(&self) -> bool {
        true
    }
    /// A peer has read or written memory of this endpoint.
    fn accessed(&mut self, access: &RemoteAccess<'_>);
    /// A time to show what the endpoint has done, also with the peers of the figures, in their order.
    fn show(&mut self, standing: &Standing, figures: &Figures, traffic: &[Traffic]) {
        let _ = (standing, figures, traffic);
    }
    /// The monotonic clock, nanoseconds; 0: there is none. Asked for messages that wait, and never for an eager message
    /// that does not.
    fn now_ns(&self) -> u64 {
        0
    }
    /// A peer is known by this number now.
    fn met(&mut self, peer: PeerId, address: &Address) {
        let _ = (peer, address);
    }
    /// The peer at this address is alive.
    fn heard(&mut self, address: &Address) {
        let _ = address;
    }
    /// The peer with this index has departed. For an endpoint that shares its receives: others may have messages of that
    /// peer for them, so none has failed yet.
    fn lost(&mut self, source: u64) {
        let _ = source;
    }
    /// Something has happened to a message to or from `peer`, of this number and length. Not told by fast paths, which
    /// endpoints with [`Limits::traced`] do not take.
    fn trace(&self, kind: Kind, peer: PeerId, number: u64, bytes: usize) {
        let _ = (kind, peer, number, bytes);
    }
    /// All members have joined a group, or the join failed: a positive error number.
    fn joined(&mut self, group: u64, outcome: Result<(), i32>);
}

/// Errors of libfabric's own range (`fi_errno.h`), beyond errno.
pub(crate) const FI_ETRUNC: i32 = 265;
