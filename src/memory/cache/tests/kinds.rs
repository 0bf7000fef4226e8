//! Each kind of memory, and each way to change it: the device must see the same bytes as the application.

use super::device::{Copying, Device};
use super::memory::{ANON, advise, file, fill, map, map_as, map_over, protect, remap, unmap, word};
use super::uring::Ring;
use super::{PAGE, cache_of, monitor, own_monitor};
use crate::memory::cache::monitor::Watched;
use crate::memory::cache::{Access, Cache, Monitor, Span};
use crate::sys::Errno;
use crate::sys::mappings::Mappings;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LEN: usize = 16 * PAGE;

struct Bench<R: Device> {
    device: R,
    cache: Cache<R>,
    monitor: Arc<Monitor>,
}

/// A bench with a device that pins, so that it sees later writes of the application.
fn pinning() -> Option<Bench<Ring>> {
    let Some(device) = Ring::new() else {
        eprintln!("skipped: no io_uring");
        return None;
    };
    Some(Bench::new(device, own_monitor()?))
}

/// A bench with a device that takes any memory.
fn copying() -> Option<Bench<Copying>> {
    Some(Bench::new(Copying::new(), own_monitor()?))
}

impl<R: Device + Clone> Bench<R> {
    fn new(device: R, monitor: Arc<Monitor>) -> Self {
        Self { device: device.clone(), cache: cache_of(device, Some(monitor.clone())), monitor }
    }

    /// Sends the range and compares both ends of each page.
    fn check(&self, addr: usize, len: usize) {
        let lease = self.cache.get(addr, len, Access::READ).unwrap();
        for page in (addr..addr + len).step_by(PAGE) {
            for at in [page, page + PAGE - 8] {
                let (there, here) = (self.device.word(lease.handle(), at), word(at));
                assert_eq!(there, here, "the device has other bytes at {at:#x}");
            }
        }
    }

    /// Sends the range twice. Returns whether the second send found the registration of the first.
    fn is_kept(&self, addr: usize, len: usize) -> bool {
        self.check(addr, len);
        let before = self.cache.statistics().hits;
        self.check(addr, len);
        self.cache.statistics().hits > before
    }

