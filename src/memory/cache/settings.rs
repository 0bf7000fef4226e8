//! The variables of the registration cache.

use crate::config::variable::{Group, Kind, Reader, Variable, set};

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

impl Default for CacheSettings {
    fn default() -> Self {
        Self { policy: CachePolicy::Userfaultfd, bytes: None, count: 1024 }
    }
}

impl Group for CacheSettings {
    const VARIABLES: &'static [Variable] = &[
        Variable {
            name: "CACHE",
            kind: Kind::Text,
            help: "How registrations of memory with RDMA devices are kept: userfaultfd (until their addresses change), or off (each transfer registers for itself) (default: userfaultfd, or what FI_MR_CACHE_MONITOR says)",
        },
        Variable {
            name: "CACHE_BYTES",
            kind: Kind::Text,
            help: "Memory that an endpoint keeps registered at most, bytes, 0 to 2^62 (default: FI_MR_CACHE_MAX_SIZE if set, else what the machine allows)",
        },
        Variable {
            name: "CACHE_COUNT",
            kind: Kind::Count,
            help: "Registrations that an endpoint keeps at most, 0 to 16777216 (default: FI_MR_CACHE_MAX_COUNT if set, else 1024)",
        },
    ];

    /// The limits of libfabric's own cache (fi_mr(3)) apply if udrv's variables are not set: a user that sets them means
    /// any registration cache. libfabric itself reports invalid values.
    fn read(&mut self, from: &Reader<'_>) {
        let limit = |name: &str| from.of_libfabric(name)?.trim().parse::<usize>().ok();
        let monitor = from.of_libfabric("MR_CACHE_MONITOR");
        if monitor.is_some_and(|text| text.trim() == "disabled") {
            self.policy = CachePolicy::Off;
        }
        self.bytes = from.bytes("CACHE_BYTES", 0..=1 << 62).or_else(|| limit("MR_CACHE_MAX_SIZE"));
        let count = from.count("CACHE_COUNT", 0..=1 << 24);
        set(&mut self.count, count.or_else(|| limit("MR_CACHE_MAX_COUNT")));
        let policies = [
            ("userfaultfd", CachePolicy::Userfaultfd),
            ("1", CachePolicy::Userfaultfd),
            ("off", CachePolicy::Off),
            ("0", CachePolicy::Off),
        ];
        set(&mut self.policy, from.choice("CACHE", "userfaultfd or off", &policies));
    }
}
