//! Allocations, found by address.

use crate::peer;
use crate::sys::{self, Mapping, WORD_FREED, WORD_ID};
use crate::verify::violation;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
pub(crate) const POSIX_FD: u32 = 1;

/// What memory is.
#[derive(Debug)]
pub(crate) enum Kind {
    Device(Mapping),
    /// Of a pool, `None` for the default one: it has no context, no IPC handle, and no SYNC_MEMOPS.
    Pool(Mapping, Option<(usize, Arc<Pool>)>),
    /// Of a pool of another process.
    OfPool(Mapping),
    /// Memory of cuMemCreate at addresses of cuMemAddressReserve; whether the device may use them, and the reservation, its begin and
    /// length. It has no context either.
    Mapped(Mapping, Arc<Physical>, AtomicBool, (usize, usize)),
    /// Of another process, by an IPC handle: the owner, its BUFFER_ID, and how often it is open.
    Imported {
        mapping: Mapping,
        owner: (u32, u64),
        opens: AtomicUsize,
    },
    /// The processor may touch it.
    Managed(Mapping),
    /// The double's own memory for the host; `None`: memory of the program, registered.
    Host(Option<Mapping>),
}

/// Memory of cuMemCreate.
#[derive(Debug)]
pub(crate) struct Physical {
    /// MEMORY_BLOCK_ID.
    pub(crate) id: u64,
    pub(crate) file: OwnedFd,
    pub(crate) len: usize,
    /// CUmemAllocationHandleType: how it may be exported.
    pub(crate) types: u32,
    pub(crate) ordinal: i32,
}

/// A pool of cuMemPoolCreate, or of another process.
#[derive(Debug)]
pub(crate) struct Pool {
    /// What names it to other processes.
    pub(crate) file: OwnedFd,
    /// The process that made it, and its number there.
    pub(crate) owner: (u32, u64),
    pub(crate) types: u32,
    pub(crate) ordinal: i32,
    /// Its descriptor was asked for, which must precede the export of pointers.
    pub(crate) exported: AtomicBool,
}

/// One allocation, or one registration of host memory.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: usize,
    pub(crate) len: usize,
    /// No other allocation of the process has had it.
    pub(crate) id: u64,
    pub(crate) context: usize,
    pub(crate) ordinal: i32,
    pub(crate) kind: Kind,
    pub(crate) sync: AtomicBool,
    /// Copies on non-blocking streams that have not run.
    pub(crate) queued: AtomicUsize,
}

impl Allocation {
    fn mapping(&self) -> Option<&Mapping> {
        match &self.kind {
            Kind::Device(mapping)
            | Kind::Pool(mapping, _)
            | Kind::OfPool(mapping)
            | Kind::Mapped(mapping, ..)
            | Kind::Imported { mapping, .. }
            | Kind::Managed(mapping) => Some(mapping),
            Kind::Host(mapping) => mapping.as_ref(),
        }
    }

    /// CU_MEMORYTYPE_HOST or _DEVICE.
    pub(crate) fn memory_type(&self) -> u32 {
        if self.is_host() { 1 } else { 2 }
    }

    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Host(_))
    }

    /// CUmemAllocationHandleType: how it may be exported.
    pub(crate) fn types(&self) -> u32 {
        match &self.kind {
            Kind::Pool(_, Some((_, pool))) => pool.types,
            Kind::Mapped(_, physical, ..) => physical.types,
            _ => 0,
        }
    }

    /// The handle of its pool; 0: none that has one.
    pub(crate) fn pool(&self) -> usize {
        if let Kind::Pool(_, Some((handle, _))) = &self.kind { *handle } else { 0 }
    }

    /// Another one may continue it: a copy may go on there.
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(self.kind, Kind::Mapped(..))
    }

    /// Whether a device may use it.
    pub(crate) fn is_open(&self) -> bool {
        if let Kind::Mapped(_, _, open, _) = &self.kind {
            open.load(Ordering::Relaxed)
        } else {
            true
        }
    }

    /// RANGE_START_ADDR and RANGE_SIZE: of what is mapped, the whole reservation.
    pub(crate) fn range(&self) -> (usize, usize) {
        if let Kind::Mapped(.., reservation) = self.kind {
            reservation
        } else {
            (self.base, self.len)
        }
    }

    /// BUFFER_ID: of what is mapped, one of the whole reservation, whatever is mapped in it.
    pub(crate) fn buffer_id(&self) -> u64 {
        if let Kind::Mapped(.., (begin, _)) = self.kind { begin as u64 } else { self.id }
    }

    /// MEMORY_BLOCK_ID.
    pub(crate) fn block_id(&self) -> u64 {
        if let Kind::Mapped(_, physical, ..) = &self.kind { physical.id } else { self.id }
    }

    pub(crate) fn is_managed(&self) -> bool {
        matches!(self.kind, Kind::Managed(_))
    }

    /// A descriptor of `len` of its bytes, from `start` on: whole pages.
    pub(crate) fn descriptor(&self, start: usize, len: usize) -> Option<OwnedFd> {
        sys::part(self.mapping()?.fd(), start, len)
    }

    /// What another process needs to open it by an IPC handle: descriptor and length, bytes.
    pub(crate) fn exported(&self) -> Option<(i32, usize)> {
        match &self.kind {
            Kind::Device(mapping) => Some((mapping.fd(), mapping.len())),
            _ => None,
        }
    }

    /// The number of its pool; 0: none.
    pub(crate) fn number_of_pool(&self) -> u64 {
        if let Kind::Pool(_, Some((_, pool))) = &self.kind { pool.owner.1 } else { 0 }
    }

    /// The same for what is of a pool that was exported.
    pub(crate) fn exported_of_pool(&self) -> Option<(i32, usize)> {
        match &self.kind {
            Kind::Pool(mapping, Some((_, pool))) if pool.exported.load(Ordering::Relaxed) => {
                Some((mapping.fd(), mapping.len()))
            }
            _ => None,
        }
    }

    /// Tells the processes that open it which allocation it is.
    pub(crate) fn mark(&self) {
        if let Kind::Device(mapping) | Kind::Pool(mapping, _) = &self.kind {
            mapping.word(WORD_ID).store(self.id, Ordering::Relaxed);
        }
    }

    /// Ends it. A violation if copies are queued, or another process has imported it from its pool.
    pub(crate) fn end(&self) {
        if !self.is_host() && !self.is_managed() {
            peer::end(self.base, self.len);
        }
        if self.queued.load(Ordering::Acquire) != 0 {
            violation(&format!(
                "memory at {:#x} is given up while copies of it are queued",
                self.base
            ));
        }
        if matches!(&self.kind, Kind::Pool(mapping, _) if mapping.is_held()) {
            violation(&format!(
                "memory of a pool at {:#x} is freed before another process has freed its import",
                self.base
            ));
        }
        // Memory of cuMemCreate lives as long as any process has it.
        if let Kind::Device(mapping) | Kind::Pool(mapping, _) = &self.kind {
            mapping.word(WORD_FREED).store(1, Ordering::Release);
        }
    }

    /// Where the double copies for the program's address `addr`. A violation if the owner has freed it.
    pub(crate) fn reach(&self, addr: usize) -> usize {
        let Some(mapping) = self.mapping() else { return addr };
        if mapping.word(WORD_FREED).load(Ordering::Acquire) != 0 {
            violation(&format!("memory at {:#x} is used after its owner freed it", self.base));
        }
        mapping.shadow_of(addr)
    }
}

