//! Contexts that several endpoints share (fi_endpoint.3, SHARED CONTEXTS).
//!
//! A shared transmit context has no function here: endpoints have no transmit queue of a device that they
//! could share. A shared receive context is one queue of posted receives: a message for any of its endpoints
//! takes the first receive that matches. Messages without a receive stay with the endpoint that received
//! them, and are numbered by their arrival.

use super::device;
use super::entries::{device_entries, receives, vector_receives};
use super::none::{NO_ATOMIC, NO_COLLECTIVE};
use super::state::{
    DEFAULT_MIN_MULTI_RECV, Endpoint, LOST_PEER, ReceiveState, SharedReceive, SharedTransmit,
};
use super::transfer::{Flags, Special, Tagging, result, segment, vector};
use super::{cm, options, rma};
use crate::memory::{Buffers, SegmentList};
use crate::ofi::domain::{Domain, Hmem};
use crate::ofi::guard::{code, entries, entry};
use crate::ofi::info;
use crate::ofi::lock::{Guard, Locked};
use crate::ofi::own::{Object, close as close_object};
use crate::ofi::progress::{By, Progress, progress_for_others};
use crate::ofi::table::{Operations, SLACK, Slack, Table};
use crate::protocol::{ANY_SOURCE, Host, PeekAction, ReceiveOp, Receives, Report};
use crate::telemetry::log;
use libc::iovec;
use libfabric_sys::{
    FI_ADDR_UNSPEC, FI_AUTH_KEY, FI_CLAIM, FI_CLASS_SRX_CTX, FI_CLASS_STX_CTX, FI_COMPLETION,
    FI_DIRECTED_RECV, FI_DISCARD, FI_EAGAIN, FI_EINVAL, FI_ENABLE, FI_ENOENT, FI_ENOPROTOOPT,
    FI_ENOSYS, FI_EOPBADSTATE, FI_EOPNOTSUPP, FI_GETOPSFLAG, FI_MULTI_RECV, FI_OPT_ENDPOINT,
    FI_OPT_MIN_MULTI_RECV, FI_PEEK, FI_RECV, FI_SETOPSFLAG, FI_TRANSMIT, FI_TRIGGER, fi_addr_t,
    fi_msg, fi_msg_tagged, fi_ops, fi_ops_ep, fi_ops_ep_2_7, fi_ops_msg, fi_ops_tagged, fi_rx_attr,
    fi_tx_attr, fid, fid_ep, fid_stx, fid_t,
};
use std::collections::BTreeSet;
use std::convert::identity;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most looks at what an endpoint has of a dead peer, of some 16 messages each: those that others sent count, too.
const LOOKS_MAX: usize = 64;

#[repr(C)]
pub(super) struct TransmitFid {
    fid: fid_stx,
    slack: Slack,
    pub(super) shared: Arc<SharedTransmit>,
}

#[repr(C)]
pub(super) struct ReceiveFid {
    fid: fid_ep,
    slack: Slack,
    pub(super) shared: Arc<SharedReceive>,
    /// Default flags, as those of an `EndpointFid`.
    flags: AtomicU64,
}

// SAFETY: it begins with a fid_stx; nothing else has this table.
unsafe impl Object for TransmitFid {
    type Shown = fid_stx;
    fn table() -> *mut fi_ops {
        TRANSMIT_FID_OPS.as_mut_ptr()
    }
}

static TRANSMIT_FID_OPS: Table<fi_ops> =
    Table::new(fi_ops { close: Some(close_transmit), ..fi_ops::STUBS });

/// The operations of a shared transmit context, which has none.
static TRANSMIT_OPS: Table<fi_ops_ep_2_7> = Table::new(fi_ops_ep_2_7::STUBS);

