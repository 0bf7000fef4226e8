//! CUDA IPC: device memory of other processes of the node, without a copy in memory of the host.
//!
//! 1. A long message from device memory is advertised; its key says where the sender's process has published a handle of the
//!    allocation ([`published`]). The receiver opens the allocation once ([`imports`]) and reads the bytes from there. Memory
//!    of cuMemCreate and of pools has no handle: the receiver asks the sender's process for a descriptor ([`door`]).
//! 2. A long message from memory of the host to device memory: the receiver advertises a remote buffer, and the sender opens
//!    that allocation and writes to it.
//! 3. Regions in device memory are read and written by the initiator in the same way.
//!
//! Copies take place on a stream of a device of the process that makes them; one is done when its event says so, for which
//! nothing ever waits in progress. Under the keys of 2 and 3 an access needs a permit ([`permits`]). Where the driver opens an
//! allocation for nobody (the default pool, containers, devices without peer access), the bytes are copied through the host,
//! and one line says why.
//!
//! An allocation stays open for later accesses, but not one of a pool: its owner must not free it before all others have, and
//! learns only of the end of an access. The pool stays open, as long as its owner can tell that it is the same one.
//!
//! Not run on a GPU; on a double only.

mod closer;
pub(crate) mod config;
mod door;
mod imports;
mod lent;
mod permits;
mod published;

use super::peers::PeerTable;
use super::{
    Access, Address, Handler, LaneCaps, LaneId, Lanes, LocalHost, Messages, OneSided, Opening,
    PeerId, Prepared, Purpose, Put, Registered, Registration, Remote, RemoteKey, SendError,
    Sharing, Streaming, Transport,
};
use crate::memory::SegmentList;
use crate::memory::mover::{self, Import, Site, Transfer, Way};
use crate::sys::cuda::Cuda;
use crate::sys::process::{self, Home};
use crate::sys::{Errno, clock};
use crate::telemetry::log;
use closer::Closer;
use door::Door;
use imports::{Name, Refusal};
use lent::{Event, Lendings};
use permits::Outcome;
use published::{Foreign, Given, PARTS_MAX, Place};
use std::collections::VecDeque;
use std::sync::Arc;

/// The kinds of its remote keys: of a message to be read, and of memory for which there is a permit. Their words: where the
/// record of the allocation, and the permit, is; the record's tag; the offset of the memory.
const MESSAGE: u8 = 4;
const PERMITTED: u8 = 5;
const LANE: LaneId = LaneId::of(CudaIpc::KEYS);
/// Accesses in progress of one endpoint.
const ACCESSES_MAX: usize = 16;
/// A peer whose memory was refused this often in a row is not tried again, and one that has not filled this many remote
/// buffers in a row gets no more for this time, nanoseconds.
const REFUSALS_MAX: u8 = 3;
const PAUSE_NS: u64 = 1_000_000_000;
/// Permits that are left for remote buffers.
const SPARE: usize = permits::COUNT / 4;
/// Estimates of a launch with its event, nanoseconds, and of a copy within a device, bytes per microsecond.
const LANE_NS: u32 = 8000;
const LANE_RATE: u32 = 1_000_000;

const fn unreachable(errno: i32) -> SendError {
    SendError::Unreachable(Errno(errno))
}

/// A peer on this node.
#[derive(Debug)]
struct Peer {
    id: PeerId,
    /// Its process, once memory of it was accessed; 0 before.
    pid: i32,
    /// The table of that process.
    table: Option<Arc<Foreign>>,
    /// How often its memory was refused since it was last accessed; and that which has no handle.
    refusals: u8,
    of_descriptors: u8,
    /// How many remote buffers it has not filled since it last filled one, and when that was.
    unfilled: (u8, u64),
}

/// An access in progress. To drop it waits for its end. The order of its fields is that in which they are dropped: the owner
/// of the memory learns of the end when all copies have ended, and memory of a pool is closed.
#[derive(Debug)]
struct AccessBegun {
    peer: PeerId,
    token: u64,
    /// One for each allocation. None: a flush.
    transfers: Vec<Transfer>,
    _unkept: Unkept,
    entered: Option<Entered>,
}

/// Closes memory of pools that no access uses any more when it is dropped.
#[derive(Debug)]
struct Unkept;

