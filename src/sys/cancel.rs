//! Threads that the application cancels (pthread_cancel(3)). Most functions of the C library that make a system call
//! are cancellation points: a cancelled thread ends there by an unwinding that cannot pass a Rust frame and so
//! ends the process. So this library has no cancellation points: functions that may reach one hold a [`Shield`],
//! and those that wait offer a point of their own, outside all frames that have something to release.

use std::ffi::c_int;
use std::marker::PhantomData;

const DISABLE: c_int = 1;

// Functions of the C library that the crate `libc` lacks on some platforms.
unsafe extern "C-unwind" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

/// While this lives, its thread is not cancelled: cancellation waits for the application's next cancellation point.
#[derive(Debug)]
pub(crate) struct Shield {
    before: c_int,
    _not_send: PhantomData<*const ()>,
}

impl Shield {
    /// Costs two writes to memory of the thread itself, and no system call.
    #[inline]
    pub(crate) fn raise() -> Self {
        let mut before = DISABLE;
        // SAFETY: a live local; the call cannot fail for this state.
        unsafe { pthread_setcancelstate(DISABLE, &mut before) };
        Self { before, _not_send: PhantomData }
    }
}

impl Drop for Shield {
    #[inline]
    fn drop(&mut self) {
        if self.before != DISABLE {
            // SAFETY: restores the state that `raise` got; the old state is not requested. Not a cancellation point.
            unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
        }
    }
}

/// A cancellation point: the thread ends here if it was cancelled.
///
/// # Safety
/// No frame between this and the application has anything to drop or catches panics, and all of them belong to
/// `extern "C-unwind"` functions.
#[inline]
pub(crate) unsafe fn point() {
    // SAFETY: the caller vouches for the frames that unwinding passes.
    unsafe { pthread_testcancel() };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::event::Epoll;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicBool, Ordering};

    static CAME_THROUGH: AtomicBool = AtomicBool::new(false);

    extern "C" fn shielded(_: *mut c_void) -> *mut c_void {
        {
            let _outer = Shield::raise();
            drop(Shield::raise());
            // SAFETY: the calling thread, which is to be cancelled; sleep(3) is a cancellation point.
            unsafe {
                libc::pthread_cancel(libc::pthread_self());
                libc::usleep(1);
            }
        }
        // Without a shield: close(2) would be a cancellation point, and the wait under test is none.
        let set = std::mem::ManuallyDrop::new(Epoll::new());
        CAME_THROUGH.store(set.is_ok(), Ordering::Relaxed);
        std::ptr::null_mut()
    }

    #[test]
    fn a_shield_keeps_a_thread_until_it_is_gone() {
        let mut thread = 0;
        let mut result = std::ptr::dangling_mut();
        // SAFETY: a function that takes nothing, and live locals.
        unsafe {
            assert_eq!(
                libc::pthread_create(&mut thread, std::ptr::null(), shielded, std::ptr::null_mut()),
                0
            );
            assert_eq!(libc::pthread_join(thread, &mut result), 0);
        }
        assert!(CAME_THROUGH.load(Ordering::Relaxed) && result.is_null());
    }
}
