//! System calls: memory that the processor cannot touch, and copies of it.

use std::ffi::CStr;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// The size of a page, bytes; also of the words behind the bytes of an allocation.
pub(crate) const PAGE: usize = 4096;
/// Device memory begins at multiples of this, as the driver's does.
const BLOCK: usize = 2 << 20;

/// Bytes that are mapped twice: where the program has their address, and where the double copies. Behind the bytes is a
/// page of words that all processes share that have them mapped.
#[derive(Debug)]
pub(crate) struct Mapping {
    fd: OwnedFd,
    /// Where the program sees it.
    pub(crate) base: usize,
    /// Where the double reads and writes it.
    shadow: usize,
    /// Length of the mapping of the program, bytes: whole pages.
    len: usize,
    /// The addresses stay reserved when it ends.
    reserved: bool,
}

/// Words behind the bytes.
pub(crate) const WORD_ID: usize = 0;
pub(crate) const WORD_FREED: usize = 1;
const WORDS: usize = 2;

fn pages(len: usize) -> usize {
    len.next_multiple_of(PAGE).max(PAGE)
}

impl Mapping {
    /// New bytes, zeroed, if possible at the address `at`. The processor may touch them if `touchable`.
    pub(crate) fn create(len: usize, at: usize, touchable: bool) -> Option<Self> {
        Self::map(file(len)?, pages(len), at, touchable)
    }

    /// The bytes of a [`file`] at an address of a reservation.
    pub(crate) fn within(file: &OwnedFd, len: usize, at: usize) -> Option<Self> {
        let fd = file.try_clone().ok()?;
        let all = libc::PROT_READ | libc::PROT_WRITE;
        let shadow = map(0, len + PAGE, all, libc::MAP_SHARED, Some(&fd))?;
        let exact = libc::MAP_SHARED | libc::MAP_FIXED;
        map(at, len, libc::PROT_NONE, exact, Some(&fd))?;
        Some(Self { fd, base: at, shadow, len, reserved: true })
    }

    /// The bytes behind descriptor `fd` of process `pid`, if possible at the address `at`.
    pub(crate) fn open(pid: u32, fd: i32, len: usize, at: usize) -> Option<Self> {
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
        let len = pages(len);
        let file = OwnedFd::from(file);
        (len_of(&file)? == len).then_some(())?;
        Self::map(file, len, at, false)
    }

    fn map(fd: OwnedFd, len: usize, at: usize, touchable: bool) -> Option<Self> {
        let all = libc::PROT_READ | libc::PROT_WRITE;
        let shadow = map(0, len + PAGE, all, libc::MAP_SHARED, Some(&fd))?;
        let base = Self::place(len, at, if touchable { all } else { libc::PROT_NONE }, &fd);
        let Some(base) = base else {
            unmap(shadow, len + PAGE);
            return None;
        };
        Some(Self { fd, base, shadow, len, reserved: false })
    }

    fn place(len: usize, at: usize, protection: i32, fd: &OwnedFd) -> Option<usize> {
        let exact = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        if at != 0 {
            if let Some(base) = map(at, len, protection, exact, Some(fd)) {
                return Some(base);
            }
        }
        // Over the reservation, and not after its end: another thread might map something there meanwhile.
        let base = reserve(len)?;
        let within = libc::MAP_SHARED | libc::MAP_FIXED;
        let placed = map(base, len, protection, within, Some(fd));
        if placed.is_none() {
            unmap(base, len);
        }
        placed
    }

    pub(crate) fn fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// Length, bytes: whole pages.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where the double has the byte whose address the program knows.
    pub(crate) fn shadow_of(&self, addr: usize) -> usize {
        self.shadow + (addr - self.base)
    }

    /// Holds the bytes of another process until the mapping ends, or this process. False: the kernel refuses that.
    pub(crate) fn hold(&self) -> bool {
        lock(&self.fd, libc::F_OFD_SETLK, libc::F_RDLCK).is_some()
    }

    /// Whether another process, or a dma-buf, holds the bytes.
    pub(crate) fn is_held(&self) -> bool {
        is_held(&self.fd)
    }

    /// A word behind the bytes.
    pub(crate) fn word(&self, which: usize) -> &AtomicU64 {
        let at = self.shadow + self.len + which.min(WORDS - 1) * 8;
        // SAFETY: the shadow has a page behind `len`, aligned, which is only accessed atomically.
        unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.reserved {
            unmap(self.base, self.len);
        } else if map(self.base, self.len, libc::PROT_NONE, NOTHING | libc::MAP_FIXED, None)
            .is_none()
        {
            std::process::abort();
        }
        unmap(self.shadow, self.len + PAGE);
    }
}

/// The flags of a mapping of nothing.
const NOTHING: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Addresses for `len` bytes, whole pages, which begin at a multiple of a block.
pub(crate) fn reserve(len: usize) -> Option<usize> {
    // More than enough, to find one that is a multiple.
    let room = len.checked_add(BLOCK)?;
    let found = map(0, room, libc::PROT_NONE, NOTHING, None)?;
    let base = found.next_multiple_of(BLOCK);
    unmap(found, base - found);
    unmap(base + len, found + room - base - len);
    Some(base)
}

