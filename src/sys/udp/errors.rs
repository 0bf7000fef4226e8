//! The error queue: reports by routers and peers about sent datagrams (IP_RECVERR, ip(7)).

use super::UdpPort;
use super::control::{self, Control};
use crate::sys::cancel::Shield;
use crate::sys::errno::{Errno, check_len};
use crate::sys::net::socket_addr_from_bytes;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

/// Most messages taken from the queue by one call.
const MESSAGES: usize = 32;
/// Bytes of a quoted datagram that are kept. Linux quotes some 500 of IPv4 and 1200 of IPv6.
const QUOTE: usize = 128;

/// Why a datagram did not arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PortError {
    /// Its destination.
    pub(crate) to: SocketAddr,
    /// ECONNREFUSED: no socket has that port. EHOSTUNREACH, ENETUNREACH, EACCES and others: reported by
    /// a router or the last hop. EMSGSIZE: it was longer than the path's MTU.
    pub(crate) errno: Errno,
    /// True if this host detected the error itself, false for an ICMP message.
    pub(crate) local: bool,
    /// With EMSGSIZE, the path's MTU: bytes with the IP header, 0 if unknown.
    pub(crate) mtu: u32,
}

impl UdpPort {
    /// Takes a bounded number of messages from the error queue. Returns how many there were.
    ///
    /// `each` also gets the quoted beginning of the datagram that a message is about: any host may send such a message,
    /// but only a host that has seen the datagram can quote it.
    pub(crate) fn drain_errors(&mut self, mut each: impl FnMut(PortError, &[u8])) -> usize {
        self.errors_pending = false;
        let mut quote = [0; QUOTE];
        for taken in 0..MESSAGES {
            match self.next_error(&mut quote) {
                Next::Empty => return taken,
                Next::Unknown => {}
                Next::Error(error, len) => each(error, quote.get(..len).unwrap_or(&[])),
            }
        }
        self.errors_pending = true;
        MESSAGES
    }

    fn next_error(&self, quote: &mut [u8]) -> Next {
        let mut name = [0u8; 28];
        let mut control = Control::new();
        let mut room = libc::iovec { iov_base: quote.as_mut_ptr().cast(), iov_len: quote.len() };
        // SAFETY: all zeroes is a valid msghdr.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &raw mut room;
        header.msg_iovlen = 1;
        header.msg_name = name.as_mut_ptr().cast();
        header.msg_namelen = size_of_val(&name) as libc::socklen_t;
        header.msg_control = control.as_mut_ptr();
        header.msg_controllen = Control::room() as _;
        let fd = self.socket.as_raw_fd();
        let _shield = Shield::raise();
        // SAFETY: `header` points to live buffers of the lengths it states.
        let received = check_len(unsafe { libc::recvmsg(fd, &mut header, libc::MSG_ERRQUEUE) });
        let Ok(quoted) = received else { return Next::Empty };
        let mut found = None;
        // SAFETY: the kernel has just filled `header`.
        unsafe {
            control::each(&header, |level, kind, data| match (level, kind) {
                (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR) => {
                    found = Extended::read(data)
                }
                _ => {}
            });
        }
        let to = name.get(..header.msg_namelen as usize).and_then(socket_addr_from_bytes);
        match (to, found) {
            (Some(to), Some(e)) => {
                let local = e.origin == libc::SO_EE_ORIGIN_LOCAL;
                let mtu = if e.errno == libc::EMSGSIZE as u32 { e.info } else { 0 };
                Next::Error(PortError { to, errno: Errno(e.errno as i32), local, mtu }, quoted)
            }
            _ => Next::Unknown,
        }
    }
}

enum Next {
    Empty,
    /// A message of unknown form.
    Unknown,
    /// An error, and how many bytes of the datagram it quotes.
    Error(PortError, usize),
}

/// The useful fields of a sock_extended_err.
struct Extended {
    errno: u32,
    origin: u8,
    info: u32,
}

impl Extended {
    /// `None` for an origin other than this host and ICMP.
    fn read(data: &[u8]) -> Option<Self> {
        let word = |at: usize| data.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
        let origin = *data.get(std::mem::offset_of!(libc::sock_extended_err, ee_origin))?;
        let known = [libc::SO_EE_ORIGIN_LOCAL, libc::SO_EE_ORIGIN_ICMP, libc::SO_EE_ORIGIN_ICMP6];
        known.contains(&origin).then_some(())?;
        let errno = word(std::mem::offset_of!(libc::sock_extended_err, ee_errno))?;
        let info = word(std::mem::offset_of!(libc::sock_extended_err, ee_info))?;
        Some(Self { errno, origin, info })
    }
}
