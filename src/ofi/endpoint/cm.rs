//! `struct fi_ops_cm`: an unconnected endpoint has a name, but no connections.

use super::collective;
use super::state::endpoint;
use crate::ofi::av::write_address;
use crate::ofi::guard::{code, entry};
use crate::ofi::table::{Operations, Table};
use crate::transport::Address;
use libfabric_sys::{FI_ADDR_STR, FI_EINVAL, FI_EOPBADSTATE, fi_ops_cm, fid_ep, fid_t};
use std::ffi::{CStr, c_int, c_void};

pub(super) static OPS: Table<fi_ops_cm> = Table::new(fi_ops_cm {
    setname: Some(setname),
    getname: Some(getname),
    join: Some(collective::join),
    ..fi_ops_cm::STUBS
});

/// The operations of a shared receive context, which has no name.
pub(super) static NO_OPS: Table<fi_ops_cm> = Table::new(fi_ops_cm::STUBS);

/// `fi_setname`: the address under which fi_enable opens the endpoint.
unsafe extern "C" fn setname(fid: fid_t, addr: *mut c_void, len: usize) -> c_int {
    entry("fi_setname", || {
        // SAFETY: a handle of this provider; `addr` has `len` bytes in the endpoint's format.
        unsafe {
            let ep = &endpoint(fid.cast::<fid_ep>()).shared;
            if addr.is_null() {
                return -FI_EINVAL;
            }
            let address = if ep.addr_format == FI_ADDR_STR {
                CStr::from_ptr(addr.cast()).to_str().ok().and_then(Address::from_text)
            } else {
                Address::from_bytes(std::slice::from_raw_parts(addr.cast(), len))
            };
            let guard = ep.domain.lock.control();
            if ep.engine(&guard).is_some() {
                return -FI_EOPBADSTATE;
            }
            let Some(address) = address else { return -FI_EINVAL };
            ep.state(&guard).bind = Some(address);
        }
        0
    })
}

/// `fi_getname`. Errors: ETOOSMALL with the size needed; EOPBADSTATE before fi_enable.
unsafe extern "C" fn getname(fid: fid_t, addr: *mut c_void, len: *mut usize) -> c_int {
    entry("fi_getname", || {
        // SAFETY: a handle of this provider; the application's buffer has `*len` bytes.
        unsafe {
            let ep = &endpoint(fid.cast::<fid_ep>()).shared;
            let guard = ep.domain.lock.control();
            let Some(engine) = ep.engine(&guard) else { return -FI_EOPBADSTATE };
            code(write_address(ep.addr_format, &engine.iface().address(), addr, len))
        }
    })
}
