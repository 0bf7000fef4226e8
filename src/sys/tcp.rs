//! TCP connections that never block; the memory that they send and receive is named by number.

use super::cancel::Shield;
use super::cma::{MAX_RANGES, Range};
use super::errno::{Errno, Result, check, check_len};
use super::net::{socket_addr_from_bytes, socket_addr_to_bytes};
use super::udp::set;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Most connections that wait to be accepted.
pub(crate) const BACKLOG: libc::c_int = 256;

fn socket(address: &SocketAddr) -> Result<OwnedFd> {
    let family = if address.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: socket returns a new descriptor or -1.
    let fd = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: `fd` is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn bind(fd: &OwnedFd, address: &SocketAddr) -> Result<()> {
    let (bytes, len) = socket_addr_to_bytes(address);
    // SAFETY: `bytes` holds a socket address of `len` bytes.
    check(unsafe { libc::bind(fd.as_raw_fd(), bytes.as_ptr().cast(), len as libc::socklen_t) })?;
    Ok(())
}

/// Frames are sent at once.
fn prepare(fd: &OwnedFd) {
    // A kernel without this option still works.
    let _ = set(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
}

/// A socket that listens at `address`. Errors: EADDRINUSE, EACCES, EMFILE, ENFILE, ENOMEM.
pub(crate) fn listen(address: &SocketAddr) -> Result<OwnedFd> {
    let fd = socket(address)?;
    set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    if address.is_ipv6() {
        set(fd.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
    }
    bind(&fd, address)?;
    // SAFETY: an owned descriptor.
    check(unsafe { libc::listen(fd.as_raw_fd(), BACKLOG) })?;
    Ok(fd)
}

/// A connection that waits at `listener`, and its remote address. Errors: EMFILE, ENFILE, ENOMEM.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<Option<(OwnedFd, SocketAddr)>> {
    let mut name = [0u8; 28];
    let mut len = name.len() as libc::socklen_t;
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let _shield = Shield::raise();
    // SAFETY: `name` has room for `len` bytes.
    let fd =
        unsafe { libc::accept4(listener.as_raw_fd(), name.as_mut_ptr().cast(), &mut len, flags) };
    match check(fd) {
        Ok(fd) => {
            // SAFETY: `fd` is new and has no other owner.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            prepare(&fd);
            let from = name.get(..len as usize).and_then(socket_addr_from_bytes);
            Ok(from.map(|from| (fd, from)))
        }
        // The connection ended before it was accepted (accept(2)).
        Err(Errno(libc::ECONNABORTED | libc::EINTR | libc::EPROTO)) => Ok(None),
        Err(e) if e.is_would_block() => Ok(None),
        Err(e) => Err(e),
    }
}

/// Whether an error of [`accept`] is one of the network that a new connection has met (accept(2)): others may be taken.
pub(crate) fn passes(errno: Errno) -> bool {
    matches!(
        errno.0,
        libc::ENETDOWN
            | libc::ENOPROTOOPT
            | libc::EHOSTDOWN
            | libc::ENONET
            | libc::EHOSTUNREACH
            | libc::EOPNOTSUPP
            | libc::ENETUNREACH
    )
}

/// The local address of a connection.
pub(crate) fn local_addr(fd: BorrowedFd<'_>) -> Result<SocketAddr> {
    let mut name = [0u8; 28];
    let mut len = name.len() as libc::socklen_t;
    // SAFETY: `name` has room for `len` bytes.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), name.as_mut_ptr().cast(), &mut len) })?;
    name.get(..len as usize).and_then(socket_addr_from_bytes).ok_or(Errno(libc::EAFNOSUPPORT))
}

/// Begins a connection from the address `from` to `to`. [`send`] reports the outcome. Errors:
/// EADDRNOTAVAIL, ENETUNREACH, ECONNREFUSED, EMFILE, ENFILE, ENOMEM.
pub(crate) fn connect(from: &SocketAddr, to: &SocketAddr) -> Result<OwnedFd> {
    let fd = socket(to)?;
    prepare(&fd);
    if !from.ip().is_unspecified() {
        let _ = set(fd.as_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
        let mut from = *from;
        from.set_port(0);
        bind(&fd, &from)?;
    }
    let (bytes, len) = socket_addr_to_bytes(to);
    let _shield = Shield::raise();
    // SAFETY: `bytes` holds a socket address of `len` bytes.
    let rc =
        unsafe { libc::connect(fd.as_raw_fd(), bytes.as_ptr().cast(), len as libc::socklen_t) };
    match check(rc) {
        Ok(_) | Err(Errno(libc::EINPROGRESS | libc::EINTR)) => Ok(fd),
        Err(e) => Err(e),
    }
}

fn vectors(first: (*mut u8, usize), ranges: &[Range]) -> ([libc::iovec; MAX_RANGES + 1], usize) {
    let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MAX_RANGES + 1];
    let mut n = 0;
    let named = ranges.iter().map(|range| {
        (std::ptr::with_exposed_provenance_mut::<u8>(range.addr as usize), range.len as usize)
    });
    let all = std::iter::once(first).chain(named).filter(|(_, len)| *len > 0);
    for (to, (base, len)) in list.iter_mut().zip(all) {
        *to = libc::iovec { iov_base: base.cast(), iov_len: len };
        n += 1;
    }
    (list, n)
}

/// Sends `head` and then the bytes of at most 8 `ranges`; returns how many were accepted, 0 for none
/// now (not yet connected, or full). Errors: those of the connection: ECONNREFUSED, ECONNRESET, EPIPE,
/// ETIMEDOUT, EHOSTUNREACH.
///
/// # Safety
/// Every range must be readable memory of this process that nothing changes meanwhile.
pub(crate) unsafe fn send(fd: BorrowedFd<'_>, head: &[u8], ranges: &[Range]) -> Result<usize> {
    let (mut list, n) = vectors((head.as_ptr().cast_mut(), head.len()), ranges);
    // SAFETY: all zeroes is a valid msghdr.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = list.as_mut_ptr();
    header.msg_iovlen = n as _;
    let _shield = Shield::raise();
    // SAFETY: `head` is readable, and the caller guarantees that the ranges are.
    let rc = unsafe { libc::sendmsg(fd.as_raw_fd(), &header, libc::MSG_NOSIGNAL) };
    match check_len(rc) {
        Ok(n) => Ok(n),
        // ENOTCONN, EALREADY: the connection is being made.
        Err(e) if e.is_would_block() => Ok(0),
        Err(Errno(libc::ENOTCONN | libc::EALREADY | libc::EINPROGRESS | libc::EINTR)) => Ok(0),
        Err(e) => Err(e),
    }
}

/// The result of [`receive`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Received {
    /// So many bytes.
    Bytes(usize),
    /// No data now.
    Nothing,
    /// The peer has closed; no more data will come.
    End,
}

/// Fills at most 8 `ranges` and then `tail` with data that has arrived. Errors: ECONNRESET, ETIMEDOUT.
///
/// # Safety
/// Every range must be writable memory of this process that nothing else uses meanwhile.
pub(crate) unsafe fn receive(
    fd: BorrowedFd<'_>,
    ranges: &[Range],
    tail: &mut [u8],
) -> Result<Received> {
    let (mut list, mut n) = vectors((std::ptr::null_mut(), 0), ranges);
    if let Some(slot) = list.get_mut(n).filter(|_| !tail.is_empty()) {
        *slot = libc::iovec { iov_base: tail.as_mut_ptr().cast(), iov_len: tail.len() };
        n += 1;
    }
    // SAFETY: `tail` is writable, and the caller guarantees that the ranges are.
    let rc = unsafe {
        libc::syscall(libc::SYS_readv, fd.as_raw_fd(), list.as_mut_ptr(), n as libc::c_int)
    };
    match check_len(rc as isize) {
        Ok(0) => Ok(Received::End),
        Ok(n) => Ok(Received::Bytes(n)),
        Err(e) if e.is_would_block() || e.0 == libc::EINTR => Ok(Received::Nothing),
        Err(e) => Err(e),
    }
}

/// Bytes that the peer's system has not acknowledged (SIOCOUTQ, tcp(7)).
pub(crate) fn unacknowledged(fd: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: fills one int.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if rc < 0 { 0 } else { usize::try_from(bytes).unwrap_or(0) }
}

/// Whether the peer's system owes an acknowledgement, and has sent none for `ms`. A process that does not read closes
/// the window of its connection, which its system says in answer to probes. TCP_USER_TIMEOUT gives up on that too
/// (tcp(7)).
pub(crate) fn is_silent(fd: BorrowedFd<'_>, ms: u32) -> bool {
    // SAFETY: all zeroes is a valid tcp_info.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&info) as libc::socklen_t;
    let (level, name) = (libc::IPPROTO_TCP, libc::TCP_INFO);
    // SAFETY: fills at most `len` bytes of a live local.
    let rc =
        unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut info).cast(), &mut len) };
    // The last probe may still be answered.
    let owes = info.tcpi_unacked > 0 || info.tcpi_probes > 1;
    rc == 0 && owes && info.tcpi_last_ack_recv >= ms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::event::wait_readable;

    fn range(bytes: &[u8]) -> Range {
        Range { addr: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() as u64 }
    }

    fn pair(text: &str) -> Option<(OwnedFd, OwnedFd)> {
        let address: SocketAddr = text.parse().unwrap();
        let listener = listen(&address).ok()?;
        let at = std::net::TcpListener::from(listener.try_clone().unwrap()).local_addr().unwrap();
        let a = connect(&address, &at).unwrap();
        assert_eq!(wait_readable(listener.as_fd(), 1000), Ok(true));
        let (b, from) = accept(listener.as_fd()).unwrap().unwrap();
        assert_eq!(from.ip(), address.ip());
        assert!(accept(listener.as_fd()).unwrap().is_none());
        Some((a, b))
    }

    #[test]
    fn bytes_are_gathered_and_scattered() {
        for text in ["127.0.0.1:0", "[::1]:0"] {
            let Some((a, b)) = pair(text) else { continue };
            let mut tail = [0; 8];
            // SAFETY: no ranges.
            assert_eq!(unsafe { receive(b.as_fd(), &[], &mut tail) }, Ok(Received::Nothing));
            let (one, two) = (vec![1; 5], vec![2; 6]);
            // SAFETY: both live, and no thread writes to them.
            let sent = unsafe { send(a.as_fd(), &[0; 3], &[range(&one), range(&two)]) };
            assert_eq!(sent, Ok(14));
            let (x, y) = (vec![9; 4], vec![9; 7]);
            assert_eq!(wait_readable(b.as_fd(), 1000), Ok(true));
            // SAFETY: both live; nothing else accesses them before the call is over.
            let got = unsafe { receive(b.as_fd(), &[range(&x), range(&y)], &mut tail) };
            assert_eq!(got, Ok(Received::Bytes(14)));
            let all = [std::hint::black_box(x), std::hint::black_box(y), tail[..3].to_vec()];
            assert_eq!(all.concat(), [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
            drop(a);
            assert_eq!(wait_readable(b.as_fd(), 1000), Ok(true));
            // SAFETY: no ranges.
            assert_eq!(unsafe { receive(b.as_fd(), &[], &mut tail) }, Ok(Received::End));
        }
    }

    #[test]
    fn a_port_without_listener_is_an_error_of_the_first_send() {
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let listener = listen(&address).unwrap();
        let at = std::net::TcpListener::from(listener).local_addr().unwrap(); // and closes it
        let made = connect(&address, &at);
        // SAFETY: no ranges.
        let sent = made.and_then(|fd| unsafe { send(fd.as_fd(), b"hello", &[]) });
        assert_eq!(sent, Err(Errno(libc::ECONNREFUSED)));
    }

    #[test]
    fn a_network_that_is_down_is_silent() {
        let looked = std::thread::spawn(|| {
            // SAFETY: affects this thread alone.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return false;
            }
            let set_lo = |state: &str| {
                let args = ["link", "set", "lo", state];
                std::process::Command::new("ip").args(args).status().is_ok_and(|s| s.success())
            };
            if !set_lo("up") {
                return false;
            }
            let (a, _b) = pair("127.0.0.1:0").unwrap();
            assert!(set_lo("down"));
            // SAFETY: no ranges.
            assert_eq!(unsafe { send(a.as_fd(), b"hello", &[]) }, Ok(5));
            let since = std::time::Instant::now();
            while !is_silent(a.as_fd(), 300) {
                assert!(since.elapsed() < crate::patience::seconds(10));
                std::thread::yield_now();
            }
            true
        });
        if !looked.join().unwrap() {
            eprintln!("skipped: takes root and ip(8) to make a network that is down");
        }
    }

    #[test]
    fn a_full_connection_takes_nothing() {
        let Some((a, b)) = pair("127.0.0.1:0") else { return };
        let bytes = vec![7; 1 << 20];
        let mut total = 0;
        for _ in 0..1000 {
            // SAFETY: it lives, and no thread writes to it.
            let n = unsafe { send(a.as_fd(), &[], &[range(&bytes)]) }.unwrap();
            total += n;
            if n == 0 {
                break;
            }
        }
        assert!(unacknowledged(a.as_fd()) <= total && total > 0);
        // A process that does not read for long is no reason to give up.
        let mut patience: libc::c_int = -1;
        let mut len = size_of_val(&patience) as libc::socklen_t;
        // SAFETY: fills one int.
        let rc = unsafe {
            let (level, name) = (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT);
            libc::getsockopt(a.as_raw_fd(), level, name, (&raw mut patience).cast(), &mut len)
        };
        assert_eq!((rc, patience), (0, 0));
        assert!(!is_silent(a.as_fd(), 1000));
        drop(b);
    }
}
