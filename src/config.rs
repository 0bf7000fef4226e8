//! Every `FI_UDRV_*` variable, in one table: parsed here, listed by `fi_info -e`, documented in
//! `man/fi_udrv.7` (a test compares them).

use crate::telemetry::log;

/// Which ways of cross-memory attach are used (FI_UDRV_CMA).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CmaPolicy {
    /// Whatever a real attempt between the two processes shows to work.
    Auto,
    /// None: long messages are copied through the rings.
    Off,
    /// Only receivers read.
    ReadOnly,
    /// Only senders write.
    WriteOnly,
}

/// One variable.
#[derive(Debug)]
pub(crate) struct Variable {
    /// Without the prefix, as `fi_param_define` wants it.
    pub(crate) name: &'static str,
    /// One sentence with unit, range and default.
    pub(crate) help: &'static str,
}

/// All variables.
pub(crate) const VARIABLES: &[Variable] = &[
    Variable {
        name: "IFACE",
        help: "Network interface (name or IP address) whose address endpoints take when the application names none (default: the first one that is up and not loopback, else loopback)",
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
];

/// Values of all variables.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Config {
    /// FI_UDRV_IFACE
    pub(crate) iface: Option<String>,
    /// FI_UDRV_CMA
    pub(crate) cma: CmaPolicy,
    /// FI_UDRV_EAGER_MAX, bytes
    pub(crate) eager_max: usize,
    /// FI_UDRV_UNEXPECTED_MAX, bytes
    pub(crate) unexpected_max: usize,
    /// FI_UDRV_TX_MAX, operations
    pub(crate) tx_max: usize,
    /// FI_UDRV_RX_MAX, operations
    pub(crate) rx_max: usize,
    /// FI_UDRV_SPIN_US, microseconds
    pub(crate) spin_us: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            iface: None,
            cma: CmaPolicy::Auto,
            eager_max: 16 * 1024,
            unexpected_max: 64 << 20,
            tx_max: 1 << 20,
            rx_max: 1 << 20,
            spin_us: 20,
        }
    }
}

impl Config {
    /// From the environment of this process. Where a value makes no sense the default stays.
    pub(crate) fn from_environment() -> Self {
        Self::from_lookup(environment, |_, _, _| ())
    }

    /// Names the values that make no sense in the log; called once, when udrv is loaded.
    pub(crate) fn check_environment() {
        Self::from_lookup(environment, |name, text, wanted| {
            log::warn(format_args!("FI_UDRV_{name}={text} ignored: it must be {wanted}"));
        });
    }

    fn from_lookup(
        lookup: impl Fn(&str) -> Option<String>,
        complain: impl Fn(&str, &str, &str),
    ) -> Self {
        let mut config = Self::default();
        let number = |name: &str, max: u64, min: u64, to: &mut usize| {
            let Some(text) = lookup(name) else { return };
            match text.trim().parse::<u64>() {
                Ok(value) if (min..=max).contains(&value) => *to = value as usize,
                _ => complain(name, &text, &format!("a number from {min} to {max}")),
            }
        };
        number("EAGER_MAX", 16 * 1024, 0, &mut config.eager_max);
        number("UNEXPECTED_MAX", 1 << 62, 0, &mut config.unexpected_max);
        number("TX_MAX", 1 << 24, 1, &mut config.tx_max);
        number("RX_MAX", 1 << 24, 1, &mut config.rx_max);
        let mut spin = config.spin_us as usize;
        number("SPIN_US", 1_000_000, 0, &mut spin);
        config.spin_us = spin as u64;
        config.iface = lookup("IFACE").filter(|text| !text.is_empty());
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
    std::env::var(format!("FI_UDRV_{name}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> (Config, usize) {
        let complaints = std::cell::Cell::new(0);
        let config = Config::from_lookup(
            |name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()),
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
        assert_eq!(config.eager_max, 100);
        assert_eq!(config.cma, CmaPolicy::Off);
        assert_eq!(config.iface.as_deref(), Some("lo"));
        assert_eq!(config.spin_us, 0);
        assert_eq!(complaints, 0);
    }

    #[test]
    fn nonsense_changes_nothing() {
        let nonsense = with(&[
            ("EAGER_MAX", "-1"),
            ("TX_MAX", "0"),
            ("RX_MAX", "many"),
            ("CMA", "maybe"),
            ("UNEXPECTED_MAX", "99999999999999999999"),
        ]);
        assert_eq!(nonsense, (Config::default(), 5));
    }
}
