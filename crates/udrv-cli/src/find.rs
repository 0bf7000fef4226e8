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

/// The folders that exist of a value of FI_PROVIDER_PATH, as absolute paths; that of the provider where an entry is `+`
/// and its full path (fi_provider(7)).
pub(crate) fn folders_of(path: &str) -> Vec<PathBuf> {
    let folder = |entry| match preferred(entry) {
        Some(file) if file.ends_with(PROVIDER) && file.is_file() => file.parent(),
        Some(_) => None,
        None => Some(Path::new(entry)),
    };
    entries(path).filter_map(|entry| folder(entry)?.canonicalize().ok()).collect()
}

/// Whether libfabric looks into its own folder although FI_PROVIDER_PATH has this value, and it is not said to have the
/// provider elsewhere: it then has nothing but other providers that are preferred.
pub(crate) fn leaves_the_usual_folder(path: &str) -> bool {
    entries(path).all(|entry| preferred(entry).is_some_and(|file| !file.ends_with(PROVIDER)))
}

/// Whether the provider is one of those that FI_PROVIDER_PATH prefers by their full paths.
pub(crate) fn prefers(path: &str) -> bool {
    entries(path).filter_map(preferred).any(|file| file.ends_with(PROVIDER))
}

fn entries(path: &str) -> impl Iterator<Item = &str> {
    path.strip_prefix('@').unwrap_or(path).split(':').filter(|entry| !entry.is_empty())
}

fn preferred(entry: &str) -> Option<&Path> {
    entry.strip_prefix('+').map(Path::new)
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

    #[test]
    fn a_preferred_provider_is_in_its_folder() {
        let folder = env::temp_dir().join(format!("udrv-cli-find-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let folder = folder.canonicalize().unwrap();
        std::fs::write(folder.join(PROVIDER), "").unwrap();
        std::fs::write(folder.join("libtcp-fi.so"), "").unwrap();
        let of = |path: &str| folders_of(&path.replace('F', folder.to_str().unwrap()));
        assert_eq!(of("+F/libudrv-fi.so"), std::slice::from_ref(&folder));
        assert_eq!(of("@+F/libudrv-fi.so:/"), [folder.clone(), PathBuf::from("/")]);
        assert_eq!(of("+F/libtcp-fi.so:+F:+F/none/libudrv-fi.so"), [""; 0].map(PathBuf::from));
        std::fs::remove_dir_all(&folder).unwrap();
        for (path, leaves) in
            [("@", true), ("+/a/libtcp-fi.so", true), ("+/a/libudrv-fi.so", false), ("/a", false)]
        {
            assert_eq!(leaves_the_usual_folder(path), leaves, "{path}");
            assert_eq!(prefers(path), path == "+/a/libudrv-fi.so", "{path}");
        }
    }
}
