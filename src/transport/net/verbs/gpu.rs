//! Memory of GPUs that an RDMA device accesses itself (GPUDirect RDMA), registered by the descriptor of a dma-buf.
//!
//! A registration of a whole allocation is kept for later messages under the number that the driver gives an allocation
//! (BUFFER_ID), which no other one of the process has. The driver is asked for the number of the address each time, so memory
//! that was freed, and whose address another allocation has since, is never taken for it. The kernel keeps memory that was
//! freed as long as it is registered: such registrations end when the next one is made.
//!
//! Not run on a GPU; on doubles of the driver and of the device only.

use crate::sys::Errno;
use crate::sys::cuda::{Allocation, Cuda, Flush};
use crate::sys::verbs::{Permission, Registrar, Registration};
use crate::telemetry::log;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Most allocations that are kept registered: what is registered takes of the GPU's window on the bus.
const KEPT_MAX: usize = 64;

/// The memory of GPUs that is registered with one protection domain.
pub(super) struct Gpus {
    registrar: Registrar,
    /// For requests of messages: what it allows.
    permission: Permission,
    /// The least recently used first.
    kept: Mutex<Vec<Kept>>,
}

/// An allocation, and its registration, or why there is none.
struct Kept {
    id: u64,
    start: u64,
    made: Result<Registered, Errno>,
}

/// Registered memory of a GPU.
#[derive(Clone, Debug)]
pub(super) struct Registered {
    pub(super) registration: Arc<Registration>,
    /// The memory to flush when the device has written it.
    pub(super) flush: Option<Flush>,
}

impl Gpus {
    /// With a device that takes memory of GPUs; logs what it does. `None`: it does not, or is not to (`wanted`), or nobody
    /// has loaded CUDA. `offers`: peers read some of the memory.
    pub(super) fn new(
        registrar: Registrar,
        name: &str,
        (wanted, offers): (bool, bool),
    ) -> Option<Self> {
        Cuda::get()?;
        if !wanted {
            log::info(format_args!(
                "{name} does not access memory of GPUs, which is copied through the host: that needs FI_UDRV_CUDA_RDMA=1, and neither FI_HMEM_DISABLE_P2P nor FI_OPT_FI_HMEM_P2P against it"
            ));
            return None;
        }
        if let Err(errno) = registrar.takes_dmabufs() {
            let why = match errno.0 {
                libc::ENOSYS => "libibverbs has no ibv_reg_dmabuf_mr, which rdma-core 34 brings",
                _ => "its driver, or the kernel, registers no dma-bufs",
            };
            log::info(format_args!(
                "{name} does not access memory of GPUs, which is copied through the host: {why} ({errno})"
            ));
            return None;
        }
        log::info(format_args!("{name} accesses memory of GPUs, which is registered by dma-buf"));
        let permission = match offers {
            true => Permission::Exposed { reads: true, writes: true },
            false => Permission::RemoteWrite,
        };
        Some(Self { registrar, permission, kept: Mutex::default() })
    }

    /// A registration of the allocation that has the `len` bytes at `addr`. Errors: EFAULT for bytes of more than one allocation; those
    /// of the driver and of the device.
    pub(super) fn get(&self, addr: u64, len: usize) -> Result<Registered, Errno> {
        let (cuda, of) = find(addr, len)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|kept| kept.id == of.id && kept.start == of.start) {
            let found = kept.remove(at);
            let made = found.made.clone();
            kept.push(found);
            return made;
        }
        kept.retain(|kept| matches!(cuda.find(kept.start), Ok(Some(now)) if now.id == kept.id));
        let made = self.register(cuda, &of, (of.start, of.len), self.permission);
        if let Err(errno) = &made {
            log::limited!(
                cause: errno.0,
                "an RDMA device does not access an allocation of a GPU, which is copied through the host: {errno}"
            );
        }
        if kept.len() >= KEPT_MAX {
            kept.remove(0);
        }
        kept.push(Kept { id: of.id, start: of.start, made: made.clone() });
        made
    }

    /// A registration of exactly these bytes. Errors: as [`Self::get`].
    pub(super) fn exact(
        &self,
        addr: u64,
        len: usize,
        permission: Permission,
    ) -> Result<Registered, Errno> {
        let (cuda, of) = find(addr, len)?;
        self.register(cuda, &of, (addr, len), permission)
    }

    fn register(
        &self,
        cuda: &Cuda,
        of: &Allocation,
        (addr, len): (u64, usize),
        permission: Permission,
    ) -> Result<Registered, Errno> {
        let exported = cuda.dmabuf(of, (addr, len)).map_err(|failure| {
            log::limited!(
                cause: failure.0,
                "CUDA answers {} where a dma-buf of device memory is asked for",
                failure.0
            );
            Errno(libc::EOPNOTSUPP)
        })?;
        let at = (addr - exported.start, addr, len);
        let registration = self.registrar.register_dmabuf(exported.fd.as_fd(), at, permission)?;
        Ok(Registered { registration: Arc::new(registration), flush: exported.flush })
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
