//! CUDA: its driver API, and how processes open each other's memory.

mod driver;
mod share;

pub(crate) use driver::{Allocation, Context, Cuda, Failure, IpcHandle, Lane};
pub(crate) use share::{Exported, Import, Kind, Part};
