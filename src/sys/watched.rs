//! Other processes whose end matters here.

use super::event::wait_readable;
use super::per_process::PerProcess;
use super::process::{Stat, descriptor_limit, descriptors_are_scarce, is_running, stat};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Weak};

/// A process, told from a later one with the same id by the time at which it was started (proc_pid_stat(5)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    pub(crate) pid: i32,
    /// Clock ticks after the start of the system; `None` if unknown.
    started: Option<u64>,
}

impl Identity {
    /// The process that has the id now.
    #[cfg(test)]
    pub(crate) fn of(pid: i32) -> Self {
        let mut this = Self::unknown(pid);
        this.learn();
        this
    }

    /// Any process with this id, until [`Self::learn`].
    pub(crate) fn unknown(pid: i32) -> Self {
        Self { pid, started: None }
    }

    pub(crate) fn is_known(&self) -> bool {
        self.started.is_some()
    }

    /// From now on it is the process that has the id now. This reads a file.
    pub(crate) fn learn(&mut self) {
        self.started = stat(self.pid).and_then(|stat| stat.started);
    }

    /// Like [`is_running`], and false if the id belongs to another process by now.
    pub(crate) fn is_running(&self) -> bool {
        match stat(self.pid) {
            Some(Stat { started: Some(now), .. })
                if self.started.is_some_and(|then| then != now) =>
            {
                false
            }
            Some(Stat { state: 'Z' | 'X', .. }) | None => is_running(self.pid),
            Some(_) => true,
        }
    }

    /// For tests: an earlier process with the same id.
    #[cfg(test)]
    pub(crate) fn earlier(self) -> Self {
        Self { started: self.started.map(|at| at - 1), ..self }
    }
}

/// Most processes that may be watched: one in so many descriptors.
const WATCHED_SHARE: usize = 64;

/// The descriptors of processes that are watched, which all endpoints of this process share.
static WATCHED: PerProcess<Vec<(i32, Weak<OwnedFd>)>> = PerProcess::new();

/// Most processes that a process should watch by descriptors.
pub(crate) fn watches_max() -> usize {
    descriptor_limit().map_or(usize::MAX, |limit| limit / WATCHED_SHARE)
}

/// A descriptor that becomes readable when the process ends. `None` if the kernel does not support that,
/// or if descriptors are getting scarce: the application needs some too.
pub(crate) fn watch(pid: i32) -> Option<Arc<OwnedFd>> {
    let mut watched = WATCHED.lock();
    watched.retain(|(_, fd)| fd.strong_count() > 0);
    let same = watched.iter().find(|(of, _)| *of == pid).and_then(|(_, fd)| fd.upgrade());
    // One that is readable belongs to an earlier process with this id.
    if same.as_ref().is_some_and(|fd| !wait_readable(fd.as_fd(), 0).unwrap_or(true)) {
        return same;
    }
    if watched.len() >= watches_max() {
        return None;
    }
    let fd = Arc::new(open_process(pid)?);
    watched.push((pid, Arc::downgrade(&fd)));
    Some(fd)
}

fn open_process(pid: i32) -> Option<OwnedFd> {
    if pid <= 0 {
        return None;
    }
    // SAFETY: pidfd_open takes two integers and returns a new descriptor (close-on-exec) or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: `fd` is new and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
    (!descriptors_are_scarce(&fd)).then_some(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn child() -> (Child, i32) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        (child, pid)
    }

    #[test]
    fn the_end_of_a_process_is_told() {
        let (mut child, pid) = child();
        let watch = watch(pid).unwrap();
        assert_eq!(wait_readable(watch.as_fd(), 0), Ok(false));
        let again = super::watch(pid).unwrap();
        assert!(Arc::ptr_eq(&watch, &again), "one descriptor a process");
        child.kill().unwrap();
        assert_eq!(wait_readable(watch.as_fd(), 5000), Ok(true));
        let later = super::watch(pid).unwrap();
        assert!(!Arc::ptr_eq(&watch, &later), "it may be another process's by now");
        child.wait().unwrap();
        assert!(super::watch(pid).is_none() && super::watch(0).is_none());
    }

    #[test]
    fn another_process_with_the_same_id_is_another() {
        let (mut child, pid) = child();
        let process = Identity::of(pid);
        assert!(process.started.is_some() && process.is_running());
        assert!(!process.earlier().is_running());
        assert!(Identity { started: None, ..process }.is_running(), "unknown");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_running());
    }
}
