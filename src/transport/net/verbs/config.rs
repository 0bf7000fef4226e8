//! The variables of RDMA devices.

use crate::config::variable::{Group, Kind, Reader, Variable, set};
use crate::memory::cache::CacheSettings;
use crate::transport::net::rv::config::RvPolicy;
use std::fmt;

/// Whether RDMA devices are used (FI_UDRV_RDMA).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RdmaPolicy {
    /// They are used if one works.
    Auto,
    Off,
    /// An endpoint is opened only if a device works, and a peer's device must answer.
    Require,
}

/// Whether the receiver of a long message reads a part of it by RDMA (FI_UDRV_RDMA_READ).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReadPolicy {
    Off,
    /// Only between processes of one host whose device is soft-RoCE: then the CPUs of both processes move the bytes.
    Auto,
    Always,
}

/// One name in FI_UDRV_NIC: a device, optionally with one of its ports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NicName {
    pub(crate) device: String,
    pub(crate) port: Option<u8>,
}

impl NicName {
    /// Parses a list such as `mlx5_0,mlx5_2:1`; `None` if a name is malformed.
    pub(crate) fn list(text: &str) -> Option<Vec<Self>> {
        text.split(',').map(|name| Self::one(name.trim())).collect()
    }

    fn one(text: &str) -> Option<Self> {
        let (device, port) = match text.split_once(':') {
            Some((device, port)) => (device, Some(port.parse().ok().filter(|port| *port > 0)?)),
            None => (text, None),
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        let good = !device.is_empty() && device.chars().all(plain);
        good.then(|| Self { device: device.to_owned(), port })
    }
}

impl fmt::Display for NicName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// Which devices are used, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RdmaSettings {
    /// FI_UDRV_RDMA
    pub(crate) policy: RdmaPolicy,
    /// FI_UDRV_NIC; empty: any
    pub(crate) nics: Vec<NicName>,
    /// FI_UDRV_PKEY, without the membership; `None`: any
    pub(crate) pkey: Option<u16>,
    /// FI_UDRV_SL
    pub(crate) service_level: u8,
    /// FI_UDRV_TRAFFIC_CLASS; `None`: the port's, or the usual one
    pub(crate) traffic_class: Option<u8>,
    /// FI_UDRV_QP_TIMEOUT
    pub(crate) qp_timeout: u8,
    /// FI_UDRV_RELAXED_ORDERING; `None`: where the processor needs it
    pub(crate) any_order: Option<bool>,
    /// FI_UDRV_RC_CONNECTIONS
    pub(crate) rc_connections: usize,
    /// FI_UDRV_RDMA_READ
    pub(crate) read: ReadPolicy,
    /// FI_UDRV_CUDA_RDMA
    pub(crate) gpus: bool,
    pub(crate) rv: RvPolicy,
    pub(crate) cache: CacheSettings,
}

impl Default for RdmaSettings {
    fn default() -> Self {
        Self {
            policy: RdmaPolicy::Auto,
            nics: Vec::new(),
            pkey: None,
            service_level: 0,
            traffic_class: None,
            qp_timeout: 16,
            any_order: None,
            rc_connections: 128,
            read: ReadPolicy::Auto,
            gpus: true,
            rv: RvPolicy::default(),
            cache: CacheSettings::default(),
        }
    }
}

/// A P_Key without the membership: a decimal number, or a hexadecimal one behind `0x`.
fn partition(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let key = match digits {
        Some(digits) => u16::from_str_radix(digits, 16).ok()?,
        None => text.parse().ok()?,
    };
    Some(key & 0x7fff).filter(|key| *key != 0)
}

