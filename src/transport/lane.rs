//! Lanes for bulk. One transport carries a peer's messages; besides that a peer has any number of lanes for one-sided access,
//! of the same transport or of others: a device, a second device, the interprocess memory of a GPU. Each lane makes keys
//! of its own kinds and can be lost alone. The protocol layer chooses one by its cost and by the memory that it takes
//! (`protocol::select`). A scheme or an operation sees a lane as a [`LaneId`], never a transport.
//!
//! * *Keys.* The first byte of a remote key names its lane; put, get and flush go where it says. A region is advertised to a
//!   peer on one lane, so that a byte has one key. [`RemoteKey::ADDRESSES`] stands for all memory of the peer's process, where
//!   the transport of messages accesses it by attach.
//! * *Loss.* [`Handler::on_lane_lost`](super::Handler::on_lane_lost) names a lane: the keys of that lane are void. Parts of a
//!   message are repeated by the next lane or as fragments. Operations of direct RMA are repeated as requests, and until the
//!   peer has answered a request no operation is direct. Example: a device fails after it has reported a write A as written,
//!   perhaps before A is in the peer's memory. A direct write B to the same bytes, by another lane, could be there before A; a
//!   request comes after A. Other lanes go on. A lane that is ready again is chosen again.
//! * *Order.* Lanes have no common order. Direct RMA flushes one lane before it uses another (`protocol::rma::alone`); the
//!   chunks of one message that are outstanding are all of one lane (`protocol::schemes::put`).

use super::RemoteKey;
use crate::sys::few;

/// Lanes to one peer, at most. The router drops further ones.
const LANES_MAX: usize = 4;

/// A lane for bulk, named by the kinds of the remote keys that it makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LaneId(&'static [u8]);

impl LaneId {
    /// The lane whose keys have these kinds: some of [`Transport::KEYS`](super::Transport::KEYS), and at least one.
    pub(crate) const fn of(kinds: &'static [u8]) -> Self {
        Self(kinds)
    }

    /// Whether the lane makes keys of this kind.
    #[inline]
    pub(crate) fn has(self, kind: u8) -> bool {
        self.0.contains(&kind)
    }

    /// Whether the key was made on this lane.
    #[inline]
    pub(crate) fn made(self, key: &RemoteKey) -> bool {
        self.has(key.kind())
    }

    /// One of its kinds.
    pub(crate) fn kind(self) -> u8 {
        match self.0 {
            [kind, ..] => *kind,
            [] => RemoteKey::ADDRESSES.kind(),
        }
    }
}

/// What a lane to one peer can do, and what it costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LaneCaps {
    pub(crate) lane: LaneId,
    /// Estimates, which only order the lanes: time until a short access is complete, nanoseconds, and the rate of a long
    /// one, bytes per microsecond.
    pub(crate) latency_ns: u32,
    pub(crate) rate: u32,
    /// The memory that it takes, on either side: of the host, and of a device.
    pub(crate) host: bool,
    pub(crate) device: bool,
    /// Most bytes of one remote buffer; 0: there are none ([`Purpose::Receive`](super::Purpose::Receive)).
    pub(crate) receive_max: usize,
    /// Shortest long message that is worth remote buffers, bytes.
    pub(crate) receive_min: usize,
    /// The receiver fetches all of a message that is advertised on it, to any memory; other messages fill remote buffers.
    /// Otherwise an advertised message is moved by both sides.
    pub(crate) reads: bool,
    /// Shortest direct read, and shortest direct write, of regions of the peer that is worth it while no messages are
    /// under way, bytes. Otherwise the protocol layer's own threshold for direct RMA applies, and always with
    /// `usize::MAX`. `None`: there are none.
    pub(crate) read_min: Option<usize>,
    pub(crate) write_min: Option<usize>,
    /// Most bytes of a region under one key ([`OneSided::register`](super::OneSided::register)). 0: regions are not
    /// registered.
    pub(crate) register_max: usize,
}

impl LaneCaps {
    /// A lane for memory of the host that registers nothing yet.
    pub(crate) const fn of_host(lane: LaneId, latency_ns: u32, rate: u32) -> Self {
        Self {
            lane,
            latency_ns,
            rate,
            host: true,
            device: false,
            receive_max: 0,
            receive_min: 0,
            reads: false,
            read_min: None,
            write_min: None,
            register_max: 0,
        }
    }

