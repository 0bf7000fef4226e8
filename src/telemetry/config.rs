//! The variables of the log.

use super::level::Level;
use crate::config::variable::{Group, Kind, Reader, Variable, set};
use std::path::PathBuf;

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
