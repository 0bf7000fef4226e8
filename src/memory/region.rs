//! Ranges of application memory that an operation borrows.
//!
//! # Safety
//!
//! An application that passes a buffer to `fi_send` or `fi_recv` promises that it stays valid until the operation
//! completes. That promise enters here, once, through the unsafe constructors. The layers above copy through safe
//! functions, and forbid `unsafe` themselves.
//!
//! # Device memory
//!
//! The processor cannot touch it, so every copy of it goes through the [`mover`]. A list that has a segment of device
//! memory is *marked*: the bits of its addresses that no address of the processor has say which segments those are, and
//! the length of its first segment is 0, which is found back from the length of the list. So the tests for "all bytes in
//! the first segment" and for "one segment", with which the fast paths begin, do not hold, and memory of the processor
//! costs what it cost before. An address that is used by mistake is none, and a fault.
#![allow(unsafe_code)]

use super::mover::{self, Import, Site, Transfer};
use crate::sys::cma::Range;
use crate::sys::cuda::Failure;
use crate::sys::{Errno, presence, simd, tcp};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// Most segments in one operation: `iov_limit` of the endpoint attributes.
pub(crate) const MAX_SEGMENTS: usize = 4;

/// A gather or scatter list of memory lent by the application, by value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SegmentList {
    segments: [Segment; MAX_SEGMENTS],
    len: usize,
}

/// One range of memory lent by the application.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Segment {
    addr: usize,
    len: usize,
}

/// Of the address of a segment: it is device memory.
const DEVICE: usize = 1 << 63;
/// Of the address of the first segment: the list is marked.
const MARKED: usize = 1 << 62;
/// The number of the segment's site.
const SITE: u32 = 58;
/// The bits that are an address.
const ADDRESS: usize = (1 << SITE) - 1;
/// No memory is at this address or a higher one, but for pointers with a tag in their highest bits.
pub(crate) const ADDRESSES_END: usize = 1 << SITE;

/// No buffer is so long, bytes: half of the addresses that a process has on x86-64.
const NO_BUFFER: usize = 1 << 46;

/// Longest copy that is made without a function call, bytes.
const FEW: usize = 128;

/// As [`std::ptr::copy_nonoverlapping`], with short copies inlined: for these, choosing a method costs more than the
/// copy.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[inline(always)]
unsafe fn copy_few(from: *const u8, to: *mut u8, len: usize) {
    /// Copies the first and the last `size_of::<T>()` bytes of a range that is one to two times as long as `T`.
    #[inline(always)]
    unsafe fn ends<T: Copy>(from: *const u8, to: *mut u8, len: usize) {
        let last = len - size_of::<T>();
        // SAFETY: `len >= size_of::<T>()`, so both accesses lie inside the ranges.
        unsafe {
            let (a, b) =
                (from.cast::<T>().read_unaligned(), from.add(last).cast::<T>().read_unaligned());
            to.cast::<T>().write_unaligned(a);
            to.add(last).cast::<T>().write_unaligned(b);
        }
    }
    // SAFETY: the caller guarantees `len` bytes at both ends; each branch stays inside them.
    unsafe {
        match len {
            8.. => match len {
                8..16 => ends::<u64>(from, to, len),
                16..=FEW => {
                    let mut at = 0;
                    while at + 16 < len {
                        to.add(at)
                            .cast::<u128>()
                            .write_unaligned(from.add(at).cast::<u128>().read_unaligned());
                        at += 16;
                    }
                    at = len - 16;
                    to.add(at)
                        .cast::<u128>()
                        .write_unaligned(from.add(at).cast::<u128>().read_unaligned());
                }
                _ => simd::copy(from, to, len),
            },
            4.. => ends::<u32>(from, to, len),
            2.. => ends::<u16>(from, to, len),
            1 => *to = *from,
            0 => {}
        }
    }
}

impl Segment {
    /// One range.
    ///
    /// # Safety
    /// As for [`SegmentList::contiguous`].
    #[inline]
    pub(crate) unsafe fn new(addr: *const u8, len: usize) -> Self {
        Self { addr: addr.expose_provenance(), len }
    }

