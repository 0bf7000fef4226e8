//! The source of the job key.
//!
//! In this order: an `auth_key` of the application, FI_UDRV_JOB_KEY, a file of the user's own, and a public default
//! key. The first three are secrets: endpoints with another key are refused, on one node as well as between nodes.
//!
//! Nothing is derived from the launcher's name for the job. Every user of the node knows such names (`ps` shows them),
//! so they would keep no one out; and separately started processes of one user, such as MPI singletons, have different
//! names and would keep each other out.

use super::JobKey;
use crate::config::variable::Secret;
use crate::sys::made_once::MadeOnce;
use crate::sys::private_file::{self, Unfit};
use crate::sys::process;
use crate::telemetry::log;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// Longest `auth_key` and FI_UDRV_JOB_KEY, bytes.
pub(crate) const SECRET_MAX: usize = 256;
/// Shortest FI_UDRV_JOB_KEY, and shortest key in a file, bytes: 128 bits if they are random.
const SECRET_MIN: usize = 16;
/// Longest key file, bytes.
const FILE_MAX: usize = 4096;
/// The key file in the user's directory of configurations (XDG Base Directory Specification).
const FILE: &str = "udrv/key";

/// The source of a job key; prints as in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// `auth_key` of a `fi_info`
    AuthKey,
    /// FI_UDRV_JOB_KEY
    Variable,
    /// The file with this name
    File(&'static str),
    /// No secret was given: the public default key.
    Nothing,
}

/// Kinds of secrets for [`JobKey::from_secret`]. The text of a key file makes the same key in FI_UDRV_JOB_KEY.
const AUTH_KEY: u64 = 1;
const SECRET: u64 = 2;
const NOTHING: u64 = 4;

impl Source {
    fn key(self, secret: &[u8]) -> (JobKey, Self) {
        let kind = match self {
            Self::AuthKey => AUTH_KEY,
            Self::Variable | Self::File(_) => SECRET,
            Self::Nothing => NOTHING,
        };
        (JobKey::from_secret(kind, secret), self)
    }

    /// The key is a secret that was given: it is enforced, on this node too.
    pub(crate) fn is_given(self) -> bool {
        self != Self::Nothing
    }

    /// Logs the source of the key when an endpoint opens.
    pub(crate) fn explain(self) {
        match self {
            Self::Nothing => log::info(format_args!(
                "no job key: this node keeps other users out, but a host that can send packets to it can talk to its endpoints. FI_UDRV_JOB_KEY or ~/.config/{FILE} gives a key (fi_udrv(7))"
            )),
            given => log::info(format_args!("job key: {given}")),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AuthKey => f.write_str("the application's auth_key"),
            Self::Variable => f.write_str("FI_UDRV_JOB_KEY"),
            Self::File(name) => f.write_str(name),
            Self::Nothing => f.write_str("none"),
        }
    }
}

/// An invalid FI_UDRV_JOB_KEY or key file. It is an error rather than ignored, because the user who made it wants to
/// keep others out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct BadJobKey {
    /// Where it came from.
    pub(crate) source: Source,
    pub(crate) fault: Fault,
}

/// Why a key is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// It has this many bytes.
    Length(usize),
    NotUtf8,
    Unfit(Unfit),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "has {bytes} bytes"),
            Self::NotUtf8 => f.write_str("has bytes that are not UTF-8"),
            Self::Unfit(unfit) => unfit.fmt(f),
        }
    }
}

impl BadJobKey {
    /// Describes a valid key of this source.
    pub(crate) fn wanted(&self) -> &'static str {
        match self.source {
            Source::File(_) => "a regular file of the user's own, mode 0600, with 16 to 4096 bytes",
            _ => "text of 16 to 256 bytes",
        }
    }
}

/// The key of an application's `auth_key`, 1 to [`SECRET_MAX`] bytes.
pub(crate) fn of_auth_key(auth_key: &[u8]) -> JobKey {
    Source::AuthKey.key(auth_key).0
}

/// The key of endpoints for which the application gave none, and its source. The file is read once per process.
pub(crate) fn of_environment(variable: Option<&Secret>) -> Result<(JobKey, Source), BadJobKey> {
    static FILE_KEY: MadeOnce<Result<Option<(JobKey, Source)>, BadJobKey>> = MadeOnce::new();
    let found = match variable {
        Some(secret) => of_variable(&secret.0).map(Some),
        None => FILE_KEY.get_or_make(|| own_file().map_or(Ok(None), |path| of_file(&path))).clone(),
    };
    match found {
        Ok(key) => Ok(key.unwrap_or_else(|| Source::Nothing.key(&[]))),
        Err(bad) => {
            let BadJobKey { source, fault } = &bad;
            log::error(format_args!("job key: {source} {fault}; it must be {}", bad.wanted()));
            Err(bad)
        }
    }
}

/// The path of this user's key file. It comes from the environment, which is ignored in a privileged process.
fn own_file() -> Option<PathBuf> {
    let path = path_of(|name| std::env::var_os(name));
    if process::is_privileged() {
        log::info(format_args!(
            "no key file is read: this program is setuid, setgid or has capabilities"
        ));
        return None;
    }
    if path.is_none() {
        log::info(format_args!(
            "no key file is read: neither HOME nor XDG_CONFIG_HOME names a directory"
        ));
    }
    path
}

