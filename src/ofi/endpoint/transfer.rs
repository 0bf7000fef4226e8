//! The data calls: they check arguments, translate flags, and call the protocol engine.

use super::contexts::Role;
use super::kept::Kept;
use super::state::{Endpoint, EndpointFid, EndpointState, endpoint};
use crate::memory::{Buffers, OwnedBuffer, Segment, SegmentList};
use crate::ofi::av::NO_SUCH_ADDRESS;
use crate::ofi::cntr;
use crate::ofi::guard::entry;
use crate::ofi::lock::Guard;
use crate::ofi::progress::{By, Progress};
use crate::ofi::trigger::{Account, Action, Cancel, Kind, Owner};
use crate::protocol::{
    ANY_SOURCE, Direction, Engine, Host, OpError, PeekAction, ReceiveOp, Report, SendOp,
};
use crate::transport::PeerId;
use crate::transport::router::Router;
use libfabric_sys::{
    FI_ADDR_NOTAVAIL, FI_ADDR_UNSPEC, FI_AUTH_KEY, FI_CLAIM, FI_COMMIT_COMPLETE, FI_COMPLETION,
    FI_DELIVERY_COMPLETE, FI_DISCARD, FI_EAGAIN, FI_EINVAL, FI_EIO, FI_EMSGSIZE, FI_ENOCQ,
    FI_ENOENT, FI_ENOSYS, FI_EOPBADSTATE, FI_EOPNOTSUPP, FI_FENCE, FI_INJECT, FI_MATCH_COMPLETE,
    FI_MULTI_RECV, FI_MULTICAST, FI_PEEK, FI_REMOTE_CQ_DATA, FI_TRANSMIT_COMPLETE, FI_TRIGGER,
    FI_TRIGGER_THRESHOLD, fi_addr_t, fi_msg, fi_msg_tagged, fi_triggered_context, fid_ep, fid_t,
};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whether a message is tagged, and its tag.
#[derive(Clone, Copy)]
pub(super) struct Tagging {
    pub(super) tagged: bool,
    pub(super) tag: u64,
    pub(super) ignore: u64,
}

impl Tagging {
    /// A plain message: no tag is matched.
    pub(super) const PLAIN: Self = Self { tagged: false, tag: 0, ignore: u64::MAX };

    #[inline]
    pub(super) const fn tagged(tag: u64, ignore: u64) -> Self {
        Self { tagged: true, tag, ignore }
    }

    /// For a plain message that a structure describes.
    #[inline]
    pub(super) const fn plain(_: &fi_msg) -> Self {
        Self::PLAIN
    }

    /// For the receive of a tagged message that a structure describes.
    #[inline]
    pub(super) const fn wanted(m: &fi_msg_tagged) -> Self {
        Self::tagged(m.tag, m.ignore)
    }

    /// For the send of a tagged message that a structure describes.
    #[inline]
    pub(super) const fn sent(m: &fi_msg_tagged) -> Self {
        Self::tagged(m.tag, 0)
    }
}

/// Which flags an operation has.
#[derive(Clone, Copy)]
pub(super) enum Flags {
    /// The endpoint's default flags (fi_send and similar calls).
    Default,
    /// The flags of the call (fi_sendmsg and similar calls).
    Call(u64),
    /// fi_inject and similar calls: the data is copied, and there is no completion entry.
    Inject,
}

/// One contiguous buffer.
///
/// # Safety
/// The application lends `len` bytes at `buf` until the operation completes.
#[inline(always)]
pub(super) unsafe fn segment(buf: *const c_void, len: usize) -> Result<Segment, i32> {
    if buf.is_null() {
        return no_memory(len);
    }
    // SAFETY: the caller vouches.
    Ok(unsafe { Segment::new(buf.cast(), len) })
}

#[cold]
fn no_memory(len: usize) -> Result<Segment, i32> {
    if len == 0 { Ok(Segment::default()) } else { Err(FI_EINVAL) }
}