/// A part of an access: bytes of one allocation.
struct Part {
    import: Arc<Import>,
    offset: u64,
    len: usize,
}

/// A permit that is in use.
#[derive(Debug)]
struct Entered {
    table: Arc<Foreign>,
    name: permits::Name,
    stream: Stream,
    /// Its owner is told how the access ends.
    notify: bool,
    /// What its end tells the owner.
    outcome: Outcome,
}

/// Accesses of one stream keep their order: those of one context that change device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stream {
    Of(Site),
    /// One that reads to memory of the host.
    None,
}

/// The transport.
#[derive(Debug)]
pub(crate) struct CudaIpc {
    /// The process that opened it: a forked child closes nothing for its parent.
    owner: Home,
    me: PeerId,
    host: LocalHost,
    open_max: usize,
    peers: Vec<Peer>,
    /// In the order of their start.
    accesses: VecDeque<AccessBegun>,
    lent: Lendings,
    /// An access waits for one of another endpoint, as many allocations are open as may, or for a descriptor. Nobody wakes a
    /// thread that sleeps meanwhile.
    starved: bool,
    /// Open once memory without a handle was published.
    door: Option<Arc<Door>>,
    /// There once memory of another process was opened.
    closer: Option<Arc<Closer>>,
}

/// What a key says.
struct Named {
    place: Place,
    tag: u64,
    offset: u64,
    permit: Option<permits::Name>,
}

impl Named {
    fn by(key: &RemoteKey) -> Option<Self> {
        let [Some(word), Some(tag), Some(offset)] = [0, 1, 2].map(|n| key.word(n)) else {
            return None;
        };
        let (place, permit) = Place::and_permit(word);
        Some(match key.kind() {
            MESSAGE => Self { place: Place(word), tag, offset, permit: None },
            _ => Self { place, tag, offset, permit: Some(permit) },
        })
    }
}

impl Entered {
    /// `None`: the permit is withdrawn. An access that is not begun ends in silence: the memory is filled in another way.
    fn new(table: Arc<Foreign>, name: permits::Name, stream: Stream, notify: bool) -> Option<Self> {
        let enters = table.permit(name)?.enter();
        enters.then_some(Self { table, name, stream, notify, outcome: Outcome::Silent })
    }

    fn expect(&mut self, outcome: Outcome) {
        if self.notify {
            self.outcome = outcome;
        }
    }
}

impl AccessBegun {
    fn has_ended(&self) -> Result<bool, mover::Failure> {
        self.transfers.iter().try_fold(true, |all, one| Ok(one.has_ended()? && all))
    }

    fn expect(&mut self, outcome: Outcome) {
        self.entered.iter_mut().for_each(|entered| entered.expect(outcome));
    }

    /// Its bytes are in place.
    fn succeed(mut self) {
        self.expect(Outcome::Filled);
    }

    /// Starts its copies. Returns whether memory without a handle is part of it.
    fn copy(&mut self, local: &SegmentList, parts: Vec<Part>, way: Way) -> Result<bool, Refusal> {
        let (mut done, mut by_descriptor) = (0, false);
        for Part { import, offset, len } in parts {
            by_descriptor |= import.is_by_descriptor();
            let begun = local.slice(done, len).begin_transfer(import, offset, way);
            self.transfers.push(begun.map_err(Refusal::Driver)?);
            done += len;
        }
        Ok(by_descriptor)
    }

    /// Tells the owner of the memory that the access has ended, which is reported later.
    fn leave(&mut self) {
        if let Some(mut entered) = self.entered.take() {
            self.transfers.clear();
            drop(Unkept);
            entered.expect(Outcome::Filled);
        }
    }
}

impl Drop for Unkept {
    fn drop(&mut self) {
        imports::of_process().release();
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.table.permit(self.name).into_iter().for_each(|permit| permit.leave(self.outcome));
    }
}

impl CudaIpc {
    fn peer(&self, peer: PeerId) -> Option<&Peer> {
        self.peers.iter().find(|other| other.id == peer && other.refusals < REFUSALS_MAX)
    }

    fn peer_mut(&mut self, peer: PeerId) -> Option<&mut Peer> {
        self.peers.iter_mut().find(|other| other.id == peer)
    }

