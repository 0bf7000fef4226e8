//! An endpoint and the objects that it reports to, and the contexts that endpoints share.

use super::contexts::{Contexts, Role};
use super::page::PageRecord;
use crate::memory::atomic::MAX_BYTES;
use crate::memory::keys::Right;
use crate::ofi::av::AddressVector;
use crate::ofi::cntr::Counter;
use crate::ofi::cq::CompletionQueue;
use crate::ofi::domain::Domain;
use crate::ofi::eq::EventQueue;
use crate::ofi::keys::DomainKey;
use crate::ofi::lock::{Guard, Hold, Locked, ReadMostly};
use crate::ofi::source::Source;
use crate::ofi::table::Slack;
use crate::protocol::{Engine, Receives};
use crate::sys::process::Home;
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::JobKey;
use crate::transport::job_key;
use crate::transport::router::Router;
use libfabric_sys::{
    FI_ATOMIC, FI_COLLECTIVE, FI_ENOAV, FI_ENOKEY, FI_HMEM_P2P_ENABLED, FI_MSG, FI_READ, FI_RECV,
    FI_REMOTE_READ, FI_REMOTE_WRITE, FI_RMA, FI_SEND, FI_TAGGED, FI_WRITE, fi_addr_t, fid_ep,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Free bytes below which a multi-receive buffer is released, unless FI_OPT_MIN_MULTI_RECV is set.
pub(super) const DEFAULT_MIN_MULTI_RECV: usize = 64;

/// The completion queue of one direction.
#[derive(Clone, Debug)]
pub(super) struct QueueBinding {
    pub(super) queue: Arc<CompletionQueue>,
    /// FI_SELECTIVE_COMPLETION: only operations with FI_COMPLETION get an entry.
    pub(super) selective: bool,
}

/// The objects that an endpoint reports to. Once it is enabled, only counters are added.
#[derive(Debug, Default)]
pub(super) struct Bindings {
    pub(super) transmit: Option<QueueBinding>,
    pub(super) receive: Option<QueueBinding>,
    pub(super) send_counter: Option<Arc<Counter>>,
    pub(super) receive_counter: Option<Arc<Counter>>,
    pub(super) read_counter: Option<Arc<Counter>>,
    pub(super) write_counter: Option<Arc<Counter>>,
    pub(super) remote_read_counter: Option<Arc<Counter>>,
    pub(super) remote_write_counter: Option<Arc<Counter>>,
    pub(super) shared_transmit: Option<Arc<SharedTransmit>>,
    pub(super) shared_receive: Option<Arc<SharedReceive>>,
    pub(super) av: Option<Arc<AddressVector>>,
    pub(super) eq: Option<Arc<EventQueue>>,
}

/// The bindings of all contexts of an endpoint.
#[derive(Debug, Default)]
pub(super) struct AllBindings {
    /// Those of context 0, which is the only one of an ordinary endpoint.
    pub(super) first: Bindings,
    /// Those of the other contexts of a scalable endpoint; transmit and receive context of one number together.
    pub(super) more: Vec<Bindings>,
}

/// The part of a shared transmit context that endpoints share.
#[derive(Debug)]
pub(super) struct SharedTransmit {
    pub(super) domain: Arc<Domain>,
}

/// The part of a shared receive context that endpoints share.
#[derive(Debug)]
pub(super) struct SharedReceive {
    pub(super) domain: Arc<Domain>,
    pub(super) state: Locked<ReceiveState>,
    /// FI_DIRECTED_RECV was asked for.
    pub(super) directed: bool,
}

/// State under the domain's lock.
#[derive(Debug)]
pub(super) struct ReceiveState {
    pub(super) receives: Receives,
    /// Enabled endpoints; each removes itself before it is freed.
    pub(super) endpoints: Vec<*const Endpoint>,
    pub(super) min_multi_recv: usize,
    /// Peers that have departed, from which receives may wait.
    pub(super) lost: BTreeSet<u64>,
    /// Those receives are being ended.
    pub(super) ends_lost: bool,
}

/// The progress thread, among the waiters that sleep on an endpoint.
pub(super) const THREAD: u32 = 1 << 31;
/// No waiter, but something else for `rouse` to look at, which so costs other calls nothing: [`ReceiveState::lost`].
pub(super) const LOST_PEER: u32 = 1 << 30;
/// The number of the other waiters.
pub(super) const WAITERS: u32 = LOST_PEER - 1;

/// State under the domain's lock.
#[derive(Debug)]
pub(super) struct EndpointState {
    /// The peer of each `fi_addr`, plus one; 0: not connected yet.
    pub(super) routes: Vec<u32>,
    /// The count of the address vector's removals for which `routes` is valid.
    pub(super) removals: u64,
    /// FI_OPT_MIN_MULTI_RECV, and that of the receive contexts for which it was set.
    pub(super) min_multi_recv: usize,
    pub(super) own_min_multi_recv: BTreeMap<u8, usize>,
    pub(super) max_msg_size: usize,
    pub(super) max_tagged_size: usize,
    pub(super) max_rma_size: usize,
    pub(super) inject_msg_size: usize,
    pub(super) inject_tagged_size: usize,
    /// FI_OPT_INJECT_RMA_SIZE, if the application has set it: see `options::inject_rma_size`.
    pub(super) inject_rma_size: Option<usize>,
    pub(super) inject_atomic_size: usize,
    /// FI_OPT_SHARED_MEMORY_PERMITTED.
    pub(super) shm_permitted: bool,
    /// FI_OPT_FI_HMEM_P2P.
    pub(super) p2p: c_int,
    pub(super) max_atomic_size: usize,
    pub(super) bind: Option<Address>,
    /// Number of waiters that sleep on this endpoint ([`WAITERS`]), [`THREAD`] if the progress thread does, [`LOST_PEER`].
    pub(super) asleep: u32,
    /// The application has polled since the progress thread last checked.
    pub(super) polled: bool,
    /// What other processes see of the endpoint, from when it is enabled until it is closed.
    pub(super) page: Option<Box<PageRecord>>,
    /// The collective groups of the endpoint.
    pub(super) groups: Vec<Membership>,
}

/// A collective group that an endpoint has joined, or is joining.
#[derive(Debug)]
pub(super) struct Membership {
    pub(super) group: u64,
    pub(super) members: Vec<fi_addr_t>,
    /// The handle and the context of the join, until the join is over.
    pub(super) joining: Option<(usize, usize)>,
}

/// The shared part of an endpoint and of its aliases.
#[derive(Debug)]
pub(in crate::ofi) struct Endpoint {
    pub(in crate::ofi) domain: Arc<Domain>,
    pub(super) addr_format: u32,
    pub(super) bindings: ReadMostly<AllBindings>,
    pub(super) contexts: Contexts,
    /// Whether FI_SHARED_CONTEXT was asked for, for transmit and for receive.
    pub(super) shares: (bool, bool),
    pub(super) engine: Locked<Option<Engine<Router>>>,
    pub(super) state: Locked<EndpointState>,
    pub(super) inject_size: usize,
    /// The traffic class of packets of RDMA devices, if `tx_attr->tclass` is one of FI_TC_DSCP.
    pub(super) traffic_class: Option<u8>,
    /// The key that the application gave with the endpoint.
    pub(super) own_key: Option<JobKey>,
    /// FI_DIRECTED_RECV was asked for: `src_addr` of receives counts.
    pub(super) directed: bool,
    /// FI_SOURCE was asked for: completions tell the sender.
    pub(super) source: bool,
    /// FI_TRIGGER was asked for: operations may wait for counters.
    pub(super) triggers: bool,
    pub(super) caps: u64,
    pub(super) owner: Home,
}

/// One handle of an endpoint.
#[repr(C)]
pub(in crate::ofi) struct EndpointFid {
    pub(super) fid: fid_ep,
    pub(super) slack: Slack,
    pub(in crate::ofi) shared: Arc<Endpoint>,
    /// Default flags of operations through this handle. Control calls change them without the lock.
    pub(super) tx_flags: AtomicU64,
    pub(super) rx_flags: AtomicU64,
    pub(super) role: Role,
    /// The number of the context that operations through this handle belong to.
    pub(super) context: u8,
    /// Shared by a handle and its aliases.
    pub(super) family: Arc<()>,
    pub(super) alias: bool,
}

/// The endpoint behind a handle.
///
/// # Safety
/// `ep` came from `fi_endpoint` or a similar call and is not closed.
#[inline]
pub(in crate::ofi) unsafe fn endpoint<'a>(ep: *mut fid_ep) -> &'a EndpointFid {
    // SAFETY: the caller vouches.
    unsafe { &*ep.cast::<EndpointFid>() }
}

impl Endpoint {
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(super) fn state<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut EndpointState {
        // SAFETY: guards passed here belong to this endpoint's domain; each caller uses the result for
        // one step that reaches nothing else.
        unsafe { self.state.get(guard) }
    }

    #[inline]
    pub(super) fn bindings<'g>(&'g self, guard: &'g Guard<'_>) -> &'g Bindings {
        &self.bindings.read(guard).first
    }

    /// The objects that a transmit or receive context reports to.
    #[inline]
    pub(super) fn bindings_of<'g>(&'g self, context: u8, guard: &'g Guard<'_>) -> &'g Bindings {
        if context > 0 {
            return self.bindings_beyond(context, guard);
        }
        self.bindings(guard)
    }

    #[inline(never)]
    pub(super) fn bindings_beyond<'g>(&'g self, context: u8, guard: &'g Guard<'_>) -> &'g Bindings {
        let all = self.bindings.read(guard);
        all.more.get(usize::from(context).wrapping_sub(1)).unwrap_or(&all.first)
    }

    /// The same, to change it.
    pub(super) fn change_bindings<'g>(
        &'g self,
        context: u8,
        hold: &'g mut Hold<'_>,
    ) -> &'g mut Bindings {
        let all = self.bindings.write(hold);
        all.more.get_mut(usize::from(context).wrapping_sub(1)).unwrap_or(&mut all.first)
    }

    /// The engine, once enabled. While the engine is borrowed it calls only its host, which accesses queues,
    /// counters and the address vector, never this cell.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(in crate::ofi) fn engine<'g>(
        &'g self,
        guard: &'g Guard<'_>,
    ) -> Option<&'g mut Engine<Router>> {
        // SAFETY: the guard belongs to this endpoint's domain, and the engine's host never reaches this cell.
        unsafe { self.engine.get(guard) }.as_mut()
    }

    /// Whether the endpoint may start such an access to peers' memory. FI_RMA or FI_ATOMIC without a direction
    /// allows all directions.
    pub(super) fn may(&self, right: Right) -> bool {
        self.has_directions(right, FI_READ, FI_WRITE, FI_READ | FI_WRITE)
    }

    /// Whether peers may make such an access through the endpoint.
    pub(super) fn lets(&self, right: Right) -> bool {
        let all = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        self.has_directions(right, FI_REMOTE_READ, FI_REMOTE_WRITE, all)
    }

    /// Without any of `named`, all directions are allowed.
    fn has_directions(&self, right: Right, read: u64, write: u64, named: u64) -> bool {
        let primary = if right.is_atomic() { FI_ATOMIC } else { FI_RMA };
        let wanted = if right.reads() { read } else { 0 } | if right.writes() { write } else { 0 };
        self.caps & primary != 0 && (self.caps & wanted == wanted || self.caps & named == 0)
    }

    /// Whether it can start operations that complete, and whether it can receive messages.
    pub(super) fn directions(&self) -> (bool, bool) {
        let messages = self.caps & (FI_MSG | FI_TAGGED) != 0;
        let both = self.caps & (FI_SEND | FI_RECV) == 0;
        let sends = messages && (both || self.caps & FI_SEND != 0);
        let receives = messages && (both || self.caps & FI_RECV != 0);
        let collects = self.caps & FI_COLLECTIVE != 0;
        let all = [Right::Read, Right::Write, Right::Update, Right::Fetch];
        (sends || collects || all.into_iter().any(|right| self.may(right)), receives)
    }

    /// The endpoint's job key, and where it comes from.
    /// Errors: ENOKEY if the keys are in the address vectors and this vector has none.
    pub(super) fn job_key(&self, guard: &Guard<'_>) -> Result<(JobKey, job_key::Source), i32> {
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
        Ok((given, job_key::Source::AuthKey))
    }

    /// The job key that the application gave the endpoint, if any.
    pub(super) fn given_key(&self, guard: &Guard<'_>) -> Option<JobKey> {
        let (key, source) = self.job_key(guard).ok()?;
        (source == job_key::Source::AuthKey).then_some(key)
    }
}

