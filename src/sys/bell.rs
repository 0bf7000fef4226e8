//! Doorbells that any process of this user can ring: a datagram socket for each endpoint, instead of a connection for
//! each peer.
//!
//! The name of the socket is no secret: every process of the network namespace finds it in /proc/net/unix. So the
//! kernel checks each datagram before it is queued (`SO_ATTACH_FILTER`): a ring begins with a random number that only
//! peers know, and everything else is dropped. Other users can neither wake the endpoint nor fill the queue. A ring that
//! tells of an end is a byte longer: a thread that wakes for a message need not look which peers have closed.

use super::cancel::Shield;
use super::errno::{Errno, Result, check, check_len};
#[cfg(test)]
use super::event;
use super::process::random_u64;
use super::spare;
use super::unix::abstract_address;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Names that are tried before it fails to bind one.
const TRIES: usize = 16;

/// Rings taken from the queue at a time.
const RINGS: usize = 128;

/// So many rings may have filled the queue (net.unix.max_dgram_qlen, at least 10), and kept others out.
const MANY: usize = 10;

/// Why a bell is rung.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ring {
    /// There is a message.
    Message,
    /// A link has ended.
    End,
}

/// What a peer has to know to ring a bell.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct BellAddress {
    /// The name in the abstract namespace, padded with zeroes; 0: no bell.
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

    fn socket_address(self) -> Result<(libc::sockaddr_un, libc::socklen_t)> {
        let name = self.name.to_le_bytes();
        let len = name.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        abstract_address(name.get(..len).unwrap_or(&[]))
    }
}

/// The doorbell of an endpoint, through which it also rings those of its peers.
#[derive(Debug)]
pub(crate) struct Bell {
    socket: OwnedFd,
    address: BellAddress,
    /// Bells to be rung again, because the system lacked a resource.
    missed: Mutex<Vec<(BellAddress, Ring)>>,
}

impl Bell {
    /// A silent bell under a random name. Other users can use up the names of unix(7), Autobind, but not these. Errors:
    /// EMFILE, ENFILE, ENOMEM, EADDRINUSE, and those of a system-call filter.
    pub(crate) fn new() -> Result<Self> {
        Self::with_one_of(std::iter::repeat_with(random_name).take(TRIES))
    }

    /// A silent bell under the first of these names that nobody has.
    fn with_one_of(names: impl Iterator<Item = u64>) -> Result<Self> {
        let socket = datagram()?;
        let secret = random_u64();
        only_with(&socket, secret)?;
        for name in names {
            let address = BellAddress { name, secret };
            match bind(&socket, address) {
                Err(Errno(libc::EADDRINUSE)) => {}
                bound => return bound.map(|()| Self { socket, address, missed: Mutex::default() }),
            }
        }
        Err(Errno(libc::EADDRINUSE))
    }

    pub(crate) fn address(&self) -> BellAddress {
        self.address
    }

    /// Makes another bell readable, so that a process that sleeps on it wakes. Never waits. If the system lacks a
    /// resource for that, [`Self::ring_missed`] does it.
    #[cold]
    pub(crate) fn ring(&self, other: BellAddress, why: Ring) {
        let mut bytes = [1; 9];
        for (to, byte) in bytes.iter_mut().zip(other.secret.to_be_bytes()) {
            *to = byte;
        }
        let len = bytes.len() - usize::from(why == Ring::Message);
        // Another error: it rings already, or has gone.
        let sent = self.send(other, bytes.get(..len).unwrap_or_default());
        if sent.is_err_and(Errno::is_shortage) {
            let mut missed = self.missed.lock().unwrap_or_else(PoisonError::into_inner);
            if !missed.contains(&(other, why)) {
                missed.push((other, why));
            }
        }
    }

    /// Rings those bells again for which the system lacked a resource.
    pub(crate) fn ring_missed(&self) {
        let mut missed = self.missed.lock().unwrap_or_else(PoisonError::into_inner);
        if !missed.is_empty() {
            let again = std::mem::take(&mut *missed);
            drop(missed);
            again.into_iter().for_each(|(other, why)| self.ring(other, why));
        }
    }

    /// Whether a bell has gone, with its endpoint or its process. Does not ring it.
    pub(crate) fn is_gone(&self, other: BellAddress) -> bool {
        self.send(other, &[0]) == Err(Errno(libc::ECONNREFUSED))
    }

