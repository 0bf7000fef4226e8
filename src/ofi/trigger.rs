//! Operations that wait for a counter (fi_trigger.3): triggered operations (FI_TRIGGER) and deferred
//! work (FI_QUEUE_WORK).
//!
//! What waits is in its counter, by threshold. What raises a counter mostly works inside an engine,
//! where nothing can be started: so it only moves what has become due to the domain's list, and
//! [`run_due`] starts that as soon as the engine is free again, under the same hold of the lock.

use super::cntr::Counter;
use super::domain::Domain;
use super::endpoint::Endpoint;
use super::lock::Guard;
use crate::protocol::{
    Cause, Completion, Direction, Failure, Host, OpError, Report, UNKNOWN_SOURCE,
};
use libfabric_sys::{FI_EAGAIN, FI_ECANCELED};
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

/// Operations that may wait for one counter; more get FI_EAGAIN.
const QUEUE_MAX: usize = 65536;

/// What an operation's end is reported with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account {
    pub(super) context: u64,
    /// Whether a completion entry is wanted.
    pub(super) report: Report,
}

/// What an operation is, for an entry that tells its failure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) direction: Direction,
    pub(super) tagged: bool,
    pub(super) tag: u64,
}

/// Starts a checked operation; called again after [`OpError::Again`].
pub(super) type Start = Box<dyn Fn(&Endpoint, &Guard<'_>, Account) -> Result<(), OpError>>;

/// What is done when a counter has come so far. Whatever an endpoint can start is a `Transfer`.
pub(super) enum Action {
    Transfer {
        /// It takes its work back before it goes away.
        endpoint: *const Endpoint,
        kind: Kind,
        start: Start,
    },
    Add(Arc<Counter>, u64),
    Set(Arc<Counter>, u64),
}

/// Who hears of its end.
#[derive(Clone)]
pub(super) enum Owner {
    /// A triggered operation: the endpoint, as of any other operation.
    Endpoint(Account),
    /// A deferred one: a counter, and the endpoint only if asked to.
    Deferred {
        /// The application's `fi_deferred_work`, which names the request and is not looked at again.
        request: usize,
        counter: Option<Arc<Counter>>,
        account: Account,
    },
}

/// An operation that waits.
pub(super) struct Work {
    pub(super) threshold: u64,
    pub(super) action: Action,
    pub(super) owner: Owner,
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

    fn is_of(&self, endpoint: *const Endpoint) -> bool {
        matches!(self.action, Action::Transfer { endpoint: own, .. } if own == endpoint)
    }
}

/// A deferred operation that an endpoint has started.
#[derive(Debug)]
struct Started {
    endpoint: *const Endpoint,
    counter: Option<Arc<Counter>>,
    account: Account,
}

/// What of a domain waits for counters, or has ceased to.
#[derive(Debug, Default)]
pub(super) struct Triggers {
    /// To be started, in order.
    due: VecDeque<Work>,
    /// Deferred operations by the context that the engine knows them by, which is the address of
    /// the record, so that it is nobody else's.
    started: HashMap<u64, Box<Started>>,
    /// Counters that something was queued behind, by their place in memory, until they are closed.
    counters: HashMap<usize, Weak<Counter>>,
    running: bool,
}

impl Triggers {
    /// Whether nothing is to be started.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.due.is_empty()
    }

    pub(super) fn push_due(&mut self, work: Work) {
        self.due.push_back(work);
    }

    /// A counter is closed: nothing waits for it.
    pub(super) fn forget_counter(&mut self, counter: &Arc<Counter>) {
        self.counters.remove(&Arc::as_ptr(counter).addr());
    }

    fn waited_for(&self) -> Vec<Arc<Counter>> {
        self.counters.values().filter_map(Weak::upgrade).collect()
    }
}

/// How a deferred operation ended.
pub(super) struct Ended {
    counter: Option<Arc<Counter>>,
    /// As the application knows it.
    pub(super) account: Account,
}

impl Ended {
    /// Counts it. True: the endpoint reports it too, as it would any other.
    pub(super) fn succeed(&self, guard: &Guard<'_>) -> bool {
        if let Some(counter) = &self.counter {
            counter.count(guard);
        }
        self.account.report.entry
    }