    /// Its length, bytes.
    #[inline]
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// At most `len` bytes of it from `offset` on.
    #[inline]
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        Self { addr: self.addr + offset, len: len.min(self.len - offset) }
    }

    /// Its site, if it is device memory of a marked list.
    fn site(self) -> Option<Site> {
        (self.addr & DEVICE != 0).then(|| Site::numbered(self.addr >> SITE))
    }

    /// Copies between two segments, either of which may be device memory. Returns `len`, or 0: the device failed.
    ///
    /// # Safety
    /// Both are lent, or memory of this provider.
    unsafe fn copy(
        to: Self,
        from: Self,
        len: usize,
        host: impl FnOnce(*mut u8, *const u8),
    ) -> usize {
        let (a, b) = (to.addr & ADDRESS, from.addr & ADDRESS);
        match to.site().or_else(|| from.site()) {
            // SAFETY: the caller vouches.
            Some(site) => len * usize::from(unsafe { mover::copy(site, a, b, len) }),
            None => {
                host(
                    std::ptr::with_exposed_provenance_mut(to.addr),
                    std::ptr::with_exposed_provenance(from.addr),
                );
                len
            }
        }
    }

    /// Copies the segment to the beginning of `to`, which has room for it.
    #[inline]
    pub(crate) fn copy_out(self, to: &mut [u8]) {
        let len = self.len.min(to.len());
        let from = std::ptr::with_exposed_provenance::<u8>(self.addr);
        // SAFETY: the application lent `self.len` readable bytes; `to` is memory of this provider.
        unsafe { copy_few(from, to.as_mut_ptr(), len) };
    }
}

impl From<Segment> for SegmentList {
    #[inline]
    fn from(segment: Segment) -> Self {
        let none = Segment::default();
        Self { segments: [segment, none, none, none], len: segment.len }
    }
}

/// The memory of one operation, as its call passes it. Code that is generic over it is written once, and a call with
/// one buffer does not pay for the lists that other calls may have.
pub(crate) trait Buffers: Copy {
    /// Length of all segments, bytes.
    fn len(&self) -> usize;
    /// The one segment that has all of the bytes, if there is one.
    fn one(&self) -> Option<Segment>;
    /// The same memory as a list.
    fn list(&self) -> SegmentList;
}

impl Buffers for Segment {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    fn one(&self) -> Option<Segment> {
        Some(*self)
    }

    #[inline(always)]
    fn list(&self) -> SegmentList {
        (*self).into()
    }
}

impl Buffers for SegmentList {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    fn one(&self) -> Option<Segment> {
        let [first, ..] = self.segments;
        (first.len == self.len).then_some(first)
    }

    #[inline(always)]
    fn list(&self) -> SegmentList {
        *self
    }
}

impl SegmentList {
    /// No memory at all.
    pub(crate) const EMPTY: Self = Self { segments: [Segment { addr: 0, len: 0 }; 4], len: 0 };

    /// One contiguous range.
    ///
    /// # Safety
    /// The range stays valid for the copies that its operation makes (reads for a send, writes for a
    /// receive) until that operation has completed, been cancelled or its endpoint closed.
    pub(crate) unsafe fn contiguous(addr: *const u8, len: usize) -> Self {
        // SAFETY: the caller guarantees what `Segment::new` requires.
        unsafe { Segment::new(addr, len) }.into()
    }

    /// Several ranges, at most [`MAX_SEGMENTS`]. `None`: there are more, or the sum of their lengths overflows.
    ///
    /// # Safety
    /// As for [`SegmentList::contiguous`], for each range.
    pub(crate) unsafe fn gather(ranges: &[(*const u8, usize)]) -> Option<Self> {
        let mut list = Self::EMPTY;
        for (at, (addr, len)) in ranges.iter().enumerate() {
            list.set(at, Segment { addr: addr.expose_provenance(), len: *len })?;
        }
        Some(list)
    }

