//! Azure's MANA: drivers/infiniband/hw/mana. RC queue pairs only, no shared receives.

use super::{Driver, FULL, Fork, Inline, Library, Personality, Srq, adapter, roce};

pub(super) const PERSONALITY: Personality = Personality {
    name: "mana",
    about: "Azure MANA: RC queue pairs only, no SRQ, no inline data",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver {
        ud: false,
        srq: Srq::Absent,
        inline: Inline::Max(0),
        max_sge: 2,
        dmabuf: true,
        ..FULL
    },
    devices: &[adapter("mana_0", 0x1414, 0x00ba, &[roce([10, 88, 0, 1])])],
};
