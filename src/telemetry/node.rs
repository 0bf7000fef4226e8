//! Which process of a node reports a condition that all of its job there share, such as a device that fails.
//!
//! The first reporter takes a name in the abstract namespace of unix sockets, and holds it until it ends: the others find
//! it taken, and do not write. So the processes need no file, and nothing is left behind. Names have no permissions: one
//! that another user holds counts for nothing.

use super::launcher::Launcher;
use super::soon;
use crate::sys::{Errno, process, unix};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

/// Most names that a process holds, a descriptor each. Conditions beyond are reported by every process.
const HELD_MAX: usize = 16;

/// The process that holds names, and their facts. The names are never closed: an application that has closed all
/// descriptors may use their numbers for others.
static HELD: Mutex<(i32, Vec<u64>)> = Mutex::new((0, Vec::new()));

/// Whether no other process of the job on this node reports `fact`.
pub(super) fn is_first_reporter(fact: u64) -> bool {
    let Some(job) = &Launcher::here().job else { return true };
    let Some(mut held) = soon::lock(&HELD) else { return true };
    let pid = process::pid();
    if held.0 != pid {
        *held = (pid, Vec::new()); // what is there is the parent's, which reports it
    }
    let facts = &mut held.1;
    if facts.contains(&fact) || facts.len() >= HELD_MAX {
        return true;
    }
    match take(&name(job, fact)) {
        Claim::Ours(socket) => {
            std::mem::forget(socket);
            facts.push(fact);
            true
        }
        Claim::Another => false,
        Claim::Unknown => true,
    }
}

enum Claim {
    Ours(OwnedFd),
    /// Another process of this user has it.
    Another,
    /// The system gives no name, another user has it, or its holder is not known.
    Unknown,
}

fn name(job: &str, fact: u64) -> String {
    let mut hasher = DefaultHasher::new();
    job.hash(&mut hasher);
    format!("udrv-log/{}/{:016x}/{fact:016x}", process::effective_uid(), hasher.finish())
}

fn take(name: &str) -> Claim {
    match unix::listen(name) {
        Ok(socket) => Claim::Ours(socket),
        Err(Errno(libc::EADDRINUSE)) if is_of_this_user(name) => Claim::Another,
        Err(_) => Claim::Unknown,
    }
}

fn is_of_this_user(name: &str) -> bool {
    // A full backlog (EAGAIN) shows nothing: another user may have filled its own.
    let holder = unix::connect(name).and_then(|socket| unix::credentials(socket.as_fd()));
    holder.is_ok_and(|holder| holder.uid == process::effective_uid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_of_a_job_reports() {
        let job = format!("test of {}", process::pid());
        let Claim::Ours(first) = take(&name(&job, 1)) else { panic!("nobody has it") };
        assert!(matches!(take(&name(&job, 1)), Claim::Another));
        assert!(matches!(take(&name(&job, 2)), Claim::Ours(_)), "another fact");
        assert!(matches!(take(&name("another job", 1)), Claim::Ours(_)));
        drop(first);
        assert!(matches!(take(&name(&job, 1)), Claim::Ours(_)), "the first reporter has ended");
    }

    #[test]
    fn a_holder_that_does_not_listen_or_answer_suppresses_no_line() {
        let name = name(&format!("test of a stranger of {}", process::pid()), 1);
        let taken = unix::reserve(&name).unwrap();
        assert!(matches!(take(&name), Claim::Unknown));
        drop(taken);
        let full = unix::listen(&name).unwrap();
        let connections = (0..2 * unix::BACKLOG).map(|_| unix::connect(&name));
        let waiting = connections.take_while(Result::is_ok).count();
        assert!(waiting < 2 * unix::BACKLOG, "the backlog is full");
        assert!(matches!(take(&name), Claim::Unknown));
        drop(full);
    }

    #[test]
    fn without_a_launcher_each_process_reports() {
        // The tests have no launcher.
        assert!(Launcher::here().job.is_some() || (is_first_reporter(1) && is_first_reporter(1)));
    }
}