    /// Sends without waiting. Errors: EAGAIN: `other` has very many rings; ECONNREFUSED: it has gone; EMFILE, ENFILE,
    /// ENOMEM, ENOBUFS.
    fn send(&self, other: BellAddress, bytes: &[u8]) -> Result<()> {
        #[cfg(test)]
        if let Some(errno) = REFUSED.get() {
            return Err(errno);
        }
        match Self::send_from(self.socket.as_fd(), other, bytes) {
            Err(Errno(libc::EAGAIN)) => {}
            sent => return sent,
        }
        #[cfg(test)]
        MEANWHILE.take().into_iter().for_each(|happens| happens());
        // Either the bell rings already, or peers that are stopped hold all that this socket may have in flight.
        if !self.has_much_in_flight() {
            // They may have read it since. Now the answer is that of the other's queue.
            return Self::send_from(self.socket.as_fd(), other, bytes);
        }
        let fresh = || Self::send_from(datagram()?.as_fd(), other, bytes);
        match fresh() {
            Err(Errno(libc::EMFILE | libc::ENFILE)) => spare::lend(fresh),
            sent => sent,
        }
    }

    /// Whether rings that nobody has read may use up what the socket may have in flight (SO_SNDBUF, SIOCOUTQ of
    /// unix(7)): many processes that end ring each bell more often than its queue holds, and no other socket helps.
    fn has_much_in_flight(&self) -> bool {
        let (mut held, mut limit): (libc::c_int, libc::c_int) = (0, 0);
        let fd = self.socket.as_raw_fd();
        let mut len = size_of_val(&limit) as libc::socklen_t;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_SNDBUF);
        // SAFETY: two live numbers, and the size of the second.
        let known = unsafe {
            libc::ioctl(fd, libc::TIOCOUTQ, &raw mut held) == 0
                && libc::getsockopt(fd, level, name, (&raw mut limit).cast(), &raw mut len) == 0
        };
        !known || held >= limit / 2
    }

    fn send_from(from: BorrowedFd<'_>, other: BellAddress, bytes: &[u8]) -> Result<()> {
        let (addr, len) = other.socket_address()?;
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

    /// Silences the bell, unless it has very many rings. True: some link may have ended.
    pub(crate) fn silence(&self) -> bool {
        let mut ring = [0u8; 9];
        let mut ended = false;
        let _shield = Shield::raise();
        for rings in 0..RINGS {
            // SAFETY: room for nine bytes.
            let n = unsafe {
                libc::recv(
                    self.socket.as_raw_fd(),
                    ring.as_mut_ptr().cast(),
                    ring.len(),
                    libc::MSG_DONTWAIT,
                )
            };
            if n < 0 {
                return ended || rings >= MANY;
            }
            ended |= n == 9;
        }
        true
    }

    /// Silences it, and tells how often it was rung.
    #[cfg(test)]
    pub(crate) fn take_rings(&self) -> usize {
        std::iter::from_fn(|| {
            let rings = self.rings();
            let mut ring = [0u8; 9];
            // SAFETY: room for nine bytes.
            rings.then(|| unsafe {
                libc::recv(self.fd().as_raw_fd(), ring.as_mut_ptr().cast(), 9, 0)
            })
        })
        .count()
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

#[cfg(test)]
thread_local! {
    /// For tests: as if the system refused this thread every datagram.
    pub(crate) static REFUSED: std::cell::Cell<Option<Errno>> = const { std::cell::Cell::new(None) };
    /// For tests: what happens once between a ring that this thread could not send and the look at the reason.
    static MEANWHILE: std::cell::Cell<Option<Box<dyn FnOnce()>>> = const { std::cell::Cell::new(None) };
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
        accept(9),
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

/// Eight hexadecimal digits: a name with other bytes would break the lines of /proc/net/unix.
fn random_name() -> u64 {
    let digits = format!("{:08x}", random_u64() as u32);
    digits.bytes().rev().fold(0, |name, digit| name << 8 | u64::from(digit))
}

/// Errors: EADDRINUSE when the name is taken.
fn bind(socket: &OwnedFd, address: BellAddress) -> Result<()> {
    let (addr, len) = address.socket_address()?;
    // SAFETY: a valid sockaddr_un of `len` bytes.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const addr).cast(), len) }).map(drop)
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
        (0..10_000).for_each(|_| here.ring(words(&there), Ring::Message));
        assert!(there.rings() && !here.rings());
        for _ in 0..100 {
            there.silence();
        }
        assert!(!there.rings());
        here.ring(words(&there), Ring::Message);
        assert!(there.rings());
    }

    #[test]
    fn a_stranger_neither_rings_nor_fills() {
        let (here, there) = (Bell::new().unwrap(), Bell::new().unwrap());
        let [name, secret] = there.address().to_words();
        for wrong in [secret ^ 1, secret ^ 1 << 32, 0] {
            for _ in 0..1000 {
                here.ring(BellAddress { name, secret: wrong }, Ring::End);
                assert!(!here.is_gone(there.address()));
            }
        }
        assert!(!there.rings());
        here.ring(there.address(), Ring::Message);
        assert!(there.rings());
    }

    #[test]
    fn stopped_peers_keep_no_ring_from_others() {
        let here = Bell::new().unwrap();
        let stopped: Vec<Bell> = (0..400).map(|_| Bell::new().unwrap()).collect();
        for bell in &stopped {
            here.ring(bell.address(), Ring::Message);
        }
        assert!(stopped.iter().all(Bell::rings));
    }

    #[test]
    fn no_ring_is_lost_although_stopped_peers_go_on_at_that_moment() {
        let (here, there) = (Bell::new().unwrap(), Bell::new().unwrap());
        let stopped: Vec<Bell> = (0..400).map(|_| Bell::new().unwrap()).collect();
        stopped.iter().for_each(|bell| here.ring(bell.address(), Ring::Message));
        MEANWHILE.set(Some(Box::new(move || {
            stopped.iter().for_each(|bell| {
                bell.silence();
            });
        })));
        here.ring(there.address(), Ring::Message);
        assert!(MEANWHILE.take().is_none(), "the socket had all in flight that it may");
        assert!(there.rings());
    }

    #[test]
    fn stopped_peers_do_not_hide_the_end_of_others() {
        let (here, there) = (Bell::new().unwrap(), Bell::new().unwrap());
        let stopped: Vec<Bell> = (0..400).map(|_| Bell::new().unwrap()).collect();
        stopped.iter().for_each(|bell| here.ring(bell.address(), Ring::Message));
        let probe = || Bell::send_from(here.fd(), there.address(), &[0]);
        assert_eq!(probe(), Err(Errno(libc::EAGAIN)), "the socket has all in flight that it may");
        assert!(!here.is_gone(there.address()));
        let address = there.address();
        drop(there);
        assert!(here.is_gone(address));
    }

    #[test]
    fn a_name_that_is_taken_is_left_to_its_owner() {
        let first = Bell::new().unwrap();
        let (taken, free) = (first.address().name, random_name());
        let second = Bell::with_one_of([taken, free].into_iter()).unwrap();
        assert_eq!(second.address().name, free);
        let third = Bell::with_one_of([taken, free].into_iter());
        assert_eq!(third.map(drop), Err(Errno(libc::EADDRINUSE)));
        second.ring(first.address(), Ring::Message);
        assert!(first.rings() && !second.rings());
    }

    #[test]
    fn a_ring_for_which_there_was_no_resource_is_made_up_for() {
        let (here, there) = (Bell::new().unwrap(), Bell::new().unwrap());
        for (errno, again) in [(libc::EMFILE, true), (libc::ENOBUFS, true), (libc::EPERM, false)] {
            REFUSED.set(Some(Errno(errno)));
            here.ring(there.address(), Ring::Message);
            here.ring_missed();
            REFUSED.set(None);
            assert!(!there.rings());
            here.ring_missed();
            assert_eq!(there.rings(), again);
            there.silence();
            here.ring_missed();
            assert!(!there.rings(), "once");
        }
    }

    #[test]
    fn names_are_printable_and_of_full_length() {
        for _ in 0..1000 {
            assert!(random_name().to_le_bytes().iter().all(u8::is_ascii_hexdigit));
        }
    }

    #[test]
    fn a_bell_goes_with_its_endpoint() {
        let (here, there) = (Bell::new().unwrap(), Bell::new().unwrap());
        let address = there.address();
        assert!(!here.is_gone(address));
        drop(there);
        assert!(here.is_gone(address));
        here.ring(address, Ring::Message);
        assert_eq!(BellAddress::from_words([0, 1]), None);
    }
}