    /// The same for a failure, which the endpoint reports as well if no counter does.
    pub(super) fn fail(&self, guard: &Guard<'_>) -> bool {
        if let Some(counter) = &self.counter {
            counter.count_error(guard);
        }
        self.account.report.entry || self.counter.is_none()
    }
}

/// Whether a deferred operation was started and has not ended.
#[inline]
pub(super) fn is_under_way(domain: &Domain, guard: &Guard<'_>) -> bool {
    // SAFETY: the guard is of this domain; one short step.
    !unsafe { domain.state(guard) }.triggers.started.is_empty()
}

/// The deferred operation behind `context`, which has ended, if it is one.
#[inline]
pub(super) fn ended(domain: &Domain, context: u64, guard: &Guard<'_>) -> Option<Ended> {
    // SAFETY: the guard is of this domain; one short step.
    let started = &mut unsafe { domain.state(guard) }.triggers.started;
    if started.is_empty() {
        return None;
    }
    let record = started.remove(&context)?;
    Some(Ended { counter: record.counter, account: record.account })
}

/// Queues `work` behind `counter`, or starts it if that has come so far already.
/// Errors: EAGAIN when too much waits.
pub(super) fn queue(counter: &Arc<Counter>, work: Work, guard: &Guard<'_>) -> Result<(), i32> {
    if counter.waiting(guard) >= QUEUE_MAX {
        return Err(FI_EAGAIN);
    }
    // SAFETY: the guard is of the counter's domain; one short step.
    let triggers = &mut unsafe { counter.domain.state(guard) }.triggers;
    triggers.counters.entry(Arc::as_ptr(counter).addr()).or_insert_with(|| Arc::downgrade(counter));
    counter.enqueue(work, guard);
    run_due(&counter.domain, guard);
    Ok(())
}

/// Starts what has become due. Called whenever an engine has worked and is free again.
#[inline]
pub(super) fn run_due(domain: &Domain, guard: &Guard<'_>) {
    // SAFETY: the guard is of this domain; one short step.
    if !unsafe { domain.state(guard) }.triggers.is_idle() {
        run(domain, guard);
    }
}

#[cold]
fn run(domain: &Domain, guard: &Guard<'_>) {
    // SAFETY: the guard is of this domain; each borrow ends with its statement.
    let triggers = || &mut unsafe { domain.state(guard) }.triggers;
    if std::mem::replace(&mut triggers().running, true) {
        return;
    }
    // What finds no room keeps its place, and what its endpoint has behind it too.
    let mut starved: Vec<*const Endpoint> = Vec::new();
    let mut kept = VecDeque::new();
    while let Some(work) = { triggers().due.pop_front() } {
        match &work.action {
            Action::Add(counter, by) => counter.raise(*by, guard),
            Action::Set(counter, to) => counter.assign(*to, guard),
            Action::Transfer { endpoint, .. } if starved.contains(endpoint) => kept.push_back(work),
            Action::Transfer { endpoint, .. } => {
                let endpoint = *endpoint;
                if let Some(work) = start(work, domain, guard) {
                    starved.push(endpoint);
                    kept.push_back(work);
                }
            }
        }
    }
    let triggers = triggers();
    triggers.due = kept;
    triggers.running = false;
}

/// Starts a transfer, and gives it back if there is no room.
fn start(work: Work, domain: &Domain, guard: &Guard<'_>) -> Option<Work> {
    let Action::Transfer { endpoint, start, .. } = &work.action else { return None };
    // SAFETY: an endpoint takes its work back, under the lock that we hold, before it goes away.
    let ep = unsafe { &**endpoint };
    let (outcome, key) = match &work.owner {
        Owner::Endpoint(account) => (start(ep, guard, *account), None),
        Owner::Deferred { counter, account, .. } => {
            let record = Box::new(Started {
                endpoint: *endpoint,
                counter: counter.clone(),
                account: *account,
            });
            let key = (&raw const *record).expose_provenance() as u64;
            // SAFETY: the guard is of this domain; one short step.
            unsafe { domain.state(guard) }.triggers.started.insert(key, record);
            let report = Report::new(true, account.report.context);
            (start(ep, guard, Account { context: key, report }), Some(key))
        }
    };
    let Err(error) = outcome else { return None };
    if let Some(key) = key {
        // SAFETY: as above.
        unsafe { domain.state(guard) }.triggers.started.remove(&key);
    }
    match error {
        OpError::Again => Some(work),
        OpError::Error(error) => {
            fail(&work, error, Cause::NotStarted, guard);
            None
        }
    }
}

