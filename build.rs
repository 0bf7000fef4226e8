//! Link options of the provider's shared object, and the commit that it is built from.
//!
//! `-z nodelete`: the library stays mapped after `dlclose`, because thread-exit destructors of the
//! Rust runtime may still point into it. `fi_prov_ini` re-initialises everything on each load.
//!
//! `UDRV_BUILD_ID`, hexadecimal: the build ID, by which debuggers find debug information. `scripts/package` gives one that
//! depends on the sources, and not on folders of the machine.
//!
//! UDRV_COMMIT is the commit as the code sees it (`telemetry::identity`); empty: unknown. A variable of that name has
//! precedence, for builds from an archive. Git is asked for release builds only: a commit would make development
//! builds compile the crate again.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libudrv-fi.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    println!("cargo:rerun-if-env-changed=UDRV_BUILD_ID");
    if let Ok(id) = std::env::var("UDRV_BUILD_ID") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--build-id=0x{id}");
    }
    println!("cargo:rerun-if-env-changed=UDRV_COMMIT");
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let given = std::env::var("UDRV_COMMIT").ok();
    let commit = given.or_else(|| is_release.then(commit).flatten()).unwrap_or_default();
    println!("cargo:rustc-env=UDRV_COMMIT={}", commit.get(..12).unwrap_or(&commit));
}

/// The commit that is checked out. `None`: this is no repository, or there is no git.
fn commit() -> Option<String> {
    // The sources may lie in another project's repository.
    if !git(&["rev-parse", "--show-prefix"])?.is_empty() {
        return None;
    }
    let commit = git(&["rev-parse", "HEAD"])?;
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"])?;
    let branch = path_of(&branch).or_else(|| path_of("packed-refs"));
    let watched = [path_of("HEAD"), branch, path_of("logs/HEAD")];
    // A file that is not there would count as changed in each build.
    for path in watched.into_iter().flatten() {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    Some(commit)
}

/// Where git keeps something, if that is a file.
fn path_of(name: &str) -> Option<PathBuf> {
    let path = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR")?).join(git(&[
        "rev-parse",
        "--git-path",
        name,
    ])?);
    path.is_file().then_some(path)
}

fn git(arguments: &[&str]) -> Option<String> {
    // A user who builds from a repository of another user gets the same file.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*"])
        .args(arguments)
        .current_dir(std::env::var_os("CARGO_MANIFEST_DIR")?)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
