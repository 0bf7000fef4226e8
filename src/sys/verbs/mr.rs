//! Registrations of the application's memory.

use super::device::Pd;
use super::owned::Owned;
use crate::sys::errno::{Errno, Result};
use crate::sys::made_once::MadeOnce;
use crate::sys::process;
use crate::sys::rv::{Domain, Failure, Refusal, Region, UserCache};
use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_RELAXED_ORDERING,
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_access_flags, ibv_mr,
};
use std::ffi::CStr;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;

/// What a device may do with memory; each of the first three includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Permission {
    Read,
    Write,
    /// Write it for peers that know the remote key.
    RemoteWrite,
    /// Read it, or write it, or both, for peers that know the remote key; nothing else.
    Exposed {
        reads: bool,
        writes: bool,
    },
}

/// Registers memory with a protection domain.
#[derive(Clone, Debug)]
pub(crate) struct Registrar {
    // The module's registrations end before their domain.
    module: Option<Arc<UserCache>>,
    pd: Arc<Pd>,
    relaxed: bool,
    on_demand: bool,
}

/// A registration; it ends when this is dropped, in the process that made it. One that the rv module keeps is only given back.
#[derive(Debug)]
pub(crate) struct Registration {
    made: Made,
    _pd: Arc<Pd>,
}

#[derive(Debug)]
enum Made {
    ByLibrary(Owned<ibv_mr>),
    ByModule(Region),
}

impl Permission {
    /// `relaxed`: the device may place the bytes in any order on its bus (PCI Express, relaxed ordering). A completion
    /// comes behind them all the same. Never where peers read: flush reads (PROTOCOL.md §7.16, rule 2) rely on the order
    /// of the device's own requests.
    fn access(self, relaxed: bool) -> ibv_access_flags {
        let any_order = if relaxed { IBV_ACCESS_RELAXED_ORDERING } else { 0 };
        // Remote write access requires local write access (ibv_reg_mr.3).
        let write = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        match self {
            Self::Read => any_order,
            Self::Write => any_order | IBV_ACCESS_LOCAL_WRITE,
            Self::RemoteWrite => any_order | write,
            Self::Exposed { reads, writes } => {
                let read = if reads { IBV_ACCESS_REMOTE_READ } else { 0 };
                read | if writes { write } else { 0 }
            }
        }
    }
}

impl Registrar {
    pub(super) fn new(pd: &Arc<Pd>) -> Self {
        Self { module: None, pd: pd.clone(), relaxed: false, on_demand: false }
    }

    /// The same, with registrations that the rv module keeps for the next use, `bytes` at most. Errors: why it cannot.
    pub(crate) fn kept_by_module(self, bytes: usize) -> std::result::Result<Self, Refusal> {
        // SAFETY: a live domain and its context, whose members do not change; the name is a C string.
        let (command_fd, handle, device) = unsafe {
            let context = self.pd.context.as_ptr();
            let device = CStr::from_ptr((&raw const (*(*context).device).name).cast());
            ((*context).cmd_fd, (*self.pd.as_ptr()).handle, device)
        };
        let device = device.to_string_lossy().into_owned();
        let module = UserCache::open(Domain { device, command_fd, handle }, bytes)?;
        Ok(Self { module: Some(Arc::new(module)), ..self })
    }

    /// The rv module, if it keeps registrations.
    pub(crate) fn module(&self) -> Option<&UserCache> {
        self.module.as_deref()
    }

    /// The same, for memory whose bytes may be placed in any order before the completion, if `relaxed`. Older libraries
    /// and devices ignore that.
    pub(crate) fn in_any_order(self, relaxed: bool) -> Self {
        Self { relaxed, ..self }
    }

    /// The same, with registrations that the device pages on demand, if `on_demand`: it has to be able to
    /// ([`RcPort::pages_on_demand`](super::RcPort::pages_on_demand)).
    pub(crate) fn on_demand(self, on_demand: bool) -> Self {
        Self { on_demand, ..self }
    }

    /// Whether its registrations show at any time what is mapped at their addresses then.
    pub(crate) fn follows(&self) -> bool {
        self.on_demand
    }

    /// Registers `len` bytes at `addr`: the pages are pinned for the device, unless it pages on demand. Registering alone moves no
    /// byte; code that gives the remote key out is responsible for the consequences. Errors: ENOMEM, also if
    /// RLIMIT_MEMLOCK is exhausted; EFAULT if there is no memory, or none with this permission; the
    /// driver's.
    pub(crate) fn register(
        &self,
        addr: usize,
        len: usize,
        permission: Permission,
    ) -> Result<Registration> {
        if addr.checked_add(len).is_none() {
            return Err(Errno(libc::EFAULT));
        }
        let (verbs, at) = (self.pd.context.verbs, with_exposed_provenance_mut(addr));
        // ibv_reg_mr takes no optional access: kernels before 5.7 refuse it, and only the newer function leaves it out then.
        let newer = verbs.reg_mr_iova2.filter(|_| self.relaxed && !self.on_demand);
        let paged = if self.on_demand { IBV_ACCESS_ON_DEMAND } else { 0 };
        let access = permission.access(newer.is_some()) | paged;
        // SAFETY: a live domain, which the registration holds. The kernel checks the addresses.
        let mr = unsafe {
            let raw = match newer {
                Some(register) => register(self.pd.as_ptr(), at, len, addr as u64, access),
                None => (verbs.reg_mr)(self.pd.as_ptr(), at, len, access as i32),
            };
            Owned::new(raw, verbs.dereg_mr)
        }?;
        Ok(Registration { made: Made::ByLibrary(mr), _pd: self.pd.clone() })
    }

