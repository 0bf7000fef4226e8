//! The interface of datagram links: a UDP socket and a UD queue pair. They promise only that a datagram arrives whole
//! or not at all.

#[cfg(doc)]
use super::reliable::packet;
use crate::sys::Errno;
use crate::transport::Address;
use std::io::IoSlice;

/// The properties of a received datagram beside its bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Condition {
    /// A router marked it (ECN CE, RFC 3168).
    pub(crate) congested: bool,
    /// It came over a path that delivers no damaged packets: see [`Link::is_sound`].
    pub(crate) sound: bool,
}

/// Unreliable, unordered datagrams of one endpoint.
pub(crate) trait Link {
    /// Longest datagram payload, bytes, that the interface carries unfragmented.
    fn datagram_max(&self) -> usize;

    /// Longest packet, bytes, that goes to `to` now over a path that needs no probe: a UD queue pair. 0: there is none.
    fn direct(&mut self, to: &Address) -> usize {
        let _ = to;
        0
    }

    /// Sends `packets` to one peer. None is empty, all but the last have the same length, and the last is not longer.
    /// Returns how many were taken, in order; fewer than all: there is no room now. A packet refused for any other
    /// reason counts as taken: it is lost. Packets with [`packet::HEADER_ONLY`] are taken only by a sound path.
    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize;

    /// Whether there was no room for a packet because there is none to any peer. Otherwise only its receiver may be refused.
    fn is_full(&self) -> bool {
        true
    }

    /// Whether a packet of `len` bytes goes to `to` over a path on which its payload needs no tag: a UD queue pair.
    ///
    /// 1. A UD message is one packet, and the 32-bit ICRC (InfiniBand 1.7, 7.8.1; also used by RoCE) covers its payload
    ///    from device to device. A device drops a damaged packet. UDP's checksum has 16 bits, and may be missing.
    /// 2. The receive completion of a UD queue pair means that the whole packet is in its buffer (InfiniBand 1.7,
    ///    10.8), in whatever order the device wrote the bytes. A packet found by polling memory has no such guarantee,
    ///    and is not sound.
    fn is_sound(&mut self, to: &Address, len: usize) -> bool {
        let _ = (to, len);
        false
    }

    /// `to` is silent although it owes something: where there are several paths to it, another one must be used until
    /// that one is validated again.
    fn doubt(&mut self, to: &Address) {
        let _ = to; // a link with one path has no other
    }

    /// For `ns` nanoseconds there was no room for any packet to `to`, which a link may be able to explain in the log.
    fn note_refusals(&mut self, to: &Address, ns: u64) {
        let _ = (to, ns); // a link without a kernel behind it has nothing to say
    }

    /// The path to `to` silently drops datagrams of more than `carried` bytes: packets that are already longer must be
    /// fragmented.
    fn allow_fragments(&mut self, to: &Address, carried: usize) {
        let _ = (to, carried); // a link without paths does not fragment
    }

    /// Receives a bounded number of datagrams. Returns the number of events.
    fn receive(&mut self, sink: &mut impl LinkSink) -> usize;
}

/// Receives the events of [`Link::receive`].
pub(crate) trait LinkSink {
    /// A datagram from `from`.
    fn on_datagram(&mut self, from: &Address, bytes: &[u8], condition: Condition);

    /// Whether there is a connection with `address`, or one is being made: only then the additions to a handshake
    /// packet are worth keeping.
    fn knows(&self, address: &Address) -> bool;

    /// The port at `to` is closed, or the network says that it cannot be reached (ICMP): the system's error, and the
    /// beginning of the refused datagram, as the message quotes it.
    fn on_refused(&mut self, to: &Address, errno: Errno, quote: &[u8]);

    /// The path to `to` carries datagrams of at most `carried` bytes. True: longer ones must be sent all the same.
    fn on_too_long(&mut self, to: &Address, carried: usize) -> bool;

    /// The interface carries datagrams of at most `carried` bytes now, to any peer.
    fn on_narrowed(&mut self, carried: usize);
}
