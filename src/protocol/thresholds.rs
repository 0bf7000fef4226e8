//! Which protocol a message uses at which size: a report for users, made by asking [`select`](super::select).

use super::packet::{EagerHeader, Envelope};
use super::select::{self, Announce, Carrier, Fetch};
use super::state::Engine;
use crate::memory::SegmentList;
use crate::transport::{Caps, Iface, PeerId};

/// How messages of a range of sizes are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum How {
    /// Header and payload together in one slot or packet.
    Short,
    /// Eager, through the transport's memory.
    Buffers,
    /// Rendezvous, of which `unasked` bytes are sent unsolicited.
    Fragments { unasked: usize },
    /// Rendezvous: by a stream connection.
    Stream,
    /// Rendezvous: a device writes into the receiver's buffer.
    Windows,
    /// Rendezvous: the receiver reads from the sender's buffer.
    Read,
    /// Rendezvous as a split copy: the receiver reads, and the sender writes the rest.
    Shared,
    /// Rendezvous: the sender writes into the receiver's buffer.
    Written,
}

/// One line of the report: messages of `from` to `to` bytes, both included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Threshold {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) how: How,
    /// The variable, without its prefix, that moves `to` (in the last line, `from`). `None`: the bound is fixed.
    pub(crate) variable: Option<&'static str>,
}

impl How {
    /// The name of the protocol, as in PROTOCOL.md.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Short => "eager, short",
            Self::Buffers => "eager, buffered",
            Self::Fragments { unasked: 0 } => "rendezvous, fragments",
            Self::Fragments { .. } => "rendezvous, unsolicited data",
            Self::Stream => "rendezvous, stream",
            Self::Windows => "rendezvous, RDMA PUT",
            Self::Read => "rendezvous, GET",
            Self::Shared => "rendezvous, split copy",
            Self::Written => "rendezvous, PUT",
        }
    }

    /// The variable, without its prefix, that sets the shortest message of this kind.
    fn begins_by(self) -> Option<&'static str> {
        match self {
            Self::Short | Self::Buffers => None,
            Self::Shared => Some("SHARE_MIN"),
            Self::Stream | Self::Windows => Some("BULK_MIN"),
            Self::Read | Self::Written | Self::Fragments { .. } => Some("EAGER_MAX"),
        }
    }

    fn is_eager(self) -> bool {
        matches!(self, Self::Short | Self::Buffers)
    }

    /// Why these sizes use this protocol.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Short => {
                "one write of the sender reaches the receiver: nothing else is handed over"
            }
            Self::Buffers => {
                "two copies cost less than the way there and back that a rendezvous waits for"
            }
            Self::Fragments { unasked: 0 } => {
                "the processes may not attach to each other (FI_UDRV_CMA, ptrace(2)): copied twice, piece by piece"
            }
            Self::Fragments { .. } => {
                "what is sent before the receiver has asked hides the way there and back, and both ends copy at once"
            }
            Self::Stream => {
                "the kernel cuts and acknowledges what we would have to: fewer cycles a byte"
            }
            Self::Windows => "no processor copies; memory has to be registered first",
            Self::Read => "one copy, straight from the sender's buffer",
            Self::Shared => {
                "both processes copy at once; agreeing on it costs a message and exchanges"
            }
            Self::Written => {
                "one copy, after the receiver has said where: it may not read (FI_UDRV_CMA)"
            }
        }
    }
}

impl<I: Iface> Engine<I> {
    /// How tagged messages without remote data go to `peer` now: shortest first, without gaps, up to `usize::MAX`. A
    /// connection that is made on first use counts once it exists. The receiver's decisions are those for messages from
    /// `peer`.
    pub(crate) fn thresholds(&mut self, peer: PeerId) -> Vec<Threshold> {
        let caps = self.iface.caps(peer);
        let envelope = Envelope { tagged: true, tag: 0, data: None, rx: 0 };
        let header = EagerHeader::new(&envelope, None).as_slice().len();
        let (eager_max, short_max) =
            (self.core.limits.eager_max, caps.short_max.saturating_sub(header));
        let share_min = self.iface.share_min(peer).unwrap_or(0);
        // Between two of these lengths no decision changes.
        let lanes = self.iface.lanes(peer);
        let firsts = lanes.iter().map(|lane| lane.receive_min).chain([share_min, caps.stream_min]);
        let mut ends = vec![short_max, eager_max, caps.push_max, usize::MAX];
        ends.extend(firsts.map(|min| min.saturating_sub(1)));
        ends.sort_unstable();
        let mut list: Vec<Threshold> = Vec::new();
        let mut next = Some(0);
        for to in ends {
            let Some(from) = next.filter(|from| *from <= to) else { continue };
            next = to.checked_add(1);
            let eager = select::is_eager(&self.iface, &self.core.limits, peer, from);
            let how = match eager {
                true if from <= short_max => How::Short,
                true => How::Buffers,
                false => self.rendezvous(&caps, peer, from),
            };
            match list.last_mut().filter(|before| before.how == how) {
                Some(before) => before.to = to,
                None => list.push(Threshold { from, to, how, variable: how.begins_by() }),
            }
        }
        name_variables(&mut list, caps.one_sided);
        list
    }

