//! Facts about processes.

use std::sync::atomic::{AtomicI32, Ordering};

/// This process's id (a system call: not for the data path).
pub(crate) fn pid() -> i32 {
    // SAFETY: always succeeds.
    unsafe { libc::getpid() }
}

/// The effective user id.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: always succeeds.
    unsafe { libc::geteuid() }
}

/// False only when no process of that id exists any more. A zombie still counts as alive.
pub(crate) fn exists(pid: i32) -> bool {
    if pid <= 0 {
        return true;
    }
    // SAFETY: signal 0 only checks.
    unsafe { libc::kill(pid, 0) == 0 || *libc::__errno_location() != libc::ESRCH }
}

/// Gives up the processor once.
pub(crate) fn yield_now() {
    // SAFETY: no arguments.
    unsafe { libc::sched_yield() };
}

/// 64 random bits, from the kernel where it can and from the clock otherwise.
pub(crate) fn random_u64() -> u64 {
    let mut value = 0u64;
    // SAFETY: eight bytes of a live local.
    let n = unsafe { libc::getrandom((&raw mut value).cast(), 8, libc::GRND_NONBLOCK) };
    if n == 8 {
        value
    } else {
        super::clock::now_ns().wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (pid() as u64)
    }
}

/// Yama's level when this kernel has it: 1 lets only ancestors attach unless a process allows it.
pub(crate) fn yama_ptrace_scope() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?.trim().parse().ok()
}

/// Lets any process of this user attach, which cross-memory attach needs where Yama's level is 1.
pub(crate) fn allow_attach_by_same_user() {
    static DONE: AtomicI32 = AtomicI32::new(0);
    let me = pid();
    if DONE.swap(me, Ordering::Relaxed) == me {
        return;
    }
    const PR_SET_PTRACER: libc::c_int = 0x59616d61;
    // SAFETY: PR_SET_PTRACER takes one integer; an error changes nothing.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
}
