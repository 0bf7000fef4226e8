//! userfaultfd(2), used only for its events: a thread that unmaps, discards or moves watched pages waits until the
//! event has been read. Ranges are registered for write protection, and nothing is ever protected, so that no
//! access to them faults. ioctl_userfaultfd(2) documents the requests below, whose numbers differ between
//! processors.

mod proof;

use super::cancel::Shield;
use super::errno::{Errno, Result, check, check_len};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

const USER_MODE_ONLY: libc::c_int = 1;
/// UFFDIO.
const LETTER: u32 = 0xaa;
/// USERFAULTFD_IOC_NEW: a new descriptor from /dev/userfaultfd.
const NEW: libc::Ioctl = libc::_IO(LETTER, 0);
const API: libc::Ioctl = libc::_IOWR::<Handshake>(LETTER, 0x3f);
const REGISTER: libc::Ioctl = libc::_IOWR::<Register>(LETTER, 0);
const UNREGISTER: libc::Ioctl = libc::_IOR::<Range>(LETTER, 1);
const WRITEPROTECT: libc::Ioctl = libc::_IOWR::<WriteProtect>(LETTER, 6);

#[cfg(target_arch = "x86_64")]
const _: () = {
    assert!(NEW == 0xaa00 && API == 0xc018_aa3f && REGISTER == 0xc020_aa00);
    assert!(UNREGISTER == 0x8010_aa01 && WRITEPROTECT == 0xc018_aa06);
};

const API_VERSION: u64 = 0xaa;
const EVENT_REMAP: u64 = 1 << 2;
const EVENT_REMOVE: u64 = 1 << 3;
const EVENT_UNMAP: u64 = 1 << 6;
/// The features that a registration cache needs. Not EVENT_FORK: a child does not use our registrations, and
/// since Linux 5.12 the parent keeps the pages that a device has pinned.
const FEATURES: u64 = EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP;
const MODE_WP: u64 = 1 << 1;

#[repr(C)]
#[derive(Default)]
struct Handshake {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `struct uffd_msg`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

/// An event reported by the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// These addresses are no longer mapped, or already mapped to something else.
    Unmapped { start: usize, end: usize },
    /// The pages of these addresses are about to be discarded (madvise).
    Discarded { start: usize, end: usize },
    /// The pages have moved (mremap). The new addresses are watched like the old ones.
    Moved { from: usize, to: usize, len: usize },
    /// A thread waits for a page: such events are never requested here.
    Fault { address: usize },
    /// An event that was not requested.
    Other(u8),
}

impl From<Message> for Event {
    fn from(message: Message) -> Self {
        let [a, b, c] = message.arguments.map(|value| value as usize);
        match message.event {
            0x12 => Self::Fault { address: b },
            0x14 => Self::Moved { from: a, to: b, len: c },
            0x15 => Self::Discarded { start: a, end: b },
            0x16 => Self::Unmapped { start: a, end: b },
            other => Self::Other(other),
        }
    }
}

/// Most descriptors of a process at a time.
const SLOTS: usize = 16;
/// The open descriptors. A forked child closes its copies at once: while a copy is open and is not read,
/// the parent would wait for ever to unmap registered memory.
static OPEN: [AtomicI32; SLOTS] = [const { AtomicI32::new(-1) }; SLOTS];

/// Runs in every forked child (pthread_atfork), so it may only do what a signal handler may.
extern "C" fn close_in_child() {
    for slot in &OPEN {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: the slot owned this copy of the descriptor.
            unsafe { libc::close(fd) };
        }
    }
}

/// A userfaultfd that reports unmapped, discarded and moved pages of registered ranges.
#[derive(Debug)]
pub(crate) struct Userfaultfd {
    fd: RawFd,
    slot: &'static AtomicI32,
}

