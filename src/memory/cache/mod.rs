//! The registration cache: memory of the application stays registered with a device after a transfer, because the next
//! transfer often uses the same buffer.
//!
//! The worst failure is a registration of pages that are no longer mapped at their addresses: the device would send old
//! data of the application. These measures prevent it:
//!
//! | danger | measure | test |
//! |---|---|---|
//! | addresses are unmapped, or moved, while registered | userfaultfd events remove the entry | `kinds` |
//! | unmapped and mapped again, and the event is not read yet | before each hit the kernel is asked whether a change is in progress ([`monitor`]) | `a_change_that_is_not_yet_read_hides_all` |
//! | the event is read but not applied yet | a flag, set before the read, which the hit waits for | `a_change_that_is_read_but_not_applied_is_waited_for` |
//! | unmapped during the registration | the range is watched before the device learns of it; a later change is noted in the announcement, and the registration then serves this request alone | `a_change_during_registration_keeps_it_from_the_list` |
//! | pages are discarded after the event | no registration of them is kept for a second | `what_is_being_discarded_is_not_kept` |
//! | watching of a range ends although another entry needs it | announcing and watching exclude searching and unwatching | `what_others_need_stays_watched` |
//! | a hole in the range: what is mapped there later would not be watched | such a range is not kept | `holes` |
//! | another library watches what was mapped over an entry | only the rest of the entry is unwatched | `what_somebody_else_watches_by_now_stays_watched` |
//! | another library watches the range already | a watch that does not begin ends none | `a_vigil_that_does_not_begin_ends_no_other_watch` |
//! | changes without an event: files that shrink or get holes | only memory is kept, no private copy of a file; of shared memory a mirror shows at each hit that its pages are the same ([`crate::sys::mirror`]); the kind is checked while it is watched | `kinds` |
//! | shmdt comes without an event | System V memory is not kept: userfaultfd does not take it | `files_and_segments` |
//! | a peer's device reaches the old pages of a region when the application has told it of new ones | before the event is read all domains are alarmed, and end such registrations before they send anything; so does the worker | `what_has_changed_is_reached_no_more_once_the_application_goes_on` |
//! | fork: the child's pages are not the parent's | a child gets no registration ([`ForkMark`]); the parent's pages stay (Linux 5.12) | `a_child_gets_nothing`, `torture` |
//! | the thread that frees memory waits for the thread that wants to free a registration | the monitor only removes entries; a worker deregisters; no memory is allocated or freed under the locks that the monitor takes | `torture`, under malloc's own trimming |
//! | the monitor's stack is next to a buffer, and is watched when its thread ends | a thread that joins the monitor has released the userfaultfd before | `a_monitor_ends_even_if_its_own_stack_is_watched` |
//!
//! Three gaps remain, because the kernel reports them in no way: `shmat(SHM_REMAP)` over other memory, remap_file_pages(2),
//! and guard pages (`MADV_GUARD_INSTALL`, Linux 6.13), which discard what was there (test
//! `guard_pages_come_without_an_event`). FI_UDRV_CACHE=off closes them. Pages of hugetlbfs are kept if they are private
//! anonymous memory (MAP_HUGETLB); shared ones cannot be mirrored.
//!
//! The cost for the application: a thread that unmaps, moves or discards memory in a watched mapping waits for the
//! monitor (6 µs on the project machine). khugepaged leaves such mappings alone. Another user of userfaultfd gets EBUSY
//! for them. If a part of a watched mapping was mapped over, mremap(2) of the whole fails with EFAULT.
//!
//! Without userfaultfd (a sandbox, an old kernel) registrations are kept by the kernel's rv module, which every request
//! asks ([`Registrar::shares`]), or where the device pages on demand, because they follow every change
//! ([`Registrar::follows`]). Elsewhere every request gets a registration of its own, of just its bytes and with just its
//! access, which ends with its lease: correct, but slower. No call here waits long. If there is no registration, the
//! caller gets a [`Refusal`] and sends fragments.

mod index;
pub(crate) mod monitor;
mod registrar;
mod settings;
mod shared;
mod span;
mod statistics;
#[cfg(test)]
mod tests;
mod worker;

