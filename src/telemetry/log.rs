//! One place to say what happened. The lines go to libfabric's own log (FI_LOG_LEVEL), whose entry
//! points the `ofi` layer attaches while libfabric is loaded; without one they go nowhere.

use crate::sys::cancel::Shield;
use std::fmt;
use std::sync::RwLock;

/// Levels of `fi_log`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Level {
    /// Something a user must know.
    Warn,
    /// What was decided, and why.
    Info,
}

/// Where lines go.
#[derive(Clone, Copy)]
pub(crate) struct Sink {
    /// Whether lines of a level are wanted.
    pub(crate) enabled: fn(Level) -> bool,
    /// Takes one line.
    pub(crate) write: fn(Level, &str),
}

pub(crate) use super::limited::limited;

static SINK: RwLock<Option<Sink>> = RwLock::new(None);

/// Sends lines to `sink` from now on, or nowhere.
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

/// Something a user must know.
pub(crate) fn warn(line: fmt::Arguments<'_>) {
    write(Level::Warn, line);
}

/// What was decided, and why.
pub(crate) fn info(line: fmt::Arguments<'_>) {
    write(Level::Info, line);
}

/// The log of the unit tests, which run beside each other and share it.
#[cfg(test)]
pub(crate) mod captured {
    use super::{Sink, attach};
    use std::sync::{Mutex, PoisonError};

    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    /// Keeps what is written from now on.
    pub(crate) fn begin() {
        let write = |_, line: &str| {
            LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
        };
        attach(Some(Sink { enabled: |_| true, write }));
    }

    /// The lines with `mark` in them. A test takes a mark that no other test writes.
    pub(crate) fn lines_with(mark: &str) -> Vec<String> {
        let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|line| line.contains(mark)).cloned().collect()
    }
}
