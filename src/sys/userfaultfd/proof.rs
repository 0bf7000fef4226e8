//! Tries on pages of its own what a cache relies on, because a kernel or a sandbox may differ: that
//! each change is told, to the page, and that [`Userfaultfd::is_changing`] is true before.

use super::super::clock::now_ns;
use super::super::errno::{Errno, Result};
use super::super::event::{block_signals, wait_readable};
use super::super::process::page_size;
use super::{Event, Userfaultfd};
use std::sync::atomic::{AtomicBool, Ordering};

const LIMIT_NS: u64 = 2_000_000_000;
const STACK: usize = 64 * 1024;

/// Hands `watcher` back if it works. Errors: those of registering; ENOTSUP if it reports something
/// else than what happens; EAGAIN, ENOMEM without a thread or memory. Takes about 200 µs.
pub(super) fn prove(watcher: Userfaultfd) -> Result<Userfaultfd> {
    let page = page_size();
    let (rw, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new private mapping at an address of the kernel's choice.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), 5 * page, rw, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    let base = base.expose_provenance();
    let (from, to) = (base + page, base + 3 * page);
    let at = |address| std::ptr::with_exposed_provenance_mut::<libc::c_void>(address);
    // SAFETY: within the new mapping.
    unsafe { at(from).cast::<u8>().write(1) };

    let unmap = |pages: &[usize]| {
        for page_at in pages {
            // SAFETY: one page of the mapping above, which nobody else knows.
            unsafe { libc::munmap(at(base + page_at * page), page) };
        }
    };
    if let Err(error) = watcher.register(from, from + page) {
        unmap(&[0, 1, 2, 3, 4]);
        return Err(error);
    }
    let done = AtomicBool::new(false);
    let wanted = [
        Event::Discarded { start: from, end: from + page },
        Event::Moved { from, to, len: page },
        Event::Unmapped { start: to, end: to + page },
    ];
    std::thread::scope(|scope| {
        let change = || {
            block_signals();
            // SAFETY: pages of the mapping above. Once moved, `from` is no longer ours.
            unsafe {
                libc::madvise(at(from), page, libc::MADV_DONTNEED);
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                libc::mremap(at(from), page, page, flags, at(to));
                libc::munmap(at(to), page);
            }
            done.store(true, Ordering::Release);
        };
        let builder = std::thread::Builder::new().stack_size(STACK);
        let Ok(thread) = builder.spawn_scoped(scope, change) else {
            let _ = watcher.unregister(from, from + page);
            unmap(&[0, 1, 2, 3, 4]);
            return Err(Errno(libc::EAGAIN));
        };
        let seen = observe(&watcher, &done, wanted);
        if seen == [true; 3] {
            let _ = thread.join();
            unmap(&[0, 2, 4]);
            if !watcher.is_changing() {
                return Ok(watcher);
            }
        }
        drop(watcher); // before the thread is waited for: it may wait for a reader
        Err(Errno(libc::ENOTSUP))
    })
}

/// Reads until the thread is done; says which of `wanted` came while `is_changing` was true.
fn observe(watcher: &Userfaultfd, done: &AtomicBool, wanted: [Event; 3]) -> [bool; 3] {
    let mut seen = [false; 3];
    let end = now_ns() + LIMIT_NS;
    while now_ns() < end {
        let ended = done.load(Ordering::Acquire);
        if !matches!(wait_readable(watcher.fd(), if ended { 0 } else { 10 }), Ok(true)) {
            if ended {
                break;
            }
            continue;
        }
        let changing = watcher.is_changing();
        let mut event = [Event::Other(0)];
        if watcher.read(&mut event) == Ok(1) {
            for (seen, wanted) in seen.iter_mut().zip(wanted) {
                *seen |= changing && event == [wanted];
            }
        }
    }
    seen
}
