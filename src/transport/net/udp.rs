//! Datagrams over UDP, on any network that carries IP.

use super::link::{Condition, Link, LinkSink};
use crate::sys::Errno;
use crate::sys::net::{self, Interface};
use crate::sys::udp::{Destination, PortError, UdpPort};
use crate::telemetry::log;
use crate::transport::Address;
use std::collections::HashMap;
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Headers of IP and UDP before a datagram, bytes.
const HEADERS_V4: usize = 20 + 8;
const HEADERS_V6: usize = 40 + 8;
/// Longest datagram, bytes: below IP's limit, so that all sums of lengths fit 16 bits.
const DATAGRAM_MAX: usize = 65_000;
/// Length that every IPv4 host must accept, bytes (RFC 791); no setting goes below it.
const MTU_MIN: usize = 576;

/// Counts of a link's datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LinkCounts {
    /// Datagrams that the kernel took.
    pub(crate) sent: u64,
    /// Datagrams that arrived.
    pub(crate) received: u64,
    /// Datagrams that arrived with a router's congestion mark.
    pub(crate) marked: u64,
    /// Datagrams that the kernel refused to send, and that are therefore lost.
    pub(crate) refused: u64,
    /// Error messages (such as ICMP) about datagrams that were sent.
    pub(crate) errors: u64,
}

/// The UDP socket of one endpoint.
#[derive(Debug)]
pub(crate) struct UdpLink {
    port: UdpPort,
    datagram_max: usize,
    /// Where the last datagrams went: the next ones mostly go there too.
    last: (Address, Destination),
    counts: LinkCounts,
    /// Datagrams may be fragmented, because some path carries less than this link's longest one.
    fragments: bool,
    /// The longest datagram that is not known to be fragmented on any path, bytes.
    whole_max: usize,
    /// The same for the paths to single hosts. What a router says of one may be forged, and is not believed of others.
    narrow: HashMap<IpAddr, usize>,
    /// A length that the interface was found to carry, which is to be reported.
    narrowed: Option<usize>,
}

impl UdpLink {
    /// A socket bound to `address`; port 0 takes a free one. `mtu_limit` (FI_UDRV_MTU, bytes with the IP header) lowers
    /// the interface's MTU. Errors: EADDRINUSE, EADDRNOTAVAIL, EACCES, EMFILE, ENFILE, ENOMEM.
    #[cfg(test)]
    pub(crate) fn open(address: &SocketAddr, mtu_limit: Option<usize>) -> Result<Self, Errno> {
        Self::over(UdpPort::bind(address)?, mtu_limit)
    }

    /// The link over a port that is bound already.
    pub(crate) fn over(port: UdpPort, mtu_limit: Option<usize>) -> Result<Self, Errno> {
        let bound = port.local_addr()?;
        let mtu = carried(&bound, &net::interfaces());
        let datagram_max = datagram_max(&bound, mtu, mtu_limit);
        let on = |what: bool| if what { "on" } else { "off" };
        log::info(format_args!(
            "UDP at {bound}: datagrams of {datagram_max} bytes (interface's MTU {mtu}), receive buffer {} bytes, GSO {}, GRO {}, ECN {}",
            port.receive_buffer(),
            on(port.gso()),
            on(port.gro()),
            on(port.ecn()),
        ));
        Ok(Self {
            port,
            datagram_max,
            last: (Address(bound), Destination::new(&bound)),
            counts: LinkCounts::default(),
            fragments: false,
            whole_max: usize::MAX,
            narrow: HashMap::new(),
            narrowed: None,
        })
    }

    /// The address it is bound to.
    pub(crate) fn local_addr(&self) -> Result<SocketAddr, Errno> {
        self.port.local_addr()
    }

    /// The receive buffer, bytes as the kernel counts them, including its own structures.
    pub(crate) fn receive_buffer(&self) -> usize {
        self.port.receive_buffer()
    }

