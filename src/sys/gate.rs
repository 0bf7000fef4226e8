//! The gate: a page that every copy between another process and this one touches first. Closing it stops all copies
//! that have not begun.
//!
//! process_vm_readv(2) and process_vm_writev(2) process their remote ranges in order and stop at the first inaccessible
//! one; they do not override the protection of a mapping (mm/process_vm_access.c: no FOLL_FORCE). So a copy that names
//! this page first moves nothing once [`Gate::close`] has returned, whenever its process continues.

use super::errno::Errno;
use super::process::page_size;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// A page of its own. A closed gate stays mapped until the process ends: a peer may still know its address.
#[derive(Debug)]
pub(crate) struct Gate {
    /// Peers read [0] to check whose memory this is; they may write [1].
    words: NonNull<[AtomicU64; 2]>,
    closed: AtomicBool,
}

// SAFETY: two atomic words, and a flag.
unsafe impl Send for Gate {}
// SAFETY: two atomic words, and a flag.
unsafe impl Sync for Gate {}

/// The address of the last gate: adjacent closed gates share one mapping.
static LAST: AtomicUsize = AtomicUsize::new(0);

impl Gate {
    /// An open gate whose first word is `name`. Errors: ENOMEM.
    pub(crate) fn new(name: u64) -> Result<Self, Errno> {
        let hint = match LAST.load(Ordering::Relaxed) {
            0 => 0,
            last => last + page_size(),
        };
        let (rw, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping; the address is only a hint.
        let page = unsafe {
            libc::mmap(std::ptr::without_provenance_mut(hint), page_size(), rw, flags, -1, 0)
        };
        if page == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        LAST.store(page.addr(), Ordering::Relaxed);
        let words = NonNull::new(page.cast::<[AtomicU64; 2]>()).ok_or(Errno(libc::ENOMEM))?;
        // SAFETY: the page mapped above, which is never unmapped.
        let [first, _] = unsafe { words.as_ref() };
        first.store(name, Ordering::Relaxed);
        Ok(Self { words, closed: AtomicBool::new(false) })
    }

    /// The address of the first word; the second follows.
    pub(crate) fn address(&self) -> u64 {
        self.words.as_ptr().expose_provenance() as u64
    }

    /// When this returns true, no copy can begin any more; copies that have begun continue. False: the kernel failed.
    pub(crate) fn close(&self) -> bool {
        #[cfg(test)]
        if STUCK.get() {
            return false;
        }
        let page = self.words.as_ptr().cast();
        // SAFETY: the page that `new` mapped; this process does not access it any more.
        let closed = unsafe { libc::mprotect(page, page_size(), libc::PROT_NONE) } == 0;
        if closed {
            self.closed.store(true, Ordering::Relaxed);
            // SAFETY: the same page; its contents are no longer needed.
            unsafe { libc::madvise(page, page_size(), libc::MADV_DONTNEED) };
        }
        closed
    }

    /// Copies may still begin.
    pub(crate) fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
thread_local! {
    /// For tests: as if the kernel had no memory to protect a page of this thread.
    pub(crate) static STUCK: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[cfg(test)]
mod tests {
    use super::super::cma::{self, Range};
    use super::super::process;
    use super::*;

    #[test]
    fn nothing_is_copied_through_a_closed_gate() {
        let gate = Gate::new(7).unwrap();
        let mut target = [1u8; 64];
        let mut copy = |with: u8, writes: bool| {
            let (mut word, mut bytes) = (0u64, [with; 64]);
            let range = |addr: usize, len| Range { addr: addr as u64, len };
            let local = [range((&raw mut word).addr(), 8), range((&raw mut bytes).addr(), 64)];
            let offset = if writes { 8 } else { 0 };
            let first = Range { addr: gate.address() + offset, len: 8 };
            let remote = [first, range((&raw mut target).addr(), 64)];
            let me = process::pid();
            // SAFETY: live locals, and a page of a gate.
            let moved = unsafe {
                if writes {
                    cma::write(me, &local, &remote)
                } else {
                    cma::read(me, &local, &remote)
                }
            };
            (moved, word, bytes[63], target[63])
        };
        assert_eq!(copy(9, false), (Ok(72), 7, 1, 1));
        assert_eq!(copy(9, true), (Ok(72), 0, 9, 9));
        assert!(gate.is_open() && gate.close() && !gate.is_open());
        assert_eq!(copy(5, true), (Err(Errno(libc::EFAULT)), 0, 5, 9));
        assert_eq!(copy(5, false), (Err(Errno(libc::EFAULT)), 0, 5, 9));
        let next = Gate::new(8).unwrap();
        assert_ne!(next.address(), gate.address(), "its address is never used again");
    }
}
