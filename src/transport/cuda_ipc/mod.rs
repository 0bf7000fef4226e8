//! CUDA IPC: long messages from device memory to device memory of another process of the node, without a copy in memory of
//! the host.
//!
//! The sender advertises the message; its key says where the sender's process has published a handle of the allocation
//! ([`published`]). The receiver opens the allocation once ([`imports`]), and copies the bytes from there on a stream of its
//! device; a copy is done when its event says so, for which nothing ever waits in progress. Where the driver opens no handle
//! (pools, memory of cuMemCreate, containers, devices without peer access), the message is asked for as fragments, which
//! are copied through the host, and one line says why.
//!
//! The transport only reads: it has no remote buffers and no regions yet. Not run on a GPU; on a double only.

pub(crate) mod config;
mod imports;
mod published;

use super::peers::PeerTable;
use super::{
    Access, Address, Handler, LaneCaps, LaneId, Lanes, LocalHost, Messages, OneSided, Opening,
    PeerId, Prepared, Purpose, Registered, Registration, Remote, RemoteKey, SendError, Sharing,
    Streaming, Transport,
};
use crate::memory::SegmentList;
use crate::memory::mover::{self, Transfer};
use crate::sys::cuda::Cuda;
use crate::sys::{Errno, process};
use crate::telemetry::log;
use imports::Refusal;
use published::Place;
use std::collections::VecDeque;

/// The kind of its remote keys. Their words: where the record of the allocation is; its tag; the offset of the memory.
const KEY: u8 = 4;
const LANE: LaneId = LaneId::of(CudaIpc::KEYS);
/// Reads in progress of one endpoint.
const READS_MAX: usize = 16;
/// A peer whose memory was refused this often in a row is not tried again.
const REFUSALS_MAX: u8 = 3;
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
    /// Its process, once memory of it was read; 0 before.
    pid: i32,
    /// How often its memory was refused since it was last read.
    refusals: u8,
}

/// A read in progress.
#[derive(Debug)]
struct Read {
    peer: PeerId,
    token: u64,
    transfer: Transfer,
}

/// The transport.
#[derive(Debug)]
pub(crate) struct CudaIpc {
    /// The process that opened it: a forked child closes nothing for its parent.
    owner: i32,
    me: PeerId,
    host: LocalHost,
    open_max: usize,
    peers: Vec<Peer>,
    /// In the order of their start.
    reads: VecDeque<Read>,
    /// A read waits for one of another endpoint: as many allocations are open as may. Nobody wakes a thread that sleeps
    /// meanwhile.
    starved: bool,
}

impl CudaIpc {
    fn peer(&self, peer: PeerId) -> Option<&Peer> {
        self.peers.iter().find(|other| other.id == peer && other.refusals < REFUSALS_MAX)
    }

    /// What a `get` that cannot be answers.
    fn refuse(&mut self, peer: PeerId, pid: i32, refusal: Refusal) -> SendError {
        match refusal {
            Refusal::Full => {
                self.starved = true;
                return SendError::Again;
            }
            // The sender's record was replaced meanwhile, which says nothing of the next one.
            Refusal::Record(Errno(libc::ESTALE)) => return unreachable(libc::ESTALE),
            Refusal::Record(errno) => log::limited!(
                cause: errno.0,
                "device memory of process {pid} is copied through the host: its table of handles cannot be read: {errno}"
            ),
            Refusal::Driver(failure) => log::limited!(
                cause: failure.0,
                "device memory of process {pid} is copied through the host: CUDA answers {} to its IPC handle",
                failure.0
            ),
        }
        if let Some(peer) = self.peers.iter_mut().find(|other| other.id == peer) {
            peer.refusals = peer.refusals.saturating_add(1);
        }
        unreachable(libc::ESTALE)
    }

    /// Ends the reads from a peer, and reports them as lost with the lane if any of them has failed.
    fn fail(&mut self, peer: PeerId, handler: &mut impl Handler) {
        self.reads.retain(|read| read.peer != peer);
        if let Some(peer) = self.peers.iter_mut().find(|other| other.id == peer) {
            peer.refusals = REFUSALS_MAX;
        }
        handler.on_lane_lost(peer, LANE);
    }
}

