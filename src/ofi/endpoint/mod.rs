//! `struct fid_ep` of type FI_EP_RDM: opening, binding, enabling, closing.

pub(crate) mod atomic;
mod cm;
pub(super) mod collective;
pub(super) mod deferred;
mod host;
mod msg;
mod options;
mod rma;
mod scalable;
mod shared;
mod tagged;
mod thresholds;
mod transfer;

use super::av::{self, AddressVector};
use super::cntr::{self, Counter};
use super::cq::{self, CompletionQueue};
use super::domain::{Domain, DomainKey, auth_key};
use super::elsewhere::Elsewhere;
use super::eq;
use super::guard::{code, entry};
use super::lock::{Guard, Locked};
use super::own::{Object, own_behind_hooks};
use super::table::{SLACK, Slack, Table, stubs};
use super::trigger;
use crate::memory::keys::Right;
use crate::protocol::{Engine, Limits};
use crate::sys::clock::{Deadline, now_ns};
use crate::sys::process;
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::address::LocalHost;
use crate::transport::mux::{Bounds, Mux, MuxSettings};
use crate::transport::net::NetSettings;
use crate::transport::net::job_key::Source;
use crate::transport::net::reliable::tag::JobKey;
use crate::transport::net::verbs::RdmaSettings;
use host::EndpointHost;
use libfabric_sys::{
    FI_ADDR_STR, FI_ALIAS, FI_ATOMIC, FI_CLASS_AV, FI_CLASS_CNTR, FI_CLASS_CQ, FI_CLASS_EQ,
    FI_CLASS_SRX_CTX, FI_CLASS_STX_CTX, FI_COLLECTIVE, FI_EADDRINUSE, FI_EBUSY, FI_EINVAL,
    FI_ENABLE, FI_ENOAV, FI_ENOCQ, FI_ENOKEY, FI_ENOSYS, FI_EOPBADSTATE, FI_EP_RDM, FI_GETOPSFLAG,
    FI_MSG, FI_READ, FI_RECV, FI_REMOTE_READ, FI_REMOTE_WRITE, FI_RMA, FI_SELECTIVE_COMPLETION,
    FI_SEND, FI_SETOPSFLAG, FI_SHARED_CONTEXT, FI_SOCKADDR_IN6, FI_TAGGED, FI_TRANSMIT, FI_TRIGGER,
    FI_WRITE, fi_alias, fi_info, fi_ops, fi_ops_ep, fi_ops_ep_2_7, fi_rx_attr, fi_tx_attr, fid,
    fid_ep,
};
use scalable::{Contexts, Role};
pub(super) use scalable::{MAX_CONTEXTS, open as open_scalable};
use shared::{SharedReceive, SharedTransmit};
pub(super) use shared::{
    open_receive as open_shared_receive, open_transmit as open_shared_transmit,
};
use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes moved for one long message by one turn of progress.
const BULK_CHUNK: usize = 1 << 20;
/// One-sided operations of fewer bytes are left to the target.
const ALONE_MIN: usize = 16 * 1024;
/// Messages are stored around the caches from this part of the last one on.
const CACHE_PART: usize = 4;
/// The same where nobody knows how large that one is, bytes.
const PAST_CACHES_MIN: usize = 8 << 20;
/// How long closing waits for messages that the application believes sent, milliseconds.
const LINGER_MS: i32 = 1000;
/// How long it goes on taking what comes, milliseconds: what was there is taken sooner, but peers may send on and on.
const DRAIN_MS: i32 = 100;

/// One direction's completion queue.
#[derive(Debug)]
pub(super) struct QueueBinding {
    queue: Arc<CompletionQueue>,
    /// FI_SELECTIVE_COMPLETION: only operations that ask get an entry.
    selective: bool,
}

/// What an endpoint reports to. Once it is enabled, counters alone are added.
#[derive(Debug, Default)]
pub(super) struct Bindings {
    transmit: Option<QueueBinding>,
    receive: Option<QueueBinding>,
    send_counter: Option<Arc<Counter>>,
    receive_counter: Option<Arc<Counter>>,
    read_counter: Option<Arc<Counter>>,
    write_counter: Option<Arc<Counter>>,
    remote_read_counter: Option<Arc<Counter>>,
    remote_write_counter: Option<Arc<Counter>>,
    shared_transmit: Option<Arc<SharedTransmit>>,
    shared_receive: Option<Arc<SharedReceive>>,
    av: Option<Arc<AddressVector>>,
    eq: Option<Arc<eq::EventQueue>>,
}

/// State under the domain's lock.
#[derive(Debug)]
pub(super) struct EndpointState {
    /// Peer of each `fi_addr`, plus one; 0: not met yet.
    routes: Vec<u32>,
    /// Removals of the address vector that `routes` has seen.
    removals: u64,
    min_multi_recv: usize,
    max_msg_size: usize,
    max_tagged_size: usize,
    max_rma_size: usize,
    inject_msg_size: usize,
    inject_tagged_size: usize,
    /// What the application has set: see [`options::inject_rma_size`].
    inject_rma_size: Option<usize>,
    inject_atomic_size: usize,
    /// FI_OPT_SHARED_MEMORY_PERMITTED.
    shm_permitted: bool,
    max_atomic_size: usize,
    bind: Option<Address>,
    /// Waiters that sleep on us.
    armed: u32,
    /// The progress thread sleeps on us.
    thread_armed: bool,
    /// The application has polled since the progress thread looked.
    polled: bool,
    /// Collective groups.
    groups: Vec<collective::Membership>,
}

