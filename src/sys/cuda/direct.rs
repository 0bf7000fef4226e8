//! What a network device needs to access device memory itself (GPUDirect RDMA): a descriptor to register the memory by, if it is not
//! registered by its address, and that what it has written is there.
//!
//! A completion of a network device is in memory of the host, its bytes are in memory of the GPU, and nothing orders the two
//! (CUDA's GPUDirect RDMA, "Synchronization and Memory Ordering"). Where the GPU does not say that it keeps that order,
//! cuFlushGPUDirectRDMAWrites must be called in between.

use super::driver::{Allocation, Cuda, Failure, done};
use crate::sys::process;
use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

/// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: by modules of the kernel, which pin the memory.
const PINNED: c_int = 116;
/// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, and the bit for cuFlushGPUDirectRDMAWrites.
const FLUSH_OPTIONS: c_int = 117;
const FLUSH_BY_HOST: c_int = 1;
/// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, and the least that orders them for the GPU that has the memory.
const ORDERING: c_int = 118;
const ORDER_OF_OWNER: c_int = 100;
/// CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED.
const DMA_BUFS: c_int = 124;
/// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
const DMA_BUF_FD: c_int = 1;
/// CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES.
const CURRENT: c_int = 0;
const TO_ALL: c_int = 200;

/// Memory that network devices may register.
#[derive(Debug)]
pub(crate) struct Exported {
    /// A dma-buf of whole pages.
    pub(crate) fd: OwnedFd,
    /// The address where it begins.
    pub(crate) start: u64,
    /// What [`Cuda::flush`] needs; `None`: the GPU keeps the order.
    pub(crate) flush: Option<Flush>,
}

/// A context whose device has to be told that it has to be up to date.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flush(usize);

impl Cuda {
    /// A descriptor of `len` bytes at `addr` of an allocation, and no more than the pages that have them: each descriptor takes of
    /// the GPU's window on the bus. Failures: 801 for memory, a GPU or a driver without that, or where what is written to the
    /// memory could not be waited for; those of the driver.
    pub(crate) fn dmabuf(
        &self,
        of: &Allocation,
        (addr, len): (u64, usize),
    ) -> Result<Exported, Failure> {
        let exporting = self.exporting.ok_or(Failure::NOT_SUPPORTED)?;
        let flush = self.order(of, DMA_BUFS)?;
        let (context, page) = (self.context_of(of), process::page_size() as u64);
        let (start, end) = (addr - addr % page, (addr + len as u64).next_multiple_of(page));
        let mut fd = -1;
        self.within(context, || {
            let len = (end - start) as usize;
            // SAFETY: a local, which gets a new descriptor.
            done(unsafe { (exporting.dmabuf)(&mut fd, start, len, DMA_BUF_FD, 0) })
        })?;
        // SAFETY: a new descriptor, which nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Exported { fd, start, flush })
    }

    /// What [`Self::flush`] needs for an allocation whose pages a module of the kernel gives to network devices; `None`: the GPU keeps
    /// the order. Failures: as [`Self::dmabuf`].
    pub(crate) fn pinned(&self, of: &Allocation) -> Result<Option<Flush>, Failure> {
        self.order(of, PINNED)
    }

    /// What a flush needs, if one is needed, where the GPU has the attribute `how`. Failures: as [`Self::dmabuf`].
    fn order(&self, of: &Allocation, how: c_int) -> Result<Option<Flush>, Failure> {
        let direct = self.direct.ok_or(Failure::NOT_SUPPORTED)?;
        // Drivers have died of SIGSEGV where a dma-buf of a pool was asked for (rapidsai/ucxx#749).
        if of.is_mapped() && !self.is_created(of) {
            return Err(Failure::NOT_SUPPORTED);
        }
        let ask = |which| {
            let mut value = 0;
            // SAFETY: a local.
            done(unsafe { (direct.attribute)(&mut value, which, of.ordinal) }).map(|()| value)
        };
        let context = self.context_of(of);
        self.within(context, || {
            if ask(how)? == 0 {
                return Err(Failure::NOT_SUPPORTED);
            }
            if ask(ORDERING)? >= ORDER_OF_OWNER {
                return Ok(None);
            }
            if ask(FLUSH_OPTIONS)? & FLUSH_BY_HOST == 0 {
                return Err(Failure::NOT_SUPPORTED);
            }
            Ok(Some(Flush(context)))
        })
    }

    /// Whether memory without a context is that of cuMemCreate.
    fn is_created(&self, of: &Allocation) -> bool {
        let (Some(sharing), mut kept) = (self.sharing, 0) else { return false };
        // SAFETY: a local; what is retained is released.
        unsafe {
            (sharing.retain)(&mut kept, of.start) == 0 && {
                (sharing.release)(kept);
                true
            }
        }
    }

    /// What network devices have written to the memory of the device before is there when this returns.
    pub(crate) fn flush(&self, Flush(context): Flush) -> Result<(), Failure> {
        let direct = self.direct.ok_or(Failure::NOT_SUPPORTED)?;
        // SAFETY: the call takes numbers only.
        self.within(context, || done(unsafe { (direct.flush)(CURRENT, TO_ALL) }))
    }
}
