//! The variables of the network.

use super::verbs::config::RdmaSettings;
use crate::config::variable::{Group, Kind, Reader, Unit, Variable, set};

/// Their values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NetConfig {
    /// FI_UDRV_NET
    pub(crate) on: bool,
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
        self.mtu = from.bytes("MTU", 576..=65535);
        set(&mut self.peer_timeout_s, from.time("PEER_TIMEOUT", Unit::S, 1..=86400));
        set(&mut self.buffer_bytes, from.bytes("NET_BUFFER", 1 << 20..=16 << 30));
        set(&mut self.streams, from.count("STREAMS", 0..=65536));
        set(&mut self.bulk_min, from.bytes("BULK_MIN", 0..=1 << 62));
        self.rdma.read(from);
    }
}
