//! AWS EFA: providers/efa. Neither InfiniBand nor RoCE: no RC, and SRD only through its own calls.

use super::{
    DEFAULT_PKEYS, Device, Driver, FULL, Fork, Library, Link, Node, Personality, Port, Srq,
};

const PORT: Port = Port {
    link: Link::InfiniBand { lid: 0, needs_grh: false, flid: 0 },
    mtu: 4096,
    gbps: 100,
    active: true,
    fabric: 0,
    pkeys: DEFAULT_PKEYS,
};

pub(super) const PERSONALITY: Personality = Personality {
    name: "efa",
    about: "AWS EFA: no RC, not an InfiniBand adapter",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { rc: false, srq: Srq::Absent, ..FULL },
    devices: &[Device {
        name: "efa_0",
        vendor: 0x1d0f,
        part: 0xefa1,
        node: Node::Unspecified,
        ports: &[PORT],
    }],
};
