//! Deferred work (fi_trigger.3, "Deferred work queues"): requests that an application queues at a domain
//! become operations of its endpoints.
//!
//! Requests are copied when they are queued: their structures are not read again. Buffers are read when an operation
//! starts, also with FI_INJECT: before that they are "not read or otherwise accessed".

use super::atomic::{Changing, Request};
use super::handle::named;
use super::rma::Accessing;
use super::state::Endpoint;
use super::transfer::{Receiving, Sending, Tagging, transfer, vector};
use crate::memory::SegmentList;
use crate::memory::keys::Right;
use crate::ofi::cntr::{self, Counter};
use crate::ofi::domain::Domain;
use crate::ofi::lock::Guard;
use crate::ofi::trigger::{Account, Action, Count, Owner};
use crate::protocol::Report;
use libfabric_sys::{
    FI_CLAIM, FI_COMPLETION, FI_DISCARD, FI_EINVAL, FI_ENOCQ, FI_ENOENT, FI_ENOSYS, FI_EOPNOTSUPP,
    FI_MULTI_RECV, FI_OP_ATOMIC, FI_OP_CNTR_ADD, FI_OP_CNTR_SET, FI_OP_COMPARE_ATOMIC,
    FI_OP_FETCH_ATOMIC, FI_OP_READ, FI_OP_RECV, FI_OP_SEND, FI_OP_TRECV, FI_OP_TSEND, FI_OP_WRITE,
    FI_PEEK, FI_REMOTE_CQ_DATA, fi_addr_t, fi_deferred_work, fi_op_atomic, fi_op_cntr,
    fi_op_compare_atomic, fi_op_fetch_atomic, fi_op_msg, fi_op_rma, fi_op_tagged, fid_cntr, fid_ep,
};
use std::ffi::c_void;
use std::sync::Arc;

/// A request, translated into an action.
struct Transfer {
    action: Action,
    context: *mut c_void,
    flags: u64,
}

/// FI_QUEUE_WORK. Errors: EINVAL, EMSGSIZE, EAGAIN; ENOSYS for a request that is not supported (fi_trigger.3).
///
/// # Safety
/// `request` is null or as fi_trigger.3 says.
pub(in crate::ofi) unsafe fn queue(
    domain: &Arc<Domain>,
    request: *const fi_deferred_work,
) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let queued = unsafe { try_queue(domain, request) };
    queued.map_err(|error| if error == FI_EOPNOTSUPP { FI_ENOSYS } else { error })
}

/// The same with the errors of the calls: EOPNOTSUPP for some operations that are not supported.
///
/// # Safety
/// As for [`queue`].
unsafe fn try_queue(domain: &Arc<Domain>, request: *const fi_deferred_work) -> Result<(), i32> {
    // SAFETY: the caller vouches for the request and all that it points to.
    unsafe {
        let work = request.as_ref().ok_or(FI_EINVAL)?;
        let waits_for = counter(domain, work.triggering_cntr)?.ok_or(FI_EINVAL)?;
        let raises = counter(domain, work.completion_cntr)?;
        let guard = domain.lock.control();
        let transfer = match work.op_type {
            FI_OP_CNTR_ADD | FI_OP_CNTR_SET => {
                return queue_count(domain, work, waits_for, raises, &guard);
            }
            FI_OP_SEND => send(domain, plain(work.op.msg)?, &guard)?,
            FI_OP_RECV => receive(domain, plain(work.op.msg)?, &guard)?,
            FI_OP_TSEND => send(domain, tagged(work.op.tagged)?, &guard)?,
            FI_OP_TRECV => receive(domain, tagged(work.op.tagged)?, &guard)?,
            FI_OP_READ => access(domain, Right::Read, work.op.rma, &guard)?,
            FI_OP_WRITE => access(domain, Right::Write, work.op.rma, &guard)?,
            FI_OP_ATOMIC => {
                let op: &fi_op_atomic = work.op.atomic.as_ref().ok_or(FI_EINVAL)?;
                change(domain, op.ep, &Request::Base(&op.msg), op.flags, &guard)?
            }
            FI_OP_FETCH_ATOMIC => {
                let op: &fi_op_fetch_atomic = work.op.fetch_atomic.as_ref().ok_or(FI_EINVAL)?;
                change(domain, op.ep, &Request::Fetch(&op.msg, &op.fetch), op.flags, &guard)?
            }
            FI_OP_COMPARE_ATOMIC => {
                let op: &fi_op_compare_atomic = work.op.compare_atomic.as_ref().ok_or(FI_EINVAL)?;
                let request = Request::Compare(&op.msg, &op.compare, &op.fetch);
                change(domain, op.ep, &request, op.flags, &guard)?
            }
            _ => return Err(FI_ENOSYS),
        };
        if let Some(raises) = raises {
            // A thread that waits for this counter has to progress the endpoint that raises it.
            domain.feed(raises.clone(), &guard)?;
        }
        let account = Account {
            context: transfer.context.expose_provenance() as u64,
            report: Report::new(transfer.flags & FI_COMPLETION != 0, 0),
        };
        let owner = Owner::Deferred {
            request: request.addr(),
            counter: raises.map(|raises| raises.clone() as Arc<dyn Count>),
            account,
        };
        waits_for.queue(work.threshold, (transfer.action, owner), &guard)
    }
}

