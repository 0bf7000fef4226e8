//! `struct fid_domain`: the parent of endpoints, queues, counters, address vectors and regions, and
//! the owner of the lock that they share. The calls that open these are in `ops::domain`.

use super::elsewhere::{self, Neighbour};
use super::fabric::Fabric;
use super::keys::DomainKey;
use super::lock::{DomainLock, Guard, Locked};
use super::progress::{self, By, Progress, ProgressThread, progress_for_others};
use super::table::Slack;
use super::trigger::{Count, Triggers};
use super::wait::{Conditional, Waiter};
use crate::config::Config;
use crate::memory::keys::{RegionTable, Right};
use crate::sys::numbers::NumberMap;
use crate::sys::process;
use crate::transport::JobKey;
use crate::transport::router;
use libfabric_sys::{FI_REMOTE_READ, FI_REMOTE_WRITE, fid_domain};
use once_cell::sync::OnceCell;
use std::ptr::addr_eq;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// The part of a domain that its children share.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) lock: DomainLock,
    pub(crate) config: Config,
    pub(crate) key: DomainKey,
    /// Address format of the info that the domain was opened with.
    pub(crate) addr_format: u32,
    /// The provider chooses the keys of regions (FI_MR_BASIC, FI_MR_PROV_KEY).
    pub(crate) chooses_keys: bool,
    /// Peers address regions by virtual address (FI_MR_BASIC, FI_MR_VIRT_ADDR); else by offset.
    pub(crate) names_addresses: bool,
    pub(crate) hmem: Hmem,
    pub(crate) state: Locked<DomainState>,
    /// A polling thread should yield the CPU to another process.
    pub(crate) yields: AtomicBool,
    /// Operations that wait for counters.
    pub(super) triggers: Triggers,
    pub(super) thread: OnceCell<ProgressThread>,
}

/// How buffers in device memory are told from others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hmem {
    /// There are none: FI_HMEM was not asked for.
    Off,
    /// They come with the descriptor of their region (FI_MR_HMEM).
    Described,
    /// The driver is asked for each buffer.
    Detects,
}

/// The part of a domain that changes while it is open.
#[derive(Debug, Default)]
pub(crate) struct DomainState {
    /// Enabled endpoints; each removes itself before it is freed.
    endpoints: Vec<*const dyn Progress>,
    /// Queues, counters and event queues whose wait object is a condition, which the progress thread must signal.
    conditions: Vec<Weak<dyn Conditional>>,
    /// Memory that peers may access.
    pub(crate) regions: RegionTable,
    /// Counters of regions, by the region's id.
    pub(super) region_counters: NumberMap<u64, RegionCounters>,
    /// Job keys of the regions that not all endpoints of the domain may access, by the region's id.
    pub(crate) region_keys: NumberMap<u64, JobKey>,
    /// Counters that were ever bound to a region, or raised by deferred work: every endpoint may raise them. False: one
    /// could not be attached.
    fed: Vec<(Weak<dyn Count>, bool)>,
}

/// The counters that are bound to a region.
#[derive(Clone, Debug, Default)]
pub(super) struct RegionCounters {
    pub(super) read: Option<Arc<dyn Count>>,
    pub(super) write: Option<Arc<dyn Count>>,
}

impl RegionCounters {
    /// The counter of each kind of access.
    pub(super) fn slots(&mut self) -> [(u64, &mut Option<Arc<dyn Count>>); 2] {
        [(FI_REMOTE_READ, &mut self.read), (FI_REMOTE_WRITE, &mut self.write)]
    }

    /// The counters that count an access. An access that both reads and changes the memory (fi_mr.3) is one event
    /// of a counter that is bound for both.
    pub(super) fn told(&self, right: Right) -> impl Iterator<Item = &Arc<dyn Count>> {
        let write = self.write.as_ref().filter(|_| right.writes());
        let read = self.read.as_ref().filter(|_| right.reads());
        let read = read.filter(|read| write.is_none_or(|write| !Arc::ptr_eq(read, write)));
        write.into_iter().chain(read)
    }
}

impl Domain {
    /// Yields the CPU to another process, if the last poll of an endpoint asked for it. Called without the
    /// lock, which other threads may want meanwhile.
    #[inline]
    pub(super) fn give_way(&self) {
        if self.yields.load(Ordering::Relaxed) {
            self.yields.store(false, Ordering::Relaxed);
            process::yield_now();
        }
    }

