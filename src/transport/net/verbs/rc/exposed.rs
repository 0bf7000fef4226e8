//! Registrations for direct RMA: of regions that peers reach, and of memory that this side reads from again and again.

use super::link::{Device, Region};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::cuda::Flush;
use crate::sys::numbers::NumberMap;
use crate::transport::PeerId;
use crate::transport::net::agreement::pause::{Failures, PAUSE_NS};
use crate::transport::net::bulk::BulkSink;
use crate::transport::net::bulk::key::{Key, Use};
use crate::transport::net::verbs::gpu;

/// Most regions whose keys are advertised.
const EXPOSED_MAX: usize = 1024;

/// Most parts of regions that are remembered as not watched for now.
const WAITING_MAX: usize = 64;

/// Most persistent registrations.
const RESIDENTS_MAX: usize = 128;

/// A range that peers may reach by direct RMA.
struct Range<D: Device> {
    /// The id of its region. Regions of the same memory share no registration: the key of one that ends has to end too.
    region: u64,
    addr: u64,
    len: usize,
    /// Bytes of it that are locked in the host's memory.
    locked: usize,
    rights: (bool, bool),
    registration: D::Region,
    /// How many keys of it each peer has.
    peers: NumberMap<PeerId, u32>,
}

impl<D: Device> Range<D> {
    fn is(&self, region: u64, memory: &SegmentList, rights: (bool, bool)) -> bool {
        let of = (self.region, self.addr, self.len, self.rights);
        of == (region, memory.first_addr(), memory.len(), rights)
    }
}

/// Memory that peers may reach by direct RMA. A registration is shared by all peers that have a key of the same range
/// of a region, and ends with the last of these keys.
pub(super) struct Exposed<D: Device> {
    ranges: Vec<Range<D>>,
    /// Bytes of all ranges that are locked in the host's memory.
    locked: usize,
    /// Ranges that have to be flushed: each packet asks.
    flushable: usize,
    /// Registrations made so far.
    pub(super) made: u64,
    /// The device's count of mapping changes at the last check.
    seen: u64,
    /// How often there was no room for a registration, and until when none is tried: an attempt takes the registrations
    /// of messages away.
    full: Failures,
    /// Parts of regions, by region and address, that could not be watched for a reason that may pass: the application
    /// discards pages there, or has left a hole.
    waiting: Vec<((u64, u64), Failures)>,
}

impl<D: Device> Default for Exposed<D> {
    fn default() -> Self {
        let full = Failures::default();
        let (ranges, waiting) = (Vec::new(), Vec::new());
        Self { ranges, locked: 0, flushable: 0, made: 0, seen: 0, full, waiting }
    }
}

impl<D: Device> Exposed<D> {
    /// Ends the ranges for which `stays` is false. False: nobody knows whether what peers have written to memory of GPUs is
    /// there.
    fn retain(&mut self, mut stays: impl FnMut(&mut Range<D>) -> bool) -> bool {
        let (locked, flushable, mut ended) = (&mut self.locked, &mut self.flushable, Vec::new());
        self.ranges.retain_mut(|range| {
            let (keys, flush) = (range.peers.len(), range.registration.flush());
            let stays = stays(range);
            *locked -= if stays { 0 } else { range.locked };
            *flushable -= usize::from(!stays && flush.is_some());
            ended.extend(flush.filter(|_| !stays || range.peers.len() < keys));
            stays
        });
        // The end of a registration waits for the device, not for what it has written to a GPU.
        flush_all(ended.into_iter())
    }

    /// What `peer` has written to memory of GPUs is there when this returns. False: nobody knows.
    pub(super) fn flush(&self, peer: PeerId) -> bool {
        let written = |range: &&Range<D>| range.peers.contains_key(&peer);
        self.flushable == 0
            || flush_all(
                self.ranges.iter().filter(written).filter_map(|range| range.registration.flush()),
            )
    }

    /// Ends one key of `peer`. The device's key alone does not name a range: that of one that has ended, and was not looked
    /// at since, may be another one's already. False: as for [`Self::flush`].
    pub(super) fn remove(&mut self, peer: PeerId, addr: u64, key: u32) -> bool {
        self.retain(|range| {
            if range.addr == addr && range.registration.rkey() == key {
                let left = range.peers.remove(&peer).map_or(0, |count| count - 1);
                if left > 0 {
                    range.peers.insert(peer, left);
                }
            }
            !range.peers.is_empty()
        })
    }

