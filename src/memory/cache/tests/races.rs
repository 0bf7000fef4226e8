//! The races of `mod.rs`, each with all threads stopped at the critical point.

use super::device::{Copying, Device};
use super::memory::{advise, fill, map, map_over, word};
use super::process::alone;
use super::{PAGE, PLENTY, cache_of, own_monitor};
use crate::memory::cache::monitor::{Change, Subscriber, Watched};
use crate::memory::cache::{Access, Cache, Monitor, Span};
use crate::sys::mappings::Mappings;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

const LEN: usize = 4 * PAGE;

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + crate::patience::seconds(10);
    while !done() {
        assert!(Instant::now() < end, "waited too long until {what}");
        std::thread::yield_now();
    }
}

/// A cache with a monitor of its own, and memory that is registered and filled with 1.
fn set_up() -> Option<(Arc<Monitor>, Copying, Cache<Copying>, usize)> {
    let monitor = own_monitor()?;
    let device = Copying::new();
    let cache = cache_of(device.clone(), Some(monitor.clone()));
    let addr = map(LEN);
    fill(addr, LEN, 1);
    drop(cache.get(addr, LEN, Access::READ).unwrap());
    assert_eq!(cache.statistics().entries, 1);
    Some((monitor, device, cache, addr))
}

fn sees(device: &Copying, cache: &Cache<Copying>, addr: usize, stamp: u64) {
    let lease = cache.get(addr, LEN, Access::READ).unwrap();
    assert_eq!(word(addr), stamp);
    assert_eq!(device.word(lease.handle(), addr), stamp, "the device has what was there before");
}

#[test]
fn a_change_that_is_not_yet_read_hides_all() {
    let Some((monitor, device, cache, addr)) = set_up() else { return };
    let other = map(LEN);
    fill(other, LEN, 7);
    drop(cache.get(other, LEN, Access::READ).unwrap());
    let stalled = monitor.stall();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| map_over(addr, LEN));
        // The new pages are there long before mmap returns, as they would be if another thread had mapped them after a
        // munmap.
        until("new pages are there", || word(addr) == 0);
        fill(addr, LEN, 2);
        assert!(!thread.is_finished() && monitor.is_changing());
        // Both sends wait for the lock that this test holds. They would wait in the same way for a monitor's thread
        // that lost its processor while it read, and continue when it does.
        let (cache, device) = (&cache, &device);
        let send = scope.spawn(move || sees(device, cache, addr, 2));
        let send_other = scope.spawn(move || sees(device, cache, other, 7));
        std::thread::sleep(Duration::from_millis(20));
        drop(stalled);
        send.join().unwrap();
        send_other.join().unwrap();
        thread.join().unwrap();
    });
    assert!(cache.statistics().invalidations >= 1);
    until("nobody is on the way", || !monitor.is_changing());
    sees(&device, &cache, addr, 2);
}

/// A subscriber that comes before the cache. It stops the monitor's thread when that has read an event of which the
/// cache does not know yet.
struct Gate {
    armed: AtomicBool,
    reached: mpsc::Sender<()>,
    go_on: Mutex<mpsc::Receiver<()>>,
}

impl Subscriber for Gate {
    fn on_change(&self, _: Span, _: Change) {
        if self.armed.swap(false, SeqCst) {
            self.reached.send(()).unwrap();
            self.go_on.lock().unwrap().recv_timeout(crate::patience::seconds(10)).unwrap();
        }
    }

    fn needs(&self, _: Span) -> bool {
        false
    }

    fn has_vigils(&self) -> bool {
        false
    }

    fn end_void(&self) {}
}

