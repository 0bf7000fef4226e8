//! `struct fid_cntr`: event counters and waiting for them.

use super::blocking::Blocking;
use super::domain::{Condition, Domain};
use super::guard::{code, data_entry, entry, waiting_entry};
use super::lock::{Guard, Locked};
use super::own::{Object, own, own_behind_hooks};
use super::source::Source;
use super::table::{SLACK, Slack, Table, stubs};
use super::trigger::{Work, run_due};
use super::wait::{WaitKind, Waiter};
use super::wait_set::{self, Member, WaitSet};
use libfabric_sys::{
    FI_CLASS_CNTR, FI_CNTR_EVENTS_COMP, FI_EAVAIL, FI_EBUSY, FI_EINVAL, FI_ENOSYS, FI_ETIMEDOUT,
    FI_GETWAIT, FI_GETWAITOBJ, fi_cntr_attr, fi_ops, fi_ops_cntr, fi_ops_cntr_2_7, fid, fid_cntr,
};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The values, under the domain's lock.
#[derive(Debug)]
pub(crate) struct CntrState {
    value: u64,
    errors: u64,
    pub(crate) source: Source,
    /// Operations that wait for a value, by threshold, and in their order where it is the same.
    waiting: VecDeque<Work>,
}

impl CntrState {
    /// Whether something that waits may be due.
    #[inline]
    fn reaches(&self) -> bool {
        self.waiting
            .front()
            .is_some_and(|work| work.threshold <= self.value.saturating_add(self.errors))
    }

    /// Takes out the next operation that is due.
    fn pop_due(&mut self) -> Option<Work> {
        let (value, errors) = (self.value, self.errors);
        let most = value.saturating_add(errors);
        let mut near = self.waiting.iter().take_while(|work| work.threshold <= most);
        let at = near.position(|work| work.is_due(value, errors))?;
        self.waiting.remove(at)
    }
}

/// What endpoints share of a counter.
#[derive(Debug)]
pub(crate) struct Counter {
    pub(crate) domain: Arc<Domain>,
    pub(crate) state: Locked<CntrState>,
    wait_set: Option<Arc<WaitSet>>,
}

#[repr(C)]
struct CntrFid {
    fid: fid_cntr,
    slack: Slack,
    shared: Arc<Counter>,
}

// SAFETY: it begins with a fid_cntr; nothing else has this table.
unsafe impl Object for CntrFid {
    type Shown = fid_cntr;
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

// SAFETY: fi_ops_cntr_2_7 has eight slots.
const STUBS: fi_ops_cntr_2_7 = unsafe { stubs::<fi_ops_cntr_2_7, 8>() };

static OPS: Table<fi_ops_cntr_2_7> = Table::new(fi_ops_cntr_2_7 {
    base: fi_ops_cntr {
        read: Some(read),
        readerr: Some(readerr),
        add: Some(add),
        adderr: Some(adderr),
        set: Some(set),
        seterr: Some(seterr),
        // SAFETY: the ABI is the same.
        wait: Some(unsafe {
            std::mem::transmute::<
                unsafe extern "C-unwind" fn(*mut fid_cntr, u64, c_int) -> c_int,
                unsafe extern "C" fn(*mut fid_cntr, u64, c_int) -> c_int,
            >(wait)
        }),
        ..STUBS.base
    },
    ..STUBS
});

/// `fi_cntr_open`. Errors: EINVAL; ENOSYS for FI_WAIT_POLLFD; EMFILE, ENFILE, ENOMEM.
///
/// # Safety
/// As libfabric calls `fi_cntr_open`.
pub(crate) unsafe fn open(
    domain: &Arc<Domain>,
    attr: *mut fi_cntr_attr,
    out: *mut *mut fid_cntr,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: the application's attributes, valid during the call.
    let attr = unsafe { attr.as_ref() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    if attr.events != FI_CNTR_EVENTS_COMP || attr.flags != 0 {
        return Err(FI_EINVAL);
    }
    let kind = WaitKind::from_attr(attr.wait_obj)?;
    // SAFETY: the application's wait set.
    let wait_set = unsafe { wait_set::from_attr(attr.wait_obj, attr.wait_set) }?;
    let waiter = kind.map(Waiter::new).transpose()?.map(Arc::new);
    let shared = Arc::new(Counter {
        domain: domain.clone(),
        state: Locked::new(CntrState {
            value: 0,
            errors: 0,
            source: Source::new(waiter),
            waiting: VecDeque::new(),
        }),
        wait_set,
    });
    if kind == Some(WaitKind::MutexCond) {
        let guard = domain.lock.lock();
        // SAFETY: the guard is of this domain; one short step.
        unsafe { domain.state(&guard) }
            .conditions
            .push(Condition::Counter(Arc::downgrade(&shared)));
        drop(guard);
        domain.require_thread()?;
    }
    if let Some(set) = &shared.wait_set {
        set.add(Member::Counter(Arc::downgrade(&shared)), shared.wait_fd())?;
    }
    let cntr = Box::new(CntrFid {
        fid: fid_cntr {
            fid: fid { fclass: FI_CLASS_CNTR, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr().cast(),
        },
        slack: SLACK,
        shared,
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(cntr).cast() };
    Ok(())
}

/// The shared part of a counter.
/// Errors: EINVAL for what is not ours.
///
/// # Safety
/// `cntr` is null or an open object.
pub(crate) unsafe fn shared<'a>(cntr: *mut fid) -> Result<&'a Arc<Counter>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own::<CntrFid>(cntr) }.map(|own| &own.shared)
}

/// The same for a counter that a structure names. Errors: EINVAL for what is not ours.
///
/// # Safety
/// `cntr` is null or an open object.
pub(crate) unsafe fn named<'a>(cntr: *mut fid_cntr) -> Result<&'a Arc<Counter>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own_behind_hooks::<CntrFid>(cntr.cast()) }.map(|own| &own.shared)
}

