//! Thin, typed wrappers over the system calls that udrv uses, and nothing above them.
//!
//! # Safety
//!
//! This is one of the few modules in which `unsafe` is allowed. Each wrapper turns one system call into
//! a function that cannot be misused from safe code: descriptors are owned, lengths come from slices,
//! and results are `Result<_, Errno>`.
#![allow(unsafe_code)]

pub(crate) mod alarm;
pub(crate) mod at_exit;
pub(crate) mod bell;
pub(crate) mod biased;
pub(crate) mod cancel;
pub(crate) mod clock;
pub(crate) mod close;
pub(crate) mod cma;
pub(crate) mod cuda;
pub(crate) mod dl;
pub(crate) mod errno;
pub(crate) mod event;
pub(crate) mod few;
pub(crate) mod gate;
pub(crate) mod hub;
pub(crate) mod late_set;
pub(crate) mod made_once;
pub(crate) mod mappings;
pub(crate) mod mirror;
pub(crate) mod net;
pub(crate) mod numbered;
pub(crate) mod numbers;
pub(crate) mod order;
pub(crate) mod output;
pub(crate) mod packets;
mod pages;
pub(crate) mod per_process;
pub(crate) mod presence;
pub(crate) mod private_file;
pub(crate) mod process;
pub(crate) mod quota;
pub(crate) mod reserve;
pub(crate) mod rv;
pub(crate) mod shared_memory;
pub(crate) mod simd;
pub(crate) mod sock_diag;
pub(crate) mod spare;
mod spare_maps;
pub(crate) mod tcp;
pub(crate) mod thread;
pub(crate) mod topology;
pub(crate) mod udp;
pub(crate) mod unix;
pub(crate) mod user;
pub(crate) mod userfaultfd;
pub(crate) mod valgrind;
pub(crate) mod verbs;
pub(crate) mod watched;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x87;

pub(crate) use errno::Errno;
