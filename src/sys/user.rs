//! Whether a process or a socket is this user's.
//!
//! The kernel reports user ids as mapped into this user namespace. All ids without a mapping appear as one id,
//! `overflowuid` (user_namespaces(7)). If this process itself has that id, equal numbers prove nothing.

use super::process;
use super::unix::Credentials;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

/// The users that a user id may stand for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whose {
    /// Only this process's effective user.
    Ours,
    /// This process's effective user, or any other user without a mapping.
    Ambiguous,
    /// Another user.
    Others,
}

/// Classifies `uid`, as reported by the kernel.
pub(crate) fn whose(uid: u32) -> Whose {
    static NOBODY: OnceLock<Option<u32>> = OnceLock::new();
    if uid != process::effective_uid() {
        Whose::Others
    } else if *NOBODY.get_or_init(overflow_uid) == Some(uid) {
        Whose::Ambiguous
    } else {
        Whose::Ours
    }
}

/// True if the process at the other end of a unix socket belongs to this user, according to the kernel.
pub(crate) fn is_ours(other: &Credentials) -> bool {
    match whose(other.uid) {
        Whose::Ours => true,
        Whose::Ambiguous => other.pid == process::pid() || shares_names(other.pid),
        Whose::Others => false,
    }
}

/// The id of this process stands for many users. Then a peer with this id can be verified only while its process
/// exists.
pub(crate) fn is_ambiguous() -> bool {
    whose(process::effective_uid()) == Whose::Ambiguous
}

/// The id that stands for all users without a mapping; `None`: every user has a mapping.
fn overflow_uid() -> Option<u32> {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if maps_everybody(&map) {
        return None;
    }
    let text = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
    Some(text.trim().parse().unwrap_or(65534))
}

/// Parses lines of: first user in this namespace, first user outside, and how many; 2^32 - 1 is no user.
fn maps_everybody(map: &str) -> bool {
    let counts =
        map.lines().filter_map(|line| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok());
    counts.sum::<u64>() >= u64::from(u32::MAX)
}

/// The process is in our user namespace, and the kernel lets us check. That needs the same user id, mapped or not, or
/// the right to trace it (ptrace(2), PTRACE_MODE_READ_FSCREDS).
fn shares_names(pid: i32) -> bool {
    let inode = |process: &str| {
        let name = std::fs::metadata(format!("/proc/{process}/ns/user")).ok()?;
        Some((name.dev(), name.ino()))
    };
    pid > 0
        && process::proc_is_ours()
        && inode("self").is_some_and(|ours| inode(&pid.to_string()) == Some(ours))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_id_is_another_user() {
        let (pid, uid) = (process::pid(), process::effective_uid());
        assert!(is_ours(&Credentials { pid, uid }));
        assert_eq!(is_ours(&Credentials { pid: 0, uid }), !is_ambiguous());
        assert!(!is_ours(&Credentials { pid, uid: uid + 1 }));
    }

    #[test]
    fn users_without_a_mapping_are_nobody() {
        assert!(maps_everybody("         0          0 4294967295\n"));
        assert!(maps_everybody("0 0 1000\n1000 1001 1\n1001 1000 4294966294\n"));
        assert!(!maps_everybody("         0       1000          1\n"));
        assert!(!maps_everybody("0 100000 65536\n") && !maps_everybody(""));
        let own = process::effective_uid();
        let ambiguous = overflow_uid() == Some(own);
        assert_eq!(whose(own), if ambiguous { Whose::Ambiguous } else { Whose::Ours });
        assert_eq!(whose(own ^ 1), Whose::Others);
    }

    #[test]
    fn a_child_shares_our_name_space_and_nobody_shares_what_is_not_seen() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(shares_names(child.id() as i32));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!shares_names(child.id() as i32) && !shares_names(0));
    }
}
