//! Both links of an endpoint: UDP, which reaches everybody, and a UD queue pair for those peers that
//! it is proven to reach (PROTOCOL.md §7.13). The machine above sees one link.

use super::handles::HandleId;
use super::introduction::{
    Call, Greeting, INTRODUCED_LEN, Place, greeting, read_trailer, with_trailer,
};
use super::link::UdLink;
use super::ways::{Opened, Ways};
use crate::sys::verbs::UdCounts;
use crate::sys::{Errno, process};
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::net::link::{Link, LinkSink};
use crate::transport::net::reliable::packet::MAGIC;
use crate::transport::net::reliable::tag::JobKey;
use crate::transport::net::udp::{LinkCounts, UdpLink};
use std::io::IoSlice;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};

/// First byte of a packet that ends a connection (PROTOCOL.md §7.3). It goes over UDP: nobody would
/// wait until a queue pair that is about to end has sent it.
const CLOSE: u8 = 3;

/// Looks at the device after which the socket, if it had nothing for so many, is looked at only once
/// in a while: a look at the socket is a system call, one at the device is none.
const SOCKET_COOLING: u32 = 1024;
const SOCKET_LOOKS: u32 = 16;

/// What the device's part has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct RdmaCounts {
    pub(crate) datagrams: UdCounts,
    /// Calls made to prove ways, and answers given.
    pub(crate) calls: u64,
    pub(crate) answers: u64,
    /// Ways that were proven, and doubted afterwards.
    pub(crate) proven: u64,
    pub(crate) doubted: u64,
    /// Address handles that exist.
    pub(crate) handles: usize,
}

/// The device's part.
#[derive(Debug)]
pub(crate) struct Rdma {
    link: UdLink,
    ways: Ways<HandleId>,
    key: JobKey,
    me: Address,
    /// The sender of the last datagram.
    source: (u32, Address),
    /// Calls that have arrived and are not answered yet.
    called: Vec<Call>,
    calls: u64,
    answers: u64,
    /// Looks left that include the socket each time, and those made since.
    socket_hot: u32,
    looks: u32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct HybridLink {
    udp: UdpLink,
    rdma: Option<Box<Rdma>>,
}

impl HybridLink {
    pub(crate) fn new(udp: UdpLink, rdma: Option<Rdma>) -> Self {
        Self { udp, rdma: rdma.map(Box::new) }
    }

    /// Datagrams that there is room for until the next `receive`, where one costs `cost` bytes in a
    /// socket's buffer.
    pub(crate) fn receive_window(&self, cost: usize) -> usize {
        let udp = self.udp.receive_buffer() / cost;
        self.rdma.as_ref().map_or(udp, |rdma| udp.min(rdma.link.receive_slots()))
    }

    /// Where the socket is bound.
    pub(crate) fn local_addr(&self) -> Result<SocketAddr, Errno> {
        self.udp.local_addr()
    }

    /// Packets to `to` go through the device now.
    pub(crate) fn goes_direct(&mut self, to: &Address) -> bool {
        self.rdma.as_mut().is_some_and(|rdma| rdma.ways.open(to).is_some())
    }

    /// The descriptors that become readable when there is something to receive; that of a device
    /// only after `sleep`.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.udp.fd()).chain(self.rdma.iter().map(|rdma| rdma.link.fd()))
    }

    /// Copies of them, for a thread that waits.
    pub(crate) fn watched(&self) -> Result<Vec<OwnedFd>, Errno> {
        self.fds().map(|fd| Ok(fd.try_clone_to_owned()?)).collect()
    }

    /// Prepares for sleep on the descriptors. False: something has arrived.
    #[inline]
    pub(crate) fn sleep(&mut self) -> bool {
        let Some(rdma) = &mut self.rdma else { return true };
        // Whoever is woken looks at both.
        rdma.socket_hot = rdma.socket_hot.max(1);
        rdma.link.sleep()
    }

    /// What the socket has done so far.
    pub(crate) fn counts(&self) -> LinkCounts {
        self.udp.counts()
    }

    /// What the device has done so far.
    pub(crate) fn rdma_counts(&self) -> Option<RdmaCounts> {
        let rdma = self.rdma.as_ref()?;
        Some(RdmaCounts {
            datagrams: rdma.link.counts(),
            calls: rdma.calls,
            answers: rdma.answers,
            proven: rdma.ways.proven,
            doubted: rdma.ways.doubted,
            handles: rdma.link.handles(),
        })
    }

    /// Datagrams that the socket threw away on arrival.
    pub(crate) fn dropped(&self) -> u64 {
        self.udp.dropped()
    }
}

#[cfg(test)]
impl HybridLink {
    /// Ends the device without a word to anybody.
    pub(crate) fn drop_device(&mut self) {
        self.rdma = None;
    }
}

impl Link for HybridLink {
    fn datagram_max(&self) -> usize {
        let udp = self.udp.datagram_max();
        self.rdma.as_ref().map_or(udp, |rdma| udp.min(rdma.link.datagram_max()))
    }

    #[inline]
    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> usize {
        let (Some(rdma), Some(first)) = (&mut self.rdma, packets.first()) else {
            return self.udp.send(to, packets);
        };
        if first.get(..4) == Some(&MAGIC) {
            return match rdma.introduce(to, first) {
                Some(introduced) => self.udp.send(to, &[IoSlice::new(&introduced)]),
                None => self.udp.send(to, packets),
            };
        }
        match rdma.send(to, packets) {
            Some(taken) => taken,
            None => self.udp.send(to, packets),
        }
    }

    fn allow_fragments(&mut self, to: &Address, carried: usize) {
        self.udp.allow_fragments(to, carried);
    }

