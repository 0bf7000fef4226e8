//! How processes open each other's allocations.
//!
//! | memory | what its owner gives | and the other process does |
//! |---|---|---|
//! | cuMemAlloc | an IPC handle | cuIpcOpenMemHandle |
//! | cuMemCreate, cuMemMap | a descriptor of each part that is mapped | reserves addresses, and maps the parts |
//! | cuMemAllocFromPoolAsync | a descriptor of the pool, and an exported pointer | opens the pool, and imports the pointer |
//!
//! A descriptor is of a process, so it is passed over a socket. There is one only if the application asked for that when it
//! made the memory or the pool: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.

use super::driver::{Access, Allocation, Context, Cuda, Failure, IpcHandle, Sharing, done};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.
const PEER_ACCESS: c_uint = 1;
/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
const POSIX_FD: c_int = 1;
/// The longest allocation of a pool that is imported, bytes. The driver 580.126.20 dies of SIGSEGV at one longer than 5248 MiB.
const POOL_MAX: usize = 4 << 30;

/// What another process needs to open an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Its handle.
    Handle,
    /// A descriptor.
    Mapped,
    /// A descriptor of its pool, and the exported pointer, which has the size of a handle.
    Pool,
}

/// How an allocation is opened, as its owner publishes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Exported {
    pub(crate) kind: Kind,
    /// Empty for what is opened by its descriptor alone.
    pub(crate) handle: IpcHandle,
    /// The handle of its pool in this process; 0: it is of none.
    pub(crate) pool: u64,
}

/// What another process has to open.
#[derive(Debug)]
pub(crate) enum Part {
    Handle(IpcHandle),
    /// By its descriptor.
    Mapped(OwnedFd),
    /// A pool, by its descriptor: there are no bytes to access.
    Pool(OwnedFd),
    /// An allocation of a pool that is open: the handle of the pool in this process, and the exported pointer.
    OfPool(u64, IpcHandle),
}

/// What of another process this one has opened.
#[derive(Debug)]
pub(crate) struct Import {
    sort: Sort,
    context: Context,
    /// It ends with its context, as all of a device does that is reset.
    ends: bool,
    start: u64,
    len: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sort {
    Handle,
    Mapped,
    Pool,
    OfPool,
}

impl Import {
    pub(crate) fn is_by_handle(&self) -> bool {
        self.sort == Sort::Handle
    }

    pub(crate) fn context(&self) -> Context {
        self.context
    }

    /// Where it begins in this process; of a pool, its handle.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }
}

impl Failure {
    /// The application did not ask for descriptors of this memory; no result of the driver.
    pub(crate) const NOT_SHARED: Self = Self(-2);
    /// An allocation of a pool is longer than drivers import; no result of the driver.
    pub(crate) const TOO_LONG: Self = Self(-3);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);

    /// CUDA_ERROR_OUT_OF_MEMORY, or CUDA_ERROR_OPERATING_SYSTEM: it may be none later.
    pub(crate) fn is_shortage(self) -> bool {
        matches!(self.0, 2 | 304)
    }
}

fn number(fd: &OwnedFd) -> usize {
    fd.as_raw_fd() as usize
}

impl Cuda {
    fn sharing(&self) -> Result<&Sharing, Failure> {
        self.sharing.as_ref().ok_or(Failure::NOT_SUPPORTED)
    }

    /// How an allocation is opened.
    pub(crate) fn export(&self, of: &Allocation) -> Result<Exported, Failure> {
        let mut handle = IpcHandle::default();
        if !of.is_mapped() {
            self.within(of.context, || {
                // SAFETY: a local of the handle's size.
                done(unsafe { (self.functions.ipc_get)(&mut handle, of.start) })
            })?;
            return Ok(Exported { kind: Kind::Handle, handle, pool: 0 });
        }
        // Without an identity a peer could not tell it from what was there before.
        if of.id == 0 {
            return Err(Failure::NOT_SUPPORTED);
        }
        let pool = self.pool_of(of)?;
        if pool == 0 {
            return Ok(Exported { kind: Kind::Mapped, handle, pool });
        }
        if of.len > POOL_MAX {
            return Err(Failure::TOO_LONG);
        }
        // The driver exports pointers of a pool only after the pool.
        drop(self.descriptor(of)?);
        let sharing = self.sharing()?;
        self.within(self.context_of(of), || {
            // SAFETY: a local of the size of what is exported.
            done(unsafe { (sharing.export_pointer)(&mut handle, of.start) })
        })?;
        Ok(Exported { kind: Kind::Pool, handle, pool })
    }

    /// The pool of an allocation without a context; 0: it is of none. Failure: it has no descriptors.
    pub(crate) fn pool_of(&self, of: &Allocation) -> Result<u64, Failure> {
        let (mut allowed, mut pool) = (0_u64, 0_u64);
        // ALLOWED_HANDLE_TYPES, MEMPOOL_HANDLE.
        let mut which = [14, 17];
        let mut places: [*mut c_void; 2] = [(&raw mut allowed).cast(), (&raw mut pool).cast()];
        // SAFETY: as many attributes as places, each a local of its attribute's type.
        done(unsafe {
            (self.functions.attributes)(2, which.as_mut_ptr(), places.as_mut_ptr(), of.start)
        })?;
        if allowed & POSIX_FD as u64 == 0 { Err(Failure::NOT_SHARED) } else { Ok(pool) }
    }

