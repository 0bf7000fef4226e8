//! The thread that deregisters. It gets dead entries from the monitor, which must not deregister, and from transfers,
//! which should not wait for it.

use super::monitor::lock;
use super::registrar::Registrar;
use super::shared::Shared;
use crate::sys::Errno;
use crate::sys::thread::Thread;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

const STACK: usize = 256 * 1024;

pub(super) struct Worker {
    stopping: Arc<AtomicBool>,
    thread: Thread,
}

impl Worker {
    /// Starts the thread. Errors: EAGAIN if the system has no more threads.
    pub(super) fn start<R: Registrar>(shared: &Arc<Shared<R>>) -> Result<Self, Errno> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (shared, stop) = (shared.clone(), stopping.clone());
        let thread = Thread::start(c"udrv-deregister", STACK, move || run(&shared, &stop))?;
        Ok(Self { stopping, thread })
    }

    /// Ends the thread. Entries that are dead then are left to the caller.
    pub(super) fn stop<R: Registrar>(self, shared: &Shared<R>) {
        {
            let _held = lock(&shared.index); // else it could miss the notification
            self.stopping.store(true, Ordering::Release);
        }
        shared.work.notify_all();
        self.thread.join();
    }
}

fn run<R: Registrar>(shared: &Shared<R>, stop: &AtomicBool) {
    loop {
        let mut index = lock(&shared.index);
        while !index.has_dead() && !stop.load(Ordering::Acquire) {
            index = shared.work.wait(index).unwrap_or_else(PoisonError::into_inner);
        }
        drop(index);
        if stop.load(Ordering::Acquire) {
            return;
        }
        shared.bury();
    }
}
