//! Direct RMA: regions that peers read and write (PROTOCOL.md §7.16), and requests to regions of peers.
//!
//! A region has a registration of exactly its bytes, which ends with it: a peer that uses its key afterwards loses the
//! connection. The cache's monitor watches the region's addresses; when their mapping changes, the registration ends
//! too.

use super::Rc;
use super::exposed::resident;
use super::link::{
    Device, Link, Local, Posted, QueuePair, Region, conclude, register, tell_broken,
};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::telemetry::log;
use crate::transport::net::agreement::{Agreement, Side};
use crate::transport::net::bulk::key::Key;
use crate::transport::net::bulk::{STALE, UNREGISTERED};
use crate::transport::net::verbs::rc::staging::Staging;
use crate::transport::net::verbs::registrar::tell_refused;
use crate::transport::{PeerId, Prepared, Put, Registered, Registration, STAGED_MAX, SendError};

impl<D: Device> Rc<D> {
    /// Makes a key to a range of the region with this id for `peer`.
    pub(super) fn expose(
        &mut self,
        peer: PeerId,
        (region, memory): (u64, &SegmentList),
        (reads, writes): (bool, bool),
        now: u64,
    ) -> Registered {
        match self.contact(peer, now) {
            Prepared::No => return Registered::No,
            Prepared::Later => return Registered::Later,
            Prepared::Ready => {}
        }
        let (Some(device), Some(connection)) = (&self.device, self.connections.get_mut(peer))
        else {
            return Registered::No;
        };
        let confirms = device.reads();
        let reads = reads && confirms;
        if memory.len() == 0 || !(reads || writes) {
            return Registered::Never;
        }
        // A peer may read back what it has written. Its engine makes sure that it reads nothing else, and asks where
        // the region is.
        let rights = (reads || confirms, writes);
        match self.exposed.add(device, (peer, connection.id), (region, memory), rights, now) {
            Ok(key) => {
                connection.link.used = now;
                connection.link.keys += 1;
                Registered::Yes(Registration { key: key.encode(), reads, writes, confirms })
            }
            Err(Errno(libc::EAGAIN | libc::ENOSPC)) => Registered::No,
            // Other memory may be let go later.
            Err(errno @ Errno(libc::ENOMEM)) => {
                tell_refused(errno);
                Registered::No
            }
            Err(errno) => {
                log::info(format_args!(
                    "a region of {} bytes is not for peers to reach by RDMA ({errno}): messages do it",
                    memory.len()
                ));
                Registered::Never
            }
        }
    }

    /// A flush read alone: asks whether earlier writes are in the peer's memory, by reading the byte at `at`.
    pub(super) fn flush_alone(
        &mut self,
        peer: PeerId,
        at: &Key,
        token: u64,
        now: u64,
    ) -> Result<(), SendError> {
        let Self { connections, device, waiting, staging, .. } = self;
        let (link, device) = current(connections, device, peer, at)?;
        if !link.has_room(1) {
            return Err(SendError::Again);
        }
        let staging = staging.get_or_insert_default();
        let lease = staging.lease(|memory| device.register(memory, true).ok());
        let Some(key) = lease.map(Region::lkey) else {
            // Later requests must not overtake the flush, so the connection ends, and messages are used instead.
            log::info(format_args!(
                "the memory for flush reads cannot be registered: a queue pair ends, and messages do its work"
            ));
            self.counts.unregistered += 1;
            connections.doom(peer);
            return Err(STALE);
        };
        let added = link.qp.reach(Local::known(&staging.byte(), key), (at.addr, at.key), true);
        if added.is_ok() {
            link.note(Posted::Access(token), 1, now);
            self.writes += 1;
        }
        let posted = added.and_then(|()| link.post_all());
        if !conclude(peer, link, posted, waiting) {
            connections.doom(peer);
        }
        Ok(())
    }

