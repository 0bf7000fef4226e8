//! The thread behind FI_PROGRESS_AUTO and FI_WAIT_MUTEX_COND: progresses a domain's endpoints while
//! the application does something else, and signals conditions.
//!
//! While the application polls an endpoint, the thread only looks every few milliseconds whether it
//! still does. Once it stops, the thread takes that endpoint over: it sleeps until a doorbell rings.

use super::cq::CompletionQueue;
use super::domain::{Condition, Domain};
use super::endpoint::Endpoint;
use crate::sys::event::{Doorbell, Epoll};
use crate::sys::thread::Thread;
use crate::telemetry::log;
use libfabric_sys::FI_ENOMEM;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// How long the application must not have polled an endpoint before the thread takes it over, milliseconds.
const WATCH_MS: i32 = 2;
/// Longest sleep, milliseconds.
const SLEEP_MS: i32 = 500;
/// Stack of the thread, bytes.
const STACK: usize = 256 * 1024;

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    epoll: Epoll,
    bell: Doorbell,
}

/// The thread of one domain.
#[derive(Debug)]
pub(crate) struct ProgressThread {
    shared: Arc<Shared>,
    handle: Mutex<Option<Thread>>,
    owner: i32,
}

impl ProgressThread {
    /// Errors: ENOMEM, also when the system has no more threads; EMFILE, ENFILE.
    pub(crate) fn start(domain: &Arc<Domain>) -> Result<Self, i32> {
        let epoll = Epoll::new().map_err(|e| e.0)?;
        let bell = Doorbell::new().map_err(|e| e.0)?;
        epoll.add(bell.fd(), 0).map_err(|e| e.0)?;
        let shared = Arc::new(Shared { stop: AtomicBool::new(false), epoll, bell });
        let mine = shared.clone();
        let domain = DomainPtr(Arc::as_ptr(domain));
        let handle = Thread::start(c"udrv-progress", STACK, move || run(&mine, &domain))
            .map_err(|e| {
                // Not -FI_EAGAIN, which asks to try again.
                log::warn(format_args!(
                    "no thread for FI_PROGRESS_AUTO or FI_WAIT_MUTEX_COND: {e}; raise the limit of processes (ulimit -u, or the container's), or use FI_PROGRESS_MANUAL"
                ));
                FI_ENOMEM
            })?;
        log::info(format_args!("progress thread started"));
        let owner = crate::sys::process::pid();
        Ok(Self { shared, handle: Mutex::new(Some(handle)), owner })
    }

    /// Makes the thread look now.
    pub(crate) fn kick(&self) {
        self.shared.bell.ring();
    }

    /// An endpoint's descriptor wakes the thread.
    pub(crate) fn watch(&self, fd: i32, token: u64) {
        // SAFETY: the endpoint's descriptor is open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        if let Err(e) = self.shared.epoll.add(fd, token) {
            log::limited!(cause: e.0, "progress thread cannot watch an endpoint: {e}");
        }
        self.kick();
    }

    pub(crate) fn unwatch(&self, fd: i32) {
        // SAFETY: the endpoint's descriptor is open during the call.
        self.shared.epoll.remove(unsafe { BorrowedFd::borrow_raw(fd) });
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(self) {
        self.shared.stop.store(true, Ordering::Release);
        self.kick();
        let handle = self.handle.lock().ok().and_then(|mut slot| slot.take());
        // A forked child has no such thread to wait for; nor can the thread wait for itself.
        if self.owner != crate::sys::process::pid() {
            std::mem::forget(handle);
        } else if let Some(handle) = handle {
            if !handle.is_current() {
                handle.join();
            }
        }
    }
}

/// The domain that owns the thread: it joins the thread before it goes away, and an owning pointer
/// here would make closing it look busy.
struct DomainPtr(*const Domain);

// SAFETY: a domain may be used from any thread under its lock.
unsafe impl Send for DomainPtr {}

fn run(shared: &Shared, domain: &DomainPtr) {
    let mut tokens = [0u64; 8];
    while !shared.stop.load(Ordering::Acquire) {
        // SAFETY: see DomainPtr.
        let timeout = turn(unsafe { &*domain.0 });
        let result = shared.epoll.wait(&mut tokens, timeout);
        if result.is_ok_and(|n| n > 0) {
            shared.bell.silence();
        }
    }
}

/// One turn; returns how long to sleep.
fn turn(domain: &Domain) -> i32 {
    let guard = domain.lock.lock();
    // SAFETY: the guard is of this domain; the copies end the borrow.
    let (endpoints, conditions) = unsafe {
        let state = domain.state(&guard);
        state.conditions.retain(|c| match c {
            Condition::Queue(cq) => cq.strong_count() > 0,
            Condition::Counter(cntr) => cntr.strong_count() > 0,
        });
        (state.endpoints.clone(), state.conditions.clone())
    };
    // SAFETY: endpoints leave the domain's list under the lock before they go away.
    let endpoints = endpoints.iter().map(|endpoint: &*const Endpoint| unsafe { &**endpoint });
    let mut timeout = SLEEP_MS;
    for endpoint in endpoints {
        if endpoint.take_polled(&guard) {
            timeout = timeout.min(WATCH_MS);
            continue;
        }
        let moved = endpoint.progress_quietly(&guard);
        if moved > 0 || !endpoint.hand_to_thread(&guard) {
            timeout = 0;
        }
    }
    // Conditions are signalled without the lock: the application may hold the mutex.
    let waiters: Vec<_> = conditions
        .iter()
        .filter_map(|condition| match condition {
            Condition::Queue(cq) => take_queue_cond(cq.upgrade()?, &guard),
            Condition::Counter(cntr) => {
                let cntr = cntr.upgrade()?;
                // SAFETY: the guard is of the counter's domain; one short step.
                unsafe { cntr.state.get(&guard) }.source.take_cond()
            }
        })
        .collect();
    drop(guard);
    for waiter in waiters {
        waiter.broadcast();
    }
    timeout
}

fn take_queue_cond(
    cq: Arc<CompletionQueue>,
    guard: &super::lock::Guard<'_>,
) -> Option<Arc<super::wait::Waiter>> {
    // SAFETY: the guard is of the queue's domain; one short step.
    unsafe { cq.state.get(guard) }.source.take_cond()
}
