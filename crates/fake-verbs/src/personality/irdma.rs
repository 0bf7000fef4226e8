//! Intel E810 on RoCE v2: providers/irdma. No shared receive queues; inline data of 101 bytes at most.

use super::{Driver, FULL, Fork, Inline, Library, Personality, Srq, adapter, roce};

pub(super) const PERSONALITY: Personality = Personality {
    name: "irdma",
    about: "Intel E810: no SRQ, inline data of 101 bytes",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver {
        inline: Inline::Max(101),
        srq: Srq::Absent,
        max_wr: 4094,
        max_cqe: 1_048_574,
        max_sge: 13,
        dmabuf: true,
        ..FULL
    },
    devices: &[adapter("irdma0", 0x8086, 0x1593, &[roce([10, 88, 0, 1])])],
};