    /// A get (`true`), or a put without notice.
    pub(super) fn reach(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        at: &Key,
        what: (bool, Put),
        now: u64,
    ) -> Result<(), SendError> {
        let Self { connections, device, waiting, staging, residents, .. } = self;
        let (link, device) = current(connections, device, peer, at)?;
        let (reads, Put { delivered: asks, stays, token, .. }) = what;
        if !link.has_room(1 + usize::from(asks)) {
            return Err(SendError::Again);
        }
        // Checks everything that can fail before anything is posted.
        let known = stays.then(|| resident(residents, device, local)).flatten();
        let short = known.is_none() && local.len() <= STAGED_MAX && !local.is_on_device();
        let (staged, echo) = match short || asks {
            true => bounce(staging.get_or_insert_default(), device, (local, reads), (short, asks)),
            false => (None, None),
        };
        let (done, from) = match (&staged, known) {
            (Some((place, memory, key)), _) => {
                (Posted::Staged(token, *place), Local::known(memory, *key))
            }
            (None, Some(key)) if echo.is_some() || !asks => {
                (Posted::Access(token), Local::known(local, key))
            }
            (None, _) => match registered(device, local, (reads, token)) {
                Ok(request) if echo.is_some() || !asks => request,
                refused => {
                    self.counts.unregistered += 1;
                    refused.err().into_iter().for_each(tell_refused);
                    return Err(UNREGISTERED);
                }
            },
        };
        if let Err(errno) = link.qp.reach(from, (at.addr, at.key), reads) {
            if let (Posted::Staged(_, place), Some(staging)) = (done, &mut self.staging) {
                staging.leave(place);
            }
            if errno.0 == libc::EOPNOTSUPP {
                return Err(UNREGISTERED);
            }
            tell_broken(errno);
            connections.doom(peer);
            return Err(STALE);
        }
        self.writes += 1 + u32::from(echo.is_some());
        self.counts.reached += 1;
        self.counts.reached_bytes += local.len() as u64;
        let posted = finish(link, done, (at, local.len()), echo, now);
        // If the connection is broken, the write may or may not arrive, and ends with the connection.
        if !conclude(peer, link, posted, waiting) {
            connections.doom(peer);
        }
        Ok(())
    }
}

/// Registers the memory of a request, and says what its completion is.
fn registered<'a, D: Device>(
    device: &D,
    local: &'a SegmentList,
    (reads, token): (bool, u64),
) -> Result<(Posted, Local<'a, D::Region>), Errno> {
    let made = register(device, local, reads)?;
    let written = if reads { made.flush()? } else { None };
    let done = written.map_or(Posted::Access(token), |what| Posted::Placed(token, what));
    Ok((done, made))
}

/// A byte that a flush read may overwrite, and its key.
type Byte = (SegmentList, u32);
/// A bounce buffer: its number, its memory and its key.
type Bounced = (usize, SegmentList, u32);

/// A bounce buffer for `local` if that is `short`, and a byte for the flush read that the caller `asks` for. `None`:
/// there is no buffer, or its memory cannot be registered.
fn bounce<D: Device>(
    staging: &mut Staging<D::Region>,
    device: &D,
    (local, reads): (&SegmentList, bool),
    (short, asks): (bool, bool),
) -> (Option<Bounced>, Option<Byte>) {
    let lease = staging.lease(|memory| device.register(memory, true).ok());
    let Some(key) = lease.map(Region::lkey) else { return (None, None) };
    let taken = if short { staging.take(local, reads) } else { None };
    let staged = taken.map(|(place, memory)| (place, memory, key));
    (staged, asks.then(|| (staging.byte(), key)))
}

/// A request of `len` bytes was added: adds the flush read behind it, if there is one, and posts what should not wait.
fn finish<Q: QueuePair<R>, R>(
    link: &mut Link<Q>,
    done: Posted,
    (at, len): (&Key, usize),
    flush: Option<Byte>,
    now: u64,
) -> Result<(), Errno> {
    let mut added = Ok(());
    if let Some((byte, key)) = flush {
        // `Engine::flush_alone` explains why this works.
        link.note(Posted::Silent, len, now);
        let last = (at.addr + (len as u64).saturating_sub(1), at.key);
        added = link.qp.reach(Local::known(&byte, key), last, true);
    }
    // Even if the flush read was refused: the write ends with the connection, not before.
    link.note(done, len, now);
    added.and_then(|()| link.post(len))
}

/// The link to `peer` and the device, if the key was made for this link.
fn current<'a, D: Device>(
    connections: &'a mut Agreement<Link<D::Qp>>,
    device: &'a Option<D>,
    peer: PeerId,
    key: &Key,
) -> Result<(&'a mut Link<D::Qp>, &'a D), SendError> {
    let device = device.as_ref().filter(|_| !connections.is_doomed(peer)).ok_or(STALE)?;
    let connection = connections.get_mut(peer).filter(|c| c.is_ready(key.connection));
    Ok((&mut connection.ok_or(STALE)?.link, device))
}
