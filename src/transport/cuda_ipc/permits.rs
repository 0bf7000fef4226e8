//! Permits: each lets one peer access a part of this process's device memory, until it is withdrawn. A permit is a word of the
//! owner's table, which the peer changes before and after each access. So the owner knows whether an access is in progress,
//! and when a remote buffer is filled: this transport carries no messages.

use crate::sys::process;
use crate::sys::shared_memory::SharedMemory;
use std::sync::atomic::{AtomicU64, Ordering};

/// Permits of a process at a time.
pub(super) const COUNT: usize = 256;
/// Their words, bytes.
pub(super) const LEN: usize = COUNT * size_of::<u64>();

/// The accesses in progress.
const USERS: u64 = (1 << 13) - 1;
/// No further access begins.
const ENDED: u64 = 1 << 13;
/// The access with notice is complete, or failed.
const FILLED: u64 = 1 << 14;
const FAILED: u64 = 1 << 15;
/// The generation of the permit; above it is the process that has last begun an access.
const GENERATION_SHIFT: u32 = 16;
const USER_SHIFT: u32 = 32;

/// The name of a permit: its number, and which of those that had the number it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Name {
    pub(super) number: u8,
    pub(super) generation: u16,
}

/// How an access ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// Without notice.
    Silent,
    Filled,
    Failed,
}

/// What its owner learns of a permit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Lent,
    Filled,
    Failed,
}

/// A permit in a table, of this process or of another one. `base`: where the permits of the table begin.
#[derive(Clone, Copy)]
pub(super) struct Permit<'a> {
    word: &'a AtomicU64,
    generation: u64,
}

fn generation_of(word: u64) -> u64 {
    word >> GENERATION_SHIFT & u64::from(u16::MAX)
}

impl<'a> Permit<'a> {
    /// `None`: there is no such table.
    pub(super) fn at(memory: &'a SharedMemory, base: usize, name: Name) -> Option<Self> {
        let word = memory.atomic(base + usize::from(name.number) * size_of::<u64>())?;
        Some(Self { word, generation: name.generation.into() })
    }

    /// Begins an access by this process. False: the permit is withdrawn, or used up.
    pub(super) fn enter(self) -> bool {
        let user = (process::pid() as u64) << USER_SHIFT;
        self.change(|word| {
            let open = word & (ENDED | FILLED | FAILED) == 0 && word & USERS < USERS;
            open.then_some(user | ((word & u64::from(u32::MAX)) + 1))
        })
    }

    /// Ends an access that `enter` began.
    pub(super) fn leave(self, outcome: Outcome) {
        let flag = match outcome {
            Outcome::Silent => 0,
            Outcome::Filled => FILLED,
            Outcome::Failed => FAILED,
        };
        self.change(|word| (word & USERS > 0).then(|| (word - 1) | flag));
    }

    /// Withdraws it. An access in progress goes on: see [`Self::is_unused`].
    pub(super) fn end(self) {
        self.change(|word| Some(word | ENDED));
    }

    /// No access is in progress, or the process that began it has ended.
    pub(super) fn is_unused(self) -> bool {
        let word = self.word.load(Ordering::Acquire);
        let is_mine = generation_of(word) == self.generation;
        !is_mine || word & USERS == 0 || !process::is_running((word >> USER_SHIFT) as i32)
    }

    pub(super) fn state(self) -> State {
        let word = self.word.load(Ordering::Acquire);
        match word & (USERS | FILLED | FAILED) {
            FILLED => State::Filled,
            flags if flags & FAILED != 0 => State::Failed,
            _ => State::Lent,
        }
    }

    /// Makes the word that of the next permit of this number. Its name, from now on.
    pub(super) fn renew(memory: &SharedMemory, base: usize, number: u8) -> Option<Name> {
        let word = memory.atomic(base + usize::from(number) * size_of::<u64>())?;
        let generation = (generation_of(word.load(Ordering::Relaxed)) as u16).wrapping_add(1);
        word.store(u64::from(generation) << GENERATION_SHIFT, Ordering::Release);
        Some(Name { number, generation })
    }

    /// False: the word is another permit's by now, or `to` has no answer.
    fn change(self, to: impl Fn(u64) -> Option<u64>) -> bool {
        let next = |word| to(word).filter(|_| generation_of(word) == self.generation);
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> SharedMemory {
        SharedMemory::create(LEN, LEN).unwrap().0
    }

    #[test]
    fn an_access_needs_a_permit_that_is_not_withdrawn() {
        let memory = table();
        let name = Permit::renew(&memory, 0, 7).unwrap();
        let permit = Permit::at(&memory, 0, name).unwrap();
        assert!(permit.is_unused() && permit.enter() && permit.enter() && !permit.is_unused());
        permit.end();
        assert!(!permit.enter(), "withdrawn");
        permit.leave(Outcome::Silent);
        assert!(!permit.is_unused(), "one is in progress");
        permit.leave(Outcome::Silent);
        assert!(permit.is_unused() && permit.state() == State::Lent);
    }

    #[test]
    fn a_remote_buffer_is_filled_once() {
        let memory = table();
        for (outcome, state) in [(Outcome::Filled, State::Filled), (Outcome::Failed, State::Failed)]
        {
            let name = Permit::renew(&memory, 0, 255).unwrap();
            let permit = Permit::at(&memory, 0, name).unwrap();
            assert!(permit.enter() && permit.state() == State::Lent);
            permit.leave(outcome);
            assert!(permit.state() == state && !permit.enter() && permit.is_unused());
        }
    }

    #[test]
    fn the_name_of_an_earlier_permit_changes_nothing() {
        let memory = table();
        let old = Permit::renew(&memory, 0, 1).unwrap();
        let new = Permit::renew(&memory, 0, 1).unwrap();
        let [old, new] = [old, new].map(|name| Permit::at(&memory, 0, name).unwrap());
        assert!(!old.enter() && new.enter());
        old.end();
        old.leave(Outcome::Filled);
        assert!(new.enter() && new.state() == State::Lent && !new.is_unused() && old.is_unused());
    }

    #[test]
    fn a_process_that_has_ended_accesses_nothing() {
        let memory = table();
        let name = Permit::renew(&memory, 0, 0).unwrap();
        let permit = Permit::at(&memory, 0, name).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let word =
            u64::from(name.generation) << GENERATION_SHIFT | u64::from(child.id()) << USER_SHIFT;
        permit.word.store(word | 1, Ordering::Relaxed);
        assert!(permit.is_unused());
        assert!(Permit::at(&memory, LEN, name).is_none());
    }
}
