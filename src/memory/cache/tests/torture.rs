//! Threads that map, unmap, move, discard and fork while they send, on addresses that other threads take over at once.
//! Each send is compared with the application's view. UDRV_TEST_SECONDS sets the duration, and UDRV_TEST_SEED repeats
//! the choices of the threads (not their timing).

use super::device::{Copying, Device};
use super::memory::{
    ANON, advise, fill, map_as, map_free, map_over, protect, remap, set_word, unmap, word,
};
use super::process::{Without, alone};
use super::uring::Ring;
use super::{PAGE, monitor};
use crate::memory::cache::{Access, Cache, Lease, Limits, Refusal, Statistics};
use crate::sys::per_process::tests::in_child;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

const THREADS: u64 = 6;
const MOST: usize = 48;

/// Duration of each torture, s.
pub(super) fn seconds() -> u64 {
    number("UDRV_TEST_SECONDS").unwrap_or(5)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

#[derive(Clone, Copy)]
struct Buffer {
    addr: usize,
    pages: usize,
    /// The contents of each page.
    stamp: u64,
}

struct World<R: Device> {
    device: R,
    cache: Cache<R>,
    stamps: AtomicU64,
    sends: AtomicU64,
    refused: AtomicU64,
    changes: AtomicU64,
    forks: AtomicU64,
    unmovable: AtomicU64,
    /// An address that a thread is unmapping right now, and its pages.
    relay: Mutex<Option<(usize, usize)>>,
    relayed: AtomicU64,
    /// Counts the steps of all threads.
    pulse: AtomicUsize,
    stop: AtomicBool,
}

impl<R: Device> World<R> {
    fn stamp(&self) -> u64 {
        self.stamps.fetch_add(1, SeqCst) + 1
    }

    /// Sends a part of the buffer: the device must see the buffer's contents.
    fn send(&self, random: &mut Random, buffer: &mut Buffer) -> Option<Lease<R>> {
        let first = if random.chance(50) { 0 } else { random.below(buffer.pages) };
        let rest = buffer.pages - first;
        let pages = if random.chance(50) { rest } else { 1 + random.below(rest) };
        let addr = buffer.addr + first * PAGE;
        if R::LIVE && random.chance(50) {
            buffer.stamp = self.stamp();
            fill(buffer.addr, buffer.pages * PAGE, buffer.stamp);
        }
        let receives = R::LIVE && random.chance(30);
        let access = if receives { Access::REMOTE_WRITE } else { Access::READ };
        // It does not end with a page.
        let len = pages * PAGE - 16;
        let lease = match self.cache.get(addr, len, access) {
            Ok(lease) => lease,
            Err(Refusal::NoRoom) => {
                self.refused.fetch_add(1, SeqCst);
                return None;
            }
            Err(error) => panic!("{error:?}"),
        };
        for at in [addr, addr + (pages - 1) * PAGE, addr + random.below(pages) * PAGE] {
            let there = self.device.word(lease.handle(), at);
            assert_eq!(word(at), buffer.stamp, "the test itself is wrong at {at:#x}");
            assert_eq!(there, buffer.stamp, "stale data: the device has other bytes at {at:#x}");
        }
        if random.chance(10) {
            let all = self.device.shows(lease.handle(), addr, len);
            assert!(all, "stale data: the device has other bytes behind {addr:#x}");
        }
        if receives {
            let at = addr + random.below(pages) * PAGE;
            let news = self.stamp();
            self.device.receive(lease.handle(), at, news);
            assert_eq!(word(at), news, "the device wrote elsewhere, and not to {at:#x}");
            set_word(at, buffer.stamp);
        }
        self.sends.fetch_add(1, SeqCst);
        Some(lease)
    }

    fn new_buffer(&self, random: &mut Random) -> Buffer {
        let pages = 1 + random.below(MOST);
        let buffer =
            Buffer { addr: map_as(0, pages * PAGE, ANON, -1).unwrap(), pages, stamp: self.stamp() };
        fill(buffer.addr, pages * PAGE, buffer.stamp);
        buffer
    }

    /// Changes the buffer in a random way. `None`: it was unmapped.
    fn change(&self, random: &mut Random, buffer: Buffer) -> Option<Buffer> {
        self.changes.fetch_add(1, SeqCst);
        let Buffer { addr, pages, stamp } = buffer;
        let first = random.below(pages);
        let some = 1 + random.below(pages - first);
        let (part, part_len) = (addr + first * PAGE, some * PAGE);
        let fresh = |addr, pages| {
            if !R::LIVE {
                map_over(addr, pages * PAGE); // the device would not see later writes
            }
            let stamp = self.stamp();
            fill(addr, pages * PAGE, stamp);
            Some(Buffer { addr, pages, stamp })
        };
        match random.below(20) {
            0..=3 => unmap(addr, pages * PAGE),
            4..=6 => {
                // Unmaps the head or the tail.
                let keep = pages - some;
                if keep == 0 {
                    unmap(addr, pages * PAGE);
                } else if random.chance(50) {
                    unmap(addr, part_len);
                    return Some(Buffer { addr: addr + part_len, pages: keep, stamp });
                } else {
                    unmap(addr + keep * PAGE, part_len);
                    return Some(Buffer { pages: keep, ..buffer });
                }
            }
            7 | 8 => {
                let wanted = 1 + random.below(MOST);
                // A buffer that was mapped over in part may be several mappings: EFAULT.
                let Some(new) = remap(addr, pages * PAGE, wanted * PAGE, 0) else {
                    self.unmovable.fetch_add(1, SeqCst);
                    return Some(buffer);
                };
                return fresh(new, wanted);
            }
            9 => {
                let how = [libc::MADV_DONTNEED, libc::MADV_FREE][random.below(2)];
                assert!(advise(part, part_len, how));
                return fresh(addr, pages);
            }
            10..=12 => {
                map_over(part, part_len);
                return fresh(addr, pages);
            }
            13 => {
                protect(part, part_len, libc::PROT_READ);
                protect(part, part_len, libc::PROT_READ | libc::PROT_WRITE);
                return Some(buffer);
            }
            14..=17 => return self.relay(random, buffer),
            18 => {
                let mut bytes = vec![0u8; 4096 + random.below(1 << 20)]; // malloc, and its trimming
                let inside = bytes.as_mut_ptr().expose_provenance().next_multiple_of(PAGE);
                let room = bytes.as_mut_ptr().expose_provenance() + bytes.len() - inside;
                if let (true, pages @ 1.., stamp) = (R::LIVE, room / PAGE, self.stamp()) {
                    fill(inside, pages * PAGE, stamp);
                    self.send(random, &mut Buffer { addr: inside, pages, stamp });
                }
                std::hint::black_box(&mut bytes);
                return Some(buffer);
            }
            _ if random.chance(20) => {
                self.forks.fetch_add(1, SeqCst);
                assert!(in_child(|| {
                    fill(addr, pages * PAGE, u64::MAX);
                    let answer = self.cache.get(addr, PAGE, Access::READ).err();
                    unmap(addr, pages * PAGE);
                    answer == Some(Refusal::Forked)
                }));
                assert_eq!(word(addr), stamp);
                return Some(buffer);
            }
            _ => return Some(buffer),
        }
        None
    }

    /// Unmaps, while another thread waits for these addresses.
    fn relay(&self, random: &mut Random, buffer: Buffer) -> Option<Buffer> {
        let len = buffer.pages * PAGE;
        *self.relay.lock().unwrap() = Some((buffer.addr, buffer.pages));
        unmap(buffer.addr, len);
        self.take_over(random)
    }

    /// Takes addresses while they are being unmapped, before munmap has returned to the other thread.
    fn take_over(&self, random: &mut Random) -> Option<Buffer> {
        let (addr, pages) = self.relay.lock().unwrap().take()?;
        for _ in 0..2000 {
            if map_free(addr, pages * PAGE) {
                self.relayed.fetch_add(1, SeqCst);
                let mut buffer = Buffer { addr, pages, stamp: self.stamp() };
                fill(addr, pages * PAGE, buffer.stamp);
                self.send(random, &mut buffer);
                return Some(buffer);
            }
        }
        None
    }

    fn run(&self, seed: u64) {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let mut buffers: Vec<Buffer> = Vec::new();
        let mut leases = Vec::new();
        while !self.stop.load(SeqCst) {
            self.pulse.fetch_add(1, SeqCst);
            if buffers.len() < 4 {
                buffers.push(self.new_buffer(&mut random));
            }
            if let Some(buffer) = self.take_over(&mut random) {
                buffers.push(buffer);
            }
            let n = random.below(buffers.len());
            if random.chance(90) {
                let lease = self.send(&mut random, &mut buffers[n]);
                // Some transfers take long.
                leases.extend(lease.filter(|_| random.chance(10)));
                if leases.len() > 8 {
                    leases.remove(random.below(8));
                }
            } else {
                let buffer = buffers.swap_remove(n);
                buffers.extend(self.change(&mut random, buffer));
            }
            while buffers.len() > 12 {
                let buffer = buffers.swap_remove(0);
                unmap(buffer.addr, buffer.pages * PAGE);
            }
        }
        for buffer in buffers {
            unmap(buffer.addr, buffer.pages * PAGE);
        }
    }
}

/// Moves the break up and down and sends from there. Only in a process in which no other code does: malloc copes with a
/// break that others move up, and the threads here have arenas of their own.
fn move_the_break<R: Device>(world: &World<R>) {
    let mut random = Random(99);
    let grow = |by: isize| {
        // SAFETY: malloc copes with a break that others move, and its other users here have their own arenas.
        unsafe { libc::sbrk(by) }.expose_provenance()
    };
    while !world.stop.load(SeqCst) {
        let pages = 1 + random.below(MOST);
        let top = grow(0).next_multiple_of(PAGE);
        let by = (top - grow(0) + pages * PAGE) as isize;
        grow(by);
        let mut buffer = Buffer { addr: top, pages, stamp: world.stamp() };
        fill(top, pages * PAGE, buffer.stamp);
        for _ in 0..4 {
            world.send(&mut random, &mut buffer);
        }
        grow(-by);
        world.changes.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_micros(100));
    }
}

