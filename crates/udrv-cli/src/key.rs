//! `udrv key`: the file with the job key, as the provider accepts it (fi_udrv(7), SECURITY): of the user's own, of mode
//! 0600, with 16 to 4096 bytes. The provider's own view is in its `src/transport/job_key/source.rs`.

use crate::Outcome;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Random bytes of a new key.
const BYTES: usize = 32;
/// Shortest key, longest file and longest text of the variable that the provider accepts, bytes.
const SECRET_MIN: usize = 16;
const FILE_MAX: usize = 4096;
const TEXT_MAX: usize = 256;
/// The variable that comes before the file.
pub(crate) const VARIABLE: &str = "FI_UDRV_JOB_KEY";

#[derive(clap::Args)]
pub(crate) struct Key {
    /// Replace the key that there is: running jobs keep the old one, and new processes do not reach them
    #[arg(long)]
    replace: bool,
    /// Only say whether the provider accepts FI_UDRV_JOB_KEY or, without it, the file; status 1 if it does not
    #[arg(long, conflicts_with = "replace")]
    check: bool,
}

impl Key {
    pub(crate) fn run(self) -> Outcome {
        match of_variable() {
            State::Good if self.check => {
                println!(
                    "{VARIABLE} is a key that the provider accepts, and comes before the file"
                );
                return Ok(ExitCode::SUCCESS);
            }
            State::Bad(why) if self.check => {
                return Err(format!("{VARIABLE} {why}; the provider refuses it"));
            }
            _ => (),
        }
        let path = path().ok_or("neither XDG_CONFIG_HOME nor HOME names a folder for the key")?;
        let shown = path.display();
        match state(&path) {
            State::Good if !self.replace => {
                println!("{shown} holds a key that the provider accepts")
            }
            State::Bad(why) if !self.replace => {
                return Err(format!("{shown} {why}; the provider refuses it (udrv key --replace)"));
            }
            _ if self.check => {
                println!("{shown} does not exist: jobs have no key");
                return Ok(ExitCode::FAILURE);
            }
            _ => {
                make(&path).map_err(|error| format!("{shown}: {error}"))?;
                println!(
                    "{shown} holds a new key. Copy it to the nodes that do not share this home folder."
                );
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The provider's view of a key file.
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

/// Of the variable. An empty one is refused too.
pub(crate) fn of_variable() -> State {
    let Some(text) = std::env::var_os(VARIABLE) else { return State::Missing };
    of_text(&text.to_string_lossy())
}

fn of_text(text: &str) -> State {
    match text.as_bytes().trim_ascii().len() {
        _ if text.contains(char::REPLACEMENT_CHARACTER) => {
            State::Bad("has bytes that are not UTF-8".to_owned())
        }
        SECRET_MIN..=TEXT_MAX => State::Good,
        len => State::Bad(format!("has {len} bytes")),
    }
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

/// Writes a new key beside the old one, which it then replaces: a reader finds one of the two.
fn make(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let mut bytes = [0; BYTES];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let new = folder.join(format!(".key.{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let written = writeln!(file, "{text}").and_then(|()| file.sync_all());
    written.and_then(|()| fs::rename(&new, path)).inspect_err(|_| drop(fs::remove_file(&new)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_new_key_is_accepted_and_a_loose_one_is_not() {
        let folder = std::env::temp_dir().join(format!("udrv-cli-key-{}", std::process::id()));
        let path = folder.join("udrv/key");
        assert_eq!(state(&path), State::Missing);
        make(&path).unwrap();
        assert_eq!(state(&path), State::Good);
        let first = fs::read(&path).unwrap();
        make(&path).unwrap();
        assert_ne!(fs::read(&path).unwrap(), first);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(state(&path), State::Bad(why) if why.contains("0640")));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "short").unwrap();
        assert_eq!(state(&path), State::Bad("has 5 bytes".to_owned()));
        fs::write(&path, [0xff; 32]).unwrap();
        assert_eq!(state(&path), State::Good, "it need not be text");
        fs::write(&path, "x".repeat(FILE_MAX + 1)).unwrap();
        assert_eq!(state(&path), State::Bad("has more than 4096 bytes".to_owned()));
        assert_eq!(state(&path.join("key")), State::Missing, "below a file");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("nowhere", &path).unwrap();
        assert!(matches!(state(&path), State::Bad(why) if why.starts_with("cannot be read")));
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(state(&path), State::Bad("is not a regular file".to_owned()));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_variable_is_a_text() {
        assert_eq!(of_text(" between the two of us\n"), State::Good);
        assert_eq!(of_text(""), State::Bad("has 0 bytes".to_owned()));
        assert_eq!(of_text(&"x".repeat(257)), State::Bad("has 257 bytes".to_owned()));
        let damaged = String::from_utf8_lossy(b"between the two of us\xff");
        assert_eq!(of_text(&damaged), State::Bad("has bytes that are not UTF-8".to_owned()));
    }
}
