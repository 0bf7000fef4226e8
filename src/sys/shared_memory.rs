//! Anonymous shared memory that a peer cannot shrink under us.

use super::errno::{Errno, Result, check};
use super::{process, spare_maps};
use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering};

const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A mapping of a sealed memfd, unmapped on drop. It has no name in any file system, so nothing is
/// left behind when its last process dies.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: NonNull<u8>,
    /// Bytes that are mapped at `base`.
    mapped: usize,
    len: usize,
    /// A mapping of all bytes: at `base`, or a second one; null if there is none yet.
    whole: AtomicPtr<u8>,
}

// SAFETY: a mapping is plain memory; its users decide which of them may access which byte when.
unsafe impl Send for SharedMemory {}
// SAFETY: through a shared reference the bytes are accessed by pointers and atomic words only.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates `len` zeroed bytes. The first `reserved` of them are reserved at once, so that touching them later cannot
    /// fail; the others have to be reserved before they are touched ([`Self::reserve_more`]). Returns the mapping and
    /// the descriptor to pass on. Errors: ENOMEM, ENOSPC, EFBIG, EMFILE, ENFILE.
    pub(crate) fn create(len: usize, reserved: usize) -> Result<(Self, OwnedFd)> {
        Self::create_in_parts(len, len, reserved)
    }

    /// As [`Self::create`], but only the first `head` bytes are mapped before the first call of [`Self::whole`]: a page
    /// table covers 2 MiB of addresses, so that many short mappings share one, and each long one has its own.
    pub(crate) fn create_in_parts(
        len: usize,
        head: usize,
        reserved: usize,
    ) -> Result<(Self, OwnedFd)> {
        // To populate the mapping reserves its pages too, and saves a page fault for each.
        if reserved <= head {
            if let Ok(fd) = Self::reserve("udrv", len, 0) {
                let this = Self::map_in_parts(&fd, len, head)?;
                if this.populate(0, reserved).is_err() {
                    fallocate(&fd, reserved)?; // Linux before 5.14, a filter, or a shortage, which this tells too
                }
                return Ok((this, fd));
            }
        }
        let fd = Self::reserve("udrv", len, reserved)?;
        Ok((Self::map_in_parts(&fd, len, head)?, fd))
    }

    /// Reserves `len` bytes at `offset`, which is at the beginning of a page, and maps them. Errors: ENOMEM, EFAULT; EINVAL
    /// before Linux 5.14; those of a filter.
    fn populate(&self, offset: usize, len: usize) -> Result<()> {
        let base = self.mapping_of(offset + len).ok_or(Errno(libc::ENOMEM))?;
        // SAFETY: a range of the mapping, from a page boundary on.
        check(unsafe {
            let start = base.as_ptr().add(offset);
            libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE)
        })
        .map(drop)
    }

    /// Reserves the pages of `len` bytes at `offset`, and maps them: page faults make the first write five times as
    /// expensive. The last eight bytes of each page are undefined afterwards. Errors: ENOMEM, EFAULT, and EINVAL for a
    /// range outside.
    pub(crate) fn reserve_more(&self, offset: usize, len: usize) -> Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Errno(libc::EINVAL));
        }
        let page = process::page_size();
        let first = offset / page * page;
        match self.populate(first, offset + len - first) {
            Ok(()) => Ok(()),
            Err(e @ Errno(libc::ENOMEM | libc::EFAULT | libc::EHWPOISON)) => Err(e),
            // Linux before 5.14, or a filter.
            Err(_) => (first..offset + len).step_by(page).try_for_each(|at| self.reserve_word(at)),
        }
    }

    /// Reserves one page by a system call that writes there: it fails where a store would raise SIGBUS.
    fn reserve_word(&self, offset: usize) -> Result<()> {
        const BYTES: usize = 8;
        let page = process::page_size();
        let at = (offset / page * page + page).min(self.len) - BYTES;
        let base = self.mapping_of(at + BYTES).ok_or(Errno(libc::ENOMEM))?;
        // SAFETY: the call changes no signal mask, and writes the present one to eight bytes of the mapping.
        check(unsafe {
            let to = base.as_ptr().add(at);
            let none = std::ptr::null::<libc::sigset_t>();
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, none, to, BYTES)
        } as libc::c_int)
        .map(drop)
    }

    /// Gives the whole pages of `len` bytes at `offset` back to the system, in all mappings of them: they are zeroed, and
    /// have to be reserved again. False: the system refuses, as under mlockall(2).
    pub(crate) fn release(&self, offset: usize, len: usize) -> bool {
        let page = process::page_size();
        let (first, end) =
            (offset.next_multiple_of(page), (offset + len).min(self.len) / page * page);
        if first >= end {
            return true;
        }
        let Some(base) = self.mapping_of(end) else { return false };
        // SAFETY: whole pages of the mapping, whose contents nobody needs.
        check(unsafe {
            libc::madvise(base.as_ptr().add(first).cast(), end - first, libc::MADV_REMOVE)
        })
        .is_ok()
    }

    /// A mapping of the first `end` bytes. `None`: the system has no memory for another one.
    fn mapping_of(&self, end: usize) -> Option<NonNull<u8>> {
        if end <= self.mapped { Some(self.base) } else { self.whole() }
    }

    /// First byte of a mapping of all bytes, which is made by the first call. `None`: the system has no memory for it now.
    #[inline(always)]
    pub(crate) fn whole(&self) -> Option<NonNull<u8>> {
        NonNull::new(self.whole.load(Ordering::Acquire)).or_else(|| self.map_whole())
    }

    #[cold]
    fn map_whole(&self) -> Option<NonNull<u8>> {
        // SAFETY: another mapping of the same file, from the first byte of this one on.
        let another = || unsafe { second(self.base, self.len) };
        let base = another().or_else(|| spare_maps::give().then(another).flatten())?;
        let (null, new) = (std::ptr::null_mut(), base.as_ptr());
        match self.whole.compare_exchange(null, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(base),
            Err(other) => {
                // SAFETY: exactly the range that was just mapped, which nobody knows.
                unsafe { libc::munmap(new.cast(), self.len) };
                NonNull::new(other)
            }
        }
    }

    /// Only reserved, and under a label by which [`find`] finds it. Errors: also EINVAL for a label
    /// of more than 200 bytes or with a NUL.
    pub(crate) fn create_labelled(label: &str, len: usize) -> Result<(Self, OwnedFd)> {
        let fd = Self::reserve(label, len, len)?;
        Ok((Self::map(fd.as_fd_ref(), 0, len)?, fd))
    }

    /// As [`Self::create`], under a label by which other processes of the same user find it. Only this mapping can ever
    /// be written: the file is read-only for its user, and sealed against writing (fcntl(2), F_SEAL_FUTURE_WRITE) where
    /// the kernel knows that, from Linux 5.1 on.
    pub(crate) fn create_page(label: &str, len: usize, reserved: usize) -> Result<(Self, OwnedFd)> {
        let fd = Self::unsealed(label, len, reserved)?;
        let this = Self::map(fd.as_fd_ref(), 0, len)?;
        // SAFETY: an owned descriptor.
        check(unsafe { libc::fchmod(fd.as_raw_fd(), 0o400) })?;
        seal(&fd, SEALS | libc::F_SEAL_FUTURE_WRITE).or_else(|_| seal(&fd, SEALS))?;
        Ok((this, fd))
    }

    /// A file of `len` zeroed bytes for several mappings, of which the first `reserved` are reserved; see [`Self::create`].
    pub(crate) fn reserve(label: &str, len: usize, reserved: usize) -> Result<OwnedFd> {
        let fd = Self::unsealed(label, len, reserved)?;
        seal(&fd, SEALS)?;
        Ok(fd)
    }

    fn unsealed(label: &str, len: usize, reserved: usize) -> Result<OwnedFd> {
        #[cfg(test)]
        if let Some(errno) = SHORT.get() {
            return Err(errno);
        }
        // The kernel would end a process that exceeds the limit (setrlimit(2), SIGXFSZ).
        if process::file_size_limit().is_some_and(|limit| limit < len) {
            return Err(Errno(libc::EFBIG));
        }
        let label = CString::new(label).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: a C string; returns a new descriptor or -1.
        let fd = check(unsafe {
            libc::memfd_create(label.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        })?;
        // SAFETY: `fd` is new and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = libc::off_t::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: an owned descriptor.
        let sized = check(unsafe { libc::ftruncate(fd.as_raw_fd(), size) });
        if reserved == 0 {
            sized?;
        }
        // If a filter forbids that call, the other one sizes the file, and reserves all of it.
        match if sized.is_ok() { reserved } else { len } {
            0 => Ok(fd),
            reserved => fallocate(&fd, reserved).map(|()| fd),
        }
    }

    /// Maps memory that a peer passed, after checking that it is a memfd of at least
    /// `len` bytes that can no longer shrink (access beyond the end of a file raises SIGBUS). Errors:
    /// EINVAL, ENOMEM.
    pub(crate) fn attach(fd: &OwnedFd, len: usize) -> Result<Self> {
        Self::attach_part(fd, 0, len)
    }

    /// As [`Self::attach`], with the parts of [`Self::create_in_parts`].
    pub(crate) fn attach_in_parts(fd: &OwnedFd, len: usize, head: usize) -> Result<Self> {
        Self::check_passed(fd, 0, len)?;
        let this = Self::map_in_parts(fd, len, head)?;
        // Where the first access writes, each page takes a page fault of its own. One that reads maps what there is.
        let _ = this.atomic(0).map(|word| word.load(Ordering::Acquire));
        Ok(this)
    }

    /// Like [`Self::attach`], `len` bytes at `offset`, which is a multiple of the page size. Errors: also EINVAL for another
    /// offset.
    pub(crate) fn attach_part(fd: &OwnedFd, offset: usize, len: usize) -> Result<Self> {
        Self::check_passed(fd, offset, len)?;
        Self::map(fd.as_fd_ref(), offset, len)
    }

    fn check_passed(fd: &OwnedFd, offset: usize, len: usize) -> Result<()> {
        #[cfg(test)]
        if let Some(errno) = REFUSED.get() {
            return Err(errno);
        }
        // SAFETY: an owned descriptor.
        let seals = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })?;
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(Errno(libc::EINVAL));
        }
        let size = file_len(fd)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Errno(libc::EINVAL));
        }
        Ok(())
    }

    /// The word at `offset` of unmapped memory that a peer passed. `None`: it cannot be read.
    pub(crate) fn peek(fd: &OwnedFd, offset: usize) -> Option<u32> {
        let mut bytes = [0u8; 4];
        let at = libc::off_t::try_from(offset).ok()?;
        // SAFETY: an owned descriptor, and room for 4 bytes.
        let n = unsafe { libc::pread(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), 4, at) };
        (n == 4).then_some(u32::from_ne_bytes(bytes))
    }

    fn map_in_parts(fd: &OwnedFd, len: usize, head: usize) -> Result<Self> {
        // Under a limit of address space the second mapping might fail when somebody already depends on it.
        // So it might where the process has hardly any mapping left: what needs the second one would wait for ever.
        let limited = || process::address_space_is_limited() || !Self::may_come_in_parts();
        if head >= len || limited() {
            return Self::map(fd.as_fd_ref(), 0, len);
        }
        let mut this = Self::map(fd.as_fd_ref(), 0, head)?;
        this.len = len;
        this.whole = AtomicPtr::default();
        Ok(this)
    }

    /// Whether the system makes second mappings, as far as is known. The first call takes much longer than the others.
    pub(crate) fn may_come_in_parts() -> bool {
        can_duplicate() && spare_maps::are_there()
    }

    fn map(fd: BorrowedFd<'_>, offset: usize, len: usize) -> Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(|_| Errno(libc::EINVAL))?;
        let base = super::pages::map(len, libc::MAP_SHARED, Some((fd, offset)))?;
        Ok(Self { base, mapped: len, len, whole: AtomicPtr::new(base.as_ptr()) })
    }

    /// First byte; page-aligned. Of memory in parts only the head is mapped here.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The word at `offset`; all accesses to it must be atomic. `None`: it is outside the mapping or not
    /// aligned.
    pub(crate) fn atomic(&self, offset: usize) -> Option<&AtomicU64> {
        if offset % 8 != 0 || offset.checked_add(8)? > self.mapped {
            return None;
        }
        // SAFETY: inside the mapping and aligned, for as long as `self` lives.
        Some(unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) })
    }

    /// Bytes in all.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Another mapping of the shared memory at `base`, of `len` bytes. `None`: the system refuses.
