//! Finding symbols of libraries that may be missing, at run time.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// A handle from `dlopen`. It is never closed: what we look up must stay mapped while it is used.
#[derive(Clone, Copy)]
pub(crate) struct Library(*mut c_void);

impl Library {
    /// The library if this process has loaded it already; no file is opened.
    pub(crate) fn loaded(name: &CStr) -> Option<Self> {
        // SAFETY: `name` is a C string; RTLD_NOLOAD runs no constructor.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        NonNull::new(handle).map(|h| Self(h.as_ptr()))
    }

    /// The global scope of the process.
    pub(crate) fn process() -> Self {
        Self(libc::RTLD_DEFAULT)
    }

    /// The address of `symbol`, or `None` if the library does not define it.
    pub(crate) fn symbol(self, symbol: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle came from dlopen or is RTLD_DEFAULT; `symbol` is a C string.
        NonNull::new(unsafe { libc::dlsym(self.0, symbol.as_ptr()) })
    }
}