    /// The enabled endpoints.
    pub(super) fn endpoints<'g>(
        &self,
        guard: &'g Guard<'_>,
    ) -> impl Iterator<Item = &'g (dyn Progress + 'static)> + use<'g> {
        // SAFETY: the guard belongs to this domain; the copy ends the borrow.
        let endpoints = unsafe { self.state(guard) }.endpoints.clone();
        // SAFETY: endpoints leave the list, under the lock, before they are freed.
        endpoints.into_iter().map(|endpoint| unsafe { &*endpoint })
    }

    /// Adds an enabled endpoint: it raises the counters in `fed`, and wakes the progress thread.
    /// Errors: those of the counters' wait objects.
    pub(super) fn enter(
        &self,
        endpoint: *const dyn Progress,
        guard: &Guard<'_>,
    ) -> Result<(), i32> {
        // SAFETY: the guard belongs to this domain; one short step.
        let state = unsafe { self.state(guard) };
        state.endpoints.push(endpoint);
        let fed = state.fed();
        elsewhere::count_enabled();
        fed.iter().try_for_each(|counter| counter.attach(endpoint, guard))?;
        if let Some(thread) = self.thread() {
            // SAFETY: as in `endpoints`.
            thread.watch(unsafe { &*endpoint }.wait_fd(guard), 1);
        }
        Ok(())
    }

    /// The inverse of `enter`, also for an endpoint that was never enabled.
    pub(super) fn leave(&self, endpoint: *const dyn Progress, guard: &Guard<'_>) {
        if let Some(thread) = self.thread() {
            // SAFETY: as in `endpoints`. A descriptor that cannot be made was not watched.
            unsafe { &*endpoint }.wait_fd(guard).iter().for_each(|fd| thread.unwatch(*fd));
        }
        // SAFETY: the guard belongs to this domain; one short step.
        let state = unsafe { self.state(guard) };
        let before = state.endpoints.len();
        state.endpoints.retain(|known| !addr_eq(*known, endpoint));
        elsewhere::count_left(before - state.endpoints.len());
        let fed = state.fed();
        fed.iter().for_each(|counter| counter.detach(endpoint, guard));
        self.triggers.forget(endpoint, guard);
    }

    /// Adds `counter` to `fed`: a thread that waits for it is woken by every endpoint of the domain.
    /// Errors: those of the counter's wait object.
    pub(super) fn feed(&self, counter: Arc<dyn Count>, guard: &Guard<'_>) -> Result<(), i32> {
        let is = |known: &Weak<dyn Count>| addr_eq(known.as_ptr(), Arc::as_ptr(&counter));
        // SAFETY: the guard belongs to this domain; one short step.
        let fed = &mut unsafe { self.state(guard) }.fed;
        match fed.iter().find(|(known, _)| is(known)) {
            Some((_, true)) => return Ok(()),
            Some(_) => {}
            None => {
                fed.retain(|(known, _)| known.strong_count() > 0);
                fed.push((Arc::downgrade(&counter), false));
            }
        }
        self.endpoints(guard).try_for_each(|endpoint| counter.attach(endpoint, guard))?;
        // SAFETY: as above.
        let fed = &mut unsafe { self.state(guard) }.fed;
        fed.iter_mut().filter(|(known, _)| is(known)).for_each(|(_, all)| *all = true);
        Ok(())
    }

    /// Attaches `endpoint` to all counters in `fed`; repeating it does nothing. Errors: those of the wait objects.
    pub(super) fn feed_all(
        &self,
        endpoint: &(dyn Progress + 'static),
        guard: &Guard<'_>,
    ) -> Result<(), i32> {
        // SAFETY: the guard belongs to this domain; the copy ends the borrow.
        let fed = unsafe { self.state(guard) }.fed();
        fed.iter().try_for_each(|counter| counter.attach(endpoint, guard))
    }

    /// Ends direct RMA to this region: once this and then [`Domain::settle`] returned, no peer reaches it by itself.
    pub(super) fn revoke(&self, region: u64, guard: &Guard<'_>) {
        if !self.lock.is_here() {
            // A forked child: the peers know of the parent's region.
            return;
        }
        self.endpoints(guard).for_each(|endpoint| endpoint.revoke(region, guard));
    }

    /// The same for all regions.
    pub(super) fn revoke_all(&self, guard: &Guard<'_>) {
        // SAFETY: the guard belongs to this domain; the copy ends the borrow.
        let ids: Vec<u64> = unsafe { self.state(guard) }.regions.ids().collect();
        ids.into_iter().for_each(|id| self.revoke(id, guard));
    }

    /// Waits, without the lock, until no peer is in the middle of an access that it began before a `revoke`.
    /// False: a peer still is, and it is neither stopped nor done.
    pub(super) fn settle(&self) -> bool {
        if !self.lock.is_here() {
            // A forked child: they are in the parent's memory.
            return true;
        }
        router::settle(|insists| {
            let guard = self.lock.control();
            self.endpoints(&guard).all(|endpoint| endpoint.is_settled(insists, &guard))
        })
    }

    /// Starts the thread that progresses without the application, if it is not running yet.
    /// Errors: ENOMEM, also when the system has no more threads; EMFILE, ENFILE.
    pub(crate) fn require_thread(self: &Arc<Self>) -> Result<(), i32> {
        self.lock.need();
        let domain = DomainPtr(Arc::as_ptr(self));
        // SAFETY: see DomainPtr.
        let turn = move || unsafe { domain.get() }.turn();
        let guard = self.lock.control();
        if self.thread().is_some() {
            return Ok(());
        }
        let thread = self.thread.get_or_try_init(|| ProgressThread::start(turn))?;
        // Those that were enabled before; later ones are watched as they enter.
        self.endpoints(&guard).for_each(|endpoint| thread.watch(endpoint.wait_fd(&guard), 1));
        Ok(())
    }

    /// The progress thread, if there is one.
    pub(crate) fn thread(&self) -> Option<&ProgressThread> {
        self.thread.get()
    }

    /// One turn of the progress thread. Returns how long the thread may sleep, milliseconds.
    fn turn(&self) -> i32 {
        let guard = self.lock.lock();
        let mut timeout = progress::SLEEP_MS;
        for endpoint in self.endpoints(&guard) {
            if endpoint.take_polled(&guard) {
                timeout = timeout.min(progress::WATCH_MS);
                continue;
            }
            let moved = endpoint.progress(By::Others, &guard);
            if moved > 0 || !endpoint.hand_to_thread(&guard) {
                timeout = 0;
            }
        }
        // SAFETY: the guard belongs to this domain; one short step.
        let conditions = &mut unsafe { self.state(&guard) }.conditions;
        conditions.retain(|condition| condition.strong_count() > 0);
        let conditions = conditions.iter().filter_map(Weak::upgrade);
        let waiters: Vec<_> = conditions.filter_map(|one| one.take_condition(&guard)).collect();
        drop(guard);
        // Without the lock, because the application may hold the condition's mutex.
        waiters.iter().for_each(|waiter| waiter.broadcast());
        timeout
    }

    /// From now on the progress thread signals the condition of a queue, a counter or an event queue. Errors: as `require_thread`.
    pub(super) fn signal_condition(
        self: &Arc<Self>,
        of: Weak<dyn Conditional>,
        waiter: &Waiter,
    ) -> Result<(), i32> {
        self.require_thread()?;
        self.thread().into_iter().for_each(|thread| waiter.signalled_by(thread.to_kick()));
        let guard = self.lock.control();
        // SAFETY: the guard belongs to this domain; one short step.
        let conditions = &mut unsafe { self.state(&guard) }.conditions;
        if !conditions.iter().any(|known| addr_eq(known.as_ptr(), of.as_ptr())) {
            conditions.push(of);
        }
        Ok(())
    }

    /// The domain's own state.
    ///
    /// # Safety
    /// As [`Locked::get`].
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn state<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut DomainState {
        // SAFETY: the caller guarantees what `Locked::get` demands.
        unsafe { self.state.get(guard) }
    }
}

