//! Cross-memory attach: copies between the buffers of two processes.
//!
//! # Safety
//!
//! Every copy first accesses a word of the other process's gate. The local ranges come from a `SegmentList`: memory
//! that the application lent to an operation that is pending. Probes use local variables.
#![allow(unsafe_code)]

use crate::sys::Errno;
use crate::sys::cma::{self, MAX_RANGES, Range};
use std::sync::atomic::{AtomicBool, Ordering};

/// What a copy needs of the peer's process: its id, and the address of the two words that peers may access
/// (`sys::gate`). The first word holds `name`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entrance {
    pub(super) pid: i32,
    pub(super) gate: u64,
    pub(super) name: u64,
}

/// Bytes of a word of a gate.
const WORD: u64 = 8;

/// `first`, followed by the others.
fn behind(first: Range, others: &[Range]) -> ([Range; MAX_RANGES], usize) {
    let mut ranges = [first; MAX_RANGES];
    let rest = ranges.get_mut(1..).unwrap_or_default();
    for (to, from) in rest.iter_mut().zip(others) {
        *to = *from;
    }
    (ranges, MAX_RANGES.min(1 + others.len()))
}

impl Entrance {
    /// Reads the gate. A write does not tell whether the process is another one: that may have memory at the same address.
    /// Errors: as [`Self::read`].
    pub(super) fn prove(&self) -> Result<(), Errno> {
        match probe_read(self.pid, &[Range { addr: self.gate, len: WORD }]) {
            Ok(word) if word == self.name => Ok(()),
            Ok(_) => Err(Errno(libc::ESRCH)),
            Err(Errno(libc::EFAULT)) => Err(Errno(libc::EPERM)),
            Err(error) => Err(error),
        }
    }

    /// Copies from `remote` to `local`; returns the number of bytes. Errors: EPERM if the gate is closed, ESRCH if the
    /// id now belongs to another process, EFAULT.
    pub(super) fn read(&self, local: &[Range], remote: &[Range]) -> Result<usize, Errno> {
        let mut word = 0u64;
        let here = Range { addr: (&raw mut word).expose_provenance() as u64, len: WORD };
        let (local, locals) = behind(here, local);
        let (remote, remotes) = behind(Range { addr: self.gate, len: WORD }, remote);
        let (local, remote) = (local.get(..locals), remote.get(..remotes));
        let (local, remote) = (local.unwrap_or_default(), remote.unwrap_or_default());
        // SAFETY: a live local, and memory that the application lent to a receive that is pending.
        let moved = past_gate(unsafe { cma::read(self.pid, local, remote) })?;
        if word == self.name { Ok(moved) } else { Err(Errno(libc::ESRCH)) }
    }

    /// Like [`Self::read`], from `local` to `remote`.
    pub(super) fn write(&self, local: &[Range], remote: &[Range]) -> Result<usize, Errno> {
        let here = Range { addr: (&raw const self.name).expose_provenance() as u64, len: WORD };
        let there = Range { addr: self.gate.wrapping_add(WORD), len: WORD };
        let (local, locals) = behind(here, local);
        let (remote, remotes) = behind(there, remote);
        let (local, remote) = (local.get(..locals), remote.get(..remotes));
        let (local, remote) = (local.unwrap_or_default(), remote.unwrap_or_default());
        // SAFETY: a live field, and memory that the application lent to a send that is pending.
        past_gate(unsafe { cma::write(self.pid, local, remote) })
    }
}

/// Bytes that were copied beyond the word of the gate. A copy that did not get beyond it has found the gate closed.
fn past_gate(moved: Result<usize, Errno>) -> Result<usize, Errno> {
    match moved {
        Ok(moved) => moved.checked_sub(WORD as usize).ok_or(Errno(libc::EPERM)),
        Err(Errno(libc::EFAULT)) => Err(Errno(libc::EPERM)),
        Err(error) => Err(error),
    }
}

/// The eight bytes at `remote`. Errors: EPERM, ENOSYS, where attaching is forbidden; ESRCH, EFAULT.
pub(super) fn probe_read(pid: i32, remote: &[Range]) -> Result<u64, Errno> {
    let mut value = 0u64;
    let local = [Range { addr: (&raw mut value).expose_provenance() as u64, len: 8 }];
    // SAFETY: a live local of eight bytes.
    match unsafe { cma::read(pid, &local, remote) }? {
        8 => Ok(value),
        _ => Err(Errno(libc::EFAULT)),
    }
}

/// Whether the eight bytes at `remote`, of a process from which [`probe_read`] could read, can be written. One write that
/// succeeds tells for all processes: the kernel asks the same for both calls (ptrace(2), PTRACE_MODE_ATTACH_REALCREDS), and a
/// filter that allows one of them only is this process's.
pub(super) fn probe_write(pid: i32, value: u64, remote: &[Range]) -> bool {
    static MAY: AtomicBool = AtomicBool::new(false);
    if MAY.load(Ordering::Relaxed) {
        return true;
    }
    let local = [Range { addr: (&raw const value).expose_provenance() as u64, len: 8 }];
    // SAFETY: a live local of eight bytes.
    let may = unsafe { cma::write(pid, &local, remote) == Ok(8) };
    if may {
        MAY.store(true, Ordering::Relaxed);
    }
    may
}
