//! The state that a cache shares with its leases, its monitor and the thread that deregisters.

use super::index::{Index, Released};
use super::monitor::{Change, Monitor, Subscriber, Watched, lock};
use super::registrar::{Access, Registrar};
use super::span::Span;
use super::statistics::Counters;
use crate::sys::cancel::Shield;
use crate::sys::mirror::Mirror;
use crate::sys::process::ForkMark;
use crate::sys::{Errno, clock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

pub(super) struct Shared<R: Registrar> {
    pub(super) registrar: R,
    pub(super) monitor: Option<Arc<Monitor>>,
    pub(super) mark: ForkMark,
    pub(super) page: usize,
    /// Access that registrations allow in addition to what is requested, where the memory permits it.
    pub(super) generous: Access,
    pub(super) index: Mutex<Index<R::Handle>>,
    /// Notified when the index has dead entries, or the worker has to end.
    pub(super) work: Condvar,
    pub(super) counters: Arc<Counters>,
    /// Watches (vigils) that have seen a change so far.
    pub(super) changes: AtomicU64,
    /// The cache is gone and leases remain: the last lease of an entry deregisters it.
    pub(super) closed: AtomicBool,
    pub(super) told: AtomicBool,
}

impl<R: Registrar> Shared<R> {
    /// Removes idle entries of at least `bytes` in all, and deregisters them. False: there were none.
    pub(super) fn let_go(&self, bytes: usize) -> bool {
        let mut gone = 0;
        while gone < bytes {
            let Some(more) = lock(&self.index).evict() else { break };
            gone += more;
        }
        let elsewhere = gone < bytes && self.registrar.let_go(bytes - gone);
        self.bury() || gone > 0 || elsewhere
    }

    /// Calls `announce`, and has `span` watched if that returns true: see [`Monitor::watch`]. Without a monitor nothing
    /// needs to be watched. Errors: those of [`Monitor::watch`].
    pub(super) fn watch(
        &self,
        span: Span,
        announce: impl FnOnce() -> bool,
    ) -> Result<Watched, Errno> {
        match &self.monitor {
            Some(monitor) => monitor.watch(span, announce),
            None if announce() => Ok(Watched::Yes),
            None => Ok(Watched::No),
        }
    }

    /// As [`Shared::watch`], of shared memory too: see [`Monitor::watch_any`].
    pub(super) fn watch_any(
        &self,
        span: Span,
        announce: impl FnOnce() -> bool,
    ) -> Result<Watched, Errno> {
        match &self.monitor {
            Some(monitor) => monitor.watch_any(span, announce),
            None => self.watch(span, announce),
        }
    }

    /// A mirror of watched shared memory. Errors: those of [`Monitor::mirror`].
    pub(super) fn mirror(&self, span: Span) -> Result<Mirror, Errno> {
        self.monitor.as_ref().ok_or(Errno(libc::EINVAL))?.mirror(span)
    }

    pub(super) fn unwatch(&self, spans: impl Iterator<Item = Span>) {
        if let Some(monitor) = &self.monitor {
            spans.for_each(|span| monitor.unwatch(span));
        }
    }

    /// Whether a thread deregisters what is dead.
    pub(super) fn has_worker(&self) -> bool {
        self.monitor.is_some() && !self.closed.load(Ordering::Acquire)
    }

    /// Follows the end of a lease.
    pub(super) fn settle(&self, released: Released<R::Handle>) {
        match released {
            Released::Held => (),
            Released::Dead if !self.has_worker() => {
                self.bury();
            }
            Released::Dead => self.work.notify_one(),
            Released::Yours(entry) => drop(entry), // deregisters
        }
    }

    /// Ends the registrations of all vigils that have seen a change, or waits until other threads have; the caller holds
    /// no lock. Returns whether there were any.
    pub(super) fn end_void(&self) -> bool {
        let mut any = false;
        loop {
            let void = lock(&self.index).next_void();
            let Some(vigil) = void else { return any };
            let _shield = Shield::raise(); // drivers may write(2)
            *lock(&vigil.held) = None;
            lock(&self.index).note_ended(&vigil);
            any = true;
        }
    }

    /// Deregisters all dead entries, and does as [`Self::end_void`]; the caller holds no lock. Returns whether there were
    /// any.
    pub(super) fn bury(&self) -> bool {
        let _shield = Shield::raise(); // drivers may write(2)
        let mut any = self.end_void();
        loop {
            let dead = lock(&self.index).next_dead();
            let Some(entry) = dead else { return any };
            let unwatch = entry.unwatch();
            drop(entry);
            self.unwatch(unwatch);
            // A registration that peers use ends before more of those that nobody uses.
            self.end_void();
            any = true;
        }
    }
}

impl<R: Registrar> Subscriber for Shared<R> {
    fn on_change(&self, span: Span, change: Change) {
        let mut index = lock(&self.index);
        let work = index.change(span, change, clock::now_ns());
        self.changes.store(index.disturbed, Ordering::Release);
        drop(index);
        if work {
            self.work.notify_one();
        }
    }

    fn needs(&self, span: Span) -> bool {
        lock(&self.index).needs(span)
    }

    fn has_vigils(&self) -> bool {
        lock(&self.index).has_vigils()
    }

    fn end_void(&self) {
        if !self.mark.is_child() {
            Self::end_void(self);
        }
    }
}
