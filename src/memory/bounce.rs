//! Device memory through memory of the host, with copies that nobody waits for.
//!
//! Bytes that are sent in packets or frames have to be in memory of the host. A long message is not copied there as a whole: parts of it are
//! copied to *bounce buffers*, of [`LEN`] bytes each, and the copy of one part runs while an earlier one is sent. The
//! buffers are registered with the driver, so that the call that begins a copy does not wait; [`Part::bytes`] asks for its end.
//!
//! Bytes that arrive in packets go the other way: they are gathered in a buffer ([`Gathered`]). When that is full, its copy to the device
//! begins, and the next buffer is filled. A peer's device may fill the buffer instead.
//!
//! A buffer takes bytes of as many ranges of a list as belong to one context.
//!
//! Each context has [`BUFFERS`](mover::BUFFERS) of them, which stay registered. A message takes those that it could do without (`ahead`) only from
//! there. The one that it needs is made where there is none, so that no message waits for another one, whose peer may have
//! stopped; it is pageable, and its copy may last as long as the call. Bytes that may come late leave half of the registered ones.
//!
//! Not run on a GPU; on a double only.
//!
//! # Safety
//! As in [`region`](super::region): the application lends memory for the time of an operation.
#![allow(unsafe_code)]

use super::SegmentList;
use super::mover::{self, NONE, Need, Site, Way};
use crate::sys::cuda::{Context, Cuda, Failure, HostMemory, Lane};
use crate::sys::process::Home;
use crate::telemetry::log;

/// Length of a bounce buffer, bytes.
pub(crate) const LEN: usize = if cfg!(test) { 1000 } else { 256 * 1024 };
/// There is no memory of the host for a buffer. The driver gives no such answer.
const NO_MEMORY: Failure = Failure(-1);

/// Bytes of a list that are in memory of the host, or are copied there.
#[derive(Debug)]
pub(crate) enum Part {
    /// They are there.
    Here(SegmentList),
    Copied(Copied),
}

/// A bounce buffer that is being filled with bytes for device memory.
#[derive(Debug)]
pub(crate) struct Gathered {
    copied: Copied,
    to: SegmentList,
    filled: usize,
}

/// A copy between device memory and a bounce buffer. To drop it before its end waits for that.
#[derive(Debug)]
pub(crate) struct Copied {
    site: Site,
    buffer: Option<Buffer>,
    len: usize,
    /// `None`: it has ended.
    lane: Option<Lane>,
    home: Home,
    #[cfg(test)]
    late: Option<mover::tests::Late>,
}

#[derive(Debug)]
struct Buffer {
    memory: HostMemory,
    /// The context whose pool it is of.
    of: Option<Context>,
}

impl Part {
    /// Begins to bring at most [`LEN`] of the `len` bytes at `offset` to memory of the host. `None`: they are to be read `ahead`,
    /// and no buffer is free for that. Failures: those of the driver, which are said.
    pub(crate) fn begin(
        list: &SegmentList,
        (offset, len): (usize, usize),
        ahead: bool,
    ) -> Result<Option<Self>, Failure> {
        let piece = list.of_one_site(offset, len.min(LEN));
        let Some(site) = piece.site() else {
            return piece.range().map(|_| Some(Self::Here(piece))).ok_or(NONE);
        };
        let begin = || {
            let need = if ahead { Need::Ahead } else { Need::Now };
            let Some(mut copied) = Copied::prepare(site, piece.len(), need)? else {
                return Ok(None);
            };
            // SAFETY: the application lent the memory to an operation that ends after the copy, or drops it.
            unsafe { copied.start(&piece, Way::Read) }?;
            Ok(Some(Self::Copied(copied)))
        };
        begin().inspect_err(|failure| say(*failure))
    }

