//! The one loop behind `fi_cq_sread`, `fi_cntr_wait` and similar calls: poll a little, then sleep until
//! an endpoint's doorbell, a link, a signal or the timeout ends the sleep.

use super::domain::Domain;
use super::elsewhere::Elsewhere;
use super::lock::{Guard, Locked};
use super::source::Source;
use super::wait::{Conditional, WaitKind, Waitable};
use super::wait_set::WaitObject;
use crate::sys::clock::{Deadline, now_ns};
use crate::sys::{Errno, process};
use crate::telemetry::trace::{self, Kind};
use std::ops::ControlFlow;
use std::sync::Arc;

/// The state of a blocking call. It must need no drop, because its thread may be cancelled between two turns
/// (`guard::waiting_entry`).
#[derive(Debug)]
pub(crate) struct Blocking {
    deadline: Deadline,
    spin_until: u64,
    elsewhere: Elsewhere,
    /// A signal to the thread ends the call, as the end of the time does.
    by_signal: bool,
}

impl Blocking {
    /// `timeout_ms`: milliseconds; -1 waits without a limit. `by_signal`: a signal ends the call too.
    pub(crate) fn begin(domain: &Domain, timeout_ms: i32, by_signal: bool) -> Self {
        let begun = now_ns();
        Self {
            deadline: Deadline::after_ms(timeout_ms),
            spin_until: begun.saturating_add(domain.config.endpoint.spin_us.saturating_mul(1000)),
            elsewhere: Elsewhere::after(begun),
            by_signal,
        }
    }

    /// Calls `ready` with the domain locked until it returns a result, the time is over or a signal ends the call
    /// (`None`), or the thread has slept once. `source` finds the source inside the locked state.
    ///
    /// `ready` makes progress and checks for a result; it returns `None` to keep waiting.
    pub(crate) fn turn<T, R>(
        &mut self,
        domain: &Domain,
        state: &Locked<T>,
        source: impl Fn(&mut T) -> &mut Source,
        mut ready: impl FnMut(&Guard<'_>) -> Option<R>,
    ) -> ControlFlow<Option<R>> {
        let waiter = loop {
            let guard = domain.lock.lock();
            if let Some(result) = ready(&guard) {
                return ControlFlow::Break(Some(result));
            }
            if self.deadline.expired() {
                return ControlFlow::Break(None);
            }
            if now_ns() < self.spin_until {
                drop(guard);
                std::hint::spin_loop();
                continue;
            }
            // SAFETY: the guard belongs to this state's domain; nothing else is borrowed from the cell.
            let source = source(unsafe { state.get(&guard) });
            break match &source.waiter {
                Some(waiter) if waiter.kind() != WaitKind::Yield => {
                    let waiter = waiter.clone();
                    source.begin_sleep(&guard).then_some(waiter)
                }
                _ => None,
            };
        };
        let Some(waiter) = waiter else {
            process::yield_now();
            self.elsewhere.look(Some(domain));
            return ControlFlow::Continue(());
        };
        let timeout = match self.deadline.poll_ms() {
            -1 => self.elsewhere.slice_ms(),
            ms => ms.min(self.elsewhere.slice_ms()),
        };
        trace::of_thread(Kind::SleepBegin);
        let signalled = waiter.block(timeout) == Err(Errno(libc::EINTR));
        trace::of_thread(Kind::SleepEnd);
        let guard = domain.lock.lock();
        // SAFETY: the guard belongs to this state's domain; nothing else is borrowed from the cell.
        source(unsafe { state.get(&guard) }).end_sleep(&guard);
        drop(guard);
        if signalled && self.by_signal {
            return ControlFlow::Break(None);
        }
        self.elsewhere.look(Some(domain));
        ControlFlow::Continue(())
    }
}

/// Registers a newly opened queue or counter with the progress thread or the wait set, if its wait object needs that.
/// Errors: ENOMEM, ENOSPC; for a condition, which needs the progress thread: ENOMEM, EMFILE, ENFILE.
pub(super) fn begin_waiting<T: Waitable + Conditional + 'static>(
    of: &Arc<T>,
    wait: &WaitObject,
    domain: &Arc<Domain>,
) -> Result<(), i32> {
    let object = Arc::downgrade(of);
    if let Some(waiter) = wait.condition() {
        domain.signal_condition(object.clone(), waiter)?;
    }
    wait.join(object)
}
