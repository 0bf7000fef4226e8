//! The cache with an RDMA device, which reads the data that it sends from the application's memory, and writes the data
//! that it receives there. Two of its ports are used, one of which has the application's registrations. Without a
//! device the tests are skipped, unless UDRV_TEST_RDMA=1 requires one; those with the rv module are skipped without that,
//! unless UDRV_TEST_RV=1 requires it.

use super::device::Device;
use super::memory::{fill, map, map_as, word};
use super::process::{Without, alone};
use super::torture::{ALL, LIMITS, torture};
use super::{PAGE, monitor};
use crate::memory::cache::{Access, Cache, Limits, Refusal, Registrar};
use crate::sys::Errno;
use crate::sys::verbs::{
    self, RcAddress, RcEvent, RcPort, RcQp, RcRequest, RcSettings, Registration,
};
use std::ptr::with_exposed_provenance as at;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// To the device, a peer that got no processor for long is dead: then a new connection is made (IBV_WC_RETRY_EXC_ERR).
const RETRIES_EXCEEDED: u32 = 12;

#[derive(Clone)]
pub(super) struct Rdma(Arc<Inner>);

struct Inner {
    registrar: verbs::Registrar,
    /// Held for one transfer at a time.
    state: Mutex<State>,
}

struct State {
    application: End,
    far: End,
    /// Memory of the far end, registered with it.
    sink: usize,
    sink_len: usize,
    sink_mr: Registration,
    reconnected: u64,
}

struct End {
    qp: RcQp<()>,
    port: RcPort,
    mtu: usize,
    lid: u16,
    gid: [u8; 16],
}

impl End {
    /// `None`: this host has no working device.
    fn new() -> Option<Self> {
        let list = verbs::present().then(|| verbs::DeviceList::new().ok()).flatten()?;
        list.iter().filter(|device| device.is_adapter().is_ok()).find_map(|device| {
            let device = device.open().ok()?;
            let at = device.port(1).ok().filter(|port| port.active)?;
            let gid = device.gids(1).ok()?.into_iter().find(|gid| gid.raw[0] != 0xfe)?;
            let settings = RcSettings {
                port: 1,
                pkey_index: 0,
                gid: gid.index,
                routed: at.link == verbs::LinkLayer::Ethernet,
                mtu: at.mtu,
                marks: verbs::Marks::default(),
                timeout: 16,
                connections: 2,
                receives: 16,
                sends: 4,
                reads: 0,
                serves: 0,
                shared: true,
            };
            let mut port = RcPort::open(&device, settings).ok()?;
            let qp = port.connection().ok()?;
            Some(Self { qp, port, mtu: at.mtu, lid: at.lid, gid: gid.raw })
        })
    }

    fn address(&self) -> RcAddress {
        RcAddress {
            number: self.qp.number(),
            psn: 5,
            mtu: self.mtu,
            lid: self.lid,
            routed: false,
            gid: self.gid,
            serves: 0,
        }
    }

    fn poll(&mut self, heard: &mut Vec<RcEvent>) {
        self.port.poll(|event| heard.push(event)).unwrap();
    }
}

impl Rdma {
    /// A pair with room for transfers of `len` bytes.
    pub(super) fn new(len: usize) -> Option<Self> {
        let wanted = std::env::var_os("UDRV_TEST_RDMA").is_some();
        let ends = End::new().zip(End::new());
        assert!(ends.is_some() || !wanted, "no RDMA device works");
        let Some((application, far)) = ends else {
            eprintln!("skipped: no RDMA device");
            return None;
        };
        let sink = map(len);
        let sink_mr = far.port.registrar().register(sink, len, verbs::Permission::RemoteWrite);
        let mut state = State {
            application,
            far,
            sink,
            sink_len: len,
            sink_mr: sink_mr.unwrap(),
            reconnected: 0,
        };
        state.connect();
        let registrar = state.application.port.registrar();
        Some(Self(Arc::new(Inner { registrar, state: Mutex::new(state) })))
    }

    /// The same, whose registrations of the application's memory the rv module keeps, up to `bytes`.
    fn kept_by_module(len: usize, bytes: usize) -> Option<Self> {
        let inner = Arc::into_inner(Self::new(len)?.0).unwrap();
        match inner.registrar.clone().kept_by_module(bytes) {
            Ok(registrar) => Some(Self(Arc::new(Inner { registrar, ..inner }))),
            Err(why) => {
                assert!(std::env::var_os("UDRV_TEST_RV").is_none(), "no rv module: {why}");
                eprintln!("skipped: no rv module: {why}");
                None
            }
        }
    }

