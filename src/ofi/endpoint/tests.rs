//! An endpoint, used as by an application: through the tables of its objects.

use super::state::{Bindings, Endpoint, EndpointFid, endpoint};
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
use std::time::Instant;

/// An enabled endpoint and the objects that it needs. They are closed in the order that C programs use.
struct World {
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    av: *mut fid_av,
    cq: *mut fid_cq,
    ep: *mut fid_ep,
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
        let (mut info, mut fabric, mut domain) = (null_mut(), null_mut(), null_mut());
        let (mut av, mut cq, mut ep, mut own) = (null_mut(), null_mut(), null_mut(), 0);
        // SAFETY: called as libfabric does, in this order.
        unsafe {
            ok(getinfo(fi_version(2, 1), null(), null(), 0, null(), &mut info));
            (*(*info).fabric_attr).api_version = fi_version(2, 1);
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
        Self { fabric, domain, av, cq, ep, counters: Vec::new(), own }
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