/// The shared part of an endpoint and of its aliases.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(super) domain: Arc<Domain>,
    addr_format: u32,
    /// Of context 0, which is the only one of an ordinary endpoint.
    pub(super) bindings: Locked<Bindings>,
    /// The contexts of a scalable endpoint.
    contexts: Contexts,
    /// FI_SHARED_CONTEXT was asked for, for transmit and for receive.
    shares: (bool, bool),
    pub(super) engine: Locked<Option<Engine<Mux>>>,
    pub(super) state: Locked<EndpointState>,
    inject_size: usize,
    /// The application gave it with the endpoint.
    own_key: Option<JobKey>,
    /// FI_DIRECTED_RECV was asked for: `src_addr` of receives counts.
    pub(super) directed: bool,
    /// FI_SOURCE was asked for: completions tell the sender.
    pub(super) source: bool,
    /// FI_TRIGGER was asked for: operations may wait for counters.
    pub(super) triggers: bool,
    caps: u64,
    owner: i32,
}

/// One handle of an endpoint.
#[repr(C)]
pub(super) struct EndpointFid {
    fid: fid_ep,
    slack: Slack,
    pub(super) shared: Arc<Endpoint>,
    /// Default flags of operations through this handle.
    tx_flags: Cell<u64>,
    rx_flags: Cell<u64>,
    role: Role,
    /// The context of the endpoint that operations through this handle belong to.
    pub(super) context: u8,
    /// Common to a handle and its aliases.
    family: Arc<()>,
    alias: bool,
}

/// Enabled endpoints of this process.
static ENABLED: AtomicUsize = AtomicUsize::new(0);

/// How many endpoints of this process are enabled.
pub(super) fn enabled() -> usize {
    ENABLED.load(Ordering::Relaxed)
}

// SAFETY: it begins with a fid_ep; nothing else has this table.
unsafe impl Object for EndpointFid {
    type Shown = fid_ep;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    ops_open: Some(super::ext::ops_open),
    // SAFETY: fi_ops has six slots.
    ..unsafe { stubs::<fi_ops, 6>() }
});

// SAFETY: fi_ops_ep_2_7 has eight slots.
const STUBS: fi_ops_ep_2_7 = unsafe { stubs::<fi_ops_ep_2_7, 8>() };

static OPS: Table<fi_ops_ep_2_7> = Table::new(fi_ops_ep_2_7 {
    base: fi_ops_ep {
        cancel: Some(transfer::cancel),
        getopt: Some(options::getopt),
        setopt: Some(options::setopt),
        rx_size_left: Some(options::rx_size_left),
        tx_size_left: Some(options::tx_size_left),
        tx_ctx: Some(scalable::open_transmit),
        rx_ctx: Some(scalable::open_receive),
        ..STUBS.base
    },
    ..STUBS
});

/// Tables of operations that an object does not offer: each slot answers -FI_ENOSYS.
static NO_ATOMIC: Table<libfabric_sys::fi_ops_atomic> =
    // SAFETY: fi_ops_atomic has thirteen slots.
    Table::new(unsafe { stubs::<libfabric_sys::fi_ops_atomic, 13>() });
static NO_COLLECTIVE: Table<libfabric_sys::fi_ops_collective> =
    // SAFETY: fi_ops_collective has eleven slots.
    Table::new(unsafe { stubs::<libfabric_sys::fi_ops_collective, 11>() });

/// `fi_endpoint`. Errors: EINVAL, ENOSYS for types other than FI_EP_RDM.
///
/// # Safety
/// As libfabric calls `fi_endpoint`.
pub(crate) unsafe fn open(
    domain: &Arc<Domain>,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: passed on.
    unsafe { open_as(Role::Endpoint, domain, info, out, context) }
}

