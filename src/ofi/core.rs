//! The libfabric core that loaded this provider: its version, its log, its parameters. The provider does not
//! link with libfabric. It looks the core's functions up when it is loaded and forgets them when it is
//! unloaded, because another copy of libfabric may load it later in the same process.

use crate::config::system::System;
use crate::config::variable::{Kind, Variable};
use crate::sys::dl::Library;
use crate::telemetry::log::{self, Level, Sink};
use crate::telemetry::own;
use libfabric_sys::{
    FI_LOG_CORE, FI_LOG_DEBUG, FI_LOG_INFO, FI_LOG_WARN, FI_PARAM_BOOL, FI_PARAM_SIZE_T,
    FI_PARAM_STRING, fi_log_level, fi_log_subsys, fi_param_type, fi_provider,
};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::RwLock;

type VersionFn = unsafe extern "C" fn() -> u32;
type LogEnabledFn = unsafe extern "C" fn(*const fi_provider, fi_log_level, fi_log_subsys) -> c_int;
type LogFn = unsafe extern "C" fn(
    *const fi_provider,
    fi_log_level,
    fi_log_subsys,
    *const c_char,
    c_int,
    *const c_char,
    ...
);
type ParamDefineFn = unsafe extern "C" fn(
    *const fi_provider,
    *const c_char,
    fi_param_type,
    *const c_char,
    ...
) -> c_int;
type ParamGetFn = unsafe extern "C" fn(*const fi_provider, *const c_char, *mut c_void) -> c_int;

#[derive(Clone, Copy)]
struct CoreApi {
    provider: *const fi_provider,
    version: Option<VersionFn>,
    log_enabled: Option<LogEnabledFn>,
    log: Option<LogFn>,
    param_define: Option<ParamDefineFn>,
    param_get: Option<ParamGetFn>,
}

// SAFETY: `provider` is the address of the static provider table; the rest are code addresses.
unsafe impl Send for CoreApi {}
// SAFETY: shared references only read the addresses, which never change.
unsafe impl Sync for CoreApi {}

static API: RwLock<Option<CoreApi>> = RwLock::new(None);

fn api() -> Option<CoreApi> {
    API.read().ok().and_then(|slot| *slot)
}

/// Looks the core's functions up and sends the log there.
pub(crate) fn attach(provider: *const fi_provider) {
    // `caller` finds a core under another file name, or one that is linked into the application.
    let library = Library::caller()
        .filter(|library| library.symbol(c"fi_log_enabled").is_some())
        .or_else(|| Library::loaded(c"libfabric.so.1"))
        .unwrap_or_else(Library::process);
    // SAFETY: each symbol has had the given type since libfabric 1.0 (fi_log, fi_log_enabled,
    // fi_param_define, fi_param_get, fi_version: fi_prov.h, fi_log.h, fabric.h).
    let api = unsafe {
        CoreApi {
            provider,
            version: library.symbol(c"fi_version").map(|p| cast::<VersionFn>(p)),
            log_enabled: library.symbol(c"fi_log_enabled").map(|p| cast::<LogEnabledFn>(p)),
            log: library.symbol(c"fi_log").map(|p| cast::<LogFn>(p)),
            param_define: library.symbol(c"fi_param_define").map(|p| cast::<ParamDefineFn>(p)),
            param_get: library.symbol(c"fi_param_get").map(|p| cast::<ParamGetFn>(p)),
        }
    };
    if let Ok(mut slot) = API.write() {
        *slot = Some(api);
    }
    log::attach(Some(Sink { enabled: log_enabled, write: log_write }));
}

/// Forgets the core, which is about to be unloaded.
pub(crate) fn detach() {
    own::set(None);
    log::attach(None);
    if let Ok(mut slot) = API.write() {
        *slot = None;
    }
}

/// # Safety
/// `F` is a function pointer type that fits the symbol.
unsafe fn cast<F: Copy>(symbol: NonNull<c_void>) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: the caller vouches for the type; sizes are equal.
    unsafe { std::mem::transmute_copy(&symbol) }
}

/// API version of the loaded core, so that the core never finds this provider too old for a request. Without
/// a core to ask: the newest version whose structures this provider knows.
pub(crate) fn version() -> u32 {
    match api().and_then(|api| api.version) {
        // SAFETY: fi_version takes nothing and always succeeds.
        Some(version) => unsafe { version() },
        None => libfabric_sys::fi_version(2, 7),
    }
}

