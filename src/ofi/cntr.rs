//! `struct fid_cntr`: event counters and waiting for them.

use super::blocking::{Blocking, begin_waiting};
use super::domain::Domain;
use super::guard::{code, data_entry, entries, offers, waiting_entry};
use super::lock::{Guard, Locked};
use super::own::{Object, close as close_object, ours, own, own_behind_hooks};
use super::progress::Progress;
use super::source::{Source, this_thread};
use super::table::{Operations, SLACK, Slack, Table, cancellable};
use super::trigger::{Action, Count, Owner, Work};
use super::wait::{Conditional, Waitable, Waiter};
use super::wait_set::WaitObject;
use crate::telemetry::log;
use libfabric_sys::{
    FI_CLASS_CNTR, FI_CNTR_EVENTS_COMP, FI_EAGAIN, FI_EAVAIL, FI_EINVAL, FI_ETIMEDOUT,
    FI_GETOPSFLAG, FI_SETOPSFLAG, fi_cntr_attr, fi_ops, fi_ops_cntr, fi_ops_cntr_2_7, fid,
    fid_cntr,
};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Most operations that may wait for one counter; more get FI_EAGAIN.
const QUEUE_MAX: usize = 65536;

/// The values and the waiting operations, under the domain's lock.
#[derive(Debug)]
pub(crate) struct CntrState {
    value: u64,
    errors: u64,
    /// How often each was changed. The same value may stand for other events: an application may set it back.
    changes: Changes,
    /// The changes that the application has been told of: later ones are events that it has not seen, and has to be
    /// told of before it sleeps.
    shown: Changes,
    /// The threads that wait, and the number of changes that each has been told of. What another one has read meanwhile
    /// is new to it, once.
    told: Vec<(usize, u64)>,
    pub(crate) source: Source,
    /// Operations that wait for a value, by threshold; those with the same threshold in order of arrival.
    waiting: VecDeque<Work>,
}

/// Most threads that a counter knows; one that it has forgotten is told once more than needed.
const TOLD_MAX: usize = 64;

/// Numbers of changes of a counter's value and of its errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Changes {
    value: u64,
    errors: u64,
}

impl Changes {
    fn sum(self) -> u64 {
        self.value.wrapping_add(self.errors)
    }
}

impl CntrState {
    #[inline]
    fn set_value(&mut self, to: u64) {
        self.value = to;
        self.changes.value += 1;
    }

    fn set_errors(&mut self, to: u64) {
        self.errors = to;
        self.changes.errors += 1;
    }

    /// The value, which the application is told.
    fn show_value(&mut self) -> u64 {
        self.shown.value = self.changes.value;
        self.tell(this_thread());
        self.value
    }

    /// The errors, which the application is told.
    fn show_errors(&mut self) -> u64 {
        self.shown.errors = self.changes.errors;
        self.errors
    }

    /// Notes that the thread is told of all changes. Returns whether there was none to tell it of.
    fn tell(&mut self, thread: usize) -> bool {
        let now = self.changes.sum();
        if self.source.waiter.is_none() {
            return true;
        }
        if let Some((_, told)) = self.told.iter_mut().find(|(known, _)| *known == thread) {
            return std::mem::replace(told, now) == now;
        }
        if self.told.len() >= TOLD_MAX {
            self.told.remove(0);
        }
        self.told.push((thread, now));
        now == 0
    }

    /// Whether a thread that is about to sleep has seen all events.
    fn has_seen(&mut self, thread: usize) -> bool {
        let seen = self.changes == self.shown;
        // An application that never asks for the errors hears of each change once, by this refusal, and then may sleep.
        self.shown.errors = self.changes.errors;
        self.tell(thread) && seen
    }

