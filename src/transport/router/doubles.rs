//! Doubles of transports that carry no messages and are a lane for bulk each: both endpoints of a test are in one process, so
//! a key is an address. A test opens them by [`OPEN`], and breaks them.

use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::loopback::Loopback;
use crate::transport::peers::PeerTable;
use crate::transport::{
    Access, Address, Handler, LaneCaps, LaneId, Lanes, Messages, OneSided, Opening, PeerId,
    Prepared, Purpose, Put, Registered, Registration, Remote, RemoteKey, SendError, Sharing,
    Streaming, Transport,
};
use std::cell::Cell;

thread_local! {
    /// Whether endpoints that this thread opens have the doubles.
    pub(in crate::transport::router) static OPEN: Cell<bool> = const { Cell::new(false) };
}

const STALE: SendError = SendError::Unreachable(Errno(libc::ESTALE));

/// A lane whose keys have this kind; it costs the less, the lower that is. Odd kinds take memory of the host, even ones that
/// of a device too.
#[derive(Debug, Default)]
pub(in crate::transport::router) struct Double<const KIND: u8> {
    met: Vec<PeerId>,
    /// Both ends of a lane that works have the same number.
    number: u64,
    /// The lane was lost, which the next turn reports.
    pub(in crate::transport::router) lost: bool,
}

impl<const KIND: u8> Double<KIND> {
    pub(in crate::transport::router) const LANE: LaneId = LaneId::of(<Self as Transport>::KEYS);

    pub(in crate::transport::router) fn met(&self) -> &[PeerId] {
        &self.met
    }

    fn far(&self, at: &Remote, len: usize) -> Result<SegmentList, SendError> {
        let (number, addr) = (at.key.word(0), at.key.word(1).ok_or(STALE)?);
        let range = Range { addr: addr + at.offset, len: len as u64 };
        Loopback::list(&[range]).filter(|_| number == Some(self.number)).ok_or(STALE)
    }
}

impl<const KIND: u8> Messages for Double<KIND> {}
impl<const KIND: u8> Streaming for Double<KIND> {}
impl<const KIND: u8> Sharing for Double<KIND> {}

impl<const KIND: u8> OneSided for Double<KIND> {
    fn lanes(&self, peer: PeerId) -> Lanes {
        let mut lanes = Lanes::default();
        if self.met.contains(&peer) {
            lanes.push(LaneCaps {
                device: KIND % 2 == 0,
                register_max: usize::MAX,
                ..LaneCaps::of_host(Self::LANE, KIND.into(), u32::MAX)
            });
        }
        lanes
    }

    fn prepare(&mut self, _: PeerId, lane: LaneId) -> Prepared {
        assert_eq!(lane, Self::LANE);
        if self.lost { Prepared::No } else { Prepared::Ready }
    }

    fn register(
        &mut self,
        _: PeerId,
        lane: LaneId,
        memory: &SegmentList,
        _: Purpose,
    ) -> Registered {
        assert_eq!(lane, Self::LANE);
        let key = RemoteKey::new(KIND).with(self.number).with(memory.first_addr());
        Registered::Yes(Registration { key, reads: true, writes: true, confirms: true })
    }

    fn put(
        &mut self,
        _: PeerId,
        local: &SegmentList,
        to: &Remote,
        _: Put,
    ) -> Result<Access, SendError> {
        Ok(Access::Moved(Loopback::copy(local, &self.far(to, local.len())?)))
    }

    fn get(
        &mut self,
        _: PeerId,
        local: &SegmentList,
        from: &Remote,
        _: u64,
    ) -> Result<Access, SendError> {
        Ok(Access::Moved(Loopback::copy(&self.far(from, local.len())?, local)))
    }
}

impl<const KIND: u8> Transport for Double<KIND> {
    const NAME: &'static str = "double";
    const CARRIES: bool = false;
    const KEYS: &'static [u8] = &[KIND];

    fn open(_: &mut Opening<'_>) -> Result<Option<Self>, Errno> {
        Ok(OPEN.get().then(Self::default))
    }

    fn meet(&mut self, peer: PeerId, _: &Address) {
        if !self.met.contains(&peer) {
            self.met.push(peer);
        }
    }

    fn turn(&mut self, _: &mut PeerTable, handler: &mut impl Handler) -> usize {
        if std::mem::take(&mut self.lost) {
            self.number += 1;
            self.met.iter().for_each(|peer| handler.on_lane_lost(*peer, Self::LANE));
        }
        0
    }

    fn every_ns(_: bool, _: bool) -> u64 {
        0
    }

    fn drain(&mut self, peer: PeerId, _: &mut impl Handler) {
        self.met.retain(|met| *met != peer);
    }
}
