//! Asynchronous events.

use super::device::id_of;
use super::zeroed;
use crate::nic::{self, EventKind};
use crate::sys::{set_errno, take_count};
use rdma_core_sys::{ibv_async_event, ibv_context};
use std::ffi::c_int;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    to: *mut ibv_async_event,
) -> c_int {
    // SAFETY: an open device.
    let (fd, id) = unsafe { ((*context).async_fd, id_of(context)) };
    if let Err(errno) = take_count(fd) {
        // The kernel ends the descriptor of a removed device.
        let removed = nic::with(|nic| nic.is_removed()).unwrap_or(false);
        set_errno(if removed { libc::EIO } else { errno });
        return -1;
    }
    let Some(event) = nic::with(|nic| nic.next_event(id)).flatten() else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    // SAFETY: the program's structure.
    unsafe {
        *to = zeroed();
        (*to).event_type = event.code;
        match event.kind {
            EventKind::Port(number) => (*to).element.port_num = number.into(),
            EventKind::Device => {}
        }
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) {}
