//! Whether the process at the other end of a unix socket is this user's.
//!
//! The kernel tells its effective user id as this user name space maps it. Ids without a mapping all look like one and
//! the same, `overflowuid` (user_namespaces(7)): where this process itself has that id, equal numbers prove nothing.

use super::process;
use super::unix::Credentials;
use std::os::unix::fs::MetadataExt;

/// True if the kernel says that the process at the other end is this user's.
pub(crate) fn is_ours(other: &Credentials) -> bool {
    process::is_own_user(other.uid)
        || other.uid == process::effective_uid()
            && (other.pid == process::pid() || shares_names(other.pid))
}

/// The id of this process stands for many users. Who has the same one may be asked while its process is there, and
/// no longer.
pub(crate) fn is_ambiguous() -> bool {
    !process::is_own_user(process::effective_uid())
}

/// The process is in our user name space, and the kernel lets us look: that takes the same user id, mapped or not, or the
/// right to trace it (ptrace(2), PTRACE_MODE_READ_FSCREDS).
fn shares_names(pid: i32) -> bool {
    let inode = |process: &str| {
        let name = std::fs::metadata(format!("/proc/{process}/ns/user")).ok()?;
        Some((name.dev(), name.ino()))
    };
    pid > 0 && inode("self").is_some_and(|ours| inode(&pid.to_string()) == Some(ours))
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
    fn a_child_shares_our_name_space_and_nobody_shares_what_is_not_seen() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(shares_names(child.id() as i32));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!shares_names(child.id() as i32) && !shares_names(0));
    }
}
