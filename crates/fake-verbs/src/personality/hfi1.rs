//! Omni-Path: drivers/infiniband/sw/rdmavt. Any length of inline data is accepted, and 0 is returned
//! (rdmavt/qp.c).

use super::{Driver, FULL, Fork, Inline, Library, Personality, adapter, infiniband};

pub(super) const PERSONALITY: Personality = Personality {
    name: "hfi1",
    about: "Omni-Path verbs: inline data is accepted and then 0",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { inline: Inline::Clamped(0), max_wr: 16383, max_sge: 96, ..FULL },
    devices: &[adapter("hfi1_0", 0x1175, 0x24f0, &[infiniband(3)])],
};