impl Userfaultfd {
    /// A descriptor that has not been tested. Errors: as [`Userfaultfd::open`].
    fn unproven() -> Result<Self> {
        let fd = new_descriptor()?;
        let mut handshake = Handshake { api: API_VERSION, features: FEATURES, ioctls: 0 };
        // SAFETY: the argument is what UFFDIO_API takes.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), API, &raw mut handshake) })?;
        if handshake.features & FEATURES != FEATURES {
            return Err(Errno(libc::EINVAL));
        }
        static CHILDREN_CLOSE: Once = Once::new();
        // SAFETY: the handler is a function of this library, which is never unloaded (build.rs).
        CHILDREN_CLOSE.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(close_in_child));
        });
        let number = fd.as_raw_fd();
        let free = |slot: &&AtomicI32| {
            slot.compare_exchange(-1, number, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let slot = OPEN.iter().find(free).ok_or(Errno(libc::EMFILE))?;
        std::mem::forget(fd); // the slot owns it now
        Ok(Self { fd: number, slot })
    }

    /// Watches whole pages. Errors: EBUSY (another userfaultfd watches them), EINVAL (a file, nothing
    /// mapped, or an unable kernel), EPERM (a sealed or foreign mapping), ENOMEM.
    pub(crate) fn register(&self, start: usize, end: usize) -> Result<()> {
        let range = Range { start: start as u64, len: end.saturating_sub(start) as u64 };
        let mut register = Register { range, mode: MODE_WP, ioctls: 0 };
        // SAFETY: the argument is what UFFDIO_REGISTER takes; the kernel checks the range.
        check(unsafe { libc::ioctl(self.fd, REGISTER, &raw mut register) }).map(|_| ())
    }

    /// Stops watching them. Errors: EINVAL (not mapped, or memory that cannot be watched).
    pub(crate) fn unregister(&self, start: usize, end: usize) -> Result<()> {
        let mut range = Range { start: start as u64, len: end.saturating_sub(start) as u64 };
        // SAFETY: the argument is what UFFDIO_UNREGISTER takes; the kernel checks the range.
        check(unsafe { libc::ioctl(self.fd, UNREGISTER, &raw mut range) }).map(|_| ())
    }

    /// True while any thread is between the beginning of a change to watched pages and its return from
    /// waiting for the reader. All requests that would change pages fail with EAGAIN then, before the kernel
    /// checks their range, which is empty here (EINVAL). Any other answer counts as true. One system
    /// call.
    pub(crate) fn is_changing(&self) -> bool {
        let mut nothing = WriteProtect { range: Range { start: 0, len: 0 }, mode: 0 };
        // SAFETY: the argument is what UFFDIO_WRITEPROTECT takes; an empty range changes nothing.
        let rc = unsafe { libc::ioctl(self.fd, WRITEPROTECT, &raw mut nothing) };
        rc == 0 || Errno::last().0 != libc::EINVAL
    }

    /// Reads up to `events.len()` events without waiting; returns how many. The threads that caused them
    /// continue as soon as this returns. Errors: EAGAIN when there are none.
    pub(crate) fn read(&self, events: &mut [Event]) -> Result<usize> {
        const BATCH: usize = 16;
        let _shield = Shield::raise();
        let mut messages = [Message::default(); BATCH];
        let want = events.len().min(BATCH) * size_of::<Message>();
        // SAFETY: `messages` has room for `want` bytes, and any bytes make messages.
        let got = unsafe { libc::read(self.fd, messages.as_mut_ptr().cast(), want) };
        let n = check_len(got)? / size_of::<Message>();
        for (event, message) in events.iter_mut().zip(messages.iter().take(n)) {
            *event = Event::from(*message);
        }
        Ok(n)
    }

    /// Readable when there are events.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as `self` lives: the slot closes it on drop, or in a child, where no code
        // uses it any more.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl Drop for Userfaultfd {
    /// Stops all watching; threads that wait for the reader continue.
    fn drop(&mut self) {
        if self.slot.swap(-1, Ordering::Relaxed) == self.fd {
            // SAFETY: the slot owned the descriptor, and gave it up here.
            unsafe { libc::close(self.fd) };
        }
    }
}

fn new_descriptor() -> Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: takes an integer, returns a new descriptor or -1.
    let by_call = |flags: libc::c_int| unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let mut fd = by_call(flags | USER_MODE_ONLY);
    if fd < 0 {
        let refused = Errno::last();
        let device = std::fs::File::open("/dev/userfaultfd");
        fd = match &device {
            // SAFETY: the argument of USERFAULTFD_IOC_NEW is an integer.
            Ok(device) => unsafe {
                libc::ioctl(device.as_raw_fd(), NEW, flags | USER_MODE_ONLY).into()
            },
            Err(_) => -1,
        };
        // Kernels before 5.11 lack the flag, and allow every process.
        if fd < 0 && refused.0 == libc::EINVAL {
            fd = by_call(flags);
        }
        if fd < 0 {
            return Err(refused);
        }
    }
    // SAFETY: `fd` is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_proves_itself_again_and_again() {
        if new_descriptor().is_err() || super::super::valgrind::runs_us() {
            return eprintln!("skipped: no userfaultfd");
        }
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..50).for_each(|_| drop(Userfaultfd::open().unwrap())));
            }
        });
    }

    /// scripts/memcheck runs this under valgrind too.
    #[test]
    fn unmapping_under_valgrind_waits_for_nobody() {
        if !super::super::valgrind::runs_us() {
            return eprintln!("skipped: not under valgrind");
        }
        assert_eq!(Userfaultfd::open().map(|_| ()), Err(Errno(libc::EDEADLK)));
    }

    #[test]
    fn addresses_without_memory_are_refused() {
        let Ok(watcher) = Userfaultfd::open() else { return eprintln!("skipped: no userfaultfd") };
        assert_eq!(watcher.register(0, 4096), Err(Errno(libc::EINVAL)));
        assert_eq!(watcher.register(4096, 4096), Err(Errno(libc::EINVAL)));
        assert_eq!(watcher.read(&mut [Event::Other(0)]), Err(Errno(libc::EAGAIN)));
        assert!(!watcher.is_changing());
    }
}
