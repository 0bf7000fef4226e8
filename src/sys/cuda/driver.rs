//! The driver API of CUDA, found at run time in `libcuda.so.1`. It is never linked, and never initialised here: a process
//! that has not called cuInit itself has no device memory, and cuInit before a fork would leave its child without CUDA.
//! No context is made either; the primary one of a device is retained only if the application has made it active.
//!
//! Not run on a GPU; on a double only (`crates/fake-cuda`).

use crate::sys::dl::Library;
use crate::sys::made_once::MadeOnce;
use crate::sys::net::PciAddress;
use crate::sys::process::Home;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A result of the driver, other than success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failure(pub(crate) i32);

const NOT_INITIALIZED: i32 = 3;
const INVALID_DEVICE: i32 = 101;
const NOT_READY: i32 = 600;
/// CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, and CU_CTX_SYNC_MEMOPS.
const SYNC_MEMOPS: c_int = 6;
const SYNC_MEMOPS_OF_ALL: c_uint = 0x80;
/// Devices of a process at most.
const DEVICES_MAX: usize = 64;
/// CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID.
const MEMORY_BLOCK_ID: c_int = 20;
/// CU_STREAM_NON_BLOCKING: the application's default stream neither waits for ours nor delays it.
const NON_BLOCKING: c_uint = 1;
/// CU_EVENT_DISABLE_TIMING.
const NO_TIMING: c_uint = 2;
/// CU_STREAM_CAPTURE_MODE_RELAXED.
const RELAXED: c_uint = 2;
/// CU_MEMORYTYPE_DEVICE.
const DEVICE: c_uint = 2;

/// CUipcMemHandle: names an allocation to the other processes of the node. Only the driver knows what its bytes mean.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct IpcHandle(pub(crate) [u64; 8]);

type Handle = *mut c_void;

macro_rules! functions {
    ($table:ident $($name:ident $symbol:literal ($($argument:ty),*);)*) => {
        #[derive(Clone, Copy)]
        pub(super) struct $table { $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int),* }

        impl $table {
            fn of(library: &Library) -> Option<Self> {
                // SAFETY: the driver's functions of these names have these signatures, and the library stays loaded.
                Some(Self { $($name: unsafe {
                    transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(
                        library.symbol($symbol)?.as_ptr())
                }),* })
            }
        }
    };
}

functions! { Functions
    attributes c"cuPointerGetAttributes" (c_uint, *mut c_int, *mut *mut c_void, u64);
    primary_state c"cuDevicePrimaryCtxGetState" (c_int, *mut c_uint, *mut c_int);
    primary_retain c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    current c"cuCtxGetCurrent" (*mut Handle);
    device c"cuCtxGetDevice" (*mut c_int);
    push c"cuCtxPushCurrent_v2" (Handle);
    pop c"cuCtxPopCurrent_v2" (*mut Handle);
    stream_create c"cuStreamCreate" (*mut Handle, c_uint);
    event_create c"cuEventCreate" (*mut Handle, c_uint);
    event_record c"cuEventRecord" (Handle, Handle);
    event_query c"cuEventQuery" (Handle);
    stream_wait c"cuStreamWaitEvent" (Handle, Handle, c_uint);
    stream_query c"cuStreamQuery" (Handle);
    range c"cuMemGetAddressRange_v2" (*mut u64, *mut usize, u64);
    set_attribute c"cuPointerSetAttribute" (*const c_void, c_int, u64);
    copy c"cuMemcpyAsync" (u64, u64, usize, Handle);
    capture_mode c"cuThreadExchangeStreamCaptureMode" (*mut c_uint);
    ipc_get c"cuIpcGetMemHandle" (*mut IpcHandle, u64);
    ipc_open c"cuIpcOpenMemHandle_v2" (*mut u64, IpcHandle, c_uint);
    ipc_close c"cuIpcCloseMemHandle" (u64);
}

functions! { Identity
    id c"cuCtxGetId" (Handle, *mut u64);
}

functions! { Flags
    get c"cuCtxGetFlags" (*mut c_uint);
    set c"cuCtxSetFlags" (c_uint);
}

functions! { Places
    address c"cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
}

functions! { Exporting
    dmabuf c"cuMemGetHandleForAddressRange" (*mut c_int, u64, usize, c_int, c_ulonglong);
}

functions! { Direct
    flush c"cuFlushGPUDirectRDMAWrites" (c_int, c_int);
    attribute c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
}

functions! { Registering
    register c"cuMemHostRegister_v2" (Handle, usize, c_uint);
    unregister c"cuMemHostUnregister" (Handle);
}

