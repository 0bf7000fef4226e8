//! ConnectX on Ethernet: providers/mlx5 of rdma-core.

use super::{Driver, FULL, Fork, Library, Personality, adapter, roce};

pub(super) const PERSONALITY: Personality = Personality {
    name: "mlx5-roce",
    about: "ConnectX on RoCE v2: operations of its own, everything else as verbs.h says",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { extended: true, on_demand: true, dmabuf: true, ..FULL },
    devices: &[adapter("mlx5_0", 0x15b3, 4129, &[roce([10, 88, 0, 1])])],
};
