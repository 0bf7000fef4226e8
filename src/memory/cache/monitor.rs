//! Learns from the kernel which addresses change what they map, and tells the caches of this process.
//!
//! There is one monitor in a process, because a page can be watched by one userfaultfd only. Its
//! thread reads an event and takes the registrations of those addresses out of every cache. Whoever
//! made the change waits in the kernel until the event is read, and may hold any lock of the
//! application or of its allocator while it waits. From this follows what may happen here:
//!
//! * The thread never allocates, frees, unmaps or deregisters, and takes no lock under which anybody
//!   does: nothing is allocated or freed under `reading`, `subscribers`, and the lock of an index
//!   (`index.rs`).
//! * Locks are taken in the order `watching`, `reading`, `subscribers`, index.
//!
//! # When a registration may be used
//!
//! The kernel unmaps first and tells later. Between the two, another thread may get the same
//! addresses from mmap, fill them, and send from them: a cache that relies on events alone finds the
//! registration of the pages that are gone. The kernel however counts who is on the way from the
//! beginning of a change to the end of his wait, and [`Userfaultfd::is_changing`] asks for that count.
//! So a cache asks [`Monitor::is_settled`] *before* it looks, and uses what it finds only if nobody is on
//! the way, and no event that was read is still to be applied. Then every change that ended before
//! the question has been applied. `tests/races.rs` stops the world at each of these points.
//!
//! A discard (madvise) is the other way round: the kernel tells first, and takes the pages away
//! later, at a time that nobody can see. What was registered in between would be stale, so the index
//! keeps nothing for those addresses for a second ([`super::index::QUARANTINE_NS`]).

use super::span::Span;
use crate::sys::Errno;
use crate::sys::event::{Doorbell, wait_any};
use crate::sys::mappings::{Mapping, Mappings};
use crate::sys::process::ForkMark;
use crate::sys::thread::Thread;
use crate::sys::userfaultfd::{Event, Userfaultfd};
use crate::telemetry::log;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Caches at once: one per protection domain.
const SUBSCRIBERS: usize = 64;
/// How often [`Monitor::is_settled`] looks again while somebody is on the way: some 10 µs.
const TRIES: usize = 40;
const STACK: usize = 128 * 1024;

/// What happened to addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// They map something else now, or nothing.
    Gone,
    /// Their pages will be discarded.
    Discarded,
}

/// What became of a wish to watch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watched {
    /// It is watched.
    Yes,
    /// Nothing was done.
    No,
    /// It is watched, in part at least, but what is there cannot be kept.
    InVain,
}

/// A cache, as the monitor sees it. Neither function may allocate or free.
pub(super) trait Subscriber: Send + Sync {
    /// Forgets all registrations that overlap `span`.
    fn on_change(&self, span: Span, change: Change);

    /// Whether it has, or makes, a registration that must go when anything in `span` changes.
    fn needs(&self, span: Span) -> bool;
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Inner {
    userfaultfd: Userfaultfd,
    mappings: Mappings,
    mark: ForkMark,
    stop: Doorbell,
    stopping: AtomicBool,
    /// Held while ranges are announced and registered, and while what is no longer needed is found
    /// and unregistered, so that neither undoes the other.
    watching: Mutex<()>,
    /// Held from before an event is read until it is applied.
    reading: Mutex<()>,
    /// True while `reading` is held for that.
    applying: AtomicBool,
    subscribers: Mutex<[Option<Arc<dyn Subscriber>>; SUBSCRIBERS]>,
}

/// The monitor of this process.
pub(crate) struct Monitor {
    // They go in this order.
    inner: Arc<Inner>,
    thread: Option<Ending>,
}

/// Waits for the end of the thread, once nobody else has the userfaultfd. A thread discards its stack in
/// the end, and where a buffer of the application lies beside it, both are one mapping that may
/// be watched: then this waits for somebody to read of it, or for the end of the userfaultfd.
struct Ending(Option<Thread>);

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            thread.join();
        }
    }
}