functions! { Sharing
    retain c"cuMemRetainAllocationHandle" (*mut u64, u64);
    release c"cuMemRelease" (u64);
    export c"cuMemExportToShareableHandle" (*mut c_int, u64, c_int, c_ulonglong);
    import c"cuMemImportFromShareableHandle" (*mut u64, usize, c_int);
    reserve c"cuMemAddressReserve" (*mut u64, usize, usize, u64, c_ulonglong);
    free_addresses c"cuMemAddressFree" (u64, usize);
    map c"cuMemMap" (u64, usize, usize, u64, c_ulonglong);
    unmap c"cuMemUnmap" (u64, usize);
    set_access c"cuMemSetAccess" (u64, usize, *const Access, usize);
    export_pool c"cuMemPoolExportToShareableHandle" (*mut c_int, u64, c_int, c_ulonglong);
    import_pool c"cuMemPoolImportFromShareableHandle" (*mut u64, usize, c_int, c_ulonglong);
    pool_access c"cuMemPoolSetAccess" (u64, *const Access, usize);
    destroy_pool c"cuMemPoolDestroy" (u64);
    export_pointer c"cuMemPoolExportPointer" (*mut IpcHandle, u64);
    import_pointer c"cuMemPoolImportPointer" (*mut u64, u64, *const IpcHandle);
    free c"cuMemFree_v2" (u64);
}

/// CUmemAccessDesc: a device may read and write.
#[repr(C)]
pub(super) struct Access {
    location: [c_int; 2],
    flags: c_int,
}

impl Access {
    /// CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
    pub(super) fn of(device: c_int) -> Self {
        Self { location: [1, device], flags: 3 }
    }
}

/// The driver of this process.
pub(crate) struct Cuda {
    pub(super) functions: Functions,
    /// Those for memory without an IPC handle; older drivers do not have them.
    pub(super) sharing: Option<Sharing>,
    /// For network devices; since CUDA 11.3.
    pub(super) direct: Option<Direct>,
    /// Since CUDA 11.7.
    pub(super) exporting: Option<Exporting>,
    pub(super) registering: Option<Registering>,
    places: Option<Places>,
    /// Since CUDA 12.0.
    identity: Option<Identity>,
    /// Since CUDA 12.1.
    flags: Option<Flags>,
    home: Home,
}

/// The primary contexts that were retained, once each. A reset of the device ends that too, and leaves the context inactive.
static RETAINED: [AtomicUsize; DEVICES_MAX] = [const { AtomicUsize::new(0) }; DEVICES_MAX];

static CUDA: MadeOnce<Option<Cuda>> = MadeOnce::new();

/// What the driver says about an address of device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Allocation {
    /// Its context; 0: the driver does not say.
    pub(super) context: usize,
    pub(super) ordinal: i32,
    /// BUFFER_ID, and for what is mapped MEMORY_BLOCK_ID too: no other allocation of this process has had it.
    pub(crate) id: u64,
    /// It may be that of other memory at this address: it is mapped, and the driver has no MEMORY_BLOCK_ID.
    pub(crate) is_vague: bool,
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) len: usize,
}

/// A context. Its handle may be that of another one later: a device that is reset keeps the handle of its primary context, in
/// which no stream of the earlier one exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Context {
    handle: usize,
    /// No other context of the process has had it. 0: the driver does not say.
    id: u64,
}

/// A context, with a stream and an event of the provider in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    pub(crate) context: Context,
    stream: usize,
    event: usize,
}

impl Context {
    pub(crate) fn handle(self) -> usize {
        self.handle
    }
}

pub(super) fn done(result: c_int) -> Result<(), Failure> {
    if result == 0 { Ok(()) } else { Err(Failure(result)) }
}

fn handle(number: usize) -> Handle {
    std::ptr::with_exposed_provenance_mut(number)
}

