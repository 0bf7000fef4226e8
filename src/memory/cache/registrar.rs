//! What a cache asks of a device, and how much it keeps of it.

use crate::sys::Errno;

/// What a device may do with memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access(u8);

impl Access {
    /// Read it, for this process: a send.
    pub(crate) const READ: Self = Self(0);
    /// Write it, for this process: a receive.
    pub(crate) const WRITE: Self = Self(1);
    /// Write it for a peer.
    pub(crate) const REMOTE_WRITE: Self = Self(2);
    /// Read it for a peer.
    pub(crate) const REMOTE_READ: Self = Self(4);

    /// Whether all of `other` is allowed.
    pub(crate) fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both.
    pub(crate) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What registers memory with a device: a protection domain.
pub(crate) trait Registrar: Send + Sync + 'static {
    /// A registration; given back to the device on drop.
    type Handle: Send + Sync + 'static;

    /// Registers whole pages. Called without any lock. Errors: ENOMEM, EAGAIN (no room: the cache lets go
    /// of what is not in use, and tries again), others (it cannot be).
    fn register(&self, addr: usize, len: usize, access: Access) -> Result<Self::Handle, Errno>;
}

/// How much is kept. Zero of either keeps nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limits {
    /// Registrations.
    pub(crate) count: usize,
    /// Their bytes.
    pub(crate) bytes: usize,
}
