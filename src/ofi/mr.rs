//! `struct fid_mr`: memory regions, which peers access by one-sided operations. Buffers of messages
//! and local buffers of one-sided operations need none.

use super::domain::{self, Domain, Hmem};
use super::guard::{code, entry, making_entry};
use super::keys::{self, DomainKey};
use super::table::{Operations, SLACK, Slack, Table};
use super::trigger::Count;
use super::{av, cntr, slots};
use crate::memory::declared::{Declaration, declare};
use crate::memory::keys::Region;
use crate::memory::{ADDRESSES_END, MAX_SEGMENTS, SegmentList};
use crate::telemetry::log;
use crate::transport::JobKey;
use libfabric_sys::{
    FI_AUTH_KEY, FI_CLASS_CNTR, FI_CLASS_EP, FI_CLASS_MR, FI_EBUSY, FI_EINVAL, FI_ENABLE,
    FI_ENOKEY, FI_ENOSYS, FI_EOPNOTSUPP, FI_ETOOSMALL, FI_GET_RAW_MR, FI_HMEM_CUDA, FI_HMEM_SYSTEM,
    FI_MAP_RAW_MR, FI_MR_DMABUF, FI_REFRESH, FI_REMOTE_READ, FI_REMOTE_WRITE, FI_UNMAP_KEY,
    fi_hmem_iface, fi_mr_attr, fi_mr_auth_key, fi_mr_dmabuf, fi_mr_map_raw, fi_mr_raw_attr, fi_ops,
    fi_ops_mr, fi_version, fid, fid_domain, fid_mr,
};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

#[repr(C)]
struct MrFid {
    fid: fid_mr,
    slack: Slack,
    domain: Arc<Domain>,
    /// The region's id in the domain.
    id: u64,
    /// Peers may access it, by its key.
    remote: bool,
    /// The address that peers use for the region's first byte.
    base: u64,
    /// Declarations of its parts: hints how far around a buffer a device registers (`memory::declared`).
    declared: Vec<Declaration>,
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    ..fi_ops::STUBS
});

/// The registration calls, as part of the domain's object.
pub(crate) static OPS: Table<fi_ops_mr> = Table::new(fi_ops_mr {
    reg: Some(reg),
    regv: Some(regv),
    regattr: Some(regattr),
    ..fi_ops_mr::STUBS
});

/// The arguments of a registration.
struct Registration<'a> {
    parts: &'a [libc::iovec],
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    context: *mut c_void,
    /// The authorization key of the endpoints whose peers may access it; `None`: all endpoints.
    key: Option<JobKey>,
}

/// The parts as a list; `None` for too many parts, or a part that goes beyond the end of all addresses.
///
/// fi_mr.3: a range may be registered "whether or not those addresses are backed by physical pages or have been
/// allocated". Chapel, MPICH and Sandia OpenSHMEM register NULL and SIZE_MAX, which is all memory of the process.
/// Such a part ends where no memory can be, so that no peer names an address with a mark in it.
///
/// # Safety
/// The parts are lent for as long as the result is used.
unsafe fn gathered(parts: &[libc::iovec]) -> Option<SegmentList> {
    let mut list = [(std::ptr::null(), 0); MAX_SEGMENTS];
    for (to, from) in list.iter_mut().zip(parts) {
        let addr = from.iov_base.addr();
        addr.checked_add(from.iov_len)?;
        let most = ADDRESSES_END.checked_sub(addr).unwrap_or(usize::MAX);
        // The offsets of the parts behind it would change.
        if from.iov_len > most && parts.len() > 1 {
            return None;
        }
        *to = (from.iov_base.cast_const().cast(), from.iov_len.min(most));
    }
    // SAFETY: the caller vouches.
    unsafe { SegmentList::gather(list.get(..parts.len())?) }
}

/// The same; with FI_HMEM, device memory is marked, whatever `iface` says. Errors: EINVAL; those of the driver.
///
/// # Safety
/// As [`gathered`].
unsafe fn located(domain: &Domain, parts: &[libc::iovec]) -> Result<SegmentList, i32> {
    // SAFETY: the caller vouches.
    let memory = unsafe { gathered(parts) }.ok_or(FI_EINVAL)?;
    match domain.hmem {
        Hmem::Off => Ok(memory),
        _ => memory.located().map_err(|errno| errno.0),
    }
}

