//! The log: lines for libfabric's, the provider's own, and their rate limits.

mod cause;
pub(crate) mod config;
mod launcher;
mod level;
pub(crate) mod limited;
pub(crate) mod log;
mod node;
pub(crate) mod own;
mod soon;