impl Cuda {
    /// Loads the driver's library, which has no effect on the process but that. `None`: there is none, or it is too old.
    pub(crate) fn open() -> Option<&'static Self> {
        let of = |library: Library| {
            let (sharing, identity) = (Sharing::of(&library), Identity::of(&library));
            let (flags, home) = (Flags::of(&library), Home::here());
            let (functions, direct) = (Functions::of(&library)?, Direct::of(&library));
            let (exporting, registering) = (Exporting::of(&library), Registering::of(&library));
            let places = Places::of(&library);
            Some(Self {
                functions,
                sharing,
                direct,
                exporting,
                registering,
                places,
                identity,
                flags,
                home,
            })
        };
        CUDA.get_or_make(|| of(Library::open(c"libcuda.so.1")?)).as_ref()
    }

    /// The driver, if it was loaded by [`Self::open`].
    #[inline]
    pub(crate) fn get() -> Option<&'static Self> {
        CUDA.get()?.as_ref()
    }

    /// The allocation of device memory that has the address. `None`: the processor may touch that memory, or nobody has
    /// initialised CUDA in this process. A forked child may have memory of its parent's, of which its driver tells nothing.
    pub(crate) fn find(&self, addr: u64) -> Result<Option<Allocation>, Failure> {
        let mut found =
            Allocation { context: 0, ordinal: -1, id: 0, is_vague: false, start: 0, len: 0 };
        let (mut kind, mut managed): (c_uint, c_uint) = (0, 0);
        // CONTEXT, MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, BUFFER_ID, RANGE_START_ADDR, RANGE_SIZE: one call, because
        // the call for a single attribute is slow on newer drivers.
        let mut which = [1, 2, 8, 9, 7, 11, 12];
        let mut places: [*mut c_void; 7] = [
            (&raw mut found.context).cast(),
            (&raw mut kind).cast(),
            (&raw mut managed).cast(),
            (&raw mut found.ordinal).cast(),
            (&raw mut found.id).cast(),
            (&raw mut found.start).cast(),
            (&raw mut found.len).cast(),
        ];
        let count = which.len() as c_uint;
        // SAFETY: as many attributes as places, each a local of its attribute's type.
        let result = unsafe {
            (self.functions.attributes)(count, which.as_mut_ptr(), places.as_mut_ptr(), addr)
        };
        match result {
            NOT_INITIALIZED if self.home.is_here() => return Ok(None),
            _ => done(result)?,
        }
        if kind != DEVICE || managed != 0 {
            return Ok(None);
        }
        if found.is_mapped() {
            self.narrow(&mut found, addr);
            self.tell_apart(&mut found, addr);
        }
        Ok(Some(found))
    }

    /// It is not known whether the BUFFER_ID of an address changes when other memory is mapped there; the MEMORY_BLOCK_ID does.
    fn tell_apart(&self, found: &mut Allocation, addr: u64) {
        let (mut block, mut which) = (0_u64, MEMORY_BLOCK_ID);
        let mut place: *mut c_void = (&raw mut block).cast();
        // SAFETY: one attribute, and one place, a local of its type.
        let asked = done(unsafe { (self.functions.attributes)(1, &mut which, &mut place, addr) });
        found.is_vague = asked.is_err() || block == 0;
        // Both are counts from small numbers on: side by side they stay distinct.
        found.id ^= block.rotate_left(32);
    }

    /// The range of memory of cuMemCreate is the whole reservation that it is mapped in, and this makes it the part that is
    /// mapped at an address. A driver that fails here leaves it.
    fn narrow(&self, found: &mut Allocation, addr: u64) {
        let (mut start, mut len) = (0, 0);
        let asked = self.within(self.context_of(found), || {
            // SAFETY: locals.
            done(unsafe { (self.functions.range)(&mut start, &mut len, addr) })
        });
        if asked.is_ok() {
            (found.start, found.len) = (start, len);
        }
    }

    /// The context of an allocation: its own, or the primary one of its device, if that is active, or another one of the device
    /// that this thread has or had. 0: none.
    pub(crate) fn context_of(&self, of: &Allocation) -> usize {
        if of.context != 0 {
            return of.context;
        }
        match self.primary(of.ordinal) {
            Ok(0) => self.current_on(of.ordinal),
            primary => primary.unwrap_or(0),
        }
    }

    /// The context of this thread if it is on the device; or else the last one that this has answered for the device: threads of
    /// the provider have none. 0: none.
    fn current_on(&self, ordinal: c_int) -> usize {
        static LAST: [AtomicUsize; DEVICES_MAX] = [const { AtomicUsize::new(0) }; DEVICES_MAX];
        let Some(last) = usize::try_from(ordinal).ok().and_then(|ordinal| LAST.get(ordinal)) else {
            return 0;
        };
        let is_on = |context: &usize| {
            *context != 0 && self.within(*context, || self.device()) == Ok(ordinal)
        };
        let found = [self.current(), last.load(Ordering::Acquire)].into_iter().find(is_on);
        last.store(found.unwrap_or(0), Ordering::Release);
        found.unwrap_or(0)
    }

    /// The context of this thread; 0: none.
    fn current(&self) -> usize {
        let mut context = std::ptr::null_mut();
        // SAFETY: a local.
        let result = unsafe { (self.functions.current)(&mut context) };
        if result == 0 { context.expose_provenance() } else { 0 }
    }

    /// The device of the current context.
    pub(super) fn device(&self) -> Result<c_int, Failure> {
        let mut device = 0;
        // SAFETY: a local.
        done(unsafe { (self.functions.device)(&mut device) })?;
        Ok(device)
    }

    /// Where the device of this thread's context is on the bus. `None`: it has no context, or the driver does not say.
    pub(crate) fn address_on_bus(&self) -> Option<PciAddress> {
        let (places, mut text) = (self.places?, [0_u8; 32]);
        if self.current() == 0 {
            return None;
        }
        let (device, len) = (self.device().ok()?, text.len() as c_int);
        // SAFETY: a local of that length, which gets a C string.
        done(unsafe { (places.address)(text.as_mut_ptr().cast(), len, device) }).ok()?;
        let text = CStr::from_bytes_until_nul(&text).ok()?;
        PciAddress::from_text(text.to_str().ok()?)
    }

    /// The context of a handle, which must be that of a context that has not ended.
    pub(crate) fn context(&self, handle: usize) -> Result<Context, Failure> {
        let (mut id, context) = (0, self::handle(handle));
        // SAFETY: a context and a local.
        let ask = |known: Identity| done(unsafe { (known.id)(context, &mut id) });
        self.identity.map_or(Ok(()), ask)?;
        Ok(Context { handle, id })
    }

    /// Whether the current context is this one, and not another one of its handle.
    pub(super) fn is_current(&self, context: Context) -> bool {
        // The driver takes 0 for the current one.
        self.context(0).is_ok_and(|current| current.id == context.id)
    }

    /// Whether the current context may be the primary one of its device.
    pub(super) fn may_be_primary(&self, context: Context) -> bool {
        let (mut flags, mut active) = (0, 0);
        let Ok(ordinal) = self.device() else { return true };
        // SAFETY: locals of the right types.
        let result = unsafe { (self.functions.primary_state)(ordinal, &mut flags, &mut active) };
        let retained = usize::try_from(ordinal).ok().and_then(|ordinal| RETAINED.get(ordinal));
        let retained = retained.map_or(0, |retained| retained.load(Ordering::Acquire));
        result != 0 || active != 0 && [0, context.handle].contains(&retained)
    }

    /// The primary context of a device, if the application has made it active. Failure: there is no such device.
    fn primary(&self, ordinal: c_int) -> Result<usize, Failure> {
        let (mut flags, mut active, mut context) = (0, 0, std::ptr::null_mut());
        // SAFETY: locals of the right types.
        done(unsafe { (self.functions.primary_state)(ordinal, &mut flags, &mut active) })?;
        let retained = usize::try_from(ordinal).ok().and_then(|ordinal| RETAINED.get(ordinal));
        let retained = retained.ok_or(Failure(INVALID_DEVICE))?;
        match retained.load(Ordering::Acquire) {
            _ if active == 0 => retained.store(0, Ordering::Release),
            0 => {
                // SAFETY: a local. The reference is kept until the process ends.
                done(unsafe { (self.functions.primary_retain)(&mut context, ordinal) })?;
                retained.store(context.expose_provenance(), Ordering::Release);
            }
            _ => {}
        }
        Ok(retained.load(Ordering::Acquire))
    }

    /// The primary context of the first device that has an active one, or a context of this thread.
    pub(crate) fn any_context(&self) -> Option<usize> {
        let mut all = (0..DEVICES_MAX as c_int).map_while(|ordinal| self.primary(ordinal).ok());
        let exists = |context: &usize| *context != 0 && self.within(*context, || Ok(())).is_ok();
        all.find(|context| *context != 0).or_else(|| Some(self.current()).filter(exists))
    }

    /// Sets SYNC_MEMOPS on an allocation. Memory of cuMemCreate and of pools does not take it, and has it set for its whole
    /// context: not at once for all contexts, because that call may wait for kernels. Older drivers leave such memory.
    pub(crate) fn synchronize(&self, of: &Allocation) {
        let one: c_uint = 1;
        let _ = self.within(self.context_of(of), || {
            // SAFETY: the value of that attribute is a local of 4 bytes.
            let set = done(unsafe {
                (self.functions.set_attribute)((&raw const one).cast(), SYNC_MEMOPS, of.start)
            });
            if set.is_ok() { set } else { self.synchronize_context() }
        });
    }

    /// The same for the current context.
    fn synchronize_context(&self) -> Result<(), Failure> {
        let (Some(known), mut flags) = (self.flags, 0) else { return Ok(()) };
        // SAFETY: a local; the other flags stay as they are.
        unsafe {
            done((known.get)(&mut flags))?;
            let all = flags | SYNC_MEMOPS_OF_ALL;
            if flags == all { Ok(()) } else { done((known.set)(all)) }
        }
    }

    /// Calls `then` with the context current, whatever thread this is, and leaves the thread as it was. An application
    /// that captures a graph meanwhile must not capture our calls, nor have them refused.
    pub(super) fn within<T>(
        &self,
        context: usize,
        then: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut mode = RELAXED;
        let mut popped = std::ptr::null_mut();
        // SAFETY: a context of the application; failures are reported for one that is gone.
        done(unsafe { (self.functions.push)(handle(context)) })?;
        // SAFETY: a local.
        let relaxed = unsafe { (self.functions.capture_mode)(&mut mode) } == 0;
        let outcome = then();
        // SAFETY: locals; the thread's own mode, and the context that was pushed.
        unsafe {
            if relaxed {
                (self.functions.capture_mode)(&mut mode);
            }
            (self.functions.pop)(&mut popped);
        }
        outcome
    }

    /// A stream and an event in a context.
    pub(crate) fn lane(&self, context: Context) -> Result<Lane, Failure> {
        let (mut stream, mut event) = (std::ptr::null_mut(), std::ptr::null_mut());
        self.within(context.handle, || {
            // SAFETY: locals.
            done(unsafe { (self.functions.stream_create)(&mut stream, NON_BLOCKING) })?;
            // SAFETY: a local.
            done(unsafe { (self.functions.event_create)(&mut event, NO_TIMING) })
        })?;
        let (stream, event) = (stream.expose_provenance(), event.expose_provenance());
        Ok(Lane { context, stream, event })
    }

    /// Begins a copy, of which [`Self::is_done`] tells the end.
    ///
    /// # Safety
    /// Both ranges stay valid until then, the source unchanged.
    pub(crate) unsafe fn start(
        &self,
        lane: &Lane,
        to: usize,
        from: usize,
        len: usize,
    ) -> Result<(), Failure> {
        self.within(lane.context.handle(), || {
            // SAFETY: the caller vouches for the ranges; stream and event are the lane's.
            unsafe {
                done((self.functions.copy)(to as u64, from as u64, len, handle(lane.stream)))?;
                done((self.functions.event_record)(handle(lane.event), handle(lane.stream)))
            }
        })
    }

    /// Copies started on the lane from now on begin when all those started on `before` have ended.
    pub(crate) fn follow(&self, lane: &Lane, before: &Lane) -> Result<(), Failure> {
        self.within(lane.context.handle(), || {
            // SAFETY: a stream and an event of this provider.
            done(unsafe {
                (self.functions.stream_wait)(handle(lane.stream), handle(before.event), 0)
            })
        })
    }

    /// Whether all that was started on the lane has ended.
    pub(crate) fn is_done(&self, lane: &Lane) -> Result<bool, Failure> {
        // SAFETY: the lane's event.
        self.ready(lane, || unsafe { (self.functions.event_query)(handle(lane.event)) })
    }

    /// The same of copies that [`Self::start`] has begun and then failed for.
    pub(crate) fn is_idle(&self, lane: &Lane) -> Result<bool, Failure> {
        // SAFETY: the lane's stream.
        self.ready(lane, || unsafe { (self.functions.stream_query)(handle(lane.stream)) })
    }

    fn ready(&self, lane: &Lane, ask: impl FnOnce() -> c_int) -> Result<bool, Failure> {
        let mut result = 0;
        self.within(lane.context.handle(), || {
            result = ask();
            Ok(())
        })?;
        if result == NOT_READY { Ok(false) } else { done(result).map(|()| true) }
    }
}

impl Allocation {
    /// What the driver maps to addresses, a pool's memory or that of cuMemCreate: memory of the same kind may continue it.
    pub(crate) fn is_mapped(&self) -> bool {
        self.context == 0
    }

    pub(crate) fn end(&self) -> u64 {
        self.start.saturating_add(self.len as u64)
    }
}

#[cfg(test)]
impl Allocation {
    /// One that no driver knows.
    pub(crate) fn test(start: u64, len: usize) -> Self {
        Self { context: 1, ordinal: 0, id: 1, is_vague: false, start, len }
    }
}