///
/// # Safety
/// A shared mapping of a file begins at `base`.
unsafe fn duplicate(base: NonNull<u8>, len: usize) -> Option<NonNull<u8>> {
    // SAFETY: an old length of 0 leaves the old mapping as it is (mremap(2)).
    let new = unsafe { libc::mremap(base.as_ptr().cast(), 0, len, libc::MREMAP_MAYMOVE) };
    if new == libc::MAP_FAILED { None } else { NonNull::new(new.cast()) }
}

/// The same; for tests, as if the system refused.
///
/// # Safety
/// As for [`duplicate`].
unsafe fn second(base: NonNull<u8>, len: usize) -> Option<NonNull<u8>> {
    #[cfg(test)]
    if ALONE.get() {
        return None;
    }
    // SAFETY: as the caller says.
    unsafe { duplicate(base, len) }
}

/// Whether the system makes a second mapping without a descriptor. Not under some tools and in some sandboxes.
fn can_duplicate() -> bool {
    const UNKNOWN: u8 = 0;
    const YES: u8 = 1;
    const NO: u8 = 2;
    // No lock: a child that is forked meanwhile finds out by itself.
    static CAN: AtomicU8 = AtomicU8::new(UNKNOWN);
    if CAN.load(Ordering::Relaxed) == UNKNOWN {
        let page = process::page_size();
        let Ok(fd) = SharedMemory::reserve("udrv", 2 * page, page) else { return false };
        let Ok(one) = SharedMemory::map(fd.as_fd_ref(), 0, page) else { return false };
        // SAFETY: a shared mapping of a file.
        let two = unsafe { duplicate(one.base, 2 * page) };
        if two.is_none() && Errno::last().is_shortage() {
            return false;
        }
        let same = two.is_some_and(|base| {
            let whole = AtomicPtr::default();
            let two = SharedMemory { base, mapped: 2 * page, len: 2 * page, whole };
            one.atomic(0).zip(two.atomic(0)).is_some_and(|(a, b)| {
                a.store(1, Ordering::SeqCst);
                b.load(Ordering::SeqCst) == 1
            })
        });
        CAN.store(if same { YES } else { NO }, Ordering::Relaxed);
    }
    CAN.load(Ordering::Relaxed) == YES
}

