//! The variables of the log and of the ring of events.

use super::level::Level;
use crate::config::variable::{Group, Kind, Reader, Variable, set};
use std::path::PathBuf;

/// FI_UDRV_TRACE: how many events of messages are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct TraceConfig {
    pub(crate) events: usize,
}

/// Most events that are kept: a gigabyte.
const EVENTS_MAX: u64 = 1 << 24;

impl Group for TraceConfig {
    const VARIABLES: &'static [Variable] = &[Variable {
        name: "TRACE",
        kind: Kind::Count,
        help: "Events of its messages that the process keeps for `udrv trace`, the last ones, 64 bytes each: 0 to 16777216 (default: 0)",
    }];

    fn read(&mut self, from: &Reader<'_>) {
        set(&mut self.events, from.count("TRACE", 0..=EVENTS_MAX));
    }
}

/// Their values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LogConfig {
    /// FI_UDRV_LOG: the least severe level that is written; `None`: off
    pub(crate) level: Option<Level>,
    /// FI_UDRV_LOG_FILE, as it was given
    pub(crate) file: Option<PathBuf>,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { level: Some(Level::Warn), file: None }
    }
}

impl Group for LogConfig {
    const VARIABLES: &'static [Variable] = &[
        Variable {
            name: "LOG",
            kind: Kind::Text,
            help: "Lines that the provider writes itself, whatever FI_LOG_LEVEL is: off, error, warn, info or debug; each level has those before it (default: warn)",
        },
        Variable {
            name: "LOG_FILE",
            kind: Kind::Text,
            help: "File to which these lines are appended, with %h for the host, %p for the process id and %r for the rank (default: none, they go to the standard error stream)",
        },
    ];

    fn read(&mut self, from: &Reader<'_>) {
        let levels = [
            ("off", None),
            ("0", None),
            ("error", Some(Level::Error)),
            ("warn", Some(Level::Warn)),
            ("info", Some(Level::Info)),
            ("debug", Some(Level::Debug)),
        ];
        set(&mut self.level, from.choice("LOG", "off, error, warn, info or debug", &levels));
        self.file = from.text("LOG_FILE").filter(|text| !text.is_empty()).map(PathBuf::from);
    }
}
