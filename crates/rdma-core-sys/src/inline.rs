// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only

//! The functions that `infiniband/verbs.h` defines inline. If a device lacks an operation they return
//! EOPNOTSUPP, or `None` if they create an object.
//!
//! # Safety
//!
//! All functions demand the same: their objects come from libibverbs, belong to one context, and are live;
//! pointers point to as much memory as the man page of the name says; and no other thread uses the same
//! object meanwhile unless that man page allows it.
#![allow(clippy::missing_safety_doc)] // above, for all of them

use crate::{
    ibv_ah, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device_attr_ex,
    ibv_poll_cq_attr, ibv_port_attr, ibv_qp, ibv_qp_ex, ibv_qp_init_attr_ex, ibv_recv_wr,
    ibv_send_wr, ibv_srq, ibv_wc, verbs_context,
};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::offset_of;
use libc::EOPNOTSUPP;

/// The value of `ibv_context::abi_compat` that marks a context inside a [`verbs_context`].
const EXTENDED: usize = usize::MAX;

/// The context with its newer operations; null if the driver has none.
///
/// # Safety
/// See the module.
pub unsafe fn verbs_get_ctx(context: *mut ibv_context) -> *mut verbs_context {
    // SAFETY: a live context; if it is marked so, it is the last member of a verbs_context.
    unsafe {
        if (*context).abi_compat.addr() != EXTENDED {
            return core::ptr::null_mut();
        }
        context.byte_sub(offset_of!(verbs_context, context)).cast()
    }
}

/// The operation, if the driver's table is new enough to have a slot for it, and the slot is filled. New
/// operations are added at the front: `sz` counts from the end.
macro_rules! operation {
    ($context:expr, $name:ident) => {{
        let context = verbs_get_ctx($context);
        let wanted = size_of::<verbs_context>() - offset_of!(verbs_context, $name);
        if context.is_null() || (*context).sz < wanted { None } else { (*context).$name }
    }};
}

/// `ibv_query_port`, with the newer members if the driver fills them. EOPNOTSUPP: the caller must use the
/// exported function of that name.
///
/// # Safety
/// See the module.
pub unsafe fn ibv_query_port_extended(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: the caller vouches.
    unsafe {
        match operation!(context, query_port) {
            Some(query) => query(context, port, attr, size_of::<ibv_port_attr>()),
            None => EOPNOTSUPP,
        }
    }
}

/// `ibv_query_device_ex`. EOPNOTSUPP: the driver has no such operation.
///
/// # Safety
/// See the module.
pub unsafe fn ibv_query_device_ex(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr_ex,
) -> c_int {
    // SAFETY: the caller vouches.
    unsafe {
        match operation!(context, query_device_ex) {
            Some(query) => query(context, core::ptr::null(), attr, size_of::<ibv_device_attr_ex>()),
            None => EOPNOTSUPP,
        }
    }
}

/// `None`: the driver has no such operation. Else the queue, or null with errno set.
///
/// # Safety
/// See the module.
pub unsafe fn ibv_create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> Option<*mut ibv_cq_ex> {
    // SAFETY: the caller vouches.
    unsafe { operation!(context, create_cq_ex).map(|create| create(context, attr)) }
}

/// `None`: the driver has no such operation. Else the queue pair, or null with errno set.
///
/// # Safety
/// See the module.
pub unsafe fn ibv_create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> Option<*mut ibv_qp> {
    // SAFETY: the caller vouches.
    unsafe { operation!(context, create_qp_ex).map(|create| create(context, attr)) }
}

/// The number of completions, or a negative number for an error.
///
/// # Safety
/// See the module.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller vouches.
    unsafe { (*(*cq).context).ops.poll_cq.map_or(-EOPNOTSUPP, |poll| poll(cq, entries, wc)) }
}

/// 0 or an error number.
///
/// # Safety
/// See the module.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller vouches.
    unsafe {
        let notify = (*(*cq).context).ops.req_notify_cq;
        notify.map_or(EOPNOTSUPP, |notify| notify(cq, solicited_only))
    }
}

/// 0, or an error number; in that case `bad` is the first request that was not posted.
///
/// # Safety
/// See the module.
#[inline]
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller vouches.
    unsafe { (*(*qp).context).ops.post_send.map_or(EOPNOTSUPP, |post| post(qp, wr, bad)) }
}

/// 0, or an error number; in that case `bad` is the first request that was not posted.
///
/// # Safety
/// See the module.
#[inline]
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller vouches.
    unsafe { (*(*qp).context).ops.post_recv.map_or(EOPNOTSUPP, |post| post(qp, wr, bad)) }
}

/// 0, or an error number; in that case `bad` is the first request that was not posted.
///
/// # Safety
/// See the module.
#[inline]
pub unsafe fn ibv_post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller vouches.
    unsafe { (*(*srq).context).ops.post_srq_recv.map_or(EOPNOTSUPP, |post| post(srq, wr, bad)) }
}

/// Defines calls through a table of a queue pair or a completion queue. A driver fills all slots of
/// features that the object was created for; an empty slot does nothing and returns `$none`.
macro_rules! through_table {
    ($($name:ident($object:ident: $type:ty $(, $arg:ident: $arg_type:ty)*)
        -> $result:ty = $slot:ident or $none:expr;)*) => {$(
        /// See the man page of this name.
        ///
        /// # Safety
        /// See the module.
        #[inline]
        pub unsafe fn $name($object: *mut $type $(, $arg: $arg_type)*) -> $result {
            // SAFETY: the caller vouches.
            unsafe {
                match (*$object).$slot {
                    Some(call) => call($object $(, $arg)*),
                    None => $none,
                }
            }
        }
    )*};
}

through_table! {
    ibv_wr_start(qp: ibv_qp_ex) -> () = wr_start or ();
    ibv_wr_complete(qp: ibv_qp_ex) -> c_int = wr_complete or EOPNOTSUPP;
    ibv_wr_abort(qp: ibv_qp_ex) -> () = wr_abort or ();
    ibv_wr_send(qp: ibv_qp_ex) -> () = wr_send or ();
    ibv_wr_set_ud_addr(qp: ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32)
        -> () = wr_set_ud_addr or ();
    ibv_wr_set_inline_data(qp: ibv_qp_ex, data: *mut c_void, len: usize)
        -> () = wr_set_inline_data or ();
    ibv_wr_set_sge(qp: ibv_qp_ex, lkey: u32, address: u64, len: u32) -> () = wr_set_sge or ();
    ibv_start_poll(cq: ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int = start_poll or EOPNOTSUPP;
    ibv_next_poll(cq: ibv_cq_ex) -> c_int = next_poll or EOPNOTSUPP;
    ibv_end_poll(cq: ibv_cq_ex) -> () = end_poll or ();
    ibv_wc_read_opcode(cq: ibv_cq_ex) -> c_uint = read_opcode or 0;
    ibv_wc_read_vendor_err(cq: ibv_cq_ex) -> u32 = read_vendor_err or 0;
    ibv_wc_read_byte_len(cq: ibv_cq_ex) -> u32 = read_byte_len or 0;
    ibv_wc_read_src_qp(cq: ibv_cq_ex) -> u32 = read_src_qp or 0;
    ibv_wc_read_slid(cq: ibv_cq_ex) -> u32 = read_slid or 0;
    ibv_wc_read_wc_flags(cq: ibv_cq_ex) -> c_uint = read_wc_flags or 0;
}
