//! `struct fi_ops_domain`: opens the objects of a domain. This module is above all of them.

use crate::config::Config;
use crate::ofi::domain::{Domain, DomainFid, DomainState, Hmem, shared};
use crate::ofi::endpoint::Role;
use crate::ofi::fabric::Fabric;
use crate::ofi::guard::{code, entries, entry};
use crate::ofi::lock::{DomainLock, Locked};
use crate::ofi::own::{Object, close as close_object};
use crate::ofi::table::{Operations, SLACK, Table};
use crate::ofi::trigger::Triggers;
use crate::ofi::{av, cntr, cq, elsewhere, endpoint, eq, keys, mr, poll_set};
use crate::telemetry::log;
use crate::transport::router;
use libfabric_sys::{
    FI_CANCEL_WORK, FI_CLASS_DOMAIN, FI_CLASS_EQ, FI_EINVAL, FI_ENOSYS, FI_EOPNOTSUPP,
    FI_FLUSH_WORK, FI_HMEM, FI_MR_BASIC, FI_MR_HMEM, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR,
    FI_PROGRESS_AUTO, FI_QUEUE_WORK, FI_REG_MR, FI_THREAD_DOMAIN, fi_atomic_attr, fi_av_attr,
    fi_cntr_attr, fi_collective_attr, fi_collective_op, fi_cq_attr, fi_datatype, fi_info, fi_op,
    fi_ops, fi_ops_domain, fi_ops_domain_2_7, fi_poll_attr, fi_rx_attr, fi_tx_attr, fid, fid_av,
    fid_cntr, fid_cq, fid_domain, fid_ep, fid_poll, fid_stx,
};
use once_cell::sync::OnceCell;
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

// SAFETY: it begins with a fid_domain; nothing else has this table.
unsafe impl Object for DomainFid {
    type Shown = fid_domain;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    ..fi_ops::STUBS
});

static OPS: Table<fi_ops_domain_2_7> = Table::new(fi_ops_domain_2_7 {
    base: fi_ops_domain {
        av_open: Some(av_open),
        cq_open: Some(cq_open),
        endpoint: Some(open_endpoint),
        endpoint2: Some(open_endpoint2),
        scalable_ep: Some(open_scalable_endpoint),
        stx_ctx: Some(open_shared_transmit),
        srx_ctx: Some(open_shared_receive),
        cntr_open: Some(cntr_open),
        poll_open: Some(poll_open),
        query_atomic: Some(query_atomic),
        query_collective: Some(query_collective),
        ..fi_ops_domain_2_7::STUBS.base
    },
    ..fi_ops_domain_2_7::STUBS
});

/// `fi_domain`. Errors: EINVAL, also for an invalid job key; ENOMEM, EMFILE, ENFILE (the progress thread).
///
/// # Safety
/// `info` and `out` are as libfabric passes them to `fi_domain`.
pub(crate) unsafe fn open(
    fabric: &Arc<Fabric>,
    info: *mut fi_info,
    out: *mut *mut fid_domain,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: an info of this provider, or a copy of one, valid during the call.
    let info = unsafe { info.as_ref() }.ok_or(FI_EINVAL)?;
    // SAFETY: the attributes of that info: null or valid during the call.
    let attr = unsafe { info.domain_attr.as_ref() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    // SAFETY: null or a C string, valid during the call.
    let name = unsafe { attr.name.as_ref().map(|name| CStr::from_ptr(name)) };
    let config = config_of(name.and_then(|name| name.to_str().ok()))?;
    // SAFETY: the key is null or has as many bytes as the application says.
    let key = unsafe { keys::of_domain(fabric, attr.auth_key, attr.auth_key_size, &config) }?;
    let auto = attr.data_progress == FI_PROGRESS_AUTO || attr.control_progress == FI_PROGRESS_AUTO;
    let shared = Arc::new(Domain {
        fabric: fabric.clone(),
        lock: DomainLock::new(attr.threading != FI_THREAD_DOMAIN || auto),
        config,
        key,
        addr_format: info.addr_format,
        chooses_keys: attr.mr_mode & (FI_MR_BASIC | FI_MR_PROV_KEY) != 0,
        names_addresses: attr.mr_mode & (FI_MR_BASIC | FI_MR_VIRT_ADDR) != 0,
        hmem: match (info.caps & FI_HMEM, attr.mr_mode & FI_MR_HMEM) {
            (0, _) => Hmem::Off,
            (_, 0) => Hmem::Detects,
            _ => Hmem::Described,
        },
        state: Locked::new(DomainState::default()),
        yields: AtomicBool::new(false),
        triggers: Triggers::default(),
        thread: OnceCell::new(),
    });
    if attr.data_progress == FI_PROGRESS_AUTO {
        shared.require_thread()?;
    }
    elsewhere::enter(&raw const *shared);
    // SAFETY: the domain does not move in its `Arc`, and leaves when it is dropped.
    unsafe { shared.lock.join() };
    let domain = Box::new(DomainFid {
        fid: fid_domain {
            fid: fid { fclass: FI_CLASS_DOMAIN, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr().cast(),
            mr: mr::OPS.as_mut_ptr(),
        },
        slack: SLACK,
        shared,
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(domain).cast() };
    Ok(())
}

/// The configuration of a domain called `name`. Errors: EINVAL for the name of a device that
/// `fi_getinfo` would not have offered.
fn config_of(name: Option<&str>) -> Result<Config, i32> {
    let config = Config::from_environment();
    let Some(name) = name else { return Ok(config) };
    router::with_device(&config, name).unwrap_or(Ok(config)).map_err(|offered| {
        log::warn(format_args!("domain_attr->name refused: {name}, offered {offered}"));
        FI_EINVAL
    })
}

entries! { entry -> c_int;
    close "fi_close(domain)" (fid: *mut fid) => close_object(fid, |object: &DomainFid| {
        object.shared.lock.may_close(|_| Arc::strong_count(&object.shared) > 1)
    });
}

unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(domain)", || {
        // SAFETY: a domain of this provider; `arg` is as fi_trigger.3 and fi_mr.3 say for each command.
        unsafe {
            let domain = shared(fid.cast());
            match command {
                FI_QUEUE_WORK => code(endpoint::deferred::queue(domain, arg.cast())),
                FI_CANCEL_WORK => code(endpoint::deferred::cancel(domain, arg.cast())),
                FI_FLUSH_WORK => code(endpoint::deferred::flush(domain, arg.cast())),
                _ => mr::domain_control(command, arg),
            }
        }
    })
}

