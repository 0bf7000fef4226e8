//! The part of the driver API whose memory is exported by descriptors.

use crate::abi::{IpcHandle, api, find, put};
use crate::memory::Allocation;
use crate::model::{Answer, INVALID_VALUE, with};
use crate::shared::GRANULARITY;
use crate::sys;
use std::ffi::{c_int, c_uint};
use std::os::fd::IntoRawFd;

type Pointer = usize;

const POSIX_FD: c_int = 1;
/// CU_MEM_LOCATION_TYPE_DEVICE.
const DEVICE: c_int = 1;

/// CUmemAllocationProp; the rest is not looked at.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    kind: c_int,
    types: c_int,
    location: [c_int; 2],
}

/// CUmemAccessDesc.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Access {
    location: [c_int; 2],
    flags: c_int,
}

/// What the caller points to; failure 1 for null.
fn get<T: Copy>(from: *const T) -> Answer<T> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: every function of the API asks for valid structures, or null.
    Ok(unsafe { from.read_unaligned() })
}

fn on_device(location: [c_int; 2]) -> Answer<c_int> {
    let [kind, ordinal] = location;
    if kind == DEVICE { Ok(ordinal) } else { Err(INVALID_VALUE) }
}

fn of_type(kind: c_int) -> Answer {
    if kind == POSIX_FD { Ok(()) } else { Err(INVALID_VALUE) }
}

fn descriptor(number: usize) -> Answer<std::os::fd::OwnedFd> {
    i32::try_from(number).ok().and_then(sys::duplicate).ok_or(INVALID_VALUE)
}

api! {
    fn cuMemGetAllocationGranularity(len: *mut usize, _of: *const Properties, _option: c_uint) { put(len, GRANULARITY) }
    fn cuMemCreate(handle: *mut usize, len: usize, of: *const Properties, _flags: u64) {
        let of = get(of)?;
        let device = on_device(of.location)?;
        with(|model| model.create(len, of.types as u32, device)).and_then(|made| put(handle, made))
    }
    fn cuMemRelease(handle: usize) { with(|model| model.release_handle(handle)) }
    fn cuMemRetainAllocationHandle(handle: *mut usize, addr: Pointer) {
        with(|model| model.retain_handle(addr)).and_then(|kept| put(handle, kept))
    }
    fn cuMemGetAllocationPropertiesFromHandle(of: *mut Properties, handle: usize) {
        let (types, ordinal) = with(|model| model.physical(handle).map(|p| (p.types as c_int, p.ordinal)))?;
        put(of, Properties { kind: 1, types, location: [DEVICE, ordinal] })
    }
    fn cuMemExportToShareableHandle(fd: *mut c_int, handle: usize, kind: c_int, _flags: u64) {
        of_type(kind)?;
        with(|model| model.export_handle(handle)).and_then(|made| put(fd, made.into_raw_fd()))
    }
    fn cuMemImportFromShareableHandle(handle: *mut usize, fd: usize, kind: c_int) {
        of_type(kind)?;
        let file = descriptor(fd)?;
        with(|model| model.import_handle(file)).and_then(|made| put(handle, made))
    }
    fn cuMemAddressReserve(at: *mut Pointer, len: usize, _alignment: usize, _wanted: Pointer, _flags: u64) {
        with(|model| model.reserve(len)).and_then(|got| put(at, got))
    }
    fn cuMemAddressFree(at: Pointer, len: usize) { with(|model| model.free_addresses(at, len)) }
    fn cuMemMap(at: Pointer, len: usize, offset: usize, handle: usize, _flags: u64) {
        if offset != 0 {
            return Err(INVALID_VALUE);
        }
        with(|model| model.map(at, len, handle))
    }
    fn cuMemUnmap(at: Pointer, len: usize) { with(|model| model.unmap(at, len)) }
    fn cuMemSetAccess(at: Pointer, len: usize, access: *const Access, count: usize) {
        let access = get(access)?;
        on_device(access.location)?;
        with(|model| model.set_access(at, len, count > 0 && access.flags == 3))
    }

    fn cuMemAllocAsync(addr: *mut Pointer, len: usize, stream: usize) {
        find(stream)?;
        with(|model| model.allocate_in_pool(len, 0)).and_then(|at| put(addr, at))
    }
    fn cuMemAllocFromPoolAsync(addr: *mut Pointer, len: usize, pool: usize, stream: usize) {
        find(stream)?;
        if pool == 0 {
            return Err(INVALID_VALUE);
        }
        with(|model| model.allocate_in_pool(len, pool)).and_then(|at| put(addr, at))
    }
    fn cuMemFreeAsync(addr: Pointer, stream: usize) {
        find(stream)?.drain();
        with(|model| model.free_in_pool(addr))
    }
    fn cuMemPoolCreate(pool: *mut usize, of: *const Properties) {
        let of = get(of)?;
        let device = on_device(of.location)?;
        with(|model| model.create_pool(of.types as u32, device)).and_then(|made| put(pool, made))
    }
    fn cuMemPoolDestroy(pool: usize) { with(|model| model.destroy_pool(pool)) }
    fn cuMemPoolSetAccess(pool: usize, access: *const Access, _count: usize) {
        on_device(get(access)?.location)?;
        with(|model| model.pool(pool).map(|_| ()))
    }
    fn cuMemPoolExportToShareableHandle(fd: *mut c_int, pool: usize, kind: c_int, _flags: u64) {
        of_type(kind)?;
        with(|model| model.export_pool(pool)).and_then(|made| put(fd, made.into_raw_fd()))
    }
    fn cuMemPoolImportFromShareableHandle(pool: *mut usize, fd: usize, kind: c_int, _flags: u64) {
        of_type(kind)?;
        let file = descriptor(fd)?;
        with(|model| model.import_pool(file)).and_then(|made| put(pool, made))
    }
    fn cuMemPoolExportPointer(data: *mut IpcHandle, addr: Pointer) {
        let mut made = IpcHandle { bytes: [0; 64] };
        made.said = with(|model| model.export(addr, Allocation::exported_of_pool))?;
        put(data, made)
    }
    fn cuMemPoolImportPointer(addr: *mut Pointer, pool: usize, data: *const IpcHandle) {
        // SAFETY: any bytes are a handle.
        let said = unsafe { get(data)?.said };
        with(|model| model.import_of_pool(pool, &said)).and_then(|at| put(addr, at))
    }
}
