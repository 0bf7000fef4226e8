//! What the provider makes of a job key (fi_udrv(7), SECURITY): a file of the user's own, of mode 0600, with 16 to 4096
//! bytes, or a variable. The provider's own view is in its `src/transport/job_key/source.rs`.

use crate::libfabric::Libfabric;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Shortest key, longest file and longest text of the variable that the provider accepts, bytes.
const SECRET_MIN: usize = 16;
pub(crate) const FILE_MAX: usize = 4096;
const TEXT_MAX: usize = 256;
/// The variable that comes before the file.
pub(crate) const VARIABLE: &str = "FI_UDRV_JOB_KEY";

/// The provider's view of a key.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum State {
    Missing,
    Good,
    /// The reason why it is refused.
    Bad(String),
}

/// Where the provider looks for the key: `udrv/key` in the user's folder of configurations.
pub(crate) fn path() -> Option<PathBuf> {
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")));
    Some(folder?.join("udrv/key"))
}

/// Of the text of the variable. An empty one is refused too.
pub(crate) fn of_text(text: &str) -> State {
    match text.as_bytes().trim_ascii().len() {
        _ if text.contains(char::REPLACEMENT_CHARACTER) => {
            State::Bad("has bytes that are not UTF-8".to_owned())
        }
        SECRET_MIN..=TEXT_MAX => State::Good,
        len => State::Bad(format!("has {len} bytes")),
    }
}

/// Of the variable in libfabric.conf. The provider does not look there if the environment has it.
pub(crate) fn in_libfabric(libfabric: &Libfabric) -> State {
    let text = std::env::var_os(VARIABLE).is_none().then(|| libfabric.value("udrv_job_key"));
    text.flatten().map_or(State::Missing, |text| of_text(&text))
}

/// Of a file.
pub(crate) fn state(path: &Path) -> State {
    // A FIFO would be waited for.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if is_there(path) => return State::Bad(format!("cannot be read: {error}")),
        Err(_) => return State::Missing,
    };
    let Ok(facts) = file.metadata() else { return State::Bad("cannot be read".to_owned()) };
    let me = fs::metadata("/proc/self").map(|me| me.uid());
    let mut bytes = Vec::new();
    if !facts.is_file() {
        State::Bad("is not a regular file".to_owned())
    } else if me.is_ok_and(|me| me != facts.uid()) {
        State::Bad(format!("belongs to user {}", facts.uid()))
    } else if facts.mode() & 0o077 != 0 {
        State::Bad(format!("has mode {:04o}: other users have permissions", facts.mode() & 0o7777))
    } else if let Err(error) = file.take(FILE_MAX as u64 + 1).read_to_end(&mut bytes) {
        State::Bad(format!("cannot be read: {error}"))
    } else if bytes.len() > FILE_MAX {
        State::Bad(format!("has more than {FILE_MAX} bytes"))
    } else if bytes.trim_ascii().len() < SECRET_MIN {
        State::Bad(format!("has {} bytes", bytes.trim_ascii().len()))
    } else {
        State::Good
    }
}

/// The name exists, as far as this user may know, even as a dangling link.
fn is_there(path: &Path) -> bool {
    !path.symlink_metadata().is_err_and(|error| {
        matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::EACCES))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_a_text() {
        assert_eq!(of_text(" between the two of us\n"), State::Good);
        assert_eq!(of_text(""), State::Bad("has 0 bytes".to_owned()));
        assert_eq!(of_text(&"x".repeat(257)), State::Bad("has 257 bytes".to_owned()));
        let damaged = String::from_utf8_lossy(b"between the two of us\xff");
        assert_eq!(of_text(&damaged), State::Bad("has bytes that are not UTF-8".to_owned()));
    }
}