unsafe extern "C" fn bind(_fid: *mut fid, other: *mut fid, flags: u64) -> c_int {
    entry("fi_domain_bind", || {
        // SAFETY: null or an object of the application.
        let Some(other) = (unsafe { other.as_ref() }) else { return -FI_EINVAL };
        if other.fclass != FI_CLASS_EQ {
            return -FI_EINVAL;
        }
        if flags & FI_REG_MR != 0 {
            return -FI_EOPNOTSUPP; // registrations complete at once
        }
        // Address vectors report to the event queue to which they are bound themselves.
        eq::accept_bind()
    })
}

entries! { making_entry -> c_int;
    av_open "fi_av_open" (
        domain: *mut fid_domain, attr: *mut fi_av_attr, out: *mut *mut fid_av, context: *mut c_void,
    ) => code(av::open(shared(domain), attr, out, context));
    cq_open "fi_cq_open" (
        domain: *mut fid_domain, attr: *mut fi_cq_attr, out: *mut *mut fid_cq, context: *mut c_void,
    ) => code(cq::open(shared(domain), attr, out, context));
    cntr_open "fi_cntr_open" (
        domain: *mut fid_domain, attr: *mut fi_cntr_attr, out: *mut *mut fid_cntr, context: *mut c_void,
    ) => code(cntr::open(shared(domain), attr, out, context));
    poll_open "fi_poll_open" (domain: *mut fid_domain, attr: *mut fi_poll_attr, out: *mut *mut fid_poll)
        => code(poll_set::open(shared(domain), attr, out));
    open_endpoint "fi_endpoint" (
        domain: *mut fid_domain, info: *mut fi_info, out: *mut *mut fid_ep, context: *mut c_void,
    ) => code(endpoint::open(Role::Endpoint, shared(domain), info, out, context));
    open_endpoint2 "fi_endpoint2" (
        domain: *mut fid_domain, info: *mut fi_info, out: *mut *mut fid_ep, flags: u64, context: *mut c_void,
    ) => match flags {
        0 => code(endpoint::open(Role::Endpoint, shared(domain), info, out, context)),
        _ => -FI_ENOSYS,
    };
    open_scalable_endpoint "fi_scalable_ep" (
        domain: *mut fid_domain, info: *mut fi_info, out: *mut *mut fid_ep, context: *mut c_void,
    ) => code(endpoint::open(Role::Scalable, shared(domain), info, out, context));
    open_shared_transmit "fi_stx_context" (
        domain: *mut fid_domain, attr: *mut fi_tx_attr, out: *mut *mut fid_stx, context: *mut c_void,
    ) => code(endpoint::open_shared_transmit(shared(domain), attr, out, context));
    open_shared_receive "fi_srx_context" (
        domain: *mut fid_domain, attr: *mut fi_rx_attr, out: *mut *mut fid_ep, context: *mut c_void,
    ) => code(endpoint::open_shared_receive(shared(domain), attr, out, context));
}

entries! { entry -> c_int;
    query_atomic "fi_query_atomic" (
        _domain: *mut fid_domain, datatype: fi_datatype, op: fi_op, attr: *mut fi_atomic_attr, flags: u64,
    ) => match attr.as_mut() {
        None => -FI_EINVAL,
        Some(attr) => code(endpoint::atomic::query(datatype, op, flags).map(|found| *attr = found)),
    };
    query_collective "fi_query_collective" (
        _domain: *mut fid_domain, coll: fi_collective_op, attr: *mut fi_collective_attr, _flags: u64,
    ) => code(endpoint::collective::query(coll, attr));
}