    /// A descriptor of an allocation without a context, or of its pool.
    pub(crate) fn descriptor(&self, of: &Allocation) -> Result<OwnedFd, Failure> {
        let (sharing, pool) = (self.sharing()?, self.pool_of(of)?);
        let mut fd = -1;
        self.within(self.context_of(of), || {
            if pool != 0 {
                // SAFETY: a local, which gets a new descriptor.
                return done(unsafe { (sharing.export_pool)(&mut fd, pool, POSIX_FD, 0) });
            }
            let mut kept = 0;
            // SAFETY: locals; what is retained is released.
            unsafe {
                done((sharing.retain)(&mut kept, of.start))?;
                let exported = done((sharing.export)(&mut fd, kept, POSIX_FD, 0));
                done((sharing.release)(kept)).and(exported)
            }
        })?;
        // SAFETY: a new descriptor, which nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Opens a part of another process, of `len` bytes, in a context.
    pub(crate) fn import(
        &self,
        context: Context,
        part: &Part,
        len: usize,
    ) -> Result<Import, Failure> {
        let mut ends = true;
        let (sort, start) = self.within(context.handle(), || {
            let mut start = 0;
            ends = matches!(part, Part::Handle(_)) || self.may_be_primary(context);
            Ok(match part {
                Part::Handle(handle) => {
                    // SAFETY: a local; the driver checks the handle.
                    done(unsafe { (self.functions.ipc_open)(&mut start, *handle, PEER_ACCESS) })?;
                    (Sort::Handle, start)
                }
                Part::Mapped(fd) => (Sort::Mapped, self.map(number(fd), len)?),
                Part::Pool(fd) => (Sort::Pool, self.open_pool(number(fd))?),
                Part::OfPool(..) if len > POOL_MAX => return Err(Failure::TOO_LONG),
                Part::OfPool(pool, pointer) => {
                    // SAFETY: a pool that is open, a local, and what its owner exported, which the driver checks.
                    done(unsafe { (self.sharing()?.import_pointer)(&mut start, *pool, pointer) })?;
                    (Sort::OfPool, start)
                }
            })
        })?;
        Ok(Import { sort, context, ends, start, len })
    }

    /// Maps memory of another process, in the current context.
    fn map(&self, fd: usize, len: usize) -> Result<u64, Failure> {
        let sharing = self.sharing()?;
        let access = Access::of(self.device()?);
        let (mut kept, mut at) = (0, 0);
        // SAFETY: a descriptor of this process, which the driver checks; a local.
        done(unsafe { (sharing.import)(&mut kept, fd, POSIX_FD) })?;
        // SAFETY: new addresses, which are given back if nothing is mapped there. A mapping needs its handle no more.
        unsafe {
            let reserved = done((sharing.reserve)(&mut at, len, 0, 0, 0));
            let mapped = reserved.and_then(|()| done((sharing.map)(at, len, 0, kept, 0)));
            let released = done((sharing.release)(kept));
            let open = mapped.and_then(|()| {
                let open = released.and_then(|()| done((sharing.set_access)(at, len, &access, 1)));
                open.inspect_err(|_| _ = (sharing.unmap)(at, len))
            });
            if open.is_err() && reserved.is_ok() {
                (sharing.free_addresses)(at, len);
            }
            open.map(|()| at)
        }
    }

    /// Opens a pool of another process, for the device of the current context.
    fn open_pool(&self, fd: usize) -> Result<u64, Failure> {
        let sharing = self.sharing()?;
        let access = Access::of(self.device()?);
        let mut pool = 0;
        // SAFETY: a descriptor of this process, which the driver checks; locals.
        unsafe {
            done((sharing.import_pool)(&mut pool, fd, POSIX_FD, 0))?;
            let open = done((sharing.pool_access)(pool, &access, 1));
            open.inspect_err(|_| _ = (sharing.destroy_pool)(pool))?;
        }
        Ok(pool)
    }

    /// Closes it again. All copies from it have ended.
    ///
    /// A handle was closed by the end of its context, and something else may be at its address by now. The other kinds are of no
    /// context, and are closed all the same; but not where a reset of the device may have ended "all resources associated with
    /// the current device" (cuDevicePrimaryCtxReset).
    pub(crate) fn close(&self, import: &Import) -> Result<(), Failure> {
        let mut is_there = false;
        let closed = self.within(import.context.handle(), || {
            is_there = self.is_current(import.context);
            if is_there { self.close_now(import) } else { Ok(()) }
        });
        if is_there || import.ends { closed } else { self.close_now(import) }
    }

    fn close_now(&self, import: &Import) -> Result<(), Failure> {
        let Import { sort, start, len, .. } = *import;
        // SAFETY: what `import` got, and closed once.
        unsafe {
            match sort {
                Sort::Handle => done((self.functions.ipc_close)(start)),
                // Freed when the call returns: its owner may free it then.
                Sort::OfPool => done((self.sharing()?.free)(start)),
                // It lasts as long as what is open of it.
                Sort::Pool => done((self.sharing()?.destroy_pool)(start)),
                Sort::Mapped => {
                    let sharing = self.sharing()?;
                    done((sharing.unmap)(start, len))?;
                    done((sharing.free_addresses)(start, len))
                }
            }
        }
    }
}
