//! The thread that closes allocations of other processes: cuIpcCloseMemHandle waits for the application's kernels, for which
//! progress must not wait. It looks for those that no access has used for long, too, also while the application computes.

use super::imports;
use crate::sys::clock;
use crate::sys::per_process::PerProcess;
use crate::sys::process::Home;
use crate::sys::thread::Thread;
use crate::telemetry::log;
use crate::transport::settling::settle;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

/// The driver's calls take place on it, whose needs nobody has written down.
const STACK: usize = 1024 * 1024;
/// From one look for unused ones to the next.
const LOOK: Duration = Duration::from_secs(1);

/// The thread of this process, which ends with the last endpoint that has it, after it has closed all.
#[derive(Debug)]
pub(super) struct Closer {
    thread: Option<Thread>,
    course: Arc<Course>,
    home: Home,
}

/// How far the thread is.
#[derive(Debug, Default)]
struct Course {
    ends: AtomicBool,
    has_ended: AtomicBool,
}

impl Closer {
    /// `None`: the system has no thread for it.
    pub(super) fn get() -> Option<Arc<Self>> {
        static CLOSER: PerProcess<Weak<Closer>> = PerProcess::new();
        let mut closer = CLOSER.lock();
        if let Some(known) = closer.upgrade() {
            return Some(known);
        }
        let course = Arc::new(Course::default());
        let theirs = Arc::clone(&course);
        let started = Thread::start(c"udrv-cuda", STACK, move || run(&theirs));
        let thread = started.inspect_err(|errno| {
            log::limited!(
                cause: errno.0,
                "device memory is copied through the host: no thread to close that of other processes: {errno}"
            );
        });
        let made = Arc::new(Self { thread: Some(thread.ok()?), course, home: Home::here() });
        *closer = Arc::downgrade(&made);
        Some(made)
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.home.is_here() {
            // It is the parent's.
            return std::mem::forget(thread);
        }
        {
            let imports = imports::of_process(); // else it could miss the notification
            self.course.ends.store(true, Ordering::Release);
            imports.wake();
        }
        if settle(|_| self.course.has_ended.load(Ordering::Acquire)) {
            return thread.join();
        }
        log::limited!(
            "device memory of other processes stays open after the last endpoint is closed: CUDA waits for kernels of this process"
        );
    }
}

fn run(course: &Course) {
    let mut imports = imports::of_process();
    let changed = imports.changed();
    loop {
        let ends = course.ends.load(Ordering::Acquire);
        if ends {
            imports.close_idle();
        }
        if let Some((number, open)) = imports.next_to_close() {
            drop(imports);
            drop(open);
            imports = imports::of_process();
            imports.closed(number);
            continue;
        }
        if ends {
            return course.has_ended.store(true, Ordering::Release);
        }
        let rest = if imports.are_none() { Duration::MAX } else { LOOK };
        (imports, _) = changed.wait_timeout(imports, rest).unwrap_or_else(PoisonError::into_inner);
        imports.expire(clock::now_ns());
    }
}
