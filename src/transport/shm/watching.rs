//! The processes with which there are links, and how their end becomes known: by a descriptor for each while they are
//! few, otherwise by checks: often of those peers for which an operation waits, of the others in turn. A process in
//! another pid namespace is not visible here: its connection stays open, and hangs up.
//!
//! Descriptors are opened when no link was made for a moment, by the next check, or when a thread is about to sleep, and
//! not with the link. To open one and to watch it costs a twentieth of a link, which both ends would pay while a job makes
//! its first ones.
//!
//! The checks also ask whether the peer's doorbell exists. That finds an endpoint whose process lives on without it,
//! after exec(2), or whose last ring was lost. It proves no life: a forked child may hold the doorbell of a process that
//! has ended, and anybody may bind the name after it.

use crate::sys::event::wait_readable;
use crate::sys::late_set::{LateSet, LateTimer};
use crate::sys::watched::{self, Identity};
use crate::sys::{clock, process};
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Time between two checks that endpoints and processes of links exist, and between two trials of slow rings,
/// nanoseconds.
pub(super) const LIVENESS_NS: u64 = 500_000_000;
/// Descriptors are opened when no link was made for so long, nanoseconds: a job's first links come one after the other, and a
/// process that is started in place of one that was killed is not ready sooner.
const QUIET_NS: u64 = 5_000_000;
/// Checks take at most one in so many nanoseconds of the processors: where there are many processes for each, each of them
/// checks all others.
const SHARE: u64 = 32;
/// Longest time between two checks, nanoseconds.
const LIVENESS_MAX_NS: u64 = 30_000_000_000;
/// Peers checked at a time although no operation waits for them, at least, and checks after which it was each one's
/// turn. So many processes are identified at a time.
const CHECKS: usize = 16;
/// Least time that the check of a peer takes, nanoseconds.
const CHECK_NS: u64 = 2_000;
const ROUND: usize = 4;

#[derive(Debug)]
struct Watch {
    process: Identity,
    /// Without a descriptor, the process is checked periodically.
    fd: Option<Arc<OwnedFd>>,
    /// No descriptor has been asked for.
    new: bool,
}

/// One [`Watch`] for each visible process with which there are links.
#[derive(Debug, Default)]
pub(super) struct Watches {
    /// By process id.
    list: Vec<Watch>,
    /// When the latest of those came for which no descriptor has been asked, nanoseconds; 0: there are none.
    new_since: u64,
    /// Processes that were found to have ended without closing. A forked child may hold the listener of one, and would take
    /// links that nobody reads.
    pub(super) dead: BTreeSet<i32>,
    /// The next peer to be checked although no operation waits for it.
    next: usize,
    /// Wakes a sleeping thread for checks; `None`: the endpoint takes no links.
    timer: Option<LateTimer>,
    /// When the timer wakes, nanoseconds; 0: it is not armed.
    wakes_at: u64,
    /// The time of the last checks, nanoseconds.
    pub(super) checked_at: u64,
    /// What they are put off beyond [`LIVENESS_NS`], nanoseconds.
    put_off_ns: u64,
}

impl Watches {
    pub(super) fn new(timer: Option<LateTimer>) -> Self {
        Self { timer, ..Self::default() }
    }

    /// Time between two checks, nanoseconds.
    pub(super) fn every_ns(&self) -> u64 {
        LIVENESS_NS + self.put_off_ns
    }

    /// The last checks took so much time of a processor, and so many processes share each and check each other. One that
    /// took long puts the next off by little: the time between two at most doubles.
    pub(super) fn has_checked(&mut self, took_ns: u64, processes_each: u64) {
        let every = took_ns.saturating_mul(processes_each).saturating_mul(SHARE);
        let most = LIVENESS_MAX_NS.min(2 * self.every_ns());
        self.put_off_ns = every.clamp(LIVENESS_NS, most) - LIVENESS_NS;
    }

    /// There are so many links, and so many processes share each processor. A job of many begins with rare checks, while
    /// all its processes make links with each other.
    pub(super) fn expect(&mut self, links: usize, processes_each: u64) {
        let took_ns = ((links / ROUND) as u64).saturating_mul(CHECK_NS);
        let every = took_ns.saturating_mul(processes_each).saturating_mul(SHARE);
        let put_off_ns = every.min(LIVENESS_MAX_NS).saturating_sub(LIVENESS_NS);
        self.put_off_ns = self.put_off_ns.max(put_off_ns);
    }

    /// Where the watch of process `pid` is, or belongs.
    fn place(&self, pid: i32) -> Result<usize, usize> {
        self.list.binary_search_by_key(&pid, |watch| watch.process.pid)
    }

    /// Whether process `pid`, which is watched, has ended.
    pub(super) fn has_ended(&self, pid: i32) -> bool {
        let watch = self.place(pid).ok().and_then(|at| self.list.get(at));
        watch.is_some_and(|watch| match &watch.fd {
            Some(fd) => wait_readable(fd.as_fd(), 0).unwrap_or(false),
            None => !watch.process.is_running(),
        })
    }

