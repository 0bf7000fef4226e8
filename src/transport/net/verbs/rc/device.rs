//! RC queue pairs of a real device.
#![allow(unsafe_code)]

use super::link::{Device, Event, Kept, Local, QueuePair, Region};
use super::probes::Probes;
use super::{Rc, STUCK_NS, WINDOWS};
use crate::memory::SegmentList;
use crate::memory::cache::{Access, CachePolicy, Lease, Refusal, Vigil};
use crate::sys::Errno;
use crate::sys::cuda::{Cuda, Flush};
use crate::sys::verbs::{
    OpenDevice, Permission, RcAddress, RcEvent, RcPort, RcQp, RcRequest, RcSettings, Registrar,
    prefers_any_order,
};
use crate::telemetry::log;
use crate::transport::net::agreement::message::End;
use crate::transport::net::bulk::Bulk;
use crate::transport::net::bulk::key::Key;
use crate::transport::net::network::Network;
use crate::transport::net::verbs::config::{RdmaSettings, ReadPolicy};
use crate::transport::net::verbs::gpu::{self, Gpus};
use crate::transport::net::verbs::introduction::Place;
use crate::transport::net::verbs::registrar::{self, Memory};
use crate::transport::net::verbs::spot::{At, Spot};
use std::os::fd::BorrowedFd;
use std::sync::PoisonError;

/// Most requests in flight on one connection.
///
/// A device that waits for each answer of a network moves in a round trip what is in flight.
const REQUESTS: u32 = 64;
/// Most reads among them, where both devices can do so many (rxe 128 at a time, ConnectX 16).
const READS: u8 = 64;
/// Reads at the same time that the device of a peer with reads serves, if it does not state a number.
const SERVES_MIN: u8 = 8;

/// The bulk path over the port that `spot` names; `None` if none is wanted, or if the application's memory must not be
/// registered. Errors: EMFILE, ENFILE.
pub(crate) fn open(spot: &Spot, settings: &RdmaSettings) -> Result<Option<Box<dyn Bulk>>, Errno> {
    let limit = settings.rc_connections;
    if limit == 0 || !registrar::is_safe() {
        return Ok(None);
    }
    let (spot, cache, rv, policy) = (spot.clone(), settings.cache, settings.rv, settings.read);
    let (timeout, wants_gpus) = (settings.qp_timeout, settings.gpus);
    let any_order = settings.any_order.unwrap_or_else(prefers_any_order);
    let opener = Box::new(move || {
        let at = spot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let at = at.ok_or(Errno(libc::ENODEV))?;
        let port = RcPort::open(&at.device, settings_of(&at, timeout, limit))?;
        let At { device, place, .. } = at;
        let any_order = any_order && port.can_relax();
        let RcSettings { connections, receives, sends, shared, .. } = *port.settings();
        log::info(format_args!(
            "RC queue pairs on {}: {connections} connections at most, {sends} requests each, {receives} receives {}; order on the bus {}",
            device.name(),
            if shared { "for all" } else { "each" },
            if any_order { "relaxed for messages" } else { "strict" },
        ));
        // Without kernel threads (older rxe), a request could hang forever when a link went down, and GET rendezvous
        // makes more requests.
        let offers = match policy {
            ReadPolicy::Auto => (device.is_threads(), false),
            ReadPolicy::Always => (true, true),
            ReadPolicy::Off => (false, false),
        };
        let memory = registrar::memory((&device, &port), (&cache, rv), (offers.0, any_order))?;
        let registrar = port.registrar().in_any_order(any_order);
        let keeps = cache.policy != CachePolicy::Off;
        let gpus = Gpus::new(registrar, device.name(), (wants_gpus, offers.0), keeps);
        Ok(Port { port, device, memory, gpus, place, offers })
    });
    Ok(Some(Box::new(Rc::new(opener, limit, stuck_ns(timeout))?)))
}

