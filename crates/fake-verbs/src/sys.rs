//! System calls: this process's memory as a device accesses it, descriptors, and memory that processes share.

use crate::settings;
use std::fs::File;
use std::io::Seek;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

fn vector(addr: u64, len: usize) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(addr as usize), iov_len: len }
}

/// Reads this process's memory. False if some of it is not mapped, or not readable.
pub(crate) fn read_memory(addr: u64, into: &mut [u8]) -> bool {
    let len = into.len();
    let here = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: len };
    let there = vector(addr, len);
    // SAFETY: the kernel checks the addresses of `there`, and writes only to `into`.
    let n = unsafe { libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0) };
    usize::try_from(n) == Ok(len)
}

/// Writes this process's memory, as a device does. False if some of it is not mapped, or not writable.
pub(crate) fn write_memory(addr: u64, from: &[u8]) -> bool {
    let len = from.len();
    let here = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: len };
    let there = vector(addr, len);
    // SAFETY: the kernel checks the addresses of `there`. The program has registered that memory, or posted it, for
    // a device to write; that it has not freed it is what the double is there to show.
    let n = unsafe { libc::process_vm_writev(libc::getpid(), &here, 1, &there, 1, 0) };
    usize::try_from(n) == Ok(len)
}

/// Whether the page of an address is there, and may be written, as the kernel finds when it pins memory for a device: a
/// page that is shared until it is written is copied. True where the kernel does not tell (before Linux 5.14).
pub(crate) fn is_writable(addr: u64) -> bool {
    const PAGE: usize = 4096;
    let populate = |addr: usize| {
        let page = std::ptr::with_exposed_provenance_mut(addr & !(PAGE - 1));
        // SAFETY: no byte changes.
        unsafe { libc::madvise(page, PAGE, libc::MADV_POPULATE_WRITE) == 0 }
    };
    let own = 0u8;
    populate(addr as usize) || !populate((&raw const own).expose_provenance())
}

/// Bytes of a descriptor that are mapped here: memory of a device, which the program cannot touch under its address.
#[derive(Debug)]
pub(crate) struct Shown {
    base: usize,
    /// Of the mapping, bytes, and where in it the bytes begin.
    len: usize,
    skip: usize,
}

impl Shown {
    /// The position of a descriptor of the double of CUDA says which pages of its file it is of: the first one in the lower 31
    /// bits, and their number, or 0 for the whole file. Errors: EINVAL for bytes beyond the end, and where it cannot be mapped.
    pub(crate) fn map(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Self, i32> {
        const PAGE: u64 = 4096;
        let end = offset.checked_add(len).ok_or(libc::EINVAL)?;
        let mut file = File::from(fd.try_clone_to_owned().map_err(|_| libc::EBADF)?);
        let of = file.stream_position().map_err(|_| libc::EBADF)?;
        let (first, pages) = ((of & 0x7fff_ffff) * PAGE, of >> 31);
        let size = file.metadata().map_err(|_| libc::EBADF)?.len();
        if end > if pages == 0 { size } else { pages * PAGE } || end > size.saturating_sub(first) {
            return Err(libc::EINVAL);
        }
        let offset = first + offset;
        let skip = (offset % PAGE) as usize;
        let len = len as usize + skip;
        let from = libc::off_t::try_from(offset - offset % PAGE).map_err(|_| libc::EINVAL)?;
        let all = libc::PROT_READ | libc::PROT_WRITE;
        let (at, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(at, len, all, libc::MAP_SHARED, fd, from) };
        if base == libc::MAP_FAILED {
            return Err(libc::EINVAL);
        }
        Ok(Self { base: base.expose_provenance(), len, skip })
    }

    /// Where the bytes are.
    pub(crate) fn addr(&self) -> u64 {
        (self.base + self.skip) as u64
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        let base = std::ptr::with_exposed_provenance_mut(self.base);
        // SAFETY: its own mapping, to which nobody keeps a reference.
        unsafe { libc::munmap(base, self.len) };
    }
}

/// Whether a GPU sees what a device has written before it without being asked to: a setting of the double of CUDA.
pub(crate) fn is_ordered() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| std::env::var_os("FAKE_CUDA_ORDERED").is_some_and(|set| set != "0"))
}

