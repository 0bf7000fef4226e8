//! Atomic operations: the checks of their arguments, and `fi_query_atomic`. The calls are in [`entries`].

mod entries;

pub(super) use entries::OPS;

use super::kept::Kept;
use super::state::{Endpoint, EndpointFid, endpoint};
use super::transfer::{Flags, Starter, check_flags, persist, result, trigger, vector};
use crate::memory::atomic::{Form, MAX_BYTES, Operation};
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::ofi::lock::Guard;
use crate::ofi::trigger::{Account, Kind};
use crate::protocol::{
    AtomicOp, Direction, MAX_RANGES, OpError, RemoteRange, RemoteRanges, right_of,
};
use libc::iovec;
use libfabric_sys::{
    FI_COMPARE_ATOMIC, FI_EINVAL, FI_EMSGSIZE, FI_EOPBADSTATE, FI_EOPNOTSUPP, FI_FENCE,
    FI_FETCH_ATOMIC, FI_INJECT, FI_REMOTE_CQ_DATA, FI_TAGGED, FI_TRIGGER, fi_addr_t,
    fi_atomic_attr, fi_datatype, fi_ioc, fi_msg_atomic, fi_msg_compare, fi_msg_fetch, fi_op,
    fi_rma_ioc, fid_ep,
};
use std::ffi::c_void;
use std::ptr::null_mut;

/// The operation with these numbers. Errors: EOPNOTSUPP if it is not offered in this form.
fn offered(op: fi_op, datatype: fi_datatype, form: Form) -> Result<Operation, i32> {
    let operation = Operation::from_numbers(op, datatype);
    operation.filter(|operation| operation.is_offered(form)).ok_or(FI_EOPNOTSUPP)
}

/// `fi_query_atomic`. Errors: EINVAL, EOPNOTSUPP.
pub(crate) fn query(datatype: fi_datatype, op: fi_op, flags: u64) -> Result<fi_atomic_attr, i32> {
    let form = match flags & !FI_TAGGED {
        0 => Form::Base,
        FI_FETCH_ATOMIC => Form::Fetch,
        FI_COMPARE_ATOMIC => Form::Compare,
        _ => return Err(FI_EINVAL),
    };
    // The target is a memory region, not a receive buffer.
    if flags & FI_TAGGED != 0 {
        return Err(FI_EOPNOTSUPP);
    }
    let size = offered(op, datatype, form)?.datatype.size();
    Ok(fi_atomic_attr { count: MAX_BYTES / size, size })
}

/// The local elements of an operation: one buffer, or several.
#[derive(Clone, Copy)]
struct Elements {
    list: *const fi_ioc,
    parts: usize,
    one: *const c_void,
    count: usize,
}

impl Elements {
    const NONE: Self = Self::one(null_mut(), 0);

    const fn one(buf: *const c_void, count: usize) -> Self {
        Self { list: null_mut(), parts: 0, one: buf, count }
    }

    const fn several(list: *const fi_ioc, parts: usize) -> Self {
        Self { list, parts, one: null_mut(), count: 0 }
    }

    /// The number of elements, in one part or several.
    ///
    /// # Safety
    /// `list` has `parts` elements.
    unsafe fn count(self) -> usize {
        if self.list.is_null() || self.parts > MAX_SEGMENTS {
            return self.count;
        }
        // SAFETY: the caller vouches.
        let count = |i| unsafe { &*self.list.add(i) }.count;
        (0..self.parts).map(count).fold(0, usize::saturating_add)
    }

