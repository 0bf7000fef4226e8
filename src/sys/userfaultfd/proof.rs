//! Tests the properties that the registration cache relies on with pages of its own, because a kernel or a sandbox may
//! differ: each change is reported, to the exact page; [`Userfaultfd::is_changing`] is true before that, and stays true
//! while another change is under way (before Linux 5.15 the first to end would hide the others).

use super::super::clock::now_ns;
use super::super::errno::{Errno, Result};
use super::super::event::{block_signals, wait_readable};
use super::super::process::page_size;
use super::super::valgrind;
use super::{Event, Userfaultfd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle};

const LIMIT_NS: u64 = 5_000_000_000;
const STACK: usize = 64 * 1024;
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const NO: Errno = Errno(libc::ENOTSUP);

impl Userfaultfd {
    /// Opens a descriptor in the way that this process may. Faults of system calls are not requested, so no
    /// privilege is needed. Errors: EPERM, EACCES (forbidden by a sandbox, or an old kernel), ENOSYS, EINVAL
    /// (a kernel without the features), ENOTSUP (it was tested, and does not behave as needed), EMFILE, ENFILE,
    /// ENOMEM; EDEADLK under valgrind, where a thread that unmaps would keep the reader from running.
    pub(crate) fn open() -> Result<Self> {
        if valgrind::runs_us() {
            return Err(Errno(libc::EDEADLK));
        }
        prove(Self::unproven()?)
    }
}

/// Returns `watcher` if it works. Errors: those of registering; ENOTSUP if its reports differ from the
/// changes; EAGAIN, ENOMEM without a thread or memory. Takes about 300 µs.
fn prove(watcher: Userfaultfd) -> Result<Userfaultfd> {
    let (page, done) = (page_size(), AtomicBool::new(false));
    let base = map(8 * page)?;
    let proved = std::thread::scope(|scope| {
        let told = tells_each(&watcher, base, scope, &done);
        match told.and_then(|()| counts_all(&watcher, base + 5 * page, scope)) {
            Ok(()) => Ok(watcher),
            Err(error) => {
                drop(watcher); // before the scope waits for its threads: they may wait for a reader
                Err(error)
            }
        }
    });
    // Other memory may be mapped by now where the first thread has removed two pages.
    let rest: &[_] = if done.into_inner() { &[(0, 1), (2, 1), (4, 4)] } else { &[(0, 8)] };
    rest.iter().for_each(|(first, count)| unmap(base + first * page, count * page));
    proved
}

/// One thread discards, moves and unmaps the second of five pages; each must be reported. It removes the fourth too.
fn tells_each<'scope>(
    watcher: &Userfaultfd,
    base: usize,
    scope: &'scope Scope<'scope, '_>,
    done: &'scope AtomicBool,
) -> Result<()> {
    let page = page_size();
    let (from, to) = (base + page, base + 3 * page);
    watcher.register(from, from + page)?;
    let thread = spawn(scope, move || {
        // SAFETY: pages of `prove`, which this thread alone uses. After the move `from` is not used.
        unsafe {
            libc::madvise(at(from), page, libc::MADV_DONTNEED);
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            if libc::mremap(at(from), page, page, flags, at(to)) == libc::MAP_FAILED {
                libc::munmap(at(from), page);
            }
            libc::munmap(at(to), page);
        }
        done.store(true, Ordering::Release);
    })?;
    let mut wanted = [
        (Event::Discarded { start: from, end: from + page }, false),
        (Event::Moved { from, to, len: page }, false),
        (Event::Unmapped { start: to, end: to + page }, false),
    ];
    let end = now_ns() + LIMIT_NS;
    loop {
        let ended = done.load(Ordering::Acquire);
        let readable = matches!(wait_readable(watcher.fd(), if ended { 0 } else { 10 }), Ok(true));
        if now_ns() > end {
            return Err(NO);
        }
        if readable {
            let changing = watcher.is_changing();
            let mut event = [Event::Other(0)];
            let read = watcher.read(&mut event) == Ok(1);
            for (wanted, seen) in &mut wanted {
                *seen |= read && changing && event == [*wanted];
            }
        } else if ended {
            break;
        }
    }
    let _ = thread.join();
    if wanted.iter().all(|(_, seen)| *seen) && !watcher.is_changing() { Ok(()) } else { Err(NO) }
}

/// Two threads each map over a page, the first and the last of three, and the events are read one by one.
fn counts_all<'scope>(
    watcher: &Userfaultfd,
    base: usize,
    scope: &'scope Scope<'scope, '_>,
) -> Result<()> {
    let page = page_size();
    let end = now_ns() + LIMIT_NS;
    let mut threads = Vec::new();
    for address in [base, base + 2 * page] {
        word(address).store(1, Ordering::Relaxed);
        watcher.register(address, address + page)?;
        let thread = spawn(scope, move || {
            // SAFETY: a page of `prove`, which stays mapped until this thread has ended.
            unsafe {
                libc::mmap(at(address), page, READ_WRITE, ANONYMOUS | libc::MAP_FIXED, -1, 0)
            };
        })?;
        threads.push((address, thread));
    }
    // Once the new pages are mapped, both changes are under way.
    while threads.iter().any(|(address, _)| word(*address).load(Ordering::Relaxed) != 0) {
        if now_ns() > end {
            return Err(NO);
        }
        super::super::process::yield_now();
    }
    while !threads.is_empty() {
        let _ = wait_readable(watcher.fd(), 10);
        let mut event = [Event::Other(0)];
        if watcher.is_changing() && watcher.read(&mut event) == Ok(1) {
            let [event] = event;
            let told = |address| event == Event::Unmapped { start: address, end: address + page };
            let place = threads.iter().position(|(address, _)| told(*address)).ok_or(NO)?;
            let _ = threads.swap_remove(place).1.join();
            if watcher.is_changing() == threads.is_empty() {
                return Err(NO);
            }
        } else if now_ns() > end {
            return Err(NO);
        }
    }
    Ok(())
}

fn at(address: usize) -> *mut libc::c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

/// The first word of a page of [`counts_all`], which stays mapped while it is used.
fn word<'a>(address: usize) -> &'a AtomicU32 {
    // SAFETY: aligned, mapped, and only reached through atomics.
    unsafe { &*at(address).cast() }
}

/// Pages for the test alone.
fn map(len: usize) -> Result<usize> {
    // SAFETY: a new private mapping at an address of the kernel's choice.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, READ_WRITE, ANONYMOUS, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    Ok(base.expose_provenance())
}

fn unmap(address: usize, len: usize) {
    // SAFETY: only called with pages of `map` that are still mapped and no longer used.
    unsafe { libc::munmap(at(address), len) };
}

fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, ()>> {
    let quietly = || {
        block_signals();
        work();
    };
    Ok(Builder::new().stack_size(STACK).spawn_scoped(scope, quietly)?)
}