/// # Safety
/// As [`open`].
unsafe fn open_as(
    role: Role,
    domain: &Arc<Domain>,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: an info of ours (or a copy), valid during the call; its parts too.
    let (info, ep_attr, tx, rx) = unsafe {
        let info = info.as_ref().ok_or(FI_EINVAL)?;
        (info, info.ep_attr.as_ref(), info.tx_attr.as_ref(), info.rx_attr.as_ref())
    };
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    if ep_attr.is_none_or(|attr| attr.type_ != FI_EP_RDM) {
        return Err(FI_ENOSYS);
    }
    let counts = ep_attr.map_or((0, 0), |attr| (attr.tx_ctx_cnt, attr.rx_ctx_cnt));
    let contexts = match role {
        Role::Scalable => Contexts::scalable(counts)?,
        _ => Contexts::ordinary(counts)?,
    };
    let tx_flags = tx.map_or(0, |tx: &fi_tx_attr| tx.op_flags);
    let rx_flags = rx.map_or(0, |rx: &fi_rx_attr| rx.op_flags);
    // SAFETY: `src_addr` is as `src_addrlen` and `addr_format` say.
    let bind = unsafe { source_address(info) };
    // SAFETY: as `source_address`: the application says how long its key is.
    let given = unsafe {
        ep_attr.map_or(Ok(None), |attr| auth_key(&domain.fabric, attr.auth_key, attr.auth_key_size))
    }?;
    if given.is_some() && matches!(domain.key, DomainKey::InVectors) {
        log::warn(format_args!("ep_attr->auth_key refused: the domain has FI_AV_AUTH_KEY"));
        return Err(FI_EINVAL);
    }
    let inject_size =
        super::info::INJECT_SIZE.min(tx.map_or(usize::MAX, |tx| {
            if tx.inject_size == 0 { usize::MAX } else { tx.inject_size }
        }));
    let shared = Arc::new(Endpoint {
        domain: domain.clone(),
        addr_format: info.addr_format,
        bindings: Locked::new(Bindings::default()),
        contexts,
        shares: (counts.0 == FI_SHARED_CONTEXT, counts.1 == FI_SHARED_CONTEXT),
        engine: Locked::new(None),
        state: Locked::new(EndpointState {
            routes: Vec::new(),
            removals: 0,
            min_multi_recv: options::DEFAULT_MIN_MULTI_RECV,
            max_msg_size: usize::MAX,
            max_tagged_size: usize::MAX,
            max_rma_size: usize::MAX,
            inject_msg_size: inject_size,
            inject_tagged_size: inject_size,
            inject_rma_size: None,
            inject_atomic_size: inject_size,
            shm_permitted: true,
            max_atomic_size: crate::memory::atomic::MAX_BYTES,
            bind,
            armed: 0,
            thread_armed: false,
            polled: false,
            groups: Vec::new(),
        }),
        inject_size,
        own_key: given,
        directed: info.caps & libfabric_sys::FI_DIRECTED_RECV != 0,
        source: info.caps & libfabric_sys::FI_SOURCE != 0,
        triggers: info.caps & FI_TRIGGER != 0,
        caps: info.caps,
        owner: process::pid(),
    });
    let (flags, family) = ((tx_flags, rx_flags), Arc::new(()));
    // SAFETY: checked not to be null.
    unsafe { *out = handle(shared, role, 0, flags, context, family, false) };
    Ok(())
}

