//! Memory for packets, kept until the peer has acknowledged them: from a pool, which a device reads without a copy, or
//! from the heap.
//!
//! The maker of a packet owns its buffer like any other memory. After it is posted, a device may read it at the same
//! time. A race with a write could only harm the receiver of the packet, so a buffer is reused for another packet only
//! after the device has completed it. A packet that is sent again gets another header before the same bytes meanwhile:
//! the device may send a mix of the old and the new header, which the receiver drops because its tag is wrong.

use super::errno::Result;
use super::pages::Pages;
use super::simd;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes of a part of a pool: parts are registered with the device one by one, as they are needed.
pub(crate) const PART: usize = 512 * 1024;
/// Parts of a pool.
pub(crate) const PARTS: usize = 2;
/// Alignment: each buffer begins on a cache line of its own.
const LINE: usize = 64;

/// Buffers of one size, in memory that one device reads. A buffer that was cut off never returns to the pool: the owner
/// of a [`Buffer`] keeps it for its next packet.
pub(crate) struct Pool {
    memory: Pages,
    each: usize,
    /// Bytes cut off so far, from the beginning.
    cut: AtomicUsize,
    /// Packets posted to the device, from this memory or not, and how many of them, from the first one on, the device
    /// has read.
    posted: AtomicU64,
    complete: AtomicU64,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool of {} bytes each", self.each)
    }
}

impl Pool {
    /// A pool of buffers of `each` bytes. Error: ENOMEM.
    pub(crate) fn new(each: usize) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            memory: Pages::anonymous(PARTS * PART)?,
            each,
            cut: AtomicUsize::new(0),
            posted: AtomicU64::new(0),
            complete: AtomicU64::new(0),
        }))
    }

    /// Bytes of each buffer.
    #[inline]
    pub(crate) fn each(&self) -> usize {
        self.each
    }

    /// A buffer that was never used, all zeroes; `None`: none is left.
    pub(crate) fn cut(self: &Arc<Self>) -> Option<Buffer> {
        let step = self.each.next_multiple_of(LINE);
        let next = |at: usize| {
            // Each buffer lies within one part.
            let at = if at % PART + step > PART { at.next_multiple_of(PART) } else { at };
            (step > 0 && step <= PART && at + step <= PARTS * PART).then_some(at)
        };
        let order = Ordering::Relaxed;
        let before = self.cut.fetch_update(order, order, |at| Some(next(at)? + step)).ok()?;
        let at = next(before)?;
        // SAFETY: within the mapping, and no other buffer's: no part of it is cut off twice.
        let at = unsafe { self.memory.base().add(at) };
        Some(Buffer { at, len: 0, capacity: self.each as u32, pool: Some(self.clone()), until: 0 })
    }

    /// The part in which `bytes` lie; `None`: not in this pool.
    #[inline]
    pub(crate) fn part_of(&self, bytes: &[u8]) -> Option<usize> {
        let base = self.memory.base().addr().get();
        let at = bytes.as_ptr().addr().wrapping_sub(base);
        (at < PARTS * PART && at % PART + bytes.len() <= PART).then_some(at / PART)
    }

    /// The beginning of a part, for registration.
    pub(crate) fn part(&self, part: usize) -> Option<NonNull<u8>> {
        // SAFETY: within the mapping.
        (part < PARTS).then(|| unsafe { self.memory.base().add(part * PART) })
    }

    /// Packets posted to the device so far.
    pub(crate) fn posted(&self) -> u64 {
        self.posted.load(Ordering::Relaxed)
    }

    /// Sets how many packets were posted to the device in all.
    #[inline]
    pub(crate) fn set_posted(&self, count: u64) {
        self.posted.store(count, Ordering::Relaxed);
    }

    /// The device has read the first `count` packets, whatever becomes of the others.
    #[inline]
    pub(crate) fn set_complete(&self, count: u64) {
        self.complete.store(count, Ordering::Release);
    }
}

/// Room for one packet. It holds as many bytes as were asked for; before they are written their values are unspecified.
pub(crate) struct Buffer {
    at: NonNull<u8>,
    len: u32,
    capacity: u32,
    /// `None`: from the heap.
    pool: Option<Arc<Pool>>,
    /// The device is done with this packet once it has read so many packets.
    until: u64,
}

// SAFETY: the buffer is the only owner of its memory, except for a device, which only reads.
unsafe impl Send for Buffer {}
// SAFETY: the buffer is the only owner of its memory, except for a device, which only reads.
unsafe impl Sync for Buffer {}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer of {} of {} bytes", self.len, self.capacity)
    }
}

impl Default for Buffer {
    /// A buffer without room.
    fn default() -> Self {
        let none: &mut [u8] = &mut [];
        Self { at: NonNull::from(none).cast(), len: 0, capacity: 0, pool: None, until: 0 }
    }
}

