//! The interface of a cache to a device, and the cache's limits.

use crate::sys::Errno;

/// The access of a device to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access(u8);

impl Access {
    /// Local read: for sends.
    pub(crate) const READ: Self = Self(0);
    /// Local write: for receives.
    pub(crate) const WRITE: Self = Self(1);
    /// Write by a peer.
    pub(crate) const REMOTE_WRITE: Self = Self(2);
    /// Read by a peer.
    pub(crate) const REMOTE_READ: Self = Self(4);

    /// Whether this access includes all of `other`.
    pub(crate) fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both accesses together.
    pub(crate) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Registers memory with a device: a protection domain.
pub(crate) trait Registrar: Send + Sync + 'static {
    /// A registration, which ends on drop.
    type Handle: Send + Sync + 'static;

    /// Registers `len` bytes at `addr`: whole pages, if the registration is to be kept. Called without any lock. Errors: ENOMEM, EAGAIN (no room: the cache removes idle entries,
    /// and tries again); any other means that this memory cannot be registered.
    fn register(&self, addr: usize, len: usize, access: Access) -> Result<Self::Handle, Errno>;

    /// Whether a registration shows at any time what is mapped at its addresses then (on-demand paging): no change can
    /// make it stale.
    fn follows(&self) -> bool {
        false
    }

    /// Whether registrations are kept behind this interface, and found again for requests with the same access.
    fn shares(&self) -> bool {
        false
    }

    /// Ends registrations that are kept there and not in use, of at least `bytes` in all. False: there were none.
    fn let_go(&self, _bytes: usize) -> bool {
        false
    }

    /// How often a registration was found there, and how often not.
    fn found(&self) -> Option<(u64, u64)> {
        None
    }
}

/// Limits of a cache. If either is zero, nothing is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limits {
    /// Number of registrations.
    pub(crate) count: usize,
    /// Bytes of all registrations.
    pub(crate) bytes: usize,
}
