//! A node with a slow management RoCE port, a port that is down, and two fast InfiniBand rails that are not joined.

use super::{Driver, FULL, Fork, Library, Personality, Port, adapter, infiniband, roce};

const SLOW: Port = Port { gbps: 25, fabric: 9, ..roce([10, 88, 0, 1]) };
const DOWN: Port = Port { active: false, ..infiniband(0) };
const ONE: Port = Port { gbps: 400, fabric: 1, ..infiniband(11) };
const TWO: Port = Port { gbps: 400, fabric: 2, ..infiniband(21) };

pub(super) const PERSONALITY: Personality = Personality {
    name: "rails",
    about: "25 Gb/s management RoCE beside two 400 Gb/s InfiniBand rails that are not joined",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { extended: true, dmabuf: true, ..FULL },
    devices: &[
        adapter("mlx5_bond_0", 0x15b3, 4117, &[SLOW]),
        adapter("mlx5_0", 0x15b3, 4129, &[DOWN, ONE]),
        adapter("mlx5_1", 0x15b3, 4129, &[TWO]),
    ],
};