impl Counter {
    #[inline]
    #[allow(clippy::mut_from_ref)] // see Locked::get
    fn state<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut CntrState {
        // SAFETY: guards passed here are of this counter's domain, and each caller uses the result
        // for one step that reaches no endpoint.
        unsafe { self.state.get(guard) }
    }

    #[inline]
    fn progress(&self, guard: &Guard<'_>) {
        Source::progress(&self.state, |state| &mut state.source, guard);
    }

    /// The sum of both values after a turn of progress: changes when anything happened.
    pub(crate) fn poll(&self, guard: &Guard<'_>) -> u64 {
        self.progress(guard);
        let state = self.state(guard);
        state.value.wrapping_add(state.errors)
    }

    /// fi_trywait: true when the application may sleep on the descriptor.
    pub(crate) fn try_wait(&self, guard: &Guard<'_>) -> bool {
        let before = {
            let state = self.state(guard);
            state.value.wrapping_add(state.errors)
        };
        self.poll(guard) == before && self.state(guard).source.arm_fd(guard)
    }

    /// Ends what `try_wait` began.
    pub(crate) fn end_wait(&self, guard: &Guard<'_>) {
        self.state(guard).source.disarm_fd(guard);
    }

    pub(crate) fn wait_fd(&self) -> Option<i32> {
        let guard = self.domain.lock.lock();
        self.state(&guard).source.waiter.as_ref().map(|waiter| waiter.raw_fd())
    }

    /// An operation succeeded.
    #[inline]
    pub(crate) fn count(&self, guard: &Guard<'_>) {
        self.raise(1, guard);
    }

    /// An operation failed.
    pub(crate) fn count_error(&self, guard: &Guard<'_>) {
        self.change(guard, |state| state.errors = state.errors.wrapping_add(1));
    }

    /// Adds to the value.
    #[inline]
    pub(crate) fn raise(&self, by: u64, guard: &Guard<'_>) {
        self.change(guard, |state| state.value = state.value.wrapping_add(by));
    }

    /// Sets the value.
    pub(crate) fn assign(&self, to: u64, guard: &Guard<'_>) {
        self.change(guard, |state| state.value = to);
    }

    /// Changes a value, wakes whoever waits for it, and hands on what waited for it.
    #[inline]
    fn change(&self, guard: &Guard<'_>, change: impl FnOnce(&mut CntrState)) {
        let state = self.state(guard);
        change(state);
        state.source.notify();
        if state.reaches() {
            self.release(guard);
        }
    }

    #[cold]
    fn release(&self, guard: &Guard<'_>) {
        while let Some(work) = self.state(guard).pop_due() {
            // SAFETY: the guard is of this counter's domain; one short step.
            unsafe { self.domain.state(guard) }.triggers.push_due(work);
        }
    }

    /// Takes an operation that waits; what is due is in the domain's list when this returns.
    pub(super) fn enqueue(&self, work: Work, guard: &Guard<'_>) {
        let state = self.state(guard);
        let at = state.waiting.partition_point(|other| other.threshold <= work.threshold);
        state.waiting.insert(at, work);
        self.release(guard);
    }

    /// How many operations wait.
    pub(super) fn waiting(&self, guard: &Guard<'_>) -> usize {
        self.state(guard).waiting.len()
    }

    /// Takes out those that `pick` picks.
    pub(super) fn take_waiting(
        &self,
        guard: &Guard<'_>,
        pick: &impl Fn(&Work) -> bool,
    ) -> Vec<Work> {
        let state = self.state(guard);
        let mut taken = Vec::new();
        for work in std::mem::take(&mut state.waiting) {
            if pick(&work) { taken.push(work) } else { state.waiting.push_back(work) }
        }
        taken
    }

