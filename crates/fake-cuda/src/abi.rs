//! The driver API.

use crate::counters;
use crate::memory::Allocation;
use crate::model::{
    Answer, Failure, Handle, INVALID_CONTEXT, INVALID_VALUE, NOT_FOUND, NOT_READY, NOT_SUPPORTED,
    contexts, initialize, with,
};
use crate::settings::Settings;
use crate::stream::{Function, Stream, Work};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// CUipcMemHandle.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union IpcHandle {
    pub(crate) said: Handle,
    pub(crate) bytes: [u8; 64],
}

/// Counts a call, and fails it if it is to fail.
pub(crate) fn enter(function: &'static str, then: impl FnOnce() -> Answer) -> c_int {
    let call = counters::count(function);
    if let Some(result) = Settings::get().failure(function, call) {
        counters::count_failure(function);
        return result;
    }
    match then() {
        Ok(()) => 0,
        Err(Failure(result)) => result,
    }
}

/// Gives the caller a result; failure 1 for no place.
pub(crate) fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: every function of the API asks for places that can be written, or null.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Functions of the API: what they answer is 0, or the failure.
macro_rules! api {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            $crate::abi::enter(stringify!($name), || $body)
        }
    )*};
}

pub(crate) use api;

type Pointer = usize;

api! {
    fn cuInit(_flags: c_uint) { initialize() }
    fn cuDriverGetVersion(version: *mut c_int) { put(version, 13_000) }
    fn cuDeviceGetCount(count: *mut c_int) {
        with(|_| Ok(Settings::get().devices as c_int)).and_then(|n| put(count, n))
    }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        with(|model| model.device(ordinal)).and_then(|ordinal| put(device, ordinal))
    }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        with(|model| model.device(device))?;
        // UNIFIED_ADDRESSING, compute capability 9.0, memory of cuMemCreate and its export by descriptor, pools and theirs,
        // GPUDirect RDMA and its flush by the host, dma-buf descriptors; the order of what other devices write.
        let ordered = if Settings::get().ordered { 100 } else { 0 };
        put(value, match attribute { 41 | 102 | 103 | 115 | 116 | 117 | 119 | 124 => 1, 75 => 9, 118 => ordered, _ => 0 })
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        let device = with(|model| model.device(device))?;
        let mut name = *b"fake-cuda\0\0\0\0\0\0\0";
        if let Some(last) = name.last_mut() {
            *last = Settings::get().number_of(device) as u8;
        }
        put(uuid, name)
    }
    fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int) {
        let device = with(|model| model.device(device))?;
        // The double of libibverbs has the first one there.
        let address = format!("0000:{:02x}:00.0\0", 0x40 + Settings::get().number_of(device));
        if text.is_null() || usize::try_from(len).is_ok_and(|len| len < address.len()) || len < 0 {
            return Err(INVALID_VALUE);
        }
        for (at, byte) in address.bytes().enumerate() {
            // SAFETY: the caller vouches for `len` bytes, which are enough.
            unsafe { text.add(at).write(byte as c_char) };
        }
        Ok(())
    }
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        with(|model| model.device(device).and_then(|_| model.device(peer)))?;
        put(can, c_int::from(device != peer && !Settings::get().apart))
    }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        let is = with(|model| Ok(model.is_active(model.device(device)?)))?;
        put(flags, 0)?;
        put(active, c_int::from(is))
    }
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        with(|model| model.retain(device)).and_then(|made| put(context, made))
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) { with(|model| model.release(device)) }
    fn cuDevicePrimaryCtxReset_v2(device: c_int) { with(|model| model.reset(device)) }
    fn cuCtxGetId(context: usize, id: *mut u64) {
        with(|model| {
            let context = if context == 0 { model.context()?.0 } else { context };
            Ok(model.id_of(context))
        }).and_then(|its| put(id, its))
    }
    fn cuCtxGetFlags(flags: *mut c_uint) { with(|model| model.flags().copied()).and_then(|its| put(flags, its)) }
    fn cuCtxSetFlags(flags: c_uint) { with(|model| model.flags().map(|its| *its = flags)) }
    fn cuCtxCreate_v2(context: *mut usize, _flags: c_uint, device: c_int) {
        let made = with(|model| model.create_context(device))?;
        contexts(|all| all.push(made));
        put(context, made)
    }
    fn cuCtxDestroy_v2(context: usize) {
        with(|model| model.destroy_context(context))?;
        contexts(|all| all.retain(|other| *other != context));
        Ok(())
    }
    fn cuCtxPushCurrent_v2(context: usize) {
        with(|model| if model.is_context(context) { Ok(()) } else { Err(INVALID_CONTEXT) })?;
        contexts(|all| all.push(context));
        Ok(())
    }
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        with(|_| Ok(()))?;
        let popped = contexts(Vec::pop).ok_or(INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { put(context, popped) }
    }
    fn cuCtxSetCurrent(context: usize) {
        with(|model| if context == 0 || model.is_context(context) { Ok(()) } else { Err(INVALID_CONTEXT) })?;
        contexts(|all| {
            all.pop();
            all.extend((context != 0).then_some(context));
        });
        Ok(())
    }
    fn cuCtxGetCurrent(context: *mut usize) {
        with(|_| Ok(()))?;
        put(context, contexts(|all| all.last().copied()).unwrap_or(0))
    }
    fn cuCtxGetDevice(device: *mut c_int) {
        with(|model| model.context()).and_then(|(_, its)| put(device, its))
    }
    fn cuCtxSynchronize() {
        with(|model| model.context())?;
        drain_blocking()
    }
    fn cuThreadExchangeStreamCaptureMode(_mode: *mut c_uint) { with(|_| Ok(())) }

    fn cuMemAlloc_v2(addr: *mut Pointer, len: usize) {
        with(|model| model.allocate(len)).and_then(|at| put(addr, at))
    }
    fn cuMemAllocManaged(addr: *mut Pointer, len: usize, _flags: c_uint) {
        with(|model| model.allocate_managed(len)).and_then(|at| put(addr, at))
    }
    fn cuMemHostAlloc(addr: *mut Pointer, len: usize, _flags: c_uint) {
        with(|model| model.allocate_host(len)).and_then(|at| put(addr, at))
    }
    fn cuMemFree_v2(addr: Pointer) {
        if addr == 0 {
            return Ok(());
        }
        // For memory of a pool it waits for nothing.
        if !with(|model| Ok(model.is_of_pool(addr)))? {
            drain_blocking()?;
        }
        with(|model| model.free(addr))
    }
    fn cuMemFreeHost(addr: Pointer) {
        drain_blocking()?;
        with(|model| model.free_host(addr))
    }
    fn cuMemHostRegister_v2(addr: Pointer, len: usize, _flags: c_uint) { with(|model| model.register(addr, len)) }
    fn cuMemHostUnregister(addr: Pointer) { with(|model| model.unregister(addr)) }
    fn cuMemHostGetDevicePointer_v2(to: *mut Pointer, addr: Pointer, _flags: c_uint) {
        with(|model| model.find(addr).filter(|a| a.is_host()).map(|_| addr).ok_or(INVALID_VALUE))
            .and_then(|addr| put(to, addr))
    }
    fn cuMemGetAddressRange_v2(base: *mut Pointer, len: *mut usize, addr: Pointer) {
        let (at, size) = with(|model| {
            let found = model.find(addr).filter(|a| !a.is_host()).ok_or(NOT_FOUND)?;
            Ok((found.base, found.len))
        })?;
        if !base.is_null() { put(base, at)?; }
        if len.is_null() { Ok(()) } else { put(len, size) }
    }
    fn cuPointerGetAttribute(to: *mut c_void, attribute: c_int, addr: Pointer) {
        with(|model| attribute_of(model.find(addr).ok_or(INVALID_VALUE)?.as_ref().into(), attribute, addr, to))
    }
    fn cuPointerGetAttributes(n: c_uint, attributes: *const c_int, to: *const *mut c_void, addr: Pointer) {
        with(|model| {
            let found = model.find(addr).map(AsRef::as_ref);
            for at in 0..n as usize {
                // SAFETY: the caller has `n` attributes, and as many places.
                let (attribute, to) = unsafe { (*attributes.add(at), *to.add(at)) };
                attribute_of(found, attribute, addr, to)?;
            }
            Ok(())
        })
    }
    fn cuPointerSetAttribute(value: *const c_void, attribute: c_int, addr: Pointer) {
        // SAFETY: the only attribute that can be set is an int.
        let value = unsafe { value.cast::<c_int>().read_unaligned() };
        with(|model| {
            let found = model.find(addr).filter(|_| attribute == 6).ok_or(INVALID_VALUE)?;
            if found.context == 0 {
                return Err(NOT_SUPPORTED);
            }
            found.sync.store(value != 0, Ordering::Relaxed);
            Ok(())
        })
    }
    fn cuMemGetHandleForAddressRange(fd: *mut c_int, at: Pointer, len: usize, kind: c_int, _flags: u64) {
        if kind != 1 {
            return Err(INVALID_VALUE);
        }
        with(|model| model.dmabuf(at, len)).and_then(|made| put(fd, made.into_raw_fd()))
    }
    fn cuFlushGPUDirectRDMAWrites(target: c_int, scope: c_int) {
        with(|model| model.context())?;
        if target != 0 || !matches!(scope, 100 | 200) {
            return Err(INVALID_VALUE);
        }
        crate::sys::flush_devices();
        Ok(())
    }
    fn cuIpcGetMemHandle(handle: *mut IpcHandle, addr: Pointer) {
        let mut made = IpcHandle { bytes: [0; 64] };
        made.said = with(|model| model.export(addr, Allocation::exported))?;
        put(handle, made)
    }
    fn cuIpcOpenMemHandle_v2(addr: *mut Pointer, handle: IpcHandle, _flags: c_uint) {
        // SAFETY: any bytes are a handle.
        let said = unsafe { handle.said };
        with(|model| model.import(&said)).and_then(|at| put(addr, at))
    }
    fn cuIpcCloseMemHandle(addr: Pointer) {
        drain_blocking()?;
        with(|model| model.close(addr))
    }

    fn cuMemcpy(to: Pointer, from: Pointer, len: usize) { copy_now(to, from, len) }
    fn cuMemcpyHtoD_v2(to: Pointer, from: Pointer, len: usize) { copy_now(to, from, len) }
    fn cuMemcpyDtoH_v2(to: Pointer, from: Pointer, len: usize) { copy_now(to, from, len) }
    fn cuMemcpyDtoD_v2(to: Pointer, from: Pointer, len: usize) { copy_now(to, from, len) }
    fn cuMemcpyAsync(to: Pointer, from: Pointer, len: usize, stream: usize) {
        count_direction(to, from, len)?;
        let late = Settings::get().late.filter(|(call, _)| *call == counters::calls_of("cuMemcpyAsync"));
        if let Some((_, pause)) = late {
            find(stream)?.put(Work::Pause(pause));
        }
        copy(to, from, len, stream)
    }
    fn cuMemcpyHtoDAsync_v2(to: Pointer, from: Pointer, len: usize, stream: usize) { copy(to, from, len, stream) }
    fn cuMemcpyDtoHAsync_v2(to: Pointer, from: Pointer, len: usize, stream: usize) { copy(to, from, len, stream) }
    fn cuMemcpyDtoDAsync_v2(to: Pointer, from: Pointer, len: usize, stream: usize) { copy(to, from, len, stream) }
    fn cuMemsetD8_v2(to: Pointer, value: u8, len: usize) {
        with(|model| {
            let (work, stream) = (model.fill(to, value, len)?, model.stream(0)?);
            work.into_iter().for_each(|work| stream.put(work));
            Ok(())
        })?;
        drain_blocking()
    }

    fn cuStreamCreate(stream: *mut usize, flags: c_uint) {
        with(|model| model.create_stream(flags & 1 == 0)).and_then(|made| put(stream, made))
    }
    fn cuStreamDestroy_v2(stream: usize) { with(|model| model.destroy_stream(stream)) }
    fn cuStreamQuery(stream: usize) {
        if find(stream)?.is_idle() { Ok(()) } else { Err(NOT_READY) }
    }
    fn cuStreamSynchronize(stream: usize) {
        find(stream)?.drain();
        Ok(())
    }
    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) {
        let event = with(|model| model.event(event))?;
        let turn = event.recorded();
        find(stream)?.put(Work::Wait(event, turn));
        Ok(())
    }
    fn cuLaunchHostFunc(stream: usize, function: Function, argument: usize) {
        find(stream)?.put(Work::Call(function, argument));
        Ok(())
    }
    fn cuEventCreate(event: *mut usize, _flags: c_uint) {
        with(|model| model.create_event()).and_then(|made| put(event, made))
    }
    fn cuEventDestroy_v2(event: usize) { with(|model| model.destroy_event(event)) }
    fn cuEventRecord(event: usize, stream: usize) {
        let event = with(|model| model.event(event))?;
        let turn = event.record();
        find(stream)?.put(Work::Record(event, turn));
        Ok(())
    }
    fn cuEventQuery(event: usize) {
        if with(|model| model.event(event))?.has_happened() { Ok(()) } else { Err(NOT_READY) }
    }
    fn cuEventSynchronize(event: usize) {
        let event = with(|model| model.event(event))?;
        event.wait(event.recorded());
        Ok(())
    }

    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        with(|model| model.device(device))?;
        for (at, byte) in b"the double\0".iter().enumerate().take(len.max(0) as usize) {
            // SAFETY: the caller has room for `len` bytes.
            unsafe { name.add(at).write(*byte as c_char) };
        }
        Ok(())
    }
    // There are no kernels.
    fn cuModuleLoadFatBinary(_module: *mut usize, _image: *const c_void) { Err(NOT_SUPPORTED) }
    fn cuModuleGetFunction(_to: *mut usize, _module: usize, _name: *const c_char) { Err(NOT_FOUND) }
    fn cuModuleGetGlobal_v2(_to: *mut Pointer, _len: *mut usize, _module: usize, _name: *const c_char) { Err(NOT_FOUND) }
    fn cuModuleUnload(_module: usize) { Ok(()) }
    fn cuOccupancyMaxPotentialBlockSize(_grid: *mut c_int, _block: *mut c_int, _of: usize, _shared: usize, _dynamic: usize, _most: c_int) {
        Err(NOT_SUPPORTED)
    }

    fn cuGetErrorName(_result: c_int, name: *mut *const c_char) { put(name, c"CUDA_ERROR_OF_THE_DOUBLE".as_ptr()) }
    fn cuGetErrorString(_result: c_int, text: *mut *const c_char) { put(text, c"an error of the double".as_ptr()) }
}

