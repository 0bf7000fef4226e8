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
    /// on InfiniBand in the same subnet, because routers between subnets are not known here, and in one partition.
    pub(crate) fn reaches(self, here: &[u8; 16], other: Self, there: &[u8; 16]) -> bool {
        match (self, other) {
            (Self::Roce, Self::Roce) => true,
            (Self::InfiniBand { pkey: one, .. }, Self::InfiniBand { pkey: two, .. }) => {
                here.get(..8) == there.get(..8) && share(one, two)
            }
            _ => false,
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
