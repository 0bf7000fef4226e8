//! ConnectX on InfiniBand: packets by LID, without a global route.

use super::{Driver, FULL, Fork, Library, Personality, adapter, infiniband};

pub(super) const PERSONALITY: Personality = Personality {
    name: "mlx5-ib",
    about: "ConnectX on InfiniBand: LIDs, MTU 4096, operations of its own",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { extended: true, on_demand: true, dmabuf: true, ..FULL },
    devices: &[adapter("mlx5_0", 0x15b3, 4129, &[infiniband(7)])],
};
