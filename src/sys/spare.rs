//! Two descriptors that this process keeps for the moment in which it has no other: with them it can still accept a
//! connection, see what it brings, and refuse it by name instead of leaving its sender without an answer.

use super::event::Doorbell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One for a connection, one for what is passed through it.
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

/// Whoever has one may use the process's spare descriptors; with the last one they are closed.
#[derive(Debug)]
pub(crate) struct Spare(());

impl Spare {
    pub(crate) fn new() -> Self {
        let mut state = state();
        state.users += 1;
        state.fill();
        Self(())
    }

    /// Takes again what `lend` could not.
    pub(crate) fn refill(&self) {
        state().fill();
    }
}

/// Calls `f` while the spare descriptors are free, and takes them again as far as it has left them.
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
