//! Whether the processes that communicate with this endpoint outnumber the processors that they share.

use crate::sys::process::{self, Processors};
use crate::sys::quota::Quota;

#[derive(Debug)]
pub(super) struct Crowd {
    /// Processors of this machine.
    machine: usize,
    /// Processors that this process may use.
    pub(super) processors: usize,
    /// The set of them; `None`: all, or unknown.
    bound: Option<Processors>,
    /// Other processes with a link to this endpoint, in order, and how many of them may use one of these processors.
    counted: Vec<i32>,
    others: usize,
    /// The limit of this process's control group, and how many of the other processes it is for, whatever processors they may
    /// use; `None`: there is none.
    quota: Option<(Quota, usize)>,
    /// Whether processes that were looked at are in that group: to look takes a lock of the kernel.
    groups: Vec<(i32, bool)>,
    /// Processes may have left since they were counted.
    pub(super) stale: bool,
}

impl Crowd {
    pub(super) fn new() -> Self {
        let machine = process::machine().1;
        let quota = Quota::here().map(|quota| (quota, 0));
        let (processors, bound) = (machine, None);
        let (counted, others, groups, stale) = (Vec::new(), 0, Vec::new(), false);
        let mut crowd = Self { machine, processors, bound, counted, others, quota, groups, stale };
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
        again || self.bound.is_some() || self.stale
    }

    /// Counts the other processes among `pids` that may use a processor of this one.
    pub(super) fn count(&mut self, pids: impl Iterator<Item = i32>) {
        let mut processes: Vec<i32> = pids.collect();
        processes.sort_unstable();
        processes.dedup();
        let me = process::pid();
        processes.retain(|pid| *pid != me);
        self.count_sharing(&processes);
        self.others = processes.iter().filter(|pid| self.meets(**pid)).count();
        self.counted = processes;
        self.stale = false;
    }

    /// Counts one process more.
    pub(super) fn count_one(&mut self, pid: i32) {
        let Err(at) = self.counted.binary_search(&pid) else { return };
        if pid == process::pid() {
            return;
        }
        let mut processes = std::mem::take(&mut self.counted);
        processes.insert(at, pid);
        self.count_sharing(&processes);
        self.others += usize::from(self.meets(pid));
        self.counted = processes;
    }

    /// Counts those that share the limit. `processes`: in order.
    fn count_sharing(&mut self, processes: &[i32]) {
        let Some((quota, sharing)) = &mut self.quota else { return };
        self.groups.retain(|(pid, _)| processes.binary_search(pid).is_ok());
        for pid in processes {
            if let Err(at) = self.groups.binary_search_by_key(pid, |(pid, _)| *pid) {
                self.groups.insert(at, (*pid, quota.holds(*pid)));
            }
        }
        *sharing = self.groups.iter().filter(|(_, holds)| *holds).count();
    }

    /// Whether a process may use a processor of this one.
    fn meets(&self, pid: i32) -> bool {
        let Some(mine) = &self.bound else { return true };
        // The processors of a process without an id here (pid_namespaces(7)) are unknown.
        let theirs = if pid > 0 { Processors::of(pid) } else { None };
        theirs.is_none_or(|theirs| mine.overlaps(&theirs))
    }

    /// How many of the processes there are for each of their processors, at least 1.
    pub(super) fn processes_each(&self) -> u64 {
        let each = |others: usize, most: usize| (others + 1).div_ceil(most.max(1)) as u64;
        let bound = each(self.others, self.processors);
        self.quota
            .as_ref()
            .map_or(bound, |(quota, others)| bound.max(each(*others, quota.processors)))
    }

    /// The same while so many links are made: processes beyond those that make a crowd are not counted then.
    pub(super) fn processes_each_of(&self, links: usize) -> u64 {
        let all = self.bound.is_none() && self.is_there(1);
        let each = if all { (links + 1).div_ceil(self.processors.max(1)) as u64 } else { 1 };
        each.max(self.processes_each())
    }

    /// Whether the processes may need more processors than there are, with so many endpoints in this process: each
    /// endpoint may have a thread that polls it.
    #[inline]
    pub(super) fn is_there(&self, endpoints: usize) -> bool {
        let exceed = |others: usize, most| others.saturating_add(endpoints) > most;
        exceed(self.others, self.processors)
            || self.quota.as_ref().is_some_and(|(quota, others)| exceed(*others, quota.processors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn child() -> Child {
        Command::new("sleep").arg("60").spawn().unwrap()
    }

    #[test]
    fn the_limit_of_a_control_group_counts_for_its_processes() {
        let mut children = [(); 3].map(|()| child());
        let pids = || children.iter().map(|child| child.id() as i32);
        let mut crowd = Crowd::new();
        (crowd.bound, crowd.processors, crowd.quota) = (None, 64, Some((Quota::of_here(4), 0)));
        crowd.count(pids());
        assert!(!crowd.is_there(1) && crowd.is_there(2));
        assert_eq!(crowd.processes_each(), 1);
        crowd.count(pids().take(2));
        assert!(!crowd.is_there(2));
        pids().for_each(|pid| crowd.count_one(pid));
        assert!(crowd.others == 3 && crowd.is_there(2));
        // Bound to processors that the others do not use: they share the limit all the same.
        crowd.bound = Some(Processors::none());
        crowd.count(pids());
        assert!(crowd.others == 0 && crowd.is_there(2));
        crowd.bound = None;
        crowd.processors = 2;
        crowd.count(pids());
        assert_eq!(crowd.processes_each(), 2);
        assert_eq!((crowd.processes_each_of(3), crowd.processes_each_of(1023)), (2, 512));
        crowd.processors = 64;
        // Of another group, which has a limit of its own.
        (crowd.quota, crowd.groups) = (Some((Quota::of_elsewhere(1), 0)), Vec::new());
        crowd.count(pids());
        assert!(!crowd.is_there(1));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn processes_are_counted_again_once_some_may_have_left() {
        let mut crowd = Crowd::new();
        (crowd.bound, crowd.stale) =
            (Processors::of(0).filter(|set| set.count() < crowd.machine), false);
        let bound = crowd.bound.is_some();
        assert_eq!(crowd.look_again(), bound);
        crowd.stale = true;
        assert!(crowd.look_again());
        crowd.count(std::iter::empty());
        assert_eq!(crowd.look_again(), bound);
    }
}
