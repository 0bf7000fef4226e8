//! Memory for when the system has none. When malloc(3) fails, Rust's containers end the process; a library must not
//! do that. So failing allocations of this library are served from a reserve of its own. Operations under way can then
//! finish, and calls that create something fail with -FI_ENOMEM while much of the reserve is in use ([`is_low`]).
//! Once the reserve is exhausted too, or for one allocation larger than the reserve, the process ends.
//!
//! The reserve is in the data of the shared object; its pages cost nothing until they are used.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the reserve.
const SIZE: usize = 2 << 20;
/// With more bytes of it in use than this, nothing new is created.
const LOW: usize = SIZE / 4;

/// An arena that gives out pieces in sequence, and starts again when all of them have been returned.
struct Arena {
    bytes: UnsafeCell<[u8; SIZE]>,
    /// Upper half: pieces in use. Lower half: bytes given out.
    state: AtomicU64,
}

// SAFETY: each piece belongs to the caller that got it; the rest is atomic.
unsafe impl Sync for Arena {}

const ONE: u64 = 1 << 32;

impl Arena {
    const fn new() -> Self {
        Self { bytes: UnsafeCell::new([0; SIZE]), state: AtomicU64::new(0) }
    }

    fn base(&self) -> *mut u8 {
        self.bytes.get().cast()
    }

    #[inline]
    fn owns(&self, at: *mut u8) -> bool {
        at.addr().wrapping_sub(self.base().addr()) < SIZE
    }

    /// A piece, or null.
    #[cold]
    #[inline(never)]
    fn take(&self, layout: Layout) -> *mut u8 {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            let given = (state % ONE) as usize;
            let unaligned = self.base().addr() + given;
            let Some(at) = unaligned.checked_next_multiple_of(layout.align()) else {
                return null_mut();
            };
            let begin = given + (at - unaligned);
            let end = match begin.checked_add(layout.size()) {
                Some(end) if end <= SIZE => end,
                _ => return null_mut(),
            };
            let next = (state / ONE + 1) * ONE + end as u64;
            match self.state.compare_exchange_weak(
                state,
                next,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return self.base().wrapping_add(begin),
                Err(now) => state = now,
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn give_back(&self) {
        let next = |state: u64| Some(if state / ONE == 1 { 0 } else { state - ONE });
        let _ = self.state.fetch_update(Ordering::Release, Ordering::Relaxed, next);
    }

    fn in_use(&self) -> usize {
        (self.state.load(Ordering::Relaxed) % ONE) as usize
    }
}

static ARENA: Arena = Arena::new();

/// Whether so much of the reserve is in use that nothing new should be created.
#[inline]
pub(crate) fn is_low() -> bool {
    ARENA.in_use() > LOW
}

/// The system's allocator, with the reserve behind it.
pub(crate) struct Reserved;

// SAFETY: all memory is the system's, or a piece of the arena with the requested size and alignment that has no other
// user until it is returned.
unsafe impl GlobalAlloc for Reserved {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        #[cfg(test)]
        if layout.size() >= tests::FAILS_FROM.get() {
            return null_mut();
        }
        // SAFETY: the caller's guarantees are passed on.
        let at = unsafe { System.alloc(layout) };
        if at.is_null() { ARENA.take(layout) } else { at }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        #[cfg(test)]
        if layout.size() >= tests::FAILS_FROM.get() {
            return null_mut();
        }
        // SAFETY: the caller's guarantees are passed on.
        let at = unsafe { System.alloc_zeroed(layout) };
        if !at.is_null() {
            return at;
        }
        let at = ARENA.take(layout);
        if !at.is_null() {
            // SAFETY: a piece of that many bytes; it may have been in use before.
            unsafe { at.write_bytes(0, layout.size()) };
        }
        at
    }

    /// Not inline: two thousand places drop something, most of them while a panic unwinds. Inline it was 7 % of the code.
    #[inline(never)]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if ARENA.owns(at) {
            ARENA.give_back();
        } else {
            // SAFETY: the caller's guarantees are passed on; the memory is the system's.
            unsafe { System.dealloc(at, layout) };
        }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        #[cfg(test)]
        if size >= tests::FAILS_FROM.get() {
            return null_mut();
        }
        if !ARENA.owns(at) {
            // SAFETY: the caller's guarantees are passed on; the memory is the system's.
            let larger = unsafe { System.realloc(at, layout, size) };
            if !larger.is_null() {
                return larger;
            }
        }
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else { return null_mut() };
        // SAFETY: as the trait requires: another piece, into which the shorter length is copied.
        unsafe {
            let other = self.alloc(wanted);
            if !other.is_null() {
                other.copy_from_nonoverlapping(at, layout.size().min(size));
                self.dealloc(at, layout);
            }
            other
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        /// Allocations of this thread of at least so many bytes fail, as if the reserve were exhausted too.
        pub(super) static FAILS_FROM: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Calls `f` while allocations of at least `bytes` fail.
    pub(crate) fn without_memory<R>(bytes: usize, f: impl FnOnce() -> R) -> R {
        FAILS_FROM.set(bytes);
        let result = f();
        FAILS_FROM.set(usize::MAX);
        result
    }

    #[test]
    fn pieces_are_aligned_apart_and_back_at_the_end() {
        static OWN: Arena = Arena::new();
        let arena = &OWN;
        let layouts = [(1, 1), (100, 64), (8, 8), (4096, 4096), (3, 1)];
        let layouts = layouts.map(|(size, align)| Layout::from_size_align(size, align).unwrap());
        for _ in 0..3 {
            let mut end = arena.base().addr();
            for layout in layouts {
                let at = arena.take(layout);
                assert!(arena.owns(at) && at.addr() % layout.align() == 0 && at.addr() >= end);
                end = at.addr() + layout.size();
            }
            assert!(arena.in_use() > 4096);
            layouts.iter().for_each(|_| arena.give_back());
            assert_eq!(arena.in_use(), 0);
        }
    }

    #[test]
    fn more_than_there_is_is_not_given() {
        static OWN: Arena = Arena::new();
        let arena = &OWN;
        let layout = |size| Layout::from_size_align(size, 8).unwrap();
        assert!(arena.take(layout(SIZE + 1)).is_null());
        assert!(!arena.take(layout(SIZE - 8)).is_null());
        assert!(arena.in_use() > LOW);
        assert!(arena.take(layout(64)).is_null());
        assert!(!arena.owns(null_mut()) && !arena.owns(arena.base().wrapping_add(SIZE)));
    }

    #[test]
    fn containers_grow_in_the_reserve() {
        let first = Layout::array::<u64>(4).unwrap();
        // SAFETY: each piece is used with the layout that it was allocated with, and returned once.
        unsafe {
            let at = ARENA.take(first).cast::<u64>();
            let mut list = Vec::from_raw_parts(at, 0, 4);
            list.extend([1u64, 2, 3, 4]);
            assert!(ARENA.owns(list.as_mut_ptr().cast()));
            list.push(5);
            assert!(!ARENA.owns(list.as_mut_ptr().cast()), "the system has some again");
            assert_eq!(list, [1, 2, 3, 4, 5]);
        }
        assert_eq!(ARENA.in_use(), 0);
    }
}