pub(crate) use monitor::{Lack, Monitor};
pub(crate) use registrar::{Access, Limits, Registrar};
pub(crate) use settings::{CachePolicy, CacheSettings};
pub(crate) use span::Span;
pub(crate) use statistics::Statistics;

use super::declared;
use crate::sys::cancel::Shield;
use crate::sys::mirror::Mirror;
use crate::sys::process::{ForkMark, page_size};
use crate::sys::{Errno, clock};
use crate::telemetry::log;
use index::{Entry, Index, Pending};
use monitor::{Subscriber, Watched, lock};
use shared::Shared;
use statistics::{Account, count};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use worker::Worker;

/// For a buffer in a region of the application, the cache registers the part of the region between two multiples of
/// this many bytes: the size of a huge page.
const BLOCK: usize = 2 << 20;
/// ... unless that is more than this fraction of the cache's limit.
const SHARE: usize = 8;

/// How often a registration is tried if the device has no room for it.
const ATTEMPTS: usize = 4;

/// A registration or the reason why there is none, and whether it is kept.
type Made<H, E> = (Result<Arc<Entry<H>>, E>, bool);

/// Why a request got no registration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// No bytes, or addresses that do not exist.
    Nowhere,
    /// This is a forked child of the process that made the cache.
    Forked,
    /// The device, or the limit on locked memory, has no room, even after idle registrations were removed.
    NoRoom,
    /// The device cannot use this memory.
    Device(Errno),
}

/// The registration cache of one protection domain.
pub(crate) struct Cache<R: Registrar> {
    shared: Arc<Shared<R>>,
    /// The cache as the monitor's subscriber, and the thread that deregisters. `None` without a monitor.
    watched: Option<(Arc<dyn Subscriber>, Worker)>,
}

/// A registration in use by a transfer.
pub(crate) struct Lease<R: Registrar> {
    shared: Arc<Shared<R>>,
    entry: Arc<Entry<R::Handle>>,
}

/// A watch on an address range; see [`Cache::watch_over`].
pub(crate) struct Vigil<R: Registrar> {
    shared: Arc<Shared<R>>,
    pending: Arc<Pending<R::Handle>>,
}

/// Ends the registrations of vigils of this process whose memory has changed, before the application goes on: it may tell
/// a peer of the new memory. The answer to [`alarm`](crate::sys::alarm).
pub(crate) fn settle() {
    if let Some(monitor) = Monitor::known() {
        monitor.settle();
    }
}

impl<R: Registrar> Vigil<R> {
    /// Holds a registration of the addresses, made since the watch began, until a change or the end of the vigil. Returns
    /// whether the addresses map the same memory still: if not, the vigil is of no use.
    pub(crate) fn hold(&self, handle: R::Handle) -> bool {
        *lock(&self.pending.held) = Some(handle);
        // Without a monitor the registration follows all changes.
        let settled = self.shared.monitor.as_ref().is_none_or(|monitor| monitor.is_settled());
        settled && self.is_unchanged()
    }

    /// Whether no change of the addresses has been heard of.
    pub(crate) fn is_unchanged(&self) -> bool {
        self.pending.is_unchanged()
    }
}

impl<R: Registrar> Drop for Vigil<R> {
    fn drop(&mut self) {
        if self.shared.mark.is_child() {
            std::mem::forget(self.pending.clone()); // the parent's
            return;
        }
        *lock(&self.pending.held) = None;
        lock(&self.shared.index).end_vigil(&self.pending);
        self.shared.unwatch(self.pending.unwatch());
    }
}

