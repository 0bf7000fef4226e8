//! Memory for packets: bounded, and taken from free lists by size, so that the data path does not allocate.

use crate::sys::packets::{Buffer, Pool};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Sizes of the smaller classes, bytes; the last class is for the largest datagram.
const SIZES: [usize; 3] = [256, 2048, 4096];
/// Bytes of free buffers kept for later.
const KEEP: usize = 4 << 20;

/// The buffers of one endpoint.
#[derive(Debug)]
pub(super) struct Buffers {
    free: [Vec<Buffer>; SIZES.len() + 1],
    sizes: [usize; SIZES.len() + 1],
    /// Pools for packets of some sizes, from which a device sends without a copy.
    lent: Vec<Lent>,
    /// Bytes in use, by the capacity of the buffers.
    used: usize,
    /// Bytes in the free lists.
    idle: usize,
    limit: usize,
}

/// A pool of memory that a device sends from.
#[derive(Debug)]
struct Lent {
    pool: Arc<Pool>,
    /// Sizes of packets that are made there, bytes: larger than the next smaller class.
    sizes: RangeInclusive<usize>,
    free: Vec<Buffer>,
    /// Buffers that were given back before the device was known to be done with them.
    resting: VecDeque<Buffer>,
}

impl Lent {
    #[inline]
    fn take(&mut self) -> Option<Buffer> {
        if let Some(buffer) = self.free.pop() {
            return Some(buffer);
        }
        if self.resting.front().is_some_and(Buffer::is_read) {
            return self.resting.pop_front();
        }
        self.pool.cut()
    }
}

impl Buffers {
    /// At most `limit` bytes, in buffers for packets and for datagrams of at most `large` bytes.
    pub(super) fn new(large: usize, limit: usize) -> Self {
        let mut sizes = [large; SIZES.len() + 1];
        sizes.iter_mut().zip(SIZES).for_each(|(to, size)| *to = size);
        sizes.sort_unstable();
        Self { free: Default::default(), sizes, lent: Vec::new(), used: 0, idle: 0, limit }
    }

    /// From now on packets of the size class of `pool`'s buffers are made in `pool`, as long as it has room.
    pub(super) fn lend(&mut self, pool: Arc<Pool>) {
        let each = pool.each();
        let smaller = self.sizes.into_iter().filter(|size| *size < each).max().unwrap_or(0);
        let (free, resting) = (Vec::new(), VecDeque::new());
        self.lent.push(Lent { pool, sizes: smaller + 1..=each, free, resting });
    }

    /// The class for `len` bytes and its size; the last class if `len` is too long for any.
    #[inline]
    fn class(&self, len: usize) -> (usize, usize) {
        let mut class = (0, 0);
        for (i, size) in self.sizes.into_iter().enumerate() {
            class = (i, size);
            if len <= size {
                break;
            }
        }
        class
    }

    /// A buffer for `len` bytes, with arbitrary contents; `None` when the limit is reached, or there is no memory.
    pub(super) fn take(&mut self, len: usize) -> Option<Buffer> {
        let (class, size) = self.class(len);
        if len > size || self.used + size > self.limit {
            return None;
        }
        let buffer = match self.free.get_mut(class).and_then(Vec::pop) {
            Some(buffer) => {
                self.idle -= size;
                buffer
            }
            None => Buffer::try_new(size)?,
        };
        self.used += size;
        Some(buffer)
    }

    /// The same for a packet to send.
    #[inline]
    pub(super) fn take_to_send(&mut self, len: usize) -> Option<Buffer> {
        if let Some(lent) = self.lent.iter_mut().find(|lent| lent.sizes.contains(&len)) {
            let each = *lent.sizes.end();
            let buffer = if self.used + each <= self.limit { lent.take() } else { None };
            if buffer.is_some() {
                self.used += each;
                return buffer;
            }
        }
        self.take(len)
    }

    /// Makes `buffer` one that no device reads, with the same contents: a device may not have sent it yet, and what it
    /// reads does not change. False: there is no memory now.
    pub(super) fn detach(&mut self, buffer: &mut Buffer) -> bool {
        if buffer.is_read() {
            return true;
        }
        let Some(mut copy) = self.take(buffer.len()) else { return false };
        copy.hold(buffer);
        self.give(std::mem::replace(buffer, copy));
        true
    }

    /// Takes a buffer back. One without capacity was given back before.
    pub(super) fn give(&mut self, buffer: Buffer) {
        let size = buffer.capacity();
        if size == 0 {
            return;
        }
        self.used = self.used.saturating_sub(size);
        let pooled = buffer.is_pooled();
        if let Some(lent) = self.lent.iter_mut().find(|lent| pooled && lent.pool.each() == size) {
            if buffer.is_read() {
                lent.free.push(buffer);
            } else {
                lent.resting.push_back(buffer);
            }
            return;
        }
        let (class, class_size) = self.class(size);
        if class_size == size && self.idle + size <= KEEP {
            if let Some(list) = self.free.get_mut(class) {
                self.idle += size;
                list.push(buffer);
            }
        }
    }

