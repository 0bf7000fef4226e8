//! Learns from the kernel which addresses change their mappings, and tells the caches of this process.
//!
//! A process has one monitor, because a page can be watched by only one userfaultfd. Its thread reads an event and
//! removes the registrations of those addresses from every cache. The thread that made the change waits in the kernel
//! until the event is read, and may hold any lock of the application or of its allocator. These rules follow:
//!
//! * The monitor's thread never allocates, frees, unmaps or deregisters. It takes no lock under which another thread
//!   does: none allocates or frees under `reading`, `subscribers`, or the lock of an index (`index.rs`).
//! * Locks are taken in the order `watching`, `reading`, `subscribers`, index.
//!
//! # When a registration may be used
//!
//! The kernel unmaps first and reports later. Meanwhile another thread may get the same addresses from mmap, fill them,
//! and send from them. A cache that relied on events alone would find the registration of the old pages. But the kernel
//! counts changes from their beginning until the changing thread need not wait any more, and
//! [`Userfaultfd::is_changing`] reads that count. So a cache asks [`Monitor::is_settled`] *before* its look-up. It uses
//! what it finds only if no change is in progress, and no event that was read has still to be applied. Then every
//! change that ended before the question has been applied. `tests/races.rs` stops all threads at each of these points.
//!
//! A discard (madvise) is the reverse: the kernel reports it first, and takes the pages away later, at a time that
//! cannot be observed. A registration made in between would be stale, so the index keeps none for those addresses for a
//! second ([`super::index::QUARANTINE_NS`]).
//!
//! # When a peer may use a registration
//!
//! A peer whose device reaches a region asks nobody. It must not do so once the application has told it of new memory at
//! the region's addresses. So before the monitor reads an event, which lets the changing thread go on, it alarms all
//! domains of the process ([`crate::sys::alarm`]). The next data call of each first waits until what was read is applied,
//! and ends the registrations of the vigils that saw a change ([`super::settle`]). The worker does the same on its own,
//! because the application may tell the peer without this provider.

use super::span::Span;
use crate::sys::event::{Doorbell, wait_any};
use crate::sys::mappings::{Kind, Mapping, Mappings};
use crate::sys::mirror::{Mirror, PageMap};
use crate::sys::per_process::PerProcess;
use crate::sys::process::ForkMark;
use crate::sys::thread::Thread;
use crate::sys::userfaultfd::{Event, Userfaultfd};
use crate::sys::{Errno, alarm};
use crate::telemetry::log;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Caches for which there is room at first: one per protection domain.
const SUBSCRIBERS: usize = 16;
/// How often [`Monitor::is_settled`] asks again while a change is in progress: about 10 µs.
const TRIES: usize = 40;
const STACK: usize = 128 * 1024;

/// A change of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// They were unmapped or replaced.
    Gone,
    /// Their pages will be discarded.
    Discarded,
}

/// Result of a request to watch a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watched {
    /// It is watched.
    Yes,
    /// It is watched, and is shared memory: other processes can change its pages without an event.
    Shared,
    /// Nothing was done.
    No,
    /// The range is watched, at least in part, but its memory cannot be kept.
    InVain,
}

/// A cache, as the monitor sees it. Only `end_void` may allocate or free memory.
pub(super) trait Subscriber: Send + Sync {
    /// Removes all registrations that overlap `span`.
    fn on_change(&self, span: Span, change: Change);

    /// Whether the cache has, or makes, a registration that a change in `span` would end.
    fn needs(&self, span: Span) -> bool;

    /// Whether the cache watches over memory that devices of peers may reach.
    fn has_vigils(&self) -> bool;

    /// Ends their reach of memory that has changed.
    fn end_void(&self);
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Inner {
    userfaultfd: Userfaultfd,
    mappings: Mappings,
    pages: Result<PageMap, Errno>,
    mark: ForkMark,
    stop: Doorbell,
    stopping: AtomicBool,
    /// Held while ranges are announced and registered, and while unneeded ones are found and unregistered, so that
    /// neither undoes the other.
    watching: Mutex<()>,
    /// Held from before an event is read until it has been applied.
    reading: Mutex<()>,
    /// True while `reading` is held for that purpose.
    applying: AtomicBool,
    subscribers: Mutex<Vec<Arc<dyn Subscriber>>>,
}

/// The monitor of this process.
pub(crate) struct Monitor {
    // The fields are dropped in this order.
    inner: Arc<Inner>,
    thread: Option<Ending>,
}

/// Joins the thread on drop, after the monitor's reference to the userfaultfd was released. A thread that ends
/// discards its stack. The stack may be next to a buffer, in one watched mapping: then the thread waits until its event
/// is read, or the userfaultfd ends.
struct Ending(Option<Thread>);

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            thread.join();
        }
    }
}

