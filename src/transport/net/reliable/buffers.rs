//! Memory for packets: taken from free lists by size, so that the data path does not allocate, and
//! bounded.

use super::PACKET_MAX;

/// Sizes of the classes, bytes, beside that of the largest datagram; the last is that of the longest packet.
const SIZES: [usize; 6] = [256, 2048, 4096, 8192, 20 * 1024, PACKET_MAX];
/// Bytes of free buffers kept for later.
const KEEP: usize = 4 << 20;

/// The buffers of one endpoint.
#[derive(Debug)]
pub(super) struct Buffers {
    free: [Vec<Vec<u8>>; SIZES.len() + 1],
    sizes: [usize; SIZES.len() + 1],
    /// Bytes in use, by capacity.
    used: usize,
    /// Bytes that lie in the free lists.
    idle: usize,
    limit: usize,
}

impl Buffers {
    /// At most `limit` bytes, in buffers for packets, and for datagrams of at most `large` bytes.
    pub(super) fn new(large: usize, limit: usize) -> Self {
        let mut sizes = [large; SIZES.len() + 1];
        sizes.iter_mut().zip(SIZES).for_each(|(to, size)| *to = size);
        sizes.sort_unstable();
        Self { free: Default::default(), sizes, used: 0, idle: 0, limit }
    }

    /// The class for `len` bytes, and its size: the last one, if there is none.
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

    /// A buffer with room for `len` bytes, with any contents; `None` when the limit is reached.
    pub(super) fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        let (class, size) = self.class(len);
        if len > size || self.used + size > self.limit {
            return None;
        }
        self.used += size;
        if let Some(buffer) = self.free.get_mut(class).and_then(Vec::pop) {
            self.idle -= size;
            return Some(buffer);
        }
        Some(Vec::with_capacity(size))
    }

    /// Takes a buffer back. One without capacity was given back before.
    pub(super) fn give(&mut self, buffer: Vec<u8>) {
        let size = buffer.capacity();
        if size == 0 {
            return;
        }
        self.used = self.used.saturating_sub(size);
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

    /// True when `count` buffers for `len` bytes each can be taken.
    pub(super) fn has_room_for(&self, count: usize, len: usize) -> bool {
        self.has_room(count * self.class(len).1)
    }

    /// True while there is room for `len` bytes.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.used + len <= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_bounded() {
        let mut buffers = Buffers::new(9000, 20_000);
        assert_eq!(buffers.sizes, [256, 2048, 4096, 8192, 9000, 20 * 1024, PACKET_MAX]);
        assert!(buffers.take(PACKET_MAX + 1).is_none());
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
        assert!(buffers.has_room_for(1, 9000) && !buffers.has_room_for(1, 9001));
        assert!(buffers.take(9001).is_none());
    }
}
