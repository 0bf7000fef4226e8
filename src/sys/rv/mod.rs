//! The kernel's rv module (/dev/rv): RC connections that belong to a pair of nodes and are shared by all
//! processes of a job there, with registrations that the kernel keeps and ends when addresses change.
//!
//! Everything goes through ioctl(2) on one descriptor, and a ring of events in shared memory that nobody
//! can wait for. The module keeps what is deregistered, and its keys valid: only [`Module::evict`] ends
//! them. A connection has no end but that of the descriptor.

mod abi;
mod failure;
mod kernel;
mod mapping;
mod module;
mod ring;

pub(crate) use failure::{Failure, Remedy};
pub(crate) use module::{Connection, Found, Here, INDEX_BITS, Module, RECONNECT_S, Region, There};
pub(crate) use ring::{Event, Ring};

#[cfg(test)]
pub(crate) mod double;
#[cfg(test)]
use failure::Refusal;