impl<R: Registrar> Cache<R> {
    /// A cache that keeps up to `limits`, or nothing if there is no monitor and registrations do not follow changes. Where the memory allows it, registrations also
    /// allow `generous` access, so that one serves sends and receives. Errors: ENOMEM.
    pub(crate) fn new(
        registrar: R,
        monitor: Option<Arc<Monitor>>,
        limits: Limits,
        generous: Access,
    ) -> Result<Self, Errno> {
        let monitor = monitor.filter(|_| limits.count > 0 && limits.bytes > 0);
        let mut shared = Arc::new(Shared {
            registrar,
            monitor,
            mark: ForkMark::new()?,
            page: page_size(),
            generous,
            index: Mutex::new(Index::new(limits)),
            work: Condvar::new(),
            counters: Arc::default(),
            changes: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            told: AtomicBool::new(false),
        });
        let mut watched = None;
        if let Some(monitor) = shared.monitor.clone() {
            let subscriber: Arc<dyn Subscriber> = shared.clone();
            monitor.subscribe(subscriber.clone());
            match Worker::start(&shared) {
                Ok(worker) => watched = Some((subscriber, worker)),
                Err(error) => {
                    monitor.unsubscribe(&subscriber);
                    Lack { what: "thread", error }.tell();
                }
            }
        }
        if watched.is_none() {
            if let Some(shared) = Arc::get_mut(&mut shared) {
                shared.monitor = None;
            }
        }
        Ok(Self { shared, watched })
    }

    /// A registration of `len` bytes at `addr` that allows `access`: an existing one, or a new one. A hit costs a
    /// system call (a quarter of a microsecond) and a look-up in a tree.
    pub(crate) fn get(&self, addr: usize, len: usize, access: Access) -> Result<Lease<R>, Refusal> {
        if self.shared.mark.is_child() {
            return Err(Refusal::Forked);
        }
        let want = Span::pages(addr, len, self.shared.page).ok_or(Refusal::Nowhere)?;
        let exact = Span { start: addr, end: addr + len };
        let result = if self.keeps() {
            // The question comes before the look-up: `monitor.rs` says why.
            let settled = self.shared.monitor.as_ref().is_none_or(|monitor| monitor.is_settled());
            if let Some(lease) = settled.then(|| self.hit(want, access)).flatten() {
                count(&self.shared.counters.hits);
                return Ok(lease);
            }
            if !settled {
                count(&self.shared.counters.unsettled);
            }
            self.miss((exact, want), self.surroundings(addr, len, want), access)
        } else {
            self.once(exact, access)
        };
        result.inspect_err(|_| count(&self.shared.counters.refused))
    }

    /// A registration that is kept, and shows what is mapped.
    fn hit(&self, want: Span, access: Access) -> Option<Lease<R>> {
        let entry = lock(&self.shared.index).hit(want, access)?;
        if entry.is_true_of(want) {
            return Some(self.lease(entry));
        }
        let released = lock(&self.shared.index).reject(entry);
        self.shared.settle(released);
        None
    }

    /// Whether registrations may be kept.
    fn keeps(&self) -> bool {
        self.shared.monitor.is_some() || self.shared.registrar.follows()
    }

    /// Watches the memory of `len` bytes at `addr` for a registration that is not in the cache. Errors: EOPNOTSUPP: such
    /// memory cannot be watched, or registrations are not kept; EAGAIN: not now.
    pub(crate) fn watch_over(&self, addr: usize, len: usize) -> Result<Vigil<R>, Errno> {
        let (shared, never) = (&self.shared, Errno(libc::EOPNOTSUPP));
        if !self.keeps() || shared.mark.is_child() {
            return Err(never);
        }
        let pending = Pending::new(Span::pages(addr, len, shared.page).ok_or(never)?);
        let now = clock::now_ns();
        let begin = || {
            let begun = lock(&shared.index).begin_vigil(&pending, now);
            shared.monitor.iter().for_each(|monitor| monitor.await_reader());
            begun
        };
        let watched = shared.watch(pending.span, begin);
        if !matches!(watched, Ok(Watched::Yes | Watched::Shared | Watched::InVain)) {
            // Nothing is watched, so nothing is unwatched: it may be another user's.
            lock(&shared.index).end_vigil(&pending);
            let may = shared.monitor.as_ref().is_none_or(|m| m.may_watch(pending.span));
            return Err(if may { Errno(libc::EAGAIN) } else { never });
        }
        let vigil = Vigil { shared: shared.clone(), pending };
        // Otherwise the watch ends here.
        if watched == Ok(Watched::Yes) { Ok(vigil) } else { Err(Errno(libc::EAGAIN)) }
    }

    /// The device that it registers memory with.
    pub(crate) fn registrar(&self) -> &R {
        &self.shared.registrar
    }

