//! `fi_getopt` and `fi_setopt` (fi_endpoint.3), `fi_tx_size_left` and `fi_rx_size_left`.

use super::contexts::Role;
use super::state::{Endpoint, EndpointFid, EndpointState, endpoint};
use crate::memory::atomic::MAX_BYTES;
use crate::ofi::guard::{code, entry};
use crate::ofi::info::INJECT_RMA_SIZE;
use crate::ofi::lock::Guard;
use libfabric_sys::{
    FI_EINVAL, FI_ENOPROTOOPT, FI_EOPBADSTATE, FI_EOPNOTSUPP, FI_ETOOSMALL, FI_HMEM,
    FI_HMEM_P2P_DISABLED, FI_HMEM_P2P_REQUIRED, FI_OPT_CUDA_API_PERMITTED, FI_OPT_ENDPOINT,
    FI_OPT_FI_HMEM_P2P, FI_OPT_INJECT_ATOMIC_SIZE, FI_OPT_INJECT_MSG_SIZE, FI_OPT_INJECT_RMA_SIZE,
    FI_OPT_INJECT_TAGGED_SIZE, FI_OPT_MAX_ATOMIC_SIZE, FI_OPT_MAX_MSG_SIZE, FI_OPT_MAX_RMA_SIZE,
    FI_OPT_MAX_TAGGED_SIZE, FI_OPT_MIN_MULTI_RECV, FI_OPT_SHARED_MEMORY_PERMITTED, fid_ep, fid_t,
};
use std::ffi::{c_int, c_void};

/// # Safety
/// `value` has `*len` bytes.
pub(super) unsafe fn give<T: Copy>(
    value: *mut c_void,
    len: *mut usize,
    from: T,
) -> Result<(), i32> {
    if value.is_null() || len.is_null() {
        return Err(FI_EINVAL);
    }
    // SAFETY: the caller vouches; checked not to be null.
    unsafe {
        let room = std::mem::replace(&mut *len, size_of::<T>());
        if room < size_of::<T>() {
            return Err(FI_ETOOSMALL);
        }
        value.cast::<T>().write_unaligned(from);
    }
    Ok(())
}

/// # Safety
/// `value` has `len` bytes.
pub(super) unsafe fn take_size(value: *const c_void, len: usize) -> Result<usize, i32> {
    if value.is_null() || len != size_of::<usize>() {
        return Err(FI_EINVAL);
    }
    // SAFETY: the caller vouches.
    Ok(unsafe { value.cast::<usize>().read_unaligned() })
}

/// Reads a limit for injected messages. Errors: EINVAL if it exceeds the size that the endpoint was opened with.
///
/// # Safety
/// `value` has `len` bytes.
unsafe fn take_inject(ep: &Endpoint, value: *const c_void, len: usize) -> Result<usize, i32> {
    // SAFETY: the caller vouches for this contract too.
    let size = unsafe { take_size(value, len) }?;
    if size <= ep.inject_size { Ok(size) } else { Err(FI_EINVAL) }
}

/// The value of FI_OPT_INJECT_RMA_SIZE. Until the application has set it, longer writes are injected, too: the
/// application may go by `tx_attr->inject_size`.
fn inject_rma_size(ep: &Endpoint, state: &EndpointState) -> usize {
    state.inject_rma_size.unwrap_or_else(|| ep.inject_size.min(INJECT_RMA_SIZE))
}

/// Device memory is copied by calls of CUDA, and there are none without FI_HMEM. Errors: EOPNOTSUPP.
fn permit_cuda(ep: &Endpoint, permitted: bool) -> Result<(), i32> {
    if permitted || ep.caps & FI_HMEM == 0 { Ok(()) } else { Err(FI_EOPNOTSUPP) }
}