    /// Sends `len` bytes at `addr`. The far end has them when this returns.
    pub(super) fn send(&self, handle: &Registration, addr: usize, len: usize) -> Sent<'_> {
        let mut state = self.0.state.lock().unwrap();
        assert!(len <= state.sink_len);
        let local = [(addr as u64, len as u32, handle.lkey())];
        let (to, key) = (state.sink as u64, state.sink_mr.rkey());
        state.transfer(true, &local, to, key);
        Sent { state, len }
    }
}

/// The bytes that have arrived at the far end.
pub(super) struct Sent<'a> {
    state: std::sync::MutexGuard<'a, State>,
    len: usize,
}

impl Sent<'_> {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the sink, which no transfer writes while its lock is held.
        unsafe { std::slice::from_raw_parts(at(self.state.sink), self.len) }
    }
}

impl State {
    fn connect(&mut self) {
        let (here, there) = (self.application.address(), self.far.address());
        self.application.qp.connect(&there, 5).unwrap();
        self.far.qp.connect(&here, 5).unwrap();
    }

    /// One write in one direction, until both ends have been notified.
    fn transfer(&mut self, out: bool, local: &[(u64, u32, u32)], to: u64, key: u32) {
        let begun = Instant::now();
        let mut tries = 0;
        'again: loop {
            let (from, into) = if out {
                (&mut self.application, &mut self.far)
            } else {
                (&mut self.far, &mut self.application)
            };
            // SAFETY: the memory belongs to the test, and stays mapped until this returns.
            unsafe { from.qp.post(local, to, key, RcRequest::Announced(7), ()) }.unwrap();
            let (mut written, mut filled, mut heard) = (false, false, Vec::new());
            while !(written && filled) {
                from.poll(&mut heard);
                into.poll(&mut heard);
                for event in heard.drain(..) {
                    match event {
                        RcEvent::Written { .. } => written = true,
                        RcEvent::Filled { .. } => filled = true,
                        RcEvent::Failed { status: RETRIES_EXCEEDED, .. } if tries < 10 => {
                            tries += 1;
                            self.reconnect();
                            continue 'again;
                        }
                        RcEvent::Failed { status, .. } => {
                            panic!("the device cannot use what is registered: status {status}");
                        }
                    }
                }
                assert!(begun.elapsed() < crate::patience::seconds(120), "a transfer never ends");
                std::thread::yield_now();
            }
            from.qp.on_written();
            return;
        }
    }

    fn reconnect(&mut self) {
        self.reconnected += 1;
        eprintln!("the device gives up a connection, for the {}. time", self.reconnected);
        for end in [&mut self.application, &mut self.far] {
            end.qp = end.port.connection().unwrap();
        }
        self.connect();
    }
}

impl Registrar for Rdma {
    type Handle = Registration;

    fn register(&self, addr: usize, len: usize, access: Access) -> Result<Registration, Errno> {
        Registrar::register(&self.0.registrar, addr, len, access)
    }

    fn shares(&self) -> bool {
        self.0.registrar.shares()
    }

    fn let_go(&self, bytes: usize) -> bool {
        Registrar::let_go(&self.0.registrar, bytes)
    }

    fn found(&self) -> Option<(u64, u64)> {
        Registrar::found(&self.0.registrar)
    }
}

impl Device for Rdma {
    fn word(&self, handle: &Registration, addr: usize) -> u64 {
        u64::from_ne_bytes(self.send(handle, addr, 8).bytes().try_into().unwrap())
    }

    const LIVE: bool = true;

    fn receive(&self, handle: &Registration, addr: usize, value: u64) {
        let mut state = self.0.state.lock().unwrap();
        // SAFETY: the sink, whose lock is held.
        unsafe { std::ptr::with_exposed_provenance_mut::<u64>(state.sink).write(value) };
        let local = [(state.sink as u64, 8, state.sink_mr.lkey())];
        state.transfer(false, &local, addr as u64, handle.rkey());
    }

