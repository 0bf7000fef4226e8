//! `struct fid_av_set`: an ordered subset of an address vector (fi_av_set.3), from which a collective
//! group can be made.

use super::vector::{AddressVector, shared};
use crate::ofi::guard::{code, entries, entry, making_entry};
use crate::ofi::lock::{Guard, Locked};
use crate::ofi::own::{Object, close as close_object, own};
use crate::ofi::table::{Operations, SLACK, Slack, Table};
use crate::sys::numbers::NumberSet;
use libfabric_sys::{
    FI_ADDR_NOTAVAIL, FI_CLASS_AV_SET, FI_EINVAL, FI_EOPNOTSUPP, FI_UNIVERSE, fi_addr_t,
    fi_av_set_attr, fi_ops, fi_ops_av_set, fid, fid_av, fid_av_set,
};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The result of `fi_av_set_addr`: an application that joins passes the set itself.
pub(crate) const SET_ADDRESS: fi_addr_t = 1 << 61;

#[repr(C)]
pub(crate) struct AvSet {
    fid: fid_av_set,
    slack: Slack,
    pub(crate) av: Arc<AddressVector>,
    members: Locked<Vec<fi_addr_t>>,
}

// SAFETY: it begins with a fid_av_set; nothing else has this table.
unsafe impl Object for AvSet {
    type Shown = fid_av_set;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops { close: Some(close), ..fi_ops::STUBS });

static OPS: Table<fi_ops_av_set> = Table::new(fi_ops_av_set {
    set_union: Some(union),
    intersect: Some(intersect),
    diff: Some(diff),
    insert: Some(insert),
    remove: Some(remove),
    addr: Some(addr),
    ..fi_ops_av_set::STUBS
});

/// The set behind a handle. Errors: EINVAL for an object of another provider.
///
/// # Safety
/// `set` is null or an open object.
pub(crate) unsafe fn av_set<'a>(set: *const fid_av_set) -> Result<&'a AvSet, i32> {
    // SAFETY: the caller vouches.
    unsafe { own::<AvSet>(set.cast()) }
}

impl AvSet {
    /// The members, in their order.
    #[allow(clippy::mut_from_ref)] // see Locked::get
    pub(crate) fn members<'g>(&'g self, guard: &'g Guard<'_>) -> &'g mut Vec<fi_addr_t> {
        // SAFETY: guards passed here belong to the vector's domain; each caller uses the result for one
        // step that reaches no other set mutably.
        unsafe { self.members.get(guard) }
    }

    fn knows(&self, address: fi_addr_t, guard: &Guard<'_>) -> bool {
        self.av.follow(guard);
        // SAFETY: the guard belongs to the vector's domain, and the result is not kept.
        unsafe { self.av.state.get(guard) }.address(address).is_some()
    }
}

/// `fi_av_set`. Errors: EINVAL; EOPNOTSUPP for a communication key.
pub(super) unsafe extern "C" fn open(
    av: *mut fid_av,
    attr: *mut fi_av_set_attr,
    out: *mut *mut fid_av_set,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_av_set", || {
        // SAFETY: an address vector of this provider, and the application's attributes.
        code(unsafe {
            attr.as_ref().filter(|_| !out.is_null()).ok_or(FI_EINVAL).and_then(|attr| {
                let set = make(shared(av.cast())?, attr, context)?;
                *out = Box::into_raw(set).cast();
                Ok(())
            })
        })
    })
}

