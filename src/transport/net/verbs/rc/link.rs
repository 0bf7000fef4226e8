//! The interface to a device and its queue pairs, and this side's end of a connection.

use super::probes::Probes;
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::sys::Errno;
use crate::sys::cuda::Flush;
use crate::telemetry::log;
use crate::transport::PeerId;
use crate::transport::net::agreement::message::End;
use crate::transport::net::bulk::key::Key;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

/// So many requests are posted together if they are no longer than this, bytes. After a full queue, requests are
/// refused until it has room for as many.
pub(super) const TOGETHER: usize = 8;
pub(super) const TOGETHER_LEN: usize = 16 * 1024;
/// Where so many requests are in flight, others are batched until the next turn: the device has enough to do.
pub(super) const PLENTY: usize = 32;
/// What each byte of a request adds to the time after which it counts as stuck, nanoseconds.
const STUCK_BYTE_NS: u64 = 1_000;

/// An event of a queue pair, which is named by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// The peer has written `len` bytes, with this immediate.
    Filled { qp: u32, immediate: u32, len: u32 },
    /// The oldest request of this endpoint is complete.
    Written { qp: u32 },
    /// It has failed, with an `ibv_wc_status`.
    Failed { qp: u32, status: u32 },
}

/// Registered memory.
pub(super) trait Region: Send {
    fn lkey(&self) -> u32;
    fn rkey(&self) -> u32;
    /// Memory of a GPU to flush when the device has written it.
    fn flush(&self) -> Option<Flush> {
        None
    }
}

/// This endpoint's memory for a request.
pub(super) struct Local<'a, R> {
    pub(super) list: &'a SegmentList,
    /// The key of the registration of each segment.
    pub(super) keys: [u32; MAX_SEGMENTS],
    /// The registrations to keep until the request is complete.
    pub(super) kept: Kept<R>,
}

/// Registrations of the segments of a request. Most have one segment, and need no allocation for this.
#[derive(Debug)]
pub(super) struct Kept<R> {
    pub(super) first: Option<R>,
    pub(super) others: Vec<R>,
}

impl<'a, R> Local<'a, R> {
    /// One segment, of memory that stays registered.
    pub(super) fn known(list: &'a SegmentList, key: u32) -> Self {
        let kept = Kept { first: None, others: Vec::new() };
        Self { list, keys: [key; MAX_SEGMENTS], kept }
    }
}

impl<R: Region> Local<'_, R> {
    /// The memory to flush when the device has written it. Errors: EOPNOTSUPP for memory of several GPUs.
    pub(super) fn flush(&self) -> Result<Option<Flush>, Errno> {
        let mut flushes = self.kept.first.iter().chain(&self.kept.others).filter_map(R::flush);
        let first = flushes.next();
        let others = flushes.any(|other| Some(other) != first);
        if others { Err(Errno(libc::EOPNOTSUPP)) } else { Ok(first) }
    }
}

