//! Older libraries and kernels under the same device.

use super::{Driver, FULL, Fork, Library, Personality, adapter, infiniband};

pub(super) const CORE_28: Personality = Personality {
    name: "core-28",
    about: "rdma-core 28: no GID table, no fork status",
    library: Library::Core28,
    fork: Fork::Unneeded,
    driver: Driver { extended: true, ..FULL },
    devices: &[adapter("mlx5_0", 0x15b3, 4129, &[infiniband(7)])],
};

pub(super) const CORE_15: Personality = Personality {
    name: "core-15",
    about: "rdma-core 15: no extended send operations either",
    library: Library::Core15,
    driver: FULL,
    ..CORE_28
};

pub(super) const NO_FORK: Personality = Personality {
    name: "no-fork",
    about: "a kernel without copy-on-fork of pinned pages",
    library: Library::Current,
    fork: Fork::Disabled,
    ..CORE_28
};
