//! Protection domains, registrations, address handles.

use super::device::id_of;
use super::{attempt, code, kept, null};
use crate::nic::{self, Handle};
use crate::wire::Route;
use rdma_core_sys::{ibv_ah, ibv_ah_attr, ibv_context, ibv_mr, ibv_pd};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: an open device.
    let id = unsafe { id_of(context) };
    match attempt(|nic| Ok(nic.allocate_domain(id))) {
        Ok(handle) => kept(ibv_pd { context, handle }),
        Err(errno) => null(errno),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: a protection domain.
    let handle = unsafe { (*pd).handle };
    code(nic::with(|nic| nic.free_domain(handle)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a protection domain.
    let (context, domain) = unsafe { ((*pd).context, (*pd).handle) };
    let at = addr.expose_provenance() as u64;
    match attempt(|nic| nic.register(domain, at, length as u64, access as u32)) {
        Ok(key) => kept(ibv_mr { context, pd, addr, length, handle: key, lkey: key, rkey: key }),
        Err(errno) => null(errno),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    if iova != addr.expose_provenance() as u64 {
        return null(libc::EOPNOTSUPP);
    }
    // SAFETY: the caller vouches.
    unsafe { ibv_reg_mr(pd, addr, length, access as c_int) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a protection domain.
    let (context, domain) = unsafe { ((*pd).context, (*pd).handle) };
    let made = attempt(|nic| {
        if fd < 0 {
            return nic.register_nothing();
        }
        // SAFETY: the program lends the descriptor for this call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        nic.register_buffer(domain, (iova, length as u64), (fd, offset), access as u32)
    });
    match made {
        Ok(key) => kept(ibv_mr {
            context,
            pd,
            // As the library does: there is no address.
            addr: std::ptr::null_mut(),
            length,
            handle: key,
            lkey: key,
            rkey: key,
        }),
        Err(errno) => null(errno),
    }
}

/// For the double of CUDA: what devices have written to its memory is there when this returns.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_verbs_flush() {
    nic::flush();
}

/// For the double of CUDA: memory is freed, of which devices lose what they have registered by its address.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_verbs_revoke(addr: u64, len: u64) {
    nic::revoke(addr, len);
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: a registration.
    let key = unsafe { (*mr).lkey };
    code(nic::with(|nic| {
        nic.deregister(key);
        Ok(())
    }))
}

/// The route that an address leads to.
pub(super) fn route_of(attr: &ibv_ah_attr) -> Route {
    let global = attr.is_global != 0;
    let grh = &attr.grh;
    crate::verify::demand_marks(attr.sl, global.then_some((grh.traffic_class, grh.flow_label)));
    // SAFETY: both members of the union are plain bytes.
    let gid = unsafe { attr.grh.dgid.raw };
    Route {
        lid: attr.dlid,
        // The source is filled in when a packet is sent.
        gids: global.then_some(([0; 16], gid)),
        class: attr.grh.traffic_class,
        ..Route::default()
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_ah(
    pd: *mut ibv_pd,
    attr: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    // SAFETY: a protection domain and the program's structure.
    let (context, domain, attr) = unsafe { ((*pd).context, (*pd).handle, &*attr) };
    let (delay, fails) = nic::with(|nic| nic.handle_weather()).unwrap_or_default();
    std::thread::sleep(delay);
    if fails {
        return null(libc::ETIMEDOUT);
    }
    let made = attempt(|nic| {
        nic.make_handle(Handle {
            domain,
            route: route_of(attr),
            source_index: attr.grh.sgid_index.into(),
            global: attr.is_global != 0,
            port: attr.port_num,
        })
    });
    match made {
        Ok(handle) => kept(ibv_ah { context, pd, handle }),
        Err(errno) => null(errno),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: an address handle.
    let handle = unsafe { (*ah).handle };
    code(nic::with(|nic| {
        nic.end_handle(handle);
        Ok(())
    }))
}