impl EndpointState {
    /// The state of a newly opened endpoint, with this limit for injected messages, and at this address if any.
    pub(super) fn new(inject_size: usize, bind: Option<Address>) -> Self {
        Self {
            routes: Vec::new(),
            removals: 0,
            min_multi_recv: DEFAULT_MIN_MULTI_RECV,
            own_min_multi_recv: BTreeMap::new(),
            max_msg_size: usize::MAX,
            max_tagged_size: usize::MAX,
            max_rma_size: usize::MAX,
            inject_msg_size: inject_size,
            inject_tagged_size: inject_size,
            inject_rma_size: None,
            inject_atomic_size: inject_size,
            shm_permitted: true,
            p2p: FI_HMEM_P2P_ENABLED,
            max_atomic_size: MAX_BYTES,
            bind,
            asleep: 0,
            polled: false,
            page: None,
            groups: Vec::new(),
        }
    }

    /// FI_OPT_MIN_MULTI_RECV of a receive context.
    pub(super) fn min_multi_recv_of(&self, number: u8) -> usize {
        self.own_min_multi_recv.get(&number).copied().unwrap_or(self.min_multi_recv)
    }
}

impl SharedReceive {
    #[allow(clippy::mut_from_ref)]
    pub(super) fn state<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut ReceiveState {
        // SAFETY: guards passed here belong to this context's domain; each caller uses the result for
        // one step that reaches nothing else.
        unsafe { self.state.get(guard) }
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

    /// Whether received messages are reported. An endpoint for one-sided operations needs no such report:
    /// it then refuses receives.
    pub(super) fn reports_received(&self) -> bool {
        self.receive.is_some() || self.receive_counter.is_some()
    }

    /// Whether the end of operations that the application starts is reported.
    pub(super) fn reports_initiated(&self) -> bool {
        self.transmit.is_some() || self.initiating_counters().next().is_some()
    }

    /// The sources of the queues and counters; each must be used before the next one is taken.
    fn sources<'g>(&'g self, guard: &'g Guard<'_>) -> impl Iterator<Item = &'g mut Source> {
        let queues = self.queues().map(|queue| queue.source(guard));
        queues.chain(self.counters().map(|counter| counter.source(guard)))
    }

    /// Whether a thread may sleep on the endpoint.
    pub(super) fn waits(&self, guard: &Guard<'_>) -> bool {
        self.sources(guard).any(|source| source.waiter.is_some())
    }

    pub(super) fn attach(&self, ep: &Endpoint, guard: &Guard<'_>) -> Result<(), i32> {
        self.sources(guard).try_for_each(|source| source.attach(ep, guard))
    }

    pub(super) fn detach(&self, ep: &Endpoint, guard: &Guard<'_>) {
        self.sources(guard).for_each(|source| source.detach(ep, guard));
    }

    /// Takes out the bindings of one direction.
    pub(super) fn take_half(&mut self, role: Role) -> Self {
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
