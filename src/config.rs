//! Every `FI_UDRV_*` variable, in one table. The variables are parsed here, listed by `fi_info -e`, and
//! documented in `man/fi_udrv.7` (a test compares them).

use crate::telemetry::log;
use std::fmt;

/// Which directions of cross-memory attach are used (FI_UDRV_CMA).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CmaPolicy {
    /// The directions that work when the two processes try them.
    Auto,
    /// None: long messages are copied through the rings.
    Off,
    /// Only the receiver attaches: it reads from the sender's buffer.
    ReadOnly,
    /// Only the sender attaches: it writes into the receiver's buffer.
    WriteOnly,
}

/// Whether RDMA devices are used (FI_UDRV_RDMA).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RdmaPolicy {
    /// They are used if one works.
    Auto,
    Off,
    /// An endpoint is opened only if a device works.
    Require,
}

/// Whether the kernel's rv module carries long messages (FI_UDRV_RV).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RvPolicy {
    /// It is used if it works.
    Auto,
    Off,
    /// An endpoint is opened only if it works.
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

/// How registrations of the application's memory are kept (FI_UDRV_CACHE).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CachePolicy {
    /// Until userfaultfd reports that the address range no longer maps the same memory.
    Userfaultfd,
    /// Not kept: each transfer registers its own buffer.
    Off,
}

/// FI_UDRV_CACHE and the limits of that cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CacheSettings {
    pub(crate) policy: CachePolicy,
    /// FI_UDRV_CACHE_BYTES or FI_MR_CACHE_MAX_SIZE, bytes; `None`: as many as the machine allows.
    pub(crate) bytes: Option<usize>,
    /// FI_UDRV_CACHE_COUNT or FI_MR_CACHE_MAX_COUNT.
    pub(crate) count: usize,
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

/// One variable, as `fi_info -e` lists it.
#[derive(Debug)]
pub(crate) struct Variable {
    /// Name without the prefix `FI_UDRV_`, as `fi_param_define` expects it.
    pub(crate) name: &'static str,
    /// One sentence with unit, range and default.
    pub(crate) help: &'static str,
}

