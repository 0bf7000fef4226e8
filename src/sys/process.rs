//! Facts about processes.

use super::cancel::Shield;
use super::errno::Errno;
use std::hash::{Hash, Hasher};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// This process's id (a system call: not for the data path).
pub(crate) fn pid() -> i32 {
    // SAFETY: always succeeds.
    unsafe { libc::getpid() }
}

/// The number of the calling thread, as gettid(2) has it.
pub(crate) fn thread() -> u64 {
    // SAFETY: always succeeds.
    unsafe { libc::syscall(libc::SYS_gettid) as u64 }
}

/// The process that made an object. A forked child has a copy of the object and shares its kernel state, but is
/// not at home there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Home {
    pid: i32,
    number: i32,
}

impl Home {
    /// This process.
    pub(crate) fn here() -> Self {
        Self { pid: pid(), number: number() }
    }

    /// False in a forked child. No system call where processes have numbers.
    pub(crate) fn is_here(self) -> bool {
        match self.number {
            0 => self == Self::here(),
            mine => mine == number(),
        }
    }

    /// For a word of a process that a child would inherit: no other has this number, and never 0. Its top bit is free.
    fn word(self) -> u64 {
        u64::from(self.pid.unsigned_abs()) << 32 | u64::from(self.number.unsigned_abs())
    }

    /// As in a child of the process that made the object.
    #[cfg(test)]
    pub(crate) fn elsewhere() -> Self {
        Self { pid: 0, number: 0 }
    }
}

/// A number of this process that none of its ancestors has; 0 before Linux 4.14. The process id may be that of an
/// ancestor: of one that has ended, or of one in another pid namespace, where the first process has 1.
fn number() -> i32 {
    static MARK: AtomicPtr<Option<ForkMark>> = AtomicPtr::new(std::ptr::null_mut());
    let mut found = MARK.load(Ordering::Acquire);
    if found.is_null() {
        let (new, null) = (Box::into_raw(Box::new(ForkMark::new().ok())), found);
        found = match MARK.compare_exchange(null, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(other) => {
                // SAFETY: made above, and no other thread has it.
                drop(unsafe { Box::from_raw(new) });
                other
            }
        };
    }
    // SAFETY: a mark that is never freed.
    unsafe { &*found }.as_ref().map_or(0, ForkMark::number)
}

/// Bytes of a page.
pub(crate) fn page_size() -> usize {
    // SAFETY: always succeeds for this name.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Bytes of memory, and processors, that the machine has.
pub(crate) fn machine() -> (usize, usize) {
    // SAFETY: these names need nothing; -1 where the system does not know.
    let (pages, processors) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_NPROCESSORS_ONLN)) };
    let bytes = usize::try_from(pages).unwrap_or(0).saturating_mul(page_size());
    (bytes, usize::try_from(processors).unwrap_or(1).max(1))
}

/// The processors that a process may use (sched_getaffinity(2)), as limited by binding or by its
/// container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Processors(Vec<u64>);

impl Processors {
    /// Most processors of a machine, in words of 64.
    const WORDS: usize = 128;

    /// The set of the first thread of process `pid`; 0: of the calling thread. `None` if unknown.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        if pid < 0 {
            return None;
        }
        let mut words = vec![0u64; Self::WORDS];
        let room = size_of_val(words.as_slice());
        // SAFETY: a live buffer of that length. The C library's function supports only 1024 processors.
        let len =
            unsafe { libc::syscall(libc::SYS_sched_getaffinity, pid, room, words.as_mut_ptr()) };
        words.truncate(usize::try_from(len).ok()? / size_of::<u64>());
        let set = Self(words);
        (set.count() > 0).then_some(set)
    }

    /// A set that overlaps no other.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the sets have a processor in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }
}

/// Bytes of the last-level cache of the first processor; `None`: unknown.
pub(crate) fn last_cache() -> Option<usize> {
    const CACHES: &str = "/sys/devices/system/cpu/cpu0/cache";
    let size = |index: u32| {
        let text = std::fs::read_to_string(format!("{CACHES}/index{index}/size")).ok()?;
        text.trim().strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)
    };
    (0..8).rev().find_map(size)
}

/// Bytes that this process may lock, or have pinned by devices; `None`: unlimited.
pub(crate) fn locked_memory_limit() -> Option<usize> {
    const CAP_IPC_LOCK: u32 = 14;
    let _shield = Shield::raise();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    if effective.is_some_and(|set| set >> CAP_IPC_LOCK & 1 == 1) {
        return None;
    }
    // SAFETY: a live local.
    limit(|limit| unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, limit) })
}