fn seal(fd: &OwnedFd, seals: libc::c_int) -> Result<()> {
    // SAFETY: an owned descriptor.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) }).map(drop)
}

#[cfg(test)]
thread_local! {
    /// For tests: as if the system refused every `attach` of this thread.
    pub(crate) static REFUSED: std::cell::Cell<Option<Errno>> = const { std::cell::Cell::new(None) };
    /// For tests: as if the system refused every second mapping of this thread.
    pub(crate) static ALONE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    /// For tests: as if the system had nothing for new memory of this thread.
    pub(crate) static SHORT: std::cell::Cell<Option<Errno>> = const { std::cell::Cell::new(None) };
}

/// Length of a memfd, bytes. If a filter forbids one of two calls, the other one is used.
fn file_len(fd: &OwnedFd) -> Result<usize> {
    // SAFETY: zeroed is a valid `stat` to be overwritten.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: an owned descriptor and a live local.
    let size = match check(unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) }) {
        Ok(_) => stat.st_size,
        // SAFETY: an owned descriptor; the file position is not used for reading or writing.
        Err(errno) => match unsafe { libc::lseek(fd.as_raw_fd(), 0, libc::SEEK_END) } {
            -1 => return Err(errno),
            end => end,
        },
    };
    Ok(usize::try_from(size).unwrap_or(0))
}

