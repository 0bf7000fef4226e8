//! The one place that copies device memory.
//!
//! Each context that the application has device memory in gets a stream that the default stream does not wait for,
//! and an event. A copy is started on the stream, and has ended when the event says so. The caller waits for that by
//! asking: a call that waits in the driver would wait for the application's kernels too. To wait at all costs some
//! microseconds a copy, in progress as well; bytes that are reported as arrived are then in place.
//!
//! Not run on a GPU; on a double only.
//!
//! # Safety
//! As in [`region`](super::region): the application lends memory for the time of an operation.
#![allow(unsafe_code)]

use crate::sys::Errno;
use crate::sys::cuda::{Cuda, Failure, Lane};
use crate::telemetry::log;
use std::sync::{Mutex, MutexGuard, PoisonError};
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

static LANES: Mutex<Vec<Lane>> = Mutex::new(Vec::new());

fn lanes() -> MutexGuard<'static, Vec<Lane>> {
    LANES.lock().unwrap_or_else(PoisonError::into_inner)
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
    let mut lanes = lanes();
    if let Some(at) = lanes.iter().position(|lane| lane.is_of(context)) {
        return Ok(Some(Site(at as u8)));
    }
    if lanes.len() >= SITES {
        return Err(Errno(libc::ENOSPC));
    }
    match cuda.lane(context) {
        Ok(lane) => {
            lanes.push(lane);
            Ok(Some(Site(lanes.len() as u8 - 1)))
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
    let lanes = lanes();
    let (Some(cuda), Some(lane)) = (Cuda::get(), lanes.get(site.number())) else { return false };
    // SAFETY: the caller vouches; this waits for the end.
    let outcome = unsafe { cuda.start(lane, to, from, len) }.and_then(|()| wait(cuda, lane));
    let Err(Failure(result)) = outcome else { return true };
    log::limited!(cause: result, "a copy of device memory failed: CUDA answers {result}");
    false
}

fn wait(cuda: &Cuda, lane: &Lane) -> Result<(), Failure> {
    const TIMED_OUT: Failure = Failure(-1);
    let begun = Instant::now();
    while !cuda.is_done(lane)? {
        if begun.elapsed() > LONGEST {
            return Err(TIMED_OUT);
        }
        std::thread::yield_now();
    }
    Ok(())
}
