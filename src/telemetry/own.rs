//! The provider's own log, beside libfabric's, which writes nothing at its default level: FI_UDRV_LOG and
//! FI_UDRV_LOG_FILE.
//!
//! A line names host, process and rank. Of an error or a warning only the first line is written, by one process of the
//! job on each node, unless each process has its own file; later lines of the same cause follow at growing intervals,
//! with the number of those between (`limited.rs`). What libfabric's log has is not written to the standard error stream
//! again.

use super::cause::Cause;
use super::config::LogConfig;
use super::launcher::Launcher;
use super::level::Level;
use super::limited::{Counted, Limited};
use super::{node, soon};
use crate::sys::{clock, output, process};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

/// The least severe level that is written: its number, and one more; 0: off.
static LEVELS: AtomicU8 = AtomicU8::new(0);
static HAS_FILE: AtomicBool = AtomicBool::new(false);
static FILE: Mutex<Option<LogFile>> = Mutex::new(None);

/// The value of FI_UDRV_LOG_FILE.
#[derive(Clone, Debug)]
struct LogFile {
    /// With `%p` only: a forked child has its own file.
    pattern: String,
    /// No other process of a job writes there.
    is_of_process: bool,
}

impl LogFile {
    fn new(pattern: &Path) -> Self {
        let pattern = pattern.to_string_lossy();
        let is_of_process = pattern.contains("%p") || pattern.contains("%r");
        let rank = Launcher::here().rank.map_or_else(|| "none".to_owned(), |rank| rank.to_string());
        Self { pattern: pattern.replace("%h", host()).replace("%r", &rank), is_of_process }
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(self.pattern.replace("%p", &process::pid().to_string()))
    }
}

/// Opens the log, or closes it with `None`.
pub(crate) fn set(config: Option<&LogConfig>) {
    output::remember_stderr();
    let level = config.and_then(|config| config.level);
    // The environment of a privileged process must not name files.
    let file = config.and_then(|config| config.file.as_deref());
    let file = file.filter(|_| !process::is_privileged()).map(LogFile::new);
    HAS_FILE.store(file.is_some(), Relaxed);
    if let Some(mut slot) = soon::lock(&FILE) {
        *slot = file;
    }
    LEVELS.store(level.map_or(0, |level| level as u8 + 1), Relaxed);
}

fn host() -> &'static str {
    static HOST: OnceLock<String> = OnceLock::new();
    HOST.get_or_init(output::host)
}

/// Whether a line of this level is written; `has_sink`: libfabric's log has it.
pub(super) fn wants(level: Level, has_sink: bool) -> bool {
    LEVELS.load(Relaxed) > level as u8 && (!has_sink || HAS_FILE.load(Relaxed))
}

/// Writes a line, if it is due. `has_sink`: libfabric's log has it.
pub(super) fn write(level: Level, cause: Option<Cause>, text: &str, has_sink: bool) {
    let is_first = || cause.is_none_or(|cause| node::is_first_reporter(cause.fact(text)));
    let file = soon::lock(&FILE).and_then(|slot| slot.clone());
    let is_of_process = file.as_ref().is_some_and(|file| file.is_of_process);
    if !is_of_process && !is_first() {
        return;
    }
    let Some(held) = cause.map_or(Some(0), due) else { return };
    let line = line(level, &format!("{text}{}", Counted(held)));
    let appended = file.is_some_and(|file| output::append(&file.path(), line.as_bytes()).is_ok());
    if !appended && !has_sink && (!is_of_process || is_first()) {
        output::to_stderr(line.as_bytes());
    }
}

/// How many lines of a cause were not written before this one; `None`: this one is not due either.
fn due(cause: Cause) -> Option<u64> {
    cause.counted().or_else(|| repetitions(cause.key()))
}

fn repetitions(cause: u64) -> Option<u64> {
    /// Most causes that are counted; lines of further ones are not written.
    const CAUSES: usize = 256;
    static SEEN: Mutex<Vec<(u64, Limited)>> = Mutex::new(Vec::new());
    let mut seen = soon::lock(&SEEN)?;
    if let Some((_, limited)) = seen.iter().find(|(key, _)| *key == cause) {
        return limited.admit(clock::now_ns());
    }
    if seen.len() >= CAUSES {
        return None;
    }
    let new = Limited::new();
    let first = new.admit(clock::now_ns());
    seen.push((cause, new));
    first
}

fn line(level: Level, text: &str) -> String {
    let mut line = format!("[{}:{}{}] udrv {level}: ", host(), process::pid(), Launcher::here());
    for c in text.chars() {
        if line.len() + c.len_utf8() >= output::LINE_MAX {
            break;
        }
        // What a peer or the user wrote does not control the terminal.
        line.push(if c.is_control() { ' ' } else { c });
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_one_end_and_no_other_control() {
        let long = "word \x1b[31m\n".repeat(1000);
        let line = line(Level::Warn, &long);
        assert!(line.len() <= output::LINE_MAX);
        assert_eq!(line.chars().filter(|c| c.is_control()).count(), 1);
        let pid = process::pid();
        assert!(line.starts_with(&format!("[{}:{pid}", host())), "{line}");
        assert!(line.contains("] udrv warning: word  [31m "), "{line}");
        assert!(line.ends_with('\n'));
    }

    #[test]
    fn a_cause_has_one_line_and_is_then_counted() {
        let cause = 0x7e57;
        assert_eq!(repetitions(cause), Some(0));
        assert_eq!(repetitions(cause), None);
        assert_eq!(repetitions(cause + 1), Some(0));
        assert_eq!(Counted(0).to_string(), "");
        assert_eq!(Counted(7).to_string(), " (and 7 times more since the last such line)");
    }

    #[test]
    fn a_file_is_each_processs_own() {
        let pid = process::pid();
        let own = LogFile::new(Path::new("/x/%h.%p"));
        assert_eq!(own.path(), PathBuf::from(format!("/x/{}.{pid}", host())));
        assert!(own.pattern.ends_with(".%p"), "a forked child has its own");
        let shared = LogFile::new(Path::new("/x/udrv.%h"));
        assert!(own.is_of_process && !shared.is_of_process);
        assert!(LogFile::new(Path::new("/x/udrv.%r")).is_of_process);
    }
}
