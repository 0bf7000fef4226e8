//! What a send hands to the kernel beside the packets: their destination and the headers of messages.

use super::control::Control;
use crate::sys::net::socket_addr_to_bytes;
use std::net::SocketAddr;

/// Most messages of one sendmmsg(2).
const MESSAGES: usize = 32;

/// A socket address as the kernel reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Destination {
    bytes: [u8; 28],
    pub(super) len: libc::socklen_t,
}

impl Destination {
    /// The destination of datagrams.
    pub(crate) fn new(address: &SocketAddr) -> Self {
        let (bytes, len) = socket_addr_to_bytes(address);
        Self { bytes, len: len as libc::socklen_t }
    }

    pub(super) fn as_ptr(&self) -> *const libc::c_void {
        self.bytes.as_ptr().cast()
    }
}

/// The messages of one sendmmsg(2). Not on the stack, because application threads may have little of it.
pub(super) struct Headers {
    pub(super) messages: [libc::mmsghdr; MESSAGES],
    pub(super) controls: [Control; MESSAGES],
}

impl Headers {
    pub(super) fn new() -> Box<Self> {
        let controls = [const { Control::new() }; MESSAGES];
        // SAFETY: all zeroes is a valid mmsghdr.
        Box::new(Self { messages: unsafe { std::mem::zeroed() }, controls })
    }
}

// SAFETY: the pointers in it are used only during a call.
unsafe impl Send for Headers {}
// SAFETY: the pointers in it are used only during a call.
unsafe impl Sync for Headers {}

impl std::fmt::Debug for Headers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Headers")
    }
}