/// The same as a list.
///
/// # Safety
/// As [`segment`].
#[inline]
pub(super) unsafe fn buffer(buf: *const c_void, len: usize) -> Result<SegmentList, i32> {
    // SAFETY: the caller vouches.
    unsafe { segment(buf, len) }.map(SegmentList::from)
}

/// A vector of buffers. Errors: EINVAL for more than four.
///
/// # Safety
/// `iov` has `count` elements; the application lends each until the operation completes.
pub(super) unsafe fn vector(iov: *const libc::iovec, count: usize) -> Result<SegmentList, i32> {
    if iov.is_null() && count > 0 {
        return Err(FI_EINVAL);
    }
    let mut list = SegmentList::EMPTY;
    for i in 0..count {
        // SAFETY: the caller vouches for `count` elements, and for each buffer.
        let one = unsafe {
            let iov = &*iov.add(i);
            segment(iov.iov_base, iov.iov_len)?
        };
        list.set(i, one).ok_or(FI_EINVAL)?;
    }
    Ok(list)
}

impl Flags {
    /// The flags of a send or one-sided operation, and whether the call is fi_inject or a
    /// similar one.
    #[inline]
    pub(super) fn of_transmit(self, handle: &EndpointFid) -> (u64, bool) {
        match self {
            Self::Default => (handle.tx_flags.load(Ordering::Relaxed) & !FI_REMOTE_CQ_DATA, false),
            Self::Call(flags) => (flags, false),
            Self::Inject => (FI_INJECT, true),
        }
    }

    /// The flags of a receive, where these are the defaults. No default are flags that go with a single call, and
    /// FI_MULTI_RECV for a tagged one.
    #[inline(always)]
    pub(super) fn of_receive(self, defaults: &AtomicU64, tagging: Tagging) -> u64 {
        let never =
            FI_PEEK | FI_CLAIM | FI_DISCARD | if tagging.tagged { FI_MULTI_RECV } else { 0 };
        match self {
            Self::Call(flags) => flags,
            _ => defaults.load(Ordering::Relaxed) & !never,
        }
    }
}

impl EndpointState {
    /// Whether a message is short enough.
    #[inline(always)]
    fn takes(&self, tagged: bool, len: usize, inject: bool) -> bool {
        let (max, inject_max) = match tagged {
            true => (self.max_tagged_size, self.inject_tagged_size),
            false => (self.max_msg_size, self.inject_msg_size),
        };
        len <= max && (!inject || len <= inject_max)
    }
}

impl EndpointFid {
    /// Where the completion of such an operation is reported.
    #[inline]
    pub(super) fn report(&self, op_flags: u64, inject_call: bool, guard: &Guard<'_>) -> Report {
        self.shared.report(self.context, op_flags, inject_call, guard)
    }
}

impl Endpoint {
    /// The same for an operation of transmit context `number`.
    #[inline(always)]
    fn report(&self, number: u8, op_flags: u64, inject_call: bool, guard: &Guard<'_>) -> Report {
        let bindings = self.bindings_of(number, guard);
        let selective = bindings.transmit.as_ref().is_some_and(|b| b.selective);
        let entry = !inject_call && (!selective || op_flags & FI_COMPLETION != 0);
        Report::new(entry, number)
    }
}

#[inline]
pub(super) fn result(outcome: Result<(), i32>) -> isize {
    match outcome {
        Ok(()) => 0,
        Err(error) => -(error as isize),
    }
}

impl Endpoint {
    /// The peer that `fi_addr` names, connected now if it is not yet.
    #[inline]
    pub(super) fn peer(&self, fi_addr: fi_addr_t, guard: &Guard<'_>) -> Result<PeerId, OpError> {
        self.destination(fi_addr, guard).map(|(peer, _)| peer)
    }

