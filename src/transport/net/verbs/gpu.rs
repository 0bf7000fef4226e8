//! Memory of GPUs that an RDMA device accesses itself (GPUDirect RDMA), registered by the descriptor of a dma-buf. Where that
//! fails for more than want of room, the memory is registered by its address, if a module of the kernel is loaded that knows it
//! (nvidia-peermem).
//!
//! A registration of a whole allocation is kept for later messages ([`Allocations`]) under the number that the driver gives an
//! allocation (BUFFER_ID), which no other one of the process has. The driver is asked for the number of the address each time,
//! so memory that was freed, and whose address another allocation has since, is never taken for it. Memory of cuMemCreate is told
//! by MEMORY_BLOCK_ID too. nvidia-peermem ends a registration when its memory is freed, so what is kept of it is of no use then, but
//! harmless. It may end one when memory of cuMemCreate is unmapped too, and the same block may be mapped there again: what is
//! registered of such memory by its address has the bytes of one request, and is not kept.
//!
//! Not run on a GPU; on doubles of the driver and of the device only.

use super::allocations::Allocations;
use crate::sys::cuda::{Allocation, Cuda, Failure, Flush};
use crate::sys::verbs::{Permission, Registrar, Registration, has_peer_memory};
use crate::sys::{Errno, clock};
use crate::telemetry::log;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

/// The memory of GPUs that is registered with one protection domain.
pub(super) struct Gpus {
    registrar: Registrar,
    /// Registers dma-bufs.
    dmabufs: bool,
    /// Registers memory of GPUs by its address.
    by_address: bool,
    /// For requests of messages: what it allows.
    permission: Permission,
    /// Whole allocations; `None`: none is kept, and each request registers its bytes, as it does of memory that might not be told
    /// from other memory at its address.
    kept: Option<Mutex<Allocations<Allocation, Registered>>>,
}

/// Registered memory of a GPU.
#[derive(Clone, Debug)]
pub(super) struct Registered {
    pub(super) registration: Arc<Registration>,
    /// The memory to flush when the device has written it.
    pub(super) flush: Option<Flush>,
    /// It may end although the allocation stays.
    pub(super) fades: bool,
}

/// Why memory was not registered.
#[derive(Clone, Copy, Debug)]
enum Refused {
    ByCuda(Failure),
    ByDevice(Errno),
    OfAddress(Errno),
}

impl Refused {
    fn tell(&self) {
        match self {
            Self::ByCuda(failure) => log::limited!(
                cause: failure.0,
                "CUDA answers {} where a dma-buf of device memory is asked for",
                failure.0
            ),
            Self::OfAddress(errno) => log::limited!(
                cause: errno.0,
                "an RDMA device does not register memory of a GPU by nvidia-peermem: {errno}"
            ),
            Self::ByDevice(_) => {}
        }
    }

    /// It may be otherwise later.
    fn is_shortage(self) -> bool {
        Errno::from(self) == Errno(libc::ENOMEM)
    }
}

impl From<Refused> for Errno {
    /// ENOMEM where it may be otherwise later.
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::ByCuda(Failure::NOT_SUPPORTED) => Self(libc::EOPNOTSUPP),
            Refused::ByCuda(failure) if failure.is_shortage() => Self(libc::ENOMEM),
            Refused::ByCuda(_) => Self(libc::EIO),
            Refused::ByDevice(errno) | Refused::OfAddress(errno)
                if errno.is_shortage() || matches!(errno.0, libc::EINTR | libc::EAGAIN) =>
            {
                Self(libc::ENOMEM)
            }
            Refused::ByDevice(errno) => errno,
            // The module does not know it, and will not.
            Refused::OfAddress(_) => Self(libc::EOPNOTSUPP),
        }
    }
}

impl Gpus {
    /// With a device that takes memory of GPUs; logs what it does. `None`: it does not, or is not to (`wanted`), or nobody
    /// has loaded CUDA. `offers`: peers read some of the memory. `keeps`: registrations may be kept (FI_UDRV_CACHE).
    pub(super) fn new(
        registrar: Registrar,
        name: &str,
        (wanted, offers): (bool, bool),
        keeps: bool,
    ) -> Option<Self> {
        Cuda::get()?;
        if !wanted {
            log::info(format_args!(
                "{name} does not access memory of GPUs, which is copied through the host: FI_UDRV_CUDA_RDMA=0, FI_HMEM_DISABLE_P2P=1 or FI_OPT_FI_HMEM_P2P forbids it, or the kernel's rv module carries long messages"
            ));
            return None;
        }
        let (takes, by_address) = (registrar.takes_dmabufs(), has_peer_memory());
        if let (Err(errno), false) = (takes, by_address) {
            let why = match errno.0 {
                libc::ENOSYS => "libibverbs has no ibv_reg_dmabuf_mr, which rdma-core 34 brings",
                _ => "its driver, or the kernel, registers no dma-bufs",
            };
            log::info(format_args!(
                "{name} does not access memory of GPUs, which is copied through the host: {why} ({errno}), and nvidia-peermem is not loaded"
            ));
            return None;
        }
        let how = match (takes.is_ok(), by_address) {
            (true, true) => "dma-buf, or by nvidia-peermem where that fails",
            (true, false) => "dma-buf",
            (false, _) => "nvidia-peermem",
        };
        log::info(format_args!("{name} accesses memory of GPUs, which is registered by {how}"));
        let permission = match offers {
            true => Permission::Exposed { reads: true, writes: true },
            false => Permission::RemoteWrite,
        };
        let (dmabufs, kept) = (takes.is_ok(), keeps.then(Mutex::default));
        Some(Self { registrar, dmabufs, by_address, permission, kept })
    }

