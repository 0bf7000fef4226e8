//! The one place that copies device memory.
//!
//! Each context that the application has device memory in gets streams that the default stream does not wait for, each with an
//! event. A copy is started on a stream, and has ended when the event says so. There are two kinds of copies:
//!
//! 1. [`copy`]: the caller waits for the end by asking; a call that waits in the driver would wait for the application's
//!    kernels too. To wait at all costs some microseconds a copy, in progress as well; bytes that are reported as arrived are
//!    then in place. Each such copy has a stream of its own, so that threads do not wait for each other.
//! 2. [`Transfer`]: a copy from or to device memory of another process of the node ([`Import`]). Nobody waits
//!    for it: [`Transfer::has_ended`] says when it is done. Transfers that change device memory share one stream of their
//!    context, so that they happen in the order in which they were begun. One to memory of the host waits on the device for the
//!    earlier ones; its call may last until it has ended, which is how the driver treats pageable memory.
//!
//! Copies of long messages to memory of the host, which nobody waits for either, are in [`bounce`](super::bounce).
//!
//! A copy of which a call failed may still run. The driver may fail the question about that too, which says nothing: it is asked
//! until it answers that the stream is idle, however long that takes, and only then is the memory given back. A driver that does
//! nothing but fail for [`FAILING`] has ended the context, and all copies with it, as it does after a fault of a kernel
//! (cuda.h: "any further CUDA work will return the same error"). Nothing is copied in that context any more.
//!
//! Not run on a GPU; on a double only.
//!
//! # Safety
//! As in [`region`](super::region): the application lends memory for the time of an operation.
#![allow(unsafe_code)]

use crate::sys::Errno;
pub(crate) use crate::sys::cuda::Failure;
use crate::sys::cuda::{self, Allocation, Context, Cuda, HostMemory, Lane, Part};
use crate::sys::per_process::PerProcess;
use crate::sys::presence;
use crate::sys::process::Home;
use crate::telemetry::log;
use std::sync::atomic::{AtomicU64, Ordering};
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
/// Bounce buffers of a context that stay.
pub(super) const BUFFERS: usize = 16;
/// A copy that takes longer is told of.
const LONG: Duration = Duration::from_secs(20);
/// A context in which the driver answers with failures only for so long has failed.
const FAILING: Duration = Duration::from_secs(1);

/// CUDA_ERROR_INVALID_CONTEXT: the driver, or the context of a site, is not there.
pub(super) const NONE: Failure = Failure(201);

/// What the mover has in one context.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) context: Context,
    /// Lanes that no copy uses.
    idle: Vec<Lane>,
    pub(super) pool: Pool,
    /// Of the transfers that change device memory.
    ordered: Arc<Mutex<Ordered>>,
    /// The context has failed; nobody knows whether all that was begun in it has ended.
    failed: Option<Failure>,
}

/// Transfers that end in the order of their start; one event tells of all that were started.
#[derive(Debug, Default)]
struct Ordered {
    /// Made for the first transfer.
    lane: Option<Lane>,
    begun: u64,
    ended: u64,
}

/// The bounce buffers of a context.
#[derive(Debug, Default)]
pub(super) struct Pool {
    pub(super) idle: Vec<HostMemory>,
    /// Buffers of the pool that there are.
    pub(super) made: usize,
}

/// What a bounce buffer is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Need {
    /// Bytes that are sent next.
    Now,
    /// Bytes that arrive next, when their sender sends them.
    Arrival,
    /// Bytes that are sent, or arrive, after others. Without a buffer they can wait.
    Ahead,
}

impl Pool {
    /// A buffer (`Some(Some)`), or leave to make one. Half of them are for bytes that are sent next: the others may wait for a
    /// peer that has stopped.
    pub(super) fn take(&mut self, need: Need) -> Option<Option<HostMemory>> {
        let left = self.idle.len() + (BUFFERS - self.made);
        if need != Need::Now && left <= BUFFERS / 2 {
            return None;
        }
        let idle = self.idle.pop();
        let makes = idle.is_none() && self.made < BUFFERS;
        self.made += usize::from(makes);
        (idle.is_some() || makes).then_some(idle)
    }
}

