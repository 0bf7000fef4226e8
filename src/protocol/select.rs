//! Which scheme a message takes, and which lane its bulk: the one place that compares its length and its memory with the
//! capabilities of the transport of messages and of the lanes to the peer.

use super::limits::Limits;
use crate::memory::{SegmentList, bounce};
use crate::transport::{Caps, Iface, LaneCaps, LaneId, PeerId, Prepared, RemoteKey};

/// How a receiver gets a message that was announced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fetch {
    /// It reads it from the sender's memory.
    Read,
    /// It advertises remote buffers on this lane.
    RemoteBuffers(LaneCaps),
    /// As before, once a lane is set up.
    Later,
    /// It asks the sender to send the bytes.
    Request,
}

/// How a receiver gets `want` bytes of a message into `memory`. `readable`: it knows where the message is in the sender's
/// memory. `offer`: the key under which the sender advertises it.
pub(super) fn fetch<I: Iface>(
    iface: &mut I,
    caps: &Caps,
    peer: PeerId,
    (want, memory): (usize, &SegmentList),
    (readable, offer): (bool, Option<&RemoteKey>),
) -> Fetch {
    if caps.get && readable {
        return Fetch::Read;
    }
    match offered(iface, peer, (want, memory), offer, None) {
        Buffers::On(lane) => Fetch::RemoteBuffers(lane),
        Buffers::Later => Fetch::Later,
        Buffers::No => Fetch::Request,
    }
}

/// The lane of remote buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Buffers {
    /// This one, which is ready in both directions. Where it takes no memory of devices, that goes through bounce buffers.
    On(LaneCaps),
    /// One is being set up.
    Later,
    /// There is none.
    No,
}

/// As [`remote_buffers`], for the receiver of a message that is advertised under a key: a lane that reads such messages takes the
/// bytes to any memory, and the sender knew that it takes the memory that they are in.
pub(super) fn offered<I: Iface>(
    iface: &mut I,
    peer: PeerId,
    what: (usize, &SegmentList),
    offer: Option<&RemoteKey>,
    only: Option<LaneId>,
) -> Buffers {
    let lanes = iface.lanes(peer);
    let reads = |lane: &&LaneCaps| lane.reads && offer.is_some_and(|key| lane.lane.made(key));
    match lanes.iter().find(reads).filter(|lane| only.is_none_or(|only| only == lane.lane)) {
        Some(lane) if iface.prepare(peer, lane.lane) == Prepared::Ready => Buffers::On(*lane),
        _ => remote_buffers(iface, peer, what, only),
    }
}

/// The lane by which a message of `len` bytes goes through remote buffers: of those that are ready and take its memory, the
/// one of least cost. Device memory that none takes goes through memory of the host. `only`: no other lane
/// will do.
pub(super) fn remote_buffers<I: Iface>(
    iface: &mut I,
    peer: PeerId,
    (len, memory): (usize, &SegmentList),
    only: Option<LaneId>,
) -> Buffers {
    match best(iface, peer, (len, memory), only) {
        Buffers::No if memory.is_on_device() => {
            match best(iface, peer, (len, &SegmentList::EMPTY), only) {
                Buffers::On(lane) => Buffers::On(LaneCaps { device: false, ..lane }),
                other => other,
            }
        }
        found => found,
    }
}

/// As [`remote_buffers`], of the lanes that take the memory.
fn best<I: Iface>(
    iface: &mut I,
    peer: PeerId,
    (len, memory): (usize, &SegmentList),
    only: Option<LaneId>,
) -> Buffers {
    let mut best = Buffers::No;
    for lane in iface.lanes(peer).by_cost(len, memory.is_on_device()) {
        let will_do = only.is_none_or(|only| only == lane.lane);
        if lane.receive_max == 0 || len < lane.receive_min || !will_do {
            continue;
        }
        match iface.prepare(peer, lane.lane) {
            Prepared::Ready if memory.is_on_device() && !iface.takes(peer, lane.lane, memory) => {}
            Prepared::Ready => return Buffers::On(lane),
            Prepared::Later => best = Buffers::Later,
            Prepared::No => {}
        }
    }
    best
}

