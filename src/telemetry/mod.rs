//! The log: lines for libfabric's, the provider's own, and their rate limits; and the page of counts of the process.

mod cause;
pub(crate) mod config;
pub(crate) mod histogram;
pub(crate) mod identity;
mod launcher;
mod level;
pub(crate) mod limited;
pub(crate) mod log;
mod node;
pub(crate) mod own;
pub(crate) mod page;
pub(crate) mod ranks;
mod soon;
pub(crate) mod trace;
