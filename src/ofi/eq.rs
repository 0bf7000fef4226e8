//! `struct fid_eq`: event queues for control operations.

use super::domain::Domain;
use super::elsewhere::Elsewhere;
use super::fabric::Fabric;
use super::guard::{entries, entry, may_close, offers, told, waiting_entry};
use super::lock::Guard;
use super::own::{Object, close as close_object, ours, own};
use super::table::{Operations, SLACK, Slack, Table, cancellable};
use super::wait::{Conditional, WaitKind, Waitable, Waiter};
use super::wait_set::WaitObject;
use crate::sys::clock::{Deadline, now_ns};
use crate::sys::{Errno, process};
use libfabric_sys::{
    FI_AFFINITY, FI_AV_COMPLETE, FI_CLASS_EQ, FI_EAGAIN, FI_EAVAIL, FI_EINVAL, FI_ENOSYS,
    FI_ETOOSMALL, FI_JOIN_COMPLETE, FI_PEEK, FI_WRITE, fi_eq_attr, fi_eq_entry, fi_eq_err_entry,
    fi_ops, fi_ops_eq, fi_version, fid, fid_eq,
};
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::fmt::Debug;
use std::ops::ControlFlow;
use std::ptr::addr_eq;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Most events that an application may leave unread before fi_eq_write returns FI_EAGAIN.
const MAX_EVENTS: usize = 65536;

#[derive(Debug)]
enum Event {
    Data { event: u32, bytes: Box<[u8]> },
    Error { fid: usize, context: usize, data: u64, error: i32 },
}

impl Event {
    fn failure(fid: *mut fid, context: *mut c_void, data: u64, error: i32) -> Self {
        let (fid, context) = (fid.expose_provenance(), context.expose_provenance());
        Self::Error { fid, context, data, error }
    }
}

#[derive(Debug, Default)]
struct EqState {
    events: VecDeque<Event>,
}

/// The part of an event queue that other objects share.
#[derive(Debug)]
pub(crate) struct EventQueue {
    fabric: Arc<Fabric>,
    state: Mutex<EqState>,
    wait: WaitObject,
    writable: bool,
    /// Endpoints that join groups: a thread that reads events progresses them.
    joining: Mutex<Vec<Weak<dyn Join>>>,
    /// `None`: the wait object is no condition.
    joined: Option<Arc<Joined>>,
}

/// The condition of a queue, which a progress thread signals for the ends of joins. It borrows this, and not the queue,
/// which may be closed meanwhile.
#[derive(Debug)]
struct Joined {
    waiter: Arc<Waiter>,
    pending: AtomicBool,
}

/// An endpoint that joins a group.
pub(super) trait Join: Debug + Send + Sync {
    /// Makes one turn of progress. False: all joins are over, for the other members too as far as it depends on this one.
    fn progress_joins(&self) -> bool;
}

#[repr(C)]
struct EqFid {
    fid: fid_eq,
    slack: Slack,
    shared: Arc<EventQueue>,
}

