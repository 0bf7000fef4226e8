//! Files that belong to this process's user and that no other user may read.

use super::errno::Errno;
use super::process;
use std::fmt;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Permission bits of all users but the owner.
const OTHERS: u32 = 0o077;

/// Why an existing file is not used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unfit {
    /// It is a directory, a pipe or the like.
    NoFile,
    /// It belongs to another user, with this id.
    Owner(u32),
    /// Other users have permissions; its mode.
    Mode(u32),
    /// It is longer than the caller accepts; its length in bytes.
    Long(u64),
    /// The system's error.
    Unreadable(Errno),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFile => f.write_str("is not a regular file"),
            Self::Owner(uid) => {
                write!(f, "belongs to user {uid}, not to {}", process::effective_uid())
            }
            Self::Mode(mode) => write!(f, "has mode {mode:04o}: other users have permissions"),
            Self::Long(bytes) => write!(f, "has {bytes} bytes"),
            Self::Unreadable(errno) => write!(f, "cannot be read: {errno}"),
        }
    }
}

/// The bytes of the file at `path`, at most `max`. A symbolic link is followed: the checks apply to the opened file.
/// `None`: there is no such file, or it is in a directory that this user may not search.
pub(crate) fn read(path: &Path, max: usize) -> Result<Option<Vec<u8>>, Unfit> {
    // A pipe without a writer must not block; std adds O_CLOEXEC.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = match std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) => return if is_there(path) { Err(unreadable(&error)) } else { Ok(None) },
    };
    let facts = file.metadata().map_err(|error| unreadable(&error))?;
    if !facts.is_file() {
        return Err(Unfit::NoFile);
    }
    if facts.uid() != process::effective_uid() {
        return Err(Unfit::Owner(facts.uid()));
    }
    if facts.mode() & OTHERS != 0 {
        return Err(Unfit::Mode(facts.mode() & 0o7777));
    }
    let mut bytes = Vec::new();
    // Reading one byte more detects a file that is too long, whatever its length was a moment ago.
    file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(|error| unreadable(&error))?;
    if bytes.len() > max {
        return Err(Unfit::Long(facts.len().max(bytes.len() as u64)));
    }
    Ok(Some(bytes))
}

/// The name exists, as far as this user may know, even as a dangling link.
fn is_there(path: &Path) -> bool {
    !path.symlink_metadata().is_err_and(|error| {
        matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::EACCES))
    })
}

fn unreadable(error: &std::io::Error) -> Unfit {
    Unfit::Unreadable(Errno(error.raw_os_error().unwrap_or(libc::EIO)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    /// A directory of its own, removed at the end.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("udrv-{name}-{}", process::pid()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_of_ones_own_is_read() {
        let place = Place::new("own");
        for mode in [0o600, 0o400] {
            let path = place.file("key", b"secret", mode);
            assert_eq!(read(&path, 6), Ok(Some(b"secret".to_vec())));
            let link = place.0.join(format!("link{mode:o}"));
            std::os::unix::fs::symlink(&path, &link).unwrap();
            assert_eq!(read(&link, 6), Ok(Some(b"secret".to_vec())), "through a link");
            fs::remove_file(path).unwrap();
        }
        assert_eq!(read(&place.0.join("none"), 6), Ok(None));
        assert_eq!(read(&place.0.join("none/key"), 6), Ok(None));
    }

    #[test]
    fn a_file_that_others_may_read_or_have_made_is_not_private() {
        let place = Place::new("others");
        for mode in [0o640, 0o604, 0o660, 0o620, 0o610] {
            let path = place.file("key", b"secret", mode);
            assert_eq!(read(&path, 6), Err(Unfit::Mode(mode)));
            fs::remove_file(path).unwrap();
        }
        assert_eq!(read(&place.0, 6), Err(Unfit::NoFile));
        let long = place.file("long", b"secrets", 0o600);
        assert_eq!(read(&long, 6), Err(Unfit::Long(7)));
        let gone = place.0.join("gone");
        std::os::unix::fs::symlink(place.0.join("nowhere"), &gone).unwrap();
        assert_eq!(read(&gone, 6), Err(Unfit::Unreadable(Errno(libc::ENOENT))));
        if process::effective_uid() == 0 {
            let theirs = place.file("theirs", b"secret", 0o600);
            std::os::unix::fs::chown(&theirs, Some(1), None).unwrap();
            assert_eq!(read(&theirs, 6), Err(Unfit::Owner(1)));
        }
    }
}