/// Device memory is not declared: a registration of the processor's memory must not reach into it. Nor are parts that
/// begin at address 0: they are no buffers, and would be the surroundings of every buffer.
fn declared(memory: &SegmentList, parts: &[libc::iovec]) -> Vec<Declaration> {
    let parts = if memory.is_on_device() { &[] } else { parts };
    let buffers = parts.iter().filter(|part| !part.iov_base.is_null());
    buffers.map(|part| declare(part.iov_base.addr(), part.iov_len)).collect()
}

/// A key names a region to peers. The key of a region that no peer may access is not checked, and any number of
/// such regions may have the same one. Open MPI, MPICH and the plug-ins of NCCL register their message buffers
/// like this, all with the key 0.
///
/// Errors: EINVAL, also for parts beyond the end of all addresses; ENOKEY when the application's key is in use;
/// EOPNOTSUPP for FI_MR_DMABUF, which is another call's.
///
/// # Safety
/// `fid` is the domain, `out` null or valid; the parts stay valid until the region is closed.
unsafe fn register(
    fid: *mut fid,
    wanted: &Registration<'_>,
    out: *mut *mut fid_mr,
) -> Result<(), i32> {
    if wanted.flags & FI_MR_DMABUF != 0 {
        return Err(FI_EOPNOTSUPP);
    }
    // fi_mr.3: the offset "is reserved for future use and must be 0".
    if out.is_null() || wanted.parts.is_empty() || wanted.offset != 0 {
        return Err(FI_EINVAL);
    }
    // SAFETY: the application's domain; `fid` is its first member.
    let domain = unsafe { domain::shared(fid.cast::<fid_domain>()) };
    // SAFETY: the application lends the parts until fi_close.
    let memory = unsafe { located(domain, wanted.parts) }?;
    let base = if domain.names_addresses { memory.first_addr() } else { 0 };
    let region = Region {
        memory,
        base,
        remote_read: wanted.access & FI_REMOTE_READ != 0,
        remote_write: wanted.access & FI_REMOTE_WRITE != 0,
    };
    let guard = domain.lock.control();
    // SAFETY: the guard belongs to this domain; one short step.
    let regions = &mut unsafe { domain.state(&guard) }.regions;
    let key = if domain.chooses_keys { regions.new_key() } else { wanted.requested_key };
    let remote = region.remote_read || region.remote_write;
    let id = if remote { regions.insert(key, region).ok_or(FI_ENOKEY)? } else { regions.new_id() };
    if let Some(key) = wanted.key {
        // SAFETY: the guard belongs to this domain; one short step.
        unsafe { domain.state(&guard) }.region_keys.insert(id, key);
    }
    drop(guard);
    let mut mr = Box::new(MrFid {
        fid: fid_mr {
            fid: libfabric_sys::fid {
                fclass: FI_CLASS_MR,
                context: wanted.context,
                ops: FID_OPS.as_mut_ptr(),
            },
            mem_desc: null_mut(),
            key,
        },
        slack: SLACK,
        domain: domain.clone(),
        id,
        remote,
        base,
        // Device memory is not the processor's: nobody registers around it.
        declared: declared(&memory, wanted.parts),
    });
    mr.fid.mem_desc = (&raw mut *mr).cast();
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(mr).cast() };
    Ok(())
}

/// # Safety
/// `list` is null or has `count` elements.
unsafe fn parts<'a>(list: *const libc::iovec, count: usize) -> &'a [libc::iovec] {
    if list.is_null() || count > MAX_SEGMENTS {
        return &[];
    }
    // SAFETY: the caller vouches.
    unsafe { std::slice::from_raw_parts(list, count) }
}

