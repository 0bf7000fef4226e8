//! Registrations for queue pairs of the process, which the module caches ("user MRs").
//!
//! Each use of memory asks the module for a registration and gives it back. The module keeps it registered, and finds it
//! for the next use of a part of it with the same rights. An MMU notifier of the kernel tells it of every change of the
//! mappings, whatever made it, so the process needs no userfaultfd. What the module promises, as its source says
//! (`rv_mr_cache.c`, `rv_mr.c`):
//!
//! | what happens | what the module does |
//! |---|---|
//! | memory that is not in use is unmapped, replaced or discarded | finds its registrations no more when that returns, and ends them soon |
//! | memory that is in use is | from 1.6 on hides the registration, which ends with its last use; until then the same memory is refused with EBUSY |
//! | the same up to 1.5 | keeps the registration of the old pages, and finds it again: not used here ([`Refusal::Stale`]) |
//! | more than its cache holds is registered | ends those not in use, the least recently used first; ENOMEM if all are in use |
//! | another process asks, such as a forked child | EINVAL |
//!
//! It registers in the protection domain that the descriptor of the device's context and a handle name, as a driver's
//! library would. One attachment serves one domain, because the module does not compare domains when it looks for a
//! registration.
//!
//! **The order of the ends.** A registration uses the domain, and counts as its user: it has to end before it. With one
//! thread in the process the module holds no reference to the context's descriptor (`fdget`). When such a process
//! ends without closing anything, the kernel closes files in the reverse order of their numbers (`close_files`,
//! `task_work_run`), so the module's number is the higher one.

use super::abi::*;
use super::failure::{Failure, Refusal};
use super::module::{Found, Line, Region, name_of_device, uninterrupted};
use crate::sys::errno::Errno;
use crate::sys::pages::Pages;
use crate::sys::process::{self, Home};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A protection domain of the process: its device, the descriptor of its context, and its handle there.
#[derive(Clone, Debug)]
pub(crate) struct Domain {
    pub(crate) device: String,
    pub(crate) command_fd: RawFd,
    pub(crate) handle: u32,
}

/// `struct irdma_mem_reg_req`: ordinary memory. Other drivers ignore it, or want zeroes.
static DRIVER_DATA: [u64; 1] = [0];

/// The module's cache for a domain. All that is not in use ends with it, in the process that attached.
#[derive(Debug)]
pub(crate) struct UserCache {
    line: Arc<Line>,
    domain: Domain,
    bytes: u64,
    /// Requests for more than that.
    too_long: AtomicU64,
}

impl UserCache {
    /// Whether this host has the module.
    pub(crate) fn is_there() -> bool {
        PATH.to_str().is_ok_and(|path| std::path::Path::new(path).exists())
    }

    /// Attaches to the module, which may keep `bytes`, a MiB at least, and tries what it promises. Errors: why it is unusable.
    pub(crate) fn open(domain: Domain, bytes: usize) -> Result<Self, Refusal> {
        Self::over(Found::open_above(domain.command_fd)?, domain, bytes)
    }

    pub(super) fn over(found: Found, domain: Domain, bytes: usize) -> Result<Self, Refusal> {
        if found.capability & CAN_USER_MR == 0 {
            return Err(Refusal::NoUserRegistrations);
        }
        let question = Attach {
            device: name_of_device(&domain.device)?,
            mode: MODE_USER,
            cache_mib: u32::try_from(bytes >> 20).unwrap_or(u32::MAX).max(1), // 0: the module's default
            ..Attach::default()
        };
        let line = Line { kernel: found.kernel, minor: found.minor, home: Home::here() };
        let Attached { cache_mib, .. } = line.attach(&question)?;
        let bytes = u64::from(cache_mib) << 20;
        let cache = Self { line: Arc::new(line), domain, bytes, too_long: AtomicU64::new(0) };
        cache.prove()?;
        Ok(cache)
    }