    /// The memory. Errors: EINVAL for more than four parts, or more bytes than an address space has.
    ///
    /// # Safety
    /// `list` has `parts` elements; the application lends each until the operation completes.
    unsafe fn memory(self, size: usize) -> Result<SegmentList, i32> {
        let mut parts = [iovec { iov_base: null_mut(), iov_len: 0 }; MAX_SEGMENTS];
        if self.parts > MAX_SEGMENTS || (self.list.is_null() && self.parts > 0) {
            return Err(FI_EINVAL);
        }
        let bytes = |count: usize| count.checked_mul(size).ok_or(FI_EINVAL);
        if let Some(first) = parts.first_mut().filter(|_| self.parts == 0) {
            *first = iovec { iov_base: self.one.cast_mut(), iov_len: bytes(self.count)? };
        }
        for (i, part) in parts.iter_mut().enumerate().take(self.parts) {
            // SAFETY: the caller vouches for the number of elements.
            let from = unsafe { &*self.list.add(i) };
            *part = iovec { iov_base: from.addr, iov_len: bytes(from.count)? };
        }
        // SAFETY: the caller vouches for each part.
        unsafe { vector(parts.as_ptr(), parts.len()) }
    }
}

/// The elements at the target.
#[derive(Clone, Copy)]
enum Target {
    One { addr: u64, key: u64 },
    Several(*const fi_rma_ioc, usize),
}

impl Target {
    /// The remote ranges; a single range has `count` elements. Errors: EINVAL for more than four, or more
    /// bytes than an address space has.
    ///
    /// # Safety
    /// The list of a target has the number of elements that the target says.
    unsafe fn ranges(self, count: usize, size: usize) -> Result<RemoteRanges, i32> {
        let mut ranges = RemoteRanges::NONE;
        let mut push = |addr, key, count: usize| {
            let len = count.checked_mul(size).ok_or(FI_EINVAL)? as u64;
            ranges.push(RemoteRange { key, addr, len }).ok_or(FI_EINVAL)
        };
        match self {
            Self::One { addr, key } => push(addr, key, count)?,
            Self::Several(list, parts) => {
                if parts > MAX_RANGES || (list.is_null() && parts > 0) {
                    return Err(FI_EINVAL);
                }
                for i in 0..parts {
                    // SAFETY: the caller vouches for the number of elements.
                    let from = unsafe { &*list.add(i) };
                    push(from.addr, from.key, from.count)?;
                }
            }
        }
        Ok(ranges)
    }
}

/// The arguments of one operation, as the application passes them.
struct Call {
    form: Form,
    op: fi_op,
    datatype: fi_datatype,
    operand: Elements,
    compare: Elements,
    result: Elements,
    target: Target,
    data: Option<u64>,
    peer: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
}

/// Starts an operation of any form. It completes when the target has carried it out, which satisfies every
/// completion level.
///
/// # Safety
/// Buffers and lists are as fi_atomic(3) says.
#[inline]
unsafe fn start(handle: &EndpointFid, call: Call) -> isize {
    // SAFETY: the caller vouches.
    result(unsafe { try_start(handle, call) })
}

