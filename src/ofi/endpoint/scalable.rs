//! Scalable endpoints (fi_endpoint.3): one address with several transmit and receive contexts, each
//! with queues and counters of its own. An ordinary endpoint is the case of one of each, both number 0.

use super::{
    Bindings, Endpoint, EndpointFid, LINGER_MS, atomic, collective, endpoint, handle, msg, rma,
    tagged,
};
use crate::ofi::domain::Domain;
use crate::ofi::elsewhere::Elsewhere;
use crate::ofi::guard::{code, making_entry};
use crate::ofi::info::{
    CONTEXT_SIZE, INJECT_SIZE, IOV_LIMIT, MSG_ORDER, RMA_IOV_LIMIT, RX_CAPS, TX_CAPS,
};
use crate::ofi::lock::{Guard, Locked};
use crate::ofi::table::Table;
use crate::sys::clock::{Deadline, now_ns};
use crate::sys::process;
use crate::telemetry::log;
use libfabric_sys::{
    FI_CLASS_AV, FI_CLASS_CNTR, FI_CLASS_CQ, FI_CLASS_EP, FI_CLASS_EQ, FI_CLASS_RX_CTX,
    FI_CLASS_SEP, FI_CLASS_TX_CTX, FI_EBUSY, FI_EINVAL, FI_ENOAV, FI_ENOCQ, FI_EOPBADSTATE,
    FI_READ, FI_RECV, FI_REMOTE_READ, FI_REMOTE_WRITE, FI_RMA, FI_SELECTIVE_COMPLETION, FI_SEND,
    FI_SHARED_CONTEXT, FI_TRANSMIT, FI_WRITE, fi_info, fi_ops_msg, fi_ops_rma, fi_ops_tagged,
    fi_rx_attr, fi_tx_attr, fid_ep,
};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Most transmit and most receive contexts of an endpoint: sets of them are words of 64 bits.
pub(crate) const MAX_CONTEXTS: usize = 64;

/// What a handle is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Endpoint,
    /// A scalable endpoint, whose contexts do the work.
    Scalable,
    /// A transmit context of one.
    Transmit,
    /// A receive context of one.
    Receive,
}

/// The calls that a handle offers.
pub(super) struct Tables {
    pub(super) msg: &'static Table<fi_ops_msg>,
    pub(super) tagged: &'static Table<fi_ops_tagged>,
    pub(super) rma: &'static Table<fi_ops_rma>,
    pub(super) atomic: &'static Table<libfabric_sys::fi_ops_atomic>,
    pub(super) collective: &'static Table<libfabric_sys::fi_ops_collective>,
}

impl Role {
    pub(super) fn class(self) -> usize {
        match self {
            Self::Endpoint => FI_CLASS_EP,
            Self::Scalable => FI_CLASS_SEP,
            Self::Transmit => FI_CLASS_TX_CTX,
            Self::Receive => FI_CLASS_RX_CTX,
        }
    }

    pub(super) fn tables(self) -> Tables {
        let (msg, tagged) = match self {
            Self::Endpoint => (&msg::OPS, &tagged::OPS),
            Self::Scalable => (&msg::NO_OPS, &tagged::NO_OPS),
            Self::Transmit => (&msg::TRANSMIT_OPS, &tagged::TRANSMIT_OPS),
            Self::Receive => (&msg::RECEIVE_OPS, &tagged::RECEIVE_OPS),
        };
        let (rma, atomic) = match self {
            Self::Endpoint | Self::Transmit => (&rma::OPS, &atomic::OPS),
            Self::Scalable | Self::Receive => (&rma::NO_OPS, &super::NO_ATOMIC),
        };
        let collective = match self {
            Self::Endpoint => &collective::OPS,
            _ => &super::NO_COLLECTIVE,
        };
        Tables { msg, tagged, rma, atomic, collective }
    }
}

/// Contexts in some state, a bit for each number.
#[derive(Debug, Default)]
struct Marks {
    transmit: u64,
    receive: u64,
}

impl Marks {
    fn of(&mut self, role: Role) -> &mut u64 {
        if role == Role::Transmit { &mut self.transmit } else { &mut self.receive }
    }
}

