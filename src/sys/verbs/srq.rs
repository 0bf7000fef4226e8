//! Receives without memory: each write with immediate consumes one at its end. They are in one queue for
//! all connections if the device supports that, otherwise in one for each queue pair.

use super::device::Pd;
use super::owned::{Owned, check};
use crate::sys::errno::{Errno, Result};
use rdma_core_sys::{
    ibv_post_recv, ibv_post_srq_recv, ibv_qp, ibv_recv_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
};
use std::ptr::null_mut;
use std::sync::Arc;

/// Most receives that one call posts.
const BATCH: usize = 32;

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq {
    raw: Owned<ibv_srq>,
    /// Most receives that it has room for.
    pub(super) depth: u32,
    _pd: Arc<Pd>,
}

impl Srq {
    /// A queue with room for `depth` receives. Errors: ENOSYS, the driver's.
    pub(super) fn new(pd: &Arc<Pd>, depth: u32) -> Result<Self> {
        let verbs = pd.context.verbs;
        let (Some(create), Some(destroy)) = (verbs.create_srq, verbs.destroy_srq) else {
            return Err(Errno(libc::ENOSYS));
        };
        let attr = ibv_srq_attr { max_wr: depth, max_sge: 1, srq_limit: 0 };
        let mut attr = ibv_srq_init_attr { srq_context: pd.context.mark(), attr };
        // SAFETY: a live domain, which is held; the queue is destroyed after its queue pairs: they hold it.
        let raw = unsafe { Owned::new(create(pd.as_ptr(), &mut attr), destroy) }?;
        // A driver may give more than it was asked for, or less; one that says nothing gives what it was asked for.
        let depth = if attr.attr.max_wr > 0 { attr.attr.max_wr } else { depth };
        Ok(Self { raw, depth, _pd: pd.clone() })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_srq {
        self.raw.as_ptr()
    }

    /// Posts receives. True: all of them; false: as many as there was room for. Errors: the
    /// driver's.
    pub(super) fn post(&self, count: usize) -> Result<bool> {
        // SAFETY: a live queue; receives without segments name no memory.
        post(count, |first, bad| unsafe { ibv_post_srq_recv(self.as_ptr(), first, bad) })
    }

    /// Posts receives until the queue is full. Any refusal means that: the drivers of mlx4 and mthca answer −1 then, and
    /// not ENOMEM (providers/mlx4/srq.c). A queue that is broken refuses the next [`Self::post`] as well.
    pub(super) fn fill(&self) {
        let _ = self.post(self.depth as usize);
    }
}

/// Like [`Srq::post`], for a queue pair's own receives.
///
/// # Safety
/// The queue pair lives.
pub(super) unsafe fn post_to(qp: *mut ibv_qp, count: usize) -> Result<bool> {
    // SAFETY: the caller guarantees that the queue pair lives; receives without segments name no memory.
    post(count, |first, bad| unsafe { ibv_post_recv(qp, first, bad) })
}

fn post(
    mut count: usize,
    call: impl Fn(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
) -> Result<bool> {
    while count > 0 {
        let mut room =
            [const { ibv_recv_wr { wr_id: 0, next: null_mut(), sg_list: null_mut(), num_sge: 0 } };
                BATCH];
        let mut first: *mut ibv_recv_wr = null_mut();
        for wr in room.iter_mut().take(count) {
            wr.next = first;
            first = wr;
        }
        let mut bad = null_mut();
        match check(call(first, &mut bad)) {
            Ok(()) => count = count.saturating_sub(BATCH),
            Err(Errno(libc::ENOMEM)) => return Ok(false),
            Err(errno) => return Err(errno),
        }
    }
    Ok(true)
}
