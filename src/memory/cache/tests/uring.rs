//! A device that really pins: the registered buffers of io_uring. The kernel reads and writes the pages that were
//! mapped at registration, whatever is mapped there later, as an RDMA device does. It counts them against
//! RLIMIT_MEMLOCK.

use super::device::Device;
use crate::memory::cache::{Access, Registrar, Span};
use crate::sys::Errno;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::with_exposed_provenance_mut as at;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

const BUFFERS: u32 = 4096;
const OFF_SQES: i64 = 0x1000_0000;
const REGISTER_BUFFERS2: u32 = 15;
const REGISTER_BUFFERS_UPDATE: u32 = 16;
const SPARSE: u32 = 1;
const ENTER_GETEVENTS: u32 = 1;
const READ_FIXED: u8 = 4;
const WRITE_FIXED: u8 = 5;

/// `struct io_uring_params`, in words: sq_off begins at 10, cq_off at 20.
type Parameters = [u32; 30];

#[repr(C)]
#[derive(Default)]
struct Entry {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    addr: u64,
    len: u32,
    rw_flags: u32,
    user_data: u64,
    buffer: u16,
    rest: [u16; 11],
}

#[derive(Clone)]
pub(super) struct Ring(Arc<Inner>);

struct Inner {
    fd: OwnedFd,
    rings: usize,
    entries: usize,
    parameters: Parameters,
    /// Free buffers; locked for one operation at a time.
    state: Mutex<Vec<u16>>,
    file: File,
}

pub(super) struct Buffer {
    pub(super) span: Span,
    index: u16,
    ring: Arc<Inner>,
}

impl Ring {
    /// `None`: io_uring is forbidden or too old (before 5.19).
    pub(super) fn new() -> Option<Self> {
        let mut parameters: Parameters = [0; 30];
        // SAFETY: the argument is what io_uring_setup takes.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        if fd < 0 {
            return None;
        }
        // SAFETY: `fd` is new.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        // Since 5.4 both rings are in one mapping; one or two pages are more than one entry needs.
        let map = |offset| {
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping at an address that the kernel chooses.
            let got = unsafe {
                libc::mmap(std::ptr::null_mut(), 4096, rw, flags, fd.as_raw_fd(), offset)
            };
            (got != libc::MAP_FAILED).then(|| got.expose_provenance())
        };
        let (rings, entries) = (map(0)?, map(OFF_SQES)?);
        let sparse: [u64; 4] = [u64::from(BUFFERS) | u64::from(SPARSE) << 32, 0, 0, 0];
        register(&fd, REGISTER_BUFFERS2, sparse.as_ptr().cast(), 32).ok()?;
        Some(Self(Arc::new(Inner {
            fd,
            rings,
            entries,
            parameters,
            state: Mutex::new((0..BUFFERS as u16).rev().collect()),
            file: super::memory::file(4096),
        })))
    }
}

fn register(fd: &OwnedFd, code: u32, what: *const u8, n: u32) -> Result<(), Errno> {
    // SAFETY: callers pass the arguments that `code` requires.
    let rc = unsafe { libc::syscall(libc::SYS_io_uring_register, fd.as_raw_fd(), code, what, n) };
    if rc < 0 { Err(Errno::last()) } else { Ok(()) }
}

impl Inner {
    /// `struct io_uring_rsrc_update2` with one buffer.
    fn set(&self, index: u16, addr: usize, len: usize) -> Result<(), Errno> {
        let buffer = [addr, len];
        let update: [u64; 4] = [u64::from(index), buffer.as_ptr() as u64, 0, 1];
        register(&self.fd, REGISTER_BUFFERS_UPDATE, update.as_ptr().cast(), 32)
    }

