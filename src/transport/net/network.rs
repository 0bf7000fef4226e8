//! The networks of RDMA devices.

#![forbid(unsafe_code)]

/// The network that a queue pair is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Network {
    InfiniBand {
        /// The partition, with the membership in its highest bit (InfiniBand 1.7, 10.9); 0: not stated.
        pkey: u16,
        /// The port gets packets with a global routing header only: it shares its LID with another one.
        routed: bool,
    },
    /// RoCE v2.
    Roce,
}

impl Network {
    /// The kind, and the partition.
    pub(crate) fn to_wire(self) -> (u8, [u8; 2]) {
        match self {
            Self::InfiniBand { pkey, routed } => (if routed { 3 } else { 1 }, pkey.to_le_bytes()),
            Self::Roce => (2, [0; 2]),
        }
    }

    /// Whether a port at `here` on this network can reach one at `there` on another: they must be of the same kind, and
    /// on InfiniBand in one partition, and in the same subnet, or in subnets that routers join by the LIDs in their GIDs
    /// ([`flid`]): other routes are known to a subnet manager only.
    pub(crate) fn reaches(self, here: &[u8; 16], other: Self, there: &[u8; 16]) -> bool {
        self.obstacle(here, other, there).is_none()
    }

    /// Why it cannot, and what to do; `None`: it can.
    pub(crate) fn obstacle(
        self,
        here: &[u8; 16],
        other: Self,
        there: &[u8; 16],
    ) -> Option<&'static str> {
        let (one, two) = match (self, other) {
            (Self::Roce, Self::Roce) => return None,
            (Self::InfiniBand { pkey: one, .. }, Self::InfiniBand { pkey: two, .. }) => (one, two),
            _ => return Some("one is on InfiniBand and the other on Ethernet (FI_UDRV_NIC)"),
        };
        let joined = || flid(here).is_some() && flid(there).is_some();
        if here.get(..8) != there.get(..8) && !joined() {
            return Some(
                "they are in different InfiniBand subnets, whose routes only a subnet manager knows; subnets are crossed where GIDs are site-local and have a LID for routers (FLID)",
            );
        }
        (!share(one, two)).then_some("they have no partition in common (FI_UDRV_PKEY)")
    }

    /// This network of a port at `there`, and its LID in packets from a port at `here`, if in its own subnet that is `lid`.
    pub(crate) fn across(self, lid: u16, here: &[u8; 16], there: &[u8; 16]) -> (Self, u16) {
        match self {
            Self::InfiniBand { pkey, .. } if here.get(..8) != there.get(..8) => {
                let other = here.get(SUBNET) != there.get(SUBNET);
                let lid = flid(there).filter(|_| other).unwrap_or(lid);
                (Self::InfiniBand { pkey, routed: true }, lid)
            }
            _ => (self, lid),
        }
    }

    /// Whether packets between this network and another have a global routing header.
    pub(crate) fn is_routed_to(self, other: Self) -> bool {
        let needs = |network| !matches!(network, Self::InfiniBand { routed: false, .. });
        needs(self) || needs(other)
    }

    pub(crate) fn from_wire(kind: u8, pkey: [u8; 2]) -> Option<Self> {
        let pkey = u16::from_le_bytes(pkey);
        match kind {
            1 => Some(Self::InfiniBand { pkey, routed: false }),
            2 => Some(Self::Roce),
            3 => Some(Self::InfiniBand { pkey, routed: true }),
            _ => None,
        }
    }
}

/// The number of the subnet in a site-local GID.
const SUBNET: std::ops::Range<usize> = 6..8;

/// The LID to which other subnets send packets for a port, from its site-local GID. Subnet managers of subnets that are
/// joined by routers put it there, as UCX expects it too.
fn flid(gid: &[u8; 16]) -> Option<u16> {
    match *gid {
        [0xfe, 0xc0, 0, 0, high, low, ..] => {
            Some(u16::from_be_bytes([high, low])).filter(|lid| *lid != 0)
        }
        _ => None,
    }
}

/// Whether members of partitions may exchange packets: it is the same partition, and one of them is a full member.
fn share(one: u16, two: u16) -> bool {
    const FULL: u16 = 0x8000;
    let stated = one != 0 && two != 0;
    !stated || (one & !FULL == two & !FULL && (one | two) & FULL != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_one_subnet_and_partition_reach_each_other() {
        let (here, far) = ([1; 16], [2; 16]);
        let of = |pkey| Network::InfiniBand { pkey, routed: false };
        for (one, two, want) in [
            (0xffff, 0xffff, true),
            (0xffff, 0x7fff, true),
            (0x7fff, 0x7fff, false),
            (0x8012, 0xffff, false),
            (0x8012, 0x0012, true),
            (0, 0x8012, true),
        ] {
            assert_eq!(of(one).reaches(&here, of(two), &here), want, "{one:#x} {two:#x}");
            assert!(!of(one).reaches(&here, of(two), &far), "another subnet");
        }
        assert!(Network::Roce.reaches(&here, Network::Roce, &far));
        assert!(!Network::Roce.reaches(&here, of(0xffff), &here));
    }

    #[test]
    fn a_port_in_another_subnet_is_reached_by_the_lid_in_its_address() {
        let of = |routed| Network::InfiniBand { pkey: 0xffff, routed };
        let gid = |lid: u8, subnet| {
            let mut gid = [0; 16];
            gid[..8].copy_from_slice(&[0xfe, 0xc0, 0, 0, 0x40, lid, 0, subnet]);
            gid
        };
        let (here, there) = (gid(1, 1), gid(2, 2));
        assert!(of(false).reaches(&here, of(false), &there));
        assert_eq!(of(false).across(7, &here, &there), (of(true), 0x4002));
        assert_eq!(of(false).across(7, &here, &here), (of(false), 7));
        // Behind another switch of the same subnet.
        assert_eq!(of(false).across(7, &here, &gid(2, 1)), (of(true), 7));
        // One that has no such address.
        let mut local = [0; 16];
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        let mut without = there;
        without[4..6].fill(0);
        for other in [local, without] {
            for (one, two) in [(here, other), (other, here)] {
                let why = of(false).obstacle(&one, of(false), &two);
                assert!(why.is_some_and(|why| why.contains("subnet")), "{why:?}");
            }
        }
        assert_eq!(Network::Roce.across(0, &here, &there), (Network::Roce, 0));
    }

    #[test]
    fn a_port_that_shares_its_lid_needs_a_route_in_both_directions() {
        let of = |routed| Network::InfiniBand { pkey: 0xffff, routed };
        assert!(of(true).is_routed_to(of(false)) && of(false).is_routed_to(of(true)));
        assert!(!of(false).is_routed_to(of(false)) && Network::Roce.is_routed_to(Network::Roce));
        for network in [of(true), of(false), Network::Roce] {
            let (kind, pkey) = network.to_wire();
            assert_eq!(Network::from_wire(kind, pkey), Some(network));
        }
        assert_eq!(Network::from_wire(4, [0; 2]), None);
    }
}
