//! The one place that copies device memory.
//!
//! Each context that the application has device memory in gets a stream that the default stream does not wait for,
//! and an event. A copy is started on the stream, and has ended when the event says so. The caller waits for that by
//! asking: a call that waits in the driver would wait for the application's kernels too. To wait at all costs some
//! microseconds a copy, in progress as well; bytes that are reported as arrived are then in place.
//!
//! Copies from device memory of another process of the node ([`Import`]) go by a stream of their own, and nobody waits for
//! them: [`Reading::has_ended`] says when one is done.
//!
//! Not run on a GPU; on a double only.
//!
//! # Safety
//! As in [`region`](super::region): the application lends memory for the time of an operation.
#![allow(unsafe_code)]

use crate::sys::Errno;
use crate::sys::cuda::{self, Cuda, Failure, IpcHandle, Lane};
use crate::sys::process::Home;
use crate::telemetry::log;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Where device memory is: the number of a context of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Site(u8);

/// Most contexts.
const SITES: usize = 15;
/// In tests, memory at this site is that of the processor, behind addresses that it cannot use.
#[cfg(test)]
pub(crate) const DOUBLE: Site = Site(SITES as u8);
/// A device that takes longer is taken for dead.
const LONGEST: Duration = Duration::from_secs(20);

/// What the mover has in one context.
#[derive(Debug)]
struct Place {
    /// For copies that are waited for.
    lane: Lane,
    /// For reads of other processes' memory; made at the first one.
    reads: Option<Reads>,
}

/// The reads in one context. They end in the order of their start, and one event tells of all that were started.
#[derive(Debug)]
struct Reads {
    lane: Lane,
    begun: u64,
    ended: u64,
}

static PLACES: Mutex<Vec<Place>> = Mutex::new(Vec::new());

fn places() -> MutexGuard<'static, Vec<Place>> {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Site {
    /// Its number, below 16.
    pub(super) fn number(self) -> usize {
        usize::from(self.0)
    }

    pub(super) fn numbered(number: usize) -> Self {
        Self((number & SITES) as u8)
    }
}

/// The site of the `len` bytes at `addr`. `None`: the processor may touch them. The driver is asked each time, with one
/// call: what it said of an address before may be of an allocation that was freed since.
///
/// Errors: EINVAL for bytes that go beyond an allocation; EIO for memory whose context cannot be used; ENOSPC for too many
/// contexts.
pub(crate) fn site_of(addr: usize, len: usize) -> Result<Option<Site>, Errno> {
    let Some(cuda) = Cuda::get().filter(|_| len > 0) else { return Ok(None) };
    let Some(found) = cuda.find(addr as u64) else { return Ok(None) };
    let offset = addr as u64 - found.start.min(addr as u64);
    if (found.len as u64).checked_sub(offset).is_none_or(|rest| (len as u64) > rest) {
        return Err(Errno(libc::EINVAL));
    }
    let context = cuda.context_of(&found);
    let mut places = places();
    if let Some(at) = places.iter().position(|place| place.lane.is_of(context)) {
        return Ok(Some(Site(at as u8)));
    }
    if places.len() >= SITES {
        return Err(Errno(libc::ENOSPC));
    }
    match cuda.lane(context) {
        Ok(lane) => {
            places.push(Place { lane, reads: None });
            Ok(Some(Site(places.len() as u8 - 1)))
        }
        Err(Failure(result)) => {
            log::limited!("device memory cannot be used: CUDA answers {result} to a new stream");
            Err(Errno(libc::EIO))
        }
    }
}

