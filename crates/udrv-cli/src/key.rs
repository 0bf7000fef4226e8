//! `udrv key`: the file with the job key.

#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use crate::Outcome;
use crate::job_key::{State, VARIABLE, of_text, path, state};
use crate::probe::probe;
use serde_json::Value;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;

/// Random bytes of a new key.
const BYTES: usize = 32;

#[derive(clap::Args)]
pub(crate) struct Key {
    /// Replace the key that there is: running jobs keep the old one, and new processes do not reach them
    #[arg(long)]
    replace: bool,
    /// Only say whether the provider accepts FI_UDRV_JOB_KEY (of the environment, or of libfabric.conf) or, without it,
    /// the file; status 1 if it does not
    #[arg(long, conflicts_with = "replace")]
    check: bool,
}

impl Key {
    pub(crate) fn run(self) -> Outcome {
        let (variable, of) = variable();
        match &variable {
            State::Good if self.check => {
                println!("{of} is a key that the provider accepts, and comes before the file");
                return Ok(ExitCode::SUCCESS);
            }
            State::Bad(why) if self.check => {
                return Err(format!("{of} {why}; the provider refuses it"));
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
        if variable != State::Missing {
            println!("{of} is set here, and comes before this file");
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Of the variable, and where it is set: in the environment, else in the file of the libfabric that the loader finds. An
/// empty one is refused too.
pub(crate) fn variable() -> (State, String) {
    if let Some(text) = std::env::var_os(VARIABLE) {
        return (of_text(&text.to_string_lossy()), VARIABLE.to_owned());
    }
    let said = probe(&[], None).unwrap_or_default();
    let state = match &said["job_key"] {
        Value::Null => State::Missing,
        key => key["refused"].as_str().map_or(State::Good, |why| State::Bad(why.to_owned())),
    };
    (state, format!("{VARIABLE} of libfabric.conf"))
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
    use crate::job_key::FILE_MAX;
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
}
