//! An endpoint, used as by an application: through the tables of its objects.

use super::rma;
use super::state::{Bindings, Endpoint, EndpointFid, endpoint};
use super::transfer::Flags;
use crate::ofi::cq;
use crate::ofi::info::getinfo;
use crate::ofi::lock::Guard;
use crate::ofi::ops::fabric;
use crate::ofi::progress::Progress;
use crate::patience;
use crate::protocol::{Host, Report};
use libfabric_sys::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// An enabled endpoint and the objects that it needs. They are closed in the order that C programs use.
struct World {
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    av: *mut fid_av,
    cq: *mut fid_cq,
    ep: *mut fid_ep,
    info: *mut fi_info,
    counters: Vec<*mut fid_cntr>,
    /// The endpoint's own address.
    own: fi_addr_t,
}

fn ok(rc: i32) {
    assert_eq!(rc, 0);
}

/// # Safety
/// `fid` is an open object, which is not used any more.
unsafe fn close(fid: *mut fid) {
    // SAFETY: the caller vouches.
    ok(unsafe { (*(*fid).ops).close.unwrap()(fid) });
}

impl World {
    fn new() -> Self {
        Self::under(FI_THREAD_SAFE)
    }

    fn under(threading: fi_threading) -> Self {
        let (mut info, mut fabric, mut domain) = (null_mut(), null_mut(), null_mut());
        let (mut av, mut cq, mut ep, mut own) = (null_mut(), null_mut(), null_mut(), 0);
        // SAFETY: called as libfabric does, in this order.
        unsafe {
            ok(getinfo(fi_version(2, 1), null(), null(), 0, null(), &mut info));
            (*(*info).fabric_attr).api_version = fi_version(2, 1);
            (*(*info).domain_attr).threading = threading;
            fabric::open((*info).fabric_attr, &mut fabric, null_mut()).unwrap();
            ok((*(*fabric).ops).domain.unwrap()(fabric, info, &mut domain, null_mut()));
            let ops = &*(*domain).ops;
            let mut attr: fi_av_attr = std::mem::zeroed();
            ok(ops.av_open.unwrap()(domain, &mut attr, &mut av, null_mut()));
            let mut attr: fi_cq_attr = std::mem::zeroed();
            attr.format = FI_CQ_FORMAT_DATA;
            ok(ops.cq_open.unwrap()(domain, &mut attr, &mut cq, null_mut()));
            ok(ops.endpoint.unwrap()(domain, info, &mut ep, null_mut()));
            let of_ep = &*(*ep).fid.ops;
            ok(of_ep.bind.unwrap()(&mut (*ep).fid, &mut (*av).fid, 0));
            ok(of_ep.bind.unwrap()(&mut (*ep).fid, &mut (*cq).fid, FI_TRANSMIT | FI_RECV));
            ok(of_ep.control.unwrap()(&mut (*ep).fid, FI_ENABLE, null_mut()));
            let (mut name, mut len) = ([0u64; 8], 64);
            let named = name.as_mut_ptr().cast();
            ok((*(*ep).cm).getname.unwrap()(&mut (*ep).fid, named, &mut len));
            let insert = (*(*av).ops).insert.unwrap();
            assert_eq!(insert(av, named, 1, &mut own, 0, null_mut()), 1);
        }
        Self { fabric, domain, av, cq, ep, info, counters: Vec::new(), own }
    }

    /// One call of each kind that a thread makes beside one that transfers data.
    fn control(&self, key: u64) {
        let (mut mr, mut cntr, mut cq, mut srx, mut poll, mut ep) =
            (null_mut(), null_mut(), null_mut(), null_mut(), null_mut(), null_mut());
        let (memory, mut address, mut text) = ([0u8; 8], 0, [0u64; 8]);
        let (from, text, mut len) = (memory.as_ptr().cast(), text.as_mut_ptr().cast(), 64);
        // SAFETY: called as libfabric does; every object is closed before its parent.
        unsafe {
            let ops = &*(*self.domain).ops;
            ok(ops.cntr_open.unwrap()(self.domain, &mut std::mem::zeroed(), &mut cntr, null_mut()));
            let (mrs, of) = (&*(*self.domain).mr, &raw mut (*self.domain).fid);
            let access = FI_REMOTE_WRITE;
            ok(mrs.reg.unwrap()(of, from, 8, access, 0, key, 0, &mut mr, null_mut()));
            let of_mr = &*(*mr).fid.ops;
            ok(of_mr.bind.unwrap()(&mut (*mr).fid, &mut (*cntr).fid, access));
            ok(of_mr.control.unwrap()(&mut (*mr).fid, FI_REFRESH, null_mut()));

            ok(ops.cq_open.unwrap()(self.domain, &mut std::mem::zeroed(), &mut cq, null_mut()));
            ok(ops.srx_ctx.unwrap()(self.domain, null_mut(), &mut srx, null_mut()));
            ok(ops.poll_open.unwrap()(self.domain, &mut std::mem::zeroed(), &mut poll));
            ok(ops.endpoint.unwrap()(self.domain, self.info, &mut ep, null_mut()));
            let of_ep = &*(*ep).fid.ops;
            for other in [&mut (*self.av).fid, &mut (*self.cq).fid] {
                let flags = if other.fclass == FI_CLASS_CQ { FI_TRANSMIT | FI_RECV } else { 0 };
                ok(of_ep.bind.unwrap()(&mut (*ep).fid, other, flags));
            }
            ok(of_ep.control.unwrap()(&mut (*ep).fid, FI_ENABLE, null_mut()));
            ok((*(*ep).cm).getname.unwrap()(&mut (*ep).fid, text, &mut len));
            let avs = &*(*self.av).ops;
            assert_eq!(avs.insert.unwrap()(self.av, text, 1, &mut address, 0, null_mut()), 1);
            ok(avs.lookup.unwrap()(self.av, address, text, &mut len));
            ok(avs.remove.unwrap()(self.av, &mut address, 1, 0));
            let (name, mut size) = (FI_OPT_MIN_MULTI_RECV, 8);
            let level = FI_OPT_ENDPOINT;
            ok((*(*ep).ops).getopt.unwrap()(&mut (*ep).fid, level, name, text, &mut size));
            ok((*(*ep).ops).setopt.unwrap()(&mut (*ep).fid, level, name, text, size));
            let objects: [*mut fid; 6] =
                [ep.cast(), poll.cast(), srx.cast(), cq.cast(), mr.cast(), cntr.cast()];
            objects.into_iter().for_each(|object| close(object));
        }
    }

