//! `struct fid_domain`: the parent of endpoints, queues, counters, address vectors and regions, and
//! the owner of the lock that they share.

use super::fabric::Fabric;
use super::guard::{code, entry, making_entry};
use super::lock::{DomainLock, Guard, Locked};
use super::progress::ProgressThread;
use super::table::{SLACK, Slack, Table, stubs};
use super::trigger::Triggers;
use super::{av, cntr, cq, elsewhere, endpoint, eq, mr, poll_set};
use crate::config::Config;
use crate::memory::keys::{RegionTable, Right};
use crate::sys::numbers::NumberMap;
use crate::sys::process;
use crate::telemetry::log;
use crate::transport::net::reliable::tag::JobKey;
use crate::transport::net::{job_key, verbs};
use crate::transport::shm::reaching::{are_left_settled, settle};
use libfabric_sys::{
    FI_AV_AUTH_KEY, FI_CANCEL_WORK, FI_CLASS_DOMAIN, FI_CLASS_EQ, FI_EBUSY, FI_EINVAL, FI_ENOSYS,
    FI_EOPNOTSUPP, FI_FLUSH_WORK, FI_MR_BASIC, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR, FI_PROGRESS_AUTO,
    FI_QUEUE_WORK, FI_REG_MR, FI_THREAD_DOMAIN, fi_atomic_attr, fi_av_attr, fi_cntr_attr,
    fi_collective_attr, fi_collective_op, fi_cq_attr, fi_datatype, fi_info, fi_op, fi_ops,
    fi_ops_domain, fi_ops_domain_2_7, fi_poll_attr, fi_rx_attr, fi_tx_attr, fi_version, fid,
    fid_av, fid_cntr, fid_cq, fid_domain, fid_ep, fid_poll, fid_stx,
};
use once_cell::sync::OnceCell;
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Where endpoints that bring no job key have it from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DomainKey {
    /// The application gave it with the domain.
    Given(JobKey),
    /// The application gave none: that of the environment, and what it was made of.
    Environment(JobKey, job_key::Source),
    /// Each endpoint's address vector has one (FI_AV_AUTH_KEY).
    InVectors,
}

/// What the children of a domain share.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) lock: DomainLock,
    pub(crate) config: Config,
    pub(crate) key: DomainKey,
    /// Address format of the info that the domain was opened with.
    pub(crate) addr_format: u32,
    /// Keys of regions are ours to choose (FI_MR_BASIC, FI_MR_PROV_KEY).
    pub(crate) chooses_keys: bool,
    /// Peers name places in regions by address (FI_MR_BASIC, FI_MR_VIRT_ADDR); else by offset.
    pub(crate) names_addresses: bool,
    pub(crate) state: Locked<DomainState>,
    /// Who polls had better let another process have the processor.
    pub(crate) yields: AtomicBool,
    thread: OnceCell<ProgressThread>,
}

/// What changes while the domain is open.
#[derive(Debug, Default)]
pub(crate) struct DomainState {
    /// Enabled endpoints; each removes itself before it goes away.
    pub(crate) endpoints: Vec<*const endpoint::Endpoint>,
    /// Queues and counters whose wait object is a condition: someone must signal it.
    pub(crate) conditions: Vec<Condition>,
    /// Memory that peers may reach.
    pub(crate) regions: RegionTable,
    /// Counters of regions, by the region's id.
    pub(crate) region_counters: NumberMap<u64, RegionCounters>,
    /// Job keys of those regions that are not for all endpoints of the domain, by the region's id.
    pub(crate) region_keys: NumberMap<u64, JobKey>,
    /// Counters that were ever bound to a region, or raised by deferred work: every endpoint feeds them.
    pub(crate) fed: Vec<Weak<cntr::Counter>>,
    /// What waits for counters.
    pub(super) triggers: Triggers,
}

/// What is counted of a region.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegionCounters {
    pub(crate) read: Option<Arc<cntr::Counter>>,
    pub(crate) write: Option<Arc<cntr::Counter>>,
}

impl RegionCounters {
    /// Those that count an access: what exchanges reads the memory and changes it (fi_mr.3), and is
    /// one event of a counter that is bound for both.
    pub(crate) fn told(&self, right: Right) -> impl Iterator<Item = &Arc<cntr::Counter>> {
        let write = self.write.as_ref().filter(|_| right.writes());
        let read = self.read.as_ref().filter(|_| right.reads());
        let read = read.filter(|read| write.is_none_or(|write| !Arc::ptr_eq(read, write)));
        write.into_iter().chain(read)
    }
}

impl Domain {
    /// Lets another process have the processor, if the last poll of an endpoint was for that. Not
    /// under the lock: other threads may want it meanwhile.
    #[inline]
    pub(super) fn give_way(&self) {
        if self.yields.load(Ordering::Relaxed) {
            self.yields.store(false, Ordering::Relaxed);
            process::yield_now();
        }
    }

