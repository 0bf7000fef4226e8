//! The thread that keeps an endpoint's connections while the application does not poll: it acknowledges, retransmits,
//! answers handshakes and liveness checks, and keeps arrivals.

use super::core::Core;
use super::ending;
use super::shared::Shared;
use crate::sys::biased::Visitor;
use crate::sys::event::Watched;
use crate::sys::thread::Thread;
use crate::sys::{Errno, process};
use std::sync::Arc;

/// Stack of the thread, bytes.
const STACK: usize = 256 * 1024;

/// The background thread of one endpoint.
#[derive(Debug)]
pub(super) struct Background {
    shared: Arc<Shared>,
    thread: Option<Thread>,
}

impl Background {
    /// Starts the thread, which keeps `core` and sleeps on `links`. Errors: EAGAIN when the system has no more threads,
    /// or the system's reason where threads are forbidden.
    pub(super) fn start(
        shared: &Arc<Shared>,
        mut core: Visitor<Core>,
        links: Vec<Watched>,
    ) -> Result<Self, Errno> {
        let mine = shared.clone();
        ending::enter(shared);
        let thread = Thread::start(c"udrv-net", STACK, move || mine.run(&mut core, &links))
            .inspect_err(|_| ending::leave(shared))?;
        Ok(Self { shared: shared.clone(), thread: Some(thread) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // In a forked child there is no such thread, and its doorbell is the parent's.
        if self.shared.owner() != process::pid() {
            std::mem::forget(thread);
            return;
        }
        self.shared.stop();
        thread.join();
        ending::leave(&self.shared);
    }
}