fn handle(
    shared: Arc<Endpoint>,
    role: Role,
    number: u8,
    flags: (u64, u64),
    context: *mut c_void,
    family: Arc<()>,
    alias: bool,
) -> *mut fid_ep {
    let tables = role.tables();
    Box::into_raw(Box::new(EndpointFid {
        fid: fid_ep {
            fid: fid { fclass: role.class(), context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr().cast(),
            cm: cm::OPS.as_mut_ptr(),
            msg: tables.msg.as_mut_ptr(),
            rma: tables.rma.as_mut_ptr(),
            tagged: tables.tagged.as_mut_ptr(),
            atomic: tables.atomic.as_mut_ptr(),
            collective: tables.collective.as_mut_ptr(),
        },
        slack: SLACK,
        shared,
        tx_flags: Cell::new(flags.0),
        rx_flags: Cell::new(flags.1),
        role,
        context: number,
        family,
        alias,
    }))
    .cast()
}

/// # Safety
/// `info.src_addr` is null or has `src_addrlen` bytes in `addr_format`.
unsafe fn source_address(info: &fi_info) -> Option<Address> {
    if info.src_addr.is_null() {
        return None;
    }
    // SAFETY: the caller vouches; a string ends with NUL.
    unsafe {
        if info.addr_format == FI_ADDR_STR {
            return Address::from_text(CStr::from_ptr(info.src_addr.cast()).to_str().ok()?);
        }
        Address::from_bytes(std::slice::from_raw_parts(info.src_addr.cast(), info.src_addrlen))
    }
}

/// The endpoint behind a handle.
///
/// # Safety
/// `ep` came from [`open`] and is not closed.
#[inline]
pub(super) unsafe fn endpoint<'a>(ep: *mut fid_ep) -> &'a EndpointFid {
    // SAFETY: the caller vouches.
    unsafe { &*ep.cast::<EndpointFid>() }
}

/// The endpoint behind a handle that a structure names. Errors: EINVAL for what is not ours.
///
/// # Safety
/// `ep` is null or an open object.
pub(super) unsafe fn named<'a>(ep: *mut fid_ep) -> Result<&'a EndpointFid, i32> {
    // SAFETY: the caller vouches.
    unsafe { own_behind_hooks(ep.cast()) }
}

impl Endpoint {
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(super) fn state<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut EndpointState {
        // SAFETY: guards passed here are of this endpoint's domain; each caller uses the result for
        // one step that reaches nothing else.
        unsafe { self.state.get(guard) }
    }

    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(super) fn bindings<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut Bindings {
        // SAFETY: as above; after enabling only `bind` changes the bindings, under the lock.
        unsafe { self.bindings.get(guard) }
    }

    /// What a transmit or receive context reports to.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(super) fn bindings_of<'g>(&'g self, context: u8, guard: &'g Guard<'_>) -> &'g mut Bindings {
        if context > 0 {
            return self.bindings_beyond(context, guard);
        }
        self.bindings(guard)
    }

    #[inline(never)]
    #[allow(clippy::mut_from_ref)]
    fn bindings_beyond<'g>(&'g self, context: u8, guard: &'g Guard<'_>) -> &'g mut Bindings {
        match self.more(guard).get_mut(usize::from(context).wrapping_sub(1)) {
            Some(bindings) => bindings,
            None => self.bindings(guard),
        }
    }

    /// What the contexts from 1 on report to.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(super) fn more<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut Vec<Bindings> {
        // SAFETY: as `bindings`.
        unsafe { self.contexts.more.get(guard) }
    }

    /// The engine, once enabled. While it is borrowed only the host is called, which reaches
    /// queues, counters and the address vector, never this cell.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(super) fn engine<'g>(&'g self, guard: &'g Guard<'_>) -> Option<&'g mut Engine<Mux>> {
        // SAFETY: see above.
        unsafe { self.engine.get(guard) }.as_mut()
    }

    /// Whether the endpoint may do this to others' memory: without a direction FI_RMA, and FI_ATOMIC,
    /// has all.
    pub(super) fn may(&self, right: Right) -> bool {
        self.has_directions(right, FI_READ, FI_WRITE)
    }

    /// Whether others may do this to memory through the endpoint.
    pub(super) fn lets(&self, right: Right) -> bool {
        self.has_directions(right, FI_REMOTE_READ, FI_REMOTE_WRITE)
    }

    fn has_directions(&self, right: Right, read: u64, write: u64) -> bool {
        let primary = if right.is_atomic() { FI_ATOMIC } else { FI_RMA };
        let wanted = if right.reads() { read } else { 0 } | if right.writes() { write } else { 0 };
        let all = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        self.caps & primary != 0 && (self.caps & wanted == wanted || self.caps & all == 0)
    }

    /// Whether it can do something that completes, and whether messages can come to it.
    fn directions(&self) -> (bool, bool) {
        let messages = self.caps & (FI_MSG | FI_TAGGED) != 0;
        let both = self.caps & (FI_SEND | FI_RECV) == 0;
        let sends = messages && (both || self.caps & FI_SEND != 0);
        let receives = messages && (both || self.caps & FI_RECV != 0);
        let collects = self.caps & FI_COLLECTIVE != 0;
        let all = [Right::Read, Right::Write, Right::Update, Right::Fetch];
        (sends || collects || all.into_iter().any(|right| self.may(right)), receives)
    }

    /// A counter of a region is fed by every endpoint of the domain.
    pub(crate) fn feed(&self, counter: &Counter, guard: &Guard<'_>) -> Result<(), i32> {
        let Some(fd) = self.engine(guard).map(|engine| engine.iface().wait_fd()) else {
            return Ok(());
        };
        // SAFETY: the guard is of the domain of endpoint and counter; one short step.
        unsafe { counter.state.get(guard) }.source.attach(self, fd)
    }

    #[inline]
    pub(in crate::ofi) fn host<'g>(&'g self, guard: &'g Guard<'_>) -> EndpointHost<'g> {
        EndpointHost::new(self.bindings(guard), guard, self)
    }

    /// A turn of progress on behalf of the application.
    #[inline]
    pub(crate) fn progress(&self, guard: &Guard<'_>) -> usize {
        let state = self.state(guard);
        state.polled = true;
        if state.thread_armed {
            self.take_from_thread(guard);
        }
        let moved = self.progress_quietly(guard);
        let endpoints = enabled();
        let gives_way = |engine: &mut Engine<Mux>| engine.iface().gives_way(endpoints);
        if moved == 0 && self.engine(guard).is_some_and(gives_way) {
            self.domain.yields.store(true, Ordering::Relaxed);
        }
        moved
    }

    /// A turn of progress on behalf of the progress thread.
    #[inline]
    pub(crate) fn progress_quietly(&self, guard: &Guard<'_>) -> usize {
        let mut host = self.host(guard);
        let moved = self.engine(guard).map_or(0, |engine| engine.progress(&mut host));
        trigger::run_due(&self.domain, guard);
        moved
    }

    /// Whether the application has polled since this was asked last.
    pub(crate) fn take_polled(&self, guard: &Guard<'_>) -> bool {
        std::mem::take(&mut self.state(guard).polled)
    }

    /// A waiter is about to sleep: false if there is work.
    pub(crate) fn arm(&self, guard: &Guard<'_>) -> bool {
        if self.rearm(guard) {
            self.state(guard).armed += 1;
            return true;
        }
        false
    }

    /// As `arm`, for a waiter that is counted already.
    pub(crate) fn rearm(&self, guard: &Guard<'_>) -> bool {
        let Some(engine) = self.engine(guard) else { return true };
        // SAFETY: the guard is of this domain; one short step.
        let due = !unsafe { self.domain.state(guard) }.triggers.is_idle();
        if due || engine.is_busy() || !engine.iface_mut().sleep() {
            self.wake_if_unwatched(guard);
            return false;
        }
        true
    }

    /// A waiter woke up.
    pub(crate) fn disarm(&self, guard: &Guard<'_>) {
        let state = self.state(guard);
        state.armed = state.armed.saturating_sub(1);
        self.wake_if_unwatched(guard);
    }

    /// Whether a turn of progress would find anything; to be asked when one has not.
    pub(super) fn has_work(&self, guard: &Guard<'_>) -> bool {
        let idle = self.arm(guard);
        if idle {
            self.disarm(guard);
        }
        !idle
    }

    fn wake_if_unwatched(&self, guard: &Guard<'_>) {
        let state = self.state(guard);
        if state.armed == 0 && !state.thread_armed {
            if let Some(engine) = self.engine(guard) {
                engine.iface_mut().awake();
            }
        }
    }

    /// The progress thread will sleep on us: false if there is work.
    pub(crate) fn hand_to_thread(&self, guard: &Guard<'_>) -> bool {
        let ready = self.rearm(guard);
        self.state(guard).thread_armed = ready;
        ready
    }

    /// The application polls again: doorbells would only cost.
    #[cold]
    fn take_from_thread(&self, guard: &Guard<'_>) {
        self.state(guard).thread_armed = false;
        self.wake_if_unwatched(guard);
        if let Some(thread) = self.domain.thread() {
            thread.kick();
        }
    }

    /// `fi_enable`. Errors: ENOCQ, ENOAV, EOPBADSTATE when enabled already or without the shared
    /// context that was asked for, ENOKEY without a key where vectors have them, EADDRINUSE,
    /// EADDRNOTAVAIL, EMFILE, ENFILE, ENOMEM.
    fn enable(&self) -> Result<(), i32> {
        let guard = self.domain.lock.lock();
        if self.engine(&guard).is_some() {
            return Err(FI_EOPBADSTATE);
        }
        let bindings = self.bindings(&guard);
        if bindings.av.is_none() {
            return Err(FI_ENOAV);
        }
        let (initiates, receives) = self.directions();
        if (initiates && !bindings.reports_initiated())
            || (receives && self.caps & (FI_RMA | FI_ATOMIC) == 0 && !bindings.reports_received())
        {
            return Err(FI_ENOCQ);
        }
        self.check_shared(bindings, &guard)?;
        let wait_fd = self.start(&guard)?;
        if bindings.waits(&guard) {
            self.enable_waiting(&guard);
        }
        self.join_shared(bindings, &guard);
        bindings.attach(self, wait_fd, &guard)
    }

    /// Someone may sleep on what the endpoint reports to.
    fn enable_waiting(&self, guard: &Guard<'_>) {
        if let Some(engine) = self.engine(guard) {
            engine.iface_mut().enable_waiting();
        }
    }

    /// The endpoint's job key, and what it was made of.
    /// Errors: ENOKEY where address vectors have the keys and this one has none.
    fn job_key(&self, guard: &Guard<'_>) -> Result<(JobKey, Source), i32> {
        let given = match (self.own_key, self.domain.key) {
            (Some(key), _) | (None, DomainKey::Given(key)) => key,
            (None, DomainKey::Environment(key, source)) => return Ok((key, source)),
            (None, DomainKey::InVectors) => {
                let av = self.bindings(guard).av.as_ref().ok_or(FI_ENOAV)?;
                av.job_key(guard).ok_or_else(|| {
                    log::warn(format_args!(
                        "fi_enable refused: no fi_av_insert_auth_key before it"
                    ));
                    FI_ENOKEY
                })?
            }
        };
        Ok((given, Source::AuthKey))
    }

    /// Whether the endpoint is bound to this address vector.
    pub(in crate::ofi) fn has(&self, av: &AddressVector, guard: &Guard<'_>) -> bool {
        self.bindings(guard).av.as_ref().is_some_and(|bound| std::ptr::eq(&**bound, av))
    }

    /// The job key that the application gave the endpoint, if any.
    pub(super) fn given_key(&self, guard: &Guard<'_>) -> Option<JobKey> {
        let (key, source) = self.job_key(guard).ok()?;
        (source == Source::AuthKey).then_some(key)
    }

    /// Opens the interface, under the lock. Returns the descriptor that wakes its waiters.
    fn start(&self, guard: &Guard<'_>) -> Result<RawFd, i32> {
        let config = &self.domain.config;
        let (key, source) = self.job_key(guard)?;
        let bind = match self.state(guard).bind {
            Some(address) => address,
            None => self.default_address()?,
        };
        let settings = MuxSettings {
            cma: config.cma,
            shm: config.shm && self.state(guard).shm_permitted,
            mtu: config.mtu,
            bounds: Bounds {
                push: config.push_max,
                share: config.share_min,
                bulk: config.bulk_min,
            },
            mark: if source.is_given() { key.mark() } else { 0 },
            net: config.net.then_some(NetSettings {
                key,
                key_source: source,
                peer_timeout_s: config.peer_timeout_s,
                buffer_bytes: config.net_buffer,
                streams: config.streams,
                rdma: RdmaSettings::of(config),
            }),
        };
        let mux = Mux::open(bind, settings).map_err(|e| {
            log::limited!(cause: e.0, "cannot open an endpoint at {bind}: {e}");
            if e.0 == libc::EADDRINUSE { FI_EADDRINUSE } else { e.0 }
        })?;
        let wait_fd = mux.wait_fd();
        let limits = Limits {
            eager_max: config.eager_max,
            tx_max: config.tx_max * usize::from(self.contexts.transmit()),
            rx_max: config.rx_max,
            past_caches_min: config.past_caches_min.unwrap_or_else(|| {
                process::last_cache().map_or(PAST_CACHES_MIN, |bytes| bytes / CACHE_PART)
            }),
            unexpected_max: config.unexpected_max,
            bulk_chunk: BULK_CHUNK,
            alone_min: ALONE_MIN,
            contexts: usize::from(self.contexts.receive()),
            shares_receives: self.shares.1,
        };
        // SAFETY: the guard is of this domain; the cell is reached by nobody else in this step.
        unsafe { *self.engine.get(guard) = Some(Engine::new(mux, limits)) };
        // SAFETY: the guard is of this domain; one short step.
        let state = unsafe { self.domain.state(guard) };
        state.endpoints.push(self);
        ENABLED.fetch_add(1, Ordering::Relaxed);
        for counter in state.counters_of_regions() {
            self.feed(&counter, guard)?;
        }
        if let Some(thread) = self.domain.thread() {
            thread.watch(wait_fd, 1);
        }
        Ok(wait_fd)
    }

    fn default_address(&self) -> Result<Address, i32> {
        let v6 = (self.addr_format == FI_SOCKADDR_IN6).then_some(true);
        let interface = LocalHost::detect()
            .preferred(self.domain.config.iface.as_deref(), v6)
            .ok_or(libfabric_sys::FI_EADDRNOTAVAIL)?;
        Ok(Address(std::net::SocketAddr::new(interface.ip, 0)))
    }

    /// Leaves all lists and lets the interface go. Messages that the application believes sent get
    /// a bounded time to leave.
    fn shut_down(&self) {
        let deadline = Deadline::after_ms(LINGER_MS);
        let drained = Deadline::after_ms(DRAIN_MS);
        let mut elsewhere = Elsewhere::after(now_ns());
        // A forked child has nothing to finish on behalf of its parent.
        let mine = process::pid() == self.owner;
        loop {
            let guard = self.domain.lock.lock();
            // What has arrived is answered: a peer may wait for that.
            let taken = mine && !drained.expired() && self.take_all(&guard) > 0;
            let unsent = self
                .engine(&guard)
                .is_some_and(|engine| engine.has_unsent() || engine.iface().unacknowledged() > 0);
            if !mine || !taken && !unsent || deadline.expired() {
                self.leave(&guard);
                return;
            }
            self.progress_quietly(&guard);
            drop(guard);
            process::yield_now();
            elsewhere.look(Some(&self.domain));
        }
    }

    /// Takes what has come by any way. Returns how much that was.
    fn take_all(&self, guard: &Guard<'_>) -> usize {
        if let Some(engine) = self.engine(guard) {
            engine.iface_mut().hasten();
        }
        self.progress_quietly(guard)
    }

    fn leave(&self, guard: &Guard<'_>) {
        let wait_fd = self.engine(guard).map(|engine| engine.iface().wait_fd());
        self.leave_shared(guard);
        self.bindings(guard).detach(self, wait_fd, guard);
        for bindings in self.more(guard) {
            bindings.detach(self, wait_fd, guard);
        }
        if let (Some(thread), Some(fd)) = (self.domain.thread(), wait_fd) {
            thread.unwatch(fd);
        }
        // SAFETY: the guard is of this domain; one short step.
        let state = unsafe { self.domain.state(guard) };
        let this: *const Self = self;
        let before = state.endpoints.len();
        state.endpoints.retain(|endpoint| *endpoint != this);
        ENABLED.fetch_sub(before - state.endpoints.len(), Ordering::Relaxed);
        trigger::forget(self, guard);
        // SAFETY: as above.
        let state = unsafe { self.domain.state(guard) };
        for counter in state.counters_of_regions() {
            // SAFETY: as above.
            unsafe { counter.state.get(guard) }.source.detach(self, wait_fd);
        }
        if let Some(engine) = self.engine(guard) {
            log::info(format_args!(
                "endpoint {} closed: {:?}",
                engine.iface().address(),
                engine.counts()
            ));
        }
        // SAFETY: the guard is of this domain; nobody reaches the engine any more.
        unsafe { *self.engine.get(guard) = None };
        *self.bindings(guard) = Bindings::default();
        self.more(guard).clear();
    }
}

