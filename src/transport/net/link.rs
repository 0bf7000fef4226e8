//! What carries datagrams: a UDP socket, and a UD queue pair. Nothing is promised of them but
//! that they arrive whole or not at all.

#[cfg(doc)]
use super::reliable::packet;
use crate::sys::Errno;
use crate::transport::Address;
use std::io::IoSlice;

/// What is known of a datagram that has arrived, beside its bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Condition {
    /// A router marked it (ECN CE, RFC 3168).
    pub(crate) congested: bool,
    /// It came a way on which nothing arrives damaged: see [`Link::is_sound`].
    pub(crate) sound: bool,
}

/// Unreliable, unordered datagrams of one endpoint.
pub(crate) trait Link {
    /// Longest datagram payload, bytes, that the interface carries unfragmented.
    fn datagram_max(&self) -> usize;

    /// Sends `packets` to one peer; all but the last have the same length, none is empty, the last
    /// is not longer. Returns how many were taken, in order; fewer: no room now. A packet that is
    /// refused for any other reason counts as taken: it is lost. Packets made for a sound way
    /// ([`packet::HEADER_ONLY`]) are taken by none but that.
    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize;

    /// Whether a packet of `len` bytes goes to `to` a way on which its payload needs no tag: a UD queue pair. What
    /// that rests on:
    ///
    /// 1. A UD message is one packet, and the ICRC (InfiniBand 1.7, 7.8.1; RoCE takes it over) covers its payload, with 32
    ///    bits, from one device to the other. A device drops a damaged packet. UDP's checksum has 16 bits, and may be missing.
    /// 2. The receive completion of a UD queue pair says that the whole packet is in its buffer (InfiniBand 1.7, 10.8),
    ///    whatever the order in which the device wrote the bytes. A packet that is found by polling memory has no such
    ///    promise, and is not sound.
    fn is_sound(&mut self, to: &Address, len: usize) -> bool {
        let _ = (to, len);
        false
    }

    /// `to` is silent though something is owed: where there are several ways to it, another one is
    /// to be taken until that one is proven anew.
    fn doubt(&mut self, to: &Address) {
        let _ = to; // a link with one way has no other
    }

    /// The path to `to` drops datagrams of more than `carried` bytes without a word: those that were
    /// made longer shall leave in parts.
    fn allow_fragments(&mut self, to: &Address, carried: usize) {
        let _ = (to, carried); // a link without paths has no such
    }

    /// Takes what has arrived, a bounded number of datagrams. Returns how many events there were.
    fn receive(&mut self, sink: &mut impl LinkSink) -> usize;
}

/// What `Link::receive` reports to.
pub(crate) trait LinkSink {
    /// A datagram from `from`.
    fn on_datagram(&mut self, from: &Address, bytes: &[u8], condition: Condition);

    /// Whether there is a connection with `address`, or one is being made: what a handshake packet says beside that is worth
    /// remembering.
    fn knows(&self, address: &Address) -> bool;

    /// Nobody listens at `to`, or the network says that it cannot be reached (ICMP): the system's
    /// reason, and the beginning of the datagram that was refused, as the message quotes it.
    fn on_refused(&mut self, to: &Address, errno: Errno, quote: &[u8]);

    /// The path to `to` carries datagrams of at most `carried` bytes. True: longer ones have to be
    /// sent all the same.
    fn on_too_long(&mut self, to: &Address, carried: usize) -> bool;
}
