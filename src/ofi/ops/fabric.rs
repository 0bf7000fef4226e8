//! `struct fid_fabric`: opens domains, event queues and wait sets. This module is above all of them.

use super::domain;
use crate::ofi::fabric::{Fabric, FabricFid};
use crate::ofi::guard::{code, entries, entry, may_close};
use crate::ofi::own::{Object, close as close_object};
use crate::ofi::table::{Operations, SLACK, Table};
use crate::ofi::wait::Waitable;
use crate::ofi::{cntr, cq, eq, wait_set};
use crate::sys::process::Home;
use libfabric_sys::{
    FI_CLASS_CNTR, FI_CLASS_CQ, FI_CLASS_EQ, FI_CLASS_FABRIC, FI_CLASS_WAIT, FI_EAGAIN, FI_EINVAL,
    FI_ENOSYS, fi_eq_attr, fi_fabric_attr, fi_info, fi_ops, fi_ops_fabric, fi_wait_attr, fid,
    fid_domain, fid_eq, fid_fabric, fid_wait,
};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

// SAFETY: it begins with a fid_fabric; nothing else has this table.
unsafe impl Object for FabricFid {
    type Shown = fid_fabric;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops { close: Some(close), ..fi_ops::STUBS });

static OPS: Table<fi_ops_fabric> = Table::new(fi_ops_fabric {
    domain: Some(open_domain),
    domain2: Some(open_domain2),
    eq_open: Some(eq_open),
    wait_open: Some(wait_open),
    trywait: Some(try_wait),
    ..fi_ops_fabric::STUBS
});

/// `fi_fabric`. Errors: EINVAL.
///
/// # Safety
/// As the core calls `fi_provider::fabric`.
pub(crate) unsafe fn open(
    attr: *mut fi_fabric_attr,
    out: *mut *mut fid_fabric,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: the core passes the attributes of one of this provider's infos.
    let attr = unsafe { attr.as_ref() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    let fabric = Box::new(FabricFid {
        fid: fid_fabric {
            fid: fid { fclass: FI_CLASS_FABRIC, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr(),
            api_version: attr.api_version,
        },
        slack: SLACK,
        shared: Arc::new(Fabric { api_version: attr.api_version, home: Home::here() }),
    });
    // SAFETY: checked not to be null; the core wants the new object there.
    unsafe { *out = Box::into_raw(fabric).cast() };
    Ok(())
}

/// # Safety
/// `fabric` came from [`open`] and is not closed.
unsafe fn shared<'a>(fabric: *mut fid_fabric) -> &'a Arc<Fabric> {
    // SAFETY: the caller vouches.
    unsafe { &(*fabric.cast::<FabricFid>()).shared }
}

entries! { entry -> c_int;
    close "fi_close(fabric)" (fid: *mut fid) => close_object(fid, |object: &FabricFid| {
        may_close(Arc::strong_count(&object.shared), object.shared.home)
    });
}

entries! { making_entry -> c_int;
    open_domain "fi_domain" (
        fabric: *mut fid_fabric, info: *mut fi_info, out: *mut *mut fid_domain, context: *mut c_void,
    ) => code(domain::open(shared(fabric), info, out, context));
    // FI_PEER: the peer API is not for providers outside the tree.
    open_domain2 "fi_domain2" (
        fabric: *mut fid_fabric, info: *mut fi_info, out: *mut *mut fid_domain, flags: u64, context: *mut c_void,
    ) => match flags {
        0 => code(domain::open(shared(fabric), info, out, context)),
        _ => -FI_ENOSYS,
    };
    eq_open "fi_eq_open" (
        fabric: *mut fid_fabric, attr: *mut fi_eq_attr, out: *mut *mut fid_eq, context: *mut c_void,
    ) => code(eq::open(shared(fabric), attr, out, context));
    wait_open "fi_wait_open" (fabric: *mut fid_fabric, attr: *mut fi_wait_attr, out: *mut *mut fid_wait)
        => code(wait_set::open(shared(fabric), attr, out));
}

unsafe extern "C" fn try_wait(
    _fabric: *mut fid_fabric,
    fids: *mut *mut fid,
    count: c_int,
) -> c_int {
    entry("fi_trywait", || {
        let count = usize::try_from(count).unwrap_or(0);
        if fids.is_null() && count > 0 {
            return -FI_EINVAL;
        }
        for i in 0..count {
            // SAFETY: the application passes `count` objects.
            if let Err(error) = unsafe { trywait(*fids.add(i)) } {
                return -error;
            }
        }
        0
    })
}

/// `fi_trywait` for one object. Errors: EAGAIN if it has an event to report; EINVAL for an object of another
/// provider; ENOSYS for an object that cannot be waited for.
///
/// # Safety
/// `object` is null or an open object.
unsafe fn trywait(object: *mut fid) -> Result<(), i32> {
    // SAFETY: the caller vouches; the class tells the type.
    let may_sleep = unsafe {
        match object.as_ref().ok_or(FI_EINVAL)?.fclass {
            FI_CLASS_CQ => cq::shared(object)?.try_wait(),
            FI_CLASS_CNTR => cntr::shared(object)?.try_wait(),
            FI_CLASS_EQ => eq::shared(object)?.try_wait(),
            FI_CLASS_WAIT => wait_set::shared(object)?.try_wait(),
            _ => return Err(FI_ENOSYS),
        }
    };
    if may_sleep { Ok(()) } else { Err(FI_EAGAIN) }
}
