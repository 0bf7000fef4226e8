//! Where the job key comes from.
//!
//! In this order: an `auth_key` of the application, FI_UDRV_JOB_KEY, what the launcher says about
//! the job, and a key that everybody knows. The first two are secrets if those who set them keep
//! them so. A launcher's name for a job is not secret as a rule, but no other job has it: it keeps
//! jobs apart that meet by mistake, and not somebody who wants in.
//!
//! All processes of a job have to come to the same key, on all its nodes, also those that
//! MPI_Comm_spawn adds later, started by other daemons and perhaps with another idea of the
//! environment. So only what launchers set themselves for every process counts, not what a process
//! may have inherited from a shell on one of the nodes; and of a name, only the part that belongs
//! to the launcher and not to one of its jobs.

#![forbid(unsafe_code)]

use super::reliable::tag::JobKey;
use crate::config::Config;
use crate::telemetry::log;
use std::fmt;

/// Longest `auth_key` and FI_UDRV_JOB_KEY, bytes.
pub(crate) const SECRET_MAX: usize = 256;
/// Shortest FI_UDRV_JOB_KEY, bytes.
const TEXT_MIN: usize = 8;

/// What a launcher calls the job, and how much of it is the same in all processes that may have to
/// talk to each other.
struct LauncherName {
    variable: &'static str,
    common: fn(&str) -> &str,
}

/// In the order in which they are believed: the launcher that started the process itself comes
/// before the batch system around it, whose variables not every remote shell hands on.
///
/// Looked at on two hosts and after MPI_Comm_spawn: Open MPI 4.1 and 5.0, Intel MPI 2021, MPICH 5
/// (whose mpiexec names the job in no variable; PMI_PORT is another one on every node).
const LAUNCHERS: &[LauncherName] = &[
    // Open MPI up to 4: 128 random bits, the same for the jobs that its jobs spawn.
    LauncherName { variable: "OMPI_MCA_orte_precondition_transports", common: whole },
    // Open MPI 5, PRRTE, Slurm with PMIx, Flux with PMIx: a name for each job.
    LauncherName { variable: "PMIX_NAMESPACE", common: pmix_launcher },
    // Intel MPI.
    LauncherName { variable: "I_MPI_HYDRA_UUID", common: whole },
    LauncherName { variable: "FLUX_JOB_ID", common: whole },
    // HPE Cray's launcher.
    LauncherName { variable: "PALS_APID", common: whole },
    // Batch systems. Steps of one Slurm job have one key: mpiexec starts the processes of other
    // nodes as a step, those of its own node perhaps not.
    LauncherName { variable: "SLURM_JOB_ID", common: whole },
    LauncherName { variable: "PBS_JOBID", common: whole },
    LauncherName { variable: "LSB_JOBID", common: whole },
];

fn whole(name: &str) -> &str {
    name
}

/// PRRTE numbers the jobs of one launcher ("prterun-HOST-PID@2"), Slurm the steps of one job
/// ("slurm.pmix.JOB.STEP"). Whatever else there is stands for itself.
fn pmix_launcher(namespace: &str) -> &str {
    if let Some((launcher, _)) = namespace.rsplit_once('@') {
        return launcher;
    }
    match namespace.rsplit_once('.') {
        Some((job, _)) if namespace.starts_with("slurm.pmix.") => job,
        _ => namespace,
    }
}

/// What a job key was made of; prints as the log says it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// `auth_key` of a `fi_info`
    AuthKey,
    /// FI_UDRV_JOB_KEY
    Variable,
    /// This variable, which the launcher set.
    Launcher(&'static str),
    /// Nothing: the key that everybody knows.
    Nothing,
}

/// Sorts of secrets, for [`JobKey::from_secret`].
const AUTH_KEY: u64 = 1;
const VARIABLE: u64 = 2;
const LAUNCHER: u64 = 3;
const NOTHING: u64 = 4;

impl Source {
    fn key(self, secret: &[u8]) -> (JobKey, Self) {
        let kind = match self {
            Self::AuthKey => AUTH_KEY,
            Self::Variable => VARIABLE,
            Self::Launcher(_) => LAUNCHER,
            Self::Nothing => NOTHING,
        };
        (JobKey::from_secret(kind, secret), self)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AuthKey => f.write_str("job key: the application's auth_key"),
            Self::Variable => f.write_str("job key: FI_UDRV_JOB_KEY"),
            Self::Launcher(variable) => write!(
                f,
                "job key: made of {variable}; it keeps jobs apart, and nobody out who knows that name. FI_UDRV_JOB_KEY sets a secret one"
            ),
            Self::Nothing => f.write_str(
                "no job key: whoever can send packets to this node can talk to its endpoints. FI_UDRV_JOB_KEY sets one, the same in all processes of a job",
            ),
        }
    }
}

/// A FI_UDRV_JOB_KEY that is none. It is refused and not passed over, because whoever set it wants
/// to be alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BadJobKey {
    /// It has this many bytes.
    Length(usize),
    NotUtf8,
}

impl fmt::Display for BadJobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "{bytes} bytes"),
            Self::NotUtf8 => f.write_str("bytes that are not UTF-8"),
        }
    }
}

/// What is offered instead of a [`BadJobKey`].
pub(crate) const WANTED: &str = "text of 8 to 256 bytes";

/// The key of an application's `auth_key`, 1 to [`SECRET_MAX`] bytes.
pub(crate) fn of_auth_key(auth_key: &[u8]) -> JobKey {
    Source::AuthKey.key(auth_key).0
}