    /// The same, and the number of its receive context.
    #[inline]
    pub(super) fn destination(
        &self,
        fi_addr: fi_addr_t,
        guard: &Guard<'_>,
    ) -> Result<(PeerId, u8), OpError> {
        let invalid = OpError::Error(NO_SUCH_ADDRESS);
        let av = self.bindings(guard).av.as_ref().ok_or(invalid)?;
        av.follow(guard);
        // SAFETY: the guard belongs to the domain of vector and endpoint; one short step.
        let removals = unsafe { av.state.get(guard) }.removals();
        let state = self.state(guard);
        if state.removals != removals {
            state.removals = removals;
            state.routes.clear();
        }
        let index = usize::try_from(fi_addr).map_err(|_| invalid)?;
        match state.routes.get(index) {
            Some(known) if *known > 0 => Ok((PeerId(*known - 1), 0)),
            _ => self.named_context(fi_addr, guard),
        }
    }

    /// Resolves an address that names a receive context (fi_rx_addr), or one that is used for the first time.
    #[cold]
    fn named_context(
        &self,
        fi_addr: fi_addr_t,
        guard: &Guard<'_>,
    ) -> Result<(PeerId, u8), OpError> {
        let invalid = OpError::Error(NO_SUCH_ADDRESS);
        let av = self.bindings(guard).av.as_ref().ok_or(invalid)?;
        // SAFETY: the guard belongs to the domain of vector and endpoint; one short step.
        let (base, rx) = unsafe { av.state.get(guard) }.split(fi_addr);
        let index = usize::try_from(base).map_err(|_| invalid)?;
        match self.state(guard).routes.get(index) {
            Some(known) if *known > 0 => Ok((PeerId(*known - 1), rx)),
            _ => self.meet(base, index, guard).map(|peer| (peer, rx)),
        }
    }

    #[cold]
    fn meet(&self, fi_addr: fi_addr_t, index: usize, guard: &Guard<'_>) -> Result<PeerId, OpError> {
        let invalid = OpError::Error(NO_SUCH_ADDRESS);
        let av = self.bindings(guard).av.as_ref().ok_or(invalid)?;
        // SAFETY: the guard belongs to the domain of vector and endpoint; one short step.
        let address = unsafe { av.state.get(guard) }.address(fi_addr).ok_or(invalid)?;
        let engine = self.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        let peer = engine.connect(&address)?;
        self.host(guard).met(peer, &address);
        let routes = &mut self.state(guard).routes;
        if routes.len() <= index {
            routes.resize(index + 1, 0);
        }
        if let Some(slot) = routes.get_mut(index) {
            *slot = peer.0 + 1;
        }
        Ok(peer)
    }
}

/// Flags with which a send has to wait, or reports more than that its bytes have left.
const UNUSUAL_TX: u64 =
    FI_TRIGGER | FI_DELIVERY_COMPLETE | FI_MATCH_COMPLETE | FI_FENCE | NOT_OFFERED;
/// Flags that change where an operation goes, or what its end means, and that are not offered. All others that have no
/// meaning for a call are hints.
const NOT_OFFERED: u64 = FI_MULTICAST | FI_COMMIT_COMPLETE;
/// Flags with which a receive waits for a counter, takes several messages, or looks for one that has arrived.
const UNUSUAL_RX: u64 = FI_TRIGGER | FI_MULTI_RECV | FI_AUTH_KEY | FI_PEEK | FI_CLAIM | FI_DISCARD;

/// Errors: EOPNOTSUPP for flags of a send or one-sided operation that are not offered.
#[inline]
pub(super) fn check_flags(op_flags: u64) -> Result<(), i32> {
    if op_flags & NOT_OFFERED == 0 { Ok(()) } else { Err(FI_EOPNOTSUPP) }
}

