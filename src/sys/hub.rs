//! The background thread of the process. It runs the tasks of all endpoints: each when its time has come, when one of
//! its descriptors is readable, or when it is woken. So a process has one such thread, one set of descriptors, one
//! doorbell and one timer, however many endpoints it opens. The thread ends with the last task.
//!
//! The timer is for those who bring a task's next turn forward while the thread sleeps: the thread is not woken before that turn is due.

use super::clock::{self, Deadline};
use super::errno::Result;
use super::event::{Doorbell, Epoll, Timer, Watched};
use super::numbers::NumberMap;
use super::per_process::PerProcess;
use super::process::Home;
use super::thread::Thread;
use crate::telemetry::log;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Stack of the thread, bytes.
const STACK: usize = 256 * 1024;
/// The token of the doorbell and of the timer; tasks have others.
const BELL: u64 = 0;
/// How often a task has a turn whose descriptors cannot be watched, nanoseconds.
const UNWATCHED_NS: u64 = 10_000_000;

/// What a task waits for after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rest {
    /// The time of its next turn, nanoseconds of the clock of `clock::now_ns`; `None`: any time.
    pub(crate) until: Option<u64>,
    /// It has a turn as soon as one of its descriptors is readable.
    pub(crate) watches: bool,
}

/// Work that goes on while the application does something else.
pub(crate) trait Task: Send + 'static {
    /// Does what is due. It must not wait for anything: other tasks have their turns after it.
    fn turn(&mut self) -> Rest;
}

/// A task, as the thread knows it.
struct Member {
    task: Box<dyn Task>,
    links: Vec<Watched>,
}

/// `None`: the task has ended.
type Place = Arc<Mutex<Option<Member>>>;

#[derive(Default)]
struct Members {
    list: NumberMap<u64, Place>,
    last: u64,
    thread: Option<Thread>,
    /// The last task has left, and the thread ends.
    ends: bool,
}

/// Turns that were brought forward since the thread last looked.
#[derive(Default)]
struct Called {
    /// Tokens, and times in nanoseconds.
    list: Vec<(u64, u64)>,
    /// The timer wakes the thread at this time, nanoseconds: the earliest in the list.
    armed: Option<u64>,
}

struct Hub {
    members: Mutex<Members>,
    /// Tasks to run that neither their time nor a descriptor calls.
    woken: Mutex<Vec<u64>>,
    called: Mutex<Called>,
    epoll: Epoll,
    bell: Doorbell,
    timer: Timer,
    home: Home,
}

/// A task of the thread; the task ends when this is dropped.
pub(crate) struct Ticket {
    hub: Arc<Hub>,
    token: u64,
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ticket").field(&self.token).finish()
    }
}

/// The hub of this process, if it has tasks.
static HUB: PerProcess<Option<Arc<Hub>>> = PerProcess::new();

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a task: its first turn is at once. `links`: what `Rest::watches` means. Errors: EAGAIN when the system has no
/// more threads; EMFILE, ENFILE, ENOMEM; the system's reason where threads or sets of descriptors are forbidden.
pub(crate) fn add(task: Box<dyn Task>, links: Vec<Watched>) -> Result<Ticket> {
    let mut place = HUB.lock();
    let hub = match place.take() {
        Some(hub) => hub,
        None => Hub::open()?,
    };
    let ticket = hub.add(task, links);
    if !locked(&hub.members).list.is_empty() {
        *place = Some(hub);
    }
    ticket
}

/// When tasks have their next turns.
#[derive(Default)]
struct Times {
    order: BTreeSet<(u64, u64)>,
    of: NumberMap<u64, u64>,
}

impl Times {
    fn set(&mut self, token: u64, at: Option<u64>) {
        let old = match at {
            Some(at) => self.of.insert(token, at),
            None => self.of.remove(&token),
        };
        if let Some(old) = old {
            self.order.remove(&(old, token));
        }
        self.order.extend(at.map(|at| (at, token)));
    }

    /// The task has its turn no later than at `at`.
    fn hasten(&mut self, token: u64, at: u64) {
        if self.of.get(&token).is_none_or(|known| at < *known) {
            self.set(token, Some(at));
        }
    }