/// # Safety
/// As [`start`].
unsafe fn try_start(handle: &EndpointFid, call: Call) -> Result<(), i32> {
    let ep = &*handle.shared;
    let (op_flags, inject_call) = call.flags.of_transmit(handle);
    let guard = ep.domain.lock.lock();
    // SAFETY: the caller vouches.
    let changing = unsafe { Changing::check(ep, &call, op_flags, &guard) }?;
    let report = handle.report(op_flags, inject_call, &guard);
    if op_flags & FI_TRIGGER != 0 {
        let (kind, start) = (changing.kind(), changing.starter());
        // SAFETY: under FI_TRIGGER the context is a `fi_triggered_context` (fi_trigger.3).
        return unsafe { trigger(ep, kind, call.context, report, start, &guard) };
    }
    let account = Account { context: call.context.expose_provenance() as u64, report };
    persist(ep, &guard, |guard: &Guard<'_>| changing.start(ep, guard, account))
}

/// A checked operation, ready to be started.
#[derive(Clone, Copy)]
pub(super) struct Changing {
    operation: Operation,
    form: Form,
    operand: SegmentList,
    compare: SegmentList,
    result: SegmentList,
    remote: RemoteRanges,
    data: Option<u64>,
    peer: fi_addr_t,
    inject: bool,
    fence: bool,
}

impl Changing {
    /// Errors: EINVAL, EMSGSIZE; EOPNOTSUPP for an operation that is not offered, or an endpoint without its direction.
    ///
    /// # Safety
    /// As [`start`].
    unsafe fn check(
        ep: &Endpoint,
        call: &Call,
        op_flags: u64,
        guard: &Guard<'_>,
    ) -> Result<Self, i32> {
        check_flags(op_flags)?;
        let operation = offered(call.op, call.datatype, call.form)?;
        if !ep.may(right_of(operation, call.form)) || op_flags & FI_TAGGED != 0 {
            return Err(FI_EOPNOTSUPP);
        }
        let size = operation.datatype.size();
        let (has_operand, compares, fetches) =
            (operation.operands() > 0, call.form == Form::Compare, call.form != Form::Base);
        // A fetch has no operand: its result gives the number of elements.
        let targets = if call.form == Form::Fetch { call.result } else { call.operand };
        // SAFETY: the caller vouches; buffers that an operation does not use are not read.
        let (operand, compare, result, remote) = unsafe {
            let list = |used: bool, elements: Elements| {
                if used { ep.located(elements.memory(size)?) } else { Ok(SegmentList::EMPTY) }
            };
            (
                list(has_operand, call.operand)?,
                list(compares, call.compare)?,
                list(fetches, call.result)?,
                call.target.ranges(targets.count(), size)?,
            )
        };
        let total = usize::try_from(remote.total()).map_err(|_| FI_EMSGSIZE)?;
        let fits = |used: bool, list: &SegmentList| !used || list.len() == total;
        if total == 0
            || !fits(has_operand, &operand)
            || !fits(compares, &compare)
            || !fits(fetches, &result)
        {
            return Err(FI_EINVAL);
        }
        let inject = op_flags & FI_INJECT != 0;
        let state = ep.state(guard);
        if inject && total > state.inject_atomic_size || total > state.max_atomic_size {
            return Err(FI_EMSGSIZE);
        }
        let (form, data, peer) = (call.form, call.data, call.peer);
        let fence = op_flags & FI_FENCE != 0;
        Ok(Self { operation, form, operand, compare, result, remote, data, peer, inject, fence })
    }

    /// The operation of a deferred request (fi_trigger.3).
    ///
    /// # Safety
    /// `request` and what it points to are as for the call of its form.
    pub(super) unsafe fn of_request(
        ep: &Endpoint,
        request: &Request<'_>,
        flags: u64,
        guard: &Guard<'_>,
    ) -> Result<Self, i32> {
        let several = |list, parts| Elements::several(list, parts);
        let (m, form, compare, result) = match *request {
            Request::Base(m) => (m, Form::Base, Elements::NONE, Elements::NONE),
            Request::Fetch(m, fetch) => {
                (m, Form::Fetch, Elements::NONE, several(fetch.msg_iov, fetch.iov_count))
            }
            Request::Compare(m, compare, fetch) => {
                let compare = several(compare.msg_iov, compare.iov_count);
                (m, Form::Compare, compare, several(fetch.msg_iov, fetch.iov_count))
            }
        };
        // SAFETY: the caller vouches.
        unsafe { Self::check(ep, &described(form, m, compare, result, flags), flags, guard) }
    }

    pub(super) fn start(
        &self,
        ep: &Endpoint,
        guard: &Guard<'_>,
        account: Account,
    ) -> Result<(), OpError> {
        if self.operand.is_on_device() || self.compare.is_on_device() {
            let [operand, compare] = [self.operand, self.compare].map(|list| Kept::of(list, true));
            let (operand, compare) = (operand.memory()?, compare.memory()?);
            return Self { operand, compare, inject: true, ..*self }.start(ep, guard, account);
        }
        let op = AtomicOp {
            peer: ep.peer(self.peer, guard)?,
            operation: self.operation,
            form: self.form,
            operand: self.operand,
            compare: self.compare,
            result: self.result,
            remote: self.remote,
            data: self.data,
            context: account.context,
            report: account.report,
            inject: self.inject,
            fence: self.fence,
        };
        let mut host = ep.host(guard);
        let engine = ep.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        engine.atomic(&op, &mut host)
    }

    /// Injected data is copied now: the application may reuse its buffers while the operation waits.
    pub(super) fn starter(self) -> impl Starter {
        let keep = |list| Kept::of(list, self.inject);
        let (operand, compare) = (keep(self.operand), keep(self.compare));
        move |ep: &Endpoint, guard: &Guard<'_>, account| {
            let (operand, compare) = (operand.memory()?, compare.memory()?);
            Self { operand, compare, ..self }.start(ep, guard, account)
        }
    }

    pub(super) fn kind(&self) -> Kind {
        let direction = match self.form {
            Form::Base => Direction::Update,
            Form::Fetch | Form::Compare => Direction::Fetch,
        };
        Kind { direction, tagged: false, tag: 0, to: self.peer }
    }
}

