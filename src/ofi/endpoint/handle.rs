//! `struct fid_ep` of type FI_EP_RDM: the handles of an endpoint, of a scalable endpoint, and of its contexts.
//!
//! A scalable endpoint (fi_endpoint.3) has one address and several transmit and receive contexts, each with queues
//! and counters of its own. An ordinary endpoint has one of each, both with number 0.

use super::bind::bind;
use super::contexts::{Contexts, Role};
use super::none::{NO_ATOMIC, NO_COLLECTIVE};
use super::state::{AllBindings, Bindings, Endpoint, EndpointFid, EndpointState, endpoint};
use super::{atomic, cm, collective, msg, options, rma, tagged, transfer};
use crate::ofi::domain::Domain;
use crate::ofi::guard::{code, entry, making_entry};
use crate::ofi::info::{
    self, CONTEXT_SIZE, INJECT_SIZE, IOV_LIMIT, MSG_ORDER, RMA_IOV_LIMIT, RX_CAPS, TX_CAPS,
};
use crate::ofi::keys::{DomainKey, auth_key};
use crate::ofi::lock::{Locked, ReadMostly};
use crate::ofi::own::{Object, own_behind_hooks};
use crate::ofi::profile;
use crate::ofi::table::{Operations, SLACK, Table};
use crate::sys::process;
use crate::telemetry::log;
use crate::transport::Address;
use libfabric_sys::{
    FI_ADDR_STR, FI_ALIAS, FI_DIRECTED_RECV, FI_EBUSY, FI_EINVAL, FI_ENABLE, FI_ENOSYS, FI_EP_RDM,
    FI_GETOPSFLAG, FI_HMEM, FI_RECV, FI_SETOPSFLAG, FI_SHARED_CONTEXT, FI_SOURCE, FI_TC_DSCP,
    FI_TRANSMIT, FI_TRIGGER, fi_alias, fi_info, fi_ops, fi_ops_atomic, fi_ops_collective,
    fi_ops_ep, fi_ops_ep_2_7, fi_ops_msg, fi_ops_rma, fi_ops_tagged, fi_rx_attr, fi_tx_attr, fid,
    fid_ep,
};
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

// SAFETY: it begins with a fid_ep; nothing else has this table.
unsafe impl Object for EndpointFid {
    type Shown = fid_ep;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    ops_open: Some(profile::ops_open),
    ..fi_ops::STUBS
});

static OPS: Table<fi_ops_ep_2_7> = Table::new(fi_ops_ep_2_7 {
    base: fi_ops_ep {
        cancel: Some(transfer::cancel),
        getopt: Some(options::getopt),
        setopt: Some(options::setopt),
        rx_size_left: Some(options::rx_size_left),
        tx_size_left: Some(options::tx_size_left),
        tx_ctx: Some(open_transmit),
        rx_ctx: Some(open_receive),
        ..fi_ops_ep_2_7::STUBS.base
    },
    ..fi_ops_ep_2_7::STUBS
});

/// `fi_endpoint`, and `fi_scalable_ep` for [`Role::Scalable`]. Errors: EINVAL, also for more contexts than the call
/// offers; ENOSYS for types other than FI_EP_RDM.
///
/// # Safety
/// As libfabric calls these.
pub(in crate::ofi) unsafe fn open(
    role: Role,
    domain: &Arc<Domain>,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: an info of this provider, or a copy of one, valid during the call.
    let info = unsafe { info.as_ref() }.filter(|_| !out.is_null()).ok_or(FI_EINVAL)?;
    // SAFETY: the attributes of that info: null or valid during the call.
    let (tx, rx) = unsafe { (info.tx_attr.as_ref(), info.rx_attr.as_ref()) };
    // SAFETY: the info and its attributes are valid during the call.
    let shared = Arc::new(unsafe { described(role, domain, info, tx) }?);
    if shared.contexts.count() > 1 {
        // Under FI_THREAD_DOMAIN Chapel serialises the calls of each context, not of the domain.
        domain.lock.need();
    }
    let tx_flags = tx.map_or(0, |tx: &fi_tx_attr| tx.op_flags);
    let rx_flags = rx.map_or(0, |rx: &fi_rx_attr| rx.op_flags);
    let (flags, family) = ((tx_flags, rx_flags), Arc::new(()));
    // SAFETY: checked not to be null.
    unsafe { *out = handle(shared, role, 0, flags, context, family, false) };
    Ok(())
}

