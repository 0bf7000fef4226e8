//! Posts lists of requests.

use super::refused;
use crate::nic::{self, Operation, Receive, Segment, Send};
use crate::sys::copy_from;
use crate::verify::violation;
use rdma_core_sys::{
    IBV_QPT_UD, IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, ibv_qp, ibv_recv_wr, ibv_send_wr,
    ibv_sge, ibv_srq,
};
use std::ffi::c_int;
use std::ptr::with_exposed_provenance;

/// Most requests of a list: a longer one is a circle.
const LIST_MAX: usize = 1 << 16;

/// # Safety
/// So many segments are there.
unsafe fn segments(list: *mut ibv_sge, count: c_int) -> Vec<Segment> {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller vouches.
    let at = |n| unsafe { *list.add(n) };
    let one = |sge: ibv_sge| Segment { addr: sge.addr, len: sge.length, key: sge.lkey };
    (0..count).map(|n| one(at(n))).collect()
}

/// The bytes of segments that a call brings with it.
///
/// # Safety
/// They are readable.
pub(super) unsafe fn bytes_of(segments: &[Segment]) -> Vec<u8> {
    let one = |segment: &Segment| {
        let at = with_exposed_provenance(segment.addr as usize);
        // SAFETY: the caller vouches.
        unsafe { copy_from(at, segment.len as usize) }
    };
    segments.iter().flat_map(one).collect()
}

/// # Safety
/// A request for a queue pair of this kind.
unsafe fn request(wr: &ibv_send_wr, ud: bool) -> Result<Send, i32> {
    // SAFETY: the opcode and the queue pair's type say which members of the unions are valid.
    let (operation, segments) = unsafe {
        let rdma = wr.wr.rdma;
        let (addr, rkey) = (rdma.remote_addr, rdma.rkey);
        let operation = match wr.opcode {
            IBV_WR_SEND if ud => Operation::Datagram {
                handle: (*wr.wr.ud.ah).handle,
                pair: wr.wr.ud.remote_qpn,
                qkey: wr.wr.ud.remote_qkey,
            },
            IBV_WR_RDMA_WRITE if !ud => Operation::Write { addr, rkey, immediate: None },
            IBV_WR_RDMA_WRITE_WITH_IMM if !ud => {
                Operation::Write { addr, rkey, immediate: Some(wr.__bindgen_anon_1.imm_data) }
            }
            IBV_WR_RDMA_READ if !ud => Operation::Read { addr, rkey },
            _ => return Err(libc::EINVAL),
        };
        (operation, segments(wr.sg_list, wr.num_sge))
    };
    let flag = |flag: u32| wr.send_flags & flag != 0;
    // SAFETY: inline data is readable during the call.
    let inline = flag(IBV_SEND_INLINE).then(|| unsafe { bytes_of(&segments) });
    Ok(Send {
        id: wr.wr_id,
        operation,
        segments,
        inline,
        signaled: flag(IBV_SEND_SIGNALED),
        fence: flag(IBV_SEND_FENCE),
    })
}

pub(super) unsafe extern "C" fn send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair.
    let (number, ud) = unsafe { ((*qp).handle, (*qp).qp_type == IBV_QPT_UD) };
    let result = nic::with(|nic| {
        let mut result = Ok(());
        let mut wr = first;
        for _ in 0..LIST_MAX {
            if wr.is_null() {
                break;
            }
            // SAFETY: a request of the program's list.
            let now = unsafe { &*wr };
            // SAFETY: the program vouches.
            result = unsafe { request(now, ud) }.and_then(|send| nic.post_send(number, send));
            if result.is_err() {
                break;
            }
            wr = now.next;
        }
        if result.is_ok() && !wr.is_null() {
            violation("a list of requests has no end");
        }
        nic.ring(number);
        // SAFETY: the program's pointer.
        result.inspect_err(|_| unsafe { *bad = wr })
    });
    match result {
        Some(Ok(())) => 0,
        Some(Err(errno)) => refused(errno),
        None => refused(libc::ENODEV),
    }
}

/// Posts a list of receives by `post`.
///
/// # Safety
/// A list of the program's, and its pointer for the first that was not posted.
unsafe fn each(
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    mut post: impl FnMut(Receive) -> Result<(), i32>,
) -> c_int {
    let mut wr = first;
    for _ in 0..LIST_MAX {
        if wr.is_null() {
            return 0;
        }
        // SAFETY: the caller vouches.
        let (now, segments) = unsafe { (&*wr, segments((*wr).sg_list, (*wr).num_sge)) };
        if let Err(errno) = post(Receive { id: now.wr_id, segments }) {
            // SAFETY: the caller vouches.
            unsafe { *bad = wr };
            return refused(errno);
        }
        wr = now.next;
    }
    violation("a list of receives has no end")
}

pub(super) unsafe extern "C" fn receive(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue pair.
    let number = unsafe { (*qp).handle };
    // SAFETY: the program's list.
    let posted =
        nic::with(|nic| unsafe { each(first, bad, |receive| nic.post_receive(number, receive)) });
    posted.unwrap_or(libc::ENODEV)
}

pub(super) unsafe extern "C" fn shared(
    srq: *mut ibv_srq,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: shared receives.
    let handle = unsafe { (*srq).handle };
    // SAFETY: the program's list.
    let posted =
        nic::with(|nic| unsafe { each(first, bad, |receive| nic.post_shared(handle, receive)) });
    posted.unwrap_or(libc::ENODEV)
}