    /// Sets the segment at an index that has none yet. `None`: the index is not below [`MAX_SEGMENTS`], or the sum of
    /// the lengths overflows.
    #[inline(always)]
    pub(crate) fn set(&mut self, at: usize, segment: Segment) -> Option<()> {
        *self.segments.get_mut(at)? = segment;
        self.len = self.len.checked_add(segment.len)?;
        Some(())
    }

    /// The same memory, with the site of each segment of device memory. `None` for all: the list is as it was.
    fn at(self, sites: [Option<Site>; MAX_SEGMENTS]) -> Self {
        let mut list = self;
        for (segment, site) in list.segments.iter_mut().zip(sites) {
            if let Some(site) = site {
                segment.addr |= DEVICE | site.number() << SITE;
            }
        }
        if sites.iter().any(Option::is_some) { list.marked() } else { list }
    }

    /// The same memory, after a look at what each segment is. Errors: those of [`mover::site_of`].
    pub(crate) fn located(self) -> Result<Self, Errno> {
        let mut sites = [None; MAX_SEGMENTS];
        for (site, segment) in sites.iter_mut().zip(&self.segments) {
            *site = mover::site_of(segment.addr, segment.len)?;
        }
        Ok(self.at(sites))
    }

    /// As if the segments of the bits in `which` were device memory: the processor cannot use their addresses.
    #[cfg(test)]
    pub(crate) fn as_device(self, which: u8) -> Self {
        self.at(std::array::from_fn(|i| (which >> i & 1 == 1).then_some(mover::DOUBLE)))
    }

    /// Whether any of it is device memory.
    #[inline]
    pub(crate) fn is_on_device(&self) -> bool {
        let [first, ..] = &self.segments;
        first.len == 0 && first.addr & MARKED != 0
    }

    fn marked(mut self) -> Self {
        let [first, ..] = &mut self.segments;
        (first.addr, first.len) = (first.addr | MARKED, 0);
        self
    }

    /// The only segment that is not empty: its site, if it is device memory, and its address.
    pub(crate) fn range(&self) -> Option<(Option<Site>, usize)> {
        let segments = self.plain();
        let mut full = segments.iter().filter(|segment| segment.len > 0);
        let (only, None) = (full.next()?, full.next()) else { return None };
        Some((only.site(), only.addr & ADDRESS))
    }

    /// The part of at most `len` bytes at `offset` that is contiguous.
    pub(crate) fn piece(&self, offset: usize, len: usize) -> Self {
        let part = self.slice(offset, len).plain();
        let first = part.iter().find(|segment| segment.len > 0);
        self.slice(offset, first.map_or(0, |segment| segment.len))
    }

    /// The part of at most `len` bytes at `offset` that is device memory of one site, or one range of the host's memory.
    pub(crate) fn of_one_site(&self, offset: usize, len: usize) -> Self {
        let part = self.slice(offset, len).plain();
        let mut full = part.iter().filter(|segment| segment.len > 0);
        let Some(first) = full.next() else { return Self::EMPTY };
        let goes_on = |next: &&Segment| next.site().is_some() && next.site() == first.site();
        let more: usize = full.take_while(goes_on).map(|next| next.len).sum();
        let part = self.slice(offset, first.len + more);
        if first.site().is_some() { part } else { (*first).into() }
    }

    /// The site of the first byte, if it is device memory.
    pub(crate) fn site(&self) -> Option<Site> {
        self.plain().into_iter().find(|segment| segment.len > 0)?.site()
    }

    /// Begins to fill all of the list, one range, from device memory of another process at `offset`, or (`Write`) to copy it
    /// there. Failures: those of [`Transfer::begin`].
    pub(crate) fn begin_transfer(
        &self,
        import: Arc<Import>,
        offset: u64,
        way: mover::Way,
    ) -> Result<Transfer, Failure> {
        const NONE: Failure = Failure(1);
        let (site, addr) = self.range().ok_or(NONE)?;
        let local = (addr, site.is_some());
        // SAFETY: the application lent the list to an operation that lasts until the transfer has ended or is dropped.
        unsafe { Transfer::begin((import, offset), local, self.len, way) }
    }