/// The traffic class of `FI_TC_DSCP` (fi_endpoint(3)), a DSCP of 6 bits; `None` for labels, which say nothing of it.
fn traffic_class(tclass: u32) -> Option<u8> {
    (tclass & FI_TC_DSCP != 0).then_some((tclass as u8 & 0x3f) << 2)
}

/// The endpoint that an info asks for.
///
/// # Safety
/// All that the info points to is valid.
unsafe fn described(
    role: Role,
    domain: &Arc<Domain>,
    info: &fi_info,
    tx: Option<&fi_tx_attr>,
) -> Result<Endpoint, i32> {
    // SAFETY: the caller vouches.
    let attr = unsafe { info.ep_attr.as_ref() }.filter(|attr| attr.type_ == FI_EP_RDM);
    let attr = attr.ok_or(FI_ENOSYS)?;
    let counts = (attr.tx_ctx_cnt, attr.rx_ctx_cnt);
    let contexts = match role {
        Role::Scalable => Contexts::scalable(counts)?,
        _ => Contexts::ordinary(),
    };
    // SAFETY: `src_addr` is as `src_addrlen` and `addr_format` say; the key is as long as the application says.
    let (bind, own_key) = unsafe {
        (source_address(info), auth_key(&domain.fabric, attr.auth_key, attr.auth_key_size)?)
    };
    if own_key.is_some() && matches!(domain.key, DomainKey::InVectors) {
        log::warn(format_args!("ep_attr->auth_key refused: the domain has FI_AV_AUTH_KEY"));
        return Err(FI_EINVAL);
    }
    let inject_size = tx.map_or(0, |tx| tx.inject_size);
    let inject_size = if inject_size == 0 { INJECT_SIZE } else { inject_size.min(INJECT_SIZE) };
    let more = (1..contexts.count()).map(|_| Bindings::default()).collect();
    Ok(Endpoint {
        domain: domain.clone(),
        addr_format: info.addr_format,
        bindings: ReadMostly::new(AllBindings { first: Bindings::default(), more }),
        contexts,
        shares: (counts.0 == FI_SHARED_CONTEXT, counts.1 == FI_SHARED_CONTEXT),
        engine: Locked::new(None),
        state: Locked::new(EndpointState::new(inject_size, bind)),
        inject_size,
        traffic_class: tx.and_then(|tx| traffic_class(tx.tclass)),
        own_key,
        directed: info.caps & FI_DIRECTED_RECV != 0,
        source: info.caps & FI_SOURCE != 0,
        triggers: info.caps & FI_TRIGGER != 0,
        caps: info.caps,
        owner: process::Home::here(),
    })
}