/// Declares a variable to the core, for `fi_info -e`.
pub(crate) fn define_parameter(variable: &Variable) {
    let Some(api) = api() else { return };
    let (Some(define), Ok(name), Ok(help)) =
        (api.param_define, CString::new(variable.name), CString::new(variable.help))
    else {
        return;
    };
    let kind = match variable.kind {
        Kind::Text => FI_PARAM_STRING,
        Kind::Count => FI_PARAM_SIZE_T,
        Kind::Switch => FI_PARAM_BOOL,
    };
    // SAFETY: C strings; "%s" consumes the one argument after it.
    unsafe { define(api.provider, name.as_ptr(), kind, c"%s".as_ptr(), help.as_ptr()) };
}

/// Variables of the core itself that count for this provider, as the core names them.
const OF_CORE: [(&str, Kind); 3] = [
    ("mr_cache_monitor", Kind::Text),
    ("mr_cache_max_size", Kind::Count),
    ("mr_cache_max_count", Kind::Count),
];

/// The values of libfabric.conf (libfabric 1.18 and later). A variable that the environment has is not asked for, unless
/// the file counts more: the core would write its value in its log, and one of them is a secret.
pub(crate) fn system_values(variables: impl Iterator<Item = &'static Variable>) -> System {
    if version() < libfabric_sys::fi_version(1, 18) {
        return System::new(Vec::new(), false);
    }
    let own = api().map_or(std::ptr::null(), |api| api.provider);
    let none = std::ptr::null();
    let is_first = parameter(none, "prefer_sysconfig", Kind::Switch).as_deref() == Some("1");
    let own = variables.map(|variable| (own, "FI_UDRV_", variable.name, variable.kind));
    let all = own.chain(OF_CORE.map(|(name, kind)| (none, "FI_", name, kind)));
    let values = all.filter_map(|(provider, prefix, name, kind)| {
        let full = format!("{prefix}{}", name.to_ascii_uppercase());
        let asks = std::env::var_os(&full).is_none() || is_first && name != "JOB_KEY";
        let value = asks.then(|| parameter(provider, name, kind))??;
        Some((full, value))
    });
    System::new(values.collect(), is_first)
}

/// The text of a variable that was declared for `provider`, as the core has it.
fn parameter(provider: *const fi_provider, name: &str, kind: Kind) -> Option<String> {
    let (get, name) = (api()?.param_get?, CString::new(name).ok()?);
    match kind {
        Kind::Text => {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: a C string; a variable of this type is a pointer to a C string.
            let rc = unsafe { get(provider, name.as_ptr(), (&raw mut text).cast()) };
            // SAFETY: the core's own text or the environment's, which nobody changes now.
            (rc == 0 && !text.is_null())
                .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        }
        Kind::Count => {
            let mut count = 0_usize;
            // SAFETY: a C string; a variable of this type is a size_t.
            let rc = unsafe { get(provider, name.as_ptr(), (&raw mut count).cast()) };
            (rc == 0).then(|| count.to_string())
        }
        Kind::Switch => {
            let mut on: c_int = 0;
            // SAFETY: a C string; a variable of this type is an int.
            let rc = unsafe { get(provider, name.as_ptr(), (&raw mut on).cast()) };
            (rc == 0).then(|| on.to_string())
        }
    }
}

fn core_level(level: Level) -> fi_log_level {
    match level {
        Level::Error | Level::Warn => FI_LOG_WARN,
        Level::Info => FI_LOG_INFO,
        Level::Debug => FI_LOG_DEBUG,
    }
}

fn log_enabled(level: Level) -> bool {
    let Some(api) = api() else { return false };
    // SAFETY: the provider table is static.
    api.log_enabled.is_some_and(
        |enabled| unsafe { enabled(api.provider, core_level(level), FI_LOG_CORE) } != 0,
    )
}

fn log_write(level: Level, line: &str) {
    let Some(api) = api() else { return };
    let (Some(log), Ok(line)) = (api.log, CString::new(line.replace('\0', "?"))) else { return };
    // SAFETY: C strings; "%s\n" consumes the one argument after it.
    unsafe {
        log(
            api.provider,
            core_level(level),
            FI_LOG_CORE,
            c"udrv".as_ptr(),
            0,
            c"%s\n".as_ptr(),
            line.as_ptr(),
        )
    };
}
