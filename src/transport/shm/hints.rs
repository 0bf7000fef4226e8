//! Words in which senders say that a ring has something, so that the receiver need not look at the rings of idle links.
//!
//! An endpoint looks directly at the rings that are busy, and at one word for all others, whose links are "parked". The
//! sender of a parked link sets a bit for it after it has published: first in one of [`GROUPS`] words, then in the
//! summary, which has a bit for each of those and one that says that the receiver sleeps. The receiver takes the bits in
//! the opposite order. So no bit is left without one in the summary, and a sender whose receiver is about to sleep either
//! sees that or is seen.
//!
//! A sender reads whether its link is parked from the ring's flags, without a fence. The receiver therefore looks directly
//! at a ring for some time after it has parked it, until what was published before the sender could see that is visible
//! (`SETTLES_NS`).
//!
//! All endpoints of a process have their words in one file, of which each peer maps one page. No page is used again:
//! a peer of a closed endpoint would take the next one's sleep for that of the first, and ring another doorbell.

use crate::sys::Errno;
use crate::sys::order::{self, Word};
use crate::sys::per_process::PerProcess;
use crate::sys::shared_memory::SharedMemory;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Words that have a bit for each parked link.
const GROUPS: usize = 63;
/// Links that may have bits.
pub(super) const LINKS_MAX: usize = GROUPS * 64;
/// The bit of the summary that says that the receiver sleeps.
const SLEEPING: u64 = 1 << 63;
/// Offset of the first group; the summary is at 0, in another cache line.
const GROUPS_AT: usize = 64;
/// Bytes from the words of one endpoint to those of the next: a page of any processor.
const PAGE: usize = 64 * 1024;
/// Endpoints, one after the other, that have their words in the same file.
const PAGES: usize = 1024;

/// Bytes of the words, and of one that reserving may leave undefined.
const LEN: usize = GROUPS_AT + GROUPS * 8 + 8;

/// The words of an endpoint.
pub(super) trait Words {
    type Word: Word;

    fn summary(&self) -> &Self::Word;

    /// `None`: there is no such group.
    fn group(&self, group: usize) -> Option<&Self::Word>;

    /// Sets the bit of link `number`, after something was published. True: the receiver sleeps, and its doorbell has to be
    /// rung.
    fn raise(&self, number: u32) -> bool {
        self.set(number) & SLEEPING != 0
            && self.summary().fetch_and(!SLEEPING, Ordering::AcqRel) & SLEEPING != 0
    }

    /// Sets the bit of link `number` and wakes nobody. Returns what the summary was.
    fn set(&self, number: u32) -> u64 {
        let (group, bit) = (number / 64, 1 << (number % 64));
        let Some(word) = self.group(group as usize) else { return 0 };
        // These and those of `take` are in one order, in which the receiver takes the group after the summary: if the summary
        // still has the bit after the group has, the receiver has yet to take both.
        word.fetch_or(bit, Ordering::SeqCst);
        order::ordered();
        let before = self.summary().load(Ordering::SeqCst);
        if before & (1 << group) != 0 && before & SLEEPING == 0 {
            return before;
        }
        self.summary().fetch_or(1 << group, Ordering::SeqCst)
    }

    /// Whether some bit is set.
    #[inline]
    fn is_raised(&self) -> bool {
        self.summary().load(Ordering::Relaxed) & !SLEEPING != 0
    }

    /// Takes all bits; calls `look` with the number of each link that had one.
    fn take(&self, mut look: impl FnMut(u32)) {
        let groups = self.summary().fetch_and(SLEEPING, Ordering::SeqCst) & !SLEEPING;
        order::ordered();
        for group in ones(groups) {
            let word = self.group(group as usize);
            let bits = word.map_or(0, |word| word.swap(0, Ordering::SeqCst));
            ones(bits).for_each(|bit| look(64 * group + bit));
        }
    }

    /// Announces sleep. False, and no sleep: some bit is set.
    fn sleep(&self) -> bool {
        self.summary().fetch_or(SLEEPING, Ordering::AcqRel) & !SLEEPING == 0
    }

    /// Withdraws the announcement.
    fn awake(&self) {
        if self.summary().load(Ordering::Relaxed) & SLEEPING != 0 {
            self.summary().fetch_and(!SLEEPING, Ordering::AcqRel);
        }
    }
}

/// The numbers of the bits that are set.
fn ones(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(bit)
    })
}

/// Words in shared memory.
#[derive(Debug)]
struct Shared {
    memory: SharedMemory,
    /// Stands for the words if the mapping were too short.
    none: AtomicU64,
}

impl Shared {
    fn new(memory: SharedMemory) -> Self {
        Self { memory, none: AtomicU64::new(0) }
    }
}

impl Words for Shared {
    type Word = AtomicU64;

    #[inline]
    fn summary(&self) -> &AtomicU64 {
        self.memory.atomic(0).unwrap_or(&self.none)
    }

    fn group(&self, group: usize) -> Option<&AtomicU64> {
        if group < GROUPS { self.memory.atomic(GROUPS_AT + 8 * group) } else { None }
    }
}

/// The file with the words of all endpoints of this process.
#[derive(Debug)]
struct File {
    fd: OwnedFd,
    /// Pages that were given to endpoints.
    given: AtomicUsize,
}

