//! Where the provider, libfabrics and MPIs of this machine are.

use crate::probe::probe;
use std::collections::BTreeSet;
use std::env;
use std::path::{Path, PathBuf};

/// File name of the provider.
pub(crate) const PROVIDER: &str = "libudrv-fi.so";
/// Name of libfabric for the loader.
pub(crate) const LIBFABRIC: &str = "libfabric.so.1";

/// The folder with the provider: one of FI_PROVIDER_PATH, or one that belongs to the installation of this command, or
/// the one from which the loader's libfabric takes providers unasked.
pub(crate) fn provider_folder() -> Option<PathBuf> {
    let named = env::var("FI_PROVIDER_PATH").unwrap_or_default();
    let holds = |folder: &PathBuf| folder.join(PROVIDER).is_file();
    let mut folders = folders_of(&named).into_iter().chain(installed_folders());
    folders.find(holds).or_else(|| libfabrics_folder().filter(holds))
}

/// The folders that exist of a value of FI_PROVIDER_PATH, as absolute paths.
pub(crate) fn folders_of(path: &str) -> Vec<PathBuf> {
    let entries = path.trim_start_matches('@').split(':').filter(|entry| !entry.is_empty());
    entries.filter_map(|entry| Path::new(entry).canonicalize().ok()).collect()
}

/// The folder from which the loader's libfabric takes providers if FI_PROVIDER_PATH is not set: what it says itself.
fn libfabrics_folder() -> Option<PathBuf> {
    let said = probe(&["--libfabric", LIBFABRIC], None).ok()?;
    said.get("provider_folder")?.as_str().map(PathBuf::from)
}

/// Folders in which an installation, a package or a build keeps the provider, seen from this command.
fn installed_folders() -> Vec<PathBuf> {
    let Some(bin) = env::current_exe().ok().and_then(|exe| Some(exe.parent()?.to_owned())) else {
        return Vec::new();
    };
    let up = bin.join("..");
    let mut folders =
        vec![up.join("lib/libfabric"), up.join("lib64/libfabric"), up.join("provider")];
    folders.extend(subfolders(&up.join("lib")).into_iter().map(|folder| folder.join("libfabric")));
    folders.into_iter().filter_map(|folder| folder.canonicalize().ok()).collect()
}

fn subfolders(of: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(of).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// The programs called `name` in PATH, each once.
pub(crate) fn programs(name: &str) -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut seen = BTreeSet::new();
    env::split_paths(&path)
        .map(|folder| folder.join(name))
        .filter(|program| program.is_file())
        .filter(|program| program.canonicalize().is_ok_and(|real| seen.insert(real)))
        .collect()
}

/// The libfabric beside an MPI whose launcher is `launcher`, if the MPI brings one of its own.
pub(crate) fn libfabric_of(launcher: &Path) -> Option<PathBuf> {
    let launcher = launcher.canonicalize().ok()?;
    let lib = launcher.parent()?.parent()?.join("lib");
    let mut folders = vec![lib.clone(), lib.join("libfabric"), lib.join("../libfabric/lib")];
    folders.extend(subfolders(&lib));
    let found =
        folders.into_iter().map(|folder| folder.join(LIBFABRIC)).find(|file| file.is_file());
    found.and_then(|file| file.canonicalize().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_folder_is_not_the_current_one() {
        assert_eq!(folders_of(""), Vec::<PathBuf>::new());
        assert_eq!(folders_of("@"), Vec::<PathBuf>::new());
        let here = env::current_dir().unwrap().canonicalize().unwrap();
        assert_eq!(folders_of("@:/nowhere:.::/proc/../"), [here, PathBuf::from("/")]);
    }
}
