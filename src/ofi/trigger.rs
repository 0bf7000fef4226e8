//! Operations that wait for a counter (fi_trigger.3): triggered operations (FI_TRIGGER) and deferred
//! work (FI_QUEUE_WORK).
//!
//! Waiting operations are in their counter, by threshold. A counter is mostly raised inside an engine, where no
//! operation can be started. So raising it only moves the operations that are due to the domain's list, and
//! [`Triggers::run_due`] starts them once the engine is free again, under the same hold of the lock.

use super::lock::{Guard, Locked};
use super::progress::Progress;
use crate::protocol::{Cause, Completion, Direction, Failure, OpError, Report, UNKNOWN_SOURCE};
use libfabric_sys::{FI_ECANCELED, fi_addr_t};
use std::cell::Cell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Debug;
use std::ptr::addr_eq;
use std::sync::{Arc, Weak};

/// A counter, as regions, deferred work and the domain see it. The guards belong to its domain.
pub(super) trait Count: Debug {
    /// Adds to the value.
    fn raise(&self, by: u64, guard: &Guard<'_>);
    /// Sets the value.
    fn assign(&self, to: u64, guard: &Guard<'_>);
    /// Counts an operation that failed.
    fn count_error(&self, guard: &Guard<'_>);
    /// Takes out the waiting operations that `pick` selects.
    fn take_waiting(&self, guard: &Guard<'_>, pick: &dyn Fn(&Work) -> bool) -> Vec<Work>;
    /// Adds `endpoint`, which feeds the counter and wakes its waiters. Errors: those of the wait object.
    fn attach(&self, endpoint: *const dyn Progress, guard: &Guard<'_>) -> Result<(), i32>;
    /// The inverse of `attach`.
    fn detach(&self, endpoint: *const dyn Progress, guard: &Guard<'_>);
}

/// How an operation's end is reported.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account {
    pub(super) context: u64,
    /// Whether a completion entry is wanted.
    pub(super) report: Report,
}

/// The kind of an operation, for the error entry of its failure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) direction: Direction,
    pub(super) tagged: bool,
    pub(super) tag: u64,
    /// The peer that it is for; FI_ADDR_NOTAVAIL: no particular one.
    pub(super) to: fi_addr_t,
}

/// Starts a checked operation of a live endpoint; called again after [`OpError::Again`].
pub(super) type Start = Box<dyn Fn(&Guard<'_>, Account) -> Result<(), OpError>>;

/// The action when a counter reaches its threshold. All operations that an endpoint starts are a `Transfer`.
pub(super) enum Action {
    Transfer {
        /// The endpoint takes its work back before it is freed.
        endpoint: *const dyn Progress,
        kind: Kind,
        start: Start,
    },
    Add(Arc<dyn Count>, u64),
    Set(Arc<dyn Count>, u64),
}

/// The objects to which the end of an operation is reported.
#[derive(Clone)]
pub(super) enum Owner {
    /// A triggered operation: reported to the endpoint, as any other operation.
    Endpoint(Account),
    /// A deferred operation: reported to a counter, and to the endpoint only if the application asked for that.
    Deferred {
        /// The address of the application's `fi_deferred_work`, which names the request and is not read again.
        request: usize,
        counter: Option<Arc<dyn Count>>,
        account: Account,
    },
}

/// An operation that waits for a counter.
pub(super) struct Work {
    pub(super) threshold: u64,
    pub(super) action: Action,
    pub(super) owner: Owner,
    /// The address of the counter, also once the operation is due; 0: that is closed. It is only compared.
    pub(super) waits_for: usize,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Work at {}", self.threshold)
    }
}

impl Work {
    /// Triggered operations wait for successes, deferred work for failures too.
    pub(super) fn is_due(&self, value: u64, errors: u64) -> bool {
        let reached = match self.owner {
            Owner::Endpoint(_) => value,
            Owner::Deferred { .. } => value.saturating_add(errors),
        };
        self.threshold <= reached
    }

    fn is_of(&self, endpoint: *const dyn Progress) -> bool {
        matches!(self.action, Action::Transfer { endpoint: own, .. } if addr_eq(own, endpoint))
    }

    fn receives(&self) -> bool {
        matches!(self.action, Action::Transfer { kind, .. } if kind.direction == Direction::Receive)
    }

    /// The number of the transmit or receive context that it is of.
    fn context(&self) -> u8 {
        let (Owner::Endpoint(account) | Owner::Deferred { account, .. }) = &self.owner;
        account.report.context()
    }

    /// The operations that need room in one place, whatever their peers.
    fn pool(&self) -> Option<Pool> {
        let Action::Transfer { endpoint, .. } = self.action else { return None };
        let (Owner::Endpoint(account) | Owner::Deferred { account, .. }) = &self.owner;
        Some((endpoint, account.report, self.receives()))
    }

    /// The operations that start in the order of their thresholds: those of one context to one peer.
    fn order(&self) -> Option<Order> {
        let Action::Transfer { endpoint, kind, .. } = self.action else { return None };
        Some((endpoint.cast::<()>().addr(), self.context(), self.receives(), kind.to))
    }
}

/// Endpoint, context, whether that one receives, peer.
type Order = (usize, u8, bool, fi_addr_t);
/// Endpoint, context and whether an entry is wanted, whether that context receives.
type Pool = (*const dyn Progress, Report, bool);

/// A deferred operation that an endpoint has started.
#[derive(Debug)]
struct Started {
    endpoint: *const dyn Progress,
    /// It is a receive.
    receives: bool,
    counter: Option<Arc<dyn Count>>,
    account: Account,
}

/// The operations of a domain that wait for counters, or have become due. Only the holder of the domain's lock may
/// access them; the guards belong to that domain.
#[derive(Debug, Default)]
pub(super) struct Triggers(Locked<Lists>);

#[derive(Debug, Default)]
struct Lists {
    /// Operations to be started, in order.
    due: VecDeque<Work>,
    /// Started deferred operations, by the context that the engine has for them. The context is the
    /// address of the record, so it is unique.
    started: HashMap<u64, Box<Started>>,
    /// Counters with queued operations, by their address, until they are closed.
    counters: HashMap<usize, Weak<dyn Count>>,
    running: bool,
}

impl Lists {
    fn waited_for(&self) -> Vec<Arc<dyn Count>> {
        self.counters.values().filter_map(Weak::upgrade).collect()
    }
}

/// How a deferred operation ended.
pub(super) struct Ended {
    counter: Option<Arc<dyn Count>>,
    /// The application's context and flags.
    pub(super) account: Account,
}

impl Ended {
    /// Counts the success. True: the endpoint must report it too, as for any other operation, and raises the counter
    /// that is `bound` to it. One that is both counts once (fi_trigger.3).
    pub(super) fn succeed(&self, bound: Option<*const ()>, guard: &Guard<'_>) -> bool {
        let reported = self.account.report.entry();
        if let Some(counter) = self.counter(bound, reported) {
            counter.raise(1, guard);
        }
        reported
    }

    /// The same for a failure, which the endpoint must report if there is no counter.
    pub(super) fn fail(&self, bound: Option<*const ()>, guard: &Guard<'_>) -> bool {
        let reported = self.account.report.entry() || self.counter.is_none();
        if let Some(counter) = self.counter(bound, reported) {
            counter.count_error(guard);
        }
        reported
    }

    /// The counter of the request, unless the endpoint's report is going to raise it.
    fn counter(&self, bound: Option<*const ()>, reported: bool) -> Option<&Arc<dyn Count>> {
        let is_bound = |own: &Arc<dyn Count>| Some(Arc::as_ptr(own).cast()) == bound;
        self.counter.as_ref().filter(|own| !(reported && is_bound(own)))
    }
}

/// The result of [`Triggers::cancel`].
pub(super) enum Cancel {
    Unknown,
    /// The operation is cancelled, and that was reported.
    Done,
    /// The engine has started it, under this context.
    Started(u64),
}

impl Triggers {
    #[inline]
    #[allow(clippy::mut_from_ref)] // see Locked::get
    fn lists<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut Lists {
        // SAFETY: the guard belongs to this domain; each caller uses the result for one step that reaches no endpoint
        // and no counter.
        unsafe { self.0.get(guard) }
    }

    /// Whether no operation is due.
    #[inline]
    pub(super) fn are_idle(&self, guard: &Guard<'_>) -> bool {
        self.lists(guard).due.is_empty()
    }

    pub(super) fn push_due(&self, work: Work, guard: &Guard<'_>) {
        self.lists(guard).due.push_back(work);
    }

    /// Remembers a counter for which an operation waits.
    pub(super) fn note_counter(&self, counter: Arc<dyn Count>, guard: &Guard<'_>) {
        let at = Arc::as_ptr(&counter).cast::<()>().addr();
        self.lists(guard).counters.entry(at).or_insert_with(|| Arc::downgrade(&counter));
    }

    /// Forgets a counter, by its address, which is being closed: no operation waits for it.
    pub(super) fn forget_counter(&self, counter: *const (), guard: &Guard<'_>) {
        let lists = self.lists(guard);
        lists.counters.remove(&counter.addr());
        // Another counter may have this address later.
        let due = lists.due.iter_mut().filter(|work| work.waits_for == counter.addr());
        due.for_each(|work| work.waits_for = 0);
    }

    /// Whether a started deferred operation has not ended yet.
    #[inline]
    pub(super) fn are_under_way(&self, guard: &Guard<'_>) -> bool {
        !self.lists(guard).started.is_empty()
    }

    /// Takes out the deferred operation behind `context`, which has ended; `None` if it is no deferred one.
    #[inline]
    pub(super) fn ended(&self, context: u64, guard: &Guard<'_>) -> Option<Ended> {
        let started = &mut self.lists(guard).started;
        if started.is_empty() {
            return None;
        }
        let record = started.remove(&context)?;
        Some(Ended { counter: record.counter, account: record.account })
    }

    /// Starts the operations that are due. Called whenever an engine has worked and is free again.
    #[inline]
    pub(super) fn run_due(&self, guard: &Guard<'_>) {
        if !self.are_idle(guard) {
            self.run(guard);
        }
    }

    #[cold]
    fn run(&self, guard: &Guard<'_>) {
        if std::mem::replace(&mut self.lists(guard).running, true) {
            return;
        }
        // An operation without room keeps its place, and so do the later ones of its order.
        let mut starved: HashSet<Option<Order>> = HashSet::new();
        let mut full: Vec<Pool> = Vec::new();
        let mut kept = VecDeque::new();
        while let Some(work) = { self.lists(guard).due.pop_front() } {
            match &work.action {
                Action::Add(counter, by) => counter.raise(*by, guard),
                Action::Set(counter, to) => counter.assign(*to, guard),
                Action::Transfer { .. } => {
                    let order = work.order();
                    if starved.contains(&order) {
                        kept.push_back(work);
                    } else if let Some(work) = self.start_if_room(work, &mut full, guard) {
                        starved.insert(order);
                        kept.push_back(work);
                    }
                }
            }
        }
        let lists = self.lists(guard);
        lists.due = kept;
        lists.running = false;
    }

    /// Starts a transfer, or returns it if there is no room. None is tried whose pool is `full`.
    fn start_if_room(&self, work: Work, full: &mut Vec<Pool>, guard: &Guard<'_>) -> Option<Work> {
        let pool = work.pool()?;
        let (endpoint, report, receives) = pool;
        let same = |(other, of, way): &Pool| {
            addr_eq(*other, endpoint) && (*of, *way) == (report, receives)
        };
        if full.iter().any(same) {
            return Some(work);
        }
        let work = self.start(work, guard)?;
        // SAFETY: an endpoint takes its work back, under this lock, before it is freed.
        if !unsafe { &*endpoint }.has_room(report, receives, guard) {
            full.push(pool);
        }
        Some(work)
    }

    /// Starts a transfer, or returns it if there is no room.
    fn start(&self, work: Work, guard: &Guard<'_>) -> Option<Work> {
        let Action::Transfer { endpoint, start, .. } = &work.action else { return None };
        let (outcome, key) = match &work.owner {
            Owner::Endpoint(account) => (start(guard, *account), None),
            Owner::Deferred { counter, account, .. } => {
                let record = Box::new(Started {
                    endpoint: *endpoint,
                    receives: work.receives(),
                    counter: counter.clone(),
                    account: *account,
                });
                let key = (&raw const *record).expose_provenance() as u64;
                self.lists(guard).started.insert(key, record);
                (start(guard, Account { context: key, ..*account }), Some(key))
            }
        };
        let Err(error) = outcome else {
            // SAFETY: an endpoint takes its work back, under this lock, before it is freed.
            unsafe { &**endpoint }.rouse(guard);
            return None;
        };
        match error {
            OpError::Again => {
                key.map(|key| self.lists(guard).started.remove(&key));
                Some(work)
            }
            OpError::Error(error) => {
                // The endpoint finds the record of a deferred operation, as for one that fails later.
                fail(&work, key, (error, Cause::NotStarted), guard);
                None
            }
        }
    }

    /// Takes out the waiting or due operations that `pick` selects.
    fn take(&self, guard: &Guard<'_>, pick: impl Fn(&Work) -> bool) -> Vec<Work> {
        let counters = self.lists(guard).waited_for();
        let mut taken: Vec<_> =
            counters.iter().flat_map(|c| c.take_waiting(guard, &pick)).collect();
        for work in std::mem::take(&mut self.lists(guard).due) {
            if pick(&work) { taken.push(work) } else { self.push_due(work, guard) }
        }
        taken
    }

    /// FI_CANCEL_WORK: cancels the requests named `request` that were not started, and returns their number.
    pub(super) fn cancel_request(&self, request: usize, guard: &Guard<'_>) -> usize {
        let named =
            |work: &Work| matches!(work.owner, Owner::Deferred { request: r, .. } if r == request);
        self.take(guard, named).len()
    }

    /// FI_FLUSH_WORK: cancels all deferred work that was not started, or only that of the counter with this address.
    pub(super) fn flush(&self, counter: Option<usize>, guard: &Guard<'_>) {
        drop(self.take(guard, |work| {
            matches!(work.owner, Owner::Deferred { .. })
                && counter.is_none_or(|counter| work.waits_for == counter)
        }));
    }

    /// `fi_cancel` of an operation that waits for a counter; finds the engine's context of a started deferred one.
    pub(super) fn cancel(
        &self,
        endpoint: *const dyn Progress,
        context: u64,
        guard: &Guard<'_>,
    ) -> Cancel {
        // One call cancels one operation.
        let found = Cell::new(false);
        let of = |work: &Work| {
            let named = work.is_of(endpoint)
                && matches!(&work.owner, Owner::Endpoint(account) if account.context == context);
            named && !found.replace(true)
        };
        if let Some(work) = self.take(guard, of).first() {
            fail(work, None, (FI_ECANCELED, Cause::Cancelled), guard);
            return Cancel::Done;
        }
        let mut started = self.lists(guard).started.iter();
        let found =
            started.find(|(_, s)| addr_eq(s.endpoint, endpoint) && s.account.context == context);
        found.map_or(Cancel::Unknown, |(key, _)| Cancel::Started(*key))
    }

    /// Forgets the operations of a context that is closed: its receives, also those that are posted, which end without a
    /// report; or what it would have initiated.
    pub(super) fn forget_context(
        &self,
        endpoint: *const dyn Progress,
        (context, receives): (u8, bool),
        guard: &Guard<'_>,
    ) {
        drop(self.take(guard, |work| {
            work.is_of(endpoint) && work.context() == context && work.receives() == receives
        }));
        // A context that sends closes when nothing of it pends.
        self.lists(guard).started.retain(|_, started| {
            let of_it = started.account.report.context() == context && started.receives;
            !(receives && of_it && addr_eq(started.endpoint, endpoint))
        });
    }

    /// Forgets the operations of an endpoint that is closed, as its posted receives are dropped.
    pub(super) fn forget(&self, endpoint: *const dyn Progress, guard: &Guard<'_>) {
        drop(self.take(guard, |work| work.is_of(endpoint)));
        self.lists(guard).started.retain(|_, started| !addr_eq(started.endpoint, endpoint));
    }
}

/// Reports that `work` failed without having been started. `record`: that of a deferred operation.
fn fail(work: &Work, record: Option<u64>, (error, cause): (i32, Cause), guard: &Guard<'_>) {
    let Action::Transfer { endpoint, kind, .. } = &work.action else { return };
    let (Owner::Endpoint(account) | Owner::Deferred { account, .. }) = &work.owner;
    let completion = Completion {
        direction: kind.direction,
        tagged: kind.tagged,
        context: record.unwrap_or(account.context),
        report: Report::new(true, account.report.context()),
        len: 0,
        buffer: 0,
        data: None,
        tag: kind.tag,
        source: UNKNOWN_SOURCE,
        buffer_released: false,
    };
    // SAFETY: an endpoint takes its work back, under this lock, before it is freed.
    unsafe { &**endpoint }.fail(&Failure { completion, error, overflow: 0, cause }, guard);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ofi::lock::DomainLock;
    use crate::ofi::source::tests::Fed;
    use std::rc::Rc;

    #[test]
    fn one_operation_is_tried_where_none_has_room() {
        let (triggers, lock, endpoint) = (Triggers::default(), DomainLock::new(true), Fed::new());
        let guard = lock.lock();
        let tries = Rc::new(Cell::new(0));
        for n in 0..10 {
            let tries = tries.clone();
            let start: Start = Box::new(move |_, _| {
                tries.set(tries.get() + 1);
                Err(OpError::Again)
            });
            let kind = Kind { direction: Direction::Send, tagged: false, tag: 0, to: n / 2 };
            let action = Action::Transfer { endpoint: &raw const endpoint, kind, start };
            let owner = Owner::Endpoint(Account { context: n, report: Report::new(true, 0) });
            triggers.push_due(Work { threshold: 0, action, owner, waits_for: 1 }, &guard);
        }
        for (has_room, tried) in [(true, 5), (false, 1), (false, 1)] {
            endpoint.has_room.set(has_room);
            tries.set(0);
            triggers.run_due(&guard);
            assert_eq!(tries.get(), tried, "one for each peer, or one");
            assert!(!triggers.are_idle(&guard));
        }
        triggers.forget(&raw const endpoint, &guard);
        assert!(triggers.are_idle(&guard));
    }

    /// Deferred work that is due and has no room is flushed with the counter that it waited for, and no other is.
    #[test]
    fn work_of_a_counter_is_flushed_also_when_it_is_due() {
        let (triggers, lock, endpoint) = (Triggers::default(), DomainLock::new(true), Fed::new());
        let guard = lock.lock();
        let account = Account { context: 5, report: Report::new(true, 0) };
        for n in 0..6 {
            let start: Start = Box::new(|_, _| Err(OpError::Again));
            let kind = Kind { direction: Direction::Send, tagged: false, tag: 0, to: 0 };
            let action = Action::Transfer { endpoint: &raw const endpoint, kind, start };
            let owner = match n / 3 {
                0 => Owner::Endpoint(account),
                _ => Owner::Deferred { request: n, counter: None, account },
            };
            triggers.push_due(Work { threshold: 0, action, owner, waits_for: 1 + n % 3 }, &guard);
        }
        triggers.run_due(&guard);
        let left = || -> Vec<usize> {
            let due = &triggers.lists(&guard).due;
            due.iter().map(|work| work.waits_for).collect()
        };
        triggers.flush(Some(2), &guard);
        assert_eq!(left(), [1, 2, 3, 1, 3]);
        triggers.forget_counter(std::ptr::without_provenance(1), &guard);
        triggers.flush(Some(1), &guard);
        assert_eq!(left(), [0, 2, 3, 0, 3]);
        triggers.flush(None, &guard);
        assert_eq!(left(), [0, 2, 3]);
        triggers.forget(&raw const endpoint, &guard);
    }
}