    /// Adds the tasks whose time has come.
    fn take_due(&mut self, now: u64, due: &mut Vec<u64>) {
        while let Some((at, token)) = self.order.pop_first() {
            if at > now {
                self.order.insert((at, token));
                return;
            }
            self.of.remove(&token);
            due.push(token);
        }
    }

    fn first(&self) -> Deadline {
        Deadline::at(self.order.first().map(|(at, _)| *at))
    }
}

impl Hub {
    fn open() -> Result<Arc<Self>> {
        let (epoll, bell, timer) = (Epoll::new()?, Doorbell::new()?, Timer::new()?);
        epoll.add(bell.fd(), BELL)?;
        epoll.add(timer.fd(), BELL)?;
        let (members, woken, called) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Arc::new(Self { members, woken, called, epoll, bell, timer, home: Home::here() }))
    }

    fn add(self: &Arc<Self>, task: Box<dyn Task>, links: Vec<Watched>) -> Result<Ticket> {
        let mut members = locked(&self.members);
        members.last += 1;
        let token = members.last;
        let watch = |link: &Watched| self.epoll.add_silent(link.as_fd(), token);
        let watched = links.iter().try_for_each(watch);
        if let Err(e) = watched.and_then(|()| self.start(&mut members)) {
            links.iter().for_each(|link| self.epoll.remove(link.as_fd()));
            return Err(e);
        }
        members.list.insert(token, Arc::new(Mutex::new(Some(Member { task, links }))));
        drop(members);
        let ticket = Ticket { hub: self.clone(), token };
        ticket.wake();
        Ok(ticket)
    }

    fn start(self: &Arc<Self>, members: &mut Members) -> Result<()> {
        if members.thread.is_none() {
            let hub = self.clone();
            members.thread = Some(Thread::start(c"udrv-net", STACK, move || hub.run())?);
        }
        Ok(())
    }

    /// The thread.
    fn run(&self) {
        let (mut times, mut due) = (Times::default(), Vec::new());
        let mut tokens = [0; 32];
        loop {
            self.take_called(&mut times);
            times.take_due(clock::now_ns(), &mut due);
            due.append(&mut locked(&self.woken));
            due.sort_unstable();
            due.dedup();
            for token in due.drain(..) {
                times.set(token, self.turn(token));
            }
            // A signal or a lack of memory may end the sleep early: a turn too many does no harm.
            let ready = self.epoll.wait(&mut tokens, times.first().poll_ms()).unwrap_or(0);
            due.extend(tokens.iter().take(ready).filter(|token| **token != BELL));
            if due.len() < ready {
                // The bell, or the timer, which the next round disarms.
                self.bell.silence();
                if locked(&self.members).ends {
                    return;
                }
            }
        }
    }

    /// Brings forward the turns that were called; the timer is idle after that.
    fn take_called(&self, times: &mut Times) {
        let mut called = locked(&self.called);
        if called.armed.take().is_some() {
            self.timer.disarm();
        }
        called.list.drain(..).for_each(|(token, at)| times.hasten(token, at));
    }

    /// A turn of a task. Returns when its next one is due.
    fn turn(&self, token: u64) -> Option<u64> {
        let place = locked(&self.members).list.get(&token)?.clone();
        let mut place = locked(&place);
        let member = place.as_mut()?;
        match catch_unwind(AssertUnwindSafe(|| member.task.turn())) {
            Ok(Rest { until, watches: false }) => until,
            Ok(Rest { until, .. }) => {
                let watch = |link: &Watched| self.epoll.watch_once(link.as_fd(), token);
                let Err(e) = member.links.iter().try_for_each(watch) else { return until };
                log::limited!(cause: e.0, "the background thread cannot watch a socket: {e}");
                let soon = clock::now_ns() + UNWATCHED_NS;
                Some(until.map_or(soon, |until| until.min(soon)))
            }
            // The panic message was written where it occurred. What the task holds may be half done: it is not touched.
            Err(_) => {
                std::mem::forget(place.take());
                None
            }
        }
    }

    /// Ends a task: it has no turn after this has returned. The last one ends the thread.
    fn remove(self: &Arc<Self>, token: u64) {
        let mut place = HUB.lock();
        let mut members = locked(&self.members);
        let Some(member) = members.list.remove(&token) else { return };
        let thread = if members.list.is_empty() { members.thread.take() } else { None };
        members.ends = thread.is_some();
        drop(members);
        if thread.is_some() {
            drop(place.take_if(|hub| Arc::ptr_eq(hub, self)));
        }
        drop(place);
        // Waits for the end of a turn.
        if let Some(Member { task, links }) = locked(&member).take() {
            drop(task);
            links.iter().for_each(|link| self.epoll.remove(link.as_fd()));
        }
        if let Some(thread) = thread {
            self.bell.ring();
            thread.join();
        }
    }
}

