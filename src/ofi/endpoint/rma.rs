//! `struct fi_ops_rma`.

use super::kept::Kept;
use super::state::{Endpoint, EndpointFid, endpoint};
use super::transfer::{Flags, Starter, buffer, check_flags, persist, result, trigger, vector};
use crate::memory::SegmentList;
use crate::memory::keys::Right;
use crate::ofi::guard::entries;
use crate::ofi::lock::Guard;
use crate::ofi::table::{Operations, Table};
use crate::ofi::trigger::{Account, Kind};
use crate::protocol::{Direction, OpError, RemoteRange, RemoteRanges, RmaOp};
use libc::iovec;
use libfabric_sys::{
    FI_DELIVERY_COMPLETE, FI_EINVAL, FI_EMSGSIZE, FI_EOPBADSTATE, FI_EOPNOTSUPP, FI_FENCE,
    FI_INJECT, FI_REMOTE_CQ_DATA, FI_TRIGGER, fi_addr_t, fi_msg_rma, fi_ops_rma, fi_rma_iov,
    fid_ep,
};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

pub(super) static OPS: Table<fi_ops_rma> = Table::new(fi_ops_rma {
    read: Some(read),
    readv: Some(readv),
    readmsg: Some(readmsg),
    write: Some(write),
    writev: Some(writev),
    writemsg: Some(writemsg),
    inject: Some(inject),
    writedata: Some(writedata),
    injectdata: Some(injectdata),
    ..fi_ops_rma::STUBS
});

/// The operations of a receive context or scalable endpoint.
pub(super) static NO_OPS: Table<fi_ops_rma> = Table::new(fi_ops_rma::STUBS);

/// The arguments of one operation, translated.
struct Access {
    right: Right,
    local: Result<SegmentList, i32>,
    remote: Result<RemoteRanges, i32>,
    data: Option<u64>,
    peer: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
}

/// A single remote range, as long as `local`.
fn one(local: &Result<SegmentList, i32>, addr: u64, key: u64) -> Result<RemoteRanges, i32> {
    let len = local.as_ref().map_or(0, SegmentList::len) as u64;
    let mut ranges = RemoteRanges::NONE;
    ranges.push(RemoteRange { key, addr, len }).ok_or(FI_EINVAL)?;
    Ok(ranges)
}

/// Several remote ranges. Errors: EINVAL for more than four.
///
/// # Safety
/// `list` has `count` elements.
unsafe fn several(list: *const fi_rma_iov, count: usize) -> Result<RemoteRanges, i32> {
    let mut ranges = RemoteRanges::NONE;
    if count > crate::protocol::MAX_RANGES || (list.is_null() && count > 0) {
        return Err(FI_EINVAL);
    }
    for i in 0..count {
        // SAFETY: the caller vouches for `count` elements.
        let range = unsafe { &*list.add(i) };
        ranges
            .push(RemoteRange { key: range.key, addr: range.addr, len: range.len as u64 })
            .ok_or(FI_EINVAL)?;
    }
    Ok(ranges)
}

/// Starts an operation of any form. By message it completes when the target has carried it out, which satisfies every
/// completion level; a direct one as its flags say (PROTOCOL.md §4.18).
#[inline]
fn start(handle: &EndpointFid, access: Access) -> isize {
    result(try_start(handle, access))
}

/// The flags of an operation, and whether the call is fi_inject_write or a similar one. Of the default flags these take
/// FI_DELIVERY_COMPLETE: MPICH and SHMEM make short puts by them, and take the counter for the end of a put in memory.
pub(super) fn flags_of(flags: Flags, handle: &EndpointFid) -> (u64, bool) {
    match flags.of_transmit(handle) {
        (own, true) => {
            let default = handle.tx_flags.load(Ordering::Relaxed);
            (own | default & FI_DELIVERY_COMPLETE, true)
        }
        others => others,
    }
}