/// All variables.
pub(crate) const VARIABLES: &[Variable] = &[
    Variable {
        name: "IFACE",
        help: "Network interface (name or IP address) whose address endpoints take when the application names none (default: the first one that has a carrier and leads to other hosts, else loopback)",
    },
    Variable {
        name: "CMA",
        help: "Cross-memory attach for long messages within a node: auto, off, read (receivers read), write (senders write) (default: auto)",
    },
    Variable {
        name: "EAGER_MAX",
        help: "Longest message that is sent eagerly, bytes, 0 to 16384 (default: 16384)",
    },
    Variable {
        name: "PUSH_MAX",
        help: "Longest message within a node that is copied through shared memory, in pieces that both processes copy at once, instead of attaching to each other, bytes, 0 to 2097152 (default: 1048576; 0 where more processes talk than the machine has processors, and may attach)",
    },
    Variable {
        name: "SHARE_MIN",
        help: "Shortest message within a node that both processes copy where each may attach to the other, bytes, 0 to 2^62 (default: 131072; none where more processes talk than the machine has processors)",
    },
    Variable {
        name: "PAST_CACHES_MIN",
        help: "Shortest message whose pieces a processor stores in the receiver's buffer around its caches, bytes, 0 to 2^62 (default: a quarter of the last-level cache, 8388608 where that is not known)",
    },
    Variable {
        name: "BULK_MIN",
        help: "Shortest message to another node that goes by stream or by RDMA Write, bytes, 0 to 2^62; none that is sent eagerly does (default: 32768)",
    },
    Variable {
        name: "UNEXPECTED_MAX",
        help: "Payload bytes of unexpected messages that an endpoint holds before it asks its peers to keep theirs, 0 to 2^62 (default: 67108864)",
    },
    Variable {
        name: "TX_MAX",
        help: "Pending sends of an endpoint before FI_EAGAIN, 1 to 16777216 (default: 1048576)",
    },
    Variable {
        name: "RX_MAX",
        help: "Posted receives of an endpoint before FI_EAGAIN, 1 to 16777216 (default: 1048576)",
    },
    Variable {
        name: "SPIN_US",
        help: "How long a blocking call polls before it sleeps, microseconds, 0 to 1000000 (default: 20)",
    },
    Variable {
        name: "JOB_KEY",
        help: "Secret that all processes of a job share, text of 16 to 256 bytes; processes with another one are refused (default: what ~/.config/udrv/key holds, else none)",
    },
    Variable {
        name: "SHM",
        help: "Shared memory to peers of the same node: 1, or 0 to reach them over the network too (default: 1)",
    },
    Variable {
        name: "NET",
        help: "Network to peers of other nodes: 1, or 0 to stay in the node (default: 1)",
    },
    Variable {
        name: "MTU",
        help: "Longest datagram with its IP header, bytes, 576 to 65535 (default: the MTU of the interface)",
    },
    Variable {
        name: "PEER_TIMEOUT",
        help: "How long a peer on another node may be silent while something is owed before it counts as dead, seconds, 1 to 86400 (default: 120)",
    },
    Variable {
        name: "RDMA",
        help: "InfiniBand and RoCE devices for peers of other nodes: auto (where one works), off, or require (without one there is no endpoint) (default: auto)",
    },
    Variable {
        name: "NIC",
        help: "RDMA devices that may be used, names with or without a port, such as mlx5_0,mlx5_2:1; the nearest of them is (default: any, first the one that has the endpoint's address)",
    },
    Variable {
        name: "NET_BUFFER",
        help: "Packets that an endpoint keeps until its peers have acknowledged them, bytes, 1048576 to 17179869184 (default: 67108864)",
    },
    Variable {
        name: "STREAMS",
        help: "TCP connections that an endpoint makes at most for long messages to peers of other nodes, 0 to 65536; 0: it takes none either (default: 256)",
    },
    Variable {
        name: "RV",
        help: "The kernel's rv module (/dev/rv) for long messages to peers that have it: auto (where it works), off, or require (without it there is no endpoint) (default: auto)",
    },
    Variable {
        name: "RC_CONNECTIONS",
        help: "Connected RDMA queue pairs that an endpoint has at most, for long messages, 0 to 65536; 0: they go as datagrams (default: 128)",
    },
    Variable {
        name: "RDMA_READ",
        help: "Whether the receiver of a long message reads a half of it by RDMA while its sender writes the other: auto (on one host, through soft-RoCE of Linux 6.12 or later), always, or off (default: auto)",
    },
    Variable {
        name: "CACHE",
        help: "How registrations of memory with RDMA devices are kept: userfaultfd (until their addresses change), or off (each transfer registers for itself) (default: userfaultfd, or what FI_MR_CACHE_MONITOR says)",
    },
    Variable {
        name: "CACHE_BYTES",
        help: "Memory that an endpoint keeps registered at most, bytes, 0 to 2^62 (default: FI_MR_CACHE_MAX_SIZE if set, else what the machine allows)",
    },
    Variable {
        name: "CACHE_COUNT",
        help: "Registrations that an endpoint keeps at most, 0 to 16777216 (default: FI_MR_CACHE_MAX_COUNT if set, else 1024)",
    },
];