    /// The same for a use of memory that others may follow: the rv module keeps it, if it keeps registrations. Where it does
    /// not take this memory, the registration ends with this use.
    pub(crate) fn register_for_use(
        &self,
        addr: usize,
        len: usize,
        permission: Permission,
    ) -> Result<Registration> {
        let Some(module) = &self.module else { return self.register(addr, len, permission) };
        // The module passes the rights to the driver as they are, and drivers before Linux 5.7 do not know this one.
        let access = permission.access(self.relaxed && knows_any_order());
        match module.register(addr as u64, len as u64, access) {
            Ok(region) if region.iova() == addr as u64 => {
                Ok(Registration { made: Made::ByModule(region), _pd: self.pd.clone() })
            }
            // The caller may ask for less.
            Err(Failure { errno: Errno(libc::EFAULT), .. }) => Err(Errno(libc::EFAULT)),
            _ => self.register(addr, len, permission),
        }
    }

    /// Registers `len` bytes of a dma-buf from `offset` on, for requests that name them by `addr`: that address must be as far
    /// into its page as the offset. The descriptor is needed for this call only. Errors: ENOSYS for a library without
    /// that (before rdma-core 34), EOPNOTSUPP for a driver, or a kernel before 5.12; the driver's.
    pub(crate) fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        (offset, addr, len): (u64, u64, usize),
        permission: Permission,
    ) -> Result<Registration> {
        let verbs = self.pd.context.verbs;
        let register = verbs.reg_dmabuf_mr.ok_or(Errno(libc::ENOSYS))?;
        let access = permission.access(self.relaxed) as i32;
        // SAFETY: a live domain, which the registration holds, and a live descriptor. The kernel checks the range.
        let mr = unsafe {
            let raw = register(self.pd.as_ptr(), offset, len, addr, fd.as_raw_fd(), access);
            Owned::new(raw, verbs.dereg_mr)
        }?;
        Ok(Registration { made: Made::ByLibrary(mr), _pd: self.pd.clone() })
    }

    /// Whether memory of dma-bufs may be registered: what the kernel says to a descriptor that is none. Errors: as
    /// [`Self::register_dmabuf`].
    pub(crate) fn takes_dmabufs(&self) -> Result<()> {
        let verbs = self.pd.context.verbs;
        let register = verbs.reg_dmabuf_mr.ok_or(Errno(libc::ENOSYS))?;
        // SAFETY: a live domain. No descriptor is -1, so nothing is registered.
        let made =
            unsafe { Owned::new(register(self.pd.as_ptr(), 0, PROBE, 0, -1, 0), verbs.dereg_mr) };
        match made {
            Err(errno @ Errno(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS)) => {
                Err(errno)
            }
            _ => Ok(()),
        }
    }
}

/// Bytes of a registration that is not made.
const PROBE: usize = 4096;

impl Registration {
    /// The local key, for queue pairs of this process.
    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        match &self.made {
            // SAFETY: a live region; the member does not change.
            Made::ByLibrary(mr) => unsafe { (*mr.as_ptr()).lkey },
            Made::ByModule(region) => region.lkey(),
        }
    }

    /// The remote key, for queue pairs of peers.
    #[inline]
    pub(crate) fn rkey(&self) -> u32 {
        match &self.made {
            // SAFETY: a live region; the member does not change.
            Made::ByLibrary(mr) => unsafe { (*mr.as_ptr()).rkey },
            Made::ByModule(region) => region.rkey(),
        }
    }
}

fn knows_any_order() -> bool {
    static KNOWS: MadeOnce<bool> = MadeOnce::new();
    *KNOWS.get_or_make(|| process::kernel_is_at_least(5, 7))
}

/// Whether devices reach their speed on this host only where the order on the bus is relaxed: AMD's processors, as UCX
/// (ucs_cpu_prefer_relaxed_order) and NCCL find.
pub(crate) fn prefers_any_order() -> bool {
    static PREFERS: MadeOnce<bool> = MadeOnce::new();
    *PREFERS.get_or_make(|| {
        let mut first = Vec::new();
        let file = std::fs::File::open("/proc/cpuinfo");
        let read = file.and_then(|file| file.take(4096).read_to_end(&mut first));
        read.is_ok() && is_of_amd(&String::from_utf8_lossy(&first))
    })
}

fn is_of_amd(cpuinfo: &str) -> bool {
    let vendor = cpuinfo.lines().find(|line| line.starts_with("vendor_id"));
    vendor.is_some_and(|line| line.ends_with("AuthenticAMD") || line.ends_with("HygonGenuine"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_never_relaxed_where_peers_read() {
        for permission in [Permission::Read, Permission::Write, Permission::RemoteWrite] {
            let (strict, relaxed) = (permission.access(false), permission.access(true));
            assert_eq!(relaxed, strict | IBV_ACCESS_RELAXED_ORDERING, "{permission:?}");
            assert_eq!(strict & IBV_ACCESS_RELAXED_ORDERING, 0);
        }
        for (reads, writes) in [(true, false), (true, true), (false, true)] {
            let exposed = Permission::Exposed { reads, writes };
            assert_eq!(exposed.access(true), exposed.access(false));
        }
    }

    #[test]
    fn processors_by_their_vendor() {
        let text = |vendor| format!("processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 25\n");
        assert!(is_of_amd(&text("AuthenticAMD")) && is_of_amd(&text("HygonGenuine")));
        assert!(!is_of_amd(&text("GenuineIntel")) && !is_of_amd("processor\t: 0\n"));
    }
}