/// Largest file of this process, bytes, shared memory included; `None`: unlimited.
pub(crate) fn file_size_limit() -> Option<usize> {
    // SAFETY: a live local.
    limit(|limit| unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, limit) })
}

/// Whether the address space of this process has a limit.
pub(crate) fn address_space_is_limited() -> bool {
    // SAFETY: a live local.
    limit(|limit| unsafe { libc::getrlimit(libc::RLIMIT_AS, limit) }).is_some()
}

/// The limit that `read` queries (getrlimit(2)); `None`: unlimited, or a filter forbids the query: then exceeding the
/// limit is noticed when it happens.
fn limit(read: impl FnOnce(&mut libc::rlimit) -> libc::c_int) -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let told = read(&mut limit) == 0;
    (told && limit.rlim_cur != libc::RLIM_INFINITY)
        .then(|| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
}

/// Distinguishes a process from its forked children, at the cost of reading a word.
#[derive(Debug)]
pub(crate) struct ForkMark(NonNull<AtomicI32>);

// SAFETY: one atomic word.
unsafe impl Send for ForkMark {}
// SAFETY: one atomic word.
unsafe impl Sync for ForkMark {}

impl ForkMark {
    /// Errors: ENOMEM, EINVAL (Linux before 4.14).
    pub(crate) fn new() -> Result<Self, Errno> {
        let (len, rw) = (page_size(), libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), len, rw, flags, -1, 0) };
        let word = match NonNull::new(page.cast::<AtomicI32>()) {
            Some(word) if page != libc::MAP_FAILED => word,
            _ => return Err(Errno::last()),
        };
        let mark = Self(word);
        // Miri has no such advice, and no children.
        if !cfg!(miri) {
            // SAFETY: the page that was just mapped; a child will find it zeroed.
            super::errno::check(unsafe { libc::madvise(page, len, libc::MADV_WIPEONFORK) })?;
        }
        // SAFETY: the page is mapped as long as `mark` lives.
        unsafe { word.as_ref() }.store(1, Ordering::Relaxed);
        Ok(mark)
    }

    /// 1 in the process that made the mark, and in each child more than in its parent.
    fn number(&self) -> i32 {
        // A child has those of its ancestors.
        static LAST: AtomicI32 = AtomicI32::new(1);
        // SAFETY: the page is mapped as long as `self` lives.
        let word = unsafe { self.0.as_ref() };
        match word.load(Ordering::Relaxed) {
            0 => {
                let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                let other = word.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed);
                other.err().unwrap_or(next)
            }
            number => number,
        }
    }

    /// True in a child that was forked (by whatever call) after the mark was made.
    pub(crate) fn is_child(&self) -> bool {
        // SAFETY: the page is mapped as long as `self` lives.
        unsafe { self.0.as_ref() }.load(Ordering::Relaxed) == 0
    }
}

impl Drop for ForkMark {
    fn drop(&mut self) {
        // SAFETY: exactly the page that `new` mapped; nothing refers to it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), page_size()) };
    }
}

/// Whether the kernel has at least this version.
pub(crate) fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    version_of(&release).is_some_and(|version| version >= (major, minor))
}

/// The first two numbers of a release such as `6.1.0-18-amd64`.
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The effective user id.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: always succeeds.
    unsafe { libc::geteuid() }
}

