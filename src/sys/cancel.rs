//! Threads that the application cancels (pthread_cancel(3)). Most calls of the C library that ask something of
//! the kernel are points where a thread ends that was cancelled, by an unwinding that passes no frame of Rust:
//! it ends the process. So there is none inside of this library: calls that may come to one hold a [`Shield`],
//! and those that wait offer a point of their own, outside of all frames that have something to give back.

use std::ffi::c_int;
use std::marker::PhantomData;

const DISABLE: c_int = 1;

// The C library's; not in the crate `libc` for every platform.
unsafe extern "C-unwind" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

/// While it lives, the thread that made it is not cancelled: that waits for a point of the application.
#[derive(Debug)]
pub(crate) struct Shield {
    before: c_int,
    _not_send: PhantomData<*const ()>,
}

impl Shield {
    /// Two writes to memory of the thread's own, in all: no system call.
    #[inline]
    pub(crate) fn raise() -> Self {
        let mut before = DISABLE;
        // SAFETY: a live local; it cannot fail for this state.
        unsafe { pthread_setcancelstate(DISABLE, &mut before) };
        Self { before, _not_send: PhantomData }
    }
}

impl Drop for Shield {
    #[inline]
    fn drop(&mut self) {
        if self.before != DISABLE {
            // SAFETY: the state that it has told; nobody asks for the old one. No point of cancellation.
            unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
        }
    }
}

/// The thread ends here if it was cancelled.
///
/// # Safety
/// No frame between this and the application has anything to drop or catches panics, and all of them are of
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
            // SAFETY: the calling thread, which is to be cancelled; sleeping is a point of cancellation.
            unsafe {
                libc::pthread_cancel(libc::pthread_self());
                libc::usleep(1);
            }
        }
        // Without a shield: closing one would be such a point, waiting for one is none.
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