    /// Sends the range until it is kept: another test may have discarded pages at these addresses.
    fn keep(&self, addr: usize, len: usize) {
        let end = Instant::now() + crate::patience::seconds(10);
        while !self.is_kept(addr, len) {
            assert!(Instant::now() < end, "never kept");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Checks that a range is kept, changes it, and checks again.
    fn after(&self, addr: usize, len: usize, change: impl FnOnce()) {
        fill(addr, len, 1);
        self.keep(addr, len);
        let before = self.cache.statistics();
        change();
        assert!(self.monitor.is_settled());
        let after = self.cache.statistics();
        assert!(after.invalidations > before.invalidations, "nobody told of the change");
        assert!(after.entries < before.entries);
    }
}

impl Bench<Ring> {
    /// Checks that shared memory is kept, changes its pages in a way of which there is no event, and checks again.
    fn after_silence(&self, addr: usize, len: usize, change: &dyn Fn()) {
        fill(addr, len, 1);
        self.keep(addr, len);
        let before = self.cache.statistics();
        change();
        fill(addr, len, 2);
        self.check(addr, len);
        let after = self.cache.statistics();
        assert_eq!(after.invalidations, before.invalidations + 1);
        assert_eq!((after.hits, after.entries), (before.hits, before.entries));
        assert!(self.is_kept(addr, len));
    }
}

#[test]
fn unmapped() {
    let Some(bench) = pinning() else { return };
    let addr = map(LEN);
    bench.after(addr, LEN, || map_over(addr, LEN));
    fill(addr, LEN, 2);
    bench.check(addr, LEN);
    for (at, len) in [(addr, PAGE), (addr + 5 * PAGE, 2 * PAGE), (addr + LEN - PAGE, PAGE)] {
        bench.after(addr, LEN, || unmap(at, len));
        map_over(addr, LEN);
    }
    bench.after(addr, LEN, || unmap(addr, LEN));
    assert!(bench.cache.get(addr, LEN, Access::READ).is_err());
}

#[test]
fn moved() {
    let Some(bench) = pinning() else { return };
    let addr = map(LEN);
    let mut new = 0;
    bench.after(addr, LEN, || new = remap(addr, LEN, 64 * LEN, 0).unwrap());
    if new == addr {
        return eprintln!("skipped: it grew in place");
    }
    map_over(addr, LEN);
    fill(addr, LEN, 2);
    bench.check(addr, LEN);
    bench.check(new, LEN);
    bench.after(addr, LEN, || {
        assert!(remap(addr, LEN, LEN / 2, 0).is_some_and(|same| same == addr));
    });
    bench.check(addr, LEN / 2);
    const DONTUNMAP: i32 = 4; // MREMAP_DONTUNMAP, since Linux 5.7
    bench.after(new, LEN, || assert!(remap(new, LEN, LEN, DONTUNMAP).is_some()));
    fill(new, LEN, 3);
    bench.check(new, LEN);
    let target = map(LEN);
    bench.after(target, LEN, || {
        let fixed = libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE;
        let from = std::ptr::with_exposed_provenance_mut::<libc::c_void>(new);
        let to = std::ptr::with_exposed_provenance_mut::<libc::c_void>(target);
        // SAFETY: two mappings of this test.
        assert_eq!(unsafe { libc::mremap(from, LEN, LEN, fixed, to) }, to);
    });
    bench.check(target, LEN);
}

#[test]
fn discarded() {
    let Some(bench) = pinning() else { return };
    for advice in [libc::MADV_DONTNEED, libc::MADV_FREE] {
        let addr = map(LEN);
        bench.after(addr, LEN, || assert!(advise(addr + PAGE, PAGE, advice)));
        fill(addr, LEN, 2);
        bench.check(addr, LEN);
        assert!(!bench.is_kept(addr, LEN), "not in its first second");
        bench.keep(addr + 2 * PAGE, PAGE); // the pages that were not discarded
    }
}

/// A gap that the page names: if this fails, the kernel has an event for it, and the gap is closed.
#[test]
fn guard_pages_come_without_an_event() {
    const GUARD_INSTALL: i32 = 102; // MADV_GUARD_INSTALL and MADV_GUARD_REMOVE, since Linux 6.13
    const GUARD_REMOVE: i32 = 103;
    let Some(bench) = pinning() else { return };
    let addr = map(LEN);
    fill(addr, LEN, 1);
    bench.keep(addr, LEN);
    let before = bench.cache.statistics();
    if !advise(addr + PAGE, PAGE, GUARD_INSTALL) {
        return eprintln!("skipped: this kernel has no guard pages");
    }
    assert!(advise(addr + PAGE, PAGE, GUARD_REMOVE) && bench.monitor.is_settled());
    let after = bench.cache.statistics();
    assert_eq!(after.invalidations, before.invalidations, "the kernel tells of guard pages");
    let lease = bench.cache.get(addr, LEN, Access::READ).unwrap();
    let (there, here) = (bench.device.word(lease.handle(), addr + PAGE), word(addr + PAGE));
    assert_eq!((there, here), (word(addr), 0), "the device has the page that was discarded");
}

#[test]
fn huge_pages() {
    let Some(bench) = pinning() else { return };
    const HUGE: usize = 2 << 20;
    let base = map(3 * HUGE);
    let addr = base.next_multiple_of(HUGE);
    advise(addr, 2 * HUGE, libc::MADV_HUGEPAGE);
    bench.after(addr, 2 * HUGE, || assert!(advise(addr + PAGE, PAGE, libc::MADV_DONTNEED)));
    bench.check(addr, 2 * HUGE);
    bench.after(addr + HUGE, HUGE, || map_over(addr + HUGE, PAGE));
    bench.check(addr, 2 * HUGE);
    unmap(base, 3 * HUGE);
    match map_as(0, HUGE, ANON | libc::MAP_HUGETLB, -1) {
        Some(addr) => {
            bench.after(addr, HUGE, || assert!(advise(addr, HUGE, libc::MADV_DONTNEED)));
            fill(addr, HUGE, 2);
            bench.check(addr, HUGE);
            bench.after(addr + PAGE, HUGE / 2, || unmap(addr, HUGE));
            let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
            let addr = map_as(0, HUGE, shared, -1).unwrap();
            fill(addr, HUGE, 1);
            assert!(!bench.is_kept(addr, HUGE), "it has no mirror");
            unmap(addr, HUGE);
        }
        None => eprintln!("skipped: this machine has no hugetlb pages"),
    }
}

#[test]
fn the_break() {
    super::process::alone("memory::cache::tests::kinds::the_break", &[], || {
        let Some(bench) = pinning() else { return };
        let grow = |by: isize| {
            // SAFETY: this process runs only this test; malloc copes with a break that it did not move.
            unsafe { libc::sbrk(by) }.expose_provenance()
        };
        let addr = grow(2 * LEN as isize).next_multiple_of(PAGE);
        bench.after(addr, LEN, || {
            grow(-(2 * LEN as isize));
        });
        grow(2 * LEN as isize);
        fill(addr, LEN, 2);
        bench.check(addr, LEN);
    });
}

#[test]
fn stacks_of_threads_that_end() {
    let Some(bench) = pinning() else { return };
    let mut seen = std::collections::HashMap::new();
    for stamp in 1..=20u64 {
        let bench = &bench;
        let addr = std::thread::scope(|scope| {
            let work = move || {
                let mut buffer = [0u8; 5 * PAGE];
                let addr = buffer.as_mut_ptr().expose_provenance().next_multiple_of(PAGE);
                fill(addr, 4 * PAGE, stamp);
                bench.check(addr, 4 * PAGE);
                std::hint::black_box(&mut buffer);
                addr
            };
            let thread = std::thread::Builder::new().stack_size(256 << 10);
            thread.spawn_scoped(scope, work).unwrap().join().unwrap()
        });
        *seen.entry(addr).or_insert(0) += 1;
    }
    assert!(seen.values().any(|times| *times > 1), "no stack was used again: {seen:?}");
}

/// A registration of a range with a hole is not kept: the kernel would not watch what is mapped into the hole later.
#[test]
fn holes() {
    // Another test could map memory into the hole.
    super::process::alone("memory::cache::tests::kinds::holes", &[], || {
        let Some(monitor) = own_monitor() else { return };
        let addr = map(3 * PAGE);
        unmap(addr + PAGE, PAGE);
        for (what, start, pages) in [("middle", 0, 3), ("end", 0, 2), ("beginning", 1, 2)] {
            let start = addr + start * PAGE;
            let span = Span { start, end: start + pages * PAGE };
            assert_eq!(monitor.watch(span, || true), Ok(Watched::No), "{what}");
        }
    });
}

/// No event reports changes of files: no registration of private copies of them is kept.
#[test]
fn files_and_segments() {
    let Some(bench) = copying() else { return };
    let memfd = file(LEN);
    let on_disk = std::fs::File::options().read(true).open(std::env::current_exe().unwrap());
    let disk = on_disk.unwrap();
    let (private, shared) = (libc::MAP_PRIVATE, libc::MAP_SHARED);
    for (what, flags, fd) in [
        ("private memfd", private, memfd.as_raw_fd()),
        ("private file", private, disk.as_raw_fd()),
        ("shared file", shared, disk.as_raw_fd()),
    ] {
        let readable = |at| {
            // SAFETY: a new mapping, or one over a mapping of this test.
            let got = unsafe {
                let over = if at == 0 { 0 } else { libc::MAP_FIXED };
                let at = std::ptr::with_exposed_provenance_mut(at);
                libc::mmap(at, LEN, libc::PROT_READ, flags | over, fd, 0)
            };
            assert_ne!(got, libc::MAP_FAILED);
            got.expose_provenance()
        };
        let addr = readable(0);
        assert!(!bench.is_kept(addr, LEN), "{what}");
        // Anonymous memory next to it, in one request.
        let both = map(2 * LEN);
        readable(both + LEN);
        assert!(!bench.is_kept(both + LEN - PAGE, 2 * PAGE), "{what}, in part");
        bench.keep(both, LEN);
        unmap(both, 2 * LEN);
        unmap(addr, LEN);
    }
    assert!(bench.monitor.is_settled());
    assert_eq!(bench.cache.statistics().entries, 0);
    // SAFETY: a new segment, attached at an address that the kernel chooses, which ends with its last user.
    let (id, segment) = unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, LEN, 0o600 | libc::IPC_CREAT);
        let segment = libc::shmat(id, std::ptr::null(), 0);
        libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut());
        (id, segment)
    };
    if id < 0 {
        return eprintln!("skipped: no System V memory here");
    }
    fill(segment.expose_provenance(), LEN, 1);
    assert!(!bench.is_kept(segment.expose_provenance(), LEN), "System V");
    // SAFETY: attached above.
    unsafe { libc::shmdt(segment) };
}