fn make(
    av: &Arc<AddressVector>,
    attr: &fi_av_set_attr,
    context: *mut c_void,
) -> Result<Box<AvSet>, i32> {
    if attr.comm_key_size > 0 {
        return Err(FI_EOPNOTSUPP);
    }
    let set = Box::new(AvSet {
        fid: fid_av_set {
            fid: fid { fclass: FI_CLASS_AV_SET, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr(),
        },
        slack: SLACK,
        av: av.clone(),
        members: Locked::new(Vec::new()),
    });
    let guard = av.domain.lock.control();
    av.follow(&guard);
    // SAFETY: the guard belongs to the vector's domain; one short step.
    let entries = unsafe { av.state.get(&guard) }.entries() as fi_addr_t;
    let (start, end) = (attr.start_addr, attr.end_addr);
    let (start, end, stride) = if attr.flags & FI_UNIVERSE != 0 {
        (0, entries, 1)
    } else if start == FI_ADDR_NOTAVAIL && end == FI_ADDR_NOTAVAIL {
        (0, 0, 1)
    } else if start > end || end >= entries {
        return Err(FI_EINVAL);
    } else {
        (start, end + 1, attr.stride.max(1))
    };
    let step = usize::try_from(stride).map_err(|_| FI_EINVAL)?;
    let members = (start..end).step_by(step).filter(|address| set.knows(*address, &guard));
    let members: Vec<_> = members.collect();
    *set.members(&guard) = members;
    drop(guard);
    Ok(set)
}

entries! { entry -> c_int;
    close "fi_close(av_set)" (fid: *mut fid) => close_object(fid, |object: &AvSet| object.av.domain.lock.may_close(|_| false));
}

/// To look for each of many members at little cost.
fn numbers(members: &[fi_addr_t]) -> NumberSet<fi_addr_t> {
    members.iter().copied().collect()
}

/// Combines the members of `src` into `dst`.
///
/// # Safety
/// Both are null or open sets.
unsafe fn combine(
    dst: *mut fid_av_set,
    src: *const fid_av_set,
    change: impl FnOnce(&mut Vec<fi_addr_t>, &[fi_addr_t]),
) -> c_int {
    // SAFETY: the caller vouches.
    let (Ok(dst), Ok(src)) = (unsafe { (av_set(dst), av_set(src)) }) else { return -FI_EINVAL };
    if !Arc::ptr_eq(&dst.av, &src.av) {
        return -FI_EINVAL;
    }
    let guard = dst.av.domain.lock.control();
    let others = src.members(&guard).clone();
    change(dst.members(&guard), &others);
    0
}

unsafe extern "C" fn union(dst: *mut fid_av_set, src: *const fid_av_set) -> c_int {
    // SAFETY: as libfabric calls fi_av_set_union.
    entry("fi_av_set_union", || unsafe {
        combine(dst, src, |members, others| {
            let known = numbers(members);
            members.extend(others.iter().filter(|other| !known.contains(other)));
        })
    })
}

unsafe extern "C" fn intersect(dst: *mut fid_av_set, src: *const fid_av_set) -> c_int {
    // SAFETY: as libfabric calls fi_av_set_intersect.
    entry("fi_av_set_intersect", || unsafe {
        combine(dst, src, |members, others| {
            let others = numbers(others);
            members.retain(|member| others.contains(member));
        })
    })
}

unsafe extern "C" fn diff(dst: *mut fid_av_set, src: *const fid_av_set) -> c_int {
    // SAFETY: as libfabric calls fi_av_set_diff.
    entry("fi_av_set_diff", || unsafe {
        combine(dst, src, |members, others| {
            let others = numbers(others);
            members.retain(|member| !others.contains(member));
        })
    })
}

unsafe extern "C" fn insert(set: *mut fid_av_set, address: fi_addr_t) -> c_int {
    entry("fi_av_set_insert", || {
        // SAFETY: a set of this provider.
        let Ok(set) = (unsafe { av_set(set) }) else { return -FI_EINVAL };
        let guard = set.av.domain.lock.control();
        if !set.knows(address, &guard) || set.members(&guard).contains(&address) {
            return -FI_EINVAL;
        }
        set.members(&guard).push(address);
        0
    })
}

unsafe extern "C" fn remove(set: *mut fid_av_set, address: fi_addr_t) -> c_int {
    entry("fi_av_set_remove", || {
        // SAFETY: a set of this provider.
        let Ok(set) = (unsafe { av_set(set) }) else { return -FI_EINVAL };
        let guard = set.av.domain.lock.control();
        let members = set.members(&guard);
        let before = members.len();
        members.retain(|member| *member != address);
        if members.len() < before { 0 } else { -FI_EINVAL }
    })
}

unsafe extern "C" fn addr(_set: *mut fid_av_set, coll_addr: *mut fi_addr_t) -> c_int {
    entry("fi_av_set_addr", || {
        // SAFETY: the application's variable.
        let Some(to) = (unsafe { coll_addr.as_mut() }) else { return -FI_EINVAL };
        *to = SET_ADDRESS;
        0
    })
}
