//! The one loop behind `fi_cq_sread`, `fi_cntr_wait` and their kin: poll a little, then sleep until
//! an endpoint's doorbell, a link, a signal or the timeout ends it.

use super::domain::Domain;
use super::elsewhere::Elsewhere;
use super::lock::{Guard, Locked};
use super::source::Source;
use super::wait::WaitKind;
use crate::sys::clock::{Deadline, now_ns};
use crate::sys::process;

/// Longest single sleep, milliseconds: bounds the time until a peer's death is noticed even when a
/// forked child keeps the dead peer's sockets open.
pub(super) const SLICE_MS: i32 = 500;

/// Calls `ready` with the domain locked until it answers or `timeout_ms` (-1: for ever) is over.
/// `source` finds the source inside the locked state.
///
/// `ready` progresses and looks; it returns `None` to keep waiting.
pub(crate) fn wait_until<T, R>(
    domain: &Domain,
    state: &Locked<T>,
    source: impl Fn(&mut T) -> &mut Source,
    timeout_ms: i32,
    mut ready: impl FnMut(&Guard<'_>) -> Option<R>,
) -> Option<R> {
    let deadline = Deadline::after_ms(timeout_ms);
    let begun = now_ns();
    let spin_until = begun.saturating_add(domain.config.spin_us.saturating_mul(1000));
    let mut elsewhere = Elsewhere::after(begun);
    loop {
        let waiter = {
            let guard = domain.lock.lock();
            if let Some(result) = ready(&guard) {
                return Some(result);
            }
            if deadline.expired() {
                return None;
            }
            if now_ns() < spin_until {
                drop(guard);
                std::hint::spin_loop();
                continue;
            }
            // SAFETY: the guard is of this state's domain; nothing else is borrowed from the cell.
            let source = source(unsafe { state.get(&guard) });
            match &source.waiter {
                Some(waiter) if waiter.kind() != WaitKind::Yield => {
                    let waiter = waiter.clone();
                    source.begin_sleep(&guard).then_some(waiter)
                }
                _ => None,
            }
        };
        let Some(waiter) = waiter else {
            process::yield_now();
            elsewhere.look(Some(domain));
            continue;
        };
        let timeout = match deadline.poll_ms() {
            -1 => elsewhere.slice_ms(),
            ms => ms.min(elsewhere.slice_ms()),
        };
        // A signal ends the sleep early; the loop looks again.
        let _ = waiter.block(timeout);
        let guard = domain.lock.lock();
        // SAFETY: as above.
        source(unsafe { state.get(&guard) }).end_sleep(&guard);
        drop(guard);
        elsewhere.look(Some(domain));
    }
}
