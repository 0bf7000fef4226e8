//! The cost of a hit, and the gain for an application that reuses its buffers.
//! `cargo test --release --lib cache::tests::figures -- --ignored --nocapture`

use super::device::{Copying, Device};
use super::memory::{advise, fill, map};
use super::uring::Ring;
use super::{PAGE, PLENTY, monitor};
use crate::memory::cache::{Access, Cache, Registrar};
use crate::sys::clock::now_ns;

/// The average time of one of `n` calls, ns: the least of 50 series.
fn least(n: u64, mut work: impl FnMut(u64)) -> u64 {
    let series = |_| {
        let begun = now_ns();
        (0..n).for_each(&mut work);
        (now_ns() - begun) / n
    };
    (0..50).map(series).min().unwrap()
}

#[test]
#[ignore = "a measurement"]
fn what_a_hit_costs() {
    let Some(monitor) = monitor() else { return };
    eprintln!(
        "the question to the kernel: {} ns",
        least(10_000, |_| assert!(monitor.is_settled()))
    );
    for entries in [1, 100, 1000, 10_000] {
        let cache = Cache::new(Nothing, Some(monitor.clone()), PLENTY, Access::WRITE).unwrap();
        let addr = map(2 * entries * PAGE);
        let at = |n: usize| addr + 2 * (n % entries) * PAGE;
        for n in 0..entries {
            drop(cache.get(at(n), PAGE, Access::READ).unwrap());
        }
        let cost = least(10_000, |n| {
            drop(cache.get(at(n as usize * 7919), PAGE, Access::READ).unwrap());
        });
        let statistics = cache.statistics();
        assert_eq!(statistics.registrations as usize, entries);
        eprintln!("{entries} entries: {cost} ns for a hit and its return");
    }
}

#[test]
#[ignore = "a measurement"]
fn the_cost_of_watching_for_a_thread_that_discards() {
    let Some(monitor) = monitor() else { return };
    let addr = map(PAGE);
    let discard = |_| assert!(advise(addr, PAGE, libc::MADV_DONTNEED));
    let unwatched = least(2000, discard);
    let cache = Cache::new(Nothing, Some(monitor), PLENTY, Access::WRITE).unwrap();
    // One mapping with another page, whose entry keeps it watched.
    let addr = map(2 * PAGE);
    drop(cache.get(addr + PAGE, PAGE, Access::READ).unwrap());
    assert_eq!(cache.statistics().entries, 1);
    let watched = least(200, |_| assert!(advise(addr, PAGE, libc::MADV_DONTNEED)));
    assert_eq!(cache.statistics().entries, 1);
    eprintln!("madvise of a page: {unwatched} ns, watched {watched} ns");
}

/// A device that registers nothing, at no cost.
struct Nothing;

impl Registrar for Nothing {
    type Handle = ();

    fn register(&self, _: usize, _: usize, _: Access) -> Result<(), crate::sys::Errno> {
        Ok(())
    }
}

/// Uses 16 buffers in turn, as a stencil code does, and a new one now and then.
fn reuse<R: Device>(what: &str, cache: &Cache<R>, pages: usize) {
    const SENDS: u64 = 20_000;
    let buffers: Vec<usize> = (0..16).map(|_| map(pages * PAGE)).collect();
    for addr in &buffers {
        fill(*addr, pages * PAGE, 1);
    }
    let begun = now_ns();
    for n in 0..SENDS {
        let addr = buffers[n as usize % buffers.len()];
        drop(cache.get(addr, pages * PAGE, Access::READ).unwrap());
    }
    let each = (now_ns() - begun) / SENDS;
    let s = cache.statistics();
    eprintln!(
        "{what}, {} KiB: {each} ns a send, hit rate {:.2} %, {} registrations, most pinned {} KiB",
        pages * PAGE / 1024,
        100.0 * s.hits as f64 / SENDS as f64,
        s.registrations,
        s.pinned_peak / 1024
    );
}

#[test]
#[ignore = "a measurement"]
fn reused_buffers_with_and_without() {
    let Some(monitor) = monitor() else { return };
    for pages in [16, 256] {
        for monitor in [Some(monitor.clone()), None] {
            let what = if monitor.is_some() { "cache" } else { "no cache" };
            let Some(ring) = Ring::new() else { return eprintln!("no io_uring") };
            let cache = Cache::new(ring, monitor.clone(), PLENTY, Access::WRITE).unwrap();
            reuse(&format!("io_uring, {what}"), &cache, pages);
            let cache = Cache::new(Copying::new(), monitor, PLENTY, Access::WRITE).unwrap();
            reuse(&format!("a copy, {what}"), &cache, pages);
        }
    }
}
