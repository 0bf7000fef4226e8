//! The calls that open objects. They use all objects, and no object uses them.

mod domain;
pub(super) mod fabric;