impl Buffer {
    /// A buffer from the heap, with room for `capacity` bytes, less than 4 GiB, all zeroes. `None`: no memory.
    pub(crate) fn try_new(capacity: usize) -> Option<Self> {
        let capacity = u32::try_from(capacity).ok()?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(capacity as usize).ok()?;
        memory.resize(capacity as usize, 0);
        let memory: &mut [u8] = Box::leak(memory.into_boxed_slice());
        Some(Self { at: NonNull::from(memory).cast(), len: 0, capacity, pool: None, until: 0 })
    }

    #[cfg(test)]
    pub(crate) fn new(capacity: usize) -> Self {
        Self::try_new(capacity).unwrap_or_default()
    }

    /// Bytes of room.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// It belongs to a pool.
    #[inline]
    pub(crate) fn is_pooled(&self) -> bool {
        self.pool.is_some()
    }

    /// Sets its length to `len` bytes, or to its capacity.
    #[inline]
    pub(crate) fn resize(&mut self, len: usize) {
        self.len = len.min(self.capacity()) as u32;
    }

    /// Fills it with `bytes`, or with as many of them as it has room for.
    #[inline]
    pub(crate) fn hold(&mut self, bytes: &[u8]) {
        self.resize(bytes.len());
        // SAFETY: both have that many bytes, and this buffer is the only owner of its own.
        unsafe { simd::copy(bytes.as_ptr(), self.at.as_ptr(), self.len as usize) };
    }

    /// It was sent: the last packet posted to the device may be this one.
    #[inline]
    pub(crate) fn note_sent(&mut self) {
        if let Some(pool) = &self.pool {
            self.until = pool.posted();
        }
    }

    /// The device has finished with it.
    #[inline]
    pub(crate) fn is_read(&self) -> bool {
        self.pool.as_ref().is_none_or(|pool| self.until <= pool.complete.load(Ordering::Acquire))
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: that many bytes exist, all initialised, and this buffer is their only owner.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len as usize) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: that many bytes exist, all initialised, and this buffer is their only owner.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len as usize) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.pool.is_none() {
            let memory = std::ptr::slice_from_raw_parts_mut(self.at.as_ptr(), self.capacity());
            // SAFETY: the box that `new` leaked.
            drop(unsafe { Box::from_raw(memory) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_holds_what_it_has_room_for() {
        let mut buffer = Buffer::new(4);
        assert!(buffer.is_empty() && buffer.is_read() && !buffer.is_pooled());
        buffer.hold(&[1, 2, 3, 4, 5]);
        assert_eq!(&buffer[..], [1, 2, 3, 4]);
        buffer.resize(2);
        buffer[1] = 7;
        assert_eq!(&buffer[..], [1, 7]);
        buffer.resize(9);
        assert_eq!(&buffer[..], [1, 7, 3, 4]);
        let mut none = Buffer::default();
        none.resize(1);
        assert!(none.is_empty());
    }

    #[test]
    fn no_two_buffers_of_a_pool_share_memory_and_none_crosses_a_part() {
        for each in [100, 1024, 4096, 9000, PART] {
            let pool = Pool::new(each).unwrap();
            let all: Vec<Buffer> = std::iter::from_fn(|| pool.cut()).collect();
            let step = each.next_multiple_of(LINE);
            assert_eq!(all.len(), PARTS * (PART / step), "{each}");
            let mut places = Vec::new();
            for mut buffer in all {
                assert_eq!(buffer.capacity(), each);
                buffer.resize(each);
                assert!(buffer.iter().all(|byte| *byte == 0));
                buffer.fill(1);
                let part = pool.part_of(&buffer).unwrap();
                assert!(pool.part(part).unwrap().as_ptr().cast_const() <= buffer.as_ptr());
                places.push(buffer.as_ptr().addr());
            }
            places.sort_unstable();
            assert!(places.windows(2).all(|two| two[1] - two[0] >= step));
        }
        let pool = Pool::new(64).unwrap();
        assert_eq!(pool.part_of(&[0; 64]), None);
        assert_eq!(pool.part(PARTS), None);
        assert!(Pool::new(PART + 1).unwrap().cut().is_none());
    }

    #[test]
    fn a_buffer_is_read_once_all_that_was_posted_before_is() {
        let pool = Pool::new(64).unwrap();
        let mut buffer = pool.cut().unwrap();
        assert!(buffer.is_read());
        pool.set_posted(3);
        assert!(buffer.is_read());
        buffer.note_sent();
        for complete in 0..3 {
            pool.set_complete(complete);
            assert!(!buffer.is_read());
        }
        pool.set_complete(3);
        assert!(buffer.is_read());
    }
}