/// Errors: EOPNOTSUPP for FI_HMEM_P2P_REQUIRED; EINVAL for what is no value; EOPBADSTATE once enabled, for whether RDMA devices
/// access device memory.
///
/// # Safety
/// `value` has `len` bytes.
unsafe fn take_p2p(
    ep: &Endpoint,
    state: &mut EndpointState,
    (value, len): (*const c_void, usize),
    guard: &Guard<'_>,
) -> Result<(), i32> {
    if value.is_null() || len != size_of::<c_int>() {
        return Err(FI_EINVAL);
    }
    // SAFETY: the caller vouches.
    match unsafe { value.cast::<c_int>().read_unaligned() } {
        FI_HMEM_P2P_REQUIRED => Err(FI_EOPNOTSUPP),
        known if (0..=FI_HMEM_P2P_DISABLED).contains(&known) => {
            let changes = (known == FI_HMEM_P2P_DISABLED) != (state.p2p == FI_HMEM_P2P_DISABLED);
            if changes && ep.engine(guard).is_some() {
                return Err(FI_EOPBADSTATE);
            }
            state.p2p = known;
            Ok(())
        }
        _ => Err(FI_EINVAL),
    }
}

/// Errors: EOPBADSTATE once enabled; ENOPROTOOPT if no other transport reaches peers of the node.
fn permit_shm(
    ep: &Endpoint,
    state: &mut EndpointState,
    permitted: bool,
    guard: &Guard<'_>,
) -> Result<(), i32> {
    if permitted == state.shm_permitted {
        return Ok(());
    }
    if ep.engine(guard).is_some() {
        return Err(FI_EOPBADSTATE);
    }
    if !permitted && !ep.domain.config.net.on {
        return Err(FI_ENOPROTOOPT);
    }
    state.shm_permitted = permitted;
    Ok(())
}

/// A receive context has its own value once it has set one; until then that of its scalable endpoint. Errors: ENOPROTOOPT
/// for a transmit context.
fn set_min_multi_recv(
    handle: &EndpointFid,
    state: &mut EndpointState,
    size: usize,
) -> Result<(), i32> {
    match handle.role {
        Role::Endpoint | Role::Scalable => state.min_multi_recv = size,
        Role::Receive => _ = state.own_min_multi_recv.insert(handle.context, size),
        Role::Transmit => return Err(FI_ENOPROTOOPT),
    }
    Ok(())
}

pub(super) unsafe extern "C" fn getopt(
    fid: fid_t,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    entry("fi_getopt", || {
        if level != FI_OPT_ENDPOINT {
            return -FI_ENOPROTOOPT;
        }
        // SAFETY: a handle of this provider; the application's buffer has `*len` bytes.
        unsafe {
            let handle = endpoint(fid.cast::<fid_ep>());
            let ep = &handle.shared;
            let guard = ep.domain.lock.control();
            let state = ep.state(&guard);
            code(match name {
                FI_OPT_MIN_MULTI_RECV => match handle.role {
                    Role::Endpoint | Role::Scalable => give(value, len, state.min_multi_recv),
                    Role::Receive => give(value, len, state.min_multi_recv_of(handle.context)),
                    Role::Transmit => Err(FI_ENOPROTOOPT),
                },
                FI_OPT_MAX_MSG_SIZE => give(value, len, state.max_msg_size),
                FI_OPT_MAX_TAGGED_SIZE => give(value, len, state.max_tagged_size),
                FI_OPT_MAX_RMA_SIZE => give(value, len, state.max_rma_size),
                FI_OPT_INJECT_MSG_SIZE => give(value, len, state.inject_msg_size),
                FI_OPT_INJECT_TAGGED_SIZE => give(value, len, state.inject_tagged_size),
                FI_OPT_INJECT_RMA_SIZE => give(value, len, inject_rma_size(ep, state)),
                FI_OPT_INJECT_ATOMIC_SIZE => give(value, len, state.inject_atomic_size),
                FI_OPT_MAX_ATOMIC_SIZE => give(value, len, state.max_atomic_size),
                FI_OPT_CUDA_API_PERMITTED => give(value, len, ep.caps & FI_HMEM != 0),
                FI_OPT_FI_HMEM_P2P if ep.caps & FI_HMEM != 0 => give(value, len, state.p2p),
                FI_OPT_SHARED_MEMORY_PERMITTED => give(value, len, state.shm_permitted),
                _ => Err(FI_ENOPROTOOPT),
            })
        }
    })
}

