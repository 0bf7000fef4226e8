//! The limits of a cache, and what happens when there is no room.

use super::device::Copying;
use super::memory::{fill, map, map_over, unmap};
use super::process::{Without, alone};
use super::uring::Ring;
use super::{PAGE, cache_of, monitor, own_monitor};
use crate::memory::cache::{Access, BLOCK, Cache, Limits, Refusal, Registrar, Span};
use crate::memory::declared::declare;
use crate::sys::Errno;
use crate::telemetry::log::captured;

#[test]
fn the_oldest_goes_first() {
    let Some(monitor) = own_monitor() else { return };
    let device = Copying::new();
    let limits = Limits { count: 3, bytes: 8 * PAGE };
    let cache = Cache::new(device.clone(), Some(monitor), limits, Access::WRITE).unwrap();
    let addr = map(64 * PAGE);
    let get = |page: usize, pages: usize| {
        cache.get(addr + page * PAGE, pages * PAGE, Access::READ).unwrap()
    };
    for page in [0, 10, 20] {
        drop(get(page, 1));
    }
    drop(get(0, 1)); // 10 is the oldest now
    drop(get(30, 1));
    let before = cache.statistics();
    assert_eq!((before.entries, before.evictions), (3, 1));
    drop(get(0, 1));
    drop(get(20, 1));
    assert_eq!(cache.statistics().hits, before.hits + 2);
    drop(get(10, 1));
    assert_eq!(cache.statistics().hits, before.hits + 2, "it was 10 that went");
    // Bytes: seven pages leave room for one.
    drop(get(40, 7));
    let after = cache.statistics();
    assert_eq!((after.entries, after.entry_bytes), (2, 8 * PAGE as u64));
    assert_eq!(device.registered_bytes(), 8 * PAGE, "what went is deregistered");
    // Registrations in use are not removed: then other requests get their own.
    let leases = [get(40, 7), get(10, 1)];
    let alone = get(50, 1);
    assert_eq!((cache.statistics().entries, cache.statistics().uncached), (2, 1));
    drop(alone);
    assert_eq!(device.registered_bytes(), 8 * PAGE);
    drop(leases);
    // A registration larger than the limit is not kept at all.
    drop(get(0, 9));
    assert_eq!((cache.statistics().entries, cache.statistics().uncached), (2, 2));
}

/// A device that pages on demand, as far as the cache can see.
struct Following(Copying);

impl Registrar for Following {
    type Handle = <Copying as Registrar>::Handle;

    fn register(&self, addr: usize, len: usize, access: Access) -> Result<Self::Handle, Errno> {
        self.0.register(addr, len, access)
    }

    fn follows(&self) -> bool {
        true
    }
}

#[test]
fn what_follows_every_change_is_kept_without_a_monitor() {
    let device = Copying::new();
    let limits = Limits { count: 2, bytes: 8 * PAGE };
    let cache = Cache::new(Following(device.clone()), None, limits, Access::WRITE).unwrap();
    let addr = map(16 * PAGE);
    let get = |page: usize, pages: usize| {
        cache.get(addr + page * PAGE, pages * PAGE, Access::READ).unwrap()
    };
    drop(get(0, 1));
    map_over(addr, PAGE);
    drop(get(0, 1));
    assert_eq!((cache.statistics().hits, device.registrations()), (1, 1));
    assert!(cache.watch_over(addr, PAGE).is_ok_and(|vigil| vigil.is_unchanged()));
    // Limits hold, and what a wider one replaces is deregistered when its last lease ends.
    let lease = get(2, 1);
    drop(get(2, 2));
    drop(lease);
    drop(get(8, 1));
    assert_eq!((cache.statistics().entries, device.registered_bytes()), (2, 3 * PAGE));
    drop(cache);
    assert_eq!(device.registered_bytes(), 0);
}

#[test]
fn what_is_not_kept_is_registered_as_it_is_lent() {
    let device = Copying::new();
    let cache = cache_of(device.clone(), None);
    let addr = map(PAGE) + 5;
    let lease = cache.get(addr, 100, Access::READ).unwrap();
    let Span { start, end } = lease.handle().span;
    assert_eq!((start, end, lease.handle().access), (addr, addr + 100, Access::READ));
    drop(lease);
    assert_eq!(cache.watch_over(addr, 100).err(), Some(Errno(libc::EOPNOTSUPP)));
    assert_eq!((device.registered_bytes(), cache.statistics().uncached), (0, 1));
}

