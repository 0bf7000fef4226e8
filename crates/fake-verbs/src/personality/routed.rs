//! ConnectX on InfiniBand with routers between subnets, by the LIDs in site-local GIDs (FLIDs) that UCX uses:
//! uct_ib_iface_resolve_remote_flid in src/uct/ib/base/ib_iface.c.

use super::{Driver, FULL, Fork, Library, Link, Personality, Port, adapter, infiniband};

const PORT: Port =
    Port { link: Link::InfiniBand { lid: 7, needs_grh: false, flid: 0x4001 }, ..infiniband(7) };

pub(super) const PERSONALITY: Personality = Personality {
    name: "routed",
    about: "InfiniBand on which each host is in a subnet of its own, with routers between them",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { extended: true, ..FULL },
    devices: &[adapter("mlx5_0", 0x15b3, 4129, &[PORT])],
};