    /// Most bytes that may be kept registered.
    pub(crate) fn limit(&self) -> usize {
        lock(&self.shared.index).limits.bytes
    }

    /// Number of changes that may have made a [`Vigil`] unsound. Reading it costs no system call.
    pub(crate) fn changes(&self) -> u64 {
        self.shared.changes.load(Ordering::Acquire)
    }

    /// Counts of what the cache has done so far.
    pub(crate) fn statistics(&self) -> Statistics {
        let elsewhere = self.shared.registrar.found();
        let index = lock(&self.shared.index);
        let (entries, entry_bytes) = index.size();
        let own = self.shared.counters.snapshot();
        let (hits, misses) = elsewhere.unwrap_or((own.hits, own.misses));
        Statistics {
            hits,
            misses,
            invalidations: index.invalidations,
            evictions: index.evictions,
            entries: entries as u64,
            entry_bytes: entry_bytes as u64,
            ..own
        }
    }

    /// The surroundings of a buffer to register instead of `want`, the pages that it touches.
    fn surroundings(&self, addr: usize, len: usize, want: Span) -> Option<Span> {
        let (start, end) = declared::around(addr, len)?;
        let from = start.max(addr - addr % BLOCK);
        let to = end.min((addr + len).checked_next_multiple_of(BLOCK)?);
        let span = Span::pages(from, to - from, self.shared.page)?;
        (span != want && span.len() <= self.limit() / SHARE).then_some(span)
    }

    /// Makes a new registration, of `wide` if that works, else of the pages `want`, and keeps it if possible. One that
    /// cannot be kept is of the `exact` bytes.
    fn miss(
        &self,
        (exact, want): (Span, Span),
        wide: Option<Span>,
        access: Access,
    ) -> Result<Lease<R>, Refusal> {
        // A device that pages on demand finds out at the transfer only that memory is read-only.
        let generous = match self.shared.registrar.follows() {
            true => access,
            false => access.union(self.shared.generous),
        };
        if let Some(wide) = wide {
            let register = || self.register_once(wide, generous);
            if let Some((Ok(entry), true)) = self.keep(wide, register) {
                count(&self.shared.counters.misses);
                return Ok(self.lease(entry));
            }
        }
        let register = || self.register(want, access, generous);
        let Some((made, listed)) = self.keep(want, register) else {
            return self.once(exact, access);
        };
        let entry = made?;
        count(if listed { &self.shared.counters.misses } else { &self.shared.counters.uncached });
        Ok(self.lease(entry))
    }

    /// Runs `register` while `span` is watched, and keeps the registration if possible. `None`: `span` cannot be
    /// watched.
    fn keep<E>(
        &self,
        span: Span,
        register: impl FnOnce() -> Result<Arc<Entry<R::Handle>>, E>,
    ) -> Option<Made<R::Handle, E>> {
        let shared = &*self.shared;
        let pending = Pending::new(span);
        // From here on, a change of the range is noted in `pending`, or shown by the mirror.
        let mirror = self.watch_for(&pending)?;
        let made = register();
        if let (Ok(entry), Some(mirror)) = (&made, mirror) {
            entry.set_mirror(mirror);
        }
        let mut index = lock(&shared.index);
        let unchanged = index.conclude(&pending);
        let listed = unchanged && made.as_ref().is_ok_and(|entry| index.insert(entry));
        let work = listed && index.has_dead();
        drop(index);
        if !listed {
            shared.unwatch(pending.unwatch());
        }
        if work {
            self.shared.bury(); // pinned memory stays within its limit
        }
        Some((made, listed))
    }

    /// Has the addresses of a new registration watched, and mirrors shared memory. `None`: they cannot be kept.
    fn watch_for(&self, pending: &Arc<Pending<R::Handle>>) -> Option<Option<Mirror>> {
        let shared = &*self.shared;
        let (span, now) = (pending.span, clock::now_ns());
        let watched = shared.watch_any(span, || lock(&shared.index).announce(pending, now));
        let error = match watched {
            Ok(Watched::Yes) => return Some(None),
            Ok(Watched::Shared) => match shared.mirror(span) {
                Ok(mirror) => return Some(Some(mirror)),
                Err(error) => Some(error),
            },
            Ok(_) => None,
            Err(error) => Some(error),
        };
        lock(&shared.index).conclude(pending);
        if matches!(watched, Ok(Watched::Shared | Watched::InVain)) {
            shared.unwatch(pending.unwatch());
        }
        if let Some(error) = error {
            self.tell_of(error);
        }
        None
    }

