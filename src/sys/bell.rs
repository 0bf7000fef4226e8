//! Doorbells that any process of this user can ring: a datagram socket for each endpoint, instead of a connection for
//! each peer.
//!
//! The name of the socket is no secret: every process of the network namespace finds it in /proc/net/unix. So the
//! kernel checks each datagram before it is queued (`SO_ATTACH_FILTER`): a ring begins with a random number that only
//! peers know, and everything else is dropped. Other users can neither wake the endpoint nor fill the queue.

use super::cancel::Shield;
use super::errno::{Errno, Result, check, check_len};
#[cfg(test)]
use super::event;
use super::process::random_u64;
use super::spare;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Bytes of the name of a bell, after the byte that says that it is in the abstract namespace.
const NAME: usize = 8;

/// Rings taken from the queue at a time.
const RINGS: usize = 128;

/// What a peer has to know to ring a bell.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct BellAddress {
    /// The abstract name, padded with zeroes; 0: no bell.
    name: u64,
    secret: u64,
}

impl BellAddress {
    /// As two words, for a peer.
    pub(crate) fn to_words(self) -> [u64; 2] {
        [self.name, self.secret]
    }

    /// `None`: these words name no bell.
    pub(crate) fn from_words([name, secret]: [u64; 2]) -> Option<Self> {
        (name != 0).then_some(Self { name, secret })
    }

    fn socket_address(self) -> (libc::sockaddr_un, libc::socklen_t) {
        // SAFETY: all zeroes is a valid sockaddr_un.
        let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let name = self.name.to_le_bytes();
        let len = name.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        for (to, from) in addr.sun_path.iter_mut().skip(1).zip(name) {
            *to = from as libc::c_char;
        }
        let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + len;
        (addr, len as libc::socklen_t)
    }
}

/// The doorbell of an endpoint, through which it also rings those of its peers.
#[derive(Debug)]
pub(crate) struct Bell {
    socket: OwnedFd,
    address: BellAddress,
}

impl Bell {
    /// A silent bell under a name that the kernel chooses. Errors: EMFILE, ENFILE, ENOMEM, and those of a system-call
    /// filter.
    pub(crate) fn new() -> Result<Self> {
        let socket = datagram()?;
        let secret = random_u64();
        only_with(&socket, secret)?;
        Ok(Self { address: BellAddress { name: bind_anywhere(&socket)?, secret }, socket })
    }

    pub(crate) fn address(&self) -> BellAddress {
        self.address
    }

    /// Makes another bell readable, so that a process that sleeps on it wakes. Never waits.
    #[cold]
    pub(crate) fn ring(&self, other: BellAddress) {
        let ring = other.secret.to_be_bytes();
        if self.send(self.socket.as_fd(), other, &ring) != Err(Errno(libc::EAGAIN)) {
            return;
        }
        // Either the bell rings already, or peers that are stopped hold all that this socket may have in flight.
        let fresh = || datagram().map(|socket| self.send(socket.as_fd(), other, &ring));
        if fresh().is_err() {
            let _ = spare::lend(fresh);
        }
    }

    /// Whether a bell has gone, with its endpoint or its process. Does not ring it.
    pub(crate) fn is_gone(&self, other: BellAddress) -> bool {
        self.send(self.socket.as_fd(), other, &[0]) == Err(Errno(libc::ECONNREFUSED))
    }

    fn send(&self, from: BorrowedFd<'_>, other: BellAddress, bytes: &[u8]) -> Result<()> {
        let (addr, len) = other.socket_address();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        let _shield = Shield::raise();
        // SAFETY: live bytes, and a valid sockaddr_un of `len` bytes.
        check_len(unsafe {
            libc::sendto(
                from.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                flags,
                (&raw const addr).cast(),
                len,
            )
        })
        .map(drop)
    }

    /// Silences the bell, unless it has very many rings.
    pub(crate) fn silence(&self) {
        let mut ring = [0u8; 8];
        let _shield = Shield::raise();
        for _ in 0..RINGS {
            // SAFETY: room for eight bytes.
            let n = unsafe {
                libc::recv(
                    self.socket.as_raw_fd(),
                    ring.as_mut_ptr().cast(),
                    ring.len(),
                    libc::MSG_DONTWAIT,
                )
            };
            if n < 0 {
                return;
            }
        }
    }

