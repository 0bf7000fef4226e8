//! `struct fid_poll`: polls several queues and counters at once.

use super::cntr::{self, Counter};
use super::cq::{self, CompletionQueue};
use super::domain::Domain;
use super::guard::{code, entries, entry};
use super::own::close as close_object;
use super::table::{Operations, SLACK, Slack, Table};
use libfabric_sys::{
    FI_CLASS_CNTR, FI_CLASS_CQ, FI_CLASS_POLL, FI_EINVAL, fi_ops, fi_ops_poll, fi_poll_attr, fid,
    fid_poll,
};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

enum Object {
    Queue(Arc<CompletionQueue>),
    /// A counter, and its number of events when it was last reported.
    Counter(Arc<Counter>, u64),
}

struct Member {
    fid: usize,
    context: usize,
    object: Object,
}

#[repr(C)]
struct PollFid {
    fid: fid_poll,
    slack: Slack,
    domain: Arc<Domain>,
    members: Mutex<Vec<Member>>,
}

impl PollFid {
    fn members(&self) -> MutexGuard<'_, Vec<Member>> {
        match self.members.lock() {
            Ok(members) => members,
            Err(poisoned) => poisoned.into_inner(),
        }
    }
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops { close: Some(close), ..fi_ops::STUBS });

static OPS: Table<fi_ops_poll> = Table::new(fi_ops_poll {
    poll: Some(poll),
    poll_add: Some(add),
    poll_del: Some(remove),
    ..fi_ops_poll::STUBS
});

/// `fi_poll_open`. Errors: EINVAL.
///
/// # Safety
/// As libfabric calls `fi_poll_open`.
pub(crate) unsafe fn open(
    domain: &Arc<Domain>,
    attr: *mut fi_poll_attr,
    out: *mut *mut fid_poll,
) -> Result<(), i32> {
    // SAFETY: the application's attributes, valid during the call.
    if out.is_null() || unsafe { attr.as_ref() }.is_some_and(|attr| attr.flags != 0) {
        return Err(FI_EINVAL);
    }
    let set = Box::new(PollFid {
        fid: fid_poll {
            fid: fid {
                fclass: FI_CLASS_POLL,
                context: std::ptr::null_mut(),
                ops: FID_OPS.as_mut_ptr(),
            },
            ops: OPS.as_mut_ptr(),
        },
        slack: SLACK,
        domain: domain.clone(),
        members: Mutex::new(Vec::new()),
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(set).cast() };
    Ok(())
}

entries! { entry -> c_int;
    close "fi_close(poll)" (fid: *mut fid) => close_object(fid, |object: &PollFid| object.domain.lock.may_close(|_| false));
}

unsafe extern "C" fn add(set: *mut fid_poll, object: *mut fid, _flags: u64) -> c_int {
    entry("fi_poll_add", || {
        // SAFETY: a set of this provider, and a queue or counter of this provider.
        unsafe {
            let set = &*set.cast::<PollFid>();
            let Some(fid) = object.as_ref() else { return -FI_EINVAL };
            let kind = match fid.fclass {
                FI_CLASS_CQ => cq::shared(object).map(|cq| Object::Queue(cq.clone())),
                FI_CLASS_CNTR => cntr::shared(object).map(|cntr| Object::Counter(cntr.clone(), 0)),
                _ => return -FI_EINVAL,
            };
            let kind = match kind {
                Ok(kind) => kind,
                Err(error) => return -error,
            };
            set.members().push(Member {
                fid: object.addr(),
                context: fid.context.expose_provenance(),
                object: kind,
            });
        }
        0
    })
}

unsafe extern "C" fn remove(set: *mut fid_poll, object: *mut fid, _flags: u64) -> c_int {
    entry("fi_poll_del", || {
        // SAFETY: a set of this provider.
        let set = unsafe { &*set.cast::<PollFid>() };
        let mut members = set.members();
        let before = members.len();
        members.retain(|member| member.fid != object.addr());
        code(if members.len() < before { Ok(()) } else { Err(FI_EINVAL) })
    })
}

unsafe extern "C" fn poll(set: *mut fid_poll, contexts: *mut *mut c_void, count: c_int) -> c_int {
    entry("fi_poll", || {
        // SAFETY: a set of this provider.
        let set = unsafe { &*set.cast::<PollFid>() };
        let room = usize::try_from(count).unwrap_or(0);
        let mut found = 0;
        for member in set.members().iter_mut() {
            if found == room {
                break;
            }
            let ready = match &mut member.object {
                Object::Queue(cq) => cq.poll(&cq.domain.lock.lock()),
                Object::Counter(cntr, seen) => {
                    let now = cntr.poll(&cntr.domain.lock.lock());
                    std::mem::replace(seen, now) != now
                }
            };
            if ready {
                // SAFETY: the application's array has `count` elements and `found < count`.
                unsafe {
                    *contexts.add(found) = std::ptr::with_exposed_provenance_mut(member.context);
                }
                found += 1;
            }
        }
        found as c_int
    })
}
