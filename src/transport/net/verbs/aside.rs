//! Work that may take long, done by a thread of its own while the data path goes on: for an address handle of a RoCE
//! device the kernel asks the network for the peer's Ethernet address, and waits up to a second for an answer.

use crate::sys::Errno;
use crate::sys::event::{Doorbell, Epoll};
use crate::sys::process::Home;
use crate::sys::thread::Thread;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// Stack of a thread, bytes.
const STACK: usize = 128 * 1024;
/// Most threads of one [`Aside`]: so many silent ports keep a question about another one waiting.
const THREADS_MAX: usize = 4;

/// Threads that answer questions `Q` with answers `A`: one more where all others are at work, up to [`THREADS_MAX`].
pub(super) struct Aside<Q, A> {
    // The threads end without questions, and so are dropped last.
    questions: Sender<Q>,
    answers: Receiver<(Q, A)>,
    under_way: usize,
    /// Rings with each answer.
    bell: Arc<Doorbell>,
    /// Its bell is in the set of [`sleep`](Self::sleep).
    watched: bool,
    /// Starts one more thread.
    hire: Box<dyn Fn() -> Result<Thread, Errno> + Send>,
    crew: Crew,
}

/// The threads of an [`Aside`]. They must not outlive the library: to drop this waits for the questions under way.
pub(super) struct Crew {
    threads: Vec<Thread>,
    stop: Arc<AtomicBool>,
    home: Home,
}

/// Threads that end soon, and that nobody waits for until this is dropped.
#[derive(Debug, Default)]
pub(super) struct Leaving(Vec<Crew>);

impl<Q, A> fmt::Debug for Aside<Q, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Aside, {} under way", self.under_way)
    }
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} threads", self.threads.len())
    }
}

impl<Q: Send + 'static, A: Send + 'static> Aside<Q, A> {
    /// Starts a thread, which does `work`. Errors: those of a new thread; EMFILE, ENFILE.
    pub(super) fn start(work: impl Fn(&Q) -> A + Send + Sync + 'static) -> Result<Self, Errno> {
        let (questions, asked) = channel::<Q>();
        let (answer, answers) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(Doorbell::new()?);
        let (asked, work) = (Arc::new(Mutex::new(asked)), Arc::new(work));
        let (weak, ring) = (Arc::downgrade(&stop), bell.clone());
        let hire = move || {
            let (asked, work, answer) = (asked.clone(), work.clone(), answer.clone());
            let stopped = weak.upgrade().ok_or(Errno(libc::ESRCH))?;
            let ring = ring.clone();
            Thread::start(c"udrv-ah", STACK, move || {
                let next = || asked.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok(question) = next() {
                    if stopped.load(Ordering::Relaxed) {
                        return;
                    }
                    let found = work(&question);
                    if answer.send((question, found)).is_err() {
                        return;
                    }
                    ring.ring();
                }
            })
        };
        let hire = Box::new(hire);
        let crew = Crew { threads: vec![hire()?], stop, home: Home::here() };
        Ok(Self { questions, answers, under_way: 0, bell, watched: false, hire, crew })
    }

    /// Asks a question. False: the threads are gone.
    pub(super) fn ask(&mut self, question: Q) -> bool {
        let threads = &mut self.crew.threads;
        if self.under_way >= threads.len() && threads.len() < THREADS_MAX {
            threads.extend((self.hire)().ok()); // without it the others answer, in turn
        }
        let asked = self.questions.send(question).is_ok();
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

    /// Prepares for sleep on `watch`, which an answer makes readable. False: there may be one already.
    pub(super) fn sleep(&mut self, watch: &Epoll) -> bool {
        self.watched = self.watched || watch.add(self.fd(), 0).is_ok();
        !self.silence() || self.under_way == 0
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

    /// No answer is wanted any more: the threads end.
    pub(super) fn stop(self) -> Crew {
        self.crew.stop.store(true, Ordering::Relaxed);
        self.crew
    }
}

impl Crew {
    /// The threads have ended, or will without waiting for anything.
    fn is_over(&self) -> bool {
        Arc::strong_count(&self.stop) == 1
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ours = self.home.is_here();
        for thread in self.threads.drain(..) {
            if ours { thread.join() } else { std::mem::forget(thread) } // the parent's
        }
    }
}

impl Leaving {
    /// Waits for no thread of `crew` that is still at work.
    pub(super) fn add(&mut self, crew: Crew) {
        self.0.retain(|crew| !crew.is_over());
        self.0.push(crew);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Answers as often as the sender says.
    fn doubling() -> (Aside<u32, u32>, Sender<()>) {
        let (go, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let work = move |question: &u32| {
            let _ = wait.lock().unwrap().recv();
            question * 2
        };
        (Aside::start(work).unwrap(), go)
    }

    #[test]
    fn a_slow_answer_holds_up_no_caller() {
        let (mut aside, go) = doubling();
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

    #[test]
    fn an_answer_wakes_a_sleeper() {
        let (mut aside, go) = doubling();
        let watch = Epoll::new().unwrap();
        let readable = |wait| crate::sys::event::wait_any([watch.fd()], wait).unwrap()[0];
        for question in 1..3 {
            assert!(aside.ask(question) && aside.sleep(&watch) && !readable(0));
            go.send(()).unwrap();
            assert!(readable(-1) && !aside.sleep(&watch), "there is an answer");
            assert_eq!(aside.answer(), Some((question, 2 * question)));
            aside.bell.ring(); // as if it came after the answer
            assert!(aside.sleep(&watch) && !readable(0));
        }
    }

    #[test]
    fn a_question_waits_for_no_other() {
        let (go, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let mut aside = Aside::start(move |silent: &bool| {
            if *silent {
                let _ = wait.lock().unwrap().recv();
            }
        })
        .unwrap();
        assert!(aside.ask(true) && aside.ask(false));
        crate::sys::event::wait_any([aside.fd()], -1).unwrap();
        assert_eq!(aside.answer(), Some((false, ())));
        (0..10).for_each(|_| assert!(aside.ask(true)));
        assert_eq!(aside.crew.threads.len(), THREADS_MAX);
        drop(go);
    }

    #[test]
    fn threads_that_are_at_work_are_left_until_the_end() {
        let mut leaving = Leaving::default();
        let ((go, wait), (tell, begun)) = (channel::<()>(), channel());
        let ends = Mutex::new((tell, wait));
        let work = move |_: &u32| {
            let (tell, wait) = &*ends.lock().unwrap();
            let _ = (tell.send(()), wait.recv());
        };
        let mut first = Aside::start(work).unwrap();
        assert!(first.ask(1) && begun.recv().is_ok());
        leaving.add(first.stop());
        leaving.add(doubling().0.stop());
        assert!(!leaving.0[0].is_over(), "it waits");
        drop(go);
        let end = Instant::now() + crate::patience::seconds(10);
        while leaving.0.iter().any(|crew| !crew.is_over()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        leaving.add(doubling().0.stop());
        assert_eq!(leaving.0.len(), 1);
    }
}
