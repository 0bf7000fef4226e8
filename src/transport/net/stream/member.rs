//! A descriptor that an epoll set watches for as long as it is open.

use crate::sys::Errno;
use crate::sys::late_set::LateSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The members of the epoll set that tokens name.
pub(super) const LISTENER: u64 = 0;
pub(super) const TO_PEER: u64 = 1 << 32;
pub(super) const FROM_PEER: u64 = 2 << 32;
pub(super) const STRANGER: u64 = 3 << 32;

#[cfg(test)]
thread_local! {
    /// For tests: as if the system had no memory for a member that comes back to the set.
    pub(super) static NONE_COMES_BACK: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Removes itself from its set when it is dropped: closing the descriptor alone does not do that while a forked child
/// has it too.
#[derive(Debug)]
pub(super) struct Member {
    fd: OwnedFd,
    set: Arc<LateSet>,
    token: u64,
    /// It is in the set; it is also watched for writing.
    present: bool,
    writable: bool,
}

impl Member {
    /// Watches `fd`. Errors: ENOMEM, ENOSPC.
    pub(super) fn new(fd: OwnedFd, set: &Arc<LateSet>, token: u64) -> Result<Self, Errno> {
        set.add(fd.as_fd(), token)?;
        Ok(Self { fd, set: set.clone(), token, present: true, writable: false })
    }

    /// As [`Self::new`], for one that is there as long as the set.
    pub(super) fn lasting(fd: OwnedFd, set: &Arc<LateSet>, token: u64) -> Result<Self, Errno> {
        set.add_lasting(fd.as_fd(), token)?;
        Ok(Self { fd, set: set.clone(), token, present: true, writable: false })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Changes its token in the set.
    pub(super) fn rename(&mut self, token: u64) {
        self.token = token;
        let _ = self.set.watch_writable(self.fd.as_fd(), token, self.writable);
    }

    /// Starts or stops watching for writing.
    pub(super) fn watch_writable(&mut self, on: bool) {
        if self.writable != on && self.set.watch_writable(self.fd.as_fd(), self.token, on).is_ok() {
            self.writable = on;
        }
    }

    /// Whether the set watches it.
    pub(super) fn is_present(&self) -> bool {
        self.present
    }

    /// Adds it to the set, or removes it for now. False: there is no memory to add it.
    pub(super) fn watch(&mut self, on: bool) -> bool {
        if on && !self.present {
            #[cfg(test)]
            if NONE_COMES_BACK.get() {
                return false;
            }
            self.present = self.set.add_lasting(self.fd.as_fd(), self.token).is_ok();
        } else if !on && self.present {
            self.set.remove(self.fd.as_fd());
            self.present = false;
        }
        self.present == on
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.watch(false);
    }
}