static SHARED: PerProcess<Weak<Monitor>> = PerProcess::new();

/// What the system lacks for a monitor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lack {
    pub(super) what: &'static str,
    pub(super) error: Errno,
}

impl std::fmt::Display for Lack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.what, self.error)
    }
}

impl Lack {
    #[cfg(test)]
    pub(crate) fn for_test(what: &'static str, error: Errno) -> Self {
        Self { what, error }
    }

    /// Warns that nothing is kept because of it.
    #[cold]
    pub(crate) fn tell(&self) {
        let forbidden = matches!(self.error.0, libc::EPERM | libc::EACCES | libc::ENOSYS);
        let remedy = if self.what == USERFAULTFD && forbidden { REMEDY } else { "" };
        log::limited!(
            cause: self.error.0,
            "registrations with RDMA devices are not cached, and each long message makes its own, which is slower ({self}). {remedy}FI_UDRV_CACHE=off says that this is wanted"
        );
    }
}

const USERFAULTFD: &str = "userfaultfd";
/// What makes it work for a user.
const REMEDY: &str = "Allow userfaultfd: `sysctl -w vm.unprivileged_userfaultfd=1`, or in a container a seccomp profile that has it. ";

impl Monitor {
    /// The monitor of this process, which lives as long as it is referenced. Error: what the system lacks.
    pub(crate) fn shared() -> Result<Arc<Self>, Lack> {
        // Other threads wait: too many monitors would start at once.
        let mut shared = SHARED.lock();
        if let Some(monitor) = shared.upgrade() {
            return Ok(monitor);
        }
        let new = Self::start(Mappings::open).map_err(|(what, error)| Lack { what, error })?;
        let new = Arc::new(new);
        *shared = Arc::downgrade(&new);
        Ok(new)
    }

    fn start(
        mappings: impl FnOnce() -> Result<Mappings, Errno>,
    ) -> Result<Self, (&'static str, Errno)> {
        let inner = Arc::new(Inner {
            userfaultfd: Userfaultfd::open().map_err(|e| {
                (if e.0 == libc::EDEADLK { "userfaultfd under valgrind" } else { USERFAULTFD }, e)
            })?,
            mappings: mappings().map_err(|e| ("/proc/self/maps", e))?,
            pages: PageMap::open(),
            mark: ForkMark::new().map_err(|e| ("MADV_WIPEONFORK", e))?,
            stop: Doorbell::new().map_err(|e| ("eventfd", e))?,
            stopping: AtomicBool::new(false),
            watching: Mutex::new(()),
            reading: Mutex::new(()),
            applying: AtomicBool::new(false),
            subscribers: Mutex::new(Vec::with_capacity(SUBSCRIBERS)),
        });
        let mine = inner.clone();
        let thread = Thread::start(c"udrv-monitor", STACK, move || mine.run());
        let thread = thread.map_err(|e| ("thread", e))?;
        Ok(Self { inner, thread: Some(Ending(Some(thread))) })
    }

    /// A monitor of its own for a test, which reads the mappings as given.
    #[cfg(test)]
    pub(super) fn for_test(mappings: Mappings) -> Option<Arc<Self>> {
        Self::start(|| Ok(mappings)).map(Arc::new).ok()
    }