/// A value that must not appear in the log.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The values of all variables.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Config {
    /// FI_UDRV_IFACE
    pub(crate) iface: Option<String>,
    /// FI_UDRV_CMA
    pub(crate) cma: CmaPolicy,
    /// FI_UDRV_EAGER_MAX, bytes
    pub(crate) eager_max: usize,
    /// FI_UDRV_PUSH_MAX, bytes
    pub(crate) push_max: Option<usize>,
    /// FI_UDRV_SHARE_MIN, bytes
    pub(crate) share_min: Option<usize>,
    /// FI_UDRV_PAST_CACHES_MIN, bytes
    pub(crate) past_caches_min: Option<usize>,
    /// FI_UDRV_BULK_MIN, bytes
    pub(crate) bulk_min: usize,
    /// FI_UDRV_UNEXPECTED_MAX, bytes
    pub(crate) unexpected_max: usize,
    /// FI_UDRV_TX_MAX, operations
    pub(crate) tx_max: usize,
    /// FI_UDRV_RX_MAX, operations
    pub(crate) rx_max: usize,
    /// FI_UDRV_SPIN_US, microseconds
    pub(crate) spin_us: u64,
    /// FI_UDRV_JOB_KEY, unchecked
    pub(crate) job_key: Option<Secret>,
    /// FI_UDRV_SHM
    pub(crate) shm: bool,
    /// FI_UDRV_NET
    pub(crate) net: bool,
    /// FI_UDRV_MTU, bytes with the IP header; `None`: the interface's
    pub(crate) mtu: Option<usize>,
    /// FI_UDRV_PEER_TIMEOUT, seconds
    pub(crate) peer_timeout_s: u64,
    /// FI_UDRV_NET_BUFFER, bytes
    pub(crate) net_buffer: usize,
    /// FI_UDRV_STREAMS
    pub(crate) streams: usize,
    /// FI_UDRV_RDMA
    pub(crate) rdma: RdmaPolicy,
    /// FI_UDRV_NIC; empty: any
    pub(crate) nics: Vec<NicName>,
    /// FI_UDRV_RV
    pub(crate) rv: RvPolicy,
    /// FI_UDRV_RC_CONNECTIONS
    pub(crate) rc_connections: usize,
    /// FI_UDRV_RDMA_READ
    pub(crate) read: ReadPolicy,
    /// FI_UDRV_CACHE, FI_UDRV_CACHE_BYTES, FI_UDRV_CACHE_COUNT
    pub(crate) cache: CacheSettings,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            iface: None,
            cma: CmaPolicy::Auto,
            eager_max: 16 * 1024,
            push_max: None,
            share_min: None,
            past_caches_min: None,
            bulk_min: 32 * 1024,
            unexpected_max: 64 << 20,
            tx_max: 1 << 20,
            rx_max: 1 << 20,
            spin_us: 20,
            job_key: None,
            shm: true,
            net: true,
            mtu: None,
            peer_timeout_s: 120,
            net_buffer: 64 << 20,
            streams: 256,
            rdma: RdmaPolicy::Auto,
            nics: Vec::new(),
            rv: RvPolicy::Auto,
            rc_connections: 128,
            read: ReadPolicy::Auto,
            cache: CacheSettings { policy: CachePolicy::Userfaultfd, bytes: None, count: 1024 },
        }
    }
}

impl Config {
    /// Reads the environment of this process. An invalid value leaves the default in place.
    pub(crate) fn from_environment() -> Self {
        Self::from_lookup(environment, of_libfabric, |_, _, _| ())
    }

    /// Logs the invalid values. Called once, when udrv is loaded.
    pub(crate) fn check_environment() {
        Self::from_lookup(environment, of_libfabric, |name, text, wanted| {
            log::warn(format_args!("FI_UDRV_{name}={text} ignored: it must be {wanted}"));
        });
    }