/// A queue pair. It ends when it is dropped: nothing is read or written through it any more.
pub(super) trait QueuePair<R>: Send {
    fn number(&self) -> u32;
    /// Makes it ready to write to `to`, and to be written by it. Errors: the driver's.
    fn connect(&mut self, to: &End, own_psn: u32) -> Result<(), Errno>;
    /// Requests that can still be added.
    fn room(&self) -> usize;
    /// Adds a write of `from` to `addr` at the peer; `post` starts it. The registrations are kept until it is complete.
    /// Errors: EAGAIN (no room), EOPNOTSUPP (too many segments), others (the queue pair is broken).
    fn write(&mut self, from: Local<'_, R>, to: &Key) -> Result<(), Errno>;
    /// Adds a transfer between `local` and the peer's memory at `addr`, under its `key`; if it `reads`, from the peer
    /// to here. Requests are carried out in order, and a write not before earlier reads. The registrations are kept
    /// until then. Errors: as for `write`.
    fn reach(&mut self, local: Local<'_, R>, to: (u64, u32), reads: bool) -> Result<(), Errno>;
    /// Ends its transfers, in both directions. Events of those that were complete can be polled until it is dropped.
    fn stop(&mut self);
    /// Requests that wait for `post`.
    fn waiting(&self) -> usize;
    /// Posts all requests that wait. Errors: EAGAIN (some still wait), others (it is broken).
    fn post(&mut self) -> Result<(), Errno>;
    /// The oldest request is complete.
    fn on_written(&mut self);
}

/// The interface to a device.
pub(super) trait Device: Send {
    /// Registered memory. Direct RMA by peers ends when it is dropped.
    type Region: Region;
    type Qp: QueuePair<Self::Region>;
    /// A queue pair that is not connected. Errors: EAGAIN (the limit is reached), ENOMEM, the driver's.
    fn connection(&mut self) -> Result<Self::Qp, Errno>;
    /// The description of `qp` for a peer; its first packet has the number `psn`.
    fn end(&self, qp: &Self::Qp, psn: u32) -> End;
    /// Whether `end` can be reached from here at all.
    fn reaches(&self, end: &End) -> bool;

    /// `end` with the address that packets from here have.
    fn seen(&self, end: &End) -> End {
        *end
    }
    /// Where connecting may wait for an answer of the network: the thread that asks for it before.
    fn probes(&self) -> Option<Probes>;
    /// Registers the one segment of `part`; `write`: for a peer to write it, else for this side's writes to read it.
    /// Errors: it cannot be.
    fn register(&self, part: &SegmentList, write: bool) -> Result<Self::Region, Errno>;
    /// Whether it accesses memory of GPUs, as far as is known before one is open.
    fn may_take_gpus() -> bool {
        false
    }
    /// The same of this one.
    fn takes_gpus(&self) -> bool {
        false
    }
    /// Gives back, now and then, memory of GPUs that the application has freed.
    fn tend(&self, now: u64) {
        let _ = now;
    }
    /// When [`Self::tend`] has something to do.
    fn next_timeout(&self) -> Option<u64> {
        None
    }
    /// Whether GET rendezvous pays off; `near`: for receivers on this host.
    fn offers(&self, near: bool) -> bool;
    /// Registers the one segment of `part`, for a peer to read it. Errors: it cannot be.
    fn offer(&self, part: &SegmentList) -> Result<Self::Region, Errno>;
    /// Lets peers read, or write, exactly the one segment of `part`. Errors: EAGAIN (it is just changing), others (this
    /// memory cannot be registered, or changes of its mapping would go unnoticed).
    fn expose(&self, part: &SegmentList, rights: (bool, bool)) -> Result<Self::Region, Errno>;
    /// Most bytes of the host's memory that may be open to direct RMA at the same time: they are locked.
    fn exposes(&self) -> usize;
    /// Whether its addresses still map to the same memory, as far as is known; else its registration has ended, or does
    /// now.
    fn is_sound(&self, exposed: &Self::Region) -> bool;
    /// Counts changes of mappings that may concern memory open to direct RMA.
    fn changes(&self) -> u64;
    /// Whether peers can read such memory, and this endpoint theirs.
    fn reads(&self) -> bool;
    /// Processes a bounded number of events. Errors: the device cannot be used any more.
    fn poll(&mut self, each: impl FnMut(Event)) -> Result<usize, Errno>;
    fn fd(&self) -> BorrowedFd<'_>;
    /// Makes the descriptor unreadable, for a sleep that no event of this device ends.
    fn silence(&mut self);
    /// False: something has happened.
    fn sleep(&mut self) -> bool;
    /// The same for a thread that sleeps already.
    fn rearm(&mut self) -> bool;
    /// The state of the registrations, for the log.
    fn registrations(&self) -> Option<String>;
    /// Requests for a registration that found one, and those that made one.
    fn cache_counts(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// This side's end of a connection.
pub(super) struct Link<Q> {
    pub(super) qp: Q,
    /// Number of this side's first packet.
    pub(super) psn: u32,
    /// When it was last used, nanoseconds.
    pub(super) used: u64,
    /// When the peer was asked to end it, nanoseconds; 0: never.
    pub(super) asked: u64,
    /// Remote buffers advertised to the peer.
    pub(super) lent: u32,
    /// Other keys that the peer has, and that this side did not withdraw.
    pub(super) keys: u32,
    /// This side's requests that are in flight or wait to be posted, oldest first, and their bytes.
    pub(super) posted: VecDeque<(Posted, usize)>,
    /// Since when the first of them has been the oldest, nanoseconds.
    pub(super) first_since: u64,
    /// The send queue was full: requests are refused until it has room for several.
    pub(super) full: bool,
}

impl<Q> Link<Q> {
    pub(super) fn new(qp: Q, psn: u32, now: u64) -> Self {
        let (posted, first_since) = (VecDeque::new(), now);
        Self { qp, psn, used: now, asked: 0, lent: 0, keys: 0, posted, first_since, full: false }
    }

    /// Whether there is room for `n` requests.
    #[inline]
    pub(super) fn has_room<R>(&mut self, n: usize) -> bool
    where
        Q: QueuePair<R>,
    {
        let room = self.qp.room();
        let least = if self.full { TOGETHER.min((room + self.posted.len()) / 2) } else { 0 };
        self.full = room < n.max(least);
        !self.full
    }

    /// Posts the requests that wait, unless more may follow soon: for short requests the driver call is a large part of
    /// the cost. Errors: the connection is broken.
    #[inline]
    pub(super) fn post<R>(&mut self, len: usize) -> Result<(), Errno>
    where
        Q: QueuePair<R>,
    {
        if len <= TOGETHER_LEN && self.qp.waiting() < TOGETHER {
            return Ok(());
        }
        self.post_all()
    }

    /// Few requests wait, and may be batched while many others are in flight.
    #[inline]
    pub(super) fn is_patient<R>(&self) -> bool
    where
        Q: QueuePair<R>,
    {
        let waiting = self.qp.waiting();
        waiting < TOGETHER && self.posted.len() - waiting >= PLENTY
    }

    /// Posts all requests that wait. Errors: the connection is broken.
    pub(super) fn post_all<R>(&mut self) -> Result<(), Errno>
    where
        Q: QueuePair<R>,
    {
        match self.qp.post() {
            // Requests in flight will make room.
            Err(Errno(libc::EAGAIN)) if self.posted.len() > self.qp.waiting() => Ok(()),
            other => other,
        }
    }

    /// A request of `len` bytes was added.
    pub(super) fn note(&mut self, posted: Posted, len: usize, now: u64) {
        if self.posted.is_empty() {
            self.first_since = now;
        }
        self.posted.push_back((posted, len));
        self.used = now;
    }

    /// The device has not completed the first request in time.
    pub(super) fn is_stuck(&self, stuck_ns: u64, now: u64) -> bool {
        let Some((_, len)) = self.posted.front() else { return false };
        let patience = stuck_ns.saturating_add((*len as u64).saturating_mul(STUCK_BYTE_NS));
        now.saturating_sub(self.first_since) > patience
    }
}

/// The recipient of a request's completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Posted {
    /// None: a later request's completion covers it.
    Silent,
    /// The access with this token.
    Access(u64),
    /// The same, which has written memory of a GPU.
    Placed(u64, Flush),
    /// The same, through this slot of the bounce buffers.
    Staged(u64, usize),
}

/// Notes whether requests to `peer` wait to be posted. False: the connection is broken.
#[inline]
pub(super) fn conclude<Q: QueuePair<R>, R>(
    peer: PeerId,
    link: &Link<Q>,
    posted: Result<(), Errno>,
    waiting: &mut Vec<PeerId>,
) -> bool {
    match posted {
        Err(errno) => tell_broken(errno),
        Ok(()) if link.qp.waiting() > 0 && !waiting.contains(&peer) => waiting.push(peer),
        Ok(()) => {}
    }
    posted.is_ok()
}

#[cold]
pub(super) fn tell_broken(errno: Errno) {
    log::info(format_args!("a queue pair takes no requests ({errno}): it ends"));
}

/// Registers all segments of `payload`; `write`: to be written here. Errors: one cannot be.
pub(super) fn register<'a, D: Device>(
    device: &D,
    payload: &'a SegmentList,
    write: bool,
) -> Result<Local<'a, D::Region>, Errno> {
    let mut local = Local::known(payload, 0);
    let mut at = 0;
    for (key, (range, _)) in local.keys.iter_mut().zip(payload.registrable()) {
        let piece = payload.slice(at, range.len as usize);
        at += range.len as usize;
        let region = device.register(&piece, write)?;
        *key = region.lkey();
        match &mut local.kept.first {
            first @ None => *first = Some(region),
            Some(_) => local.kept.others.push(region),
        }
    }
    Ok(local)
}
