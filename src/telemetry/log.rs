//! The log. Lines go to libfabric's own log (FI_LOG_LEVEL), whose entry points the `ofi` layer attaches
//! while libfabric is loaded, and to the provider's own log (FI_UDRV_LOG). Without both, lines are discarded.

use super::cause::Cause;
pub(crate) use super::cause::number_of;
pub(crate) use super::level::Level;
use super::limited::{Counted, Limited};
use super::{own, page, ranks};
use crate::sys::cancel::Shield;
use crate::sys::clock;
use std::fmt;
use std::sync::RwLock;

/// The destination of log lines.
#[derive(Clone, Copy)]
pub(crate) struct Sink {
    /// Whether lines of a level are wanted.
    pub(crate) enabled: fn(Level) -> bool,
    /// Takes one line.
    pub(crate) write: fn(Level, &str),
}

static SINK: RwLock<Option<Sink>> = RwLock::new(None);

/// Sends all further lines to `sink`, or discards them.
pub(crate) fn attach(sink: Option<Sink>) {
    if let Ok(mut slot) = SINK.write() {
        *slot = sink;
    }
}

/// `cause`: of an error or a warning, whose repetitions are counted.
#[cold]
fn write(level: Level, cause: Option<Cause>, line: fmt::Arguments<'_>) {
    let _shield = Shield::raise();
    let sink = SINK.read().ok().and_then(|slot| *slot);
    let sink = sink.filter(|sink| (sink.enabled)(level));
    let has_sink = sink.is_some();
    let is_own = own::wants(level, has_sink);
    if !has_sink && !is_own && cause.is_none() {
        return;
    }
    let text = ranks::named(line.to_string());
    if let Some(cause) = cause {
        page::note(level, cause, &text);
    }
    if let Some(sink) = sink {
        let held = cause.and_then(Cause::counted).unwrap_or(0);
        (sink.write)(level, &format!("{text}{}", Counted(held)));
    }
    if is_own {
        own::write(level, cause, &text, has_sink);
    }
}

/// The provider does not do what it is for.
#[track_caller]
pub(crate) fn error(line: fmt::Arguments<'_>) {
    write(Level::Error, Some(Cause::here(0)), line);
}

/// A condition that the user must know about.
#[track_caller]
pub(crate) fn warn(line: fmt::Arguments<'_>) {
    warn_of(0, line);
}

/// The same, where one place in the source has several causes: each has its number.
#[track_caller]
pub(crate) fn warn_of(number: u64, line: fmt::Arguments<'_>) {
    write(Level::Warn, Some(Cause::here(number)), line);
}

/// The line of [`limited!`], if it is due.
#[cold]
#[track_caller]
pub(crate) fn warn_limited(site: &Limited, number: u64, line: fmt::Arguments<'_>) {
    if let Some(held) = site.admit(clock::now_ns()) {
        write(Level::Warn, Some(Cause::here(number).counted_as(held)), line);
    }
}

/// The same for a condition of the node (`node:` of [`limited!`]).
#[cold]
#[track_caller]
pub(crate) fn warn_limited_of_node(site: &Limited, number: u64, line: fmt::Arguments<'_>) {
    if let Some(held) = site.admit(clock::now_ns()) {
        write(Level::Warn, Some(Cause::here(number).counted_as(held).of_node()), line);
    }
}

/// A warning whose cause another party can repeat, at growing intervals (see `limited.rs`). With
/// `cause: NUMBER,` each number up to [`CAUSES`] is a cause of its own. With `node: NUMBER,` it reports a condition of the
/// node, of that number: processes of a job there have one line, although their texts differ (a process id, a port).
macro_rules! limited {
    (cause: $cause:expr, $($line:tt)+) => {{
        use $crate::telemetry::limited::{CAUSES, Limited};
        static SITE: [Limited; CAUSES] = [const { Limited::new() }; CAUSES];
        // Only the lowest bits of the cause select the counter.
        let number = ($cause as usize) % CAUSES;
        if let Some(cause) = SITE.get(number) {
            $crate::telemetry::log::warn_limited(cause, number as u64, format_args!($($line)+));
        }
    }};
    (node: $number:expr, $($line:tt)+) => {{
        static SITE: $crate::telemetry::limited::Limited = $crate::telemetry::limited::Limited::new();
        $crate::telemetry::log::warn_limited_of_node(&SITE, $number as u64, format_args!($($line)+));
    }};
    ($($line:tt)+) => {{
        static SITE: $crate::telemetry::limited::Limited = $crate::telemetry::limited::Limited::new();
        $crate::telemetry::log::warn_limited(&SITE, 0, format_args!($($line)+));
    }};
}
pub(crate) use limited;

/// A decision of the provider, and its reason.
pub(crate) fn info(line: fmt::Arguments<'_>) {
    write(Level::Info, None, line);
}

/// What helps to find a mistake of the provider, or of a peer.
pub(crate) fn debug(line: fmt::Arguments<'_>) {
    write(Level::Debug, None, line);
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
