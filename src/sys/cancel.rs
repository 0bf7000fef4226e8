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
    use crate::sys::mappings::Mappings;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicBool, Ordering};

    static CAME_THROUGH: AtomicBool = AtomicBool::new(false);

    /// Runs `work` as a thread, which may end itself.
    fn run(work: extern "C" fn(*mut c_void) -> *mut c_void) -> *mut c_void {
        let mut thread = 0;
        let mut result = std::ptr::dangling_mut();
        // SAFETY: a function that ignores its argument, and live locals.
        unsafe {
            let none = std::ptr::null_mut();
            assert_eq!(libc::pthread_create(&mut thread, std::ptr::null(), work, none), 0);
            assert_eq!(libc::pthread_join(thread, &mut result), 0);
        }
        result
    }

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
        let result = run(shielded);
        assert!(CAME_THROUGH.load(Ordering::Relaxed) && result.is_null());
    }

    extern "C" fn cancelled(_: *mut c_void) -> *mut c_void {
        // SAFETY: the calling thread, which is to be cancelled.
        unsafe { libc::pthread_cancel(libc::pthread_self()) };
        let mappings = {
            let _shield = Shield::raise();
            std::mem::ManuallyDrop::new(Mappings::open().unwrap().by_text())
        };
        let mut there = false;
        let address = cancelled as *const () as usize;
        mappings.each(address, address + 1, |_| there = true).unwrap();
        let _ = crate::sys::process::locked_memory_limit();
        there &= !crate::sys::net::interfaces().is_empty();
        if there { std::ptr::dangling_mut() } else { std::ptr::null_mut() }
    }

    /// Otherwise its result is PTHREAD_CANCELED.
    #[test]
    fn a_cancelled_thread_reads_files() {
        assert_eq!(run(cancelled), std::ptr::dangling_mut());
    }
}