    /// Length, bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Here(list) => list.len(),
            Self::Copied(copied) => copied.len,
        }
    }

    /// The bytes are not there yet, as far as is known.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(self, Self::Copied(copied) if copied.is_under_way())
    }

    /// The bytes, which are there as long as `self` is. `None`: not yet. Failures: those of the driver, which are said.
    pub(crate) fn bytes(&mut self) -> Result<Option<SegmentList>, Failure> {
        match self {
            Self::Here(list) => Ok(Some(*list)),
            Self::Copied(copied) => {
                let ended = copied.is_in_place()?;
                Ok(ended.then(|| copied.bytes()))
            }
        }
    }
}

impl Gathered {
    /// For at most [`LEN`] of the `len` bytes at `offset` of a list. `None`: they belong to memory of the host, or have no length; or
    /// they may come later (`ahead`), and no buffer is free for that. Failures: those of the driver, which are said.
    pub(crate) fn begin(
        list: &SegmentList,
        (offset, len): (usize, usize),
        ahead: bool,
    ) -> Result<Option<Self>, Failure> {
        let to = list.of_one_site(offset, len.min(LEN));
        let Some(site) = to.site() else { return Ok(None) };
        let need = if ahead { Need::Ahead } else { Need::Arrival };
        let copied = Copied::prepare(site, to.len(), need).inspect_err(|failure| say(*failure));
        Ok(copied?.map(|copied| Self { copied, to, filled: 0 }))
    }

    /// Takes the next bytes. Returns how many there was room for.
    pub(crate) fn fill(&mut self, bytes: &[u8]) -> usize {
        let room = self.copied.len - self.filled;
        let bytes = bytes.get(..room).unwrap_or(bytes);
        self.filled += self.copied.bytes().copy_in(self.filled, bytes);
        bytes.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.filled == self.copied.len
    }

    /// The buffer, for a device to fill it.
    pub(crate) fn bytes(&self) -> SegmentList {
        self.copied.bytes()
    }

    /// Begins to copy all of it. Failures: those of the driver, which are said.
    pub(crate) fn copy(self) -> Result<Copied, Failure> {
        let Self { mut copied, to, .. } = self;
        // SAFETY: the application lent the memory to an operation that ends after the copy, or drops it.
        unsafe { copied.start(&to, Way::Write) }.inspect_err(|failure| say(*failure))?;
        Ok(copied)
    }
}

fn say(failure: Failure) {
    let Failure(result) = failure;
    if failure == NO_MEMORY {
        log::limited!(
            "no memory for a buffer of 256 KiB: a message from or to device memory fails"
        );
        return;
    }
    log::limited!(cause: result, "a copy of device memory failed: CUDA answers {result}");
}

impl Buffer {
    /// `None`: none is free to be used ahead. Failures: there is no memory; those of [`mover::usable`].
    fn take(site: Site, need: Need) -> Result<Option<Self>, Failure> {
        let (cuda, (context, found)) =
            mover::usable(site, |place| (place.context, place.pool.take(need)))?;
        let ahead = need == Need::Ahead;
        let made = match found {
            Some(Some(memory)) => return Ok(Some(Self { memory, of: Some(context) })),
            Some(None) => cuda.host_memory(context, LEN),
            None if ahead => return Ok(None),
            None => HostMemory::pageable(LEN),
        };
        let of = found.map(|_| context);
        match made {
            Ok(memory) => Ok(Some(Self { memory, of })),
            Err(_) => {
                let is = |known: Context| of == Some(known);
                let _ = mover::at(site, |place| place.pool.made -= usize::from(is(place.context)));
                if ahead { Ok(None) } else { Err(NO_MEMORY) }
            }
        }
    }

    fn give_back(self, site: Site) {
        let Self { memory, of } = self;
        // The other buffers end without the lock.
        let _left = mover::at(site, |place| {
            let is_its = of == Some(place.context);
            let (back, left) = if is_its { (Some(memory), None) } else { (None, Some(memory)) };
            place.pool.idle.extend(back);
            left
        });
    }
}

