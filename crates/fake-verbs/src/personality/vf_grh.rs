//! A virtual function of ConnectX on InfiniBand that shares the LID of its physical function: IBV_QPF_GRH_REQUIRED.
//! Packets without a global route reach the physical function, that is, nobody here.

use super::{Driver, FULL, Fork, Library, Link, Personality, Port, adapter, infiniband};

const PORT: Port =
    Port { link: Link::InfiniBand { lid: 7, needs_grh: true, flid: 0 }, ..infiniband(7) };

pub(super) const PERSONALITY: Personality = Personality {
    name: "vf-grh",
    about: "a virtual function on InfiniBand whose port requires a global route",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { extended: true, ..FULL },
    devices: &[adapter("mlx5_0", 0x15b3, 4130, &[PORT])],
};
