//! The MPIs in PATH: whether their libfabric takes the provider, and the exact line for each.

use super::{Finding, Verdict, provider};
use crate::{bounded, find};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// An MPI, known by what its launcher says of itself.
struct Kind {
    name: &'static str,
    /// Words of `mpiexec --version`.
    mark: &'static str,
    line: &'static str,
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "Open MPI",
        mark: "Open MPI",
        line: "udrv run mpirun -np 2 -x FI_PROVIDER -x FI_PROVIDER_PATH --mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include udrv ./app",
    },
    Kind {
        name: "Intel MPI",
        mark: "Intel(R) MPI",
        line: "I_MPI_FABRICS=ofi udrv run mpiexec -n 2 ./app",
    },
    Kind {
        name: "MPICH",
        mark: "HYDRA",
        line: "MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1 udrv run mpiexec -n 2 ./app",
    },
];

/// How long a launcher may take to say what it is.
const LIMIT: Duration = Duration::from_secs(10);

pub(super) fn check() -> Vec<Finding> {
    let launchers = [find::programs("mpiexec"), find::programs("mpirun")].concat();
    let mut seen = Vec::new();
    let mut findings = Vec::new();
    for launcher in launchers {
        let folder = launcher.parent().and_then(|folder| folder.canonicalize().ok());
        if seen.contains(&folder) {
            continue;
        }
        let Some(kind) = kind_of(&launcher) else { continue };
        seen.push(folder);
        findings.push(check_one(kind, &launcher));
    }
    if findings.is_empty() {
        findings.push(Finding::new("MPI", Verdict::Note, "no mpiexec or mpirun in PATH"));
    }
    findings
}

fn check_one(kind: &Kind, launcher: &Path) -> Finding {
    let says = format!("{} ({})", kind.name, launcher.display());
    let own = find::libfabric_of(launcher).zip(find::provider_folder());
    let own = own.map(|(file, folder)| provider::libfabric(&file.to_string_lossy(), &folder));
    let (verdict, says) = match own {
        Some(found) => (found.verdict, format!("{says}; its libfabric {}", found.says)),
        None => (Verdict::Good, format!("{says}; brings no libfabric of its own")),
    };
    Finding::new("MPI", verdict, says).remedy(kind.line)
}

fn kind_of(launcher: &Path) -> Option<&'static Kind> {
    let output = bounded::output(Command::new(launcher).arg("--version"), LIMIT).ok()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    // Open MPI's mpiexec may call itself by the name of its launcher.
    KINDS
        .iter()
        .find(|kind| said.contains(kind.mark))
        .or_else(|| said.contains("OpenRTE").then(|| KINDS.first()).flatten())
}
