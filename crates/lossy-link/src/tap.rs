//! TAP devices in network namespaces, and waiting for their frames.
//!
//! # Safety
//!
//! The only module with `unsafe`: each function makes one or two system calls, owns its descriptors,
//! and takes lengths from slices.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// `TUNSETIFF` of `<linux/if_tun.h>`: `_IOW('T', 202, int)`.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;

/// A TAP device. Frames that its host sends are read here; frames written here reach the host. Without
/// `IFF_VNET_HDR` the kernel segments and checksums every frame before it comes here.
pub(crate) struct Tap {
    fd: OwnedFd,
}

impl Tap {
    /// Creates the device `name` in the network namespace of the file `namespace`. The thread stays in that
    /// namespace.
    ///
    /// # Errors
    /// The error of the system call. It needs the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN.
    pub(crate) fn create(namespace: &Path, name: &str) -> io::Result<Self> {
        let namespace = File::open(namespace)?;
        // SAFETY: setns(2) takes a descriptor, which is open.
        check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) })?;
        let flags = libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC;
        // SAFETY: the path ends in a NUL.
        let fd = check(unsafe { libc::open(c"/dev/net/tun".as_ptr(), flags) })?;
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: ifreq is plain data, for which all zeroes are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // The last byte stays NUL.
        let room = libc::IFNAMSIZ - 1;
        for (to, from) in request.ifr_name.iter_mut().take(room).zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
        // SAFETY: TUNSETIFF reads and writes one ifreq.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
        Ok(Self { fd })
    }

    /// The next frame that the host sent; `None` if there is none.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn read<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a mut [u8]>> {
        // SAFETY: read(2) writes at most the length of the slice.
        let n = unsafe { libc::read(self.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
        match usize::try_from(n) {
            Ok(n) => Ok(buffer.get_mut(..n)),
            Err(_) => match io::Error::last_os_error() {
                // EIO: the device is down.
                e if e.kind() == io::ErrorKind::WouldBlock
                    || e.raw_os_error() == Some(libc::EIO) =>
                {
                    Ok(None)
                }
                e if e.kind() == io::ErrorKind::Interrupted => Ok(None),
                e => Err(e),
            },
        }
    }

    /// Hands a frame to the host. False if its device refused it.
    pub(crate) fn write(&self, frame: &[u8]) -> bool {
        // SAFETY: write(2) reads at most the length of the slice.
        unsafe { libc::write(self.as_raw_fd(), frame.as_ptr().cast(), frame.len()) >= 0 }
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Waits until a descriptor can be read, at most `timeout_ns` (`None`: without a limit), and sets `ready` to
/// which ones can. A signal ends the wait early.
pub(crate) fn wait(fds: &[Option<RawFd>], timeout_ns: Option<u64>, ready: &mut Vec<bool>) {
    let mut polled: Vec<libc::pollfd> = fds
        .iter()
        // ppoll(2) ignores a negative descriptor.
        .map(|fd| libc::pollfd { fd: fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 })
        .collect();
    let timeout = timeout_ns.map(|ns| libc::timespec {
        tv_sec: (ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (ns % 1_000_000_000) as libc::c_long,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let count = polled.len() as libc::nfds_t;
    // SAFETY: there are `count` pollfds; the time, if any, lives until the call is over.
    unsafe { libc::ppoll(polled.as_mut_ptr(), count, timeout, std::ptr::null()) };
    ready.clear();
    ready.extend(polled.iter().map(|fd| fd.revents != 0));
}

static ENDED: AtomicBool = AtomicBool::new(false);

/// Lets SIGTERM and SIGINT set [`ended`], and timers fire when they are due, not some 50 µs later.
pub(crate) fn prepare() {
    extern "C" fn end(_: libc::c_int) {
        ENDED.store(true, Ordering::Relaxed);
    }
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler stores to an atomic, which is safe in a signal handler. Without
        // SA_RESTART (signal(2) would set it) ppoll(2) returns.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = end as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
    // SAFETY: this changes the timer slack of this thread and nothing else.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
}

/// Whether a signal has asked the program to end.
pub(crate) fn ended() -> bool {
    ENDED.load(Ordering::Relaxed)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