fn try_start(handle: &EndpointFid, access: Access) -> Result<(), i32> {
    let ep = &*handle.shared;
    let (op_flags, inject_call) = flags_of(access.flags, handle);
    let guard = ep.domain.lock.lock();
    let context = access.context;
    let accessing = Accessing::check(ep, access, op_flags, &guard)?;
    let report = handle.report(op_flags, inject_call, &guard);
    if op_flags & FI_TRIGGER != 0 {
        let (kind, start) = (accessing.kind(), accessing.starter());
        // SAFETY: under FI_TRIGGER the context is a `fi_triggered_context` (fi_trigger.3).
        return unsafe { trigger(ep, kind, context, report, start, &guard) };
    }
    let account = Account { context: context.expose_provenance() as u64, report };
    persist(ep, &guard, |guard: &Guard<'_>| accessing.start(ep, guard, account))
}

/// A checked operation, ready to be started.
#[derive(Clone, Copy)]
pub(super) struct Accessing {
    right: Right,
    local: SegmentList,
    remote: RemoteRanges,
    data: Option<u64>,
    peer: fi_addr_t,
    inject: bool,
    delivered: bool,
    fence: bool,
}

impl Accessing {
    /// Errors: EINVAL, EMSGSIZE; EOPNOTSUPP for an endpoint without this direction, or flags that are not offered.
    fn check(ep: &Endpoint, access: Access, op_flags: u64, guard: &Guard<'_>) -> Result<Self, i32> {
        check_flags(op_flags)?;
        let Access { right, data, peer, .. } = access;
        let (local, remote) = (ep.located(access.local?)?, access.remote?);
        if local.len() as u64 != remote.total() {
            return Err(FI_EINVAL);
        }
        if !ep.may(right) {
            return Err(FI_EOPNOTSUPP);
        }
        let inject = right == Right::Write && op_flags & FI_INJECT != 0;
        let state = ep.state(guard);
        let injected_max = state.inject_rma_size.unwrap_or(ep.inject_size);
        if inject && local.len() > injected_max || local.len() > state.max_rma_size {
            return Err(FI_EMSGSIZE);
        }
        let delivered = op_flags & FI_DELIVERY_COMPLETE != 0;
        let fence = op_flags & FI_FENCE != 0;
        Ok(Self { right, local, remote, data, peer, inject, delivered, fence })
    }

    /// The operation of a deferred request (fi_trigger.3).
    ///
    /// # Safety
    /// `m` and what it points to are as for `fi_writemsg`.
    pub(super) unsafe fn of_message(
        ep: &Endpoint,
        right: Right,
        m: &fi_msg_rma,
        flags: u64,
        guard: &Guard<'_>,
    ) -> Result<Self, i32> {
        // SAFETY: the caller vouches.
        let access = unsafe { message(right, m, flags) };
        Self::check(ep, access, flags, guard)
    }

    pub(super) fn start(
        &self,
        ep: &Endpoint,
        guard: &Guard<'_>,
        account: Account,
    ) -> Result<(), OpError> {
        let op = RmaOp {
            peer: ep.peer(self.peer, guard)?,
            right: self.right,
            local: self.local,
            remote: self.remote,
            data: self.data,
            context: account.context,
            report: account.report,
            inject: self.inject,
            delivered: self.delivered,
            fence: self.fence,
        };
        let mut host = ep.host(guard);
        let engine = ep.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        engine.access(&op, &mut host)
    }

    /// Injected data is copied now: the application may reuse its buffer while the operation waits.
    pub(super) fn starter(self) -> impl Starter {
        let kept = Kept::of(self.local, self.inject);
        move |ep: &Endpoint, guard: &Guard<'_>, account| {
            Self { local: kept.memory()?, ..self }.start(ep, guard, account)
        }
    }

    pub(super) fn kind(&self) -> Kind {
        let direction = match self.right {
            Right::Read => Direction::Read,
            _ => Direction::Write,
        };
        Kind { direction, tagged: false, tag: 0, to: self.peer }
    }
}