    fn shows(&self, handle: &Registration, addr: usize, len: usize) -> bool {
        // The far end has less room than the torture's longest buffer, which comes from malloc.
        let room = self.0.state.lock().unwrap().sink_len;
        (addr..addr + len).step_by(room).all(|from| {
            let len = room.min(addr + len - from);
            // SAFETY: memory of the caller, which it does not change now.
            let here = unsafe { std::slice::from_raw_parts(at::<u8>(from), len) };
            self.send(handle, from, len).bytes() == here
        })
    }
}

const NAME: &str = "memory::cache::tests::rdma::";
/// Room at the far end; longer buffers are compared in parts.
const MOST: usize = 48 * PAGE;

#[test]
fn it_sends_and_receives_what_is_there() {
    let Some(device) = Rdma::new(MOST) else { return };
    let cache = Cache::new(device.clone(), monitor(), LIMITS, ALL).unwrap();
    let addr = map(MOST);
    fill(addr, MOST, 5);
    let lease = cache.get(addr, MOST, Access::READ).unwrap();
    assert!(device.shows(lease.handle(), addr, MOST));
    device.receive(lease.handle(), addr + PAGE, 9);
    assert_eq!((word(addr + PAGE), device.word(lease.handle(), addr + PAGE)), (9, 9));
    // Read-only memory can be sent from all the same.
    let constants = map(PAGE);
    fill(constants, PAGE, 6);
    super::memory::protect(constants, PAGE, libc::PROT_READ);
    let lease = cache.get(constants, PAGE, Access::READ).unwrap();
    assert_eq!(device.word(lease.handle(), constants), 6);
    let refused = cache.get(constants, PAGE, Access::REMOTE_WRITE).err();
    assert_eq!(refused, Some(Refusal::Device(Errno(libc::EFAULT))));
}

#[test]
fn under_torture() {
    alone(&format!("{NAME}under_torture"), &[], || {
        let Some(device) = Rdma::new(MOST) else { return };
        let Some(statistics) = torture(device, true, LIMITS) else { return };
        assert!(statistics.hits > 0 && statistics.invalidations > 0);
        // An emulator on a busy machine may not get so far.
        assert!(statistics.evictions > 0 || statistics.misses < 200);
    });
}

#[test]
fn what_the_module_keeps_is_what_is_mapped() {
    let Some(device) = Rdma::kept_by_module(MOST, 64 << 20) else { return };
    let cache = Cache::new(device.clone(), None, LIMITS, ALL).unwrap();
    let addr = map(MOST);
    let sent = |stamp: u64| {
        fill(addr, MOST, stamp);
        let lease = cache.get(addr, MOST, Access::READ).unwrap();
        assert_eq!(device.word(lease.handle(), addr + MOST - 8), stamp);
        device.receive(lease.handle(), addr + PAGE, stamp + 1000);
        assert_eq!(word(addr + PAGE), stamp + 1000);
    };
    let before = cache.statistics();
    (1..=3).for_each(sent);
    for stamp in 4..20 {
        super::memory::unmap(addr, MOST);
        assert!(super::memory::map_free(addr, MOST));
        sent(stamp);
    }
    let known = cache.statistics();
    assert_eq!((known.hits - before.hits, known.misses - before.misses), (2, 17), "{known:?}");
    let held = cache.get(addr, MOST, Access::READ).unwrap();
    super::memory::map_over(addr, MOST);
    sent(21); // for this use alone
    drop(held);
    sent(22);
}

#[test]
fn under_torture_with_the_module() {
    let without = [Without::Userfaultfd];
    alone(&format!("{NAME}under_torture_with_the_module"), &without, || {
        let Some(device) = Rdma::kept_by_module(MOST, 4 << 20) else { return };
        let Some(statistics) = torture(device, false, LIMITS) else { return };
        assert!(statistics.hits > 0 && statistics.uncached == 0, "{statistics:?}");
    });
}

/// With the privileges of a container.
#[test]
fn under_torture_where_little_is_allowed() {
    let without = [Without::Root, Without::Userfaultfd, Without::LockedMemory(6 << 20)];
    alone(&format!("{NAME}under_torture_where_little_is_allowed"), &without, || {
        let Some(device) = Rdma::new(MOST) else { return };
        assert!(monitor().is_none(), "userfaultfd is forbidden");
        let Some(statistics) = torture(device, false, LIMITS) else { return };
        assert_eq!((statistics.hits, statistics.entries), (0, 0));
    });
}

