//! Wait objects: the kinds of `FI_WAIT_*`, built from one epoll set and one doorbell.

use super::lock::Guard;
use super::progress::Kick;
use crate::sys::Errno;
use crate::sys::event::{Doorbell, Epoll, wait_readable};
use crate::telemetry::log;
use libfabric_sys::{
    FI_EINVAL, FI_ENOSYS, FI_GETWAIT, FI_GETWAITOBJ, FI_WAIT_FD, FI_WAIT_MUTEX_COND, FI_WAIT_NONE,
    FI_WAIT_POLLFD, FI_WAIT_SET, FI_WAIT_UNSPEC, FI_WAIT_YIELD, fi_mutex_cond, fi_wait_obj,
};
use once_cell::sync::OnceCell;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::fmt::Debug;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

/// A queue, a counter or a set of them that an application waits for.
pub(crate) trait Waitable: Debug + Send + Sync {
    /// Prepares for sleep (fi_trywait); false if there is an event to report.
    fn try_wait(&self) -> bool;
    /// Ends what `try_wait` began.
    fn end_wait(&self) {}
}

/// What may have a condition that a progress thread signals.
pub(crate) trait Conditional: Debug + Send + Sync {
    /// Takes the waiter whose condition must be signalled now. The guard belongs to the thread's domain.
    fn take_condition(&self, guard: &Guard<'_>) -> Option<Arc<Waiter>>;
}

/// The kinds of wait objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitKind {
    /// A descriptor, or a blocking call.
    Fd,
    /// A pthread mutex and condition.
    MutexCond,
    /// A blocking call that only yields the processor.
    Yield,
}

impl WaitKind {
    /// From an attribute; `None` for FI_WAIT_NONE. Errors: ENOSYS for FI_WAIT_POLLFD, EINVAL.
    pub(crate) fn from_attr(object: fi_wait_obj) -> Result<Option<Self>, i32> {
        match object {
            FI_WAIT_NONE => Ok(None),
            FI_WAIT_UNSPEC | FI_WAIT_FD | FI_WAIT_SET => Ok(Some(Self::Fd)),
            FI_WAIT_MUTEX_COND => Ok(Some(Self::MutexCond)),
            FI_WAIT_YIELD => Ok(Some(Self::Yield)),
            FI_WAIT_POLLFD => Err(FI_ENOSYS),
            _ => Err(FI_EINVAL),
        }
    }

    fn to_attr(self) -> fi_wait_obj {
        match self {
            Self::Fd => FI_WAIT_FD,
            Self::MutexCond => FI_WAIT_MUTEX_COND,
            Self::Yield => FI_WAIT_YIELD,
        }
    }
}

/// A mutex and condition, whose addresses the application gets.
struct MutexCond {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    cond: UnsafeCell<libc::pthread_cond_t>,
}

/// The waiting part of a completion queue, counter or event queue.
pub(crate) struct Waiter {
    kind: WaitKind,
    epoll: Epoll,
    bell: Doorbell,
    mutex_cond: Option<Box<MutexCond>>,
    /// The progress thread that signals the condition.
    signals: OnceCell<Kick>,
}

// SAFETY: the mutex and condition are made for use by several threads; the rest is descriptors.
unsafe impl Send for Waiter {}
// SAFETY: the mutex and condition are made for use by several threads; the rest is descriptors.
unsafe impl Sync for Waiter {}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// Token of the waiter's own doorbell; endpoints use their address.
const TOKEN_BELL: u64 = 0;