    /// Checks with a page of our own that no registration is found of memory that was replaced, while it was in use or later.
    fn prove(&self) -> Result<(), Refusal> {
        let page = Pages::anonymous(process::page_size()).map_err(Refusal::NoMemory)?;
        let (addr, len) = (page.base().addr().get() as u64, page.len() as u64);
        let register = || uninterrupted(|| self.register(addr, len, ACCESS_LOCAL_WRITE));
        for used in [true, false, true] {
            let region = register()?;
            if region.iova() != addr {
                return Err(Refusal::Elsewhere);
            }
            let held = used.then_some(region);
            self.line.kernel.renew(&page).map_err(Refusal::NoMemory)?;
            drop(held);
        }
        drop(register()?);
        match uninterrupted(|| self.line.cache_statistics())?.hits {
            0 => Ok(()),
            _ => Err(Refusal::Stale { minor: self.line.minor }),
        }
    }

    /// Registers memory with the rights `access` (`enum ibv_access_flags`), or finds it registered; whole pages. If there is no
    /// room, registrations that are not in use end first. Errors: EBUSY (see above); ENOMEM, also for
    /// more than it keeps; EFAULT: there is no such memory, or none with these rights; the driver's.
    pub(crate) fn register(&self, addr: u64, len: u64, access: u32) -> Result<Region, Failure> {
        // The module would pin all of it, end everything that is not in use, and then refuse.
        let page = process::page_size() as u64;
        if addr.saturating_add(len).div_ceil(page) - addr / page > self.bytes / page {
            self.too_long.fetch_add(1, Ordering::Relaxed);
            return Err(Failure::new(REG_MEM, Errno(libc::ENOMEM)));
        }
        let question = RegMem {
            pd: self.domain.handle,
            command_fd: self.domain.command_fd,
            addr,
            len,
            access,
            driver_len: size_of_val(&DRIVER_DATA) as u64,
            driver_data: (&raw const DRIVER_DATA).expose_provenance() as u64,
            ..RegMem::default()
        };
        match self.line.register(question) {
            Err(Failure { errno: Errno(libc::ENOMEM), .. }) if self.let_go(len) => {
                self.line.register(question)
            }
            result => result,
        }
    }

    /// Ends at least so many bytes of registrations that are not in use. False: there are none.
    pub(crate) fn let_go(&self, bytes: u64) -> bool {
        self.line.evict_amount(bytes).is_ok()
    }

    /// The most that the module keeps, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The version of its ABI behind the 1.
    pub(crate) fn minor(&self) -> u16 {
        self.line.minor
    }

    /// How often memory was found registered, and how often it was not.
    pub(crate) fn found(&self) -> (u64, u64) {
        let known = self.line.cache_statistics().unwrap_or_default();
        let too_long = self.too_long.load(Ordering::Relaxed);
        (known.hits, known.misses + known.full + known.failed + too_long)
    }
}