    /// A registration for this request alone, as far as this cache knows.
    fn once(&self, exact: Span, access: Access) -> Result<Lease<R>, Refusal> {
        let shares = self.shared.registrar.shares();
        // The same access for all, so that they find each other's.
        let generous = if shares { access.union(self.shared.generous) } else { access };
        let entry = self.register(exact, access, generous)?;
        if !shares {
            count(&self.shared.counters.uncached);
        }
        Ok(self.lease(entry))
    }

    /// A new registration, if there is room. Errors: as [`Registrar::register`].
    fn register_once(&self, span: Span, allowed: Access) -> Result<Arc<Entry<R::Handle>>, Errno> {
        let _shield = Shield::raise(); // drivers may write(2)
        let shared = &*self.shared;
        let handle = shared.registrar.register(span.start, span.len(), allowed)?;
        let account = Account::open(&shared.counters, span.len());
        Ok(Entry::leased(handle, account, span, allowed))
    }

    /// A new registration that allows `access`, and `generous` access where the memory permits it. If there is no room,
    /// idle ones are removed first.
    fn register(
        &self,
        span: Span,
        access: Access,
        generous: Access,
    ) -> Result<Arc<Entry<R::Handle>>, Refusal> {
        let register = |allowed| self.beside(span.len(), || self.register_once(span, allowed));
        let made = match register(generous) {
            Err(errno) if generous != access && !is_full(errno) => register(access), // read-only memory
            made => made,
        };
        made.map_err(|errno| if is_full(errno) { Refusal::NoRoom } else { Refusal::Device(errno) })
    }

    /// Runs `register`, which registers `len` bytes with the same device. If there is no room, idle registrations are
    /// removed, and it runs again. Errors: its own.
    pub(crate) fn beside<T>(
        &self,
        len: usize,
        register: impl Fn() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        for _ in 1..ATTEMPTS {
            match register() {
                Err(errno) if is_full(errno) && self.shared.let_go(len) => {}
                made => return made,
            }
        }
        register()
    }

    /// Logs once that some memory cannot be watched: another user watches it (EBUSY), it is a file (EINVAL), or the
    /// process has no more mappings to give (ENOMEM). The request does not fail.
    fn tell_of(&self, error: Errno) {
        if !self.shared.told.swap(true, Ordering::Relaxed) {
            log::info(format_args!(
                "some registrations are not cached: their memory cannot be watched: {error}"
            ));
        }
    }

    fn lease(&self, entry: Arc<Entry<R::Handle>>) -> Lease<R> {
        Lease { shared: self.shared.clone(), entry }
    }
}

/// The device has no room for a registration.
fn is_full(errno: Errno) -> bool {
    matches!(errno.0, libc::ENOMEM | libc::EAGAIN)
}

impl<R: Registrar> Lease<R> {
    /// The device's registration.
    pub(crate) fn handle(&self) -> &R::Handle {
        &self.entry.handle
    }
}

impl<R: Registrar> Drop for Lease<R> {
    fn drop(&mut self) {
        if self.shared.mark.is_child() {
            std::mem::forget(self.entry.clone()); // the parent deregisters it
            return;
        }
        let released = lock(&self.shared.index).release(self.entry.clone());
        self.shared.settle(released); // deregisters, with the one in `self`
    }
}

impl<R: Registrar> Drop for Cache<R> {
    fn drop(&mut self) {
        if self.shared.mark.is_child() {
            std::mem::forget((self.watched.take(), self.shared.clone())); // the parent's
            return;
        }
        self.shared.closed.store(true, Ordering::Release);
        lock(&self.shared.index).clear();
        self.shared.bury();
        let Some((subscriber, worker)) = self.watched.take() else { return };
        if let Some(monitor) = &self.shared.monitor {
            monitor.unsubscribe(&subscriber);
        }
        drop(subscriber);
        worker.stop(&self.shared);
        self.shared.bury();
    }
}