    /// The descriptor that is readable, or has an error, when `receive` has something to report.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.port.fd()
    }

    /// The socket, for a thread that sleeps on it.
    pub(crate) fn shared(&self) -> Arc<UdpSocket> {
        self.port.shared()
    }

    /// Counts of datagrams.
    pub(crate) fn counts(&self) -> LinkCounts {
        self.counts
    }

    /// Datagrams that arrived and were discarded: the receive buffer was full, or they were truncated.
    pub(crate) fn dropped(&self) -> u64 {
        let losses = self.port.losses();
        losses.overflowed.wrapping_add(losses.truncated)
    }

    /// Another link than this one has no room now.
    #[cold]
    pub(crate) fn forget_refusals(&mut self) {
        self.port.forget_refusals();
    }

    /// As if the kernel had refused a datagram with ENOBUFS.
    #[cfg(test)]
    pub(crate) fn take_no_buffers(&mut self) {
        self.port.take_no_buffers();
    }

    fn refuse(&mut self, to: &Address, errno: Errno) {
        self.counts.refused += 1;
        log::limited!(cause: errno.0, "the system does not send to {to}: {errno}");
    }

    /// Reports errors about datagrams that were sent.
    fn drain_errors(&mut self, sink: &mut impl LinkSink) -> usize {
        let mut narrow = None;
        let n = self.port.drain_errors(|PortError { to, errno, local, mtu }, quote| {
            if errno.0 == libc::EMSGSIZE && !local {
                // That says nothing about the peer. The datagram is lost, and so is every other one as long.
                let carried = (mtu as usize).saturating_sub(headers(&to));
                if sink.on_too_long(&Address(to), carried) {
                    narrow = Some((to, carried));
                }
            } else if !local {
                sink.on_refused(&Address(to), errno, quote);
            }
        });
        if let Some((to, carried)) = narrow {
            self.cut_one(&to, carried, true);
        }
        self.counts.errors += n as u64;
        n
    }

    /// Allows fragmentation of datagrams to the host of `to` of more than `carried` bytes, because packets that wait for
    /// retransmission cannot be made shorter. `told`: the kernel knows what the path carries; without that it does not
    /// fragment for IPv6, where routers do not either.
    fn cut_one(&mut self, to: &SocketAddr, carried: usize, told: bool) {
        let carried = carried.max(MTU_MIN - headers(to));
        let most = self.narrow.entry(to.ip()).or_insert(carried);
        *most = carried.min(*most);
        self.cut(to, carried, told);
    }

    /// The same for all hosts.
    fn cut_all(&mut self, to: &SocketAddr, carried: usize) {
        let carried = carried.max(MTU_MIN - headers(to));
        self.whole_max = self.whole_max.min(carried);
        self.cut(to, carried, true);
    }

    fn cut(&mut self, to: &SocketAddr, carried: usize, told: bool) {
        if std::mem::replace(&mut self.fragments, true) {
            return;
        }
        let mtu = carried + headers(to);
        let done = self.port.allow_fragments().is_ok() && (told || to.is_ipv4());
        let what = if done { "fragmented" } else { "lost" };
        log::limited!(
            "the path to {to} carries {mtu} bytes: longer datagrams are {what}; FI_UDRV_MTU={mtu} avoids that"
        );
    }

    /// The longest datagram to `to` that leaves together with others: segmentation offload cannot send datagrams that
    /// need IP fragmentation as well, and the error would look as if the kernel had no such offload.
    #[inline]
    fn whole_max(&self, to: &Address) -> usize {
        match self.fragments {
            true => {
                self.narrow.get(&to.0.ip()).map_or(self.whole_max, |most| self.whole_max.min(*most))
            }
            false => usize::MAX,
        }
    }
}

impl UdpLink {
    /// Datagrams that are longer than this link's are fragmented: they were made for another path.
    #[cold]
    pub(crate) fn fragment(&mut self) {
        self.whole_max = self.whole_max.min(self.datagram_max);
        if !std::mem::replace(&mut self.fragments, true) {
            // Otherwise such datagrams are lost, and the connection finds out.
            let _ = self.port.allow_fragments();
        }
    }
}

impl Link for UdpLink {
    fn datagram_max(&self) -> usize {
        self.datagram_max
    }

    #[inline]
    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize {
        if self.last.0 != *to {
            self.last = (*to, Destination::new(&to.0));
        }
        let mut rest = packets;
        while !rest.is_empty() {
            let whole = rest.first().is_none_or(|packet| packet.len() <= self.whole_max(to));
            let batch = if whole { rest } else { rest.get(..1).unwrap_or(rest) };
            let taken = match self.port.send_batch(&self.last.1, batch) {
                Ok(0) => break,
                Ok(n) => {
                    self.counts.sent += n as u64;
                    n
                }
                Err(Errno(libc::EMSGSIZE)) if !self.fragments => {
                    // The interface carries less than before. The error queue says so too, but not where the datagram
                    // was to go.
                    let local = self.port.local_addr().unwrap_or(to.0);
                    let carried = datagram_max(&local, carried(&local, &net::interfaces()), None);
                    self.cut_all(&to.0, carried);
                    self.datagram_max = self.datagram_max.min(carried);
                    self.narrowed = Some(carried);
                    continue;
                }
                Err(errno) => {
                    self.refuse(to, errno);
                    1
                }
            };
            rest = rest.get(taken..).unwrap_or_default();
        }
        packets.len() - rest.len()
    }

    fn is_full(&self) -> bool {
        !self.port.lacks_buffers()
    }

