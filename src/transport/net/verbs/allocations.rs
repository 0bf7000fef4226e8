//! Allocations of GPUs that are kept registered, or that cannot be.
//!
//! The kernel keeps the memory of an allocation that its program has freed as long as it is registered, and what is
//! registered takes of the GPU's window on the bus. So what is kept is bounded, and those that were freed are looked for
//! every [`SWEEP_NS`].

use crate::sys::Errno;
use crate::transport::net::agreement::pause::{Failures, PAUSE_NS};

/// Most allocations that are kept.
const COUNT_MAX: usize = 64;
/// Most bytes of them that were not used lately.
const BYTES_MAX: usize = 16 << 30;
/// For so long they count as used, nanoseconds.
const USED_NS: u64 = 1_000_000_000;
/// Time between two searches for those that were freed, nanoseconds.
pub(super) const SWEEP_NS: u64 = 100_000_000;

/// An allocation that is registered, or why it is not.
#[derive(Debug)]
struct Kept<A, R> {
    of: A,
    /// Bytes that are registered.
    len: usize,
    made: Result<R, Errno>,
    used_at: u64,
    failures: Failures,
}

/// Allocations `A`, and what was made of each: `R`.
#[derive(Debug)]
pub(super) struct Allocations<A, R> {
    /// The least recently used first.
    list: Vec<Kept<A, R>>,
    swept_at: u64,
}

impl<A, R> Default for Allocations<A, R> {
    fn default() -> Self {
        Self { list: Vec::new(), swept_at: 0 }
    }
}

impl<A: PartialEq, R: Clone> Allocations<A, R> {
    /// The registration of `of`, made now by `make` if there is none, with its bytes. Errors: those of `make`, which is tried again later, except after
    /// EOPNOTSUPP. It may ask for [room](Self::with_room) here.
    pub(super) fn get(
        &mut self,
        of: A,
        now: u64,
        make: impl FnOnce(&mut Self) -> Result<(R, usize), Errno>,
    ) -> Result<R, Errno> {
        let before = self.list.iter().position(|kept| kept.of == of).map(|at| self.list.remove(at));
        let failures = match before {
            Some(mut known) if known.is_final(now) => {
                known.used_at = now;
                let made = known.made.clone();
                self.list.push(known);
                return made;
            }
            Some(Kept { failures, .. }) => failures,
            None => Failures::default(),
        };
        let mut kept = match make(self) {
            Ok((made, len)) => {
                Kept { of, len, made: Ok(made), used_at: now, failures: Failures::default() }
            }
            Err(errno) => Kept { of, len: 0, made: Err(errno), used_at: now, failures },
        };
        if kept.made.is_err() {
            kept.failures.again(now, PAUSE_NS);
        }
        let made = kept.made.clone();
        self.list.push(kept);
        self.bound(now);
        made
    }

    /// What `make` makes. Where there is no room (ENOMEM), those that were not used lately end, and it is tried once more.
    /// `tell` hears of the failure that remains. Errors: that.
    pub(super) fn with_room<T, E: Copy + Into<Errno>>(
        &mut self,
        now: u64,
        mut make: impl FnMut() -> Result<T, E>,
        tell: impl FnOnce(E),
    ) -> Result<T, Errno> {
        let made = match make() {
            Err(failure)
                if Into::<Errno>::into(failure) == Errno(libc::ENOMEM) && self.make_room(now) =>
            {
                make()
            }
            made => made,
        };
        made.map_err(|failure| {
            tell(failure);
            failure.into()
        })
    }

    /// Does not keep what was made of `of`.
    pub(super) fn forget(&mut self, of: &A) {
        self.list.retain(|kept| kept.of != *of);
    }

    /// Ends all that were not used lately. Returns whether there were any.
    fn make_room(&mut self, now: u64) -> bool {
        let before = self.list.len();
        let idle = |kept: &Kept<A, R>| now.saturating_sub(kept.used_at) >= USED_NS;
        self.list.retain(|kept| kept.made.is_err() || !idle(kept));
        self.list.len() < before
    }

    /// Ends the least recently used ones beyond the bounds: not those that are used in turn, whatever their size.
    fn bound(&mut self, now: u64) {
        let mut bytes = 0;
        let newest = self.list.iter().rev().enumerate();
        let within = newest.take_while(|(nth, kept)| {
            bytes += kept.len;
            let used = now.saturating_sub(kept.used_at) < USED_NS;
            *nth == 0 || *nth < COUNT_MAX && (used || bytes <= BYTES_MAX)
        });
        let within = within.count();
        self.list.drain(..self.list.len() - within);
    }

    /// When [`Self::sweep`] has something to do.
    pub(super) fn next_sweep(&self) -> Option<u64> {
        let keeps = self.list.iter().any(|kept| kept.made.is_ok());
        keeps.then_some(self.swept_at + SWEEP_NS)
    }

    /// Ends those that are there no more.
    pub(super) fn sweep(&mut self, now: u64, is_there: impl Fn(&A) -> bool) {
        if !self.list.is_empty() && now.saturating_sub(self.swept_at) >= SWEEP_NS {
            self.swept_at = now;
            self.list.retain(|kept| is_there(&kept.of));
        }
    }
}

