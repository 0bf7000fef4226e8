//! The descriptors of an endpoint, as a set that takes a descriptor of its own only once that is needed: when a thread
//! waits for the set, or when it has members that come and go. Until then the few members that every endpoint has are
//! looked at with poll(2). So a process with a thousand endpoints that only exist has no thousand sets.

use super::errno::{Errno, Result, check_len};
use super::event::{Epoll, Timer};
use super::process::Home;
use crate::telemetry::log;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

/// Members that are looked at without a descriptor of the set.
const FEW: usize = 8;

/// A member that is there as long as the endpoint.
#[derive(Clone, Copy, Debug)]
struct Lasting {
    fd: RawFd,
    token: u64,
}

/// See the top of this file. A forked child changes nothing, as with [`Epoll`].
#[derive(Debug)]
pub(crate) struct LateSet {
    set: OnceLock<Epoll>,
    /// The members, until `set` is there.
    lasting: Mutex<Vec<Lasting>>,
    /// A set that is ready when this one is, and the token there.
    above: OnceLock<(Arc<Self>, u64)>,
    home: Home,
}

impl LateSet {
    /// An empty set. Errors: those of [`Epoll::new`], when this process makes its first one.
    pub(crate) fn new() -> Result<Self> {
        static PERMITTED: OnceLock<()> = OnceLock::new();
        // Fail now if sets are forbidden, and not when a peer connects.
        if PERMITTED.get().is_none() {
            drop(Epoll::new()?);
            let _ = PERMITTED.set(());
        }
        let (set, above, lasting) = (OnceLock::new(), OnceLock::new(), Mutex::default());
        Ok(Self { set, lasting, above, home: Home::here() })
    }

    fn lasting(&self) -> MutexGuard<'_, Vec<Lasting>> {
        self.lasting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn permitted(&self) -> Result<()> {
        if self.home.is_here() { Ok(()) } else { Err(Errno(libc::EPERM)) }
    }

    /// The set with its descriptor. Errors: those of [`Epoll::new`]; ENOMEM, ENOSPC; EPERM in a forked child.
    fn made(&self) -> Result<&Epoll> {
        if let Some(set) = self.set.get() {
            return Ok(set);
        }
        self.permitted()?;
        let mut lasting = self.lasting();
        if self.set.get().is_none() {
            let set = Epoll::new()?;
            lasting.iter().try_for_each(|one| set.add(one.borrowed(), one.token))?;
            if let Some((above, token)) = self.above.get() {
                above.add_lasting(set.fd(), *token)?;
                lasting.iter().for_each(|one| above.remove(one.borrowed()));
            }
            lasting.clear();
            let _ = self.set.set(set); // only the holder of the lock does that
        }
        drop(lasting);
        self.set.get().ok_or(Errno(libc::ENOMEM))
    }