#[test]
fn a_full_device_gets_room_or_the_request_is_refused() {
    let Some(monitor) = own_monitor() else { return };
    let device = Copying::with(8 * PAGE, false, None);
    let cache = cache_of(device.clone(), Some(monitor));
    let addr = map(64 * PAGE);
    let get = |page: usize, pages: usize| cache.get(addr + page * PAGE, pages * PAGE, Access::READ);
    for page in 0..32 {
        drop(get(2 * page, 2).unwrap());
    }
    assert_eq!(cache.statistics().evictions, 28, "only as many as had to");
    let held: Vec<_> = (0..4).map(|n| get(2 * n, 2).unwrap()).collect();
    assert_eq!(get(20, 1).err(), Some(Refusal::NoRoom), "all is in use");
    assert_eq!(cache.statistics().refused, 1);
    drop(held);
    assert!(get(20, 8).is_ok());
    // A registration that the cache does not keep gets room too.
    let other =
        |pages| cache.beside(pages * PAGE, || device.register(addr, pages * PAGE, Access::READ));
    assert!(other(8).is_ok());
    assert_eq!(other(9).err(), Some(Errno(libc::ENOMEM)));
    drop(get(20, 1).unwrap());
    device.set_room(0);
    assert_eq!(get(40, 1).err(), Some(Refusal::NoRoom));
    assert_eq!((cache.statistics().entries, device.registered_bytes()), (0, 0));
}

#[test]
fn nonsense_is_refused() {
    let cache = cache_of(Copying::new(), monitor());
    assert_eq!(cache.get(4096, 0, Access::READ).err(), Some(Refusal::Nowhere));
    assert_eq!(cache.get(usize::MAX - 1, 10, Access::READ).err(), Some(Refusal::Nowhere));
    assert!(matches!(cache.get(4096, 10, Access::READ), Err(Refusal::Device(_))));
    let statistics = cache.statistics();
    assert_eq!((statistics.entries, statistics.pinned), (0, 0));
}

#[test]
fn without_a_monitor_nothing_is_kept() {
    let device = Copying::new();
    let none = Cache::new(device.clone(), monitor(), Limits { count: 0, bytes: 1 }, Access::WRITE);
    for cache in [cache_of(device.clone(), None), none.unwrap()] {
        let addr = map(4 * PAGE);
        fill(addr, 4 * PAGE, 1);
        let before = device.registrations();
        let leases: Vec<_> =
            (0..3).map(|_| cache.get(addr, 4 * PAGE, Access::READ).unwrap()).collect();
        assert_eq!(device.registrations() - before, 3);
        drop(leases);
        assert_eq!(device.registered_bytes(), 0);
        assert_eq!((cache.statistics().uncached, cache.statistics().entries), (3, 0));
    }
}

#[test]
fn a_process_may_have_many_caches() {
    let Some(monitor) = own_monitor() else { return };
    let addr = map(PAGE);
    let caches: Vec<_> =
        (0..100).map(|_| cache_of(Copying::new(), Some(monitor.clone()))).collect();
    for cache in &caches {
        drop(cache.get(addr, PAGE, Access::READ).unwrap());
        drop(cache.get(addr, PAGE, Access::READ).unwrap());
        assert_eq!(cache.statistics().hits, 1);
    }
    map_over(addr, PAGE);
    assert!(monitor.is_settled());
    assert!(caches.iter().all(|cache| cache.statistics().invalidations == 1));
}

#[test]
fn without_a_thread_nothing_is_kept_and_the_log_says_so() {
    alone(
        "memory::cache::tests::limits::without_a_thread_nothing_is_kept_and_the_log_says_so",
        &[Without::Root],
        || {
            let Some(monitor) = own_monitor() else { return };
            captured::begin();
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: a live local.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &none) }, 0);
            let cache = cache_of(Copying::new(), Some(monitor));
            drop(cache.get(map(PAGE), PAGE, Access::READ).unwrap());
            assert_eq!(cache.statistics().uncached, 1);
            let lines = captured::lines_with("(thread: ");
            assert!(matches!(&lines[..], [line] if !line.contains("sysctl")), "{lines:?}");
        },
    );
}

