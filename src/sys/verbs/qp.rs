//! UD queue pairs, and address handles of their destinations.

use super::cq::Cq;
use super::device::Pd;
use super::marks::Marks;
use super::owned::{Owned, check};
use crate::sys::errno::{Errno, Result};
use rdma_core_sys::{
    IBV_QP_EX_WITH_SEND, IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_QP_PKEY_INDEX,
    IBV_QP_PORT, IBV_QP_QKEY, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
    IBV_QPT_UD, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_SEND, ibv_ah, ibv_ah_attr,
    ibv_create_qp_ex, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_ex,
    ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_recv_wr, ibv_send_wr,
    ibv_send_wr__bindgen_ty_2__bindgen_ty_3, ibv_sge, ibv_wr_complete, ibv_wr_send,
    ibv_wr_set_inline_data, ibv_wr_set_sge, ibv_wr_set_ud_addr, ibv_wr_start,
};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Most work requests posted together.
pub(super) const BATCH: usize = 64;
/// Lengths of inline data to ask for, in turn, bytes: devices refuse a queue pair that wants more than they
/// support.
const INLINE: [u32; 4] = [220, 128, 60, 0];

/// The destination of datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AhSettings {
    pub(crate) port: u8,
    /// The receiver's GID, if packets are routed by it, and the index of our GID.
    pub(crate) gid: Option<([u8; 16], u8)>,
    /// InfiniBand only.
    pub(crate) lid: u16,
    pub(crate) marks: Marks,
    /// Routers choose among equal paths by it; 20 bits.
    pub(crate) flow_label: u32,
}

/// An address handle.
#[derive(Debug)]
pub(crate) struct Ah {
    raw: Owned<ibv_ah>,
    _pd: Arc<Pd>,
}

/// The usual hop limit of IP packets across routers.
const HOPS: u8 = 64;

impl Ah {
    /// Errors: EHOSTUNREACH, ETIMEDOUT, EINVAL and others if the address is unreachable; ENOMEM.
    pub(super) fn new(pd: &Arc<Pd>, to: &AhSettings) -> Result<Self> {
        // SAFETY: all zeroes is a valid ibv_ah_attr.
        let mut attr: ibv_ah_attr = unsafe { std::mem::zeroed() };
        attr.port_num = to.port;
        attr.dlid = to.lid;
        attr.sl = to.marks.service_level;
        if let Some((gid, index)) = to.gid {
            attr.is_global = 1;
            attr.grh.dgid.raw = gid;
            attr.grh.sgid_index = index;
            attr.grh.hop_limit = HOPS;
            attr.grh.traffic_class = to.marks.class();
            attr.grh.flow_label = to.flow_label;
        }
        let verbs = pd.context.verbs;
        // SAFETY: a live domain. Requests that name the handle hold it, or their queue pair is gone.
        let raw =
            unsafe { Owned::new((verbs.create_ah)(pd.as_ptr(), &mut attr), verbs.destroy_ah) }?;
        Ok(Self { raw, _pd: pd.clone() })
    }
}

/// Makes address handles for the queue pairs of a protection domain, on any thread.
#[derive(Clone, Debug)]
pub(crate) struct Addresses(pub(super) Arc<Pd>);

impl Addresses {
    /// A handle of an address. May make a system call, and take time on some networks. Errors: those of
    /// an unreachable address.
    pub(crate) fn make(&self, to: &AhSettings) -> Result<Ah> {
        Ah::new(&self.0, to)
    }
}

/// One datagram to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct SendRequest {
    pub(super) id: u64,
    /// The data: copied at once if `inline`, otherwise the device's until completion.
    pub(super) from: NonNull<u8>,
    pub(super) len: u32,
    /// The key by which the device reads it, unless `inline`.
    pub(super) lkey: u32,
    pub(super) inline: bool,
    /// Its completion is reported.
    pub(super) signaled: bool,
}

#[inline]
fn flags(request: &SendRequest) -> u32 {
    let signaled = if request.signaled { IBV_SEND_SIGNALED } else { 0 };
    signaled | if request.inline { IBV_SEND_INLINE } else { 0 }
}

/// A queue pair of type UD, ready to send.
pub(super) struct UdQp {
    raw: Owned<ibv_qp>,
    /// The interface for its own send operations (ibv_create_qp_ex(3)), if it has them.
    extended: Option<NonNull<ibv_qp_ex>>,
    /// Most bytes that a send may carry inline.
    pub(super) inline_max: usize,
    /// Most sends and receives under way: a driver may give fewer than it was asked for.
    pub(super) depths: (u32, u32),
    /// Buffers for requests with one segment each, for a device without such operations.
    requests: Vec<(ibv_send_wr, ibv_sge)>,
    _pd: Arc<Pd>,
}

// SAFETY: the pointer belongs to the same object as `raw`, which may be sent; those in `requests` are
// meaningless between calls.
unsafe impl Send for UdQp {}
// SAFETY: `extended` belongs to `raw`, which may be shared; `requests` is accessed by `&mut self` only.
unsafe impl Sync for UdQp {}

impl std::fmt::Debug for UdQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UdQp {}", self.number())
    }
}