    #[inline]
    fn receive(&mut self, sink: &mut impl LinkSink) -> usize {
        let Some(rdma) = &mut self.rdma else { return self.udp.receive(sink) };
        let mut n = rdma.receive(sink);
        if rdma.looks_at_socket() {
            let arrived = self.udp.receive(&mut Introduced { rdma, sink });
            if arrived > 0 {
                rdma.socket_hot = SOCKET_COOLING;
            }
            n += arrived;
            rdma.call();
        }
        n
    }
}

/// Reads what handshake packets tell of queue pairs, and passes everything on.
struct Introduced<'a, S> {
    rdma: &'a mut Rdma,
    sink: &'a mut S,
}

impl<S: LinkSink> LinkSink for Introduced<'_, S> {
    #[inline]
    fn on_datagram(&mut self, from: &Address, bytes: &[u8], congested: bool) {
        if let Some((address, place)) = read_trailer(&self.rdma.key, bytes) {
            self.rdma.ways.learn(&address, place, process::random_u64());
        }
        self.sink.on_datagram(from, bytes, congested);
    }

    fn on_refused(&mut self, to: &Address, errno: Errno) {
        self.sink.on_refused(to, errno);
    }

    fn on_too_long(&mut self, to: &Address, carried: usize) -> bool {
        self.sink.on_too_long(to, carried)
    }
}

impl Rdma {
    pub(super) fn new(link: UdLink, key: JobKey, me: Address) -> Self {
        let nobody = Address(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        Self {
            link,
            ways: Ways::default(),
            key,
            me,
            source: (u32::MAX, nobody),
            called: Vec::new(),
            calls: 0,
            answers: 0,
            socket_hot: SOCKET_COOLING,
            looks: 0,
        }
    }

    /// True if the socket is to be looked at now.
    #[inline]
    fn looks_at_socket(&mut self) -> bool {
        if self.socket_hot > 0 {
            self.socket_hot -= 1;
            return true;
        }
        self.looks = self.looks.wrapping_add(1);
        self.looks % SOCKET_LOOKS == 0 || self.link.broken().is_some()
    }

    /// The handshake packet `hello` to `to` with our place behind it, if there is room for that.
    #[cold]
    fn introduce(&mut self, to: &Address, hello: &[u8]) -> Option<[u8; INTRODUCED_LEN]> {
        let greeting = greeting(hello);
        let doubted = greeting == Greeting::Init && self.ways.doubt(to, process::random_u64());
        if doubted && self.ways.doubted.is_power_of_two() {
            log::info(format_args!(
                "{to} is silent: data goes over UDP until its device answers ({} such so far)",
                self.ways.doubted
            ));
        }
        self.call();
        if greeting == Greeting::None || self.link.broken().is_some() {
            return None;
        }
        with_trailer(&self.key, hello, self.link.place())
    }

    /// Sends `packets` if the way is open and carries them; `None`: they have to go over UDP.
    #[inline]
    fn send(&mut self, to: &Address, packets: &[IoSlice<'_>]) -> Option<usize> {
        let first = packets.first()?;
        if first.first() == Some(&CLOSE) {
            return None;
        }
        let Some(way) = self.ways.open(to) else {
            self.ways.detour(to);
            self.call();
            return None;
        };
        if first.len() > usize::from(way.place.mtu.min(self.link.place().mtu)) {
            return None;
        }
        match self.link.send(way.place, way.handle, packets) {
            Ok(taken) => Some(taken),
            Err(errno) => {
                log::info(format_args!("the device does not send to {to} ({errno}): UDP does"));
                self.ways.close(to, process::random_u64());
                None
            }
        }
    }

    /// Takes what has arrived from the device.
    #[inline]
    fn receive(&mut self, sink: &mut impl LinkSink) -> usize {
        let Self { link, ways, key, source, called, .. } = self;
        let n = link.receive(|arrival| {
            if arrival.bytes.get(..4) == Some(&MAGIC) {
                called.extend(Call::decode(key, arrival.bytes));
                return;
            }
            if source.0 != arrival.source {
                let known = ways.by_number(arrival.source).copied();
                let nobody = Address(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
                *source = (arrival.source, known.unwrap_or(nobody));
            }
            sink.on_datagram(&source.1, arrival.bytes, arrival.congested);
        });
        if !self.called.is_empty() {
            self.on_calls();
        }
        self.call();
        n
    }

    #[cold]
    fn on_calls(&mut self) {
        for call in std::mem::take(&mut self.called) {
            if call.address == self.me {
                continue;
            }
            if call.answer {
                let opened = self.ways.answered(&call.address, &call.place, call.nonce);
                self.source.0 = u32::MAX;
                if opened == Some(Opened::First) {
                    log::info(format_args!(
                        "{} is reached through the device, queue pair {:#x}",
                        call.address, call.place.number
                    ));
                }
                continue;
            }
            self.ways.learn(&call.address, call.place, process::random_u64());
            let (address, place) = (self.me, *self.link.place());
            let answer = Call { answer: true, nonce: call.nonce, address, place };
            self.answers += 1;
            self.try_send(&call.place, &answer);
        }
    }

    /// Makes the calls that are due.
    #[inline]
    fn call(&mut self) {
        while let Some(ask) = self.ways.next_ask() {
            let (address, place) = (self.me, *self.link.place());
            let call = Call { answer: false, nonce: ask.nonce, address, place };
            self.calls += 1;
            self.try_send(&ask.to, &call);
        }
    }

    /// A call that is not sent is as good as lost.
    fn try_send(&mut self, to: &Place, call: &Call) {
        let bytes = call.encode(&self.key);
        if let Err(errno) = self.link.send(to, &mut None, &[IoSlice::new(&bytes)]) {
            if self.calls.is_power_of_two() {
                log::info(format_args!("no way through the device to {to:?}: {errno}"));
            }
        }
    }
}
