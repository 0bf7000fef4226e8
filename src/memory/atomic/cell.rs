//! Changes one element, so that other threads neither see nor lose half of a change.
//!
//! Aligned elements of 1 to 8 bytes are changed by atomic instructions. Other elements are changed under one of a set
//! of locks, chosen by address, which all domains of the process share. If the elements are aligned to 8 bytes, they too are
//! read and written as words, so that an application that reads them sees no half of a word.
//!
//! # Safety
//!
//! As in [`region`](crate::memory::region): the memory is lent by the application.
#![allow(unsafe_code)]

use super::arithmetic::Element;
use crate::memory::SegmentList;
use crate::sys::per_process::PerProcess;
use std::ptr::with_exposed_provenance_mut;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Longest element, bytes.
const LONGEST: usize = 32;
const WORD: usize = size_of::<u64>();

static LOCKS: [PerProcess<()>; 64] = [const { PerProcess::new() }; 64];

fn lock(addr: usize) -> Option<MutexGuard<'static, ()>> {
    LOCKS.get(addr / 16 % LOCKS.len()).map(PerProcess::lock)
}

/// Changes the element at `at` of `memory` to what `update` returns, or leaves it for `None`. Returns the old value.
/// `update` may be called several times.
#[inline]
pub(super) fn change<T: Element>(
    memory: &SegmentList,
    at: usize,
    update: impl Fn(T) -> Option<T>,
) -> T {
    match memory.address(at, T::SIZE) {
        Some(addr) if T::SIZE <= WORD && addr % T::SIZE == 0 => word(addr, update),
        Some(addr) if addr % WORD == 0 => {
            let _held = lock(addr);
            modify(update, |to| load(addr, to), |from| store(addr, from))
        }
        // The element is split between segments, or its address is not aligned.
        place => {
            let _held = lock(place.or_else(|| memory.address(at, 1)).unwrap_or(0));
            modify(
                update,
                |to| {
                    memory.copy_out(at, to);
                },
                |from| {
                    memory.copy_in(at, from);
                },
            )
        }
    }
}

fn modify<T: Element>(
    update: impl Fn(T) -> Option<T>,
    load: impl FnOnce(&mut [u8]),
    store: impl FnOnce(&[u8]),
) -> T {
    let mut bytes = [0; LONGEST];
    let Some(bytes) = bytes.get_mut(..T::SIZE) else { return T::ZERO };
    load(bytes);
    let old = T::read(bytes);
    if let Some(new) = update(old) {
        new.write(bytes);
        store(bytes);
    }
    old
}

/// Reads aligned words.
fn load(addr: usize, to: &mut [u8]) {
    for (i, to) in to.chunks_exact_mut(WORD).enumerate() {
        // SAFETY: the word lies within an element that the application lent, at a multiple of 8.
        let word = unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(addr + i * WORD)) };
        to.copy_from_slice(&word.load(Acquire).to_ne_bytes());
    }
}

/// Writes aligned words.
fn store(addr: usize, from: &[u8]) {
    for (i, from) in from.chunks_exact(WORD).enumerate() {
        // SAFETY: the word lies within an element that the application lent, at a multiple of 8.
        let word = unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(addr + i * WORD)) };
        if let Some(from) = from.first_chunk() {
            word.store(u64::from_ne_bytes(*from), Release);
        }
    }
}

macro_rules! exchange {
    ($atomic:ty, $bits:ty, $addr:expr, $update:expr) => {{
        // SAFETY: an element of this size that the application lent, at a multiple of its size.
        let cell = unsafe { <$atomic>::from_ptr(with_exposed_provenance_mut($addr)) };
        let mut bits = cell.load(Acquire);
        loop {
            let old = T::read(&bits.to_ne_bytes());
            let Some(new) = $update(old) else { return old };
            let mut bytes = [0; size_of::<$bits>()];
            new.write(&mut bytes);
            let new = <$bits>::from_ne_bytes(bytes);
            match cell.compare_exchange_weak(bits, new, AcqRel, Relaxed) {
                Ok(_) => return old,
                Err(now) => bits = now,
            }
        }
    }};
}

/// Changes an aligned element of 1, 2, 4 or 8 bytes.
#[inline]
fn word<T: Element>(addr: usize, update: impl Fn(T) -> Option<T>) -> T {
    match T::SIZE {
        1 => exchange!(AtomicU8, u8, addr, update),
        2 => exchange!(AtomicU16, u16, addr, update),
        4 => exchange!(AtomicU32, u32, addr, update),
        _ => exchange!(AtomicU64, u64, addr, update),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::cma::Range;
    use crate::transport::loopback::Loopback;

    /// A thread of the parent may have been inside at the fork.
    #[test]
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        let mut numbers = [1u128];
        let addr = numbers.as_mut_ptr().expose_provenance();
        let memory = Loopback::list(&[Range { addr: addr as u64, len: 16 }]).unwrap();
        let held = lock(addr);
        // SAFETY: the child does what is allowed after a fork, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: an integer argument.
            unsafe { libc::alarm(20) };
            let old = change(&memory, 0, |old: u128| Some(old + 1));
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(old != 1)) };
        }
        let mut status = -1;
        // SAFETY: the child made above, and a live local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        drop(held);
        assert_eq!(change(&memory, 0, |_: u128| None), 1);
    }
}