    /// From now on every endpoint of the domain feeds `counter`, whoever progresses for it.
    /// Errors: of the counter's wait object.
    pub(super) fn feed(&self, counter: &Arc<cntr::Counter>, guard: &Guard<'_>) -> Result<(), i32> {
        // SAFETY: the guard is of this domain; one short step.
        let state = unsafe { self.state(guard) };
        if state.fed.iter().any(|known| known.as_ptr() == Arc::as_ptr(counter)) {
            return Ok(());
        }
        state.fed.retain(|known| known.strong_count() > 0);
        state.fed.push(Arc::downgrade(counter));
        for endpoint in state.endpoints.clone() {
            // SAFETY: endpoints leave the domain's list under the lock before they go away.
            unsafe { &*endpoint }.feed(counter, guard)?;
        }
        Ok(())
    }
}

impl Domain {
    /// Peers do not reach this region without us any more, once this has returned and then [`Domain::settle`].
    pub(super) fn revoke(&self, region: u64, guard: &Guard<'_>) {
        // SAFETY: the guard is of this domain; the copy ends the borrow.
        let endpoints = unsafe { self.state(guard) }.endpoints.clone();
        for endpoint in endpoints {
            // SAFETY: endpoints leave the domain's list under the lock before they go away.
            if let Some(engine) = unsafe { &*endpoint }.engine(guard) {
                engine.revoke(region);
            }
        }
    }
}

impl Domain {
    /// Waits until no peer is in the middle of what it began before a `revoke`; nobody holds the lock meanwhile. False:
    /// one still is, which is neither stopped nor has ended (`transport::shm::reaching`).
    pub(super) fn settle(&self) -> bool {
        settle(|insists| {
            let guard = self.lock.lock();
            // SAFETY: the guard is of this domain; the copy ends the borrow.
            let endpoints = unsafe { self.state(&guard) }.endpoints.clone();
            let settled = endpoints.into_iter().all(|endpoint| {
                // SAFETY: endpoints leave the domain's list under the lock before they go away.
                let engine = unsafe { &*endpoint }.engine(&guard);
                engine.is_none_or(|engine| engine.is_settled(insists))
            });
            settled && are_left_settled()
        })
    }
}

impl DomainState {
    /// Whether a region is for an endpoint to which the application has given this job key.
    pub(crate) fn is_for(&self, region: u64, key: Option<JobKey>) -> bool {
        self.region_keys.get(&region).is_none_or(|wanted| Some(*wanted) == key)
    }

    /// Those of `fed` that still are.
    pub(crate) fn counters_of_regions(&self) -> Vec<Arc<cntr::Counter>> {
        self.fed.iter().filter_map(Weak::upgrade).collect()
    }
}

/// A queue or counter with a condition.
#[derive(Clone, Debug)]
pub(crate) enum Condition {
    Queue(Weak<cq::CompletionQueue>),
    Counter(Weak<cntr::Counter>),
}

impl Domain {
    /// Starts the thread that progresses without the application, if it does not run yet.
    /// Errors: EAGAIN when the system has no more threads, EMFILE.
    pub(crate) fn require_thread(self: &Arc<Self>) -> Result<(), i32> {
        self.lock.need();
        self.thread.get_or_try_init(|| ProgressThread::start(self)).map(|_| ())
    }

    /// The thread, if there is one.
    pub(crate) fn thread(&self) -> Option<&ProgressThread> {
        self.thread.get()
    }

    /// The domain's own state.
    ///
    /// # Safety
    /// As [`Locked::get`].
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn state<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut DomainState {
        // SAFETY: passed on.
        unsafe { self.state.get(guard) }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // In a forked child nobody looks at it, and a thread of the parent may have had the list.
        if self.lock.is_here() {
            elsewhere::leave(self);
        }
        if let Some(thread) = self.thread.take() {
            thread.stop();
        }
    }
}

#[repr(C)]
struct DomainFid {
    fid: fid_domain,
    slack: Slack,
    shared: Arc<Domain>,
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    // SAFETY: fi_ops has six slots.
    ..unsafe { stubs::<fi_ops, 6>() }
});

// SAFETY: fi_ops_domain_2_7 has twelve slots.
const STUBS: fi_ops_domain_2_7 = unsafe { stubs::<fi_ops_domain_2_7, 12>() };

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
        ..STUBS.base
    },
    ..STUBS
});

