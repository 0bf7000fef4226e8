//! The reports of the protocol engine, in libfabric's terms: queue entries, counters, sources.

use super::state::{Bindings, Endpoint, LOST_PEER, QueueBinding};
use crate::memory::keys::{Denied, Granted, Region, Right};
use crate::ofi::cntr::Counter;
use crate::ofi::cq::{CqState, Entry, NO_SOURCE};
use crate::ofi::domain::DomainState;
use crate::ofi::lock::Guard;
use crate::ofi::progress::ProgressThread;
use crate::ofi::trigger::{Count, Ended};
use crate::protocol::{
    Completion, Direction, Failure, Host, Receives, RemoteAccess, RemoteRange, Report, Standing,
    Traffic, UNKNOWN_SOURCE,
};
use crate::sys::clock;
use crate::telemetry::log;
use crate::telemetry::trace::{self, Kind};
use crate::transport::{Address, Figures, PeerId};
use libfabric_sys::{
    FI_ADDR_NOTAVAIL, FI_ATOMIC, FI_COLLECTIVE, FI_MSG, FI_MULTI_RECV, FI_READ, FI_RECV,
    FI_REMOTE_CQ_DATA, FI_REMOTE_READ, FI_REMOTE_WRITE, FI_RMA, FI_SEND, FI_TAGGED, FI_WRITE,
};
use std::ptr;
use std::sync::Arc;

/// The endpoint, as its engine reports to it. `guard` shows that the domain's lock is held.
pub(super) struct EndpointHost<'a> {
    guard: &'a Guard<'a>,
    endpoint: &'a Endpoint,
}

impl Endpoint {
    #[inline]
    pub(super) fn host<'g>(&'g self, guard: &'g Guard<'_>) -> EndpointHost<'g> {
        EndpointHost { guard, endpoint: self }
    }
}

impl EndpointHost<'_> {
    #[inline(always)]
    fn bindings(&self) -> &Bindings {
        self.endpoint.bindings(self.guard)
    }

    #[inline(always)]
    fn route(&self, c: &Completion) -> (Option<&QueueBinding>, Option<&Arc<Counter>>, u64) {
        let to = self.endpoint.bindings_of(c.report.context(), self.guard);
        match c.direction {
            Direction::Send => (to.transmit.as_ref(), to.send_counter.as_ref(), FI_SEND),
            Direction::Receive => (to.receive.as_ref(), to.receive_counter.as_ref(), FI_RECV),
            Direction::Read | Direction::Fetch => {
                (to.transmit.as_ref(), to.read_counter.as_ref(), FI_READ)
            }
            Direction::Write | Direction::Update => {
                (to.transmit.as_ref(), to.write_counter.as_ref(), FI_WRITE)
            }
            // Collective operations count as atomic operations (fi_collective.3), and those write.
            Direction::Collective => {
                (self.bindings().transmit.as_ref(), self.bindings().write_counter.as_ref(), 0)
            }
        }
    }

    /// The address of an entry of the address vector.
    pub(super) fn address(&self, source: u64) -> Option<Address> {
        let av = self.bindings().av.as_ref()?;
        // SAFETY: the guard belongs to the domain of vector and endpoint; one short step.
        let state = unsafe { av.state.get(self.guard) };
        let (base, _) = state.split(source);
        state.address(base)
    }

    /// Whether peers of the endpoint may access the region.
    fn may_reach(&self, state: &DomainState, region: u64) -> bool {
        state.region_keys.is_empty() || state.is_for(region, self.endpoint.given_key(self.guard))
    }

    /// Whether the queue, if there is one, is as `what` says.
    #[inline(always)]
    fn queue_is(&self, binding: &Option<QueueBinding>, what: impl Fn(&CqState) -> bool) -> bool {
        // SAFETY: the guard belongs to the domain of queue and endpoint; one short step.
        binding.as_ref().is_none_or(|b| what(unsafe { b.queue.state.get(self.guard) }))
    }

    /// Whether all queues of the endpoint are as `what` says.
    #[inline(always)]
    fn queues_are(&self, what: impl Fn(&CqState) -> bool + Copy) -> bool {
        let all = |bindings: &Bindings| {
            self.queue_is(&bindings.transmit, what) && self.queue_is(&bindings.receive, what)
        };
        all(self.bindings()) && self.endpoint.bindings.read(self.guard).more.iter().all(all)
    }

    /// The counter that counts the completion at the endpoint.
    fn bound(&self, c: &Completion) -> Option<*const ()> {
        self.route(c).1.map(|counter| Arc::as_ptr(counter).cast())
    }

    /// The ended deferred operation, if the completion is one of those.
    #[inline]
    fn deferred(&self, c: &Completion) -> Option<Ended> {
        if !self.endpoint.triggers {
            return None;
        }
        self.endpoint.domain.triggers.ended(c.context, self.guard)
    }

    /// Completes an operation that may be a deferred one.
    #[inline(never)]
    fn complete_deferred(&self, c: &Completion) {
        match self.deferred(c) {
            None => self.tell(c),
            Some(ended) if ended.succeed(self.bound(c), self.guard) => {
                self.tell(&Completion { context: ended.account.context, ..*c });
            }
            Some(_) => {}
        }
    }

    /// Reports a completion to its queue and counter. The end of a multi-receive buffer is always reported (fi_msg.3,
    /// FI_MULTI_RECV).
    #[inline(always)]
    fn tell(&self, c: &Completion) {
        let (queue, counter, flag) = self.route(c);
        if let (true, Some(binding)) = (c.report.entry() || c.buffer_released, queue) {
            let entry = self.entry(c, flag);
            // SAFETY: the guard belongs to the domain of queue and endpoint; one short step.
            unsafe { binding.queue.state.get(self.guard) }.push(entry);
        }
        if let Some(counter) = counter.filter(|_| c.report.counts()) {
            counter.count(self.guard);
        }
    }

    #[inline(always)]
    fn entry(&self, c: &Completion, direction_flag: u64) -> Entry {
        let kind = match c.direction {
            Direction::Read | Direction::Write => FI_RMA,
            Direction::Update | Direction::Fetch => FI_ATOMIC,
            Direction::Collective => FI_COLLECTIVE,
            _ if c.tagged => FI_TAGGED,
            _ => FI_MSG,
        };
        let mut flags = direction_flag | kind;
        if c.data.is_some() {
            flags |= FI_REMOTE_CQ_DATA;
        }
        if c.buffer_released {
            flags |= FI_MULTI_RECV;
        }
        Entry {
            context: c.context,
            flags,
            len: c.len,
            buffer: c.buffer,
            data: c.data.unwrap_or(0),
            tag: c.tag,
            source: if self.endpoint.source { c.source } else { NO_SOURCE },
        }
    }
}