impl Bindings {
    fn queues(&self) -> impl Iterator<Item = &Arc<CompletionQueue>> {
        self.transmit.iter().chain(&self.receive).map(|binding| &binding.queue)
    }

    fn counters(&self) -> impl Iterator<Item = &Arc<Counter>> {
        let remote = self.remote_read_counter.iter().chain(&self.remote_write_counter);
        self.initiating_counters().chain(&self.receive_counter).chain(remote)
    }

    fn initiating_counters(&self) -> impl Iterator<Item = &Arc<Counter>> {
        self.send_counter.iter().chain(&self.read_counter).chain(&self.write_counter)
    }

    /// Whether anyone learns of messages that come. An endpoint for one-sided operations does
    /// without where no message does: receives are refused then.
    pub(super) fn reports_received(&self) -> bool {
        self.receive.is_some() || self.receive_counter.is_some()
    }

    /// Whether anyone learns of the end of what the application starts.
    fn reports_initiated(&self) -> bool {
        self.transmit.is_some() || self.initiating_counters().next().is_some()
    }

    /// Whether anyone may sleep on the endpoint.
    fn waits(&self, guard: &Guard<'_>) -> bool {
        // SAFETY: the guard is of the domain of all these objects; one short step each.
        unsafe {
            self.queues().any(|cq| cq.state.get(guard).source.waiter.is_some())
                || self.counters().any(|cntr| cntr.state.get(guard).source.waiter.is_some())
        }
    }