/// Where the parts of a region under FI_MR_DMABUF are in this process: device memory is reached by its address. Errors: EINVAL;
/// EOPNOTSUPP for memory of others than CUDA's devices, and for memory without an address.
///
/// # Safety
/// `from` and `count` are as fi_mr.3 says for that flag.
unsafe fn of_dmabuf(
    iface: fi_hmem_iface,
    (from, count): (*const fi_mr_dmabuf, usize),
    to: &mut [libc::iovec; MAX_SEGMENTS],
) -> Result<&[libc::iovec], i32> {
    if iface != FI_HMEM_CUDA {
        return Err(FI_EOPNOTSUPP);
    }
    if from.is_null() {
        return Err(FI_EINVAL);
    }
    let to = to.get_mut(..count).ok_or(FI_EINVAL)?;
    for (at, part) in to.iter_mut().enumerate() {
        // SAFETY: the caller has `iov_count` of them.
        let of = unsafe { from.add(at).read_unaligned() };
        if of.base_addr.is_null() {
            return Err(FI_EOPNOTSUPP);
        }
        let offset = usize::try_from(of.offset).map_err(|_| FI_EINVAL)?;
        *part = libc::iovec { iov_base: of.base_addr.wrapping_byte_add(offset), iov_len: of.len };
        if of.fd < 0 || part.iov_base.addr() < offset {
            return Err(FI_EINVAL);
        }
    }
    Ok(to)
}

/// Errors: EOPNOTSUPP if the keys are in address vectors, because each region then needs one of them.
fn demands_no_key(domain: &Domain) -> Result<(), i32> {
    if matches!(domain.key, DomainKey::InVectors) {
        log::warn(format_args!(
            "fi_mr_reg and fi_mr_regv refused: with FI_AV_AUTH_KEY use fi_mr_regattr"
        ));
        return Err(FI_EOPNOTSUPP);
    }
    Ok(())
}

/// The authorization key of a region, if it has its own. Errors: EINVAL for an invalid key;
/// ENOKEY for an address vector without a key.
///
/// # Safety
/// `attr` is as fi_mr.3 says for the API version of the domain: members that it lacks are not read.
unsafe fn key_of(
    domain: &Arc<Domain>,
    attr: *const fi_mr_attr,
    flags: u64,
) -> Result<Option<JobKey>, i32> {
    if domain.fabric.api_version() < fi_version(1, 5) {
        return Ok(None);
    }
    // SAFETY: the caller vouches.
    let (at, size) = unsafe { ((*attr).auth_key, (*attr).auth_key_size) };
    if !matches!(domain.key, DomainKey::InVectors) {
        // SAFETY: the caller vouches.
        return unsafe { keys::auth_key(&domain.fabric, at, size) };
    }
    if at.is_null() || size != size_of::<fi_mr_auth_key>() {
        log::warn(format_args!(
            "fi_mr_regattr refused: with FI_AV_AUTH_KEY auth_key is a struct fi_mr_auth_key"
        ));
        return Err(FI_EINVAL);
    }
    // SAFETY: the caller vouches; checked not to be null.
    let wanted = unsafe { at.cast::<fi_mr_auth_key>().read_unaligned() };
    // SAFETY: null or an object of the application.
    let av = unsafe { av::named(wanted.av) }?;
    if !Arc::ptr_eq(&av.domain, domain) {
        return Err(FI_EINVAL);
    }
    let guard = domain.lock.control();
    if flags & FI_AUTH_KEY != 0 && !av.is_key(wanted.src_addr, &guard) {
        return Err(FI_EINVAL);
    }
    av.job_key(&guard).map(Some).ok_or(FI_ENOKEY)
}

unsafe extern "C" fn reg(
    fid: *mut fid,
    buf: *const c_void,
    len: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    out: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_mr_reg", || {
        // SAFETY: the application's domain; `fid` is its first member.
        if let Err(error) = demands_no_key(unsafe { domain::shared(fid.cast::<fid_domain>()) }) {
            return -error;
        }
        let parts = &[libc::iovec { iov_base: buf.cast_mut(), iov_len: len }];
        let wanted =
            Registration { parts, access, offset, requested_key, flags, context, key: None };
        // SAFETY: as libfabric calls fi_mr_reg.
        code(unsafe { register(fid, &wanted, out) })
    })
}

