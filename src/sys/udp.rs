//! A UDP socket that moves many datagrams in one system call: several messages (sendmmsg(2), recvmmsg(2)), and
//! several datagrams in one message if the kernel splits and joins them (UDP_SEGMENT since 4.18, UDP_GRO since
//! 5.0; udp(7)).

mod control;
mod errors;
mod headers;
mod receive;
mod send;
mod splitting;
#[cfg(test)]
mod tests;

pub(crate) use errors::PortError;
pub(crate) use headers::Destination;
pub(crate) use receive::Losses;

use super::errno::{Errno, Result, check};
use super::net::socket_addr_to_bytes;
use control::SO_RXQ_OVFL;
use splitting::Splitting;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// Size of socket buffers to ask for, bytes. The kernel doubles it and counts its own structures in it: room
/// for some 7000 datagrams of 1472 bytes.
const BUFFER_WANTED: libc::c_int = 8 << 20;
/// The ECN bits of the IP header (RFC 3168) that say that this sender understands marks.
const ECT_0: libc::c_int = 2;

/// A non-blocking UDP socket bound to one address.
#[derive(Debug)]
pub(crate) struct UdpPort {
    socket: Arc<UdpSocket>,
    splitting: Splitting,
    /// The kernel may join datagrams into one message.
    gro: bool,
    /// Every datagram is sent with ECT(0), and marks of received datagrams are visible.
    ecn: bool,
    /// The error queue may hold something.
    errors_pending: bool,
    /// The last datagram for which there was no room was refused with ENOBUFS.
    lacks_buffers: bool,
    receiver: receive::Receiver,
    headers: Box<headers::Headers>,
}

impl UdpPort {
    /// A socket bound to `address`; port 0 takes any free one. An IPv6 socket carries IPv6 only.
    /// Errors: EADDRINUSE, EADDRNOTAVAIL, EACCES, EAFNOSUPPORT, EMFILE, ENFILE, ENOMEM.
    pub(crate) fn bind(address: &SocketAddr) -> Result<Self> {
        let v6 = address.is_ipv6();
        let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
        let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: socket takes three integers and returns a new descriptor or -1.
        let fd = check(unsafe { libc::socket(family, kind, 0) })?;
        // SAFETY: `fd` is new and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if v6 {
            set(fd.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
        }
        let (bytes, len) = socket_addr_to_bytes(address);
        // SAFETY: `bytes` holds a socket address of `len` bytes.
        check(unsafe {
            libc::bind(fd.as_raw_fd(), bytes.as_ptr().cast(), len as libc::socklen_t)
        })?;
        let (gso, gro, ecn) = Self::prepare(fd.as_fd(), v6);
        // The kernel counts double.
        let buffer = option(fd.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF).unwrap_or(0);
        let small = (buffer < 2 * BUFFER_WANTED).then_some(buffer.unsigned_abs() / 2);
        Ok(Self {
            socket: Arc::new(UdpSocket::from(fd)),
            splitting: Splitting::new(gso),
            gro,
            ecn,
            errors_pending: false,
            lacks_buffers: false,
            receiver: receive::Receiver::new(small),
            headers: headers::Headers::new(),
        })
    }

