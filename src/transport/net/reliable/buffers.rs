//! Memory for packets: taken from free lists by size, so that the data path does not allocate, and
//! bounded.

/// Sizes of the smaller classes, bytes; the last is the largest datagram.
const SMALL: usize = 256;
const MEDIUM: usize = 2048;
const LONG: usize = 4096;
/// Bytes of free buffers kept for later.
const KEEP: usize = 4 << 20;

/// The buffers of one endpoint.
#[derive(Debug)]
pub(super) struct Buffers {
    free: [Vec<Vec<u8>>; 4],
    large: usize,
    /// Bytes in use, by capacity.
    used: usize,
    /// Bytes that lie in the free lists.
    idle: usize,
    limit: usize,
}

impl Buffers {
    /// At most `limit` bytes, in buffers of at most `large` each.
    pub(super) fn new(large: usize, limit: usize) -> Self {
        let free = [const { Vec::new() }; 4];
        Self { free, large: large.max(LONG), used: 0, idle: 0, limit }
    }

    fn class(&self, len: usize) -> (usize, usize) {
        if len <= SMALL {
            (0, SMALL)
        } else if len <= MEDIUM {
            (1, MEDIUM)
        } else if len <= LONG {
            (2, LONG)
        } else {
            (3, self.large)
        }
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

    /// True while there is room for `len` bytes in buffers of the largest class.
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
        let a = buffers.take(9000).unwrap();
        let b = buffers.take(5000).unwrap();
        assert_eq!(buffers.used(), 18_000);
        assert!(buffers.take(9000).is_none());
        let small = buffers.take(3).unwrap();
        assert_eq!(buffers.used(), 18_256);
        let at = a.as_ptr();
        buffers.give(a);
        buffers.give(small);
        let again = buffers.take(4097).unwrap();
        assert_eq!(again.as_ptr(), at);
        buffers.give(b);
        assert_eq!(buffers.used(), 9000);
        assert!(buffers.take(9001).is_none());
    }
}