    /// Keeps events from being read, as if the monitor's thread got no processor.
    #[cfg(test)]
    pub(super) fn stall(&self) -> MutexGuard<'_, ()> {
        lock(&self.inner.reading)
    }

    /// The kernel's count, for tests.
    #[cfg(test)]
    pub(super) fn is_changing(&self) -> bool {
        self.inner.userfaultfd.is_changing()
    }

    /// Reports changes to `cache` from now on.
    pub(super) fn subscribe(&self, cache: Arc<dyn Subscriber>) {
        let mut more = Vec::new();
        loop {
            let mut caches = lock(&self.inner.subscribers);
            if more.capacity() > caches.capacity() {
                more.append(&mut caches); // has room for them
                std::mem::swap(&mut more, &mut caches);
            }
            if caches.len() < caches.capacity() {
                return caches.push(cache);
            }
            let room = 2 * caches.capacity();
            drop(caches);
            more = Vec::with_capacity(room); // outside of the lock
        }
    }

    /// Ends the reports to `cache`.
    pub(super) fn unsubscribe(&self, cache: &Arc<dyn Subscriber>) {
        let mut caches = lock(&self.inner.subscribers);
        let place = caches.iter().position(|other| Arc::ptr_eq(other, cache));
        let gone = place.map(|place| caches.swap_remove(place));
        drop(caches);
        drop(gone); // outside of the lock
    }

    /// The monitor of this process, if there is one.
    pub(super) fn known() -> Option<Arc<Self>> {
        SHARED.known()?.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Ends the registrations of all vigils whose memory has changed, as far as changes were read.
    pub(super) fn settle(&self) {
        self.inner.await_applied();
        let mut caches = Vec::new();
        loop {
            let known = lock(&self.inner.subscribers);
            if known.len() <= caches.capacity() {
                caches.extend(known.iter().cloned()); // has room for them
                break;
            }
            let room = known.len();
            drop(known);
            caches.reserve(room); // outside of the lock
        }
        caches.iter().for_each(|cache| cache.end_void());
    }

    /// The thread that reads events after this knows of a vigil that has begun before, and alarms.
    pub(super) fn await_reader(&self) {
        drop(lock(&self.inner.reading));
    }

    /// Whether all changes that ended before this call have been applied. If not, a change is in progress, and no entry
    /// of a cache may be used. Costs about two system calls, and never waits long.
    pub(super) fn is_settled(&self) -> bool {
        for _ in 0..TRIES {
            if !self.inner.userfaultfd.is_changing() {
                // A change that is no longer counted had its event read, after `applying` was set.
                fence(Ordering::Acquire);
                self.inner.await_applied();
                return true;
            }
            self.inner.apply_events();
            std::hint::spin_loop();
        }
        false
    }

    /// Calls `announce`, and watches `span` if that returns true. Later changes are noted in what was announced. Only
    /// memory that no other process can change is watched: the kernel sends no event if a file is truncated or gets a
    /// hole (by any process), or if System V memory is detached. Errors: those of [`Userfaultfd::register`].
    ///
    /// Mappings are watched as a whole: to watch a part splits the mapping, and mremap(2) cannot resize both parts at
    /// once, so the application would get an EFAULT that it did not get before.
    pub(super) fn watch(
        &self,
        span: Span,
        announce: impl FnOnce() -> bool,
    ) -> Result<Watched, Errno> {
        self.watch_one_of(&[Kind::Private], span, announce)
    }

    /// As [`Monitor::watch`], of shared memory too, for which the caller needs a [`Monitor::mirror`].
    pub(super) fn watch_any(
        &self,
        span: Span,
        announce: impl FnOnce() -> bool,
    ) -> Result<Watched, Errno> {
        self.watch_one_of(&[Kind::Private, Kind::Shared], span, announce)
    }

    fn watch_one_of(
        &self,
        kinds: &[Kind],
        span: Span,
        announce: impl FnOnce() -> bool,
    ) -> Result<Watched, Errno> {
        let memory = || self.inner.memory(span).filter(|(_, kind)| kinds.contains(kind));
        let Some((whole, _)) = memory() else { return Ok(Watched::No) };
        {
            let _held = lock(&self.inner.watching);
            if !announce() {
                return Ok(Watched::No);
            }
            // The kernel refuses files that are not in memory, and System V memory.
            self.inner.userfaultfd.register(whole.start, whole.end)?;
        }
        // Checked again now that it is watched: it may have been another mapping before.
        Ok(match memory() {
            Some((_, Kind::Shared)) => Watched::Shared,
            Some(_) => Watched::Yes,
            None => Watched::InVain,
        })
    }

    /// A mirror of watched shared memory, which shows changes without an event. The caller holds no lock. Errors: those
    /// of [`Mirror::of`], and of opening the page map.
    pub(super) fn mirror(&self, span: Span) -> Result<Mirror, Errno> {
        let mirror =
            Mirror::of(span.start, span.len(), self.inner.pages.as_ref().map_err(|e| *e)?)?;
        // It is watched as what it mirrors, in vain.
        let (start, end) = mirror.range();
        self.inner.unregister(Span { start, end });
        Ok(mirror)
    }

    /// Whether no memory in `span` is of a kind that is never watched. Holes, and what the kernel does not tell, pass.
    pub(super) fn may_watch(&self, span: Span) -> bool {
        let mut may = true;
        let show = |mapping: Mapping| may &= mapping.kind == Kind::Private;
        let _ = self.inner.mappings.each(span.start, span.end, show);
        may
    }

    /// Stops watching the mappings of `span`, except those in which a cache needs an address.
    pub(super) fn unwatch(&self, span: Span) {
        let _held = lock(&self.inner.watching);
        let _ = self.inner.mappings.each(span.start, span.end, |mapping| {
            let whole = Span { start: mapping.start, end: mapping.end };
            if mapping.kind != Kind::Copy && !self.inner.is_needed(whole) {
                self.inner.unregister(whole);
            }
        });
    }
}