    /// Whether a waiting operation may be due.
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

/// The part of a counter that endpoints share.
#[derive(Debug)]
pub(crate) struct Counter {
    pub(crate) domain: Arc<Domain>,
    pub(crate) state: Locked<CntrState>,
    wait: WaitObject,
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

static FID_OPS: Table<fi_ops> =
    Table::new(fi_ops { close: Some(close), control: Some(control), ..fi_ops::STUBS });

static OPS: Table<fi_ops_cntr_2_7> = Table::new(fi_ops_cntr_2_7 {
    base: fi_ops_cntr {
        read: Some(read),
        readerr: Some(readerr),
        add: Some(add),
        adderr: Some(adderr),
        set: Some(set),
        seterr: Some(seterr),
        wait: cancellable!(wait: fn(*mut fid_cntr, u64, c_int) -> c_int),
        ..fi_ops_cntr_2_7::STUBS.base
    },
    ..fi_ops_cntr_2_7::STUBS
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
    offers("fi_cntr_open", attr.flags, 0)?;
    if attr.events != FI_CNTR_EVENTS_COMP {
        let events = attr.events;
        log::warn(format_args!(
            "fi_cntr_open refused: events {events}, offered FI_CNTR_EVENTS_COMP"
        ));
        return Err(FI_EINVAL);
    }
    // SAFETY: the application's wait set.
    let wait = unsafe { WaitObject::open(attr.wait_obj, attr.wait_set) }?;
    let shared = Arc::new(Counter {
        domain: domain.clone(),
        state: Locked::new(CntrState {
            value: 0,
            errors: 0,
            changes: Changes::default(),
            shown: Changes::default(),
            told: Vec::new(),
            source: Source::new(wait.waiter.clone()),
            waiting: VecDeque::new(),
        }),
        wait,
    });
    begin_waiting(&shared, &shared.wait, domain)?;
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
/// Errors: EINVAL for an object of another provider.
///
/// # Safety
/// `cntr` is null or an open object.
pub(crate) unsafe fn shared<'a>(cntr: *mut fid) -> Result<&'a Arc<Counter>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own::<CntrFid>(cntr) }.map(|own| &own.shared)
}

/// The same for a counter that a structure names. Errors: EINVAL for an object of another provider.
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
        // SAFETY: guards passed here belong to this counter's domain, and each caller uses the result
        // for one step that reaches no endpoint.
        unsafe { self.state.get(guard) }
    }

    #[allow(clippy::mut_from_ref)] // see Locked::get
    pub(super) fn source<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut Source {
        &mut self.state(guard).source
    }

    #[inline]
    fn progress(&self, guard: &Guard<'_>) {
        Source::progress(&self.state, |state| &mut state.source, guard);
    }

    /// Makes progress, and returns the number of events so far.
    pub(crate) fn poll(&self, guard: &Guard<'_>) -> u64 {
        self.progress(guard);
        self.state(guard).changes.sum()
    }

    /// Counts an operation that succeeded.
    #[inline]
    pub(crate) fn count(&self, guard: &Guard<'_>) {
        self.change(guard, |state| state.set_value(state.value.wrapping_add(1)));
    }

    /// Changes a value, wakes waiting threads, and hands over the operations that have become due.
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
            self.domain.triggers.push_due(work, guard);
        }
    }

    /// Queues an operation behind the counter, or starts it if the counter has reached its threshold already.
    /// Errors: EAGAIN when `QUEUE_MAX` operations wait.
    pub(super) fn queue(
        self: &Arc<Self>,
        threshold: u64,
        (action, owner): (Action, Owner),
        guard: &Guard<'_>,
    ) -> Result<(), i32> {
        let waiting = &mut self.state(guard).waiting;
        if waiting.len() >= QUEUE_MAX {
            return Err(FI_EAGAIN);
        }
        let at = waiting.partition_point(|other| other.threshold <= threshold);
        let waits_for = Arc::as_ptr(self).addr();
        waiting.insert(at, Work { threshold, action, owner, waits_for });
        self.domain.triggers.note_counter(self.clone(), guard);
        self.release(guard);
        self.domain.triggers.run_due(guard);
        Ok(())
    }

    /// Whether no other object refers to the counter and no operation waits for it.
    fn may_close(self: &Arc<Self>) -> Result<(), c_int> {
        self.domain.lock.may_close(|guard| {
            let used = Arc::strong_count(self) > 1 || !self.state(guard).waiting.is_empty();
            if !used {
                self.domain.triggers.forget_counter(Arc::as_ptr(self).cast(), guard);
            }
            used
        })
    }

    /// Changes a value for the application. Returns 0.
    fn update(&self, change: impl FnOnce(&mut CntrState)) -> c_int {
        let guard = self.domain.lock.lock();
        self.change(&guard, change);
        self.domain.triggers.run_due(&guard);
        drop(guard);
        if let Some(thread) = self.domain.thread() {
            thread.kick();
        }
        0
    }
}

impl Count for Counter {
    fn raise(&self, by: u64, guard: &Guard<'_>) {
        self.change(guard, |state| state.set_value(state.value.wrapping_add(by)));
    }

    fn assign(&self, to: u64, guard: &Guard<'_>) {
        self.change(guard, |state| state.set_value(to));
    }

    fn count_error(&self, guard: &Guard<'_>) {
        self.change(guard, |state| state.set_errors(state.errors.wrapping_add(1)));
    }

    fn take_waiting(&self, guard: &Guard<'_>, pick: &dyn Fn(&Work) -> bool) -> Vec<Work> {
        let state = self.state(guard);
        let mut taken = Vec::new();
        for work in std::mem::take(&mut state.waiting) {
            if pick(&work) { taken.push(work) } else { state.waiting.push_back(work) }
        }
        taken
    }

    fn attach(&self, endpoint: *const dyn Progress, guard: &Guard<'_>) -> Result<(), i32> {
        self.state(guard).source.attach(endpoint, guard)
    }

