//! `struct fid_mr`: memory regions. Transports of this version need none for messages, so a region
//! is its key and its bookkeeping.

use super::domain::{self, Domain};
use super::guard::{code, entry};
use super::table::{SLACK, Slack, Table, stubs};
use libfabric_sys::{
    FI_CLASS_CNTR, FI_CLASS_EP, FI_CLASS_MR, FI_EINVAL, FI_ENOKEY, FI_HMEM_SYSTEM, fi_mr_attr,
    fi_ops, fi_ops_mr, fi_version, fid, fid_domain, fid_mr,
};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

#[repr(C)]
struct MrFid {
    fid: fid_mr,
    slack: Slack,
    domain: Arc<Domain>,
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    // SAFETY: fi_ops has six slots.
    ..unsafe { stubs::<fi_ops, 6>() }
});

/// Registration, as part of the domain's object.
pub(crate) static OPS: Table<fi_ops_mr> = Table::new(fi_ops_mr {
    reg: Some(reg),
    regv: Some(regv),
    regattr: Some(regattr),
    // SAFETY: fi_ops_mr has three slots.
    ..unsafe { stubs::<fi_ops_mr, 3>() }
});

/// # Safety
/// `fid` is the domain, `out` valid.
unsafe fn register(
    fid: *mut fid,
    ranges: usize,
    requested_key: u64,
    context: *mut c_void,
    out: *mut *mut fid_mr,
) -> Result<(), i32> {
    if out.is_null() || ranges == 0 {
        return Err(FI_EINVAL);
    }
    // SAFETY: the application's domain; `fid` is its first member.
    let domain = unsafe { domain::shared(fid.cast::<fid_domain>()) };
    let guard = domain.lock.lock();
    // SAFETY: the guard is of this domain; one short step.
    let state = unsafe { domain.state(&guard) };
    let key = if domain.chooses_keys {
        state.next_key += 1;
        state.next_key
    } else {
        requested_key
    };
    if !state.keys.insert(key) {
        return Err(FI_ENOKEY); // the application's key is in use (fi_mr.3)
    }
    drop(guard);
    let mut mr = Box::new(MrFid {
        fid: fid_mr {
            fid: libfabric_sys::fid { fclass: FI_CLASS_MR, context, ops: FID_OPS.as_mut_ptr() },
            mem_desc: std::ptr::null_mut(),
            key,
        },
        slack: SLACK,
        domain: domain.clone(),
    });
    mr.fid.mem_desc = (&raw mut *mr).cast();
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(mr).cast() };
    Ok(())
}

unsafe extern "C" fn reg(
    fid: *mut fid,
    _buf: *const c_void,
    _len: usize,
    _access: u64,
    _offset: u64,
    requested_key: u64,
    _flags: u64,
    out: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: as libfabric calls fi_mr_reg.
    entry("fi_mr_reg", || code(unsafe { register(fid, 1, requested_key, context, out) }))
}

unsafe extern "C" fn regv(
    fid: *mut fid,
    _iov: *const libc::iovec,
    count: usize,
    _access: u64,
    _offset: u64,
    requested_key: u64,
    _flags: u64,
    out: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: as libfabric calls fi_mr_regv.
    entry("fi_mr_regv", || code(unsafe { register(fid, count, requested_key, context, out) }))
}

unsafe extern "C" fn regattr(
    fid: *mut fid,
    attr: *const fi_mr_attr,
    _flags: u64,
    out: *mut *mut fid_mr,
) -> c_int {
    entry("fi_mr_regattr", || {
        // SAFETY: as libfabric calls fi_mr_regattr; `iface` exists since API 1.9.
        unsafe {
            let Some(a) = attr.as_ref() else { return -FI_EINVAL };
            let api = domain::shared(fid.cast::<fid_domain>()).fabric.api_version();
            if api >= fi_version(1, 9) && a.iface != FI_HMEM_SYSTEM {
                return -FI_EINVAL;
            }
            code(register(fid, a.iov_count, a.requested_key, a.context, out))
        }
    })
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(mr)", || {
        // SAFETY: a region of ours, open until now.
        let mr = unsafe { Box::from_raw(fid.cast::<MrFid>()) };
        let guard = mr.domain.lock.lock();
        // SAFETY: the guard is of the region's domain; one short step.
        unsafe { mr.domain.state(&guard) }.keys.remove(&mr.fid.key);
        drop(guard);
        0
    })
}

unsafe extern "C" fn bind(_fid: *mut fid, other: *mut fid, _flags: u64) -> c_int {
    entry("fi_mr_bind", || {
        // SAFETY: an object of the application.
        match unsafe { other.as_ref() }.map(|other| other.fclass) {
            Some(FI_CLASS_EP | FI_CLASS_CNTR) => 0,
            _ => -FI_EINVAL,
        }
    })
}

unsafe extern "C" fn control(_fid: *mut fid, command: c_int, _arg: *mut c_void) -> c_int {
    match command {
        libfabric_sys::FI_ENABLE | libfabric_sys::FI_REFRESH => 0,
        _ => -libfabric_sys::FI_ENOSYS,
    }
}