    /// The table of a peer's process.
    fn table(&mut self, peer: PeerId, pid: i32) -> Result<Arc<Foreign>, Refusal> {
        let gone = Refusal::Record(Errno(libc::ESRCH));
        let peer = self.peer_mut(peer).ok_or(gone)?;
        if let Some(table) = peer.table.as_ref().filter(|_| peer.pid == pid) {
            return Ok(Arc::clone(table));
        }
        let table = Arc::new(Foreign::find(pid).map_err(Refusal::Record)?);
        (peer.pid, peer.table) = (pid, Some(Arc::clone(&table)));
        Ok(table)
    }

    /// Begins an access to the memory under a key.
    fn begin(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        remote: &Remote,
        (way, token, notify): (Way, u64, bool),
    ) -> Result<Access, SendError> {
        let named = Named::by(&remote.key).ok_or(unreachable(libc::EINVAL))?;
        let (on_device, _) = local.range().ok_or(unreachable(libc::EFAULT))?;
        // Memory of the host is copied in any context.
        let site = on_device.or_else(mover::any_site).ok_or(unreachable(libc::EFAULT))?;
        let pid = named.place.pid();
        if self.peer(peer).is_none() {
            return Err(unreachable(libc::ESTALE));
        }
        let stream = match (way, on_device) {
            (Way::Read, None) => Stream::None,
            _ => Stream::Of(site),
        };
        if self.accesses.len() >= ACCESSES_MAX
            || named.permit.is_some() && self.is_behind(peer, stream)
        {
            return Err(SendError::Again);
        }
        if pid != process::pid() {
            self.closer = self.closer.take().or_else(Closer::get);
            self.closer.as_ref().ok_or(unreachable(libc::EAGAIN))?;
        }
        let table = self.table(peer, pid).map_err(|refusal| self.refuse(peer, pid, refusal))?;
        // Before it is opened: the owner of what is open frees it only after the access.
        let enter = |name| {
            Entered::new(Arc::clone(&table), name, stream, notify).ok_or(unreachable(libc::ESTALE))
        };
        let entered = named.permit.map(enter).transpose()?;
        let transfers = Vec::new();
        let mut access = AccessBegun { peer, token, transfers, _unkept: Unkept, entered };
        let offset = named.offset.saturating_add(remote.offset);
        let opens = self.peer(peer).is_some_and(|peer| peer.of_descriptors < REFUSALS_MAX);
        let begun = self
            .open((named.place, named.tag), &table, (site, opens), (offset, local.len()))
            .and_then(|parts| access.copy(local, parts, way));
        let by_descriptor = match begun {
            Ok(by_descriptor) => by_descriptor,
            Err(refusal) => {
                drop(access);
                return Err(self.refuse(peer, pid, refusal));
            }
        };
        access.expect(Outcome::Failed);
        if let Some(peer) = self.peer_mut(peer) {
            peer.refusals = 0;
            peer.of_descriptors *= u8::from(!by_descriptor);
        }
        self.accesses.push_back(access);
        Ok(Access::Begun)
    }

    /// The allocations that have `len` bytes from `offset` on, of which the first is that of a record; opened at a site, those
    /// without a handle too if it says so.
    fn open(
        &self,
        mut name: Name,
        table: &Foreign,
        how: (Site, bool),
        (mut offset, mut len): (u64, usize),
    ) -> Result<Vec<Part>, Refusal> {
        const OUTSIDE: Refusal = Refusal::Driver(mover::Failure(1));
        let mut parts = Vec::new();
        for _ in 0..PARTS_MAX {
            if parts.len() >= self.open_max {
                // It would wait for those of its own: by the host.
                return Err(Refusal::Record(Errno(libc::ESTALE)));
            }
            let import = self.open_one(name, table, how)?;
            let here = import.len().saturating_sub(offset).min(len as u64);
            let rest = offset.saturating_sub(import.len());
            if here > 0 {
                parts.push(Part { import, offset, len: here as usize });
            }
            (offset, len) = (rest, len - here as usize);
            if len == 0 {
                return Ok(parts);
            }
            let record = table.read(name.0, name.1).map_err(Refusal::Record)?;
            name = record.next.filter(|next| next.0.pid() == name.0.pid()).ok_or(OUTSIDE)?;
        }
        Err(OUTSIDE)
    }

