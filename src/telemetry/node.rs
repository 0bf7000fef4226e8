//! Which process of a node tells about a cause that all of its job there share, such as a device that fails.
//!
//! The first to tell takes a name in the abstract namespace of unix sockets, and holds it until it ends: the others find
//! it taken, and are silent. So the processes need no file, and nothing is left behind. Names have no permissions: one
//! that another user holds counts for nothing.

use super::launcher::Launcher;
use crate::sys::{Errno, process, unix};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Most names that a process holds, a descriptor each. About causes beyond, every process tells.
const HELD_MAX: usize = 16;

/// The names of this process, for the whole of its life. They are never closed: an application that has closed all
/// descriptors may use their numbers for others.
static HELD: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Whether this process tells about `cause`: no other one of the job on this node does.
pub(super) fn tells(cause: u64) -> bool {
    let Some(job) = &Launcher::here().job else { return true };
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    if held.contains(&cause) || held.len() >= HELD_MAX {
        return true;
    }
    match take(&name(job, cause)) {
        Claim::Ours(socket) => {
            std::mem::forget(socket);
            held.push(cause);
            true
        }
        Claim::Another => false,
        Claim::Unknown => true,
    }
}

enum Claim {
    Ours(OwnedFd),
    /// Another process of this user tells.
    Another,
    /// The system gives no name, or a stranger has it.
    Unknown,
}

fn name(job: &str, cause: u64) -> String {
    let mut hasher = DefaultHasher::new();
    job.hash(&mut hasher);
    format!("udrv-log/{}/{:016x}/{cause:016x}", process::effective_uid(), hasher.finish())
}

fn take(name: &str) -> Claim {
    match unix::listen(name) {
        Ok(socket) => Claim::Ours(socket),
        Err(Errno(libc::EADDRINUSE)) if is_of_this_user(name) => Claim::Another,
        Err(_) => Claim::Unknown,
    }
}

fn is_of_this_user(name: &str) -> bool {
    match unix::connect(name).and_then(|socket| unix::credentials(socket.as_fd())) {
        Ok(who) => who.uid == process::effective_uid(),
        // So many have asked already.
        Err(errno) => errno.is_would_block(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_of_a_job_tells() {
        let job = format!("test of {}", process::pid());
        let Claim::Ours(first) = take(&name(&job, 1)) else { panic!("nobody has it") };
        assert!(matches!(take(&name(&job, 1)), Claim::Another));
        assert!(matches!(take(&name(&job, 2)), Claim::Ours(_)), "another cause");
        assert!(matches!(take(&name("another job", 1)), Claim::Ours(_)));
        drop(first);
        assert!(matches!(take(&name(&job, 1)), Claim::Ours(_)), "the one that told has ended");
    }

    #[test]
    fn who_takes_the_name_and_does_not_listen_silences_nobody() {
        let name = name(&format!("test of a stranger of {}", process::pid()), 1);
        let _taken = unix::reserve(&name).unwrap();
        assert!(matches!(take(&name), Claim::Unknown));
    }

    #[test]
    fn without_a_launcher_each_process_tells() {
        // The tests have no launcher.
        assert!(Launcher::here().job.is_some() || (tells(1) && tells(1)));
    }
}
