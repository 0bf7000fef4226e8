//! `struct fid_wait`: a thread waits for several queues and counters together.

use super::elsewhere::Elsewhere;
use super::fabric::Fabric;
use super::guard::{entries, may_close, waiting_entry};
use super::own::{Object, close as close_object, ours, own};
use super::table::{Operations, SLACK, Slack, Table, cancellable};
use super::wait::{WaitKind, Waitable, Waiter};
use crate::sys::clock::{Deadline, now_ns};
use libfabric_sys::{
    FI_CLASS_WAIT, FI_EINVAL, FI_ENOSYS, FI_ETIMEDOUT, FI_WAIT_FD, FI_WAIT_SET, FI_WAIT_UNSPEC,
    fi_ops, fi_ops_wait, fi_wait_attr, fi_wait_obj, fid, fid_wait,
};
use std::ffi::{c_int, c_void};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// The part of a wait set that its members share.
#[derive(Debug)]
pub(crate) struct WaitSet {
    fabric: Arc<Fabric>,
    waiter: Waiter,
    /// The members, with their descriptors, which wake the set.
    members: Mutex<Vec<(i32, Weak<dyn Waitable>)>>,
}

impl WaitSet {
    fn members(&self) -> MutexGuard<'_, Vec<(i32, Weak<dyn Waitable>)>> {
        match self.members.lock() {
            Ok(members) => members,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    fn end_wait_of(members: &[(i32, Weak<dyn Waitable>)]) {
        let open = members.iter().filter_map(|(_, member)| member.upgrade());
        open.for_each(|member| member.end_wait());
    }
}

impl Waitable for WaitSet {
    fn try_wait(&self) -> bool {
        let members = self.members();
        let reports = |member: &Weak<dyn Waitable>| member.upgrade().is_some_and(|m| !m.try_wait());
        let busy = members.iter().position(|(_, member)| reports(member));
        Self::end_wait_of(members.get(..busy.unwrap_or(0)).unwrap_or_default());
        busy.is_none()
    }

    fn end_wait(&self) {
        Self::end_wait_of(&self.members());
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

static FID_OPS: Table<fi_ops> =
    Table::new(fi_ops { close: Some(close), control: Some(control), ..fi_ops::STUBS });

static OPS: Table<fi_ops_wait> = Table::new(fi_ops_wait {
    wait: cancellable!(wait: fn(*mut fid_wait, c_int) -> c_int),
    ..fi_ops_wait::STUBS
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

/// The shared part of a wait set. Errors: EINVAL for an object of another provider.
///
/// # Safety
/// `set` is null or an open object.
pub(crate) unsafe fn shared<'a>(set: *mut fid) -> Result<&'a Arc<WaitSet>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own::<WaitFid>(set) }.map(|own| &own.shared)
}

/// The wait object of a queue or counter.
#[derive(Debug)]
pub(super) struct WaitObject {
    /// `None`: FI_WAIT_NONE.
    pub(super) waiter: Option<Arc<Waiter>>,
    set: Option<Arc<WaitSet>>,
}

impl WaitObject {
    /// The wait object that attributes ask for. Errors: EINVAL, also for FI_WAIT_SET without a set; ENOSYS for
    /// FI_WAIT_POLLFD; EMFILE, ENFILE, ENOMEM.
    ///
    /// # Safety
    /// If `object` is FI_WAIT_SET, `set` is null or an open object; else it is not read.
    pub(super) unsafe fn open(object: fi_wait_obj, set: *mut fid_wait) -> Result<Self, i32> {
        let kind = WaitKind::from_attr(object)?;
        let set = match object {
            // SAFETY: the caller vouches.
            FI_WAIT_SET => Some(unsafe { shared(set.cast()) }?.clone()),
            _ => None,
        };
        Ok(Self { waiter: kind.map(Waiter::new).transpose()?.map(Arc::new), set })
    }

    /// The waiter, if it has a condition.
    pub(super) fn condition(&self) -> Option<&Arc<Waiter>> {
        self.waiter.as_ref().filter(|waiter| waiter.kind() == WaitKind::MutexCond)
    }

    fn in_set(&self) -> Option<(&WaitSet, i32)> {
        self.set.as_deref().zip(self.waiter.as_ref().map(|waiter| waiter.raw_fd()))
    }

    /// Adds the queue or counter to the wait object's set, if it has one. Errors: ENOMEM, ENOSPC.
    pub(super) fn join(&self, member: Weak<dyn Waitable>) -> Result<(), i32> {
        let Some((set, fd)) = self.in_set() else { return Ok(()) };
        set.waiter.watch(fd, 1)?;
        set.members().push((fd, member));
        Ok(())
    }

    /// Removes the queue or counter, which is being closed, from the set, if it `may_close`. No thread that waits for the
    /// set borrows it while that is asked. In a forked child the set is the parent's, one of whose threads may have held
    /// the lock of the list. Errors: those of `may_close`.
    pub(super) fn close(&self, may_close: impl FnOnce() -> Result<(), c_int>) -> Result<(), c_int> {
        let here = self.in_set().filter(|(set, _)| set.fabric.home.is_here());
        let mut held = here.map(|(set, fd)| (set, fd, set.members()));
        may_close()?;
        if let Some((set, fd, members)) = &mut held {
            set.waiter.unwatch(*fd);
            members.retain(|(known, _)| known != fd);
        }
        Ok(())
    }

    /// `fi_control` of the queue or counter.
    ///
    /// # Safety
    /// `arg` is as fi_cq.3 says for the command.
    pub(super) unsafe fn control(&self, command: c_int, arg: *mut c_void) -> c_int {
        // SAFETY: the caller vouches.
        self.waiter.as_ref().map_or(-FI_ENOSYS, |waiter| unsafe { waiter.control(command, arg) })
    }
}

entries! { entry -> c_int;
    close "fi_close(wait)" (fid: *mut fid) => close_object(fid, |object: &WaitFid| {
        may_close(Arc::strong_count(&object.shared), object.shared.fabric.home)
    });
    control "fi_control(wait)" (fid: *mut fid, command: c_int, arg: *mut c_void)
        => ours::<WaitFid>(fid).shared.waiter.control(command, arg);
}

unsafe extern "C-unwind" fn wait(set: *mut fid_wait, timeout: c_int) -> c_int {
    let deadline = Deadline::after_ms(timeout);
    let mut elsewhere = Elsewhere::after(now_ns());
    let turn = || {
        // SAFETY: a set of this provider.
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
        // A signal ends the sleep early; the next turn checks again.
        let _ = set.waiter.block(slice);
        set.end_wait();
        if deadline.expired() {
            return ControlFlow::Break(if set.try_wait() {
                set.end_wait();
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