    fn open_one(
        &self,
        (place, tag): Name,
        table: &Foreign,
        how: (Site, bool),
    ) -> Result<Arc<Import>, Refusal> {
        if place.pid() != process::pid() {
            return imports::of_process().get(((place, tag), table), how, self.open_max);
        }
        let record = table.read(place, tag).map_err(Refusal::Record)?;
        Ok(Arc::new(Import::own(how.0, record.start, record.len)))
    }

    /// An access to the peer's regions and remote buffers is in progress that one on this stream could overtake, or would
    /// have to follow.
    fn is_behind(&self, peer: PeerId, stream: Stream) -> bool {
        let of_peer = self.accesses.iter().filter(|access| access.peer == peer);
        of_peer.filter_map(|access| access.entered.as_ref()).any(|entered| entered.stream != stream)
    }

    /// The answer to an access that cannot be.
    fn refuse(&mut self, peer: PeerId, pid: i32, refusal: Refusal) -> SendError {
        match refusal {
            Refusal::NotYet => {
                self.starved = true;
                return SendError::Again;
            }
            // The sender's record was replaced meanwhile, which says nothing of the next one.
            Refusal::Record(Errno(libc::ESTALE)) => return unreachable(libc::ESTALE),
            // Nor does a lack of descriptors, here or there.
            Refusal::Record(errno) if errno.is_shortage() => return unreachable(libc::ESTALE),
            Refusal::Descriptor(failure) if failure.is_shortage() => {
                return unreachable(libc::ESTALE);
            }
            Refusal::Busy => {
                log::limited!(
                    "device memory of process {pid} is copied through the host: CUDA has not closed another allocation for long, which waits for kernels of this process"
                );
                return unreachable(libc::ESTALE);
            }
            Refusal::Record(errno) => log::limited!(
                cause: errno.0,
                "device memory of process {pid} is copied through the host: its table of handles cannot be read: {errno}"
            ),
            Refusal::Driver(failure) => log::limited!(
                cause: failure.0,
                "device memory of process {pid} is copied through the host: CUDA answers {} to its IPC handle",
                failure.0
            ),
            Refusal::Descriptor(failure) => log::limited!(
                cause: failure.0,
                "memory of process {pid} of cuMemCreate or of a pool is copied through the host: CUDA answers {} to its descriptor",
                failure.0
            ),
        }
        if let Some(peer) = self.peer_mut(peer) {
            let count = match refusal {
                Refusal::Descriptor(_) => &mut peer.of_descriptors,
                _ => &mut peer.refusals,
            };
            *count = count.saturating_add(1);
        }
        unreachable(libc::ESTALE)
    }

    /// The device has failed, here or at the peer: the lane ends, with all keys and accesses.
    fn fail(&mut self, peer: PeerId, handler: &mut impl Handler) {
        self.end_peer(peer, handler);
        self.peer_mut(peer).into_iter().for_each(|peer| peer.refusals = REFUSALS_MAX);
        handler.on_lane_lost(peer, LANE);
    }

    /// Ends all accesses to memory of the peer, and its own. What it has filled counts.
    fn end_peer(&mut self, peer: PeerId, handler: &mut impl Handler) {
        self.end_accesses(Some(peer));
        let filled = self.lent.end_all(Some(peer));
        filled.into_iter().for_each(|(peer, token)| handler.on_notify(peer, token));
    }

    /// Waits for the end of accesses to the memory of a peer, or (`None`) of all, which nobody is told of here.
    fn end_accesses(&mut self, peer: Option<PeerId>) {
        let (ending, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.accesses)
            .into_iter()
            .partition(|access| peer.is_none_or(|peer| peer == access.peer));
        self.accesses = others.into();
        for access in ending {
            if access.transfers.iter().all(Transfer::finish) {
                access.succeed();
            }
        }
    }

    /// Reports the accesses that have ended, in the order of their start.
    fn finish(&mut self, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        while let Some(access) = self.accesses.front() {
            let peer = access.peer;
            match access.has_ended() {
                Ok(true) => {
                    let token = access.token;
                    self.accesses.pop_front().into_iter().for_each(AccessBegun::succeed);
                    handler.on_done(peer, token);
                }
                Ok(false) => break,
                Err(_) => {
                    // It has failed, whatever the driver answers next.
                    drop(self.accesses.pop_front());
                    self.fail(peer, handler);
                }
            }
            n += 1;
        }
        n
    }