impl Drop for UserCache {
    fn drop(&mut self) {
        // A forked child may have a copy of the descriptor, so that it does not end here.
        self.let_go(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::super::double::Fabric;
    use super::*;

    const LEN: usize = 3 * 4096;
    const WRITE: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
    const ATTACH: u8 = 0xf1;
    const REG_MEM: u8 = 0xf3;
    const CACHE_STATS: u8 = 0xf7;

    fn memory(byte: u8) -> Pages {
        let memory = Pages::anonymous(LEN).unwrap();
        fill(&memory, byte);
        memory
    }

    fn fill(memory: &Pages, byte: u8) {
        // SAFETY: the mapping, to which no reference exists.
        unsafe { memory.base().write_bytes(byte, LEN) };
    }

    /// As when an application unmaps memory, and maps other memory there.
    fn replace(fabric: &Fabric, memory: &Pages, byte: u8) {
        fabric.changes(at(memory), LEN as u64);
        memory.renew().unwrap();
        fill(memory, byte);
    }

    fn at(memory: &Pages) -> u64 {
        memory.base().addr().get() as u64
    }

    fn refused(fabric: &Fabric) -> String {
        fabric.cache(0, 1 << 20).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn memory_that_is_used_again_is_found() {
        let fabric = Fabric::new(1);
        let cache = fabric.cache(0, 5 << 20).unwrap();
        assert_eq!((cache.bytes(), cache.minor(), cache.found()), (5 << 20, 6, (0, 4)));
        let memory = memory(7);
        let first = cache.register(at(&memory), LEN as u64, WRITE).unwrap();
        let keys = (first.lkey(), first.rkey());
        drop(first);
        assert_eq!(fabric.state().in_use(), 0, "each use gives it back");
        let part = cache.register(at(&memory) + 5000, 100, WRITE).unwrap();
        assert_eq!((part.lkey(), part.rkey()), keys);
        assert_eq!(part.iova(), at(&memory) + 5000);
        assert_eq!(fabric.read(part.lkey(), at(&memory) + 5000, 100), [7; 100]);
        let other = cache.register(at(&memory), LEN as u64, 0).unwrap();
        assert_ne!(other.lkey(), part.lkey(), "other rights are another registration");
        assert_eq!(cache.found(), (1, 6));
        drop((part, other, cache));
        assert_eq!(fabric.state().cached(), 0);
    }

    #[test]
    fn memory_that_was_replaced_is_registered_anew() {
        let fabric = Fabric::new(1);
        let cache = fabric.cache(0, 1 << 20).unwrap();
        let memory = memory(1);
        let get = || cache.register(at(&memory), LEN as u64, WRITE);
        let shows = |region: &Region| fabric.read(region.lkey(), at(&memory), 8);
        drop(get().unwrap());
        replace(&fabric, &memory, 2);
        let held = get().unwrap();
        assert_eq!(shows(&held), [2; 8]);
        replace(&fabric, &memory, 3);
        assert_eq!(get().unwrap_err().errno, Errno(libc::EBUSY), "while another use is not over");
        drop(held);
        assert_eq!(shows(&get().unwrap()), [3; 8]);
    }

    #[test]
    fn a_module_that_keeps_what_was_replaced_is_not_used() {
        for minor in 3..=5 {
            let fabric = Fabric::new(1);
            fabric.set_abi(0, minor, CAN_USER_MR | CAN_EVICT);
            let why = refused(&fabric);
            assert!(why.contains(&format!("its ABI 1.{minor} keeps")), "{why}");
            assert_eq!(fabric.state().cached(), 0);
        }
        let fabric = Fabric::new(1);
        fabric.set_abi(0, MINOR + 1, CAN_USER_MR | CAN_EVICT);
        assert!(fabric.cache(0, 1 << 20).is_ok());
    }

    #[test]
    fn a_module_that_registers_nothing_for_a_process_is_not_used() {
        let fabric = Fabric::new(1);
        fabric.set_abi(0, MINOR, CAN_EVICT);
        assert!(refused(&fabric).contains("enable_user_mr"));
        fabric.set_abi(0, 2, CAN_USER_MR);
        assert!(refused(&fabric).contains("1.2 is older"));
        let fabric = Fabric::new(1);
        for (request, errno, text) in [
            (0xf1, libc::EINVAL, "refuses the settings"),
            (0xf1, libc::ENODEV, "does not know the device"),
            (REG_MEM, libc::EINVAL, "REG_MEM"),
            (REG_MEM, libc::EOPNOTSUPP, "REG_MEM"),
        ] {
            fabric.fail(0, request, errno, 1);
            let why = refused(&fabric);
            assert!(why.contains(text), "{why}");
        }
        for (domain, errno) in [
            (Domain { command_fd: 5, ..fabric.domain(0) }, libc::EFAULT),
            (Domain { handle: 5, ..fabric.domain(0) }, libc::EINVAL),
            (Domain { device: "rxe1".to_owned(), ..fabric.domain(0) }, libc::ENODEV),
        ] {
            let made = UserCache::over(fabric.open(0).unwrap(), domain, 1 << 20);
            let failed = |refusal| match refusal {
                Refusal::Failed(failure) => failure.errno,
                other => panic!("{other}"),
            };
            assert_eq!(made.map(drop).map_err(failed), Err(Errno(errno)));
        }
    }

    #[test]
    fn registrations_that_are_not_in_use_make_room() {
        const MIB: usize = 1 << 20;
        let fabric = Fabric::new(1);
        let cache = fabric.cache(0, 2 * MIB).unwrap();
        let memory = Pages::anonymous(4 * MIB).unwrap();
        let get = |n: usize| cache.register(at(&memory) + (n * MIB) as u64, MIB as u64, WRITE);
        let (first, _) = (get(0).unwrap(), drop(get(1).unwrap()));
        let third = get(2).unwrap();
        assert_eq!(fabric.state().cached(), 2, "the module ends the second itself");
        assert_eq!(get(3).map(drop).unwrap_err().errno, Errno(libc::ENOMEM));
        drop(third);
        // The process may lock no more, or the device has no room.
        fabric.fail(0, REG_MEM, libc::ENOMEM, 1);
        drop(get(3).unwrap());
        assert!(cache.let_go(1) && !cache.let_go(1), "the first is in use");
        drop(first);
        drop(cache);
        assert_eq!(fabric.state().cached(), 0);
    }

    #[test]
    fn memory_longer_than_the_cache_leaves_it_as_it_is() {
        const MIB: u64 = 1 << 20;
        let fabric = Fabric::new(1);
        let cache = fabric.cache(0, 2 << 20).unwrap();
        let memory = Pages::anonymous(4 << 20).unwrap();
        let get = |from: u64, len: u64| {
            let region = cache.register(at(&memory) + from, len, WRITE);
            region.map(drop).map_err(|failure| failure.errno)
        };
        assert_eq!(get(3 * MIB, MIB), Ok(()));
        let before = cache.found();
        fabric.fail(0, REG_MEM, libc::EIO, 1);
        for (from, len) in [(0, 3 * MIB), (4095, 2 * MIB), (0, u64::MAX)] {
            assert_eq!(get(from, len), Err(Errno(libc::ENOMEM)), "the module is not asked");
        }
        assert_eq!(get(3 * MIB, MIB), Err(Errno(libc::EIO)));
        assert_eq!(get(3 * MIB, MIB), Ok(()));
        assert_eq!(cache.found(), (before.0 + 1, before.1 + 3), "it is kept");
        assert_eq!(get(0, 2 * MIB), Ok(()), "all of it");
    }

    #[test]
    fn signals_do_not_keep_the_module_from_being_used() {
        let fabric = Fabric::new(1);
        for request in [ATTACH, REG_MEM, CACHE_STATS] {
            fabric.fail(0, request, libc::EINTR, 3);
            assert_eq!(fabric.cache(0, 1 << 20).map(drop), Ok(()));
        }
        fabric.fail(0, ATTACH, libc::EINTR, 100);
        assert!(refused(&fabric).contains("a signal came"), "not for ever");
        let fabric = Fabric::new(1);
        fabric.fail(0, ATTACH, libc::EINTR, 3);
        assert!(fabric.open(0).unwrap().attach(&fabric.here(0)).is_ok());
    }

    #[test]
    fn a_forked_child_has_no_part_in_it() {
        let fabric = Fabric::new(1);
        let parent = fabric.cache(0, 1 << 20).unwrap();
        let memory = memory(1);
        drop(parent.register(at(&memory), LEN as u64, WRITE).unwrap());
        let found = fabric.open(0).unwrap();
        let line = Line { kernel: found.kernel, minor: found.minor, home: Home::elsewhere() };
        let (line, domain, bytes) = (Arc::new(line), fabric.domain(0), 1 << 20);
        let child = UserCache { line, domain, bytes, too_long: AtomicU64::new(0) };
        let refused = child.register(at(&memory), LEN as u64, WRITE).map(drop).unwrap_err();
        assert_eq!(refused.errno, Errno(libc::EOWNERDEAD));
        let before = fabric.state().cached();
        drop(child);
        assert_eq!(fabric.state().cached(), before, "the parent's");
    }
}
