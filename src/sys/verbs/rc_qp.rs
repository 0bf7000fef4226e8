//! A connected queue pair (RC), which writes and reads the memory of its one peer.

use super::marks::flow_label;
use super::owned::{Owned, check};
use super::rc_shared::{Queues, RcSettings, SEGMENTS, WRITE};
use super::srq;
use crate::sys::errno::{Errno, Result};
use crate::sys::process::Home;
use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS,
    IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_ERR,
    IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, IBV_SEND_FENCE, IBV_SEND_SIGNALED,
    IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, ibv_post_send, ibv_qp,
    ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr, ibv_send_wr,
    ibv_send_wr__bindgen_ty_1, ibv_send_wr__bindgen_ty_2__bindgen_ty_1, ibv_sge,
};
use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Retransmissions, the most that the field allows: a peer is given up after eight times the timeout at the earliest.
const RETRIES: u8 = 7;
/// A peer without receives is retried for ever (7): it posts receives when it polls.
const RNR_FOR_EVER: u8 = 7;
/// Delay of such a retry, as code: 0.64 ms (InfiniBand 1.7, table 46).
const RNR_DELAY: u8 = 12;
/// As for datagrams: IP's usual hop limit.
const HOPS: u8 = 64;
const SEGMENTS_MAX: usize = SEGMENTS as usize;

/// An operation on the peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RcRequest {
    /// Write, and send the peer this number.
    Announced(u32),
    /// Write, after all reads that were posted before are complete.
    Write,
    /// Read.
    Read,
}

/// The address of the far end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RcAddress {
    pub(crate) number: u32,
    /// Sequence number of its first packet; 24 bits.
    pub(crate) psn: u32,
    /// Longest packet of its port, bytes.
    pub(crate) mtu: usize,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
    /// Packets to it have a global routing header.
    pub(crate) routed: bool,
    /// RDMA Reads of this side that its device processes at a time.
    pub(crate) serves: u8,
}

/// Shares a queue pair with its port; the connection takes it out when it ends.
#[derive(Debug)]
pub(super) struct Slot(Mutex<Option<Owned<ibv_qp>>>);

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Option<Owned<ibv_qp>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_ended(&self) -> bool {
        self.lock().is_none()
    }

    /// Posts receives of its own. Errors: the driver's.
    pub(super) fn post_receives(&self, count: usize) -> Result<()> {
        match &*self.lock() {
            // SAFETY: the queue pair lives while it is borrowed.
            Some(qp) => unsafe { srq::post_to(qp.as_ptr(), count) }.map(|_| ()),
            None => Ok(()),
        }
    }
}

/// A request that waits to be posted.
struct Request {
    wr: ibv_send_wr,
    segments: [ibv_sge; SEGMENTS_MAX],
}

/// A connected queue pair. `L` is what a request keeps until it is complete. On drop the queue pair is destroyed
/// first, so no device accesses the memory of its requests any more.
pub(crate) struct RcQp<L> {
    raw: *mut ibv_qp,
    slot: Arc<Slot>,
    queues: Arc<Queues>,
    /// For requests under way and those that wait, oldest first: whether each reads, and what to drop with it.
    kept: VecDeque<(bool, L)>,
    /// Number of reads among them.
    reads: usize,
    /// Those that wait to be posted, oldest first.
    waiting: Vec<Request>,
    settings: RcSettings,
    segments_max: usize,
    connected: bool,
    home: Home,
}

// SAFETY: the pointers refer to the object in `slot`, which any thread may use, and to `waiting`, where they are set
// anew before use; calls that two threads must not make at once take `&mut`.
unsafe impl<L: Send> Send for RcQp<L> {}
// SAFETY: any thread may use the object in `slot`; calls that two threads must not make at once take `&mut`.
unsafe impl<L: Sync> Sync for RcQp<L> {}

impl<L> std::fmt::Debug for RcQp<L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RcQp {:#x}, {} requests not complete", self.number(), self.kept.len())
    }
}

impl<L> RcQp<L> {
    /// A queue pair in state INIT, ready for writes of its peer. Errors: ENOMEM, the driver's.
    pub(super) fn new(queues: &Arc<Queues>, settings: &RcSettings, segments: u32) -> Result<Self> {
        let verbs = queues.pd.context.verbs;
        // SAFETY: all zeroes is a valid ibv_qp_init_attr.
        let mut attr: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        attr.qp_context = queues.pd.context.mark();
        attr.send_cq = queues.cq.as_ptr();
        attr.recv_cq = queues.cq.as_ptr();
        attr.srq = queues.srq.as_ref().map_or(null_mut(), |srq| srq.as_ptr());
        attr.qp_type = IBV_QPT_RC;
        attr.cap = ibv_qp_cap {
            max_send_wr: settings.sends,
            max_recv_wr: if queues.srq.is_some() { 0 } else { settings.receives },
            max_send_sge: segments,
            max_recv_sge: u32::from(queues.srq.is_none()),
            max_inline_data: 0,
        };
        // SAFETY: live objects of one context, which are held until after the end of the queue pair.
        let qp = unsafe {
            Owned::new((verbs.create_qp)(queues.pd.as_ptr(), &mut attr), verbs.destroy_qp)
        }?;
        // A driver may give less than it was asked for.
        let mut settings = *settings;
        settings.sends = settings.sends.min(attr.cap.max_send_wr).max(1);
        if queues.srq.is_none() {
            settings.receives = settings.receives.min(attr.cap.max_recv_wr).max(1);
        }
        let segments = segments.min(attr.cap.max_send_sge).max(1);
        let qp = Self {
            raw: qp.as_ptr(),
            slot: Arc::new(Slot(Mutex::new(Some(qp)))),
            queues: queues.clone(),
            kept: VecDeque::new(),
            waiting: Vec::new(),
            reads: 0,
            settings,
            segments_max: (segments as usize).min(SEGMENTS_MAX),
            connected: false,
            home: Home::here(),
        };
        let mut attr = blank();
        attr.port_num = settings.port;
        attr.pkey_index = settings.pkey_index;
        attr.qp_access_flags =
            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        qp.go(&mut attr, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)?;
        Ok(qp)
    }