    fn from_lookup(
        lookup: impl Fn(&str) -> Option<String>,
        of_libfabric: impl Fn(&str) -> Option<String>,
        complain: impl Fn(&str, &str, &str),
    ) -> Self {
        let mut config = Self::default();
        let number = |name: &str, min: u64, max: u64| {
            let text = lookup(name)?;
            match text.trim().parse::<u64>() {
                Ok(value) if (min..=max).contains(&value) => Some(value),
                _ => {
                    complain(name, &text, &format!("a number from {min} to {max}"));
                    None
                }
            }
        };
        let size = |name: &str, min: u64, max: u64, to: &mut usize| {
            *to = number(name, min, max).map_or(*to, |value| value as usize);
        };
        let switch = |name: &str, to: &mut bool| match lookup(name).as_deref().map(str::trim) {
            Some("0") => *to = false,
            Some("1") => *to = true,
            Some(text) => complain(name, text, "0 or 1"),
            None => (),
        };
        size("EAGER_MAX", 0, 16 * 1024, &mut config.eager_max);
        config.push_max = number("PUSH_MAX", 0, 2 << 20).map(|value| value as usize);
        config.share_min = number("SHARE_MIN", 0, 1 << 62).map(|value| value as usize);
        config.past_caches_min = number("PAST_CACHES_MIN", 0, 1 << 62).map(|value| value as usize);
        size("BULK_MIN", 0, 1 << 62, &mut config.bulk_min);
        size("UNEXPECTED_MAX", 0, 1 << 62, &mut config.unexpected_max);
        size("TX_MAX", 1, 1 << 24, &mut config.tx_max);
        size("RX_MAX", 1, 1 << 24, &mut config.rx_max);
        size("NET_BUFFER", 1 << 20, 16 << 30, &mut config.net_buffer);
        size("STREAMS", 0, 65536, &mut config.streams);
        size("RC_CONNECTIONS", 0, 65536, &mut config.rc_connections);
        let cache = &mut config.cache;
        // The limits of libfabric's own cache (fi_mr(3)) apply if udrv's variables are not set: a user that sets them
        // means any registration cache. libfabric itself reports invalid values.
        let count = |name: &str| of_libfabric(name)?.trim().parse::<usize>().ok();
        cache.bytes = count("MR_CACHE_MAX_SIZE");
        cache.count = count("MR_CACHE_MAX_COUNT").unwrap_or(cache.count);
        if of_libfabric("MR_CACHE_MONITOR").is_some_and(|text| text.trim() == "disabled") {
            cache.policy = CachePolicy::Off;
        }
        let bytes = number("CACHE_BYTES", 0, 1 << 62).map(|bytes| bytes as usize);
        cache.bytes = bytes.or(cache.bytes);
        size("CACHE_COUNT", 0, 1 << 24, &mut cache.count);
        if let Some(text) = lookup("CACHE") {
            match text.trim().to_ascii_lowercase().as_str() {
                "userfaultfd" | "1" => cache.policy = CachePolicy::Userfaultfd,
                "off" | "0" => cache.policy = CachePolicy::Off,
                _ => complain("CACHE", &text, "userfaultfd or off"),
            }
        }
        config.spin_us = number("SPIN_US", 0, 1_000_000).unwrap_or(config.spin_us);
        config.mtu = number("MTU", 576, 65535).map(|bytes| bytes as usize);
        config.peer_timeout_s = number("PEER_TIMEOUT", 1, 86400).unwrap_or(config.peer_timeout_s);
        switch("SHM", &mut config.shm);
        switch("NET", &mut config.net);
        config.iface = lookup("IFACE").filter(|text| !text.is_empty());
        // Checked where it is used, which refuses a bad key: to ignore it here would leave the job without a key.
        config.job_key = lookup("JOB_KEY").map(Secret);
        if let Some(text) = lookup("RDMA") {
            match text.trim().to_ascii_lowercase().as_str() {
                "auto" | "1" => config.rdma = RdmaPolicy::Auto,
                "off" | "0" => config.rdma = RdmaPolicy::Off,
                "require" => config.rdma = RdmaPolicy::Require,
                _ => complain("RDMA", &text, "auto, off or require"),
            }
        }
        if let Some(text) = lookup("RV") {
            match text.trim().to_ascii_lowercase().as_str() {
                "auto" | "1" => config.rv = RvPolicy::Auto,
                "off" | "0" => config.rv = RvPolicy::Off,
                "require" => config.rv = RvPolicy::Require,
                _ => complain("RV", &text, "auto, off or require"),
            }
        }
        if let Some(text) = lookup("RDMA_READ") {
            match text.trim().to_ascii_lowercase().as_str() {
                "auto" => config.read = ReadPolicy::Auto,
                "off" | "0" => config.read = ReadPolicy::Off,
                "always" | "1" => config.read = ReadPolicy::Always,
                _ => complain("RDMA_READ", &text, "auto, off or always"),
            }
        }
        if let Some(text) = lookup("NIC").filter(|text| !text.trim().is_empty()) {
            match NicName::list(&text) {
                Some(nics) => config.nics = nics,
                None => complain("NIC", &text, "a list of devices such as mlx5_0,mlx5_2:1"),
            }
        }
        if let Some(text) = lookup("CMA") {
            match text.trim().to_ascii_lowercase().as_str() {
                "auto" => config.cma = CmaPolicy::Auto,
                "off" | "0" => config.cma = CmaPolicy::Off,
                "read" => config.cma = CmaPolicy::ReadOnly,
                "write" => config.cma = CmaPolicy::WriteOnly,
                _ => complain("CMA", &text, "auto, off, read or write"),
            }
        }
        config
    }
}

fn environment(name: &str) -> Option<String> {
    // A value that is not UTF-8 must not count as absent: that would leave a job without its key.
    std::env::var_os(format!("FI_UDRV_{name}")).map(|text| text.to_string_lossy().into_owned())
}