pub(crate) fn find(stream: usize) -> Answer<Arc<Stream>> {
    with(|model| model.stream(stream))
}

/// Counts long copies by what they are between.
fn count_direction(to: Pointer, from: Pointer, len: usize) -> Answer {
    const LONG: usize = 64 * 1024;
    let device = |addr| with(|model| Ok(model.find(addr).is_some_and(|found| !found.is_host())));
    let name = match (device(to)?, device(from)?) {
        _ if len < LONG => return Ok(()),
        (true, true) => "long-DtoD",
        (true, false) => "long-HtoD",
        (false, _) => "long-DtoH",
    };
    counters::count(name);
    Ok(())
}

/// Waits without the lock: what is drained may need it.
fn drain_blocking() -> Answer {
    let all = with(|model| Ok(model.blocking()))?;
    all.iter().for_each(|stream| stream.drain());
    Ok(())
}

/// An asynchronous copy. To pageable memory it returns when it has run.
fn copy(to: Pointer, from: Pointer, len: usize, stream: usize) -> Answer {
    let (stream, waits) = with(|model| {
        let (work, waits) = model.copy(to, from, len)?;
        let stream = model.stream(stream)?;
        work.into_iter().for_each(|work| stream.put(work));
        Ok((stream, waits))
    })?;
    if waits {
        stream.drain();
    }
    Ok(())
}

