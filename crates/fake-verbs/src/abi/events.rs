//! Asynchronous events.

use super::device::id_of;
use super::zeroed;
use crate::nic::{self, EventKind};
use crate::sys::{set_errno, take_count};
use rdma_core_sys::{
    IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, ibv_async_event, ibv_context,
};
use std::ffi::c_int;
use std::ptr::with_exposed_provenance_mut;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    to: *mut ibv_async_event,
) -> c_int {
    // SAFETY: an open device.
    let (fd, id) = unsafe { ((*context).async_fd, id_of(context)) };
    if let Err(errno) = take_count(fd) {
        // The kernel ends the descriptor of a removed device.
        let removed = nic::with(|nic| nic.is_removed(id)).unwrap_or(false);
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
            EventKind::Pair { object, .. } => {
                (*to).element.qp = with_exposed_provenance_mut(object as usize);
            }
            EventKind::Device => {}
        }
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: an event that was taken; its type says which member is valid.
    let number = unsafe {
        match (*event).event_type {
            IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_LAST_WQE_REACHED => {
                Some((*(*event).element.qp).handle)
            }
            _ => None,
        }
    };
    nic::with(|nic| nic.acknowledge_event(number));
}