/// The key of endpoints for which the application gave none, and what it was made of.
pub(crate) fn of_environment(config: &Config) -> Result<(JobKey, Source), BadJobKey> {
    from_lookup(config, |name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
        .inspect_err(|bad| {
            log::warn(format_args!("FI_UDRV_JOB_KEY has {bad}; it must be {WANTED}"));
        })
}

fn from_lookup(
    config: &Config,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<(JobKey, Source), BadJobKey> {
    if let Some(secret) = &config.job_key {
        return Ok(Source::Variable.key(checked(&secret.0)?.as_bytes()));
    }
    for launcher in LAUNCHERS {
        let Some(name) = lookup(launcher.variable).filter(|name| !name.trim().is_empty()) else {
            continue;
        };
        // With the variable's name: "1" of Slurm is not "1" of LSF.
        let secret = format!("{}={}", launcher.variable, (launcher.common)(name.trim()));
        return Ok(Source::Launcher(launcher.variable).key(secret.as_bytes()));
    }
    Ok(Source::Nothing.key(&[]))
}

fn checked(text: &str) -> Result<&str, BadJobKey> {
    let text = text.trim();
    if text.contains(char::REPLACEMENT_CHARACTER) {
        return Err(BadJobKey::NotUtf8);
    }
    if !(TEXT_MIN..=SECRET_MAX).contains(&text.len()) {
        return Err(BadJobKey::Length(text.len()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Secret;

    fn from(job_key: Option<&str>, environment: &[(&str, &str)]) -> (JobKey, Source) {
        let config =
            Config { job_key: job_key.map(|text| Secret(text.to_owned())), ..Config::default() };
        let lookup = |name: &str| {
            environment.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
        };
        from_lookup(&config, lookup).unwrap()
    }

    fn bad(job_key: &str) -> BadJobKey {
        let config = Config { job_key: Some(Secret(job_key.to_owned())), ..Config::default() };
        from_lookup(&config, |_| None).unwrap_err()
    }

    const SLURM: (&str, &str) = ("SLURM_JOB_ID", "77");

    #[test]
    fn processes_without_anything_find_each_other() {
        assert_eq!(from(None, &[]), from(None, &[("PMI_FD", "9"), ("SLURM_JOB_ID", " ")]));
        assert_eq!(from(None, &[]).1, Source::Nothing);
    }

    #[test]
    fn a_set_key_comes_before_the_launcher() {
        let set = from(Some("between us"), &[SLURM]);
        assert_eq!(set, from(Some(" between us\n"), &[]));
        assert_eq!(set.1, Source::Variable);
        assert_ne!(set.0, from(Some("between Us"), &[]).0);
        assert_ne!(set.0, of_auth_key(b"between us"));
        assert_ne!(of_auth_key(b"a"), of_auth_key(b"a\0"));
    }

    #[test]
    fn a_bad_key_is_refused_and_not_printed() {
        assert_eq!(bad("").to_string(), "0 bytes");
        assert_eq!(bad("secret!"), BadJobKey::Length(7));
        assert_eq!(bad(&"x".repeat(257)), BadJobKey::Length(257));
        assert_eq!(bad("secret \u{fffd} secret"), BadJobKey::NotUtf8);
        assert!(WANTED.contains(&TEXT_MIN.to_string()) && WANTED.contains(&SECRET_MAX.to_string()));
    }

    #[test]
    fn the_launcher_comes_before_the_batch_system() {
        let mpi = ("PMIX_NAMESPACE", "prterun-a-10@1");
        assert_eq!(from(None, &[SLURM, mpi]).1, Source::Launcher("PMIX_NAMESPACE"));
        assert_eq!(from(None, &[mpi]), from(None, &[mpi, SLURM]));
        assert_ne!(from(None, &[SLURM]).0, from(None, &[("LSB_JOBID", "77")]).0);
        assert_ne!(from(None, &[SLURM]).0, from(None, &[("SLURM_JOB_ID", "78")]).0);
    }

    /// What the launchers of this list gave to two ranks on two hosts, then to two that those
    /// spawned, then to a rank of another job at the same time.
    #[test]
    fn spawned_ranks_have_the_key_of_their_parents_and_other_jobs_another() {
        for (variable, parent, child, other) in [
            ("PMIX_NAMESPACE", "prterun-vm-8477@1", "prterun-vm-8477@2", "prterun-vm-8479@1"),
            ("PMIX_NAMESPACE", "slurm.pmix.12.0", "slurm.pmix.12.1", "slurm.pmix.13.0"),
            ("PMIX_NAMESPACE", "a.1", "a.1", "a.2"),
            (
                "OMPI_MCA_orte_precondition_transports",
                "9f7980a4d488caa9-bab72a753a4c3c16",
                "9f7980a4d488caa9-bab72a753a4c3c16",
                "8ab704f75d8b8038-fa432fa7e83bb047",
            ),
            (
                "I_MPI_HYDRA_UUID",
                "5a210000-63e6-df66-c660-060069948837",
                "5a210000-63e6-df66-c660-060069948837",
                "a2200000-8ead-0964-c660-060008a1c56a",
            ),
        ] {
            let of = |value| from(None, &[(variable, value)]);
            assert_eq!(of(parent), of(child), "{variable}");
            assert_ne!(of(parent).0, of(other).0, "{variable}");
            assert_eq!(of(parent).1, Source::Launcher(variable));
        }
    }

    #[test]
    fn open_mpi_4_has_a_namespace_too_which_its_children_do_not_share() {
        let transports = ("OMPI_MCA_orte_precondition_transports", "1-2");
        let parent = [("PMIX_NAMESPACE", "1304231937"), transports];
        let child = [("PMIX_NAMESPACE", "1304231938"), transports];
        assert_eq!(from(None, &parent), from(None, &child));
    }
}