static SHARED: Mutex<Weak<Monitor>> = Mutex::new(Weak::new());

impl Monitor {
    /// The one of this process, which lives as long as somebody has it. `None` where the system
    /// allows none, or not all of what is needed; the log says why, once a call.
    pub(crate) fn shared() -> Option<Arc<Self>> {
        let usable = |monitor: &Arc<Self>| !monitor.inner.mark.is_child();
        let there = lock(&SHARED).upgrade();
        if let Some(monitor) = there {
            if usable(&monitor) {
                return Some(monitor);
            }
        }
        let new = Self::start(Mappings::open).map(Arc::new);
        let new = new.inspect_err(|(what, error)| {
            log::info(format_args!(
                "registrations are not cached, but made for each use: {what}: {error}"
            ));
        });
        let new = new.ok()?;
        let mut slot = lock(&SHARED);
        match slot.upgrade().filter(usable) {
            Some(other) => {
                drop(slot); // ours ends, outside of the lock
                Some(other)
            }
            None => {
                let old = std::mem::replace(&mut *slot, Arc::downgrade(&new));
                drop(slot);
                drop(old);
                Some(new)
            }
        }
    }

    fn start(
        mappings: impl FnOnce() -> Result<Mappings, Errno>,
    ) -> Result<Self, (&'static str, Errno)> {
        let inner = Arc::new(Inner {
            userfaultfd: Userfaultfd::open().map_err(|e| {
                (if e.0 == libc::EDEADLK { "userfaultfd under valgrind" } else { "userfaultfd" }, e)
            })?,
            mappings: mappings().map_err(|e| ("/proc/self/maps", e))?,
            mark: ForkMark::new().map_err(|e| ("MADV_WIPEONFORK", e))?,
            stop: Doorbell::new().map_err(|e| ("eventfd", e))?,
            stopping: AtomicBool::new(false),
            watching: Mutex::new(()),
            reading: Mutex::new(()),
            applying: AtomicBool::new(false),
            subscribers: Mutex::new([const { None }; SUBSCRIBERS]),
        });
        let mine = inner.clone();
        let thread = Thread::start(c"udrv-monitor", STACK, move || mine.run());
        let thread = thread.map_err(|e| ("thread", e))?;
        Ok(Self { inner, thread: Some(Ending(Some(thread))) })
    }

    /// One of its own for a test, with what is mapped read in the way given.
    #[cfg(test)]
    pub(super) fn for_test(mappings: Mappings) -> Option<Arc<Self>> {
        Self::start(|| Ok(mappings)).map(Arc::new).ok()
    }

