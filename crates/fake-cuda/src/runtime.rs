//! The part of the runtime API that fabtests and MPIs load. The first call of a thread makes the primary context of
//! its device current, as the runtime does.

use crate::abi::{self, IpcHandle};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Mutex, PoisonError};

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// The thread's device, with its context current. Error: a result of the driver.
fn ready() -> Result<c_int, c_int> {
    let device = DEVICE.get();
    let mut context = 0;
    // SAFETY: a place of this function.
    done(unsafe { abi::cuInit(0) })?;
    // SAFETY: as above.
    done(unsafe { abi::cuCtxGetCurrent(&mut context) })?;
    let own = primary(device)?;
    if context == 0 {
        // SAFETY: a context that was retained.
        done(unsafe { abi::cuCtxSetCurrent(own) })?;
    }
    Ok(device)
}

/// The primary context of a device, which the runtime keeps from its first call on, even if the application releases it.
fn primary(device: c_int) -> Result<usize, c_int> {
    static KEPT: Mutex<BTreeMap<c_int, usize>> = Mutex::new(BTreeMap::new());
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut flags, mut active, mut context) = (0, 0, 0);
    // SAFETY: places of this function.
    done(unsafe { abi::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) })?;
    match kept.get(&device) {
        Some(known) if active != 0 => return Ok(*known),
        // SAFETY: as above.
        _ => done(unsafe { abi::cuDevicePrimaryCtxRetain(&mut context, device) })?,
    }
    kept.insert(device, context);
    Ok(context)
}

fn done(result: c_int) -> Result<(), c_int> {
    if result == 0 { Ok(()) } else { Err(result) }
}

/// Functions of the runtime that are a function of the driver in the thread's context.
macro_rules! same {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            let Err(result) = ready().and_then(|_| {
                // SAFETY: the caller vouches for the same arguments.
                done(unsafe { $body })
            }) else { return 0 };
            result
        }
    )*};
}

same! {
    fn cudaMalloc(addr: *mut usize, len: usize) abi::cuMemAlloc_v2(addr, len);
    fn cudaMallocManaged(addr: *mut usize, len: usize, flags: c_uint) abi::cuMemAllocManaged(addr, len, flags);
    fn cudaMallocHost(addr: *mut usize, len: usize) abi::cuMemHostAlloc(addr, len, 0);
    fn cudaHostAlloc(addr: *mut usize, len: usize, flags: c_uint) abi::cuMemHostAlloc(addr, len, flags);
    fn cudaFree(addr: usize) abi::cuMemFree_v2(addr);
    fn cudaFreeHost(addr: usize) abi::cuMemFreeHost(addr);
    fn cudaMemcpy(to: usize, from: usize, len: usize, _kind: c_int) abi::cuMemcpy(to, from, len);
    fn cudaMemcpyAsync(to: usize, from: usize, len: usize, _kind: c_int, stream: usize)
        abi::cuMemcpyAsync(to, from, len, stream);
    fn cudaMemset(to: usize, value: c_int, len: usize) abi::cuMemsetD8_v2(to, value as u8, len);
    fn cudaHostRegister(addr: usize, len: usize, flags: c_uint) abi::cuMemHostRegister_v2(addr, len, flags);
    fn cudaHostUnregister(addr: usize) abi::cuMemHostUnregister(addr);
    fn cudaDeviceSynchronize() abi::cuCtxSynchronize();
    fn cudaStreamCreate(stream: *mut usize) abi::cuStreamCreate(stream, 0);
    fn cudaStreamDestroy(stream: usize) abi::cuStreamDestroy_v2(stream);
    fn cudaStreamSynchronize(stream: usize) abi::cuStreamSynchronize(stream);
    fn cudaIpcGetMemHandle(handle: *mut IpcHandle, addr: usize) abi::cuIpcGetMemHandle(handle, addr);
    fn cudaIpcOpenMemHandle(addr: *mut usize, handle: IpcHandle, flags: c_uint)
        abi::cuIpcOpenMemHandle_v2(addr, handle, flags);
    fn cudaIpcCloseMemHandle(addr: usize) abi::cuIpcCloseMemHandle(addr);
    fn cudaGetDeviceCount(count: *mut c_int) abi::cuDeviceGetCount(count);
    fn cudaRuntimeGetVersion(version: *mut c_int) abi::cuDriverGetVersion(version);
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaGetDevice(device: *mut c_int) -> c_int {
    match ready() {
        Ok(own) => {
            // SAFETY: the caller's place.
            unsafe { device.write(own) };
            0
        }
        Err(result) => result,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaSetDevice(device: c_int) -> c_int {
    // SAFETY: it has no places.
    let made = done(unsafe { abi::cuInit(0) })
        .and_then(|()| primary(device))
        // SAFETY: a context that was retained.
        .and_then(|context| done(unsafe { abi::cuCtxSetCurrent(context) }));
    match made {
        Ok(()) => DEVICE.set(device),
        Err(result) => return result,
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGetErrorName(_result: c_int) -> *const c_char {
    c"cudaErrorOfTheDouble".as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGetErrorString(_result: c_int) -> *const c_char {
    c"an error of the double".as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cudaGetLastError() -> c_int {
    0
}
