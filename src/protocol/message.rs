//! What every scheme knows of a message that leaves or arrives.

use super::landing::Landing;
use super::limits::Limits;
use super::packet::{Encoded, Envelope, Packet, Ranges};
use super::receives::Target;
use super::{Cause, Completion, Direction, OpError, Report};
use crate::memory::bounce::{Gathered, Part};
use crate::memory::{OwnedBuffer, SegmentList};
use crate::sys::Errno;
use crate::transport::{Iface, PeerId, RemoteKey, SendError};

/// The payload of a pending send.
#[derive(Debug)]
pub(super) enum Payload {
    /// In the application's buffer.
    Lent(SegmentList),
    /// In a copy that the engine owns.
    Owned(OwnedBuffer),
}

impl Payload {
    pub(super) fn segments(&self) -> SegmentList {
        match self {
            Self::Lent(list) => *list,
            Self::Owned(buffer) => buffer.segments(),
        }
    }

    /// Length, bytes.
    pub(super) fn len(&self) -> usize {
        self.segments().len()
    }

    /// As [`SegmentList::copy_out`].
    #[inline]
    pub(super) fn copy_out(&self, offset: usize, to: &mut [u8]) -> usize {
        match self {
            Self::Lent(list) => list.copy_out(offset, to),
            Self::Owned(buffer) => buffer.segments().copy_out(offset, to),
        }
    }

    /// Copies device memory, which packets cannot be filled from cheaply. False: the device failed, or there is no memory.
    /// `copied`: bytes of all copies that the engine owns.
    pub(super) fn bring_to_host(&mut self, copied: &mut usize) -> bool {
        let Self::Lent(list) = self else { return true };
        if list.is_on_device() {
            let Some(copy) = OwnedBuffer::try_copy_of(list) else { return false };
            *copied += list.len();
            *self = Self::Owned(copy);
        }
        true
    }

    /// Copies the application's buffer, which it may reuse, or which is in memory of a device. `copied`: bytes of all copies that the engine owns, at most `most`
    /// of them, unless it is one alone.
    pub(super) fn own(&mut self, copied: &mut usize, most: usize) -> Result<(), OpError> {
        let Self::Lent(list) = self else { return Ok(()) };
        let all = *copied + list.len();
        if all > most && *copied > 0 && list.len() > 0 {
            return Err(OpError::Again);
        }
        // Of device memory, the device may have failed.
        let errno = if list.is_on_device() { libc::EIO } else { libc::ENOMEM };
        let copy = OwnedBuffer::try_copy_of(list).ok_or(OpError::Error(errno))?;
        (*self, *copied) = (Self::Owned(copy), all);
        Ok(())
    }

    pub(super) fn is_owned(&self) -> bool {
        matches!(self, Self::Owned(_))
    }

    /// Bytes of the copy that the engine owns; 0: there is none.
    pub(super) fn owned_len(&self) -> usize {
        if self.is_owned() { self.len() } else { 0 }
    }
}

/// A send that is pending: not complete when its call returns.
#[derive(Debug)]
pub(super) struct Outbound {
    pub(super) peer: PeerId,
    pub(super) envelope: Envelope,
    pub(super) payload: Payload,
    pub(super) context: u64,
    pub(super) report: Report,
    /// The completion was reported already.
    pub(super) completed: bool,
    /// It is in memory of a device that has failed.
    pub(super) unreadable: bool,
    /// The remote key under which the message is advertised for reading: valid until the send ends.
    pub(super) offer: Option<RemoteKey>,
    /// Copies of its bytes that a device may read until the receiver has them.
    pub(super) lent: Vec<Part>,
    /// When it was announced, nanoseconds; 0: it was not, or its receiver has answered.
    pub(super) announced_ns: u64,
}

impl Outbound {
    pub(super) fn completion(&self) -> Completion {
        sent(self.envelope, self.context, self.report)
    }
}

/// The completion of a send.
#[inline(always)]
pub(super) fn sent(envelope: Envelope, context: u64, report: Report) -> Completion {
    let Envelope { tagged, tag, .. } = envelope;
    Completion { tagged, tag, ..Completion::new(Direction::Send, context, report) }
}

/// The contents of an RTS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Announcement {
    /// The sender's number of the message.
    pub(super) tx: u64,
    /// Length of the message, bytes.
    pub(super) len: u64,
    /// The number of unsolicited bytes.
    pub(super) pushed: u64,
    /// The sender needs no FIN.
    pub(super) leaves: bool,
    /// Sender-side delivery completion: a FIN may be late.
    pub(super) sees: bool,
    /// The stream with the bytes broke: the rest has to be requested as fragments.
    pub(super) broken: bool,
    /// The remote key under which the sender advertises the message (GET rendezvous).
    pub(super) offer: Option<RemoteKey>,
    /// The message's ranges in the sender's memory.
    pub(super) ranges: Ranges,
}

impl Announcement {
    /// The RTS.
    pub(super) fn encode(&self, envelope: Envelope) -> Encoded {
        let Self { tx, len, pushed, leaves, sees, offer, ranges, .. } = *self;
        Packet::Rts { envelope, tx, len, pushed, leaves, sees, offer, ranges }.encode()
    }
}

/// Why a receive fails whose bytes could not be copied to its buffer: the device has failed.
pub(super) const UNWRITABLE: (i32, Cause) = (libc::EIO, Cause::BufferUnwritable);