    /// Where the range that has the byte at `offset` begins and ends in the list.
    pub(crate) fn extent(&self, offset: usize) -> (usize, usize) {
        let (mut begin, mut end) = (0, 0);
        for segment in self.plain() {
            (begin, end) = (end, end + segment.len);
            if offset < end {
                break;
            }
        }
        (begin, end)
    }

    /// The segments with their lengths.
    fn plain(&self) -> [Segment; MAX_SEGMENTS] {
        let mut segments = self.segments;
        if self.is_on_device() {
            let rest: usize = segments.iter().map(|segment| segment.len).sum();
            let [first, ..] = &mut segments;
            (first.addr, first.len) = (first.addr & !MARKED, self.len - rest);
        }
        segments
    }

    /// Length of all segments, bytes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of the first segment, as completions report it.
    pub(crate) fn first_addr(&self) -> u64 {
        let [first, ..] = &self.segments;
        if first.len == 0 { self.first_unmarked() } else { first.addr as u64 }
    }

    #[cold]
    fn first_unmarked(&self) -> u64 {
        let [first, ..] = &self.segments;
        let addr = if self.is_on_device() { first.addr & ADDRESS } else { first.addr };
        addr as u64
    }

    /// Address of the `len` bytes from `offset` on, if they are in one segment that the processor may touch.
    #[inline]
    pub(super) fn address(&self, offset: usize, len: usize) -> Option<usize> {
        if self.is_on_device() {
            return None;
        }
        let mut skip = offset;
        for segment in &self.segments {
            if skip < segment.len {
                return (len <= segment.len - skip).then_some(segment.addr + skip);
            }
            skip -= segment.len;
        }
        None
    }

    /// The part at `offset`, at most `len` bytes long.
    pub(crate) fn slice(&self, offset: usize, len: usize) -> Self {
        let mut list = Self::EMPTY;
        if let Some(addr) = self.one_piece(offset, len) {
            let [first, ..] = &mut list.segments;
            (*first, list.len) = (Segment { addr, len }, len);
            return list;
        }
        let mut skip = offset;
        let mut want = len;
        let mut to = list.segments.iter_mut();
        let mut total = 0;
        for segment in &self.plain() {
            // An empty part keeps the address of its offset: completions report it.
            if skip > segment.len || (skip == segment.len && want > 0) {
                skip -= segment.len;
                continue;
            }
            let take = (segment.len - skip).min(want);
            if let Some(to) = to.next() {
                *to = Segment { addr: segment.addr + skip, len: take };
            }
            skip = 0;
            want -= take;
            total += take;
            if want == 0 {
                break;
            }
        }
        list.len = total;
        // Also where the part has no device memory: it is of an operation that does.
        if self.is_on_device() { list.marked() } else { list }
    }

    /// Address of the `len` bytes at `offset`, if they are all in the first segment.
    #[inline(always)]
    fn one_piece(&self, offset: usize, len: usize) -> Option<usize> {
        let [first, ..] = &self.segments;
        let fits = first.len.checked_sub(offset).is_some_and(|rest| len <= rest);
        fits.then(|| first.addr + offset)
    }

    /// Copies from `offset` of the list to fill `to`. Returns the number of bytes copied.
    #[inline]
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> usize {
        if let Some(from) = self.one_piece(offset, to.len()) {
            let from = std::ptr::with_exposed_provenance::<u8>(from);
            // SAFETY: the application lent these readable bytes; `to` is memory of this provider.
            unsafe { copy_few(from, to.as_mut_ptr(), to.len()) };
            return to.len();
        }
        let (room, to) = (to.len(), to.as_mut_ptr().expose_provenance());
        self.for_each(offset, room, |from, done| {
            let (to, len) = (Segment { addr: to + done, len: from.len }, from.len);
            // SAFETY: the application lent these bytes; `for_each` keeps `done + len <= room`.
            unsafe { Segment::copy(to, from, len, |to, from| simd::copy(from, to, len)) }
        })
    }

