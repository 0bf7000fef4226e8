//! Two descriptors kept in reserve for when the process has no other. With them it can still accept a connection, read
//! its request, and refuse it with a reason instead of leaving the sender without an answer.

use super::event::Doorbell;
use super::per_process::PerProcess;
use super::process::Home;

/// One for a connection, one for the descriptor passed through it.
const COUNT: usize = 2;

#[derive(Debug, Default)]
struct State {
    held: [Option<Doorbell>; COUNT],
    users: usize,
}

static STATE: PerProcess<State> = PerProcess::new();

impl State {
    fn fill(&mut self) {
        for slot in self.held.iter_mut().filter(|slot| slot.is_none()) {
            *slot = Doorbell::new().ok();
        }
    }
}

/// A user of the process's spare descriptors; they are closed when the last one is dropped.
#[derive(Debug)]
pub(crate) struct Spare(Home);

impl Spare {
    pub(crate) fn new() -> Self {
        let mut state = STATE.lock();
        state.users += 1;
        state.fill();
        Self(Home::here())
    }

    /// Reserves again the descriptors that `lend` could not get back.
    pub(crate) fn refill(&self) {
        STATE.lock().fill();
    }
}

/// Calls `f` while the spare descriptors are free, then reserves as many again as `f` has left.
pub(crate) fn lend<R>(f: impl FnOnce() -> R) -> R {
    let mut state = STATE.lock();
    let had = state.held.iter().any(Option::is_some);
    state.held = [const { None }; COUNT];
    let result = f();
    if had {
        state.fill();
    }
    result
}

impl Drop for Spare {
    fn drop(&mut self) {
        if !self.0.is_here() {
            return; // the parent's
        }
        let mut state = STATE.lock();
        state.users = state.users.saturating_sub(1);
        if state.users == 0 {
            state.held = [const { None }; COUNT];
        }
    }
}
