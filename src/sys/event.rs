//! Doorbells (eventfd), timers (timerfd), and waiting for many of them (epoll, poll).

use super::cancel::Shield;
use super::errno::{Errno, Result, check, check_len};
use super::process::Home;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// An eventfd used as a doorbell: any number of rings is one wake-up.
#[derive(Debug)]
pub(crate) struct Doorbell(OwnedFd);

impl Doorbell {
    /// A new silent doorbell. Errors: EMFILE, ENFILE, ENOMEM.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: eventfd returns a new descriptor or -1.
        let fd = check(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })?;
        // SAFETY: `fd` is new and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Wakes the waiting threads. A full counter means that the doorbell is already ringing.
    pub(crate) fn ring(&self) {
        let one: u64 = 1;
        let _shield = Shield::raise();
        // SAFETY: writes eight bytes of a live local to an owned descriptor.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Silences it; returns whether it rang.
    pub(crate) fn silence(&self) -> bool {
        let mut value: u64 = 0;
        let _shield = Shield::raise();
        // SAFETY: reads eight bytes into a live local from an owned descriptor.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut value).cast(), 8) == 8 }
    }

    /// The descriptor to wait on.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A timerfd: a descriptor that becomes readable at a time.
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    /// A timer that is not armed. Errors: EMFILE, ENFILE, ENOMEM.
    pub(crate) fn new() -> Result<Self> {
        let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
        // SAFETY: timerfd_create returns a new descriptor or -1.
        let fd = check(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) })?;
        // SAFETY: `fd` is new and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes the timer readable at `at_ns` of the clock of `clock::now_ns`, replacing any earlier time. A
    /// time in the past means now.
    pub(crate) fn arm(&self, at_ns: u64) {
        self.set(at_ns.max(1)); // timerfd_settime(2): 0 disarms
    }

    /// Disarms the timer: it is not readable now or later.
    pub(crate) fn disarm(&self) {
        self.set(0);
    }

    fn set(&self, at_ns: u64) {
        const SECOND_NS: u64 = 1_000_000_000;
        // SAFETY: all zeroes is a valid itimerspec: no repetition.
        let mut time: libc::itimerspec = unsafe { std::mem::zeroed() };
        time.it_value.tv_sec = (at_ns / SECOND_NS) as _;
        time.it_value.tv_nsec = (at_ns % SECOND_NS) as _;
        // SAFETY: a valid time, and the old one is not requested. It cannot fail: the time is normalised.
        unsafe {
            libc::timerfd_settime(
                self.0.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &time,
                std::ptr::null_mut(),
            )
        };
    }

    /// The descriptor to wait on.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor of which several owners wait until it is readable.
pub(crate) type Watched = Arc<dyn AsFd + Send + Sync>;

/// A set of descriptors that are waited for together; itself a descriptor that can be waited for.
///
/// A forked child shares the set with its parent (epoll(7)): a removal by the child would affect both. So in a
/// child nothing is added, changed or removed.
#[derive(Debug)]
pub(crate) struct Epoll {
    fd: OwnedFd,
    home: Home,
}

impl Epoll {
    /// An empty set. Errors: EMFILE, ENFILE, ENOMEM; the error of a system-call filter that forbids waiting for it.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: epoll_create1 returns a new descriptor or -1.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: `fd` is new and has no other owner.
        let set = Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, home: Home::here() };
        // Fail now if waiting is forbidden: later, an event that cannot be read would look like no event.
        match set.wait(&mut [0], 0) {
            Ok(_) | Err(Errno(libc::EINTR)) => Ok(set),
            Err(e) => Err(e),
        }
    }

    /// False in a forked child of the process that made the set.
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }

    /// Adds `fd` (level-triggered, readable or hung up) under `token`. Errors: ENOMEM, ENOSPC; EPERM in a
    /// forked child.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, token)
    }

    /// Adds `fd` under `token` without its being waited for, until [`Self::watch_once`]. Errors: as `add`.
    pub(crate) fn add_silent(&self, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, libc::EPOLLONESHOT, token)
    }

    /// The member `fd` counts as ready once: when it is readable, now or later.
    pub(crate) fn watch_once(&self, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, libc::EPOLLIN | libc::EPOLLONESHOT, token)
    }

    fn control(
        &self,
        operation: libc::c_int,
        fd: BorrowedFd<'_>,
        events: libc::c_int,
        token: u64,
    ) -> Result<()> {
        if !self.is_here() {
            return Err(Errno(libc::EPERM));
        }
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: both descriptors live; `event` is valid for the call.
        check(unsafe {
            libc::epoll_ctl(self.fd.as_raw_fd(), operation, fd.as_raw_fd(), &mut event)
        })?;
        Ok(())
    }

    /// Whether the member `fd` also counts as ready when it is writable.
    pub(crate) fn watch_writable(&self, fd: BorrowedFd<'_>, token: u64, on: bool) -> Result<()> {
        let events = if on { libc::EPOLLIN | libc::EPOLLOUT } else { libc::EPOLLIN };
        self.control(libc::EPOLL_CTL_MOD, fd, events, token)
    }

    /// Changes the token of the member `fd`.
    pub(crate) fn rename(&self, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
        self.watch_writable(fd, token, false)
    }

    /// Removes `fd`; it is not an error if `fd` is not in the set.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    /// Fills `tokens` with the tokens of ready members, waiting up to `timeout_ms` (-1: for ever); returns how many.
    /// A signal ends the wait early with EINTR.
    pub(crate) fn wait(&self, tokens: &mut [u64], timeout_ms: i32) -> Result<usize> {
        const BATCH: usize = 32;
        let mut events = [const { MaybeUninit::<libc::epoll_event>::uninit() }; BATCH];
        let want = tokens.len().clamp(1, BATCH);
        // Not libc's epoll_wait, which is a cancellation point.
        // SAFETY: `events` has room for `want` entries; no signal mask.
        let n = check_len(unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait,
                self.fd.as_raw_fd(),
                events.as_mut_ptr(),
                want as libc::c_int,
                timeout_ms,
                std::ptr::null::<libc::sigset_t>(),
                0_usize,
            )
        } as isize)?;
        for (token, event) in tokens.iter_mut().zip(&events).take(n) {
            // SAFETY: the kernel has filled the first `n`.
            *token = unsafe { event.assume_init() }.u64;
        }
        Ok(n.min(tokens.len()))
    }

    /// The descriptor of the set, readable when a member is ready.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until one of `fds` is readable or has an error, or the timeout expires. A signal ends the
