//! The provider's own log, beside libfabric's, which says nothing at its default level: FI_UDRV_LOG and
//! FI_UDRV_LOG_FILE.
//!
//! A line names host, process and rank. Of an error or a warning only the first line is written, by one process of the
//! job on each node; later lines of the same cause follow at growing intervals, with the number of those between
//! (`limited.rs`). What libfabric's log has written is not written to the standard error stream again.

use super::cause::Cause;
use super::config::LogConfig;
use super::launcher::Launcher;
use super::level::Level;
use super::limited::{Counted, Limited};
use super::node;
use crate::sys::{clock, output, process};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

/// The least severe level that is written: its number, and one more; 0: off.
static LEVELS: AtomicU8 = AtomicU8::new(0);
static HAS_FILE: AtomicBool = AtomicBool::new(false);
static FILE: RwLock<Option<PathBuf>> = RwLock::new(None);

/// Starts to speak, or ends with `None`.
pub(crate) fn set(config: Option<&LogConfig>) {
    let level = config.and_then(|config| config.level);
    // The environment of a privileged process must not name files.
    let file = config.and_then(|config| config.file.as_deref());
    let file = file.filter(|_| !process::is_privileged()).map(named);
    HAS_FILE.store(file.is_some(), Relaxed);
    if let Ok(mut slot) = FILE.write() {
        *slot = file;
    }
    LEVELS.store(level.map_or(0, |level| level as u8 + 1), Relaxed);
}

/// The file of this process.
fn named(pattern: &Path) -> PathBuf {
    let rank = Launcher::here().rank.map_or_else(|| "none".to_owned(), |rank| rank.to_string());
    let text = pattern.to_string_lossy();
    let text = text.replace("%h", host()).replace("%p", &process::pid().to_string());
    PathBuf::from(text.replace("%r", &rank))
}

fn host() -> &'static str {
    static HOST: OnceLock<String> = OnceLock::new();
    HOST.get_or_init(output::host)
}

/// Whether a line of this level is written; `told`: libfabric's log has it.
pub(super) fn wants(level: Level, told: bool) -> bool {
    LEVELS.load(Relaxed) > level as u8 && (!told || HAS_FILE.load(Relaxed))
}

/// Writes a line, if it is due.
pub(super) fn say(level: Level, cause: Option<Cause>, text: &str) {
    let held = match cause {
        None => Some(0),
        Some(cause) if !node::tells(cause.key()) => None,
        Some(cause) if cause.is_limited() => Some(0),
        Some(cause) => repetitions(cause.key()),
    };
    let Some(held) = held else { return };
    let line = line(level, &format!("{text}{}", Counted(held)));
    let file = FILE.read().ok().and_then(|slot| slot.clone());
    let written = file.is_some_and(|path| output::append(&path, line.as_bytes()).is_ok());
    if !written {
        output::to_stderr(line.as_bytes());
    }
}

/// How many lines of a cause were not written before this one; `None`: this one is not due either.
fn repetitions(cause: u64) -> Option<u64> {
    /// Causes that are told apart; those beyond are silent.
    const CAUSES: usize = 256;
    static SEEN: Mutex<Vec<(u64, Limited)>> = Mutex::new(Vec::new());
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
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
    fn a_cause_is_told_once_and_then_counted() {
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
        assert_eq!(named(Path::new("/x/%h.%p")), PathBuf::from(format!("/x/{}.{pid}", host())));
        assert_eq!(named(Path::new("/x/udrv")), PathBuf::from("/x/udrv"));
    }
}
