//! A test double of libibverbs for the processes of one machine: no device, no kernel support, no privileges.
//!
//! * [`personality`]: what a driver supports, and how it refuses the rest. A personality is a value.
//! * [`weather`]: what a network and a bus may do without breaking a promise, drawn from a seed.
//! * `nic`: the devices of this process: tables of objects, queue pairs, and the verifier's checks. It has no `unsafe`
//!   and knows no C structure.
//! * `wire`: frames between the processes, over Unix sockets in the directory that `FAKE_VERBS` names.
//! * `abi`: the C functions. They translate, and leave decisions to `nic`.
//! * `sys`: system calls: this process's memory as a device reads and writes it, descriptors, shared counters.
//!
//! **The device's work** is done by a thread of each process, when data arrives from others. A thread that polls a
//! completion queue does it as well, so that two polling processes on two processors do not wait for a third thread. All
//! state is under one lock.
//!
//! **The verifier.** A violation of the interface's contract writes one line and aborts the process: real devices
//! answer many of them with silent damage. See [`verify`].
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod abi;
mod counters;
mod nic;
pub mod personality;
mod random;
pub mod settings;
#[allow(unsafe_code)]
mod sys;
pub mod sysfs;
pub mod verify;
pub mod weather;
mod wire;

pub use counters::{NAMES as COUNTER_NAMES, read_all as read_counters};