impl<A, R> Kept<A, R> {
    /// Whether it is not to be tried again now.
    fn is_final(&self, now: u64) -> bool {
        match &self.made {
            Ok(_) | Err(Errno(libc::EOPNOTSUPP)) => true,
            Err(_) => self.failures.pause(now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: Errno = Errno(libc::EOPNOTSUPP);
    const SHORT: Errno = Errno(libc::ENOMEM);

    #[test]
    fn what_failed_for_a_while_is_tried_again() {
        let mut list = Allocations::<u8, u8>::default();
        for (of, errno, tried) in [(1, SHORT, true), (2, NEVER, false)] {
            assert_eq!(list.get(of, 0, |_| Err(errno)), Err(errno));
            assert_eq!(list.get(of, PAUSE_NS - 1, |_| unreachable!()), Err(errno), "not at once");
            let mut made = false;
            let then = list.get(of, PAUSE_NS, |_| {
                made = true;
                Ok((of, 10))
            });
            assert_eq!((made, then), (tried, if tried { Ok(of) } else { Err(errno) }));
        }
        assert_eq!(list.get(1, u64::MAX, |_| unreachable!()), Ok(1));
        // Pauses get longer.
        assert_eq!(list.get(3, 0, |_| Err(SHORT)), Err(SHORT));
        assert_eq!(list.get(3, PAUSE_NS, |_| Err(SHORT)), Err(SHORT));
        assert_eq!(list.get(3, 3 * PAUSE_NS - 1, |_| unreachable!()), Err(SHORT));
        assert_eq!(list.get(3, 3 * PAUSE_NS, |_| Ok((3, 1))), Ok(3));
    }

    #[test]
    fn the_least_recently_used_give_way_by_number_and_by_bytes() {
        let mut list = Allocations::<usize, usize>::default();
        let keeps = |list: &mut Allocations<usize, usize>, of| {
            let mut kept = true;
            let _ = list.get(of, 0, |_| {
                kept = false;
                Ok((of, 1))
            });
            kept
        };
        (0..COUNT_MAX).for_each(|of| assert!(!keeps(&mut list, of)));
        assert!(keeps(&mut list, 0), "and is the newest now");
        assert!(!keeps(&mut list, COUNT_MAX));
        assert!(keeps(&mut list, 0) && !keeps(&mut list, 1));
        let later = USED_NS;
        assert_eq!(list.get(1000, later, |_| Ok((1, BYTES_MAX + 1))), Ok(1));
        assert_eq!(list.list.len(), 1, "alone it may be longer");
        for _ in 0..2 {
            assert_eq!(list.get(1001, later, |_| Ok((2, 1))), Ok(2));
            assert_eq!(list.get(1000, later, |_| Ok((0, 1))), Ok(1), "used in turn, both stay");
        }
        assert_eq!(list.get(1001, 2 * later, |_| Ok((3, 1))), Ok(2));
        assert_eq!(list.get(1002, 2 * later, |_| Ok((4, 1))), Ok(4));
        assert_eq!(list.get(1000, 2 * later, |_| Ok((5, 1))), Ok(5), "not used for a time");
    }

    #[test]
    fn where_there_is_no_room_those_that_are_idle_end() {
        let mut list = Allocations::<u8, u8>::default();
        let mut get = |of, now, full: u8| {
            let (mut tries, mut told) = (0, 0);
            let make = || {
                tries += 1;
                if tries > full { Ok((of, 1)) } else { Err(SHORT) }
            };
            let got = list.get(of, now, |list| list.with_room(now, make, |_| told += 1));
            (got, tries, told)
        };
        assert_eq!([get(1, 0, 0), get(2, 1, 0)], [(Ok(1), 1, 0), (Ok(2), 1, 0)]);
        assert_eq!(get(3, 1, 1), (Err(SHORT), 1, 1), "both were used lately");
        assert_eq!(get(4, USED_NS, 1), (Ok(4), 2, 0), "nothing is said of what went well");
        assert_eq!([get(2, USED_NS, 0), get(1, USED_NS, 0)], [(Ok(2), 0, 0), (Ok(1), 1, 0)]);
        assert_eq!(get(5, 3 * USED_NS, 2), (Err(SHORT), 2, 1), "once more, and no oftener");
    }

    #[test]
    fn what_is_not_kept_has_the_room_of_those_that_are_idle() {
        let mut list = Allocations::<u8, u8>::default();
        assert_eq!(list.get(1, 0, |_| Ok((1, 1))), Ok(1));
        let mut alone = |now, errno: Errno| {
            let mut tries = 0;
            let make = || {
                tries += 1;
                if tries > 1 { Ok(()) } else { Err(errno) }
            };
            (list.with_room(now, make, |_| ()), list.list.len())
        };
        assert_eq!(alone(USED_NS - 1, SHORT), (Err(SHORT), 1), "it was used lately");
        assert_eq!(alone(USED_NS, NEVER), (Err(NEVER), 1), "room is not what it lacks");
        assert_eq!(alone(USED_NS, SHORT), (Ok(()), 0));
    }

    #[test]
    fn what_was_freed_is_given_back_within_a_time() {
        let mut list = Allocations::<u8, u8>::default();
        let now = 10 * SWEEP_NS;
        for of in [1, 2] {
            assert_eq!(list.get(of, now, |_| Ok((of, 1))), Ok(of));
        }
        assert_eq!(list.next_sweep(), Some(SWEEP_NS), "it is due");
        list.sweep(now, |of| *of != 1);
        assert_eq!(list.next_sweep(), Some(now + SWEEP_NS));
        assert_eq!(list.list.len(), 1);
        list.sweep(now + SWEEP_NS - 1, |_| false);
        assert_eq!(list.list.len(), 1, "it is not asked all the time");
        list.sweep(now + SWEEP_NS, |_| false);
        assert!(list.list.is_empty());
        assert_eq!(list.next_sweep(), None);
    }
}