/// Gives back what [`reserve`] got.
pub(crate) fn release(at: usize, len: usize) {
    unmap(at, len);
}

/// A file of `len` bytes, rounded up to whole pages, and the page of words.
pub(crate) fn file(len: usize) -> Option<OwnedFd> {
    // SAFETY: makes a new descriptor, which nobody else owns.
    let fd = unsafe {
        let fd = libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))?
    };
    let size = i64::try_from(pages(len).checked_add(PAGE)?).ok()?;
    // SAFETY: a live descriptor.
    (unsafe { libc::ftruncate(fd.as_raw_fd(), size) } == 0).then_some(fd)
}

/// The bytes of a [`file`]; its page of words is not counted.
pub(crate) fn len_of(file: &OwnedFd) -> Option<usize> {
    let file = std::fs::File::from(file.try_clone().ok()?);
    (file.metadata().ok()?.len() as usize).checked_sub(PAGE)
}

/// Whether anything but the descriptor itself holds the bytes of a [`file`].
pub(crate) fn is_held(file: &OwnedFd) -> bool {
    lock(file, libc::F_OFD_GETLK, libc::F_WRLCK) != Some(libc::F_UNLCK)
}

/// A lock of a whole file, of the open file description; what fcntl(2) answers. `None`: an error.
fn lock(file: &OwnedFd, command: i32, kind: i32) -> Option<i32> {
    // SAFETY: all zeros are a lock: of the whole file, from its begin on.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    // SAFETY: a live descriptor and a local.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    (result == 0).then_some(i32::from(lock.l_type))
}

/// A descriptor of `len` bytes from `start` on of a [`file`], whole pages: its position says which, in pages, the begin in the
/// lower 31 bits. Nobody else has this position. It holds the bytes as long as it, or a mapping of it, is there.
pub(crate) fn part(fd: i32, start: usize, len: usize) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{fd}");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
    let at = ((len / PAGE) << 31) + start / PAGE;
    (&file).seek(SeekFrom::Start(at as u64)).ok()?;
    let file = OwnedFd::from(file);
    lock(&file, libc::F_OFD_SETLK, libc::F_RDLCK)?;
    Some(file)
}

/// A descriptor that the program lends, as one of the double's own.
pub(crate) fn duplicate(fd: i32) -> Option<OwnedFd> {
    // SAFETY: the program lends it for this call.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().ok()
}

fn map(at: usize, len: usize, protection: i32, flags: i32, fd: Option<&OwnedFd>) -> Option<usize> {
    let fd = fd.map_or(-1, AsRawFd::as_raw_fd);
    let at = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: a new mapping, which replaces nothing but a part of a reservation of the caller's own.
    let base = unsafe { libc::mmap(at, len, protection, flags, fd, 0) };
    (base != libc::MAP_FAILED).then(|| base.expose_provenance())
}

fn unmap(at: usize, len: usize) {
    // SAFETY: the caller's own mapping, to which it keeps no reference.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(at), len) };
}

/// Copies as a device does: the caller vouches for the addresses, and one that is not mapped is a SIGSEGV.
pub(crate) fn copy(to: usize, from: usize, len: usize) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
    let from = std::ptr::with_exposed_provenance::<u8>(from);
    // SAFETY: the program that called the double's C function vouches for its buffers; device addresses were checked
    // against the allocations.
    unsafe { std::ptr::copy(from, to, len) };
}

/// Sets bytes as a device does: as [`copy`].
pub(crate) fn fill(to: usize, value: u8, len: usize) {
    // SAFETY: as for `copy`: the range was checked against an allocation.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(to).write_bytes(value, len) };
}

/// The bytes at `from`: as [`copy`].
pub(crate) fn bytes(from: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    copy(bytes.as_mut_ptr().expose_provenance(), from, len);
    bytes
}

/// A function of the double of libibverbs, if this process has its devices.
fn of_devices(name: &CStr) -> Option<NonNull<libc::c_void>> {
    // SAFETY: asks for a library that is loaded, and loads none. The library is never unloaded.
    unsafe {
        let library =
            libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        let library = NonNull::new(library)?;
        let found = libc::dlsym(library.as_ptr(), name.as_ptr());
        libc::dlclose(library.as_ptr());
        NonNull::new(found)
    }
}

/// What devices of the double of libibverbs, if this process has them, have written to device memory is there.
pub(crate) fn flush_devices() {
    if let Some(found) = of_devices(c"fake_verbs_flush") {
        // SAFETY: the function of this name takes nothing and returns nothing.
        unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn()>(found.as_ptr())() };
    }
}

/// Devices of the double of libibverbs that have registered memory by its address lose it: it was freed.
pub(crate) fn revoke(addr: usize, len: usize) {
    if let Some(found) = of_devices(c"fake_verbs_revoke") {
        // SAFETY: the function of this name takes two numbers and returns nothing.
        unsafe {
            std::mem::transmute::<*mut libc::c_void, extern "C" fn(u64, u64)>(found.as_ptr())(
                addr as u64,
                len as u64,
            );
        }
    }
}

/// Calls `then` when the process ends normally.
pub(crate) fn at_exit(then: extern "C" fn()) {
    // SAFETY: a function of this library, which is never unloaded: programs open it with RTLD_NODELETE or for good.
    unsafe { libc::atexit(then) };
}
