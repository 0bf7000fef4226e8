//! Where processes get the descriptors of memory that has no IPC handle: a socket of the process that has the memory. The
//! process's background thread answers there, so that a process that computes can still be read from.
//!
//! One question a connection: number and tag of a record. The answer is a result of the driver, and if that is 0 the
//! descriptor. It is exported for each answer anew, since a descriptor that is kept would keep the memory.

use super::published;
use crate::sys::cuda::Failure;
use crate::sys::event::Watched;
use crate::sys::hub::{self, Rest, Task, Ticket};
use crate::sys::per_process::PerProcess;
use crate::sys::process::random_u64;
use crate::sys::unix::{self, Message, Received};
use crate::sys::{Errno, clock, user};
use crate::telemetry::log;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// A question is there this long after its connection, and an answer after its question, nanoseconds.
const PATIENCE_NS: u64 = 5_000_000_000;
/// How often the thread looks at connections without a question, nanoseconds.
const LOOK_NS: u64 = 1_000_000;
/// Time to the next look at the door when no descriptor is left for a guest, nanoseconds.
const SHORT_NS: u64 = 10_000_000;
/// Most of those.
const GUESTS_MAX: usize = 64;

/// The door of this process, open as long as one of its endpoints has it.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) name: u64,
    _ticket: Ticket,
}

/// The task of the background thread.
struct Porter {
    listener: Arc<OwnedFd>,
    /// Connections without a request yet, each with the end of its time.
    guests: Vec<(OwnedFd, u64)>,
}

fn text_of(name: u64) -> String {
    format!("udrv-cuda/{name:x}")
}

impl Door {
    /// `None`: there is no socket, or no thread.
    pub(super) fn get() -> Option<Arc<Self>> {
        static DOOR: PerProcess<Weak<Door>> = PerProcess::new();
        let mut door = DOOR.lock();
        if let Some(open) = door.upgrade() {
            return Some(open);
        }
        let opened = Self::open().map(Arc::new).inspect_err(|errno| {
            log::limited!(
                cause: errno.0,
                "device memory without an IPC handle is copied through the host: no socket for its descriptors: {errno}"
            );
        });
        let opened = opened.ok()?;
        *door = Arc::downgrade(&opened);
        Some(opened)
    }

    fn open() -> Result<Self, Errno> {
        let name = random_u64().max(1);
        let listener = Arc::new(unix::listen(&text_of(name))?);
        let links: Vec<Watched> = vec![listener.clone()];
        let ticket = hub::add(Box::new(Porter { listener, guests: Vec::new() }), links)?;
        Ok(Self { name, _ticket: ticket })
    }
}

impl Task for Porter {
    fn turn(&mut self) -> Rest {
        let mut short = false;
        while self.guests.len() < GUESTS_MAX {
            let guest = match unix::accept(self.listener.as_fd()) {
                Ok(Some(guest)) => guest,
                Ok(None) => break,
                Err(_) => {
                    short = true;
                    break;
                }
            };
            if unix::credentials(guest.as_fd()).is_ok_and(|who| user::is_ours(&who)) {
                self.guests.push((guest, clock::now_ns() + PATIENCE_NS));
            }
        }
        self.guests.retain(|(guest, until)| !answer(guest, *until));
        let pause = if short { SHORT_NS } else { LOOK_NS };
        let until = (short || !self.guests.is_empty()).then(|| clock::now_ns() + pause);
        Rest { until, watches: !short && self.guests.len() < GUESTS_MAX }
    }
}

/// Whether the guest has its answer, or gets none.
fn answer(guest: &OwnedFd, until: u64) -> bool {
    let mut question = [0; 16];
    match unix::receive(guest.as_fd(), &mut question) {
        Received::Nothing => clock::now_ns() > until,
        Received::Closed => true,
        Received::Message(Message { len, .. }) if len == question.len() => {
            let [number, tag] = words(question);
            let (result, fd) = match published::descriptor(number as usize, tag) {
                Ok(fd) => (0, Some(fd)),
                Err(Failure(result)) => (result, None),
            };
            let fds: Vec<_> = fd.iter().map(OwnedFd::as_fd).collect();
            // A guest that has gone needs none.
            let _ = unix::send(guest.as_fd(), &result.to_le_bytes(), &fds);
            true
        }
        Received::Message(_) => true,
    }
}

fn words(bytes: [u8; 16]) -> [u64; 2] {
    let both = u128::from_le_bytes(bytes);
    [both as u64, (both >> 64) as u64]
}

/// A question that was asked.
#[derive(Debug)]
pub(super) struct Asked {
    socket: OwnedFd,
    until: u64,
}

/// What it has come to.
#[derive(Debug)]
pub(super) enum Answer {
    NotYet,
    Descriptor(OwnedFd),
    /// The owner's driver gives none.
    Refused(Failure),
    /// Nobody answers.
    Lost,
}

impl Asked {
    /// Errors: those of connect(2); EACCES for a door that is not of the process `pid`.
    pub(super) fn new(pid: i32, door: u64, number: usize, tag: u64) -> Result<Self, Errno> {
        let socket = unix::connect(&text_of(door))?;
        let who = unix::credentials(socket.as_fd())?;
        if who.pid != pid || !user::is_ours(&who) {
            return Err(Errno(libc::EACCES));
        }
        let question = u128::from(tag) << 64 | number as u128;
        unix::send(socket.as_fd(), &question.to_le_bytes(), &[])?;
        Ok(Self { socket, until: clock::now_ns() + PATIENCE_NS })
    }

    pub(super) fn is_over(&self) -> bool {
        clock::now_ns() > self.until
    }

    pub(super) fn answer(&self) -> Answer {
        let mut result = [0; 4];
        match unix::receive(self.socket.as_fd(), &mut result) {
            Received::Nothing if self.is_over() => Answer::Lost,
            Received::Nothing => Answer::NotYet,
            Received::Closed => Answer::Lost,
            Received::Message(Message { mut fds, .. }) => {
                match (fds.pop(), i32::from_le_bytes(result)) {
                    (Some(fd), 0) => Answer::Descriptor(fd),
                    (None, 0) => Answer::Lost,
                    (_, result) => Answer::Refused(Failure(result)),
                }
            }
        }
    }
}

#[cfg(test)]
impl Asked {
    /// A question for whose answer the time is over.
    pub(super) fn over() -> Self {
        let socket = unix::listen(&text_of(random_u64())).unwrap();
        Self { socket, until: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::process;

    fn wait(asked: &Asked) -> Answer {
        loop {
            match asked.answer() {
                Answer::NotYet => std::thread::yield_now(),
                answer => return answer,
            }
        }
    }

    #[test]
    fn a_request_for_an_unknown_record_is_refused() {
        let door = Door::get().unwrap();
        assert_eq!(Door::get().unwrap().name, door.name, "a process has one");
        let asked = Asked::new(process::pid(), door.name, 0, 77).unwrap();
        // There is no driver.
        assert!(matches!(wait(&asked), Answer::Refused(Failure(1))));
        let wrong = Asked::new(process::pid() + 1, door.name, 0, 77);
        assert_eq!(wrong.err(), Some(Errno(libc::EACCES)), "another process has its name");
        let question = unix::connect(&text_of(door.name)).unwrap();
        unix::send(question.as_fd(), b"nonsense", &[]).unwrap();
        let until = clock::now_ns() + PATIENCE_NS;
        assert!(matches!(wait(&Asked { socket: question, until }), Answer::Lost));
        let name = door.name;
        drop(door);
        assert!(Asked::new(process::pid(), name, 0, 77).is_err(), "it is closed");
    }
}
