//! Sending: one datagram by the cheapest system call, several by as few calls as possible.

use super::headers::{Destination, Headers};
use super::{UdpPort, is_no_room};
use crate::sys::cancel::Shield;
use crate::sys::errno::{Errno, Result, check, check_len};
use std::io::IoSlice;
use std::os::fd::AsRawFd;

/// Most datagrams that one message may be split into: UDP_MAX_SEGMENTS of the kernels since 4.18.
const SEGMENTS: usize = 64;
/// Most bytes of one message: a little less than an IP packet holds.
const MESSAGE_BYTES: usize = 65_000;
/// How often a send is retried after the error of an earlier datagram.
const RETRIES: usize = 3;

impl UdpPort {
    /// Sends `packets` to one destination. All but the last have the same length, none is empty and the
    /// last is not longer. Returns how many were accepted, in order. Fewer than given: there is no room, or
    /// the next one is refused, which another call reports. Errors, of the first packet: EMSGSIZE for
    /// one longer than the interface's MTU, EPERM of a packet filter, ENETUNREACH.
    pub(crate) fn send_batch(
        &mut self,
        to: &Destination,
        packets: &[IoSlice<'_>],
    ) -> Result<usize> {
        let split = packets.len() > 1 && self.splitting.for_batch();
        let taken = match packets {
            [] => return Ok(0),
            [packet] => self.retried(|port| port.send_one(to, packet)),
            _ => self.retried(|port| port.send_messages(to, packets, split)),
        };
        let refused = match taken {
            Ok(n) => {
                if split {
                    self.splitting.on_split();
                }
                return Ok(n);
            }
            Err(e) if is_no_room(e) => return self.no_room(e),
            Err(e) if !split => return Err(e),
            Err(e) => e,
        };
        // A message of several datagrams was refused, perhaps for being split.
        let plain = self.retried(|port| port.send_messages(to, packets, false));
        if plain.is_ok() && matches!(refused.0, libc::EIO | libc::EINVAL) {
            self.splitting.on_refused();
        }
        plain.or_else(|e| if is_no_room(e) { self.no_room(e) } else { Err(e) })
    }

    #[cold]
    pub(super) fn no_room(&mut self, errno: Errno) -> Result<usize> {
        self.lacks_buffers = errno.0 == libc::ENOBUFS;
        Ok(0)
    }

    /// Calls `send`, and again after an error of an earlier datagram: an ICMP message makes the next call
    /// fail, once, whatever it sends (udp(7)). The message itself stays in the error queue.
    fn retried(&mut self, mut send: impl FnMut(&mut Self) -> Result<usize>) -> Result<usize> {
        let mut result = send(self);
        for _ in 0..RETRIES {
            match result {
                Err(e) if !is_no_room(e) => self.errors_pending = true,
                _ => break,
            }
            result = send(self);
        }
        result
    }

    #[inline]
    fn send_one(&self, to: &Destination, packet: &[u8]) -> Result<usize> {
        let fd = self.socket.as_raw_fd();
        // sendto(2) takes 65 ns less than sendmsg(2). Not libc's, which is a cancellation point and takes
        // 30 ns more in a process with threads.
        // SAFETY: `packet` and `to` are readable for their lengths.
        let rc = unsafe {
            let (packet, len) = (packet.as_ptr(), packet.len());
            libc::syscall(libc::SYS_sendto, fd, packet, len, 0, to.as_ptr(), to.len)
        };
        check_len(rc as isize)?;
        Ok(1)
    }

    /// One system call for as many of `packets` as it can take.
    fn send_messages(
        &mut self,
        to: &Destination,
        packets: &[IoSlice<'_>],
        gso: bool,
    ) -> Result<usize> {
        let Headers { messages, controls } = &mut *self.headers;
        // SAFETY: all zeroes is a valid mmsghdr: no name, no buffers, no control messages.
        *messages = unsafe { std::mem::zeroed() };
        let mut rest = packets;
        let mut n = 0;
        for (message, control) in messages.iter_mut().zip(controls) {
            let (now, later) = rest.split_at(if gso { run(rest) } else { rest.len().min(1) });
            let Some(first) = now.first() else { break };
            let header = &mut message.msg_hdr;
            header.msg_name = to.as_ptr().cast_mut();
            header.msg_namelen = to.len;
            // IoSlice has the layout of iovec on Unix; the kernel does not write through it.
            header.msg_iov = now.as_ptr().cast_mut().cast();
            header.msg_iovlen = now.len() as _;
            if now.len() > 1 {
                control.put_segment(header, first.len() as u16);
            }
            rest = later;
            n += 1;
        }
        let fd = self.socket.as_raw_fd();
        if let (1, [only, ..]) = (n, &*messages) {
            let _shield = Shield::raise();
            // SAFETY: the header points to live slices, a live address and a live control message.
            check_len(unsafe { libc::sendmsg(fd, &only.msg_hdr, 0) })?;
            return Ok(packets.len() - rest.len());
        }
        let _shield = Shield::raise();
        // SAFETY: the first `n` headers point to live slices, a live address and live control messages.
        let sent = check(unsafe { libc::sendmmsg(fd, messages.as_mut_ptr(), n as _, 0) })?;
        Ok(messages.iter().take(sent as usize).map(|m| m.msg_hdr.msg_iovlen).sum())
    }
}

/// How many of `packets` form one message that the kernel can split: all as long as the first, except
/// the last, which may be shorter.
fn run(packets: &[IoSlice<'_>]) -> usize {
    let Some(segment) = packets.first().map(|packet| packet.len()) else { return 0 };
    let most = (MESSAGE_BYTES / segment.max(1)).clamp(1, SEGMENTS);
    let equal = packets.iter().take(most).take_while(|packet| packet.len() == segment).count();
    let ends = packets.get(equal).is_some_and(|packet| (1..segment).contains(&packet.len()));
    equal + usize::from(ends && equal < most)
}

#[cfg(test)]
mod tests {
    use super::run;
    use std::io::IoSlice;

    fn run_of(lengths: &[usize]) -> usize {
        let bytes = vec![0u8; 65_507];
        let packets: Vec<IoSlice<'_>> =
            lengths.iter().map(|len| IoSlice::new(&bytes[..*len])).collect();
        run(&packets)
    }

    #[test]
    fn runs_are_what_the_kernel_can_cut() {
        assert_eq!(run_of(&[]), 0);
        assert_eq!(run_of(&[9]), 1);
        assert_eq!(run_of(&[9, 9, 9]), 3);
        assert_eq!(run_of(&[9, 9, 4, 9]), 3);
        assert_eq!(run_of(&[9, 10]), 1);
        assert_eq!(run_of(&[9, 0]), 1);
        assert_eq!(run_of(&[65_507, 65_507]), 1);
        assert_eq!(run_of(&[32_500, 32_500, 1]), 2);
        assert_eq!(run_of(&[8; 100]), 64);
        assert_eq!(run_of(&[1472; 100]), 44);
    }
}
