//! Enabling an endpoint and its contexts, and closing them.

use super::contexts::Role;
use super::page::PageRecord;
use super::state::{AllBindings, Bindings, Endpoint, EndpointFid};
use crate::ofi::elsewhere::Elsewhere;
use crate::ofi::lock::{Guard, Hold};
use crate::ofi::progress::{By, Progress};
use crate::protocol::{Engine, Limits};
use crate::sys::clock::{Waited, now_ns};
use crate::sys::process;
use crate::telemetry::{log, trace};
use crate::transport::Address;
use crate::transport::address::LocalHost;
use crate::transport::router::Router;
use libfabric_sys::{
    FI_ATOMIC, FI_EADDRINUSE, FI_EBUSY, FI_EINVAL, FI_ENOAV, FI_ENOCQ, FI_EOPBADSTATE,
    FI_HMEM_P2P_DISABLED, FI_RMA, FI_SOCKADDR_IN6,
};
use std::sync::Arc;

/// Bytes that one turn of progress moves of one long message.
const BULK_CHUNK: usize = 1 << 20;
/// One-sided operations of fewer bytes are carried out by the target's engine, not by direct RMA.
const ALONE_MIN: usize = 16 * 1024;
/// Messages of at least this fraction (1/4) of the last-level cache are stored with non-temporal stores.
const CACHE_PART: usize = 4;
/// The same threshold if the size of that cache is unknown, bytes.
const PAST_CACHES_MIN: usize = 8 << 20;
/// How long closing waits for messages that the application considers sent, nanoseconds.
const LINGER_NS: u64 = 1_000_000_000;
/// How long closing goes on while messages arrive, nanoseconds: enough for those that have arrived, but peers may keep
/// sending.
const DRAIN_NS: u64 = 100_000_000;
/// A longer pause between two looks counts as this one, nanoseconds.
const PAUSE_NS: u64 = 50_000_000;

impl Endpoint {
    /// Whether the endpoint or context of the handle is enabled, so that it is too late to bind.
    pub(super) fn is_enabled(&self, handle: &EndpointFid, guard: &Guard<'_>) -> bool {
        match handle.role {
            Role::Endpoint | Role::Scalable => self.engine(guard).is_some(),
            role => {
                // SAFETY: the guard belongs to the domain of the endpoint; one short step.
                unsafe { self.contexts.enabled.get(guard) }.has(role, handle.context)
            }
        }
    }

    /// `fi_enable`. Errors: ENOCQ, ENOAV; EOPBADSTATE if enabled already or without the shared context that
    /// was asked for; ENOKEY if the keys are in the address vectors and this vector has none; EADDRINUSE,
    /// EADDRNOTAVAIL, EMFILE, ENFILE, ENOMEM.
    pub(super) fn enable(&self) -> Result<(), i32> {
        let guard = self.domain.lock.control();
        if self.engine(&guard).is_some() {
            return Err(FI_EOPBADSTATE);
        }
        self.check_bindings(&guard)?;
        self.start(&guard)?;
        let bindings = self.bindings(&guard);
        if bindings.waits(&guard) {
            self.enable_waiting(&guard);
        }
        self.join_shared(bindings, &guard);
        // The call may be repeated.
        bindings.attach(self, &guard).inspect_err(|_| self.stop(&guard))
    }

    /// Errors: as [`Endpoint::enable`], for what is not bound.
    fn check_bindings(&self, guard: &Guard<'_>) -> Result<(), i32> {
        let bindings = self.bindings(guard);
        if bindings.av.is_none() {
            return Err(FI_ENOAV);
        }
        if self.initiates_in_silence(bindings) || self.receives_in_silence(bindings) {
            return Err(FI_ENOCQ);
        }
        self.check_shared(bindings, guard)
    }

    /// Whether the end of operations would be reported to nobody.
    fn initiates_in_silence(&self, bindings: &Bindings) -> bool {
        self.directions().0 && !bindings.reports_initiated()
    }

    /// Whether received messages would be reported to nobody. An endpoint for one-sided operations refuses receives
    /// then, but not those of a shared context.
    fn receives_in_silence(&self, bindings: &Bindings) -> bool {
        let refuses = self.caps & (FI_RMA | FI_ATOMIC) != 0 && !self.shares.1;
        self.directions().1 && !refuses && !bindings.reports_received()
    }

    /// Prepares the interface for threads that may sleep on a queue or counter of the endpoint.
    fn enable_waiting(&self, guard: &Guard<'_>) {
        if let Some(engine) = self.engine(guard) {
            engine.iface_mut().enable_waiting();
        }
    }

