//! Which scheme a message takes: the one place that compares its length with the capabilities of the lane to the peer.

use super::message::Inbound;
use crate::transport::{Caps, Iface, PeerId, Windows};

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
    message: &Inbound,
    readable: bool,
) -> Fetch {
    if caps.get && readable {
        return Fetch::Read;
    }
    match remote_buffers(iface, caps, message.peer, message.want) {
        Windows::Ready => Fetch::RemoteBuffers,
        Windows::Later => Fetch::Later,
        Windows::No => Fetch::Request,
    }
}

/// Whether `len` bytes go through remote buffers.
pub(super) fn remote_buffers<I: Iface>(
    iface: &mut I,
    caps: &Caps,
    peer: PeerId,
    len: usize,
) -> Windows {
    if caps.window_max == 0 || len < caps.window_min { Windows::No } else { iface.windows(peer) }
}
