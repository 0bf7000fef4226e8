//! Personalities: what a driver supports, and how it refuses the rest. Each has a file, which names the sources that it
//! imitates.

mod bnxt_re;
mod efa;
mod frugal;
mod hfi1;
mod hns;
mod irdma;
mod mana;
mod mlx4;
mod mlx5_ib;
mod mlx5_roce;
mod old;
mod pkeys;
mod qedr;
mod rails;
mod routed;
mod vf_grh;

/// A library and its devices.
#[derive(Clone, Copy, Debug)]
pub struct Personality {
    /// The name by which a run asks for it.
    pub name: &'static str,
    /// What it imitates, in a line.
    pub about: &'static str,
    /// The version of the library.
    pub library: Library,
    /// What the library says of pinned pages at a fork.
    pub fork: Fork,
    /// What its driver supports.
    pub driver: Driver,
    /// Its devices.
    pub devices: &'static [Device],
}

/// The version of libibverbs, by what it exports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Library {
    /// rdma-core 36 and later.
    Current,
    /// rdma-core 28 (Ubuntu 20.04): no GID table, no fork status.
    Core28,
    /// rdma-core 15 (SLES 12): no extended send operations either.
    Core15,
}

impl Library {
    /// The folder of its shared object.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Core28 => "28",
            Self::Core15 => "15",
        }
    }
}

/// The answer of `ibv_is_fork_initialized`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fork {
    /// The kernel copies pinned pages for the child (Linux 5.12).
    Unneeded,
    /// It does not, and nobody has asked the library to take care.
    Disabled,
}

/// What a driver's queue pairs support.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    /// Datagrams.
    pub ud: bool,
    /// Connections.
    pub rc: bool,
    /// Queue pairs and completion queues have operations of their own (`ibv_wr_start`, `ibv_start_poll`).
    pub extended: bool,
    /// Data that a request brings with it.
    pub inline: Inline,
    /// Shared receives.
    pub srq: Srq,
    /// Most requests of a queue, and segments of a request, that are given, whatever is asked for.
    pub grants: (u32, u32),
    /// Most requests of a queue, entries of a completion queue, segments of a request.
    pub max_wr: u32,
    /// See above.
    pub max_cqe: u32,
    /// See above.
    pub max_sge: u32,
    /// RDMA Reads at a time, of each direction.
    pub reads: u8,
    /// Registrations may be paged on demand (`IBV_ACCESS_ON_DEMAND`).
    pub on_demand: bool,
    /// Memory of a dma-buf may be registered (`ibv_reg_dmabuf_mr`).
    pub dmabuf: bool,
}

/// Inline data, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Inline {
    /// A queue pair that asks for more is refused.
    Max(u32),
    /// A queue pair that asks for more gets this, and is told.
    Clamped(u32),
}

/// Shared receive queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Srq {
    /// There are none.
    Absent,
    /// Posting to a full one returns this.
    FullIs(i32),
}

/// A device.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    /// As in `mlx5_0`.
    pub name: &'static str,
    /// PCI identifiers.
    pub vendor: u32,
    /// Of the vendor.
    pub part: u32,
    /// Its kind.
    pub node: Node,
    /// Its ports, from number 1 on.
    pub ports: &'static [Port],
}

/// The kind of a device, as `ibv_device` tells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Node {
    /// InfiniBand or RoCE.
    Adapter,
    /// EFA and others that are not InfiniBand.
    Unspecified,
}

/// A port.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// Its network.
    pub link: Link,
    /// Longest datagram, bytes.
    pub mtu: u16,
    /// Speed, Gb/s.
    pub gbps: u32,
    /// It is up.
    pub active: bool,
    /// The network that it is joined to: packets reach ports of the same one.
    pub fabric: u8,
    /// Its partitions; an entry of 0 is empty.
    pub pkeys: &'static [u16],
}

/// The network of a port, and its addresses on host 0. On host `n` the last number is `n` more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// InfiniBand.
    InfiniBand {
        /// Its address in the subnet; 0: none.
        lid: u16,
        /// It shares its LID with another port, and gets packets with a global route only.
        needs_grh: bool,
        /// If not 0: each host is in a subnet of its own. Routers pass on what another subnet sends with a global route to
        /// this LID, on host `n` to `n` more: the "FLID", which is in the port's GID.
        flid: u16,
    },
    /// RoCE: the IPv4 address.
    Ethernet {
        /// The address.
        ip: [u8; 4],
    },
}

/// A full member of the default partition.
const DEFAULT_PKEYS: &[u16] = &[0xffff];

/// A driver with everything; personalities say what differs.
const FULL: Driver = Driver {
    ud: true,
    rc: true,
    extended: false,
    inline: Inline::Max(1024),
    srq: Srq::FullIs(libc::ENOMEM),
    grants: (u32::MAX, u32::MAX),
    max_wr: 32768,
    max_cqe: 4_194_303,
    max_sge: 30,
    reads: 16,
    on_demand: false,
    dmabuf: false,
};

/// An active port of InfiniBand at 200 Gb/s.
const fn infiniband(lid: u16) -> Port {
    let link = Link::InfiniBand { lid, needs_grh: false, flid: 0 };
    Port { link, mtu: 4096, gbps: 200, active: true, fabric: 0, pkeys: DEFAULT_PKEYS }
}

/// An active port of RoCE v2 at 100 Gb/s, with the MTU that 1500 bytes of Ethernet leave.
const fn roce(ip: [u8; 4]) -> Port {
    let link = Link::Ethernet { ip };
    Port { link, mtu: 1024, gbps: 100, active: true, fabric: 0, pkeys: DEFAULT_PKEYS }
}

const fn adapter(name: &'static str, vendor: u32, part: u32, ports: &'static [Port]) -> Device {
    Device { name, vendor, part, node: Node::Adapter, ports }
}

/// All of them.
pub const ALL: &[Personality] = &[
    mlx5_roce::PERSONALITY,
    mlx5_ib::PERSONALITY,
    irdma::PERSONALITY,
    bnxt_re::PERSONALITY,
    hns::PERSONALITY,
    hfi1::PERSONALITY,
    frugal::PERSONALITY,
    mlx4::PERSONALITY,
    qedr::PERSONALITY,
    mana::PERSONALITY,
    efa::PERSONALITY,
    vf_grh::PERSONALITY,
    routed::PERSONALITY,
    pkeys::PERSONALITY,
    rails::PERSONALITY,
    old::CORE_28,
    old::CORE_15,
    old::NO_FORK,
];

/// The one of that name.
pub fn find(name: &str) -> Option<&'static Personality> {
    ALL.iter().find(|personality| personality.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_each_is_found() {
        let names: HashSet<_> = ALL.iter().map(|personality| personality.name).collect();
        assert_eq!(names.len(), ALL.len());
        for name in names {
            assert_eq!(find(name).unwrap().name, name);
        }
        assert!(find("none").is_none());
    }

    #[test]
    fn every_port_has_a_partition_and_room_for_a_datagram() {
        for port in ALL.iter().flat_map(|personality| personality.devices).flat_map(|d| d.ports) {
            assert!(!port.pkeys.is_empty());
            assert!(port.mtu.is_power_of_two() && (256..=4096).contains(&port.mtu));
        }
    }
}