pub(super) fn torture<R: Device + Clone>(
    device: R,
    monitored: bool,
    limits: Limits,
) -> Option<Statistics> {
    let monitor = if monitored { Some(monitor()?) } else { None };
    let cache = Cache::new(device.clone(), monitor.clone(), limits, ALL).unwrap();
    let world = World {
        device,
        cache,
        stamps: AtomicU64::new(0),
        sends: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        changes: AtomicU64::new(0),
        forks: AtomicU64::new(0),
        unmovable: AtomicU64::new(0),
        relay: Mutex::new(None),
        relayed: AtomicU64::new(0),
        pulse: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
    };
    let first = number("UDRV_TEST_SEED").unwrap_or(1);
    std::thread::scope(|scope| {
        let world = &world;
        let mut threads: Vec<_> =
            (0..THREADS).map(|n| scope.spawn(move || world.run(first + n))).collect();
        threads.push(scope.spawn(move || move_the_break(world)));
        let end = Instant::now() + Duration::from_secs(seconds());
        let (mut last, mut since) = (0, Instant::now());
        while Instant::now() < end && !threads.iter().any(|thread| thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(50));
            let pulse = world.pulse.load(SeqCst);
            if pulse != last {
                (last, since) = (pulse, Instant::now());
            } else if since.elapsed() > crate::patience::seconds(20) {
                eprintln!("no thread has made a step for 20 s");
                std::process::abort();
            }
        }
        world.stop.store(true, SeqCst);
    });
    let statistics = world.cache.statistics();
    eprintln!(
        "{} sends, {} refused, {} changes ({} could not be moved), {} addresses taken over, {} forks in {} s: {statistics:?}",
        world.sends.load(SeqCst),
        world.refused.load(SeqCst),
        world.changes.load(SeqCst),
        world.unmovable.load(SeqCst),
        world.relayed.load(SeqCst),
        world.forks.load(SeqCst),
        seconds(),
    );
    let end = Instant::now() + crate::patience::seconds(20);
    while monitor.as_ref().is_some_and(|monitor| !monitor.is_settled()) {
        assert!(Instant::now() < end, "somebody is on the way for ever");
    }
    assert!(world.sends.load(SeqCst) > seconds()); // in an emulator on a busy machine
    let all = world.relayed.load(SeqCst) > 0 && world.forks.load(SeqCst) > 0;
    assert!(all || world.changes.load(SeqCst) < 1000, "one in a hundred changes is a fork");
    assert!(statistics.pinned_peak < 1 << 30, "{statistics:?}");
    let World { cache, .. } = world;
    drop(cache);
    Some(statistics)
}

