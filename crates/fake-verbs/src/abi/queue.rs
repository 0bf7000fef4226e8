//! Completion queues and their channels; shared receives.

use super::device::VECTORS;
use super::{address, attempt, code, kept, null, settled, zeroed};
use crate::counters::see;
use crate::nic::{self, Entry};
use crate::sys::{set_errno, take_count};
use rdma_core_sys::{
    IBV_WC_GRH, IBV_WC_WITH_IMM, ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_pd, ibv_srq,
    ibv_srq_init_attr, ibv_wc, ibv_wc__bindgen_ty_1,
};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::with_exposed_provenance_mut;

/// A channel with its number.
#[repr(C)]
struct MadeChannel {
    channel: ibv_comp_channel,
    id: u32,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    match attempt(|nic| nic.make_channel()) {
        Ok((id, fd)) => {
            kept(MadeChannel { channel: ibv_comp_channel { context, fd, refcnt: 0 }, id }).cast()
        }
        Err(errno) => null(errno),
    }
}

/// # Safety
/// A channel of [`ibv_create_comp_channel`], or null.
unsafe fn channel_id(channel: *mut ibv_comp_channel) -> Option<u32> {
    // SAFETY: the caller vouches.
    (!channel.is_null()).then(|| unsafe { (*channel.cast::<MadeChannel>()).id })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: a channel.
    let id = unsafe { channel_id(channel) }.unwrap_or(0);
    code(nic::with(|nic| {
        nic.end_channel(id);
        Ok(())
    }))
}

/// A queue with room for `entries`, whose events go to `vector`. Error: errno.
///
/// # Safety
/// An open device, and a channel or null.
pub(super) unsafe fn make(
    context: *mut ibv_context,
    (entries, vector): (u32, u32),
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
) -> Result<*mut ibv_cq_ex, i32> {
    if vector >= VECTORS {
        return Err(libc::EINVAL);
    }
    see("vector", vector);
    // SAFETY: the caller vouches.
    let channel_id = unsafe { channel_id(channel) };
    let (handle, cqe) = attempt(|nic| nic.make_queue(entries, channel_id))?;
    // SAFETY: a C structure.
    let mut queue: ibv_cq_ex = unsafe { zeroed() };
    (queue.context, queue.channel, queue.cq_context) = (context, channel, cq_context);
    (queue.handle, queue.cqe) = (handle, cqe as c_int);
    let queue = kept(queue);
    nic::with(|nic| nic.name_queue(handle, address(queue)));
    Ok(queue)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let [entries, vector] = [entries, vector].map(|n| u32::try_from(n).unwrap_or(0));
    // SAFETY: the caller vouches.
    match unsafe { make(context, (entries, vector), cq_context, channel) } {
        Ok(queue) => queue.cast(),
        Err(errno) => null(errno),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: a completion queue.
    let handle = unsafe { (*cq).handle };
    settled("completion events", |nic| nic.queue_events(handle));
    code(nic::with(|nic| {
        nic.end_queue(handle);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel.
    let (fd, id) = unsafe { ((*channel).fd, channel_id(channel).unwrap_or(0)) };
    if let Err(errno) = take_count(fd) {
        set_errno(errno);
        return -1;
    }
    let Some(ready) = nic::with(|nic| nic.next_ready(id)).flatten() else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    let ready: *mut ibv_cq = with_exposed_provenance_mut(ready as usize);
    // SAFETY: the queue's memory is kept; the program's pointers.
    unsafe {
        *cq = ready;
        *cq_context = (*ready).cq_context;
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: a completion queue.
    let handle = unsafe { (*cq).handle };
    nic::with(|nic| nic.acknowledge_queue(handle, count));
}

/// The entry as programs see it; what is undefined in it is not zero.
fn wc(entry: &Entry) -> ibv_wc {
    let routed = if entry.routed { IBV_WC_GRH } else { 0 };
    let immediate = if entry.immediate.is_some() { IBV_WC_WITH_IMM } else { 0 };
    ibv_wc {
        wr_id: entry.id,
        status: entry.status,
        opcode: entry.opcode,
        vendor_err: 0,
        byte_len: entry.len,
        __bindgen_anon_1: ibv_wc__bindgen_ty_1 { imm_data: entry.immediate.unwrap_or(0xeeee_eeee) },
        qp_num: entry.pair,
        src_qp: entry.source,
        wc_flags: routed | immediate,
        pkey_index: 0,
        slid: entry.source_lid,
        sl: 0,
        dlid_path_bits: 0,
    }
}

pub(super) unsafe extern "C" fn poll(cq: *mut ibv_cq, most: c_int, to: *mut ibv_wc) -> c_int {
    // SAFETY: a completion queue.
    let handle = unsafe { (*cq).handle };
    let most = usize::try_from(most).unwrap_or(0);
    let entries = nic::with(|nic| nic.poll(handle, most)).unwrap_or_default();
    for (at, entry) in entries.iter().enumerate() {
        // SAFETY: the program has room for `most`.
        unsafe { *to.add(at) = wc(entry) };
    }
    entries.len() as c_int
}

pub(super) unsafe extern "C" fn arm(cq: *mut ibv_cq, _solicited: c_int) -> c_int {
    // SAFETY: a completion queue.
    let handle = unsafe { (*cq).handle };
    code(nic::with(|nic| {
        nic.arm(handle);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_srq(
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: a protection domain and the program's structure.
    let (context, domain, init) = unsafe { ((*pd).context, (*pd).handle, &mut *init) };
    let (handle, depth) = match attempt(|nic| nic.make_shared(domain, init.attr.max_wr)) {
        Ok(made) => made,
        Err(errno) => return null(errno),
    };
    init.attr.max_wr = depth;
    // SAFETY: a C structure.
    let mut shared: ibv_srq = unsafe { zeroed() };
    (shared.context, shared.pd, shared.handle) = (context, pd, handle);
    shared.srq_context = init.srq_context;
    kept(shared)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: shared receives.
    let handle = unsafe { (*srq).handle };
    code(nic::with(|nic| {
        nic.end_shared(handle);
        Ok(())
    }))
}