    fn attach(&self, endpoint: &Endpoint, fd: i32, guard: &Guard<'_>) -> Result<(), i32> {
        // SAFETY: as above.
        unsafe {
            for cq in self.queues() {
                cq.state.get(guard).source.attach(endpoint, fd)?;
            }
            for cntr in self.counters() {
                cntr.state.get(guard).source.attach(endpoint, fd)?;
            }
        }
        Ok(())
    }

    fn detach(&self, endpoint: &Endpoint, fd: Option<i32>, guard: &Guard<'_>) {
        // SAFETY: as above.
        unsafe {
            for cq in self.queues() {
                cq.state.get(guard).source.detach(endpoint, fd);
            }
            for cntr in self.counters() {
                cntr.state.get(guard).source.detach(endpoint, fd);
            }
        }
    }
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(ep)", || {
        // SAFETY: a handle of ours, open until now.
        unsafe {
            let handle = &*fid.cast::<EndpointFid>();
            if handle.shared.domain.lock.is_lost() {
                return 0;
            }
            if !handle.alias {
                if Arc::strong_count(&handle.family) > 1 {
                    return -FI_EBUSY; // an alias is open
                }
                match handle.role {
                    Role::Transmit | Role::Receive => {
                        if let Err(error) = handle.shared.close_context(handle) {
                            return -error;
                        }
                    }
                    Role::Endpoint | Role::Scalable => {
                        if Arc::strong_count(&handle.shared) > 1 {
                            return -FI_EBUSY; // a context is open
                        }
                        handle.shared.shut_down();
                    }
                }
            }
            drop(Box::from_raw(fid.cast::<EndpointFid>()));
        }
        0
    })
}