/// A long message that has its receive, and whose bytes are on their way.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) peer: PeerId,
    pub(super) envelope: Envelope,
    pub(super) target: Target,
    /// The sender's number of the message.
    pub(super) tx: u64,
    /// Length of the message, bytes.
    pub(super) len: u64,
    /// Bytes that fit into the buffer, and are to be moved.
    pub(super) want: usize,
    /// Bytes moved so far, from the start without gaps.
    pub(super) received: usize,
    /// The sender needs no FIN.
    pub(super) leaves: bool,
    /// It is one of [`super::arrivals::Arrivals::pulls`].
    pub(super) queued: bool,
    /// Bytes that have arrived in packets for device memory. They count as received.
    pub(super) landing: Option<Box<Landing>>,
    /// It fails when no stream writes to its buffer: the error number and the cause.
    pub(super) failed: Option<(i32, Cause)>,
}

impl Inbound {
    /// All bytes that are to be moved are here.
    pub(super) fn is_whole(&self) -> bool {
        self.received == self.want
    }

    /// The part of the buffer whose bytes are missing.
    pub(super) fn rest(&self) -> SegmentList {
        self.target.segments.slice(self.received, self.want - self.received)
    }

    /// Copies bytes of the message to where they belong. Returns how many there was room for.
    #[inline]
    pub(super) fn place(&self, offset: usize, bytes: &[u8], limits: &Limits) -> usize {
        let segments = &self.target.segments;
        if self.want < limits.past_caches_min {
            segments.copy_in(offset, bytes)
        } else {
            segments.copy_in_past_caches(offset, bytes)
        }
    }

    /// The sender has left, and only copies to a device are waited for.
    pub(super) fn is_orphaned(&self) -> bool {
        self.landing.as_ref().is_some_and(|landing| landing.orphaned)
    }

    /// Bytes are on their way to a device.
    pub(super) fn is_landing(&self) -> bool {
        self.landing.as_ref().is_some_and(|landing| landing.is_under_way())
    }

    /// Whether all bytes that are here are in place; else (`Err`) what has to be done until they are.
    pub(super) fn landed(&mut self) -> Result<(), Next> {
        if let Some((error, cause)) = self.failed.filter(|_| self.landing.is_some()) {
            return Err(Next::Failed(error, cause));
        }
        let Some(landing) = &mut self.landing else { return Ok(()) };
        match landing.have_ended() {
            Ok(true) => Ok(()),
            Ok(false) => Err(Next::Again),
            Err(_) => {
                let (error, cause) = *self.failed.insert(UNWRITABLE);
                Err(Next::Failed(error, cause))
            }
        }
    }

    /// What a step leads to of a message that is whole, or whose bytes are on their way to a device. `full` is set
    /// where no more bytes should be taken from the network now.
    pub(super) fn awaited(&mut self, full: &mut bool) -> Option<Next> {
        if let Err(next) = self.landed() {
            *full |= self.landing.as_ref().is_some_and(|landing| landing.is_full());
            return Some(next);
        }
        if self.is_whole() {
            return Some(Next::Whole);
        }
        self.landing.as_ref().map(|_| Next::Waits)
    }

    /// A bounce buffer has the next bytes of the message: begins to copy them to the device.
    pub(super) fn land(&mut self, buffer: Gathered) {
        if !self.landing.get_or_insert_default().add(buffer) {
            self.failed = Some(UNWRITABLE);
        }
    }

    /// Copies the next bytes of the message, as many as there is room for. Returns whether it is whole now, or has failed.
    pub(super) fn append(&mut self, bytes: &[u8], limits: &Limits) -> bool {
        let room = self.want - self.received;
        let bytes = bytes.get(..bytes.len().min(room)).unwrap_or(&[]);
        let placed = match self.target.segments.is_on_device() {
            true => {
                let rest = self.rest();
                self.landing.get_or_insert_default().take(&rest, bytes)
            }
            false => self.place(self.received, bytes, limits),
        };
        self.received += placed;
        if placed < bytes.len() {
            self.failed = Some(UNWRITABLE);
        }
        self.is_whole() && self.landed().is_ok() || self.failed.is_some()
    }

    /// Reads at most `len` bytes of the message at `offset` from `ranges` of the sender's memory.
    pub(super) fn read(
        &self,
        iface: &mut impl Iface,
        ranges: &Ranges,
        offset: usize,
        len: usize,
    ) -> Result<usize, SendError> {
        let local = self.target.segments.slice(offset, len);
        ranges.get(iface, self.peer, &local, offset)
    }

    /// The sender's memory cannot be read: asks the sender to send the bytes, if that may work.
    pub(super) fn unreadable(&self, errno: Errno) -> Next {
        // A sender may be able to read memory that other processes cannot: memfd_secret(2), device memory. Which side's
        // address was wrong, each side checks for its own buffer (PROTOCOL.md §4.5).
        let faulted = errno.0 == libc::EFAULT;
        let rest = self.rest();
        if faulted && !rest.is_accessible(0, rest.len(), true) {
            Next::Failed(errno.0, Cause::BufferUnwritable)
        } else if faulted || is_refusal(errno) {
            Next::Ask { faulted }
        } else {
            Next::Failed(errno.0, Cause::SenderUnreadable)
        }
    }
}

/// Whether process_vm_readv or process_vm_writev is not permitted or not available: another method may work.
pub(super) fn is_refusal(errno: Errno) -> bool {
    matches!(errno.0, libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EOPNOTSUPP)
}

/// What a step of a receive leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Nothing moved; more to do later.
    Again,
    /// Something moved; more to do.
    Moved,
    /// Nothing to do until something arrives.
    Waits,
    /// The message is whole.
    Whole,
    /// The receive fails with this error number and cause.
    Failed(i32, Cause),
    /// The sender has to send the bytes, from the first one on. `faulted`: a copy from its memory failed with EFAULT.
    Ask { faulted: bool },
    /// The sender has to send the missing bytes.
    Resume,
}
