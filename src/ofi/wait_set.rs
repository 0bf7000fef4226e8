//! `struct fid_wait`: several queues and counters waited for together.

use super::cntr::Counter;
use super::cq::CompletionQueue;
use super::elsewhere::Elsewhere;
use super::eq::EventQueue;
use super::fabric::Fabric;
use super::guard::{busy, code, entry, waiting_entry};
use super::own::{Object, own};
use super::table::{SLACK, Slack, Table, stubs};
use super::wait::{WaitKind, Waiter};
use crate::sys::clock::{Deadline, now_ns};
use libfabric_sys::{
    FI_CLASS_WAIT, FI_EINVAL, FI_ENOSYS, FI_ETIMEDOUT, FI_GETWAIT, FI_GETWAITOBJ, FI_WAIT_FD,
    FI_WAIT_SET, FI_WAIT_UNSPEC, fi_ops, fi_ops_wait, fi_wait_attr, fi_wait_obj, fid, fid_wait,
};
use std::ffi::{c_int, c_void};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// One object of a set.
#[derive(Clone, Debug)]
pub(crate) enum Member {
    Queue(Weak<CompletionQueue>),
    Counter(Weak<Counter>),
    Events(Weak<EventQueue>),
}

impl Member {
    /// Prepares the member for sleep; false if it has something to report.
    fn try_wait(&self) -> bool {
        match self {
            Self::Queue(cq) => cq.upgrade().is_none_or(|cq| cq.try_wait(&cq.domain.lock.lock())),
            Self::Counter(c) => c.upgrade().is_none_or(|c| c.try_wait(&c.domain.lock.lock())),
            Self::Events(eq) => eq.upgrade().is_none_or(|eq| !eq.has_events()),
        }
    }

    fn end_wait(&self) {
        match self {
            Self::Queue(cq) => {
                if let Some(cq) = cq.upgrade() {
                    cq.end_wait(&cq.domain.lock.lock());
                }
            }
            Self::Counter(c) => {
                if let Some(c) = c.upgrade() {
                    c.end_wait(&c.domain.lock.lock());
                }
            }
            Self::Events(_) => {}
        }
    }
}

/// What members share of their set.
#[derive(Debug)]
pub(crate) struct WaitSet {
    fabric: Arc<Fabric>,
    waiter: Waiter,
    members: Mutex<Vec<(i32, Member)>>,
}

impl WaitSet {
    fn members(&self) -> MutexGuard<'_, Vec<(i32, Member)>> {
        match self.members.lock() {
            Ok(members) => members,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// A new member; its descriptor wakes the set. Errors: EINVAL, ENOMEM.
    pub(crate) fn add(&self, member: Member, fd: Option<i32>) -> Result<(), i32> {
        let fd = fd.ok_or(FI_EINVAL)?;
        self.waiter.watch(fd, 1)?;
        self.members().push((fd, member));
        Ok(())
    }

    /// A member is being closed. In a forked child the set is the parent's, one of whose threads may have had the
    /// list.
    pub(crate) fn remove(&self, fd: Option<i32>) {
        if let Some(fd) = fd.filter(|_| self.fabric.home.is_here()) {
            self.waiter.unwatch(fd);
            self.members().retain(|(member_fd, _)| *member_fd != fd);
        }
    }

    /// fi_trywait on the set: true when the application may sleep on its descriptor.
    pub(crate) fn try_wait(&self) -> bool {
        let members = self.members();
        let mut armed = 0;
        for (_, member) in members.iter() {
            if !member.try_wait() {
                break;
            }
            armed += 1;
        }
        if armed == members.len() {
            return true;
        }
        for (_, member) in members.iter().take(armed) {
            member.end_wait();
        }
        false
    }
}

#[repr(C)]
struct WaitFid {
    fid: fid_wait,
    slack: Slack,
    shared: Arc<WaitSet>,
}

// SAFETY: it begins with a fid_wait; nothing else has this table.
unsafe impl Object for WaitFid {
    type Shown = fid_wait;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    control: Some(control),
    // SAFETY: fi_ops has six slots.
    ..unsafe { stubs::<fi_ops, 6>() }
});

