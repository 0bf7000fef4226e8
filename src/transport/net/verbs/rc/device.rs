//! RC queue pairs of a real device.
#![allow(unsafe_code)]

use super::{Device, Event, QueuePair, Rc, Region, WINDOWS};
use crate::memory::SegmentList;
use crate::memory::cache::{Access, Lease, Refusal};
use crate::sys::Errno;
use crate::sys::verbs::{RcAddress, RcEvent, RcPort, RcQp, RcSettings, Registrar};
use crate::telemetry::log;
use crate::transport::Ticket;
use crate::transport::net::bulk::Bulk;
use crate::transport::net::bulk::message::End;
use crate::transport::net::verbs::introduction::Place;
use crate::transport::net::verbs::registrar::{self, Memory};
use crate::transport::net::verbs::{At, RdmaSettings, Spot};
use std::os::fd::BorrowedFd;
use std::sync::PoisonError;

/// Writes under way on one connection at most.
const WRITES: u32 = 32;

/// The bulk path over the port that `spot` names; `None` if none is wanted, or if a device must not know the
/// application's memory. Errors: EMFILE, ENFILE.
pub(in crate::transport::net::verbs) fn open(
    spot: &Spot,
    settings: &RdmaSettings,
) -> Result<Option<Box<dyn Bulk>>, Errno> {
    let limit = settings.rc_connections;
    if limit == 0 || !registrar::is_safe() {
        return Ok(None);
    }
    let (spot, cache) = (spot.clone(), settings.cache);
    let opener = Box::new(move || {
        let at = spot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let At { device, port, gid, place, .. } = at.ok_or(Errno(libc::ENODEV))?;
        let port = RcPort::open(
            &device,
            RcSettings {
                port: port.number,
                gid,
                mtu: port.mtu,
                service_level: port.service_level,
                receives: WINDOWS as u32,
                sends: WRITES,
                connections: limit,
                shared: true,
            },
        )?;
        let RcSettings { connections, receives, sends, shared, .. } = *port.settings();
        log::info(format_args!(
            "RC queue pairs on {}: {connections} connections at most, {sends} writes each, {receives} receives {}",
            device.name(),
            if shared { "for all" } else { "each" },
        ));
        let memory = registrar::memory(&port, &cache)?;
        Ok(Port { port, memory, place })
    });
    Ok(Some(Box::new(Rc::new(opener, limit)?)))
}

/// See [`Device`].
struct Port {
    // Registrations end before their protection domain: they hold it.
    port: RcPort,
    memory: Memory,
    place: Place,
}

impl Region for Lease<Registrar> {
    fn lkey(&self) -> u32 {
        self.handle().lkey()
    }

    fn rkey(&self) -> u32 {
        self.handle().rkey()
    }
}

impl QueuePair<Lease<Registrar>> for RcQp<Vec<Lease<Registrar>>> {
    fn number(&self) -> u32 {
        Self::number(self)
    }

    fn connect(&mut self, to: &End, own_psn: u32) -> Result<(), Errno> {
        let End { number, psn, mtu, lid, gid, .. } = *to;
        let to = RcAddress { number, psn, mtu: usize::from(mtu), lid, gid };
        Self::connect(self, &to, own_psn)
    }

    fn room(&self) -> usize {
        Self::room(self)
    }

    fn write(
        &mut self,
        from: &SegmentList,
        regions: Vec<Lease<Registrar>>,
        to: &Ticket,
    ) -> Result<(), Errno> {
        let (ranges, count) = from.ranges();
        let ranges = ranges.get(..count).unwrap_or(&[]);
        if count > self.segments_max() || count != regions.len() {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let mut local = [(0, 0, 0); crate::memory::MAX_SEGMENTS];
        for ((to, range), region) in local.iter_mut().zip(ranges).zip(&regions) {
            *to = (range.addr, u32::try_from(range.len).unwrap_or(u32::MAX), region.lkey());
        }
        let local = local.get(..count).unwrap_or(&[]);
        // SAFETY: the ranges are the application's, lent for the operation that this belongs to, and
        // registered under these keys until the write is complete, because the queue pair keeps the
        // registrations. A read of memory that the application has taken back meanwhile finds pinned pages,
        // and its bytes nobody takes.
        unsafe { Self::write(self, local, to.addr, to.key, to.slot, regions) }
    }

    fn on_written(&mut self) {
        Self::on_written(self);
    }
}

impl Device for Port {
    type Region = Lease<Registrar>;
    type Qp = RcQp<Vec<Lease<Registrar>>>;

    fn connection(&mut self) -> Result<Self::Qp, Errno> {
        self.port.connection()
    }

    fn end(&self, qp: &Self::Qp, psn: u32) -> End {
        let Place { network, mtu, lid, gid, .. } = self.place;
        End { number: qp.number(), psn, mtu, network, lid, gid }
    }

    fn reaches(&self, end: &End) -> bool {
        let Place { network, gid, .. } = &self.place;
        network.reaches(gid, end.network, &end.gid)
    }

    fn register(&self, part: &SegmentList, write: bool) -> Result<Self::Region, Errno> {
        let access = if write { Access::WRITE.union(Access::REMOTE_WRITE) } else { Access::READ };
        let ([range, ..], count) = part.ranges();
        if count != 1 {
            return Err(Errno(libc::EINVAL));
        }
        self.memory.get(range.addr as usize, range.len as usize, access).map_err(|e| match e {
            Refusal::Nowhere => Errno(libc::EFAULT),
            Refusal::Forked => Errno(libc::EOWNERDEAD),
            Refusal::NoRoom => Errno(libc::ENOMEM),
            Refusal::Device(errno) => errno,
        })
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

    fn sleep(&mut self) -> bool {
        self.port.sleep()
    }

    fn registrations(&self) -> Option<String> {
        Some(format!("{:?}", self.memory.statistics()))
    }
}