/// The memory with this label that a process of the same user has open. Errors: ENOENT, and those of
/// reading /proc.
pub(crate) fn find(pid: i32, label: &str) -> Result<OwnedFd> {
    if !process::proc_is_ours() {
        return Err(Errno(libc::ENOENT));
    }
    let wanted = format!("/memfd:{label} (deleted)");
    let errno = |e: std::io::Error| Errno(e.raw_os_error().unwrap_or(libc::EIO));
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(errno)? {
        let path = entry.map_err(errno)?.path();
        // A descriptor that is closed meanwhile is not the one wanted.
        if std::fs::read_link(&path).is_ok_and(|target| target.as_os_str() == wanted.as_str()) {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(path);
            return file.map(OwnedFd::from).map_err(errno);
        }
    }
    Err(Errno(libc::ENOENT))
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `map` mapped; nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
        let whole = *self.whole.get_mut();
        if !whole.is_null() && whole != self.base.as_ptr() {
            // SAFETY: exactly the range that `map_whole` mapped.
            unsafe { libc::munmap(whole.cast(), self.len) };
        }
    }
}

/// `OwnedFd::as_fd` without importing the trait at each use.
trait AsFdRef {
    fn as_fd_ref(&self) -> BorrowedFd<'_>;
}

impl AsFdRef for OwnedFd {
    fn as_fd_ref(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.as_fd()
    }
}