static PLACES: PerProcess<Vec<Place>> = PerProcess::new();

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The driver, and what `of` takes from the place of a site. Failure: [`NONE`].
pub(super) fn at<T>(
    site: Site,
    of: impl FnOnce(&mut Place) -> T,
) -> Result<(&'static Cuda, T), Failure> {
    let mut places = PLACES.lock();
    let place = places.get_mut(site.number()).ok_or(NONE)?;
    Ok((Cuda::get().ok_or(NONE)?, of(place)))
}

/// As [`at`], of a place whose context has not failed.
pub(super) fn usable<T>(
    site: Site,
    of: impl FnOnce(&mut Place) -> T,
) -> Result<(&'static Cuda, T), Failure> {
    let (cuda, found) = at(site, |place| place.failed.map_or_else(|| Ok(of(place)), Err))?;
    Ok((cuda, found?))
}

/// A lane that no other copy uses, until [`give_back`].
pub(super) fn borrow(site: Site) -> Result<(&'static Cuda, Lane), Failure> {
    let (cuda, (context, idle)) = usable(site, |place| (place.context, place.idle.pop()))?;
    Ok((cuda, idle.map_or_else(|| cuda.lane(context), Ok)?))
}

pub(super) fn give_back(site: Site, lane: Lane) {
    // One of a context that has ended is nobody's.
    let _ = at(site, |place| place.idle.extend((lane.context == place.context).then_some(lane)));
}

impl Place {
    fn new(context: Context) -> Self {
        let (pool, ordered) = (Pool::default(), Arc::default());
        Self { context, idle: Vec::new(), pool, ordered, failed: None }
    }
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
    let found = match cuda.find(addr as u64) {
        Ok(Some(found)) => found,
        Ok(None) => return Ok(None),
        Err(failure) => return unknown(addr, failure),
    };
    let context = cuda.context_of(&found);
    let (mut last, end) = (found, (addr as u64).saturating_add(len as u64));
    synchronize(cuda, &last);
    while last.end() < end {
        // Memory of cuMemCreate may be mapped in parts: PyTorch's expandable segments.
        let next = if last.is_mapped() { cuda.find(last.end()) } else { Ok(None) };
        match next {
            Ok(Some(next)) if next.end() > last.end() && cuda.context_of(&next) == context => {
                last = next;
            }
            _ => return Err(Errno(libc::EINVAL)),
        }
    }
    site_in(cuda, context).map(Some)
}

/// What is done with memory of which the driver tells nothing, because it has failed: the kernel knows what the processor may
/// touch. A region that begins at 0 is all memory, and no device's. Errors: EIO.
fn unknown(addr: usize, Failure(result): Failure) -> Result<Option<Site>, Errno> {
    if addr == 0 || presence::may_read(addr) {
        return Ok(None);
    }
    log::limited!(cause: result, "CUDA answers {result} to the question what memory is a device's");
    Err(Errno(libc::EIO))
}

/// The site of a context that has not ended, by its handle. Where another context had the handle, all of that one has ended
/// with it: streams, events, and what was open there. Errors: EIO, if it cannot be used; ENOSPC for too many contexts.
fn site_in(cuda: &Cuda, handle: usize) -> Result<Site, Errno> {
    let mut places = PLACES.lock();
    let context = cuda.context(handle).map_err(unusable)?;
    let known = |(_, place): &(usize, &mut Place)| place.context.handle() == handle;
    if let Some((at, place)) = places.iter_mut().enumerate().find(known) {
        if place.context != context {
            *place = Place::new(context);
        }
        return place.failed.map_or(Ok(Site(at as u8)), |failure| Err(unusable(failure)));
    }
    if places.len() >= SITES {
        return Err(Errno(libc::ENOSPC));
    }
    let lane = cuda.lane(context).map_err(unusable)?;
    let mut place = Place::new(context);
    place.idle.push(lane);
    places.push(place);
    Ok(Site(places.len() as u8 - 1))
}

fn unusable(Failure(result): Failure) -> Errno {
    log::limited!(cause: result, "device memory cannot be used: CUDA answers {result} in its context");
    Errno(libc::EIO)
}

