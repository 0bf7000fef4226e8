//! `udrv run`: a program with the variables that make libfabric take udrv.

use crate::{Outcome, find};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

#[derive(clap::Args)]
pub(crate) struct Run {
    /// Also set the variables that make MPIs use libfabric between the processes of a node, instead of their own transport
    #[arg(long)]
    mpi: bool,
    /// Print the variables as lines for a shell, and run nothing
    #[arg(long)]
    print: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required_unless_present = "print", allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Variables by which MPIs and SHMEM take libfabric, and udrv, within a node too.
const OF_MPIS: [(&str, &str); 7] = [
    ("MPIR_CVAR_CH4_NETMOD", "ofi"),
    ("MPIR_CVAR_NOLOCAL", "1"),
    ("I_MPI_FABRICS", "ofi"),
    ("OMPI_MCA_pml", "cm"),
    ("OMPI_MCA_mtl", "ofi"),
    ("OMPI_MCA_mtl_ofi_provider_include", "udrv"),
    ("SHMEM_OFI_PROVIDER", "udrv"),
];

/// The two variables that make a libfabric load and take the provider in `folder`.
pub(crate) fn variables(folder: PathBuf) -> [(&'static str, OsString); 2] {
    [("FI_PROVIDER_PATH", folder.into()), ("FI_PROVIDER", "udrv".into())]
}

impl Run {
    pub(crate) fn run(self) -> Outcome {
        let folder = find::provider_folder().ok_or_else(|| {
            format!("no {} beside this command, and none in FI_PROVIDER_PATH", find::PROVIDER)
        })?;
        let mut variables = variables(folder).to_vec();
        if self.mpi {
            variables.extend(OF_MPIS.map(|(name, value)| (name, value.into())));
        }
        if self.print {
            for (name, value) in variables {
                println!("export {name}={}", quoted(&value.to_string_lossy()));
            }
            return Ok(std::process::ExitCode::SUCCESS);
        }
        let [program, arguments @ ..] = self.command.as_slice() else {
            return Err("no program".to_owned());
        };
        let error = Command::new(program).args(arguments).envs(variables).exec();
        Err(format!("{}: {error}", program.to_string_lossy()))
    }
}

/// One word of a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@,=".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_stays_one_word() {
        assert_eq!(quoted("/opt/udrv/lib"), "/opt/udrv/lib");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
