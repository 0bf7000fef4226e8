//! An object of libibverbs with its destructor.

use crate::sys::errno::{Errno, Result};
use crate::sys::process::Home;
use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;

/// An object that is destroyed with its owner, in the process that made it.
pub(super) struct Owned<T> {
    raw: NonNull<T>,
    destroy: unsafe extern "C" fn(*mut T) -> c_int,
    home: Home,
}

// SAFETY: libibverbs lets any thread use an object. Calls that two threads must not make at once take
// `&mut` of its owner here.
unsafe impl<T> Send for Owned<T> {}
// SAFETY: libibverbs lets any thread use an object, and calls that exclude each other take `&mut` here.
unsafe impl<T> Sync for Owned<T> {}

impl<T> Owned<T> {
    /// Takes ownership of a call's result; null means failure, with the call's errno.
    ///
    /// # Safety
    /// `raw` is null or a new object that `destroy` destroys, that no other code destroys, and that may be
    /// destroyed whenever the owner is dropped.
    pub(super) unsafe fn new(
        raw: *mut T,
        destroy: unsafe extern "C" fn(*mut T) -> c_int,
    ) -> Result<Self> {
        let raw = NonNull::new(raw).ok_or_else(Errno::last)?;
        Ok(Self { raw, destroy, home: Home::here() })
    }

    #[inline]
    pub(super) fn as_ptr(&self) -> *mut T {
        self.raw.as_ptr()
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.home.is_here() {
            // SAFETY: the caller of `new` vouched for it. An object that refuses to end stays until the process ends.
            unsafe { (self.destroy)(self.raw.as_ptr()) };
        }
    }
}

impl<T> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.raw)
    }
}

/// Converts the result of calls that return 0 or an error number.
#[inline]
pub(super) fn check(rc: c_int) -> Result<()> {
    if rc == 0 { Ok(()) } else { Err(Errno(rc.abs())) }
}