/// Whether device memory goes through bounce buffers by the lane that made this key.
pub(super) fn is_staged<I: Iface>(
    iface: &mut I,
    peer: PeerId,
    memory: &SegmentList,
    key: &RemoteKey,
) -> bool {
    let lanes = iface.lanes(peer);
    let lane = lanes.iter().find(|lane| lane.device && lane.lane.made(key)).copied();
    memory.is_on_device() && !lane.is_some_and(|lane| iface.takes(peer, lane.lane, memory))
}

/// How the bytes of a long message go that the sender sends in packets: all of one message in the same way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Carrier {
    Fragments,
    Stream,
}

/// How `len` bytes to `peer` go.
pub(super) fn carrier<I: Iface>(iface: &mut I, caps: &Caps, peer: PeerId, len: usize) -> Carrier {
    let streams = caps.stream_max > 0 && len >= caps.stream_min && iface.has_stream(peer);
    if streams { Carrier::Stream } else { Carrier::Fragments }
}

/// Whether a message goes eagerly. Otherwise it is announced.
pub(super) fn is_eager<I: Iface>(iface: &I, limits: &Limits, peer: PeerId, len: usize) -> bool {
    len <= limits.eager_max && !iface.under_pressure(peer)
}

/// Whether a long message is announced before its device memory is read: a lane takes it, or nothing takes the message but
/// packets, which are filled part by part. Otherwise all of it is copied to memory of the host, for which there is a better way.
pub(super) fn leaves_on_device<I: Iface>(
    iface: &mut I,
    peer: PeerId,
    memory: &SegmentList,
) -> bool {
    let len = memory.len();
    match remote_buffers(iface, peer, (len, memory), None) {
        Buffers::On(_) | Buffers::Later => true,
        Buffers::No if len <= bounce::LEN || iface.caps(peer).one_sided => false,
        // The lanes for memory of the host.
        Buffers::No => remote_buffers(iface, peer, (len, &SegmentList::EMPTY), None) == Buffers::No,
    }
}

/// How a sender announces a long message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Announce {
    /// The first `bytes` are sent unsolicited.
    Push { bytes: usize, carrier: Carrier },
    /// For remote buffers: no bytes are sent before the receiver has advertised them. With a lane that is ready, the
    /// message may be advertised too, unless it goes through bounce buffers.
    RemoteBuffers(Option<LaneId>),
    /// The receiver chooses. It learns where the message is in the sender's memory.
    Ranges,
    /// The receiver asks for fragments.
    Bare,
}

