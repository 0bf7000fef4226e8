//! Regions that peers read and write by themselves (PROTOCOL.md §7.16), and how we do that with theirs.
//!
//! A region has a registration of its own, of exactly its bytes, which ends with it: whoever names its key
//! afterwards loses the connection. The cache's monitor watches over its addresses, and when they mean something else
//! the registration ends too.

use super::{
    Connection, Device, Local, Posted, QueuePair, Rc, Region, State, conclude, register,
    tell_broken,
};
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::sys::Errno;
use crate::sys::numbers::NumberMap;
use crate::telemetry::log;
use crate::transport::net::bulk::{Bulk, BulkSink, STALE, UNREGISTERED};
use crate::transport::net::verbs::registrar::tell_refused;
use crate::transport::{self, Exposure, PeerId, Reach, STAGED_MAX, SendError, Spot, Windows};
use std::collections::BTreeMap;

/// Regions that are exposed at most.
const EXPOSED_MAX: usize = 1024;

/// Pieces of memory that stays which are kept registered at most.
const RESIDENTS_MAX: usize = 128;

/// Bytes, and a registration for each range.
type Part<D> = (usize, Vec<<D as Device>::Exposed>);

/// What peers may reach, by the numbers of the regions and their parts.
pub(super) struct Exposed<D: Device> {
    regions: BTreeMap<(u64, u32), Part<D>>,
    /// Bytes of all of them.
    bytes: usize,
    /// Parts so far.
    pub(super) made: u64,
    /// Changes of the device's memory that were looked at.
    seen: u64,
}

impl<D: Device> Default for Exposed<D> {
    fn default() -> Self {
        Self { regions: BTreeMap::new(), bytes: 0, made: 0, seen: 0 }
    }
}

impl<D: Device> Exposed<D> {
    /// From now on nobody reaches it.
    pub(super) fn remove(&mut self, region: u64) {
        while let Some((part, _)) = self.regions.range((region, 0)..=(region, u32::MAX)).next() {
            let part = *part;
            self.bytes -= self.regions.remove(&part).map_or(0, |(len, _)| len);
        }
    }

    /// Nobody reaches any of them.
    pub(super) fn clear(&mut self) {
        self.regions.clear();
        self.bytes = 0;
    }

    #[inline]
    pub(super) fn has_changed(&self, device: &D) -> bool {
        !self.regions.is_empty() && device.changes() != self.seen
    }

    /// Ends those whose memory is no longer what it was.
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

    /// The keys of a region, which is exposed now if it is not. Errors: it cannot be.
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

/// The key of memory that stays and is read from, registered once. `None`: it cannot be, or there is too much of it.
fn resident<D: Device>(
    residents: &mut NumberMap<u64, (usize, D::Region)>,
    device: &D,
    local: &SegmentList,
) -> Option<u32> {
    let (addr, len) = (local.first_addr(), local.len());
    match residents.get(&addr) {
        Some((all, region)) if len <= *all => return Some(region.lkey()),
        // It is another piece that begins there: nothing is under way from the one before.
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
        match self.windows(peer, now) {
            Windows::No => return transport::Exposed::No,
            Windows::Later => return transport::Exposed::Later,
            Windows::Ready => {}
        }
        let (Some(device), Some(connection)) = (&self.device, self.connections.get_mut(&peer))
        else {
            return transport::Exposed::No;
        };
        let echoes = device.reads();
        let reads = reads && echoes;
        if memory.len() == 0 || !(reads || writes) {
            return transport::Exposed::Never;
        }
        // What it wrote a peer may read back. That it reads nothing else is its engine's part, as is the question of
        // where the region is.
        match self.exposed.keys(device, region, memory, (reads || echoes, writes)) {
            Ok(keys) => {
                connection.used = now;
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

    /// Only asks whether what was written before is in the peer's memory: reads the byte at `spot`.
    fn ask_alone(
        &mut self,
        peer: PeerId,
        spot: &Spot,
        how: Reach,
        now: u64,
    ) -> Result<(), SendError> {
        let Self { connections, device, doomed, waiting, staging, .. } = self;
        let (Some(connection), Some(device)) = (connections.get_mut(&peer), device) else {
            return Err(STALE);
        };
        let staging = staging.get_or_insert_default();
        let lease = staging.lease(|memory| device.register(memory, true).ok());
        let Some(key) = lease.map(Region::lkey) else {
            // What follows must not go before this is answered, so the connection ends, and all goes by messages.
            log::info(format_args!(
                "the memory for flush reads cannot be registered: a queue pair ends, and messages do its work"
            ));
            self.counts.unregistered += 1;
            doomed.push(peer);
            return Err(STALE);
        };
        let to = (spot.range.addr, spot.key);
        let added = connection.qp.reach(Local::known(&staging.byte(), key), to, true);
        if added.is_ok() {
            connection.note(Posted::Reach(how.token), 1, now);
            self.writes += 1;
        }
        let posted = added.and_then(|()| connection.post_all());
        conclude(peer, connection, posted, waiting, doomed);
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
        let Self { connections, device, doomed, waiting, staging, residents, .. } = self;
        let current = |c: &&mut Connection<D::Qp>| c.id == spot.epoch && c.state == State::Ready;
        let connection = connections.get_mut(&peer).filter(current).ok_or(STALE)?;
        let device = device.as_ref().filter(|_| !doomed.contains(&peer)).ok_or(STALE)?;
        let asks = how.delivered && !how.reads;
        if !connection.has_room(1 + usize::from(asks)) {
            return Err(SendError::Again);
        }
        if local.len() == 0 && asks {
            return self.ask_alone(peer, spot, how, now);
        }
        // Everything that may be refused, before anything has begun.
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
        if let Err(errno) = connection.qp.reach(from, to, how.reads) {
            if let (Posted::Staged(_, place), Some(staging)) = (done, &mut self.staging) {
                staging.leave(place);
            }
            if errno.0 == libc::EOPNOTSUPP {
                return Err(UNREGISTERED);
            }
            tell_broken(errno);
            doomed.push(peer);
            return Err(STALE);
        }
        self.writes += 1;
        self.counts.reached += 1;
        self.counts.reached_bytes += local.len() as u64;
        let mut added = Ok(());
        if let Some((byte, key)) = echo {
            // See `Engine::flush_alone` for what this rests on.
            connection.note(Posted::Silent, local.len(), now);
            self.writes += 1;
            let last = (spot.range.addr + spot.range.len.saturating_sub(1), spot.key);
            added = connection.qp.reach(Local::known(&byte, key), last, true);
        }
        // Even if the echo was refused: it ends with the connection, and not before.
        connection.note(done, local.len(), now);
        let posted = added.and_then(|()| connection.post(local.len()));
        // What was written may arrive or not, and ends with the connection, if that is broken.
        conclude(peer, connection, posted, waiting, doomed);
        Ok(())
    }
}
