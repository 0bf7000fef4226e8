//! `struct fid_cq`: completion queues in every format, and blocking on them.

use super::blocking::{Blocking, begin_waiting};
use super::domain::Domain;
use super::guard::{data_entry, entries, entry, offers, told, waiting_entry};
use super::lock::{Guard, Locked};
use super::own::{Object, close as close_object, ours, own};
use super::source::Source;
use super::table::{Operations, SLACK, Slack, Table, cancellable};
use super::wait::{Conditional, Waitable, Waiter};
use super::wait_set::WaitObject;
use crate::protocol::Cause;
use libfabric_sys::{
    FI_ADDR_NOTAVAIL, FI_AFFINITY, FI_CLASS_CQ, FI_CQ_COND_NONE, FI_CQ_COND_THRESHOLD,
    FI_CQ_FORMAT_CONTEXT, FI_CQ_FORMAT_DATA, FI_CQ_FORMAT_MSG, FI_CQ_FORMAT_TAGGED,
    FI_CQ_FORMAT_UNSPEC, FI_EAGAIN, FI_EAVAIL, FI_EINVAL, FI_ENOSYS, fi_addr_t, fi_cq_attr,
    fi_cq_data_entry, fi_cq_entry, fi_cq_err_entry, fi_cq_err_entry_1_20, fi_cq_msg_entry,
    fi_cq_tagged_entry, fi_ops, fi_ops_cq, fi_ops_cq_2_7, fi_version, fid, fid_cq,
};
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::ops::ControlFlow;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Default number of entries of a queue.
const DEFAULT_SIZE: usize = 4096;
/// Most entries that are allocated when the queue is opened; a larger queue grows when needed.
const PREALLOCATE: usize = 64 * 1024;

/// One completion, in the widest format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) context: u64,
    pub(crate) flags: u64,
    pub(crate) len: usize,
    pub(crate) buffer: u64,
    pub(crate) data: u64,
    pub(crate) tag: u64,
    pub(crate) source: fi_addr_t,
}

/// One failed operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorEntry {
    pub(crate) entry: Entry,
    pub(crate) error: i32,
    pub(crate) cause: i32,
    pub(crate) overflow: usize,
    /// Number of completions that were written before it.
    at: u64,
}

/// The queue, under the domain's lock.
#[derive(Debug)]
pub(crate) struct CqState {
    entries: VecDeque<Entry>,
    errors: VecDeque<ErrorEntry>,
    /// Number of entries ever written, and ever read.
    written: u64,
    read: u64,
    size: usize,
    format: u32,
    /// Where a read of the empty queue wants the entries that complete during it.
    reader: Reader,
    pub(crate) source: Source,
}

/// The application's arrays, during a read of an empty queue: operations that complete then write their
/// entries straight there.
#[derive(Debug)]
struct Reader {
    buffer: *mut c_void,
    sources: *mut fi_addr_t,
    count: usize,
    /// Entries written.
    n: usize,
}

impl Reader {
    const NONE: Self = Self { buffer: null_mut(), sources: null_mut(), count: 0, n: 0 };
}

/// Takes the arrays back when the read returns or panics, because they belong to its caller.
struct Lent<'a>(&'a CompletionQueue, &'a Guard<'a>);

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.0.state(self.1).reader.count = 0;
    }
}

impl CqState {
    /// False when the application must read before it may start more operations, of those that write an `entry` or of
    /// those that write none unless they fail.
    #[inline]
    pub(crate) fn has_room(&self, entry: bool) -> bool {
        let entries = if entry { self.entries.len() } else { 0 };
        entries + self.errors.len() < self.size
    }

    /// False when more entries wait to be read than the queue was made for: what has arrived is left where it is. One
    /// that is exactly full is not at fault, and another queue of its endpoint may be read first.
    #[inline]
    pub(crate) fn is_within_size(&self) -> bool {
        self.entries.len() + self.errors.len() <= self.size
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, entry: Entry) {
        self.written += 1;
        let Reader { buffer, sources, count, n } = self.reader;
        if n < count {
            self.reader.n = n + 1;
            self.read += 1;
            // SAFETY: `n < count`, and the read that lent its arrays has not returned.
            return unsafe { write(self.format, buffer, sources, n, &entry) };
        }
        self.queue(entry);
    }

    #[inline(always)]
    fn queue(&mut self, entry: Entry) {
        self.entries.push_back(entry);
        self.source.notify();
    }

