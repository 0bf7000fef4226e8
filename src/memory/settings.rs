//! The variable of device memory.

use crate::config::variable::{Group, Kind, Reader, Variable, set};
use crate::sys::cuda::Cuda;
use crate::telemetry::log;

/// Whether FI_HMEM is offered (FI_UDRV_HMEM).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum HmemPolicy {
    /// Where this machine has a GPU and its driver's library.
    Auto,
    /// Wherever there is a library: for the double of the tests.
    On,
    /// The default until it has run on a GPU.
    #[default]
    Off,
}

impl Group for HmemPolicy {
    const VARIABLES: &'static [Variable] = &[Variable {
        name: "HMEM",
        kind: Kind::Text,
        help: "Whether FI_HMEM is offered for memory of CUDA devices: auto (where there is a GPU with its driver), on (where there is libcuda.so.1), or off (default: off)",
    }];

    fn read(&mut self, from: &Reader<'_>) {
        let policies = [
            ("auto", Self::Auto),
            ("on", Self::On),
            ("1", Self::On),
            ("off", Self::Off),
            ("0", Self::Off),
        ];
        set(self, from.choice("HMEM", "auto, on or off", &policies));
    }
}

impl HmemPolicy {
    /// Whether device memory can be had here. Loads the driver's library, if there is a GPU.
    pub(crate) fn is_offered(self) -> bool {
        let missing = match self {
            Self::Off => "FI_UDRV_HMEM is off",
            Self::Auto if !has_gpu() => "this machine has no GPU of NVIDIA's driver",
            _ if Cuda::open().is_none() => "there is no libcuda.so.1, or it is too old",
            _ => return true,
        };
        log::info(format_args!("FI_HMEM is not offered: {missing}"));
        false
    }
}

fn has_gpu() -> bool {
    std::fs::read_dir("/proc/driver/nvidia/gpus").is_ok_and(|mut gpus| gpus.next().is_some())
}