impl Waiter {
    /// Errors: EMFILE, ENFILE, ENOMEM, and those of a system-call filter.
    pub(crate) fn new(kind: WaitKind) -> Result<Self, i32> {
        let failed = |what: &'static str| {
            move |e: Errno| {
                log::limited!(cause: e.0, "cannot make a wait object ({what}: {e})");
                e.0
            }
        };
        let epoll = Epoll::new().map_err(failed("epoll"))?;
        let bell = Doorbell::new().map_err(failed("eventfd"))?;
        epoll.add(bell.fd(), TOKEN_BELL).map_err(failed("epoll_ctl"))?;
        let mutex_cond = (kind == WaitKind::MutexCond).then(|| {
            Box::new(MutexCond {
                mutex: UnsafeCell::new(libc::PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP),
                cond: UnsafeCell::new(libc::PTHREAD_COND_INITIALIZER),
            })
        });
        Ok(Self { kind, epoll, bell, mutex_cond, signals: OnceCell::new() })
    }

    pub(crate) fn kind(&self) -> WaitKind {
        self.kind
    }

    /// Makes the descriptor readable until [`Waiter::silence`].
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }

    pub(crate) fn silence(&self) {
        self.bell.silence();
    }

    /// From now on [`Waiter::signal_soon`] wakes this thread, unless there is one already.
    pub(super) fn signalled_by(&self, thread: Kick) {
        self.signals.get_or_init(|| thread);
    }

    /// Wakes the thread that is to signal the condition.
    #[cold]
    pub(crate) fn signal_soon(&self) {
        self.signals.get().into_iter().for_each(Kick::kick);
    }

    /// Wakes the threads that wait on the condition. Never called with the domain's lock held: a thread of the
    /// application may hold the mutex while it calls libfabric, and it may be this one.
    pub(crate) fn broadcast(&self) {
        let Some(pair) = &self.mutex_cond else { return };
        // SAFETY: both were statically initialised and live as long as `self`.
        unsafe {
            let locked = libc::pthread_mutex_lock(pair.mutex.get()) != libc::EDEADLK;
            libc::pthread_cond_broadcast(pair.cond.get());
            if locked {
                libc::pthread_mutex_unlock(pair.mutex.get());
            }
        }
    }

    /// Lets `fd` wake the waiter.
    pub(crate) fn watch(&self, fd: RawFd, token: u64) -> Result<(), i32> {
        // SAFETY: the caller's descriptor is open during the call.
        self.epoll.add(unsafe { BorrowedFd::borrow_raw(fd) }, token).map_err(|e| e.0)
    }

    /// The inverse of `watch`.
    pub(crate) fn unwatch(&self, fd: RawFd) {
        // SAFETY: the caller's descriptor is open during the call.
        self.epoll.remove(unsafe { BorrowedFd::borrow_raw(fd) });
    }

    /// Blocks until a watched descriptor or the doorbell is ready, at most `timeout_ms`.
    pub(crate) fn block(&self, timeout_ms: i32) -> Result<bool, Errno> {
        wait_readable(self.epoll.fd(), timeout_ms)
    }

    /// The descriptor that an application polls.
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.epoll.fd().as_raw_fd()
    }

    /// `fi_control`: FI_GETWAIT writes the descriptor or the pair, FI_GETWAITOBJ the kind.
    ///
    /// # Safety
    /// `arg` points to room for what the command delivers (fi_cq.3).
    pub(super) unsafe fn control(&self, command: c_int, arg: *mut c_void) -> c_int {
        if !matches!(command, FI_GETWAIT | FI_GETWAITOBJ) {
            return -FI_ENOSYS;
        }
        if arg.is_null() {
            return -FI_EINVAL;
        }
        // SAFETY: room for a fi_wait_obj, an int or a fi_mutex_cond, by the caller's contract.
        unsafe {
            match (self.kind, &self.mutex_cond) {
                _ if command == FI_GETWAITOBJ => {
                    arg.cast::<fi_wait_obj>().write(self.kind.to_attr())
                }
                (WaitKind::Fd, _) => arg.cast::<c_int>().write(self.raw_fd()),
                (WaitKind::MutexCond, Some(pair)) => {
                    let (mutex, cond) = (pair.mutex.get().cast(), pair.cond.get().cast());
                    arg.cast::<fi_mutex_cond>().write(fi_mutex_cond { mutex, cond });
                }
                _ => return -FI_ENOSYS,
            }
        }
        0
    }
}