    pub(crate) fn push_error(&mut self, entry: Entry, error: i32, cause: i32, overflow: usize) {
        let at = self.written;
        // Completions after the error must be read after it, so they go to the queue.
        self.reader.count = self.reader.n;
        self.errors.push_back(ErrorEntry { entry, error, cause, overflow, at });
        self.source.notify();
    }

    /// Completions that come before the next error.
    #[inline]
    fn readable(&self) -> usize {
        match self.errors.front() {
            None => self.entries.len(),
            Some(error) => (error.at - self.read) as usize,
        }
    }

    /// The result of a read that found no entry.
    #[inline]
    fn nothing(&self) -> isize {
        if self.errors.is_empty() || self.readable() > 0 {
            -(FI_EAGAIN as isize)
        } else {
            -(FI_EAVAIL as isize)
        }
    }

    #[inline]
    fn has_events(&self) -> bool {
        !self.entries.is_empty() || !self.errors.is_empty()
    }
}

/// The part of a completion queue that endpoints share.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) domain: Arc<Domain>,
    pub(crate) state: Locked<CqState>,
    threshold: bool,
    wait: WaitObject,
    /// That of the source.
    signaled: Arc<AtomicBool>,
}

#[repr(C)]
struct CqFid {
    fid: fid_cq,
    slack: Slack,
    shared: Arc<CompletionQueue>,
}