fn handle(
    shared: Arc<Endpoint>,
    role: Role,
    number: u8,
    flags: (u64, u64),
    context: *mut c_void,
    family: Arc<()>,
    alias: bool,
) -> *mut fid_ep {
    let tables = tables(role, shared.caps & FI_HMEM != 0);
    Box::into_raw(Box::new(EndpointFid {
        fid: fid_ep {
            fid: fid { fclass: role.class(), context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr().cast(),
            cm: cm::OPS.as_mut_ptr(),
            msg: tables.msg.as_mut_ptr(),
            rma: tables.rma.as_mut_ptr(),
            tagged: tables.tagged.as_mut_ptr(),
            atomic: tables.atomic.as_mut_ptr(),
            collective: tables.collective.as_mut_ptr(),
        },
        slack: SLACK,
        shared,
        tx_flags: AtomicU64::new(flags.0),
        rx_flags: AtomicU64::new(flags.1),
        role,
        context: number,
        family,
        alias,
    }))
    .cast()
}

/// # Safety
/// `info.src_addr` is null or has `src_addrlen` bytes in `addr_format`.
unsafe fn source_address(info: &fi_info) -> Option<Address> {
    if info.src_addr.is_null() {
        return None;
    }
    // SAFETY: the caller vouches; a string ends with NUL.
    unsafe {
        if info.addr_format == FI_ADDR_STR {
            return Address::from_text(CStr::from_ptr(info.src_addr.cast()).to_str().ok()?);
        }
        Address::from_bytes(std::slice::from_raw_parts(info.src_addr.cast(), info.src_addrlen))
    }
}

/// The endpoint behind a handle that a structure names. Errors: EINVAL for an object of another provider.
///
/// # Safety
/// `ep` is null or an open object.
pub(super) unsafe fn named<'a>(ep: *mut fid_ep) -> Result<&'a EndpointFid, i32> {
    // SAFETY: the caller vouches.
    unsafe { own_behind_hooks(ep.cast()) }
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(ep)", || {
        // SAFETY: a handle of this provider, open until this call.
        unsafe {
            let handle = &*fid.cast::<EndpointFid>();
            if handle.shared.domain.lock.is_lost() {
                return 0;
            }
            if !handle.alias {
                if Arc::strong_count(&handle.family) > 1 {
                    return -FI_EBUSY; // an alias is open
                }
                match handle.role {
                    Role::Transmit | Role::Receive => {
                        if let Err(error) = handle.shared.close_context(handle) {
                            return -error;
                        }
                    }
                    Role::Endpoint | Role::Scalable => {
                        if handle.shared.is_used() {
                            return -FI_EBUSY;
                        }
                        handle.shared.shut_down();
                        let EndpointFid { shared, .. } = *Box::from_raw(fid.cast::<EndpointFid>());
                        end(shared);
                        return 0;
                    }
                }
            }
            drop(Box::from_raw(fid.cast::<EndpointFid>()));
        }
        0
    })
}

/// Ends an endpoint that is shut down, and with it what keeps its domain open. A thread that reads an event queue, or a
/// profile, may have it for one more turn.
fn end(mut shared: Arc<Endpoint>) {
    // In a forked child there is no such thread.
    while shared.owner.is_here() {
        match Arc::try_unwrap(shared) {
            Ok(_) => return,
            Err(still) => shared = still,
        }
        process::yield_now();
    }
}

unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(ep)", || {
        // SAFETY: a handle of this provider; `arg` is as fi_endpoint.3 says for each command.
        unsafe {
            let handle = &*fid.cast::<EndpointFid>();
            match command {
                FI_ENABLE => code(match handle.role {
                    Role::Endpoint => handle.shared.enable(),
                    _ => handle.shared.enable_part(handle),
                }),
                FI_GETOPSFLAG => code(get_flags(handle, arg.cast())),
                FI_SETOPSFLAG => code(set_flags(handle, arg.cast())),
                FI_ALIAS => code(open_alias(handle, arg.cast())),
                _ => -FI_ENOSYS,
            }
        }
    })
}

/// # Safety
/// `arg` is null or a `u64`.
unsafe fn get_flags(handle: &EndpointFid, arg: *mut u64) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let flags = unsafe { arg.as_mut() }.ok_or(FI_EINVAL)?;
    *flags = match (*flags & FI_TRANSMIT != 0, *flags & FI_RECV != 0) {
        (true, false) => handle.tx_flags.load(Ordering::Relaxed),
        (false, true) => handle.rx_flags.load(Ordering::Relaxed),
        _ => return Err(FI_EINVAL),
    };
    Ok(())
}