    /// Whether process `pid` is another one than the one with this id that is watched, which has ended.
    pub(super) fn has_successor(&self, pid: i32) -> bool {
        let watch = self.place(pid).ok().and_then(|at| self.list.get(at));
        let tells = watch.is_some_and(|watch| watch.fd.is_some() || watch.process.is_known());
        tells && self.has_ended(pid) && process::is_running(pid)
    }

    /// Reads which processes those are that have no descriptor, some at a time: when links are made, that would cost more
    /// than the links. The system gives an id to another process only after it has given out all others.
    pub(super) fn identify(&mut self) {
        let unknown = |watch: &&mut Watch| watch.fd.is_none() && !watch.process.is_known();
        let some = CHECKS.max(self.list.len().div_ceil(ROUND));
        self.list.iter_mut().filter(unknown).take(some).for_each(|watch| watch.process.learn());
    }

    /// The numbers of those whose turn it is to be checked, of `links` links. All of them have their turn in [`ROUND`]
    /// calls, if they are more than [`CHECKS`].
    pub(super) fn turn(&mut self, links: usize) -> Range<usize> {
        let from = if self.next < links { self.next } else { 0 };
        self.next = from + CHECKS.max(links.div_ceil(ROUND));
        from..self.next
    }

    /// Watches process `pid`, unless it is already watched, or is not visible here. It has no descriptor before
    /// [`Self::open`]: a job that begins makes many links, and to make one waits for none of these.
    pub(super) fn add(&mut self, pid: i32) {
        let Err(at) = self.place(pid) else { return };
        if pid > 0 {
            self.list.insert(at, Watch { process: Identity::unknown(pid), fd: None, new: true });
            self.new_since = clock::now_ns();
        }
    }

    /// No process was added for a while, and descriptors are to be opened.
    pub(super) fn want_descriptors(&self, now: u64) -> bool {
        self.new_since != 0 && now.saturating_sub(self.new_since) > QUIET_NS
    }

    /// Opens descriptors of the processes that were added since the last call, while all of them are few. From then on the
    /// end of one makes `token` of its id ready in `epoll`.
    pub(super) fn open(&mut self, token: impl Fn(i32) -> u64, epoll: &LateSet) {
        if std::mem::take(&mut self.new_since) == 0 {
            return;
        }
        let few = self.list.len() <= watched::watches_max();
        for watch in &mut self.list {
            let (new, pid) = (std::mem::take(&mut watch.new), watch.process.pid);
            if !few {
                watch.fd.take().iter().for_each(|fd| epoll.remove(fd.as_fd()));
            } else if new {
                let fd = watched::watch(pid);
                watch.fd = fd.filter(|fd| epoll.add(fd.as_fd(), token(pid)).is_ok());
            }
        }
    }

    /// Whether process `pid` was found to have ended, and no other one has the id now.
    pub(super) fn is_dead(&mut self, pid: i32) -> bool {
        if self.dead.contains(&pid) && process::is_running(pid) {
            self.dead.remove(&pid);
        }
        self.dead.contains(&pid)
    }

    /// Stops watching process `pid`.
    pub(super) fn remove(&mut self, pid: i32, epoll: &LateSet) {
        if let Ok(at) = self.place(pid) {
            if let Some(fd) = self.list.remove(at).fd {
                epoll.remove(fd.as_fd());
            }
        }
    }

    /// A thread is about to sleep, and no ring may wake it when a peer ends: an endpoint of a process that calls exec(2)
    /// ends silently. So it is to be woken within so many nanoseconds; `None`: there is nothing to look at. False: there is
    /// no timer to wake it, for lack of descriptors or memory.
    pub(super) fn wake_within(&mut self, within: Option<u64>) -> bool {
        let Some(timer) = &self.timer else { return true };
        let Some(within) = within else {
            if std::mem::take(&mut self.wakes_at) != 0 {
                timer.disarm();
            }
            return true;
        };
        let now = clock::now_ns();
        let at = now.saturating_add(within);
        if now < self.wakes_at && self.wakes_at <= at {
            return true;
        }
        let armed = timer.arm(at).is_ok();
        self.wakes_at = if armed { at } else { 0 };
        armed
    }

    /// For tests: as if all watched processes had ended and their ids belonged to others now.
    #[cfg(test)]
    pub(super) fn replace_all(&mut self, epoll: &LateSet) {
        for watch in &mut self.list {
            watch.process.learn();
            watch.process = watch.process.earlier();
            if let Some(fd) = watch.fd.take() {
                epoll.remove(fd.as_fd());
            }
        }
    }

