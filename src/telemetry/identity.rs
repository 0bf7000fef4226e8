//! Which udrv this is.

/// The first digits of the commit that the provider was built from; empty where build.rs could not know it.
pub(crate) const COMMIT: &str = env!("UDRV_COMMIT");

/// The version of the provider.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Version and commit, as a report of a mistake names them.
pub(crate) fn name() -> String {
    let commit = if COMMIT.is_empty() { "unknown" } else { COMMIT };
    format!("{VERSION}, commit {commit}")
}
