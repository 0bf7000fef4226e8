//! The variables of shared memory.

use crate::config::variable::{Group, Kind, Reader, Variable, set};

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

/// Their values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ShmConfig {
    /// FI_UDRV_SHM
    pub(crate) on: bool,
    /// FI_UDRV_CMA
    pub(crate) cma: CmaPolicy,
    /// FI_UDRV_PUSH_MAX, bytes
    pub(crate) push_max: Option<usize>,
    /// FI_UDRV_SHARE_MIN, bytes
    pub(crate) share_min: Option<usize>,
    /// FI_UDRV_SHM_MEMORY, bytes
    pub(crate) memory: usize,
}

impl Default for ShmConfig {
    fn default() -> Self {
        let memory = 24 << 20;
        Self { on: true, cma: CmaPolicy::Auto, push_max: None, share_min: None, memory }
    }
}

impl Group for ShmConfig {
    const VARIABLES: &'static [Variable] = &[
        Variable {
            name: "SHM",
            kind: Kind::Switch,
            help: "Shared memory to peers of the same node: 1, or 0 to reach them over the network too (default: 1)",
        },
        Variable {
            name: "CMA",
            kind: Kind::Text,
            help: "Cross-memory attach for long messages within a node: auto, off, read (receivers read), write (senders write) (default: auto)",
        },
        Variable {
            name: "PUSH_MAX",
            kind: Kind::Text,
            help: "Longest message within a node that is copied through shared memory, in pieces that both processes copy at once, instead of attaching to each other, bytes, 0 to 2097152 (default: 1048576; 0 where more processes talk than the machine has processors, and may attach)",
        },
        Variable {
            name: "SHARE_MIN",
            kind: Kind::Text,
            help: "Shortest message within a node that both processes copy where each may attach to the other, bytes, 0 to 2^62 (default: 131072; none where more processes talk than the machine has processors)",
        },
        Variable {
            name: "SHM_MEMORY",
            kind: Kind::Text,
            help: "Bytes of shared memory that the links of an endpoint to peers of its node may take together beyond 68 KiB each, 0 to 2^62 (default: 25165824)",
        },
    ];

    fn read(&mut self, from: &Reader<'_>) {
        set(&mut self.on, from.switch("SHM"));
        let policies = [
            ("auto", CmaPolicy::Auto),
            ("off", CmaPolicy::Off),
            ("0", CmaPolicy::Off),
            ("read", CmaPolicy::ReadOnly),
            ("write", CmaPolicy::WriteOnly),
        ];
        set(&mut self.cma, from.choice("CMA", "auto, off, read or write", &policies));
        self.push_max = from.bytes("PUSH_MAX", 0..=2 << 20);
        self.share_min = from.bytes("SHARE_MIN", 0..=1 << 62);
        set(&mut self.memory, from.bytes("SHM_MEMORY", 0..=1 << 62));
    }
}
