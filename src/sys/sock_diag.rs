//! The owner of the socket at the other end: asks the kernel for the owner of one socket of this host (sock_diag(7)),
//! and whether an address belongs to this host (rtnetlink(7)).
//!
//! A packet's source address proves nothing by itself: a process may send from any address of its host (IP_PKTINFO,
//! ip(7)). So the question is not which process sent a packet, but which socket receives the answer. The kernel decides
//! that by the same look-up for a packet and for a sock_diag request that names one socket. A reply that only this
//! receiver can know then proves that it is the sender too (PROTOCOL.md §7.2).
//!
//! If the kernel lacks sock_diag, or a filter forbids it, the tables of /proc/net give the same answer more slowly.

mod files;

use super::cancel::Shield;
use super::errno::{Errno, Result, check, check_len};
use super::per_process::PerProcess;
use super::process;
pub(crate) use files::{Owner, PortHolder, Protocol, udp_port_holders};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// The owner of the socket that receives packets from `remote` to `local`, an address of this host.
pub(crate) fn owner(protocol: Protocol, local: &SocketAddr, remote: &SocketAddr) -> Owner {
    let _shield = Shield::raise();
    with_kernel(|kernel| kernel.owner(protocol, local, remote))
}

/// Opens the descriptor that [`owner`] needs, one for the process, while descriptors are available.
pub(crate) fn prepare() {
    with_kernel(|kernel| kernel.way(Protocol::Udp));
}

fn with_kernel<T>(ask: impl FnOnce(&mut Kernel) -> T) -> T {
    // A forked child would share the socket, and its replies, with its parent.
    static KERNEL: PerProcess<Kernel> = PerProcess::new();
    let mut kernel = KERNEL.lock();
    let namespace = namespace();
    if kernel.namespace != namespace {
        *kernel = Kernel { namespace, ..Kernel::default() };
    }
    if kernel.diag.is_none() && kernel.ways.contains(&None) {
        kernel.diag = netlink(libc::NETLINK_SOCK_DIAG).ok();
    }
    ask(&mut kernel)
}

/// The network namespace of this thread: device and number of its file. `None`: unknown.
fn namespace() -> Option<(u64, u64)> {
    let file = std::fs::metadata("/proc/thread-self/ns/net").ok()?;
    Some((file.dev(), file.ino()))
}

/// Whether `ip` is an address of this host: packets to it do not leave the host. `None`: unknown. `scope` is the
/// interface of a link-local address, else 0.
pub(crate) fn is_local(ip: IpAddr, scope: u32) -> Option<bool> {
    let _shield = Shield::raise();
    let mut request = Request::new(libc::RTM_GETROUTE);
    let (family, bytes) = family_and_bytes(ip);
    let bits = if ip.is_ipv4() { 32 } else { 128 };
    request.put(&[family, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let address = if ip.is_ipv4() { bytes.get(..4)? } else { &bytes[..] };
    request.attribute(libc::RTA_DST, address);
    if scope != 0 {
        request.attribute(libc::RTA_OIF, &scope.to_ne_bytes());
    }
    let answer = request.ask(&netlink(libc::NETLINK_ROUTE).ok()?).ok()?;
    Some(*answer.get(ROUTE_TYPE_AT)? == libc::RTN_LOCAL)
}

/// The means to find the owner of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// sock_diag. The order of the two ends in requests for UDP depends on the kernel's version.
    Diag {
        swapped: bool,
    },
    /// The tables of /proc/net.
    Files,
    None,
}

#[derive(Debug, Default)]
struct Kernel {
    /// Where the descriptor asks: sockets of another namespace are not found.
    namespace: Option<(u64, u64)>,
    diag: Option<OwnedFd>,
    /// One for each protocol; `None` until it was tried.
    ways: [Option<Way>; 2],
}

impl Kernel {
    fn owner(&mut self, protocol: Protocol, local: &SocketAddr, remote: &SocketAddr) -> Owner {
        match self.way(protocol) {
            Way::Diag { swapped } => self
                .ask(protocol, swapped, local, remote)
                .map_or(Owner::Unknown, |(owner, _)| owner),
            Way::Files => files::owner(protocol, local, remote),
            Way::None => Owner::Unknown,
        }
    }

    fn way(&mut self, protocol: Protocol) -> Way {
        if let Some(way) = self.ways.get(protocol as usize).copied().flatten() {
            return way;
        }
        let way = self.find_way(protocol);
        if let Some(slot) = self.ways.get_mut(protocol as usize) {
            *slot = way;
        }
        way.unwrap_or(Way::None)
    }

    /// Tries what works on a socket of this process. `None`: no socket could be made; it is tried again next time.
    fn find_way(&self, protocol: Protocol) -> Option<Way> {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let (fd, port) = match protocol {
            Protocol::Udp => {
                let socket = UdpSocket::bind(any).ok()?;
                let port = socket.local_addr().ok()?.port();
                (OwnedFd::from(socket), port)
            }
            Protocol::Tcp => {
                let socket = TcpListener::bind(any).ok()?;
                let port = socket.local_addr().ok()?.port();
                (OwnedFd::from(socket), port)
            }
        };
        let socket = std::fs::File::from(fd);
        let inode = socket.metadata().ok()?.ino() as u32;
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let remote = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        for swapped in [true, false] {
            let found = self.ask(protocol, swapped, &local, &remote);
            if matches!(found, Ok((Owner::User(_), number)) if number == inode) {
                return Some(Way::Diag { swapped });
            }
        }
        let found = files::owner(protocol, &local, &remote);
        Some(if matches!(found, Owner::User(_)) { Way::Files } else { Way::None })
    }

    /// The owner and the inode number of one socket. `swapped`: the request names the remote end first.
    fn ask(
        &self,
        protocol: Protocol,
        swapped: bool,
        local: &SocketAddr,
        remote: &SocketAddr,
    ) -> Result<(Owner, u32)> {
        let diag = self.diag.as_ref().ok_or(Errno(libc::EPROTONOSUPPORT))?;
        let (first, second) = if swapped { (remote, local) } else { (local, remote) };
        let mut request = Request::new(SOCK_DIAG_BY_FAMILY);
        let (family, _) = family_and_bytes(local.ip());
        let number = match protocol {
            Protocol::Udp => libc::IPPROTO_UDP,
            Protocol::Tcp => libc::IPPROTO_TCP,
        };
        request.put(&[family, number as u8, 0, 0]);
        request.put(&u32::MAX.to_ne_bytes()); // in any state
        request.put(&first.port().to_be_bytes());
        request.put(&second.port().to_be_bytes());
        for end in [first, second] {
            request.put(&family_and_bytes(end.ip()).1);
        }
        let scope = if let SocketAddr::V6(local) = local { local.scope_id() } else { 0 };
        request.put(&scope.to_ne_bytes());
        request.put(&[0xff; 8]); // no cookie
        let answer = match request.ask(diag) {
            Ok(answer) => answer,
            Err(Errno(libc::ENOENT)) => return Ok((Owner::Nobody, 0)),
            Err(errno) => return Err(errno),
        };
        let word = |at: usize| answer.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
        let uid = word(DIAG_UID_AT).ok_or(Errno(libc::EPROTO))?;
        // A socket without an inode belongs to no process; its user is reported as root (sock_i_uid).
        Ok(match word(DIAG_UID_AT + 4) {
            Some(0) | None => (Owner::Nobody, 0),
            Some(inode) => (Owner::User(uid), inode),
        })
    }
}

/// See linux/sock_diag.h and linux/inet_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Bytes of a struct nlmsghdr.
const HEADER: usize = 16;
/// Offset of the user in a reply: behind the header, four bytes, a struct inet_diag_sockid and three words.
const DIAG_UID_AT: usize = HEADER + 4 + 48 + 12;
/// Offset of the type of a route: the eighth byte of a struct rtmsg.
const ROUTE_TYPE_AT: usize = HEADER + 7;
/// Longest request, and longest part of a reply that is read, bytes.
const ROOM: usize = 256;

fn family_and_bytes(ip: IpAddr) -> (u8, [u8; 16]) {
    match ip {
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            for (to, from) in bytes.iter_mut().zip(ip.octets()) {
                *to = from;
            }
            (libc::AF_INET as u8, bytes)
        }
        IpAddr::V6(ip) => (libc::AF_INET6 as u8, ip.octets()),
    }
}