/// The process has privileges that its starter may lack (a setuid program, or one with file capabilities): then the
/// environment must not name files (secure_getenv(3)).
pub(crate) fn is_privileged() -> bool {
    // SAFETY: reads a word that the kernel gave to the process.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// False once all threads of the process have ended, whether it was reaped or not. The first thread may end long before
/// the others. True if unknown.
pub(crate) fn is_running(pid: i32) -> bool {
    if pid <= 0 {
        return true;
    }
    // SAFETY: signal 0 only checks.
    if unsafe { libc::kill(pid, 0) } != 0 {
        return Errno::last().0 != libc::ESRCH;
    }
    // A zombie answers signal 0.
    if !matches!(stat(pid), Some(Stat { state: 'Z' | 'X', .. })) {
        return true;
    }
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    threads.is_ok_and(|threads| threads.count() > 1)
}

/// Whether a thread of the process is, or may be, within process_vm_readv(2) or process_vm_writev(2). No thread is that
/// has ended or sleeps in another system call. Neither is one that is stopped (SIGSTOP, or a debugger) or frozen by a
/// control group: that happens only at the exit from, or the entry to, a system call.
pub(crate) fn may_copy(pid: i32) -> bool {
    if pid <= 0 || !proc_is_ours() {
        return true;
    }
    let Ok(mut threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    let elsewhere = |thread: &Path| {
        stat_in(&thread.join("stat"))
            .is_some_and(|stat| matches!(stat.state, 'T' | 't' | 'Z' | 'X'))
            || is_frozen(thread)
            || sleeps_elsewhere(thread)
    };
    threads.any(|thread| !thread.is_ok_and(|thread| elsewhere(&thread.path())))
}

/// Whether a thread is frozen: its state is that of any sleeping thread, but its wait channel differs
/// (kernel/signal.c, kernel/freezer.c; proc_pid_wchan(5)). The first function is mostly inlined into the second.
fn is_frozen(thread: &Path) -> bool {
    let place = std::fs::read_to_string(thread.join("wchan")).unwrap_or_default();
    matches!(place.as_str(), "do_freezer_trap" | "get_signal" | "__refrigerator")
}

/// Whether a thread sleeps in another system call (proc_pid_syscall(5): "running", or a number, -1 for none).
fn sleeps_elsewhere(thread: &Path) -> bool {
    let call = std::fs::read_to_string(thread.join("syscall")).unwrap_or_default();
    let number = call.split_whitespace().next().and_then(|number| number.parse().ok());
    number.is_some_and(|n: libc::c_long| {
        n != libc::SYS_process_vm_readv && n != libc::SYS_process_vm_writev
    })
}

/// From proc_pid_stat(5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stat {
    pub(super) state: char,
    /// When it was started, clock ticks after the start of the system.
    pub(super) started: Option<u64>,
}

/// Whether /proc has the numbers of this process's pid namespace (pid_namespaces(7)). A container may have that of the host,
/// where a number is that of another process.
pub(crate) fn proc_is_ours() -> bool {
    #[cfg(test)]
    if FOREIGN_PROC.get() {
        return false;
    }
    const OURS: u64 = 1 << 63;
    // The process that asked last, which may be an ancestor of this one, and the answer.
    static KNOWN: AtomicU64 = AtomicU64::new(0);
    let (known, here) = (KNOWN.load(Ordering::Relaxed), Home::here());
    if known & !OURS == here.word() {
        return known & OURS != 0;
    }
    // It may be mounted later.
    let Ok(itself) = std::fs::read_link("/proc/self") else { return false };
    let ours = itself.to_str().and_then(|name| name.parse().ok()) == Some(here.pid);
    KNOWN.store(here.word() | if ours { OURS } else { 0 }, Ordering::Relaxed);
    ours
}

#[cfg(test)]
thread_local! {
    /// For tests: as if /proc were that of another pid namespace.
    static FOREIGN_PROC: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// `None`: there is no such process, or it is not visible.
pub(super) fn stat(pid: i32) -> Option<Stat> {
    if !proc_is_ours() {
        return None;
    }
    stat_in(format!("/proc/{pid}/stat").as_ref())
}

fn stat_in(file: &Path) -> Option<Stat> {
    // One read: the kernel makes the whole text for each, and all processes of a node may look at each other.
    let mut text = [0; STAT_MAX];
    let len = std::fs::File::open(file).ok()?.read(&mut text).ok()?;
    stat_of(text.get(..len)?)
}

/// Room for all fields of proc_pid_stat(5): 52 numbers of at most 20 digits, and the name.
const STAT_MAX: usize = 2048;

fn stat_of(text: &[u8]) -> Option<Stat> {
    // The fields follow the name, which may have any bytes and ends with the last ')'.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(text.get(end + 1..)?).ok()?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some(Stat { state, started: fields.nth(18).and_then(|field| field.parse().ok()) })
}

/// Whether `fd`, which was just made, is beyond the first half of the descriptors that this process may have: those are
/// left to the application. The kernel assigns the lowest free number.
pub(crate) fn descriptors_are_scarce(fd: &OwnedFd) -> bool {
    descriptors_left(fd).is_some()
}

#[cfg(test)]
thread_local! {
    /// For tests: as if so many descriptors were left to this thread.
    pub(crate) static LEFT: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// How many descriptors this process may have beyond `fd`, which was just made; `None`: they are not scarce.
pub(crate) fn descriptors_left(fd: &OwnedFd) -> Option<usize> {
    #[cfg(test)]
    if let Some(left) = LEFT.get() {
        return Some(left);
    }
    let (limit, fd) = (descriptor_limit()?, fd.as_raw_fd() as usize);
    (fd >= limit / 2).then(|| limit.saturating_sub(fd + 1))
}

/// How old the limit may be that [`descriptor_limit`] tells, nanoseconds: links are made in bursts, and ask for each.
const LIMIT_NS: u64 = 10_000_000;

/// Most descriptors of this process, a short time ago; `None`: unlimited.
pub(crate) fn descriptor_limit() -> Option<usize> {
    static KNOWN: (AtomicU64, AtomicUsize) = (AtomicU64::new(0), AtomicUsize::new(0));
    let (until, known) = (&KNOWN.0, &KNOWN.1);
    let now = super::clock::now_ns();
    if now >= until.load(Ordering::Acquire) {
        // SAFETY: a live local.
        let limit = limit(|limit| unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, limit) });
        known.store(limit.unwrap_or(usize::MAX), Ordering::Relaxed);
        until.store(now + LIMIT_NS, Ordering::Release);
    }
    Some(known.load(Ordering::Relaxed)).filter(|limit| *limit < usize::MAX)
}

/// Yields the processor once.
pub(crate) fn yield_now() {
    // SAFETY: no arguments.
    unsafe { libc::sched_yield() };
}

/// When this returns true, every thread of this process has passed a full memory barrier. False if the
/// kernel does not support that.
pub(crate) fn barrier_for_all() -> bool {
    /// membarrier(2), since Linux 4.14.
    const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;
    // SAFETY: three integers; the call changes no memory.
    let call =
        |command: libc::c_int| unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) } == 0;
    call(PRIVATE_EXPEDITED) || (call(REGISTER_PRIVATE_EXPEDITED) && call(PRIVATE_EXPEDITED))
}