impl Inner {
    fn run(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            // A signal or a lack of memory ends the wait early: the loop asks again.
            let ready = wait_any([self.userfaultfd.fd(), self.stop.fd()], -1);
            if let Ok([true, _]) = ready {
                self.apply_events();
            }
        }
    }

    /// Waits until the events that were read have been applied.
    fn await_applied(&self) {
        if self.applying.load(Ordering::Acquire) {
            drop(lock(&self.reading));
        }
    }

    /// Reads the pending events and applies them. `is_settled` waits for that.
    fn apply_events(&self) {
        let _held = lock(&self.reading);
        self.applying.store(true, Ordering::SeqCst); // before read(): see `is_settled`
        if lock(&self.subscribers).iter().any(|cache| cache.has_vigils()) {
            alarm::raise(); // before read() as well
        }
        let mut events = [Event::Other(0); 16];
        while let Ok(n @ 1..) = self.userfaultfd.read(&mut events) {
            for event in events.iter().take(n) {
                self.apply(*event);
            }
        }
        self.applying.store(false, Ordering::Release);
    }

    fn apply(&self, event: Event) {
        let (span, change) = match event {
            Event::Unmapped { start, end } => (Span { start, end }, Change::Gone),
            Event::Discarded { start, end } => (Span { start, end }, Change::Discarded),
            // Mirrored: nothing has changed.
            Event::Moved { len: 0, .. } => return,
            Event::Moved { from, to, len } => {
                self.tell(Span { start: to, end: to.saturating_add(len) }, Change::Gone);
                (Span { start: from, end: from.saturating_add(len) }, Change::Gone)
            }
            // No page is protected, so this is an error elsewhere; but the faulting thread must not wait forever.
            Event::Fault { address } => {
                let Some(page) = Span::pages(address, 1, crate::sys::process::page_size()) else {
                    return;
                };
                self.tell(page, Change::Gone);
                self.unregister(page);
                return;
            }
            Event::Other(_) => return,
        };
        self.tell(span, change);
    }

    fn tell(&self, span: Span, change: Change) {
        for cache in lock(&self.subscribers).iter() {
            cache.on_change(span, change);
        }
    }

    /// The mappings of `span`, as a whole, if there is no hole between them, all have the same kind, and only one is of
    /// a file. The kernel watches the mappings that exist: one that fills a hole later would not be watched.
    fn memory(&self, span: Span) -> Option<(Span, Kind)> {
        let (mut whole, mut all, mut next, mut first) = (span, true, span.start, None);
        let show = |mapping: Mapping| {
            whole = whole.hull(Span { start: mapping.start, end: mapping.end });
            let alone = first.is_none() || mapping.kind == Kind::Private;
            all &= mapping.start <= next
                && alone
                && *first.get_or_insert(mapping.kind) == mapping.kind;
            next = mapping.end;
        };
        let asked = self.mappings.each(span.start, span.end, show);
        let kind = first.filter(|_| asked.is_ok() && all && next >= span.end)?;
        Some((whole, kind))
    }

    fn is_needed(&self, span: Span) -> bool {
        lock(&self.subscribers).iter().any(|cache| cache.needs(span))
    }

    /// Fails for memory that was unmapped, or maps a file now, which need not be watched.
    fn unregister(&self, span: Span) {
        let _ = self.userfaultfd.unregister(span.start, span.end);
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // A forked child does not have the thread, and its doorbell is the parent's.
        if self.inner.mark.is_child() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.inner.stopping.store(true, Ordering::Release);
        self.inner.stop.ring();
    }
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Monitor")
    }
}