impl DomainState {
    /// Whether an endpoint to which the application has given this job key may access the region.
    pub(crate) fn is_for(&self, region: u64, key: Option<JobKey>) -> bool {
        self.region_keys.get(&region).is_none_or(|wanted| Some(*wanted) == key)
    }

    /// The counters in `fed` that are still open.
    fn fed(&self) -> Vec<Arc<dyn Count>> {
        self.fed.iter().filter_map(|(counter, _)| counter.upgrade()).collect()
    }
}

/// The domain, as its progress thread refers to it. The domain joins the thread before it is freed; an
/// `Arc` here would keep the domain busy, so that it could not be closed.
struct DomainPtr(*const Domain);

// SAFETY: a domain may be used from any thread under its lock.
unsafe impl Send for DomainPtr {}

impl DomainPtr {
    /// # Safety
    /// Called by the progress thread only, which ends before the domain is freed.
    unsafe fn get(&self) -> &Domain {
        // SAFETY: the caller vouches.
        unsafe { &*self.0 }
    }
}

impl Neighbour for Domain {
    fn progress_own(&self) -> usize {
        self.progress_for_others(&self.lock.control())
    }

    fn progress_visiting(&self) -> usize {
        // A domain with a progress thread needs no visitor.
        let guard = self.lock.visit().filter(|_| self.thread().is_none());
        guard.map_or(0, |guard| self.progress_for_others(&guard))
    }
}

impl Domain {
    fn progress_for_others(&self, guard: &Guard<'_>) -> usize {
        self.endpoints(guard).map(|endpoint| progress_for_others(endpoint, guard)).sum()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // A forked child does not use the list, and a thread of the parent may have held its lock during the fork.
        if self.lock.is_here() {
            elsewhere::leave(self);
            self.lock.leave();
        }
        if let Some(thread) = self.thread.take() {
            thread.stop();
        }
    }
}

/// The object that an application knows as a `fid_domain`.
#[repr(C)]
pub(super) struct DomainFid {
    pub(super) fid: fid_domain,
    pub(super) slack: Slack,
    pub(super) shared: Arc<Domain>,
}

/// The shared part of a domain.
///
/// # Safety
/// `domain` came from `fi_domain` and is not closed.
pub(crate) unsafe fn shared<'a>(domain: *mut fid_domain) -> &'a Arc<Domain> {
    // SAFETY: the caller vouches.
    unsafe { &(*domain.cast::<DomainFid>()).shared }
}
