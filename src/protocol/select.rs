//! Which scheme a message takes: the one place that compares its length with the capabilities of the lane to the peer.

use super::limits::Limits;
use crate::transport::{Caps, Iface, PeerId, Prepared};

/// How a receiver gets a message that was announced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fetch {
    /// It reads it from the sender's memory.
    Read,
    /// It advertises remote buffers.
    RemoteBuffers,
    /// As before, once they are set up.
    Later,
    /// It asks the sender to send the bytes.
    Request,
}

/// How a receiver gets the message. `readable`: it knows where the message is in the sender's memory.
pub(super) fn fetch<I: Iface>(
    iface: &mut I,
    caps: &Caps,
    peer: PeerId,
    want: usize,
    readable: bool,
) -> Fetch {
    if caps.get && readable {
        return Fetch::Read;
    }
    match remote_buffers(iface, caps, peer, want) {
        Prepared::Ready => Fetch::RemoteBuffers,
        Prepared::Later => Fetch::Later,
        Prepared::No => Fetch::Request,
    }
}

/// Whether `len` bytes go through remote buffers.
pub(super) fn remote_buffers<I: Iface>(
    iface: &mut I,
    caps: &Caps,
    peer: PeerId,
    len: usize,
) -> Prepared {
    if caps.window_max == 0 || len < caps.window_min { Prepared::No } else { iface.prepare(peer) }
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

/// How a sender announces a long message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Announce {
    /// The first `bytes` are sent unsolicited.
    Push { bytes: usize, carrier: Carrier },
    /// For remote buffers: no bytes are sent before the receiver has advertised them.
    RemoteBuffers,
    /// The receiver chooses. It learns where the message is in the sender's memory.
    Ranges,
    /// The receiver asks for fragments.
    Bare,
}

/// How a sender announces `len` bytes to `peer`.
pub(super) fn announce<I: Iface>(iface: &mut I, caps: &Caps, peer: PeerId, len: usize) -> Announce {
    if remote_buffers(iface, caps, peer, len) != Prepared::No {
        return Announce::RemoteBuffers;
    }
    let carrier = carrier(iface, caps, peer, len);
    // Where the receiver may read the message instead, a message is sent unsolicited as a whole or not at all.
    let pushes = len > 0 && caps.push_max > 0 && !(caps.one_sided && len > caps.push_max);
    if pushes && !iface.under_pressure(peer) {
        Announce::Push { bytes: len.min(caps.push_max), carrier }
    } else if caps.one_sided {
        Announce::Ranges
    } else {
        Announce::Bare
    }
}
