//! How long anybody waits for peers that are in the middle of a copy from or to memory that they are not to reach any more.

use crate::sys::{clock, process};

/// From when on peers that do not go on are kept out by other means, nanoseconds.
const INSIST_NS: u64 = 500_000_000;
/// How long anybody waits, nanoseconds.
pub(crate) const SETTLE_NS: u64 = 2_000_000_000;
/// Copies mostly end sooner; then the kernel is asked what became of their processes, a thousand times a second.
const BRIEF_NS: u64 = 2_000_000;

/// Asks `settled` until it says yes; not for longer than [`SETTLE_NS`]. Its argument: to insist.
pub(crate) fn settle(mut settled: impl FnMut(bool) -> bool) -> bool {
    let began = clock::now_ns();
    loop {
        let waited = clock::now_ns().saturating_sub(began);
        if settled(waited > INSIST_NS) {
            return true;
        }
        if waited > SETTLE_NS {
            return false;
        }
        if waited < BRIEF_NS {
            process::yield_now();
        } else {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