fn netlink(protocol: libc::c_int) -> Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: socket takes three integers and returns a new descriptor or -1.
    let fd = check(unsafe { libc::socket(libc::AF_NETLINK, kind, protocol) })?;
    // SAFETY: `fd` is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A request of one message.
struct Request {
    bytes: [u8; ROOM],
    len: usize,
}

impl Request {
    fn new(kind: u16) -> Self {
        let mut request = Self { bytes: [0; ROOM], len: 0 };
        request.put(&0u32.to_ne_bytes()); // the length is filled in by `ask`
        request.put(&kind.to_ne_bytes());
        request.put(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
        request.put(&(process::random_u64() as u32).to_ne_bytes());
        request.put(&0u32.to_ne_bytes());
        request
    }

    fn put(&mut self, bytes: &[u8]) {
        if let Some(to) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            to.copy_from_slice(bytes);
            self.len += bytes.len();
        }
    }

    /// A struct rtattr and its payload, a multiple of four bytes.
    fn attribute(&mut self, kind: u16, payload: &[u8]) {
        self.put(&(4 + payload.len() as u16).to_ne_bytes());
        self.put(&kind.to_ne_bytes());
        self.put(payload);
    }

    /// The kernel's reply. Errors: those that it replies with; EPROTO for a reply that is too short.
    fn ask(mut self, netlink: &OwnedFd) -> Result<[u8; ROOM]> {
        let len = self.len;
        if let Some(to) = self.bytes.get_mut(..4) {
            to.copy_from_slice(&(len as u32).to_ne_bytes());
        }
        // An unconnected netlink socket sends to the kernel.
        // SAFETY: `bytes` has `len` bytes.
        check_len(unsafe {
            libc::send(netlink.as_raw_fd(), self.bytes.as_ptr().cast(), len, libc::MSG_NOSIGNAL)
        })?;
        loop {
            let mut answer = [0; ROOM];
            // The kernel has replied when `send` returns (netlink_rcv_skb), so there is no need to wait.
            // SAFETY: `answer` has that many bytes.
            let n = check_len(unsafe {
                libc::recv(
                    netlink.as_raw_fd(),
                    answer.as_mut_ptr().cast(),
                    answer.len(),
                    libc::MSG_DONTWAIT,
                )
            })?;
            if answer.get(8..12) != self.bytes.get(8..12) {
                continue; // a reply to an earlier request
            }
            let half = |at: usize| answer.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
            if half(4) == Some(libc::NLMSG_ERROR as u16) {
                let code = answer.get(HEADER..HEADER + 4).and_then(|b| b.try_into().ok());
                return Err(Errno(code.map_or(libc::EPROTO, i32::from_ne_bytes).saturating_neg()));
            }
            return if n > ROUTE_TYPE_AT { Ok(answer) } else { Err(Errno(libc::EPROTO)) };
        }
    }
}

#[cfg(test)]
mod tests;
