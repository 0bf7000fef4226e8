//! Whether the processes that talk with this endpoint want more processors than there are.

use crate::sys::process::{self, Processors};

#[derive(Debug)]
pub(super) struct Crowd {
    /// Processors of this machine.
    machine: usize,
    /// Those that this process may use.
    pub(super) processors: usize,
    /// Which those are; `None`: all, or that cannot be told.
    bound: Option<Processors>,
    /// How many other processes we talk with that may use one of them.
    others: usize,
}

impl Crowd {
    pub(super) fn new() -> Self {
        let mut crowd =
            Self { machine: process::machine().1, processors: 0, bound: None, others: 0 };
        crowd.processors = crowd.machine;
        crowd.look_again();
        crowd
    }

    /// Looks again which processors this process may use. True: the processes that talk here have to be counted again.
    pub(super) fn look_again(&mut self) -> bool {
        let now = Processors::of(0).filter(|set| set.count() < self.machine);
        let again = now != self.bound;
        if again {
            self.processors = now.as_ref().map_or(self.machine, Processors::count);
            self.bound = now;
        }
        again || self.bound.is_some()
    }

    /// Counts the processes among these that may use a processor that this one uses too.
    pub(super) fn count(&mut self, pids: impl Iterator<Item = i32>) {
        let mut processes: Vec<i32> = pids.collect();
        processes.sort_unstable();
        processes.dedup();
        let me = process::pid();
        processes.retain(|pid| *pid != me && self.meets(*pid));
        self.others = processes.len();
    }

    /// Whether a process may use a processor that this one uses too.
    fn meets(&self, pid: i32) -> bool {
        let Some(mine) = &self.bound else { return true };
        // Of a process without a number here (pid_namespaces(7)) nothing can be known.
        let theirs = if pid > 0 { Processors::of(pid) } else { None };
        theirs.is_none_or(|theirs| mine.overlaps(&theirs))
    }

    /// Whether all of them may want more processors than there are, if this process has so many endpoints: each may have a
    /// thread of its own that polls it.
    #[inline]
    pub(super) fn is_there(&self, endpoints: usize) -> bool {
        self.others.saturating_add(endpoints) > self.processors
    }
}
