//! `struct fi_provider`: the table that the core gets when it loads this provider.

use super::guard::{code, entry};
use super::ops::fabric;
use super::{core, info};
use crate::config::{Config, variables};
use crate::telemetry::{identity, log, own};
use libfabric_sys::{fi_context, fi_fabric_attr, fi_info, fi_provider, fi_version, fid_fabric};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};

/// The table is writable, because the core keeps its own data in `context`.
#[repr(transparent)]
struct ProviderTable(UnsafeCell<fi_provider>);

// SAFETY: written by `initialise` while the core loads the provider, and by the core under its own lock.
unsafe impl Sync for ProviderTable {}

static PROVIDER: ProviderTable = ProviderTable(UnsafeCell::new(fi_provider {
    version: 0,
    fi_version: 0,
    context: fi_context { internal: [std::ptr::null_mut(); 4] },
    name: c"udrv".as_ptr(),
    getinfo: Some(getinfo),
    fabric: Some(open_fabric),
    cleanup: Some(cleanup),
}));

/// This provider's version, by which the core orders providers of one name: 100 * major + minor, in its encoding.
const VERSION: u32 = fi_version(0, 1);

/// The oldest libfabric that this provider works with: older ones lack members of the tables that it fills.
const OLDEST: u32 = fi_version(1, 17);

/// Initialises the provider, also when the library stayed mapped since an earlier load. Null: the core is too old, which
/// the log says.
pub(crate) fn initialise() -> *mut fi_provider {
    let provider = PROVIDER.0.get();
    core::attach(provider);
    own::set(Some(&Config::from_environment().log));
    let version = core::version();
    let (major, minor) = (version >> 16, version & 0xffff);
    if version < OLDEST {
        let level = if is_asked_for() { log::error } else { log::info };
        level(format_args!(
            "libfabric {major}.{minor} is too old for udrv, which is not used: it takes libfabric 1.17 or newer (LD_LIBRARY_PATH, or the MPI's own copy)"
        ));
        core::detach();
        return std::ptr::null_mut();
    }
    // SAFETY: the core calls `fi_prov_ini` from one thread at a time, and no other thread uses the table
    // between loads.
    unsafe {
        (*provider).version = VERSION;
        (*provider).fi_version = version;
        (*provider).context = fi_context { internal: [std::ptr::null_mut(); 4] };
    }
    variables().for_each(core::define_parameter);
    core::system_values(variables()).install();
    own::set(Some(&Config::from_environment().log));
    log::info(format_args!("udrv {}, on libfabric {major}.{minor}", identity::name()));
    Config::check_environment();
    provider
}

/// The environment names udrv. Without that its absence is no error: the application may not know of it.
fn is_asked_for() -> bool {
    std::env::var("FI_PROVIDER").is_ok_and(|list| names_udrv(&list))
}

/// Names are separated by `,`, layered ones by `;`; `^` in front excludes them (fi_provider(7)).
fn names_udrv(list: &str) -> bool {
    let mut names = list.split([',', ';']).map(str::trim);
    !list.trim_start().starts_with('^') && names.any(|name| name.eq_ignore_ascii_case("udrv"))
}

unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const fi_info,
    out: *mut *mut fi_info,
) -> c_int {
    // SAFETY: as the core calls getinfo.
    entry("fi_getinfo", || unsafe { info::getinfo(version, node, service, flags, hints, out) })
}

unsafe extern "C" fn open_fabric(
    attr: *mut fi_fabric_attr,
    out: *mut *mut fid_fabric,
    context: *mut c_void,
) -> c_int {
    // SAFETY: as the core calls fabric.
    entry("fi_fabric", || code(unsafe { fabric::open(attr, out, context) }))
}

unsafe extern "C" fn cleanup() {
    entry("cleanup", core::detach);
}

#[cfg(test)]
mod tests {
    use super::names_udrv;

    #[test]
    fn lists_of_providers_name_udrv_or_not() {
        assert!(["udrv", "tcp,UDRV", "udrv;ofi_rxd", " udrv "].into_iter().all(names_udrv));
        assert!(!["", "^udrv", "^tcp,udrv", "tcp", "udrv2"].into_iter().any(names_udrv));
    }
}