    fn handle(&self) -> &EndpointFid {
        // SAFETY: the object is open.
        unsafe { endpoint(self.ep) }
    }

    fn endpoint(&self) -> &Endpoint {
        &self.handle().shared
    }

    /// Opens a counter that is bound to the enabled endpoint, for the events of `flags`.
    fn counter(&mut self, flags: u64) -> *mut fid_cntr {
        let mut counter = null_mut();
        // SAFETY: called as libfabric does.
        unsafe {
            let mut attr: fi_cntr_attr = std::mem::zeroed();
            let open = (*(*self.domain).ops).cntr_open.unwrap();
            ok(open(self.domain, &mut attr, &mut counter, null_mut()));
            let bind = (*(*self.ep).fid.ops).bind.unwrap();
            ok(bind(&mut (*self.ep).fid, &mut (*counter).fid, flags));
        }
        self.counters.push(counter);
        counter
    }

    /// Sends a message of eight bytes to the endpoint itself, and receives it.
    fn exchange(&self) {
        let (from, mut to) = ([7u8; 8], [0u8; 8]);
        // SAFETY: the buffers live until both operations are complete.
        unsafe {
            let msg = &*(*self.ep).msg;
            let at = to.as_mut_ptr().cast();
            let any = FI_ADDR_UNSPEC;
            assert_eq!(msg.recv.unwrap()(self.ep, at, 8, null_mut(), any, null_mut()), 0);
            let at = from.as_ptr().cast();
            assert_eq!(msg.send.unwrap()(self.ep, at, 8, null_mut(), self.own, null_mut()), 0);
            let read = (*(*self.cq).ops).read.unwrap();
            let (mut entries, begun) = (0, Instant::now());
            while entries < 2 {
                let mut entry: fi_cq_data_entry = std::mem::zeroed();
                let n = read(self.cq, (&raw mut entry).cast(), 1);
                assert!(n == 1 || n == -(FI_EAGAIN as isize), "{n}");
                entries += i32::from(n == 1);
                assert!(begun.elapsed() < patience::seconds(10));
            }
        }
        assert_eq!(to, from);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // others may be open
        }
        // SAFETY: open objects; each is closed before its parent.
        unsafe {
            close(self.ep.cast());
            self.counters.iter().for_each(|counter| close(counter.cast()));
            close(self.cq.cast());
            close(self.av.cast());
            close(self.domain.cast());
            close(self.fabric.cast());
        }
    }
}

/// A thread that reads an event queue has an endpoint that has joined a group for the length of a turn. It must neither
/// keep the endpoint open nor, afterwards, the domain.
#[test]
fn a_thread_that_has_an_endpoint_for_a_moment_refuses_no_close() {
    let world = World::new();
    let has = world.handle().shared.clone();
    let reader = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(has);
    });
    drop(world);
    reader.join().unwrap();
}

/// Bindings cannot change while a reference to them is read: `bind` takes the hold itself.
#[test]
fn bindings_are_shared_while_they_are_read() {
    let read: for<'g> fn(&'g Endpoint, &'g Guard<'_>) -> &'g Bindings = Endpoint::bindings;
    let mut world = World::new();
    let ep = world.handle().shared.clone();
    let mut hold = ep.domain.lock.lock();
    let (first, host) = (read(&ep, &hold), ep.host(&hold));
    assert!(std::ptr::eq(first, read(&ep, &hold)) && first.send_counter.is_none());
    assert!(host.has_room_for_sends(Report::new(true, 0)));
    ep.change_bindings(0, &mut hold).eq = None;
    drop(hold);
    drop(ep);
    // SAFETY: as libfabric calls fi_cntr_read.
    let count = |counter: *mut fid_cntr| unsafe { (*(*counter).ops).read.unwrap()(counter) };
    world.exchange();
    let (sent, received) = (world.counter(FI_SEND), world.counter(FI_RECV));
    world.exchange();
    assert_eq!((count(sent), count(received)), (1, 1));
}

