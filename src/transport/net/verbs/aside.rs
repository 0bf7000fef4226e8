//! Work that may take long, done by a thread of its own while the data path goes on: for an address handle of a RoCE
//! device the kernel asks the network for the peer's Ethernet address, and waits up to a second for an answer.

use crate::sys::Errno;
use crate::sys::event::Doorbell;
use crate::sys::process::Home;
use crate::sys::thread::Thread;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

/// Stack of the thread, bytes.
const STACK: usize = 128 * 1024;

/// A thread that answers questions `Q` with answers `A`, in turn.
pub(super) struct Aside<Q, A> {
    /// `None` only while it is dropped.
    questions: Option<Sender<Q>>,
    answers: Receiver<(Q, A)>,
    thread: Option<Thread>,
    under_way: usize,
    /// Rings with each answer.
    bell: Arc<Doorbell>,
    stop: Arc<AtomicBool>,
    home: Home,
}

impl<Q, A> fmt::Debug for Aside<Q, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Aside, {} under way", self.under_way)
    }
}

impl<Q: Send + 'static, A: Send + 'static> Aside<Q, A> {
    /// Starts the thread, which does `work`. Errors: those of a new thread; EMFILE, ENFILE.
    pub(super) fn start(mut work: impl FnMut(&Q) -> A + Send + 'static) -> Result<Self, Errno> {
        let (questions, asked) = channel::<Q>();
        let (answer, answers) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(Doorbell::new()?);
        let (stopped, ring) = (stop.clone(), bell.clone());
        let thread = Thread::start(c"udrv-ah", STACK, move || {
            while let Ok(question) = asked.recv() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let found = work(&question);
                if answer.send((question, found)).is_err() {
                    return;
                }
                ring.ring();
            }
        })?;
        let (questions, thread, home) = (Some(questions), Some(thread), Home::here());
        Ok(Self { questions, answers, thread, under_way: 0, bell, stop, home })
    }

    /// Asks a question. False: the thread is gone.
    pub(super) fn ask(&mut self, question: Q) -> bool {
        let asked = self.questions.as_ref().is_some_and(|to| to.send(question).is_ok());
        self.under_way += usize::from(asked);
        asked
    }

    /// Readable from an answer on until [`silence`](Self::silence).
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    /// Comes before a look for answers. Returns whether there may be some.
    pub(super) fn silence(&self) -> bool {
        self.bell.silence()
    }

    /// A question was asked whose answer was not taken.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way > 0
    }

    /// The next answer, with its question; `None`: there is none yet.
    #[inline]
    pub(super) fn answer(&mut self) -> Option<(Q, A)> {
        if self.under_way == 0 {
            return None;
        }
        let answer = self.answers.try_recv().ok()?;
        self.under_way -= 1;
        Some(answer)
    }
}

impl<Q, A> Drop for Aside<Q, A> {
    /// Waits for the question under way: the thread must not outlive the library.
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.home.is_here() {
            return std::mem::forget(thread); // the parent's
        }
        self.stop.store(true, Ordering::Relaxed);
        self.questions = None;
        thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn who_asks_goes_on_while_the_answer_takes_its_time() {
        let (go, wait) = channel::<()>();
        let mut aside = Aside::start(move |question: &u32| {
            let _ = wait.recv();
            question * 2
        })
        .unwrap();
        assert_eq!(aside.answer(), None, "nothing was asked");
        assert!(aside.ask(3) && aside.ask(4));
        assert_eq!(aside.answer(), None, "and the caller goes on");
        let end = Instant::now() + crate::patience::seconds(10);
        let mut next = || loop {
            if let Some(answer) = aside.answer() {
                return answer;
            }
            assert!(Instant::now() < end, "no answer");
            std::thread::sleep(Duration::from_millis(1));
        };
        for answer in [(3, 6), (4, 8)] {
            go.send(()).unwrap();
            assert_eq!(next(), answer);
        }
        assert!(aside.ask(5));
        drop(go); // it ends although a question is open
        drop(aside);
    }
}
