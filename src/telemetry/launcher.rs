//! What the launcher of a job has written into the environment of its processes: the rank of each, and the job's name.

use crate::sys::output;
use std::fmt;
use std::sync::OnceLock;

/// Variables that hold a process's rank. A launcher inside of a job inherits those of the outer one: Slurm's, which is
/// the outermost, is the last.
const RANKS: [&str; 7] = [
    "OMPI_COMM_WORLD_RANK", // Open MPI
    "PMIX_RANK",            // PRRTE, and Slurm with PMIx
    "PMI_RANK",             // Hydra: MPICH, Intel MPI; Cray
    "MV2_COMM_WORLD_RANK",  // MVAPICH
    "PALS_RANKID",          // HPE PALS
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
];

/// A process of a job; outside of one both are `None`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Launcher {
    pub(crate) rank: Option<u32>,
    /// The same in all processes that the launcher has started on this node, where it names the job (PMIx, Slurm), or
    /// where they are children of one daemon: not of a wrapper script each, that does not exec.
    pub(crate) job: Option<String>,
}

impl Launcher {
    /// This process's, as the environment was when this was first called.
    pub(crate) fn here() -> &'static Self {
        static HERE: OnceLock<Launcher> = OnceLock::new();
        HERE.get_or_init(|| Self::read(|name| std::env::var(name).ok(), output::parent()))
    }

    /// `parent`: the process that started this one, which mostly is the launcher's daemon of this node, and its pid
    /// namespace.
    fn read(lookup: impl Fn(&str) -> Option<String>, parent: (i32, u64)) -> Self {
        let rank = RANKS.iter().find_map(|name| lookup(name)?.trim().parse().ok());
        let job = rank.map(|_| {
            let named = |name| lookup(name).filter(|text| !text.is_empty());
            let slurm = || {
                let step = named("SLURM_STEP_ID")?;
                named("SLURM_JOB_ID").map(|job| format!("slurm {job}.{step}"))
            };
            let process = || format!("process {} of {}", parent.0, parent.1);
            named("PMIX_NAMESPACE").or_else(slurm).unwrap_or_else(process)
        });
        Self { rank, job }
    }
}

/// ` rank 3`, or nothing.
impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rank.map_or(Ok(()), |rank| write!(f, " rank {rank}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Launcher {
        let find =
            |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Launcher::read(find, (77, 5))
    }

    #[test]
    fn ranks_and_jobs_of_the_launchers() {
        assert_eq!(of(&[]), Launcher::default());
        assert_eq!(of(&[("PMIX_NAMESPACE", "x")]).job, None, "no rank: no job");
        let hydra = of(&[("PMI_RANK", "3"), ("SLURM_PROCID", "0")]);
        assert_eq!((hydra.rank, hydra.job.as_deref()), (Some(3), Some("process 77 of 5")));
        let open = of(&[("OMPI_COMM_WORLD_RANK", "12"), ("PMIX_NAMESPACE", "job@1")]);
        assert_eq!((open.to_string().as_str(), open.job.as_deref()), (" rank 12", Some("job@1")));
        let step = [("SLURM_PROCID", "1"), ("SLURM_JOB_ID", "12"), ("SLURM_STEP_ID", "0")];
        assert_eq!(of(&step).job.as_deref(), Some("slurm 12.0"));
        assert_eq!(of(&step[..2]).job.as_deref(), Some("process 77 of 5"), "no step");
        assert_eq!(of(&[("PMI_RANK", "none"), ("SLURM_PROCID", "5")]).rank, Some(5));
    }
}