#[test]
fn shared_memory() {
    let Some(bench) = pinning() else { return };
    let memfd = file(LEN);
    let anonymous = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    for (flags, fd) in [(libc::MAP_SHARED, memfd.as_raw_fd()), (anonymous, -1)] {
        let mapped = || map_as(0, LEN, flags, fd).unwrap();
        let addr = mapped();
        bench.after(addr, LEN, || assert!(advise(addr + PAGE, PAGE, libc::MADV_REMOVE)));
        fill(addr, LEN, 2);
        bench.check(addr, LEN);
        bench.after(addr + LEN / 2, LEN / 2, || unmap(addr + LEN - PAGE, PAGE));
        let (addr, mut new) = (mapped(), 0);
        bench.after(addr, LEN, || new = remap(addr, LEN, LEN / 2, libc::MREMAP_MAYMOVE).unwrap());
        bench.check(new, LEN / 2);
        // Private memory next to it, in one request, is another mapping.
        let both = map(2 * LEN);
        map_as(both + LEN, LEN, flags | libc::MAP_FIXED, fd).unwrap();
        fill(both, 2 * LEN, 1);
        assert!(!bench.is_kept(both + LEN - PAGE, 2 * PAGE));
        unmap(both, 2 * LEN);
    }
    // SAFETY: the descriptor of this test; mode and range as fallocate(2) has them.
    let punch = |at: i64, len: i64| unsafe {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        assert_eq!(libc::fallocate(memfd.as_raw_fd(), mode, at, len), 0);
    };
    let shorten = || {
        memfd.set_len(0).unwrap();
        memfd.set_len(LEN as u64).unwrap();
    };
    let addr = map_as(0, LEN, libc::MAP_SHARED, memfd.as_raw_fd()).unwrap();
    let changes: [&dyn Fn(); 3] =
        [&shorten, &|| punch(0, PAGE as i64), &|| punch((LEN - PAGE) as i64, PAGE as i64)];
    for change in changes {
        bench.after_silence(addr, LEN, change);
    }
    bench.keep(addr, LEN);
}