    fn detach(&self, endpoint: *const dyn Progress, guard: &Guard<'_>) {
        self.state(guard).source.detach(endpoint, guard);
    }
}

impl Waitable for Counter {
    fn try_wait(&self) -> bool {
        let guard = self.domain.lock.lock();
        self.progress(&guard);
        let state = self.state(&guard);
        state.has_seen(this_thread()) && state.source.arm_fd(&guard)
    }

    fn end_wait(&self) {
        let guard = self.domain.lock.lock();
        self.state(&guard).source.disarm_fd(&guard);
    }
}

impl Conditional for Counter {
    fn take_condition(&self, guard: &Guard<'_>) -> Option<Arc<Waiter>> {
        self.state(guard).source.take_condition()
    }
}

entries! { entry -> c_int;
    close "fi_close(cntr)" (fid: *mut fid) => close_object(fid, |object: &CntrFid| {
        object.shared.wait.close(|| object.shared.may_close())
    });
    control "fi_control(cntr)" (fid: *mut fid, command: c_int, arg: *mut c_void)
        => match command {
            FI_GETOPSFLAG | FI_SETOPSFLAG => code(default_flags(command, arg.cast::<u64>().as_mut())),
            _ => ours::<CntrFid>(fid).shared.wait.control(command, arg),
        };
}

/// FI_GETOPSFLAG, FI_SETOPSFLAG (fi_cntr.3): a counter has no flags. Errors: EINVAL for any.
fn default_flags(command: c_int, flags: Option<&mut u64>) -> Result<(), i32> {
    let flags = flags.ok_or(FI_EINVAL)?;
    if command == FI_SETOPSFLAG {
        return offers("FI_SETOPSFLAG", *flags, 0);
    }
    *flags = 0;
    Ok(())
}

/// # Safety
/// `cntr` is a counter of this provider.
unsafe fn counter<'a>(cntr: *mut fid_cntr) -> &'a Counter {
    // SAFETY: the caller vouches.
    unsafe { &(*cntr.cast::<CntrFid>()).shared }
}

unsafe extern "C" fn read(cntr: *mut fid_cntr) -> u64 {
    data_entry("fi_cntr_read", || {
        // SAFETY: a counter of this provider.
        let cntr = unsafe { counter(cntr) };
        let value = {
            let guard = cntr.domain.lock.lock();
            cntr.state(&guard).source.disarm_fd(&guard);
            cntr.progress(&guard);
            cntr.state(&guard).show_value()
        };
        cntr.domain.give_way();
        value
    })
}

unsafe extern "C" fn readerr(cntr: *mut fid_cntr) -> u64 {
    data_entry("fi_cntr_readerr", || {
        // SAFETY: a counter of this provider.
        let cntr = unsafe { counter(cntr) };
        let guard = cntr.domain.lock.lock();
        cntr.progress(&guard);
        cntr.state(&guard).show_errors()
    })
}

entries! { data_entry -> c_int;
    add "fi_cntr_add" (cntr: *mut fid_cntr, by: u64) => counter(cntr).update(|s| s.set_value(s.value.wrapping_add(by)));
    adderr "fi_cntr_adderr" (cntr: *mut fid_cntr, by: u64)
        => counter(cntr).update(|s| s.set_errors(s.errors.wrapping_add(by)));
    set "fi_cntr_set" (cntr: *mut fid_cntr, to: u64) => counter(cntr).update(|s| s.set_value(to));
    seterr "fi_cntr_seterr" (cntr: *mut fid_cntr, to: u64) => counter(cntr).update(|s| s.set_errors(to));
}

unsafe extern "C-unwind" fn wait(cntr: *mut fid_cntr, threshold: u64, timeout: c_int) -> c_int {
    let mut call = None;
    let mut errors_before = 0;
    let turn = || {
        // SAFETY: a counter of this provider.
        let cntr = unsafe { counter(cntr) };
        let call = call.get_or_insert_with(|| {
            // Without a wait object this polls: fi_cntr.3 demands one, but applications call without.
            errors_before = cntr.state(&cntr.domain.lock.lock()).errors;
            Blocking::begin(&cntr.domain, timeout, false)
        });
        let turn = call.turn(
            &cntr.domain,
            &cntr.state,
            |s| &mut s.source,
            |guard| {
                cntr.progress(guard);
                let state = cntr.state(guard);
                if state.errors != errors_before {
                    state.show_errors();
                    Some(-FI_EAVAIL)
                } else if state.value >= threshold {
                    state.show_value();
                    Some(0)
                } else {
                    None
                }
            },
        );
        turn.map_break(|result| {
            result.unwrap_or_else(|| {
                cntr.state(&cntr.domain.lock.lock()).show_value();
                -FI_ETIMEDOUT
            })
        })
    };
    // SAFETY: nothing here is to be dropped.
    unsafe { waiting_entry("fi_cntr_wait", turn) }
}
