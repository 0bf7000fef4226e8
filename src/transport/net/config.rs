//! The variables of the network.

use super::verbs::config::RdmaSettings;
use crate::config::variable::{Group, Kind, Reader, Unit, Variable, set};
use std::fmt;

/// A range of ports (FI_UDRV_PORTS), with both ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ports {
    low: u16,
    high: u16,
}

impl Ports {
    /// Of `LOW-HIGH`, from 1 on.
    fn parse(text: &str) -> Option<Self> {
        let (low, high) = text.split_once('-')?;
        let (low, high) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
        (1..=high).contains(&low).then_some(Self { low, high })
    }

    pub(crate) fn count(self) -> usize {
        usize::from(self.high - self.low) + 1
    }

    /// The port of number `n`, round and round.
    pub(crate) fn port(self, n: usize) -> u16 {
        self.low + (n % self.count()) as u16
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.low, self.high)
    }
}

/// Their values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NetConfig {
    /// FI_UDRV_NET
    pub(crate) on: bool,
    /// FI_UDRV_PORTS; `None`: any
    pub(crate) ports: Option<Ports>,
    /// FI_UDRV_MTU, bytes with the IP header; `None`: the interface's
    pub(crate) mtu: Option<usize>,
    /// FI_UDRV_PEER_TIMEOUT, seconds
    pub(crate) peer_timeout_s: u64,
    /// FI_UDRV_NET_BUFFER, bytes
    pub(crate) buffer_bytes: usize,
    /// FI_UDRV_STREAMS
    pub(crate) streams: usize,
    /// FI_UDRV_BULK_MIN, bytes
    pub(crate) bulk_min: usize,
    /// The devices beside the socket.
    pub(crate) rdma: RdmaSettings,
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            on: true,
            ports: None,
            mtu: None,
            peer_timeout_s: 120,
            buffer_bytes: 64 << 20,
            streams: 256,
            bulk_min: 32 * 1024,
            rdma: RdmaSettings::default(),
        }
    }
}

impl Group for NetConfig {
    const VARIABLES: &'static [Variable] = &[
        Variable {
            name: "NET",
            kind: Kind::Switch,
            help: "Network to peers of other nodes: 1, or 0 to stay in the node (default: 1)",
        },
        Variable {
            name: "PORTS",
            kind: Kind::Text,
            help: "UDP and TCP ports that endpoints take when the application names none, LOW-HIGH such as 20000-20999, 1 to 65535 (default: any of net.ipv4.ip_local_port_range)",
        },
        Variable {
            name: "MTU",
            kind: Kind::Text,
            help: "Longest datagram with its IP header, bytes, 576 to 65535 (default: the MTU of the interface)",
        },
        Variable {
            name: "PEER_TIMEOUT",
            kind: Kind::Text,
            help: "How long a peer on another node may be silent while something is owed before it counts as dead, seconds, 1 to 86400 (default: 120)",
        },
        Variable {
            name: "NET_BUFFER",
            kind: Kind::Text,
            help: "Packets that an endpoint keeps until its peers have acknowledged them, bytes, 1048576 to 17179869184 (default: 67108864)",
        },
        Variable {
            name: "STREAMS",
            kind: Kind::Count,
            help: "TCP connections that an endpoint makes at most for long messages to peers of other nodes, 0 to 65536; 0: it takes none either (default: 256)",
        },
        Variable {
            name: "BULK_MIN",
            kind: Kind::Text,
            help: "Shortest message to another node that goes by stream or by RDMA Write, bytes, 0 to 2^62; none that is sent eagerly does (default: 32768)",
        },
    ];

    fn read(&mut self, from: &Reader<'_>) {
        set(&mut self.on, from.switch("NET"));
        self.ports = from.parsed("PORTS", "LOW-HIGH, such as 20000-20999", Ports::parse);
        self.mtu = from.bytes("MTU", 576..=65535);
        set(&mut self.peer_timeout_s, from.time("PEER_TIMEOUT", Unit::S, 1..=86400));
        set(&mut self.buffer_bytes, from.bytes("NET_BUFFER", 1 << 20..=16 << 30));
        set(&mut self.streams, from.count("STREAMS", 0..=65536));
        set(&mut self.bulk_min, from.bytes("BULK_MIN", 0..=1 << 62));
        self.rdma.read(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_ports() {
        let range = Ports::parse("20000 - 20002").unwrap();
        assert_eq!((range.count(), range.to_string().as_str()), (3, "20000-20002"));
        assert_eq!([0, 1, 2, 3, 7].map(|n| range.port(n)), [20000, 20001, 20002, 20000, 20001]);
        assert_eq!(Ports::parse("1-65535").map(Ports::count), Some(65535));
        assert_eq!(Ports::parse("7-7").map(|one| one.port(9)), Some(7));
        for bad in ["", "20000", "0-5", "6-5", "1-65536", "a-b", "1-2-3"] {
            assert_eq!(Ports::parse(bad), None, "{bad}");
        }
    }
}
