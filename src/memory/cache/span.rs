//! A range of addresses, in whole pages.

/// From `start` up to and without `end`; never empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    /// The first address.
    pub(crate) start: usize,
    /// The first address that is no longer part of it.
    pub(crate) end: usize,
}

impl Span {
    /// The pages that `len` bytes at `addr` touch; `None` for no bytes, and where addresses end.
    pub(crate) fn pages(addr: usize, len: usize, page: usize) -> Option<Self> {
        let end = addr.checked_add(len)?.checked_next_multiple_of(page)?;
        let start = addr - addr % page;
        (len > 0).then_some(Self { start, end })
    }

    /// Bytes.
    pub(crate) fn len(self) -> usize {
        self.end - self.start
    }

    /// Whether all of `other` is part of it.
    pub(crate) fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Whether they have an address in common.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The least range with both in it.
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
