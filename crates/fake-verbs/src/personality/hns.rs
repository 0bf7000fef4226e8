//! HiSilicon: providers/hns. It gives a queue pair less inline data than was asked for, and says so only in the
//! returned limits (hns_roce_u_verbs.c).

use super::{Driver, FULL, Fork, Inline, Library, Personality, adapter, roce};

pub(super) const PERSONALITY: Personality = Personality {
    name: "hns",
    about: "HiSilicon: inline data clamped to 32 bytes without an error",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { inline: Inline::Clamped(32), max_sge: 8, reads: 128, ..FULL },
    devices: &[adapter("hns_0", 0x19e5, 0xa222, &[roce([10, 88, 0, 1])])],
};