    /// A registration that has the `len` bytes at `addr`. Errors: EFAULT for bytes of more than one allocation; ENOMEM where that may
    /// be otherwise later; those of the driver and of the device.
    pub(super) fn get(&self, addr: u64, len: usize) -> Result<Registered, Errno> {
        let (cuda, of) = find(addr, len)?;
        let Some(kept) = self.kept.as_ref().filter(|_| !of.is_vague) else {
            return self.alone(cuda, &of, (addr, len), self.permission);
        };
        let now = clock::now_ns();
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.sweep(now, |of| is_there(cuda, of));
        let make = || self.register(cuda, &of, ((of.start, of.len), (addr, len)), self.permission);
        let got = kept.get(of, now, |kept| {
            let made = kept.with_room(now, make, |refused| {
                refused.tell();
                let errno = Errno::from(refused);
                log::limited!(
                    cause: errno.0,
                    "an RDMA device does not access an allocation of a GPU, which is copied through the host: {errno}"
                );
            });
            made.map(|made| (made, of.len))
        });
        if got.as_ref().is_ok_and(|got| got.fades) {
            kept.forget(&of);
        }
        got
    }

    /// When [`Self::tend`] has something to do.
    pub(super) fn next_timeout(&self) -> Option<u64> {
        self.kept.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).next_sweep()
    }

    /// Gives back allocations that were freed, now and then.
    pub(super) fn tend(&self, now: u64) {
        if let (Some(cuda), Some(kept)) = (Cuda::get(), &self.kept) {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.sweep(now, |of| is_there(cuda, of));
        }
    }

    /// A registration of exactly these bytes. Errors: as [`Self::get`].
    pub(super) fn exact(
        &self,
        addr: u64,
        len: usize,
        permission: Permission,
    ) -> Result<Registered, Errno> {
        let (cuda, of) = find(addr, len)?;
        self.alone(cuda, &of, (addr, len), permission)
    }

    /// A registration that is not kept. Allocations that are, but were not used lately, make room for it.
    fn alone(
        &self,
        cuda: &Cuda,
        of: &Allocation,
        at: (u64, usize),
        permission: Permission,
    ) -> Result<Registered, Errno> {
        let make = || self.register(cuda, of, (at, at), permission);
        let Some(kept) = &self.kept else {
            return make().inspect_err(Refused::tell).map_err(Errno::from);
        };
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.with_room(clock::now_ns(), make, |refused| refused.tell())
    }

    /// Registers `at`, or, where that may fade, only `asked`.
    fn register(
        &self,
        cuda: &Cuda,
        of: &Allocation,
        (at, asked): ((u64, usize), (u64, usize)),
        permission: Permission,
    ) -> Result<Registered, Refused> {
        let by_dmabuf = || -> Result<_, Refused> {
            let exported = cuda.dmabuf(of, at).map_err(Refused::ByCuda)?;
            let at = (at.0 - exported.start, at.0, at.1);
            let made = self.registrar.register_dmabuf(exported.fd.as_fd(), at, permission);
            Ok((made.map_err(Refused::ByDevice)?, exported.flush, false))
        };
        let by_address = || -> Result<_, Refused> {
            let flush = cuda.pinned(of).map_err(|failure| match failure {
                Failure::NOT_SUPPORTED => Refused::OfAddress(Errno(libc::EOPNOTSUPP)),
                other => Refused::ByCuda(other),
            })?;
            let fades = of.is_mapped();
            let (addr, len) = if fades { asked } else { at };
            let made = self.registrar.register(addr as usize, len, permission);
            Ok((made.map_err(Refused::OfAddress)?, flush, fades))
        };
        let made = match self.dmabufs.then(by_dmabuf) {
            None => by_address(),
            Some(Err(refused)) if self.by_address && !refused.is_shortage() => by_address(),
            Some(made) => made,
        };
        made.map(|(made, flush, fades)| Registered { registration: Arc::new(made), flush, fades })
    }
}

/// The allocation that has all of the bytes.
fn find(addr: u64, len: usize) -> Result<(&'static Cuda, Allocation), Errno> {
    const FAULT: Errno = Errno(libc::EFAULT);
    let cuda = Cuda::get().ok_or(FAULT)?;
    let of = cuda.find(addr).ok().flatten().ok_or(FAULT)?;
    // Without a number nothing tells it from what was there before.
    let inside = of.id != 0 && addr.saturating_add(len as u64) <= of.end();
    inside.then_some((cuda, of)).ok_or(FAULT)
}

/// Whether an allocation is that of its address still.
fn is_there(cuda: &Cuda, of: &Allocation) -> bool {
    cuda.find(of.start) == Ok(Some(*of))
}

/// What the device has written to such memory is there when this returns. False: nobody knows.
pub(super) fn flush(what: Flush) -> bool {
    let flushed = Cuda::get().map(|cuda| cuda.flush(what));
    if let Some(Err(failure)) = flushed {
        log::limited!(
            cause: failure.0,
            "CUDA answers {} where what an RDMA device has written to a GPU's memory is waited for: the connection ends",
            failure.0
        );
    }
    matches!(flushed, Some(Ok(())))
}
