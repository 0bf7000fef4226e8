//! Channels of a real device.

use super::message::End;
use super::ring::{RING, Words};
use super::{Device, Eager, Qp, Ring};
use crate::sys::Errno;
use crate::sys::packets::Pool;
use crate::sys::verbs::{EagerPort, EagerQp, EagerSettings, EagerWrite, RcAddress};
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::net::verbs::introduction::Place;
use crate::transport::net::verbs::{At, RdmaSettings, Spot};
use std::sync::{Arc, PoisonError};

/// Channels over the port that `spot` names, for the endpoint `me`.
pub(in crate::transport::net::verbs) fn open(
    spot: &Spot,
    settings: &RdmaSettings,
    me: Address,
) -> Eager<Port> {
    let limit = if ORDERED { settings.eager_rdma } else { 0 };
    let spot = spot.clone();
    let opener = Box::new(move || {
        let at = spot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let At { device, port, gid, place, .. } = at.ok_or(Errno(libc::ENODEV))?;
        let port = EagerPort::open(
            &device,
            EagerSettings {
                port: port.number,
                gid,
                mtu: port.mtu,
                service_level: port.service_level,
                channels: limit,
                ring: RING,
            },
        )?;
        log::info(format_args!("eager RDMA on {}: to {limit} peers at most", device.name()));
        Ok(Port { port, place })
    });
    Eager::new(opener, limit, me)
}

/// Whoever sees a mark sees what was copied before it: a processor that stores in order, which on others a
/// device without hardware would have to see to, and does not.
const ORDERED: bool = cfg!(target_arch = "x86_64");

/// See [`Device`].
pub(in crate::transport::net::verbs) struct Port {
    port: EagerPort,
    place: Place,
}

/// A queue pair on such a port.
pub(in crate::transport::net::verbs) struct Pair {
    qp: EagerQp,
    place: Place,
}

impl Device for Port {
    type Qp = Pair;

    fn lend(&mut self, pool: Arc<Pool>) {
        self.port.lend(pool);
    }

    fn channel(&mut self) -> Result<Pair, Errno> {
        Ok(Pair { qp: self.port.channel()?, place: self.place })
    }

    fn reaches(&self, end: &End) -> bool {
        let (here, there) = (&self.place, &end.place);
        here.network.reaches(&here.gid, there.network, &there.gid)
    }

    fn poll(&mut self, each: impl FnMut(u32, bool)) -> Result<usize, Errno> {
        self.port.poll(each)
    }
}

impl Qp for Pair {
    fn number(&self) -> u32 {
        self.qp.number()
    }

    fn end(&self, psn: u32) -> End {
        let (addr, rkey) = self.qp.ring();
        let place = Place { number: self.qp.number(), ..self.place };
        End { place, psn, ring: Ring { addr, rkey } }
    }

    fn connect(&mut self, to: &End, own_psn: u32) -> Result<(), Errno> {
        let Place { number, mtu, lid, gid, .. } = to.place;
        let to = RcAddress { number, psn: to.psn, mtu: usize::from(mtu), lid, gid, serves: 0 };
        self.qp.connect(&to, own_psn)
    }

    #[inline]
    fn mark(&self, at: usize) -> Option<Words> {
        self.qp.mark(at)
    }

    #[inline]
    fn bytes(&self, at: usize, len: usize) -> Option<&[u8]> {
        self.qp.bytes(at, len)
    }

    #[inline]
    fn room(&self) -> usize {
        self.qp.room()
    }

    #[inline]
    fn write<'a>(
        &mut self,
        to: Ring,
        writes: impl Iterator<Item = EagerWrite<'a>>,
        told: bool,
    ) -> Result<usize, Errno> {
        self.qp.write((to.addr, to.rkey), writes, told)
    }

    fn progress(&self) -> (u64, u64) {
        self.qp.progress()
    }

    fn on_complete(&mut self) {
        self.qp.on_complete();
    }
}
