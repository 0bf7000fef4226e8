//! `struct fi_ops_tagged`.

use super::state::endpoint;
use super::transfer::{Flags, Tagging, receive, segment, send, vector};
use crate::ofi::guard::data_entry;
use crate::ofi::table::{Table, stubs};
use libc::iovec;
use libfabric_sys::{
    FI_EINVAL, FI_REMOTE_CQ_DATA, fi_addr_t, fi_msg_tagged, fi_ops_tagged, fid_ep,
};
use std::ffi::c_void;
use std::ptr::null_mut;

// SAFETY: fi_ops_tagged has nine slots.
const STUBS: fi_ops_tagged = unsafe { stubs::<fi_ops_tagged, 9>() };

pub(super) static OPS: Table<fi_ops_tagged> = Table::new(fi_ops_tagged {
    recv: Some(recv),
    recvv: Some(recvv),
    recvmsg: Some(recvmsg),
    send: Some(send_one),
    sendv: Some(sendv),
    sendmsg: Some(sendmsg),
    inject: Some(inject),
    senddata: Some(senddata),
    injectdata: Some(injectdata),
    ..STUBS
});

/// Those of a transmit context.
pub(super) static TRANSMIT_OPS: Table<fi_ops_tagged> = Table::new(fi_ops_tagged {
    send: Some(send_one),
    sendv: Some(sendv),
    sendmsg: Some(sendmsg),
    inject: Some(inject),
    senddata: Some(senddata),
    injectdata: Some(injectdata),
    ..STUBS
});

/// Those of a receive context.
pub(super) static RECEIVE_OPS: Table<fi_ops_tagged> = Table::new(fi_ops_tagged {
    recv: Some(recv),
    recvv: Some(recvv),
    recvmsg: Some(recvmsg),
    ..STUBS
});

/// Those of a scalable endpoint, whose contexts have them.
pub(super) static NO_OPS: Table<fi_ops_tagged> = Table::new(STUBS);

// SAFETY of all entries: `ep` is an open endpoint of ours; buffers and vectors are as fi_tagged.3
// says.

unsafe extern "C" fn recv(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    _desc: *mut c_void,
    src: fi_addr_t,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_trecv", || unsafe {
        let tagging = Tagging::tagged(tag, ignore);
        receive(endpoint(ep), segment(buf, len), tagging, src, context, Flags::Default)
    })
}

unsafe extern "C" fn recvv(
    ep: *mut fid_ep,
    iov: *const iovec,
    _desc: *mut *mut c_void,
    count: usize,
    src: fi_addr_t,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_trecvv", || unsafe {
        let tagging = Tagging::tagged(tag, ignore);
        receive(endpoint(ep), vector(iov, count), tagging, src, context, Flags::Default)
    })
}

unsafe extern "C" fn recvmsg(ep: *mut fid_ep, msg: *const fi_msg_tagged, flags: u64) -> isize {
    // SAFETY: see above.
    data_entry("fi_trecvmsg", || unsafe {
        let Some(m) = msg.as_ref() else { return -(FI_EINVAL as isize) };
        let to = vector(m.msg_iov, m.iov_count);
        let tagging = Tagging::tagged(m.tag, m.ignore);
        receive(endpoint(ep), to, tagging, m.addr, m.context, Flags::Call(flags))
    })
}

unsafe extern "C" fn send_one(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    _desc: *mut c_void,
    dest: fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_tsend", || unsafe {
        let tagging = Tagging::tagged(tag, 0);
        send(endpoint(ep), segment(buf, len), tagging, None, dest, context, Flags::Default)
    })
}

unsafe extern "C" fn sendv(
    ep: *mut fid_ep,
    iov: *const iovec,
    _desc: *mut *mut c_void,
    count: usize,
    dest: fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_tsendv", || unsafe {
        let tagging = Tagging::tagged(tag, 0);
        send(endpoint(ep), vector(iov, count), tagging, None, dest, context, Flags::Default)
    })
}

unsafe extern "C" fn sendmsg(ep: *mut fid_ep, msg: *const fi_msg_tagged, flags: u64) -> isize {
    // SAFETY: see above.
    data_entry("fi_tsendmsg", || unsafe {
        let Some(m) = msg.as_ref() else { return -(FI_EINVAL as isize) };
        let data = (flags & FI_REMOTE_CQ_DATA != 0).then_some(m.data);
        let from = vector(m.msg_iov, m.iov_count);
        let tagging = Tagging::tagged(m.tag, 0);
        send(endpoint(ep), from, tagging, data, m.addr, m.context, Flags::Call(flags))
    })
}

unsafe extern "C" fn inject(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    dest: fi_addr_t,
    tag: u64,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_tinject", || unsafe {
        let tagging = Tagging::tagged(tag, 0);
        send(endpoint(ep), segment(buf, len), tagging, None, dest, null_mut(), Flags::Inject)
    })
}

unsafe extern "C" fn senddata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    _desc: *mut c_void,
    data: u64,
    dest: fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_tsenddata", || unsafe {
        let tagging = Tagging::tagged(tag, 0);
        send(endpoint(ep), segment(buf, len), tagging, Some(data), dest, context, Flags::Default)
    })
}

unsafe extern "C" fn injectdata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    data: u64,
    dest: fi_addr_t,
    tag: u64,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_tinjectdata", || unsafe {
        let tagging = Tagging::tagged(tag, 0);
        send(endpoint(ep), segment(buf, len), tagging, Some(data), dest, null_mut(), Flags::Inject)
    })
}