    /// Keeps events from being read, as if the thread got no processor.
    #[cfg(test)]
    pub(super) fn stall(&self) -> MutexGuard<'_, ()> {
        lock(&self.inner.reading)
    }

    /// The tests' look at the kernel's count.
    #[cfg(test)]
    pub(super) fn is_changing(&self) -> bool {
        self.inner.userfaultfd.is_changing()
    }

    /// From now on `cache` hears of changes. False if there are too many caches.
    pub(super) fn subscribe(&self, cache: Arc<dyn Subscriber>) -> bool {
        let mut slots = lock(&self.inner.subscribers);
        match slots.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => {
                *slot = Some(cache);
                true
            }
            None => {
                drop(slots);
                drop(cache);
                false
            }
        }
    }

    /// `cache` hears no more.
    pub(super) fn unsubscribe(&self, cache: &Arc<dyn Subscriber>) {
        let mut slots = lock(&self.inner.subscribers);
        let slot =
            slots.iter_mut().find(|slot| slot.as_ref().is_some_and(|c| Arc::ptr_eq(c, cache)));
        let gone = slot.and_then(Option::take);
        drop(slots);
        drop(gone); // outside of the lock
    }

    /// Whether all changes that ended before this call have been applied. If not, somebody is still on
    /// the way, and nothing that a cache holds may be used. Two system calls or so, never a long wait.
    pub(super) fn is_settled(&self) -> bool {
        for _ in 0..TRIES {
            if !self.inner.userfaultfd.is_changing() {
                // Who is no longer on the way saw his event read, after `applying` was set.
                fence(Ordering::Acquire);
                if self.inner.applying.load(Ordering::Acquire) {
                    drop(lock(&self.inner.reading));
                }
                return true;
            }
            self.inner.apply_events();
            std::hint::spin_loop();
        }
        false
    }

    /// Calls `announce`, and watches `span` if that agrees. Whatever changes from then on reaches what
    /// was announced. Only private anonymous memory is watched: the kernel tells nobody when a file is
    /// truncated or gets a hole (by whatever process), nor when System V memory is detached. Errors: of
    /// [`Userfaultfd::register`].
    ///
    /// Mappings are watched as a whole, because watching a part makes two of one, and mremap(2) cannot
    /// resize both at once: the application would get EFAULT where it got none before.
    pub(super) fn watch(
        &self,
        span: Span,
        announce: impl FnOnce() -> bool,
    ) -> Result<Watched, Errno> {
        let Some(whole) = self.inner.anonymous(span) else { return Ok(Watched::No) };
        {
            let _held = lock(&self.inner.watching);
            if !announce() {
                return Ok(Watched::No);
            }
            self.inner.userfaultfd.register(whole.start, whole.end)?;
        }
        // Once more, now that it is watched: it may have been another mapping before.
        let still = self.inner.anonymous(span).is_some();
        Ok(if still { Watched::Yes } else { Watched::InVain })
    }

    /// Ceases to watch the mappings of `span`, except those in which any cache needs anything.
    pub(super) fn unwatch(&self, span: Span) {
        let _held = lock(&self.inner.watching);
        let _ = self.inner.mappings.each(span.start, span.end, |mapping| {
            let whole = Span { start: mapping.start, end: mapping.end };
            if mapping.anonymous && !self.inner.is_needed(whole) {
                self.inner.unregister(whole);
            }
        });
    }
}

impl Inner {
    fn run(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            // A signal or a lack of memory ends the wait early: the loop looks again.
            let ready = wait_any([self.userfaultfd.fd(), self.stop.fd()], -1);
            if let Ok([true, _]) = ready {
                self.apply_events();
            }
        }
    }

    /// Reads what there is, and has it applied before anybody may rely on it.
    fn apply_events(&self) {
        let _held = lock(&self.reading);
        self.applying.store(true, Ordering::SeqCst); // before read(): see `is_settled`
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
            Event::Moved { from, to, len } => {
                self.tell(Span { start: to, end: to.saturating_add(len) }, Change::Gone);
                (Span { start: from, end: from.saturating_add(len) }, Change::Gone)
            }
            // Nothing is protected, so this is somebody's error; who waits must not wait for ever.
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
        for cache in lock(&self.subscribers).iter().flatten() {
            cache.on_change(span, change);
        }
    }

    /// The mappings of `span` as a whole, if all are private anonymous memory.
    fn anonymous(&self, span: Span) -> Option<Span> {
        let (mut whole, mut all) = (span, true);
        let show = |mapping: Mapping| {
            whole = whole.hull(Span { start: mapping.start, end: mapping.end });
            all &= mapping.anonymous;
        };
        let asked = self.mappings.each(span.start, span.end, show);
        (asked.is_ok() && all).then_some(whole)
    }

    fn is_needed(&self, span: Span) -> bool {
        lock(&self.subscribers).iter().flatten().any(|cache| cache.needs(span))
    }

    /// What is no longer mapped, or maps a file by now, makes this an error, and need not be watched.
    fn unregister(&self, span: Span) {
        let _ = self.userfaultfd.unregister(span.start, span.end);
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // In a forked child there is no such thread, and its doorbell is the parent's.
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