/// 64 unpredictable random bits.
pub(crate) fn random_u64() -> u64 {
    let mut value = 0u64;
    // SAFETY: eight bytes of a live local.
    let n = unsafe { libc::getrandom((&raw mut value).cast(), 8, libc::GRND_NONBLOCK) };
    if n == 8 { value } else { random_without_call() }
}

/// Random bits if a filter forbids getrandom(2): from /dev/urandom, or without that from the 16 random bytes that the
/// kernel gave to the process (AT_RANDOM, getauxval(3)), mixed with values that differ at each call.
#[cold]
fn random_without_call() -> u64 {
    let mut bytes = [0; 8];
    let file = std::fs::File::open("/dev/urandom");
    if file.and_then(|mut file| std::io::Read::read_exact(&mut file, &mut bytes)).is_ok() {
        return u64::from_ne_bytes(bytes);
    }
    random_of_process()
}

fn random_of_process() -> u64 {
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    // SAFETY: reads a word that the kernel gave to the process.
    let at = unsafe { libc::getauxval(libc::AT_RANDOM) };
    let seed = std::ptr::with_exposed_provenance::<[u8; 16]>(at as usize);
    // SAFETY: if not null, it points to 16 bytes of the initial stack, which stay.
    let seed = unsafe { seed.as_ref() }.copied().unwrap_or_default();
    let mut hash = std::hash::DefaultHasher::new();
    (seed, pid(), DRAWN.fetch_add(1, Ordering::Relaxed), super::clock::now_ns()).hash(&mut hash);
    hash.finish()
}

/// Yama's ptrace level, if the kernel has it. At level 1 only ancestors may attach unless a process allows more.
pub(crate) fn yama_ptrace_scope() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?.trim().parse().ok()
}