    /// Whether it rings.
    #[cfg(test)]
    pub(crate) fn rings(&self) -> bool {
        event::wait_readable(self.fd(), 0).unwrap()
    }

    /// The descriptor to wait on.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn datagram() -> Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: returns a new descriptor or -1.
    let fd = check(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: `fd` is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// From now on the kernel queues only datagrams that begin with `secret` (socket(7), SO_ATTACH_FILTER).
fn only_with(socket: &OwnedFd, secret: u64) -> Result<()> {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_UNLESS_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let load = |at| libc::sock_filter { code: LOAD_WORD, jt: 0, jf: 0, k: at };
    let check_word = |k, jf| libc::sock_filter { code: JUMP_UNLESS_EQUAL, jt: 0, jf, k };
    let accept = |bytes| libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: bytes };
    let mut program = [
        load(0),
        check_word((secret >> 32) as u32, 3),
        load(4),
        check_word(secret as u32, 1),
        accept(8),
        accept(0),
    ];
    let program =
        libc::sock_fprog { len: program.len() as libc::c_ushort, filter: program.as_mut_ptr() };
    // SAFETY: a live program of that length, which the kernel copies.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    })
    .map(drop)
}

/// Binds the socket to an abstract name of the kernel's choice (unix(7), Autobind). Returns that name.
fn bind_anywhere(socket: &OwnedFd) -> Result<u64> {
    // SAFETY: all zeroes is a valid sockaddr_un.
    let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let start = std::mem::offset_of!(libc::sockaddr_un, sun_path);
    let mut len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: a family alone asks for a name; then room for `len` bytes.
    unsafe {
        let raw = socket.as_raw_fd();
        check(libc::bind(raw, (&raw const addr).cast(), start as libc::socklen_t))?;
        check(libc::getsockname(raw, (&raw mut addr).cast(), &mut len))?;
    }
    let len = (len as usize).saturating_sub(start + 1);
    let mut name = [0; NAME];
    for (to, from) in name.iter_mut().zip(addr.sun_path.iter().skip(1).take(len)) {
        *to = *from as u8;
    }
    match u64::from_le_bytes(name) {
        name if name != 0 && len <= NAME => Ok(name),
        _ => Err(Errno(libc::EADDRNOTAVAIL)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(bell: &Bell) -> BellAddress {
        BellAddress::from_words(bell.address().to_words()).unwrap()
    }

    #[test]
    fn a_ring_is_heard_until_it_is_silenced() {
        let (here, there) = (Bell::new().unwrap(), Bell::new().unwrap());
        assert_ne!(here.address(), there.address());
        assert!(!there.rings());
        (0..10_000).for_each(|_| here.ring(words(&there)));
        assert!(there.rings() && !here.rings());
        for _ in 0..100 {
            there.silence();
        }
        assert!(!there.rings());
        here.ring(words(&there));
        assert!(there.rings());
    }

    #[test]
    fn a_stranger_neither_rings_nor_fills() {
        let (here, there) = (Bell::new().unwrap(), Bell::new().unwrap());
        let [name, secret] = there.address().to_words();
        for wrong in [secret ^ 1, secret ^ 1 << 32, 0] {
            for _ in 0..1000 {
                here.ring(BellAddress { name, secret: wrong });
                assert!(!here.is_gone(there.address()));
            }
        }
        assert!(!there.rings());
        here.ring(there.address());
        assert!(there.rings());
    }

    #[test]
    fn stopped_peers_keep_no_ring_from_others() {
        let here = Bell::new().unwrap();
        let stopped: Vec<Bell> = (0..400).map(|_| Bell::new().unwrap()).collect();
        for bell in &stopped {
            here.ring(bell.address());
        }
        assert!(stopped.iter().all(Bell::rings));
    }

    #[test]
    fn a_bell_goes_with_its_endpoint() {
        let (here, there) = (Bell::new().unwrap(), Bell::new().unwrap());
        let address = there.address();
        assert!(!here.is_gone(address));
        drop(there);
        assert!(here.is_gone(address));
        here.ring(address);
        assert_eq!(BellAddress::from_words([0, 1]), None);
    }
}