    /// Adds `fd` (level-triggered, readable or hung up) under `token`. Errors: those of [`Epoll::new`]; ENOMEM, ENOSPC;
    /// EPERM in a forked child.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
        self.made()?.add(fd, token)
    }

    /// As [`Self::add`], for a descriptor that is open until it is removed, or until nobody uses this set any more.
    pub(crate) fn add_lasting(&self, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
        self.permitted()?;
        let mut lasting = self.lasting();
        if self.set.get().is_some() || lasting.len() == FEW {
            drop(lasting);
            return self.add(fd, token);
        }
        if let Some((above, token)) = self.above.get() {
            above.add_lasting(fd, *token)?;
        }
        lasting.push(Lasting { fd: fd.as_raw_fd(), token });
        Ok(())
    }

    /// Makes `above` ready, under `token`, whenever this set is. Only the first call counts. Errors: as `add`.
    pub(crate) fn nest(&self, above: &Arc<Self>, token: u64) -> Result<()> {
        let lasting = self.lasting();
        match self.set.get() {
            Some(set) => above.add_lasting(set.fd(), token)?,
            None => {
                lasting.iter().try_for_each(|one| above.add_lasting(one.borrowed(), token))?;
            }
        }
        let _ = self.above.set((above.clone(), token));
        Ok(())
    }

    /// Removes `fd`; it is not an error if `fd` is not in the set.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        if let Some(set) = self.set.get() {
            return set.remove(fd);
        }
        if !self.home.is_here() {
            return;
        }
        let mut lasting = self.lasting();
        if let Some(set) = self.set.get() {
            return set.remove(fd);
        }
        lasting.retain(|one| one.fd != fd.as_raw_fd());
        if let Some((above, _)) = self.above.get() {
            above.remove(fd);
        }
    }

    /// As [`Epoll::watch_writable`].
    pub(crate) fn watch_writable(&self, fd: BorrowedFd<'_>, token: u64, on: bool) -> Result<()> {
        self.made()?.watch_writable(fd, token, on)
    }

    /// As [`Epoll::rename`].
    pub(crate) fn rename(&self, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
        self.made()?.rename(fd, token)
    }

    /// Fills `tokens` with those of ready members, without waiting; returns how many.
    #[inline]
    pub(crate) fn ready(&self, tokens: &mut [u64]) -> usize {
        match self.set.get() {
            Some(set) => set.wait(tokens, 0).unwrap_or(0),
            None => self.look_at_few(tokens),
        }
    }

    /// As [`Self::ready`], without the descriptor of the set.
    #[cold]
    fn look_at_few(&self, tokens: &mut [u64]) -> usize {
        // In a forked child a thread of the parent may hold the lock for ever. One that makes the set tells in the next call.
        let looked = match self.lasting.try_lock() {
            Ok(lasting) => look(&lasting, tokens),
            Err(TryLockError::Poisoned(lasting)) => look(&lasting.into_inner(), tokens),
            Err(TryLockError::WouldBlock) => return 0,
        };
        match looked {
            Ok(n) => n,
            Err(Errno(libc::EINTR)) => 0,
            // poll(2) is forbidden here.
            Err(_) => self.made().and_then(|set| set.wait(tokens, 0)).unwrap_or(0),
        }
    }

    /// The descriptor of the set, readable when a member is ready. Errors: as `add`.
    pub(crate) fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.made().map(Epoll::fd)
    }

    /// Whether the set has a descriptor.
    #[cfg(test)]
    pub(crate) fn is_made(&self) -> bool {
        self.set.get().is_some()
    }
}

impl Lasting {
    fn borrowed(&self) -> BorrowedFd<'_> {
        // SAFETY: the owner of a lasting member keeps it open until it is removed, or this set is not used any more.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

/// The tokens of those that are ready now. Errors: EINTR, ENOMEM; those of a system-call filter.
fn look(lasting: &[Lasting], tokens: &mut [u64]) -> Result<usize> {
    let mut entries = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; FEW];
    entries.iter_mut().zip(lasting).for_each(|(entry, one)| entry.fd = one.fd);
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Not libc's poll, which is a cancellation point.
    // SAFETY: as many valid entries, of which negative descriptors are ignored (poll(2)); no signal mask.
    check_len(unsafe {
        libc::syscall(
            libc::SYS_ppoll,
            entries.as_mut_ptr(),
            FEW,
            &raw const now,
            std::ptr::null::<libc::sigset_t>(),
            0_usize,
        )
    } as isize)?;
    let ready = entries.iter().zip(lasting).filter(|(entry, _)| entry.revents != 0);
    Ok(tokens.iter_mut().zip(ready).map(|(token, (_, one))| *token = one.token).count())
}

/// A timer that wakes the threads that wait for a set. It is made when it is first armed: most endpoints never sleep.
#[derive(Debug)]
pub(crate) struct LateTimer {
    set: Arc<LateSet>,
    token: u64,
    timer: OnceLock<Timer>,
}

impl LateTimer {
    /// A timer that will be a member of `set` under `token`.
    pub(crate) fn of(set: Arc<LateSet>, token: u64) -> Self {
        Self { set, token, timer: OnceLock::new() }
    }

    /// As [`Timer::arm`]. Errors: EMFILE, ENFILE, ENOMEM, ENOSPC; EPERM in a forked child: nothing will wake at that
    /// time.
    pub(crate) fn arm(&self, at_ns: u64) -> Result<()> {
        if self.timer.get().is_none() {
            let told = |e: &Errno| {
                log::limited!(cause: e.0, "there is no timer for a thread that waits ({e}): it polls");
            };
            let timer = Timer::new().inspect_err(told)?;
            self.set.add(timer.fd(), self.token).inspect_err(told)?;
            // Another thread was faster: its timer is in the set.
            if let Err(late) = self.timer.set(timer) {
                self.set.remove(late.fd());
            }
        }
        self.timer.get().iter().for_each(|timer| timer.arm(at_ns));
        Ok(())
    }