impl UdQp {
    /// A queue pair on `port` for datagrams with the Q_Key `qkey`; `depths` are for sends and receives. `newer`: with
    /// its own operations if the driver supports them. Errors: EINVAL if the device has no UD, ENOMEM, the driver's.
    pub(super) fn new(
        pd: &Arc<Pd>,
        queues: (&Cq, &Cq),
        depths: (u32, u32),
        (port, pkey_index): (u8, u16),
        qkey: u32,
        newer: bool,
    ) -> Result<Self> {
        let mut last = Errno(libc::EINVAL);
        for inline in INLINE {
            let cap = ibv_qp_cap {
                max_send_wr: depths.0,
                max_recv_wr: depths.1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            };
            let extended = newer.then(|| Self::extended(pd, queues, cap).ok()).flatten();
            match extended.map_or_else(|| Self::plain(pd, queues, cap), Ok) {
                Ok(qp) => {
                    qp.make_ready(port, pkey_index, qkey)?;
                    return Ok(qp);
                }
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    fn extended(pd: &Arc<Pd>, (send, receive): (&Cq, &Cq), cap: ibv_qp_cap) -> Result<Self> {
        let verbs = pd.context.verbs;
        // SAFETY: all zeroes is a valid ibv_qp_init_attr_ex.
        let mut attr: ibv_qp_init_attr_ex = unsafe { std::mem::zeroed() };
        attr.qp_context = pd.context.mark();
        attr.send_cq = send.as_ptr();
        attr.recv_cq = receive.as_ptr();
        attr.cap = cap;
        attr.qp_type = IBV_QPT_UD;
        attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        attr.pd = pd.as_ptr();
        attr.send_ops_flags = u64::from(IBV_QP_EX_WITH_SEND);
        // SAFETY: live objects of one context; the owner of all of them destroys the queue pair before its
        // queues.
        let raw = unsafe {
            let raw = ibv_create_qp_ex(pd.context.as_ptr(), &mut attr);
            Owned::new(raw.ok_or(Errno(libc::EOPNOTSUPP))?, verbs.destroy_qp)
        }?;
        // SAFETY: a live queue pair made with SEND_OPS_FLAGS; the interface lives as long.
        let extended = verbs.qp_to_qp_ex.and_then(|to| NonNull::new(unsafe { to(raw.as_ptr()) }));
        let extended = Some(extended.ok_or(Errno(libc::EOPNOTSUPP))?);
        Ok(Self::of(pd, raw, extended, &attr.cap))
    }

    fn plain(pd: &Arc<Pd>, (send, receive): (&Cq, &Cq), cap: ibv_qp_cap) -> Result<Self> {
        let verbs = pd.context.verbs;
        // SAFETY: all zeroes is a valid ibv_qp_init_attr.
        let mut attr: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        attr.qp_context = pd.context.mark();
        attr.send_cq = send.as_ptr();
        attr.recv_cq = receive.as_ptr();
        attr.cap = cap;
        attr.qp_type = IBV_QPT_UD;
        // SAFETY: live objects of one context; the owner destroys the queue pair before its queues.
        let raw =
            unsafe { Owned::new((verbs.create_qp)(pd.as_ptr(), &mut attr), verbs.destroy_qp) }?;
        Ok(Self::of(pd, raw, None, &attr.cap))
    }

    fn of(
        pd: &Arc<Pd>,
        raw: Owned<ibv_qp>,
        extended: Option<NonNull<ibv_qp_ex>>,
        cap: &ibv_qp_cap,
    ) -> Self {
        // SAFETY: all zeroes is valid for both.
        let request = unsafe { std::mem::zeroed() };
        let requests = if extended.is_some() { Vec::new() } else { vec![request; BATCH] };
        let inline_max = cap.max_inline_data as usize;
        let depths = (cap.max_send_wr, cap.max_recv_wr);
        Self { raw, extended, inline_max, depths, requests, _pd: pd.clone() }
    }

    /// Its number.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: a live queue pair; the member does not change.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    /// Its sends use its own operations.
    pub(super) fn is_extended(&self) -> bool {
        self.extended.is_some()
    }

    /// Moves it through INIT and RTR to RTS (InfiniBand 1.7, 10.3.1). Receives may be posted from INIT on.
    fn make_ready(&self, port: u8, pkey_index: u16, qkey: u32) -> Result<()> {
        // SAFETY: all zeroes is a valid ibv_qp_attr.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.port_num = port;
        attr.pkey_index = pkey_index;
        attr.qkey = qkey;
        let mut step = |state, mask| {
            attr.qp_state = state;
            let modify = self._pd.context.verbs.modify_qp;
            // SAFETY: a live queue pair and a valid structure.
            check(unsafe { modify(self.raw.as_ptr(), &mut attr, (IBV_QP_STATE | mask) as i32) })
        };
        step(IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY)?;
        step(IBV_QPS_RTR, 0)?;
        step(IBV_QPS_RTS, IBV_QP_SQ_PSN)
    }

    #[cfg(test)]
    pub(super) fn to_error(&self) -> Result<()> {
        // SAFETY: all zeroes is a valid ibv_qp_attr.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = rdma_core_sys::IBV_QPS_ERR;
        let modify = self._pd.context.verbs.modify_qp;
        // SAFETY: a live queue pair and a valid structure.
        check(unsafe { modify(self.raw.as_ptr(), &mut attr, IBV_QP_STATE as i32) })
    }

    /// Posts sends, at most [`BATCH`], to queue pair `qpn` behind `ah`. Returns for how many there was
    /// room. Errors: the driver's; none was posted.
    ///
    /// # Safety
    /// The memory of a request is readable: during the call if it is inline, otherwise, under its key, until its
    /// completion or the end of the queue pair. `ah` lives as long.
    #[inline]
    pub(super) unsafe fn send(
        &mut self,
        ah: &Ah,
        qpn: u32,
        qkey: u32,
        requests: impl Iterator<Item = SendRequest>,
    ) -> Result<usize> {
        let Some(qp) = self.extended else {
            // SAFETY: the caller vouches.
            return unsafe { self.send_plain(ah, qpn, qkey, requests) };
        };
        let qp = qp.as_ptr();
        let mut count = 0;
        // SAFETY: a live queue pair made for sends, used by no other thread (`&mut self`); the caller
        // vouches for the rest.
        unsafe {
            ibv_wr_start(qp);
            for request in requests {
                (*qp).wr_id = request.id;
                // Some drivers have to be told that data is inline (rxe); others detect it.
                (*qp).wr_flags = flags(&request);
                count += 1;
                ibv_wr_send(qp);
                ibv_wr_set_ud_addr(qp, ah.raw.as_ptr(), qpn, qkey);
                let from = request.from.as_ptr();
                if request.inline {
                    ibv_wr_set_inline_data(qp, from.cast(), request.len as usize);
                } else {
                    let at = from.expose_provenance() as u64;
                    ibv_wr_set_sge(qp, request.lkey, at, request.len);
                }
            }
            check(ibv_wr_complete(qp))?;
        }
        Ok(count)
    }

    /// # Safety
    /// The same requirements as for [`Self::send`].
    unsafe fn send_plain(
        &mut self,
        ah: &Ah,
        qpn: u32,
        qkey: u32,
        requests: impl Iterator<Item = SendRequest>,
    ) -> Result<usize> {
        let mut count = 0;
        for (request, (wr, sge)) in requests.zip(&mut self.requests) {
            *sge = ibv_sge {
                addr: request.from.as_ptr().expose_provenance() as u64,
                length: request.len,
                lkey: request.lkey,
            };
            wr.wr_id = request.id;
            wr.num_sge = 1;
            wr.opcode = IBV_WR_SEND;
            wr.send_flags = flags(&request);
            wr.wr.ud = ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
                ah: ah.raw.as_ptr(),
                remote_qpn: qpn,
                remote_qkey: qkey,
            };
            count += 1;
        }
        let mut next: *mut ibv_send_wr = null_mut();
        // From the last to the first, because each links to its successor.
        for (wr, sge) in self.requests.iter_mut().take(count).rev() {
            wr.next = next;
            wr.sg_list = sge;
            next = wr;
        }
        if next.is_null() {
            return Ok(0);
        }
        let mut bad = null_mut();
        // SAFETY: a live queue pair and a list of valid requests; the caller vouches for the rest.
        let rc = unsafe { ibv_post_send(self.raw.as_ptr(), next, &mut bad) };
        if rc == 0 {
            return Ok(count);
        }
        let at = self.requests.iter().position(|(wr, _)| std::ptr::eq(wr, bad));
        match at {
            Some(n) if n > 0 => Ok(n.min(count)),
            _ => Err(Errno(rc.abs())),
        }
    }

    /// Posts one buffer of `len` bytes for each of `slots`, given as numbers and addresses, at most
    /// [`super::cq::BATCH`]. Errors: the driver's.
    ///
    /// # Safety
    /// The memory is writable under `lkey`, and only the device accesses it until its completion or
    /// the end of the queue pair.
    pub(super) unsafe fn receive(
        &mut self,
        lkey: u32,
        len: u32,
        slots: impl Iterator<Item = (u64, NonNull<u8>)>,
    ) -> Result<()> {
        // SAFETY: all zeroes is valid for both.
        let mut room: [(ibv_recv_wr, ibv_sge); super::cq::BATCH] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        for ((id, at), (wr, sge)) in slots.zip(&mut room) {
            *sge = ibv_sge { addr: at.as_ptr().expose_provenance() as u64, length: len, lkey };
            wr.wr_id = id;
            wr.num_sge = 1;
            count += 1;
        }
        let mut next: *mut ibv_recv_wr = null_mut();
        for (wr, sge) in room.iter_mut().take(count).rev() {
            wr.sg_list = sge;
            wr.next = next;
            next = wr;
        }
        if next.is_null() {
            return Ok(());
        }
        let mut bad = null_mut();
        // SAFETY: a live queue pair and a list of valid requests; the caller vouches for the memory.
        check(unsafe { ibv_post_recv(self.raw.as_ptr(), next, &mut bad) })
    }
}
