//! The kernel's rv module (/dev/rv): RC connections between pairs of nodes, shared by all processes of a job on
//! them, with registrations that the kernel caches and ends when addresses change. It has such registrations for queue
//! pairs of the process as well (`user.rs`).
//!
//! All requests go through ioctl(2) on one descriptor; events come in a ring in shared memory, and no call can
//! wait for them. The module keeps deregistered memory registered, and its keys valid: only [`Module::evict`]
//! ends them. A connection ends only with the descriptor.

mod abi;
mod failure;
mod kernel;
mod module;
mod ring;
mod user;

pub(crate) use failure::{Failure, Refusal, Remedy};
pub(crate) use module::{Connection, Found, Here, INDEX_BITS, Module, RECONNECT_S, Region, There};
pub(crate) use ring::{Event, Ring};
pub(crate) use user::{Domain, UserCache};

#[cfg(test)]
pub(crate) mod double;
