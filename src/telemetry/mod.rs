//! The log and its rate limits.

pub(crate) mod limited;
pub(crate) mod log;