/// Shared by the endpoints of this process.
static FILE: PerProcess<Weak<File>> = PerProcess::new();

/// A page that no endpoint had before, in the shared file or in a new one. Errors: those of [`SharedMemory::create`].
fn next_page() -> Result<(Arc<File>, usize), Errno> {
    let mut shared = FILE.lock();
    if let Some(file) = shared.upgrade() {
        let page = file.given.fetch_add(1, Ordering::Relaxed);
        if page < PAGES {
            return Ok((file, page));
        }
    }
    let fd = SharedMemory::reserve("udrv", PAGES * PAGE, 0)?;
    let file = Arc::new(File { fd, given: AtomicUsize::new(1) });
    *shared = Arc::downgrade(&file);
    Ok((file, 0))
}

/// The words of an endpoint, for itself.
#[derive(Debug)]
pub(super) struct Hints {
    file: Arc<File>,
    page: usize,
    words: Shared,
}

impl Hints {
    /// Fresh words. Errors: those of [`SharedMemory::create`].
    pub(super) fn new() -> Result<Self, Errno> {
        let (file, page) = next_page()?;
        let memory = SharedMemory::attach_part(&file.fd, page * PAGE, LEN)?;
        memory.reserve_more(0, LEN)?;
        Ok(Self { file, page, words: Shared::new(memory) })
    }

    /// What a peer has to know to set bits: the file, and the offset in it.
    pub(super) fn address(&self) -> (BorrowedFd<'_>, u32) {
        (self.file.fd.as_fd(), (self.page * PAGE) as u32)
    }
}

impl Words for Hints {
    type Word = AtomicU64;

    #[inline]
    fn summary(&self) -> &AtomicU64 {
        self.words.summary()
    }

    fn group(&self, group: usize) -> Option<&AtomicU64> {
        self.words.group(group)
    }
}

/// The bit of a link in the words of its receiver.
#[derive(Debug)]
pub(super) struct Hint {
    words: Shared,
    number: u32,
}

impl Hint {
    /// Bit `number` of the words at `offset` of a file that a peer passed. Errors: those of [`SharedMemory::attach_part`].
    pub(super) fn new(file: &OwnedFd, (offset, number): (u32, u32)) -> Result<Self, Errno> {
        let memory = SharedMemory::attach_part(file, offset as usize, LEN)?;
        Ok(Self { words: Shared::new(memory), number })
    }

    /// See [`Words::raise`].
    pub(super) fn raise(&self) -> bool {
        self.words.raise(self.number)
    }
}

#[cfg(all(loom, test))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(hints: &Hints) -> Vec<u32> {
        let mut all = Vec::new();
        hints.take(|number| all.push(number));
        all
    }

    #[test]
    fn bits_of_peers_are_taken_once() {
        let hints = Hints::new().unwrap();
        let (fd, offset) = hints.address();
        let file = fd.try_clone_to_owned().unwrap();
        let of = |number| Hint::new(&file, (offset, number)).unwrap();
        assert!(!hints.is_raised());
        let numbers = [0, 1, 63, 64, 1000, LINKS_MAX as u32 - 1];
        for number in numbers {
            assert!(!of(number).raise() && !of(number).raise());
        }
        assert!(hints.is_raised());
        assert_eq!(taken(&hints), numbers);
        assert!(!hints.is_raised() && taken(&hints).is_empty());
        // No such links.
        assert!(!of(LINKS_MAX as u32).raise() && !of(u32::MAX).raise());
        assert!(!hints.is_raised());
    }

    #[test]
    fn a_sleeper_is_woken_once_and_does_not_sleep_on_bits() {
        let hints = Hints::new().unwrap();
        assert!(hints.sleep() && !hints.is_raised());
        assert!(hints.raise(7) && !hints.raise(7));
        assert!(!hints.sleep());
        assert_eq!(taken(&hints), [7]);
        hints.awake();
        assert!(!hints.raise(8));
        assert_eq!(taken(&hints), [8]);
    }

    #[test]
    fn endpoints_have_words_of_their_own_in_one_file() {
        let [a, b] = [Hints::new().unwrap(), Hints::new().unwrap()];
        a.raise(3);
        assert!(a.is_raised() && !b.is_raised());
        // Other tests may have begun a new file.
        assert!(!Arc::ptr_eq(&a.file, &b.file) || a.page != b.page);
    }

    #[test]
    fn peers_of_a_closed_endpoint_leave_the_next_ones_alone() {
        let _keeps_the_file = Hints::new().unwrap();
        let closed = Hints::new().unwrap();
        let (fd, offset) = closed.address();
        let late = Hint::new(&fd.try_clone_to_owned().unwrap(), (offset, 3)).unwrap();
        drop(closed);
        let next: Vec<Hints> = (0..PAGES + 1).map(|_| Hints::new().unwrap()).collect();
        assert!(next.iter().all(Hints::sleep));
        assert!(!late.raise(), "nobody sleeps there");
        assert!(next.iter().all(|hints| !hints.is_raised()));
        assert!(next.iter().any(|hints| !Arc::ptr_eq(&hints.file, &next[0].file)));
    }
}