impl Group for RdmaSettings {
    const VARIABLES: &'static [Variable] = &[
        Variable {
            name: "RDMA",
            kind: Kind::Text,
            help: "InfiniBand and RoCE devices for peers of other nodes: auto (where one works), off, or require (without one there is no endpoint, and a peer whose device does not answer is given up) (default: auto)",
        },
        Variable {
            name: "NIC",
            kind: Kind::Text,
            help: "RDMA devices that may be used, names with or without a port, such as mlx5_0,mlx5_2:1; the fastest of them is, then the nearest (default: any)",
        },
        Variable {
            name: "PKEY",
            kind: Kind::Text,
            help: "InfiniBand partition (P_Key) to use, such as 0x8012; the highest bit does not matter (default: the first that the port is a full member of)",
        },
        Variable {
            name: "SL",
            kind: Kind::Count,
            help: "InfiniBand service level, with RoCE the VLAN priority, of packets of RDMA devices, 0 to 15 (default: 0)",
        },
        Variable {
            name: "TRAFFIC_CLASS",
            kind: Kind::Count,
            help: "RoCE traffic class, the TOS byte of packets, 0 to 255; its lowest two bits do not matter (default: the port's global one, else 106)",
        },
        Variable {
            name: "QP_TIMEOUT",
            kind: Kind::Count,
            help: "Retransmission timeout of connected queue pairs, 4.096 us times 2 to the power of this, 8 to 22; the device tries eight times (default: 16, which is 268 ms)",
        },
        Variable {
            name: "RELAXED_ORDERING",
            kind: Kind::Text,
            help: "Whether devices may place the bytes of a long message in any order on PCI Express before they report it: on, off, or auto (on AMD's processors, where they are slow otherwise) (default: auto)",
        },
        Variable {
            name: "RC_CONNECTIONS",
            kind: Kind::Count,
            help: "Connected RDMA queue pairs that an endpoint has at most, for long messages, 0 to 65536; 0: they go as datagrams (default: 128)",
        },
        Variable {
            name: "RDMA_READ",
            kind: Kind::Text,
            help: "Whether the receiver of a long message reads a half of it by RDMA while its sender writes the other: auto (on one host, through soft-RoCE of Linux 6.12 or later), always, or off (default: auto)",
        },
        Variable {
            name: "CUDA_RDMA",
            kind: Kind::Switch,
            help: "RDMA devices read and write device memory themselves, where FI_UDRV_HMEM allows device memory and the device and its driver can: 1, or 0 to copy it through the host (default: 1; FI_HMEM_DISABLE_P2P=1 forbids it)",
        },
    ];

    fn read(&mut self, from: &Reader<'_>) {
        let policies = [
            ("auto", RdmaPolicy::Auto),
            ("1", RdmaPolicy::Auto),
            ("off", RdmaPolicy::Off),
            ("0", RdmaPolicy::Off),
            ("require", RdmaPolicy::Require),
        ];
        set(&mut self.policy, from.choice("RDMA", "auto, off or require", &policies));
        let wanted = "a list of devices such as mlx5_0,mlx5_2:1";
        let list =
            |text: &str| if text.is_empty() { Some(Vec::new()) } else { NicName::list(text) };
        set(&mut self.nics, from.parsed("NIC", wanted, list));
        let partition = |text: &str| partition(text).map(Some);
        set(&mut self.pkey, from.parsed("PKEY", "a P_Key such as 0x8012", partition));
        let small = |name, range| from.count(name, range).map(|n| n as u8);
        set(&mut self.service_level, small("SL", 0..=15));
        set(&mut self.traffic_class, small("TRAFFIC_CLASS", 0..=255).map(Some));
        set(&mut self.qp_timeout, small("QP_TIMEOUT", 8..=22));
        let orders = [
            ("auto", None),
            ("on", Some(true)),
            ("1", Some(true)),
            ("off", Some(false)),
            ("0", Some(false)),
        ];
        set(&mut self.any_order, from.choice("RELAXED_ORDERING", "auto, on or off", &orders));
        set(&mut self.rc_connections, from.count("RC_CONNECTIONS", 0..=65536));
        let policies = [
            ("auto", ReadPolicy::Auto),
            ("off", ReadPolicy::Off),
            ("0", ReadPolicy::Off),
            ("always", ReadPolicy::Always),
            ("1", ReadPolicy::Always),
        ];
        set(&mut self.read, from.choice("RDMA_READ", "auto, off or always", &policies));
        let disabled = from.of_libfabric("HMEM_DISABLE_P2P");
        let is_set = |text: &String| {
            ["1", "on", "yes", "true"].contains(&text.trim().to_ascii_lowercase().as_str())
        };
        let permitted = !disabled.as_ref().is_some_and(is_set);
        self.gpus = from.switch("CUDA_RDMA") != Some(false) && permitted;
        self.rv.read(from);
        self.cache.read(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_numbers_without_the_membership() {
        let all = ["0x8012", "0X12", "32786", "18", "0xffff"].map(partition);
        assert_eq!(all, [Some(0x12), Some(0x12), Some(0x12), Some(0x12), Some(0x7fff)]);
        assert_eq!(["", "0", "0x8000", "0x10000", "x", "-1"].map(partition), [None; 6]);
    }

    #[test]
    fn names_of_nics() {
        let one = |text: &str| NicName::list(text).map(|list| list.len());
        assert_eq!(
            (one("mlx5_0"), one("mlx5_0:1, rxe0"), one("a,b:2,c")),
            (Some(1), Some(2), Some(3))
        );
        for bad in ["", ",", "a:", "a:x", "a:0", "a:300", "../x", "a b"] {
            assert_eq!(one(bad), None, "{bad}");
        }
    }
}