/// wait with EINTR.
pub(crate) fn wait_any<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout_ms: i32,
) -> Result<[bool; N]> {
    let mut entries =
        fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    let _shield = Shield::raise();
    // SAFETY: `N` valid entries.
    check(unsafe { libc::poll(entries.as_mut_ptr(), N as libc::nfds_t, timeout_ms) })?;
    Ok(entries.map(|entry| entry.revents != 0))
}

/// Blocks all signals in the calling thread: the application's signals are for its own threads.
/// Threads started by it inherit the mask.
pub(crate) fn block_signals() {
    // SAFETY: fills a local set and changes this thread's mask only.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut set);
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// Waits until `fd` is readable: true, or false after `timeout_ms` (-1: for ever). A signal ends
/// the wait with EINTR.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, timeout_ms: i32) -> Result<bool> {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let _shield = Shield::raise();
    // SAFETY: one valid pollfd.
    let n = check(unsafe { libc::poll(&mut entry, 1, timeout_ms) })?;
    if entry.revents & libc::POLLNVAL != 0 {
        return Err(Errno(libc::EBADF));
    }
    Ok(n > 0)
}

/// A duplicate of a descriptor. Errors: EMFILE, and those of a system-call filter.
pub(crate) fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    let forbidden = match fd.try_clone_to_owned() {
        Ok(copy) => return Ok(copy),
        Err(e) => Errno::from(e),
    };
    if forbidden.is_shortage() {
        return Err(forbidden);
    }
    // Without fcntl(2) this takes two steps.
    // SAFETY: a live descriptor; the call returns a new one or -1.
    let copy = check(unsafe { libc::dup(fd.as_raw_fd()) })?;
    // SAFETY: `copy` is new and has no other owner; FIOCLEX takes no argument (ioctl_tty(2)).
    unsafe {
        let copy = OwnedFd::from_raw_fd(copy);
        check(libc::ioctl(copy.as_raw_fd(), libc::FIOCLEX))?;
        Ok(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::now_ns;

    #[test]
    fn a_timer_is_readable_at_its_time() {
        let timer = Timer::new().unwrap();
        assert_eq!(wait_readable(timer.fd(), 0), Ok(false));
        let at = now_ns() + 20_000_000;
        timer.arm(at);
        assert_eq!(wait_readable(timer.fd(), 0), Ok(false));
        assert_eq!(wait_readable(timer.fd(), 5000), Ok(true));
        assert!(now_ns() >= at);
        timer.arm(now_ns() + 3_600_000_000_000);
        assert_eq!(wait_readable(timer.fd(), 0), Ok(false), "another time");
        for past in [0, 1, at] {
            timer.arm(past);
            assert_eq!(wait_readable(timer.fd(), 5000), Ok(true));
        }
        timer.disarm();
        assert_eq!(wait_readable(timer.fd(), 0), Ok(false));
        timer.arm(u64::MAX);
        assert_eq!(wait_readable(timer.fd(), 0), Ok(false));
    }

    #[test]
    fn the_one_that_is_ready_is_told() {
        let (quiet, loud) = (Doorbell::new().unwrap(), Doorbell::new().unwrap());
        assert_eq!(wait_any([quiet.fd(), loud.fd()], 0), Ok([false, false]));
        loud.ring();
        assert_eq!(wait_any([quiet.fd(), loud.fd()], -1), Ok([false, true]));
    }

    #[test]
    fn a_forked_child_leaves_the_set_of_its_parent_alone() {
        let (set, bell) = (Epoll::new().unwrap(), Doorbell::new().unwrap());
        set.add(bell.fd(), 7).unwrap();
        // SAFETY: the child only makes system calls, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = set.watch_writable(bell.fd(), 8, true).is_err();
            set.remove(bell.fd());
            // SAFETY: ends this process.
            unsafe { libc::_exit(i32::from(!refused || set.is_here())) };
        }
        let mut status = -1;
        // SAFETY: the child made above, and a live local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        bell.ring();
        let mut tokens = [0; 2];
        assert_eq!(set.wait(&mut tokens, 1000), Ok(1));
        assert_eq!(tokens[0], 7);
    }
}
