//! Limits and permissions of this process that the provider can do without, at a price.
#![allow(unsafe_code)] // system calls

use super::Verdict::{Good, Note, Warn};
use super::{Finding, devices, read};

/// Memory that may be locked, below which registering long buffers fails soon, bytes.
const MEMLOCK_MIN: u64 = 1 << 30;
/// Receive buffer of a socket that holds a burst of several peers, bytes.
const RMEM_MIN: u64 = 8 << 20;
/// Descriptors that a process with many peers may need.
const NOFILE_MIN: u64 = 1024;

pub(super) fn check() -> Vec<Finding> {
    vec![memlock(), descriptors(), attach(), ptrace_scope(), userfaultfd(), receive_buffer()]
}

/// The soft limit; `u64::MAX` is none.
fn limit(which: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for the answer.
    if unsafe { libc::getrlimit(which, &mut limit) } == 0 { limit.rlim_cur } else { u64::MAX }
}

fn memlock() -> Finding {
    let bytes = limit(libc::RLIMIT_MEMLOCK);
    if bytes == u64::MAX || bytes >= MEMLOCK_MIN {
        return Finding::new("memlock", Good, amount(bytes));
    }
    let says = format!("{} may be locked: RDMA devices register little memory", amount(bytes));
    let verdict = if devices::are_there() { Warn } else { Note };
    Finding::new("memlock", verdict, says).remedy(
        "ulimit -l unlimited; for Slurm LimitMEMLOCK=infinity in slurmd.service and PropagateResourceLimitsExcept=MEMLOCK",
    )
}

fn descriptors() -> Finding {
    let count = limit(libc::RLIMIT_NOFILE);
    if count >= NOFILE_MIN {
        return Finding::new("descriptors", Good, format!("{count} may be open"));
    }
    Finding::new("descriptors", Warn, format!("only {count} may be open")).remedy("ulimit -n 1024")
}

/// Whether a system-call filter or a security module forbids cross-memory attach altogether.
fn attach() -> Finding {
    let (from, mut to) = ([7u8; 8], [0u8; 8]);
    let remote = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    // SAFETY: two arrays of this function, of eight bytes each.
    let n = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    if n == 8 && to == from {
        return Finding::new("attach", Good, "process_vm_readv works");
    }
    let error = std::io::Error::last_os_error();
    Finding::new(
        "attach",
        Warn,
        format!("process_vm_readv: {error}; long messages are copied twice"),
    )
    .remedy("in containers: --cap-add SYS_PTRACE, or a seccomp profile that allows it")
}

fn ptrace_scope() -> Finding {
    const ABOUT: &str = "ptrace scope";
    match read("/proc/sys/kernel/yama/ptrace_scope").as_deref() {
        None => Finding::new(ABOUT, Good, "not restricted (no Yama)"),
        Some(scope @ ("0" | "1")) => Finding::new(ABOUT, Good, scope),
        Some(scope) => {
            Finding::new(ABOUT, Warn, format!("{scope}: long messages of a node are copied twice"))
                .remedy("sysctl kernel.yama.ptrace_scope=1")
        }
    }
}

/// The registration cache watches memory by this call (for RDMA devices alone).
fn userfaultfd() -> Finding {
    const USER_MODE_ONLY: libc::c_int = 1;
    // SAFETY: takes flags, and returns a descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) };
    if fd >= 0 {
        // SAFETY: a descriptor of this function's own.
        unsafe { libc::close(fd as libc::c_int) };
        return Finding::new("userfaultfd", Good, "works");
    }
    let error = std::io::Error::last_os_error();
    let verdict = if devices::are_there() { Warn } else { Note };
    Finding::new(
        "userfaultfd",
        verdict,
        format!("{error}; RDMA devices register each long message anew"),
    )
    .remedy("in containers: a seccomp profile that allows userfaultfd")
}

fn receive_buffer() -> Finding {
    let bytes = read("/proc/sys/net/core/rmem_max").and_then(|text| text.parse().ok());
    match bytes {
        None => Finding::new("rmem", Note, "net.core.rmem_max cannot be read here"),
        Some(bytes) if bytes >= RMEM_MIN => Finding::new("rmem", Good, amount(bytes)),
        Some(bytes) => Finding::new(
            "rmem",
            Warn,
            format!(
                "{} for a socket: bursts from other nodes are lost and sent again",
                amount(bytes)
            ),
        )
        .remedy(format!("sysctl net.core.rmem_max={RMEM_MIN}")),
    }
}

fn amount(bytes: u64) -> String {
    match bytes {
        u64::MAX => "no limit".to_owned(),
        b if b >= 1 << 30 => format!("{} GiB", b >> 30),
        b if b >= 1 << 20 => format!("{} MiB", b >> 20),
        b => format!("{} KiB", b >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::amount;

    #[test]
    fn amounts_have_units() {
        assert_eq!(amount(65536), "64 KiB");
        assert_eq!(amount(8 << 20), "8 MiB");
        assert_eq!(amount(u64::MAX), "no limit");
    }
}