impl Drop for CudaIpc {
    fn drop(&mut self) {
        if self.owner != process::pid() {
            // The reads are the parent's too, and a lock may be held for ever here.
            std::mem::forget(std::mem::take(&mut self.reads));
            return;
        }
        self.reads.clear();
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
            ..LaneCaps::of_host(LANE, LANE_NS, LANE_RATE)
        })
    }

    fn prepare(&mut self, peer: PeerId, _: LaneId) -> Prepared {
        if self.peer(peer).is_some() { Prepared::Ready } else { Prepared::No }
    }

    fn register(
        &mut self,
        _: PeerId,
        _: LaneId,
        memory: &SegmentList,
        purpose: Purpose,
    ) -> Registered {
        let Some((Some(_), addr)) = memory.range().filter(|_| purpose == Purpose::Send) else {
            return Registered::No;
        };
        match published::publish(addr as u64) {
            Ok((Place(place), tag, offset)) => {
                let key = RemoteKey::new(KEY).with(place).with(tag).with(offset);
                Registered::Yes(Registration { key, reads: true, writes: false, confirms: false })
            }
            Err(failure) => {
                log::limited!(
                    cause: failure.0,
                    "device memory is copied through the host: CUDA answers {} where a handle for other processes is asked for",
                    failure.0
                );
                Registered::Never
            }
        }
    }

    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        from: &Remote,
        token: u64,
    ) -> Result<Access, SendError> {
        let words = [0, 1, 2].map(|n| from.key.word(n));
        let [Some(place), Some(tag), Some(at)] = words else {
            return Err(unreachable(libc::EINVAL));
        };
        let (site, _) = local.range().ok_or(unreachable(libc::EINVAL))?;
        // The receiving side copies to memory of the host.
        let site = site.or_else(mover::any_site).ok_or(unreachable(libc::ENXIO))?;
        let place = Place(place);
        let pid = place.pid();
        if self.peer(peer).is_none() {
            return Err(unreachable(libc::ESTALE));
        }
        if pid == process::pid() {
            // The driver opens no handle of one's own process.
            log::info(format_args!(
                "device memory of another endpoint of this process is copied through the host"
            ));
            if let Some(peer) = self.peers.iter_mut().find(|other| other.id == peer) {
                peer.refusals = REFUSALS_MAX;
            }
            return Err(unreachable(libc::ESTALE));
        }
        if self.reads.len() >= READS_MAX {
            return Err(SendError::Again);
        }
        let opened = imports::of_process().get((place, tag), site, self.open_max);
        let begun = opened.and_then(|import| {
            let begun = local.begin_transfer(import, at.saturating_add(from.offset));
            begun.map_err(Refusal::Driver)
        });
        let transfer = begun.map_err(|refusal| self.refuse(peer, pid, refusal))?;
        if let Some(peer) = self.peers.iter_mut().find(|other| other.id == peer) {
            (peer.pid, peer.refusals) = (pid, 0);
        }
        self.reads.push_back(Read { peer, token, transfer });
        Ok(Access::Begun)
    }
}

impl Transport for CudaIpc {
    const NAME: &'static str = "CUDA IPC";
    const CARRIES: bool = false;
    const KEYS: &'static [u8] = &[KEY];

    fn open(opening: &mut Opening<'_>) -> Result<Option<Self>, Errno> {
        let config = &opening.config;
        let on = config.cuda_ipc.on && Cuda::get().is_some();
        Ok(on.then(|| Self {
            owner: process::pid(),
            me: opening.my_id,
            host: opening.host.clone(),
            open_max: config.cuda_ipc.open_max,
            peers: Vec::new(),
            reads: VecDeque::new(),
            starved: false,
        }))
    }

    fn meet(&mut self, peer: PeerId, address: &Address) {
        let known = self.peers.iter().any(|other| other.id == peer);
        if !known && peer != self.me && self.host.owns(address.0.ip()) {
            self.peers.push(Peer { id: peer, pid: 0, refusals: 0 });
        }
    }

    fn turn(&mut self, _: &mut PeerTable, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        self.starved = false;
        while let Some(read) = self.reads.front() {
            let peer = read.peer;
            match read.transfer.has_ended() {
                Ok(true) => {
                    let token = read.token;
                    self.reads.pop_front();
                    handler.on_done(peer, token);
                }
                Ok(false) => break,
                Err(_) => self.fail(peer, handler),
            }
            n += 1;
        }
        n
    }

    fn every_ns(_: bool, _: bool) -> u64 {
        0
    }

    fn drain(&mut self, peer: PeerId, _: &mut impl Handler) {
        // Who drops a read waits for its end.
        self.reads.retain(|read| read.peer != peer);
        if let Some(at) = self.peers.iter().position(|other| other.id == peer) {
            let Peer { pid, .. } = self.peers.swap_remove(at);
            imports::of_process().forget(pid);
        }
    }

    fn sleep(&mut self) -> bool {
        self.reads.is_empty() && !self.starved
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
        let (peers, reads) = (Vec::new(), VecDeque::new());
        let owner = process::pid();
        let mut ipc = CudaIpc { owner, me, host, open_max: 4, peers, reads, starved: false };
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
        assert_eq!(ipc.register(PEER, LANE, &device, receive), Registered::No);
        // No driver knows it.
        assert_eq!(ipc.register(PEER, LANE, &device, Purpose::Send), Registered::Never);
        let key = RemoteKey::new(KEY).with(1).with(2).with(3);
        let get = |ipc: &mut CudaIpc, local: &SegmentList, key| {
            ipc.get(PEER, local, &Remote { key, offset: 0 }, 7)
        };
        // This process has no context to fill it from.
        assert_eq!(get(&mut ipc, &host.segments(), key), Err(unreachable(libc::ENXIO)));
        assert_eq!(get(&mut ipc, &device, RemoteKey::new(KEY)), Err(unreachable(libc::EINVAL)));
    }

    #[test]
    fn a_peer_whose_memory_is_refused_is_not_asked_for_ever() {
        let (mut ipc, memory) = (with_peers(), OwnedBuffer::zeroed(8));
        let local = memory.segments().as_device(1);
        // A process that no system has.
        let key = RemoteKey::new(KEY).with(u64::MAX).with(2).with(3);
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