/// Allows any process of this user to attach; cross-memory attach needs that at Yama's level 1.
pub(crate) fn allow_attach_by_same_user() {
    static DONE: AtomicU64 = AtomicU64::new(0);
    let me = Home::here().word();
    if DONE.swap(me, Ordering::Relaxed) == me {
        return;
    }
    const PR_SET_PTRACER: libc::c_int = 0x59616d61;
    // SAFETY: PR_SET_PTRACER takes one integer; an error changes nothing.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_cache_is_the_largest() {
        let largest = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok().map(|caches| {
            let sizes =
                caches.filter_map(|c| std::fs::read_to_string(c.ok()?.path().join("size")).ok());
            sizes.filter_map(|text| text.trim().trim_end_matches('K').parse::<usize>().ok()).max()
        });
        assert_eq!(last_cache(), largest.flatten().map(|kib| kib * 1024));
    }

    #[test]
    fn processors_are_those_that_a_process_is_bound_to() {
        let mine = Processors::of(0).unwrap();
        assert!((1..=machine().1).contains(&mine.count()));
        assert!(mine.overlaps(&Processors::of(pid()).unwrap()));
        assert_eq!(Processors::of(-1), None);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let first = mine.0.iter().position(|word| *word != 0).unwrap();
                let mut one = vec![0; mine.0.len()];
                one[first] = 1 << mine.0[first].trailing_zeros();
                let one = Processors(one);
                let len = size_of_val(one.0.as_slice());
                // SAFETY: binds this thread only; a live buffer.
                let rc =
                    unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, len, one.0.as_ptr()) };
                assert_eq!(rc, 0);
                let bound = Processors::of(0).unwrap();
                assert_eq!((bound.count(), bound.overlaps(&one)), (1, true));
                assert!(!bound.overlaps(&Processors(vec![0; 2])));
            });
        });
    }

    /// What `child` returns in a forked process, 0 to 255.
    fn forked(child: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child does what is allowed after a fork, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: an integer argument.
            unsafe { libc::alarm(20) };
            let status = child();
            // SAFETY: ends the child.
            unsafe { libc::_exit(status) };
        }
        let mut status = -1;
        // SAFETY: the child made above, and a live local.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn a_process_is_at_home_whatever_its_id_where_its_descendants_are_not() {
        let here = Home::here();
        assert!(here.is_here());
        let in_child = forked(|| {
            let named = |home: Home| Home { pid: pid(), ..home };
            let mine = Home::here();
            let deeper = forked(|| i32::from(named(here).is_here() || named(mine).is_here()));
            i32::from(here.is_here() || named(here).is_here() || !mine.is_here()) | deeper << 1
        });
        assert_eq!(in_child, 0);
        assert!(here.is_here());
    }

    #[test]
    fn the_first_process_of_a_namespace_is_not_that_of_another() {
        const FORBIDDEN: i32 = 8;
        const UNMOUNTED: i32 = 16;
        // SAFETY: affects the calling process, a child of the test, and its children.
        let enter = |flags| unsafe { libc::unshare(flags) } == 0;
        let told = forked(|| {
            if !enter(libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS) {
                return FORBIDDEN;
            }
            forked(|| {
                let home = Home::here();
                let (proc, none) = (c"proc".as_ptr(), std::ptr::null());
                // SAFETY: C strings; the mount namespace is that of this child and its children.
                let mounted = unsafe { libc::mount(proc, c"/proc".as_ptr(), proc, 0, none) } == 0;
                if pid() != 1 || proc_is_ours() != mounted || !enter(libc::CLONE_NEWPID) {
                    return FORBIDDEN;
                }
                let same = || i32::from(home.is_here() || proc_is_ours());
                let told = forked(|| if pid() == 1 { same() } else { FORBIDDEN });
                if mounted { told } else { told | UNMOUNTED }
            })
        });
        if told & FORBIDDEN != 0 {
            eprintln!("skipped: no pid namespaces here");
        } else {
            if told & UNMOUNTED != 0 {
                eprintln!("the one of /proc is not checked: it cannot be mounted here");
            }
            assert_eq!(told & !UNMOUNTED, 0);
        }
    }

    #[test]
    fn kernels_have_an_order() {
        assert!(kernel_is_at_least(3, 10) && !kernel_is_at_least(1000, 0));
        assert_eq!(version_of("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(version_of("5.12-rc1"), Some((5, 12)));
        assert_eq!((version_of(""), version_of("six.one"), version_of("6")), (None, None, None));
    }

    /// Whether `may_copy` returns `copies` within a time.
    fn becomes(pid: i32, copies: bool) -> bool {
        let began = std::time::Instant::now();
        while may_copy(pid) != copies && began.elapsed().as_secs() < 20 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        may_copy(pid) == copies
    }

    #[test]
    fn a_process_that_does_not_go_on_copies_nothing() {
        let endless = ["-c", "while :; do :; done"];
        let mut child = std::process::Command::new("sh").args(endless).spawn().unwrap();
        let pid = child.id() as i32;
        assert!(becomes(pid, true));
        // SAFETY: a child of this process.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        assert!(becomes(pid, false) && is_running(pid));
        // SAFETY: a child of this process.
        unsafe { libc::kill(pid, libc::SIGCONT) };
        assert!(becomes(pid, true));
        // Without the right to make control groups, freezing is not tested.
        for (root, file, on, off) in [
            ("/sys/fs/cgroup", "cgroup.freeze", "1", "0"),
            ("/sys/fs/cgroup/unified", "cgroup.freeze", "1", "0"),
            ("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED"),
        ] {
            let group = Path::new(root).join(format!("udrv-test-{pid}"));
            let is_group = Path::new(root).join("cgroup.procs").exists();
            if !is_group || std::fs::create_dir(&group).is_err() {
                continue;
            }
            let set = |file: &str, value: &str| std::fs::write(group.join(file), value).is_ok();
            let joined = set("cgroup.procs", &pid.to_string());
            let froze = joined && set(file, on) && becomes(pid, false);
            let thawed = joined && set(file, off) && becomes(pid, true);
            let left = std::fs::write(format!("{root}/cgroup.procs"), pid.to_string());
            std::fs::remove_dir(&group).unwrap();
            assert!(!joined || left.is_err() || froze && thawed, "{root}: {froze} {thawed}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(may_copy(pid) && may_copy(0));
    }

    #[test]
    fn files_of_other_processes_tell_nothing() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(becomes(pid, false) && stat(pid).is_some());
        FOREIGN_PROC.set(true);
        assert!(may_copy(pid) && stat(pid).is_none() && is_running(pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_running(pid));
        FOREIGN_PROC.set(false);
        assert!(stat(super::pid()).is_some());
    }

    #[test]
    fn a_process_that_sleeps_in_another_call_copies_nothing() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let sleeps = becomes(child.id() as i32, false);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(sleeps);
    }

    #[test]
    fn randomness_has_three_sources() {
        for draw in [random_u64, random_without_call, random_of_process] {
            let mut drawn: Vec<u64> = (0..1000).map(|_| draw()).collect();
            drawn.sort_unstable();
            drawn.dedup();
            assert_eq!(drawn.len(), 1000);
            assert!(drawn.iter().fold(0, |all, one| all | one) == u64::MAX);
        }
    }

    #[test]
    fn the_fields_follow_the_name_whatever_that_is() {
        let text = |name: &[u8]| {
            let fields = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20\n";
            [b"17 (", name, b")", fields.as_bytes()].concat()
        };
        for name in [&b"cat"[..], b"a) R 1", b"\xff\xfe", b""] {
            assert_eq!(stat_of(&text(name)), Some(Stat { state: 'S', started: Some(4711) }));
        }
        assert_eq!(stat_of(b"17 (cat) S 1 2"), Some(Stat { state: 'S', started: None }));
        assert_eq!((stat_of(b"17 (cat)"), stat_of(b"")), (None, None));
        let longest = format!("17 ({}) S{}", "x".repeat(63), " 18446744073709551615".repeat(50));
        assert!(longest.len() < STAT_MAX);
        assert!(stat(pid()).is_some_and(|stat| stat.started.is_some()));
    }

    #[test]
    fn a_process_outlives_its_first_thread() {
        // SAFETY: the child does only what is allowed after a fork with two threads, and ends by itself.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let minute = std::time::Duration::from_secs(60);
            std::thread::spawn(move || std::thread::sleep(minute));
            // SAFETY: ends this thread alone.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        assert!(pid > 0);
        let state = || stat(pid).map(|stat| stat.state);
        let began = std::time::Instant::now();
        while state() != Some('Z') && began.elapsed().as_secs() < 20 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!((state(), is_running(pid)), (Some('Z'), true));
        // SAFETY: a child of this process.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        while is_running(pid) && began.elapsed().as_secs() < 20 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(!is_running(pid), "all of it has ended");
        // SAFETY: a child of this process.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    }

    #[test]
    fn a_zombie_is_not_running() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(is_running(pid));
        child.kill().unwrap();
        let began = std::time::Instant::now();
        while is_running(pid) && began.elapsed().as_secs() < 5 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(!is_running(pid), "ended, not reaped");
        child.wait().unwrap();
        assert!(!is_running(pid), "reaped");
        assert!(is_running(0), "unknown");
    }
}