// SAFETY: it begins with a fid_eq; nothing else has this table.
unsafe impl Object for EqFid {
    type Shown = fid_eq;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> =
    Table::new(fi_ops { close: Some(close), control: Some(control), ..fi_ops::STUBS });

static OPS: Table<fi_ops_eq> = Table::new(fi_ops_eq {
    read: Some(read),
    readerr: Some(readerr),
    write: Some(write),
    sread: cancellable!(
        sread: fn(*mut fid_eq, *mut u32, *mut c_void, usize, c_int, u64) -> isize
    ),
    strerror: Some(strerror),
    ..fi_ops_eq::STUBS
});

/// `fi_eq_open`. Errors: EINVAL; ENOSYS for FI_WAIT_POLLFD; EMFILE, ENFILE, ENOMEM.
///
/// # Safety
/// As libfabric calls `fi_eq_open`.
pub(crate) unsafe fn open(
    fabric: &Arc<Fabric>,
    attr: *mut fi_eq_attr,
    out: *mut *mut fid_eq,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: the application's attributes, valid during the call.
    let attr = unsafe { attr.as_ref() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    offers("fi_eq_open", attr.flags, FI_AFFINITY | FI_WRITE)?;
    // SAFETY: the application's wait set.
    let wait = unsafe { WaitObject::open(attr.wait_obj, attr.wait_set) }?;
    let joined = wait.condition().cloned().map(|waiter| {
        let pending = AtomicBool::new(false);
        Arc::new(Joined { waiter, pending })
    });
    let shared = Arc::new(EventQueue {
        fabric: fabric.clone(),
        state: Mutex::new(EqState::default()),
        wait,
        writable: attr.flags & FI_WRITE != 0,
        joining: Mutex::new(Vec::new()),
        joined,
    });
    let member = Arc::downgrade(&shared);
    shared.wait.join(member)?;
    let eq = Box::new(EqFid {
        fid: fid_eq {
            fid: fid { fclass: FI_CLASS_EQ, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr(),
        },
        slack: SLACK,
        shared,
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(eq).cast() };
    Ok(())
}

/// The shared part of an event queue.
/// Errors: EINVAL for an object of another provider.
///
/// # Safety
/// `eq` is null or an open object.
pub(crate) unsafe fn shared<'a>(eq: *mut fid) -> Result<&'a Arc<EventQueue>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own::<EqFid>(eq) }.map(|own| &own.shared)
}

/// Binding an event queue to an object that reports nothing to it is allowed.
pub(crate) fn accept_bind() -> c_int {
    0
}

fn bytes_of(entry: &fi_eq_entry) -> Box<[u8]> {
    // SAFETY: fi_eq_entry is three plain words without padding.
    unsafe {
        std::slice::from_raw_parts((&raw const *entry).cast::<u8>(), size_of::<fi_eq_entry>())
    }
    .into()
}

impl EventQueue {
    fn state(&self) -> MutexGuard<'_, EqState> {
        match self.state.lock() {
            Ok(state) => state,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    fn queue(&self, event: Event) {
        let mut state = self.state();
        state.events.push_back(event);
        if let Some(waiter) = &self.wait.waiter {
            waiter.ring();
        }
    }

    /// Reports an event, from a call that holds the lock of no domain.
    fn push(&self, event: Event) {
        self.queue(event);
        if let Some(waiter) = &self.wait.waiter {
            waiter.broadcast();
        }
    }

    /// Adds an endpoint that joins a group and will report to this queue.
    pub(super) fn progress_of(&self, endpoint: &Arc<dyn Join>) {
        if let Ok(mut joining) = self.joining.lock() {
            joining.retain(|known| !addr_eq(known.as_ptr(), Arc::as_ptr(endpoint)));
            joining.push(Arc::downgrade(endpoint));
        }
    }

    /// Progresses the endpoints that join groups. True: at least one still does.
    fn progress_joins(&self) -> bool {
        let joining = match self.joining.lock() {
            Ok(mut joining) if !joining.is_empty() => std::mem::take(&mut *joining),
            _ => return false,
        };
        let mut pending = false;
        for endpoint in joining.iter().filter_map(Weak::upgrade) {
            if endpoint.progress_joins() {
                self.progress_of(&endpoint);
                pending = true;
            }
        }
        pending
    }

    /// Has the progress thread of `domain` signal the condition, if the queue has one: for joins, which end under the
    /// domain's lock. Errors: those of starting the thread.
    pub(super) fn signalled_for(&self, domain: &Arc<Domain>) -> Result<(), i32> {
        self.joined.iter().try_for_each(|joined| {
            let member = Arc::downgrade(joined);
            domain.signal_condition(member, &joined.waiter)
        })
    }

    /// Reports that all members of a group have joined it, or that one could not. The domain's lock is held: its
    /// progress thread is to be kicked.
    pub(crate) fn push_joined(
        &self,
        fid: *mut fid,
        context: *mut c_void,
        outcome: Result<(), i32>,
    ) {
        let event = match outcome {
            Ok(()) => {
                let entry = fi_eq_entry { fid, context, data: 0 };
                Event::Data { event: FI_JOIN_COMPLETE, bytes: bytes_of(&entry) }
            }
            Err(error) => Event::failure(fid, context, 0, error),
        };
        self.queue(event);
        self.joined.iter().for_each(|joined| joined.pending.store(true, Ordering::Release));
    }

    /// Reports that `count` addresses of an asynchronous insertion have been added.
    pub(crate) fn push_av_complete(&self, fid: *mut fid, context: *mut c_void, count: u64) {
        let entry = fi_eq_entry { fid, context, data: count };
        self.push(Event::Data { event: FI_AV_COMPLETE, bytes: bytes_of(&entry) });
    }

    /// Reports that the address with index `data` of an asynchronous insertion failed.
    pub(crate) fn push_error(&self, fid: *mut fid, context: *mut c_void, data: u64, error: i32) {
        self.push(Event::failure(fid, context, data, error));
    }

    /// # Safety
    /// `event` is valid; `buffer` has `len` bytes.
    unsafe fn read(&self, event: *mut u32, buffer: *mut c_void, len: usize, flags: u64) -> isize {
        let mut state = self.state();
        let result = match state.events.front() {
            None => -(FI_EAGAIN as isize),
            Some(Event::Error { .. }) => return -(FI_EAVAIL as isize),
            Some(Event::Data { bytes, .. }) if bytes.len() > len => {
                return -(FI_ETOOSMALL as isize);
            }
            Some(Event::Data { event: number, bytes }) => {
                // SAFETY: the caller vouches; there is room (checked above).
                unsafe {
                    if !event.is_null() {
                        *event = *number;
                    }
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len());
                }
                bytes.len() as isize
            }
        };
        if result >= 0 && flags & FI_PEEK == 0 {
            state.events.pop_front();
        }
        self.silence_if_empty(&state);
        result
    }

    fn silence_if_empty(&self, state: &EqState) {
        if let (true, Some(waiter)) = (state.events.is_empty(), &self.wait.waiter) {
            waiter.silence();
        }
    }
}

impl Waitable for EventQueue {
    fn try_wait(&self) -> bool {
        // A join moves on only while somebody makes progress.
        let joins = self.progress_joins();
        !joins && self.state().events.is_empty()
    }
}

impl Conditional for Joined {
    fn take_condition(&self, _: &Guard<'_>) -> Option<Arc<Waiter>> {
        self.pending.swap(false, Ordering::AcqRel).then(|| self.waiter.clone())
    }
}

entries! { entry -> c_int;
    close "fi_close(eq)" (fid: *mut fid) => close_object(fid, |object: &EqFid| {
        let eq = &object.shared;
        eq.wait.close(|| may_close(Arc::strong_count(eq), eq.fabric.home))
    });
    control "fi_control(eq)" (fid: *mut fid, command: c_int, arg: *mut c_void)
        => ours::<EqFid>(fid).shared.wait.control(command, arg);
}

unsafe extern "C" fn read(
    eq: *mut fid_eq,
    event: *mut u32,
    buffer: *mut c_void,
    len: usize,
    flags: u64,
) -> isize {
    entry("fi_eq_read", || {
        // SAFETY: as libfabric calls fi_eq_read.
        unsafe {
            let eq = &(*eq.cast::<EqFid>()).shared;
            eq.progress_joins();
            eq.read(event, buffer, len, flags)
        }
    })
}

unsafe extern "C-unwind" fn sread(
    eq: *mut fid_eq,
    event: *mut u32,
    buffer: *mut c_void,
    len: usize,
    timeout: c_int,
    flags: u64,
) -> isize {
    let deadline = Deadline::after_ms(timeout);
    let mut elsewhere = Elsewhere::after(now_ns());
    let turn = || {
        // SAFETY: a queue of this provider.
        let eq = unsafe { &(*eq.cast::<EqFid>()).shared };
        let Some(waiter) = &eq.wait.waiter else {
            return ControlFlow::Break(-(FI_ENOSYS as isize));
        };
        let joins = eq.progress_joins();
        // SAFETY: as libfabric calls fi_eq_sread.
        let result = unsafe { eq.read(event, buffer, len, flags) };
        if result != -(FI_EAGAIN as isize) || deadline.expired() {
            return ControlFlow::Break(result);
        }
        if waiter.kind() == WaitKind::Yield {
            process::yield_now();
            elsewhere.look(None);
            return ControlFlow::Continue(());
        }
        let slice = match deadline.poll_ms() {
            // No descriptor wakes this thread when a member's message arrives.
            _ if joins => 1,
            -1 => elsewhere.slice_ms(),
            ms => ms.min(elsewhere.slice_ms()),
        };
        if waiter.block(slice) == Err(Errno(libc::EINTR)) {
            // fi_eq.3: a thread that is signaled returns to its caller.
            // SAFETY: as libfabric calls fi_eq_sread.
            return ControlFlow::Break(unsafe { eq.read(event, buffer, len, flags) });
        }
        elsewhere.look(None);
        ControlFlow::Continue(())
    };
    // SAFETY: nothing here is to be dropped.
    unsafe { waiting_entry("fi_eq_sread", turn) }
}

unsafe extern "C" fn readerr(eq: *mut fid_eq, buffer: *mut fi_eq_err_entry, flags: u64) -> isize {
    entry("fi_eq_readerr", || {
        // SAFETY: a queue of this provider and the application's entry.
        unsafe {
            let eq = &(*eq.cast::<EqFid>()).shared;
            let Some(out) = buffer.as_mut() else { return -(FI_EINVAL as isize) };
            let mut state = eq.state();
            let Some(Event::Error { fid, context, data, error }) = state.events.front() else {
                return -(FI_EAGAIN as isize);
            };
            out.fid = std::ptr::with_exposed_provenance_mut(*fid);
            out.context = std::ptr::with_exposed_provenance_mut(*context);
            out.data = *data;
            out.err = *error;
            out.prov_errno = 0;
            if eq.fabric.api_version() >= fi_version(1, 5) {
                out.err_data_size = 0;
            } else {
                out.err_data = std::ptr::null_mut();
            }
            if flags & FI_PEEK == 0 {
                state.events.pop_front();
            }
            eq.silence_if_empty(&state);
            size_of::<fi_eq_err_entry>() as isize
        }
    })
}

unsafe extern "C" fn write(
    eq: *mut fid_eq,
    event: u32,
    buffer: *const c_void,
    len: usize,
    _flags: u64,
) -> isize {
    entry("fi_eq_write", || {
        // SAFETY: a queue of this provider; `buffer` has `len` bytes.
        unsafe {
            let eq = &(*eq.cast::<EqFid>()).shared;
            if !eq.writable || (buffer.is_null() && len > 0) {
                return -(FI_EINVAL as isize);
            }
            if eq.state().events.len() >= MAX_EVENTS {
                return -(FI_EAGAIN as isize);
            }
            let bytes = if len == 0 {
                Box::default()
            } else {
                std::slice::from_raw_parts(buffer.cast::<u8>(), len).into()
            };
            eq.push(Event::Data { event, bytes });
            len as isize
        }
    })
}

unsafe extern "C" fn strerror(
    _eq: *mut fid_eq,
    _prov_errno: c_int,
    _err_data: *const c_void,
    buffer: *mut c_char,
    len: usize,
) -> *const c_char {
    entry("fi_eq_strerror", || {
        // SAFETY: the application's buffer has `len` bytes.
        unsafe { told(c"no provider-specific error", buffer, len) }
    })
}