    /// How a message of `len` bytes goes that is not sent eagerly.
    fn rendezvous(&mut self, caps: &Caps, peer: PeerId, len: usize) -> How {
        let iface = &mut self.iface;
        let what = (len, &SegmentList::EMPTY);
        let announced = select::announce(iface, caps, peer, what);
        match announced {
            Announce::RemoteBuffers(_) => return How::Windows,
            Announce::Push { carrier: Carrier::Stream, .. } => return How::Stream,
            Announce::Push { .. } => return How::Fragments { unasked: caps.push_max },
            Announce::Ranges | Announce::Bare => {}
        }
        let readable = announced == Announce::Ranges;
        match select::fetch(iface, caps, peer, what, (readable, None)) {
            Fetch::Read if iface.share_min(peer).is_some_and(|min| len >= min) => How::Shared,
            Fetch::Read => How::Read,
            Fetch::RemoteBuffers(_) | Fetch::Later => How::Windows,
            Fetch::Request if readable && caps.put => How::Written,
            Fetch::Request => match select::carrier(iface, caps, peer, len) {
                Carrier::Stream => How::Stream,
                Carrier::Fragments => How::Fragments { unasked: 0 },
            },
        }
    }
}

/// Names the variable that moves the end of each line.
fn name_variables(list: &mut [Threshold], one_sided: bool) {
    let beginnings: Vec<How> = list.iter().skip(1).map(|t| t.how).collect();
    for (threshold, next) in list.iter_mut().zip(beginnings) {
        let last_eager = threshold.how.is_eager() && !next.is_eager();
        threshold.variable = match threshold.how {
            _ if last_eager => Some("EAGER_MAX"),
            How::Fragments { unasked } if one_sided && unasked > 0 => Some("PUSH_MAX"),
            _ => next.begins_by(),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::super::Limits;
    use super::*;
    use crate::config::Config;
    use crate::transport::router::Router;
    use crate::transport::{Address, JobKey, Source};

    fn limits(eager_max: usize) -> Limits {
        Limits {
            eager_max,
            tx_max: 16,
            rx_max: 16,
            past_caches_min: usize::MAX,
            unexpected_max: 1 << 20,
            bulk_chunk: 1 << 18,
            contexts: 1,
            shares_receives: false,
            traced: false,
            alone_min: 16 << 10,
        }
    }

    fn to_oneself(eager_max: usize) -> Vec<Threshold> {
        let mut config = Config::default();
        config.net.on = false;
        let bind = Address(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
        let router =
            Router::open(bind, &config, (JobKey::from_bytes([0; 16]), Source::Nothing)).unwrap();
        let me = router.address();
        let mut engine = Engine::new(router, limits(eager_max));
        let peer = engine.connect(&me).unwrap();
        engine.thresholds(peer)
    }

    #[test]
    fn every_size_has_one_way() {
        for eager_max in [0, 1, 100, 16384] {
            let list = to_oneself(eager_max);
            assert_eq!(list.first().map(|t| t.from), Some(0));
            assert_eq!(list.last().map(|t| (t.to, t.how)), Some((usize::MAX, How::Read)));
            assert!(list.windows(2).all(|two| two[0].to + 1 == two[1].from), "{list:?}");
            let last = list.iter().rfind(|t| t.how.is_eager());
            assert_eq!(last.map(|t| (t.to, t.variable)), Some((eager_max, Some("EAGER_MAX"))));
        }
    }
}