/// Sends, in any form of the call.
#[inline(always)]
pub(super) fn send<B: Buffers>(
    handle: &EndpointFid,
    payload: Result<B, i32>,
    tagging: Tagging,
    data: Option<u64>,
    dest: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> isize {
    let payload = match payload {
        Ok(payload) => payload,
        Err(error) => return -(error as isize),
    };
    let (ep, number) = (&*handle.shared, handle.context);
    let guard = ep.domain.lock.lock();
    let (op_flags, inject_call) = flags.of_transmit(handle);
    let inject = op_flags & FI_INJECT != 0;
    let report = ep.report(number, op_flags, inject_call, &guard);
    let account = Account { context: context.expose_provenance() as u64, report };
    let transmitted = op_flags & FI_TRANSMIT_COMPLETE != 0;
    let (delivery, fence) = (false, false);
    let sending = Sending { payload, tagging, data, dest, inject, delivery, transmitted, fence };
    if op_flags & UNUSUAL_TX == 0 && sending.try_start(ep, &guard, account) {
        // An operation that is already complete may have raised a counter.
        ep.domain.triggers.run_due(&guard);
        return 0;
    }
    result(sending.listed().go_on(ep, &guard, account, op_flags))
}

/// A send.
#[derive(Clone, Copy)]
pub(super) struct Sending<B = SegmentList> {
    payload: B,
    tagging: Tagging,
    data: Option<u64>,
    dest: fi_addr_t,
    inject: bool,
    delivery: bool,
    transmitted: bool,
    fence: bool,
}

impl<B: Buffers> Sending<B> {
    #[inline(always)]
    fn listed(&self) -> Sending {
        let Self { payload, tagging, data, dest, inject, delivery, transmitted, fence } = *self;
        let payload = payload.list();
        Sending { payload, tagging, data, dest, inject, delivery, transmitted, fence }
    }

    #[inline(always)]
    fn op(&self, (peer, rx): (PeerId, u8), account: Account) -> SendOp<B> {
        SendOp {
            peer,
            rx,
            payload: self.payload,
            tagged: self.tagging.tagged,
            tag: self.tagging.tag,
            data: self.data,
            context: account.context,
            report: account.report,
            inject: self.inject,
            delivery: self.delivery,
            transmitted: self.transmitted,
            fence: self.fence,
        }
    }

    /// See [`crate::protocol::Engine::try_send`].
    #[inline(always)]
    fn try_start(&self, ep: &Endpoint, guard: &Guard<'_>, account: Account) -> bool {
        if !ep.state(guard).takes(self.tagging.tagged, self.payload.len(), self.inject) {
            return false;
        }
        let Ok(destination) = ep.destination(self.dest, guard) else { return false };
        let Some(engine) = ep.engine(guard) else { return false };
        engine.try_send(&self.op(destination, account), &mut ep.host(guard))
    }
}

impl Sending {
    /// Checks a send with these flags. Errors: EMSGSIZE, EOPNOTSUPP.
    pub(super) fn check(
        ep: &Endpoint,
        payload: SegmentList,
        tagging: Tagging,
        data: Option<u64>,
        dest: fi_addr_t,
        op_flags: u64,
        guard: &Guard<'_>,
    ) -> Result<Self, i32> {
        check_flags(op_flags)?;
        let inject = op_flags & FI_INJECT != 0;
        if !ep.state(guard).takes(tagging.tagged, payload.len(), inject) {
            return Err(FI_EMSGSIZE);
        }
        let delivery = op_flags & (FI_DELIVERY_COMPLETE | FI_MATCH_COMPLETE) != 0;
        let transmitted = op_flags & FI_TRANSMIT_COMPLETE != 0;
        let fence = op_flags & FI_FENCE != 0;
        Ok(Self { payload, tagging, data, dest, inject, delivery, transmitted, fence })
    }

    /// The general case, which [`Sending::try_start`] leaves: unusual flags, or no room.
    #[inline(never)]
    fn go_on(
        &self,
        ep: &Endpoint,
        guard: &Guard<'_>,
        account: Account,
        op_flags: u64,
    ) -> Result<(), i32> {
        let Self { payload, tagging, data, dest, .. } = *self;
        let sending = Self::check(ep, payload, tagging, data, dest, op_flags, guard)?;
        if op_flags & FI_TRIGGER != 0 {
            let context = std::ptr::with_exposed_provenance_mut(account.context as usize);
            let (kind, report) = (sending.kind(), account.report);
            // SAFETY: under FI_TRIGGER the context is a `fi_triggered_context` (fi_trigger.3).
            return unsafe { trigger(ep, kind, context, report, sending.starter(), guard) };
        }
        persist(ep, guard, |guard: &Guard<'_>| sending.start(ep, guard, account))
    }

    pub(super) fn start(
        &self,
        ep: &Endpoint,
        guard: &Guard<'_>,
        account: Account,
    ) -> Result<(), OpError> {
        let destination = ep.destination(self.dest, guard)?;
        let engine = ep.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        if self.payload.is_on_device()
            && (self.inject || !engine.reads_later(destination.0, &self.payload))
        {
            // The message is sent from a copy, as an injected one.
            let copy = OwnedBuffer::try_copy_of(&self.payload).ok_or(OpError::Error(FI_EIO))?;
            return Self { payload: copy.segments(), inject: true, ..*self }
                .start(ep, guard, account);
        }
        engine.send(&self.op(destination, account), &mut ep.host(guard))
    }

    /// Injected data is copied now: the application may reuse its buffer while the operation waits.
    pub(super) fn starter(self) -> impl Starter {
        let kept = Kept::of(self.payload, self.inject);
        move |ep: &Endpoint, guard: &Guard<'_>, account| {
            Self { payload: kept.memory()?, ..self }.start(ep, guard, account)
        }
    }

    pub(super) fn kind(&self) -> Kind {
        let Tagging { tagged, tag, .. } = self.tagging;
        Kind { direction: Direction::Send, tagged, tag, to: self.dest }
    }
}

/// Starts a checked operation; called again after [`OpError::Again`].
pub(super) trait Starter:
    Fn(&Endpoint, &Guard<'_>, Account) -> Result<(), OpError> + 'static
{
}

impl<S: Fn(&Endpoint, &Guard<'_>, Account) -> Result<(), OpError> + 'static> Starter for S {}

/// The operation as an action, to be started when a counter reaches its threshold.
pub(super) fn transfer(ep: &Endpoint, kind: Kind, start: impl Starter) -> Action {
    let endpoint: *const Endpoint = ep;
    // SAFETY: an endpoint takes its work back, under the lock that its caller holds, before it is freed.
    let start =
        Box::new(move |guard: &Guard<'_>, account| start(unsafe { &*endpoint }, guard, account));
    Action::Transfer { endpoint, kind, start }
}

/// Lets a checked operation wait for the counter that its context names (fi_trigger.3).
/// Errors: EINVAL without FI_TRIGGER or a context, or for a counter of another domain; ENOSYS for
/// other events than FI_TRIGGER_THRESHOLD; EAGAIN.
///
/// # Safety
/// `context` is null or a `fi_triggered_context`, valid during the call.
pub(super) unsafe fn trigger(
    ep: &Endpoint,
    kind: Kind,
    context: *mut c_void,
    report: Report,
    start: impl Starter,
    guard: &Guard<'_>,
) -> Result<(), i32> {
    if !ep.triggers || ep.engine(guard).is_none() {
        return Err(FI_EINVAL);
    }
    // SAFETY: the caller vouches; the counter is open (fi_trigger.3).
    let (counter, threshold) = unsafe {
        let wanted = context.cast::<fi_triggered_context>().as_ref().ok_or(FI_EINVAL)?;
        if wanted.event_type != FI_TRIGGER_THRESHOLD {
            return Err(FI_ENOSYS);
        }
        let wanted = wanted.trigger.threshold;
        (cntr::named(wanted.cntr)?, wanted.threshold as u64)
    };
    if !Arc::ptr_eq(&counter.domain, &ep.domain) {
        return Err(FI_EINVAL);
    }
    let account = Account { context: context.expose_provenance() as u64, report };
    let owner = Owner::Endpoint(account);
    counter.queue(threshold, (transfer(ep, kind, start), owner), guard)
}

/// Tries to start an operation, and once more after a turn of progress if there was no room.
#[inline]
pub(super) fn persist(
    ep: &Endpoint,
    guard: &Guard<'_>,
    attempt: impl Fn(&Guard<'_>) -> Result<(), OpError>,
) -> Result<(), i32> {
    let outcome = match attempt(guard) {
        Ok(()) => Ok(()),
        Err(OpError::Error(error)) => return Err(error),
        Err(OpError::Again) => {
            // The application may not read its queue until later, so this call makes room itself, once.
            ep.progress(By::Application, guard);
            attempt(guard).map_err(error_number)
        }
    };
    ep.end_call(guard);
    outcome
}

/// Receives, in any form of the call.
#[inline(always)]
pub(super) fn receive<B: Buffers>(
    handle: &EndpointFid,
    segments: Result<B, i32>,
    tagging: Tagging,
    source: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> isize {
    let segments = match segments {
        Ok(segments) => segments,
        Err(error) => return -(error as isize),
    };
    let (ep, number) = (&*handle.shared, handle.context);
    let guard = ep.domain.lock.lock();
    let op_flags = flags.of_receive(&handle.rx_flags, tagging);
    let bindings = ep.bindings_of(number, &guard);
    if bindings.shared_receive.is_some() {
        return -(FI_EOPNOTSUPP as isize); // receives are posted to the shared context
    }
    let selective = match &bindings.receive {
        Some(queue) => queue.selective,
        None if bindings.reports_received() => false,
        None => return -(ep.cannot_receive(&guard) as isize),
    };
    let report = Report::new(!selective || op_flags & FI_COMPLETION != 0, number);
    let account = Account { context: context.expose_provenance() as u64, report };
    let receiving = Receiving { segments, tagging, source, keyed: false, multi_min: None };
    if op_flags & UNUSUAL_RX == 0 && receiving.try_start(ep, &guard, account) {
        return 0;
    }
    result(receiving.listed().go_on(ep, &guard, account, op_flags))
}

/// A receive.
#[derive(Clone, Copy)]
pub(super) struct Receiving<B = SegmentList> {
    segments: B,
    tagging: Tagging,
    /// As in the call: an operation that waits for a counter learns when it starts what stands for the peer then.
    source: fi_addr_t,
    /// `source` is the handle of an authorization key.
    keyed: bool,
    multi_min: Option<usize>,
}

impl<B: Buffers> Receiving<B> {
    /// `source`: as completions name it.
    #[inline(always)]
    fn op(&self, source: u64, account: Account) -> ReceiveOp<B> {
        ReceiveOp {
            segments: self.segments,
            tagged: self.tagging.tagged,
            tag: self.tagging.tag,
            ignore: self.tagging.ignore,
            source,
            context: account.context,
            report: account.report,
            multi_min: self.multi_min,
        }
    }

    #[inline(always)]
    fn listed(&self) -> Receiving {
        let Self { segments, tagging, source, keyed, multi_min } = *self;
        Receiving { segments: segments.list(), tagging, source, keyed, multi_min }
    }

    /// See [`crate::protocol::Engine::try_post`].
    #[inline(always)]
    fn try_start(&self, ep: &Endpoint, guard: &Guard<'_>, account: Account) -> bool {
        let Ok(source) = ep.wanted_source(self.source, guard) else { return false };
        let Some(engine) = ep.engine(guard) else { return false };
        let is_hopeless = |engine: &mut Engine<Router>| engine.is_hopeless(source, &ep.host(guard));
        engine.try_post(&self.op(source, account), is_hopeless)
    }
}

impl Receiving {
    /// Errors: EINVAL.
    pub(super) fn check(
        (ep, number): (&Endpoint, u8),
        segments: SegmentList,
        tagging: Tagging,
        source: fi_addr_t,
        op_flags: u64,
        guard: &Guard<'_>,
    ) -> Result<Self, i32> {
        let multi = op_flags & FI_MULTI_RECV != 0;
        if multi && tagging.tagged {
            return Err(FI_EINVAL);
        }
        let multi_min = multi.then(|| ep.state(guard).min_multi_recv_of(number));
        let keyed = op_flags & FI_AUTH_KEY != 0;
        let receiving = Self { segments, tagging, source, keyed, multi_min };
        receiving.wanted(ep, guard).map(|_| receiving)
    }

    /// The source, as completions name it. Errors: EINVAL.
    fn wanted(&self, ep: &Endpoint, guard: &Guard<'_>) -> Result<u64, i32> {
        if self.keyed {
            ep.wanted_key(self.source, guard)
        } else {
            ep.wanted_source(self.source, guard)
        }
    }

    /// The general case, which [`Receiving::try_start`] leaves: unusual flags, or a message that has arrived.
    #[inline(never)]
    fn go_on(
        &self,
        ep: &Endpoint,
        guard: &Guard<'_>,
        account: Account,
        op_flags: u64,
    ) -> Result<(), i32> {
        let Self { segments, tagging, source, .. } = *self;
        let context = (ep, account.report.context());
        let receiving = Self::check(context, segments, tagging, source, op_flags, guard)?;
        let looks = op_flags & (FI_PEEK | FI_CLAIM | FI_DISCARD) != 0;
        if op_flags & FI_TRIGGER != 0 {
            if looks {
                return Err(FI_EOPNOTSUPP);
            }
            let context = std::ptr::with_exposed_provenance_mut(account.context as usize);
            let (kind, report) = (receiving.kind(), account.report);
            // SAFETY: under FI_TRIGGER the context is a `fi_triggered_context` (fi_trigger.3).
            return unsafe { trigger(ep, kind, context, report, receiving.starter(), guard) };
        }
        if looks {
            let source = receiving.wanted(ep, guard)?;
            return special_receive(ep, &receiving.op(source, account), op_flags, guard);
        }
        let outcome = receiving.start(ep, guard, account).map_err(error_number);
        ep.end_call(guard);
        outcome
    }

    fn start(&self, ep: &Endpoint, guard: &Guard<'_>, account: Account) -> Result<(), OpError> {
        let source = self.wanted(ep, guard).map_err(OpError::Error)?;
        let engine = ep.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        engine.receive(&self.op(source, account), &mut ep.host(guard))
    }

    pub(super) fn starter(self) -> impl Starter {
        move |ep: &Endpoint, guard: &Guard<'_>, account| self.start(ep, guard, account)
    }

    pub(super) fn kind(&self) -> Kind {
        let Tagging { tagged, tag, .. } = self.tagging;
        Kind { direction: Direction::Receive, tagged, tag, to: FI_ADDR_NOTAVAIL }
    }
}

pub(super) fn error_number(error: OpError) -> i32 {
    match error {
        OpError::Again => FI_EAGAIN,
        OpError::Error(error) => error,
    }
}

impl Endpoint {
    /// Before the return of a call that used the engine: an operation that is already complete may have raised a
    /// counter, and one that is not may have left work for the next poll.
    pub(super) fn end_call(&self, guard: &Guard<'_>) {
        self.domain.triggers.run_due(guard);
        self.rouse(guard);
    }

    /// The error of a receive at an endpoint that would not report the message.
    #[cold]
    fn cannot_receive(&self, guard: &Guard<'_>) -> i32 {
        if self.engine(guard).is_some() { FI_ENOCQ } else { FI_EOPBADSTATE }
    }

    /// The source that a receive wants, as completions name it.
    #[inline]
    pub(super) fn wanted_source(&self, source: fi_addr_t, guard: &Guard<'_>) -> Result<u64, i32> {
        if source == FI_ADDR_UNSPEC || !self.directed {
            return Ok(ANY_SOURCE);
        }
        let av = self.bindings(guard).av.as_ref().ok_or(FI_EINVAL)?;
        av.follow(guard);
        // SAFETY: the guard belongs to the domain of vector and endpoint; one short step.
        unsafe { av.state.get(guard) }.representative(source).ok_or(FI_EINVAL)
    }

    /// The source of a receive from all peers with the authorization key (FI_AUTH_KEY). All peers that the endpoint
    /// accepts have its own key. Errors: EINVAL for the handle of no key.
    pub(super) fn wanted_key(&self, key: fi_addr_t, guard: &Guard<'_>) -> Result<u64, i32> {
        if key == FI_ADDR_UNSPEC || !self.directed {
            return Ok(ANY_SOURCE);
        }
        let av = self.bindings(guard).av.as_ref().ok_or(FI_EINVAL)?;
        if av.is_key(key, guard) { Ok(ANY_SOURCE) } else { Err(FI_EINVAL) }
    }
}

/// FI_PEEK, FI_CLAIM and FI_DISCARD (fi_tagged.3).
#[cold]
fn special_receive(
    ep: &Endpoint,
    op: &ReceiveOp,
    flags: u64,
    guard: &Guard<'_>,
) -> Result<(), i32> {
    let special = Special::of(flags).filter(|_| op.multi_min.is_none()).ok_or(FI_EINVAL)?;
    ep.progress(By::Application, guard);
    let outcome = special.carry_out(ep, op, guard);
    ep.end_call(guard);
    outcome
}

/// The meaning of FI_PEEK, FI_CLAIM and FI_DISCARD in combination.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Special {
    Peek(PeekAction),
    /// The message that a peek has claimed, to be received or discarded.
    Claimed {
        discard: bool,
    },
}

impl Special {
    /// `None`: an invalid combination.
    pub(super) fn of(flags: u64) -> Option<Self> {
        match (flags & FI_PEEK != 0, flags & FI_CLAIM != 0, flags & FI_DISCARD != 0) {
            (true, true, true) | (false, false, _) => None,
            (true, true, false) => Some(Self::Peek(PeekAction::Claim)),
            (true, false, true) => Some(Self::Peek(PeekAction::Discard)),
            (true, false, false) => Some(Self::Peek(PeekAction::Look)),
            (false, true, discard) => Some(Self::Claimed { discard }),
        }
    }

    pub(super) fn carry_out(
        self,
        ep: &Endpoint,
        op: &ReceiveOp,
        guard: &Guard<'_>,
    ) -> Result<(), i32> {
        let mut host = ep.host(guard);
        let engine = ep.engine(guard).ok_or(FI_EOPBADSTATE)?;
        match self {
            Self::Peek(action) => {
                let op = ReceiveOp { report: op.report.of_look(), ..*op };
                engine.peek(&op, action, &mut host)
            }
            Self::Claimed { discard } => engine.receive_claimed(op, discard, &mut host),
        }
        .map_err(error_number)
    }
}

/// `fi_cancel`. Errors: ENOENT when no posted receive has the context (any more).
pub(super) unsafe extern "C" fn cancel(fid: fid_t, context: *mut c_void) -> isize {
    entry("fi_cancel", || {
        // SAFETY: a handle of this provider; `fid` is its first member.
        let handle = unsafe { endpoint(fid.cast::<fid_ep>()) };
        let ep = &handle.shared;
        let guard = ep.domain.lock.lock();
        let context = context.expose_provenance() as u64;
        let engine_cancels = |context: u64| {
            let mut host = ep.host(&guard);
            // A transmit context may have the number of a receive context, but has none of its receives.
            let receives = matches!(handle.role, Role::Endpoint | Role::Receive);
            let engine = ep.engine(&guard)?;
            Some(receives && engine.cancel(handle.context, context, &mut host))
        };
        let Some(mut cancelled) = engine_cancels(context) else {
            return -(FI_EOPBADSTATE as isize);
        };
        if !cancelled && ep.triggers {
            cancelled = match ep.domain.triggers.cancel(&raw const **ep, context, &guard) {
                Cancel::Unknown => false,
                Cancel::Done => true,
                Cancel::Started(key) => engine_cancels(key).unwrap_or(false),
            };
        }
        ep.end_call(&guard);
        if cancelled { 0 } else { -(FI_ENOENT as isize) }
    })
}