#[test]
fn a_change_that_is_read_but_not_applied_is_waited_for() {
    let Some(monitor) = own_monitor() else { return };
    let ((reached, at_gate), (open, go_on)) = (mpsc::channel(), mpsc::channel());
    let gate = Gate { armed: AtomicBool::new(false), reached, go_on: Mutex::new(go_on) };
    let gate = Arc::new(gate);
    let subscriber: Arc<dyn Subscriber> = gate.clone();
    monitor.subscribe(subscriber.clone());
    let device = Copying::new();
    let cache = cache_of(device.clone(), Some(monitor.clone()));
    let addr = map(LEN);
    fill(addr, LEN, 1);
    sees(&device, &cache, addr, 1);
    gate.armed.store(true, SeqCst);
    map_over(addr, LEN); // returns: the event was read
    at_gate.recv_timeout(crate::patience::seconds(10)).unwrap();
    until("nobody is on the way", || !monitor.is_changing());
    assert_eq!(cache.statistics().entries, 1, "the cache does not know yet");
    fill(addr, LEN, 2);
    std::thread::scope(|scope| {
        let send = scope.spawn(|| sees(&device, &cache, addr, 2));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!send.is_finished(), "it has to wait");
        open.send(()).unwrap();
        send.join().unwrap();
    });
    monitor.unsubscribe(&subscriber);
}

#[test]
fn a_change_during_registration_keeps_it_from_the_list() {
    let Some(monitor) = own_monitor() else { return };
    let victim = Arc::new(AtomicUsize::new(0));
    let during = victim.clone();
    let device = Copying::with(
        usize::MAX,
        false,
        Some(Box::new(move |span| {
            if during.swap(0, SeqCst) == span.start {
                map_over(span.start, span.len()); // another thread's work
            }
        })),
    );
    let cache = cache_of(device.clone(), Some(monitor.clone()));
    let addr = map(LEN);
    fill(addr, LEN, 1);
    victim.store(addr, SeqCst);
    let lease = cache.get(addr, LEN, Access::READ).unwrap();
    assert_eq!(device.word(lease.handle(), addr), 1, "what it was told to send");
    assert!(monitor.is_settled());
    assert_eq!(cache.statistics().entries, 0);
    drop(lease);
    until("it is deregistered", || device.registered_bytes() == 0);
    fill(addr, LEN, 2);
    sees(&device, &cache, addr, 2);
    assert_eq!(cache.statistics().entries, 1);
}

#[test]
fn what_is_being_discarded_is_not_kept() {
    let Some((monitor, device, cache, addr)) = set_up() else { return };
    // The kernel reports a discard before it discards. A registration that is made in between must not be found again;
    // this test makes one.
    let stalled = monitor.stall();
    let told = std::thread::scope(|scope| {
        let thread = scope.spawn(|| assert!(advise(addr, LEN, libc::MADV_DONTNEED)));
        until("the thread is on the way", || monitor.is_changing());
        assert_eq!(word(addr), 1, "not yet discarded");
        drop(stalled);
        until("the cache knows", || cache.statistics().entries == 0);
        drop(cache.get(addr, LEN, Access::READ).unwrap());
        let told = cache.statistics().entries;
        thread.join().unwrap();
        told
    });
    assert_eq!(told, 0, "kept while it was being discarded");
    fill(addr, LEN, 2);
    sees(&device, &cache, addr, 2);
    until("its second is over", || {
        drop(cache.get(addr, LEN, Access::READ).unwrap());
        cache.statistics().entries == 1
    });
}