/// How a sender announces `len` bytes of `memory` to `peer`.
pub(super) fn announce<I: Iface>(
    iface: &mut I,
    caps: &Caps,
    peer: PeerId,
    (len, memory): (usize, &SegmentList),
) -> Announce {
    match remote_buffers(iface, peer, (len, memory), None) {
        Buffers::On(lane) => {
            let reads = lane.device || !memory.is_on_device();
            return Announce::RemoteBuffers(reads.then_some(lane.lane));
        }
        Buffers::Later => return Announce::RemoteBuffers(None),
        Buffers::No => {}
    }
    let carrier = carrier(iface, caps, peer, len);
    // Where the receiver may read the message instead, a message is sent unsolicited as a whole or not at all.
    let pushes = len > 0
        && caps.push_max > 0
        && !(caps.one_sided && len > caps.push_max)
        && !memory.is_on_device();
    if pushes && !iface.under_pressure(peer) {
        Announce::Push { bytes: len.min(caps.push_max), carrier }
    } else if caps.one_sided {
        Announce::Ranges
    } else {
        Announce::Bare
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Segment;
    use crate::transport::{
        Address, Handler, Lanes, Messages, OneSided, SendError, Sharing, Streaming,
    };

    const PEER: PeerId = PeerId(0);
    const QUICK: LaneId = LaneId::of(&[100]);
    const WIDE: LaneId = LaneId::of(&[101]);

    /// Two lanes to one peer, and what they answer.
    struct Two {
        quick: Prepared,
        wide: Prepared,
        asked: Vec<LaneId>,
        /// Both take memory of devices; the quick one not this memory.
        devices: bool,
    }

    impl Messages for Two {}
    impl Streaming for Two {}
    impl Sharing for Two {}

    impl OneSided for Two {
        fn lanes(&self, _: PeerId) -> Lanes {
            let device = self.devices;
            let sizes =
                |receive_min, lane| LaneCaps { receive_max: 1 << 20, receive_min, device, ..lane };
            let mut lanes = Lanes::from(sizes(1000, LaneCaps::of_host(WIDE, 5000, 20_000)));
            lanes.push(sizes(100, LaneCaps::of_host(QUICK, 100, 1000)));
            lanes
        }

        fn prepare(&mut self, _: PeerId, lane: LaneId) -> Prepared {
            self.asked.push(lane);
            if lane == QUICK { self.quick } else { self.wide }
        }

        fn takes(&mut self, _: PeerId, lane: LaneId, memory: &SegmentList) -> bool {
            assert!(memory.is_on_device(), "what every lane takes is not asked");
            lane != QUICK
        }
    }

    impl Iface for Two {
        fn connect(&mut self, _: &Address) -> Result<PeerId, SendError> {
            Ok(PEER)
        }

        fn address_of(&self, _: PeerId) -> Option<Address> {
            None
        }

        fn poll(&mut self, _: &mut impl Handler) -> usize {
            0
        }
    }

    /// The lane that is chosen, `Err(true)` for later, and the lanes that were asked.
    fn choose(
        (quick, wide): (Prepared, Prepared),
        len: usize,
        only: Option<LaneId>,
    ) -> (Result<LaneId, bool>, Vec<LaneId>) {
        let mut two = Two { quick, wide, asked: Vec::new(), devices: false };
        let lane = match remote_buffers(&mut two, PEER, (len, &SegmentList::EMPTY), only) {
            Buffers::On(lane) => Ok(lane.lane),
            Buffers::Later => Err(true),
            Buffers::No => Err(false),
        };
        (lane, two.asked)
    }

    #[test]
    fn the_length_of_a_message_decides_which_lane_costs_less() {
        let ready = (Prepared::Ready, Prepared::Ready);
        assert_eq!(choose(ready, 2000, None), (Ok(QUICK), vec![QUICK]));
        assert_eq!(choose(ready, 1 << 20, None), (Ok(WIDE), vec![WIDE]));
        assert_eq!(choose(ready, 99, None), (Err(false), vec![]), "worth no remote buffers");
        assert_eq!(choose(ready, 1 << 20, Some(QUICK)), (Ok(QUICK), vec![QUICK]));
    }

    #[test]
    fn memory_that_a_lane_cannot_register_takes_another_one() {
        let device = SegmentList::from(Segment::default()).as_device(1);
        let of = |wide| {
            let mut two = Two { quick: Prepared::Ready, wide, asked: Vec::new(), devices: true };
            remote_buffers(&mut two, PEER, (2000, &device), None)
        };
        assert!(matches!(of(Prepared::Ready), Buffers::On(lane) if lane.lane == WIDE));
        // No lane takes it: host memory goes over the one of least cost.
        assert!(
            matches!(of(Prepared::No), Buffers::On(lane) if lane.lane == QUICK && !lane.device)
        );
    }

    #[test]
    fn the_next_lane_serves_until_the_better_one_is_ready() {
        use Prepared::{Later, No, Ready};
        let long = |quick, wide| choose((quick, wide), 1 << 20, None);
        for wide in [Later, No] {
            assert_eq!(long(Ready, wide), (Ok(QUICK), vec![WIDE, QUICK]));
        }
        assert_eq!(long(No, Later).0, Err(true));
        assert_eq!(long(Later, No).0, Err(true));
        assert_eq!(long(No, No).0, Err(false));
        // Too short for the wide lane, which is not even asked.
        assert_eq!(choose((No, Ready), 500, None), (Err(false), vec![QUICK]));
    }
}
