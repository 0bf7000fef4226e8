//! Progress of endpoints. The objects that an endpoint reports to progress it in calls of the application. The
//! progress thread, for FI_PROGRESS_AUTO and FI_WAIT_MUTEX_COND, progresses a domain's endpoints while the
//! application does something else, and signals conditions.
//!
//! While the application polls an endpoint, the thread only checks every few milliseconds that it still
//! does. Once it stops, the thread takes the endpoint over and sleeps until a doorbell rings.

use super::lock::Guard;
use crate::protocol::{Failure, Report};
use crate::sys::Errno;
use crate::sys::event::{Doorbell, Epoll};
use crate::sys::process::Home;
use crate::sys::thread::Thread;
use crate::telemetry::log;
use libfabric_sys::FI_ENOMEM;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// On behalf of which caller a turn of progress is made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// The application polls.
    Application,
    Others,
}

/// An endpoint, as its domain and the objects that it reports to see it. It is in their lists as a pointer, and
/// removes itself under the domain's lock before it is freed. The guards belong to that domain.
pub(super) trait Progress {
    /// A turn of progress. Returns how much moved.
    fn progress(&self, by: By, guard: &Guard<'_>) -> usize;
    /// Whether the application has polled since the last call of this.
    fn take_polled(&self, guard: &Guard<'_>) -> bool;
    /// A waiter is about to sleep: false if there is work.
    fn arm(&self, guard: &Guard<'_>) -> bool;
    /// As `arm`, for a waiter that is already counted.
    fn rearm(&self, guard: &Guard<'_>) -> bool;
    /// A waiter woke up.
    fn disarm(&self, guard: &Guard<'_>);
    /// Wakes those that sleep on it if a call has left work that nothing else would wake them for.
    fn rouse(&self, guard: &Guard<'_>);
    /// The progress thread is about to sleep on it: false if there is work.
    fn hand_to_thread(&self, guard: &Guard<'_>) -> bool;
    /// The descriptor that wakes its waiters. Errors: EINVAL before it is enabled; EMFILE, ENFILE, ENOMEM.
    fn wait_fd(&self, guard: &Guard<'_>) -> Result<RawFd, i32>;
    /// Ends direct RMA to a region: peers stop once this has returned and all endpoints have settled.
    fn revoke(&self, region: u64, guard: &Guard<'_>);
    /// Whether no peer is in the middle of an access that it began before a `revoke`.
    fn is_settled(&self, insists: bool, guard: &Guard<'_>) -> bool;
    /// Whether it is bound to the address vector at this address.
    fn has_vector(&self, vector: *const (), guard: &Guard<'_>) -> bool;
    /// Completions and receives of the peer that address `from` stood for have address `to` from now on.
    fn rename_source(&self, from: u64, to: u64, guard: &Guard<'_>);
    /// Whether the queue has room for an operation that is reported so, or the endpoint for a receive: if not, those to other
    /// peers have none either. Pending operations are not counted: a short message makes none.
    fn has_room(&self, report: Report, receives: bool, guard: &Guard<'_>) -> bool;
    /// Reports an operation that failed before it was started.
    fn fail(&self, failure: &Failure, guard: &Guard<'_>);
}

/// Most turns for an endpoint that has work but does not reach it.
const TURNS_MAX: usize = 64;

/// Makes turns until something moves or no work is left, as not every turn polls everything. Returns how much moved.
pub(super) fn progress_for_others(endpoint: &dyn Progress, guard: &Guard<'_>) -> usize {
    let has_work = || {
        let idle = endpoint.arm(guard);
        if idle {
            endpoint.disarm(guard);
        }
        !idle
    };
    (0..TURNS_MAX)
        .take_while(|turn| *turn == 0 || has_work())
        .map(|_| endpoint.progress(By::Others, guard))
        .find(|moved| *moved > 0)
        .unwrap_or(0)
}

/// How long after the application's last poll of an endpoint the thread takes it over, milliseconds.
pub(super) const WATCH_MS: i32 = 2;
/// Longest sleep of the thread, milliseconds.
pub(super) const SLEEP_MS: i32 = 500;
/// Stack of the thread, bytes.
const STACK: usize = 256 * 1024;

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    epoll: Epoll,
    bell: Doorbell,
}

/// Wakes a progress thread, which may have ended.
#[derive(Clone, Debug)]
pub(super) struct Kick(Arc<Shared>);

impl Kick {
    pub(super) fn kick(&self) {
        self.0.bell.ring();
    }
}

/// The progress thread of one domain.
#[derive(Debug)]
pub(crate) struct ProgressThread {
    shared: Arc<Shared>,
    handle: Mutex<Option<Thread>>,
    owner: Home,
}

impl ProgressThread {
    /// Starts a thread that calls `turn`, which returns how long to sleep, milliseconds.
    /// Errors: ENOMEM, also when the system has no more threads; EMFILE, ENFILE.
    pub(super) fn start(turn: impl FnMut() -> i32 + Send + 'static) -> Result<Self, i32> {
        let epoll = Epoll::new().map_err(|e| e.0)?;
        let bell = Doorbell::new().map_err(|e| e.0)?;
        epoll.add(bell.fd(), 0).map_err(|e| e.0)?;
        let shared = Arc::new(Shared { stop: AtomicBool::new(false), epoll, bell });
        let mine = shared.clone();
        let handle = Thread::start(c"udrv-progress", STACK, move || run(&mine, turn))
            .map_err(|e| {
                // Not -FI_EAGAIN, which would ask the application to try again.
                log::warn(format_args!(
                    "no thread for FI_PROGRESS_AUTO or FI_WAIT_MUTEX_COND: {e}; raise the limit of processes (ulimit -u, or the container's), or use FI_PROGRESS_MANUAL"
                ));
                FI_ENOMEM
            })?;
        log::info(format_args!("progress thread started"));
        let owner = Home::here();
        Ok(Self { shared, handle: Mutex::new(Some(handle)), owner })
    }

    /// Wakes the thread.
    pub(crate) fn kick(&self) {
        self.shared.bell.ring();
    }

    /// What wakes the thread, for those that do not know its domain.
    pub(super) fn to_kick(&self) -> Kick {
        Kick(self.shared.clone())
    }

    /// Lets an endpoint's descriptor wake the thread.
    pub(crate) fn watch(&self, fd: Result<i32, i32>, token: u64) {
        let watched = fd.map_err(Errno).and_then(|fd| {
            // SAFETY: the endpoint's descriptor is open during the call.
            self.shared.epoll.add(unsafe { BorrowedFd::borrow_raw(fd) }, token)
        });
        if let Err(e) = watched {
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
        // A forked child has no such thread to join, and the thread cannot join itself.
        if !self.owner.is_here() {
            std::mem::forget(handle);
        } else if let Some(handle) = handle {
            if !handle.is_current() {
                handle.join();
            }
        }
    }
}

fn run(shared: &Shared, mut turn: impl FnMut() -> i32) {
    let mut tokens = [0u64; 8];
    while !shared.stop.load(Ordering::Acquire) {
        let timeout = turn();
        let result = shared.epoll.wait(&mut tokens, timeout);
        if result.is_ok_and(|n| n > 0) {
            shared.bell.silence();
        }
    }
}
