//! Two descriptors kept in reserve for when the process has no other. With them it can still accept a connection, read
//! its request, and refuse it with a reason instead of leaving the sender without an answer.

use super::event::Doorbell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One for a connection, one for the descriptor passed through it.
const COUNT: usize = 2;

#[derive(Debug)]
struct State {
    held: [Option<Doorbell>; COUNT],
    users: usize,
}

static STATE: Mutex<State> = Mutex::new(State { held: [const { None }; COUNT], users: 0 });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn fill(&mut self) {
        for slot in self.held.iter_mut().filter(|slot| slot.is_none()) {
            *slot = Doorbell::new().ok();
        }
    }
}

/// A user of the process's spare descriptors; they are closed when the last one is dropped.
#[derive(Debug)]
pub(crate) struct Spare(());

impl Spare {
    pub(crate) fn new() -> Self {
        let mut state = state();
        state.users += 1;
        state.fill();
        Self(())
    }

    /// Reserves again the descriptors that `lend` could not get back.
    pub(crate) fn refill(&self) {
        state().fill();
    }
}

/// Calls `f` while the spare descriptors are free, then reserves as many again as `f` has left.
pub(crate) fn lend<R>(f: impl FnOnce() -> R) -> R {
    let mut state = state();
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
        let mut state = state();
        state.users = state.users.saturating_sub(1);
        if state.users == 0 {
            state.held = [const { None }; COUNT];
        }
    }
}
