//! Threads of this library. `std::thread` allocates the data of a thread in a way that ends the process on failure,
//! even if the global allocator (`sys::reserve`) has memory left. The threads here allocate through that allocator, and
//! return an error if the system has no memory for a thread.
//!
//! These threads block all signals: the application's signals are for its own threads.

use super::Errno;
use super::dl::Library;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A running thread; it is detached unless it is joined.
#[derive(Debug)]
pub(crate) struct Thread(libc::pthread_t);

/// The arguments of the new thread.
struct Start<F> {
    name: &'static CStr,
    body: F,
}

impl Thread {
    /// Runs `body` in a thread with `stack` bytes of stack, a multiple of 64 KiB. The kernel takes 15 bytes of the
    /// name. Errors: EAGAIN when the limit of threads is reached, or there is no memory for one.
    pub(crate) fn start<F>(name: &'static CStr, stack: usize, body: F) -> Result<Self, Errno>
    where
        F: FnOnce() + Send + 'static,
    {
        let attributes = Attributes::new(stack)?;
        let start = Box::into_raw(Box::new(Start { name, body }));
        let mut id = MaybeUninit::uninit();
        let mask = Mask::block_all();
        // SAFETY: the attributes are initialised, and the new thread owns the box from now on.
        let rc =
            unsafe { libc::pthread_create(id.as_mut_ptr(), &attributes.0, run::<F>, start.cast()) };
        drop(mask);
        if rc != 0 {
            // SAFETY: no thread has received the box.
            drop(unsafe { Box::from_raw(start) });
            return Err(Errno(rc));
        }
        // SAFETY: written by the call, which succeeded.
        Ok(Self(unsafe { id.assume_init() }))
    }

    /// Waits until the thread has ended.
    pub(crate) fn join(self) {
        // SAFETY: neither joined nor detached before, because that takes `self`.
        unsafe { libc::pthread_join(self.0, std::ptr::null_mut()) };
        std::mem::forget(self);
    }

    /// The caller is this thread.
    pub(crate) fn is_current(&self) -> bool {
        // SAFETY: always succeeds; the id is valid until the thread is joined or detached.
        unsafe { libc::pthread_equal(self.0, libc::pthread_self()) != 0 }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // SAFETY: neither joined nor detached before.
        unsafe { libc::pthread_detach(self.0) };
    }
}

extern "C" fn run<F: FnOnce()>(start: *mut c_void) -> *mut c_void {
    // SAFETY: the box that `Thread::start` made for this thread.
    let start = *unsafe { Box::from_raw(start.cast::<Start<F>>()) };
    let Start { name, body } = start;
    // SAFETY: a C string; the kernel copies it.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    // The panic message was written where it occurred. As in `std::thread`, the thread ends and the process goes on.
    let _ = catch_unwind(AssertUnwindSafe(body));
    std::ptr::null_mut()
}

struct Attributes(libc::pthread_attr_t);

impl Attributes {
    fn new(stack: usize) -> Result<Self, Errno> {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: initialises its argument.
        let rc = unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) };
        if rc != 0 {
            return Err(Errno(rc));
        }
        // SAFETY: initialised by the call, which succeeded.
        let mut attributes = Self(unsafe { attributes.assume_init() });
        let page = super::process::page_size();
        let size = stack.max(least_stack(&attributes.0)).next_multiple_of(page);
        // SAFETY: initialised.
        let rc = unsafe { libc::pthread_attr_setstacksize(&mut attributes.0, size) };
        if rc == 0 { Ok(attributes) } else { Err(Errno(rc)) }
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: initialised, and not destroyed before.
        unsafe { libc::pthread_attr_destroy(&mut self.0) };
    }
}

/// The thread-local data of all libraries is part of the stack: glibc knows how much it takes.
fn least_stack(attributes: &libc::pthread_attr_t) -> usize {
    type LeastStack = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    let Some(symbol) = Library::process().symbol(c"__pthread_get_minstack") else { return 0 };
    // SAFETY: glibc's function of this name has had this type since it was added (2.15); `std::thread` calls it so.
    unsafe { std::mem::transmute::<*mut c_void, LeastStack>(symbol.as_ptr())(attributes) }
}

/// Blocks all signals while it lives, so that a thread started meanwhile inherits that.
struct Mask(libc::sigset_t);

impl Mask {
    fn block_all() -> Self {
        let mut all = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: fills local sets, and changes this thread's mask only.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::sigemptyset(before.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self(before.assume_init())
        }
    }
}

impl Drop for Mask {
    fn drop(&mut self) {
        // SAFETY: a set that the kernel has filled.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Mutex};

    const STACK: usize = 64 * 1024;

    /// A line of the calling thread's status in /proc.
    fn status(key: &str) -> String {
        let all = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        all.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned()
    }

    #[test]
    fn it_has_its_name_and_no_signals() {
        let before = status("SigBlk:");
        let (tell, told) = channel();
        let body = move || tell.send((status("Name:"), status("SigBlk:"))).unwrap();
        let thread = Thread::start(c"udrv-test", 4 * STACK, body).unwrap();
        assert!(!thread.is_current());
        thread.join();
        let (name, blocked) = told.recv().unwrap();
        assert_eq!(name, "udrv-test");
        // All but SIGKILL, SIGSTOP, and the two that glibc reserves.
        let blocked = u64::from_str_radix(&blocked, 16).unwrap();
        assert_eq!(blocked | 0x1_8004_0100, u64::MAX, "{blocked:x}");
        assert_eq!(status("SigBlk:"), before);
    }

    #[test]
    fn it_knows_itself() {
        let own: Arc<Mutex<Option<Thread>>> = Arc::default();
        let (theirs, (tell, told)) = (own.clone(), channel());
        let mut held = own.lock().unwrap();
        let body = move || {
            let thread = theirs.lock().unwrap().take().unwrap();
            tell.send(thread.is_current()).unwrap();
        };
        *held = Some(Thread::start(c"udrv-test", STACK, body).unwrap());
        drop(held);
        assert!(told.recv().unwrap());
    }

    #[test]
    fn a_body_that_no_thread_runs_is_dropped() {
        let (kept, theirs) = channel::<()>();
        let body = move || drop(kept);
        let huge = 1 << 60;
        assert_eq!(Thread::start(c"udrv-test", huge, body).err(), Some(Errno(libc::EAGAIN)));
        assert!(theirs.recv().is_err());
    }

    #[test]
    fn a_panic_ends_the_thread_only() {
        let thread =
            Thread::start(c"udrv-test", 4 * STACK, || std::panic::resume_unwind(Box::new(())))
                .unwrap();
        thread.join();
    }
}
