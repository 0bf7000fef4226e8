//! Broadcom NetXtreme-E: drivers/infiniband/hw/bnxt_re. A queue pair that asks for too much is refused.

use super::{Driver, FULL, Fork, Inline, Library, Personality, adapter, roce};

pub(super) const PERSONALITY: Personality = Personality {
    name: "bnxt_re",
    about: "Broadcom: inline data of 96 bytes, 6 segments",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver {
        inline: Inline::Max(96),
        max_wr: 16351,
        max_sge: 6,
        reads: 126,
        dmabuf: true,
        ..FULL
    },
    devices: &[adapter("bnxt_re0", 0x14e4, 0x16d7, &[roce([10, 88, 0, 1])])],
};