    /// Copies `from` to `offset` of the list, if it fits into the first segment there. False: it does not, and nothing
    /// was done.
    #[inline(always)]
    pub(crate) fn copy_in_one(&self, offset: usize, from: &[u8]) -> bool {
        let Some(to) = self.one_piece(offset, from.len()) else { return from.is_empty() };
        let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
        // SAFETY: `one_piece` found that many writable bytes, which the application lent.
        unsafe { copy_few(from.as_ptr(), to, from.len()) };
        true
    }

    /// Copies `from` to `offset` of the list. Returns the number of bytes copied, which is less than `from.len()` if
    /// the list ends before, or the device fails.
    #[inline]
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> usize {
        if self.copy_in_one(offset, from) {
            return from.len();
        }
        let addr = from.as_ptr().expose_provenance();
        self.for_each(offset, from.len(), |to, done| {
            let (from, len) = (Segment { addr: addr + done, len: to.len }, to.len);
            // SAFETY: the application lent these bytes; `for_each` keeps `done + len` within `from`.
            unsafe { Segment::copy(to, from, len, |to, from| simd::copy(from, to, len)) }
        })
    }

    /// As [`Self::copy_in`], with non-temporal stores (past the caches).
    pub(crate) fn copy_in_past_caches(&self, offset: usize, from: &[u8]) -> usize {
        let addr = from.as_ptr().expose_provenance();
        self.for_each(offset, from.len(), |to, done| {
            let (from, len) = (Segment { addr: addr + done, len: to.len }, to.len);
            // SAFETY: the application lent these bytes; `for_each` keeps `done + len` within `from`.
            unsafe {
                Segment::copy(to, from, len, |to, from| simd::copy_past_caches(from, to, len))
            }
        })
    }

    /// Copies from this list into `to`, both memory of this process, for messages to oneself. Ranges may overlap.
    /// Returns the number of bytes copied.
    pub(crate) fn copy_to(&self, offset: usize, to: &Self, to_offset: usize, len: usize) -> usize {
        if let (Some(from), Some(to)) = (self.one_piece(offset, len), to.one_piece(to_offset, len))
        {
            if from.abs_diff(to) >= len {
                let from = std::ptr::with_exposed_provenance::<u8>(from);
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
                // SAFETY: both ranges were lent by the application, and do not overlap.
                unsafe { simd::copy(from, to, len) };
                return len;
            }
        }
        self.for_each(offset, len, |from, done| {
            to.for_each(to_offset + done, from.len, |to, inner| {
                let (from, n) = (from.part(inner, to.len), to.len);
                // SAFETY: both ranges were lent by the application; `copy` allows overlap.
                unsafe { Segment::copy(to, from, n, |to, from| std::ptr::copy(from, to, n)) }
            })
        })
    }

    /// Sends `head` and then the list on a connection. Returns the number of bytes taken. Errors: as [`tcp::send`].
    pub(crate) fn send_behind(&self, fd: BorrowedFd<'_>, head: &[u8]) -> Result<usize, Errno> {
        let (ranges, n) = self.ranges();
        // SAFETY: the application lent these bytes, and does not change them before the operation completes.
        unsafe { tcp::send(fd, head, ranges.get(..n).unwrap_or(&[])) }
    }

    /// Receives into the list, which has no device memory, and then into `tail` from a connection: [`tcp::receive`].
    pub(crate) fn fill_from(
        &self,
        fd: BorrowedFd<'_>,
        tail: &mut [u8],
    ) -> Result<tcp::Received, Errno> {
        debug_assert!(!self.is_on_device());
        let (ranges, n) = self.ranges();
        // SAFETY: the application lent these bytes, and does not use them before the operation completes.
        unsafe { tcp::receive(fd, ranges.get(..n).unwrap_or(&[]), tail) }
    }

    /// The non-empty segments as address ranges, for a peer or for cross-memory attach. None for a list with device
    /// memory: neither can access that.
    pub(crate) fn ranges(&self) -> ([Range; MAX_SEGMENTS], usize) {
        let mut out = [Range::default(); MAX_SEGMENTS];
        let mut n = 0;
        if self.is_on_device() {
            return (out, n);
        }
        for (to, from) in out.iter_mut().zip(self.segments.iter().filter(|s| s.len > 0)) {
            *to = Range { addr: from.addr as u64, len: from.len as u64 };
            n += 1;
        }
        (out, n)
    }

