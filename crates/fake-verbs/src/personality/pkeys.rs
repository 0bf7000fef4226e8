//! A tenant of a partitioned InfiniBand fabric: entry 0 of the table is a limited member of the default partition, the
//! tenant's own partition comes later. Limited members do not reach each other.

use super::{Driver, FULL, Fork, Library, Personality, Port, adapter, infiniband};

const PORT: Port = Port { pkeys: &[0x7fff, 0, 0x8012], ..infiniband(7) };

pub(super) const PERSONALITY: Personality = Personality {
    name: "pkeys",
    about: "a partitioned InfiniBand port: limited member at index 0, full member at index 2",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { extended: true, ..FULL },
    devices: &[adapter("mlx5_0", 0x15b3, 4129, &[PORT])],
};