impl Ticket {
    /// The task has a turn soon.
    pub(crate) fn wake(&self) {
        // In a forked child there is no such thread, and a lock may be held for ever.
        if self.hub.home.is_here() {
            locked(&self.hub.woken).push(self.token);
            self.hub.bell.ring();
        }
    }

    /// The task has a turn at `at`, nanoseconds of the clock of `clock::now_ns`, if it has none before.
    pub(crate) fn wake_at(&self, at: u64) {
        // As in `wake`.
        if self.hub.home.is_here() {
            let mut called = locked(&self.hub.called);
            called.list.push((self.token, at));
            if called.armed.is_none_or(|armed| at < armed) {
                called.armed = Some(at);
                self.hub.timer.arm(at);
            }
        }
    }

    /// As [`Self::wake`], from where this thread may be in the middle of it: a signal handler that exits. If it is, the
    /// task has its turn when its time has come.
    pub(crate) fn try_wake(&self) {
        if self.hub.home.is_here() {
            if let Ok(mut woken) = self.hub.woken.try_lock() {
                woken.push(self.token);
            }
            self.hub.bell.ring();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.hub.home.is_here() {
            self.hub.remove(self.token);
        } else {
            // The task is the parent's, and in the middle of whatever the parent's thread did.
            std::mem::forget(self.hub.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(20);

    /// Rests as it is told, and tells each turn.
    struct Told(Sender<()>, Arc<Mutex<Rest>>);

    impl Task for Told {
        fn turn(&mut self) -> Rest {
            let rest = *locked(&self.1);
            let _ = self.0.send(());
            rest
        }
    }

    fn link() -> (Arc<UnixDatagram>, UnixDatagram) {
        let (link, peer) = UnixDatagram::pair().unwrap();
        (Arc::new(link), peer)
    }

    struct End {
        ticket: Ticket,
        turns: Receiver<()>,
        rest: Arc<Mutex<Rest>>,
    }

    const IDLE: Rest = Rest { until: None, watches: false };

    fn end(rest: Rest, links: Vec<Watched>) -> End {
        let (tell, turns) = channel();
        let rest = Arc::new(Mutex::new(rest));
        let ticket = add(Box::new(Told(tell, rest.clone())), links).unwrap();
        End { ticket, turns, rest }
    }

    #[test]
    fn a_task_has_turns_when_it_is_woken_when_its_time_has_come_and_when_a_link_is_readable() {
        let (link, peer) = link();
        let end = end(IDLE, vec![link.clone()]);
        end.turns.recv_timeout(LONG).unwrap(); // the first one
        peer.send(b"x").unwrap();
        assert!(end.turns.recv_timeout(Duration::from_millis(50)).is_err(), "it does not watch");
        *locked(&end.rest) = Rest { until: None, watches: true };
        end.ticket.wake();
        end.turns.recv_timeout(LONG).unwrap();
        for _ in 0..3 {
            end.turns.recv_timeout(LONG).unwrap(); // the datagram is still there
        }
        link.recv(&mut [0]).unwrap();
        let at = clock::now_ns() + 200_000_000;
        *locked(&end.rest) = Rest { until: Some(at), watches: false };
        end.ticket.wake();
        // Those that the link called, the one that was woken, and the one whose time has come.
        while clock::now_ns() < at {
            end.turns.recv_timeout(LONG).unwrap();
        }
    }

    #[test]
    fn a_turn_is_brought_forward_and_the_thread_is_not_woken_before() {
        let end = end(IDLE, vec![]);
        end.turns.recv_timeout(LONG).unwrap();
        loop {
            let now = clock::now_ns();
            for after in [900_000_000, 300_000_000, 600_000_000] {
                end.ticket.wake_at(now + after);
            }
            let in_time = clock::now_ns() < now + 300_000_000;
            end.turns.recv_timeout(LONG).unwrap();
            assert!(clock::now_ns() >= now + 300_000_000);
            // The later ones were for a task that has looked meanwhile.
            let again = end.turns.recv_timeout(Duration::from_millis(800));
            if in_time {
                return assert!(again.is_err());
            }
        }
    }

    #[test]
    fn times_come_in_their_order_and_are_replaced() {
        let (mut times, mut due) = (Times::default(), Vec::new());
        for (token, at) in [(1, 30), (2, 10), (3, 20), (1, 5), (2, 40)] {
            times.set(token, Some(at));
        }
        times.set(3, None);
        times.take_due(4, &mut due);
        assert_eq!(due, []);
        times.take_due(40, &mut due);
        assert_eq!(due, [1, 2]);
        assert_eq!(times.first().poll_ms(), -1);
        assert!(times.of.is_empty());
    }

    /// A turn that waits for the end of the test.
    struct Slow(Arc<AtomicBool>, Sender<()>, Arc<AtomicBool>);

    impl Task for Slow {
        fn turn(&mut self) -> Rest {
            let _ = self.1.send(());
            std::thread::sleep(Duration::from_millis(100));
            self.0.store(true, Ordering::SeqCst);
            IDLE
        }
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            self.2.store(self.0.load(Ordering::SeqCst), Ordering::SeqCst);
        }
    }

    #[test]
    fn a_task_is_dropped_after_its_turn_and_before_its_ticket_is_gone() {
        let (over, after) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let (tell, began) = channel();
        let ticket = add(Box::new(Slow(over, tell, after.clone())), vec![]).unwrap();
        began.recv_timeout(LONG).unwrap();
        drop(ticket);
        assert!(after.load(Ordering::SeqCst));
    }

    struct Panics;

    impl Task for Panics {
        fn turn(&mut self) -> Rest {
            std::panic::resume_unwind(Box::new(()));
        }
    }

    #[test]
    fn a_panic_ends_its_task_only() {
        let good = end(IDLE, vec![]);
        let bad = add(Box::new(Panics), vec![]).unwrap();
        good.turns.recv_timeout(LONG).unwrap();
        bad.wake();
        good.ticket.wake();
        good.turns.recv_timeout(LONG).unwrap();
        drop(bad);
        good.ticket.wake();
        good.turns.recv_timeout(LONG).unwrap();
    }

    /// Other tests of this process have endpoints, so only this hub's own thread is looked at.
    #[test]
    fn the_thread_ends_with_the_last_task() {
        let hub = Hub::open().unwrap();
        let turns = Arc::new(AtomicU64::new(0));
        struct Counts(Arc<AtomicU64>);
        impl Task for Counts {
            fn turn(&mut self) -> Rest {
                self.0.fetch_add(1, Ordering::SeqCst);
                IDLE
            }
        }
        for _ in 0..2 {
            let first = hub.add(Box::new(Counts(turns.clone())), vec![]).unwrap();
            let second = hub.add(Box::new(Counts(turns.clone())), vec![]).unwrap();
            drop(first);
            assert!(locked(&hub.members).thread.is_some());
            drop(second);
            assert!(locked(&hub.members).thread.is_none());
            // As `place` does: a hub that has ended is not used again.
            locked(&hub.members).ends = false;
        }
        assert_eq!(Arc::strong_count(&hub), 1, "the thread has released it");
    }

    #[test]
    fn many_come_and_go_at_once() {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let (link, peer) = link();
                        peer.send(b"x").unwrap();
                        let end = end(Rest { until: Some(1), watches: true }, vec![link]);
                        for _ in 0..3 {
                            end.turns.recv_timeout(LONG).unwrap();
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_link_that_is_closed_is_not_in_the_set() {
        let (hub, (link, _peer)) = (Hub::open().unwrap(), link());
        let (tell, turns) = channel();
        let rest = Arc::new(Mutex::new(Rest { until: None, watches: true }));
        let other = hub.add(Box::new(Told(tell.clone(), rest.clone())), vec![]).unwrap();
        let ticket = hub.add(Box::new(Told(tell, rest)), vec![link.clone()]).unwrap();
        turns.recv_timeout(LONG).unwrap();
        drop(ticket);
        assert!(hub.epoll.watch_once(link.as_fd(), 1).is_err());
        drop(other);
    }
}