#[test]
#[cfg(debug_assertions)]
fn the_guard_of_another_domain_opens_nothing() {
    let (one, other) = (World::new(), World::new());
    let (ep, theirs) = (one.endpoint(), other.endpoint().domain.lock.lock());
    // SAFETY: the object is open.
    let queue = unsafe { cq::shared(one.cq.cast()) }.unwrap();
    let refuses = |open: &dyn Fn()| catch_unwind(AssertUnwindSafe(open)).is_err();
    assert!(refuses(&|| _ = ep.bindings(&theirs).reports_received()));
    assert!(refuses(&|| _ = ep.state(&theirs).asleep));
    assert!(refuses(&|| _ = ep.engine(&theirs).is_some()));
    assert!(refuses(&|| _ = queue.source(&theirs).waiter.is_some()));
    assert!(!refuses(&|| _ = ep.state(&ep.domain.lock.lock()).asleep));
}

/// A world that several threads use.
struct Shared<'a>(&'a World);

// SAFETY: the objects are there to be called from all threads, as their level of threading allows.
unsafe impl Send for Shared<'_> {}

/// Control calls are "always considered thread safe" (fi_domain.3). Debug builds assert that a domain's lock has one holder.
#[test]
fn any_thread_makes_control_calls_while_another_one_transfers_data() {
    let world = World::under(FI_THREAD_DOMAIN);
    let shared = Shared(&world);
    std::thread::scope(|scope| {
        let controls = scope.spawn(move || {
            let Shared(world) = { shared };
            (0..50).for_each(|key| world.control(key));
        });
        while !controls.is_finished() {
            world.exchange();
        }
        controls.join().unwrap();
    });
}

/// Chapel asks for FI_THREAD_DOMAIN, and has a thread for each context of a scalable endpoint.
#[test]
fn contexts_of_a_scalable_endpoint_have_a_thread_each() {
    let world = World::under(FI_THREAD_DOMAIN);
    let mut sep = null_mut();
    // SAFETY: called as libfabric does.
    unsafe {
        (*(*world.info).ep_attr).tx_ctx_cnt = 2;
        let open = (*(*world.domain).ops).scalable_ep.unwrap();
        ok(open(world.domain, world.info, &mut sep, null_mut()));
    }
    let shared = [Shared(&world), Shared(&world)];
    std::thread::scope(|scope| {
        for one in shared {
            scope.spawn(move || {
                let Shared(world) = { one };
                for _ in 0..20_000 {
                    // SAFETY: no entry is read.
                    let n = unsafe { (*(*world.cq).ops).read.unwrap()(world.cq, null_mut(), 0) };
                    assert_eq!(n, -(FI_EAGAIN as isize));
                }
            });
        }
    });
    // SAFETY: nobody uses it any more.
    unsafe { close(sep.cast()) };
}

/// Where the progress thread finds work instead of its sleep, peers need not send doorbells.
#[test]
fn an_endpoint_with_work_is_not_left_asleep() {
    let world = World::new();
    let ep = world.endpoint();
    let asleep = |guard: &Guard<'_>| ep.state(guard).page.as_ref().unwrap().is_asleep();
    let guard = ep.domain.lock.lock();
    assert!(ep.hand_to_thread(&guard) && asleep(&guard));
    drop(guard);
    let from = [7u8; 8];
    // SAFETY: a message of eight bytes is copied.
    let sent = unsafe {
        let send = (*(*world.ep).msg).send.unwrap();
        send(world.ep, from.as_ptr().cast(), 8, null_mut(), world.own, null_mut())
    };
    assert_eq!(sent, 0);
    let guard = ep.domain.lock.lock();
    assert!(!ep.hand_to_thread(&guard), "the message is not received yet");
    assert!(ep.state(&guard).asleep == 0 && !asleep(&guard));
}

#[test]
fn the_default_of_delivery_holds_for_injected_writes() {
    let world = World::new();
    let handle = world.handle();
    for default in [0, FI_DELIVERY_COMPLETE, FI_DELIVERY_COMPLETE | FI_COMPLETION] {
        handle.tx_flags.store(default, Ordering::Relaxed);
        let (flags, injects) = rma::flags_of(Flags::Inject, handle);
        assert_eq!((flags, injects), (FI_INJECT | default & FI_DELIVERY_COMPLETE, true));
        assert_eq!(rma::flags_of(Flags::Default, handle), (default, false));
        assert_eq!(rma::flags_of(Flags::Call(FI_INJECT), handle), (FI_INJECT, false));
    }
}