    /// Ends all keys of `peer`.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.retain(|range| {
            range.peers.remove(&peer);
            !range.peers.is_empty()
        });
    }

    #[inline]
    pub(super) fn has_changed(&self, device: &D) -> bool {
        !self.ranges.is_empty() && device.changes() != self.seen
    }

    /// Ends ranges whose mapping has changed. `connection`: the number of a peer's connection.
    #[inline]
    pub(super) fn check(
        &mut self,
        device: &D,
        connection: impl Fn(PeerId) -> Option<u32>,
        sink: &mut dyn BulkSink,
    ) {
        if self.has_changed(device) {
            self.seen = device.changes();
            self.retain(|range| {
                let sound = device.is_sound(&range.registration);
                for peer in range.peers.keys().filter(|_| !sound) {
                    if let Some(connection) = connection(*peer) {
                        sink.on_key_void(*peer, &range.key(connection).encode());
                    }
                }
                sound
            });
        }
    }

    /// This part of a region could not be watched, and is tried again later.
    #[cold]
    fn wait(&mut self, name: (u64, u64), now: u64) {
        let waiting = &mut self.waiting;
        let at = waiting.iter().position(|(other, _)| *other == name).unwrap_or_else(|| {
            if waiting.len() >= WAITING_MAX {
                waiting.remove(0); // the oldest: its region may have ended
            }
            waiting.push((name, Failures::default()));
            waiting.len() - 1
        });
        if let Some((_, failures)) = waiting.get_mut(at) {
            failures.again(now, PAUSE_NS);
        }
    }

    /// A key of a range for `peer`. The range is registered if it is not yet. Errors: it cannot be.
    pub(super) fn add(
        &mut self,
        device: &D,
        (peer, connection): (PeerId, u32),
        (region, memory): (u64, &SegmentList),
        rights: (bool, bool),
        now: u64,
    ) -> Result<Key, Errno> {
        if !self.ranges.iter().any(|range| range.is(region, memory, rights)) {
            let room = device.exposes();
            // Memory of a GPU stays where it is.
            let locked = if memory.is_on_device() { 0 } else { memory.len() };
            if locked > room {
                return Err(Errno(libc::EFBIG));
            }
            if self.ranges.len() >= EXPOSED_MAX
                || locked > room - self.locked.min(room)
                || self.full.pause(now)
            {
                return Err(Errno(libc::ENOSPC));
            }
            let name = (region, memory.first_addr());
            if self.waiting.iter().any(|(other, since)| *other == name && since.pause(now)) {
                return Err(Errno(libc::EAGAIN));
            }
            if self.ranges.is_empty() {
                self.seen = device.changes();
            }
            let registration =
                device.expose(memory, rights).inspect_err(|errno| match errno.0 {
                    libc::ENOMEM => self.full.again(now, PAUSE_NS),
                    libc::EAGAIN => self.wait(name, now),
                    _ => {}
                })?;
            self.full = Failures::default();
            self.waiting.retain(|(other, _)| *other != name);
            let (addr, len, peers) = (memory.first_addr(), memory.len(), NumberMap::default());
            self.locked += locked;
            self.flushable += usize::from(registration.flush().is_some());
            self.made += 1;
            self.ranges.push(Range { region, addr, len, locked, rights, registration, peers });
        }
        let range = self.ranges.iter_mut().find(|range| range.is(region, memory, rights));
        let range = range.ok_or(Errno(libc::ENOMEM))?;
        // The next check tells the peers that have a key of it.
        if !device.is_sound(&range.registration) {
            return Err(Errno(libc::EAGAIN));
        }
        *range.peers.entry(peer).or_default() += 1;
        Ok(range.key(connection))
    }
}

/// Flushes each of them once. False: one could not be.
fn flush_all(flushes: impl Iterator<Item = Flush>) -> bool {
    let mut done = Vec::new();
    for what in flushes {
        if !done.contains(&what) {
            if !gpu::flush(what) {
                return false;
            }
            done.push(what);
        }
    }
    true
}

impl<D: Device> Range<D> {
    fn key(&self, connection: u32) -> Key {
        let (addr, key) = (self.addr, self.registration.rkey());
        Key { connection, slot: 0, addr, key, holds: Use::Region }
    }
}

/// The key of a persistent registration of memory to read from. `None`: it cannot be registered, or there are too many.
pub(super) fn resident<D: Device>(
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
