//! Unix sockets in the abstract namespace: they prove that the peer has the same kernel and user, and pass
//! descriptors. They need no file and disappear with their process.

use super::cancel::Shield;
use super::errno::{Errno, Result, check, check_len};
use super::event::wait_readable;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Most descriptors passed in one message.
pub(crate) const MAX_FDS: usize = 4;

/// Most connections that wait to be accepted.
pub(crate) const BACKLOG: usize = 4096;

/// The process at the other end of a socket, as told by the kernel (`SO_PEERCRED`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Credentials {
    /// Process id in *our* pid namespace; 0 if it is not visible there.
    pub(crate) pid: i32,
    /// User id.
    pub(crate) uid: u32,
}

/// The address of `name` in the abstract namespace (unix(7)). Errors: ENAMETOOLONG.
pub(super) fn abstract_address(name: &[u8]) -> Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all zeroes is a valid sockaddr_un.
    let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte stays 0: the abstract namespace.
    let room = addr.sun_path.iter_mut().skip(1);
    if name.len() > room.len() {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    for (to, from) in room.zip(name) {
        *to = *from as libc::c_char;
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((addr, len as libc::socklen_t))
}

fn seqpacket() -> Result<OwnedFd> {
    // SAFETY: returns a new descriptor or -1.
    let fd = check(unsafe {
        libc::socket(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        )
    })?;
    // SAFETY: `fd` is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes an abstract name without listening: other processes find it taken, and no listener. Errors:
/// EADDRINUSE when a socket already has the name.
pub(crate) fn reserve(name: &str) -> Result<OwnedFd> {
    let fd = seqpacket()?;
    let (addr, len) = abstract_address(name.as_bytes())?;
    // SAFETY: `addr` is a valid sockaddr_un of `len` bytes.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) })?;
    Ok(fd)
}

/// Listens under an abstract name. Errors: EADDRINUSE when a socket already has the name.
pub(crate) fn listen(name: &str) -> Result<OwnedFd> {
    let fd = reserve(name)?;
    // SAFETY: an owned, bound socket. The kernel caps the backlog at net.core.somaxconn.
    check(unsafe { libc::listen(fd.as_raw_fd(), BACKLOG as libc::c_int) })?;
    Ok(fd)
}

/// Connects without waiting. Errors: ECONNREFUSED without a listener, EAGAIN when the backlog is
/// full.
pub(crate) fn connect(name: &str) -> Result<OwnedFd> {
    let fd = seqpacket()?;
    let (addr, len) = abstract_address(name.as_bytes())?;
    let _shield = Shield::raise();
    // SAFETY: `addr` is a valid sockaddr_un of `len` bytes.
    check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const addr).cast(), len) })?;
    Ok(fd)
}

/// The next waiting connection, or `None`. Errors: EMFILE and the like.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
    let _shield = Shield::raise();
    // SAFETY: a live listening socket; no address is asked for.
    let rc = check(unsafe {
        libc::accept4(
            listener.as_raw_fd(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
        )
    });
    match rc {
        // SAFETY: `fd` is new and has no other owner.
        Ok(fd) => Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
        Err(e) if e.is_would_block() || e.0 == libc::EINTR || e.0 == libc::ECONNABORTED => Ok(None),
        Err(e) => Err(e),
    }
}

/// Tests, without a socket, whether accept4(2) is allowed. Errors: those of a system-call filter.
pub(crate) fn may_accept() -> Result<()> {
    // SAFETY: no descriptor and no addresses.
    match check(unsafe { libc::accept4(-1, std::ptr::null_mut(), std::ptr::null_mut(), 0) }) {
        Ok(_) | Err(Errno(libc::EBADF)) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Whether the other end is closed, even if there is still data to read.
pub(crate) fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one valid entry, and no wait.
    unsafe { libc::poll(&mut entry, 1, 0) };
    entry.revents & (libc::POLLHUP | libc::POLLERR) != 0
}

/// Whether the other end is closed, or its process has ended.
pub(crate) fn is_over(socket: BorrowedFd<'_>) -> bool {
    has_hung_up(socket) || peer_has_ended(socket)
}

/// Whether the process at the other end has ended, although a child that it forked keeps that end open: also a process of
/// another pid namespace. False where that is unknown: before Linux 6.5, or without a descriptor for the look.
pub(crate) fn peer_has_ended(socket: BorrowedFd<'_>) -> bool {
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `fd` has `len` bytes.
    let told = check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &mut len,
        )
    });
    match told {
        Ok(_) if fd >= 0 => {
            // SAFETY: a new descriptor, which has no other owner.
            let process = unsafe { OwnedFd::from_raw_fd(fd) };
            wait_readable(process.as_fd(), 0).unwrap_or(false)
        }
        // Reaped, before Linux 6.16.
        Err(Errno(libc::ESRCH | libc::EINVAL)) => true,
        Ok(_) | Err(_) => false,
    }
}

