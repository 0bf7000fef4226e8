//! Links that their receiver refuses because it has no descriptor or no memory for them (PROTOCOL.md §2.11).
//!
//! A sender writes into its segment before it has an answer, and messages there count as sent. The receiver of a
//! refused link reads none of them. When the sender learns of the refusal, it sets MOVED, takes its messages out of the
//! ring and sends them another way, in their order and before any other. A sender that ends without setting MOVED has
//! not learned: then the receiver, which still has the segment, delivers the messages in it. A segment that it could
//! not map is tried again for a while; after that its messages are lost, and the peer has failed.

use super::layout::{CLOSING, Geometry, MOVED};
use super::ring::Consumer;
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{Errno, process, unix};
use crate::transport::{Address, PeerId};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Time between two looks whether the sender has ended, or attempts to map its segment, and how long attempts continue
/// after its end, nanoseconds.
pub(super) const LOOK_NS: u64 = 10_000_000;
const GIVE_UP_NS: u64 = 2_000_000_000;

/// The segment of a link that a peer made to us.
#[derive(Debug)]
pub(super) enum Segment {
    Mapped(Consumer),
    Unmapped(Unmapped),
}

/// A segment that could not be mapped, and why; it may be later.
#[derive(Debug)]
pub(super) struct Unmapped {
    pub(super) file: OwnedFd,
    pub(super) geometry: Geometry,
    pub(super) errno: Errno,
}

impl Segment {
    pub(super) fn producer_closed(&self) -> bool {
        match self {
            Self::Mapped(consumer) => consumer.producer_closed(),
            Self::Unmapped(Unmapped { file, .. }) => {
                SharedMemory::peek(file, CLOSING).is_some_and(|word| word != 0)
            }
        }
    }

    pub(super) fn has_moved(&self) -> bool {
        match self {
            Self::Mapped(consumer) => consumer.has_moved(),
            Self::Unmapped(Unmapped { file, .. }) => SharedMemory::peek(file, MOVED) == Some(1),
        }
    }

    /// Maps the segment, if it is not mapped. False: that failed.
    pub(super) fn map(&mut self) -> bool {
        let Self::Unmapped(Unmapped { file, geometry, errno }) = self else { return true };
        match SharedMemory::attach(file, geometry.len()) {
            Ok(memory) => *self = Self::Mapped(Consumer::new(Arc::new(memory), *geometry)),
            Err(e) => *errno = e,
        }
        matches!(self, Self::Mapped(_))
    }
}

/// A link that was refused here; its sender may not know it yet.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) peer: PeerId,
    pub(super) source: Address,
    pub(super) pid: i32,
    pub(super) segment: Segment,
    /// Its connection.
    socket: Option<OwnedFd>,
    /// When to look again, and when to give up, nanoseconds. 0: now; the sender has not ended.
    pub(super) look_at: u64,
    until: u64,
}

impl Refused {
    /// `socket`: its connection, if there is a descriptor for it, and the end of its process cannot be seen otherwise.
    pub(super) fn new(
        peer: PeerId,
        source: Address,
        pid: i32,
        segment: Segment,
        socket: Option<OwnedFd>,
    ) -> Self {
        Self { peer, source, pid, segment, socket, look_at: 0, until: 0 }
    }

    /// The sender has closed or ended, so it cannot learn of the refusal any more.
    pub(super) fn is_left(&self) -> bool {
        self.segment.producer_closed()
            || !process::is_running(self.pid)
            || self.socket.as_ref().is_some_and(|socket| unix::is_over(socket.as_fd()))
    }

    /// The messages that the sender left can be read, or never will be.
    pub(super) fn is_ready(&mut self, now: u64) -> bool {
        if !self.is_left() {
            return false;
        }
        if self.until == 0 {
            self.until = now.saturating_add(GIVE_UP_NS);
        }
        self.segment.map() || now >= self.until
    }
}
