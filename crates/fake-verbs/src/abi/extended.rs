//! Queue pairs and completion queues with operations of their own: `ibv_wr_start` and `ibv_start_poll`.

use super::pair::{self, Wish};
use super::{null, post, queue, refused};
use crate::counters::{Counter, count};
use crate::nic::{self, Entry, Operation, Segment, Send};
use crate::verify::violation;
use rdma_core_sys::{
    IBV_QP_EX_WITH_SEND, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_QPT_UD, IBV_SEND_SIGNALED,
    IBV_WC_GRH, ibv_ah, ibv_context, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_poll_cq_attr, ibv_qp,
    ibv_qp_ex, ibv_qp_init_attr_ex, ibv_wc_opcode,
};
use std::ffi::{c_int, c_uint, c_void};

pub(super) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: the program's structure.
    let init = unsafe { &mut *init };
    let wants = init.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
    let knows = init.send_ops_flags == u64::from(IBV_QP_EX_WITH_SEND) && init.qp_type == IBV_QPT_UD;
    if wants && !knows {
        return null(libc::EOPNOTSUPP);
    }
    let wish = Wish {
        pd: init.pd,
        queues: (init.send_cq, init.recv_cq),
        shared: init.srq,
        kind: init.qp_type,
        all_signaled: init.sq_sig_all != 0,
        qp_context: init.qp_context,
    };
    // SAFETY: the caller vouches.
    let made = match unsafe { pair::make(&wish, &mut init.cap) } {
        Ok(made) => made,
        Err(errno) => return null(errno),
    };
    if wants {
        // SAFETY: the structure made above.
        let qp = unsafe { &mut *made };
        qp.wr_start = Some(start);
        qp.wr_send = Some(send);
        qp.wr_set_ud_addr = Some(set_ud_addr);
        qp.wr_set_inline_data = Some(set_inline_data);
        qp.wr_set_sge = Some(set_sge);
        qp.wr_complete = Some(complete);
        qp.wr_abort = Some(abort);
    }
    made.cast()
}

/// Calls `act` with the requests that are being built.
///
/// # Safety
/// A queue pair.
unsafe fn building<R>(qp: *mut ibv_qp_ex, act: impl FnOnce(&mut Vec<Send>) -> R) -> R {
    // SAFETY: the caller vouches.
    let number = unsafe { (*qp).qp_base.handle };
    let result = nic::with(|nic| nic.building(number).map(act)).flatten();
    result.unwrap_or_else(|| violation("a request is built for a queue pair after its destruction"))
}

/// The request that is being built.
///
/// # Safety
/// A queue pair.
unsafe fn last(qp: *mut ibv_qp_ex, act: impl FnOnce(&mut Send)) {
    // SAFETY: the caller vouches.
    unsafe {
        building(qp, |list| match list.last_mut() {
            Some(send) => act(send),
            None => violation("an attribute is set before its request"),
        });
    }
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: a queue pair.
    unsafe { building(qp, Vec::clear) };
}

unsafe extern "C" fn send(qp: *mut ibv_qp_ex) {
    // SAFETY: a queue pair, whose members the program has set.
    let (id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    let request = Send {
        id,
        operation: Operation::Datagram { handle: 0, pair: 0, qkey: 0 },
        segments: Vec::new(),
        inline: None,
        signaled: flags & IBV_SEND_SIGNALED != 0,
        fence: false,
    };
    // SAFETY: a queue pair.
    unsafe { building(qp, |list| list.push(request)) };
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, pair: u32, qkey: u32) {
    // SAFETY: a queue pair and an address handle.
    unsafe {
        let handle = (*ah).handle;
        last(qp, |send| send.operation = Operation::Datagram { handle, pair, qkey });
    }
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let data = Segment { addr: addr.expose_provenance() as u64, len: length as u32, key: 0 };
    // SAFETY: a queue pair; the data is readable during the call.
    unsafe {
        let bytes = post::bytes_of(&[data]);
        last(qp, |send| send.inline = Some(bytes));
    }
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, key: u32, addr: u64, len: u32) {
    // SAFETY: a queue pair.
    unsafe { last(qp, |send| send.segments = vec![Segment { addr, len, key }]) };
}

/// Posts all, or none.
unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: a queue pair.
    let (number, list) = unsafe { ((*qp).qp_base.handle, building(qp, std::mem::take)) };
    let result = nic::with(|nic| {
        count(Counter::Extended);
        if !nic.has_room(number, list.len()) {
            return Err(libc::ENOMEM);
        }
        for send in list {
            nic.post_send(number, send)?;
        }
        nic.ring(number);
        Ok(())
    });
    match result.unwrap_or(Err(libc::ENODEV)) {
        Ok(()) => 0,
        Err(errno) => refused(errno),
    }
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: a queue pair.
    unsafe { building(qp, Vec::clear) };
}

pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    init: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the program's structure and objects.
    let made = unsafe {
        let init = &*init;
        queue::make(context, (init.cqe, init.comp_vector), init.cq_context, init.channel)
    };
    let made = match made {
        Ok(made) => made,
        Err(errno) => return null(errno),
    };
    // SAFETY: the structure made above.
    let cq = unsafe { &mut *made };
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_byte_len = Some(read_byte_len);
    cq.read_src_qp = Some(read_src_qp);
    cq.read_wc_flags = Some(read_wc_flags);
    cq.read_slid = Some(read_slid);
    cq.read_qp_num = Some(read_qp_num);
    made
}

/// Takes the next entry: 0, or ENOENT.
///
/// # Safety
/// A completion queue.
unsafe fn take(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the caller vouches.
    let handle = unsafe { (*cq).handle };
    let entry = nic::with(|nic| {
        let entry = nic.poll(handle, 1).pop();
        if let Some(current) = nic.current(handle) {
            *current = entry;
        }
        entry
    });
    let Some(entry) = entry.flatten() else { return libc::ENOENT };
    // SAFETY: the caller vouches.
    unsafe { ((*cq).wr_id, (*cq).status) = (entry.id, entry.status) };
    0
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, _attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: a completion queue.
    unsafe { take(cq) }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: a completion queue.
    unsafe { take(cq) }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: a completion queue.
    let handle = unsafe { (*cq).handle };
    nic::with(|nic| nic.current(handle).map(Option::take));
}

/// The entry between start and end.
///
/// # Safety
/// A completion queue.
unsafe fn current(cq: *mut ibv_cq_ex) -> Entry {
    // SAFETY: the caller vouches.
    let handle = unsafe { (*cq).handle };
    let entry = nic::with(|nic| nic.current(handle).and_then(|current| *current)).flatten();
    entry.unwrap_or_else(|| violation("a completion is read that was not polled"))
}

macro_rules! readers {
    ($($name:ident -> $type:ty = $value:expr;)*) => {$(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: a completion queue.
            let entry = unsafe { current(cq) };
            let value: fn(Entry) -> $type = $value;
            value(entry)
        }
    )*};
}

readers! {
    read_opcode -> ibv_wc_opcode = |entry| entry.opcode;
    read_byte_len -> u32 = |entry| entry.len;
    read_src_qp -> u32 = |entry| entry.source;
    read_wc_flags -> c_uint = |entry| if entry.routed { IBV_WC_GRH } else { 0 };
    read_slid -> u32 = |entry| entry.source_lid.into();
    read_qp_num -> u32 = |entry| entry.pair;
}