    /// Receives that it has room for, if they are not shared.
    pub(super) fn receives(&self) -> usize {
        self.settings.receives as usize
    }

    pub(super) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }

    /// Its number.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: a live queue pair; the member does not change.
        unsafe { (*self.raw).qp_num }
    }

    fn go(&self, attr: &mut ibv_qp_attr, state: u32, mask: ibv_qp_attr_mask) -> Result<()> {
        attr.qp_state = state;
        let modify = self.queues.pd.context.verbs.modify_qp;
        // SAFETY: a live queue pair and a valid structure.
        check(unsafe { modify(self.raw, attr, (IBV_QP_STATE | mask) as i32) })
    }

    /// Connects it to the queue pair `to`, which has been told, or will be, that our first packet has number
    /// `own_psn`. Errors: those of an unreachable address; the driver's. The queue pair is unusable
    /// then.
    pub(crate) fn connect(&mut self, to: &RcAddress, own_psn: u32) -> Result<()> {
        let mut attr = blank();
        attr.path_mtu = mtu_code(to.mtu.min(self.settings.mtu)).ok_or(Errno(libc::EINVAL))?;
        attr.dest_qp_num = to.number;
        attr.rq_psn = to.psn & PSN_MASK;
        attr.max_dest_rd_atomic = self.settings.serves;
        attr.min_rnr_timer = RNR_DELAY;
        attr.ah_attr.port_num = self.settings.port;
        attr.ah_attr.sl = self.settings.marks.service_level;
        attr.ah_attr.dlid = to.lid;
        if to.routed || self.settings.routed {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid.raw = to.gid;
            attr.ah_attr.grh.sgid_index = self.settings.gid;
            attr.ah_attr.grh.hop_limit = HOPS;
            attr.ah_attr.grh.traffic_class = self.settings.marks.class();
            attr.ah_attr.grh.flow_label = flow_label(self.number(), to.number);
        }
        let receive = IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.go(&mut attr, IBV_QPS_RTR, receive)?;
        let mut attr = blank();
        attr.timeout = self.settings.timeout;
        attr.retry_cnt = RETRIES;
        attr.rnr_retry = RNR_FOR_EVER;
        attr.sq_psn = own_psn & PSN_MASK;
        attr.max_rd_atomic = self.settings.reads.min(to.serves);
        let send = IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.go(&mut attr, IBV_QPS_RTS, send)?;
        self.connected = true;
        Ok(())
    }

    /// Ends its transfers, in both directions: those that are not complete fail, and all completions of the others are in
    /// the queue. A queue pair that is dropped takes its completions along.
    pub(crate) fn stop(&mut self) {
        self.connected = false;
        // A device that refuses even this is gone.
        let _ = self.go(&mut blank(), IBV_QPS_ERR, 0);
    }

    /// Posts requests, linked from `first` on. Errors: the driver's, and the first request that was not posted.
    ///
    /// # Safety
    /// The requests fit, and they and their memory are valid until they are complete, or this is dropped.
    #[inline]
    unsafe fn submit(
        &mut self,
        first: *mut ibv_send_wr,
    ) -> std::result::Result<(), (Errno, *mut ibv_send_wr)> {
        let mut bad = null_mut();
        // SAFETY: a live queue pair, to which no other thread posts sends (`&mut self`); the caller vouches for
        // the requests.
        check(unsafe { ibv_post_send(self.raw, first, &mut bad) }).map_err(|errno| (errno, bad))
    }

    /// How many requests may be added now.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        (self.settings.sends as usize).saturating_sub(self.kept.len())
    }

    /// Most segments of one request.
    pub(crate) fn segments_max(&self) -> usize {
        self.segments_max
    }

    /// Requests that wait to be posted.
    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a request that moves bytes between `local` (address, length, local key), segment after segment, and
    /// `remote_addr` of the peer, under its `rkey`; [`Self::post_waiting`] posts it. `keep` is dropped when it is
    /// complete. Errors, with nothing added: EAGAIN without room; EINVAL with too many segments; ENOTCONN.
    ///
    /// # Safety
    /// The memory of `local` may be read, or written by a [`RcRequest::Read`], until the request is complete
    /// ([`super::RcEvent::Written`]), or this is dropped.
    #[inline]
    pub(crate) unsafe fn add(
        &mut self,
        local: &[(u64, u32, u32)],
        remote_addr: u64,
        rkey: u32,
        request: RcRequest,
        keep: L,
    ) -> Result<()> {
        if !self.connected {
            return Err(Errno(libc::ENOTCONN));
        }
        if local.len() > self.segments_max {
            return Err(Errno(libc::EINVAL));
        }
        if self.room() == 0 {
            return Err(Errno(libc::EAGAIN));
        }
        let mut segments = [ibv_sge { addr: 0, length: 0, lkey: 0 }; SEGMENTS_MAX];
        for (segment, &(addr, length, lkey)) in segments.iter_mut().zip(local) {
            *segment = ibv_sge { addr, length, lkey };
        }
        // SAFETY: all zeroes is a valid ibv_send_wr.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = WRITE;
        wr.num_sge = local.len() as i32;
        wr.send_flags = IBV_SEND_SIGNALED;
        match request {
            RcRequest::Announced(immediate) => {
                wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
                wr.__bindgen_anon_1 = ibv_send_wr__bindgen_ty_1 { imm_data: immediate.to_be() };
            }
            RcRequest::Write => {
                wr.opcode = IBV_WR_RDMA_WRITE;
                // A write may overtake earlier reads unless it is fenced (InfiniBand 1.7, 10.8.3.3); a read never
                // overtakes a write. Some drivers (rxe) make a fenced request wait for all requests.
                if self.reads > 0 {
                    wr.send_flags |= IBV_SEND_FENCE;
                }
            }
            RcRequest::Read => wr.opcode = IBV_WR_RDMA_READ,
        }
        let reads = request == RcRequest::Read;
        wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
        self.waiting.push(Request { wr, segments });
        self.kept.push_back((reads, keep));
        self.reads += usize::from(reads);
        Ok(())
    }

    /// Posts all waiting requests, with one call of the driver. Errors: EAGAIN (some still wait), the driver's
    /// (requests that were not posted have to go with the connection).
    #[inline]
    pub(crate) fn post_waiting(&mut self) -> Result<()> {
        let mut next = null_mut();
        for Request { wr, segments } in self.waiting.iter_mut().rev() {
            (wr.next, wr.sg_list) = (next, segments.as_mut_ptr());
            next = wr;
        }
        if next.is_null() {
            return Ok(());
        }
        // SAFETY: valid requests, which the driver copies; the callers of `add` vouched for the memory.
        let Err((errno, bad)) = (unsafe { self.submit(next) }) else {
            self.waiting.clear();
            return Ok(());
        };
        let rest = self.waiting.iter().position(|request| std::ptr::eq(&raw const request.wr, bad));
        self.waiting.drain(..rest.unwrap_or(0));
        // The queue is full, whatever our count says.
        Err(if errno.0 == libc::ENOMEM { Errno(libc::EAGAIN) } else { errno })
    }

    /// Adds a request as [`Self::add`] does, and posts all waiting ones. Errors: of both.
    ///
    /// # Safety
    /// The same requirements as for [`Self::add`].
    #[cfg(test)]
    pub(crate) unsafe fn post(
        &mut self,
        local: &[(u64, u32, u32)],
        remote_addr: u64,
        rkey: u32,
        request: RcRequest,
        keep: L,
    ) -> Result<()> {
        // SAFETY: the caller vouches.
        unsafe { self.add(local, remote_addr, rkey, request, keep) }?;
        self.post_waiting()
    }

    /// The oldest request is complete: to be called for each [`super::RcEvent::Written`] of this queue pair.
    #[inline]
    pub(crate) fn on_written(&mut self) {
        let done = self.kept.pop_front();
        self.reads -= usize::from(done.is_some_and(|(reads, _)| reads));
    }
}

impl<L> Drop for RcQp<L> {
    fn drop(&mut self) {
        if !self.home.is_here() {
            return; // the parent's, and another thread may have held the lock at the fork
        }
        let qp = self.slot.lock().take();
        drop(qp);
        self.queues.ended.store(true, Ordering::Release);
        // `kept` is dropped after this.
    }
}

/// Packet numbers have 24 bits.
const PSN_MASK: u32 = 0x00ff_ffff;

fn blank() -> ibv_qp_attr {
    // SAFETY: all zeroes is a valid ibv_qp_attr.
    unsafe { std::mem::zeroed() }
}

/// The `ibv_mtu` of the longest packet that is no longer than `bytes`.
fn mtu_code(bytes: usize) -> Option<u32> {
    (1..=5).rev().find(|code| 128 << code <= bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_packet_lengths() {
        let all = [255, 256, 1023, 1024, 4095, 4096, 9000].map(mtu_code);
        assert_eq!(all, [None, Some(1), Some(2), Some(3), Some(4), Some(5), Some(5)]);
    }
}