/// The contexts of an endpoint.
#[derive(Debug)]
pub(super) struct Contexts {
    transmit: u8,
    receive: u8,
    /// What those from 1 on report to: transmit and receive contexts of one number together.
    pub(super) more: Locked<Vec<Bindings>>,
    open: Locked<Marks>,
    enabled: Locked<Marks>,
    /// fi_enable was called for the scalable endpoint itself.
    begun: Locked<bool>,
}

impl Contexts {
    fn new(transmit: u8, receive: u8) -> Self {
        let more = (1..transmit.max(receive)).map(|_| Bindings::default()).collect();
        Self {
            transmit,
            receive,
            more: Locked::new(more),
            open: Locked::new(Marks::default()),
            enabled: Locked::new(Marks::default()),
            begun: Locked::new(false),
        }
    }

    /// Those of `fi_endpoint`. Errors: EINVAL for more than one of a kind.
    pub(super) fn ordinary(counts: (usize, usize)) -> Result<Self, i32> {
        let single = |count: usize| count <= 1 || count == FI_SHARED_CONTEXT;
        if !single(counts.0) || !single(counts.1) {
            log::warn(format_args!(
                "fi_endpoint refused: {} transmit and {} receive contexts are for fi_scalable_ep",
                counts.0, counts.1
            ));
            return Err(FI_EINVAL);
        }
        Ok(Self::new(1, 1))
    }

    /// Those of `fi_scalable_ep`. Errors: EINVAL for too many, and for shared ones.
    pub(super) fn scalable(counts: (usize, usize)) -> Result<Self, i32> {
        let number = |name: &str, count: usize| {
            u8::try_from(count.max(1)).ok().filter(|n| usize::from(*n) <= MAX_CONTEXTS).ok_or_else(
                || {
                    log::warn(format_args!(
                        "fi_scalable_ep refused: {name} {count}, offered 1 to {MAX_CONTEXTS}"
                    ));
                    FI_EINVAL
                },
            )
        };
        Ok(Self::new(
            number("ep_attr->tx_ctx_cnt", counts.0)?,
            number("ep_attr->rx_ctx_cnt", counts.1)?,
        ))
    }

    /// Whether there are contexts beyond number 0.
    #[inline]
    pub(super) fn are_several(&self) -> bool {
        self.transmit.max(self.receive) > 1
    }

    pub(super) fn transmit(&self) -> u8 {
        self.transmit
    }

    pub(super) fn receive(&self) -> u8 {
        self.receive
    }
}

/// `fi_scalable_ep`. Errors: as fi_endpoint, and EINVAL for too many contexts.
///
/// # Safety
/// As libfabric calls `fi_scalable_ep`.
pub(crate) unsafe fn open(
    domain: &Arc<Domain>,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: passed on.
    unsafe { super::open_as(Role::Scalable, domain, info, out, context) }
}

pub(super) unsafe extern "C" fn open_transmit(
    sep: *mut fid_ep,
    index: c_int,
    attr: *mut fi_tx_attr,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_tx_context", || {
        // SAFETY: a handle of ours; the application's attributes, if any.
        let (sep, attr) = unsafe { (endpoint(sep), attr.as_mut()) };
        let mut flags = sep.tx_flags.get();
        if let Some(attr) = attr {
            if attr.caps & !TX_CAPS & RX_CAPS != 0
                || attr.inject_size > INJECT_SIZE
                || attr.size > sep.shared.domain.config.tx_max
            {
                log::warn(format_args!(
                    "fi_tx_context refused: inject_size {}, size {}, offered at most {INJECT_SIZE}, {}",
                    attr.inject_size, attr.size, sep.shared.domain.config.tx_max
                ));
                return -FI_EINVAL;
            }
            flags = attr.op_flags;
            attr.caps = sep.shared.caps & TX_CAPS;
            (attr.mode, attr.msg_order, attr.comp_order) = (0, MSG_ORDER, 0);
            attr.inject_size = sep.shared.inject_size;
            attr.size = if attr.size == 0 { CONTEXT_SIZE } else { attr.size };
            (attr.iov_limit, attr.rma_iov_limit) = (IOV_LIMIT, RMA_IOV_LIMIT);
        }
        // SAFETY: passed on.
        code(unsafe { open_context(sep, Role::Transmit, index, (flags, 0), out, context) })
    })
}

