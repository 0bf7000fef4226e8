//! The environment in which a process finds its devices.

use std::path::PathBuf;

/// The directory of the run: sockets, counters, violations, and `sys`, its tree of devices.
pub const DIRECTORY: &str = "FAKE_VERBS";
/// The name of the personality.
pub const PERSONALITY: &str = "FAKE_VERBS_PERSONALITY";
/// The weather: see [`crate::weather::Weather::parse`].
pub const WEATHER: &str = "FAKE_VERBS_WEATHER";
/// The seed of the weather; a number.
pub const SEED: &str = "FAKE_VERBS_SEED";
/// The marks that all packets must have, service level and traffic class, such as `3/184`; without it any do.
pub const MARKS: &str = "FAKE_VERBS_MARKS";
/// The number of the host that the process is on, from 0 on: hosts have ports with addresses of their own.
pub const HOST: &str = "FAKE_VERBS_HOST";

/// A device that this process cannot open at first, and for how long from its first attempt on, milliseconds, such as
/// `mlx5_0/4000`.
pub const CLOSED: &str = "FAKE_VERBS_CLOSED";

/// Set: nvidia-peermem is loaded, and memory of the double of CUDA is registered by its address.
pub const PEERMEM: &str = "FAKE_VERBS_PEERMEM";

/// Set: the devices are on a PCI bus, with the first GPU of the double of CUDA beside the last one. MPICH looks for them on the
/// machine's own, and ends where they are missing.
pub const BUS: &str = "FAKE_VERBS_BUS";

/// The directory of the run, if there is one.
pub fn directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// A number from the environment; 0 if it is not set, or none.
pub(crate) fn number(name: &str) -> u64 {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