// SAFETY: it begins with a fid_ep; nothing else has this table.
unsafe impl Object for ReceiveFid {
    type Shown = fid_ep;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> =
    Table::new(fi_ops { close: Some(close), control: Some(control), ..fi_ops::STUBS });

static OPS: Table<fi_ops_ep_2_7> = Table::new(fi_ops_ep_2_7 {
    base: fi_ops_ep {
        cancel: Some(cancel),
        getopt: Some(getopt),
        setopt: Some(setopt),
        rx_size_left: Some(size_left),
        ..fi_ops_ep_2_7::STUBS.base
    },
    ..fi_ops_ep_2_7::STUBS
});

static MSG: Table<fi_ops_msg> = Table::new(fi_ops_msg {
    recv: Some(recv),
    recvv: Some(recvv),
    recvmsg: Some(recvmsg),
    ..fi_ops_msg::STUBS
});

/// For domains with FI_HMEM.
static ANY_MSG: Table<fi_ops_msg> = Table::new(fi_ops_msg {
    recv: Some(any_recv),
    recvv: Some(any_recvv),
    recvmsg: Some(any_recvmsg),
    ..fi_ops_msg::STUBS
});

static TAGGED: Table<fi_ops_tagged> = Table::new(fi_ops_tagged {
    recv: Some(trecv),
    recvv: Some(trecvv),
    recvmsg: Some(trecvmsg),
    ..fi_ops_tagged::STUBS
});

/// For domains with FI_HMEM.
static ANY_TAGGED: Table<fi_ops_tagged> = Table::new(fi_ops_tagged {
    recv: Some(any_trecv),
    recvv: Some(any_trecvv),
    recvmsg: Some(any_trecvmsg),
    ..fi_ops_tagged::STUBS
});

/// `fi_stx_context`. Errors: EINVAL.
///
/// # Safety
/// As libfabric calls `fi_stx_context`.
pub(in crate::ofi) unsafe fn open_transmit(
    domain: &Arc<Domain>,
    _attr: *mut fi_tx_attr,
    out: *mut *mut fid_stx,
    context: *mut c_void,
) -> Result<(), i32> {
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    let stx = Box::new(TransmitFid {
        fid: fid_stx {
            fid: fid { fclass: FI_CLASS_STX_CTX, context, ops: TRANSMIT_FID_OPS.as_mut_ptr() },
            ops: TRANSMIT_OPS.as_mut_ptr().cast(),
        },
        slack: SLACK,
        shared: Arc::new(SharedTransmit { domain: domain.clone() }),
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(stx).cast() };
    Ok(())
}

/// `fi_srx_context`. Errors: EINVAL, also for attributes that are not offered.
///
/// # Safety
/// As libfabric calls `fi_srx_context`.
pub(in crate::ofi) unsafe fn open_receive(
    domain: &Arc<Domain>,
    attr: *mut fi_rx_attr,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: the application's attributes, if any.
    let attr = unsafe { attr.as_ref() };
    let (caps, flags) = attr.map_or((0, 0), |attr| (attr.caps, attr.op_flags));
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    if let Some(attr) = attr {
        info::offers_receive("fi_srx_context", attr, &domain.config)?;
        check_default("fi_srx_context", flags)?;
    }
    let shared = Arc::new(SharedReceive {
        domain: domain.clone(),
        state: Locked::new(ReceiveState {
            receives: Receives::new(1),
            endpoints: Vec::new(),
            min_multi_recv: DEFAULT_MIN_MULTI_RECV,
            lost: BTreeSet::new(),
            ends_lost: false,
        }),
        directed: caps & FI_DIRECTED_RECV != 0,
    });
    let any = domain.hmem != Hmem::Off;
    let (msg, tagged) = if any { (&ANY_MSG, &ANY_TAGGED) } else { (&MSG, &TAGGED) };
    let srx = Box::new(ReceiveFid {
        fid: fid_ep {
            fid: fid { fclass: FI_CLASS_SRX_CTX, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr().cast(),
            cm: cm::NO_OPS.as_mut_ptr(),
            msg: msg.as_mut_ptr(),
            rma: rma::NO_OPS.as_mut_ptr(),
            tagged: tagged.as_mut_ptr(),
            atomic: NO_ATOMIC.as_mut_ptr(),
            collective: NO_COLLECTIVE.as_mut_ptr(),
        },
        slack: SLACK,
        shared,
        flags: AtomicU64::new(flags),
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(srx).cast() };
    Ok(())
}

/// Errors: EINVAL for FI_TRIGGER among default flags. Triggered operations are an endpoint's.
fn check_default(call: &str, flags: u64) -> Result<(), i32> {
    if flags & FI_TRIGGER == 0 {
        return Ok(());
    }
    log::warn(format_args!(
        "{call} refused: op_flags of a shared receive context: FI_TRIGGER, with which each receive would be refused"
    ));
    Err(FI_EINVAL)
}

/// # Safety
/// `ep` came from [`open_receive`] and is not closed.
unsafe fn context<'a>(ep: *mut fid_ep) -> &'a ReceiveFid {
    // SAFETY: the caller vouches.
    unsafe { &*ep.cast::<ReceiveFid>() }
}

impl ReceiveFid {
    fn detects(&self) -> bool {
        self.shared.domain.hmem == Hmem::Detects
    }
}

impl SharedReceive {
    pub(super) fn endpoints<'g>(
        &self,
        guard: &'g Guard<'_>,
    ) -> impl Iterator<Item = &'g Endpoint> + use<'g> {
        let endpoints = self.state(guard).endpoints.clone();
        // SAFETY: an endpoint removes itself from the list, under the lock, before it is freed.
        endpoints.into_iter().map(|endpoint| unsafe { &*endpoint })
    }

    /// The endpoint with the oldest message that matches.
    fn oldest<'g>(&self, op: &ReceiveOp, guard: &'g Guard<'_>) -> Option<&'g Endpoint> {
        self.endpoints(guard)
            .filter_map(|endpoint| {
                let arrival = endpoint.engine(guard)?.first_arrival(op, &endpoint.host(guard))?;
                Some((arrival, endpoint))
            })
            .min_by_key(|(arrival, _)| *arrival)
            .map(|(_, endpoint)| endpoint)
    }

    /// Ends the receives that wait for peers of which an endpoint has found out that they are dead.
    pub(super) fn end_lost(&self, guard: &Guard<'_>) {
        // A look at the other endpoints may find more, which the first call of this takes up.
        if std::mem::replace(&mut self.state(guard).ends_lost, true) {
            return;
        }
        let mut later = BTreeSet::new();
        while let Some(source) = self.state(guard).lost.pop_first() {
            if !self.fail_hopeless(source, guard) {
                later.insert(source);
            }
        }
        let state = self.state(guard);
        state.lost.append(&mut later);
        state.ends_lost = false;
    }

    /// Fails the receives that wait for a peer that an endpoint knows to be dead, unless another endpoint hears of it: that
    /// one finds its death out itself, behind its last message. False: an endpoint has to be asked again when its queue has
    /// been read, or copies to a device have ended, as it takes nothing in before.
    fn fail_hopeless(&self, source: u64, guard: &Guard<'_>) -> bool {
        if source == ANY_SOURCE {
            return true;
        }
        let knows = |endpoint: &&Endpoint| {
            let (engine, host) = (endpoint.engine(guard), endpoint.host(guard));
            engine.is_some_and(|engine| engine.is_hopeless(source, &host))
        };
        let Some(endpoint) = self.endpoints(guard).find(knows) else { return true };
        let address = endpoint.host(guard).address(source);
        let hears = |endpoint: &Endpoint| {
            let engine = endpoint.engine(guard).zip(address);
            engine.is_some_and(|(engine, address)| engine.hears(&address))
        };
        if self.endpoints(guard).any(hears) || !self.state(guard).receives.want(source) {
            return true;
        }
        for other in self.endpoints(guard).filter(|other| !knows(other)) {
            let is_full = || other.engine(guard).is_some_and(|engine| engine.is_full());
            if is_full() {
                // Perhaps it awaits nothing any more.
                progress_for_others(other, guard);
            }
            if is_full() || !Host::takes_arrivals(&other.host(guard)) {
                other.state(guard).asleep |= LOST_PEER;
                return false;
            }
            // One look takes a batch of messages, and other peers go on sending.
            let moves = |_: &usize| !hears(other) && progress_for_others(other, guard) > 0;
            (0..LOOKS_MAX).take_while(moves).for_each(drop);
            if hears(other) {
                return true;
            }
        }
        if let Some(engine) = endpoint.engine(guard) {
            engine.fail_hopeless(source, &mut endpoint.host(guard));
        }
        endpoint.end_call(guard);
        true
    }

    /// An endpoint leaves: another one may know that a peer is dead, which this one has heard.
    pub(super) fn leave(&self, endpoint: &Endpoint, guard: &Guard<'_>) {
        let state = self.state(guard);
        state.endpoints.retain(|known| !std::ptr::eq(*known, endpoint));
        if !endpoint.domain.lock.is_here() {
            // A forked child: what arrives at the other endpoints is the parent's.
            return;
        }
        state.lost.extend(state.receives.sources());
        self.end_lost(guard);
    }

    /// The source that a receive wants, as completions name it. All endpoints have the same address vector.
    fn wanted_source(
        &self,
        source: fi_addr_t,
        op_flags: u64,
        guard: &Guard<'_>,
    ) -> Result<u64, i32> {
        match self.endpoints(guard).next() {
            Some(endpoint) if op_flags & FI_AUTH_KEY != 0 => endpoint.wanted_key(source, guard),
            Some(endpoint) => endpoint.wanted_source(source, guard),
            None if source == FI_ADDR_UNSPEC || !self.directed => Ok(ANY_SOURCE),
            None => Err(FI_EOPBADSTATE),
        }
    }
}

fn receive(
    handle: &ReceiveFid,
    segments: Result<impl Buffers, i32>,
    tagging: Tagging,
    source: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> isize {
    let segments = segments.map(|one| one.list());
    result(try_receive(handle, segments, tagging, source, context, flags))
}

fn try_receive(
    handle: &ReceiveFid,
    segments: Result<SegmentList, i32>,
    tagging: Tagging,
    source: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> Result<(), i32> {
    let shared = &*handle.shared;
    let guard = shared.domain.lock.lock();
    let special = FI_PEEK | FI_CLAIM | FI_DISCARD;
    let op_flags = flags.of_receive(&handle.flags, tagging);
    let multi = op_flags & FI_MULTI_RECV != 0;
    if multi && (tagging.tagged || op_flags & special != 0) {
        return Err(FI_EINVAL);
    }
    if op_flags & FI_TRIGGER != 0 {
        return Err(FI_EOPNOTSUPP); // triggered operations are an endpoint's
    }
    let op = ReceiveOp {
        segments: segments?,
        tagged: tagging.tagged,
        tag: tagging.tag,
        ignore: tagging.ignore,
        source: shared.wanted_source(source, op_flags, &guard)?,
        context: context.expose_provenance() as u64,
        report: Report::new(op_flags & FI_COMPLETION != 0, 0),
        multi_min: multi.then(|| shared.state(&guard).min_multi_recv),
    };
    if op_flags & special != 0 {
        return special_receive(shared, op, op_flags, &guard);
    }
    if shared.state(&guard).receives.len() >= shared.domain.config.endpoint.rx_max {
        return Err(FI_EAGAIN);
    }
    shared.state(&guard).receives.post(&op);
    while let Some(endpoint) = shared.oldest(&op, &guard) {
        let mut host = endpoint.host(&guard);
        let served =
            endpoint.engine(&guard).is_some_and(|engine| engine.serve_first(&op, &mut host));
        endpoint.end_call(&guard);
        if !served || !multi {
            break;
        }
    }
    if !shared.fail_hopeless(op.source, &guard) {
        shared.state(&guard).lost.insert(op.source);
    }
    Ok(())
}

/// FI_PEEK, FI_CLAIM and FI_DISCARD (fi_tagged.3). The first endpoint reports that no message was
/// found.
fn special_receive(
    shared: &SharedReceive,
    op: ReceiveOp,
    flags: u64,
    guard: &Guard<'_>,
) -> Result<(), i32> {
    let special = Special::of(flags).ok_or(FI_EINVAL)?;
    for endpoint in shared.endpoints(guard) {
        endpoint.progress(By::Application, guard);
    }
    let claimed = shared
        .endpoints(guard)
        .find(|endpoint| endpoint.engine(guard).is_some_and(|engine| engine.has_claimed(&op)));
    let found = match special {
        Special::Peek(PeekAction::Claim) if claimed.is_some() => return Err(FI_EINVAL),
        Special::Peek(_) => shared.oldest(&op, guard),
        Special::Claimed { .. } => claimed,
    };
    let endpoint = found.or_else(|| shared.endpoints(guard).next()).ok_or(FI_EOPBADSTATE)?;
    let entry = Host::reports_all_receives(&endpoint.host(guard));
    let op = ReceiveOp { report: Report::new(op.report.entry() || entry, 0), ..op };
    let outcome = special.carry_out(endpoint, &op, guard);
    endpoint.end_call(guard);
    outcome
}

receives!(
    receive(context), () Tagging::PLAIN, fi_msg, Tagging::plain;
    recv "fi_recv(srx)" recvv "fi_recvv(srx)" recvmsg "fi_recvmsg(srx)" any_recv any_recvv any_recvmsg
);

receives!(
    receive(context), (tag ignore) Tagging::tagged(tag, ignore), fi_msg_tagged, Tagging::wanted;
    trecv "fi_trecv(srx)" trecvv "fi_trecvv(srx)" trecvmsg "fi_trecvmsg(srx)" any_trecv any_trecvv any_trecvmsg
);

// SAFETY of the entries below: the handle is an open context of this provider.

/// `fi_cancel`, which the first endpoint reports. Errors: ENOENT when no posted receive has the context
/// (any more); EOPBADSTATE while no endpoint is bound.
unsafe extern "C" fn cancel(fid: fid_t, op_context: *mut c_void) -> isize {
    entry("fi_cancel(srx)", || {
        // SAFETY: an open context of this provider; `fid` is the first member.
        let shared = unsafe { &context(fid.cast()).shared };
        let guard = shared.domain.lock.lock();
        let Some(endpoint) = shared.endpoints(&guard).next() else {
            return -(FI_EOPBADSTATE as isize);
        };
        let mut host = endpoint.host(&guard);
        let Some(engine) = endpoint.engine(&guard) else { return -(FI_EOPBADSTATE as isize) };
        let cancelled = engine.cancel(0, op_context.expose_provenance() as u64, &mut host);
        endpoint.end_call(&guard);
        if cancelled { 0 } else { -(FI_ENOENT as isize) }
    })
}

unsafe extern "C" fn size_left(ep: *mut fid_ep) -> isize {
    entry("fi_rx_size_left(srx)", || {
        // SAFETY: an open context of this provider.
        let shared = unsafe { &context(ep).shared };
        let guard = shared.domain.lock.lock();
        let posted = shared.state(&guard).receives.len();
        shared.domain.config.endpoint.rx_max.saturating_sub(posted) as isize
    })
}

unsafe extern "C" fn getopt(
    fid: fid_t,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    entry("fi_getopt(srx)", || {
        if (level, name) != (FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV) {
            return -FI_ENOPROTOOPT;
        }
        // SAFETY: an open context of this provider; the application's buffer has `*len` bytes.
        unsafe {
            let shared = &context(fid.cast()).shared;
            let guard = shared.domain.lock.control();
            code(options::give(value, len, shared.state(&guard).min_multi_recv))
        }
    })
}

unsafe extern "C" fn setopt(
    fid: fid_t,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    entry("fi_setopt(srx)", || {
        if (level, name) != (FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV) {
            return -FI_ENOPROTOOPT;
        }
        // SAFETY: an open context of this provider; the application's value has `len` bytes.
        unsafe {
            let shared = &context(fid.cast()).shared;
            let guard = shared.domain.lock.control();
            code(
                options::take_size(value, len)
                    .map(|size| shared.state(&guard).min_multi_recv = size),
            )
        }
    })
}

/// FI_ENABLE does nothing: receives may be posted once the context is open.
unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(srx)", || {
        // SAFETY: an open context of this provider; `arg` is null or as fi_endpoint.3 says.
        let (handle, flags) = unsafe { (context(fid.cast()), arg.cast::<u64>().as_mut()) };
        match (command, flags) {
            (FI_ENABLE, _) => 0,
            (FI_GETOPSFLAG | FI_SETOPSFLAG, None) => -FI_EINVAL,
            (FI_GETOPSFLAG | FI_SETOPSFLAG, Some(flags))
                if *flags & (FI_RECV | FI_TRANSMIT) != FI_RECV =>
            {
                -FI_EINVAL
            }
            (FI_GETOPSFLAG, Some(flags)) => {
                *flags = handle.flags.load(Ordering::Relaxed);
                0
            }
            (FI_SETOPSFLAG, Some(flags)) => {
                let flags = *flags & !FI_RECV;
                code(
                    info::offers_flags("FI_SETOPSFLAG", false, flags)
                        .and_then(|()| check_default("FI_SETOPSFLAG", flags))
                        .map(|()| handle.flags.store(flags, Ordering::Relaxed)),
                )
            }
            _ => -FI_ENOSYS,
        }
    })
}

// Errors: EBUSY while an endpoint is bound.
entries! { entry -> c_int;
    close "fi_close(srx)" (fid: *mut fid) => close_object(fid, |srx: &ReceiveFid| {
        srx.shared.domain.lock.may_close(|_| Arc::strong_count(&srx.shared) > 1)
    });
    close_transmit "fi_close(stx)" (fid: *mut fid) => close_object(fid, |stx: &TransmitFid| {
        stx.shared.domain.lock.may_close(|_| Arc::strong_count(&stx.shared) > 1)
    });
}
