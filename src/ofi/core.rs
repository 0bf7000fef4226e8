//! The libfabric core that loaded this provider: its version, its log, its parameters. The provider does not
//! link with libfabric. It looks the core's functions up when it is loaded and forgets them when it is
//! unloaded, because another copy of libfabric may load it later in the same process.

use crate::sys::dl::Library;
use crate::telemetry::log::{self, Level, Sink};
use libfabric_sys::{
    FI_LOG_CORE, FI_LOG_INFO, FI_LOG_WARN, FI_PARAM_STRING, fi_log_level, fi_log_subsys,
    fi_param_type, fi_provider,
};
use std::ffi::{CString, c_char, c_int, c_void};
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

#[derive(Clone, Copy)]
struct CoreApi {
    provider: *const fi_provider,
    version: Option<VersionFn>,
    log_enabled: Option<LogEnabledFn>,
    log: Option<LogFn>,
    param_define: Option<ParamDefineFn>,
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
    // fi_param_define, fi_version: fi_prov.h, fi_log.h, fabric.h).
    let api = unsafe {
        CoreApi {
            provider,
            version: library.symbol(c"fi_version").map(|p| cast::<VersionFn>(p)),
            log_enabled: library.symbol(c"fi_log_enabled").map(|p| cast::<LogEnabledFn>(p)),
            log: library.symbol(c"fi_log").map(|p| cast::<LogFn>(p)),
            param_define: library.symbol(c"fi_param_define").map(|p| cast::<ParamDefineFn>(p)),
        }
    };
    if let Ok(mut slot) = API.write() {
        *slot = Some(api);
    }
    log::attach(Some(Sink { enabled: log_enabled, write: log_write }));
}

/// Forgets the core, which is about to be unloaded.
pub(crate) fn detach() {
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
pub(crate) fn define_parameter(name: &str, help: &str) {
    let Some(api) = api() else { return };
    let (Some(define), Ok(name), Ok(help)) =
        (api.param_define, CString::new(name), CString::new(help))
    else {
        return;
    };
    // SAFETY: C strings; "%s" consumes the one argument after it.
    unsafe { define(api.provider, name.as_ptr(), FI_PARAM_STRING, c"%s".as_ptr(), help.as_ptr()) };
}

fn core_level(level: Level) -> fi_log_level {
    match level {
        Level::Warn => FI_LOG_WARN,
        Level::Info => FI_LOG_INFO,
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