/// The process at the other end.
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> Result<Credentials> {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` has `len` bytes.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &mut len,
        )
    })?;
    Ok(Credentials { pid: cred.pid, uid: cred.uid })
}

/// Room for MAX_FDS descriptors in a control message, aligned as `cmsghdr` needs it.
#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

/// As [`send`], without descriptors, by another system call: a filter may refuse one of them.
fn send_bytes(socket: BorrowedFd<'_>, bytes: &[u8]) -> Result<()> {
    let _shield = Shield::raise();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the slice is live.
    let n = check_len(unsafe {
        libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags)
    })?;
    if n == bytes.len() { Ok(()) } else { Err(Errno(libc::EMSGSIZE)) }
}

#[cfg(test)]
thread_local! {
    /// For tests: as if the system refused this thread every message with a descriptor.
    pub(crate) static REFUSED: std::cell::Cell<Option<Errno>> = const { std::cell::Cell::new(None) };
}

/// Sends one message with descriptors; never raises SIGPIPE. Errors: EPIPE, EAGAIN; with descriptors ETOOMANYREFS.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    if fds.len() > MAX_FDS {
        return Err(Errno(libc::EINVAL));
    }
    #[cfg(test)]
    if let (Some(errno), false) = (REFUSED.get(), fds.is_empty()) {
        return Err(errno);
    }
    if fds.is_empty() {
        match send_bytes(socket, bytes) {
            Err(Errno(libc::EPERM | libc::EACCES | libc::ENOSYS)) => {}
            sent => return sent,
        }
    }
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = ControlBuffer([0; 64]);
    // SAFETY: all zeroes is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    if !fds.is_empty() {
        let data_len = size_of_val(fds) / size_of::<BorrowedFd<'_>>() * size_of::<libc::c_int>();
        msg.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE only computes.
        msg.msg_controllen = unsafe { libc::CMSG_SPACE(data_len as u32) } as usize;
        // SAFETY: the control buffer has room for one header and MAX_FDS descriptors
        // (CMSG_SPACE(16) = 32 <= 64 bytes), so CMSG_FIRSTHDR is not null.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&msg);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(data_len as u32) as usize;
            let mut to = libc::CMSG_DATA(header).cast::<libc::c_int>();
            for fd in fds {
                to.write_unaligned(fd.as_raw_fd());
                to = to.add(1);
            }
        }
    }
    let _shield = Shield::raise();
    // SAFETY: `msg` refers to live locals only.
    let n = check_len(unsafe {
        libc::sendmsg(socket.as_raw_fd(), &msg, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    })?;
    if n == bytes.len() { Ok(()) } else { Err(Errno(libc::EMSGSIZE)) }
}

/// The result of [`receive`].
pub(crate) enum Received {
    /// No message yet.
    Nothing,
    /// The other end is closed.
    Closed,
    Message(Message),
}

/// One received message.
#[derive(Debug)]
pub(crate) struct Message {
    /// Bytes.
    pub(crate) len: usize,
    /// Descriptors, in order.
    pub(crate) fds: Vec<OwnedFd>,
    /// More descriptors were sent than this process could receive (MSG_CTRUNC).
    pub(crate) cut: bool,
}

/// Receives one message into `bytes`, with its descriptors. A message longer than `bytes` is cut.
pub(crate) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Received {
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = ControlBuffer([0; 64]);
    // SAFETY: all zeroes is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.0.as_mut_ptr().cast();
    msg.msg_controllen = control.0.len();
    let _shield = Shield::raise();
    let mut take = || {
        // SAFETY: `msg` refers to live locals only.
        check_len(unsafe {
            libc::recvmsg(socket.as_raw_fd(), &mut msg, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC)
        })
    };
    // The other end has closed before it read all that was sent: the kernel says so once, before what the other end
    // had sent.
    let rc = match take() {
        Err(Errno(libc::ECONNRESET)) => take(),
        taken => taken,
    };
    let n = match rc {
        Ok(n) => n,
        // A message for which there is no memory now is received later.
        Err(e) if e.is_would_block() || e.is_shortage() || e.0 == libc::EINTR => {
            return Received::Nothing;
        }
        Err(_) => return Received::Closed,
    };
    let mut fds = Vec::new();
    // SAFETY: the kernel filled `msg` and the control buffer; the CMSG macros stay inside it. Each
    // descriptor found is new and has no other owner.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&msg);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let len = (*header).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let from = libc::CMSG_DATA(header).cast::<libc::c_int>();
                for i in 0..len / size_of::<libc::c_int>() {
                    fds.push(OwnedFd::from_raw_fd(from.add(i).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&msg, header);
        }
    }
    let cut = msg.msg_flags & libc::MSG_CTRUNC != 0;
    if n == 0 && fds.is_empty() && !cut {
        return Received::Closed;
    }
    Received::Message(Message { len: n, fds, cut })
}

#[cfg(test)]
mod tests {
    use super::super::event::Doorbell;
    use super::*;

    #[test]
    fn the_last_message_of_an_end_that_closed_with_some_unread_is_received() {
        let name = format!("udrv-test-{}-unread", super::super::process::pid());
        let listener = listen(&name).unwrap();
        let client = connect(&name).unwrap();
        let server = accept(listener.as_fd()).unwrap().unwrap();
        send(client.as_fd(), b"unread", &[]).unwrap();
        send(server.as_fd(), b"last", &[]).unwrap();
        drop(server);
        let mut bytes = [0; 16];
        let received = receive(client.as_fd(), &mut bytes);
        assert!(matches!(received, Received::Message(Message { len: 4, .. })));
        assert!(bytes.starts_with(b"last"));
        assert!(matches!(receive(client.as_fd(), &mut bytes), Received::Closed));
    }

    #[test]
    fn a_descriptor_travels() {
        let name = format!("udrv-test-{}-doorbell", super::super::process::pid());
        let listener = listen(&name).unwrap();
        assert_eq!(listen(&name).unwrap_err(), Errno(libc::EADDRINUSE));
        let client = connect(&name).unwrap();
        let bell = Doorbell::new().unwrap();
        send(client.as_fd(), b"hello", &[bell.fd()]).unwrap();
        let server = accept(listener.as_fd()).unwrap().unwrap();
        assert_eq!(credentials(server.as_fd()).unwrap().pid, super::super::process::pid());
        let mut bytes = [0; 16];
        let Received::Message(Message { len: 5, fds, cut: false }) =
            receive(server.as_fd(), &mut bytes)
        else {
            panic!("no message")
        };
        assert_eq!(fds.len(), 1);
        assert!(!wait_readable(fds[0].as_fd(), 0).unwrap());
        bell.ring();
        assert!(wait_readable(fds[0].as_fd(), 0).unwrap());
        assert!(!has_hung_up(server.as_fd()));
        drop(client);
        assert!(has_hung_up(server.as_fd()));
        assert!(matches!(receive(server.as_fd(), &mut bytes), Received::Closed));
    }

    #[test]
    fn a_process_has_ended_although_a_child_that_it_forked_keeps_its_socket() {
        let name = format!("udrv-test-{}-orphan", super::super::process::pid());
        let listener = listen(&name).unwrap();
        let (address, len) = abstract_address(name.as_bytes()).unwrap();
        // SAFETY: the child and its child only make system calls on live locals, and end.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                // Those of other tests, which would not hang up.
                libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
                libc::alarm(30);
                let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0);
                if libc::connect(socket, (&raw const address).cast(), len) != 0 {
                    libc::_exit(1);
                }
                if libc::fork() == 0 {
                    libc::alarm(30);
                    let pid = libc::getpid();
                    libc::send(socket, (&raw const pid).cast(), size_of_val(&pid), 0);
                }
                libc::pause();
                libc::_exit(0);
            }
            child
        };
        assert_eq!(wait_readable(listener.as_fd(), 20_000), Ok(true));
        let server = accept(listener.as_fd()).unwrap().unwrap();
        let mut grandchild = [0; size_of::<libc::pid_t>()];
        assert_eq!(wait_readable(server.as_fd(), 20_000), Ok(true));
        assert!(matches!(receive(server.as_fd(), &mut grandchild), Received::Message(_)));
        assert!(!peer_has_ended(server.as_fd()));
        let end = |pid, reap: bool| {
            // SAFETY: processes made above; the first is a child of this one.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                if reap {
                    libc::waitpid(pid, std::ptr::null_mut(), 0);
                }
            }
        };
        end(child, true);
        let ended = peer_has_ended(server.as_fd());
        assert!(!has_hung_up(server.as_fd()), "the other one has the socket");
        end(libc::pid_t::from_ne_bytes(grandchild), false);
        if super::super::process::kernel_is_at_least(6, 5) {
            assert!(ended);
        }
    }

    #[test]
    fn nobody_listens() {
        assert_eq!(connect("udrv-test-nobody").unwrap_err(), Errno(libc::ECONNREFUSED));
    }
}