    /// Reports remote buffers that are filled, or failed.
    fn hear(&mut self, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        while let Some(event) = self.lent.next() {
            match event {
                Event::Filled(peer, token) => {
                    self.peer_mut(peer).into_iter().for_each(|peer| peer.unfilled = (0, 0));
                    handler.on_notify(peer, token);
                }
                Event::Failed(peer) => self.fail(peer, handler),
            }
            n += 1;
        }
        n
    }

    /// Says why memory is not published.
    fn explain(failure: mover::Failure) {
        match failure {
            mover::Failure::NOT_SHARED => log::limited!(
                "device memory of cuMemCreate or of a pool is copied through the host: it was made without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
            ),
            mover::Failure::TOO_LONG => log::limited!(
                "device memory of a pool is copied through the host: its allocation is longer than 4 GiB, which drivers fail to import"
            ),
            _ => log::limited!(
                cause: failure.0,
                "device memory is copied through the host: CUDA answers {} where a handle for other processes is asked for",
                failure.0
            ),
        }
    }

    /// Publishes memory; its place, tag and offset.
    fn publish(&mut self, addr: usize, len: usize) -> Result<(Place, u64, u64), mover::Failure> {
        let door = &mut self.door;
        published::publish(addr as u64, len, || {
            *door = door.take().or_else(Door::get);
            door.as_ref().map_or(0, |door| door.name)
        })
    }

    /// Lends memory to a peer, under a permit.
    fn lend(
        &mut self,
        peer: PeerId,
        (addr, len): (usize, usize),
        token: Option<u64>,
    ) -> Result<Option<RemoteKey>, mover::Failure> {
        let Some(given) = Given::new(if token.is_some() { 0 } else { SPARE }) else {
            log::limited!(
                "device memory is copied through the host: all permits of this process are given"
            );
            return Ok(None);
        };
        let (place, tag, offset) = self.publish(addr, len)?;
        let key = RemoteKey::new(PERMITTED).with(place.with(given.0)).with(tag).with(offset);
        self.lent.add(peer, key, given, token);
        Ok(Some(key))
    }
}

impl Drop for CudaIpc {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // They are the parent's too, and a lock may be held for ever here.
            std::mem::forget((std::mem::take(&mut self.accesses), std::mem::take(&mut self.lent)));
            return;
        }
        self.end_accesses(None);
        self.lent.end_all(None);
        let pids = self.peers.iter().map(|peer| peer.pid).filter(|pid| *pid != 0);
        pids.for_each(|pid| imports::of_process().forget(pid));
    }
}

impl Messages for CudaIpc {}
impl Streaming for CudaIpc {}
impl Sharing for CudaIpc {}

impl OneSided for CudaIpc {
    fn lanes(&self, peer: PeerId) -> Lanes {
        if self.peer(peer).is_none() {
            return Lanes::default();
        }
        Lanes::from(LaneCaps {
            host: false,
            device: true,
            reads: true,
            receive_max: usize::MAX,
            read_min: Some(usize::MAX),
            write_min: Some(usize::MAX),
            register_max: usize::MAX,
            ..LaneCaps::of_host(LANE, LANE_NS, LANE_RATE)
        })
    }

    fn prepare(&mut self, peer: PeerId, _: LaneId) -> Prepared {
        if self.peer(peer).is_some() { Prepared::Ready } else { Prepared::No }
    }