    /// Bytes in use.
    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Puts `count` buffers for `len` bytes each into the free list, so that they can be taken. False: that is more than
    /// the limit, or there is no memory.
    pub(super) fn prepare(&mut self, count: usize, len: usize) -> bool {
        let (class, size) = self.class(len);
        let room = self.has_room(count * size);
        let Some(list) = self.free.get_mut(class).filter(|_| room) else { return false };
        while list.len() < count {
            let Some(buffer) = Buffer::try_new(size) else { return false };
            if list.try_reserve(1).is_err() {
                return false;
            }
            list.push(buffer);
            self.idle += size;
        }
        true
    }

    /// True while there is room for `len` bytes.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.used + len <= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::reserve::tests::without_memory;

    #[test]
    fn buffers_are_reused_and_bounded() {
        let mut buffers = Buffers::new(9000, 20_000);
        assert_eq!(buffers.sizes, [256, 2048, 4096, 9000]);
        let a = buffers.take(9000).unwrap();
        let b = buffers.take(8500).unwrap();
        assert_eq!(buffers.used(), 18_000);
        assert!(buffers.take(9000).is_none());
        let small = buffers.take(3).unwrap();
        assert_eq!(buffers.used(), 18_256);
        let at = a.as_ptr();
        buffers.give(a);
        buffers.give(small);
        let again = buffers.take(8193).unwrap();
        assert_eq!(again.as_ptr(), at);
        buffers.give(b);
        assert_eq!(buffers.used(), 9000);
        assert!(buffers.prepare(1, 9000) && !buffers.prepare(2, 9000));
        assert!(buffers.take(9001).is_none());
    }

    #[test]
    fn what_was_prepared_is_there_without_memory() {
        let mut buffers = Buffers::new(9000, 1 << 20);
        assert!(!without_memory(200, || buffers.prepare(2, 3000)));
        assert!(buffers.prepare(2, 3000));
        let taken = without_memory(200, || [(); 3].map(|()| buffers.take(4096).is_some()));
        assert_eq!(taken, [true, true, false]);
    }

    #[test]
    fn what_a_device_may_still_read_is_not_used_again() {
        let pool = Pool::new(4096).unwrap();
        let mut buffers = Buffers::new(4096, 1 << 30);
        buffers.lend(pool.clone());
        let pooled = |buffers: &mut Buffers, len| {
            let buffer = buffers.take_to_send(len).unwrap();
            assert!(buffer.capacity() >= len);
            buffer.is_pooled()
        };
        assert!(!pooled(&mut buffers, 2048) && buffers.take_to_send(4097).is_none());
        assert!(!buffers.take(4096).unwrap().is_pooled());

        // The device gets a packet, and another one that it still reads when that is known to have arrived.
        let mut first = buffers.take_to_send(4096).unwrap();
        let place = first.as_ptr();
        pool.set_posted(1);
        first.note_sent();
        let mut second = buffers.take_to_send(3000).unwrap();
        assert!(first.is_pooled() && second.is_pooled());
        assert_ne!(second.as_ptr(), place);
        pool.set_posted(2);
        second.note_sent();
        buffers.give(first);
        let third = buffers.take_to_send(4096).unwrap();
        assert!(third.is_pooled() && third.as_ptr() != place);
        pool.set_complete(1);
        let again = buffers.take_to_send(4096).unwrap();
        assert_eq!(again.as_ptr(), place);
        let place = second.as_ptr();
        pool.set_complete(2);
        buffers.give(second);
        assert_eq!(buffers.take_to_send(4096).unwrap().as_ptr(), place);

        // A buffer given back before it was read is not reused until it has been; meanwhile the heap supplies others.
        let mut taken: Vec<Buffer> =
            std::iter::from_fn(|| buffers.take_to_send(4096).filter(Buffer::is_pooled)).collect();
        let mut last = taken.pop().unwrap();
        let place = last.as_ptr();
        pool.set_posted(3);
        last.note_sent();
        let used = buffers.used();
        buffers.give(last);
        assert_eq!(buffers.used(), used - 4096);
        assert!(!pooled(&mut buffers, 4096));
        pool.set_complete(3);
        assert_eq!(buffers.take_to_send(4096).unwrap().as_ptr(), place);
    }

    #[test]
    fn those_of_a_pool_are_counted_too() {
        let pool = Pool::new(4096).unwrap();
        let mut buffers = Buffers::new(4096, 8192);
        buffers.lend(pool);
        assert!(buffers.prepare(2, 4000));
        let one = buffers.take_to_send(4000).unwrap();
        let two = buffers.take_to_send(4000).unwrap();
        assert!(one.is_pooled() && two.is_pooled() && buffers.take_to_send(4000).is_none());
        buffers.give(one);
        assert!(buffers.take_to_send(4000).unwrap().is_pooled());
    }
}