/// The pages of a GPU that have so many bytes at an address, and where in them these begin, from the double of CUDA. `None`: it is no
/// GPU's memory, or no module gives that to devices.
pub(crate) fn peer_memory(addr: u64, len: u64) -> Option<(OwnedFd, u64)> {
    static IS_LOADED: OnceLock<bool> = OnceLock::new();
    if !*IS_LOADED.get_or_init(|| settings::number(settings::PEERMEM) != 0) {
        return None;
    }
    let (mut fd, mut offset) = (-1, 0);
    // SAFETY: asks for a library that is loaded, and loads none, which is never unloaded; its function of this name has this
    // signature, and gives a new descriptor.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        let library = NonNull::new(library)?;
        let found = libc::dlsym(library.as_ptr(), c"fake_cuda_peer_memory".as_ptr());
        libc::dlclose(library.as_ptr());
        type Function = unsafe extern "C" fn(u64, u64, *mut RawFd, *mut u64) -> i32;
        let find =
            std::mem::transmute::<*mut libc::c_void, Function>(NonNull::new(found)?.as_ptr());
        let found = find(addr, len, &mut fd, &mut offset) == 0;
        found.then(|| (OwnedFd::from_raw_fd(fd), offset))
    }
}

/// Copies from a buffer of the caller, in the middle of one of its calls.
///
/// # Safety
/// So many bytes are readable there.
pub(crate) unsafe fn copy_from(addr: *const u8, len: usize) -> Vec<u8> {
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: the caller vouches.
    unsafe { std::slice::from_raw_parts(addr, len) }.to_vec()
}

pub(crate) fn set_errno(errno: i32) {
    // SAFETY: the address of the thread's own errno.
    unsafe { *libc::__errno_location() = errno };
}

/// A descriptor that counts: readable while its count is not zero; each read takes one.
#[derive(Debug)]
pub(crate) struct Count(OwnedFd);

impl Count {
    /// `None` without free descriptors.
    pub(crate) fn new() -> Option<Self> {
        // SAFETY: makes a new descriptor, which nobody else owns.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE);
            (fd >= 0).then(|| Self(OwnedFd::from_raw_fd(fd)))
        }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(crate) fn raise(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes of a live local.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }
}

/// Takes one from the count behind `fd`; waits for it unless the descriptor does not block. Error: errno.
pub(crate) fn take_count(fd: RawFd) -> Result<(), i32> {
    let mut one = 0u64;
    // SAFETY: reads eight bytes into a live local.
    let n = unsafe { libc::read(fd, (&raw mut one).cast(), 8) };
    if n == 8 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }
}

/// A set of descriptors to wait for.
#[derive(Debug)]
pub(crate) struct Watch(OwnedFd);

impl Watch {
    pub(crate) fn new() -> Option<Self> {
        // SAFETY: makes a new descriptor, which nobody else owns.
        unsafe {
            let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            (fd >= 0).then(|| Self(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// Adds `fd`, which is reported as `token`; `out`: when it is writable instead of readable.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64, out: bool) {
        let events = if out { libc::EPOLLOUT | libc::EPOLLET } else { libc::EPOLLIN };
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: two live descriptors and a live local.
        unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event)
        };
    }

    /// The tokens of what is ready; waits so many milliseconds for the first.
    pub(crate) fn ready(&self, milliseconds: i32) -> Vec<u64> {
        const MOST: usize = 64;
        let mut room = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: a live descriptor, and room for so many events.
        let n = unsafe {
            libc::epoll_wait(self.0.as_raw_fd(), room.as_mut_ptr(), MOST as i32, milliseconds)
        };
        room.iter().take(usize::try_from(n).unwrap_or(0)).map(|event| event.u64).collect()
    }

    /// Another descriptor of the same set, for the thread that waits without the lock.
    pub(crate) fn again(&self) -> Option<Self> {
        self.0.try_clone().ok().map(Self)
    }
}

/// Numbers in a file, which other processes read and which outlive this one however it ends.
pub(crate) fn share_numbers(file: &File, count: usize) -> Option<&'static [AtomicU64]> {
    let len = count * size_of::<AtomicU64>();
    file.set_len(len as u64).ok()?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return None;
    }
    let base = NonNull::new(base.cast::<AtomicU64>())?;
    // SAFETY: the mapping has this length, is page aligned, zeroed, never unmapped, and only accessed atomically.
    Some(unsafe { std::slice::from_raw_parts(base.as_ptr(), count) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_and_written_and_none_that_is_not_there() {
        let mut memory = vec![1u8, 2, 3, 4];
        let addr = memory.as_mut_ptr().expose_provenance() as u64;
        assert!(write_memory(addr + 1, &[9, 8]));
        let mut back = [0; 4];
        assert!(read_memory(addr, &mut back));
        assert_eq!(back, [1, 9, 8, 4]);
        assert!(!read_memory(8, &mut back));
        assert!(!write_memory(8, &back));
    }
}
