//! The thread that deregisters. Invalid registrations are handed to it by the monitor, which must not
//! do that itself, and by transfers, which should not be held up.

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
    /// Errors: EAGAIN when the system has no more threads.
    pub(super) fn start<R: Registrar>(shared: &Arc<Shared<R>>) -> Result<Self, Errno> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (shared, stop) = (shared.clone(), stopping.clone());
        let thread = Thread::start(c"udrv-deregister", STACK, move || run(&shared, &stop))?;
        Ok(Self { stopping, thread })
    }

    /// Ends it; what is dead then is left to the caller.
    pub(super) fn stop<R: Registrar>(self, shared: &Shared<R>) {
        {
            let _held = lock(&shared.index); // or it could miss the bell
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