/// The message of a deferred request.
pub(super) enum Request<'a> {
    Base(&'a fi_msg_atomic),
    Fetch(&'a fi_msg_atomic, &'a fi_msg_fetch),
    Compare(&'a fi_msg_atomic, &'a fi_msg_compare, &'a fi_msg_fetch),
}

impl Request<'_> {
    pub(super) fn context(&self) -> *mut c_void {
        let (Self::Base(m) | Self::Fetch(m, _) | Self::Compare(m, ..)) = *self;
        m.context
    }
}

/// The call that a structure describes.
fn described(
    form: Form,
    m: &fi_msg_atomic,
    compare: Elements,
    result: Elements,
    flags: u64,
) -> Call {
    Call {
        form,
        op: m.op,
        datatype: m.datatype,
        operand: Elements::several(m.msg_iov, m.iov_count),
        compare,
        result,
        target: Target::Several(m.rma_iov, m.rma_iov_count),
        data: (flags & FI_REMOTE_CQ_DATA != 0).then_some(m.data),
        peer: m.addr,
        context: m.context,
        flags: Flags::Call(flags),
    }
}

/// A call on one contiguous target.
fn one_place(
    (form, datatype, op): (Form, fi_datatype, fi_op),
    (operand, compare, result): (Elements, Elements, Elements),
    (peer, addr, key): (fi_addr_t, u64, u64),
    (context, flags): (*mut c_void, Flags),
) -> Call {
    let target = Target::One { addr, key };
    Call { form, op, datatype, operand, compare, result, target, data: None, peer, context, flags }
}

/// Starts the operation that a structure describes.
///
/// # Safety
/// `msg` is null or as fi_atomic(3) says.
unsafe fn message(
    ep: *mut fid_ep,
    form: Form,
    msg: *const fi_msg_atomic,
    compare: Elements,
    result: Elements,
    flags: u64,
) -> isize {
    // SAFETY: the caller vouches.
    unsafe {
        let Some(m) = msg.as_ref() else { return -(FI_EINVAL as isize) };
        start(endpoint(ep), described(form, m, compare, result, flags))
    }
}

/// The most elements that an operation may have. Errors: EINVAL, EOPNOTSUPP.
///
/// # Safety
/// `ep` is an endpoint of this provider, `count` null or valid.
unsafe fn valid(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    form: Form,
    count: *mut usize,
) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let (ep, count) = unsafe { (&endpoint(ep).shared, count.as_mut().ok_or(FI_EINVAL)?) };
    let operation = offered(op, datatype, form)?;
    if !ep.may(right_of(operation, form)) {
        return Err(FI_EOPNOTSUPP);
    }
    let guard = ep.domain.lock.lock();
    let most = ep.state(&guard).max_atomic_size / operation.datatype.size();
    if most == 0 {
        return Err(FI_EOPNOTSUPP);
    }
    *count = most;
    Ok(())
}