    /// Sets useful options; a kernel without one of them works too. Returns which of GSO, GRO and ECN are
    /// available.
    fn prepare(fd: BorrowedFd<'_>, v6: bool) -> (bool, bool, bool) {
        for (plain, forced) in
            [(libc::SO_RCVBUF, libc::SO_RCVBUFFORCE), (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE)]
        {
            // The forced option ignores net.core.rmem_max and needs CAP_NET_ADMIN.
            if set(fd, libc::SOL_SOCKET, forced, BUFFER_WANTED).is_err() {
                let _ = set(fd, libc::SOL_SOCKET, plain, BUFFER_WANTED);
            }
        }
        let _ = set(fd, libc::SOL_SOCKET, SO_RXQ_OVFL, 1);
        // PROBE: datagrams are never fragmented, and no ICMP message, which any host can forge, makes the
        // kernel refuse a length (ip(7)).
        let ecn = if v6 {
            let level = libc::IPPROTO_IPV6;
            let _ = set(fd, level, libc::IPV6_RECVERR, 1);
            let _ = set(fd, level, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE);
            let _ = set(fd, level, libc::IPV6_DONTFRAG, 1);
            set(fd, level, libc::IPV6_RECVTCLASS, 1)
                .and_then(|()| set(fd, level, libc::IPV6_TCLASS, ECT_0))
        } else {
            let level = libc::IPPROTO_IP;
            let _ = set(fd, level, libc::IP_RECVERR, 1);
            let _ = set(fd, level, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE);
            set(fd, level, libc::IP_RECVTOS, 1).and_then(|()| set(fd, level, libc::IP_TOS, ECT_0))
        };
        let gso = option(fd, libc::SOL_UDP, libc::UDP_SEGMENT).is_ok();
        let gro = set(fd, libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        (gso, gro, ecn.is_ok())
    }

    /// The address it is bound to, with its port.
    pub(crate) fn local_addr(&self) -> Result<SocketAddr> {
        Ok(self.socket.local_addr()?)
    }

    /// The descriptor to wait on. It is readable with datagrams, and has an error pending
    /// (EPOLLERR) while the error queue holds something.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The socket, for a thread that sleeps on it.
    pub(crate) fn shared(&self) -> Arc<UdpSocket> {
        self.socket.clone()
    }

    /// The receive buffer, bytes as the kernel counts them: a datagram takes its length and at least
    /// some 800 bytes more.
    pub(crate) fn receive_buffer(&self) -> usize {
        let len = option(self.fd(), libc::SOL_SOCKET, libc::SO_RCVBUF);
        len.ok().and_then(|len| usize::try_from(len).ok()).unwrap_or(0)
    }

    /// Whether the kernel splits messages into datagrams. False for a while after a device could not.
    pub(crate) fn gso(&self) -> bool {
        self.splitting.is_on()
    }

    /// Whether the kernel joins datagrams.
    pub(crate) fn gro(&self) -> bool {
        self.gro
    }

    /// Whether ECN is in use.
    pub(crate) fn ecn(&self) -> bool {
        self.ecn
    }

    /// See [`Losses`].
    pub(crate) fn losses(&self) -> Losses {
        self.receiver.losses
    }

    /// True if [`UdpPort::drain_errors`] may have something to report.
    pub(crate) fn errors_pending(&self) -> bool {
        self.errors_pending
    }

    /// Whether the last datagram for which there was no room was refused with ENOBUFS, not because the socket's buffer
    /// was full: the queue of the interface is, or the table of neighbours.
    pub(crate) fn lacks_buffers(&self) -> bool {
        self.lacks_buffers
    }

    /// The last refusal does not matter any more.
    pub(crate) fn forget_refusals(&mut self) {
        self.lacks_buffers = false;
    }

    /// From now on datagrams that are too long for their path are fragmented (ip(7), ipv6(7)): with IPv4 by
    /// routers too, with IPv6 by this host alone, if a router has told it the path's MTU. Errors: none on
    /// a kernel that has these options.
    pub(crate) fn allow_fragments(&self) -> Result<()> {
        let fd = self.fd();
        if self.socket.local_addr()?.is_ipv4() {
            return set(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT);
        }
        let level = libc::IPPROTO_IPV6;
        set(fd, level, libc::IPV6_DONTFRAG, 0)?;
        set(fd, level, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DONT)
    }

    /// Takes arrived datagrams in one system call, and calls `each` with the source, the datagram, and whether a
    /// router marked it. Returns the number of datagrams: those of at most 8 messages, each of up to 64 KiB
    /// and 64 datagrams.
    pub(crate) fn receive_batch(&mut self, each: impl FnMut(SocketAddr, &[u8], bool)) -> usize {
        let (datagrams, errors) = self.receiver.batch(self.socket.as_raw_fd(), each);
        self.errors_pending |= errors;
        datagrams
    }

    /// As if the kernel had refused a datagram with ENOBUFS.
    #[cfg(test)]
    pub(crate) fn take_no_buffers(&mut self) {
        let _ = self.no_room(Errno(libc::ENOBUFS));
    }

    #[cfg(test)]
    fn without_gso(mut self) -> Self {
        self.splitting = Splitting::new(false);
        self
    }
}

/// Sets a socket option of type int.
pub(super) fn set(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: reads `len` bytes of a live local.
    check(unsafe {
        libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len)
    })?;
    Ok(())
}

/// Reads a socket option of type int.
fn option(fd: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int) -> Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: fills at most `len` bytes of a live local.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &mut len)
    })?;
    Ok(value)
}

/// True for an error that only means "no room now".
fn is_no_room(errno: Errno) -> bool {
    errno.is_would_block() || errno.0 == libc::ENOBUFS
}