/// A synchronous copy, on the default stream, which waits for the blocking ones.
fn copy_now(to: Pointer, from: Pointer, len: usize) -> Answer {
    let early = with(|model| Ok(model.returns_early(to, from)))?;
    drain_blocking()?;
    copy(to, from, len, 0)?;
    if early { Ok(()) } else { find(0).map(|stream| stream.drain()) }
}

/// Writes an attribute of memory that may be unknown: zeros then.
fn attribute_of(
    of: Option<&Allocation>,
    attribute: c_int,
    addr: Pointer,
    to: *mut c_void,
) -> Answer {
    match attribute {
        1 => put(to.cast(), of.map_or(0, |of| of.context)),
        2 => put(to.cast(), of.map_or(0, Allocation::memory_type)),
        3 | 4 => put(to.cast(), of.map_or(0, |_| addr)),
        6 => put(to.cast(), of.map_or(0, |of| c_int::from(of.sync.load(Ordering::Relaxed)))),
        7 => put(to.cast(), of.map_or(0, Allocation::buffer_id)),
        8 => put(to.cast(), c_uint::from(of.is_some_and(Allocation::is_managed))),
        9 => put(to.cast(), of.map_or(-2, |of| of.ordinal)),
        10 => put(to.cast(), c_uint::from(of.is_some_and(|of| of.exported().is_some()))),
        11 => put(to.cast(), of.map_or(0, |of| of.range().0)),
        12 => put(to.cast(), of.map_or(0, |of| of.range().1)),
        13 => put(to.cast(), c_uint::from(of.is_some())),
        14 => put(to.cast(), of.map_or(0, |of| u64::from(of.types()))),
        17 => put(to.cast(), of.map_or(0, Allocation::pool)),
        20 if Settings::get().blocks => put(to.cast(), of.map_or(0, Allocation::block_id)),
        _ => Err(INVALID_VALUE),
    }
}

/// No function of a driver: how often the process has called one, with `FAKE_CUDA`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakeCudaCalls(name: *const c_char) -> u64 {
    // SAFETY: the caller names a function.
    let name = unsafe { CStr::from_ptr(name) };
    name.to_str().map_or(0, counters::calls_of)
}

/// There are no kernels.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLaunchKernel() -> c_int {
    enter("cuLaunchKernel", || Err(NOT_SUPPORTED))
}

/// The older name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRelease(device: c_int) -> c_int {
    enter("cuDevicePrimaryCtxRelease", || with(|model| model.release(device)))
}
