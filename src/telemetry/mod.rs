//! What udrv tells about itself.

pub(crate) mod log;