pub(super) unsafe extern "C" fn setopt(
    fid: fid_t,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    entry("fi_setopt", || {
        if level != FI_OPT_ENDPOINT {
            return -FI_ENOPROTOOPT;
        }
        // SAFETY: a handle of this provider; the application's value has `len` bytes.
        unsafe {
            let handle = endpoint(fid.cast::<fid_ep>());
            let ep = &handle.shared;
            let guard = ep.domain.lock.control();
            let state = ep.state(&guard);
            code(match name {
                FI_OPT_MIN_MULTI_RECV => {
                    take_size(value, len).and_then(|size| set_min_multi_recv(handle, state, size))
                }
                FI_OPT_MAX_MSG_SIZE => take_size(value, len).map(|size| state.max_msg_size = size),
                FI_OPT_MAX_TAGGED_SIZE => {
                    take_size(value, len).map(|size| state.max_tagged_size = size)
                }
                FI_OPT_MAX_RMA_SIZE => take_size(value, len).map(|size| state.max_rma_size = size),
                FI_OPT_INJECT_MSG_SIZE => {
                    take_inject(ep, value, len).map(|size| state.inject_msg_size = size)
                }
                FI_OPT_INJECT_TAGGED_SIZE => {
                    take_inject(ep, value, len).map(|size| state.inject_tagged_size = size)
                }
                FI_OPT_INJECT_RMA_SIZE => {
                    take_inject(ep, value, len).map(|size| state.inject_rma_size = Some(size))
                }
                FI_OPT_MAX_ATOMIC_SIZE => take_size(value, len).and_then(|size| {
                    if size > MAX_BYTES {
                        return Err(FI_EINVAL);
                    }
                    state.max_atomic_size = size;
                    Ok(())
                }),
                FI_OPT_INJECT_ATOMIC_SIZE => {
                    take_inject(ep, value, len).map(|size| state.inject_atomic_size = size)
                }
                FI_OPT_CUDA_API_PERMITTED if len == 1 && !value.is_null() => {
                    permit_cuda(ep, *value.cast::<u8>() != 0)
                }
                FI_OPT_FI_HMEM_P2P if ep.caps & FI_HMEM != 0 => {
                    take_p2p(ep, state, (value, len), &guard)
                }
                // Without shared memory, the network reaches peers of the node.
                FI_OPT_SHARED_MEMORY_PERMITTED if len == 1 && !value.is_null() => {
                    permit_shm(ep, state, *value.cast::<u8>() != 0, &guard)
                }
                _ => Err(FI_ENOPROTOOPT),
            })
        }
    })
}

pub(super) unsafe extern "C" fn rx_size_left(ep: *mut fid_ep) -> isize {
    entry("fi_rx_size_left", || {
        // SAFETY: a handle of this provider.
        let handle = unsafe { endpoint(ep) };
        let ep = &handle.shared;
        let guard = ep.domain.lock.lock();
        ep.engine(&guard).map_or(0, |engine| engine.room_for_receives(handle.context) as isize)
    })
}

pub(super) unsafe extern "C" fn tx_size_left(ep: *mut fid_ep) -> isize {
    entry("fi_tx_size_left", || {
        // SAFETY: a handle of this provider.
        let ep = unsafe { &endpoint(ep).shared };
        let guard = ep.domain.lock.lock();
        ep.engine(&guard).map_or(0, |engine| engine.room_for_sends() as isize)
    })
}