/// Tells that `work` failed without having been started.
fn fail(work: &Work, error: i32, cause: Cause, guard: &Guard<'_>) {
    let Action::Transfer { endpoint, kind, .. } = &work.action else { return };
    let (account, told) = match &work.owner {
        Owner::Endpoint(account) => (*account, true),
        Owner::Deferred { counter, account, .. } => {
            let ended = Ended { counter: counter.clone(), account: *account };
            (*account, ended.fail(guard))
        }
    };
    if told {
        let completion = Completion {
            direction: kind.direction,
            tagged: kind.tagged,
            context: account.context,
            report: Report::new(true, account.report.context),
            len: 0,
            buffer: 0,
            data: None,
            tag: kind.tag,
            source: UNKNOWN_SOURCE,
            buffer_released: false,
        };
        // SAFETY: as in `start`.
        let ep = unsafe { &**endpoint };
        ep.host(guard).fail(&Failure { completion, error, overflow: 0, cause });
    }
}

/// Takes out what `pick` picks of all that waits or is due.
fn take(domain: &Domain, guard: &Guard<'_>, pick: impl Fn(&Work) -> bool) -> Vec<Work> {
    // SAFETY: the guard is of this domain; each borrow ends with its statement.
    let triggers = || &mut unsafe { domain.state(guard) }.triggers;
    let counters = triggers().waited_for();
    let mut taken: Vec<_> = counters.iter().flat_map(|c| c.take_waiting(guard, &pick)).collect();
    let due = std::mem::take(&mut triggers().due);
    let mut rest = VecDeque::new();
    for work in due {
        if pick(&work) { taken.push(work) } else { rest.push_back(work) }
    }
    triggers().due = rest;
    taken
}

/// FI_CANCEL_WORK: how many requests that `request` names had not been started, and never will be.
pub(super) fn cancel_request(domain: &Domain, request: usize, guard: &Guard<'_>) -> usize {
    let named =
        |work: &Work| matches!(work.owner, Owner::Deferred { request: r, .. } if r == request);
    take(domain, guard, named).len()
}

/// FI_FLUSH_WORK: all deferred work that waits, or that waits for `counter`.
pub(super) fn flush(domain: &Domain, counter: Option<&Counter>, guard: &Guard<'_>) {
    let deferred = |work: &Work| matches!(work.owner, Owner::Deferred { .. });
    match counter {
        Some(counter) => drop(counter.take_waiting(guard, &deferred)),
        None => drop(take(domain, guard, deferred)),
    }
}

/// `fi_cancel` of what waits for a counter, or the engine's context of a deferred operation.
pub(super) fn cancel(endpoint: &Endpoint, context: u64, guard: &Guard<'_>) -> Cancel {
    let domain = &endpoint.domain;
    // One call cancels one operation.
    let found = Cell::new(false);
    let of = |work: &Work| {
        let named = work.is_of(endpoint)
            && matches!(&work.owner, Owner::Endpoint(account) if account.context == context);
        named && !found.replace(true)
    };
    if let Some(work) = take(domain, guard, of).first() {
        fail(work, FI_ECANCELED, Cause::Cancelled, guard);
        return Cancel::Done;
    }
    // SAFETY: the guard is of this domain; one short step.
    let started = &unsafe { domain.state(guard) }.triggers.started;
    let found = started
        .iter()
        .find(|(_, s)| std::ptr::eq(s.endpoint, endpoint) && s.account.context == context);
    found.map_or(Cancel::Unknown, |(key, _)| Cancel::Started(*key))
}

/// What [`cancel`] found.
pub(super) enum Cancel {
    Unknown,
    /// It is cancelled, and was told so.
    Done,
    /// The engine has it under this context.
    Started(u64),
}

/// An endpoint goes: what waits for it is forgotten, as what it has posted.
pub(super) fn forget(endpoint: &Endpoint, guard: &Guard<'_>) {
    drop(take(&endpoint.domain, guard, |work| work.is_of(endpoint)));
    // SAFETY: the guard is of the endpoint's domain; one short step.
    let triggers = &mut unsafe { endpoint.domain.state(guard) }.triggers;
    triggers.started.retain(|_, started| !std::ptr::eq(started.endpoint, endpoint));
}