    /// The non-empty segments, also of device memory, as a network device addresses what was registered with it; whether each is
    /// device memory.
    pub(crate) fn registrable(&self) -> impl Iterator<Item = (Range, bool)> {
        let full = self.plain().into_iter().filter(|segment| segment.len > 0);
        full.map(|segment| {
            let addr = if segment.site().is_some() { segment.addr & ADDRESS } else { segment.addr };
            (Range { addr: addr as u64, len: segment.len as u64 }, segment.site().is_some())
        })
    }

    /// Whether the list may name addresses where there is no memory: the application has registered whatever it has, or
    /// will have (fi_mr.3), and not a buffer.
    pub(crate) fn has_holes(&self) -> bool {
        !self.is_on_device()
            && self.segments.iter().any(|s| s.len > 0 && (s.addr == 0 || s.len >= NO_BUFFER))
    }

    /// Whether this process can read `len` bytes at `offset`, and write them if `writes`. Asked before it copies memory
    /// that another process could not access, or where there may be none. Costs a system call a page.
    pub(crate) fn is_accessible(&self, offset: usize, len: usize, writes: bool) -> bool {
        let mut all = true;
        self.for_each(offset, len, |part, _| {
            let range = Range { addr: part.addr as u64, len: part.len as u64 };
            all = all && (part.site().is_some() || presence::is_accessible(range, writes));
            part.len
        });
        all
    }

    /// Calls `f` for the segments of a part, each with the number of bytes before it, until `f` returns less than the
    /// segment's length. Returns the sum of what `f` returned.
    fn for_each(
        &self,
        offset: usize,
        len: usize,
        mut f: impl FnMut(Segment, usize) -> usize,
    ) -> usize {
        let mut done = 0;
        for segment in self.slice(offset, len).plain().into_iter().filter(|s| s.len > 0) {
            let n = f(segment, done);
            done += n;
            if n < segment.len {
                break;
            }
        }
        done
    }
}

/// Bytes that an operation owns: a copy of an application's, because it may reuse its own buffer at once (FI_INJECT), or
/// what comes from a peer. They are read and written through lists that refer to them.
#[derive(Debug)]
pub(crate) struct OwnedBuffer(NonNull<[u8]>);

// SAFETY: it owns the bytes; the user of a list of them vouches for each access.
unsafe impl Send for OwnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for OwnedBuffer {}

impl OwnedBuffer {
    fn of(bytes: Box<[u8]>) -> Self {
        Self(NonNull::from(Box::leak(bytes)))
    }

    /// Copies all of `from`. `None`: there is no memory, or the device failed.
    pub(crate) fn try_copy_of(from: &SegmentList) -> Option<Self> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(from.len()).ok()?;
        bytes.resize(from.len(), 0);
        let copied = from.copy_out(0, &mut bytes);
        (copied == bytes.len()).then(|| Self::of(bytes.into_boxed_slice()))
    }

    /// Whether `other` has the same bytes; false also where they cannot be read.
    pub(crate) fn is_same_as(&self, other: &SegmentList) -> bool {
        // SAFETY: both boxes live, and no operation writes to them now.
        Self::try_copy_of(other).is_some_and(|other| unsafe { other.0.as_ref() == self.0.as_ref() })
    }

    /// Copies all of `from`.
    pub(crate) fn copy_of(from: &SegmentList) -> Self {
        let mut bytes = vec![0; from.len()].into_boxed_slice();
        from.copy_out(0, &mut bytes);
        Self::of(bytes)
    }

    /// `len` bytes of zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self::of(vec![0; len].into())
    }

    /// The buffer as a list, which is valid as long as `self` lives, until its operation has completed.
    pub(crate) fn segments(&self) -> SegmentList {
        // SAFETY: the box does not move while `self` lives, and an operation drops it only when nothing refers to it any
        // more.
        unsafe { SegmentList::contiguous(self.0.cast().as_ptr(), self.0.len()) }
    }
}

