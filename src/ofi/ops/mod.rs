//! The calls that open objects: they know all of them, and no object knows them.

mod domain;
pub(super) mod fabric;
