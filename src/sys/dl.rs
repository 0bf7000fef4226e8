//! Looks up, at run time, symbols of libraries that may be missing.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;

/// A loaded library, or the global scope of the process.
pub(crate) struct Library {
    handle: *mut c_void,
    counted: bool,
}

impl Library {
    /// The library if this process has already loaded it; opens no file.
    pub(crate) fn loaded(name: &CStr) -> Option<Self> {
        // SAFETY: `name` is a C string; RTLD_NOLOAD runs no constructor.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then(|| Self { handle, counted: true })
    }

    /// Loads the library, unless it is loaded, by the loader's search path. It stays loaded. Its
    /// constructors run.
    pub(crate) fn open(name: &CStr) -> Option<Self> {
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: `name` is a C string of a system library.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        (!handle.is_null()).then(|| Self { handle, counted: false })
    }

    /// The library whose code called ours: if several copies of a library are loaded, only this tells
    /// which of them is the caller.
    pub(crate) fn caller() -> Option<Self> {
        let mut search = Search { own_base: base_of(Self::caller as *const c_void), caller: None };
        // SAFETY: the callback gets `search`, which outlives the call.
        unsafe { _Unwind_Backtrace(visit_frame, (&raw mut search).cast()) };
        let mut info = empty_info();
        // SAFETY: dladdr only looks the address up.
        let found = unsafe { libc::dladdr(search.caller?, &mut info) } != 0;
        if !found || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the loader's own C string, valid while that library is loaded, as it is: its code is
        // running.
        Self::loaded(unsafe { CStr::from_ptr(info.dli_fname) })
    }

    /// The global scope of the process.
    pub(crate) fn process() -> Self {
        Self { handle: libc::RTLD_DEFAULT, counted: false }
    }

    /// The address of `symbol`, or `None` if the library does not define it. It is valid only while
    /// some other handle keeps the library loaded: this handle does not, once dropped.
    pub(crate) fn symbol(&self, symbol: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle came from dlopen or is RTLD_DEFAULT; `symbol` is a C string.
        NonNull::new(unsafe { libc::dlsym(self.handle, symbol.as_ptr()) })
    }

    /// Like [`Self::symbol`], for one version of a symbol that the library has in several.
    pub(crate) fn versioned(&self, symbol: &CStr, version: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle came from dlopen or is RTLD_DEFAULT; both names are C strings.
        let found = unsafe { libc::dlvsym(self.handle, symbol.as_ptr(), version.as_ptr()) };
        NonNull::new(found)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if self.counted {
            // SAFETY: releases the reference that dlopen took.
            unsafe { libc::dlclose(self.handle) };
        }
    }
}

struct Search {
    own_base: *mut c_void,
    caller: Option<*const c_void>,
}

/// The context of the unwinder that every Rust program links (libgcc_s; Itanium C++ ABI, level I).
#[repr(C)]
struct UnwindContext {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn _Unwind_Backtrace(
        visit: unsafe extern "C" fn(*mut UnwindContext, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut UnwindContext) -> usize;
}

const CONTINUE: c_int = 0; // _URC_NO_REASON
const STOP: c_int = 5; // _URC_END_OF_STACK

unsafe extern "C" fn visit_frame(context: *mut UnwindContext, search: *mut c_void) -> c_int {
    // SAFETY: the unwinder passes its context and our argument.
    let (ip, search) = unsafe { (_Unwind_GetIP(context), &mut *search.cast::<Search>()) };
    let ip = std::ptr::without_provenance::<c_void>(ip);
    if base_of(ip) == search.own_base {
        return CONTINUE;
    }
    search.caller = Some(ip);
    STOP
}

fn empty_info() -> libc::Dl_info {
    libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    }
}

/// The base address of the library that contains `address`.
fn base_of(address: *const c_void) -> *mut c_void {
    let mut info = empty_info();
    // SAFETY: dladdr only looks the address up.
    unsafe { libc::dladdr(address, &mut info) };
    info.dli_fbase
}
