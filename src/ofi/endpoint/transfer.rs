//! The data calls: arguments checked, flags translated, handed to the protocol.

use super::{Endpoint, EndpointFid, EndpointState, endpoint};
use crate::memory::{OwnedBuffer, Segment, SegmentList};
use crate::ofi::av::NO_SUCH_ADDRESS;
use crate::ofi::cntr;
use crate::ofi::guard::entry;
use crate::ofi::lock::Guard;
use crate::ofi::trigger::{Account, Action, Cancel, Kind, Owner, Start, Work, run_due};
use crate::protocol::{
    ANY_SOURCE, Direction, Envelope, OpError, PeekAction, ReceiveOp, Report, SendOp,
};
use crate::transport::PeerId;
use libfabric_sys::{
    FI_ADDR_UNSPEC, FI_AUTH_KEY, FI_CLAIM, FI_COMPLETION, FI_DELIVERY_COMPLETE, FI_DISCARD,
    FI_EAGAIN, FI_EINVAL, FI_EMSGSIZE, FI_ENOCQ, FI_ENOENT, FI_ENOSYS, FI_EOPBADSTATE,
    FI_EOPNOTSUPP, FI_FENCE, FI_INJECT, FI_MATCH_COMPLETE, FI_MULTI_RECV, FI_PEEK,
    FI_REMOTE_CQ_DATA, FI_TRIGGER, FI_TRIGGER_THRESHOLD, fi_addr_t, fi_triggered_context, fid_ep,
    fid_t,
};
use std::ffi::c_void;
use std::sync::Arc;

/// Which kind of message, and its tag.
#[derive(Clone, Copy)]
pub(super) struct Tagging {
    pub(super) tagged: bool,
    pub(super) tag: u64,
    pub(super) ignore: u64,
}

impl Tagging {
    /// A plain message: nothing to match.
    pub(super) const PLAIN: Self = Self { tagged: false, tag: 0, ignore: u64::MAX };

    #[inline]
    pub(super) const fn tagged(tag: u64, ignore: u64) -> Self {
        Self { tagged: true, tag, ignore }
    }
}

/// Whose flags count for an operation.
#[derive(Clone, Copy)]
pub(super) enum Flags {
    /// The endpoint's defaults (fi_send and the like).
    Default,
    /// Those of the call (fi_sendmsg and the like).
    Call(u64),
    /// fi_inject and the like: copied, and no entry.
    Inject,
}

/// One contiguous buffer.
///
/// # Safety
/// The application lends `len` bytes at `buf` until the operation completes.
#[inline]
pub(super) unsafe fn buffer(buf: *const c_void, len: usize) -> Result<SegmentList, i32> {
    if buf.is_null() && len > 0 {
        return Err(FI_EINVAL);
    }
    // SAFETY: the caller vouches.
    Ok(unsafe { SegmentList::contiguous(buf.cast(), len) })
}

/// A vector of buffers. Errors: EINVAL for more than four.
///
/// # Safety
/// `iov` has `count` elements; the application lends each until the operation completes.
pub(super) unsafe fn vector(iov: *const libc::iovec, count: usize) -> Result<SegmentList, i32> {
    if count > crate::memory::MAX_SEGMENTS || (iov.is_null() && count > 0) {
        return Err(FI_EINVAL);
    }
    let mut parts = [(std::ptr::null(), 0); crate::memory::MAX_SEGMENTS];
    for (i, part) in parts.iter_mut().enumerate().take(count) {
        // SAFETY: the caller vouches for `count` elements.
        let iov = unsafe { &*iov.add(i) };
        if iov.iov_base.is_null() && iov.iov_len > 0 {
            return Err(FI_EINVAL);
        }
        *part = (iov.iov_base.cast_const().cast(), iov.iov_len);
    }
    // SAFETY: the caller vouches for each.
    unsafe { SegmentList::gather(parts.get(..count).unwrap_or(&[])) }.ok_or(FI_EINVAL)
}