fn path_of(lookup: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let named = |name: &str| lookup(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let directory = named("XDG_CONFIG_HOME").or_else(|| Some(named("HOME")?.join(".config")))?;
    Some(directory.join(FILE))
}

/// The key in the file at `path`, if there is one.
fn of_file(path: &Path) -> Result<Option<(JobKey, Source)>, BadJobKey> {
    // Leaks once per process.
    let source = || Source::File(Box::leak(path.to_string_lossy().into_owned().into_boxed_str()));
    let bad = |fault| BadJobKey { source: source(), fault };
    let bytes = private_file::read(path, FILE_MAX).map_err(|unfit| bad(Fault::Unfit(unfit)))?;
    let Some(bytes) = bytes else { return Ok(None) };
    // An editor, or `echo`, ends the text with a line break.
    let secret = bytes.trim_ascii();
    if secret.len() < SECRET_MIN {
        return Err(bad(Fault::Length(secret.len())));
    }
    Ok(Some(source().key(secret)))
}

fn of_variable(text: &str) -> Result<(JobKey, Source), BadJobKey> {
    let bad = |fault| Err(BadJobKey { source: Source::Variable, fault });
    if text.contains(char::REPLACEMENT_CHARACTER) {
        return bad(Fault::NotUtf8);
    }
    let secret = text.as_bytes().trim_ascii();
    if !(SECRET_MIN..=SECRET_MAX).contains(&secret.len()) {
        return bad(Fault::Length(secret.len()));
    }
    Ok(Source::Variable.key(secret))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn bad(text: &str) -> Fault {
        of_variable(text).unwrap_err().fault
    }

    #[test]
    fn a_given_key_is_another_one_than_everybodys() {
        let set = of_variable("between the two of us").unwrap();
        assert_eq!(set, of_variable(" between the two of us\n").unwrap());
        assert!(set.1.is_given() && !Source::Nothing.is_given());
        assert_ne!(set.0, of_variable("between the two of Us").unwrap().0);
        assert_ne!(set.0, of_auth_key(b"between the two of us"));
        assert_ne!(set.0, Source::Nothing.key(&[]).0);
        assert_ne!(of_auth_key(b"a"), of_auth_key(b"a\0"));
        let text = Secret("between the two of us".to_owned());
        assert_eq!(of_environment(Some(&text)), Ok(set), "and comes before a file");
    }

    #[test]
    fn a_bad_key_is_refused_and_not_printed() {
        assert_eq!(bad("").to_string(), "has 0 bytes");
        assert_eq!(bad("fifteen letters"), Fault::Length(15));
        assert_eq!(bad(&"x".repeat(257)), Fault::Length(257));
        assert_eq!(bad("a secret \u{fffd} of ours"), Fault::NotUtf8);
        let wanted = of_variable("").unwrap_err().wanted();
        assert!(
            wanted.contains(&SECRET_MIN.to_string()) && wanted.contains(&SECRET_MAX.to_string())
        );
    }

    #[test]
    fn the_file_is_where_the_user_keeps_configurations() {
        let with = |pairs: &[(&str, &str)]| {
            let find = |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into());
            path_of(find).map(|path| path.to_str().unwrap().to_owned())
        };
        let home = ("HOME", "/home/me");
        assert_eq!(with(&[home]).as_deref(), Some("/home/me/.config/udrv/key"));
        let xdg = [home, ("XDG_CONFIG_HOME", "/cfg")];
        assert_eq!(with(&xdg).as_deref(), Some("/cfg/udrv/key"));
        let relative = [home, ("XDG_CONFIG_HOME", "cfg")];
        assert_eq!(with(&relative).as_deref(), Some("/home/me/.config/udrv/key"));
        assert_eq!(with(&[("HOME", "")]), None);
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn a_file_gives_a_key_or_a_reason() {
        let place = std::env::temp_dir().join(format!("udrv-job-key-{}", process::pid()));
        fs::create_dir_all(&place).unwrap();
        let path = place.join("key");
        let with = |bytes: &[u8], mode| {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            of_file(&path)
        };
        let (key, source) = with(b"a secret of this user\n", 0o600).unwrap().unwrap();
        assert_eq!(key, of_variable("a secret of this user").unwrap().0, "the same text");
        assert!(source.is_given() && source.to_string().ends_with("/key"));
        assert!(with(&[0xff; 32], 0o400).is_ok(), "it need not be text");
        assert_eq!(with(b"fifteen letters\n", 0o600).unwrap_err().fault, Fault::Length(15));
        let open = with(b"a secret of this user\n", 0o644).unwrap_err();
        assert!(open.fault.to_string().contains("has mode 0644"), "{open:?}");
        let long = with(&vec![b'x'; FILE_MAX + 1], 0o600).unwrap_err();
        assert!(matches!(long.fault, Fault::Unfit(Unfit::Long(_))));
        fs::remove_dir_all(&place).unwrap();
        assert_eq!(of_file(&path), Ok(None));
    }
}