/// True if a mapping is the allocation `id`, and still lives.
pub(crate) fn lives(mapping: &Mapping, id: u64) -> bool {
    mapping.word(WORD_ID).load(Ordering::Relaxed) == id
        && mapping.word(WORD_FREED).load(Ordering::Acquire) == 0
}

/// The allocations of a process by address.
#[derive(Default)]
pub(crate) struct Allocations {
    by_base: BTreeMap<usize, Arc<Allocation>>,
    /// Addresses that were freed, the newest last: they are used again first.
    freed: Vec<(usize, usize)>,
    /// Device memory that was freed while dma-bufs hold it, and its bytes.
    held: Vec<(OwnedFd, usize)>,
}

impl Allocations {
    pub(crate) fn add(&mut self, allocation: Allocation) -> usize {
        let base = allocation.base;
        allocation.mark();
        self.by_base.insert(base, Arc::new(allocation));
        base
    }

    pub(crate) fn find(&self, addr: usize) -> Option<&Arc<Allocation>> {
        let (_, allocation) = self.by_base.range(..=addr).next_back()?;
        (addr - allocation.base < allocation.len.max(1)).then_some(allocation)
    }

    /// The allocation of another process that is open already.
    pub(crate) fn imported(&self, owner: (u32, u64)) -> Option<&Arc<Allocation>> {
        let is = |kind: &Kind| matches!(kind, Kind::Imported { owner: o, .. } if *o == owner);
        self.by_base.values().find(|allocation| is(&allocation.kind))
    }

    /// Takes the allocation that begins at `base` and is `right` out.
    pub(crate) fn take(
        &mut self,
        base: usize,
        right: impl Fn(&Kind) -> bool,
    ) -> Option<Arc<Allocation>> {
        self.by_base.get(&base).filter(|allocation| right(&allocation.kind))?;
        let allocation = self.by_base.remove(&base)?;
        allocation.end();
        if let Kind::Device(mapping) = &allocation.kind {
            let held = if mapping.is_held() { sys::duplicate(mapping.fd()) } else { None };
            self.held.extend(held.map(|fd| (fd, allocation.len)));
        }
        if !allocation.is_mapped() {
            self.freed.push((base, allocation.len));
        }
        Some(allocation)
    }

    /// Ends all of a context.
    pub(crate) fn end_all(&mut self, context: usize) {
        let its: Vec<_> =
            self.by_base.values().filter(|of| of.context == context).map(|of| of.base).collect();
        its.into_iter().for_each(|base| _ = self.take(base, |_| true));
    }

    /// Bytes of device memory that are not free.
    pub(crate) fn used(&mut self) -> usize {
        self.held.retain(|(fd, _)| sys::is_held(fd));
        let is = |of: &&Arc<Allocation>| matches!(of.kind, Kind::Device(_));
        let there: usize = self.by_base.values().filter(is).map(|of| of.len).sum();
        there + self.held.iter().map(|(_, len)| len).sum::<usize>()
    }

    /// An address for `len` bytes that was used before; 0: any.
    pub(crate) fn place(&mut self, len: usize) -> usize {
        let at = self.freed.iter().rposition(|(_, freed)| *freed >= len);
        at.map_or(0, |at| self.freed.remove(at).0)
    }
}
