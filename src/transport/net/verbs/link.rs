//! The UD queue pair of one endpoint, and its address handles.

use super::handles::{HandleId, Handles};
use super::introduction::Place;
use crate::sys::packets::Pool;
use crate::sys::verbs::{Ah, AhSettings, Arrival, Gid, OpenDevice, Partition, UdCounts, UdPort};
use crate::sys::{Errno, clock};
use crate::transport::net::network::Network;
use std::collections::HashMap;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Most address handles of an endpoint: one for each remote port.
const HANDLES_MAX: usize = 4096;
/// How long a port counts as unreachable, nanoseconds.
const UNREACHABLE_NS: u64 = 30_000_000_000;

/// The remote port that a handle is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct HandleKey {
    lid: u16,
    gid: [u8; 16],
}

/// The UD queue pair of one endpoint.
#[derive(Debug)]
pub(super) struct UdLink {
    // The queue pair is dropped first.
    port: UdPort,
    handles: Handles<HandleKey, Ah>,
    /// Ports for which no handle could be made, and until when they are not tried again, nanoseconds: each attempt that
    /// has to ask the network takes a second.
    unreachable: HashMap<HandleKey, u64>,
    place: Place,
    gid_index: u8,
    service_level: u8,
    /// The device is emulated by kernel threads.
    threads: bool,
}

impl UdLink {
    /// `threads`: the device is emulated by kernel threads.
    pub(super) fn new(
        port: UdPort,
        place: Place,
        gid_index: u8,
        service_level: u8,
        threads: bool,
    ) -> Self {
        let handles = Handles::new(HANDLES_MAX);
        let unreachable = HashMap::new();
        Self { port, handles, unreachable, place, gid_index, service_level, threads }
    }

    /// The device is emulated by kernel threads, which need the processor that polls.
    #[inline]
    pub(super) fn is_threads(&self) -> bool {
        self.threads
    }

    /// See [`UdPort::lend`].
    pub(super) fn lend(&mut self, pool: Arc<Pool>) {
        self.port.lend(pool);
    }

    /// Its queue-pair address.
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// Longest datagram, bytes.
    pub(super) fn datagram_max(&self) -> usize {
        usize::from(self.place.mtu)
    }

    /// Longest datagram to `there`, bytes.
    #[inline]
    pub(super) fn longest_to(&self, there: &Place) -> usize {
        usize::from(self.place.mtu.min(there.mtu))
    }

    /// Datagrams for which there is room until the next `receive`.
    pub(super) fn receive_room(&self) -> usize {
        self.port.receive_room()
    }

    pub(super) fn counts(&self) -> UdCounts {
        self.port.counts()
    }

    /// Address handles that exist.
    pub(super) fn handles(&self) -> usize {
        self.handles.len()
    }

    /// Why the queue pair can no longer be used.
    pub(super) fn broken(&self) -> Option<Errno> {
        self.port.broken()
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.port.fd()
    }

    /// Whether `there` can be reached from here at all.
    pub(super) fn reaches(&self, there: &Place) -> bool {
        let here = &self.place;
        here.network.reaches(&here.gid, there.network, &there.gid)
    }

    /// The handle of the port of `there`. Errors: those for an unreachable address.
    pub(super) fn handle(&mut self, there: &Place) -> Result<HandleId, Errno> {
        if !self.reaches(there) {
            return Err(Errno(libc::EHOSTUNREACH));
        }
        let (port, index) = (&self.port, self.gid_index);
        let routed = self.place.network.is_routed_to(there.network);
        let settings = AhSettings {
            port: port.settings().port,
            gid: routed.then_some((there.gid, index)),
            lid: there.lid,
            service_level: self.service_level,
        };
        let key = HandleKey { lid: there.lid, gid: there.gid };
        let unreachable = &mut self.unreachable;
        self.handles.find(key, || {
            let now = clock::now_ns();
            if unreachable.get(&key).is_some_and(|until| now < *until) {
                return Err(Errno(libc::EHOSTUNREACH));
            }
            port.address(&settings).inspect_err(|_| {
                if unreachable.len() >= HANDLES_MAX {
                    unreachable.clear();
                }
                unreachable.insert(key, clock::now_ns() + UNREACHABLE_NS);
            })
        })
    }

    /// Sends `packets` to `there`; `handle` is set if it is not valid. Returns how many were taken. Errors: `there`
    /// cannot be reached, or the queue pair is broken.
    #[inline]
    pub(super) fn send(
        &mut self,
        there: &Place,
        handle: &mut Option<HandleId>,
        packets: &[IoSlice<'_>],
    ) -> Result<usize, Errno> {
        let known = handle.filter(|id| self.handles.get(*id).is_some());
        let id = match known {
            Some(id) => id,
            None => *handle.insert(self.handle(there)?),
        };
        let ah = self.handles.get(id).ok_or(Errno(libc::EHOSTUNREACH))?;
        self.port.send(ah, there.number, packets)
    }

    /// Receives datagrams. Returns their number; 0 once the queue pair is broken.
    #[inline]
    pub(super) fn receive(&mut self, each: impl FnMut(Arrival<'_>)) -> usize {
        self.port.receive(each).unwrap_or(0)
    }

    /// True if `receive` has something to take.
    #[inline]
    pub(super) fn has_arrived(&mut self) -> bool {
        self.port.has_arrived()
    }

    /// Whether its port on `device` still has the same state and address. Error: what changed.
    pub(super) fn fits(&self, device: &OpenDevice) -> Result<(), String> {
        let number = self.port.settings().port;
        let port = device.port(number).map_err(|errno| format!("its port: {errno}"))?;
        if !port.active {
            return Err("its port is down".to_owned());
        }
        if port.mtu < self.datagram_max() {
            return Err(format!("its port carries {} bytes only", port.mtu));
        }
        if let Network::InfiniBand { pkey, .. } = self.place.network {
            if port.lid != self.place.lid {
                return Err(format!("its LID is {:#x} now", port.lid));
            }
            let same = Partition { index: self.port.settings().pkey_index, key: pkey };
            if !device.partitions(&port).contains(&same) {
                return Err(format!("its partition {} is another one", same.index));
            }
        }
        let gids = device.gids(number).map_err(|errno| format!("its GIDs: {errno}"))?;
        let same = |gid: &Gid| gid.index == self.gid_index && gid.raw == self.place.gid;
        if self.place.network == Network::Roce && !gids.iter().any(same) {
            return Err(format!("GID {} is another one", self.gid_index));
        }
        Ok(())
    }

    /// Breaks the queue pair.
    #[cfg(test)]
    pub(super) fn break_queue_pair(&mut self) {
        self.port.break_queue_pair();
    }

    /// Prepares for sleep on the descriptor. False: something has arrived.
    pub(super) fn sleep(&mut self) -> bool {
        self.port.sleep()
    }
}