    fn register(
        &mut self,
        peer: PeerId,
        _: LaneId,
        memory: &SegmentList,
        purpose: Purpose,
    ) -> Registered {
        let Some((Some(_), addr)) = memory.range() else { return Registered::No };
        let len = memory.len();
        let pauses = self.peer(peer).is_none_or(|peer| {
            peer.unfilled.0 >= REFUSALS_MAX && clock::now_ns() - peer.unfilled.1 < PAUSE_NS
        });
        let (made, reads, writes) = match purpose {
            Purpose::Send => {
                let key = |(Place(place), tag, offset)| {
                    Some(RemoteKey::new(MESSAGE).with(place).with(tag).with(offset))
                };
                (self.publish(addr, len).map(key), true, false)
            }
            Purpose::Receive { .. } if pauses => return Registered::No,
            Purpose::Receive { token } => (self.lend(peer, (addr, len), Some(token)), false, true),
            Purpose::Region { reads, writes, .. } => {
                (self.lend(peer, (addr, len), None), reads, writes)
            }
        };
        match made {
            Ok(Some(key)) => {
                let confirms = matches!(purpose, Purpose::Region { .. });
                Registered::Yes(Registration { key, reads, writes, confirms })
            }
            Ok(None) => Registered::No,
            Err(failure) => {
                Self::explain(failure);
                Registered::Never
            }
        }
    }

    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey) -> bool {
        // The permits of a forked child are its parent's.
        if self.owner.is_here() && self.lent.end(peer, key) {
            let peer = self.peer_mut(peer);
            let now = clock::now_ns();
            peer.into_iter().for_each(|p| p.unfilled = (p.unfilled.0.saturating_add(1), now));
        }
        false
    }

    fn is_settled(&mut self, _: bool) -> bool {
        if !self.owner.is_here() {
            return true;
        }
        // Peers may wait in the same way for accesses of this endpoint that have ended.
        for access in &mut self.accesses {
            if access.has_ended() == Ok(true) {
                access.leave();
            }
        }
        self.lent.is_settled()
    }

    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        to: &Remote,
        how: Put,
    ) -> Result<Access, SendError> {
        self.begin(peer, local, to, (Way::Write, how.token, how.notify))
    }

    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        from: &Remote,
        token: u64,
    ) -> Result<Access, SendError> {
        self.begin(peer, local, from, (Way::Read, token, false))
    }

    fn flush_puts(&mut self, peer: PeerId, _: &Remote, token: u64) -> Result<Access, SendError> {
        // A put is complete when its bytes are in the peer's memory.
        if self.accesses.iter().all(|access| access.peer != peer) {
            return Ok(Access::Moved(1));
        }
        let (transfers, entered) = (Vec::new(), None);
        self.accesses.push_back(AccessBegun { peer, token, transfers, _unkept: Unkept, entered });
        Ok(Access::Begun)
    }
}

impl Transport for CudaIpc {
    const NAME: &'static str = "CUDA IPC";
    const CARRIES: bool = false;
    const KEYS: &'static [u8] = &[MESSAGE, PERMITTED];

    fn open(opening: &mut Opening<'_>) -> Result<Option<Self>, Errno> {
        let config = &opening.config;
        let on = config.cuda_ipc.on && Cuda::get().is_some();
        Ok(on.then(|| Self {
            owner: Home::here(),
            me: opening.my_id,
            host: opening.host.clone(),
            open_max: config.cuda_ipc.open_max,
            peers: Vec::new(),
            accesses: VecDeque::new(),
            lent: Lendings::default(),
            starved: false,
            door: None,
            closer: None,
        }))
    }

    fn meet(&mut self, peer: PeerId, address: &Address) {
        let known = self.peers.iter().any(|other| other.id == peer);
        if !known && peer != self.me && self.host.owns(address.0.ip()) {
            let (pid, table, unfilled) = (0, None, (0, 0));
            let (id, refusals, of_descriptors) = (peer, 0, 0);
            self.peers.push(Peer { id, pid, table, refusals, of_descriptors, unfilled });
        }
    }

    fn turn(&mut self, _: &mut PeerTable, handler: &mut impl Handler) -> usize {
        self.starved = false;
        self.finish(handler) + self.hear(handler)
    }

    fn every_ns(_: bool, _: bool) -> u64 {
        0
    }

    fn are_left_settled() -> bool {
        lent::are_left_settled()
    }

    fn drain(&mut self, peer: PeerId, handler: &mut impl Handler) {
        self.end_peer(peer, handler);
        if let Some(at) = self.peers.iter().position(|other| other.id == peer) {
            let Peer { pid, .. } = self.peers.swap_remove(at);
            imports::of_process().forget(pid);
        }
    }