/// # Safety
/// `arg` is null or a `u64`.
unsafe fn set_flags(handle: &EndpointFid, arg: *const u64) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let flags = *unsafe { arg.as_ref() }.ok_or(FI_EINVAL)?;
    let value = flags & !(FI_TRANSMIT | FI_RECV);
    info::offers_flags("FI_SETOPSFLAG", flags & FI_TRANSMIT != 0, value)?;
    match (flags & FI_TRANSMIT != 0, flags & FI_RECV != 0) {
        (true, false) => handle.tx_flags.store(value, Ordering::Relaxed),
        (false, true) => handle.rx_flags.store(value, Ordering::Relaxed),
        _ => return Err(FI_EINVAL),
    }
    Ok(())
}

/// `fi_ep_alias`: another handle of the endpoint with default flags of its own.
///
/// # Safety
/// `arg` is null or a `fi_alias` with valid `fid`.
unsafe fn open_alias(handle: &EndpointFid, arg: *mut fi_alias) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    unsafe {
        let arg = arg.as_mut().ok_or(FI_EINVAL)?;
        let flags = arg.flags & !(FI_TRANSMIT | FI_RECV);
        let mut tx = handle.tx_flags.load(Ordering::Relaxed);
        let mut rx = handle.rx_flags.load(Ordering::Relaxed);
        info::offers_flags("fi_ep_alias", arg.flags & FI_TRANSMIT != 0, flags)?;
        match (arg.flags & FI_TRANSMIT != 0, arg.flags & FI_RECV != 0) {
            (true, false) => tx = flags,
            (false, true) => rx = flags,
            (false, false) if flags == 0 => {}
            _ => return Err(FI_EINVAL),
        }
        if arg.fid.is_null() {
            return Err(FI_EINVAL);
        }
        let context = handle.fid.fid.context;
        let (shared, family) = (handle.shared.clone(), handle.family.clone());
        let (role, number) = (handle.role, handle.context);
        let alias = self::handle(shared, role, number, (tx, rx), context, family, true);
        *arg.fid = alias.cast();
    }
    Ok(())
}

/// The tables of calls that a handle offers.
struct Tables {
    msg: &'static Table<fi_ops_msg>,
    tagged: &'static Table<fi_ops_tagged>,
    rma: &'static Table<fi_ops_rma>,
    atomic: &'static Table<fi_ops_atomic>,
    collective: &'static Table<fi_ops_collective>,
}

/// `any`: buffers may be device memory.
fn tables(role: Role, any: bool) -> Tables {
    let (msg, tagged) = match (role, any) {
        (Role::Endpoint, false) => (&msg::OPS, &tagged::OPS),
        (Role::Endpoint, true) => (&msg::ANY_OPS, &tagged::ANY_OPS),
        (Role::Scalable, _) => (&msg::NO_OPS, &tagged::NO_OPS),
        (Role::Transmit, false) => (&msg::TRANSMIT_OPS, &tagged::TRANSMIT_OPS),
        (Role::Transmit, true) => (&msg::ANY_TRANSMIT_OPS, &tagged::ANY_TRANSMIT_OPS),
        (Role::Receive, false) => (&msg::RECEIVE_OPS, &tagged::RECEIVE_OPS),
        (Role::Receive, true) => (&msg::ANY_RECEIVE_OPS, &tagged::ANY_RECEIVE_OPS),
    };
    let (rma, atomic) = match role {
        Role::Endpoint | Role::Transmit => (&rma::OPS, &atomic::OPS),
        Role::Scalable | Role::Receive => (&rma::NO_OPS, &NO_ATOMIC),
    };
    let collective = match role {
        Role::Endpoint => &collective::OPS,
        _ => &NO_COLLECTIVE,
    };
    Tables { msg, tagged, rma, atomic, collective }
}

