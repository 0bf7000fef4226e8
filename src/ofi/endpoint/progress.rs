//! Progress of an endpoint, for the objects that it reports to, for its domain, and for sleeping threads.

use super::state::{Endpoint, LOST_PEER, THREAD, WAITERS};
use crate::ofi::elsewhere::enabled;
use crate::ofi::eq::Join;
use crate::ofi::lock::Guard;
use crate::ofi::progress::{By, Progress};
use crate::protocol::{Engine, Failure, Host, Report};
use crate::transport::router::Router;
use libfabric_sys::FI_EINVAL;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Progress for Endpoint {
    fn progress(&self, by: By, guard: &Guard<'_>) -> usize {
        if by == By::Application {
            let state = self.state(guard);
            state.polled = true;
            if state.asleep & THREAD != 0 {
                self.take_from_thread(guard);
            }
        }
        self.bindings(guard).av.iter().for_each(|av| av.follow(guard));
        let mut host = self.host(guard);
        let moved = self.engine(guard).map_or(0, |engine| engine.progress(&mut host));
        self.domain.triggers.run_due(guard);
        self.rouse(guard);
        if by == By::Application && moved == 0 {
            let endpoints = enabled();
            let gives_way = |engine: &mut Engine<Router>| engine.iface().gives_way(endpoints);
            if self.engine(guard).is_some_and(gives_way) {
                self.domain.yields.store(true, Ordering::Relaxed);
            }
        }
        moved
    }

    fn take_polled(&self, guard: &Guard<'_>) -> bool {
        std::mem::take(&mut self.state(guard).polled)
    }

    fn arm(&self, guard: &Guard<'_>) -> bool {
        if self.rearm(guard) {
            self.state(guard).asleep += 1;
            return true;
        }
        false
    }

    fn rearm(&self, guard: &Guard<'_>) -> bool {
        let Some(engine) = self.engine(guard) else { return true };
        if self.has_work(engine, guard) || !engine.iface_mut().sleep() {
            self.wake_if_unwatched(guard);
            return false;
        }
        if let Some(page) = &mut self.state(guard).page {
            page.sleep();
            self.show(guard);
        }
        true
    }

    fn disarm(&self, guard: &Guard<'_>) {
        let state = self.state(guard);
        if state.asleep & WAITERS > 0 {
            state.asleep -= 1;
        }
        self.wake_if_unwatched(guard);
    }

    #[inline]
    fn rouse(&self, guard: &Guard<'_>) {
        if self.state(guard).asleep != 0 {
            self.rouse_sleepers(guard);
        }
    }

    fn hand_to_thread(&self, guard: &Guard<'_>) -> bool {
        // First, so that the transports are awake if it has work.
        self.state(guard).asleep &= !THREAD;
        let ready = self.rearm(guard);
        if ready {
            self.state(guard).asleep |= THREAD;
        }
        ready
    }

    fn wait_fd(&self, guard: &Guard<'_>) -> Result<RawFd, i32> {
        self.engine(guard).ok_or(FI_EINVAL)?.iface().wait_fd().map_err(|e| e.0)
    }

    fn revoke(&self, region: u64, guard: &Guard<'_>) {
        if let Some(engine) = self.engine(guard) {
            engine.revoke(region);
        }
    }

    fn is_settled(&self, insists: bool, guard: &Guard<'_>) -> bool {
        self.engine(guard).is_none_or(|engine| engine.is_settled(insists))
    }

    fn has_vector(&self, vector: *const (), guard: &Guard<'_>) -> bool {
        self.bindings(guard).av.as_ref().is_some_and(|bound| Arc::as_ptr(bound).cast() == vector)
    }

    fn rename_source(&self, from: u64, to: u64, guard: &Guard<'_>) {
        if let Some(engine) = self.engine(guard) {
            engine.rename_source(from, to, &mut self.host(guard));
        }
    }

    fn has_room(&self, report: Report, receives: bool, guard: &Guard<'_>) -> bool {
        let Some(engine) = self.engine(guard) else { return true };
        match receives {
            true => engine.room_for_receives(report.context()) > 0,
            false => self.host(guard).has_room_for_sends(report),
        }
    }

    fn fail(&self, failure: &Failure, guard: &Guard<'_>) {
        self.host(guard).fail(failure);
    }
}

impl Join for Endpoint {
    fn progress_joins(&self) -> bool {
        let guard = self.domain.lock.control();
        self.progress(By::Application, &guard);
        // The last message of a join that has ended here may be what another member waits for.
        self.state(&guard).groups.iter().any(|known| known.joining.is_some())
            || self.engine(&guard).is_some_and(|engine| engine.has_unsent_for_groups())
    }
}

impl Endpoint {
    /// Brings what other processes see of the endpoint up to date: it may do nothing for long.
    #[inline(never)]
    pub(super) fn show(&self, guard: &Guard<'_>) {
        let mut host = self.host(guard);
        if let Some(engine) = self.engine(guard) {
            engine.show(&mut host);
        }
    }

    /// Whether the endpoint has to be polled although nothing arrives.
    fn has_work(&self, engine: &Engine<Router>, guard: &Guard<'_>) -> bool {
        let asks = self.state(guard).asleep & LOST_PEER != 0;
        engine.is_busy()
            || !self.domain.triggers.are_idle(guard)
            || asks && self.host(guard).takes_arrivals()
    }

    #[cold]
    fn rouse_sleepers(&self, guard: &Guard<'_>) {
        let asleep = &mut self.state(guard).asleep;
        let lost = *asleep & LOST_PEER != 0;
        *asleep &= !LOST_PEER;
        if lost {
            self.bindings(guard).shared_receive.iter().for_each(|shared| shared.end_lost(guard));
        }
        if self.state(guard).asleep & !LOST_PEER == 0 {
            return;
        }
        if let Some(engine) = self.engine(guard).filter(|engine| self.has_work(engine, guard)) {
            engine.iface_mut().rouse();
        }
    }

    fn wake_if_unwatched(&self, guard: &Guard<'_>) {
        if self.state(guard).asleep & !LOST_PEER == 0 {
            if let Some(engine) = self.engine(guard) {
                engine.iface_mut().awake();
            }
            if let Some(page) = &mut self.state(guard).page {
                page.wake();
            }
        }
    }

    /// The application polls again: doorbells for the thread would only cost time.
    #[cold]
    fn take_from_thread(&self, guard: &Guard<'_>) {
        self.state(guard).asleep &= !THREAD;
        self.wake_if_unwatched(guard);
        if let Some(thread) = self.domain.thread() {
            thread.kick();
        }
    }
}
