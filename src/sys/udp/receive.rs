//! Receiving: one message a call while few arrive, several once they come faster than they are
//! looked at.

use super::control::{Beside, Control};
use super::{Losses, UdpPort};
use crate::sys::cancel::Shield;
use crate::sys::errno::{Result, check, check_len};
use crate::sys::net::socket_addr_from_bytes;
use std::alloc::{Layout, alloc_zeroed};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;

/// Messages of one recvmmsg(2) at most.
const MESSAGES: usize = 8;
/// Bytes of a receive buffer: as many as an IP packet has, which is what the kernel may join.
const BUFFER_LEN: usize = 64 << 10;
/// How often a receive is tried again that met the error of an earlier datagram.
const RETRIES: usize = 3;
/// One of so many fruitless receives has the error queue looked at, because a send may have
/// swallowed the one error that announces it, and a waiter would be woken for it without end.
const LOOK_EVERY: u32 = 64;
/// The ECN bits that a router sets which is about to drop datagrams.
const CE: u8 = 3;

/// Room for a sockaddr_in or sockaddr_in6.
type Name = [u8; 28];

/// Buffers, and what was noticed while they were filled.
#[derive(Debug, Default)]
pub(super) struct Receiver {
    /// `MESSAGES` buffers of `BUFFER_LEN`; none before the first receive. What no datagram has
    /// reached takes no memory.
    buffers: Vec<u8>,
    /// The last receive found something: there may be more.
    streaming: bool,
    /// Receives that found nothing.
    fruitless: u32,
    pub(super) losses: Losses,
}

impl UdpPort {
    /// Takes what has arrived, in one system call, and gives `each` datagram with its source and
    /// whether a router marked it. Returns how many datagrams there were: those of 8 messages at
    /// most, each of up to 64 KiB and 64 datagrams.
    pub(crate) fn receive_batch(&mut self, mut each: impl FnMut(SocketAddr, &[u8], bool)) -> usize {
        let fd = self.socket.as_raw_fd();
        let receiver = &mut self.receiver;
        if receiver.buffers.is_empty() {
            // Without memory the datagrams stay where they are.
            let Some(buffers) = zeroed(MESSAGES * BUFFER_LEN) else { return 0 };
            receiver.buffers = buffers;
        }
        for _ in 0..=RETRIES {
            let result = if receiver.streaming {
                receiver.many(fd, &mut each)
            } else {
                receiver.one(fd, &mut each)
            };
            match result {
                Ok(datagrams) => return datagrams,
                Err(e) if e.is_would_block() => break,
                // The error of an earlier datagram, once (udp(7)); it stays in the error queue.
                Err(_) => self.errors_pending = true,
            }
        }
        receiver.streaming = false;
        receiver.fruitless = receiver.fruitless.wrapping_add(1);
        if receiver.fruitless % LOOK_EVERY == 0 {
            self.errors_pending = true;
        }
        0
    }
}

/// Zeroes that take no memory before they are touched. `None`: there is no room, which must not end the
/// application.
fn zeroed(len: usize) -> Option<Vec<u8>> {
    let layout = Layout::array::<u8>(len).ok().filter(|layout| layout.size() > 0)?;
    // SAFETY: a layout that is not empty.
    let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    // SAFETY: just allocated, as `len` bytes that are all zero, with the layout that a vector of so many has.
    Some(unsafe { Vec::from_raw_parts(base.as_ptr(), len, len) })
}

impl Receiver {
    /// One message: the shortest system call, which is what an idle endpoint and a ping-pong make.
    #[inline]
    fn one(&mut self, fd: RawFd, each: &mut impl FnMut(SocketAddr, &[u8], bool)) -> Result<usize> {
        let mut name: Name = [0; size_of::<Name>()];
        let mut control = Control::new();
        let mut vector = vector(self.buffers.get_mut(..BUFFER_LEN).unwrap_or_default());
        let mut header = header(&mut name, &mut vector, &mut control);
        // Not libc's recvmsg: that is a cancellation point, 30 ns more in a process with threads.
        // SAFETY: `header` points to live rooms of the lengths that it says.
        let rc = unsafe { libc::syscall(libc::SYS_recvmsg, fd, &raw mut header, 0) };
        let len = check_len(rc as isize)?;
        self.streaming = true;
        let bytes = self.buffers.get(..len.min(BUFFER_LEN)).unwrap_or_default();
        // SAFETY: the kernel has filled `header` just now.
        Ok(unsafe { deliver(&header, &name, bytes, &mut self.losses, each) })
    }

    /// As many messages as there are, up to `MESSAGES`.
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
        // SAFETY: the headers point to live rooms of the lengths that they say.
        let n = check(unsafe {
            libc::recvmmsg(fd, messages.as_mut_ptr(), room, 0, std::ptr::null_mut())
        })? as usize;
        self.streaming = n > 1;
        let mut datagrams = 0;
        let filled = messages.iter().zip(&names).zip(self.buffers.chunks_exact(BUFFER_LEN)).take(n);
        for ((message, name), buffer) in filled {
            let bytes = buffer.get(..message.msg_len as usize).unwrap_or_default();
            // SAFETY: the kernel has filled this header just now.
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

/// Gives `each` the datagrams of one message. Returns how many there were, one that is dropped
/// here included.
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
    // SAFETY: as the caller says.
    let beside = unsafe { Beside::read(header) };
    if let Some(total) = beside.overflowed {
        // The kernel's count has 32 bits and wraps.
        let more = total.wrapping_sub(losses.overflowed as u32);
        losses.overflowed = losses.overflowed.wrapping_add(u64::from(more));
    }
    let known = name.get(..header.msg_namelen as usize).and_then(socket_addr_from_bytes);
    // Without its control messages it cannot be told where one datagram ends.
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
    // One without bytes is none of ours, but it was there.
    datagrams.max(1)
}