    /// As [`Timer::disarm`].
    pub(crate) fn disarm(&self) {
        self.timer.get().iter().for_each(|timer| timer.disarm());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::now_ns;
    use crate::sys::event::{Doorbell, wait_readable};

    fn ready(set: &LateSet) -> Vec<u64> {
        let mut tokens = [0; 16];
        let n = set.ready(&mut tokens);
        tokens[..n].sort_unstable();
        tokens[..n].to_vec()
    }

    fn bells<const N: usize>() -> [Doorbell; N] {
        std::array::from_fn(|_| Doorbell::new().unwrap())
    }

    #[test]
    fn members_are_told_with_and_without_a_descriptor() {
        let (set, [a, b, c]) = (LateSet::new().unwrap(), bells());
        set.add_lasting(a.fd(), 1).unwrap();
        set.add_lasting(b.fd(), 2).unwrap();
        assert_eq!(ready(&set), []);
        b.ring();
        assert_eq!((ready(&set), set.is_made()), (vec![2], false));
        a.ring();
        assert_eq!(set.ready(&mut [0]), 1, "there is room for one");
        set.remove(b.fd());
        assert_eq!((ready(&set), set.is_made()), (vec![1], false));
        set.add_lasting(b.fd(), 3).unwrap();
        set.add(c.fd(), 4).unwrap();
        assert_eq!((ready(&set), set.is_made()), (vec![1, 3], true));
        c.ring();
        assert_eq!(ready(&set), [1, 3, 4]);
        set.remove(a.fd());
        assert_eq!(ready(&set), [3, 4]);
        assert_eq!(wait_readable(set.fd().unwrap(), 0), Ok(true));
    }

    #[test]
    fn a_set_within_another_wakes_it_at_any_time() {
        for made in [false, true] {
            let [above, set] = [(); 2].map(|()| Arc::new(LateSet::new().unwrap()));
            let [a, b, c] = bells();
            set.add_lasting(a.fd(), 1).unwrap();
            set.nest(&above, 7).unwrap();
            set.add_lasting(b.fd(), 2).unwrap();
            if made {
                assert_eq!(wait_readable(above.fd().unwrap(), 0), Ok(false));
            }
            b.ring();
            assert_eq!(ready(&above), [7]);
            set.remove(b.fd());
            assert_eq!(ready(&above), []);
            set.add(c.fd(), 3).unwrap();
            assert_eq!(ready(&above), []);
            a.ring();
            c.ring();
            assert_eq!((ready(&above), ready(&set)), (vec![7], vec![1, 3]));
            assert_eq!(above.is_made(), made);
            set.remove(a.fd());
            set.remove(c.fd());
            assert_eq!(ready(&above), []);
        }
    }

    #[test]
    fn many_members_are_told() {
        let (set, all) = (LateSet::new().unwrap(), bells::<{ FEW + 2 }>());
        (0..).zip(&all).for_each(|(at, bell)| set.add_lasting(bell.fd(), at).unwrap());
        all.iter().for_each(Doorbell::ring);
        assert_eq!(ready(&set), (0..FEW as u64 + 2).collect::<Vec<_>>());
    }

    #[test]
    fn a_forked_child_leaves_the_set_of_its_parent_alone() {
        let (set, [bell, other]) = (LateSet::new().unwrap(), bells());
        set.add_lasting(bell.fd(), 7).unwrap();
        // SAFETY: the child only makes system calls, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = set.add(other.fd(), 8).is_err() && set.fd().is_err();
            set.remove(bell.fd());
            // SAFETY: ends this process.
            unsafe { libc::_exit(i32::from(!refused || set.is_made())) };
        }
        let mut status = -1;
        // SAFETY: the child made above, and a live local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_late_timer_takes_no_descriptor_before_it_is_armed() {
        let set = Arc::new(LateSet::new().unwrap());
        let timer = LateTimer::of(set.clone(), 7);
        timer.disarm();
        assert!(timer.timer.get().is_none());
        timer.arm(1).unwrap();
        let mut tokens = [0; 2];
        assert_eq!(
            (wait_readable(set.fd().unwrap(), 5000), set.ready(&mut tokens), tokens[0]),
            (Ok(true), 1, 7)
        );
        timer.disarm();
        assert_eq!(set.ready(&mut tokens), 0);
        timer.arm(now_ns() + 1_000_000).unwrap();
        assert_eq!(wait_readable(set.fd().unwrap(), 5000), Ok(true));
    }
}