impl Drop for OwnedBuffer {
    fn drop(&mut self) {
        // SAFETY: from [`Self::of`], and nothing refers to it any more.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

#[cfg(test)]
impl From<Vec<u8>> for OwnedBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self::of(bytes.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(parts: &mut [Vec<u8>]) -> SegmentList {
        let ranges: Vec<_> =
            parts.iter_mut().map(|p| (p.as_mut_ptr().cast_const(), p.len())).collect();
        // SAFETY: the vectors outlive the list in each test.
        unsafe { SegmentList::gather(&ranges).unwrap() }
    }

    #[test]
    fn a_copy_is_compared_with_what_it_is_of() {
        let (copy, other) = (OwnedBuffer::from(vec![1, 2, 3]), OwnedBuffer::from(vec![1, 2, 4]));
        assert!(copy.is_same_as(&OwnedBuffer::from(vec![1, 2, 3]).segments()));
        assert!(!copy.is_same_as(&other.segments()));
    }

    #[test]
    fn copies_across_segment_borders_at_any_offset() {
        let mut parts = vec![vec![0; 3], vec![0; 1], vec![0; 4]];
        let to = list(&mut parts);
        assert_eq!(to.len(), 8);
        assert_eq!(to.copy_in(0, &[1, 2, 3, 4, 5, 6, 7, 8, 9]), 8);
        for offset in 0..8 {
            for len in 0..=8 - offset {
                let mut out = vec![0; len];
                assert_eq!(to.copy_out(offset, &mut out), len);
                let want: Vec<u8> = (1 + offset as u8..).take(len).collect();
                assert_eq!(out, want);
            }
        }
        assert_eq!(to.copy_in(6, &[70, 80, 90]), 2);
        assert_eq!(to.copy_in_past_caches(2, &[30, 40, 50]), 3);
        assert_eq!(to.copy_in_past_caches(7, &[88, 90]), 1);
        assert_eq!(parts, [vec![1, 2, 30], vec![40], vec![50, 6, 70, 88]]);
    }

    /// Every mixture of memory of the processor and of a device, at every offset and of every length.
    #[test]
    fn device_memory_is_copied_like_other_memory() {
        const LENS: [usize; 3] = [3, 1, 4];
        for (which, other) in (0..8).flat_map(|a| (0..8).map(move |b| (a, b))) {
            for (offset, len) in (0..8).flat_map(|o| (0..=8 - o).map(move |n| (o, n))) {
                let mut parts: Vec<_> = LENS.map(|n| vec![0; n]).into();
                let mut copies: Vec<_> = LENS.map(|n| vec![0; n]).into();
                let whole = list(&mut parts).as_device(which);
                assert_eq!((whole.len(), whole.is_on_device()), (8, which != 0));
                assert_eq!(whole.copy_in(0, &[9, 1, 2, 3, 4, 5, 6, 7]), 8);
                assert_eq!(whole.copy_in_past_caches(0, &[0]), 1);
                let part = whole.slice(offset, len);
                assert_eq!(part.len(), len);
                let mut out = vec![0; len];
                assert_eq!(part.slice(0, len).copy_out(0, &mut out), len);
                let want: Vec<u8> = (offset as u8..).take(len).collect();
                assert_eq!(out, want);
                let copy = list(&mut copies).as_device(other);
                assert_eq!(part.copy_to(0, &copy, 8 - len, len), len);
                assert_eq!(copies.concat().split_at(8 - len).1, want);
            }
        }
    }

    #[test]
    fn a_part_of_one_site_has_many_ranges_of_a_device_or_one_of_the_host() {
        let mut parts = [3, 0, 1, 4].map(|n| vec![0; n]);
        let at = |which: u8| list(&mut parts.clone()).as_device(which);
        let len = |which, offset, most| at(which).of_one_site(offset, most).len();
        assert_eq!([len(15, 0, 8), len(15, 1, 8), len(15, 3, 8), len(15, 2, 3)], [8, 7, 5, 3]);
        assert_eq!([len(9, 0, 8), len(9, 3, 8), len(9, 4, 8), len(0, 0, 8)], [3, 1, 4, 3]);
        assert_eq!([len(15, 8, 8), len(15, 0, 0)], [0, 0]);
        let host = list(&mut parts).as_device(8);
        let part = host.of_one_site(0, 8);
        assert!(!part.is_on_device() && part.site().is_none());
        assert_eq!(part.first_addr(), host.first_addr());
        assert_eq!(host.of_one_site(5, 9).site(), Some(mover::DOUBLE));
    }

    #[test]
    fn nobody_else_gets_the_address_of_device_memory() {
        let mut parts = vec![vec![0; 3], vec![0; 5]];
        let plain = list(&mut parts);
        for which in 1..4 {
            let device = plain.as_device(which);
            assert_eq!(device.ranges().1, 0);
            assert_eq!((device.address(0, 1), device.address(4, 1)), (None, None));
            assert!(device.one().is_none());
            assert!(device.slice(1, 6).is_on_device());
            assert!(!device.copy_in_one(0, &[1]));
            assert_eq!(device.first_addr(), plain.first_addr());
            assert_eq!(device.slice(2, 0).first_addr(), plain.first_addr() + 2);
        }
        assert!(!plain.is_on_device());
        assert!(!plain.as_device(0).is_on_device());
    }

    #[test]
    fn a_range_is_found_between_empty_segments() {
        for (lens, which) in [([0, 5, 0], 2), ([5, 0, 0], 1), ([0, 0, 5], 4), ([0, 5, 0], 0)] {
            let mut parts: Vec<_> = lens.map(|n| vec![0; n]).into();
            let full = parts.iter().find(|part| part.len() == 5).unwrap().as_ptr();
            let whole = list(&mut parts).as_device(which);
            let site = (which != 0).then_some(mover::DOUBLE);
            assert_eq!(whole.range(), Some((site, full.addr())));
            assert_eq!(whole.piece(0, 5).len(), 5);
        }
        let mut two = vec![vec![0; 2], vec![0; 2]];
        assert_eq!(list(&mut two).as_device(3).range(), None);
    }

    #[test]
    fn a_copy_ends_where_the_device_fails() {
        let mut parts = vec![vec![0; 2], vec![0; 2], vec![0; 2]];
        let whole = list(&mut parts).as_device(7);
        for nth in 0..3 {
            mover::tests::fail(nth);
            assert_eq!(whole.copy_in(0, &[1, 2, 3, 4, 5, 6]), 2 * nth);
            mover::tests::fail(nth);
            assert_eq!(whole.copy_out(0, &mut [0; 6]), 2 * nth);
        }
        assert!(OwnedBuffer::try_copy_of(&whole).is_some());
    }

    #[test]
    fn an_empty_part_keeps_its_address() {
        let mut parts = vec![vec![0; 8]];
        let whole = list(&mut parts);
        assert_eq!(whole.slice(3, 0).first_addr(), whole.first_addr() + 3);
        assert_eq!(whole.slice(8, 0).first_addr(), whole.first_addr() + 8);
        assert_eq!(whole.slice(3, 0).len(), 0);
    }

    #[test]
    fn copies_between_lists() {
        let mut from = vec![vec![1, 2, 3, 4, 5], vec![6, 7]];
        let mut to = vec![vec![0; 2], vec![0; 5]];
        assert_eq!(list(&mut from).copy_to(1, &list(&mut to), 1, 100), 6);
        assert_eq!(to, [vec![0, 2], vec![3, 4, 5, 6, 7]]);
    }

    #[test]
    fn more_segments_than_allowed_are_refused() {
        // SAFETY: nothing is copied.
        assert!(unsafe { SegmentList::gather(&[(std::ptr::null(), 1); 5]) }.is_none());
        // SAFETY: nothing is copied.
        assert!(unsafe { SegmentList::gather(&[(std::ptr::null(), usize::MAX); 2]) }.is_none());
    }
}
