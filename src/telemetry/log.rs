//! The log. Lines go to libfabric's own log (FI_LOG_LEVEL), whose entry points the `ofi` layer attaches
//! while libfabric is loaded. While none is attached, lines are discarded.

use crate::sys::cancel::Shield;
use std::fmt;
use std::sync::RwLock;

/// Levels of `fi_log`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Level {
    /// A condition that the user must know about.
    Warn,
    /// A decision of the provider, and its reason.
    Info,
}

/// The destination of log lines.
#[derive(Clone, Copy)]
pub(crate) struct Sink {
    /// Whether lines of a level are wanted.
    pub(crate) enabled: fn(Level) -> bool,
    /// Takes one line.
    pub(crate) write: fn(Level, &str),
}

pub(crate) use super::limited::limited;

static SINK: RwLock<Option<Sink>> = RwLock::new(None);

/// Sends all further lines to `sink`, or discards them.
pub(crate) fn attach(sink: Option<Sink>) {
    if let Ok(mut slot) = SINK.write() {
        *slot = sink;
    }
}

#[cold]
fn write(level: Level, line: fmt::Arguments<'_>) {
    let _shield = Shield::raise();
    let sink = SINK.read().ok().and_then(|slot| *slot);
    if let Some(sink) = sink {
        if (sink.enabled)(level) {
            (sink.write)(level, &line.to_string());
        }
    }
}

/// A condition that the user must know about.
pub(crate) fn warn(line: fmt::Arguments<'_>) {
    write(Level::Warn, line);
}

/// A decision of the provider, and its reason.
pub(crate) fn info(line: fmt::Arguments<'_>) {
    write(Level::Info, line);
}

/// The log of the unit tests, which run concurrently and share it.
#[cfg(test)]
pub(crate) mod captured {
    use super::{Sink, attach};
    use std::sync::{Mutex, PoisonError};

    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    /// Starts to keep the lines that are written.
    pub(crate) fn begin() {
        let write = |_, line: &str| {
            LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
        };
        attach(Some(Sink { enabled: |_| true, write }));
    }

    /// The lines that contain `mark`. Each test uses a mark that no other test writes.
    pub(crate) fn lines_with(mark: &str) -> Vec<String> {
        let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|line| line.contains(mark)).cloned().collect()
    }
}