pub(super) unsafe extern "C" fn open_receive(
    sep: *mut fid_ep,
    index: c_int,
    attr: *mut fi_rx_attr,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_rx_context", || {
        // SAFETY: a handle of ours; the application's attributes, if any.
        let (sep, attr) = unsafe { (endpoint(sep), attr.as_mut()) };
        let mut flags = sep.rx_flags.get();
        if let Some(attr) = attr {
            if attr.size > sep.shared.domain.config.rx_max {
                log::warn(format_args!(
                    "fi_rx_context refused: size {}, offered at most {}",
                    attr.size, sep.shared.domain.config.rx_max
                ));
                return -FI_EINVAL;
            }
            flags = attr.op_flags;
            attr.caps = sep.shared.caps & RX_CAPS;
            (attr.mode, attr.msg_order, attr.comp_order) = (0, MSG_ORDER, 0);
            attr.size = if attr.size == 0 { CONTEXT_SIZE } else { attr.size };
            (attr.total_buffered_recv, attr.iov_limit) = (0, IOV_LIMIT);
        }
        // SAFETY: passed on.
        code(unsafe { open_context(sep, Role::Receive, index, (0, flags), out, context) })
    })
}

/// Errors: EINVAL for a number that the endpoint does not have, or an endpoint that has none; EBUSY
/// for a context that is open.
///
/// # Safety
/// `out` is null or valid.
unsafe fn open_context(
    sep: &EndpointFid,
    role: Role,
    index: c_int,
    flags: (u64, u64),
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> Result<(), i32> {
    let contexts = &sep.shared.contexts;
    let count = if role == Role::Transmit { contexts.transmit } else { contexts.receive };
    let number = u8::try_from(index).ok().filter(|number| *number < count);
    let (Some(number), Role::Scalable, false) = (number, sep.role, out.is_null()) else {
        return Err(FI_EINVAL);
    };
    let guard = sep.shared.domain.lock.lock();
    // SAFETY: the guard is of the domain of the endpoint; one short step.
    let open = unsafe { contexts.open.get(&guard) }.of(role);
    if *open & (1 << number) != 0 {
        return Err(FI_EBUSY);
    }
    *open |= 1 << number;
    let (shared, family) = (sep.shared.clone(), Arc::new(()));
    // SAFETY: checked not to be null.
    unsafe { *out = handle(shared, role, number, flags, context, family, false) };
    Ok(())
}

impl Endpoint {
    /// Whether objects of this class, and these flags, belong to this kind of handle.
    pub(super) fn may_bind(&self, handle: &EndpointFid, class: usize, flags: u64) -> bool {
        let transmit = FI_SEND | FI_READ | FI_WRITE | FI_TRANSMIT | FI_SELECTIVE_COMPLETION;
        // What peers read and write is reported by receive context 0.
        let remote = if handle.context == 0 { FI_REMOTE_READ | FI_REMOTE_WRITE } else { 0 };
        let receive = FI_RECV | remote | FI_SELECTIVE_COMPLETION;
        let reports = matches!(class, FI_CLASS_CQ | FI_CLASS_CNTR);
        match handle.role {
            Role::Endpoint => true,
            Role::Scalable => matches!(class, FI_CLASS_AV | FI_CLASS_EQ),
            Role::Transmit => class == FI_CLASS_EQ || reports && flags & !transmit == 0,
            Role::Receive => class == FI_CLASS_EQ || reports && flags & !receive == 0,
        }
    }

    /// Whether it is too late to bind something to a handle.
    pub(super) fn is_enabled(&self, handle: &EndpointFid, guard: &Guard<'_>) -> bool {
        match handle.role {
            Role::Endpoint | Role::Scalable => self.engine(guard).is_some(),
            role => {
                // SAFETY: the guard is of the domain of the endpoint; one short step.
                *unsafe { self.contexts.enabled.get(guard) }.of(role) & (1 << handle.context) != 0
            }
        }
    }

    /// `fi_enable` of a scalable endpoint or of one of its contexts, in any order: the first of them
    /// opens the interface. Errors: as [`Endpoint::enable`].
    pub(super) fn enable_part(&self, handle: &EndpointFid) -> Result<(), i32> {
        let guard = self.domain.lock.lock();
        let bindings = self.bindings_of(handle.context, &guard);
        // SAFETY: the guard is of the domain of the endpoint; one short step.
        let begun = unsafe { self.contexts.begun.get(&guard) };
        let again = match handle.role {
            Role::Scalable => *begun,
            _ => self.is_enabled(handle, &guard),
        };
        if again {
            return Err(FI_EOPBADSTATE);
        }
        if self.bindings(&guard).av.is_none() {
            return Err(FI_ENOAV);
        }
        let (initiates, receives) = self.directions();
        let silent = match handle.role {
            Role::Transmit => initiates && !bindings.reports_initiated(),
            Role::Receive => receives && self.caps & FI_RMA == 0 && !bindings.reports_received(),
            _ => false,
        };
        if silent {
            return Err(FI_ENOCQ);
        }
        let wait_fd = match self.engine(&guard) {
            Some(engine) => engine.iface().wait_fd(),
            None => self.start(&guard)?,
        };
        if handle.role == Role::Scalable {
            *begun = true;
            return Ok(());
        }
        if bindings.waits(&guard) {
            self.enable_waiting(&guard);
        }
        bindings.attach(self, wait_fd, &guard)?;
        // SAFETY: as above.
        *unsafe { self.contexts.enabled.get(&guard) }.of(handle.role) |= 1 << handle.context;
        Ok(())
    }

    /// `fi_close` of a context. Receives that are posted are dropped. Operations under way get a
    /// bounded time to end: they use memory of the application. Errors: EBUSY if they do not.
    pub(super) fn close_context(&self, handle: &EndpointFid) -> Result<(), i32> {
        let deadline = Deadline::after_ms(LINGER_MS);
        let mut elsewhere = Elsewhere::after(now_ns());
        loop {
            let guard = self.domain.lock.lock();
            let idle = self.engine(&guard).is_none_or(|engine| match handle.role {
                Role::Transmit => engine.pending_of(handle.context) == 0,
                _ => engine.close_receives(handle.context),
            });
            // A forked child has nothing to finish on behalf of its parent.
            if idle || process::pid() != self.owner {
                self.unbind(handle, &guard);
                return Ok(());
            }
            if deadline.expired() {
                return Err(FI_EBUSY);
            }
            self.progress_quietly(&guard);
            drop(guard);
            process::yield_now();
            elsewhere.look(Some(&self.domain));
        }
    }

    /// A context reports to nobody any more.
    fn unbind(&self, handle: &EndpointFid, guard: &Guard<'_>) {
        // SAFETY: the guard is of the domain of the endpoint; one short step each.
        unsafe {
            *self.contexts.open.get(guard).of(handle.role) &= !(1 << handle.context);
            *self.contexts.enabled.get(guard).of(handle.role) &= !(1 << handle.context);
        }
        let half = self.bindings_of(handle.context, guard).take_half(handle.role);
        let fd = self.engine(guard).map(|engine| engine.iface().wait_fd());
        half.detach(self, fd, guard);
        let Some(fd) = fd else { return };
        // What others report to too stays attached; attaching twice does nothing.
        let mut attached = Ok(());
        for number in 0..self.contexts.transmit.max(self.contexts.receive) {
            let again = self.bindings_of(number, guard).attach(self, fd, guard);
            attached = attached.and(again);
        }
        // SAFETY: as above.
        for counter in unsafe { self.domain.state(guard) }.counters_of_regions() {
            let again = self.feed(&counter, guard);
            attached = attached.and(again);
        }
        if let Err(error) = attached {
            log::limited!(cause: error, "cannot watch a queue or counter any more: error {error}");
        }
    }
}

impl Bindings {
    /// Takes out what belongs to one direction.
    fn take_half(&mut self, role: Role) -> Self {
        let mut half = Self::default();
        if role == Role::Transmit {
            half.transmit = self.transmit.take();
            half.send_counter = self.send_counter.take();
            half.read_counter = self.read_counter.take();
            half.write_counter = self.write_counter.take();
        } else {
            half.receive = self.receive.take();
            half.receive_counter = self.receive_counter.take();
            half.remote_read_counter = self.remote_read_counter.take();
            half.remote_write_counter = self.remote_write_counter.take();
        }
        half
    }
}