unsafe extern "C" fn bind(fid: *mut fid, other: *mut fid, flags: u64) -> c_int {
    entry("fi_ep_bind", || {
        // SAFETY: a handle of ours and an object of the application.
        unsafe {
            let handle = &*fid.cast::<EndpointFid>();
            let ep = &handle.shared;
            let Some(object) = other.as_ref() else { return -FI_EINVAL };
            let guard = ep.domain.lock.lock();
            if !ep.may_bind(handle, object.fclass, flags) {
                return -FI_EINVAL;
            }
            // Sandia OpenSHMEM binds counters and a shared transmit context to an endpoint that is enabled.
            let enabled = ep.is_enabled(handle, &guard);
            if enabled && !matches!(object.fclass, FI_CLASS_CNTR | FI_CLASS_STX_CTX) {
                return -FI_EOPBADSTATE;
            }
            let bindings = ep.bindings_of(handle.context, &guard);
            match object.fclass {
                FI_CLASS_CQ => {
                    code(cq::shared(other).and_then(|queue| bind_queue(ep, bindings, queue, flags)))
                }
                FI_CLASS_CNTR => {
                    let counter = match cntr::shared(other) {
                        Ok(counter) => counter,
                        Err(error) => return -error,
                    };
                    let bound = bind_counter(ep, bindings, counter, flags);
                    code(
                        bound
                            .and_then(|()| if enabled { ep.feed(counter, &guard) } else { Ok(()) }),
                    )
                }
                FI_CLASS_STX_CTX => code(ep.bind_shared_transmit(bindings, other)),
                FI_CLASS_SRX_CTX => code(ep.bind_shared_receive(bindings, other)),
                FI_CLASS_AV => {
                    let Ok(av) = av::shared(other) else { return -FI_EINVAL };
                    if !Arc::ptr_eq(&av.domain, &ep.domain) || bindings.av.is_some() {
                        return -FI_EINVAL;
                    }
                    bindings.av = Some(av.clone());
                    0
                }
                FI_CLASS_EQ => {
                    let Ok(eq) = eq::shared(other) else { return -FI_EINVAL };
                    bindings.eq = Some(eq.clone());
                    0
                }
                _ => -FI_EINVAL,
            }
        }
    })
}