/// A site from which memory of other processes can be read into memory of the host. `None`: this process has no context.
pub(crate) fn any_site() -> Option<Site> {
    let cuda = Cuda::get()?;
    match cuda.any_context() {
        Some(context) => site_in(cuda, context).ok(),
        None => (!PLACES.lock().is_empty()).then_some(Site(0)),
    }
}

/// Sets SYNC_MEMOPS on an allocation that is seen for the first time. What the application does to it by synchronous calls has
/// then ended when they return; the copies here, on streams of their own, would not wait for it otherwise. Where the
/// driver refuses both the allocation and its context that, they do not.
fn synchronize(cuda: &Cuda, found: &Allocation) {
    static SEEN: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
    let slot = SEEN.get(found.id as usize % SEEN.len());
    if let Some(slot) = slot.filter(|slot| slot.load(Ordering::Acquire) != found.id) {
        cuda.synchronize(found);
        // Threads that look meanwhile set it too.
        slot.store(found.id, Ordering::Release);
    }
}

/// Held while device memory is read, changed and written back: endpoints of this process do that one at a time.
pub(crate) fn exclusive() -> MutexGuard<'static, ()> {
    static CHANGES: Mutex<()> = Mutex::new(());
    locked(&CHANGES)
}

/// Copies `len` bytes, of which at least one end is device memory at `site`. False: the device has failed, and the
/// destination has any bytes.
///
/// # Safety
/// Both ranges are lent.
pub(super) unsafe fn copy(site: Site, to: usize, from: usize, len: usize) -> bool {
    #[cfg(test)]
    if site == DOUBLE {
        if tests::fails_now() {
            return false;
        }
        let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
        // SAFETY: memory of a test.
        unsafe { std::ptr::copy(std::ptr::with_exposed_provenance(from), to, len) };
        return true;
    }
    // SAFETY: the caller vouches.
    let Err(Failure(result)) = (unsafe { copy_and_wait(site, to, from, len) }) else { return true };
    log::limited!(cause: result, "a copy of device memory failed: CUDA answers {result}");
    false
}

/// # Safety
/// As [`copy`].
unsafe fn copy_and_wait(site: Site, to: usize, from: usize, len: usize) -> Result<(), Failure> {
    let (cuda, lane) = borrow(site)?;
    // SAFETY: the caller vouches; this waits for the end.
    let begun = unsafe { cuda.start(&lane, to, from, len) };
    let ended = begun.and_then(|()| wait(|| cuda.is_done(&lane)));
    if ended.is_err() {
        settle(site, cuda, &lane);
    }
    give_back(site, lane);
    ended
}

/// Waits until all that was started on a lane has ended.
pub(super) fn end(site: Site, cuda: &Cuda, lane: &Lane) {
    if wait(|| cuda.is_done(lane)).is_err() {
        settle(site, cuda, lane);
    }
}

/// Waits for what a failed call may have begun.
pub(super) fn settle(site: Site, cuda: &Cuda, lane: &Lane) {
    let known = at(site, |place| (place.context == lane.context).then_some(place.failed));
    // A context that has ended has ended its copies.
    let Ok((_, Some(failed))) = known else { return };
    let patience = failed.map_or(FAILING, |_| Duration::ZERO);
    if let Err(failure) = wait_for_answer(patience, || cuda.is_idle(lane)) {
        let is = |place: &mut Place| place.context == lane.context;
        let _ = at(site, |place| is(place).then(|| place.failed = Some(failure)));
    }
}

/// As [`wait`], but a failure is none that `is_done` does not repeat for `patience`.
fn wait_for_answer(
    patience: Duration,
    mut is_done: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let mut failing_since = None;
    wait(|| {
        let answer = is_done();
        let Err(failure) = answer else {
            failing_since = None;
            return answer;
        };
        let since = *failing_since.get_or_insert_with(Instant::now);
        if since.elapsed() < patience { Ok(false) } else { Err(failure) }
    })
}