    #[cold]
    fn note_refusals(&mut self, to: &Address, ns: u64) {
        if self.port.lacks_buffers() {
            log::limited!(
                node: libc::ENOBUFS,
                "the system has sent nothing to {to} for {} ms ({}): the table of neighbours of this node may be full, or the queue of the interface. For a network of more than about 1,000 nodes raise net.ipv4.neigh.default.gc_thresh3 (net.ipv6 with IPv6) on every node",
                ns / 1_000_000,
                Errno(libc::ENOBUFS)
            );
        }
    }

    fn allow_fragments(&mut self, to: &Address, carried: usize) {
        self.cut_one(&to.0, carried, false);
    }

    #[inline]
    fn receive(&mut self, sink: &mut impl LinkSink) -> usize {
        let (mut received, mut marked) = (0, 0);
        let mut events = self.port.receive_batch(|from, bytes, congested| {
            received += 1;
            marked += u64::from(congested);
            sink.on_datagram(&Address(from), bytes, Condition { congested, sound: false });
        });
        self.counts.received += received;
        self.counts.marked += marked;
        if self.port.errors_pending() {
            events += self.drain_errors(sink);
        }
        if let Some(carried) = self.narrowed.take() {
            sink.on_narrowed(carried);
        }
        events
    }
}

/// The MTU of a socket bound to `address` towards all peers, bytes: that of the interface with this address; for the
/// wildcard address the smallest of all interfaces that lead out of the host.
fn carried(address: &SocketAddr, interfaces: &[Interface]) -> u32 {
    let ip = address.ip();
    let family = || interfaces.iter().filter(|i| i.ip.is_ipv6() == ip.is_ipv6());
    let loopback = || family().filter(|i| i.loopback).map(|i| i.mtu).min();
    let outward = || family().filter(|i| !i.loopback).map(|i| i.mtu).min();
    let found = if ip.is_unspecified() {
        outward().or_else(loopback)
    } else {
        let own = family().find(|i| i.ip == ip).map(|i| i.mtu);
        // 127.0.0.2 also belongs to the loopback interface, though it has no entry.
        own.or_else(|| loopback().filter(|_| ip.is_loopback()))
    };
    found.unwrap_or(MTU_MIN as u32)
}

/// Bytes of the headers before a datagram.
fn headers(address: &SocketAddr) -> usize {
    if address.is_ipv6() { HEADERS_V6 } else { HEADERS_V4 }
}

