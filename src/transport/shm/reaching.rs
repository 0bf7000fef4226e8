//! Regions of the receiver of a link that its sender reaches by itself (PROTOCOL.md §2.10). The sender
//! says that it is at it, and then looks whether it still may; the receiver says that it may not, and
//! then looks whether the sender is at it. So one of the two sees the other.

use super::layout::{EPOCH, REACHING};
use super::{Inbound, Shm};
use crate::memory::SegmentList;
use crate::sys::{Errno, process};
use crate::transport::{Exposed, Exposure, PeerId, Reached, SendError, Spot};
use std::sync::atomic::{Ordering, fence};

/// Looks at a sender that is at it, before the next one whether it still lives.
const PATIENCE: u32 = 1000;

impl Inbound {
    /// What the sender was told is void. It touches nothing of it when this returns.
    pub(super) fn end_reaching(&self) {
        let memory = self.consumer.memory();
        let (Some(epoch), Some(reaching)) = (memory.atomic(EPOCH), memory.atomic(REACHING)) else {
            return;
        };
        epoch.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let seen = reaching.load(Ordering::Acquire);
        if seen % 2 == 0 {
            return;
        }
        // One copy of bounded length; but who is stopped in it keeps us until it goes on or ends.
        while process::has_threads(self.pid) {
            for _ in 0..PATIENCE {
                if reaching.load(Ordering::Acquire) != seen {
                    return;
                }
                process::yield_now();
            }
        }
    }
}

impl Shm {
    /// See [`crate::transport::Iface::epoch`].
    pub(crate) fn epoch(&self, peer: PeerId) -> Option<u32> {
        let link = self.inbound_of(peer).filter(|link| link.reaches)?;
        Some(link.consumer.memory().atomic(EPOCH)?.load(Ordering::Relaxed) as u32)
    }

    /// See [`crate::transport::Iface::expose`]: whoever knows the epoch needs nothing else.
    pub(crate) fn expose(&self, peer: PeerId, (reads, writes): (bool, bool)) -> Exposed {
        match self.epoch(peer) {
            Some(epoch) => {
                Exposed::Yes(Exposure { epoch, keys: None, reads, writes, echoes: true })
            }
            None => Exposed::No,
        }
    }

    /// See [`crate::transport::Iface::revoke`].
    pub(crate) fn revoke(&self, peer: PeerId) {
        if let Some(link) = self.inbound_of(peer) {
            link.end_reaching();
        }
    }

    /// See [`crate::transport::Iface::reach`].
    pub(crate) fn reach(
        &self,
        peer: PeerId,
        spot: &Spot,
        local: &SegmentList,
        reads: bool,
    ) -> Result<Reached, SendError> {
        const STALE: SendError = SendError::Unreachable(Errno(libc::ESTALE));
        let link = self.out(peer).filter(|link| !link.producer.consumer_closed()).ok_or(STALE)?;
        let memory = link.producer.memory();
        let (Some(now), Some(reaching)) = (memory.atomic(EPOCH), memory.atomic(REACHING)) else {
            return Err(STALE);
        };
        reaching.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let moved = if now.load(Ordering::SeqCst) as u32 != spot.epoch {
            Err(STALE)
        } else if reads {
            self.get(peer, local, &[spot.range])
        } else {
            self.put(peer, local, &[spot.range])
        };
        reaching.fetch_add(1, Ordering::Release);
        moved.map(Reached::Moved)
    }
}
