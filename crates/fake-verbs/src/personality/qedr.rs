//! Marvell FastLinQ: drivers/infiniband/hw/qedr. The kernel knows RC, XRC and GSI queue pairs only.

use super::{Driver, FULL, Fork, Library, Personality, adapter, roce};

pub(super) const PERSONALITY: Personality = Personality {
    name: "qedr",
    about: "Marvell FastLinQ: no UD queue pairs",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { ud: false, max_sge: 4, ..FULL },
    devices: &[adapter("qedr0", 0x1077, 0x1656, &[roce([10, 88, 0, 1])])],
};