#[test]
fn a_buffer_is_registered_with_its_region() {
    let Some(monitor) = own_monitor() else { return };
    let (room, device) = (64 * BLOCK, Copying::new());
    let limits = Limits { count: 100, bytes: room };
    let cache = Cache::new(device.clone(), Some(monitor), limits, Access::WRITE).unwrap();
    let get = |addr: usize, len: usize| cache.get(addr, len, Access::READ).unwrap();
    // Two blocks; the region is the second half of the first and the first half of the second.
    let middle = map(4 * BLOCK).next_multiple_of(BLOCK) + BLOCK;
    let region = declare(middle - BLOCK / 2 + 100, BLOCK);
    drop(get(middle - 3 * PAGE, PAGE));
    assert_eq!(device.registered_bytes(), BLOCK / 2, "up to the end of the block");
    for page in 1..100 {
        drop(get(middle - page * PAGE, PAGE));
    }
    assert_eq!((device.registrations(), cache.statistics().hits), (1, 99));
    drop(get(middle + BLOCK / 4, PAGE));
    assert_eq!(device.registered_bytes(), BLOCK + PAGE, "and up to the end of the region");
    drop(get(middle + BLOCK / 2, BLOCK));
    assert_eq!(device.registrations(), 3, "what lies beside the region is for itself");
    drop(region);
    let closed = map(BLOCK);
    drop(declare(closed, BLOCK));
    let before = device.registered_bytes();
    drop(get(closed, PAGE));
    assert_eq!(device.registered_bytes(), before + PAGE, "a region that was closed is none");
}

#[test]
fn surroundings_that_cannot_be_registered_cost_nothing() {
    let Some(monitor) = own_monitor() else { return };
    let device = Copying::with(8 * PAGE, false, None);
    let limits = Limits { count: 100, bytes: 64 * BLOCK };
    let cache = Cache::new(device.clone(), Some(monitor.clone()), limits, Access::WRITE).unwrap();
    let addr = map(2 * BLOCK).next_multiple_of(BLOCK);
    let _region = declare(addr, BLOCK);
    for page in 0..8 {
        drop(cache.get(addr + page * PAGE, PAGE, Access::READ).unwrap());
    }
    let statistics = cache.statistics();
    assert_eq!((statistics.entries, statistics.evictions, statistics.refused), (8, 0, 0));
    // Surroundings may use only a part of the limit.
    let device = Copying::new();
    let limits = Limits { count: 100, bytes: BLOCK };
    let cache = Cache::new(device.clone(), Some(monitor), limits, Access::WRITE).unwrap();
    drop(cache.get(addr, PAGE, Access::READ).unwrap());
    assert_eq!(device.registered_bytes(), PAGE);
    // If a part of the region was unmapped, the rest of it can still be used.
    let device = Copying::new();
    let cache = cache_of(device.clone(), own_monitor());
    let addr = map(2 * BLOCK).next_multiple_of(BLOCK);
    let _region = declare(addr, BLOCK);
    unmap(addr + 10 * PAGE, PAGE);
    assert!(cache.get(addr, PAGE, Access::READ).is_ok());
    assert_eq!(device.registered_bytes(), PAGE);
}

/// Whether deregistered memory can be registered again at once. Linux 6.1 takes its time.
fn gives_back(ring: &Ring, addr: usize, len: usize) -> bool {
    (0..8).all(|_| ring.register(addr, len, Access::READ).is_ok())
}

/// RLIMIT_MEMLOCK itself, which counts the memory that io_uring pins for a process without privileges.
#[test]
fn the_limit_on_locked_memory() {
    const ROOM: usize = 64;
    alone(
        "memory::cache::tests::limits::the_limit_on_locked_memory",
        &[Without::Root, Without::LockedMemory((ROOM * PAGE) as u64)],
        || {
            let Some(monitor) = monitor() else { return };
            let Some(ring) = Ring::new() else { return eprintln!("skipped: no io_uring") };
            let addr = map(16 * ROOM * PAGE);
            fill(addr, 16 * ROOM * PAGE, 1);
            if !gives_back(&ring, addr, ROOM * PAGE / 2) {
                return eprintln!("skipped: io_uring of this kernel does not give back at once");
            }
            let cache = cache_of(ring, Some(monitor));
            let get = |page: usize, pages: usize| {
                cache.get(addr + page * PAGE, pages * PAGE, Access::READ)
            };
            for round in 0..100 {
                drop(get((round * 8) % (15 * ROOM), 8).unwrap());
            }
            let statistics = cache.statistics();
            assert!(statistics.evictions > 50, "{statistics:?}");
            assert!(statistics.pinned_peak <= (ROOM * PAGE) as u64, "{statistics:?}");
            let held: Vec<_> = (0..100).map_while(|n| get(8 * n, 8).ok()).collect();
            assert!((1..=ROOM / 8).contains(&held.len()), "{}", held.len());
            assert_eq!(get(0, ROOM + 1).err(), Some(Refusal::NoRoom));
            drop(held);
            assert!(get(0, 8).is_ok());
        },
    );
}
