//! Queue pairs: made, changed, destroyed.

use super::device::id_of;
use super::memory::route_of;
use super::{address, attempt, code, kept, null, refused, settled, zeroed};
use crate::counters::see;
use crate::nic::{self, Attributes, Kind, Made};
use rdma_core_sys::{
    IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT,
    IBV_QP_QKEY, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE,
    IBV_QP_TIMEOUT, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, IBV_QPT_UD, ibv_cq, ibv_pd,
    ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_ex, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_srq,
};
use std::ffi::{c_int, c_void};

/// What a program asks a queue pair for.
pub(super) struct Wish {
    pub(super) pd: *mut ibv_pd,
    pub(super) queues: (*mut ibv_cq, *mut ibv_cq),
    pub(super) shared: *mut ibv_srq,
    pub(super) kind: ibv_qp_type,
    pub(super) all_signaled: bool,
    pub(super) qp_context: *mut c_void,
}

/// The queue pair, with its limits in `cap`. Error: errno.
///
/// # Safety
/// Objects of one device.
pub(super) unsafe fn make(wish: &Wish, cap: &mut ibv_qp_cap) -> Result<*mut ibv_qp_ex, i32> {
    let (send, receive) = wish.queues;
    // SAFETY: the caller vouches.
    let made = unsafe {
        let shared = (!wish.shared.is_null()).then(|| (*wish.shared).handle);
        Made {
            kind: kind(wish.kind)?,
            context: id_of((*wish.pd).context),
            domain: (*wish.pd).handle,
            send_queue: (*send).handle,
            receive_queue: (*receive).handle,
            shared,
            sends: cap.max_send_wr,
            receives: cap.max_recv_wr,
            segments: cap.max_send_sge.max(cap.max_recv_sge),
            inline: cap.max_inline_data,
            all_signaled: wish.all_signaled,
        }
    };
    if made.kind == Kind::Ud {
        see("datagram-receives", made.receives);
    }
    let (number, made) = attempt(|nic| nic.make_pair(made, 0))?;
    cap.max_inline_data = made.inline;
    (cap.max_send_wr, cap.max_recv_wr) = (made.sends, made.receives);
    cap.max_send_sge = cap.max_send_sge.min(made.segments);
    cap.max_recv_sge = cap.max_recv_sge.min(made.segments);
    // SAFETY: a C structure, and the caller's protection domain.
    let mut pair: ibv_qp_ex = unsafe { zeroed() };
    let base = &mut pair.qp_base;
    // SAFETY: the caller vouches.
    base.context = unsafe { (*wish.pd).context };
    (base.qp_context, base.pd, base.srq) = (wish.qp_context, wish.pd, wish.shared);
    (base.send_cq, base.recv_cq) = wish.queues;
    (base.handle, base.qp_num, base.qp_type) = (number, number, wish.kind);
    let pair = kept(pair);
    nic::with(|nic| nic.name_pair(number, address(pair)));
    Ok(pair)
}

fn kind(kind: ibv_qp_type) -> Result<Kind, i32> {
    match kind {
        IBV_QPT_UD => Ok(Kind::Ud),
        IBV_QPT_RC => Ok(Kind::Rc),
        _ => Err(libc::EOPNOTSUPP),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: the program's structure.
    let init = unsafe { &mut *init };
    let wish = Wish {
        pd,
        queues: (init.send_cq, init.recv_cq),
        shared: init.srq,
        kind: init.qp_type,
        all_signaled: init.sq_sig_all != 0,
        qp_context: init.qp_context,
    };
    // SAFETY: the caller vouches.
    match unsafe { make(&wish, &mut init.cap) } {
        Ok(pair) => pair.cast(),
        Err(errno) => null(errno),
    }
}

/// What each step demands (ibv_modify_qp(3)).
fn demanded(kind: ibv_qp_type, state: ibv_qp_state) -> u32 {
    let rc = kind == IBV_QPT_RC;
    match state {
        IBV_QPS_INIT if rc => IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        IBV_QPS_INIT => IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
        IBV_QPS_RTR if rc => {
            let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
            path | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
        }
        IBV_QPS_RTS if rc => {
            let retries = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
            retries | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC
        }
        IBV_QPS_RTS => IBV_QP_SQ_PSN,
        _ => 0,
    }
}

/// Takes over what `mask` names.
fn apply(to: &mut Attributes, attr: &ibv_qp_attr, mask: u32) {
    let set = |flag: u32| mask & flag != 0;
    if set(IBV_QP_PORT) {
        (to.port, to.pkey_index) = (attr.port_num, attr.pkey_index);
    }
    if set(IBV_QP_QKEY) {
        to.qkey = attr.qkey;
    }
    if set(IBV_QP_ACCESS_FLAGS) {
        to.access = attr.qp_access_flags;
    }
    if set(IBV_QP_AV) {
        to.route = route_of(&attr.ah_attr);
    }
    if set(IBV_QP_DEST_QPN) {
        to.route.to = attr.dest_qp_num;
        to.mtu = 128 << attr.path_mtu.min(5);
        (to.receive_psn, to.serves) = (attr.rq_psn, attr.max_dest_rd_atomic);
    }
    if set(IBV_QP_TIMEOUT) {
        see("timeout", attr.timeout.into());
        (to.timeout, to.retries, to.rnr_retries) = (attr.timeout, attr.retry_cnt, attr.rnr_retry);
        (to.send_psn, to.reads) = (attr.sq_psn, attr.max_rd_atomic);
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: a queue pair and the program's structure.
    let (qp, attr, mask) = unsafe { (&mut *qp, &*attr, mask as u32) };
    let needed = IBV_QP_STATE | demanded(qp.qp_type, attr.qp_state);
    if mask & needed != needed {
        return refused(libc::EINVAL);
    }
    let state = attr.qp_state;
    let result = attempt(|nic| nic.modify(qp.handle, state, |to| apply(to, attr, mask)));
    if result.is_ok() {
        qp.state = state;
    }
    code(Some(result))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: a queue pair.
    let number = unsafe { (*qp).handle };
    settled("asynchronous events", |nic| nic.pair_events(number));
    code(nic::with(|nic| {
        nic.end_pair(number);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    let pair: *mut ibv_qp_ex = qp.cast();
    // SAFETY: every queue pair here is made with room for its own operations.
    let has = unsafe { (*pair).wr_start.is_some() };
    if has { pair } else { std::ptr::null_mut() }
}