static OPS: Table<fi_ops_wait> = Table::new(fi_ops_wait {
    // SAFETY: the ABI is the same.
    wait: Some(unsafe {
        std::mem::transmute::<
            unsafe extern "C-unwind" fn(*mut fid_wait, c_int) -> c_int,
            unsafe extern "C" fn(*mut fid_wait, c_int) -> c_int,
        >(wait)
    }),
    // SAFETY: fi_ops_wait has one slot.
    ..unsafe { stubs::<fi_ops_wait, 1>() }
});

/// `fi_wait_open`. Errors: EINVAL; ENOSYS for wait objects other than UNSPEC and FD; EMFILE.
///
/// # Safety
/// As libfabric calls `fi_wait_open`.
pub(crate) unsafe fn open(
    fabric: &Arc<Fabric>,
    attr: *mut fi_wait_attr,
    out: *mut *mut fid_wait,
) -> Result<(), i32> {
    // SAFETY: the application's attributes, valid during the call.
    let attr = unsafe { attr.as_ref() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    if !matches!(attr.wait_obj, FI_WAIT_UNSPEC | FI_WAIT_FD) {
        return Err(FI_ENOSYS);
    }
    let set = Box::new(WaitFid {
        fid: fid_wait {
            fid: fid {
                fclass: FI_CLASS_WAIT,
                context: std::ptr::null_mut(),
                ops: FID_OPS.as_mut_ptr(),
            },
            ops: OPS.as_mut_ptr(),
        },
        slack: SLACK,
        shared: Arc::new(WaitSet {
            fabric: fabric.clone(),
            waiter: Waiter::new(WaitKind::Fd)?,
            members: Mutex::new(Vec::new()),
        }),
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(set).cast() };
    Ok(())
}

/// The shared part of a wait set. Errors: EINVAL for what is not ours.
///
/// # Safety
/// `set` is null or an open object.
pub(crate) unsafe fn shared<'a>(set: *mut fid) -> Result<&'a Arc<WaitSet>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own::<WaitFid>(set) }.map(|own| &own.shared)
}

/// The set that an object with this wait object joins. Errors: EINVAL for FI_WAIT_SET without one.
///
/// # Safety
/// `set` is null or an open wait set if `object` is FI_WAIT_SET; else it is not looked at.
pub(crate) unsafe fn from_attr(
    object: fi_wait_obj,
    set: *mut fid_wait,
) -> Result<Option<Arc<WaitSet>>, i32> {
    if object != FI_WAIT_SET {
        return Ok(None);
    }
    // SAFETY: the caller vouches.
    unsafe { shared(set.cast()) }.cloned().map(Some)
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(wait)", || {
        // SAFETY: a set of ours, open until now.
        unsafe {
            let set = &(*fid.cast::<WaitFid>()).shared;
            if Arc::strong_count(set) > 1 {
                return busy(set.fabric.home);
            }
            drop(Box::from_raw(fid.cast::<WaitFid>()));
        }
        0
    })
}

unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(wait)", || {
        // SAFETY: a set of ours; `arg` is as fi_poll.3 says for each command.
        unsafe {
            let set = &(*fid.cast::<WaitFid>()).shared;
            match command {
                FI_GETWAIT => code(set.waiter.get(arg)),
                FI_GETWAITOBJ => code(set.waiter.get_object(arg)),
                _ => -FI_ENOSYS,
            }
        }
    })
}

unsafe extern "C-unwind" fn wait(set: *mut fid_wait, timeout: c_int) -> c_int {
    let deadline = Deadline::after_ms(timeout);
    let mut elsewhere = Elsewhere::after(now_ns());
    let turn = || {
        // SAFETY: a set of ours.
        let Ok(set) = (unsafe { shared(set.cast()) }) else {
            return ControlFlow::Break(-FI_EINVAL);
        };
        if !set.try_wait() {
            return ControlFlow::Break(0);
        }
        let slice = match deadline.poll_ms() {
            -1 => elsewhere.slice_ms(),
            ms => ms.min(elsewhere.slice_ms()),
        };
        // A signal ends the sleep early; the next turn looks again.
        let _ = set.waiter.block(slice);
        for (_, member) in set.members().iter() {
            member.end_wait();
        }
        if deadline.expired() {
            return ControlFlow::Break(if set.try_wait() {
                for (_, member) in set.members().iter() {
                    member.end_wait();
                }
                -FI_ETIMEDOUT
            } else {
                0
            });
        }
        elsewhere.look(None);
        ControlFlow::Continue(())
    };
    // SAFETY: nothing here is to be dropped.
    unsafe { waiting_entry("fi_wait", turn) }
}