/// A cache stops watching a range that another cache, and another entry of its own, need.
#[test]
fn what_others_need_stays_watched() {
    let Some((monitor, device, cache, addr)) = set_up() else { return };
    let short = Copying::new();
    let limits = crate::memory::cache::Limits { count: 1, ..PLENTY };
    let little = Cache::new(short.clone(), Some(monitor.clone()), limits, Access::WRITE).unwrap();
    drop(little.get(addr + PAGE, PAGE, Access::READ).unwrap());
    let elsewhere = map(PAGE);
    fill(elsewhere, PAGE, 1);
    drop(little.get(elsewhere, PAGE, Access::READ).unwrap()); // evicts, and unwatches
    assert_eq!((little.statistics().entries, little.statistics().evictions), (1, 1));
    map_over(addr + PAGE, PAGE);
    until("the other cache is told", || cache.statistics().entries == 0);
    // The same within one cache: overlapping ranges, of which one is replaced by a wider one.
    fill(addr, LEN, 2);
    drop(cache.get(addr, 2 * PAGE, Access::READ).unwrap());
    drop(cache.get(addr + PAGE, 2 * PAGE, Access::READ).unwrap());
    drop(cache.get(addr + PAGE, 3 * PAGE, Access::READ).unwrap());
    assert_eq!(cache.statistics().entries, 2);
    until("the inner one is gone", || device.registered_bytes() == 5 * PAGE);
    map_over(addr + PAGE, PAGE);
    until("both are told", || cache.statistics().entries == 0);
    // A range that no cache needs is watched no longer: another monitor may watch it.
    fill(addr, LEN, 3);
    until("it is free", || {
        let third = Monitor::for_test(Mappings::open().unwrap()).unwrap();
        let others = cache_of(Copying::new(), Some(third));
        drop(others.get(elsewhere, PAGE, Access::READ).unwrap());
        let free = others.statistics().entries == 1;
        drop(little.get(addr, PAGE, Access::READ).unwrap()); // evicts `elsewhere`
        free
    });
}

#[test]
fn two_that_register_the_same_range_share_it_in_the_end() {
    let Some(monitor) = own_monitor() else { return };
    let meeting = std::sync::Barrier::new(4);
    let device = Copying::new();
    let cache = cache_of(device.clone(), Some(monitor));
    let addr = map(LEN);
    fill(addr, LEN, 1);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                meeting.wait();
                for _ in 0..100 {
                    sees(&device, &cache, addr, 1);
                }
            });
        }
    });
    let statistics = cache.statistics();
    assert_eq!((statistics.entries, device.registered_bytes()), (1, LEN));
    assert!(statistics.hits >= 396, "{statistics:?}");
}

/// Leases keep their registrations, whatever happens to the addresses or the cache.
#[test]
fn a_lease_outlives_its_memory_and_its_cache() {
    let Some((monitor, device, cache, addr)) = set_up() else { return };
    let lease = cache.get(addr, LEN, Access::READ).unwrap();
    map_over(addr, LEN);
    fill(addr, LEN, 2);
    sees(&device, &cache, addr, 2);
    assert_eq!(device.word(lease.handle(), addr), 1);
    let last = cache.get(addr, LEN, Access::READ).unwrap();
    drop(cache);
    assert_eq!(device.registered_bytes(), 2 * LEN);
    assert_eq!(device.word(lease.handle(), addr), 1);
    drop(lease);
    assert_eq!(device.registered_bytes(), LEN);
    assert_eq!(device.word(last.handle(), addr), 2);
    drop(monitor);
    drop(last);
    assert_eq!(device.registered_bytes(), 0);
}

/// The stack of the monitor's thread and a buffer of the application next to it are one mapping for the kernel. When
/// the thread ends, the C library discards its stack, and no thread is left to read the event.
#[test]
fn a_monitor_ends_even_if_its_own_stack_is_watched() {
    alone(
        "memory::cache::tests::races::a_monitor_ends_even_if_its_own_stack_is_watched",
        &[],
        || {
            let Some(monitor) = own_monitor() else { return };
            until("it sleeps on its stack", || stack_of("udrv-monitor").is_some());
            let stack = stack_of("udrv-monitor").unwrap();
            let page = Span::pages(stack, 1, PAGE).unwrap();
            assert_eq!(monitor.watch(page, || true), Ok(Watched::Yes));
            drop(monitor);
        },
    );
}

/// The stack address of the thread of this name, while it waits in the kernel.
fn stack_of(name: &str) -> Option<usize> {
    std::fs::read_dir("/proc/self/task").unwrap().flatten().find_map(|task| {
        let read = |what| std::fs::read_to_string(task.path().join(what)).unwrap_or_default();
        // The number of the system call and six arguments, then the stack pointer.
        let pointer = read("syscall").split_whitespace().nth(7)?.strip_prefix("0x")?.to_owned();
        (read("comm").trim() == name).then(|| usize::from_str_radix(&pointer, 16).ok())?
    })
}
