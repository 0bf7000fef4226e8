//! Vigils: watches on addresses for registrations that are not in the cache.

use super::device::{Copy, Copying};
use super::memory::{advise, file, fill, map, map_as, map_over, remap, unmap};
use super::process::alone;
use super::{PAGE, cache_of, monitor, own_monitor};
use crate::memory::cache::monitor::{Monitor, Watched};
use crate::memory::cache::span::Span;
use crate::memory::cache::{Access, Cache, Registrar, Vigil, settle};
use crate::sys::biased::Biased;
use crate::sys::mappings::Mappings;
use crate::sys::{Errno, alarm};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const LEN: usize = 16 * PAGE;

/// A watch, as soon as there can be one: another test may have discarded pages at these addresses.
fn begin<R: Registrar>(cache: &Cache<R>, at: usize, len: usize) -> Vigil<R> {
    let end = Instant::now() + crate::patience::seconds(10);
    loop {
        match cache.watch_over(at, len) {
            Ok(vigil) => return vigil,
            Err(_) => assert!(Instant::now() < end, "never watched"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_vigil_sees_what_happens_to_its_addresses_and_nothing_else() {
    let Some(monitor) = own_monitor() else { return };
    let cache = cache_of(Copying::new(), Some(monitor.clone()));
    let changes: [fn(usize); 5] = [
        |at| unmap(at, LEN),
        |at| map_over(at + PAGE, PAGE),
        |at| unmap(at + LEN - PAGE, PAGE),
        |at| assert!(advise(at + PAGE, PAGE, libc::MADV_DONTNEED)),
        |at| assert!(remap(at, LEN, LEN / 2, 0).is_some()),
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let (at, other) = (map(LEN), map(LEN));
        fill(at, LEN, 1);
        let begin = |at| begin(&cache, at + 100, LEN - 200);
        let (vigil, beside, again) = (begin(at), begin(other), begin(at));
        let sound = |vigil: &Vigil<Copying>| monitor.is_settled() && vigil.is_unchanged();
        assert!(sound(&vigil) && sound(&beside) && sound(&again));
        let before = cache.changes();
        drop(again);
        unmap(other + LEN - PAGE, PAGE);
        assert!(sound(&vigil) && !sound(&beside));
        assert_eq!(cache.changes(), before + 1);
        change(at);
        assert!(!sound(&vigil), "change {n}");
        assert_eq!(cache.changes(), before + 2);
        drop((vigil, beside));
        assert_eq!(cache.changes(), before + 2);
    }
}

#[test]
fn what_nobody_hears_of_is_not_watched() {
    let Some(monitor) = own_monitor() else { return };
    let cache = cache_of(Copying::new(), Some(monitor));
    let file = file(LEN);
    let shared = map_as(0, LEN, libc::MAP_SHARED, file.as_raw_fd()).unwrap();
    let watch = |cache: &Cache<Copying>, at, len| cache.watch_over(at, len).err().map(|why| why.0);
    assert_eq!(watch(&cache, shared, LEN), Some(libc::EOPNOTSUPP));
    assert_eq!(watch(&cache, map(PAGE), 0), Some(libc::EOPNOTSUPP));
    let unkept = cache_of(Copying::new(), None);
    assert_eq!(watch(&unkept, map(LEN), LEN), Some(libc::EOPNOTSUPP));
    let gone = map(LEN);
    unmap(gone, LEN);
    assert!(watch(&cache, gone, LEN).is_some());
}

/// Kernels before 6.14 let every user end a watch; a second watch by the same monitor can be ended with any kernel.
#[test]
fn a_vigil_that_does_not_begin_ends_no_other_watch() {
    let Some(monitor) = own_monitor() else { return };
    let cache = cache_of(Copying::new(), Some(monitor.clone()));
    let other = Monitor::for_test(Mappings::open().unwrap()).unwrap();
    let at = map(LEN);
    fill(at, LEN, 1);
    let watched = Span { start: at, end: at + LEN };
    assert_eq!(monitor.watch(watched, || true), Ok(Watched::Yes));
    assert!(advise(at, PAGE, libc::MADV_DONTNEED) && monitor.is_settled());
    let why = cache.watch_over(at, LEN).err();
    assert_eq!(why, Some(Errno(libc::EAGAIN)), "its pages are being discarded");
    assert_eq!(other.watch(watched, || true), Err(Errno(libc::EBUSY)));
}

/// What bars memory from being watched passes: a hole is filled, and a discard is long ago.
#[test]
fn memory_that_could_not_be_watched_is_watched_later() {
    // Another test could map memory into the hole.
    let name = "memory::cache::tests::vigils::memory_that_could_not_be_watched_is_watched_later";
    alone(name, &[], || {
        let Some(monitor) = own_monitor() else { return };
        let cache = cache_of(Copying::new(), Some(monitor.clone()));
        let at = map(LEN);
        fill(at, LEN, 1);
        let vigil = begin(&cache, at, LEN);
        assert!(advise(at + PAGE, PAGE, libc::MADV_DONTNEED));
        assert!(monitor.is_settled() && !vigil.is_unchanged());
        drop(vigil);
        let watch = || cache.watch_over(at, LEN).err();
        assert_eq!(watch(), Some(Errno(libc::EAGAIN)));
        drop(begin(&cache, at, LEN));
        unmap(at + PAGE, PAGE);
        assert_eq!(watch(), Some(Errno(libc::EAGAIN)));
        map_over(at + PAGE, PAGE);
        drop(begin(&cache, at, LEN));
    });
}

/// A device that says when it begins to end the registration of one address, and goes on when it is told to.
#[derive(Clone)]
struct Slow(Copying, usize, Arc<Barrier>);

struct Ends {
    barrier: Option<Arc<Barrier>>,
    _made: Copy,
}

impl Registrar for Slow {
    type Handle = Ends;

    fn register(&self, addr: usize, len: usize, access: Access) -> Result<Ends, Errno> {
        let _made = self.0.register(addr, len, access)?;
        let barrier = (addr == self.1).then(|| self.2.clone());
        Ok(Ends { barrier, _made })
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        if let Some(barrier) = &self.barrier {
            barrier.wait();
            barrier.wait();
        }
    }
}

/// The application replaces the pages of a region, and goes on: what it calls next ends the registration of the old pages
/// before it sends anything, even if the thread that deregisters is not there yet. Without a call that thread does.
#[test]
fn what_has_changed_is_reached_no_more_once_the_application_goes_on() {
    // Other tests discard pages at these addresses, and then nothing is kept.
    let name = "memory::cache::tests::vigils::what_has_changed_is_reached_no_more_once_the_application_goes_on";
    alone(name, &[], || {
        let Some(monitor) = monitor() else { return };
        let (region, other) = (map(LEN), map(LEN));
        fill(region, LEN, 1);
        fill(other, LEN, 1);
        let barrier = Arc::new(Barrier::new(2));
        let device = Slow(Copying::new(), other, barrier.clone());
        let cache = cache_of(device.clone(), Some(monitor));
        let domain = Biased::new(false).answering(settle);
        // SAFETY: the lock stays here until it has left.
        unsafe { alarm::join(&raw const domain) };
        let expose = || {
            let vigil = begin(&cache, region, LEN);
            assert!(vigil.hold(device.register(region, LEN, Access::READ).unwrap()));
            vigil
        };
        let until_ended = |bytes| {
            let end = Instant::now() + crate::patience::seconds(10);
            while device.0.registered_bytes() > bytes {
                assert!(Instant::now() < end, "it never ends");
                std::thread::yield_now();
            }
        };

        let vigil = expose();
        map_over(region, LEN);
        until_ended(0);
        assert!(!vigil.is_unchanged());
        drop(vigil);

        drop(cache.get(other, LEN, Access::READ).unwrap());
        assert_eq!(cache.statistics().entries, 1);
        let vigil = expose();
        unmap(other, LEN);
        barrier.wait(); // the thread that deregisters is busy
        let before = device.0.registered_bytes();
        map_over(region, LEN);
        drop(domain.enter());
        assert_eq!(device.0.registered_bytes(), before - LEN);
        alarm::leave(&raw const domain);
        barrier.wait();
        drop(vigil);
        until_ended(0);
    });
}

/// What threads do elsewhere ends nothing, however long it takes.
#[test]
fn a_change_in_progress_elsewhere_ends_no_vigil() {
    let Some(monitor) = own_monitor() else { return };
    let cache = cache_of(Copying::new(), Some(monitor.clone()));
    let (at, other) = (map(LEN), map(LEN));
    fill(at, LEN, 1);
    let (vigil, beside) = (begin(&cache, at, LEN), begin(&cache, other, LEN));
    let stalled = monitor.stall();
    let thread = std::thread::spawn(move || unmap(other, LEN));
    while !monitor.is_changing() {
        std::thread::yield_now();
    }
    assert!(vigil.is_unchanged() && beside.is_unchanged());
    drop(stalled);
    thread.join().unwrap();
    assert!(monitor.is_settled() && vigil.is_unchanged() && !beside.is_unchanged());
}