unsafe extern "C" fn regv(
    fid: *mut fid,
    iov: *const libc::iovec,
    count: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    out: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_mr_regv", || {
        // SAFETY: as libfabric calls fi_mr_regv.
        unsafe {
            if let Err(error) = demands_no_key(domain::shared(fid.cast::<fid_domain>())) {
                return -error;
            }
            let parts = parts(iov, count);
            let wanted =
                Registration { parts, access, offset, requested_key, flags, context, key: None };
            code(register(fid, &wanted, out))
        }
    })
}

unsafe extern "C" fn regattr(
    fid: *mut fid,
    attr: *const fi_mr_attr,
    flags: u64,
    out: *mut *mut fid_mr,
) -> c_int {
    making_entry("fi_mr_regattr", || {
        if attr.is_null() {
            return -FI_EINVAL;
        }
        // SAFETY: as libfabric calls fi_mr_regattr. Members are read one by one, because the structure of an older API is
        // shorter: `iface` exists since 1.9. Under FI_MR_DMABUF `mr_iov` points to something else.
        unsafe {
            let domain = domain::shared(fid.cast::<fid_domain>());
            let has_iface = domain.fabric.api_version() >= fi_version(1, 9);
            let iface = if has_iface { (*attr).iface } else { FI_HMEM_SYSTEM };
            let on_device = iface == FI_HMEM_CUDA && domain.hmem != Hmem::Off;
            if iface != FI_HMEM_SYSTEM && !on_device {
                return -FI_EINVAL;
            }
            let key = match key_of(domain, attr, flags) {
                Ok(key) => key,
                Err(error) => return -error,
            };
            let mut mapped = [libc::iovec { iov_base: null_mut(), iov_len: 0 }; MAX_SEGMENTS];
            let parts = match flags & FI_MR_DMABUF {
                0 => parts((*attr).mr_iov, (*attr).iov_count),
                _ => {
                    match of_dmabuf(iface, ((*attr).mr_iov.cast(), (*attr).iov_count), &mut mapped)
                    {
                        Ok(parts) => parts,
                        Err(error) => return -error,
                    }
                }
            };
            let wanted = Registration {
                parts,
                access: (*attr).access,
                offset: (*attr).offset,
                requested_key: (*attr).requested_key,
                flags: flags & !FI_MR_DMABUF,
                context: (*attr).context,
                key,
            };
            code(register(fid, &wanted, out))
        }
    })
}

/// After this no peer accesses the memory: operations under way look the region up for every fragment. -FI_EBUSY: a
/// peer has been in the middle of a copy for too long; the region stays open until another call succeeds.
unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(mr)", || {
        // SAFETY: a region of this provider, open until this call.
        if unsafe { &*fid.cast::<MrFid>() }.domain.lock.is_lost() {
            return 0;
        }
        // SAFETY: the box that `register` made; this call ends its use.
        let mut mr = unsafe { Box::from_raw(fid.cast::<MrFid>()) };
        let guard = mr.domain.lock.control();
        // SAFETY: the guard belongs to the region's domain; one short step.
        let state = unsafe { mr.domain.state(&guard) };
        if mr.remote {
            state.regions.remove(mr.fid.key);
        }
        state.region_counters.remove(&mr.id);
        state.region_keys.remove(&mr.id);
        mr.domain.revoke(mr.id, &guard);
        drop(guard);
        if !mr.domain.lock.is_here() {
            // A thread of the parent may have held the lock of the list of declarations during the fork.
            std::mem::forget(mr.declared);
            return 0;
        }
        if mr.domain.settle() {
            return 0;
        }
        mr.remote = false;
        let _ = Box::into_raw(mr);
        -FI_EBUSY
    })
}

unsafe extern "C" fn bind(fid: *mut fid, other: *mut fid, flags: u64) -> c_int {
    entry("fi_mr_bind", || {
        // SAFETY: a region of this provider and an object of the application.
        unsafe {
            let mr = &*fid.cast::<MrFid>();
            match other.as_ref().map(|other| other.fclass) {
                // Every endpoint of the domain gives access to it without a binding.
                Some(FI_CLASS_EP) => 0,
                Some(FI_CLASS_CNTR) => {
                    code(cntr::shared(other).and_then(|counter| bind_counter(mr, counter, flags)))
                }
                _ => -FI_EINVAL,
            }
        }
    })
}