impl Flags {
    /// Those that count for an operation that sends or accesses, and whether it is fi_inject or the
    /// like.
    #[inline]
    pub(super) fn of_transmit(self, handle: &EndpointFid) -> (u64, bool) {
        match self {
            Self::Default => (handle.tx_flags.get() & !FI_REMOTE_CQ_DATA, false),
            Self::Call(flags) => (flags, false),
            Self::Inject => (FI_INJECT, true),
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
    /// Where the end of such an operation is reported.
    #[inline]
    pub(super) fn report(&self, op_flags: u64, inject_call: bool, guard: &Guard<'_>) -> Report {
        let bindings = self.shared.bindings_of(self.context, guard);
        let selective = bindings.transmit.as_ref().is_some_and(|b| b.selective);
        let entry = !inject_call && (!selective || op_flags & FI_COMPLETION != 0);
        Report::new(entry, self.context)
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
    /// The peer that `fi_addr` names, met now if it never was.
    #[inline]
    pub(super) fn peer(&self, fi_addr: fi_addr_t, guard: &Guard<'_>) -> Result<PeerId, OpError> {
        self.destination(fi_addr, guard).map(|(peer, _)| peer)
    }

    /// The same, and which of its receive contexts.
    #[inline]
    pub(super) fn destination(
        &self,
        fi_addr: fi_addr_t,
        guard: &Guard<'_>,
    ) -> Result<(PeerId, u8), OpError> {
        let invalid = OpError::Error(NO_SUCH_ADDRESS);
        let av = self.bindings(guard).av.as_ref().ok_or(invalid)?;
        // SAFETY: the guard is of the domain of vector and endpoint; one short step.
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

    /// An address that names a receive context (fi_rx_addr), or one that was not used before.
    #[cold]
    fn named_context(
        &self,
        fi_addr: fi_addr_t,
        guard: &Guard<'_>,
    ) -> Result<(PeerId, u8), OpError> {
        let invalid = OpError::Error(NO_SUCH_ADDRESS);
        let av = self.bindings(guard).av.as_ref().ok_or(invalid)?;
        // SAFETY: as above.
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
        // SAFETY: as above.
        let address = unsafe { av.state.get(guard) }.address(fi_addr).ok_or(invalid)?;
        let engine = self.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        let peer = engine.connect(&address)?;
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

/// Flags with which a send is no matter of one call, or has more to report than its end.
const SLOW_TX: u64 = FI_TRIGGER | FI_DELIVERY_COMPLETE | FI_MATCH_COMPLETE | FI_FENCE | FI_INJECT;
/// Flags with which a receive is not for one message.
const SLOW_RX: u64 = FI_TRIGGER | FI_MULTI_RECV;

/// A send of one segment, by the short road if that is open ([`Engine::send_at_once`]).
///
/// # Safety
/// As [`buffer`].
#[inline(always)]
pub(super) unsafe fn send_segment(
    handle: &EndpointFid,
    (buf, len): (*const c_void, usize),
    tagging: Tagging,
    data: Option<u64>,
    dest: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> isize {
    // SAFETY: the caller vouches.
    unsafe {
        if try_send_at_once(handle, (buf, len), tagging, data, dest, context, flags) {
            return 0;
        }
        send(handle, buffer(buf, len), tagging, data, dest, context, flags)
    }
}

/// # Safety
/// As [`buffer`].
#[inline(always)]
unsafe fn try_send_at_once(
    handle: &EndpointFid,
    (buf, len): (*const c_void, usize),
    Tagging { tagged, tag, .. }: Tagging,
    data: Option<u64>,
    dest: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> bool {
    let ep = &*handle.shared;
    let injects = matches!(flags, Flags::Inject);
    let op_flags = if injects { 0 } else { handle.tx_flags.get() };
    if op_flags & SLOW_TX != 0 || handle.context != 0 || buf.is_null() {
        return false;
    }
    let guard = ep.domain.lock.lock();
    let state = ep.state(&guard);
    if !state.takes(tagged, len, injects) {
        return false;
    }
    let Ok((peer, 0)) = ep.destination(dest, &guard) else { return false };
    let Some(engine) = ep.engine(&guard) else { return false };
    let envelope = Envelope { tagged, tag, data, rx: 0 };
    let report = handle.report(op_flags, injects, &guard);
    let end = (context.expose_provenance() as u64, report);
    // SAFETY: the caller vouches.
    let payload = unsafe { Segment::new(buf.cast(), len) };
    let sent = engine.send_at_once(peer, envelope, payload, end, &mut ep.host(&guard));
    if sent && ep.bindings(&guard).send_counter.is_some() {
        run_due(&ep.domain, &guard);
    }
    sent
}

/// A receive into one segment, by the short road if that is open ([`Engine::receive_at_once`]).
///
/// # Safety
/// As [`buffer`].
#[inline(always)]
pub(super) unsafe fn receive_segment(
    handle: &EndpointFid,
    (buf, len): (*mut c_void, usize),
    tagging: Tagging,
    source: fi_addr_t,
    context: *mut c_void,
) -> isize {
    // SAFETY: the caller vouches.
    unsafe {
        if try_receive_at_once(handle, (buf, len), tagging, source, context) {
            return 0;
        }
        receive(handle, buffer(buf, len), tagging, source, context, Flags::Default)
    }
}

/// # Safety
/// As [`buffer`].
#[inline(always)]
unsafe fn try_receive_at_once(
    handle: &EndpointFid,
    (buf, len): (*mut c_void, usize),
    Tagging { tagged, tag, ignore }: Tagging,
    source: fi_addr_t,
    context: *mut c_void,
) -> bool {
    let ep = &*handle.shared;
    let op_flags = handle.rx_flags.get();
    if op_flags & SLOW_RX != 0 || handle.context != 0 || buf.is_null() {
        return false;
    }
    let guard = ep.domain.lock.lock();
    let bindings = ep.bindings(&guard);
    let Some(queue) = &bindings.receive else { return false };
    if bindings.shared_receive.is_some() {
        return false;
    }
    let Ok(source) = ep.wanted_source(source, &guard) else { return false };
    let Some(engine) = ep.engine(&guard) else { return false };
    let entry = !queue.selective || op_flags & FI_COMPLETION != 0;
    let end = (context.expose_provenance() as u64, Report::new(entry, 0));
    // SAFETY: the caller vouches.
    let segment = unsafe { Segment::new(buf.cast(), len) };
    engine.receive_at_once(tagged, (tag, ignore), source, segment, end)
}

/// All forms of send.
#[inline(never)]
pub(super) fn send(
    handle: &EndpointFid,
    payload: Result<SegmentList, i32>,
    tagging: Tagging,
    data: Option<u64>,
    dest: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> isize {
    result(try_send(handle, payload, tagging, data, dest, context, flags))
}

#[inline]
fn try_send(
    handle: &EndpointFid,
    payload: Result<SegmentList, i32>,
    tagging: Tagging,
    data: Option<u64>,
    dest: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> Result<(), i32> {
    let ep = &*handle.shared;
    let guard = ep.domain.lock.lock();
    let (op_flags, inject_call) = flags.of_transmit(handle);
    let sending = Sending::check(ep, payload?, tagging, data, dest, op_flags, &guard)?;
    let report = handle.report(op_flags, inject_call, &guard);
    if op_flags & FI_TRIGGER != 0 {
        // SAFETY: fi_trigger.3: the context says what to wait for.
        return unsafe { trigger(ep, sending.kind(), context, report, sending.starter(), &guard) };
    }
    let account = Account { context: context.expose_provenance() as u64, report };
    persist(ep, &guard, |guard: &Guard<'_>| sending.start(ep, guard, account))
}

/// A send that was checked and can be started.
#[derive(Clone, Copy)]
pub(super) struct Sending {
    payload: SegmentList,
    tagging: Tagging,
    data: Option<u64>,
    dest: fi_addr_t,
    inject: bool,
    delivery: bool,
    fence: bool,
}

impl Sending {
    /// Errors: EMSGSIZE.
    #[inline]
    pub(super) fn check(
        ep: &Endpoint,
        payload: SegmentList,
        tagging: Tagging,
        data: Option<u64>,
        dest: fi_addr_t,
        op_flags: u64,
        guard: &Guard<'_>,
    ) -> Result<Self, i32> {
        let inject = op_flags & FI_INJECT != 0;
        if !ep.state(guard).takes(tagging.tagged, payload.len(), inject) {
            return Err(FI_EMSGSIZE);
        }
        let delivery = op_flags & (FI_DELIVERY_COMPLETE | FI_MATCH_COMPLETE) != 0;
        let fence = op_flags & FI_FENCE != 0;
        Ok(Self { payload, tagging, data, dest, inject, delivery, fence })
    }

    #[inline]
    fn start(&self, ep: &Endpoint, guard: &Guard<'_>, account: Account) -> Result<(), OpError> {
        let (peer, rx) = ep.destination(self.dest, guard)?;
        let op = SendOp {
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
            fence: self.fence,
        };
        let mut host = ep.host(guard);
        let engine = ep.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        engine.send(&op, &mut host)
    }

    /// What is injected is copied now: the application's buffer is its own while this waits.
    pub(super) fn starter(self) -> Start {
        let kept = self.inject.then(|| OwnedBuffer::copy_of(&self.payload));
        Box::new(move |ep, guard, account| {
            let payload = kept.as_ref().map_or(self.payload, OwnedBuffer::segments);
            Self { payload, ..self }.start(ep, guard, account)
        })
    }

    pub(super) fn kind(&self) -> Kind {
        Kind { direction: Direction::Send, tagged: self.tagging.tagged, tag: self.tagging.tag }
    }
}

/// Has a checked operation wait for the counter that its context names (fi_trigger.3).
/// Errors: EINVAL without FI_TRIGGER, or for no context or a counter of another domain; ENOSYS for
/// other events than FI_TRIGGER_THRESHOLD; EAGAIN.
///
/// # Safety
/// `context` is null or a `fi_triggered_context`, valid during the call.
pub(super) unsafe fn trigger(
    ep: &Endpoint,
    kind: Kind,
    context: *mut c_void,
    report: Report,
    start: Start,
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
    let action = Action::Transfer { endpoint: ep, kind, start };
    let owner = Owner::Endpoint(account);
    crate::ofi::trigger::queue(counter, Work { threshold, action, owner }, guard)
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
            // An application may only read its queue later: make room ourselves, once.
            ep.progress(guard);
            attempt(guard).map_err(error_number)
        }
    };
    // What is complete already may have raised a counter.
    run_due(&ep.domain, guard);
    outcome
}

/// All forms of receive.
#[inline(never)]
pub(super) fn receive(
    handle: &EndpointFid,
    segments: Result<SegmentList, i32>,
    tagging: Tagging,
    source: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> isize {
    result(try_receive(handle, segments, tagging, source, context, flags))
}

#[inline]
fn try_receive(
    handle: &EndpointFid,
    segments: Result<SegmentList, i32>,
    tagging: Tagging,
    source: fi_addr_t,
    context: *mut c_void,
    flags: Flags,
) -> Result<(), i32> {
    let ep = &*handle.shared;
    let guard = ep.domain.lock.lock();
    let op_flags = match flags {
        Flags::Call(flags) => flags,
        _ => handle.rx_flags.get() & !(FI_PEEK | FI_CLAIM | FI_DISCARD),
    };
    let bindings = ep.bindings_of(handle.context, &guard);
    if bindings.shared_receive.is_some() {
        return Err(FI_EOPNOTSUPP); // they are posted to the shared context
    }
    let selective = bindings.receive.as_ref().is_some_and(|b| b.selective);
    if !bindings.reports_received() {
        return Err(if ep.engine(&guard).is_some() { FI_ENOCQ } else { FI_EOPBADSTATE });
    }
    let report = Report::new(!selective || op_flags & FI_COMPLETION != 0, handle.context);
    let receiving = Receiving::check(ep, segments?, tagging, source, op_flags, &guard)?;
    let special =
        matches!(flags, Flags::Call(_)) && op_flags & (FI_PEEK | FI_CLAIM | FI_DISCARD) != 0;
    if op_flags & FI_TRIGGER != 0 {
        if special {
            return Err(FI_EOPNOTSUPP);
        }
        let kind = receiving.kind();
        // SAFETY: fi_trigger.3: the context says what to wait for.
        return unsafe { trigger(ep, kind, context, report, receiving.starter(), &guard) };
    }
    let account = Account { context: context.expose_provenance() as u64, report };
    if special {
        return special_receive(ep, &receiving.op(account), op_flags, &guard);
    }
    let outcome = receiving.start(ep, &guard, account).map_err(error_number);
    run_due(&ep.domain, &guard);
    outcome
}

/// A receive that was checked and can be posted.
#[derive(Clone, Copy)]
pub(super) struct Receiving {
    segments: SegmentList,
    tagging: Tagging,
    source: u64,
    multi_min: Option<usize>,
}

impl Receiving {
    /// Errors: EINVAL.
    #[inline]
    pub(super) fn check(
        ep: &Endpoint,
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
        let source = if op_flags & FI_AUTH_KEY != 0 {
            ep.wanted_key(source, guard)?
        } else {
            ep.wanted_source(source, guard)?
        };
        let multi_min = multi.then(|| ep.state(guard).min_multi_recv);
        Ok(Self { segments, tagging, source, multi_min })
    }

    #[inline]
    fn op(&self, account: Account) -> ReceiveOp {
        ReceiveOp {
            segments: self.segments,
            tagged: self.tagging.tagged,
            tag: self.tagging.tag,
            ignore: self.tagging.ignore,
            source: self.source,
            context: account.context,
            report: account.report,
            multi_min: self.multi_min,
        }
    }

    #[inline]
    fn start(&self, ep: &Endpoint, guard: &Guard<'_>, account: Account) -> Result<(), OpError> {
        let mut host = ep.host(guard);
        let engine = ep.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        engine.receive(&self.op(account), &mut host)
    }

    pub(super) fn starter(self) -> Start {
        Box::new(move |ep, guard, account| self.start(ep, guard, account))
    }

    pub(super) fn kind(&self) -> Kind {
        Kind { direction: Direction::Receive, tagged: self.tagging.tagged, tag: self.tagging.tag }
    }
}

pub(super) fn error_number(error: OpError) -> i32 {
    match error {
        OpError::Again => FI_EAGAIN,
        OpError::Error(error) => error,
    }
}

impl Endpoint {
    /// The source that a receive wants, as completions name it.
    #[inline]
    pub(super) fn wanted_source(&self, source: fi_addr_t, guard: &Guard<'_>) -> Result<u64, i32> {
        if source == FI_ADDR_UNSPEC || !self.directed {
            return Ok(ANY_SOURCE);
        }
        let av = self.bindings(guard).av.as_ref().ok_or(FI_EINVAL)?;
        // SAFETY: the guard is of the domain of vector and endpoint; one short step.
        unsafe { av.state.get(guard) }.representative(source).ok_or(FI_EINVAL)
    }

    /// The source of a receive from whoever has the authorization key (FI_AUTH_KEY): all that the
    /// endpoint hears of have its own. Errors: EINVAL for what is no such key.
    pub(super) fn wanted_key(&self, key: fi_addr_t, guard: &Guard<'_>) -> Result<u64, i32> {
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
    ep.progress(guard);
    special.carry_out(ep, op, guard)
}

/// What FI_PEEK, FI_CLAIM and FI_DISCARD together ask for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Special {
    Peek(PeekAction),
    /// The message that a peek has set aside, to be received or thrown away.
    Claimed {
        discard: bool,
    },
}

impl Special {
    /// `None`: they make no sense together.
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
            Self::Peek(action) => engine.peek(op, action, &mut host),
            Self::Claimed { discard } => engine.receive_claimed(op, discard, &mut host),
        }
        .map_err(error_number)
    }
}

/// `fi_cancel`. Errors: ENOENT when no posted receive has the context (any more).
pub(super) unsafe extern "C" fn cancel(fid: fid_t, context: *mut c_void) -> isize {
    entry("fi_cancel", || {
        // SAFETY: a handle of ours; `fid` is its first member.
        let handle = unsafe { endpoint(fid.cast::<fid_ep>()) };
        let ep = &handle.shared;
        let guard = ep.domain.lock.lock();
        let context = context.expose_provenance() as u64;
        let engine_cancels = |context: u64| {
            let mut host = ep.host(&guard);
            ep.engine(&guard).map(|engine| engine.cancel(handle.context, context, &mut host))
        };
        let Some(mut cancelled) = engine_cancels(context) else {
            return -(FI_EOPBADSTATE as isize);
        };
        if !cancelled && ep.triggers {
            cancelled = match crate::ofi::trigger::cancel(ep, context, &guard) {
                Cancel::Unknown => false,
                Cancel::Done => true,
                Cancel::Started(key) => engine_cancels(key).unwrap_or(false),
            };
        }
        run_due(&ep.domain, &guard);
        if cancelled { 0 } else { -(FI_ENOENT as isize) }
    })
}