    /// Time that an access of `len` bytes takes, nanoseconds.
    fn cost_ns(&self, len: usize) -> u64 {
        let moving = (len as u64).saturating_mul(1000) / u64::from(self.rate.max(1));
        moving.saturating_add(self.latency_ns.into())
    }

    /// Whether it takes memory of a device, or of the host.
    fn takes(&self, on_device: bool) -> bool {
        if on_device { self.device } else { self.host }
    }

    /// Length of the shortest direct access that may be worth it, bytes.
    pub(crate) fn direct_min(&self) -> usize {
        [self.read_min, self.write_min].into_iter().flatten().min().unwrap_or(usize::MAX)
    }
}

/// The lanes to one peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Lanes([Option<LaneCaps>; LANES_MAX]);

impl Lanes {
    /// Adds a lane.
    pub(crate) fn push(&mut self, lane: LaneCaps) {
        if let Some(free) = self.0.iter_mut().find(|slot| slot.is_none()) {
            *free = Some(lane);
        }
    }

    /// In the order in which they were added.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &LaneCaps> {
        self.0.iter().flatten()
    }

    /// Whether the lane that made the key takes memory of a device.
    pub(crate) fn take_device(&self, key: &RemoteKey) -> bool {
        self.iter().any(|lane| lane.device && lane.lane.made(key))
    }

    /// Those that take memory of a device (`on_device`), or of the host. The one that costs least for `len` bytes is the
    /// first; of equal ones, the first that was added.
    pub(crate) fn by_cost(mut self, len: usize, on_device: bool) -> impl Iterator<Item = LaneCaps> {
        for slot in &mut self.0 {
            slot.take_if(|lane| !lane.takes(on_device));
        }
        let cost =
            |slot: &Option<LaneCaps>| slot.as_ref().map_or(u64::MAX, |lane| lane.cost_ns(len));
        few::sort(&mut self.0, |a, b| cost(a) < cost(b));
        self.0.into_iter().flatten()
    }
}

impl From<LaneCaps> for Lanes {
    fn from(lane: LaneCaps) -> Self {
        let mut lanes = Self::default();
        lanes.push(lane);
        lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: LaneCaps = LaneCaps::of_host(LaneId::of(&[100]), 100, 1000);
    const WIDE: LaneCaps = LaneCaps::of_host(LaneId::of(&[101, 102]), 5000, 20_000);

    fn order(lanes: Lanes, len: usize, on_device: bool) -> Vec<u8> {
        lanes.by_cost(len, on_device).map(|lane| lane.lane.kind()).collect()
    }

    #[test]
    fn the_lane_of_least_cost_for_a_length_is_the_first() {
        let mut lanes = Lanes::from(WIDE);
        lanes.push(QUICK);
        let of = |len| order(lanes, len, false);
        assert_eq!((of(8), of(1 << 20)), (vec![100, 101], vec![101, 100]));
        let mut equal = Lanes::from(QUICK);
        equal.push(LaneCaps { lane: WIDE.lane, ..QUICK });
        assert_eq!(order(equal, 8, false), [100, 101], "the first that was added");
    }

    #[test]
    fn a_lane_gets_only_memory_that_it_takes() {
        let mut lanes = Lanes::from(LaneCaps { host: false, device: true, ..QUICK });
        lanes.push(WIDE);
        assert_eq!(order(lanes, 8, false), [101]);
        assert_eq!(order(lanes, 8, true), [100]);
    }

    #[test]
    fn a_lane_knows_its_keys() {
        assert!(WIDE.lane.made(&RemoteKey::new(101)) && WIDE.lane.made(&RemoteKey::new(102)));
        assert!(!WIDE.lane.made(&RemoteKey::new(100)) && !WIDE.lane.made(&RemoteKey::ADDRESSES));
    }

    #[test]
    fn a_peer_has_few_lanes() {
        let mut lanes = Lanes::default();
        (0..2 * LANES_MAX).for_each(|_| lanes.push(QUICK));
        assert_eq!(lanes.iter().count(), LANES_MAX);
    }
}
