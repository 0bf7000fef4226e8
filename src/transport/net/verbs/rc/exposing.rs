//! Direct RMA: regions that peers read and write (PROTOCOL.md §7.16), and requests to regions of peers.
//!
//! A region has a registration of exactly its bytes, which ends with it: a peer that uses its key afterwards loses the
//! connection. The cache's monitor watches the region's addresses; when their mapping changes, the registration ends
//! too.

use super::{
    Connection, Device, Local, Posted, QueuePair, Rc, Region, conclude, register, tell_broken,
};
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::sys::Errno;
use crate::sys::numbers::NumberMap;
use crate::telemetry::log;
use crate::transport::net::agreement::Side;
use crate::transport::net::bulk::{BulkSink, STALE, UNREGISTERED};
use crate::transport::net::verbs::registrar::tell_refused;
use crate::transport::{self, Exposure, PeerId, Reach, STAGED_MAX, SendError, Spot, Windows};
use std::collections::BTreeMap;

/// Most regions whose keys are advertised.
const EXPOSED_MAX: usize = 1024;

/// Most persistent registrations.
const RESIDENTS_MAX: usize = 128;

/// The bytes of a part, and its registrations.
type Part<D> = (usize, Vec<<D as Device>::Exposed>);

/// Memory that peers may reach by direct RMA, by the numbers of regions and parts.
pub(super) struct Exposed<D: Device> {
    regions: BTreeMap<(u64, u32), Part<D>>,
    /// Bytes of all parts.
    bytes: usize,
    /// Parts advertised so far.
    pub(super) made: u64,
    /// The device's count of mapping changes at the last check.
    seen: u64,
}

impl<D: Device> Default for Exposed<D> {
    fn default() -> Self {
        Self { regions: BTreeMap::new(), bytes: 0, made: 0, seen: 0 }
    }
}

impl<D: Device> Exposed<D> {
    /// From now on no peer reaches it.
    pub(super) fn remove(&mut self, region: u64) {
        while let Some((part, _)) = self.regions.range((region, 0)..=(region, u32::MAX)).next() {
            let part = *part;
            self.bytes -= self.regions.remove(&part).map_or(0, |(len, _)| len);
        }
    }

    /// From now on no peer reaches any region.
    pub(super) fn clear(&mut self) {
        self.regions.clear();
        self.bytes = 0;
    }

    #[inline]
    pub(super) fn has_changed(&self, device: &D) -> bool {
        !self.regions.is_empty() && device.changes() != self.seen
    }

    /// Ends regions whose mapping has changed.
    #[inline]
    pub(super) fn check(&mut self, device: &D, sink: &mut dyn BulkSink) {
        if self.has_changed(device) {
            self.seen = device.changes();
            let bytes = &mut self.bytes;
            self.regions.retain(|region, (len, parts)| {
                let sound = parts.iter().all(|part| device.is_sound(part));
                if !sound {
                    *bytes -= *len;
                    sink.on_concealed(region.0);
                }
                sound
            });
        }
    }

    /// The keys of a region, which is registered for peers if it is not yet. Errors: it cannot be.
    fn keys(
        &mut self,
        device: &D,
        region: (u64, u32),
        memory: &SegmentList,
        rights: (bool, bool),
    ) -> Result<[u32; MAX_SEGMENTS], Errno> {
        if !self.regions.contains_key(&region) {
            let room = device.exposes();
            if memory.len() > room {
                return Err(Errno(libc::EFBIG));
            }
            if self.regions.len() >= EXPOSED_MAX || memory.len() > room - self.bytes.min(room) {
                return Err(Errno(libc::ENOSPC));
            }
            if self.regions.is_empty() {
                self.seen = device.changes();
            }
            let mut parts = Vec::with_capacity(1);
            let (ranges, count) = memory.ranges();
            let mut at = 0;
            for range in ranges.iter().take(count) {
                let part = memory.slice(at, range.len as usize);
                at += range.len as usize;
                parts.push(device.expose(&part, rights)?);
            }
            self.bytes += memory.len();
            self.made += 1;
            self.regions.insert(region, (memory.len(), parts));
        }
        let mut keys = [0; MAX_SEGMENTS];
        let parts = self.regions.get(&region).map(|(_, parts)| parts.as_slice());
        for (key, part) in keys.iter_mut().zip(parts.unwrap_or_default()) {
            *key = part.rkey();
        }
        Ok(keys)
    }
}

/// The key of a persistent registration of memory to read from. `None`: it cannot be registered, or there are too many.
fn resident<D: Device>(
    residents: &mut NumberMap<u64, (usize, D::Region)>,
    device: &D,
    local: &SegmentList,
) -> Option<u32> {
    let (addr, len) = (local.first_addr(), local.len());
    match residents.get(&addr) {
        Some((all, region)) if len <= *all => return Some(region.lkey()),
        // Another segment begins at this address: no request uses the old one any more.
        Some(_) => {}
        None if residents.len() >= RESIDENTS_MAX => return None,
        None => {}
    }
    let region = device.register(local, false).ok()?;
    let key = region.lkey();
    residents.insert(addr, (len, region));
    Some(key)
}