impl Copied {
    /// Begins to copy between the buffer and device memory of its site, of which the end of the last range is the end of all.
    ///
    /// # Safety
    /// The device memory, as many bytes as the buffer has, is lent until [`Self::has_ended`] has answered, or the value is dropped.
    unsafe fn start(&mut self, device: &SegmentList, way: Way) -> Result<(), Failure> {
        let mut here = self.bytes().first_addr() as usize;
        let mut copies = device.registrable().map(|(range, _)| {
            let (at, there, len) = (here, range.addr as usize, range.len as usize);
            here += len;
            if way == Way::Write { (there, at, len) } else { (at, there, len) }
        });
        #[cfg(test)]
        if self.site == mover::DOUBLE {
            self.late = Some(mover::tests::Late::begin(copies.collect())?);
            return Ok(());
        }
        let (cuda, lane) = mover::borrow(self.site)?;
        self.lane = Some(lane);
        // SAFETY: the caller vouches for the device memory; the buffer is this copy's until it has ended.
        let begun =
            copies.try_for_each(|(to, from, len)| unsafe { cuda.start(&lane, to, from, len) });
        if begun.is_err() {
            mover::settle(self.site, cuda, &lane);
        }
        begun
    }

    fn is_under_way(&self) -> bool {
        #[cfg(test)]
        if let Some(late) = &self.late {
            return late.is_under_way();
        }
        self.lane.is_some()
    }

    /// Whether all bytes are in place. Failures: those of the driver, which are said; the destination has any bytes.
    pub(crate) fn is_in_place(&mut self) -> Result<bool, Failure> {
        self.has_ended().inspect_err(|failure| say(*failure))
    }

    /// As [`Self::is_in_place`]; nothing is said.
    fn has_ended(&mut self) -> Result<bool, Failure> {
        #[cfg(test)]
        if let Some(late) = &mut self.late {
            return late.has_ended();
        }
        let Some(lane) = self.lane else { return Ok(true) };
        let ended = Cuda::get().ok_or(NONE)?.is_done(&lane)?;
        if ended {
            self.lane = None;
            mover::give_back(self.site, lane);
        }
        Ok(ended)
    }

    fn bytes(&self) -> SegmentList {
        let start = self.buffer.as_ref().map_or(0, |buffer| buffer.memory.address());
        // SAFETY: the buffer is this value's, and has as many bytes.
        unsafe { SegmentList::contiguous(std::ptr::with_exposed_provenance(start), self.len) }
    }

    /// A buffer for `len` bytes. `None`: none is free to be used ahead.
    fn prepare(site: Site, len: usize, need: Need) -> Result<Option<Self>, Failure> {
        #[cfg(test)]
        let double = (site == mover::DOUBLE).then(|| {
            let spared = need == Need::Ahead && mover::tests::spares();
            (!spared).then(Buffer::of_a_test).inspect(|_| mover::tests::note_taken())
        });
        #[cfg(not(test))]
        let double: Option<Option<Buffer>> = None;
        let buffer = double.map_or_else(|| Buffer::take(site, need), Ok)?;
        let Some(buffer) = buffer else { return Ok(None) };
        let copied = Self {
            site,
            buffer: Some(buffer),
            len,
            lane: None,
            home: Home::here(),
            #[cfg(test)]
            late: None,
        };
        Ok(Some(copied))
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        if !self.home.is_here() {
            return;
        }
        if let (Some(lane), Some(cuda)) = (self.lane.take(), Cuda::get()) {
            mover::end(self.site, cuda, &lane);
            mover::give_back(self.site, lane);
        }
        if let Some(buffer) = self.buffer.take() {
            buffer.give_back(self.site);
        }
    }
}

#[cfg(test)]
impl Buffer {
    fn of_a_test() -> Self {
        Self { memory: HostMemory::pageable(LEN).unwrap(), of: None }
    }
}
