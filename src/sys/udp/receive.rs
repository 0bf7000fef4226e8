//! Receiving: one message a call while few arrive, several a call once they arrive faster than they are
//! taken.

use super::control::{Beside, Control};
use crate::sys::cancel::Shield;
use crate::sys::errno::{Result, check, check_len};
use crate::sys::net::socket_addr_from_bytes;
use crate::telemetry::log;
use std::alloc::{Layout, alloc_zeroed};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr::NonNull;

/// Most messages of one recvmmsg(2).
const MESSAGES: usize = 8;
/// Bytes of a receive buffer: the length of the longest IP packet, which limits what the kernel joins.
const BUFFER_LEN: usize = 64 << 10;
/// How often a receive is retried after the error of an earlier datagram.
const RETRIES: usize = 3;
/// One in so many empty receives checks the error queue. A send may have consumed the one error that
/// announces an entry, and a waiting thread would be woken by that entry again and again.
const LOOK_EVERY: u32 = 64;
/// The ECN bits set by a router that is about to drop datagrams (CE).
const CE: u8 = 3;

/// Room for a sockaddr_in or sockaddr_in6.
type Name = [u8; 28];

/// Datagrams that the socket dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Losses {
    /// Datagrams that were longer than any of this protocol, or whose boundaries are unknown.
    pub(crate) truncated: u64,
    /// Datagrams that found the receive buffer full, as far as the kernel has reported.
    pub(crate) overflowed: u64,
    /// Bytes of the receive buffer, where the system gives less than was asked for.
    small: Option<u32>,
}

/// Overflows that are worth a line of the log: they are repaired, but each costs a round trip.
const OVERFLOWS: u64 = 1000;

impl Losses {
    /// The kernel reports `more` overflows.
    #[cold]
    fn overflow(&mut self, more: u32) {
        let before = self.overflowed;
        self.overflowed = before.wrapping_add(u64::from(more));
        let Some(small) = self.small.filter(|_| before / OVERFLOWS < self.overflowed / OVERFLOWS)
        else {
            return;
        };
        log::limited!(
            node: 0,
            "{} datagrams have found the socket's receive buffer full, and are sent again: it has {} KiB, and 8192 KiB are wanted. Raise the limit: sysctl -w net.core.rmem_max=8388608",
            self.overflowed,
            small / 1024
        );
    }
}

/// Buffers, and observations made while they were filled.
#[derive(Debug, Default)]
pub(super) struct Receiver {
    /// `MESSAGES` buffers of `BUFFER_LEN`; empty before the first receive. Parts that no datagram has
    /// reached take no memory.
    buffers: Vec<u8>,
    /// The last receive found a message: there may be more.
    streaming: bool,
    /// Receives that found no message.
    fruitless: u32,
    pub(super) losses: Losses,
}

/// Zeroes that take no memory before they are touched. `None`: no memory, which must not end the
/// application.
fn zeroed(len: usize) -> Option<Vec<u8>> {
    let layout = Layout::array::<u8>(len).ok().filter(|layout| layout.size() > 0)?;
    // SAFETY: a layout that is not empty.
    let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    // SAFETY: just allocated, `len` bytes that are all zero, with the layout of a vector of that capacity.
    Some(unsafe { Vec::from_raw_parts(base.as_ptr(), len, len) })
}

impl Receiver {
    /// `small`: bytes of a receive buffer that is smaller than wanted.
    pub(super) fn new(small: Option<u32>) -> Self {
        Self { losses: Losses { small, ..Losses::default() }, ..Self::default() }
    }

    /// See `UdpPort::receive_batch`. Also returns whether the error queue may hold
    /// something.
    pub(super) fn batch(
        &mut self,
        fd: RawFd,
        mut each: impl FnMut(SocketAddr, &[u8], bool),
    ) -> (usize, bool) {
        if self.buffers.is_empty() {
            // Without memory the datagrams stay in the socket.
            let Some(buffers) = zeroed(MESSAGES * BUFFER_LEN) else { return (0, false) };
            self.buffers = buffers;
        }
        let mut errors = false;
        for _ in 0..=RETRIES {
            let result =
                if self.streaming { self.many(fd, &mut each) } else { self.one(fd, &mut each) };
            match result {
                Ok(datagrams) => return (datagrams, errors),
                Err(e) if e.is_would_block() => break,
                // The error of an earlier datagram, reported once (udp(7)); it stays in the error queue.
                Err(_) => errors = true,
            }
        }
        self.streaming = false;
        self.fruitless = self.fruitless.wrapping_add(1);
        (0, errors || self.fruitless % LOOK_EVERY == 0)
    }