/// Longest datagram, bytes, where the longest IP packet is `mtu`.
fn datagram_max(address: &SocketAddr, mtu: u32, limit: Option<usize>) -> usize {
    let limit = limit.map_or(usize::MAX, |limit| limit.max(MTU_MIN));
    (mtu as usize).min(limit).saturating_sub(headers(address)).min(DATAGRAM_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::event::wait_readable;
    use crate::telemetry::log::captured;

    #[derive(Default)]
    struct Seen {
        datagrams: Vec<(Address, Vec<u8>, bool)>,
        refused: Vec<(Address, Errno)>,
        narrowed: Vec<usize>,
    }

    impl LinkSink for Seen {
        fn on_datagram(&mut self, from: &Address, bytes: &[u8], condition: Condition) {
            self.datagrams.push((*from, bytes.to_vec(), condition.congested));
        }
        fn knows(&self, _: &Address) -> bool {
            true
        }
        fn on_refused(&mut self, to: &Address, errno: Errno, quote: &[u8]) {
            assert_eq!(quote, b"hello");
            self.refused.push((*to, errno));
        }
        fn on_too_long(&mut self, _: &Address, _: usize) -> bool {
            true
        }
        fn on_narrowed(&mut self, carried: usize) {
            self.narrowed.push(carried);
        }
    }

    fn link(text: &str) -> Option<(UdpLink, Address)> {
        let address: SocketAddr = text.parse().unwrap();
        let link = UdpLink::open(&address, None).ok()?;
        let at = Address(SocketAddr::new(address.ip(), link.local_addr().unwrap().port()));
        Some((link, at))
    }

    #[test]
    fn datagrams_come_from_the_address_of_their_sender() {
        for text in ["127.0.0.1:0", "[::1]:0"] {
            let (Some((mut a, at_a)), Some((mut b, at_b))) = (link(text), link(text)) else {
                continue;
            };
            let (mut c, at_c) = link(text).unwrap();
            let (long, short) = (vec![1; 900], vec![2; 3]);
            let packets = [IoSlice::new(&long), IoSlice::new(&long), IoSlice::new(&short)];
            for _ in 0..3 {
                assert_eq!(a.send(&at_b, &packets), 3);
                assert_eq!(a.send(&at_c, &packets[2..]), 1);
                assert_eq!(a.send(&at_c, &[]), 0);
            }
            for (link, want) in [(&mut b, 9), (&mut c, 3)] {
                let mut seen = Seen::default();
                while seen.datagrams.len() < want && wait_readable(link.fd(), 500) == Ok(true) {
                    assert!(link.receive(&mut seen) > 0);
                }
                assert_eq!(seen.datagrams.len(), want);
                assert!(seen.datagrams.iter().all(|(from, _, marked)| *from == at_a && !marked));
                assert_eq!(seen.datagrams.last().unwrap().1, short);
                assert_eq!((link.counts().received, link.dropped()), (want as u64, 0));
            }
            assert_eq!((a.counts().sent, a.counts().refused), (12, 0));
        }
    }

    #[test]
    fn a_port_without_listener_is_reported() {
        for text in ["127.0.0.1:0", "[::1]:0"] {
            let (Some((mut a, _)), Some((gone, at))) = (link(text), link(text)) else { continue };
            drop(gone);
            let mut seen = Seen::default();
            for n in 1..=3 {
                assert_eq!(a.send(&at, &[IoSlice::new(b"hello")]), 1);
                assert_eq!(wait_readable(a.fd(), 500), Ok(true), "the error wakes a sleeper");
                assert!(a.receive(&mut seen) > 0);
                assert_eq!(seen.refused.len(), n);
                assert_eq!(wait_readable(a.fd(), 0), Ok(false), "and lets it sleep again");
            }
            assert!(seen.refused.iter().all(|e| *e == (at, Errno(libc::ECONNREFUSED))));
        }
    }

    #[test]
    fn what_the_system_refuses_is_lost_and_the_rest_goes_on() {
        let (mut a, at) = link("127.0.0.1:0").unwrap();
        let long = vec![0; 65_530];
        let packets = [IoSlice::new(&long), IoSlice::new(&long), IoSlice::new(b"short")];
        assert_eq!(a.send(&at, &packets), 3);
        assert_eq!((a.counts().sent, a.counts().refused), (1, 2));
        let mut seen = Seen::default();
        assert_eq!(wait_readable(a.fd(), 500), Ok(true));
        a.receive(&mut seen);
        a.receive(&mut seen);
        assert_eq!(seen.datagrams.len(), 1);
        assert_eq!(seen.refused, [], "nobody is gone");
        assert_eq!(seen.narrowed, [DATAGRAM_MAX], "what the interface carries");
    }

    #[test]
    fn a_full_table_of_neighbours_has_a_line() {
        captured::begin();
        let (mut a, at) = link("127.0.0.1:0").unwrap();
        a.note_refusals(&at, 100_000_000);
        assert!(captured::lines_with("gc_thresh3").is_empty(), "the socket was full");
        a.port.take_no_buffers();
        a.note_refusals(&at, 100_000_000);
        let lines = captured::lines_with("gc_thresh3");
        assert!(lines.len() == 1 && lines[0].contains(&at.to_string()), "{lines:?}");
    }

    #[test]
    fn what_a_router_says_of_one_path_is_not_believed_of_others() {
        let (mut a, at) = link("127.0.0.1:0").unwrap();
        let other = Address("127.0.0.2:1".parse().unwrap());
        assert_eq!(a.whole_max(&other), usize::MAX);
        a.cut_one(&other.0, 1372, true);
        a.cut_one(&other.0, 0, true);
        assert_eq!((a.whole_max(&other), a.whole_max(&at)), (548, usize::MAX));
        a.cut_all(&at.0, 1472);
        assert_eq!((a.whole_max(&other), a.whole_max(&at)), (548, 1472));
        // Datagrams to one are fragmented, and those to the other leave together.
        let long = vec![1; 1000];
        assert_eq!(a.send(&other, &[IoSlice::new(&long), IoSlice::new(&long)]), 2);
        assert_eq!(a.counts().sent, 2);
    }

    #[test]
    fn datagrams_fit_the_interface() {
        let entry = |ip: &str, mtu: u32, loopback: bool| Interface {
            loopback,
            ..Interface::plain("any", ip.parse::<IpAddr>().unwrap(), mtu)
        };
        let host = [
            entry("127.0.0.1", 65_536, true),
            entry("10.0.0.1", 9000, false),
            entry("10.1.0.1", 1500, false),
            entry("fd00::1", 1280, false),
        ];
        let longest = |text: &str, limit| {
            let address: SocketAddr = text.parse().unwrap();
            datagram_max(&address, carried(&address, &host), limit)
        };
        assert_eq!(longest("127.0.0.2:0", None), 65_000);
        assert_eq!(longest("10.0.0.1:0", None), 8972);
        assert_eq!(longest("10.0.0.1:0", Some(1500)), 1472);
        assert_eq!(longest("10.1.0.1:0", Some(9000)), 1472);
        assert_eq!(longest("0.0.0.0:0", None), 1472);
        assert_eq!(longest("[fd00::1]:0", None), 1232);
        assert_eq!(longest("10.1.0.1:0", Some(1)), 548);
        assert_eq!(longest("192.0.2.7:0", None), 548, "gone meanwhile");
    }
}