fn bind_queue(
    ep: &Endpoint,
    bindings: &mut Bindings,
    queue: &Arc<CompletionQueue>,
    flags: u64,
) -> Result<(), i32> {
    let known = FI_TRANSMIT | FI_RECV | FI_SELECTIVE_COMPLETION;
    if flags & !known != 0 || flags & (FI_TRANSMIT | FI_RECV) == 0 {
        return Err(FI_EINVAL);
    }
    if !Arc::ptr_eq(&queue.domain, &ep.domain) {
        return Err(FI_EINVAL);
    }
    let selective = flags & FI_SELECTIVE_COMPLETION != 0;
    for (flag, slot) in [(FI_TRANSMIT, &mut bindings.transmit), (FI_RECV, &mut bindings.receive)] {
        if flags & flag != 0 {
            if slot.is_some() {
                return Err(FI_EINVAL);
            }
            *slot = Some(QueueBinding { queue: queue.clone(), selective });
        }
    }
    Ok(())
}

fn bind_counter(
    ep: &Endpoint,
    bindings: &mut Bindings,
    counter: &Arc<Counter>,
    flags: u64,
) -> Result<(), i32> {
    let remote = FI_REMOTE_READ | FI_REMOTE_WRITE;
    let known = FI_SEND | FI_RECV | FI_READ | FI_WRITE | remote;
    if flags & !known != 0 || flags == 0 || !Arc::ptr_eq(&counter.domain, &ep.domain) {
        return Err(FI_EINVAL);
    }
    for (flag, slot) in [
        (FI_SEND, &mut bindings.send_counter),
        (FI_RECV, &mut bindings.receive_counter),
        (FI_READ, &mut bindings.read_counter),
        (FI_WRITE, &mut bindings.write_counter),
        (FI_REMOTE_READ, &mut bindings.remote_read_counter),
        (FI_REMOTE_WRITE, &mut bindings.remote_write_counter),
    ] {
        if flags & flag != 0 {
            if slot.is_some() {
                return Err(FI_EINVAL);
            }
            *slot = Some(counter.clone());
        }
    }
    Ok(())
}

unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(ep)", || {
        // SAFETY: a handle of ours; `arg` is as fi_endpoint.3 says for each command.
        unsafe {
            let handle = &*fid.cast::<EndpointFid>();
            match command {
                FI_ENABLE => code(match handle.role {
                    Role::Endpoint => handle.shared.enable(),
                    _ => handle.shared.enable_part(handle),
                }),
                FI_GETOPSFLAG => code(get_flags(handle, arg.cast())),
                FI_SETOPSFLAG => code(set_flags(handle, arg.cast())),
                FI_ALIAS => code(open_alias(handle, arg.cast())),
                _ => -FI_ENOSYS,
            }
        }
    })
}

/// # Safety
/// `arg` is null or a `u64`.
unsafe fn get_flags(handle: &EndpointFid, arg: *mut u64) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let flags = unsafe { arg.as_mut() }.ok_or(FI_EINVAL)?;
    *flags = match (*flags & FI_TRANSMIT != 0, *flags & FI_RECV != 0) {
        (true, false) => handle.tx_flags.get(),
        (false, true) => handle.rx_flags.get(),
        _ => return Err(FI_EINVAL),
    };
    Ok(())
}

/// # Safety
/// `arg` is null or a `u64`.
unsafe fn set_flags(handle: &EndpointFid, arg: *const u64) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let flags = *unsafe { arg.as_ref() }.ok_or(FI_EINVAL)?;
    let value = flags & !(FI_TRANSMIT | FI_RECV);
    match (flags & FI_TRANSMIT != 0, flags & FI_RECV != 0) {
        (true, false) => handle.tx_flags.set(value),
        (false, true) => handle.rx_flags.set(value),
        _ => return Err(FI_EINVAL),
    }
    Ok(())
}

/// `fi_ep_alias`: another handle of the endpoint with default flags of its own.
///
/// # Safety
/// `arg` is null or a `fi_alias` with valid `fid`.
unsafe fn open_alias(handle: &EndpointFid, arg: *mut fi_alias) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    unsafe {
        let arg = arg.as_mut().ok_or(FI_EINVAL)?;
        let flags = arg.flags & !(FI_TRANSMIT | FI_RECV);
        let mut tx = handle.tx_flags.get();
        let mut rx = handle.rx_flags.get();
        match (arg.flags & FI_TRANSMIT != 0, arg.flags & FI_RECV != 0) {
            (true, false) => tx = flags,
            (false, true) => rx = flags,
            (false, false) if flags == 0 => {}
            _ => return Err(FI_EINVAL),
        }
        if arg.fid.is_null() {
            return Err(FI_EINVAL);
        }
        let context = handle.fid.fid.context;
        let (shared, family) = (handle.shared.clone(), handle.family.clone());
        let (role, number) = (handle.role, handle.context);
        let alias = self::handle(shared, role, number, (tx, rx), context, family, true);
        *arg.fid = alias.cast();
    }
    Ok(())
}
