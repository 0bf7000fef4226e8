//! How long a caller waits for peers that are still copying from or to memory that they no longer may access.

use crate::sys::clock::Waited;
use crate::sys::process;

/// After this time, peers that do not finish are locked out by other means, nanoseconds.
const INSIST_NS: u64 = 500_000_000;
/// Longest wait, nanoseconds.
pub(crate) const SETTLE_NS: u64 = 2_000_000_000;
/// Most copies end within this time, nanoseconds. Later the kernel is asked about the peers, each millisecond.
const BRIEF_NS: u64 = 2_000_000;
/// A longer pause between two looks counts as this one, nanoseconds: a peer without a processor needs as many turns.
const PAUSE_NS: u64 = 20_000_000;

/// Calls `settled` until it returns true, for at most [`SETTLE_NS`] of waiting. Its argument: whether to lock the peers out.
pub(crate) fn settle(mut settled: impl FnMut(bool) -> bool) -> bool {
    let mut wait = Waited::from_now(PAUSE_NS);
    loop {
        let waited = wait.look();
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
