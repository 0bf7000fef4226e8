//! Memory of an answer. libfabric frees it member by member with free(3) (`fi_freeinfo`), so it comes from calloc(3)
//! and never from Rust's allocator.

use std::ffi::{c_char, c_void};
use std::ptr::NonNull;

/// Zeroed bytes behind every structure: an application built for a later libfabric reads zeroes where its
/// structure is longer than this provider's.
const SLACK: usize = 64;

/// The allocations of an answer, freed unless all of them succeed.
#[derive(Default)]
pub(super) struct Parts {
    owned: Vec<NonNull<c_void>>,
}

impl Drop for Parts {
    fn drop(&mut self) {
        for part in &self.owned {
            // SAFETY: from calloc, and only this list refers to it.
            unsafe { libc::free(part.as_ptr()) };
        }
    }
}

impl Parts {
    /// Hands over all allocations: they are not freed here any more.
    pub(super) fn give(&mut self) {
        self.owned.clear();
    }

    fn zeroed(&mut self, len: usize) -> Option<NonNull<c_void>> {
        // SAFETY: any size is allowed; null is checked.
        let part = NonNull::new(unsafe { libc::calloc(1, len) })?;
        self.owned.push(part);
        Some(part)
    }

    pub(super) fn structure<T: Copy>(&mut self, value: T) -> Option<*mut T> {
        let at = self.zeroed(size_of::<T>() + SLACK)?.cast::<T>().as_ptr();
        // SAFETY: new memory that is large enough and aligned for every type.
        unsafe { at.write(value) };
        Some(at)
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Option<NonNull<c_void>> {
        let at = self.zeroed(bytes.len())?;
        // SAFETY: new memory of that length.
        unsafe { at.as_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Some(at)
    }

    pub(super) fn text(&mut self, text: &str) -> Option<*mut c_char> {
        let bytes: Vec<u8> = text.bytes().chain([0]).collect();
        Some(self.bytes(&bytes)?.as_ptr().cast())
    }
}