/// `fi_domain`. Errors: EINVAL, also for a job key that is none; EAGAIN, EMFILE (a thread).
///
/// # Safety
/// `info` and `out` are as libfabric passes them to `fi_domain`.
pub(crate) unsafe fn open(
    fabric: &Arc<Fabric>,
    info: *mut fi_info,
    out: *mut *mut fid_domain,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: an info of ours (or a copy), valid during the call.
    let info = unsafe { info.as_ref() }.ok_or(FI_EINVAL)?;
    // SAFETY: as above.
    let attr = unsafe { info.domain_attr.as_ref() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    // SAFETY: as above: null or a C string.
    let name = unsafe { attr.name.as_ref().map(|name| CStr::from_ptr(name)) };
    let config = config_of(name.and_then(|name| name.to_str().ok()))?;
    // SAFETY: as above; the application says how long its key is.
    let key = unsafe { key_of(fabric, attr.auth_key, attr.auth_key_size, &config) }?;
    let auto = attr.data_progress == FI_PROGRESS_AUTO || attr.control_progress == FI_PROGRESS_AUTO;
    let shared = Arc::new(Domain {
        fabric: fabric.clone(),
        lock: DomainLock::new(attr.threading != FI_THREAD_DOMAIN || auto),
        config,
        key,
        addr_format: info.addr_format,
        chooses_keys: attr.mr_mode & (FI_MR_BASIC | FI_MR_PROV_KEY) != 0,
        names_addresses: attr.mr_mode & (FI_MR_BASIC | FI_MR_VIRT_ADDR) != 0,
        state: Locked::new(DomainState::default()),
        yields: AtomicBool::new(false),
        thread: OnceCell::new(),
    });
    if attr.data_progress == FI_PROGRESS_AUTO {
        shared.require_thread()?;
    }
    elsewhere::enter(&shared);
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
    let Some(nic) = name.and_then(verbs::device_named) else { return Ok(config) };
    verbs::insisting(&config, &nic).map_err(|offered| {
        log::warn(format_args!("domain_attr->name refused: {nic}, offered {offered}"));
        FI_EINVAL
    })
}

/// # Safety
/// As [`auth_key`].
unsafe fn key_of(
    fabric: &Fabric,
    at: *const u8,
    len: usize,
    config: &Config,
) -> Result<DomainKey, i32> {
    if len == FI_AV_AUTH_KEY && at.is_null() && fabric.api_version() >= fi_version(1, 20) {
        return Ok(DomainKey::InVectors);
    }
    // SAFETY: the caller vouches.
    match unsafe { auth_key(fabric, at, len) }? {
        Some(key) => Ok(DomainKey::Given(key)),
        None => default_job_key(config).map(|(key, source)| DomainKey::Environment(key, source)),
    }
}

/// The job key that an application gives with a domain, an endpoint or a region, if it gives one. Members
/// of this name are ignored before API version 1.5 (fi_domain(3), fi_endpoint(3), fi_mr(3)).
/// Errors: EINVAL for a key that `fi_getinfo` would not have offered.
///
/// # Safety
/// `at` is null or points to `len` bytes.
pub(super) unsafe fn auth_key(
    fabric: &Fabric,
    at: *const u8,
    len: usize,
) -> Result<Option<JobKey>, i32> {
    if len == 0 || fabric.api_version() < fi_version(1, 5) {
        return Ok(None);
    }
    // SAFETY: the caller vouches.
    let bytes = unsafe { auth_key_bytes(at, len) }?;
    job_key::Source::AuthKey.explain();
    Ok(Some(job_key::of_auth_key(bytes)))
}

/// The bytes of an authorization key. Errors: EINVAL unless they are 1 to [`job_key::SECRET_MAX`].
///
/// # Safety
/// `at` is null or points to `len` bytes.
pub(super) unsafe fn auth_key_bytes<'a>(at: *const u8, len: usize) -> Result<&'a [u8], i32> {
    if at.is_null() || !(1..=job_key::SECRET_MAX).contains(&len) {
        log::warn(format_args!(
            "auth_key refused: {len} bytes, offered 1 to {}",
            job_key::SECRET_MAX
        ));
        return Err(FI_EINVAL);
    }
    // SAFETY: checked; the caller vouches for the rest.
    Ok(unsafe { std::slice::from_raw_parts(at, len) })
}

/// The job key where the application gives none; the log says what it was made of.
/// Errors: EINVAL for a FI_UDRV_JOB_KEY, or a key file, that is none.
fn default_job_key(config: &Config) -> Result<(JobKey, job_key::Source), i32> {
    let (key, source) = job_key::of_environment(config).map_err(|_| FI_EINVAL)?;
    source.explain();
    Ok((key, source))
}

/// The shared part of a domain.
///
/// # Safety
/// `domain` came from [`open`] and is not closed.
pub(crate) unsafe fn shared<'a>(domain: *mut fid_domain) -> &'a Arc<Domain> {
    // SAFETY: the caller vouches.
    unsafe { &(*domain.cast::<DomainFid>()).shared }
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(domain)", || {
        // SAFETY: a domain of ours, open until now.
        unsafe {
            let shared = &(*fid.cast::<DomainFid>()).shared;
            if shared.lock.is_lost() {
                return 0;
            }
            if Arc::strong_count(shared) > 1 {
                return -FI_EBUSY;
            }
            drop(Box::from_raw(fid.cast::<DomainFid>()));
        }
        0
    })
}

