//! The one guard at every entry point: a panic must not unwind into C, where it would end the process.

use crate::sys::cancel::{self, Shield};
use crate::sys::process::Home;
use crate::sys::reserve;
use crate::telemetry::log;
use std::any::Any;
use std::ffi::{CStr, c_char, c_int};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A return type of entry points, which tells errors as libfabric's negative error numbers.
pub(crate) trait EntryResult {
    /// From a negative error number.
    fn from_error(error: i32) -> Self;
}

impl EntryResult for i32 {
    fn from_error(error: i32) -> Self {
        error
    }
}

impl EntryResult for isize {
    fn from_error(error: i32) -> Self {
        error as Self
    }
}

impl EntryResult for u64 {
    fn from_error(_: i32) -> Self {
        0
    }
}

impl<T> EntryResult for *const T {
    fn from_error(_: i32) -> Self {
        std::ptr::null()
    }
}

impl EntryResult for () {
    fn from_error(_: i32) -> Self {}
}

impl<R: EntryResult> EntryResult for ControlFlow<R> {
    fn from_error(error: i32) -> Self {
        Self::Break(R::from_error(error))
    }
}

/// Runs an entry point. A panic becomes -FI_EOTHER and one line in the log. The thread is not cancelled meanwhile.
#[inline]
pub(crate) fn entry<R: EntryResult>(name: &'static str, body: impl FnOnce() -> R) -> R {
    let _shield = Shield::raise();
    data_entry(name, body)
}

/// Runs a blocking entry point: calls `turn` until it has a result. A cancelled thread ends between two turns.
///
/// # Safety
/// No frame between the application and this has anything to drop, and the outermost is of an
/// `extern "C-unwind"` function.
#[inline]
pub(crate) unsafe fn waiting_entry<R: EntryResult, F: FnMut() -> ControlFlow<R>>(
    name: &'static str,
    mut turn: F,
) -> R {
    const { assert!(!std::mem::needs_drop::<F>() && !std::mem::needs_drop::<R>()) };
    loop {
        match entry(name, &mut turn) {
            ControlFlow::Break(result) => return result,
            // SAFETY: the caller vouches, and this frame has nothing to drop.
            ControlFlow::Continue(()) => unsafe { cancel::point() },
        }
    }
}

/// As [`entry`], for calls that create an object. They return -FI_ENOMEM while the system has no memory, because
/// the memory in reserve is for the operations under way.
#[inline]
pub(crate) fn making_entry<R: EntryResult>(name: &'static str, body: impl FnOnce() -> R) -> R {
    if reserve::is_low() {
        log::warn(format_args!("{name} refused: the system has no memory left"));
        return R::from_error(-libfabric_sys::FI_ENOMEM);
    }
    entry(name, body)
}

/// As [`entry`], for the data path, without a shield: functions there that may reach a cancellation point have
/// shields of their own (`sys::cancel`).
#[inline]
pub(crate) fn data_entry<R: EntryResult>(name: &'static str, body: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        tell_of_panic(name, &*payload);
        R::from_error(-libfabric_sys::FI_EOTHER)
    })
}

#[cold]
#[inline(never)]
fn tell_of_panic(name: &str, payload: &(dyn Any + Send)) {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("unknown panic");
    log::limited!("{name}: internal error, please report: {text}");
}

/// Defines entry points behind the guard of this name, with their return type. Each has its Rust name, its name in the
/// log, its arguments, and one expression.
///
/// # Safety
///
/// Callers pass arguments as the man page of the call demands: objects are open and belong to this provider, structures
/// are valid, buffers and lists have the given length, and they stay lent until the operation completes.
macro_rules! entries {
    (
        $guard:ident -> $of:ty;
        $($name:ident $text:literal ($($argument:ident: $type:ty),* $(,)?) => $result:expr;)*
    ) => {$(
        unsafe extern "C" fn $name($($argument: $type),*) -> $of {
            // SAFETY: see `guard::entries`.
            $crate::ofi::guard::$guard($text, || unsafe { $result })
        }
    )*};
}
pub(super) use entries;

/// The negative form in which libfabric returns a positive error number.
pub(crate) fn code(result: Result<(), i32>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => -error,
    }
}

/// Whether an object with `uses` owners may be closed; else what `fi_close` returns: -FI_EBUSY. In a forked child the
/// other owners may never release it (`DomainLock::is_lost`): there the object stays, and `fi_close` returns 0.
pub(crate) fn may_close(uses: usize, home: Home) -> Result<(), c_int> {
    match uses {
        1 => Ok(()),
        _ if home.is_here() => Err(-libfabric_sys::FI_EBUSY),
        _ => Err(0),
    }
}

/// The result of `fi_cq_strerror` and similar calls: `text`, in the application's buffer if there is one.
///
/// # Safety
/// `buffer` is null or has `len` bytes.
pub(super) unsafe fn told(text: &'static CStr, buffer: *mut c_char, len: usize) -> *const c_char {
    if buffer.is_null() || len == 0 {
        return text.as_ptr();
    }
    let n = text.to_bytes().len().min(len - 1);
    // SAFETY: the buffer has `len > n` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, n);
        *buffer.add(n) = 0;
    }
    buffer.cast_const()
}

/// Errors: EINVAL for flags of a queue or counter that are not offered, such as FI_PEER, with which it would report to another
/// provider's queue.
pub(super) fn offers(call: &str, flags: u64, offered: u64) -> Result<(), i32> {
    if flags & !offered == 0 {
        return Ok(());
    }
    log::warn(format_args!("{call} refused: flags {flags:#x}, offered {offered:#x}"));
    Err(libfabric_sys::FI_EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let rc: i32 = entry("test", || panic!("boom"));
        std::panic::set_hook(hook);
        assert_eq!(rc, -libfabric_sys::FI_EOTHER);
    }

    #[test]
    fn a_text_is_cut_to_the_buffer_that_it_is_told_in() {
        let mut buffer = [1 as c_char; 4];
        let at = buffer.as_mut_ptr();
        // SAFETY: the buffer has that many bytes, or it is null.
        unsafe {
            assert_eq!(CStr::from_ptr(told(c"longer", at, 4)), c"lon");
            assert_eq!(CStr::from_ptr(told(c"no", at, 4)), c"no");
            assert_eq!(CStr::from_ptr(told(c"longer", at, 0)), c"longer");
            assert_eq!(CStr::from_ptr(told(c"longer", std::ptr::null_mut(), 4)), c"longer");
        }
    }

    #[test]
    fn an_object_with_other_owners_is_not_closed() {
        let home = Home::here();
        assert_eq!(
            (may_close(1, home), may_close(2, home)),
            (Ok(()), Err(-libfabric_sys::FI_EBUSY))
        );
    }
}