#[test]
fn under_torture_for_nobody() {
    let without = [Without::Root, Without::LockedMemory(6 << 20)];
    alone(&format!("{NAME}under_torture_for_nobody"), &without, || {
        let Some(device) = Rdma::new(MOST) else { return };
        let Some(statistics) = torture(device, true, LIMITS) else { return };
        assert!(statistics.hits > 0);
    });
}

/// A request beyond the limit on locked memory is refused at once, and kept registrations make room for others.
#[test]
fn the_limit_on_locked_memory_is_a_refusal() {
    let without = [Without::Root, Without::LockedMemory(4 << 20)];
    alone(&format!("{NAME}the_limit_on_locked_memory_is_a_refusal"), &without, || {
        let Some(device) = Rdma::new(MOST) else { return };
        let plenty = Limits { count: 1000, bytes: 1 << 30 };
        for monitor in [monitor(), None] {
            let cached = monitor.is_some();
            let cache = Cache::new(device.clone(), monitor, plenty, ALL).unwrap();
            let buffers = [2 << 20, 1 << 20, 3 << 20, 64 << 10, 3 << 20].map(|len| (map(len), len));
            for (addr, len) in buffers {
                fill(addr, len, 3);
                let lease = cache.get(addr, len, Access::READ).unwrap();
                assert_eq!(device.word(lease.handle(), addr + len - 8), 3);
            }
            let too_much = map(8 << 20);
            let begun = Instant::now();
            let refused = cache.get(too_much, 8 << 20, Access::READ).err();
            assert_eq!(refused, Some(Refusal::NoRoom));
            assert!(begun.elapsed() < crate::patience::seconds(5), "{:?}", begun.elapsed());
            let lease = cache.get(buffers[0].0, buffers[0].1, Access::READ).unwrap();
            let second = cache.get(buffers[2].0, buffers[2].1, Access::READ).err();
            assert_eq!(second, Some(Refusal::NoRoom), "all that is left is in use");
            drop(lease);
            assert!(cache.get(buffers[2].0, buffers[2].1, Access::READ).is_ok());
            assert!(cache.statistics().pinned_peak < 4 << 20, "{:?}", cache.statistics());
            assert_eq!(cached, cache.statistics().evictions > 0);
        }
    });
}

/// An application that reuses its buffers, and one whose buffers are new each time.
/// `UDRV_TEST_RDMA=1 TESTS memory::cache::tests::rdma::figures --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn figures() {
    const BUFFERS: usize = 8;
    let Some(device) = Rdma::new(8 << 20) else { return };
    eprintln!(
        "size KiB, cache, buffers: us a transfer, of it us for the registration; hits, registrations, most pinned KiB"
    );
    for (len, sends) in [(64 << 10, 200), (1 << 20, 48), (8 << 20, 16)] {
        for (cached, reused) in [(true, true), (false, true), (true, false), (false, false)] {
            let limits = Limits { count: 1024, bytes: 1 << 30 };
            let monitor = monitor().filter(|_| cached);
            let cache = Cache::new(device.clone(), monitor, limits, ALL).unwrap();
            let new = || {
                let addr = map_as(0, len, super::memory::ANON, -1).unwrap();
                fill(addr, len, 1);
                addr
            };
            let mut buffers: Vec<usize> = (0..BUFFERS).map(|_| new()).collect();
            let (mut all, mut registering) = (Duration::ZERO, Duration::ZERO);
            for n in 0..sends {
                let addr = &mut buffers[n % BUFFERS];
                if !reused {
                    super::memory::unmap(*addr, len);
                    *addr = new();
                }
                let begun = Instant::now();
                let lease = cache.get(*addr, len, Access::READ).unwrap();
                registering += begun.elapsed();
                drop(device.send(lease.handle(), *addr, len));
                let sent = Instant::now();
                drop(lease);
                registering += sent.elapsed();
                all += begun.elapsed();
            }
            let s = cache.statistics();
            eprintln!(
                "{:5} {:5} {:6}: {:7} {:6}  {:3} % {:4} {:6}",
                len >> 10,
                if cached { "kept" } else { "off" },
                if reused { "reused" } else { "new" },
                all.as_micros() / sends as u128,
                registering.as_micros() / sends as u128,
                s.hits * 100 / sends as u64,
                s.registrations,
                s.pinned_peak >> 10,
            );
            drop(cache);
            buffers.into_iter().for_each(|addr| super::memory::unmap(addr, len));
        }
    }
}
