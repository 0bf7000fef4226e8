//! Whether the processes that communicate with this endpoint outnumber the processors that they share.

use crate::sys::process::{self, Processors};

#[derive(Debug)]
pub(super) struct Crowd {
    /// Processors of this machine.
    machine: usize,
    /// Processors that this process may use.
    pub(super) processors: usize,
    /// The set of them; `None`: all, or unknown.
    bound: Option<Processors>,
    /// Other processes with a link to this endpoint that may use one of these processors.
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

    /// Reads again which processors this process may use. True: the peers' processes have to be counted again.
    pub(super) fn look_again(&mut self) -> bool {
        let now = Processors::of(0).filter(|set| set.count() < self.machine);
        let again = now != self.bound;
        if again {
            self.processors = now.as_ref().map_or(self.machine, Processors::count);
            self.bound = now;
        }
        again || self.bound.is_some()
    }

    /// Counts the other processes among `pids` that may use a processor of this one.
    pub(super) fn count(&mut self, pids: impl Iterator<Item = i32>) {
        let mut processes: Vec<i32> = pids.collect();
        processes.sort_unstable();
        processes.dedup();
        let me = process::pid();
        processes.retain(|pid| *pid != me && self.meets(*pid));
        self.others = processes.len();
    }

    /// Whether a process may use a processor of this one.
    fn meets(&self, pid: i32) -> bool {
        let Some(mine) = &self.bound else { return true };
        // The processors of a process without an id here (pid_namespaces(7)) are unknown.
        let theirs = if pid > 0 { Processors::of(pid) } else { None };
        theirs.is_none_or(|theirs| mine.overlaps(&theirs))
    }

    /// Whether the processes may need more processors than there are, with so many endpoints in this process: each
    /// endpoint may have a thread that polls it.
    #[inline]
    pub(super) fn is_there(&self, endpoints: usize) -> bool {
        self.others.saturating_add(endpoints) > self.processors
    }
}
