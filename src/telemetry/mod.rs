//! What udrv tells about itself.

pub(crate) mod limited;
pub(crate) mod log;
