//! What to send next: matching, eager and rendezvous messages, completion levels, back-pressure.
//!
//! State machines over transport capabilities. No system call, no clock, no raw pointer, and no
//! `fi_*` type: the endpoint above translates, the [`Iface`](crate::transport::Iface) below moves
//! bytes. PROTOCOL.md §3 numbers what is said on the wire.
#![forbid(unsafe_code)]

mod arrival;
mod collective;
mod cooperate;
mod departure;
mod engine;
mod index_list;
mod packet;
mod pushed;
mod receive;
mod receives;
mod rendezvous;
mod rma;
mod send;
mod spaces;
mod streamed;
#[cfg(test)]
mod tests;
mod thresholds;
mod windows;

pub(crate) use collective::{CollectiveOp, What as Collective};
pub(crate) use engine::{Engine, Limits};
pub(crate) use receive::{PeekAction, ReceiveOp};
pub(crate) use receives::Receives;
pub(crate) use rma::{
    AtomicOp, MAX_RANGES, RemoteAccess, RemoteRange, RemoteRanges, RmaOp, right_of,
};
pub(crate) use send::SendOp;
pub(crate) use thresholds::Threshold;

use crate::memory::keys::{Denied, Granted, Region, Right};
use crate::transport::Address;

/// A source that matches every peer.
pub(crate) const ANY_SOURCE: u64 = u64::MAX;

/// A sender that the address book does not know.
pub(crate) const UNKNOWN_SOURCE: u64 = u64::MAX;

/// Which operation a completion belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// A send.
    Send,
    /// A receive.
    Receive,
    /// A one-sided read of a peer's memory.
    Read,
    /// A one-sided write to it.
    Write,
    /// An atomic operation on it that gives nothing back.
    Update,
    /// One that gives back what was there.
    Fetch,
    /// An operation of a group.
    Collective,
}

/// Where the end of an operation is reported: one word, which travels in a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Report(u16);

impl Report {
    const ENTRY: u16 = 1 << 8;

    #[inline]
    pub(crate) const fn new(entry: bool, context: u8) -> Self {
        Self((entry as u16) << 8 | context as u16)
    }

    /// A completion entry is wanted; counters count in any case.
    #[inline]
    pub(crate) const fn entry(self) -> bool {
        self.0 & Self::ENTRY != 0
    }

    /// The transmit or receive context that it was started on; an ordinary endpoint has number 0 only.
    #[inline]
    pub(crate) const fn context(self) -> u8 {
        self.0 as u8
    }
}

/// One finished operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Completion {
    /// What it was.
    pub(crate) direction: Direction,
    /// Tagged or plain message.
    pub(crate) tagged: bool,
    /// The application's context.
    pub(crate) context: u64,
    /// Where it is reported, and whether by an entry.
    pub(crate) report: Report,
    /// Bytes received; 0 for sends.
    pub(crate) len: usize,
    /// Where the bytes are, for receives into a multi-receive buffer.
    pub(crate) buffer: u64,
    /// Remote completion data.
    pub(crate) data: Option<u64>,
    /// The message's tag.
    pub(crate) tag: u64,
    /// Who sent it, in the address book's numbers; [`UNKNOWN_SOURCE`] if not in it.
    pub(crate) source: u64,
    /// A multi-receive buffer goes back to the application with this completion.
    pub(crate) buffer_released: bool,
}

/// One operation that ended in an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    /// The operation, with what is known of it.
    pub(crate) completion: Completion,
    /// A positive error number that libfabric knows (equal to errno below 256).
    pub(crate) error: i32,
    /// Bytes that did not fit (truncation).
    pub(crate) overflow: usize,
    /// What happened, for `fi_cq_strerror`.
    pub(crate) cause: Cause,
}

/// What happened to a failed operation: the provider's own error numbers (`prov_errno`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub(crate) enum Cause {
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

impl Cause {
    const ALL: [Self; 19] = [
        Self::Truncated,
        Self::Cancelled,
        Self::NoMessage,
        Self::PeerDied,
        Self::PeerClosed,
        Self::LinkBroke,
        Self::PeerUnreachable,
        Self::SenderLost,
        Self::SenderUnreadable,
        Self::ReceiverRefused,
        Self::PeerSilent,
        Self::KeyRejected,
        Self::AccessDenied,
        Self::TargetFailed,
        Self::NoAtomics,
        Self::BufferUnwritable,
        Self::NotStarted,
        Self::MemberGone,
        Self::MembersDisagree,
    ];

    /// The cause with this number.
    pub(crate) fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|cause| *cause as i32 == number)
    }

    /// One sentence.
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
                "the target's memory region does not reach so far, or does not allow this"
            }
            Self::TargetFailed => "the target could not reach the initiator's buffer",
            Self::NoAtomics => "the target's version of udrv does not know this atomic operation",
            Self::NotStarted => "the counter came so far, but the operation could not be started",
            Self::MemberGone => "a member of the collective group went away or failed",
            Self::MembersDisagree => "the members of the group do not mean the same operation",
        }
    }
}

/// Why an operation was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpError {
    /// No room now: read completions, then try again.
    Again,
    /// Never: a positive error number.
    Error(i32),
}

/// What the protocol needs from the endpoint above it.
pub(crate) trait Host {
    /// An operation finished.
    fn complete(&mut self, completion: &Completion);
    /// The same, made a part of the caller: for the cheapest cases.
    #[inline(always)]
    fn complete_inline(&mut self, completion: &Completion) {
        self.complete(completion);
    }
    /// An operation failed.
    fn fail(&mut self, failure: &Failure);
    /// The address book's number for `address`, or [`UNKNOWN_SOURCE`].
    fn source_of(&self, address: &Address) -> u64;
    /// Changes whenever `source_of` may answer differently.
    fn book_epoch(&self) -> u64;
    /// False while the completion queues are full: nothing new is started then.
    fn has_room(&self) -> bool;
    /// The same for the queue that sends of a transmit context are reported to.
    fn has_room_for_sends(&self, context: u8) -> bool {
        let _ = context;
        self.has_room()
    }
    /// Our memory behind `range`, if a peer has this right to it.
    fn region(&self, range: &RemoteRange, right: Right) -> Result<Granted, Denied>;
    /// The region with this key, with the rights that a peer may use without anybody here hearing of
    /// it, and its id. `None`: there is none, or it has no such rights.
    fn offer(&self, key: u64) -> Option<(u64, Region)>;
    /// The queue of receives that this endpoint shares with others, if it does.
    fn shared_receives(&mut self) -> Option<&mut Receives> {
        None
    }
    /// The same, to look at.
    fn see_shared_receives(&self) -> Option<&Receives> {
        None
    }
    /// Whether a receive that asks for no entry gets none: for receives of a shared queue, which
    /// belong to no endpoint until a message comes.
    fn reports_all_receives(&self) -> bool {
        true
    }
    /// A peer has read or written our memory.
    fn accessed(&mut self, access: &RemoteAccess<'_>);
    /// All members have joined a group, or it failed: a positive error number.
    fn joined(&mut self, group: u64, outcome: Result<(), i32>);
}

/// Errors of libfabric's own range (`fi_errno.h`), beyond errno.
pub(crate) const FI_ETRUNC: i32 = 265;