// SAFETY: it begins with a fid_cq; nothing else has this table.
unsafe impl Object for CqFid {
    type Shown = fid_cq;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> =
    Table::new(fi_ops { close: Some(close), control: Some(control), ..fi_ops::STUBS });

static OPS: Table<fi_ops_cq_2_7> = Table::new(fi_ops_cq_2_7 {
    base: fi_ops_cq {
        read: Some(read),
        readfrom: Some(readfrom),
        readerr: Some(readerr),
        sread: cancellable!(
            sread: fn(*mut fid_cq, *mut c_void, usize, *const c_void, c_int) -> isize
        ),
        sreadfrom: cancellable!(
            sreadfrom: fn(
                *mut fid_cq, *mut c_void, usize, *mut fi_addr_t, *const c_void, c_int
            ) -> isize
        ),
        signal: Some(signal),
        strerror: Some(strerror),
        ..fi_ops_cq_2_7::STUBS.base
    },
    ..fi_ops_cq_2_7::STUBS
});

/// `fi_cq_open`. Errors: EINVAL; ENOSYS for FI_WAIT_POLLFD; EMFILE, ENFILE, ENOMEM.
///
/// # Safety
/// As libfabric calls `fi_cq_open`.
pub(crate) unsafe fn open(
    domain: &Arc<Domain>,
    attr: *mut fi_cq_attr,
    out: *mut *mut fid_cq,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: the application's attributes, valid during the call.
    let attr = unsafe { attr.as_mut() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    offers("fi_cq_open", attr.flags, FI_AFFINITY)?;
    let format = match attr.format {
        FI_CQ_FORMAT_UNSPEC => FI_CQ_FORMAT_CONTEXT,
        format @ FI_CQ_FORMAT_CONTEXT..=FI_CQ_FORMAT_TAGGED => format,
        _ => return Err(FI_EINVAL),
    };
    attr.format = format;
    if !matches!(attr.wait_cond, FI_CQ_COND_NONE | FI_CQ_COND_THRESHOLD) {
        return Err(FI_EINVAL);
    }
    // SAFETY: the application's wait set.
    let wait = unsafe { WaitObject::open(attr.wait_obj, attr.wait_set) }?;
    let size = if attr.size == 0 { DEFAULT_SIZE } else { attr.size };
    let source = Source::new(wait.waiter.clone());
    let shared = Arc::new(CompletionQueue {
        signaled: source.signaled.clone(),
        domain: domain.clone(),
        state: Locked::new(CqState {
            entries: VecDeque::with_capacity(size.min(PREALLOCATE)),
            errors: VecDeque::new(),
            written: 0,
            read: 0,
            size,
            format,
            reader: Reader::NONE,
            source,
        }),
        threshold: attr.wait_cond == FI_CQ_COND_THRESHOLD,
        wait,
    });
    begin_waiting(&shared, &shared.wait, domain)?;
    let cq = Box::new(CqFid {
        fid: fid_cq {
            fid: fid { fclass: FI_CLASS_CQ, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr().cast(),
        },
        slack: SLACK,
        shared,
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(cq).cast() };
    Ok(())
}

/// The shared part of a completion queue.
/// Errors: EINVAL for an object of another provider.
///
/// # Safety
/// `cq` is null or an open object.
pub(crate) unsafe fn shared<'a>(cq: *mut fid) -> Result<&'a Arc<CompletionQueue>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own::<CqFid>(cq) }.map(|own| &own.shared)
}

impl CompletionQueue {
    #[inline]
    #[allow(clippy::mut_from_ref)] // see Locked::get
    fn state<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut CqState {
        // SAFETY: guards passed here belong to this queue's domain, and each caller uses the result for
        // one step that reaches no endpoint.
        unsafe { self.state.get(guard) }
    }

    #[allow(clippy::mut_from_ref)] // see Locked::get
    pub(super) fn source<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut Source {
        &mut self.state(guard).source
    }

    /// Progresses the endpoints that report to this queue.
    #[inline]
    fn progress(&self, guard: &Guard<'_>) {
        Source::progress(&self.state, |state| &mut state.source, guard);
    }

    /// Whether there is an entry or error to read, after a turn of progress.
    pub(crate) fn poll(&self, guard: &Guard<'_>) -> bool {
        if !self.state(guard).has_events() {
            self.progress(guard);
        }
        self.state(guard).has_events()
    }

    /// Reads up to `count` completions into `buffer`, and their sources if `sources` is not null.
    ///
    /// # Safety
    /// `buffer` has room for `count` entries of the queue's format, `sources` for `count` addresses.
    #[inline(always)]
    unsafe fn read(
        &self,
        guard: &Guard<'_>,
        buffer: *mut c_void,
        count: usize,
        sources: *mut fi_addr_t,
    ) -> isize {
        let state = self.state(guard);
        state.source.disarm_fd(guard);
        if !state.has_events() {
            state.reader = Reader { buffer, sources, count, n: 0 };
            let _lent = Lent(self, guard);
            self.progress(guard);
            let state = self.state(guard);
            return match state.reader.n {
                0 => state.nothing(),
                n => n as isize,
            };
        }
        // Applications read no entries to ask for progress alone.
        if count == 0 {
            self.progress(guard);
        }
        let state = self.state(guard);
        let n = state.readable().min(count);
        for i in 0..n {
            let Some(entry) = state.entries.pop_front() else { break };
            // SAFETY: `i < count`; the caller vouches for both arrays.
            unsafe { write(state.format, buffer, sources, i, &entry) };
        }
        state.read += n as u64;
        if state.entries.is_empty() {
            // The next entries use the same memory, which the processor has in its caches.
            state.entries.clear();
        }
        if n == 0 { state.nothing() } else { n as isize }
    }

    /// One turn of a blocking read; `call` is its state across turns.
    ///
    /// # Safety
    /// As [`CompletionQueue::read`]; `cond` is a count if the queue was opened for thresholds.
    unsafe fn blocking_read(
        &self,
        call: &mut Option<Blocking>,
        buffer: *mut c_void,
        count: usize,
        sources: *mut fi_addr_t,
        cond: *const c_void,
        timeout_ms: i32,
    ) -> ControlFlow<isize> {
        if self.wait.waiter.is_none() {
            return ControlFlow::Break(-(FI_ENOSYS as isize));
        }
        let wanted = if self.threshold { cond.addr().clamp(1, count.max(1)) } else { 1 };
        // fi_cq.3: a thread that is signaled returns to its caller, with FI_EAGAIN if there is nothing to read.
        let call = call.get_or_insert_with(|| Blocking::begin(&self.domain, timeout_ms, true));
        let turn = call.turn(
            &self.domain,
            &self.state,
            |state| &mut state.source,
            |guard| {
                let state = self.state(guard);
                // With more entries than its size the queue takes in no message that would complete another one.
                let wanted = wanted.min(state.size);
                if state.readable() < wanted && state.errors.is_empty() {
                    self.progress(guard);
                }
                let state = self.state(guard);
                // A signal does not keep back entries (fi_cq.3); it then ends the next wait.
                let lacks = state.readable() < wanted && state.errors.is_empty();
                if lacks && !self.signaled.swap(false, Ordering::Acquire) {
                    return None;
                }
                // SAFETY: the caller vouches.
                Some(unsafe { self.read(guard, buffer, count, sources) })
            },
        );
        // A timeout and a signal still deliver the entries, though fewer than the threshold.
        turn.map_break(|result| {
            // SAFETY: the caller vouches.
            result.unwrap_or_else(|| unsafe {
                self.read(&self.domain.lock.lock(), buffer, count, sources)
            })
        })
    }
}

impl Waitable for CompletionQueue {
    fn try_wait(&self) -> bool {
        let guard = self.domain.lock.lock();
        !self.poll(&guard) && self.state(&guard).source.arm_fd(&guard)
    }

    fn end_wait(&self) {
        let guard = self.domain.lock.lock();
        self.state(&guard).source.disarm_fd(&guard);
    }
}

impl Conditional for CompletionQueue {
    fn take_condition(&self, guard: &Guard<'_>) -> Option<Arc<Waiter>> {
        self.state(guard).source.take_condition()
    }
}

/// # Safety
/// `buffer` has room for entry `i` of `format`, and `sources` for source `i` unless it is null.
#[inline(always)]
unsafe fn write(
    format: u32,
    buffer: *mut c_void,
    sources: *mut fi_addr_t,
    i: usize,
    entry: &Entry,
) {
    // SAFETY: the caller vouches.
    unsafe {
        write_entry(format, buffer, i, entry);
        if !sources.is_null() {
            *sources.add(i) = entry.source;
        }
    }
}

/// # Safety
/// `buffer` has room for entry `i` of `format`.
#[inline(always)]
unsafe fn write_entry(format: u32, buffer: *mut c_void, i: usize, e: &Entry) {
    let op_context = std::ptr::with_exposed_provenance_mut(e.context as usize);
    let buf = std::ptr::with_exposed_provenance_mut(e.buffer as usize);
    let Entry { flags, len, data, tag, .. } = *e;
    // SAFETY: the caller vouches; the pointer may be less aligned than the entry.
    unsafe {
        match format {
            FI_CQ_FORMAT_TAGGED => {
                buffer.cast::<fi_cq_tagged_entry>().add(i).write_unaligned(fi_cq_tagged_entry {
                    op_context,
                    flags,
                    len,
                    buf,
                    data,
                    tag,
                });
            }
            FI_CQ_FORMAT_DATA => buffer
                .cast::<fi_cq_data_entry>()
                .add(i)
                .write_unaligned(fi_cq_data_entry { op_context, flags, len, buf, data }),
            FI_CQ_FORMAT_MSG => buffer
                .cast::<fi_cq_msg_entry>()
                .add(i)
                .write_unaligned(fi_cq_msg_entry { op_context, flags, len }),
            _ => buffer.cast::<fi_cq_entry>().add(i).write_unaligned(fi_cq_entry { op_context }),
        }
    }
}

entries! { entry -> c_int;
    close "fi_close(cq)" (fid: *mut fid) => close_object(fid, |object: &CqFid| {
        let cq = &object.shared;
        cq.wait.close(|| cq.domain.lock.may_close(|_| Arc::strong_count(cq) > 1))
    });
    control "fi_control(cq)" (fid: *mut fid, command: c_int, arg: *mut c_void)
        => ours::<CqFid>(fid).shared.wait.control(command, arg);
}

#[inline(always)]
unsafe fn read_common(
    cq: *mut fid_cq,
    buffer: *mut c_void,
    count: usize,
    sources: *mut fi_addr_t,
) -> isize {
    // SAFETY: a queue of this provider and the application's arrays.
    unsafe {
        let cq = &(*cq.cast::<CqFid>()).shared;
        let n = cq.read(&cq.domain.lock.lock(), buffer, count, sources);
        if n == -(FI_EAGAIN as isize) {
            cq.domain.give_way();
        }
        n
    }
}

unsafe extern "C" fn read(cq: *mut fid_cq, buffer: *mut c_void, count: usize) -> isize {
    // SAFETY: as libfabric calls fi_cq_read.
    data_entry("fi_cq_read", || unsafe { read_common(cq, buffer, count, std::ptr::null_mut()) })
}

unsafe extern "C" fn readfrom(
    cq: *mut fid_cq,
    buffer: *mut c_void,
    count: usize,
    sources: *mut fi_addr_t,
) -> isize {
    // SAFETY: as libfabric calls fi_cq_readfrom.
    data_entry("fi_cq_readfrom", || unsafe { read_common(cq, buffer, count, sources) })
}

unsafe extern "C-unwind" fn sread(
    cq: *mut fid_cq,
    buffer: *mut c_void,
    count: usize,
    cond: *const c_void,
    timeout: c_int,
) -> isize {
    let mut call = None;
    let turn = || {
        // SAFETY: as libfabric calls fi_cq_sread.
        unsafe {
            let cq = &(*cq.cast::<CqFid>()).shared;
            cq.blocking_read(&mut call, buffer, count, std::ptr::null_mut(), cond, timeout)
        }
    };
    // SAFETY: nothing here is to be dropped.
    unsafe { waiting_entry("fi_cq_sread", turn) }
}

unsafe extern "C-unwind" fn sreadfrom(
    cq: *mut fid_cq,
    buffer: *mut c_void,
    count: usize,
    sources: *mut fi_addr_t,
    cond: *const c_void,
    timeout: c_int,
) -> isize {
    let mut call = None;
    let turn = || {
        // SAFETY: as libfabric calls fi_cq_sreadfrom.
        unsafe {
            let cq = &(*cq.cast::<CqFid>()).shared;
            cq.blocking_read(&mut call, buffer, count, sources, cond, timeout)
        }
    };
    // SAFETY: nothing here is to be dropped.
    unsafe { waiting_entry("fi_cq_sreadfrom", turn) }
}

unsafe extern "C" fn readerr(cq: *mut fid_cq, buffer: *mut fi_cq_err_entry, _flags: u64) -> isize {
    data_entry("fi_cq_readerr", || {
        // SAFETY: a queue of this provider and the application's entry.
        unsafe {
            let cq = &(*cq.cast::<CqFid>()).shared;
            let Some(out) = buffer.as_mut() else { return -(FI_EINVAL as isize) };
            let guard = cq.domain.lock.lock();
            let state = cq.state(&guard);
            // An error is due once the completions before it have been read.
            if state.readable() > 0 {
                return -(FI_EAGAIN as isize);
            }
            let Some(error) = state.errors.pop_front() else { return -(FI_EAGAIN as isize) };
            let api = cq.domain.fabric.api_version();
            out.op_context = std::ptr::with_exposed_provenance_mut(error.entry.context as usize);
            out.flags = error.entry.flags;
            out.len = error.entry.len;
            out.buf = std::ptr::with_exposed_provenance_mut(error.entry.buffer as usize);
            out.data = error.entry.data;
            out.tag = error.entry.tag;
            out.olen = error.overflow;
            out.err = error.error;
            out.prov_errno = error.cause;
            if api >= fi_version(1, 5) {
                out.err_data_size = 0;
            } else {
                out.err_data = std::ptr::null_mut();
            }
            if api >= fi_version(1, 20) {
                (*buffer.cast::<fi_cq_err_entry_1_20>()).src_addr = error.entry.source;
            }
            1
        }
    })
}

unsafe extern "C" fn signal(cq: *mut fid_cq) -> c_int {
    data_entry("fi_cq_signal", || {
        // SAFETY: a queue of this provider.
        let cq = unsafe { &(*cq.cast::<CqFid>()).shared };
        let Some(waiter) = &cq.wait.waiter else { return -FI_ENOSYS };
        // Without the lock: under FI_THREAD_DOMAIN the thread that waits need not expect another one inside.
        cq.signaled.store(true, Ordering::Release);
        waiter.ring();
        0
    })
}

unsafe extern "C" fn strerror(
    _cq: *mut fid_cq,
    cause: c_int,
    _err_data: *const c_void,
    buffer: *mut c_char,
    len: usize,
) -> *const c_char {
    entry("fi_cq_strerror", || {
        // SAFETY: the application's buffer has `len` bytes.
        unsafe { told(cause_text(cause), buffer, len) }
    })
}

/// The sentence of a `prov_errno`, as a C string that is never freed.
fn cause_text(cause: i32) -> &'static std::ffi::CStr {
    static TEXTS: std::sync::OnceLock<Vec<(i32, std::ffi::CString)>> = std::sync::OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        (1..64)
            .filter_map(Cause::from_number)
            .filter_map(|c| Some((c as i32, std::ffi::CString::new(c.text()).ok()?)))
            .collect()
    });
    texts
        .iter()
        .find(|(number, _)| *number == cause)
        .map_or(c"no provider-specific error", |(_, text)| text.as_c_str())
}

/// Source of entries without a known source.
pub(crate) const NO_SOURCE: fi_addr_t = FI_ADDR_NOTAVAIL;