    /// Opens the interface, under the lock. After an error nothing is open.
    fn start(&self, guard: &Guard<'_>) -> Result<(), i32> {
        let config = &self.domain.config;
        let (key, source) = self.job_key(guard)?;
        let bind = match self.state(guard).bind {
            Some(address) => address,
            None => self.default_address()?,
        };
        let mut permitted = config.clone();
        permitted.shm.on &= self.state(guard).shm_permitted;
        permitted.net.rdma.gpus &= self.state(guard).p2p != FI_HMEM_P2P_DISABLED;
        let class = &mut permitted.net.rdma.traffic_class;
        *class = class.or(self.traffic_class);
        trace::open(config.trace.events);
        let router = Router::open(bind, &permitted, (key, source)).map_err(|e| {
            log::limited!(cause: e.0, "cannot open an endpoint at {bind}: {e}");
            if e.0 == libc::EADDRINUSE { FI_EADDRINUSE } else { e.0 }
        })?;
        if self.domain.thread().is_some() || self.bindings(guard).waits(guard) {
            // Threads will wait for it: without a descriptor this fails now, and may be tried again.
            router.wait_fd().map_err(|e| e.0)?;
        }
        let address = router.address();
        let config = &config.endpoint;
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
            traced: trace::is_on(),
        };
        // SAFETY: the guard belongs to this domain; no other reference to the engine exists in this step.
        unsafe { *self.engine.get(guard) = Some(Engine::new(router, limits)) };
        self.state(guard).page = PageRecord::open(address).map(Box::new);
        self.domain.enter(self, guard).inspect_err(|_| self.stop(guard))
    }

    fn default_address(&self) -> Result<Address, i32> {
        let v6 = (self.addr_format == FI_SOCKADDR_IN6).then_some(true);
        let interface = LocalHost::detect()
            .preferred(self.domain.config.endpoint.iface.as_deref(), v6)
            .ok_or(libfabric_sys::FI_EADDRNOTAVAIL)?;
        Ok(Address(interface.address(0)))
    }

    /// Leaves all lists and closes the interface. Messages that the application considers sent get a bounded
    /// time to leave.
    pub(super) fn shut_down(&self) {
        // A forked child has nothing to finish on behalf of its parent.
        let mine = self.owner.is_here();
        self.linger(|guard, waited| {
            // Messages that have arrived are answered, because a peer may wait for the answer.
            let takes = || {
                let is_landing = |engine: &mut Engine<Router>| engine.is_landing();
                self.take_all(guard) > 0 || self.engine(guard).is_some_and(is_landing)
            };
            let taken = mine && takes() && waited < DRAIN_NS;
            let unsent = self
                .engine(guard)
                .is_some_and(|engine| engine.has_unsent() || engine.iface().unacknowledged() > 0);
            let ends = !mine || !taken && !unsent || waited > LINGER_NS;
            ends.then(|| self.leave(guard))
        });
    }

    /// Calls `step` with the time waited so far, nanoseconds, until it has a result. Others hold the lock in between.
    fn linger<T>(&self, mut step: impl FnMut(&mut Hold<'_>, u64) -> Option<T>) -> T {
        let mut wait = Waited::from_now(PAUSE_NS);
        let mut elsewhere = Elsewhere::after(now_ns());
        loop {
            let mut guard = self.domain.lock.control();
            if let Some(result) = step(&mut guard, wait.look()) {
                return result;
            }
            drop(guard);
            process::yield_now();
            elsewhere.look(Some(&*self.domain));
        }
    }

    /// Receives from every transport at once. Returns how much moved.
    fn take_all(&self, guard: &Guard<'_>) -> usize {
        if let Some(engine) = self.engine(guard) {
            engine.iface_mut().hasten();
        }
        self.progress(By::Others, guard)
    }

    fn leave(&self, guard: &mut Hold<'_>) {
        self.stop(guard);
        *self.bindings.write(guard) = AllBindings::default();
    }

    /// Leaves all lists and closes the interface: the endpoint is as before `fi_enable`.
    fn stop(&self, guard: &Guard<'_>) {
        self.leave_shared(guard);
        for number in 0..self.contexts.count() {
            self.bindings_of(number, guard).detach(self, guard);
        }
        self.domain.leave(self, guard);
        if let Some(engine) = self.engine(guard) {
            log::info(format_args!(
                "endpoint {} closed: {:?}",
                engine.iface().address(),
                engine.counts()
            ));
        }
        self.show(guard);
        self.state(guard).page = None;
        // SAFETY: the guard belongs to this domain; the endpoint is in no list, so no other code reaches the engine.
        unsafe { *self.engine.get(guard) = None };
    }

    /// Errors: EOPBADSTATE without a shared context that was asked for; EINVAL if the endpoints of
    /// the shared receive context have another address vector.
    fn check_shared(&self, own: &Bindings, guard: &Guard<'_>) -> Result<(), i32> {
        let missing = [
            ("ep_attr->tx_ctx_cnt", self.shares.0 && own.shared_transmit.is_none()),
            ("ep_attr->rx_ctx_cnt", self.shares.1 && own.shared_receive.is_none()),
        ];
        if let Some((attribute, _)) = missing.iter().find(|(_, missing)| *missing) {
            log::warn(format_args!(
                "fi_enable refused: {attribute} is FI_SHARED_CONTEXT, and none is bound"
            ));
            return Err(FI_EOPBADSTATE);
        }
        let Some(shared) = &own.shared_receive else { return Ok(()) };
        let first = shared.state(guard).endpoints.first().copied();
        // SAFETY: an endpoint removes itself from the list before it is freed.
        let other = first.and_then(|first| unsafe { &*first }.bindings(guard).av.as_ref());
        match (other, &own.av) {
            (Some(other), Some(own)) if !Arc::ptr_eq(other, own) => {
                log::warn(format_args!(
                    "fi_enable refused: endpoints of a shared receive context have one address vector"
                ));
                Err(FI_EINVAL)
            }
            _ => Ok(()),
        }
    }

    /// Lets messages take receives of the shared context.
    fn join_shared(&self, own: &Bindings, guard: &Guard<'_>) {
        if let Some(shared) = &own.shared_receive {
            shared.state(guard).endpoints.push(self);
        }
    }

    /// Leaves the shared context. Receives that messages of this endpoint had taken end with ECANCELED.
    fn leave_shared(&self, guard: &Guard<'_>) {
        let Some(shared) = self.bindings(guard).shared_receive.clone() else { return };
        if let Some(engine) = self.engine(guard) {
            engine.abandon_receives(&mut self.host(guard));
        }
        shared.leave(self, guard);
    }

    /// `fi_enable` of a scalable endpoint or of one of its contexts, in any order: the first call opens the
    /// interface. Errors: as [`Endpoint::enable`].
    pub(super) fn enable_part(&self, handle: &EndpointFid) -> Result<(), i32> {
        let guard = self.domain.lock.control();
        let bindings = self.bindings_of(handle.context, &guard);
        // SAFETY: the guard belongs to the domain of the endpoint; one short step.
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
        let silent = match handle.role {
            Role::Transmit => self.initiates_in_silence(bindings),
            Role::Receive => self.receives_in_silence(bindings),
            _ => false,
        };
        if silent {
            return Err(FI_ENOCQ);
        }
        if self.engine(&guard).is_none() {
            self.start(&guard)?;
        }
        if handle.role == Role::Scalable {
            *begun = true;
            return Ok(());
        }
        if bindings.waits(&guard) {
            self.enable_waiting(&guard);
        }
        bindings.attach(self, &guard)?;
        // SAFETY: the guard belongs to the domain of the endpoint; one short step.
        unsafe { self.contexts.enabled.get(&guard) }.set(handle.role, handle.context, true);
        Ok(())
    }

    /// Whether a context or a group of the endpoint is open.
    pub(super) fn is_used(&self) -> bool {
        let guard = self.domain.lock.control();
        // SAFETY: the guard belongs to the domain of the endpoint; one short step.
        let contexts = unsafe { self.contexts.open.get(&guard) }.has_any();
        contexts || !self.state(&guard).groups.is_empty()
    }

    /// `fi_close` of a context. Operations under way use memory of the application, so they get a bounded time to end,
    /// and no receive is matched meanwhile. Then posted receives are dropped, and operations that wait for a counter. Errors: EBUSY, and nothing is dropped,
    /// if operations do not end.
    pub(super) fn close_context(&self, handle: &EndpointFid) -> Result<(), i32> {
        let own = (handle.context, handle.role == Role::Receive);
        self.linger(|guard, waited| {
            let idle = self.engine(guard).is_none_or(|engine| match handle.role {
                Role::Transmit => engine.pending_of(handle.context) == 0,
                _ => engine.close_receives(handle.context),
            });
            // A forked child has nothing to finish on behalf of its parent.
            if idle || !self.owner.is_here() {
                self.domain.triggers.forget_context(self, own, guard);
                self.unbind(handle, guard);
                return Some(Ok(()));
            }
            if waited > LINGER_NS {
                if let Some(engine) = self.engine(guard).filter(|_| own.1) {
                    engine.reopen_receives(handle.context, &mut self.host(guard));
                    self.end_call(guard);
                }
                return Some(Err(FI_EBUSY));
            }
            self.progress(By::Others, guard);
            None
        })
    }

    /// Removes the bindings of a context.
    fn unbind(&self, handle: &EndpointFid, guard: &mut Hold<'_>) {
        // SAFETY: the guard belongs to the domain of the endpoint; one short step each.
        unsafe {
            self.contexts.open.get(guard).set(handle.role, handle.context, false);
            self.contexts.enabled.get(guard).set(handle.role, handle.context, false);
        }
        if handle.role == Role::Receive {
            self.state(guard).own_min_multi_recv.remove(&handle.context);
        }
        let half = self.change_bindings(handle.context, guard).take_half(handle.role);
        half.detach(self, guard);
        if self.engine(guard).is_none() {
            return;
        }
        // Objects to which other contexts report stay attached; attaching twice does nothing.
        let mut attached = self.domain.feed_all(self, guard);
        for number in 0..self.contexts.count() {
            let again = self.bindings_of(number, guard).attach(self, guard);
            attached = attached.and(again);
        }
        if let Err(error) = attached {
            log::limited!(cause: error, "cannot watch a queue or counter any more: error {error}");
        }
    }
}
