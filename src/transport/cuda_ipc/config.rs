//! The variables of CUDA IPC.

use crate::config::variable::{Group, Kind, Reader, Variable, set};

/// Their values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CudaIpcConfig {
    /// FI_UDRV_CUDA_IPC
    pub(crate) on: bool,
    /// FI_UDRV_CUDA_IPC_CACHE: most allocations of other processes that this one has open.
    pub(crate) open_max: usize,
}

impl Default for CudaIpcConfig {
    fn default() -> Self {
        Self { on: true, open_max: 64 }
    }
}

impl Group for CudaIpcConfig {
    const VARIABLES: &'static [Variable] = &[
        Variable {
            name: "CUDA_IPC",
            kind: Kind::Switch,
            help: "CUDA IPC for messages and regions in device memory of two processes of a node, where FI_UDRV_HMEM allows device memory: 1, or 0 to copy them through the host (default: 1)",
        },
        Variable {
            name: "CUDA_IPC_CACHE",
            kind: Kind::Count,
            help: "Allocations of device memory of other processes that a process has open at most, 1 to 65536 (default: 64)",
        },
    ];

    fn read(&mut self, from: &Reader<'_>) {
        set(&mut self.on, from.switch("CUDA_IPC"));
        set(&mut self.open_max, from.count("CUDA_IPC_CACHE", 1..=65536));
    }
}
