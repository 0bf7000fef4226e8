//! The job keys of domains, endpoints and regions: from the application (auth_key), or from the environment.

use super::fabric::Fabric;
use crate::config::Config;
use crate::telemetry::log;
use crate::transport::JobKey;
use crate::transport::job_key;
use libfabric_sys::{FI_AV_AUTH_KEY, FI_EINVAL, fi_version};

/// The source of the job key of endpoints that are opened without one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DomainKey {
    /// The key that the application gave with the domain.
    Given(JobKey),
    /// The application gave none: the key of the environment, and where that was found.
    Environment(JobKey, job_key::Source),
    /// The key of each endpoint's address vector (FI_AV_AUTH_KEY).
    InVectors,
}

/// The key of a domain. Errors: EINVAL, also for an invalid FI_UDRV_JOB_KEY or key file.
///
/// # Safety
/// As [`auth_key`].
pub(super) unsafe fn of_domain(
    fabric: &Fabric,
    at: *const u8,
    len: usize,
    config: &Config,
) -> Result<DomainKey, i32> {
    if len == FI_AV_AUTH_KEY && at.is_null() && fabric.api_version() >= fi_version(1, 20) {
        return Ok(DomainKey::InVectors);
    }
    // SAFETY: the caller vouches.
    match unsafe { auth_key(fabric, at, len) }? {
        Some(key) => Ok(DomainKey::Given(key)),
        None => {
            let (key, source) =
                job_key::of_environment(config.endpoint.job_key.as_ref()).map_err(|_| FI_EINVAL)?;
            source.explain();
            Ok(DomainKey::Environment(key, source))
        }
    }
}

/// The job key that an application gives with a domain, an endpoint or a region, if any. These
/// members are ignored before API version 1.5 (fi_domain(3), fi_endpoint(3), fi_mr(3)).
/// Errors: EINVAL for a key that `fi_getinfo` would not have offered.
///
/// # Safety
/// `at` is null or points to `len` bytes.
pub(super) unsafe fn auth_key(
    fabric: &Fabric,
    at: *const u8,
    len: usize,
) -> Result<Option<JobKey>, i32> {
    if len == 0 || fabric.api_version() < fi_version(1, 5) {
        return Ok(None);
    }
    // SAFETY: the caller vouches.
    let bytes = unsafe { auth_key_bytes(at, len) }?;
    job_key::Source::AuthKey.explain();
    Ok(Some(job_key::of_auth_key(bytes)))
}

/// The bytes of an authorization key. Errors: EINVAL unless they are 1 to [`job_key::SECRET_MAX`].
///
/// # Safety
/// `at` is null or points to `len` bytes.
pub(super) unsafe fn auth_key_bytes<'a>(at: *const u8, len: usize) -> Result<&'a [u8], i32> {
    if at.is_null() || !(1..=job_key::SECRET_MAX).contains(&len) {
        log::warn(format_args!(
            "auth_key refused: {len} bytes, offered 1 to {}",
            job_key::SECRET_MAX
        ));
        return Err(FI_EINVAL);
    }
    // SAFETY: checked; the caller vouches for the rest.
    Ok(unsafe { std::slice::from_raw_parts(at, len) })
}
