//! Vigils: watches on addresses for registrations that are not in the cache.

use super::device::Copying;
use super::memory::{advise, file, fill, map, map_as, map_over, remap, unmap};
use super::{PAGE, cache_of, own_monitor};
use crate::memory::cache::Vigil;
use crate::memory::cache::monitor::{Monitor, Watched};
use crate::memory::cache::span::Span;
use crate::sys::Errno;
use crate::sys::mappings::Mappings;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

const LEN: usize = 16 * PAGE;

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
        let begin = |at| -> Vigil<Copying> {
            // Another test may have discarded pages at these addresses.
            let end = Instant::now() + crate::patience::seconds(10);
            loop {
                match cache.watch_over(at + 100, LEN - 200) {
                    Some(vigil) => return vigil,
                    None => assert!(Instant::now() < end, "never watched"),
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        let (vigil, beside, again) = (begin(at), begin(other), begin(at));
        assert!(vigil.is_sound() && beside.is_sound() && again.is_sound());
        let before = cache.changes();
        drop(again);
        unmap(other + LEN - PAGE, PAGE);
        assert!(vigil.is_sound() && !beside.is_sound());
        assert_eq!(cache.changes(), before + 1);
        change(at);
        assert!(!vigil.is_sound(), "change {n}");
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
    assert!(cache.watch_over(shared, LEN).is_none());
    assert!(cache.watch_over(map(PAGE), 0).is_none());
    let gone = map(LEN);
    unmap(gone, LEN);
    assert!(cache.watch_over(gone, LEN).is_none());
    assert!(cache_of(Copying::new(), None).watch_over(map(LEN), LEN).is_none());
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
    assert!(cache.watch_over(at, LEN).is_none(), "its pages are being discarded");
    assert_eq!(other.watch(watched, || true), Err(Errno(libc::EBUSY)));
}