/// The value of one of libfabric's own variables.
fn of_libfabric(name: &str) -> Option<String> {
    std::env::var(format!("FI_{name}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> (Config, usize) {
        let complaints = std::cell::Cell::new(0);
        let find =
            |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let config = Config::from_lookup(
            find,
            |name| find(&format!("FI_{name}")),
            |_, _, _| complaints.set(complaints.get() + 1),
        );
        (config, complaints.get())
    }

    #[test]
    fn defaults_stand_when_nothing_is_set() {
        assert_eq!(with(&[]), (Config::default(), 0));
    }

    #[test]
    fn values_are_taken() {
        let (config, complaints) =
            with(&[("EAGER_MAX", "100"), ("CMA", "Off"), ("IFACE", "lo"), ("SPIN_US", "0")]);
        let (network, more) = with(&[
            ("JOB_KEY", "between the two of us"),
            ("SHM", "0"),
            ("NET", " 0 "),
            ("MTU", "9000"),
            ("PEER_TIMEOUT", "5"),
            ("NET_BUFFER", "1048576"),
            ("RDMA", "Require"),
            ("RV", "REQUIRE"),
            ("NIC", "mlx5_0, rxe0:2"),
            ("RC_CONNECTIONS", "0"),
            ("RDMA_READ", "Always"),
        ]);
        assert_eq!(config.eager_max, 100);
        assert_eq!(config.cma, CmaPolicy::Off);
        assert_eq!(config.iface.as_deref(), Some("lo"));
        assert_eq!(config.spin_us, 0);
        assert_eq!(network.job_key, Some(Secret("between the two of us".to_owned())));
        assert!(!format!("{network:?}").contains("between the two of us"));
        assert_eq!((network.shm, network.net, network.mtu), (false, false, Some(9000)));
        assert_eq!((network.peer_timeout_s, network.net_buffer), (5, 1 << 20));
        assert_eq!((network.rdma, network.rc_connections), (RdmaPolicy::Require, 0));
        assert_eq!(network.read, ReadPolicy::Always);
        assert_eq!(with(&[("RDMA_READ", "auto")]).0.read, ReadPolicy::Auto);
        assert_eq!(with(&[("RDMA_READ", "0")]).0.read, ReadPolicy::Off);
        assert_eq!((network.rv, with(&[("RV", "0")]).0.rv), (RvPolicy::Require, RvPolicy::Off));
        let nics: Vec<String> = network.nics.iter().map(ToString::to_string).collect();
        assert_eq!(nics, ["mlx5_0", "rxe0:2"]);
        assert_eq!((complaints, more), (0, 0));
    }

    #[test]
    fn our_cache_heeds_what_is_said_of_libfabrics() {
        let cache = |pairs: &[(&str, &str)]| {
            let (config, complaints) = with(pairs);
            assert_eq!(complaints, 0);
            (config.cache.policy, config.cache.bytes, config.cache.count)
        };
        let theirs = [
            ("FI_MR_CACHE_MONITOR", "disabled"),
            ("FI_MR_CACHE_MAX_SIZE", "1000000"),
            ("FI_MR_CACHE_MAX_COUNT", "0"),
        ];
        assert_eq!(cache(&theirs), (CachePolicy::Off, Some(1_000_000), 0));
        let ours = [("CACHE", "Userfaultfd"), ("CACHE_BYTES", "0"), ("CACHE_COUNT", "7")];
        assert_eq!(cache(&ours), (CachePolicy::Userfaultfd, Some(0), 7));
        assert_eq!(cache(&[&theirs[..], &ours[..]].concat()), cache(&ours));
        let vague = [("FI_MR_CACHE_MONITOR", "memhooks"), ("FI_MR_CACHE_MAX_SIZE", "-1")];
        assert_eq!(cache(&vague), cache(&[]));
        assert_eq!(cache(&[("CACHE", "off")]).0, CachePolicy::Off);
    }

    #[test]
    fn nonsense_changes_nothing() {
        let nonsense = with(&[
            ("EAGER_MAX", "-1"),
            ("TX_MAX", "0"),
            ("RX_MAX", "many"),
            ("CMA", "maybe"),
            ("UNEXPECTED_MAX", "99999999999999999999"),
            ("SHM", "perhaps"),
            ("MTU", "575"),
            ("PEER_TIMEOUT", "0"),
            ("NET_BUFFER", "64M"),
            ("RDMA", "yes"),
            ("RV", "yes"),
            ("NIC", "a:0"),
            ("CACHE", "memhooks"),
            ("CACHE_COUNT", "99999999"),
            ("RC_CONNECTIONS", "65537"),
            ("RDMA_READ", "sometimes"),
        ]);
        assert_eq!(nonsense, (Config::default(), 16));
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