unsafe extern "C" fn control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(domain)", || {
        // SAFETY: a domain of ours; `arg` is as fi_trigger.3 and fi_mr.3 say for each command.
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
        // SAFETY: an object of the application.
        let Some(other) = (unsafe { other.as_ref() }) else { return -FI_EINVAL };
        if other.fclass != FI_CLASS_EQ {
            return -FI_EINVAL;
        }
        if flags & FI_REG_MR != 0 {
            return -FI_EOPNOTSUPP; // registrations complete at once here
        }
        // Address vectors report to the queue that is bound to them.
        eq::accept_bind()
    })
}

unsafe extern "C" fn av_open(
    domain: *mut fid_domain,
    attr: *mut fi_av_attr,
    out: *mut *mut fid_av,
    context: *mut c_void,
) -> c_int {
    // SAFETY: as libfabric calls fi_av_open.
    making_entry("fi_av_open", || code(unsafe { av::open(shared(domain), attr, out, context) }))
}

unsafe extern "C" fn cq_open(
    domain: *mut fid_domain,
    attr: *mut fi_cq_attr,
    out: *mut *mut fid_cq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: as libfabric calls fi_cq_open.
    making_entry("fi_cq_open", || code(unsafe { cq::open(shared(domain), attr, out, context) }))
}

unsafe extern "C" fn cntr_open(
    domain: *mut fid_domain,
    attr: *mut fi_cntr_attr,
    out: *mut *mut fid_cntr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: as libfabric calls fi_cntr_open.
    making_entry("fi_cntr_open", || code(unsafe { cntr::open(shared(domain), attr, out, context) }))
}

unsafe extern "C" fn poll_open(
    domain: *mut fid_domain,
    attr: *mut fi_poll_attr,
    out: *mut *mut fid_poll,
) -> c_int {
    // SAFETY: as libfabric calls fi_poll_open.
    making_entry("fi_poll_open", || code(unsafe { poll_set::open(shared(domain), attr, out) }))
}

unsafe extern "C" fn open_endpoint(
    domain: *mut fid_domain,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_endpoint", || {
        // SAFETY: as libfabric calls fi_endpoint.
        code(unsafe { endpoint::open(shared(domain), info, out, context) })
    })
}

unsafe extern "C" fn open_endpoint2(
    domain: *mut fid_domain,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_endpoint2", || {
        if flags != 0 {
            return -FI_ENOSYS;
        }
        // SAFETY: as libfabric calls fi_endpoint2.
        code(unsafe { endpoint::open(shared(domain), info, out, context) })
    })
}

unsafe extern "C" fn open_scalable_endpoint(
    domain: *mut fid_domain,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_scalable_ep", || {
        // SAFETY: as libfabric calls fi_scalable_ep.
        code(unsafe { endpoint::open_scalable(shared(domain), info, out, context) })
    })
}

unsafe extern "C" fn open_shared_transmit(
    domain: *mut fid_domain,
    attr: *mut fi_tx_attr,
    out: *mut *mut fid_stx,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_stx_context", || {
        // SAFETY: as libfabric calls fi_stx_context.
        code(unsafe { endpoint::open_shared_transmit(shared(domain), attr, out, context) })
    })
}

unsafe extern "C" fn open_shared_receive(
    domain: *mut fid_domain,
    attr: *mut fi_rx_attr,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_srx_context", || {
        // SAFETY: as libfabric calls fi_srx_context.
        code(unsafe { endpoint::open_shared_receive(shared(domain), attr, out, context) })
    })
}

unsafe extern "C" fn query_atomic(
    _domain: *mut fid_domain,
    datatype: fi_datatype,
    op: fi_op,
    attr: *mut fi_atomic_attr,
    flags: u64,
) -> c_int {
    entry("fi_query_atomic", || {
        // SAFETY: null or the application's structure.
        let Some(attr) = (unsafe { attr.as_mut() }) else { return -FI_EINVAL };
        code(endpoint::atomic::query(datatype, op, flags).map(|found| *attr = found))
    })
}

unsafe extern "C" fn query_collective(
    _domain: *mut fid_domain,
    coll: fi_collective_op,
    attr: *mut fi_collective_attr,
    _flags: u64,
) -> c_int {
    // SAFETY: as libfabric calls fi_query_collective.
    entry("fi_query_collective", || code(unsafe { endpoint::collective::query(coll, attr) }))
}
