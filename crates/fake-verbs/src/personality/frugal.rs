//! No one driver: ibv_create_qp(3) and ibv_create_srq(3) let a driver give less than it is asked for, and say so only in
//! the structure that it fills.

use super::{Driver, FULL, Fork, Inline, Library, Personality, adapter, roce};

pub(super) const PERSONALITY: Personality = Personality {
    name: "frugal",
    about: "all limits are given back smaller than they were asked for",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { inline: Inline::Clamped(16), grants: (72, 2), reads: 8, ..FULL },
    devices: &[adapter("frugal0", 0x1234, 1, &[roce([10, 88, 0, 1])])],
};