/// Copies `len` bytes, of which at least one end is device memory at `site`. False: the device has failed, and the
/// destination has any bytes.
///
/// # Safety
/// Both ranges are lent.
pub(super) unsafe fn copy(site: Site, to: usize, from: usize, len: usize) -> bool {
    #[cfg(test)]
    if site == DOUBLE {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
        // SAFETY: memory of a test.
        unsafe { std::ptr::copy(std::ptr::with_exposed_provenance(from), to, len) };
        return true;
    }
    let places = places();
    let (Some(cuda), Some(Place { lane, .. })) = (Cuda::get(), places.get(site.number())) else {
        return false;
    };
    // SAFETY: the caller vouches; this waits for the end.
    let outcome =
        unsafe { cuda.start(lane, to, from, len) }.and_then(|()| wait(|| cuda.is_done(lane)));
    let Err(Failure(result)) = outcome else { return true };
    log::limited!(cause: result, "a copy of device memory failed: CUDA answers {result}");
    false
}

fn wait(mut is_done: impl FnMut() -> Result<bool, Failure>) -> Result<(), Failure> {
    const TIMED_OUT: Failure = Failure(-1);
    let begun = Instant::now();
    while !is_done()? {
        if begun.elapsed() > LONGEST {
            return Err(TIMED_OUT);
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// An allocation of another process, open in this one until it is dropped.
#[derive(Debug)]
pub(crate) struct Import {
    site: Site,
    open: cuda::Import,
    len: u64,
    home: Home,
}

impl Import {
    /// Opens an allocation of `len` bytes. Failures: those of the driver.
    pub(crate) fn open(site: Site, handle: &IpcHandle, len: u64) -> Result<Self, Failure> {
        const NONE: Failure = Failure(201);
        let cuda = Cuda::get().ok_or(NONE)?;
        let places = places();
        let place = places.get(site.number()).ok_or(NONE)?;
        let open = cuda.import(&place.lane, handle)?;
        Ok(Self { site, open, len, home: Home::here() })
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        if let Some(cuda) = Cuda::get().filter(|_| self.home.is_here()) {
            // A driver that is shut down has closed it.
            let _ = cuda.close(&self.open);
        }
    }
}

/// A read of another process's device memory that was started. Who drops it before its end waits for that.
#[derive(Debug)]
pub(crate) struct Reading {
    from: Arc<Import>,
    number: u64,
}

impl Reading {
    /// Begins to read `len` bytes from `offset` on to `to`, device memory at the import's site. Failures: 1, bytes beyond
    /// the allocation; those of the driver.
    ///
    /// # Safety
    /// The destination is lent until [`Self::has_ended`] answers, or the value is dropped.
    pub(super) unsafe fn begin(
        from: Arc<Import>,
        offset: u64,
        to: usize,
        len: usize,
    ) -> Result<Self, Failure> {
        const OUTSIDE: Failure = Failure(1);
        let end = offset.checked_add(len as u64).filter(|end| *end <= from.len);
        let (Some(cuda), Some(_)) = (Cuda::get(), end) else { return Err(OUTSIDE) };
        let mut places = places();
        let place = places.get_mut(from.site.number()).ok_or(OUTSIDE)?;
        let reads = match &mut place.reads {
            Some(reads) => reads,
            none => {
                let lane = cuda.lane_beside(&place.lane)?;
                none.insert(Reads { lane, begun: 0, ended: 0 })
            }
        };
        // SAFETY: the caller vouches for the destination; the source is open, and this value keeps it so.
        unsafe {
            cuda.start(&reads.lane, to, (from.open.start() + offset) as usize, len)?;
        }
        reads.begun += 1;
        Ok(Self { number: reads.begun, from })
    }

    /// Whether all bytes are in place. Failures: the device has failed, and the destination has any bytes.
    pub(crate) fn has_ended(&self) -> Result<bool, Failure> {
        const NONE: Failure = Failure(201);
        let mut places = places();
        let place = places.get_mut(self.from.site.number());
        let (Some(cuda), Some(reads)) = (Cuda::get(), place.and_then(|p| p.reads.as_mut())) else {
            return Err(NONE);
        };
        if reads.ended < self.number && cuda.is_done(&reads.lane)? {
            reads.ended = reads.begun;
        }
        Ok(reads.ended >= self.number)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if self.from.home.is_here() {
            // Of a device that has failed nothing more comes.
            let _ = wait(|| self.has_ended());
        }
    }
}
