//! The memory of a ring: a segment of shared memory, or a model of one that loom watches (`ring::model`).
//!
//! # Safety
//!
//! A word is made from a position inside the mapping; the caller guarantees that the position is valid.
#![allow(unsafe_code)]

use crate::sys::shared_memory::SharedMemory;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// A word that both ends access.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn fetch_or(&self, bits: u32, order: Ordering) -> u32;
    fn fetch_and(&self, bits: u32, order: Ordering) -> u32;
}

/// Memory of a ring.
pub(super) trait Storage {
    type Word: Word;

    /// First byte. What lies behind the slots may be mapped elsewhere ([`Self::whole`]).
    fn base(&self) -> NonNull<u8>;

    /// First byte of a mapping of all of it. `None`: the system has no memory for the mapping now.
    #[inline(always)]
    fn whole(&self) -> Option<NonNull<u8>> {
        Some(self.base())
    }

    fn len(&self) -> usize;

    /// The word at `place`.
    ///
    /// # Safety
    /// Inside the memory and aligned, and only ever used atomically.
    unsafe fn word(&self, place: *mut u8) -> &Self::Word;

    /// Reserves `len` bytes at `offset`. False: the system has no memory for them.
    fn reserve(&self, offset: usize, len: usize) -> bool {
        let _ = (offset, len);
        true
    }

    /// Gives reserved bytes back. False: the system does not take them.
    fn release(&self, offset: usize, len: usize) -> bool {
        let _ = (offset, len);
        true
    }

    /// A fence that is in one total order with all others.
    fn fence();

    /// Marks `len` plain bytes at `place` as written since the last word was stored (for loom).
    #[inline(always)]
    fn written(&self, place: *const u8, len: usize) {
        let _ = (place, len);
    }

    /// Marks `len` plain bytes at `place` as read (for loom).
    #[inline(always)]
    fn read(&self, place: *const u8, len: usize) {
        let _ = (place, len);
    }
}

impl Storage for SharedMemory {
    type Word = AtomicU32;

    #[inline(always)]
    fn base(&self) -> NonNull<u8> {
        Self::base(self)
    }

    #[inline(always)]
    fn whole(&self) -> Option<NonNull<u8>> {
        Self::whole(self)
    }

    fn len(&self) -> usize {
        Self::len(self)
    }

    #[inline(always)]
    unsafe fn word(&self, place: *mut u8) -> &AtomicU32 {
        // SAFETY: the caller guarantees a valid position.
        unsafe { AtomicU32::from_ptr(place.cast()) }
    }

    fn reserve(&self, offset: usize, len: usize) -> bool {
        self.reserve_more(offset, len).is_ok()
    }

    fn release(&self, offset: usize, len: usize) -> bool {
        Self::release(self, offset, len)
    }

    #[inline(always)]
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

impl<S: Storage> Storage for Arc<S> {
    type Word = S::Word;

    #[inline(always)]
    fn base(&self) -> NonNull<u8> {
        S::base(self)
    }

    #[inline(always)]
    fn whole(&self) -> Option<NonNull<u8>> {
        S::whole(self)
    }

    fn len(&self) -> usize {
        S::len(self)
    }

    #[inline(always)]
    unsafe fn word(&self, place: *mut u8) -> &S::Word {
        // SAFETY: the caller guarantees a valid position.
        unsafe { S::word(self, place) }
    }

    fn reserve(&self, offset: usize, len: usize) -> bool {
        S::reserve(self, offset, len)
    }

    fn release(&self, offset: usize, len: usize) -> bool {
        S::release(self, offset, len)
    }

    #[inline(always)]
    fn fence() {
        S::fence();
    }

    #[inline(always)]
    fn written(&self, place: *const u8, len: usize) {
        S::written(self, place, len);
    }

    #[inline(always)]
    fn read(&self, place: *const u8, len: usize) {
        S::read(self, place, len);
    }
}

/// Memory whose first byte is kept beside it: to look it up would take another cache line of each link.
#[derive(Debug)]
pub(super) struct Near<S> {
    base: NonNull<u8>,
    memory: S,
}

// SAFETY: `base` is only what `memory` says.
unsafe impl<S: Send> Send for Near<S> {}
// SAFETY: as above.
unsafe impl<S: Sync> Sync for Near<S> {}

impl<S: Storage> Near<S> {
    pub(super) fn new(memory: S) -> Self {
        Self { base: memory.base(), memory }
    }

    pub(super) fn memory(&self) -> &S {
        &self.memory
    }
}

impl<S: Storage> Storage for Near<S> {
    type Word = S::Word;

    #[inline(always)]
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    #[inline(always)]
    fn whole(&self) -> Option<NonNull<u8>> {
        self.memory.whole()
    }

    fn len(&self) -> usize {
        self.memory.len()
    }

    #[inline(always)]
    unsafe fn word(&self, place: *mut u8) -> &S::Word {
        // SAFETY: the caller guarantees a valid position.
        unsafe { self.memory.word(place) }
    }

    fn reserve(&self, offset: usize, len: usize) -> bool {
        self.memory.reserve(offset, len)
    }

    fn release(&self, offset: usize, len: usize) -> bool {
        self.memory.release(offset, len)
    }

    #[inline(always)]
    fn fence() {
        S::fence();
    }

    #[inline(always)]
    fn written(&self, place: *const u8, len: usize) {
        self.memory.written(place, len);
    }

    #[inline(always)]
    fn read(&self, place: *const u8, len: usize) {
        self.memory.read(place, len);
    }
}

impl Word for AtomicU32 {
    #[inline(always)]
    fn load(&self, order: Ordering) -> u32 {
        Self::load(self, order)
    }

    #[inline(always)]
    fn store(&self, value: u32, order: Ordering) {
        Self::store(self, value, order);
    }

    #[inline(always)]
    fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        Self::fetch_or(self, bits, order)
    }

    #[inline(always)]
    fn fetch_and(&self, bits: u32, order: Ordering) -> u32 {
        Self::fetch_and(self, bits, order)
    }
}