    /// For tests: the time at which a sleeping thread is woken, nanoseconds; 0: never.
    #[cfg(test)]
    pub(super) fn wakes_at(&self) -> u64 {
        self.wakes_at
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{Deaf, End, end};
    use super::*;
    use crate::transport::Transport;
    use crate::transport::shm::config::CmaPolicy;

    #[test]
    fn every_peer_has_its_turn_within_a_round() {
        for links in [0, 1, 15, 16, 17, 64, 65, 1000, 1023] {
            let mut watches = Watches::default();
            let mut seen = vec![0; links];
            for _ in 0..3 * ROUND {
                let turn = watches.turn(links);
                assert!(turn.len() <= CHECKS.max(links / ROUND + 1), "{links}");
                turn.filter(|at| *at < links).for_each(|at| seen[at] += 1);
            }
            assert!(seen.iter().all(|times| *times >= 3), "{links}");
        }
    }

    #[test]
    fn checks_take_a_small_share_of_the_processors() {
        let mut watches = Watches::default();
        assert_eq!(watches.every_ns(), LIVENESS_NS);
        // 256 processes with a processor each.
        watches.has_checked(1_000_000, 1);
        assert_eq!(watches.every_ns(), LIVENESS_NS);
        // 1024 processes on two processors.
        for every in [1_000, 2_000, 4_000, 8_000, 16_000, 512 * SHARE] {
            let every = every * 1_000_000;
            watches.has_checked(1_000_000, 512);
            assert_eq!(watches.every_ns(), every);
        }
        watches.has_checked(u64::MAX, 512);
        assert_eq!(watches.every_ns(), LIVENESS_MAX_NS);
        watches.has_checked(0, 512);
        assert_eq!(watches.every_ns(), LIVENESS_NS);
    }

    #[test]
    fn a_job_of_many_begins_with_rare_checks() {
        let mut watches = Watches::default();
        for (links, each) in [(15, 8), (127, 1), (255, 16), (1023, 1)] {
            watches.expect(links, each);
            assert_eq!(watches.every_ns(), LIVENESS_NS, "{links} {each}");
        }
        // 1024 processes on two processors.
        watches.expect(1023, 512);
        let first = watches.every_ns();
        assert!(first > 10 * LIVENESS_NS && first < LIVENESS_MAX_NS, "{first}");
        watches.expect(10, 5);
        assert_eq!(watches.every_ns(), first, "until a check tells");
        watches.expect(usize::MAX, u64::MAX);
        assert_eq!(watches.every_ns(), LIVENESS_MAX_NS);
        watches.has_checked(0, 512);
        assert_eq!(watches.every_ns(), LIVENESS_NS);
    }

    #[test]
    fn descriptors_are_opened_a_moment_after_the_last_link() {
        let (mut a, b) = (end(CmaPolicy::Off), end(CmaPolicy::Off));
        a.connect(&b);
        let now = a.shm.watches.new_since;
        assert!(!a.shm.watches.want_descriptors(now + QUIET_NS));
        assert!(a.shm.watches.want_descriptors(now + QUIET_NS + 1));
        a.shm.watches.new_since = now - 2 * QUIET_NS;
        // Without a check, which would open them too.
        a.shm.watches.checked_at = clock::now_ns();
        a.shm.poll_sockets(&mut a.peers, &mut Deaf);
        assert!(a.shm.watches.list.iter().all(|watch| watch.fd.is_some()));
        assert!(!a.shm.watches.want_descriptors(u64::MAX));
    }

    #[test]
    fn a_process_has_a_descriptor_from_the_next_look_or_sleep_on() {
        let (mut a, mut b) = (end(CmaPolicy::Off), end(CmaPolicy::Off));
        let opened = |end: &End| end.shm.watches.list.iter().all(|watch| watch.fd.is_some());
        a.connect(&b);
        assert!(!opened(&a), "not with the link");
        b.shm.accept(1, &mut b.peers, &mut Deaf);
        assert!(b.shm.watches.list.len() == 1 && !opened(&b));
        assert!(a.shm.sleep());
        a.shm.awake();
        b.turn(&mut Deaf);
        assert!(opened(&a) && opened(&b));
    }

    #[test]
    fn a_thread_that_sleeps_sees_the_end_of_a_process_that_another_one_has_linked() {
        let (mut a, b) = (end(CmaPolicy::Off), end(CmaPolicy::Off));
        assert!(a.shm.sleep());
        a.connect(&b);
        assert!(a.shm.watches.list.iter().all(|watch| watch.fd.is_some()));
    }

    #[test]
    fn the_timer_is_armed_while_there_are_links() {
        let timer = LateTimer::of(std::sync::Arc::new(LateSet::new().unwrap()), 0);
        let mut watches = Watches::new(Some(timer));
        assert!(watches.wake_within(None));
        assert_eq!(watches.wakes_at(), 0);
        assert!(watches.wake_within(Some(LIVENESS_NS)));
        let at = watches.wakes_at();
        assert!(at > clock::now_ns());
        assert!(watches.wake_within(Some(LIVENESS_NS)));
        assert_eq!(watches.wakes_at(), at, "armed once");
        assert!(watches.wake_within(Some(LIVENESS_NS / 10)));
        assert!(watches.wakes_at() < at, "sooner");
        watches.wakes_at = 1;
        assert!(watches.wake_within(None));
        assert_eq!(watches.wakes_at(), 0, "one that has woken wakes no more");
    }
}