impl<D: Device> Rc<D> {
    /// See [`crate::transport::OneSided::expose`].
    pub(super) fn expose_to(
        &mut self,
        peer: PeerId,
        region: (u64, u32),
        memory: &SegmentList,
        (reads, writes): (bool, bool),
        now: u64,
    ) -> transport::Exposed {
        match self.contact(peer, now) {
            Windows::No => return transport::Exposed::No,
            Windows::Later => return transport::Exposed::Later,
            Windows::Ready => {}
        }
        let (Some(device), Some(connection)) = (&self.device, self.connections.get_mut(peer))
        else {
            return transport::Exposed::No;
        };
        let echoes = device.reads();
        let reads = reads && echoes;
        if memory.len() == 0 || !(reads || writes) {
            return transport::Exposed::Never;
        }
        // A peer may read back what it has written. Its engine makes sure that it reads nothing else, and asks where
        // the region is.
        match self.exposed.keys(device, region, memory, (reads || echoes, writes)) {
            Ok(keys) => {
                connection.link.used = now;
                let (epoch, keys) = (connection.id, Some(keys));
                transport::Exposed::Yes(Exposure { epoch, keys, reads, writes, echoes })
            }
            Err(Errno(libc::EAGAIN | libc::ENOSPC)) => transport::Exposed::No,
            Err(errno) => {
                log::info(format_args!(
                    "a region of {} bytes is not for peers to reach by RDMA ({errno}): messages do it",
                    memory.len()
                ));
                transport::Exposed::Never
            }
        }
    }

    /// A flush read alone: asks whether earlier writes are in the peer's memory, by reading the byte at `spot`.
    fn ask_alone(
        &mut self,
        peer: PeerId,
        spot: &Spot,
        how: Reach,
        now: u64,
    ) -> Result<(), SendError> {
        let Self { connections, device, waiting, staging, .. } = self;
        let (Some(Connection { link, .. }), Some(device)) = (connections.get_mut(peer), device)
        else {
            return Err(STALE);
        };
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
        let to = (spot.range.addr, spot.key);
        let added = link.qp.reach(Local::known(&staging.byte(), key), to, true);
        if added.is_ok() {
            link.note(Posted::Reach(how.token), 1, now);
            self.writes += 1;
        }
        let posted = added.and_then(|()| link.post_all());
        if !conclude(peer, link, posted, waiting) {
            connections.doom(peer);
        }
        Ok(())
    }

    /// See [`crate::transport::OneSided::reach`].
    pub(super) fn reach_at(
        &mut self,
        peer: PeerId,
        spot: &Spot,
        local: &SegmentList,
        how: Reach,
        now: u64,
    ) -> Result<(), SendError> {
        let Self { connections, device, waiting, staging, residents, .. } = self;
        let doomed = connections.is_doomed(peer);
        let current = |c: &&mut Connection<D::Qp>| c.is_ready(spot.epoch);
        let Connection { link, .. } = connections.get_mut(peer).filter(current).ok_or(STALE)?;
        let device = device.as_ref().filter(|_| !doomed).ok_or(STALE)?;
        let asks = how.delivered && !how.reads;
        if !link.has_room(1 + usize::from(asks)) {
            return Err(SendError::Again);
        }
        if local.len() == 0 && asks {
            return self.ask_alone(peer, spot, how, now);
        }
        // Checks everything that can fail before anything is posted.
        let stays = how.stays && !how.reads;
        let known = stays.then(|| resident(residents, device, local)).flatten();
        let short = known.is_none() && local.len() <= STAGED_MAX;
        let staging = (short || asks).then(|| staging.get_or_insert_default());
        let (mut staged, mut echo) = (None, None);
        if let Some(staging) = staging {
            let lease = staging.lease(|memory| device.register(memory, true).ok());
            if let Some(key) = lease.map(Region::lkey) {
                let taken = if short { staging.take(local, how.reads) } else { None };
                staged = taken.map(|(place, memory)| (place, memory, key));
                echo = asks.then(|| (staging.byte(), key));
            }
        }
        let (done, from) = match (&staged, known) {
            (Some((place, memory, key)), _) => {
                (Posted::Staged(how.token, *place), Local::known(memory, *key))
            }
            (None, Some(key)) if echo.is_some() || !asks => {
                (Posted::Reach(how.token), Local::known(local, key))
            }
            (None, _) => match register(device, local, how.reads) {
                Ok(registered) if echo.is_some() || !asks => (Posted::Reach(how.token), registered),
                refused => {
                    self.counts.unregistered += 1;
                    refused.err().into_iter().for_each(tell_refused);
                    return Err(UNREGISTERED);
                }
            },
        };
        let to = (spot.range.addr, spot.key);
        if let Err(errno) = link.qp.reach(from, to, how.reads) {
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
        self.writes += 1;
        self.counts.reached += 1;
        self.counts.reached_bytes += local.len() as u64;
        let mut added = Ok(());
        if let Some((byte, key)) = echo {
            // `Engine::flush_alone` explains why this works.
            link.note(Posted::Silent, local.len(), now);
            self.writes += 1;
            let last = (spot.range.addr + spot.range.len.saturating_sub(1), spot.key);
            added = link.qp.reach(Local::known(&byte, key), last, true);
        }
        // Even if the flush read was refused: the write ends with the connection, not before.
        link.note(done, local.len(), now);
        let posted = added.and_then(|()| link.post(local.len()));
        // If the connection is broken, the write may or may not arrive, and ends with the connection.
        if !conclude(peer, link, posted, waiting) {
            connections.doom(peer);
        }
        Ok(())
    }
}
