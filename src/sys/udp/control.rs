//! Control messages (cmsg(3)): data that travels beside a message's bytes.

use std::mem::MaybeUninit;

/// The crate `libc` lacks a name for this on some targets.
pub(super) const SO_RXQ_OVFL: libc::c_int = 40;
/// Bytes of room for control messages: the four that a received message may have, or an extended
/// error with its two addresses.
const ROOM: usize = 128;

/// Room for control messages, aligned as they must be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Control([MaybeUninit<u8>; ROOM]);

impl Control {
    /// Empty room.
    pub(super) const fn new() -> Self {
        Self([MaybeUninit::uninit(); ROOM])
    }

    /// For `msghdr::msg_control`.
    pub(super) fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        self.0.as_mut_ptr().cast()
    }

    /// For `msghdr::msg_controllen`, when the kernel is to fill it.
    pub(super) const fn room() -> usize {
        ROOM
    }

    /// Stores one control message with the segment length, and points `header` at it.
    pub(super) fn put_segment(&mut self, header: &mut libc::msghdr, segment: u16) {
        // SAFETY: these compute sizes only.
        let (len, space) = unsafe { (libc::CMSG_LEN(2), libc::CMSG_SPACE(2)) };
        header.msg_control = self.as_mut_ptr();
        header.msg_controllen = space as _;
        // SAFETY: `self` is aligned for a cmsghdr and has room for one with two bytes; the padding
        // that the kernel may copy is written first.
        unsafe {
            self.0.as_mut_ptr().write_bytes(0, space as usize);
            let message = self.0.as_mut_ptr().cast::<libc::cmsghdr>();
            (*message).cmsg_level = libc::SOL_UDP;
            (*message).cmsg_type = libc::UDP_SEGMENT;
            (*message).cmsg_len = len as _;
            libc::CMSG_DATA(message).cast::<u16>().write_unaligned(segment);
        }
    }
}

/// The control data of a received message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Beside {
    /// The ECN bits of its IP header.
    pub(super) ecn: u8,
    /// Bytes of each datagram but the last, if several were joined.
    pub(super) segment: Option<usize>,
    /// Count of datagrams that found the receive buffer full so far.
    pub(super) overflowed: Option<u32>,
}

impl Beside {
    /// Parses the control messages that the kernel has stored under `header`.
    ///
    /// # Safety
    /// `header.msg_control` points to `header.msg_controllen` bytes that the kernel has written.
    #[inline]
    pub(super) unsafe fn read(header: &libc::msghdr) -> Self {
        let mut beside = Self::default();
        // SAFETY: the caller guarantees that the kernel has written the messages.
        unsafe {
            each(header, |level, kind, data| match (level, kind) {
                // One byte for IPv4, an int for IPv6 (ip(7), ipv6(7)).
                (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    beside.ecn = number(data) as u8 & 3;
                }
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    beside.segment = Some(number(data) as usize).filter(|len| *len > 0);
                }
                (libc::SOL_SOCKET, SO_RXQ_OVFL) => beside.overflowed = Some(number(data)),
                _ => {}
            });
        }
        beside
    }
}

/// Calls `f` with level, type and bytes of each control message.
///
/// # Safety
/// The same requirements as for [`Beside::read`].
pub(super) unsafe fn each(
    header: &libc::msghdr,
    mut f: impl FnMut(libc::c_int, libc::c_int, &[u8]),
) {
    // SAFETY: the macros stay within msg_controllen; a message that claims more than is left is cut to
    // that.
    unsafe {
        let end = header.msg_control.cast::<u8>().add(header.msg_controllen);
        let mut next = libc::CMSG_FIRSTHDR(header);
        while let Some(message) = next.as_ref() {
            let data = libc::CMSG_DATA(message);
            let left = end.offset_from(data).max(0) as usize;
            let len = message.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
            let data = std::slice::from_raw_parts(data, len.min(left));
            f(message.cmsg_level, message.cmsg_type, data);
            next = libc::CMSG_NXTHDR(header, message);
        }
    }
}

/// A number of one, two or four bytes in the machine's order; anything else is 0.
fn number(data: &[u8]) -> u32 {
    match *data {
        [byte] => u32::from(byte),
        [a, b] => u32::from(u16::from_ne_bytes([a, b])),
        [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]),
        _ => 0,
    }
}