fn settings_of(at: &At, timeout: u8, connections: usize) -> RcSettings {
    RcSettings {
        port: at.port.number,
        pkey_index: at.pkey_index,
        gid: at.gid_index,
        routed: at.place.network.is_routed_to(at.place.network),
        mtu: at.port.mtu,
        marks: at.marks,
        timeout,
        receives: WINDOWS as u32,
        sends: REQUESTS,
        reads: READS,
        serves: READS,
        connections,
        shared: true,
    }
}

/// Whether connections are wanted, and the port has them. Errors: the driver's.
pub(crate) fn connects(at: &At, settings: &RdmaSettings) -> Result<(), Errno> {
    if settings.rc_connections == 0 || !registrar::is_safe() {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let mut port = RcPort::open(&at.device, settings_of(at, settings.qp_timeout, 1))?;
    port.connection::<()>().map(drop)
}

/// After how long a request counts as stuck whose retransmission timeout is 4.096 µs × 2^`timeout`, nanoseconds: twice as
/// long as the device tries.
fn stuck_ns(timeout: u8) -> u64 {
    STUCK_NS.max((16 * 4096) << timeout)
}

/// A port of a real device.
struct Port {
    // Registrations end before their protection domain, which they hold.
    port: RcPort,
    device: OpenDevice,
    memory: Memory,
    /// `None`: it accesses no memory of GPUs.
    gpus: Option<Gpus>,
    place: Place,
    /// Whether receivers on this host, and elsewhere, may read parts of messages (GET rendezvous).
    offers: (bool, bool),
}

/// Whether the network answers for the port of `to`, which may take a second. True also where another failure is in the
/// way: the connection itself will say which.
fn probe(device: &OpenDevice, settings: RcSettings, to: &End) -> bool {
    let connected = RcPort::open(device, settings).and_then(|mut port| {
        let mut qp: RcQp<Kept<Held>> = port.connection()?;
        QueuePair::connect(&mut qp, to, 0)
    });
    let silent = [libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::ENETUNREACH];
    connected.err().is_none_or(|errno| !silent.contains(&errno.0))
}

/// Registered memory, for a request, a remote buffer, or direct RMA by peers.
enum Held {
    Host(Lease<Registrar>),
    /// Open to direct RMA: the keys of a registration of exactly that, which the vigil holds.
    Exposed {
        lkey: u32,
        rkey: u32,
        vigil: Vigil<Registrar>,
    },
    /// The application closes a region before it frees its memory. Without `flush` if peers may only read it.
    Gpu(gpu::Registered),
}

impl Region for Held {
    fn lkey(&self) -> u32 {
        match self {
            Self::Host(lease) => lease.handle().lkey(),
            Self::Exposed { lkey, .. } => *lkey,
            Self::Gpu(gpu) => gpu.registration.lkey(),
        }
    }

    fn rkey(&self) -> u32 {
        match self {
            Self::Host(lease) => lease.handle().rkey(),
            Self::Exposed { rkey, .. } => *rkey,
            Self::Gpu(gpu) => gpu.registration.rkey(),
        }
    }

    fn flush(&self) -> Option<Flush> {
        if let Self::Gpu(gpu) = self { gpu.flush } else { None }
    }
}

impl QueuePair<Held> for RcQp<Kept<Held>> {
    fn number(&self) -> u32 {
        Self::number(self)
    }

    fn connect(&mut self, to: &End, own_psn: u32) -> Result<(), Errno> {
        let End { number, psn, mtu, network, lid, gid, serves } = *to;
        let serves = if serves == 0 { SERVES_MIN } else { serves };
        let (mtu, routed) = (usize::from(mtu), network.is_routed_to(network));
        let to = RcAddress { number, psn, mtu, lid, gid, routed, serves };
        Self::connect(self, &to, own_psn)
    }

    fn room(&self) -> usize {
        Self::room(self)
    }

    fn write(&mut self, from: Local<'_, Held>, to: &Key) -> Result<(), Errno> {
        // SAFETY: the ranges belong to the application, which lends them for the operation. If it takes the memory back
        // early, a read still finds pinned pages, and its bytes are discarded.
        unsafe { add(self, from, (to.addr, to.key), RcRequest::Announced(to.slot)) }
    }

    fn reach(&mut self, local: Local<'_, Held>, to: (u64, u32), reads: bool) -> Result<(), Errno> {
        let request = if reads { RcRequest::Read } else { RcRequest::Write };
        // SAFETY: the ranges belong to the application, which lends them for the operation. The operation ends, and
        // returns them, only when this request is complete or the queue pair has ended.
        unsafe { add(self, local, to, request) }
    }

    fn stop(&mut self) {
        Self::stop(self);
    }

    fn waiting(&self) -> usize {
        Self::waiting(self)
    }

    fn post(&mut self) -> Result<(), Errno> {
        self.post_waiting()
    }

    fn on_written(&mut self) {
        Self::on_written(self);
    }
}

/// Adds a request. Errors: EOPNOTSUPP for more segments than a request can have; those of [`RcQp::add`].
///
/// # Safety
/// As for [`RcQp::add`]. The memory stays registered under its keys for as long as `local.kept` is kept.
unsafe fn add(
    qp: &mut RcQp<Kept<Held>>,
    local: Local<'_, Held>,
    (addr, key): (u64, u32),
    request: RcRequest,
) -> Result<(), Errno> {
    let mut list = [(0, 0, 0); crate::memory::MAX_SEGMENTS];
    let mut count = 0;
    for ((to, (range, _)), key) in list.iter_mut().zip(local.list.registrable()).zip(&local.keys) {
        *to = (range.addr, u32::try_from(range.len).unwrap_or(u32::MAX), *key);
        count += 1;
    }
    if count > qp.segments_max() {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let list = list.get(..count).unwrap_or(&[]);
    // SAFETY: the caller guarantees the requirements of [`RcQp::add`].
    unsafe { qp.add(list, addr, key, request, local.kept) }
}

impl Port {
    fn lease(&self, part: &SegmentList, access: Access) -> Result<Held, Errno> {
        let (addr, len, of_gpu) = one(part)?;
        if of_gpu {
            return self.gpus()?.get(addr, len).map(Held::Gpu);
        }
        self.memory.get(addr as usize, len, access).map(Held::Host).map_err(|e| match e {
            Refusal::Nowhere => Errno(libc::EFAULT),
            Refusal::Forked => Errno(libc::EOWNERDEAD),
            Refusal::NoRoom => Errno(libc::ENOMEM),
            Refusal::Device(errno) => errno,
        })
    }

    fn gpus(&self) -> Result<&Gpus, Errno> {
        self.gpus.as_ref().ok_or(Errno(libc::EOPNOTSUPP))
    }
}

/// The one segment of `part`: its address, its length, and whether it is memory of a GPU. Errors: EINVAL: there are others.
fn one(part: &SegmentList) -> Result<(u64, usize, bool), Errno> {
    let mut all = part.registrable();
    match (all.next(), all.next()) {
        (Some((range, of_gpu)), None) => Ok((range.addr, range.len as usize, of_gpu)),
        _ => Err(Errno(libc::EINVAL)),
    }
}

impl Device for Port {
    type Region = Held;
    type Qp = RcQp<Kept<Held>>;

    fn connection(&mut self) -> Result<Self::Qp, Errno> {
        self.port.connection()
    }

    fn end(&self, qp: &Self::Qp, psn: u32) -> End {
        let Place { network, mtu, lid, gid, .. } = self.place;
        let serves = self.port.settings().serves;
        End { number: qp.number(), psn, mtu, network, lid, gid, serves }
    }

    fn reaches(&self, end: &End) -> bool {
        let Place { network, gid, .. } = &self.place;
        network.reaches(gid, end.network, &end.gid)
    }

    fn seen(&self, end: &End) -> End {
        let (network, lid) = end.network.across(end.lid, &self.place.gid, &end.gid);
        End { network, lid, ..*end }
    }

    fn probes(&self) -> Option<Probes> {
        // A device with UD queue pairs has asked for the peer's port already.
        if self.place.number != 0 || self.place.network != Network::Roce {
            return None;
        }
        let device = self.device.clone();
        let one = RcSettings { receives: 1, sends: 1, connections: 1, ..*self.port.settings() };
        Probes::start(move |to| probe(&device, one, to)).ok()
    }

    fn register(&self, part: &SegmentList, write: bool) -> Result<Self::Region, Errno> {
        let written = Access::WRITE.union(Access::REMOTE_WRITE);
        self.lease(part, if write { written } else { Access::READ })
    }

    fn may_take_gpus() -> bool {
        Cuda::get().is_some()
    }

    fn takes_gpus(&self) -> bool {
        self.gpus.is_some()
    }

    fn tend(&self, now: u64) {
        if let Some(gpus) = &self.gpus {
            gpus.tend(now);
        }
    }

    fn next_timeout(&self) -> Option<u64> {
        self.gpus.as_ref()?.next_timeout()
    }

    fn offers(&self, near: bool) -> bool {
        let (here, elsewhere) = self.offers;
        (if near { here } else { elsewhere }) && self.reads()
    }

    fn offer(&self, part: &SegmentList) -> Result<Self::Region, Errno> {
        self.lease(part, Access::REMOTE_READ)
    }

    fn expose(&self, part: &SegmentList, (reads, writes): (bool, bool)) -> Result<Held, Errno> {
        let permission = Permission::Exposed { reads, writes };
        let (addr, len, of_gpu) = one(part)?;
        if of_gpu {
            let made = self.gpus()?.exact(addr, len, permission)?;
            let flush = made.flush.filter(|_| writes);
            return Ok(Held::Gpu(gpu::Registered { flush, ..made }));
        }
        let at = addr as usize;
        // The watch begins before the registration, so that no change is missed.
        let vigil = self.memory.watch_over(at, len)?;
        let register = || self.memory.registrar().register(at, len, permission);
        let made = self.memory.beside(len, register)?;
        let (lkey, rkey) = (made.lkey(), made.rkey());
        if vigil.hold(made) {
            Ok(Held::Exposed { lkey, rkey, vigil })
        } else {
            Err(Errno(libc::EAGAIN))
        }
    }

    fn exposes(&self) -> usize {
        self.memory.limit()
    }

    fn is_sound(&self, exposed: &Held) -> bool {
        if let Held::Exposed { vigil, .. } = exposed { vigil.is_unchanged() } else { true }
    }

    fn changes(&self) -> u64 {
        self.memory.changes()
    }

    fn reads(&self) -> bool {
        self.port.settings().serves >= SERVES_MIN
    }

    fn poll(&mut self, mut each: impl FnMut(Event)) -> Result<usize, Errno> {
        self.port.poll(|event| {
            each(match event {
                RcEvent::Filled { qp, immediate, len } => Event::Filled { qp, immediate, len },
                RcEvent::Written { qp } => Event::Written { qp },
                RcEvent::Failed { qp, status } => Event::Failed { qp, status },
            });
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.port.fd()
    }

    fn silence(&mut self) {
        self.port.silence();
    }

    fn sleep(&mut self) -> bool {
        self.port.sleep()
    }

    fn rearm(&mut self) -> bool {
        self.port.rearm()
    }

    fn registrations(&self) -> Option<String> {
        Some(format!("{:?}", self.memory.statistics()))
    }

    fn cache_counts(&self) -> (u64, u64) {
        let known = self.memory.statistics();
        (known.hits, known.misses + known.uncached + known.unsettled)
    }
}