const NAME: &str = "memory::cache::tests::torture::";
pub(super) const ALL: Access = Access::WRITE.union(Access::REMOTE_WRITE);
pub(super) const LIMITS: Limits = Limits { count: 24, bytes: 2 << 20 };

#[test]
fn a_device_that_copies() {
    alone(&format!("{NAME}a_device_that_copies"), &[], || {
        let device = Copying::new();
        let Some(statistics) = torture(device.clone(), true, LIMITS) else { return };
        assert!(statistics.hits > 0 && statistics.invalidations > 0 && statistics.evictions > 0);
        assert_eq!(device.registered_bytes(), 0);
    });
}

#[test]
fn a_device_that_pins() {
    alone(&format!("{NAME}a_device_that_pins"), &[], || {
        let Some(ring) = Ring::new() else { return eprintln!("skipped: no io_uring") };
        torture(ring, true, LIMITS);
    });
}

/// With the privileges of a container: user nobody, without userfaultfd, and little memory to lock.
#[test]
fn a_device_that_pins_where_little_is_allowed() {
    let without = [Without::Root, Without::Userfaultfd, Without::LockedMemory(6 << 20)];
    alone(&format!("{NAME}a_device_that_pins_where_little_is_allowed"), &without, || {
        assert!(monitor().is_none(), "userfaultfd is forbidden");
        let Some(ring) = Ring::new() else { return eprintln!("skipped: no io_uring") };
        let Some(statistics) = torture(ring, false, LIMITS) else { return };
        assert_eq!((statistics.hits, statistics.entries), (0, 0));
    });
}

/// Any user may watch the memory of its own processes.
#[test]
fn a_device_that_pins_for_nobody() {
    let without = [Without::Root, Without::LockedMemory(6 << 20)];
    alone(&format!("{NAME}a_device_that_pins_for_nobody"), &without, || {
        let Some(ring) = Ring::new() else { return eprintln!("skipped: no io_uring") };
        let Some(statistics) = torture(ring, true, LIMITS) else { return };
        assert!(statistics.hits > 0);
    });
}