unsafe extern "C" fn open_transmit(
    sep: *mut fid_ep,
    index: c_int,
    attr: *mut fi_tx_attr,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_tx_context", || {
        // SAFETY: a handle of this provider; the application's attributes, if any.
        let (sep, attr) = unsafe { (endpoint(sep), attr.as_mut()) };
        let mut flags = sep.tx_flags.load(Ordering::Relaxed);
        if let Some(attr) = attr {
            if attr.caps & !TX_CAPS & RX_CAPS != 0 {
                log::warn(format_args!("fi_tx_context refused: caps {:#x}", attr.caps));
                return -FI_EINVAL;
            }
            let config = &sep.shared.domain.config;
            if let Err(error) = info::offers_transmit("fi_tx_context", attr, config) {
                return -error;
            }
            flags = attr.op_flags;
            attr.caps = sep.shared.caps & TX_CAPS;
            (attr.mode, attr.msg_order, attr.comp_order) = (0, MSG_ORDER, 0);
            attr.inject_size = sep.shared.inject_size;
            attr.size = if attr.size == 0 { CONTEXT_SIZE } else { attr.size };
            (attr.iov_limit, attr.rma_iov_limit) = (IOV_LIMIT, RMA_IOV_LIMIT);
        }
        // SAFETY: the caller vouches for this contract too.
        code(unsafe { open_context(sep, Role::Transmit, index, (flags, 0), out, context) })
    })
}

unsafe extern "C" fn open_receive(
    sep: *mut fid_ep,
    index: c_int,
    attr: *mut fi_rx_attr,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_rx_context", || {
        // SAFETY: a handle of this provider; the application's attributes, if any.
        let (sep, attr) = unsafe { (endpoint(sep), attr.as_mut()) };
        let mut flags = sep.rx_flags.load(Ordering::Relaxed);
        if let Some(attr) = attr {
            let config = &sep.shared.domain.config;
            if let Err(error) = info::offers_receive("fi_rx_context", attr, config) {
                return -error;
            }
            flags = attr.op_flags;
            attr.caps = sep.shared.caps & RX_CAPS;
            (attr.mode, attr.msg_order, attr.comp_order) = (0, MSG_ORDER, 0);
            attr.size = if attr.size == 0 { CONTEXT_SIZE } else { attr.size };
            (attr.total_buffered_recv, attr.iov_limit) = (0, IOV_LIMIT);
        }
        // SAFETY: the caller vouches for this contract too.
        code(unsafe { open_context(sep, Role::Receive, index, (0, flags), out, context) })
    })
}

/// Errors: EINVAL for a number that the endpoint does not have, or an endpoint that is not scalable; EBUSY
/// for a context that is open.
///
/// # Safety
/// `out` is null or valid.
unsafe fn open_context(
    sep: &EndpointFid,
    role: Role,
    index: c_int,
    flags: (u64, u64),
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> Result<(), i32> {
    let contexts = &sep.shared.contexts;
    let count = if role == Role::Transmit { contexts.transmit() } else { contexts.receive() };
    let number = u8::try_from(index).ok().filter(|number| *number < count);
    let (Some(number), Role::Scalable, false) = (number, sep.role, out.is_null()) else {
        return Err(FI_EINVAL);
    };
    let guard = sep.shared.domain.lock.control();
    // SAFETY: the guard belongs to the domain of the endpoint; one short step.
    let open = unsafe { contexts.open.get(&guard) };
    if open.has(role, number) {
        return Err(FI_EBUSY);
    }
    open.set(role, number, true);
    let (shared, family) = (sep.shared.clone(), Arc::new(()));
    // SAFETY: checked not to be null.
    unsafe { *out = handle(shared, role, number, flags, context, family, false) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use libfabric_sys::{FI_TC_LOW_LATENCY, FI_TC_NETWORK_CTRL, FI_TC_UNSPEC};

    #[test]
    fn a_dscp_is_a_traffic_class_and_a_label_is_none() {
        assert_eq!(
            [0, 26, 63].map(|dscp| traffic_class(FI_TC_DSCP | dscp)),
            [0, 104, 252].map(Some)
        );
        let labels = [FI_TC_UNSPEC, FI_TC_LOW_LATENCY, FI_TC_NETWORK_CTRL];
        assert_eq!(labels.map(traffic_class), [None; 3]);
    }
}
