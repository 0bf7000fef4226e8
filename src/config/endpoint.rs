//! The variables of an endpoint and its protocol.

use super::variable::{Group, Kind, Reader, Secret, Unit, Variable, set};

/// Their values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Endpoint {
    /// FI_UDRV_IFACE
    pub(crate) iface: Option<String>,
    /// FI_UDRV_JOB_KEY, unchecked
    pub(crate) job_key: Option<Secret>,
    /// FI_UDRV_EAGER_MAX, bytes
    pub(crate) eager_max: usize,
    /// FI_UDRV_PAST_CACHES_MIN, bytes
    pub(crate) past_caches_min: Option<usize>,
    /// FI_UDRV_UNEXPECTED_MAX, bytes
    pub(crate) unexpected_max: usize,
    /// FI_UDRV_TX_MAX, operations
    pub(crate) tx_max: usize,
    /// FI_UDRV_RX_MAX, operations
    pub(crate) rx_max: usize,
    /// FI_UDRV_SPIN_US, microseconds
    pub(crate) spin_us: u64,
}

impl Default for Endpoint {
    fn default() -> Self {
        Self {
            iface: None,
            job_key: None,
            eager_max: 16 * 1024,
            past_caches_min: None,
            unexpected_max: 64 << 20,
            tx_max: 1 << 20,
            rx_max: 1 << 20,
            spin_us: 20,
        }
    }
}

impl Group for Endpoint {
    const VARIABLES: &'static [Variable] = &[
        Variable {
            name: "IFACE",
            kind: Kind::Text,
            help: "Network interface (name or IP address) whose address endpoints take when the application names none (default: the first one that has a carrier and leads to other hosts, else loopback)",
        },
        Variable {
            name: "JOB_KEY",
            kind: Kind::Text,
            help: "Secret that all processes of a job share, text of 16 to 256 bytes; processes with another one are refused (default: what ~/.config/udrv/key holds, else none)",
        },
        Variable {
            name: "EAGER_MAX",
            kind: Kind::Text,
            help: "Longest message that is sent eagerly, bytes, 0 to 16384 (default: 16384)",
        },
        Variable {
            name: "PAST_CACHES_MIN",
            kind: Kind::Text,
            help: "Shortest message whose pieces a processor stores in the receiver's buffer around its caches, bytes, 0 to 2^62 (default: a quarter of the last-level cache, 8388608 where that is not known)",
        },
        Variable {
            name: "UNEXPECTED_MAX",
            kind: Kind::Text,
            help: "Payload bytes of unexpected messages that an endpoint holds before it asks its peers to keep theirs, 0 to 2^62 (default: 67108864)",
        },
        Variable {
            name: "TX_MAX",
            kind: Kind::Count,
            help: "Pending sends of an endpoint before FI_EAGAIN, 1 to 16777216 (default: 1048576)",
        },
        Variable {
            name: "RX_MAX",
            kind: Kind::Count,
            help: "Posted receives of an endpoint before FI_EAGAIN, 1 to 16777216 (default: 1048576)",
        },
        Variable {
            name: "SPIN_US",
            kind: Kind::Text,
            help: "How long a blocking call polls before it sleeps, microseconds, 0 to 1000000 (default: 20)",
        },
    ];

    fn read(&mut self, from: &Reader<'_>) {
        self.iface = from.text("IFACE").filter(|text| !text.is_empty());
        // Checked where it is used, which refuses a bad key: to ignore it here would leave the job without a key.
        self.job_key = from.text("JOB_KEY").map(Secret);
        set(&mut self.eager_max, from.bytes("EAGER_MAX", 0..=16 * 1024));
        self.past_caches_min = from.bytes("PAST_CACHES_MIN", 0..=1 << 62);
        set(&mut self.unexpected_max, from.bytes("UNEXPECTED_MAX", 0..=1 << 62));
        set(&mut self.tx_max, from.count("TX_MAX", 1..=1 << 24));
        set(&mut self.rx_max, from.count("RX_MAX", 1..=1 << 24));
        set(&mut self.spin_us, from.time("SPIN_US", Unit::Us, 0..=1_000_000));
    }
}
