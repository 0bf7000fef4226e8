//! The networks of RDMA devices.

#![forbid(unsafe_code)]

/// The network that a queue pair is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Network {
    InfiniBand,
    /// RoCE v2.
    Roce,
}

impl Network {
    pub(crate) fn to_wire(self) -> u8 {
        match self {
            Self::InfiniBand => 1,
            Self::Roce => 2,
        }
    }

    /// Whether a port at `here` on this network can reach one at `there` on another: they must be of the same kind, and
    /// on InfiniBand in the same subnet, because routers between subnets are not known here.
    pub(crate) fn reaches(self, here: &[u8; 16], other: Self, there: &[u8; 16]) -> bool {
        self == other && (self == Self::Roce || here.get(..8) == there.get(..8))
    }

    pub(crate) fn from_wire(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::InfiniBand),
            2 => Some(Self::Roce),
            _ => None,
        }
    }
}