/// Waits until it is done, or fails; without a limit, because what is not done still changes memory.
fn wait(mut is_done: impl FnMut() -> Result<bool, Failure>) -> Result<(), Failure> {
    let (begun, mut told) = (Instant::now(), false);
    while !is_done()? {
        if !told && begun.elapsed() > LONG {
            told = true;
            log::limited!(
                "a copy of device memory has not ended for 20 s, and is waited for: is the device stopped, or in use by others?"
            );
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// An allocation, or a pool, of another process, open in this one until it is dropped; or an allocation of this process.
#[derive(Debug)]
pub(crate) struct Import {
    site: Site,
    /// `None`: it is this process's own.
    open: Option<cuda::Import>,
    /// Where it begins in this process.
    start: u64,
    len: u64,
    home: Home,
}

impl Import {
    /// Opens a part of `len` bytes; a pool has none. Failures: those of the driver.
    pub(crate) fn open(site: Site, part: &Part, len: usize) -> Result<Self, Failure> {
        let (cuda, context) = at(site, |place| place.context)?;
        let open = cuda.import(context, part, len)?;
        let (start, len) = (open.start(), len as u64);
        Ok(Self { site, open: Some(open), start, len, home: Home::here() })
    }

    /// The driver's handle of a pool.
    pub(crate) fn handle(&self) -> u64 {
        self.start
    }

    /// An allocation of this process: the driver opens no handle of one's own.
    pub(crate) fn own(site: Site, start: u64, len: u64) -> Self {
        Self { site, open: None, start, len, home: Home::here() }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// It has no handle.
    pub(crate) fn is_by_descriptor(&self) -> bool {
        self.open.as_ref().is_some_and(|open| !open.is_by_handle())
    }

    /// Whether the context in which it was opened is still that of its site.
    pub(crate) fn exists(&self) -> bool {
        let is = |open: &cuda::Import| at(self.site, |place| place.context == open.context());
        self.open.as_ref().is_none_or(|open| is(open).is_ok_and(|(_, is)| is))
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let Some(open) = self.open.as_ref().filter(|_| self.home.is_here()) else { return };
        let _ = Cuda::get().map(|cuda| cuda.close(open));
    }
}

/// Which way a copy goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// From device memory, or from the other process's.
    Read,
    /// To it.
    Write,
}

/// A copy from or to another process's device memory that was started. To drop it before its end waits for that.
#[derive(Debug)]
pub(crate) struct Transfer {
    import: Arc<Import>,
    stream: Stream,
}

/// Where a transfer takes place.
#[derive(Debug)]
enum Stream {
    /// It is the `n`th on this one.
    Ordered(Arc<Mutex<Ordered>>, u64),
    /// On one of its own; taken when it has ended.
    Own(Option<Lane>),
}

impl Transfer {
    /// Begins to copy `len` bytes between the allocation, from `offset` on, and `local`: memory of the host, or
    /// (`on_device`) device memory at the import's site. Failures: 1, bytes beyond the allocation; those of the driver.
    ///
    /// # Safety
    /// The local memory is lent until [`Self::has_ended`] answers, or the value is dropped.
    pub(super) unsafe fn begin(
        (import, offset): (Arc<Import>, u64),
        (local, on_device): (usize, bool),
        len: usize,
        way: Way,
    ) -> Result<Self, Failure> {
        const OUTSIDE: Failure = Failure(1);
        offset.checked_add(len as u64).filter(|end| *end <= import.len).ok_or(OUTSIDE)?;
        let there = (import.start + offset) as usize;
        let (_, ordered) = usable(import.site, |place| Arc::clone(&place.ordered))?;
        // SAFETY: the caller vouches for the local memory; the other is open, and the result keeps it so.
        let stream = unsafe {
            match way {
                Way::Write => next(ordered, import.site, there, local, len),
                Way::Read if on_device => next(ordered, import.site, local, there, len),
                Way::Read => alone(import.site, &ordered, local, there, len),
            }
        }?;
        Ok(Self { import, stream })
    }

    /// Whether all bytes are in place. Failures: the device has failed, and the destination has any bytes.
    pub(crate) fn has_ended(&self) -> Result<bool, Failure> {
        let cuda = Cuda::get().ok_or(NONE)?;
        match &self.stream {
            Stream::Own(lane) => lane.as_ref().map_or(Ok(true), |lane| cuda.is_done(lane)),
            Stream::Ordered(ordered, number) => {
                let mut ordered = locked(ordered);
                let Ordered { lane, begun, ended } = &mut *ordered;
                if *ended < *number && cuda.is_done(lane.as_ref().ok_or(NONE)?)? {
                    *ended = *begun;
                }
                Ok(*ended >= *number)
            }
        }
    }

    /// Waits for the end. False: the device has failed.
    pub(crate) fn finish(&self) -> bool {
        wait(|| self.has_ended()).is_ok()
    }

    /// Waits for what a transfer that failed may still do.
    fn settle(&self) {
        let Some(cuda) = Cuda::get() else { return };
        match &self.stream {
            Stream::Own(lane) => lane.iter().for_each(|lane| settle(self.import.site, cuda, lane)),
            Stream::Ordered(ordered, _) => {
                let lane = locked(ordered).lane;
                lane.iter().for_each(|lane| settle(self.import.site, cuda, lane));
            }
        }
    }
}

/// Begins a copy from device memory to memory of the host, behind the `ordered` ones.
///
/// # Safety
/// As [`Transfer::begin`].
unsafe fn alone(
    site: Site,
    ordered: &Mutex<Ordered>,
    to: usize,
    from: usize,
    len: usize,
) -> Result<Stream, Failure> {
    let before = {
        let ordered = locked(ordered);
        ordered.lane.filter(|_| ordered.ended < ordered.begun)
    };
    let (cuda, lane) = borrow(site)?;
    // SAFETY: the caller vouches.
    let begun = before
        .map_or(Ok(()), |before| cuda.follow(&lane, &before))
        .and_then(|()| unsafe { cuda.start(&lane, to, from, len) });
    if begun.is_err() {
        settle(site, cuda, &lane);
        give_back(site, lane);
    }
    begun.map(|()| Stream::Own(Some(lane)))
}

/// Begins a copy behind the `ordered` ones.
///
/// # Safety
/// As [`Transfer::begin`].
unsafe fn next(
    ordered: Arc<Mutex<Ordered>>,
    site: Site,
    to: usize,
    from: usize,
    len: usize,
) -> Result<Stream, Failure> {
    let mut held = locked(&ordered);
    if held.lane.is_none() {
        held.lane = Some(borrow(site)?.1);
    }
    let (cuda, Some(lane)) = (Cuda::get().ok_or(NONE)?, held.lane) else { return Err(NONE) };
    // SAFETY: the caller vouches.
    if let Err(failure) = unsafe { cuda.start(&lane, to, from, len) } {
        settle(site, cuda, &lane);
        return Err(failure);
    }
    held.begun += 1;
    let number = held.begun;
    drop(held);
    Ok(Stream::Ordered(ordered, number))
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.import.home.is_here() {
            return;
        }
        if !self.finish() {
            self.settle();
        }
        if let Stream::Own(lane) = &mut self.stream {
            lane.take().into_iter().for_each(|lane| give_back(self.import.site, lane));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Errno, FAILING, Failure, Need, unknown, wait_for_answer};
    use crate::sys::process;
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Of the next copies of this thread at [`DOUBLE`](super::DOUBLE), the `nth` fails, from 0 on. `usize::MAX`: none does.
    pub(crate) fn fail(nth: usize) {
        LEFT.set(nth);
    }

    /// Whether a failure that was asked for has not happened.
    pub(crate) fn still_fails() -> bool {
        LEFT.replace(usize::MAX) != usize::MAX
    }

    /// A copy that ends some questions after its beginning: it is made then, so that bytes that are used before are wrong.
    #[derive(Debug)]
    pub(crate) struct Late {
        /// To where, from where, and how many bytes.
        copies: Vec<(usize, usize, usize)>,
        questions: usize,
    }

    thread_local! {
        static TAKEN: Cell<usize> = const { Cell::new(0) };
        static BEGUN: Cell<usize> = const { Cell::new(0) };
        static LATE: Cell<bool> = const { Cell::new(false) };
        static UNDER_WAY: Cell<usize> = const { Cell::new(0) };
        static BUFFERS: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    }

    /// Copies of this thread that have not ended.
    pub(crate) fn under_way() -> usize {
        UNDER_WAY.get()
    }

    /// Bounce buffers of this thread in use, and the most that were at one time.
    pub(crate) fn buffers() -> (usize, usize) {
        BUFFERS.get()
    }

    /// Bounce buffers that this thread has taken, those that it gave back too.
    pub(crate) fn taken() -> usize {
        TAKEN.get()
    }

    pub(crate) fn note_taken() {
        TAKEN.set(TAKEN.get() + 1);
    }

    /// The most begins anew.
    pub(crate) fn forget_buffers() {
        BUFFERS.set((BUFFERS.get().0, 0));
    }

    /// Whether no copy ends.
    pub(crate) fn be_late(late: bool) {
        LATE.set(late);
    }

    /// Whether one of some buffers that could be done without is not there.
    pub(crate) fn spares() -> bool {
        BEGUN.get() % 7 == 3
    }

    impl Late {
        pub(crate) fn begin(copies: Vec<(usize, usize, usize)>) -> Result<Self, Failure> {
            if fails_now() {
                return Err(Failure(999));
            }
            let n = BEGUN.replace(BEGUN.get() + 1);
            UNDER_WAY.set(UNDER_WAY.get() + 1);
            let (now, most) = BUFFERS.get();
            BUFFERS.set((now + 1, most.max(now + 1)));
            Ok(Self { copies, questions: n * 3 % 5 + 1 })
        }

        pub(crate) fn is_under_way(&self) -> bool {
            self.questions > 0
        }

        pub(crate) fn has_ended(&mut self) -> Result<bool, Failure> {
            if self.questions == 0 || LATE.get() {
                return Ok(self.questions == 0);
            }
            self.questions -= 1;
            if self.questions > 0 {
                return Ok(false);
            }
            UNDER_WAY.set(UNDER_WAY.get() - 1);
            if fails_now() {
                return Err(Failure(999));
            }
            for (to, from, len) in self.copies.drain(..) {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
                // SAFETY: memory of a test, and of a bounce buffer.
                unsafe { std::ptr::copy(std::ptr::with_exposed_provenance(from), to, len) };
            }
            Ok(true)
        }
    }

    impl Drop for Late {
        fn drop(&mut self) {
            if self.questions > 0 {
                UNDER_WAY.set(UNDER_WAY.get() - 1);
            }
            let (now, most) = BUFFERS.get();
            BUFFERS.set((now - 1, most));
        }
    }

    pub(super) fn fails_now() -> bool {
        let left = LEFT.get();
        LEFT.set(if left == 0 {
            usize::MAX
        } else {
            left.saturating_sub(usize::from(left < usize::MAX))
        });
        left == 0
    }

    #[test]
    fn buffers_are_left_for_bytes_that_are_needed() {
        for waits in [Need::Ahead, Need::Arrival] {
            let mut pool = super::Pool::default();
            let spared = std::iter::from_fn(|| pool.take(waits)).count();
            assert_eq!(spared, super::BUFFERS / 2);
            let needed = std::iter::from_fn(|| pool.take(Need::Now)).count();
            assert_eq!(needed, super::BUFFERS / 2);
            pool.idle.push(super::HostMemory::pageable(1).unwrap());
            assert!(pool.take(waits).is_none());
            assert!(matches!(pool.take(Need::Now), Some(Some(_))));
        }
    }

    #[test]
    fn a_question_that_fails_is_asked_again() {
        let failed = Failure(999);
        let mut answers = [Err(failed), Ok(false), Err(failed), Err(failed), Ok(true)].into_iter();
        assert_eq!(wait_for_answer(FAILING, || answers.next().unwrap()), Ok(()));
        assert_eq!(wait_for_answer(Duration::ZERO, || Err(failed)), Err(failed));
    }

    #[test]
    fn all_memory_is_no_device_s_and_what_nobody_may_read_is_unknown() {
        let not_initialized = Failure(3);
        let here = [0_u8; 8];
        assert_eq!(unknown(here.as_ptr().addr(), not_initialized), Ok(None));
        assert_eq!(unknown(0, not_initialized), Ok(None));
        assert_eq!(unknown(process::page_size() - 1, not_initialized), Err(Errno(libc::EIO)));
    }
}
