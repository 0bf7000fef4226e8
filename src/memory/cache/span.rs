//! A range of addresses, in whole pages.

/// The addresses from `start` to `end`, without `end`; never empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    /// The first address.
    pub(crate) start: usize,
    /// The address after the last.
    pub(crate) end: usize,
}

impl Span {
    /// The pages that `len` bytes at `addr` touch. `None`: no bytes, or the address space ends before.
    pub(crate) fn pages(addr: usize, len: usize, page: usize) -> Option<Self> {
        let end = addr.checked_add(len)?.checked_next_multiple_of(page)?;
        let start = addr - addr % page;
        (len > 0).then_some(Self { start, end })
    }

    /// Length, bytes.
    pub(crate) fn len(self) -> usize {
        self.end - self.start
    }

    /// Whether `other` lies within this range.
    pub(crate) fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Whether the two ranges have an address in common.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The smallest range that contains both.
    pub(crate) fn hull(self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole() {
        let pages = |addr, len| Span::pages(addr, len, 4096).map(|span| (span.start, span.end));
        assert_eq!(pages(4096, 4096), Some((4096, 8192)));
        assert_eq!(pages(4095, 2), Some((0, 8192)));
        assert_eq!(pages(5000, 1), Some((4096, 8192)));
        assert_eq!(pages(5000, 0), None);
        assert_eq!(pages(usize::MAX - 5, 6), None);
        assert_eq!(pages(usize::MAX - 5000, 4000), None);
    }
}