    fn update(&self, change: impl FnOnce(&mut CntrState)) {
        let guard = self.domain.lock.lock();
        self.change(&guard, change);
        run_due(&self.domain, &guard);
        drop(guard);
        if let Some(thread) = self.domain.thread() {
            thread.kick();
        }
    }
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(cntr)", || {
        // SAFETY: a counter of ours, open until now.
        unsafe {
            let cntr = &(*fid.cast::<CntrFid>()).shared;
            if cntr.domain.lock.is_lost() {
                return 0;
            }
            // The progress thread borrows it under the lock at times.
            let guard = cntr.domain.lock.lock();
            if Arc::strong_count(cntr) > 1 || cntr.waiting(&guard) > 0 {
                return -FI_EBUSY;
            }
            cntr.domain.state(&guard).triggers.forget_counter(cntr);
            drop(guard);
            if let Some(set) = &cntr.wait_set {
                set.remove(cntr.wait_fd());
            }
            drop(Box::from_raw(fid.cast::<CntrFid>()));
        }
        0
    })
}

unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(cntr)", || {
        // SAFETY: a counter of ours; `arg` is as fi_cntr.3 says for each command.
        unsafe {
            let cntr = &(*fid.cast::<CntrFid>()).shared;
            let guard = cntr.domain.lock.lock();
            let Some(waiter) = cntr.state(&guard).source.waiter.clone() else { return -FI_ENOSYS };
            match command {
                FI_GETWAIT => code(waiter.get(arg)),
                FI_GETWAITOBJ => code(waiter.get_object(arg)),
                _ => -FI_ENOSYS,
            }
        }
    })
}

/// # Safety
/// `cntr` is a counter of ours.
unsafe fn counter<'a>(cntr: *mut fid_cntr) -> &'a Counter {
    // SAFETY: the caller vouches.
    unsafe { &(*cntr.cast::<CntrFid>()).shared }
}

unsafe extern "C" fn read(cntr: *mut fid_cntr) -> u64 {
    data_entry("fi_cntr_read", || {
        // SAFETY: a counter of ours.
        let cntr = unsafe { counter(cntr) };
        let value = {
            let guard = cntr.domain.lock.lock();
            cntr.end_wait(&guard);
            cntr.progress(&guard);
            cntr.state(&guard).value
        };
        cntr.domain.give_way();
        value
    })
}

unsafe extern "C" fn readerr(cntr: *mut fid_cntr) -> u64 {
    data_entry("fi_cntr_readerr", || {
        // SAFETY: a counter of ours.
        let cntr = unsafe { counter(cntr) };
        let guard = cntr.domain.lock.lock();
        cntr.progress(&guard);
        cntr.state(&guard).errors
    })
}

unsafe extern "C" fn add(cntr: *mut fid_cntr, value: u64) -> c_int {
    data_entry("fi_cntr_add", || {
        // SAFETY: a counter of ours.
        unsafe { counter(cntr) }.update(|s| s.value = s.value.wrapping_add(value));
        0
    })
}

unsafe extern "C" fn adderr(cntr: *mut fid_cntr, value: u64) -> c_int {
    data_entry("fi_cntr_adderr", || {
        // SAFETY: a counter of ours.
        unsafe { counter(cntr) }.update(|s| s.errors = s.errors.wrapping_add(value));
        0
    })
}

unsafe extern "C" fn set(cntr: *mut fid_cntr, value: u64) -> c_int {
    data_entry("fi_cntr_set", || {
        // SAFETY: a counter of ours.
        unsafe { counter(cntr) }.update(|s| s.value = value);
        0
    })
}

unsafe extern "C" fn seterr(cntr: *mut fid_cntr, value: u64) -> c_int {
    data_entry("fi_cntr_seterr", || {
        // SAFETY: a counter of ours.
        unsafe { counter(cntr) }.update(|s| s.errors = value);
        0
    })
}

unsafe extern "C-unwind" fn wait(cntr: *mut fid_cntr, threshold: u64, timeout: c_int) -> c_int {
    let mut call = None;
    let mut errors_before = 0;
    let turn = || {
        // SAFETY: a counter of ours.
        let cntr = unsafe { counter(cntr) };
        let call = call.get_or_insert_with(|| {
            // Without a wait object this polls: fi_cntr.3 asks for none, applications do not.
            errors_before = cntr.state(&cntr.domain.lock.lock()).errors;
            Blocking::begin(&cntr.domain, timeout)
        });
        let turn = call.turn(
            &cntr.domain,
            &cntr.state,
            |s| &mut s.source,
            |guard| {
                cntr.progress(guard);
                let state = cntr.state(guard);
                if state.errors != errors_before {
                    Some(-FI_EAVAIL)
                } else if state.value >= threshold {
                    Some(0)
                } else {
                    None
                }
            },
        );
        turn.map_break(|result| result.unwrap_or(-FI_ETIMEDOUT))
    };
    // SAFETY: nothing here is to be dropped.
    unsafe { waiting_entry("fi_cntr_wait", turn) }
}