/// Errors: EINVAL for other flags than FI_REMOTE_READ and FI_REMOTE_WRITE, a counter of another
/// domain, or a second one; those of the counter's wait object. Then nothing is bound.
fn bind_counter(mr: &MrFid, counter: &Arc<cntr::Counter>, flags: u64) -> Result<(), i32> {
    let known = FI_REMOTE_READ | FI_REMOTE_WRITE;
    if flags & !known != 0 || flags == 0 || !Arc::ptr_eq(&counter.domain, &mr.domain) {
        return Err(FI_EINVAL);
    }
    let guard = mr.domain.lock.control();
    // SAFETY: the guard belongs to the region's domain; one short step.
    let state = unsafe { mr.domain.state(&guard) };
    let counters = state.region_counters.entry(mr.id).or_default();
    slots::bind(counters.slots(), flags, &(counter.clone() as Arc<dyn Count>))?;
    // Ends direct RMA to the region, because the counter must see each access from now on.
    mr.domain.revoke(mr.id, &guard);
    let fed = mr.domain.feed(counter.clone(), &guard);
    if fed.is_err() {
        // SAFETY: the guard belongs to the region's domain; one short step.
        let state = unsafe { mr.domain.state(&guard) };
        slots::unbind(state.region_counters.entry(mr.id).or_default().slots(), flags);
    }
    drop(guard);
    mr.domain.settle();
    fed
}

unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(mr)", || match command {
        // Regions are enabled when they are registered.
        FI_ENABLE => 0,
        // A device may refer to pages that the region no longer has.
        FI_REFRESH => {
            // SAFETY: a region of this provider.
            let mr = unsafe { &*fid.cast::<MrFid>() };
            mr.domain.revoke(mr.id, &mr.domain.lock.control());
            mr.domain.settle();
            0
        }
        // SAFETY: a region of this provider; `arg` is as fi_mr.3 says.
        FI_GET_RAW_MR => code(unsafe { raw_attr(&*fid.cast::<MrFid>(), arg.cast()) }),
        _ => -FI_ENOSYS,
    })
}

/// # Safety
/// `arg` is null or as `fi_mr_raw_attr` passes it.
unsafe fn raw_attr(mr: &MrFid, arg: *const fi_mr_raw_attr) -> Result<(), i32> {
    let key = mr.fid.key.to_ne_bytes();
    // SAFETY: the caller vouches; checked not to be null.
    unsafe {
        let arg = arg.as_ref().ok_or(FI_EINVAL)?;
        let room = arg.key_size.as_mut().ok_or(FI_EINVAL)?;
        if std::mem::replace(room, key.len()) < key.len() {
            return Err(FI_ETOOSMALL);
        }
        if arg.raw_key.is_null() {
            return Err(FI_EINVAL);
        }
        arg.raw_key.copy_from_nonoverlapping(key.as_ptr(), key.len());
        if let Some(base) = arg.base_addr.as_mut() {
            *base = mr.base;
        }
    }
    Ok(())
}

/// `fi_mr_map_raw` and `fi_mr_unmap_key`: a raw key of this provider is the key itself.
///
/// # Safety
/// `arg` is as fi_mr.3 says for the command.
pub(super) unsafe fn domain_control(command: c_int, arg: *mut c_void) -> c_int {
    match command {
        // SAFETY: the caller vouches.
        FI_MAP_RAW_MR => code(unsafe { map_raw(arg.cast()) }),
        FI_UNMAP_KEY => 0,
        _ => -FI_ENOSYS,
    }
}

/// # Safety
/// `arg` is null or as `fi_mr_map_raw` passes it.
unsafe fn map_raw(arg: *const fi_mr_map_raw) -> Result<(), i32> {
    // SAFETY: the caller vouches; checked not to be null.
    unsafe {
        let arg = arg.as_ref().ok_or(FI_EINVAL)?;
        let key = arg.key.as_mut().ok_or(FI_EINVAL)?;
        if arg.raw_key.is_null() || arg.key_size != size_of::<u64>() {
            return Err(FI_EINVAL);
        }
        *key = arg.raw_key.cast::<u64>().read_unaligned();
    }
    Ok(())
}
