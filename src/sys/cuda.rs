//! CUDA: its driver API, how processes open each other's memory, and how network devices access it.

mod direct;
mod driver;
mod host;
mod share;

pub(crate) use direct::Flush;
pub(crate) use driver::{Allocation, Context, Cuda, Failure, IpcHandle, Lane};
pub(crate) use host::HostMemory;
pub(crate) use share::{Exported, Import, Kind, Part};