/// # Safety
/// `m` and what it points to are as for `fi_readmsg` and `fi_writemsg`.
unsafe fn message(right: Right, m: &fi_msg_rma, flags: u64) -> Access {
    let with_data = right == Right::Write && flags & FI_REMOTE_CQ_DATA != 0;
    // SAFETY: the caller vouches.
    unsafe {
        Access {
            right,
            local: vector(m.msg_iov, m.iov_count),
            remote: several(m.rma_iov, m.rma_iov_count),
            data: with_data.then_some(m.data),
            peer: m.addr,
            context: m.context,
            flags: Flags::Call(flags),
        }
    }
}

/// Starts an access to one remote range.
///
/// # Safety
/// Arguments are as the man page of the call says.
unsafe fn access(
    ep: *mut fid_ep,
    (right, data): (Right, Option<u64>),
    local: Result<SegmentList, i32>,
    (peer, addr, key): (fi_addr_t, u64, u64),
    (context, flags): (*mut c_void, Flags),
) -> isize {
    let remote = one(&local, addr, key);
    // SAFETY: the caller vouches.
    let handle = unsafe { endpoint(ep) };
    start(handle, Access { right, local, remote, data, peer, context, flags })
}

/// # Safety
/// Arguments are as the man page of the call says.
unsafe fn told(ep: *mut fid_ep, right: Right, msg: *const fi_msg_rma, flags: u64) -> isize {
    // SAFETY: the caller vouches.
    unsafe {
        let Some(m) = msg.as_ref() else { return -(FI_EINVAL as isize) };
        start(endpoint(ep), message(right, m, flags))
    }
}

entries! { data_entry -> isize;
    read "fi_read" (
        ep: *mut fid_ep, buf: *mut c_void, len: usize, _desc: *mut c_void, peer: fi_addr_t, addr: u64, key: u64,
        context: *mut c_void,
    ) => access(ep, (Right::Read, None), buffer(buf, len), (peer, addr, key), (context, Flags::Default));
    readv "fi_readv" (
        ep: *mut fid_ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, peer: fi_addr_t, addr: u64, key: u64,
        context: *mut c_void,
    ) => access(ep, (Right::Read, None), vector(iov, count), (peer, addr, key), (context, Flags::Default));
    readmsg "fi_readmsg" (ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) => told(ep, Right::Read, msg, flags);
    write "fi_write" (
        ep: *mut fid_ep, buf: *const c_void, len: usize, _desc: *mut c_void, peer: fi_addr_t, addr: u64, key: u64,
        context: *mut c_void,
    ) => access(ep, (Right::Write, None), buffer(buf, len), (peer, addr, key), (context, Flags::Default));
    writev "fi_writev" (
        ep: *mut fid_ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, peer: fi_addr_t, addr: u64, key: u64,
        context: *mut c_void,
    ) => access(ep, (Right::Write, None), vector(iov, count), (peer, addr, key), (context, Flags::Default));
    writemsg "fi_writemsg" (ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) => told(ep, Right::Write, msg, flags);
    inject "fi_inject_write" (
        ep: *mut fid_ep, buf: *const c_void, len: usize, peer: fi_addr_t, addr: u64, key: u64,
    ) => access(ep, (Right::Write, None), buffer(buf, len), (peer, addr, key), (null_mut(), Flags::Inject));
    writedata "fi_writedata" (
        ep: *mut fid_ep, buf: *const c_void, len: usize, _desc: *mut c_void, data: u64, peer: fi_addr_t, addr: u64,
        key: u64, context: *mut c_void,
    ) => access(ep, (Right::Write, Some(data)), buffer(buf, len), (peer, addr, key), (context, Flags::Default));
    injectdata "fi_inject_writedata" (
        ep: *mut fid_ep, buf: *const c_void, len: usize, data: u64, peer: fi_addr_t, addr: u64, key: u64,
    ) => access(ep, (Right::Write, Some(data)), buffer(buf, len), (peer, addr, key), (null_mut(), Flags::Inject));
}