/// FI_CANCEL_WORK. Errors: ENOENT when no operation of this request waits (any more).
///
/// # Safety
/// `request` is only compared.
pub(in crate::ofi) unsafe fn cancel(
    domain: &Domain,
    request: *const fi_deferred_work,
) -> Result<(), i32> {
    if request.is_null() {
        return Err(FI_EINVAL);
    }
    let guard = domain.lock.control();
    match domain.triggers.cancel_request(request.addr(), &guard) {
        0 => Err(FI_ENOENT),
        _ => Ok(()),
    }
}

/// FI_FLUSH_WORK: all work of the domain, or the work that waits for the `triggering_cntr` of a request.
///
/// # Safety
/// `request` is null or as fi_trigger.3 says.
pub(in crate::ofi) unsafe fn flush(
    domain: &Arc<Domain>,
    request: *const fi_deferred_work,
) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let of = unsafe {
        request.as_ref().map_or(Ok(None), |request| counter(domain, request.triggering_cntr))
    }?;
    let guard = domain.lock.control();
    domain.triggers.flush(of.map(|counter| Arc::as_ptr(counter).addr()), &guard);
    Ok(())
}

/// Errors: EINVAL for a counter of another domain or provider.
///
/// # Safety
/// `cntr` is null or an open counter.
unsafe fn counter<'a>(
    domain: &Arc<Domain>,
    cntr: *mut fid_cntr,
) -> Result<Option<&'a Arc<Counter>>, i32> {
    if cntr.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller vouches.
    let counter = unsafe { cntr::named(cntr) }?;
    if Arc::ptr_eq(&counter.domain, domain) { Ok(Some(counter)) } else { Err(FI_EINVAL) }
}

/// Errors: EINVAL for an endpoint of another domain, one without FI_TRIGGER, or one that is not enabled; EOPNOTSUPP for a
/// further context of a scalable endpoint.
///
/// # Safety
/// `ep` is null or an open endpoint of this provider.
unsafe fn triggerable<'a>(
    domain: &Arc<Domain>,
    ep: *mut fid_ep,
    guard: &Guard<'_>,
) -> Result<&'a Endpoint, i32> {
    // SAFETY: the caller vouches.
    let handle = unsafe { named(ep) }?;
    let ep = &*handle.shared;
    let fits = Arc::ptr_eq(&ep.domain, domain) && ep.triggers && ep.engine(guard).is_some();
    match handle.context {
        _ if !fits => Err(FI_EINVAL),
        0 => Ok(ep),
        _ => Err(FI_EOPNOTSUPP),
    }
}

/// # Safety
/// As for [`queue`].
unsafe fn queue_count(
    domain: &Arc<Domain>,
    work: &fi_deferred_work,
    waits_for: &Arc<Counter>,
    raises: Option<&Arc<Counter>>,
    guard: &Guard<'_>,
) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let op: &fi_op_cntr = unsafe { work.op.cntr.as_ref() }.ok_or(FI_EINVAL)?;
    if raises.is_some() {
        return Err(FI_EINVAL); // fi_trigger.3: "must be NULL for counter operations"
    }
    // SAFETY: the caller vouches for the counters that the request names.
    let changed = unsafe { counter(domain, op.cntr) }?.ok_or(FI_EINVAL)?;
    domain.feed(changed.clone(), guard)?;
    let action = match work.op_type {
        FI_OP_CNTR_ADD => Action::Add(changed.clone(), op.value),
        _ => Action::Set(changed.clone(), op.value),
    };
    let account = Account { context: 0, report: Report::default() };
    let request = std::ptr::from_ref(work).addr();
    let owner = Owner::Deferred { request, counter: None, account };
    waits_for.queue(work.threshold, (action, owner), guard)
}

/// The common parts of plain and tagged messages.
struct Message {
    ep: *mut fid_ep,
    memory: SegmentList,
    tagging: Tagging,
    peer: fi_addr_t,
    data: u64,
    context: *mut c_void,
    flags: u64,
}