/// A process that shares the memory takes pages from it, and the kernel reports nothing.
#[test]
fn shared_memory_that_another_process_changes() {
    let Some(bench) = pinning() else { return };
    let addr = map_as(0, LEN, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1).unwrap();
    bench.after_silence(addr, LEN, &|| {
        // SAFETY: the child makes only system calls, and exits without returning.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let done = advise(addr + PAGE, PAGE, libc::MADV_REMOVE);
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!done)) };
        }
        let mut status = -1;
        // SAFETY: the child made above, and a live local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    });
    unmap(addr, LEN);
}

#[test]
fn files_are_known_by_the_text_of_an_older_kernel_too() {
    let Some(shared) = monitor() else { return };
    drop(shared);
    let mappings = Mappings::open().unwrap().by_text();
    let monitor = Monitor::for_test(mappings).unwrap();
    let bench = Bench::new(Copying::new(), monitor);
    let (memfd, addr) = (file(LEN), map(2 * LEN));
    fill(addr, LEN, 1);
    bench.keep(addr, LEN);
    map_as(addr + LEN, LEN, libc::MAP_PRIVATE | libc::MAP_FIXED, memfd.as_raw_fd()).unwrap();
    assert!(!bench.is_kept(addr + LEN - PAGE, 2 * PAGE));
    let shared = map_as(0, LEN, libc::MAP_SHARED, memfd.as_raw_fd()).unwrap();
    fill(shared, LEN, 1);
    bench.keep(shared, LEN);
}

#[test]
fn memory_that_may_only_be_read() {
    let Some(monitor) = own_monitor() else { return };
    let device = Copying::with(usize::MAX, true, None);
    let cache = cache_of(device.clone(), Some(monitor));
    let addr = map(LEN);
    fill(addr, LEN, 1);
    protect(addr, LEN, libc::PROT_READ);
    let lease = cache.get(addr, LEN, Access::READ).unwrap();
    assert!(!lease.handle().access.contains(Access::WRITE));
    assert_eq!(device.word(lease.handle(), addr), 1);
    assert!(cache.get(addr, LEN, Access::WRITE).is_err());
    assert!(cache.get(addr, LEN, Access::READ).is_ok());
    assert_eq!((cache.statistics().hits, cache.statistics().refused), (1, 1));
}

#[test]
fn what_somebody_else_watches_is_not_kept() {
    let Some(bench) = copying() else { return };
    let other = Monitor::for_test(Mappings::open().unwrap()).unwrap();
    let addr = map(LEN);
    fill(addr, LEN, 1);
    let others = cache_of(Copying::new(), Some(other));
    drop(others.get(addr, LEN, Access::READ).unwrap());
    assert_eq!(others.statistics().entries, 1);
    assert!(!bench.is_kept(addr, LEN));
    assert_eq!(bench.cache.statistics().uncached, 2);
    drop(others);
    bench.keep(addr, LEN);
}

/// Addresses of an entry are mapped anew, and another user watches them there. Kernels before 6.14 let every user end
/// that watch; a second watch by the same monitor can be ended with any kernel.
#[test]
fn what_somebody_else_watches_by_now_stays_watched() {
    let Some(bench) = copying() else { return };
    let other = Monitor::for_test(Mappings::open().unwrap()).unwrap();
    let addr = map(LEN);
    fill(addr, LEN, 1);
    let watched = Span { start: addr + LEN / 2, end: addr + LEN };
    let lease = bench.cache.get(addr, LEN, Access::READ).unwrap();
    map_over(watched.start, watched.len());
    protect(watched.start, watched.len(), libc::PROT_READ); // otherwise both parts become one mapping
    assert!(bench.monitor.is_settled());
    assert_eq!(bench.monitor.watch(watched, || true), Ok(Watched::Yes));
    drop(lease);
    drop(bench.cache); // deregisters all
    assert_eq!(other.watch(watched, || true), Err(Errno(libc::EBUSY)));
}