const _: () = assert!(UNKNOWN_SOURCE == FI_ADDR_NOTAVAIL);

impl Host for EndpointHost<'_> {
    #[inline(never)]
    fn complete(&mut self, c: &Completion) {
        self.complete_inline(c);
    }

    #[inline(always)]
    fn complete_inline(&mut self, c: &Completion) {
        if self.endpoint.triggers && self.endpoint.domain.triggers.are_under_way(self.guard) {
            self.complete_deferred(&c.clone());
        } else {
            self.tell(c);
        }
    }

    #[cold]
    fn fail(&mut self, f: &Failure) {
        let own;
        let f = match self.deferred(&f.completion) {
            None => f,
            Some(ended) if ended.fail(self.bound(&f.completion), self.guard) => {
                let context = ended.account.context;
                own = Failure { completion: Completion { context, ..f.completion }, ..*f };
                &own
            }
            Some(_) => return,
        };
        let (queue, counter, flag) = self.route(&f.completion);
        if let Some(binding) = queue {
            let entry = self.entry(&f.completion, flag);
            // SAFETY: the guard belongs to the domain of queue and endpoint; one short step.
            unsafe { binding.queue.state.get(self.guard) }.push_error(
                entry,
                f.error,
                f.cause as i32,
                f.overflow,
            );
        }
        if let Some(counter) = counter.filter(|_| f.completion.report.counts()) {
            counter.count_error(self.guard);
        }
    }

    fn source_of(&self, address: &Address) -> u64 {
        // SAFETY: the guard belongs to this endpoint's domain; one short step.
        self.bindings()
            .av
            .as_ref()
            .map_or(UNKNOWN_SOURCE, |av| unsafe { av.state.get(self.guard) }.fi_addr(address))
    }

    #[inline]
    fn book_epoch(&self) -> u64 {
        // SAFETY: the guard belongs to this endpoint's domain; one short step.
        self.bindings().av.as_ref().map_or(0, |av| unsafe { av.state.get(self.guard) }.epoch())
    }

    fn book_removals(&self) -> u64 {
        // SAFETY: the guard belongs to this endpoint's domain; one short step.
        self.bindings().av.as_ref().map_or(0, |av| unsafe { av.state.get(self.guard) }.removals())
    }

    #[inline]
    fn takes_arrivals(&self) -> bool {
        self.queues_are(CqState::is_within_size)
    }

    #[inline(always)]
    fn has_room_for_sends(&self, report: Report) -> bool {
        let queue = &self.endpoint.bindings_of(report.context(), self.guard).transmit;
        self.queue_is(queue, |queue| queue.has_room(report.entry()))
    }

    fn shared_receives(&mut self) -> Option<&mut Receives> {
        let shared = self.bindings().shared_receive.as_ref()?;
        Some(&mut shared.state(self.guard).receives)
    }

    fn see_shared_receives(&self) -> Option<&Receives> {
        let shared = self.bindings().shared_receive.as_ref()?;
        Some(&shared.state(self.guard).receives)
    }

    fn reports_all_receives(&self) -> bool {
        self.bindings().receive.as_ref().is_some_and(|binding| !binding.selective)
    }

    fn region(&self, range: &RemoteRange, right: Right) -> Result<Granted, Denied> {
        if !self.endpoint.lets(right) {
            return Err(Denied::Access);
        }
        // SAFETY: the guard belongs to this endpoint's domain; one short step.
        let state = unsafe { self.endpoint.domain.state(self.guard) };
        let granted = state.regions.find(range.key, range.addr, range.len, right)?;
        if self.may_reach(state, granted.id) { Ok(granted) } else { Err(Denied::Key) }
    }

    fn offer(&self, key: u64) -> Option<(u64, Region)> {
        // SAFETY: the guard belongs to this endpoint's domain; the copies end the borrow.
        let state = unsafe { self.endpoint.domain.state(self.guard) };
        let (id, mut region) = state.regions.whole(key)?;
        if !self.may_reach(state, id) {
            return None;
        }
        let counters = state.region_counters.get(&id);
        let heard = |right| counters.is_some_and(|counters| counters.told(right).next().is_some());
        region.remote_read &= self.endpoint.lets(Right::Read)
            && self.bindings().remote_read_counter.is_none()
            && !heard(Right::Read);
        region.remote_write &= self.endpoint.lets(Right::Write)
            && self.bindings().remote_write_counter.is_none()
            && !heard(Right::Write);
        (region.remote_read || region.remote_write).then_some((id, region))
    }

    fn show(&mut self, standing: &Standing, figures: &Figures, traffic: &[Traffic]) {
        let awaited = standing.awaited.and_then(|source| self.address(source));
        if let Some(page) = &mut self.endpoint.state(self.guard).page {
            page.show(standing, figures, traffic, awaited);
        }
    }

    fn met(&mut self, peer: PeerId, address: &Address) {
        if let Some(page) = &mut self.endpoint.state(self.guard).page {
            page.met(peer, address);
        }
    }

    fn heard(&mut self, address: &Address) {
        if let Some(shared) = &self.bindings().shared_receive {
            let others = shared.endpoints(self.guard).filter(|one| !ptr::eq(*one, self.endpoint));
            others
                .filter_map(|one| one.engine(self.guard))
                .for_each(|engine| engine.revive(address));
        }
    }

    fn lost(&mut self, source: u64) {
        if let Some(shared) = &self.bindings().shared_receive {
            shared.state(self.guard).lost.insert(source);
            self.endpoint.state(self.guard).asleep |= LOST_PEER;
        }
    }

    #[inline]
    fn trace(&self, kind: Kind, peer: PeerId, number: u64, bytes: usize) {
        if trace::is_on() {
            if let Some(page) = &self.endpoint.state(self.guard).page {
                page.trace(kind, peer, number, bytes);
            }
        }
    }

    fn now_ns(&self) -> u64 {
        clock::now_ns()
    }

    fn joined(&mut self, group: u64, outcome: Result<(), i32>) {
        if outcome == Err(libc::ESTALE) {
            log::limited!(
                "another member has joined groups of these members more often than this endpoint, as if this one had \
                 been started again: the join fails; each try catches up by one"
            );
        }
        let eq = &self.bindings().eq;
        let known =
            self.endpoint.state(self.guard).groups.iter_mut().find(|known| known.group == group);
        let joining = known.and_then(|known| known.joining.take());
        if let (Some(eq), Some((handle, context))) = (eq, joining) {
            let handle = std::ptr::with_exposed_provenance_mut(handle);
            let context = std::ptr::with_exposed_provenance_mut(context);
            eq.push_joined(handle, context, outcome);
            self.endpoint.domain.thread().into_iter().for_each(ProgressThread::kick);
        }
    }

    fn accessed(&mut self, access: &RemoteAccess<'_>) {
        let reads = access.right.reads();
        let Bindings { remote_read_counter, remote_write_counter, .. } = self.bindings();
        if let Some(counter) = if reads { remote_read_counter } else { remote_write_counter } {
            counter.count(self.guard);
        }
        for region in access.regions {
            // SAFETY: the guard belongs to this endpoint's domain; the copy ends the borrow.
            let state = unsafe { self.endpoint.domain.state(self.guard) };
            let counters = state.region_counters.get(region).cloned().unwrap_or_default();
            counters.told(access.right).for_each(|counter| counter.raise(1, self.guard));
        }
        if let (Some(data), Some(binding)) = (access.data, &self.bindings().receive) {
            let entry = Entry {
                context: 0,
                flags: FI_REMOTE_CQ_DATA
                    | if access.right.is_atomic() { FI_ATOMIC } else { FI_RMA }
                    | if reads { FI_REMOTE_READ } else { FI_REMOTE_WRITE },
                len: access.len,
                buffer: 0,
                data,
                tag: 0,
                source: if self.endpoint.source { access.source } else { NO_SOURCE },
            };
            // SAFETY: the guard belongs to this endpoint's domain; one short step.
            unsafe { binding.queue.state.get(self.guard) }.push(entry);
        }
    }
}