    fn sleep(&mut self) -> bool {
        self.accesses.is_empty() && !self.starved && !self.lent.are_awaited()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::OwnedBuffer;

    const PEER: PeerId = PeerId(1);
    const DISTANT: PeerId = PeerId(2);
    const STALE: SendError = unreachable(libc::ESTALE);

    fn with_peers() -> CudaIpc {
        let (me, host) = (PeerId(0), LocalHost::detect());
        let (peers, accesses, lent) = (Vec::new(), VecDeque::new(), Lendings::default());
        let (owner, open_max, starved) = (Home::here(), 4, false);
        let (door, closer) = (None, None);
        let mut ipc =
            CudaIpc { owner, me, host, open_max, peers, accesses, lent, starved, door, closer };
        let at = |text: &str| Address::from_text(text).unwrap();
        for (peer, address) in [
            (me, "127.0.0.1:1"),
            (PEER, "127.0.0.1:2"),
            (DISTANT, "192.0.2.1:2"),
            (PEER, "127.0.0.1:2"),
        ] {
            ipc.meet(peer, &at(address));
        }
        ipc
    }

    fn order(ipc: &CudaIpc, peer: PeerId, on_device: bool) -> usize {
        ipc.lanes(peer).by_cost(1 << 20, on_device).count()
    }

    #[test]
    fn it_takes_device_memory_of_other_processes_of_the_node() {
        let ipc = with_peers();
        assert_eq!([PeerId(0), PEER, DISTANT].map(|peer| order(&ipc, peer, true)), [0, 1, 0]);
        assert_eq!(order(&ipc, PEER, false), 0, "never that of the host");
    }

    #[test]
    fn memory_of_the_host_is_not_advertised() {
        let (mut ipc, host) = (with_peers(), OwnedBuffer::zeroed(8));
        let device = host.segments().as_device(1);
        assert_eq!(ipc.register(PEER, LANE, &host.segments(), Purpose::Send), Registered::No);
        let receive = Purpose::Receive { token: 1 };
        assert_eq!(ipc.register(PEER, LANE, &host.segments(), receive), Registered::No);
        // No driver knows it.
        let region = Purpose::Region { id: 1, reads: true, writes: true };
        for purpose in [Purpose::Send, receive, region] {
            assert_eq!(ipc.register(PEER, LANE, &device, purpose), Registered::Never);
        }
        assert!(ipc.sleep(), "nothing is lent");
        let key = RemoteKey::new(MESSAGE).with(1).with(2).with(3);
        let get = |ipc: &mut CudaIpc, local: &SegmentList, key| {
            ipc.get(PEER, local, &Remote { key, offset: 0 }, 7)
        };
        // This process has no context to fill it from.
        assert_eq!(get(&mut ipc, &host.segments(), key), Err(unreachable(libc::EFAULT)));
        assert_eq!(get(&mut ipc, &device, RemoteKey::new(MESSAGE)), Err(unreachable(libc::EINVAL)));
    }

    #[test]
    fn a_shortage_says_nothing_of_a_peer() {
        let mut ipc = with_peers();
        for _ in 0..REFUSALS_MAX {
            let refusals = [
                Refusal::Record(Errno(libc::EMFILE)),
                Refusal::Descriptor(mover::Failure(2)),
                Refusal::Descriptor(mover::Failure(304)),
            ];
            for refusal in refusals {
                assert_eq!(ipc.refuse(PEER, 7, refusal), STALE);
            }
        }
        let peer = ipc.peer(PEER).unwrap();
        assert_eq!((peer.refusals, peer.of_descriptors), (0, 0));
    }

    #[test]
    fn a_peer_whose_memory_is_refused_is_not_asked_for_ever() {
        let (mut ipc, memory) = (with_peers(), OwnedBuffer::zeroed(8));
        let local = memory.segments().as_device(1);
        // A process that no system has.
        let key = RemoteKey::new(MESSAGE).with(u64::MAX).with(2).with(3);
        for _ in 0..REFUSALS_MAX {
            assert_eq!(ipc.prepare(PEER, LANE), Prepared::Ready);
            assert_eq!(ipc.get(PEER, &local, &Remote { key, offset: 0 }, 7), Err(STALE));
        }
        assert_eq!((ipc.prepare(PEER, LANE), order(&ipc, PEER, true)), (Prepared::No, 0));
        struct Nobody;
        impl Handler for Nobody {
            fn on_peer(&mut self, _: PeerId, _: &Address) {}
            fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {}
            fn on_departure(&mut self, _: PeerId, _: super::super::Departure) {}
            fn is_owed(&self, _: PeerId) -> bool {
                false
            }
        }
        ipc.drain(PEER, &mut Nobody);
        ipc.meet(PEER, &Address::from_text("127.0.0.1:2").unwrap());
        assert_eq!(ipc.prepare(PEER, LANE), Prepared::Ready, "another process may be there");
    }
}