    /// Receives one message: the shortest system call, used by idle endpoints and ping-pongs.
    #[inline]
    fn one(&mut self, fd: RawFd, each: &mut impl FnMut(SocketAddr, &[u8], bool)) -> Result<usize> {
        let mut name: Name = [0; size_of::<Name>()];
        let mut control = Control::new();
        let mut vector = vector(self.buffers.get_mut(..BUFFER_LEN).unwrap_or_default());
        let mut header = header(&mut name, &mut vector, &mut control);
        // Not libc's recvmsg: that is a cancellation point, 30 ns more in a process with threads.
        // SAFETY: `header` points to live buffers of the lengths it states.
        let rc = unsafe { libc::syscall(libc::SYS_recvmsg, fd, &raw mut header, 0) };
        let len = check_len(rc as isize)?;
        self.streaming = true;
        let bytes = self.buffers.get(..len.min(BUFFER_LEN)).unwrap_or_default();
        // SAFETY: the kernel has just filled `header`.
        Ok(unsafe { deliver(&header, &name, bytes, &mut self.losses, each) })
    }

    /// Receives as many messages as there are, up to `MESSAGES`.
    fn many(&mut self, fd: RawFd, each: &mut impl FnMut(SocketAddr, &[u8], bool)) -> Result<usize> {
        let mut names: [Name; MESSAGES] = [[0; size_of::<Name>()]; MESSAGES];
        let mut controls = [const { Control::new() }; MESSAGES];
        // SAFETY: all zeroes is a valid iovec and a valid mmsghdr.
        let (mut vectors, mut messages): ([libc::iovec; MESSAGES], [libc::mmsghdr; MESSAGES]) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let rooms = self.buffers.chunks_exact_mut(BUFFER_LEN).zip(&mut names).zip(&mut controls);
        for (((room, name), control), (place, message)) in
            rooms.zip(vectors.iter_mut().zip(&mut messages))
        {
            *place = vector(room);
            message.msg_hdr = header(name, place, control);
        }
        let room = messages.len() as libc::c_uint;
        let _shield = Shield::raise();
        // SAFETY: the headers point to live buffers of the lengths they state.
        let n = check(unsafe {
            libc::recvmmsg(fd, messages.as_mut_ptr(), room, 0, std::ptr::null_mut())
        })? as usize;
        self.streaming = n > 1;
        let mut datagrams = 0;
        let filled = messages.iter().zip(&names).zip(self.buffers.chunks_exact(BUFFER_LEN)).take(n);
        for ((message, name), buffer) in filled {
            let bytes = buffer.get(..message.msg_len as usize).unwrap_or_default();
            // SAFETY: the kernel has just filled this header.
            datagrams += unsafe { deliver(&message.msg_hdr, name, bytes, &mut self.losses, each) };
        }
        Ok(datagrams)
    }
}

fn vector(room: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() }
}

fn header(name: &mut Name, vector: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: all zeroes is a valid msghdr.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_name = name.as_mut_ptr().cast();
    header.msg_namelen = size_of::<Name>() as libc::socklen_t;
    header.msg_iov = vector;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr();
    header.msg_controllen = Control::room() as _;
    header
}

/// Calls `each` for the datagrams of one message. Returns how many there were, including one that is
/// dropped here.
///
/// # Safety
/// The kernel has filled `header`, and its control messages are still there.
#[inline]
unsafe fn deliver(
    header: &libc::msghdr,
    name: &Name,
    bytes: &[u8],
    losses: &mut Losses,
    each: &mut impl FnMut(SocketAddr, &[u8], bool),
) -> usize {
    // SAFETY: the caller guarantees that the kernel has filled `header`.
    let beside = unsafe { Beside::read(header) };
    if let Some(total) = beside.overflowed {
        // The kernel's count has 32 bits and wraps.
        match total.wrapping_sub(losses.overflowed as u32) {
            0 => {}
            more => losses.overflow(more),
        }
    }
    let known = name.get(..header.msg_namelen as usize).and_then(socket_addr_from_bytes);
    // Without its control messages the boundaries of the datagrams are unknown.
    let cut = header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    let Some(source) = known.filter(|_| !cut) else {
        losses.truncated = losses.truncated.wrapping_add(1);
        return 1;
    };
    let congested = beside.ecn == CE;
    let segment = beside.segment.unwrap_or(bytes.len()).max(1);
    let mut datagrams = 0;
    for datagram in bytes.chunks(segment) {
        each(source, datagram, congested);
        datagrams += 1;
    }
    // An empty datagram is not of this protocol, but it arrived.
    datagrams.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log::captured;

    #[test]
    fn overflows_of_a_small_buffer_are_told_once_they_are_many() {
        captured::begin();
        let lines = || captured::lines_with("receive buffer full").len();
        let mut wanted = Losses::default();
        wanted.overflow(5000);
        let mut small = Losses { small: Some(212_992), ..Losses::default() };
        small.overflow(999);
        assert_eq!(lines(), 0);
        small.overflow(1);
        assert_eq!(lines(), 1);
        assert!(captured::lines_with("receive buffer full")[0].contains("it has 208 KiB"));
        assert_eq!((wanted.overflowed, small.overflowed), (5000, 1000));
    }
}
