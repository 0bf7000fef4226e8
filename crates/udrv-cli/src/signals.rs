//! Signals that end a process unless it takes them.
#![allow(unsafe_code)] // system calls

use libc::c_int;

/// Calls `handler` at a signal, with these flags (sigaction(2)). It may do only what signal-safety(7) allows. A signal that
/// this process was started to ignore, as nohup(1) does, stays ignored: programs that it executes inherit that (execve(2)).
pub(crate) fn take(signal: c_int, handler: extern "C" fn(c_int), flags: c_int) {
    // SAFETY: structures of numbers, of which zeroes are a valid value, and which the calls fill or read.
    unsafe {
        let (mut before, mut taken): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut before);
        if before.sa_sigaction != libc::SIG_IGN {
            (taken.sa_sigaction, taken.sa_flags) = (handler as libc::sighandler_t, flags);
            libc::sigaction(signal, &taken, std::ptr::null_mut());
        }
    }
}
