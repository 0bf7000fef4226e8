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

/// What the way for packets that are longer than datagrams takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Takes {
    /// So many, at least one.
    Some(usize),
    /// It is full: later it takes more.
    Later,
    /// There is no such way any more, or whoever is at its end does not look.
    Never,
}

/// Unreliable, unordered datagrams of one endpoint.
pub(crate) trait Link {
    /// Longest datagram payload, bytes, that the interface carries unfragmented.
    fn datagram_max(&self) -> usize;

    /// Sends `packets` to one peer; all but the last have the same length, none is empty, the last
    /// is not longer. Returns how many were taken, in order; fewer: no room now. A packet that is
    /// refused for any other reason counts as taken: it is lost. Packets made for a sound way
    /// ([`packet::HEADER_ONLY`]) are taken by none but that. `ahead`: how many packets of ours are under way to `to`
    /// already, which a faster way could overtake; `None`: these are not in a hurry.
    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>], ahead: Option<u32>) -> usize;

    /// Whether a packet of `len` bytes goes to `to` a way on which the network drops what is damaged, by
    /// a check of 32 bits or more over all of it: InfiniBand's and RoCE's ICRC. UDP's has 16, and may be
    /// missing.
    fn is_sound(&mut self, to: &Address, len: usize) -> bool {
        let _ = (to, len);
        false
    }

    /// Longest packets that are worth making for `to` now, bytes, where there is a sound way that takes longer ones than
    /// datagrams; 0: datagrams are. `ahead`: packets under way to `to`, which those would overtake if they went another
    /// way.
    fn long_room(&mut self, to: &Address, ahead: u32) -> usize {
        let _ = (to, ahead);
        0 // a link without such a way
    }

    /// Whether that way takes packets of up to `len` bytes now.
    fn takes_long(&mut self, to: &Address, len: usize) -> Takes {
        let _ = (to, len);
        Takes::Never
    }

    /// Sends `packets` to one peer that way, of which none is longer than the first one. Returns how many were taken, in
    /// order: the others wait.
    fn send_long(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize {
        let _ = (to, packets);
        0
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

    /// Nobody listens at `to`, or the network says that it cannot be reached (ICMP): the system's
    /// reason.
    fn on_refused(&mut self, to: &Address, errno: Errno);

    /// The path to `to` carries datagrams of at most `carried` bytes. True: longer ones have to be
    /// sent all the same.
    fn on_too_long(&mut self, to: &Address, carried: usize) -> bool;
}