/// Reserves the first `len` bytes of `fd`, which has at least as many afterwards. Errors: ENOMEM, ENOSPC, EFBIG, EINVAL, EAGAIN.
fn fallocate(fd: &OwnedFd, len: usize) -> Result<()> {
    let len = libc::off_t::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
    uninterrupted(|| {
        // SAFETY: an owned descriptor.
        Errno(unsafe { libc::posix_fallocate(fd.as_raw_fd(), 0, len) })
    })
}

/// Repeats `fallocate`, which older kernels end with EINTR whenever a signal is pending. Errors: its own; EAGAIN after
/// [`SIGNALS`] signals.
fn uninterrupted(mut fallocate: impl FnMut() -> Errno) -> Result<()> {
    for _ in 0..SIGNALS {
        match fallocate() {
            Errno(0) => return Ok(()),
            Errno(libc::EINTR) => {}
            errno => return Err(errno),
        }
    }
    Err(Errno(libc::EAGAIN))
}

/// How many signals may interrupt a reservation.
const SIGNALS: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::per_process::tests::in_child;

    #[test]
    fn a_signal_does_not_end_a_reservation() {
        let after = |signals: usize, last: i32| {
            let mut n = 0;
            uninterrupted(|| {
                n += 1;
                Errno(if n > signals { last } else { libc::EINTR })
            })
        };
        assert_eq!((after(0, 0), after(3, 0)), (Ok(()), Ok(())));
        assert_eq!(after(3, libc::ENOSPC), Err(Errno(libc::ENOSPC)));
        assert_eq!(after(usize::MAX, 0), Err(Errno(libc::EAGAIN)));
    }

    #[test]
    fn attached_memory_is_the_same_memory() {
        let (a, fd) = SharedMemory::create(8192, 8192).unwrap();
        let b = SharedMemory::attach(&fd, 8192).unwrap();
        // SAFETY: both mappings are 8192 bytes long.
        unsafe {
            a.base().as_ptr().add(5000).write(7);
            assert_eq!(b.base().as_ptr().add(5000).read(), 7);
        }
    }

    #[test]
    fn what_is_reserved_at_first_is_written_without_page_faults() {
        let faults = || {
            // SAFETY: zeroed is a valid `rusage` to be overwritten.
            let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
            // SAFETY: a live local.
            unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
            usage.ru_minflt
        };
        let page = process::page_size();
        // One of them may meet a page fault of something else, as of memory that the system is moving.
        let clean = (0..10).any(|_| {
            let (a, _fd) = SharedMemory::create_in_parts(16 * page, 8 * page, 2 * page).unwrap();
            if a.populate(0, page).is_err() {
                return true; // before Linux 5.14
            }
            faults();
            let before = faults();
            for at in [0, page] {
                // SAFETY: inside the mapping.
                unsafe { a.base().as_ptr().add(at).write_volatile(1) };
            }
            faults() == before
        });
        assert!(clean);
    }

    #[test]
    fn what_is_reserved_later_is_shared_and_can_be_given_back() {
        const MIB: usize = 1 << 20;
        let (a, fd) = SharedMemory::create(MIB, 4096).unwrap();
        let b = SharedMemory::attach(&fd, MIB).unwrap();
        let bytes = || {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
        };
        assert_eq!(bytes(), 4096);
        a.reserve_more(10_000, 100_000).unwrap();
        assert_eq!(bytes(), 26 * 4096);
        a.reserve_word(500_000).unwrap();
        a.reserve_word(MIB - 1).unwrap();
        assert_eq!(bytes(), 28 * 4096);
        // SAFETY: both mappings are that long.
        unsafe {
            a.base().as_ptr().add(50_000).write(7);
            assert_eq!(b.base().as_ptr().add(50_000).read(), 7);
            a.release(10_000, 100_000);
            assert_eq!(b.base().as_ptr().add(50_000).read(), 0);
        }
        assert!(bytes() < 8 * 4096, "{}", bytes());
        assert_eq!(a.reserve_more(MIB, 1), Err(Errno(libc::EINVAL)));
    }

    /// Uses up the mappings of this process but for `left`. Mapping fails from then on: only for a child.
    fn use_up_mappings(left: usize) -> bool {
        let page = process::page_size();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mut last = [std::ptr::null_mut(); 8];
        for n in 0..1 << 18 {
            // Neighbours do not become one mapping.
            let prot = if n % 2 == 0 { libc::PROT_NONE } else { libc::PROT_READ };
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), page, prot, flags, -1, 0) };
            if at == libc::MAP_FAILED {
                // SAFETY: mappings of this function.
                let gone = |n: usize| unsafe { libc::munmap(last[n % last.len()], page) } == 0;
                return n > left && (n - left..n).all(gone);
            }
            last[n % last.len()] = at;
        }
        false
    }

    fn most_mappings() -> usize {
        let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        most.trim().parse().unwrap_or(usize::MAX)
    }

    #[test]
    fn where_hardly_more_can_be_mapped_there_is_one_mapping() {
        const MIB: usize = 1 << 20;
        if most_mappings() >= 1 << 18 || !can_duplicate() {
            return eprintln!("skipped: vm.max_map_count is large, or there are no parts");
        }
        let fd = SharedMemory::reserve("udrv", MIB, MIB).unwrap();
        assert!(in_child(|| {
            let used_up = use_up_mappings(3);
            let one = SharedMemory::attach_in_parts(&fd, MIB, 8192).unwrap();
            used_up && one.whole() == Some(one.base) && one.atomic(MIB - 8).is_some()
        }));
    }

    #[test]
    fn what_is_mapped_in_parts_can_be_mapped_whole_where_the_process_has_no_mapping_left() {
        const MIB: usize = 1 << 20;
        let fd = SharedMemory::reserve("udrv", MIB, MIB).unwrap();
        assert!(in_child(|| {
            if !can_duplicate() {
                return true;
            }
            let [one, two] =
                [(); 2].map(|()| SharedMemory::attach_in_parts(&fd, MIB, 8192).unwrap());
            let used_up = use_up_mappings(0);
            let whole = one.whole().zip(two.whole());
            // Where the limit is too large to use it up, there is nothing to see.
            whole.is_some_and(|(one, two)| one != two) && (used_up || most_mappings() >= 1 << 18)
        }));
    }

    #[test]
    fn memory_in_parts_is_one_memory() {
        if !can_duplicate() {
            return eprintln!("skipped: no second mapping without a descriptor");
        }
        const MIB: usize = 1 << 20;
        let (a, fd) = SharedMemory::create_in_parts(4 * MIB, 8192, 4096).unwrap();
        let b = SharedMemory::attach_in_parts(&fd, 4 * MIB, 8192).unwrap();
        assert_eq!((a.mapped, b.mapped, a.len(), b.len()), (8192, 8192, 4 * MIB, 4 * MIB));
        assert!(a.atomic(8192).is_none(), "not in the head");
        ALONE.set(true);
        let refused = (a.whole(), a.reserve_more(3 * MIB, 4096), a.release(2 * MIB, 4096));
        ALONE.set(false);
        assert_eq!(refused, (None, Err(Errno(libc::ENOMEM)), false));
        a.reserve_more(3 * MIB, 4096).unwrap();
        let (whole, theirs) = (a.whole().unwrap(), b.whole().unwrap());
        assert_eq!((a.whole(), whole == a.base()), (Some(whole), false));
        // SAFETY: the mappings have 4 MiB, and the heads 8192 bytes; what is touched is reserved.
        unsafe {
            whole.as_ptr().add(3 * MIB).write(7);
            assert_eq!(theirs.as_ptr().add(3 * MIB).read(), 7);
            a.base().as_ptr().add(100).write(8);
            assert_eq!((whole.as_ptr().add(100).read(), b.base().as_ptr().add(100).read()), (8, 8));
            assert!(a.release(3 * MIB, 4096));
            assert_eq!(theirs.as_ptr().add(3 * MIB).read(), 0);
        }
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap());
        let mappings = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains(&format!(" {inode} "))).count()
        };
        assert_eq!(mappings(), 4);
        drop(a);
        assert_eq!(mappings(), 2, "both of one have ended");
    }

    #[test]
    fn a_shorter_file_is_refused() {
        let (_a, fd) = SharedMemory::create(4096, 4096).unwrap();
        assert_eq!(SharedMemory::attach(&fd, 8192).unwrap_err(), Errno(libc::EINVAL));
    }

    #[test]
    fn an_unsealed_file_is_refused() {
        // SAFETY: a C string literal; the result is checked.
        let fd = check(unsafe { libc::memfd_create(c"x".as_ptr(), libc::MFD_CLOEXEC) }).unwrap();
        // SAFETY: `fd` is new.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        assert!(SharedMemory::attach(&fd, 0).is_err());
    }
}