    /// Moves one word between the file and the pages of a buffer.
    fn transfer(&self, opcode: u8, buffer: &Buffer, addr: usize) {
        assert!(buffer.span.covers(Span { start: addr, end: addr + 8 }));
        let word = |index: usize| {
            let offset = self.parameters[index] as usize;
            // SAFETY: a word of the rings, which are mapped as long as `self` lives.
            unsafe { &*at::<AtomicU32>(self.rings + offset) }
        };
        let (head, tail, mask) = (word(20), word(11), self.parameters[12] as usize);
        let entry = Entry {
            opcode,
            fd: self.file.as_raw_fd(),
            addr: addr as u64,
            len: 8,
            buffer: buffer.index,
            ..Entry::default()
        };
        // SAFETY: the only entry of the queue, which is empty; sizes as the kernel gave them.
        unsafe {
            at::<Entry>(self.entries).write(entry);
            at::<u32>(self.rings + self.parameters[16] as usize).write(0); // sq_off.array
            debug_assert_eq!(at::<u32>(self.rings + mask).read(), 0);
        }
        tail.store(tail.load(Ordering::Relaxed) + 1, Ordering::Release);
        let fd = self.fd.as_raw_fd();
        // SAFETY: one entry to submit, one to wait for.
        let rc = unsafe {
            let null = std::ptr::null::<u8>();
            libc::syscall(libc::SYS_io_uring_enter, fd, 1, 1, ENTER_GETEVENTS, null, 0)
        };
        assert_eq!(rc, 1, "{}", Errno::last());
        // Completions: user_data, result, flags. There are two slots, used in turn.
        let (at_head, slots) = (head.load(Ordering::Relaxed), self.parameters[1]);
        let place = (at_head % slots) as usize * 16 + self.parameters[25] as usize; // cq_off.cqes
        // SAFETY: a completion that has been waited for.
        let result = unsafe { at::<i32>(self.rings + place + 8).read_volatile() };
        head.store(at_head + 1, Ordering::Release);
        assert_eq!(result, 8, "{}", Errno(-result));
    }
}

impl Registrar for Ring {
    type Handle = Buffer;

    fn register(&self, addr: usize, len: usize, _: Access) -> Result<Buffer, Errno> {
        let index = self.0.state.lock().unwrap().pop().ok_or(Errno(libc::ENOMEM))?;
        let set = self.0.set(index, addr, len);
        if set.is_err() {
            self.0.state.lock().unwrap().push(index);
        }
        set.map(|()| Buffer {
            span: Span { start: addr, end: addr + len },
            index,
            ring: self.0.clone(),
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.ring.set(self.index, 0, 0).unwrap();
        self.ring.state.lock().unwrap().push(self.index);
    }
}

impl Device for Ring {
    fn word(&self, buffer: &Buffer, addr: usize) -> u64 {
        let _held = self.0.state.lock().unwrap();
        self.0.transfer(WRITE_FIXED, buffer, addr);
        let mut word = [0; 8];
        self.0.file.read_exact_at(&mut word, 0).unwrap();
        u64::from_ne_bytes(word)
    }

    const LIVE: bool = true;

    fn receive(&self, buffer: &Buffer, addr: usize, value: u64) {
        let _held = self.0.state.lock().unwrap();
        self.0.file.write_all_at(&value.to_ne_bytes(), 0).unwrap();
        self.0.transfer(READ_FIXED, buffer, addr);
    }
}

#[test]
fn it_shows_pages_that_are_mapped_no_longer() {
    let Some(ring) = Ring::new() else { return eprintln!("skipped: no io_uring") };
    let addr = super::memory::map(8192);
    super::memory::fill(addr, 8192, 1);
    let buffer = ring.register(addr, 8192, Access::READ).unwrap();
    super::memory::fill(addr, 8192, 2);
    assert_eq!(ring.word(&buffer, addr + 4096), 2, "live");
    ring.receive(&buffer, addr + 4096, 3);
    assert_eq!(super::memory::word(addr + 4096), 3);
    super::memory::map_over(addr, 8192);
    super::memory::fill(addr, 8192, 4);
    assert_eq!(ring.word(&buffer, addr + 4096), 3, "pinned");
}