/// # Safety
/// As for [`queue`].
unsafe fn plain(op: *const fi_op_msg) -> Result<Message, i32> {
    // SAFETY: the caller vouches.
    let (m, memory, ep, flags) = unsafe {
        let op = op.as_ref().ok_or(FI_EINVAL)?;
        (&op.msg, vector(op.msg.msg_iov, op.msg.iov_count)?, op.ep, op.flags)
    };
    let (tagging, peer, data, context) = (Tagging::PLAIN, m.addr, m.data, m.context);
    Ok(Message { ep, memory, tagging, peer, data, context, flags })
}

/// # Safety
/// As for [`queue`].
unsafe fn tagged(op: *const fi_op_tagged) -> Result<Message, i32> {
    // SAFETY: the caller vouches.
    let (m, memory, ep, flags) = unsafe {
        let op = op.as_ref().ok_or(FI_EINVAL)?;
        (&op.msg, vector(op.msg.msg_iov, op.msg.iov_count)?, op.ep, op.flags)
    };
    let tagging = Tagging::tagged(m.tag, m.ignore);
    let (peer, data, context) = (m.addr, m.data, m.context);
    Ok(Message { ep, memory, tagging, peer, data, context, flags })
}

/// # Safety
/// The message's endpoint is null or open.
unsafe fn send(domain: &Arc<Domain>, message: Message, guard: &Guard<'_>) -> Result<Transfer, i32> {
    let Message { ep, memory, tagging, peer, data, context, flags } = message;
    // SAFETY: the caller vouches.
    let endpoint = unsafe { triggerable(domain, ep, guard) }?;
    let data = (flags & FI_REMOTE_CQ_DATA != 0).then_some(data);
    let memory = endpoint.located(memory)?;
    let sending = Sending::check(endpoint, memory, tagging, data, peer, flags, guard)?;
    let start = move |ep: &Endpoint, guard: &Guard<'_>, account| sending.start(ep, guard, account);
    let action = transfer(endpoint, sending.kind(), start);
    Ok(Transfer { action, context, flags })
}

/// Deferred receives complete once and involve no peek: no FI_MULTI_RECV, FI_PEEK, FI_CLAIM or FI_DISCARD.
///
/// # Safety
/// The message's endpoint is null or open.
unsafe fn receive(
    domain: &Arc<Domain>,
    message: Message,
    guard: &Guard<'_>,
) -> Result<Transfer, i32> {
    let Message { ep, memory, tagging, peer, context, flags, .. } = message;
    // SAFETY: the caller vouches.
    let endpoint = unsafe { triggerable(domain, ep, guard) }?;
    if flags & (FI_MULTI_RECV | FI_PEEK | FI_CLAIM | FI_DISCARD) != 0 {
        return Err(FI_ENOSYS);
    }
    let bindings = endpoint.bindings(guard);
    if bindings.shared_receive.is_some() {
        return Err(FI_EOPNOTSUPP); // receives are posted to the shared context
    }
    if !bindings.reports_received() {
        return Err(FI_ENOCQ);
    }
    let memory = endpoint.located(memory)?;
    let receiving = Receiving::check((endpoint, 0), memory, tagging, peer, flags, guard)?;
    let action = transfer(endpoint, receiving.kind(), receiving.starter());
    Ok(Transfer { action, context, flags })
}

/// # Safety
/// As for [`queue`].
unsafe fn access(
    domain: &Arc<Domain>,
    right: Right,
    op: *const fi_op_rma,
    guard: &Guard<'_>,
) -> Result<Transfer, i32> {
    // SAFETY: the caller vouches.
    unsafe {
        let op = op.as_ref().ok_or(FI_EINVAL)?;
        let endpoint = triggerable(domain, op.ep, guard)?;
        let accessing = Accessing::of_message(endpoint, right, &op.msg, op.flags, guard)?;
        let start =
            move |ep: &Endpoint, guard: &Guard<'_>, account| accessing.start(ep, guard, account);
        let action = transfer(endpoint, accessing.kind(), start);
        Ok(Transfer { action, context: op.msg.context, flags: op.flags })
    }
}

/// # Safety
/// As for [`queue`].
unsafe fn change(
    domain: &Arc<Domain>,
    ep: *mut fid_ep,
    request: &Request<'_>,
    flags: u64,
    guard: &Guard<'_>,
) -> Result<Transfer, i32> {
    // SAFETY: the caller vouches.
    unsafe {
        let endpoint = triggerable(domain, ep, guard)?;
        let changing = Changing::of_request(endpoint, request, flags, guard)?;
        let start =
            move |ep: &Endpoint, guard: &Guard<'_>, account| changing.start(ep, guard, account);
        let action = transfer(endpoint, changing.kind(), start);
        Ok(Transfer { action, context: request.context(), flags })
    }
}
