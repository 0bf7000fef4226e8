//! What keeps an endpoint's connections while the application does not poll: a task of the process's background thread
//! acknowledges, retransmits, answers handshakes and liveness checks, and keeps arrivals.

use super::core::Core;
use super::ending;
use super::shared::{LOOK_NS, Shared};
use crate::sys::Errno;
use crate::sys::biased::Visitor;
use crate::sys::event::Watched;
use crate::sys::hub::{self, Rest, Task};
use std::sync::Arc;

/// The background task of one endpoint.
#[derive(Debug)]
pub(super) struct Background {
    shared: Arc<Shared>,
}

/// The task, as the thread has it.
struct Keeper {
    shared: Arc<Shared>,
    core: Visitor<Core>,
    /// Time between two checks of an application that polls, nanoseconds.
    look: u64,
}

impl Task for Keeper {
    fn turn(&mut self) -> Rest {
        self.shared.turn(&mut self.core, &mut self.look)
    }
}

impl Background {
    /// Starts the task, which keeps `core` and is called by `links`. Errors: EAGAIN when the system has no more threads,
    /// or the system's reason where threads or sets of descriptors are forbidden.
    pub(super) fn start(
        shared: &Arc<Shared>,
        core: Visitor<Core>,
        links: Vec<Watched>,
    ) -> Result<Self, Errno> {
        ending::enter(shared);
        let task = Keeper { shared: shared.clone(), core, look: LOOK_NS };
        let ticket = hub::add(Box::new(task), links).inspect_err(|_| ending::leave(shared))?;
        shared.start(ticket);
        Ok(Self { shared: shared.clone() })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.shared.stop();
        // In a forked child the lock of the list may be held for ever, and the list is the parent's.
        if self.shared.owner().is_here() {
            ending::leave(&self.shared);
        }
    }
}
